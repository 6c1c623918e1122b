# SPDX-License-Identifier: Apache-2.0
"""Quantisers: largest magnitude, scale, rounded numbers, in one pass.

  quant_row    one scale a row (Xiao et al., "SmoothQuant", arXiv:2211.10438,
               with the factors of columns)
  quant_group  one scale for 32, 64 or 128 columns of a row (DeepSeek-V3,
               arXiv:2412.19437; OCP Microscaling Formats Specification, v1.0),
               or scales that are given
  quant_block  one scale for 128 columns of 128 rows (DeepSeek-V3)
  quant_amax   the largest magnitudes alone

A float32 scale is max(amax, 1e-10) / largest and divides the numbers, both by
IEEE division; an e8m0 scale is as rounding.py says. Every maximum is one of
integers, of magnitudes' bits: in any order the same, and NaN is the largest.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import casts, groups, rounding
from third_party.aiter.kernels.quant.family import FEATURES

E2M1 = rounding.E2M1
INT8 = rounding.INT8
magnitude = rounding.magnitude
f32_scale = rounding.f32_scale
divide = rounding.divide
e8m0_scale = rounding.e8m0_scale
e8m0_reciprocal = rounding.e8m0_reciprocal
divide_by_any = groups.divide_by_any
of_groups = groups.of_groups
shuffled = groups.shuffled

# Bits of the argument `flags`; family.py says what they mean.
SMOOTH_SCALE = tl.constexpr(FEATURES["smooth_scale"])
STATIC = tl.constexpr(FEATURES["static"])
E8M0 = tl.constexpr(FEATURES["e8m0"])
SHUFFLED = tl.constexpr(FEATURES["shuffled"])
UNALIGNED = tl.constexpr(FEATURES["unaligned"])


@triton.jit
def _load(x, r, c, inside_r, cols, WHOLE: tl.constexpr, flags):
  """x[r, c] in float32, 0 outside; r (of 64 bits) and c broadcast.

  WHOLE: what divides cols; 0: 16, if rows are aligned.
  """
  if WHOLE:
    # Said so that the compiler sees it: loads may be of 16 bytes.
    width = cols // WHOLE * WHOLE
    v = tl.load(x + r * width + c, inside_r & (c < width), 0.0)
  elif flags & UNALIGNED:
    v = tl.load(x + r * cols + c, inside_r & (c < cols), 0.0)
  else:
    width = cols // 16 * 16
    v = tl.load(x + r * width + c, inside_r & (c < width), 0.0)
  return v.to(tl.float32)


@triton.jit
def _store(q, codes, r, c, inside_r, cols, WHOLE: tl.constexpr,
           ALIGNED: tl.constexpr, flags):
  """q[r, c] = codes, of bytes; rows of q have `cols` of them.

  WHOLE: what divides cols; 0: ALIGNED, if rows are aligned.
  """
  if WHOLE:
    width = cols // WHOLE * WHOLE
    tl.store(q + r * width + c, codes, inside_r & (c < width))
  elif flags & UNALIGNED:
    tl.store(q + r * cols + c, codes, inside_r & (c < cols))
  else:
    width = cols // ALIGNED * ALIGNED
    tl.store(q + r * width + c, codes, inside_r & (c < width))


@triton.jit
def _smoothed(v, smooth_scale, c, cols, WHOLE: tl.constexpr, flags):
  """v * smooth_scale[c], if that is wanted."""
  if flags & SMOOTH_SCALE:
    v *= _load(smooth_scale, tl.zeros_like(c).to(tl.int64), c, c == c, cols,
               WHOLE, flags)
  return v


@triton.jit
def divide_narrow(x, scale):
  """What rounds to 8 bits as divide's quotient does, of an x of up to 11 bits.

  One step is off by 2^-46. That shows only where a quotient is so near to the
  middle of two float32, and rounds to other codes only if one of these is a
  tie, of 8 bits: with such an x, no scale has its quotient there.
  """
  inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
  scale = tl.broadcast_to(tl.where(scale == float("inf"), 0.0, scale), x.shape)
  q = x * inverse
  rest = tl.fma(q, scale, x * -1.0)
  return tl.fma(rest, tl.broadcast_to(inverse * -1.0, x.shape), q)


@triton.jit
def e2m1_code(x):
  """rounding.to_e2m1 in the low byte of int32, in half the instructions.

  Codes count from 0: steps of a half up to 2, then of one, of two from 4 on. So
  a code is the least of three lines, each rounded by one addition to 2^23, from
  where on float32 counts ones; an even code is an even number.
  """
  # The lesser of NaN and 6 is 6.
  x = tl.maximum(tl.minimum(x, 6.0), -6.0)
  size = tl.abs(x)
  a = tl.fma(size, 2.0, 8388608.0).to(tl.int32, bitcast=True)
  b = (size + 8388610.0).to(tl.int32, bitcast=True)
  c = tl.fma(size, 0.5, 8388612.0).to(tl.int32, bitcast=True)
  sign = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32) & 8
  return tl.minimum(tl.minimum(a, b), c) | sign


# Eight numbers, four even ones and their neighbours, in pairs of float16: where
# it counts ones, from 2^10 on, as e2m1_code's lines. Then nibbles to bytes.
_E2M1_BYTES = tl.constexpr("""{
.reg .b32 x<4>, a<4>, b, c, six, two, half, from0, from2, from4;
mov.b32 six, 0x46004600;
mov.b32 two, 0x40004000;
mov.b32 half, 0x38003800;
mov.b32 from0, 0x64006400;
mov.b32 from2, 0x64026402;
mov.b32 from4, 0x64046404;
cvt.rn.f16x2.f32 x0, $2, $1;
cvt.rn.f16x2.f32 x1, $4, $3;
cvt.rn.f16x2.f32 x2, $6, $5;
cvt.rn.f16x2.f32 x3, $8, $7;
""" + "".join(f"""
and.b32 c, x{i}, 0x7FFF7FFF;
min.f16x2 c, c, six;
fma.rn.f16x2 a{i}, c, two, from0;
add.rn.f16x2 b, c, from2;
fma.rn.f16x2 c, c, half, from4;
min.f16x2 a{i}, a{i}, b;
min.f16x2 a{i}, a{i}, c;
shr.u32 x{i}, x{i}, 12;
and.b32 a{i}, a{i}, 0x00070007;
and.b32 x{i}, x{i}, 0x00080008;
or.b32 a{i}, a{i}, x{i};
""" for i in range(4)) + """
shl.b32 a2, a2, 4;
shl.b32 a3, a3, 4;
or.b32 a0, a0, a2;
or.b32 a1, a1, a3;
prmt.b32 $0, a0, a1, 0x6420;
}""")


@triton.jit
def e2m1_bytes(even, odd, PAIRED: tl.constexpr):
  """The codes of two neighbours in uint8, the even one's in the low bits.

  PAIRED: the target has PTX, and both are numbers of 16 bits times a power of
  two. So they are float16 as well, or so small that they round to 0.
  """
  if PAIRED:
    byte = tl.inline_asm_elementwise(
        _E2M1_BYTES, "=r,f,f,f,f,f,f,f,f", [even, odd], dtype=tl.uint8,
        is_pure=True, pack=4)
  else:
    byte = (e2m1_code(even) | (e2m1_code(odd) << 4)).to(tl.uint8)
  return byte


# Four numbers; the conversions saturate, and make 0 of NaN.
_INT8 = tl.constexpr("""{
.reg .b32 a<4>, high;
cvt.rni.s32.f32 a0, $1;
cvt.rni.s32.f32 a1, $2;
cvt.rni.s32.f32 a2, $3;
cvt.rni.s32.f32 a3, $4;
cvt.pack.sat.s8.s32.b32 high, a3, a2, 0;
cvt.pack.sat.s8.s32.b32 $0, a1, a0, high;
}""")


@triton.jit
def codes(x, kind, NATIVE: tl.constexpr, CAST: tl.constexpr):
  """casts.to_bits; NATIVE: the target has PTX, of sm_89 or later."""
  if NATIVE:
    if kind == INT8:
      q = tl.inline_asm_elementwise(_INT8, "=r,f,f,f,f", [x], dtype=tl.uint8,
                                    is_pure=True, pack=4)
    else:
      q = rounding.to_bits(x, kind, NATIVE)
  else:
    q = casts.to_bits(x, kind, NATIVE, CAST)
  return q


@triton.jit
def _quotient(v, scale, flags, DTYPE: tl.constexpr):
  """v / scale, where v was a number of DTYPE, perhaps smoothed."""
  if DTYPE.primitive_bitwidth == 32:
    q = divide(v, scale)
  elif flags & SMOOTH_SCALE:
    q = divide(v, scale)
  else:
    q = divide_narrow(v, scale)
  return q


@triton.jit
def _quant_row(tile, x, smooth_scale, q, scale, rows, cols, kind, flags,
               TILE_M: tl.constexpr, TILE_N: tl.constexpr, COLS: tl.constexpr,
               WHOLE: tl.constexpr, NATIVE: tl.constexpr, CAST: tl.constexpr):
  """quant_row's tile of rows of this number."""
  DTYPE: tl.constexpr = x.dtype.element_ty
  r = tile * TILE_M + tl.arange(0, TILE_M)
  inside_r = r < rows
  row = r.to(tl.int64)[:, None]
  inside = inside_r[:, None]
  c = tl.arange(0, TILE_N)[None, :]
  m = tl.zeros([TILE_M, TILE_N], tl.int32)
  if COLS:
    # All loads are on their way before the first of them is used.
    loaded = ()
    for i in tl.static_range(COLS // TILE_N):
      loaded += (_load(x, row, i * TILE_N + c, inside, cols, WHOLE, flags),)
    tiles = ()
    for i in tl.static_range(COLS // TILE_N):
      v = _smoothed(loaded[i], smooth_scale, i * TILE_N + c, cols, WHOLE,
                    flags)
      m = tl.maximum(m, magnitude(v))
      tiles += (v,)
    s = f32_scale(tl.max(m, 1).to(tl.float32, bitcast=True), kind)
    for i in tl.static_range(COLS // TILE_N):
      v = _quotient(tiles[i], s[:, None], flags, DTYPE)
      _store(q, codes(v, kind, NATIVE, CAST), row, i * TILE_N + c, inside, cols,
             WHOLE, 16, flags)
  else:
    for c0 in range(0, cols, TILE_N):
      v = _load(x, row, c0 + c, inside, cols, WHOLE, flags)
      v = _smoothed(v, smooth_scale, c0 + c, cols, WHOLE, flags)
      m = tl.maximum(m, magnitude(v))
    s = f32_scale(tl.max(m, 1).to(tl.float32, bitcast=True), kind)
    for c0 in range(0, cols, TILE_N):
      v = _load(x, row, c0 + c, inside, cols, WHOLE, flags)
      v = _smoothed(v, smooth_scale, c0 + c, cols, WHOLE, flags)
      v = _quotient(v, s[:, None], flags, DTYPE)
      _store(q, codes(v, kind, NATIVE, CAST), row, c0 + c, inside, cols,
             WHOLE, 16, flags)
  tl.store(scale + r, s, inside_r)


@triton.jit
def quant_row(x, smooth_scale, q, scale, rows, cols, kind, flags,
              TILE_M: tl.constexpr, TILE_N: tl.constexpr, COLS: tl.constexpr,
              FLAGS: tl.constexpr, WHOLE: tl.constexpr, NATIVE: tl.constexpr,
              CAST: tl.constexpr, WALKS: tl.constexpr):
  """q = x * smooth_scale / scale, with the scale of each row.

  x: [rows, cols]. smooth_scale: float32 [cols]. q: bytes [rows, cols]. scale:
  float32 [rows]. Up to COLS columns, a multiple of TILE_N, lie in registers;
  with COLS = 0 a row of any length passes twice, in tiles of TILE_N, the second
  time out of the cache. FLAGS: those that may be set. WALKS: the programs,
  which are as many as run at once, take the tiles in turn, so that some read
  while others write.
  """
  flags &= FLAGS
  if WALKS:
    for tile in range(tl.program_id(0), tl.cdiv(rows, TILE_M),
                      tl.num_programs(0)):
      _quant_row(tile, x, smooth_scale, q, scale, rows, cols, kind, flags,
                 TILE_M, TILE_N, COLS, WHOLE, NATIVE, CAST)
  else:
    _quant_row(tl.program_id(0), x, smooth_scale, q, scale, rows, cols, kind,
               flags, TILE_M, TILE_N, COLS, WHOLE, NATIVE, CAST)


@triton.jit
def quant_group(x, smooth_scale, scale_in, q, scale, scale_e8m0, rows, cols,
                scale_rows, scale_cols, stride_scale_m, stride_scale_n,
                batch_stride_scale, tiles_m, tiles_n, group, kind, mode, flags,
                TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                RUN: tl.constexpr, FLAGS: tl.constexpr, SET: tl.constexpr,
                WHOLE: tl.constexpr, NATIVE: tl.constexpr, CAST: tl.constexpr):
  """q = x * smooth_scale / scale, with a scale for some columns of a row.

  x: [batch, rows, cols]. smooth_scale: float32 [cols]. scale_in: float32
  [batch, rows], the scales of a static quantiser. q: bytes [batch, rows, cols],
  or of e2m1 half as many, the even columns in the low bits. scale, scale_e8m0:
  [batch, scale_rows, scale_cols], by its strides; rows or columns beyond the
  groups' are those of zeros. tiles_m, tiles_n: tiles that cover both q and
  scale. group: columns of a group: 32, 64 or 128; with RUN 128 no other. A
  tile is TILE_M rows of runs of RUN columns. FLAGS: those that may be set; SET:
  those that are.
  """
  flags = flags & FLAGS | SET
  RUNS: tl.constexpr = TILE_N // RUN
  tile_n = tl.program_id(0) % tiles_n
  tile_m = tl.program_id(0) // tiles_n % tiles_m
  batch = (tl.program_id(0) // tiles_n // tiles_m).to(tl.int64)
  r = tile_m * TILE_M + tl.arange(0, TILE_M)
  g = tile_n * RUNS + tl.arange(0, RUNS)
  inside_r = r < rows
  row = batch * rows + r
  at = row[:, None, None]
  inside = inside_r[:, None, None]
  c = (g[:, None] * RUN + tl.arange(0, RUN)[None, :])[None, :, :]
  v = _load(x, at, c, inside, cols, WHOLE, flags)
  v = _smoothed(v, smooth_scale, c, cols, WHOLE, flags)
  if flags & STATIC:
    s = tl.load(scale_in + row, inside_r, 1.0)
    v = divide_by_any(v, s[:, None, None])
  else:
    m = tl.max(magnitude(v), 2)
    steps = 0  # Runs of a group: 2^steps.
    if RUN == 32:
      steps = (group >= 64).to(tl.int32) + (group >= 128).to(tl.int32)
      m = of_groups(m, group, TILE_M, RUNS)
    amax = m.to(tl.float32, bitcast=True)
    scale_c = g >> steps
    if flags & SHUFFLED:
      to = shuffled(r, scale_c, scale_cols)
    else:
      to = (r.to(tl.int64) * stride_scale_m)[:, None] + (
          scale_c.to(tl.int64) * stride_scale_n)[None, :]
    to += batch * batch_stride_scale
    first = (r < scale_rows)[:, None] & (
        ((scale_c << steps) == g) & (scale_c < scale_cols))[None, :]
    if flags & E8M0:
      e = e8m0_scale(amax, mode, kind)
      tl.store(scale_e8m0 + to, e, first)
      v *= e8m0_reciprocal(e)[:, :, None]
    else:
      s = f32_scale(amax, kind)
      tl.store(scale + to, s, first)
      v = _quotient(v, s[:, :, None], flags, x.dtype.element_ty)
  if kind == E2M1:
    PAIRED: tl.constexpr = (
        NATIVE and x.dtype.element_ty.primitive_bitwidth == 16
        and not FLAGS & SMOOTH_SCALE)
    even, odd = tl.split(tl.reshape(v, [TILE_M, RUNS, RUN // 2, 2]))
    byte = g[:, None] * (RUN // 2) + tl.arange(0, RUN // 2)[None, :]
    _store(q, e2m1_bytes(even, odd, PAIRED), at, byte[None, :, :], inside,
           cols // 2, (WHOLE + 1) // 2, 8, flags)
  else:
    _store(q, codes(v, kind, NATIVE, CAST), at, c, inside, cols, WHOLE, 16,
           flags)


@triton.jit
def quant_block(x, smooth_scale, q, scale, rows, cols, stride_scale_m,
                stride_scale_n, batch_stride_scale, tiles_m, tiles_n, kind,
                flags, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                STEP: tl.constexpr, FLAGS: tl.constexpr, WHOLE: tl.constexpr,
                NATIVE: tl.constexpr, CAST: tl.constexpr):
  """q = x * smooth_scale / scale, with a scale for a tile: TILE_M x TILE_N.

  Arrays are as quant_group's. A tile lies in registers, in STEP rows each.
  """
  flags &= FLAGS
  tile_n = tl.program_id(0) % tiles_n
  tile_m = tl.program_id(0) // tiles_n % tiles_m
  batch = (tl.program_id(0) // tiles_n // tiles_m).to(tl.int64)
  c = tile_n * TILE_N + tl.arange(0, TILE_N)[None, :]
  m = tl.zeros([STEP, TILE_N], tl.int32)
  tile = ()
  for i in tl.static_range(0, TILE_M, STEP):
    r = tile_m * TILE_M + i + tl.arange(0, STEP)[:, None]
    v = _load(x, batch * rows + r, c, r < rows, cols, WHOLE, flags)
    v = _smoothed(v, smooth_scale, c, cols, WHOLE, flags)
    m = tl.maximum(m, magnitude(v))
    tile += (v,)
  amax = tl.max(tl.max(m, 1), 0).to(tl.float32, bitcast=True)
  s = f32_scale(amax + tl.zeros([1, 1], tl.float32), kind)
  at = (batch * batch_stride_scale + tile_m.to(tl.int64) * stride_scale_m
        + tile_n.to(tl.int64) * stride_scale_n)
  tl.store(scale + at + tl.zeros([1, 1], tl.int32), s)
  for i in tl.static_range(0, TILE_M, STEP):
    r = tile_m * TILE_M + i + tl.arange(0, STEP)[:, None]
    v = _quotient(tile[i // STEP], s, flags, x.dtype.element_ty)
    _store(q, codes(v, kind, NATIVE, CAST), batch * rows + r, c, r < rows, cols,
           WHOLE, 16, flags)


@triton.jit
def quant_amax(x, scale, rows, cols, tiles_n, flags, TILE_M: tl.constexpr,
               TILE_N: tl.constexpr, STEP: tl.constexpr, FLAGS: tl.constexpr,
               WHOLE: tl.constexpr):
  """scale = the largest magnitudes in runs of TILE_N columns.

  x: [rows, cols]. scale: float32 [rows, tiles_n]. FLAGS: those that may be set.
  """
  flags &= FLAGS
  r = tl.program_id(0) // tiles_n * TILE_M + tl.arange(0, TILE_M)
  run = tl.program_id(0) % tiles_n
  m = tl.zeros([TILE_M, STEP], tl.int32)
  first = run * TILE_N
  for c0 in range(first, tl.minimum(cols, first + TILE_N), STEP):
    c = c0 + tl.arange(0, STEP)[None, :]
    m = tl.maximum(m, magnitude(
        _load(x, r.to(tl.int64)[:, None], c, (r < rows)[:, None], cols, WHOLE,
              flags)))
  tl.store(scale + r.to(tl.int64) * tiles_n + run,
           tl.max(m, 1).to(tl.float32, bitcast=True), r < rows)
