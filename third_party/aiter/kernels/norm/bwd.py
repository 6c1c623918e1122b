# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm, backward: dx, and dgamma and dbeta in parts.

With n = (x - mean) * rstd and g = dy * weight,
  dx = rstd * (g - n * avg(n * g) - avg(g)) + dresidual,
  dgamma = sum over rows of dy * n,   dbeta = sum over rows of dy,
where avg is over the columns, and its second use LayerNorm's alone.

A block owns the rows of one part, in order, and adds up dgamma and dbeta for
them; another kernel adds the parts in order. So every bit is the same in each
run. Where the columns do not fit registers (COLS = 0), dx passes over a row
twice in tiles of TILE_N, and norm_bwd_parts reads the rows again by columns.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from third_party.aiter.kernels.norm import rows as norm

LAYER = norm.LAYER
RESIDUAL = norm.RESIDUAL
T5 = norm.T5
HAS_BETA = norm.HAS_BETA
F32_WEIGHTS = norm.F32_WEIGHTS
weight = norm.weight


@triton.jit
def _normalised(x, at, inside, mean, rstd, flags):
  """n, and what the weight was multiplied with: n as T5 rounds it."""
  n = (tl.load(x + at, inside, 0.0).to(tl.float32) - mean) * rstd
  n = tl.where(inside, n, 0.0)
  rounded = n
  if flags & T5:
    rounded = n.to(x.dtype.element_ty).to(tl.float32)
  return n, rounded


@triton.jit
def _write_dx(n, g, avg_ng, avg_g, rstd, dresidual, dx, at, inside, flags):
  d = (g - n * avg_ng[:, None] - avg_g[:, None]) * rstd
  if flags & RESIDUAL:
    d += tl.load(dresidual + at, inside, 0.0).to(tl.float32)
  tl.store(dx + at, d.to(dx.dtype.element_ty), inside)


@triton.jit
def norm_bwd_dx(x, gamma, gamma_f32, dy, dresidual, mean, rstd, dx,
                dgamma_parts, dbeta_parts, rows, cols, rows_per_part, flags,
                TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                COLS: tl.constexpr, STAGES: tl.constexpr,
                OVERLAPS: tl.constexpr):
  """dx, and with COLS one part of dgamma and dbeta.

  x (the sum, if there was a residual), dy, dresidual, dx: [rows, cols]; mean,
  rstd: float32 [rows]; dgamma_parts, dbeta_parts: float32 [parts, cols].
  OVERLAPS: norm_bwd_dgamma may start before this one ends, and waits itself.
  """
  if OVERLAPS:
    gdc_launch_dependents()
  part = tl.program_id(0)
  begin = part * rows_per_part
  end = tl.minimum(rows, begin + rows_per_part)
  n_cols = cols.to(tl.float32)
  if COLS:
    c = tl.arange(0, COLS)
    inside_c = c < cols
    w = weight(gamma, gamma_f32, c, inside_c, flags)
    dgamma = tl.zeros([COLS], tl.float32)
    dbeta = tl.zeros([COLS], tl.float32)
    for r0 in tl.range(begin, end, TILE_M, num_stages=STAGES):
      r = r0 + tl.arange(0, TILE_M)
      at = r.to(tl.int64)[:, None] * cols + c[None, :]
      inside = (r < end)[:, None] & inside_c[None, :]
      inv = tl.load(rstd + r, r < end, 0.0)[:, None]
      mu = tl.load(mean + r, r < end, 0.0)[:, None]
      dout = tl.load(dy + at, inside, 0.0).to(tl.float32)
      n, rounded = _normalised(x, at, inside, mu, inv, flags)
      g = dout * w[None, :]
      avg_ng = tl.sum(n * g, 1) / n_cols
      avg_g = tl.zeros([TILE_M], tl.float32)
      if flags & LAYER:
        avg_g = tl.sum(g, 1) / n_cols
      _write_dx(n, g, avg_ng, avg_g, inv, dresidual, dx, at, inside, flags)
      dgamma += tl.sum(dout * rounded, 0)
      if flags & HAS_BETA:
        dbeta += tl.sum(dout, 0)
    out = part.to(tl.int64) * cols + c
    tl.store(dgamma_parts + out, dgamma, inside_c)
    if flags & HAS_BETA:
      tl.store(dbeta_parts + out, dbeta, inside_c)
  else:
    for r0 in range(begin, end, TILE_M):
      r = r0 + tl.arange(0, TILE_M)
      row = r.to(tl.int64)[:, None] * cols
      inv = tl.load(rstd + r, r < end, 0.0)[:, None]
      mu = tl.load(mean + r, r < end, 0.0)[:, None]
      avg_ng = tl.zeros([TILE_M], tl.float32)
      avg_g = tl.zeros([TILE_M], tl.float32)
      for c0 in range(0, cols, TILE_N):
        c = c0 + tl.arange(0, TILE_N)
        inside = (r < end)[:, None] & (c < cols)[None, :]
        at = row + c[None, :]
        n, _ = _normalised(x, at, inside, mu, inv, flags)
        g = (tl.load(dy + at, inside, 0.0).to(tl.float32)
             * weight(gamma, gamma_f32, c, c < cols, flags)[None, :])
        avg_ng += tl.sum(n * g, 1)
        if flags & LAYER:
          avg_g += tl.sum(g, 1)
      avg_ng /= n_cols
      avg_g /= n_cols
      for c0 in range(0, cols, TILE_N):
        c = c0 + tl.arange(0, TILE_N)
        inside = (r < end)[:, None] & (c < cols)[None, :]
        at = row + c[None, :]
        n, _ = _normalised(x, at, inside, mu, inv, flags)
        g = (tl.load(dy + at, inside, 0.0).to(tl.float32)
             * weight(gamma, gamma_f32, c, c < cols, flags)[None, :])
        _write_dx(n, g, avg_ng, avg_g, inv, dresidual, dx, at, inside, flags)


@triton.jit
def norm_bwd_parts(x, dy, mean, rstd, dgamma_parts, dbeta_parts, rows, cols,
                   rows_per_part, flags, TILE_M: tl.constexpr,
                   TILE_N: tl.constexpr):
  """One part of dgamma and dbeta for a tile of columns."""
  c = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
  part = tl.program_id(1)
  begin = part * rows_per_part
  end = tl.minimum(rows, begin + rows_per_part)
  dgamma = tl.zeros([TILE_M, TILE_N], tl.float32)
  dbeta = tl.zeros([TILE_M, TILE_N], tl.float32)
  for r0 in range(begin, end, TILE_M):
    r = r0 + tl.arange(0, TILE_M)
    at = r.to(tl.int64)[:, None] * cols + c[None, :]
    inside = (r < end)[:, None] & (c < cols)[None, :]
    inv = tl.load(rstd + r, r < end, 0.0)[:, None]
    mu = tl.load(mean + r, r < end, 0.0)[:, None]
    _, n = _normalised(x, at, inside, mu, inv, flags)
    dout = tl.load(dy + at, inside, 0.0).to(tl.float32)
    dgamma += dout * n
    dbeta += dout
  out = part.to(tl.int64) * cols + c
  tl.store(dgamma_parts + out, tl.sum(dgamma, 0), c < cols)
  if flags & HAS_BETA:
    tl.store(dbeta_parts + out, tl.sum(dbeta, 0), c < cols)


@triton.jit
def _add_parts(sums, out, out_f32, parts, cols, flags, TILE_M: tl.constexpr,
               TILE_N: tl.constexpr):
  """Adds a tile's columns of all parts, TILE_M parts at a time."""
  c = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
  total = tl.zeros([TILE_M, TILE_N], tl.float32)
  for p0 in range(0, parts, TILE_M):
    p = p0 + tl.arange(0, TILE_M)
    inside = (p < parts)[:, None] & (c < cols)[None, :]
    at = p.to(tl.int64)[:, None] * cols + c[None, :]
    total += tl.load(sums + at, inside, 0.0)
  t = tl.sum(total, 0)
  if flags & F32_WEIGHTS:
    tl.store(out_f32 + c, t, c < cols)
  else:
    tl.store(out + c, t.to(out.dtype.element_ty), c < cols)


@triton.jit
def norm_bwd_dgamma(dgamma_parts, dbeta_parts, dgamma, dgamma_f32, dbeta,
                    dbeta_f32, parts, cols, flags, TILE_M: tl.constexpr,
                    TILE_N: tl.constexpr, OVERLAPS: tl.constexpr):
  """Adds the parts of dgamma and, in programs of their own, of dbeta.

  dgamma, dbeta: [cols], of x's type or, with F32_WEIGHTS, float32, by either of
  two pointers.
  OVERLAPS: starts while norm_bwd_dx ends, and waits for that.
  """
  if OVERLAPS:
    gdc_wait()
  if tl.program_id(1) == 0:
    _add_parts(dgamma_parts, dgamma, dgamma_f32, parts, cols, flags, TILE_M,
               TILE_N)
  else:
    _add_parts(dbeta_parts, dbeta, dbeta_f32, parts, cols, flags, TILE_M,
               TILE_N)
