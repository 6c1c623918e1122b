// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/gpu/launch.h"

#include <immintrin.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/amdgpu_sim/clock/clock.h"
#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/gpu/stats.h"
#include "tests/amdgpu_sim/gpu/workgroup.h"
#include "tests/amdgpu_sim/isa/decode.h"

namespace amdgpu_sim {
namespace {

// Workgroups run one after the other. One that takes longer than this many
// instructions may wait for a later one, so the next ones start beside it.
constexpr uint64_t kSlice = uint64_t{1} << 24;
constexpr size_t kResident = 256;
// So many at most begin only to see whether they end at once.
constexpr uint64_t kMostBegun = 1 << 14;
// One that only begins, of the first round, goes on for so many: later launches
// read what it tells them before its work, such as how many parts there are.
constexpr uint64_t kTold = kFirst;
// Of one that begins so many pieces of memory are looked at.
constexpr size_t kMostPieces = 1 << 16;

// AMDGPU_SIM_LIMIT: instructions of a workgroup that mean it never ends.
uint64_t InstructionLimit() {
  static const uint64_t limit = [] {
    const char* value = std::getenv("AMDGPU_SIM_LIMIT");
    uint64_t number = value == nullptr ? 0 : std::strtoull(value, nullptr, 0);
    return number == 0 ? uint64_t{1} << 32 : number;
  }();
  return limit;
}

template <typename T>
T At(const uint8_t* bytes, int offset) {
  T value;
  std::memcpy(&value, bytes + offset, sizeof(T));
  return value;
}

uint32_t Bits(uint32_t word, int low, int count) {
  return word >> low & ((uint32_t{1} << count) - 1);
}

// The packet that a kernel sees through its dispatch pointer: HSA's
// hsa_kernel_dispatch_packet_t.
struct DispatchPacket {
  uint16_t header = 2;  // A kernel dispatch.
  uint16_t setup = 3;   // Dimensions.
  uint16_t workgroup_size[3];
  uint16_t reserved0 = 0;
  uint32_t grid_size[3];  // In work-items.
  uint32_t private_segment_size;
  uint32_t group_segment_size;
  uint64_t kernel_object;
  uint64_t kernarg_address;
  uint64_t reserved2 = 0;
  uint64_t completion_signal = 0;
};
static_assert(sizeof(DispatchPacket) == 64);

// Memory that the kernel may read while the launch lasts.
class Visible {
 public:
  Visible() = default;
  Visible(const Visible&) = delete;
  ~Visible() {
    if (base_ != 0) Memory::Get().Free(base_);
  }
  void Show(const void* data, uint64_t size, int device) {
    Allocation allocation;
    base_ = reinterpret_cast<uint64_t>(data);
    if (size == 0 || Memory::Get().Find(base_, &allocation)) {
      base_ = 0;
      return;
    }
    Memory::Get().Register(base_, size, MemoryKind::kHost, device, 0);
  }

 private:
  uint64_t base_ = 0;
};

// The host's floating point state, whatever the kernel's is.
class HostState {
 public:
  HostState() : mxcsr_(_mm_getcsr()) {}
  ~HostState() { _mm_setcsr(mxcsr_); }
  HostState(const HostState&) = delete;

 private:
  const unsigned mxcsr_;
};

// Workgroups have megabytes of registers: a thread keeps one or two.
class Pool {
 public:
  std::unique_ptr<Workgroup> Take() {
    if (free_.empty()) return std::make_unique<Workgroup>();
    std::unique_ptr<Workgroup> workgroup = std::move(free_.back());
    free_.pop_back();
    return workgroup;
  }
  void Give(std::unique_ptr<Workgroup> workgroup) {
    if (free_.size() < 2) free_.push_back(std::move(workgroup));
  }

 private:
  std::vector<std::unique_ptr<Workgroup>> free_;
};

class Dispatch {
 public:
  explicit Dispatch(const Launch& launch)
      : launch_(launch),
        total_(uint64_t{1} * launch.grid[0] * launch.grid[1] * launch.grid[2]),
        memory_(total_) {}

  // Throws Fault.
  void SetUp();
  void Run();
  std::string Report(const Fault& fault) const;
  // Prints a report that stops nothing, once for every kernel.
  void Warn(const Fault& fault);

 private:
  void AddUser(uint32_t value) {
    if (setup_.users >= 16) {
      throw Fault{Check::kUnsupported, "more than 16 user SGPRs"};
    }
    setup_.user[setup_.users++] = value;
  }
  void AddUser64(uint64_t value) {
    AddUser(static_cast<uint32_t>(value));
    AddUser(static_cast<uint32_t>(value >> 32));
  }
  uint64_t MakePacket();
  uint64_t MakeQueue();
  void Begin(Workgroup* workgroup);

  // Of workgroups that the model of time wants to see.
  void SetUpClock();
  // Whether one is left to begin.
  bool HasNext() const { return only_ ? !chosen_.empty() : next_ < total_; }
  // More of them, where the first few differ. Returns whether there are any.
  bool AddSamples();
  // Of a workgroup that has ended after so many instructions.
  void NoteClock(uint64_t number, uint64_t executed);
  // Where a workgroup's accesses to memory go; null if nobody asks for them.
  std::vector<uint64_t>* LogOf(const Workgroup& workgroup);
  // Of a workgroup of the first round that has run for kFirst instructions.
  void NoteFirst(uint64_t number);

  const Launch& launch_;
  const uint64_t total_;  // Workgroups.
  KernelSetup setup_;
  Program* program_ = nullptr;  // With the kernel's names of registers.
  MemoryView memory_;
  DispatchPacket packet_;
  uint8_t queue_[256] = {};
  Visible visible_kernarg_, visible_packet_, visible_queue_;
  uint64_t next_ = 0;  // The workgroup to begin next.
  const Workgroup* running_ = nullptr;
  std::deque<std::unique_ptr<Workgroup>> stopped_;  // By a fault.
  Counts counts_;
  uint64_t instructions_ = 0;
  const Device* clock_device_ = nullptr;
  ClockLaunch clock_launch_;
  std::map<uint64_t, Tracer> tracers_;  // By workgroup.
  std::set<uint64_t> samples_;          // Those whose instructions count.
  const bool only_ = ClockOnly();
  std::set<uint64_t> chosen_;  // To begin, if only_.
  std::set<uint64_t> begun_;   // That are not to go on after kEarly.
  uint64_t round_ = 0;         // Workgroups of the first round.
  uint64_t longest_ = 0;       // Instructions of those whose count.
};

uint64_t Dispatch::MakePacket() {
  for (int i = 0; i < 3; ++i) {
    packet_.workgroup_size[i] = static_cast<uint16_t>(launch_.block[i]);
    packet_.grid_size[i] = launch_.grid[i] * launch_.block[i];
  }
  packet_.private_segment_size = setup_.scratch_size;
  packet_.group_segment_size = setup_.lds_size;
  packet_.kernel_object = reinterpret_cast<uint64_t>(launch_.descriptor);
  packet_.kernarg_address = reinterpret_cast<uint64_t>(launch_.kernarg);
  visible_packet_.Show(&packet_, sizeof(packet_), launch_.device);
  return reinterpret_cast<uint64_t>(&packet_);
}

uint64_t Dispatch::MakeQueue() {
  // What code asks of amd_queue_t: the apertures.
  constexpr int kGroupApertureHigh = 0x40, kPrivateApertureHigh = 0x44;
  std::memcpy(queue_ + kGroupApertureHigh, &kSharedAperture, 4);
  std::memcpy(queue_ + kPrivateApertureHigh, &kPrivateAperture, 4);
  visible_queue_.Show(queue_, sizeof(queue_), launch_.device);
  return reinterpret_cast<uint64_t>(queue_);
}

void Dispatch::SetUp() {
  const uint8_t* descriptor = launch_.descriptor;
  const uint32_t lds = At<uint32_t>(descriptor, 0);
  const uint32_t scratch = At<uint32_t>(descriptor, 4);
  const uint32_t rsrc3 = At<uint32_t>(descriptor, 44);
  const uint32_t rsrc1 = At<uint32_t>(descriptor, 48);
  const uint32_t rsrc2 = At<uint32_t>(descriptor, 52);
  const uint32_t properties = At<uint16_t>(descriptor, 56);
  const uint32_t preload = At<uint16_t>(descriptor, 58);

  const std::string arch = launch_.arch;
  if (arch == "gfx90a") {
    setup_.arch = Arch::kGfx90a;
  } else if (arch == "gfx942") {
    setup_.arch = Arch::kGfx942;
  } else if (arch == "gfx950") {
    setup_.arch = Arch::kGfx950;
  } else {
    throw Fault{Check::kUnsupported, "architecture " + arch};
  }
  const bool architected = setup_.arch != Arch::kGfx90a;

  if (Bits(properties, 10, 1)) {
    throw Fault{Check::kUnsupported, "waves of 32 lanes"};
  }
  if (Bits(rsrc2, 10, 1)) {
    throw Fault{Check::kUnsupported, "workgroup info in an SGPR"};
  }
  std::copy(launch_.block, launch_.block + 3, setup_.block);
  const uint64_t work_items =
      uint64_t{1} * launch_.block[0] * launch_.block[1] * launch_.block[2];
  if (work_items == 0 || work_items > 1024) {
    throw Fault{Check::kUnsupported,
                "workgroup of " + std::to_string(work_items) + " work-items"};
  }
  setup_.work_items = static_cast<uint32_t>(work_items);
  setup_.waves = static_cast<int>((work_items + kLanes - 1) / kLanes);
  const uint64_t lds_size = uint64_t{lds} + launch_.dynamic_lds;
  const uint32_t lds_limit =
      setup_.arch == Arch::kGfx950 ? 160 * 1024 : 64 * 1024;
  if (lds_size > lds_limit) {
    throw Fault{Check::kUnsupported, std::to_string(lds_size) +
                                         " bytes of LDS, there are " +
                                         std::to_string(lds_limit)};
  }
  setup_.lds_size = static_cast<uint32_t>(lds_size);

  // A stack of unknown size: what ROCm gives by default is 1 KiB more.
  setup_.scratch_size = Bits(properties, 11, 1) ? scratch + 16384 : scratch;
  // MODE: rounding and denormals in the low byte, then dx10_clamp, ieee.
  setup_.mode = Bits(rsrc1, 12, 8) | Bits(rsrc1, 21, 1) << 8 |
                Bits(rsrc1, 23, 1) << 9 | Bits(rsrc1, 26, 1) << 23;
  setup_.vector_registers = static_cast<int>(Bits(rsrc1, 0, 6) + 1) * 8;
  setup_.accum_offset = static_cast<int>(Bits(rsrc3, 0, 6) + 1) * 4;
  program_ = &launch_.program->WithAccumOffset(setup_.accum_offset);
  setup_.scalar_registers = std::min<int>(
      static_cast<int>(Bits(rsrc1, 6, 4) / 2 + 1) * 16, kFlatScratch);

  // User SGPRs, in this order.
  const bool private_segment = Bits(rsrc2, 0, 1);
  if (Bits(properties, 0, 1)) {
    // The scratch descriptor. Lanes interleave by dword; its offsets are a
    // lane's own, so the base is 0 for every wave.
    AddUser64(uint64_t{1} << 63);  // Swizzle.
    AddUser(0xffffffff);
    constexpr uint32_t kAddTid = 1u << 23, kIndexStride64 = 3u << 21,
                       kFormat = 0xf000;
    AddUser(kAddTid | kIndexStride64 | kFormat);
  }
  if (Bits(properties, 1, 1)) AddUser64(MakePacket());
  if (Bits(properties, 2, 1)) AddUser64(MakeQueue());
  if (Bits(properties, 3, 1)) {
    visible_kernarg_.Show(launch_.kernarg, launch_.kernarg_size,
                          launch_.device);
    AddUser64(reinterpret_cast<uint64_t>(launch_.kernarg));
  }
  if (Bits(properties, 4, 1)) {
    static std::atomic<uint64_t> dispatches{0};
    AddUser64(dispatches.fetch_add(1));
  }
  if (Bits(properties, 5, 1)) AddUser64(0);  // Flat scratch: offsets again.
  if (Bits(properties, 6, 1)) AddUser(setup_.scratch_size);
  setup_.entry = launch_.entry;
  const uint32_t preload_length = Bits(preload, 0, 7);
  if (preload_length > 0) {
    // Before the real entry are 256 bytes for firmware that cannot do this.
    setup_.entry += 256;
    for (uint32_t i = 0; i < preload_length; ++i) {
      uint32_t at = (Bits(preload, 7, 9) + i) * 4;
      if (at + 4 > launch_.kernarg_size) {
        throw Fault{Check::kOutOfBounds,
                    "preload of kernel arguments past their end"};
      }
      AddUser(At<uint32_t>(launch_.kernarg, at));
    }
  }
  const int users = static_cast<int>(Bits(rsrc2, 1, 5));
  if (users != setup_.users) {
    throw Fault{Check::kUnsupported,
                "descriptor with " + std::to_string(users) +
                    " user SGPRs, of which " + std::to_string(setup_.users) +
                    " are described"};
  }
  for (int axis = 0; axis < 3; ++axis) {
    setup_.id[axis] = Bits(rsrc2, 7 + axis, 1);
  }
  setup_.wave_offset = private_segment && !architected;
}

void Dispatch::SetUpClock() {
  clock_device_ = FindDevice(launch_.arch);
  if (clock_device_ == nullptr) {
    throw Fault{
        Check::kUnsupported,
        "AMDGPU_SIM_CLOCK_DEVICE is no device of " + std::string(launch_.arch)};
  }
  clock_launch_ = {
      launch_.kernel,          launch_.arch,   total_, setup_.waves,
      setup_.vector_registers, setup_.lds_size};
  for (uint64_t number : Traced(*clock_device_, clock_launch_)) {
    tracers_.emplace(number, Tracer(setup_.waves));
    samples_.insert(number);
  }
  for (uint64_t number : Sampled(total_, only_ ? kProbes : kSamples)) {
    samples_.insert(number);
  }
  round_ = std::min(FirstRound(*clock_device_, clock_launch_), kMostBegun);
  if (!only_) return;
  chosen_ = samples_;
  for (uint64_t number = 0; number < round_; ++number) {
    if (chosen_.insert(number).second) begun_.insert(number);
  }
}

bool Dispatch::AddSamples() {
  if (!only_ || !Uneven(clock_launch_.work)) return false;
  for (uint64_t number : Sampled(total_, kSamples)) {
    if (samples_.insert(number).second) chosen_.insert(number);
  }
  // All others begin, to see which end at once.
  for (uint64_t number = 0; number < std::min(total_, kMostBegun); ++number) {
    if (samples_.count(number) == 0 && begun_.insert(number).second) {
      chosen_.insert(number);
    }
  }
  return !chosen_.empty();
}

void Dispatch::NoteClock(uint64_t number, uint64_t executed) {
  if (executed < kEarly) clock_launch_.early[number] = executed;
  if (samples_.count(number) == 0) return;
  clock_launch_.work[number] = static_cast<double>(executed);
  longest_ = std::max(longest_, executed);
  // Of what has next to nothing to do a trace says nothing: one that begins
  // later takes its place.
  for (const auto& [early, work] : clock_launch_.early) {
    if (tracers_.count(early) == 0 || kMuch * work >= longest_) continue;
    uint64_t other = only_ ? early + 1 : next_;
    while (tracers_.count(other) > 0) ++other;
    if (other >= total_) continue;
    tracers_.erase(early);
    tracers_.emplace(other, Tracer(setup_.waves));
    samples_.insert(other);
    begun_.erase(other);
    if (only_) chosen_.insert(other);
  }
}

std::vector<uint64_t>* Dispatch::LogOf(const Workgroup& workgroup) {
  if (clock_device_ == nullptr) return nullptr;
  const auto tracer = tracers_.find(workgroup.number());
  if (tracer != tracers_.end()) return tracer->second.log();
  const bool first = workgroup.number() < round_ && workgroup.executed() == 0;
  return first ? &clock_launch_.first[workgroup.number()] : nullptr;
}

void Dispatch::NoteFirst(uint64_t number) {
  std::vector<uint64_t>& pieces = clock_launch_.first[number];
  const auto tracer = tracers_.find(number);
  if (tracer != tracers_.end()) {
    for (const WaveTrace& wave : tracer->second.trace().waves) {
      pieces.insert(pieces.end(), wave.lines.begin(), wave.lines.end());
    }
  }
  // A wave that never waits may have gone far beyond its first instructions.
  if (pieces.size() > kMostPieces) pieces.resize(kMostPieces);
  std::sort(pieces.begin(), pieces.end());
  pieces.erase(std::unique(pieces.begin(), pieces.end()), pieces.end());
  pieces.shrink_to_fit();
}

void Dispatch::Begin(Workgroup* workgroup) {
  uint32_t id[3];
  if (only_) {
    next_ = *chosen_.begin();
    chosen_.erase(chosen_.begin());
  }
  id[0] = static_cast<uint32_t>(next_ % launch_.grid[0]);
  id[1] = static_cast<uint32_t>(next_ / launch_.grid[0] % launch_.grid[1]);
  id[2] = static_cast<uint32_t>(next_ / launch_.grid[0] / launch_.grid[1]);
  workgroup->Start(setup_, &memory_, next_, id);
  auto tracer = tracers_.find(next_);
  if (tracer != tracers_.end()) workgroup->set_tracer(&tracer->second);
  ++next_;
}

void Dispatch::Run() {
  HostState host;
  static thread_local Pool pool;
  Counts* counts = StatsEnabled() ? &counts_ : nullptr;
  const uint64_t limit = InstructionLimit();
  if (ClockEnabled()) SetUpClock();
  std::deque<std::unique_ptr<Workgroup>> resident;
  bool goes_on = false;  // The last one of `resident` does, before others.
  while (HasNext() || !resident.empty() || AddSamples()) {
    std::unique_ptr<Workgroup> workgroup;
    // New ones first, until there are enough: a waiting one needs them.
    if (goes_on) {
      workgroup = std::move(resident.back());
      resident.pop_back();
    } else if (HasNext() && resident.size() < kResident) {
      workgroup = pool.Take();
      Begin(workgroup.get());
    } else {
      workgroup = std::move(resident.front());
      resident.pop_front();
    }
    running_ = workgroup.get();
    memory_.SetWorkgroup(workgroup->number());
    memory_.set_log(LogOf(*workgroup));
    const bool first =
        workgroup->number() < round_ && workgroup->executed() == 0;
    bool done = false;
    try {
      for (bool warned = true; warned;) {
        const bool begins = begun_.count(workgroup->number()) > 0;
        const bool goes = workgroup->executed() > 0;
        const uint64_t slice = !begins ? first ? kFirst : kSlice
                               : goes  ? kTold
                               : first ? kFirst
                                       : kEarly;
        done = workgroup->Run(program_, std::min(slice, limit), counts,
                              launch_.cancel);
        const Fault* warning = workgroup->lds().warning();
        warned = warning != nullptr;
        if (warned) {
          Warn(*warning);
          workgroup->lds().ClearWarning();
          setup_.quiet_checks = workgroup->lds().quiet();
        }
      }
      if (!done && workgroup->executed() >= limit) {
        throw Fault{Check::kEndless, "the workgroup executed " +
                                         std::to_string(workgroup->executed()) +
                                         " instructions and has not ended"};
      }
    } catch (...) {
      resident.push_front(std::move(workgroup));  // For the report.
      stopped_ = std::move(resident);
      throw;
    }
    if (launch_.cancel != nullptr &&
        launch_.cancel->load(std::memory_order_relaxed)) {
      return;
    }
    if (first) NoteFirst(workgroup->number());
    const bool begun = begun_.count(workgroup->number()) > 0;
    goes_on = false;
    if (done) {
      instructions_ += workgroup->executed();
      if (clock_device_ != nullptr) {
        NoteClock(workgroup->number(), workgroup->executed());
      }
      pool.Give(std::move(workgroup));
    } else if (begun && !first) {
      pool.Give(std::move(workgroup));
    } else {
      // Of those that are chosen all begin before one goes on: it may wait for
      // another.
      goes_on = first && (begun || !only_);
      resident.push_back(std::move(workgroup));
    }
  }
  AddLaunch(launch_.kernel, instructions_);
  if (clock_device_ != nullptr) {
    std::vector<GroupTrace> groups;
    for (auto& entry : tracers_) {
      clock_launch_.traced.push_back(entry.first);
      groups.push_back(entry.second.trace());
    }
    AddClock(*clock_device_, clock_launch_, std::move(groups));
  }
  if (counts != nullptr) {
    counts_.launches = 1;
    counts_.workgroups = total_;
    counts_.waves = total_ * setup_.waves;
    counts_.bytes_read = memory_.bytes_read();
    counts_.bytes_written = memory_.bytes_written();
    AddStats(launch_.arch, launch_.kernel, counts_);
  }
}

void Dispatch::Warn(const Fault& fault) {
  static std::mutex mutex;
  static std::set<std::string>* const kernels = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  std::string key = std::string(CheckName(fault.check)) + launch_.kernel;
  if (!kernels->insert(key).second) return;
  std::string report = Report(fault) +
                       "  The launch goes on; AMDGPU_SIM_CHECKS=+" +
                       CheckName(fault.check) + " would stop it.\n";
  std::fputs(report.c_str(), stderr);
}

std::string Dispatch::Report(const Fault& fault) const {
  char text[256];
  std::string report = "amdgpu_sim: ";
  report += CheckName(fault.check);
  report += ": " + fault.message + "\n  kernel " + launch_.kernel;
  std::snprintf(
      text, sizeof(text), " (%s, device %d, grid %u %u %u, block %u %u %u)\n",
      launch_.arch, launch_.device, launch_.grid[0], launch_.grid[1],
      launch_.grid[2], launch_.block[0], launch_.block[1], launch_.block[2]);
  report += text;
  const Wave* wave = running_ == nullptr ? nullptr : running_->wave();
  if (wave == nullptr) return report;

  const uint32_t* id = running_->id();
  std::snprintf(text, sizeof(text), "  workgroup (%u, %u, %u), wave %d", id[0],
                id[1], id[2], wave->index);
  report += text;
  if (fault.lane >= 0) {
    uint32_t item = wave->index * kLanes + fault.lane;
    std::snprintf(text, sizeof(text), ", lane %d, work-item (%u, %u, %u)",
                  fault.lane, item % launch_.block[0],
                  item / launch_.block[0] % launch_.block[1],
                  item / launch_.block[0] / launch_.block[1]);
    report += text;
  }
  const Inst* inst = wave->current;
  std::snprintf(text, sizeof(text), "\n  at +0x%" PRIx64 ": ",
                (inst == nullptr ? wave->pc : inst->pc) - launch_.entry);
  report += text;
  report += inst == nullptr ? "(not decoded)" : inst->text;
  report += "\n";
  if (fault.address == 0) return report;
  std::snprintf(text, sizeof(text), "  address 0x%" PRIx64, fault.address);
  report += text;
  // Small ones are offsets in LDS or scratch.
  if (fault.address >= uint64_t{1} << 32) {
    report += ": " + Memory::Get().Describe(fault.address);
  }
  return report + "\n";
}

}  // namespace

std::string Run(const Launch& launch) {
  Dispatch dispatch(launch);
  auto run = [&] {
    try {
      dispatch.SetUp();
      dispatch.Run();
    } catch (const std::bad_alloc&) {
      throw Fault{Check::kUnsupported, "the host has no memory left"};
    }
  };
  try {
    run();
  } catch (const Fault& fault) {
    std::string report = dispatch.Report(fault);
    std::fputs(report.c_str(), stderr);
    if (launch.check != nullptr) *launch.check = fault.check;
    return report;
  }
  if (launch.cancel != nullptr &&
      launch.cancel->load(std::memory_order_relaxed)) {
    return "cancelled";
  }
  return std::string();
}

}  // namespace amdgpu_sim
