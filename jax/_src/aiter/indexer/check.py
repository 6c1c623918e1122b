# SPDX-License-Identifier: Apache-2.0
"""Self-check of the lightning indexer's logits."""

from __future__ import annotations

import jax.numpy as jnp

from jax._src.aiter.core import dispatch
from jax._src.aiter.core.check import Check, integers
from jax._src.aiter.indexer import api

_ROWS, _KEYS = 8, 200


def _kernel(q, kv, weights):
  kind = dispatch.float8_dtype()
  ends = jnp.arange(1, _ROWS + 1, dtype=jnp.int32) * (_KEYS // _ROWS)
  out = api.fp8_mqa_logits(q.astype(kind), kv.astype(kind), jnp.ones(_KEYS),
                           weights, jnp.zeros(_ROWS, jnp.int32), ends)
  return jnp.where(out > -jnp.inf, out, 0)


def _formula(q, kv, weights):
  dots = jnp.einsum("mhd,nd->mhn", q, kv, precision="highest")
  out = jnp.einsum("mhn,mh->mn", jnp.maximum(dots, 0), weights,
                   precision="highest")
  ends = jnp.arange(1, _ROWS + 1)[:, None] * (_KEYS // _ROWS)
  return jnp.where(jnp.arange(_KEYS) < ends, out, 0)


def checks() -> list[Check]:
  return [Check("fp8_mqa_logits", _kernel, _formula,
                integers((_ROWS, 64, 128), (_KEYS, 128), (_ROWS, 64)))]
