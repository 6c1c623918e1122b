# SPDX-License-Identifier: Apache-2.0
"""Sampling as operators: formulas and the kernels' operands.

A row's token depends on the row and its key alone, and is the same on every
platform, sharded or not, by any kernel or none: see exact.py. The rows shard
over a mesh; a mapped axis is more rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core import dims
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, with_axis
from jax._src.aiter.core.philox import philox4x32
from jax._src.aiter.core.rounding import divide
from jax._src.aiter.sampling import exact

MAX_COLS = 1 << 21  # A total of weights is one of so many.
MAX_RANKED = 1024  # More are XLA's.
# Up to so many columns are XLA's too: its time is as the columns, a kernel's as
# the rows. But on AMD its sort does not wait for what it wrote, and from 1024
# columns on CUDA its kernel for a small k orders NaN and zeros otherwise.
_MAX_SHORT = {"rocm": 0, "cuda": 1000}
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
# Temperatures below it are 0: of subnormal numbers some devices make 0.
_TINY = 2.0**-126

# What scratch is sized by; src/sampling.cc and the kernels have the same.
_MAX_PARTS = 64
_LEAST_PART, _USUAL_PART, _MAX_PART = 2048, 4096, 32768
_BLOCKS = 528  # Of a device's multiprocessors, some each.
# Parts with enough maxima to bound from what the lists of the k largest begin
# with, up to 1024.
_BOUNDING = 8
_MAXIMA = 256
_BINS = 2048
_SUMS = 16
_CANDIDATES = 16384
_STATE = 16


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    of: what is wanted: the "largest" column, a "draw", or the "limit" alone.
    probs: rows are of probabilities, which are weights, not of logits.
    k_first: top_p counts of what top_k has left, not of all.
  """
  of: str
  probs: bool = False
  k_first: bool = False


class Rows(NamedTuple):
  """Arrays of a call; an absent one is None, and does not limit anything.

  Attributes:
    logits: [b, v] bfloat16 or float32.
    keys: uint32 [b, 4]: Philox's key, the row's counter and its stream.
    temperature: float32 [b]; below 2^-126 the largest column is taken.
    top_k: int32 [b]; not above 0: no limit.
    top_p: float32 [b]; not below 1: no limit.
    min_p: float32 [b], of the largest weight.
    mask: int32 [b, ceil(v / 32)]: bit c % 32 of word c // 32 allows column c.
    exponentials: float32 [b, v], in place of Philox's.
  """
  logits: jax.Array
  keys: jax.Array | None = None
  temperature: jax.Array | None = None
  top_k: jax.Array | None = None
  top_p: jax.Array | None = None
  min_p: jax.Array | None = None
  mask: jax.Array | None = None
  exponentials: jax.Array | None = None


class Drawn(NamedTuple):
  """Results of a call.

  Attributes:
    tokens: int32 [b], -1 where no column may be drawn; None of a "limit".
    limit: int32 [b], the order_key from which on top_k and top_p keep columns;
      None of the others.
  """
  tokens: jax.Array | None
  limit: jax.Array | None


# -----------------------------------------------------------------------------
# The formula in jax.numpy


def words_of(keys, v):
  """Random words of columns: uint32 [b, v]."""
  blocks = dims.round_up(v, 4) // 4
  k0, k1, counter, stream = (keys[:, i:i + 1] for i in range(4))
  words = philox4x32((k0, k1), (lax.iota(jnp.uint32, blocks)[None], counter,
                                stream, np.uint32(0)))
  return jnp.stack(words, -1).reshape(keys.shape[0], 4 * blocks)[:, :v]


def _keys(cfg: Config, rows: Rows):
  """Columns in float32, and int32 keys in their order; DEAD: never drawn."""
  v = rows.logits.astype(jnp.float32)
  v = jnp.where(v == 0, 0, v)  # No zero is negative.
  live = v > (0 if cfg.probs else -jnp.inf)
  if rows.mask is not None:
    c = lax.iota(jnp.int32, v.shape[1])
    live &= (rows.mask[:, c // 32] >> (c % 32)) & 1 == 1
  return v, jnp.where(live, exact.order_key(v), exact.DEAD)


def _weights(cfg: Config, rows: Rows, v, top):
  """Weights in float32, the largest being 1, and in units of 2^-31."""
  if cfg.probs:
    weight = jnp.where(v == top, 1, divide(v, top))
    return weight, (weight * np.float32(2.0**31)).astype(jnp.uint32)
  t = rows.temperature[:, None]
  d = jnp.minimum(jnp.where(v == top, 0, top - v), np.float32(3e38))
  return exact.exp_minus(divide(d, jnp.where(t >= _TINY, t, 1)))


def _limit(key, whole, number, weight):
  """The largest key that so many columns reach, or columns of such a weight.

  A limit that is None is none; DEAD is the key that all reach.
  """
  live, order = key != exact.DEAD, _unsigned(key)

  def add_bit(i, limit):
    trial = limit | (np.uint32(1 << 31) >> i.astype(jnp.uint32))
    over = live & (order >= trial[:, None])
    good = jnp.zeros(limit.shape, bool)
    if number is not None:
      good |= jnp.sum(over, -1, dtype=jnp.int32) >= number
    if weight is not None:
      good |= exact.at_least(exact.total(jnp.where(over, whole, 0)), weight)
    return jnp.where(good, trial, limit)

  limit = lax.fori_loop(0, 32, add_bit, order[:, 0] & np.uint32(0))
  return _signed(limit)


def _unsigned(key):
  return lax.bitcast_convert_type(key, jnp.uint32) ^ np.uint32(1 << 31)


def _signed(order):
  return lax.bitcast_convert_type(order ^ np.uint32(1 << 31), jnp.int32)


def _limits(cfg: Config, rows: Rows, key, whole):
  """The key from which on top_k and top_p keep columns."""
  number = weight = None
  all_of = np.int32(MAX_COLS + 1)
  if rows.top_k is not None:
    number = jnp.where(rows.top_k > 0, rows.top_k, all_of)
  if rows.top_p is None:
    return _limit(key, whole, number, None)
  kept = key != exact.DEAD
  limit = None
  if number is not None and cfg.k_first:
    limit, number = _limit(key, whole, number, None), None
    kept &= key >= limit[:, None]
  of = exact.share(rows.top_p, exact.total(jnp.where(kept, whole, 0)))
  none = rows.top_p >= 1
  weight = jnp.where(none | jnp.isnan(rows.top_p), np.uint32(1 << 31),
                     of[0]), of[1]
  second = _limit(key, whole, number, weight)
  return second if limit is None else jnp.maximum(limit, second)


def reference(cfg: Config, rows: Rows) -> Drawn:
  """The operator in jax.numpy."""
  b, cols = rows.logits.shape
  if dims.is_known(cols) and cols == 0:
    none = jnp.full((b,), -1, jnp.int32)
    return Drawn(None, none) if cfg.of == "limit" else Drawn(none, None)
  v, key = _keys(cfg, rows)
  top_key = jnp.max(key, -1, keepdims=True)
  if cfg.of == "largest":
    token = jnp.argmax(key, -1).astype(jnp.int32)
    return Drawn(jnp.where(top_key[:, 0] == exact.DEAD, -1, token), None)
  live = key != exact.DEAD
  top = jnp.max(jnp.where(live, v, -jnp.inf), -1, keepdims=True)
  weight, whole = _weights(cfg, rows, v, top)
  limit = jnp.full((b,), exact.DEAD)
  if rows.top_k is not None or rows.top_p is not None:
    limit = _limits(cfg, rows, key, whole)
  if cfg.of == "limit":
    return Drawn(None, limit)
  if rows.exponentials is None:
    e = exact.exponential(words_of(rows.keys, cols))
  else:
    e = rows.exponentials
  score = divide(weight, e)
  kept = live & (key >= limit[:, None])
  if rows.min_p is not None:
    kept &= weight >= rows.min_p[:, None]
  score = jnp.where(score > 0, score, 0)
  if not cfg.probs:
    cold = ~(rows.temperature >= _TINY)[:, None]
    kept = jnp.where(cold, live & (key == top_key), kept)
    score = jnp.where(cold, 1, score)
  token = jnp.argmax(jnp.where(kept, score, -1), -1).astype(jnp.int32)
  return Drawn(jnp.where(jnp.any(kept, -1), token, -1), None)


# -----------------------------------------------------------------------------
# The operators


def _parts(b, v, lists: bool) -> int:
  """Blocks that share a row."""
  if not dims.is_known(v):
    return _MAX_PARTS
  usual = min(_MAX_PARTS, -(-v // _USUAL_PART))
  if dims.is_known(b):
    usual = min(usual, -(-_BLOCKS // b))
  bounding = _BOUNDING if lists else 0
  return max(usual, -(-v // _MAX_PART), min(bounding, -(-v // _LEAST_PART)))


def _scratch(x, draws: bool, lists: bool, limits: bool):
  """Types of the results that are scratch."""
  b, v = x.shape
  parts = _parts(b, v, lists)
  # Pairs are int64, which there is none of without x64.
  of = lambda there, dtype, *shape: like(x, shape if there else (0,), dtype)
  return (of(True, jnp.uint32, b, 2, parts, 2),
          of(draws, jnp.uint32, b, parts, _MAXIMA, 2),
          of(limits, jnp.uint32, b, parts, _BINS, 2),
          of(limits, jnp.uint32, b, parts, _SUMS, 2),
          of(lists, jnp.int32, b, _CANDIDATES),
          of(lists, jnp.uint32, b, _STATE, 2))


def _kernel(cfg: Config, call, rows: Rows) -> Drawn:
  x = rows.logits
  b = x.shape[0]
  limits = rows.top_k is not None or rows.top_p is not None
  tokens, *_, state = call(
      (like(x, (0,) if cfg.of == "limit" else (b,), jnp.int32),
       *_scratch(x, cfg.of != "largest", limits, limits)),
      x, absent(rows.keys, jnp.uint32),
      *(absent(t, dtype) for t, dtype in (
          (rows.temperature, jnp.float32), (rows.top_k, jnp.int32),
          (rows.top_p, jnp.float32), (rows.min_p, jnp.float32),
          (rows.mask, jnp.int32), (rows.exponentials, jnp.float32))),
      of=cfg.of, probs=cfg.probs, k_first=cfg.k_first)
  if cfg.of == "limit":
    # The high word of the state's sixth field.
    return Drawn(None, lax.bitcast_convert_type(state[:, 5, 1], jnp.int32))
  return Drawn(tokens, None)


def _serves(cfg: Config, rows: Rows) -> Key | None:
  if rows.logits.size == 0:
    return None
  here = dict(
      mask=rows.mask is not None, top_k=rows.top_k is not None,
      top_p=rows.top_p is not None, k_first=cfg.k_first, probs=cfg.probs,
      min_p=rows.min_p is not None,
      given=rows.exponentials is not None, greedy=cfg.of == "largest",
      limit_only=cfg.of == "limit")
  return Key("sampling_draw", rows.logits.dtype.name, (0,),
             tuple(name for name, present in here.items() if present))


def _specs(cfg: Config, rows: Rows):
  own = jax.tree.map(lambda t: ("b", "_") if t.ndim == 2 else ("b",), rows)
  if cfg.of == "limit":
    return (own,), Drawn(None, ("b",))
  return (own,), Drawn(("b",), None)


def _batch(_, op, size, mapped, rows):
  """Rows of all elements in one call."""
  every = with_axis(size, mapped[0], rows)
  out = op(jax.tree.map(lambda t: t.reshape(-1, *t.shape[2:]), every))
  return jax.tree.map(lambda t: t.reshape(size, -1, *t.shape[1:]), out)


# (Config, Rows) -> Drawn.
draw = operator(
    target="sampling_draw", kernel=_kernel, reference=reference, specs=_specs,
    split=("b",), serves=_serves, dtypes=_DTYPES, batch=_batch)


def _rank_reference(k: int, rows: Rows):
  return tuple(lax.top_k(rows.logits, k))


def _rank_kernel(k: int, call, rows: Rows):
  x = rows.logits
  if dims.at_most(x.shape[1], _MAX_SHORT[call.platform]):
    return _rank_reference(k, rows)
  b = x.shape[0]
  values, tokens, *_ = call(
      (like(x, (b, k), x.dtype), like(x, (b, k), jnp.int32),
       *_scratch(x, True, True, False)), x, k=np.int32(k))
  return values, tokens


def _rank_serves(k: int, rows: Rows) -> Key | None:
  v = rows.logits.shape[1]
  if rows.logits.size == 0 or not 0 < k <= MAX_RANKED or (
      not dims.at_most(v, MAX_COLS)):
    return None
  return Key("sampling_top_k", rows.logits.dtype.name, (k,))


def _rank_formula(k: int, rows: Rows):
  """What has the derivative: values are taken from where they are."""
  places = rank(k, lax.stop_gradient(rows))[1]
  return jnp.take_along_axis(rows.logits, places, -1), places


# (k, Rows of logits alone) -> values and columns, [b, k].
rank = operator(
    target="sampling_top_k", kernel=_rank_kernel, reference=_rank_reference,
    formula=_rank_formula,
    specs=lambda k, rows: (_specs(Config("draw"), rows)[0],
                           (("b", "_"), ("b", "_"))),
    split=("b",), serves=_rank_serves, dtypes=_DTYPES, batch=_batch)


def _select_reference(k: int, rows: Rows):
  v = rows.logits.astype(jnp.float32)
  v = jnp.where(v == 0, 0, jnp.where(jnp.isnan(v), jnp.nan, v))
  c = lax.broadcasted_iota(jnp.int32, v.shape, 1)
  live = (c >= rows.mask[:, :1]) & (c < rows.mask[:, 1:])
  key = jnp.where(live, exact.order_key(v), exact.DEAD)
  some = jax.core.min_dim(k, v.shape[1])
  key, places = lax.top_k(key, some)
  # Columns in their order; behind them what stands for none.
  none = np.int32(MAX_COLS)
  places = jnp.sort(jnp.where(key == exact.DEAD, none, places), -1)
  places = jnp.pad(places, ((0, 0), (0, k - some)), constant_values=none)
  return jnp.where(places == none, -1, places)


def _select_kernel(k: int, call, rows: Rows):
  x = rows.logits
  b = x.shape[0]
  columns, _ = call(
      (like(x, (b, k), jnp.int32), like(x, (b, _CANDIDATES), jnp.int32)), x,
      rows.mask, k=np.int32(k))
  return columns


def _select_serves(k: int, rows: Rows) -> Key | None:
  if rows.logits.size == 0 or not 0 < k <= MAX_COLS:
    return None
  return Key("sampling_select", rows.logits.dtype.name, (0,))


# (k, Rows of logits and of spans, int32 [b, 2], as mask) -> int32 [b, k].
select = operator(
    target="sampling_select", kernel=_select_kernel,
    reference=_select_reference,
    specs=lambda k, rows: (_specs(Config("draw"), rows)[0], ("b", "_")),
    split=("b",), serves=_select_serves, dtypes=_DTYPES, batch=_batch)
