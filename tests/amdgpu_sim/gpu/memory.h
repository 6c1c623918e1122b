// SPDX-License-Identifier: Apache-2.0

// Memory of all devices and of pinned hosts: allocations and their shadow.
//
// A device address is the host address. Every byte of an allocation has shadow
// state: whether it was written, and the workgroup that wrote it last.
#ifndef AMDGPU_SIM_GPU_MEMORY_H_
#define AMDGPU_SIM_GPU_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "tests/amdgpu_sim/gpu/fault.h"

namespace amdgpu_sim {

// Bytes of kDevice memory begin unwritten. The host may write to the others
// without our knowledge: reads of those are never uninitialized.
enum class MemoryKind : uint8_t { kHost, kDevice, kManaged, kCode };

struct Allocation {
  uint64_t base = 0;
  uint64_t size = 0;  // As asked for; the bytes after it are out of bounds.
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
  unsigned flags = 0;     // Of the hip call, for hipPointerGetAttributes.
  uint64_t id = 0;        // Counts allocations from 1.
  bool external = false;  // hipHostRegister, VMM: not ours to unmap.
};

// kAtomic reads and writes. kAtomicRead and kAtomicWrite are loads and stores
// that bypass caches for the other workgroups' sake (sc1, or glc on gfx90a).
enum class Access : uint8_t {
  kRead,
  kWrite,
  kAtomic,
  kAtomicRead,
  kAtomicWrite,
};

class Block;  // memory.cc: an allocation with its shadow.

class Memory {
 public:
  static Memory& Get();

  // The runtime's side. Returns 0 if the host has no memory left. Blocks are
  // aligned to a page and never adjacent. A freed block's addresses are not
  // used again for a while.
  uint64_t Allocate(uint64_t size, MemoryKind kind, int device, unsigned flags);
  // Makes memory known that something else allocated.
  void Register(uint64_t base, uint64_t size, MemoryKind kind, int device,
                unsigned flags);
  // False if no live allocation begins there.
  bool Free(uint64_t base);
  // The live allocation that holds the address; false if there is none.
  bool Find(uint64_t address, Allocation* allocation) const;
  // Of kDevice allocations.
  uint64_t BytesUsed(int device) const;
  // Live allocations of a kind.
  int Count(MemoryKind kind) const;

  // Copies and fills on behalf of hip calls: bytes and shadow together. A copy
  // out of unwritten device memory to the host is a fault, one to a device
  // copies the state. Addresses outside of all blocks, live or freed, are the
  // host's own memory and not checked. Throw Fault.
  void Copy(uint64_t to, uint64_t from, uint64_t size);
  void Fill(uint64_t to, const void* pattern, int pattern_size, uint64_t count);
  // Checks a range that the runtime will read or write by itself; `write`
  // makes it written.
  void Touch(uint64_t address, uint64_t size, bool write);

  // "allocation #3: 0x7f.. + 4096 bytes, device 0, live", or what is near.
  std::string Describe(uint64_t address) const;

 private:
  friend class MemoryView;

  std::shared_ptr<Block> FindLive(uint64_t address) const;
  // Null for the host's own memory; throws unless all bytes are in it.
  std::shared_ptr<Block> Whole(uint64_t address, uint64_t size,
                               const char* verb) const;
  [[noreturn]] void Refuse(uint64_t address, uint64_t size, const char* verb,
                           int lane) const;

  mutable std::shared_mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Block>> live_, freed_;
  std::deque<uint64_t> quarantine_;  // Bases of freed_, oldest first.
  uint64_t last_id_ = 0;
};

// A launch's way to memory. It belongs to one thread.
class MemoryView {
 public:
  // `workgroups`: how many the launch has.
  explicit MemoryView(uint64_t workgroups);
  ~MemoryView();
  MemoryView(const MemoryView&) = delete;

  // The workgroup, counted from 0, that makes the accesses from now on.
  void SetWorkgroup(uint64_t workgroup) {
    mine_ = first_ + static_cast<uint32_t>(workgroup);
  }

  // Checks one lane's access and returns where the bytes are. Throws Fault
  // with `lane`.
  uint8_t* Reach(uint64_t address, int bytes, Access access, int lane);
  // The same for the lanes of a mask.
  void ReachAll(const uint64_t* address, int bytes, Access access,
                uint64_t lanes, uint8_t** out);

  // Where to write the addresses that lanes access, in units of 64 bytes; null
  // for nowhere.
  void set_log(std::vector<uint64_t>* log) { log_ = log; }

  // Bytes moved, for the statistics.
  uint64_t bytes_read() const { return bytes_read_; }
  uint64_t bytes_written() const { return bytes_written_; }

 private:
  struct AtomicEvent {
    uint64_t address;
    uint32_t writer;
  };

  Block* Look(uint64_t address, int bytes, Access access, int lane);
  void CheckRead(Block* block, uint64_t offset, int bytes, int lane);
  void CheckWrite(Block* block, uint64_t offset, int bytes, int lane);
  void MarkAtomic(Block* block, uint64_t offset, int bytes, Access access,
                  int lane);
  // Whether a byte's shadow names another workgroup of this launch.
  bool Foreign(uint32_t writer) const {
    return writer != mine_ && writer - first_ < count_;
  }
  // Whether atomics order what `writer` did before what this workgroup does.
  bool Ordered(uint32_t writer);
  // Throws unless the check is off or the accesses are ordered.
  void Race(Block* block, uint64_t offset, uint32_t writer, bool write,
            int lane);

  void Log(uint64_t address, int bytes) {
    for (uint64_t piece = address / 64; piece <= (address + bytes - 1) / 64;
         ++piece) {
      log_->push_back(piece);
    }
  }

  std::vector<uint64_t>* log_ = nullptr;
  static constexpr int kRecent = 8;
  struct Recent {
    uint64_t base = 0, size = 0;
    Block* block = nullptr;
  };
  Recent recent_[kRecent];  // Recently found; [last_] was the last one.
  std::shared_ptr<Block> owners_[kRecent];
  int last_ = 0, next_ = 0;

  // Shadow names of the launch's workgroups: [first_, first_ + count_).
  uint32_t first_ = 0, count_ = 0, mine_ = 0;
  const bool uninitialized_, races_;
  uint64_t bytes_read_ = 0, bytes_written_ = 0;

  // What atomics of this launch did, in order.
  std::vector<AtomicEvent> atomics_;
  uint32_t ordered_mine_ = 0, ordered_writer_ = 0;  // Ordered()'s last yes.
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_GPU_MEMORY_H_
