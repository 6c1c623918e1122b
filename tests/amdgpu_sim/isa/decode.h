// SPDX-License-Identifier: Apache-2.0

// Decoded code objects.
#ifndef AMDGPU_SIM_ISA_DECODE_H_
#define AMDGPU_SIM_ISA_DECODE_H_

#include <cstdint>
#include <memory>

#include "tests/amdgpu_sim/isa/inst.h"

namespace amdgpu_sim {

// The instructions of one loaded code object. Safe from several threads.
class Program {
 public:
  // The executable bytes, loaded at `base`; they outlive the program.
  static std::unique_ptr<Program> Create(Arch arch, uint64_t base,
                                         uint64_t size);
  virtual ~Program() = default;

  // The instruction at an address, decoded at its first use. Throws
  // Fault{kUnsupported} for one that is unknown, naming text and modifier.
  virtual const Inst& At(uint64_t pc) = 0;
};

// One instruction of `bytes` at pc, by LLVM's disassembler. Throws as At.
Inst Decode(Arch arch, uint64_t pc, const uint8_t* bytes, uint64_t size);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_DECODE_H_
