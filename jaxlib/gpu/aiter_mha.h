// SPDX-License-Identifier: Apache-2.0

// XLA FFI handlers of multi-head attention.
#ifndef JAXLIB_GPU_AITER_MHA_H_
#define JAXLIB_GPU_AITER_MHA_H_

#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// Operands, results and attributes: jax/_src/aiter/attention/op.py.
// The initialize stage picks the kernels and loads them on the device; execute
// packs the arguments and launches. Neither keeps state in the executable.
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterMhaFwdInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterMhaFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterMhaBwdInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AiterMhaBwd);

}  // namespace jax::JAX_GPU_NAMESPACE

#endif  // JAXLIB_GPU_AITER_MHA_H_
