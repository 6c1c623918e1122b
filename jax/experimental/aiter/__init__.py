# SPDX-License-Identifier: Apache-2.0
"""AMD's AITER operators for JAX: fused on AMD and NVIDIA GPUs, right on any."""

from jax._src.aiter.mha import (
    dot_product_attention as dot_product_attention,
)
from jax._src.aiter.mha import (
    flash_attn_func as flash_attn_func,
)
from jax._src.aiter.mha import (
    flash_attn_varlen as flash_attn_varlen,
)
