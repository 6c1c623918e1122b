# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the family for AMD GPUs runs on a simulated one."""

from absl.testing import absltest, parameterized
from fused_qk import numbers_test as fused_test
from fused_qk.cases import Case, HeadCase, RowCase
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
      *simulator.groups("fused_qk_heads", "dtype", "aligned", "symbol"))
  def test_kernels(self, dtype, aligned, symbol, symbols):
    """Those for columns that lie together have no scales of tokens."""
    runs, own = "k_runs" in symbol, symbol.split("_no_")[0]
    with simulator.launched(self, symbols):
      self.check(HeadCase(
          dtype=dtype, layout="NHD" if runs else "asm",
          cache="" if runs and "cache_bytes" not in own else "float8_e4m3fn",
          token=not runs, scaled=runs, tokens=4, turned=0 if aligned else 64))


class RowsKernelsTest(fused_test.RowsTestCase):

  @parameterized.parameters(*simulator.groups("fused_qk_rows", "dtype", "dims"))
  def test_kernels(self, dtype, dims, symbols):
    with simulator.launched(self, symbols):
      self.check(RowCase(dtype=dtype, cols=dims[0] - 16, k_cols=512, tokens=2,
                         residual=True, kept=True, kind="float8_e4m3fn",
                         group=128))


if __name__ == "__main__":
  absltest.main()
