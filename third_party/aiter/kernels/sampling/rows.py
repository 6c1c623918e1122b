# SPDX-License-Identifier: Apache-2.0
"""What sampling's kernels share: flags, a row's keys and its weights.

A row is divided into up to MAX_PARTS parts, each of a block. A column and its
key together are a `composite`, an int64 that is larger for the larger key and,
of equal ones, for the lower column: maxima of composites are the same in any
order.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import rounding
from third_party.aiter.kernels.sampling import exact
from third_party.aiter.kernels.sampling.family import FEATURES

ALIGNED = tl.constexpr(FEATURES["aligned"])
MASK = tl.constexpr(FEATURES["mask"])
TOP_K = tl.constexpr(FEATURES["top_k"])
TOP_P = tl.constexpr(FEATURES["top_p"])
K_FIRST = tl.constexpr(FEATURES["k_first"])
PROBS = tl.constexpr(FEATURES["probs"])
MIN_P = tl.constexpr(FEATURES["min_p"])
GIVEN = tl.constexpr(FEATURES["given"])
GREEDY = tl.constexpr(FEATURES["greedy"])
RANKED = tl.constexpr(FEATURES["ranked"])

MAX_PARTS = tl.constexpr(64)  # src/sampling.cc has it too.
LAST = tl.constexpr((1 << 21) - 1)  # A column is at most this one.
NOTHING = tl.constexpr(-(1 << 63))  # The composite of no column.
# Temperatures below it are 0: of subnormal numbers some devices make 0.
TINY = tl.constexpr(2.0**-126)
DEAD = exact.DEAD
_NEGATIVE_INFINITY = tl.constexpr(-2139095041)  # Its key.

order_key = exact.order_key
from_order_key = exact.from_order_key
exp_minus = exact.exp_minus
divide = rounding.divide


@triton.jit
def load_raw(logits, row, c, end, cols, flags):
  """Columns c of a row, -inf from `end` on."""
  if flags & ALIGNED:
    # Said so that the compiler sees it: loads may be of 16 bytes.
    raw = tl.load(logits + row * (cols // 8 * 8) + c, c < end // 8 * 8,
                  float("-inf"))
  else:
    raw = tl.load(logits + row * cols + c, c < end, float("-inf"))
  return raw


@triton.jit
def allowed(raw, mask, row, c, end, cols, flags):
  """Columns of load_raw in float32, -inf where the mask forbids them."""
  v = raw.to(tl.float32)
  if flags & MASK:
    words = (cols + 31) // 32
    bits = tl.load(mask + row * words + (c >> 5), c < end, 0)
    v = tl.where(((bits >> (c & 31)) & 1) != 0, v, float("-inf"))
  return v


@triton.jit
def lowest(flags):
  """What a column has to be above, or it may not be drawn."""
  return tl.where((flags & PROBS) != 0, 0.0, float("-inf"))


@triton.jit
def keys_of(raw, mask, row, c, end, cols, flags):
  """Columns of load_raw in float32, and their keys.

  DEAD is the key of what may not be drawn: NaN, -inf, what the mask forbids; of
  probabilities what is not positive. All of a ranked row may be.
  """
  v = allowed(raw, mask, row, c, end, cols, flags)
  live = c < end
  if (flags & RANKED) == 0:
    v = tl.where(v == 0.0, 0.0, v)  # No zero is negative.
    live = v > lowest(flags)
  return v, tl.where(live, order_key(v), DEAD)


@triton.jit
def load_keys(logits, mask, row, c, end, cols, flags):
  """Columns c of a row, those before `end`, in float32, and their keys."""
  raw = load_raw(logits, row, c, end, cols, flags)
  return keys_of(raw, mask, row, c, end, cols, flags)


@triton.jit
def composite(key, c):
  return (key.to(tl.int64) << 32) | (c ^ LAST).to(tl.int64)


@triton.jit
def largest_of(best, row, plane, parts):
  """The largest composite of a row's parts."""
  p = tl.arange(0, MAX_PARTS)
  return tl.max(
      tl.load(best + (row * 2 + plane) * parts + p, p < parts, NOTHING), 0)


@triton.jit
def largest_of_groups(maxima, row, parts, MAXIMA: tl.constexpr,
                      STEP: tl.constexpr):
  """The largest composites of STEP * MAXIMA groups of columns, or fewer.

  maxima: int64 [rows, parts, MAXIMA], of groups of the columns of a part.
  """
  i = tl.arange(0, STEP * MAXIMA)
  found = tl.full([STEP * MAXIMA], NOTHING, tl.int64)
  for p0 in range(0, parts, STEP):
    here = p0 + i // MAXIMA < parts
    at = maxima + (row * parts + p0) * MAXIMA + i
    found = tl.maximum(found, tl.load(at, here, NOTHING))
  return found


@triton.jit
def bin_of(v, key, top, flags):
  """Which of 2048 bins a column is in: none is before that of a larger key.

  Bins are those of the distance from the row's largest number, `top`: the
  exponent and 7 bits of its float32, from 2^-7 to 2^9. Of probabilities they
  are those of the quotient.
  """
  top_bits = top.to(tl.int32, bitcast=True)
  if flags & PROBS:
    bits = top_bits - v.to(tl.int32, bitcast=True)
    b = bits >> 16
  else:
    d = tl.where(key >= order_key(top), 0.0, top - v)
    d = tl.where(key <= _NEGATIVE_INFINITY, float("inf"), d)
    b = (d.to(tl.int32, bitcast=True) >> 16) - 15360
  return tl.minimum(tl.maximum(b, 0), 2047)


@triton.jit
def weights(v, top, temperature, flags):
  """A column's weight, the largest's being 1, and in units of 2^-31."""
  if flags & PROBS:
    weight = tl.where(v == top, 1.0, tl.div_rn(v, v * 0.0 + top))
    whole = (weight * 2147483648.0).to(tl.uint32)
  else:
    d = tl.minimum(tl.where(v == top, 0.0, top - v), 3e38)
    if (temperature >= 1e-15) & (temperature <= 1e15):
      # From 64 on quotients count as that.
      x = divide(tl.minimum(d, temperature * 128.0), temperature)
    else:
      x = tl.div_rn(d, d * 0.0 + temperature)
    weight, whole = exp_minus(x)
  return weight, whole.to(tl.int64)


@triton.jit
def load_temperature(temperature, row, flags):
  """A row's temperature, and whether it takes the largest column instead."""
  t = tl.full([], 1.0, tl.float32)
  cold = row < 0
  if (flags & (PROBS | RANKED)) == 0:
    t = tl.load(temperature + row)
    cold = (t >= TINY) == 0
    t = tl.where(cold, 1.0, t)
  return t, cold
