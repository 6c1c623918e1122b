# SPDX-License-Identifier: Apache-2.0
"""Weights, exponentials and orders of floats that are the same everywhere.

No two machines have the same `exp` and `log`, nor add floats up in the same
order. So that one draws the token that another does, what decides here is
arithmetic of 32-bit integers, and single operations of float32 that IEEE 754
rounds: a difference, a quotient. kernels/sampling/exact.py has the same
functions; results agree in every bit.

A 64-bit integer is a pair (high, low) of uint32, which need no x64 mode.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core.philox import mulhilo

# The key of what may never be drawn.
DEAD = np.int32(-(1 << 31))
_u32 = np.uint32


def _high(a, b):
  return mulhilo(a, _u32(b) if isinstance(b, int) else b)[0]


def order_key(v: jax.Array) -> jax.Array:
  """float32 -> int32, ordered as IEEE's totalOrder has them."""
  bits = lax.bitcast_convert_type(v, jnp.int32)
  return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def exp_minus(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """e^-x of x >= 0, as float32 and as a whole number of 2^-31.

  x / ln 2 is cut to 24 bits after the point; 2^-f of its fraction f is a
  polynomial in integers. Both are off by less than 2e-7 of their value, or by
  half a unit. What is beyond 64 counts as 64.

  Returns:
    The float32, and uint32, up to 2^31.
  """
  fixed = (jnp.minimum(x, 64) * np.float32(1 << 24)).astype(jnp.int32)
  y = _high(fixed.astype(jnp.uint32) << 1, 3098164009)  # 2^31 / ln 2
  n, f = y >> 24, y << 8
  r = _u32(493839)
  for term in (5548193, 41219527, 238367582, 1031763232, 2977044448):
    r = _u32(term) - _high(f, r)
  m = _u32(1 << 31) - (_high(f, r) >> 1)
  by = jnp.minimum(n, _u32(31))
  whole = m + (_u32(1) << by >> 1) >> by
  power = lax.bitcast_convert_type((_u32(96) - n) << 23, jnp.float32)
  return m.astype(jnp.float32) * power, jnp.where(n > 31, _u32(0), whole)


def exponential(words: jax.Array) -> jax.Array:
  """Uniform uint32 -> exponentially distributed float32, at least 2^-32.

  -ln q / 2^32 of q = 2^32 - words: q is brought to [sqrt 1/2, 1) by half
  octaves, and the rest is a polynomial of 1 - q. It is off by less than 2e-7 of
  its value, or by 2^-32.
  """
  q = -jnp.maximum(words, _u32(1))
  c = lax.clz(q)
  norm = q << c
  low = norm < _u32(3037000500)  # 2^31.5
  steps = 2 * c + low.astype(jnp.uint32)
  h = -jnp.where(low, _high(norm, 3037000500) << 1, norm)
  r = _u32(1464126112)
  for term in (383749357, 913905510, 1069771069, 1431759037, 2147483217):
    r = _u32(term) + _high(h, r)
  e = h + _high(h, _high(h, r))
  # From ln 2 / 2 on fewer bits after the point are enough.
  whole = jnp.where(steps == 0, e, steps * _u32(46516320) + (e >> 5))
  return whole.astype(jnp.float32) * jnp.where(
      steps == 0, np.float32(2.0**-32), np.float32(2.0**-27))


def total(t: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The sum of up to 2^21 uint32, at most 2^31 each, over the last axis."""
  low, middle, high = (
      jnp.sum((t >> by) & _u32(0x7FF), -1, dtype=jnp.uint32)
      for by in (0, 11, 22))
  a = low + (middle << 11)
  carry = (a < low).astype(jnp.uint32) + (middle >> 21)
  b = a + (high << 22)
  return carry + (b < a).astype(jnp.uint32) + (high >> 10), b


def at_least(a, b) -> jax.Array:
  """Whether a >= b, both of 64 bits."""
  return (a[0] > b[0]) | (a[0] == b[0]) & (a[1] >= b[1])


def share(p: jax.Array, of) -> tuple[jax.Array, jax.Array]:
  """The least weight that counts as a share p < 1, float32, of a total.

  It is p, cut to 24 bits after the point, times the total, rounded down; at
  least 1.
  """
  p = (jnp.clip(p, 0, 1) * np.float32(1 << 24)).astype(jnp.uint32)
  carry, low = mulhilo(p, of[1])
  high, middle = mulhilo(p, of[0])
  middle = middle + carry
  high = high + (middle < carry).astype(jnp.uint32)
  # Without the 24 bits after the point.
  high, low = middle >> 24 | high << 8, low >> 24 | middle << 8
  return high, jnp.where((high == 0) & (low == 0), _u32(1), low)
