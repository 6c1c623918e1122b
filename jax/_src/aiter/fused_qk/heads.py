# SPDX-License-Identifier: Apache-2.0
"""Heads of queries, keys and values, as one operator.

RMSNorm of queries and keys, rotation, rounding to 8 bits and the write into a
paged cache, which aliases its operand, are one launch. Without a cache and
rounding the formula has derivatives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.cache import op as cache
from jax._src.aiter.core import rounding
from jax._src.aiter.core.dims import at_most
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, with_axis
from jax._src.aiter.core.partition import axes_of_arguments
from jax._src.aiter.fused_qk import op as latent

# What divides the columns of calls for the fast kernels.
_ALIGNED = 16


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    packed: (heads of q, heads of k and of v) if q has all of them; else ().
    gptj: pairs are neighbours; else halves.
    first: the first column that is rotated.
    eps: of the norm.
    gemma: the norm's weight is 1 + weight.
    joint: the norm is of all heads of a token together.
    sections: numbers of pairs, each with a position of its own; or ().
    interleaved: pairs of the sections take turns.
    q_kind: what queries are rounded to, of cache.KINDS; else empty.
    layout: of cache.LAYOUTS; empty without a cache.
    mode: of the cache, as in cache.Config.
    kv_out: keys and values are results too.
  """
  packed: tuple[int, ...] = ()
  gptj: bool = False
  first: int = 0
  eps: float = 0.0
  gemma: bool = False
  joint: bool = False
  sections: tuple[int, ...] = ()
  interleaved: bool = False
  q_kind: str = ""
  layout: str = ""
  mode: str = "copy"
  kv_out: bool = True


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    k_cache: by the layout, q's dtype or one of cache.KINDS; or None.
    v_cache: likewise.
    k_scale: of mode "cast" float32 [1] or [k_heads], or None; of "token"
      float32 [pages, k_heads, page_size].
    v_scale: likewise.
    q: [tokens, heads, dim]; packed, [tokens, (heads + 2 k_heads) * dim].
    k: [tokens, k_heads, dim], or None of a packed q.
    v: likewise; None too without a cache.
    q_weight: [dim], or [heads * dim] of a joint norm; None without a norm.
    k_weight: likewise of k_heads.
    cos: [rows, pairs], q's dtype or float32; without sin [rows, 2 * pairs],
      the cosines and then the sines.
    sin: [rows, pairs], or None.
    positions: int32 [tokens], rows of the tables; with sections [3, tokens].
    slots: int32 [tokens], or None without a cache.
    q_scale: float32 [1], or None.
  """
  k_cache: jax.Array | None
  v_cache: jax.Array | None
  k_scale: jax.Array | None
  v_scale: jax.Array | None
  q: jax.Array
  k: jax.Array | None
  v: jax.Array | None
  q_weight: jax.Array | None
  k_weight: jax.Array | None
  cos: jax.Array
  sin: jax.Array | None
  positions: jax.Array
  slots: jax.Array | None
  q_scale: jax.Array | None


class Results(NamedTuple):
  """Results of a call; an absent one is None.

  Attributes:
    k_cache: as in Operands.
    v_cache: likewise.
    k_scale: of mode "token".
    v_scale: likewise.
    q: [tokens, heads, dim].
    k: [tokens, k_heads, dim].
    v: likewise.
  """
  k_cache: jax.Array | None
  v_cache: jax.Array | None
  k_scale: jax.Array | None
  v_scale: jax.Array | None
  q: jax.Array
  k: jax.Array | None
  v: jax.Array | None


class _Sizes(NamedTuple):
  tokens: int
  heads: int
  k_heads: int
  v_heads: int
  dim: int
  pairs: int


def _sizes(cfg: Config, x: Operands) -> _Sizes:
  pairs = x.cos.shape[1] if x.sin is not None else x.cos.shape[1] // 2
  if cfg.packed:
    hq, hk = cfg.packed
    return _Sizes(x.q.shape[0], hq, hk, hk, x.q.shape[1] // (hq + 2 * hk),
                  pairs)
  tokens, heads, dim = x.q.shape
  return _Sizes(tokens, heads, x.k.shape[1],
                0 if x.v is None else x.v.shape[1], dim, pairs)


def _wide(t):
  return t.astype(jnp.promote_types(t.dtype, jnp.float32))


def _section_of(cfg: Config, pair):
  """Of each pair the section that it is of."""
  first, second, third = cfg.sections
  if cfg.interleaved:
    turn = pair % 3
    return jnp.where(pair < 3 * jnp.where(turn == 1, second, third), turn, 0)
  return (pair >= first).astype(jnp.int32) + (pair >= first + second)


def _tables(cfg: Config, x: Operands):
  """(cosines, sines) of each token, float32 or wider [tokens, 1, pairs]."""
  pairs = _sizes(cfg, x).pairs
  cos, sin = (x.cos, x.sin) if x.sin is not None else (
      x.cos[:, :pairs], x.cos[:, pairs:])
  row = jnp.clip(x.positions, 0, x.cos.shape[0] - 1)

  def of(table):
    if cfg.sections:
      pair = jnp.arange(pairs)
      return table[row[_section_of(cfg, pair)].T, pair]
    return table[row]

  return tuple(_wide(of(t))[:, None] for t in (cos, sin))


def _made(cfg: Config, t, weight, cos, sin):
  """Heads of queries or keys in float32 or wider."""
  t = _wide(t)
  _, heads, dim = t.shape
  if weight is not None:
    axes = (1, 2) if cfg.joint else (2,)
    mean = jnp.mean(t * t, axes, keepdims=True)
    w = _wide(weight).reshape((heads, dim) if cfg.joint else (dim,))
    t = t * (1 / jnp.sqrt(mean + np.asarray(cfg.eps, t.dtype))) * (
        1 + w if cfg.gemma else w)
  end = cfg.first + 2 * cos.shape[-1]
  turned = latent.rotated(cfg.gptj, t[..., cfg.first:end], cos, sin)
  return jnp.concatenate([t[..., :cfg.first], turned, t[..., end:]], -1)


def _apart(cfg: Config, x: Operands):
  """(q, k, v), each [tokens, heads, dim]."""
  if not cfg.packed:
    return x.q, x.k, x.v
  n = _sizes(cfg, x)
  whole = x.q.reshape(n.tokens, n.heads + 2 * n.k_heads, n.dim)
  return (whole[:, :n.heads], whole[:, n.heads:n.heads + n.k_heads],
          whole[:, n.heads + n.k_heads:])


def _as_cache(cfg: Config, x: Operands) -> cache.Config:
  kind = x.k_cache.dtype.name
  return cache.Config(cfg.layout, cache.page_size(cfg.layout, x.k_cache),
                      cfg.mode, "" if cfg.mode == "copy" else kind)


def reference(cfg: Config, x: Operands) -> Results:
  """The formula in jax.numpy."""
  cos, sin = _tables(cfg, x)
  q, k, v = _apart(cfg, x)
  dtype = x.q.dtype
  q = _made(cfg, q, x.q_weight, cos, sin)
  k = _made(cfg, k, x.k_weight, cos, sin)
  pools = (None,) * 4
  if cfg.layout:
    pools = cache.reference(_as_cache(cfg, x), cache.Operands(
        *x[:4], k, v.astype(k.dtype), x.slots))
  if cfg.q_kind:
    q = q if x.q_scale is None else rounding.divide(q, x.q_scale)
    q = rounding.round_to(q, cache.KINDS[cfg.q_kind])
  return Results(*pools, q if cfg.q_kind else q.astype(dtype),
                 *((k.astype(dtype), v) if cfg.kv_out else (None, None)))


def _kernel(cfg: Config, call, x: Operands) -> Results:
  n, q = _sizes(cfg, x), x.q
  kv = (n.tokens, n.k_heads, n.dim)
  written = [*x[:2], *(x[2:4] if cfg.mode == "token" else (None, None))]
  types = [*(None if t is None else (t.shape, t.dtype) for t in written),
           ((n.tokens, n.heads, n.dim), cfg.q_kind or q.dtype),
           (kv, q.dtype) if cfg.kv_out else None,
           (kv, q.dtype) if cfg.kv_out and n.v_heads else None]
  sides = scales = (np.zeros(8, np.int64), np.zeros(4, np.int64))
  size = 0
  if cfg.layout:
    of, rows = _as_cache(cfg, x), jax.ShapeDtypeStruct(kv, q.dtype)
    given = cache.Operands(*x[:4], rows, rows, x.slots)
    numbers = lambda both: [np.asarray(t, np.int64) for t in both]
    sides, size = numbers(cache.sides(of, given)), of.page_size
    scales = numbers(cache.scales(of, given))
  defaults = dict(q_scale=jnp.float32, k_scale=jnp.float32,
                  v_scale=jnp.float32, slots=jnp.int32, sin=x.cos.dtype)
  ends = [3 * m for m in cfg.sections[1:]] if cfg.interleaved else list(
      np.cumsum(cfg.sections[:2])) or [0, 0]
  results = call._replace(aliases={
      i: i for i, t in enumerate(written) if t is not None})(
      [like(q, *(((0,), q.dtype) if t is None else t)) for t in types],
      *(absent(t, defaults.get(name, q.dtype))
        for name, t in x._asdict().items()),
      k_side=sides[0], v_side=sides[1 if cfg.layout else 0],
      k_scales=scales[0], v_scales=scales[1],
      page_size=np.int64(size), token=cfg.mode == "token",
      heads=np.int64((*cfg.packed, 0)[0]),
      k_heads=np.int64((*cfg.packed, 0, 0)[1]),
      gptj=cfg.gptj, first=np.int64(cfg.first), eps=np.float32(cfg.eps),
      gemma=cfg.gemma, joint=cfg.joint, has_sections=bool(cfg.sections),
      interleaved=cfg.interleaved, section_0=np.int64(ends[0]),
      section_1=np.int64(ends[1]))
  return Results(*(None if t is None else new
                   for t, new in zip(types, results)))


def _serves(cfg: Config, x: Operands) -> Key | None:
  n = _sizes(cfg, x)
  if any(at_most(size, 0) for t in x if t is not None for size in t.shape):
    return None
  on = {"gptj": cfg.gptj, "norm": x.q_weight is not None, "gemma": cfg.gemma,
        "joint": cfg.joint, "sections": bool(cfg.sections),
        "unaligned": any(m % _ALIGNED != 0 for m in (
            n.dim, n.pairs, cfg.first)),
        "partial": n.dim != 2 * n.pairs}
  return Key("fused_qk_heads", x.q.dtype.name, (n.dim, 2 * n.pairs),
             tuple(name for name, holds in on.items() if holds))


def _specs(cfg: Config, x: Operands):
  """Heads are divided, as those of the caches are; without them tokens too."""
  t = "_" if cfg.layout else "t"
  # A packed q gives keys and values of all heads, if they are results.
  whole = cfg.joint or cfg.packed and cfg.kv_out
  hq, hk = ("_", "_") if whole else ("h0", "h1")
  q, k = (t, hq, "_"), (t, hk, "_")

  def pool(i):
    return tuple(hk if n == "head" else "_" for n in cache.LAYOUTS[
        cfg.layout][i])

  def scale(s):
    if s is not None and cfg.mode == "token":
      return ("_", hk, "_")
    return (hk if s is not None and s.shape[0] > 1 else "_",)

  given = Operands(
      pool(0) if cfg.layout else None, pool(1) if cfg.layout else None,
      scale(x.k_scale), scale(x.v_scale), (t, "_") if cfg.packed else q, k, k,
      ("_",), ("_",), ("_", "_"), ("_", "_"),
      ("_", t) if cfg.sections else (t,), (t,), ("_",))
  given = Operands(*(None if a is None else s for a, s in zip(x, given)))
  token = given[2:4] if cfg.mode == "token" else (None, None)
  plain = lambda s: (t, "_", "_") if cfg.packed else s
  kv = _sizes(cfg, x).v_heads and plain(k)
  return (given,), Results(
      *given[:2], *token, plain(q), *(
          (plain(k), kv or None) if cfg.kv_out else (None, None)))


def _plan(cfg: Config, run, mesh, args):
  """Keys' heads are divided as those of the caches are, if there are any.

  All shards have a packed q, and take their own keys and values out of it.
  """
  (own,), results = _specs(cfg, *args)
  x, = args
  if not cfg.layout:
    return axes_of_arguments(mesh, (own,), _SPLIT, args, results), run
  axes = axes_of_arguments(mesh, (own.k_cache, own.q), _SPLIT,
                           (x.k_cache, x.q), results)
  over = axes.get("h1", ())
  if not (cfg.packed and over):
    return axes, run
  n = _sizes(cfg, x)
  k_heads = n.k_heads // math.prod(mesh.shape[a] for a in over)

  def part(x):
    q, *kv = _apart(cfg, x)
    first = lax.axis_index(over) * k_heads
    kv = [lax.dynamic_slice_in_dim(t, first, k_heads, 1) for t in kv]
    q = jnp.concatenate([q, *kv], 1).reshape(n.tokens, -1)
    return heads.run(cfg._replace(packed=(n.heads, k_heads)), x._replace(q=q))

  return axes, part


def _batch(cfg: Config, op, size: int, mapped, x: Operands) -> Results:
  """Without caches a mapped axis is one more of tokens."""
  m, = mapped
  if cfg.layout or any((m.q_weight, m.k_weight, m.cos, m.sin, m.q_scale)):
    return lax.map(op, with_axis(size, m, x))
  own = ("q", "k", "v", "positions")
  at = {n: with_axis(size, getattr(m, n), getattr(x, n)) for n in own}
  fold = lambda t: None if t is None else t.reshape(-1, *t.shape[2:])
  flat = {n: fold(t) for n, t in at.items()}
  if cfg.sections:
    flat["positions"] = jnp.moveaxis(at["positions"], 0, 1).reshape(3, -1)
  return jax.tree.map(lambda t: t.reshape(size, -1, *t.shape[1:]),
                      op(x._replace(**flat)))


_SPLIT = ("h", "t")
# (Config, Operands) -> Results
heads = operator(
    target="fused_qk_heads", kernel=_kernel, reference=reference, specs=_specs,
    split=_SPLIT, serves=_serves, dtypes=latent.DTYPES, batch=_batch,
    plan=_plan)
