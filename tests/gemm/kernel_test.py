# SPDX-License-Identifier: Apache-2.0
"""The GEMM kernels' arithmetic without a GPU, in Triton's interpreter.

Operands are such that every sum is exact in float32: small integers, or numbers
of few bits. What the kernels return must then be the rounded exact result, bit
for bit, whatever the tiles, splits, batches and ragged edges.
"""

import math

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness.triton_interpreter import Tensor, gpu_arithmetic

from third_party.aiter.kernels.core import activations
from third_party.aiter.kernels.gemm import gemm, mfma, odd

_BF16, _FP16 = ml_dtypes.bfloat16, np.float16
_FN, _FNUZ = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz
_E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float64)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def _fp8(rng, dtype, shape):
  """Multiples of 1/8 up to 4, which every float8 has."""
  return (rng.integers(-32, 33, shape) / 8).astype(dtype).astype(dtype)


class _Problem:
  """One product, what it must be, and the launches that make it."""

  def __init__(
      self, op="gemm_nt", dtype=_BF16, b_dtype=None, m=20, n=36, k=72, batch=1,
      shared=False, out=_BF16, bias=None, activation=0, splits=1,
      tile=(16, 16, 32), align=1, slices=1, xcds=1, scalar_scales=False,
      scale_powers=(-3, 4), bits=False, transposed_scales=False, module=gemm):
    rng = np.random.default_rng(m * 10000 + n * 100 + k)
    self.op, self.sizes, self.out_dtype = op, (batch, m, n, k), out
    self.module = module
    self.splits, self.tile, self.activation = splits, tile, activation
    self.align, self.slices, self.xcds = align, slices, xcds
    b_dtype = b_dtype or dtype
    b_batch = 1 if shared else batch
    rows = dict(a=(batch, m), b=(b_batch, n))
    self.flags = {_FP16: gemm.OUT_FP16.value, np.float32: gemm.OUT_F32.value
                 }.get(out, 0)
    self.scales = {}
    tensors, values = {}, {}
    for name, t in (("a", dtype), ("b", b_dtype)):
      count, extent = rows[name]
      if op == "gemm_mx":
        codes = rng.integers(0, 16, (count, extent, k), np.uint8)
        tensors[name] = codes[..., ::2] | codes[..., 1::2] << 4
        values[name] = _E2M1[codes]
      elif t in (_FN, _FNUZ):
        x = _fp8(rng, t, (count, extent, k))
        tensors[name] = x.view(np.uint8) if bits else x
        values[name] = x.astype(np.float64)
        if t is _FNUZ:
          self.flags |= {"a": gemm.A_FNUZ, "b": gemm.B_FNUZ}[name].value
      elif t is np.int8:
        tensors[name] = rng.integers(-128, 128, (count, extent, k)).astype(t)
        values[name] = tensors[name].astype(np.float64)
      else:
        tensors[name] = rng.integers(-4, 5, (count, extent, k)).astype(t)
        values[name] = tensors[name].astype(np.float64)
    powers = lambda *shape: rng.integers(*scale_powers, shape)
    if op == "gemm_row":
      for name, (count, extent) in rows.items():
        self.scales[name] = rng.random(
            (count, 1 if scalar_scales else extent), np.float32)
    elif op == "gemm_block":
      blocks = -(-k // 128)
      scale_rows = dict(a=(batch, m), b=(b_batch, -(-n // 128)))
      for name, (count, extent) in scale_rows.items():
        s = np.exp2(powers(count, extent, blocks))
        self.scales[name] = s.astype(np.float32)
        s = np.repeat(s, 128, -1)[..., :k]
        s = np.repeat(s, 128, 1)[:, :n] if name == "b" else s
        values[name] = values[name] * s
    elif op == "gemm_mx":
      for name, (count, extent) in rows.items():
        s = powers(count, extent, -(-k // 32))
        self.scales[name] = (s + 127).astype(np.uint8)
        s = np.repeat(np.exp2(s), 32, -1)[..., :k]
        values[name] = values[name] * s
    self.transposed_scales = transposed_scales
    self.exact = values["a"] @ np.swapaxes(values["b"], 1, 2)
    self.bias = None
    if bias is not None:
      self.bias = rng.integers(-9, 10, n).astype(bias)
      self.flags |= gemm.HAS_BIAS.value
      if bias == np.float32:
        self.flags |= gemm.BIAS_F32.value
    # As stored: nn has b [k, n], tn has a [k, m] too.
    if op in ("gemm_nn", "gemm_tn"):
      tensors["b"] = np.swapaxes(tensors["b"], 1, 2)
    if op == "gemm_tn":
      tensors["a"] = np.swapaxes(tensors["a"], 1, 2)
    self.tensors = {n: np.ascontiguousarray(t) for n, t in tensors.items()}

  def linear(self):
    """The float64 (float32 where scales make it round) result before out."""
    x = self.exact
    if self.op == "gemm_row":
      sa, sb = self.scales["a"][:, :, None], self.scales["b"][:, None, :]
      x = (x.astype(np.float32) * sa * sb)
    if self.bias is not None:
      x = x + self.bias.astype(x.dtype)
    return x

  def run(self):
    """out [batch, m, n], as the kernels write it."""
    batch, m, n, k = self.sizes
    tile_m, tile_n, tile_k = self.tile
    unit = 128 if self.op == "gemm_block" else tile_k
    k_per_split = max(-(-k // (unit * self.splits)), 1) * unit
    splits = max(-(-k // k_per_split), 1)
    flags = self.flags
    if splits > 1 and self.op == "gemm_row":
      flags |= gemm.ROW_SCALED.value
      if self.tensors["a"].dtype == np.int8:
        flags |= gemm.SUM_I32.value
    # float16 too comes through the pointer to bfloat16.
    out = Tensor(np.full((batch, m, n), np.nan, self.out_dtype).view(
        np.float32 if self.out_dtype == np.float32 else _BF16))
    nothing = Tensor(np.zeros(16, np.float32))
    bias = nothing
    if self.bias is not None:
      bias = Tensor(
          self.bias if self.bias.dtype == np.float32
          else self.bias.view(np.uint16))
    a, b = self.tensors["a"], self.tensors["b"]
    scales, strides = {}, {}
    for name, row in (("a", "m"), ("b", "n")):
      s = self.scales.get(name, np.zeros((1, 1), np.float32))
      count, extent = s.shape[:2]
      strides[f"batch_stride_{name}_scale"] = s[0].size if count > 1 else 0
      strides[f"{name}_scale_step"] = int(extent > 1)
      along_k = s.shape[2] if s.ndim == 3 else 1
      strides[f"stride_{name}_scale_{row}"] = along_k
      strides[f"stride_{name}_scale_k"] = 1
      if self.transposed_scales:
        s = np.swapaxes(s, 1, 2)
        strides[f"stride_{name}_scale_{row}"] = 1
        strides[f"stride_{name}_scale_k"] = extent
      kind = "_e8m0" if self.op == "gemm_mx" else ""
      scales[f"{name}_scale{kind}"] = Tensor(s)
    workspace = Tensor(np.full(splits * batch * m * n, np.nan, np.float32))
    arguments = dict(
        a=Tensor(a), b=Tensor(b), bias=bias, bias_f32=bias, out_bf16=out,
        out_f32=out, workspace=workspace, batch=batch,
        splits=splits, m=m, n=n, k=k, k_rows=k,
        stride_a=a.shape[2], stride_b=b.shape[2],
        batch_stride_a=a[0].size if a.shape[0] > 1 else 0,
        batch_stride_b=b[0].size if b.shape[0] > 1 else 0,
        batch_stride_out=m * n, k_per_split=k_per_split,
        activation=self.activation, flags=flags, **scales, **strides,
        TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k, GROUP_M=3,
        XCDS=self.xcds, ALIGN=self.align, SLICES=self.slices, PROMOTE=True)
    def launch(kernel, grid, **changes):
      names = kernel.arg_names
      kernel[grid](**{name: value for name, value in (
          arguments | changes).items() if name in names})
    tiles = -(-m // tile_m) * -(-n // tile_n)
    if self.module is odd:
      eighth = -(-n // 8)
      tiles = -(-m // tile_m) * -(-eighth // tile_n) * 8
    launch(getattr(self.module, self.op), (tiles, splits, batch))
    if splits > 1:
      launch(gemm.gemm_sum, (-(-n // 32), m, batch), TILE_M=1, TILE_N=32,
             **({} if self.op == "gemm_row" else dict(
                 a_scale=nothing, b_scale=nothing)))
    return out.array.view(self.out_dtype)


_ROW = dict(op="gemm_row")
_I8 = dict(_ROW, dtype=np.int8)
_BLOCK = dict(op="gemm_block", dtype=_FN, k=300, n=140)
_MX = dict(op="gemm_mx", k=224, tile=(16, 16, 64))
_EXACT = dict(
    nt=dict(),
    nt_fp16=dict(dtype=_FP16, out=_FP16),
    nt_one_row=dict(m=1, n=40, k=96, align=8),
    nt_aligned=dict(m=33, n=30, k=104, align=8, bias=_BF16),
    nt_odd=dict(m=7, n=13, k=37, out=np.float32, bias=np.float32),
    nt_empty_k=dict(k=0, bias=np.float32),
    nt_batch=dict(batch=3, m=17, shared=True),
    nt_batches=dict(batch=2, n=24, bias=_FP16, out=_FP16, dtype=_FP16),
    nt_splits=dict(k=200, splits=3, bias=np.float32),
    nt_split_batches=dict(k=130, splits=4, batch=2, m=3, out=np.float32),
    nt_slices=dict(tile=(16, 64, 32), slices=4, n=150),
    nt_eight_slices=dict(
        tile=(16, 128, 32), slices=8, splits=2, out=np.float32),
    nt_dies=dict(m=100, n=90, xcds=8),
    nt_relu=dict(activation=activations.RELU.value, bias=np.float32),
    nt_mfma=dict(module=mfma, m=33, n=30, k=104, batch=2, bias=_BF16, xcds=8),
    nt_mfma_lines=dict(module=mfma, m=33, n=40, k=104, batch=2, bias=_BF16),
    nt_mfma_fp16=dict(module=mfma, dtype=_FP16, m=33, n=40, k=72, out=_FP16),
    nt_mfma_splits=dict(
        module=mfma, tile=(16, 64, 32), slices=4, n=72, k=200, splits=3),
    nt_eighths=dict(module=odd, m=3, n=300, k=469, tile=(16, 16, 64)),
    nt_eighths_short=dict(module=odd, n=5, k=3, bias=_BF16, xcds=8),
    nt_eighths_empty_k=dict(module=odd, k=0, bias=np.float32),
    nt_eighths_fp16=dict(
        module=odd, dtype=_FP16, m=16, n=137, k=71, out=_FP16,
        activation=activations.RELU.value),
    nt_eighths_batch=dict(module=odd, batch=3, m=17, k=45, shared=True),
    nt_eighths_batches=dict(module=odd, batch=3, n=11, k=33, out=np.float32),
    nt_eighths_splits=dict(
        module=odd, batch=2, n=44, k=201, splits=3, bias=np.float32, xcds=8),
    nn=dict(op="gemm_nn"),
    nn_aligned=dict(op="gemm_nn", n=56, k=45, align=8, m=33, batch=2),
    nn_odd=dict(op="gemm_nn", n=9, k=33, m=5, splits=2),
    tn=dict(op="gemm_tn"),
    tn_aligned=dict(op="gemm_tn", m=24, n=40, k=50, align=8, out=np.float32),
    tn_odd=dict(op="gemm_tn", m=9, n=11, k=31, batch=2, shared=True),
    i8=_I8,
    i8_scalars=dict(_I8, scalar_scales=True, bias=np.float32, out=np.float32),
    i8_splits=dict(_I8, k=300, splits=4, batch=2, out=_FP16, bias=_FP16),
    i8_slices=dict(_I8, tile=(16, 64, 32), slices=4, align=16, k=80),
    i8_mfma=dict(_I8, module=mfma, k=80, batch=2, shared=True),
    fp8=dict(_ROW, dtype=_FN),
    fp8_splits=dict(_ROW, dtype=_FN, k=130, splits=2, batch=2, shared=True),
    fp8_bits=dict(_ROW, dtype=_FN, bits=True, out=np.float32),
    fnuz_bits=dict(_ROW, dtype=_FNUZ, bits=True, out=np.float32),
    fp8_words=dict(
        _ROW, dtype=_FN, bits=True, k=176, align=16, batch=2, shared=True),
    fnuz_words=dict(
        _ROW, dtype=_FNUZ, bits=True, k=208, align=16, splits=2),
    mixed_bits=dict(_ROW, dtype=_FN, b_dtype=_FNUZ, bits=True, k=70),
    block=_BLOCK,
    block_step=dict(_BLOCK, tile=(16, 32, 128), out=np.float32, batch=2),
    block_wide=dict(_BLOCK, tile=(16, 256, 64), n=300),
    block_splits=dict(_BLOCK, splits=2, transposed_scales=True, bits=True),
    block_mixed=dict(
        _BLOCK, dtype=_FNUZ, b_dtype=_FN, bits=True, bias=np.float32),
    block_words=dict(_BLOCK, bits=True, k=304, align=16, tile=(16, 32, 128)),
    block_mfma=dict(
        _BLOCK, module=mfma, tile=(16, 32, 64), splits=2, batch=2,
        transposed_scales=True),
    mx=_MX,
    mx_part_of_a_scale=dict(_MX, k=74),
    mx_splits=dict(_MX, splits=3, batch=2, shared=True, out=np.float32),
    mx_step=dict(_MX, tile=(16, 32, 128), m=33, n=40, bias=_BF16),
)


class GemmKernelTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(gpu_arithmetic())
    self.enter_context(absltest.mock.patch.object(
        gemm, "first_lane", lambda x: x))

  @parameterized.named_parameters(*_EXACT.items())
  def test_is_exact(self, config):
    problem = _Problem(**config)
    want = problem.linear()
    if problem.activation:
      want = np.maximum(want, 0)
    np.testing.assert_array_equal(
        problem.run(), want.astype(np.float32).astype(problem.out_dtype))

  @parameterized.parameters("GELU", "GELU_TANH", "SILU")
  def test_activation(self, name):
    x = np.linspace(-9, 9, 1024, dtype=np.float32)
    out = Tensor(np.full(x.shape, np.nan, np.float32))
    workspace = Tensor(x)
    # One split of one row: gemm_sum applies the activation to it.
    gemm.gemm_sum[(4, 1, 1)](
        workspace, workspace, workspace, workspace, workspace, out, out,
        1, 1, 1, 1024, 1024, 0, 0, 0, 0, getattr(activations, name).value,
        gemm.OUT_F32.value, TILE_M=1, TILE_N=256)
    v = x.astype(np.float64)
    want = dict(
        GELU=[t * math.erfc(-t / math.sqrt(2)) / 2 for t in v],
        # (1 + tanh(u)) / 2 without cancellation.
        GELU_TANH=v / (1 + np.exp(
            -2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        SILU=v / (1 + np.exp(-v)))[name]
    np.testing.assert_allclose(out.array, want, rtol=2e-5, atol=1e-30)
    near = np.abs(v) < 3
    np.testing.assert_allclose(
        out.array[near], np.asarray(want)[near], rtol=2e-6)

  @parameterized.parameters(
      (np.float32, 1, 5), (np.float32, 4, 6), (np.int32, 7, 0))
  def test_divided_tiles_are_summed(self, dtype, splits, whole):
    batch, m, n, tile_m, tile_n, band = 2, 70, 100, 32, 64, 2
    tiles = [(z, r, c) for z in range(batch) for first in (0, band)
             for c in range(2) for r in range(first, min(first + band, 3))]
    rng = np.random.default_rng(0)
    parts = rng.integers(
        -9, 9, (splits, len(tiles) - whole, tile_m, tile_n)).astype(dtype)
    scales = 2.0 ** rng.integers(-2, 3, (batch, m)).astype(np.float32)
    bias = rng.integers(-9, 9, n).astype(np.float32)
    want = np.full((batch, m, n), np.nan, np.float32)
    for t, (z, r, c) in enumerate(tiles[whole:]):
      rows = slice(r * tile_m, (r + 1) * tile_m)
      cols = slice(c * tile_n, (c + 1) * tile_n)
      place = want[z, rows, cols]
      whole_sum = parts[:, t].sum(0)[:place.shape[0], :place.shape[1]]
      place[...] = whole_sum * scales[z, rows, None] + bias[cols]
    out, one = Tensor(np.full_like(want, np.nan)), Tensor(np.ones(1, "f4"))
    flags = (gemm.HAS_BIAS.value | gemm.BIAS_F32.value | gemm.OUT_F32.value
             | gemm.ROW_SCALED.value)
    if dtype == np.int32:
      flags |= gemm.SUM_I32.value
    gemm.gemm_sum_tiles[(tile_m * tile_n // (8 * 32), len(tiles) - whole)](
        Tensor(parts.view(np.float32)), Tensor(scales), one, Tensor(bias),
        Tensor(bias), out, out, splits, m, n, m * n, m, 0, 1, 0, tile_m, tile_n,
        whole, len(tiles) - whole, 0, flags, TILE_M=8, TILE_N=32, GROUP_M=band)
    np.testing.assert_array_equal(out.array, want)

  @parameterized.product(
      dtype=(_FN, _FNUZ), op=("gemm_row", "gemm_block"),
      where=((1, 1, 0), (16, 16, 4), (16, 16, 7)))
  def test_every_float8_is_widened_exactly(self, dtype, op, where):
    k, align, column = where
    problem = _Problem(
        op=op, dtype=dtype, bits=True, m=256, n=16, k=k, align=align,
        out=np.float32, scale_powers=(0, 1))
    codes = np.arange(256, dtype=np.uint8)
    for tensor in problem.tensors.values():
      tensor[...] = 0
    problem.tensors["a"][0, :, column] = codes
    problem.tensors["b"][0, :, column] = np.ones(1, dtype).view(np.uint8)
    for scale in problem.scales.values():
      scale[...] = 1
    want = codes.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(
        problem.run(), np.broadcast_to(want[None, :, None], (1, 256, 16)))

  @parameterized.parameters("gemm_nt", "gemm_row", "gemm_mx")
  def test_nan_reaches_its_row_alone(self, op):
    problem = _Problem(
        op=op, dtype=_FN if op == "gemm_row" else _BF16, bits=True, k=96,
        tile=(16, 16, 64), activation=activations.RELU.value, out=np.float32)
    if op == "gemm_mx":
      problem.scales["a"][0, 3, 1] = 0xFF
    else:
      a = problem.tensors["a"]
      a[0, 3, 40] = 0x7F if a.dtype == np.uint8 else np.nan
    result = np.isnan(problem.run())
    self.assertTrue(result[0, 3].all())
    self.assertEqual(result.sum(), result.shape[2])

  def test_nan_stays_in_its_column(self):
    """Where b's rows are loaded with the end of those before them."""
    problem = _Problem(module=odd, m=3, n=30, k=45, tile=(16, 16, 32),
                       out=np.float32)
    problem.tensors["b"][0, 12, [0, 40, 44]] = np.nan, np.inf, np.nan
    result = problem.run()
    self.assertTrue(np.isnan(result[0, :, 12]).all())
    np.testing.assert_array_equal(
        np.delete(result, 12, 2),
        np.delete(problem.linear(), 12, 2).astype(np.float32))


if __name__ == "__main__":
  absltest.main()
