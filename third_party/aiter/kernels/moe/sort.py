# SPDX-License-Identifier: Apache-2.0
"""Entries sorted by their expert: a counting sort whose order is that of ids.

  moe_count  of each part of the entries: how many an expert has; clears order
  moe_scan   of each part: how many it has in those before; and in all
  moe_place  where each entry lies

An entry is a token's choice of an expert; one that is none of them is left out.
An expert's entries lie together, in their order, from a multiple of `block` on.
"""

import triton
import triton.language as tl


@triton.jit
def _part(ids, entries, experts, TILE_M: tl.constexpr):
  """(numbers of a part's entries, their experts; -1 is none)."""
  entry = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  expert = tl.load(ids + entry, mask=entry < entries, other=-1)
  known = (expert >= 0) & (expert < experts)
  return entry, tl.where(known, expert, -1)


@triton.jit
def moe_count(
    ids, partial, order, entries, experts, block,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
  """partial [parts, experts] of ids [entries]. Grid: (parts).

  order, which moe_place leaves holes in, becomes 0.
  """
  places = entries + experts * (block - 1)
  for p0 in range(tl.program_id(0) * TILE_M, places,
                  tl.num_programs(0) * TILE_M):
    p = p0 + tl.arange(0, TILE_M)
    tl.store(order + p, tl.zeros([TILE_M], tl.int32), mask=p < places)
  _, expert = _part(ids, entries, experts, TILE_M)
  to = partial + tl.program_id(0).to(tl.int64) * experts
  for e0 in range(0, experts, TILE_N):
    e = e0 + tl.arange(0, TILE_N)
    count = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(to + e, count, mask=e < experts)


@triton.jit
def moe_scan(
    partial, counts, parts, experts,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
  """partial added up in place, without a part's own; counts [experts].

  Grid: (experts / TILE_N).
  """
  e = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
  total = tl.zeros([TILE_N], tl.int32)
  for p0 in range(0, parts, TILE_M):
    p = p0 + tl.arange(0, TILE_M)
    at = partial + p.to(tl.int64)[:, None] * experts + e[None, :]
    inside = (p < parts)[:, None] & (e < experts)[None, :]
    count = tl.load(at, mask=inside, other=0)
    before = total[None, :] + tl.cumsum(count, 0) - count
    tl.store(at, before, mask=inside)
    total += tl.sum(count, 0)
  tl.store(counts + e, total, mask=e < experts)


@triton.jit
def moe_place(
    ids, partial, counts, place, order, entries, experts, block,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
  """place [entries], -1 of one left out; order [place] = 1 + entry.

  Grid: (parts).
  """
  entry, expert = _part(ids, entries, experts, TILE_M)
  at = tl.load(partial + tl.program_id(0).to(tl.int64) * experts + expert,
               mask=expert >= 0, other=0)
  # Those of the same expert before it in its part.
  first = tl.program_id(0) * TILE_M
  for j0 in range(0, TILE_M, TILE_N):
    j = first + j0 + tl.arange(0, TILE_N)
    other = tl.load(ids + j, mask=j < entries, other=-1)
    at += tl.sum(((other[None, :] == expert[:, None])
                  & (j[None, :] < entry[:, None])).to(tl.int32), 1)
  for e0 in range(0, experts, TILE_N):
    e = e0 + tl.arange(0, TILE_N)
    count = tl.load(counts + e, mask=e < experts, other=0)
    padded = (count + block - 1) // block * block
    at += tl.sum(tl.where(e[None, :] < expert[:, None], padded[None, :], 0), 1)
  tl.store(place + entry, tl.where(expert >= 0, at, -1), mask=entry < entries)
  tl.store(order + at, entry + 1, mask=expert >= 0)
