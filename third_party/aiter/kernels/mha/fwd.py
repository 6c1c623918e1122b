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

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.mha import parts, scores


@triton.jit
def _attend(
    acc, m, l, q_tile, tile, m0, keys, seq, window, terms, direction,
    EDGE: tl.constexpr, MASKED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    DV_TAIL: tl.constexpr, PADDED: tl.constexpr, CHEAP_CAST: tl.constexpr,
    LANE_KEYS: tl.constexpr, FEATURES: tl.constexpr,
):
  """Takes one key tile into acc, m and l.

  EDGE: the window's right side (direction 1) or left side (-1) cuts the tile.
  MASKED: the tile needs every check.
  """
  n0 = tile * TILE_N
  k_ptr = keys.k + n0.to(tl.int64) * keys.stride_k
  v_ptr = keys.v + n0.to(tl.int64) * keys.stride_v
  planes = scores.load_planes(
      m0, n0, seq, terms, MASKED, False, TILE_M, TILE_N, FEATURES)
  k_tile = parts.load(
      k_ptr, keys.stride_k, seq.len_k - n0, keys.hdim_q, TILE_N, HEAD, TAIL,
      MASKED, PADDED)
  s = parts.product(q_tile, k_tile, TAIL)
  if FEATURES & scores.OF_SCORES:
    s, _ = scores.complete(
        s, planes, m0, n0, window, terms, False, TILE_M, TILE_N, LANE_KEYS,
        FEATURES)
    score_scale = 1.0
  else:
    score_scale = terms.scale * scores.LOG2E
  if EDGE or MASKED:
    s = scores.hide(
        s, m0, n0, seq, window, EDGE, direction, False, TILE_M, TILE_N,
        LANE_KEYS, FEATURES)
  m_new = tl.maximum(m, tl.max(s, 1) * score_scale)
  m_exp = m_new
  # A row that has seen no key yet: anything finite keeps the NaN away.
  if FEATURES & scores.HAS_BIAS:
    m_exp = tl.where(m_new == float("-inf"), 0.0, m_new)
  elif EDGE or MASKED or FEATURES & scores.HIDES:
    # Where the maximum is a bound of scores.hide, the compiler would fuse the
    # subtraction below with the bound's product, unrounded: what is left may be
    # huge, and its exponential infinite.
    m_exp = tl.where(m_new < -score_scale * scores.EDGE_LIMIT, 0.0, m_new)
  p = tl.exp2(s * score_scale - m_exp[:, None])
  alpha = tl.exp2(m - m_exp)
  l = l * alpha + tl.sum(p, 1)
  acc = parts.times(acc, alpha[:, None], DV_TAIL)
  if FEATURES & scores.DROPOUT:
    if scores.is_there(terms.flags, scores.DROPOUT, FEATURES):
      p *= scores.keep_scale(terms, m0, n0, TILE_M, TILE_N)
  v_tile = scores.load_keys(
      v_ptr, keys.stride_v, keys.hdim_v, n0, seq, terms, MASKED, TILE_N,
      BLOCK_DV, DV_TAIL, PADDED, FEATURES)
  p = tiles.cast(p, v_tile.main.dtype, CHEAP_CAST)
  acc = parts.accumulate(acc, p, v_tile, DV_TAIL)
  return acc, m_new, l


@triton.jit
def mha_fwd(
    q, k, v, out, lse, bias, bias_f32, mask, alibi_slopes, sink, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_o, nhead_stride_o, batch_stride_o,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    DV_TAIL: tl.constexpr, PADDED: tl.constexpr, CHEAP_CAST: tl.constexpr,
    HEADS_FIRST: tl.constexpr, LANE_KEYS: tl.constexpr, FEATURES: tl.constexpr,
):
  """Forward attention; semantics in include/aiter/mha.h.

  Strides count elements: stride_x between rows, nhead_stride_x between heads,
  batch_stride_x between dense batches (0 if packed). Packed: seqlen_q and
  seqlen_k are all the rows in memory. windows: 2^30 where unbounded.
  Bias and mask have a stride between keys too, 1 or 0; any stride of theirs is
  0 where one row, key, head or batch is for all.
  Of bias, mask, slopes, soft cap, dropout and sink_tokens it knows those in
  FEATURES, and takes them to be there unless MAYBE is among them. Without any
  that changes a score softmax_scale is positive. Head dims are at most
  HEAD + TAIL and BLOCK_DV + DV_TAIL, and exactly so unless PADDED.

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
  head_k = head // (nhead_q // nhead_k)
  row = (seq.q_start + m0).to(tl.int64)
  q += (b * batch_stride_q + row * stride_q
        + head.to(tl.int64) * nhead_stride_q)
  out += (b * batch_stride_o + row * stride_o
          + head.to(tl.int64) * nhead_stride_o)
  lse += b * batch_stride_lse + head * nhead_stride_lse + row
  k += (b * batch_stride_k + seq.k_start.to(tl.int64) * stride_k
        + head_k.to(tl.int64) * nhead_stride_k)
  v += (b * batch_stride_v + seq.k_start.to(tl.int64) * stride_v
        + head_k.to(tl.int64) * nhead_stride_v)

  keys = scores.Keys(k, stride_k, hdim_q, v, stride_v, hdim_v)
  window = scores.Window(
      scores.offset_of(seq, flags), window_left, window_right,
      sink_tokens)
  terms = scores.terms_of(
      index, head, nhead_q, b * batch_stride_bias + head * nhead_stride_bias,
      bias, bias_f32, stride_bias, key_stride_bias,
      b * batch_stride_mask + head * nhead_stride_mask, mask, stride_mask,
      key_stride_mask, alibi_slopes, dropout_state, softmax_scale,
      logits_soft_cap, drop_threshold, rp_keep, flags, FEATURES)

  m1 = tl.minimum(m0 + TILE_M, seq.len_q)
  sink_tiles, low, full_low, full_high, high = scores.key_tiles(
      m0, m1, seq, window, TILE_N, FEATURES)
  q_tile = parts.load(
      q, stride_q, seq.len_q - m0, hdim_q, TILE_M, HEAD, TAIL, True, PADDED)

  # A sink is a key without a value: it opens m and l.
  m_first = tl.zeros([], tl.float32) - float("inf")
  if flags & scores.SINK:
    m_first = tl.load(sink + index * nhead_q + head) * scores.LOG2E
  m = tl.zeros([TILE_M], tl.float32) + m_first
  l = tl.where(m == float("-inf"), 0.0, 1.0)
  acc = parts.zeros(TILE_M, BLOCK_DV, DV_TAIL)

  for tile in range(full_low, full_high):
    acc, m, l = _attend(
        acc, m, l, q_tile, tile, m0, keys, seq, window, terms, 1.0, False,
        False, TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, PADDED,
        CHEAP_CAST, LANE_KEYS, FEATURES)
  edge_low, edge_high = scores.edge_tiles(
      m0, m1, seq, window, low, full_low, full_high, high, TILE_N, FEATURES)
  edges_left = full_low - edge_low
  for step in range(0, edges_left + edge_high - full_high):
    at_left = step < edges_left
    tile = tl.where(at_left, edge_low, full_high - edges_left) + step
    direction = tl.where(at_left, -1.0, 1.0)
    acc, m, l = _attend(
        acc, m, l, q_tile, tile, m0, keys, seq, window, terms, direction, True,
        False, TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, PADDED,
        CHEAP_CAST, LANE_KEYS, FEATURES)
  # What is left: sink tokens, then tiles before and after those above.
  cut_left = sink_tiles + edge_low - low
  for step in range(0, cut_left + high - edge_high):
    tile = tl.where(
        step < sink_tiles, step,
        tl.where(step < cut_left, low - sink_tiles, edge_high - cut_left)
        + step)
    acc, m, l = _attend(
        acc, m, l, q_tile, tile, m0, keys, seq, window, terms, 1.0, False, True,
        TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, PADDED, CHEAP_CAST,
        LANE_KEYS, FEATURES)

  rows = tl.arange(0, TILE_M)
  seen = l > 0
  if not FEATURES & scores.HAS_BIAS:
    # Bounds of scores.hide in the maximum: a row without any key, or a NaN.
    limit = scores.EDGE_LIMIT
    if not FEATURES & scores.OF_SCORES:
      limit *= softmax_scale
    seen &= m > -limit
    l = tl.where(m > limit, float("nan"), l)
  live = (rows < seq.len_q - m0) & (seen | (l != l))
  l_safe = tl.where(live, l, 1.0)
  lse_tile = tl.where(
      live, m * scores.LN2 + tl.log(l_safe), float("-inf"))
  tl.store(lse + rows, lse_tile, mask=rows < seq.q_rows - m0)
  parts.store(
      out, parts.times(acc, 1.0 / l_safe[:, None], DV_TAIL), live, stride_o,
      seq.q_rows - m0, hdim_v, TILE_M, BLOCK_DV, DV_TAIL)
