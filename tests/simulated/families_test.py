# SPDX-License-Identifier: Apache-2.0
"""Every family of kernels in the wheel has a test that runs all of them.

The environment names the families whose folder has an every_kernel_test.py
(KERNEL_FAMILIES).
"""

import os

from absl.testing import absltest

from jaxlib import gpu_aiter


class FamiliesTest(absltest.TestCase):

  def test_every_kernel_has_a_test(self):
    """There are kernels of each family, and of no other."""
    tested = os.environ["KERNEL_FAMILIES"].split()
    found = set()
    for kernel in gpu_aiter.load("rocm").table():
      families = [f for f in tested if kernel["op"].startswith(f + "_")]
      found.add(max(families, key=len, default=kernel["op"]))
    self.assertCountEqual(found, tested)


if __name__ == "__main__":
  absltest.main()
