# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, a chunk of tokens at a time.

A head's state S [K, V] is a memory: a token forgets some of it, reads what is
kept at its key, and writes there what its value has beside that (Yang et al.,
"Gated Delta Networks", arXiv:2412.06464). Of a chunk's tokens all but the
state is products of its rows, made for all chunks at once. The state goes from
chunk to chunk, which is many small kernels one behind the other; so chunks are
put into groups, side by side. What a group makes of any state is found first,
then the state before each, then results. XLA has good kernels for products, so
there are none of ours.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core import dims
from jax._src.aiter.core.partition import vary_together

# Diagonal blocks of so many rows are inverted with a mask, larger ones by their
# blocks.
_SMALL = 16
# A state's products, of one head, that fill a GPU when they are side by side.
_SIDE_BY_SIDE = 1024


class Config(NamedTuple):
  """Static facts: a factor on q, whether q and k are normed, and the chunk."""
  scale: float
  norm: bool
  chunk: int


class Rows(NamedTuple):
  """Arrays of a call, [t, ...] or more axes instead of t.

  Attributes:
    q: [t, h, dk].
    k: [t, h, dk].
    v: [t, hv, dv], hv a multiple of h.
    g: float32 [t, hv, 1 | dk], logarithms of what is kept; of every channel its
      own only where the chunk is one token.
    beta: float32 [t, hv], shares that are written.
  """
  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array


def _take(t, at):
  """Rows of t, none twice; 0 for what is negative."""
  return t.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False,
                      unique_indices=True)


def _unit(t):
  return t * lax.rsqrt(jnp.sum(t * t, -1, keepdims=True) + 1e-6)


def _blocks(a, size, below):
  """[.., n, size, size] of a [.., c, c]: the blocks of its diagonal, or those
  below every second of them."""
  return jnp.stack([
      a[..., i + below * size:i + size + below * size, i:i + size]
      for i in range(0, a.shape[-1], size << below)], -3)


def _exactly(a, b):
  return jnp.matmul(a, b, precision="highest")


@jax.custom_jvp
def _inverse(a):
  """(1 + a)^-1 for a [.., c, c] of zeros on and above the diagonal.

  Of diagonal blocks of size 1 first, then two by two: a block below two others
  is minus their inverses around it. Powers of `a`, of which the inverse is a
  sum, would grow where keys are alike.
  """
  wanted = a.shape[-1]
  c = 1 << (wanted - 1).bit_length()
  a = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, c - wanted)] * 2)
  size, small = 1, min(c, _SMALL)
  blocks = _blocks(a, small, False)
  i, j = (lax.broadcasted_iota(jnp.int32, (small, small), n) for n in (0, 1))
  inverse = jnp.broadcast_to(jnp.eye(small, dtype=a.dtype), blocks.shape)
  while size < small:
    below = (i // size == j // size + 1) & (j // size % 2 == 0)
    inverse -= _exactly(_exactly(inverse, jnp.where(below, blocks, 0)), inverse)
    size *= 2
  while size < c:
    first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
    low = -_exactly(_exactly(second, _blocks(a, size, True)), first)
    inverse = jnp.concatenate([
        jnp.concatenate([first, jnp.zeros_like(first)], -1),
        jnp.concatenate([low, second], -1)], -2)
    size *= 2
  return inverse[..., 0, :wanted, :wanted]


@_inverse.defjvp
def _(primals, tangents):
  inverse = _inverse(*primals)
  return inverse, -_exactly(_exactly(inverse, *tangents), inverse)


class _Chunks(NamedTuple):
  """What chunks do to the states S that come to them, [.., h, hv / h, ..].

  They write `new = written - read @ S` at their keys, and their results are
  `q @ S + seen @ new`.

  Attributes:
    written: [.., c, dv].
    read: [.., c, dk].
    k: [.., c, dk].
    kept: [.., 1 | dk, 1], shares of S.
    q: [.., c, dk].
    seen: [.., c, c].
  """
  written: jax.Array
  read: jax.Array
  k: jax.Array
  kept: jax.Array
  q: jax.Array
  seen: jax.Array


class _Places(NamedTuple):
  """Where chunks of packed sequences are: sequences, and which are an end."""
  sequence: jax.Array
  first: jax.Array
  last: jax.Array


def _dot(dtype):
  """einsum of x's dtype: of 16 bits into float32."""
  return functools.partial(
      jnp.einsum, preferred_element_type=jnp.promote_types(dtype, jnp.float32),
      precision="highest" if dtype.itemsize > 2 else None)


def _chunks(cfg: Config, x: Rows) -> _Chunks:
  """Of x [.., c, ...]."""
  wide = jnp.promote_types(x.v.dtype, jnp.float32)
  # Heads before tokens, while numbers have 16 bits.
  q, k, v, g, beta = (jnp.swapaxes(t, -3, -2).astype(wide)
                      for t in (*x[:4], x.beta[..., None]))
  if cfg.norm:
    q, k = _unit(q), _unit(k)
  q *= cfg.scale
  h, c = q.shape[-3:-1]
  v, g, beta = (t.reshape(*t.shape[:-3], h, -1, *t.shape[-2:])
                for t in (v, g, beta))
  narrow = lambda t: t.astype(_narrow(cfg, x))
  dot = _dot(x.v.dtype)
  pairs = lambda a, b: dot(
      "...ik,...jk->...ij", narrow(a), narrow(b))[..., None, :, :]

  g = jnp.cumsum(g, axis=-2)
  between = g[..., 0, None] - g[..., None, :, 0]
  i, j = (lax.broadcasted_iota(jnp.int32, (c, c), axis) for axis in (0, 1))
  kept = jnp.exp(jnp.where(i >= j, between, -jnp.inf))
  solved = narrow(_inverse(jnp.where(i > j, pairs(k, k) * kept * beta, 0)))
  seen = pairs(q, k) * kept
  q, k = q[..., None, :, :], k[..., None, :, :]
  last = g[..., -1:, :]
  times = lambda t: narrow(
      dot("...ij,...jk->...ik", solved, narrow(t * beta)))
  return _Chunks(
      times(v), times(k * jnp.exp(g)), narrow(k * jnp.exp(last - g)),
      jnp.swapaxes(jnp.exp(last), -1, -2), narrow(q * jnp.exp(g)), narrow(seen))


def _narrow(cfg: Config, x: Rows):
  """What is multiplied: bfloat16 of bfloat16, but for a token's own state."""
  if cfg.chunk > 1 and x.v.dtype == jnp.bfloat16:
    return x.v.dtype
  return jnp.promote_types(x.v.dtype, jnp.float32)


def _write(dot, chunk: _Chunks, state):
  """(state behind a chunk, what it wrote)."""
  new = chunk.written - dot(
      "...ik,...kv->...iv", chunk.read, state.astype(chunk.read.dtype))
  new = new.astype(chunk.k.dtype)
  return state * chunk.kept + dot("...ik,...iv->...kv", chunk.k, new), new


def _begun(states, state, at: _Places | None):
  """A state, or of chunks that begin a sequence its own, behind zeros."""
  if at is None:
    return state
  own = states[at.sequence]
  own = jnp.pad(own, ((0, 0),) * (own.ndim - 1) + (
      (state.shape[-1] - own.shape[-1], 0),))
  return jnp.where(at.first[..., None, None, None, None],
                   own.reshape(state.shape), state)


def _before_groups(dot, x: _Chunks, states, at: _Places | None):
  """The state before each group, [b, groups, ...].

  A group makes A @ S + B of any state S that comes to it. [A | B], of all
  groups, is what it makes of the state [1 | 0] of more columns.
  """
  dk, dv = x.read.shape[-1], x.written.shape[-1]
  shape = (*x.read.shape[1:-2], dk)
  both = jnp.broadcast_to(jnp.eye(dk, dk + dv, dtype=states.dtype),
                          (*shape, dk + dv))
  behind = lambda t: jnp.pad(t, ((0, 0),) * (t.ndim - 1) + ((dk, 0),))

  def step(both, chunk):
    chunk, at = chunk
    chunk = chunk._replace(written=behind(chunk.written))
    return _write(dot, chunk, _begun(states, both, at))[0], None

  both, _ = lax.scan(step, vary_together((both, x))[0], (x, at))
  start = jnp.zeros((*shape, dv), states.dtype)[:, 0]
  if at is None:
    start = states.reshape(start.shape)

  def next_group(state, both):
    return _exactly(both[..., :dk], state) + both[..., dk:], state

  _, before = lax.scan(next_group, vary_together((start, x))[0],
                       jnp.moveaxis(both, 1, 0))
  return jnp.moveaxis(before, 0, 1)


def _walk(cfg: Config, x: Rows, states, at: _Places | None = None):
  """The rule of chunks.

  Args:
    cfg: static facts.
    x: [chunks of a group, b, groups, c, ...], groups one behind the other. A
      token whose k, beta and g are 0 leaves the state alone.
    states: float32 [sequences, hv, dk, dv], before the first token.
    at: [chunks of a group, b, groups], or None of b sequences.

  Returns:
    (out [b, groups, chunks of a group, c, hv, dv], states behind the last).
  """
  dot = _dot(x.v.dtype)
  chunks = _chunks(cfg, x)
  shape = (*chunks.read.shape[1:-2], *states.shape[2:])
  if x.v.shape[2] == 1:
    state = states if at is None else jnp.zeros_like(states[:1])
    state = state.reshape(shape)
  else:
    state = _before_groups(dot, chunks, states, at)

  def step(carry, chunk):
    state, behind = carry
    chunk, at = chunk
    before = _begun(states, state, at)
    state, new = _write(dot, chunk, before)
    out = dot("...ik,...kv->...iv", chunk.q, before.astype(chunk.q.dtype))
    out += dot("...ij,...jv->...iv", chunk.seen, new)
    if at is not None:
      place = jnp.where(at.last, at.sequence, states.shape[0])
      behind = behind.at[place].set(
          state.reshape(*place.shape, *states.shape[1:]), mode="drop")
    return (state, behind), out.astype(x.v.dtype)

  (state, behind), out = lax.scan(step, (state, states), (chunks, at))
  if at is None:
    behind = state[:, -1].reshape(states.shape)
  out = jnp.transpose(out, (1, 2, 0, 5, 3, 4, 6))
  return out.reshape(*out.shape[:4], -1, out.shape[-1]), behind


def _in_groups(chunks, heads):
  """(chunks of a group, groups) of chunks, of so many heads side by side."""
  # A group costs twice what results do: few are not worth it.
  if dims.is_known(chunks) and dims.is_known(heads) and chunks >= 32:
    groups = min(math.isqrt(2 * chunks), _SIDE_BY_SIDE // heads)
    if groups >= 4:
      size = -(-chunks // groups)
      return size, -(-chunks // size)
  return chunks, 1


def dense(cfg: Config, x: Rows, states):
  """The rule of sequences [b, t, ...]; states [b, ...]."""
  b, t = x.q.shape[:2]
  if dims.is_known(t):
    cfg = cfg._replace(chunk=min(cfg.chunk, 1 << max(t - 1, 0).bit_length()))
  size, groups = _in_groups((t + cfg.chunk - 1) // cfg.chunk, b * x.v.shape[2])
  tokens = size * groups * cfg.chunk
  cut = lambda a: jnp.moveaxis(jnp.pad(
      a, ((0, 0), (0, tokens - t), *[(0, 0)] * (a.ndim - 2))).reshape(
          b, groups, size, cfg.chunk, *a.shape[2:]), 2, 0)
  out, states = _walk(cfg, Rows(*map(cut, x)), states)
  return out.reshape(b, tokens, *x.v.shape[2:])[:, :t], states


def _of_tokens(cfg: Config, x: Rows, states, cu):
  """`packed` of sequences of at most a token, all at once."""
  begin = jnp.where(cu[1:] > cu[:-1], cu[:-1], -1)
  out, states = dense(
      cfg, Rows(*(_take(a, begin)[:, None] for a in x)), states)
  row = jnp.arange(x.q.shape[0], dtype=jnp.int32)
  place = jnp.where(row < cu[-1], dims.last_start(cu[:-1], row), -1)
  return _take(out[:, 0], place), states


def _of_sequences(cfg: Config, x: Rows, states, cu):
  """`packed`, in chunks that have tokens of one sequence each."""
  t, n, c = x.q.shape[0], states.shape[0], cfg.chunk
  # There is room for as many as there could be; one without a token leaves
  # every state as it is.
  ends = jnp.cumsum((jnp.diff(cu) + c - 1) // c, dtype=jnp.int32)
  firsts = jnp.append(jnp.zeros(1, jnp.int32), ends)
  size, groups = _in_groups((t + n * (c - 1)) // c, x.v.shape[1])
  number = jnp.arange(size * groups, dtype=jnp.int32)
  sequence = jnp.minimum(dims.last_start(ends, number) + 1, n - 1)
  token = cu[sequence] + (number - firsts[sequence]) * c
  token = token[:, None] + jnp.arange(c, dtype=jnp.int32)
  token = jnp.where(token < cu[sequence + 1][:, None], token, -1)
  at = _Places(sequence, number == firsts[sequence],
               number == ends[sequence] - 1)
  cut = lambda a: jnp.swapaxes(a.reshape(groups, size, *a.shape[1:]), 0, 1)[
      :, None]
  token, at = cut(token), _Places(*map(cut, at))
  out, states = _walk(cfg, Rows(*(_take(a, token) for a in x)), states, at)
  row = jnp.arange(t, dtype=jnp.int32)
  own = dims.last_start(cu[:-1], row)
  place = jnp.where(row < cu[-1], firsts[own] * c + row - cu[own], -1)
  return _take(out.reshape(size * groups * c, *x.v.shape[1:]), place), states


def packed(cfg: Config, x: Rows, states, cu):
  """The rule of sequences that are packed in one axis, [t, ...].

  Args:
    cfg: static facts.
    x: [t, ...].
    states: [n, ...].
    cu: int32 [n + 1], cumulative lengths; rows behind the last give 0.
  """
  # A step of decoding is no chunk a sequence, one after the other.
  return lax.cond(
      jnp.all(jnp.diff(cu) <= 1), functools.partial(_of_tokens, cfg),
      functools.partial(_of_sequences, cfg), *vary_together((x, states, cu)))
