# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over paged caches: public functions.

A token's row of the cache is [latent | rope], one for all heads. Scores are of
the whole row, and values are its latent part: queries are absorbed (multiplied
by the key's up-projection beside their rotated part), and the value's is left
to the caller. DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1.

What is absent (a page that is negative or past the last, an index of -1) is not
attended to, and nothing is read for it. A query without any key gives 0, and
lse -inf.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.mla import op
from jax._src.aiter.paged import aliases
from jax._src.aiter.paged import api as paged
from jax._src.aiter.paged.api import Names
from jax._src.aiter.paged.op import KINDS, Config, Operands

_FLOATS = ("float16", "bfloat16", "float32")
_FP8 = tuple(kind for kind in KINDS if kind != "int8")


class _Static(NamedTuple):
  """What a public function was called with, apart from arrays; hashable."""
  names: Names
  lora: int
  cp_world_size: int
  scores: paged.Static


class _Arrays(NamedTuple):
  """Arrays as the public functions have them; an absent one is None."""
  q: jax.Array
  kv: jax.Array
  cu_seqlens: jax.Array | None
  indptr: jax.Array | None
  table: jax.Array
  last_page_lens: jax.Array | None
  q_scale: jax.Array | None
  kv_scale: jax.Array | None
  sink: jax.Array | None
  g_kv_indptr: jax.Array | None = None
  cp_rank: jax.Array | int = 0


def check_columns(n: Names, q, kv, lora: int) -> None:
  """An error unless queries and a cache [pages, page_size, 1, cols] agree."""
  paged.check_array(n, n.q, q, 3, (*_FLOATS, *_FP8))
  paged.check_array(n, n.k, kv, 4, (*_FLOATS, *KINDS))
  paged.check_cache_dtype(n, q, kv)
  cols = q.shape[2]
  if q.shape[1] < 1 or cols < lora:
    raise bad(n.function, n.q, describe(q),
              f"shape [tokens, heads, {lora} + rope]: kv_lora_rank is {lora}")
  if kv.shape[1] < 1 or kv.shape[2] != 1 or kv.shape[3] < cols:
    raise bad(n.function, n.k, describe(kv),
              f"shape [pages, page_size, 1, at least {cols}], as {n.q}")


def as_kernels_take(q):
  """Float8 queries in bfloat16, which holds them."""
  return q.astype(jnp.bfloat16) if q.dtype.name in _FP8 else q


def _static(n: Names, sm_scale, logit_cap, causal, return_lse, lora,
            cp_world_size=1) -> _Static:
  scores = paged.static(n, "mla", sm_scale, (-1, -1), logit_cap, causal,
                        return_lse)
  return _Static(n, arguments.number(
      n.function, "kv_lora_rank", lora, "an integer >= 1", lambda r: r >= 1,
      int), arguments.number(
          n.function, "cp_world_size", cp_world_size, "an integer >= 1",
          lambda r: r >= 1, int), scores)


def _places(s: _Static, a: _Arrays, cu):
  """Where sequences' queries stand, or None: op.Operands.places."""
  n = s.names
  if s.cp_world_size == 1 or s.scores.window[1] < 0:
    return None
  ends = paged.integers(n, "g_kv_indptr", a.g_kv_indptr, 1)
  paged.check_shape(n, "g_kv_indptr", ends, cu.shape, "as kv_indptr")
  rank = paged.integers(n, "cp_rank", jnp.asarray(a.cp_rank), 0)
  return jnp.diff(ends) - jnp.diff(cu) - rank


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _attend(s: _Static, a: _Arrays):
  """(out, lse or None)."""
  n = s.names
  kv = a.kv[:, :, None] if a.kv.ndim == 3 else a.kv
  check_columns(n, a.q, kv, s.lora)
  tokens, heads, cols = a.q.shape
  size = kv.shape[1]
  indptr = cu = None
  if a.indptr is None:
    table = paged.integers(n, n.table, a.table, 2)
    paged.check_shape(n, n.table, table, (tokens, table.shape[1]),
                      f"a row for each of {n.q}")
    # A row's keys are pages of one token. What is behind the last index is not
    # looked at.
    pages, size = kv.shape[0] * size, 1
    kv = kv.reshape(pages, 1, 1, kv.shape[3])
    place = jnp.arange(1, table.shape[1] + 1, dtype=jnp.int32)
    there = (table >= 0) & (table < pages)
    # From 0 on, so that XLA makes one kernel of it, and none of no column.
    lengths = lax.reduce(
        jnp.where(there, place, 0), np.int32(0), lax.max, (1,))
  else:
    table = paged.integers(n, n.table, a.table, 1)
    aliases.check_packed(n, a.indptr, table, a.last_page_lens, size)
    lengths = paged.integers(n, n.lengths, a.last_page_lens, 1)
    indptr = paged.integers(n, n.indptr, a.indptr, 1)
    cu = paged.integers(n, n.cu_seqlens, a.cu_seqlens, 1)
    paged.check_shape(n, n.cu_seqlens, cu, indptr.shape,
                      f"where each sequence's queries begin, as {n.indptr}")
  v_scale = paged.number_scale(n, n.k_scale, a.kv_scale)
  scale = s.scores.softmax_scale
  places = _places(s, a, cu)
  cfg = Config(
      "mla", size, 1 / math.sqrt(cols) if scale is None else scale,
      seqlen_q=int(cu is None), window=s.scores.window,
      soft_cap=s.scores.soft_cap, return_lse=s.scores.return_lse, dv=s.lora,
      cp_world_size=1 if places is None else s.cp_world_size,
      last_pages=indptr is not None)
  return paged.run(n.function, cfg, Operands(
      as_kernels_take(a.q), kv, None,
      v_scale * paged.number_scale(n, n.q_scale, a.q_scale), v_scale, table,
      indptr, lengths, cu, paged.per_head(n, n.sinks, a.sink, heads), None,
      places), op.attend)


def _call(s: _Static, a: _Arrays, needed: tuple[str, ...]):
  n = s.names
  names = (n.q, n.k, n.cu_seqlens, n.indptr, n.table, n.lengths)
  for name, t in zip(names, a):
    if name in needed:
      arguments.check_is_array(n.function, name, t, optional=False)
  for name, t in ((n.sinks, a.sink), ("g_kv_indptr", a.g_kv_indptr)):
    arguments.check_is_array(n.function, name, t)
  for name, t in ((n.q_scale, a.q_scale), (n.k_scale, a.kv_scale),
                  ("cp_rank", a.cp_rank)):
    arguments.operand(n.function, name, t)
  if a.indptr is not None and a.kv.ndim > 1:
    aliases.check_pages(n, a.indptr, a.table, a.last_page_lens, a.kv.shape[1])
  out, lse = _attend(s, a)
  return (out, lse) if s.scores.return_lse else out


def mla_decode_fwd(
    q: jax.Array,
    kv_buffer: jax.Array,
    cu_seqlens_q: jax.Array,
    kv_indptr: jax.Array,
    kv_indices: jax.Array,
    kv_last_page_lens: jax.Array,
    *,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    causal: bool = True,
    q_scale: jax.Array | float | None = None,
    kv_scale: jax.Array | float | None = None,
    sink: jax.Array | None = None,
    kv_lora_rank: int = 512,
    return_lse: bool = False,
    g_kv_indptr: jax.Array | None = None,
    cp_world_size: int = 1,
    cp_rank: jax.Array | int = 0,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """AITER's attention of absorbed queries to a paged latent cache.

  Sequence i has the queries cu_seqlens_q[i]:cu_seqlens_q[i + 1], the last of
  its tokens: one of a step of decoding, some of a speculative one, many of a
  prompt or a chunk of it. Its tokens lie in the pages
  kv_indices[kv_indptr[i]:kv_indptr[i + 1]], all full but the last. Lengths are
  the device's: nothing is read by the host, and the keys of long sequences are
  divided over the device and joined in an order that is always the same.

  Where contexts are divided over devices, token p of a sequence lies in the
  cache of rank p % cp_world_size, behind those before it; pages and lengths are
  of the rank's own. Each attends to its part with return_lse, and
  `merge_attn_states` joins them; a sink is for one of the ranks alone.

  Args:
    q: [tokens, heads, lora + rope], float16, bfloat16, float32 or a float8
      type, which is computed with as bfloat16. Any number of heads.
    kv_buffer: [pages, page_size, 1, lora + rope] or [pages, page_size, lora +
      rope], or of more columns, which are not read; q's dtype, int8,
      float8_e4m3fn, float8_e4m3fnuz or float8_e5m2. As
      `concat_and_cache_mla` writes it. Pages of any size.
    cu_seqlens_q: integers [b + 1], 0 first and in order. Rows behind the last
      sequence give 0.
    kv_indptr: integers [b + 1].
    kv_indices: integers [n], pages.
    kv_last_page_lens: integers [b], tokens in each sequence's last page.
    sm_scale: of the scores; 1 / sqrt(lora + rope) by default, which is AITER's
      and no model's: give yours.
    logit_cap: cap of cap * tanh(score / cap); 0 for none.
    causal: whether a query sees no key behind its own.
    q_scale: scale of dequantisation of q: a number, [] or [1].
    kv_scale: the same of kv_buffer.
    sink: [heads], the logit of a key without a value.
    kv_lora_rank: lora, the columns that are values too.
    return_lse: whether to return the logarithms of the sums too.
    g_kv_indptr: integers [b + 1], where causal and of several ranks: sequence i
      has g_kv_indptr[i + 1] - g_kv_indptr[i] tokens on all of them.
    cp_world_size: ranks that tokens are dealt to.
    cp_rank: whose cache this is; an integer, which may be traced
      (`jax.lax.axis_index`).

  Returns:
    [tokens, heads, lora] in q's dtype (bfloat16 of float8); with return_lse
    also float32 [heads, tokens].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  n = Names("mla_decode_fwd", k="kv_buffer", table="kv_indices",
            lengths="kv_last_page_lens", softmax_scale="sm_scale",
            soft_cap="logit_cap", q_scale="q_scale", k_scale="kv_scale")
  s = _static(n, sm_scale, logit_cap, causal, return_lse, kv_lora_rank,
              cp_world_size)
  paged.check_cumulative(n, cu_seqlens_q, q)
  rank = cp_rank if isinstance(cp_rank, int) else arguments.at_hand(cp_rank)
  if rank is not None and not np.all(
      (0 <= rank) & (rank < s.cp_world_size)):
    raise bad(n.function, "cp_rank", cp_rank,
              f"from 0 to cp_world_size - 1, {s.cp_world_size - 1}")
  if s.cp_world_size > 1 and causal:
    arguments.check_is_array(n.function, "g_kv_indptr", g_kv_indptr,
                             optional=False)
  a = _Arrays(q, kv_buffer, cu_seqlens_q, kv_indptr, kv_indices,
              kv_last_page_lens, q_scale, kv_scale, sink, g_kv_indptr, cp_rank)
  return _call(s, a, (n.q, n.k, n.cu_seqlens, n.indptr, n.table, n.lengths))


# AITER's name for absorbed queries of prompts, which are served alike.
mla_prefill_fwd = mla_decode_fwd


def sparse_mla_fwd(
    q: jax.Array,
    kv_buffer: jax.Array,
    topk_indices: jax.Array,
    *,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    q_scale: jax.Array | float | None = None,
    kv_scale: jax.Array | float | None = None,
    sink: jax.Array | None = None,
    kv_lora_rank: int = 512,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Attention of each query to the tokens that an indexer chose for it.

  DeepSeek's sparse attention, decode and prefill alike: query t attends to the
  slots topk_indices[t], in any order, and to no other. A slot that is named
  twice counts twice.

  Args:
    q: [tokens, heads, lora + rope], as in `mla_decode_fwd`.
    kv_buffer: as there; [slots, 1, 1, lora + rope] is one of pages of a token.
    topk_indices: integers [tokens, k], slots: page * page_size + offset. -1, or
      whatever else is none, is padding.
    sm_scale: as there.
    logit_cap: as there.
    q_scale: as there.
    kv_scale: as there.
    sink: as there.
    kv_lora_rank: as there.
    return_lse: as there.

  Returns:
    As mla_decode_fwd.

  Raises:
    TypeError: as mla_decode_fwd.
    ValueError: as mla_decode_fwd.
  """
  n = Names("sparse_mla_fwd", k="kv_buffer", table="topk_indices",
            softmax_scale="sm_scale", soft_cap="logit_cap", q_scale="q_scale",
            k_scale="kv_scale")
  s = _static(n, sm_scale, logit_cap, False, return_lse, kv_lora_rank)
  return _call(s, _Arrays(q, kv_buffer, None, None, topk_indices, None, q_scale,
                          kv_scale, sink), (n.q, n.k, n.table))
