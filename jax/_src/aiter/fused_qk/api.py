# SPDX-License-Identifier: Apache-2.0
"""What stands between projections and attention, fused: public functions."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from jax._src.aiter.cache.op import KINDS
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.fused_qk import op
from jax._src.aiter.fused_qk.op import Config, Operands
from jax._src.aiter.paged import api as paged
from jax._src.aiter.paged.api import Names

_FLOATS = ("float16", "bfloat16", "float32")


class _Static(NamedTuple):
  """What the function was called with, apart from arrays; hashable."""
  names: Names
  neox: bool
  q_dtype: str
  eps: float


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _run(s: _Static, x: Operands):
  """(q_out, kv_cache)."""
  n = s.names
  for name, rank in (("q_nope", 3), ("q_pe", 3), ("kv_c", 2), ("k_pe", 2),
                     ("cos", 2), ("sin", 2)):
    paged.check_array(n, name, getattr(x, name), rank, _FLOATS)
  tokens, heads, lora = x.q_nope.shape
  rope = x.q_pe.shape[2]
  if heads < 1 or lora < 1:
    raise bad(n.function, "q_nope", describe(x.q_nope),
              "[tokens, heads, lora] of at least one head and column")
  if rope < 2 or rope % 2:
    raise bad(n.function, "q_pe", describe(x.q_pe), "an even number of columns")
  for name, shape in (("q_pe", (tokens, heads, rope)), ("kv_c", (tokens, lora)),
                      ("k_pe", (tokens, rope))):
    t = getattr(x, name)
    paged.check_shape(n, name, t, shape, "as q_nope")
    if t.dtype != x.q_nope.dtype:
      raise bad(n.function, f"{name}'s dtype", t.dtype,
                f"{x.q_nope.dtype}, as q_nope", TypeError)
  if x.cos.shape[0] < 1 or x.cos.shape[1] != rope // 2:
    raise bad(n.function, "cos", describe(x.cos),
              f"shape [positions, {rope // 2}], half of q_pe's columns")
  paged.check_shape(n, "sin", x.sin, x.cos.shape, "as cos")
  kv, shape = x.kv_cache, x.kv_cache.shape
  if kv.ndim == 4 and shape[2] == 1:
    kv = kv.reshape(*shape[:2], shape[3])
  paged.check_array(n, "kv_cache", kv, 3, (*_FLOATS, *KINDS))
  if kv.dtype.name not in (x.q_nope.dtype.name, *KINDS):
    raise bad(n.function, "kv_cache's dtype", kv.dtype,
              f"{x.q_nope.dtype}, as q_nope, or " + " or ".join(KINDS),
              TypeError)
  first = lora if kv.shape[2] == lora + rope else -(-lora // 128) * 128
  if kv.shape[1] < 1 or first + rope > kv.shape[2]:
    raise bad(n.function, "kv_cache", describe(kv), f"{lora + rope} columns, or"
              f" at least {-(-lora // 128) * 128 + rope}")
  if x.weight is not None:
    paged.check_array(n, "kv_norm_weight", x.weight, 1, _FLOATS)
    paged.check_shape(n, "kv_norm_weight", x.weight, (lora,), "as kv_c")
  per_token = {}
  for name, field in (("positions", x.positions), ("slot_mapping", x.slots)):
    per_token[name] = paged.integers(n, name, field, 1)
    paged.check_shape(n, name, per_token[name], (tokens,), "one for each token")
  scale = lambda name, t, used: (
      paged.number_scale(n, name, t) if used and t is not None else None)
  wide = lambda t: t.astype(jnp.float32)
  x = x._replace(
      kv_cache=kv, cos=wide(x.cos), sin=wide(x.sin),
      weight=None if x.weight is None else x.weight.astype(x.q_nope.dtype),
      positions=per_token["positions"], slots=per_token["slot_mapping"],
      q_scale=scale("q_scale", x.q_scale, bool(s.q_dtype)),
      k_scale=scale("k_scale", x.k_scale, kv.dtype.name in KINDS))
  cfg = Config(not s.neox, first, s.q_dtype, s.eps)
  call = arguments.no_gradient(n.function, paged.NO_GRADIENT)(
      lambda x: op.latent(cfg, vary_together(x)))
  kv, q = call(x)
  return q, kv.reshape(shape)


def fused_qk_rope_concat_and_cache_mla(
    q_nope: jax.Array,
    q_pe: jax.Array,
    kv_c: jax.Array,
    k_pe: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    is_neox: bool = True,
    q_scale: jax.Array | float | None = None,
    k_scale: jax.Array | float | None = None,
    q_out_dtype: Any = None,
    kv_norm_weight: jax.Array | None = None,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array]:
  """Latent attention's queries and its rows of the cache, in one launch.

  Queries and keys are rotated by their positions (Su et al., arXiv:2104.09864),
  latent vectors normalised if there is a weight, and what `mla_decode_fwd`
  takes is made of them: q_out = [q_nope | rotated q_pe], and in the cache
  [kv_c | rotated k_pe], as `concat_and_cache_mla` has it. Arithmetic is of
  float32, and each number is rounded once.

  Args:
    q_nope: [tokens, heads, lora], absorbed queries, float16, bfloat16 or
      float32.
    q_pe: [tokens, heads, rope], with an even number of columns.
    kv_c: [tokens, lora].
    k_pe: [tokens, rope].
    kv_cache: [pages, page_size, lora + rope], perhaps with a dimension of 1
      before the last, or wider as of concat_and_cache_mla; q_nope's dtype,
      int8, float8_e4m3fn, float8_e4m3fnuz or float8_e5m2. Donate it: it is
      written in place.
    slot_mapping: integers [tokens], page * page_size + offset; a token whose
      slot is none is not stored.
    positions: integers [tokens], rows of cos and sin; those out of range are
      the nearest.
    cos: float [rows, rope / 2]; computed with as float32.
    sin: likewise.
    is_neox: pairs are the halves of the columns; else neighbours, as GPT-J has
      them.
    q_scale: scale of dequantisation of q_out, if it is of 8 bits: a number, []
      or [1]; 1 by default.
    k_scale: the same of the cache.
    q_out_dtype: of q_out, one of the cache's of 8 bits; q_nope's by default.
    kv_norm_weight: [lora], of an RMSNorm of kv_c; None for no norm. Computed
      with in kv_c's dtype.
    eps: of the norm.

  Returns:
    (q_out [tokens, heads, lora + rope], kv_cache).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  n = Names("fused_qk_rope_concat_and_cache_mla")
  for name, t in (("q_nope", q_nope), ("q_pe", q_pe), ("kv_c", kv_c),
                  ("k_pe", k_pe), ("kv_cache", kv_cache), ("cos", cos),
                  ("sin", sin), ("positions", positions),
                  ("slot_mapping", slot_mapping)):
    arguments.check_is_array(n.function, name, t, optional=False)
  own = q_nope.dtype.name
  q_dtype = "" if q_out_dtype is None else arguments.dtype_name(
      n.function, "q_out_dtype", q_out_dtype, (own, *KINDS))
  s = _Static(
      n, arguments.flag(n.function, "is_neox", is_neox),
      "" if q_dtype == own else q_dtype,
      arguments.number(n.function, "eps", eps, "a number >= 0",
                       lambda e: 0 <= e < math.inf))
  return _run(s, Operands(
      kv_cache, q_nope, q_pe, kv_c, k_pe, kv_norm_weight, cos, sin, positions,
      slot_mapping, q_scale, k_scale))
