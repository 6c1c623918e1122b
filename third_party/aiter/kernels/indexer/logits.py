# SPDX-License-Identifier: Apache-2.0
"""Logits of DeepSeek's lightning indexer.

  logits[i, n] = k_scale[n] * sum over h of weights[i, h] * relu(q[i, h] . k[n])

A program has TILE_M queries and a run of keys, TILE_N at a time. Products are
of keys by queries' heads, so that the sum over heads is along a row of the
matrix unit's result, most of which one thread has.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.indexer.family import FLAGS

TILES = tl.constexpr(FLAGS["tiles"])


@triton.jit
def _clear(logits, row, cols, first, last, inside, TILE_M: tl.constexpr,
           TILE_N: tl.constexpr):
  """Columns from first to last of no key."""
  for n0 in tl.range(first, last, TILE_N):
    n = (n0 + tl.arange(0, TILE_N))[None, :]
    tl.store(logits + (row[:, None] * cols + n),
             tl.full([TILE_M, TILE_N], float("-inf"), tl.float32),
             inside[:, None] & (n < last))


@triton.jit
def indexer_logits(
    q, k, k_scale, weights, table, starts, ends, logits,
    sequences, next_n, heads, dim, cols, chunk, pages, page_size, table_width,
    k_page, scale_page, scale_start, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGED: tl.constexpr,
):
  """Semantics in include/aiter/indexer.h.

  q: [sequences * next_n, heads, dim]. k: of a page page_size keys, those of
  pages k_page apart; k_scale: likewise, from scale_start on, scale_page apart.
  With PAGED, `ends` has the length of each sequence, and its queries are the
  last ones; else starts and ends have a range for each query.

  Grid: (runs of `chunk` keys, sequences each of tiles of queries).
  """
  tiles = tl.cdiv(next_n, TILE_M)
  sequence = tl.program_id(1) // tiles
  j = tl.program_id(1) % tiles * TILE_M + tl.arange(0, TILE_M)
  inside = j < next_n
  row = sequence.to(tl.int64) * next_n + j
  if PAGED:
    end = tl.load(ends + sequence) - next_n + j + 1
    start = tl.zeros([TILE_M], tl.int32)
  else:
    start = tl.load(starts + row, inside, 0)
    end = tl.load(ends + row, inside, 0)
  end = tl.where(inside, tl.minimum(end, cols), 0)
  start = tl.maximum(start, 0)
  empty = start >= end
  lowest = tl.min(tl.where(empty, cols, start), 0)
  highest = tl.max(tl.where(empty, 0, end), 0)
  # Columns of the product: heads of the first query, of the second, ...
  c = tl.arange(0, TILE_M * HEADS)
  of = sequence.to(tl.int64) * next_n + (
      tl.program_id(1) % tiles * TILE_M + c // HEADS)
  there = (tl.program_id(1) % tiles * TILE_M + c // HEADS < next_n) & (
      c % HEADS < heads)
  d = tl.arange(0, DIM)
  q_tile = tl.load(q + (of * heads + c % HEADS)[None, :] * dim + d[:, None],
                   there[None, :] & (d < dim)[:, None], 0.0)
  w = tl.load(weights + of * heads + c % HEADS, there, 0.0)[None, :]
  first = tl.program_id(0) * chunk
  last = tl.minimum(first + chunk, cols)
  begin = tl.maximum(first, lowest // TILE_N * TILE_N)
  stop = tl.minimum(last, highest)
  m_there = inside[None, :]
  run = tl.where((flags & TILES) != 0, 256, 16)
  piece = (d // 16 * run + d % 16)[None, :]
  for n0 in tl.range(begin, stop, TILE_N):
    n = n0 + tl.arange(0, TILE_N)
    known = (n >= lowest) & (n < highest)
    if PAGED:
      index = n // page_size
      offset = n - index * page_size
      page = tl.load(table + sequence * table_width + index,
                     known & (index < table_width), -1)
      known = known & (page >= 0) & (page < pages)
      base = page.to(tl.int64) * k_page + tl.where(
          (flags & TILES) != 0, offset // 16 * 16 * dim + offset % 16 * 16,
          offset * dim)
      base = tl.multiple_of(base, 16)
      of_scale = page.to(tl.int64) * scale_page + (scale_start + offset)
    else:
      base = n.to(tl.int64) * dim
      of_scale = n
    k_tile = tl.load(k + (base[:, None] + piece),
                     known[:, None] & (d < dim)[None, :], 0.0)
    s = tl.load(k_scale + of_scale, known, 0.0)
    dots = tl.maximum(tl.dot(k_tile, q_tile), 0.0) * w
    total = tl.sum(tl.reshape(dots, [TILE_N, TILE_M, HEADS]), 2)
    seen = known[:, None] & (n[:, None] >= start[None, :]) & (
        n[:, None] < end[None, :])
    tl.store(logits + row[None, :] * cols + n[:, None],
             tl.where(seen, total * s[:, None], float("-inf")),
             (n < last)[:, None] & m_there)
  # Columns of this run before and behind those.
  _clear(logits, row, cols, first, tl.minimum(begin, last), inside, TILE_M,
         TILE_N)
  stop = begin + (tl.maximum(stop - begin, 0) + TILE_N - 1) // TILE_N * TILE_N
  _clear(logits, row, cols, tl.minimum(stop, last), last, inside, TILE_M,
         TILE_N)
