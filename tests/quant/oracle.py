# SPDX-License-Identifier: Apache-2.0
"""Quantisers by their definition, in NumPy.

Formats are tables of all their numbers, made from exponent and mantissa in
float64, where every number, every midpoint of two and every float32 is exact.
Rounding is a search in the table. Nothing here takes bits apart.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np

AMAX_FLOOR = np.float32(1e-10)


@dataclasses.dataclass(frozen=True)
class Format:
  """A float format: its numbers from 0 up, by code, and its special codes."""
  mantissa: int
  bias: int
  codes: int
  nan: int
  sign: int
  negative_zero: bool = True

  def numbers(self):
    values = []
    for code in range(self.codes):
      exponent, fraction = divmod(code, 2**self.mantissa)
      fraction /= 2**self.mantissa
      values.append(fraction * 2.0**(1 - self.bias) if exponent == 0
                    else (1 + fraction) * 2.0**(exponent - self.bias))
    return np.array(values)

  def round(self, x):
    """float32 or float64 -> codes: nearest, ties to even, saturating."""
    numbers = self.numbers()
    x = np.asarray(x, np.float64)
    size = np.where(np.isnan(x), 0, np.abs(x))
    middle = (numbers[1:] + numbers[:-1]) / 2
    code = np.searchsorted(middle, size)
    tie = middle[np.minimum(code, len(middle) - 1)] == size
    code += tie & (code % 2 == 1)
    negative = np.signbit(x) & (self.negative_zero | (code != 0))
    code = code + np.where(negative, self.sign, 0)
    return np.where(np.isnan(x), self.nan, code).astype(np.uint8)

  def value(self, codes):
    """Codes -> float64."""
    codes = np.asarray(codes, np.uint8)
    low = codes % self.sign
    number = self.numbers()[np.minimum(low, self.codes - 1)]
    number = np.where(codes & self.sign, -number, number)
    if self.sign == 8:
      return number
    return np.where((codes == self.nan) | (low >= self.codes), np.nan, number)


E4M3FN = Format(3, 7, 127, 0x7F, 0x80)
E4M3FNUZ = Format(3, 8, 128, 0x80, 0x80, negative_zero=False)
E2M1 = Format(1, 1, 8, 7, 8)
FORMATS = {"float8_e4m3fn": E4M3FN, "float8_e4m3fnuz": E4M3FNUZ, "mxfp4": E2M1}
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0,
           "mxfp4": 6.0}


def round_to(x, kind):
  """Rounds to a kind; one number of mxfp4 in a uint8."""
  if kind == "int8":
    x = np.asarray(x, np.float64)
    x = np.clip(np.where(np.isnan(x), 0, x), -128, 127)
    return np.rint(x).astype(np.int8)
  codes = FORMATS[kind].round(x)
  return codes if kind == "mxfp4" else codes.view(getattr(ml_dtypes, kind))


def value(q, kind):
  """float64 of rounded numbers."""
  if kind == "int8":
    return np.asarray(q, np.float64)
  return FORMATS[kind].value(np.asarray(q).view(np.uint8))


def amax(x, axis):
  """Largest magnitude, float32; NaN where there is one."""
  return np.max(np.abs(np.asarray(x, np.float32)), axis, keepdims=True,
                initial=0)


def f32_scale(amax, kind):
  amax = np.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax).astype(np.float32)
  return amax / np.float32(LARGEST[kind])


def _exponent(amax, kind, mode):
  """log2 of one scale, before the range of e8m0."""
  amax = float(amax)
  fraction, exponent = math.frexp(amax)  # In [1/2, 1).
  power = math.floor(math.log2(LARGEST[kind]))
  if mode == "up":  # The least k with 2^k * largest >= amax.
    k = exponent - power - 2
    while math.ldexp(LARGEST[kind], k) < amax:
      k += 1
    return k
  if mode == "down":
    return exponent - 1 - power
  if mode == "ceil":
    return exponent - (fraction == 0.5) - power
  # Rounded to the mantissa of the kind, halves up.
  steps = 2 * 2**{"mxfp4": 1}.get(kind, 3)
  rounded = math.floor(fraction * steps + 0.5)
  return exponent - 1 + (rounded == steps) - power


def e8m0_scale(amax, kind, mode):
  """uint8 scales of largest magnitudes."""
  def one(a):
    if not np.isfinite(a):
      return 255
    return 0 if a == 0 else max(_exponent(a, kind, mode) + 127, 0)

  flat = np.asarray(amax, np.float32)
  return np.array([one(a) for a in flat.ravel()], np.uint8).reshape(flat.shape)


def from_e8m0(scale):
  """float64."""
  scale = np.asarray(scale)
  return np.where(scale == 255, np.nan, 2.0**(scale.astype(np.float64) - 127))


def pack(codes):
  return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed):
  return np.stack([packed & 15, packed >> 4], -1).reshape(
      *packed.shape[:-1], -1)


def _whole(x, rows, cols):
  """x with zeros up to multiples, as [..., m / rows, rows, n / cols, cols]."""
  *lead, m, n = x.shape
  padded = np.zeros((*lead, -(-m // rows) * rows, -(-n // cols) * cols),
                    np.float32)
  padded[..., :m, :n] = x
  return padded.reshape(*lead, padded.shape[-2] // rows, rows, -1, cols)


def tiles(x, kind, rows, cols, mode=None):
  """One scale for each `rows` by `cols` of the last two dimensions.

  Args:
    x: [..., m, n].
    kind: of the numbers.
    rows: of a tile.
    cols: of a tile.
    mode: of an e8m0 scale; None for float32.

  Returns:
    (q [..., m, n], scale [..., m / rows, n / cols], rounded up).
  """
  x = np.asarray(x, np.float32)
  whole = _whole(x, rows, cols)
  if whole.size == 0:
    scale = np.zeros(whole.shape[:-3] + whole.shape[-2:-1], np.float32)
  else:
    scale = amax(whole, (-3, -1))
  with np.errstate(all="ignore"):
    if mode is None:
      scale = f32_scale(scale, kind)
      whole = whole / scale
    else:
      scale = e8m0_scale(scale, kind, mode)
      whole = whole.astype(np.float64) / from_e8m0(scale)
  back = whole.reshape(*x.shape[:-2], whole.shape[-4] * rows, -1)
  q = round_to(back[..., :x.shape[-2], :x.shape[-1]], kind)
  return q, scale[..., 0, :, 0]


def token(x, kind, smooth=None):
  """One scale a row, [..., 1]."""
  x = np.asarray(x, np.float32)
  if smooth is not None:
    x = x * smooth
  q, scale = tiles(x[..., None, :], kind, 1, x.shape[-1])
  return q.reshape(x.shape), scale.reshape(*x.shape[:-1], 1)


def static(x, kind, scale, smooth=None):
  x = np.asarray(x, np.float32)
  if smooth is not None:
    x = x * smooth
  with np.errstate(all="ignore"):
    return round_to(x / np.asarray(scale, np.float32), kind)


def shuffled(scale):
  """A matrix of scales where AITER's mx_scale_shuffle_idx puts each one."""
  m, g = scale.shape
  out = np.zeros((-(-m // 256) * 256, -(-g // 8) * 8), scale.dtype)
  for r in range(m):
    for c in range(g):
      out.flat[r // 32 * out.shape[1] * 32 + c // 8 * 256 + c % 4 * 64
               + r % 16 * 4 + c % 8 // 4 * 2 + r % 32 // 16] = scale[r, c]
  return out
