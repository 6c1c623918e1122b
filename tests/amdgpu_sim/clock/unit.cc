// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/clock/unit.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <limits>
#include <unordered_map>
#include <utility>

namespace amdgpu_sim {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kVmLimit = 63, kLgkmLimit = 15;

// A set-associative cache of lines, the least recently used one leaves.
class Cache {
 public:
  Cache(double bytes, double line)
      : sets_(std::max<int>(1, static_cast<int>(bytes / line) / kWays)),
        lines_(sets_) {}

  struct Line {
    uint64_t number = 0;
    double arrival = 0;  // It may be on its way.
  };

  // The line, or null if it is not there: then it is from now on.
  Line* Find(uint64_t number) {
    std::deque<Line>& set = lines_[number % sets_];
    auto found = std::find_if(set.begin(), set.end(), [&](const Line& line) {
      return line.number == number;
    });
    if (found == set.end()) {
      if (set.size() == kWays) set.pop_back();
      set.push_front({number, 0});
      return nullptr;
    }
    std::rotate(set.begin(), found, found + 1);
    return &set.front();
  }

  void SetArrival(uint64_t number, double arrival) {
    std::deque<Line>& set = lines_[number % sets_];
    if (set.front().number == number) set.front().arrival = arrival;
  }

 private:
  static constexpr int kWays = 64;
  int sets_;
  std::vector<std::deque<Line>> lines_;  // The latest used first.
};

struct Wave {
  const WaveTrace* trace = nullptr;
  int group = 0, simd = 0;
  size_t at = 0;  // The event that is next.
  double next = 0;
  Stall branch = Stall::kNone;  // kBranch if the one before jumped.
  bool waiting = false;         // At a barrier.
  std::deque<double> vm, lgkm;  // When the operations that count are done.
  // When a register may be read, and may be added to by a matrix instruction.
  std::vector<double> ready, chain;
};

struct Simd {
  double vector = 0, matrix = 0, scalar = 0, lds = 0, memory = 0;
};

// Of a matrix instruction, a product and a sum two: v_mfma_f32_32x32x8_f16
// makes of 8 products each number of its result, whose registers say how many
// these are.
double Operations(const Inst& inst) {
  if (inst.inst_class != InstClass::kMfma) return 0;
  const char* const n = std::strchr(inst.mnemonic, 'x') + 1;
  const double k = std::atoi(std::strchr(n, 'x') + 1);
  const bool doubles = std::strncmp(inst.mnemonic, "v_mfma_f64", 10) == 0;
  return 2 * k * kLanes * inst.dst[0].count / (doubles ? 2 : 1);
}

// Counters of s_waitcnt.
int VmOf(const Inst& inst) { return (inst.imm & 15) | (inst.imm >> 10 & 0x30); }
int LgkmOf(const Inst& inst) { return inst.imm >> 8 & 15; }

class Unit {
 public:
  Unit(const Device& device, const Behind& behind,
       const std::vector<const GroupTrace*>& groups, bool timeline)
      : d_(device),
        behind_(behind),
        timeline_(timeline),
        simds_(static_cast<int>(device.simds)),
        arrived_(groups.size()),
        fetched_(groups.size()),
        l1_(device.l1_bytes, device.l1_line) {
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t w = 0; w < groups[g]->waves.size(); ++w) {
        Wave wave;
        wave.trace = &groups[g]->waves[w];
        wave.group = static_cast<int>(g);
        // In turn, over all workgroups: those of one wave fill all SIMDs.
        wave.simd = static_cast<int>(waves_.size() % simds_.size());
        wave.ready.assign(kVectorRegisters, 0);
        wave.chain.assign(kVectorRegisters, 0);
        waves_.push_back(std::move(wave));
      }
    }
  }

  UnitReport Run() {
    // The wave that may issue first does; of several the oldest.
    while (true) {
      Wave* first = nullptr;
      double when = kNever;
      Stall why = Stall::kNone;
      for (Wave& wave : waves_) {
        if (wave.at == wave.trace->events.size() || wave.waiting) continue;
        if (wave.next >= when) continue;
        Stall reason = Stall::kNone;
        const double time = Earliest(wave, &reason);
        if (time >= when) continue;
        first = &wave;
        when = time;
        why = reason;
      }
      if (first == nullptr) break;
      Issue(*first, when, why);
    }
    for (const auto& [pc, place] : report_.places) {
      report_.operations += place.count * Operations(*place.inst);
    }
    return std::move(report_);
  }

 private:
  // When the wave's next instruction can issue, and what it waits for.
  double Earliest(const Wave& wave, Stall* reason) const {
    const Event& event = wave.trace->events[wave.at];
    const Inst& inst = *event.inst;
    const Simd& simd = simds_[wave.simd];
    double time = wave.next;
    *reason = wave.branch;
    auto until = [&](double end, Stall stall) {
      if (end <= time) return;
      time = end;
      *reason = stall;
    };
    switch (inst.inst_class) {
      case InstClass::kWait:
        if (std::strcmp(inst.mnemonic, "s_waitcnt") != 0) break;
        until(Done(wave.vm, VmOf(inst)), Stall::kVmcnt);
        until(Done(wave.lgkm, LgkmOf(inst)), Stall::kLgkmcnt);
        break;
      case InstClass::kSalu:
      case InstClass::kBranch:
        until(simd.scalar, Stall::kScalar);
        break;
      case InstClass::kSmem:
        until(simd.scalar, Stall::kScalar);
        until(Done(wave.lgkm, kLgkmLimit - 1), Stall::kLgkmcnt);
        break;
      case InstClass::kValu:
      case InstClass::kTrans:
        until(Operands(wave, inst), Stall::kDependent);
        until(simd.vector, Stall::kVector);
        break;
      case InstClass::kMfma:
        until(Operands(wave, inst), Stall::kDependent);
        until(simd.vector, Stall::kVector);
        until(simd.matrix, Stall::kMatrix);
        break;
      case InstClass::kLds:
        until(Operands(wave, inst), Stall::kDependent);
        until(simd.lds, Stall::kLds);
        until(Done(wave.lgkm, kLgkmLimit - 1), Stall::kLgkmcnt);
        break;
      case InstClass::kGlobal:
      case InstClass::kScratch:
        until(Operands(wave, inst), Stall::kDependent);
        until(simd.memory, Stall::kMemory);
        until(Done(wave.vm, kVmLimit - 1), Stall::kVmcnt);
        break;
      default:
        break;
    }
    return time;
  }

  // When at most so many of a counter's operations are left.
  static double Done(const std::deque<double>& operations, int left) {
    const int done = static_cast<int>(operations.size()) - left;
    return done <= 0 ? 0 : operations[done - 1];
  }

  static double Latest(const std::vector<double>& times, const Operand& o) {
    double time = 0;
    if (o.kind != Operand::Kind::kVector) return time;
    for (int i = 0; i < o.count; ++i) time = std::max(time, times[o.reg + i]);
    return time;
  }

  // When the vector registers may be read and written. A matrix instruction
  // that adds to the result of one before it need not wait for others to be
  // able to read that.
  static double Operands(const Wave& wave, const Inst& inst) {
    const bool adds = inst.inst_class == InstClass::kMfma &&
                      inst.src[2].reg == inst.dst[0].reg;
    double time = 0;
    for (const Operand& o : inst.dst) {
      time = std::max(time, Latest(adds ? wave.chain : wave.ready, o));
    }
    for (const Operand& o : inst.src) {
      const bool chained = adds && &o == &inst.src[2];
      time = std::max(time, Latest(chained ? wave.chain : wave.ready, o));
    }
    return time;
  }

  static void Mark(std::vector<double>* times, const Operand& o, double time) {
    if (o.kind != Operand::Kind::kVector) return;
    for (int i = 0; i < o.count; ++i) (*times)[o.reg + i] = time;
  }

  void Issue(Wave& wave, double time, Stall why) {
    const Event& event = wave.trace->events[wave.at++];
    const Inst& inst = *event.inst;
    Simd& simd = simds_[wave.simd];
    UnitReport::Place& place = report_.places[inst.pc];
    place.inst = &inst;
    ++place.count;
    const double stalled = time - wave.next;
    if (wave.branch != Stall::kNone) {
      Account(&place, Stall::kBranch, d_.taken_branch);
    }
    Account(&place, why == Stall::kBranch ? Stall::kNone : why, stalled);
    Account(&place, Stall::kNone, d_.slot);
    Show(wave, inst, why, wave.next, time);
    Show(wave, inst, Stall::kNone, time, time + Busy(inst));
    wave.branch = Stall::kNone;
    wave.next = time + d_.slot;

    switch (inst.inst_class) {
      case InstClass::kSalu:
      case InstClass::kBranch:
        Take(&simd.scalar, time, d_.slot, &report_.scalar);
        break;
      case InstClass::kSmem:
        Take(&simd.scalar, time, d_.slot, &report_.scalar);
        wave.lgkm.push_back(time + d_.scalar_latency);
        break;
      case InstClass::kValu:
      case InstClass::kTrans: {
        const double clocks = Busy(inst);
        Take(&simd.vector, time, clocks, &report_.vector);
        for (const Operand& o : inst.dst) {
          Mark(&wave.ready, o, time + clocks);
          Mark(&wave.chain, o, time + clocks);
        }
        break;
      }
      case InstClass::kMfma: {
        const double clocks = Busy(inst);
        Take(&simd.matrix, time, clocks, &report_.matrix);
        // It is sent by the way of the vector instructions.
        Take(&simd.vector, time, d_.slot, &report_.vector);
        Mark(&wave.chain, inst.dst[0], time + clocks);
        Mark(&wave.ready, inst.dst[0],
             time + clocks + d_.matrix_slots * d_.slot);
        break;
      }
      case InstClass::kLds:
        simd.lds = time + d_.slot;
        wave.lgkm.push_back(Lds(event, time) + d_.lds_latency);
        break;
      case InstClass::kGlobal:
      case InstClass::kScratch:
        simd.memory = time + d_.slot;
        wave.vm.push_back(Memory(wave, event, time));
        break;
      case InstClass::kWait:
        if (std::strcmp(inst.mnemonic, "s_waitcnt") != 0) break;
        Forget(&wave.vm, VmOf(inst));
        Forget(&wave.lgkm, LgkmOf(inst));
        break;
      case InstClass::kOtherScalar:
        // Wait states, 4 clocks each.
        if (std::strcmp(inst.mnemonic, "s_nop") == 0) {
          wave.next += d_.slot * (inst.imm & 15);
        }
        break;
      case InstClass::kBarrier:
        Arrive(&wave);
        break;
      default:
        break;
    }
    if (event.jumped) {
      wave.next += d_.taken_branch;
      wave.branch = Stall::kBranch;
    }
    if (wave.at == wave.trace->events.size()) {
      report_.wave_clocks += wave.next;
      // What it still waits for is a store's end.
      for (const std::deque<double>* counter : {&wave.vm, &wave.lgkm}) {
        for (double end : *counter) wave.next = std::max(wave.next, end);
      }
      report_.clocks = std::max(report_.clocks, wave.next);
      Release(wave.group);
    }
  }

  void Account(UnitReport::Place* place, Stall stall, double clocks) {
    place->stalls[static_cast<int>(stall)] += clocks;
    report_.stalls[static_cast<int>(stall)] += clocks;
  }

  void Show(const Wave& wave, const Inst& inst, Stall stall, double begin,
            double end) {
    if (!timeline_ || end <= begin) return;
    report_.timeline.push_back(
        {static_cast<int>(&wave - waves_.data()), &inst, stall, begin, end});
  }

  // Clocks in which an instruction keeps a vector or a matrix unit busy, or
  // its slot.
  double Busy(const Inst& inst) const {
    switch (inst.inst_class) {
      case InstClass::kMfma:
        return d_.pass * inst.mfma_passes;
      case InstClass::kTrans:
        return d_.transcendental;
      case InstClass::kValu:
        return d_.vector;
      default:
        return d_.slot;
    }
  }

  static void Take(double* until, double time, double clocks, double* busy) {
    *until = time + clocks;
    *busy += clocks;
  }

  // Operations return in order; scalar loads do not, but nobody may count them.
  static void Forget(std::deque<double>* operations, int left) {
    while (static_cast<int>(operations->size()) > left) {
      operations->pop_front();
    }
  }

  // The end of an access to LDS, which serves one after another.
  double Lds(const Event& event, double time) {
    const double clocks = (event.lds_clocks + event.lds_conflicts) *
                          (event.lds_write ? d_.lds_write_factor : 1);
    lds_ = std::max(lds_, time) + clocks;
    report_.lds += clocks;
    report_.lds_conflicts += event.lds_conflicts;
    return lds_;
  }

  // The end of an access to memory. Accesses go through the L1 in order, 64
  // bytes a piece, and their misses through what is behind it.
  double Memory(const Wave& wave, const Event& event, double time) {
    constexpr double kPiece = 64;
    const double clocks =
        std::max<double>(d_.address_clocks, event.lines * kPiece / d_.l1_rate);
    l1_free_ = std::max(l1_free_, time) + clocks;
    report_.memory += clocks;
    report_.l1_bytes += event.lines * kPiece;
    double end = l1_free_ + d_.l1_latency;
    uint64_t last = ~uint64_t{0};
    for (int i = 0; i < event.lines; ++i) {
      const uint64_t piece = wave.trace->lines[event.first_line + i];
      const uint64_t line = static_cast<uint64_t>(piece * kPiece / d_.l1_line);
      if (!event.write && line == last) continue;
      last = line;
      const Cache::Line* found = event.write ? nullptr : l1_.Find(line);
      if (found != nullptr) {
        end = std::max(end, found->arrival);
        continue;
      }
      const double bytes = event.write ? kPiece : d_.l1_line;
      const Source& source =
          event.write ? SourceOf(piece) : Loaded(wave.group, line, piece);
      const double clocks = bytes * source.clocks;
      report_.behind += clocks;
      report_.memory_bytes += bytes;
      report_.hbm_bytes += bytes * source.hbm;
      if (event.atomic) {
        // What adds them up is beside what loads and stores take.
        atomic_free_ =
            std::max(atomic_free_, l1_free_) + bytes * behind_.atomic_clocks;
        end = std::max(end, atomic_free_ + source.latency);
        continue;
      }
      behind_free_ = std::max(behind_free_, l1_free_) + clocks;
      end = std::max(end, behind_free_ + source.latency);
      if (!event.write) l1_.SetArrival(line, end);
    }
    // A load to LDS takes its clocks there. They are booked now, so that reads
    // before it comes need not wait for it.
    if (event.lds_clocks > 0) {
      const double before = std::max(lds_, time);
      end += Lds(event, time) - before;
    }
    // In order.
    return wave.vm.empty() ? end : std::max(end, wave.vm.back());
  }

  const Source& SourceOf(uint64_t piece) const {
    return std::prev(behind_.sources.upper_bound(piece))->second;
  }

  // Where a line is that the L1 has not, or has no longer.
  const Source& Loaded(int group, uint64_t line, uint64_t piece) {
    const auto [before, first] = fetched_[group].try_emplace(line, asked_);
    // With the line itself.
    const double since = asked_ - before->second;
    before->second = asked_;
    asked_ += d_.l1_line;
    if (first) return SourceOf(piece);
    if (since <= behind_.l2_bytes) return behind_.l2;
    if (since <= behind_.mall_bytes) return behind_.mall;
    return behind_.hbm;
  }

  void Arrive(Wave* wave) {
    wave->waiting = true;
    arrived_[wave->group] = std::max(arrived_[wave->group], wave->next);
    Release(wave->group);
  }

  // Lets a group's waves go on if all that have not ended are at the barrier.
  void Release(int group) {
    for (const Wave& wave : waves_) {
      if (wave.group == group && !wave.waiting &&
          wave.at < wave.trace->events.size()) {
        return;
      }
    }
    for (Wave& wave : waves_) {
      if (wave.group != group || !wave.waiting) continue;
      const double end = arrived_[group] + d_.barrier;
      const Inst& inst = *wave.trace->events[wave.at - 1].inst;
      Account(&report_.places[inst.pc], Stall::kBarrier, end - wave.next);
      Show(wave, inst, Stall::kBarrier, wave.next, end);
      wave.next = end;
      wave.waiting = false;
    }
    arrived_[group] = 0;
  }

  const Device& d_;
  const Behind& behind_;
  const bool timeline_;
  std::vector<Simd> simds_;
  std::vector<Wave> waves_;
  std::vector<double> arrived_;  // The last wave of a group at its barrier.
  // Of each group: lines, and what was asked_ when it last asked for them.
  std::vector<std::unordered_map<uint64_t, double>> fetched_;
  double asked_ = 0;  // Bytes of lines that the L1 had not.
  double lds_ = 0, l1_free_ = 0, behind_free_ = 0, atomic_free_ = 0;
  Cache l1_;
  UnitReport report_;
};

}  // namespace

const char* StallName(Stall stall) {
  constexpr const char* kNames[] = {"issue",   "dependent", "matrix", "vector",
                                    "scalar",  "lds",       "memory", "vmcnt",
                                    "lgkmcnt", "barrier",   "branch"};
  return kNames[static_cast<int>(stall)];
}

UnitReport RunUnit(const Device& device, const Behind& behind,
                   const std::vector<const GroupTrace*>& groups,
                   bool timeline) {
  return Unit(device, behind, groups, timeline).Run();
}

}  // namespace amdgpu_sim
