// SPDX-License-Identifier: Apache-2.0

// Attributes that say where numbers and scales lie in a cache.
#ifndef JAXLIB_GPU_CACHE_SIDE_H_
#define JAXLIB_GPU_CACHE_SIDE_H_

#include <cstdint>
#include <string>

#include "aiter/cache.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

inline ffi::Error SetSide(const char* name, ffi::Span<const int64_t> values,
                          aiter::cache_side* side) {
  if (values.size() != 8) {
    return Invalid(name, "has " + std::to_string(values.size()) + " numbers",
                   "have 8");
  }
  *side = {values[0], values[1], values[2], values[3],
           values[4], values[5], values[6], values[7]};
  return ffi::Error::Success();
}

inline ffi::Error SetScales(const char* name, ffi::Span<const int64_t> values,
                            aiter::cache_scales* scales) {
  if (values.size() != 4) {
    return Invalid(name, "has " + std::to_string(values.size()) + " numbers",
                   "have 4");
  }
  *scales = {values[0], values[1], values[2], values[3]};
  return ffi::Error::Success();
}

}  // namespace jax::JAX_GPU_NAMESPACE

#endif  // JAXLIB_GPU_CACHE_SIDE_H_
