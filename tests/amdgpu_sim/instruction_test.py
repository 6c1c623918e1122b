# SPDX-License-Identifier: Apache-2.0
"""Every scalar and vector instruction against its definition.

The tables have a line a mnemonic: the types of its operands and a function of
NumPy lanes or Python integers that says what it computes, written from AMD's
"CDNA3" and "CDNA4" instruction set documents. Each runs on the edge values of
its types in many combinations, with all lanes and with some switched off.
LITERALS has results worked out by hand.
"""

import fractions
import importlib
import inspect
import itertools
import math
import os
import re
import sys

import numpy as np
from absl.testing import absltest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# pylint: disable=g-import-not-at-top,g-bad-import-order
import asm
import reference
from reference import ieee

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I8, I16, I32, I64 = np.int8, np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64
M32, M64 = 2**32 - 1, 2**64 - 1
DST, DST2, SRC = 128, 10, (32, 64, 96)

# Types of operands. A number before a type: so many of them, packed.
DTYPES = {
    "u8": U8, "i8": I8, "u16": U16, "i16": I16, "f16": F16, "u32": U32,
    "i32": I32, "f32": F32, "u64": U64, "i64": I64, "f64": F64,
}
_INT32 = [
    0, 1, 2, 3, 5, 15, 16, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF,
    0x8000, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000, 0xFFFFFF, 0x7FFFFFFF,
    0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFF8000, 0x12345678,
    0xDEADBEEF, 0xAAAAAAAA, 0x00F0FF0F,
]
_FLOAT32 = np.array([
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.5, -3.7, math.pi,
    1 + 2**-23, 1 - 2**-24, 2.0**24 + 2, -(2.0**31), 2.0**31, 2.0**32, 1e10,
    -1e-10, 255.5, 256.0, 65504.0, 65520.0, 65535.7, -32769.0, 2.0**-126,
    2.0**-149, -(2.0**-149), 2.0**-127, 1.1754942e-38, 3.4028235e38,
    -3.4028235e38, math.inf, -math.inf, math.nan, 2.0**-14, 2.0**-24,
    2.0**-25, 6.1e-5, 3.0e-6, 0.1, 100.25, 2.0**127,
], F32)
EDGES = {
    "u32": np.array(_INT32, U32),
    "u16": np.array([x & 0xFFFF for x in _INT32[:21]]
                    + [0x1234, 0xFFFE, 0xABCD], U16),
    "u64": np.array([0, 1, 2, 31, 32, 63, 64, 0xFFFFFFFF, 0x100000000,
                     0x7FFFFFFFFFFFFFFF, 0x8000000000000000, M64, M64 - 1,
                     0x123456789ABCDEF0, 0xFFFFFFFF00000000, 0x80000000,
                     0x5555AAAA0000FFFF], U64),
    "f32": _FLOAT32,
    "f16": np.array([0.0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 3.5, 0.1, 1000.5,
                     65504, -65504, 32768, 2.0**-14, 2.0**-24, -(2.0**-24),
                     2.0**-15, 6.0e-5, math.inf, -math.inf, math.nan, 255.5,
                     2047, 2049, 0.3333, 7.0, -11.0], F16),
    "f64": np.array([0.0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, math.pi, 1e10,
                     -1e-300, 2.0**31, -(2.0**31) - 0.5, 2.0**32, 2.0**-1022,
                     5e-324, -5e-324, 1e-310, 1.7976931348623157e308,
                     math.inf, -math.inf, math.nan, 1 + 2.0**-52, 0.1,
                     2.0**-149, 2.0**-150, 3.4028235677973366e38,
                     2147483647.5, 1 + 2.0**-24, -4294967296.0], F64),
}
EDGES["i32"] = EDGES["u32"].view(I32)
EDGES["i16"] = EDGES["u16"].view(I16)
EDGES["i64"] = EDGES["u64"].view(I64)
EDGES["u8"] = EDGES["u16"].astype(U8)
EDGES["i8"] = EDGES["u8"].view(I8)


def split(type_name):
  """Of "2f16": (2, "f16")."""
  count, name = re.fullmatch(r"(\d*)(\w\d+)", type_name).groups()
  return int(count or 1), name


def words_of(type_name):
  count, name = split(type_name)
  return max(1, count * DTYPES[name]().itemsize // 4)


def register(kind, first, words):
  if words == 1:
    return f"{kind}{first}"
  return f"{kind}[{first}:{first + words - 1}]"


def samples(type_name, generator, rows):
  """[rows, 64] or [rows, 64, count] values: edges, and random bits."""
  count, name = split(type_name)
  edges = EDGES[name]
  shape = (rows, 64) if count == 1 else (rows, 64, count)
  raw = generator.integers(0, 256, (*shape, edges.itemsize), U8)
  noise = raw.view(edges.dtype)[..., 0]
  if name[0] == "f":
    modest = generator.normal(0, 8, shape).astype(edges.dtype)
    noise = np.where(generator.random(shape) < 0.5, modest, noise)
    noise = np.where(np.isnan(noise), edges.dtype.type(math.nan), noise)
  picks = edges[generator.integers(0, len(edges), shape)]
  values = np.where(generator.random(shape) < 0.8, picks, noise)
  # One row walks through all edges in order.
  flat = values[0].reshape(64, -1)
  for column in range(flat.shape[1]):
    n = min(64, len(edges))
    flat[:n, column] = edges[:n]
  return values.astype(edges.dtype)


class Line:
  """A mnemonic's line of the table.

  Attributes:
    dst, src: types. "m" is a mask of lanes (vcc), "s32" a scalar register.
    function: of the sources by position, or by these names: d the old
      destination, vcc, exec, lane. Returns the destinations.
    text: operands, if they are not those of the types.
    ulp: units in the last place by which a float result may differ.
    keep: a 16-bit result leaves the high half of its register.
  """

  def __init__(self, mnemonic, types, function, text=None, ulp=0, keep=False,
               rows=10, positive=False, archs=None):
    self.mnemonic = mnemonic
    dst, src = types.split("=")
    self.dst, self.src = dst.split(), src.split()
    self.function = function
    self.text = text
    self.ulp = ulp
    self.keep = keep
    self.rows = rows
    self.positive = positive
    self.archs = archs

  def operands(self):
    words = []
    for i, kind in enumerate(self.dst):
      if kind == "m":
        words.append("vcc")
      elif kind == "s32":
        words.append(f"s{DST2}")
      else:
        words.append(register("v", DST + 16 * i, words_of(kind)))
    for i, kind in enumerate(self.src):
      if kind == "m":
        words.append("vcc")
      elif kind != "d":
        words.append(register("v", SRC[i], words_of(kind)))
    return ", ".join(words)

  def instruction(self):
    return f"{self.mnemonic} {self.text or self.operands()}"


def call(line, sources, **state):
  """Results of a line's function, as a tuple."""
  function = line.function
  inner = function
  names = [] if hasattr(inner, "exact") else [
      p.name for p in inspect.signature(inner).parameters.values()
      if p.kind is not p.VAR_POSITIONAL
  ]
  wanted = {n: state[n] for n in names if n in state}
  with np.errstate(all="ignore"):
    results = function(*sources, **wanted)
  return results if isinstance(results, tuple) else (results,)


def pack(mask):
  return int(sum(1 << i for i in range(64) if mask[i]))


def unpack(bits):
  return np.array([bits >> i & 1 for i in range(64)], bool)


def bits_of(array):
  return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def same(actual, expected, ulp):
  """Where two arrays of a float or integer type agree."""
  if expected.dtype.kind != "f":
    return actual == expected
  close = bits_of(actual) == bits_of(expected)
  close |= np.isnan(actual) & np.isnan(expected)
  if ulp:
    with np.errstate(all="ignore"):
      step = np.spacing(np.abs(expected)) * expected.dtype.type(ulp)
      close |= np.abs(actual - expected) <= step
  return close


# Definitions.


def wrap(name, function):
  """Computes in Python's integers, element by element; wraps the result."""
  dtype = DTYPES[name]

  def lanes(*arrays):
    rows = zip(*(a.reshape(-1).tolist() for a in arrays))
    size = 8 * dtype().itemsize
    out = [function(*row) & (2**size - 1) for row in rows]
    unsigned = np.array(out, f"u{size // 8}").reshape(arrays[0].shape)
    return unsigned.view(dtype)

  return lanes


def each(name, function):
  """A function of single NumPy numbers, lane by lane."""
  def lanes(*arrays):
    rows = zip(*(a.reshape(-1) for a in arrays))
    out = np.array([function(*row) for row in rows], DTYPES[name])
    return out.reshape(arrays[0].shape)

  return lanes


def clamped(low, high):
  return lambda x: min(max(x, low), high)


def to_int(name, rounder=math.trunc):
  """A float to an integer that saturates; NaN is 0."""
  info = np.iinfo(DTYPES[name])

  def convert(x):
    x = float(x)
    if math.isnan(x):
      return 0
    if math.isinf(x):
      return info.max if x > 0 else info.min
    return min(max(rounder(x), info.min), info.max)

  return each(name, convert)


def real(function):
  """A function of Python floats, exact enough to round it to a narrow type."""
  def lanes(*arrays):
    rows = zip(*(a.astype(F64).tolist() for a in arrays))
    out = []
    for row in rows:
      try:
        out.append(function(*row))
      except (ValueError, OverflowError, ZeroDivisionError):
        out.append(math.nan)
    return np.array(out, F64).astype(arrays[0].dtype)

  return lanes


def flushed(x):
  """Denormals as zeros of their sign."""
  tiny = np.finfo(x.dtype).tiny
  return np.where(np.abs(x) < tiny, np.copysign(x.dtype.type(0), x), x)


def trans(function, flush=True):
  """A transcendental function: float32 ones flush denormals both ways."""
  def lanes(x):
    if x.dtype == F32 and flush:
      return flushed(real(function)(flushed(x)))
    return real(function)(x)

  return lanes


def rcp(x):
  return math.copysign(math.inf, x) if x == 0 else 1 / x


def rsq(x):
  if x == 0:
    return math.copysign(math.inf, x)
  return 1 / math.sqrt(x)


def log2(x):
  return -math.inf if x == 0 else math.log2(x)


def exp2(x):
  return math.inf if x > 1023 else 2.0**x


def sqrt(x):
  return math.sqrt(x) if x else x


def turns(function):
  """sin or cos of 2 pi x; the documents give a domain of +-256 turns."""
  def value(x):
    return function(2 * math.pi * math.fmod(x, 1))
  return value


def number_min(a, b):
  """IEEE minNum, minus zero below zero. Quiet NaNs lose."""
  out = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.minimum(a, b)))
  zeros = (a == 0) & (b == 0)
  return np.where(zeros, np.where(np.signbit(a), a, b), out)


def number_max(a, b):
  out = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.maximum(a, b)))
  zeros = (a == 0) & (b == 0)
  return np.where(zeros, np.where(np.signbit(a), b, a), out)


def number_med3(a, b, c):
  nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
  low = number_min(number_min(a, b), c)
  high = number_max(number_max(a, b), c)
  middle = np.where(high == a, number_max(b, c), np.where(
      high == b, number_max(a, c), number_max(a, b)))
  return np.where(nan, low, middle)


def nan_min(a, b):
  """IEEE 754-2019 minimum: a NaN wins, minus zero is below zero."""
  out = number_min(a, b)
  return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(math.nan), out)


def nan_max(a, b):
  out = number_max(a, b)
  return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(math.nan), out)


def median(a, b, c):
  return np.sort(np.stack([a, b, c]), 0)[1]


def frexp_mantissa(x):
  return np.where(np.isfinite(x), np.frexp(x)[0], x)


def frexp_exponent(x):
  return np.where(np.isfinite(x) & (x != 0), np.frexp(x)[1], 0)


def fract(x):
  """x - floor(x), below one."""
  below = np.nextafter(x.dtype.type(1), x.dtype.type(0))
  return np.where(np.isinf(x), x.dtype.type(math.nan),
                  np.minimum(x - np.floor(x), below))


def ldexp(name):
  form = reference.FORMATS[name]

  def one(x, power):
    if not math.isfinite(x) or x == 0:
      return x
    power = max(min(int(power), 5000), -5000)
    value = fractions.Fraction(float(x)) * fractions.Fraction(2) ** power
    return bits_of(np.array([0], DTYPES[name])).dtype.type(
        reference.encode(value, form)).view(DTYPES[name])

  return each(name, one)


def class_of(x):
  """The bit of v_cmp_class that a value has."""
  out = np.full(x.shape, 8)
  size = np.finfo(x.dtype)
  quiet = bits_of(x) >> (size.nmant - 1) & 1
  out[np.abs(x) < size.tiny] = 7
  out[x == 0] = 6
  out[np.isinf(x)] = 9
  out = np.where(np.signbit(x), 11 - out, out)
  return np.where(np.isnan(x), np.where(quiet, 1, 0), out)


def bfe(x, offset, width, is_signed):
  offset, width = offset & 31, width & 31
  field = (signed(x, 32) if is_signed else x) >> offset & ((1 << width) - 1)
  return signed(field, width) if is_signed and width else field


def first_bit_high(x, size=32):
  return size - x.bit_length() if x else -1


def first_bit_low(x):
  return (x & -x).bit_length() - 1


def first_other_high(x, size=32):
  """The first bit, from the top, that is not the sign; -1 without one."""
  flipped = x ^ (-(x >> (size - 1) & 1) & (2**size - 1))
  return first_bit_high(flipped, size)


def reverse(x, size):
  return int(f"{x:0{size}b}"[::-1], 2)


def bytes_of(x):
  return [x >> 8 * i & 255 for i in range(4)]


def permute(a, b, selector):
  pool = [*bytes_of(b), *bytes_of(a)]
  out = 0
  for i, select in enumerate(bytes_of(selector)):
    if select >= 13:
      byte = 255
    elif select == 12:
      byte = 0
    elif select >= 8:
      byte = 255 * (pool[2 * select - 15] >> 7)
    else:
      byte = pool[select]
    out |= byte << 8 * i
  return out


def sad(a, b, c):
  return sum(abs(x - y) for x, y in zip(bytes_of(a), bytes_of(b))) + c


def msad(a, b, c):
  return sum(abs(x - y) for x, y in zip(bytes_of(a), bytes_of(b)) if y) + c


def lerp(a, b, c):
  return sum((x + y + (z & 1) >> 1) << 8 * i for i, (x, y, z) in enumerate(
      zip(bytes_of(a), bytes_of(b), bytes_of(c))))


def halves(x):
  return [x & 0xFFFF, x >> 16 & 0xFFFF]


def signed(x, size):
  x &= (1 << size) - 1
  return x - (1 << size) if x >> (size - 1) else x


def sad16(a, b, c):
  return sum(abs(x - y) for x, y in zip(halves(a), halves(b))) + c


def narrow(name, rounding=reference.EVEN):
  """Rounds exact values to a type."""
  convert = ieee(lambda x: x, name)
  convert.rounding = rounding
  return convert


def stack(*parts):
  return np.stack(parts, -1)


def dot(size, is_signed):
  count = 32 // size

  def one(a, b, c):
    part = lambda x, i: (signed(x >> size * i, size) if is_signed
                         else x >> size * i & ((1 << size) - 1))
    return c + sum(part(a, i) * part(b, i) for i in range(count))

  return one


def bitop(table, size):
  def one(a, b, c):
    out = 0
    for i in range(size):
      index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)
      out |= (table >> index & 1) << i
    return out
  return one


add = ieee(lambda a, b: a + b)
sub = ieee(lambda a, b: a - b)
mul = ieee(lambda a, b: a * b)
fma = ieee(lambda a, b, c: a * b + c)


def mad(a, b, c):
  """Not fused: the product is rounded, then the sum. Flushes denormals."""
  product = flushed(mul(flushed(a), flushed(b)))
  return flushed(add(product, flushed(c)))


by_half = lambda function: lambda *x: stack(
    *(function(*(v[:, i] for v in x)) for i in range(x[0].shape[1]))
)

L = Line
VECTOR = [
    # Moves.
    L("v_mov_b32", "u32 = u32", lambda a: a),
    L("v_mov_b64", "u64 = u64", lambda a: a),
    L("v_nop", "=", lambda: (), text=""),
    L("v_not_b32", "u32 = u32", lambda a: ~a),
    L("v_bfrev_b32", "u32 = u32", wrap("u32", lambda a: reverse(a, 32))),
    L("v_ffbh_u32", "i32 = u32", wrap("i32", first_bit_high)),
    L("v_ffbl_b32", "i32 = u32", wrap("i32", first_bit_low)),
    L("v_ffbh_i32", "i32 = u32", wrap("i32", first_other_high)),
    L("v_bcnt_u32_b32", "u32 = u32 u32",
      wrap("u32", lambda a, b: a.bit_count() + b)),
    L("v_bfm_b32", "u32 = u32 u32",
      wrap("u32", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31))),
    L("v_accvgpr_mov_b32", "u32 = u32", lambda a: a),
    L("v_accvgpr_read_b32", "u32 = u32", lambda a: a),
    L("v_accvgpr_write_b32", "u32 = u32", lambda a: a),
    # Integers.
    L("v_add_u32", "u32 = u32 u32", lambda a, b: a + b),
    L("v_sub_u32", "u32 = u32 u32", lambda a, b: a - b),
    L("v_subrev_u32", "u32 = u32 u32", lambda a, b: b - a),
    L("v_add_i32", "i32 = i32 i32", lambda a, b: a + b),
    L("v_sub_i32", "i32 = i32 i32", lambda a, b: a - b),
    L("v_add_i16", "i16 = i16 i16", lambda a, b: a + b, keep=True),
    L("v_sub_i16", "i16 = i16 i16", lambda a, b: a - b, keep=True),
    L("v_add_co_u32", "u32 m = u32 u32",
      lambda a, b: (a + b, a.astype(U64) + b > M32)),
    L("v_sub_co_u32", "u32 m = u32 u32", lambda a, b: (a - b, b > a)),
    L("v_subrev_co_u32", "u32 m = u32 u32", lambda a, b: (b - a, a > b)),
    L("v_addc_co_u32", "u32 m = u32 u32 m", lambda a, b, c: (
        a + b + c, a.astype(U64) + b + c > M32)),
    L("v_subb_co_u32", "u32 m = u32 u32 m", lambda a, b, c: (
        a - b - c, b.astype(U64) + c > a)),
    L("v_subbrev_co_u32", "u32 m = u32 u32 m", lambda a, b, c: (
        b - a - c, a.astype(U64) + c > b)),
    L("v_cndmask_b32", "u32 = u32 u32 m", lambda a, b, c: np.where(c, b, a)),
    L("v_mul_lo_u32", "u32 = u32 u32", lambda a, b: a * b),
    L("v_mul_hi_u32", "u32 = u32 u32", wrap("u32", lambda a, b: a * b >> 32)),
    L("v_mul_hi_i32", "i32 = i32 i32", wrap("i32", lambda a, b: a * b >> 32)),
    L("v_mul_i32_i24", "i32 = u32 u32", wrap("i32", lambda a, b: (
        signed(a, 24) * signed(b, 24)))),
    L("v_mul_hi_i32_i24", "i32 = u32 u32", wrap("i32", lambda a, b: (
        signed(a, 24) * signed(b, 24) >> 32))),
    L("v_mul_u32_u24", "u32 = u32 u32", wrap("u32", lambda a, b: (
        (a & 0xFFFFFF) * (b & 0xFFFFFF)))),
    L("v_mul_hi_u32_u24", "u32 = u32 u32", wrap("u32", lambda a, b: (
        (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 32))),
    L("v_mad_i32_i24", "i32 = u32 u32 i32", wrap("i32", lambda a, b, c: (
        signed(a, 24) * signed(b, 24) + c))),
    L("v_mad_u32_u24", "u32 = u32 u32 u32", wrap("u32", lambda a, b, c: (
        (a & 0xFFFFFF) * (b & 0xFFFFFF) + c))),
    L("v_mad_u32_u16", "u32 = u16 u16 u32",
      wrap("u32", lambda a, b, c: a * b + c)),
    L("v_mad_i32_i16", "i32 = i16 i16 i32",
      wrap("i32", lambda a, b, c: a * b + c)),
    L("v_mad_u64_u32", "u64 m = u32 u32 u64", lambda a, b, c: (
        wrap("u64", lambda a, b, c: a * b + c)(a, b, c),
        wrap("u8", lambda a, b, c: a * b + c >> 64)(a, b, c) == 1),
      text="v[128:129], vcc, v32, v64, v[96:97]"),
    L("v_mad_i64_i32", "i64 m = i32 i32 i64", lambda a, b, c: (
        wrap("i64", lambda a, b, c: a * b + c)(a, b, c),
        wrap("u8", lambda a, b, c: (a * b + c >> 64) & 1)(a, b, c) == 1),
      text="v[128:129], vcc, v32, v64, v[96:97]"),
    L("v_min_i32", "i32 = i32 i32", np.minimum),
    L("v_max_i32", "i32 = i32 i32", np.maximum),
    L("v_min_u32", "u32 = u32 u32", np.minimum),
    L("v_max_u32", "u32 = u32 u32", np.maximum),
    L("v_min3_i32", "i32 = i32 i32 i32", lambda a, b, c: (
        np.minimum(np.minimum(a, b), c))),
    L("v_max3_i32", "i32 = i32 i32 i32", lambda a, b, c: (
        np.maximum(np.maximum(a, b), c))),
    L("v_med3_i32", "i32 = i32 i32 i32", median),
    L("v_min3_u32", "u32 = u32 u32 u32", lambda a, b, c: (
        np.minimum(np.minimum(a, b), c))),
    L("v_max3_u32", "u32 = u32 u32 u32", lambda a, b, c: (
        np.maximum(np.maximum(a, b), c))),
    L("v_med3_u32", "u32 = u32 u32 u32", median),
    L("v_lshlrev_b32", "u32 = u32 u32", lambda a, b: b << (a & 31)),
    L("v_lshrrev_b32", "u32 = u32 u32", lambda a, b: b >> (a & 31)),
    L("v_ashrrev_i32", "i32 = u32 i32",
      lambda a, b: b >> (a & 31).astype(I32)),
    L("v_lshlrev_b64", "u64 = u32 u64", lambda a, b: b << (a & 63)),
    L("v_lshrrev_b64", "u64 = u32 u64", lambda a, b: b >> (a & 63)),
    L("v_ashrrev_i64", "i64 = u32 i64", lambda a, b: b >> (a & 63)),
    L("v_and_b32", "u32 = u32 u32", lambda a, b: a & b),
    L("v_or_b32", "u32 = u32 u32", lambda a, b: a | b),
    L("v_xor_b32", "u32 = u32 u32", lambda a, b: a ^ b),
    L("v_xnor_b32", "u32 = u32 u32", lambda a, b: ~(a ^ b)),
    L("v_add3_u32", "u32 = u32 u32 u32", lambda a, b, c: a + b + c),
    L("v_lshl_add_u32", "u32 = u32 u32 u32",
      lambda a, b, c: (a << (b & 31)) + c),
    L("v_add_lshl_u32", "u32 = u32 u32 u32",
      lambda a, b, c: (a + b) << (c & 31)),
    L("v_lshl_add_u64", "u64 = u64 u32 u64",
      lambda a, b, c: (a << (b & 7).astype(U64)) + c),
    L("v_lshl_or_b32", "u32 = u32 u32 u32",
      lambda a, b, c: (a << (b & 31)) | c),
    L("v_and_or_b32", "u32 = u32 u32 u32", lambda a, b, c: a & b | c),
    L("v_or3_b32", "u32 = u32 u32 u32", lambda a, b, c: a | b | c),
    L("v_xad_u32", "u32 = u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    L("v_bfe_u32", "u32 = u32 u32 u32",
      wrap("u32", lambda a, b, c: bfe(a, b, c, False))),
    L("v_bfe_i32", "i32 = u32 u32 u32",
      wrap("i32", lambda a, b, c: bfe(a, b, c, True))),
    L("v_bfi_b32", "u32 = u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    L("v_alignbit_b32", "u32 = u32 u32 u32",
      wrap("u32", lambda a, b, c: (a << 32 | b) >> (c & 31))),
    L("v_alignbyte_b32", "u32 = u32 u32 u32",
      wrap("u32", lambda a, b, c: (a << 32 | b) >> 8 * (c & 3))),
    L("v_perm_b32", "u32 = u32 u32 u32", wrap("u32", permute)),
    L("v_lerp_u8", "u32 = u32 u32 u32", wrap("u32", lerp)),
    L("v_sad_u8", "u32 = u32 u32 u32", wrap("u32", sad)),
    L("v_sad_hi_u8", "u32 = u32 u32 u32",
      wrap("u32", lambda a, b, c: (sad(a, b, 0) << 16) + c)),
    L("v_msad_u8", "u32 = u32 u32 u32", wrap("u32", msad)),
    L("v_sad_u16", "u32 = u32 u32 u32", wrap("u32", sad16)),
    L("v_sad_u32", "u32 = u32 u32 u32",
      wrap("u32", lambda a, b, c: abs(a - b) + c)),
    L("v_mbcnt_lo_u32_b32", "u32 = u32 u32", lambda a, b, lane: wrap(
        "u32", lambda a, b, n: (
            (a & (1 << min(n, 32)) - 1).bit_count() + b))(a, b, lane)),
    L("v_mbcnt_hi_u32_b32", "u32 = u32 u32", lambda a, b, lane: wrap(
        "u32", lambda a, b, n: (
            (a & (1 << max(n - 32, 0)) - 1).bit_count() + b))(a, b, lane)),
    L("v_bitop3_b32", "u32 = u32 u32 u32",
      wrap("u32", bitop(0xCA, 32)), text="v128, v32, v64, v96 bitop3:0xca"),
    L("v_bitop3_b16", "u16 = u16 u16 u16", wrap("u16", bitop(0x6B, 16)),
      text="v128, v32, v64, v96 bitop3:0x6b", keep=None),
    L("v_prng_b32", "u32 = u32", wrap("u32", lambda a: (
        a << 1 ^ (197 if a >> 31 else 0)))),
    L("v_ashr_pk_i8_i32", "2i8 = i32 i32 u32", lambda a, b, c: stack(*(
        wrap("i8", lambda x, n: clamped(-128, 127)(x >> (n & 31)))(x, c)
        for x in (a, b))), keep=None),
    L("v_ashr_pk_u8_i32", "2u8 = i32 i32 u32", lambda a, b, c: stack(*(
        wrap("u8", lambda x, n: clamped(0, 255)(x >> (n & 31)))(x, c)
        for x in (a, b))), keep=None),
    # 16 bits.
    L("v_add_u16", "u16 = u16 u16", lambda a, b: a + b),
    L("v_sub_u16", "u16 = u16 u16", lambda a, b: a - b),
    L("v_subrev_u16", "u16 = u16 u16", lambda a, b: b - a),
    L("v_mul_lo_u16", "u16 = u16 u16", lambda a, b: a * b),
    L("v_lshlrev_b16", "u16 = u16 u16", lambda a, b: b << (a & 15)),
    L("v_lshrrev_b16", "u16 = u16 u16", lambda a, b: b >> (a & 15)),
    L("v_ashrrev_i16", "i16 = u16 i16",
      lambda a, b: b >> (a & 15).astype(I16)),
    L("v_max_u16", "u16 = u16 u16", np.maximum),
    L("v_max_i16", "i16 = i16 i16", np.maximum),
    L("v_min_u16", "u16 = u16 u16", np.minimum),
    L("v_min_i16", "i16 = i16 i16", np.minimum),
    L("v_mad_u16", "u16 = u16 u16 u16", lambda a, b, c: a * b + c, keep=True),
    L("v_mad_i16", "i16 = i16 i16 i16", lambda a, b, c: a * b + c, keep=True),
    L("v_mad_legacy_u16", "u16 = u16 u16 u16", lambda a, b, c: a * b + c),
    L("v_mad_legacy_i16", "i16 = i16 i16 i16", lambda a, b, c: a * b + c),
    L("v_min3_i16", "i16 = i16 i16 i16",
      lambda a, b, c: np.minimum(np.minimum(a, b), c), keep=True),
    L("v_max3_i16", "i16 = i16 i16 i16",
      lambda a, b, c: np.maximum(np.maximum(a, b), c), keep=True),
    L("v_med3_i16", "i16 = i16 i16 i16", median, keep=True),
    L("v_min3_u16", "u16 = u16 u16 u16",
      lambda a, b, c: np.minimum(np.minimum(a, b), c), keep=True),
    L("v_max3_u16", "u16 = u16 u16 u16",
      lambda a, b, c: np.maximum(np.maximum(a, b), c), keep=True),
    L("v_med3_u16", "u16 = u16 u16 u16", median, keep=True),
    L("v_sat_pk_u8_i16", "2u8 = 2i16",
      lambda a: np.clip(a, 0, 255).astype(U8)),
    L("v_pack_b32_f16", "2f16 = f16 f16", stack),
    L("v_cvt_pk_u16_u32", "2u16 = u32 u32", lambda a, b: stack(
        *(np.minimum(x, 0xFFFF).astype(U16) for x in (a, b)))),
    L("v_cvt_pk_i16_i32", "2i16 = i32 i32", lambda a, b: stack(
        *(np.clip(x, -32768, 32767).astype(I16) for x in (a, b)))),
    # float32.
    L("v_add_f32", "f32 = f32 f32", add),
    L("v_sub_f32", "f32 = f32 f32", sub),
    L("v_subrev_f32", "f32 = f32 f32", ieee(lambda a, b: b - a)),
    L("v_mul_f32", "f32 = f32 f32", mul),
    L("v_mul_legacy_f32", "f32 = f32 f32", lambda a, b: np.where(
        (a == 0) | (b == 0), F32(0), mul(a, b))),
    L("v_fma_f32", "f32 = f32 f32 f32", fma),
    L("v_fmac_f32", "f32 = f32 f32", lambda a, b, d: fma(a, b, d)),
    L("v_fmamk_f32", "f32 = f32 f32",
      lambda a, b: fma(a, np.full(64, 0x40490FDB, U32).view(F32), b),
      text="v128, v32, 0x40490fdb, v64"),
    L("v_fmaak_f32", "f32 = f32 f32",
      lambda a, b: fma(a, b, np.full(64, 0x40490FDB, U32).view(F32)),
      text="v128, v32, v64, 0x40490fdb"),
    # gfx90a's.
    L("v_mad_f32", "f32 = f32 f32 f32", lambda a, b, c: mad(a, b, c)),
    L("v_mac_f32", "f32 = f32 f32", lambda a, b, d: mad(a, b, d)),
    L("v_madmk_f32", "f32 = f32 f32",
      lambda a, b: mad(a, np.full(64, 3.140625, F32), b),
      text="v128, v32, 0x40490000, v64"),
    L("v_madak_f32", "f32 = f32 f32",
      lambda a, b: mad(a, b, np.full(64, 3.140625, F32)),
      text="v128, v32, v64, 0x40490000"),
    L("v_mad_legacy_f32", "f32 = f32 f32 f32", lambda a, b, c: np.where(
        (flushed(a) == 0) | (flushed(b) == 0),
        flushed(add(np.zeros(64, F32), flushed(c))), mad(a, b, c))),
    L("v_min_f32", "f32 = f32 f32", number_min),
    L("v_max_f32", "f32 = f32 f32", number_max),
    L("v_min3_f32", "f32 = f32 f32 f32",
      lambda a, b, c: number_min(number_min(a, b), c)),
    L("v_max3_f32", "f32 = f32 f32 f32",
      lambda a, b, c: number_max(number_max(a, b), c)),
    L("v_med3_f32", "f32 = f32 f32 f32", number_med3),
    L("v_minimum3_f32", "f32 = f32 f32 f32",
      lambda a, b, c: nan_min(nan_min(a, b), c)),
    L("v_maximum3_f32", "f32 = f32 f32 f32",
      lambda a, b, c: nan_max(nan_max(a, b), c)),
    L("v_fract_f32", "f32 = f32", fract),
    L("v_trunc_f32", "f32 = f32", np.trunc),
    L("v_ceil_f32", "f32 = f32", np.ceil),
    L("v_rndne_f32", "f32 = f32", np.rint),
    L("v_floor_f32", "f32 = f32", np.floor),
    L("v_exp_f32", "f32 = f32", trans(exp2), ulp=1),
    L("v_log_f32", "f32 = f32", trans(log2), ulp=1),
    L("v_rcp_f32", "f32 = f32", trans(rcp), ulp=1),
    L("v_rcp_iflag_f32", "f32 = f32", trans(rcp), ulp=1),
    L("v_rsq_f32", "f32 = f32", trans(rsq), ulp=1),
    L("v_sqrt_f32", "f32 = f32", trans(sqrt), ulp=1),
    L("v_frexp_exp_i32_f32", "i32 = f32", frexp_exponent),
    L("v_frexp_mant_f32", "f32 = f32", frexp_mantissa),
    L("v_ldexp_f32", "f32 = f32 i32", ldexp("f32")),
    # float64.
    L("v_add_f64", "f64 = f64 f64", add),
    L("v_mul_f64", "f64 = f64 f64", mul),
    L("v_fma_f64", "f64 = f64 f64 f64", fma),
    L("v_fmac_f64", "f64 = f64 f64", lambda a, b, d: fma(a, b, d)),
    L("v_min_f64", "f64 = f64 f64", number_min),
    L("v_max_f64", "f64 = f64 f64", number_max),
    L("v_fract_f64", "f64 = f64", fract),
    L("v_trunc_f64", "f64 = f64", np.trunc),
    L("v_ceil_f64", "f64 = f64", np.ceil),
    L("v_rndne_f64", "f64 = f64", np.rint),
    L("v_floor_f64", "f64 = f64", np.floor),
    L("v_frexp_exp_i32_f64", "i32 = f64", frexp_exponent),
    L("v_frexp_mant_f64", "f64 = f64", frexp_mantissa),
    L("v_ldexp_f64", "f64 = f64 i32", ldexp("f64")),
    # float16.
    L("v_add_f16", "f16 = f16 f16", add),
    L("v_sub_f16", "f16 = f16 f16", sub),
    L("v_subrev_f16", "f16 = f16 f16", ieee(lambda a, b: b - a)),
    L("v_mul_f16", "f16 = f16 f16", mul),
    L("v_fma_f16", "f16 = f16 f16 f16", fma, keep=True),
    L("v_fma_legacy_f16", "f16 = f16 f16 f16", fma),
    # The document zeroes the high half of mac, madmk and madak, LLVM expects
    # that it stays: not tested.
    L("v_mac_f16", "f16 = f16 f16", lambda a, b, d: mad(a, b, d), keep=None),
    L("v_mad_f16", "f16 = f16 f16 f16", lambda a, b, c: mad(a, b, c),
      keep=True),
    L("v_mad_legacy_f16", "f16 = f16 f16 f16", lambda a, b, c: mad(a, b, c)),
    L("v_madmk_f16", "f16 = f16 f16",
      lambda a, b: mad(a, np.full(64, 3.140625, F16), b),
      text="v128, v32, 0x4248, v64", keep=None),
    L("v_madak_f16", "f16 = f16 f16",
      lambda a, b: mad(a, b, np.full(64, 3.140625, F16)),
      text="v128, v32, v64, 0x4248", keep=None),
    L("v_min_f16", "f16 = f16 f16", number_min),
    L("v_max_f16", "f16 = f16 f16", number_max),
    L("v_min3_f16", "f16 = f16 f16 f16",
      lambda a, b, c: number_min(number_min(a, b), c), keep=True),
    L("v_max3_f16", "f16 = f16 f16 f16",
      lambda a, b, c: number_max(number_max(a, b), c), keep=True),
    L("v_med3_f16", "f16 = f16 f16 f16", number_med3, keep=True),
    L("v_fract_f16", "f16 = f16", fract),
    L("v_trunc_f16", "f16 = f16", np.trunc),
    L("v_ceil_f16", "f16 = f16", np.ceil),
    L("v_rndne_f16", "f16 = f16", np.rint),
    L("v_floor_f16", "f16 = f16", np.floor),
    L("v_exp_f16", "f16 = f16", trans(exp2), ulp=1),
    L("v_log_f16", "f16 = f16", trans(log2), ulp=1),
    L("v_rcp_f16", "f16 = f16", trans(rcp), ulp=1),
    L("v_rsq_f16", "f16 = f16", trans(rsq), ulp=1),
    L("v_sqrt_f16", "f16 = f16", trans(sqrt), ulp=1),
    L("v_frexp_exp_i16_f16", "i16 = f16",
      lambda a: frexp_exponent(a).astype(I16)),
    L("v_frexp_mant_f16", "f16 = f16", frexp_mantissa),
    L("v_ldexp_f16", "f16 = f16 i16", ldexp("f16")),
    # Conversions.
    L("v_cvt_f32_i32", "f32 = i32", lambda a: a.astype(F32)),
    L("v_cvt_f32_u32", "f32 = u32", lambda a: a.astype(F32)),
    L("v_cvt_i32_f32", "i32 = f32", to_int("i32")),
    L("v_cvt_u32_f32", "u32 = f32", to_int("u32")),
    L("v_cvt_rpi_i32_f32", "i32 = f32",
      to_int("i32", lambda x: math.floor(x + 0.5))),
    L("v_cvt_flr_i32_f32", "i32 = f32", to_int("i32", math.floor)),
    L("v_cvt_off_f32_i4", "f32 = u32",
      lambda a: (((a & 15) ^ 8).astype(I32) - 8).astype(F32) / F32(16)),
    L("v_cvt_f16_f32", "f16 = f32", narrow("f16")),
    L("v_cvt_f32_f16", "f32 = f16", lambda a: a.astype(F32)),
    L("v_cvt_f32_f64", "f32 = f64", narrow("f32")),
    L("v_cvt_f64_f32", "f64 = f32", lambda a: a.astype(F64)),
    L("v_cvt_f64_i32", "f64 = i32", lambda a: a.astype(F64)),
    L("v_cvt_f64_u32", "f64 = u32", lambda a: a.astype(F64)),
    L("v_cvt_i32_f64", "i32 = f64", to_int("i32")),
    L("v_cvt_u32_f64", "u32 = f64", to_int("u32")),
    L("v_cvt_f32_ubyte0", "f32 = u32", lambda a: (a & 255).astype(F32)),
    L("v_cvt_f32_ubyte1", "f32 = u32", lambda a: (a >> 8 & 255).astype(F32)),
    L("v_cvt_f32_ubyte2", "f32 = u32", lambda a: (a >> 16 & 255).astype(F32)),
    L("v_cvt_f32_ubyte3", "f32 = u32", lambda a: (a >> 24 & 255).astype(F32)),
    L("v_cvt_f16_u16", "f16 = u16", lambda a: a.astype(F16)),
    L("v_cvt_f16_i16", "f16 = i16", lambda a: a.astype(F16)),
    L("v_cvt_u16_f16", "u16 = f16", to_int("u16")),
    L("v_cvt_i16_f16", "i16 = f16", to_int("i16")),
    L("v_cvt_pkrtz_f16_f32", "2f16 = f32 f32", lambda a, b: stack(
        *(narrow("f16", reference.ZERO)(x) for x in (a, b)))),
    L("v_cvt_pk_f16_f32", "2f16 = f32 f32", lambda a, b: stack(
        *(narrow("f16")(x) for x in (a, b)))),
    # Packed.
    L("v_pk_add_f16", "2f16 = 2f16 2f16", by_half(add)),
    L("v_pk_mul_f16", "2f16 = 2f16 2f16", by_half(mul)),
    L("v_pk_fma_f16", "2f16 = 2f16 2f16 2f16", by_half(fma)),
    L("v_pk_fmac_f16", "2f16 = 2f16 2f16",
      lambda a, b, d: by_half(fma)(a, b, d)),
    L("v_pk_min_f16", "2f16 = 2f16 2f16", number_min),
    L("v_pk_max_f16", "2f16 = 2f16 2f16", number_max),
    L("v_pk_minimum3_f16", "2f16 = 2f16 2f16 2f16",
      lambda a, b, c: nan_min(nan_min(a, b), c)),
    L("v_pk_maximum3_f16", "2f16 = 2f16 2f16 2f16",
      lambda a, b, c: nan_max(nan_max(a, b), c)),
    L("v_pk_mad_i16", "2i16 = 2i16 2i16 2i16", lambda a, b, c: a * b + c),
    L("v_pk_mad_u16", "2u16 = 2u16 2u16 2u16", lambda a, b, c: a * b + c),
    L("v_pk_mul_lo_u16", "2u16 = 2u16 2u16", lambda a, b: a * b),
    L("v_pk_add_i16", "2i16 = 2i16 2i16", lambda a, b: a + b),
    L("v_pk_sub_i16", "2i16 = 2i16 2i16", lambda a, b: a - b),
    L("v_pk_add_u16", "2u16 = 2u16 2u16", lambda a, b: a + b),
    L("v_pk_sub_u16", "2u16 = 2u16 2u16", lambda a, b: a - b),
    L("v_pk_lshlrev_b16", "2u16 = 2u16 2u16", lambda a, b: b << (a & 15)),
    L("v_pk_lshrrev_b16", "2u16 = 2u16 2u16", lambda a, b: b >> (a & 15)),
    L("v_pk_ashrrev_i16", "2i16 = 2u16 2i16",
      lambda a, b: b >> (a & 15).astype(I16)),
    L("v_pk_max_i16", "2i16 = 2i16 2i16", np.maximum),
    L("v_pk_min_i16", "2i16 = 2i16 2i16", np.minimum),
    L("v_pk_max_u16", "2u16 = 2u16 2u16", np.maximum),
    L("v_pk_min_u16", "2u16 = 2u16 2u16", np.minimum),
    L("v_pk_add_f32", "2f32 = 2f32 2f32", by_half(add)),
    L("v_pk_mul_f32", "2f32 = 2f32 2f32", by_half(mul)),
    L("v_pk_fma_f32", "2f32 = 2f32 2f32 2f32", by_half(fma)),
    L("v_pk_mov_b32", "2u32 = 2u32 2u32",
      lambda a, b: stack(a[:, 1], b[:, 0]),
      text="v[128:129], v[32:33], v[64:65] op_sel:[1,0]"),
    L("v_dot2_i32_i16", "i32 = u32 u32 i32", wrap("i32", dot(16, True))),
    L("v_dot2_u32_u16", "u32 = u32 u32 u32", wrap("u32", dot(16, False))),
    L("v_dot4_i32_i8", "i32 = u32 u32 i32", wrap("i32", dot(8, True))),
    L("v_dot4_u32_u8", "u32 = u32 u32 u32", wrap("u32", dot(8, False))),
    L("v_dot8_i32_i4", "i32 = u32 u32 i32", wrap("i32", dot(4, True))),
    L("v_dot8_u32_u4", "u32 = u32 u32 u32", wrap("u32", dot(4, False))),
    L("v_dot2c_i32_i16", "i32 = u32 u32",
      lambda a, b, d: wrap("i32", dot(16, True))(a, b, d)),
    L("v_dot4c_i32_i8", "i32 = u32 u32",
      lambda a, b, d: wrap("i32", dot(8, True))(a, b, d)),
    L("v_dot8c_i32_i4", "i32 = u32 u32",
      lambda a, b, d: wrap("i32", dot(4, True))(a, b, d)),
    # Lanes.
    L("v_readfirstlane_b32", "s32 = u32", lambda a, exec: a[
        next((i for i in range(64) if exec >> i & 1), 0)]),
    L("v_readlane_b32", "s32 = u32", lambda a: a[37],
      text="s10, v32, 37"),
]


def _compares():
  """v_cmp and v_cmpx of every condition and type."""
  conditions = {
      "f": lambda a, b: a != a if a.dtype.kind != "f" else np.zeros(64, bool),
      "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater,
      "ge": np.greater_equal,
  }
  of_floats = conditions | {
      "lg": lambda a, b: (a < b) | (a > b),
      "o": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
      "u": lambda a, b: np.isnan(a) | np.isnan(b),
      "nge": lambda a, b: ~(a >= b),
      "nlg": lambda a, b: ~((a < b) | (a > b)),
      "ngt": lambda a, b: ~(a > b),
      "nle": lambda a, b: ~(a <= b),
      "neq": lambda a, b: ~(a == b),
      "nlt": lambda a, b: ~(a < b),
      "tru": lambda a, b: np.ones(64, bool),
  }
  of_integers = conditions | {
      "ne": np.not_equal,
      "t": lambda a, b: np.ones(64, bool),
  }
  lines = []
  for prefix in ("v_cmp_", "v_cmpx_"):
    for kind in ("f16", "f32", "f64"):
      for name, function in of_floats.items():
        lines.append(L(f"{prefix}{name}_{kind}", f"m = {kind} {kind}",
                       function, rows=6))
      lines.append(L(f"{prefix}class_{kind}", f"m = {kind} u32", lambda a, b: (
          (b >> class_of(a).astype(U32) & 1).astype(bool))))
    for kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
      for name, function in of_integers.items():
        lines.append(L(f"{prefix}{name}_{kind}", f"m = {kind} {kind}",
                       function, rows=6))
  return lines


VECTOR += _compares()


class Scalar:
  """A scalar mnemonic's line: a function of Python integers.

  Parameters by position are sources; by name d (old destination), scc, exec,
  m0. Returns (result, scc), where None leaves what was there, or a dict.
  """

  def __init__(self, mnemonic, types, function, text=None):
    self.mnemonic = mnemonic
    dst, src = types.split("=")
    self.dst, self.src = dst.strip(), src.split()
    self.function = function
    self.text = text


def nonzero(function, bits):
  """A result that is not zero sets SCC."""
  mask = (1 << bits) - 1
  if hasattr(function, "__code__"):
    def wrapped(*a):
      value = function(*a) & mask
      return value, int(value != 0)
    return wrapped
  raise TypeError(function)


def overflows(value, bits=32):
  return int(not -(1 << (bits - 1)) <= value < 1 << (bits - 1))


def saveexec(function):
  def wrapped(a, exec):  # pylint: disable=redefined-builtin
    new = function(a, exec) & M64
    return {"d": exec, "exec": new, "scc": int(new != 0)}
  return wrapped


def wrexec(function):
  def wrapped(a, exec):  # pylint: disable=redefined-builtin
    new = function(a, exec) & M64
    return {"d": new, "exec": new, "scc": int(new != 0)}
  return wrapped


def any_of_quad(x, bits):
  return sum(15 << i for i in range(0, bits, 4) if x >> i & 15)


def quad_mask(x, bits):
  return sum(1 << i // 4 for i in range(0, bits, 4) if x >> i & 15)


def bfe_scalar(x, control, bits, is_signed):
  offset = control & (bits - 1)
  width = control >> 16 & 0x7F
  x = signed(x, bits) if is_signed else x
  field = x >> offset & ((1 << width) - 1)
  if is_signed and width and width < bits:
    field = signed(field, width)
  return field & ((1 << bits) - 1)


def replicate(x):
  return sum((x >> i & 1) * 3 << 2 * i for i in range(32))


S = Scalar
SCALAR = [
    S("s_mov_b32", "u32 = u32", lambda a: (a, None)),
    S("s_mov_b64", "u64 = u64", lambda a: (a, None)),
    S("s_cmov_b32", "u32 = u32", lambda a, d, scc: (a if scc else d, None)),
    S("s_cmov_b64", "u64 = u64", lambda a, d, scc: (a if scc else d, None)),
    S("s_not_b32", "u32 = u32", nonzero(lambda a: ~a, 32)),
    S("s_not_b64", "u64 = u64", nonzero(lambda a: ~a, 64)),
    S("s_wqm_b32", "u32 = u32", nonzero(lambda a: any_of_quad(a, 32), 32)),
    S("s_wqm_b64", "u64 = u64", nonzero(lambda a: any_of_quad(a, 64), 64)),
    S("s_brev_b32", "u32 = u32", lambda a: (reverse(a, 32), None)),
    S("s_brev_b64", "u64 = u64", lambda a: (reverse(a, 64), None)),
    S("s_bcnt0_i32_b32", "u32 = u32",
      nonzero(lambda a: 32 - a.bit_count(), 32)),
    S("s_bcnt0_i32_b64", "u32 = u64",
      nonzero(lambda a: 64 - a.bit_count(), 32)),
    S("s_bcnt1_i32_b32", "u32 = u32", nonzero(lambda a: a.bit_count(), 32)),
    S("s_bcnt1_i32_b64", "u32 = u64", nonzero(lambda a: a.bit_count(), 32)),
    S("s_ff0_i32_b32", "u32 = u32",
      lambda a: (first_bit_low(~a & M32), None)),
    S("s_ff0_i32_b64", "u32 = u64",
      lambda a: (first_bit_low(~a & M64), None)),
    S("s_ff1_i32_b32", "u32 = u32", lambda a: (first_bit_low(a), None)),
    S("s_ff1_i32_b64", "u32 = u64", lambda a: (first_bit_low(a), None)),
    S("s_flbit_i32_b32", "u32 = u32", lambda a: (first_bit_high(a), None)),
    S("s_flbit_i32_b64", "u32 = u64",
      lambda a: (first_bit_high(a, 64), None)),
    S("s_flbit_i32", "u32 = u32", lambda a: (first_other_high(a), None)),
    S("s_flbit_i32_i64", "u32 = u64",
      lambda a: (first_other_high(a, 64), None)),
    S("s_sext_i32_i8", "u32 = u32", lambda a: (signed(a, 8), None)),
    S("s_sext_i32_i16", "u32 = u32", lambda a: (signed(a, 16), None)),
    S("s_bitset0_b32", "u32 = u32", lambda a, d: (d & ~(1 << (a & 31)), None)),
    S("s_bitset0_b64", "u64 = u32", lambda a, d: (d & ~(1 << (a & 63)), None)),
    S("s_bitset1_b32", "u32 = u32", lambda a, d: (d | 1 << (a & 31), None)),
    S("s_bitset1_b64", "u64 = u32", lambda a, d: (d | 1 << (a & 63), None)),
    S("s_abs_i32", "u32 = i32", nonzero(lambda a: abs(a), 32)),
    S("s_quadmask_b32", "u32 = u32", nonzero(lambda a: quad_mask(a, 32), 32)),
    S("s_quadmask_b64", "u64 = u64", nonzero(lambda a: quad_mask(a, 64), 64)),
    S("s_bitreplicate_b64_b32", "u64 = u32", lambda a: (replicate(a), None)),
    S("s_and_saveexec_b64", "u64 = u64", saveexec(lambda a, e: a & e)),
    S("s_or_saveexec_b64", "u64 = u64", saveexec(lambda a, e: a | e)),
    S("s_xor_saveexec_b64", "u64 = u64", saveexec(lambda a, e: a ^ e)),
    S("s_andn2_saveexec_b64", "u64 = u64", saveexec(lambda a, e: a & ~e)),
    S("s_orn2_saveexec_b64", "u64 = u64", saveexec(lambda a, e: a | ~e)),
    S("s_nand_saveexec_b64", "u64 = u64", saveexec(lambda a, e: ~(a & e))),
    S("s_nor_saveexec_b64", "u64 = u64", saveexec(lambda a, e: ~(a | e))),
    S("s_xnor_saveexec_b64", "u64 = u64", saveexec(lambda a, e: ~(a ^ e))),
    S("s_andn1_saveexec_b64", "u64 = u64", saveexec(lambda a, e: ~a & e)),
    S("s_orn1_saveexec_b64", "u64 = u64", saveexec(lambda a, e: ~a | e)),
    S("s_andn1_wrexec_b64", "u64 = u64", wrexec(lambda a, e: ~a & e)),
    S("s_andn2_wrexec_b64", "u64 = u64", wrexec(lambda a, e: a & ~e)),
    S("s_add_u32", "u32 = u32 u32", lambda a, b: (a + b, a + b >> 32)),
    S("s_sub_u32", "u32 = u32 u32", lambda a, b: (a - b, int(b > a))),
    S("s_add_i32", "u32 = i32 i32", lambda a, b: (a + b, overflows(a + b))),
    S("s_sub_i32", "u32 = i32 i32", lambda a, b: (a - b, overflows(a - b))),
    S("s_addc_u32", "u32 = u32 u32",
      lambda a, b, scc: (a + b + scc, a + b + scc >> 32)),
    S("s_subb_u32", "u32 = u32 u32",
      lambda a, b, scc: (a - b - scc, int(b + scc > a))),
    S("s_min_i32", "u32 = i32 i32", lambda a, b: (min(a, b), int(a < b))),
    S("s_min_u32", "u32 = u32 u32", lambda a, b: (min(a, b), int(a < b))),
    S("s_max_i32", "u32 = i32 i32", lambda a, b: (max(a, b), int(a >= b))),
    S("s_max_u32", "u32 = u32 u32", lambda a, b: (max(a, b), int(a >= b))),
    S("s_cselect_b32", "u32 = u32 u32",
      lambda a, b, scc: (a if scc else b, None)),
    S("s_cselect_b64", "u64 = u64 u64",
      lambda a, b, scc: (a if scc else b, None)),
    *(S(f"s_{name}_b{bits}", f"u{bits} = u{bits} u{bits}",
        nonzero(function, bits)) for bits in (32, 64) for name, function in {
            "and": lambda a, b: a & b, "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
            "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b),
            "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
        }.items()),
    S("s_lshl_b32", "u32 = u32 u32", nonzero(lambda a, b: a << (b & 31), 32)),
    S("s_lshl_b64", "u64 = u64 u32", nonzero(lambda a, b: a << (b & 63), 64)),
    S("s_lshr_b32", "u32 = u32 u32", nonzero(lambda a, b: a >> (b & 31), 32)),
    S("s_lshr_b64", "u64 = u64 u32", nonzero(lambda a, b: a >> (b & 63), 64)),
    S("s_ashr_i32", "u32 = i32 u32", nonzero(lambda a, b: a >> (b & 31), 32)),
    S("s_ashr_i64", "u64 = i64 u32", nonzero(lambda a, b: a >> (b & 63), 64)),
    S("s_bfm_b32", "u32 = u32 u32",
      lambda a, b: (((1 << (a & 31)) - 1) << (b & 31), None)),
    S("s_bfm_b64", "u64 = u32 u32",
      lambda a, b: (((1 << (a & 63)) - 1) << (b & 63), None)),
    S("s_mul_i32", "u32 = i32 i32", lambda a, b: (a * b, None)),
    S("s_mul_hi_u32", "u32 = u32 u32", lambda a, b: (a * b >> 32, None)),
    S("s_mul_hi_i32", "u32 = i32 i32", lambda a, b: (a * b >> 32, None)),
    S("s_bfe_u32", "u32 = u32 c32",
      nonzero(lambda a, b: bfe_scalar(a, b, 32, False), 32)),
    S("s_bfe_i32", "u32 = u32 c32",
      nonzero(lambda a, b: bfe_scalar(a, b, 32, True), 32)),
    S("s_bfe_u64", "u64 = u64 c32",
      nonzero(lambda a, b: bfe_scalar(a, b, 64, False), 64)),
    S("s_bfe_i64", "u64 = u64 c32",
      nonzero(lambda a, b: bfe_scalar(a, b, 64, True), 64)),
    S("s_absdiff_i32", "u32 = i32 i32",
      nonzero(lambda a, b: abs(signed(a - b, 32)), 32)),
    *(S(f"s_lshl{n}_add_u32", "u32 = u32 u32",
        lambda a, b, n=n: ((a << n) + b, int((a << n) + b > M32)))
      for n in (1, 2, 3, 4)),
    S("s_pack_ll_b32_b16", "u32 = u32 u32",
      lambda a, b: (b << 16 | a & 0xFFFF, None)),
    S("s_pack_lh_b32_b16", "u32 = u32 u32",
      lambda a, b: (b & 0xFFFF0000 | a & 0xFFFF, None)),
    S("s_pack_hh_b32_b16", "u32 = u32 u32",
      lambda a, b: (b & 0xFFFF0000 | a >> 16, None)),
    *(S(f"s_cmp_{name}_{kind}32", f"= {kind}32 {kind}32", function)
      for kind in "iu" for name, function in {
          "eq": lambda a, b: (None, int(a == b)),
          "lg": lambda a, b: (None, int(a != b)),
          "gt": lambda a, b: (None, int(a > b)),
          "ge": lambda a, b: (None, int(a >= b)),
          "lt": lambda a, b: (None, int(a < b)),
          "le": lambda a, b: (None, int(a <= b)),
      }.items()),
    S("s_cmp_eq_u64", "= u64 u64", lambda a, b: (None, int(a == b))),
    S("s_cmp_lg_u64", "= u64 u64", lambda a, b: (None, int(a != b))),
    S("s_bitcmp0_b32", "= u32 u32",
      lambda a, b: (None, 1 - (a >> (b & 31) & 1))),
    S("s_bitcmp1_b32", "= u32 u32", lambda a, b: (None, a >> (b & 31) & 1)),
    S("s_bitcmp0_b64", "= u64 u32",
      lambda a, b: (None, 1 - (a >> (b & 63) & 1))),
    S("s_bitcmp1_b64", "= u64 u32", lambda a, b: (None, a >> (b & 63) & 1)),
    S("s_movk_i32", "u32 =", lambda: (-32767, None), text="s20, 0x8001"),
    S("s_cmovk_i32", "u32 =", lambda d, scc: (-2 if scc else d, None),
      text="s20, 0xfffe"),
    *(S(f"s_cmpk_{name}_{kind}32", f"= {kind}32", function,
        text="s32, 0x8000")
      for kind, k in (("i", -32768), ("u", 32768)) for name, function in {
          "eq": lambda a, k=k: (None, int(a == k)),
          "lg": lambda a, k=k: (None, int(a != k)),
          "gt": lambda a, k=k: (None, int(a > k)),
          "ge": lambda a, k=k: (None, int(a >= k)),
          "lt": lambda a, k=k: (None, int(a < k)),
          "le": lambda a, k=k: (None, int(a <= k)),
      }.items()),
    S("s_addk_i32", "i32 =", lambda d: (d - 2, overflows(d - 2)),
      text="s20, 0xfffe"),
    S("s_mulk_i32", "i32 =", lambda d: (d * -3, None), text="s20, 0xfffd"),
]
# Signed 16-bit edge values reach these too.
_SCALAR_EDGES = {
    "u32": [int(x) for x in EDGES["u32"]],
    "u64": [int(x) for x in EDGES["u64"]],
    # offset and width of a bit field
    "c32": [0, 0x00080004, 0x001F0000, 0x00200000, 0x00010000, 0x0001001F,
            0x00100010, 0x00050003, 0x003F0000, 0x00400000, 0x00200020,
            0x0008003C],
}


# Worked out by hand: instruction, v1, v2 and so on, and what is in v0 after,
# which is 0x11111111 before.
LITERALS = [
    # The shift of 32 and 33 is one of 0 and 1.
    ("v_lshlrev_b32 v0, v1, v2", (32, 1), 1),
    ("v_ashrrev_i32 v0, v1, v2", (33, 0x80000000), 0xC0000000),
    ("v_lshrrev_b16 v0, v1, v2", (17, 0xFFFF8000), 0x4000),
    # 0x1F at bit 7, five bits wide, is minus one; width 0 is zero.
    ("v_bfe_i32 v0, v1, v2, v3", (0xF80, 7, 5), 0xFFFFFFFF),
    ("v_bfe_u32 v0, v1, v2, v3", (0xF80, 7, 5), 0x1F),
    ("v_bfe_i32 v0, v1, v2, v3", (0xFFFFFFFF, 3, 0), 0),
    ("v_bfe_i32 v0, v1, v2, v3", (0xFFFFFFFF, 31, 31), 0xFFFFFFFF),
    ("v_alignbit_b32 v0, v1, v2, v3", (1, 0x80000000, 31), 3),
    ("v_alignbyte_b32 v0, v1, v2, v3", (0x11223344, 0x55667788, 3),
     0x22334455),
    # Selectors: byte 4 (the first source's lowest), the sign of byte 1, all
    # ones, zeros.
    ("v_perm_b32 v0, v1, v2, v3", (0x01020384, 0x85060708, 0x0C0D0804),
     0x00FF0084),
    ("v_perm_b32 v0, v1, v2, v3", (0x80000000, 0x00008000, 0x0B0A0908),
     0xFF0000FF),
    ("v_mul_hi_i32 v0, v1, v2", (0x80000000, 0x80000000), 0x40000000),
    ("v_mul_hi_u32 v0, v1, v2", (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFE),
    ("v_mul_i32_i24 v0, v1, v2", (0x00FFFFFF, 5), 0xFFFFFFFB),
    ("v_mul_u32_u24 v0, v1, v2", (0xFF000003, 0xFF000005), 15),
    ("v_mad_i32_i24 v0, v1, v2, v3", (0x800000, 2, 1), 0xFF000001),
    ("v_med3_i32 v0, v1, v2, v3", (0x80000000, 7, 0x7FFFFFFF), 7),
    ("v_sad_u8 v0, v1, v2, v3", (0x00FF1020, 0xFF002010, 1), 0x21F),
    ("v_ffbh_u32 v0, v1", (0,), 0xFFFFFFFF),
    ("v_ffbh_u32 v0, v1", (1,), 31),
    ("v_ffbh_i32 v0, v1", (0xFFFFFFFE,), 31),
    ("v_ffbh_i32 v0, v1", (0xFFFFFFFF,), 0xFFFFFFFF),
    ("v_bfrev_b32 v0, v1", (0x80000001,), 0x80000001),
    ("v_lshl_add_u32 v0, v1, v2, v3", (0x80000001, 33, 5), 7),
    ("v_dot4_i32_i8 v0, v1, v2, v3", (0x80FF017F, 0x80020304, 10),
     10 + 16384 - 2 + 3 + 508),
    # Saturation; NaN is 0.
    ("v_cvt_i32_f32 v0, v1", (0x4F000000,), 0x7FFFFFFF),
    ("v_cvt_i32_f32 v0, v1", (0xFF800000,), 0x80000000),
    ("v_cvt_i32_f32 v0, v1", (0x7FC00000,), 0),
    ("v_cvt_u32_f32 v0, v1", (0xBF800000,), 0),
    ("v_cvt_u32_f32 v0, v1", (0x4F800000,), 0xFFFFFFFF),
    ("v_cvt_i32_f32 v0, v1", (0xC0200000,), 0xFFFFFFFE),  # -2.5
    # 65520 is halfway to the number after the greatest half.
    ("v_cvt_f16_f32 v0, v1", (0x477FF000,), 0x7C00),
    ("v_cvt_f16_f32 v0, v1", (0x477FEFFF,), 0x7BFF),
    ("v_cvt_f16_f32 v0, v1", (0x33000000,), 0),  # Half the least denormal.
    ("v_cvt_f16_f32 v0, v1", (0x33000001,), 1),
    ("v_cvt_f32_f16 v0, v1", (0x8001,), 0xB3800000),
    ("v_cvt_f32_u32 v0, v1", (0xFFFFFFFF,), 0x4F800000),
    ("v_cvt_f32_u32 v0, v1", (0x01000001,), 0x4B800000),  # To even.
    ("v_cvt_pkrtz_f16_f32 v0, v1, v2", (0x477FFFFF, 0xBF8FFFFF), 0xBC7F7BFF),
    # Zeros of both signs, NaNs.
    ("v_min_f32 v0, v1, v2", (0x80000000, 0), 0x80000000),
    ("v_min_f32 v0, v1, v2", (0, 0x80000000), 0x80000000),
    ("v_max_f32 v0, v1, v2", (0x80000000, 0), 0),
    ("v_max_f32 v0, v1, v2", (0x7FC00000, 0x3F800000), 0x3F800000),
    ("v_max_f32 v0, v1, v2", (0x3F800000, 0x7FC00000), 0x3F800000),
    # IEEE mode: a signalling NaN wins, and becomes quiet.
    ("v_max_f32 v0, v1, v2", (0x7F800001, 0x3F800000), 0x7FC00001),
    ("v_min_f32 v0, v1, v2", (0x3F800000, 0xFF800001), 0xFFC00001),
    ("v_add_f32 v0, v1, v2", (0x3F800000, 0xBF800000), 0),
    ("v_add_f32 v0, v1, v2", (0x80000000, 0x80000000), 0x80000000),
    ("v_add_f32 v0, v1, v2", (0x7F7FFFFF, 0x73000000), 0x7F800000),
    ("v_mul_f32 v0, v1, v2", (0x80000001, 0x3F000000), 0x80000000),
    ("v_mul_f32 v0, v1, v2", (0x00000003, 0x3F000000), 2),  # To even.
    # (1 + 2**-23)**2 - (1 + 2**-22) is 2**-46, only if fused.
    ("v_fma_f32 v0, v1, v2, v3", (0x3F800001, 0x3F800001, 0xBF800002),
     0x28800000),
    ("v_fma_f32 v0, v1, v2, v3", (0x7F7FFFFF, 0x40000000, 0xFF7FFFFF),
     0x7F7FFFFF),
    ("v_rndne_f32 v0, v1", (0x40200000,), 0x40000000),  # 2.5
    ("v_rndne_f32 v0, v1", (0xBF000000,), 0x80000000),  # -0.5
    ("v_floor_f32 v0, v1", (0x80000001,), 0xBF800000),
    ("v_ceil_f32 v0, v1", (0x80000001,), 0x80000000),
    ("v_frexp_exp_i32_f32 v0, v1", (0x41000000,), 4),  # 8 = 0.5 * 2**4
    ("v_frexp_mant_f32 v0, v1", (0x41000000,), 0x3F000000),
    ("v_frexp_exp_i32_f32 v0, v1", (1,), 0xFFFFFF6C),  # -148
    ("v_ldexp_f32 v0, v1, v2", (0x3F800000, 0xFFFFFF6B), 1),  # 2**-149
    ("v_ldexp_f32 v0, v1, v2", (0x3F800000, 0xFFFFFF6A), 0),  # to even
    ("v_ldexp_f32 v0, v1, v2", (0x3FC00000, 0xFFFFFF6A), 1),
    ("v_ldexp_f32 v0, v1, v2", (0x3F800000, 128), 0x7F800000),
    ("v_exp_f32 v0, v1", (0x41200000,), 0x44800000),  # 1024
    ("v_log_f32 v0, v1", (0x80000000,), 0xFF800000),
    ("v_rcp_f32 v0, v1", (0x80000000,), 0xFF800000),
    ("v_sqrt_f32 v0, v1", (0x80000000,), 0x80000000),
    ("v_med3_f32 v0, v1, v2, v3", (0x40400000, 0x3F800000, 0x40000000),
     0x40000000),
    # Halves. 16-bit results clear the other half.
    ("v_add_f16 v0, v1, v2", (0x3C00, 0x3C00), 0x4000),
    ("v_add_f16 v0, v1, v2", (0x7BFF, 0x4C00), 0x7C00),
    ("v_mul_f16 v0, v1, v2", (0x0001, 0x3800), 0),
    ("v_fma_f16 v0, v1, v2, v3", (0x3C01, 0x3C01, 0xBC02), 0x11110010),
    ("v_pk_add_f16 v0, v1, v2", (0x3C004000, 0x3C00C000), 0x40000000),
    ("v_pk_mul_lo_u16 v0, v1, v2", (0x00020100, 0x80000100), 0),
    ("v_mad_u16 v0, v1, v2, v3", (0x100, 0x100, 7), 0x11110007),
    ("v_sat_pk_u8_i16 v0, v1", (0x0123FFFF,), 0xFF00),
]


# Variants of a line: (text, vector registers, scalar registers, what the
# sources are then), or None if there is none for these types.


def _registers(sources, generator):
  return {SRC[i]: widen(s, generator) for i, s in enumerate(sources)}


def _of_register(word, dtype):
  """The source that a register's word is."""
  return np.ascontiguousarray(word).view(dtype).reshape(64, -1)[:, 0].copy()


def _scalar(line, sources, generator):
  """The first source in scalar registers."""
  words = words_of(line.src[0])
  text = line.instruction().replace(
      register("v", SRC[0], words), register("s", 40, words))
  registers = _registers(sources, generator)
  value = registers.pop(SRC[0])[0]
  expected = [np.full_like(sources[0], sources[0][0]), *sources[1:]]
  return text, registers, {40: np.atleast_1d(value)}, expected


def _constant(line, sources, generator):
  """The first source as an inline constant."""
  if line.src[0][0] == "f":
    text, value = "-4.0", -4.0
  else:
    text, value = "-7", -7
  dtype = sources[0].dtype
  value = np.array([value]).astype(dtype if dtype.kind == "f" else (
      f"i{dtype.itemsize}")).view(dtype)[0]
  text = line.instruction().replace(
      register("v", SRC[0], words_of(line.src[0])), text)
  registers = _registers(sources, generator)
  del registers[SRC[0]]
  return text, registers, {}, [np.full_like(sources[0], value), *sources[1:]]


def _negated(line, sources, generator):
  """Minus the first source's magnitude."""
  if line.src[0][0] != "f":
    return None
  name = register("v", SRC[0], words_of(line.src[0]))
  text = line.instruction().replace(name, f"-|{name}|")
  return text, _registers(sources, generator), {}, [
      -np.abs(sources[0]), *sources[1:]]


def _clamped(line, sources, generator):
  if not line.dst or line.dst[0][0] != "f" or line.ulp:
    return None
  return (line.instruction() + " clamp", _registers(sources, generator), {},
          sources)


def clamped_to_one(x):
  """The clamp of floats: NaN is 0 under DX10_CLAMP."""
  if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
    return x
  return np.where(np.isnan(x), x.dtype.type(0), np.clip(
      x, x.dtype.type(0), x.dtype.type(1)) + x.dtype.type(0))


def _dpp(line, sources, generator):
  """The first source from three lanes below, around its row."""
  if words_of(line.src[0]) > 1 or line.dst[0][1:] == "64":
    return None
  lane = np.arange(64)
  source = lane & ~15 | (lane - 3) & 15
  text = (f"{line.mnemonic}_dpp {line.operands()} row_ror:3 row_mask:0xf "
          "bank_mask:0xf")
  return text, _registers(sources, generator), {}, [
      sources[0][source], *sources[1:]]


def _sdwa(line, sources, generator):
  """High words of the sources."""
  if any(t[0] == "f" and t != "f16" or t[1:] == "64"
         for t in (*line.src, *line.dst) if t not in ("m", "s32")):
    return None
  if line.dst == ["m"]:
    text = " src0_sel:WORD_1"
  else:
    text = " dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1"
  if len(sources) > 1:
    text += " src1_sel:WORD_1"
  text = f"{line.mnemonic}_sdwa {line.operands()}{text}"
  registers = _registers(sources, generator)
  for i, values in enumerate(sources):
    if values.dtype == F16:  # No signalling NaN.
      low = bits_of(values).astype(U32)
      registers[SRC[i]] = low | np.roll(low, 1) << 16
  expected = [_of_register(registers[SRC[i]] >> 16, s.dtype)
              for i, s in enumerate(sources)]
  return text, registers, {}, expected


VARIANTS = (_scalar, _constant, _negated, _clamped, _dpp, _sdwa)


def supported(name):
  return name in MNEMONICS


try:
  MNEMONICS = set(asm.mnemonics())
except (AttributeError, AssertionError, OSError) as error:
  raise RuntimeError("no simulator to test") from error


class TableTest(absltest.TestCase):

  def check(self, result, line):
    if isinstance(result, Exception):
      self.fail(f"{line.mnemonic}: {result}")

  def test_vector(self):
    generator = np.random.default_rng(1)
    lines, snippets, sources = [], [], []
    for line in VECTOR:
      if line.function is None or not supported(line.mnemonic):
        continue
      rows = [samples(t, generator, line.rows)
              for t in line.src if t != "m"]
      old = [samples(t, generator, line.rows) if t not in ("m", "s32") else
             None for t in line.dst]
      states = []
      for i in range(line.rows):
        state = asm.State(
            vcc=int(generator.integers(0, M64, dtype=U64, endpoint=True)),
            exec=[M64, 0x00FF00FF12345678, M64, 1 << 63][i % 4],
            s={DST2: 0x5A5A5A5A})
        for j in range(len(line.dst)):
          if old[j] is not None:
            state.v[DST + 16 * j] = widen(old[j][i], generator)
        for j, row in enumerate(rows):
          state.v[SRC[j]] = widen(row[i], generator)
        states.append(state)
      registers = [DST + 16 * j + k for j, kind in enumerate(line.dst)
                   if kind not in ("m", "s32") for k in range(words_of(kind))]
      body = line.instruction()
      if "accvgpr" in line.mnemonic:
        body = {
            "v_accvgpr_write_b32":
                "v_accvgpr_write_b32 a3, v32\nv_accvgpr_read_b32 v128, a3",
            "v_accvgpr_read_b32":
                "v_accvgpr_write_b32 a3, v32\nv_accvgpr_read_b32 v128, a3",
            "v_accvgpr_mov_b32":
                "v_accvgpr_write_b32 a3, v32\nv_accvgpr_mov_b32 a4, a3\n"
                "v_accvgpr_read_b32 v128, a4",
        }[line.mnemonic]
      lines.append(line)
      sources.append((rows, old))
      snippets.append(asm.Snippet(body, states, registers, [DST2]))
    results = asm.run(snippets)
    for line, snippet, (rows, old), result in zip(
        lines, snippets, sources, results, strict=True):
      if isinstance(result, asm.AssemblyError):
        # LLVM has it on another architecture only.
        if line.mnemonic in MNEMONICS:
          with self.subTest(line.mnemonic):
            self.fail(str(result))
        continue
      with self.subTest(line.mnemonic):
        self.check(result, line)
        for i, (before, after) in enumerate(
            zip(snippet.before, result, strict=True)):
          self.compare(line, [r[i] for r in rows],
                       [o if o is None else o[i] for o in old], before, after)

  def test_variants(self):
    """Every line in its other encodings, where LLVM knows them."""
    generator = np.random.default_rng(3)
    cases, snippets = [], []
    for line in VECTOR:
      if (not supported(line.mnemonic) or line.text or not line.src
          or "lane" in line.mnemonic or "accvgpr" in line.mnemonic
          or any(split(t)[0] > 1 for t in line.src if t != "m")):
        continue
      for variant in VARIANTS:
        sources = [samples(t, generator, 1)[0] for t in line.src if t != "m"]
        old = [None if t in ("m", "s32") else samples(t, generator, 1)[0]
               for t in line.dst]
        made = variant(line, sources, generator)
        if made is None:
          continue
        text, registers, scalars, expected = made
        state = asm.State(
            vcc=int(generator.integers(0, M64, dtype=U64, endpoint=True)),
            s=scalars | {DST2: 0})
        for j, before in enumerate(old):
          if before is not None:
            state.v[DST + 16 * j] = widen(before, generator)
        state.v.update(registers)
        stored = [DST + 16 * j + k for j, kind in enumerate(line.dst)
                  if kind not in ("m", "s32") for k in range(words_of(kind))]
        snippets.append(asm.Snippet(text, [state], stored, [DST2]))
        cases.append((variant, line, expected, old))
    ran = {variant: 0 for variant in VARIANTS}
    for (variant, line, expected, old), snippet, result in zip(
        cases, snippets, asm.run(snippets), strict=True):
      if isinstance(result, asm.AssemblyError):
        continue  # There is no such encoding.
      ran[variant] += 1
      with self.subTest(snippet.body):
        self.check(result, line)
        self.compare(line, expected, old, snippet.before[0], result[0],
                     variant is _clamped)
    print({v.__name__: n for v, n in ran.items()})
    self.assertGreater(min(ran.values()), 25)

  def compare(self, line, sources, old, before, after, clamp=False):
    arguments, position = [], 0
    for kind in line.src:
      if kind == "m":
        arguments.append(unpack(before.vcc))
      else:
        arguments.append(sources[position])
        position += 1
    results = call(line, arguments, d=old[0] if old else None,
                   exec=before.exec, lane=np.arange(64, dtype=U32))
    if clamp:
      results = tuple(clamped_to_one(r) for r in results)
    active = unpack(before.exec)
    told = lambda lanes: "; ".join(
        f"lane {i}: " + " ".join(str(a[i]) for a in arguments) for i in lanes)
    for j, (kind, expected) in enumerate(zip(line.dst, results, strict=True)):
      if kind == "m":
        expected = pack(expected & active)
        if line.mnemonic.startswith("v_cmpx"):
          self.assertEqual(after.exec, expected)
        wrong = expected ^ after.vcc
        self.assertEqual(after.vcc, expected, f"{line.instruction()}: " + told(
            [i for i in range(64) if wrong >> i & 1][:3]))
        continue
      if kind == "s32":
        self.assertEqual(after.s[DST2], int(expected))
        continue
      count, name = split(kind)
      dtype = DTYPES[name]
      expected = np.asarray(expected).astype(dtype, copy=False)
      words = np.stack([after.v[DST + 16 * j + k]
                        for k in range(words_of(kind))], 1)
      elements = np.ascontiguousarray(words).view(dtype)
      actual = elements[:, :count].reshape(expected.shape)
      good = same(actual, expected, line.ulp)
      good = good.reshape(64, -1).all(1)
      bad = [i for i in range(64) if active[i] and not good[i]]
      if bad:
        i = bad[0]
        self.fail(
            f"{line.instruction()}: {len(bad)} lanes; {told(bad[:1])} -> "
            f"{actual[i]} ({words[i]}), not {expected[i]}")
      size = dtype().itemsize * count
      if size < 4 and line.keep is not None:
        # The rest of the register.
        rest = words[:, 0] >> 8 * size
        was = before.v[DST] >> 8 * size if line.keep else np.zeros(64, U32)
        bad = [i for i in range(64) if active[i] and rest[i] != was[i]]
        self.assertEmpty(bad, f"{line.instruction()}: high half "
                         f"{rest[bad[:1]]}, not {was[bad[:1]]}")
      for k in range(words_of(kind)):
        was = vector_word(before, DST + 16 * j + k)
        self.assertTrue((after.v[DST + 16 * j + k] == was)[~active].all(),
                        f"{line.instruction()}: wrote an inactive lane")
    if not line.mnemonic.startswith("v_cmpx"):
      self.assertEqual(after.exec, before.exec)

  def test_scalar(self):
    generator = np.random.default_rng(2)
    lines, snippets, tuples = [], [], []
    for line in SCALAR:
      if not supported(line.mnemonic):
        continue
      pools = [_SCALAR_EDGES["u" + t[1:] if t[0] == "i" else t]
               for t in line.src]
      cases = list(itertools.product(*pools))
      if len(cases) > 150:
        cases = [cases[i] for i in generator.permutation(len(cases))[:150]]
      if len(cases) < 30:
        cases = cases * 30
      states, inputs = [], []
      for case in cases[:150]:
        old = int(generator.choice(np.array(_SCALAR_EDGES["u64"], U64)))
        state = asm.State(
            scc=int(generator.integers(2)),
            exec=int(generator.integers(0, M64, dtype=U64)),
            s={20: np.array([old], U64)})
        for i, value in enumerate(case):
          state.s[32 + 4 * i] = np.array([value], U64)
        states.append(state)
        inputs.append((case, old))
      operands = []
      if line.dst:
        operands.append(register("s", 20, int(line.dst[1:]) // 32))
      for i, kind in enumerate(line.src):
        operands.append(register("s", 32 + 4 * i, int(kind[1:]) // 32))
      text = line.text or ", ".join(operands)
      snippets.append(asm.Snippet(f"{line.mnemonic} {text}", states,
                                  s=[20, 21]))
      lines.append(line)
      tuples.append(inputs)
    results = asm.run(snippets)
    for line, snippet, inputs, result in zip(
        lines, snippets, tuples, results, strict=True):
      with self.subTest(line.mnemonic):
        self.check(result, line)
        for (case, old), before, after in zip(
            inputs, snippet.before, result, strict=True):
          self.compare_scalar(line, snippet.body, case, old, before, after)

  def compare_scalar(self, line, body, case, old, before, after):
    arguments = [signed(x, int(t[1:])) if t[0] == "i" else x
                 for x, t in zip(case, line.src)]
    size = int(line.dst[1:]) if line.dst else 64
    d = signed(old, size) if line.dst[:1] == "i" else old & ((1 << size) - 1)
    state = {"d": d, "scc": before.scc, "exec": before.exec}
    names = inspect.signature(line.function).parameters
    expected = line.function(
        *arguments, **{n: state[n] for n in names if n in state})
    if not isinstance(expected, dict):
      expected = {"d": expected[0], "scc": expected[1]}
    value = expected["d"]
    value = old if value is None else (
        value & ((1 << size) - 1) | old >> size << size)
    scc = before.scc if expected["scc"] is None else expected["scc"]
    actual = after.s[20] | after.s[21] << 32
    told = f"{body} of {[hex(x) for x in case]}, d {old:#x}, scc {before.scc}"
    self.assertEqual((hex(actual), after.scc), (hex(value), scc), told)
    self.assertEqual(after.exec, expected.get("exec", before.exec), told)


class LiteralTest(absltest.TestCase):

  def test_literals(self):
    cases = [c for c in LITERALS if c[0].split()[0] in MNEMONICS]
    snippets = []
    for text, sources, _ in cases:
      state = asm.State(v={0: np.full(64, 0x11111111, U32)} | {
          i + 1: np.full(64, x, U32) for i, x in enumerate(sources)})
      snippets.append(asm.Snippet(text, [state], [0]))
    for (text, sources, expected), result in zip(
        cases, asm.run(snippets), strict=True):
      with self.subTest(text):
        self.assertNotIsInstance(result, Exception, result)
        self.assertEqual({hex(x) for x in result[0].v[0]}, {hex(expected)},
                         [hex(x) for x in sources])


class CoverageTest(absltest.TestCase):

  def test_every_mnemonic_has_a_case(self):
    covered = {line.mnemonic for line in VECTOR if line.function}
    covered |= {line.mnemonic for line in SCALAR}
    for name in ("modifier_test", "conversion_test", "checks_test",
                 "memory_test", "mfma_test"):
      covered |= importlib.import_module(name).COVERED
    self.assertEmpty(sorted(MNEMONICS - covered))

  def test_lines_are_for_something(self):
    # Mnemonics that the simulator does not execute on any architecture.
    names = set().union(*map(asm.mnemonics, ("gfx90a", "gfx942", "gfx950")))
    lines = {line.mnemonic for line in [*VECTOR, *SCALAR]}
    self.assertEmpty(sorted(lines - names))


def widen(values, generator):
  """As register contents: noise above what an element fills."""
  flat = np.ascontiguousarray(values).reshape(64, -1)
  raw = flat.view(U8).reshape(64, -1)
  if raw.shape[1] >= 4:
    return raw.view(U32)
  noise = generator.integers(0, 256, (64, 4), U8)
  noise[:, : raw.shape[1]] = raw
  return noise.view(U32)[:, 0]


def vector_word(state, reg):
  for first, lanes in state.v.items():
    words = np.ascontiguousarray(lanes).reshape(64, -1).view(U32)
    if first <= reg < first + words.shape[1]:
      return words[:, reg - first]
  raise KeyError(reg)


if __name__ == "__main__":
  absltest.main()
