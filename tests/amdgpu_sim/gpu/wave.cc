// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/gpu/wave.h"

#include <cstdio>
#include <string>

#include "tests/amdgpu_sim/gpu/lds.h"
#include "tests/amdgpu_sim/gpu/workgroup.h"
#include "tests/amdgpu_sim/isa/inst.h"

namespace amdgpu_sim {
namespace {

// Bit operations on registers [first, first + count), which may lie in more
// than one word.
template <typename F>
void ForWords(unsigned first, unsigned count, F&& f) {
  while (count > 0) {
    unsigned shift = first % 64;
    unsigned part = count < 64 - shift ? count : 64 - shift;
    uint64_t mask = (part == 64 ? ~uint64_t{0} : (uint64_t{1} << part) - 1)
                    << shift;
    f(first / 64, mask);
    first += part;
    count -= part;
  }
}

std::string RegisterName(bool scalar, unsigned reg, unsigned accum_offset) {
  if (scalar) {
    if (reg == kVcc) return "vcc_lo";
    if (reg == kVcc + 1) return "vcc_hi";
    return "s" + std::to_string(reg);
  }
  return reg < accum_offset ? "v" + std::to_string(reg)
                            : "a" + std::to_string(reg - accum_offset);
}

bool Overlap(const Outstanding::Operation& operation, bool scalar,
             unsigned first, unsigned count) {
  return operation.scalar == scalar && operation.first < first + count &&
         first < unsigned{operation.first} + operation.count;
}

}  // namespace

void Outstanding::Clear() {
  size_ = 0;
  watched_ = 0;
  std::memset(vector_, 0, sizeof(vector_));
  std::memset(scalar_, 0, sizeof(scalar_));
}

void Outstanding::Mark(const Operation& operation) {
  uint64_t* bits = operation.scalar ? scalar_ : vector_;
  ForWords(operation.first, operation.count,
           [&](unsigned word, uint64_t mask) { bits[word] |= mask; });
}

void Outstanding::Add(const Operation& operation) {
  if (size_ == kCapacity) {
    // More than the counter holds: the oldest must have returned.
    if (operations_[0].count > 0) --watched_;
    std::memmove(operations_, operations_ + 1,
                 (kCapacity - 1) * sizeof(Operation));
    --size_;
  }
  operations_[size_++] = operation;
  if (operation.count > 0) {
    ++watched_;
    Mark(operation);
  }
  // The wave does not issue beyond what its counter can count.
  if (size_ > limit_) Wait(limit_);
}

void Outstanding::Wait(int remaining) {
  if (size_ <= remaining) return;
  if (remaining == 0) {
    // Few operations have many registers; clear only theirs.
    if (watched_ > 0) {
      for (int i = 0; i < size_; ++i) {
        uint64_t* bits = operations_[i].scalar ? scalar_ : vector_;
        ForWords(operations_[i].first, operations_[i].count,
                 [&](unsigned word, uint64_t mask) { bits[word] &= ~mask; });
      }
    }
    size_ = 0;
    watched_ = 0;
    return;
  }
  int ordered = 0;
  for (int i = 0; i < size_; ++i) ordered += operations_[i].ordered;
  if (ordered <= remaining) return;
  int done = ordered - remaining;
  int kept = 0;
  bool cleared = false;
  for (int i = 0; i < size_; ++i) {
    const Operation& operation = operations_[i];
    if (operation.ordered && done > 0) {
      --done;
      if (operation.count > 0) {
        --watched_;
        cleared = true;
        uint64_t* bits = operation.scalar ? scalar_ : vector_;
        ForWords(operation.first, operation.count,
                 [&](unsigned word, uint64_t mask) { bits[word] &= ~mask; });
      }
    } else {
      if (kept != i) operations_[kept] = operation;
      ++kept;
    }
  }
  size_ = kept;
  // Another operation may write the same registers.
  if (cleared && watched_ > 0) {
    for (int i = 0; i < size_; ++i) Mark(operations_[i]);
  }
}

bool Outstanding::Touches(bool scalar, unsigned first, unsigned count) const {
  const uint64_t* bits = scalar ? scalar_ : vector_;
  if (first % 64 + count <= 64) {
    uint64_t part = bits[first / 64] >> first % 64;
    return (count == 64 ? part : part & ((uint64_t{1} << count) - 1)) != 0;
  }
  bool any = false;
  ForWords(first, count, [&](unsigned word, uint64_t mask) {
    any |= (bits[word] & mask) != 0;
  });
  return any;
}

bool Outstanding::Has(uint64_t sequence) const {
  for (int i = 0; i < size_; ++i) {
    if (operations_[i].sequence == sequence) return true;
  }
  return false;
}

uint8_t* Wave::Lds(uint32_t address, int bytes, Access access, int lane) {
  return workgroup->lds().Reach(*this, address, bytes, access, lane);
}

void Wave::LdsAll(const uint32_t* address, int bytes, Access access,
                  uint64_t lanes, uint8_t** out) {
  workgroup->lds().ReachAll(*this, address, bytes, access, lanes, out);
}

uint8_t* Wave::Scratch(uint32_t offset, int bytes, Access access, int lane) {
  if (offset >= scratch_size ||
      static_cast<uint32_t>(bytes) > scratch_size - offset) {
    throw Fault{Check::kOutOfBounds,
                "scratch access of " + std::to_string(bytes) +
                    " bytes, a lane has " + std::to_string(scratch_size),
                lane, offset};
  }
  size_t at = size_t{scratch_size} * lane + offset;
  if (access != Access::kWrite && access != Access::kAtomicWrite &&
      CheckEnabled(Check::kUninitialized)) {
    for (int i = 0; i < bytes; ++i) {
      if (scratch_written[at + i] != 0) continue;
      throw Fault{Check::kUninitialized,
                  "scratch read of " + std::to_string(bytes) +
                      " bytes, some of which nobody wrote",
                  lane, offset + i};
    }
  }
  if (access != Access::kRead && access != Access::kAtomicRead) {
    std::memset(&scratch_written[at], 1, bytes);
  }
  return &scratch[at];
}

void Wave::ScratchAll(const uint32_t* offset, int bytes, Access access,
                      uint64_t lanes, uint8_t** out) {
  for (; lanes != 0; lanes &= lanes - 1) {
    int lane = __builtin_ctzll(lanes);
    out[lane] = Scratch(offset[lane], bytes, access, lane);
  }
}

void Wave::Announce(Counter counter, bool scalar, int first, int count) {
  if (counter == Counter::kExp) return;  // Only exports count there.
  Outstanding::Operation operation;
  operation.inst = current;
  operation.sequence = sequence;
  operation.scalar = scalar;
  operation.first = static_cast<uint16_t>(first);
  operation.count = static_cast<uint16_t>(count);
  // Scalar loads return in any order, and flat ones too: they may go to LDS.
  bool flat =
      current != nullptr && std::strncmp(current->mnemonic, "flat_", 5) == 0;
  operation.ordered =
      !flat && (counter == Counter::kVm ||
                (!scalar && (current == nullptr ||
                             current->inst_class == InstClass::kLds)));
  (counter == Counter::kVm ? vm : lgkm).Add(operation);
}

void Wave::Wait(Counter counter, int outstanding) {
  if (counter == Counter::kVm) vm.Wait(outstanding);
  if (counter == Counter::kLgkm) lgkm.Wait(outstanding);
}

void Wave::CheckWatched(const Inst& inst) const {
  for (int i = 0; i < inst.use_count; ++i) {
    const RegRange& use = inst.uses[i];
    bool in_vm = vm.Touches(use.scalar, use.first, use.count);
    bool in_lgkm = lgkm.Touches(use.scalar, use.first, use.count);
    if (__builtin_expect(!in_vm && !in_lgkm, true)) continue;
    // Vector memory returns in order, and so does LDS: a load may overwrite
    // what an earlier one of the same kind has yet to write.
    bool result = inst.dst[0].kind == Operand::Kind::kVector && !use.scalar &&
                  use.first == inst.dst[0].reg &&
                  std::strncmp(inst.mnemonic, "flat_", 5) != 0;
    for (const Operand& source : inst.src) {
      if (source.kind == Operand::Kind::kVector &&
          source.reg < use.first + use.count &&
          use.first < source.reg + source.count) {
        result = false;
      }
    }
    for (const Outstanding* counter : {&vm, &lgkm}) {
      bool same =
          result && (counter == &vm ? inst.inst_class == InstClass::kGlobal ||
                                          inst.inst_class == InstClass::kScratch
                                    : inst.inst_class == InstClass::kLds);
      for (int j = 0; j < counter->size(); ++j) {
        const Outstanding::Operation& operation = (*counter)[j];
        if (!Overlap(operation, use.scalar, use.first, use.count)) continue;
        if (same && operation.ordered) continue;
        unsigned reg =
            operation.first > use.first ? operation.first : use.first;
        char distance[32];
        std::snprintf(distance, sizeof(distance), "%lld bytes",
                      static_cast<long long>(inst.pc - operation.inst->pc));
        throw Fault{Check::kWaitcnt,
                    RegisterName(use.scalar, reg, accum_offset) +
                        " is used before the s_waitcnt " +
                        (counter == &vm ? "vmcnt" : "lgkmcnt") +
                        " of the operation " + distance +
                        " before: " + operation.inst->text,
                    -1, 0};
      }
    }
  }
}

}  // namespace amdgpu_sim
