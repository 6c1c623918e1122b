// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/gpu/workgroup.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/amdgpu_sim/clock/clock.h"
#include "tests/amdgpu_sim/isa/float.h"
#include "tests/amdgpu_sim/isa/inst.h"

namespace amdgpu_sim {
namespace {

// Instructions of a wave until another one has its turn: few enough that a
// wave sees what it spins on, many enough to keep registers in the cache.
constexpr uint64_t kTurn = 8192;

// AMDGPU_SIM_TURN: another number. With 1 the waves of a workgroup go in step.
uint64_t Turn() {
  static const uint64_t turn = [] {
    const char* value = std::getenv("AMDGPU_SIM_TURN");
    uint64_t number = value == nullptr ? 0 : std::strtoull(value, nullptr, 0);
    return number == 0 ? kTurn : number;
  }();
  return turn;
}

// A NaN as f64, f32, bf16 and both halves of f16; no address. Fills registers
// that nobody wrote.
constexpr uint32_t kPoison = 0x7ff77ff7;

}  // namespace

void Workgroup::Start(const KernelSetup& setup, MemoryView* memory,
                      uint64_t number, const uint32_t (&id)[3]) {
  setup_ = &setup;
  number_ = number;
  std::copy(id, id + 3, id_);
  executed_ = 0;
  turn_ = 0;
  count_ = setup.waves;
  running_ = nullptr;
  tracer_ = nullptr;
  apart_.clear();
  lds_.Reset(setup.lds_size, setup.waves, setup.quiet_checks);
  while (waves_.size() < static_cast<size_t>(count_)) {
    waves_.push_back(std::unique_ptr<Wave>(new Wave));
  }
  for (int i = 0; i < count_; ++i) {
    waves_[i]->index = i;
    SetUpWave(*waves_[i], setup, memory);
  }
}

void Workgroup::SetUpWave(Wave& wave, const KernelSetup& setup,
                          MemoryView* memory) {
  std::fill_n(&wave.v[0][0], setup.vector_registers * kLanes, kPoison);
  std::fill_n(wave.s, kScalarRegisters, kPoison);
  wave.pc = setup.entry;
  wave.scc = wave.ended = wave.at_barrier = wave.skips = false;
  wave.arch = setup.arch;
  wave.accum_offset = setup.accum_offset;
  wave.mode.bits = setup.mode;
  wave.workgroup = this;
  wave.memory = memory;
  wave.current = nullptr;
  wave.sequence = 0;
  wave.vm.Clear();
  wave.lgkm.Clear();

  std::copy(setup.user, setup.user + setup.users, wave.s);
  int next = setup.users;
  for (int axis = 0; axis < 3; ++axis) {
    if (setup.id[axis]) wave.s[next++] = id_[axis];
  }
  if (setup.wave_offset) wave.s[next++] = 0;
  wave.set_s64(kFlatScratch, 0);

  uint32_t first = wave.index * kLanes;
  uint32_t lanes = std::min<uint32_t>(setup.work_items - first, kLanes);
  wave.set_s64(kExec, lanes == 64 ? ~uint64_t{0} : (uint64_t{1} << lanes) - 1);
  for (uint32_t lane = 0; lane < lanes; ++lane) {
    uint32_t item = first + lane;
    uint32_t x = item % setup.block[0];
    uint32_t y = item / setup.block[0] % setup.block[1];
    uint32_t z = item / setup.block[0] / setup.block[1];
    wave.v[0][lane] = x | y << 10 | z << 20;
  }

  wave.scratch_size = setup.scratch_size;
  if (setup.scratch_size > 0) {
    size_t size = size_t{setup.scratch_size} * kLanes;
    wave.scratch.resize(size);
    wave.scratch_written.assign(size, 0);
  }
}

void Workgroup::CheckRegisters(const Inst& inst) const {
  auto check = [&](bool scalar, int first, int count) {
    if (count == 0 || (scalar && first >= kFlatScratch)) return;
    const int limit =
        scalar ? setup_->scalar_registers : setup_->vector_registers;
    const int last = first + count - 1;
    if (last < limit) return;
    std::string name = (scalar ? "s" : "v") + std::to_string(last);
    if (!scalar && last >= setup_->accum_offset) {
      name += " or a" + std::to_string(last - setup_->accum_offset);
    }
    throw Fault{Check::kRegister, name + " is used, the kernel asked for " +
                                      std::to_string(limit) + " registers"};
  };
  for (int i = 0; i < inst.use_count; ++i) {
    check(inst.uses[i].scalar, inst.uses[i].first, inst.uses[i].count);
  }
}

template <bool kCareful>
uint64_t Workgroup::RunWave(Wave& wave, Program* program, uint64_t turn,
                            Counts* counts) {
  running_ = &wave;
  ApplyMode(wave);
  const bool registers = kCareful && CheckEnabled(Check::kRegister);
  const bool waits = CheckEnabled(Check::kWaitcnt);
  const uint64_t begin = wave.sequence;
  const uint64_t end = begin + turn;
  while (wave.sequence < end) {
    const Inst* inst;
    try {
      inst = &program->At(wave.pc);
    } catch (...) {
      wave.current = nullptr;  // The report is about wave.pc.
      throw;
    }
    wave.current = inst;
    ++wave.sequence;
    if (waits) wave.CheckUses(*inst);
    if (registers) CheckRegisters(*inst);
    wave.pc += inst->bytes;
    inst->execute(wave, *inst);
    lds_.Settle();
    if (kCareful && counts != nullptr) {
      counts->Count(*inst, wave.arch, lds_.Last(wave));
    }
    if (kCareful && tracer_ != nullptr) {
      tracer_->Add(wave, *inst, lds_.Last(wave));
    }
    if (wave.ended | wave.at_barrier | wave.skips |
        (lds_.warning() != nullptr)) {
      break;
    }
  }
  return wave.sequence - begin;
}

void Workgroup::SkipVector(Wave& wave, Program* program) {
  running_ = &wave;
  for (const Inst* inst = &program->At(wave.pc);
       inst->inst_class >= InstClass::kValu; inst = &program->At(wave.pc)) {
    wave.pc += inst->bytes;
  }
}

// Waves that have ended do not count: so the ISA says, and XLA's top_k is such.
// Nor does it matter which barrier each is at: Triton lets half of the waves
// wait at one more in front of a loop, so that the halves take turns, and the
// other half at one behind it. A barrier too few is a fault there: the waves
// were not where they thought to be.
void Workgroup::PassBarrier() {
  const Wave* all[16 + 1];
  int here = 0;
  for (int i = 0; i < count_; ++i) {
    if (waves_[i]->at_barrier) all[here++] = waves_[i].get();
  }
  for (int i = 1; i < here && apart_.empty(); ++i) {
    if (all[i]->pc == all[0]->pc) continue;
    char text[96];
    const auto offset = [&](const Wave* wave) {
      return static_cast<unsigned long long>(wave->pc - wave->current->bytes -
                                             setup_->entry);
    };
    std::snprintf(text, sizeof(text),
                  "waves %d and %d met at two barriers, +0x%llx and +0x%llx",
                  all[0]->index, all[i]->index, offset(all[0]), offset(all[i]));
    apart_ = text;
  }
  if (!apart_.empty() && here < count_ && CheckEnabled(Check::kBarrier)) {
    running_ = all[0];
    throw Fault{Check::kBarrier,
                apart_ + ", and some have ended before this one"};
  }
  lds_.PassBarrier(all, here);
  for (int i = 0; i < count_; ++i) waves_[i]->at_barrier = false;
}

bool Workgroup::Run(Program* program, uint64_t budget, Counts* counts,
                    const std::atomic<bool>* cancel) {
  // All workgroups run the same instructions: the first one's are checked
  // against what the kernel asked for.
  const bool watched = counts != nullptr || tracer_ != nullptr;
  const bool careful = watched || number_ == 0;
  lds_.set_record_all(watched);
  const uint64_t end = executed_ + budget, turn = Turn();
  while (executed_ < end) {
    if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) {
      return false;
    }
    Wave* wave = nullptr;
    bool waiting = false;
    for (int i = 0; i < count_ && wave == nullptr; ++i) {
      Wave* next = waves_[turn_].get();
      turn_ = turn_ + 1 == count_ ? 0 : turn_ + 1;
      if (next->at_barrier) {
        waiting = true;
      } else if (!next->ended) {
        wave = next;
      }
    }
    if (wave == nullptr) {
      if (!waiting) return true;
      PassBarrier();
      turn_ = 0;
      continue;
    }
    if (wave->skips) SkipVector(*wave, program);
    executed_ += careful ? RunWave<true>(*wave, program, turn, counts)
                         : RunWave<false>(*wave, program, turn, counts);
    if (lds_.warning() != nullptr) return false;
  }
  return false;
}

}  // namespace amdgpu_sim
