# SPDX-License-Identifier: Apache-2.0
"""Float32 to and from 16, 8 and 4 bits in jax.numpy, exactly.

The functions of third_party/aiter/kernels/core/rounding.py, bit for bit: to
nearest, ties to even, saturating. Numbers of 8 and 4 bits are taken apart as
integers, because XLA's CPUs flush subnormal floats to zero.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax import lax

# Of MX scales, under AITER's names and numbers.
ROUND_MODES = {"down": 0, "up": 1, "even": 2, "ceil": 3}
# A float32 scale is that of a largest magnitude of at least this.
AMAX_FLOOR = np.float32(1e-10)
# Precisions of JAX that let a matrix unit take no more than TF32's bits of a
# float32, as XLA does for them on NVIDIA's.
_FEW_BITS = frozenset(
    "none default fastest bfloat16 high bfloat16_3x tensorfloat32"
    " bf16_bf16_bf16 bf16_bf16_f32 tf32_tf32_f32".split())


class Kind(NamedTuple):
  """What numbers are rounded to.

  Attributes:
    dtype: of an array of them; e2m1 has one number in a uint8.
    largest: the largest number.
    mantissa: bits; 0 of an integer.
    bias: of the exponent.
    top: the code of the largest number.
    nan: the code of NaN.
    sign: the bit of the sign.
  """
  dtype: jnp.dtype
  largest: float
  mantissa: int = 0
  bias: int = 0
  top: int = 0
  nan: int = 0
  sign: int = 7


INT8 = Kind(jnp.dtype(jnp.int8), 127.0)
E4M3FN = Kind(jnp.dtype(jnp.float8_e4m3fn), 448.0, 3, 7, 0x7E, 0x7F)
E4M3FNUZ = Kind(jnp.dtype(jnp.float8_e4m3fnuz), 240.0, 3, 8, 0x7F, 0x80)
E2M1 = Kind(jnp.dtype(jnp.uint8), 6.0, 1, 1, 7, 7, 3)
KINDS = {"int8": INT8, "float8_e4m3fn": E4M3FN, "float8_e4m3fnuz": E4M3FNUZ,
         "mxfp4": E2M1}


def _bits(x):
  return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def amax(x, axis, keepdims: bool = False):
  """The largest magnitude in float32; NaN where there is one."""
  # Bits of magnitudes are ordered as their values, and NaN's come last.
  largest = jnp.max(_bits(x) & 0x7FFFFFFF, axis, keepdims=keepdims, initial=0)
  return lax.bitcast_convert_type(largest, jnp.float32)


def divide(x, y):
  """x / y in float32, on a CPU as IEEE 754 has it; y broadcasts to x."""
  # XLA would multiply by the reciprocal of what is broadcast.
  y = jnp.broadcast_to(jnp.asarray(y, jnp.float32), x.shape)
  return x / lax.optimization_barrier(y)


def f32_scale(amax, kind: Kind):
  """The scale of numbers whose largest magnitude is amax.

  The quotient is that of IEEE 754, by long division of integers: XLA's on a
  GPU may differ in the last bit.
  """
  bits = _bits(jnp.maximum(amax, AMAX_FLOOR))
  power = 0
  divisor = int(kind.largest)  # An odd number times a power of two.
  while divisor % 2 == 0:
    divisor, power = divisor // 2, power + 1
  divisor = jnp.full_like(bits, divisor)
  mantissa = (bits & 0x7FFFFF) | 0x800000
  whole, rest = lax.div(mantissa, divisor), lax.rem(mantissa, divisor)
  # 24 more bits; the divisor, and so a rest, has 7.
  more, rest = lax.div(rest << 24, divisor), lax.rem(rest << 24, divisor)
  length = 32 - lax.clz(whole)
  kept = (whole << (24 - length)) | (more >> length)
  lost = more - ((more >> length) << length)
  half = jnp.uint32(1) << (length - 1)
  odd = (kept & 1) | (rest > 0).astype(jnp.uint32)
  up = (lost > half) | ((lost == half) & (odd > 0))
  exponent = (bits >> 23) + length - 24 - power
  # A mantissa that is rounded to 2^24 steps the exponent by itself.
  found = ((exponent - 1) << 23) + kept + up.astype(jnp.uint32)
  return lax.bitcast_convert_type(
      jnp.where(bits >= 0x7F800000, bits, found), jnp.float32)


def round_to(x, kind: Kind, e8m0=None):
  """Rounds to the nearest number of a kind, ties to even, saturating.

  Args:
    x: of any float type; is taken as float32.
    kind: what to round to.
    e8m0: uint8 scales, which broadcast to x: x / 2^(e8m0 - 127) is rounded.

  Returns:
    x's shape, `kind.dtype`. NaN stays NaN; it becomes 0 in int8 and 6 in e2m1.
  """
  x = x.astype(jnp.float32)
  if kind is INT8:
    x = jnp.clip(jnp.round(jnp.where(jnp.isnan(x), 0, x)), -128, 127)
    return x.astype(jnp.int8)
  bits = _bits(x)
  magnitude = bits & 0x7FFFFFFF
  nan = magnitude > 0x7F800000
  exponent = (magnitude >> 23).astype(jnp.int32)
  mantissa = (magnitude & 0x7FFFFF) | jnp.where(exponent > 0, 0x800000, 0
                                                ).astype(jnp.uint32)
  infinite = exponent == 255
  # A subnormal's first one comes to the place of a normal one's: a scale may
  # make a normal number of it. Zero keeps an exponent below any.
  shift = lax.clz(mantissa).astype(jnp.int32) - 8
  mantissa <<= shift.astype(jnp.uint32)
  exponent = jnp.maximum(exponent, 1) - shift
  if e8m0 is not None:
    nan |= e8m0 == 0xFF
    exponent -= e8m0.astype(jnp.int32) - 127
  # A number below the smallest normal one loses more bits.
  lowest = 128 - kind.bias
  above = jnp.maximum(exponent, lowest)
  drop = jnp.minimum(23 - kind.mantissa + above - exponent, 31
                     ).astype(jnp.uint32)
  half = (jnp.uint32(1) << (drop - 1)) - 1 + ((mantissa >> drop) & 1)
  code = ((mantissa + half) >> drop) + (
      (above - lowest).astype(jnp.uint32) << kind.mantissa)
  code = jnp.minimum(jnp.where(infinite, kind.top, code), kind.top)
  sign = (bits >> 31) << kind.sign
  code = code | (jnp.where(code == 0, 0, sign) if kind is E4M3FNUZ else sign)
  code = jnp.where(nan, kind.nan, code).astype(jnp.uint8)
  return lax.bitcast_convert_type(code, kind.dtype)


def e8m0_scale(amax, mode: int, kind: Kind):
  """The scale of numbers whose largest magnitude is amax, as e8m0 in uint8.

  kernels/core/rounding.py has the definition of the modes.
  """
  bits = _bits(amax)
  power = int(np.log2(kind.largest))
  mantissa = int(np.float32(kind.largest).view(np.int32)) & 0x7FFFFF
  add = (0, 0x7FFFFF - mantissa, 1 << (22 - kind.mantissa), 0x7FFFFF)[mode]
  exponent = ((bits + jnp.uint32(add)) >> 23).astype(jnp.int32)
  scale = jnp.maximum(exponent - power, 0)
  return jnp.where(bits >= 0x7F800000, 0xFF, scale).astype(jnp.uint8)


def from_e8m0(scale):
  """2^(scale - 127) in float32; NaN of 0xFF."""
  bits = scale.astype(jnp.uint32) << 23
  bits = jnp.where(bits == 0, 0x400000, bits)
  return lax.bitcast_convert_type(
      jnp.where(scale == 0xFF, 0x7FC00000, bits).astype(jnp.uint32),
      jnp.float32)


def from_e2m1(code):
  """The number in the low four bits of a uint8, in float32."""
  # No table: a partitioned function may not hold arrays.
  power, half = (code >> 1) & 3, code & 1
  halves = jnp.where(power == 0, half, (2 + half) << jnp.maximum(power, 1) - 1)
  return halves.astype(jnp.float32) * jnp.where(code & 8 != 0, -0.5, 0.5)


def pack(codes):
  """uint8 [..., n] of four bits each -> [..., n / 2], the even ones low."""
  return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed):
  """What `pack` packed."""
  both = jnp.stack([packed & 0xF, packed >> 4], -1)
  return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def exact_products(precision) -> bool:
  """Whether JAX's `precision` wants all of float32's bits of its products."""
  sides = precision if isinstance(precision, tuple) else (precision,)
  return any(str(getattr(side, "name", side)).lower() not in _FEW_BITS
             for side in sides)


def bfloat16_parts(t, count: int):
  """float32 as `count` bfloat16 arrays: each rounds what those before left.

  Two have 16 bits of a number, three all 24, but for what is less than 2^-133.
  What is not finite is in the first alone; a finite number stays finite.
  """
  most = np.float32(jnp.finfo(jnp.bfloat16).max)
  finite = jnp.isfinite(t)
  parts, left = [], t
  for i in range(count):
    # A conversion there and back XLA may leave out; this it may not.
    part = jnp.clip(lax.reduce_precision(left, 8, 7), -most, most)
    part = jnp.where(finite, part, 0 if i else t)
    parts.append(part.astype(jnp.bfloat16))
    left -= part
  return parts
