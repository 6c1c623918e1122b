// SPDX-License-Identifier: Apache-2.0

// What AMDGPU_SIM_STATS counts, per kernel.
#ifndef AMDGPU_SIM_GPU_STATS_H_
#define AMDGPU_SIM_GPU_STATS_H_

#include <cstdint>
#include <string>

#include "tests/amdgpu_sim/gpu/lds.h"
#include "tests/amdgpu_sim/isa/inst.h"

namespace amdgpu_sim {

// What an access keeps the LDS busy for.
struct LdsCost {
  uint32_t cycles = 0;     // Without bank conflicts,
  uint32_t conflicts = 0;  // and what those add.
};
LdsCost CostOf(const Lds::Record& access, Arch arch);

struct Counts {
  uint64_t launches = 0;
  uint64_t workgroups = 0;
  uint64_t waves = 0;
  uint64_t instructions[static_cast<int>(InstClass::kCount)] = {};
  uint64_t issue_cycles = 0;  // Of a SIMD, without any stall.
  uint64_t mfma_cycles = 0;
  uint64_t bytes_read = 0;  // Global memory, as the lanes ask.
  uint64_t bytes_written = 0;
  uint64_t lds_bytes = 0;
  uint64_t lds_cycles = 0;     // LDS accesses without conflicts.
  uint64_t lds_conflicts = 0;  // Cycles that bank conflicts add to them.

  void Add(const Counts& other);
  // One instruction, after it was executed. `lds` is its access to LDS, or
  // null.
  void Count(const Inst& inst, Arch arch, const Lds::Record* lds);
};

// Whether AMDGPU_SIM_STATS is set.
bool StatsEnabled();

// Adds a launch to the table, which is written when the process exits.
void AddStats(const std::string& arch, const std::string& kernel,
              const Counts& counts);

// Counts a launch that ended without a fault, for the functions below; on
// whether there are statistics or not.
void AddLaunch(const std::string& kernel, uint64_t instructions);

}  // namespace amdgpu_sim

// Launches of a kernel, by its symbol without .kd, that ended without a fault,
// and the instructions that their waves executed.
extern "C" uint64_t amdgpu_sim_launches(const char* kernel);
extern "C" uint64_t amdgpu_sim_instructions(const char* kernel);

#endif  // AMDGPU_SIM_GPU_STATS_H_
