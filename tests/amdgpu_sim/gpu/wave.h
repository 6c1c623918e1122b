// SPDX-License-Identifier: Apache-2.0

// A wave's state, and what its instructions may ask of the workgroup.
#ifndef AMDGPU_SIM_GPU_WAVE_H_
#define AMDGPU_SIM_GPU_WAVE_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/amdgpu_sim/gpu/fault.h"
#include "tests/amdgpu_sim/gpu/memory.h"

namespace amdgpu_sim {

constexpr int kLanes = 64;

// The scalar registers by operand number.
enum ScalarRegister : int {
  kFlatScratch = 102,
  kXnackMask = 104,
  kVcc = 106,
  kTtmp = 108,
  kM0 = 124,
  kExec = 126,
  kScalarRegisters = 128,
};

// The unified vector register file. A kernel's a0 is the register after those
// that it has as v registers, v(accum_offset): a v register of a higher number
// is an accumulation register by another name, and hand-written kernels know.
constexpr int kVectorRegisters = 512;

// High halves of flat addresses that mean LDS and scratch; the low half is the
// offset in LDS or in the lane's private segment. They are what the Linux
// driver sets, and above every address of a host's process.
constexpr uint32_t kSharedAperture = 0x10000;
constexpr uint32_t kPrivateAperture = 0x20000;

enum class Arch : uint8_t { kGfx90a, kGfx942, kGfx950 };

// Bits of the MODE register.
struct Mode {
  uint32_t bits = 0;
  int round32() const { return bits & 3; }  // 0 even, 1 up, 2 down, 3 zero
  int round16_64() const { return bits >> 2 & 3; }
  int denorm32() const {
    return bits >> 4 & 3;
  }  // bit 0 inputs, 1 outputs kept
  int denorm16_64() const { return bits >> 6 & 3; }
  bool dx10_clamp() const { return bits >> 8 & 1; }
  bool ieee() const { return bits >> 9 & 1; }
  bool fp16_overflow() const { return bits >> 23 & 1; }
};

// Counters of s_waitcnt.
enum class Counter : uint8_t { kVm, kLgkm, kExp };

class Workgroup;  // gpu/workgroup.h
struct Inst;      // isa/inst.h

// The memory operations of a wave that one counter counts.
class Outstanding {
 public:
  struct Operation {
    const Inst* inst = nullptr;
    uint64_t sequence = 0;  // Which execution of it, counted by the wave.
    uint16_t first = 0, count = 0;
    bool scalar = false;
    bool ordered = true;  // Returns after the ordered ones before it.
  };
  // The counter's width allows so many.
  explicit Outstanding(int limit) : limit_(limit) {}

  void Clear();
  void Add(const Operation& operation);
  // s_waitcnt. At most `remaining` are outstanding, and the ordered ones
  // return in order: so at most the last `remaining` of those. Of unordered
  // ones nothing is known until none remains.
  void Wait(int remaining);

  bool empty() const { return size_ == 0; }
  int size() const { return size_; }
  const Operation& operator[](int index) const { return operations_[index]; }

  // Whether one of the registers waits for its value.
  bool Touches(bool scalar, unsigned first, unsigned count) const;
  // Whether any register does.
  bool watched() const { return watched_ != 0; }
  bool Has(uint64_t sequence) const;

 private:
  void Mark(const Operation& operation);

  static constexpr int kCapacity = 80;
  int limit_;
  int size_ = 0;
  int watched_ = 0;  // Operations with registers.
  Operation operations_[kCapacity];
  uint64_t vector_[kVectorRegisters / 64 + 1] = {};  // A word to read past.
  uint64_t scalar_[kScalarRegisters / 64 + 1] = {};
};

struct Wave {
  alignas(64) uint32_t v[kVectorRegisters][kLanes];
  alignas(64) uint32_t s[kScalarRegisters];
  uint64_t pc = 0;  // Of the next instruction; a branch sets it.
  bool scc = false;
  bool ended = false;
  bool at_barrier = false;
  bool skips = false;  // s_setvskip: vector instructions do nothing.
  Arch arch = Arch::kGfx942;
  Mode mode;
  Workgroup* workgroup = nullptr;
  int index = 0;           // In its workgroup.
  int accum_offset = 256;  // Which vector register is a0.

  uint64_t s64(int reg) const {
    uint64_t value;
    std::memcpy(&value, &s[reg], 8);
    return value;
  }
  void set_s64(int reg, uint64_t value) { std::memcpy(&s[reg], &value, 8); }
  uint64_t exec() const { return s64(kExec); }
  uint64_t vcc() const { return s64(kVcc); }

  // For memory instructions (gpu/wave.cc).

  // Global memory, checked, for `lane`; -1 is a scalar access.
  uint8_t* Global(uint64_t address, int bytes, Access access, int lane) {
    return memory->Reach(address, bytes, access, lane);
  }
  // LDS, checked for bounds, races and unwritten bytes. `address` is the full
  // 32-bit sum of address and offset. The caller writes through the pointer
  // before its instruction ends.
  uint8_t* Lds(uint32_t address, int bytes, Access access, int lane);
  // The private segment of a lane, at a byte offset of its own.
  uint8_t* Scratch(uint32_t offset, int bytes, Access access, int lane);

  // The same for the lanes of a mask.
  void GlobalAll(const uint64_t* address, int bytes, Access access,
                 uint64_t lanes, uint8_t** out) {
    memory->ReachAll(address, bytes, access, lanes, out);
  }
  void LdsAll(const uint32_t* address, int bytes, Access access, uint64_t lanes,
              uint8_t** out);
  void ScratchAll(const uint32_t* offset, int bytes, Access access,
                  uint64_t lanes, uint8_t** out);

  // Says that registers [first, first + count) are written when `counter`
  // gets there: until a wait for it, using them is a fault. `scalar` tells
  // which file. A store announces count 0. Flat loads announce on both
  // counters. Scalar loads (out of order) announce scalar registers on kLgkm.
  void Announce(Counter counter, bool scalar, int first, int count);
  // s_waitcnt: at most so many operations remain outstanding.
  void Wait(Counter counter, int outstanding);
  // s_barrier, called by the instruction; the workgroup then switches waves.
  void ArriveAtBarrier() { at_barrier = true; }

  // The workgroup's side.

  // Throws if the instruction uses a register that waits for its value.
  void CheckUses(const Inst& inst) const {
    if (vm.watched() || lgkm.watched()) CheckWatched(inst);
  }
  void CheckWatched(const Inst& inst) const;

  MemoryView* memory = nullptr;   // The launch's.
  const Inst* current = nullptr;  // Being executed.
  uint64_t sequence = 0;          // Instructions executed.
  Outstanding vm{63}, lgkm{15};

  // The private segment: a lane's bytes are contiguous. Empty without one.
  uint32_t scratch_size = 0;  // Bytes of a lane.
  std::vector<uint8_t> scratch;
  std::vector<uint8_t> scratch_written;
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_GPU_WAVE_H_
