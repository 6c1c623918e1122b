// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/steps.h"

#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/select.h"

namespace aiter {

Steps::Steps(const std::string& arch) : device_(DeviceOfArch(arch)) {}

Status Steps::Add(const char* op, const ProblemKey& key, LoadedKernel* slot) {
  const KernelInfo* kernel;
  AITER_RETURN_IF_ERROR(SelectKernel(device_, op, key, &kernel));
  return Add(*kernel, slot);
}

Status Steps::Add(const KernelInfo& kernel, LoadedKernel* slot) {
  slot->info = &kernel;
  if (context_ != nullptr) return context_->Load(kernel, &slot->function);
  names_.push_back(kernel.symbol);
  return Status();
}

}  // namespace aiter
