# SPDX-License-Identifier: Apache-2.0
"""Logits of DeepSeek's lightning indexer: public functions.

Sparse attention asks each query for the keys that matter to it: `logits` here,
`top_k_per_row_prefill` or `top_k_per_row_decode` of them, and `sparse_mla_fwd`.
DeepSeek-V3.2-Exp, "Boosting Long-Context Efficiency with DeepSeek Sparse
Attention" (2025), equation 1.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.indexer import op
from jax._src.aiter.indexer.op import DTYPES, Config, Operands
from jax._src.aiter.paged import api as paged
from jax._src.aiter.paged.api import Names

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
