# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.activation`, now jax.experimental.aiter's function."""

from jax.experimental.aiter import silu_and_mul

__all__ = ["silu_and_mul"]
