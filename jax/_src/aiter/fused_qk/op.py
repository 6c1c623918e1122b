# SPDX-License-Identifier: Apache-2.0
"""Latent attention's queries and rows of the cache, as one operator.

Rotation of both, an RMSNorm of the latent vectors, rounding to 8 bits and the
write into the cache, which aliases its operand, are one launch.
"""

from __future__ import annotations

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

DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
# What divides the columns of calls for the fast kernels.
_ALIGNED = 16


class Config(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    gptj: pairs are neighbours; else halves.
    first: the cache's column where rotated keys begin.
    q_kind: what queries are rounded to, of cache.KINDS; else empty.
    eps: of the norm.
  """
  gptj: bool
  first: int
  q_kind: str = ""
  eps: float = 0.0


class Operands(NamedTuple):
  """Arrays of a call; an absent one is None.

  Attributes:
    kv_cache: [pages, page_size, cols], q_nope's dtype or one of cache.KINDS.
    q_nope: [tokens, heads, lora].
    q_pe: [tokens, heads, rope].
    kv_c: [tokens, lora].
    k_pe: [tokens, rope].
    weight: [lora], or None: latent vectors are as they should be.
    cos: float32 [rows, rope / 2].
    sin: likewise.
    positions: int32 [tokens], rows of the tables.
    slots: int32 [tokens].
    q_scale: float32 [1], or None.
    k_scale: likewise.
  """
  kv_cache: jax.Array
  q_nope: jax.Array
  q_pe: jax.Array
  kv_c: jax.Array
  k_pe: jax.Array
  weight: jax.Array | None
  cos: jax.Array
  sin: jax.Array
  positions: jax.Array
  slots: jax.Array
  q_scale: jax.Array | None
  k_scale: jax.Array | None


def rotated(gptj: bool, x, cos, sin):
  """The rotated last axis in float32 or wider; cos and sin of its pairs."""
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if gptj:
    x1, x2 = x[..., 0::2], x[..., 1::2]
  else:
    x1, x2 = jnp.split(x, 2, -1)
  turned = x1 * cos - x2 * sin, x2 * cos + x1 * sin
  if gptj:
    return jnp.stack(turned, -1).reshape(x.shape)
  return jnp.concatenate(turned, -1)


def reference(cfg: Config, x: Operands):
  """(kv_cache, q_out [tokens, heads, lora + rope]) in jax.numpy."""
  row = jnp.clip(x.positions, 0, x.cos.shape[0] - 1)
  cos, sin = x.cos[row], x.sin[row]
  latent = x.kv_c.astype(jnp.float32)
  if x.weight is not None:
    mean = jnp.mean(latent * latent, -1, keepdims=True)
    latent = latent * (1 / jnp.sqrt(mean + cfg.eps)) * x.weight.astype(
        jnp.float32)
  kind = x.kv_cache.dtype.name
  as_cache = cache.Config(
      "mla", x.kv_cache.shape[1], "cast" if kind in cache.KINDS else "copy",
      kind if kind in cache.KINDS else "", value_col=cfg.first)
  stored = cache.reference(as_cache, cache.Operands(
      x.kv_cache, None, x.k_scale, x.k_scale, latent[:, None],
      rotated(cfg.gptj, x.k_pe, cos, sin)[:, None], x.slots)).k_cache
  q = jnp.concatenate(
      [x.q_nope.astype(jnp.float32),
       rotated(cfg.gptj, x.q_pe, cos[:, None], sin[:, None])], -1)
  if not cfg.q_kind:
    return stored, q.astype(x.q_nope.dtype)
  if x.q_scale is not None:
    q = rounding.divide(q, x.q_scale)
  return stored, rounding.round_to(q, cache.KINDS[cfg.q_kind])


def _kernel(cfg: Config, call, x: Operands):
  tokens, heads, lora = x.q_nope.shape
  dtype = cfg.q_kind or x.q_nope.dtype
  optional = {"weight": x.q_nope.dtype, "q_scale": jnp.float32,
              "k_scale": jnp.float32}
  return call._replace(aliases={0: 0})(
      (like(x.kv_cache, x.kv_cache.shape, x.kv_cache.dtype),
       like(x.q_nope, (tokens, heads, lora + x.q_pe.shape[-1]), dtype)),
      *(absent(t, optional[n]) if n in optional else t
        for n, t in x._asdict().items()),
      gptj=cfg.gptj, first=np.int64(cfg.first), eps=np.float32(cfg.eps))


def _serves(cfg: Config, x: Operands) -> Key | None:
  lora, rope = x.q_nope.shape[-1], x.q_pe.shape[-1]
  if any(at_most(n, 0) for t in x if t is not None for n in t.shape):
    return None
  cols = (lora, rope, x.kv_cache.shape[-1], cfg.first)
  on = {"gptj": cfg.gptj, "norm": x.weight is not None,
        "cache_bytes": x.kv_cache.dtype.name in cache.KINDS,
        "q_bytes": bool(cfg.q_kind), "k_scaled": x.k_scale is not None,
        "q_scaled": x.q_scale is not None,
        "unaligned": any(n % _ALIGNED != 0 for n in cols)}
  return Key("fused_qk_latent", x.q_nope.dtype.name, (lora, rope),
             tuple(name for name, holds in on.items() if holds))


def _specs(cfg: Config, x: Operands):
  """Heads are divided; each device stores the same rows in its cache."""
  del cfg
  specs = Operands(*(None if t is None else ("_",) * t.ndim for t in x))
  heads = ("_", "h", "_")
  return (specs._replace(q_nope=heads, q_pe=heads),), (("_",) * 3, heads)


def _plan(cfg: Config, run, mesh, args):
  """The cache, which has no heads, is everyone's, and no sum of parts."""
  specs, result_specs = _specs(cfg, *args)
  return axes_of_arguments(mesh, specs, _SPLIT, args, result_specs), run


_SPLIT = ("h",)

# (Config, Operands) -> (kv_cache, q_out)
latent = operator(
    target="fused_qk_latent", kernel=_kernel, reference=reference,
    specs=_specs, split=_SPLIT, serves=_serves, dtypes=DTYPES, plan=_plan,
    batch=lambda cfg, op, size, mapped, x: lax.map(
        op, with_axis(size, *mapped, x)))
