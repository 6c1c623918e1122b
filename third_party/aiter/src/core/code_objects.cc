// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/code_objects.h"

#include <zlib.h>

#include <new>
#include <string>

namespace aiter {
namespace {

// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kMaxDynamicSharedAttribute = 8;
// What a CUDA function may use without asking.
constexpr int kDefaultSharedBytes = 48 * 1024;

Status Inflate(const KernelInfo& kernel, std::unique_ptr<uint8_t[]>* object) {
  object->reset(new (std::nothrow) uint8_t[kernel.object_bytes]);
  uLongf bytes = kernel.object_bytes;
  int result = *object == nullptr
                   ? Z_MEM_ERROR
                   : uncompress(object->get(), &bytes,
                                GetKernelTable().blob + kernel.offset,
                                kernel.compressed_bytes);
  if (result == Z_MEM_ERROR) {
    return Status(StatusCode::kResourceExhausted,
                  std::string("Out of host memory: decompressing kernel ") +
                      kernel.symbol + " takes " +
                      std::to_string(kernel.object_bytes) + " bytes");
  }
  if (result != Z_OK || bytes != kernel.object_bytes) {
    return Status(StatusCode::kInternal,
                  std::string("The embedded code object of kernel ") +
                      kernel.symbol + " is damaged (zlib error " +
                      std::to_string(result) + ")");
  }
  return Status();
}

// Finds the kernel in its loaded module and gets it ready to launch.
Status FindFunction(const Driver& driver, const KernelInfo& kernel,
                    void* module, const std::string& name, void** function) {
  void* found = nullptr;
  if (int error = driver.module_get_function(&found, module, kernel.symbol);
      error != 0) {
    return DriverError(driver, error, "Looking up " + name);
  }
  if (driver.allow_shared != nullptr &&
      kernel.shared_bytes > kDefaultSharedBytes) {
    if (int error = driver.allow_shared(found, kMaxDynamicSharedAttribute,
                                        kernel.shared_bytes);
        error != 0) {
      return DriverError(driver, error,
                         "Reserving " + std::to_string(kernel.shared_bytes) +
                             " bytes of shared memory for " + name);
    }
  }
  *function = found;
  return Status();
}

Status LoadKernel(const Driver& driver, const KernelInfo& kernel,
                  void** function) {
  std::unique_ptr<uint8_t[]> object;
  AITER_RETURN_IF_ERROR(Inflate(kernel, &object));
  std::string name = std::string("kernel ") + kernel.symbol;
  void* module = nullptr;
  if (int error = driver.module_load(&module, object.get()); error != 0) {
    return DriverError(driver, error, "Loading " + name);
  }
  Status status = FindFunction(driver, kernel, module, name, function);
  // The next call loads it again.
  if (!status.ok()) driver.module_unload(module);
  return status;
}

}  // namespace

std::atomic<Context*> Context::list_{nullptr};
std::mutex Context::list_mutex_;

Status Context::Current(Context** context) {
  const Driver* driver;
  AITER_RETURN_IF_ERROR(GetDriver(&driver));
  uint64_t id = 0;
  if (int error = driver->current_context(&id); error != 0) {
    return DriverError(*driver, error, "Asking for the current context");
  }
  auto find = [id]() {
    Context* c = list_.load(std::memory_order_acquire);
    while (c != nullptr && c->id_ != id) c = c->next_;
    return c;
  };
  if ((*context = find()) != nullptr) return Status();

  std::lock_guard<std::mutex> lock(list_mutex_);
  if ((*context = find()) != nullptr) return Status();
  std::unique_ptr<Context> created(new (std::nothrow) Context);
  int count = GetKernelTable().num_kernels;
  if (created != nullptr) {
    created->functions_.reset(new (std::nothrow) std::atomic<void*>[count]);
  }
  if (created == nullptr || created->functions_ == nullptr) {
    return Status(StatusCode::kResourceExhausted, "Out of host memory");
  }
  for (int i = 0; i < count; ++i) created->functions_[i] = nullptr;
  int ordinal = 0;
  if (int error = driver->current_device(&ordinal); error != 0) {
    return DriverError(*driver, error, "Asking for the current device");
  }
  AITER_RETURN_IF_ERROR(driver->describe_device(ordinal, &created->device_));
  created->id_ = id;
  created->next_ = list_.load(std::memory_order_relaxed);
  *context = created.release();
  list_.store(*context, std::memory_order_release);
  return Status();
}

Status Context::Load(const KernelInfo& kernel, void** function) {
  std::atomic<void*>& slot = functions_[&kernel - GetKernelTable().begin()];
  *function = slot.load(std::memory_order_acquire);
  if (*function != nullptr) return Status();
  std::lock_guard<std::mutex> lock(load_mutex_);
  *function = slot.load(std::memory_order_relaxed);
  if (*function != nullptr) return Status();
  const Driver* driver;
  AITER_RETURN_IF_ERROR(GetDriver(&driver));
  AITER_RETURN_IF_ERROR(LoadKernel(*driver, kernel, function));
  slot.store(*function, std::memory_order_release);
  return Status();
}

}  // namespace aiter
