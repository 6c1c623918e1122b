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

Status LoadSteps(const ProblemKey& key, std::initializer_list<Step> steps) {
  Context* context;
  AITER_RETURN_IF_ERROR(Context::Current(&context));
  for (const Step& step : steps) {
    *step.slot = LoadedKernel();
    if (!step.wanted) continue;
    AITER_RETURN_IF_ERROR(
        SelectKernel(context->device(), step.op, key, &step.slot->info));
    AITER_RETURN_IF_ERROR(
        context->Load(*step.slot->info, &step.slot->function));
  }
  return Status();
}

Status NameSteps(const ProblemKey& key, const std::string& arch,
                 const std::vector<const char*>& ops,
                 std::vector<std::string>* names) {
  const DeviceInfo device = DeviceOfArch(arch);
  names->clear();
  for (const char* op : ops) {
    const KernelInfo* kernel;
    AITER_RETURN_IF_ERROR(SelectKernel(device, op, key, &kernel));
    names->push_back(kernel->symbol);
  }
  return Status();
}

}  // namespace aiter
