// SPDX-License-Identifier: Apache-2.0

// A workgroup: its waves, its LDS and its barriers.
#ifndef AMDGPU_SIM_GPU_WORKGROUP_H_
#define AMDGPU_SIM_GPU_WORKGROUP_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/amdgpu_sim/gpu/launch.h"
#include "tests/amdgpu_sim/gpu/lds.h"
#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/gpu/stats.h"
#include "tests/amdgpu_sim/gpu/wave.h"
#include "tests/amdgpu_sim/isa/decode.h"

namespace amdgpu_sim {

// What the kernel descriptor and the launch say about every workgroup.
struct KernelSetup {
  Arch arch = Arch::kGfx942;
  uint64_t entry = 0;
  uint32_t mode = 0;  // Initial MODE register.
  uint32_t block[3] = {1, 1, 1};
  uint32_t work_items = 1;  // Of a workgroup.
  int waves = 1;            // Of a workgroup.
  uint32_t lds_size = 0;
  uint32_t quiet_checks = 0;   // Bits of Check.
  uint32_t scratch_size = 0;   // Of a lane.
  int scalar_registers = 102;  // s registers that the kernel may use
  int vector_registers = kVectorRegisters;  // v and a registers together
  int accum_offset = 256;                   // Which of them is a0.
  // The user SGPRs, the same for all waves, then the workgroup's ids.
  uint32_t user[40] = {};
  int users = 0;
  bool id[3] = {false, false, false};
  bool info = false;         // An SGPR with the wave's place.
  bool wave_offset = false;  // An SGPR with the scratch offset, here 0.
};

class Tracer;  // clock/clock.h

class Workgroup {
 public:
  Workgroup() = default;
  Workgroup(const Workgroup&) = delete;

  // Makes the waves ready for their first instruction. `number` counts the
  // workgroups of the launch from 0.
  void Start(const KernelSetup& setup, MemoryView* memory, uint64_t number,
             const uint32_t (&id)[3]);

  // Runs until all waves have ended, about `budget` instructions were executed
  // or lds() has a warning. Returns whether the waves have ended. Throws Fault;
  // wave() then is the one at fault.
  bool Run(Program* program, uint64_t budget, Counts* counts,
           const std::atomic<bool>* cancel);

  // Who gets all instructions, for the model of time; null for nobody.
  void set_tracer(Tracer* tracer) { tracer_ = tracer; }

  const Wave* wave() const { return running_; }
  const uint32_t* id() const { return id_; }
  uint64_t number() const { return number_; }
  uint64_t executed() const { return executed_; }
  Lds& lds() { return lds_; }

  // Throws if the instruction names registers that the kernel did not ask for.
  void CheckRegisters(const Inst& inst) const;

 private:
  // Runs a wave until it ends, arrives at a barrier or has had its turn.
  // Returns the instructions it executed.
  template <bool kCareful>
  uint64_t RunWave(Wave& wave, Program* program, uint64_t turn, Counts* counts);
  // Of a wave that skips them, goes to the next one that is not a vector
  // instruction.
  void SkipVector(Wave& wave, Program* program);
  void PassBarrier();
  void SetUpWave(Wave& wave, const KernelSetup& setup, MemoryView* memory);

  const KernelSetup* setup_ = nullptr;
  uint64_t number_ = 0;
  uint32_t id_[3] = {};
  uint64_t executed_ = 0;
  int count_ = 0;  // Of waves_ in use.
  int turn_ = 0;   // The wave that is next.
  std::vector<std::unique_ptr<Wave>> waves_;
  const Wave* running_ = nullptr;
  Tracer* tracer_ = nullptr;
  std::string apart_;  // Which waves met at different barriers first.
  Lds lds_;
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_GPU_WORKGROUP_H_
