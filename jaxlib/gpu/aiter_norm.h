// SPDX-License-Identifier: Apache-2.0

// XLA FFI handlers of RMSNorm and LayerNorm.
#ifndef JAXLIB_GPU_AITER_NORM_H_
#define JAXLIB_GPU_AITER_NORM_H_

#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// Operands, results and attributes: jax/_src/aiter/norm/op.py.
// Stages are as in aiter_mha.h.
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterNormFwdInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterNormFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterNormQuantInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterNormQuant);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterNormBwdInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterNormBwd);

}  // namespace jax::JAX_GPU_NAMESPACE

#endif  // JAXLIB_GPU_AITER_NORM_H_
