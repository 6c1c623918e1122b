// SPDX-License-Identifier: Apache-2.0

// What a workgroup executed, for the model of time.
#ifndef AMDGPU_SIM_CLOCK_TRACE_H_
#define AMDGPU_SIM_CLOCK_TRACE_H_

#include <cstdint>
#include <vector>

#include "tests/amdgpu_sim/isa/inst.h"

namespace amdgpu_sim {

// One executed instruction.
struct Event {
  const Inst* inst = nullptr;
  uint32_t first_line = 0;  // In WaveTrace::lines.
  uint16_t lines = 0;       // Pieces of 64 bytes of global memory.
  uint16_t lds_clocks = 0;  // Without conflicts.
  uint16_t lds_conflicts = 0;
  bool lds_write = false;
  bool write = false;   // To global memory.
  bool atomic = false;  // There, too: it writes.
  bool jumped = false;  // The next instruction is not the one behind it.
};

struct WaveTrace {
  std::vector<Event> events;
  std::vector<uint64_t> lines;  // Addresses in units of 64 bytes.
};

struct GroupTrace {
  std::vector<WaveTrace> waves;
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_CLOCK_TRACE_H_
