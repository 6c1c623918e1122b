# SPDX-License-Identifier: Apache-2.0
"""The norms of rows that do not begin at multiples of 16 bytes.

A row begins as far behind such a multiple as the eighth row after it. So a
program takes rows whose distances are multiples of eight: a column has the same
place in all of them, and what belongs to columns is read once. Chunks of eight
places are moved whole where they are one row's; the two that it shares with
others, its edges, are a tile of their own, moved element by element. The next
rows are on their way while these are computed.

What is computed is what fwd.py, quant.py and bwd.py say.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from third_party.aiter.kernels.norm import quant
from third_party.aiter.kernels.norm import rows as norm

HAS_BETA = norm.HAS_BETA
LAYER = norm.LAYER
RESIDUAL = norm.RESIDUAL
T5 = norm.T5
X_SCALE = norm.X_SCALE
divide = quant.divide
largest = quant.largest
load_columns = norm.load_columns
magnitude = quant.magnitude
scale_of = quant.scale_of
to_bits = quant.to_bits
weight = norm.weight


@triton.jit
def _places(cols, TILE_N: tl.constexpr, COLS: tl.constexpr):
  """What lies where in this program's rows: tiles of whole chunks, and edges.

  Returns:
    Of each tile places behind the multiple of eight elements before a row,
    their columns, and which of them are the tile's.
  """
  shift = (tl.program_id(0) % 8) * cols % 8
  begin = tl.multiple_of((shift + 7) // 8 * 8, 8)
  end = tl.multiple_of((shift + cols) // 8 * 8, 8)
  places = ()
  for i in tl.static_range((COLS + 6 + TILE_N) // TILE_N):
    p = tl.arange(0, TILE_N) + i * TILE_N
    places += ((p, p - shift, (p >= begin) & (p < end)),)
  e = tl.arange(0, 16)
  # A row within one chunk is its first edge.
  last = tl.maximum(end, begin)
  p = tl.where(e < 8, e, e - 8 + last)
  inside = (p >= shift) & (p < shift + cols) & ((e >= 8) | (e < begin))
  return places + ((p, p - shift, inside),)


@triton.jit
def _rows(k, rows, cols, TILE_M: tl.constexpr):
  """Rows of the k-th tile of this program, which are there, their places 0."""
  first = tl.program_id(0) % 8
  j = k * TILE_M + tl.arange(0, TILE_M)
  r = first + 8 * j.to(tl.int64)
  base = tl.multiple_of(r * cols - first * cols % 8, 8)
  return r, r < rows, base


@triton.jit
def _load(t, base, inside_r, places):
  """The tiles of rows of t; 0 outside."""
  tiles = ()
  for i in tl.static_range(len(places)):
    p, _, inside = places[i]
    tiles += (tl.load(t + (base[:, None] + p[None, :]),
                      inside_r[:, None] & inside[None, :], 0.0),)
  return tiles


@triton.jit
def _store(t, v, base, inside_r, places):
  p, _, inside = places
  tl.store(t + (base[:, None] + p[None, :]), v,
           inside_r[:, None] & inside[None, :])


@triton.jit
def _load_summands(x, residual, k, rows, cols, places, flags,
                   TILE_M: tl.constexpr, FLAGS: tl.constexpr):
  """The k-th tile of rows of x and of the residual, of which there may be."""
  _, inside_r, base = _rows(k, rows, cols, TILE_M)
  xs = _load(x, base, inside_r, places)
  rs = ()
  if RESIDUAL & FLAGS:
    rs = _load(residual, base, inside_r & ((flags & RESIDUAL) != 0), places)
  return xs, rs


@triton.jit
def _added(xs, rs, flags, FLAGS: tl.constexpr):
  """As rows.load_sum, of what is here."""
  vs = ()
  for i in tl.static_range(len(xs)):
    v = xs[i].to(tl.float32)
    if RESIDUAL & FLAGS:
      v += rs[i].to(tl.float32)
      if T5 & FLAGS:
        rounded = v.to(xs[i].dtype).to(tl.float32)
        both = (flags & (RESIDUAL | T5)) == (RESIDUAL | T5)
        v = tl.where(both, rounded, v)
    vs += (v,)
  return vs


@triton.jit
def _sum(tiles):
  """Sums of rows: of like tiles, and of the edges behind them."""
  total = tiles[0]
  for i in tl.static_range(1, len(tiles) - 1):
    total += tiles[i]
  return tl.sum(total, 1) + tl.sum(tiles[len(tiles) - 1], 1)


@triton.jit
def _weights(gamma, gamma_f32, places, flags):
  ws = ()
  for i in tl.static_range(len(places)):
    _, c, inside = places[i]
    ws += (weight(gamma, gamma_f32, c, inside, flags)[None, :],)
  return ws


@triton.jit
def _addends(beta, beta_f32, places, flags):
  """What is added to each column: beta, or 0."""
  has_beta = (flags & HAS_BETA) != 0
  bs = ()
  for i in tl.static_range(len(places)):
    _, c, inside = places[i]
    bs += (load_columns(beta, beta_f32, c, inside & has_beta, flags)[None, :],)
  return bs


@triton.jit
def _deviations(vs, mu, places):
  """Tiles less their rows' means; 0 outside."""
  ds = ()
  for i in tl.static_range(len(vs)):
    ds += (tl.where(places[i][2][None, :], vs[i] - mu[:, None], 0.0),)
  return ds


@triton.jit
def _squares(ds):
  squares = ()
  for i in tl.static_range(len(ds)):
    squares += (ds[i] * ds[i],)
  return _sum(squares)


@triton.jit
def _statistics(vs, places, n_cols, epsilon, flags):
  """Of what is normalised: itself less its mean, mean, and 1 / deviation."""
  mu = tl.zeros([vs[0].shape[0]], tl.float32)
  if flags & LAYER:
    mu = _sum(vs) / n_cols
  ds = _deviations(vs, mu, places)
  return ds, mu, 1.0 / tl.sqrt_rn(_squares(ds) / n_cols + epsilon)


@triton.jit
def _weighted(d, inv, w, b, flags, DTYPE: tl.constexpr):
  n = d * inv[:, None]
  if flags & T5:
    n = n.to(DTYPE).to(tl.float32)
  return n * w + b


@triton.jit
def norm_fwd(x, residual, gamma, gamma_f32, beta, beta_f32, y, residual_out,
             mean, rstd, rows, cols, epsilon, flags, TILE_M: tl.constexpr,
             TILE_N: tl.constexpr, COLS: tl.constexpr, FLAGS: tl.constexpr):
  """As fwd.norm_fwd, with rows of up to COLS columns; programs: 8 * n."""
  flags &= FLAGS
  DTYPE: tl.constexpr = y.dtype.element_ty
  n_cols = cols.to(tl.float32)
  places = _places(cols, TILE_N, COLS)
  ws = _weights(gamma, gamma_f32, places, flags)
  bs = _addends(beta, beta_f32, places, flags)
  first = tl.program_id(0) // 8
  step = tl.num_programs(0) // 8
  xs, rs = _load_summands(x, residual, first, rows, cols, places, flags, TILE_M,
                          FLAGS)
  for k in range(first, tl.cdiv(rows, 8 * TILE_M), step):
    r, inside_r, base = _rows(k, rows, cols, TILE_M)
    vs = _added(xs, rs, flags, FLAGS)
    xs, rs = _load_summands(x, residual, k + step, rows, cols, places, flags,
                            TILE_M, FLAGS)
    ds, mu, inv = _statistics(vs, places, n_cols, epsilon, flags)
    for i in tl.static_range(len(places)):
      n = _weighted(ds[i], inv, ws[i], bs[i], flags, DTYPE)
      _store(y, n.to(DTYPE), base, inside_r, places[i])
    if flags & RESIDUAL:
      # Backward reads the sum as it is rounded.
      ts = ()
      for i in tl.static_range(len(places)):
        t = vs[i].to(DTYPE)
        _store(residual_out, t, base, inside_r, places[i])
        ts += (t.to(tl.float32),)
      if flags & LAYER:
        mu = _sum(ts) / n_cols
      var = _squares(_deviations(ts, mu, places)) / n_cols
      inv = 1.0 / tl.sqrt_rn(var + epsilon)
    tl.store(mean + r, mu, inside_r)
    tl.store(rstd + r, inv, inside_r)


@triton.jit
def norm_quant(x, residual, gamma, gamma_f32, beta, beta_f32, x_scale, q, scale,
               residual_out, rows, cols, epsilon, kind, flags,
               TILE_M: tl.constexpr, TILE_N: tl.constexpr, COLS: tl.constexpr,
               FLAGS: tl.constexpr, NATIVE: tl.constexpr, CAST: tl.constexpr):
  """As quant.norm_quant, with results of 8 bits of up to COLS columns."""
  flags &= FLAGS
  DTYPE: tl.constexpr = x.dtype.element_ty
  n_cols = cols.to(tl.float32)
  places = _places(cols, TILE_N, COLS)
  ws = _weights(gamma, gamma_f32, places, flags)
  bs = _addends(beta, beta_f32, places, flags)
  first = tl.program_id(0) // 8
  step = tl.num_programs(0) // 8
  xs, rs = _load_summands(x, residual, first, rows, cols, places, flags, TILE_M,
                          FLAGS)
  for k in range(first, tl.cdiv(rows, 8 * TILE_M), step):
    r, inside_r, base = _rows(k, rows, cols, TILE_M)
    vs = _added(xs, rs, flags, FLAGS)
    xs, rs = _load_summands(x, residual, k + step, rows, cols, places, flags,
                            TILE_M, FLAGS)
    ds, _, inv = _statistics(vs, places, n_cols, epsilon, flags)
    if flags & RESIDUAL:
      for i in tl.static_range(len(places)):
        _store(residual_out, vs[i].to(DTYPE), base, inside_r, places[i])
    ns = ()
    for i in tl.static_range(len(places)):
      n = _weighted(ds[i], inv, ws[i], bs[i], flags, DTYPE)
      if flags & X_SCALE:
        n *= tl.load(x_scale + places[i][1], places[i][2], 0.0)[None, :]
      ns += (n,)
    m = magnitude(ns[0])
    for i in tl.static_range(1, len(ns) - 1):
      m = tl.maximum(m, magnitude(ns[i]))
    s = scale_of(tl.maximum(tl.max(m, 1), largest(ns[len(ns) - 1])), kind)
    for i in tl.static_range(len(places)):
      codes = to_bits(divide(ns[i], s[:, None]), kind, NATIVE, CAST)
      _store(q, codes, base, inside_r, places[i])
    tl.store(scale + r, s, inside_r)


@triton.jit
def _load_gradients(x, dy, mean, rstd, k, rows, cols, places,
                    TILE_M: tl.constexpr):
  """The k-th tile of rows of four arrays; 0 outside."""
  r, inside_r, base = _rows(k, rows, cols, TILE_M)
  return (_load(x, base, inside_r, places), _load(dy, base, inside_r, places),
          tl.load(mean + r, inside_r, 0.0)[:, None],
          tl.load(rstd + r, inside_r, 0.0)[:, None])


@triton.jit
def norm_bwd_dx(x, gamma, gamma_f32, dy, dresidual, mean, rstd, dx,
                dgamma_parts, dbeta_parts, rows, cols, flags,
                TILE_M: tl.constexpr, TILE_N: tl.constexpr, COLS: tl.constexpr,
                FLAGS: tl.constexpr, OVERLAPS: tl.constexpr):
  """As bwd.norm_bwd_dx, with rows of up to COLS columns; parts: 8 * n."""
  if OVERLAPS:
    gdc_launch_dependents()
  flags &= FLAGS
  DTYPE: tl.constexpr = dx.dtype.element_ty
  share = 1.0 / cols.to(tl.float32)
  places = _places(cols, TILE_N, COLS)
  ws = _weights(gamma, gamma_f32, places, flags)
  dgamma, dbeta = (), ()
  for i in tl.static_range(len(places)):
    dgamma += (tl.zeros([TILE_M, places[i][0].shape[0]], tl.float32),)
    dbeta += (tl.zeros([TILE_M, places[i][0].shape[0]], tl.float32),)
  first = tl.program_id(0) // 8
  step = tl.num_programs(0) // 8
  xs, dys, mu, inv = _load_gradients(x, dy, mean, rstd, first, rows, cols,
                                     places, TILE_M)
  for k in range(first, tl.cdiv(rows, 8 * TILE_M), step):
    _, inside_r, base = _rows(k, rows, cols, TILE_M)
    ahead = _load_gradients(x, dy, mean, rstd, k + step, rows, cols, places,
                            TILE_M)
    # 0 outside, where n is finite or a NaN as all of the row.
    gs, ngs = (), ()
    for i in tl.static_range(len(places)):
      g = dys[i].to(tl.float32) * ws[i]
      gs += (g,)
      ngs += ((xs[i].to(tl.float32) - mu) * inv * g,)
    avg_ng = _sum(ngs)[:, None] * share
    avg_g = tl.zeros([TILE_M, 1], tl.float32)
    if flags & LAYER:
      avg_g = _sum(gs)[:, None] * share
    if RESIDUAL & FLAGS:
      drs = _load(dresidual, base, inside_r & ((flags & RESIDUAL) != 0), places)
    dgamma_here, dbeta_here = (), ()
    for i in tl.static_range(len(places)):
      dout = dys[i].to(tl.float32)
      n = (xs[i].to(tl.float32) - mu) * inv
      d = (dout * ws[i] - n * avg_ng - avg_g) * inv
      if RESIDUAL & FLAGS:
        d += drs[i].to(tl.float32)
      _store(dx, d.to(DTYPE), base, inside_r, places[i])
      if flags & T5:
        n = n.to(DTYPE).to(tl.float32)
      dgamma_here += (dgamma[i] + dout * n,)
      dbeta_here += (dbeta[i] + dout,)
    dgamma = dgamma_here
    dbeta = dbeta_here
    xs, dys, mu, inv = ahead
  out = tl.program_id(0).to(tl.int64) * cols
  for i in tl.static_range(len(places)):
    _, c, inside = places[i]
    tl.store(dgamma_parts + out + c, tl.sum(dgamma[i], 0), inside)
    if flags & HAS_BETA:
      tl.store(dbeta_parts + out + c, tl.sum(dbeta[i], 0), inside)
