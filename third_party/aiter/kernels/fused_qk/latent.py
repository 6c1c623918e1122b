# SPDX-License-Identifier: Apache-2.0
"""Latent attention's queries and keys, made and stored in one launch.

Of a token the first program makes its row of the cache, [latent | rotated key],
and others make queries [absorbed | rotated] of TILE_M heads each.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.cache.write import codes
from third_party.aiter.kernels.core.groups import divide_by_any
from third_party.aiter.kernels.fused_qk.family import FLAGS as _FLAGS

# Pairs are neighbours; else halves.
GPTJ = tl.constexpr(_FLAGS["gptj"])
# Latent vectors are normalised: RMSNorm with a weight.
NORM = tl.constexpr(_FLAGS["norm"])
# The cache, or queries, are numbers of 8 bits; they are divided by a scale.
CACHE_BYTES = tl.constexpr(_FLAGS["cache_bytes"])
Q_BYTES = tl.constexpr(_FLAGS["q_bytes"])
K_SCALED = tl.constexpr(_FLAGS["k_scaled"])
Q_SCALED = tl.constexpr(_FLAGS["q_scaled"])


@triton.jit
def _put(out, out_bytes, at, x, mask, scale, in_bytes, scaled, kind,
         NATIVE: tl.constexpr):
  """Stores float32 x in the type of out, or divided by a scale in bytes."""
  if in_bytes:
    if scaled:
      x = divide_by_any(x, tl.load(scale + tl.zeros(x.shape, tl.int32)))
    tl.store(out_bytes + at, codes(x, kind, NATIVE), mask=mask)
  else:
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotated(x, row, cos, sin, half, mask, flags, HALF: tl.constexpr):
  """Both numbers of the pairs of rows that begin at `row`, [rows, HALF]."""
  c = tl.arange(0, HALF)[None, :]
  at = row + tl.where((flags & GPTJ) != 0, 2 * c, c)
  step = tl.where((flags & GPTJ) != 0, 1, half)
  x1 = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
  x2 = tl.load(x + at + step, mask=mask, other=0.0).to(tl.float32)
  return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def _store(nope, row_nope, lora, pe, row_pe, half, cos, sin, there, weight, eps,
           out, out_bytes, at, first, scale, in_bytes, scaled, kind, flags,
           norm, HEAD: tl.constexpr, HALF: tl.constexpr, NATIVE: tl.constexpr):
  """Rows [rows, 1] of `nope`, and rotated ones of `pe` behind them, to `at`."""
  cols = tl.arange(0, HEAD)[None, :]
  mask = there & (cols < lora)
  x = tl.load(nope + row_nope + cols, mask=mask, other=0.0).to(tl.float32)
  if norm:
    w = tl.load(weight + cols, mask=cols < lora, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 1) / lora
    x = x * (1.0 / tl.sqrt_rn(mean + eps))[:, None] * w
  _put(out, out_bytes, at + cols, x, mask, scale, in_bytes, scaled, kind,
       NATIVE)
  c = tl.arange(0, HALF)[None, :]
  mask = there & (c < half)
  x1, x2 = _rotated(pe, row_pe, cos, sin, half, mask, flags, HALF)
  at = at + first + tl.where((flags & GPTJ) != 0, 2 * c, c)
  step = tl.where((flags & GPTJ) != 0, 1, half)
  _put(out, out_bytes, at, x1, mask, scale, in_bytes, scaled, kind, NATIVE)
  _put(out, out_bytes, at + step, x2, mask, scale, in_bytes, scaled, kind,
       NATIVE)


@triton.jit
def fused_qk_latent(
    q_nope, q_pe, kv_c, k_pe, weight, cos, sin, positions, slots, q_scale,
    k_scale, q_out, q_out_bytes, kv_cache, kv_bytes,
    heads, lora, rope, table_rows, num_slots, width, first, kind, q_kind, eps,
    flags,
    TILE_M: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr,
    NATIVE: tl.constexpr,
):
  """Semantics in include/aiter/fused_qk.h.

  A row of the cache has `width` columns, its rotated key from `first` on.

  Grid: (tokens, each a row of the cache and tiles of heads).
  """
  tiles = (heads + TILE_M - 1) // TILE_M + 1
  token = (tl.program_id(0) // tiles).to(tl.int64)
  tile = tl.program_id(0) % tiles - 1
  half = rope // 2
  c = tl.arange(0, HALF)[None, :]
  position = tl.load(positions + token)
  position = tl.minimum(tl.maximum(position, 0), table_rows - 1).to(tl.int64)
  cos_row = tl.load(cos + position * half + c, mask=c < half, other=0.0)
  sin_row = tl.load(sin + position * half + c, mask=c < half, other=0.0)
  if tile < 0:
    row = token + tl.zeros([1, 1], tl.int64)
    slot = tl.load(slots + row)
    _store(kv_c, row * lora, lora, k_pe, row * rope, half, cos_row, sin_row,
           (slot >= 0) & (slot < num_slots), weight, eps, kv_cache, kv_bytes,
           slot.to(tl.int64) * width, first, k_scale,
           (flags & CACHE_BYTES) != 0, (flags & K_SCALED) != 0, kind, flags,
           (flags & NORM) != 0, HEAD, HALF, NATIVE)
  else:
    head = (tile * TILE_M + tl.arange(0, TILE_M))[:, None]
    of = token * heads + head
    _store(q_nope, of * lora, lora, q_pe, of * rope, half, cos_row, sin_row,
           head < heads, weight, eps, q_out, q_out_bytes, of * (lora + rope),
           lora, q_scale, (flags & Q_BYTES) != 0, (flags & Q_SCALED) != 0,
           q_kind, flags, False, HEAD, HALF, NATIVE)
