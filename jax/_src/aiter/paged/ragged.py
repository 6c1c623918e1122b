# SPDX-License-Identifier: Apache-2.0
"""Ragged paged attention as servers for TPUs call it: it writes and attends.

New keys and values are stored in the cache, and all queries attend to their
sequences, in one call: tpu-inference's, its older form without the write, and
sglang-jax's. The cache interleaves K and V, [pages, page_size, heads, d] of
which head h of K is 2 h and V's behind it, in groups of as many heads as 32
bits hold numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from jax._src.aiter.cache import op as cache_op
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.dims import as_int32, last_start, round_up, take
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.paged import api
from jax._src.aiter.paged.api import Names
from jax._src.aiter.paged.op import Config, Operands

_LANES = 128
_NAMES = Names(
    "ragged_paged_attention", q="queries", k="kv_cache", table="page_indices",
    lengths="kv_lens", cu_seqlens="cu_q_lens", softmax_scale="sm_scale",
    soft_cap="soft_cap", sinks="attention_sink", q_scale="q_scale")


def packing(dtype) -> int:
  """Numbers in 32 bits."""
  return max(4 // jnp.dtype(dtype).itemsize, 1)


def check_sizes(function: str, kv_dtype: Any, **sizes: int) -> int:
  """Numbers of a dtype in 32 bits; an error unless sizes are sizes."""
  for name, size in sizes.items():
    arguments.number(function, name, size, "an integer >= 1",
                     lambda n: n >= 1, int)
  return packing(arguments.dtype_name(function, "kv_dtype", kv_dtype))


def get_kv_cache_shape(
    total_num_pages: int,
    page_size: int,
    actual_num_kv_heads: int,
    actual_head_dim: int,
    kv_dtype: Any,
) -> tuple[int, int, int, int, int]:
  """The shape of `ragged_paged_attention`'s cache.

  Args:
    total_num_pages: pages.
    page_size: tokens of a page.
    actual_num_kv_heads: heads of K, and as many of V.
    actual_head_dim: their columns.
    kv_dtype: of the cache.

  Returns:
    [pages, page_size, heads / p, p, d] with p numbers in 32 bits: twice the
    heads, rounded up to a multiple of p, and columns to one of 128.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: a size below 1.
  """
  p = check_sizes(
      "get_kv_cache_shape", kv_dtype, total_num_pages=total_num_pages,
      page_size=page_size, actual_num_kv_heads=actual_num_kv_heads,
      actual_head_dim=actual_head_dim)
  return (total_num_pages, page_size,
          round_up(2 * actual_num_kv_heads, p) // p, p,
          round_up(actual_head_dim, _LANES))


def get_kv_cache_shape_hd64(
    total_num_pages: int,
    page_size: int,
    actual_num_kv_heads: int,
    actual_head_dim: int,
    kv_dtype: Any,
) -> tuple[int, int, int, int, int]:
  """The shape of `ragged_paged_attention_hd64`'s cache.

  Args:
    total_num_pages: pages.
    page_size: tokens of a page.
    actual_num_kv_heads: heads of K, and as many of V.
    actual_head_dim: 64 at most.
    kv_dtype: of the cache.

  Returns:
    [pages, page_size, heads / p, p, 128] with p numbers in 32 bits: the heads,
    rounded up to a multiple of p, each K and V side by side.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: a size below 1, or more columns.
  """
  function = "get_kv_cache_shape_hd64"
  arguments.number(function, "actual_head_dim", actual_head_dim, "1 to 64",
                   lambda d: 1 <= d <= 64, int)
  p = check_sizes(
      function, kv_dtype, total_num_pages=total_num_pages, page_size=page_size,
      actual_num_kv_heads=actual_num_kv_heads)
  return (total_num_pages, page_size, round_up(actual_num_kv_heads, p) // p, p,
          _LANES)


class Scores(NamedTuple):
  """How scores are made: fields of Config."""
  softmax_scale: float
  window: tuple[int, int]
  soft_cap: float


class _Call(NamedTuple):
  """What a public function was called with, apart from arrays."""
  names: Names
  hd64: bool
  update: bool
  scores: Scores
  out_dtype: Any


def _interleaved(c: _Call, kv_cache, heads: int, d: int):
  """The cache as [pages, page_size, heads, 2, cols]: a view of it."""
  n = c.names
  api.check_array(n, n.k, kv_cache, 5)
  pages, size, groups, p, lanes = kv_cache.shape
  room = (lanes // 2 if c.hd64 else lanes)
  pairs = groups * p if c.hd64 else groups * p // 2
  if (p != packing(kv_cache.dtype) or room < d or pairs < heads
      or (not c.hd64 and groups * p % 2) or (c.hd64 and lanes != _LANES)):
    shape = get_kv_cache_shape_hd64 if c.hd64 else get_kv_cache_shape
    wanted = (f"shape {list(shape(pages, size, heads, d, kv_cache.dtype))}"
              if d <= 64 or not c.hd64 else f"a head dimension of at most 64,"
              f" which is {d}")
    raise bad(n.function, n.k, describe(kv_cache), wanted)
  return kv_cache.reshape(pages, size, pairs, 2, room)


def sequences_of(n: Names, tokens, kv_lens, cu_q_lens, count):
  """(where queries begin, keys) of sequences; those past `count` are empty."""
  lengths = api.integers(n, n.lengths, kv_lens, 1)
  sequences = lengths.shape[0]
  cu = api.integers(n, n.cu_seqlens, cu_q_lens, 1)
  api.check_shape(n, n.cu_seqlens, cu, (sequences + 1,),
                  "where each sequence's queries begin")
  # What is behind the last sequence is of none.
  place = jnp.arange(sequences + 1, dtype=jnp.int32)
  cu = jnp.where(place <= count, cu, cu[jnp.clip(count, 0, sequences)])
  return (jnp.clip(cu, 0, tokens),
          jnp.where(place[:-1] < count, lengths, 0))


def slots_of(tokens, cu, lengths, table, indptr, page_size: int):
  """Where tokens go, the last of their sequences; -1 for those of none."""
  row = jnp.arange(tokens, dtype=jnp.int32)
  i = last_start(cu[:-1], row)
  of = jnp.maximum(i, 0)
  begin, end = cu[:-1][of], cu[1:][of]
  position = lengths[of] - (end - begin) + row - begin
  place = indptr[of] + position // page_size
  there = (i >= 0) & (row < end) & (position >= 0) & (
      place < indptr[1:][of])
  page = take(table, jnp.where(there, place, as_int32(table.shape[0])), -1)
  return jnp.where(there & (page >= 0),
                   page * page_size + position % page_size, -1)


def _stored(n: Names, name: str, rows, cache, shape):
  """Keys or values, padded to the cache's heads and columns."""
  api.check_array(n, name, rows, 3)
  if rows.dtype != cache.dtype:
    raise bad(n.function, f"{name}'s dtype", rows.dtype,
              f"{cache.dtype}, as {n.k}", TypeError)
  api.check_shape(n, name, rows, shape, "as keys")
  return jnp.pad(rows, ((0, 0), (0, cache.shape[2] - shape[1]),
                        (0, cache.shape[4] - shape[2])))


def _run(c: _Call, queries, keys, values, cache, heads: int, kv_lens, table,
         indptr, cu_q_lens, count, sink, q_scale, k_scale, v_scale):
  """(out, cache) of an interleaved view of the cache."""
  n = c.names
  tokens, hq, _ = queries.shape
  size = cache.shape[1]
  cu, lengths = sequences_of(n, tokens, kv_lens, cu_q_lens, count)
  if c.update:
    rows = [_stored(n, name, t, cache, keys.shape)
            for name, t in (("keys", keys), ("values", values))]
    slots = slots_of(tokens, cu, lengths, table, indptr, size)
    write = arguments.no_gradient(n.function, api.NO_GRADIENT)(
        lambda operands: cache_op.write(
            cache_op.Config("interleaved", size), vary_together(operands)))
    cache = write(cache_op.Operands(
        cache, None, None, None, *rows, slots)).k_cache
  q, scale = quantised(n, queries, cache.dtype, q_scale)
  api.check_cache_dtype(n, q, cache)
  cfg = Config(
      "interleaved", size, heads=0 if heads == cache.shape[2] else heads,
      **c.scores._asdict())
  out, _ = api.run(n.function, cfg, Operands(
      q, cache, None, scale * api.number_scale(n, "k_scale", k_scale),
      api.number_scale(n, "v_scale", v_scale), table, indptr, lengths, cu,
      api.per_head(n, n.sinks, sink, hq), None))
  return out.astype(c.out_dtype), cache


def quantised(n: Names, queries, dtype, q_scale):
  """Queries as the kernels take them, and their scale of dequantisation."""
  scale = api.number_scale(n, "q_scale", q_scale)
  if q_scale is None:
    return queries, scale
  q, dtype = queries.astype(jnp.float32) / scale, jnp.dtype(dtype)
  if dtype.itemsize > 1:
    return q.astype(dtype), scale
  ends = (jnp.iinfo if dtype == jnp.int8 else jnp.finfo)(dtype)
  q = jnp.clip(q, float(ends.min), float(ends.max)).astype(dtype)
  return q.astype(_out_dtype(queries, None)), scale


def _out_dtype(queries, out_dtype):
  own = jnp.float32 if queries.dtype == jnp.float32 else jnp.bfloat16
  return own if out_dtype is None else out_dtype


def pages_of(n: Names, kv_lens, page_indices, indptr, cu_q_lens):
  """(table, where each sequence's pages begin in it).

  indptr: None if each sequence has as many pages.
  """
  table = api.integers(n, n.table, page_indices, 1)
  if indptr is None:
    api.check_array(n, n.lengths, kv_lens, 1)
    sequences = kv_lens.shape[0]
    if sequences < 1 or table.shape[0] % sequences:
      raise bad(n.function, n.table, describe(table),
                f"shape [{sequences} * pages of a sequence], as {n.lengths}")
    indptr = jnp.arange(sequences + 1, dtype=jnp.int32) * (
        table.shape[0] // sequences)
  else:
    api.check_shape(n, n.indptr, indptr, cu_q_lens.shape, f"as {n.cu_seqlens}")
  return table, indptr


def _write_and_attend(c: _Call, queries, keys, values, kv_cache, kv_lens,
                      page_indices, indptr, cu_q_lens, distribution, sink,
                      *scales):
  """tpu-inference's call; indptr None: as many pages for every sequence."""
  n = c.names
  api.check_q(n, queries)
  api.check_array(n, "keys", keys, 3)
  heads = keys.shape[1]
  api.check_heads(n, queries, heads, "keys")
  api.check_shape(n, "keys", keys, (queries.shape[0], heads, queries.shape[2]),
                  "as queries")
  cache = _interleaved(c, kv_cache, heads, queries.shape[2])
  table, indptr = pages_of(n, kv_lens, page_indices, indptr, cu_q_lens)
  c = c._replace(out_dtype=_out_dtype(queries, c.out_dtype))
  out, cache = _run(c, queries, keys, values, cache, heads, kv_lens, table,
                    indptr, cu_q_lens, count_of(n, "distribution", distribution,
                                              3), sink, *scales)
  return out, cache.reshape(kv_cache.shape)


_TUNING = (
    "mask_value", "skip_kv_mask", "chunk_prefill_size", "d_block_sizes",
    "p_block_sizes", "m_block_sizes", "decode_batch_size", "decode_block_sizes",
    "prefill_block_sizes", "num_kv_pages_per_block",
    "num_queries_per_block", "vmem_limit_bytes", "softmax_dtype", "debug_mode",
    "disable_bounds_checks", "disable_semaphore_checks")


def check_tuning(n: Names, tuning) -> None:
  for name in tuning:
    if name not in _TUNING:
      raise TypeError(f"{n.function}: {name} is no argument; accepted beside"
                      f" its own are {', '.join(_TUNING)}")


def scores(n: Names, sm_scale, sliding_window, soft_cap, causal=True) -> Scores:
  """Checks what scores are made with; None for no window and no cap."""
  number = lambda *args: arguments.number(n.function, *args)
  left = -1
  if sliding_window is not None:
    left = arguments.window_side(number(
        "sliding_window", sliding_window, "None or an integer >= 1",
        lambda w: w >= 1, int) - 1)
  if soft_cap is not None:
    soft_cap = number("soft_cap", soft_cap, "None or a number > 0",
                      lambda s: 0 < s < float("inf"))
  right = 0 if arguments.flag(n.function, "use_causal_mask", causal) else -1
  return Scores(number("sm_scale", sm_scale, "a finite number",
                       lambda s: abs(s) < float("inf")),
                (left, right), soft_cap or 0.0)


def _static(n: Names, hd64, causal, update, sm_scale, sliding_window, soft_cap,
            out_dtype) -> _Call:
  """Checks everything that is not an array."""
  return _Call(
      n, hd64, arguments.flag(n.function, "update_kv_cache", update),
      scores(n, sm_scale, sliding_window, soft_cap, causal),
      None if out_dtype is None else arguments.dtype_name(
          n.function, "out_dtype", out_dtype))


def count_of(n: Names, name: str, t, size: int):
  """The number of sequences, the last of an array of integers."""
  t = api.integers(n, name, t, 1)
  api.check_shape(n, name, t, (size,), "of which the last is how many"
                  " sequences there are")
  return t[size - 1]


def ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None = None,
    *,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out_dtype: Any = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **tuning: Any,
) -> tuple[jax.Array, jax.Array]:
  """tpu-inference's `ragged_paged_attention`, version 3, on any platform.

  Stores new tokens in the cache and attends, for a mixed batch of decoding and
  prefilling sequences. Sequence i has the rows cu_q_lens[i]:cu_q_lens[i + 1],
  the last of its kv_lens[i] tokens; token t of it is in page
  `page_indices[i * n + t // page_size]`, n pages a sequence. A token whose page
  is absent is neither stored nor attended to.

  Scores are q.k * sm_scale * k_scale * q_scale, then capped; out is v_scale
  times the weighted sum of values. With q_scale queries are divided by it and
  rounded to the cache's dtype. Donate the cache: it is written in place.

  Args:
    queries: [tokens, hq, d], float16, bfloat16 or float32.
    keys: [tokens, hk, d] in the cache's dtype.
    values: likewise.
    kv_cache: of get_kv_cache_shape; queries' dtype or one of 8 bits.
    kv_lens: integers [sequences], with the new tokens.
    page_indices: integers [sequences * n].
    cu_q_lens: integers [sequences + 1].
    distribution: integers [3]; the last is how many sequences there are. Rows
      of none give 0.
    attention_sink: [hq], the logit of a key without a value.
    use_causal_mask: whether a query sees no key behind its own.
    update_kv_cache: False if keys and values are in the cache already.
    sm_scale: of the scores.
    sliding_window: keys that a query sees, its own counted; None for all.
    soft_cap: cap of cap * tanh(score / cap); None for none.
    out_dtype: None is float32 of float32 queries, else bfloat16.
    q_scale: as above.
    k_scale: scale of dequantisation.
    v_scale: likewise.
    **tuning: what TPUs' kernels want to know, such as block sizes, mask_value
      or vmem_limit_bytes; not used.

  Returns:
    (out [tokens, hq, d], kv_cache).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  n = _NAMES
  check_tuning(n, tuning)
  c = _static(n, False, use_causal_mask, update_kv_cache, sm_scale,
              sliding_window, soft_cap, out_dtype)
  return _write_and_attend(
      c, queries, keys, values, kv_cache, kv_lens, page_indices, None,
      cu_q_lens, distribution, attention_sink, q_scale, k_scale, v_scale)


def ragged_paged_attention_hd64(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: jax.Array | None = None,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **tuning: Any,
) -> tuple[jax.Array, jax.Array]:
  """`ragged_paged_attention` of head dimensions up to 64, K and V in 128 lanes.

  Args:
    queries: as there.
    keys: as there.
    values: as there.
    kv_cache: of get_kv_cache_shape_hd64.
    kv_lens: as there.
    page_indices: as there.
    cu_q_lens: as there.
    distribution: as there.
    attention_sink: as there.
    sm_scale: as there.
    sliding_window: as there.
    soft_cap: as there.
    q_scale: as there.
    k_scale: as there.
    v_scale: as there.
    **tuning: as there.

  Returns:
    As ragged_paged_attention.

  Raises:
    TypeError: as ragged_paged_attention.
    ValueError: as ragged_paged_attention.
  """
  n = _NAMES._replace(function="ragged_paged_attention_hd64")
  check_tuning(n, tuning)
  c = _static(n, True, True, True, sm_scale, sliding_window, soft_cap, None)
  return _write_and_attend(
      c, queries, keys, values, kv_cache, kv_lens, page_indices, None,
      cu_q_lens, distribution, attention_sink, q_scale, k_scale, v_scale)


def pallas_ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **tuning: Any,
) -> jax.Array:
  """`jax.experimental.pallas.ops.tpu.ragged_paged_attention`: it only attends.

  Args:
    q: [tokens, hq, d].
    kv_pages: [pages, page_size, 2 * hk, d], head h of K at 2 h and V behind it.
    kv_lens: integers [sequences].
    page_indices: integers [sequences, n].
    cu_q_lens: integers [sequences + 1].
    num_seqs: integers [1].
    sm_scale: as in `ragged_paged_attention`.
    sliding_window: as there.
    soft_cap: as there.
    k_scale: as there.
    v_scale: as there.
    **tuning: as there.

  Returns:
    [tokens, hq, d] in q's dtype.

  Raises:
    TypeError: as ragged_paged_attention.
    ValueError: as ragged_paged_attention.
  """
  n = _NAMES._replace(q="q", k="kv_pages")
  check_tuning(n, tuning)
  api.check_array(n, "kv_pages", kv_pages, 4)
  pages, size, heads, d = kv_pages.shape
  if heads % 2:
    raise bad(n.function, "kv_pages", describe(kv_pages),
              "shape [pages, page_size, 2 * heads, d]")
  api.check_q(n, q)
  if d != q.shape[2]:
    raise bad(n.function, "kv_pages", describe(kv_pages),
              f"a head dimension of {q.shape[2]}, as q")
  table = api.integers(n, "page_indices", page_indices, 2)
  api.check_array(n, n.lengths, kv_lens, 1)
  api.check_shape(n, "page_indices", table, (kv_lens.shape[0],
                                             table.shape[1]),
                  f"a row for each of {n.lengths}")
  api.check_heads(n, q, heads // 2, "kv_pages")
  c = _static(n, False, True, False, sm_scale, sliding_window, soft_cap,
              q.dtype)
  indptr = jnp.arange(table.shape[0] + 1, dtype=jnp.int32) * table.shape[1]
  return _run(c, q, None, None, kv_pages.reshape(pages, size, heads // 2, 2, d),
              heads // 2, kv_lens, table.reshape(-1), indptr, cu_q_lens,
              count_of(n, "num_seqs", num_seqs, 1), None, None, k_scale,
              v_scale)[0]


def sglang_ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_cache_fused: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    custom_mask: None = None,
    attention_sink: jax.Array | None = None,
    *,
    causal: int = 1,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    xai_temperature_len: None = None,
    out_dtype: Any = None,
    **tuning: Any,
) -> tuple[jax.Array, jax.Array]:
  """`ragged_paged_attention` with sglang-jax's packed pages, in its order.

  Args:
    queries: as there.
    keys: as there.
    values: as there.
    kv_cache_fused: kv_cache there.
    kv_lens: as there.
    page_indices: integers [pages of all sequences].
    cu_q_lens: as there.
    cu_kv_lens: integers [sequences + 1], multiples of the pages' size: the
      pages of sequence i begin at page_indices[cu_kv_lens[i] // page_size].
    distribution: as there.
    custom_mask: None: a mask has no place here.
    attention_sink: as there.
    causal: 1, or 0 if queries see keys behind their own.
    sm_scale: as there.
    sliding_window: as there.
    soft_cap: as there.
    q_scale: as there.
    k_scale: as there.
    v_scale: as there.
    xai_temperature_len: None: scores have no temperature here.
    out_dtype: as there.
    **tuning: as there.

  Returns:
    As ragged_paged_attention.

  Raises:
    TypeError: as ragged_paged_attention.
    ValueError: as ragged_paged_attention.
  """
  n = _NAMES._replace(k="kv_cache_fused", indptr="cu_kv_lens")
  check_tuning(n, tuning)
  for name, t in (("custom_mask", custom_mask),
                  ("xai_temperature_len", xai_temperature_len)):
    if t is not None:
      raise bad(n.function, name, "given", "None")
  arguments.choice(n.function, "causal", causal, (0, 1))
  c = _static(n, False, bool(causal), True, sm_scale, sliding_window, soft_cap,
              out_dtype)
  api.check_array(n, n.k, kv_cache_fused, 5)
  indptr = api.integers(n, "cu_kv_lens", cu_kv_lens, 1)
  return _write_and_attend(
      c, queries, keys, values, kv_cache_fused, kv_lens, page_indices,
      indptr // kv_cache_fused.shape[1], cu_q_lens, distribution,
      attention_sink, q_scale, k_scale, v_scale)
