# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10, and the dropout mask that every platform shares.

The mask is a pure function of (key, batch counter, head counter, row, column),
so it does not depend on tiles, platforms, shardings or vmap. The GPU kernels
compute the same function.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core.partition import vary_together

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# So many columns of a dropout mask one call serves: a state counts them so.
COLUMNS = 8


def mulhilo(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """High and low word of a * b, by 16-bit halves: uint64 needs x64 mode."""
  low16 = np.uint32(0xFFFF)
  a_low, a_high, b_low, b_high = a & low16, a >> 16, b & low16, b >> 16
  t = a_high * b_low + ((a_low * b_low) >> 16)
  u = (t & low16) + a_low * b_high
  return a_high * b_high + (t >> 16) + (u >> 16), a * b


def philox4x32(key: tuple[jax.Array, jax.Array],
               counter: tuple[jax.Array, jax.Array, jax.Array, jax.Array]):
  """Ten rounds of Philox4x32 on uint32 words that broadcast together.

  Args:
    key: two words.
    counter: four words.

  Returns:
    Four uint32 arrays of the broadcast shape.
  """
  shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in (*key, *counter)))
  words = tuple(jnp.broadcast_to(x, shape) for x in counter)

  def step(_, carry):
    (x0, x1, x2, x3), (k0, k1) = carry
    hi0, lo0 = mulhilo(x0, np.uint32(_MULTIPLIERS[0]))
    hi1, lo1 = mulhilo(x2, np.uint32(_MULTIPLIERS[1]))
    words = (hi1 ^ x1 ^ k0, lo1, hi0 ^ x3 ^ k1, lo0)
    return words, (k0 + np.uint32(_KEY_STEPS[0]), k1 + np.uint32(_KEY_STEPS[1]))

  # A loop, not ten copies: XLA's CPU compiler takes seconds for the latter.
  # In a shard_map a loop's values vary over the same axes from the first.
  words, _ = lax.fori_loop(
      0, _ROUNDS, step, vary_together((words, tuple(key))))
  return words


def threshold(dropout_p: float) -> int:
  """16 bits below this drop their element: p * 2^16, rounded, but not 2^16."""
  return min(int(np.float64(dropout_p) * 2.0**16 + 0.5), 2**16 - 1)


def keep_mask(state: jax.Array, rows: jax.Array, cols: jax.Array,
              dropout_p: float, *, cols_are_a_run: bool = False) -> jax.Array:
  """Which attention probabilities survive dropout.

  Philox's four words of counter (column // 8, row, head, batch) serve eight
  columns: column c has word c % 4, of the first four columns the low half.

  state[..., i], rows and cols broadcast together.

  Args:
    state: uint32 [..., 6]: key word 0, key word 1, batch counter, head counter,
      and what is added to rows and to columns, to these a multiple of COLUMNS.
    rows: int32 query positions inside their sequence.
    cols: int32 key positions inside their sequence.
    dropout_p: probability of dropping, 0 <= p < 1.
    cols_are_a_run: cols is rank 1 and cols[i] == cols[0] + i, with cols[0] and
      its length multiples of COLUMNS, which one Philox call then serves.

  Returns:
    bool, True where kept, of the broadcast shape.
  """
  k0, k1, batch, head, first_row, first_col = (
      state[..., i] for i in range(6))
  rows = first_row + rows.astype(jnp.uint32)
  cols = cols.astype(jnp.uint32)
  cut = np.uint32(threshold(dropout_p))
  if cols_are_a_run:
    block = (first_col + cols[::COLUMNS]) // np.uint32(COLUMNS)
    words = jnp.stack(philox4x32((k0, k1), (block, rows, head, batch)), axis=-1)
    bits = jnp.stack([words & np.uint32(0xFFFF), words >> 16], axis=-2)
    return (bits >= cut).reshape(*bits.shape[:-3], cols.shape[0])
  block = (first_col + cols) // np.uint32(COLUMNS)
  words = philox4x32((k0, k1), (block, rows, head, batch))
  cols = jnp.broadcast_to(cols, words[0].shape)
  word = lax.select_n((cols & 3).astype(jnp.int32), *words)
  return (word >> (cols >> 2 & 1) * 16) & np.uint32(0xFFFF) >= cut
