# SPDX-License-Identifier: Apache-2.0
"""Paged attention's self-check: decode, a mixed batch, and a cache of bytes."""

from __future__ import annotations

import jax.numpy as jnp

import jax
from jax._src.aiter.core.check import Check, normal
from jax._src.aiter.paged import api

_PAGES, _SIZE, _WIDTH = 16, 16, 7
_HQ, _HK, _D = 8, 2, 128
_CONTEXTS = (100, 37)
_QUERIES = (9, 1)


def _tables():
  pages = jnp.arange(2 * _WIDTH) * 5 % _PAGES
  return pages.reshape(2, _WIDTH), jnp.array(_CONTEXTS)


def _formula(q, k, v, queries=(1, 1)):
  """A sequence after the other, of keys taken out of their pages."""
  table, _ = _tables()
  outs, begin = [], 0
  for row, length, count in zip(table, _CONTEXTS, queries):
    keys, values = (
        jnp.repeat(t[row].reshape(-1, *t.shape[2:])[:length], _HQ // _HK, 1)
        for t in (k, v))
    s = jnp.einsum("ihd,jhd->hij", q[begin:begin + count], keys) / _D**0.5
    seen = jnp.arange(length) <= (
        jnp.arange(count)[:, None] + length - count)
    p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), -1)
    outs.append(jnp.einsum("hij,jhd->ihd", p, values))
    begin += count
  return jnp.concatenate(outs)


def _decode(q, k, v):
  return api.paged_attention_decode(q, k, v, *_tables())


def _mixed(q, k, v):
  table, lengths = _tables()
  starts = jnp.array([0, _QUERIES[0], sum(_QUERIES)])
  return api.unified_attention(q, k, v, starts, lengths, table)


def _bytes(q, k, v):
  k, v = (jnp.round(t.astype(jnp.float32) * 20).astype(jnp.int8)
          for t in (k, v))
  return api.paged_attention_decode(
      q, k, v, *_tables(), k_scale=1 / 20, v_scale=1 / 20)


def checks() -> list[Check]:
  pools = [(_PAGES, _SIZE, _HK, _D)] * 2
  rounded = lambda t: jnp.round(t * 20) / 20
  return [
      Check("paged_attention_decode", _decode, _formula,
            normal((2, _HQ, _D), *pools)),
      Check("unified_attention", _mixed,
            lambda *args: _formula(*args, _QUERIES),
            normal((sum(_QUERIES), _HQ, _D), *pools)),
      Check("paged_attention_decode, int8", _bytes,
            lambda q, k, v: _formula(q, rounded(k), rounded(v)),
            normal((2, _HQ, _D), *pools)),
  ]
