// SPDX-License-Identifier: Apache-2.0

// A compute unit in time: some workgroups' traces, started together.
#ifndef AMDGPU_SIM_CLOCK_UNIT_H_
#define AMDGPU_SIM_CLOCK_UNIT_H_

#include <cstdint>
#include <map>
#include <vector>

#include "tests/amdgpu_sim/clock/device.h"
#include "tests/amdgpu_sim/clock/trace.h"

namespace amdgpu_sim {

// Why a wave did not issue. The last of several counts.
enum class Stall : uint8_t {
  kNone,       // It had its slot.
  kDependent,  // A matrix or transcendental result.
  kMatrix,     // The unit is busy.
  kVector,
  kScalar,
  kLds,
  kMemory,
  kVmcnt,    // s_waitcnt
  kLgkmcnt,  // s_waitcnt
  kBarrier,
  kBranch,
  kCount,
};
const char* StallName(Stall stall);

struct UnitReport {
  double clocks = 0;  // Until the last wave has ended.
  // Clocks in which a unit was busy: of all SIMDs together, or of the one.
  double matrix = 0, vector = 0, scalar = 0, lds = 0, memory = 0;
  double lds_conflicts = 0;
  double l1_bytes = 0;      // Asked of the L1,
  double memory_bytes = 0;  // and of what is behind it,
  double hbm_bytes = 0;     // of which HBM gives so many.
  double behind = 0;        // What is behind the L1 is busy for so many clocks.
  double operations = 0;    // Of matrix instructions, a product and a sum two.
  double wave_clocks = 0;   // From start to end, of all waves.
  double stalls[static_cast<int>(Stall::kCount)] = {};
  // By instruction.
  struct Place {
    const Inst* inst = nullptr;
    uint64_t count = 0;
    double stalls[static_cast<int>(Stall::kCount)] = {};
  };
  std::map<uint64_t, Place> places;
  // What each wave did when, if asked for.
  struct Span {
    int wave = 0;
    const Inst* inst = nullptr;
    Stall stall = Stall::kNone;  // Before the instruction, or none: it itself.
    double begin = 0, end = 0;
  };
  std::vector<Span> timeline;
};

// What loads that miss the L1 find behind it.
struct Source {
  double latency = 0;
  double clocks = 0;  // For each byte, in which nothing else comes.
  double hbm = 0;     // Of each byte, what HBM gives.
};
struct Behind {
  // By where they are in memory: what begins at a piece of 64 bytes and goes on
  // until the next one.
  std::map<uint64_t, Source> sources;
  // What a workgroup asks for again, by the bytes that its unit has asked for
  // since: if these are no more, it is still there.
  double l2_bytes = 0, mall_bytes = 0;
  Source l2, mall, hbm;
  double atomic_clocks = 0;  // For each byte of atomics.
};

UnitReport RunUnit(const Device& device, const Behind& behind,
                   const std::vector<const GroupTrace*>& groups, bool timeline);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_CLOCK_UNIT_H_
