# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.rmsnorm`, now jax.experimental.aiter's functions."""

from jax.experimental.aiter import rms_norm, rms_norm_with_add

__all__ = ["rms_norm", "rms_norm_with_add"]
