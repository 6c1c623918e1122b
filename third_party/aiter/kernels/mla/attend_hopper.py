# SPDX-License-Identifier: Apache-2.0
"""Latent attention for Hopper (sm_90), in Gluon.

A block has 64 rows, which are heads and queries of one sequence. A producer
warpgroup copies rows of the cache, wherever they lie, into a ring of tiles of
keys; two consumer warpgroups hold half of the output's columns each. A tile is
scored by one of them, in turn: while it computes weights, the other one's
products run. It leaves weights and its new maximum in shared memory, and both
warpgroups add the tile's values, which are its keys' first columns.
DeepSeek-AI, FlashMLA, "A Deep-Dive Into the New Flash MLA Kernel", April 2025,
has halves of the output in two warpgroups too, and scores two tiles at a time.

Few rows, as of 16 heads, are columns of the products instead, whose rows are
keys: matrix instructions have 64 rows, but as few columns as 8. There each
warpgroup has all columns of the output for every other tile, and in the end
both add what they have, half of the columns each.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.paged import attend, decode_hopper

# A Gluon function calls none of Triton's; of one source it may be either.
_find_keys = gluon.jit(attend.find_keys.fn)
_length_of = gluon.jit(attend.length_of.fn)

# Columns of the values, of a warpgroup's half of them, and of the keys' rest.
HEAD = gl.constexpr(512)
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
COLS = gl.constexpr(HEAD.value + ROPE.value)
# Programs that the library counts where there is one of this kernel, which
# fills a multiprocessor: so many more parts than fill the device there may be.
PROGRAMS = gl.constexpr(2)
# Programs of a row with many parts, where there are few rows, or twice as many.
MERGE_COLS = gl.constexpr(4)
# Numbers of 4 bytes in a line of the caches.
LINE = gl.constexpr(32)
# More than any key.
ABSENT = gl.constexpr(2**31 - 1)
# Less than any score, and finite: no difference of two maxima is NaN.
LEAST = gl.constexpr(-3e38)


class Ring(NamedTuple):
  """Tiles of keys: halves [2 * stages, keys, HALF], rope [stages, keys, ROPE].

  key: int32 [stages, keys], which they are; ABSENT where there is none. Halves
  come and go by themselves; with the second that comes come rope and key.
  """
  halves: tl.tensor
  rope: tl.tensor
  key: tl.tensor
  full: tl.tensor
  empty: tl.tensor


class Weights(NamedTuple):
  """What warpgroups tell each other of the tiles that each has scored.

  tile: [64, keys], maximum: float32 [64], in base 2. Who writes them has read
  those before.
  """
  tile: tl.tensor
  maximum: tl.tensor
  full: tl.tensor


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
    key = gl.where(there, n, ABSENT)
    at = data + _row_at(page, n, page_size, k_page, k_token)[:, None]
    # Where the next tile is, is known when its turn comes.
    n += N
    page = _page_of(table, n, pages, page_size, stop)
    i, phase = hopper.ring(step, STAGES)
    # First the half of the warpgroup that scores the tile.
    for other in gl.static_range(2):
      h = (step + other) % 2
      place = 2 * i + h
      mbarrier.wait(ring.empty.index(place), phase ^ 1)
      async_copy.async_load(
          ring.halves.index(place), at + (half + h * HALF),
          mask=there[:, None] & (half >= 0))
      if other:
        async_copy.async_load(ring.rope.index(i), at + (rope + HEAD),
                              mask=there[:, None] & (rope >= 0))
        ring.key.index(i).store(key)
      async_copy.mbarrier_arrive(ring.full.index(place), increment_count=False)
      mbarrier.arrive(ring.full.index(place))


@gluon.jit
def _load_words(data, row, first: gl.constexpr, COUNT: gl.constexpr, there,
                LAYOUT: gl.constexpr):
  """COUNT words of each row from `first` on."""
  cols = gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))[None, :]
  return gl.load(data + row[:, None] + (cols + first),
                 mask=there[:, None] & (cols >= 0), other=0)


@gluon.jit
def _store_words(smem, words, KIND: gl.constexpr):
  """Stores words of bytes as float16."""
  smem.store(decode_hopper._half(words, KIND).reshape(smem.shape))


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
  page = _page_of(table, n + N, pages, page_size, stop)
  for step in range(steps):
    i, phase = hopper.ring(step, STAGES)
    # Who leaves a half has read which keys they are, and the rest of them.
    mbarrier.wait(ring.empty.index(2 * i), phase ^ 1)
    ring.key.index(i).store(gl.where(there, n, ABSENT))
    n += N
    there = page >= 0
    row = _row_at(page, n, page_size, k_page, k_token)
    page = _page_of(table, n + N, pages, page_size, stop)
    # The next tile's words come as this one's go.
    _store_words(ring.halves.index(2 * i), low, KIND)
    low = _load_words(data, row, 0, HALF // 4, there, LAYOUT)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(2 * i))
    mbarrier.wait(ring.empty.index(2 * i + 1), phase ^ 1)
    _store_words(ring.halves.index(2 * i + 1), high, KIND)
    high = _load_words(data, row, HALF // 4, HALF // 4, there, LAYOUT)
    _store_words(ring.rope.index(i), rope, KIND)
    rope = _load_words(data, row, HEAD // 4, ROPE // 4, there, LAYOUT)
    fence_async_shared()
    mbarrier.arrive(ring.full.index(2 * i + 1))


@gluon.jit
def _copy_queries(q, left, q_halves, q_rope, w: gl.constexpr,
                  M: gl.constexpr):
  """Copies a warpgroup's columns of the M rows, from its half on."""
  CHUNK: gl.constexpr = 16
  LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
  rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
  half = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
  rope = gl.arange(0, ROPE, gl.SliceLayout(0, LAYOUT))[None, :]
  for row in gl.static_range(0, M, CHUNK):
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
def _convert_queries(q, left, q_halves, q_rope, ups, w: gl.constexpr,
                     M: gl.constexpr):
  """Half of the M rows in float16, each times a power of two.

  ups: float32 [M], what undoes that.
  """
  CHUNK: gl.constexpr = 8
  LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
  ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
  WIDE: gl.constexpr = hopper.rows_layout(HALF)
  rows = gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE))
  rows_n = gl.arange(0, CHUNK, ROWS)
  half = gl.arange(0, HALF, gl.SliceLayout(0, WIDE))[None, :]
  rope = gl.arange(0, ROPE, gl.SliceLayout(0, LAYOUT))[None, :]
  for row in gl.static_range(w * M // 2, (w + 1) * M // 2, CHUNK):
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
def _score(q_halves, q_rope, ring, step, w: gl.constexpr, N: gl.constexpr,
           STAGES: gl.constexpr):
  """Waits for a tile of keys and starts its product with the queries."""
  i, phase = hopper.ring(step, STAGES)
  # Where tiles lie is found once more, rather than kept in registers.
  zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [step],
                                   gl.int32, False, 1)
  s = gl.zeros([64, N], gl.float32, hopper.accumulator(N))
  for other in gl.static_range(2):
    h = (w + other) % 2
    mbarrier.wait(ring.full.index(2 * i + h), phase)
    # What others copied, for the matrix instructions to read.
    fence_async_shared()
    s = warpgroup_mma(q_halves.index(zero + h),
                      ring.halves.index(2 * i + h + zero).permute([1, 0]), s,
                      use_acc=other > 0, is_async=True)
  return warpgroup_mma(q_rope.index(zero),
                       ring.rope.index(i + zero).permute([1, 0]), s,
                       is_async=True)


@gluon.jit
def _weigh(s, m, l, ring, step, terms, N: gl.constexpr, STAGES: gl.constexpr,
           KIND: gl.constexpr):
  """Weights of a tile's keys.

  Returns:
    (weights, maximum, sum, factor of what was summed before).
  """
  scale, low, high, first, early = terms
  i, _ = hopper.ring(step, STAGES)
  key = ring.key.index(i).load(gl.SliceLayout(0, hopper.accumulator(N)))
  s = gl.where(key[None, :] <= high[:, None], s * scale, float("-inf"))
  if first + step * N < early:
    s = gl.where(key[None, :] >= low[:, None], s, float("-inf"))
  m_new = gl.maximum(m, gl.max(s, 1))
  UP: gl.constexpr = 0.0 if KIND == attend.NO_BYTES else 10.0
  p = gl.exp2(s - (m_new - UP)[:, None])
  alpha = gl.exp2(m - m_new)
  l = l * alpha + gl.sum(p, 1)
  return p.to(ring.halves.dtype), m_new, l, alpha


@gluon.jit
def _tell(p, m, weights, w: gl.constexpr):
  """Leaves weights to the other warpgroup; returns them as an operand."""
  weights.tile.store(p)
  weights.maximum.store(m)
  fence_async_shared()
  mbarrier.arrive(weights.full.index(w))
  return gl.convert_layout(
      p, gl.DotOperandLayout(0, hopper.accumulator(HALF), 2))


@gluon.jit
def _scaled(acc, alpha):
  LAYOUT: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(HALF))
  return acc * gl.convert_layout(alpha, LAYOUT)[:, None]


@gluon.jit
def _take(acc, m, l, ring, weights, step, w: gl.constexpr,
          STAGES: gl.constexpr):
  """Starts to add a tile that the other warpgroup has scored."""
  mbarrier.wait(weights.full.index(1 - w), (step // 2) & 1)
  m_new = weights.maximum.load(m.type.layout)
  alpha = gl.exp2(m - m_new)
  acc = _scaled(acc, alpha)
  # Whoever scored the tile has seen that it is there.
  i, _ = hopper.ring(step, STAGES)
  acc = warpgroup_mma(weights.tile, ring.halves.index(2 * i + w), acc,
                      is_async=True)
  return acc, m_new, l * alpha


@gluon.jit
def _row(row0, left, group, M: gl.constexpr, LAYOUT: gl.constexpr):
  """A block's M rows: (live, query, head)."""
  r = gl.arange(0, M, LAYOUT)
  live = r < left
  r = row0 + gl.where(live, r, 0)
  return live, r // group, r % group


@gluon.jit
def _store_rows(out, tile, left, w: gl.constexpr, M: gl.constexpr):
  """Stores a half of M rows, which lies in shared memory, in whole lines."""
  LAYOUT: gl.constexpr = hopper.rows_layout(HALF)
  r = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
  cols = w * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
  gl.store(out + (r * HEAD)[:, None] + cols[None, :], tile.load(LAYOUT),
           mask=(r < left)[:, None])


@gluon.jit
def _consume(w: gl.constexpr, args, N: gl.constexpr, STAGES: gl.constexpr,
             KIND: gl.constexpr):
  """Computes a half of the columns, and scores every other tile."""
  (q, q_halves, q_rope, q_full, ups, ring, weights, sums, sums_full, left,
   out, lse, parts, parts_lse, sinks, scale, out_scale, has_sink, begin,
   cp_world_size, first, row0, group, tokens, splits, window_left, window_right,
   bounded, early, divided, flags, steps) = args
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  if KIND == attend.NO_BYTES:
    _copy_queries(q, left, q_halves, q_rope, w, 64)
  else:
    _convert_queries(q, left, q_halves, q_rope, ups, w, 64)
  fence_async_shared()
  mbarrier.arrive(q_full)
  mbarrier.wait(q_full, 0)
  fence_async_shared()

  live, query, head = _row(row0, left, group, 64, ROWS)
  row_scale = scale
  if KIND != attend.NO_BYTES:
    row_scale = (scale * ups.load(ROWS))[:, None]
  place = _key_of(query, begin, cp_world_size)
  high = gl.where(bounded, place + window_right, ABSENT - 1)
  terms = (row_scale, place - window_left, high, first, early)
  ONE: gl.constexpr = 1.0 if KIND == attend.NO_BYTES else 1024.0
  m = gl.full([64], LEAST, gl.float32, ROWS)
  l = gl.zeros([64], gl.float32, ROWS)
  if w == 0:
    if has_sink:
      m = gl.load(sinks + head) * scores.LOG2E
      m = gl.minimum(gl.maximum(m, LEAST), -LEAST)
      l = gl.where(m == LEAST, 0.0, ONE)
  acc = gl.zeros([64, HALF], gl.float32, hopper.accumulator(HALF))
  if steps > w:
    s = _score(q_halves, q_rope, ring, w, w, N, STAGES)
    if w == 1:
      acc, m, l = _take(acc, m, l, ring, weights, 0, w, STAGES)
      s = warpgroup_mma_wait(1, deps=[s])
      p, m, l, alpha = _weigh(s, m, l, ring, w, terms, N, STAGES, KIND)
      acc = warpgroup_mma_wait(0, deps=[acc])
      mbarrier.arrive(ring.empty.index(w))
      p = _tell(p, m, weights, w)
      acc = _scaled(acc, alpha)
    else:
      s = warpgroup_mma_wait(0, deps=[s])
      p, m, l, alpha = _weigh(s, m, l, ring, w, terms, N, STAGES, KIND)
      p = _tell(p, m, weights, w)
    for step in range(w, steps - 2, 2):
      i, _ = hopper.ring(step, STAGES)
      j, _ = hopper.ring(step + 1, STAGES)
      acc = warpgroup_mma(p, ring.halves.index(2 * i + w), acc, is_async=True)
      # Scores are three products.
      if STAGES > 2:
        s = _score(q_halves, q_rope, ring, step + 2, w, N, STAGES)
        acc = warpgroup_mma_wait(3, deps=[acc])
        mbarrier.arrive(ring.empty.index(2 * i + w))
        acc, m, l = _take(acc, m, l, ring, weights, step + 1, w, STAGES)
        s = warpgroup_mma_wait(1, deps=[s])
        p, m, l, alpha = _weigh(s, m, l, ring, step + 2, terms, N, STAGES, KIND)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(2 * j + w))
      else:
        # The tile after next comes where this one was.
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(2 * i + w))
        acc, m, l = _take(acc, m, l, ring, weights, step + 1, w, STAGES)
        s = _score(q_halves, q_rope, ring, step + 2, w, N, STAGES)
        acc = warpgroup_mma_wait(3, deps=[acc])
        mbarrier.arrive(ring.empty.index(2 * j + w))
        s = warpgroup_mma_wait(0, deps=[s])
        p, m, l, alpha = _weigh(s, m, l, ring, step + 2, terms, N, STAGES, KIND)
      p = _tell(p, m, weights, w)
      acc = _scaled(acc, alpha)
    last = steps - 1 - ((steps - 1 - w) & 1)
    i, _ = hopper.ring(last, STAGES)
    acc = warpgroup_mma(p, ring.halves.index(2 * i + w), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
  if (steps - 1) % 2 != w:
    acc, m, l = _take(acc, m, l, ring, weights, steps - 1, w, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])

  sums.index(w).store(l)
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
  # Found once more, rather than kept in registers all the while.
  again = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row0],
                                    gl.int32, False, 1)
  live, query, head = _row(again, left, group, 64, ROWS)
  r = gl.arange(0, 64, ROWS)
  if divided:
    if w == 0:
      gl.store(parts_lse + r, row_lse, mask=live)
    gl.store(parts + at, acc, mask=(at_r < left)[:, None])
  else:
    if w == 0:
      if splits > 1:
        gl.store(parts_lse + r, gl.where(live, float("inf"), 0.0), mask=live)
      if (flags & attend.LSE) != 0:
        gl.store(lse + (head * tokens + query), row_lse, mask=live)
    # Nobody looks at the queries any more.
    result = q_halves.index(w).reinterpret(
        out.dtype.element_ty, [64, HALF], q_halves.layout)
    result.store(acc.to(out.dtype.element_ty))
    _store_rows(out, result, left, w, 64)


@gluon.jit
def _consume_few(w: gl.constexpr, args, M: gl.constexpr, N: gl.constexpr,
                 KIND: gl.constexpr):
  """Computes every other tile of keys for a few rows, and then a half.

  Keys are the rows of the products, and queries the columns: M of them.
  """
  (q, q_halves, q_rope, q_full, ups, ring, weights, sums, sums_full, left,
   out, lse, parts, parts_lse, sinks, scale, out_scale, has_sink, begin,
   cp_world_size, first, row0, group, tokens, splits, window_left, window_right,
   bounded, early, divided, flags, steps) = args
  LAYOUT: gl.constexpr = hopper.accumulator(M)
  ROWS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
  if KIND == attend.NO_BYTES:
    _copy_queries(q, left, q_halves, q_rope, w, M)
  else:
    _convert_queries(q, left, q_halves, q_rope, ups, w, M)
  fence_async_shared()
  mbarrier.arrive(q_full)
  mbarrier.wait(q_full, 0)
  fence_async_shared()

  live, query, head = _row(row0, left, group, M, ROWS)
  row_scale = scale
  if KIND != attend.NO_BYTES:
    row_scale = (scale * ups.load(ROWS))[None, :]
  place = _key_of(query, begin, cp_world_size)
  low = place - window_left
  high = gl.where(bounded, place + window_right, ABSENT - 1)
  UP: gl.constexpr = 0.0 if KIND == attend.NO_BYTES else 10.0
  m = gl.full([M], LEAST, gl.float32, ROWS)
  l = gl.zeros([N, M], gl.float32, LAYOUT)
  acc = gl.zeros([HALF, M], gl.float32, LAYOUT)
  more = gl.zeros([HALF, M], gl.float32, LAYOUT)
  tile = weights.tile.index(w)
  for step in range(w, steps, 2):
    # Each warpgroup has a buffer of its own.
    phase = (step // 2) & 1
    # Where tiles lie is found once more, rather than kept in registers.
    zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [step],
                                     gl.int32, False, 1)
    at_w = zero + 2 * w
    s = gl.zeros([N, M], gl.float32, LAYOUT)
    for other in gl.static_range(2):
      h = (w + other) % 2
      mbarrier.wait(ring.full.index(at_w + h), phase)
      fence_async_shared()
      s = warpgroup_mma(ring.halves.index(at_w + h),
                        q_halves.index(zero + h).permute([1, 0]), s,
                        use_acc=other > 0, is_async=True)
    s = warpgroup_mma(ring.rope.index(zero + w),
                      q_rope.index(zero).permute([1, 0]), s, is_async=True)
    key = ring.key.index(w).load(gl.SliceLayout(1, LAYOUT))
    s = warpgroup_mma_wait(0, deps=[s])
    s = gl.where(key[:, None] <= high[None, :], s * row_scale, float("-inf"))
    if first + step * N < early:
      s = gl.where(key[:, None] >= low[None, :], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 0))
    p = gl.exp2(s - (m_new - UP)[None, :])
    alpha = gl.exp2(m - m_new)
    m = m_new
    l = l * alpha[None, :] + p
    tile.store(p.to(ring.halves.dtype))
    fence_async_shared()
    acc = warpgroup_mma(ring.halves.index(at_w).permute([1, 0]), tile,
                        acc * alpha[None, :], is_async=True)
    more = warpgroup_mma(ring.halves.index(at_w + 1).permute([1, 0]), tile,
                         more * alpha[None, :], is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(ring.empty.index(2 * w))
    more = warpgroup_mma_wait(0, deps=[more])
    mbarrier.arrive(ring.empty.index(2 * w + 1))

  # Each gives the other what it has of the other's half.
  own, theirs = acc, more
  if w == 1:
    own, theirs = more, acc
  l = gl.sum(l, 0)
  PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
  # Nothing comes into its buffer any more.
  sums.index(w).slice(0, M).store(m)
  sums.index(w).slice(M, M).store(l)
  ring.halves.index(2 * w).reinterpret(
      gl.float32, [HALF, M], PLAIN).store(theirs)
  mbarrier.arrive(sums_full)
  mbarrier.wait(sums_full, 0)
  m_other = sums.index(1 - w).slice(0, M).load(ROWS)
  l_other = sums.index(1 - w).slice(M, M).load(ROWS)
  theirs = ring.halves.index(2 - 2 * w).reinterpret(
      gl.float32, [HALF, M], PLAIN).load(LAYOUT)
  top = gl.maximum(m, m_other)
  ONE: gl.constexpr = 1.0 if KIND == attend.NO_BYTES else 1024.0
  again = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [row0],
                                    gl.int32, False, 1)
  live, query, head = _row(again, left, group, M, ROWS)
  extra = gl.zeros([M], gl.float32, ROWS)
  if has_sink:
    sink = gl.load(sinks + head) * scores.LOG2E
    sink = gl.minimum(gl.maximum(sink, LEAST), -LEAST)
    top = gl.maximum(top, sink)
    extra = gl.where(sink == LEAST, 0.0, gl.exp2(sink - top) * ONE)
  alpha = gl.exp2(m - top)
  alpha_other = gl.exp2(m_other - top)
  l = l * alpha + l_other * alpha_other + extra
  any_key = l != 0.0
  l = gl.where(any_key, l, 1.0)
  own = (own * alpha[None, :] + theirs * alpha_other[None, :])
  own *= (out_scale / l)[None, :]
  row_lse = top * scores.LN2 + gl.log(l * (1.0 / ONE))
  row_lse = gl.where(any_key, row_lse, float("-inf"))
  r = gl.arange(0, M, ROWS)
  at = ((r * HEAD)[None, :] + w * HALF
        + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None])
  if divided:
    if w == 0:
      gl.store(parts_lse + r, row_lse, mask=live)
    gl.store(parts + at, own, mask=live[None, :])
  else:
    if w == 0:
      if splits > 1:
        gl.store(parts_lse + r, gl.where(live, float("inf"), 0.0), mask=live)
      if (flags & attend.LSE) != 0:
        gl.store(lse + (head * tokens + query), row_lse, mask=live)
    result = q_halves.index(w).reinterpret(
        out.dtype.element_ty, [M, HALF], q_halves.layout)
    result.permute([1, 0]).store(own.to(out.dtype.element_ty))
    _store_rows(out, result, left, w, M)


@gluon.jit
def _sequence(index, cu_seqlens, lengths, batch, tokens, seqlen_q, group,
              window_left, window_right, flags, TILE_M: gl.constexpr,
              TILE_N: gl.constexpr):
  """(first token, tokens, tiles of rows, tiles of keys) of sequences.

  Sequence `batch` is the tokens behind all others.
  """
  inside = index < batch
  last = index <= batch
  packed = (flags & attend.CU_SEQLENS) != 0
  # Nothing is waited for before all is asked for.
  start = gl.load(cu_seqlens + index, mask=last & packed, other=0)
  end = gl.load(cu_seqlens + index + 1, mask=inside & packed, other=0)
  length = _length_of(lengths, index, inside, flags)
  start = gl.minimum(gl.maximum(start, 0), tokens)
  end = gl.minimum(gl.maximum(end, 0), tokens)
  end = gl.where(inside, end, gl.where(last, tokens, start))
  start = gl.where(packed, start, index * seqlen_q)
  end = gl.where(packed, end, start + gl.where(inside, seqlen_q, 0))
  if (flags & attend.WINDOW) != 0:
    length = gl.minimum(
        length, gl.minimum(window_left, 1 << 29)
        + gl.minimum(window_right, 1 << 29) + TILE_M)
  rows = (gl.maximum(end - start, 0) * group + TILE_M - 1) // TILE_M
  return start, end - start, rows, (length + TILE_N - 1) // TILE_N


@gluon.jit
def _parts(tiles, splits, share):
  """Parts of so many tiles of keys."""
  # Rather fewer: a few blocks too many wait until the others have ended.
  parts = (tiles.to(gl.float32) * share + 0.3).to(gl.int32)
  return gl.minimum(gl.maximum(parts, 1), splits)


@gluon.jit
def _find_block(block, cu_seqlens, lengths, batch, tokens, seqlen_q, group,
                window_left, window_right, splits, programs, flags,
                TILE_M: gl.constexpr, TILE_N: gl.constexpr):
  """What a block does: one part of one tile of rows.

  Parts are of about the same size in all sequences, and a sequence's blocks lie
  one behind the other, so that there are no more blocks than parts: one without
  keys would wait for a multiprocessor of its own.

  Returns:
    (index, start, len_q, row0, split, parts, share): a sequence, its first
    token, so many tokens, the first of its rows, the part of so many, and what
    a tile of keys is worth of a part.
  """
  # Each warp has all of them, and most often there are no more.
  lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([4], [32], [4], [0]))
  _, _, rows, tiles = _sequence(
      lanes, cu_seqlens, lengths, batch, tokens, seqlen_q, group, window_left,
      window_right, flags, TILE_M, TILE_N)
  share = 0.0
  if splits > 1:
    total = rows.to(gl.float32) * tiles.to(gl.float32)
    for i in range(attend.LANES, batch, attend.LANES):
      _, _, more, of_more = _sequence(
          i + lanes, cu_seqlens, lengths, batch, tokens, seqlen_q, group,
          window_left, window_right, flags, TILE_M, TILE_N)
      total += more.to(gl.float32) * of_more.to(gl.float32)
    share = programs / PROGRAMS / gl.maximum(gl.sum(total, 0), 1.0)
  ends = gl.cumsum(rows * _parts(tiles, splits, share), 0)
  there = (ends <= block) & (lanes <= batch)
  index = gl.sum(there.to(gl.int32), 0)
  before = gl.max(gl.where(there, ends, 0), 0)
  for i in range(attend.LANES, batch + 1, attend.LANES):
    past = gl.max(ends, 0)
    _, _, rows, tiles = _sequence(
        i + lanes, cu_seqlens, lengths, batch, tokens, seqlen_q, group,
        window_left, window_right, flags, TILE_M, TILE_N)
    ends = past + gl.cumsum(rows * _parts(tiles, splits, share), 0)
    there = (ends <= block) & (i + lanes <= batch)
    index += gl.sum(there.to(gl.int32), 0)
    before = gl.maximum(before, gl.max(gl.where(there, ends, 0), 0))
  start, len_q, _, tiles = _sequence(
      index, cu_seqlens, lengths, batch, tokens, seqlen_q, group, window_left,
      window_right, flags, TILE_M, TILE_N)
  parts = _parts(tiles, splits, share)
  tile = (block - before) // parts
  split = block - before - tile * parts
  return index, start, len_q, tile * TILE_M, split, parts, share


@gluon.jit
def _attend(
    q, data, out, lse, parts, parts_lse, scale, out_scale, sinks, table,
    k_page, k_token, tokens, batch, group, pages,
    page_size, splits, cp_world_size, window_left, window_right,
    flags, split, index, start, row0, left, first_page, begin, stop, first_tile,
    steps,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, KIND: gl.constexpr,
    STAGES: gl.constexpr,
):
  """A block that has rows and keys."""
  # One KV head: all rows of a sequence lie one behind the other.
  first_row = start.to(gl.int64) * group + row0
  part = split.to(gl.int64) * tokens * group + first_row
  has_sink = ((flags & attend.SINK) != 0) & (split == 0) & (index < batch)
  # Tiles before `early` are cut by a row's window.
  bounded = (flags & attend.WINDOW) != 0
  last = (row0 + gl.minimum(TILE_M, left) - 1) // group
  early = gl.where(
      bounded, _key_of(last, begin, cp_world_size) - window_left, 0)

  dtype: gl.constexpr = (q.dtype.element_ty if KIND == attend.NO_BYTES
                         else gl.float16)
  WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
  FEW: gl.constexpr = TILE_M < 64
  NARROW: gl.constexpr = gl.NVMMASharedLayout(
      min(2 * (TILE_M if FEW else TILE_N), 128), 16, rank=2)
  PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
  q_halves = gl.allocate_shared_memory(dtype, [2, TILE_M, HALF], WIDE)
  q_rope = gl.allocate_shared_memory(dtype, [1, TILE_M, ROPE], WIDE)
  ups = gl.allocate_shared_memory(gl.float32, [TILE_M], PLAIN)
  halves = gl.allocate_shared_memory(dtype, [2 * STAGES, TILE_N, HALF], WIDE)
  rope = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, ROPE], WIDE)
  key = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_N], PLAIN)
  tile = gl.allocate_shared_memory(
      dtype, [2, TILE_N, TILE_M] if FEW else [64, TILE_N], NARROW)
  maximum = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
  sums = gl.allocate_shared_memory(
      gl.float32, [2, 2 * TILE_M if FEW else TILE_M], PLAIN)
  q_full = mbarrier.allocate_mbarrier()
  sums_full = mbarrier.allocate_mbarrier()
  full = mbarrier.allocate_mbarrier(batch=2 * STAGES)
  empty = mbarrier.allocate_mbarrier(batch=2 * STAGES)
  w_full = mbarrier.allocate_mbarrier(batch=2)
  mbarrier.init(q_full, count=2)
  mbarrier.init(sums_full, count=2)
  # Each thread's copies arrive, and one that has said which keys they are.
  for i in gl.static_range(2 * STAGES):
    mbarrier.init(full.index(i), count=129 if KIND == attend.NO_BYTES else 1)
    mbarrier.init(empty.index(i), count=1)
  for i in gl.static_range(2):
    mbarrier.init(w_full.index(i), count=1)
  ring = Ring(halves, rope, key, full, empty)
  weights = Weights(tile, maximum, w_full)

  first = first_tile * TILE_N
  # All keys in one part: there is nothing to join.
  divided = (splits > 1) & ((split > 0) | (first + steps * TILE_N < stop))
  produce = (data, ring, table + first_page, pages, page_size, k_page, k_token,
             first, stop, steps)
  consume = (q + first_row * COLS, q_halves, q_rope, q_full, ups, ring, weights,
             sums, sums_full, left, out + first_row * HEAD, lse + start,
             parts + part * HEAD, parts_lse + part, sinks, scale, out_scale,
             has_sink, begin, cp_world_size, first, row0, group, tokens, splits,
             window_left, window_right, bounded, early, divided, flags, steps)
  if FEW:
    gl.static_assert(STAGES == 2)
    if KIND == attend.NO_BYTES:
      gl.warp_specialize([
          (_consume_few, (0, consume, TILE_M, TILE_N, KIND)),
          (_consume_few, (1, consume, TILE_M, TILE_N, KIND)),
          (_produce, (produce, TILE_N, STAGES)),
      ], [4, 4], [176, 120])
    else:
      gl.warp_specialize([
          (_consume_few, (0, consume, TILE_M, TILE_N, KIND)),
          (_consume_few, (1, consume, TILE_M, TILE_N, KIND)),
          (_produce_bytes, (produce, TILE_N, STAGES, KIND)),
      ], [4, 4], [168, 152])
  elif KIND == attend.NO_BYTES:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, STAGES, KIND)),
        (_consume, (1, consume, TILE_N, STAGES, KIND)),
        (_produce, (produce, TILE_N, STAGES)),
    ], [4, 4], [232, 40])
  else:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, STAGES, KIND)),
        (_consume, (1, consume, TILE_N, STAGES, KIND)),
        (_produce_bytes, (produce, TILE_N, STAGES, KIND)),
    ], [4, 4], [208, 88])


@gluon.jit
def _prefetch(ptr, count):
  """Has numbers of 4 bytes brought near, a line a thread of all blocks."""
  at = LINE * (gl.program_id(0) + gl.num_programs(0) * gl.arange(
      0, attend.LANES, gl.BlockedLayout([1], [32], [4], [0])))
  gl.inline_asm_elementwise(
      "{ .reg .pred p; setp.lt.u32 p, $2, $3; @p prefetch.global.L2 [$1];"
      " mov.b32 $0, 0; }", "=r,l,r,r", [ptr + at, at, count], gl.int32, False,
      1)


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

  Grid: as many blocks as there are parts (_find_block), or a few more.
  """
  # mla_merge may get ready, as this may have while the kernel before it ran.
  gdc_launch_dependents()
  # What is read when a block's part is known; it may not be written yet.
  if (flags & attend.INDPTR) != 0:
    _prefetch(indptr, batch + 1)
    _prefetch(table, width)
  else:
    _prefetch(table, batch * width)
  gdc_wait()
  lengths = attend.Lengths(lengths, indptr, page_size)
  lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([1], [32], [4], [0]))
  scale = softmax_scale * gl.load(k_scale) * scores.LOG2E
  out_scale = gl.load(v_scale)
  index, start, len_q, row0, split, most, share = _find_block(
      gl.program_id(0), cu_seqlens, lengths, batch, tokens, seqlen_q, group,
      window_left, window_right, splits, programs, flags, TILE_M, TILE_N)
  left = len_q * group - row0
  # What of another cache's keys is behind a query is found key by key.
  one = cp_world_size == 1
  first_page, _, begin, _, stop, first_tile, last_tile = _find_keys(
      index, row0, gl.minimum(TILE_M, left), len_q, lengths, indptr, batch,
      width, pages, page_size, group, gl.where(one, window_left, 1 << 30),
      gl.where(one, window_right, 1 << 30), split, most, share, flags, TILE_N,
      FLAGS)
  if left > 0:
    # Of parts that there are none of, what joins them is told by the first.
    told = gl.where((split == 0) & (most > 1), splits, 0)
    for first in range(most, told, attend.LANES // TILE_M):
      none = first + lanes // TILE_M
      row = row0 + lanes % TILE_M
      at = (none.to(gl.int64) * tokens * group + start.to(gl.int64) * group
            + row)
      gl.store(parts_lse + at, lanes * 0.0 + float("-inf"),
               mask=(none < told) & (row < len_q * group))
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
          q, data, out, lse, parts, parts_lse, scale, out_scale, sinks, table,
          k_page, k_token, tokens, batch, group, pages,
          page_size, splits, cp_world_size, window_left, window_right,
          flags, split, index, start, row0, left, first_page,
          begin, stop, first_tile,
          gl.maximum(last_tile - first_tile, 1), TILE_M, TILE_N, KIND, STAGES)


@gluon.jit
def mla_merge(parts, parts_lse, out, lse, tokens, nhead_q, splits, merge_rows,
              merge_cols, flags):
  """Joins the parts of rows, as merge.py does; a row of one is skipped.

  Its lse in scratch is inf. Grid: tiles of merge_rows of tokens * nhead_q rows,
  each with merge_cols programs of as many of their columns.
  """
  LANES: gl.constexpr = 256
  # It may have begun before the parts are there, as what comes next may.
  gdc_launch_dependents()
  gdc_wait()
  first = gl.program_id(0) // merge_cols * merge_rows
  end = gl.minimum(first + merge_rows, tokens * nhead_q)
  if merge_rows > 1:
    # Most often there is nothing to join, or all rows are joined.
    r = first + gl.arange(0, LANES, gl.BlockedLayout([1], [32], [8], [0]))
    own = gl.load(parts_lse + r, mask=r < end, other=float("inf"))
    if gl.min(own, 0) == float("inf"):
      end = first
  for row in range(first, end):
    _merge_row(parts, parts_lse, out, lse, row.to(gl.int64),
               tokens.to(gl.int64) * nhead_q, tokens, nhead_q, splits,
               gl.program_id(0) % merge_cols, merge_cols, flags, LANES)


@gluon.jit
def _merge_row(parts, parts_lse, out, lse, row, count, tokens, nhead_q, splits,
               place, merge_cols, flags, LANES: gl.constexpr):
  p = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [8], [0]))
  top = gl.full([LANES], float("-inf"), gl.float32, p.type.layout)
  past = p * 0
  for p0 in range(0, splits, LANES):
    part_lse = gl.load(parts_lse + (p0 + p).to(gl.int64) * count + row,
                       mask=p0 + p < splits, other=float("-inf"))
    top = gl.maximum(top, part_lse)
    past = gl.maximum(
        past, gl.where(part_lse != float("-inf"), p0 + p + 1, 0))
  top = gl.max(top, 0)
  past = gl.max(past, 0)
  if top != float("inf"):
    top = gl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    if merge_cols == 1:
      total = _join(parts, parts_lse, out, row, count, 0, past, top, HEAD, 2)
    elif merge_cols == MERGE_COLS:
      total = _join(parts, parts_lse, out, row, count,
                    place * (HEAD // MERGE_COLS), past, top,
                    HEAD // MERGE_COLS, 8)
    else:
      total = _join(parts, parts_lse, out, row, count,
                    place * (HEAD // (2 * MERGE_COLS)), past, top,
                    HEAD // (2 * MERGE_COLS), 8)
    if ((flags & attend.LSE) != 0) & (place == 0):
      gl.store(lse + row % nhead_q * tokens + row // nhead_q,
               gl.where(total != 0, top + gl.log(total), float("-inf")))


@gluon.jit
def _join(parts, parts_lse, out, row, count, first_col, past, top,
          WIDTH: gl.constexpr, EACH: gl.constexpr):
  """Joins WIDTH columns of a row, EACH parts a warp at a time.

  Returns the sum of weights.
  """
  GROUPS: gl.constexpr = 2 * HEAD // WIDTH
  PARTS: gl.constexpr = GROUPS * EACH
  LAYOUT: gl.constexpr = gl.BlockedLayout(
      [EACH, 4], [max(128 // WIDTH, 1), min(WIDTH // 4, 32)],
      [min(GROUPS, 8), 8 // min(GROUPS, 8)], [1, 0])
  ROW: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
  acc, l = _some_parts(parts, parts_lse, row, count, 0, past, top, first_col,
                       PARTS, GROUPS, WIDTH, LAYOUT)
  for p0 in range(PARTS, past, PARTS):
    more, weight = _some_parts(parts, parts_lse, row, count, p0, past, top,
                               first_col, PARTS, GROUPS, WIDTH, LAYOUT)
    acc += more
    l += weight
  total = gl.sum(l, 0)
  safe = gl.where(total != 0, total, 1.0)
  acc = gl.convert_layout(gl.sum(acc, 0) / safe, ROW)
  gl.store(out + row * HEAD + first_col + gl.arange(0, WIDTH, ROW),
           acc.to(out.dtype.element_ty))
  return total


@gluon.jit
def _some_parts(parts, parts_lse, row, count, first, past, top, first_col,
                PARTS: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr,
                LAYOUT: gl.constexpr):
  """Sums of GROUPS of parts from `first` on, and all parts' weights."""
  part = first + gl.arange(0, PARTS, gl.SliceLayout(1, LAYOUT))
  cols = first_col + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
  at = part.to(gl.int64) * count + row
  # Those before the last that has keys are all written.
  there = part < past
  x = gl.load(parts + at[:, None] * HEAD + cols,
              mask=there[:, None] & (cols >= 0), other=0.0)
  weight = gl.exp(gl.load(parts_lse + at, mask=there, other=float("-inf"))
                  - top)
  x *= weight[:, None]
  return gl.sum(x.reshape([GROUPS, PARTS // GROUPS, WIDTH]), 1), weight
