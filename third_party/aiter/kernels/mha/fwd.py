# SPDX-License-Identifier: Apache-2.0
"""Attention forward: out = softmax(scale * q k^T + ...) v, and its lse.

One program computes TILE_M rows of one head. It walks over the keys in tiles
of TILE_N and keeps, per row, the running maximum m and sum l of the
exponentials (base 2, so that exp2 needs no multiplication) and the weighted sum
of the values in `acc`. Tiles that every row sees come first and need no mask;
then those that causal masking or one side of a window cuts, whose mask is one
straight edge; last those that need every check, as at the end of a sequence.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import tiles as common


@triton.jit
def _attend(
    acc, m, l, q_tile, q_tail, tile, k, v, stride_k, stride_v,
    bias, bias_f32, stride_bias, slope, key0, key1, counter0, counter1,
    m0, offset, len_q, len_k, hdim_q, hdim_v,
    scale, logits_soft_cap, drop_threshold, rp_keep,
    left, right, sink_tokens, flags,
    direction, EDGE: tl.constexpr, MASKED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    GENERAL: tl.constexpr, CHEAP_CAST: tl.constexpr,
    LANE_KEYS: tl.constexpr,
):
  """Takes one key tile into acc, m and l.

  EDGE: the window's right side (direction 1) or left side (-1) cuts the tile.
  MASKED: the tile needs every check.
  """
  n0 = tile * TILE_N
  k_ptr = k + n0.to(tl.int64) * stride_k
  v_ptr = v + n0.to(tl.int64) * stride_v
  k_tile = common.load_tile(
      k_ptr, stride_k, len_k - n0, hdim_q, TILE_N, HEAD, MASKED, GENERAL)
  s = tl.dot(q_tile, tl.trans(k_tile))
  if TAIL > 0:
    k_tail = common.load_tile(
        k_ptr + HEAD, stride_k, len_k - n0, hdim_q - HEAD,
        TILE_N, TAIL, MASKED, GENERAL)
    s = tl.dot(q_tail, tl.trans(k_tail), s)
  rows = m0 + tl.arange(0, TILE_M)[:, None]
  cols = n0 + tl.arange(0, TILE_N)[None, :]
  if GENERAL:
    # From here on the scores are complete, in base 2.
    s *= scale
    if logits_soft_cap > 0:
      s = common.soft_cap(s, logits_soft_cap)
    if flags & common.HAS_BIAS:
      s = common.add_bias(
          s, bias, bias_f32, stride_bias, m0, n0, len_q - m0, len_k - n0,
          flags, TILE_M, TILE_N)
    if flags & common.ALIBI:
      s -= slope * tl.abs(rows + offset - cols).to(tl.float32)
    s *= common.LOG2E
    score_scale = 1.0
  else:
    score_scale = scale * common.LOG2E
  if GENERAL and MASKED:
    s = tl.where(
        common.visible(
            rows, cols, offset, len_k, left, right, sink_tokens, GENERAL),
        s, float("-inf"))
  if EDGE or (MASKED and not GENERAL):
    position = m0 + tl.arange(0, TILE_M) + (offset - n0)
    if EDGE:
      edge = position + tl.where(direction > 0, right, -left)
    else:
      edge = tl.minimum(position + right, len_k - 1 - n0)
    s = common.cut_edges(
        s, edge, direction, position - left, MASKED, TILE_M, TILE_N,
        LANE_KEYS)
  m_new = tl.maximum(m, tl.max(s, 1) * score_scale)
  m_exp = m_new
  if GENERAL and MASKED:
    # A row that has seen no key yet: anything finite keeps the NaN away.
    m_exp = tl.where(m_new == float("-inf"), 0.0, m_new)
  if LANE_KEYS > 0 and not GENERAL and (EDGE or MASKED):
    # Such a row's maximum is a bound of cut_edges times the scale, rounded. The
    # compiler fuses the subtraction below with the same product, unrounded:
    # what is left of the bound may be huge, and its exponential infinite.
    m_exp = tl.where(m_new < -scale * common.EDGE_LIMIT, 0.0, m_new)
  p = tl.exp2(s * score_scale - m_exp[:, None])
  alpha = tl.exp2(m - m_exp)
  l = l * alpha + tl.sum(p, 1)
  acc = acc * alpha[:, None]
  if GENERAL:
    if flags & common.DROPOUT:
      p *= common.keep_scale(
          m0, n0, key0, key1, counter0, counter1, drop_threshold, rp_keep,
          TILE_M, TILE_N)
  v_tile = common.load_tile(
      v_ptr, stride_v, len_k - n0, hdim_v, TILE_N, BLOCK_DV, MASKED, GENERAL)
  p = common.cast(p, v_tile.dtype, CHEAP_CAST)
  acc = tl.dot(p, v_tile, acc)
  return acc, m_new, l


@triton.jit
def mha_fwd(
    q, k, v, out, lse, bias, bias_f32, alibi_slopes, sink, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_o, nhead_stride_o, batch_stride_o,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, nhead_stride_bias, batch_stride_bias,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    scale_s, logits_soft_cap, drop_threshold, rp_keep,
    window_size_left, window_size_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    GENERAL: tl.constexpr, CHEAP_CAST: tl.constexpr,
    HEADS_FIRST: tl.constexpr, LANE_KEYS: tl.constexpr,
):
  """Forward attention; semantics in include/aiter/mha.h.

  Strides count elements: stride_x between rows, nhead_stride_x between heads,
  batch_stride_x between dense batches (0 if packed). Packed: seqlen_q and
  seqlen_k are all the rows in memory. windows: 2^30 where unbounded.
  The fast grade takes neither bias, slopes, soft cap, dropout nor sink_tokens,
  wants scale_s > 0 and head dims of exactly HEAD + TAIL and BLOCK_DV.

  Grid: (tiles of rows, heads, batch), packed (slots, heads, 1); HEADS_FIRST
  swaps the first two.
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
  if flags & common.VARLEN:
    index, tile_index = common.find_sequence(slot, cu_seqlens_q, batch, TILE_M)
  q_start, len_q = common.sequence_extent(
      index, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      common.CU_Q, common.CU_Q_PAD)
  k_start, len_k = common.sequence_extent(
      index, cu_seqlens_k, cu_seqlens_k_padded, seqlen_k, flags,
      common.CU_K, common.CU_K_PAD)
  # Rows in memory that this program answers for: a dense batch's padding too.
  rows_end = seqlen_q
  if flags & common.VARLEN:
    rows_end = len_q
  if (min_seqlen_q > 0) & (len_q <= min_seqlen_q):
    len_q = 0
  m0 = tile_index * TILE_M
  if m0 >= rows_end:
    return

  common.assume_stride(stride_q)
  common.assume_stride(stride_k)
  common.assume_stride(stride_v)
  common.assume_stride(stride_o)
  b = index.to(tl.int64)
  if flags & common.VARLEN:
    b = tl.zeros([], tl.int64)
  head_k = head // (nhead_q // nhead_k)
  row = (q_start + m0).to(tl.int64)
  q += (b * batch_stride_q + row * stride_q
        + head.to(tl.int64) * nhead_stride_q)
  out += (b * batch_stride_o + row * stride_o
          + head.to(tl.int64) * nhead_stride_o)
  lse += b * batch_stride_lse + head * nhead_stride_lse + row
  k += (b * batch_stride_k + k_start.to(tl.int64) * stride_k
        + head_k.to(tl.int64) * nhead_stride_k)
  v += (b * batch_stride_v + k_start.to(tl.int64) * stride_v
        + head_k.to(tl.int64) * nhead_stride_v)

  offset = len_k - len_q
  if flags & common.TOP_LEFT:
    offset = 0
  slope = 0.0
  key0 = tl.zeros([], tl.uint32)
  key1 = tl.zeros([], tl.uint32)
  counter0 = tl.zeros([], tl.uint32)
  counter1 = tl.zeros([], tl.uint32)
  if GENERAL:
    bias += b * batch_stride_bias + head * nhead_stride_bias
    bias_f32 += b * batch_stride_bias + head * nhead_stride_bias
    if flags & common.ALIBI:
      slope = tl.load(alibi_slopes + index * nhead_q + head)
    if flags & common.DROPOUT:
      state = dropout_state + (index * nhead_q + head) * 4
      key0 = tl.load(state)
      key1 = tl.load(state + 1)
      counter0 = tl.load(state + 2)
      counter1 = tl.load(state + 3)

  m1 = tl.minimum(m0 + TILE_M, len_q)
  sink_tiles, low, full_low, full_high, high = common.key_tiles(
      m0, m1, offset, len_k, window_size_left, window_size_right, sink_tokens,
      TILE_N, GENERAL)
  q_tile = common.load_tile(
      q, stride_q, len_q - m0, hdim_q, TILE_M, HEAD, True, GENERAL)
  q_tail = q_tile
  if TAIL > 0:
    q_tail = common.load_tile(
        q + HEAD, stride_q, len_q - m0, hdim_q - HEAD,
        TILE_M, TAIL, True, GENERAL)

  # A sink is a key without a value: it opens m and l.
  m_first = tl.zeros([], tl.float32) - float("inf")
  if flags & common.SINK:
    m_first = tl.load(sink + index * nhead_q + head) * common.LOG2E
  m = tl.zeros([TILE_M], tl.float32) + m_first
  l = tl.where(m == float("-inf"), 0.0, 1.0)
  acc = tl.zeros([TILE_M, BLOCK_DV], tl.float32)

  for tile in range(full_low, full_high):
    acc, m, l = _attend(
        acc, m, l, q_tile, q_tail, tile, k, v, stride_k, stride_v,
        bias, bias_f32, stride_bias, slope, key0, key1, counter0, counter1,
        m0, offset, len_q, len_k, hdim_q, hdim_v,
        scale_s, logits_soft_cap, drop_threshold, rp_keep,
        window_size_left, window_size_right, sink_tokens, flags,
        1.0, False, False, TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV,
        GENERAL, CHEAP_CAST, LANE_KEYS)
  edge_low = full_low
  edge_high = full_high
  if not GENERAL:
    edge_low, edge_high = common.edge_tiles(
        m0, m1, offset, len_k, window_size_left, window_size_right,
        low, full_low, full_high, high, TILE_N)
    edges_left = full_low - edge_low
    for step in range(0, edges_left + edge_high - full_high):
      at_left = step < edges_left
      tile = tl.where(at_left, edge_low, full_high - edges_left) + step
      direction = tl.where(at_left, -1.0, 1.0)
      acc, m, l = _attend(
          acc, m, l, q_tile, q_tail, tile, k, v, stride_k, stride_v,
          bias, bias_f32, stride_bias, slope, key0, key1, counter0, counter1,
          m0, offset, len_q, len_k, hdim_q, hdim_v,
          scale_s, logits_soft_cap, drop_threshold, rp_keep,
          window_size_left, window_size_right, sink_tokens, flags,
          direction, True, False, TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV,
          GENERAL, CHEAP_CAST, LANE_KEYS)
  # What is left: sink tokens, then tiles before and after those above.
  cut_left = sink_tiles + edge_low - low
  for step in range(0, cut_left + high - edge_high):
    tile = tl.where(
        step < sink_tiles, step,
        tl.where(step < cut_left, low - sink_tiles, edge_high - cut_left)
        + step)
    acc, m, l = _attend(
        acc, m, l, q_tile, q_tail, tile, k, v, stride_k, stride_v,
        bias, bias_f32, stride_bias, slope, key0, key1, counter0, counter1,
        m0, offset, len_q, len_k, hdim_q, hdim_v,
        scale_s, logits_soft_cap, drop_threshold, rp_keep,
        window_size_left, window_size_right, sink_tokens, flags,
        1.0, False, True, TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV,
        GENERAL, CHEAP_CAST, LANE_KEYS)

  rows = tl.arange(0, TILE_M)
  seen = l > 0
  if not GENERAL:
    # Bounds of cut_edges in the maximum: a row without any key, or a NaN.
    limit = scale_s * common.EDGE_LIMIT
    seen &= m > -limit
    l = tl.where(m > limit, float("nan"), l)
  live = (rows < len_q - m0) & (seen | (l != l))
  l_safe = tl.where(live, l, 1.0)
  acc = tl.where(live[:, None], acc / l_safe[:, None], 0.0)
  lse_tile = tl.where(
      live, m * common.LN2 + tl.log(l_safe), float("-inf"))
  tl.store(lse + rows, lse_tile, mask=rows < rows_end - m0)
  common.store_tile(
      out, acc, stride_o, rows_end - m0, hdim_v, TILE_M, BLOCK_DV)
