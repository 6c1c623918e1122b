# SPDX-License-Identifier: Apache-2.0
"""The quantisers' kernels without a GPU, in Triton's interpreter.

Every bit is what oracle.py defines, with small tiles, so that a short row has
full, cut and absent ones; and every function of kernels/core/rounding.py is
held to it for all codes and for what lies between them.
"""

import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness.triton_interpreter import Tensor
from quant import oracle

# isort: split
import triton
import triton.language as tl

from third_party.aiter.kernels.core import rounding
from third_party.aiter.kernels.quant import quant

_KINDS = ("int8", "float8_e4m3fn", "float8_e4m3fnuz", "mxfp4")
_MODES = ("down", "up", "even", "ceil")


def _numbers(*shape):
  rng = np.random.default_rng(shape[-1])
  x = rng.standard_normal(shape, np.float32)
  x *= np.exp2(rng.integers(-12, 12, (*shape[:-1], 1))).astype(np.float32)
  x.flat[3], x.flat[-3], x.flat[5] = np.nan, np.inf, -0.0
  x[..., -2, :] = 0
  return x.astype(ml_dtypes.bfloat16)


def _absent(dtype=np.float32):
  return Tensor(np.zeros(16, dtype))


def _new(shape, dtype=np.uint8):
  """What no kernel writes is seen."""
  return Tensor(np.full(shape, 77, dtype))


def _whole(cols):
  """What divides the columns, as a row may promise it."""
  return next(n for n in (16, 8, 1) if cols % n == 0)


def _unaligned(cols):
  return 0 if cols % 16 == 0 else quant.UNALIGNED.value


def _cdiv(a, b):
  return -(-a // b)


@triton.jit
def _round(x, q, n, kind, SIZE: tl.constexpr, SHORT: tl.constexpr):
  at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
  v = tl.load(x + at, at < n, 0.0)
  if SHORT:
    tl.store(q + at, quant.e2m1_code(v), at < n)
  else:
    tl.store(q + at, rounding.to_bits(v, kind), at < n)


@triton.jit
def _widen(b, fn, fnuz, e2m1, e8m0, reciprocal, SIZE: tl.constexpr):
  at = tl.arange(0, SIZE)
  v = tl.load(b + at)
  tl.store(fn + at, rounding.from_e4m3fn(v))
  tl.store(fnuz + at, rounding.from_e4m3fnuz(v, tl.float16).to(tl.float32))
  tl.store(e2m1 + at, rounding.from_e2m1(v))
  tl.store(e8m0 + at, rounding.from_e8m0(v))
  tl.store(reciprocal + at, rounding.e8m0_reciprocal(v))


@triton.jit
def _divide(x, scale, q, SIZE: tl.constexpr, NARROW: tl.constexpr):
  row = tl.program_id(0)
  at = row * SIZE + tl.arange(0, SIZE)[None, :]
  s = tl.load(scale + row + tl.zeros([1, 1], tl.int32))
  v = tl.load(x + at)
  if NARROW:
    tl.store(q + at, quant.divide_narrow(v, s))
  else:
    tl.store(q + at, rounding.divide(v, s))


class RoundingTest(parameterized.TestCase):

  @parameterized.parameters(*enumerate(_KINDS))
  def test_to_bits(self, number, kind):
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, np.uint32)
    x = bits.view(np.float32)
    if kind == "int8":
      middle = np.arange(-130, 131) / np.float32(2)
    else:
      values = oracle.FORMATS[kind].numbers()
      middle = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    middle = middle.astype(np.float32)
    x = np.concatenate([
        x, middle, np.nextafter(middle, np.float32(0)),
        np.nextafter(middle, np.float32(np.inf)),
        np.float32([0.0, np.inf, np.nan, 1e-44, 3e38])])
    x = np.concatenate([x, -x])
    q = _new(x.shape)
    for short in (0, 1)[:1 + (kind == "mxfp4")]:
      _round[(_cdiv(x.size, 8192),)](Tensor(x), q, x.size, number, SIZE=8192,
                                     SHORT=short)
      np.testing.assert_array_equal(
          q.array, oracle.round_to(x, kind).view(np.uint8))

  def test_divide(self):
    """IEEE's quotients, and its signs, of what a scale may be."""
    rng = np.random.default_rng(0)
    scale = np.exp2(rng.uniform(-42, 121, (64, 1))).astype(np.float32)
    scale[:4] = np.float32([[np.inf], [np.nan], [2.0**-42], [1 - 2.0**-24]])
    x = rng.uniform(-500, 500, (64, 4096)).astype(np.float32)
    # Quotients next to what formats round at.
    middle = rng.integers(1, 1000, (64, 2048)) / np.float32(2)
    x[:, :2048] = middle * np.exp2(rng.integers(-12, 0, middle.shape))
    with np.errstate(all="ignore"):
      x = (x * np.where(np.isfinite(scale), scale, 1)).astype(np.float32)
      for away in (-np.inf, np.inf):
        part = slice(0, 700) if away < 0 else slice(700, 1400)
        x[:, part] = np.nextafter(x[:, part], np.float32(away))
      x[:, :4] = 0.0, -0.0, np.inf, -np.inf
      x[0, 4], x[2, 5:7] = np.nan, (1e-38, -1e-38)
      want = x / scale
    q = _new(x.shape, np.float32)
    _divide[(64,)](Tensor(x), Tensor(scale), q, SIZE=4096, NARROW=0)
    # An infinity is one only of a row whose scale is it or NaN.
    finite = np.isfinite(x) | ~np.isfinite(scale)
    np.testing.assert_array_equal(q.array[finite], want[finite])
    number = finite & ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(q.array[number]),
                                  np.signbit(want[number]))

  def test_divide_narrow(self):
    """One step is enough where quotients are next to what formats round at."""
    rng = np.random.default_rng(0)
    tie = rng.integers(1, 256, (4096, 1)) * np.exp2(
        rng.integers(-12, 2, (4096, 1)))
    x = rng.integers(1, 2048, tie.shape) * np.exp2(
        rng.integers(-14, 6, tie.shape))
    # Scales whose quotients are within some last bits of a tie.
    scale = (x / tie).astype(np.float32)
    scale[:64, 0] = np.nextafter(
        np.exp2(np.arange(64) % 16 - 16), 0, dtype=np.float32)
    near = (scale.view(np.int32) + rng.integers(-3, 4, scale.shape)).astype(
        np.int32).view(np.float32)
    x = np.concatenate([x, scale * tie], 1).astype(np.float16).astype(
        np.float32)
    x = np.concatenate([x, -x], 1)
    q = _new(x.shape, np.float32)
    with np.errstate(all="ignore"):
      _divide[(4096,)](Tensor(x), Tensor(near), q, SIZE=4, NARROW=1)
    for kind in _KINDS:
      np.testing.assert_array_equal(
          oracle.round_to(q.array, kind).view(np.uint8),
          oracle.round_to(x / near, kind).view(np.uint8))

  def test_from_bits(self):
    codes = np.arange(256, dtype=np.uint8)
    results = [_new(256, np.float32) for _ in range(5)]
    _widen[(1,)](Tensor(codes), *results, SIZE=256)
    power = oracle.from_e8m0(codes)
    for got, want in zip(results, (
        oracle.value(codes, "float8_e4m3fn"),
        oracle.value(codes, "float8_e4m3fnuz"),
        oracle.value(codes & 15, "mxfp4"), power, 1 / power)):
      np.testing.assert_array_equal(got.array, want.astype(np.float32))


class KernelTest(parameterized.TestCase):

  @parameterized.product(
      cols=[64, 72, 77], kind=_KINDS[:3], smooth=[False, True], held=[256, 0],
      walks=[False, True])
  def test_rows(self, cols, kind, smooth, held, walks):
    x = _numbers(5, cols)
    factors = np.exp(np.sin(np.arange(cols))).astype(np.float32)
    q, scale = _new(x.shape), _new(5, np.float32)
    quant.quant_row[(2 if walks else 3,)](
        Tensor(x), Tensor(factors), q, scale, 5, cols, _KINDS.index(kind),
        _unaligned(cols) | (quant.SMOOTH_SCALE.value if smooth else 0),
        TILE_M=2, TILE_N=32, COLS=held, FLAGS=-1,
        WHOLE=0 if walks else _whole(cols), NATIVE=False, CAST="", WALKS=walks)
    want_q, want_scale = oracle.token(x, kind, factors if smooth else None)
    np.testing.assert_array_equal(q.array, want_q.view(np.uint8))
    np.testing.assert_array_equal(scale.array, want_scale[:, 0])

  def _group(self, x, kind, *, group=128, mode=None, transposed=False,
             shuffled=False, given=None, run=32, whole=0):
    """(q, scale) of quant_group; x is [batch, rows, cols]."""
    batch, rows, cols = x.shape
    q = _new((batch, rows, cols // (2 if kind == "mxfp4" else 1)))
    tile = (8, 256)
    shape = rows, _cdiv(cols, group)
    covered = rows, cols
    if shuffled:
      shape = _cdiv(rows, 256) * 256, _cdiv(shape[1], 8) * 8
      covered = shape[0], max(cols, shape[1] * group)
    tiles = [_cdiv(size, length) for size, length in zip(covered, tile)]
    scale = _new((batch, *(shape[::-1] if transposed else shape)),
                 np.float32 if mode is None else np.uint8)
    flag = lambda bit, on: bit.value if on else 0
    flags = (flag(quant.E8M0, mode) | flag(quant.SHUFFLED, shuffled)
             | flag(quant.STATIC, given is not None) | _unaligned(cols))
    quant.quant_group[(batch * tiles[0] * tiles[1],)](
        Tensor(x), _absent(), _absent() if given is None else Tensor(given), q,
        scale if mode is None else _absent(),
        _absent(np.uint8) if mode is None else scale, rows, cols, *shape,
        1 if transposed else shape[1], shape[0] if transposed else 1,
        shape[0] * shape[1], *tiles, group, _KINDS.index(kind),
        _MODES.index(mode or "up"), flags,
        TILE_M=tile[0], TILE_N=tile[1], RUN=run,
        FLAGS=-1, SET=0, WHOLE=whole, NATIVE=False, CAST="")
    return q.array, scale.array

  def _assert_same(self, got, want, kind):
    q, scale = want
    q = oracle.pack(q) if kind == "mxfp4" else q
    np.testing.assert_array_equal(got[0], q.view(np.uint8))
    np.testing.assert_array_equal(got[1], scale)

  @parameterized.product(kind=_KINDS, group=[32, 64, 128])
  def test_groups(self, kind, group):
    x = _numbers(2, 9, {32: 328, 64: 300, 128: 320}[group])
    mode = _MODES[group // 32 - 1] if kind != "int8" else None
    for whole in (0, _whole(x.shape[-1])):
      self._assert_same(
          self._group(x, kind, group=group, mode=mode, whole=whole),
          oracle.tiles(x, kind, 1, group, mode), kind)
    if kind != "mxfp4":
      if group == 128:
        self._assert_same(self._group(x, kind, run=128),
                          oracle.tiles(x, kind, 1, group), kind)
      q, scale = oracle.tiles(x, kind, 1, group)
      self._assert_same(
          self._group(x, kind, group=group, transposed=True),
          (q, np.swapaxes(scale, -1, -2)), kind)

  def test_shuffled(self):
    x = _numbers(2, 40, 68)
    q, scale = oracle.tiles(x, "mxfp4", 1, 32, "up")
    self._assert_same(
        self._group(x, "mxfp4", group=32, mode="up", shuffled=True),
        (q, np.stack([oracle.shuffled(s) for s in scale])), "mxfp4")

  @parameterized.parameters(*_KINDS[:3])
  def test_blocks(self, kind):
    for cols, whole in ((140, 0), (140, 1), (136, 8)):
      x = _numbers(2, 130, cols)
      q, scale = _new(x.shape), _new((2, 2, 2), np.float32)
      quant.quant_block[(8,)](
          Tensor(x), _absent(), q, scale, 130, cols, 2, 1, 4, 2, 2,
          _KINDS.index(kind), _unaligned(cols), TILE_M=128, TILE_N=128, STEP=64,
          FLAGS=-1, WHOLE=whole, NATIVE=False, CAST="")
      self._assert_same((q.array, scale.array),
                        oracle.tiles(x, kind, 128, 128), kind)

  @parameterized.parameters(*_KINDS[:3])
  def test_given_scales(self, kind):
    x = _numbers(2, 9, 144)
    scale = np.exp(np.sin(np.arange(18))).astype(np.float32).reshape(2, 9, 1)
    q, untouched = self._group(x, kind, given=scale)
    np.testing.assert_array_equal(
        q, oracle.static(x, kind, scale).view(np.uint8))
    np.testing.assert_array_equal(untouched, 77)

  @parameterized.parameters(100, 704)
  def test_largest_magnitudes(self, cols):
    x = _numbers(5, cols)
    runs = _cdiv(cols, 256)
    amax = _new((5, runs), np.float32)
    quant.quant_amax[(3 * runs,)](
        Tensor(x), amax, 5, cols, runs, _unaligned(cols), TILE_M=2, TILE_N=256,
        STEP=64, FLAGS=-1, WHOLE=0)
    np.testing.assert_array_equal(amax.array, np.concatenate([
        oracle.amax(x[:, c:c + 256], -1) for c in range(0, cols, 256)], -1))


if __name__ == "__main__":
  absltest.main()
