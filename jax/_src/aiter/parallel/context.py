# SPDX-License-Identifier: Apache-2.0
"""Attention to a sequence that is divided over devices.

To be called in a shard_map: what is exchanged is said here, by XLA's own
collectives, and runs wherever these do. ring.py has the ring; the others are
one exchange around an ordinary call.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.attention import api
from jax._src.aiter.attention import op as mha_op
from jax._src.aiter.attention.rows import at_place, cumulative
from jax._src.aiter.core import arguments, philox
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.parallel import order
from jax._src.aiter.parallel.ring import RingConfig, ring, weighed

_NAME = "context_parallel_attention"
_STRATEGIES = ("ring", "all_gather", "ulysses")
_PAIRS = (("ulysses", "ring"), ("ulysses", "all_gather"))


class _Arrays(NamedTuple):
  """The arrays of a call for one device, as the user gave them.

  But q, k and v of a packed call, which has cu_seqlens, are a batch of one, and
  of a dropout_key there is the state that it stands for.
  """
  q: jax.Array
  k: jax.Array
  v: jax.Array
  bias: jax.Array | None
  alibi_slopes: jax.Array | None
  sink: jax.Array | None
  cu_seqlens: jax.Array | None = None
  dropout_state: jax.Array | None = None


class _Call(NamedTuple):
  """Static facts: those of attention, and how the sequence is divided."""
  attention: api.Call
  axes: tuple[str, ...]
  strategies: tuple[str, ...]
  balance: str | None

  @property
  def right(self) -> int:
    return 0 if self.attention.causal else self.attention.window[1]

  @property
  def windowed(self) -> bool:
    """Whether a window hides more than causality does."""
    left, right, _ = self.attention.window
    return left >= 0 or (right >= 0 and not self.attention.causal)


def _operands(call: _Call, x: _Arrays, cu_k=None, mask=None):
  """The operator's form; cu_k are lengths of keys of a dense call."""
  return api.operands(
      call.attention, None, None, x.q, x.k, x.v, None, cu_k, x.bias, mask,
      x.alibi_slopes, x.sink, x.dropout_state)


def _packed_operands(call: _Call, x: _Arrays, lengths=None,
                     first=(None, None)):
  """Likewise of sequences.

  Args:
    lengths: cumulative, of queries and keys; x.cu_seqlens by default.
    first: rows of queries and keys, where they are not these.
  """
  return api.operands(
      call.attention, first, None, x.q[0], x.k[0], x.v[0],
      *(lengths or (x.cu_seqlens,) * 2), None, None, x.alibi_slopes, x.sink,
      x.dropout_state)


def _mha(operands):
  """(out, lse), as of a batch of one if packed."""
  cfg, x = operands
  out, lse = mha_op.mha(cfg, vary_together(x))
  return (out[None], lse[None]) if x.packed else (out, lse)


# -----------------------------------------------------------------------------
# Ring


def _goes_round(call: _Call, x: _Arrays) -> bool:
  """Whether blocks of a ring can say what a call asks for.

  Which keys a block's rows see is told by lengths, and by a window that all
  devices share; how far these are, in "striped" alone; what a dropout mask has
  for them, by runs of columns that begin at a multiple of philox.COLUMNS.
  """
  (left, _, first), packed = call.attention.window, x.cu_seqlens is not None
  striped, zigzag = (call.balance == name for name in ("striped", "zigzag"))
  return not (
      (first and left >= 0)
      or (call.windowed and (zigzag or (call.right if striped else packed)))
      or (x.alibi_slopes is not None
          and (not striped or packed or call.right))
      or (x.dropout_state is not None
          and (striped or packed
               or x.q.shape[1] % (philox.COLUMNS * (2 if zigzag else 1)))))


def _ring(call: _Call, axis: str, x: _Arrays):
  size, s = lax.axis_size(axis), x.q.shape[1]
  if x.k.shape[1:2] != (s,):
    raise bad(_NAME, "k", describe(x.k),
              f"q's local length {s} with strategy='ring'")
  if call.balance == "zigzag" and s % 2:
    raise bad(_NAME, "q's local length", s,
              "an even number with load_balance='zigzag'")
  if x.bias is not None:
    x = x._replace(bias=jnp.broadcast_to(
        x.bias, (*x.bias.shape[:3], size * s)))
  if not _goes_round(call, x):
    if x.bias is not None and call.balance:
      x = x._replace(bias=order.restored(x.bias, call.balance, size, 3))
    return _all_gather(call, axis, x)
  left, right, _ = call.attention.window
  if x.cu_seqlens is not None:
    cfg, own = _packed_operands(call, x._replace(sink=None))
    own = own._replace(q=own.q[None], k=own.k[None], v=own.v[None],
                       cu_seqlens_k=None)
  else:
    cfg, own = _operands(call, x._replace(bias=None, sink=None))
    own = own._replace(bias=x.bias)
  cfg = cfg._replace(window_left=left, window_right=call.right)
  out, lse = ring(
      RingConfig(cfg, axis, size, call.balance), vary_together(own))
  if x.sink is not None:
    out, lse = _with_sink(out, lse, _sink_of_rows(call, axis, x))
  return out, lse


def _with_sink(out, lse, sink):
  """What a logit without a value, float32 [b, h, 1 | s], makes of a result."""
  joint = jnp.logaddexp(lse, sink)
  return weighed(out, lse, joint).astype(out.dtype), joint


def _sink_of_rows(call: _Call, axis: str, x: _Arrays):
  """[b, h, 1 | s] of x.sink; -inf of a packed row of no sequence."""
  q, cu = x.q, x.cu_seqlens
  t = x.sink.astype(jnp.promote_types(q.dtype, jnp.float32))
  if cu is None:
    return jnp.broadcast_to(t, (q.shape[0], q.shape[2]))[:, :, None]
  place = order.places(
      call.balance, lax.axis_size(axis), lax.axis_index(axis), q.shape[1])
  n = cu.shape[0] - 1
  at = jnp.searchsorted(cu, place, side="right").astype(jnp.int32) - 1
  t = jnp.broadcast_to(t, (n, q.shape[2]))[jnp.clip(at, 0, n - 1)]
  return jnp.where((at < n)[:, None], t, -jnp.inf).T[None]


# -----------------------------------------------------------------------------
# Keys and values gathered


def _of_striped(call: _Call, axis: str, x: _Arrays):
  """_all_gather of "striped": devices exchange tokens for runs of them."""
  size, s = lax.axis_size(axis), x.q.shape[1]
  if s % size or x.k.shape[1] != s:
    raise bad(_NAME, "q's and k's local lengths", f"{s} and {x.k.shape[1]}",
              f"one multiple of {size}, the number of devices, where keys are"
              " gathered with load_balance='striped'")

  def run(t, a):
    return order.restored(
        lax.all_to_all(t, axis, a, a, tiled=True), "striped", size, a)

  def back(t, a):
    return lax.all_to_all(
        order.reordered(t, "striped", size, a), axis, a, a, tiled=True)

  bias = x.bias
  if bias is not None and bias.shape[2] > 1:
    bias = run(bias, 2)
  out, lse = _all_gather(call._replace(balance=None), axis, x._replace(
      q=run(x.q, 1), k=run(x.k, 1), v=run(x.v, 1), bias=bias))
  return back(out, 1), back(lse, 2)


def _planes(call: _Call, x: _Arrays, begin):
  """(mask, bias) in the place of windows and slopes of rows from `begin` on.

  Of kernels' own a row's last key ends them, which only causal rows have.
  """
  left, right, first = call.attention.window
  rows = begin + jnp.arange(x.q.shape[1], dtype=jnp.int32)[:, None]
  keys = jnp.arange(x.k.shape[1], dtype=jnp.int32)
  seen, bias = jnp.ones((rows.size, keys.size), bool), x.bias
  if left >= 0:
    seen &= (keys >= rows - left) | (keys < first)
  if right >= 0:
    seen &= keys <= rows + right
  if x.alibi_slopes is not None:
    dtype = jnp.promote_types(x.q.dtype, jnp.float32)
    slopes = x.alibi_slopes.astype(dtype)
    slopes = slopes.reshape(-1, slopes.shape[-1], 1, 1)
    bias = (0 if bias is None else bias.astype(dtype)) - (
        slopes * jnp.abs(rows - keys).astype(dtype))
  return seen if call.windowed else None, bias


def _all_gather(call: _Call, axis: str, x: _Arrays):
  if call.balance == "striped":
    return _of_striped(call, axis, x)
  where = "strategy='all_gather'"
  size, rank = lax.axis_size(axis), lax.axis_index(axis).astype(jnp.int32)
  b, s = x.q.shape[:2]
  packed = x.cu_seqlens is not None
  placed = call.windowed or x.alibi_slopes is not None
  gather = lambda t: lax.all_gather(t, axis, axis=1, tiled=True)
  k, v = gather(x.k), gather(x.v)
  if call.balance:
    k, v = (order.restored(t, call.balance, size, 1) for t in (k, v))
  if call.right and not (packed or placed or x.dropout_state is not None):
    return _mha(_operands(call, x._replace(k=k, v=v)))
  if x.k.shape[1] != s:
    raise bad(_NAME, "k", describe(x.k),
              f"q's local length {s} with {where} and places that count")
  # A device's queries stand at one place, or in halves at two, of which only
  # the device knows: the keys up to there are all that they see.
  if call.balance:
    if s % 2:
      raise bad(_NAME, "q's local length", s,
                "an even number with load_balance='zigzag'")
    chunks = ((0, s // 2, rank), (s // 2, s, 2 * size - 1 - rank))
  else:
    chunks = ((0, s, rank),)
  parts = []
  for first, last, place in chunks:
    begin, end = place * (last - first), (place + 1) * (last - first)
    rows = x.bias is not None and x.bias.shape[2] > 1
    cu = x.cu_seqlens
    own = x._replace(
        q=x.q[:, first:last], k=k, v=v,
        bias=x.bias[:, :, first:last] if rows else x.bias,
        dropout_state=at_place(
            x.dropout_state,
            jnp.maximum(begin - cu[:-1], 0) if packed else begin))
    if packed:
      # A sequence's last row and key stand beside each other, so keys behind
      # the last row here have rows too, of zeros, if it counts where they are.
      more = 0
      if call.right and placed:
        more = size * s - (last - first)
        more = more if call.right < 0 else min(more, call.right)
      own = own._replace(
          q=jnp.pad(own.q, ((0, 0), (0, more), (0, 0), (0, 0))))
      bounds = jnp.clip(cu, begin, end)
      stops = jnp.where(cu[:-1] < end, jnp.minimum(cu[1:], end + more), 0)
      keys = stops if call.right == 0 or placed else cu[1:]
      counts = (jnp.maximum(stops - bounds[:-1], 0),
                jnp.maximum(keys - cu[:-1], 0))
      out, lse = _mha(_packed_operands(
          call, own, lengths=tuple(map(cumulative, counts)),
          first=(bounds - begin, cu)))
      parts.append((out[:, :last - first], lse[:, :, :last - first]))
    elif call.right and placed:
      mask, bias = _planes(call, own, begin)
      everywhere = call._replace(
          attention=call.attention._replace(window=(-1, -1, 0)))
      parts.append(_mha(_operands(
          everywhere, own._replace(bias=bias, alibi_slopes=None), mask=mask)))
    else:
      keys = None if call.right else end * jnp.arange(b + 1, dtype=jnp.int32)
      parts.append(_mha(_operands(call, own, keys)))
  outs, lses = zip(*parts)
  return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)


# -----------------------------------------------------------------------------
# Heads instead of rows


def _ulysses(call: _Call, axis: str, x: _Arrays):
  size, rank = lax.axis_size(axis), lax.axis_index(axis).astype(jnp.int32)
  where = f"strategy='ulysses' over {size} devices"
  hq, hk = x.q.shape[2], x.k.shape[2]
  if hq % size or (hk % size and (size % hk or (hq // hk) % (hq // size))):
    raise bad(_NAME, "heads of q and k", f"{hq} and {hk}",
              f"numbers that can be divided among them with {where}")
  k, v = x.k, x.v
  if hk % size:
    k, v = (jnp.repeat(t, size // hk, axis=2) for t in (k, v))
  inner = call.strategies[1:]
  # The next strategy has tokens in its order; here they follow each other.
  balance = None if inner else call.balance
  in_turn, back = (
      functools.partial(f, strategy=balance, size=size) if balance
      else lambda t, axis: t
      for f in (order.restored, order.reordered))

  def heads(t):
    return in_turn(lax.all_to_all(t, axis, 2, 1, tiled=True), axis=1)

  def own(t, a):
    count = t.shape[a] // size
    return lax.dynamic_slice_in_dim(t, rank * count, count, a)

  def per_head(t, a=-1):
    return None if t is None else own(t, a % t.ndim)

  bias = x.bias
  if bias is not None:
    rows, many = bias.shape[2] > 1, bias.shape[1] > 1
    if rows:
      bias = (lax.all_to_all(bias, axis, 1, 2, tiled=True) if many
              else lax.all_gather(bias, axis, axis=2, tiled=True))
      bias = in_turn(bias, axis=2)
    elif many:
      bias = own(bias, 1)
    if not inner and bias.shape[3] > 1:
      bias = in_turn(bias, axis=3)
  local = _Arrays(heads(x.q), heads(k), heads(v), bias,
                  per_head(x.alibi_slopes), per_head(x.sink), x.cu_seqlens,
                  per_head(x.dropout_state, 1))
  if inner:
    out, lse = _run(call._replace(strategies=inner, axes=call.axes[1:]), local)
  else:
    out, lse = _mha((_operands if x.cu_seqlens is None else _packed_operands)(
        call, local))
  out, lse = back(out, axis=1), back(lse, axis=2)
  return (lax.all_to_all(out, axis, 1, 2, tiled=True),
          lax.all_to_all(lse, axis, 2, 1, tiled=True))


_RUN = {"ring": _ring, "all_gather": _all_gather, "ulysses": _ulysses}


def _run(call: _Call, x: _Arrays):
  return _RUN[call.strategies[0]](call, call.axes[0], x)


def _planes_of_all_keys(call: _Call, x: _Arrays, mask):
  """Bias, -inf where the mask hides: [b | 1, hq | 1, s | 1, keys | 1]."""
  size = math.prod(map(lax.axis_size, call.axes))
  b, s, *rest = x.k.shape
  keys = jax.ShapeDtypeStruct((b, size * s, *rest), x.k.dtype)
  bias = api.check_bias(call.attention, x.bias, x.q, keys)
  if mask is None:
    return bias
  mask = api.check_planes(call.attention, "mask", mask, x.q, keys)
  return jnp.where(
      mask, jnp.zeros((), x.q.dtype) if bias is None else bias, -jnp.inf)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attend(call: _Call, dropout_key, mask, x: _Arrays):
  # The checks of an ordinary call, by the arguments' own names.
  if x.cu_seqlens is None:
    _, own = api.operands(
        call.attention, None, dropout_key, x.q, x.k, x.v, None, None, None,
        None, x.alibi_slopes, x.sink)
    x = x._replace(bias=_planes_of_all_keys(call, x, mask))
  else:
    for name, t in (("bias", x.bias), ("mask", mask)):
      if t is not None:
        raise bad(_NAME, name, "given", "none with cu_seqlens")
    _, own = api.operands(
        call.attention, (None, None), dropout_key, x.q, x.k, x.v,
        x.cu_seqlens, x.cu_seqlens, None, None, x.alibi_slopes, x.sink)
    x = x._replace(q=x.q[None], k=x.k[None], v=x.v[None],
                   cu_seqlens=own.cu_seqlens_q)
  out, lse = _run(call, x._replace(dropout_state=own.dropout_state))
  if x.cu_seqlens is not None:
    out, lse = out[0], lse[0]
  return (out, lse) if call.attention.return_lse else out


def _named(name, value, accepted):
  """A static argument that is a name, or a pair of names, as a tuple."""
  names = value if isinstance(value, (tuple, list)) else (value,)
  if not 1 <= len(names) <= 2 or not all(isinstance(n, str) for n in names):
    raise bad(_NAME, name, arguments.shown(value), accepted)
  return tuple(names)


def context_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1),
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    *,
    axis_name: str | tuple[str, str],
    strategy: str | tuple[str, str] = "ring",
    load_balance: str | None = None,
    dropout_key: jax.Array | None = None,
    logits_soft_cap: float = 0.0,
    sink: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    mask: jax.Array | None = None,
):
  """`flash_attn_func` of a sequence that is divided over devices.

  To be called in a `jax.shard_map` over `axis_name`; arrays are one device's.
  Results and gradients are those of the whole sequence on one device.

  Strategies:
    "ring": keys and values go round, and no device ever holds all of them; the
      next ones are under way while attention to these is computed. A window
      skips the steps that it hides. What no step can say is computed as by
      "all_gather": leading keys that stay visible; windows with "zigzag", or
      of packed sequences without an order, or to the right with "striped";
      alibi_slopes, but if causal with "striped"; dropout of packed sequences,
      with "striped", or of an s that is no multiple of 8 (16 with "zigzag").
    "all_gather": every device gathers all keys and values.
    "ulysses": each device gets all tokens of a part of the heads (DeepSpeed
      Ulysses, arXiv:2309.14509). q's heads are a multiple of the devices; fewer
      key heads than devices are sent to several.
    ("ulysses", "ring" or "all_gather"): the first over axis_name[0] inside the
      second over axis_name[1]. A sequence is divided by the second axis first:
      PartitionSpec(None, (axis_name[1], axis_name[0])).

  Args:
    q: [b, s, hq, dqk]: this device's s tokens.
    k: [b, s, hk, dqk], as in flash_attn_func.
    v: [b, s, hk, dv].
    dropout_p: as in flash_attn_func, whose mask it is.
    softmax_scale: factor on q.k; None is 1 / sqrt(dqk).
    causal: a token sees itself and those before it.
    window_size: (left, right) in tokens of the whole sequence, -1 for
      unbounded, and perhaps a third number, leading keys that stay visible.
    bias: [b | 1, hq | 1, s | 1, keys | 1] with a column for each key of the
      whole sequence, in the order in which the devices hold these; for
      "all_gather" in the order of the sequence.
    alibi_slopes: [hq] or [b, hq].
    deterministic: see flash_attn_func.
    return_lse: return the log-sum-exp of every row too.
    axis_name: the mesh axis that divides the sequence, or two.
    strategy: see above.
    load_balance: order of the tokens: None, as they follow each other, or one
      in which devices have equal work if causal: "zigzag" or "striped", as
      `reorder_causal_load_balancing` makes them, with the axis's size; of two
      axes with that of axis_name[1] alone. For "all_gather" tokens of
      "striped" are exchanged for those that follow each other, whose work is
      not equal.
    dropout_key: a JAX PRNG key, required if dropout_p > 0; one for all devices.
    cu_seqlens: int [n + 1], cumulative lengths of sequences that are packed in
      one axis, which all devices together have; the same on all. q is then
      [s, hq, dqk], and k, v, out likewise; lse is [hq, s]. Numbers and traced
      lengths are as in flash_attn_varlen. No bias or mask.
    logits_soft_cap: if > 0, scaled scores become cap * tanh(score / cap).
    sink: [hq] or [b, hq], a logit in every row's softmax that has no value.
    mask: bool, of bias's shapes and order: False hides a key, as a bias of -inf
      does.

  Returns:
    out [b, s, hq, dv]; with return_lse a tuple of it and lse [b, hq, s].

  Raises:
    TypeError: an argument is not an array, number or dtype of the right kind.
    ValueError: a shape or value is not accepted, or not by this strategy.
  """
  axes = _named("axis_name", axis_name, "a mesh axis's name, or a pair of them")
  accepted = " or ".join(map(repr, _STRATEGIES + _PAIRS))
  strategies = _named("strategy", strategy, accepted)
  if strategies not in (*((name,) for name in _STRATEGIES), *_PAIRS):
    raise bad(_NAME, "strategy", repr(strategy), accepted)
  if len(axes) != len(strategies):
    raise bad(_NAME, "axis_name", repr(axis_name),
              f"a name for each strategy of {strategy!r}")
  size = math.prod(
      arguments.axis_size(_NAME, "axis_name", name) for name in axes)
  balance = arguments.choice(_NAME, "load_balance", load_balance,
                             (None, *order.STRATEGIES))
  api.check_arrays(
      _NAME, dict(q=q, k=k, v=v),
      dict(bias=bias, alibi_slopes=alibi_slopes, dropout_key=dropout_key,
           sink=sink, cu_seqlens=cu_seqlens, mask=mask))
  if cu_seqlens is not None:
    arguments.check_cumulative(
        _NAME, "cu_seqlens", cu_seqlens, q.shape[0] * size)
  call = api.static_arguments(
      _NAME, dropout_p, softmax_scale, causal, window_size, logits_soft_cap,
      deterministic,
      return_lse=arguments.flag(_NAME, "return_lse", return_lse),
      names=("q", "k", "v", "cu_seqlens", "cu_seqlens", "dropout_key"))
  return _attend(_Call(call, axes, strategies, balance), dropout_key, mask,
                 _Arrays(q, k, v, bias, alibi_slopes, sink, cu_seqlens))
