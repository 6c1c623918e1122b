// SPDX-License-Identifier: Apache-2.0

// Choice of a GEMM's kernel, and of the number of parts that k is divided
// into. docs/retuning.md has the rule in words.
#ifndef AITER_SRC_GEMM_SELECT_H_
#define AITER_SRC_GEMM_SELECT_H_

#include <cstdint>
#include <vector>

#include "aiter/gemm.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/kernel_table.h"

namespace aiter {

// A kernel and what it is launched with.
struct GemmTiling {
  const KernelInfo* kernel = nullptr;
  int32_t splits = 1;       // Parts of k, none empty but of k = 0.
  int32_t k_per_split = 0;  // A multiple of the kernel's tile_k.
  // Of a kernel that walks: tiles that one block computes alone, and those
  // behind them, of which it computes a part.
  int64_t whole_tiles = 0;
  int64_t divided_tiles = 0;
  double seconds = 0;  // As estimated.
};

// Every kernel that serves a call, each with every number of parts worth
// trying; the best first. All sizes are positive but k, which may be 0. Fails
// if no kernel serves the call, or not the one that it asks for.
Status ListGemmTilings(const DeviceInfo& device, const GemmKey& key,
                       std::vector<GemmTiling>* tilings);

// Whether a kernel stays on its multiprocessor and walks over tiles.
inline bool Walks(const KernelInfo& kernel) {
  return kernel.num_tensor_maps > 0;
}

// Whether a kernel that walks computes tiles' transposes, so that warpgroups
// own rows of b: the others store by a map of the result.
bool ComputesTranspose(const KernelInfo& kernel);

// Blocks of `kernel` that a device runs at once, of which one that does not
// walk is as good as alone.
int GemmBlocksAtOnce(const DeviceInfo& device, const KernelInfo& kernel);

}  // namespace aiter

#endif  // AITER_SRC_GEMM_SELECT_H_
