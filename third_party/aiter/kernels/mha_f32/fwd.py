# SPDX-License-Identifier: Apache-2.0
"""Attention of float32 tensors: mha/fwd.py's without what changes a score.

What matrix units take of a float32 is a row's choice, PRECISION: all of it
("ieee"), its upper 19 bits ("tf32"), or those and the rest in three products
("tf32x3"), whose error is a float32 sum's.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.mha import scores

# The features of these kernels.
NONE = tl.constexpr(0)


@triton.jit
def _attend(
    acc, m, l, q_tile, tile, m0, keys, seq, window, scale,
    MASKED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):
  """Takes one key tile into acc, m and l; MASKED: not all rows see all of it.

  m and the scores are in base 2.
  """
  n0 = tile * TILE_N
  keys_left = seq.len_k - n0
  k_tile = tiles.load_tile(
      keys.k + n0.to(tl.int64) * keys.stride_k, keys.stride_k, keys_left,
      keys.hdim_q, TILE_N, HEAD, MASKED, True)
  s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
  s *= scale * scores.LOG2E
  if MASKED:
    s = scores.hide(
        s, m0, n0, seq, window, False, 1.0, False, TILE_M, TILE_N, 0,
        NONE)
  m_new = tl.maximum(m, tl.max(s, 1))
  m_exp = m_new
  if MASKED:
    # A row that has seen no key yet: anything finite keeps the NaN away.
    m_exp = tl.where(m_new == float("-inf"), 0.0, m_new)
  p = tl.exp2(s - m_exp[:, None])
  alpha = tl.exp2(m - m_exp)
  l = l * alpha + tl.sum(p, 1)
  v_tile = tiles.load_tile(
      keys.v + n0.to(tl.int64) * keys.stride_v, keys.stride_v, keys_left,
      keys.hdim_v, TILE_N, BLOCK_DV, MASKED, True)
  acc = tl.dot(p, v_tile, acc * alpha[:, None], input_precision=PRECISION)
  return acc, m_new, l


@triton.jit
def mha_f32_fwd(
    q, k, v, out, lse,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_o, nhead_stride_o, batch_stride_o,
    nhead_stride_lse, batch_stride_lse,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    softmax_scale, window_left, window_right, min_seqlen_q, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_DV: tl.constexpr, HEADS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):
  """Forward attention; arguments and grid are those of mha_fwd.

  Head dims are at most HEAD and BLOCK_DV.
  """
  if HEADS_FIRST:
    head = tl.program_id(0)
    slot = tl.num_programs(1) - 1 - tl.program_id(1)
  else:
    # Last rows first: under a causal mask they have the most to do.
    slot = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
  index = tl.program_id(2)
  tile_index = slot
  if flags & scores.PACKED:
    index, tile_index = scores.find_sequence(slot, cu_seqlens_q, batch, TILE_M)
  seq = scores.sequence_of(
      index, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
      cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, flags)
  m0 = tile_index * TILE_M
  if m0 >= seq.q_rows:
    return

  tiles.assume_stride(stride_q)
  tiles.assume_stride(stride_k)
  tiles.assume_stride(stride_v)
  tiles.assume_stride(stride_o)
  b = index.to(tl.int64)
  if flags & scores.PACKED:
    b = tl.zeros([], tl.int64)
  h = head.to(tl.int64)
  head_k = (head // (nhead_q // nhead_k)).to(tl.int64)
  row = (seq.q_start + m0).to(tl.int64)
  key = seq.k_start.to(tl.int64)
  q += b * batch_stride_q + row * stride_q + h * nhead_stride_q
  k += b * batch_stride_k + key * stride_k + head_k * nhead_stride_k
  v += b * batch_stride_v + key * stride_v + head_k * nhead_stride_v
  out += b * batch_stride_o + row * stride_o + h * nhead_stride_o
  lse += b * batch_stride_lse + h * nhead_stride_lse + row

  keys = scores.Keys(k, stride_k, hdim_q, v, stride_v, hdim_v)
  window = scores.Window(
      scores.offset_of(seq, flags), window_left, window_right, 0)
  rows_left = seq.len_q - m0
  _, low, full_low, full_high, high = scores.key_tiles(
      m0, tl.minimum(m0 + TILE_M, seq.len_q), seq, window, TILE_N, NONE)
  q_tile = tiles.load_tile(
      q, stride_q, rows_left, hdim_q, TILE_M, HEAD, True, True)

  m = tl.full([TILE_M], float("-inf"), tl.float32)
  l = tl.zeros([TILE_M], tl.float32)
  acc = tl.zeros([TILE_M, BLOCK_DV], tl.float32)
  for tile in range(full_low, full_high):
    acc, m, l = _attend(
        acc, m, l, q_tile, tile, m0, keys, seq, window, softmax_scale, False,
        TILE_M, TILE_N, HEAD, BLOCK_DV, PRECISION)
  cut_left = full_low - low
  for step in range(0, cut_left + high - full_high):
    tile = tl.where(step < cut_left, low, full_high - cut_left) + step
    acc, m, l = _attend(
        acc, m, l, q_tile, tile, m0, keys, seq, window, softmax_scale, True,
        TILE_M, TILE_N, HEAD, BLOCK_DV, PRECISION)

  # A NaN is no empty row.
  live = (tl.arange(0, TILE_M) < rows_left) & (l != 0)
  l = tl.where(live, l, 1.0)
  tl.store(
      lse + tl.arange(0, TILE_M),
      tl.where(live, m * scores.LN2 + tl.log(l), float("-inf")),
      mask=tl.arange(0, TILE_M) < seq.q_rows - m0)
  tiles.store_tile(
      out, tl.where(live[:, None], acc / l[:, None], 0.0), stride_o,
      seq.q_rows - m0, hdim_v, TILE_M, BLOCK_DV)
