# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.gemm_fp8`, now in jax.experimental.aiter."""

from jax.experimental.aiter import gemm_fp8, gemm_fp8_mi350

__all__ = ["gemm_fp8", "gemm_fp8_mi350"]
