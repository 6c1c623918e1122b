# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `ops.paged_attention`, now in jax.experimental.aiter."""

from jax.experimental.aiter import paged_attention

__all__ = ["paged_attention"]
