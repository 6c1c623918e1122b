# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches for Hopper (sm_90), in Gluon.

Rows, keys and splits are attend.py's, the pipeline is attention's of
kernels/mha/fwd_hopper.py; what differs is where keys come from. A map views a
cache as [page, head, token, dim], and a tile of keys is copied in boxes of BOX
tokens, which no page cuts, and 128 bytes of columns, which lie together in a
swizzled tile. A box of an absent page, or behind the last key, is one outside
of the map: TMA fills it with zeros.

Small pages have many boxes, and what asks for one is issued beside the softmax.
Where rows are whole runs of 128 bytes, a box has all runs of its tokens: the
map divides tokens by eight, so that a run of eight tokens is followed by their
next one, then by the next eight.

A cache of bytes is copied so to where a warpgroup reads it, and writes what it
says, in the queries' type, to the ring that the consumers take tiles from.

A shuffled cache has runs of 16 bytes, of a key's columns and, of values, of
tokens in one column (runs_hopper.py). Threads copy them one by one; values lie
in their tiles as they do in memory, keys side by side, which is the other of
the two orders that a product takes its right operand in.
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
from third_party.aiter.kernels.paged import attend, decode_hopper

# Columns of a box of 16 bits: 128 bytes, which is the widest swizzle.
COLS = gl.constexpr(64)
# Rows that are copied without a map at a time.
CHUNK = gl.constexpr(16)

# A Gluon function calls none of Triton's; of one source it may be either.
keys_of_length = gluon.jit(attend.keys_of_length.fn)
_length_of = gluon.jit(attend.length_of.fn)
_find_work = gluon.jit(attend.find_work.fn)
tiles_of_batch = gluon.jit(attend.tiles_of_batch.fn)


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


class Half(NamedTuple):
  """A head's keys or values in a shuffled cache: steps between pages, and in
  one, in elements, between tokens (values: runs of them) and runs (columns)."""
  data: tl.tensor
  page: tl.tensor
  token: tl.tensor
  run: tl.tensor


class Terms(NamedTuple):
  """What fwd_hopper.py takes of scores.Terms; `slope` is that of each row."""
  scale: tl.tensor
  logits_soft_cap: tl.tensor
  slope: tl.tensor


class Bytes(NamedTuple):
  """Rings of tiles of bytes: a step's keys, and the values of the one before.

  These are converted, and needed, together.
  """
  k: tl.tensor
  v: tl.tensor
  full: tl.tensor
  empty: tl.tensor


class Scales(NamedTuple):
  """A head's scales of keys or values: steps between pages and tokens."""
  data: tl.tensor
  page: tl.tensor
  token: tl.tensor


# What makes bfloat16 of a pair of float16; and of integers directly: 128 + x is
# 0x4300 with x for its lowest seven bits, and 256, the sign's, 0x4380.
_ROUND = """
      mov.b32 {{c, d}}, {0};
      cvt.f32.f16 e, c;
      cvt.f32.f16 f, d;
      cvt.rn.bf16x2.f32 {0}, f, e;"""
_INT8_PAIR = """
      prmt.b32 {0}, w, 0, {1};
      lop3.b32 t, {0}, 0x007f007f, 0x43004300, 0xea;
      lop3.b32 k, {0}, 0x00800080, 0x43004300, 0xea;
      sub.bf16x2 {0}, t, k;"""


def _of_words(ptx):
  """The assembly of a word, $2, whose bytes $0 and $1 are, of 16 bits each."""
  return ("{ .reg .b16 c, d; .reg .b32 w, l, h, t, k; .reg .f32 e, f;"
          f" mov.b32 w, $2; {ptx} mov.b32 $0, l; mov.b32 $1, h; }}")


# By type, in the order of KINDS.
_NUMBERS = {
    "fp16": tuple(map(_of_words, decode_hopper.HALVES)),
    "bf16": tuple(_of_words(ptx) for ptx in (
        _INT8_PAIR.format("l", "0x4140") + _INT8_PAIR.format("h", "0x4342"),
        *(half + _ROUND.format("l") + _ROUND.format("h")
          for half in decode_hopper.HALVES[1:]))),
}


@gluon.constexpr_function
def _number_text(kind, dtype):
  return _NUMBERS[dtype][kind]


@gluon.jit
def find_rows(slot, lanes, cu_seqlens, lengths, batch, tokens, seqlen_q, group,
              flags, TILE_M: gl.constexpr, FLAGS: gl.constexpr):
  """attend.find_rows, which looks at so many sequences at a time; and keys."""
  tiles_each = (seqlen_q * group + TILE_M - 1) // TILE_M
  index = slot // gl.maximum(tiles_each, 1)
  tile = slot - index * tiles_each
  start = index * seqlen_q
  len_q = seqlen_q
  length = start * 0
  if attend.CU_SEQLENS & FLAGS and flags & attend.CU_SEQLENS:
    index = 0
    searching = True
    passed = 0
    end = tokens
    while searching:
      at = passed + lanes
      begin = gl.load(cu_seqlens + at, mask=at <= batch, other=tokens)
      keys = _length_of(lengths, at, at < batch, flags)
      begin = gl.minimum(gl.maximum(begin, 0), tokens)
      begun = (begin * group // TILE_M + at <= slot) & (at <= batch)
      index = gl.maximum(index, gl.max(gl.where(begun, at, 0), 0))
      # Of those that are there already, rather than by one more load.
      start = gl.where(index < passed, start,
                       gl.sum(gl.where(at == index, begin, 0), 0))
      length = gl.where(index < passed, length,
                        gl.sum(gl.where(at == index, keys, 0), 0))
      end = gl.sum(gl.where(at == index + 1, begin, 0), 0)
      passed += attend.LANES
      searching = index == passed - 1
    len_q = end - start
    tile = slot - (start * group // TILE_M + index)
  else:
    length = _length_of(lengths, index, index < batch, flags)
  return index, start, len_q, tile * TILE_M, length


@gluon.jit
def share_of(splits, programs, nhead_k, lanes, cu_seqlens, lengths, batch,
             seqlen_q, group, window_left, window_right, flags,
             TILE_M: gl.constexpr, N: gl.constexpr, FLAGS: gl.constexpr):
  """Programs that a tile of keys is worth, where keys are divided."""
  share = 0.0
  if splits > 1:
    share = programs / (nhead_k * gl.maximum(gl.sum(tiles_of_batch(
        lanes, cu_seqlens, lengths, batch, seqlen_q, group, window_left,
        window_right, flags, TILE_M, N, FLAGS), 0), 1.0))
  return share


@gluon.jit
def seen_by_all(row0, rows, offset, stop, group, window_left, window_right,
                flags, N: gl.constexpr):
  """(first, end) of the tiles of keys that all `rows` from row0 on see."""
  first = 0
  end = stop
  if (flags & attend.WINDOW) != 0:
    last = (row0 + rows - 1) // group
    first = gl.maximum(offset + last - window_left, 0)
    end = gl.minimum(stop, offset + row0 // group + window_right + 1)
  return (first + N - 1) // N, gl.maximum(end, 0) // N


@gluon.jit
def row_at(rows, begin, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
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


@gluon.constexpr_function
def copy_layout(warps):
  """How warps copy runs of 64 columns, of which a thread has 16 bytes."""
  return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def query_tile(smem, i, HEAD: gl.constexpr):
  """The i-th 64 rows of queries, as matrices."""
  return parts_hopper.tile(parts_hopper.Parts(smem, smem), i, 64, HEAD, 0)


@gluon.jit
def load_queries(q, hdim, rows, w: gl.constexpr, smem, HEAD: gl.constexpr):
  """Begins to copy a warpgroup's rows, with zeros behind their columns."""
  LAYOUT: gl.constexpr = hopper.rows_layout(HEAD)
  # A row is found by one thread, not by each that copies of it.
  _, _, at, live = row_at(rows, w * 64, 64,
                          gl.BlockedLayout([1], [32], [4], [0]))
  at = gl.convert_layout(gl.where(live, at, -1), gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, HEAD, gl.SliceLayout(0, LAYOUT))
  async_copy.async_load(
      smem, q + (gl.maximum(at, 0) * hdim)[:, None] + cols[None, :],
      mask=(at >= 0)[:, None] & (cols < hdim)[None, :])
  async_copy.commit_group()


@gluon.jit
def negate(smem):
  """Turns 64 rows of queries, which is what a scale below 0 means."""
  LAYOUT: gl.constexpr = copy_layout(gl.num_warps())
  gl.barrier()
  for row in gl.static_range(0, 64, CHUNK):
    chunk = smem.slice(row, CHUNK)
    chunk.store(-chunk.load(LAYOUT))


@gluon.jit
def any_absent(table, first, end):
  """Whether a page of table[first:end] is absent."""
  WARPS: gl.constexpr = gl.num_warps()
  COUNT: gl.constexpr = 128 * WARPS
  at = gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [WARPS], [0]))
  absent = at * 0
  for i in range(first, end, COUNT):
    page = gl.load(table.first + i + at, mask=i + at < end, other=0)
    absent = absent | gl.where((page < 0) | (page >= table.pages), 1, 0)
  return gl.max(absent, 0) > 0


@gluon.jit
def following(entry, place, page_size, BOX: gl.constexpr):
  """The box after one that is at `place` of table[entry]'s page."""
  place += BOX
  ends = place >= page_size
  return gl.where(ends, entry + 1, entry), gl.where(ends, 0, place)


@gluon.jit
def window_of(window, table, absent, tile, N: gl.constexpr,
              BOX: gl.constexpr):
  """The window of a tile, in which a key of an absent page is not seen."""
  gone = 0  # A bit a box.
  if absent:
    entry = tile * N // table.page_size
    place = tile * N % table.page_size
    for b in range(N // BOX):
      page = gl.load(table.first + entry,
                     mask=tile * N + b * BOX < window.len_k, other=-1)
      gone |= gl.where((page < 0) | (page >= table.pages), 1 << b, 0)
      entry, place = following(entry, place, table.page_size, BOX)
  # Of a thread's columns it is known here in which boxes they are.
  cols = gl.arange(0, N, gl.SliceLayout(0, hopper.accumulator(N)))[None, :]
  stop = window.len_k
  for b in gl.static_range(N // BOX):
    stop = gl.where((cols // BOX == b) & ((gone >> b) & 1 != 0), 0, stop)
  return scores_hopper.Window(window.off, window.left, window.right, 0,
                              window.len_q, stop)


@gluon.jit
def copy_cut(values, table, i, key, stop, N: gl.constexpr, HEAD: gl.constexpr,
              BOX: gl.constexpr):
  """Copies the box from `key` on, which `stop` cuts: zeros from there on."""
  WIDTH: gl.constexpr = values.chunks.shape[2]
  PARTS: gl.constexpr = HEAD // WIDTH
  LAYOUT: gl.constexpr = copy_layout(gl.num_warps())
  page = gl.load(table.first + key // table.page_size)
  there = (page >= 0) & (page < table.pages)
  rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
  at = (rows * values.token)[:, None] + cols[None, :]
  base = (values.data + gl.where(there, page, 0).to(gl.int64) * values.page
          + key % table.page_size * values.token)
  left = gl.where(there, stop - key, 0)
  for chunk in range(key, key + BOX, CHUNK):
    for part in gl.static_range(PARTS):
      mask = (rows < left)[:, None] & (part * WIDTH + cols
                                       < values.hdim)[None, :]
      place = (i * PARTS + part) * (N // CHUNK) + chunk % N // CHUNK
      async_copy.async_load(values.chunks.index(place),
                            base + part * WIDTH + at, mask=mask)
    base += CHUNK * values.token
    left -= CHUNK
  async_copy.commit_group()
  async_copy.wait_group(0)
  fence_async_shared()
  gl.barrier()


@gluon.constexpr_function
def by_eights(rows, cols):
  """The layout of a tile of boxes that have all columns."""
  bits = lambda low, high: [
      1 << i for i in range(low.bit_length() - 1, high.bit_length() - 1)]
  run = [[0, i] for i in bits(1, 64)]
  swizzled = [[i, 8 * i] for i in bits(1, 8)]  # 16 bytes by the row's number.
  return gl.SharedLinearLayout(
      run + swizzled + [[0, i] for i in bits(64, cols)]
      + [[i, 0] for i in bits(8, rows)], alignment=1024)


@gluon.jit
def boxes_of(ring, desc):
  """A ring of tiles as the boxes that make them."""
  BOX: gl.constexpr = desc.block_type.shape
  BYTES: gl.constexpr = desc.dtype.primitive_bitwidth // 8
  COUNT: gl.constexpr = (ring.shape[0] * ring.shape[1] * ring.shape[2] * BYTES
                         // desc.nbytes_per_cta)
  return ring.reinterpret(desc.dtype, hopper.stack(COUNT, BOX), desc.layout)


@gluon.jit
def box_pages(table, first, stop, N: gl.constexpr, BOX: gl.constexpr):
  """The page of each box of a tile; of an absent one, outside of the map."""
  entry = first // table.page_size
  place = first - entry * table.page_size
  pages = ()
  for b in gl.static_range(N // BOX):
    page = gl.load(table.first + entry, mask=first + b * BOX < stop, other=-1)
    pages = pages + (gl.minimum(gl.maximum(page, -1), table.pages),)
    entry, place = following(entry, place, table.page_size, BOX)
  return pages


@gluon.jit
def _copy_boxes(desc, eights, boxes, full, i, pages, table, head, first, cut,
                stop, N: gl.constexpr, HEAD: gl.constexpr, BOX: gl.constexpr):
  """Starts to copy a tile from key `first` on, but for the box that is cut.

  eights: steps of eight tokens from page to page, where maps divide them.
  """
  SHAPE: gl.constexpr = desc.block_type.shape
  BOXES: gl.constexpr = N // BOX
  PARTS: gl.constexpr = 1 if len(SHAPE) == 5 else HEAD // SHAPE[3]
  at = i * PARTS * BOXES
  place = first % table.page_size
  for b in gl.static_range(BOXES):
    pred = (first + b * BOX != cut) | (cut == stop)
    for part in gl.static_range(PARTS):
      box = boxes.index(at + part * BOXES + b)
      if len(SHAPE) == 5:
        tma.async_load(desc, [head, pages[b] * eights + place // 8, 0, 0, 0],
                       full, box, pred=pred)
      else:
        tma.async_load(desc, [pages[b], head, place, part * SHAPE[3]], full,
                       box, pred=pred)
    place = following(0, place, table.page_size, BOX)[1]


@gluon.jit
def copy_tile(desc, eights, boxes, full, i, pages, table, values, head, first,
              stop, length, N: gl.constexpr, HEAD: gl.constexpr,
              BOX: gl.constexpr, CUT: gl.constexpr):
  """Copies a tile of keys or values from key `first` on, box by box.

  CUT: a box that the sequence's end cuts comes row by row.
  """
  BOXES: gl.constexpr = N // BOX
  BYTES: gl.constexpr = BOX * HEAD * desc.dtype.primitive_bitwidth // 8
  cut = stop
  if CUT:
    box = stop // BOX * BOX
    cut = gl.where((stop > gl.maximum(box, first)) & (length < box + BOX), box,
                   stop)
  if cut < gl.minimum(stop, first + N):
    copy_cut(values, table, i, cut, stop, N, HEAD, BOX)
    mbarrier.expect(full, (BOXES - 1) * BYTES)
  else:
    mbarrier.expect(full, BOXES * BYTES)
  _copy_boxes(desc, eights, boxes, full, i, pages, table, head, first, cut,
              stop, N, HEAD, BOX)


@gluon.jit
def _produce(args, N: gl.constexpr, HEAD: gl.constexpr, BOX: gl.constexpr,
             STAGES: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr):
  """Copies the tile of keys, of values, or both, of every step."""
  (k_desc, v_desc, k_eights, v_eights, keys, k_boxes, v_boxes, begun, table,
   values, head, last_tile, steps, stop, length) = args
  if VALUES and not KEYS:
    # The first keys are needed first.
    if steps > 0:
      mbarrier.wait(begun, 0)
  for step in range(steps):
    first = (last_tile - 1 - step) * N
    i, phase = hopper.ring(step, STAGES)
    # Numbers of pages are under way while the tile before is in use.
    pages = box_pages(table, first, stop, N, BOX)
    if KEYS:
      mbarrier.wait(keys.k_empty.index(i), phase ^ 1)
      copy_tile(k_desc, k_eights, k_boxes, keys.k_full.index(i), i, pages,
                table, values, head, first, stop, length, N, HEAD, BOX, False)
      if not VALUES:
        mbarrier.arrive(begun, pred=step == 0)
    if VALUES:
      # What lies behind the last key may be NaN, and 0 * NaN is NaN.
      mbarrier.wait(keys.v_empty.index(i), phase ^ 1)
      copy_tile(v_desc, v_eights, v_boxes, keys.v_full.index(i), i, pages,
                table, values, head, first, stop, length, N, HEAD, BOX, True)


@gluon.constexpr_function
def _runs_of_keys(run, warps):
  """How warps copy keys of a shuffled cache: 64, a thread a token, whose
  neighbours lie behind it."""
  return gl.BlockedLayout([1, run], [32, 1], [2, warps // 2], [1, 0])


@gluon.constexpr_function
def _runs_of_values(n, run, warps):
  """How they copy values: 16 columns and two runs of `run` tokens a warp, so
  that lanes write all banks, and read 32 bytes where a column's tokens follow
  each other."""
  bits = lambda low, high: [
      [1 << i, 0] for i in range(low.bit_length() - 1, high.bit_length() - 1)]
  return gl.DistributedLinearLayout(
      reg_bases=bits(1, run) + bits(2 * run, n),
      lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [run, 0]],
      warp_bases=[[0, 16 << i] for i in range(warps.bit_length() - 1)],
      block_bases=[], shape=[n, 16 * warps])


@gluon.jit
def _copy_runs_of_keys(k, smem, boxes, left, N: gl.constexpr,
                       HEAD: gl.constexpr, BOX: gl.constexpr):
  """Starts to copy `left` keys; the others of a tile become 0."""
  RUN: gl.constexpr = 128 // smem.dtype.primitive_bitwidth
  LAYOUT: gl.constexpr = _runs_of_keys(RUN, gl.num_warps())
  ROWS: gl.constexpr = 64
  cols = gl.arange(0, HEAD, gl.SliceLayout(0, LAYOUT))
  run = decode_hopper._again(k.run) // RUN * RUN
  at = cols // RUN * run + cols % RUN
  for row in gl.static_range(0, N, ROWS):
    keys = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    page, place = decode_hopper._of_box(boxes, keys, N, BOX)
    base = (page.to(gl.int64) * k.page
            + (place + keys % BOX) * k.token)
    async_copy.async_load(
        smem.slice(row, ROWS), k.data + base[:, None] + at[None, :],
        mask=((keys < left) & (page >= 0))[:, None])


@gluon.jit
def _copy_runs_of_values(v, smem, boxes, left, N: gl.constexpr,
                         HEAD: gl.constexpr, BOX: gl.constexpr):
  """Starts to copy values likewise, but for a run that `left` cuts: whole."""
  RUN: gl.constexpr = 128 // smem.dtype.primitive_bitwidth
  LAYOUT: gl.constexpr = _runs_of_values(N, RUN, gl.num_warps())
  COLS: gl.constexpr = 16 * gl.num_warps()
  tokens = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
  page, place = decode_hopper._of_box(boxes, tokens, N, BOX)
  base = (page.to(gl.int64) * v.page
          + (place // RUN + tokens % BOX // RUN) * (v.token // RUN * RUN)
          + tokens % RUN)
  run = decode_hopper._again(v.run) // RUN * RUN
  shown = (tokens // RUN * RUN < left) & (page >= 0)
  for col in gl.static_range(0, HEAD, COLS):
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
    at = base[:, None] + (cols * run)[None, :]
    at = gl.max_contiguous(gl.multiple_of(at, [RUN, 1]), [RUN, 1])
    async_copy.async_load(smem.slice(col, COLS, dim=1), v.data + at,
                          mask=shown[:, None])


@gluon.jit
def _clear_behind(smem, left, N: gl.constexpr, HEAD: gl.constexpr):
  """Makes values from the `left`-th on zeros: they may be NaN."""
  RUN: gl.constexpr = 128 // smem.dtype.primitive_bitwidth
  LAYOUT: gl.constexpr = _runs_of_values(N, RUN, gl.num_warps())
  COLS: gl.constexpr = 16 * gl.num_warps()
  tokens = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
  live = tokens % RUN < left - tokens // RUN * RUN
  for col in gl.static_range(0, HEAD, COLS):
    part = smem.slice(col, COLS, dim=1)
    part.store(gl.where(live[:, None], part.load(LAYOUT), 0.0))


@gluon.jit
def _arrived(pending: gl.constexpr, full):
  """Says that a tile is there, where `pending` later ones are under way."""
  async_copy.wait_group(pending)
  fence_async_shared()
  gl.barrier()
  mbarrier.arrive(full)


@gluon.jit
def _produce_runs(args, N: gl.constexpr, HEAD: gl.constexpr,
                  BOX: gl.constexpr, STAGES: gl.constexpr,
                  KEYS: gl.constexpr):
  """_produce of a shuffled cache: the tiles of keys, or those of values."""
  half, smem, empty, full, table, last_tile, steps, stop = args
  for step in range(steps):
    first = (last_tile - 1 - step) * N
    left = stop - first
    boxes = decode_hopper._pages(table.first, table.page_size, table.pages,
                                 first, stop, N, BOX)
    i, phase = hopper.ring(step, STAGES)
    mbarrier.wait(empty.index(i), phase ^ 1)
    if KEYS:
      _copy_runs_of_keys(half, smem.index(i), boxes, left, N, HEAD, BOX)
    else:
      _copy_runs_of_values(half, smem.index(i), boxes, left, N, HEAD, BOX)
    async_copy.commit_group()
    if not KEYS and left < N:
      async_copy.wait_group(0)
      gl.barrier()
      _clear_behind(smem.index(i), left, N, HEAD)
    if step > 0:
      _arrived(1, full.index((step - 1) % STAGES))
  if steps > 0:
    _arrived(0, full.index((steps - 1) % STAGES))


@gluon.jit
def _load_scales(scales, table, first, stop, N: gl.constexpr):
  """Scales of keys and of values from token `first` on; 0 where none is."""
  WARPS: gl.constexpr = gl.num_warps()
  tokens = first + gl.arange(0, N, gl.BlockedLayout([1], [32], [WARPS], [0]))
  page = gl.load(table.first + tokens // table.page_size,
                 mask=(first >= 0) & (tokens < stop), other=-1)
  there = (page >= 0) & (page < table.pages)
  found = ()
  for i in gl.static_range(2):
    at = (page.to(gl.int64) * scales[i].page
          + tokens % table.page_size * scales[i].token)
    found = found + (gl.load(scales[i].data + at, mask=there, other=0.0),)
  return found


@gluon.jit
def _produce_bytes(args, N: gl.constexpr, HEAD: gl.constexpr,
                   BOX: gl.constexpr, RAW: gl.constexpr):
  """Copies the tiles of bytes of every step."""
  k_desc, v_desc, bytes_, table, head, last_tile, steps, stop = args
  TILE: gl.constexpr = N * HEAD
  v_pages = box_pages(table, stop, stop, N, BOX)
  for step in range(gl.where(steps > 0, steps + 1, 0)):
    first = (last_tile - 1 - step) * N
    has_keys = step < steps
    pages = box_pages(table, gl.where(has_keys, first, stop), stop, N, BOX)
    i, phase = hopper.ring(step, RAW)
    full = bytes_.full.index(i)
    mbarrier.wait(bytes_.empty.index(i), phase ^ 1)
    if (step > 0) & has_keys:
      mbarrier.expect(full, 2 * TILE)
    else:
      mbarrier.expect(full, TILE)
    if has_keys:
      _copy_boxes(k_desc, 0, boxes_of(bytes_.k, k_desc), full, i, pages, table,
                  head, first, 0, 0, N, HEAD, BOX)
    if step > 0:
      _copy_boxes(v_desc, 0, boxes_of(bytes_.v, v_desc), full, i, v_pages,
                  table, head, first + N, 0, 0, N, HEAD, BOX)
    v_pages = pages


@gluon.jit
def _produce_byte_runs(args, N: gl.constexpr, HEAD: gl.constexpr,
                       BOX: gl.constexpr, RAW: gl.constexpr):
  """_produce_bytes of a shuffled cache."""
  k, v, bytes_, table, last_tile, steps, stop = args
  DV: gl.constexpr = bytes_.v.shape[2]
  PARTS: gl.constexpr = HEAD // DV
  v_boxes = decode_hopper._pages(table.first, table.page_size, table.pages,
                                 stop, stop, N, BOX)
  for step in range(gl.where(steps > 0, steps + 1, 0)):
    first = (last_tile - 1 - step) * N
    boxes = decode_hopper._pages(
        table.first, table.page_size, table.pages,
        gl.where(step < steps, first, stop), stop, N, BOX)
    i, phase = hopper.ring(step, RAW)
    mbarrier.wait(bytes_.empty.index(i), phase ^ 1)
    if step < steps:
      _copy_runs_of_keys(k, bytes_.k.index(i), boxes, stop - first, N, HEAD,
                         BOX)
    if step > 0:
      for part in gl.static_range(PARTS):
        _copy_runs_of_values(
            Half(v.data + part * DV * v.run, v.page, v.token, v.run),
            bytes_.v.index(i * PARTS + part), v_boxes, stop - first - N, N, DV,
            BOX)
    async_copy.commit_group()
    _arrived(0, bytes_.full.index(i))
    v_boxes = boxes


@gluon.jit
def _write_numbers(bytes_, smem, left, N: gl.constexpr, HEAD: gl.constexpr,
                   KIND: gl.constexpr, CUT: gl.constexpr):
  """Writes what bytes say; zeros from row `left` on, if CUT.

  In a loop: unrolled, scales of tokens take a fifth longer.
  """
  TURNED: gl.constexpr = smem.layout.transposed
  LINES: gl.constexpr = HEAD if TURNED else N
  WIDTH: gl.constexpr = N if TURNED else HEAD
  BLOCK: gl.constexpr = min(WIDTH, 128)
  EACH: gl.constexpr = 64
  CHUNKS: gl.constexpr = LINES // EACH
  # Eight lanes write 128 bytes that lie together, all banks.
  LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
  ASM: gl.constexpr = _number_text(KIND, smem.dtype.name)
  source = bytes_.reinterpret(
      gl.uint8, [WIDTH // BLOCK * CHUNKS, EACH, BLOCK],
      gl.NVMMASharedLayout(BLOCK, 8, rank=2))
  target = smem.reinterpret(smem.dtype, [WIDTH // COLS * CHUNKS, EACH, COLS],
                            gl.NVMMASharedLayout(128, 16, rank=2))
  lines = gl.arange(0, EACH, gl.SliceLayout(1, LAYOUT))[:, None]
  cols = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))[None, :]
  for chunk in range(decode_hopper._again(gl.to_tensor(CHUNKS))):
    for col in gl.static_range(0, WIDTH, COLS):
      part = source.index(col // BLOCK * CHUNKS + chunk)
      x = gl.inline_asm_elementwise(
          ASM, "=r,=r,r", [part.slice(col % BLOCK, COLS, dim=1).load(LAYOUT)],
          smem.dtype, True, 4)
      if CUT:
        rows = col + cols if TURNED else chunk * EACH + lines
        x = gl.where(rows < left, x, 0.0)
      target.index(col // COLS * CHUNKS + chunk).store(x)


@gluon.jit
def _write_values(bytes_, keys, i, vi, left, N: gl.constexpr,
                  HEAD: gl.constexpr, KIND: gl.constexpr, CUT: gl.constexpr):
  """_write_numbers of both parts of a tile of values."""
  DV: gl.constexpr = keys.v.main.shape[2]
  PARTS: gl.constexpr = HEAD // DV
  _write_numbers(bytes_.v.index(i * PARTS), keys.v.main.index(vi), left, N, DV,
                 KIND, CUT)
  if PARTS > 1:
    _write_numbers(bytes_.v.index(i * PARTS + 1), keys.v.tail.index(vi), left,
                   N, DV, KIND, CUT)


@gluon.jit
def _convert(bytes_, keys, scales, table, last_tile, steps, stop,
             N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr,
             RAW: gl.constexpr, KIND: gl.constexpr, SCALED: gl.constexpr):
  """Writes what the bytes of every step say to the ring of the consumers."""
  if SCALED:
    # A step ahead of their tiles.
    of_keys, of_values = _load_scales(scales, table, (last_tile - 1) * N, stop,
                                      N)
  for step in range(gl.where(steps > 0, steps + 1, 0)):
    i, phase = hopper.ring(step, RAW)
    ki, k_phase = hopper.ring(step, STAGES)
    vi, v_phase = hopper.ring(step - 1, STAGES)
    mbarrier.wait(bytes_.full.index(i), phase)
    if step < steps:
      mbarrier.wait(keys.k_empty.index(ki), k_phase ^ 1)
      _write_numbers(bytes_.k.index(i), keys.k.main.index(ki), N, N, HEAD,
                     KIND, False)
      if SCALED:
        keys.planes.bias.index(ki).store(of_keys)
        keys.planes.mask.index(ki).store(of_values)
        of_keys, of_values = _load_scales(
            scales, table, (last_tile - 2 - step) * N, stop, N)
    if step > 0:
      mbarrier.wait(keys.v_empty.index(vi), v_phase ^ 1)
      # What lies behind the last key may be NaN, and 0 * NaN is NaN.
      left = stop - (last_tile - step) * N
      if left < N:
        _write_values(bytes_, keys, i, vi, left, N, HEAD, KIND, True)
      else:
        _write_values(bytes_, keys, i, vi, N, N, HEAD, KIND, False)
    fence_async_shared()
    gl.barrier()
    mbarrier.arrive(bytes_.empty.index(i))
    if step < steps:
      mbarrier.arrive(keys.k_full.index(ki))
    if step > 0:
      mbarrier.arrive(keys.v_full.index(vi))


@gluon.jit
def later_steps(acc, p, m, norm, q, keys, use, last_tile, steps, full_lo,
                full_hi, seen, table, absent, terms, turns, N: gl.constexpr,
                HEAD: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
                TURN: gl.constexpr, FEATURES: gl.constexpr):
  """All steps of a tile of rows but the first, whose keys are the use-th."""
  DV: gl.constexpr = keys.v.main.shape[2]
  TAIL: gl.constexpr = HEAD - DV
  # Tiles that the diagonal or the end crosses, or all if a page is absent, then
  # whole tiles, then those that the window's left edge crosses: by the first
  # loop again. With a third one the compiler makes the second longer.
  right = gl.minimum(gl.maximum(last_tile - full_hi, 1), steps)
  right = gl.where(absent, steps, right)
  whole = gl.minimum(gl.maximum(last_tile - full_lo, right), steps)
  begin = gl.to_tensor(1)
  for _ in range(gl.where(whole < steps, 2, 1)):
    for step in range(begin, right):
      tile = last_tile - 1 - step
      acc, p, m, norm = fwd_hopper.pipelined_step(
          acc, p, m, norm, q, keys, use + step, tile, 0,
          window_of(seen, table, absent, tile, N, BOX), terms, N, HEAD, 0, DV,
          TAIL, STAGES, 0, True, FEATURES, turns, TURN)
    for step in range(right, whole):
      acc, p, m, norm = fwd_hopper.pipelined_step(
          acc, p, m, norm, q, keys, use + step, last_tile - 1 - step, 0, seen,
          terms, N, HEAD, 0, DV, TAIL, STAGES, 0, False, FEATURES, turns, TURN)
    begin = whole
    right = steps
  return acc, p, m, norm


@gluon.jit
def store_rows(acc, m, norm, rows, free, unit, out_scale, has_sink, sinks, out,
               lse, parts_out, parts_lse, hdim_v, tokens, parts, flags,
               w: gl.constexpr, ROWS: gl.constexpr, DV: gl.constexpr,
               TAIL: gl.constexpr):
  """Divides a warpgroup's rows by their sums, and stores them.

  unit: what turns m into base 2. free: where 64 rows may be put to store 16
  bytes at a time.
  """
  # Found once more, rather than kept in registers all the while.
  rows = Rows(decode_hopper._again(rows.first), rows.left, rows.query,
              rows.head, rows.group, rows.nhead_q)
  query, head, row, live = row_at(rows, w * 64, 64, ROWS)
  # In base 2, with the sink, which is a key without a value.
  m = m * unit
  if has_sink:
    sink = gl.load(sinks + head) * scores.LOG2E
    m_new = gl.maximum(m, sink)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - shift)
    norm = norm * alpha + gl.exp2(sink - shift)
    acc = parts_hopper.scale_rows(acc, alpha, DV, TAIL)
    m = m_new
  any_key = norm != 0.0
  norm = gl.where(any_key, norm, 1.0)
  acc = parts_hopper.scale_rows(
      acc, gl.where(any_key, out_scale / norm, 0.0), DV, TAIL)
  row_lse = gl.where(any_key, m * scores.LN2 + gl.log(norm), float("-inf"))
  if parts > 1:
    gl.store(parts_lse + row, row_lse, mask=live)
    _store_part(parts_out, acc.main, row, live, hdim_v, 0)
    if TAIL > 0:
      _store_part(parts_out, acc.tail, row, live, hdim_v, DV)
  else:
    if (flags & attend.LSE) != 0:
      gl.store(lse + (head * tokens + query), row_lse, mask=live)
    gl.barrier()
    free.slice(0, DV, dim=1).store(acc.main.to(free.dtype))
    if TAIL > 0:
      free.slice(DV, TAIL, dim=1).store(acc.tail.to(free.dtype))
    gl.barrier()
    _store_part(out, free.load(hopper.rows_layout(DV + TAIL)), row, live,
                hdim_v, 0)


@gluon.jit
def _consume(w: gl.constexpr, args, N: gl.constexpr, HEAD: gl.constexpr,
             BOX: gl.constexpr, STAGES: gl.constexpr,
             TURNS: gl.constexpr, FEATURES: gl.constexpr):
  """Computes 64 rows: an online softmax over the key tiles."""
  (q, hdim, q_smem, keys, turns, rows, table, out, hdim_v, lse, parts_out,
   parts_lse, sinks, slopes, window, low, last_tile, steps, full_lo, full_hi,
   k_scale, v_scale, terms, has_sink, tokens, parts, flags) = args
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  DV: gl.constexpr = keys.v.main.shape[2]
  TAIL: gl.constexpr = HEAD - DV
  TURN: gl.constexpr = w if TURNS else -1
  own = row_at(rows, w * 64, 64, ROWS)
  query = own[0]
  # Here, where what waits for them does not wait for the queries as well.
  scale = terms.scale
  out_scale = 1.0
  if not FEATURES & fwd_hopper.TOKEN_SCALES:
    scale *= gl.load(k_scale)
    out_scale = gl.load(v_scale)
  slope = 0.0
  if FEATURES & scores.ALIBI:
    slope = gl.load(slopes + own[1], mask=own[3], other=0.0) * scores.LOG2E
    slope = slope[:, None]
  # A scale below 0 turns the queries; that of 0 is one that changes nothing.
  terms = Terms(gl.maximum(gl.abs(scale), 1e-30), terms.logits_soft_cap, slope)
  acc = parts_hopper.zeros(64, DV, TAIL)
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  norm = gl.zeros([64], gl.float32, ROWS)
  # Rows of a tile are not its queries: positions come as they are.
  place = gl.arange(0, 64, ROWS)
  seen = scores_hopper.Window(
      (query - place + (window.off + rows.query))[:, None], window.left,
      window.right, 0, window.len_q, window.len_k)
  if steps > 0:
    # All this is asked for before the keys, behind which it would wait.
    q_rows = q_smem.index(w)
    load_queries(q, hdim, rows, w, q_rows, HEAD)
    absent = any_absent(
        table, gl.maximum((last_tile - steps) * N, low) // table.page_size,
        (gl.minimum(last_tile * N, window.len_k) + table.page_size - 1)
        // table.page_size)
    async_copy.wait_group(0)
    if scale < 0:
      negate(q_rows)
    fence_async_shared()
    gl.barrier()
    q_tile = query_tile(q_smem, w, HEAD)
    mbarrier.wait(keys.k_full.index(0), 0)
    s = parts_hopper.product(
        q_tile, parts_hopper.tile(keys.k, 0, N, HEAD, 0), 64, N, 0)
    s = warpgroup_mma_wait(0, deps=[s])
    tile = last_tile - 1
    e, m, _ = fwd_hopper.exponentials(
        s, m, 0, tile, window_of(seen, table, absent, tile, N, BOX), terms,
        keys, 0, N, STAGES, 0, True, FEATURES)
    norm = gl.sum(e, 1)
    e = fwd_hopper.by_value(e, keys, 0, N, STAGES, FEATURES)
    p = parts_hopper.operand(e, q_smem.dtype, DV)
    acc, p, m, norm = later_steps(
        acc, p, m, norm, q_tile, keys, 0, last_tile, steps, full_lo, full_hi,
        seen, table, absent, terms, turns, N, HEAD, BOX, STAGES, TURN, FEATURES)
    i, phase = hopper.ring(steps - 1, STAGES)
    mbarrier.wait(keys.v_full.index(i), phase)
    acc = parts_hopper.accumulate(
        acc, p, parts_hopper.tile(keys.v, i, N, DV, TAIL), TAIL)
    acc = parts_hopper.wait(0, acc, TAIL)

  store_rows(acc, m, norm, rows, q_smem.index(w),
             fwd_hopper.unit_of(terms, FEATURES), out_scale, has_sink, sinks,
             out, lse, parts_out, parts_lse, hdim_v, tokens, parts, flags, w,
             ROWS, DV, TAIL)


@gluon.jit
def _store_part(base, x, row, live, hdim, first):
  """Stores 64 rows of columns from `first` on, each at its place in memory."""
  LAYOUT: gl.constexpr = x.type.layout
  at = gl.convert_layout(gl.where(live, row, -1), gl.SliceLayout(1, LAYOUT))
  cols = first + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
  gl.store(base + (at * hdim)[:, None] + cols[None, :],
           x.to(base.dtype.element_ty),
           mask=(at >= 0)[:, None] & (cols < hdim)[None, :])


@gluon.constexpr_function
def divided(head, box, flags, kind):
  """Whether a box is of all columns, which then are whole runs of 64."""
  return (box < 64 < head and kind < 0
          and not flags & (attend.SHUFFLED.value | attend.PARTIAL.value))


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [page, head, token, dim].

  Or [head, eight tokens, 64 columns, token, column], if they are `divided`.
  """
  assert function == "paged_attend", function
  element, size = ("u8", 1) if constants["KIND"] >= 0 else ("dtype", 2)
  cols = min(constants["HEAD"], 128 // size)
  block = 1, 1, constants["BOX"], cols
  if divided.fn(constants["HEAD"], constants["BOX"], constants["FLAGS"],
                constants["KIND"]):
    block = 1, constants["BOX"] // 8, constants["HEAD"] // cols, 8, cols
  shuffled = attend.SHUFFLED.value & constants["FLAGS"]
  return {f"{side}_desc": None if shuffled else TensorMap(
      side, block, element, swizzle=cols * size) for side in "kv"}


@gluon.jit
def paged_attend(
    k_desc, v_desc, q, k_cache, v_cache, k_bytes, v_bytes, out, lse, parts,
    parts_lse, k_scale, v_scale, sinks, slopes, table, indptr, lengths,
    cu_seqlens, k_start, k_page, k_head, k_token, k_run, k_scale_page,
    k_scale_head, k_scale_token, v_start, v_page, v_head, v_token, v_split,
    v_run_token, v_col, v_scale_page, v_scale_head, v_scale_token, tokens,
    batch, seqlen_q, nhead_q, nhead_k, group, hdim, hdim_v, pages, page_size,
    width, splits, programs, window_left, window_right, sinks_step, slopes_step,
    softmax_scale, logits_soft_cap, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    FLAGS: gl.constexpr, FEATURES: gl.constexpr, KIND: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr,
    ONE_AXIS: gl.constexpr, TURNS: gl.constexpr = 0,
):
  """attend.py's paged_attend, of head dimensions up to HEAD.

  Of decoding too, whose few rows are a warpgroup's. A map has a head's columns
  alone: behind them TMA writes zeros.

  FEATURES: attention's, of which a row is made for a soft cap or ALiBi.
  RAW: how many tiles of a cache of bytes are on their way at once.

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
  length = 0
  count = splits
  share = 0.0
  lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([1], [32], [4], [0]))
  if ONE_AXIS and splits > 1:
    index, start, len_q, row0, head, split, count = _find_work(
        gl.program_id(0), lanes, cu_seqlens, lengths, batch, tokens, seqlen_q,
        group, nhead_k, window_left, window_right, splits, programs, flags,
        TILE_M, TILE_N, FLAGS)
    share = count * 1.0
    length = _length_of(lengths, index, index < batch, flags)
  else:
    share = share_of(
        splits, programs, nhead_k, lanes, cu_seqlens, lengths, batch, seqlen_q,
        group, window_left, window_right, flags, TILE_M, TILE_N, FLAGS)
    index, start, len_q, row0, length = find_rows(
        slot, lanes, cu_seqlens, lengths, batch, tokens, seqlen_q, group, flags,
        TILE_M, FLAGS)
  left = gl.maximum(len_q * group - row0, 0)
  query = row0 // group
  rows = Rows(row0, left, query, head * group, group, nhead_q)
  # Of the tile's first query; the rest of an address has 32 bits.
  row = (start + query).to(gl.int64) * nhead_q
  first, _, offset, low, stop, first_tile, last_tile = keys_of_length(
      index, row0, gl.minimum(TILE_M, left), len_q, length, indptr, batch,
      width, pages, page_size, group, window_left, window_right, split, count,
      share, flags, TILE_N, FLAGS)
  steps = gl.where(left > 0, gl.maximum(last_tile - first_tile, 0), 0)
  full_lo, full_hi = seen_by_all(
      row0, gl.minimum(TILE_M, left), offset, stop, group, window_left,
      window_right, flags, TILE_N)

  SCALED: gl.constexpr = attend.TOKEN_SCALES & FLAGS
  OF_SCORES: gl.constexpr = FEATURES | fwd_hopper.BOXES | (
      fwd_hopper.TOKEN_SCALES if SCALED else 0)
  k_scale += head.to(gl.int64) * k_scale_head
  v_scale += head.to(gl.int64) * v_scale_head
  terms = Terms(softmax_scale, logits_soft_cap, 0.0)
  part = split.to(gl.int64) * tokens * nhead_q + row
  if ONE_AXIS and (split == count - 1) & (count < splits):
    # As attend.py ends them.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = row_at(rows, 0, TILE_M, LAYOUT)
    end = gl.where(count > 1, count, 0).to(gl.int64) * tokens * nhead_q + row
    gl.store(parts_lse + end + at[2],
             gl.full([TILE_M], float("inf"), gl.float32, LAYOUT), mask=at[3])
  pages_of = Table(table + first, pages, page_size)
  window = scores_hopper.Window(offset, window_left, window_right, 0, len_q,
                                stop)
  has_sink = ((flags & attend.SINK) != 0) & (split == 0) & (index < batch)

  SHUFFLED: gl.constexpr = attend.SHUFFLED & FLAGS
  WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
  DIVIDED: gl.constexpr = divided(HEAD, BOX, FLAGS, KIND)
  OF_KEYS: gl.constexpr = by_eights(TILE_N, HEAD) if DIVIDED else WIDE
  OF_VALUES: gl.constexpr = OF_KEYS if DIVIDED else gl.NVMMASharedLayout(
      128, 16, rank=2, transposed=SHUFFLED != 0)
  dtype: gl.constexpr = q.dtype.element_ty
  q_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, 64, HEAD], WIDE)
  k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, HEAD], OF_KEYS)
  # A product onto 256 columns takes more registers than 16 warps begin with.
  DV: gl.constexpr = min(HEAD, 128) if KIND >= 0 else HEAD
  v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, DV], OF_VALUES)
  v_tail = v_smem
  if DV < HEAD:
    v_tail = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, DV], OF_VALUES)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=WARPGROUPS)
    mbarrier.init(v_empty.index(i), count=WARPGROUPS)
  LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
  planes = scores_hopper.allocate_planes(terms, STAGES, WARPGROUPS, 64, TILE_N,
                                         0)
  if SCALED:
    planes = scores_hopper.Planes(
        gl.allocate_shared_memory(gl.float32, [STAGES, TILE_N], LINE),
        gl.allocate_shared_memory(gl.float32, [STAGES, TILE_N], LINE),
        1, 0)
  keys = fwd_hopper.Keys(
      parts_hopper.Parts(k_smem, k_smem), parts_hopper.Parts(v_smem, v_tail),
      k_full, k_empty, v_full, v_empty, planes, k_full, k_empty)

  # As in fwd_hopper.py.
  turns = mbarrier.allocate_mbarrier(batch=2)
  if TURNS:
    for w in gl.static_range(2):
      mbarrier.init(turns.index(w), count=1)
  consume = (q + row * hdim, hdim, q_smem, keys, turns, rows, pages_of,
             out + row * hdim_v, hdim_v, lse + start + query,
             parts + part * hdim_v, parts_lse + part,
             sinks + index * sinks_step, slopes + index * slopes_step, window,
             low, last_tile, steps, full_lo, full_hi, k_scale, v_scale, terms,
             has_sink, tokens, count, flags)
  if SHUFFLED:
    RUN: gl.constexpr = 8 if KIND < 0 else 16
    h = head.to(gl.int64)
    k_half = Half((k_cache if KIND < 0 else k_bytes) + k_start + h * k_head,
                  k_page, k_token, k_run)
    v_half = Half((v_cache if KIND < 0 else v_bytes) + v_start + h * v_head,
                  v_page, RUN // v_split * v_run_token, v_col)
  if KIND >= 0:
    # Of e4m3fnuz decode_hopper.py pairs other bytes.
    gl.static_assert(WARPGROUPS == 2 and KIND != attend.E4M3FNUZ)
    k_raw = gl.allocate_shared_memory(
        gl.uint8, [RAW, TILE_N, HEAD],
        gl.NVMMASharedLayout(min(HEAD, 128), 8, rank=2))
    v_raw = gl.allocate_shared_memory(
        gl.uint8, [RAW * (HEAD // DV), TILE_N, DV],
        gl.NVMMASharedLayout(min(TILE_N if SHUFFLED else HEAD, 128), 8, rank=2,
                             transposed=SHUFFLED != 0))
    there = mbarrier.allocate_mbarrier(batch=RAW)
    taken = mbarrier.allocate_mbarrier(batch=RAW)
    for i in gl.static_range(RAW):
      mbarrier.init(there.index(i), count=1)
      mbarrier.init(taken.index(i), count=1)
    bytes_ = Bytes(k_raw, v_raw, there, taken)
    scales = (Scales(k_scale, k_scale_page, k_scale_token),
              Scales(v_scale, v_scale_page, v_scale_token))
    if SHUFFLED:
      gl.warp_specialize([
          (_consume, (0, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
          (_consume, (1, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
          (_convert, (bytes_, keys, scales, pages_of, last_tile, steps, stop,
                      TILE_N, HEAD, STAGES, RAW, KIND, SCALED)),
          (_produce_byte_runs, ((k_half, v_half, bytes_, pages_of, last_tile,
                                 steps, stop), TILE_N, HEAD, BOX, RAW)),
      ], [4, 4, 4], [216, 40, 40])
    else:
      gl.warp_specialize([
          (_consume, (0, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
          (_consume, (1, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
          (_convert, (bytes_, keys, scales, pages_of, last_tile, steps, stop,
                      TILE_N, HEAD, STAGES, RAW, KIND, SCALED)),
          (_produce_bytes, ((k_desc, v_desc, bytes_, pages_of, head, last_tile,
                             steps, stop), TILE_N, HEAD, BOX, RAW)),
      ], [4, 4, 1], [216, 56, 24])
  elif SHUFFLED:
    gl.static_assert(WARPGROUPS == 2)
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
        (_consume, (1, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
        (_produce_runs, ((k_half, k_smem, k_empty, k_full, pages_of, last_tile,
                          steps, stop), TILE_N, HEAD, BOX, STAGES, True)),
        (_produce_runs, ((v_half, v_smem, v_empty, v_full, pages_of, last_tile,
                          steps, stop), TILE_N, HEAD, BOX, STAGES, False)),
    ], [4, 2, 2], [224, 56, 56])
  else:
    begun = mbarrier.allocate_mbarrier()
    mbarrier.init(begun, count=1)
    WIDTH: gl.constexpr = HEAD if DIVIDED else COLS
    CHUNKS: gl.constexpr = STAGES * TILE_N * HEAD // (CHUNK * WIDTH)
    values = Values(
        v_cache + v_start + head.to(gl.int64) * v_head, v_page, v_token, hdim_v,
        v_smem.reinterpret(dtype, [CHUNKS, CHUNK, WIDTH],
                           by_eights(CHUNK, HEAD) if DIVIDED else WIDE))
    produce = (k_desc, v_desc, k_page // (8 * k_token),
               v_page // (8 * v_token), keys, boxes_of(k_smem, k_desc),
               boxes_of(v_smem, v_desc), begun, pages_of, values, head,
               last_tile, steps, stop, offset + len_q)
    if WARPGROUPS == 1:
      gl.warp_specialize([
          (_consume, (0, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
          (_produce, (produce, TILE_N, HEAD, BOX, STAGES, True, False)),
          (_produce, (produce, TILE_N, HEAD, BOX, STAGES, False, True)),
      ], [1, 1], [40, 40])
    elif BOX < 64 and not DIVIDED:
      # So many boxes are more than one warp asks for in time.
      gl.warp_specialize([
          (_consume, (0, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
          (_consume, (1, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
          (_produce, (produce, TILE_N, HEAD, BOX, STAGES, True, False)),
          (_produce, (produce, TILE_N, HEAD, BOX, STAGES, False, True)),
      ], [4, 1, 1], [232, 40, 40])
    else:
      gl.warp_specialize([
          (_consume, (0, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
          (_consume, (1, consume, TILE_N, HEAD, BOX, STAGES, TURNS, OF_SCORES)),
          (_produce, (produce, TILE_N, HEAD, BOX, STAGES, True, True)),
      ], [4, 1], [232, 40])
