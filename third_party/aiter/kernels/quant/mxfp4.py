# SPDX-License-Identifier: Apache-2.0
"""MXFP4 of bfloat16, in pairs, where the target has PTX of sm_90.

What quant.quant_group makes of e2m1, bit for bit, in half the instructions:
numbers stay the pairs of columns that they are read as, and are multiplied,
rounded and packed so.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import groups, rounding
from third_party.aiter.kernels.quant.family import FEATURES

E2M1 = rounding.E2M1
SHUFFLED = tl.constexpr(FEATURES["shuffled"])
e8m0_scale = rounding.e8m0_scale
of_groups = groups.of_groups
shuffled = groups.shuffled


def _bytes_of_pairs():
  """PTX: the codes of four pairs, times pairs of powers of two.

  Codes count from 0: steps of a half up to 2, then of one, of two from 4 on. So
  a code is the least of three lines, each rounded by one addition to 2^7, from
  where on bfloat16 counts ones; an even code is an even number. The lesser of
  NaN and 6 is 6.
  """
  lines = ["{", ".reg .b32 x, a<4>, b, c;"]
  for name, number in (("six", 0x40C0), ("two", 0x4000), ("half", 0x3F00),
                       ("from0", 0x4300), ("from2", 0x4302),
                       ("from4", 0x4304)):
    lines += [f".reg .b32 {name};",
              f"mov.b32 {name}, 0x{number:04X}{number:04X};"]
  for i in range(4):
    lines.append(f"""
mul.rn.bf16x2 x, ${1 + i}, ${5 + i};
and.b32 c, x, 0x7FFF7FFF;
min.bf16x2 c, c, six;
fma.rn.bf16x2 a{i}, c, two, from0;
add.rn.bf16x2 b, c, from2;
fma.rn.bf16x2 c, c, half, from4;
min.bf16x2 a{i}, a{i}, b;
min.bf16x2 a{i}, a{i}, c;
shr.u32 x, x, 12;
and.b32 x, x, 0x00080008;
and.b32 a{i}, a{i}, 0x00070007;
or.b32 a{i}, a{i}, x;""")
  # Nibbles at bits 0 and 16: neighbours', which become a byte.
  return "\n".join([*lines, """
mad.lo.u32 a0, a1, 256, a0;
mad.lo.u32 a2, a3, 256, a2;
prmt.b32 a1, a0, a2, 0x5410;
prmt.b32 a3, a0, a2, 0x7632;
mad.lo.u32 $0, a3, 16, a1;
}"""])


_PTX = tl.constexpr(_bytes_of_pairs())


@triton.jit
def _codes(pairs, e):
  """A byte of codes for each pair, divided by 2^(e - 127); NaN of e = 0xFF."""
  power = 127 - e.to(tl.int32)
  # 2^-127 is subnormal.
  bits = tl.where(power > -127, (power + 127) << 7, 0x40)
  bits = tl.where(e == 0xFF, 0x7FC0, bits)
  factor = tl.broadcast_to(bits | (bits << 16), pairs.shape)
  return tl.inline_asm_elementwise(
      _PTX, "=r,r,r,r,r,r,r,r,r", [pairs, factor], dtype=tl.uint8, is_pure=True,
      pack=4)


@triton.jit
def quant_mxfp4(x, q, scale_e8m0, rows, cols, scale_rows, scale_cols,
                stride_scale_m, stride_scale_n, batch_stride_scale, tiles_m,
                tiles_n, group, mode, flags, TILE_M: tl.constexpr,
                TILE_N: tl.constexpr, FLAGS: tl.constexpr, WHOLE: tl.constexpr):
  """q and scale_e8m0, as quant.quant_group has them; WHOLE divides cols."""
  flags &= FLAGS
  RUNS: tl.constexpr = TILE_N // 32
  tile_n = tl.program_id(0) % tiles_n
  tile_m = tl.program_id(0) // tiles_n % tiles_m
  batch = (tl.program_id(0) // tiles_n // tiles_m).to(tl.int64)
  r = tile_m * TILE_M + tl.arange(0, TILE_M)
  g = tile_n * RUNS + tl.arange(0, RUNS)
  # Columns, rows and bytes of pairs; said so that loads may be of 16 bytes.
  width = cols // WHOLE * (WHOLE // 2)
  c = (g[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, :]
  inside = (r < rows)[:, None, None] & (c < width)
  at = (batch * rows + r)[:, None, None] * width + c
  pairs = tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + at, inside, 0)
  # What is below a pair's upper half counts for nothing.
  m = tl.maximum(pairs & 0x7FFFFFFF, (pairs << 16) & 0x7FFFFFFF)
  m = of_groups(tl.max(m, 2), group, TILE_M, RUNS)
  amax = (m & 0x7FFF0000).to(tl.float32, bitcast=True)
  e = e8m0_scale(amax, mode, E2M1)
  steps = (group >= 64).to(tl.int32) + (group >= 128).to(tl.int32)
  scale_c = g >> steps
  if flags & SHUFFLED:
    to = shuffled(r, scale_c, scale_cols)
  else:
    to = (r.to(tl.int64) * stride_scale_m)[:, None] + (
        scale_c.to(tl.int64) * stride_scale_n)[None, :]
  first = (r < scale_rows)[:, None] & (
      ((scale_c << steps) == g) & (scale_c < scale_cols))[None, :]
  tl.store(scale_e8m0 + batch * batch_stride_scale + to, e, first)
  tl.store(q + at, _codes(pairs, e[:, :, None]), inside)
