// SPDX-License-Identifier: Apache-2.0

// Launch of attention kernels: grid, argument buffer, fills.
#ifndef AITER_SRC_LAUNCH_H_
#define AITER_SRC_LAUNCH_H_

#include <cstdint>

#include "aiter/mha.h"
#include "aiter/status.h"
#include "third_party/aiter/src/driver.h"
#include "third_party/aiter/src/mha_params.h"

namespace aiter {

// Launches `kernel` with `params` on `stream`. The grid follows from the row's
// axes: dense, one block a tile, head and batch; packed, a sequence i owns the
// slots from cu_seqlens[i] / tile + i on, so that rows / tile + batch slots do
// for any lengths, which the host does not know.
Status LaunchMha(const Driver& driver, const LoadedKernel& kernel,
                 const MhaParams& params, void* stream);

// Sets `bytes` bytes of device memory to 0; nothing if there are none.
Status FillZero(const Driver& driver, const void* address, int64_t bytes,
                void* stream);

// Sets `count` float32 numbers of device memory to -inf.
Status FillMinusInfinity(const Driver& driver, const void* address,
                         int64_t count, void* stream);

}  // namespace aiter

#endif  // AITER_SRC_LAUNCH_H_
