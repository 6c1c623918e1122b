// SPDX-License-Identifier: Apache-2.0

// XLA FFI handlers of matrix products.
#ifndef JAXLIB_GPU_AITER_GEMM_H_
#define JAXLIB_GPU_AITER_GEMM_H_

#include <cstdint>

#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// Operands, results and attributes: jax/_src/aiter/gemm/op.py, which calls
// them. Stages are as in aiter_mha.h.
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterGemmInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterGemm);

// The attribute `scaling` counts as aiter::GemmScaling does, and has one more:
// by blocks whose scales lie transposed, [k's blocks, rows].
inline constexpr int32_t kTransposedBlocks = 4;

}  // namespace jax::JAX_GPU_NAMESPACE

#endif  // JAXLIB_GPU_AITER_GEMM_H_
