# SPDX-License-Identifier: Apache-2.0
"""Attention of chunks over paged caches by Hopper blocks that walk, in Gluon.

prefill_hopper.py's blocks, of which there is one a multiprocessor, and each
goes from tile to tile of rows. A warp scouts: it takes the next tile that no
block has and finds its rows and keys, up to PLACES tiles ahead; a second copies
queries, a third keys and values. So what comes before a tile's first product is
hidden, and its first scores run while the result of the one before is stored.

Tiles are handed out by a counter, in the order in which a grid would have them:
the longest first, whatever lengths the sequences have.
"""

from typing import NamedTuple

import triton.language as tl
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
from third_party.aiter.kernels.mha import (
    fwd_hopper,
    parts_hopper,
    scores_hopper,
)
from third_party.aiter.kernels.paged import attend, boxes_hopper
from third_party.aiter.kernels.paged import prefill_hopper as prefill

# Tiles that have a place at a time; and room for one, in words.
PLACES = gl.constexpr(4)
_WORDS = gl.constexpr(32)
# Where keys are divided, parts that a block has, if they have so many tiles.
_TURNS = gl.constexpr(3)
_LEAST = gl.constexpr(4)
# So many tiles a block, the last, are not taken ahead.
_LAST = gl.constexpr(4)
# A sequence of so many times as many keys as are few has tiles that take long.
_LONG = gl.constexpr(4)

# A Gluon function calls none of Triton's; of one source it may be either.
_tiles_of_lengths = gluon.jit(attend.tiles_of_lengths.fn)
_length_of = gluon.jit(attend.length_of.fn)
_parts_of = gluon.jit(attend.parts_of.fn)


def tensor_maps(function, constants):
  """boxes_hopper.py's, or prefill_hopper.py's where those cannot be."""
  if boxes_hopper.divided.fn(constants["BOX"], constants["FLAGS"]):
    return boxes_hopper.tensor_maps(function, constants)
  return prefill.tensor_maps(
      function, {**constants, "KIND": attend.NO_BYTES.value})


class Place(NamedTuple):
  """A tile of rows, in words of shared memory: where it is, what it sees.

  A tile sees at least one of keys, if only to see nothing; one of no steps is a
  part that its rows do not have, or behind the last.
  """
  steps: tl.tensor
  last_tile: tl.tensor  # Tiles of keys, from the last one down.
  full_lo: tl.tensor  # Those that all rows see.
  full_hi: tl.tensor
  row0: tl.tensor
  left: tl.tensor  # Rows of the sequence from row0 on.
  head: tl.tensor  # Of the cache.
  index: tl.tensor  # The sequence,
  start: tl.tensor  # its first token,
  offset: tl.tensor  # its first query's key,
  low: tl.tensor  # the first key that the first row sees,
  length: tl.tensor  # its keys,
  stop: tl.tensor  # what the last row sees of them,
  begin: tl.tensor  # its first page in a table with indptr.
  split: tl.tensor
  parts: tl.tensor  # Of its keys.
  scale: tl.tensor  # Of scores and of values: the bits of float32.
  out_scale: tl.tensor
  absent: tl.tensor  # Whether a page is; known when the queries are there.


class Work(NamedTuple):
  """What tiles are found in: arguments of the kernel."""
  lengths: attend.Lengths
  table: tl.tensor
  indptr: tl.tensor
  cu_seqlens: tl.tensor
  tokens: tl.tensor
  batch: tl.tensor
  seqlen_q: tl.tensor
  nhead_q: tl.tensor
  nhead_k: tl.tensor
  group: tl.tensor
  pages: tl.tensor
  page_size: tl.tensor
  width: tl.tensor
  splits: tl.tensor
  programs: tl.tensor
  window_left: tl.tensor
  window_right: tl.tensor
  flags: tl.tensor


class Passed(NamedTuple):
  """What the warps pass on: a ring of places and one of tiles of queries."""
  places: tl.tensor
  found: tl.tensor
  asked: tl.tensor  # For all keys and values, which are under way.
  done: tl.tensor  # By the consumers, as the queries in their ring are.
  queries: tl.tensor
  full: tl.tensor


@gluon.jit
def _write(places, i, place):
  lanes = gl.arange(0, _WORDS, gl.BlockedLayout([1], [32], [1], [0]))
  words = lanes * 0
  for k in gl.static_range(len(Place._fields)):
    words = gl.where(lanes == k, place[k], words)
  places.index(i).store(words)


@gluon.jit
def _at(places, i, k: gl.constexpr):
  """Where the k-th word of a place lies."""
  words = places.reinterpret(
      gl.int32, [places.shape[0] * _WORDS, 1],
      gl.SwizzledSharedLayout(1, 1, 1, [0]))
  return words.index(i * _WORDS + k)


@gluon.jit
def _word(places, i, k: gl.constexpr):
  LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
  return gl.max(_at(places, i, k).load(LAYOUT), 0)


@gluon.jit
def _read(places, i):
  return Place(
      _word(places, i, 0), _word(places, i, 1), _word(places, i, 2),
      _word(places, i, 3), _word(places, i, 4), _word(places, i, 5),
      _word(places, i, 6), _word(places, i, 7), _word(places, i, 8),
      _word(places, i, 9), _word(places, i, 10), _word(places, i, 11),
      _word(places, i, 12), _word(places, i, 13), _word(places, i, 14),
      _word(places, i, 15), _word(places, i, 16), _word(places, i, 17),
      _word(places, i, 18))


@gluon.jit
def rows_of(at, work):
  """The prefill.Rows of a place."""
  return prefill.Rows(at.row0, at.left, at.row0 // work.group,
                      at.head * work.group, work.group, work.nhead_q)


@gluon.jit
def table_of(at, work):
  first = at.index.to(gl.int64) * work.width
  if (work.flags & attend.INDPTR) != 0:
    first = at.begin.to(gl.int64)
  return prefill.Table(work.table + first, work.pages, work.page_size)


@gluon.jit
def survey(work, few, lanes, TILE_M: gl.constexpr, N: gl.constexpr,
           FLAGS: gl.constexpr):
  """What all sequences tell, where it is asked for.

  Returns:
    (share, most, sees_few): parts that a tile of keys is worth, parts that a
    tile of rows has at most, and whether rows see up to `few` keys in the mean,
    none far more, which KeysInTheMean of src/paged.cc says where tables are no
    wider than sequences are long.

    There are as many parts as blocks, or more, so that these end at about the
    same time, if that leaves none less than so many tiles.
  """
  total = (lanes * 0).to(gl.float32)
  beyond = total
  longest = lanes * 0
  if (work.splits > 1) | (few > 0):
    for i in range(0, work.batch, attend.LANES):
      at = i + lanes
      length = _length_of(work.lengths, at, at < work.batch, work.flags)
      _, len_q, rows, tiles = _tiles_of_lengths(
          at, length, work.cu_seqlens, work.batch, work.tokens, work.seqlen_q,
          work.group, work.window_left, work.window_right, work.flags, TILE_M,
          N, FLAGS)
      rows = gl.where(length > 0, rows, 0).to(gl.float32)
      total += rows * tiles.to(gl.float32)
      longest = gl.maximum(longest, tiles)
      keys = tiles * N
      seen = gl.maximum(keys - len_q // 2, keys // 2) - few
      beyond += rows * gl.where(keys > _LONG * few, 1e30,
                                seen.to(gl.float32))
  full = work.programs / (work.nhead_k * gl.maximum(gl.sum(total, 0), 1.0))
  share = gl.maximum(gl.minimum(full, 1.0 / _LEAST), full / _TURNS)
  # A window's keys may lie in one tile more.
  longest = gl.max(longest, 0) + 1
  most = gl.minimum(_parts_of(longest, share, work.splits), longest)
  return share, most, (few > 0) & (gl.sum(beyond, 0) <= 0)


@gluon.jit
def place_of(work, slot, head, split, share, lanes, k_scale, v_scale, scale,
             TILE_M: gl.constexpr, N: gl.constexpr, FLAGS: gl.constexpr,
             DIVIDES: gl.constexpr = True):
  """The Place of a slot of rows; `absent` is not known yet.

  DIVIDES: its keys may be in parts.
  """
  # Under way while rows are found.
  of_keys = gl.load(k_scale)
  of_values = gl.load(v_scale)
  index, start, len_q, row0, length = prefill.find_rows(
      slot, lanes, work.cu_seqlens, work.lengths, work.batch, work.tokens,
      work.seqlen_q, work.group, work.flags, TILE_M, FLAGS)
  left = gl.maximum(len_q * work.group - row0, 0)
  rows = gl.minimum(TILE_M, left)
  first, _, offset, low, stop, first_tile, last_tile = prefill.keys_of_length(
      index, row0, rows, len_q, length, work.indptr, work.batch,
      work.width, work.pages, work.page_size, work.group, work.window_left,
      work.window_right, split, work.splits, share, work.flags, N, FLAGS)
  parts = 1
  if DIVIDES:
    # As keys_of_length has them, but those that the tiles do not reach.
    seen = gl.maximum((stop + N - 1) // N - low // N, 1)
    parts = _parts_of(seen, share, work.splits)
    each = (seen + parts - 1) // parts
    parts = (seen + each - 1) // each
  steps = gl.maximum(last_tile - first_tile, gl.where(split == 0, 1, 0))
  full_lo, full_hi = prefill.seen_by_all(
      row0, rows, offset, stop, work.group, work.window_left, work.window_right,
      work.flags, N)
  return Place(
      steps, first_tile + steps, full_lo, full_hi, row0, left, head,
      index, start, offset, low, offset + len_q, stop, first.to(gl.int32),
      split, parts,
      (scale * of_keys).to(gl.int32, bitcast=True),
      of_values.to(gl.int32, bitcast=True), 0)


@gluon.jit
def store_end(at, work, parts_lse, TILE_M: gl.constexpr):
  """Says how many parts a tile's rows have, or that their results are where
  they belong, if parts are joined (merge.py)."""
  if (work.programs > 0) & (at.split == 0) & (
      (at.parts == 1) | (at.parts < work.splits)):
    rows = rows_of(at, work)
    _, _, row, live = prefill.row_at(
        rows, 0, TILE_M, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    end = gl.where(at.parts > 1, at.parts, 0).to(gl.int64)
    first = (end * work.tokens + at.start + rows.query) * work.nhead_q
    gl.store(parts_lse + first + row,
             gl.full_like(row, float("inf"), dtype=gl.float32), mask=live)


@gluon.jit
def any_absent(at, work, N: gl.constexpr):
  """Whether a page of those that a tile sees is absent."""
  return prefill.any_absent(
      table_of(at, work),
      gl.maximum((at.last_tile - at.steps) * N, at.low) // work.page_size,
      (gl.minimum(at.last_tile * N, at.stop) + work.page_size - 1)
      // work.page_size)


@gluon.jit
def _copy_queries(q, hdim, rows, own, chunks, places_of_rows,
                  TILE_M: gl.constexpr, HEAD: gl.constexpr):
  """Starts to copy a tile's rows, with zeros behind their columns, by a warp.

  own: the tile's first warpgroup in the ring.
  """
  CHUNK: gl.constexpr = prefill.CHUNK
  WIDTH: gl.constexpr = chunks.shape[2]
  PARTS: gl.constexpr = HEAD // WIDTH
  EACH: gl.constexpr = 64 // CHUNK  # Chunks of a warpgroup's part.
  WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
  LAYOUT: gl.constexpr = prefill.copy_layout(1)
  # A row is found by one lane, not by each that copies of it.
  _, _, row, live = prefill.row_at(rows, 0, TILE_M, WARP)
  places_of_rows.reinterpret(
      gl.int32, [TILE_M], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(
          gl.where(live, row, -1))
  gl.barrier()
  cols = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
  for c in range(TILE_M // CHUNK):
    at = places_of_rows.index(c).load(gl.SliceLayout(1, LAYOUT))
    base = q + (gl.maximum(at, 0) * hdim)[:, None] + cols[None, :]
    chunk = (own + c // EACH) * PARTS * EACH + c % EACH
    for part in gl.static_range(PARTS):
      async_copy.async_load(
          chunks.index(chunk + part * EACH), base + part * WIDTH,
          mask=(at >= 0)[:, None] & (part * WIDTH + cols < hdim)[None, :])
  async_copy.commit_group()


@gluon.jit
def _scout(args, TILE_M: gl.constexpr, N: gl.constexpr, FLAGS: gl.constexpr):
  """Takes tile after tile, and finds what there is to do."""
  (work, passed, k_scale, v_scale, k_scale_head, v_scale_head, scale, counter,
   few_keys, parts_lse) = args
  lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([1], [32], [1], [0]))
  share, most, few = survey(work, few_keys, lanes, TILE_M, N, FLAGS)
  slots = work.batch * ((work.seqlen_q * work.group + TILE_M - 1) // TILE_M)
  if (work.flags & attend.CU_SEQLENS) != 0:
    slots = work.tokens * work.group // TILE_M + work.batch + 1
  tiles = slots * work.nhead_k
  count = tiles * most
  if few_keys > 0:
    gl.store(counter + 1, few.to(gl.int32), mask=gl.program_id(0) == 0)
    count = gl.where(few, 0, count)
  blocks = gl.num_programs(0)
  item = gl.program_id(0)
  i = 0
  while item < count:
    # Blocks take tiles ahead, but of the last ones one, and where not all will
    # have another, none before the keys of its own are under way.
    last = count - item < _LAST * blocks
    following = count
    if not last:
      following = blocks + gl.atomic_add(counter, 1, sem="relaxed")
    split = item // tiles
    slot_of = item - split * tiles
    head = slot_of % work.nhead_k
    at = place_of(
        work, slots - 1 - slot_of // work.nhead_k, head, split, share, lanes,
        k_scale + head.to(gl.int64) * k_scale_head,
        v_scale + head.to(gl.int64) * v_scale_head, scale, TILE_M, N, FLAGS)
    if (at.left > 0) & (at.steps > 0):
      store_end(at, work, parts_lse, TILE_M)
      slot, phase = hopper.ring(i, PLACES)
      mbarrier.wait(passed.done.index(slot), phase ^ 1)
      _write(passed.places, slot, at)
      gl.barrier()
      mbarrier.arrive(passed.found.index(slot))
      i += 1
    if last & (blocks < count):
      if (count - gl.maximum(item, blocks) < blocks) & (i > 0):
        slot, phase = hopper.ring(i - 1, PLACES)
        mbarrier.wait(passed.asked.index(slot), phase)
      elif i > 1:
        slot, phase = hopper.ring(i - 2, PLACES)
        mbarrier.wait(passed.done.index(slot), phase)
      following = blocks + gl.atomic_add(counter, 1, sem="relaxed")
    item = following
  slot, phase = hopper.ring(i, PLACES)
  mbarrier.wait(passed.done.index(slot), phase ^ 1)
  passed.places.index(slot).store(
      gl.zeros([_WORDS], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
  gl.barrier()
  mbarrier.arrive(passed.found.index(slot))


@gluon.jit
def _next(passed, i):
  """Waits for the i-th place: (its number, its steps)."""
  slot, phase = hopper.ring(i, PLACES)
  mbarrier.wait(passed.found.index(slot), phase)
  return slot, _word(passed.places, slot, 0)


@gluon.jit
def _wait_for_room(passed, i, QUERIES: gl.constexpr):
  """Waits until the tile is done whose queries the i-th one's replace."""
  if i >= QUERIES:
    before, phase = hopper.ring(i - QUERIES, PLACES)
    mbarrier.wait(passed.done.index(before), phase)


@gluon.jit
def _produce_queries(args, TILE_M: gl.constexpr, N: gl.constexpr,
                     HEAD: gl.constexpr, QUERIES: gl.constexpr):
  """Copies the queries of each place, and looks whether pages are absent."""
  work, passed, q, hdim, chunks, places_of_rows = args
  WARPGROUPS: gl.constexpr = TILE_M // 64
  i = 0
  slot, steps = _next(passed, 0)
  while steps > 0:
    at = _read(passed.places, slot)
    own = i % QUERIES
    _wait_for_room(passed, i, QUERIES)
    rows = rows_of(at, work)
    row = (at.start + rows.query).to(gl.int64) * work.nhead_q
    _copy_queries(q + row * hdim, hdim, rows, own * WARPGROUPS, chunks,
                  places_of_rows, TILE_M, HEAD)
    absent = any_absent(at, work, N)
    _at(passed.places, slot, len(Place._fields) - 1).store(gl.full(
        [1], absent.to(gl.int32), gl.int32,
        gl.BlockedLayout([1], [32], [1], [0])))
    async_copy.wait_group(0)
    if at.scale < 0:  # The sign of a float32 is that of its bits.
      for w in gl.static_range(WARPGROUPS):
        prefill.negate(passed.queries.index(own * WARPGROUPS + w))
    fence_async_shared()
    gl.barrier()
    mbarrier.arrive(passed.full.index(own))
    i += 1
    slot, steps = _next(passed, i)
  _wait_for_room(passed, i, QUERIES)
  mbarrier.arrive(passed.full.index(i % QUERIES))


@gluon.jit
def _produce(args, N: gl.constexpr, HEAD: gl.constexpr, BOX: gl.constexpr,
             STAGES: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr,
             DIVIDED: gl.constexpr):
  """Copies the tile of keys, of values, or both, of every step."""
  (work, passed, k_desc, v_desc, k_half, v_half, paging, keys, values,
   v_head) = args
  i = 0
  use = 0
  slot, steps = _next(passed, 0)
  while steps > 0:
    at = _read(passed.places, slot)
    table = table_of(at, work)
    own = prefill.Values(values.data + at.head.to(gl.int64) * v_head,
                         values.page, values.token, values.hdim, values.chunks)
    for step in range(steps):
      first = (at.last_tile - 1 - step) * N
      ki, phase = hopper.ring(use, STAGES)
      # Numbers of pages are under way while the tile before is in use.
      if DIVIDED:
        boxes = boxes_hopper.boxes_at(table, paging, first, at.stop, N, BOX)
      else:
        boxes = prefill.box_pages(table, first, at.stop, N, BOX)
      if KEYS:
        mbarrier.wait(keys.k_empty.index(ki), phase ^ 1)
        if DIVIDED:
          boxes_hopper.copy(0, k_half, ki, at.head, boxes, gl.to_tensor(1), BOX,
                            False)
        else:
          prefill.copy_tile(
              k_desc, 0, k_half.ring, k_half.full.index(ki), ki, boxes, table,
              own, at.head, first, at.stop, at.length, N, HEAD, BOX, False)
      if VALUES:
        mbarrier.wait(keys.v_empty.index(ki), phase ^ 1)
        if DIVIDED:
          boxes_hopper.copy_values(v_half, ki, own, table, at.head, boxes,
                                   first, at.stop, at.length, BOX)
        else:
          # What lies behind the last key may be NaN, and 0 * NaN is NaN.
          prefill.copy_tile(
              v_desc, 0, v_half.ring, v_half.full.index(ki), ki, boxes, table,
              own, at.head, first, at.stop, at.length, N, HEAD, BOX, True)
      use += 1
    mbarrier.arrive(passed.asked.index(slot))
    i += 1
    slot, steps = _next(passed, i)


@gluon.jit
def terms_of(at, cap):
  """A scale below 0 has turned the queries; that of 0 changes nothing."""
  scale = gl.abs(at.scale.to(gl.float32, bitcast=True))
  return prefill.Terms(gl.maximum(scale, 1e-30), cap, 0.0)


@gluon.jit
def seen_of(at, work, w: gl.constexpr, N: gl.constexpr):
  """The window of a warpgroup's rows, whose positions are no line's."""
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  rows = rows_of(at, work)
  query = prefill.row_at(rows, w * 64, 64, ROWS)[0]
  place = gl.arange(0, 64, ROWS)
  return scores_hopper.Window(
      (query - place + (at.offset + rows.query))[:, None], work.window_left,
      work.window_right, 0, 0, at.stop)


@gluon.jit
def _start(passed, keys, i, use, w: gl.constexpr, WARPGROUPS: gl.constexpr,
           N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr):
  """Starts the first scores of a place's tile, whose keys are `use`'s."""
  ki, phase = hopper.ring(use, STAGES)
  q = prefill.query_tile(passed.queries, i * WARPGROUPS + w, HEAD)
  mbarrier.wait(keys.k_full.index(ki), phase)
  return parts_hopper.product(
      q, parts_hopper.tile(keys.k, ki, N, HEAD, 0), 64, N, 0)


@gluon.jit
def _begin(s, at, work, keys, use, cap, w: gl.constexpr, dtype: gl.constexpr,
           N: gl.constexpr, HEAD: gl.constexpr, BOX: gl.constexpr,
           STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """(weights, maximum, sum) of a tile's first scores."""
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  s = warpgroup_mma_wait(0, deps=[s])
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  tile = at.last_tile - 1
  window = prefill.window_of(seen_of(at, work, w, N), table_of(at, work),
                             at.absent != 0, tile, N, BOX)
  e, m, _ = fwd_hopper.exponentials(
      s, m, 0, tile, window, terms_of(at, cap), keys, use, N, STAGES, 0, True,
      FEATURES)
  return parts_hopper.operand(e, dtype, HEAD), m, gl.sum(e, 1)


@gluon.jit
def end(acc, m, norm, at, work, free, results, sinks, sinks_step, cap,
        w: gl.constexpr, N: gl.constexpr, HEAD: gl.constexpr,
        FEATURES: gl.constexpr):
  """Divides a warpgroup's rows by their sums, and stores them."""
  out, hdim_v, lse, parts, parts_lse = results
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  rows = rows_of(at, work)
  token = at.start + rows.query
  first = token.to(gl.int64) * work.nhead_q
  has_sink = (((work.flags & attend.SINK) != 0) & (at.split == 0)
              & (at.index < work.batch))
  prefill.store_rows(
      acc, m, norm, rows, free, fwd_hopper.unit_of(terms_of(at, cap), FEATURES),
      at.out_scale.to(gl.float32, bitcast=True), has_sink,
      sinks + at.index * sinks_step, out + first * hdim_v, lse + token,
      parts + (at.split.to(gl.int64) * work.tokens * work.nhead_q + first)
      * hdim_v,
      parts_lse + (at.split.to(gl.int64) * work.tokens * work.nhead_q + first),
      hdim_v, work.tokens, at.parts, work.flags, w, ROWS, HEAD, 0)


@gluon.jit
def _consume(w: gl.constexpr, args, WARPGROUPS: gl.constexpr, N: gl.constexpr,
             HEAD: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr,
             QUERIES: gl.constexpr, TURNS: gl.constexpr,
             FEATURES: gl.constexpr):
  """Computes 64 rows of each tile, an online softmax over the keys."""
  work, passed, keys, turns, out_smem, results, sinks, sinks_step, cap = args
  TURN: gl.constexpr = w if TURNS else -1
  dtype: gl.constexpr = passed.queries.dtype
  mbarrier.wait(passed.full.index(0), 0)
  steps = _word(passed.places, 0, 0)
  if steps > 0:
    i = 0
    use = 0
    s = _start(passed, keys, 0, 0, w, WARPGROUPS, N, HEAD, STAGES)
    p, m, norm = _begin(s, _read(passed.places, 0), work, keys, 0, cap, w,
                        dtype, N, HEAD, BOX, STAGES, FEATURES)
    while steps > 0:
      slot = i % PLACES
      own = i % QUERIES * WARPGROUPS + w
      at = _read(passed.places, slot)
      absent = at.absent != 0
      terms = terms_of(at, cap)
      seen = seen_of(at, work, w, N)
      table = table_of(at, work)
      q = prefill.query_tile(passed.queries, own, HEAD)
      acc = parts_hopper.zeros(64, HEAD, 0)
      acc, p, m, norm = prefill.later_steps(
          acc, p, m, norm, q, keys, use, at.last_tile, steps, at.full_lo,
          at.full_hi, seen, table, absent, terms, turns, N, HEAD, BOX, STAGES,
          TURN, FEATURES)
      use += steps
      vi, v_phase = hopper.ring(use - 1, STAGES)
      mbarrier.wait(keys.v_full.index(vi), v_phase)
      v = parts_hopper.tile(keys.v, vi, N, HEAD, 0)
      free = out_smem.index(w)
      following = (i + 1) % PLACES
      qi, phase = hopper.ring(i + 1, QUERIES)
      mbarrier.wait(passed.full.index(qi), phase)
      steps = _word(passed.places, following, 0)
      if steps > 0:
        if TURN >= 0:
          mbarrier.wait(turns.index(TURN), (use + TURN) & 1)
        done = parts_hopper.accumulate(acc, p, v, 0)
        ahead = _start(passed, keys, qi, use, w, WARPGROUPS, N, HEAD, STAGES)
        if TURN >= 0:
          mbarrier.arrive(turns.index(1 - TURN))
        done = parts_hopper.wait(1, done, 0)
        mbarrier.arrive(keys.v_empty.index(vi))
        end(done, m, norm, _read(passed.places, slot), work, free, results,
            sinks, sinks_step, cap, w, N, HEAD, FEATURES)
        gl.barrier()
        mbarrier.arrive(passed.done.index(slot))
        p, m, norm = _begin(ahead, _read(passed.places, following), work, keys,
                            use, cap, w, dtype, N, HEAD, BOX, STAGES, FEATURES)
      else:
        done = parts_hopper.wait(0, parts_hopper.accumulate(acc, p, v, 0), 0)
        end(done, m, norm, _read(passed.places, slot), work, free, results,
            sinks, sinks_step, cap, w, N, HEAD, FEATURES)
      i += 1


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
    STAGES: gl.constexpr, QUERIES: gl.constexpr, TURNS: gl.constexpr = 0,
):
  """prefill_hopper.py's paged_attend of caches of the queries' type.

  counter: tiles that blocks have taken beside their first, 0 at first; and
  whether the batch is prefill_short.py's, which is launched next, as it may be
  if few_keys is not 0.
  QUERIES: tiles whose queries have a place in shared memory.

  Grid: blocks, at most as many as tiles, which share them.
  """
  WARPGROUPS: gl.constexpr = TILE_M // 64
  gl.static_assert(WARPGROUPS == 2 and 1 < QUERIES and QUERIES < PLACES)
  if not attend.PARTIAL & FLAGS:
    hdim = HEAD
    hdim_v = HEAD
  gdc_launch_dependents()
  OF_SCORES: gl.constexpr = FEATURES | fwd_hopper.BOXES
  WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
  DIVIDED: gl.constexpr = boxes_hopper.divided(BOX, FLAGS)
  OF_KEYS: gl.constexpr = prefill.by_eights(TILE_N, HEAD) if DIVIDED else WIDE
  LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
  CHUNK: gl.constexpr = prefill.CHUNK
  COLS: gl.constexpr = prefill.COLS
  dtype: gl.constexpr = q.dtype.element_ty
  q_smem = gl.allocate_shared_memory(dtype, [QUERIES * WARPGROUPS, 64, HEAD],
                                     WIDE)
  k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, HEAD], OF_KEYS)
  v_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, HEAD], OF_KEYS)
  places = gl.allocate_shared_memory(gl.int32, [PLACES, _WORDS], LINE)
  places_of_rows = gl.allocate_shared_memory(
      gl.int32, [TILE_M // CHUNK, CHUNK], LINE)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=WARPGROUPS)
    mbarrier.init(v_empty.index(i), count=WARPGROUPS)
  found = mbarrier.allocate_mbarrier(batch=PLACES)
  asked = mbarrier.allocate_mbarrier(batch=PLACES)
  done = mbarrier.allocate_mbarrier(batch=PLACES)
  # So many boxes are more than one warp asks for in time.
  APART: gl.constexpr = BOX < 64 and not DIVIDED
  for i in gl.static_range(PLACES):
    mbarrier.init(found.index(i), count=1)
    mbarrier.init(asked.index(i), count=2 if APART else 1)
    mbarrier.init(done.index(i), count=WARPGROUPS)
  q_full = mbarrier.allocate_mbarrier(batch=QUERIES)
  for i in gl.static_range(QUERIES):
    mbarrier.init(q_full.index(i), count=1)
  # As in fwd_hopper.py.
  turns = mbarrier.allocate_mbarrier(batch=2)
  if TURNS:
    for w in gl.static_range(2):
      mbarrier.init(turns.index(w), count=1)
  none = gl.to_tensor(0)
  keys = fwd_hopper.Keys(
      parts_hopper.Parts(k_smem, k_smem), parts_hopper.Parts(v_smem, v_smem),
      k_full, k_empty, v_full, v_empty, none, none, none)
  work = Work(attend.Lengths(lengths, indptr, page_size), table, indptr,
              cu_seqlens, tokens, batch, seqlen_q, nhead_q, nhead_k, group,
              pages, page_size, width, splits, programs, window_left,
              window_right, flags)
  passed = Passed(places, found, asked, done, q_smem, q_full)
  scout = (work, passed, k_scale, v_scale, k_scale_head, v_scale_head,
           softmax_scale, counter, few_keys, parts_lse)
  queries = (work, passed, q, hdim,
             q_smem.reinterpret(
                 dtype,
                 [QUERIES * TILE_M * HEAD // (CHUNK * COLS), CHUNK, COLS],
                 WIDE), places_of_rows)
  WIDTH: gl.constexpr = HEAD if DIVIDED else COLS
  values = prefill.Values(
      v_cache + v_start, v_page, v_token, hdim_v,
      v_smem.reinterpret(
          dtype, [STAGES * TILE_N * HEAD // (CHUNK * WIDTH), CHUNK, WIDTH],
          prefill.by_eights(CHUNK, HEAD) if DIVIDED else WIDE))
  if DIVIDED:
    k_half = boxes_hopper.Half(k_smem, k_full, k_eights)
    v_half = boxes_hopper.Half(v_smem, v_full, v_eights)
  else:
    k_half = boxes_hopper.Half(prefill.boxes_of(k_smem, k_desc), k_full, 0)
    v_half = boxes_hopper.Half(prefill.boxes_of(v_smem, v_desc), v_full, 0)
  produce = (work, passed, k_desc, v_desc, k_half, v_half,
             attend.Paging(page_size, page_shift, page_factor), keys, values,
             v_head)
  # Results have a place of their own: where queries were, each product would
  # wait for what was written there.
  out_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, 64, HEAD], WIDE)
  consume = (work, passed, keys, turns, out_smem,
             (out, hdim_v, lse, parts, parts_lse), sinks, sinks_step,
             logits_soft_cap)
  if APART:
    gl.warp_specialize([
        (_consume, (0, consume, WARPGROUPS, TILE_N, HEAD, BOX, STAGES, QUERIES,
                    TURNS, OF_SCORES)),
        (_consume, (1, consume, WARPGROUPS, TILE_N, HEAD, BOX, STAGES, QUERIES,
                    TURNS, OF_SCORES)),
        (_scout, (scout, TILE_M, TILE_N, FLAGS)),
        (_produce_queries, (queries, TILE_M, TILE_N, HEAD, QUERIES)),
        (_produce, (produce, TILE_N, HEAD, BOX, STAGES, True, False, False)),
        (_produce, (produce, TILE_N, HEAD, BOX, STAGES, False, True, False)),
    ], [4, 1, 1, 1, 1], [232, 40, 40, 40, 40])
  else:
    gl.warp_specialize([
        (_consume, (0, consume, WARPGROUPS, TILE_N, HEAD, BOX, STAGES, QUERIES,
                    TURNS, OF_SCORES)),
        (_consume, (1, consume, WARPGROUPS, TILE_N, HEAD, BOX, STAGES, QUERIES,
                    TURNS, OF_SCORES)),
        (_scout, (scout, TILE_M, TILE_N, FLAGS)),
        (_produce_queries, (queries, TILE_M, TILE_N, HEAD, QUERIES)),
        (_produce, (produce, TILE_N, HEAD, BOX, STAGES, True, True, DIVIDED)),
    ], [4, 1, 1, 1], [232, 40, 40, 40])
