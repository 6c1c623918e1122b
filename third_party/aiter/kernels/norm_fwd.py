# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm, forward, with the residual's addition in front.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467);
Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450).

A block owns TILE_M rows. Up to COLS columns lie in registers, so that every
element is read once. A row of any length (COLS = 0) passes twice in tiles of
TILE_N, the second time out of the cache; its mean and variance are those of the
tiles, combined as by Chan, Golub and LeVeque ("Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances", 1979).
"""

import triton
import triton.language as tl

from third_party.aiter.kernels import norm

T5 = norm.T5
LAYER = norm.LAYER
RESIDUAL = norm.RESIDUAL
HAS_BETA = norm.HAS_BETA
load_columns = norm.load_columns
weight = norm.weight


@triton.jit
def _load(x, residual, at, inside, flags):
  """What is normalised, in float32: x, or its sum with the residual."""
  s = tl.load(x + at, inside, 0.0).to(tl.float32)
  if flags & RESIDUAL:
    s += tl.load(residual + at, inside, 0.0).to(tl.float32)
    if flags & T5:
      s = s.to(x.dtype.element_ty).to(tl.float32)
  return s


@triton.jit
def _finish(d, rstd, gamma, gamma_f32, beta, beta_f32, y, c, inside_c, at,
            inside, flags):
  """Writes the normalised, weighted elements; d has mean 0, if it matters."""
  n = d * rstd[:, None]
  if flags & T5:
    n = n.to(y.dtype.element_ty).to(tl.float32)
  n *= weight(gamma, gamma_f32, c, inside_c, flags)[None, :]
  if flags & HAS_BETA:
    n += load_columns(beta, beta_f32, c, inside_c, flags)[None, :]
  tl.store(y + at, n.to(y.dtype.element_ty), inside)


@triton.jit
def norm_fwd(x, residual, gamma, gamma_f32, beta, beta_f32, y, residual_out,
             mean, rstd, rows, cols, epsilon, flags, TILE_M: tl.constexpr,
             TILE_N: tl.constexpr, COLS: tl.constexpr):
  """y = (s - mean) * rstd * gamma + beta, where s is x or x + residual.

  x, residual, y, residual_out: [rows, cols], contiguous. gamma, beta: [cols],
  of x's type or float32, by either of two pointers.
  mean, rstd: float32 [rows]; RMSNorm has mean 0, and its rstd is
  1 / sqrt(mean of squares + epsilon).
  """
  r = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  inside_r = r < rows
  row = r.to(tl.int64)[:, None] * cols
  n = cols.to(tl.float32)
  if COLS:
    c = tl.arange(0, COLS)
    inside_c = c < cols
    at = row + c[None, :]
    inside = inside_r[:, None] & inside_c[None, :]
    s = _load(x, residual, at, inside, flags)
    if flags & RESIDUAL:
      tl.store(residual_out + at, s.to(x.dtype.element_ty), inside)
    mu = tl.zeros([TILE_M], tl.float32)
    d = s
    if flags & LAYER:
      mu = tl.sum(s, 1) / n
      d = tl.where(inside_c[None, :], s - mu[:, None], 0.0)
    inv = 1.0 / tl.sqrt_rn(tl.sum(d * d, 1) / n + epsilon)
    _finish(d, inv, gamma, gamma_f32, beta, beta_f32, y, c, inside_c, at,
            inside, flags)
  else:
    mu = tl.zeros([TILE_M], tl.float32)
    m2 = tl.zeros([TILE_M], tl.float32)
    for c0 in range(0, cols, TILE_N):
      c = c0 + tl.arange(0, TILE_N)
      inside_c = c < cols
      at = row + c[None, :]
      inside = inside_r[:, None] & inside_c[None, :]
      s = _load(x, residual, at, inside, flags)
      if flags & RESIDUAL:
        tl.store(residual_out + at, s.to(x.dtype.element_ty), inside)
      if flags & LAYER:
        before = c0.to(tl.float32)
        here = tl.minimum(cols - c0, TILE_N).to(tl.float32)
        tile_mu = tl.sum(s, 1) / here
        d = tl.where(inside_c[None, :], s - tile_mu[:, None], 0.0)
        shift = tile_mu - mu
        m2 += tl.sum(d * d, 1) + shift * shift * (before * here
                                                  / (before + here))
        mu += shift * (here / (before + here))
      else:
        m2 += tl.sum(s * s, 1)
    inv = 1.0 / tl.sqrt_rn(m2 / n + epsilon)
    for c0 in range(0, cols, TILE_N):
      c = c0 + tl.arange(0, TILE_N)
      inside_c = c < cols
      at = row + c[None, :]
      inside = inside_r[:, None] & inside_c[None, :]
      s = _load(x, residual, at, inside, flags) - mu[:, None]
      _finish(s, inv, gamma, gamma_f32, beta, beta_f32, y, c, inside_c, at,
              inside, flags)
  tl.store(mean + r, mu, inside_r)
  tl.store(rstd + r, inv, inside_r)
