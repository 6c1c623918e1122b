# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's import path; new code imports jax.experimental.aiter."""

from jax_aiter import activation as activation
from jax_aiter import flatmm_fp8 as flatmm_fp8
from jax_aiter import gemm as gemm
from jax_aiter import gemm_fp4 as gemm_fp4
from jax_aiter import gemm_fp8 as gemm_fp8
from jax_aiter import gemm_i8 as gemm_i8
from jax_aiter import layernorm as layernorm
from jax_aiter import mha as mha
from jax_aiter import ops as ops
from jax_aiter import rmsnorm as rmsnorm
from jax_aiter import rope as rope

__all__ = [
    "activation",
    "flatmm_fp8",
    "gemm",
    "gemm_fp4",
    "gemm_fp8",
    "gemm_i8",
    "layernorm",
    "mha",
    "ops",
    "rmsnorm",
    "rope",
]
