# SPDX-License-Identifier: Apache-2.0
"""Float32 to and from 8 and 4 bits, exactly, on every architecture.

Round to nearest, ties to even, and saturate: infinities too become the largest
number. The arithmetic is of integers and of single float32 additions, which
every unit rounds alike. jax/_src/aiter/rounding.py has the same functions in
jax.numpy, and results agree in every bit.

Formats: OCP 8-bit Floating Point Specification, v1.0 (e4m3fn); the same with
exponent bias 8, one zero and NaN as 0x80 (e4m3fnuz: Noune et al., "8-bit
Numerical Formats for Deep Neural Networks", arXiv:2206.02915); OCP
Microscaling Formats Specification, v1.0 (e2m1, e8m0).
"""

import triton
import triton.language as tl

# What numbers are rounded to; src/quant_params.h has the same list.
INT8 = tl.constexpr(0)
E4M3FN = tl.constexpr(1)
E4M3FNUZ = tl.constexpr(2)
E2M1 = tl.constexpr(3)

# Rounding of MX scales, under AITER's names and numbers.
ROUND_DOWN = tl.constexpr(0)
ROUND_UP = tl.constexpr(1)
EVEN = tl.constexpr(2)
CEIL = tl.constexpr(3)

# A float32 scale is max(amax, AMAX_FLOOR) / largest(kind): never subnormal.
AMAX_FLOOR = tl.constexpr(1e-10)


@triton.jit
def _encode(size, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
            LARGEST: tl.constexpr):
  """The code of |x|, from its bits in uint32; LARGEST is the largest number's.

  The last bit of a float32 from 2^23 steps on counts steps. So what is added to
  |x| is 2^23 of the format's steps at |x|; the smallest normal number's are
  those of all below it. The addition rounds, and the sum's bits are the code
  but for a constant and the exponent.
  """
  LOWEST: tl.constexpr = (128 - BIAS) << 23
  UP: tl.constexpr = (23 - MANTISSA) << 23
  size = tl.minimum(size, LARGEST)
  steps = (tl.maximum(size, LOWEST) & 0x7F800000) + UP
  total = size.to(tl.float32, bitcast=True) + steps.to(tl.float32, bitcast=True)
  code = total.to(tl.uint32, bitcast=True) - steps
  return code + ((steps - (LOWEST + UP)) >> (23 - MANTISSA))


@triton.jit
def to_int8(x):
  """float32 -> the bits of int8 in uint8; NaN becomes 0."""
  # At 1.5 * 2^23 a float32's last bit counts ones. Between the clamp and the
  # addition no multiplication can be contracted into it.
  x = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -128.0), 127.0)
  return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def to_e4m3fn(x, NATIVE: tl.constexpr = False):
  """float32 -> the bits of float8_e4m3fn in uint8; NaN becomes 0x7F.

  NATIVE: the target converts so in one instruction (NVIDIA's cvt.rn.satfinite,
  from sm_89 on).
  """
  if NATIVE:
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
  else:
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code = _encode(size, 3, 7, 0x43E00000) | ((bits >> 24) & 0x80)
    return tl.where(size > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def to_e4m3fnuz(x, NATIVE: tl.constexpr = False):
  """float32 -> the bits of float8_e4m3fnuz in uint8; NaN becomes 0x80.

  NATIVE: as of to_e4m3fn. The formats' numbers differ by a factor of 2, but for
  240, which begins at 232.
  """
  if NATIVE:
    code = (x * 2.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    code = tl.where(tl.abs(x) > 232.0, code | 0x7F, code)
    code = tl.where(code == 0x80, 0, code)
    return tl.where(x == x, code, 0x80).to(tl.uint8)
  else:
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code = _encode(size, 3, 8, 0x43700000)
    code = tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))
    return tl.where(size > 0x7F800000, 0x80, code).to(tl.uint8)


@triton.jit
def to_e2m1(x):
  """float32 -> the four bits of float4_e2m1fn in uint8; NaN becomes 6."""
  bits = x.to(tl.uint32, bitcast=True)
  size = bits & 0x7FFFFFFF
  code = _encode(size, 1, 1, 0x40C00000) | ((bits >> 28) & 8)
  return tl.where(size > 0x7F800000, 7, code).to(tl.uint8)


@triton.jit
def to_bits(x, kind, NATIVE: tl.constexpr = False):
  """float32 -> uint8 of a kind, which may be known at run time only."""
  if kind == INT8:
    code = to_int8(x)
  elif kind == E4M3FN:
    code = to_e4m3fn(x, NATIVE)
  elif kind == E4M3FNUZ:
    code = to_e4m3fnuz(x, NATIVE)
  else:
    code = to_e2m1(x)
  return code


@triton.jit
def largest(kind):
  """The largest number of a kind, in float32."""
  value = tl.where(kind == E2M1, 6.0, 127.0)
  value = tl.where(kind == E4M3FN, 448.0, value)
  return tl.where(kind == E4M3FNUZ, 240.0, value)


@triton.jit
def magnitude(x):
  """Bits of |x| in int32, ordered as the magnitudes are, with NaN the last."""
  return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def f32_scale(amax, kind):
  """max(amax, AMAX_FLOOR) / largest(kind); NaN of NaN."""
  amax = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
  return tl.div_rn(amax, tl.broadcast_to(largest(kind), amax.shape))


@triton.jit
def divide(x, scale):
  """x / scale as IEEE 754 rounds it, or what rounds to the same bits.

  scale broadcasts to x; it is of f32_scale, or from 2^-60 to 2^100 with
  quotients below 2^60. Two steps of Newton's from a reciprocal: the second
  rounds right if the reciprocal does and the first is next to the quotient
  (Markstein, "Computation of elementary functions on the IBM RISC System/6000
  processor", 1990). Quotients so small that steps underflow round to zero.
  """
  inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
  # Of infinity too a quotient by it is 0, and NaN of infinity.
  scale = tl.broadcast_to(tl.where(scale == float("inf"), 0.0, scale), x.shape)
  # Zeros keep their sign: a rest of nothing is +0, and its correction -0.
  down = tl.broadcast_to(inverse * -1.0, x.shape)
  q = x * inverse
  q = tl.fma(tl.fma(q, scale, x * -1.0), down, q)
  return tl.fma(tl.fma(q, scale, x * -1.0), down, q)


@triton.jit
def e8m0_scale(amax, mode, kind):
  """The scale of a block whose largest magnitude is amax, as e8m0 in uint8.

  With v = amax / largest(kind), and w = amax / the power of two below
  largest(kind), it is
    ROUND_UP    the least power of two >= v
    ROUND_DOWN  the greatest <= w
    CEIL        the least >= w
    EVEN        the greatest <= w, of an amax rounded to the kind's mantissa
  at least 2^-127; of NaN and infinity it is NaN, 0xFF. Each adds its own number
  to amax's mantissa, whose carry then steps the exponent.
  """
  bits = amax.to(tl.uint32, bitcast=True)
  power = tl.where(kind == E2M1, 2, tl.where(kind == E4M3FN, 8, 7))
  up = tl.where(kind == E2M1, 0x3FFFFF,
                tl.where(kind == E4M3FN, 0x1FFFFF, 0x0FFFFF))
  even = tl.where(kind == E2M1, 0x200000, 0x080000)
  add = tl.where(mode == ROUND_UP, up, tl.where(mode == EVEN, even, 0))
  add = tl.where(mode == CEIL, 0x7FFFFF, add)
  exponent = ((bits + add.to(tl.uint32)) >> 23).to(tl.int32)
  scale = tl.maximum(exponent - power, 0)
  return tl.where(bits >= 0x7F800000, 0xFF, scale).to(tl.uint8)


@triton.jit
def from_e8m0(b):
  """e8m0 in uint8 -> float32, exactly: 2^(b - 127); NaN of 0xFF."""
  bits = b.to(tl.uint32) << 23
  bits = tl.where(bits == 0, 0x400000, bits)
  return tl.where(b == 0xFF, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_reciprocal(b):
  """e8m0 in uint8 -> float32 2^(127 - b), exactly; NaN of 0xFF."""
  bits = (254 - b.to(tl.int32)) << 23
  bits = tl.where(bits == 0, 0x400000, bits)
  return tl.where(b == 0xFF, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def from_e4m3fn(b, DTYPE: tl.constexpr = tl.float32):
  """float8_e4m3fn in uint8 -> DTYPE, which holds every one of them."""
  # Moved to float16's places the exponent is 2^8 too low, subnormals included.
  half = ((b & 0x80).to(tl.uint16) << 8) | ((b & 0x7F).to(tl.uint16) << 7)
  value = half.to(tl.float16, bitcast=True) * 256.0
  return tl.where((b & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)


@triton.jit
def from_e4m3fnuz(b, DTYPE: tl.constexpr = tl.float32):
  """float8_e4m3fnuz in uint8 -> DTYPE, which holds every one of them."""
  half = ((b & 0x80).to(tl.uint16) << 8) | ((b & 0x7F).to(tl.uint16) << 7)
  value = half.to(tl.float16, bitcast=True) * 128.0
  return tl.where(b == 0x80, float("nan"), value).to(DTYPE)


@triton.jit
def from_e2m1(b, DTYPE: tl.constexpr = tl.float32):
  """The low four bits of uint8, float4_e2m1fn -> DTYPE."""
  half = ((b & 8).to(tl.uint16) << 12) | ((b & 7).to(tl.uint16) << 9)
  return (half.to(tl.float16, bitcast=True) * 16384.0).to(DTYPE)
