# SPDX-License-Identifier: Apache-2.0
"""Attention of short prompts over paged caches on Hopper, in Gluon.

As kernels/mha/fwd_short.py's, a block is one warpgroup with 64 rows and without
a producer: where rows see few keys most time goes into a block's begin and end,
which the four blocks of a multiprocessor hide from each other. There is one
tile of keys and one of values; where they are is prefill_hopper.py's, and how
they come from small pages boxes_hopper.py's.
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
from third_party.aiter.kernels.paged import attend, boxes_hopper, prefill_walks
from third_party.aiter.kernels.paged import prefill_hopper as prefill

tensor_maps = prefill_walks.tensor_maps


@gluon.jit
def _boxes(copies, step, N: gl.constexpr, BOX: gl.constexpr,
           DIVIDED: gl.constexpr):
  """Where the boxes of a step's tiles are; nowhere, behind the last one."""
  at, table, paging = copies[:3]
  first = gl.where(step < at.steps, (at.last_tile - 1 - step) * N, at.stop)
  if DIVIDED:
    boxes = boxes_hopper.boxes_at(table, paging, first, at.stop, N, BOX)
  else:
    boxes = prefill.box_pages(table, first, at.stop, N, BOX)
  return boxes


@gluon.jit
def _copy_keys(copies, step, boxes, N: gl.constexpr, HEAD: gl.constexpr,
               BOX: gl.constexpr, DIVIDED: gl.constexpr):
  """Starts to copy a step's keys, if there is such a step."""
  (at, table, _, k_desc, _, k, _, values) = copies
  if DIVIDED:
    boxes_hopper.copy(0, k, 0, at.head, boxes, (step < at.steps).to(gl.int32),
                      BOX, False)
  elif step < at.steps:
    prefill.copy_tile(k_desc, 0, prefill.boxes_of(k.ring, k_desc),
                      k.full.index(0), 0, boxes, table, values, at.head,
                      (at.last_tile - 1 - step) * N, at.stop, at.length, N,
                      HEAD, BOX, False)


@gluon.jit
def _copy_values(copies, step, boxes, N: gl.constexpr, HEAD: gl.constexpr,
                 BOX: gl.constexpr, DIVIDED: gl.constexpr, LAST: gl.constexpr):
  """The same of values.

  LAST: it is the tile that the sequence's end may cut. What lies behind it may
  be NaN, and 0 * NaN is NaN.
  """
  (at, table, _, _, v_desc, _, v, values) = copies
  first = (at.last_tile - 1 - step) * N
  if DIVIDED and LAST:
    boxes_hopper.copy_values(v, 0, values, table, at.head, boxes, first,
                             at.stop, at.length, BOX)
  elif DIVIDED:
    boxes_hopper.copy(1, v, 0, at.head, boxes, (step < at.steps).to(gl.int32),
                      BOX, False)
  elif step < at.steps:
    prefill.copy_tile(v_desc, 0, prefill.boxes_of(v.ring, v_desc),
                      v.full.index(0), 0, boxes, table, values, at.head, first,
                      at.stop, at.length, N, HEAD, BOX, LAST)


@gluon.jit
def _step(acc, m, norm, q, copies, step, window, terms, N: gl.constexpr,
          HEAD: gl.constexpr, BOX: gl.constexpr, DIVIDED: gl.constexpr,
          EARLY: gl.constexpr, MASK: gl.constexpr, FEATURES: gl.constexpr):
  """Adds a tile, and starts the copies of the one that takes its place.

  EARLY: of keys as soon as there are scores, to arrive under the softmax.
  """
  k, v = copies[5], copies[6]
  boxes = _boxes(copies, step + 1, N, BOX, DIVIDED)
  mbarrier.wait(k.full.index(0), step & 1)
  s = parts_hopper.product(
      q, parts_hopper.tile(parts_hopper.Parts(k.ring, k.ring), 0, N, HEAD, 0),
      64, N, 0)
  s = warpgroup_mma_wait(0, deps=[s])
  if EARLY:
    gl.barrier()
    _copy_keys(copies, step + 1, boxes, N, HEAD, BOX, DIVIDED)
  e, m, alpha = fwd_hopper.weigh(
      s, fwd_hopper.unit_of(terms, FEATURES), m, 0,
      copies[0].last_tile - 1 - step, window, N, MASK, FEATURES)
  norm = norm * alpha + gl.sum(e, 1)
  acc = parts_hopper.scale_rows(acc, alpha, HEAD, 0)
  p = parts_hopper.operand(e, v.ring.dtype, HEAD)
  mbarrier.wait(v.full.index(0), step & 1)
  acc = parts_hopper.accumulate(
      acc, p,
      parts_hopper.tile(parts_hopper.Parts(v.ring, v.ring), 0, N, HEAD, 0), 0)
  acc = parts_hopper.wait(0, acc, 0)
  gl.barrier()
  if not EARLY:
    _copy_keys(copies, step + 1, boxes, N, HEAD, BOX, DIVIDED)
  _copy_values(copies, step + 1, boxes, N, HEAD, BOX, DIVIDED, False)
  return acc, m, norm


@gluon.jit
def paged_attend(
    k_desc, v_desc, q, v_cache, out, lse, parts, parts_lse, k_scale, v_scale,
    sinks, table, indptr, lengths, cu_seqlens, counter, k_eights, k_scale_head,
    v_start, v_page, v_head, v_token, v_eights, v_scale_head, tokens, batch,
    seqlen_q, nhead_q, nhead_k, group, hdim, hdim_v, pages, page_size,
    page_shift, page_factor, width, splits, programs, window_left, window_right,
    sinks_step, softmax_scale, logits_soft_cap, few_keys, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    FLAGS: gl.constexpr, FEATURES: gl.constexpr, BOX: gl.constexpr,
    EARLY: gl.constexpr = 0, DIVIDES: gl.constexpr = 0,
):
  """prefill_hopper.py's paged_attend of caches of the queries' type.

  counter: prefill_walks.py's, which if few_keys is not 0 has said whether it
  left the batch to this kernel.
  DIVIDES: keys may be divided, which takes registers.

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
  own = gl.to_tensor(1)
  if few_keys > 0:
    own = gl.load(counter + 1)
  if own == 0:
    return
  lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([1], [32], [4], [0]))
  head = gl.program_id(0) % nhead_k
  slot = gl.num_programs(0) // nhead_k - 1 - gl.program_id(0) // nhead_k
  split = 0
  share = 0.0
  if DIVIDES:
    split = gl.program_id(1)
    share = prefill_walks.survey(work, 0, lanes, TILE_M, N, FLAGS)[0]
  at = prefill_walks.place_of(
      work, slot, head, split, share, lanes,
      k_scale + head.to(gl.int64) * k_scale_head,
      v_scale + head.to(gl.int64) * v_scale_head, softmax_scale, TILE_M, N,
      FLAGS, DIVIDES)
  if (at.left <= 0) | (at.steps == 0):
    return  # Sequences may have slots, and rows parts, that they do not need.
  prefill_walks.store_end(at, work, parts_lse, TILE_M)

  OF_SCORES: gl.constexpr = FEATURES | fwd_hopper.BOXES
  WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
  DIVIDED: gl.constexpr = boxes_hopper.divided(BOX, FLAGS)
  OF_KEYS: gl.constexpr = prefill.by_eights(N, HEAD) if DIVIDED else WIDE
  CHUNK: gl.constexpr = prefill.CHUNK
  WIDTH: gl.constexpr = HEAD if DIVIDED else prefill.COLS
  dtype: gl.constexpr = q.dtype.element_ty
  q_smem = gl.allocate_shared_memory(dtype, [1, 64, HEAD], WIDE)
  k_smem = gl.allocate_shared_memory(dtype, [1, N, HEAD], OF_KEYS)
  v_smem = gl.allocate_shared_memory(dtype, [1, N, HEAD], OF_KEYS)
  full = mbarrier.allocate_mbarrier(batch=2)
  for i in gl.static_range(2):
    mbarrier.init(full.index(i),
                  count=boxes_hopper.arrivals(N // BOX, 4) if DIVIDED else 1)
  fence_async_shared()
  gl.barrier()
  k = boxes_hopper.Half(k_smem, full.slice(0, 1), k_eights)
  v = boxes_hopper.Half(v_smem, full.slice(1, 1), v_eights)
  pages_of = prefill_walks.table_of(at, work)
  paging = attend.Paging(page_size, page_shift, page_factor)
  values = prefill.Values(
      v_cache + v_start + head.to(gl.int64) * v_head, v_page, v_token, hdim_v,
      v_smem.reinterpret(
          dtype, [N * HEAD // (CHUNK * WIDTH), CHUNK, WIDTH],
          prefill.by_eights(CHUNK, HEAD) if DIVIDED else WIDE))

  copies = (at, pages_of, paging, k_desc, v_desc, k, v, values)
  # Numbers of pages are under way while rows of queries are found.
  boxes = _boxes(copies, 0, N, BOX, DIVIDED)
  rows = prefill_walks.rows_of(at, work)
  row = (at.start + rows.query).to(gl.int64) * nhead_q
  prefill.load_queries(q + row * hdim, hdim, rows, 0, q_smem.index(0), HEAD)
  _copy_keys(copies, 0, boxes, N, HEAD, BOX, DIVIDED)
  _copy_values(copies, 0, boxes, N, HEAD, BOX, DIVIDED, True)
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
      acc, m, norm = _step(acc, m, norm, q_tile, copies, step, window, terms, N,
                           HEAD, BOX, DIVIDED, EARLY, True, OF_SCORES)
    for step in range(right, whole):
      acc, m, norm = _step(acc, m, norm, q_tile, copies, step, seen, terms, N,
                           HEAD, BOX, DIVIDED, EARLY, False, OF_SCORES)
    begin = whole
    right = at.steps
  prefill_walks.end(acc, m, norm, at, work, q_smem.index(0),
                    (out, hdim_v, lse, parts, parts_lse), sinks, sinks_step,
                    logits_soft_cap, 0, N, HEAD, OF_SCORES)
