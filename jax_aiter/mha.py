# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.mha`, now jax.experimental.aiter's functions."""

from jax.experimental.aiter import flash_attn_func, flash_attn_varlen

__all__ = ["flash_attn_func", "flash_attn_varlen"]
