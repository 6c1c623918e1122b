# SPDX-License-Identifier: Apache-2.0
"""Attention's gradients with those of the scores kept, for Hopper, in Gluon.

The gradient of a bias is the scores' gradients, summed where the bias is
broadcast. So the pass that computes dk and dv stores them too, rounded as its
own products take them, and dq is one product with what was stored: five
products in all, where mha/bwd_hopper.py and mha/dbias_hopper.py have nine.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import bwd_hopper, scores, scores_hopper
from third_party.aiter.kernels.mha import parts_hopper as parts
from third_party.aiter.kernels.mha_dscores import family

WHOLE = tl.constexpr(family.FEATURES["whole"])
DQ_ROWS = tl.constexpr(128)  # of a tile of dq


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim]."""
  rows, keys = constants["TILE_M"], constants["TILE_N"]
  if function == "mha_dscores_dq":
    return {**parts.tensor_map("k", keys, constants["HEAD"],
                               constants["TAIL"]),
            "dscores_desc": TensorMap("dscores", (1, 1, 64, keys))}
  return {**bwd_hopper.tensor_maps("mha_bwd_dkdv", constants),
          "dscores_desc": TensorMap("dscores", (1, 1, rows, 64))}


@gluon.jit
def _place(heads, causal):
  """Returns a block's place along the tiles, its head and its sequence.

  Under a causal mask the first tiles of a head have most to do. So that no more
  than the least is left for the end, those of eight heads take turns, of
  several sequences if one has fewer.
  """
  tiles = gl.num_programs(0)
  every = heads * gl.num_programs(2)
  together = gl.where(causal, 8, 1)
  at = gl.program_id(2) * heads + gl.program_id(1)
  at = at * tiles + gl.program_id(0)
  first = at // (tiles * together) * together
  at -= first * tiles
  together = gl.minimum(together, every - first)
  head = first + at % together
  return at // together, head % heads, head // heads


class Scratch(NamedTuple):
  """Where a sequence's gradients are: a map, and its batch and first row."""
  desc: tl.tensor
  batch: tl.tensor
  row: tl.tensor


@gluon.jit
def _scratch(desc, slot_b, q_row, index_b, flags, LENGTHS: gl.constexpr):
  """A sequence's Scratch: packed ones have tiles of rows of their own."""
  row = 0
  if LENGTHS:
    row = gl.where((flags & scores.PACKED) != 0,
                   (q_row // DQ_ROWS + index_b) * DQ_ROWS, 0)
  return Scratch(desc, slot_b, row)


@gluon.jit
def _sequence(index_b, tile, starts, batch, cu_seqlens_q, cu_seqlens_k,
              cu_seqlens_q_padded, cu_seqlens_k_padded, seqlen_q, seqlen_k,
              min_seqlen_q, left, right, sink_tokens, flags,
              TILE: gl.constexpr, LENGTHS: gl.constexpr):
  """Finds a block's sequence, that of `tile` among `starts` if packed.

  Returns:
    (its index, its tile, its batch in memory, its first row and key there, its
    Window).
  """
  if LENGTHS:
    slot_b = index_b
    if (flags & scores.PACKED) != 0:
      index_b, tile = scores_hopper.find_sequence(tile, starts, batch, TILE)
      slot_b = 0
    q_row, k_row, window = bwd_hopper.extents(
        index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
        cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, left, right,
        sink_tokens, flags)
    return index_b, tile, slot_b, q_row, k_row, window
  else:
    off = gl.where((flags & scores.TOP_LEFT) != 0, 0, seqlen_k - seqlen_q)
    return index_b, tile, index_b, 0, 0, scores_hopper.Window(
        off, left, right, sink_tokens, seqlen_q, seqlen_k)


@gluon.jit
def _put(out, smem, use, ds, head, row0, col0, BUFFERS: gl.constexpr):
  """Stores gradients [64 keys, rows] as rows of keys, by way of `smem`."""
  tma.store_wait(BUFFERS - 1)
  gl.barrier()
  M: gl.constexpr = ds.shape[1]
  smem = smem.index(use % BUFFERS)
  smem.reshape([M, 64]).permute([1, 0]).store(ds)
  fence_async_shared()
  gl.barrier()
  tma.async_store(out.desc, [out.batch, head, out.row + row0, col0], smem)


@gluon.jit
def _put_zeros(out, smem, first_head, group, low, high, n0, window, whole,
               M: gl.constexpr):
  """Stores zeros for what the tiles of rows [low, high) leave.

  Those are all tiles if `whole`, else the rest of what dq's tiles read.
  """
  tma.store_wait(0)
  gl.barrier()
  zeros = smem.index(0)
  zeros.reshape([M, 64]).store(
      gl.zeros([M, 64], zeros.dtype, hopper.rows_layout(64)))
  fence_async_shared()
  gl.barrier()
  EACH: gl.constexpr = DQ_ROWS // M
  tiles = (window.len_q + M - 1) // M
  first = gl.where(whole, 0, low // EACH * EACH)
  last = gl.where(whole, tiles, (high + EACH - 1) // EACH * EACH)
  last = gl.minimum(last, tiles)
  for g in range(group):
    for tile in range(first, last - (high - low)):
      row0 = gl.where(tile < low, tile, tile + high - low) * M
      tma.async_store(out.desc, [out.batch, first_head + g, out.row + row0, n0],
                      zeros)
  tma.store_wait(0)


@gluon.jit
def _step(dk, dv, k, v, ring, out, out_smem, head, use, row0, col0, span,
           window, terms, M: gl.constexpr, HEAD: gl.constexpr,
          TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
          STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Adds a tile of M rows to dk and dv of a warpgroup's keys."""
  S_LAYOUT: gl.constexpr = hopper.accumulator(M)
  ROWS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
  dtype: gl.constexpr = ring.q.main.dtype
  rows = gl.arange(0, M, ROWS)[None, :]
  cols = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))[:, None]
  i, phase = hopper.ring(use, STAGES)
  q = parts.tile(ring.q, i, M, HEAD, TAIL)
  do = parts.tile(ring.do, i, M, DV, DV_TAIL)
  s, dp = bwd_hopper._dkdv_products(k, v, ring, i, phase, M, HEAD, TAIL, DV,
                                    DV_TAIL)
  p, slope = bwd_hopper.probabilities(
      s, ring.lse.index(i).load(ROWS)[None, :], row0, col0, rows, cols, window,
      terms, scores_hopper.planes_at(ring.planes, i, True, FEATURES), True,
      FEATURES)
  p = bwd_hopper._seen(p, row0, col0, span, window, M, FEATURES)
  weights = p
  keep = p
  if FEATURES & scores.DROPOUT:
    keep = scores_hopper.keep_of_keys(terms, row0, col0, M)
    weights = gl.where(keep, p, 0.0)
  dv = parts.accumulate(dv, parts.operand(weights, dtype, DV), do, DV_TAIL)
  dp = warpgroup_mma_wait(2 if DV_TAIL > 0 else 1, deps=[dp])
  delta = ring.delta.index(i).load(ROWS)[None, :]
  ds, _ = bwd_hopper.score_gradients(p, dp, slope, keep, delta, terms, FEATURES)
  ds = ds.to(dtype)
  dk = parts.accumulate(dk, parts.operand(ds, dtype, HEAD), q, TAIL)
  dv = parts.wait(2 if TAIL > 0 else 1, dv, DV_TAIL)
  mbarrier.arrive(ring.do_empty.index(i))
  _put(out, out_smem, use, ds, head, row0, col0, 2)
  dk = parts.wait(0, dk, TAIL)
  mbarrier.arrive(ring.q_empty.index(i))
  return dk, dv


@gluon.jit
def _consume(w: gl.constexpr, args, M: gl.constexpr, HEAD: gl.constexpr,
             TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
             STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Computes dk and dv of 64 keys; stores their scores' gradients."""
  of_keys, out, out_smem, handed, whole = args
  (ring, k_smem, v_smem, kv_full, dk_out, dv_out, group, n0, key_end, window,
   heads, first_head, low, high) = of_keys
  ring = bwd_hopper._own(ring, w)
  out_smem = out_smem.slice(2 * w, 2)
  dk = parts.zeros(64, HEAD, TAIL)
  dv = parts.zeros(64, DV, DV_TAIL)
  n0 += w * 64
  span = (window.left + window.right).to(gl.uint32, bitcast=True)
  if high > low:
    k = parts.tile(k_smem, w, 64, HEAD, TAIL)
    v = parts.tile(v_smem, w, 64, DV, DV_TAIL)
    mbarrier.wait(kv_full.index(w), 0)
    use = 0
    for g in range(group):
      terms = scores_hopper.terms_of(heads, first_head + g, FEATURES)
      for tile in range(low, high):
        dk, dv = _step(
            dk, dv, k, v, ring, out, out_smem, first_head + g, use, tile * M,
            n0, span, window, terms, M, HEAD, TAIL, DV, DV_TAIL, STAGES,
            FEATURES)
        use += 1
  keep = 1.0
  if FEATURES & scores.DROPOUT:
    keep = heads.rp_keep
  bwd_hopper._store_gradient(dv_out, dv, keep, n0, window.len_k, key_end, DV,
                             DV_TAIL)
  bwd_hopper._store_gradient(dk_out, dk, heads.scale, n0, window.len_k, key_end,
                             HEAD, TAIL)
  _put_zeros(out, out_smem, first_head, group, low, high, n0, window, whole, M)


@gluon.jit
def _dk_consume(args, M: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
                DV: gl.constexpr, DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
                FEATURES: gl.constexpr):
  """Computes dk of a block's 64 keys; stores their scores' gradients."""
  of_keys, out, out_smem, handed, whole = args
  (ring, k_smem, v_smem, kv_full, dk_out, dv_out, group, n0, key_end, window,
   heads, first_head, low, high) = of_keys
  dk = parts.zeros(64, HEAD, TAIL)
  if high > low:
    v = parts.tile(v_smem, 0, 64, DV, DV_TAIL)
    mbarrier.wait(kv_full.index(0), 0)
    use = 0
    for g in range(group):
      terms = scores_hopper.terms_of(heads, first_head + g, FEATURES)
      for tile in range(low, high):
        dk, ds = bwd_hopper.start_dk(dk, v, ring, handed, use, terms, M, HEAD,
                                     TAIL, DV, DV_TAIL, STAGES, FEATURES)
        _put(out, out_smem, use, ds, first_head + g, tile * M, n0, 1)
        dk = bwd_hopper.end_dk(dk, ring, use, TAIL, STAGES)
        use += 1
  bwd_hopper.store_dk(dk_out, dk, k_smem, heads.scale, n0, window, key_end,
                      HEAD, TAIL)
  _put_zeros(out, out_smem, first_head, group, low, high, n0, window, whole, M)


@gluon.jit
def mha_dscores_bwd(
    q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, do_desc, do_tail,
    dscores_desc,
    q, do, lse, delta, dk, dv, bias, bias_f32, mask, alibi_slopes,
    dropout_state, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
    cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    TAIL: gl.constexpr, BLOCK_DV: gl.constexpr, DV_TAIL: gl.constexpr,
    STAGES: gl.constexpr, FEATURES: gl.constexpr, LENGTHS: gl.constexpr,
):
  """dk and dv of TILE_N keys of one kv head, and their scores' gradients.

  Of wide head dims, where keys are 64, one warpgroup computes dv and one dk.

  Arguments: bwd_hopper.mha_bwd_dkdv's, and the gradients [batch, head, row,
  key]. Grid: (tiles of keys, kv heads, batch).
  """
  BLOCKS: gl.constexpr = TILE_N // 64
  tile, head_k, index_b = _place(nhead_k, window_right < window_left)
  index_b, tile, slot_b, q_row, k_row, window = _sequence(
      index_b, tile, cu_seqlens_k, batch, cu_seqlens_q, cu_seqlens_k,
      cu_seqlens_q_padded, cu_seqlens_k_padded, seqlen_q, seqlen_k,
      min_seqlen_q, window_left, window_right, sink_tokens, flags, TILE_N,
      LENGTHS)
  key_end = seqlen_k
  n0 = tile * TILE_N
  foreign = 0
  if LENGTHS:
    foreign = flags & (scores.PACKED | scores.CU_SEQLENS_Q)
    if (flags & scores.PACKED) != 0:
      key_end = window.len_k
    if n0 >= key_end:
      return  # A packed batch has slots that no sequence needs.
  group = nhead_q // nhead_k

  row_low = gl.maximum(n0 - window.off - window_right, 0)
  last_key = gl.minimum(n0 + TILE_N, window.len_k) - 1
  row_high = gl.minimum(last_key - window.off + window_left + 1, window.len_q)
  low = gl.minimum(row_low, window.len_q) // TILE_M
  high = (gl.maximum(row_high, 0) + TILE_M - 1) // TILE_M
  high = gl.maximum(high, low)
  if LENGTHS:
    high = gl.where(n0 < window.len_k, high, low)

  b = slot_b.to(gl.int64)
  lse += b * batch_stride_lse
  delta += b * batch_stride_lse
  dk += (b * batch_stride_dk + head_k * nhead_stride_dk +
         k_row.to(gl.int64) * stride_dk)
  dv += (b * batch_stride_dv + head_k * nhead_stride_dv +
         k_row.to(gl.int64) * stride_dv)
  heads = scores_hopper.heads_of(
      index_b, nhead_q, bias, bias_f32, stride_bias, key_stride_bias,
      nhead_stride_bias, batch_stride_bias, mask, stride_mask, key_stride_mask,
      nhead_stride_mask, batch_stride_mask, alibi_slopes, dropout_state,
      softmax_scale, logits_soft_cap, drop_threshold, rp_keep, flags, FEATURES)

  q_desc = parts.Source(q_desc, q_tail, 0)
  k_desc = parts.Source(k_desc, k_tail, 0)
  v_desc = parts.Source(v_desc, v_tail, 0)
  do_desc = parts.Source(do_desc, do_tail, 0)
  q_smem = parts.allocate(STAGES, q_desc, TAIL)
  do_smem = parts.allocate(STAGES, do_desc, DV_TAIL)
  k_smem = parts.allocate(BLOCKS, k_desc, TAIL)
  v_smem = parts.allocate(BLOCKS, v_desc, DV_TAIL)
  VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
  lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTOR)
  delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTOR)
  out_smem = gl.allocate_shared_memory(
      dscores_desc.dtype,
      hopper.stack(4 if BLOCKS == 2 else 1, dscores_desc.block_type.shape),
      dscores_desc.layout)
  kv_full = mbarrier.allocate_mbarrier(batch=BLOCKS)
  q_full = mbarrier.allocate_mbarrier(batch=STAGES)
  q_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  do_full = mbarrier.allocate_mbarrier(batch=STAGES)
  do_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for w in gl.static_range(BLOCKS):
    mbarrier.init(kv_full.index(w), count=2)
  for i in gl.static_range(STAGES):
    mbarrier.init(q_full.index(i), count=2 + scores_hopper.arrivals(FEATURES))
    mbarrier.init(do_full.index(i), count=2)
    mbarrier.init(q_empty.index(i), count=2)
    mbarrier.init(do_empty.index(i), count=2)
  planes = scores_hopper.allocate_planes(heads, STAGES, BLOCKS, TILE_M, 64,
                                         FEATURES)
  ring = bwd_hopper.Rows(q_smem, do_smem, lse_smem, delta_smem, q_full, q_empty,
                         do_full, do_empty, planes)

  produce = (q_desc, k_desc, v_desc, do_desc, ring, k_smem, v_smem, kv_full,
             lse, delta, nhead_stride_lse, slot_b, head_k, group, q_row,
             k_row, n0, low, high, window,
             bwd_hopper.Matrix(q + b * batch_stride_q, stride_q,
                               nhead_stride_q, hdim_q),
             bwd_hopper.Matrix(do + b * batch_stride_do, stride_do,
                               nhead_stride_do, hdim_v),
             foreign, heads)
  of_keys = (ring, k_smem, v_smem, kv_full,
             bwd_hopper.Matrix(dk, stride_dk, nhead_stride_dk, hdim_q),
             bwd_hopper.Matrix(dv, stride_dv, nhead_stride_dv, hdim_v), group,
             n0, key_end, window, heads, head_k * group, low, high)
  handed = 0
  if BLOCKS == 1:
    handed = bwd_hopper.allocate_handed(dscores_desc.dtype, TILE_M)
  out = _scratch(dscores_desc, slot_b, q_row, index_b, flags, LENGTHS)
  consume = (of_keys, out, out_smem, handed, (flags & WHOLE) != 0)
  if BLOCKS == 2:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_M, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    FEATURES)),
        (_consume, (1, consume, TILE_M, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    FEATURES)),
        (bwd_hopper._dkdv_produce, (produce, TILE_M, HEAD, TAIL, BLOCK_DV,
                                    DV_TAIL, STAGES, BLOCKS, FEATURES)),
    ], [4, 4], [232, 40])
  else:
    gl.warp_specialize([
        (bwd_hopper._dv_consume, (of_keys, handed, TILE_M, HEAD, TAIL, BLOCK_DV,
                                  DV_TAIL, STAGES, FEATURES)),
        (_dk_consume, (consume, TILE_M, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                       FEATURES)),
        (bwd_hopper._dkdv_produce, (produce, TILE_M, HEAD, TAIL, BLOCK_DV,
                                    DV_TAIL, STAGES, BLOCKS, FEATURES)),
    ], [4, 4], [232, 40])


# ---- dq ----


@gluon.jit
def _dq_produce(args, N: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
                STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Copies every tile of keys, and of two warpgroups' gradients."""
  (k_desc, ds, k_smem, ds_smem, full, empty, slot_b, head, head_k, row0, k_row,
   low, high, k, len_k, foreign, terms) = args
  for step in range(high - low):
    col = (low + step) * N
    i, phase = hopper.ring(step, STAGES)
    mbarrier.wait(empty.index(i), phase ^ 1)
    mbarrier.expect(full.index(i), 2 * ds.desc.nbytes_per_cta)
    for w in gl.static_range(2):
      tma.async_load(ds.desc, [ds.batch, head, ds.row + row0 + w * 64, col],
                     full.index(i), ds_smem.index(2 * i + w))
    hides = scores_hopper.hides(terms, col, len_k, N, FEATURES)
    if hides | ((foreign != 0) & (col + N > len_k)):
      parts.copy_rows(k.base, k.stride, k_smem, i, len_k - col, k_row + col,
                      k.width, scores_hopper.shown_keys(terms, col), N, HEAD,
                      TAIL, (FEATURES & scores.HAS_MASK) != 0)
      mbarrier.arrive(full.index(i))
    else:
      parts.load(k_desc, slot_b, head_k, k_row + col, full.index(i), k_smem, i,
                 HEAD, TAIL)


@gluon.jit
def _dq_consume(w: gl.constexpr, args, N: gl.constexpr, HEAD: gl.constexpr,
                TAIL: gl.constexpr, STAGES: gl.constexpr):
  """Computes dq of 64 rows."""
  (k_smem, ds_smem, full, empty, dq_out, scale, row0, len_q, row_end, low,
   high, len_k) = args
  dq = parts.zeros(64, HEAD, TAIL)
  for step in range(high - low):
    i, phase = hopper.ring(step, STAGES)
    mbarrier.wait(full.index(i), phase)
    ds = ds_smem.index(2 * i + w).reshape([64, N])
    left = len_k - (low + step) * N
    if left < N:
      # Those of keys past a sequence's end may be anything, and 0 times that is
      # not 0. Maps of dense batches end with the keys: no time is lost there.
      D: gl.constexpr = hopper.rows_layout(N)
      cols = gl.arange(0, N, gl.SliceLayout(0, D))[None, :]
      ds.store(gl.where(cols < left, ds.load(D), 0.0))
      fence_async_shared()
      gl.barrier()
    k = parts.tile(k_smem, i, N, HEAD, TAIL)
    main = warpgroup_mma(ds, k.main, dq.main, is_async=True)
    tail = dq.tail
    if TAIL > 0:
      tail = warpgroup_mma(ds, k.tail, tail, is_async=True)
    dq = parts.wait(0, parts.Parts(main, tail), TAIL)
    mbarrier.arrive(empty.index(i))
  bwd_hopper._store_gradient(dq_out, dq, scale, row0 + w * 64, len_q, row_end,
                             HEAD, TAIL)


@gluon.jit
def mha_dscores_dq(
    k_desc, k_tail, dscores_desc, k, mask, dq,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    stride_dbias,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, softmax_scale,
    window_left, window_right, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    TAIL: gl.constexpr, STAGES: gl.constexpr, FEATURES: gl.constexpr,
    LENGTHS: gl.constexpr,
):
  """dq of 128 rows of one head: their scores' gradients times the keys.

  NaN where a packed sequence has more keys than there is room for, which the
  caller said it has not. Grid: (tiles of rows, heads, batch).
  """
  gl.static_assert(TILE_M == DQ_ROWS)
  tile, head, index_b = _place(nhead_q, window_right < window_left)
  tile = gl.num_programs(0) - 1 - tile
  index_b, tile, slot_b, q_row, k_row, window = _sequence(
      index_b, tile, cu_seqlens_q, batch, cu_seqlens_q, cu_seqlens_k,
      cu_seqlens_q_padded, cu_seqlens_k_padded, seqlen_q, seqlen_k, 0,
      window_left, window_right, 0, flags, TILE_M, LENGTHS)
  row_end = seqlen_q
  row0 = tile * TILE_M
  foreign = 0
  factor = softmax_scale
  if LENGTHS:
    foreign = flags & (scores.PACKED | scores.CU_SEQLENS_K)
    if (flags & scores.PACKED) != 0:
      row_end = window.len_q
      if window.len_k > stride_dbias:
        factor = float("nan")
    if row0 >= row_end:
      return  # A packed batch has slots that no sequence needs.
  last = gl.minimum(row0 + TILE_M, window.len_q) - 1
  key_high = gl.minimum(window.len_k, last + window.off + window_right + 1)
  key_low = gl.maximum(row0 + window.off - window_left, 0)
  low = key_low // TILE_N
  high = gl.where((key_low < key_high) & (row0 < window.len_q),
                  (key_high + TILE_N - 1) // TILE_N, low)
  b = slot_b.to(gl.int64)
  head_k = head // (nhead_q // nhead_k)
  k += b * batch_stride_k + head_k * nhead_stride_k
  dq += (b * batch_stride_dq + head * nhead_stride_dq +
         q_row.to(gl.int64) * stride_dq)
  # Of what makes scores the mask alone: it says which keys may hold anything.
  heads = scores_hopper.heads_of(
      index_b, nhead_q, k, k, 0, 0, 0, 0, mask, stride_mask, key_stride_mask,
      nhead_stride_mask, batch_stride_mask, k, k, softmax_scale, 0.0, 0, 0.0,
      flags, FEATURES)
  terms = scores_hopper.terms_of(heads, head, FEATURES)

  k_desc = parts.Source(k_desc, k_tail, 0)
  k_smem = parts.allocate(STAGES, k_desc, TAIL)
  ds_smem = gl.allocate_shared_memory(
      dscores_desc.dtype, hopper.stack(2 * STAGES,
                                       dscores_desc.block_type.shape),
      dscores_desc.layout)
  full = mbarrier.allocate_mbarrier(batch=STAGES)
  empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for i in gl.static_range(STAGES):
    mbarrier.init(full.index(i), count=2)
    mbarrier.init(empty.index(i), count=2)
  ds = _scratch(dscores_desc, slot_b, q_row, index_b, flags, LENGTHS)
  produce = (k_desc, ds, k_smem, ds_smem, full, empty, slot_b, head, head_k,
             row0, k_row, low, high,
             bwd_hopper.Matrix(k, stride_k, nhead_stride_k, hdim_q),
             window.len_k, foreign, terms)
  consume = (k_smem, ds_smem, full, empty,
             bwd_hopper.Matrix(dq, stride_dq, nhead_stride_dq, hdim_q),
             factor, row0, window.len_q, row_end, low, high, window.len_k)
  gl.warp_specialize([
      (_dq_consume, (0, consume, TILE_N, HEAD, TAIL, STAGES)),
      (_dq_consume, (1, consume, TILE_N, HEAD, TAIL, STAGES)),
      (_dq_produce, (produce, TILE_N, HEAD, TAIL, STAGES, FEATURES)),
  ], [4, 4], [152, 56 if FEATURES or LENGTHS else 24])
