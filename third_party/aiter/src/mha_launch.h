// SPDX-License-Identifier: Apache-2.0

// Launch of attention kernels: their grid and tensor maps.
#ifndef AITER_SRC_MHA_LAUNCH_H_
#define AITER_SRC_MHA_LAUNCH_H_

#include "aiter/kernel.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/mha_params.h"

namespace aiter {

// Launches `kernel` with `params` on `stream`. The grid follows from the row's
// axes: dense, one block a tile, head and batch; packed, a sequence i owns the
// slots from cu_seqlens[i] / tile + i on, so that rows / tile + batch slots do
// for any lengths, which the host does not know.
Status LaunchMha(const Driver& driver, const LoadedKernel& kernel,
                 const MhaParams& params, void* stream);

}  // namespace aiter

#endif  // AITER_SRC_MHA_LAUNCH_H_
