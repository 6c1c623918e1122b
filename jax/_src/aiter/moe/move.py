# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens moved to their experts and back: two linear maps.

Each is the other's transpose, and both only gather: so that gradients too are
sums in a fixed order, of which no two are written to one place.

Tokens may be divided over devices, each of which has some of the experts, by a
mesh axis of the shard_map around the call: places are then those of all tokens,
x and what comes out of sums are a device's own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core import dims
from jax._src.aiter.core.derivative import differentiable


class Places(NamedTuple):
  """Where entries lie; -1 is nowhere.

  Attributes:
    entry: int32 [n], the entry token * k + choice of each row.
    row: int32 [m, k], the row of each entry.
  """
  entry: jax.Array
  row: jax.Array


def _take(t, at):
  """Rows of t, 0 where there is none."""
  return t.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _token(places: Places):
  """The token of each row; -1 of none."""
  return jnp.where(places.entry < 0, -1, places.entry // places.row.shape[1])


def _summed_here(rows, weights, places: Places):
  """The sum over choices, in their order and in float32 or wider."""
  wide = jnp.promote_types(rows.dtype, jnp.float32)
  total = jnp.zeros((places.row.shape[0], rows.shape[1]), wide)
  for j in range(places.row.shape[1]):
    term = _take(rows, places.row[:, j]).astype(wide)
    if weights is not None:
      # What is nowhere has no part, whatever its weight.
      term *= jnp.where(places.row[:, j] < 0, 0, weights[:, j])[:, None]
    total += term
  return total


def _summed(axis: str | None, rows, weights, places: Places):
  """Likewise over all devices of an axis, whose parts are rounded first.

  Of two devices each adds up the other's tokens first, to be on their way while
  it adds up its own; of more its own are too few to hide anything.
  """
  if axis is None:
    return _summed_here(rows, weights, places)
  n, m = lax.axis_size(axis), places.row.shape[0] // lax.axis_size(axis)

  def part(rows, weights, row):
    return _summed_here(rows, weights, Places(places.entry, row)).astype(
        rows.dtype)

  if n == 2:
    rank = lax.axis_index(axis)
    own, other = (jax.tree.map(
        lambda t, of=of: lax.dynamic_slice_in_dim(t, of * m, m),
        (weights, places.row)) for of in (rank, 1 - rank))
    # Else XLA has one kernel for both sums, or for its own and the last one.
    rows, away = lax.optimization_barrier((rows, part(rows, *other)))
    parts = lax.optimization_barrier((
        part(rows, *own), lax.ppermute(away, axis, [(0, 1), (1, 0)])))
  else:
    blocks = part(rows, weights, places.row)
    parts = lax.all_to_all(
        blocks.reshape(n, m, blocks.shape[1]), axis, 0, 0)
  wide = jnp.promote_types(rows.dtype, jnp.float32)
  return functools.reduce(jnp.add, (t.astype(wide) for t in parts))


def everyone(axis: str | None, t):
  """Tokens of all devices of an axis; t itself without one."""
  return t if axis is None else lax.all_gather(t, axis, tiled=True)


def rows_of(x, places: Places):
  """spread of what has no gradient: x [m, ...] -> [n, ...]."""
  token, numbers = _token(places), 4 // x.dtype.itemsize
  known = all(map(dims.is_known, (*x.shape, *token.shape)))
  if not known or x.ndim != 2 or numbers < 2 or x.shape[1] % numbers:
    return _take(x, token)
  # XLA's kernel copies a number a thread, so it gets fewer and wider ones.
  words = lax.bitcast_convert_type(
      x.reshape(x.shape[0], x.shape[1] // numbers, numbers), jnp.uint32)
  return lax.bitcast_convert_type(_take(words, token), x.dtype).reshape(
      token.shape[0], x.shape[1])


def _spread(axis, x, places):
  return rows_of(everyone(axis, x), places)


def _spread_backward(axis, wanted, places, dout):
  del wanted
  return _summed(axis, dout, None, places), Places(None, None)


# (axis, x [m, d], Places) -> [n, d]: each row is its entry's token.
spread = differentiable(
    _spread, _spread_backward,
    save=lambda axis, x, places: (_spread(axis, x, places), places),
    tangent=lambda axis, places, tangents: _spread(axis, tangents[0], places))


def _combine(axis, rows, weights, places):
  return _summed(axis, rows, weights, places).astype(rows.dtype)


def _combine_save(axis, rows, weights, places):
  return _combine(axis, rows, weights, places), (rows, weights, places)


def _combine_backward(axis, wanted, saved, dout):
  rows, weights, places = saved
  dout = everyone(axis, dout)
  of_rows = _take(dout, _token(places))
  of_weights = None
  if weights is not None:
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    of_rows = of_rows.astype(wide) * _take(
        weights.reshape(-1), places.entry)[:, None]
    if wanted[1]:
      of_weights = jnp.stack([
          jnp.sum(dout.astype(wide) * _take(rows, places.row[:, j]).astype(
              wide), 1) for j in range(places.row.shape[1])], 1)
  return of_rows, of_weights, Places(None, None)


def _combine_tangent(axis, saved, tangents):
  rows, weights, places = saved
  of_rows, of_weights, _ = tangents
  out = 0
  if of_rows is not None:
    out += _summed(axis, of_rows, weights, places)
  if of_weights is not None:
    out += _summed(axis, rows, of_weights, places)
  return out.astype(rows.dtype)


# (axis, rows [n, d], weights [m, k] or None, Places) -> [m, d]: the sum of each
# token's rows, each times its weight.
combine = differentiable(
    _combine, _combine_backward, save=_combine_save, tangent=_combine_tangent)
