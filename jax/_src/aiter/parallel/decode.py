# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: a sequence's pages are divided over devices.

Each device attends to the keys that it has, and partial results are joined by
their log-sum-exps. Tokens are dealt to devices in runs of `interleave`: a run
of one token is vLLM's and AITER's (`cp_rank`), one of a page deals pages, and
one that is longer than any sequence's share divides it at a few places.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad
from jax._src.aiter.paged import api as paged
from jax._src.aiter.paged import op

_LAYOUTS = ("NHD", "HND", "x", "asm")


def _positive(function: str, name: str, value, times: int = 1) -> int:
  """An integer that int32 holds, so many times."""
  most = (2**31 - 1) // times
  return arguments.number(
      function, name, value, f"an integer from 1 to {most}",
      lambda n: 1 <= n <= most, int)


def _tokens_before(place, size: int, rank, interleave: int):
  """How many of a sequence's first `place` tokens a device has."""
  rounds, rest = jnp.divmod(place, size * interleave)
  return rounds * interleave + jnp.clip(
      rest - rank * interleave, 0, interleave)


def context_parallel_positions(
    positions: jax.Array, *, size: int, rank: jax.Array | int,
    interleave: int = 1,
) -> jax.Array:
  """Where a device has a sequence's tokens, among its own of the sequence.

  With pages of p tokens a token of local position t belongs into slot
  `block_tables[i, t // p] * p + t % p` of the device's cache; of -1 nothing is
  written by the functions that take slots.

  Args:
    positions: integers of any shape, in the whole sequence.
    size: number of devices.
    rank: whose; an integer, which may be traced (`jax.lax.axis_index`).
    interleave: tokens of a run, as in `context_parallel_paged_decode`.

  Returns:
    int32 like positions: -1 for tokens that another device has.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: a value that is not accepted; the message names it.
  """
  name = "context_parallel_positions"
  arguments.check_is_array(name, "positions", positions, optional=False)
  arguments.check_integers(name, "positions", positions)
  size = _positive(name, "size", size)
  interleave = _positive(name, "interleave", interleave, size)
  if isinstance(rank, jax.Array):
    arguments.check_integers(name, "rank", rank)
    if rank.ndim:
      raise bad(name, "rank", arguments.describe(rank), "a single integer")
  else:
    rank = arguments.number(
        name, "rank", rank, f"an integer from 0 to size - 1, {size - 1}",
        lambda n: 0 <= n < size, int)
  positions = arguments.int32(jnp.asarray(positions))
  run = positions // interleave
  own = (positions >= 0) & (run % size == rank)
  return jnp.where(
      own, run // size * interleave + positions % interleave, -1)


def context_parallel_merge(
    output: jax.Array, lse: jax.Array, *, axis_name: str,
    sink: jax.Array | None = None, return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Attention to all devices' keys, of the attention to each one's.

  To be called in a `jax.shard_map` over axis_name. `merge_attn_states` is that
  of two results on one device.

  Args:
    output: [tokens, hq, dv], any floating dtype: to this device's keys, without
      a sink.
    lse: float32 [hq, tokens], as attention returns it; -inf where no key was
      seen, whose output does not count.
    axis_name: the mesh axis.
    sink: [hq], the logit of a key without a value; it counts once.
    return_lse: whether to return the joint lse, float32 [hq, tokens], too.

  Returns:
    [tokens, hq, dv] in output's dtype, the same on all devices; 0 where none
    saw a key.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape that cannot be; the message names it.
  """
  n = paged.Names("context_parallel_merge")
  return_lse = arguments.flag(n.function, "return_lse", return_lse)
  floats = ("float16", "bfloat16", "float32")
  paged.check_array(n, "output", output, 3, floats)
  paged.check_array(n, "lse", lse, 2, floats)
  tokens, hq, _ = output.shape
  paged.check_shape(n, "lse", lse, (hq, tokens), "[heads, tokens] of output")
  arguments.axis_size(n.function, "axis_name", axis_name)
  out, lse = _merged(axis_name, output, lse.astype(jnp.float32),
                     paged.per_head(n, "sink", sink, hq))
  return (out, lse) if return_lse else out


def _merged(axis_name, out, lse, sink):
  most = lax.pmax(lax.stop_gradient(lse), axis_name)
  if sink is not None:
    most = jnp.maximum(most, sink[:, None])
  most = jnp.where(most == -jnp.inf, 0, most)
  weight = jnp.exp(lse - most)
  total = lax.psum(weight, axis_name)
  if sink is not None:
    total += jnp.exp(sink[:, None] - most)
  seen = total > 0
  safe = jnp.where(seen, total, 1)
  share = (weight / safe).T[..., None]
  part = jnp.where(share > 0, out.astype(jnp.float32) * share, 0)
  return (lax.psum(part, axis_name).astype(out.dtype),
          jnp.where(seen, most + jnp.log(safe), -jnp.inf))


def _from_page(x: op.Operands, pages, size: int) -> op.Operands:
  """The call without so many leading pages of each sequence, int32 [b]."""
  width = x.table.shape[1]
  at = jnp.arange(width, dtype=jnp.int32) + pages[:, None]
  table = jnp.take_along_axis(x.table, jnp.minimum(at, width - 1), 1)
  return x._replace(
      table=jnp.where(at < width, table, -1),
      lengths=jnp.maximum(x.lengths - pages * size, 0))


def _within_page(cfg: op.Config, x: op.Operands, first):
  """(out, lse) of the keys from `first` [b] on to the end of its page.

  No kernel skips keys of a page; this is a page of each sequence.
  """
  shape = op.shape_of(cfg, x)
  b, hq, d = x.q.shape
  size = cfg.page_size
  index, offset = first // size, jnp.arange(size, dtype=jnp.int32)
  page = jnp.take_along_axis(
      x.table, jnp.clip(index, 0, x.table.shape[1] - 1)[:, None], 1)
  place = index[:, None] * size + offset
  seen = ((place >= first[:, None]) & (place < x.lengths[:, None])
          & (index < x.table.shape[1])[:, None]
          & (page >= 0) & (page < shape.pages))
  k, v = (t.reshape(b, size, *t.shape[1:]) for t in op.keys_and_values(
      cfg, x, shape, jnp.where(seen, page, shape.pages).reshape(-1),
      jnp.tile(offset, b)))
  q = x.q.astype(jnp.float32).reshape(b, shape.hk, -1, d)
  s = jnp.einsum("bhgd,bnhd->bhgn", q, k, precision=lax.Precision.HIGHEST)
  s *= cfg.softmax_scale
  if cfg.soft_cap:
    s = cfg.soft_cap * jnp.tanh(s / cfg.soft_cap)
  s = jnp.where(seen[:, None, None], s, -jnp.inf)
  m = s.max(-1, keepdims=True)
  p = jnp.exp(s - jnp.where(m == -jnp.inf, 0, m))
  total = p.sum(-1, keepdims=True)
  v = jnp.where(seen[..., None, None], v, 0)
  out = jnp.einsum("bhgn,bnhd->bhgd", p / jnp.where(total > 0, total, 1), v,
                   precision=lax.Precision.HIGHEST)
  return (out.reshape(b, hq, -1),
          (m + jnp.log(total)).reshape(b, hq).T)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _decode(s: paged.Static, axis: str, interleave: int, a: paged.Arrays):
  n, left = s.names, s.window[0]
  size, rank = lax.axis_size(axis), lax.axis_index(axis).astype(jnp.int32)
  cfg, x = paged.operands(
      s._replace(window=(-1, -1), return_lse=True), a._replace(sinks=None))
  sink = paged.per_head(n, n.sinks, a.sinks, x.q.shape[1])
  before = functools.partial(
      _tokens_before, size=size, rank=rank, interleave=interleave)
  total, x = x.lengths, x._replace(lengths=before(jnp.maximum(x.lengths, 0)))
  whole = x
  if left >= 0:
    first = before(jnp.maximum(total - 1 - left, 0))
    whole = _from_page(x, -(-first // cfg.page_size), cfg.page_size)
  out, lse = paged.run(n.function, cfg, whole)
  if left >= 0 and cfg.page_size > 1:
    cut = jnp.where(first % cfg.page_size, first, x.lengths)
    edge, edge_lse = _within_page(cfg, x, cut)
    out, lse = paged.merge_attn_states(
        out.astype(jnp.float32), lse, edge, edge_lse, return_lse=True)
  out, lse = _merged(axis, out, lse, sink)
  return out.astype(x.q.dtype), lse.T


def context_parallel_paged_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    axis_name: str,
    interleave: int = 1,
    softmax_scale: float | None = None,
    layout: str = "NHD",
    window_size: tuple[int, int] = (-1, -1),
    logits_soft_cap: float = 0.0,
    sink: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """`paged_attention_decode` of sequences whose tokens devices divide.

  To be called in a `jax.shard_map` over axis_name. Tokens are dealt in runs:
  token p of a sequence is device (p // interleave) % n's, in the order of the
  tokens; `context_parallel_positions` says where. Queries, lengths and results
  are the same on all devices; caches and tables are each one's own.

  Args:
    q: [b, hq, d], as in `paged_attention_decode`.
    k_cache: as there: pages of this device.
    v_cache: likewise.
    block_tables: integers [b, n], this device's pages of each sequence.
    context_lens: integers [b], tokens of each sequence on all devices.
    axis_name: the mesh axis.
    interleave: tokens of a run. 1 deals tokens, a page's size deals pages.
    softmax_scale: as there.
    layout: as there.
    window_size: as there, in tokens of the whole sequence. Pages before the
      window are not read.
    logits_soft_cap: as there.
    sink: as there; it counts once.
    k_scale: as there, of this device's cache.
    v_scale: likewise.
    return_lse: as there.

  Returns:
    As paged_attention_decode, the same on all devices.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  n = paged.Names("context_parallel_paged_decode")
  arguments.choice(n.function, "layout", layout, _LAYOUTS)
  size = arguments.axis_size(n.function, "axis_name", axis_name)
  s = paged.static(n, layout, softmax_scale, window_size, logits_soft_cap,
                   False, return_lse)
  interleave = _positive(n.function, "interleave", interleave, size)
  for name, t in ((n.q, q), (n.k, k_cache), (n.v, v_cache),
                  (n.table, block_tables), (n.lengths, context_lens)):
    arguments.check_is_array(n.function, name, t, optional=False)
  arguments.check_is_array(n.function, n.sinks, sink)
  for name, t in ((n.k_scale, k_scale), (n.v_scale, v_scale)):
    arguments.operand(n.function, name, t)
  out, lse = _decode(s, axis_name, interleave, paged.Arrays(
      q, k_cache, v_cache, block_tables, context_lens, sinks=sink,
      k_scale=k_scale, v_scale=v_scale))
  return (out, lse) if s.return_lse else out
