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
          token=not runs, scaled=runs, tokens=4, turned=0 if aligned else 64,
          neox="gptj" not in own))


class RowsKernelsTest(fused_test.RowsTestCase):

  @parameterized.parameters(
      *simulator.groups("fused_qk_rows", "dtype", "dims", "symbol"))
  def test_rows(self, dtype, dims, symbol, symbols):
    """Those for all calls are alone in having groups of 64."""
    own = symbol.split("_no_")[0]
    options = {} if "q_out" in own else dict(
        kind="float8_e4m3fn", group=128 if "norm" in own else 64)
    if "gate" in own:
      options |= dict(op="gated", heads=16, cols=128)
    else:
      options |= dict(cols=dims[0] - 16, k_cols=512, residual=True,
                      kept="kind" in options)
    with simulator.launched(self, symbols):
      self.check(RowCase(dtype=dtype, tokens=2, **options))

  @parameterized.parameters(
      *simulator.groups("fused_qk_turned", "dtype", "symbol"))
  def test_turned(self, dtype, symbol, symbols):
    """Those for runs of heads take whole rows of angles: 16 pairs."""
    with simulator.launched(self, symbols):
      self.check(RowCase(
          op="inverse", dtype=dtype, tokens=2, heads=18, cols=256, group=128,
          kind="float8_e4m3fn", pairs=16 if "short" in symbol else 8))


if __name__ == "__main__":
  absltest.main()
