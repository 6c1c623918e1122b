// SPDX-License-Identifier: Apache-2.0

// Exported calls that allocate and free memory, and that ask about pointers.

#include <algorithm>
#include <memory>
#include <utility>

#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/capture.h"
#include "tests/amdgpu_sim/hip/device.h"
#include "tests/amdgpu_sim/hip/stream.h"

namespace amdgpu_sim {
namespace {

constexpr int kInvalidDeviceId = -2;

// hipPointer_attribute
enum PointerAttribute : int {
  kContext = 1,
  kMemoryType = 2,
  kDeviceAddress = 3,
  kHostAddress = 4,
  kSyncMemops = 6,
  kBufferId = 7,
  kIsManaged = 8,
  kDeviceOrdinal = 9,
  kRangeStart = 11,
  kRangeSize = 12,
  kMapped = 13,
};

uint64_t Address(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

bool Find(const void* pointer, Allocation* allocation) {
  return Memory::Get().Find(Address(pointer), allocation);
}

Error Allocate(void** pointer, size_t size, MemoryKind kind, unsigned flags) {
  if (pointer == nullptr) return kInvalidValue;
  *pointer = nullptr;
  if (Error error = RefuseDuringCapture(kStreamCaptureUnsupported);
      error != kSuccess) {
    return error;
  }
  Device& device = Device::Current();
  if (device.error() != kSuccess) return device.error();
  if (size == 0) return kSuccess;
  const uint64_t memory = device.model().memory_bytes;
  if (kind == MemoryKind::kDevice &&
      (size > memory ||
       Memory::Get().BytesUsed(device.index()) > memory - size)) {
    return kOutOfMemory;
  }
  const uint64_t address =
      Memory::Get().Allocate(size, kind, device.index(), flags);
  if (address == 0) return kOutOfMemory;
  *pointer = reinterpret_cast<void*>(address);
  return kSuccess;
}

// Waits until nothing can use the memory any more, and frees it, on a failed
// device too. Returns errors of earlier work, as HIP documents.
Error Release(void* pointer) {
  if (pointer == nullptr) return kSuccess;
  if (Error error = RefuseDuringCapture(kStreamCaptureUnsupported);
      error != kSuccess) {
    return error;
  }
  Allocation allocation;
  if (!Find(pointer, &allocation) || allocation.base != Address(pointer) ||
      allocation.external || allocation.kind == MemoryKind::kCode) {
    return kInvalidValue;
  }
  Error error = kSuccess;
  // A stream's own thread, in a host function, must not wait for itself.
  if (ThisThreadsStream() == nullptr) {
    for (int i = 0; i < Device::Count(); ++i) {
      // All devices can use host memory.
      if (allocation.kind == MemoryKind::kDevice && i != allocation.device) {
        continue;
      }
      error = std::max(error, Device::At(i)->Synchronize());
    }
  }
  return Memory::Get().Free(allocation.base) ? error : kInvalidValue;
}

Error AllocateAsync(void** pointer, size_t size, Stream* handle) {
  std::shared_ptr<Stream> stream = Stream::Find(handle);
  if (stream == nullptr) return kInvalidHandle;
  // Nodes that allocate are not supported.
  if (Error error = RefuseCapture(*stream); error != kSuccess) return error;
  ScopedDevice scoped(stream->device().index());
  return Allocate(pointer, size, MemoryKind::kDevice, 0);
}

Error ReleaseAsync(void* pointer, Stream* handle) {
  std::shared_ptr<Stream> stream = Stream::Find(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (Error error = RefuseCapture(*stream); error != kSuccess) return error;
  if (pointer == nullptr) return kSuccess;
  Allocation allocation;
  if (!Find(pointer, &allocation) || allocation.base != Address(pointer) ||
      allocation.external) {
    return kInvalidValue;
  }
  auto work = std::make_shared<Work>();
  work->type = kMemFreeNode;
  work->always = true;
  work->label = "free";
  work->run = [base = allocation.base](Device&) { Memory::Get().Free(base); };
  Error error = stream->Submit(std::move(work));
  // A stream that takes no more work will not use the memory either.
  if (error != kSuccess) Memory::Get().Free(allocation.base);
  return error;
}

Error RegisterHost(void* pointer, size_t size, unsigned flags) {
  if (pointer == nullptr || size == 0) return kInvalidValue;
  Allocation allocation;
  if (Find(pointer, &allocation) ||
      Find(static_cast<char*>(pointer) + size - 1, &allocation)) {
    return kHostMemoryAlreadyRegistered;
  }
  Memory::Get().Register(Address(pointer), size, MemoryKind::kHost,
                         Device::Current().index(), flags);
  return kSuccess;
}

Error UnregisterHost(void* pointer) {
  Allocation allocation;
  if (!Find(pointer, &allocation) || !allocation.external ||
      allocation.kind != MemoryKind::kHost ||
      allocation.base != Address(pointer)) {
    return kHostMemoryNotRegistered;
  }
  for (int i = 0; i < Device::Count() && ThisThreadsStream() == nullptr; ++i) {
    Device::At(i)->Synchronize();
  }
  return Memory::Get().Free(allocation.base) ? kSuccess
                                             : kHostMemoryNotRegistered;
}

int TypeOf(const Allocation& allocation) {
  switch (allocation.kind) {
    case MemoryKind::kHost:
      return kHostPointer;
    case MemoryKind::kManaged:
      return kManagedPointer;
    default:
      return kDevicePointer;
  }
}

bool HostSees(const Allocation& allocation) {
  return TypeOf(allocation) != kDevicePointer;
}

template <typename T>
Error Put(void* out, T value) {
  *static_cast<T*>(out) = value;
  return kSuccess;
}

Error Attribute(void* out, int attribute, void* pointer) {
  if (out == nullptr) return kInvalidValue;
  Allocation allocation;
  if (!Find(pointer, &allocation)) return kInvalidValue;
  switch (attribute) {
    case kContext:
      return Put(out, reinterpret_cast<void*>(
                          static_cast<uintptr_t>(allocation.device) + 1));
    case kMemoryType:
      return Put(out, TypeOf(allocation));
    case kDeviceAddress:
      return Put(out, pointer);
    case kHostAddress:
      return HostSees(allocation) ? Put(out, pointer) : kInvalidValue;
    case kSyncMemops:
      return Put(out, 0);
    case kBufferId:
      return Put(out, allocation.id);
    case kIsManaged:
      return Put(out, int{allocation.kind == MemoryKind::kManaged});
    case kDeviceOrdinal:
      return Put(out, allocation.device);
    case kRangeStart:
      return Put(out, reinterpret_cast<void*>(allocation.base));
    case kRangeSize:
      return Put(out, allocation.size);
    case kMapped:
      return Put(out, 1);
  }
  return kInvalidValue;
}

Error Attributes(PointerAttributes* attributes, const void* pointer) {
  if (attributes == nullptr) return kInvalidValue;
  *attributes = PointerAttributes{};
  attributes->type = kUnregisteredPointer;
  attributes->device = kInvalidDeviceId;
  Allocation allocation;
  if (!Find(pointer, &allocation)) return kSuccess;
  attributes->type = TypeOf(allocation);
  attributes->device = allocation.device;
  attributes->device_pointer = const_cast<void*>(pointer);
  if (HostSees(allocation)) {
    attributes->host_pointer = const_cast<void*>(pointer);
  }
  attributes->is_managed = allocation.kind == MemoryKind::kManaged;
  attributes->allocation_flags = allocation.flags;
  return kSuccess;
}

}  // namespace

HIP_EXPORT Error hipMalloc(void** pointer, size_t size) {
  return Api(__func__,
             [&] { return Allocate(pointer, size, MemoryKind::kDevice, 0); });
}

HIP_EXPORT Error hipExtMallocWithFlags(void** pointer, size_t size,
                                       unsigned flags) {
  return Api(__func__, [&] {
    return Allocate(pointer, size, MemoryKind::kDevice, flags);
  });
}

HIP_EXPORT Error hipMallocManaged(void** pointer, size_t size, unsigned flags) {
  return Api(__func__, [&] {
    return Allocate(pointer, size, MemoryKind::kManaged, flags);
  });
}

HIP_EXPORT Error hipHostMalloc(void** pointer, size_t size, unsigned flags) {
  return Api(__func__,
             [&] { return Allocate(pointer, size, MemoryKind::kHost, flags); });
}

HIP_EXPORT Error hipHostAlloc(void** pointer, size_t size, unsigned flags) {
  return Api(__func__,
             [&] { return Allocate(pointer, size, MemoryKind::kHost, flags); });
}

HIP_EXPORT Error hipFree(void* pointer) {
  return Api(__func__, [&] { return Release(pointer); });
}

HIP_EXPORT Error hipHostFree(void* pointer) {
  return Api(__func__, [&] { return Release(pointer); });
}

HIP_EXPORT Error hipMallocAsync(void** pointer, size_t size, Stream* stream) {
  return Api(__func__, [&] { return AllocateAsync(pointer, size, stream); });
}

HIP_EXPORT Error hipFreeAsync(void* pointer, Stream* stream) {
  return Api(__func__, [&] { return ReleaseAsync(pointer, stream); });
}

HIP_EXPORT Error hipHostRegister(void* pointer, size_t size, unsigned flags) {
  return Api(__func__, [&] { return RegisterHost(pointer, size, flags); });
}

HIP_EXPORT Error hipHostUnregister(void* pointer) {
  return Api(__func__, [&] { return UnregisterHost(pointer); });
}

HIP_EXPORT Error hipHostGetDevicePointer(void** device, void* host, unsigned) {
  return Api(__func__, [&] {
    Allocation allocation;
    if (device == nullptr || !Find(host, &allocation)) return kInvalidValue;
    *device = host;
    return kSuccess;
  });
}

HIP_EXPORT Error hipHostGetFlags(unsigned* flags, void* host) {
  return Api(__func__, [&] {
    Allocation allocation;
    if (flags == nullptr || !Find(host, &allocation) ||
        allocation.kind != MemoryKind::kHost) {
      return kInvalidValue;
    }
    *flags = allocation.flags;
    return kSuccess;
  });
}

HIP_EXPORT Error hipMemGetInfo(size_t* free, size_t* total) {
  return Api(__func__, [&] {
    if (free == nullptr || total == nullptr) return kInvalidValue;
    Device& device = Device::Current();
    *total = device.model().memory_bytes;
    *free = *total -
            std::min<size_t>(*total, Memory::Get().BytesUsed(device.index()));
    return kSuccess;
  });
}

HIP_EXPORT Error hipMemGetAddressRange(void** base, size_t* size,
                                       void* pointer) {
  return Api(__func__, [&] {
    Allocation allocation;
    if (!Find(pointer, &allocation)) return kNotFound;
    if (base != nullptr) *base = reinterpret_cast<void*>(allocation.base);
    if (size != nullptr) *size = allocation.size;
    return kSuccess;
  });
}

HIP_EXPORT Error hipPointerGetAttribute(void* out, int attribute,
                                        void* pointer) {
  return Api(__func__, [&] { return Attribute(out, attribute, pointer); });
}

HIP_EXPORT Error hipDrvPointerGetAttributes(unsigned count, int* attributes,
                                            void** out, void* pointer) {
  return Api(__func__, [&] {
    if (attributes == nullptr || out == nullptr) return kInvalidValue;
    // What a pointer does not have is null and no error, which would stay in
    // hipGetLastError: rocPRIM's sort in XLA asks that one.
    for (unsigned i = 0; i < count; ++i) {
      if (out[i] == nullptr) return kInvalidValue;
      if (Attribute(out[i], attributes[i], pointer) == kSuccess) continue;
      switch (attributes[i]) {
        case kContext:
        case kDeviceAddress:
        case kHostAddress:
        case kBufferId:
        case kRangeStart:
        case kRangeSize:
          Put(out[i], uint64_t{0});
          break;
        default:
          Put(out[i], 0);
          break;
      }
    }
    return kSuccess;
  });
}

HIP_EXPORT Error hipPointerGetAttributes(PointerAttributes* attributes,
                                         const void* pointer) {
  return Api(__func__, [&] { return Attributes(attributes, pointer); });
}

// Hints, without effect where all memory is one.
HIP_EXPORT Error hipMemPrefetchAsync(const void*, size_t, int, Stream*) {
  return Api(__func__, [] { return kSuccess; });
}

HIP_EXPORT Error hipMemAdvise(const void*, size_t, int, int) {
  return Api(__func__, [] { return kSuccess; });
}

// For tests: allocations that are not freed, those of loaded modules too.
HIP_EXPORT uint64_t amdgpu_sim_live_allocations() {
  uint64_t count = 0;
  for (MemoryKind kind : {MemoryKind::kHost, MemoryKind::kDevice,
                          MemoryKind::kManaged, MemoryKind::kCode}) {
    count += Memory::Get().Count(kind);
  }
  return count;
}

}  // namespace amdgpu_sim
