# SPDX-License-Identifier: Apache-2.0
"""AMD's AITER operators for JAX: fused on AMD and NVIDIA GPUs, right on any."""

from jax._src.aiter.gemm import (
    flatmm_fp8,
    gemm,
    gemm_fp4,
    gemm_fp8,
    gemm_fp8_mi350,
    gemm_i8,
)
from jax._src.aiter.mha import (
    dot_product_attention,
    flash_attn_func,
    flash_attn_varlen,
)
from jax._src.aiter.norm import (
    layer_norm,
    layer_norm_quant,
    layer_norm_with_add,
    layer_norm_with_add_quant,
    rms_norm,
    rms_norm_quant,
    rms_norm_with_add,
    rms_norm_with_add_quant,
)

__all__ = [
    "dot_product_attention",
    "flash_attn_func",
    "flash_attn_varlen",
    "flatmm_fp8",
    "gemm",
    "gemm_fp4",
    "gemm_fp8",
    "gemm_fp8_mi350",
    "gemm_i8",
    "layer_norm",
    "layer_norm_quant",
    "layer_norm_with_add",
    "layer_norm_with_add_quant",
    "rms_norm",
    "rms_norm_quant",
    "rms_norm_with_add",
    "rms_norm_with_add_quant",
]
