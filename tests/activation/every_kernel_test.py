# SPDX-License-Identifier: Apache-2.0
"""Every kernel of activations for AMD GPUs runs on a simulated one.

A call comes to a kernel by what is asked for, its dtype and its columns.
"""

import dataclasses

from absl.testing import absltest, parameterized
from activation import numbers_test as activation_test
from harness import simulator


class ActivationKernelsTest(activation_test.ActivationTestCase):

  quantised = activation_test.QuantTest.quantised
  check_quantised = activation_test.QuantTest.check_quantised

  @parameterized.parameters(*simulator.groups(
      "activation_", "op", "dtype", "dims", "aligned"))
  def test_kernels(self, op, dtype, dims, aligned, symbols):
    # What has a bound is given a shorter row; what takes any, a longer one than
    # all others take.
    longest = max(
      k["dims"][0] for k in simulator.kernels() if k["op"] == op)
    cols = dims[0] - 16 if dims[0] else max(longest + 16, 2112)
    with simulator.launched(self, symbols):
      # There are kernels for columns that 4 divides, if 8 does not.
      for less in (0,) if aligned else (3, 4):
        case = activation_test.Case("silu", dtype, (3,), cols - less)
        if op == "activation_quant_row":
          self.check_quantised(case, "int8")
        elif op == "activation_quant_group":
          self.check_quantised(case, "float8_e4m3fn", group_size=64)
        else:
          # With a limit and without: there are kernels that know of none.
          for limit in (0.0, 2.5):
            self.check(dataclasses.replace(case, packed=aligned, limit=limit))


if __name__ == "__main__":
  absltest.main()
