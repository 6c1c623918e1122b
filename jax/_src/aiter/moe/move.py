# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens moved to their experts and back: two linear maps.

Each is the other's transpose, and both only gather: so that gradients too are
sums in a fixed order, of which no two are written to one place.
"""

from __future__ import annotations

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


def _summed(rows, weights, places: Places):
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


def _spread(_, x, places):
  return rows_of(x, places)


def _spread_backward(_, wanted, places, dout):
  del wanted
  return _summed(dout, None, places), Places(None, None)


# (None, x [m, d], Places) -> [n, d]: each row is its entry's token.
spread = differentiable(
    _spread, _spread_backward,
    save=lambda cfg, x, places: (_spread(cfg, x, places), places),
    tangent=lambda cfg, places, tangents: _spread(cfg, tangents[0], places))


def _combine(_, rows, weights, places):
  return _summed(rows, weights, places).astype(rows.dtype)


def _combine_save(cfg, rows, weights, places):
  return _combine(cfg, rows, weights, places), (rows, weights, places)


def _combine_backward(_, wanted, saved, dout):
  rows, weights, places = saved
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


def _combine_tangent(_, saved, tangents):
  rows, weights, places = saved
  of_rows, of_weights, _ = tangents
  out = 0
  if of_rows is not None:
    out += _summed(of_rows, weights, places)
  if of_weights is not None:
    out += _summed(rows, of_weights, places)
  return out.astype(rows.dtype)


# (None, rows [n, d], weights [m, k] or None, Places) -> [m, d]: the sum of each
# token's rows, each times its weight.
combine = differentiable(
    _combine, _combine_backward, save=_combine_save, tangent=_combine_tangent)
