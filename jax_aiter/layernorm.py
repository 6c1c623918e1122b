# SPDX-License-Identifier: Apache-2.0
"""Beside `jax_aiter.rmsnorm`: jax.experimental.aiter's layer norms."""

from jax.experimental.aiter import layer_norm, layer_norm_with_add

__all__ = ["layer_norm", "layer_norm_with_add"]
