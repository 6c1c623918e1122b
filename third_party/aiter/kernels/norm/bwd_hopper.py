# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm, backward, for Hopper: norm_bwd.py's formulas.

Registers hold no more of a row than the sums of dgamma and dbeta. The row
itself lies in a ring in shared memory, which copies fill a row or more ahead,
and is read from there twice: for the averages, and for dx. Where there is room
for one row only (STAGES = 1), a tile of the next one is copied as soon as this
one's has been read for the last time. Threads copy what they read themselves,
so the ring needs no barriers of its own. Where that is no room for a residual's
gradient, or registers hold no sums of dbeta, two blocks on two multiprocessors
share a row: each has half of every tile, and both averages.

The kernel that adds the parts starts while this one ends, and waits itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents

from third_party.aiter.kernels.norm import rows as norm

LAYER = norm.LAYER
RESIDUAL = norm.RESIDUAL
GEMMA = norm.GEMMA
T5 = norm.T5
HAS_BETA = norm.HAS_BETA
F32_WEIGHTS = norm.F32_WEIGHTS

# Bytes of shared memory that rings and weights may take; sums across warps need
# some as well.
_SHARED = gl.constexpr(226 * 1024)


@gluon.constexpr_function
def columns_layout(tile, warps, blocks):
  """Returns the layout of a tile of columns: neighbours in one thread."""
  return gl.BlockedLayout([tile // (32 * warps * blocks)], [32], [warps], [0],
                          cga_layout=_halves(blocks))


@gluon.constexpr_function
def shared_layout(blocks):
  """Returns the layout of a tile in shared memory: column by column."""
  return gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=_halves(blocks))


@gluon.constexpr_function
def _halves(blocks):
  """Returns how blocks divide a tile: one has all, or two a half each."""
  return [[1]] if blocks == 2 else []


@gluon.constexpr_function
def ring_fits(tensors, stages, cols, dtype, weight):
  """Returns whether so many tensors' rings and the weights fit in a block."""
  bits = (tensors * stages * dtype.primitive_bitwidth
          + weight.primitive_bitwidth)
  return bits // 8 * cols <= _SHARED.value


@gluon.jit
def _add(a, b):
  return a + b


@gluon.jit
def _add_pairs(a0, a1, b0, b1):
  return a0 + b0, a1 + b1


@gluon.jit
def _both_sums(a, b):
  """The sums of a and of b; of two blocks in one exchange."""
  if gl.num_ctas() == 1:
    sum_a, sum_b = gl.reduce((a, b), 0, _add_pairs)
  else:
    sum_a, sum_b = gl.split(gl.reduce(gl.join(a, b), 0, _add))
  return sum_a, sum_b


@gluon.jit
def allocate(DTYPE: gl.constexpr, STAGES: gl.constexpr, TILE: gl.constexpr,
              TILES: gl.constexpr):
  """Returns a ring of rows: for each tile of columns a buffer a stage."""
  SHARED: gl.constexpr = shared_layout(gl.num_ctas())
  ring = ()
  for _ in gl.static_range(TILES):
    ring += (gl.allocate_shared_memory(DTYPE, [STAGES, TILE], SHARED),)
  return ring


@gluon.jit
def _copy_tile(ring, stage, t, row, wanted, cols, c, i: gl.constexpr,
               TILE: gl.constexpr):
  """Begins the copy of a tile of a row of t; what is not wanted becomes 0."""
  at = c + i * TILE
  async_copy.async_load(ring[i].index(stage), t + row.to(gl.int64) * cols + at,
                        mask=(at < cols) & wanted)


@gluon.jit
def _copy(ring, stage, t, row, wanted, cols, c, TILE: gl.constexpr):
  """Begins the copy of a row of t; what is not wanted becomes 0."""
  for i in gl.static_range(len(ring)):
    _copy_tile(ring, stage, t, row, wanted, cols, c, i, TILE)


@gluon.jit
def _load(buffer, LAYOUT: gl.constexpr):
  return buffer.load(LAYOUT).to(gl.float32)


@gluon.jit
def _normalised(buffer, mu, inv, LAYOUT: gl.constexpr):
  v = _load(buffer, LAYOUT)
  if buffer.dtype.primitive_bitwidth == 32:
    n = (v - mu) * inv
  else:
    # One instruction; numbers of 16 bits have no digits to lose.
    n = v * inv + -mu * inv
  return n


@gluon.jit
def norm_bwd_dx(x, gamma, gamma_f32, dy, dresidual, mean, rstd, dx,
                dgamma_parts, dbeta_parts, rows, cols, rows_per_part, flags,
                TILE_N: gl.constexpr, COLS: gl.constexpr,
                STAGES: gl.constexpr, FLAGS: gl.constexpr):
  """dx and one part of dgamma and dbeta, as norm_bwd.norm_bwd_dx has them.

  The columns are a number of tiles of TILE_N, at most COLS; FLAGS are those
  that may be set, and what they leave out costs nothing.
  """
  gdc_launch_dependents()
  flags &= FLAGS
  DTYPE: gl.constexpr = x.dtype.element_ty
  # 1 + gamma has more digits than gamma's type.
  WEIGHT: gl.constexpr = (
      gl.float32 if FLAGS & (F32_WEIGHTS | GEMMA) else DTYPE)
  LAYOUT: gl.constexpr = columns_layout(TILE_N, gl.num_warps(), gl.num_ctas())
  TILES: gl.constexpr = COLS // TILE_N
  REFILL: gl.constexpr = STAGES == 1
  COPY_RESIDUAL: gl.constexpr = FLAGS & RESIDUAL and ring_fits(
      3, STAGES, COLS // gl.num_ctas(), DTYPE, WEIGHT)
  ring_x = allocate(DTYPE, STAGES, TILE_N, TILES)
  ring_dy = allocate(DTYPE, STAGES, TILE_N, TILES)
  if COPY_RESIDUAL:
    ring_dr = allocate(DTYPE, STAGES, TILE_N, TILES)
  weights = allocate(WEIGHT, 1, TILE_N, TILES)
  c = gl.arange(0, TILE_N, LAYOUT)
  for i in gl.static_range(TILES):
    at = c + i * TILE_N
    if flags & F32_WEIGHTS:
      w = gl.load(gamma_f32 + at, at < cols, 0.0)
    else:
      w = gl.load(gamma + at, at < cols, 0.0).to(gl.float32)
    if flags & GEMMA:
      w += 1.0
    weights[i].index(0).store(w.to(WEIGHT))

  n_cols = cols.to(gl.float32)
  # Branches within the loop would keep the compiler from ordering it.
  per_mean = gl.where((flags & LAYER) != 0, 1.0, 0.0) / n_cols
  has_residual = (flags & RESIDUAL) != 0
  t5 = (flags & T5) != 0
  has_beta = (flags & HAS_BETA) != 0
  part = gl.program_id(0)
  begin = part * rows_per_part
  end = gl.minimum(rows, begin + rows_per_part)
  if REFILL:
    for i in gl.static_range(TILES):
      _copy_tile(ring_x, 0, x, begin, begin < end, cols, c, i, TILE_N)
      _copy_tile(ring_dy, 0, dy, begin, begin < end, cols, c, i, TILE_N)
      if COPY_RESIDUAL:
        _copy_tile(ring_dr, 0, dresidual, begin, has_residual & (begin < end),
                   cols, c, i, TILE_N)
      async_copy.commit_group()
  for i in gl.static_range(STAGES - 1):
    r = begin + i
    _copy(ring_x, i, x, r, r < end, cols, c, TILE_N)
    _copy(ring_dy, i, dy, r, r < end, cols, c, TILE_N)
    if COPY_RESIDUAL:
      _copy(ring_dr, i, dresidual, r, has_residual & (r < end), cols, c, TILE_N)
    async_copy.commit_group()
  dgamma = ()
  dbeta = ()
  for _ in gl.static_range(TILES):
    dgamma += (gl.zeros([TILE_N], gl.float32, LAYOUT),)
    if FLAGS & HAS_BETA:
      dbeta += (gl.zeros([TILE_N], gl.float32, LAYOUT),)
  inv = gl.load(rstd + begin, begin < end, 0.0)
  mu = gl.load(mean + begin, begin < end, 0.0)

  for r in range(begin, end):
    if not REFILL:
      ahead = r + STAGES - 1
      stage = (ahead - begin) % STAGES
      more = ahead < end
      _copy(ring_x, stage, x, ahead, more, cols, c, TILE_N)
      _copy(ring_dy, stage, dy, ahead, more, cols, c, TILE_N)
      if COPY_RESIDUAL:
        _copy(ring_dr, stage, dresidual, ahead, has_residual & more, cols, c,
              TILE_N)
      async_copy.commit_group()
    inv_next = gl.load(rstd + r + 1, r + 1 < end, 0.0)
    mu_next = gl.load(mean + r + 1, r + 1 < end, 0.0)
    base = r.to(gl.int64) * cols
    dr = ()
    if FLAGS & RESIDUAL and not COPY_RESIDUAL and not REFILL:
      for i in gl.static_range(TILES):
        at = c + i * TILE_N
        dr += (gl.load(dresidual + base + at, (at < cols) & has_residual,
                       0.0),)
    if not REFILL:
      async_copy.wait_group(STAGES - 1)
    stage = (r - begin) % STAGES

    sum_ng = gl.zeros([TILE_N], gl.float32, LAYOUT)
    sum_g = gl.zeros([TILE_N], gl.float32, LAYOUT)
    for i in gl.static_range(TILES):
      if REFILL:
        async_copy.wait_group(TILES - 1 - i)
      n = _normalised(ring_x[i].index(stage), mu, inv, LAYOUT)
      g = (_load(ring_dy[i].index(stage), LAYOUT)
           * _load(weights[i].index(0), LAYOUT))
      sum_ng += n * g
      if FLAGS & LAYER:
        sum_g += g
    if FLAGS & LAYER:
      avg_ng, avg_g = _both_sums(sum_ng, sum_g)
      avg_g *= inv * per_mean
    else:
      avg_ng = gl.sum(sum_ng, 0)
      avg_g = 0.0
    avg_ng *= inv / n_cols
    # Nothing read above is kept in registers beyond this.
    gl.barrier()

    dgamma_here = ()
    dbeta_here = ()
    for i in gl.static_range(TILES):
      at = c + i * TILE_N
      dout = _load(ring_dy[i].index(stage), LAYOUT)
      n = _normalised(ring_x[i].index(stage), mu, inv, LAYOUT)
      if COPY_RESIDUAL:
        added = _load(ring_dr[i].index(stage), LAYOUT)
      if REFILL:
        more = r + 1 < end
        _copy_tile(ring_x, 0, x, r + 1, more, cols, c, i, TILE_N)
        _copy_tile(ring_dy, 0, dy, r + 1, more, cols, c, i, TILE_N)
        if COPY_RESIDUAL:
          _copy_tile(ring_dr, 0, dresidual, r + 1, has_residual & more, cols, c,
                     i, TILE_N)
        async_copy.commit_group()
      d = (dout * _load(weights[i].index(0), LAYOUT) * inv - avg_g
           - n * avg_ng)
      if FLAGS & RESIDUAL:
        if COPY_RESIDUAL:
          d += added
        elif REFILL:
          d += gl.load(dresidual + base + at, (at < cols) & has_residual,
                       0.0).to(gl.float32)
        else:
          d += dr[i].to(gl.float32)
      gl.store(dx + base + at, d.to(DTYPE), at < cols)
      if FLAGS & T5:
        n = gl.where(t5, n.to(DTYPE).to(gl.float32), n)
      dgamma_here += (dgamma[i] + dout * n,)
      if FLAGS & HAS_BETA:
        dbeta_here += (dbeta[i] + dout,)
    dgamma = dgamma_here
    if FLAGS & HAS_BETA:
      dbeta = dbeta_here
    inv = inv_next
    mu = mu_next

  for i in gl.static_range(TILES):
    at = c + i * TILE_N
    out = part.to(gl.int64) * cols + at
    gl.store(dgamma_parts + out, dgamma[i], at < cols)
    if FLAGS & HAS_BETA:
      gl.store(dbeta_parts + out, dbeta[i], (at < cols) & has_beta)
