# SPDX-License-Identifier: Apache-2.0
"""Every kernel of rotary embedding for AMD GPUs runs on a simulated one.

A call comes to a kernel by its dtype, the number of its pairs, what divides its
sizes, and what else the kernel leaves to another.
"""

from absl.testing import absltest, parameterized
from harness import simulator
from rope import numbers_test as rope_test


class RopeKernelsTest(rope_test.RopeTestCase):

  @parameterized.parameters(
      *simulator.groups("rope_rotate", "dtype", "dims", "symbol"))
  def test_kernels(self, dtype, dims, symbol, symbols):
    any_size = "_no_" not in symbol
    fast = "_gptj" in symbol
    eighth = "_by_four" in symbol or (dtype == "fp32" and "_full" in symbol)
    pairs = dims[0] or (9 if any_size else 40 if eighth else 20)
    case = rope_test.Case(
        dtype=dtype, s=17, h=3, hk=2, b=1, d=2 * pairs + 8, d_rot=2 * pairs,
        style="neox" if fast else "gptj", table="fp32", places="positions",
        full="_full" not in symbol and not fast)
    with simulator.launched(self, symbols):
      self.check(case)


if __name__ == "__main__":
  absltest.main()
