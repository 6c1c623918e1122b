# SPDX-License-Identifier: Apache-2.0
"""Attention of short prompts over paged caches on Hopper, in Gluon.

As kernels/mha/fwd_short.py's, a block is one warpgroup with 64 rows and without
a producer: where rows see few keys most time goes into a block's begin and end,
which the four blocks of a multiprocessor hide from each other. Where keys are
and how they come is prefill_hopper.py's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import fwd_hopper, parts_hopper
from third_party.aiter.kernels.paged import attend, prefill_walks
from third_party.aiter.kernels.paged import prefill_hopper as prefill

tensor_maps = prefill_walks.tensor_maps


@gluon.jit
def _pages(copies, step, N: gl.constexpr, BOX: gl.constexpr):
  """The pages of a step's boxes; none of one behind the last."""
  at, table = copies[0], copies[1]
  first = gl.where(step < at.steps, (at.last_tile - 1 - step) * N, at.stop)
  return prefill.box_pages(table, first, at.stop, N, BOX)


@gluon.jit
def _copy(copies, step, pages, N: gl.constexpr, HEAD: gl.constexpr,
          BOX: gl.constexpr, STAGES: gl.constexpr, LAST: gl.constexpr):
  """Starts the copies of a step's tiles, if there is one.

  LAST: it is the tile that the sequence's end may cut.
  """
  (at, table, k_desc, v_desc, k_eights, v_eights, keys, k_boxes, v_boxes,
   values) = copies
  if step < at.steps:
    first = (at.last_tile - 1 - step) * N
    i, phase = hopper.ring(step, STAGES)
    prefill.copy_tile(k_desc, k_eights, k_boxes, keys.k_empty.index(i),
                      keys.k_full.index(i), i, phase, pages, table, values,
                      at.head, first, at.stop, at.length, N, HEAD, BOX, False)
    # What lies behind the last key may be NaN, and 0 * NaN is NaN.
    prefill.copy_tile(v_desc, v_eights, v_boxes, keys.v_empty.index(i),
                      keys.v_full.index(i), i, phase, pages, table, values,
                      at.head, first, at.stop, at.length, N, HEAD, BOX, LAST)


@gluon.jit
def _step(acc, m, norm, q, keys, copies, step, window, terms, N: gl.constexpr,
          HEAD: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
          MASK: gl.constexpr, FEATURES: gl.constexpr):
  """Adds a tile, and starts the copies of what takes its place."""
  tile = copies[0].last_tile - 1 - step
  pages = _pages(copies, step + STAGES, N, BOX)
  i, phase = hopper.ring(step, STAGES)
  mbarrier.wait(keys.k_full.index(i), phase)
  s = parts_hopper.product(
      q, parts_hopper.tile(keys.k, i, N, HEAD, 0), 64, N, 0)
  s = warpgroup_mma_wait(0, deps=[s])
  e, m, alpha = fwd_hopper.exponentials(
      s, m, 0, tile, window, terms, keys, step, N, STAGES, 0, MASK, FEATURES)
  norm = norm * alpha + gl.sum(e, 1)
  acc = parts_hopper.scale_rows(acc, alpha, HEAD, 0)
  p = parts_hopper.operand(e, keys.v.main.dtype, HEAD)
  mbarrier.wait(keys.v_full.index(i), phase)
  acc = parts_hopper.accumulate(
      acc, p, parts_hopper.tile(keys.v, i, N, HEAD, 0), 0)
  acc = parts_hopper.wait(0, acc, 0)
  mbarrier.arrive(keys.v_empty.index(i))
  _copy(copies, step + STAGES, pages, N, HEAD, BOX, STAGES, False)
  return acc, m, norm


@gluon.jit
def paged_attend(
    k_desc, v_desc, q, v_cache, out, lse, parts, parts_lse, k_scale, v_scale,
    sinks, table, indptr, lengths, cu_seqlens, k_page, k_token, k_scale_head,
    v_start, v_page, v_head, v_token, v_scale_head, tokens, batch, seqlen_q,
    nhead_q, nhead_k, group, hdim, hdim_v, pages, page_size, width, splits,
    programs, window_left, window_right, sinks_step, softmax_scale,
    logits_soft_cap, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    FLAGS: gl.constexpr, FEATURES: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr,
):
  """prefill_hopper.py's paged_attend of caches of the queries' type.

  Grid: as there.
  """
  gl.static_assert(TILE_M == 64)
  N: gl.constexpr = TILE_N
  if not attend.PARTIAL & FLAGS:
    hdim = HEAD
    hdim_v = HEAD
  gdc_launch_dependents()
  work = prefill_walks.Work(
      attend.Lengths(lengths, indptr, page_size), table, indptr, cu_seqlens,
      tokens, batch, seqlen_q, nhead_q, nhead_k, group, pages, page_size, width,
      splits, programs, window_left, window_right, flags)
  lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([1], [32], [4], [0]))
  share = prefill_walks.share_of(work, lanes, TILE_M, N, FLAGS)
  head = gl.program_id(0) % nhead_k
  slot = gl.num_programs(0) // nhead_k - 1 - gl.program_id(0) // nhead_k
  at = prefill_walks.place_of(
      work, slot, head, gl.program_id(1), share, lanes,
      k_scale + head.to(gl.int64) * k_scale_head,
      v_scale + head.to(gl.int64) * v_scale_head, softmax_scale, TILE_M, N,
      FLAGS)
  if at.left <= 0:
    return  # Sequences may have slots that they do not need.

  OF_SCORES: gl.constexpr = FEATURES | fwd_hopper.BOXES
  WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
  DIVIDED: gl.constexpr = prefill.divided(HEAD, BOX, FLAGS, attend.NO_BYTES)
  OF_KEYS: gl.constexpr = prefill.by_eights(N, HEAD) if DIVIDED else WIDE
  CHUNK: gl.constexpr = prefill.CHUNK
  WIDTH: gl.constexpr = HEAD if DIVIDED else prefill.COLS
  dtype: gl.constexpr = q.dtype.element_ty
  q_smem = gl.allocate_shared_memory(dtype, [1, 64, HEAD], WIDE)
  k_smem = gl.allocate_shared_memory(dtype, [STAGES, N, HEAD], OF_KEYS)
  v_smem = gl.allocate_shared_memory(dtype, [STAGES, N, HEAD], OF_KEYS)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=1)
    mbarrier.init(v_empty.index(i), count=1)
  none = gl.to_tensor(0)
  keys = fwd_hopper.Keys(
      parts_hopper.Parts(k_smem, k_smem), parts_hopper.Parts(v_smem, v_smem),
      k_full, k_empty, v_full, v_empty, none, none, none)
  pages_of = prefill_walks.table_of(at, work)
  values = prefill.Values(
      v_cache + v_start + head.to(gl.int64) * v_head, v_page, v_token, hdim_v,
      v_smem.reinterpret(
          dtype, [STAGES * N * HEAD // (CHUNK * WIDTH), CHUNK, WIDTH],
          prefill.by_eights(CHUNK, HEAD) if DIVIDED else WIDE))
  copies = (at, pages_of, k_desc, v_desc, k_page // (8 * k_token),
            v_page // (8 * v_token), keys, prefill.boxes_of(k_smem, k_desc),
            prefill.boxes_of(v_smem, v_desc), values)

  rows = prefill_walks.rows_of(at, work)
  row = (at.start + rows.query).to(gl.int64) * nhead_q
  prefill.load_queries(q + row * hdim, hdim, rows, 0, q_smem.index(0), HEAD)
  for i in gl.static_range(STAGES):
    _copy(copies, i, _pages(copies, i, N, BOX), N, HEAD, BOX, STAGES, i == 0)
  absent = prefill_walks.any_absent(at, work, N)
  async_copy.wait_group(0)
  if at.scale < 0:
    prefill.negate(q_smem.index(0))
  fence_async_shared()
  gl.barrier()

  terms = prefill_walks.terms_of(at, logits_soft_cap)
  seen = prefill_walks.seen_of(at, work, 0, N)
  q_tile = prefill.query_tile(q_smem, 0, HEAD)
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  acc = parts_hopper.zeros(64, HEAD, 0)
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  norm = gl.zeros([64], gl.float32, ROWS)
  # As in prefill_hopper.py.
  right = gl.minimum(gl.maximum(at.last_tile - at.full_hi, 0), at.steps)
  right = gl.where(absent, at.steps, right)
  whole = gl.minimum(gl.maximum(at.last_tile - at.full_lo, right), at.steps)
  begin = gl.to_tensor(0)
  for _ in range(gl.where(whole < at.steps, 2, 1)):
    for step in range(begin, right):
      window = prefill.window_of(seen, pages_of, absent,
                                 at.last_tile - 1 - step, N, BOX)
      acc, m, norm = _step(acc, m, norm, q_tile, keys, copies, step, window,
                           terms, N, HEAD, BOX, STAGES, True, OF_SCORES)
    for step in range(right, whole):
      acc, m, norm = _step(acc, m, norm, q_tile, keys, copies, step, seen,
                           terms, N, HEAD, BOX, STAGES, False, OF_SCORES)
    begin = whole
    right = at.steps
  prefill_walks.end(acc, m, norm, at, work, q_smem.index(0),
                    (out, hdim_v, lse, parts, parts_lse), sinks, sinks_step,
                    logits_soft_cap, 0, N, HEAD, OF_SCORES)
