# SPDX-License-Identifier: Apache-2.0
"""Few queries against many keys, as decoding has them, by paged kernels.

A dense cache is a pool of pages that lie in order, so nothing is copied. The
ordinary kernel gives each query head programs of its own, whose tiles of rows
are nearly empty here, and walks over all keys in each. The paged one takes all
query heads of a KV head together and divides keys among programs.
"""

from __future__ import annotations

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.attention.types import Config, Operands
from jax._src.aiter.core.dims import is_known
from jax._src.aiter.paged import op as paged

# A KV head's rows, queries and query heads together, that are one tile of the
# paged kernel: it reads a key once for all of them. The narrow tile is read
# fastest, and has no window.
_ROWS, _NARROW_ROWS = 128, 16
# Queries that leave most of an ordinary kernel's tile empty however many
# programs there are; and programs of it that leave most of a device idle.
_FEW_QUERIES, _PROGRAMS = 16, 128
# Keys from which reading them takes longer than launching kernels.
_KEYS = 512
# A page in tokens: the largest power of two that divides the cache, as kernels
# like it best, and no more than what they count in 32 bits.
_MAX_PAGE = 4096


def few_queries(cfg: Config, x: Operands) -> bool:
  """Whether the paged kernels serve the call, and better than the ordinary."""
  others = (x.cu_seqlens_q, x.bias, x.mask, x.dropout_state)
  if (not cfg.inference or x.packed or cfg.top_left or cfg.sink_tokens
      or any(t is not None for t in others)):
    return False
  b, sq, hq, _ = x.q.shape
  _, sk, hk, _ = x.k.shape
  if not all(map(is_known, (sq, sk, hq))) or sk < _KEYS:
    return False
  group = hq // hk
  rows = sq * group
  if group == 1:
    return rows <= _NARROW_ROWS and config(cfg, x).window == (-1, -1)
  idle = is_known(b) and b * hq < _PROGRAMS
  return rows <= _ROWS and (sq <= _FEW_QUERIES or idle)


def config(cfg: Config, x: Operands) -> paged.Config:
  """The call's static facts as the paged operator has them."""
  sq, sk = x.q.shape[1], x.k.shape[1]
  left, right = cfg.window_left, cfg.window_right
  # The last query stands at the last key.
  right = -1 if sq <= right + 1 else right
  return paged.Config(
      "NHD", min(sk & -sk, _MAX_PAGE), cfg.softmax_scale, seqlen_q=sq,
      window=(left, right), soft_cap=cfg.logits_soft_cap, return_lse=True)


def operands(x: Operands, page: int) -> paged.Operands:
  """Its arrays, of pages of so many tokens."""
  b, sk = x.k.shape[:2]
  pool = lambda t: t.reshape(b * (sk // page), page, *t.shape[2:])
  one = jnp.ones(1, jnp.float32)
  table = jnp.arange(b * (sk // page), dtype=jnp.int32).reshape(b, sk // page)
  lengths = jnp.full((b,), sk, jnp.int32)
  if x.cu_seqlens_k is not None:
    lengths = jnp.clip(jnp.diff(x.cu_seqlens_k), 0, sk)
  return paged.Operands(
      x.q.reshape(-1, *x.q.shape[2:]), pool(x.k), pool(x.v), one, one, table,
      None, lengths, sinks=x.sink, slopes=x.alibi_slopes)


def serves(cfg: Config, x: Operands):
  """What such a call asks of the paged kernels."""
  own = config(cfg, x)
  return paged.serves(
      own, jax.eval_shape(lambda x: operands(x, own.page_size), x))


def kernel(cfg: Config, call, x: Operands):
  """(out, lse) of such a call."""
  own = config(cfg, x)
  out, lse = paged.kernel(own, call, operands(x, own.page_size))
  b, sq, hq, _ = x.q.shape
  return (out.reshape(b, sq, hq, out.shape[-1]),
          lax.transpose(lse.reshape(hq, b, sq), (1, 0, 2)))
