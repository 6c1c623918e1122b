# SPDX-License-Identifier: Apache-2.0
"""Decoding over paged caches for Hopper (sm_90), in Gluon.

Rows are few: they are columns of the products, whose rows are keys, as matrix
instructions have 64 rows, but as few columns as 8. A producer warpgroup copies
keys and values, wherever they lie, into a ring of tiles.

Blocks share the keys of all sequences alike. Sequences' tiles of keys, one
behind the other, are cut into as many pieces as there are blocks of a KV head,
and a block goes through its piece, sequence by sequence: all blocks end at the
same time, however long sequences are, and a few sequences have parts.
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
from third_party.aiter.kernels.paged import attend

# A Gluon function calls none of Triton's; of one source it may be either.
_find_rows = gluon.jit(attend.find_rows.fn)
_soft_cap = gluon.jit(attend.soft_cap.fn)

# More than any key.
ABSENT = gl.constexpr(2**31 - 1)
# Less than any score, and finite: no difference of two maxima is NaN.
LEAST = gl.constexpr(-3e38)


class Batch(NamedTuple):
  """What tells where sequences begin, and how many keys they have."""
  cu_seqlens: tl.tensor
  lengths: tl.tensor
  indptr: tl.tensor
  batch: tl.tensor
  tokens: tl.tensor
  seqlen_q: tl.tensor
  group: tl.tensor
  width: tl.tensor
  pages: tl.tensor
  page_size: tl.tensor
  window_left: tl.tensor
  window_right: tl.tensor
  flags: tl.tensor


class Sequence(NamedTuple):
  """A sequence, or several.

  Its first token and so many, tiles of rows, the place of its first page in
  the table, its length, the end of keys that it sees, the first tile of those
  and so many.
  """
  start: tl.tensor
  len_q: tl.tensor
  rows: tl.tensor
  page: tl.tensor
  length: tl.tensor
  stop: tl.tensor
  first: tl.tensor
  tiles: tl.tensor


class Piece(NamedTuple):
  """What a block does: so many tiles of keys, `left`.

  The first is tile `tile` of those of sequence `index`'s tile `row` of rows.
  """
  index: tl.tensor
  row: tl.tensor
  tile: tl.tensor
  left: tl.tensor


class Ring(NamedTuple):
  """Tiles of keys and values [stages, keys, HEAD].

  key: int32 [stages, keys], which they are; ABSENT where there is none.
  """
  k: tl.tensor
  v: tl.tensor
  key: tl.tensor
  k_full: tl.tensor
  k_empty: tl.tensor
  v_full: tl.tensor
  v_empty: tl.tensor


@gluon.jit
def _sequence(b, at, M: gl.constexpr, N: gl.constexpr):
  """Sequence `at`, or many.

  One that is `batch` is the tokens behind all others. Without keys there is a
  tile of none.
  """
  inside = at < b.batch
  last = at <= b.batch
  packed = (b.flags & attend.CU_SEQLENS) != 0
  listed = (b.flags & attend.INDPTR) != 0
  # Nothing is waited for before all is asked for.
  length = gl.load(b.lengths + at, mask=inside, other=0)
  start = gl.load(b.cu_seqlens + at, mask=last & packed, other=0)
  end = gl.load(b.cu_seqlens + at + 1, mask=inside & packed, other=0)
  page = gl.load(b.indptr + at, mask=inside & listed, other=0)
  until = gl.load(b.indptr + at + 1, mask=inside & listed, other=0)
  start = gl.minimum(gl.maximum(start, 0), b.tokens)
  end = gl.minimum(gl.maximum(end, 0), b.tokens)
  end = gl.where(inside, end, gl.where(last, b.tokens, start))
  start = gl.where(packed, start, at * b.seqlen_q)
  end = gl.where(packed, end, start + gl.where(inside, b.seqlen_q, 0))
  len_q = gl.maximum(end - start, 0)
  if (b.flags & attend.LAST_PAGES) != 0:
    length = gl.where(until > page, (until - page - 1) * b.page_size + length,
                      0)
  # No length is beyond what memory holds; sums with windows stay in 32 bits.
  length = gl.minimum(gl.maximum(length, 0), 1 << 30)
  page = gl.minimum(gl.maximum(page, 0), b.width)
  count = gl.where(listed, gl.minimum(until, b.width) - page, b.width)
  page = gl.where(listed, page.to(gl.int64), at.to(gl.int64) * b.width)
  count = gl.minimum(gl.maximum(count, 0), length // b.page_size + 1)
  stop = gl.where(b.pages > 0, gl.minimum(length, count * b.page_size), 0)
  low = stop * 0
  if (b.flags & attend.WINDOW) != 0:
    stop = gl.minimum(stop, gl.maximum(length + b.window_right, 0))
    low = gl.maximum(length - len_q - b.window_left, 0)
  first = low // N
  tiles = gl.maximum((stop + N - 1) // N - first, 1)
  rows = (len_q * b.group + M - 1) // M
  return Sequence(start, len_q, rows, page, length, stop, first, tiles)


@gluon.jit
def _find_piece(b, block, blocks, splits, M: gl.constexpr, N: gl.constexpr):
  """A block's Piece, and which part of its first rows' keys it begins with."""
  lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([4], [32], [4], [0]))
  total = (lanes * 0).to(gl.int64)
  longest = lanes * 0 + 1
  for i in range(0, b.batch + 1, attend.LANES):
    s = _sequence(b, i + lanes, M, N)
    total += s.rows.to(gl.int64) * s.tiles
    longest = gl.maximum(longest, gl.where(s.rows > 0, s.tiles, 0))
  total = gl.maximum(gl.sum(total, 0), 1)
  # Scratch has room for so many parts, of which two are not whole pieces.
  least = (gl.max(longest, 0) + splits - 2) // (splits - 1)
  blocks = gl.maximum(gl.minimum(blocks, total // least), 1)
  begin = block * total // blocks
  left = gl.where(block < blocks, (block + 1) * total // blocks - begin, 0)
  index = 0
  before = begin * 0
  past = begin * 0
  for i in range(0, b.batch + 1, attend.LANES):
    s = _sequence(b, i + lanes, M, N)
    ends = past + gl.cumsum(s.rows.to(gl.int64) * s.tiles, 0)
    there = (ends <= begin) & (i + lanes <= b.batch)
    index += gl.sum(there.to(gl.int32), 0)
    before = gl.maximum(before, gl.max(gl.where(there, ends, 0), 0))
    past = gl.max(ends, 0)
  tiles = _sequence(b, index, M, N).tiles
  offset = (begin - before).to(gl.int32)
  tile = offset % tiles
  # The first block with keys of these rows.
  first = ((begin - tile + 1) * blocks - 1) // total
  return (Piece(index, offset // tiles, tile, left.to(gl.int32)),
          (block - first).to(gl.int32))


@gluon.jit
def _next(piece, s, steps):
  """What is left of a piece behind so many tiles of its first rows."""
  ends = piece.row + 1 >= s.rows
  return Piece(gl.where(ends, piece.index + 1, piece.index),
               gl.where(ends, 0, piece.row + 1), 0, piece.left - steps)


@gluon.jit
def _steps(piece, s):
  """How many tiles of its first rows' keys a piece has."""
  return gl.where(s.rows > 0, gl.minimum(s.tiles - piece.tile, piece.left), 0)


@gluon.jit
def _page_of(table, n, stop, b):
  """The pages of keys, -1 where there is none."""
  page = gl.load(table + n // b.page_size, mask=n < stop, other=-1)
  return gl.where((page >= 0) & (page < b.pages), page, -1)


@gluon.jit
def _copy(side, tile, page, place, cols, full):
  """Copies a tile of keys or values; what is no key becomes 0."""
  data, of_page, of_token, hdim = side
  at = (gl.maximum(page, 0).to(gl.int64) * of_page + place * of_token)[:, None]
  async_copy.async_load(tile, data + at + cols,
                        mask=(page >= 0)[:, None] & (cols < hdim),
                        eviction_policy="evict_first")
  async_copy.mbarrier_arrive(full, increment_count=False)
  mbarrier.arrive(full)


@gluon.jit
def _produce(args, M: gl.constexpr, N: gl.constexpr, HEAD: gl.constexpr,
             STAGES: gl.constexpr):
  """Copies the tiles of keys and values, and says which keys they are."""
  b, ring, table, k_side, v_side, piece = args
  LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
  cols = gl.arange(0, HEAD, gl.SliceLayout(0, LAYOUT))[None, :]
  keys = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
  used = 0
  while piece.left > 0:
    s = _sequence(b, piece.index, M, N)
    steps = _steps(piece, s)
    n = (s.first + piece.tile) * N + keys
    page = _page_of(table + s.page, n, s.stop, b)
    for _ in range(steps):
      i, phase = hopper.ring(used, STAGES)
      used += 1
      here = page
      place = n % b.page_size
      key = gl.where(here >= 0, n, ABSENT)
      # Where the next tile is, is known when its turn comes.
      n += N
      page = _page_of(table + s.page, n, s.stop, b)
      mbarrier.wait(ring.k_empty.index(i), phase ^ 1)
      ring.key.index(i).store(key)
      _copy(k_side, ring.k.index(i), here, place, cols, ring.k_full.index(i))
      mbarrier.wait(ring.v_empty.index(i), phase ^ 1)
      _copy(v_side, ring.v.index(i), here, place, cols, ring.v_full.index(i))
    piece = _next(piece, s, steps)


@gluon.jit
def _rows(s, row0, head, group, nhead_q, M: gl.constexpr, LAYOUT: gl.constexpr):
  """M rows from row0 on: (query, query head, place in memory, live)."""
  r = row0 + gl.arange(0, M, LAYOUT)
  query = r // group
  head_q = head * group + r % group
  return (query, head_q, (s.start + query).to(gl.int64) * nhead_q + head_q,
          r < s.len_q * group)


@gluon.jit
def _attend(args, s, index, row0, steps, used, part, ends, M: gl.constexpr,
            N: gl.constexpr, HEAD: gl.constexpr, FLAGS: gl.constexpr,
            STAGES: gl.constexpr):
  """An online softmax of M rows over so many tiles of keys.

  used: of the ring, so many. part: of the rows' keys, the last if it `ends`.
  """
  (b, ring, q, hdim, q_smem, w_smem, out, hdim_v, lse, parts, parts_lse, sinks,
   sinks_step, slopes, slopes_step, nhead_q, head, scale, soft_cap, out_scale,
   splits) = args
  LAYOUT: gl.constexpr = hopper.accumulator(M)
  ROWS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
  KEYS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
  WIDE: gl.constexpr = hopper.rows_layout(HEAD)
  q_tile = q_smem.slice(0, M)
  weights = w_smem.index(0).reinterpret(
      w_smem.dtype, [N, M], gl.NVMMASharedLayout(2 * M, 16, rank=2))
  cols = gl.arange(0, HEAD, gl.SliceLayout(0, WIDE))[None, :]
  _, _, at, live = _rows(s, row0, head, b.group, nhead_q, M,
                         gl.SliceLayout(1, WIDE))
  async_copy.async_load(q_tile, q + (at * hdim)[:, None] + cols,
                        mask=live[:, None] & (cols < hdim))
  async_copy.commit_group()
  query, head_q, at, live = _rows(s, row0, head, b.group, nhead_q, M, ROWS)
  place = s.length - s.len_q + query
  owned = live & (index < b.batch)
  slope = gl.zeros([M], gl.float32, ROWS)
  if attend.ALIBI & FLAGS and b.flags & attend.ALIBI:
    slope = gl.load(slopes + index * slopes_step + head_q, mask=owned,
                    other=0.0) * scores.LOG2E
  m = gl.full([M], LEAST, gl.float32, ROWS)
  l = gl.zeros([N, M], gl.float32, LAYOUT)
  acc = gl.zeros([HEAD, M], gl.float32, LAYOUT)
  async_copy.wait_group(0)
  fence_async_shared()
  gl.barrier()
  for step in range(used, used + steps):
    i, phase = hopper.ring(step, STAGES)
    mbarrier.wait(ring.k_full.index(i), phase)
    # What others copied, for the matrix instructions to read.
    fence_async_shared()
    x = warpgroup_mma(ring.k.index(i), q_tile.permute([1, 0]),
                      gl.zeros([N, M], gl.float32, LAYOUT), use_acc=False,
                      is_async=True)
    key = ring.key.index(i).load(KEYS)[:, None]
    x = warpgroup_mma_wait(0, deps=[x])
    mbarrier.arrive(ring.k_empty.index(i))
    x *= scale
    if attend.SOFT_CAP & FLAGS and b.flags & attend.SOFT_CAP:
      x = _soft_cap(x, soft_cap)
    x *= scores.LOG2E
    if attend.ALIBI & FLAGS and b.flags & attend.ALIBI:
      x -= slope[None, :] * gl.abs(key - place[None, :]).to(gl.float32)
    x = gl.where(key != ABSENT, x, float("-inf"))
    if (b.flags & attend.WINDOW) != 0:
      ahead = key - place[None, :]
      x = gl.where((ahead <= b.window_right) & (ahead >= -b.window_left), x,
                   float("-inf"))
    m_new = gl.maximum(m, gl.max(x, 0))
    p = gl.exp2(x - m_new[None, :])
    alpha = gl.exp2(m - m_new)
    m = m_new
    l = l * alpha[None, :] + p
    weights.store(p.to(weights.dtype))
    fence_async_shared()
    gl.barrier()
    mbarrier.wait(ring.v_full.index(i), phase)
    fence_async_shared()
    acc = warpgroup_mma(ring.v.index(i).permute([1, 0]), weights,
                        acc * alpha[None, :], is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(ring.v_empty.index(i))

  norm = gl.sum(l, 0)
  if ((b.flags & attend.SINK) != 0) & (part == 0):
    # A key without a value.
    sink = gl.load(sinks + index * sinks_step + head_q, mask=owned,
                   other=float("-inf")) * scores.LOG2E
    sink = gl.minimum(gl.maximum(sink, LEAST), -LEAST)
    m_new = gl.maximum(m, sink)
    alpha = gl.exp2(m - m_new)
    norm = norm * alpha + gl.where(sink == LEAST, 0.0, gl.exp2(sink - m_new))
    acc *= alpha[None, :]
    m = m_new
  any_key = norm != 0.0
  norm = gl.where(any_key, norm, 1.0)
  acc *= (out_scale / norm)[None, :]
  row_lse = gl.where(any_key, m * scores.LN2 + gl.log(norm), float("-inf"))
  col = gl.arange(0, HEAD, KEYS)[:, None]
  mask = live[None, :] & (col < hdim_v)
  size = b.tokens.to(gl.int64) * nhead_q
  if (part == 0) & ends:
    if (b.flags & attend.LSE) != 0:
      gl.store(lse + (head_q.to(gl.int64) * b.tokens + s.start + query),
               row_lse, mask=live)
    gl.store(out + (at * hdim_v)[None, :] + col, acc.to(out.dtype.element_ty),
             mask=mask)
  else:
    here = part * size + at
    gl.store(parts_lse + here, row_lse, mask=live)
    gl.store(parts + (here * hdim_v)[None, :] + col, acc, mask=mask)
    part += 1
  if ends & (part < splits) & (splits > 1):
    # As attend.py ends them.
    gl.store(parts_lse + part * size + at,
             gl.full([M], float("inf"), gl.float32, ROWS), mask=live)


@gluon.jit
def _consume(args, piece, part, M: gl.constexpr, N: gl.constexpr,
             HEAD: gl.constexpr, FLAGS: gl.constexpr, STAGES: gl.constexpr):
  """Goes through a piece, sequence by sequence."""
  b = args[0]
  used = 0
  while piece.left > 0:
    s = _sequence(b, piece.index, M, N)
    steps = _steps(piece, s)
    row0 = piece.row * M
    ends = piece.tile + steps >= s.tiles
    if steps > 0:
      # Most often there are no more rows than half of a tile's.
      if s.len_q * b.group - row0 <= M // 2:
        _attend(args, s, piece.index, row0, steps, used, part, ends, M // 2, N,
                HEAD, FLAGS, STAGES)
      else:
        _attend(args, s, piece.index, row0, steps, used, part, ends, M, N, HEAD,
                FLAGS, STAGES)
      part = 0
    used += steps
    piece = _next(piece, s, steps)


@gluon.jit
def paged_attend(
    q, k_cache, v_cache, out, lse, parts, parts_lse, k_scale, v_scale, sinks,
    slopes, table, indptr, lengths, cu_seqlens, k_start, k_page, k_head,
    k_token, k_scale_head, v_start, v_page, v_head, v_token, v_scale_head,
    tokens, batch, seqlen_q, nhead_q, nhead_k, group, hdim, hdim_v, pages,
    page_size, width, splits, window_left, window_right, sinks_step,
    slopes_step, softmax_scale, logits_soft_cap, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    FLAGS: gl.constexpr, STAGES: gl.constexpr,
):
  """attend.py's paged_attend, of head dimensions up to HEAD.

  Grid: blocks that run at a time, KV heads fastest, or without splits tiles of
  rows and KV heads.
  """
  # paged_merge may get ready, as this may have while the kernel before it ran.
  gdc_launch_dependents()
  if not attend.PARTIAL & FLAGS:
    hdim = HEAD
    hdim_v = HEAD
  WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
  dtype: gl.constexpr = q.dtype.element_ty
  q_tile = gl.allocate_shared_memory(dtype, [TILE_M, HEAD], WIDE)
  weights = gl.allocate_shared_memory(
      dtype, [1, TILE_N, TILE_M],
      gl.NVMMASharedLayout(2 * TILE_M, 16, rank=2))
  ring = Ring(
      gl.allocate_shared_memory(dtype, [STAGES, TILE_N, HEAD], WIDE),
      gl.allocate_shared_memory(dtype, [STAGES, TILE_N, HEAD], WIDE),
      gl.allocate_shared_memory(gl.int32, [STAGES, TILE_N],
                                gl.SwizzledSharedLayout(1, 1, 1, [0])),
      mbarrier.allocate_mbarrier(batch=STAGES),
      mbarrier.allocate_mbarrier(batch=STAGES),
      mbarrier.allocate_mbarrier(batch=STAGES),
      mbarrier.allocate_mbarrier(batch=STAGES))
  # Each thread's copies arrive, and one that has said which keys they are.
  for i in gl.static_range(STAGES):
    mbarrier.init(ring.k_full.index(i), count=129)
    mbarrier.init(ring.v_full.index(i), count=129)
    mbarrier.init(ring.k_empty.index(i), count=1)
    mbarrier.init(ring.v_empty.index(i), count=1)
  gdc_wait()
  b = Batch(cu_seqlens, lengths, indptr, batch, tokens, seqlen_q, group, width,
            pages, page_size, window_left, window_right, flags)
  head = gl.program_id(0) % nhead_k
  block = gl.program_id(0) // nhead_k
  part = 0
  if splits > 1:
    piece, part = _find_piece(b, block, gl.num_programs(0) // nhead_k, splits,
                              TILE_M, TILE_N)
  else:
    index, _, _, row0 = _find_rows(block, cu_seqlens, batch, tokens, seqlen_q,
                                   group, flags, TILE_M, FLAGS)
    row = row0 // TILE_M
    s = _sequence(b, index, TILE_M, TILE_N)
    piece = Piece(index, row, 0, gl.where(row < s.rows, s.tiles, 0))
  if piece.left > 0:
    scale = softmax_scale * gl.load(k_scale + head.to(gl.int64) * k_scale_head)
    out_scale = gl.load(v_scale + head.to(gl.int64) * v_scale_head)
    k_side = (k_cache + (k_start + head.to(gl.int64) * k_head), k_page, k_token,
              hdim)
    v_side = (v_cache + (v_start + head.to(gl.int64) * v_head), v_page, v_token,
              hdim_v)
    gl.warp_specialize([
        (_consume,
         ((b, ring, q, hdim, q_tile, weights, out, hdim_v, lse, parts,
           parts_lse, sinks, sinks_step, slopes, slopes_step, nhead_q, head,
           scale, logits_soft_cap, out_scale, splits), piece, part,
          TILE_M, TILE_N, HEAD, FLAGS, STAGES)),
        (_produce, ((b, ring, table, k_side, v_side, piece), TILE_M, TILE_N,
                    HEAD, STAGES)),
    ], [4], [64])
