// SPDX-License-Identifier: Apache-2.0

// Launch of any kernel: limits of the grid, argument buffer; fills.
#ifndef AITER_SRC_LAUNCH_H_
#define AITER_SRC_LAUNCH_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/status.h"
#include "third_party/aiter/src/driver.h"

namespace aiter {

// Launches a kernel on a grid of so many blocks, all at least 1, along its
// axes. `params` is what its packing function takes.
Status Launch(const Driver& driver, const LoadedKernel& kernel,
              const int64_t (&grid)[3], const void* params,
              const TensorMap* maps, void* stream);

// Sets `bytes` bytes of device memory to 0; nothing if there are none.
Status FillZero(const Driver& driver, const void* address, int64_t bytes,
                void* stream);

// Sets `count` float32 numbers of device memory to -inf.
Status FillMinusInfinity(const Driver& driver, const void* address,
                         int64_t count, void* stream);

}  // namespace aiter

#endif  // AITER_SRC_LAUNCH_H_
