# SPDX-License-Identifier: Apache-2.0
"""Latent attention as servers for TPUs call it: it writes and attends.

tpu-inference's `mla_ragged_paged_attention`, versions 1 and 2, and sglang-jax's
order of arguments.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter.cache import api as cache
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.dims import as_int32, last_start, round_up, take
from jax._src.aiter.mla import api, op
from jax._src.aiter.paged import api as paged
from jax._src.aiter.paged import ragged
from jax._src.aiter.paged.api import Names
from jax._src.aiter.paged.op import Config, Operands

_LANES = 128
_NAMES = Names(
    "mla_ragged_paged_attention", q="ql_nope", k="cache_kv",
    table="page_indices", lengths="kv_lens", cu_seqlens="cu_q_lens",
    softmax_scale="sm_scale", soft_cap="soft_cap", indptr="cu_kv_lens")


def get_mla_kv_cache_shape(
    total_num_pages: int,
    page_size: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    kv_dtype: Any,
) -> tuple[int, int, int, int]:
  """The shape of `mla_ragged_paged_attention`'s cache.

  Args:
    total_num_pages: pages.
    page_size: tokens of a page, a multiple of the numbers p in 32 bits.
    kv_lora_rank: columns of a latent vector.
    qk_rope_head_dim: columns of a rotated key.
    kv_dtype: of the cache.

  Returns:
    [pages, page_size / p, p, cols], columns of either rounded up to multiples
    of 128.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: a size that cannot be.
  """
  function = "get_mla_kv_cache_shape"
  p = ragged.check_sizes(
      function, kv_dtype, total_num_pages=total_num_pages,
      kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
  arguments.number(function, "page_size", page_size, f"a multiple of {p}",
                   lambda n: n > 0 and n % p == 0, int)
  return (total_num_pages, page_size // p, p,
          round_up(kv_lora_rank, _LANES) + round_up(qk_rope_head_dim, _LANES))


def _check(n: Names, heads_first, ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv):
  """ql_nope as [tokens, heads, lora]; an error if shapes do not agree."""
  for name, t, rank in ((n.q, ql_nope, 3), ("q_pe", q_pe, 3),
                        ("new_kv_c", new_kv_c, 2), ("new_k_pe", new_k_pe, 2),
                        (n.k, cache_kv, 4)):
    paged.check_array(n, name, t, rank)
  if heads_first:
    ql_nope = jnp.swapaxes(ql_nope, 0, 1)
  tokens, heads, lora = ql_nope.shape
  rope = q_pe.shape[2]
  paged.check_shape(n, "q_pe", q_pe, (tokens, heads, rope), f"as {n.q}")
  paged.check_shape(n, "new_kv_c", new_kv_c, (tokens, lora), f"as {n.q}")
  paged.check_shape(n, "new_k_pe", new_k_pe, (tokens, rope), "as q_pe")
  for name, t, like, of in (("q_pe", q_pe, ql_nope, n.q),
                            ("new_kv_c", new_kv_c, cache_kv, n.k),
                            ("new_k_pe", new_k_pe, cache_kv, n.k)):
    if t.dtype != like.dtype:
      raise bad(n.function, f"{name}'s dtype", t.dtype,
                f"{like.dtype}, as {of}", TypeError)
  least = round_up(lora, _LANES) + rope
  if cache_kv.shape[3] < least:
    raise bad(n.function, n.k, describe(cache_kv), f"at least {least} columns:"
              f" {lora}, rounded up to a multiple of {_LANES}, and {rope}")
  return ql_nope


def _attend(n: Names, heads_first: bool, ql_nope, q_pe, new_kv_c, new_k_pe,
            cache_kv, kv_lens, page_indices, cu_q_lens, indptr, distribution, *,
            sm_scale, sliding_window, soft_cap, q_scale, k_scale, v_scale,
            **tuning):
  """(out, cache); indptr None: as many pages for every sequence."""
  ragged.check_tuning(n, tuning)
  s = ragged.scores(n, sm_scale, sliding_window, soft_cap)
  ql_nope = _check(n, heads_first, ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv)
  tokens, _, lora = ql_nope.shape
  pages, groups, p, cols = cache_kv.shape
  size = groups * p
  # In front of the rotated part a row is as wide as the cache has it.
  wide = lambda t: jnp.pad(
      t, (*[(0, 0)] * (t.ndim - 1), (0, round_up(lora, _LANES) - lora)))
  latent, width = wide(new_kv_c), round_up(lora, _LANES)
  table, indptr = ragged.pages_of(n, kv_lens, page_indices, indptr, cu_q_lens)
  count = ragged.count_of(n, "distribution", distribution, 3)
  cu, lengths = ragged.sequences_of(n, tokens, kv_lens, cu_q_lens, count)
  with arguments.called(n.function, kv_c="new_kv_c", k_pe="new_k_pe",
                        kv_cache="cache_kv"):
    kv = cache.concat_and_cache_mla(
        latent, new_k_pe, cache_kv.reshape(pages, size, cols),
        ragged.slots_of(tokens, cu, lengths, table, indptr, size))
  q, scale = ragged.quantised(
      n, jnp.concatenate([wide(ql_nope), q_pe], -1), kv.dtype, q_scale)
  kv = kv[:, :, None]
  api.check_columns(n, q, kv, width)
  cfg = Config("mla", size, dv=width, **s._asdict())
  out, _ = paged.run(n.function, cfg, Operands(
      api.as_kernels_take(q), kv, None,
      scale * paged.number_scale(n, "k_scale", k_scale),
      paged.number_scale(n, "v_scale", v_scale), table, indptr, lengths, cu),
                     op.attend)
  out = out[..., :lora].astype(ql_nope.dtype)
  return (jnp.swapaxes(out, 0, 1) if heads_first else out,
          kv.reshape(cache_kv.shape))


def mla_ragged_paged_attention(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    *,
    layout: str = "thd",
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **tuning: Any,
) -> tuple[jax.Array, jax.Array]:
  """tpu-inference's `mla_ragged_paged_attention`, on any platform.

  Stores new tokens' latent vectors and rotated keys in the cache and attends,
  for a mixed batch of decoding and prefilling sequences. Sequences, pages, the
  count of sequences and scales are as in `ragged_paged_attention`; causal.

  Args:
    ql_nope: [tokens, heads, lora], absorbed queries, float16, bfloat16 or
      float32; [heads, tokens, lora] with layout "htd".
    q_pe: [tokens, heads, rope], rotated queries.
    new_kv_c: [tokens, lora] in the cache's dtype.
    new_k_pe: [tokens, rope], likewise.
    cache_kv: of get_mla_kv_cache_shape; ql_nope's dtype or one of 8 bits.
      Donate it: it is written in place.
    kv_lens: integers [sequences], with the new tokens.
    page_indices: integers [sequences * n].
    cu_q_lens: integers [sequences + 1].
    distribution: integers [3]; the last is how many sequences there are.
    layout: "thd", which is version 1's, or "htd", version 2's.
    sm_scale: of the scores.
    sliding_window: keys that a query sees, its own counted; None for all.
    soft_cap: cap of cap * tanh(score / cap); None for none.
    q_scale: as there.
    k_scale: scale of dequantisation of the cache as keys.
    v_scale: the same as values.
    **tuning: as there; not used.

  Returns:
    (out, of ql_nope's shape and dtype, cache_kv).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  n = _NAMES
  arguments.choice(n.function, "layout", layout, ("thd", "htd"))
  return _attend(
      n, layout == "htd", ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, kv_lens,
      page_indices, cu_q_lens, None, distribution, sm_scale=sm_scale,
      sliding_window=sliding_window, soft_cap=soft_cap, q_scale=q_scale,
      k_scale=k_scale, v_scale=v_scale, **tuning)


def sglang_mla_ragged_paged_attention(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **tuning: Any,
) -> tuple[jax.Array, jax.Array]:
  """`mla_ragged_paged_attention` with sglang-jax's packed pages, in its order.

  Args:
    ql_nope: [tokens, heads, lora], as there.
    q_pe: as there.
    new_kv_c: as there.
    new_k_pe: as there.
    cache_kv: as there.
    kv_lens: as there.
    page_indices: integers [pages of all sequences].
    cu_q_lens: as there.
    cu_kv_lens: integers [sequences + 1], multiples of the pages' size: the
      pages of sequence i begin at page_indices[cu_kv_lens[i] // page_size].
    distribution: as there.
    sm_scale: as there.
    sliding_window: as there.
    soft_cap: as there.
    q_scale: as there.
    k_scale: as there.
    v_scale: as there.
    **tuning: as there.

  Returns:
    As mla_ragged_paged_attention.

  Raises:
    TypeError: as mla_ragged_paged_attention.
    ValueError: as mla_ragged_paged_attention.
  """
  n = _NAMES
  paged.check_array(n, n.k, cache_kv, 4)
  size = max(cache_kv.shape[1] * cache_kv.shape[2], 1)
  indptr = paged.integers(n, n.indptr, cu_kv_lens, 1)
  return _attend(
      n, False, ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, kv_lens,
      page_indices, cu_q_lens, indptr // size, distribution, sm_scale=sm_scale,
      sliding_window=sliding_window, soft_cap=soft_cap, q_scale=q_scale,
      k_scale=k_scale, v_scale=v_scale, **tuning)


def _pages(topk_indices, page_size: int, pages_per_seq: int, most: int):
  """int32 [tokens, most], pages of places, each once, in order; -1 padding."""
  tokens = topk_indices.shape[0]
  none = pages_per_seq
  page = jnp.where(topk_indices >= 0, topk_indices // page_size, none)
  # The last column is of what is in no page.
  hit = jnp.zeros((tokens, none + 1), bool).at[
      jnp.arange(tokens)[:, None], jnp.minimum(page, none)].set(True)
  number = jnp.arange(none, dtype=jnp.int32)
  listed = jnp.sort(jnp.where(hit[:, :none], number, none), 1)[:, :most]
  listed = jnp.pad(listed, ((0, 0), (0, max(most - none, 0))),
                   constant_values=none)
  return jnp.where(listed < none, listed, -1)


def _sizes(function: str, **sizes: int):
  for name, size in sizes.items():
    arguments.number(function, name, size, "an integer from 1 to 2^24",
                     lambda n: 1 <= n <= 2**24, int)


def compute_topk_pages(
    topk_indices: jax.Array,
    *,
    page_size: int,
    pages_per_seq: int,
    k_pages_max: int,
) -> jax.Array:
  """The pages that chosen places lie in, for `sparse_mla_page_level`.

  Layers that share an indexer's choice make them once.

  Args:
    topk_indices: integers [tokens, k], places in each token's sequence; a
      negative one is none.
    page_size: tokens of a page.
    pages_per_seq: pages that a sequence has at most; places behind are none.
    k_pages_max: how many to list.

  Returns:
    int32 [tokens, k_pages_max], each page once, in order; -1 where no more.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "compute_topk_pages"
  _sizes(function, page_size=page_size, pages_per_seq=pages_per_seq,
         k_pages_max=k_pages_max)
  n = Names(function, table="topk_indices")
  return _pages(paged.integers(n, n.table, topk_indices, 2), page_size,
                pages_per_seq, k_pages_max)


def sparse_mla_page_level(
    ql_nope: jax.Array,
    q_pe: jax.Array,
    new_kv_c: jax.Array,
    new_k_pe: jax.Array,
    cache_kv: jax.Array,
    kv_lens: jax.Array,
    topk_indices: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    topk_pages: jax.Array | None = None,
    *,
    sm_scale: float,
    page_size: int,
    pages_per_seq: int,
    kv_lora_rank: int,
    k_pages_max: int = 64,
    **tuning: Any,
) -> tuple[jax.Array, jax.Array]:
  """sglang-jax's sparse `mla_ragged_paged_attention`: of pages, not of tokens.

  A token attends to all of the first k_pages_max - 1 pages that have a place
  which an indexer chose for it, and to its own page up to itself. Which are
  whole pages, so nothing is gathered. `sparse_mla_fwd` attends to the chosen
  places alone.

  Args:
    ql_nope: [tokens, heads, lora], as there.
    q_pe: as there.
    new_kv_c: as there.
    new_k_pe: as there.
    cache_kv: as there. Donate it: it is written in place.
    kv_lens: integers [sequences], with the new tokens.
    topk_indices: integers [tokens, k], places in a token's sequence; a negative
      one is none. Not looked at with topk_pages.
    page_indices: integers [pages of all sequences].
    cu_q_lens: integers [sequences + 1]; a sequence's tokens are its last.
    cu_kv_lens: integers [sequences + 1], multiples of page_size: the pages of
      sequence i begin at page_indices[cu_kv_lens[i] // page_size].
    distribution: integers [3]; the last is how many sequences there are.
    topk_pages: integers [tokens, n], of `compute_topk_pages`, or None.
    sm_scale: of the scores.
    page_size: tokens of the cache's pages.
    pages_per_seq: pages that a sequence has at most.
    kv_lora_rank: columns of the result, at most lora.
    k_pages_max: pages that a token attends to.
    **tuning: as there; not used.

  Returns:
    (out [tokens, heads, kv_lora_rank] in ql_nope's dtype, cache_kv).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "sparse_mla_page_level"
  n = _NAMES._replace(function=function)
  _sizes(function, page_size=page_size, pages_per_seq=pages_per_seq,
         kv_lora_rank=kv_lora_rank, k_pages_max=k_pages_max)
  paged.check_array(n, n.q, ql_nope, 3)
  paged.check_array(n, n.k, cache_kv, 4)
  if cache_kv.shape[1] * cache_kv.shape[2] != page_size:
    raise bad(function, "page_size", page_size, "the size of cache_kv's pages,"
              f" {cache_kv.shape[1] * cache_kv.shape[2]}")
  if kv_lora_rank > ql_nope.shape[2]:
    raise bad(function, "kv_lora_rank", kv_lora_rank,
              f"at most {n.q}'s columns, {ql_nope.shape[2]}")
  tokens = ql_nope.shape[0]
  if topk_pages is None:
    chosen = paged.integers(n, "topk_indices", topk_indices, 2)
    paged.check_shape(n, "topk_indices", chosen, (tokens, chosen.shape[1]),
                      f"a row for each of {n.q}")
    pages = _pages(chosen, page_size, pages_per_seq, pages_per_seq)
  else:
    pages = paged.integers(n, "topk_pages", topk_pages, 2)
    paged.check_shape(n, "topk_pages", pages, (tokens, pages.shape[1]),
                      f"a row for each of {n.q}")
  cu, lengths = ragged.sequences_of(
      n, tokens, kv_lens, cu_q_lens,
      ragged.count_of(n, "distribution", distribution, 3))
  indptr = paged.integers(n, n.indptr, cu_kv_lens, 1) // page_size
  table, indptr = ragged.pages_of(n, kv_lens, page_indices, indptr, cu)
  # Each token is a sequence of its own: of the pages before its own that were
  # chosen, and of that.
  row = jnp.arange(tokens, dtype=jnp.int32)
  of = last_start(cu[:-1], row)
  place = lengths[of] - cu[1:][of] + row
  there = (row < cu[-1]) & (place >= 0)
  own = jnp.where(there, place // page_size, 0)[:, None]
  behind = np.iinfo(np.int32).max
  pages = jnp.sort(jnp.where((pages >= 0) & (pages < own), pages, behind), 1)
  pages = jnp.pad(
      pages, ((0, 0), (0, max(k_pages_max - pages.shape[1], 0))),
      constant_values=behind)[:, :k_pages_max]
  count = jnp.minimum(jnp.sum(pages < behind, 1, dtype=jnp.int32),
                      k_pages_max - 1)
  pages = jnp.where(jnp.arange(k_pages_max) == count[:, None], own, pages)
  listed = there[:, None] & (pages <= own)
  at = indptr[:-1][of][:, None] + jnp.where(listed, pages, 0)
  listed &= at < indptr[1:][of][:, None]
  pages = take(table, jnp.where(listed, at, as_int32(table.shape[0])), -1)
  ends = jnp.arange(tokens + 1, dtype=jnp.int32)
  with arguments.called(function):
    out, cache_kv = sglang_mla_ragged_paged_attention(
        ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv,
        jnp.where(there, count * page_size + place % page_size + 1, 0),
        pages.reshape(-1), ends, ends * (k_pages_max * page_size),
        jnp.full(3, tokens, jnp.int32), sm_scale=sm_scale, **tuning)
  return out[..., :kv_lora_rank], cache_kv
