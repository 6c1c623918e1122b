# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.gemm`, now in jax.experimental.aiter."""

from jax.experimental.aiter import gemm

__all__ = ["gemm"]
