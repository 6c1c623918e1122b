// SPDX-License-Identifier: Apache-2.0

// The wrappers that compilers put around code objects.
#ifndef AMDGPU_SIM_HIP_BUNDLE_H_
#define AMDGPU_SIM_HIP_BUNDLE_H_

#include <cstdint>
#include <vector>

#include "tests/amdgpu_sim/hip/device.h"
#include "tests/amdgpu_sim/hip/types.h"

namespace amdgpu_sim {

// Copies the ELF file for the model out of an image: an ELF file, an offload
// bundle, a compressed one, or the "HIPF" structure that points at one.
Error FindCodeObject(const void* image, const Model& model,
                     std::vector<uint8_t>* elf);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_BUNDLE_H_
