# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel for AMD GPUs runs on a simulated one, and runs right.

Calls come to a kernel by their sizes, dtype and features.
"""

from absl.testing import absltest, parameterized
from attention import calls
from attention import numbers_test as mha_test
from harness import simulator

from jax._src.aiter.core import dispatch

ARCH, = dispatch.architectures("rocm")
# Tiles of queries are up to 128 rows and tiles of keys up to 128: of two tiles
# of each the second is cut, and the window cuts the first.
SIZES = (dict(sq=150, sk=152, causal=True, window=(140, -1)),
         dict(sq=70, sk=152, hq=2, hk=1))


class MhaKernelsTest(mha_test.MhaTestCase):

  @parameterized.parameters(*calls.cover("rocm", ARCH))
  def test_kernels(self, call, dims, dtype, symbols):
    dqk, dv = dims
    options, _ = calls.CALLS[call]
    with simulator.launched(self, symbols):
      for sizes in SIZES:
        self.check(mha_test.Case(
            **dict(b=1, dtype=dtype, dqk=dqk, dv=dv) | sizes | options))

  def test_no_row_is_left_out(self):
    rows = calls.rows("rocm", ARCH, ("fast", "padded", "general"))
    self.assertNotEmpty(rows)
    for *_, symbols in calls.cover("rocm", ARCH):
      rows -= set(symbols)
    self.assertEmpty(rows)


if __name__ == "__main__":
  absltest.main()
