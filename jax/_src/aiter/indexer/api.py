# SPDX-License-Identifier: Apache-2.0
"""Logits of DeepSeek's lightning indexer: public functions.

Sparse attention asks each query for the keys that matter to it: `logits` here,
`top_k_per_row_prefill` or `top_k_per_row_decode` of them, and `sparse_mla_fwd`.
DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse
Attention" (2025), equation 1.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from jax._src.aiter.cache import api as cache
from jax._src.aiter.core import arguments, rounding
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.indexer import op
from jax._src.aiter.indexer.op import DTYPES, Config, Operands
from jax._src.aiter.norm import api as norm
from jax._src.aiter.paged import api as paged
from jax._src.aiter.paged.api import Names
from jax._src.aiter.quant import api as quant
from jax._src.aiter.rope import api as rope

_FLOATS = ("float16", "bfloat16", "float32")


class _Static(NamedTuple):
  """What a function was called with, apart from arrays; hashable."""
  names: Names
  max_model_len: int = 0
  preshuffle: bool = False


def _call(n: Names, cfg: Config, x: Operands):
  run = arguments.no_gradient(n.function, paged.NO_GRADIENT)(
      lambda x: op.logits(cfg, vary_together(x)))
  return run(x)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _dense(n: Names, q, kv, kv_scales, weights, cu_starts, cu_ends):
  paged.check_array(n, "q", q, 3, tuple(DTYPES))
  rows, heads, dim = q.shape
  paged.check_array(n, "kv", kv, 2, tuple(DTYPES))
  if kv.dtype != q.dtype:
    raise bad(n.function, "kv's dtype", kv.dtype, f"{q.dtype}, as q", TypeError)
  paged.check_shape(n, "kv", kv, (kv.shape[0], dim), "columns as q")
  if kv_scales.ndim == 2:
    kv_scales = kv_scales.reshape(-1)
  for name, t, shape in (("kv_scales", kv_scales, kv.shape[:1]),
                         ("weights", weights, (rows, heads))):
    paged.check_array(n, name, t, len(shape), _FLOATS)
    paged.check_shape(n, name, t, shape, "one for each key" if name[0] == "k"
                      else "one for each query and head")
  starts, ends = (paged.integers(n, name, t, 1) for name, t in (
      ("cu_starts", cu_starts), ("cu_ends", cu_ends)))
  for name, t in (("cu_starts", starts), ("cu_ends", ends)):
    paged.check_shape(n, name, t, (rows,), "one for each query")
  wide = lambda t: t.astype(jnp.float32)
  return _call(n, Config(), Operands(
      q[None], kv, wide(kv_scales), wide(weights)[None], None, starts, ends))[0]


def fp8_mqa_logits(
    q: jax.Array,
    kv: jax.Array,
    kv_scales: jax.Array,
    weights: jax.Array,
    cu_starts: jax.Array,
    cu_ends: jax.Array,
    clean_logits: bool = True,
) -> jax.Array:
  """An indexer's logits of queries against keys that all of them share.

  logits[i, n] = kv_scales[n] * sum over h of weights[i, h] * relu(q[i, h] .
  kv[n]), for keys from cu_starts[i] up to cu_ends[i]; -inf for all others. The
  scales of q belong into weights. Sums are float32; on NVIDIA products of
  float8 are added with 14 bits, which is what its matrix units have.

  Args:
    q: float8_e4m3fn or float8_e4m3fnuz [queries, heads, d].
    kv: [keys, d], q's dtype.
    kv_scales: float [keys], perhaps with an axis of 1.
    weights: float [queries, heads].
    cu_starts: integers [queries], the first key of each.
    cu_ends: integers [queries], the key behind its last.
    clean_logits: accepted; keys out of range are -inf either way.

  Returns:
    float32 [queries, keys].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape that cannot be; the message names it.
  """
  n = Names("fp8_mqa_logits")
  for name, t in (("q", q), ("kv", kv), ("kv_scales", kv_scales),
                  ("weights", weights), ("cu_starts", cu_starts),
                  ("cu_ends", cu_ends)):
    arguments.check_is_array(n.function, name, t, optional=False)
  arguments.flag(n.function, "clean_logits", clean_logits)
  return _dense(n, q, kv, kv_scales, weights, cu_starts, cu_ends)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _paged(s: _Static, q, kv_cache, weights, context_lens, block_tables):
  n = s.names
  paged.check_array(n, "q", q, 4, tuple(DTYPES))
  sequences, next_n, heads, dim = q.shape
  if kv_cache.ndim == 4 and kv_cache.shape[2] == 1:
    kv_cache = kv_cache.reshape(*kv_cache.shape[:2], kv_cache.shape[3])
  paged.check_array(n, "kv_cache", kv_cache, 3, ("uint8",))
  pages, size, width = kv_cache.shape
  if width != dim + 4 or size < 1:
    raise bad(n.function, "kv_cache", describe(kv_cache),
              f"{dim + 4} columns: {dim} bytes and a scale of four")
  if s.preshuffle and size % 16:
    raise bad(n.function, "kv_cache", describe(kv_cache),
              "pages of a multiple of 16 tokens with preshuffle")
  if weights.ndim == 2:
    paged.check_shape(n, "weights", weights, (sequences * next_n, heads),
                      "one for each query and head")
    weights = weights.reshape(sequences, next_n, heads)
  paged.check_array(n, "weights", weights, 3, _FLOATS)
  paged.check_shape(n, "weights", weights, (sequences, next_n, heads),
                    "one for each query and head")
  lengths = paged.integers(n, "context_lens", context_lens, 1)
  paged.check_shape(n, "context_lens", lengths, (sequences,),
                    "one for each sequence")
  table = paged.integers(n, "block_tables", block_tables, 2)
  paged.check_shape(n, "block_tables", table, (sequences, table.shape[1]),
                    "pages of each sequence")
  cfg = Config(s.max_model_len, size, s.preshuffle)
  out = _call(n, cfg, Operands(
      q, kv_cache.reshape(pages, size * width), None,
      weights.astype(jnp.float32), table, None, lengths))
  return out.reshape(sequences * next_n, out.shape[-1])


def fp8_paged_mqa_logits(
    q: jax.Array,
    kv_cache: jax.Array,
    weights: jax.Array,
    context_lens: jax.Array,
    block_tables: jax.Array,
    max_model_len: int,
    *,
    preshuffle: bool = False,
    clean_logits: bool = True,
) -> jax.Array:
  """`fp8_mqa_logits` of the last tokens of sequences, whose keys lie in pages.

  Query j of next_n sees the first context_lens - next_n + j + 1 keys of its
  sequence. A key whose page is absent, an id that is none or a table too short,
  has -inf, and nothing is read for it.

  Args:
    q: float8_e4m3fn or float8_e4m3fnuz [sequences, next_n, heads, d].
    kv_cache: uint8 [pages, page_size, d + 4] as `indexer_k_quant_and_cache`
      writes it, with one scale a key, in q's dtype; perhaps with an axis of 1
      before the last.
    weights: float [sequences * next_n, heads], or [sequences, next_n, heads].
    context_lens: integers [sequences].
    block_tables: integers [sequences, n], the pages of each.
    max_model_len: columns of the result, known while tracing.
    preshuffle: as the cache was written.
    clean_logits: accepted; what is no key is -inf either way.

  Returns:
    float32 [sequences * next_n, max_model_len].

  Raises:
    TypeError: as fp8_mqa_logits.
    ValueError: as fp8_mqa_logits.
  """
  n = Names("fp8_paged_mqa_logits")
  for name, t in (("q", q), ("kv_cache", kv_cache), ("weights", weights),
                  ("context_lens", context_lens),
                  ("block_tables", block_tables)):
    arguments.check_is_array(n.function, name, t, optional=False)
  arguments.flag(n.function, "clean_logits", clean_logits)
  s = _Static(
      n, arguments.number(n.function, "max_model_len", max_model_len,
                          "an integer >= 1", lambda m: m >= 1, int),
      arguments.flag(n.function, "preshuffle", preshuffle))
  return _paged(s, q, kv_cache, weights, context_lens, block_tables)


def indexer_qk_rope_quant_and_cache(
    q: jax.Array,
    weights: jax.Array,
    k: jax.Array,
    kv_cache: jax.Array,
    slot_mapping: jax.Array,
    norm_weight: jax.Array,
    norm_bias: jax.Array,
    positions: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float = 1e-6,
    scale_fmt: str | None = None,
    weights_scale: float = 1.0,
    is_neox: bool = True,
    nope_first: bool = False,
    preshuffle: bool = False,
    quant_dtype: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """What the indexer does with its projections before the logits; AITER's.

  Keys are normalised (a layer norm), rotated and stored by
  `indexer_k_quant_and_cache`; queries are rotated and rounded to float8, each
  head with a scale of its own, which is multiplied into the weights. In the
  library's operators, one after another; keys are float32 between them.

  Args:
    q: [tokens, heads, d], float16, bfloat16 or float32; d is 32, 64 or 128.
    weights: float [tokens, heads].
    k: [tokens, d], any of q's dtypes.
    kv_cache: uint8 [pages, page_size, d + 4]. Donate it.
    slot_mapping: integers [tokens].
    norm_weight: float [d], of k's norm.
    norm_bias: float [d].
    positions: integers [tokens], rows of the tables.
    cos: float [rows, n]: 2 n columns are rotated, as in `fused_qk_norm_rope`.
    sin: like cos.
    eps: of the norm.
    scale_fmt: "ue8m0" for scales that are powers of two, of q too; else None.
    weights_scale: by which weights are multiplied, such as 1 / sqrt(d * heads).
    is_neox: pairs are halves, else neighbours.
    nope_first: the last columns are rotated, not the first.
    preshuffle: as in indexer_k_quant_and_cache.
    quant_dtype: float8_e4m3fn, the default, or float8_e4m3fnuz.

  Returns:
    (q, weights, kv_cache): float8 [tokens, heads, d] and float32 [tokens,
    heads], as `fp8_paged_mqa_logits` takes them, and the cache.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  n = Names("indexer_qk_rope_quant_and_cache")
  function = n.function
  for name, t, rank, dtypes in (
      ("q", q, 3, _FLOATS), ("weights", weights, 2, _FLOATS),
      ("k", k, 2, _FLOATS), ("norm_weight", norm_weight, 1, _FLOATS),
      ("norm_bias", norm_bias, 1, _FLOATS), ("cos", cos, 2, _FLOATS),
      ("sin", sin, 2, _FLOATS)):
    paged.check_array(n, name, t, rank, dtypes)
  tokens, heads, dim = q.shape
  arguments.choice(function, "q's head dimension", dim, (32, 64, 128))
  for name, t, shape in (
      ("weights", weights, (tokens, heads)), ("k", k, (tokens, dim)),
      ("norm_weight", norm_weight, (dim,)), ("norm_bias", norm_bias, (dim,))):
    paged.check_shape(n, name, t, shape, "as q")
  positions = paged.integers(n, "positions", positions, 1)
  paged.check_shape(n, "positions", positions, (tokens,), "one for each token")
  power = arguments.choice(
      function, "scale_fmt", scale_fmt, (None, "ue8m0")) is not None
  weights_scale = arguments.number(
      function, "weights_scale", weights_scale, "a finite number",
      lambda s: abs(s) < float("inf"))
  eps = arguments.number(function, "eps", eps, "a finite number >= 0",
                         lambda e: 0 <= e < float("inf"))
  turn = functools.partial(
      rope.rope, cos=cos, sin=sin, layout="thd", positions=positions,
      rotate_style="neox" if arguments.flag(function, "is_neox", is_neox)
      else "gptj", nope_first=nope_first)
  kind = jnp.float8_e4m3fn if quant_dtype is None else quant_dtype
  wide = lambda t: jnp.asarray(t, jnp.float32)
  with arguments.called(function, x="k"):
    k = norm.layer_norm(wide(k), wide(norm_weight), wide(norm_bias), eps)
    k = turn(k[:, None])[:, 0]
  with arguments.called(function):
    kv_cache = cache.indexer_k_quant_and_cache(
        k, kv_cache, slot_mapping, quant_block_size=dim, scale_fmt=scale_fmt,
        preshuffle=preshuffle, quant_dtype=kind)
  with arguments.called(function, x="q"):
    q, scale = quant.per_group_quant(
        turn(q), group_size=dim, quant_dtype=kind,
        scale_dtype=jnp.uint8 if power else jnp.float32)
  scale = rounding.from_e8m0(scale) if power else scale
  return q, wide(weights) * scale[..., 0] * weights_scale, kv_cache
