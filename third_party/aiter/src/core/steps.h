// SPDX-License-Identifier: Apache-2.0

// The kernels of a call, one after another: loaded, or only named.
#ifndef AITER_SRC_CORE_STEPS_H_
#define AITER_SRC_CORE_STEPS_H_

#include <initializer_list>
#include <string>
#include <vector>

#include "aiter/kernel.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/code_objects.h"
#include "third_party/aiter/src/core/driver.h"

namespace aiter {

class Steps {
 public:
  // Kernels are loaded in `context`, the current one.
  explicit Steps(Context* context)
      : context_(context), device_(context->device()) {}

  // Kernels for architecture `arch` are named, without a device.
  explicit Steps(const std::string& arch);

  const DeviceInfo& device() const { return device_; }

  // Picks the kernel of `op` for a problem, and adds it.
  Status Add(const char* op, const ProblemKey& key, LoadedKernel* slot);

  // Adds a kernel that was picked otherwise.
  Status Add(const KernelInfo& kernel, LoadedKernel* slot);

  // Symbols of the kernels, if they are only named.
  const std::vector<std::string>& names() const { return names_; }

 private:
  Context* context_ = nullptr;
  DeviceInfo device_;
  std::vector<std::string> names_;
};

// An operation of a call and where its kernel goes.
struct Step {
  const char* op;
  bool wanted;  // If not, the slot is emptied.
  LoadedKernel* slot;
};

// Picks the kernels for the current device and loads them into its context.
Status LoadSteps(const ProblemKey& key, std::initializer_list<Step> steps);

// Symbols of the operations' kernels on a device of architecture `arch`.
Status NameSteps(const ProblemKey& key, const std::string& arch,
                 const std::vector<const char*>& ops,
                 std::vector<std::string>* names);

}  // namespace aiter

#endif  // AITER_SRC_CORE_STEPS_H_
