# SPDX-License-Identifier: Apache-2.0
"""Every kernel of float8 attention for AMD GPUs runs on a simulated one."""

from absl.testing import absltest, parameterized
from harness import simulator
from mha_fp8 import numbers_test as fp8_test
from mha_fp8.cases import Case


class Fp8KernelsTest(fp8_test.Fp8TestCase):

  @parameterized.parameters(
      *simulator.groups("mha_fp8_fwd", "dtype", "dims", "symbol"))
  def test_kernels(self, dtype, dims, symbol, symbols):
    d, = dims
    scale = "head" if "no_blocks" in symbol else "block"
    with simulator.launched(self, symbols):
      # Tiles of rows and of keys are cut, and windows cut what is whole.
      for options in (dict(causal=True, sink="bh"), dict(window=(60, 20)),
                      dict(packed=True, lengths=((150, 200), (9, 130)))):
        self.check(Case(**{
            **dict(kind=dtype, d=d, dv=d - 8, scale=scale,
                   lengths=((150, 300),), hq=2, hk=1), **options}))

  @parameterized.parameters(
      *simulator.groups("mha_fp8_columns", "dtype", "symbol"))
  def test_columns(self, dtype, symbol, symbols):
    del symbol
    with simulator.launched(self, symbols):
      self.check(Case(kind=dtype, d=64, lengths=((150, 300),), hq=2, hk=1))


if __name__ == "__main__":
  absltest.main()
