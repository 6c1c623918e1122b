# SPDX-License-Identifier: Apache-2.0
"""Flash attention backward for Hopper (sm_90), in Gluon.

As in the plain kernels, dk and dv have one owner and dq another, so nothing is
summed by atomics. A producer warpgroup copies tiles by TMA; each of two
consumer warpgroups owns 64 keys (dk, dv) or 64 rows (dq). Probabilities and
their gradients go from registers straight into the next matrix product, which
is why dk and dv work on transposed scores.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import parts_hopper as parts
from third_party.aiter.kernels.mha import scores, scores_hopper


class Rows(NamedTuple):
  """Rings of tiles of rows and their barriers."""
  q: parts.Parts
  do: parts.Parts
  lse: tl.tensor
  delta: tl.tensor
  q_full: tl.tensor
  q_empty: tl.tensor
  do_full: tl.tensor
  do_empty: tl.tensor
  planes: scores_hopper.Planes  # These come and go with q's tiles.


class Keys(NamedTuple):
  """Rings of tiles of keys and their barriers."""
  k: parts.Parts
  v: parts.Parts
  k_full: tl.tensor
  k_empty: tl.tensor
  v_full: tl.tensor
  v_empty: tl.tensor
  planes: scores_hopper.Planes  # These come and go with k's tiles.


class Matrix(NamedTuple):
  """A matrix in memory: its first row, and what its other rows are told by."""
  base: tl.tensor
  stride: tl.tensor
  nhead_stride: tl.tensor
  width: tl.tensor


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim]."""
  of_q, of_k = {"mha_bwd_dkdv": (constants["TILE_M"], 64),
                "mha_bwd_dq": (64, constants["TILE_N"])}[function]
  qk = constants["HEAD"], constants["TAIL"]
  dv = constants["BLOCK_DV"], constants["DV_TAIL"]
  return {**parts.tensor_map("q", of_q, *qk),
          **parts.tensor_map("k", of_k, *qk),
          **parts.tensor_map("v", of_k, *dv),
          **parts.tensor_map("do", of_q, *dv)}


@gluon.jit
def extents(index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
            cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, left,
            right, sink_tokens, flags):
  """Returns a sequence's first rows in memory, and its Window."""
  q_row, seqlen_q = scores_hopper.sequence_extent(
      index_b, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      scores.CU_SEQLENS_Q, scores.CU_SEQLENS_Q_PADDED)
  k_row, seqlen_k = scores_hopper.sequence_extent(
      index_b, cu_seqlens_k, cu_seqlens_k_padded, seqlen_k, flags,
      scores.CU_SEQLENS_K, scores.CU_SEQLENS_K_PADDED)
  if min_seqlen_q > 0:
    seqlen_q = gl.where(seqlen_q <= min_seqlen_q, 0, seqlen_q)
  off = gl.where((flags & scores.TOP_LEFT) != 0, 0, seqlen_k - seqlen_q)
  return q_row, k_row, scores_hopper.Window(off, left, right, sink_tokens,
                                            seqlen_q, seqlen_k)


@gluon.jit
def probabilities(s, lse, row0, col0, rows, cols, window, terms, planes,
                  MASK: gl.constexpr, FEATURES: gl.constexpr):
  """Probabilities from products q.k, without the window of the window.

  Args:
    s: the products; rows and cols, which count from row0 and col0, broadcast
      to it, and so does lse, in base 2.
    planes: the products' own tiles of the bias and the mask.

  Returns:
    (probabilities, derivative of the soft cap, or 1).
  """
  slope = 1.0
  if FEATURES & scores.OF_SCORES:
    s, slope = scores_hopper.complete(s, row0, col0, rows, cols, window, terms,
                                      planes, MASK, FEATURES)
    s -= lse
    if FEATURES & scores.HAS_BIAS:
      # Where all biases of a row are huge, lse has lost what it adds to them.
      s = gl.minimum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)
    p = gl.exp2(s)
    if FEATURES & scores.HIDES:
      # A row past the end hides no key, whose NaN it must not see either.
      p = gl.where(lse == float("inf"), 0.0, p)
  else:
    p = gl.exp2(s * (terms.scale * scores.LOG2E) - lse)
  return p, slope


@gluon.jit
def _store_gradient(gradient, acc, factor, row0, length, row_end,
                    HEAD: gl.constexpr, TAIL: gl.constexpr):
  """Stores 64 rows of acc * factor; rows past a sequence's length get 0."""
  rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, hopper.accumulator(HEAD)))
  acc = parts.scale_rows(acc, gl.where(rows < length, factor, 0.0), HEAD, TAIL)
  parts.store(gradient.base, gradient.stride, acc, rows < length, row0,
              row_end, 0, gradient.width, HEAD, TAIL)


# ---- dk, dv ----


@gluon.jit
def _dkdv_produce(args, M: gl.constexpr, HEAD: gl.constexpr,
                  TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
                  STAGES: gl.constexpr, BLOCKS: gl.constexpr,
                  FEATURES: gl.constexpr):
  """Copies K and V once, then Q, dO, lse and delta of every tile of rows."""
  (q_desc, k_desc, v_desc, do_desc, ring, k_smem, v_smem, kv_full, lse, delta,
   nhead_stride_lse, slot_b, head_k, group, q_row, k_row, n0, low, high, window,
   q, do, foreign, heads) = args
  len_q = window.len_q
  ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
  if high > low:
    for w in gl.static_range(BLOCKS):
      parts.load(k_desc, slot_b, head_k, k_row + n0 + w * 64,
                 kv_full.index(w), k_smem, w, HEAD, TAIL)
      parts.load(v_desc, slot_b, head_k, k_row + n0 + w * 64,
                 kv_full.index(w), v_smem, w, DV, DV_TAIL)
    use = 0
    for g in range(group):
      head = head_k * group + g
      terms = scores_hopper.terms_of(heads, head, FEATURES)
      for tile in range(low, high):
        row = q_row + tile * M
        i, phase = hopper.ring(use, STAGES)
        q_full, do_full = ring.q_full.index(i), ring.do_full.index(i)
        whole = (foreign == 0) | ((tile + 1) * M <= len_q)
        mbarrier.wait(ring.q_empty.index(i), phase ^ 1)
        scores_hopper.copy_planes(terms, ring.planes, i, q_full, tile * M, n0,
                                  0, 64, window, BLOCKS, M, 64, FEATURES)
        rows = tile * M + gl.arange(0, M, ROWS)
        at = head * nhead_stride_lse + q_row + rows
        lse_tile = gl.load(lse + at, mask=rows < len_q, other=float("-inf"))
        delta_tile = gl.load(delta + at, mask=rows < len_q, other=0.0)
        if whole:
          parts.load(q_desc, slot_b, head, row, q_full, ring.q, i, HEAD, TAIL)
        else:
          parts.copy_rows(q.base + head * q.nhead_stride, q.stride, ring.q, i,
                          len_q - tile * M, row, q.width, q.base, M, HEAD, TAIL,
                          False)
          mbarrier.arrive(q_full)
        # +inf makes p zero for rows without any key and past the end.
        ring.lse.index(i).store(
            gl.where(lse_tile == float("-inf"), float("inf"),
                     lse_tile * scores.LOG2E))
        mbarrier.arrive(q_full)
        mbarrier.wait(ring.do_empty.index(i), phase ^ 1)
        if whole:
          parts.load(do_desc, slot_b, head, row, do_full, ring.do, i, DV,
                     DV_TAIL)
        else:
          parts.copy_rows(do.base + head * do.nhead_stride, do.stride, ring.do,
                          i, len_q - tile * M, row, do.width, do.base, M, DV,
                          DV_TAIL, False)
          mbarrier.arrive(do_full)
        ring.delta.index(i).store(delta_tile)
        mbarrier.arrive(do_full)
        use += 1


@gluon.jit
def _seen(p, row0, col0, span, window, M: gl.constexpr,
          FEATURES: gl.constexpr):
  """Probabilities [64 keys, M rows], 0 where the window hides a key."""
  LAYOUT: gl.constexpr = hopper.accumulator(M)
  keys = (col0 - window.off + window.left +
          gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)))[:, None]
  # -left <= key - row <= right, as one comparison of unsigned numbers.
  diff = (keys - row0) - gl.arange(0, M, gl.SliceLayout(0, LAYOUT))[None, :]
  seen = diff.to(gl.uint32, bitcast=True) <= span
  if FEATURES & scores.SINK_TOKENS:
    leading = keys < window.sink_tokens - window.off + window.left
    seen = seen | (leading & (diff <= window.left + window.right))
  return gl.where(seen, p, 0.0)


@gluon.jit
def _dkdv_products(k, v, ring, i, phase, M: gl.constexpr, HEAD: gl.constexpr,
                   TAIL: gl.constexpr, DV: gl.constexpr,
                   DV_TAIL: gl.constexpr):
  """Starts the transposed scores and their gradients; the scores are done."""
  mbarrier.wait(ring.q_full.index(i), phase)
  s = parts.product(k, parts.tile(ring.q, i, M, HEAD, TAIL), 64, M, TAIL)
  mbarrier.wait(ring.do_full.index(i), phase)
  dp = parts.product(v, parts.tile(ring.do, i, M, DV, DV_TAIL), 64, M, DV_TAIL)
  s = warpgroup_mma_wait(2 if DV_TAIL > 0 else 1, deps=[s])
  return s, dp


@gluon.jit
def score_gradients(p, dp, slope, keep, delta, terms,
                    FEATURES: gl.constexpr):
  """Gradients of the products q.k (unscaled), and of the complete scores."""
  if FEATURES & scores.DROPOUT:
    dp = gl.where(keep, dp * terms.rp_keep, 0.0)
  complete = p * (dp - delta)
  if FEATURES & scores.HIDES:
    # A hidden key has no gradient, whatever it and its value hold.
    complete = gl.where(p == 0.0, 0.0, complete)
  ds = complete
  if FEATURES & scores.SOFT_CAP:
    ds *= slope
  return ds, complete


@gluon.jit
def _dkdv_step(dk, dv, k, v, ring, use, row0, col0, span, window, terms,
               M: gl.constexpr, HEAD: gl.constexpr,
               TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
               STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Adds a tile of M rows to dk and dv of a warpgroup's 64 keys."""
  S_LAYOUT: gl.constexpr = hopper.accumulator(M)
  ROWS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
  dtype: gl.constexpr = ring.q.main.dtype
  rows = gl.arange(0, M, ROWS)[None, :]
  cols = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))[:, None]
  i, phase = hopper.ring(use, STAGES)
  q = parts.tile(ring.q, i, M, HEAD, TAIL)
  do = parts.tile(ring.do, i, M, DV, DV_TAIL)
  s, dp = _dkdv_products(k, v, ring, i, phase, M, HEAD, TAIL, DV, DV_TAIL)
  p, slope = probabilities(
      s, ring.lse.index(i).load(ROWS)[None, :], row0, col0, rows, cols, window,
      terms, scores_hopper.planes_at(ring.planes, i, True, FEATURES), True,
      FEATURES)
  p = _seen(p, row0, col0, span, window, M, FEATURES)
  weights = p
  keep = p
  if FEATURES & scores.DROPOUT:
    keep = scores_hopper.keep_of_keys(terms, row0, col0, M)
    weights = gl.where(keep, p, 0.0)
  # A wide tile has no registers for dv's product to run beside dp's.
  if M > 64:
    dp = warpgroup_mma_wait(0, deps=[dp])
  weights = parts.operand(weights, dtype, DV)
  if M <= 64:
    dv = parts.accumulate(dv, weights, do, DV_TAIL)
    dp = warpgroup_mma_wait(2 if DV_TAIL > 0 else 1, deps=[dp])
  delta = ring.delta.index(i).load(ROWS)[None, :]
  ds, _ = score_gradients(p, dp, slope, keep, delta, terms, FEATURES)
  ds = parts.operand(ds, dtype, HEAD)
  if M > 64:
    dv = parts.accumulate(dv, weights, do, DV_TAIL)
  dk = parts.accumulate(dk, ds, q, TAIL)
  dv = parts.wait(2 if TAIL > 0 else 1, dv, DV_TAIL)
  mbarrier.arrive(ring.do_empty.index(i))
  dk = parts.wait(0, dk, TAIL)
  mbarrier.arrive(ring.q_empty.index(i))
  return dk, dv


@gluon.jit
def _own(ring, w: gl.constexpr):
  """The ring as a warpgroup takes it."""
  return Rows(ring.q, ring.do, ring.lse, ring.delta, ring.q_full, ring.q_empty,
              ring.do_full, ring.do_empty,
              scores_hopper.own_planes(ring.planes, w))


@gluon.jit
def _dkdv_consume(w: gl.constexpr, args, M: gl.constexpr, HEAD: gl.constexpr,
                  TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
                  STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Computes dk and dv of 64 keys."""
  (ring, k_smem, v_smem, kv_full, dk_out, dv_out, group, n0, key_end, window,
   heads, first_head, low, high) = args
  ring = _own(ring, w)
  dk = parts.zeros(64, HEAD, TAIL)
  dv = parts.zeros(64, DV, DV_TAIL)
  n0 += w * 64
  if high > low:
    span = (window.left + window.right).to(gl.uint32, bitcast=True)
    k = parts.tile(k_smem, w, 64, HEAD, TAIL)
    v = parts.tile(v_smem, w, 64, DV, DV_TAIL)
    mbarrier.wait(kv_full.index(w), 0)
    use = 0
    # Every tile is masked: a second loop for whole tiles costs registers.
    for g in range(group):
      terms = scores_hopper.terms_of(heads, first_head + g, FEATURES)
      for tile in range(low, high):
        dk, dv = _dkdv_step(
            dk, dv, k, v, ring, use, tile * M, n0, span, window, terms,
            M, HEAD, TAIL, DV, DV_TAIL, STAGES, FEATURES)
        use += 1
  # Keys past a dense sequence's length may hold anything; their gradient is 0.
  keep = 1.0
  if FEATURES & scores.DROPOUT:
    keep = heads.rp_keep
  _store_gradient(dv_out, dv, keep, n0, window.len_k, key_end, DV, DV_TAIL)
  _store_gradient(dk_out, dk, heads.scale, n0, window.len_k, key_end, HEAD,
                  TAIL)


# A wide head dim leaves a warpgroup registers for one of the two: one computes
# probabilities and dv, and hands the probabilities, times a soft cap's
# derivative, to the other, which computes the scores' gradients and dk.


class Handed(NamedTuple):
  """A ring of probabilities; the sign says what dropout keeps."""
  p: tl.tensor
  full: tl.tensor
  empty: tl.tensor


@gluon.jit
def allocate_handed(dtype: gl.constexpr, M: gl.constexpr):
  """An empty ring of two tiles of M rows."""
  full = mbarrier.allocate_mbarrier(batch=2)
  empty = mbarrier.allocate_mbarrier(batch=2)
  for i in gl.static_range(2):
    mbarrier.init(full.index(i), count=1)
    mbarrier.init(empty.index(i), count=1)
  return Handed(
      gl.allocate_shared_memory(dtype, [2, 64, M],
                                gl.NVMMASharedLayout(2 * M, 16, 2)),
      full, empty)


@gluon.jit
def _store_part(gradient, acc, smem, column, factor, row0, length, row_end,
                N: gl.constexpr):
  STORE: gl.constexpr = hopper.rows_layout(N)
  rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, hopper.accumulator(N)))
  live = (rows < length)[:, None]
  smem = smem.index(0).reshape([64, N])
  smem.store(gl.where(live, acc * factor, 0.0).to(smem.dtype))
  gl.barrier()
  rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
  cols = gl.arange(0, N, gl.SliceLayout(0, STORE))
  # Head dims are multiples of 8; so a mask never cuts 16 bytes.
  width = (gradient.width - column) // 8 * 8
  gl.store(gradient.base + column +
           rows[:, None].to(gl.int64) * gradient.stride + cols[None, :],
           smem.load(STORE), mask=(rows < row_end)[:, None] &
           (cols < width)[None, :])


@gluon.jit
def _store_by(gradient, acc, smem, factor, row0, length, row_end,
              HEAD: gl.constexpr, TAIL: gl.constexpr):
  """_store_gradient by way of a matrix like it that nobody reads any more."""
  _store_part(gradient, acc.main, smem.main, 0, factor, row0, length, row_end,
              HEAD)
  if TAIL > 0:
    _store_part(gradient, acc.tail, smem.tail, HEAD, factor, row0, length,
                row_end, TAIL)


@gluon.jit
def _dv_step(dv, k, ring, handed, use, row0, col0, span, window, terms,
             M: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
             DV: gl.constexpr, DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
             FEATURES: gl.constexpr):
  """Adds a tile of M rows to dv of 64 keys; hands its probabilities over."""
  S_LAYOUT: gl.constexpr = hopper.accumulator(M)
  ROWS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
  dtype: gl.constexpr = ring.q.main.dtype
  rows = gl.arange(0, M, ROWS)[None, :]
  cols = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))[:, None]
  i, phase = hopper.ring(use, STAGES)
  j, handed_phase = hopper.ring(use, 2)
  mbarrier.wait(ring.q_full.index(i), phase)
  s = parts.product(k, parts.tile(ring.q, i, M, HEAD, TAIL), 64, M, TAIL)
  s = warpgroup_mma_wait(0, deps=[s])
  p, slope = probabilities(
      s, ring.lse.index(i).load(ROWS)[None, :], row0, col0, rows, cols, window,
      terms, scores_hopper.planes_at(ring.planes, i, True, FEATURES), True,
      FEATURES)
  p = _seen(p, row0, col0, span, window, M, FEATURES)
  mbarrier.arrive(ring.q_empty.index(i))
  weights = p
  if FEATURES & scores.SOFT_CAP:
    p *= slope
  if FEATURES & scores.DROPOUT:
    keep = scores_hopper.keep_of_keys(terms, row0, col0, M)
    weights = gl.where(keep, weights, 0.0)
    p = gl.where(keep, p, -p)
  mbarrier.wait(handed.empty.index(j), handed_phase ^ 1)
  handed.p.index(j).store(p.to(dtype))
  mbarrier.arrive(handed.full.index(j))
  mbarrier.wait(ring.do_full.index(i), phase)
  dv = parts.accumulate(dv, parts.operand(weights, dtype, DV),
                        parts.tile(ring.do, i, M, DV, DV_TAIL), DV_TAIL)
  dv = parts.wait(0, dv, DV_TAIL)
  mbarrier.arrive(ring.do_empty.index(i))
  return dv


@gluon.jit
def _dv_consume(args, handed, M: gl.constexpr, HEAD: gl.constexpr,
                TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
                STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Computes dv of a block's 64 keys."""
  (ring, k_smem, v_smem, kv_full, dk_out, dv_out, group, n0, key_end, window,
   heads, first_head, low, high) = args
  dv = parts.zeros(64, DV, DV_TAIL)
  if high > low:
    span = (window.left + window.right).to(gl.uint32, bitcast=True)
    k = parts.tile(k_smem, 0, 64, HEAD, TAIL)
    mbarrier.wait(kv_full.index(0), 0)
    use = 0
    for g in range(group):
      terms = scores_hopper.terms_of(heads, first_head + g, FEATURES)
      for tile in range(low, high):
        dv = _dv_step(dv, k, ring, handed, use, tile * M, n0, span, window,
                      terms, M, HEAD, TAIL, DV, DV_TAIL, STAGES, FEATURES)
        use += 1
    # Whoever has the last probabilities has done with the values.
    j, handed_phase = hopper.ring(use - 1, 2)
    mbarrier.wait(handed.empty.index(j), handed_phase)
  keep = 1.0
  if FEATURES & scores.DROPOUT:
    keep = heads.rp_keep
  _store_by(dv_out, dv, v_smem, keep, n0, window.len_k, key_end, DV, DV_TAIL)


@gluon.jit
def start_dk(dk, v, ring, handed, use, terms, M: gl.constexpr,
             HEAD: gl.constexpr, TAIL: gl.constexpr, DV: gl.constexpr,
             DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
             FEATURES: gl.constexpr):
  """Starts to add a tile of M rows to dk of 64 keys.

  Returns:
    (dk, the scores' gradients [64 keys, M rows]).
  """
  S_LAYOUT: gl.constexpr = hopper.accumulator(M)
  dtype: gl.constexpr = ring.q.main.dtype
  i, phase = hopper.ring(use, STAGES)
  j, handed_phase = hopper.ring(use, 2)
  mbarrier.wait(ring.do_full.index(i), phase)
  dp = parts.product(v, parts.tile(ring.do, i, M, DV, DV_TAIL), 64, M, DV_TAIL)
  delta = ring.delta.index(i).load(gl.SliceLayout(0, S_LAYOUT))[None, :]
  mbarrier.wait(handed.full.index(j), handed_phase)
  p = handed.p.index(j).load(S_LAYOUT).to(gl.float32)
  dp = warpgroup_mma_wait(0, deps=[dp])
  mbarrier.arrive(handed.empty.index(j))
  mbarrier.arrive(ring.do_empty.index(i))
  keep = p
  if FEATURES & scores.DROPOUT:
    keep = p >= 0
    p = gl.abs(p)
  ds, complete = score_gradients(p, dp, 1.0, keep, delta, terms, FEATURES)
  ds = ds.to(dtype)
  # Whoever made the probabilities has waited for q.
  dk = parts.accumulate(dk, parts.operand(ds, dtype, HEAD),
                        parts.tile(ring.q, i, M, HEAD, TAIL), TAIL)
  return dk, ds


@gluon.jit
def end_dk(dk, ring, use, TAIL: gl.constexpr, STAGES: gl.constexpr):
  """Ends what start_dk started."""
  dk = parts.wait(0, dk, TAIL)
  mbarrier.arrive(ring.q_empty.index(use % STAGES))
  return dk


@gluon.jit
def store_dk(dk_out, dk, k_smem, scale, n0, window, key_end,
             HEAD: gl.constexpr, TAIL: gl.constexpr):
  """Stores dk; whoever made the last probabilities has done with the keys."""
  _store_by(dk_out, dk, k_smem, scale, n0, window.len_k, key_end, HEAD, TAIL)


@gluon.jit
def _dk_consume(args, handed, M: gl.constexpr, HEAD: gl.constexpr,
                TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
                STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Computes dk of a block's 64 keys."""
  (ring, k_smem, v_smem, kv_full, dk_out, dv_out, group, n0, key_end, window,
   heads, first_head, low, high) = args
  dk = parts.zeros(64, HEAD, TAIL)
  if high > low:
    v = parts.tile(v_smem, 0, 64, DV, DV_TAIL)
    mbarrier.wait(kv_full.index(0), 0)
    use = 0
    for g in range(group):
      terms = scores_hopper.terms_of(heads, first_head + g, FEATURES)
      for _ in range(low, high):
        dk, ds = start_dk(dk, v, ring, handed, use, terms, M, HEAD, TAIL, DV,
                          DV_TAIL, STAGES, FEATURES)
        dk = end_dk(dk, ring, use, TAIL, STAGES)
        use += 1
  store_dk(dk_out, dk, k_smem, heads.scale, n0, window, key_end, HEAD, TAIL)


@gluon.jit
def mha_bwd_dkdv(
    q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, do_desc, do_tail,
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
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    TAIL: gl.constexpr, BLOCK_DV: gl.constexpr, DV_TAIL: gl.constexpr,
    STAGES: gl.constexpr, FEATURES: gl.constexpr,
):
  """dk and dv of TILE_N keys of one kv head: 128, or 64 of wide head dims.

  The plain kernel's arguments after the TMA maps of q, k, v and do, which view
  them as [batch, head, row, dim]. Grid: (tiles of keys, kv heads, batch). Of
  the features that change scores the kernel has those of FEATURES, and takes
  them to be there.
  """
  BLOCKS: gl.constexpr = TILE_N // 64
  tile_n = gl.program_id(0)
  head_k = gl.program_id(1)
  index_b = gl.program_id(2)
  slot_b = index_b
  if (flags & scores.PACKED) != 0:
    index_b, tile_n = scores_hopper.find_sequence(
        tile_n, cu_seqlens_k, batch, TILE_N)
    slot_b = 0
  q_row, k_row, window = extents(
      index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
      cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, window_left,
      window_right, sink_tokens, flags)
  key_end = window.len_k
  if (flags & scores.PACKED) == 0:
    key_end = seqlen_k
  n0 = tile_n * TILE_N
  if n0 >= key_end:
    return  # A packed batch has slots that no sequence needs.
  group = nhead_q // nhead_k

  row_low = gl.maximum(n0 - window.off - window_right, 0)
  last_key = gl.minimum(n0 + TILE_N, window.len_k) - 1
  row_high = gl.minimum(last_key - window.off + window_left + 1, window.len_q)
  if FEATURES & scores.SINK_TOKENS:
    row_high = gl.where(n0 < sink_tokens, window.len_q, row_high)
  low = row_low // TILE_M
  high = (gl.maximum(row_high, 0) + TILE_M - 1) // TILE_M
  high = gl.where(n0 < window.len_k, gl.maximum(high, low), low)

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
  ring = Rows(q_smem, do_smem, lse_smem, delta_smem, q_full, q_empty, do_full,
              do_empty, planes)

  produce = (q_desc, k_desc, v_desc, do_desc, ring, k_smem, v_smem, kv_full,
             lse, delta, nhead_stride_lse, slot_b, head_k, group, q_row,
             k_row, n0, low, high, window,
             Matrix(q + b * batch_stride_q, stride_q, nhead_stride_q, hdim_q),
             Matrix(do + b * batch_stride_do, stride_do, nhead_stride_do,
                    hdim_v),
             flags & (scores.PACKED | scores.CU_SEQLENS_Q), heads)
  consume = (ring, k_smem, v_smem, kv_full,
             Matrix(dk, stride_dk, nhead_stride_dk, hdim_q),
             Matrix(dv, stride_dv, nhead_stride_dv, hdim_v), group, n0,
             key_end, window, heads, head_k * group, low, high)
  if BLOCKS == 2:
    gl.warp_specialize([
        (_dkdv_consume, (0, consume, TILE_M, HEAD, TAIL, BLOCK_DV, DV_TAIL,
                         STAGES, FEATURES)),
        (_dkdv_consume, (1, consume, TILE_M, HEAD, TAIL, BLOCK_DV, DV_TAIL,
                         STAGES, FEATURES)),
        (_dkdv_produce, (produce, TILE_M, HEAD, TAIL, BLOCK_DV, DV_TAIL,
                         STAGES, BLOCKS, FEATURES)),
    ], [4, 4], scores_hopper.registers(FEATURES))
  else:
    handed = allocate_handed(do_desc.main.dtype, TILE_M)
    gl.warp_specialize([
        (_dv_consume, (consume, handed, TILE_M, HEAD, TAIL, BLOCK_DV, DV_TAIL,
                       STAGES, FEATURES)),
        (_dk_consume, (consume, handed, TILE_M, HEAD, TAIL, BLOCK_DV, DV_TAIL,
                       STAGES, FEATURES)),
        (_dkdv_produce, (produce, TILE_M, HEAD, TAIL, BLOCK_DV, DV_TAIL,
                         STAGES, BLOCKS, FEATURES)),
    ], [4, 4], scores_hopper.registers(FEATURES))


# ---- dq ----


class Steps(NamedTuple):
  """The order of tiles of keys: those that an edge cuts come first."""
  sinks: tl.tensor
  low: tl.tensor
  full_low: tl.tensor
  full_high: tl.tensor
  masked: tl.tensor
  count: tl.tensor


@gluon.jit
def _tile_at(step, steps, FEATURES: gl.constexpr):
  """Returns the tile of a step."""
  cut = steps.full_low - steps.low
  after = step - steps.sinks
  tile = gl.where(after < cut, steps.low + after,
                  steps.full_high + after - cut)
  if FEATURES & scores.SINK_TOKENS:
    tile = gl.where(step < steps.sinks, step, tile)
  return gl.where(step < steps.masked, tile,
                  steps.full_low + step - steps.masked)


@gluon.jit
def _dq_produce(args, N: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
                DV: gl.constexpr, DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
                FEATURES: gl.constexpr):
  """Copies Q and dO once, then K and V of every tile of keys."""
  (q_desc, k_desc, v_desc, do_desc, q_smem, do_smem, q_full, ring, slot_b,
   head, head_k, q_row, k_row, row0, steps, window, k, v, foreign,
   terms) = args
  len_k = window.len_k
  if steps.count > 0:
    for w in gl.static_range(2):
      row = q_row + row0 + w * 64
      parts.load(q_desc, slot_b, head, row, q_full.index(w), q_smem, w, HEAD,
                 TAIL)
      parts.load(do_desc, slot_b, head, row, q_full.index(w), do_smem, w, DV,
                 DV_TAIL)
    for step in range(steps.count):
      tile = _tile_at(step, steps, FEATURES)
      row = k_row + tile * N
      i, phase = hopper.ring(step, STAGES)
      k_full, v_full = ring.k_full.index(i), ring.v_full.index(i)
      whole = (foreign == 0) | ((tile + 1) * N <= len_k)
      mbarrier.wait(ring.k_empty.index(i), phase ^ 1)
      hides = scores_hopper.hides(terms, tile * N, len_k, N, FEATURES)
      if whole & (not hides):
        parts.load(k_desc, slot_b, head_k, row, k_full, ring.k, i, HEAD, TAIL)
      else:
        shown = scores_hopper.shown_keys(terms, tile * N)
        parts.copy_rows(k.base, k.stride, ring.k, i, len_k - tile * N, row,
                        k.width, shown, N, HEAD, TAIL,
                        (FEATURES & scores.HAS_MASK) != 0)
        mbarrier.arrive(k_full)
      scores_hopper.copy_planes(terms, ring.planes, i, k_full, row0, tile * N,
                                64, 0, window, 2, 64, N, FEATURES)
      mbarrier.wait(ring.v_empty.index(i), phase ^ 1)
      if whole:
        parts.load(v_desc, slot_b, head_k, row, v_full, ring.v, i, DV, DV_TAIL)
      else:
        parts.copy_rows(v.base, v.stride, ring.v, i, len_k - tile * N, row,
                        v.width, v.base, N, DV, DV_TAIL, False)
        mbarrier.arrive(v_full)


@gluon.jit
def _dq_step(dq, d_slope, q, do, ring, step, tile, row0, lse, delta, window,
             terms, N: gl.constexpr, HEAD: gl.constexpr,
             TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
             STAGES: gl.constexpr, MASK: gl.constexpr,
             FEATURES: gl.constexpr):
  """Adds a tile of N keys to dq of a warpgroup's 64 rows."""
  S_LAYOUT: gl.constexpr = hopper.accumulator(N)
  dtype: gl.constexpr = ring.k.main.dtype
  rows = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))[:, None]
  cols = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))[None, :]
  i, phase = hopper.ring(step, STAGES)
  k = parts.tile(ring.k, i, N, HEAD, TAIL)
  v = parts.tile(ring.v, i, N, DV, DV_TAIL)
  mbarrier.wait(ring.k_full.index(i), phase)
  s = parts.product(q, k, 64, N, TAIL)
  mbarrier.wait(ring.v_full.index(i), phase)
  dp = parts.product(do, v, 64, N, DV_TAIL)
  s = warpgroup_mma_wait(2 if DV_TAIL > 0 else 1, deps=[s])
  p, slope = probabilities(
      s, lse[:, None], row0, tile * N, rows, cols, window, terms,
      scores_hopper.planes_at(ring.planes, i, False, FEATURES), MASK, FEATURES)
  diff = tile * N + cols - (row0 + rows + window.off)
  if MASK:
    seen = diff >= -window.left
    if FEATURES & scores.SINK_TOKENS:
      seen = seen | (tile * N + cols < window.sink_tokens)
    seen = seen & (diff <= window.right)
    p = gl.where(seen & (tile * N + cols < window.len_k), p, 0.0)
  dp = warpgroup_mma_wait(0, deps=[dp])
  mbarrier.arrive(ring.v_empty.index(i))
  keep = p
  if FEATURES & scores.DROPOUT:
    keep = scores_hopper.keep_of_rows(terms, row0, tile * N, N)
  ds, complete = score_gradients(p, dp, slope, keep, delta[:, None], terms,
                                 FEATURES)
  if FEATURES & scores.ALIBI:
    distance = scores_hopper.penalty(row0, tile * N, rows, cols, window, 1.0)
    d_slope -= gl.sum(complete * distance, 1)
  dq = parts.accumulate(dq, parts.operand(ds, dtype, HEAD), k, TAIL)
  dq = parts.wait(0, dq, TAIL)
  mbarrier.arrive(ring.k_empty.index(i))
  return dq, d_slope


@gluon.jit
def _dq_consume(w: gl.constexpr, args, N: gl.constexpr, HEAD: gl.constexpr,
                TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
                STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Computes dq of 64 rows."""
  (q_smem, do_smem, q_full, ring, lse, delta, dq_out, d_slopes, row0, row_end,
   window, terms, steps) = args
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  ring = Keys(ring.k, ring.v, ring.k_full, ring.k_empty, ring.v_full,
              ring.v_empty, scores_hopper.own_planes(ring.planes, w))
  row0 += w * 64
  rows = row0 + gl.arange(0, 64, ROWS)
  dq = parts.zeros(64, HEAD, TAIL)
  d_slope = gl.zeros([64], gl.float32, ROWS)
  if steps.count > 0:
    lse_rows = gl.load(lse + rows, mask=rows < window.len_q,
                       other=float("-inf"))
    lse_rows = gl.where(lse_rows == float("-inf"), float("inf"),
                        lse_rows * scores.LOG2E)
    delta_rows = gl.load(delta + rows, mask=rows < window.len_q, other=0.0)
    q = parts.tile(q_smem, w, 64, HEAD, TAIL)
    do = parts.tile(do_smem, w, 64, DV, DV_TAIL)
    mbarrier.wait(q_full.index(w), 0)
    for step in range(steps.masked):
      dq, d_slope = _dq_step(
          dq, d_slope, q, do, ring, step, _tile_at(step, steps, FEATURES),
          row0, lse_rows, delta_rows, window, terms, N, HEAD, TAIL, DV,
          DV_TAIL, STAGES, True, FEATURES)
    for step in range(steps.masked, steps.count):
      dq, d_slope = _dq_step(
          dq, d_slope, q, do, ring, step,
          steps.full_low + step - steps.masked, row0, lse_rows, delta_rows,
          window, terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES, False,
          FEATURES)
  _store_gradient(dq_out, dq, terms.scale, row0, window.len_q, row_end, HEAD,
                  TAIL)
  if FEATURES & scores.ALIBI:
    # The last to read delta: its place may be the slopes'.
    gl.store(d_slopes + rows, d_slope, mask=rows < row_end)


@gluon.jit
def mha_bwd_dq(
    q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, do_desc, do_tail,
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
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    TAIL: gl.constexpr, BLOCK_DV: gl.constexpr, DV_TAIL: gl.constexpr,
    STAGES: gl.constexpr, FEATURES: gl.constexpr,
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
    index_b, tile_m = scores_hopper.find_sequence(
        tile_m, cu_seqlens_q, batch, TILE_M)
    slot_b = 0
  dense_rows = seqlen_q
  q_row, k_row, window = extents(
      index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
      cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, window_left,
      window_right, sink_tokens, flags)
  # A skipped packed sequence's rows were zeroed before the launch.
  row_end = window.len_q
  if (flags & scores.PACKED) == 0:
    row_end = dense_rows
  row0 = tile_m * TILE_M
  if row0 >= row_end:
    return  # A packed batch has slots that no sequence needs.

  last = gl.minimum(row0 + TILE_M, window.len_q) - 1
  key_high = gl.minimum(window.len_k, last + window.off + window_right + 1)
  low = gl.maximum(row0 + window.off - window_left, 0) // TILE_N
  high = (gl.maximum(key_high, 0) + TILE_N - 1) // TILE_N
  high = gl.where(row0 < window.len_q, high, 0)
  low = gl.minimum(low, high)
  full_low = gl.maximum(row0 + TILE_M - 1 + window.off - window_left, 0)
  full_low = gl.minimum((full_low + TILE_N - 1) // TILE_N, high)
  full_low = gl.maximum(full_low, low)
  full_high = gl.minimum(window.len_k, row0 + window.off + window_right + 1)
  full_high = gl.minimum(gl.maximum(full_high, 0) // TILE_N, high)
  full_high = gl.maximum(full_high, full_low)
  sinks = 0
  if FEATURES & scores.SINK_TOKENS:
    sinks = gl.minimum((sink_tokens + TILE_N - 1) // TILE_N, low)
  count = sinks + high - low
  steps = Steps(sinks, low, full_low, full_high,
                count - (full_high - full_low), count)

  b = slot_b.to(gl.int64)
  first = b * batch_stride_lse + head * nhead_stride_lse + q_row
  k += b * batch_stride_k + head_k * nhead_stride_k
  v += b * batch_stride_v + head_k * nhead_stride_v
  dq += (b * batch_stride_dq + head * nhead_stride_dq +
         q_row.to(gl.int64) * stride_dq)
  heads = scores_hopper.heads_of(
      index_b, nhead_q, bias, bias_f32, stride_bias, key_stride_bias,
      nhead_stride_bias, batch_stride_bias, mask, stride_mask, key_stride_mask,
      nhead_stride_mask, batch_stride_mask, alibi_slopes, dropout_state,
      softmax_scale, logits_soft_cap, drop_threshold, rp_keep, flags, FEATURES)
  terms = scores_hopper.terms_of(heads, head, FEATURES)

  q_desc = parts.Source(q_desc, q_tail, 0)
  k_desc = parts.Source(k_desc, k_tail, 0)
  v_desc = parts.Source(v_desc, v_tail, 0)
  do_desc = parts.Source(do_desc, do_tail, 0)
  q_smem = parts.allocate(2, q_desc, TAIL)
  do_smem = parts.allocate(2, do_desc, DV_TAIL)
  k_smem = parts.allocate(STAGES, k_desc, TAIL)
  v_smem = parts.allocate(STAGES, v_desc, DV_TAIL)
  q_full = mbarrier.allocate_mbarrier(batch=2)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for w in gl.static_range(2):
    mbarrier.init(q_full.index(w), count=2)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i), count=1 + scores_hopper.arrivals(FEATURES))
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=2)
    mbarrier.init(v_empty.index(i), count=2)
  planes = scores_hopper.allocate_planes(heads, STAGES, 2, 64, TILE_N, FEATURES)
  ring = Keys(k_smem, v_smem, k_full, k_empty, v_full, v_empty, planes)

  produce = (q_desc, k_desc, v_desc, do_desc, q_smem, do_smem, q_full, ring,
             slot_b, head, head_k, q_row, k_row, row0, steps, window,
             Matrix(k, stride_k, nhead_stride_k, hdim_q),
             Matrix(v, stride_v, nhead_stride_v, hdim_v),
             flags & (scores.PACKED | scores.CU_SEQLENS_K), terms)
  consume = (q_smem, do_smem, q_full, ring, lse + first, delta + first,
             Matrix(dq, stride_dq, nhead_stride_dq, hdim_q), d_slopes + first,
             row0, row_end, window, terms, steps)
  gl.warp_specialize([
      (_dq_consume, (0, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                     FEATURES)),
      (_dq_consume, (1, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                     FEATURES)),
      (_dq_produce, (produce, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                     FEATURES)),
  ], [4, 4], scores_hopper.registers(FEATURES))
