// SPDX-License-Identifier: Apache-2.0

#include <string>

#include "third_party/aiter/src/core/driver.h"

namespace aiter {
namespace {

// Values of CUdevice_attribute.
constexpr int kMultiprocessorCount = 16;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;
constexpr int kMaxSharedMemoryPerBlockOptin = 97;

constexpr int kErrorInvalidContext = 201;  // CUDA_ERROR_INVALID_CONTEXT

int (*cu_init)(unsigned);
int (*cu_ctx_get_current)(void**);
int (*cu_ctx_get_device)(int*);
int (*cu_device_get)(int*, int);
int (*cu_device_get_count)(int*);
int (*cu_device_get_attribute)(int*, int, int);
int (*cu_get_error_string)(int, const char**);

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  alignas(8) int value[16];
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

int (*cu_launch_kernel_ex)(const LaunchConfig*, void*, void**, void**);

int LaunchEarly(void* function, unsigned grid_x, unsigned grid_y,
                unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, void* stream,
                void** params, void** extra) {
  constexpr int kProgrammaticStreamSerialization = 6;
  LaunchAttribute early = {kProgrammaticStreamSerialization, {1}};
  LaunchConfig config = {{grid_x, grid_y, grid_z},
                         {block_x, block_y, block_z},
                         shared_bytes,
                         stream,
                         &early,
                         1};
  return cu_launch_kernel_ex(&config, function, params, extra);
}

int CurrentContext(uint64_t* context) {
  void* current = nullptr;
  int error = cu_ctx_get_current(&current);
  *context = reinterpret_cast<uintptr_t>(current);
  return error == 0 && current == nullptr ? kErrorInvalidContext : error;
}

std::string ErrorString(int error) {
  const char* text = nullptr;
  if (cu_get_error_string(error, &text) != 0 || text == nullptr) {
    return "unknown error";
  }
  return text;
}

Status DescribeDevice(int ordinal, DeviceInfo* info) {
  int device = 0, major = 0, minor = 0, shared = 0, multiprocessors = 0;
  int error = cu_device_get(&device, ordinal);
  if (error == 0) {
    error = cu_device_get_attribute(&major, kComputeCapabilityMajor, device);
  }
  if (error == 0) {
    error = cu_device_get_attribute(&minor, kComputeCapabilityMinor, device);
  }
  if (error == 0) {
    error =
        cu_device_get_attribute(&shared, kMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == 0) {
    error =
        cu_device_get_attribute(&multiprocessors, kMultiprocessorCount, device);
  }
  if (error != 0) {
    return Status(StatusCode::kInternal,
                  "Describing device " + std::to_string(ordinal) +
                      " failed: CUDA error " + std::to_string(error) + " (" +
                      ErrorString(error) + ")");
  }
  info->platform = Platform::kCuda;
  info->arch = "sm_" + std::to_string(major * 10 + minor);
  info->max_shared_bytes = shared;
  info->multiprocessors = multiprocessors;
  return Status();
}

}  // namespace

Status LoadCudaDriver(Driver* driver) {
  static constexpr const char* kNames[] = {"libcuda.so.1", "libcuda.so"};
  DriverLibrary library;
  AITER_RETURN_IF_ERROR(library.Open("cuLaunchKernel", kNames, 2));
  driver->platform = Platform::kCuda;
  AITER_RETURN_IF_ERROR(library.Find("cuModuleLoadData", &driver->module_load));
  AITER_RETURN_IF_ERROR(library.Find("cuModuleUnload", &driver->module_unload));
  AITER_RETURN_IF_ERROR(
      library.Find("cuModuleGetFunction", &driver->module_get_function));
  AITER_RETURN_IF_ERROR(
      library.Find("cuFuncSetAttribute", &driver->allow_shared));
  AITER_RETURN_IF_ERROR(library.Find("cuLaunchKernel", &driver->launch));
  AITER_RETURN_IF_ERROR(library.Find("cuMemsetD8Async", &driver->memset_d8));
  AITER_RETURN_IF_ERROR(library.Find("cuMemsetD32Async", &driver->memset_d32));
  AITER_RETURN_IF_ERROR(
      library.Find("cuMemcpyDtoDAsync_v2", &driver->memcpy_dtod));
  // Drivers before CUDA 12 have no tensor maps and no device that needs them.
  (void)library.Find("cuTensorMapEncodeTiled", &driver->encode_tensor_map).ok();
  if (library.Find("cuLaunchKernelEx", &cu_launch_kernel_ex).ok()) {
    driver->launch_early = LaunchEarly;
  }
  AITER_RETURN_IF_ERROR(library.Find("cuInit", &cu_init));
  AITER_RETURN_IF_ERROR(library.Find("cuCtxGetCurrent", &cu_ctx_get_current));
  AITER_RETURN_IF_ERROR(library.Find("cuCtxGetDevice", &cu_ctx_get_device));
  AITER_RETURN_IF_ERROR(library.Find("cuDeviceGet", &cu_device_get));
  AITER_RETURN_IF_ERROR(library.Find("cuDeviceGetCount", &cu_device_get_count));
  AITER_RETURN_IF_ERROR(
      library.Find("cuDeviceGetAttribute", &cu_device_get_attribute));
  AITER_RETURN_IF_ERROR(library.Find("cuGetErrorString", &cu_get_error_string));
  if (int error = cu_init(0); error != 0) {
    return Status(StatusCode::kFailedPrecondition,
                  "cuInit failed: CUDA error " + std::to_string(error) + " (" +
                      ErrorString(error) + ")");
  }
  driver->current_context = CurrentContext;
  driver->current_device = cu_ctx_get_device;
  driver->device_count = cu_device_get_count;
  driver->describe_device = DescribeDevice;
  driver->error_string = ErrorString;
  return Status();
}

}  // namespace aiter
