# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.flatmm_fp8`, now in jax.experimental.aiter."""

from jax.experimental.aiter import flatmm_fp8

__all__ = ["flatmm_fp8"]
