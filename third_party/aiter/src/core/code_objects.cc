// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/code_objects.h"

#include <lzma.h>

#include <new>
#include <string>

namespace aiter {
namespace {

// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kMaxDynamicSharedAttribute = 8;
// What a CUDA function may use without asking.
constexpr int kDefaultSharedBytes = 48 * 1024;

// Decompresses the kernel's group up to its code object's end.
Status Decompress(const KernelInfo& kernel, std::unique_ptr<uint8_t[]>* group) {
  const size_t bytes = kernel.object_offset + kernel.object_bytes;
  group->reset(new (std::nothrow) uint8_t[bytes]);
  lzma_stream stream = LZMA_STREAM_INIT;
  lzma_ret result = *group == nullptr
                        ? LZMA_MEM_ERROR
                        : lzma_stream_decoder(&stream, UINT64_MAX, /*flags=*/0);
  if (result == LZMA_OK) {
    stream.next_in = GetKernelTable().blob + kernel.offset;
    stream.avail_in = kernel.compressed_bytes;
    stream.next_out = group->get();
    stream.avail_out = bytes;
    result = lzma_code(&stream, LZMA_RUN);
    lzma_end(&stream);
  }
  if (result == LZMA_MEM_ERROR) {
    return Status(StatusCode::kResourceExhausted,
                  std::string("Out of host memory: decompressing kernel ") +
                      kernel.symbol + " takes " + std::to_string(bytes) +
                      " bytes");
  }
  if ((result != LZMA_OK && result != LZMA_STREAM_END) ||
      stream.avail_out != 0 ||
      lzma_crc32(group->get() + kernel.object_offset, kernel.object_bytes,
                 /*crc=*/0) != kernel.object_crc) {
    return Status(StatusCode::kInternal,
                  std::string("The embedded code object of kernel ") +
                      kernel.symbol + " is damaged (liblzma error " +
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
  std::unique_ptr<uint8_t[]> group;
  AITER_RETURN_IF_ERROR(Decompress(kernel, &group));
  const uint8_t* object = group.get() + kernel.object_offset;
  std::string name = std::string("kernel ") + kernel.symbol;
  void* module = nullptr;
  if (int error = driver.module_load(&module, object); error != 0) {
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
