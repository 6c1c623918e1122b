# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.ops.paged_prefill`, now in jax.experimental.aiter."""

from jax.experimental.aiter import paged_prefill

__all__ = ["paged_prefill"]
