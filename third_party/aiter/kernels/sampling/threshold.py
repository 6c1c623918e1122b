# SPDX-License-Identifier: Apache-2.0
"""The key from which on a row's columns are kept, exactly.

It is the largest one that at least k columns reach, or (joint order) columns of
a weight of at least top_p of all; with `k_first` the second counts of what the
first has left, in a second phase of the last three kernels. Of a ranked row
or a span there are no equal ones: the lower column is the larger.

A radix select whose first digit is a bin: of each part a histogram of numbers
and weights, the bin in which the limit is reached, its columns, and then their
keys, two bits at a time. Everything that is added up is an integer, so no
order of additions shows. Few columns share a bin, for bins are as fine as
their distance from the row's largest asks; if more than CANDIDATES do, the last
step reads the whole row instead of a list of them.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.sampling import rows

TOP_K = rows.TOP_K
TOP_P = rows.TOP_P
K_FIRST = rows.K_FIRST
RANKED = rows.RANKED
SPAN = rows.SPAN
DEAD = rows.DEAD
NOTHING = rows.NOTHING
load_keys = rows.load_keys
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
# Fields of a row's state; src/sampling.cc knows how many.
STATE = tl.constexpr(8)
BIN = tl.constexpr(0)  # That of the limit, or -1 if all are kept.
NUMBER_ABOVE = tl.constexpr(1)  # Columns in bins before it, and their weight.
WEIGHT_ABOVE = tl.constexpr(2)
NUMBER_LIMIT = tl.constexpr(3)
WEIGHT_LIMIT = tl.constexpr(4)
LIMIT = tl.constexpr(5)  # The composite from which on columns are kept.
KEPT = tl.constexpr(6)  # Their weight.
FOUND = tl.constexpr(7)  # Length of the list of candidates.


@triton.jit
def _top(best, row, parts):
  """The largest number of a row, in float32; 0 if there is none."""
  key = (largest_of(best, row, 0, parts) >> 32).to(tl.int32)
  return tl.where(key == DEAD, 0.0, from_order_key(key))


@triton.jit
def sampling_histogram(logits, mask, temperature, best, histogram, rows, cols,
                       parts, per_part, flags, TILE: tl.constexpr,
                       RETURNS: tl.constexpr):
  """Adds a part's columns up by bins.

  histogram: int64 [rows, parts, BINS], zeros. RETURNS: the largest sum that an
  addition met is left in the second plane of `best`, where nobody reads it. For
  additions of which nothing is used Triton first adds up what lanes of a wave
  have for one address, on CDNA3 and CDNA4, which takes most of the time where
  hardly two lanes have the same.
  """
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  top = _top(best, row, parts)
  t, cold = load_temperature(temperature, row, flags)
  begin = part * per_part
  end = tl.minimum(cols, begin + per_part)
  bins = histogram + (row * parts + part) * BINS
  met = tl.zeros([TILE], tl.int64)
  if cold == 0:
    for c0 in range(begin, end, TILE):
      v, key = load_keys(logits, mask, row, c0 + tl.arange(0, TILE), end, cols,
                         flags)
      entry = tl.full([TILE], ONE_COLUMN, tl.int64)
      if flags & TOP_P:
        entry += weights(v, top, t, flags)[1]
      live = key != DEAD
      if flags & RANKED:
        live = c0 + tl.arange(0, TILE) < end
      before = tl.atomic_add(bins + bin_of(v, key, top, flags), entry, live,
                             sem="relaxed", scope="cta")
      if RETURNS:
        met = tl.maximum(met, tl.where(live, before, 0))
  if RETURNS:
    tl.store(best + (row * 2 + 1) * parts + part, tl.max(met, 0))


@triton.jit
def sampling_bracket(temperature, top_k, top_p, histogram, state, rows, cols,
                     parts, k, phase, flags, STEP: tl.constexpr):
  """Finds the bin in which a limit is reached.

  state: int64 [rows, STATE]. k: of a ranked row, or a span, in the place of
  top_k.
  """
  row = tl.program_id(0).to(tl.int64)
  _, cold = load_temperature(temperature, row, flags)
  b = tl.arange(0, BINS)
  number = tl.zeros([BINS], tl.int64)
  weight = tl.zeros([BINS], tl.int64)
  for p0 in range(0, parts, STEP):
    p = p0 + tl.arange(0, STEP)[:, None]
    entry = tl.load(histogram + (row * parts + p) * BINS + b[None, :],
                    p < parts, 0)
    number += tl.sum(entry >> NUMBER, 0)
    weight += tl.sum(entry & WEIGHT, 0)
  at = state + row * STATE
  total = tl.sum(weight, 0)
  number_limit = tl.full([], NO_LIMIT, tl.int64)
  weight_limit = tl.full([], NO_LIMIT, tl.int64)
  if (flags & TOP_K) != 0 and phase == 0:
    if (flags & (RANKED | SPAN)) == 0:
      k = tl.load(top_k + row)
    number_limit = tl.where((k > 0) & (k < cols), k.to(tl.int64), number_limit)
  if (flags & TOP_P) != 0 and ((flags & K_FIRST) == 0 or phase == 1):
    p = tl.load(top_p + row)
    share = (tl.maximum(p, 0.0) * 16777216.0).to(tl.int64)
    of = total
    if phase == 1:
      of = tl.load(at + KEPT)
    limit = (of >> 24) * share + (((of & 0xFFFFFF) * share) >> 24)
    weight_limit = tl.where(p < 1.0, tl.maximum(limit, 1), weight_limit)
  reached = (tl.cumsum(number, 0) >= number_limit) | (
      tl.cumsum(weight, 0) >= weight_limit)
  first = tl.min(tl.where(reached, b, BINS), 0)
  tl.store(at + NUMBER_ABOVE, tl.sum(tl.where(b < first, number, 0), 0))
  tl.store(at + WEIGHT_ABOVE, tl.sum(tl.where(b < first, weight, 0), 0))
  tl.store(at + NUMBER_LIMIT, number_limit)
  tl.store(at + WEIGHT_LIMIT, weight_limit)
  found = (first < BINS) & (cold == 0)
  tl.store(at + BIN, tl.where(found, first, -1).to(tl.int64))
  tl.store(at + FOUND, tl.full([], 0, tl.int64))
  if phase == 0:
    tl.store(at + LIMIT, tl.full([], NOTHING, tl.int64))
    tl.store(at + KEPT, total)


@triton.jit
def append(found, to, c, which, limit):
  """Adds columns to a list of up to `limit`, in no order; returns nothing."""
  number = which.to(tl.int32)
  many = tl.sum(number, 0)
  if many > 0:
    first = tl.atomic_add(found, many.to(tl.int64), sem="relaxed")
    place = first + tl.cumsum(number, 0) - 1
    tl.store(to + place, c, which & (place < limit))


@triton.jit
def sampling_collect(logits, mask, best, candidates, state, rows, cols, parts,
                     per_part, flags, TILE: tl.constexpr):
  """Lists the columns of the limit's bin.

  candidates: int32 [rows, CANDIDATES], in no order; what does not fit is only
  counted.
  """
  row = tl.program_id(0).to(tl.int64)
  part = tl.program_id(1)
  at = state + row * STATE
  of = tl.load(at + BIN)
  if of >= 0:
    top = _top(best, row, parts)
    begin = part * per_part
    end = tl.minimum(cols, begin + per_part)
    for c0 in range(begin, end, TILE):
      c = c0 + tl.arange(0, TILE)
      v, key = load_keys(logits, mask, row, c, end, cols, flags)
      live = (key != DEAD) & (c < end)
      if flags & RANKED:
        live = c < end
      append(at + FOUND, candidates + row * CANDIDATES, c,
             live & (bin_of(v, key, top, flags) == of), CANDIDATES)


@triton.jit
def _candidates(logits, mask, candidates, row, i, many, cols, top, temperature,
                of, flags):
  """Composites and weights of candidates i; NOTHING and 0 of none."""
  # A list that was too short is not used: the row itself is.
  listed = i < tl.where(many <= CANDIDATES, many, 0)
  c = tl.load(candidates + row * CANDIDATES + i, listed, i)
  c = tl.where(listed | (many > CANDIDATES), c, cols)
  v, key = load_keys(logits, mask, row, c, cols, cols, flags)
  live = (key != DEAD) & (c < cols)
  if flags & RANKED:
    live = c < cols
  live &= bin_of(v, key, top, flags) == of
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
def sampling_threshold(logits, mask, temperature, best, candidates, state, rows,
                       cols, parts, flags, TILE: tl.constexpr,
                       BITS: tl.constexpr):
  """Finds the limit among the columns of its bin, most often all in registers.

  BITS: how many of a number are not 0 in float32. Of keys that differ in the
  others there are no two, so that only an order of columns asks for them.
  """
  row = tl.program_id(0).to(tl.int64)
  at = state + row * STATE
  of = tl.load(at + BIN)
  if of >= 0:
    top = _top(best, row, parts)
    t, _ = load_temperature(temperature, row, flags)
    number_above = tl.load(at + NUMBER_ABOVE)
    weight_above = tl.load(at + WEIGHT_ABOVE)
    number_limit = tl.load(at + NUMBER_LIMIT)
    weight_limit = tl.load(at + WEIGHT_LIMIT)
    many = tl.load(at + FOUND).to(tl.int32)
    end = tl.where(many <= CANDIDATES, many, cols)
    digit = tl.arange(0, 4)
    i = tl.arange(0, TILE)
    columns, weight = _candidates(
        logits, mask, candidates, row, i, many, cols, top, t, of, flags)
    limit = tl.full([], NOTHING, tl.int64)
    kept = weight_above
    last = 64 - BITS
    if flags & (RANKED | SPAN):
      last = 0
    shift = 62
    while shift >= last:
      pivot = limit + (digit.to(tl.int64) << shift)
      number, total = _reach(columns, weight, pivot, flags)
      for i0 in range(TILE, end, TILE):
        more, weight_of = _candidates(
            logits, mask, candidates, row, i0 + i, many, cols, top, t, of,
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
      # Bits 31 to 21 are 0 in every composite.
      shift = tl.where(shift == 32, 20, shift - 2)
    tl.store(at + LIMIT, limit)
    tl.store(at + KEPT, kept)
  tl.store(at + FOUND, tl.full([], 0, tl.int64))
