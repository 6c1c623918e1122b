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
from jax._src.aiter.core import arguments
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


def _operands(call: _Call, x: _Arrays, cu_k=None):
  """The operator's form; cu_k are lengths of keys of a dense call."""
  return api.operands(
      call.attention, None, None, x.q, x.k, x.v, None, cu_k, x.bias, None,
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


def _refuse(what, strategy, instead):
  raise bad(_NAME, what, "given", f"none with {strategy}; {instead}")


# -----------------------------------------------------------------------------
# Ring


def _ring(call: _Call, axis: str, x: _Arrays):
  where = "strategy='ring'"
  size, s = lax.axis_size(axis), x.q.shape[1]
  if call.attention.dropout_p:
    if call.balance == "striped":
      _refuse("dropout_p", f"{where} and load_balance='striped'",
              "None and 'zigzag' have it")
    least = 8 if call.balance == "zigzag" else 4
    if s % least:
      raise bad(_NAME, "q's local length", s, f"a multiple of {least} with"
                f" dropout_p, {where} and load_balance={call.balance!r}")
  if call.attention.window[2]:
    _refuse("window_size's third number", where,
            "strategy='all_gather' and 'ulysses' have it")
  if x.alibi_slopes is not None and call.balance != "striped":
    _refuse("alibi_slopes", f"{where} and load_balance={call.balance!r}",
            "load_balance='striped' has them, and so have the other strategies")
  if x.alibi_slopes is not None and call.right:
    _refuse("alibi_slopes", f"{where} and causal=False",
            "strategy='ulysses' has them")
  if call.windowed and call.balance == "zigzag":
    _refuse("window_size", f"{where} and load_balance='zigzag'",
            "None and 'striped' have it")
  if call.balance == "striped" and call.right > 0:
    _refuse("window_size's right side", f"{where} and load_balance='striped'",
            "None has it")
  if x.cu_seqlens is not None:
    if call.windowed and call.balance != "striped":
      _refuse("window_size", f"{where}, cu_seqlens and"
              f" load_balance={call.balance!r}",
              "load_balance='striped' has it, and so have the other strategies")
    if x.alibi_slopes is not None:
      _refuse("alibi_slopes", f"{where} and cu_seqlens",
              "strategy='all_gather' and 'ulysses' have them")
  if x.k.shape[1:2] != (s,):
    raise bad(_NAME, "k", describe(x.k), f"q's local length {s} with {where}")
  if x.bias is not None and x.bias.shape[-1:] != (size * s,):
    raise bad(_NAME, "bias", describe(x.bias),
              f"a column for each of all {size * s} keys")
  if call.balance == "zigzag" and s % 2:
    raise bad(_NAME, "q's local length", s,
              "an even number with load_balance='zigzag'")
  left, right, _ = call.attention.window
  if x.cu_seqlens is not None:
    cfg, own = _packed_operands(call, x._replace(sink=None))
    own = own._replace(q=own.q[None], k=own.k[None], v=own.v[None],
                       cu_seqlens_k=None)
  else:
    cfg, own = _operands(call, x._replace(bias=None, sink=None))
  if x.bias is not None:
    # It is checked against the keys that it is for.
    whole = jnp.zeros((x.q.shape[0], size * s, 1, 1), x.q.dtype)
    own = own._replace(bias=api.check_bias(
        call.attention, x.bias, x.q, whole))
  cfg = cfg._replace(window_left=left, window_right=call.right)
  out, lse = ring(
      RingConfig(cfg, axis, size, call.balance), vary_together(own))
  if x.cu_seqlens is not None and x.dropout_state is not None:
    out, lse = _without_torn(call, axis, out, lse, x)
  if x.sink is not None:
    out, lse = _with_sink(out, lse, _per_row(call, axis, x.sink, x))
  return out, lse


def _without_torn(call: _Call, axis: str, out, lse, x: _Arrays):
  """Results of a packed call with NaN where a mask would not be one's own.

  A kernel's columns are a multiple of four behind its state's first: borders
  are a multiple of four from the beginning of a sequence that crosses them.
  """
  s, cu = x.q.shape[1], x.cu_seqlens
  piece = s // 2 if call.balance == "zigzag" else s
  torn = (cu[:-1] % 4 != 0) & (
      cu[:-1] // piece < (cu[1:] - 1) // piece)
  factor = _per_row(call, axis, jnp.where(torn, jnp.nan, 1.0)[:, None], x)
  factor = jnp.where(jnp.isnan(factor), factor, 1)
  of_out = jnp.swapaxes(factor, 1, 2)[..., None].astype(out.dtype)
  return out * of_out, lse * factor


def _with_sink(out, lse, sink):
  """What a logit without a value, float32 [b, h, 1 | s], makes of a result."""
  joint = jnp.logaddexp(lse, sink)
  return weighed(out, lse, joint).astype(out.dtype), joint


def _per_row(call: _Call, axis: str, t, x: _Arrays):
  """[b, h, 1 | s] of a number a head; -inf of a packed row of no sequence."""
  q, cu = x.q, x.cu_seqlens
  t = t.astype(jnp.promote_types(q.dtype, jnp.float32))
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


def _all_gather(call: _Call, axis: str, x: _Arrays):
  where = "strategy='all_gather'"
  if call.balance == "striped":
    _refuse("load_balance='striped'", where, "'zigzag' and None are possible")
  if call.right and (call.windowed or x.alibi_slopes is not None):
    _refuse("window_size or alibi_slopes", f"{where} and causal=False",
            "strategy='ulysses' has them")
  size, rank = lax.axis_size(axis), lax.axis_index(axis).astype(jnp.int32)
  b, s = x.q.shape[:2]
  gather = lambda t: lax.all_gather(t, axis, axis=1, tiled=True)
  k, v = gather(x.k), gather(x.v)
  if call.balance:
    k, v = (order.restored(t, call.balance, size, 1) for t in (k, v))
  packed = x.cu_seqlens is not None
  if call.right and not packed and x.dropout_state is None:
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
    rows = x.bias is not None and x.bias.ndim > 1 and x.bias.shape[-2] > 1
    cu = x.cu_seqlens
    own = x._replace(
        q=x.q[:, first:last], k=k, v=v,
        bias=x.bias[..., first:last, :] if rows else x.bias,
        dropout_state=at_place(
            x.dropout_state,
            jnp.maximum(begin - cu[:-1], 0) if packed else begin))
    if packed:
      bounds = jnp.clip(cu, begin, end)
      keys = jnp.minimum(cu[1:], end) if call.right == 0 else cu[1:]
      counts = jnp.diff(bounds), jnp.maximum(keys - cu[:-1], 0)
      parts.append(_mha(_packed_operands(
          call, own, lengths=tuple(map(cumulative, counts)),
          first=(bounds - begin, cu))))
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
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
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


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _attend(call: _Call, dropout_key, x: _Arrays):
  # The checks of an ordinary call, by the arguments' own names.
  if x.cu_seqlens is None:
    _, own = api.operands(
        call.attention, None, dropout_key, x.q, x.k, x.v, None, None, None,
        None, x.alibi_slopes, x.sink)
  else:
    if x.bias is not None:
      raise bad(_NAME, "bias", "given", "none with cu_seqlens")
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
    raise bad(_NAME, name, repr(value), accepted)
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
):
  """`flash_attn_func` of a sequence that is divided over devices.

  To be called in a `jax.shard_map` over `axis_name`; arrays are one device's.
  Results and gradients are those of the whole sequence on one device.

  Strategies:
    "ring": keys and values go round, and no device ever holds all of them; the
      next ones are under way while attention to these is computed. A window
      skips the steps that it hides.
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
    dropout_p: as in flash_attn_func, whose mask it is. In a ring not with
      "striped", and there s is a multiple of 4, with "zigzag" of 8; of packed
      sequences those that lie on both sides of a border between devices, or
      their halves, begin at a multiple of 4, or come out as NaN.
    softmax_scale: factor on q.k; None is 1 / sqrt(dqk).
    causal: a token sees itself and those before it.
    window_size: (left, right) in tokens of the whole sequence, -1 for
      unbounded; with "all_gather" only if causal, in a ring with "striped"
      without a right side, and not at all with "zigzag". A third number,
      leading keys that stay visible, not in a ring.
    bias: [b | 1, hq | 1, s | 1, keys] with a column for each key of the whole
      sequence, in the order in which the devices hold these; for "all_gather"
      in the order of the sequence.
    alibi_slopes: [hq] or [b, hq]; with "all_gather" only if causal, in a ring
      with "striped" alone, if causal, and there without a gradient.
    deterministic: see flash_attn_func.
    return_lse: return the log-sum-exp of every row too.
    axis_name: the mesh axis that divides the sequence, or two.
    strategy: see above.
    load_balance: order of the tokens: None, as they follow each other, or one
      in which devices have equal work if causal: "zigzag" or "striped" ("ring"
      and "ulysses"), as `reorder_causal_load_balancing` makes them.
    dropout_key: a JAX PRNG key, required if dropout_p > 0; one for all devices.
    cu_seqlens: int [n + 1], cumulative lengths of sequences that are packed in
      one axis, which all devices together have; the same on all. q is then
      [s, hq, dqk], and k, v, out likewise; lse is [hq, s]. Numbers and traced
      lengths are as in flash_attn_varlen. No bias; in a ring no alibi_slopes,
      and windows with "striped" alone.
    logits_soft_cap: if > 0, scaled scores become cap * tanh(score / cap).
    sink: [hq] or [b, hq], a logit in every row's softmax that has no value.

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
  balance = arguments.choice(_NAME, "load_balance", load_balance,
                             (None, *order.STRATEGIES))
  api.check_arrays(
      _NAME, dict(q=q, k=k, v=v),
      dict(bias=bias, alibi_slopes=alibi_slopes, dropout_key=dropout_key,
           sink=sink, cu_seqlens=cu_seqlens))
  if cu_seqlens is not None:
    total = q.shape[0] * math.prod(map(lax.axis_size, axes))
    arguments.check_cumulative(_NAME, "cu_seqlens", cu_seqlens, total)
  call = api.static_arguments(
      _NAME, dropout_p, softmax_scale, causal, window_size, logits_soft_cap,
      deterministic,
      return_lse=arguments.flag(_NAME, "return_lse", return_lse),
      names=("q", "k", "v", "cu_seqlens", "cu_seqlens", "dropout_key"))
  return _attend(_Call(call, axes, strategies, balance), dropout_key,
                 _Arrays(q, k, v, bias, alibi_slopes, sink, cu_seqlens))
