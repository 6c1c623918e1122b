# SPDX-License-Identifier: Apache-2.0
"""Flash attention backward for Hopper (sm_90), fast grade, in Gluon.

As in the plain kernels, dk and dv have one owner and dq another, so nothing is
summed by atomics. A producer warpgroup copies tiles by TMA; each of two
consumer warpgroups owns 64 keys (dk, dv) or 64 rows (dq). Probabilities and
their gradients go from registers straight into the next matrix product, which
is why dk and dv work on transposed scores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import scores

# A Gluon function calls none of Triton's; of one source it may be either.
_find_sequence = gluon.jit(scores.find_sequence.fn)


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim]."""
  rows = {"mha_bwd_dkdv": (constants["TILE_M"], 64),
          "mha_bwd_dq": (64, constants["TILE_N"])}[function]
  head, dv = constants["HEAD"], constants["BLOCK_DV"]
  return {
      "q_desc": TensorMap("q", (1, 1, rows[0], head)),
      "do_desc": TensorMap("do", (1, 1, rows[0], dv)),
      "k_desc": TensorMap("k", (1, 1, rows[1], head)),
      "v_desc": TensorMap("v", (1, 1, rows[1], dv)),
  }


@gluon.jit
def _extents(index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
             cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, flags):
  """Returns a sequence's first rows and lengths, and its mask's offset."""
  q_row = 0
  k_row = 0
  if (flags & scores.PACKED) != 0:
    q_row = gl.load(cu_seqlens_q + index_b)
    k_row = gl.load(cu_seqlens_k + index_b)
  if (flags & scores.CU_SEQLENS_Q) != 0:
    seqlen_q = (gl.load(cu_seqlens_q + index_b + 1) -
                gl.load(cu_seqlens_q + index_b))
  if (flags & scores.CU_SEQLENS_K) != 0:
    seqlen_k = (gl.load(cu_seqlens_k + index_b + 1) -
                gl.load(cu_seqlens_k + index_b))
  if (flags & scores.CU_SEQLENS_Q_PADDED) != 0:
    q_row = gl.load(cu_seqlens_q_padded + index_b)
  if (flags & scores.CU_SEQLENS_K_PADDED) != 0:
    k_row = gl.load(cu_seqlens_k_padded + index_b)
  if min_seqlen_q > 0:
    seqlen_q = gl.where(seqlen_q <= min_seqlen_q, 0, seqlen_q)
  off = gl.where((flags & scores.TOP_LEFT) != 0, 0, seqlen_k - seqlen_q)
  return q_row, k_row, seqlen_q, seqlen_k, off


@gluon.jit
def _tile_at(step, low, full_low, full_high, masked):
  """Returns the tile of a step: the tiles an edge cuts come first."""
  cut = full_low - low
  edge = gl.where(step < cut, low + step, full_high + step - cut)
  return gl.where(step < masked, edge, full_low + step - masked)


@gluon.jit
def _store(base, stride, value, row0, row_end, D: gl.constexpr):
  """Stores 64 rows of an accumulator, those before row_end."""
  STORE: gl.constexpr = hopper.rows_layout(D)
  value = gl.convert_layout(value.to(base.dtype.element_ty), STORE)
  rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
  cols = gl.arange(0, D, gl.SliceLayout(0, STORE))
  gl.store(base + rows[:, None].to(gl.int64) * stride + cols[None, :], value,
           mask=(rows < row_end)[:, None])


# ---- dk, dv ----


@gluon.jit
def _dkdv_produce(args, M: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
                  STAGES: gl.constexpr, BLOCKS: gl.constexpr):
  """Copies K and V once, then Q, dO, lse and delta of every tile of rows."""
  (q_desc, k_desc, v_desc, do_desc, q_smem, k_smem, v_smem, do_smem, lse_smem,
   delta_smem, kv_full, q_full, q_empty, do_full, do_empty, lse, delta,
   nhead_stride_lse, slot_b, head_k, group, q_row, k_row, low, high,
   seqlen_q, q, do, stride_q, nhead_stride_q,
   stride_do, nhead_stride_do, foreign) = args
  ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
  if high > low:
    for w in gl.static_range(BLOCKS):
      mbarrier.expect(kv_full.index(w),
                      k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
      tma.async_load(k_desc, [slot_b, head_k, k_row + w * 64, 0],
                     kv_full.index(w), k_smem.index(w))
      tma.async_load(v_desc, [slot_b, head_k, k_row + w * 64, 0],
                     kv_full.index(w), v_smem.index(w))
    use = 0
    for g in range(group):
      head = head_k * group + g
      for tile in range(low, high):
        row = q_row + tile * M
        i, phase = hopper.ring(use, STAGES)
        whole = (foreign == 0) | ((tile + 1) * M <= seqlen_q)
        mbarrier.wait(q_empty.index(i), phase ^ 1)
        rows = tile * M + gl.arange(0, M, ROWS)
        at = head * nhead_stride_lse + q_row + rows
        lse_tile = gl.load(lse + at, mask=rows < seqlen_q,
                           other=float("-inf"))
        delta_tile = gl.load(delta + at, mask=rows < seqlen_q, other=0.0)
        if whole:
          mbarrier.expect(q_full.index(i), q_desc.nbytes_per_cta)
          tma.async_load(q_desc, [slot_b, head, row, 0], q_full.index(i),
                         q_smem.index(i))
        else:
          hopper.copy_rows(q + head * nhead_stride_q, stride_q,
                           q_smem.index(i), seqlen_q - tile * M, row, M, D)
          mbarrier.arrive(q_full.index(i))
        # +inf makes p zero for rows without any key and past the end.
        lse_smem.index(i).store(
            gl.where(lse_tile == float("-inf"), float("inf"),
                     lse_tile * scores.LOG2E))
        mbarrier.arrive(q_full.index(i))
        mbarrier.wait(do_empty.index(i), phase ^ 1)
        if whole:
          mbarrier.expect(do_full.index(i), do_desc.nbytes_per_cta)
          tma.async_load(do_desc, [slot_b, head, row, 0], do_full.index(i),
                         do_smem.index(i))
        else:
          hopper.copy_rows(do + head * nhead_stride_do, stride_do,
                           do_smem.index(i), seqlen_q - tile * M, row, M, DV)
          mbarrier.arrive(do_full.index(i))
        delta_smem.index(i).store(delta_tile)
        mbarrier.arrive(do_full.index(i))
        use += 1


@gluon.jit
def _dkdv_step(dk, dv, k, v, q_smem, do_smem, lse_smem, delta_smem, q_full,
               q_empty, do_full, do_empty, use, row0, keys, window,
               scale, M: gl.constexpr, D: gl.constexpr,
               DV: gl.constexpr, STAGES: gl.constexpr):
  """Adds a tile of M rows to dk and dv of a warpgroup's 64 keys."""
  S_LAYOUT: gl.constexpr = hopper.accumulator(M)
  COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
  i, phase = hopper.ring(use, STAGES)
  zero = gl.zeros([64, M], gl.float32, S_LAYOUT)
  q = q_smem.index(i).reshape([M, D])
  do = do_smem.index(i).reshape([M, DV])
  mbarrier.wait(q_full.index(i), phase)
  s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
  mbarrier.wait(do_full.index(i), phase)
  dp = warpgroup_mma(v, do.permute([1, 0]), zero, use_acc=False, is_async=True)
  s = warpgroup_mma_wait(1, deps=[s])
  p = gl.exp2(s * scale - lse_smem.index(i).load(COLS)[None, :])
  # -left <= key - row <= right, as one comparison of unsigned numbers.
  diff = (keys - row0)[:, None] - gl.arange(0, M, COLS)[None, :]
  p = gl.where(diff.to(gl.uint32, bitcast=True) <= window, p, 0.0)
  # A wide tile has no registers for dv's product to run beside dp's.
  if M > 64:
    dp = warpgroup_mma_wait(0, deps=[dp])
  p_cast = gl.convert_layout(p.to(q_smem.dtype),
                             gl.DotOperandLayout(0, hopper.accumulator(DV), 2))
  if M <= 64:
    dv = warpgroup_mma(p_cast, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
  ds = p * (dp - delta_smem.index(i).load(COLS)[None, :])
  ds_cast = gl.convert_layout(ds.to(q_smem.dtype),
                              gl.DotOperandLayout(0, hopper.accumulator(D), 2))
  if M > 64:
    dv = warpgroup_mma(p_cast, do, dv, is_async=True)
  dk = warpgroup_mma(ds_cast, q, dk, is_async=True)
  dv = warpgroup_mma_wait(1, deps=[dv])
  mbarrier.arrive(do_empty.index(i))
  dk = warpgroup_mma_wait(0, deps=[dk])
  mbarrier.arrive(q_empty.index(i))
  return dk, dv


@gluon.jit
def _dkdv_consume(w: gl.constexpr, args, M: gl.constexpr, D: gl.constexpr,
                  DV: gl.constexpr, STAGES: gl.constexpr):
  """Computes dk and dv of 64 keys."""
  (q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, kv_full, q_full,
   q_empty, do_full, do_empty, dk_ptr, dv_ptr, stride_dk, stride_dv, group, n0,
   key_end, seqlen_k, off, window_left, window_right, softmax_scale, low,
   high) = args
  dk = gl.zeros([64, D], gl.float32, hopper.accumulator(D))
  dv = gl.zeros([64, DV], gl.float32, hopper.accumulator(DV))
  if high > low:
    window = (window_left + window_right).to(gl.uint32, bitcast=True)
    keys = (n0 - off + window_left + w * 64 +
            gl.arange(0, 64, gl.SliceLayout(1, hopper.accumulator(M))))
    k = k_smem.index(w).reshape([64, D])
    v = v_smem.index(w).reshape([64, DV])
    scale = softmax_scale * scores.LOG2E
    mbarrier.wait(kv_full.index(w), 0)
    use = 0
    # Every tile is masked: a second loop for whole tiles costs registers.
    for _ in range(group):
      for tile in range(low, high):
        dk, dv = _dkdv_step(
            dk, dv, k, v, q_smem, do_smem, lse_smem, delta_smem, q_full,
            q_empty, do_full, do_empty, use, tile * M, keys, window, scale,
            M, D, DV, STAGES)
        use += 1
  # Keys past a dense sequence's length may hold anything; their gradient is 0.
  live = n0 + w * 64 + gl.arange(
      0, 64, gl.SliceLayout(1, hopper.accumulator(DV)))
  dv = gl.where((live < seqlen_k)[:, None], dv, 0.0)
  _store(dv_ptr, stride_dv, dv, n0 + w * 64, key_end, DV)
  live = n0 + w * 64 + gl.arange(
      0, 64, gl.SliceLayout(1, hopper.accumulator(D)))
  dk = gl.where((live < seqlen_k)[:, None], dk * softmax_scale, 0.0)
  _store(dk_ptr, stride_dk, dk, n0 + w * 64, key_end, D)


@gluon.jit
def _split_step(acc, k, v, q_smem, do_smem, lse_smem, delta_smem, q_full,
                q_empty, do_full, do_empty, use, row0, keys, window, scale,
                M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                IS_DV: gl.constexpr):
  """Adds a tile of M rows to dv, or to dk, of a block's 64 keys."""
  S_LAYOUT: gl.constexpr = hopper.accumulator(M)
  COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
  P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, hopper.accumulator(D), 2)
  i, phase = hopper.ring(use, STAGES)
  zero = gl.zeros([64, M], gl.float32, S_LAYOUT)
  q = q_smem.index(i).reshape([M, D])
  do = do_smem.index(i).reshape([M, D])
  mbarrier.wait(q_full.index(i), phase)
  s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
  mbarrier.wait(do_full.index(i), phase)
  if IS_DV:
    s = warpgroup_mma_wait(0, deps=[s])
  else:
    dp = warpgroup_mma(v, do.permute([1, 0]), zero, use_acc=False,
                       is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
  p = gl.exp2(s * scale - lse_smem.index(i).load(COLS)[None, :])
  # -left <= key - row <= right, as one comparison of unsigned numbers.
  diff = (keys - row0)[:, None] - gl.arange(0, M, COLS)[None, :]
  p = gl.where(diff.to(gl.uint32, bitcast=True) <= window, p, 0.0)
  if IS_DV:
    mbarrier.arrive(q_empty.index(i))
    p = gl.convert_layout(p.to(q_smem.dtype), P_LAYOUT)
    acc = warpgroup_mma(p, do, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(do_empty.index(i))
  else:
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = p * (dp - delta_smem.index(i).load(COLS)[None, :])
    mbarrier.arrive(do_empty.index(i))
    ds = gl.convert_layout(ds.to(q_smem.dtype), P_LAYOUT)
    acc = warpgroup_mma(ds, q, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(q_empty.index(i))
  return acc


@gluon.jit
def _split_consume(IS_DV: gl.constexpr, args, M: gl.constexpr,
                   D: gl.constexpr, STAGES: gl.constexpr):
  """Computes dv, or dk, of a block's 64 keys.

  Head dim 256 leaves a warpgroup registers for one of the two, so both
  warpgroups compute the probabilities.
  """
  (q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, kv_full, q_full,
   q_empty, do_full, do_empty, dk_ptr, dv_ptr, stride_dk, stride_dv, group, n0,
   key_end, seqlen_k, off, window_left, window_right, softmax_scale, low,
   high) = args
  acc = gl.zeros([64, D], gl.float32, hopper.accumulator(D))
  if high > low:
    window = (window_left + window_right).to(gl.uint32, bitcast=True)
    keys = (n0 - off + window_left +
            gl.arange(0, 64, gl.SliceLayout(1, hopper.accumulator(M))))
    k = k_smem.index(0).reshape([64, D])
    v = v_smem.index(0).reshape([64, D])
    scale = softmax_scale * scores.LOG2E
    mbarrier.wait(kv_full.index(0), 0)
    use = 0
    for _ in range(group):
      for tile in range(low, high):
        acc = _split_step(
            acc, k, v, q_smem, do_smem, lse_smem, delta_smem, q_full, q_empty,
            do_full, do_empty, use, tile * M, keys, window, scale, M, D,
            STAGES, IS_DV)
        use += 1
  live = n0 + gl.arange(
      0, 64, gl.SliceLayout(1, hopper.accumulator(D)))
  if IS_DV:
    acc = gl.where((live < seqlen_k)[:, None], acc, 0.0)
    _store(dv_ptr, stride_dv, acc, n0, key_end, D)
  else:
    acc = gl.where((live < seqlen_k)[:, None], acc * softmax_scale, 0.0)
    _store(dk_ptr, stride_dk, acc, n0, key_end, D)


@gluon.jit
def mha_bwd_dkdv(
    q_desc, k_desc, v_desc, do_desc,
    q, k, v, do, lse, delta, dq, dk, dv, dbias, d_slopes,
    bias, bias_f32, alibi_slopes, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_dbias, nhead_stride_dbias, batch_stride_dbias,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    bias_batch, bias_nhead,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    BLOCK_DV: gl.constexpr, STAGES: gl.constexpr,
):
  """dk and dv of TILE_N keys of one kv head: 128, or 64 of head dim 256.

  The plain kernel's arguments after the TMA maps of q, k, v and do, which view
  them as [batch, head, row, dim]. Grid: (tiles of keys, kv heads, batch).
  """
  BLOCKS: gl.constexpr = TILE_N // 64
  tile_n = gl.program_id(0)
  head_k = gl.program_id(1)
  index_b = gl.program_id(2)
  slot_b = index_b
  if (flags & scores.PACKED) != 0:
    index_b, tile_n = _find_sequence(tile_n, cu_seqlens_k, batch, TILE_N)
    slot_b = 0
  q_row, k_row, len_q, len_k, off = _extents(
      index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
      cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, flags)
  key_end = len_k
  if (flags & scores.PACKED) == 0:
    key_end = seqlen_k
  n0 = tile_n * TILE_N
  group = nhead_q // nhead_k

  row_low = gl.maximum(n0 - off - window_right, 0)
  last_key = gl.minimum(n0 + TILE_N, len_k) - 1
  row_high = gl.minimum(last_key - off + window_left + 1, len_q)
  low = row_low // TILE_M
  high = (gl.maximum(row_high, 0) + TILE_M - 1) // TILE_M
  high = gl.where(n0 < len_k, gl.maximum(high, low), low)

  b = slot_b.to(gl.int64)
  q += b * batch_stride_q
  do += b * batch_stride_do
  lse += b * batch_stride_lse
  delta += b * batch_stride_lse
  dk += (b * batch_stride_dk + head_k * nhead_stride_dk +
         k_row.to(gl.int64) * stride_dk)
  dv += (b * batch_stride_dv + head_k * nhead_stride_dv +
         k_row.to(gl.int64) * stride_dv)
  foreign = flags & (scores.PACKED | scores.CU_SEQLENS_Q)

  dtype: gl.constexpr = q_desc.dtype
  q_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(STAGES, q_desc.block_type.shape), q_desc.layout)
  do_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(STAGES, do_desc.block_type.shape), do_desc.layout)
  k_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(BLOCKS, k_desc.block_type.shape), k_desc.layout)
  v_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(BLOCKS, v_desc.block_type.shape), v_desc.layout)
  VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
  lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTOR)
  delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTOR)
  kv_full = mbarrier.allocate_mbarrier(batch=BLOCKS)
  q_full = mbarrier.allocate_mbarrier(batch=STAGES)
  q_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  do_full = mbarrier.allocate_mbarrier(batch=STAGES)
  do_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for w in gl.static_range(BLOCKS):
    mbarrier.init(kv_full.index(w), count=1)
  for i in gl.static_range(STAGES):
    mbarrier.init(q_full.index(i), count=2)
    mbarrier.init(do_full.index(i), count=2)
    mbarrier.init(q_empty.index(i), count=2)
    mbarrier.init(do_empty.index(i), count=2)

  produce = (q_desc, k_desc, v_desc, do_desc, q_smem, k_smem, v_smem, do_smem,
             lse_smem, delta_smem, kv_full, q_full, q_empty, do_full, do_empty,
             lse, delta, nhead_stride_lse, slot_b, head_k, group, q_row,
             k_row + n0, low, high, len_q, q, do,
             stride_q, nhead_stride_q, stride_do, nhead_stride_do, foreign)
  consume = (q_smem, k_smem, v_smem, do_smem, lse_smem, delta_smem, kv_full,
             q_full, q_empty, do_full, do_empty, dk, dv, stride_dk, stride_dv,
             group, n0, key_end, len_k, off, window_left,
             window_right, softmax_scale, low, high)
  if BLOCKS == 2:
    gl.warp_specialize([
        (_dkdv_consume, (0, consume, TILE_M, HEAD, BLOCK_DV, STAGES)),
        (_dkdv_consume, (1, consume, TILE_M, HEAD, BLOCK_DV, STAGES)),
        (_dkdv_produce, (produce, TILE_M, HEAD, BLOCK_DV, STAGES, BLOCKS)),
    ], [4, 4], [232, 40])
  else:
    gl.static_assert(HEAD == BLOCK_DV)
    gl.warp_specialize([
        (_split_consume, (True, consume, TILE_M, HEAD, STAGES)),
        (_split_consume, (False, consume, TILE_M, HEAD, STAGES)),
        (_dkdv_produce, (produce, TILE_M, HEAD, BLOCK_DV, STAGES, BLOCKS)),
    ], [4, 4], [232, 40])


# ---- dq ----


@gluon.jit
def _dq_produce(args, N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
                STAGES: gl.constexpr):
  """Copies Q and dO once, then K and V of every tile of keys."""
  (q_desc, k_desc, v_desc, do_desc, q_smem, k_smem, v_smem, do_smem, q_full,
   k_full, k_empty, v_full, v_empty, slot_b, head, head_k, q_row, k_row, low,
   full_low, full_high, masked, steps, len_k, k, v, stride_k, stride_v,
   foreign) = args
  if steps > 0:
    for w in gl.static_range(2):
      mbarrier.expect(q_full.index(w),
                      q_desc.nbytes_per_cta + do_desc.nbytes_per_cta)
      tma.async_load(q_desc, [slot_b, head, q_row + w * 64, 0],
                     q_full.index(w), q_smem.index(w))
      tma.async_load(do_desc, [slot_b, head, q_row + w * 64, 0],
                     q_full.index(w), do_smem.index(w))
    for step in range(steps):
      tile = _tile_at(step, low, full_low, full_high, masked)
      row = k_row + tile * N
      i, phase = hopper.ring(step, STAGES)
      whole = (foreign == 0) | ((tile + 1) * N <= len_k)
      mbarrier.wait(k_empty.index(i), phase ^ 1)
      if whole:
        mbarrier.expect(k_full.index(i), k_desc.nbytes_per_cta)
        tma.async_load(k_desc, [slot_b, head_k, row, 0], k_full.index(i),
                       k_smem.index(i))
      else:
        hopper.copy_rows(k, stride_k, k_smem.index(i), len_k - tile * N, row,
                         N, D)
        mbarrier.arrive(k_full.index(i))
      mbarrier.wait(v_empty.index(i), phase ^ 1)
      if whole:
        mbarrier.expect(v_full.index(i), v_desc.nbytes_per_cta)
        tma.async_load(v_desc, [slot_b, head_k, row, 0], v_full.index(i),
                       v_smem.index(i))
      else:
        hopper.copy_rows(v, stride_v, v_smem.index(i), len_k - tile * N, row,
                         N, DV)
        mbarrier.arrive(v_full.index(i))


@gluon.jit
def _dq_step(dq, q, do, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step,
             tile, rows, lse, delta, len_k, off, window_left, window_right,
             scale, N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
             STAGES: gl.constexpr, MASK: gl.constexpr):
  """Adds a tile of N keys to dq of a warpgroup's 64 rows."""
  S_LAYOUT: gl.constexpr = hopper.accumulator(N)
  i, phase = hopper.ring(step, STAGES)
  zero = gl.zeros([64, N], gl.float32, S_LAYOUT)
  k = k_smem.index(i).reshape([N, D])
  v = v_smem.index(i).reshape([N, DV])
  mbarrier.wait(k_full.index(i), phase)
  s = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
  mbarrier.wait(v_full.index(i), phase)
  dp = warpgroup_mma(do, v.permute([1, 0]), zero, use_acc=False, is_async=True)
  s = warpgroup_mma_wait(1, deps=[s])
  p = gl.exp2(s * scale - lse[:, None])
  if MASK:
    keys = tile * N + gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))
    diff = keys[None, :] - (rows + off)[:, None]
    seen = (diff <= window_right) & (diff >= -window_left)
    p = gl.where(seen & (keys < len_k)[None, :], p, 0.0)
  dp = warpgroup_mma_wait(0, deps=[dp])
  mbarrier.arrive(v_empty.index(i))
  ds = p * (dp - delta[:, None])
  ds = gl.convert_layout(ds.to(k_smem.dtype),
                         gl.DotOperandLayout(0, hopper.accumulator(D), 2))
  dq = warpgroup_mma(ds, k, dq, is_async=True)
  dq = warpgroup_mma_wait(0, deps=[dq])
  mbarrier.arrive(k_empty.index(i))
  return dq


@gluon.jit
def _dq_consume(w: gl.constexpr, args, N: gl.constexpr, D: gl.constexpr,
                DV: gl.constexpr, STAGES: gl.constexpr):
  """Computes dq of 64 rows."""
  (q_smem, k_smem, v_smem, do_smem, q_full, k_full, k_empty, v_full, v_empty,
   lse, delta, dq_ptr, stride_dq, row0, row_end, len_q, len_k, off,
   window_left, window_right, softmax_scale, low, full_low, full_high, masked,
   steps) = args
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  rows = row0 + w * 64 + gl.arange(0, 64, ROWS)
  dq = gl.zeros([64, D], gl.float32, hopper.accumulator(D))
  if steps > 0:
    lse_rows = gl.load(lse + rows, mask=rows < len_q, other=float("-inf"))
    lse_rows = gl.where(lse_rows == float("-inf"), float("inf"),
                        lse_rows * scores.LOG2E)
    delta_rows = gl.load(delta + rows, mask=rows < len_q, other=0.0)
    q = q_smem.index(w).reshape([64, D])
    do = do_smem.index(w).reshape([64, DV])
    scale = softmax_scale * scores.LOG2E
    mbarrier.wait(q_full.index(w), 0)
    for step in range(masked):
      dq = _dq_step(
          dq, q, do, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step,
          _tile_at(step, low, full_low, full_high, masked), rows, lse_rows,
          delta_rows, len_k, off, window_left, window_right, scale, N, D, DV,
          STAGES, True)
    for step in range(masked, steps):
      dq = _dq_step(
          dq, q, do, k_smem, v_smem, k_full, k_empty, v_full, v_empty, step, 0,
          rows, lse_rows, delta_rows, len_k, off, window_left, window_right,
          scale, N, D, DV, STAGES, False)
  live = row0 + w * 64 + gl.arange(
      0, 64, gl.SliceLayout(1, hopper.accumulator(D)))
  dq = gl.where((live < len_q)[:, None], dq * softmax_scale, 0.0)
  _store(dq_ptr, stride_dq, dq, row0 + w * 64, row_end, D)


@gluon.jit
def mha_bwd_dq(
    q_desc, k_desc, v_desc, do_desc,
    q, k, v, do, lse, delta, dq, dk, dv, dbias, d_slopes,
    bias, bias_f32, alibi_slopes, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_dbias, nhead_stride_dbias, batch_stride_dbias,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    bias_batch, bias_nhead,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    BLOCK_DV: gl.constexpr, STAGES: gl.constexpr,
):
  """dq of 128 rows of one head.

  Arguments: mha_bwd_dkdv's. Grid: (tiles of rows, heads, batch); later tiles,
  the longest when causal, start first.
  """
  gl.static_assert(TILE_M == 128)
  tile_m = gl.num_programs(0) - 1 - gl.program_id(0)
  head = gl.program_id(1)
  index_b = gl.program_id(2)
  head_k = head // (nhead_q // nhead_k)
  slot_b = index_b
  if (flags & scores.PACKED) != 0:
    index_b, tile_m = _find_sequence(tile_m, cu_seqlens_q, batch, TILE_M)
    slot_b = 0
  dense_rows = seqlen_q
  q_row, k_row, len_q, len_k, off = _extents(
      index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
      cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, flags)
  # A skipped packed sequence's rows were zeroed before the launch.
  row_end = len_q
  if (flags & scores.PACKED) == 0:
    row_end = dense_rows
  row0 = tile_m * TILE_M

  last = gl.minimum(row0 + TILE_M, len_q) - 1
  key_high = gl.minimum(len_k, last + off + window_right + 1)
  low = gl.maximum(row0 + off - window_left, 0) // TILE_N
  high = (gl.maximum(key_high, 0) + TILE_N - 1) // TILE_N
  high = gl.where(row0 < len_q, gl.maximum(high, low), low)
  full_low = gl.maximum(row0 + TILE_M - 1 + off - window_left, 0)
  full_low = gl.minimum((full_low + TILE_N - 1) // TILE_N, high)
  full_low = gl.maximum(full_low, low)
  full_high = gl.minimum(len_k, row0 + off + window_right + 1)
  full_high = gl.minimum(gl.maximum(full_high, 0) // TILE_N, high)
  full_high = gl.maximum(full_high, full_low)
  steps = high - low
  masked = steps - (full_high - full_low)

  b = slot_b.to(gl.int64)
  k += b * batch_stride_k + head_k * nhead_stride_k
  v += b * batch_stride_v + head_k * nhead_stride_v
  lse += b * batch_stride_lse + head * nhead_stride_lse + q_row
  delta += b * batch_stride_lse + head * nhead_stride_lse + q_row
  dq += (b * batch_stride_dq + head * nhead_stride_dq +
         q_row.to(gl.int64) * stride_dq)
  foreign = flags & (scores.PACKED | scores.CU_SEQLENS_K)

  dtype: gl.constexpr = q_desc.dtype
  q_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(2, q_desc.block_type.shape), q_desc.layout)
  do_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(2, do_desc.block_type.shape), do_desc.layout)
  k_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(STAGES, k_desc.block_type.shape), k_desc.layout)
  v_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(STAGES, v_desc.block_type.shape), v_desc.layout)
  q_full = mbarrier.allocate_mbarrier(batch=2)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for w in gl.static_range(2):
    mbarrier.init(q_full.index(w), count=1)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=2)
    mbarrier.init(v_empty.index(i), count=2)

  produce = (q_desc, k_desc, v_desc, do_desc, q_smem, k_smem, v_smem, do_smem,
             q_full, k_full, k_empty, v_full, v_empty, slot_b, head, head_k,
             q_row + row0, k_row, low, full_low, full_high, masked, steps,
             len_k, k, v, stride_k, stride_v, foreign)
  consume = (q_smem, k_smem, v_smem, do_smem, q_full, k_full, k_empty, v_full,
             v_empty, lse, delta, dq, stride_dq, row0, row_end, len_q, len_k,
             off, window_left, window_right, softmax_scale, low, full_low,
             full_high, masked, steps)
  gl.warp_specialize([
      (_dq_consume, (0, consume, TILE_N, HEAD, BLOCK_DV, STAGES)),
      (_dq_consume, (1, consume, TILE_N, HEAD, BLOCK_DV, STAGES)),
      (_dq_produce, (produce, TILE_N, HEAD, BLOCK_DV, STAGES)),
  ], [4, 4], [232, 40])
