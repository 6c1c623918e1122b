# SPDX-License-Identifier: Apache-2.0
"""The norms' self-check."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jax._src.aiter.core.check import Check, normal, with_gradients
from jax._src.aiter.norm import api
from jax._src.aiter.norm.op import Config, Rows, reference_fwd

_COLS = 4096


def _norm(function: str) -> Check:
  layer, add = function.startswith("layer"), "add" in function
  rows = normal(*[(64, _COLS)] * 4)
  weights = normal((_COLS,), (_COLS,))

  def formula(x, *rest):
    residual, rest = (rest[0], rest[1:]) if add else (None, rest)
    gamma, beta = (*rest, None)[:2]
    out = reference_fwd(Config(layer, 1e-5), Rows(x, residual, gamma, beta))
    return (out.y, out.residual_out) if add else out.y

  return Check(
      function,
      with_gradients(functools.partial(getattr(api, function), epsilon=1e-5)),
      with_gradients(formula),
      [tuple(rows[2:]) if add else rows[2], *rows[:1 + add],
       *weights[:1 + layer]])


def _quant() -> Check:
  def call(x, gamma):
    q, scale = api.rms_norm_quant(x, gamma)
    return q.astype(jnp.float32) * scale

  return Check(
      "rms_norm_quant, int8", call,
      lambda x, gamma: reference_fwd(
          Config(False, 1e-6), Rows(x, None, gamma, None)).y,
      normal((64, _COLS), (_COLS,)))


def checks() -> list[Check]:
  return [*map(_norm, ("rms_norm", "rms_norm_with_add", "layer_norm",
                       "layer_norm_with_add")), _quant()]
