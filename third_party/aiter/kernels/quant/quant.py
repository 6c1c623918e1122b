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

from third_party.aiter.kernels.core import groups, rounding
from third_party.aiter.kernels.quant.family import FEATURES

E2M1 = rounding.E2M1
magnitude = rounding.magnitude
f32_scale = rounding.f32_scale
divide = rounding.divide
to_bits = rounding.to_bits
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
ALIGNED = tl.constexpr(FEATURES["aligned"])


@triton.jit
def _load(x, r, c, inside_r, cols, flags):
  """x[r, c] in float32, 0 outside; r (of 64 bits) and c broadcast."""
  if flags & ALIGNED:
    # Said so that the compiler sees it: loads may be of 16 bytes.
    width = cols // 16 * 16
    v = tl.load(x + r * width + c, inside_r & (c < width), 0.0)
  else:
    v = tl.load(x + r * cols + c, inside_r & (c < cols), 0.0)
  return v.to(tl.float32)


@triton.jit
def _store(q, codes, r, c, inside_r, cols, flags):
  """q[r, c] = codes, of bytes; rows of q have `cols` of them."""
  if flags & ALIGNED:
    width = cols // 8 * 8
    tl.store(q + r * width + c, codes, inside_r & (c < width))
  else:
    tl.store(q + r * cols + c, codes, inside_r & (c < cols))


@triton.jit
def _smoothed(v, smooth_scale, c, cols, flags):
  """v * smooth_scale[c], if that is wanted."""
  if flags & SMOOTH_SCALE:
    v *= _load(smooth_scale, tl.zeros_like(c).to(tl.int64), c, c == c, cols,
               flags)
  return v


@triton.jit
def quant_row(x, smooth_scale, q, scale, rows, cols, kind, flags,
              TILE_M: tl.constexpr, TILE_N: tl.constexpr, COLS: tl.constexpr,
              NATIVE: tl.constexpr):
  """q = x * smooth_scale / scale, with the scale of each row.

  x: [rows, cols]. smooth_scale: float32 [cols]. q: bytes [rows, cols]. scale:
  float32 [rows]. Up to COLS columns lie in registers; with COLS = 0 a row of
  any length passes twice, in tiles of TILE_N, the second time out of the cache.
  """
  r = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  inside_r = r < rows
  row = r.to(tl.int64)[:, None]
  inside = inside_r[:, None]
  if COLS:
    c = tl.arange(0, COLS)[None, :]
    v = _load(x, row, c, inside, cols, flags)
    v = _smoothed(v, smooth_scale, c, cols, flags)
    amax = tl.max(magnitude(v), 1).to(tl.float32, bitcast=True)
    s = f32_scale(amax, kind)
    v = divide(v, s[:, None])
    _store(q, to_bits(v, kind, NATIVE), row, c, inside, cols, flags)
  else:
    m = tl.zeros([TILE_M, TILE_N], tl.int32)
    for c0 in range(0, cols, TILE_N):
      c = c0 + tl.arange(0, TILE_N)[None, :]
      v = _load(x, row, c, inside, cols, flags)
      v = _smoothed(v, smooth_scale, c, cols, flags)
      m = tl.maximum(m, magnitude(v))
    s = f32_scale(tl.max(m, 1).to(tl.float32, bitcast=True), kind)
    for c0 in range(0, cols, TILE_N):
      c = c0 + tl.arange(0, TILE_N)[None, :]
      v = _load(x, row, c, inside, cols, flags)
      v = _smoothed(v, smooth_scale, c, cols, flags)
      v = divide(v, s[:, None])
      _store(q, to_bits(v, kind, NATIVE), row, c, inside, cols, flags)
  tl.store(scale + r, s, inside_r)


@triton.jit
def quant_group(x, smooth_scale, scale_in, q, scale, scale_e8m0, rows, cols,
                scale_rows, scale_cols, stride_scale_m, stride_scale_n,
                batch_stride_scale, tiles_m, tiles_n, group, kind, mode, flags,
                TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                BLOCK: tl.constexpr, NATIVE: tl.constexpr):
  """q = x * smooth_scale / scale, with a scale for some columns of a row.

  x: [batch, rows, cols]. smooth_scale: float32 [cols]. scale_in: float32
  [batch, rows], the scales of a static quantiser. q: bytes [batch, rows, cols],
  or of e2m1 half as many, the even columns in the low bits. scale, scale_e8m0:
  [batch, scale_rows, scale_cols], by its strides; rows or columns beyond the
  groups' are those of zeros. tiles_m, tiles_n: tiles that cover both q and
  scale. group: columns of a group: 32, 64 or 128. A BLOCK is 128 columns of 128
  rows, the whole tile.
  """
  RUNS: tl.constexpr = TILE_N // 32
  tile_n = tl.program_id(0) % tiles_n
  tile_m = tl.program_id(0) // tiles_n % tiles_m
  batch = (tl.program_id(0) // tiles_n // tiles_m).to(tl.int64)
  r = tile_m * TILE_M + tl.arange(0, TILE_M)
  g = tile_n * RUNS + tl.arange(0, RUNS)
  inside_r = r < rows
  row = batch * rows + r
  at = row[:, None, None]
  inside = inside_r[:, None, None]
  c = (g[:, None] * 32 + tl.arange(0, 32)[None, :])[None, :, :]
  v = _load(x, at, c, inside, cols, flags)
  v = _smoothed(v, smooth_scale, c, cols, flags)
  if flags & STATIC:
    s = tl.load(scale_in + row, inside_r, 1.0)
    v = divide_by_any(v, s[:, None, None])
  else:
    m = tl.max(magnitude(v), 2)
    if BLOCK:
      m = tl.broadcast_to(tl.max(tl.max(m, 1), 0), [TILE_M, RUNS])
    else:
      m = of_groups(m, group, TILE_M, RUNS)
    amax = m.to(tl.float32, bitcast=True)
    if BLOCK:
      scale_r = tile_m + tl.zeros_like(r)
      scale_c = tile_n + tl.zeros_like(g)
      first = ((r % TILE_M) == 0)[:, None] & ((g % RUNS) == 0)[None, :]
    else:
      scale_r = r
      scale_c = g // (group // 32)
      first = ((g % (group // 32)) == 0)[None, :]
    if flags & SHUFFLED:
      to = shuffled(scale_r, scale_c, scale_cols)
    else:
      to = (scale_r.to(tl.int64) * stride_scale_m)[:, None] + (
          scale_c.to(tl.int64) * stride_scale_n)[None, :]
    to += batch * batch_stride_scale
    first &= (scale_r < scale_rows)[:, None] & (scale_c < scale_cols)[None, :]
    if flags & E8M0:
      e = e8m0_scale(amax, mode, kind)
      tl.store(scale_e8m0 + to, e, first)
      v *= e8m0_reciprocal(e)[:, :, None]
    else:
      s = f32_scale(amax, kind)
      tl.store(scale + to, s, first)
      v = divide(v, s[:, :, None])
  codes = to_bits(v, kind, NATIVE)
  if kind == E2M1:
    low, high = tl.split(tl.reshape(codes, [TILE_M, RUNS, 16, 2]))
    byte = (g[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, :]
    _store(q, low | (high << 4), at, byte, inside, cols // 2, flags)
  else:
    _store(q, codes, at, c, inside, cols, flags)


@triton.jit
def quant_amax(x, scale, rows, cols, tiles_n, flags, TILE_M: tl.constexpr,
               TILE_N: tl.constexpr, STEP: tl.constexpr):
  """scale = the largest magnitudes in runs of TILE_N columns.

  x: [rows, cols]. scale: float32 [rows, tiles_n].
  """
  r = tl.program_id(0) // tiles_n * TILE_M + tl.arange(0, TILE_M)
  run = tl.program_id(0) % tiles_n
  m = tl.zeros([TILE_M, STEP], tl.int32)
  first = run * TILE_N
  for c0 in range(first, tl.minimum(cols, first + TILE_N), STEP):
    c = c0 + tl.arange(0, STEP)[None, :]
    m = tl.maximum(m, magnitude(
        _load(x, r.to(tl.int64)[:, None], c, (r < rows)[:, None], cols, flags)))
  tl.store(scale + r.to(tl.int64) * tiles_n + run,
           tl.max(m, 1).to(tl.float32, bitcast=True), r < rows)
