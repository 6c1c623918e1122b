# SPDX-License-Identifier: Apache-2.0
"""Paged attention under sglang-jax's name, in its order."""

from jax._src.aiter.paged.ragged import (
    sglang_ragged_paged_attention as ragged_paged_attention,
)

__all__ = ["ragged_paged_attention"]
