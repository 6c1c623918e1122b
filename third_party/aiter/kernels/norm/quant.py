# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm, forward, with a result of 8 or 4 bits.

The normalised rows stay in float32 until they are rounded, times a factor for
each column where there is one (Xiao et al., "SmoothQuant", arXiv:2211.10438).
A block owns TILE_M rows. Up to COLS columns lie in registers, so that every
element is read once. Rows of any length (COLS = 0) pass three times in tiles of
TILE_N, for the statistics, the largest magnitude and the result, the later two
out of the cache; MXFP4, with its scales of 32 columns, needs but two passes.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import casts, rounding
from third_party.aiter.kernels.norm import rows as norm

RESIDUAL = norm.RESIDUAL
X_SCALE = norm.X_SCALE
load_sum = norm.load_sum
normalised = norm.normalised
statistics = norm.statistics
statistics_of_tile = norm.statistics_of_tile
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
def _result(s, mu, inv, gamma, gamma_f32, beta, beta_f32, x_scale, c, inside_c,
            inside, flags, DTYPE: tl.constexpr):
  """What is quantised, in float32, and 0 outside."""
  n = normalised(s, mu, inv, gamma, gamma_f32, beta, beta_f32, c, inside_c,
                 flags, DTYPE)
  if flags & X_SCALE:
    n *= tl.load(x_scale + c, inside_c, 0.0)[None, :]
  return tl.where(inside, n, 0.0)


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
               NATIVE: tl.constexpr, CAST: tl.constexpr):
  """q = y * x_scale / scale, with y as norm_fwd has it.

  x, residual, gamma, beta, residual_out: as in norm_fwd. x_scale: float32
  [cols]. q: bytes [rows, cols], of a kind of rounding.py; or of e2m1 half as
  many, the even columns in the low bits. scale: float32 [rows]; of e2m1 it is
  scale_e8m0, bytes [rows, cols / 32].
  """
  DTYPE: tl.constexpr = x.dtype.element_ty
  r = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  inside_r = r < rows
  first = r.to(tl.int64)[:, None]
  row = first * cols
  tile = tl.arange(0, TILE_N)
  s = tl.full([TILE_M], 1.0, tl.float32)
  if COLS:
    inside_c = tile < cols
    inside = inside_r[:, None] & inside_c[None, :]
    at = row + tile[None, :]
    v = load_sum(x, residual, at, inside, flags)
    if flags & RESIDUAL:
      tl.store(residual_out + at, v.to(DTYPE), inside)
    mu, inv = statistics_of_tile(v, inside, cols, epsilon, flags)
    n = _result(v, mu, inv, gamma, gamma_f32, beta, beta_f32, x_scale, tile,
                inside_c, inside, flags, DTYPE)
    if kind != E2M1:
      s = scale_of(largest(n), kind)
    write(n, s, q, scale_e8m0, first, cols, 0, inside_r[:, None], kind, TILE_M,
          TILE_N, NATIVE, CAST)
  else:
    mu, inv = statistics(x, residual, row, inside_r, cols, epsilon, flags,
                         TILE_M, TILE_N)
    if kind != E2M1:
      amax = tl.zeros([TILE_M], tl.int32)
      for c0 in range(0, cols, TILE_N):
        c = c0 + tile
        inside = inside_r[:, None] & (c < cols)[None, :]
        v = load_sum(x, residual, row + c[None, :], inside, flags)
        n = _result(v, mu, inv, gamma, gamma_f32, beta, beta_f32, x_scale, c,
                    c < cols, inside, flags, DTYPE)
        amax = tl.maximum(amax, largest(n))
      s = scale_of(amax, kind)
    for c0 in range(0, cols, TILE_N):
      c = c0 + tile
      inside = inside_r[:, None] & (c < cols)[None, :]
      at = row + c[None, :]
      v = load_sum(x, residual, at, inside, flags)
      if flags & RESIDUAL:
        tl.store(residual_out + at, v.to(DTYPE), inside)
      n = _result(v, mu, inv, gamma, gamma_f32, beta, beta_f32, x_scale, c,
                  c < cols, inside, flags, DTYPE)
      write(n, s, q, scale_e8m0, first, cols, c0, inside_r[:, None], kind,
            TILE_M, TILE_N, NATIVE, CAST)
  if kind != E2M1:
    tl.store(scale + r, s, inside_r)
