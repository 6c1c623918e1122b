// SPDX-License-Identifier: Apache-2.0

// Loading of embedded code objects: once per kernel and context.
#ifndef AITER_SRC_CORE_CODE_OBJECTS_H_
#define AITER_SRC_CORE_CODE_OBJECTS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "aiter/status.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/kernel_table.h"

namespace aiter {

// The kernels loaded in one context, and the device it belongs to. One exists
// per context and lives as long as the process: modules outlive every
// executable, and the driver frees them with the context. Thread-safe.
class Context {
 public:
  // The calling thread's current context.
  static Status Current(Context** context);

  uint64_t id() const { return id_; }
  const DeviceInfo& device() const { return device_; }

  // Loads `kernel`, a row of GetKernelTable(), if it is not yet loaded. This
  // context must be the current one. A failure is not remembered.
  Status Load(const KernelInfo& kernel, void** function);

 private:
  Context() = default;

  uint64_t id_ = 0;
  DeviceInfo device_;
  std::mutex load_mutex_;
  // One slot a row of the table; null until loaded.
  std::unique_ptr<std::atomic<void*>[]> functions_;
  Context* next_ = nullptr;

  static std::atomic<Context*> list_;
  static std::mutex list_mutex_;
};

}  // namespace aiter

#endif  // AITER_SRC_CORE_CODE_OBJECTS_H_
