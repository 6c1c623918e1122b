// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/gpu/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

namespace amdgpu_sim {
namespace {

constexpr uint64_t kPage = 4096;

// How many freed blocks keep their addresses, so that late uses of them are
// told. Their pages are given back at once.
constexpr size_t kQuarantine = 4096;

// Shadow names of who wrote a byte last. Larger ones are workgroups.
constexpr uint32_t kNobody = 0;
constexpr uint32_t kHip = 1;  // A hip call, the host, or an atomic.
constexpr uint32_t kFirstWorkgroup = 16;
// In the page table: the page's bytes have names of their own.
constexpr uint32_t kMixed = ~uint32_t{0};

std::string Hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof(text), "0x%" PRIx64, value);
  return text;
}

const char* KindName(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kHost:
      return "host";
    case MemoryKind::kDevice:
      return "device";
    case MemoryKind::kManaged:
      return "managed";
    case MemoryKind::kCode:
      return "code";
  }
  return "";
}

uint64_t Pages(uint64_t size) { return (size + kPage - 1) / kPage; }

// Zeros that take no memory before they are written.
template <typename T>
T* Zeros(uint64_t count) {
  void* memory = std::calloc(count == 0 ? 1 : count, sizeof(T));
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

}  // namespace

// The shadow is a table of pages of 4096 bytes; most of them have one writer,
// a hip call. The others have a name for every byte.
//
// Kernels of several streams may use a block at once: names are read and
// written as relaxed atomics, and a page is broken up under a lock.
class Block {
 public:
  explicit Block(const Allocation& allocation) : info(allocation) {
    pages_ = Zeros<uint32_t>(Pages(info.size));
    if (info.kind != MemoryKind::kDevice) {
      std::fill_n(pages_, Pages(info.size), kHip);
    }
  }
  ~Block() {
    std::free(pages_);
    std::free(names_);
  }
  Block(const Block&) = delete;

  bool Holds(uint64_t address) const { return address - info.base < info.size; }

  uint32_t Page(uint64_t offset) const {
    return __atomic_load_n(&pages_[offset / kPage], __ATOMIC_ACQUIRE);
  }
  uint32_t Name(uint64_t offset) const {
    uint32_t page = Page(offset);
    if (page != kMixed) return page;
    return __atomic_load_n(&names_[offset], __ATOMIC_RELAXED);
  }
  // The names of a range within a page, which is broken up if need be.
  uint32_t* Names(uint64_t offset) {
    if (Page(offset) != kMixed) BreakUp(offset / kPage);
    return names_ + offset;
  }
  const uint32_t* MixedNames(uint64_t offset) const { return names_ + offset; }

  void Mark(uint64_t offset, uint64_t size, uint32_t name) {
    while (size > 0) {
      uint64_t part = std::min(size, kPage - offset % kPage);
      bool whole =
          offset % kPage == 0 && (part == kPage || offset + part == info.size);
      if (whole) {
        __atomic_store_n(&pages_[offset / kPage], name, __ATOMIC_RELEASE);
      } else if (Page(offset) != name) {
        uint32_t* names = Names(offset);
        for (uint64_t i = 0; i < part; ++i) {
          __atomic_store_n(&names[i], name, __ATOMIC_RELAXED);
        }
      }
      offset += part;
      size -= part;
    }
  }

  // The first byte of a range that nobody wrote; `size` if there is none.
  uint64_t FirstUnwritten(uint64_t offset, uint64_t size) const {
    for (uint64_t i = 0; i < size;) {
      uint64_t part = std::min(size - i, kPage - (offset + i) % kPage);
      uint32_t page = Page(offset + i);
      if (page == kNobody) return i;
      if (page == kMixed) {
        for (uint64_t j = i; j < i + part; ++j) {
          if (Name(offset + j) == kNobody) return j;
        }
      }
      i += part;
    }
    return size;
  }

  const Allocation info;
  std::atomic<bool> freed{false};

 private:
  void BreakUp(uint64_t page) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint32_t name = __atomic_load_n(&pages_[page], __ATOMIC_RELAXED);
    if (name == kMixed) return;
    if (names_ == nullptr) names_ = Zeros<uint32_t>(Pages(info.size) * kPage);
    for (uint64_t i = 0; i < kPage; ++i) {
      __atomic_store_n(&names_[page * kPage + i], name, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&pages_[page], kMixed, __ATOMIC_RELEASE);
  }

  uint32_t* pages_;
  uint32_t* names_ = nullptr;  // Set before the first page is kMixed.
  std::mutex mutex_;
};

Memory& Memory::Get() {
  // Never destroyed: calls come in while the process exits.
  static Memory* const memory = new Memory;
  return *memory;
}

uint64_t Memory::Allocate(uint64_t size, MemoryKind kind, int device,
                          unsigned flags) {
  // A page that belongs to no block lies behind each.
  if (size > uint64_t{1} << 46) return 0;
  uint64_t length = (Pages(size) + 1) * kPage;
  void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return 0;
  Allocation allocation;
  allocation.base = reinterpret_cast<uint64_t>(memory);
  allocation.size = size;
  allocation.kind = kind;
  allocation.device = device;
  allocation.flags = flags;
  std::unique_lock<std::shared_mutex> lock(mutex_);
  allocation.id = ++last_id_;
  try {
    live_[allocation.base] = std::make_shared<Block>(allocation);
  } catch (const std::bad_alloc&) {
    live_.erase(allocation.base);
    munmap(memory, length);
    return 0;
  }
  return allocation.base;
}

void Memory::Register(uint64_t base, uint64_t size, MemoryKind kind, int device,
                      unsigned flags) {
  Allocation allocation;
  allocation.base = base;
  allocation.size = size;
  allocation.kind = kind;
  allocation.device = device;
  allocation.flags = flags;
  allocation.external = true;
  std::unique_lock<std::shared_mutex> lock(mutex_);
  allocation.id = ++last_id_;
  freed_.erase(base);
  live_[base] = std::make_shared<Block>(allocation);
}

bool Memory::Free(uint64_t base) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  auto found = live_.find(base);
  if (found == live_.end()) return false;
  std::shared_ptr<Block> block = std::move(found->second);
  live_.erase(found);
  block->freed.store(true, std::memory_order_relaxed);
  // Memory that is not ours may come back at any time under another name.
  if (block->info.external) return true;
  // A kernel that is about to touch it may do so: it stays mapped.
  uint64_t pages = Pages(block->info.size);
  if (pages > 0) {
    madvise(reinterpret_cast<void*>(base), pages * kPage, MADV_DONTNEED);
  }
  freed_[base] = std::move(block);
  quarantine_.push_back(base);
  if (quarantine_.size() > kQuarantine) {
    auto oldest = freed_.find(quarantine_.front());
    quarantine_.pop_front();
    if (oldest != freed_.end()) {
      munmap(reinterpret_cast<void*>(oldest->first),
             (Pages(oldest->second->info.size) + 1) * kPage);
      freed_.erase(oldest);
    }
  }
  return true;
}

namespace {

// The block of an ordered index that holds the address, or null.
std::shared_ptr<Block> FindIn(
    const std::map<uint64_t, std::shared_ptr<Block>>& blocks,
    uint64_t address) {
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return nullptr;
  const std::shared_ptr<Block>& block = std::prev(after)->second;
  return block->Holds(address) ? block : nullptr;
}

std::string DescribeBlock(const Block& block) {
  const Allocation& info = block.info;
  return "allocation #" + std::to_string(info.id) + ": " + Hex(info.base) +
         " + " + std::to_string(info.size) + " bytes, " + KindName(info.kind) +
         " " + std::to_string(info.device) +
         (block.freed.load(std::memory_order_relaxed) ? ", freed" : ", live");
}

std::string Bytes(uint64_t count) {
  return std::to_string(count) + (count == 1 ? " byte" : " bytes");
}

const char* Verb(Access access) {
  switch (access) {
    case Access::kRead:
    case Access::kAtomicRead:
      return "read";
    case Access::kWrite:
    case Access::kAtomicWrite:
      return "write";
    case Access::kAtomic:
      return "atomic";
  }
  return "";
}

}  // namespace

std::shared_ptr<Block> Memory::FindLive(uint64_t address) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  return FindIn(live_, address);
}

bool Memory::Find(uint64_t address, Allocation* allocation) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  std::shared_ptr<Block> block = FindIn(live_, address);
  if (block == nullptr) {
    // An allocation of no bytes is found by its base.
    auto found = live_.find(address);
    if (found == live_.end()) return false;
    block = found->second;
  }
  *allocation = block->info;
  return true;
}

uint64_t Memory::BytesUsed(int device) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& entry : live_) {
    const Allocation& info = entry.second->info;
    if (info.kind == MemoryKind::kDevice && info.device == device) {
      bytes += info.size;
    }
  }
  return bytes;
}

int Memory::Count(MemoryKind kind) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  int count = 0;
  for (const auto& entry : live_) count += entry.second->info.kind == kind;
  return count;
}

std::string Memory::Describe(uint64_t address) const {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  std::shared_ptr<Block> block = FindIn(live_, address);
  if (block != nullptr) {
    return DescribeBlock(*block) + ", at byte " +
           std::to_string(address - block->info.base);
  }
  block = FindIn(freed_, address);
  if (block != nullptr) {
    return DescribeBlock(*block) + ", at byte " +
           std::to_string(address - block->info.base);
  }
  // The nearest one, if it is so near that it may be meant.
  constexpr uint64_t kNear = 1 << 20;
  auto after = live_.upper_bound(address);
  std::string text = "in no allocation";
  uint64_t best = kNear;
  if (after != live_.begin()) {
    const Block& before = *std::prev(after)->second;
    uint64_t past = address - before.info.base - before.info.size;
    if (past < best) {
      best = past;
      text = Bytes(past) + " past the end of " + DescribeBlock(before);
    }
  }
  if (after != live_.end() && after->first - address < best) {
    text = Bytes(after->first - address) + " before " +
           DescribeBlock(*after->second);
  }
  return text;
}

void Memory::Refuse(uint64_t address, uint64_t size, const char* verb,
                    int lane) const {
  bool freed;
  {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    freed =
        FindIn(live_, address) == nullptr && FindIn(freed_, address) != nullptr;
  }
  throw Fault{freed ? Check::kUseAfterFree : Check::kOutOfBounds,
              std::string(verb) + " of " + Bytes(size) +
                  (freed ? " of freed memory" : " out of bounds"),
              lane, address};
}

std::shared_ptr<Block> Memory::Whole(uint64_t address, uint64_t size,
                                     const char* verb) const {
  std::shared_ptr<Block> block = FindLive(address);
  if (block == nullptr) {
    {
      std::shared_lock<std::shared_mutex> lock(mutex_);
      if (FindIn(freed_, address) == nullptr) return nullptr;
    }
    Refuse(address, size, verb, -1);
  }
  if (size > block->info.size - (address - block->info.base)) {
    Refuse(address, size, verb, -1);
  }
  return block;
}

void Memory::Copy(uint64_t to, uint64_t from, uint64_t size) {
  if (size == 0) return;
  std::shared_ptr<Block> source = Whole(from, size, "copy out");
  std::shared_ptr<Block> target = Whole(to, size, "copy");
  if (target == nullptr || target->info.kind != MemoryKind::kDevice) {
    // The host is going to look at it.
    if (source != nullptr && CheckEnabled(Check::kUninitialized)) {
      uint64_t unwritten =
          source->FirstUnwritten(from - source->info.base, size);
      if (unwritten < size) {
        throw Fault{Check::kUninitialized,
                    "copy of " + Bytes(size) +
                        " to the host, of which nobody wrote byte " +
                        std::to_string(unwritten),
                    -1, from + unwritten};
      }
    }
  }
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
               size);
  if (target == nullptr) return;
  uint64_t to_offset = to - target->info.base;
  if (source == nullptr || target->info.kind != MemoryKind::kDevice) {
    target->Mark(to_offset, size, kHip);
    return;
  }
  // Runs of written and unwritten bytes.
  uint64_t from_offset = from - source->info.base;
  for (uint64_t i = 0; i < size;) {
    uint64_t written = source->FirstUnwritten(from_offset + i, size - i);
    if (written > 0) target->Mark(to_offset + i, written, kHip);
    i += written;
    uint64_t run = i;
    while (run < size && source->Name(from_offset + run) == kNobody) {
      // Whole pages at a time.
      uint64_t left = kPage - (from_offset + run) % kPage;
      run += source->Page(from_offset + run) == kNobody ? left : 1;
    }
    run = std::min(run, size);
    if (run > i) target->Mark(to_offset + i, run - i, kNobody);
    i = run;
  }
}

void Memory::Fill(uint64_t to, const void* pattern, int pattern_size,
                  uint64_t count) {
  uint64_t size = count * pattern_size;
  if (size == 0) return;
  std::shared_ptr<Block> target = Whole(to, size, "fill");
  uint8_t* out = reinterpret_cast<uint8_t*>(to);
  if (pattern_size == 1) {
    std::memset(out, *static_cast<const uint8_t*>(pattern), size);
  } else {
    for (uint64_t i = 0; i < count; ++i) {
      std::memcpy(out + i * pattern_size, pattern, pattern_size);
    }
  }
  if (target != nullptr) target->Mark(to - target->info.base, size, kHip);
}

void Memory::Touch(uint64_t address, uint64_t size, bool write) {
  if (size == 0) return;
  std::shared_ptr<Block> block = Whole(address, size, write ? "write" : "read");
  if (block == nullptr) return;
  uint64_t offset = address - block->info.base;
  if (write) {
    block->Mark(offset, size, kHip);
    return;
  }
  uint64_t unwritten = block->FirstUnwritten(offset, size);
  if (unwritten < size && CheckEnabled(Check::kUninitialized)) {
    throw Fault{Check::kUninitialized,
                "read of " + Bytes(size) + ", of which nobody wrote byte " +
                    std::to_string(unwritten),
                -1, address + unwritten};
  }
}

MemoryView::MemoryView(uint64_t workgroups)
    : uninitialized_(CheckEnabled(Check::kUninitialized)),
      races_(CheckEnabled(Check::kGlobalRace)) {
  // Names repeat after four billion workgroups; they mean something during a
  // launch only.
  static std::mutex mutex;
  static uint32_t next = kFirstWorkgroup;
  constexpr uint64_t kNames = uint64_t{kMixed} - kFirstWorkgroup;
  count_ = static_cast<uint32_t>(std::min(workgroups, kNames));
  std::lock_guard<std::mutex> lock(mutex);
  if (kMixed - next < count_) next = kFirstWorkgroup;
  first_ = mine_ = next;
  next += count_;
}

MemoryView::~MemoryView() = default;

// The block with all bytes of the access.
inline Block* MemoryView::Look(uint64_t address, int bytes, Access access,
                               int lane) {
  const Recent* recent = &recent_[last_];
  if (__builtin_expect(address - recent->base >= recent->size ||
                           recent->block->freed.load(std::memory_order_relaxed),
                       false)) {
    int found = -1;
    for (int i = 0; i < kRecent; ++i) {
      if (address - recent_[i].base < recent_[i].size &&
          !recent_[i].block->freed.load(std::memory_order_relaxed)) {
        found = i;
        break;
      }
    }
    if (found < 0) {
      std::shared_ptr<Block> block = Memory::Get().FindLive(address);
      if (block == nullptr) {
        Memory::Get().Refuse(address, bytes, Verb(access), lane);
      }
      found = next_;
      next_ = (next_ + 1) % kRecent;
      recent_[found] = {block->info.base, block->info.size, block.get()};
      owners_[found] = std::move(block);
    }
    last_ = found;
    recent = &recent_[found];
  }
  if (__builtin_expect(static_cast<uint64_t>(bytes) >
                           recent->size - (address - recent->base),
                       false)) {
    // XLA's atomics on bytes and halves load and exchange the dword around
    // them, which may reach past the end of an allocation of, say, 37 bytes.
    const bool around = bytes == 4 && address % 4 == 0 &&
                        access != Access::kWrite &&
                        access != Access::kAtomicWrite;
    if (!around) Memory::Get().Refuse(address, bytes, Verb(access), lane);
  }
  return recent->block;
}

// An access of 16 bytes may lie in two pages.
inline void MemoryView::CheckRead(Block* block, uint64_t offset, int bytes,
                                  int lane) {
  uint32_t page = block->Page(offset);
  uint64_t end = offset + bytes;
  if (__builtin_expect(page == kHip, true) &&
      (offset / kPage == (end - 1) / kPage || block->Page(end - 1) == kHip)) {
    return;
  }
  if (page == kMixed &&
      (offset / kPage == (end - 1) / kPage || block->Page(end - 1) == kMixed)) {
    // Most often all of the bytes have the same writer.
    const uint32_t* names = block->MixedNames(offset);
    uint32_t first = __atomic_load_n(names, __ATOMIC_RELAXED);
    uint32_t others = 0;
    for (int i = 1; i < bytes; ++i) {
      others |= first ^ __atomic_load_n(names + i, __ATOMIC_RELAXED);
    }
    if (others == 0 && first != kNobody && !Foreign(first)) return;
  }
  for (uint64_t i = offset; i < end; ++i) {
    uint32_t name = block->Name(i);
    if (name == kNobody) {
      if (!uninitialized_) continue;
      throw Fault{Check::kUninitialized,
                  "read of " + Bytes(bytes) + ", of which nobody wrote byte " +
                      std::to_string(i - offset),
                  lane, block->info.base + i};
    }
    if (Foreign(name)) Race(block, i, name, false, lane);
  }
}

inline void MemoryView::CheckWrite(Block* block, uint64_t offset, int bytes,
                                   int lane) {
  while (bytes > 0) {
    int part = bytes;
    uint64_t left = kPage - offset % kPage;
    if (left < static_cast<uint64_t>(part)) part = static_cast<int>(left);
    uint32_t* names = block->Names(offset);
    int i = 0;
    // Two at once: names of even offsets are aligned.
    const uint64_t pair = uint64_t{mine_} << 32 | mine_;
    for (; offset % 2 == 0 && i + 2 <= part; i += 2) {
      uint64_t* two = reinterpret_cast<uint64_t*>(names + i);
      const uint64_t old = __atomic_load_n(two, __ATOMIC_RELAXED);
      if (old == pair) continue;
      if (__builtin_expect(Foreign(static_cast<uint32_t>(old)) ||
                               Foreign(static_cast<uint32_t>(old >> 32)),
                           false)) {
        break;
      }
      __atomic_store_n(two, pair, __ATOMIC_RELAXED);
    }
    for (; i < part; ++i) {
      uint32_t name = __atomic_load_n(names + i, __ATOMIC_RELAXED);
      if (__builtin_expect(Foreign(name), false)) {
        Race(block, offset + i, name, true, lane);
      }
      __atomic_store_n(names + i, mine_, __ATOMIC_RELAXED);
    }
    offset += part;
    bytes -= part;
  }
}

void MemoryView::MarkAtomic(Block* block, uint64_t offset, int bytes,
                            Access access, int lane) {
  if (access != Access::kAtomicWrite && uninitialized_) {
    uint64_t unwritten = block->FirstUnwritten(offset, bytes);
    if (unwritten < static_cast<uint64_t>(bytes)) {
      throw Fault{Check::kUninitialized,
                  std::string(Verb(access)) + " of " + Bytes(bytes) +
                      ", of which nobody wrote byte " +
                      std::to_string(unwritten),
                  lane, block->info.base + offset + unwritten};
    }
  }
  if (access != Access::kAtomicRead) block->Mark(offset, bytes, kHip);
  if (races_) {
    uint64_t address = block->info.base + offset;
    // A loop on one address adds nothing new.
    if (!atomics_.empty() && atomics_.back().address == address &&
        atomics_.back().writer == mine_) {
      return;
    }
    constexpr size_t kMost = 1 << 22;
    if (atomics_.size() < kMost) atomics_.push_back({address, mine_});
  }
}

uint8_t* MemoryView::Reach(uint64_t address, int bytes, Access access,
                           int lane) {
  Block* block = Look(address, bytes, access, lane);
  if (log_ != nullptr && lane >= 0) Log(address, bytes);
  uint64_t offset = address - block->info.base;
  const int asked = bytes;
  bytes =
      static_cast<int>(std::min<uint64_t>(bytes, block->info.size - offset));
  switch (access) {
    case Access::kRead:
      if (lane < 0 && address % 4 != 0 && CheckEnabled(Check::kMisaligned)) {
        throw Fault{Check::kMisaligned,
                    "scalar read at an address that is no multiple of 4", lane,
                    address};
      }
      CheckRead(block, offset, bytes, lane);
      bytes_read_ += bytes;
      break;
    case Access::kWrite:
      CheckWrite(block, offset, bytes, lane);
      bytes_written_ += bytes;
      break;
    default:
      if (access == Access::kAtomic && address % asked != 0 &&
          CheckEnabled(Check::kMisaligned)) {
        throw Fault{Check::kMisaligned,
                    "atomic of " + Bytes(asked) +
                        " at an address that is no multiple of it",
                    lane, address};
      }
      MarkAtomic(block, offset, bytes, access, lane);
      if (access != Access::kAtomicWrite) bytes_read_ += bytes;
      if (access != Access::kAtomicRead) bytes_written_ += bytes;
      break;
  }
  return reinterpret_cast<uint8_t*>(address);
}

void MemoryView::ReachAll(const uint64_t* address, int bytes, Access access,
                          uint64_t lanes, uint8_t** out) {
  if (lanes == 0) return;
  uint64_t low = ~uint64_t{0}, high = 0;
  for (uint64_t left = lanes; left != 0; left &= left - 1) {
    const int lane = __builtin_ctzll(left);
    low = std::min(low, address[lane]);
    high = std::max(high, address[lane]);
    out[lane] = reinterpret_cast<uint8_t*>(address[lane]);
  }
  // Most often all lanes are in one block.
  const bool plain = access == Access::kRead || access == Access::kWrite;
  const int first = __builtin_ctzll(lanes);
  Block* block = Look(address[first], bytes, access, first);
  const uint64_t base = block->info.base, size = block->info.size;
  if (!plain || low < base || high - base >= size ||
      static_cast<uint64_t>(bytes) > size - (high - base)) {
    for (; lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctzll(lanes);
      Reach(address[lane], bytes, access, lane);
    }
    return;
  }
  if (log_ != nullptr) {
    for (uint64_t left = lanes; left != 0; left &= left - 1) {
      Log(address[__builtin_ctzll(left)], bytes);
    }
  }
  const uint64_t total = uint64_t{1} * bytes * __builtin_popcountll(lanes);
  if (access == Access::kWrite) {
    bytes_written_ += total;
    for (; lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctzll(lanes);
      CheckWrite(block, address[lane] - base, bytes, lane);
    }
    return;
  }
  bytes_read_ += total;
  // What a hip call wrote is most often read.
  constexpr uint64_t kFew = 16;
  const uint64_t first_page = (low - base) / kPage;
  const uint64_t last_page = (high + bytes - 1 - base) / kPage;
  if (last_page - first_page < kFew) {
    bool good = true;
    for (uint64_t page = first_page; page <= last_page; ++page) {
      good &= block->Page(page * kPage) == kHip;
    }
    if (good) return;
  }
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctzll(lanes);
    CheckRead(block, address[lane] - base, bytes, lane);
  }
}

bool MemoryView::Ordered(uint32_t writer) {
  if (atomics_.empty()) return false;
  if (ordered_mine_ == mine_ && ordered_writer_ == writer) return true;
  // Follows the writer's atomics: whoever does one on the same address after
  // it comes after it, and so do that one's later atomics. What the writer
  // wrote between two of its atomics is not told apart.
  std::vector<uint32_t> after = {writer};
  std::vector<uint64_t> addresses;
  auto has = [](const auto& sorted, auto value) {
    return std::binary_search(sorted.begin(), sorted.end(), value);
  };
  auto add = [](auto* sorted, auto value) {
    sorted->insert(std::lower_bound(sorted->begin(), sorted->end(), value),
                   value);
  };
  for (const AtomicEvent& event : atomics_) {
    bool known = has(after, event.writer);
    if (!known && has(addresses, event.address)) {
      add(&after, event.writer);
      known = true;
    }
    if (known && !has(addresses, event.address)) {
      add(&addresses, event.address);
    }
  }
  if (!has(after, mine_)) return false;
  ordered_mine_ = mine_;
  ordered_writer_ = writer;
  return true;
}

void MemoryView::Race(Block* block, uint64_t offset, uint32_t writer,
                      bool write, int lane) {
  if (!races_ || Ordered(writer)) return;
  throw Fault{Check::kGlobalRace,
              std::string(write ? "write of" : "read of") +
                  " a byte that workgroup " + std::to_string(writer - first_) +
                  " of this launch wrote too, without atomics",
              lane, block->info.base + offset};
}

}  // namespace amdgpu_sim
