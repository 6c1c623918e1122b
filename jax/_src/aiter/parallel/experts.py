# SPDX-License-Identifier: Apache-2.0
"""A layer of experts that are divided over devices.

To be called in a shard_map. Rows leave their token's device in the order of all
experts, which is the order of a layer on one device, so each expert's rows are
a run; runs arrive where their experts have them, one device's behind the
other's. So nothing is sorted again, products see the rows in the order that
they have on one device, and what comes back is added up where the token is, in
the order of its choices.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.derivative import differentiable
from jax._src.aiter.core.dispatch import PLATFORMS
from jax._src.aiter.core.partition import vary_like, vary_together
from jax._src.aiter.moe import api, fused
from jax._src.aiter.moe.move import Places, combine, everyone, rows_of

_NAME = "expert_parallel_moe"
_PIECES = 1024  # Of runs, at least: blocks that XLA's kernel copies with.


class Runs(NamedTuple):
  """Runs of rows on a device, those for or of each device in turn; int32 [n e].

  Attributes:
    at: first row of each.
    size: rows of each.
    other: first row of each on the device that it goes to or comes from.
  """
  at: jax.Array
  size: jax.Array
  other: jax.Array


class Move(NamedTuple):
  """Static facts of an exchange; hashable.

  Attributes:
    axis: the mesh axis.
    rows: of the result.
    missing: what the result has where nothing arrives.
  """
  axis: str
  rows: int
  missing: float


# -----------------------------------------------------------------------------
# Rows moved between devices: a linear map


def _in_pieces(runs: Runs) -> Runs:
  """Runs cut into equal pieces, which XLA's kernel has a block for each."""
  count = -(-_PIECES // runs.at.shape[0])
  piece = (runs.size[:, None] + count - 1) // count
  before = jnp.minimum(piece * jnp.arange(count, dtype=jnp.int32),
                       runs.size[:, None])
  flat = lambda t: t.reshape(-1)
  return Runs(flat(runs.at[:, None] + before),
              flat(jnp.minimum(runs.size[:, None] - before, piece)),
              flat(runs.other[:, None] + before))


def _ragged(cfg: Move, rows, here: Runs, there: Runs):
  here, there = map(_in_pieces, (here, there))
  out = jnp.full((cfg.rows, *rows.shape[1:]), cfg.missing, rows.dtype)
  return lax.ragged_all_to_all(
      rows, vary_like(out, rows), here.at, here.size, here.other, there.size,
      axis_name=cfg.axis)


def _places(runs: Runs, n: int, block: int, none: int):
  """Rows of runs, one behind the other, a block for each device: [n, block]."""
  at, size = (t.reshape(n, -1) for t in runs[:2])
  ends = jnp.cumsum(size, 1)
  i = jnp.arange(block, dtype=jnp.int32)
  run = jnp.sum(i[:, None] >= ends[:, None], -1, dtype=jnp.int32)
  row = i + jnp.take_along_axis(at - ends + size, run, 1, mode="clip")
  return jnp.where(i < ends[:, -1:], row, none)


def _dense(cfg: Move, rows, here: Runs, there: Runs):
  """The same by blocks that have room for all that there may be."""
  n, own = lax.axis_size(cfg.axis), rows.shape[0]
  block = min(own, cfg.rows)
  blocks = rows.at[_places(here, n, block, own)].get(mode="fill", fill_value=0)
  blocks = lax.all_to_all(blocks, cfg.axis, 0, 0)
  # Numbers are scattered, and rows gathered: that is the faster way.
  at = _places(there, n, block, cfg.rows).reshape(-1)
  of = vary_like(jnp.full(cfg.rows, n * block, jnp.int32), at).at[at].set(
      jnp.arange(n * block, dtype=jnp.int32), mode="drop")
  return blocks.reshape(n * block, *rows.shape[1:]).at[of].get(
      mode="fill", fill_value=cfg.missing)


def _move(cfg: Move, rows, here: Runs, there: Runs):
  branches = {}
  # Between processes XLA has it by default on no GPU.
  if jax.process_count() == 1:
    branches = {platform: functools.partial(_ragged, cfg)
                for platform in PLATFORMS}
  return lax.platform_dependent(
      rows, here, there, default=functools.partial(_dense, cfg), **branches)


def _move_save(cfg, rows, here, there):
  # Rows' number, as the shape of what takes no memory.
  return _move(cfg, rows, here, there), (
      here, there, jnp.zeros((rows.shape[0], 0), jnp.int8))


def _move_backward(cfg: Move, wanted, saved, dout):
  del wanted
  here, there, rows = saved
  back = Move(cfg.axis, rows.shape[0], np.nan if cfg.missing == 0 else 0)
  return _move(back, dout, there, here), Runs(*[None] * 3), Runs(*[None] * 3)


def _move_tangent(cfg: Move, saved, tangents):
  here, there, _ = saved
  return _move(cfg, tangents[0], here, there)


# (Move, rows [m, ..], Runs, Runs) -> [cfg.rows, ..]
move = differentiable(
    _move, _move_backward, save=_move_save, tangent=_move_tangent)


def _runs(axis: str, counts, room: int | None):
  """Of rows at home and at the experts; rows of each expert here.

  Args:
    axis: the mesh axis.
    counts: int32 [n e], rows that this device has for each expert.
    room: rows that a device has room for.
  """
  n, rank = lax.axis_size(axis), lax.axis_index(axis)
  before = lambda t: jnp.cumsum(t, -1) - t
  size = lax.all_gather(counts, axis)  # [home, n e]
  home = before(size).reshape(n, n, -1)  # [home, device, e]
  size = size.reshape(home.shape).transpose(1, 2, 0)  # [device, e, home]
  there = before(size.reshape(n, -1)).reshape(size.shape)
  if room is not None:
    size = jnp.clip(room - there, 0, size)
    there = jnp.minimum(there, room)
  flat = lambda t: t.reshape(-1)
  return (
      Runs(flat(home[rank]), flat(size[:, :, rank]), flat(there[:, :, rank])),
      Runs(flat(there[rank].T), flat(size[rank].T), flat(home[:, rank])),
      jnp.sum(size[rank], 1, dtype=jnp.int32))


# -----------------------------------------------------------------------------
# The layer


class Send(NamedTuple):
  """Static facts of tokens' way to their experts; hashable.

  Attributes:
    axis: the mesh axis.
    rows: that a device has room for.
    gather: whether devices gather all tokens and take what is theirs, not a row
      for each choice.
  """
  axis: str
  rows: int
  gather: bool


class Route(NamedTuple):
  """Where rows of tokens go.

  Attributes:
    places: of this device's tokens, in the order of all experts.
    here: of all devices' tokens, in the order of this device's experts; None
      if they are not gathered.
    home: runs of the rows of this device's tokens.
    there: runs of the rows of this device's experts.
  """
  places: Places
  here: Places | None
  home: Runs
  there: Runs


def _send(cfg: Send, x, route: Route):
  if cfg.gather:
    return rows_of(everyone(cfg.axis, x), route.here)
  return _move(Move(cfg.axis, cfg.rows, 0), rows_of(x, route.places),
               route.home, route.there)


def _send_backward(cfg: Send, wanted, route: Route, dout):
  del wanted
  back = Move(cfg.axis, route.places.entry.shape[0], np.nan)
  rows = _move(back, dout, route.there, route.home)
  return (combine(None, rows, None, route.places),
          jax.tree.map(lambda _: None, route))


# (Send, x [m, d], Route) -> [cfg.rows, d]: each expert's rows, one behind the
# other's. Its transpose adds rows where their token is, in a fixed order.
send = differentiable(
    _send, _send_backward,
    save=lambda cfg, x, route: (_send(cfg, x, route), route),
    tangent=lambda cfg, route, tangents: _send(cfg, tangents[0], route))


def _route(cfg: Send, ids, e: int, room: int | None):
  """(Route, int32 [e] rows of this device's experts) of e and all ids."""
  n = lax.axis_size(cfg.axis)
  counts, places = api.places_of(ids, n * e)
  home, there, counts = _runs(cfg.axis, counts, room)
  here = None
  if cfg.gather:
    first = lax.axis_index(cfg.axis).astype(jnp.int32) * e
    own = everyone(cfg.axis, ids) - first
    _, here = api.places_of(jnp.where((own >= 0) & (own < e), own, -1), e)
    here = here._replace(entry=here.entry[:cfg.rows])
  return Route(places, here, home, there), counts


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _layer(axis: str, room: int | None, cfg: fused.Config,
           x: fused.Layer) -> jax.Array:
  x = vary_together(x)
  n, own, topk = lax.axis_size(axis), x.ids.size, x.ids.shape[1]
  # Each token once to every device, or a row to that of each choice.
  way = Send(axis, n * own if room is None else min(room, n * own), n <= topk)
  route, counts = _route(way, x.ids, x.w1.shape[0], room)
  if cfg.scaling == "none":
    rows, scales = send(way, x.hidden, route), None
  else:
    rows, scales = fused.quantised(cfg, x.hidden, x.a1_scale)
    # Collectives know no numbers of eight bits but integers.
    sent = rows if rows.dtype.itemsize > 1 else lax.bitcast_convert_type(
        rows, jnp.int8)
    sent = _send(way, sent, route)
    rows = sent if sent.dtype == rows.dtype else lax.bitcast_convert_type(
        sent, rows.dtype)
    if scales is not None and x.a1_scale is None:
      scales = _send(way, scales, route)
  weights = row_ids = None
  if cfg.early:
    weights = (
        fused.by_row(everyone(axis, x.weights), route.here) if way.gather
        else move(Move(axis, way.rows, 0), fused.by_row(
            x.weights, route.places), route.home, route.there))
  if x.bias1 is not None or x.bias2 is not None:
    row = jnp.arange(way.rows, dtype=jnp.int32)[:, None]
    row_ids = jnp.sum(row >= jnp.cumsum(counts), 1, dtype=jnp.int32)
  y = fused.multiplied(cfg, x, counts, rows, scales, row_ids, weights)
  y = move(Move(axis, own, np.nan), y, route.there, route.home)
  return combine(
      None, y, None if cfg.early else x.weights, route.places).astype(cfg.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _partial_layer(axis: str, room: int | None, cfg: fused.Config,
                   x: fused.Layer) -> jax.Array:
  """_layer of which each device adds up what its experts make of a token."""
  x = vary_together(x)
  e, ids = x.w1.shape[0], everyone(axis, x.ids)
  own = ids - lax.axis_index(axis).astype(jnp.int32) * e
  # A weight has its gradient on one device: a sum with zeros is exact.
  return fused.layer(cfg, x._replace(
      weights=everyone(axis, x.weights),
      ids=jnp.where((own >= 0) & (own < e), own, -1)),
      None if room is None else min(room, ids.size), axis)


def expert_parallel_moe(
    hidden_states: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    topk_weight: jax.Array,
    topk_ids: jax.Array,
    activation: str = "silu",
    doweight_stage1: bool = False,
    *,
    axis_name: str,
    max_rows: int | None = None,
    num_local_tokens: jax.Array | None = None,
    w1_scale: jax.Array | None = None,
    w2_scale: jax.Array | None = None,
    a1_scale: jax.Array | None = None,
    a2_scale: jax.Array | None = None,
    quant_dtype: Any = None,
    dtype: Any = None,
    bias1: jax.Array | None = None,
    bias2: jax.Array | None = None,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str = "separated",
    weight_layout: str = "enk",
    partial_sums: bool = False,
) -> jax.Array:
  """`fused_moe` of tokens and experts that are divided over devices.

  To be called in a `jax.shard_map` over `axis_name`; arrays are one device's.
  Of n devices the first has experts 0 to e - 1, the next e to 2 e - 1, and so
  on. Each row is sent to its expert and back, and a token's rows are added in
  the order of its choices where the token is: results, and gradients of
  hidden_states, w1 and w2, are those of the whole layer on one device, to the
  bit where products are by the same kernels. No row is left out for want of
  capacity. Rows are sent by XLA's ragged_all_to_all on GPUs of one process, a
  target of which jax.export wants to be told as EXPORT_CHECKS does of ours, and
  elsewhere by all_to_all of blocks.

  Memory: a device has room for what could come, tokens * topk rows of each of
  the n devices, though products are of the rows that come. max_rows makes it
  less.

  Args:
    hidden_states: [tokens, d], this device's, as many on each.
    w1: [e, 2 i, d] or [e, i, d], this device's experts', as in fused_moe.
    w2: [e, d, i].
    topk_weight: [tokens, topk].
    topk_ids: integers [tokens, topk] from 0 to n e - 1. Another one adds
      nothing.
    activation: as in fused_moe.
    doweight_stage1: as in fused_moe.
    axis_name: the mesh axis that divides experts and tokens.
    max_rows: rows that a device's experts have room for; by default for all
      that there could be, n * tokens * topk. If more come, those of the last
      experts, of the last devices, are not computed, and their tokens' results
      are NaN, so that it is not missed.
    num_local_tokens: integer [1]: this device's later tokens have the result 0.
    w1_scale: of this device's experts, as in fused_moe.
    w2_scale: likewise.
    a1_scale: as in fused_moe, the same on every device.
    a2_scale: likewise.
    quant_dtype: as in fused_moe. Rows are sent as they are multiplied.
    dtype: of the result; hidden_states' by default.
    bias1: [e, 2 i] or [e, i], of this device's experts.
    bias2: [e, d] likewise.
    swiglu_limit: as in fused_moe.
    swiglu_alpha: as in fused_moe.
    beta: as in fused_moe.
    linear_beta: as in fused_moe.
    gate_mode: as in fused_moe.
    weight_layout: as in fused_moe.
    partial_sums: every device gathers all tokens, adds up what its own experts
      make of one, weighted and in the order of choices, rounds that to
      hidden_states' dtype and sends it back, one row a token instead of one a
      choice; those of all devices are added in float32, in the devices' order
      (two of them in either: it is the same). It is the faster way
      where devices are few, at most topk. Results and gradients are the same in
      every run, but have not the bits of one device: they depend on how many
      devices there are.

  Returns:
    [tokens, d].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  size = arguments.axis_size(_NAME, "axis_name", axis_name)
  if max_rows is not None:
    max_rows = arguments.number(
        _NAME, "max_rows", max_rows, "an integer of at least 1",
        lambda n: n >= 1, int)
  layer = _partial_layer if arguments.flag(
      _NAME, "partial_sums", partial_sums) else _layer
  return fused.run(
      _NAME, functools.partial(layer, axis_name, max_rows), *fused.checked(
          _NAME, size, hidden_states, w1, w2, topk_weight, topk_ids, None,
          activation, None, doweight_stage1, num_local_tokens, w1_scale,
          w2_scale, a1_scale, a2_scale, quant_dtype, dtype, bias1, bias2,
          swiglu_limit, swiglu_alpha, beta, linear_beta, gate_mode,
          weight_layout, 0))
