// SPDX-License-Identifier: Apache-2.0

// Exported calls that manage virtual memory: reserved addresses, physical
// memory (a file in memory) and mappings of one to the other.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/device.h"
#include "tests/amdgpu_sim/hip/handles.h"

namespace amdgpu_sim {
namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr int kFileDescriptorHandle = 1;  // hipMemHandleTypePosixFileDescriptor
constexpr int kPinnedMemory = 1;          // hipMemAllocationTypePinned
constexpr int kDeviceLocation = 1;        // hipMemLocationTypeDevice

struct AllocationProperties {
  int type;
  int handle_types;
  int location_type;
  int location_id;
  void* win32_metadata;
  unsigned char flags[4];
};
static_assert(sizeof(AllocationProperties) == 32, "HIP's layout");

struct PhysicalMemory {
  PhysicalMemory(int file, size_t size, int device)
      : file(file), size(size), device(device) {}
  ~PhysicalMemory() { close(file); }
  const int file;
  const size_t size;
  const int device;
};

struct Mapping {
  size_t size;
  std::shared_ptr<PhysicalMemory> memory;
};

// What is reserved and what is mapped there, by address.
class AddressSpace {
 public:
  static AddressSpace& Get() {
    static AddressSpace* const space = new AddressSpace;
    return *space;
  }

  Error Reserve(void** pointer, size_t size, size_t alignment) {
    if (pointer == nullptr || size == 0 || size % kGranularity != 0) {
      return kInvalidValue;
    }
    alignment = std::max(alignment, kGranularity);
    if ((alignment & (alignment - 1)) != 0) return kInvalidValue;
    void* raw = mmap(nullptr, size + alignment, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return kOutOfMemory;
    const uint64_t begin = reinterpret_cast<uint64_t>(raw);
    const uint64_t end = begin + size + alignment;
    const uint64_t base = (begin + alignment - 1) & ~(alignment - 1);
    Unmap(begin, base - begin);
    Unmap(base + size, end - base - size);
    std::lock_guard<std::mutex> lock(mutex_);
    reserved_[base] = size;
    *pointer = reinterpret_cast<void*>(base);
    return kSuccess;
  }

  Error Free(uint64_t base, size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = reserved_.find(base);
    if (found == reserved_.end() || found->second != size) {
      return kInvalidValue;
    }
    auto mapping = mappings_.lower_bound(base);
    if (mapping != mappings_.end() && mapping->first < base + size) {
      return kInvalidValue;
    }
    reserved_.erase(found);
    Unmap(base, size);
    return kSuccess;
  }

  Error Map(uint64_t base, size_t size, size_t offset,
            std::shared_ptr<PhysicalMemory> memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (memory == nullptr || size == 0 || size % kGranularity != 0 ||
        offset > memory->size || size > memory->size - offset ||
        !Reserved(base, size) || Overlaps(base, size)) {
      return kInvalidValue;
    }
    if (mmap(reinterpret_cast<void*>(base), size, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED, memory->file,
             static_cast<off_t>(offset)) == MAP_FAILED) {
      return kOutOfMemory;
    }
    Memory::Get().Register(base, size, MemoryKind::kDevice, memory->device, 0);
    // What an earlier mapping of the same memory wrote is there.
    Memory::Get().Touch(base, size, true);
    mappings_[base] = {size, std::move(memory)};
    return kSuccess;
  }

  Error Unmap(void* pointer, size_t size) {
    const uint64_t base = reinterpret_cast<uint64_t>(pointer);
    for (int i = 0; i < Device::Count(); ++i) Device::At(i)->Synchronize();
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = mappings_.find(base);
    if (found == mappings_.end() || found->second.size != size) {
      return kInvalidValue;
    }
    Memory::Get().Free(base);
    // The addresses stay reserved.
    mmap(pointer, size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    mappings_.erase(found);
    return kSuccess;
  }

  bool Mapped(uint64_t base, size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (size > 0) {
      auto found = mappings_.find(base);
      if (found == mappings_.end() || found->second.size > size) return false;
      base += found->second.size;
      size -= found->second.size;
    }
    return true;
  }

 private:
  static void Unmap(uint64_t base, size_t size) {
    if (size != 0) munmap(reinterpret_cast<void*>(base), size);
  }

  bool Reserved(uint64_t base, size_t size) const {
    auto next = reserved_.upper_bound(base);
    if (next == reserved_.begin()) return false;
    --next;
    return base + size <= next->first + next->second;
  }

  bool Overlaps(uint64_t base, size_t size) const {
    auto next = mappings_.lower_bound(base);
    if (next != mappings_.end() && next->first < base + size) return true;
    if (next == mappings_.begin()) return false;
    --next;
    return next->first + next->second.size > base;
  }

  std::mutex mutex_;
  std::map<uint64_t, size_t> reserved_;
  std::map<uint64_t, Mapping> mappings_;
};

Error CheckProperties(const AllocationProperties* properties) {
  return properties == nullptr || properties->type != kPinnedMemory ||
                 properties->location_type != kDeviceLocation ||
                 Device::At(properties->location_id) == nullptr
             ? kInvalidValue
             : kSuccess;
}

Error Create(PhysicalMemory** handle, size_t size,
             const AllocationProperties* properties) {
  if (handle == nullptr || size == 0 || size % kGranularity != 0) {
    return kInvalidValue;
  }
  if (Error error = CheckProperties(properties); error != kSuccess) {
    return error;
  }
  const Device& device = *Device::At(properties->location_id);
  if (size > device.model().memory_bytes) return kOutOfMemory;
  const int file = memfd_create("amdgpu_sim", MFD_CLOEXEC);
  if (file < 0) return kOutOfMemory;
  auto memory =
      std::make_shared<PhysicalMemory>(file, size, properties->location_id);
  if (ftruncate(file, static_cast<off_t>(size)) != 0) return kOutOfMemory;
  *handle = Handles<PhysicalMemory>::Get().Add(std::move(memory));
  return kSuccess;
}

}  // namespace

HIP_EXPORT Error hipMemAddressReserve(void** pointer, size_t size,
                                      size_t alignment, void* /*wanted*/,
                                      unsigned long long) {
  return Api(__func__, [&] {
    return AddressSpace::Get().Reserve(pointer, size, alignment);
  });
}

HIP_EXPORT Error hipMemAddressFree(void* pointer, size_t size) {
  return Api(__func__, [&] {
    return AddressSpace::Get().Free(reinterpret_cast<uint64_t>(pointer), size);
  });
}

HIP_EXPORT Error hipMemGetAllocationGranularity(
    size_t* granularity, const AllocationProperties* properties, int) {
  return Api(__func__, [&] {
    if (granularity == nullptr) return kInvalidValue;
    *granularity = kGranularity;
    return CheckProperties(properties);
  });
}

HIP_EXPORT Error hipMemCreate(PhysicalMemory** handle, size_t size,
                              const AllocationProperties* properties,
                              unsigned long long) {
  return Api(__func__, [&] { return Create(handle, size, properties); });
}

HIP_EXPORT Error hipMemRelease(PhysicalMemory* handle) {
  return Api(__func__, [&] {
    return Handles<PhysicalMemory>::Get().Remove(handle) == nullptr
               ? kInvalidValue
               : kSuccess;
  });
}

HIP_EXPORT Error hipMemMap(void* pointer, size_t size, size_t offset,
                           PhysicalMemory* handle, unsigned long long) {
  return Api(__func__, [&] {
    return AddressSpace::Get().Map(reinterpret_cast<uint64_t>(pointer), size,
                                   offset,
                                   Handles<PhysicalMemory>::Get().Find(handle));
  });
}

HIP_EXPORT Error hipMemUnmap(void* pointer, size_t size) {
  return Api(__func__,
             [&] { return AddressSpace::Get().Unmap(pointer, size); });
}

// Every device may access what is mapped.
HIP_EXPORT Error hipMemSetAccess(void* pointer, size_t size, const void*,
                                 size_t) {
  return Api(__func__, [&] {
    return AddressSpace::Get().Mapped(reinterpret_cast<uint64_t>(pointer), size)
               ? kSuccess
               : kInvalidValue;
  });
}

HIP_EXPORT Error hipMemExportToShareableHandle(void* shareable,
                                               PhysicalMemory* handle, int type,
                                               unsigned long long) {
  return Api(__func__, [&] {
    std::shared_ptr<PhysicalMemory> memory =
        Handles<PhysicalMemory>::Get().Find(handle);
    if (shareable == nullptr || memory == nullptr ||
        type != kFileDescriptorHandle) {
      return kInvalidValue;
    }
    const int file = dup(memory->file);
    if (file < 0) return kOutOfMemory;
    *static_cast<int*>(shareable) = file;
    return kSuccess;
  });
}

HIP_EXPORT Error hipMemImportFromShareableHandle(PhysicalMemory** handle,
                                                 void* shareable, int type) {
  return Api(__func__, [&] {
    if (handle == nullptr || type != kFileDescriptorHandle) {
      return kInvalidValue;
    }
    // The descriptor itself is passed in the pointer.
    const int file =
        dup(static_cast<int>(reinterpret_cast<intptr_t>(shareable)));
    const off_t size = file < 0 ? -1 : lseek(file, 0, SEEK_END);
    if (size <= 0) {
      if (file >= 0) close(file);
      return kInvalidValue;
    }
    *handle =
        Handles<PhysicalMemory>::Get().Add(std::make_shared<PhysicalMemory>(
            file, static_cast<size_t>(size), Device::Current().index()));
    return kSuccess;
  });
}

}  // namespace amdgpu_sim
