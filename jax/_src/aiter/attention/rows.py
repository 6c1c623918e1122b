# SPDX-License-Identifier: Apache-2.0
"""Queries that a mesh divides along the sequence, keys that all shards have.

What a shard does inside custom_partitioning, where an array's sequence is
divided and the call knows nothing of it. Each row's keys end at its own place,
so a part of the rows is a call of its own, told by the length of its keys. Of a
causal triangle the last rows have the most: a shard gives one half of its rows
away for another, so that each has a half from either end. Packed rows stay
where they are: a shard has a part of some sequences, and nothing of the others.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp

from jax import lax
from jax._src.aiter.attention.types import Config, Grads, Operands, Saved


def may_divide(cfg: Config, x: Operands) -> bool:
  """Whether a part of a call's rows is a call that the kernels serve."""
  aligned = cfg.window_left >= 0 or x.alibi_slopes is not None
  lengths = x.cu_seqlens_q is not None or x.cu_seqlens_k is not None
  return not (
      (cfg.keep_p if x.packed else lengths) or cfg.keep_bits
      or cfg.top_left or cfg.min_seqlen_q > 0
      or cfg.window_right > 0 or (cfg.window_right < 0 and aligned))


def axis_of(x: Operands) -> int:
  """The axis of rows, of q as of k."""
  return x.q.ndim - 3


def cumulative(counts):
  """int32 [n + 1] of numbers [n]."""
  return jnp.append(
      jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32))


def at_place(state, row, col=0):
  """A dropout state of rows and columns that others come before, or None.

  Args:
    state: uint32 [b, h, 6], as Operands has it, or None.
    row: int32 [] or [b], how many rows come before these.
    col: likewise of columns, a multiple of philox.COLUMNS.
  """
  if state is None:
    return None
  first = jnp.stack([jnp.broadcast_to(t, state.shape[:1]) for t in (row, col)],
                    axis=-1).astype(jnp.uint32)
  return state + jnp.pad(first, ((0, 0), (4, 0)))[:, None]


def shard_index(mesh, axes):
  """Linear index of this shard along a dimension sharded over axes."""
  index = jnp.int32(0)
  for a in axes:
    here = lax.axis_index(a).astype(jnp.int32)
    index = index * jnp.int32(mesh.shape[a]) + here
  return index


def keys_divide(mesh, axes, x: Operands) -> bool:
  """Whether each shard gets its own part of the gradients of keys."""
  return x.k.shape[axis_of(x)] % math.prod(mesh.shape[a] for a in axes) == 0


class _Halves:
  """The exchange of halves of rows: chunks i and 2n - 1 - i of 2n for shard i.

  A shard's chunks are 2i and 2i + 1 before. One exchange moves all that are
  even, one all that are odd.
  """

  def __init__(self, mesh, axes):
    self.axes, self.size = axes, math.prod(mesh.shape[a] for a in axes)
    self.index = shard_index(mesh, axes)

  def _moves(self, odd: int, back: bool):
    n = self.size
    moves = [(i, min(2 * i + odd, 2 * n - 1 - (2 * i + odd)))
             for i in range(n)]
    return [(b, a) for a, b in moves] if back else moves

  def place(self, odd: int):
    """Which of the 2n chunks this shard has of the even or odd ones."""
    other = 2 * self.size - 1 - self.index
    return jnp.where(self.index % 2 == odd, self.index, other)

  def taken(self, t, odd: int, axis: int):
    if t is None:
      return None
    half = t.shape[axis] // 2
    return lax.ppermute(
        lax.slice_in_dim(t, odd * half, (odd + 1) * half, axis=axis),
        self.axes, self._moves(odd, back=False))

  def given_back(self, parts, axis: int):
    return jnp.concatenate([
        lax.ppermute(t, self.axes, self._moves(odd, back=True))
        for odd, t in enumerate(parts)], axis)


def _packed_call(cfg: Config, mesh, axes, x: Operands) -> Operands:
  """Operands of a shard's rows of packed sequences."""
  rows, first = x.q.shape[0], x.cu_seqlens_q_padded
  begin = shard_index(mesh, axes) * rows
  starts = (x.cu_seqlens_q if first is None else first) - begin
  ends = starts[:-1] + jnp.diff(x.cu_seqlens_q)
  own, end = (jnp.clip(t, 0, rows) for t in (starts, ends))
  part = x._replace(
      cu_seqlens_q=cumulative(end - own[:-1]), cu_seqlens_q_padded=own,
      dropout_state=at_place(x.dropout_state, jnp.maximum(-starts[:-1], 0)))
  if cfg.window_right < 0:
    return part
  # A sequence's keys end as much before their end as its rows here do.
  behind = jnp.clip(ends - rows, 0, ends - starts[:-1])
  first = x.cu_seqlens_k_padded
  return part._replace(
      cu_seqlens_k=cumulative(
          jnp.maximum(jnp.diff(x.cu_seqlens_k) - behind, 0)),
      cu_seqlens_k_padded=x.cu_seqlens_k if first is None else first)


def _calls(cfg: Config, mesh, axes, x: Operands):
  """The calls of a shard's rows.

  Returns:
    (operands of each, the exchange of halves or None).
  """
  if x.packed:
    return [_packed_call(cfg, mesh, axes, x)], None
  rows, n = x.q.shape[1], math.prod(mesh.shape[a] for a in axes)
  count = jnp.arange(x.q.shape[0] + 1, dtype=jnp.int32)
  ahead = x.k.shape[1] - n * rows

  def call(q, first):
    part = x._replace(q=q, dropout_state=at_place(x.dropout_state, first))
    if cfg.window_right >= 0:
      end = jnp.maximum(first + q.shape[1] + ahead, 0)
      part = part._replace(cu_seqlens_k=end * count)
    return part

  planes = any(t is not None and t.shape[2] > 1 for t in (x.bias, x.mask))
  if cfg.window_right < 0 or planes or cfg.keep_p or rows % 2:
    return [call(x.q, shard_index(mesh, axes) * rows)], None
  halves = _Halves(mesh, axes)
  return [call(halves.taken(x.q, odd, 1), halves.place(odd) * (rows // 2))
          for odd in range(2)], halves


def forward(cfg: Config, run, mesh, axes, x: Operands):
  """(out, lse, p) of a shard's rows; `run` is that of one device."""
  calls, halves = _calls(cfg, mesh, axes, x)
  results = [run(call) for call in calls]
  if halves is None:
    return results[0]
  outs, lses, _ = zip(*results)
  return halves.given_back(outs, 1), halves.given_back(lses, 2), None


def backward(cfg: Config, run, mesh, axes, x: Operands, saved: Saved) -> Grads:
  """Gradients of a shard's rows, and of everything that all rows share."""
  calls, halves = _calls(cfg, mesh, axes, x)
  if halves is None:
    grads = [run(calls[0], saved)]
    dq = grads[0].dq
  else:
    grads = [
        run(call, Saved(
            halves.taken(saved.dout, odd, 1), halves.taken(saved.out, odd, 1),
            halves.taken(saved.lse, odd, 2), halves.taken(saved.dlse, odd, 2)))
        for odd, call in enumerate(calls)]
    dq = halves.given_back([g.dq for g in grads], 1)

  def shared(*parts, scatter=False):
    if parts[0] is None:
      return None
    wide = jnp.promote_types(parts[0].dtype, jnp.float32)
    total = functools.reduce(jnp.add, (t.astype(wide) for t in parts))
    total = lax.psum_scatter(
        total, axes, scatter_dimension=axis_of(x),
        tiled=True) if scatter else lax.psum(total, axes)
    return total.astype(parts[0].dtype)

  own_bias = x.bias is not None and x.bias.shape[2] > 1
  return Grads(
      dq, *(shared(*t, scatter=keys_divide(mesh, axes, x))
            for t in zip(*(g[1:3] for g in grads))),
      grads[0].dbias if own_bias else shared(*(g.dbias for g in grads)),
      *(shared(*t) for t in zip(*(g[4:] for g in grads))))
