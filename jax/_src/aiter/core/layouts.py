# SPDX-License-Identifier: Apache-2.0
"""Shuffled layouts: orders of elements in which MFMA instructions take them."""

from __future__ import annotations

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments, dims

# Rows and columns of a shuffled array of scales are multiples of these.
_SCALE_TILE = (256, 8)


def _check_matrix(function: str, name: str, t, multiples) -> None:
  arguments.check_is_array(function, name, t, optional=False)
  rows, cols = multiples
  if t.ndim < 2 or t.shape[-2] % rows != 0 or t.shape[-1] % cols != 0:
    raise arguments.bad(
        function, name, arguments.describe(t),
        f"[..., a multiple of {rows}, a multiple of {cols}]")


def _permuted(t, order):
  """t with its last axes in another order."""
  first = t.ndim - len(order)
  return t.transpose(*range(first), *(first + axis for axis in order))


def _weight_tiles(function: str, w, layout) -> tuple[int, int, int]:
  """Rows of a tile, its columns, and the columns that lie together."""
  rows, half = arguments.integers(
      function, "layout", layout, "two integers >= 1, (rows, columns)",
      lambda n: n >= 1)
  arguments.check_is_array(function, "w", w, optional=False)
  together = 16 // w.dtype.itemsize
  if 2 * half % together:
    raise arguments.bad(
        function, "layout", repr(layout),
        f"columns of which two are a multiple of {together}, for {w.dtype}")
  _check_matrix(function, "w", w, (rows, 2 * half))
  return rows, 2 * half, together


def shuffle_weight(w: jax.Array, layout: tuple[int, int] = (16, 16)
                   ) -> jax.Array:
  """A weight's elements in the order in which MFMA instructions take them.

  AITER's `shuffle_weight`: with tiles of `layout[0]` rows and `2 * layout[1]`
  columns, and runs of 16 bytes, `[n, k]` is seen as [n / rows, rows, k / cols,
  runs, run] and stored as [n / rows, k / cols, runs, rows, run]. There is no
  mark on the result: a function that takes a shuffled weight is told so by its
  argument `b_shuffled`. Packed 4-bit weights are shuffled as bytes.

  Args:
    w: [..., n, k], elements of 1, 2 or 4 bytes; n a multiple of `layout[0]`,
      k of `2 * layout[1]`.
    layout: rows of a tile and half of its columns.

  Returns:
    Shape and dtype of w.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: a shape that does not consist of tiles.
  """
  rows, cols, run = _weight_tiles("shuffle_weight", w, layout)
  *lead, n, k = w.shape
  tiles = w.reshape(*lead, n // rows, rows, k // cols, cols // run, run)
  return jnp.moveaxis(tiles, -4, -2).reshape(w.shape)


def unshuffle_weight(w: jax.Array, layout: tuple[int, int] = (16, 16)
                     ) -> jax.Array:
  """The inverse of `shuffle_weight`.

  Args:
    w: as shuffle_weight returned it.
    layout: as it was given.

  Returns:
    Shape and dtype of w.

  Raises:
    TypeError: as shuffle_weight.
    ValueError: as shuffle_weight.
  """
  rows, cols, run = _weight_tiles("unshuffle_weight", w, layout)
  *lead, n, k = w.shape
  tiles = w.reshape(*lead, n // rows, k // cols, cols // run, rows, run)
  return jnp.moveaxis(tiles, -2, -4).reshape(w.shape)


def shuffle_scale(scale: jax.Array) -> jax.Array:
  """E8M0 scales in the order in which scaled MFMA instructions take them.

  AITER's `e8m0_shuffle`: rows are padded to a multiple of 256 and columns to
  one of 8, with zeros; then [m, g], seen as [m / 32, 2, 16, g / 8, 2, 4], is
  stored as [m / 32, g / 8, 4, 16, 2, 2], in the order 0, 3, 5, 2, 4, 1.

  Args:
    scale: uint8 [..., m, g].

  Returns:
    uint8 [..., m up to a multiple of 256, g up to a multiple of 8].

  Raises:
    TypeError: scale is no array.
    ValueError: scale has no two dimensions.
  """
  _check_matrix("shuffle_scale", "scale", scale, (1, 1))
  *lead, m, g = scale.shape
  whole = [dims.round_up(n, tile) for n, tile in zip((m, g), _SCALE_TILE)]
  scale = jnp.pad(scale, [(0, 0)] * len(lead) + [
      (0, after - before) for before, after in zip((m, g), whole)])
  m, g = whole
  tiles = scale.reshape(*lead, m // 32, 2, 16, g // 8, 2, 4)
  return _permuted(tiles, (0, 3, 5, 2, 4, 1)).reshape(*lead, m, g)


def unshuffle_scale(scale: jax.Array, shape: tuple[int, int] | None = None
                    ) -> jax.Array:
  """The inverse of `shuffle_scale`.

  Args:
    scale: uint8 [..., m, g] as shuffle_scale returned it.
    shape: rows and columns without padding; all by default.

  Returns:
    uint8 [..., *shape].

  Raises:
    TypeError: scale is no array.
    ValueError: scale does not consist of tiles, or is smaller than shape.
  """
  _check_matrix("unshuffle_scale", "scale", scale, _SCALE_TILE)
  *lead, m, g = scale.shape
  rows, cols = (m, g) if shape is None else arguments.two_sizes(
      "unshuffle_scale", "shape", shape)
  if not (dims.at_most(rows, m) and dims.at_most(cols, g)):
    raise arguments.bad("unshuffle_scale", "shape", tuple(shape),
                        f"at most {(m, g)}, the shape of scale")
  tiles = scale.reshape(*lead, m // 32, g // 8, 4, 16, 2, 2)
  whole = _permuted(tiles, (0, 5, 3, 1, 4, 2)).reshape(*lead, m, g)
  return whole[..., :rows, :cols]
