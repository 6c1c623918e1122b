# SPDX-License-Identifier: Apache-2.0
"""Latent attention's self-check: decode of one and two queries a sequence."""

from __future__ import annotations

import jax.numpy as jnp

import jax
from jax._src.aiter.core.check import Check, normal
from jax._src.aiter.mla import api

_PAGES, _SIZE, _HEADS, _LORA, _ROPE = 8, 16, 16, 512, 64
_CONTEXTS, _QUERIES = (100, 16), (1, 2)


def _decode(q, kv):
  return api.mla_decode_fwd(
      q, kv, jnp.array([0, 1, 3]), jnp.array([0, 7, 8]), jnp.arange(8),
      jnp.array([4, 16]), sm_scale=0.05)


def _formula(q, kv):
  """A sequence after the other, of keys in the order of their pages."""
  rows, outs, begin, first = kv.reshape(-1, _LORA + _ROPE), [], 0, 0
  for length, count in zip(_CONTEXTS, _QUERIES):
    keys = rows[first:first + length]
    s = jnp.einsum("ihd,jd->hij", q[begin:begin + count], keys) * 0.05
    seen = jnp.arange(length) <= jnp.arange(count)[:, None] + length - count
    p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), -1)
    outs.append(jnp.einsum("hij,jd->ihd", p, keys[:, :_LORA]))
    begin += count
    first += -(-length // _SIZE) * _SIZE
  return jnp.concatenate(outs)


def checks() -> list[Check]:
  cols = _LORA + _ROPE
  return [Check("mla_decode_fwd", _decode, _formula,
                normal((sum(_QUERIES), _HEADS, cols),
                       (_PAGES, _SIZE, 1, cols)))]
