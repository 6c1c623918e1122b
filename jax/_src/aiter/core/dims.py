# SPDX-License-Identifier: Apache-2.0
"""Sizes of arrays that tracing may not know: jax.export's symbolic dimensions.

A symbolic dimension is at least 1, and a comparison with it raises an error
where its bounds leave open how it ends. Code that has a choice asks `at_most`
and takes what is right for any size where the answer is no.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jax

_FEW_STARTS = 1024


def is_known(size) -> bool:
  """Whether a size is a number."""
  return not jax.export.is_symbolic_dim(size)


def at_most(size, bound) -> bool:
  """Whether a size is known to be at most `bound`."""
  over = size - bound
  return (over if is_known(over)
          else jax.export.symbolic_dim_bounds(over)[1]) <= 0


def round_up(size, multiple: int):
  """The least multiple that is >= size; JAX knows that it is, of symbols too.

  It does not of `size + -size % multiple`.
  """
  return (size + multiple - 1) // multiple * multiple


def as_int32(size):
  """A size as an operand of arithmetic; of a number, no array."""
  # A partitioned function may not hold arrays.
  return np.int32(size) if is_known(size) else jnp.asarray(size, jnp.int32)


def longer(t, axis: int, by, value=0):
  """t with so many more along an axis; None of None."""
  if t is None or is_known(by) and by == 0:
    return t
  more = [(0, 0)] * t.ndim
  more[axis] = (0, by)
  return jnp.pad(t, more, constant_values=value)


def filled(t, fill):
  """t, which JAX can gather from: an empty dimension has one place of fill."""
  more = [(0, int(is_known(n) and n == 0)) for n in t.shape]
  return jnp.pad(t, more, constant_values=fill) if (0, 1) in more else t


def take(t, index, fill):
  """t[index], and `fill` for indices behind the end: all, if t is empty."""
  return jnp.asarray(filled(t, fill)).at[index].get(
      mode="fill", fill_value=fill)


def last_start(starts, rows):
  """For each row the last of the ascending starts that is <= it; -1 if none."""
  # A search takes a known number of steps, and each is kernels of its own on a
  # GPU: few starts are all compared at once.
  if is_known(starts.shape[0]) and starts.shape[0] > _FEW_STARTS:
    return jnp.searchsorted(starts, rows, side="right").astype(jnp.int32) - 1
  return jnp.sum(starts <= rows[:, None], axis=1, dtype=jnp.int32) - 1
