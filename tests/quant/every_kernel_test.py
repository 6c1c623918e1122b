# SPDX-License-Identifier: Apache-2.0
"""Every quantiser for AMD GPUs runs on a simulated one, and runs right.

Calls come to a kernel by what is asked for, their columns and dtype.
"""

import numpy as np
from absl.testing import absltest, parameterized
from harness import simulator
from harness.cases import DTYPES
from quant import oracle as quant_oracle

from jax.experimental import aiter


class QuantKernelsTest(parameterized.TestCase):

  def check(self, got, want):
    for a, b in zip(got, want, strict=True):
      np.testing.assert_array_equal(a, b.reshape(a.shape), strict=True)

  @parameterized.parameters(*simulator.groups("quant_", "op", "dtype", "dims"))
  def test_kernels(self, op, dtype, dims, symbols):
    rng = np.random.default_rng(0)
    rows, cols = (9, dims[0] - 3) if dims[0] else (131, 8201)
    if op != "quant_row":
      cols = 352
    x = rng.standard_normal((rows, cols)) * np.exp(
        2 * rng.standard_normal((rows, cols)))
    x = x.astype(DTYPES[dtype])
    with simulator.launched(self, symbols):
      getattr(self, op)(x)

  def quant_row(self, x):
    smooth = np.linspace(0.5, 2, x.shape[1], dtype=np.float32)
    for kind in ("int8", "float8_e4m3fn", "float8_e4m3fnuz"):
      self.check(aiter.smooth_quant(x[:5], smooth, quant_dtype=kind),
                 quant_oracle.token(x[:5], kind, smooth))
      # Some kernels are for rows of 16 columns and nothing besides.
      whole = x[:5, :x.shape[1] // 16 * 16]
      self.check(aiter.per_token_quant(whole, quant_dtype=kind),
                 quant_oracle.token(whole, kind))

  def quant_group(self, x):
    for group in (32, 64, 128):
      for t in (x, x[:, :-3]):
        self.check(
            aiter.per_group_quant(t, group_size=group, quant_dtype="int8"),
            quant_oracle.tiles(t, "int8", 1, group))
    for mode in ("up", "down", "even", "ceil"):
      self.check(
          aiter.mx_quant(x, quant_dtype="float8_e4m3fn", round_mode=mode),
          quant_oracle.tiles(x, "float8_e4m3fn", 1, 32, mode))
      q, scale = quant_oracle.tiles(x, "mxfp4", 1, 32, mode)
      self.check(aiter.mx_quant(x, round_mode=mode),
                 (quant_oracle.pack(q), scale))

  def quant_block(self, x):
    for kind in ("int8", "float8_e4m3fn", "float8_e4m3fnuz"):
      for t in (x, x[:, :-3]):
        self.check(aiter.per_block_quant(t, quant_dtype=kind),
                   quant_oracle.tiles(t, kind, 128, 128))

  def quant_amax(self, x):
    q, scale = aiter.per_tensor_quant(x, quant_dtype="int8")
    want = quant_oracle.f32_scale(quant_oracle.amax(x, None), "int8")
    self.check((q, scale), (quant_oracle.static(x, "int8", want), want))


if __name__ == "__main__":
  absltest.main()
