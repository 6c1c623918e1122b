# SPDX-License-Identifier: Apache-2.0
"""The gated activations' self-check."""

from __future__ import annotations

import jax.numpy as jnp

from jax._src.aiter.activation import api
from jax._src.aiter.activation.op import Config, Rows, reference_fwd
from jax._src.aiter.core.check import Check, normal, with_gradients


def _formula(name: str):
  def run(x):
    return reference_fwd(Config(name, out=x.dtype.name), Rows(x))
  return run


def _plain(name: str) -> Check:
  dy, x = normal((64, 4096), (64, 8192))
  return Check(f"{name}_and_mul",
               with_gradients(getattr(api, f"{name}_and_mul")),
               with_gradients(_formula(name)), [dy, x])


def _quant(group: int | None) -> Check:
  def call(x):
    q, scale = api.silu_and_mul_quant(x, group_size=group, quant_dtype="int8")
    q = q.astype(jnp.float32).reshape(*scale.shape, -1)
    return (q * scale[..., None]).reshape(x.shape[0], -1)

  name = f"silu_and_mul_quant, {f'groups of {group}' if group else 'rows'}"
  return Check(name, call, _formula("silu"), normal((64, 8192)))


def checks() -> list[Check]:
  return [*map(_plain, ("silu", "gelu", "gelu_tanh")),
          *map(_quant, (None, 128))]
