# SPDX-License-Identifier: Apache-2.0
"""Self-check of what stands between projections and attention."""

from __future__ import annotations

import jax.numpy as jnp

from jax._src.aiter.core.check import Check, normal
from jax._src.aiter.fused_qk import api, norms

_TOKENS, _HEADS, _LORA, _ROPE = 6, 16, 512, 64


def _tables():
  angles = jnp.arange(_TOKENS)[:, None] / 100.0 ** (
      jnp.arange(_ROPE // 2) / _ROPE)
  return jnp.cos(angles), jnp.sin(angles)


def _fused(q_nope, q_pe, kv_c, k_pe):
  return api.fused_qk_rope_concat_and_cache_mla(
      q_nope, q_pe, kv_c, k_pe,
      jnp.zeros((2, 4, _LORA + _ROPE), q_nope.dtype), jnp.arange(_TOKENS),
      jnp.arange(_TOKENS), *_tables())


def _formula(q_nope, q_pe, kv_c, k_pe):
  cos, sin = (jnp.concatenate([t, t], -1) for t in _tables())

  def rotated(x, cos, sin):
    a, b = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-b, a], -1) * sin

  q = jnp.concatenate([q_nope, rotated(q_pe, cos[:, None], sin[:, None])], -1)
  rows = jnp.concatenate([kv_c, rotated(k_pe, cos, sin)], -1)
  return q, jnp.pad(rows, ((0, 2), (0, 0))).reshape(2, 4, -1)


def _heads(q, k, q_weight, k_weight):
  pools = [jnp.zeros((2, 4, k.shape[1], _ROPE), q.dtype)] * 2
  q, keys, values = api.fused_qk_norm_rope_cache(
      q, k, k, *pools, jnp.arange(_TOKENS), jnp.arange(_TOKENS), *_tables(),
      q_weight=q_weight, k_weight=k_weight)
  return q, keys, values


def _heads_formula(q, k, q_weight, k_weight):
  cos, sin = (jnp.concatenate([t, t], -1)[:, None] for t in _tables())

  def made(x, weight):
    x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight
    a, b = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-b, a], -1) * sin

  stored = lambda t: jnp.pad(t, ((0, 2), (0, 0), (0, 0))).reshape(
      2, 4, *t.shape[1:])
  return made(q, q_weight), stored(made(k, k_weight)), stored(k)


def _rows(q, k, q_weight, k_weight):
  return norms.fused_qk_rmsnorm(q, q_weight, 1e-6, k, k_weight)


def _rows_formula(q, k, q_weight, k_weight):
  return tuple(
      x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight
      for x, weight in ((q, q_weight), (k, k_weight)))


def checks() -> list[Check]:
  return [
      Check("fused_qk_rope_concat_and_cache_mla", _fused, _formula,
            normal((_TOKENS, _HEADS, _LORA), (_TOKENS, _HEADS, _ROPE),
                   (_TOKENS, _LORA), (_TOKENS, _ROPE))),
      Check("fused_qk_norm_rope_cache", _heads, _heads_formula,
            normal((_TOKENS, _HEADS, _ROPE), (_TOKENS, 4, _ROPE), (_ROPE,),
                   (_ROPE,))),
      Check("fused_qk_rmsnorm", _rows, _rows_formula,
            normal((_TOKENS, 3 * _LORA), (_TOKENS, _LORA), (3 * _LORA,),
                   (_LORA,))),
  ]
