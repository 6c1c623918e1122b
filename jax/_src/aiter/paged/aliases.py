# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches under the names and orders of other libraries."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter.attention import api as attention
from jax._src.aiter.core import arguments, dims
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.dispatch import float8_dtype
from jax._src.aiter.paged import api, op
from jax._src.aiter.paged.api import Arrays, Names
from jax._src.aiter.quant import api as quant


def check_pages(n: Names, indptr, table, last_page_lens, page_size) -> None:
  """An error of packed tables that cannot be, where they are at hand."""
  arguments.check_cumulative(n.function, n.indptr, indptr,
                             table.shape[0] if table.ndim == 1 else None)
  last = arguments.at_hand(last_page_lens)
  if last is None or last.dtype.kind not in "iu":
    return
  if dims.is_known(page_size) and ((last < 0) | (last > page_size)).any():
    raise bad(n.function, n.lengths, np.array2string(last, threshold=8),
              f"from 0 to {page_size}, the tokens of a page")


def check_packed(n: Names, indptr, table, last_page_lens, page_size) -> None:
  """An error of packed tables that cannot be: their ranks, types, sizes too."""
  arguments.check_is_array(n.function, n.table, table, optional=False)
  for name, t in ((n.indptr, indptr), (n.lengths, last_page_lens)):
    arguments.check_integers(n.function, name, t)
    if t.ndim != 1:
      raise bad(n.function, name, describe(t), "an array of rank 1")
  if indptr.shape[0] != last_page_lens.shape[0] + 1:
    raise bad(n.function, n.indptr, describe(indptr),
              f"shape [{last_page_lens.shape[0] + 1}], one more than"
              f" {n.lengths}")
  check_pages(n, indptr, table, last_page_lens, page_size)


def _page_size(n: Names, layout: str, cache) -> int:
  arguments.check_is_array(n.function, n.k, cache, optional=False)
  names = op.LAYOUTS[layout][0]
  if cache.ndim != len(names):
    raise bad(n.function, n.k, describe(cache), f"an array of rank"
              f" {len(names)}")
  return dict(zip(names, cache.shape))["offset"]


def _bound(n: Names, name: str, value) -> None:
  """Checks a bound that no kernel needs; None is none."""
  if value is not None:
    arguments.number(n.function, name, value, "an integer >= 0",
                     lambda v: v >= 0, int)


# -----------------------------------------------------------------------------
# jax-aiter


def paged_attention(
    query: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    kv_indptr: jax.Array,
    kv_page_indices: jax.Array,
    kv_last_page_lens: jax.Array,
    *,
    max_seq_len: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float = 0.0,
    kv_cache_dtype: str = "auto",
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    workspace: jax.Array | None = None,
) -> jax.Array:
  """`paged_attention_decode` with packed tables, under jax-aiter's name.

  Args:
    query: [b, hq, d].
    k_pool: [pages, page_size, hk, d].
    v_pool: likewise.
    kv_indptr: integers [b + 1]: sequence i has the pages
      kv_page_indices[kv_indptr[i]:kv_indptr[i + 1]].
    kv_page_indices: integers [n].
    kv_last_page_lens: integers [b], tokens in the last of them.
    max_seq_len: is checked, and changes nothing: lengths are the device's.
    scale: softmax_scale there.
    logits_soft_cap: as there.
    kv_cache_dtype: "auto", which is the pools' own, its name, or "fp8".
    k_scale: as there.
    v_scale: as there.
    workspace: is not used.

  Returns:
    [b, hq, d] in query's dtype.

  Raises:
    TypeError: as paged_attention_decode.
    ValueError: as paged_attention_decode.
  """
  del workspace
  n = Names("paged_attention", q="query", k="k_pool", v="v_pool",
            table="kv_page_indices", lengths="kv_last_page_lens",
            softmax_scale="scale")
  _bound(n, "max_seq_len", max_seq_len)
  arguments.check_cache_kind(n.function, n.k, k_pool, kv_cache_dtype)
  s = api.static(n, "NHD", scale, (-1, -1), logits_soft_cap, False)
  check_packed(n, kv_indptr, kv_page_indices, kv_last_page_lens,
               _page_size(n, "NHD", k_pool))
  return api.attend(s, Arrays(
      query, k_pool, v_pool, kv_page_indices, kv_last_page_lens,
      indptr=kv_indptr, k_scale=k_scale, v_scale=v_scale))[0]


def paged_prefill(
    query: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    cu_seqlens_q: jax.Array,
    kv_indptr: jax.Array,
    kv_page_indices: jax.Array,
    kv_last_page_lens: jax.Array,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    logits_soft_cap: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
) -> jax.Array:
  """`unified_attention` with packed tables, under jax-aiter's name.

  Args:
    query: [tokens, hq, d].
    k_pool: as in `paged_attention`.
    v_pool: likewise.
    cu_seqlens_q: integers [b + 1].
    kv_indptr: as in `paged_attention`.
    kv_page_indices: likewise.
    kv_last_page_lens: likewise.
    max_seqlen_q: is checked, and changes nothing.
    max_seqlen_k: likewise.
    scale: softmax_scale there.
    causal: as there.
    logits_soft_cap: softcap there.
    window_size: as there.

  Returns:
    [tokens, hq, d] in query's dtype.

  Raises:
    TypeError: as unified_attention.
    ValueError: as unified_attention.
  """
  n = Names("paged_prefill", q="query", k="k_pool", v="v_pool",
            table="kv_page_indices", lengths="kv_last_page_lens",
            softmax_scale="scale")
  _bound(n, "max_seqlen_q", max_seqlen_q)
  _bound(n, "max_seqlen_k", max_seqlen_k)
  s = api.static(n, "NHD", scale, window_size, logits_soft_cap, causal)
  api.check_cumulative(n, cu_seqlens_q, query)
  check_packed(n, kv_indptr, kv_page_indices, kv_last_page_lens,
               _page_size(n, "NHD", k_pool))
  return api.attend(s, Arrays(
      query, k_pool, v_pool, kv_page_indices, kv_last_page_lens,
      indptr=kv_indptr, cu_seqlens=cu_seqlens_q))[0]


# -----------------------------------------------------------------------------
# AITER

_AITER = Names("", q="query", k="key_cache", v="value_cache",
               softmax_scale="scale")


def _aiter_static(n: Names, scale, left: int, soft_cap, cache, cache_dtype,
                  layout, bound, partition_size) -> api.Static:
  """What paged_attention_v1 and _ragged have alike; causal."""
  arguments.choice(n.function, "kv_cache_layout", layout, ("NHD", "HND"))
  arguments.check_cache_kind(n.function, n.k, cache, cache_dtype)
  _bound(n, "max_context_len" if n.table == "block_tables" else
         "max_num_partitions", bound)
  arguments.number(n.function, "partition_size", partition_size,
                   "an integer >= 1", lambda p: p >= 1, int)
  return api.static(n, layout, scale, (left, -1), soft_cap, True)


def _tokens_each(n: Names, name: str, count, q, lengths):
  """Where queries begin of which every sequence has as many; None of one."""
  count = arguments.number(n.function, name, count, "an integer >= 1",
                           lambda c: c >= 1, int)
  for what, t, rank in ((n.q, q, 3), (n.lengths, lengths, 1)):
    api.check_array(n, what, t, rank)
  if count == 1:
    return None
  b = lengths.shape[0]
  if q.shape[0] != b * count:
    raise bad(n.function, n.q, describe(q),
              f"{b * count} rows: {name} is {count}, for each of {n.lengths}")
  # Of known sizes a constant, which no kernel makes.
  numbers = np if dims.is_known(b) else jnp
  return numbers.arange(b + 1, dtype=np.int32) * np.int32(count)


def _attended(s: api.Static, a: Arrays, fp8_out_scale=None) -> jax.Array:
  """api.attend's output, in float8 if there is a scale to divide it by."""
  if a.cu_seqlens is None:
    # A query is the last of its sequence: there is nothing to its right.
    s = s._replace(window=(s.window[0], -1))
  out, _ = api.attend(s, a)
  if fp8_out_scale is None:
    return out
  with arguments.called(s.names.function, scale="fp8_out_scale"):
    return quant.per_tensor_quant(
        out, arguments.operand(s.names.function, "fp8_out_scale",
                               fp8_out_scale), quant_dtype=float8_dtype())[0]


def paged_attention_v1(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    scale: float,
    block_tables: jax.Array,
    cu_query_lens: jax.Array | None,
    context_lens: jax.Array,
    max_context_len: int | None = None,
    alibi_slopes: jax.Array | None = None,
    kv_cache_dtype: str = "auto",
    kv_cache_layout: str = "NHD",
    logits_soft_cap: float = 0.0,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    fp8_out_scale: jax.Array | float | None = None,
    partition_size: int = 256,
    mtp: int = 1,
    sliding_window: int = 0,
) -> jax.Array:
  """`paged_attention_decode` and its speculative steps under AITER's name.

  Args:
    query: [tokens, hq, d], mtp of each sequence, or as cu_query_lens says.
    key_cache: by kv_cache_layout.
    value_cache: likewise.
    scale: softmax_scale there; it has no default.
    block_tables: as there.
    cu_query_lens: integers [b + 1], where each sequence's queries begin; None
      if it has mtp.
    context_lens: as there, new tokens counted.
    max_context_len: is checked, and changes nothing: lengths are the device's.
    alibi_slopes: as there.
    kv_cache_dtype: "auto", which is the caches' own, its name, or "fp8".
    kv_cache_layout: "NHD" or "HND".
    logits_soft_cap: as there.
    k_scale: as there.
    v_scale: as there.
    fp8_out_scale: a number, by which the result is divided and rounded to
      float8_dtype().
    partition_size: is checked, and changes nothing.
    mtp: queries of each sequence, its last ones.
    sliding_window: keys that a query sees, its own counted; 0 for all.

  Returns:
    [tokens, hq, dv] in query's dtype, or float8.

  Raises:
    TypeError: as paged_attention_decode.
    ValueError: as paged_attention_decode.
  """
  n = _AITER._replace(function="paged_attention_v1",
                      cu_seqlens="cu_query_lens")
  window = arguments.number(n.function, "sliding_window", sliding_window,
                            "an integer >= 0", lambda w: w >= 0, int)
  s = _aiter_static(n, scale, window - 1, logits_soft_cap, key_cache,
                    kv_cache_dtype, kv_cache_layout, max_context_len,
                    partition_size)
  each = _tokens_each(n, "mtp", mtp, query, context_lens
                      ) if cu_query_lens is None else cu_query_lens
  api.check_cumulative(n, cu_query_lens, query)
  return _attended(s, Arrays(
      query, key_cache, value_cache, block_tables, context_lens,
      cu_seqlens=each, slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale),
                   fp8_out_scale)


def paged_attention_ragged(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    scale: float,
    kv_indptr: jax.Array,
    kv_page_indices: jax.Array,
    kv_last_page_lens: jax.Array,
    block_size: int | None = None,
    max_num_partitions: int | None = None,
    alibi_slopes: jax.Array | None = None,
    kv_cache_dtype: str = "auto",
    kv_cache_layout: str = "NHD",
    logits_soft_cap: float = 0.0,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    fp8_out_scale: jax.Array | float | None = None,
    partition_size: int = 256,
    mtp: int = 1,
) -> jax.Array:
  """`paged_attention_v1` with packed tables, under AITER's name.

  Args:
    query: as there.
    key_cache: as there.
    value_cache: as there.
    scale: as there.
    kv_indptr: integers [b + 1]: sequence i has the pages
      kv_page_indices[kv_indptr[i]:kv_indptr[i + 1]].
    kv_page_indices: integers [n].
    kv_last_page_lens: integers [b], tokens in the last of them.
    block_size: None, or tokens of a page, as the caches have it.
    max_num_partitions: is checked, and changes nothing.
    alibi_slopes: as there.
    kv_cache_dtype: as there.
    kv_cache_layout: as there.
    logits_soft_cap: as there.
    k_scale: as there.
    v_scale: as there.
    fp8_out_scale: as there.
    partition_size: as there.
    mtp: as there.

  Returns:
    As paged_attention_v1.

  Raises:
    TypeError: as paged_attention_decode.
    ValueError: as paged_attention_decode.
  """
  n = _AITER._replace(function="paged_attention_ragged",
                      table="kv_page_indices", lengths="kv_last_page_lens")
  s = _aiter_static(n, scale, -1, logits_soft_cap, key_cache, kv_cache_dtype,
                    kv_cache_layout, max_num_partitions, partition_size)
  size = _page_size(n, kv_cache_layout, key_cache)
  if block_size is not None:
    arguments.number(n.function, "block_size", block_size,
                     f"{size}, as {n.k} has it", lambda b: b == size, int)
  check_packed(n, kv_indptr, kv_page_indices, kv_last_page_lens, size)
  return _attended(s, Arrays(
      query, key_cache, value_cache, kv_page_indices, kv_last_page_lens,
      indptr=kv_indptr,
      cu_seqlens=_tokens_each(n, "mtp", mtp, query, kv_last_page_lens),
      slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale), fp8_out_scale)


def pa_fwd_asm(
    Q: jax.Array,
    K: jax.Array,
    V: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    block_tables_stride0: int | None = None,
    max_qlen: int = 1,
    K_QScale: jax.Array | None = None,
    V_QScale: jax.Array | None = None,
    *,
    qo_indptr: jax.Array | None = None,
    high_precision: int = 1,
) -> jax.Array:
  """`paged_attention_v1` of the layout "asm", under AITER's name.

  Scores are scaled by 1 / sqrt(d).

  Args:
    Q: [tokens, hq, d], max_qlen of each sequence, or as qo_indptr says.
    K: [pages, hk, d / x, page_size, x] with x elements in 16 bytes.
    V: [pages, hk, page_size / x, d, x].
    block_tables: as there.
    context_lens: as there.
    block_tables_stride0: is checked, and changes nothing: an array has its own.
    max_qlen: mtp there.
    K_QScale: scales of dequantisation, as k_scale there: [pages, hk,
      page_size] of each token, or fewer.
    V_QScale: likewise.
    qo_indptr: cu_query_lens there.
    high_precision: 0 to 2, which changes nothing: weights are not rounded to
      less than Q's dtype.

  Returns:
    [tokens, hq, d] in Q's dtype.

  Raises:
    TypeError: as paged_attention_decode.
    ValueError: as paged_attention_decode.
  """
  n = Names("pa_fwd_asm", q="Q", k="K", v="V", cu_seqlens="qo_indptr",
            k_scale="K_QScale", v_scale="V_QScale")
  _bound(n, "block_tables_stride0", block_tables_stride0)
  arguments.choice(n.function, "high_precision", high_precision, (0, 1, 2))
  s = api.static(n, "asm", None, (-1, -1), 0.0, True)
  each = _tokens_each(n, "max_qlen", max_qlen, Q, context_lens
                      ) if qo_indptr is None else qo_indptr
  api.check_cumulative(n, qo_indptr, Q)
  return _attended(s, Arrays(
      Q, K, V, block_tables, context_lens, cu_seqlens=each, k_scale=K_QScale,
      v_scale=V_QScale))


def mha_batch_prefill_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    kv_indptr: jax.Array | None,
    kv_page_indices: jax.Array | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    *,
    kv_last_page_lens: jax.Array | None = None,
    block_table: jax.Array | None = None,
    seqlen_k: jax.Array | None = None,
    q_descale: jax.Array | float | None = None,
    k_descale: jax.Array | float | None = None,
    v_descale: jax.Array | float | None = None,
    kv_block_descale: jax.Array | None = None,
    sink_ptr: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """`unified_attention` under AITER's name, in its order.

  Pages are named by kv_indptr and kv_page_indices, with the tokens of the last
  ones in kv_last_page_lens (1 where pages are of one token), or by block_table
  and seqlen_k, in whose place the others are None.

  Args:
    q: [tokens, hq, d].
    k: [pages, page_size, hk, d]; [slots, hk, d], pages of one token; or
      shuffled, [pages, hk, d / x, page_size, x] with x elements in 16 bytes.
    v: likewise; shuffled [pages, hk, page_size / x, d, x].
    cu_seqlens_q: integers [b + 1].
    kv_indptr: integers [b + 1], or None.
    kv_page_indices: integers [n], or None.
    max_seqlen_q: is checked, and changes nothing.
    max_seqlen_k: likewise.
    dropout_p: 0: there is no dropout here.
    softmax_scale: as there.
    logits_soft_cap: softcap there.
    causal: as there.
    window_size: as there.
    alibi_slopes: as there.
    deterministic: it is, always.
    return_lse: as there.
    kv_last_page_lens: integers [b], or None.
    block_table: integers [b, n], or None.
    seqlen_k: integers [b], or None.
    q_descale: as there.
    k_descale: as there.
    v_descale: as there.
    kv_block_descale: float [pages, hk, 2], scales of each page's K and V, in
      the place of the two before it.
    sink_ptr: sinks there.

  Returns:
    As unified_attention.

  Raises:
    TypeError: as unified_attention.
    ValueError: as unified_attention.
  """
  csr = block_table is None
  n = Names("mha_batch_prefill_func", k="k", v="v",
            table="kv_page_indices" if csr else "block_table",
            lengths="kv_last_page_lens" if csr else "seqlen_k",
            sinks="sink_ptr", k_scale="k_descale", v_scale="v_descale")
  function = n.function
  _bound(n, "max_seqlen_q", max_seqlen_q)
  _bound(n, "max_seqlen_k", max_seqlen_k)
  arguments.number(function, "dropout_p", dropout_p, "0", lambda p: p == 0)
  arguments.flag(function, "deterministic", deterministic)
  for name, t in (("k", k), ("v", v)):
    arguments.check_is_array(function, name, t, optional=False)
  if k.ndim == v.ndim == 3:
    k, v = k[:, None], v[:, None]
  layout = "asm" if k.ndim == 5 else "NHD"
  s = api.static(n, layout, softmax_scale, window_size, logits_soft_cap, causal,
                 return_lse)
  api.check_cumulative(n, cu_seqlens_q, q)
  size = _page_size(n, layout, k)
  given = {"kv_indptr": kv_indptr, "kv_page_indices": kv_page_indices,
           "kv_last_page_lens": kv_last_page_lens}
  if csr:
    if kv_last_page_lens is None and size == 1 and kv_indptr is not None:
      arguments.check_integers(function, "kv_indptr", kv_indptr)
      kv_last_page_lens = jnp.ones(kv_indptr.shape[0] - 1, jnp.int32)
    for name, t in (*given.items(), ("kv_last_page_lens", kv_last_page_lens)):
      if t is None and not (name == "kv_last_page_lens" and size == 1):
        raise bad(function, name, "None", "given without block_table")
    if seqlen_k is not None:
      raise bad(function, "seqlen_k", "given", "None without block_table")
    table, lengths = kv_page_indices, kv_last_page_lens
    check_packed(n, kv_indptr, table, lengths, size)
  else:
    for name, t in given.items():
      if t is not None:
        raise bad(function, name, "given", "None with block_table")
    table, lengths = block_table, seqlen_k
  if kv_block_descale is not None:
    arguments.check_is_array(function, "kv_block_descale", kv_block_descale)
    heads = dict(zip(op.LAYOUTS[layout][0], k.shape))["head"]
    if kv_block_descale.shape != (k.shape[0], heads, 2):
      raise bad(function, "kv_block_descale", describe(kv_block_descale),
                f"shape [{k.shape[0]}, {heads}, 2]")
    if k_descale is not None or v_descale is not None:
      raise bad(function, "kv_block_descale", "given",
                "None with k_descale or v_descale")
    k_descale, v_descale = kv_block_descale[..., 0], kv_block_descale[..., 1]
  out, lse = api.attend(s, Arrays(
      q, k, v, table, lengths, indptr=kv_indptr, cu_seqlens=cu_seqlens_q,
      sinks=sink_ptr, slopes=alibi_slopes, q_scale=q_descale,
      k_scale=k_descale, v_scale=v_descale))
  return (out, lse) if s.return_lse else out


# -----------------------------------------------------------------------------
# Pallas


def pallas_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array | None,
    k_scales_pages: jax.Array | None = None,
    v_scales_pages: jax.Array | None = None,
    *,
    block_h: int = 16,
    pages_per_compute_block: int = 8,
    k_splits: int = 16,
    num_warps: int = 8,
    num_stages: int = 2,
    interpret: bool = False,
    debug: bool = False,
    mask_value: float = 0.0,
    attn_logits_soft_cap: float | None = None,
) -> jax.Array:
  """`jax.experimental.pallas.ops.gpu.paged_attention`, which is deprecated.

  `paged_attention_decode` with all pages of a head together, and scores that
  are not scaled: scale the queries.

  Args:
    q: [b, hq, d].
    k_pages: [hk, pages, page_size, d].
    v_pages: likewise.
    block_tables: integers [b, n].
    lengths: integers [b]; None if all pages of all tables are full.
    k_scales_pages: scales of dequantisation, float [hk, pages, page_size].
    v_scales_pages: likewise.
    block_h: Pallas' way to run it, and so are the following; not used here.
    pages_per_compute_block: not used.
    k_splits: not used.
    num_warps: not used.
    num_stages: not used.
    interpret: not used.
    debug: not used.
    mask_value: not used: what is hidden is left out.
    attn_logits_soft_cap: logits_soft_cap there; None for none.

  Returns:
    [b, hq, d] in q's dtype.

  Raises:
    TypeError: as paged_attention_decode.
    ValueError: as paged_attention_decode.
  """
  del block_h, pages_per_compute_block, k_splits, num_warps, num_stages
  del interpret, debug, mask_value
  n = Names("paged_attention", k="k_pages", v="v_pages", lengths="lengths",
            soft_cap="attn_logits_soft_cap", k_scale="k_scales_pages",
            v_scale="v_scales_pages")
  s = api.static(n, "heads_first", 1.0, (-1, -1), attn_logits_soft_cap, False)
  if lengths is None:
    size = _page_size(n, "heads_first", k_pages)
    arguments.check_integers(n.function, n.table, block_tables)
    lengths = jnp.full(block_tables.shape[0],
                       size * math.prod(block_tables.shape[1:]), jnp.int32)
  return api.attend(s, Arrays(
      q, k_pages, v_pages, block_tables, lengths, k_scale=k_scales_pages,
      v_scale=v_scales_pages))[0]


def flash_attn_varlen_func(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    min_seqlen_q: int = 0,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1),
    *,
    alibi_slopes: jax.Array | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    block_table: jax.Array | None = None,
    cu_seqlens_q_padded: jax.Array | None = None,
    cu_seqlens_k_padded: jax.Array | None = None,
    sink_ptr: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """`flash_attn_varlen` in AITER's order, or with pages `unified_attention`.

  Args:
    q: [total_q, hq, d].
    k: [total_k, hk, d]; with block_table [pages, page_size, hk, d].
    v: likewise.
    cu_seqlens_q: integers [b + 1].
    cu_seqlens_k: integers [b + 1].
    max_seqlen_q: accepted; no bound is needed.
    max_seqlen_k: accepted; no bound is needed.
    min_seqlen_q: as in flash_attn_varlen; 0 with block_table.
    dropout_p: likewise.
    softmax_scale: as in flash_attn_varlen.
    logits_soft_cap: as there.
    causal: as there.
    window_size: as there.
    alibi_slopes: as there; [hq] with block_table.
    deterministic: as there.
    return_lse: as there.
    block_table: integers [b, n], the pages of each sequence's keys, or None.
      There are no gradients then.
    cu_seqlens_q_padded: as there; None with block_table.
    cu_seqlens_k_padded: likewise.
    sink_ptr: sink there; [hq] with block_table.
    dropout_key: as there; None with block_table.

  Returns:
    As flash_attn_varlen.

  Raises:
    TypeError: as flash_attn_varlen.
    ValueError: as flash_attn_varlen.
  """
  function = "flash_attn_varlen_func"
  if block_table is None:
    with arguments.called(function, sink="sink_ptr"):
      return attention.flash_attn_varlen(
          q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
          dropout_p, softmax_scale, causal, window_size, deterministic,
          return_lse, alibi_slopes=alibi_slopes, dropout_key=dropout_key,
          logits_soft_cap=logits_soft_cap, sink=sink_ptr,
          cu_seqlens_q_padded=cu_seqlens_q_padded,
          cu_seqlens_k_padded=cu_seqlens_k_padded, min_seqlen_q=min_seqlen_q)
  arguments.number(function, "min_seqlen_q", min_seqlen_q,
                   "0 with block_table", lambda n: n == 0, int)
  for name, t in (("cu_seqlens_q_padded", cu_seqlens_q_padded),
                  ("cu_seqlens_k_padded", cu_seqlens_k_padded),
                  ("dropout_key", dropout_key)):
    if t is not None:
      raise bad(function, name, "given", "None with block_table")
  arguments.check_integers(function, "cu_seqlens_k", cu_seqlens_k)
  if cu_seqlens_k.ndim != 1 or cu_seqlens_k.shape[0] < 1:
    raise bad(function, "cu_seqlens_k", describe(cu_seqlens_k), "shape [b + 1]")
  arguments.check_cumulative(function, "cu_seqlens_k", cu_seqlens_k, None)
  with arguments.called(function, seqlen_k="cu_seqlens_k"):
    return mha_batch_prefill_func(
        q, k, v, cu_seqlens_q, None, None, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, logits_soft_cap, causal, window_size,
        alibi_slopes, deterministic, return_lse, block_table=block_table,
        seqlen_k=jnp.diff(arguments.int32(cu_seqlens_k)), sink_ptr=sink_ptr)
