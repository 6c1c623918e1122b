# SPDX-License-Identifier: Apache-2.0
"""Logits of DeepSeek's lightning indexer as an operator."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core.dims import at_most, take
from jax._src.aiter.core.dispatch import absent, like
from jax._src.aiter.core.operator import Key, operator, with_axis

# Of queries and keys.
DTYPES = {"float8_e4m3fn": "e4m3fn", "float8_e4m3fnuz": "e4m3fnuz"}
# What divides the columns of calls for kernels.
_ALIGNED = 16


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    cols: of pages, columns of the logits.
    page_size: keys of a page; 0 of keys that lie one behind another.
    tiles: a page's bytes are tiles of 16 keys by 16 columns.
  """
  cols: int = 0
  page_size: int = 0
  tiles: bool = False


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    q: float8 [sequences, next_n, heads, dim].
    k: q's dtype [cols, dim]; of pages uint8 [pages, page_size * (dim + 4)]:
      bytes of all keys and then their float32 scales.
    k_scale: float32 [cols], or None of pages.
    weights: float32 [sequences, next_n, heads].
    table: int32 [sequences, n], the pages of each; or None.
    starts: int32 [next_n], or None of pages.
    ends: int32 [next_n]; of pages [sequences], the keys of each, of which a
      sequence's queries are the last.
  """
  q: jax.Array
  k: jax.Array
  k_scale: jax.Array | None
  weights: jax.Array
  table: jax.Array | None
  starts: jax.Array | None
  ends: jax.Array


def _columns(cfg: Config, x: Operands):
  return cfg.cols if cfg.page_size else x.k.shape[0]


def _keys_of(cfg: Config, x: Operands):
  """(float32 keys [sequences, cols, dim], scales [..., cols], which there are).

  Without pages one sequence has all.
  """
  dim = x.q.shape[-1]
  if not cfg.page_size:
    return (x.k.astype(jnp.float32)[None], x.k_scale[None],
            jnp.ones((1, x.k.shape[0]), bool))
  size, pages = cfg.page_size, x.k.shape[0]
  n = jnp.arange(cfg.cols)
  page = take(x.table, (slice(None), n // size), -1)
  there = (page >= 0) & (page < pages)
  offset = (n % size)[:, None]
  col = jnp.arange(dim)
  at = (offset // 16 * 16 * dim + offset % 16 * 16 + col // 16 * 256 + col % 16
        if cfg.tiles else offset * dim + col)
  page = jnp.where(there, page, 0)[..., None]
  keys = lax.bitcast_convert_type(take(x.k, (page, at), 0), x.q.dtype)
  # By shifts: with open sizes JAX exports no cast to fewer, larger elements.
  byte = jnp.arange(4)
  parts = take(x.k, (page, size * dim + 4 * offset + byte), 0
               ).astype(jnp.uint32)
  scale = lax.bitcast_convert_type(
      jnp.sum(parts << (8 * byte).astype(jnp.uint32), -1, dtype=jnp.uint32),
      jnp.float32)
  return keys.astype(jnp.float32), scale, there


def reference(cfg: Config, x: Operands):
  """Logits, float32 [sequences, next_n, cols], in jax.numpy."""
  keys, scale, there = _keys_of(cfg, x)
  next_n, cols = x.q.shape[1], _columns(cfg, x)
  n = jnp.arange(cols)

  def add(total, head):
    q, w = head
    dots = jnp.einsum("bmd,bnd->bmn", q.astype(jnp.float32), keys,
                      precision="highest")
    return total + jnp.maximum(dots, 0) * w[..., None], None

  total, _ = lax.scan(
      add, jnp.zeros((*x.q.shape[:2], cols), jnp.float32)
      + 0 * x.weights[..., :1],
      (jnp.moveaxis(x.q, 2, 0), jnp.moveaxis(x.weights, 2, 0)))
  if cfg.page_size:
    start, end = 0, x.ends[:, None] - next_n + 1 + jnp.arange(next_n)
  else:
    start, end = x.starts[None, :, None], x.ends[None]
  seen = (n >= start) & (n < end[..., None]) & there[:, None]
  return jnp.where(seen, total * scale[:, None], -jnp.inf)


def _kernel(cfg: Config, call, x: Operands):
  sequences, next_n = x.q.shape[:2]
  defaults = dict(k_scale=jnp.float32, table=jnp.int32, starts=jnp.int32)
  return call(
      like(x.q, (sequences, next_n, _columns(cfg, x)), jnp.float32),
      *(absent(t, defaults.get(name)) for name, t in x._asdict().items()),
      page_size=np.int64(cfg.page_size), tiles=cfg.tiles)


def _serves(cfg: Config, x: Operands) -> Key | None:
  heads, dim = x.q.shape[2:]
  if dim % _ALIGNED or cfg.page_size * 4 % _ALIGNED or any(
      at_most(n, 0) for t in x if t is not None for n in t.shape):
    return None
  on = {"paged": cfg.page_size > 0, "tiles": cfg.tiles}
  return Key("indexer_logits", x.q.dtype.name, (heads, dim),
             tuple(name for name, holds in on.items() if holds))


def _specs(cfg: Config, x: Operands):
  """Sequences are divided, or the queries of keys that all share."""
  r, m = ("r0", "_") if cfg.page_size else ("_", "r0")
  given = Operands((r, m, "_", "_"), ("_", "_"), ("_",), (r, m, "_"),
                   (r, "_"), (m,), (r if cfg.page_size else m,))
  return (Operands(*(None if t is None else s for t, s in zip(x, given))),), (
      r, m, "_")


# (Config, Operands) -> logits
logits = operator(
    target="indexer_logits", kernel=_kernel, reference=reference, specs=_specs,
    split=("r",), serves=_serves, dtypes=DTYPES,
    batch=lambda cfg, op, size, mapped, x: lax.map(
        op, with_axis(size, *mapped, x)))
