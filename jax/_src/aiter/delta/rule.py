# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, a chunk of tokens at a time.

A head's state S [K, V] is a memory: a token forgets some of it, reads what is
kept at its key, and writes there what its value has beside that (Yang et al.,
"Gated Delta Networks", arXiv:2412.06464). Of a chunk's tokens all but the
state is products of its rows, made for all chunks at once; a scan takes the
state from chunk to chunk. XLA has good kernels for both, so there are none of
ours.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core import dims
from jax._src.aiter.core.partition import vary_together


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


def _inverse(a):
  """(1 + a)^-1 for a [.., c, c] of zeros on and above the diagonal.

  Of diagonal blocks of size 1 first, then two by two: a block below two others
  is minus their inverses around it. Powers of `a`, of which the inverse is a
  sum, would grow where keys are alike.
  """
  c = a.shape[-1]
  i, j = (lax.broadcasted_iota(jnp.int32, (c, c), axis) for axis in (0, 1))
  inverse = jnp.broadcast_to(jnp.eye(c, dtype=a.dtype), a.shape)
  size = 1
  while size < c:
    below = (i // size == j // size + 1) & (j // size % 2 == 0)
    inverse -= inverse @ jnp.where(below, a, 0) @ inverse
    size *= 2
  return inverse


def _of_chunks(cfg: Config, x: Rows, states, sequence=None):
  """The rule of chunks, one after the other.

  Args:
    cfg: static facts.
    x: [n, c, ...]. A token whose k, beta and g are 0 leaves the state alone.
    states: float32 [sequences, hv, dk, dv], before the first token.
    sequence: int32 [n], whose state a chunk has; None of one for all.

  Returns:
    (out [n * c, hv, dv], states behind the last), both of the states' dtype.
  """
  n, c, h, dk = x.q.shape
  _, hv, _, dv = states.shape
  q, k, v, g, beta = (t.astype(states.dtype) for t in x)
  if cfg.norm:
    q, k = _unit(q), _unit(k)
  heads = lambda t: t.reshape(n, c, h, hv // h, *t.shape[3:])
  v, g, beta = heads(v), heads(g), heads(beta)[..., None]
  dot = functools.partial(
      jnp.einsum, precision="highest" if x.v.dtype.itemsize > 2 else None)

  g = jnp.cumsum(g, axis=1)
  of_all = jnp.moveaxis(g[..., 0], 1, -1)
  between = of_all[..., None] - of_all[..., None, :]
  i, j = (lax.broadcasted_iota(jnp.int32, (c, c), axis) for axis in (0, 1))
  kept = jnp.exp(jnp.where(i >= j, between, -jnp.inf))
  alike = dot("nihk,njhk->nhij", k, k)[:, :, None] * kept
  alike *= jnp.moveaxis(beta, 1, -2)
  with jax.default_matmul_precision("highest"):
    solved = _inverse(jnp.where(i > j, alike, 0))
  wide_k, wide_q = k[:, :, :, None], q[:, :, :, None] * cfg.scale
  written = dot("nhrij,njhrv->nhriv", solved, v * beta)
  read_at = dot("nhrij,njhrk->nhrik", solved, wide_k * beta * jnp.exp(g))
  seen = dot("nihk,njhk->nhij", q * cfg.scale, k)[:, :, None] * kept
  last = g[:, -1:]

  def step(states, chunk):
    at, written, read_at, seen, q, k, left = chunk
    state = states[0] if at is None else lax.dynamic_index_in_dim(
        states, at, keepdims=False)
    state = state.reshape(h, hv // h, dk, dv)
    new = written - dot("hrik,hrkv->hriv", read_at, state)
    out = dot("ihrk,hrkv->ihrv", q, state) + dot("hrij,hrjv->ihrv", seen, new)
    state = state * left[..., None] + dot("ihrk,hriv->hrkv", k, new)
    state = state.reshape(hv, dk, dv)
    return (state[None] if at is None else lax.dynamic_update_index_in_dim(
        states, state, at, 0)), out

  states, out = lax.scan(step, states, (
      sequence, written, read_at, seen, wide_q * jnp.exp(g),
      wide_k * jnp.exp(last - g), jnp.exp(last[:, 0])))
  return out.reshape(n * c, hv, dv), states


def _of_one(cfg: Config, x: Rows, state):
  """(out [t, hv, dv], state) of one sequence and its state [hv, dk, dv]."""
  t = x.q.shape[0]
  chunks = (t + cfg.chunk - 1) // cfg.chunk
  cut = lambda a: jnp.pad(
      a, ((0, chunks * cfg.chunk - t), *[(0, 0)] * (a.ndim - 1))).reshape(
          chunks, cfg.chunk, *a.shape[1:])
  out, states = _of_chunks(cfg, Rows(*map(cut, x)), state[None])
  return out[:t], states[0]


def dense(cfg: Config, x: Rows, states):
  """The rule of sequences [b, t, ...]; states [b, ...]."""
  t = x.q.shape[1]
  if dims.is_known(t):
    cfg = cfg._replace(chunk=min(cfg.chunk, 1 << max(t - 1, 0).bit_length()))
  return jax.vmap(functools.partial(_of_one, cfg))(
      *vary_together((x, states)))


def _of_tokens(cfg: Config, x: Rows, states, cu):
  """`packed` of sequences of at most a token, all at once."""
  begin = jnp.where(cu[1:] > cu[:-1], cu[:-1], -1)
  out, states = dense(
      cfg, Rows(*(_take(a, begin)[:, None] for a in x)), states)
  row = jnp.arange(x.q.shape[0], dtype=jnp.int32)
  place = jnp.where(row < cu[-1], dims.last_start(cu[:-1], row), -1)
  return _take(out[:, 0], place), states


def _of_sequences(cfg: Config, x: Rows, states, cu):
  """`packed`, one sequence after the other."""
  t, n, c = x.q.shape[0], states.shape[0], cfg.chunk
  # A chunk has tokens of one sequence. There is room for as many as there could
  # be; one without a token leaves every state as it is.
  ends = jnp.cumsum((jnp.diff(cu) + c - 1) // c, dtype=jnp.int32)
  firsts = jnp.append(jnp.zeros(1, jnp.int32), ends)
  number = jnp.arange((t + n * (c - 1)) // c, dtype=jnp.int32)
  sequence = jnp.minimum(dims.last_start(ends, number) + 1, n - 1)
  token = cu[sequence] + (number - firsts[sequence]) * c
  token = token[:, None] + jnp.arange(c, dtype=jnp.int32)
  token = jnp.where(token < cu[sequence + 1][:, None], token, -1)
  out, states = _of_chunks(
      cfg, Rows(*(_take(a, token) for a in x)), states, sequence)
  row = jnp.arange(t, dtype=jnp.int32)
  own = dims.last_start(cu[:-1], row)
  place = jnp.where(row < cu[-1], firsts[own] * c + row - cu[own], -1)
  return _take(out, place), states


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
