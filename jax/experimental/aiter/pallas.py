# SPDX-License-Identifier: Apache-2.0
"""Paged attention under the names and in the orders of JAX's Pallas."""

from jax._src.aiter.paged.aliases import (
    pallas_paged_attention as paged_attention,
)
from jax._src.aiter.paged.ragged import (
    pallas_ragged_paged_attention as ragged_paged_attention,
)

__all__ = ["paged_attention", "ragged_paged_attention"]
