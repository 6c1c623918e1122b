# SPDX-License-Identifier: Apache-2.0
"""Weights, exponentials and orders of floats that are the same everywhere.

jax/_src/aiter/sampling/exact.py has the same functions in jax.numpy, and says
how; results agree in every bit, for all but single IEEE operations of float32
is arithmetic of integers.
"""

import triton
import triton.language as tl

# The key of what may never be drawn; that of no number.
DEAD = tl.constexpr(-(1 << 31))


@triton.jit
def order_key(v):
  """float32 -> int32, ordered as IEEE's totalOrder has them."""
  bits = v.to(tl.int32, bitcast=True)
  return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_order_key(key):
  """The float32 of a key."""
  return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def exp_minus(x):
  """e^-x of x >= 0 in float32, and in units of 2^-31, rounded, in uint32."""
  fixed = (tl.minimum(x, 64.0) * 16777216.0).to(tl.int32).to(tl.uint32)
  y = tl.umulhi(fixed << 1, tl.full([], 3098164009, tl.uint32))
  n = y >> 24
  f = y << 8
  r = tl.full([], 5548193, tl.uint32) - tl.umulhi(
      f, tl.full([], 493839, tl.uint32))
  r = 41219527 - tl.umulhi(f, r)
  r = 238367582 - tl.umulhi(f, r)
  r = 1031763232 - tl.umulhi(f, r)
  r = tl.full([], 2977044448, tl.uint32) - tl.umulhi(f, r)
  m = tl.full([], 2147483648, tl.uint32) - (tl.umulhi(f, r) >> 1)
  by = tl.minimum(n, 31)
  whole = (m + (((1 << by) >> 1).to(tl.uint32))) >> by
  whole = tl.where(n > 31, 0, whole)
  power = ((96 - n) << 23).to(tl.float32, bitcast=True)
  return m.to(tl.float32) * power, whole


@triton.jit
def exponential(words):
  """Uniform words in uint32 -> exponentially distributed float32, > 0."""
  q = tl.full([], 0, tl.uint32) - tl.maximum(words, 1)
  # Of two neighbouring ones the lower is left out: nothing rounds up.
  head = (q & ~(q >> 1)).to(tl.float32).to(tl.uint32, bitcast=True) >> 23
  c = 158 - head
  norm = q << c
  low = norm < tl.full([], 3037000500, tl.uint32)
  steps = 2 * c + low.to(tl.uint32)
  norm = tl.where(
      low, tl.umulhi(norm, tl.full([], 3037000500, tl.uint32)) << 1, norm)
  h = tl.full([], 0, tl.uint32) - norm
  r = 383749357 + tl.umulhi(h, tl.full([], 1464126112, tl.uint32))
  r = 913905510 + tl.umulhi(h, r)
  r = 1069771069 + tl.umulhi(h, r)
  r = 1431759037 + tl.umulhi(h, r)
  r = tl.full([], 2147483217, tl.uint32) + tl.umulhi(h, r)
  e = h + tl.umulhi(h, tl.umulhi(h, r))
  whole = tl.where(steps == 0, e, steps * 46516320 + (e >> 5))
  return whole.to(tl.float32) * tl.where(
      steps == 0, 2.3283064365386963e-10, 7.450580596923828e-09)
