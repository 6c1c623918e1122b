# SPDX-License-Identifier: Apache-2.0
"""Latent attention for Hopper (sm_90), in Gluon.

A block has 64 rows, which are heads and queries of one sequence. A producer
warpgroup copies rows of the cache, wherever they lie, into a ring of tiles of
keys; two consumer warpgroups hold half of the output's columns each. A tile is
scored by one of them, in turn: while it computes weights, the other one's
products run. It leaves weights and its new maximum in shared memory, and both
warpgroups add the tile's values, which are its keys' first columns. Schedule:
DeepSeek-AI, FlashMLA, "A Deep Dive Into The Flash MLA FP8 Decoding Kernel on
Hopper" and the notes on its predecessor of April 2025.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.paged import attend, decode_hopper

# A Gluon function calls none of Triton's; of one source it may be either.
_find_keys = gluon.jit(attend.find_keys.fn)
_tiles_of_batch = gluon.jit(attend.tiles_of_batch.fn)

# Columns of the values, of a warpgroup's half of them, and of the keys' rest.
HEAD = gl.constexpr(512)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
COLS = gl.constexpr(HEAD.value + ROPE.value)
# Programs that the library counts where there is one of this kernel, which
# fills a multiprocessor: so many more parts than fill the device there may be.
PROGRAMS = gl.constexpr(2)
# Less than any score, and finite: no difference of two maxima is NaN.
LEAST = gl.constexpr(-3e38)


class Ring(NamedTuple):
  """Tiles of keys: halves [2 * stages, keys, HALF], rope [stages, keys, ROPE].

  shown: float32 [stages, keys], 0 where there is no key.
  """
  halves: tl.tensor
  rope: tl.tensor
  shown: tl.tensor
  full: tl.tensor
  empty: tl.tensor


class Weights(NamedTuple):
  """What warpgroups tell each other of the tiles that each has scored.

  tile: [2, 64, keys], maximum: float32 [2, 64], in base 2.
  """
  tile: tl.tensor
  maximum: tl.tensor
  full: tl.tensor
  empty: tl.tensor


@gluon.jit
def _key_of(query, begin, cp_world_size):
  """The key at which a query stands; include/aiter/paged.h."""
  return (begin + query + cp_world_size) // cp_world_size - 1


@gluon.jit
def _page_of(table, n, pages, page_size, stop):
  """The pages of keys, -1 where there is none."""
  page = gl.load(table + n // page_size, mask=n < stop, other=-1)
  return gl.where((page >= 0) & (page < pages), page, -1)


@gluon.jit
def _row_at(page, n, page_size, k_page, k_token):
  """Where the rows of keys begin."""
  place = n - n // page_size * page_size
  return gl.maximum(page, 0).to(gl.int64) * k_page + place * k_token


@gluon.jit
def _produce(args, N: gl.constexpr, STAGES: gl.constexpr):
  """Copies the tiles of keys; what is no key becomes 0."""
  (data, ring, table, pages, page_size, k_page, k_token, first, stop,
   steps) = args
  LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
  half = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
  rope = gl.arange(0, ROPE, gl.SliceLayout(0, LAYOUT))[None, :]
  n = first + gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
  page = _page_of(table, n, pages, page_size, stop)
  for step in range(steps):
    there = page >= 0
    at = data + _row_at(page, n, page_size, k_page, k_token)[:, None]
    # Where the next tile is, is known when its turn comes.
    n += N
    page = _page_of(table, n, pages, page_size, stop)
    i, phase = hopper.ring(step, STAGES)
    mbarrier.wait(ring.empty.index(i), phase ^ 1)
    for h in gl.static_range(2):
      async_copy.async_load(
          ring.halves.index(2 * i + h), at + (half + h * HALF),
          mask=there[:, None] & (half >= 0))
    async_copy.async_load(ring.rope.index(i), at + (rope + HEAD),
                          mask=there[:, None] & (rope >= 0))
    async_copy.mbarrier_arrive(ring.full.index(i), increment_count=False)
    ring.shown.index(i).store(there.to(gl.float32))
    gl.barrier()
    mbarrier.arrive(ring.full.index(i))


@gluon.jit
def _load_words(data, row, first: gl.constexpr, COUNT: gl.constexpr, there,
                LAYOUT: gl.constexpr):
  """COUNT words of each row from `first` on."""
  cols = gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))[None, :]
  return gl.load(data + row[:, None] + (cols + first),
                 mask=there[:, None] & (cols >= 0), other=0)


@gluon.jit
def _store_half(smem, words, KIND: gl.constexpr):
  """Stores words of bytes as float16."""
  x = decode_hopper._half(words, KIND)
  smem.store(x.reshape(smem.shape))


@gluon.jit
def _produce_bytes(args, N: gl.constexpr, STAGES: gl.constexpr,
                   KIND: gl.constexpr):
  """_produce of a cache of bytes, which become float16 on their way."""
  (data, ring, table, pages, page_size, k_page, k_token, first, stop,
   steps) = args
  data = data.to(gl.pointer_type(gl.int32))
  k_page //= 4
  k_token //= 4
  LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
  n = first + gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
  page = _page_of(table, n, pages, page_size, stop)
  there = page >= 0
  row = _row_at(page, n, page_size, k_page, k_token)
  low = _load_words(data, row, 0, HALF // 4, there, LAYOUT)
  high = _load_words(data, row, HALF // 4, HALF // 4, there, LAYOUT)
  rope = _load_words(data, row, HEAD // 4, ROPE // 4, there, LAYOUT)
  n += N
  page = _page_of(table, n, pages, page_size, stop)
  for step in range(steps):
    i, phase = hopper.ring(step, STAGES)
    mbarrier.wait(ring.empty.index(i), phase ^ 1)
    ring.shown.index(i).store(there.to(gl.float32))
    there = page >= 0
    row = _row_at(page, n, page_size, k_page, k_token)
    n += N
    page = _page_of(table, n, pages, page_size, stop)
    _store_half(ring.halves.index(2 * i), low, KIND)
    low = _load_words(data, row, 0, HALF // 4, there, LAYOUT)
    _store_half(ring.halves.index(2 * i + 1), high, KIND)
    high = _load_words(data, row, HALF // 4, HALF // 4, there, LAYOUT)
    _store_half(ring.rope.index(i), rope, KIND)
    rope = _load_words(data, row, HEAD // 4, ROPE // 4, there, LAYOUT)
    fence_async_shared()
    gl.barrier()
    mbarrier.arrive(ring.full.index(i))


@gluon.jit
def _copy_queries(q, left, q_halves, q_rope, w: gl.constexpr):
  """Copies a warpgroup's columns of the 64 rows, from its half on."""
  CHUNK: gl.constexpr = 16
  LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
  rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
  half = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
  rope = gl.arange(0, ROPE, gl.SliceLayout(0, LAYOUT))[None, :]
  for row in gl.static_range(0, 64, CHUNK):
    live = (rows + row < left)[:, None]
    at = q + ((rows + row) * COLS)[:, None]
    async_copy.async_load(
        q_halves.index(w).slice(row, CHUNK), at + (half + w * HALF),
        mask=live & (half >= 0))
    if w == 1:
      async_copy.async_load(
          q_rope.index(0).slice(row, CHUNK), at + (rope + HEAD),
          mask=live & (rope >= 0))
  async_copy.commit_group()
  async_copy.wait_group(0)


@gluon.jit
def _convert_queries(q, left, q_halves, q_rope, ups, w: gl.constexpr):
  """Half of the 64 rows in float16, each times a power of two.

  ups: float32 [64], what undoes that.
  """
  CHUNK: gl.constexpr = 8
  LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
  ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
  WIDE: gl.constexpr = hopper.rows_layout(HALF)
  rows = gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE))
  rows_n = gl.arange(0, CHUNK, ROWS)
  half = gl.arange(0, HALF, gl.SliceLayout(0, WIDE))[None, :]
  rope = gl.arange(0, ROPE, gl.SliceLayout(0, LAYOUT))[None, :]
  for row in gl.static_range(w * 32, w * 32 + 32, CHUNK):
    live = (rows + row < left)[:, None]
    at = q + ((rows + row) * COLS)[:, None]
    a = gl.load(at + half, mask=live, other=0.0).to(gl.float32)
    b = gl.load(at + (half + HALF), mask=live, other=0.0).to(gl.float32)
    c = gl.load(q + ((rows_n + row) * COLS)[:, None] + (rope + HEAD),
                mask=(rows_n + row < left)[:, None], other=0.0).to(gl.float32)
    top = gl.max(gl.maximum(gl.abs(a), gl.abs(b)), 1)
    top = gl.maximum(top, gl.convert_layout(gl.max(gl.abs(c), 1),
                                            gl.SliceLayout(1, WIDE)))
    exponent = top.to(gl.int32, bitcast=True) >> 23
    up = gl.minimum(127 + 14 + 127 - exponent, 253)
    factor = (up << 23).to(gl.float32, bitcast=True)
    q_halves.index(0).slice(row, CHUNK).store(
        (a * factor[:, None]).to(gl.float16))
    q_halves.index(1).slice(row, CHUNK).store(
        (b * factor[:, None]).to(gl.float16))
    q_rope.index(0).slice(row, CHUNK).store(
        (c * gl.convert_layout(factor, ROWS)[:, None]).to(gl.float16))
    ups.slice(row, CHUNK).store(((254 - up) << 23).to(gl.float32, bitcast=True))


@gluon.jit
def _score(q_halves, q_rope, ring, step, N: gl.constexpr,
           STAGES: gl.constexpr):
  """Waits for a tile of keys and starts its product with the queries."""
  i, phase = hopper.ring(step, STAGES)
  mbarrier.wait(ring.full.index(i), phase)
  # What others copied, for the matrix instructions to read.
  fence_async_shared()
  # Where queries lie is found once more, rather than kept in registers.
  zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [step],
                                   gl.int32, False, 1)
  s = warpgroup_mma(
      q_halves.index(zero), ring.halves.index(2 * i).permute([1, 0]),
      gl.zeros([64, N], gl.float32, hopper.accumulator(N)), use_acc=False,
      is_async=True)
  s = warpgroup_mma(q_halves.index(zero + 1),
                    ring.halves.index(2 * i + 1).permute([1, 0]), s,
                    is_async=True)
  return warpgroup_mma(q_rope.index(zero),
                       ring.rope.index(i).permute([1, 0]), s, is_async=True)


@gluon.jit
def _weigh(s, m, l, ring, weights, step, terms, w: gl.constexpr,
           N: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr):
  """Weights of a tile's keys, for this warpgroup and for the other one.

  Returns:
    (the left operand of their product, maximum, sum, factor of what was summed
    before).
  """
  scale, place, first, window_left, window_right, early, late = terms
  COLUMN: gl.constexpr = gl.SliceLayout(0, hopper.accumulator(N))
  i, _ = hopper.ring(step, STAGES)
  shown = ring.shown.index(i).load(COLUMN)
  s = gl.where((shown != 0.0)[None, :], s * scale, float("-inf"))
  key = first + step * N
  if (key < early) | (key + N > late):
    ahead = (key + gl.arange(0, N, COLUMN))[None, :] - place[:, None]
    s = gl.where((ahead <= window_right) & (ahead >= -window_left), s,
                 float("-inf"))
  m_new = gl.maximum(m, gl.max(s, 1))
  UP: gl.constexpr = 0.0 if KIND == attend.NO_BYTES else 10.0
  p = gl.exp2(s - (m_new - UP)[:, None])
  alpha = gl.exp2(m - m_new)
  l = l * alpha + gl.sum(p, 1)
  p = p.to(weights.tile.dtype)
  mbarrier.wait(weights.empty.index(w), ((step // 2) & 1) ^ 1)
  weights.tile.index(w).store(p)
  weights.maximum.index(w).store(m_new)
  fence_async_shared()
  gl.barrier()
  mbarrier.arrive(weights.full.index(w))
  p = gl.convert_layout(
      p, gl.DotOperandLayout(0, hopper.accumulator(HALF), 2))
  return p, m_new, l, alpha


@gluon.jit
def _scaled(acc, alpha):
  LAYOUT: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(HALF))
  return acc * gl.convert_layout(alpha, LAYOUT)[:, None]


@gluon.jit
def _take(acc, m, l, ring, weights, step, w: gl.constexpr,
          STAGES: gl.constexpr):
  """Starts to add a tile that the other warpgroup has scored."""
  mbarrier.wait(weights.full.index(1 - w), (step // 2) & 1)
  m_new = weights.maximum.index(1 - w).load(m.type.layout)
  alpha = gl.exp2(m - m_new)
  acc = _scaled(acc, alpha)
  i, phase = hopper.ring(step, STAGES)
  mbarrier.wait(ring.full.index(i), phase)
  fence_async_shared()
  acc = warpgroup_mma(weights.tile.index(1 - w), ring.halves.index(2 * i + w),
                      acc, is_async=True)
  return acc, m_new, l * alpha


@gluon.jit
def _taken(ring, weights, step, w: gl.constexpr, STAGES: gl.constexpr):
  """Gives back what _take has read."""
  i, _ = hopper.ring(step, STAGES)
  mbarrier.arrive(ring.empty.index(i))
  mbarrier.arrive(weights.empty.index(1 - w))


@gluon.jit
def _consume(w: gl.constexpr, args, N: gl.constexpr, STAGES: gl.constexpr,
             KIND: gl.constexpr):
  """Computes a half of the columns, and scores every other tile."""
  (q, q_halves, q_rope, q_full, ups, ring, weights, sums, sums_full, left,
   out, lse, parts, parts_lse, sinks, scale, out_scale, has_sink, begin,
   cp_world_size, first, row0, group, tokens, splits, window_left, window_right,
   early, late, flags, steps) = args
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  if KIND == attend.NO_BYTES:
    _copy_queries(q, left, q_halves, q_rope, w)
  else:
    _convert_queries(q, left, q_halves, q_rope, ups, w)
  fence_async_shared()
  gl.barrier()
  mbarrier.arrive(q_full)
  mbarrier.wait(q_full, 0)
  fence_async_shared()

  r = gl.arange(0, 64, ROWS)
  live = r < left
  query = (row0 + gl.where(live, r, 0)) // group
  head = (row0 + gl.where(live, r, 0)) % group
  row_scale = scale
  if KIND != attend.NO_BYTES:
    row_scale = (scale * ups.load(ROWS))[:, None]
  terms = (row_scale, _key_of(query, begin, cp_world_size), first, window_left,
           window_right, early, late)
  ONE: gl.constexpr = 1.0 if KIND == attend.NO_BYTES else 1024.0
  m = gl.full([64], LEAST, gl.float32, ROWS)
  l = gl.zeros([64], gl.float32, ROWS)
  if w == 0:
    if has_sink:
      m = gl.maximum(gl.load(sinks + head) * scores.LOG2E, LEAST)
      l = gl.where(m == LEAST, 0.0, ONE)
  acc = gl.zeros([64, HALF], gl.float32, hopper.accumulator(HALF))
  if steps > w:
    s = _score(q_halves, q_rope, ring, w, N, STAGES)
    if w == 1:
      acc, m, l = _take(acc, m, l, ring, weights, 0, w, STAGES)
      s = warpgroup_mma_wait(1, deps=[s])
      p, m, l, alpha = _weigh(s, m, l, ring, weights, w, terms, w, N, STAGES,
                              KIND)
      acc = warpgroup_mma_wait(0, deps=[acc])
      _taken(ring, weights, 0, w, STAGES)
      acc = _scaled(acc, alpha)
    else:
      s = warpgroup_mma_wait(0, deps=[s])
      p, m, l, alpha = _weigh(s, m, l, ring, weights, w, terms, w, N, STAGES,
                              KIND)
    for step in range(w, steps - 2, 2):
      i, _ = hopper.ring(step, STAGES)
      acc = warpgroup_mma(p, ring.halves.index(2 * i + w), acc, is_async=True)
      s = _score(q_halves, q_rope, ring, step + 2, N, STAGES)
      # Scores are three products.
      acc = warpgroup_mma_wait(3, deps=[acc])
      mbarrier.arrive(ring.empty.index(i))
      acc, m, l = _take(acc, m, l, ring, weights, step + 1, w, STAGES)
      s = warpgroup_mma_wait(1, deps=[s])
      p, m, l, alpha = _weigh(s, m, l, ring, weights, step + 2, terms, w, N,
                              STAGES, KIND)
      acc = warpgroup_mma_wait(0, deps=[acc])
      _taken(ring, weights, step + 1, w, STAGES)
      acc = _scaled(acc, alpha)
    last = steps - 1 - ((steps - 1 - w) & 1)
    i, _ = hopper.ring(last, STAGES)
    acc = warpgroup_mma(p, ring.halves.index(2 * i + w), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
  if (steps - 1) % 2 != w:
    acc, m, l = _take(acc, m, l, ring, weights, steps - 1, w, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])

  sums.index(w).store(l)
  gl.barrier()
  mbarrier.arrive(sums_full)
  mbarrier.wait(sums_full, 0)
  l += sums.index(1 - w).load(ROWS)
  any_key = l != 0.0
  l = gl.where(any_key, l, 1.0)
  acc = _scaled(acc, out_scale / l)
  LAYOUT: gl.constexpr = hopper.accumulator(HALF)
  at_r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
  at = ((at_r * HEAD)[:, None] + w * HALF
        + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :])
  row_lse = m * scores.LN2 + gl.log(l * (1.0 / ONE))
  row_lse = gl.where(any_key, row_lse, float("-inf"))
  if splits > 1:
    if w == 0:
      gl.store(parts_lse + r, row_lse, mask=live)
    gl.store(parts + at, acc, mask=(at_r < left)[:, None])
  else:
    if w == 0:
      if (flags & attend.LSE) != 0:
        gl.store(lse + (head * tokens + query), row_lse, mask=live)
    gl.store(out + at, acc.to(out.dtype.element_ty),
             mask=(at_r < left)[:, None])


@gluon.jit
def _find_rows(slot, lanes, cu_seqlens, batch, tokens, seqlen_q, group, flags,
               TILE_M: gl.constexpr):
  """attend.py's find_rows, which looks at many sequences at a time."""
  tiles_each = (seqlen_q * group + TILE_M - 1) // TILE_M
  index = slot // gl.maximum(tiles_each, 1)
  first = index * tiles_each
  start = index * seqlen_q
  end = start + seqlen_q
  if (flags & attend.CU_SEQLENS) != 0:
    before = lanes * 0
    for i in range(1, batch + 1, attend.LANES):
      at = i + lanes
      of_lane = gl.load(cu_seqlens + at, mask=at <= batch, other=0)
      of_lane = gl.minimum(gl.maximum(of_lane, 0), tokens)
      before += gl.where(
          (at <= batch) & (of_lane * group // TILE_M + at <= slot), 1, 0)
    index = gl.sum(before, 0)
    start = gl.load(cu_seqlens + index)
    start = gl.minimum(gl.maximum(start, 0), tokens)
    first = start * group // TILE_M + index
    end = gl.load(cu_seqlens + index + 1, mask=index < batch, other=tokens)
    end = gl.minimum(gl.maximum(end, 0), tokens)
  return index, start, end - start, (slot - first) * TILE_M


@gluon.jit
def _attend(
    q, data, out, lse, parts, parts_lse, k_scale, v_scale, sinks, table,
    lengths, cu_seqlens, k_page, k_token, tokens, batch, group, pages,
    page_size, splits, cp_world_size, window_left, window_right, softmax_scale,
    flags, split, index, start, row0, left, first_page, begin, stop, first_tile,
    steps,
    TILE_N: gl.constexpr, KIND: gl.constexpr, STAGES: gl.constexpr,
):
  """A block that has rows and keys."""
  # One KV head: all rows of a sequence lie one behind the other.
  first_row = start.to(gl.int64) * group + row0
  part = split.to(gl.int64) * tokens * group + first_row
  scale = softmax_scale * gl.load(k_scale) * scores.LOG2E
  out_scale = gl.load(v_scale)
  has_sink = ((flags & attend.SINK) != 0) & (split == 0) & (index < batch)
  # Tiles before `early` or past `late` are cut by a row's window.
  early = 0
  late = 1 << 30
  if (flags & attend.WINDOW) != 0:
    last = (row0 + gl.minimum(64, left) - 1) // group
    early = _key_of(last, begin, cp_world_size) - window_left
    late = _key_of(row0 // group, begin, cp_world_size) + window_right + 1

  dtype: gl.constexpr = (q.dtype.element_ty if KIND == attend.NO_BYTES
                         else gl.float16)
  WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
  NARROW: gl.constexpr = gl.NVMMASharedLayout(
      min(2 * TILE_N, 128), 16, rank=2)
  PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
  q_halves = gl.allocate_shared_memory(dtype, [2, 64, HALF], WIDE)
  q_rope = gl.allocate_shared_memory(dtype, [1, 64, ROPE], WIDE)
  ups = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
  halves = gl.allocate_shared_memory(dtype, [2 * STAGES, TILE_N, HALF], WIDE)
  rope = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, ROPE], WIDE)
  shown = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_N], PLAIN)
  tile = gl.allocate_shared_memory(dtype, [2, 64, TILE_N], NARROW)
  maximum = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
  sums = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
  q_full = mbarrier.allocate_mbarrier()
  sums_full = mbarrier.allocate_mbarrier()
  full = mbarrier.allocate_mbarrier(batch=STAGES)
  empty = mbarrier.allocate_mbarrier(batch=STAGES)
  w_full = mbarrier.allocate_mbarrier(batch=2)
  w_empty = mbarrier.allocate_mbarrier(batch=2)
  mbarrier.init(q_full, count=2)
  mbarrier.init(sums_full, count=2)
  # Each thread's copies arrive, and one that has said which keys are shown.
  for i in gl.static_range(STAGES):
    mbarrier.init(full.index(i),
                  count=129 if KIND == attend.NO_BYTES else 1)
    mbarrier.init(empty.index(i), count=2)
  for i in gl.static_range(2):
    mbarrier.init(w_full.index(i), count=1)
    mbarrier.init(w_empty.index(i), count=1)
  ring = Ring(halves, rope, shown, full, empty)
  weights = Weights(tile, maximum, w_full, w_empty)

  first = first_tile * TILE_N
  produce = (data, ring, table + first_page, pages, page_size, k_page, k_token,
             first, stop, steps)
  consume = (q + first_row * COLS, q_halves, q_rope, q_full, ups, ring, weights,
             sums, sums_full, left, out + first_row * HEAD, lse + start,
             parts + part * HEAD, parts_lse + part, sinks, scale, out_scale,
             has_sink, begin, cp_world_size, first, row0, group, tokens, splits,
             window_left, window_right, early, late, flags, steps)
  if KIND == attend.NO_BYTES:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, STAGES, KIND)),
        (_consume, (1, consume, TILE_N, STAGES, KIND)),
        (_produce, (produce, TILE_N, STAGES)),
    ], [4, 4], [224, 56])
  else:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, STAGES, KIND)),
        (_consume, (1, consume, TILE_N, STAGES, KIND)),
        (_produce_bytes, (produce, TILE_N, STAGES, KIND)),
    ], [4, 4], [208, 88])


@gluon.jit
def mla_attend(
    q, k_cache, k_bytes, out, lse, parts, parts_lse, k_scale, v_scale, sinks,
    table, indptr, lengths, cu_seqlens, places, k_start, k_page, k_token,
    tokens, batch, seqlen_q, group, pages, page_size, width, splits, programs,
    cp_world_size, window_left, window_right, softmax_scale, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, FLAGS: gl.constexpr,
    KIND: gl.constexpr, STAGES: gl.constexpr,
):
  """attend.py's mla_attend, of 512 columns of values and 64 beside them.

  Parts of sequences are of about the same size, as paged_attend's.
  """
  gl.static_assert(TILE_M == 64)
  slot = gl.program_id(0)
  split = gl.program_id(1)
  share = 0.0
  lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([1], [32], [4], [0]))
  if splits > 1:
    share = programs / PROGRAMS / gl.maximum(gl.sum(_tiles_of_batch(
        lanes, cu_seqlens, lengths, batch, seqlen_q, group, window_left,
        window_right, flags, TILE_M, TILE_N, FLAGS), 0), 1.0)
  index, start, len_q, row0 = _find_rows(
      slot, lanes, cu_seqlens, batch, tokens, seqlen_q, group, flags, TILE_M)
  left = len_q * group - row0
  # What of another cache's keys is behind a query is found key by key.
  one = cp_world_size == 1
  first_page, _, begin, _, stop, first_tile, last_tile = _find_keys(
      index, row0, gl.minimum(TILE_M, left), len_q, lengths, indptr, batch,
      width, pages, page_size, group, gl.where(one, window_left, 1 << 30),
      gl.where(one, window_right, 1 << 30), split, splits, share, flags, TILE_N,
      FLAGS)
  if left > 0:
    if (split > 0) & (first_tile >= last_tile):
      at = (split.to(gl.int64) * tokens * group + start.to(gl.int64) * group
            + row0)
      gl.store(parts_lse + at + lanes, lanes * 0.0 + float("-inf"),
               mask=lanes < gl.minimum(left, TILE_M))
    else:
      if not one:
        begin = gl.load(places + index, mask=index < batch, other=0)
      data = (k_cache if KIND == attend.NO_BYTES else k_bytes) + k_start
      # Without a key there is a tile of none.
      _attend(
          q, data, out, lse, parts, parts_lse, k_scale, v_scale, sinks, table,
          lengths, cu_seqlens, k_page, k_token, tokens, batch, group, pages,
          page_size, splits, cp_world_size, window_left, window_right,
          softmax_scale, flags, split, index, start, row0, left, first_page,
          begin, stop, first_tile,
          gl.maximum(last_tile - first_tile, 1), TILE_N, KIND, STAGES)
