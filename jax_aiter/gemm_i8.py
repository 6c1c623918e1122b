# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.gemm_i8`, now in jax.experimental.aiter."""

from jax.experimental.aiter import gemm_i8

__all__ = ["gemm_i8"]
