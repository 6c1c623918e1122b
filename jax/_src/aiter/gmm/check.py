# SPDX-License-Identifier: Apache-2.0
"""The grouped products' self-check."""

from __future__ import annotations

import jax.numpy as jnp

from jax._src.aiter.core.check import Check, integers, with_gradients
from jax._src.aiter.gmm import api


def checks() -> list[Check]:
  a, b, g = integers((500, 256), (4, 256, 128), (500, 128))
  sizes = jnp.array([200, 0, 130, 100])

  def formula(a, b):
    ends = jnp.cumsum(sizes)
    row = jnp.arange(500)[:, None]
    mine = (row >= ends - sizes) & (row < ends)
    return jnp.einsum("mg,mk,gkn->mn", mine.astype(a.dtype), a, b)

  return [Check("ragged_dot", with_gradients(
      lambda a, b: api.ragged_dot(a, b, sizes)), with_gradients(formula),
                [g, a, b])]
