# SPDX-License-Identifier: Apache-2.0
"""Every kernel of sampling for AMD GPUs runs on a simulated one.

A call comes to a kernel by its dtype, and of top_k by k.
"""

import numpy as np
from absl.testing import absltest, parameterized
from harness import simulator, transforms
from sampling import numbers_test as sampling_test

from jax.experimental import aiter


class SamplingKernelsTest(sampling_test.SamplingTestCase):

  @parameterized.parameters(*simulator.groups(
      "sampling_(largest|bound|gather|weigh|histogram|bracket|collect|threshold"
      "|race|pick)", "dtype"))
  def test_draw(self, dtype, symbols):
    with simulator.launched(self, symbols):
      self.check(sampling_test.normal(2, 2500, dtype), top_k=30, top_p=0.8,
                 min_p=0.01, order="top_k_first")
      # More than is listed at once.
      self.check(sampling_test.normal(1, 2500, dtype, 0.5), top_p=0.9)

  @parameterized.parameters(*simulator.groups(
      "sampling_(gather|rank)", "dtype", "dims"))
  def test_top_k(self, dtype, dims, symbols):
    x = sampling_test.normal(2, 1500, dtype)
    k = dims[0] - 3 if dims[0] else 9
    with simulator.launched(self, symbols):
      got = aiter.top_k(x, k)
    transforms.assert_same(self, got, sampling_test.of_xla(x, k))

  @parameterized.parameters(*simulator.groups(
      "sampling_select", "dtype"))
  def test_select(self, dtype, symbols):
    x = sampling_test.normal(3, 9000, dtype)
    x[2] = np.round(x[2])
    with simulator.launched(self, symbols):
      self.check_select(x, np.array([0, 9, 5]), np.array([8995, 3000, 9000]),
                        1000)


if __name__ == "__main__":
  absltest.main()
