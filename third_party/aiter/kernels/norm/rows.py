# SPDX-License-Identifier: Apache-2.0
"""What the norms' kernels share: flags, statistics, the columns' weights."""

import triton
import triton.language as tl

from third_party.aiter.kernels.norm.family import FEATURES

LAYER = tl.constexpr(FEATURES["layer"])  # Subtract the mean.
RESIDUAL = tl.constexpr(FEATURES["residual"])  # Add it to x; write the sum.
GEMMA = tl.constexpr(FEATURES["gemma"])  # The weight is 1 + gamma.
T5 = tl.constexpr(FEATURES["t5"])  # Round before the weight, as T5 does.
HAS_BETA = tl.constexpr(FEATURES["beta"])
F32_WEIGHTS = tl.constexpr(FEATURES["f32_weights"])  # gamma, beta; any x.
X_SCALE = tl.constexpr(FEATURES["x_scale"])  # Multiply before quantising.


@triton.jit
def load_sum(x, residual, at, inside, flags, EVICT: tl.constexpr = ""):
  """What is normalised, in float32: x, or its sum with the residual."""
  s = tl.load(x + at, inside, 0.0, eviction_policy=EVICT).to(tl.float32)
  if flags & RESIDUAL:
    s += tl.load(residual + at, inside, 0.0,
                 eviction_policy=EVICT).to(tl.float32)
    if flags & T5:
      s = s.to(x.dtype.element_ty).to(tl.float32)
  return s


@triton.jit
def load_columns(t, t_f32, c, inside, flags):
  """Elements c of gamma or beta in float32."""
  if flags & F32_WEIGHTS:
    w = tl.load(t_f32 + c, inside, 0.0)
  else:
    w = tl.load(t + c, inside, 0.0).to(tl.float32)
  return w


@triton.jit
def of_weight(gamma, flags):
  """What gamma multiplies by."""
  if flags & GEMMA:
    gamma += 1.0
  return gamma


@triton.jit
def weight(gamma, gamma_f32, c, inside, flags):
  """The weight of columns c in float32."""
  return of_weight(load_columns(gamma, gamma_f32, c, inside, flags), flags)


@triton.jit
def statistics(x, residual, row, inside_r, cols, epsilon, flags,
               TILE_M: tl.constexpr, TILE_N: tl.constexpr):
  """Mean and 1 / sqrt(variance + epsilon) of rows of any length.

  They are those of tiles, combined as by Chan, Golub and LeVeque ("Updating
  Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979). The
  mean of an RMSNorm is 0.
  """
  mu = tl.zeros([TILE_M], tl.float32)
  m2 = tl.zeros([TILE_M], tl.float32)
  before = tl.full([], 0.0, tl.float32)
  for c0 in range(0, cols, TILE_N):
    c = c0 + tl.arange(0, TILE_N)
    inside = inside_r[:, None] & (c < cols)[None, :]
    s = load_sum(x, residual, row + c[None, :], inside, flags)
    if flags & LAYER:
      here = tl.minimum(cols - c0, TILE_N).to(tl.float32)
      tile_mu = tl.sum(s, 1) / here
      d = tl.where(inside, s - tile_mu[:, None], 0.0)
      shift = tile_mu - mu
      m2 += tl.sum(d * d, 1) + shift * shift * (before * here
                                                / (before + here))
      mu += shift * (here / (before + here))
      before += here
    else:
      m2 += tl.sum(s * s, 1)
  return mu, 1.0 / tl.sqrt_rn(m2 / cols.to(tl.float32) + epsilon)


@triton.jit
def weighted(d, inv, w, beta, beta_f32, c, inside_c, flags,
             DTYPE: tl.constexpr):
  """y in float32, of what is left to the mean, in columns c of weights w."""
  n = d * inv[:, None]
  if flags & T5:
    n = n.to(DTYPE).to(tl.float32)
  n *= w[None, :]
  if flags & HAS_BETA:
    n += load_columns(beta, beta_f32, c, inside_c, flags)[None, :]
  return n


@triton.jit
def normalised(s, mu, inv, gamma, gamma_f32, beta, beta_f32, c, inside_c, flags,
               DTYPE: tl.constexpr):
  """y in float32: normalised and weighted elements of columns c."""
  w = weight(gamma, gamma_f32, c, inside_c, flags)
  return weighted(s - mu[:, None], inv, w, beta, beta_f32, c, inside_c, flags,
                  DTYPE)
