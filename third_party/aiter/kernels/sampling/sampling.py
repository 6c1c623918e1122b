# SPDX-License-Identifier: Apache-2.0
"""The largest column of a row, a race of all that are kept, the k largest.

A race (the "exponential trick" or "Gumbel max") draws column c with a
probability in proportion to its weight: the winner is the largest of
weight / exponential, with an exponentially distributed number each. These come
of Philox4x32-10: counter (c // 4, row's counter, row's stream, 0), word c % 4.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.sampling import exact, rows, threshold

TOP_K = rows.TOP_K
TOP_P = rows.TOP_P
MIN_P = rows.MIN_P
GIVEN = rows.GIVEN
RANKED = rows.RANKED
SPAN = rows.SPAN
DEAD = rows.DEAD
LAST = rows.LAST
NOTHING = rows.NOTHING
MAX_PARTS = rows.MAX_PARTS
BINS = threshold.BINS
CANDIDATES = threshold.CANDIDATES
STATE = threshold.STATE
LIMIT = threshold.LIMIT
FOUND = threshold.FOUND
load_keys = rows.load_keys
composite = rows.composite
largest_of = rows.largest_of
weights = rows.weights
load_temperature = rows.load_temperature
append = threshold.append
order_key = exact.order_key
from_order_key = exact.from_order_key
exponential = exact.exponential


@triton.jit
def sampling_largest(logits, mask, best, histogram, rows, cols, parts, per_part,
                     flags, TILE: tl.constexpr):
  """The largest composite of each part; of ranked rows, of finite numbers.

  best: int64 [rows, 2, parts], of which this is the first plane. histogram:
  int64 [rows, parts, BINS], becomes zeros if there are limits.
  """
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  begin = part * per_part
  end = tl.minimum(cols, begin + per_part)
  found = tl.full([TILE], NOTHING, tl.int64)
  for c0 in range(begin, end, TILE):
    c = c0 + tl.arange(0, TILE)
    v, key = load_keys(logits, mask, row, c, end, cols, flags)
    if flags & (RANKED | SPAN):
      key = tl.where(tl.abs(v) < float("inf"), key, DEAD)
    found = tl.maximum(found, composite(key, c))
  tl.store(best + row * 2 * parts + part, tl.max(found, 0))
  if flags & (TOP_K | TOP_P):
    at = histogram + (row * parts + part) * BINS
    tl.store(at + tl.arange(0, BINS), tl.zeros([BINS], tl.int64))


@triton.jit
def _words(keys, row, block, N: tl.constexpr):
  """Random words of columns 4 * block to 4 * block + N - 1, in order."""
  k0, k1, counter, stream = (
      tl.load(keys + row * 4), tl.load(keys + row * 4 + 1),
      tl.load(keys + row * 4 + 2), tl.load(keys + row * 4 + 3))
  zero = tl.zeros([N // 4], tl.uint32)
  w0, w1, w2, w3 = tl.philox_impl(
      (block + tl.arange(0, N // 4)).to(tl.uint32), zero + counter,
      zero + stream, zero, k0, k1)
  return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [N])


@triton.jit
def sampling_race(logits, mask, temperature, min_p, keys, exponentials, best,
                  state, rows, cols, parts, per_part, flags,
                  TILE: tl.constexpr):
  """The winner of each part, in the second plane of `best`.

  keys: uint32 [rows, 4]: Philox's key, the row's counter and its stream.
  exponentials: float32 [rows, cols], if they are given.
  """
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  begin = part * per_part
  end = tl.minimum(cols, begin + per_part)
  t, cold = load_temperature(temperature, row, flags)
  least = tl.full([], 0.0, tl.float32)
  if flags & MIN_P:
    least = tl.load(min_p + row)
  top_key = (largest_of(best, row, 0, parts) >> 32).to(tl.int32)
  top = from_order_key(top_key)
  limit = tl.full([], DEAD, tl.int32)
  if flags & (TOP_K | TOP_P):
    limit = (tl.load(state + row * STATE + LIMIT) >> 32).to(tl.int32)
  limit = tl.where(cold, top_key, limit)
  found = tl.full([TILE], NOTHING, tl.int64)
  for c0 in range(begin, end, TILE):
    c = c0 + tl.arange(0, TILE)
    v, key = load_keys(logits, mask, row, c, end, cols, flags)
    kept = (key >= limit) & (key != DEAD)
    if tl.max(kept.to(tl.int32), 0) > 0:
      weight, _ = weights(v, top, t, flags)
      kept &= weight >= least
      if flags & GIVEN:
        e = tl.load(exponentials + row * cols + c, c < end, 1.0)
      else:
        e = exponential(_words(keys, row, c0 // 4, TILE))
      score = tl.div_rn(weight, e)
      # What is no number has lost; of the largest ones the first wins.
      score = tl.where(score > 0.0, score, 0.0)
      score = tl.where(cold, 1.0, score)
      found = tl.where(
          kept, tl.maximum(found, composite(order_key(score), c)), found)
  tl.store(best + (row * 2 + 1) * parts + part, tl.max(found, 0))


@triton.jit
def sampling_pick(best, tokens, rows, parts, plane):
  """tokens: int32 [rows]: the column of the largest composite; -1: none."""
  row = tl.program_id(0).to(tl.int64)
  found = largest_of(best, row, plane, parts)
  c = ((found & LAST) ^ LAST).to(tl.int32)
  tl.store(tokens + row, tl.where((found >> 32) == DEAD, -1, c))


@triton.jit
def sampling_take(logits, mask, candidates, state, rows, cols, parts, per_part,
                  flags, TILE: tl.constexpr):
  """Lists the columns that a ranked row keeps, in no order."""
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  at = state + row * STATE
  limit = tl.load(at + LIMIT)
  begin = part * per_part
  end = tl.minimum(cols, begin + per_part)
  for c0 in range(begin, end, TILE):
    c = c0 + tl.arange(0, TILE)
    _, key = load_keys(logits, mask, row, c, end, cols, flags)
    append(at + FOUND, candidates + row * CANDIDATES, c,
           (composite(key, c) >= limit) & (c < end), CANDIDATES)


@triton.jit
def sampling_rank(logits, mask, candidates, values, tokens, rows, cols, k,
                  flags, COLS: tl.constexpr):
  """Sorts what sampling_take has listed.

  values: [rows, k], tokens: int32 [rows, k]: from the largest number down, of
  equal ones from the lowest column up.
  """
  row = tl.program_id(0).to(tl.int64)
  i = tl.arange(0, COLS)
  c = tl.load(candidates + row * CANDIDATES + i, i < k, 0)
  _, key = load_keys(logits, mask, row, c, cols, cols, flags)
  ranked = tl.sort(tl.where(i < k, composite(key, c), NOTHING), descending=True)
  v = from_order_key((ranked >> 32).to(tl.int32))
  tl.store(values + row * k + i, v.to(values.dtype.element_ty), i < k)
  tl.store(tokens + row * k + i, ((ranked & LAST) ^ LAST).to(tl.int32), i < k)


@triton.jit
def sampling_count(logits, mask, best, state, rows, cols, parts, per_part,
                   flags, TILE: tl.constexpr):
  """How many columns of a span each part keeps, in the second plane of best."""
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  limit = tl.load(state + row * STATE + LIMIT)
  begin = part * per_part
  end = tl.minimum(cols, begin + per_part)
  count = tl.zeros([TILE], tl.int64)
  for c0 in range(begin, end, TILE):
    c = c0 + tl.arange(0, TILE)
    _, key = load_keys(logits, mask, row, c, end, cols, flags)
    kept = (composite(key, c) >= limit) & (key != DEAD) & (c < end)
    count += kept.to(tl.int64)
  tl.store(best + (row * 2 + 1) * parts + part, tl.sum(count, 0))


@triton.jit
def sampling_list(logits, mask, best, state, tokens, rows, cols, parts,
                  per_part, k, flags, TILE: tl.constexpr):
  """Lists them in their order; -1 behind them.

  tokens: int32 [rows, k].
  """
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  limit = tl.load(state + row * STATE + LIMIT)
  p = tl.arange(0, MAX_PARTS)
  counts = tl.load(best + (row * 2 + 1) * parts + p, p < parts, 0).to(tl.int32)
  place = tl.sum(tl.where(p < part, counts, 0), 0)
  begin = part * per_part
  end = tl.minimum(cols, begin + per_part)
  for c0 in range(begin, end, TILE):
    c = c0 + tl.arange(0, TILE)
    _, key = load_keys(logits, mask, row, c, end, cols, flags)
    kept = (composite(key, c) >= limit) & (key != DEAD) & (c < end)
    number = kept.to(tl.int32)
    many = tl.sum(number, 0)
    if many > 0:
      at = place + tl.cumsum(number, 0) - 1
      tl.store(tokens + row * k + at, c, kept & (at < k))
    place += many
  for i0 in range(tl.sum(counts, 0) + part * TILE, k, parts * TILE):
    i = i0 + tl.arange(0, TILE)
    tl.store(tokens + row * k + i, tl.full([TILE], -1, tl.int32), i < k)
