# SPDX-License-Identifier: Apache-2.0
"""Sampling's self-check."""

from __future__ import annotations

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.core.check import Check, normal
from jax._src.aiter.sampling import api
from jax._src.aiter.sampling.op import Config, Rows, reference


def _sample(name: str, top_k=0, top_p=1.0) -> Check:
  logits, = normal((8, 32000))
  key = jax.random.key(1)

  def formula(logits):
    full = lambda value, dtype: jnp.full((8,), value, dtype)
    keys = api.keys_of("sample", key, 8)
    return reference(Config("draw"), Rows(
        logits, keys, full(0.7, jnp.float32), full(top_k, jnp.int32),
        full(top_p, jnp.float32))).tokens

  return Check(name, lambda x: api.sample(x, key, 0.7, top_k, top_p), formula,
               [logits])


def checks() -> list[Check]:
  logits, = normal((8, 32000))
  return [
      _sample("sample"),
      _sample("sample, top_k and top_p", 50, 0.9),
      Check("top_k", lambda x: api.top_k(x, 50), lambda x: tuple(
          lax.top_k(x, 50)), [logits]),
  ]
