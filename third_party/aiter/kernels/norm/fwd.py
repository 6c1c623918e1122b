# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm, forward, with the residual's addition in front.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467);
Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450).

A block owns TILE_M rows of up to COLS columns, in tiles of TILE_N. They lie in
registers, so that every element is read once; or, with RELOAD, each pass (mean,
variance, result) loads them, the later ones out of the nearest cache. The few
registers of that let more blocks run at once, which hides the first pass's
latency better. Rows of any length (COLS = 0) pass in a loop.

With a residual, `mean` and `rstd` are of the sum as backward will read it, so
rounded; y is of the sum itself.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.norm import rows as norm

LAYER = norm.LAYER
RESIDUAL = norm.RESIDUAL
load_sum = norm.load_sum
normalised = norm.normalised
statistics = norm.statistics


@triton.jit
def _add(a0, a1, a2, b0, b1, b2):
  return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _rounded(s, mu, residual_out, at, inside):
  """Writes the rounded sum, and returns it less the mean."""
  t = s.to(residual_out.dtype.element_ty)
  tl.store(residual_out + at, t, inside)
  return tl.where(inside, t.to(tl.float32) - mu[:, None], 0.0)


@triton.jit
def norm_fwd(x, residual, gamma, gamma_f32, beta, beta_f32, y, residual_out,
             mean, rstd, rows, cols, epsilon, flags, TILE_M: tl.constexpr,
             TILE_N: tl.constexpr, COLS: tl.constexpr, RELOAD: tl.constexpr,
             FLAGS: tl.constexpr):
  """y = (s - mean) * rstd * gamma + beta, where s is x or x + residual.

  x, residual, y, residual_out: [rows, cols], contiguous. gamma, beta: [cols],
  of x's type or float32, by either of two pointers.
  mean, rstd: float32 [rows]; RMSNorm has mean 0, and its rstd is
  1 / sqrt(mean of squares + epsilon). FLAGS: those that may be set.
  """
  flags &= FLAGS
  DTYPE: tl.constexpr = y.dtype.element_ty
  r = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  inside_r = r < rows
  row = r.to(tl.int64)[:, None] * cols
  tile = tl.arange(0, TILE_N)
  n_cols = cols.to(tl.float32)
  # Of the rounded sum less the mean: sums, and sums of squares.
  drift = tl.zeros([TILE_M, TILE_N], tl.float32)
  squares = tl.zeros([TILE_M, TILE_N], tl.float32)
  if COLS:
    TILES: tl.constexpr = COLS // TILE_N
    s = ()
    for i in tl.static_range(TILES):
      c = tile + i * TILE_N
      s += (load_sum(x, residual, row + c[None, :],
                     inside_r[:, None] & (c < cols)[None, :], flags,
                     "evict_last" if RELOAD else ""),)
    mu = tl.zeros([TILE_M], tl.float32)
    if flags & LAYER:
      sums = s[0]
      for i in tl.static_range(1, TILES):
        sums += s[i]
      mu = tl.sum(sums, 1) / n_cols
    variance = tl.zeros([TILE_M, TILE_N], tl.float32)
    for i in tl.static_range(TILES):
      c = tile + i * TILE_N
      at = row + c[None, :]
      inside = inside_r[:, None] & (c < cols)[None, :]
      if RELOAD:
        v = load_sum(x, residual, at, inside, flags, "evict_normal")
      else:
        v = s[i]
      d = tl.where(inside, v - mu[:, None], 0.0)
      variance += d * d
      if flags & RESIDUAL:
        d = _rounded(v, mu, residual_out, at, inside)
        drift += d
        squares += d * d
    if flags & RESIDUAL:
      total, off, var_rounded = tl.reduce((variance, drift, squares), 1, _add)
    else:
      total = tl.sum(variance, 1)
      off = mu
      var_rounded = total
    inv = 1.0 / tl.sqrt_rn(total / n_cols + epsilon)
    for i in tl.static_range(TILES):
      c = tile + i * TILE_N
      inside_c = c < cols
      inside = inside_r[:, None] & inside_c[None, :]
      at = row + c[None, :]
      if RELOAD:
        v = load_sum(x, residual, at, inside, flags, "evict_first")
      else:
        v = s[i]
      n = normalised(v, mu, inv, gamma, gamma_f32, beta, beta_f32, c, inside_c,
                     flags, DTYPE)
      tl.store(y + at, n.to(DTYPE), inside)
  else:
    mu, inv = statistics(x, residual, row, inside_r, cols, epsilon, flags,
                         TILE_M, TILE_N)
    for c0 in range(0, cols, TILE_N):
      c = c0 + tile
      inside_c = c < cols
      inside = inside_r[:, None] & inside_c[None, :]
      at = row + c[None, :]
      v = load_sum(x, residual, at, inside, flags)
      n = normalised(v, mu, inv, gamma, gamma_f32, beta, beta_f32, c, inside_c,
                     flags, DTYPE)
      tl.store(y + at, n.to(DTYPE), inside)
      if flags & RESIDUAL:
        d = _rounded(v, mu, residual_out, at, inside)
        drift += d
        squares += d * d
    off = tl.sum(drift, 1)
    var_rounded = tl.sum(squares, 1)
  if flags & RESIDUAL:
    off = tl.where((flags & LAYER) != 0, off / n_cols, 0.0)
    var = var_rounded / n_cols - off * off
    inv = 1.0 / tl.sqrt_rn(tl.where(var < 0.0, 0.0, var) + epsilon)
    mu += off
  tl.store(mean + r, mu, inside_r)
  tl.store(rstd + r, inv, inside_r)
