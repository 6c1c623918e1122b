// SPDX-License-Identifier: Apache-2.0

// The LDS of a workgroup, and who touched its bytes since the last barrier.
#ifndef AMDGPU_SIM_GPU_LDS_H_
#define AMDGPU_SIM_GPU_LDS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/gpu/wave.h"

namespace amdgpu_sim {

// Two waves conflict over a byte if both touch it between two barriers and one
// of the accesses changes it. A write of the value that is already there is no
// conflict: Triton lets waves that hold the same values all store them.
//
// An access that its wave has not waited for when it arrives at a barrier
// may happen after it (the ISA: barriers do not wait for any counters), and
// counts in the next interval too: Check::kLdsWait.
class Lds {
 public:
  // All bytes unwritten and untouched. `waves` share it. Checks whose bit is
  // set in `quiet` are off.
  void Reset(uint32_t size, int waves, uint32_t quiet);

  uint8_t* Reach(Wave& wave, uint32_t address, int bytes, Access access,
                 int lane);
  // The same for the lanes of a mask.
  void ReachAll(Wave& wave, const uint32_t* address, int bytes, Access access,
                uint64_t lanes, uint8_t** out);

  // After each instruction that may have written: throws if one of its writes
  // changed a byte that another wave touched.
  void Settle() {
    if (!suspects_.empty()) CheckSuspects();
  }

  // All waves are at a barrier.
  void PassBarrier(const Wave* const* waves, int count);

  // What a check found that does not stop the launch; null if nothing. Only
  // the first one is kept.
  const Fault* warning() const { return has_warning_ ? &warning_ : nullptr; }
  // One warning of a check is enough.
  void ClearWarning() {
    has_warning_ = false;
    SetQuiet(quiet_ | 1u << static_cast<int>(warning_.check));
  }
  uint32_t quiet() const { return quiet_; }

  // The accesses of the latest instruction, for the statistics. Recorded if
  // wanted, or if waves share the LDS.
  struct Record {
    uint64_t sequence = 0;  // Wave::sequence; 0 is none.
    bool write = false;
    bool dma = false;  // A load to LDS, which vmcnt counts.
    int bytes = 0;
    int count = 0;
    uint32_t address[2 * kLanes];
  };
  void set_record_all(bool on) { record_all_ = on; }
  const Record* Last(const Wave& wave) const;

 private:
  // In writer_ and reader_: 0, or how and which wave (plus 1) did it.
  static constexpr uint8_t kWaveMask = 0x1f;
  static constexpr uint8_t kCarried = 0x20;  // Over the last barrier.
  static constexpr uint8_t kDma = 0x40;
  static constexpr uint8_t kAtomicWrite = 0x80;
  static constexpr uint8_t kManyAtomic = 0xc0;
  static constexpr uint8_t kMany = 0xff;  // Equal values; see many_.

  struct Suspect {
    uint32_t offset;
    uint8_t old;
    uint8_t other;  // writer_ or reader_ before.
    bool read;      // The other access.
    int8_t lane;
  };

  // The record of the wave's current instruction.
  Record* Begin(Wave& wave, int bytes, bool write, bool dma);
  // The common cases of the functions below: true if nothing else is to do.
  template <int kBytes>
  bool ReadQuickly(uint32_t offset, uint8_t mine, bool track);
  template <int kBytes>
  bool WriteQuickly(uint32_t offset, uint8_t mine, uint8_t how, bool track);
  template <int kBytes>
  void PlainAll(Wave& wave, const uint32_t* address, bool write, bool dma,
                uint64_t lanes);
  void ReadBytes(Wave& wave, uint32_t offset, int bytes, int lane);
  void WriteBytes(Wave& wave, uint32_t offset, int bytes, int lane, bool dma);
  void AtomicBytes(Wave& wave, uint32_t offset, int bytes, int lane);
  void Touch(uint32_t offset, int bytes) {
    touched_[offset / kBlock] = 1;
    touched_[(offset + bytes - 1) / kBlock] = 1;
  }
  void MarkWriter(uint32_t offset, int wave, uint8_t how);
  void MarkReader(uint32_t offset, int wave, uint8_t how);
  static bool Own(uint8_t code, uint8_t mine) {
    return (code & kWaveMask) == mine;  // kMany is nobody's.
  }
  void CheckSuspects();
  // Throws, or warns.
  void Report(const Fault& fault);
  void SetQuiet(uint32_t quiet) {
    quiet_ = quiet;
    uninitialized_ = Wanted(Check::kLdsUninitialized);
    races_ = Wanted(Check::kLdsRace);
  }
  bool Wanted(Check check) const {
    return CheckEnabled(check) && !(quiet_ >> static_cast<int>(check) & 1);
  }
  // Another wave's access came before this one.
  void Conflict(const char* what, uint8_t other, const char* did, int lane,
                uint32_t offset);
  void FindFlights(const Wave& wave);
  bool InFlight(uint32_t offset) const;
  // Whether it may be for one of the bytes from here on.
  bool MaybeInFlight(uint32_t offset, uint32_t bytes) const;
  std::string Who(uint8_t code) const;

  static constexpr uint32_t kBlock = 256;
  static constexpr int kMaxSize = 160 * 1024 + kBlock;
  static constexpr int kLdsRecords = 16;  // lgkmcnt counts to 15
  static constexpr int kDmaRecords = 64;  // vmcnt to 63

  // A load to LDS under way, and where it writes.
  struct Flight {
    const Record* record;
    uint32_t begin, end;
  };

  struct WaveRecords {
    Record lds[kLdsRecords];
    Record dma[kDmaRecords];
    int next_lds = 0, next_dma = 0;
    Record* last = nullptr;
  };

  uint32_t size_ = 0;
  bool shared_ = false, record_all_ = false, any_dma_ = false;
  bool races_ = true, uninitialized_ = true, has_warning_ = false;
  uint32_t quiet_ = 0;
  Fault warning_{Check::kLdsWait, ""};
  std::vector<uint8_t> bytes_, written_, writer_, reader_, touched_;
  std::vector<uint16_t> many_;  // Waves that wrote, of bytes with kMany.
  std::vector<Suspect> suspects_;
  std::vector<std::unique_ptr<WaveRecords>> records_;
  // Of a wave at one of its instructions.
  std::vector<Flight> flights_;
  int flights_wave_ = -1;
  uint64_t flights_sequence_ = 0;
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_GPU_LDS_H_
