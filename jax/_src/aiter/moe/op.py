# SPDX-License-Identifier: Apache-2.0
"""Routing as operators: the experts of tokens, and experts' tokens in order.

Both return integers that are exact on every device. What is learned through
routing (weights of experts, rows that are moved) is in route.py and move.py, in
jax.numpy, of these integers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core.dispatch import like
from jax._src.aiter.core.operator import Key, operator, rows_lead, with_axis

_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_PART = 128  # kMoePart: entries that a block of a kernel sorts
_LEAST = np.int32(-(2**31))


class TopK(NamedTuple):
  """Static facts of a choice of experts; hashable.

  Attributes:
    k: experts of a token.
    groups: equal groups of experts.
    topk_groups: how many of them count.
    by_sum: groups are compared by the sum of their two best, not by the best.
  """
  k: int
  groups: int = 1
  topk_groups: int = 1
  by_sum: bool = False


class Scores(NamedTuple):
  """The array of a choice.

  Attributes:
    x: [..., experts].
  """
  x: jax.Array


class Sort(NamedTuple):
  """Static facts of a sort; hashable.

  Attributes:
    experts: how many there are.
    block: of what an expert's first place is a multiple.
  """
  experts: int
  block: int = 1


class Entries(NamedTuple):
  """The array of a sort.

  Attributes:
    ids: int32 [n], each entry's expert; of none it is left out.
  """
  ids: jax.Array


class Sorted(NamedTuple):
  """Results of a sort.

  Attributes:
    counts: int32 [experts].
    place: int32 [n], where each entry lies; -1 of one left out.
    order: int32 [n + experts * (block - 1)], 1 + the entry that lies there; 0
      of none.
  """
  counts: jax.Array
  place: jax.Array
  order: jax.Array


# -----------------------------------------------------------------------------
# The formulas in jax.numpy


def ordered(x):
  """float32 as int32 in the same order; NaN as -inf, and -0 as 0."""
  x = jnp.where(jnp.isnan(x), -jnp.inf, x.astype(jnp.float32))
  bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
  return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def choose_reference(cfg: TopK, rows: Scores) -> jax.Array:
  """int32 [..., k]: the columns of the largest scores."""
  x = rows.x.astype(jnp.float32)
  number = ordered(x)
  if cfg.topk_groups < cfg.groups:
    size = x.shape[-1] // cfg.groups
    grouped = lambda t: t.reshape(*t.shape[:-1], cfg.groups, size)
    best = jnp.max(grouped(number), -1)
    if cfg.by_sum and size > 1:
      two = jnp.where(jnp.isnan(x), -jnp.inf, x)
      a, b = jnp.moveaxis(lax.top_k(grouped(two), 2)[0], -1, 0)
      best = ordered(a + b)
    kept = lax.top_k(best, cfg.topk_groups)[1]
    kept = (kept[..., None] == jnp.arange(cfg.groups)).any(-2)
    number = jnp.where(jnp.repeat(kept, size, -1), number, _LEAST)
  return lax.top_k(number, cfg.k)[1]


def sort_reference(cfg: Sort, entries: Entries) -> Sorted:
  """The sort by JAX's own stable one."""
  ids = entries.ids
  n = ids.shape[0]
  known = (ids >= 0) & (ids < cfg.experts)
  ids = jnp.where(known, ids, cfg.experts)
  entry = jnp.arange(n, dtype=jnp.int32)
  expert, order = lax.sort((ids, entry), num_keys=1, is_stable=True)
  experts = jnp.arange(cfg.experts, dtype=jnp.int32)
  # A binary search takes a known number of steps; entries may be symbols.
  counts = jnp.sum(ids[:, None] == experts, 0, dtype=jnp.int32)
  padded = (counts + cfg.block - 1) // cfg.block * cfg.block
  # The last is of what is no expert's, and all there is without experts.
  start, first = (jnp.pad(jnp.cumsum(t) - t, (0, 1)) for t in (padded, counts))
  at = jnp.where(expert < cfg.experts, start[expert] + entry - first[expert],
                 -1)
  place = jnp.zeros(n, jnp.int32).at[order].set(at, unique_indices=True)
  size = n + cfg.experts * (cfg.block - 1)
  return Sorted(counts, place, jnp.zeros(size, jnp.int32).at[
      jnp.where(at < 0, size, at)].set(order + 1, mode="drop"))


# -----------------------------------------------------------------------------
# Kernels


def _choice_served(cfg: TopK, rows: Scores) -> Key | None:
  x = rows.x
  if x.size == 0 or x.dtype.name not in _DTYPES:
    return None
  return Key("moe_topk", x.dtype.name,
             (cfg.groups, x.shape[-1] // cfg.groups),
             ("by_sum",) if cfg.by_sum else ())


def _choice_kernel(cfg: TopK, call, rows: Scores) -> jax.Array:
  x = rows.x
  flat = x.reshape(-1, x.shape[-1])
  ids = call(like(x, (flat.shape[0], cfg.k), jnp.int32), flat,
             groups=np.int32(cfg.groups), by_sum=cfg.by_sum,
             topk_groups=np.int32(cfg.topk_groups))
  return ids.reshape(*x.shape[:-1], cfg.k)


def _choice_specs(_, rows: Scores):
  lead = tuple(f"r{i}" for i in range(rows.x.ndim - 1))
  return (Scores((*lead, "e")),), (*lead, "_")


def _sort_served(cfg: Sort, entries: Entries) -> Key | None:
  if entries.ids.size == 0 or cfg.experts == 0:
    return None
  return Key("moe_sort", "bfloat16", ())


def _sort_kernel(cfg: Sort, call, entries: Entries) -> Sorted:
  ids = entries.ids
  n = ids.shape[0]
  of = lambda *shape: like(ids, shape, jnp.int32)
  return Sorted(*call(
      (of(cfg.experts), of(n), of(n + cfg.experts * (cfg.block - 1)),
       of((n + _PART - 1) // _PART, cfg.experts)), ids,
      block=np.int32(cfg.block))[:3])


def _sort_specs(_, entries: Entries):
  del entries
  return (Entries(("n",)),), Sorted(("_",), ("n",), ("_",))


def _sort_batch(_, op, size, mapped, entries):
  return lax.map(op, with_axis(size, mapped[0], entries))


# -----------------------------------------------------------------------------
# Operators

# (TopK, Scores) -> int32 [..., k]
choose = operator(
    target="moe_topk", kernel=_choice_kernel, reference=choose_reference,
    specs=_choice_specs, split=("r",), serves=_choice_served, dtypes=_DTYPES,
    batch=rows_lead())

# (Sort, Entries) -> Sorted
sort = operator(
    target="moe_sort", kernel=_sort_kernel, reference=sort_reference,
    specs=_sort_specs, split=(), serves=_sort_served, dtypes=_DTYPES,
    batch=_sort_batch)
