# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm, forward, with a result of 8 or 4 bits.

The normalised rows stay in float32 until they are rounded, times a factor for
each column where there is one (Xiao et al., "SmoothQuant", arXiv:2211.10438).
A block owns TILE_M rows. Up to COLS columns, in tiles of TILE_N, lie in
registers, so that every element is read once. Rows of any length (COLS = 0)
pass three times, for the statistics, the largest magnitude and the result, the
later two out of the cache; MXFP4, with its scales of 32 columns, needs but two
passes.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import casts, rounding
from third_party.aiter.kernels.norm import rows as norm

F32_WEIGHTS = norm.F32_WEIGHTS
LAYER = norm.LAYER
RESIDUAL = norm.RESIDUAL
X_SCALE = norm.X_SCALE
load_sum = norm.load_sum
of_weight = norm.of_weight
statistics = norm.statistics
weight = norm.weight
weighted = norm.weighted
E2M1 = rounding.E2M1
ROUND_UP = rounding.ROUND_UP
divide = rounding.divide
e8m0_reciprocal = rounding.e8m0_reciprocal
e8m0_scale = rounding.e8m0_scale
f32_scale = rounding.f32_scale
magnitude = rounding.magnitude
to_bits = casts.to_bits
to_e2m1 = rounding.to_e2m1


@triton.jit
def _result(d, inv, w, beta, beta_f32, x_scale, c, inside_c, flags,
            DTYPE: tl.constexpr):
  """What is quantised, in float32, of what is left to the mean, 0 outside.

  w: the columns' weights. Outside it is 0 too, or NaN with all of its row.
  """
  n = weighted(d, inv, w, beta, beta_f32, c, inside_c, flags, DTYPE)
  if flags & X_SCALE:
    n *= tl.load(x_scale + c, inside_c, 0.0)[None, :]
  return n


@triton.jit
def largest(n):
  """Bits of the largest magnitudes along the last axis."""
  return tl.max(magnitude(n), len(n.shape) - 1)


@triton.jit
def scale_of(bits, kind):
  return f32_scale(bits.to(tl.float32, bitcast=True), kind)


@triton.jit
def write(n, s, q, scale_e8m0, row, cols, c0, inside_r, kind,
          TILE_M: tl.constexpr, TILE_N: tl.constexpr, NATIVE: tl.constexpr,
          CAST: tl.constexpr):
  """Rounds and writes a tile, whose first column is c0; MXFP4's scales too."""
  if kind == E2M1:
    groups = tl.reshape(n, [TILE_M, TILE_N // 32, 32])
    amax = largest(groups).to(tl.float32, bitcast=True)
    e = e8m0_scale(amax, ROUND_UP, E2M1)
    g = c0 // 32 + tl.arange(0, TILE_N // 32)
    tl.store(scale_e8m0 + row * (cols // 32) + g[None, :], e,
             inside_r & (g < cols // 32)[None, :])
    nibbles = to_e2m1(groups * e8m0_reciprocal(e)[:, :, None])
    low, high = tl.split(tl.reshape(nibbles, [TILE_M, TILE_N // 2, 2]))
    pair = c0 // 2 + tl.arange(0, TILE_N // 2)
    tl.store(q + row * (cols // 2) + pair[None, :], low | (high << 4),
             inside_r & (pair < cols // 2)[None, :])
  else:
    c = c0 + tl.arange(0, TILE_N)
    codes = to_bits(divide(n, s[:, None]), kind, NATIVE, CAST)
    tl.store(q + row * cols + c[None, :], codes, inside_r & (c < cols)[None, :])


@triton.jit
def norm_quant(x, residual, gamma, gamma_f32, beta, beta_f32, x_scale, q, scale,
               scale_e8m0, residual_out, rows, cols, epsilon, kind, flags,
               TILE_M: tl.constexpr, TILE_N: tl.constexpr, COLS: tl.constexpr,
               FLAGS: tl.constexpr, NATIVE: tl.constexpr, CAST: tl.constexpr):
  """q = y * x_scale / scale, with y as norm_fwd has it.

  x, residual, gamma, beta, residual_out: as in norm_fwd. x_scale: float32
  [cols]. q: bytes [rows, cols], of a kind of rounding.py; or of e2m1 half as
  many, the even columns in the low bits. scale: float32 [rows]; of e2m1 it is
  scale_e8m0, bytes [rows, cols / 32]. FLAGS: those that may be set.
  """
  flags &= FLAGS
  DTYPE: tl.constexpr = x.dtype.element_ty
  r = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  inside_r = r < rows
  first = r.to(tl.int64)[:, None]
  row = first * cols
  tile = tl.arange(0, TILE_N)
  s = tl.full([TILE_M], 1.0, tl.float32)
  if COLS:
    # All loads are on their way before the first of them is used.
    TILES: tl.constexpr = COLS // TILE_N
    vs = ()
    for i in tl.static_range(TILES):
      c = tile + i * TILE_N
      inside = inside_r[:, None] & (c < cols)[None, :]
      vs += (load_sum(x, residual, row + c[None, :], inside, flags),)
    ws = ()
    if not F32_WEIGHTS & FLAGS:
      for i in tl.static_range(TILES):
        c = tile + i * TILE_N
        ws += (tl.load(gamma + c, c < cols, 0.0),)
    if flags & RESIDUAL:
      for i in tl.static_range(TILES):
        c = tile + i * TILE_N
        inside = inside_r[:, None] & (c < cols)[None, :]
        tl.store(residual_out + row + c[None, :], vs[i].to(DTYPE), inside)
    n_cols = cols.to(tl.float32)
    mu = tl.zeros([TILE_M], tl.float32)
    if flags & LAYER:
      total = vs[0]
      for i in tl.static_range(1, TILES):
        total += vs[i]
      mu = tl.sum(total, 1) / n_cols
    ds = ()
    squares = tl.zeros([TILE_M, TILE_N], tl.float32)
    for i in tl.static_range(TILES):
      d = vs[i]
      if flags & LAYER:
        inside = inside_r[:, None] & (tile + i * TILE_N < cols)[None, :]
        d = tl.where(inside, d - mu[:, None], 0.0)
      squares += d * d
      ds += (d,)
    inv = 1.0 / tl.sqrt_rn(tl.sum(squares, 1) / n_cols + epsilon)
    ns = ()
    m = tl.zeros([TILE_M, TILE_N], tl.int32)
    for i in tl.static_range(TILES):
      c = tile + i * TILE_N
      if F32_WEIGHTS & FLAGS:
        w = weight(gamma, gamma_f32, c, c < cols, flags)
      else:
        w = of_weight(ws[i].to(tl.float32), flags)
      n = _result(ds[i], inv, w, beta, beta_f32, x_scale, c, c < cols, flags,
                  DTYPE)
      m = tl.maximum(m, magnitude(n))
      ns += (n,)
    if kind != E2M1:
      s = scale_of(tl.max(m, 1), kind)
    for i in tl.static_range(TILES):
      write(ns[i], s, q, scale_e8m0, first, cols, i * TILE_N,
            inside_r[:, None], kind, TILE_M, TILE_N, NATIVE, CAST)
  else:
    mu, inv = statistics(x, residual, row, inside_r, cols, epsilon, flags,
                         TILE_M, TILE_N)
    if kind != E2M1:
      amax = tl.zeros([TILE_M], tl.int32)
      for c0 in range(0, cols, TILE_N):
        c = c0 + tile
        inside = inside_r[:, None] & (c < cols)[None, :]
        v = load_sum(x, residual, row + c[None, :], inside, flags)
        w = weight(gamma, gamma_f32, c, c < cols, flags)
        d = tl.where(inside, v - mu[:, None], 0.0)
        n = _result(d, inv, w, beta, beta_f32, x_scale, c, c < cols, flags,
                    DTYPE)
        amax = tl.maximum(amax, largest(n))
      s = scale_of(amax, kind)
    for c0 in range(0, cols, TILE_N):
      c = c0 + tile
      inside = inside_r[:, None] & (c < cols)[None, :]
      at = row + c[None, :]
      v = load_sum(x, residual, at, inside, flags)
      if flags & RESIDUAL:
        tl.store(residual_out + at, v.to(DTYPE), inside)
      w = weight(gamma, gamma_f32, c, c < cols, flags)
      d = tl.where(inside, v - mu[:, None], 0.0)
      n = _result(d, inv, w, beta, beta_f32, x_scale, c, c < cols, flags, DTYPE)
      write(n, s, q, scale_e8m0, first, cols, c0, inside_r[:, None], kind,
            TILE_M, TILE_N, NATIVE, CAST)
  if kind != E2M1:
    tl.store(scale + r, s, inside_r)
