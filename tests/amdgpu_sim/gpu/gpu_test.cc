// SPDX-License-Identifier: Apache-2.0

// Memory, LDS, waits, barriers and launches, without decoded instructions:
// programs here are lists of functions.

#include <immintrin.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/amdgpu_sim/gpu/launch.h"
#include "tests/amdgpu_sim/gpu/lds.h"
#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/gpu/workgroup.h"
#include "tests/amdgpu_sim/isa/decode.h"

namespace amdgpu_sim {
namespace {

std::atomic<int> failures{0};

void Expect(bool condition, const char* text, int line) {
  if (condition) return;
  std::fprintf(stderr, "gpu_test.cc:%d: not true: %s\n", line, text);
  ++failures;
}
#define EXPECT(condition) Expect((condition), #condition, __LINE__)

// The check that a function trips, "" if none.
template <typename F>
std::string Tripped(F&& f) {
  try {
    f();
  } catch (const Fault& fault) {
    return CheckName(fault.check);
  }
  return "";
}

uint64_t Device(uint64_t size) {
  return Memory::Get().Allocate(size, MemoryKind::kDevice, 0, 0);
}

std::string ReachFault(MemoryView* view, uint64_t address, int bytes,
                       Access access, int lane = 0) {
  return Tripped([&] { view->Reach(address, bytes, access, lane); });
}

void TestBounds() {
  uint64_t base = Device(100);
  MemoryView view(1);
  EXPECT(ReachFault(&view, base, 4, Access::kWrite) == "");
  EXPECT(ReachFault(&view, base + 96, 4, Access::kWrite) == "");
  EXPECT(ReachFault(&view, base + 97, 4, Access::kWrite) == "out_of_bounds");
  EXPECT(ReachFault(&view, base + 100, 1, Access::kRead) == "out_of_bounds");
  EXPECT(ReachFault(&view, base - 1, 1, Access::kRead) == "out_of_bounds");
  EXPECT(ReachFault(&view, 0, 4, Access::kRead) == "out_of_bounds");
  EXPECT(ReachFault(&view, ~uint64_t{0}, 4, Access::kRead) == "out_of_bounds");
  EXPECT(Memory::Get().Describe(base + 104).find("4 bytes past the end") !=
         std::string::npos);

  // What the view remembers of a block ends with the block.
  EXPECT(Memory::Get().Free(base));
  EXPECT(ReachFault(&view, base, 4, Access::kRead) == "use_after_free");
  EXPECT(Memory::Get().Describe(base).find("freed") != std::string::npos);
  EXPECT(!Memory::Get().Free(base));
  EXPECT(!Memory::Get().Free(base + 8));
}

void TestTail() {
  // A dword that holds the last bytes may be read and exchanged, not written.
  uint64_t base = Device(37);
  uint8_t zeros[37] = {};
  Memory::Get().Copy(base, reinterpret_cast<uint64_t>(zeros), 37);
  MemoryView view(1);
  for (int i = 0; i < 2; ++i) {
    EXPECT(ReachFault(&view, base + 36, 4, Access::kRead) == "");
    EXPECT(ReachFault(&view, base + 36, 4, Access::kAtomic) == "");
    EXPECT(ReachFault(&view, base + 36, 4, Access::kWrite) == "out_of_bounds");
    EXPECT(ReachFault(&view, base + 36, 2, Access::kRead) == "out_of_bounds");
    EXPECT(ReachFault(&view, base + 35, 4, Access::kRead) == "out_of_bounds");
    EXPECT(ReachFault(&view, base + 32, 8, Access::kRead) == "out_of_bounds");
    EXPECT(ReachFault(&view, base + 40, 4, Access::kRead) == "out_of_bounds");
    // Now with a name for each byte.
    view.Reach(base + 36, 1, Access::kWrite, 0);
  }
  Memory::Get().Free(base);
}

void TestLookup() {
  // More blocks than a view remembers.
  std::vector<uint64_t> bases;
  for (int i = 0; i < 40; ++i) bases.push_back(Device(64 + i));
  MemoryView view(1);
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 40; ++i) {
      EXPECT(ReachFault(&view, bases[i] + 60 + i, 4, Access::kWrite) == "");
      EXPECT(ReachFault(&view, bases[i] + 61 + i, 4, Access::kWrite) ==
             "out_of_bounds");
    }
  }
  Allocation found;
  EXPECT(Memory::Get().Find(bases[7] + 70, &found));
  EXPECT(found.base == bases[7] && found.size == 71);
  EXPECT(!Memory::Get().Find(bases[7] + 71, &found));
  EXPECT(Memory::Get().BytesUsed(0) == 40 * 64 + 39 * 20);
  for (uint64_t base : bases) Memory::Get().Free(base);
  EXPECT(Memory::Get().Count(MemoryKind::kDevice) == 0);

  // A freed block of others may come back as another one.
  std::vector<uint8_t> host(64);
  uint64_t external = reinterpret_cast<uint64_t>(host.data());
  Memory::Get().Register(external, 64, MemoryKind::kHost, 0, 3);
  EXPECT(ReachFault(&view, external, 4, Access::kRead) == "");
  EXPECT(Memory::Get().Free(external));
  Memory::Get().Register(external, 32, MemoryKind::kHost, 0, 3);
  EXPECT(ReachFault(&view, external, 4, Access::kRead) == "");
  EXPECT(ReachFault(&view, external + 32, 4, Access::kRead) == "out_of_bounds");
  EXPECT(Memory::Get().Free(external));

  EXPECT(Memory::Get().Allocate(uint64_t{1} << 50, MemoryKind::kDevice, 0, 0) ==
         0);
  uint64_t none = Device(0);
  EXPECT(none != 0 && Memory::Get().Free(none));
}

void TestUnwritten() {
  constexpr uint64_t kSize = 4 * 4096 + 12;
  uint64_t base = Device(kSize);
  MemoryView view(1);
  EXPECT(ReachFault(&view, base + 8, 4, Access::kRead) == "uninitialized");
  view.Reach(base + 8, 2, Access::kWrite, 0);
  EXPECT(ReachFault(&view, base + 8, 4, Access::kRead) == "uninitialized");
  EXPECT(ReachFault(&view, base + 8, 4, Access::kAtomic) == "uninitialized");
  EXPECT(ReachFault(&view, base + 8, 2, Access::kRead) == "");
  view.Reach(base + 10, 2, Access::kAtomicWrite, 0);
  EXPECT(ReachFault(&view, base + 8, 4, Access::kRead) == "");
  // Over the edge of a page of the shadow.
  view.Reach(base + 4088, 16, Access::kWrite, 0);
  EXPECT(ReachFault(&view, base + 4088, 16, Access::kRead) == "");
  EXPECT(ReachFault(&view, base + 4096, 12, Access::kRead) == "uninitialized");

  // hip calls carry the state along.
  std::vector<uint8_t> host(kSize, 7);
  uint64_t to_host = reinterpret_cast<uint64_t>(host.data());
  Memory& memory = Memory::Get();
  EXPECT(Tripped([&] { memory.Copy(to_host, base, 16); }) == "uninitialized");
  EXPECT(Tripped([&] { memory.Copy(to_host, base + 8, 4); }) == "");
  uint64_t other = Device(kSize);
  memory.Copy(other, base, kSize);
  EXPECT(ReachFault(&view, other + 4088, 16, Access::kRead) == "");
  EXPECT(ReachFault(&view, other + 4084, 4, Access::kRead) == "uninitialized");
  EXPECT(ReachFault(&view, other + 4104, 1, Access::kRead) == "uninitialized");
  memory.Copy(other, to_host, kSize);
  EXPECT(Tripped([&] { memory.Copy(to_host, other, kSize); }) == "");
  memory.Copy(other, base, kSize);
  EXPECT(ReachFault(&view, other + 8192, 4, Access::kRead) == "uninitialized");
  uint16_t pattern = 0x1234;
  memory.Fill(other + 2, &pattern, 2, kSize / 2 - 1);
  EXPECT(ReachFault(&view, other + 8192, 4, Access::kRead) == "");
  EXPECT(ReachFault(&view, other, 2, Access::kRead) == "uninitialized");
  EXPECT(*reinterpret_cast<uint16_t*>(other + 9000) == 0x1234);
  EXPECT(Tripped([&] { memory.Copy(other + 8, to_host, kSize); }) ==
         "out_of_bounds");
  memory.Free(other);
  EXPECT(Tripped([&] { memory.Copy(other, to_host, 8); }) == "use_after_free");
  EXPECT(Tripped([&] { memory.Touch(base, 8, false); }) == "uninitialized");
  memory.Touch(base, 8, true);
  EXPECT(Tripped([&] { memory.Touch(base, 8, false); }) == "");
  memory.Free(base);
}

void TestAlignment() {
  uint64_t base = Device(64);
  MemoryView view(1);
  Memory::Get().Touch(base, 64, true);
  EXPECT(ReachFault(&view, base + 1, 4, Access::kRead) == "");
  EXPECT(ReachFault(&view, base + 1, 4, Access::kRead, -1) == "misaligned");
  EXPECT(ReachFault(&view, base + 2, 4, Access::kAtomic) == "misaligned");
  EXPECT(ReachFault(&view, base + 4, 8, Access::kAtomic) == "misaligned");
  EXPECT(ReachFault(&view, base + 8, 8, Access::kAtomic) == "");
  Memory::Get().Free(base);
}

void TestWorkgroups() {
  uint64_t base = Device(4096);
  Memory::Get().Touch(base, 4096, true);
  {
    MemoryView view(3);
    view.SetWorkgroup(0);
    view.Reach(base, 4, Access::kWrite, 0);
    view.Reach(base, 4, Access::kRead, 0);
    view.SetWorkgroup(1);
    EXPECT(ReachFault(&view, base + 4, 4, Access::kWrite) == "");
    EXPECT(ReachFault(&view, base + 3, 1, Access::kWrite) == "global_race");
    EXPECT(ReachFault(&view, base, 4, Access::kRead) == "global_race");
    EXPECT(ReachFault(&view, base, 4, Access::kAtomicRead) == "");
    EXPECT(ReachFault(&view, base, 4, Access::kAtomic) == "");
    // The last one to arrive at a counter may read what the others wrote.
    view.Reach(base + 8, 4, Access::kWrite, 0);
    view.Reach(base + 64, 4, Access::kAtomic, 0);
    view.SetWorkgroup(2);
    EXPECT(ReachFault(&view, base + 8, 4, Access::kRead) == "global_race");
    view.Reach(base + 68, 4, Access::kAtomic, 0);
    EXPECT(ReachFault(&view, base + 8, 4, Access::kRead) == "global_race");
    view.Reach(base + 64, 4, Access::kAtomic, 0);
    EXPECT(ReachFault(&view, base + 8, 4, Access::kRead) == "");
    view.SetWorkgroup(0);
    EXPECT(ReachFault(&view, base + 8, 4, Access::kRead) == "global_race");
  }
  // The next launch comes after this one.
  MemoryView view(2);
  view.SetWorkgroup(1);
  EXPECT(ReachFault(&view, base, 16, Access::kRead) == "");
  EXPECT(ReachFault(&view, base, 16, Access::kWrite) == "");
  Memory::Get().Free(base);
}

void TestThreads() {
  uint64_t shared = Device(1 << 20);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([shared, t] {
      MemoryView view(1);
      for (int i = 0; i < 2000; ++i) {
        // Pages that several of them break up.
        uint64_t at = shared + (i % 256) * 4096 + t * 64;
        view.Reach(at, 16, Access::kWrite, 0);
        std::memset(reinterpret_cast<void*>(at), t, 16);
        view.Reach(at, 16, Access::kRead, 0);
        uint64_t own = Device(100 + i);
        view.Reach(own, 4, Access::kWrite, 0);
        Memory::Get().Free(own);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Memory::Get().Free(shared);
}

// A program of functions, each one an instruction of four bytes.
class Functions : public Program {
 public:
  struct Step : Inst {
    std::function<void(Wave&)> run;
  };
  Functions() { base_ = 0x10000; }

  Step& Add(std::function<void(Wave&)> run) {
    auto step = std::make_unique<Step>();
    step->run = std::move(run);
    step->pc = base_ + 4 * steps_.size();
    step->inst_class = InstClass::kSalu;
    step->text = "step";
    step->execute = [](Wave& wave, const Inst& inst) {
      static_cast<const Step&>(inst).run(wave);
    };
    steps_.push_back(std::move(step));
    return *steps_.back();
  }
  Step& End() {
    return Add([](Wave& wave) { wave.ended = true; });
  }
  Step& Barrier() {
    return Add([](Wave& wave) { wave.ArriveAtBarrier(); });
  }
  // LDS, by lane 0 of the given wave, and of all waves for -1.
  Step& Read(int wave, uint32_t address, int bytes = 4) {
    return Lds(wave, [=](Wave& w) {
      w.Lds(address, bytes, Access::kRead, 0);
      w.Announce(Counter::kLgkm, false, 9, 1);
    });
  }
  Step& Write(int wave, uint32_t address, uint32_t value, int bytes = 4) {
    return Lds(wave, [=](Wave& w) {
      std::memcpy(w.Lds(address, bytes, Access::kWrite, 0), &value, bytes);
      w.Announce(Counter::kLgkm, false, 0, 0);
    });
  }
  Step& Lds(int wave, std::function<void(Wave&)> run) {
    Step& step = Add([=](Wave& w) {
      if (wave < 0 || w.index == wave) run(w);
    });
    step.inst_class = InstClass::kLds;
    return step;
  }
  Step& Wait() {
    return Add([](Wave& wave) { wave.Wait(Counter::kLgkm, 0); });
  }

  // Its steps name no registers.
  Program& WithAccumOffset(int) override { return *this; }
  uint64_t base() const { return base_; }

 protected:
  const Inst& Add(uint64_t pc) override {
    uint64_t index = (pc - base_) / 4;
    if (index >= steps_.size()) {
      throw Fault{Check::kOutOfBounds, "no instruction", -1, pc};
    }
    return *steps_[index];
  }

 private:
  std::vector<std::unique_ptr<Step>> steps_;
};

struct Descriptor {
  uint8_t bytes[64] = {};
  template <typename T>
  void Set(int offset, T value) {
    std::memcpy(bytes + offset, &value, sizeof(T));
  }
  // Kernarg pointer, all workgroup ids, 64 v and 32 a registers.
  explicit Descriptor(uint32_t lds = 0) {
    Set<uint32_t>(0, lds);
    Set<uint32_t>(44, 64 / 4 - 1);
    Set<uint32_t>(48, (96 / 8 - 1) | 0xf0u << 12 | 1u << 21);
    Set<uint32_t>(52, 2u << 1 | 7u << 7);
    Set<uint16_t>(56, 1u << 3);
  }
};

// The check that a launch trips.
std::string Launched(Functions* program, const Descriptor& descriptor,
                     uint32_t block, uint32_t grid = 1,
                     std::string* report = nullptr,
                     const char* arch = "gfx942") {
  static const uint32_t kernarg[8] = {10, 11, 12, 13, 14, 15, 16, 17};
  Launch launch;
  Check check = Check::kCount;
  launch.kernel = "test";
  launch.arch = arch;
  launch.program = program;
  launch.descriptor = descriptor.bytes;
  launch.entry = program->base();
  launch.kernarg = reinterpret_cast<const uint8_t*>(kernarg);
  launch.kernarg_size = sizeof(kernarg);
  launch.block[0] = block;
  launch.grid[0] = grid;
  launch.check = &check;
  std::string text = Run(launch);
  if (report != nullptr) *report = text;
  EXPECT(text.empty() == (check == Check::kCount));
  return check == Check::kCount ? "" : CheckName(check);
}

void TestInitialState() {
  Functions program;
  std::vector<uint32_t> seen;
  program.Add([&](Wave& wave) {
    seen.insert(seen.end(), {wave.s[2], wave.s[3], wave.s[4]});
    seen.push_back(__builtin_popcountll(wave.exec()));
    seen.push_back(wave.v[0][3]);
    // The kernarg segment is readable.
    uint32_t value;
    std::memcpy(&value, wave.Global(wave.s64(0) + 4, 4, Access::kRead, -1), 4);
    seen.push_back(value);
    EXPECT(wave.mode.denorm32() == 3 && wave.mode.denorm16_64() == 3);
    EXPECT(wave.mode.round32() == 0 && wave.mode.dx10_clamp());
    EXPECT((_mm_getcsr() & 0x8040) == 0);
  });
  program.Add([](Wave& wave) {
    wave.mode.bits &= ~0x30u;
    _mm_setcsr(_mm_getcsr() | 0x8040);
  });
  program.End();
  unsigned before = _mm_getcsr();
  EXPECT(Launched(&program, Descriptor(), 100, 2) == "");
  EXPECT(_mm_getcsr() == before);
  EXPECT(
      (seen == std::vector<uint32_t>{0, 0, 0, 64, 3, 11, 0, 0, 0, 36, 67, 11,
                                     1, 0, 0, 64, 3, 11, 1, 0, 0, 36, 67, 11}));
}

void TestUserRegisters() {
  // Dispatch packet, queue, kernarg pointer, then four preloaded dwords.
  Descriptor descriptor;
  descriptor.Set<uint32_t>(52, 10u << 1 | 1u << 7);
  descriptor.Set<uint16_t>(56, 1u << 1 | 1u << 2 | 1u << 3);
  descriptor.Set<uint16_t>(58, 4 | 1u << 7);
  Functions program;
  for (int i = 0; i < 64; ++i) program.End();  // For older firmware.
  program.Add([](Wave& wave) {
    uint16_t sizes[2];
    std::memcpy(sizes, wave.Global(wave.s64(0) + 4, 4, Access::kRead, -1), 4);
    EXPECT(sizes[0] == 100 && sizes[1] == 1);
    uint32_t grid;
    std::memcpy(&grid, wave.Global(wave.s64(0) + 12, 4, Access::kRead, -1), 4);
    EXPECT(grid == 300);
    uint32_t aperture;
    std::memcpy(&aperture,
                wave.Global(wave.s64(2) + 0x44, 4, Access::kRead, -1), 4);
    EXPECT(aperture == kPrivateAperture);
    EXPECT(wave.s[6] == 11 && wave.s[9] == 14);
    EXPECT(wave.s[10] == wave.workgroup->id()[0]);
  });
  program.End();
  EXPECT(Launched(&program, descriptor, 100, 3) == "");
  descriptor.Set<uint16_t>(58, 4 | 6u << 7);
  EXPECT(Launched(&program, descriptor, 100, 3) == "out_of_bounds");
  descriptor.Set<uint16_t>(58, 3 | 1u << 7);
  EXPECT(Launched(&program, descriptor, 100, 3) == "unsupported");
}

void TestReport() {
  Functions program;
  program.Add([](Wave&) {});
  program.Add([](Wave& wave) {
    if (wave.index == 1) wave.Global(16, 4, Access::kRead, 5);
  });
  program.End();
  std::string report;
  EXPECT(Launched(&program, Descriptor(), 128, 1, &report) == "out_of_bounds");
  for (const char* part :
       {"out_of_bounds", "kernel test", "workgroup (0, 0, 0)", "wave 1",
        "lane 5", "work-item (69, 0, 0)", "+0x4: step", "0x10"}) {
    EXPECT(report.find(part) != std::string::npos);
  }
  // Beyond the last instruction.
  Functions endless;
  endless.Add([](Wave&) {});
  EXPECT(Launched(&endless, Descriptor(), 64, 1, &report) == "out_of_bounds");
  EXPECT(report.find("+0x4: (not decoded)") != std::string::npos);
}

void TestRegisters() {
  auto with = [](bool scalar, uint16_t first, uint16_t count) {
    Functions program;
    Functions::Step& step = program.Add([](Wave&) {});
    step.uses[0] = {scalar, first, count};
    step.use_count = 1;
    program.End();
    return Launched(&program, Descriptor(), 64);
  };
  // v64 is a0, v95 or a31 the last.
  EXPECT(with(false, 61, 4) == "");
  EXPECT(with(false, 92, 4) == "");
  EXPECT(with(false, 93, 4) == "register");
  EXPECT(with(true, 15, 1) == "");
  EXPECT(with(true, 16, 1) == "register");
  EXPECT(with(true, kVcc, 2) == "");
}

void TestWaits() {
  // Three loads, a wait, and a use.
  auto with = [](Counter counter, int outstanding, uint16_t use,
                 bool scalar = false, const char* mnemonic = "load",
                 InstClass inst_class = InstClass::kLds) {
    Functions program;
    for (int reg : {4, 8, 12}) {
      Functions::Step& load = program.Add(
          [=](Wave& wave) { wave.Announce(counter, scalar, reg, 4); });
      load.inst_class = inst_class;
      load.mnemonic = mnemonic;
    }
    program.Add([=](Wave& wave) { wave.Wait(counter, outstanding); });
    Functions::Step& step = program.Add([](Wave&) {});
    step.uses[0] = {scalar, use, 1};
    step.use_count = 1;
    program.End();
    return Launched(&program, Descriptor(), 64);
  };
  EXPECT(with(Counter::kVm, 3, 4) == "waitcnt");
  EXPECT(with(Counter::kVm, 2, 7) == "");
  EXPECT(with(Counter::kVm, 2, 8) == "waitcnt");
  EXPECT(with(Counter::kVm, 1, 11) == "");
  EXPECT(with(Counter::kVm, 0, 15) == "");
  EXPECT(with(Counter::kVm, 3, 16) == "");
  EXPECT(with(Counter::kLgkm, 1, 11) == "");
  EXPECT(with(Counter::kLgkm, 1, 12) == "waitcnt");
  // Scalar and flat loads return in any order.
  EXPECT(with(Counter::kLgkm, 1, 4, true) == "waitcnt");
  EXPECT(with(Counter::kLgkm, 0, 4, true) == "");
  EXPECT(with(Counter::kVm, 2, 4, false, "flat_load", InstClass::kGlobal) ==
         "waitcnt");

  // A load may overwrite what an earlier one of its kind has yet to write, but
  // not use it as its address.
  auto twice = [](InstClass second, bool address) {
    Functions program;
    auto load = [](Wave& wave) { wave.Announce(Counter::kVm, false, 4, 2); };
    program.Add(load).inst_class = InstClass::kGlobal;
    Inst& inst = program.Add(load);
    inst.inst_class = second;
    inst.dst[0].kind = Operand::Kind::kVector;
    inst.dst[0].reg = 4;
    inst.dst[0].count = 2;
    if (address) inst.src[0] = inst.dst[0];
    inst.uses[0] = {false, 4, 2};
    inst.use_count = 1;
    program.End();
    return Launched(&program, Descriptor(), 64);
  };
  EXPECT(twice(InstClass::kGlobal, false) == "");
  EXPECT(twice(InstClass::kGlobal, true) == "waitcnt");
  EXPECT(twice(InstClass::kLds, false) == "waitcnt");

  Outstanding outstanding(3);
  for (uint16_t reg = 0; reg < 5; ++reg) {
    Outstanding::Operation operation;
    operation.first = reg;
    operation.count = 1;
    outstanding.Add(operation);
  }
  // The counter cannot count more.
  EXPECT(!outstanding.Touches(false, 0, 2) && outstanding.size() == 3);
  EXPECT(outstanding.Touches(false, 2, 1));
  EXPECT(!outstanding.Touches(true, 2, 1));
  // Registers that a later operation writes too.
  Outstanding::Operation wide;
  wide.first = 60;
  wide.count = 8;
  outstanding.Wait(0);
  EXPECT(!outstanding.watched());
  outstanding.Add(wide);
  wide.first = 64;
  outstanding.Add(wide);
  outstanding.Wait(1);
  EXPECT(!outstanding.Touches(false, 60, 4));
  EXPECT(outstanding.Touches(false, 60, 5));
}

void TestBarriers() {
  {
    Functions program;
    program.Barrier();
    program.Barrier();
    program.End();
    EXPECT(Launched(&program, Descriptor(), 256, 3) == "");
  }
  {
    Functions program;  // Wave 1 jumps to the second barrier.
    program.Add([](Wave& wave) {
      if (wave.index == 1) wave.pc += 4;
    });
    program.Barrier();
    program.Barrier();
    program.End();
    EXPECT(Launched(&program, Descriptor(), 128) == "barrier");
  }
  {
    Functions program;  // A wave that has ended does not count.
    program.Add([](Wave& wave) { wave.ended = wave.index == 1; });
    program.Barrier();
    program.End();
    EXPECT(Launched(&program, Descriptor(), 128) == "");
  }
}

void TestSpin() {
  // Wave 0 waits for what wave 1 does.
  Functions program;
  bool flag = false;
  program.Add([&](Wave& wave) {
    if (wave.index == 1) flag = true;
    if (!flag) wave.pc -= 4;
  });
  program.End();
  EXPECT(Launched(&program, Descriptor(), 128) == "");

  // Workgroup 0 waits for workgroup 2.
  Functions later;
  flag = false;
  later.Add([&](Wave& wave) {
    if (wave.workgroup->number() == 2) flag = true;
    if (!flag) wave.pc -= 4;
  });
  later.End();
  EXPECT(Launched(&later, Descriptor(), 64, 3) == "");

  Functions endless;
  endless.Add([](Wave& wave) { wave.pc -= 4; });
  EXPECT(Launched(&endless, Descriptor(), 64) == "endless");
}

// Streams run launches of one program at once.
void TestParallelLaunches() {
  Functions program;
  uint64_t sums = Device(64);
  Memory::Get().Touch(sums, 64, true);
  uint64_t own = Device(4 * 4096);
  program.Write(0, 0, 1);
  program.Wait();
  program.Barrier();
  program.Read(1, 0);
  program.Add([=](Wave& wave) {
    uint64_t at = own + 64 * wave.workgroup->number() + 4 * wave.index;
    wave.Global(at, 4, Access::kAtomicWrite, 0);
    uint8_t* sum = wave.Global(sums, 8, Access::kAtomic, 0);
    __atomic_fetch_add(reinterpret_cast<uint64_t*>(sum), 1, __ATOMIC_RELAXED);
  });
  program.End();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        std::string report;
        Descriptor descriptor(256);
        Launched(&program, descriptor, 128, 16, &report);
        EXPECT(report.empty());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(*reinterpret_cast<uint64_t*>(sums) == 4 * 20 * 16 * 2);
  Memory::Get().Free(sums);
  Memory::Get().Free(own);
}

void TestLds() {
  auto run = [](const std::function<void(Functions*)>& build,
                uint32_t block = 128) {
    Functions program;
    build(&program);
    program.End();
    return Launched(&program, Descriptor(256), block);
  };
  EXPECT(run([](Functions* p) { p->Write(0, 252, 1); }) == "");
  EXPECT(run([](Functions* p) { p->Write(0, 253, 1); }) == "out_of_bounds");
  EXPECT(run([](Functions* p) { p->Write(0, ~0u, 1); }) == "out_of_bounds");
  EXPECT(run([](Functions* p) { p->Read(0, 0); }) == "lds_uninitialized");
  EXPECT(run([](Functions* p) {
           p->Write(0, 0, 1, 2);
           p->Read(0, 0);
         }) == "lds_uninitialized");
  EXPECT(run([](Functions* p) {
           p->Write(0, 0, 1);
           p->Read(0, 0);
         }) == "");
  // Another wave, without and with a barrier.
  EXPECT(run([](Functions* p) {
           p->Write(0, 0, 1);
           p->Read(1, 2, 2);
         }) == "lds_race");
  EXPECT(run([](Functions* p) {
           p->Write(0, 0, 1);
           p->Wait();
           p->Barrier();
           p->Read(1, 0);
         }) == "");
  // A write that may still be under way.
  EXPECT(run([](Functions* p) {
           p->Write(0, 0, 1);
           p->Barrier();
           p->Read(1, 0);
         }) == "lds_wait");
  auto write_after_read = [&](bool wait, uint32_t value) {
    return run([=](Functions* p) {
      p->Write(0, 0, 1);
      p->Wait();
      p->Barrier();
      p->Read(0, 0);
      if (wait) p->Wait();
      p->Barrier();
      p->Write(1, 0, value);
    });
  };
  EXPECT(write_after_read(true, 2) == "");
  EXPECT(write_after_read(false, 2) == "lds_wait");
  EXPECT(write_after_read(false, 1) == "");  // Changes nothing.
  EXPECT(run([](Functions* p) {
           p->Write(0, 0, 1);
           p->Wait();
           p->Barrier();
           p->Read(-1, 0);
           p->Write(1, 0, 2);
         }) == "lds_race");
  // Two writers.
  EXPECT(run([](Functions* p) { p->Write(-1, 0, 5); }) == "");
  EXPECT(run([](Functions* p) {
           p->Write(0, 0, 5);
           p->Write(1, 0, 6);
         }) == "lds_race");
  EXPECT(run([](Functions* p) {
           p->Write(0, 0, 5, 2);
           p->Write(1, 2, 6, 2);
         }) == "");
  // Both may read what they both wrote, a third wave may not.
  auto third = [&](int reader) {
    return run(
        [=](Functions* p) {
          p->Lds(-1, [](Wave& w) {
            if (w.index == 2) return;
            std::memset(w.Lds(0, 4, Access::kWrite, 0), 5, 4);
          });
          p->Read(reader, 0);
        },
        192);
  };
  EXPECT(third(0) == "" && third(1) == "" && third(2) == "lds_race");

  auto atomic = [](Functions* p, int wave, uint32_t address) {
    p->Lds(wave, [=](Wave& w) { ++*w.Lds(address, 4, Access::kAtomic, 0); });
  };
  auto zero = [](Functions* p) {
    p->Write(0, 0, 0);
    p->Wait();
    p->Barrier();
  };
  EXPECT(run([&](Functions* p) {
           zero(p);
           atomic(p, -1, 0);
         }) == "");
  EXPECT(run([&](Functions* p) {
           zero(p);
           atomic(p, -1, 0);
           p->Read(0, 0);
         }) == "lds_race");
  EXPECT(run([&](Functions* p) {
           zero(p);
           p->Read(0, 0);
           atomic(p, 1, 0);
         }) == "lds_race");
  EXPECT(run([&](Functions* p) {
           zero(p);
           atomic(p, 0, 2);
         }) == "misaligned");

  // A load to LDS is there after its vmcnt.
  auto direct = [&](bool wait, bool barrier, int reader) {
    return run([=](Functions* p) {
      Functions::Step& load = p->Lds(0, [](Wave& w) {
        std::memset(w.Lds(0, 4, Access::kWrite, 0), 5, 4);
        w.Announce(Counter::kVm, false, 0, 0);
      });
      load.inst_class = InstClass::kGlobal;
      load.lds = true;
      if (wait) p->Add([](Wave& w) { w.Wait(Counter::kVm, 0); });
      if (barrier) p->Barrier();
      p->Read(reader, 0);
    });
  };
  EXPECT(direct(false, false, 0) == "waitcnt");
  EXPECT(direct(true, false, 0) == "");
  EXPECT(direct(true, false, 1) == "lds_race");
  EXPECT(direct(true, true, 1) == "");
  EXPECT(direct(false, true, 1) == "lds_race");
}

void TestScratch() {
  Functions program;
  program.Add([](Wave& wave) {
    EXPECT(Tripped([&] { wave.Scratch(4, 4, Access::kRead, 9); }) ==
           "uninitialized");
    std::memset(wave.Scratch(4, 4, Access::kWrite, 9), wave.index, 4);
    EXPECT(*wave.Scratch(7, 1, Access::kRead, 9) == wave.index);
    EXPECT(Tripped([&] { wave.Scratch(4, 4, Access::kRead, 8); }) ==
           "uninitialized");
    EXPECT(Tripped([&] { wave.Scratch(13, 4, Access::kWrite, 8); }) ==
           "out_of_bounds");
    EXPECT(Tripped([&] { wave.Scratch(~0u, 4, Access::kWrite, 8); }) ==
           "out_of_bounds");
  });
  program.End();
  Descriptor descriptor;
  descriptor.Set<uint32_t>(4, 16);
  EXPECT(Launched(&program, descriptor, 128, 2) == "");
}

void TestConflicts() {
  Lds::Record record;
  record.bytes = 4;
  record.count = 64;
  auto conflicts = [&](uint32_t stride, Arch arch) {
    for (int i = 0; i < 64; ++i) record.address[i] = i * stride;
    Counts counts;
    counts.Count(Inst(), arch, &record);
    return counts.lds_conflicts;
  };
  EXPECT(conflicts(4, Arch::kGfx942) == 0);
  EXPECT(conflicts(0, Arch::kGfx942) == 0);
  EXPECT(conflicts(8, Arch::kGfx942) == 2);
  EXPECT(conflicts(128, Arch::kGfx942) == 62);
  EXPECT(conflicts(132, Arch::kGfx942) == 0);
  EXPECT(conflicts(8, Arch::kGfx950) == 1);
  // Lanes 0 to 3 share banks with 4 to 7, which are read after them, but
  // written with them.
  record.bytes = 16;
  EXPECT(conflicts(16, Arch::kGfx942) == 0);
  for (int i = 0; i < 64; ++i) {
    record.address[i] = (i % 4 + i / 16 * 4) * 16 + (i / 4 % 4) * 1024;
  }
  Counts counts;
  counts.Count(Inst(), Arch::kGfx942, &record);
  uint64_t reads = counts.lds_conflicts;
  record.write = true;
  counts = Counts();
  counts.Count(Inst(), Arch::kGfx942, &record);
  EXPECT(reads == 0 && counts.lds_conflicts == 8);
}

}  // namespace
}  // namespace amdgpu_sim

int main() {
  // Ends the endless loop soon.
  setenv("AMDGPU_SIM_LIMIT", "40000000", 1);
  setenv("AMDGPU_SIM_CHECKS", "+all", 1);
  using namespace amdgpu_sim;
  TestBounds();
  TestTail();
  TestLookup();
  TestUnwritten();
  TestAlignment();
  TestWorkgroups();
  TestThreads();
  TestInitialState();
  TestUserRegisters();
  TestReport();
  TestRegisters();
  TestWaits();
  TestBarriers();
  TestSpin();
  TestLds();
  TestParallelLaunches();
  TestScratch();
  TestConflicts();
  std::fprintf(stderr, "%d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
