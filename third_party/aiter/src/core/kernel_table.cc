// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/kernel_table.h"

#include "aiter/kernels.h"

namespace aiter {
namespace {

#include "aiter/kernels.inc"

}  // namespace

const KernelTable& GetKernelTable() {
  static constexpr KernelTable kTable = {
      kEmbeddedPlatform,
      kEmbeddedKernels,
      sizeof(kEmbeddedKernels) / sizeof(kEmbeddedKernels[0]),
      aiter_kernels_blob,
      kTunedChoices,
      kNumTunedChoices};
  return kTable;
}

}  // namespace aiter
