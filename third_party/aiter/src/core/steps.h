// SPDX-License-Identifier: Apache-2.0

// The kernels of a call, one after another: loaded, or only named.
#ifndef AITER_SRC_CORE_STEPS_H_
#define AITER_SRC_CORE_STEPS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "aiter/kernel.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/code_objects.h"
#include "third_party/aiter/src/core/driver.h"

namespace aiter {

// Blocks of `kernel` that run side by side on a multiprocessor (compute unit).
int32_t BlocksOnOne(const DeviceInfo& device, const KernelInfo& kernel);

// How many blocks divide the tiles over which a kernel walks: as many as run
// side by side.
int32_t BlocksSideBySide(const DeviceInfo& device, const KernelInfo& kernel);

// Takes the kernels of a plan in the order of their launch.
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

}  // namespace aiter

#endif  // AITER_SRC_CORE_STEPS_H_
