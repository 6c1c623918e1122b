# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.rope`, now jax.experimental.aiter.rope."""

import jax
from jax.experimental import aiter


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """`aiter.rope` of [b, s, h, d] by tables [b, s, d] of full width."""
  return aiter.rope(x, cos, sin, reuse_freqs_front_part=False)


__all__ = ["rope"]
