// SPDX-License-Identifier: Apache-2.0

// XLA FFI handlers of the quantisers.
#ifndef JAXLIB_GPU_AITER_QUANT_H_
#define JAXLIB_GPU_AITER_QUANT_H_

#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// Operands, results and attributes: jax/_src/aiter/quant/op.py, which calls
// them. Stages are as in aiter_mha.h.
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterQuantInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterQuant);

}  // namespace jax::JAX_GPU_NAMESPACE

#endif  // JAXLIB_GPU_AITER_QUANT_H_
