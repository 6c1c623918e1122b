// SPDX-License-Identifier: Apache-2.0

// Code objects that are compiled into host libraries, and the host functions
// and variables that stand for their kernels and globals.
#ifndef AMDGPU_SIM_HIP_FAT_BINARY_H_
#define AMDGPU_SIM_HIP_FAT_BINARY_H_

#include <memory>

#include "tests/amdgpu_sim/hip/module.h"

namespace amdgpu_sim {

// The kernel of a host function on a device, whose code is loaded at the first
// use. kInvalidDeviceFunction if it was not registered.
Error FindHostFunction(const void* host, Device& device,
                       std::shared_ptr<Function>* function);

// The global of a host variable.
Error FindHostVariable(const void* host, Device& device,
                       Module::Global* global);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_FAT_BINARY_H_
