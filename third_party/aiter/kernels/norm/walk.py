# SPDX-License-Identifier: Apache-2.0
"""The norms of rows that lie in registers, for CDNA.

As many programs as run at once take the rows in turn: some read while others
compute or write, from the first row to the last. What belongs to columns is
read once a program; the L1, through which the rows pass, would not keep it. A
tile's base is one scalar, which leaves registers for more waves. The next rows
are asked for once the sums of these are known: then what is on its way and what
is computed have no more registers than the sums had.

What is computed is what fwd.py, quant.py and bwd.py say.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.norm import quant
from third_party.aiter.kernels.norm import rows as norm

E2M1 = quant.E2M1
F32_WEIGHTS = norm.F32_WEIGHTS
GEMMA = norm.GEMMA
HAS_BETA = norm.HAS_BETA
LAYER = norm.LAYER
RESIDUAL = norm.RESIDUAL
T5 = norm.T5
X_SCALE = norm.X_SCALE
largest = quant.largest
load_columns = norm.load_columns
scale_of = quant.scale_of
weight = norm.weight
write = quant.write


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
  return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _weight(gamma, gamma_f32, c, inside, flags):
  """As rows.weight, without a branch."""
  wide = (flags & F32_WEIGHTS) != 0
  w = tl.where(wide, tl.load(gamma_f32 + c, inside & wide, 0.0),
               tl.load(gamma + c, inside & ~wide, 0.0).to(tl.float32))
  return tl.where((flags & GEMMA) != 0, w + 1.0, w)


@triton.jit
def _columns(gamma, gamma_f32, beta, beta_f32, cols, flags,
             COLS: tl.constexpr):
  """Columns: their numbers, which are there, weights, and what is added."""
  c = tl.arange(0, COLS)
  inside = c < cols
  w = weight(gamma, gamma_f32, c, inside, flags)
  b = w
  if flags & HAS_BETA:
    b = load_columns(beta, beta_f32, c, inside, flags)
  return c[None, :], inside[None, :], w[None, :], b[None, :]


@triton.jit
def _rows(t, r, end, at, inside_c, cols, TILE_M: tl.constexpr):
  """Rows r to r + TILE_M - 1 of t; 0 outside."""
  inside = (tl.arange(0, TILE_M) < end - r)[:, None] & inside_c
  return tl.load(t + tl.cast(r, tl.int64) * cols + at, inside, 0.0)


@triton.jit
def _sum(xs, residual, at, inside, flags):
  """As rows.load_sum, of an x that is here."""
  s = xs.to(tl.float32)
  if flags & RESIDUAL:
    s += tl.load(residual + at, inside, 0.0).to(tl.float32)
    if flags & T5:
      s = s.to(xs.dtype).to(tl.float32)
  return s


@triton.jit
def _weighted(d, inv, w, b, flags, DTYPE: tl.constexpr):
  """y in float32, of elements less the mean; 0 outside."""
  n = d * inv[:, None]
  if flags & T5:
    n = n.to(DTYPE).to(tl.float32)
  n *= w
  if flags & HAS_BETA:
    n += b
  return n


@triton.jit
def norm_fwd(x, residual, gamma, gamma_f32, beta, beta_f32, y, residual_out,
             mean, rstd, rows, cols, epsilon, flags, TILE_M: tl.constexpr,
             COLS: tl.constexpr, FLAGS: tl.constexpr):
  """As fwd.norm_fwd, with rows of up to COLS columns."""
  flags &= FLAGS
  DTYPE: tl.constexpr = y.dtype.element_ty
  n_cols = cols.to(tl.float32)
  c, inside_c, w, b = _columns(gamma, gamma_f32, beta, beta_f32, cols, flags,
                               COLS)
  m = tl.arange(0, TILE_M)
  at = (m * cols)[:, None] + c
  step = tl.num_programs(0) * TILE_M
  first = tl.program_id(0) * TILE_M
  xs = _rows(x, first, rows, at, inside_c, cols, TILE_M)
  for r in range(first, rows, step):
    base = tl.cast(r, tl.int64) * cols
    inside_r = m < rows - r
    inside = inside_r[:, None] & inside_c
    s = _sum(xs, residual + base, at, inside, flags)
    mu = tl.zeros([TILE_M], tl.float32)
    d = s
    if flags & LAYER:
      mu = tl.sum(s, 1) / n_cols
      d = tl.where(inside, s - mu[:, None], 0.0)
    if flags & RESIDUAL:
      t = s.to(DTYPE)
      tl.store(residual_out + base + at, t, inside)
      e = d  # Of float32 what is written is what is here.
      if DTYPE != tl.float32:
        e = tl.where(inside, t.to(tl.float32) - mu[:, None], 0.0)
      total, off, squares = tl.reduce((d * d, e, e * e), 1, _add_three)
    else:
      total = tl.sum(d * d, 1)
      off = mu
      squares = total
    xs = _rows(x, r + step, rows, at, inside_c, cols, TILE_M)
    inv = 1.0 / tl.sqrt_rn(total / n_cols + epsilon)
    n = _weighted(d, inv, w, b, flags, DTYPE)
    tl.store(y + base + at, n.to(DTYPE), inside)
    if flags & RESIDUAL:
      off = tl.where((flags & LAYER) != 0, off / n_cols, 0.0)
      var = squares / n_cols - off * off
      inv = 1.0 / tl.sqrt_rn(tl.where(var < 0.0, 0.0, var) + epsilon)
      mu += off
    tl.store(mean + r + m, mu, inside_r)
    tl.store(rstd + r + m, inv, inside_r)


@triton.jit
def norm_quant(x, residual, gamma, gamma_f32, beta, beta_f32, x_scale, q, scale,
               scale_e8m0, residual_out, rows, cols, epsilon, kind, flags,
               TILE_M: tl.constexpr, COLS: tl.constexpr, FLAGS: tl.constexpr,
               NATIVE: tl.constexpr, CAST: tl.constexpr):
  """As quant.norm_quant, with rows of up to COLS columns."""
  flags &= FLAGS
  DTYPE: tl.constexpr = x.dtype.element_ty
  n_cols = cols.to(tl.float32)
  c, inside_c, w, b = _columns(gamma, gamma_f32, beta, beta_f32, cols, flags,
                               COLS)
  m = tl.arange(0, TILE_M)
  at = (m * cols)[:, None] + c
  for tile in range(tl.program_id(0), tl.cdiv(rows, TILE_M),
                    tl.num_programs(0)):
    r = tile * TILE_M
    base = tl.cast(r, tl.int64) * cols
    inside_r = m < rows - r
    inside = inside_r[:, None] & inside_c
    xs = tl.load(x + base + at, inside, 0.0)
    d = _sum(xs, residual + base, at, inside, flags)
    if flags & RESIDUAL:
      tl.store(residual_out + base + at, d.to(DTYPE), inside)
    if flags & LAYER:
      mu = tl.sum(d, 1) / n_cols
      d = tl.where(inside, d - mu[:, None], 0.0)
    inv = 1.0 / tl.sqrt_rn(tl.sum(d * d, 1) / n_cols + epsilon)
    n = _weighted(d, inv, w, b, flags, DTYPE)
    if flags & X_SCALE:
      n *= tl.load(x_scale + c, inside_c, 0.0)
    s = tl.full([TILE_M], 1.0, tl.float32)
    if kind != E2M1:
      s = scale_of(largest(n), kind)
      tl.store(scale + r + m, s, inside_r)
    write(n, s, q, scale_e8m0, (r + m).to(tl.int64)[:, None], cols, 0,
          inside_r[:, None], kind, TILE_M, COLS, NATIVE, CAST)


@triton.jit
def _again(t, OPAQUE: tl.constexpr):
  """t, of which the compiler does not know that it has been there before."""
  if OPAQUE:
    t = tl.inline_asm_elementwise(
        "", "=v,0", [t], dtype=t.dtype, is_pure=True,
        pack=32 // t.dtype.primitive_bitwidth)
  return t


@triton.jit
def _load_rows(x, dy, mean, rstd, r, end, at, inside_c, cols,
               TILE_M: tl.constexpr):
  """Rows r to r + TILE_M - 1 of four arrays; 0 outside."""
  m = tl.arange(0, TILE_M)
  base = tl.cast(r, tl.int64) * cols
  inside_r = m < end - r
  inside = inside_r[:, None] & inside_c[None, :]
  return (tl.load(x + base + at, inside, 0.0),
          tl.load(dy + base + at, inside, 0.0),
          tl.load(mean + r + m, inside_r, 0.0),
          tl.load(rstd + r + m, inside_r, 0.0))


@triton.jit
def norm_bwd_dx(x, gamma, gamma_f32, dy, dresidual, mean, rstd, dx,
                dgamma_parts, dbeta_parts, rows, cols, rows_per_part, flags,
                TILE_M: tl.constexpr, COLS: tl.constexpr,
                FLAGS: tl.constexpr, OPAQUE: tl.constexpr,
                AHEAD: tl.constexpr):
  """As bwd.norm_bwd_dx, with rows of up to COLS columns.

  Between its sums and dx a row lies as it was read, and is converted again:
  with OPAQUE the compiler cannot keep what it has. AHEAD: so many tiles of rows
  are on their way while one is computed. Then memory is busy with one program
  where there were two, which has registers for what it has converted, and there
  are half as many parts to write and to add.
  """
  flags &= FLAGS
  part = tl.program_id(0)
  begin = part * rows_per_part
  end = tl.minimum(rows, begin + rows_per_part)
  share = 1.0 / cols.to(tl.float32)
  c = tl.arange(0, COLS)
  inside_c = c < cols
  dgamma = tl.zeros([TILE_M, COLS], tl.float32)
  dbeta = tl.zeros([TILE_M, COLS], tl.float32)
  m = tl.arange(0, TILE_M)
  at = (m * cols)[:, None] + c[None, :]
  loaded = ()
  for i in tl.static_range(AHEAD):
    loaded += (_load_rows(x, dy, mean, rstd, begin + i * TILE_M, end, at,
                          inside_c, cols, TILE_M),)
  # Branches would keep these rows waiting: for weights, or to ask whether there
  # are any. A part without rows takes one of zeros.
  w = _weight(gamma, gamma_f32, c, inside_c, flags)[None, :]
  last = tl.maximum(end, begin + 1)
  tl.assume(begin < last)
  for r in range(begin, last, TILE_M):
    loaded += (_load_rows(x, dy, mean, rstd, r + AHEAD * TILE_M, end, at,
                          inside_c, cols, TILE_M),)
    # 0 outside, where n is finite or a NaN as all of the row.
    xs, dys, mu, inv = loaded[0]
    loaded = loaded[1:]
    inv = inv[:, None]
    base = tl.cast(r, tl.int64) * cols
    inside_r = m < end - r
    inside = inside_r[:, None] & inside_c[None, :]
    dout = dys.to(tl.float32)
    n = (xs.to(tl.float32) - mu[:, None]) * inv
    g = dout * w
    avg_ng = tl.sum(n * g, 1) * share
    avg_g = tl.zeros([TILE_M], tl.float32)
    if flags & LAYER:
      avg_g = tl.sum(g, 1) * share
    xs = _again(xs, OPAQUE and AHEAD == 0)
    dys = _again(dys, OPAQUE and AHEAD == 0)
    n = (xs.to(tl.float32) - mu[:, None]) * inv
    dout = dys.to(tl.float32)
    g = dout * w
    d = (g - n * avg_ng[:, None] - avg_g[:, None]) * inv
    if flags & RESIDUAL:
      d += tl.load(dresidual + base + at, inside, 0.0).to(tl.float32)
    tl.store(dx + base + at, d.to(dx.dtype.element_ty), inside)
    if flags & T5:
      n = n.to(x.dtype.element_ty).to(tl.float32)
    dgamma += dout * n
    if flags & HAS_BETA:
      dbeta += dout
  base = part.to(tl.int64) * cols
  tl.store(dgamma_parts + base + c, tl.sum(dgamma, 0), inside_c)
  if flags & HAS_BETA:
    tl.store(dbeta_parts + base + c, tl.sum(dbeta, 0), inside_c)
