# SPDX-License-Identifier: Apache-2.0
"""Every norm kernel for AMD GPUs runs on a simulated one, and runs right.

Calls come to a kernel by their columns and dtype.
"""

import functools

from absl.testing import absltest, parameterized
from harness import simulator
from norm import numbers_test as norm_test


class NormKernelsTest(norm_test.NormTestCase):

  # What holds a row is given a shorter one; what takes any, a longer one than
  # all that hold one, or an odd one.
  LONGEST = max(k["dims"][0] for k in simulator.kernels()
                if k["op"].startswith("norm_"))

  def cols(self, dims, aligned, multiple):
    if not aligned:
      return dims[0] or 8201
    return dims[0] - multiple if dims[0] else self.LONGEST + multiple

  @parameterized.parameters(
      *simulator.groups("norm_fwd|norm_bwd", "dtype", "dims", "aligned"))
  def test_kernels(self, dtype, dims, aligned, symbols):
    case = norm_test.Case(
        dtype="bf16" if dtype == "any" else dtype, lead=(3,),
        cols=self.cols(dims, aligned, 8), layer=True, residual=True)
    with simulator.launched(self, symbols):
      self.check(case)

  @parameterized.parameters(
      *simulator.groups("norm_quant", "dtype", "dims", "aligned"))
  def test_quantised(self, dtype, dims, aligned, symbols):
    case = norm_test.Case(
        dtype=dtype, lead=(3,), cols=self.cols(dims, aligned, 32))
    check = functools.partial(norm_test.QuantTest.check_quantised, self)
    with simulator.launched(self, symbols):
      check(case, "int8", x_scale=True)
      check(case, "float8_e4m3fnuz")
      if aligned:
        check(case, "mxfp4")


if __name__ == "__main__":
  absltest.main()
