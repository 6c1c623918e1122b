# SPDX-License-Identifier: Apache-2.0
"""AMD's AITER operators for JAX: fused on AMD and NVIDIA GPUs, right on any."""

from jax._src.aiter.attention.api import (
    dot_product_attention,
    flash_attn_func,
    flash_attn_varlen,
)
from jax._src.aiter.cache.api import (
    append_kv,
    concat_and_cache_mla,
    concat_and_cache_mla_seg,
    copy_blocks,
    cp_gather_indexer_k_quant_cache,
    gather_kv_cache,
    indexer_k_quant_and_cache,
    kv_cache_update,
    reshape_and_cache,
    reshape_and_cache_flash,
    reshape_and_cache_with_block_quant,
    reshape_and_cache_with_block_quant_for_asm_pa,
    reshape_and_cache_with_pertoken_quant,
    swap_blocks,
    write_kv_cache,
)
from jax._src.aiter.core import dispatch as _dispatch
from jax._src.aiter.core.layouts import (
    shuffle_scale,
    shuffle_weight,
    unshuffle_scale,
    unshuffle_weight,
)
from jax._src.aiter.gemm.api import (
    flatmm_fp8,
    gemm,
    gemm_fp4,
    gemm_fp8,
    gemm_fp8_mi350,
    gemm_i8,
)
from jax._src.aiter.norm.api import (
    layer_norm,
    layer_norm_quant,
    layer_norm_with_add,
    layer_norm_with_add_quant,
    rms_norm,
    rms_norm_quant,
    rms_norm_with_add,
    rms_norm_with_add_quant,
)
from jax._src.aiter.quant.api import (
    dequant,
    float8_dtype,
    mx_dequant,
    mx_quant,
    pack_e2m1,
    per_block_quant,
    per_group_quant,
    per_tensor_quant,
    per_token_quant,
    smooth_quant,
    unpack_e2m1,
)

EXPORT_CHECKS = _dispatch.export_checks()
"""For `jax.export.export(..., disabled_checks=EXPORT_CHECKS)`.

JAX serialises no call of a target that it does not know to be stable, unless
told so. These are all targets of the functions here, on ROCm and CUDA.
"""

__all__ = [
    "EXPORT_CHECKS",
    "append_kv",
    "concat_and_cache_mla",
    "concat_and_cache_mla_seg",
    "copy_blocks",
    "cp_gather_indexer_k_quant_cache",
    "dequant",
    "dot_product_attention",
    "flash_attn_func",
    "flash_attn_varlen",
    "flatmm_fp8",
    "float8_dtype",
    "gather_kv_cache",
    "gemm",
    "gemm_fp4",
    "gemm_fp8",
    "gemm_fp8_mi350",
    "gemm_i8",
    "indexer_k_quant_and_cache",
    "kv_cache_update",
    "layer_norm",
    "layer_norm_quant",
    "layer_norm_with_add",
    "layer_norm_with_add_quant",
    "mx_dequant",
    "mx_quant",
    "pack_e2m1",
    "per_block_quant",
    "per_group_quant",
    "per_tensor_quant",
    "per_token_quant",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "reshape_and_cache_with_block_quant",
    "reshape_and_cache_with_block_quant_for_asm_pa",
    "reshape_and_cache_with_pertoken_quant",
    "rms_norm",
    "rms_norm_quant",
    "rms_norm_with_add",
    "rms_norm_with_add_quant",
    "shuffle_scale",
    "shuffle_weight",
    "smooth_quant",
    "swap_blocks",
    "unpack_e2m1",
    "unshuffle_scale",
    "unshuffle_weight",
    "write_kv_cache",
]
