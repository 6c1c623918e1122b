# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.gemm_fp4`, now in jax.experimental.aiter."""

from jax.experimental.aiter import gemm_fp4

__all__ = ["gemm_fp4"]
