// SPDX-License-Identifier: Apache-2.0

// Exported calls on devices: what they are, which is current, peers, contexts.

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/capture.h"
#include "tests/amdgpu_sim/hip/device.h"

namespace amdgpu_sim {
namespace {

// 7.14, as hipDriverGetVersion encodes it: what the plugin was built with.
constexpr int kVersion = 71426000;

constexpr int kWaveSize = 64;
constexpr int kMaxWorkgroup = 1024;
constexpr int kMaxThreads = 2048;   // 8 waves on each of 4 SIMDs
constexpr int kRegisters = 65536;   // As HIP says for CDNA.
constexpr int kWallClock = 100000;  // kHz
constexpr int kMaxGridX = INT_MAX, kMaxGridYZ = 65536;
constexpr int kVgprs = 512;

int PciBus(int device) { return 5 + 16 * device; }

// "gfx942:sramecc+:xnack-"
std::string TargetId(const Model& model) {
  return std::string(model.arch) + ":sramecc+:xnack-";
}

void FillProperties(const Device& device, DeviceProperties* properties) {
  const Model& model = device.model();
  DeviceProperties& p = *properties;
  std::memset(&p, 0, sizeof(p));
  const size_t lds = size_t{1024} * model.lds_kib;
  std::snprintf(p.name, sizeof(p.name), "%s", model.name);
  char uuid[sizeof(p.uuid) + 1];
  std::snprintf(uuid, sizeof(uuid), "simulated-gpu-%02d", device.index());
  std::memcpy(p.uuid, uuid, sizeof(p.uuid));
  p.total_global_mem = model.memory_bytes;
  p.shared_mem_per_block = lds;
  p.regs_per_block = kRegisters;
  p.warp_size = kWaveSize;
  p.mem_pitch = INT_MAX;
  p.max_threads_per_block = kMaxWorkgroup;
  for (int& size : p.max_threads_dim) size = kMaxWorkgroup;
  p.max_grid_size[0] = kMaxGridX;
  p.max_grid_size[1] = p.max_grid_size[2] = kMaxGridYZ;
  p.clock_rate = model.clock_khz;
  p.total_const_mem = INT_MAX;
  p.major = model.major;
  p.minor = model.minor;
  p.texture_alignment = 256;
  p.texture_pitch_alignment = 256;
  p.multi_processor_count = model.compute_units;
  p.can_map_host_memory = 1;
  p.concurrent_kernels = 1;
  p.ecc_enabled = 1;
  p.pci_bus_id = PciBus(device.index());
  p.async_engine_count = 8;
  p.unified_addressing = 1;
  p.memory_clock_rate = model.memory_clock_khz;
  p.memory_bus_width = model.memory_bus_bits;
  p.l2_cache_size = model.l2_mib << 20;
  p.max_threads_per_multi_processor = kMaxThreads;
  p.stream_priorities_supported = 1;
  p.shared_mem_per_multiprocessor = lds;
  p.regs_per_multiprocessor = kRegisters;
  p.managed_memory = 1;
  p.concurrent_managed_access = 1;
  p.cooperative_launch = 1;
  p.shared_mem_per_block_optin = lds;
  p.max_blocks_per_multi_processor = 32;
  p.host_register_supported = 1;
  std::snprintf(p.gcn_arch_name, sizeof(p.gcn_arch_name), "%s",
                TargetId(model).c_str());
  p.max_shared_memory_per_multi_processor = lds;
  p.clock_instruction_rate = kWallClock;
  p.arch_features = ~0u;
  p.is_large_bar = 1;
}

// hipDeviceAttribute_t: HIP's numbers, those that CUDA has too and AMD's own.
Error Attribute(const Device& device, int attribute, int* value) {
  const Model& model = device.model();
  switch (attribute) {
    case 0:      // EccEnabled
    case 3:      // CanMapHostMemory
    case 8:      // ConcurrentKernels
    case 9:      // ConcurrentManagedAccess
    case 10:     // CooperativeLaunch
    case 24:     // ManagedMemory
    case 78:     // StreamPrioritiesSupported
    case 85:     // UnifiedAddressing
    case 89:     // VirtualMemoryManagementSupported
    case 90:     // HostRegisterSupported, by older numbers
    case 10011:  // IsLargeBar
    case 10013:  // CanUseStreamWaitValue
    case 10016:  // FineGrainSupport
      *value = 1;
      break;
    case 1:      // AccessPolicyMaxWindowSize
    case 4:      // CanUseHostPointerForRegisteredMem
    case 6:      // ComputeMode
    case 7:      // ComputePreemptionSupported
    case 11:     // CooperativeMultiDeviceLaunch
    case 12:     // DeviceOverlap
    case 13:     // DirectManagedMemAccessFromHost
    case 14:     // GlobalL1CacheSupported
    case 15:     // HostNativeAtomicSupported
    case 16:     // Integrated
    case 17:     // IsMultiGpuBoard
    case 18:     // KernelExecTimeout
    case 20:     // LocalL1CacheSupported
    case 62:     // MultiGpuBoardGroupID
    case 65:     // PageableMemoryAccess
    case 66:     // PageableMemoryAccessUsesHostPageTables
    case 68:     // PciDeviceId
    case 69:     // PciDomainId
    case 70:     // PersistingL2CacheMaxSize
    case 73:     // ReservedSharedMemPerBlock
    case 77:     // SingleToDoublePrecisionPerfRatio
    case 80:     // TccDriver
    case 88:     // MemoryPoolsSupported
    case 91:     // MemoryPoolSupportedHandleTypes
    case 10005:  // HdpMemFlushCntl
    case 10006:  // HdpRegFlushCntl
    case 10007:  // CooperativeMultiDeviceUnmatched...
    case 10008:
    case 10009:
    case 10010:
    case 10012:  // AsicRevision
    case 10014:  // ImageSupport
      *value = 0;
      break;
    case 2:  // AsyncEngineCount
      *value = 8;
      break;
    case 5:  // ClockRate
      *value = model.clock_khz;
      break;
    case 19:  // L2CacheSize
      *value = model.l2_mib << 20;
      break;
    case 23:  // ComputeCapabilityMajor
      *value = model.major;
      break;
    case 61:  // ComputeCapabilityMinor
      *value = model.minor;
      break;
    case 25:  // MaxBlocksPerMultiProcessor
      *value = 32;
      break;
    case 26:  // MaxBlockDimX
    case 27:  // MaxBlockDimY
    case 28:  // MaxBlockDimZ
    case 55:  // MaxThreadsDim
    case 56:  // MaxThreadsPerBlock
      *value = kMaxWorkgroup;
      break;
    case 29:  // MaxGridDimX
      *value = kMaxGridX;
      break;
    case 30:  // MaxGridDimY
    case 31:  // MaxGridDimZ
      *value = kMaxGridYZ;
      break;
    case 57:  // MaxThreadsPerMultiProcessor
      *value = kMaxThreads;
      break;
    case 58:  // MaxPitch
    case 83:  // TotalConstantMemory
      *value = INT_MAX;
      break;
    case 59:  // MemoryBusWidth
      *value = model.memory_bus_bits;
      break;
    case 60:  // MemoryClockRate
      *value = model.memory_clock_khz;
      break;
    case 63:     // MultiprocessorCount
    case 10015:  // PhysicalMultiProcessorCount
      *value = model.compute_units;
      break;
    case 67:  // PciBusId
      *value = PciBus(device.index());
      break;
    case 71:  // MaxRegistersPerBlock
    case 72:  // MaxRegistersPerMultiprocessor
      *value = kRegisters;
      break;
    case 74:     // MaxSharedMemoryPerBlock
    case 75:     // SharedMemPerBlockOptin
    case 76:     // SharedMemPerMultiprocessor
    case 10002:  // MaxSharedMemoryPerMultiprocessor
      *value = 1024 * model.lds_kib;
      break;
    case 79:  // SurfaceAlignment
    case 81:  // TextureAlignment
    case 82:  // TexturePitchAlignment
      *value = 256;
      break;
    case 84:  // TotalGlobalMem, which an int cannot hold
      *value = INT_MAX;
      break;
    case 87:  // WarpSize
      *value = kWaveSize;
      break;
    case 10000:  // ClockInstructionRate
    case 10017:  // WallClockRate
      *value = kWallClock;
      break;
    case 10018:  // NumberOfXccs
      *value = model.dies;
      break;
    case 10019:  // MaxAvailableVgprsPerThread
      *value = kVgprs;
      break;
    case 10020:  // PciChipId
      *value = model.chip_id;
      break;
    default:
      // Images among them, which CDNA does not have.
      Log("hipDeviceGetAttribute: attribute %d is not known; it is 0",
          attribute);
      *value = 0;
  }
  return kSuccess;
}

// The pairs (from, to) between which access was enabled. All are able to.
class Peers {
 public:
  static Peers& Get() {
    static Peers* const peers = new Peers;
    return *peers;
  }
  bool Enable(int from, int to) {
    std::lock_guard<std::mutex> lock(mutex_);
    return enabled_.emplace(from, to).second;
  }
  bool Disable(int from, int to) {
    std::lock_guard<std::mutex> lock(mutex_);
    return enabled_.erase({from, to}) == 1;
  }

 private:
  std::mutex mutex_;
  std::set<std::pair<int, int>> enabled_;
};

Error CheckPeer(int peer) {
  return Device::At(peer) == nullptr || peer == Device::Current().index()
             ? kInvalidDevice
             : kSuccess;
}

// A context is its device's number plus one: HIP has one a device.
void* ContextOf(int device) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
}
int DeviceOf(void* context) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
}
thread_local std::vector<int> pushed_contexts;

Error Synchronize() {
  if (Error error = RefuseDuringCapture(kStreamCaptureUnsupported);
      error != kSuccess) {
    return error;
  }
  return Device::Current().Synchronize();
}

// Stores `value` unless there is no place for it.
template <typename T>
Error Store(T* place, T value) {
  if (place == nullptr) return kInvalidValue;
  *place = value;
  return kSuccess;
}

// Calls `body(device)` for a valid number.
template <typename Body>
Error WithDevice(int index, const Body& body) {
  Device* device = Device::At(index);
  return device == nullptr ? kInvalidDevice : body(*device);
}

Error CopyText(char* to, int size, const char* text) {
  if (to == nullptr || size <= 0) return kInvalidValue;
  std::snprintf(to, static_cast<size_t>(size), "%s", text);
  return kSuccess;
}

}  // namespace

HIP_EXPORT Error hipInit(unsigned flags) {
  return Api(__func__, [&] { return flags == 0 ? kSuccess : kInvalidValue; });
}

HIP_EXPORT Error hipDriverGetVersion(int* version) {
  return Api(__func__, [&] { return Store(version, kVersion); });
}

HIP_EXPORT Error hipRuntimeGetVersion(int* version) {
  return Api(__func__, [&] { return Store(version, kVersion); });
}

HIP_EXPORT Error hipGetDeviceCount(int* count) {
  return Api(__func__, [&] { return Store(count, Device::Count()); });
}

HIP_EXPORT Error hipDeviceGet(int* device, int index) {
  return Api(__func__, [&] {
    return WithDevice(index, [&](Device&) { return Store(device, index); });
  });
}

HIP_EXPORT Error hipGetDevice(int* device) {
  return Api(__func__,
             [&] { return Store(device, Device::Current().index()); });
}

HIP_EXPORT Error hipSetDevice(int device) {
  return Api(__func__, [&] { return Device::SetCurrent(device); });
}

HIP_EXPORT Error hipDeviceGetName(char* name, int size, int device) {
  return Api(__func__, [&] {
    return WithDevice(device, [&](Device& d) {
      return CopyText(name, size, d.model().name);
    });
  });
}

HIP_EXPORT Error hipDeviceTotalMem(size_t* bytes, int device) {
  return Api(__func__, [&] {
    return WithDevice(device, [&](Device& d) {
      return Store(bytes, static_cast<size_t>(d.model().memory_bytes));
    });
  });
}

HIP_EXPORT Error hipDeviceGetPCIBusId(char* id, int size, int device) {
  return Api(__func__, [&] {
    return WithDevice(device, [&](Device& d) {
      char text[16];
      std::snprintf(text, sizeof(text), "0000:%02x:00.0",
                    PciBus(d.index()) & 0xff);
      return CopyText(id, size, text);
    });
  });
}

HIP_EXPORT Error hipDeviceComputeCapability(int* major, int* minor,
                                            int device) {
  return Api(__func__, [&] {
    return WithDevice(device, [&](Device& d) {
      if (minor == nullptr) return kInvalidValue;
      *minor = d.model().minor;
      return Store(major, d.model().major);
    });
  });
}

HIP_EXPORT Error hipGetDevicePropertiesR0600(DeviceProperties* properties,
                                             int device) {
  return Api(__func__, [&] {
    return WithDevice(device, [&](Device& d) {
      if (properties == nullptr) return kInvalidValue;
      FillProperties(d, properties);
      return kSuccess;
    });
  });
}

HIP_EXPORT Error hipDeviceGetAttribute(int* value, int attribute, int device) {
  return Api(__func__, [&] {
    return WithDevice(device, [&](Device& d) {
      return value == nullptr ? kInvalidValue : Attribute(d, attribute, value);
    });
  });
}

HIP_EXPORT Error hipDeviceSynchronize() {
  return Api(__func__, [] { return Synchronize(); });
}

HIP_EXPORT Error hipDeviceReset() {
  return Api(__func__, [] { return Synchronize(); });
}

HIP_EXPORT Error hipSetDeviceFlags(unsigned) {
  return Api(__func__, [] { return kSuccess; });
}

HIP_EXPORT Error hipDeviceCanAccessPeer(int* can, int device, int peer) {
  return Api(__func__, [&] {
    if (Device::At(device) == nullptr || Device::At(peer) == nullptr) {
      return kInvalidDevice;
    }
    return Store(can, static_cast<int>(device != peer));
  });
}

HIP_EXPORT Error hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  return Api(__func__, [&] {
    if (flags != 0) return kInvalidValue;
    if (Error error = CheckPeer(peer); error != kSuccess) return error;
    return Peers::Get().Enable(Device::Current().index(), peer)
               ? kSuccess
               : kPeerAccessAlreadyEnabled;
  });
}

HIP_EXPORT Error hipDeviceDisablePeerAccess(int peer) {
  return Api(__func__, [&] {
    if (Error error = CheckPeer(peer); error != kSuccess) return error;
    return Peers::Get().Disable(Device::Current().index(), peer)
               ? kSuccess
               : kPeerAccessNotEnabled;
  });
}

HIP_EXPORT Error hipCtxGetDevice(int* device) {
  return Api(__func__,
             [&] { return Store(device, Device::Current().index()); });
}

HIP_EXPORT Error hipCtxGetCurrent(void** context) {
  return Api(__func__, [&] {
    return Store(context, ContextOf(Device::Current().index()));
  });
}

HIP_EXPORT Error hipCtxSetCurrent(void* context) {
  return Api(__func__, [&] { return Device::SetCurrent(DeviceOf(context)); });
}

HIP_EXPORT Error hipCtxPushCurrent(void* context) {
  return Api(__func__, [&] {
    const int before = Device::Current().index();
    Error error = Device::SetCurrent(DeviceOf(context));
    if (error == kSuccess) pushed_contexts.push_back(before);
    return error;
  });
}

HIP_EXPORT Error hipCtxPopCurrent(void** context) {
  return Api(__func__, [&] {
    if (pushed_contexts.empty()) return kInvalidContext;
    if (context != nullptr) *context = ContextOf(Device::Current().index());
    Error error = Device::SetCurrent(pushed_contexts.back());
    pushed_contexts.pop_back();
    return error;
  });
}

HIP_EXPORT Error hipDevicePrimaryCtxRetain(void** context, int device) {
  return Api(__func__, [&] {
    return WithDevice(device, [&](Device& d) {
      return Store(context, ContextOf(d.index()));
    });
  });
}

HIP_EXPORT Error hipDevicePrimaryCtxRelease(int device) {
  return Api(__func__, [&] {
    return WithDevice(device, [](Device&) { return kSuccess; });
  });
}

}  // namespace amdgpu_sim
