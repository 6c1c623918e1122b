# SPDX-License-Identifier: Apache-2.0
"""The norms' kernels without a GPU, in Triton's interpreter.

Each stands beside its formula in float64, with small tiles, so that a short row
has full, cut and absent ones. The kernels for Hopper are not here: the
interpreter has no Gluon.
"""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness.triton_interpreter import Tensor, gpu_arithmetic
from quant import oracle

# isort: split
from third_party.aiter.kernels.norm import bwd as norm_bwd
from third_party.aiter.kernels.norm import family, shifted, walk
from third_party.aiter.kernels.norm import fwd as norm_fwd
from third_party.aiter.kernels.norm import quant as norm_quant

_EPSILON = 1e-3
_ROWS = 5
# Of which eight programs walk over several, whose columns are at one place.
_SHIFTED = (19, 41)
# What a call may have, as bits of the argument `flags`.
_CALLS = {
    "rms": (),
    "rms_gemma": ("gemma",),
    "rms_add": ("residual",),
    "rms_add_t5": ("residual", "t5"),
    "layer": ("layer", "beta"),
    "layer_add": ("layer", "beta", "residual"),
    "layer_f32": ("layer", "beta", "f32_weights"),
}
_ALL = sum(family.FEATURES.values())


def _arrays(cols, features, dtype, rows=_ROWS):
  """float64 arrays of numbers that dtype has, and as tensors."""
  rng = np.random.default_rng(cols)
  weights = np.float32 if "f32_weights" in features else dtype
  rows = (rows, cols)
  arrays = {
      name: rng.standard_normal(shape).astype(kind) for name, shape, kind in (
          ("x", rows, dtype), ("residual", rows, dtype), ("dy", rows, dtype),
          ("gamma", cols, weights), ("beta", cols, weights),
          ("x_scale", cols, np.float32))}
  arrays["x"] += arrays["x"].dtype.type(0.5)
  tensors = {name: Tensor(t) for name, t in arrays.items()}
  tensors |= {f"{name}_f32": tensors[name] for name in ("gamma", "beta")}
  return {n: t.astype(np.float64) for n, t in arrays.items()}, tensors


def _new(*shape, dtype=np.float32):
  """What no kernel writes is seen."""
  return Tensor(np.full(shape, 77, dtype))


def _statistics(s, features):
  mean = s.mean(-1, keepdims=True) if "layer" in features else 0 * s[:, :1]
  rstd = 1 / np.sqrt(np.mean((s - mean)**2, -1, keepdims=True) + _EPSILON)
  return mean, rstd


def _sum(a, features, dtype):
  """What is normalised, and the same as backward reads it."""
  if "residual" not in features:
    return a["x"], a["x"]
  s = a["x"] + a["residual"]
  rounded = s.astype(np.float32).astype(dtype).astype(np.float64)
  return (rounded if "t5" in features else s), rounded


def _forward(a, features, dtype):
  s, _ = _sum(a, features, dtype)
  mean, rstd = _statistics(s, features)
  n = (s - mean) * rstd
  if "t5" in features:
    n = n.astype(np.float32).astype(dtype).astype(np.float64)
  y = n * (a["gamma"] + ("gemma" in features))
  return y + a["beta"] if "beta" in features else y


def _flags(features):
  return sum(family.FEATURES[name] for name in features)


class NormKernelTest(parameterized.TestCase):

  def close(self, got, expected, dtype, steps=1.0):
    """As near as dtype's rounding, and float32's sums, let them be."""
    got = got.array.astype(np.float64)
    size = np.abs(expected).max()
    step = float(ml_dtypes.finfo(dtype).eps) / 2
    np.testing.assert_allclose(
        got / size, expected / size, rtol=steps * step, atol=2e-6)

  @parameterized.product(
      call=tuple(_CALLS), dtype=(ml_dtypes.bfloat16, np.float32),
      tile=((0, 16, 0), (64, 64, 0), (64, 16, 0), (64, 16, 1), "walk",
            "shifted"))
  def test_forward(self, call, dtype, tile):
    rows, cols = _SHIFTED if tile == "shifted" else (_ROWS, 40)
    features = _CALLS[call]
    a, t = _arrays(cols, features, dtype, rows)
    y, out = (_new(rows, cols, dtype=dtype) for _ in range(2))
    mean, rstd = _new(rows), _new(rows)
    with gpu_arithmetic():
      arguments = (
          t["x"], t["residual"], t["gamma"], t["gamma_f32"], t["beta"],
          t["beta_f32"], y, out, mean, rstd, rows, cols, _EPSILON,
          _flags(features))
      if tile == "walk":
        walk.norm_fwd[(2,)](*arguments, TILE_M=2, COLS=64, FLAGS=_ALL)
      elif tile == "shifted":
        shifted.norm_fwd[(8,)](*arguments, TILE_M=2, TILE_N=16, COLS=41,
                               FLAGS=_ALL)
      else:
        bound, tile_n, reload = tile
        norm_fwd.norm_fwd[(3,)](
            *arguments, TILE_M=2, TILE_N=tile_n, COLS=bound, RELOAD=reload,
            FLAGS=_ALL)
    t5 = "t5" in features
    self.close(y, _forward(a, features, dtype), dtype, 4 if t5 else 1.01)
    _, rounded = _sum(a, features, dtype)
    expected = _statistics(rounded, features)
    np.testing.assert_allclose(mean.array, expected[0][:, 0], atol=1e-6)
    self.close(rstd, expected[1][:, 0], np.float32, 16)
    if "residual" in features:
      np.testing.assert_array_equal(out.array.astype(np.float64), rounded)

  @parameterized.product(
      call=("rms", "rms_gemma", "layer", "layer_add", "layer_f32", "rms_t5"),
      dtype=(ml_dtypes.bfloat16, np.float32),
      form=((0, None), (64, None), (64, 0), (64, 1), (64, 2), (41, "shifted")))
  def test_backward(self, call, dtype, form):
    bound, ahead = form
    parts, (rows, cols) = 2, (_ROWS, 40)
    if ahead == "shifted":
      parts, (rows, cols) = 8, _SHIFTED
    features = ("t5",) if call == "rms_t5" else _CALLS[call]
    a, t = _arrays(cols, features, dtype, rows)
    mean, rstd = _statistics(a["x"], features)
    saved = [Tensor(v[:, 0].astype(np.float32)) for v in (mean, rstd)]
    dx = _new(rows, cols, dtype=dtype)
    sums = [_new(parts, cols) for _ in range(2)]
    # Of the type of weights, each by its own pointer.
    dgamma, dbeta = (
        _new(cols, dtype=np.float32 if "f32_weights" in features else dtype)
        for _ in range(2))
    flags, per_part = _flags(features), -(-rows // parts)
    with gpu_arithmetic():
      arguments = (
          t["x"], t["gamma"], t["gamma_f32"], t["dy"], t["residual"], *saved,
          dx, *sums, rows, cols)
      if ahead == "shifted":
        shifted.norm_bwd_dx[(parts,)](
            *arguments, flags, TILE_M=2, TILE_N=16, COLS=bound, FLAGS=_ALL,
            OVERLAPS=False)
      elif ahead is not None:
        walk.norm_bwd_dx[(parts,)](
            *arguments, per_part, flags, TILE_M=2, COLS=bound, FLAGS=_ALL,
            OPAQUE=False, AHEAD=ahead)
      else:
        norm_bwd.norm_bwd_dx[(parts,)](
            *arguments, per_part, flags, TILE_M=2, TILE_N=16, COLS=bound,
            STAGES=1, OVERLAPS=False)
      if not bound:
        norm_bwd.norm_bwd_parts[(3, parts)](
            t["x"], t["dy"], *saved, *sums, rows, cols, per_part, flags,
            TILE_M=2, TILE_N=16)
      norm_bwd.norm_bwd_dgamma[(3, 1 + ("beta" in features))](
          *sums, dgamma, dgamma, dbeta, dbeta, parts, cols, flags, TILE_M=4,
          TILE_N=16, OVERLAPS=False)
    n = (a["x"] - mean) * rstd
    g = a["dy"] * (a["gamma"] + ("gemma" in features))
    d = g - n * (n * g).mean(-1, keepdims=True)
    if "layer" in features:
      d -= g.mean(-1, keepdims=True)
    d *= rstd
    if "residual" in features:
      d += a["residual"]
    self.close(dx, d, dtype, 1.01)
    if "t5" in features:
      n = n.astype(np.float32).astype(dtype).astype(np.float64)
    for got, want in (dgamma, a["dy"] * n), (dbeta, a["dy"]):
      if got is dgamma or "beta" in features:
        steps = 64 if got.array.dtype == np.float32 else 1.01
        self.close(got, want.sum(0), got.array.dtype, steps)

  # Rows of MXFP4 have a multiple of 32 columns, none of which is shifted.
  @parameterized.product(
      [dict(kind=kind, form=form)
       for kind in ("int8", "float8_e4m3fn", "float8_e4m3fnuz", "mxfp4")
       for form in ((0, ""), (128, ""), (128, "walk"), (41, "shifted"))
       if (kind, form[1]) != ("mxfp4", "shifted")],
      call=("rms", "rms_add", "layer", "x_scale"))
  def test_quantised(self, call, kind, form):
    bound, way = form
    mx = kind == "mxfp4"
    rows, cols = _SHIFTED if way == "shifted" else (_ROWS, 96)
    dtype = ml_dtypes.bfloat16
    features = ("x_scale",) if call == "x_scale" else _CALLS[call]
    a, t = _arrays(cols, features, dtype, rows)
    q = _new(rows, cols // 2 if mx else cols, dtype=np.uint8)
    scale, out = _new(rows), _new(rows, cols, dtype=dtype)
    e8m0 = _new(rows, cols // 32, dtype=np.uint8)
    number = ("int8", "float8_e4m3fn", "float8_e4m3fnuz", "mxfp4").index(kind)
    with gpu_arithmetic():
      arguments = [
          t["x"], t["residual"], t["gamma"], t["gamma_f32"], t["beta"],
          t["beta_f32"], t["x_scale"], q, scale, e8m0, out, rows, cols,
          _EPSILON, number, _flags(features)]
      plain = dict(TILE_M=2, COLS=bound, NATIVE=False, CAST="",
                   FLAGS=_ALL & ~family.FEATURES["f32_weights"])
      if way == "walk":
        walk.norm_quant[(2,)](*arguments, **plain)
      elif way == "shifted":
        arguments.remove(e8m0)
        shifted.norm_quant[(8,)](*arguments, **plain, TILE_N=16)
      else:
        norm_quant.norm_quant[(3,)](*arguments, **plain, TILE_N=64)
    y = _forward(a, features, dtype)
    if call == "x_scale":
      y = y * a["x_scale"]
    if mx:
      groups = np.abs(y).reshape(rows, -1, 32).max(-1)
      np.testing.assert_array_equal(
          e8m0.array, np.ceil(np.log2(groups / 6)) + 127)
      unit = np.repeat(oracle.from_e8m0(e8m0.array), 32, -1)
      back, gap = oracle.value(oracle.unpack(q.array), kind) * unit, unit
    else:
      np.testing.assert_allclose(
          scale.array, np.abs(y).max(-1) / oracle.LARGEST[kind], rtol=1e-6)
      unit = scale.array[:, None].astype(np.float64)
      codes = q.array.view(np.int8) if kind == "int8" else q.array
      back = oracle.value(codes, kind) * unit
      # Half of what lies between two numbers, of three bits of mantissa.
      gap = unit / 2 if kind == "int8" else np.maximum(
          np.abs(y) / 16, unit * 2.0**-10)
    self.assertLessEqual(np.max(np.abs(back - y) / gap), 1.001)
    if "residual" in features:
      np.testing.assert_array_equal(
          out.array.astype(np.float64), _sum(a, features, dtype)[1])


if __name__ == "__main__":
  absltest.main()
