# SPDX-License-Identifier: Apache-2.0
"""Paged and latent attention under sglang-jax's names, in its order."""

from jax._src.aiter.mla.ragged import (
    compute_topk_pages,
    sparse_mla_page_level,
)
from jax._src.aiter.mla.ragged import (
    sglang_mla_ragged_paged_attention as mla_ragged_paged_attention,
)
from jax._src.aiter.paged.ragged import (
    sglang_ragged_paged_attention as ragged_paged_attention,
)

__all__ = ["compute_topk_pages", "mla_ragged_paged_attention",
           "ragged_paged_attention", "sparse_mla_page_level"]
