# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding's self-check."""

from __future__ import annotations

from jax._src.aiter.core.check import Check, normal, with_gradients
from jax._src.aiter.rope import api
from jax._src.aiter.rope.op import Config, Tokens, reference


def _rope(style: str) -> Check:
  gq, gk, q, k = normal(*[(2, 64, 8, 128), (2, 64, 2, 128)] * 2)
  tables = normal((64, 64), (64, 64))

  def formula(q, k):
    out = reference(Config(gptj=style == "gptj"),
                    Tokens(q[:, :, None], k[:, :, None], *tables))
    return tuple(t[:, :, 0] for t in out)

  return Check(
      f"rope_2c, {style}",
      with_gradients(lambda q, k: api.rope_2c(q, k, *tables,
                                              rotate_style=style)),
      with_gradients(formula), [(gq, gk), q, k])


def checks() -> list[Check]:
  return [*map(_rope, ("neox", "gptj"))]
