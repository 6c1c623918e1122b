# SPDX-License-Identifier: Apache-2.0
"""Attention backward, without atomics: every sum has one owner.

  mha_bwd_delta  delta = rowsum(dout * out) - dlse
  mha_bwd_dkdv   dk, dv: a program owns TILE_N keys of one kv head and walks
                 over the rows of every query head of its group
  mha_bwd_dq     dq (and ALiBi's slopes, per row): owns TILE_M rows
  mha_bwd_dbias  dbias: owns a TILE_M x TILE_N tile of the bias
  mha_bwd_dsink  the sinks' gradient: owns one (batch, head)

Probabilities are computed again from q, k and lse: p = exp(s - lse). With
dropout's factor f (0 or 1 / (1 - p)), dv = (f p)^T dout, ds = p * (f * dout
v^T - delta), then dq = scale * ds k and dk = scale * ds^T q.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.mha import parts, scores


@triton.jit
def mha_bwd_delta(
    out, do, dlse, delta,
    stride_o, nhead_stride_o, batch_stride_o,
    stride_do, nhead_stride_do, batch_stride_do,
    nhead_stride_lse, batch_stride_lse,
    batch, seqlen_q, nhead_q, hdim_v, flags,
    TILE_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):
  """delta = rowsum(dout * out) - dlse, for every row in memory.

  Packed batches are one batch of seqlen_q = total rows.
  Grid: (tiles of rows, heads, dense batches or 1).
  """
  m0 = tl.program_id(0) * TILE_M
  head = tl.program_id(1).to(tl.int64)
  b = tl.program_id(2).to(tl.int64)
  row = m0.to(tl.int64)
  rows_left = seqlen_q - m0
  tiles.assume_stride(stride_o)
  tiles.assume_stride(stride_do)
  out += b * batch_stride_o + head * nhead_stride_o + row * stride_o
  do += b * batch_stride_do + head * nhead_stride_do + row * stride_do
  lse_offset = b * batch_stride_lse + head * nhead_stride_lse + row
  o_tile = tiles.load_tile(
      out, stride_o, rows_left, hdim_v, TILE_M, BLOCK_DV, True, True)
  do_tile = tiles.load_tile(
      do, stride_do, rows_left, hdim_v, TILE_M, BLOCK_DV, True, True)
  total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
  if flags & scores.DLSE:
    total -= tiles.load_rows(dlse + lse_offset, rows_left, 0.0, TILE_M)
  rows = tl.arange(0, TILE_M)
  tl.store(delta + lse_offset + rows, total, mask=rows < rows_left)


@triton.jit
def _load_lse(
    ptr, rows_left, ROWS: tl.constexpr, CHECK: tl.constexpr = True
):
  """lse in base 2; +inf, which makes p zero, for rows without any key."""
  lse = tiles.load_rows(ptr, rows_left, float("-inf"), ROWS, CHECK)
  return tl.where(lse == float("-inf"), float("inf"), lse * scores.LOG2E)


@triton.jit
def _tile_gradient(
    s, dp, planes, lse_tile, delta_tile, m0, n0, seq, window, terms,
    MASKED: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, LANE_KEYS: tl.constexpr,
    FEATURES: tl.constexpr,
):
  """From q k^T and dout v^T of a tile to what its gradients need.

  TRANSPOSED: tiles stand [TILE_N, TILE_M], lse and delta along their columns.

  Returns:
    p times dropout's factor; ds before the soft cap's derivative, which is
    what bias and slopes see; ds after it, which q and k see.
  """
  if TRANSPOSED:
    lse_tile = lse_tile[None, :]
    delta_tile = delta_tile[None, :]
  else:
    lse_tile = lse_tile[:, None]
    delta_tile = delta_tile[:, None]
  slope = 1.0
  score_scale = 1.0
  if FEATURES & scores.OF_SCORES:
    s, slope = scores.complete(
        s, planes, m0, n0, window, terms, TRANSPOSED, TILE_M, TILE_N, LANE_KEYS,
        FEATURES)
  else:
    score_scale = terms.scale * scores.LOG2E
  if MASKED:
    s = scores.hide(
        s, m0, n0, seq, window, False, 1.0, TRANSPOSED, TILE_M, TILE_N,
        LANE_KEYS, FEATURES)
  p = tl.exp2(s * score_scale - lse_tile)
  if FEATURES & scores.HAS_BIAS:
    # Where all biases of a row are huge, lse has lost what it adds to them.
    p = tl.where(p > 1.0, 1.0, p)
  p_dropped = p
  if FEATURES & scores.DROPOUT:
    if scores.is_there(terms.flags, scores.DROPOUT, FEATURES):
      factor = scores.keep_scale(terms, m0, n0, TILE_M, TILE_N)
      if TRANSPOSED:
        factor = tl.trans(factor)
      p_dropped = p * factor
      dp = dp * factor
  ds = p * (dp - delta_tile)
  if FEATURES & scores.HIDES:
    # A hidden key has no gradient, whatever it and its value hold.
    ds = tl.where(p == 0.0, 0.0, ds)
  return p_dropped, ds, ds * slope


class _Rows(NamedTuple):
  """What the walk over the rows of a head reads."""
  q: tl.tensor
  stride_q: tl.tensor
  hdim_q: tl.tensor
  do: tl.tensor
  stride_do: tl.tensor
  hdim_v: tl.tensor
  lse: tl.tensor
  delta: tl.tensor


@triton.jit
def _dkdv_step(
    dk, dv, k_tile, v_tile, tile, n0, rows, seq, window, terms,
    MASKED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    DV_TAIL: tl.constexpr, PADDED: tl.constexpr, CHEAP_CAST: tl.constexpr,
    LANE_KEYS: tl.constexpr, FEATURES: tl.constexpr,
):
  """Adds one tile of rows to dk and dv."""
  m0 = tile * TILE_M
  rows_left = seq.len_q - m0
  q_ptr = rows.q + m0.to(tl.int64) * rows.stride_q
  do_ptr = rows.do + m0.to(tl.int64) * rows.stride_do
  planes = scores.load_planes(
      m0, n0, seq, terms, MASKED, True, TILE_M, TILE_N, FEATURES)
  q_tile = parts.load(
      q_ptr, rows.stride_q, rows_left, rows.hdim_q, TILE_M, HEAD, TAIL, MASKED,
      PADDED)
  lse_tile = _load_lse(rows.lse + m0, rows_left, TILE_M, MASKED)
  s = parts.product(k_tile, q_tile, TAIL)
  do_tile = parts.load(
      do_ptr, rows.stride_do, rows_left, rows.hdim_v, TILE_M, BLOCK_DV, DV_TAIL,
      MASKED, PADDED)
  delta_tile = tiles.load_rows(
      rows.delta + m0, rows_left, 0.0, TILE_M, MASKED)
  dp = parts.product(v_tile, do_tile, DV_TAIL)
  p, _, ds = _tile_gradient(
      s, dp, planes, lse_tile, delta_tile, m0, n0, seq, window, terms,
      MASKED, True, TILE_M, TILE_N, LANE_KEYS, FEATURES)
  p = tiles.cast(p, do_tile.main.dtype, CHEAP_CAST)
  dv = parts.accumulate(dv, p, do_tile, DV_TAIL)
  ds = tiles.cast(ds, q_tile.main.dtype, CHEAP_CAST)
  dk = parts.accumulate(dk, ds, q_tile, TAIL)
  return dk, dv


@triton.jit
def mha_bwd_dkdv(
    q, k, v, do, lse, delta, dq, dk, dv, dbias, d_slopes,
    bias, bias_f32, mask, alibi_slopes, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    stride_dbias, nhead_stride_dbias, batch_stride_dbias,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    bias_batch, bias_nhead,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    DV_TAIL: tl.constexpr, PADDED: tl.constexpr, CHEAP_CAST: tl.constexpr,
    HEADS_FIRST: tl.constexpr, LANE_KEYS: tl.constexpr, FEATURES: tl.constexpr,
):
  """dk and dv of TILE_N keys of one kv head.

  The arguments are those of mha_fwd (which see) and the gradients' own; the
  three kernels that recompute the scores share this one list.
  Grid: (tiles of keys, kv heads, batch), packed (slots, kv heads, 1);
  HEADS_FIRST swaps the first two.
  """
  # First keys first: under a causal mask they have the most to do.
  if HEADS_FIRST:
    head_k = tl.program_id(0)
    slot = tl.program_id(1)
  else:
    slot = tl.program_id(0)
    head_k = tl.program_id(1)
  index = tl.program_id(2)
  tile_index = slot
  if flags & scores.PACKED:
    index, tile_index = scores.find_sequence(slot, cu_seqlens_k, batch, TILE_N)
  seq = scores.sequence_of(
      index, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
      cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, flags)
  n0 = tile_index * TILE_N
  if n0 >= seq.k_rows:
    return

  tiles.assume_stride(stride_q)
  tiles.assume_stride(stride_k)
  tiles.assume_stride(stride_v)
  tiles.assume_stride(stride_do)
  tiles.assume_stride(stride_dk)
  tiles.assume_stride(stride_dv)
  b = index.to(tl.int64)
  if flags & scores.PACKED:
    b = tl.zeros([], tl.int64)
  h = head_k.to(tl.int64)
  row = (seq.k_start + n0).to(tl.int64)
  k += b * batch_stride_k + row * stride_k + h * nhead_stride_k
  v += b * batch_stride_v + row * stride_v + h * nhead_stride_v
  dk += b * batch_stride_dk + row * stride_dk + h * nhead_stride_dk
  dv += b * batch_stride_dv + row * stride_dv + h * nhead_stride_dv
  q += b * batch_stride_q + seq.q_start.to(tl.int64) * stride_q
  do += b * batch_stride_do + seq.q_start.to(tl.int64) * stride_do
  lse += b * batch_stride_lse + seq.q_start
  delta += b * batch_stride_lse + seq.q_start

  window = scores.Window(
      scores.offset_of(seq, flags), window_left, window_right,
      sink_tokens)
  keys_left = seq.len_k - n0
  k_tile = parts.load(
      k, stride_k, keys_left, hdim_q, TILE_N, HEAD, TAIL, True, PADDED)
  v_tile = parts.load(
      v, stride_v, keys_left, hdim_v, TILE_N, BLOCK_DV, DV_TAIL, True, PADDED)
  dk_tile = parts.zeros(TILE_N, HEAD, TAIL)
  dv_tile = parts.zeros(TILE_N, BLOCK_DV, DV_TAIL)

  low, full_low, full_high, high = scores.row_tiles(
      n0, tl.minimum(n0 + TILE_N, seq.len_k), seq, window, TILE_M, FEATURES)
  if FEATURES & scores.HIDES:
    # Planes of whole tiles are read without a bound, and may end with the keys.
    full_high = tl.where(keys_left < TILE_N, full_low, full_high)
  group = nhead_q // nhead_k
  for i in range(0, group):
    head = head_k * group + i
    terms = scores.terms_of(
        index, head, nhead_q, b * batch_stride_bias + head * nhead_stride_bias,
        bias, bias_f32, stride_bias, key_stride_bias,
        b * batch_stride_mask + head * nhead_stride_mask, mask, stride_mask,
        key_stride_mask, alibi_slopes, dropout_state, softmax_scale,
        logits_soft_cap, drop_threshold, rp_keep, flags, FEATURES)
    rows = _Rows(
        q + head.to(tl.int64) * nhead_stride_q, stride_q, hdim_q,
        do + head.to(tl.int64) * nhead_stride_do, stride_do, hdim_v,
        lse + head * nhead_stride_lse, delta + head * nhead_stride_lse)
    for tile in range(full_low, full_high):
      dk_tile, dv_tile = _dkdv_step(
          dk_tile, dv_tile, k_tile, v_tile, tile, n0, rows, seq, window, terms,
          False, TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, PADDED,
          CHEAP_CAST, LANE_KEYS, FEATURES)
    cut_left = full_low - low
    for step in range(0, cut_left + high - full_high):
      tile = tl.where(step < cut_left, low, full_high - cut_left) + step
      dk_tile, dv_tile = _dkdv_step(
          dk_tile, dv_tile, k_tile, v_tile, tile, n0, rows, seq, window, terms,
          True, TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, PADDED,
          CHEAP_CAST, LANE_KEYS, FEATURES)

  # Padding after a dense sequence gets zeros.
  live = tl.arange(0, TILE_N) < keys_left
  parts.store(
      dv, dv_tile, live, stride_dv, seq.k_rows - n0, hdim_v, TILE_N, BLOCK_DV,
      DV_TAIL)
  parts.store(
      dk, parts.times(dk_tile, softmax_scale, TAIL), live, stride_dk,
      seq.k_rows - n0, hdim_q, TILE_N, HEAD, TAIL)


@triton.jit
def _dq_step(
    dq, dslope, q_tile, do_tile, lse_tile, delta_tile, tile, m0, keys, seq,
    window, terms,
    MASKED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    DV_TAIL: tl.constexpr, PADDED: tl.constexpr, CHEAP_CAST: tl.constexpr,
    LANE_KEYS: tl.constexpr, FEATURES: tl.constexpr,
):
  """Adds one tile of keys to dq, and to the slopes' gradient of each row."""
  n0 = tile * TILE_N
  k_ptr = keys.k + n0.to(tl.int64) * keys.stride_k
  v_ptr = keys.v + n0.to(tl.int64) * keys.stride_v
  planes = scores.load_planes(
      m0, n0, seq, terms, MASKED, False, TILE_M, TILE_N, FEATURES)
  k_tile = scores.load_keys(
      k_ptr, keys.stride_k, keys.hdim_q, n0, seq, terms, MASKED, TILE_N, HEAD,
      TAIL, PADDED, FEATURES)
  s = parts.product(q_tile, k_tile, TAIL)
  v_tile = parts.load(
      v_ptr, keys.stride_v, seq.len_k - n0, keys.hdim_v, TILE_N, BLOCK_DV,
      DV_TAIL, MASKED, PADDED)
  dp = parts.product(do_tile, v_tile, DV_TAIL)
  _, ds_bias, ds = _tile_gradient(
      s, dp, planes, lse_tile, delta_tile, m0, n0, seq, window, terms,
      MASKED, False, TILE_M, TILE_N, LANE_KEYS, FEATURES)
  if FEATURES & scores.ALIBI:
    if scores.is_there(terms.flags, scores.ALIBI, FEATURES):
      rows = m0 + tl.arange(0, TILE_M)[:, None]
      cols = n0 + tl.arange(0, TILE_N)[None, :]
      dslope -= tl.sum(
          ds_bias * tl.abs(rows + window.offset - cols).to(tl.float32), 1)
  ds = tiles.cast(ds, k_tile.main.dtype, CHEAP_CAST)
  return parts.accumulate(dq, ds, k_tile, TAIL), dslope


@triton.jit
def mha_bwd_dq(
    q, k, v, do, lse, delta, dq, dk, dv, dbias, d_slopes,
    bias, bias_f32, mask, alibi_slopes, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    stride_dbias, nhead_stride_dbias, batch_stride_dbias,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    bias_batch, bias_nhead,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    DV_TAIL: tl.constexpr, PADDED: tl.constexpr, CHEAP_CAST: tl.constexpr,
    HEADS_FIRST: tl.constexpr, LANE_KEYS: tl.constexpr, FEATURES: tl.constexpr,
):
  """dq of TILE_M rows of one head; with ALiBi also d_slopes of each row.

  Arguments: mha_bwd_dkdv's; d_slopes lies like lse. Grid: mha_fwd's.
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
  tiles.assume_stride(stride_do)
  tiles.assume_stride(stride_dq)
  b = index.to(tl.int64)
  if flags & scores.PACKED:
    b = tl.zeros([], tl.int64)
  head_k = (head // (nhead_q // nhead_k)).to(tl.int64)
  h = head.to(tl.int64)
  row = (seq.q_start + m0).to(tl.int64)
  q += b * batch_stride_q + row * stride_q + h * nhead_stride_q
  do += b * batch_stride_do + row * stride_do + h * nhead_stride_do
  dq += b * batch_stride_dq + row * stride_dq + h * nhead_stride_dq
  lse_offset = b * batch_stride_lse + h * nhead_stride_lse + row
  k += (b * batch_stride_k + seq.k_start.to(tl.int64) * stride_k
        + head_k * nhead_stride_k)
  v += (b * batch_stride_v + seq.k_start.to(tl.int64) * stride_v
        + head_k * nhead_stride_v)

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
  rows_left = seq.len_q - m0
  q_tile = parts.load(
      q, stride_q, rows_left, hdim_q, TILE_M, HEAD, TAIL, True, PADDED)
  do_tile = parts.load(
      do, stride_do, rows_left, hdim_v, TILE_M, BLOCK_DV, DV_TAIL, True, PADDED)
  lse_tile = _load_lse(lse + lse_offset, rows_left, TILE_M)
  delta_tile = tiles.load_rows(delta + lse_offset, rows_left, 0.0, TILE_M)
  dq_tile = parts.zeros(TILE_M, HEAD, TAIL)
  dslope = tl.zeros([TILE_M], tl.float32)

  for tile in range(full_low, full_high):
    dq_tile, dslope = _dq_step(
        dq_tile, dslope, q_tile, do_tile, lse_tile, delta_tile, tile, m0, keys,
        seq, window, terms, False, TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV,
        DV_TAIL, PADDED, CHEAP_CAST, LANE_KEYS, FEATURES)
  cut_left = sink_tiles + full_low - low
  for step in range(0, cut_left + high - full_high):
    tile = tl.where(
        step < sink_tiles, step,
        tl.where(step < cut_left, low - sink_tiles, full_high - cut_left)
        + step)
    dq_tile, dslope = _dq_step(
        dq_tile, dslope, q_tile, do_tile, lse_tile, delta_tile, tile, m0, keys,
        seq, window, terms, True, TILE_M, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL,
        PADDED, CHEAP_CAST, LANE_KEYS, FEATURES)

  # Padding after a dense sequence gets zeros.
  rows = tl.arange(0, TILE_M)
  live = rows < rows_left
  parts.store(
      dq, parts.times(dq_tile, softmax_scale, TAIL), live, stride_dq,
      seq.q_rows - m0, hdim_q, TILE_M, HEAD, TAIL)
  if FEATURES & scores.ALIBI:
    if scores.is_there(flags, scores.ALIBI, FEATURES):
      tl.store(
          d_slopes + lse_offset + rows, tl.where(live, dslope, 0.0),
          mask=rows < seq.q_rows - m0)


@triton.jit
def mha_bwd_dbias(
    q, k, v, do, lse, delta, dq, dk, dv, dbias, d_slopes,
    bias, bias_f32, mask, alibi_slopes, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    stride_dbias, nhead_stride_dbias, batch_stride_dbias,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    bias_batch, bias_nhead,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_DV: tl.constexpr,
    DV_TAIL: tl.constexpr, CHEAP_CAST: tl.constexpr, LANE_KEYS: tl.constexpr,
    FEATURES: tl.constexpr,
):
  """dbias, float32: ds summed over the batches and heads that share the bias.

  Arguments: mha_bwd_dkdv's. Dense batches only; the bias is
  [bias_batch, bias_nhead, seqlen_q, seqlen_k], each of the first two 1 or full.
  Every element is written. Grid: (tiles of keys, tiles of rows,
  bias_batch * bias_nhead).
  """
  n0 = tl.program_id(0) * TILE_N
  m0 = tl.program_id(1) * TILE_M
  bias_b = tl.program_id(2) // bias_nhead
  bias_h = tl.program_id(2) % bias_nhead
  tiles.assume_stride(stride_q)
  tiles.assume_stride(stride_k)
  tiles.assume_stride(stride_v)
  tiles.assume_stride(stride_do)
  rows = m0 + tl.arange(0, TILE_M)[:, None]
  cols = n0 + tl.arange(0, TILE_N)[None, :]
  heads = nhead_q // bias_nhead
  total = tl.zeros([TILE_M, TILE_N], tl.float32)
  for i in range(0, (batch // bias_batch) * heads):
    index = bias_b + i // heads * bias_batch
    head = bias_h + i % heads * bias_nhead
    seq = scores.sequence_of(
        index, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
        cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, flags)
    window = scores.Window(
        scores.offset_of(seq, flags), window_left, window_right,
        sink_tokens)
    sink_tiles, low, _full_low, _full_high, high = scores.key_tiles(
        m0, tl.minimum(m0 + TILE_M, seq.len_q), seq, window, TILE_N, FEATURES)
    tile = n0 // TILE_N
    if (tile < sink_tiles) | ((tile >= low) & (tile < high)):
      b = index.to(tl.int64)
      h = head.to(tl.int64)
      head_k = (head // (nhead_q // nhead_k)).to(tl.int64)
      row = m0.to(tl.int64)
      key = n0.to(tl.int64)
      q_ptr = q + b * batch_stride_q + row * stride_q + h * nhead_stride_q
      do_ptr = do + b * batch_stride_do + row * stride_do + h * nhead_stride_do
      k_ptr = k + b * batch_stride_k + key * stride_k + head_k * nhead_stride_k
      v_ptr = v + b * batch_stride_v + key * stride_v + head_k * nhead_stride_v
      lse_offset = b * batch_stride_lse + h * nhead_stride_lse + row
      terms = scores.terms_of(
          index, head, nhead_q, b * batch_stride_bias + h * nhead_stride_bias,
          bias, bias_f32, stride_bias, key_stride_bias,
          b * batch_stride_mask + h * nhead_stride_mask, mask, stride_mask,
          key_stride_mask, alibi_slopes, dropout_state, softmax_scale,
          logits_soft_cap, drop_threshold, rp_keep, flags, FEATURES)
      planes = scores.load_planes(
          m0, n0, seq, terms, True, False, TILE_M, TILE_N, FEATURES)
      q_tile = parts.load(
          q_ptr, stride_q, seq.len_q - m0, hdim_q, TILE_M, HEAD, TAIL, True,
          True)
      k_tile = parts.load(
          k_ptr, stride_k, seq.len_k - n0, hdim_q, TILE_N, HEAD, TAIL, True,
          True)
      s = parts.product(q_tile, k_tile, TAIL)
      do_tile = parts.load(
          do_ptr, stride_do, seq.len_q - m0, hdim_v, TILE_M, BLOCK_DV, DV_TAIL,
          True, True)
      v_tile = parts.load(
          v_ptr, stride_v, seq.len_k - n0, hdim_v, TILE_N, BLOCK_DV, DV_TAIL,
          True, True)
      dp = parts.product(do_tile, v_tile, DV_TAIL)
      lse_tile = _load_lse(lse + lse_offset, seq.len_q - m0, TILE_M)
      delta_tile = tiles.load_rows(
          delta + lse_offset, seq.len_q - m0, 0.0, TILE_M)
      _p, ds, _ds_scores = _tile_gradient(
          s, dp, planes, lse_tile, delta_tile, m0, n0, seq, window, terms,
          True, False, TILE_M, TILE_N, LANE_KEYS, FEATURES)
      total += ds
  dbias += (bias_b.to(tl.int64) * batch_stride_dbias
            + bias_h.to(tl.int64) * nhead_stride_dbias
            + m0.to(tl.int64) * stride_dbias + n0)
  r = rows - m0
  c = cols - n0
  tl.store(
      dbias + (r * stride_dbias + c), total,
      mask=(rows < seqlen_q) & (cols < seqlen_k))


@triton.jit
def mha_bwd_dsink(
    lse, delta, sink, d_sink, cu_seqlens_q, cu_seqlens_q_padded,
    nhead_stride_lse, batch_stride_lse,
    batch, seqlen_q, nhead_q, min_seqlen_q, flags,
    TILE_M: tl.constexpr,
):
  """d_sink = -sum_rows exp(sink - lse) * delta. Grid: (heads, batch)."""
  head = tl.program_id(0)
  index = tl.program_id(1)
  start, len_q = scores.sequence_extent(
      index, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      scores.CU_SEQLENS_Q, scores.CU_SEQLENS_Q_PADDED)
  if (min_seqlen_q > 0) & (len_q <= min_seqlen_q):
    len_q = 0
  first = head * nhead_stride_lse + start
  if (flags & scores.PACKED) == 0:
    first += index * batch_stride_lse
  logit = tl.load(sink + index * nhead_q + head)
  total = tl.zeros([TILE_M], tl.float32)
  for m0 in range(0, len_q, TILE_M):
    lse_tile = _load_lse(lse + first + m0, len_q - m0, TILE_M)
    delta_tile = tiles.load_rows(
        delta + first + m0, len_q - m0, 0.0, TILE_M)
    total -= tl.exp2(logit * scores.LOG2E - lse_tile) * delta_tile
  tl.store(d_sink + index * nhead_q + head, tl.sum(total, 0))
