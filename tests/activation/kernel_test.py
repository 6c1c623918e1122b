# SPDX-License-Identifier: Apache-2.0
"""The activations' kernels without a GPU, in Triton's interpreter.

Each stands beside its formula in float64, with small tiles, so that a short row
has full, cut and absent ones. Where the gates are so large that an activation
is the gate itself, every bit of a quantised result is known.
"""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from activation.oracle import Activation, biased
from harness.triton_interpreter import Tensor, gpu_arithmetic
from quant import oracle as quant_oracle

# isort: split
from third_party.aiter.kernels.activation import activation, family, flat, quant

_BF16 = ml_dtypes.bfloat16
_NUMBERS = {"gelu": 2, "gelu_tanh": 3, "silu": 4, "swiglu": 5}
_KINDS = ("int8", "float8_e4m3fn", "float8_e4m3fnuz", "mxfp4")
_MODES = ("down", "up", "even", "ceil")
_ROWS, _EXPERTS = 5, 3
_OUT = {np.float16: "out_fp16", np.float32: "out_f32", _BF16: "out_bf16"}
_ALL = sum(family.FLAGS.values())


def _cast(gate, out):
  """The feature of a result of type `out`."""
  return "" if out is gate else _OUT[out]


def _new(*shape, dtype=np.float32):
  """What no kernel writes is seen."""
  return Tensor(np.full(shape, 77, dtype))


def _absent(dtype):
  return Tensor(np.zeros(16, dtype))


def _cdiv(a, b):
  return -(-a // b)


def _inverse(cols):
  """cols_inverse, an int32, and cols_shift: as activation.cc has them."""
  shift = (cols - 1).bit_length()
  return int(np.uint32(_cdiv(1 << (31 + shift), cols)).view(np.int32)), shift


class _Problem:
  """Operands of a call, and its gate and up in float64."""

  def __init__(self, act, cols, features, dtype, rows=_ROWS, large=False):
    rng = np.random.default_rng(cols)
    self.act, self.features = act, set(features)
    if act.limit:
      self.features.add("limits")
    self.cols, self.rows = cols, rows
    gate = rng.standard_normal((rows, cols)) * 4
    if large:  # exp(-gate) is nothing beside 1.
      gate = 32 + np.abs(gate)
    gate, up = (t.astype(dtype) for t in (
        gate, rng.standard_normal((rows, cols)) * 4))
    self.ids = rng.integers(-1, _EXPERTS + 1, rows).astype(np.int32)
    kind = np.float32 if "bias_f32" in features else dtype
    bias = rng.standard_normal((_EXPERTS, 2 * cols)).astype(kind)
    packed = Tensor(np.concatenate([gate, up], -1))
    pair = [packed] * 2 if "packed" in features else [Tensor(gate), Tensor(up)]
    self.operands = [*pair, Tensor(bias), Tensor(bias), Tensor(self.ids)]
    self.gate, self.up, bias = (
        t.astype(np.float64) for t in (gate, up, bias))
    self.known = np.ones((rows, 1), bool)
    if "bias" in features:
      self.gate, self.up, self.known = biased(
          self.gate, self.up, bias, self.ids)
    if "gated" not in features:
      self.up = None

  def scalars(self, *more):
    """The last arguments of every kernel."""
    a = self.act
    return (_EXPERTS, _NUMBERS[a.name], a.alpha, a.gate_limit,
            a.limit or np.inf, *more,
            sum(family.FLAGS[f] for f in self.features if f))

  def result(self):
    return np.where(self.known, self.act.result(self.gate, self.up), 0)


_ACTIVATIONS = {
    "silu": Activation("silu"),
    "silu_limit": Activation("silu", 2.5, 2.5),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swiglu": Activation("swiglu", 7.0, 7.0, 1.702),
}
_LAYOUTS = {
    "packed": ("gated", "packed"),
    "two": ("gated",),
    "alone": (),
    "bias": ("gated", "packed", "bias"),
    "bias_f32": ("gated", "bias", "bias_f32"),
}


class ActivationKernelTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(gpu_arithmetic())

  def close(self, got, expected, dtype):
    """As near as dtype's rounding, and float32's steps, let them be."""
    got = got.astype(np.float64)
    size = np.abs(expected).max()
    step = float(ml_dtypes.finfo(dtype).eps) / 2
    np.testing.assert_allclose(
        got / size, expected / size, rtol=1.01 * step, atol=1e-6)

  @parameterized.product(name=tuple(_ACTIVATIONS), layout=tuple(_LAYOUTS))
  def test_forward(self, name, layout):
    for cols, dtype, out in (
        (40, _BF16, _BF16), (32, np.float32, np.float16),
        (19, np.float16, np.float32)):
      p = _Problem(_ACTIVATIONS[name], cols,
                   (*_LAYOUTS[layout], _cast(dtype, out)), dtype)
      # None: the pointer of gate's type.
      outs = {t: _new(_ROWS, cols, dtype=t or dtype)
              for t in (None, np.float16, _BF16, np.float32)}
      tiles_m, tiles = _cdiv(_ROWS, 2), _cdiv(cols, 16)
      only_silu = p.act.name == "silu" and cols == 40
      grid = (tiles, tiles_m) if only_silu else (tiles * tiles_m,)
      activation.activation_fwd[grid](
          *p.operands, *outs.values(), _ROWS, cols, tiles, *p.scalars(),
          TILE_M=2, TILE_N=16, FLAGS=_ALL, ONLY_SILU=only_silu)
      got = outs.pop(None if out is dtype else out)
      self.close(got.array, p.result(), out)
      for other in outs.values():
        np.testing.assert_array_equal(other.array.astype(np.float32), 77)

  @parameterized.product(name=tuple(_ACTIVATIONS), layout=tuple(_LAYOUTS))
  def test_backward(self, name, layout):
    for cols, dtype, out in ((40, _BF16, _BF16), (19, np.float32, np.float16)):
      features = (*_LAYOUTS[layout], _cast(dtype, out))
      p = _Problem(_ACTIVATIONS[name], cols, features, dtype)
      dy = np.random.default_rng(1).standard_normal((_ROWS, cols)).astype(out)
      tiles_m, tiles = _cdiv(_ROWS, 2), _cdiv(cols, 16)
      only_silu = p.act.name == "silu" and cols == 40
      grid = (tiles, tiles_m) if only_silu else (tiles * tiles_m,)
      packed = "packed" in features
      dgate = _new(_ROWS, cols * (1 + packed), dtype=dtype)
      dup = dgate if packed else _new(_ROWS, cols, dtype=dtype)
      activation.activation_bwd[grid](
          *p.operands, *[Tensor(dy)] * 4, dgate, dup, _ROWS, cols, tiles,
          *p.scalars(), TILE_M=2, TILE_N=16, FLAGS=_ALL, ONLY_SILU=only_silu)
      want = p.act.gradients(
          p.gate, p.up, np.where(p.known, dy.astype(np.float64), 0))
      got = (np.split(dgate.array, 2, -1) if packed
             else (dgate.array, dup.array))
      self.close(got[0], want[0], dtype)
      if p.up is None:
        np.testing.assert_array_equal(got[1].astype(np.float32), 77)
      else:
        self.close(got[1], want[1], dtype)

  @parameterized.product(layout=tuple(_LAYOUTS), cols=(24, 12, 19, 1))
  def test_flat(self, layout, cols):
    """Of chunks, whichever rows they are of: every bit that tiles have."""
    width = next(w for w in (8, 4, 1) if cols % w == 0)
    for name, dtype, out in (("silu", _BF16, _BF16),
                             ("swiglu", np.float16, np.float32)):
      features = (*_LAYOUTS[layout], _cast(dtype, out))
      p = _Problem(_ACTIVATIONS[name], cols, features, dtype, rows=7)
      dy = np.random.default_rng(1).standard_normal((7, cols)).astype(out)
      results = []
      for kernels in (activation, flat):
        outs = {t: _new(7, cols, dtype=t or dtype)
                for t in (None, np.float16, _BF16, np.float32)}
        packed = "packed" in features
        dgate = _new(7, cols * (1 + packed), dtype=dtype)
        dup = dgate if packed else _new(7, cols, dtype=dtype)
        tiles = _cdiv(7, 2), _cdiv(cols, 16)
        grid, where, shape = (tiles[0] * tiles[1],), (tiles[1],), dict(
            TILE_M=2, TILE_N=16)
        if kernels is flat:
          grid, where, shape = (_cdiv(7 * cols, 32),), _inverse(cols), dict(
              WIDTH=width, TILE_N=32)
        shape |= dict(FLAGS=_ALL, ONLY_SILU=kernels is flat and name == "silu")
        kernels.activation_fwd[grid](
            *p.operands, *outs.values(), 7, cols, *where, *p.scalars(),
            **shape)
        kernels.activation_bwd[grid](
            *p.operands, *[Tensor(dy)] * 4, dgate, dup, 7, cols, *where,
            *p.scalars(), **shape)
        results.append([t.array.astype(np.float64)
                        for t in (*outs.values(), dgate, dup)])
      for tile, run in zip(*results):
        np.testing.assert_array_equal(run, tile)

  def _row(self, p, kind, bound):
    q, scale = _new(p.rows, p.cols, dtype=np.uint8), _new(p.rows)
    quant.activation_quant_row[(_cdiv(p.rows, 2),)](
        *p.operands, q, scale, p.rows, p.cols,
        *p.scalars(_KINDS.index(kind)), TILE_M=2, TILE_N=16, COLS=bound,
        FLAGS=_ALL, NATIVE=False, CAST="")
    return q.array, scale.array[:, None]

  @parameterized.product(kind=_KINDS[:3], bound=(0, 64),
                         layout=("packed", "bias"))
  def test_rows(self, kind, bound, layout):
    p = _Problem(_ACTIVATIONS["silu_limit" if bound else "swiglu"], 40,
                 _LAYOUTS[layout], _BF16)
    q, scale = self._row(p, kind, bound)
    y = p.result()
    np.testing.assert_allclose(
        scale, quant_oracle.f32_scale(quant_oracle.amax(y, -1), kind),
        rtol=2e-6)
    codes = q.view(np.int8) if kind == "int8" else q
    back = quant_oracle.value(codes, kind) * scale
    gap = scale / 2 if kind == "int8" else np.maximum(
        np.abs(y) / 16, scale * 2.0**-10)
    self.assertLessEqual(np.max(np.abs(back - y) / gap), 1.001)

  @parameterized.product(kind=_KINDS[:3], bound=(0, 64),
                         name=("silu", "gelu", "gelu_tanh"))
  def test_every_bit_of_rows(self, kind, bound, name):
    p = _Problem(Activation(name), 40, _LAYOUTS["two"], _BF16, large=True)
    want = quant_oracle.token(p.result(), kind)
    for a, b in zip(self._row(p, kind, bound), want):
      np.testing.assert_array_equal(a, b.view(a.dtype))

  def _group(self, p, kind, group, mode=None, batch=1, scale=None):
    rows = p.rows // batch
    shuffled = "shuffled" in p.features
    shape = rows, _cdiv(p.cols, group)
    covered = rows, p.cols
    if shuffled:
      shape = _cdiv(rows, 256) * 256, _cdiv(shape[1], 8) * 8
      covered = shape[0], max(p.cols, shape[1] * group)
    tiles = _cdiv(covered[0], 8), _cdiv(covered[1], 128)
    q = _new(p.rows, p.cols // (2 if kind == "mxfp4" else 1), dtype=np.uint8)
    e8m0 = _new(batch, *shape, dtype=np.uint8)
    f32 = _new(batch, *shape)
    given = Tensor(np.float32([scale or 0]))
    quant.activation_quant_group[(batch * tiles[0] * tiles[1],)](
        *p.operands, given, q, f32, e8m0, rows, p.cols, *shape, *tiles,
        *p.scalars(group, _KINDS.index(kind), _MODES.index(mode or "up")),
        TILE_M=8, TILE_N=128, RUN=32 if group < 128 else 128, FLAGS=_ALL,
        NATIVE=False, CAST="")
    return q.array, (e8m0 if mode else f32).array

  @parameterized.product(kind=_KINDS, group=(32, 64, 128), e8m0=(False, True))
  def test_every_bit_of_groups(self, kind, group, e8m0):
    if kind in ("int8", "mxfp4") and e8m0 == (kind == "int8"):
      return
    mode = _MODES[group // 32 - 1] if e8m0 else None
    p = _Problem(Activation("silu"), 300,
                 (*_LAYOUTS["packed"], "e8m0" if e8m0 else ""), _BF16,
                 large=True)
    q, scale = self._group(p, kind, group, mode)
    want_q, want = quant_oracle.tiles(p.result(), kind, 1, group, mode)
    if kind == "mxfp4":
      want_q = quant_oracle.pack(want_q)
    np.testing.assert_array_equal(q, want_q.view(np.uint8))
    np.testing.assert_array_equal(scale[0], want)

  def test_shuffled(self):
    p = _Problem(Activation("silu"), 68,
                 (*_LAYOUTS["packed"], "e8m0", "shuffled"), _BF16, rows=80,
                 large=True)
    q, scale = self._group(p, "mxfp4", 32, "up", batch=2)
    want_q, want = quant_oracle.tiles(p.result(), "mxfp4", 1, 32, "up")
    np.testing.assert_array_equal(q, quant_oracle.pack(want_q))
    for a, b in zip(scale, np.split(want, 2)):
      np.testing.assert_array_equal(a, quant_oracle.shuffled(b))

  @parameterized.parameters(*_KINDS[:3])
  def test_given_scale(self, kind):
    p = _Problem(Activation("silu"), 40, (*_LAYOUTS["packed"], "static"), _BF16,
                 large=True)
    q, untouched = self._group(p, kind, 128, scale=0.37)
    np.testing.assert_array_equal(q, quant_oracle.static(
        p.result(), kind, 0.37).view(np.uint8))
    np.testing.assert_array_equal(untouched, 77)


if __name__ == "__main__":
  absltest.main()
