// SPDX-License-Identifier: Apache-2.0

#include "aiter/device.h"

#include <string>
#include <vector>

#include "third_party/aiter/src/core/archs.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/select.h"

namespace aiter {

std::vector<KernelDescription> list_kernels() {
  std::vector<KernelDescription> kernels;
  for (const KernelInfo& k : GetKernelTable()) {
    kernels.push_back({k.symbol,
                       k.op,
                       k.grade,
                       k.arch,
                       k.any_data_type ? "any" : DataTypeName(k.data_type),
                       {k.dims, k.dims + k.num_dims},
                       k.tile_m,
                       k.tile_n,
                       k.tile_k});
  }
  return kernels;
}

Status device_count(int* count) {
  const Driver* driver;
  AITER_RETURN_IF_ERROR(GetDriver(&driver));
  int error = driver->device_count(count);
  if (error == 0) return Status();
  return DriverError(*driver, error, "Counting devices");
}

Status device_arch(int ordinal, std::string* arch) {
  int count = 0;
  AITER_RETURN_IF_ERROR(device_count(&count));
  if (ordinal < 0 || ordinal >= count) {
    return Status(StatusCode::kInvalidArgument,
                  "ordinal is " + std::to_string(ordinal) +
                      ", but must be from 0 to " + std::to_string(count - 1));
  }
  const Driver* driver;
  AITER_RETURN_IF_ERROR(GetDriver(&driver));
  DeviceInfo device;
  AITER_RETURN_IF_ERROR(driver->describe_device(ordinal, &device));
  *arch = device.arch;
  return Status();
}

std::string float8_type(const std::string& arch) {
  for (const ArchInfo& facts : kArchs) {
    if (arch == facts.name) return facts.float8;
  }
  return "";
}

}  // namespace aiter
