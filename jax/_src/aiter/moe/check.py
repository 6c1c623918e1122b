# SPDX-License-Identifier: Apache-2.0
"""The self-check of layers of experts."""

from __future__ import annotations

import jax.numpy as jnp

import jax
from jax._src.aiter.core.check import Check, normal, with_gradients
from jax._src.aiter.moe import api, fused


def checks() -> list[Check]:
  logits, x, w1, w2, g = normal(
      (100, 16), (100, 64), (16, 256, 64), (16, 64, 128), (100, 64))
  ids = jax.lax.top_k(logits.astype(jnp.float32), 4)[1]

  def layer(logits, x, w1, w2):
    weights, ids = api.topk_softmax(logits, 4, True)
    return fused.fused_moe(x, w1 / 8, w2 / 8, weights, ids)

  def formula(logits, x, w1, w2):
    weights = jax.nn.softmax(jnp.take_along_axis(logits, ids, 1), -1)
    h = jnp.einsum("md,end->men", x, w1 / 8)
    gate, up = jnp.split(h, 2, -1)
    y = jnp.einsum("men,edn->med", jax.nn.silu(gate) * up, w2 / 8)
    y = jnp.take_along_axis(y, ids[..., None], 1)
    return jnp.einsum("mk,mkd->md", weights, y)

  return [Check("topk_softmax, fused_moe", with_gradients(layer),
                with_gradients(formula), [g, logits, x, w1, w2])]
