# SPDX-License-Identifier: Apache-2.0
"""Attention forward of float8 tensors for Hopper (sm_90) by single warpgroups.

fwd_hopper.py spends about as long beside a tile's steps as in four of them. As
in mha/fwd_short.py a block so has 64 rows and no producer, and three or four
blocks share a multiprocessor and hide each other's begin, softmax and end. That
is the best where rows see few keys, and of narrow heads always.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha_fp8 import fwd_hopper

tensor_maps = fwd_hopper.tensor_maps


@gluon.jit
def _step(acc, m, norm, q, descs, rings, item, step, seen, scales, scale,
          TILE_N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr,
          WEIGHT_BITS: gl.constexpr, MASK: gl.constexpr, BLOCKS: gl.constexpr):
  """Adds a tile, and starts the copies of what takes its place."""
  k_desc, v_desc = descs
  tile = item.tile_hi - 1 - step
  scale = fwd_hopper.scale_at(scales.of_scores, tile, scales, scale, BLOCKS)
  value_scale = fwd_hopper.scale_at(scales.of_values, tile, scales, 1.0, BLOCKS)
  i, phase = hopper.ring(step, STAGES)
  s = fwd_hopper.next_scores(q, rings, step, TILE_N, HEAD, STAGES)
  s = warpgroup_mma_wait(0, deps=[s])
  mbarrier.arrive(rings.k_empty.index(i))
  if step + STAGES < item.steps:
    fwd_hopper.copy_keys(k_desc, rings, item, step + STAGES, step + STAGES,
                         TILE_N, STAGES)
  e, m, alpha = fwd_hopper.exponentials(s, m, tile, item.row0, seen, scale,
                                        TILE_N, WEIGHT_BITS, MASK)
  norm = norm * alpha + gl.sum(e, 1)
  p = fwd_hopper.weights(e, rings.k.dtype, TILE_N, HEAD)
  mbarrier.wait(rings.v_full.index(i), phase)
  product = fwd_hopper.start_values(p, rings.v, i, TILE_N, HEAD)
  acc = acc * fwd_hopper.rows_of(alpha, HEAD)
  product = warpgroup_mma_wait(0, deps=[product])
  mbarrier.arrive(rings.v_empty.index(i))
  if BLOCKS:
    product = product * value_scale
  if step + STAGES < item.steps:
    fwd_hopper.copy_values(v_desc, rings, item, step + STAGES, step + STAGES,
                           TILE_N, STAGES)
  return acc + product, m, norm


@gluon.jit
def mha_fp8_fwd(q_desc, k_desc, v_desc, out, lse, scales, v_scales, sinks,
                cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k, nhead_q,
                nhead_k, hdim_v, blocks, window_left, window_right,
                flags, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
                HEAD: gl.constexpr, STAGES: gl.constexpr,
                WEIGHT_BITS: gl.constexpr, BLOCKS: gl.constexpr):
  """Arguments are those of fwd_hopper.py; a block is one of its items."""
  gl.static_assert(TILE_M == 64)
  work = fwd_hopper.Work(cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k,
                         nhead_q, nhead_k, window_left, window_right, flags)
  q_smem = gl.allocate_shared_memory(
      q_desc.dtype, hopper.stack(1, q_desc.block_type.shape), q_desc.layout)
  k_smem = gl.allocate_shared_memory(
      k_desc.dtype, hopper.stack(STAGES, k_desc.block_type.shape),
      k_desc.layout)
  v_smem = gl.allocate_shared_memory(
      v_desc.dtype, hopper.stack(STAGES, v_desc.block_type.shape),
      v_desc.layout)
  barriers = mbarrier.allocate_mbarrier(batch=4 + 4 * STAGES)
  rings = fwd_hopper.rings_of(q_smem, k_smem, v_smem, barriers, 1, STAGES)
  for i in gl.static_range(4 + 4 * STAGES):
    mbarrier.init(barriers.index(i), count=1)

  item = fwd_hopper.find(gl.program_id(0), work, TILE_M, TILE_N, HEAD)
  steps = item.steps
  if steps > 0:
    mbarrier.expect(rings.q_full.index(0), q_desc.nbytes_per_cta)
    tma.async_load(q_desc, [item.slot_b, item.head, item.q_row, 0],
                   rings.q_full.index(0), rings.q.index(0))
    for step in gl.static_range(STAGES):
      if step < steps:
        fwd_hopper.copy_keys(k_desc, rings, item, step, step, TILE_N, STAGES)
  # Started while columns.py may still write, of which only values come.
  gdc_wait()
  for step in gl.static_range(STAGES):
    if step < steps:
      fwd_hopper.copy_values(v_desc, rings, item, step, step, TILE_N, STAGES)

  ROWS: gl.constexpr = gl.SliceLayout(1, fwd_hopper.accumulator(TILE_N))
  acc = gl.zeros([64, HEAD], gl.float32, fwd_hopper.accumulator(HEAD))
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  norm = gl.zeros([64], gl.float32, ROWS)
  seen = fwd_hopper.Seen(item.len_k - item.len_q, work.left, work.right,
                         item.len_k)
  of_item = fwd_hopper.Scales(
      scales, v_scales, fwd_hopper.first_scale(item, work, blocks), blocks - 1)
  scale = gl.load(scales + of_item.first)
  q = rings.q.index(0).reshape([64, HEAD])
  if steps > 0:
    mbarrier.wait(rings.q_full.index(0), 0)
  # Tiles that the diagonal or the end crosses, whole ones, then those that the
  # window's left edge crosses.
  right = gl.minimum(gl.maximum(item.tile_hi - item.full_hi, 0), steps)
  whole = gl.minimum(gl.maximum(item.tile_hi - item.full_lo, right), steps)
  descs = k_desc, v_desc
  for step in range(0, right):
    acc, m, norm = _step(
        acc, m, norm, q, descs, rings, item, step, seen, of_item, scale, TILE_N,
        HEAD, STAGES, WEIGHT_BITS, True, BLOCKS)
  for step in range(right, whole):
    acc, m, norm = _step(
        acc, m, norm, q, descs, rings, item, step, seen, of_item, scale, TILE_N,
        HEAD, STAGES, WEIGHT_BITS, False, BLOCKS)
  for step in range(whole, steps):
    acc, m, norm = _step(
        acc, m, norm, q, descs, rings, item, step, seen, of_item, scale, TILE_N,
        HEAD, STAGES, WEIGHT_BITS, True, BLOCKS)
  fwd_hopper.finish(0, acc, m, norm, item, out, lse, v_scales, sinks, hdim_v,
                    blocks, work, TILE_N, HEAD, WEIGHT_BITS, BLOCKS)
