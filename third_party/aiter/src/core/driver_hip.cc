// SPDX-License-Identifier: Apache-2.0

#include <cstring>
#include <string>

#include "third_party/aiter/src/core/driver.h"

namespace aiter {
namespace {

// hipDeviceProp_tR0600 is 1472 bytes; the suffix freezes its layout.
constexpr size_t kPropertiesBytes = 1472;
constexpr size_t kSharedMemPerBlockOffset = 296;    // size_t
constexpr size_t kMultiProcessorCountOffset = 388;  // int
constexpr size_t kGcnArchNameOffset = 1160;         // char[256]
constexpr size_t kGcnArchNameBytes = 256;

int (*hip_get_device)(int*);
int (*hip_get_device_count)(int*);
int (*hip_get_device_properties)(void*, int);
const char* (*hip_get_error_string)(int);

// HIP has one context a device.
int CurrentContext(uint64_t* context) {
  int ordinal = 0;
  int error = hip_get_device(&ordinal);
  *context = static_cast<uint64_t>(ordinal) + 1;
  return error;
}

std::string ErrorString(int error) { return hip_get_error_string(error); }

Status DescribeDevice(int ordinal, DeviceInfo* info) {
  alignas(16) char properties[2 * kPropertiesBytes] = {};
  if (int error = hip_get_device_properties(properties, ordinal); error != 0) {
    return Status(StatusCode::kInternal,
                  "Describing device " + std::to_string(ordinal) +
                      " failed: HIP error " + std::to_string(error) + " (" +
                      ErrorString(error) + ")");
  }
  const char* name = properties + kGcnArchNameOffset;
  std::string arch(name, strnlen(name, kGcnArchNameBytes));
  // "gfx942:sramecc+:xnack-" names features after the architecture.
  arch = arch.substr(0, arch.find(':'));
  if (arch.compare(0, 3, "gfx") != 0) {
    return Status(StatusCode::kInternal,
                  "Device " + std::to_string(ordinal) +
                      " reports architecture \"" + arch +
                      "\"; a name that begins with gfx was expected");
  }
  size_t shared = 0;
  std::memcpy(&shared, properties + kSharedMemPerBlockOffset, sizeof(shared));
  info->platform = Platform::kHip;
  info->arch = arch;
  info->max_shared_bytes = static_cast<int>(shared);
  std::memcpy(&info->multiprocessors, properties + kMultiProcessorCountOffset,
              sizeof(info->multiprocessors));
  return Status();
}

}  // namespace

Status LoadHipDriver(Driver* driver) {
  static constexpr const char* kNames[] = {
      "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};
  DriverLibrary library;
  AITER_RETURN_IF_ERROR(library.Open("hipModuleLaunchKernel", kNames, 3));
  driver->platform = Platform::kHip;
  AITER_RETURN_IF_ERROR(
      library.Find("hipModuleLoadData", &driver->module_load));
  AITER_RETURN_IF_ERROR(
      library.Find("hipModuleUnload", &driver->module_unload));
  AITER_RETURN_IF_ERROR(
      library.Find("hipModuleGetFunction", &driver->module_get_function));
  AITER_RETURN_IF_ERROR(library.Find("hipModuleLaunchKernel", &driver->launch));
  AITER_RETURN_IF_ERROR(library.Find("hipMemsetD8Async", &driver->memset_d8));
  AITER_RETURN_IF_ERROR(library.Find("hipMemsetD32Async", &driver->memset_d32));
  AITER_RETURN_IF_ERROR(
      library.Find("hipMemcpyDtoDAsync", &driver->memcpy_dtod));
  AITER_RETURN_IF_ERROR(library.Find("hipGetDevice", &hip_get_device));
  AITER_RETURN_IF_ERROR(
      library.Find("hipGetDeviceCount", &hip_get_device_count));
  AITER_RETURN_IF_ERROR(
      library.Find("hipGetDevicePropertiesR0600", &hip_get_device_properties));
  AITER_RETURN_IF_ERROR(
      library.Find("hipGetErrorString", &hip_get_error_string));
  driver->current_context = CurrentContext;
  driver->current_device = hip_get_device;
  driver->device_count = hip_get_device_count;
  driver->describe_device = DescribeDevice;
  driver->error_string = ErrorString;
  return Status();
}

}  // namespace aiter
