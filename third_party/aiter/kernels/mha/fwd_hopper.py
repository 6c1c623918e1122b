# SPDX-License-Identifier: Apache-2.0
"""Flash attention forward for Hopper (sm_90), fast grade, in Gluon.

A producer warpgroup copies key and value tiles by TMA; each consumer warpgroup
owns 64 query rows. A consumer keeps two matrix products in flight: the scores
of the next tile run on the tensor cores while it computes the softmax of this
one, so that exponentials hide behind products. At head dim 64, where they take
as long as the products, three warpgroups that do one thing after the other
(OVERLAP = 0) hide each other's better. Under a mask each of them then takes
only the key tiles that its own rows see (OWN_KEYS = 1).
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


@gluon.jit
def _key_tiles(row0, rows, seqlen_q, seqlen_k, off, window_left, window_right,
               N: gl.constexpr):
  """Key tiles that rows see.

  Returns:
    (lo, hi, full_lo, full_hi): tiles lo to hi - 1 are seen, full_lo to
    full_hi - 1 by every row.
  """
  last = gl.minimum(row0 + rows, seqlen_q) - 1
  col_hi = gl.minimum(seqlen_k, last + off + window_right + 1)
  col_lo = gl.maximum(row0 + off - window_left, 0)
  full_hi = gl.minimum(seqlen_k, row0 + off + window_right + 1)
  full_lo = gl.maximum(row0 + rows - 1 + off - window_left, 0)
  tile_lo = col_lo // N
  tile_hi = (gl.maximum(col_hi, 0) + N - 1) // N
  tile_hi = gl.where(row0 < seqlen_q, tile_hi, 0)
  full_hi = gl.maximum(full_hi, 0) // N
  full_lo = (full_lo + N - 1) // N
  return tile_lo, tile_hi, full_lo, full_hi


@gluon.jit
def _produce(args, N: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
             WARPGROUPS: gl.constexpr):
  """Copies Q once, then every K and V tile from the last to the first."""
  (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty,
   v_full, v_empty, slot_b, head, head_k, q_row, k_row, tile_lo, tile_hi, v,
   stride_v, foreign_rows) = args
  if tile_hi > tile_lo:
    for w in gl.static_range(WARPGROUPS):
      mbarrier.expect(q_full.index(w), q_desc.nbytes_per_cta)
      tma.async_load(q_desc, [slot_b, head, q_row + w * 64, 0],
                     q_full.index(w), q_smem.index(w))
    for step in range(tile_hi - tile_lo):
      row = k_row + (tile_hi - 1 - step) * N
      i, phase = hopper.ring(step, STAGES)
      mbarrier.wait(k_empty.index(i), phase ^ 1)
      mbarrier.expect(k_full.index(i), k_desc.nbytes_per_cta)
      tma.async_load(k_desc, [slot_b, head_k, row, 0], k_full.index(i),
                     k_smem.index(i))
      mbarrier.wait(v_empty.index(i), phase ^ 1)
      if (step == 0) & (foreign_rows > 0):
        hopper.copy_rows(v, stride_v, v_smem.index(i), N - foreign_rows, row,
                         N, DV)
        mbarrier.arrive(v_full.index(i))
      else:
        mbarrier.expect(v_full.index(i), v_desc.nbytes_per_cta)
        tma.async_load(v_desc, [slot_b, head_k, row, 0], v_full.index(i),
                       v_smem.index(i))


@gluon.jit
def _mask_scores(s, rows, first_col, seqlen_k, off, window_left, window_right,
                 N: gl.constexpr, LAYOUT: gl.constexpr):
  """Sets the scores of invisible keys to -inf."""
  cols = first_col + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
  diff = cols[None, :] - (rows + off)[:, None]
  seen = (diff <= window_right) & (diff >= -window_left)
  seen = seen & (cols < seqlen_k)[None, :]
  return gl.where(seen, s, float("-inf"))


@gluon.jit
def _step(acc, p, m, norm, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
          step, tile, rows, seqlen_k, off, window_left, window_right, scale,
          N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
          STAGES: gl.constexpr, MASK: gl.constexpr, S_LAYOUT: gl.constexpr,
          O_LAYOUT: gl.constexpr):
  """Adds tile `tile + 1`'s P V while computing tile `tile`'s P."""
  ki, k_phase = hopper.ring(step, STAGES)
  vi, v_phase = hopper.ring(step - 1, STAGES)
  zero = gl.zeros([64, N], gl.float32, S_LAYOUT)
  mbarrier.wait(k_full.index(ki), k_phase)
  k = k_smem.index(ki).reshape([N, D])
  s = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
  mbarrier.wait(v_full.index(vi), v_phase)
  acc = warpgroup_mma(p, v_smem.index(vi).reshape([N, DV]), acc, is_async=True)
  s = warpgroup_mma_wait(1, deps=[s])
  mbarrier.arrive(k_empty.index(ki))
  if MASK:
    s = _mask_scores(s, rows, tile * N, seqlen_k, off, window_left,
                     window_right, N, S_LAYOUT)
  m_new = gl.maximum(m, gl.max(s, 1))
  # A row that has seen no key yet keeps m = -inf; its shift must be finite.
  shift = m_new * scale
  if MASK:
    shift = gl.where(m_new == float("-inf"), 0.0, shift)
  e = gl.exp2(s * scale - shift[:, None])
  alpha = gl.exp2(m * scale - shift)
  norm = norm * alpha + gl.sum(e, 1)
  acc = warpgroup_mma_wait(0, deps=[acc])
  p = gl.convert_layout(e.to(p.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
  mbarrier.arrive(v_empty.index(vi))
  acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
  return acc, p, m_new, norm


@gluon.jit
def _skip_step(k_full, k_empty, v_full, v_empty, step, STAGES: gl.constexpr):
  """Lets a tile pass that none of the warpgroup's rows sees."""
  i, phase = hopper.ring(step, STAGES)
  mbarrier.wait(k_full.index(i), phase)
  mbarrier.arrive(k_empty.index(i))
  mbarrier.wait(v_full.index(i), phase)
  mbarrier.arrive(v_empty.index(i))


@gluon.jit
def _serial_step(acc, m, norm, q, k_smem, v_smem, k_full, k_empty, v_full,
                 v_empty, step, tile, rows, seqlen_k, off, window_left,
                 window_right, scale, N: gl.constexpr, D: gl.constexpr,
                 DV: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
                 S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr):
  """Adds a tile, one product after the other: other warpgroups overlap."""
  i, phase = hopper.ring(step, STAGES)
  zero = gl.zeros([64, N], gl.float32, S_LAYOUT)
  mbarrier.wait(k_full.index(i), phase)
  k = k_smem.index(i).reshape([N, D])
  s = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
  s = warpgroup_mma_wait(0, deps=[s])
  mbarrier.arrive(k_empty.index(i))
  if MASK:
    s = _mask_scores(s, rows, tile * N, seqlen_k, off, window_left,
                     window_right, N, S_LAYOUT)
  m_new = gl.maximum(m, gl.max(s, 1))
  shift = m_new * scale
  if MASK:
    shift = gl.where(m_new == float("-inf"), 0.0, shift)
  e = gl.exp2(s * scale - shift[:, None])
  alpha = gl.exp2(m * scale - shift)
  norm = norm * alpha + gl.sum(e, 1)
  acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
  p = gl.convert_layout(e.to(k_smem.dtype),
                        gl.DotOperandLayout(0, O_LAYOUT, 2))
  mbarrier.wait(v_full.index(i), phase)
  acc = warpgroup_mma(p, v_smem.index(i).reshape([N, DV]), acc, is_async=True)
  acc = warpgroup_mma_wait(0, deps=[acc])
  mbarrier.arrive(v_empty.index(i))
  return acc, m_new, norm


@gluon.jit
def _consume(w: gl.constexpr, args, N: gl.constexpr, D: gl.constexpr,
             DV: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
             OWN_KEYS: gl.constexpr):
  """Computes 64 query rows: an online softmax over the key tiles."""
  (q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, out, lse,
   sink_logit, stride_o, row0, row_end, seqlen_q, seqlen_k, off, window_left,
   window_right, softmax_scale, flags, tile_lo, tile_hi, full_lo,
   full_hi) = args
  S_LAYOUT: gl.constexpr = hopper.accumulator(N)
  O_LAYOUT: gl.constexpr = hopper.accumulator(DV)
  P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
  ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
  scale = softmax_scale * scores.LOG2E
  rows = row0 + w * 64 + gl.arange(0, 64, ROWS)
  acc = gl.zeros([64, DV], gl.float32, O_LAYOUT)
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  norm = gl.zeros([64], gl.float32, ROWS)
  if OVERLAP and tile_hi > tile_lo:
    q = q_smem.index(w).reshape([64, D])
    zero = gl.zeros([64, N], gl.float32, S_LAYOUT)
    mbarrier.wait(q_full.index(w), 0)
    mbarrier.wait(k_full.index(0), 0)
    k = k_smem.index(0).reshape([N, D])
    s = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0))
    s = _mask_scores(s, rows, (tile_hi - 1) * N, seqlen_k, off, window_left,
                     window_right, N, S_LAYOUT)
    m = gl.max(s, 1)
    shift = gl.where(m == float("-inf"), 0.0, m * scale)
    e = gl.exp2(s * scale - shift[:, None])
    norm = gl.sum(e, 1)
    p = gl.convert_layout(e.to(q_smem.dtype), P_LAYOUT)
    # Tiles that the diagonal or the end crosses, then whole tiles, then
    # tiles that the window's left edge crosses.
    right = gl.minimum(gl.maximum(tile_hi - full_hi, 1), tile_hi - tile_lo)
    whole = gl.minimum(gl.maximum(tile_hi - full_lo, right),
                       tile_hi - tile_lo)
    for step in range(1, right):
      acc, p, m, norm = _step(
          acc, p, m, norm, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
          step, tile_hi - 1 - step, rows, seqlen_k, off, window_left,
          window_right, scale, N, D, DV, STAGES, True, S_LAYOUT, O_LAYOUT)
    for step in range(right, whole):
      acc, p, m, norm = _step(
          acc, p, m, norm, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
          step, tile_hi - 1 - step, rows, seqlen_k, off, window_left,
          window_right, scale, N, D, DV, STAGES, False, S_LAYOUT, O_LAYOUT)
    for step in range(whole, tile_hi - tile_lo):
      acc, p, m, norm = _step(
          acc, p, m, norm, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
          step, tile_hi - 1 - step, rows, seqlen_k, off, window_left,
          window_right, scale, N, D, DV, STAGES, True, S_LAYOUT, O_LAYOUT)
    vi, v_phase = hopper.ring(tile_hi - tile_lo - 1, STAGES)
    mbarrier.wait(v_full.index(vi), v_phase)
    acc = warpgroup_mma(p, v_smem.index(vi).reshape([N, DV]), acc,
                        is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
  if tile_hi > tile_lo and not OVERLAP:
    q = q_smem.index(w).reshape([64, D])
    mbarrier.wait(q_full.index(w), 0)
    steps = tile_hi - tile_lo
    begin = 0
    end = steps
    if OWN_KEYS:
      own_lo, own_hi, full_lo, full_hi = _key_tiles(
          row0 + w * 64, 64, seqlen_q, seqlen_k, off, window_left,
          window_right, N)
      begin = gl.minimum(gl.maximum(tile_hi - own_hi, 0), steps)
      end = gl.minimum(gl.maximum(tile_hi - own_lo, begin), steps)
    right = gl.minimum(gl.maximum(tile_hi - full_hi, begin), end)
    whole = gl.minimum(gl.maximum(tile_hi - full_lo, right), end)
    if OWN_KEYS:
      for step in range(begin):
        _skip_step(k_full, k_empty, v_full, v_empty, step, STAGES)
    for step in range(begin, right):
      acc, m, norm = _serial_step(
          acc, m, norm, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
          step, tile_hi - 1 - step, rows, seqlen_k, off, window_left,
          window_right, scale, N, D, DV, STAGES, True, S_LAYOUT, O_LAYOUT)
    for step in range(right, whole):
      acc, m, norm = _serial_step(
          acc, m, norm, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
          step, tile_hi - 1 - step, rows, seqlen_k, off, window_left,
          window_right, scale, N, D, DV, STAGES, False, S_LAYOUT, O_LAYOUT)
    for step in range(whole, end):
      acc, m, norm = _serial_step(
          acc, m, norm, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
          step, tile_hi - 1 - step, rows, seqlen_k, off, window_left,
          window_right, scale, N, D, DV, STAGES, True, S_LAYOUT, O_LAYOUT)
    if OWN_KEYS:
      for step in range(end, steps):
        _skip_step(k_full, k_empty, v_full, v_empty, step, STAGES)

  m = m * scale
  if (flags & scores.SINK) != 0:
    m_new = gl.maximum(m, sink_logit * scores.LOG2E)
    alpha = gl.exp2(m - m_new)
    norm = norm * alpha + gl.exp2(sink_logit * scores.LOG2E - m_new)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    m = m_new
  empty = (norm == 0.0) | (rows >= seqlen_q)
  inverse = gl.convert_layout(1.0 / gl.where(empty, 1.0, norm),
                              gl.SliceLayout(1, O_LAYOUT))
  keep = gl.convert_layout(empty, gl.SliceLayout(1, O_LAYOUT)) == 0
  acc = gl.where(keep[:, None], acc * inverse[:, None], 0.0)
  value = gl.where(empty, float("-inf"), m * scores.LN2 + gl.log(norm))
  gl.store(lse + rows, value, mask=rows < row_end)
  STORE: gl.constexpr = hopper.rows_layout(DV)
  o = gl.convert_layout(acc.to(q_smem.dtype), STORE)
  o_rows = row0 + w * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
  o_cols = gl.arange(0, DV, gl.SliceLayout(0, STORE))
  gl.store(out + o_rows[:, None].to(gl.int64) * stride_o + o_cols[None, :], o,
           mask=(o_rows < row_end)[:, None])


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim]."""
  assert function == "mha_fwd", function
  head, tile_n = constants["HEAD"], constants["TILE_N"]
  return {
      "q_desc": TensorMap("q", (1, 1, 64, head)),
      "k_desc": TensorMap("k", (1, 1, tile_n, head)),
      "v_desc": TensorMap("v", (1, 1, tile_n, constants["BLOCK_DV"])),
  }


@gluon.jit
def mha_fwd(q_desc, k_desc, v_desc, q, k, v, out, lse, bias, bias_f32,
            alibi_slopes, sink, dropout_state, cu_seqlens_q, cu_seqlens_k,
            cu_seqlens_q_padded, cu_seqlens_k_padded, stride_q, nhead_stride_q,
            batch_stride_q, stride_k, nhead_stride_k, batch_stride_k, stride_v,
            nhead_stride_v, batch_stride_v, stride_o, nhead_stride_o,
            batch_stride_o, nhead_stride_lse, batch_stride_lse, stride_bias,
            nhead_stride_bias, batch_stride_bias, batch, seqlen_q, seqlen_k,
            nhead_q, nhead_k, hdim_q, hdim_v, softmax_scale, logits_soft_cap,
            drop_threshold, rp_keep, window_left, window_right,
            sink_tokens, min_seqlen_q, flags, TILE_M: gl.constexpr,
            TILE_N: gl.constexpr, HEAD: gl.constexpr, BLOCK_DV: gl.constexpr,
            STAGES: gl.constexpr, OVERLAP: gl.constexpr,
            OWN_KEYS: gl.constexpr):
  """Attention forward; the argument list of the plain kernel, plus TMA maps.

  The maps view q, k and v as [batch, head, row, dim] (packed: batch 1), with
  boxes of 64 query rows and TILE_N key rows. The grid is (tile of TILE_M rows,
  query head, batch); later tiles, the longest when causal, start first.
  """
  WARPGROUPS: gl.constexpr = TILE_M // 64
  tile = gl.num_programs(0) - 1 - gl.program_id(0)
  head = gl.program_id(1)
  index_b = gl.program_id(2)
  head_k = head // (nhead_q // nhead_k)
  slot_b = index_b
  q_row = 0
  k_row = 0
  dense_rows = seqlen_q
  if (flags & scores.PACKED) != 0:
    index_b, tile = _find_sequence(tile, cu_seqlens_q, batch, TILE_M)
    slot_b = 0
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
  row0 = tile * TILE_M
  # Rows that this block must write; the rest belong to others or to nobody.
  row_end = seqlen_q
  if (flags & scores.PACKED) == 0:
    row_end = dense_rows
  if min_seqlen_q > 0:
    seqlen_q = gl.where(seqlen_q <= min_seqlen_q, 0, seqlen_q)
  off = gl.where((flags & scores.TOP_LEFT) != 0, 0, seqlen_k - seqlen_q)

  tile_lo, tile_hi, full_lo, full_hi = _key_tiles(
      row0, TILE_M, seqlen_q, seqlen_k, off, window_left,
      window_right, TILE_N)

  # Rows of the last tile that belong to another sequence or to nobody: they
  # may hold anything, and 0 * NaN is NaN, so V's must be read as 0.
  foreign_rows = 0
  if (flags & (scores.PACKED | scores.CU_SEQLENS_K)) != 0:
    foreign_rows = tile_hi * TILE_N - seqlen_k
  v += (slot_b.to(gl.int64) * batch_stride_v + head_k * nhead_stride_v)

  sink_logit = 0.0
  if (flags & scores.SINK) != 0:
    sink_logit = gl.load(sink + index_b * nhead_q + head)
  out += (slot_b.to(gl.int64) * batch_stride_o + head * nhead_stride_o +
          q_row.to(gl.int64) * stride_o)
  lse += (slot_b.to(gl.int64) * batch_stride_lse + head * nhead_stride_lse +
          q_row)

  dtype: gl.constexpr = q_desc.dtype
  q_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(WARPGROUPS, q_desc.block_type.shape), q_desc.layout)
  k_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(STAGES, k_desc.block_type.shape), k_desc.layout)
  v_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(STAGES, v_desc.block_type.shape), v_desc.layout)
  q_full = mbarrier.allocate_mbarrier(batch=WARPGROUPS)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for w in gl.static_range(WARPGROUPS):
    mbarrier.init(q_full.index(w), count=1)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=WARPGROUPS)
    mbarrier.init(v_empty.index(i), count=WARPGROUPS)

  produce = (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full,
             k_empty, v_full, v_empty, slot_b, head, head_k, q_row + row0,
             k_row, tile_lo, tile_hi, v, stride_v, foreign_rows)
  consume = (q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
             out, lse, sink_logit, stride_o, row0, row_end, seqlen_q, seqlen_k,
             off, window_left, window_right, softmax_scale, flags, tile_lo,
             tile_hi, full_lo, full_hi)
  if WARPGROUPS == 2:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, HEAD, BLOCK_DV, STAGES, OVERLAP,
                    OWN_KEYS)),
        (_consume, (1, consume, TILE_N, HEAD, BLOCK_DV, STAGES, OVERLAP,
                    OWN_KEYS)),
        (_produce, (produce, TILE_N, BLOCK_DV, STAGES, WARPGROUPS)),
    ], [4, 4], [232, 40])
  else:
    gl.static_assert(WARPGROUPS == 3)
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, HEAD, BLOCK_DV, STAGES, OVERLAP,
                    OWN_KEYS)),
        (_consume, (1, consume, TILE_N, HEAD, BLOCK_DV, STAGES, OVERLAP,
                    OWN_KEYS)),
        (_consume, (2, consume, TILE_N, HEAD, BLOCK_DV, STAGES, OVERLAP,
                    OWN_KEYS)),
        (_produce, (produce, TILE_N, BLOCK_DV, STAGES, WARPGROUPS)),
    ], [4, 4, 4], [160, 160, 32])
