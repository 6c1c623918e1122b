# SPDX-License-Identifier: Apache-2.0
"""Attention forward of float8 tensors; on sm_90 fwd_hopper.py is faster.

Both products are of float8 numbers: weights are rounded too, after they have
been brought to a range of the type that has no subnormal ones for what counts.
Values come transposed, [head, column, key], so that what is multiplied lies
together; sequences of a packed batch begin at multiples of COLUMNS there, and
what is between them is 0.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.mha_fp8.family import FLAGS

PACKED = tl.constexpr(FLAGS["packed"])
SINK = tl.constexpr(FLAGS["sink"])
LN2 = scores.LN2
LOG2E = scores.LOG2E
COLUMNS = tl.constexpr(128)  # op.py has it too.
find_sequence = scores.find_sequence


@triton.jit
def first_column(k_row, index):
  """Where the keys of a sequence that begins at k_row lie in values."""
  return (k_row // COLUMNS + index) * COLUMNS


@triton.jit
def extent(cu_seqlens, index, batch, rows):
  """A sequence's first row and length, held inside the rows, and these.

  Sequence `batch` is all that is behind the others.
  """
  begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + index), 0), rows)
  end = tl.load(cu_seqlens + tl.minimum(index + 1, batch))
  end = tl.where(index < batch, tl.minimum(end, rows), rows)
  return begin, end - begin, rows


@triton.jit
def _attend(acc, m, l, q_tile, k, v, tile, rows, off, left, right, len_k,
            stride_k, columns, hdim, hdim_v, scale, v_scale,
            WEIGHT_BITS: tl.constexpr, MASK: tl.constexpr,
            TILE_N: tl.constexpr, HEAD: tl.constexpr):
  """Adds a tile of keys."""
  n = tile * TILE_N + tl.arange(0, TILE_N)
  c = tl.arange(0, HEAD)
  inside = (c < hdim)[None, :]
  if MASK:
    inside = inside & (n < len_k)[:, None]
  k_tile = tl.load(k + n[:, None] * stride_k + c[None, :], mask=inside,
                   other=0.0)
  # Behind a sequence's last key there are zeros up to the tile's end.
  v_tile = tl.load(v + c[:, None] * columns + n[None, :],
                   mask=(c < hdim_v)[:, None], other=0.0)
  s = tl.dot(q_tile, tl.trans(k_tile)) * scale
  if MASK:
    ahead = n[None, :] - (rows[:, None] + off)
    shown = (ahead >= -left) & (ahead <= right) & (n < len_k)[None, :]
    s = tl.where(shown, s, float("-inf"))
  m_new = tl.maximum(m, tl.max(s, 1))
  shift = m_new - WEIGHT_BITS
  if MASK:
    # A row that has seen no key yet: anything finite keeps the NaN away.
    shift = tl.where(m_new == float("-inf"), 0.0, shift)
  p = tl.exp2(s - shift[:, None])
  alpha = tl.exp2(m - WEIGHT_BITS - shift)
  l = l * alpha + tl.sum(p, 1)
  product = tl.dot(p.to(v_tile.dtype), tl.trans(v_tile))
  return acc * alpha[:, None] + product * v_scale, m_new, l


@triton.jit
def mha_fp8_fwd(
    q, k, v, out, lse, scales, v_scales, sinks, cu_seqlens_q, cu_seqlens_k,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim, hdim_v, columns, blocks,
    window_left, window_right, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD: tl.constexpr,
    WEIGHT_BITS: tl.constexpr, BLOCKS: tl.constexpr, HEADS_FIRST: tl.constexpr,
):
  """Attention forward; semantics in include/aiter/mha_fp8.h.

  q, k and out are [batch, seqlen, heads, hdim], packed [seqlen, heads, hdim];
  v is [batch or 1, nhead_k, hdim_v, columns]. scales and v_scales: [batch,
  nhead_k, blocks], of scores in powers of two; a block is of COLUMNS keys, or
  with blocks = 1 all. sinks are [batch, nhead_q]. windows: 2^30 where
  unbounded.

  Grid: (tiles of rows, query heads, batch), packed (slots, heads, 1);
  HEADS_FIRST swaps the first two.
  """
  if HEADS_FIRST:
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
  else:
    # Last rows first: under a causal mask they have the most to do.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
  index = tl.program_id(2)
  head_k = head // (nhead_q // nhead_k)
  stride_q = nhead_q * hdim
  stride_k = nhead_k * hdim
  stride_o = nhead_q * hdim_v
  if flags & PACKED:
    index, tile = find_sequence(tile, cu_seqlens_q, batch + 1, TILE_M)
    q_row, len_q, q_rows = extent(cu_seqlens_q, index, batch, seqlen_q)
    k_row, len_k, _ = extent(cu_seqlens_k, index, batch, seqlen_k)
    len_k = tl.where(index < batch, len_k, 0)
    first_q = q_row.to(tl.int64)
    k += k_row.to(tl.int64) * stride_k
    v += head_k.to(tl.int64) * hdim_v * columns + first_column(k_row, index)
    lse += head.to(tl.int64) * q_rows + q_row
  else:
    len_q = seqlen_q
    len_k = seqlen_k
    b = index.to(tl.int64)
    first_q = b * seqlen_q
    k += b * seqlen_k * stride_k
    v += (b * nhead_k + head_k) * hdim_v * columns
    lse += (b * nhead_q + head) * seqlen_q
  m0 = tile * TILE_M
  if m0 >= len_q:
    return
  has_sink = (flags & SINK) != 0 and index < batch
  index = tl.minimum(index, batch - 1)
  q += (first_q + m0) * stride_q + head * hdim
  k += head_k * hdim
  out += (first_q + m0) * stride_o + head * hdim_v
  lse += m0
  scales += (index * nhead_k + head_k) * blocks
  v_scales += (index * nhead_k + head_k) * blocks

  off = len_k - len_q
  last = tl.minimum(m0 + TILE_M, len_q) - 1
  high = tl.minimum(len_k, last + off + window_right + 1)
  low = tl.maximum(m0 + off - window_left, 0)
  full_high = tl.minimum(len_k, m0 + off + window_right + 1)
  full_low = tl.maximum(m0 + TILE_M - 1 + off - window_left, 0)
  high = (tl.maximum(high, 0) + TILE_N - 1) // TILE_N
  low = tl.minimum(low // TILE_N, high)
  full_low = tl.minimum(tl.maximum((full_low + TILE_N - 1) // TILE_N, low),
                        high)
  full_high = tl.minimum(
      tl.maximum(tl.maximum(full_high, 0) // TILE_N, full_low), high)

  r = tl.arange(0, TILE_M)
  c = tl.arange(0, HEAD)
  q_tile = tl.load(q + r[:, None] * stride_q + c[None, :],
                   mask=(r < len_q - m0)[:, None] & (c < hdim)[None, :],
                   other=0.0)
  rows = m0 + r
  scale = tl.load(scales)
  v_scale = tl.load(v_scales)
  in_loop = v_scale if BLOCKS else 1.0
  m = tl.full([TILE_M], float("-inf"), tl.float32)
  l = tl.zeros([TILE_M], tl.float32)
  acc = tl.zeros([TILE_M, HEAD], tl.float32)
  for tile in range(full_low, full_high):
    if BLOCKS:
      block = tl.minimum(tile * TILE_N // COLUMNS, blocks - 1)
      scale = tl.load(scales + block)
      in_loop = tl.load(v_scales + block)
    acc, m, l = _attend(
        acc, m, l, q_tile, k, v, tile, rows, off, window_left, window_right,
        len_k, stride_k, columns, hdim, hdim_v, scale, in_loop, WEIGHT_BITS,
        False, TILE_N, HEAD)
  # Those that an edge of the window or of the keys crosses, before and behind.
  before = full_low - low
  for step in range(0, before + high - full_high):
    tile = tl.where(step < before, low, full_high - before) + step
    if BLOCKS:
      block = tl.minimum(tile * TILE_N // COLUMNS, blocks - 1)
      scale = tl.load(scales + block)
      in_loop = tl.load(v_scales + block)
    acc, m, l = _attend(
        acc, m, l, q_tile, k, v, tile, rows, off, window_left, window_right,
        len_k, stride_k, columns, hdim, hdim_v, scale, in_loop, WEIGHT_BITS,
        True, TILE_N, HEAD)

  # In units of 2^WEIGHT_BITS, as the weights are.
  m -= WEIGHT_BITS
  if has_sink:
    logit = tl.load(sinks + index * nhead_q + head) * LOG2E
    m_new = tl.maximum(m, logit)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.exp2(logit - shift)
    acc *= alpha[:, None]
    m = m_new
  live = l != 0
  l_safe = tl.where(live, l, 1.0)
  factor = 1.0 if BLOCKS else v_scale
  acc *= tl.where(live, factor / l_safe, 0.0)[:, None]
  mine = r < len_q - m0
  tl.store(lse + r, tl.where(live, m * LN2 + tl.log(l_safe), float("-inf")),
           mask=mine)
  tl.store(out + r[:, None] * stride_o + c[None, :],
           acc.to(out.dtype.element_ty),
           mask=mine[:, None] & (c < hdim_v)[None, :])
