# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution of each channel before linear attention.

A token's result is of itself and the few tokens before it: those of its own
sequence, and at the beginning what an earlier call left behind. XLA has the
taps in one pass, so there is no kernel.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core import arguments, dims
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.partition import vary_together

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_MOST_TAPS = 16


def _sum(taps, weight, bias, silu, dtype):
  """The taps, oldest first, weighed by [dim, w]; dim is their last axis."""
  wide = jnp.promote_types(dtype, jnp.float32)
  out = 0 if bias is None else bias.astype(wide)
  for j, tap in enumerate(taps):
    out += tap.astype(wide) * weight[:, j].astype(wide)
  return (jax.nn.silu(out) if silu else out).astype(dtype)


def _of_line(silu, line, weight, bias, dtype):
  """Of what came before and tokens in one line [.., dim, before + t]."""
  t = line.shape[-1] - weight.shape[1] + 1
  taps = (jnp.swapaxes(line[..., j:j + t], -1, -2)
          for j in range(weight.shape[1]))
  return jnp.swapaxes(_sum(taps, weight, bias, silu, dtype), -1, -2)


def _of_sequences(silu, x, weight, bias, states, cu):
  """Of sequences packed in x [t, dim]; states [n, w - 1, dim], oldest first."""
  t, (dim, w) = x.shape[0], weight.shape
  n, s = states.shape[:2]
  row = jnp.arange(t, dtype=jnp.int32)
  own = dims.last_start(cu[:-1], row)
  place = row - cu[own]
  flat = states.reshape(n * s, dim)

  def tap(before):
    """x `before` tokens ago, or of the state."""
    if not before:
      return x
    earlier = jnp.pad(x, ((before, 0), (0, 0)))[:t]
    # Of a known index into what may be nothing: within bounds where it counts.
    at = jnp.clip(own * s + s + place - before, 0, n * s - 1)
    return jnp.where((place >= before)[:, None], earlier, flat[at])

  out = _sum(map(tap, range(w - 1, -1, -1)), weight, bias, silu, x.dtype)
  out = jnp.where((row < cu[-1])[:, None], out, 0)
  # The state is the end of what it was and the sequence's tokens.
  place = jnp.diff(cu)[:, None] - s + jnp.arange(s, dtype=jnp.int32)
  old = jnp.take_along_axis(
      states, jnp.clip(place + s, 0, max(s - 1, 0))[..., None], 1)
  new = x.at[jnp.where(place >= 0, cu[:-1, None] + place, -1)].get(
      mode="fill", fill_value=0, wrap_negative_indices=False)
  return out, jnp.where((place >= 0)[..., None], new, old)


def _silu(function, activation) -> bool:
  return arguments.choice(
      function, "activation", activation, (None, "silu", "swish")) is not None


def _check_taps(function, x, weight, bias, dim):
  """An error unless weights [dim, w] and bias [dim] are of x's channels."""
  arguments.check_dtype(function, "weight", weight, _FLOATS)
  if weight.ndim != 2 or weight.shape[0] != dim or not (
      1 <= weight.shape[1] <= _MOST_TAPS):
    raise bad(function, "weight", describe(weight),
              f"shape [{dim}, w], a row for each channel of x, w from 1 to"
              f" {_MOST_TAPS}")
  if bias is not None:
    arguments.check_dtype(function, "bias", bias, _FLOATS)
    if bias.shape != (dim,):
      raise bad(function, "bias", describe(bias), f"shape [{dim}]")


def _check_states(function, name, states, shape):
  arguments.check_dtype(function, name, states, _FLOATS)
  if states.shape != shape:
    raise bad(function, name, describe(states), f"shape {list(shape)}")


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _conv(function, silu, x, weight, bias, states, cu):
  """(out, states) in the public function's layout."""
  accepted = "shape [b, dim, t]" if cu is None else "shape [dim, t]"
  if x.ndim != (3 if cu is None else 2):
    raise bad(function, "x", describe(x), accepted)
  dim, t = x.shape[-2:]
  _check_taps(function, x, weight, bias, dim)
  if cu is None:
    n = x.shape[0]
  else:
    arguments.check_integers(function, "cu_seqlens", cu)
    if cu.ndim != 1 or cu.shape[0] < 1:
      raise bad(function, "cu_seqlens", describe(cu), "shape [n + 1]")
    n = cu.shape[0] - 1
  s = weight.shape[1] - 1
  if states is None:
    states = jnp.zeros((n, dim, s), x.dtype)
  _check_states(function, "initial_states", states, (n, dim, s))
  if 0 in (n, dim, t):
    return jnp.zeros_like(x), states
  if cu is None:
    line = jnp.concatenate([states, x], 2)
    return (_of_line(silu, line, weight, bias, x.dtype),
            line[:, :, t:].astype(states.dtype))
  # Of lengths that only the device sees all are held inside the rows.
  cu = lax.cummax(jnp.clip(arguments.int32(cu), 0, t))
  out, new = _of_sequences(silu, *vary_together((
      x.T, weight, bias, jnp.swapaxes(states, 1, 2), cu)))
  return out.T, jnp.swapaxes(new, 1, 2).astype(states.dtype)


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    initial_states: jax.Array | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
    *,
    cu_seqlens: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """A short causal convolution of each channel, and an activation.

  out[c, t] = act(bias[c] + sum of weight[c, j] * x[c, t - (w - 1) + j]), in
  float32. Differentiable.

  Args:
    x: [b, dim, t], float16, bfloat16, float32 or float64; [dim, t] with
      cu_seqlens.
    weight: [dim, w], w from 1 to 16.
    bias: [dim], or None.
    initial_states: [b, dim, w - 1], the values before the first, oldest first;
      [n, dim, w - 1] with cu_seqlens. None is 0.
    return_final_states: whether to return the same behind the last.
    activation: None, "silu" or "swish", which is the same.
    cu_seqlens: integers [n + 1], cumulative lengths of sequences packed in
      t. Behind the last one there is 0.

  Returns:
    An array like x; with return_final_states a tuple of it and the states, like
    initial_states, in x's dtype without them.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "causal_conv1d"
  arguments.check_dtype(function, "x", x, _FLOATS)
  arguments.check_is_array(function, "weight", weight, optional=False)
  for name, t in (("bias", bias), ("initial_states", initial_states),
                  ("cu_seqlens", cu_seqlens)):
    arguments.check_is_array(function, name, t)
  final = arguments.flag(function, "return_final_states", return_final_states)
  if x.ndim == 2:
    arguments.check_cumulative(function, "cu_seqlens", cu_seqlens, x.shape[1])
  out, states = _conv(function, _silu(function, activation), x, weight, bias,
                      initial_states, cu_seqlens)
  return (out, states) if final else out


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _update(function, silu, x, pool, weight, bias, lengths, slots, pad):
  if x.ndim not in (2, 3):
    raise bad(function, "x", describe(x), "shape [b, dim] or [b, dim, t]")
  rows = x[..., None] if x.ndim == 2 else x
  b, dim, t = rows.shape
  _check_taps(function, x, weight, bias, dim)
  if pool.ndim != 3 or pool.shape[1] != dim or (
      pool.shape[2] < weight.shape[1] - 1) or (
          slots is None and pool.shape[0] != b):
    raise bad(function, "conv_state", describe(pool),
              f"shape [{'slots' if slots is not None else b}, {dim}, at least"
              f" {weight.shape[1] - 1}]")
  for name, n in (("cache_seqlens", lengths), ("conv_state_indices", slots)):
    if n is not None:
      arguments.check_integers(function, name, n)
      if n.shape != (b,):
        raise bad(function, name, describe(n), f"shape [{b}]")
  count, _, s = pool.shape
  if 0 in (b, dim, t, count):
    return jnp.zeros_like(x), pool
  at = jnp.arange(b, dtype=jnp.int32)
  if slots is not None:
    at = arguments.int32(slots)
    there = (at >= 0) & (at < count) & (at != pad)
    at = jnp.where(there, at, count)
  state = pool.at[at].get(mode="fill", fill_value=0)
  column = jnp.arange(s, dtype=jnp.int32)
  turned = lambda state, by: jnp.take_along_axis(
      state, ((column + by[:, None]) % s)[:, None], 2)
  if lengths is not None and s:
    # The oldest of a ring is where the next one goes.
    lengths = arguments.int32(lengths) % s
    state = turned(state, lengths)
  line = jnp.concatenate([state.astype(x.dtype), rows], 2)
  out = _of_line(silu, line[:, :, s - weight.shape[1] + 1:], weight, bias,
                 x.dtype)
  if slots is not None:
    out = jnp.where(there[:, None, None], out, 0)
  # What stays of the state is not rounded to x's dtype and back.
  state = jnp.concatenate([state, rows.astype(pool.dtype)], 2)[:, :, t:]
  if lengths is not None and s:
    state = turned(state, -lengths - t)
  return out.reshape(x.shape), pool.at[at].set(state, mode="drop")


def causal_conv1d_update(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    activation: str | None = None,
    cache_seqlens: jax.Array | None = None,
    conv_state_indices: jax.Array | None = None,
    *,
    pad_slot_id: int = -1,
) -> tuple[jax.Array, jax.Array]:
  """`causal_conv1d` of a step of decoding, whose states are kept.

  Args:
    x: [b, dim], or [b, dim, t] of speculative steps.
    conv_state: [b, dim, s], s at least w - 1: the last s values of each
      sequence, oldest first. [slots, dim, s] with conv_state_indices. Donate
      it: it is written in place.
    weight: [dim, w], as there.
    bias: as there.
    activation: as there.
    cache_seqlens: integers [b], tokens that each sequence had before: states
      are rings then, token i at i % s. None: they move along.
    conv_state_indices: integers [b], the state of each sequence; no two alike.
      What names none has a result of 0 and no state.
    pad_slot_id: an index that names none, too.

  Returns:
    (an array like x, conv_state).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "causal_conv1d_update"
  for name, t in (("x", x), ("conv_state", conv_state)):
    arguments.check_dtype(function, name, t, _FLOATS)
  arguments.check_is_array(function, "weight", weight, optional=False)
  for name, t in (("bias", bias), ("cache_seqlens", cache_seqlens),
                  ("conv_state_indices", conv_state_indices)):
    arguments.check_is_array(function, name, t)
  pad = arguments.number(function, "pad_slot_id", pad_slot_id,
                         "an integer of 32 bits",
                         lambda n: -2**31 <= n < 2**31, int)
  return _update(function, _silu(function, activation), x, conv_state, weight,
                 bias, cache_seqlens, conv_state_indices, pad)
