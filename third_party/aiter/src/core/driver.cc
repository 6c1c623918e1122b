// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string>

#include "third_party/aiter/src/core/kernel_table.h"

namespace aiter {
namespace {

std::atomic<const Driver*> g_driver{nullptr};
std::mutex g_load_mutex;

constexpr int kErrorOutOfMemory = 2;  // hipErrorOutOfMemory, CUDA's too.

}  // namespace

Status GetDriver(const Driver** driver) {
  *driver = g_driver.load(std::memory_order_acquire);
  if (*driver != nullptr) return Status();
  std::lock_guard<std::mutex> lock(g_load_mutex);
  *driver = g_driver.load(std::memory_order_relaxed);
  if (*driver != nullptr) return Status();
  static Driver loaded;
  loaded = Driver();
  AITER_RETURN_IF_ERROR(GetKernelTable().platform == Platform::kHip
                            ? LoadHipDriver(&loaded)
                            : LoadCudaDriver(&loaded));
  *driver = &loaded;
  g_driver.store(&loaded, std::memory_order_release);
  return Status();
}

void SetDriverForTesting(const Driver* driver) {
  g_driver.store(driver, std::memory_order_release);
}

Status DriverError(const Driver& driver, int error, const std::string& what) {
  const char* name = driver.platform == Platform::kHip ? "HIP" : "CUDA";
  return Status(error == kErrorOutOfMemory ? StatusCode::kResourceExhausted
                                           : StatusCode::kInternal,
                what + " failed: " + name + " error " + std::to_string(error) +
                    " (" + driver.error_string(error) + ")");
}

Status DriverLibrary::Open(const char* probe, const char* const* names,
                           int count) {
  if (dlsym(RTLD_DEFAULT, probe) != nullptr) {
    handle_ = RTLD_DEFAULT;
    return Status();
  }
  // A copy that something else has loaded comes before any other: two runtimes
  // in one process would not share streams and contexts.
  for (int mode :
       {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    for (int i = 0; i < count; ++i) {
      handle_ = dlopen(names[i], mode);
      name_ = names[i];
      if (handle_ != nullptr) return Status();
    }
  }
  std::string tried;
  for (int i = 0; i < count; ++i) {
    tried += std::string(i > 0 ? ", " : "") + names[i];
  }
  return Status(StatusCode::kFailedPrecondition,
                "No GPU driver: none of " + tried + " could be loaded");
}

Status DriverLibrary::FindSymbol(const char* name, void** symbol) const {
  *symbol = dlsym(handle_, name);
  if (*symbol != nullptr) return Status();
  return Status(StatusCode::kFailedPrecondition,
                std::string("The GPU driver is too old: ") + name_ +
                    " has no function " + name);
}

}  // namespace aiter
