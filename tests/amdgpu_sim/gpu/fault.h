// SPDX-License-Identifier: Apache-2.0

// What a program did wrong, or what the simulator does not know.
#ifndef AMDGPU_SIM_GPU_FAULT_H_
#define AMDGPU_SIM_GPU_FAULT_H_

#include <cstdint>
#include <string>

namespace amdgpu_sim {

// The checks, each of which AMDGPU_SIM_CHECKS=-name turns off. kLdsWait and
// kLdsUninitialized print their report and the launch goes on, because XLA's
// sort and top_k are such and nobody could run them otherwise: +name, or +all,
// makes them stop it.
enum class Check : uint8_t {
  kUnsupported,    // Instruction, modifier or mode not implemented. Always on.
  kOutOfBounds,    // Address in no live allocation.
  kUseAfterFree,   // Address in an allocation that was freed.
  kMisaligned,     // Address not aligned as the access needs.
  kUninitialized,  // Memory or scratch read that nobody wrote.
  kLdsUninitialized,  // The same of LDS.
  kWaitcnt,           // Register used before the s_waitcnt of its load.
  kLdsRace,           // Waves of a workgroup touch a byte without a barrier.
  kLdsWait,           // The same over a barrier that an access may outlast.
  kBarrier,           // Waves of a workgroup meet at different barriers,
                      // and at different numbers of them.
  kGlobalRace,        // Workgroups touch a byte without atomics.
  kRegister,          // Register beyond those that the kernel asked for.
  kEndless,           // The launch makes no progress.
  kCount,
};

// Thrown by an instruction, caught by the launch, which adds kernel,
// workgroup, wave and instruction. It never leaves the simulator.
struct Fault {
  Check check;
  std::string message;   // "read of 4 bytes past the end of ..."
  int lane = -1;         // -1: the whole wave.
  uint64_t address = 0;  // 0: no address.
};

const char* CheckName(Check check);  // "out_of_bounds"

// Accesses outside of live allocations have nowhere to go, endless launches no
// end: those checks cannot be turned off, nor can kUnsupported.
bool CheckEnabled(Check check);
// Whether the check prints its report, but does not stop the launch.
bool CheckOnlyWarns(Check check);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_GPU_FAULT_H_
