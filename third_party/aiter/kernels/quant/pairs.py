# SPDX-License-Identifier: Apache-2.0
"""Long rows of 16 bits with a scale each, in pairs.

What quant.quant_row makes of them, bit for bit. Until they are divided, numbers
stay the pairs of columns that they are read as: half the registers, so that
rows twice as long lie there.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import rounding
from third_party.aiter.kernels.quant import quant

codes = quant.codes
divide_narrow = quant.divide_narrow
f32_scale = rounding.f32_scale


@triton.jit
def _numbers(pairs, DTYPE: tl.constexpr):
  """The lower and the upper half of pairs, in float32."""
  if DTYPE == tl.bfloat16:
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -65536).to(tl.float32, bitcast=True)
  else:
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
  return low, high


@triton.jit
def quant_row_pairs(x, q, scale, rows, cols, kind, TILE_N: tl.constexpr,
                    COLS: tl.constexpr, WHOLE: tl.constexpr,
                    NATIVE: tl.constexpr, CAST: tl.constexpr):
  """q and scale, as quant.quant_row has them; WHOLE divides cols."""
  DTYPE: tl.constexpr = x.dtype.element_ty
  HALF: tl.constexpr = TILE_N // 2
  row = tl.program_id(0).to(tl.int64)
  # Said so that loads may be of 16 bytes.
  width = cols // WHOLE * (WHOLE // 2)
  x = x.to(tl.pointer_type(tl.int32), bitcast=True) + row * width
  q = q.to(tl.pointer_type(tl.int16), bitcast=True) + row * width
  c = tl.arange(0, HALF)
  tiles = ()
  for i in tl.static_range(COLS // TILE_N):
    tiles += (tl.load(x + (i * HALF + c), i * HALF + c < width, 0),)
  # What is below a pair's upper half counts for less than its last digit.
  lows = tl.zeros([HALF], tl.int32)
  highs = tl.zeros([HALF], tl.int32)
  for i in tl.static_range(COLS // TILE_N):
    lows = tl.maximum(lows, tiles[i] & 0x7FFF)
    highs = tl.maximum(highs, tiles[i] & 0x7FFFFFFF)
  most = tl.max(tl.maximum(lows, highs >> 16), 0)
  s = f32_scale(_numbers(most, DTYPE)[0], kind)
  tl.store(scale + row, s)
  for i in tl.static_range(COLS // TILE_N):
    low, high = _numbers(tiles[i], DTYPE)
    v = divide_narrow(tl.join(low, high), s)
    even, odd = tl.split(codes(v, kind, NATIVE, CAST))
    tl.store(q + (i * HALF + c), even.to(tl.int16) | (odd.to(tl.int16) << 8),
             i * HALF + c < width)
