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
PROBS = rows.PROBS
GIVEN = rows.GIVEN
RANKED = rows.RANKED
GREEDY = rows.GREEDY
MAX_PARTS = rows.MAX_PARTS
DEAD = rows.DEAD
LAST = rows.LAST
NOTHING = rows.NOTHING
CANDIDATES = threshold.CANDIDATES
STATE = threshold.STATE
LIMIT = threshold.LIMIT
FOUND = threshold.FOUND
load_raw = rows.load_raw
allowed = rows.allowed
keys_of = rows.keys_of
load_keys = rows.load_keys
lowest = rows.lowest
composite = rows.composite
largest_of = rows.largest_of
largest_of_groups = rows.largest_of_groups
weights = rows.weights
load_temperature = rows.load_temperature
order_key = exact.order_key
from_order_key = exact.from_order_key
exponential = exact.exponential


@triton.jit
def sampling_largest(logits, mask, best, maxima, state, rows, cols, parts,
                     per_part, flags, MAXIMA: tl.constexpr,
                     WIDTH: tl.constexpr):
  """The largest composite of each part, and those of MAXIMA groups of it.

  best: int64 [rows, 2, parts], of which this is the first plane. maxima: int64
  [rows, parts, MAXIMA], if more than the largest column is asked for. state:
  int64 [rows, STATE], whose list of candidates becomes empty, if there is one.
  """
  TILE: tl.constexpr = MAXIMA * WIDTH
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  begin = part * per_part
  end = tl.minimum(cols, begin + per_part)
  least = lowest(flags)
  # A group is the columns of a lane. Which of them it is that is the largest is
  # found at the end: until then it is enough in which tile.
  most = tl.full([MAXIMA], DEAD, tl.int32)
  tile = tl.zeros([MAXIMA], tl.int32) + begin
  i = tl.arange(0, TILE)
  # A tile is on its way while the one before it is compared.
  raw = load_raw(logits, row, begin + i, end, cols, flags)
  for c0 in range(begin, end, TILE):
    c = c0 + i
    read = raw
    raw = load_raw(logits, row, c + TILE, end, cols, flags)
    if flags & RANKED:
      _, keys = keys_of(read, mask, row, c, end, cols, flags)
      key = tl.max(tl.reshape(keys, [MAXIMA, WIDTH]), 1)
    else:
      v = allowed(read, mask, row, c, end, cols, flags)
      m = tl.max(tl.reshape(v, [MAXIMA, WIDTH]), 1)
      key = tl.where(m > least, order_key(tl.where(m == 0.0, 0.0, m)), DEAD)
    tile = tl.where(key > most, c0, tile)
    most = tl.maximum(most, key)
  group = tl.arange(0, MAXIMA)
  c = (tile + group * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
  _, key = load_keys(logits, mask, row, c, end, cols, flags)
  first = tl.min(tl.where(key == most[:, None], c, LAST), 1)
  found = tl.where(most == DEAD, NOTHING, composite(most, first))
  tl.store(best + row * 2 * parts + part, tl.max(found, 0))
  if (flags & GREEDY) == 0:
    tl.store(maxima + (row * parts + part) * MAXIMA + group, found)
  if flags & (TOP_K | TOP_P):
    tl.store(state + row * STATE + FOUND, tl.zeros([], tl.int64), part == 0)


@triton.jit
def _philox(k0, k1, a, b, c):
  """Philox4x32-10 of the counters (a, b, c, 0), a of any shape."""
  b, c, d = b.broadcast_to(a.shape), c.broadcast_to(a.shape), tl.zeros_like(a)
  for _ in tl.static_range(10):
    # Both words of a product at once.
    p = a.to(tl.uint64) * tl.full([], 0xD2511F53, tl.uint64)
    q = c.to(tl.uint64) * tl.full([], 0xCD9E8D57, tl.uint64)
    a = (q >> 32).to(tl.uint32) ^ b ^ k0
    b = q.to(tl.uint32)
    c = (p >> 32).to(tl.uint32) ^ d ^ k1
    d = p.to(tl.uint32)
    k0 += tl.full([], 0x9E3779B9, tl.uint32)
    k1 += tl.full([], 0xBB67AE85, tl.uint32)
  return a, b, c, d


@triton.jit
def _words(k0, k1, counter, stream, block, N: tl.constexpr):
  """Random words of columns 4 * block to 4 * block + N - 1, in order."""
  w0, w1, w2, w3 = _philox(
      k0, k1, (block + tl.arange(0, N // 4)).to(tl.uint32), counter, stream)
  return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [N])


@triton.jit
def _word_of(k0, k1, counter, stream, c):
  """The random word of each of any columns."""
  w0, w1, w2, w3 = _philox(k0, k1, (c >> 2).to(tl.uint32), counter, stream)
  return tl.where((c & 2) == 0, tl.where((c & 1) == 0, w0, w1),
                  tl.where((c & 1) == 0, w2, w3))


@triton.jit
def _winner(v, c, e, kept, top, temperature, least, cold, flags):
  """The largest composite of a score, weight / e, of columns that are kept."""
  weight, _ = weights(v, top, temperature, flags)
  kept &= weight >= least
  score = tl.div_rn(weight, e)
  # What is no number has lost; of the largest ones the first wins.
  score = tl.where(score > 0.0, score, 0.0)
  score = tl.where(cold, 1.0, score)
  return tl.max(tl.where(kept, composite(order_key(score), c), NOTHING), 0)


@triton.jit
def _of_largest(k0, k1, counter, stream, exponentials, maxima, row, cols, parts,
                limit, top, temperature, least, cold, flags,
                MAXIMA: tl.constexpr):
  """The winner of the largest columns of groups."""
  some = largest_of_groups(maxima, row, parts, MAXIMA, 1)
  key = (some >> 32).to(tl.int32)
  kept = (key >= limit) & (key != DEAD)
  c = tl.where(kept, ((some & LAST) ^ LAST).to(tl.int32), 0)
  if flags & GIVEN:
    e = tl.load(exponentials + row * cols + c, kept, 1.0)
  else:
    e = exponential(_word_of(k0, k1, counter, stream, c))
  return _winner(from_order_key(key), c, e, kept, top, temperature, least, cold,
                 flags)


@triton.jit
def sampling_race(logits, mask, temperature, min_p, keys, exponentials, best,
                  maxima, state, rows, cols, parts, per_part, flags,
                  TILE: tl.constexpr, MAXIMA: tl.constexpr):
  """The winner of each part, in the second plane of `best`.

  keys: uint32 [rows, 4]: Philox's key, the row's counter and its stream.
  exponentials: float32 [rows, cols], if they are given.

  An exponential is at least its word / 2^32, and a weight is known within a
  thousandth without the steps that make it exact. What so cannot reach a score
  that another column has needs no more, and few columns reach that of the best
  of the largest ones.
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

  k0 = tl.full([], 0, tl.uint32)
  k1, counter, stream = k0, k0, k0
  if (flags & GIVEN) == 0:
    at = keys + row * 4
    k0, k1 = tl.load(at), tl.load(at + 1)
    counter, stream = tl.load(at + 2), tl.load(at + 3)
  found = _of_largest(k0, k1, counter, stream, exponentials, maxima, row, cols,
                      parts, limit, top, t, least, cold, flags, MAXIMA)
  from_key = tl.where(limit == DEAD, order_key(lowest(flags)) + 1, limit)
  lowest_kept = from_order_key(from_key)
  unit = 1.0
  if (flags & GIVEN) == 0:
    unit = 4294967296.0
  scale = tl.div_rn(-1.4426950408889634, t)
  if flags & PROBS:
    scale = tl.div_rn(1.0, top)
  for c0 in range(begin, end, TILE):
    c = c0 + tl.arange(0, TILE)
    if flags & GIVEN:
      words = c.to(tl.uint32)
      by = tl.load(exponentials + row * cols + c, c < end, 1.0)
    else:
      words = _words(k0, k1, counter, stream, c0 // 4, TILE)
      by = words.to(tl.float32)
    raw = load_raw(logits, row, c, end, cols, flags)
    v = allowed(raw, mask, row, c, end, cols, flags)
    # Of the score's bits as of no number yet, -0 or infinity nothing follows.
    score = from_order_key((found >> 32).to(tl.int32))
    reach = tl.where((score > 0.0) & (score < 1e38), unit * 1.001 / score,
                     float("inf"))
    if flags & PROBS:
      about = v * scale
    else:
      about = tl.exp2(tl.maximum(tl.minimum(top - v, 3e38) * scale, -92.4))
    # Said by what is not, for where one is no number.
    over = (v >= lowest_kept) & (
        ((about * reach < by) == 0) | (v == float("inf")))
    if tl.max(over.to(tl.int32), 0) > 0:
      exact = by
      if (flags & GIVEN) == 0:
        exact = exponential(words)
      found = tl.maximum(found, _winner(
          v, c, exact, over, top, t, least, cold, flags))
  tl.store(best + (row * 2 + 1) * parts + part, found)


@triton.jit
def sampling_pick(best, tokens, rows, parts, plane):
  """tokens: int32 [rows]: the column of the largest composite; -1: none."""
  row = tl.program_id(0).to(tl.int64)
  found = largest_of(best, row, plane, parts)
  c = ((found & LAST) ^ LAST).to(tl.int32)
  tl.store(tokens + row, tl.where((found >> 32) == DEAD, -1, c))


@triton.jit
def _listed(logits, mask, candidates, row, i, many, cols, flags):
  """Composites of candidates i of a ranked row; NOTHING where there is none."""
  c = threshold.candidate(candidates, row, i, many, cols)
  _, key = load_keys(logits, mask, row, c, cols, cols, flags)
  return tl.where(c < cols, composite(key, c), NOTHING)


@triton.jit
def sampling_rank(logits, mask, candidates, state, values, tokens, rows, cols,
                  k, flags, COLS: tl.constexpr):
  """Sorts what sampling_gather has listed, which the k largest are among.

  values: [rows, k], tokens: int32 [rows, k]: from the largest number down, of
  equal ones from the lowest column up.
  """
  row = tl.program_id(0).to(tl.int64)
  i = tl.arange(0, COLS)
  many = tl.load(state + row * STATE + FOUND).to(tl.int32)
  end = tl.where(many <= CANDIDATES, many, cols)
  ranked = tl.full([COLS], NOTHING, tl.int64)
  # The first k stay; in the places after them come others.
  kept = 0
  first = 0
  while first < end:
    more = _listed(logits, mask, candidates, row, first + i - kept, many, cols,
                   flags)
    last = tl.max(tl.where(i == k - 1, ranked, NOTHING), 0)
    more = tl.where(i < kept, NOTHING, more)
    if tl.max(more, 0) > last:
      ranked = tl.sort(tl.where(i < kept, ranked, more), descending=True)
    first += COLS - kept
    kept = k
  v = from_order_key((ranked >> 32).to(tl.int32))
  tl.store(values + row * k + i, v.to(values.dtype.element_ty), i < k)
  tl.store(tokens + row * k + i, ((ranked & LAST) ^ LAST).to(tl.int32), i < k)
