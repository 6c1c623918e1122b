# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.ops.append_kv`, now in jax.experimental.aiter."""

from jax.experimental.aiter import append_kv

__all__ = ["append_kv"]
