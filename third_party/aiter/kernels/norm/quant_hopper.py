# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm with a result of 8 bits, for Hopper: norm.quant's.

A block walks over rows, as one of fwd_hopper.py does: the next rows are on
their way into shared memory while this one's three sums and maxima cross the
warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from third_party.aiter.kernels.core import rounding
from third_party.aiter.kernels.norm import bwd_hopper, fwd_hopper
from third_party.aiter.kernels.norm import rows as norm
from third_party.aiter.kernels.quant import quant as quantisers

LAYER = norm.LAYER
RESIDUAL = norm.RESIDUAL
GEMMA = norm.GEMMA
HAS_BETA = norm.HAS_BETA
F32_WEIGHTS = norm.F32_WEIGHTS
AMAX_FLOOR = rounding.AMAX_FLOOR
codes_of = quantisers.codes

allocate = bwd_hopper.allocate
columns_layout = bwd_hopper.columns_layout
copy_tile = fwd_hopper.copy_tile
keep = fwd_hopper.keep
largest = rounding.largest
magnitude = rounding.magnitude


@gluon.jit
def _divide(n, inverse, scale):
  """rounding.divide, with a number's scale and its inverse at hand."""
  x = n * inverse
  x = gl.fma(gl.fma(x, scale, n * -1.0), inverse * -1.0, x)
  return gl.fma(gl.fma(x, scale, n * -1.0), inverse * -1.0, x)


@gluon.jit
def norm_quant(x, residual, gamma, gamma_f32, beta, beta_f32, q, scale,
               residual_out, rows, cols, epsilon, kind, flags,
               TILE_N: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr,
               FLAGS: gl.constexpr, NATIVE: gl.constexpr,
               CAST: gl.constexpr):
  """q, scale and residual_out, as norm.quant.norm_quant has them.

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
  if FLAGS & RESIDUAL:
    ring_r = allocate(DTYPE, STAGES, TILE_N, TILES)
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
  gammas = allocate(WEIGHT, 1, TILE_N, TILES)
  keep(gammas, gamma, gamma_f32, c, cols, flags, TILE_N)
  if FLAGS & HAS_BETA:
    betas = allocate(WEIGHT, 1, TILE_N, TILES)
    if flags & HAS_BETA:
      keep(betas, beta, beta_f32, c, cols, flags, TILE_N)

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
      if FLAGS & RESIDUAL:
        gl.store(residual_out + c + (base + i * TILE_N), v.to(DTYPE),
                 (c < cols - i * TILE_N) & has_residual)
      if FLAGS & LAYER:
        total += v
      s += (v,)
    mu = gl.to_tensor(0.0)
    if flags & LAYER:
      mu = gl.sum(total, 0) / n_cols
    squares = gl.zeros([TILE_N], gl.float32, LAYOUT)
    ds = ()
    for i in gl.static_range(TILES):
      d = s[i]
      if FLAGS & LAYER:
        d = gl.where(c < cols - i * TILE_N, d - mu, 0.0)
      squares += d * d
      ds += (d,)
    inv = 1.0 / gl.sqrt_rn(gl.sum(squares, 0) / n_cols + epsilon)
    m = gl.zeros([TILE_N], gl.int32, LAYOUT)
    ns = ()
    for i in gl.static_range(TILES):
      n = ds[i] * inv
      w = gammas[i].index(0).load(LAYOUT).to(gl.float32)
      if FLAGS & GEMMA:
        w += one
      n *= w
      if FLAGS & HAS_BETA:
        if flags & HAS_BETA:
          n += betas[i].index(0).load(LAYOUT).to(gl.float32)
      m = gl.maximum(m, magnitude(n))
      ns += (n,)
    amax = gl.max(m, 0).to(gl.float32, bitcast=True)
    by = gl.div_rn(gl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax), largest(kind))
    gl.store(scale + r, by)
    zeros = gl.zeros([TILE_N], gl.float32, LAYOUT)
    inverse = zeros + gl.div_rn(gl.to_tensor(1.0), by)
    # Of infinity too a quotient by it is 0, and NaN of infinity.
    by = zeros + gl.where(by == float("inf"), 0.0, by)
    for i in gl.static_range(TILES):
      codes = codes_of(_divide(ns[i], inverse, by), kind, NATIVE, CAST)
      gl.store(q + c + (base + i * TILE_N), codes, c < cols - i * TILE_N)
