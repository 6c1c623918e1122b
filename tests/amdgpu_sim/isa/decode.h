// SPDX-License-Identifier: Apache-2.0

// Decoded code objects.
#ifndef AMDGPU_SIM_ISA_DECODE_H_
#define AMDGPU_SIM_ISA_DECODE_H_

#include <atomic>
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

  // The same instructions where a0 is this vector register: kernels of a code
  // object may differ in it. It lives as long as this program.
  virtual Program& WithAccumOffset(int accum_offset) = 0;

  // The instruction at an address, decoded at its first use. Throws
  // Fault{kUnsupported} for one that is unknown, naming text and modifier.
  const Inst& At(uint64_t pc) {
    // An address that is no multiple of 4 becomes a large index.
    uint64_t offset = pc - base_;
    uint64_t index = offset >> 2 | offset << 62;
    if (__builtin_expect(index < count_, true)) {
      const Inst* inst = table_[index].load(std::memory_order_acquire);
      if (__builtin_expect(inst != nullptr, true)) return *inst;
    }
    return Add(pc);
  }

 protected:
  // At() for an instruction that is not in the table.
  virtual const Inst& Add(uint64_t pc) = 0;

  // One entry every four bytes from `base_`, null before its first use.
  uint64_t base_ = 0, count_ = 0;
  std::unique_ptr<std::atomic<const Inst*>[]> table_;
};

// One instruction of `bytes` at pc, by LLVM's disassembler, where a0 is vector
// register `accum_offset`. Throws as At.
Inst Decode(Arch arch, int accum_offset, uint64_t pc, const uint8_t* bytes,
            uint64_t size);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_DECODE_H_
