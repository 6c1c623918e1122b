// SPDX-License-Identifier: Apache-2.0

// Copies and fills as operations of streams and graphs.
#ifndef AMDGPU_SIM_HIP_COPY_H_
#define AMDGPU_SIM_HIP_COPY_H_

#include <cstddef>
#include <memory>

#include "tests/amdgpu_sim/hip/stream.h"
#include "tests/amdgpu_sim/hip/types.h"

namespace amdgpu_sim {

// Rows of `width` bytes, `to_pitch` and `from_pitch` apart.
struct CopyShape {
  size_t width = 0, height = 1;
  size_t to_pitch = 0, from_pitch = 0;
};

// Makes the work of a copy. Errors of ranges and of the direction.
Error MakeCopy(void* to, const void* from, const CopyShape& shape, int kind,
               std::shared_ptr<const Work>* work);

// Makes the work that fills rows of `width` elements of 1, 2 or 4 bytes.
Error MakeFill(const MemsetParams& params, std::shared_ptr<const Work>* work);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_COPY_H_
