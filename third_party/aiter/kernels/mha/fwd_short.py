# SPDX-License-Identifier: Apache-2.0
"""Flash attention forward on Hopper (sm_90) by single warpgroups, in Gluon.

Of a short sequence most time goes into a block's begin and end. So a block has
64 rows, and no producer: its own warpgroup starts the copies by TMA, STAGES
tiles ahead. Registers that a producer would hold are other blocks': two to five
share a multiprocessor, and hide each other's begin, softmax and end. Where a
head is narrow that is the best for long sequences too: configs/mha.csv says for
which calls.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import fwd_hopper, scores, scores_hopper
from third_party.aiter.kernels.mha import parts_hopper as parts

tensor_maps = fwd_hopper.tensor_maps


@gluon.jit
def _copy_keys(args, step, N: gl.constexpr, HEAD: gl.constexpr,
               TAIL: gl.constexpr, STAGES: gl.constexpr,
               FEATURES: gl.constexpr):
  """Starts the copies of a step's tiles of K and of the planes."""
  (k_desc, v_desc, keys, slot_b, head_k, k_row, row0, tile_hi, steps, v,
   stride_v, hdim_v, foreign_rows, terms, window, bias_desc, head) = args
  if step < steps:
    col0 = (tile_hi - 1 - step) * N
    i, phase = hopper.ring(step, STAGES)
    full = keys.k_full.index(i)
    mbarrier.wait(keys.k_empty.index(i), phase ^ 1)
    parts.load(k_desc, slot_b, head_k, k_row + col0, full, keys.k, i, HEAD,
               TAIL)
    fwd_hopper.copy_planes(terms, bias_desc, slot_b, head, keys.planes, i, full,
                           row0, col0, window, 1, N, FEATURES)


@gluon.jit
def _copy_values(args, step, N: gl.constexpr, DV: gl.constexpr,
                 DV_TAIL: gl.constexpr, STAGES: gl.constexpr):
  """Starts the copy of a step's tile of V."""
  (k_desc, v_desc, keys, slot_b, head_k, k_row, row0, tile_hi, steps, v,
   stride_v, hdim_v, foreign_rows, terms, window, bias_desc, head) = args
  if step < steps:
    col0 = (tile_hi - 1 - step) * N
    i, phase = hopper.ring(step, STAGES)
    full = keys.v_full.index(i)
    mbarrier.wait(keys.v_empty.index(i), phase ^ 1)
    if (step == 0) & (foreign_rows > 0):
      shown = scores_hopper.shown_keys(terms, col0)
      parts.copy_rows(v, stride_v, keys.v, i, window.len_k - col0,
                      k_row + col0, hdim_v, shown, N, DV, DV_TAIL, False)
      mbarrier.arrive(full)
    else:
      parts.load(v_desc, slot_b, head_k, k_row + col0, full, keys.v, i, DV,
                 DV_TAIL)


@gluon.jit
def _step(acc, m, norm, q, keys, copies, step, tile, row0, window, terms,
          N: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
          DV: gl.constexpr, DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
          EARLY: gl.constexpr, MASK: gl.constexpr, FEATURES: gl.constexpr):
  """Adds a tile, and starts the copies of what takes its place.

  EARLY: K's as soon as there are scores, to arrive under the softmax. That is
  worth its barrier where STAGES is 1, but between the first product and
  dropout's draws, which hide each other.
  """
  i, phase = hopper.ring(step, STAGES)
  mbarrier.wait(keys.k_full.index(i), phase)
  s = parts.product(q, parts.tile(keys.k, i, N, HEAD, TAIL), 64, N, TAIL)
  s = warpgroup_mma_wait(0, deps=[s])
  s, scale = fwd_hopper.complete(s, row0, tile, window, terms, keys, step, N,
                                 STAGES, 0, MASK, FEATURES)
  if EARLY:
    _copy_keys(copies, step + STAGES, N, HEAD, TAIL, STAGES, FEATURES)
  e, m, alpha = fwd_hopper.weigh(s, scale, m, row0, tile, window, N, MASK,
                                 FEATURES)
  norm = norm * alpha + gl.sum(e, 1)
  acc = parts.scale_rows(acc, alpha, DV, DV_TAIL)
  p = fwd_hopper.weights_of(e, row0, tile, terms, keys.v.main.dtype, N, DV,
                            FEATURES)
  mbarrier.wait(keys.v_full.index(i), phase)
  acc = parts.accumulate(acc, p, parts.tile(keys.v, i, N, DV, DV_TAIL),
                         DV_TAIL)
  acc = parts.wait(0, acc, DV_TAIL)
  mbarrier.arrive(keys.v_empty.index(i))
  if not EARLY:
    _copy_keys(copies, step + STAGES, N, HEAD, TAIL, STAGES, FEATURES)
  _copy_values(copies, step + STAGES, N, DV, DV_TAIL, STAGES)
  return acc, m, norm


@gluon.jit
def mha_fwd(q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, bias_desc, q, k, v,
            out, lse, bias, bias_f32, mask, alibi_slopes, sink, dropout_state,
            cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
            cu_seqlens_k_padded, stride_q, nhead_stride_q, batch_stride_q,
            stride_k, nhead_stride_k, batch_stride_k, stride_v, nhead_stride_v,
            batch_stride_v, stride_o, nhead_stride_o, batch_stride_o,
            nhead_stride_lse, batch_stride_lse, stride_bias, key_stride_bias,
            nhead_stride_bias, batch_stride_bias, stride_mask, key_stride_mask,
            nhead_stride_mask, batch_stride_mask, batch, seqlen_q, seqlen_k,
            nhead_q, nhead_k, hdim_q, hdim_v, softmax_scale, logits_soft_cap,
            drop_threshold, rp_keep, window_left, window_right, sink_tokens,
            min_seqlen_q, flags,
            TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
            TAIL: gl.constexpr, BLOCK_DV: gl.constexpr, DV_TAIL: gl.constexpr,
            STAGES: gl.constexpr, FEATURES: gl.constexpr,
            EARLY: gl.constexpr = 0, BATCH_FIRST: gl.constexpr = 0):
  """Attention forward; fwd_hopper.py says what arguments and grid are."""
  gl.static_assert(TILE_M == 64)
  gl.static_assert(
      FEATURES & (scores.SINK_TOKENS | scores.HAS_MASK | scores.MAYBE) == 0)
  DV: gl.constexpr = BLOCK_DV
  N: gl.constexpr = TILE_N
  tile, head, index_b = fwd_hopper.place(BATCH_FIRST)
  head_k = head // (nhead_q // nhead_k)
  slot_b = index_b
  dense_rows = seqlen_q
  if (flags & scores.PACKED) != 0:
    index_b, tile = scores_hopper.find_sequence(
        tile, cu_seqlens_q, batch, TILE_M)
    slot_b = 0
  q_row, seqlen_q = scores_hopper.sequence_extent(
      index_b, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      scores.CU_SEQLENS_Q, scores.CU_SEQLENS_Q_PADDED)
  k_row, seqlen_k = scores_hopper.sequence_extent(
      index_b, cu_seqlens_k, cu_seqlens_k_padded, seqlen_k, flags,
      scores.CU_SEQLENS_K, scores.CU_SEQLENS_K_PADDED)
  row0 = tile * TILE_M
  # Rows that this block must write; the rest belong to others or to nobody.
  row_end = seqlen_q
  if (flags & scores.PACKED) == 0:
    row_end = dense_rows
  if row0 >= row_end:
    return  # A packed batch has slots that no sequence needs.
  if min_seqlen_q > 0:
    seqlen_q = gl.where(seqlen_q <= min_seqlen_q, 0, seqlen_q)
  off = gl.where((flags & scores.TOP_LEFT) != 0, 0, seqlen_k - seqlen_q)
  window = scores_hopper.Window(off, window_left, window_right, 0, seqlen_q,
                                seqlen_k)
  tile_lo, tile_hi, full_lo, full_hi = fwd_hopper.key_tiles(
      row0, TILE_M, window, N)
  steps = gl.maximum(tile_hi - tile_lo, 0)
  # Rows of the last tile that belong to another sequence or to nobody: they
  # may hold anything, and 0 * NaN is NaN, so V's must be read as 0.
  foreign_rows = 0
  if (flags & (scores.PACKED | scores.CU_SEQLENS_K)) != 0:
    foreign_rows = tile_hi * N - seqlen_k
  b = slot_b.to(gl.int64)
  lead_k = parts.lead(b * batch_stride_k + head_k * nhead_stride_k, hdim_q)
  lead_v = parts.lead(b * batch_stride_v + head_k * nhead_stride_v, hdim_v)
  v += b * batch_stride_v + head_k * nhead_stride_v - lead_v
  # As in fwd_hopper.py, where what dropout keeps is written.
  if FEATURES == scores.DROPOUT:
    mask += index_b * batch_stride_mask + head * nhead_stride_mask
  heads = scores_hopper.heads_of(
      index_b, nhead_q, bias, bias_f32, stride_bias, key_stride_bias,
      nhead_stride_bias, batch_stride_bias, mask, stride_mask, key_stride_mask,
      nhead_stride_mask, batch_stride_mask, alibi_slopes, dropout_state,
      softmax_scale, logits_soft_cap, drop_threshold, rp_keep, flags, FEATURES)
  terms = scores_hopper.terms_of(heads, head, FEATURES)

  q_desc = parts.Source(q_desc, q_tail, -lead_k)
  k_desc = parts.Source(k_desc, k_tail, -lead_k)
  v_desc = parts.Source(v_desc, v_tail, -lead_v)
  q_smem = parts.allocate(1, q_desc, TAIL)
  k_smem = parts.allocate(STAGES, k_desc, TAIL)
  v_smem = parts.allocate(STAGES, v_desc, DV_TAIL)
  q_full = mbarrier.allocate_mbarrier(batch=1)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  mbarrier.init(q_full.index(0), count=1)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i),
                  count=1 + fwd_hopper.plane_arrivals(FEATURES))
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=1)
    mbarrier.init(v_empty.index(i), count=1)
  planes = fwd_hopper.allocate_planes(heads, bias_desc, STAGES, 1, N, FEATURES)
  keys = fwd_hopper.Keys(k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                         planes, k_full, k_empty)
  copies = (k_desc, v_desc, keys, slot_b, head_k, k_row, row0, tile_hi, steps,
            v, stride_v, hdim_v + lead_v, foreign_rows, terms, window,
            bias_desc, head)

  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  rows = row0 + gl.arange(0, 64, ROWS)
  acc = parts.zeros(64, DV, DV_TAIL)
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  norm = gl.zeros([64], gl.float32, ROWS)
  if steps > 0:
    parts.load(q_desc, slot_b, head, q_row + row0, q_full.index(0), q_smem, 0,
               HEAD, TAIL)
    for step in gl.static_range(STAGES):
      _copy_keys(copies, step, N, HEAD, TAIL, STAGES, FEATURES)
      _copy_values(copies, step, N, DV, DV_TAIL, STAGES)
    mbarrier.wait(q_full.index(0), 0)
  q_tile = parts.tile(q_smem, 0, 64, HEAD, TAIL)
  # Tiles that the diagonal or the end alone crosses, then whole tiles, then
  # tiles that the window's left edge crosses.
  whole = gl.minimum(gl.maximum(tile_hi - full_lo, 0), steps)
  right = gl.minimum(gl.maximum(tile_hi - full_hi, 0), whole)
  for step in range(right):
    acc, m, norm = _step(
        acc, m, norm, q_tile, keys, copies, step, tile_hi - 1 - step, row0,
        window, terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES, EARLY,
        fwd_hopper.ONLY_LAST, FEATURES)
  for step in range(right, whole):
    acc, m, norm = _step(
        acc, m, norm, q_tile, keys, copies, step, tile_hi - 1 - step, row0,
        window, terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES, EARLY,
        False, FEATURES)
  for step in range(whole, steps):
    acc, m, norm = _step(
        acc, m, norm, q_tile, keys, copies, step, tile_hi - 1 - step, row0,
        window, terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES, EARLY,
        True, FEATURES)

  m *= fwd_hopper.unit_of(terms, FEATURES)
  if (flags & scores.SINK) != 0:
    logit = gl.load(sink + index_b * nhead_q + head) * scores.LOG2E
    m_new = gl.maximum(m, logit)
    alpha = gl.exp2(m - m_new)
    norm = norm * alpha + gl.exp2(logit - m_new)
    acc = parts.scale_rows(acc, alpha, DV, DV_TAIL)
    m = m_new
  # A NaN is not 0, and shows.
  live = (norm != 0.0) & (rows < seqlen_q)
  inverse = 1.0 / gl.where(live, norm, 1.0)
  if FEATURES & scores.DROPOUT:
    inverse *= terms.rp_keep
  acc = parts.scale_rows(acc, inverse, DV, DV_TAIL)
  value = gl.where(live, m * scores.LN2 + gl.log(norm), float("-inf"))
  lse += b * batch_stride_lse + head * nhead_stride_lse + q_row
  gl.store(lse + rows, value, mask=rows < row_end)
  out += (b * batch_stride_o + head * nhead_stride_o +
          q_row.to(gl.int64) * stride_o)
  parts.store(out, stride_o, acc, live, row0, row_end, lead_v, hdim_v, DV,
              DV_TAIL)
