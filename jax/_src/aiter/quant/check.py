# SPDX-License-Identifier: Apache-2.0
"""The quantisers' self-check."""

from __future__ import annotations

from jax._src.aiter.core.check import Check, integers
from jax._src.aiter.quant import api


def _check(function: str, block_shape=None, **options) -> Check:
  """Of numbers that the formats hold all but a rounding."""
  def call(x):
    q, scale = getattr(api, function)(x, **options)
    return api.dequant(q, scale, block_shape=block_shape)

  return Check(function, call, lambda x: x, integers((256, 4096)))


def checks() -> list[Check]:
  return [
      _check("per_token_quant"),
      _check("per_group_quant", (1, 128), quant_dtype="int8"),
      _check("mx_quant", (1, 32)),
      _check("per_block_quant", (128, 128), quant_dtype="int8"),
      _check("per_tensor_quant"),
  ]
