# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches for Hopper (sm_90), in Gluon.

Rows, keys and splits are attend.py's, the pipeline is attention's of
kernels/mha/fwd_hopper.py; what differs is where keys come from. A map views a
cache as [page, head, token, dim], and a tile of keys is copied in boxes of BOX
tokens, which no page cuts, and 64 columns, which lie together in a swizzled
tile. A box of an absent page, or behind the last key, is one outside of the
map: TMA fills it with zeros.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import (
    fwd_hopper,
    parts_hopper,
    scores,
    scores_hopper,
)
from third_party.aiter.kernels.paged import attend

# Columns of a box: 128 bytes, the widest swizzle.
COLS = gl.constexpr(64)
# Rows that are copied without a map at a time.
CHUNK = gl.constexpr(16)

# A Gluon function calls none of Triton's; of one source it may be either.
_find_rows = gluon.jit(attend.find_rows.fn)
_find_keys = gluon.jit(attend.find_keys.fn)
_find_work = gluon.jit(attend.find_work.fn)
_tiles_of_batch = gluon.jit(attend.tiles_of_batch.fn)


class Rows(NamedTuple):
  """The rows of a tile: `first` is its first, so many are `left`.

  `query` is the first one's query, `head` the first query head.
  """
  first: tl.tensor
  left: tl.tensor
  query: tl.tensor
  head: tl.tensor
  group: tl.tensor
  nhead_q: tl.tensor


class Table(NamedTuple):
  """The pages of a sequence: `first` points to the first one's number."""
  first: tl.tensor
  pages: tl.tensor
  page_size: tl.tensor


class Values(NamedTuple):
  """A head's values in memory; and where tiles are, in chunks of rows."""
  data: tl.tensor
  page: tl.tensor
  token: tl.tensor
  hdim: tl.tensor
  chunks: tl.tensor


class Scale(NamedTuple):
  """What fwd_hopper.py takes of scores.Terms where nothing else is asked."""
  scale: tl.tensor


@gluon.jit
def _row(rows, begin, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
  """COUNT rows from `begin` of a tile on: (query, query head, place, live).

  Queries count from the tile's first, and places, in rows of memory, from the
  first head of that.
  """
  r = begin + gl.arange(0, COUNT, LAYOUT)
  live = r < rows.left
  r = rows.first + gl.where(live, r, 0)
  query = r // rows.group - rows.query
  head = rows.head + r % rows.group
  return query, head, query * rows.nhead_q + head, live


@gluon.jit
def _load_queries(q, hdim, rows, w: gl.constexpr, smem, HEAD: gl.constexpr):
  """Begins to copy a warpgroup's rows, with zeros behind their columns."""
  LAYOUT: gl.constexpr = hopper.rows_layout(HEAD)
  cols = gl.arange(0, HEAD, gl.SliceLayout(0, LAYOUT))
  for row in gl.static_range(0, 64, CHUNK):
    _, _, at, live = _row(rows, w * 64 + row, CHUNK, gl.SliceLayout(1, LAYOUT))
    async_copy.async_load(
        smem.slice(row, CHUNK), q + (at * hdim)[:, None] + cols[None, :],
        mask=live[:, None] & (cols < hdim)[None, :])
  async_copy.commit_group()


@gluon.jit
def _any_absent(table, first, end):
  """Whether a page of table[first:end] is absent."""
  COUNT: gl.constexpr = 512
  at = gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [4], [0]))
  absent = at * 0
  for i in range(first, end, COUNT):
    page = gl.load(table.first + i + at, mask=i + at < end, other=0)
    absent = absent | gl.where((page < 0) | (page >= table.pages), 1, 0)
  return gl.max(absent, 0) > 0


@gluon.jit
def _following(entry, place, table, BOX: gl.constexpr):
  """The box after one that is at `place` of table[entry]'s page."""
  place += BOX
  ends = place >= table.page_size
  return gl.where(ends, entry + 1, entry), gl.where(ends, 0, place)


@gluon.jit
def _window_of(window, table, absent, tile, N: gl.constexpr,
               BOX: gl.constexpr):
  """The window of a tile, in which a key of an absent page is not seen."""
  # Of a thread's columns it is known here in which boxes they are.
  cols = gl.arange(0, N, gl.SliceLayout(0, hopper.accumulator(N)))
  stop = gl.where(cols >= 0, window.len_k, 0)
  if absent:
    entry = tile * N // table.page_size
    place = tile * N % table.page_size
    for b in gl.static_range(N // BOX):
      page = gl.load(table.first + entry,
                     mask=tile * N + b * BOX < window.len_k, other=-1)
      gone = (page < 0) | (page >= table.pages)
      stop = gl.where((cols // BOX == b) & gone, 0, stop)
      entry, place = _following(entry, place, table, BOX)
  return scores_hopper.Window(window.off, window.left, window.right, 0,
                              window.len_q, stop[None, :])


@gluon.jit
def _copy_cut(values, table, i, key, stop, N: gl.constexpr, HEAD: gl.constexpr,
              BOX: gl.constexpr):
  """Copies the box from `key` on, which `stop` cuts: zeros from there on."""
  PARTS: gl.constexpr = HEAD // COLS
  LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
  page = gl.load(table.first + key // table.page_size)
  there = (page >= 0) & (page < table.pages)
  rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
  at = (rows * values.token)[:, None] + cols[None, :]
  base = (values.data + gl.where(there, page, 0).to(gl.int64) * values.page
          + key % table.page_size * values.token)
  left = gl.where(there, stop - key, 0)
  for chunk in range(key, key + BOX, CHUNK):
    for part in gl.static_range(PARTS):
      mask = (rows < left)[:, None] & (part * COLS + cols
                                       < values.hdim)[None, :]
      place = (i * PARTS + part) * (N // CHUNK) + chunk % N // CHUNK
      async_copy.async_load(values.chunks.index(place),
                            base + part * COLS + at, mask=mask)
    base += CHUNK * values.token
    left -= CHUNK
  async_copy.commit_group()
  async_copy.wait_group(0)
  fence_async_shared()
  gl.barrier()


@gluon.jit
def _copy_tile(desc, boxes, empty, full, i, phase, table, values, head, first,
               stop, N: gl.constexpr, HEAD: gl.constexpr, BOX: gl.constexpr,
               CUT: gl.constexpr):
  """Copies a tile of keys or values from key `first` on, box by box.

  CUT: the box that `stop` cuts comes row by row.
  """
  BOXES: gl.constexpr = N // BOX
  PARTS: gl.constexpr = HEAD // COLS
  BYTES: gl.constexpr = PARTS * desc.nbytes_per_cta
  entry = first // table.page_size
  start = first - entry * table.page_size
  # Numbers of pages are under way while the tile before is in use.
  place = start
  pages = ()
  for b in gl.static_range(BOXES):
    page = gl.load(table.first + entry, mask=first + b * BOX < stop, other=-1)
    pages = pages + (page,)
    entry, place = _following(entry, place, table, BOX)
  mbarrier.wait(empty, phase ^ 1)
  cut = stop
  if CUT:
    cut = gl.where(stop % BOX > 0, stop // BOX * BOX, stop)
  if cut < gl.minimum(stop, first + N):
    _copy_cut(values, table, i, cut, stop, N, HEAD, BOX)
    mbarrier.expect(full, (BOXES - 1) * BYTES)
  else:
    mbarrier.expect(full, BOXES * BYTES)
  at = i * PARTS * BOXES
  place = start
  for b in gl.static_range(BOXES):
    page = gl.minimum(gl.maximum(pages[b], -1), table.pages)
    for part in gl.static_range(PARTS):
      tma.async_load(desc, [page, head, place, part * COLS], full,
                     boxes.index(at + part * BOXES + b),
                     pred=(first + b * BOX != cut) | (cut == stop))
    place = _following(0, place, table, BOX)[1]


@gluon.jit
def _produce(args, N: gl.constexpr, HEAD: gl.constexpr, BOX: gl.constexpr,
             STAGES: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr):
  """Copies the tile of keys, of values, or both, of every step."""
  (k_desc, v_desc, keys, k_boxes, v_boxes, table, values, head, last_tile,
   steps, stop) = args
  for step in range(steps):
    first = (last_tile - 1 - step) * N
    i, phase = hopper.ring(step, STAGES)
    if KEYS:
      _copy_tile(k_desc, k_boxes, keys.k_empty.index(i), keys.k_full.index(i),
                 i, phase, table, values, head, first, stop, N, HEAD, BOX,
                 False)
    if VALUES:
      # What lies behind the last key may be NaN, and 0 * NaN is NaN.
      _copy_tile(v_desc, v_boxes, keys.v_empty.index(i), keys.v_full.index(i),
                 i, phase, table, values, head, first, stop, N, HEAD, BOX, True)


@gluon.jit
def _consume(w: gl.constexpr, args, N: gl.constexpr, HEAD: gl.constexpr,
             BOX: gl.constexpr, STAGES: gl.constexpr):
  """Computes 64 rows: an online softmax over the key tiles."""
  (q, hdim, q_smem, keys, rows, table, out, hdim_v, lse, parts_out, parts_lse,
   sinks, window, low, last_tile, steps, full_lo, full_hi, negate, terms,
   out_scale, has_sink, tokens, parts, flags) = args
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  query = _row(rows, w * 64, 64, ROWS)[0]
  acc = parts_hopper.zeros(64, HEAD, 0)
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  norm = gl.zeros([64], gl.float32, ROWS)
  # Rows of a tile are not its queries: positions come as they are.
  place = gl.arange(0, 64, ROWS)
  seen = scores_hopper.Window(
      (query - place + (window.off + rows.query))[:, None], window.left,
      window.right, 0, window.len_q, window.len_k)
  if steps > 0:
    q_rows = q_smem.index(w)
    _load_queries(q, hdim, rows, w, q_rows, HEAD)
    absent = _any_absent(
        table, gl.maximum((last_tile - steps) * N, low) // table.page_size,
        (gl.minimum(last_tile * N, window.len_k) + table.page_size - 1)
        // table.page_size)
    async_copy.wait_group(0)
    if negate:
      gl.barrier()
      for row in gl.static_range(0, 64, CHUNK):
        chunk = q_rows.slice(row, CHUNK)
        chunk.store(-chunk.load(hopper.rows_layout(HEAD)))
    fence_async_shared()
    gl.barrier()
    q_tile = parts_hopper.tile(
        parts_hopper.Parts(q_smem, q_smem), w, 64, HEAD, 0)
    mbarrier.wait(keys.k_full.index(0), 0)
    s = parts_hopper.product(
        q_tile, parts_hopper.tile(keys.k, 0, N, HEAD, 0), 64, N, 0)
    s = warpgroup_mma_wait(0, deps=[s])
    tile = last_tile - 1
    e, m, _ = fwd_hopper.exponentials(
        s, m, 0, tile, _window_of(seen, table, absent, tile, N, BOX), terms,
        keys, 0, N, STAGES, 0, True, 0)
    norm = gl.sum(e, 1)
    p = parts_hopper.operand(e, q_smem.dtype, HEAD)
    # Tiles that the diagonal or the end crosses, or all if a page is absent,
    # then whole tiles, then those that the window's left edge crosses.
    right = gl.minimum(gl.maximum(last_tile - full_hi, 1), steps)
    right = gl.where(absent, steps, right)
    whole = gl.minimum(gl.maximum(last_tile - full_lo, right), steps)
    for step in range(1, right):
      tile = last_tile - 1 - step
      acc, p, m, norm = fwd_hopper.pipelined_step(
          acc, p, m, norm, q_tile, keys, step, tile, 0,
          _window_of(seen, table, absent, tile, N, BOX), terms, N, HEAD, 0,
          HEAD, 0, STAGES, 0, True, 0)
    for step in range(right, whole):
      acc, p, m, norm = fwd_hopper.pipelined_step(
          acc, p, m, norm, q_tile, keys, step, last_tile - 1 - step, 0, seen,
          terms, N, HEAD, 0, HEAD, 0, STAGES, 0, False, 0)
    for step in range(whole, steps):
      acc, p, m, norm = fwd_hopper.pipelined_step(
          acc, p, m, norm, q_tile, keys, step, last_tile - 1 - step, 0, seen,
          terms, N, HEAD, 0, HEAD, 0, STAGES, 0, True, 0)
    i, phase = hopper.ring(steps - 1, STAGES)
    mbarrier.wait(keys.v_full.index(i), phase)
    acc = parts_hopper.accumulate(
        acc, p, parts_hopper.tile(keys.v, i, N, HEAD, 0), 0)
    acc = parts_hopper.wait(0, acc, 0)

  # Found once more, rather than kept in registers all the while.
  again = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rows.first],
                                    gl.int32, False, 1)
  rows = Rows(again, rows.left, rows.query, rows.head, rows.group, rows.nhead_q)
  query, head, row, live = _row(rows, w * 64, 64, ROWS)
  # In base 2, with the sink, which is a key without a value.
  m = m * (terms.scale * scores.LOG2E)
  if has_sink:
    sink = gl.load(sinks + head) * scores.LOG2E
    m_new = gl.maximum(m, sink)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - shift)
    norm = norm * alpha + gl.exp2(sink - shift)
    acc = parts_hopper.scale_rows(acc, alpha, HEAD, 0)
    m = m_new
  any_key = norm != 0.0
  norm = gl.where(any_key, norm, 1.0)
  acc = parts_hopper.scale_rows(
      acc, gl.where(any_key, out_scale / norm, 0.0), HEAD, 0)
  row_lse = gl.where(any_key, m * scores.LN2 + gl.log(norm), float("-inf"))
  if parts > 1:
    gl.store(parts_lse + row, row_lse, mask=live)
    _store(parts_out, acc.main, rows, w, hdim_v, HEAD)
  else:
    if (flags & attend.LSE) != 0:
      gl.store(lse + (head * tokens + query), row_lse, mask=live)
    _store(out, acc.main, rows, w, hdim_v, HEAD)


@gluon.jit
def _store(base, x, rows, w: gl.constexpr, hdim, HEAD: gl.constexpr):
  """Stores a warpgroup's rows."""
  LAYOUT: gl.constexpr = hopper.accumulator(HEAD)
  _, _, row, live = _row(rows, w * 64, 64, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, HEAD, gl.SliceLayout(0, LAYOUT))
  gl.store(base + (row * hdim)[:, None] + cols[None, :],
           x.to(base.dtype.element_ty),
           mask=live[:, None] & (cols < hdim)[None, :])


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [page, head, token, dim]."""
  assert function == "paged_attend", function
  block = 1, 1, constants["BOX"], COLS.value
  return {f"{side}_desc": TensorMap(side, block) for side in "kv"}


@gluon.jit
def paged_attend(
    k_desc, v_desc, q, v_cache, out, lse, parts, parts_lse, k_scale, v_scale,
    sinks, table, indptr, lengths, cu_seqlens, k_scale_head, v_start, v_page,
    v_head, v_token, v_scale_head, tokens, batch, seqlen_q, nhead_q, nhead_k,
    group, hdim, hdim_v, pages, page_size, width, splits, programs, window_left,
    window_right, sinks_step, softmax_scale, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    FLAGS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
    ONE_AXIS: gl.constexpr,
):
  """attend.py's paged_attend, of head dimensions up to HEAD.

  Of decoding too, whose few rows are a warpgroup's. A map has a head's columns
  alone: behind them TMA writes zeros.

  Grid: as there; later tiles, the longest when causal, start first.
  """
  WARPGROUPS: gl.constexpr = TILE_M // 64
  if not attend.PARTIAL & FLAGS:
    hdim = HEAD
    hdim_v = HEAD
  gl.static_assert(TILE_M == 64 * WARPGROUPS)
  gdc_launch_dependents()
  lengths = attend.Lengths(lengths, indptr, page_size)
  head = gl.program_id(0) % nhead_k
  slot = gl.num_programs(0) // nhead_k - 1 - gl.program_id(0) // nhead_k
  split = gl.program_id(1)

  index = 0
  start = 0
  len_q = 0
  row0 = 0
  count = splits
  share = 0.0
  lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([1], [32], [4], [0]))
  if ONE_AXIS and splits > 1:
    index, start, len_q, row0, head, split, count = _find_work(
        gl.program_id(0), lanes, cu_seqlens, lengths, batch, tokens, seqlen_q,
        group, nhead_k, window_left, window_right, splits, programs, flags,
        TILE_M, TILE_N, FLAGS)
    share = count * 1.0
  else:
    if splits > 1:
      share = programs / (nhead_k * gl.maximum(gl.sum(_tiles_of_batch(
          lanes, cu_seqlens, lengths, batch, seqlen_q, group, window_left,
          window_right, flags, TILE_M, TILE_N, FLAGS), 0), 1.0))
    index, start, len_q, row0 = _find_rows(
        slot, cu_seqlens, batch, tokens, seqlen_q, group, flags, TILE_M, FLAGS)
  left = gl.maximum(len_q * group - row0, 0)
  first, _, offset, low, stop, first_tile, last_tile = _find_keys(
      index, row0, gl.minimum(TILE_M, left), len_q, lengths, indptr, batch,
      width, pages, page_size, group, window_left, window_right, split, count,
      share, flags, TILE_N, FLAGS)
  steps = gl.where(left > 0, gl.maximum(last_tile - first_tile, 0), 0)
  full_lo = 0
  full_hi = stop
  if (flags & attend.WINDOW) != 0:
    last = (row0 + gl.minimum(TILE_M, left) - 1) // group
    full_lo = gl.maximum(offset + last - window_left, 0)
    full_hi = gl.minimum(stop, offset + row0 // group + window_right + 1)
  full_lo = (full_lo + TILE_N - 1) // TILE_N
  full_hi = gl.maximum(full_hi, 0) // TILE_N

  # A scale below 0 turns the queries; that of 0 is one that changes nothing.
  scale = softmax_scale * gl.load(k_scale + head.to(gl.int64) * k_scale_head)
  out_scale = gl.load(v_scale + head.to(gl.int64) * v_scale_head)
  terms = Scale(gl.maximum(gl.abs(scale), 1e-30))
  query = row0 // group
  rows = Rows(row0, left, query, head * group, group, nhead_q)
  # Of the tile's first query; the rest of an address has 32 bits.
  row = (start + query).to(gl.int64) * nhead_q
  part = split.to(gl.int64) * tokens * nhead_q + row
  if ONE_AXIS and (split == count - 1) & (count < splits):
    # As attend.py ends them.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = _row(rows, 0, TILE_M, LAYOUT)
    end = gl.where(count > 1, count, 0).to(gl.int64) * tokens * nhead_q + row
    gl.store(parts_lse + end + at[2],
             gl.full([TILE_M], float("inf"), gl.float32, LAYOUT), mask=at[3])
  pages_of = Table(table + first, pages, page_size)
  window = scores_hopper.Window(offset, window_left, window_right, 0, len_q,
                                stop)
  has_sink = ((flags & attend.SINK) != 0) & (split == 0) & (index < batch)

  WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
  BOXES: gl.constexpr = STAGES * (TILE_N // BOX) * (HEAD // COLS)
  q_smem = gl.allocate_shared_memory(
      k_desc.dtype, [WARPGROUPS, 64, HEAD], WIDE)
  k_smem = gl.allocate_shared_memory(
      k_desc.dtype, [STAGES, TILE_N, HEAD], WIDE)
  v_smem = gl.allocate_shared_memory(
      v_desc.dtype, [STAGES, TILE_N, HEAD], WIDE)
  k_boxes = k_smem.reinterpret(
      k_desc.dtype, hopper.stack(BOXES, k_desc.block_type.shape), k_desc.layout)
  v_boxes = v_smem.reinterpret(
      v_desc.dtype, hopper.stack(BOXES, v_desc.block_type.shape), v_desc.layout)
  chunks = v_smem.reinterpret(
      v_desc.dtype, [BOXES * BOX // CHUNK, CHUNK, COLS], WIDE)
  values = Values(v_cache + v_start + head.to(gl.int64) * v_head, v_page,
                  v_token, hdim_v, chunks)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=WARPGROUPS)
    mbarrier.init(v_empty.index(i), count=WARPGROUPS)
  keys = fwd_hopper.Keys(
      parts_hopper.Parts(k_smem, k_smem), parts_hopper.Parts(v_smem, v_smem),
      k_full, k_empty, v_full, v_empty,
      scores_hopper.allocate_planes(terms, STAGES, WARPGROUPS, 64, TILE_N,
                                    0),
      k_full, k_empty)

  produce = (k_desc, v_desc, keys, k_boxes, v_boxes, pages_of, values, head,
             last_tile, steps, stop)
  consume = (q + row * hdim, hdim, q_smem, keys, rows, pages_of,
             out + row * hdim_v, hdim_v, lse + start + query,
             parts + part * hdim_v, parts_lse + part,
             sinks + index * sinks_step, window, low, last_tile, steps, full_lo,
             full_hi, scale < 0, terms, out_scale, has_sink, tokens, count,
             flags)
  if WARPGROUPS == 1:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, HEAD, BOX, STAGES)),
        (_produce, (produce, TILE_N, HEAD, BOX, STAGES, True, False)),
        (_produce, (produce, TILE_N, HEAD, BOX, STAGES, False, True)),
    ], [1, 1], [40, 40])
  elif BOX < 64:
    # So many boxes are more than one warp asks for in time.
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, HEAD, BOX, STAGES)),
        (_consume, (1, consume, TILE_N, HEAD, BOX, STAGES)),
        (_produce, (produce, TILE_N, HEAD, BOX, STAGES, True, False)),
        (_produce, (produce, TILE_N, HEAD, BOX, STAGES, False, True)),
    ], [4, 1, 1], [232, 40, 40])
  else:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, HEAD, BOX, STAGES)),
        (_consume, (1, consume, TILE_N, HEAD, BOX, STAGES)),
        (_produce, (produce, TILE_N, HEAD, BOX, STAGES, True, True)),
    ], [4, 1], [232, 40])
