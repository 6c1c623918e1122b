# SPDX-License-Identifier: Apache-2.0
"""Gradient of attention's bias for Hopper (sm_90), in Gluon.

A block owns TILE_N keys of 128 rows of the bias, one box of BOX keys after the
other, and walks over the batches and heads that share them: so every sum has
one owner here too. A producer warpgroup copies their tiles of q, dout, k and v
by TMA, on into the next box; each of two consumer warpgroups owns 64 rows.
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
from third_party.aiter.kernels.mha import bwd_hopper, scores, scores_hopper
from third_party.aiter.kernels.mha import parts_hopper as parts


class Tiles(NamedTuple):
  """A ring of tiles of the four tensors and its barriers."""
  q: parts.Parts
  k: parts.Parts
  v: parts.Parts
  do: parts.Parts
  full: tl.tensor
  empty: tl.tensor
  planes: scores_hopper.Planes


class Share(NamedTuple):
  """The batches and heads that share a block's keys, which end with col_end."""
  first_batch: tl.tensor
  batches: tl.tensor
  first_head: tl.tensor
  heads: tl.tensor
  row0: tl.tensor
  col0: tl.tensor
  col_end: tl.tensor


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim]."""
  assert function == "mha_bwd_dbias", function
  box = constants["BOX"]
  qk = constants["HEAD"], constants["TAIL"]
  dv = constants["BLOCK_DV"], constants["DV_TAIL"]
  return {**parts.tensor_map("q", 64, *qk),
          **parts.tensor_map("k", box, *qk),
          **parts.tensor_map("v", box, *dv),
          **parts.tensor_map("do", 64, *dv)}


@gluon.jit
def _extents(lengths, b, flags):
  """The Window of a batch; `lengths` are bwd_hopper.extents' arguments."""
  (cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, min_seqlen_q, left, right,
   sink_tokens) = lengths
  _, _, window = bwd_hopper.extents(
      b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q, cu_seqlens_k, seqlen_q,
      seqlen_k, min_seqlen_q, left, right, sink_tokens, flags)
  return window


@gluon.jit
def _meet(window, row0, col0, M: gl.constexpr, N: gl.constexpr):
  """Whether any of M rows sees any of N keys."""
  last_row = gl.minimum(row0 + M, window.len_q) - 1
  last_key = gl.minimum(col0 + N, window.len_k) - 1
  near = last_key >= row0 + window.off - window.left
  near = near | (col0 < window.sink_tokens)
  return ((row0 < window.len_q) & (col0 < window.len_k) & near &
          (col0 <= last_row + window.off + window.right))


@gluon.jit
def _produce(args, M: gl.constexpr, N: gl.constexpr, HEAD: gl.constexpr,
             TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
             STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """Copies the four tensors' tiles of every batch and head."""
  (q_desc, k_desc, v_desc, do_desc, ring, share, group, lengths, flags,
   planes) = args
  use = 0
  for col0 in range(share.col0, share.col_end, N):
    for i in range(share.batches):
      b = share.first_batch + i
      window = _extents(lengths, b, flags)
      if _meet(window, share.row0, col0, M, N):
        heads = planes_of(planes, b, flags, FEATURES)
        for j in range(share.heads):
          head = share.first_head + j
          at, phase = hopper.ring(use, STAGES)
          full = ring.full.index(at)
          mbarrier.wait(ring.empty.index(at), phase ^ 1)
          for w in gl.static_range(2):
            row = share.row0 + w * 64
            parts.load(q_desc, b, head, row, full, ring.q, at * 2 + w, HEAD,
                       TAIL)
            parts.load(do_desc, b, head, row, full, ring.do, at * 2 + w, DV,
                       DV_TAIL)
          parts.load(k_desc, b, head // group, col0, full, ring.k, at, HEAD,
                     TAIL)
          parts.load(v_desc, b, head // group, col0, full, ring.v, at, DV,
                     DV_TAIL)
          scores_hopper.copy_planes(
              scores_hopper.terms_of(heads, head, FEATURES), ring.planes, at,
              full, share.row0, col0, 64, 0, window, 2, 64, N, FEATURES)
          use += 1


@gluon.jit
def _add(acc, ring, use, w: gl.constexpr, lse, delta, row0, col0, window,
         terms, N: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
         DV: gl.constexpr, DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
         FEATURES: gl.constexpr):
  """Adds a head's gradients of 64 rows' scores."""
  LAYOUT: gl.constexpr = hopper.accumulator(N)
  ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
  at, phase = hopper.ring(use, STAGES)
  row = row0 + gl.arange(0, 64, ROWS)
  lse_rows = gl.load(lse + row, mask=row < window.len_q, other=float("-inf"))
  # +inf makes p zero for rows without any key and past the end.
  lse_rows = gl.where(lse_rows == float("-inf"), float("inf"),
                      lse_rows * scores.LOG2E)
  delta_rows = gl.load(delta + row, mask=row < window.len_q, other=0.0)
  mbarrier.wait(ring.full.index(at), phase)
  s = parts.product(parts.tile(ring.q, at * 2 + w, 64, HEAD, TAIL),
                    parts.tile(ring.k, at, N, HEAD, TAIL), 64, N, TAIL)
  dp = parts.product(parts.tile(ring.do, at * 2 + w, 64, DV, DV_TAIL),
                     parts.tile(ring.v, at, N, DV, DV_TAIL), 64, N, DV_TAIL)
  s = warpgroup_mma_wait(2 if DV_TAIL > 0 else 1, deps=[s])
  rows = gl.arange(0, 64, ROWS)[:, None]
  cols = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))[None, :]
  p, slope = bwd_hopper.probabilities(
      s, lse_rows[:, None], row0, col0, rows, cols, window, terms,
      scores_hopper.planes_at(ring.planes, at, False, FEATURES), True,
      FEATURES)
  diff = col0 + cols - (row0 + rows + window.off)
  seen = diff >= -window.left
  if FEATURES & scores.SINK_TOKENS:
    seen = seen | (col0 + cols < window.sink_tokens)
  seen = seen & (diff <= window.right) & (row0 + rows < window.len_q)
  p = gl.where(seen & (col0 + cols < window.len_k), p, 0.0)
  keep = p
  if FEATURES & scores.DROPOUT:
    keep = scores_hopper.keep_of_rows(terms, row0, col0, N)
  dp = warpgroup_mma_wait(0, deps=[dp])
  mbarrier.arrive(ring.empty.index(at))
  _, complete = bwd_hopper.score_gradients(
      p, dp, slope, keep, delta_rows[:, None], terms, FEATURES)
  return acc + complete


@gluon.jit
def _consume(w: gl.constexpr, args, M: gl.constexpr, N: gl.constexpr,
             HEAD: gl.constexpr, TAIL: gl.constexpr, DV: gl.constexpr,
             DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
             FEATURES: gl.constexpr):
  """Computes 64 rows of the bias's gradient."""
  (ring, share, lengths, flags, planes, lse, delta, nhead_stride_lse,
   batch_stride_lse, dbias, stride_dbias) = args
  LAYOUT: gl.constexpr = hopper.accumulator(N)
  ring = Tiles(ring.q, ring.k, ring.v, ring.do, ring.full, ring.empty,
               scores_hopper.own_planes(ring.planes, w))
  row0 = share.row0 + w * 64
  rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
  _, _, seqlen_q, seqlen_k, _, _, _, _ = lengths
  dbias += rows[:, None].to(gl.int64) * stride_dbias + cols[None, :]
  use = 0
  for col0 in range(share.col0, share.col_end, N):
    acc = gl.zeros([64, N], gl.float32, LAYOUT)
    for i in range(share.batches):
      b = share.first_batch + i
      window = _extents(lengths, b, flags)
      if _meet(window, share.row0, col0, M, N):
        heads = planes_of(planes, b, flags, FEATURES)
        for j in range(share.heads):
          head = share.first_head + j
          first = b.to(gl.int64) * batch_stride_lse + head * nhead_stride_lse
          acc = _add(acc, ring, use, w, lse + first, delta + first, row0, col0,
                     window, scores_hopper.terms_of(heads, head, FEATURES), N,
                     HEAD, TAIL, DV, DV_TAIL, STAGES, FEATURES)
          use += 1
    inside = (rows < seqlen_q)[:, None] & (cols < seqlen_k - col0)[None, :]
    gl.store(dbias + col0, acc, mask=inside)


@gluon.jit
def planes_of(planes, b, flags, FEATURES: gl.constexpr):
  """The Heads of a batch; `planes` are the arguments of heads_of."""
  (nhead_q, bias, bias_f32, stride_bias, key_stride_bias, nhead_stride_bias,
   batch_stride_bias, mask, stride_mask, key_stride_mask, nhead_stride_mask,
   batch_stride_mask, alibi_slopes, dropout_state, scale, logits_soft_cap,
   drop_threshold, rp_keep) = planes
  return scores_hopper.heads_of(
      b, nhead_q, bias, bias_f32, stride_bias, key_stride_bias,
      nhead_stride_bias, batch_stride_bias, mask, stride_mask, key_stride_mask,
      nhead_stride_mask, batch_stride_mask, alibi_slopes, dropout_state, scale,
      logits_soft_cap, drop_threshold, rp_keep, flags, FEATURES)


@gluon.jit
def mha_bwd_dbias(
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
    STAGES: gl.constexpr, BOX: gl.constexpr, FEATURES: gl.constexpr,
):
  """128 rows and TILE_N keys of one plane of dbias; dense batches only.

  Arguments: bwd_hopper.mha_bwd_dkdv's. Grid: (tiles of keys, tiles of rows,
  planes: batches times heads of the bias).
  """
  gl.static_assert(TILE_M == 128)
  plane = gl.program_id(2)
  of_batch = plane // bias_nhead
  of_head = plane % bias_nhead
  col0 = gl.program_id(0) * TILE_N
  share = Share(
      of_batch, gl.where(bias_batch == 1, batch, 1), of_head,
      gl.where(bias_nhead == 1, nhead_q, 1), gl.program_id(1) * TILE_M, col0,
      gl.minimum(col0 + TILE_N, seqlen_k))
  lengths = (cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, min_seqlen_q,
             window_left, window_right, sink_tokens)
  planes = (nhead_q, bias, bias_f32, stride_bias, key_stride_bias,
            nhead_stride_bias, batch_stride_bias, mask, stride_mask,
            key_stride_mask, nhead_stride_mask, batch_stride_mask,
            alibi_slopes, dropout_state, softmax_scale, logits_soft_cap,
            drop_threshold, rp_keep)
  dbias += (of_batch.to(gl.int64) * batch_stride_dbias +
            of_head * nhead_stride_dbias)

  heads = planes_of(planes, of_batch, flags, FEATURES)
  q_desc = parts.Source(q_desc, q_tail, 0)
  k_desc = parts.Source(k_desc, k_tail, 0)
  v_desc = parts.Source(v_desc, v_tail, 0)
  do_desc = parts.Source(do_desc, do_tail, 0)
  full = mbarrier.allocate_mbarrier(batch=STAGES)
  empty = mbarrier.allocate_mbarrier(batch=STAGES)
  ring = Tiles(parts.allocate(2 * STAGES, q_desc, TAIL),
               parts.allocate(STAGES, k_desc, TAIL),
               parts.allocate(STAGES, v_desc, DV_TAIL),
               parts.allocate(2 * STAGES, do_desc, DV_TAIL), full, empty,
               scores_hopper.allocate_planes(heads, STAGES, 2, 64, BOX,
                                             FEATURES))
  for i in gl.static_range(STAGES):
    mbarrier.init(full.index(i), count=6 + scores_hopper.arrivals(FEATURES))
    mbarrier.init(empty.index(i), count=2)

  produce = (q_desc, k_desc, v_desc, do_desc, ring, share,
             nhead_q // nhead_k, lengths, flags, planes)
  consume = (ring, share, lengths, flags, planes, lse, delta,
             nhead_stride_lse, batch_stride_lse, dbias, stride_dbias)
  gl.warp_specialize([
      (_consume, (0, consume, TILE_M, BOX, HEAD, TAIL, BLOCK_DV, DV_TAIL,
                  STAGES, FEATURES)),
      (_consume, (1, consume, TILE_M, BOX, HEAD, TAIL, BLOCK_DV, DV_TAIL,
                  STAGES, FEATURES)),
      (_produce, (produce, TILE_M, BOX, HEAD, TAIL, BLOCK_DV, DV_TAIL,
                  STAGES, FEATURES)),
  ], [4, 4], scores_hopper.registers(FEATURES))
