// SPDX-License-Identifier: Apache-2.0

// The part of the GPU driver that launching kernels needs, as a table.
//
// HIP and CUDA agree on the C signatures below, so one table serves both. The
// library links neither: functions are found in the process or in the driver's
// shared object by name, and tests plant a table of their own.
#ifndef AITER_SRC_CORE_DRIVER_H_
#define AITER_SRC_CORE_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "aiter/status.h"

namespace aiter {

enum class Platform : uint8_t { kHip, kCuda };

// What kernel selection has to know of a device.
struct DeviceInfo {
  Platform platform = Platform::kHip;
  std::string arch;          // "gfx942", or "sm_90" for capability 9.0.
  int max_shared_bytes = 0;  // Most shared memory of one block.
  int multiprocessors = 0;   // Compute units of AMD; 0: no device is there.
};

// CUtensorMap: a tensor's address, shape and tiling, read by TMA copies.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// Every function but the last two returns 0, or the driver's error code.
struct Driver {
  Platform platform = Platform::kHip;
  int (*module_load)(void** module, const void* image) = nullptr;
  int (*module_unload)(void* module) = nullptr;
  int (*module_get_function)(void** function, void* module,
                             const char* name) = nullptr;
  // Lets a function use so many bytes of dynamic shared memory. Null where no
  // permission is needed (HIP).
  int (*allow_shared)(void* function, int attribute, int bytes) = nullptr;
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y,
                unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, void* stream,
                void** params, void** extra) = nullptr;
  // The same, of a kernel that may begin before the one before it has ended,
  // and waits for that itself. Null on HIP, and in CUDA before 12.
  decltype(launch) launch_early = nullptr;
  int (*memset_d8)(uintptr_t address, unsigned char value, size_t count,
                   void* stream) = nullptr;
  int (*memset_d32)(uintptr_t address, unsigned value, size_t count,
                    void* stream) = nullptr;
  int (*memcpy_dtod)(uintptr_t to, uintptr_t from, size_t bytes,
                     void* stream) = nullptr;
  // Null before sm_90 and on HIP.
  int (*encode_tensor_map)(TensorMap* map, int data_type, uint32_t rank,
                           void* address, const uint64_t* dims,
                           const uint64_t* stride_bytes, const uint32_t* box,
                           const uint32_t* element_strides, int interleave,
                           int swizzle, int l2_promotion,
                           int out_of_bounds) = nullptr;
  // A number for the calling thread's current context, never 0.
  int (*current_context)(uint64_t* context) = nullptr;
  int (*current_device)(int* ordinal) = nullptr;
  int (*device_count)(int* count) = nullptr;
  Status (*describe_device)(int ordinal, DeviceInfo* info) = nullptr;
  std::string (*error_string)(int error) = nullptr;
};

// The driver of the platform that kernels are embedded for. Found once; a
// failure is not remembered.
Status GetDriver(const Driver** driver);

// Replaces the driver from the next GetDriver on; null for the real one.
void SetDriverForTesting(const Driver* driver);

// Turns a driver's error code into a Status; `what` is the call as the reader
// knows it: "loading kernel mha_fwd_...".
Status DriverError(const Driver& driver, int error, const std::string& what);

// Fills `driver` from libamdhip64 or libcuda. (driver_hip.cc, driver_cuda.cc)
Status LoadHipDriver(Driver* driver);
Status LoadCudaDriver(Driver* driver);

// A shared library of the process, or one found by the first of `names`.
class DriverLibrary {
 public:
  // `probe` is a symbol that the library exports.
  Status Open(const char* probe, const char* const* names, int count);

  // Sets `*function` to symbol `name`.
  template <typename Function>
  Status Find(const char* name, Function** function) const {
    void* symbol = nullptr;
    AITER_RETURN_IF_ERROR(FindSymbol(name, &symbol));
    *function = reinterpret_cast<Function*>(symbol);
    return Status();
  }

 private:
  Status FindSymbol(const char* name, void** symbol) const;

  void* handle_ = nullptr;  // RTLD_DEFAULT if the process itself has it.
  const char* name_ = "this process";
};

}  // namespace aiter

#endif  // AITER_SRC_CORE_DRIVER_H_
