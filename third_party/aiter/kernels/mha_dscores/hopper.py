# SPDX-License-Identifier: Apache-2.0
"""Attention's gradients with those of the scores kept, for Hopper, in Gluon.

The gradient of a bias is the scores' gradients, summed where the bias is
broadcast. So the pass that computes dk and dv stores them too, rounded as its
own products take them, and dq is one product with what was stored: five
products in all, where mha/bwd_hopper.py and mha/dbias_hopper.py have nine.
"""

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


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim]."""
  head, rows = constants["HEAD"], constants["TILE_M"]
  if function == "mha_dscores_dq":
    return {"k_desc": TensorMap("k", (1, 1, constants["TILE_N"], head)),
            "dscores_desc": TensorMap("dscores",
                                      (1, 1, 64, constants["TILE_N"]))}
  return {"q_desc": TensorMap("q", (1, 1, rows, head)),
          "k_desc": TensorMap("k", (1, 1, 64, head)),
          "v_desc": TensorMap("v", (1, 1, 64, constants["BLOCK_DV"])),
          "do_desc": TensorMap("do", (1, 1, rows, constants["BLOCK_DV"])),
          "dscores_desc": TensorMap("dscores", (1, 1, rows, 64))}


@gluon.jit
def _put(desc, smem, ds, batch, head, row0, col0):
  """Stores gradients [64 keys, rows] as rows of keys, by way of `smem`."""
  tma.store_wait(1)
  gl.barrier()
  M: gl.constexpr = ds.shape[1]
  smem.reshape([M, 64]).permute([1, 0]).store(ds)
  fence_async_shared()
  gl.barrier()
  tma.async_store(desc, [batch, head, row0, col0], smem)


@gluon.jit
def _step(dk, dv, k, v, ring, out_desc, out_smem, batch, head, use, row0, col0,
          span, window, terms, M: gl.constexpr, HEAD: gl.constexpr,
          DV: gl.constexpr, STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Adds a tile of M rows to dk and dv of a warpgroup's 64 keys."""
  S_LAYOUT: gl.constexpr = hopper.accumulator(M)
  ROWS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
  dtype: gl.constexpr = ring.q.main.dtype
  rows = gl.arange(0, M, ROWS)[None, :]
  cols = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))[:, None]
  i, phase = hopper.ring(use, STAGES)
  q = parts.tile(ring.q, i, M, HEAD, 0)
  do = parts.tile(ring.do, i, M, DV, 0)
  s, dp = bwd_hopper._dkdv_products(k, v, ring, i, phase, M, HEAD, 0, DV, 0)
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
  dv = parts.accumulate(dv, parts.operand(weights, dtype, DV), do, 0)
  dp = warpgroup_mma_wait(1, deps=[dp])
  delta = ring.delta.index(i).load(ROWS)[None, :]
  ds, _ = bwd_hopper.score_gradients(p, dp, slope, keep, delta, terms, FEATURES)
  ds = ds.to(dtype)
  dk = parts.accumulate(dk, parts.operand(ds, dtype, HEAD), q, 0)
  dv = parts.wait(1, dv, 0)
  mbarrier.arrive(ring.do_empty.index(i))
  _put(out_desc, out_smem.index(use % 2), ds, batch, head, row0, col0)
  dk = parts.wait(0, dk, 0)
  mbarrier.arrive(ring.q_empty.index(i))
  return dk, dv


@gluon.jit
def _consume(w: gl.constexpr, args, M: gl.constexpr, HEAD: gl.constexpr,
             DV: gl.constexpr, STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Computes dk and dv of 64 keys, and stores their scores' gradients."""
  (ring, k_smem, v_smem, kv_full, dk_out, dv_out, group, n0, key_end, window,
   heads, first_head, low, high, out_desc, out_smem, batch) = args
  ring = bwd_hopper._own(ring, w)
  out_smem = out_smem.slice(2 * w, 2)
  dk = parts.zeros(64, HEAD, 0)
  dv = parts.zeros(64, DV, 0)
  n0 += w * 64
  span = (window.left + window.right).to(gl.uint32, bitcast=True)
  if high > low:
    k = parts.tile(k_smem, w, 64, HEAD, 0)
    v = parts.tile(v_smem, w, 64, DV, 0)
    mbarrier.wait(kv_full.index(w), 0)
    use = 0
    for g in range(group):
      terms = scores_hopper.terms_of(heads, first_head + g, FEATURES)
      for tile in range(low, high):
        dk, dv = _step(
            dk, dv, k, v, ring, out_desc, out_smem, batch, first_head + g, use,
            tile * M, n0, span, window, terms, M, HEAD, DV, STAGES, FEATURES)
        use += 1
  keep = 1.0
  if FEATURES & scores.DROPOUT:
    keep = heads.rp_keep
  bwd_hopper._store_gradient(dv_out, dv, keep, n0, window.len_k, key_end, DV, 0)
  bwd_hopper._store_gradient(dk_out, dk, heads.scale, n0, window.len_k, key_end,
                             HEAD, 0)
  # Tiles that nobody sees have no gradient; one of zeros serves them all.
  tma.store_wait(0)
  gl.barrier()
  zeros = out_smem.index(0)
  zeros.reshape([M, 64]).store(
      gl.zeros([M, 64], zeros.dtype, hopper.rows_layout(64)))
  fence_async_shared()
  gl.barrier()
  tiles = (window.len_q + M - 1) // M
  for g in range(group):
    for tile in range(tiles - (high - low)):
      row0 = gl.where(tile < low, tile, tile + high - low) * M
      tma.async_store(out_desc, [batch, first_head + g, row0, n0], zeros)
  tma.store_wait(0)


@gluon.jit
def mha_dscores_bwd(
    q_desc, k_desc, v_desc, do_desc, dscores_desc,
    q, do, lse, delta, dk, dv, bias, bias_f32, mask, alibi_slopes,
    dropout_state, cu_seqlens_q, cu_seqlens_k,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    BLOCK_DV: gl.constexpr, STAGES: gl.constexpr, FEATURES: gl.constexpr,
):
  """dk and dv of 128 keys of one kv head, and their scores' gradients.

  Arguments: bwd_hopper.mha_bwd_dkdv's, of dense batches of one length, and the
  gradients [batch, head, row, key]. Grid: (tiles of keys, kv heads, batch).
  """
  gl.static_assert(TILE_N == 128)
  n0 = gl.program_id(0) * TILE_N
  head_k = gl.program_id(1)
  index_b = gl.program_id(2)
  _, _, window = bwd_hopper.extents(
      index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q, cu_seqlens_k, seqlen_q,
      seqlen_k, min_seqlen_q, window_left, window_right, sink_tokens, flags)
  group = nhead_q // nhead_k

  row_low = gl.maximum(n0 - window.off - window_right, 0)
  last_key = gl.minimum(n0 + TILE_N, window.len_k) - 1
  row_high = gl.minimum(last_key - window.off + window_left + 1, window.len_q)
  low = gl.minimum(row_low, window.len_q) // TILE_M
  high = (gl.maximum(row_high, 0) + TILE_M - 1) // TILE_M
  high = gl.maximum(high, low)

  b = index_b.to(gl.int64)
  lse += b * batch_stride_lse
  delta += b * batch_stride_lse
  dk += b * batch_stride_dk + head_k * nhead_stride_dk
  dv += b * batch_stride_dv + head_k * nhead_stride_dv
  heads = scores_hopper.heads_of(
      index_b, nhead_q, bias, bias_f32, stride_bias, key_stride_bias,
      nhead_stride_bias, batch_stride_bias, mask, stride_mask, key_stride_mask,
      nhead_stride_mask, batch_stride_mask, alibi_slopes, dropout_state,
      softmax_scale, logits_soft_cap, drop_threshold, rp_keep, flags, FEATURES)

  q_desc = parts.Parts(q_desc, q_desc)
  k_desc = parts.Parts(k_desc, k_desc)
  v_desc = parts.Parts(v_desc, v_desc)
  do_desc = parts.Parts(do_desc, do_desc)
  q_smem = parts.allocate(STAGES, q_desc, 0)
  do_smem = parts.allocate(STAGES, do_desc, 0)
  k_smem = parts.allocate(2, k_desc, 0)
  v_smem = parts.allocate(2, v_desc, 0)
  VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
  lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTOR)
  delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTOR)
  out_smem = gl.allocate_shared_memory(
      dscores_desc.dtype, hopper.stack(4, dscores_desc.block_type.shape),
      dscores_desc.layout)
  kv_full = mbarrier.allocate_mbarrier(batch=2)
  q_full = mbarrier.allocate_mbarrier(batch=STAGES)
  q_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  do_full = mbarrier.allocate_mbarrier(batch=STAGES)
  do_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for w in gl.static_range(2):
    mbarrier.init(kv_full.index(w), count=2)
  for i in gl.static_range(STAGES):
    mbarrier.init(q_full.index(i), count=2 + scores_hopper.arrivals(FEATURES))
    mbarrier.init(do_full.index(i), count=2)
    mbarrier.init(q_empty.index(i), count=2)
    mbarrier.init(do_empty.index(i), count=2)
  planes = scores_hopper.allocate_planes(heads, STAGES, 2, TILE_M, 64, FEATURES)
  ring = bwd_hopper.Rows(q_smem, do_smem, lse_smem, delta_smem, q_full, q_empty,
                         do_full, do_empty, planes)

  produce = (q_desc, k_desc, v_desc, do_desc, ring, k_smem, v_smem, kv_full,
             lse, delta, nhead_stride_lse, index_b, head_k, group, 0, 0, n0,
             low, high, window,
             bwd_hopper.Matrix(q + b * batch_stride_q, stride_q,
                               nhead_stride_q, hdim_q),
             bwd_hopper.Matrix(do + b * batch_stride_do, stride_do,
                               nhead_stride_do, hdim_v), 0, heads)
  consume = (ring, k_smem, v_smem, kv_full,
             bwd_hopper.Matrix(dk, stride_dk, nhead_stride_dk, hdim_q),
             bwd_hopper.Matrix(dv, stride_dv, nhead_stride_dv, hdim_v), group,
             n0, seqlen_k, window, heads, head_k * group, low, high,
             dscores_desc, out_smem, index_b)
  gl.warp_specialize([
      (_consume, (0, consume, TILE_M, HEAD, BLOCK_DV, STAGES, FEATURES)),
      (_consume, (1, consume, TILE_M, HEAD, BLOCK_DV, STAGES, FEATURES)),
      (bwd_hopper._dkdv_produce, (produce, TILE_M, HEAD, 0, BLOCK_DV, 0, STAGES,
                                  2, FEATURES)),
  ], [4, 4], [232, 40])


# ---- dq ----


@gluon.jit
def _dq_produce(args, N: gl.constexpr, STAGES: gl.constexpr):
  """Copies every tile of keys, and of two warpgroups' gradients."""
  (k_desc, ds_desc, k_smem, ds_smem, full, empty, batch, head, head_k, row0,
   low, high) = args
  for step in range(high - low):
    col = (low + step) * N
    i, phase = hopper.ring(step, STAGES)
    mbarrier.wait(empty.index(i), phase ^ 1)
    mbarrier.expect(full.index(i),
                    k_desc.nbytes_per_cta + 2 * ds_desc.nbytes_per_cta)
    for w in gl.static_range(2):
      tma.async_load(ds_desc, [batch, head, row0 + w * 64, col], full.index(i),
                     ds_smem.index(2 * i + w))
    tma.async_load(k_desc, [batch, head_k, col, 0], full.index(i),
                   k_smem.index(i))


@gluon.jit
def _dq_consume(w: gl.constexpr, args, N: gl.constexpr, HEAD: gl.constexpr,
                STAGES: gl.constexpr):
  """Computes dq of 64 rows."""
  (k_smem, ds_smem, full, empty, dq_out, scale, row0, seqlen_q, low,
   high) = args
  dq = gl.zeros([64, HEAD], gl.float32, hopper.accumulator(HEAD))
  for step in range(high - low):
    i, phase = hopper.ring(step, STAGES)
    mbarrier.wait(full.index(i), phase)
    dq = warpgroup_mma(ds_smem.index(2 * i + w).reshape([64, N]),
                       k_smem.index(i).reshape([N, HEAD]), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(empty.index(i))
  bwd_hopper._store_gradient(dq_out, parts.Parts(dq, dq), scale, row0 + w * 64,
                             seqlen_q, seqlen_q, HEAD, 0)


@gluon.jit
def mha_dscores_dq(
    k_desc, dscores_desc, dq, stride_dq, nhead_stride_dq, batch_stride_dq,
    seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, softmax_scale, window_left,
    window_right, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    STAGES: gl.constexpr,
):
  """dq of 128 rows of one head: their scores' gradients times the keys.

  Grid: (tiles of rows, heads, batch).
  """
  gl.static_assert(TILE_M == 128)
  row0 = gl.program_id(0) * TILE_M
  head = gl.program_id(1)
  index_b = gl.program_id(2)
  off = gl.where((flags & scores.TOP_LEFT) != 0, 0, seqlen_k - seqlen_q)
  last = gl.minimum(row0 + TILE_M, seqlen_q) - 1
  key_high = gl.minimum(seqlen_k, last + off + window_right + 1)
  low = gl.maximum(row0 + off - window_left, 0) // TILE_N
  high = (gl.maximum(key_high, 0) + TILE_N - 1) // TILE_N
  high = gl.maximum(high, low)
  dq += index_b.to(gl.int64) * batch_stride_dq + head * nhead_stride_dq

  k_smem = gl.allocate_shared_memory(
      k_desc.dtype, hopper.stack(STAGES, k_desc.block_type.shape),
      k_desc.layout)
  ds_smem = gl.allocate_shared_memory(
      dscores_desc.dtype, hopper.stack(2 * STAGES,
                                       dscores_desc.block_type.shape),
      dscores_desc.layout)
  full = mbarrier.allocate_mbarrier(batch=STAGES)
  empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for i in gl.static_range(STAGES):
    mbarrier.init(full.index(i), count=1)
    mbarrier.init(empty.index(i), count=2)
  produce = (k_desc, dscores_desc, k_smem, ds_smem, full, empty, index_b, head,
             head // (nhead_q // nhead_k), row0, low, high)
  consume = (k_smem, ds_smem, full, empty,
             bwd_hopper.Matrix(dq, stride_dq, nhead_stride_dq, hdim_q),
             softmax_scale, row0, seqlen_q, low, high)
  gl.warp_specialize([
      (_dq_consume, (0, consume, TILE_N, HEAD, STAGES)),
      (_dq_consume, (1, consume, TILE_N, HEAD, STAGES)),
      (_dq_produce, (produce, TILE_N, STAGES)),
  ], [4, 1], [152, 24])
