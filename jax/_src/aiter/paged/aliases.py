# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches under the names and orders of other libraries."""

from __future__ import annotations

import math

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.paged import api, op
from jax._src.aiter.paged.api import Arrays, Names


def lengths_of(n: Names, indptr, last_page_lens, page_size: int):
  """int32 lengths of sequences whose last pages hold so many tokens."""
  for name, t in ((n.indptr, indptr), (n.lengths, last_page_lens)):
    arguments.check_integers(n.function, name, t)
    if t.ndim != 1:
      raise bad(n.function, name, describe(t), "an array of rank 1")
  if indptr.shape[0] != last_page_lens.shape[0] + 1:
    raise bad(n.function, n.indptr, describe(indptr),
              f"shape [{last_page_lens.shape[0] + 1}], one more than"
              f" {n.lengths}")
  pages = jnp.diff(jnp.asarray(arguments.int32(indptr)))
  last = jnp.asarray(arguments.int32(last_page_lens))
  return jnp.where(pages > 0, (pages - 1) * page_size + last, 0)


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


def _own_dtype(n: Names, cache, name) -> None:
  arguments.check_is_array(n.function, n.k, cache, optional=False)
  own = cache.dtype.name
  arguments.choice(n.function, "kv_cache_dtype", name, ("auto", own))


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
    kv_cache_dtype: "auto", which is the pools' own, or its name.
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
  _own_dtype(n, k_pool, kv_cache_dtype)
  s = api.static(n, "NHD", scale, (-1, -1), logits_soft_cap, False)
  lengths = lengths_of(n, kv_indptr, kv_last_page_lens,
                        _page_size(n, "NHD", k_pool))
  return api.attend(s, Arrays(
      query, k_pool, v_pool, kv_page_indices, lengths, indptr=kv_indptr,
      k_scale=k_scale, v_scale=v_scale))[0]


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
  lengths = lengths_of(n, kv_indptr, kv_last_page_lens,
                        _page_size(n, "NHD", k_pool))
  return api.attend(s, Arrays(
      query, k_pool, v_pool, kv_page_indices, lengths, indptr=kv_indptr,
      cu_seqlens=cu_seqlens_q))[0]


# -----------------------------------------------------------------------------
# AITER


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
    table = kv_page_indices
    lengths = lengths_of(n, kv_indptr, kv_last_page_lens, size)
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
