# SPDX-License-Identifier: Apache-2.0
"""The k largest columns of a part of each row, as a list in their order.

A block owns a row. Columns evenly spread over the row's span say from which
number on there are a few more than k, most likely. The columns from there on,
in their order, are listed, and the k-th largest is found in the list, two bits
at a time. Where they are fewer than k, or more than the list holds, it is found
in the span itself, out of the cache.

Everything that decides is a number of columns, so no order of additions shows.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.sampling import rows

DEAD = rows.DEAD
load_raw = rows.load_raw
order_key = rows.order_key
from_order_key = rows.from_order_key

# As many columns, and behind them as many keys, are a row's scratch.
LIST = tl.constexpr(8192)
# Columns of a sample: half of that, all of it from so many columns on.
LONG = tl.constexpr(1 << 18)


@triton.jit
def _keys(raw, c, span, BITS: tl.constexpr):
  """Keys of columns c, of BITS bits; the least int32 of what is no column.

  All zeros are one number, and all NaN one that is above all others.
  """
  v = raw.to(tl.float32)
  v = tl.where(v == 0.0, 0.0, tl.where(v != v, float("nan"), v))
  key = order_key(v) >> (32 - BITS)
  return tl.where((c >= span[0]) & (c < span[1]), key, DEAD)


@triton.jit
def _load(logits, listed, row, i, span, cols, flags, BITS: tl.constexpr,
          LISTED: tl.constexpr):
  """Columns and keys number i, of the list's or of the row's."""
  if LISTED:
    inside = i < span[1]
    c = tl.load(listed + i, inside, 0)
    key = tl.load(listed + (LIST + i), inside, DEAD)
  else:
    c = i
    key = _keys(load_raw(logits, row, c, cols, cols, flags), c, span, BITS)
  return c, key


@triton.jit
def _count(key, limit, shift, numbers):
  """Adds which keys reach the limit and 1, 2, 3 steps of 2^shift more."""
  one = tl.full([], 1, tl.int32) << shift
  return (numbers[0] + (key >= limit + one).to(tl.int32),
          numbers[1] + (key >= limit + 2 * one).to(tl.int32),
          numbers[2] + (key >= limit + 3 * one).to(tl.int32))


@triton.jit
def _next(limit, shift, numbers, k):
  """The limit with its next two bits: the largest that k keys reach."""
  both = tl.sum(numbers[0].to(tl.int64) + (numbers[1].to(tl.int64) << 32), 0)
  step = ((both.to(tl.int32) >= k).to(tl.int32)
          + ((both >> 32).to(tl.int32) >= k).to(tl.int32)
          + (tl.sum(numbers[2], 0) >= k).to(tl.int32))
  return limit + (step << shift)


@triton.jit
def _kth(logits, listed, row, span, k, cols, flags, TILE: tl.constexpr,
         BITS: tl.constexpr, LAST: tl.constexpr, LISTED: tl.constexpr):
  """The k-th largest key, but for its bits below LAST."""
  i = tl.arange(0, TILE)
  none = tl.zeros([TILE], tl.int32)
  limit = tl.full([], -(1 << (BITS - 1)), tl.int32)
  shift = BITS - 2
  while shift >= LAST:
    numbers = (none, none, none)
    for i0 in range(span[0] // TILE * TILE, span[1], TILE):
      _, key = _load(logits, listed, row, i0 + i, span, cols, flags, BITS,
                     LISTED)
      numbers = _count(key, limit, shift, numbers)
    limit = _next(limit, shift, numbers, k)
    shift -= 2
  return limit


@triton.jit
def _choose(logits, listed, tokens, row, span, k, cols, flags,
            TILE: tl.constexpr, BITS: tl.constexpr, LISTED: tl.constexpr):
  """Writes the columns of the k largest keys; returns how many there are."""
  begin = span[0] // TILE * TILE
  i = tl.arange(0, TILE)
  limit = _kth(logits, listed, row, span, k, cols, flags, TILE, BITS, 0, LISTED)
  over = tl.zeros([TILE], tl.int32)
  for i0 in range(begin, span[1], TILE):
    _, key = _load(logits, listed, row, i0 + i, span, cols, flags, BITS, LISTED)
    over += (key > limit).to(tl.int32)
  # The first columns of those that are the limit.
  ties = k - tl.sum(over, 0)
  kept = 0
  for i0 in range(begin, span[1], TILE):
    c, key = _load(logits, listed, row, i0 + i, span, cols, flags, BITS, LISTED)
    # Columns so far: of larger keys in the high half, ties in the low one.
    tie = (key == limit) & (key != DEAD)
    both = ((key > limit).to(tl.int32) << 16) + tie.to(tl.int32)
    upto = tl.cumsum(both, 0)
    taken = tl.minimum(upto & 0xFFFF, ties)
    keep = (key > limit) | (tie & ((upto & 0xFFFF) <= ties))
    tl.store(tokens + row * k + (kept + (upto >> 16) + taken - 1), c, keep)
    total = tl.sum(both, 0)
    taken_here = tl.minimum(total & 0xFFFF, ties)
    kept += (total >> 16) + taken_here
    ties -= taken_here
  return kept


@triton.jit
def sampling_select(logits, spans, candidates, tokens, rows, cols, k, flags,
                    TILE: tl.constexpr, BITS: tl.constexpr):
  """tokens: int32 [rows, k]: columns in their order, -1 behind them.

  spans: int32 [rows, 2]: a row's first column, and the one behind its last.
  candidates: int32 [rows, 2 * LIST], scratch. Of equal numbers the first
  columns are taken. BITS: how many of a number are not 0 in float32.
  """
  row = tl.program_id(0).to(tl.int64)
  first = tl.maximum(tl.load(spans + row * 2), 0)
  behind = tl.minimum(tl.load(spans + row * 2 + 1), cols)
  span = (first, behind)
  size = tl.maximum(behind - first, 0)
  listed = candidates + row * (2 * LIST)
  i = tl.arange(0, TILE)

  bound = tl.full([], -(1 << (BITS - 1)), tl.int32)
  may = size <= LIST
  if may == 0:
    # In the sample are as many of the k largest as are expected, but for four
    # and a half standard deviations.
    sample = tl.where(size < LONG, LIST // 2, LIST)
    share = k.to(tl.float32) * sample.to(tl.float32) / size.to(tl.float32)
    rank = (share + 4.5 * tl.sqrt(share) + 4.0).to(tl.int32)
    # A list that is likely to hold them.
    may = rank.to(tl.int64) * size <= (sample * (LIST * 4 // 5)).to(tl.int64)
    if may:
      # Eight that lie side by side are one access to memory.
      for i0 in range(0, sample, TILE):
        j = i0 + i
        c = first // 8 * 8 + (j // 8) * (size // sample * 8) + j % 8
        key = _keys(load_raw(logits, row, c, cols, cols, flags), c, span, BITS)
        tl.store(listed + (LIST + j), key)
      tl.debug_barrier()
      bound = _kth(logits, listed, row, (0, sample), rank, cols, flags, TILE,
                   BITS, BITS - 16, True)
  found = 0
  if may:
    begin = first // TILE * TILE
    least = from_order_key(bound << (32 - BITS))
    raw = load_raw(logits, row, begin + i, cols, cols, flags)
    for c0 in range(begin, behind, TILE):
      c = c0 + i
      # No number is below NaN, which is the bound if there is none.
      near = ((raw.to(tl.float32) < least) == 0) & (c >= first) & (c < behind)
      # A tile is on its way while the one before it is listed.
      raw = load_raw(logits, row, c + TILE, cols, cols, flags)
      number = near.to(tl.int32)
      place = found + tl.cumsum(number, 0) - 1
      tl.store(listed + place, c, near & (place < LIST))
      found += tl.sum(number, 0)
    may = (found <= LIST) & (found >= tl.minimum(k, size))
  if may:
    tl.debug_barrier()
    for i0 in range(0, found, TILE):
      c = tl.load(listed + i0 + i, i0 + i < found, 0)
      key = _keys(load_raw(logits, row, c, cols, cols, flags), c, span, BITS)
      tl.store(listed + (LIST + i0) + i, key, i0 + i < found)
    tl.debug_barrier()
    kept = _choose(logits, listed, tokens, row, (0, found), k, cols, flags,
                   TILE, BITS, True)
  else:
    kept = _choose(logits, listed, tokens, row, span, k, cols, flags, TILE,
                   BITS, False)
  for i0 in range(kept, k, TILE):
    tl.store(tokens + row * k + i0 + i, tl.full([TILE], -1, tl.int32),
             i0 + i < k)
