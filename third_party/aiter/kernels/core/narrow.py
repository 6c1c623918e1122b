# SPDX-License-Identifier: Apache-2.0
"""Float32 to 8 bits as rounding.py has it, four in a word.

CAST is the float8 type that one instruction of CDNA makes of float32, as
archs.csv calls it; PTX: sm_90's instructions, of which one makes e4m3fn; "":
there is none, and words are made of bytes.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import rounding

INT8 = rounding.INT8
PTX = tl.constexpr("ptx")


@triton.jit
def words_of(codes):
  """uint8 [..., n] -> uint32 [..., n / 4], the first byte the lowest."""
  N: tl.constexpr = codes.shape[-1] // 4
  ROWS: tl.constexpr = codes.numel // codes.shape[-1]
  even, odd = tl.split(tl.reshape(codes.to(tl.uint32), [ROWS, N, 2, 2]))
  x0, x2 = tl.split(even)
  x1, x3 = tl.split(odd)
  return x0 | (x1 << 8) | (x2 << 16) | (x3 << 24)


@triton.jit
def bytes_of(words):
  """words_of's argument, of two dimensions."""
  even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
  odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
  return tl.reshape(tl.join(even, odd), [words.shape[0], words.shape[1] * 4])


@triton.jit
def _convert(x, CAST: tl.constexpr):
  """words_of float8, of what is in the type's range or NaN.

  Triton's own conversion clamps again, and packs bytes one by one. What has
  written half of a register must not be read by the next instruction.
  """
  N: tl.constexpr = x.shape[-1] // 4
  ROWS: tl.constexpr = x.numel // x.shape[-1]
  even, odd = tl.split(tl.reshape(x, [ROWS, N, 2, 2]))
  x0, x2 = tl.split(even)
  x1, x3 = tl.split(odd)
  if CAST == PTX:
    found = tl.inline_asm_elementwise(
        "{.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;\n"
        "mov.b32 $0, {low, high};}", "=r,f,f,f,f", [x0, x1, x2, x3],
        dtype=tl.uint32, is_pure=True, pack=1)
  else:
    found = tl.inline_asm_elementwise(
        "v_cvt_pk_fp8_f32 $0, $1, $2\n"
        "v_cvt_pk_fp8_f32 $0, $3, $4 op_sel:[0,0,1]\n"
        "s_nop 0", "=&v,v,v,v,v", [x0, x1, x2, x3], dtype=tl.uint32,
        is_pure=True, pack=1)
  return found


@triton.jit
def _clamped(x, CAST: tl.constexpr):
  """The instruction makes NaN of what is too large, and keeps a NaN's sign."""
  LARGEST: tl.constexpr = 448.0 if CAST == "e4m3fn" else 240.0
  return tl.where(x == x, tl.clamp(x, -LARGEST, LARGEST), float("nan"))


@triton.jit
def _inverse(x, CAST: tl.constexpr):
  """1 / x, or next to it, of what no division needs scaled."""
  if CAST == "":
    y = 1.0 / x
  elif CAST == PTX:
    y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x],
                                  dtype=tl.float32, is_pure=True, pack=1)
  else:
    # Of a register that this instruction writes the next one reads nothing.
    y = tl.inline_asm_elementwise("v_rcp_f32 $0, $1\ns_nop 0", "=v,v", [x],
                                  dtype=tl.float32, is_pure=True, pack=1)
  return y


@triton.jit
def divide_short(x, scale, CAST: tl.constexpr):
  """x / scale, as good as rounding.divide's for who rounds it to 10 bits.

  x is of 11 bits at most, scale from 2^-60 to 2^125, and quotients are below
  2^60. The reciprocal is next to the right one, so they are right to 9 / 8 of
  2^-45 of them before they are rounded to float32. So
  one may be another than the right one's only where x / scale is that near, but
  not equal, to a number m of 25 bits between two of float32. Rounding it again
  tells the two apart only if one of them is a number T of 10 bits: m is one
  more or less than T * 2^15, in units of its last bit. With scale an integer S
  of 24 bits S * m then differs by d, from 1 to 18, from a number that ends in
  37 bits of zeros: but S * T * 2^15 +- S only does if S is a * 2^15 -+ d with
  d * T = +-a, where a is below 2^9 and T is not. T of fewer bits likewise.
  """
  inverse = tl.broadcast_to(_inverse(scale, CAST), x.shape)
  q = x * inverse
  return tl.fma(tl.fma(q, tl.broadcast_to(scale, x.shape), x * -1.0),
                inverse * -1.0, q)


@triton.jit
def words(x, kind, CAST: tl.constexpr, BOUNDED: tl.constexpr):
  """words_of rounding.to_bits. kind: int8, or CAST's.

  BOUNDED: x, which is no NaN, is in the type's range or rounded to it.
  """
  if CAST == "":
    found = words_of(rounding.to_bits(x, kind))
  elif kind == INT8:
    if BOUNDED:
      code = (x + 12582912.0).to(tl.int32, bitcast=True)
      found = words_of(code.to(tl.uint8))
    else:
      found = words_of(rounding.to_int8(x))
  else:
    found = _convert(x if BOUNDED or CAST == PTX else _clamped(x, CAST), CAST)
  return found
