# SPDX-License-Identifier: Apache-2.0
"""Orders of a sequence's tokens that give devices equal shares of a triangle.

Of causal attention to a sequence cut in n equal pieces, the last device has
2n - 1 times the work of the first. So a device gets

* "zigzag": chunks i and 2n - 1 - i of 2n (Llama 3's training,
  arXiv:2407.21783, section 3.3.2; TransformerEngine's DualChunkSwap), or
* "striped": each n-th token, from the i-th on (Striped Attention,
  arXiv:2311.09431).
"""

from __future__ import annotations

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad

STRATEGIES = ("zigzag", "striped")


def check_length(function: str, name: str, length: int, strategy: str,
                 size: int) -> None:
  """Raises ValueError if a sequence cannot be dealt to so many devices."""
  parts = 2 * size if strategy == "zigzag" else size
  if length % parts:
    raise bad(function, name, length,
              f"a multiple of {parts} for {strategy!r} over {size} devices")


def reordered(x, strategy: str, size: int, axis: int):
  """See reorder_causal_load_balancing."""
  a, n = axis, x.shape[axis]
  before, after = x.shape[:a], x.shape[a + 1:]
  if strategy == "striped":
    x = jnp.swapaxes(x.reshape(*before, n // size, size, *after), a, a + 1)
  else:
    x = x.reshape(*before, 2, size, n // (2 * size), *after)
    first, last = (jax.lax.index_in_dim(x, i, a, keepdims=False)
                   for i in (0, 1))
    x = jnp.stack([first, jnp.flip(last, a)], a + 1)
  return x.reshape(*before, n, *after)


def restored(x, strategy: str, size: int, axis: int):
  """See inverse_reorder_causal_load_balancing."""
  a, n = axis, x.shape[axis]
  before, after = x.shape[:a], x.shape[a + 1:]
  if strategy == "striped":
    x = jnp.swapaxes(x.reshape(*before, size, n // size, *after), a, a + 1)
  else:
    x = x.reshape(*before, size, 2, n // (2 * size), *after)
    first, last = (jax.lax.index_in_dim(x, i, a + 1, keepdims=False)
                   for i in (0, 1))
    x = jnp.stack([first, jnp.flip(last, a)], a)
  return x.reshape(*before, n, *after)


def rows_before(place, strategy: str | None, size: int, device, rows: int):
  """How many of a device's rows come before a place in the sequence.

  Args:
    place: int32, of any shape.
    strategy: None, "zigzag" or "striped".
    size: number of devices.
    device: which of them, traced.
    rows: that each has.

  Returns:
    int32 like place.
  """
  def of_chunk(chunk, count):
    return jnp.clip(place - chunk * count, 0, count)
  if strategy == "striped":
    return jnp.clip((place - device + size - 1) // size, 0, rows)
  if strategy == "zigzag":
    half = rows // 2
    return of_chunk(device, half) + of_chunk(2 * size - 1 - device, half)
  return of_chunk(device, rows)


def places(strategy: str | None, size: int, device, rows: int):
  """int32 [rows]: where a device's rows stand in the sequence; see above."""
  row = jnp.arange(rows, dtype=jnp.int32)
  if strategy == "striped":
    return row * size + device
  if strategy == "zigzag":
    half = rows // 2
    return row + jnp.where(row < half, device * half,
                           (2 * size - 1 - device) * half - half)
  return row + device * rows


def _checked(function, x, strategy, size, axis):
  arguments.check_is_array(function, "x", x, optional=False)
  strategy = arguments.choice(function, "strategy", strategy, STRATEGIES)
  size = arguments.number(function, "size", size, "an integer >= 1",
                          lambda n: n >= 1, int)
  axis = arguments.number(
      function, "axis", axis, f"an axis of x, which has {x.ndim}",
      lambda a: -x.ndim <= a < x.ndim, int) % x.ndim
  check_length(function, f"x's axis {axis}", x.shape[axis], strategy, size)
  return x, strategy, size, axis


def reorder_causal_load_balancing(
    x: jax.Array, strategy: str, size: int, axis: int = 1) -> jax.Array:
  """Puts tokens into the order whose equal pieces are devices' shares.

  Args:
    x: any array.
    strategy: "zigzag" or "striped"; see context_parallel_attention.
    size: number of devices, of two mesh axes those of axis_name[1] there;
      divides x.shape[axis], for "zigzag" twice.
    axis: the sequence's.

  Returns:
    An array like x, to be divided along `axis` as arrays are.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: a value that is not accepted; the message names it.
  """
  return reordered(*_checked(
      "reorder_causal_load_balancing", x, strategy, size, axis))


def inverse_reorder_causal_load_balancing(
    x: jax.Array, strategy: str, size: int, axis: int = 1) -> jax.Array:
  """Undoes `reorder_causal_load_balancing`.

  Args:
    x: an array in that function's order.
    strategy: as there.
    size: as there.
    axis: as there.

  Returns:
    An array like x, tokens as they follow each other.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: a value that is not accepted; the message names it.
  """
  return restored(*_checked(
      "inverse_reorder_causal_load_balancing", x, strategy, size, axis))
