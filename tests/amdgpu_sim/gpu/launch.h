// SPDX-License-Identifier: Apache-2.0

// A kernel launch: everything the command processor would know.
#ifndef AMDGPU_SIM_GPU_LAUNCH_H_
#define AMDGPU_SIM_GPU_LAUNCH_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "tests/amdgpu_sim/gpu/fault.h"

namespace amdgpu_sim {

class Program;  // isa/decode.h: the decoded instructions of a code object.

struct Launch {
  const char* kernel = nullptr;         // Symbol name without .kd.
  const char* arch = nullptr;           // "gfx942"
  Program* program = nullptr;           // Of the loaded code object.
  const uint8_t* descriptor = nullptr;  // 64-byte kernel descriptor, loaded.
  uint64_t entry = 0;                   // Address of the first instruction.
  const uint8_t* kernarg = nullptr;     // Segment with hidden arguments.
  uint32_t kernarg_size = 0;
  uint32_t grid[3] = {1, 1, 1};   // Workgroups.
  uint32_t block[3] = {1, 1, 1};  // Work-items of a workgroup.
  uint32_t dynamic_lds = 0;       // Bytes beside the static ones.
  int device = 0;

  // Optional. The launch stops soon after `cancel` is set; its report is then
  // "cancelled". The check that failed is written to `check`.
  const std::atomic<bool>* cancel = nullptr;
  Check* check = nullptr;
};

// Runs the launch to its end on the calling thread. Returns an empty string,
// or the report of the fault that stopped it (also printed to stderr).
std::string Run(const Launch& launch);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_GPU_LAUNCH_H_
