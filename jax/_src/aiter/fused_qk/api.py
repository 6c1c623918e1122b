# SPDX-License-Identifier: Apache-2.0
"""What stands between projections and attention, fused: public functions."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter.cache import api as cache
from jax._src.aiter.cache.op import KINDS
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.fused_qk import heads, op
from jax._src.aiter.fused_qk.op import Config, Operands
from jax._src.aiter.paged import api as paged
from jax._src.aiter.paged.api import Names

_FLOATS = ("float16", "bfloat16", "float32")
_WIDE = (*_FLOATS, "float64")


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
  arguments.check_is_array(n.function, "kv_norm_weight", kv_norm_weight)
  for name, t in (("q_scale", q_scale), ("k_scale", k_scale)):
    arguments.operand(n.function, name, t)
  return _run(s, Operands(
      kv_cache, q_nope, q_pe, kv_c, k_pe, kv_norm_weight, cos, sin, positions,
      slot_mapping, q_scale, k_scale))


# -----------------------------------------------------------------------------
# Heads


class _HeadArrays(NamedTuple):
  """What a function of heads is given; an absent one is None."""
  q: jax.Array
  k: jax.Array | None
  v: jax.Array | None
  positions: jax.Array
  cos: jax.Array
  sin: jax.Array | None
  q_weight: jax.Array | None = None
  k_weight: jax.Array | None = None
  k_cache: jax.Array | None = None
  v_cache: jax.Array | None = None
  slot_mapping: jax.Array | None = None
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None
  k_token_scales: jax.Array | None = None
  v_token_scales: jax.Array | None = None
  q_scale: jax.Array | None = None


def _check_heads(n: Names, x: _HeadArrays, num_heads, cached: bool):
  """(heads of q and of k, or (), tokens, heads of k, columns)."""
  dtypes = _FLOATS if cached else _WIDE
  paged.check_array(n, "q", x.q, 3 if num_heads is None else 2, dtypes)
  if num_heads is not None:
    hq, hk = arguments.integers(
        n.function, "num_heads", num_heads, "(heads of q, heads of k)",
        lambda h: h > 0)
    for name in ("k", "v"):
      if getattr(x, name) is not None:
        raise bad(n.function, name, "given", "None, of a q that has all heads")
    tokens, width = x.q.shape
    if width % (hq + 2 * hk) or width == 0:
      raise bad(n.function, "q", describe(x.q),
                f"[tokens, ({hq} + 2 * {hk}) * columns], as of num_heads")
    return (hq, hk), tokens, hk, width // (hq + 2 * hk)
  tokens, heads_q, dim = x.q.shape
  if heads_q < 1 or dim < 1:
    raise bad(n.function, "q", describe(x.q),
              "[tokens, heads, columns] of at least one head and column")
  for name in ("k", "v") if cached else ("k",):
    t = getattr(x, name)
    paged.check_array(n, name, t, 3, dtypes)
    if t.dtype != x.q.dtype:
      raise bad(n.function, f"{name}'s dtype", t.dtype,
                f"{x.q.dtype}, as q", TypeError)
    paged.check_shape(n, name, t, (tokens, x.k.shape[1], dim),
                      "tokens and columns as q")
  if x.k.shape[1] < 1:
    raise bad(n.function, "k", describe(x.k), "at least one head")
  return (), tokens, x.k.shape[1], dim


def _sections(n: Names, value, pairs: int) -> tuple[int, ...]:
  if value is None:
    return ()
  words = f"three numbers of pairs whose sum is {pairs}, all that cos has"
  found = arguments.integers(n.function, "mrope_section", value, words,
                             lambda m: m >= 0, (3,))
  if sum(found) != pairs:
    raise bad(n.function, "mrope_section", found, words)
  return found


def _check_tables(n: Names, x: _HeadArrays, dim: int):
  """(cos, sin, pairs), in q's dtype or float32."""
  for name, t in (("cos", x.cos), ("sin", x.sin)):
    if t is not None:
      paged.check_array(n, name, t, 2, _WIDE)
  width = x.cos.shape[1] * (1 if x.sin is None else 2)
  if x.cos.shape[0] < 1 or width < 2 or width % 2 or width > dim:
    raise bad(n.function, "cos", describe(x.cos),
              f"shape [positions, n], with at most {dim} columns to rotate")
  if x.sin is not None:
    paged.check_shape(n, "sin", x.sin, x.cos.shape, "as cos")
  same = x.cos.dtype == x.q.dtype and x.sin is None or (
      x.sin is not None and x.cos.dtype == x.sin.dtype == x.q.dtype)
  to = x.q.dtype if same else jnp.float32
  return (x.cos.astype(to), None if x.sin is None else x.sin.astype(to),
          width // 2)


def _check_weights(n: Names, x: _HeadArrays, sizes, dtype):
  if (x.q_weight is None) != (x.k_weight is None):
    raise bad(n.function, "one of q_weight and k_weight", "None",
              "both of them, or none")
  out = []
  for name, size in zip(("q_weight", "k_weight"), sizes):
    t = getattr(x, name)
    if t is not None:
      paged.check_array(n, name, t, 1, _WIDE)
      paged.check_shape(n, name, t, (size,), "a number a column")
      t = t.astype(dtype)
    out.append(t)
  return out


def _check_pools(n: Names, x: _HeadArrays, layout, key):
  """(mode, k_scale, v_scale) of checked caches."""
  cache.check_caches(n.function, layout, key, key,
                     [("k_cache", x.k_cache), ("v_cache", x.v_cache)])
  kind = x.k_cache.dtype.name
  if kind not in (key.dtype.name, *KINDS):
    raise bad(n.function, "k_cache's dtype", kind,
              f"{key.dtype}, as q, or " + " or ".join(KINDS), TypeError)
  found = (x.k_token_scales, x.v_token_scales)
  heads_k = key.shape[1]
  if any(t is not None for t in found):
    if any(t is None for t in found):
      raise bad(n.function, "one of k_token_scales and v_token_scales", "None",
                "both of them, or none")
    if kind not in KINDS:
      raise bad(n.function, "k_token_scales", "given",
                f"None with a cache of {kind}")
    if x.k_scale is not None or x.v_scale is not None:
      raise bad(n.function, "k_scale or v_scale", "given",
                "None with scales that are found")
    size = dict(zip(cache.op.LAYOUTS[layout][0], x.k_cache.shape))["offset"]
    for name, t in zip(("k_token_scales", "v_token_scales"), found):
      paged.check_array(n, name, t, 3, ("float32",))
      paged.check_shape(n, name, t, (x.k_cache.shape[0], heads_k, size),
                        "[pages, heads, page_size]")
    return ("token", *found)
  mode = "cast" if kind in KINDS else "copy"
  scale = lambda name, t: cache.static_scale(
      n.function, name, t, mode, heads_k, x.k_cache)
  return mode, scale("k_scale", x.k_scale), scale("v_scale", x.v_scale)


class _HeadStatic(NamedTuple):
  """What a function of heads was called with, apart from arrays; hashable."""
  names: Names
  neox: bool
  eps: float
  gemma: bool
  joint: bool
  mrope_section: Any
  interleaved: bool
  nope_first: bool
  num_heads: Any
  layout: str = ""
  q_dtype: str = ""
  return_kv: bool = True


def _run_heads(s: _HeadStatic, x: _HeadArrays) -> heads.Results:
  for name, t in zip(x._fields, x):
    check = (arguments.operand if name in ("q_scale", "k_scale", "v_scale")
             else arguments.check_is_array)
    check(s.names.function, name, t)
  return _run_checked(s, x)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _run_checked(s: _HeadStatic, x: _HeadArrays) -> heads.Results:
  n = s.names
  packed, tokens, heads_k, dim = _check_heads(
      n, x, s.num_heads, bool(s.layout))
  cos, sin, pairs = _check_tables(n, x, dim)
  hq = packed[0] if packed else x.q.shape[1]
  q_weight, k_weight = _check_weights(
      n, x, (hq * dim, heads_k * dim) if s.joint else (dim, dim), x.q.dtype)
  if s.joint and q_weight is None:
    raise bad(n.function, "joint_norm", True, "False without weights")
  sections = _sections(n, s.mrope_section, pairs)
  if s.interleaved and not sections:
    raise bad(n.function, "mrope_interleaved", True,
              "False without mrope_section")
  positions = paged.integers(n, "positions", x.positions, 2 if sections else 1)
  paged.check_shape(n, "positions", positions,
                    (3, tokens) if sections else (tokens,),
                    "one for each token" + " and section" * bool(sections))
  mode, scales, slots = "copy", (None, None), None
  if s.layout:
    key = jax.ShapeDtypeStruct((tokens, heads_k, dim), x.q.dtype)
    mode, *scales = _check_pools(n, x, s.layout, key)
    slots = paged.integers(n, "slot_mapping", x.slot_mapping, 1)
    paged.check_shape(n, "slot_mapping", slots, (tokens,),
                      "one for each token")
  q_scale = None
  if s.q_dtype and x.q_scale is not None:
    q_scale = paged.number_scale(n, "q_scale", x.q_scale)
  cfg = heads.Config(
      packed, not s.neox, dim - 2 * pairs if s.nope_first else 0, s.eps,
      s.gemma, s.joint, sections, s.interleaved, s.q_dtype, s.layout, mode,
      s.return_kv)
  call = lambda x: heads.heads(cfg, vary_together(x))
  if s.layout:
    call = arguments.no_gradient(n.function, paged.NO_GRADIENT)(call)
  return call(heads.Operands(
      x.k_cache, x.v_cache, *scales, x.q, x.k, x.v, q_weight, k_weight, cos,
      sin, positions, slots, q_scale))


def _head_static(function, num_heads, mrope_section, eps, **flags):
  """_HeadStatic of arguments that are no arrays."""
  def hashable(name, t):
    arguments.static(function, name, t, "integers")
    if t is not None and (
        not isinstance(t, (tuple, list, np.ndarray)) or np.ndim(t) != 1):
      raise bad(function, name, repr(t), "None or a sequence of integers",
                TypeError)
    return t if t is None else tuple(t)

  return _HeadStatic(
      Names(function), eps=arguments.number(
          function, "eps", eps, "a number >= 0", lambda e: 0 <= e < math.inf),
      num_heads=hashable("num_heads", num_heads),
      mrope_section=hashable("mrope_section", mrope_section),
      **{field: arguments.flag(function, name, value)
         for field, (name, value) in flags.items()})


def _check_given(function, **arrays):
  for name, t in arrays.items():
    arguments.check_is_array(function, name, t, optional=False)


def fused_qk_norm_rope(
    q: jax.Array,
    k: jax.Array | None,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array | None = None,
    *,
    q_weight: jax.Array | None = None,
    k_weight: jax.Array | None = None,
    eps: float = 1e-6,
    is_neox: bool = True,
    gemma_norm: bool = False,
    joint_norm: bool = False,
    mrope_section: tuple[int, int, int] | None = None,
    mrope_interleaved: bool = False,
    nope_first: bool = False,
    num_heads: tuple[int, int] | None = None,
) -> tuple[jax.Array, ...]:
  """RMSNorm and rotation of queries and keys, in one launch.

  Each head is normalised, `x / sqrt(mean(x^2) + eps) * weight`, as in Qwen3,
  and then rotated by its token's position (Su et al., arXiv:2104.09864).
  Arithmetic is of float32, and each number is rounded once. It has gradients
  both ways: those of the formula.

  Args:
    q: [tokens, heads, d], float16, bfloat16 or float32; with num_heads the
      projection of all, [tokens, (heads + 2 k_heads) * d].
    k: [tokens, k_heads, d], q's dtype; None with num_heads.
    positions: integers [tokens], rows of the tables; those out of range are the
      nearest. With mrope_section [3, tokens].
    cos: float [rows, n]: 2 n columns are rotated, the first of a head or, with
      nope_first, the last; others are as they are. Without sin [rows, 2 n],
      cosines and then sines. Of q's dtype nothing is converted.
    sin: like cos.
    q_weight: [d], of the norm of q; None, and k_weight too, for no norms. Of a
      joint norm [heads * d].
    k_weight: likewise of k.
    eps: of the norms.
    is_neox: pairs are the halves of the rotated columns; else neighbours, as
      GPT-J has them.
    gemma_norm: the norms' weights are 1 + weight.
    joint_norm: one norm of all heads of a token, as in MiniMax-M2.
    mrope_section: numbers of pairs that turn by the first, the second and the
      third row of positions, as in Qwen2-VL; their sum is n.
    mrope_interleaved: those pairs take turns, as in Qwen3-VL.
    nope_first: as above.
    num_heads: (heads, k_heads) of a q that has all of them.

  Returns:
    (q, k), like them; with num_heads (q, k, v), [tokens, heads, d] and twice
    [tokens, k_heads, d].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "fused_qk_norm_rope"
  _check_given(function, q=q, positions=positions, cos=cos)
  s = _head_static(
      function, num_heads, mrope_section, eps, neox=("is_neox", is_neox),
      gemma=("gemma_norm", gemma_norm), joint=("joint_norm", joint_norm),
      interleaved=("mrope_interleaved", mrope_interleaved),
      nope_first=("nope_first", nope_first))
  if num_heads is None:
    _check_given(function, k=k)
  out = _run_heads(s, _HeadArrays(q, k, None, positions, cos, sin, q_weight,
                                  k_weight))
  return (out.q, out.k) if num_heads is None else (out.q, out.k, out.v)


def fused_qk_norm_rope_cache(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array | None = None,
    *,
    q_weight: jax.Array | None = None,
    k_weight: jax.Array | None = None,
    eps: float = 1e-6,
    is_neox: bool = True,
    gemma_norm: bool = False,
    joint_norm: bool = False,
    mrope_section: tuple[int, int, int] | None = None,
    mrope_interleaved: bool = False,
    nope_first: bool = False,
    num_heads: tuple[int, int] | None = None,
    layout: str = "NHD",
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    k_token_scales: jax.Array | None = None,
    v_token_scales: jax.Array | None = None,
    q_scale: jax.Array | float | None = None,
    q_out_dtype: Any = None,
    return_kv: bool = False,
) -> tuple[jax.Array, ...]:
  """`fused_qk_norm_rope` and the write of keys and values, in one launch.

  Args:
    q: as there.
    k: as there.
    v: like k.
    k_cache: as `write_kv_cache` has it by layout, in q's dtype, int8,
      float8_e4m3fn, float8_e4m3fnuz or float8_e5m2. Donate it: it is written in
      place.
    v_cache: likewise.
    slot_mapping: integers [tokens], page * page_size + offset; a token whose
      slot is none is not stored.
    positions: as there.
    cos: as there.
    sin: as there.
    q_weight: as there.
    k_weight: as there.
    eps: as there.
    is_neox: as there.
    gemma_norm: as there.
    joint_norm: as there.
    mrope_section: as there.
    mrope_interleaved: as there.
    nope_first: as there.
    num_heads: as there.
    layout: "NHD", "HND", "x" or "asm".
    k_scale: scale of dequantisation of a cache of 8 bits, float [], [1] or
      [k_heads]; 1 by default.
    v_scale: likewise.
    k_token_scales: float32 [pages, k_heads, page_size]: each token and head has
      a scale of its own, the largest magnitude over the format's largest
      number, which is written here. Donate it.
    v_token_scales: likewise; both or none.
    q_scale: scale of dequantisation of the queries that are returned, if they
      are of 8 bits: a number, [] or [1]; 1 by default.
    q_out_dtype: of those queries, one of the cache's of 8 bits; q's by default.
    return_kv: whether to return keys and values too.

  Returns:
    (q, k_cache, v_cache), with token scales then both of them, with return_kv
    then (k, v), [tokens, k_heads, d] in q's dtype. q: [tokens, heads, d].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "fused_qk_norm_rope_cache"
  _check_given(function, q=q, k_cache=k_cache, v_cache=v_cache,
               slot_mapping=slot_mapping, positions=positions, cos=cos)
  if num_heads is None:
    _check_given(function, k=k, v=v)
  arguments.choice(function, "layout", layout, ("NHD", "HND", "x", "asm"))
  own = q.dtype.name
  q_dtype = "" if q_out_dtype is None else arguments.dtype_name(
      function, "q_out_dtype", q_out_dtype, (own, *KINDS))
  s = _head_static(
      function, num_heads, mrope_section, eps, neox=("is_neox", is_neox),
      gemma=("gemma_norm", gemma_norm), joint=("joint_norm", joint_norm),
      interleaved=("mrope_interleaved", mrope_interleaved),
      nope_first=("nope_first", nope_first),
      return_kv=("return_kv", return_kv))
  s = s._replace(layout=layout, q_dtype="" if q_dtype == own else q_dtype)
  out = _run_heads(s, _HeadArrays(
      q, k, v, positions, cos, sin, q_weight, k_weight, k_cache, v_cache,
      slot_mapping, k_scale, v_scale, k_token_scales, v_token_scales, q_scale))
  scales = () if k_token_scales is None else (out.k_scale, out.v_scale)
  return (out.q, out.k_cache, out.v_cache, *scales,
          *((out.k, out.v) if return_kv else ()))
