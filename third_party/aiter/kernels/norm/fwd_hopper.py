# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm, forward, for Hopper: norm.fwd's formulas.

A block walks over rows. The one it works on lies in registers; the next one, or
STAGES of them, are on their way into shared memory, tile by tile as soon as a
tile's place is free.
So memory is busy while a row's sums cross the warps. Threads copy what they
read themselves: the copies need no barriers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from third_party.aiter.kernels.norm import bwd_hopper
from third_party.aiter.kernels.norm import rows as norm

LAYER = norm.LAYER
RESIDUAL = norm.RESIDUAL
GEMMA = norm.GEMMA
HAS_BETA = norm.HAS_BETA
F32_WEIGHTS = norm.F32_WEIGHTS

allocate = bwd_hopper.allocate
columns_layout = bwd_hopper.columns_layout


@gluon.jit
def _add3(a0, a1, a2, b0, b1, b2):
  return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def keep(weights, t, t_f32, c, cols, flags, TILE: gl.constexpr):
  """Brings gamma or beta into shared memory."""
  for i in gl.static_range(len(weights)):
    at = c + i * TILE
    if flags & F32_WEIGHTS:
      w = gl.load(t_f32 + at, at < cols, 0.0)
    else:
      w = gl.load(t + at, at < cols, 0.0).to(gl.float32)
    weights[i].index(0).store(w.to(weights[i].dtype))


@gluon.jit
def copy_tile(ring, stage, t, row, wanted, cols, c, i: gl.constexpr,
               TILE: gl.constexpr):
  """Begins the copy of a tile of t's row; what is not wanted becomes 0."""
  async_copy.async_load(ring[i].index(stage), t + c + (row + i * TILE),
                        mask=(c < cols - i * TILE) & wanted)


@gluon.jit
def norm_fwd(x, residual, gamma, gamma_f32, beta, beta_f32, y, residual_out,
             mean, rstd, rows, cols, epsilon, flags, TILE_N: gl.constexpr,
             COLS: gl.constexpr, STAGES: gl.constexpr, FLAGS: gl.constexpr):
  """y, residual_out, mean and rstd, as norm.fwd.norm_fwd has them.

  The columns are a number of tiles of TILE_N, at most COLS; FLAGS are those
  that may be set.
  """
  flags &= FLAGS
  DTYPE: gl.constexpr = x.dtype.element_ty
  WEIGHT: gl.constexpr = gl.float32 if FLAGS & F32_WEIGHTS else DTYPE
  LAYOUT: gl.constexpr = columns_layout(TILE_N, gl.num_warps(), gl.num_ctas())
  TILES: gl.constexpr = COLS // TILE_N
  c = gl.arange(0, TILE_N, LAYOUT)
  ring_x = allocate(DTYPE, STAGES, TILE_N, TILES)
  gammas = allocate(WEIGHT, 1, TILE_N, TILES)
  keep(gammas, gamma, gamma_f32, c, cols, flags, TILE_N)
  if FLAGS & RESIDUAL:
    ring_r = allocate(DTYPE, STAGES, TILE_N, TILES)
  if FLAGS & HAS_BETA:
    betas = allocate(WEIGHT, 1, TILE_N, TILES)
    if flags & HAS_BETA:
      keep(betas, beta, beta_f32, c, cols, flags, TILE_N)
  one = gl.where((flags & GEMMA) != 0, 1.0, 0.0)
  has_residual = (flags & RESIDUAL) != 0
  n_cols = cols.to(gl.float32)
  begin = gl.program_id(0)
  step = gl.num_programs(0)
  for k in gl.static_range(STAGES):
    first = begin + k * step
    for i in gl.static_range(TILES):
      at = first.to(gl.int64) * cols
      copy_tile(ring_x, k, x, at, first < rows, cols, c, i, TILE_N)
      if FLAGS & RESIDUAL:
        copy_tile(ring_r, k, residual, at, has_residual & (first < rows), cols,
                   c, i, TILE_N)
      async_copy.commit_group()

  for r in range(begin, rows, step):
    base = r.to(gl.int64) * cols
    stage = (r - begin) // step % STAGES
    ahead = (r + STAGES * step).to(gl.int64) * cols
    more = r + STAGES * step < rows
    s = ()
    total = gl.zeros([TILE_N], gl.float32, LAYOUT)
    for i in gl.static_range(TILES):
      async_copy.wait_group(STAGES * TILES - 1)
      v = ring_x[i].index(stage).load(LAYOUT).to(gl.float32)
      if FLAGS & RESIDUAL:
        v += ring_r[i].index(stage).load(LAYOUT).to(gl.float32)
      copy_tile(ring_x, stage, x, ahead, more, cols, c, i, TILE_N)
      if FLAGS & RESIDUAL:
        copy_tile(ring_r, stage, residual, ahead, has_residual & more, cols, c,
                   i, TILE_N)
      async_copy.commit_group()
      total += v
      s += (v,)
    mu = gl.to_tensor(0.0)
    if flags & LAYER:
      mu = gl.sum(total, 0) / n_cols
    squares = gl.zeros([TILE_N], gl.float32, LAYOUT)
    drift = gl.zeros([TILE_N], gl.float32, LAYOUT)
    rounded = gl.zeros([TILE_N], gl.float32, LAYOUT)
    for i in gl.static_range(TILES):
      inside = c < cols - i * TILE_N
      d = gl.where(inside, s[i] - mu, 0.0)
      squares += d * d
      if FLAGS & RESIDUAL:
        t = s[i].to(DTYPE)
        gl.store(residual_out + c + (base + i * TILE_N), t,
                 inside & has_residual)
        d = gl.where(inside, t.to(gl.float32) - mu, 0.0)
        drift += d
        rounded += d * d
    if flags & RESIDUAL:
      var, off, var_rounded = gl.reduce((squares, drift, rounded), 0, _add3)
    else:
      var = gl.sum(squares, 0)
      off = 0.0
      var_rounded = var
    inv = 1.0 / gl.sqrt_rn(var / n_cols + epsilon)
    shift = -mu * inv
    for i in gl.static_range(TILES):
      inside = c < cols - i * TILE_N
      # One instruction; sums of 16 bits lose no digits that y has.
      n = s[i] * inv + shift
      n *= gammas[i].index(0).load(LAYOUT).to(gl.float32) + one
      if FLAGS & HAS_BETA:
        if flags & HAS_BETA:
          n += betas[i].index(0).load(LAYOUT).to(gl.float32)
      gl.store(y + c + (base + i * TILE_N), n.to(DTYPE), inside)
    if flags & RESIDUAL:
      off = gl.where((flags & LAYER) != 0, off / n_cols, 0.0)
      var = var_rounded / n_cols - off * off
      inv = 1.0 / gl.sqrt_rn(gl.where(var < 0.0, 0.0, var) + epsilon)
      mu += off
    gl.store(mean + r, mu)
    gl.store(rstd + r, inv)
