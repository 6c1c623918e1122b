# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the family for AMD GPUs runs on a simulated one."""

from absl.testing import absltest, parameterized
from fused_qk import numbers_test as fused_test
from fused_qk.cases import Case, HeadCase
from harness import simulator


class FusedKernelsTest(fused_test.FusedTestCase):

  @parameterized.parameters(
      *simulator.groups("fused_qk_latent", "dtype", "aligned"))
  def test_kernels(self, dtype, aligned, symbols):
    with simulator.launched(self, symbols):
      self.check(Case(dtype=dtype, lora=512 if aligned else 500,
                      cache="float8_e4m3fn", scaled=True, norm=True))


class HeadsKernelsTest(fused_test.HeadsTestCase):

  @parameterized.parameters(
      *simulator.groups("fused_qk_heads", "dtype", "aligned"))
  def test_kernels(self, dtype, aligned, symbols):
    with simulator.launched(self, symbols):
      self.check(HeadCase(dtype=dtype, layout="asm", cache="float8_e4m3fn",
                          token=True, tokens=4, turned=0 if aligned else 64))


if __name__ == "__main__":
  absltest.main()
