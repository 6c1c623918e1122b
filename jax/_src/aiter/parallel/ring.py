# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values go round, queries stay.

In step t a device has the keys of the one t places before it. What of them its
queries see is, in each order of tokens, one or a few blocks of attention that
are causal, full or empty; whether full or empty is known on the device alone,
and said by a length, so that all devices run one program. Partial results are
joined by their log-sum-exps (Ring Attention, arXiv:2310.01889). Backward, keys
and values go round once more and take their gradients along.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.attention import op as mha_op
from jax._src.aiter.attention import reference
from jax._src.aiter.attention.types import (
  Config,
  Operands,
  Saved,
  Wanted,
)
from jax._src.aiter.core.derivative import differentiable, formula_jvp
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.paged.api import merge_attn_states


class RingConfig(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    mha: those of attention; its window is the whole sequence's.
    axis: the mesh axis.
    size: of it.
    order: None, "zigzag" or "striped", as order.py has them.
  """
  mha: Config
  axis: str
  size: int
  order: str | None


class _Block(NamedTuple):
  """Queries and visiting keys that one call of attention joins.

  Attributes:
    rows: first and last + 1 of the device's queries.
    cols: likewise of the keys.
    window: of the call, (left, right), aligned at the last visible key.
    length: how many of the keys are visible, traced; None for all.
    distance: tokens from a query back to the key it is aligned with.
  """
  rows: tuple[int, int]
  cols: tuple[int, int]
  window: tuple[int, int]
  length: Any = None
  distance: int = 0


def _striped(cfg: RingConfig, step: int, s: int, earlier):
  left, right = cfg.mha.window_left, cfg.mha.window_right
  if right < 0:
    return [_Block((0, s), (0, s), (-1, -1))]
  # A key's place among all is n times its own, plus its device's: of a later
  # device's keys a query sees those up to the one before its own place.
  reach = left if left < 0 else (left - step) // cfg.size
  if left >= 0 and reach < 0:
    return []
  length = None if step == 0 else jnp.where(earlier, s, s - 1)
  return [_Block((0, s), (0, s), (reach, 0), length, step)]


def _zigzag(cfg: RingConfig, step: int, s: int, earlier):
  if cfg.mha.window_right < 0:
    return [_Block((0, s), (0, s), (-1, -1))]
  if step == 0:
    return [_Block((0, s), (0, s), (-1, 0))]
  first, last, full = (0, s // 2), (s // 2, s), (-1, -1)
  return [
      _Block(first, first, full, jnp.where(earlier, s // 2, 0)),
      _Block(last, first, full),
      _Block(last, last, full, jnp.where(earlier, 0, s // 2))]


def _contiguous(cfg: RingConfig, step: int, s: int, earlier):
  left, right = cfg.mha.window_left, cfg.mha.window_right
  if step == 0 or left < 0 and right < 0:
    return [_Block((0, s), (0, s), (left, right))]
  blocks = []
  for away, here in ((step * s, earlier), ((step - cfg.size) * s, ~earlier)):
    # Query i sees keys i + low to i + high of these; None is unbounded.
    low = away - left if left >= 0 and away - left > -s else None
    high = away + right if right >= 0 and away + right < s else None
    rows = (max(0, -(high or 0)), min(s, s - (low or 0)))
    cols = (max(0, low or 0), min(s, s + (high or 0)))
    if rows[0] >= rows[1] or cols[0] >= cols[1]:
      continue
    count = cols[1] - cols[0]
    aligned = count - (rows[1] - rows[0]) + cols[0] - rows[0]
    window = (-1 if low is None else aligned - low,
              -1 if high is None else high - aligned)
    blocks.append(_Block(rows, cols, window, jnp.where(here, count, 0)))
  return blocks


_BLOCKS = {"striped": _striped, "zigzag": _zigzag, None: _contiguous}


def _steps(cfg: RingConfig, s: int):
  """(step, blocks) of each step in which a device may see a key."""
  rank = lax.axis_index(cfg.axis).astype(jnp.int32)
  for step in range(cfg.size):
    blocks = _BLOCKS[cfg.order](cfg, step, s, rank >= step)
    if blocks:
      yield step, blocks


def _shift(cfg: RingConfig, tree, places: int):
  """Each device's arrays, of the device so many places before."""
  if not places % cfg.size:
    return tree
  to = [(i, (i + places) % cfg.size) for i in range(cfg.size)]
  return jax.tree.map(lambda t: lax.ppermute(t, cfg.axis, to), tree)


def _call(cfg: RingConfig, block: _Block, step: int, x: Operands, k, v):
  """(Config, Operands) of a block."""
  rows, cols = slice(*block.rows), slice(*block.cols)
  lengths = bias = slopes = None
  if block.length is not None:
    lengths = block.length * jnp.arange(x.batch + 1, dtype=jnp.int32)
  if x.bias is not None:
    bias = _bias_block(cfg, block, step, x.bias, k.shape[1])
  if x.alibi_slopes is not None:
    slopes = x.alibi_slopes * cfg.size
  left, right = block.window
  return (cfg.mha._replace(window_left=left, window_right=right),
          vary_together(Operands(
              x.q[:, rows], k[:, cols], v[:, cols], cu_seqlens_k=lengths,
              bias=bias, alibi_slopes=slopes)))


def _first_column(cfg: RingConfig, block: _Block, step: int, s: int):
  rank = lax.axis_index(cfg.axis).astype(jnp.int32)
  return (rank - step) % cfg.size * s + block.cols[0]


def _bias_block(cfg: RingConfig, block: _Block, step: int, bias, s: int):
  if bias.shape[2] > 1:
    bias = bias[:, :, slice(*block.rows)]
  return lax.dynamic_slice_in_dim(
      bias, _first_column(cfg, block, step, s), block.cols[1] - block.cols[0],
      3)


def _farther(block: _Block, x: Operands):
  """[b, h, 1]: what slopes take off a block's scores beside its own part."""
  return x.alibi_slopes[:, :, None] * block.distance


def _heads_first(t):
  """lse [b, h, s] as merge_attn_states has it, [h, b * s]; and back."""
  return jnp.swapaxes(t, 0, 1).reshape(t.shape[1], -1)


def _ring(attend, cfg: RingConfig, x: Operands):
  """(out, lse); `attend` is (Config, Operands) -> (out, lse, ..)."""
  b, s, hq, _ = x.q.shape
  dtype = jnp.promote_types(x.q.dtype, jnp.float32)
  out = jnp.zeros((b, s, hq, x.v.shape[-1]), dtype)
  lse = jnp.full((b, hq, s), -jnp.inf, dtype)
  kv, at = (x.k, x.v), 0
  for step, blocks in _steps(cfg, s):
    kv, at = _shift(cfg, kv, step - at), step
    for block in blocks:
      part, part_lse, *_ = attend(*_call(cfg, block, step, x, *kv))
      if x.alibi_slopes is not None:
        part_lse = part_lse - _farther(block, x)
      rows = slice(*block.rows)
      flat = lambda t: t.reshape(-1, *t.shape[2:])
      joint, joint_lse = merge_attn_states(
          flat(out[:, rows]), _heads_first(lse[:, :, rows]),
          flat(part.astype(dtype)), _heads_first(part_lse.astype(dtype)),
          return_lse=True)
      out = out.at[:, rows].set(joint.reshape(part.shape))
      lse = lse.at[:, :, rows].set(
          jnp.swapaxes(joint_lse.reshape(hq, b, -1), 0, 1))
  return out.astype(x.q.dtype), lse


def _save(cfg: RingConfig, x: Operands):
  out, lse = _ring(mha_op.mha_fwd, cfg, x)
  return (out, lse), (x, out, lse)


def _backward(cfg: RingConfig, wanted, saved, cotangents):
  wanted, = wanted
  if wanted.alibi_slopes:
    raise TypeError(
        "context_parallel_attention: alibi_slopes have no gradient with"
        " strategy='ring'; strategy='ulysses' and 'all_gather' have it, or"
        " stop_gradient says that none is wanted")
  x, out, lse = saved
  dout, dlse = cotangents
  if dout is None:
    dout = jnp.zeros_like(out)
  if dlse is not None:
    dlse = jnp.where(lse == -jnp.inf, 0, dlse)
  want = Wanted(dbias=bool(wanted.bias))
  s = x.q.shape[1]
  wide = lambda t: jnp.zeros(t.shape, jnp.promote_types(t.dtype, jnp.float32))
  dq, dkv = wide(x.q), (wide(x.k), wide(x.v))
  dbias = wide(x.bias) if want.dbias else None
  kv, at = (x.k, x.v), 0
  for step, blocks in _steps(cfg, s):
    kv, dkv, at = (*_shift(cfg, (kv, dkv), step - at), step)
    for block in blocks:
      rows, cols = slice(*block.rows), slice(*block.cols)
      block_cfg, own = _call(cfg, block, step, x, *kv)
      own_lse = lse[:, :, rows]
      if x.alibi_slopes is not None:
        own_lse = own_lse + _farther(block, x)
      grads = mha_op.mha_bwd(
          mha_op.BwdConfig(block_cfg, want), own,
          Saved(dout[:, rows], out[:, rows], own_lse,
                None if dlse is None else dlse[:, :, rows]))
      dq = dq.at[:, rows].add(grads.dq)
      dkv = tuple(t.at[:, cols].add(d)
                  for t, d in zip(dkv, (grads.dk, grads.dv)))
      if want.dbias:
        dbias = _add_bias_block(cfg, block, step, dbias, grads.dbias, s)
  dk, dv = _shift(cfg, dkv, -at)
  empty = Operands(*[None] * len(x))
  return (empty._replace(q=dq, k=dk, v=dv, bias=dbias),)


def _add_bias_block(cfg, block, step, dbias, part, s):
  first = _first_column(cfg, block, step, s)
  rows = block.rows if dbias.shape[2] > 1 else (0, 1)
  start = (0, 0, rows[0], first)
  old = lax.dynamic_slice(
      dbias, start, (*dbias.shape[:2], rows[1] - rows[0], part.shape[3]))
  return lax.dynamic_update_slice(dbias, old + part, start)


def _tangent(cfg: RingConfig, saved, tangents):
  x, *_ = saved
  formula = lambda cfg, x: reference.mha_fwd(cfg, x, every_block=True)
  return formula_jvp(
      functools.partial(_ring, formula, cfg), (x,), tangents)


# (RingConfig, Operands) -> (out, lse)
ring = differentiable(
    functools.partial(
        _ring, lambda cfg, x: mha_op.mha_fwd(cfg._replace(inference=True), x)),
    _backward, save=_save, tangent=_tangent)
