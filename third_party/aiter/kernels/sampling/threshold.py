# SPDX-License-Identifier: Apache-2.0
"""The key from which on a row's columns are kept, exactly.

It is the largest one that at least k columns reach, or (joint order) columns of
a weight of at least top_p of all; with `k_first` the second counts of what the
first has left, in a second phase of the last three kernels. Of a ranked row
there are no equal ones: the lower column is the larger.

The k-th largest of the maxima of groups of columns is not above the k-th
largest column, and hardly below it: the columns from there on are few, are
listed, and most often the limit is found among them, by their keys, two bits at
a time. Where it may be further down, of a large share or a large k, a radix
select comes first, whose first digit is a bin: of each part a histogram of
numbers and weights, the bin in which the limit is reached, and its columns,
which are listed then. Of weights it is known beforehand in which part of the
bins that is, from sums in float32: others need not be counted by bin.

Everything that decides is a sum of integers, so no order of additions shows.
Few columns share a bin, for bins are as fine as their distance from the row's
largest asks; if more than CANDIDATES do, or are listed, the last step reads the
whole row instead of a list of them.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.sampling import rows

TOP_K = rows.TOP_K
TOP_P = rows.TOP_P
K_FIRST = rows.K_FIRST
RANKED = rows.RANKED
MAX_PARTS = rows.MAX_PARTS
DEAD = rows.DEAD
NOTHING = rows.NOTHING
load_keys = rows.load_keys
PROBS = rows.PROBS
load_raw = rows.load_raw
keys_of = rows.keys_of
largest_of_groups = rows.largest_of_groups
composite = rows.composite
largest_of = rows.largest_of
from_order_key = rows.from_order_key
bin_of = rows.bin_of
weights = rows.weights
load_temperature = rows.load_temperature

BINS = tl.constexpr(2048)
CANDIDATES = tl.constexpr(16384)
# A bin of a histogram: weight below, number from this bit on. A part has at
# most 2^15 columns, of at most 2^31 units each.
NUMBER = tl.constexpr(47)
ONE_COLUMN = tl.constexpr(1 << 47)
WEIGHT = tl.constexpr((1 << 47) - 1)
NO_LIMIT = tl.constexpr(1 << 62)
# A k up to which the list holds the limit, and how many columns are listed of a
# row that has none.
MANY = tl.constexpr(1024)
FEW = tl.constexpr(512)
# Fields of a row's state; src/sampling.cc knows how many.
STATE = tl.constexpr(16)
BIN = tl.constexpr(0)  # That of the limit, -1 if all are kept, or LISTED.
NUMBER_ABOVE = tl.constexpr(1)  # Columns in bins before it, and their weight.
WEIGHT_ABOVE = tl.constexpr(2)
NUMBER_LIMIT = tl.constexpr(3)  # Those of a phase.
WEIGHT_LIMIT = tl.constexpr(4)
LIMIT = tl.constexpr(5)  # The composite from which on columns are kept.
KEPT = tl.constexpr(6)  # Their weight.
FOUND = tl.constexpr(7)  # How many columns sampling_gather lists.
BOUND = tl.constexpr(8)  # The composite from which on columns are listed.
WANTED = tl.constexpr(11)  # top_k, or NO_LIMIT.
COLLECTED = tl.constexpr(10)  # How many sampling_collect does, in their place.
SHARE = tl.constexpr(9)  # top_p in units of 2^-24, or -1 if it limits nothing.
LISTED = tl.constexpr(2048)  # The limit is reached in the list.
NO_COLUMN = tl.constexpr((1 << 63) - 1)  # A composite above all.
# Sums of a part: of weights, of those that are listed, of numbers and weights
# in bins before those that are counted, and of weights before EDGES bins.
SUMS = tl.constexpr(16)
TOTAL = tl.constexpr(0)
TOTAL_LISTED = tl.constexpr(1)
BEFORE = tl.constexpr(2)
EDGE = tl.constexpr(8)


@triton.jit
def _top(best, row, parts):
  """The largest number of a row, in float32; 0 if there is none."""
  key = (largest_of(best, row, 0, parts) >> 32).to(tl.int32)
  return tl.where(key == DEAD, 0.0, from_order_key(key))


@triton.jit
def sampling_bound(temperature, top_k, top_p, maxima, state, rows, cols, parts,
                   k, flags, MAXIMA: tl.constexpr, STEP: tl.constexpr,
                   BITS: tl.constexpr):
  """Finds a composite that at least as many columns reach as are wanted.

  k: of a ranked row, in the place of top_k.
  """
  row = tl.program_id(0).to(tl.int64)
  at = state + row * STATE
  _, cold = load_temperature(temperature, row, flags)
  number_limit = tl.full([], NO_LIMIT, tl.int64)
  share = tl.full([], -1, tl.int64)
  if flags & TOP_K:
    if (flags & RANKED) == 0:
      k = tl.load(top_k + row)
    number_limit = tl.where((k > 0) & (k < cols), k.to(tl.int64), number_limit)
  if flags & RANKED:
    number_limit = k.to(tl.int64)
  if flags & TOP_P:
    p = tl.load(top_p + row)
    share = tl.where(
        p < 1.0, (tl.maximum(p, 0.0) * 16777216.0).to(tl.int64), share)
  # What takes the largest column has no limits.
  number_limit = tl.where(cold, NO_LIMIT, number_limit)
  share = tl.where(cold, -1, share)
  wanted = tl.where(share >= 0, FEW, 0).to(tl.int32)
  wanted = tl.where(number_limit <= MANY, number_limit.to(tl.int32), wanted)
  bound = tl.full([], NO_COLUMN, tl.int64)
  if wanted > 0:
    found = largest_of_groups(maxima, row, parts, MAXIMA, STEP)
    bound = tl.full([], NOTHING, tl.int64)
    many = wanted + cols
    last = 64 - BITS
    if flags & RANKED:
      last = 0
    shift = 62
    # An eighth more does no harm.
    while (shift >= last) & (many > wanted + wanted // 8):
      one = tl.full([], 1, tl.int64) << shift
      # Three numbers of up to 2^15 in a sum.
      numbers = tl.sum(
          (found >= bound + one).to(tl.int64)
          + ((found >= bound + 2 * one).to(tl.int64) << 20)
          + ((found >= bound + 3 * one).to(tl.int64) << 40), 0)
      step = tl.zeros([], tl.int64)
      for digit in tl.static_range(0, 3):
        number = ((numbers >> (20 * digit)) & 0xFFFFF).to(tl.int32)
        many = tl.where(number >= wanted, number, many)
        step = tl.where(number >= wanted, digit + 1, step)
      bound += step * one
      # Bits 31 to 21 are 0 in every composite.
      shift = tl.where(shift == 32, 20, shift - 2)
  tl.store(at + BOUND, bound)
  tl.store(at + WANTED, number_limit)
  tl.store(at + SHARE, share)


@triton.jit
def _weight_limit(share, of):
  """The least weight that counts as a share of a total."""
  limit = (of >> 24) * share + (((of & 0xFFFFFF) * share) >> 24)
  return tl.where(share >= 0, tl.maximum(limit, 1), NO_LIMIT)


@triton.jit
def _edge(i: tl.constexpr, t, flags):
  """A bin; in the ones before it are weights above e^-(2 i + 2), about."""
  if flags & PROBS:
    edge = tl.full([], 0, tl.int32) + (2 * i + 2) * 185
  else:
    far = t * (2.0 * i + 2.0)
    edge = (far.to(tl.int32, bitcast=True) >> 16) - 15360
  return tl.minimum(tl.maximum(edge, 0), BINS)


@triton.jit
def sampling_gather(logits, mask, maxima, candidates, state, rows, cols, parts,
                    per_part, flags, MAXIMA: tl.constexpr, WIDTH: tl.constexpr,
                    TILES: tl.constexpr):
  """Lists the columns from the bound on.

  Only groups whose largest is of them are read, TILES of their pieces at once.
  candidates: int32 [rows, CANDIDATES], in no order; what does not fit is only
  counted.
  """
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  begin = part * per_part
  end = tl.minimum(cols, begin + per_part)
  at = state + row * STATE
  bound = tl.load(at + BOUND)
  group = tl.arange(0, MAXIMA)
  most = tl.load(maxima + (row * parts + part) * MAXIMA + group)
  end_of_group = tl.where(most >= bound, end, 0)[:, None]
  j = tl.arange(0, TILES * WIDTH)
  first = (group * WIDTH)[:, None] + (
      j // WIDTH * (MAXIMA * WIDTH) + j % WIDTH)[None, :]
  if bound != NO_COLUMN:
    for c0 in range(begin, end, MAXIMA * WIDTH * TILES):
      c = c0 + first
      _, key = load_keys(logits, mask, row, c, end_of_group, cols, flags)
      near = (c < end_of_group) & (composite(key, c) >= bound)
      if (flags & RANKED) == 0:
        near &= key != DEAD
      append(at + FOUND, candidates + row * CANDIDATES, c, near, CANDIDATES)


@triton.jit
def sampling_weigh(logits, mask, temperature, best, histogram, sums, state,
                   rows, cols, parts, per_part, flags, TILE: tl.constexpr,
                   MAXIMA: tl.constexpr):
  """Adds weights up, and makes room for a histogram.

  sums: int64 [rows, parts, SUMS]. histogram: int64 [rows, parts, BINS] becomes
  zeros, if the list may not do.
  """
  WIDTH: tl.constexpr = TILE // MAXIMA
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  begin = part * per_part
  end = tl.minimum(cols, begin + per_part)
  at = state + row * STATE
  of_part = row * parts + part
  share = tl.load(at + SHARE)
  number_limit = tl.load(at + WANTED)
  unsure = number_limit > MANY
  if share >= 0:
    t, _ = load_temperature(temperature, row, flags)
    top = _top(best, row, parts)
    bound_key = (tl.load(at + BOUND) >> 32).to(tl.int32)
    total = tl.zeros([MAXIMA], tl.int64)
    listed = tl.zeros([MAXIMA], tl.int64)
    edge_0 = tl.zeros([MAXIMA], tl.float32)
    edge_1, edge_2, edge_3, edge_4, edge_5 = (
        edge_0, edge_0, edge_0, edge_0, edge_0)
    i = tl.arange(0, TILE)
    raw = load_raw(logits, row, begin + i, end, cols, flags)
    for c0 in range(begin, end, TILE):
      c = c0 + i
      v, key = keys_of(raw, mask, row, c, end, cols, flags)
      raw = load_raw(logits, row, c + TILE, end, cols, flags)
      weight, whole = weights(v, top, t, flags)
      whole = tl.where(key != DEAD, whole, 0)
      total += tl.sum(tl.reshape(whole, [MAXIMA, WIDTH]), 1)
      if unsure:
        near = tl.where(key >= bound_key, whole, 0)
        listed += tl.sum(tl.reshape(near, [MAXIMA, WIDTH]), 1)
        weight = tl.where(key != DEAD, weight, 0.0)
        b = bin_of(v, key, top, flags)
        edge_0 += _before(weight, b, _edge(0, t, flags), MAXIMA)
        edge_1 += _before(weight, b, _edge(1, t, flags), MAXIMA)
        edge_2 += _before(weight, b, _edge(2, t, flags), MAXIMA)
        edge_3 += _before(weight, b, _edge(3, t, flags), MAXIMA)
        edge_4 += _before(weight, b, _edge(4, t, flags), MAXIMA)
        edge_5 += _before(weight, b, _edge(5, t, flags), MAXIMA)
    to = sums + of_part * SUMS
    tl.store(to + TOTAL, tl.sum(total, 0))
    tl.store(to + TOTAL_LISTED, tl.sum(listed, 0))
    tl.store(to + EDGE, _sum_of(edge_0))
    tl.store(to + EDGE + 1, _sum_of(edge_1))
    tl.store(to + EDGE + 2, _sum_of(edge_2))
    tl.store(to + EDGE + 3, _sum_of(edge_3))
    tl.store(to + EDGE + 4, _sum_of(edge_4))
    tl.store(to + EDGE + 5, _sum_of(edge_5))
  if unsure and (share >= 0 or number_limit < NO_LIMIT):
    tl.store(histogram + of_part * BINS + tl.arange(0, BINS),
             tl.zeros([BINS], tl.int64))


@triton.jit
def _before(weight, b, edge, MAXIMA: tl.constexpr):
  """The sum of the weights in bins before an edge, of each lane."""
  WIDTH: tl.constexpr = weight.shape[0] // MAXIMA
  return tl.sum(tl.reshape(tl.where(b < edge, weight, 0.0), [MAXIMA, WIDTH]), 1)


@triton.jit
def _sum_of(weight):
  """A sum of weights in units of 2^-31."""
  return (tl.sum(weight, 0) * 2147483648.0).to(tl.int64)


@triton.jit
def _sum_of_parts(sums, row, parts, i: tl.constexpr):
  p = tl.arange(0, MAX_PARTS)
  at = sums + (row * parts + p) * SUMS + i
  return tl.sum(tl.load(at, p < parts, 0), 0)


@triton.jit
def _plan(sums, state, row, parts, temperature, flags):
  """What there is to count of a row.

  Returns:
    The weight of all columns, if there is a limit of it, and the bins that are
    to be counted: first, and beyond the last; 0 if the list has the limit.
  """
  at = state + row * STATE
  number_limit = tl.load(at + WANTED)
  share = tl.load(at + SHARE)
  listed = number_limit <= MANY
  total = tl.full([], 0, tl.int64)
  first = tl.full([], 0, tl.int32)
  beyond = tl.full([], BINS, tl.int32)
  if share >= 0:
    total = _sum_of_parts(sums, row, parts, TOTAL)
    limit = _weight_limit(share, total)
    if listed == 0:
      if (flags & K_FIRST) == 0 or number_limit == NO_LIMIT:
        listed = (tl.load(at + FOUND) <= CANDIDATES) & (
            _sum_of_parts(sums, row, parts, TOTAL_LISTED) >= limit)
      if number_limit == NO_LIMIT:
        for i in tl.static_range(0, 6):
          # Sums of float32: a thousandth is more than they are off by.
          before = _sum_of_parts(sums, row, parts, EDGE + i)
          off = before >> 10
          edge = _edge(i, temperature, flags)
          first = tl.where(before + off < limit, tl.maximum(first, edge), first)
          beyond = tl.where(
              before - off >= limit, tl.minimum(beyond, edge), beyond)
  none = (number_limit == NO_LIMIT) & (share < 0)
  beyond = tl.where(listed | none, 0, beyond)
  return total, first, beyond


@triton.jit
def sampling_histogram(logits, mask, temperature, best, histogram, sums, state,
                       rows, cols, parts, per_part, flags, TILE: tl.constexpr,
                       MAXIMA: tl.constexpr, RETURNS: tl.constexpr):
  """Adds a part's columns up by bins, those that may have the limit.

  histogram: int64 [rows, parts, BINS], zeros. RETURNS: the largest sum that an
  addition met is left in the second plane of `best`, where nobody reads it. For
  additions of which nothing is used Triton first adds up what lanes of a wave
  have for one address, on CDNA3 and CDNA4, which takes most of the time where
  hardly two lanes have the same.
  """
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  t, _ = load_temperature(temperature, row, flags)
  _, first, beyond = _plan(sums, state, row, parts, t, flags)
  if beyond > 0:
    top = _top(best, row, parts)
    begin = part * per_part
    end = tl.minimum(cols, begin + per_part)
    of_part = row * parts + part
    bins = histogram + of_part * BINS
    met = tl.zeros([TILE], tl.int64)
    before = tl.zeros([MAXIMA], tl.int64)
    i = tl.arange(0, TILE)
    raw = load_raw(logits, row, begin + i, end, cols, flags)
    for c0 in range(begin, end, TILE):
      c = c0 + i
      v, key = keys_of(raw, mask, row, c, end, cols, flags)
      raw = load_raw(logits, row, c + TILE, end, cols, flags)
      b = bin_of(v, key, top, flags)
      live = (key != DEAD) & (b < beyond)
      entry = tl.full([TILE], ONE_COLUMN, tl.int64)
      if flags & TOP_P:
        entry += weights(v, top, t, flags)[1]
      before += tl.sum(tl.reshape(
          tl.where(live & (b < first), entry, 0), [MAXIMA, TILE // MAXIMA]), 1)
      was = tl.atomic_add(bins + b, entry, live & (b >= first), sem="relaxed",
                          scope="cta")
      if RETURNS:
        met = tl.maximum(met, tl.where(live & (b >= first), was, 0))
    tl.store(sums + of_part * SUMS + BEFORE, tl.sum(before, 0))
    if RETURNS:
      tl.store(best + (row * 2 + 1) * parts + part, tl.max(met, 0))


@triton.jit
def sampling_bracket(temperature, histogram, sums, state, rows, cols, parts,
                     phase, flags, STEP: tl.constexpr):
  """Finds the bin in which a limit is reached.

  state: int64 [rows, STATE].
  """
  row = tl.program_id(0).to(tl.int64)
  at = state + row * STATE
  t, _ = load_temperature(temperature, row, flags)
  total, _, beyond = _plan(sums, state, row, parts, t, flags)
  number_limit = tl.load(at + WANTED)
  weight_limit = _weight_limit(tl.load(at + SHARE), total)
  if flags & K_FIRST:
    if phase == 0:
      weight_limit = tl.full([], NO_LIMIT, tl.int64)
    else:
      # KEPT is of all if there was no first limit.
      number_limit = tl.full([], NO_LIMIT, tl.int64)
      weight_limit = _weight_limit(tl.load(at + SHARE), tl.load(at + KEPT))
  of = tl.full([], LISTED, tl.int32)
  number_above = tl.full([], 0, tl.int64)
  weight_above = tl.full([], 0, tl.int64)
  if beyond > 0:
    b = tl.arange(0, BINS)
    number = tl.zeros([BINS], tl.int64)
    weight = tl.zeros([BINS], tl.int64)
    for p0 in range(0, parts, STEP):
      p = p0 + tl.arange(0, STEP)[:, None]
      entry = tl.load(histogram + (row * parts + p) * BINS + b[None, :],
                      p < parts, 0)
      number += tl.sum(entry >> NUMBER, 0)
      weight += tl.sum(entry & WEIGHT, 0)
    p = tl.arange(0, MAX_PARTS)
    before = tl.load(sums + (row * parts + p) * SUMS + BEFORE, p < parts, 0)
    number_above = tl.sum(before >> NUMBER, 0)
    weight_above = tl.sum(before & WEIGHT, 0)
    reached = (tl.cumsum(number, 0) + number_above >= number_limit) | (
        tl.cumsum(weight, 0) + weight_above >= weight_limit)
    of = tl.min(tl.where(reached, b, BINS), 0)
    number_above += tl.sum(tl.where(b < of, number, 0), 0)
    weight_above += tl.sum(tl.where(b < of, weight, 0), 0)
    of = tl.where(of == BINS, -1, of)
  none = (number_limit == NO_LIMIT) & (weight_limit == NO_LIMIT)
  of = tl.where(none, -1, of)
  tl.store(at + NUMBER_ABOVE, number_above)
  tl.store(at + WEIGHT_ABOVE, weight_above)
  tl.store(at + NUMBER_LIMIT, number_limit)
  tl.store(at + WEIGHT_LIMIT, weight_limit)
  tl.store(at + BIN, of.to(tl.int64))
  tl.store(at + COLLECTED, tl.full([], 0, tl.int64))
  if phase == 0:
    tl.store(at + LIMIT, tl.full([], NOTHING, tl.int64))
    tl.store(at + KEPT, total)


@triton.jit
def append(found, to, c, which, limit):
  """Adds columns to a list of up to `limit`, in no order; returns nothing."""
  # Each asks for its place, for those that do are few.
  place = tl.atomic_add(found + tl.zeros_like(c), 1, which, sem="relaxed")
  tl.store(to + place, c, which & (place < limit))


@triton.jit
def sampling_collect(logits, mask, best, candidates, state, rows, cols, parts,
                     per_part, flags, TILE: tl.constexpr):
  """Lists the columns of the limit's bin, unless the list has the limit."""
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  at = state + row * STATE
  of = tl.load(at + BIN)
  if of >= 0 and of < LISTED:
    top = _top(best, row, parts)
    begin = part * per_part
    end = tl.minimum(cols, begin + per_part)
    for c0 in range(begin, end, TILE):
      c = c0 + tl.arange(0, TILE)
      v, key = load_keys(logits, mask, row, c, end, cols, flags)
      here = (key != DEAD) & (bin_of(v, key, top, flags) == of)
      if tl.max(here.to(tl.int32), 0) > 0:
        append(at + COLLECTED, candidates + row * CANDIDATES, c, here,
               CANDIDATES)


@triton.jit
def candidate(candidates, row, i, many, cols):
  """Columns of a list of so many, or, if it was too short, the row's own.

  There is none that is `cols`.
  """
  listed = i < tl.where(many <= CANDIDATES, many, 0)
  c = tl.load(candidates + row * CANDIDATES + i, listed, i)
  return tl.where(listed | (many > CANDIDATES), c, cols)


@triton.jit
def _candidates(logits, mask, candidates, row, i, many, cols, top, temperature,
                of, bound, flags):
  """Composites and weights of candidates i; NOTHING and 0 of none."""
  c = candidate(candidates, row, i, many, cols)
  v, key = load_keys(logits, mask, row, c, cols, cols, flags)
  live = (key != DEAD) & (c < cols)
  live &= tl.where(of == LISTED, key >= (bound >> 32).to(tl.int32),
                   bin_of(v, key, top, flags) == of)
  weight = tl.zeros_like(i).to(tl.int64)
  if flags & TOP_P:
    weight = tl.where(live, weights(v, top, temperature, flags)[1], 0)
  return tl.where(live, composite(key, c), NOTHING), weight


@triton.jit
def _reach(columns, weight, pivot, flags):
  """Columns that reach pivots, and their weight."""
  over = columns[:, None] >= pivot[None, :]
  number = tl.sum(over.to(tl.int32), 0).to(tl.int64)
  total = tl.zeros_like(number)
  if flags & TOP_P:
    total = tl.sum(tl.where(over, weight[:, None], 0), 0)
  return number, total


@triton.jit
def _search(logits, mask, temperature, best, candidates, at, row, cols, parts,
            of, many, flags, TILE: tl.constexpr, BITS: tl.constexpr):
  """Finds the limit among the columns listed, TILE of them in registers."""
  top = _top(best, row, parts)
  t, _ = load_temperature(temperature, row, flags)
  bound = tl.load(at + BOUND)
  number_above = tl.load(at + NUMBER_ABOVE)
  weight_above = tl.load(at + WEIGHT_ABOVE)
  number_limit = tl.load(at + NUMBER_LIMIT)
  weight_limit = tl.load(at + WEIGHT_LIMIT)
  end = tl.where(many <= CANDIDATES, many, cols)
  digit = tl.arange(0, 4)
  i = tl.arange(0, TILE)
  columns, weight = _candidates(
      logits, mask, candidates, row, i, many, cols, top, t, of, bound, flags)
  limit = tl.full([], NOTHING, tl.int64)
  kept = weight_above
  last = 64 - BITS
  shift = 62
  if of == LISTED:
    # Digits that the bound and the largest column begin with are the limit's.
    largest = largest_of(best, row, 0, parts)
    while (shift > last) & ((bound >> shift) == (largest >> shift)):
      limit = (bound >> shift) << shift
      shift = tl.where(shift == 32, 20, shift - 2)
  while shift >= last:
    pivot = limit + (digit.to(tl.int64) << shift)
    number, total = _reach(columns, weight, pivot, flags)
    for i0 in range(TILE, end, TILE):
      more, weight_of = _candidates(
          logits, mask, candidates, row, i0 + i, many, cols, top, t, of, bound,
          flags)
      n, w = _reach(more, weight_of, pivot, flags)
      number += n
      total += w
    number += number_above
    total += weight_above
    good = (number >= number_limit) | (total >= weight_limit)
    step = tl.max(tl.where(good, digit, 0), 0)
    limit += step.to(tl.int64) << shift
    kept = tl.sum(tl.where(digit == step, total, 0), 0)
    shift = tl.where(shift == 32, 20, shift - 2)
  tl.store(at + LIMIT, limit)
  tl.store(at + KEPT, kept)


@triton.jit
def sampling_threshold(logits, mask, temperature, best, candidates, state, rows,
                       cols, parts, flags, TILE: tl.constexpr,
                       BITS: tl.constexpr):
  """Finds the limit among the columns listed, most often all in registers.

  BITS: how many of a number are not 0 in float32. Of keys that differ in the
  others there are no two.
  """
  row = tl.program_id(0).to(tl.int64)
  at = state + row * STATE
  of = tl.load(at + BIN)
  if of >= 0:
    many = tl.load(at + tl.where(of == LISTED, FOUND, COLLECTED)).to(tl.int32)
    if many <= TILE // 4:
      _search(logits, mask, temperature, best, candidates, at, row, cols, parts,
              of, many, flags, TILE // 4, BITS)
    else:
      _search(logits, mask, temperature, best, candidates, at, row, cols, parts,
              of, many, flags, TILE, BITS)
