# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention of float32 tensors, without atomics.

As mha/bwd.py has them: mha_f32_bwd_delta comes first, mha_f32_bwd_dkdv owns
keys and walks over the rows of every query head of their group, mha_f32_bwd_dq
owns rows and walks over keys. PRECISION is fwd.py's.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.mha import bwd, scores
from third_party.aiter.kernels.mha_f32.fwd import NONE

# One for any type.
mha_f32_bwd_delta = bwd.mha_bwd_delta


@triton.jit
def _load_lse(ptr, rows_left, TILE_M: tl.constexpr):
  """lse in base 2; +inf, which makes p zero, for rows without any key."""
  lse = tiles.load_rows(ptr, rows_left, float("-inf"), TILE_M)
  return tl.where(lse == float("-inf"), float("inf"), lse * scores.LOG2E)


@triton.jit
def _dkdv_step(
    dk, dv, k_tile, v_tile, tile, n0, q, do, lse, delta, stride_q, stride_do,
    hdim_q, hdim_v, seq, window, scale, MASKED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):
  """Adds one tile of rows to dk and dv; tiles of scores stand [keys, rows]."""
  m0 = tile * TILE_M
  rows_left = seq.len_q - m0
  q_tile = tiles.load_tile(
      q + m0.to(tl.int64) * stride_q, stride_q, rows_left, hdim_q, TILE_M, HEAD,
      MASKED, True)
  lse_tile = _load_lse(lse + m0, rows_left, TILE_M)
  s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
  s *= scale * scores.LOG2E
  if MASKED:
    s = scores.hide(
        s, m0, n0, seq, window, False, 1.0, True, TILE_M, TILE_N, 0,
        NONE)
  p = tl.exp2(s - lse_tile[None, :])
  do_tile = tiles.load_tile(
      do + m0.to(tl.int64) * stride_do, stride_do, rows_left, hdim_v, TILE_M,
      BLOCK_DV, MASKED, True)
  delta_tile = tiles.load_rows(delta + m0, rows_left, 0.0, TILE_M)
  dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
  ds = p * (dp - delta_tile[None, :])
  dv = tl.dot(p, do_tile, dv, input_precision=PRECISION)
  dk = tl.dot(ds, q_tile, dk, input_precision=PRECISION)
  return dk, dv


@triton.jit
def mha_f32_bwd_dkdv(
    q, k, v, do, lse, delta, dk, dv,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    softmax_scale, window_left, window_right, min_seqlen_q, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_DV: tl.constexpr, HEADS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):
  """dk and dv of TILE_N keys of one kv head; as mha_bwd_dkdv."""
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
  key = (seq.k_start + n0).to(tl.int64)
  row = seq.q_start.to(tl.int64)
  k += b * batch_stride_k + key * stride_k + h * nhead_stride_k
  v += b * batch_stride_v + key * stride_v + h * nhead_stride_v
  dk += b * batch_stride_dk + key * stride_dk + h * nhead_stride_dk
  dv += b * batch_stride_dv + key * stride_dv + h * nhead_stride_dv
  q += b * batch_stride_q + row * stride_q
  do += b * batch_stride_do + row * stride_do
  lse += b * batch_stride_lse + row
  delta += b * batch_stride_lse + row

  window = scores.Window(
      scores.offset_of(seq, flags), window_left, window_right, 0)
  keys_left = seq.len_k - n0
  k_tile = tiles.load_tile(
      k, stride_k, keys_left, hdim_q, TILE_N, HEAD, True, True)
  v_tile = tiles.load_tile(
      v, stride_v, keys_left, hdim_v, TILE_N, BLOCK_DV, True, True)
  dk_tile = tl.zeros([TILE_N, HEAD], tl.float32)
  dv_tile = tl.zeros([TILE_N, BLOCK_DV], tl.float32)

  low, full_low, full_high, high = scores.row_tiles(
      n0, tl.minimum(n0 + TILE_N, seq.len_k), seq, window, TILE_M, NONE)
  group = nhead_q // nhead_k
  for i in range(0, group):
    head = (head_k * group + i).to(tl.int64)
    q_head = q + head * nhead_stride_q
    do_head = do + head * nhead_stride_do
    lse_head = lse + head * nhead_stride_lse
    delta_head = delta + head * nhead_stride_lse
    for tile in range(full_low, full_high):
      dk_tile, dv_tile = _dkdv_step(
          dk_tile, dv_tile, k_tile, v_tile, tile, n0, q_head, do_head, lse_head,
          delta_head, stride_q, stride_do, hdim_q, hdim_v, seq, window,
          softmax_scale, False, TILE_M, TILE_N, HEAD, BLOCK_DV, PRECISION)
    cut_left = full_low - low
    for step in range(0, cut_left + high - full_high):
      tile = tl.where(step < cut_left, low, full_high - cut_left) + step
      dk_tile, dv_tile = _dkdv_step(
          dk_tile, dv_tile, k_tile, v_tile, tile, n0, q_head, do_head, lse_head,
          delta_head, stride_q, stride_do, hdim_q, hdim_v, seq, window,
          softmax_scale, True, TILE_M, TILE_N, HEAD, BLOCK_DV, PRECISION)

  # Padding after a dense sequence gets zeros.
  live = (tl.arange(0, TILE_N) < keys_left)[:, None]
  tiles.store_tile(
      dv, tl.where(live, dv_tile, 0.0), stride_dv, seq.k_rows - n0, hdim_v,
      TILE_N, BLOCK_DV)
  tiles.store_tile(
      dk, tl.where(live, dk_tile * softmax_scale, 0.0), stride_dk,
      seq.k_rows - n0, hdim_q, TILE_N, HEAD)


@triton.jit
def _dq_step(
    dq, q_tile, do_tile, lse_tile, delta_tile, tile, m0, keys, seq, window,
    scale, MASKED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HEAD: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):
  """Adds one tile of keys to dq."""
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
  p = tl.exp2(s - lse_tile[:, None])
  v_tile = tiles.load_tile(
      keys.v + n0.to(tl.int64) * keys.stride_v, keys.stride_v, keys_left,
      keys.hdim_v, TILE_N, BLOCK_DV, MASKED, True)
  dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
  ds = p * (dp - delta_tile[:, None])
  return tl.dot(ds, k_tile, dq, input_precision=PRECISION)


@triton.jit
def mha_f32_bwd_dq(
    q, k, v, do, lse, delta, dq,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    nhead_stride_lse, batch_stride_lse,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    softmax_scale, window_left, window_right, min_seqlen_q, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD: tl.constexpr,
    BLOCK_DV: tl.constexpr, HEADS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):
  """dq of TILE_M rows of one head; as mha_bwd_dq. Grid: mha_f32_fwd's."""
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
  h = head.to(tl.int64)
  head_k = (head // (nhead_q // nhead_k)).to(tl.int64)
  row = (seq.q_start + m0).to(tl.int64)
  key = seq.k_start.to(tl.int64)
  q += b * batch_stride_q + row * stride_q + h * nhead_stride_q
  do += b * batch_stride_do + row * stride_do + h * nhead_stride_do
  dq += b * batch_stride_dq + row * stride_dq + h * nhead_stride_dq
  k += b * batch_stride_k + key * stride_k + head_k * nhead_stride_k
  v += b * batch_stride_v + key * stride_v + head_k * nhead_stride_v
  lse_offset = b * batch_stride_lse + h * nhead_stride_lse + row

  keys = scores.Keys(k, stride_k, hdim_q, v, stride_v, hdim_v)
  window = scores.Window(
      scores.offset_of(seq, flags), window_left, window_right, 0)
  rows_left = seq.len_q - m0
  _, low, full_low, full_high, high = scores.key_tiles(
      m0, tl.minimum(m0 + TILE_M, seq.len_q), seq, window, TILE_N, NONE)
  q_tile = tiles.load_tile(
      q, stride_q, rows_left, hdim_q, TILE_M, HEAD, True, True)
  do_tile = tiles.load_tile(
      do, stride_do, rows_left, hdim_v, TILE_M, BLOCK_DV, True, True)
  lse_tile = _load_lse(lse + lse_offset, rows_left, TILE_M)
  delta_tile = tiles.load_rows(delta + lse_offset, rows_left, 0.0, TILE_M)
  dq_tile = tl.zeros([TILE_M, HEAD], tl.float32)

  for tile in range(full_low, full_high):
    dq_tile = _dq_step(
        dq_tile, q_tile, do_tile, lse_tile, delta_tile, tile, m0, keys, seq,
        window, softmax_scale, False, TILE_M, TILE_N, HEAD, BLOCK_DV, PRECISION)
  cut_left = full_low - low
  for step in range(0, cut_left + high - full_high):
    tile = tl.where(step < cut_left, low, full_high - cut_left) + step
    dq_tile = _dq_step(
        dq_tile, q_tile, do_tile, lse_tile, delta_tile, tile, m0, keys, seq,
        window, softmax_scale, True, TILE_M, TILE_N, HEAD, BLOCK_DV, PRECISION)

  live = (tl.arange(0, TILE_M) < rows_left)[:, None]
  tiles.store_tile(
      dq, tl.where(live, dq_tile * softmax_scale, 0.0), stride_dq,
      seq.q_rows - m0, hdim_q, TILE_M, HEAD)
