// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/steps.h"

#include <algorithm>
#include <cstdint>

#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/select.h"

namespace aiter {
namespace {

constexpr int kSimds = 4;  // Of a compute unit or multiprocessor.
constexpr int kWaves = 4;  // A SIMD's; more would wait for memory as well.

}  // namespace

int32_t BlocksOnOne(const DeviceInfo& device, const KernelInfo& kernel) {
  const int waves = kSimds * std::min(kWaves, kernel.occupancy);
  const int lanes = device.platform == Platform::kHip ? 64 : 32;
  return std::max(waves * lanes / kernel.threads, 1);
}

int32_t BlocksSideBySide(const DeviceInfo& device, const KernelInfo& kernel) {
  return std::max(device.multiprocessors, 1) * BlocksOnOne(device, kernel);
}

Steps::Steps(const std::string& arch) : device_(DeviceOfArch(arch)) {}

Status Steps::Add(const char* op, const ProblemKey& key, LoadedKernel* slot) {
  const KernelInfo* kernel;
  AITER_RETURN_IF_ERROR(SelectKernel(device_, op, key, &kernel));
  return Add(*kernel, slot);
}

Status Steps::Add(const KernelInfo& kernel, LoadedKernel* slot) {
  slot->info = &kernel;
  slot->at_once = BlocksSideBySide(device_, kernel);
  if (context_ != nullptr) return context_->Load(kernel, &slot->function);
  names_.push_back(kernel.symbol);
  return Status();
}

}  // namespace aiter
