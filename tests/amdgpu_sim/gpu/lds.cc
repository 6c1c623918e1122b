// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/gpu/lds.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tests/amdgpu_sim/isa/inst.h"

namespace amdgpu_sim {
namespace {

template <typename T>
T Load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
void Store(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

// Calls f(offset, T{}) for pieces of 8, 4, 2 and 1 bytes.
template <typename F>
void Pieces(uint32_t offset, int bytes, F&& f) {
  for (; bytes >= 8; offset += 8, bytes -= 8) f(offset, uint64_t{});
  if (bytes & 4) {
    f(offset, uint32_t{});
    offset += 4;
  }
  if (bytes & 2) {
    f(offset, uint16_t{});
    offset += 2;
  }
  if (bytes & 1) f(offset, uint8_t{});
}

// Whether the wave's current instruction loads from global memory to LDS.
bool IsDma(const Wave& wave) {
  return wave.current != nullptr &&
         wave.current->inst_class != InstClass::kLds && wave.current->lds;
}

// The widest integers that so many bytes are made of.
template <int kBytes>
using Unit = std::conditional_t<
    kBytes % 8 == 0, uint64_t,
    std::conditional_t<kBytes % 4 == 0, uint32_t,
                       std::conditional_t<kBytes % 2 == 0, uint16_t, uint8_t>>>;

// The byte in all bytes of a T.
template <typename T>
constexpr T Splat(uint8_t byte) {
  return static_cast<T>(0x0101010101010101u * byte);
}

}  // namespace

void Lds::Reset(uint32_t size, int waves, uint32_t quiet) {
  if (bytes_.empty()) {
    bytes_.resize(kMaxSize);
    written_.resize(kMaxSize);
    writer_.resize(kMaxSize);
    reader_.resize(kMaxSize);
    touched_.resize(kMaxSize / kBlock + 1);
  }
  uint32_t used = std::max(size_, size);
  size_ = size;
  shared_ = waves > 1;
  any_dma_ = has_warning_ = false;
  SetQuiet(quiet);
  flights_wave_ = -1;
  // No sensible number, address or count.
  std::memset(bytes_.data(), 0xff, size);
  std::memset(written_.data(), 0, used);
  std::memset(writer_.data(), 0, used);
  std::memset(reader_.data(), 0, used);
  std::memset(touched_.data(), 0, touched_.size());
  suspects_.clear();
  if (size == 0) return;
  while (records_.size() < static_cast<size_t>(waves)) {
    records_.push_back(std::make_unique<WaveRecords>());
  }
  for (int i = 0; i < waves; ++i) {
    for (Record& record : records_[i]->lds) record.sequence = 0;
    for (Record& record : records_[i]->dma) record.sequence = 0;
    records_[i]->last = nullptr;
  }
}

const Lds::Record* Lds::Last(const Wave& wave) const {
  if (size_ == 0) return nullptr;
  const Record* last = records_[wave.index]->last;
  return last != nullptr && last->sequence == wave.sequence ? last : nullptr;
}

Lds::Record* Lds::Begin(Wave& wave, int bytes, bool write, bool dma) {
  WaveRecords& records = *records_[wave.index];
  Record* record = records.last;
  if (record != nullptr && record->sequence == wave.sequence) return record;
  if (dma) {
    record = &records.dma[records.next_dma];
    records.next_dma = (records.next_dma + 1) % kDmaRecords;
  } else {
    record = &records.lds[records.next_lds];
    records.next_lds = (records.next_lds + 1) % kLdsRecords;
  }
  record->sequence = wave.sequence;
  record->write = write;
  record->dma = dma;
  record->bytes = bytes;
  record->count = 0;
  records.last = record;
  return record;
}

uint8_t* Lds::Reach(Wave& wave, uint32_t address, int bytes, Access access,
                    int lane) {
  if (__builtin_expect(
          address >= size_ || static_cast<uint32_t>(bytes) > size_ - address,
          false)) {
    throw Fault{Check::kOutOfBounds,
                "LDS access of " + std::to_string(bytes) +
                    " bytes, the workgroup has " + std::to_string(size_),
                lane, address};
  }
  const bool dma = IsDma(wave);
  if (shared_ || record_all_ || dma) {
    bool write = access != Access::kRead && access != Access::kAtomicRead;
    Record* record = Begin(wave, bytes, write, dma);
    if (record->count < 2 * kLanes) record->address[record->count++] = address;
  }
  switch (access) {
    case Access::kRead:
    case Access::kAtomicRead:
      ReadBytes(wave, address, bytes, lane);
      break;
    case Access::kWrite:
    case Access::kAtomicWrite:
      WriteBytes(wave, address, bytes, lane, dma);
      break;
    case Access::kAtomic:
      if (address % bytes != 0 && CheckEnabled(Check::kMisaligned)) {
        throw Fault{Check::kMisaligned,
                    "LDS atomic of " + std::to_string(bytes) +
                        " bytes at an address that is no multiple of it",
                    lane, address};
      }
      AtomicBytes(wave, address, bytes, lane);
      break;
  }
  return bytes_.data() + address;
}

template <int kBytes>
inline bool Lds::ReadQuickly(uint32_t offset, uint8_t mine, bool track) {
  using T = Unit<kBytes>;
  bool good = true, mark = false;
  for (uint32_t i = offset; i < offset + kBytes; i += sizeof(T)) {
    good &= Load<T>(&written_[i]) == Splat<T>(1);
    const T writer = Load<T>(&writer_[i]);
    good &= writer == 0 || writer == Splat<T>(mine);
    const T reader = Load<T>(&reader_[i]);
    mark |= reader != Splat<T>(mine) && reader != Splat<T>(kMany);
    // Nobody, or the same for all of the bytes.
    good &= reader == Splat<T>(static_cast<uint8_t>(reader));
  }
  if (!good) return false;
  if (!track || !mark) return true;
  for (uint32_t i = offset; i < offset + kBytes; i += sizeof(T)) {
    const uint8_t reader = reader_[i];
    const bool others = reader != 0 && !Own(reader, mine);
    Store<T>(&reader_[i], Splat<T>(others ? kMany : mine));
  }
  return true;
}

template <int kBytes>
inline bool Lds::WriteQuickly(uint32_t offset, uint8_t mine, uint8_t how,
                              bool track) {
  using T = Unit<kBytes>;
  if (track) {
    bool good = true;
    for (uint32_t i = offset; i < offset + kBytes; i += sizeof(T)) {
      const T writer = Load<T>(&writer_[i]);
      good &= writer == 0 || writer == Splat<T>(mine);
      const T reader = Load<T>(&reader_[i]);
      good &= reader == 0 || reader == Splat<T>(mine);
    }
    if (!good) return false;
  }
  for (uint32_t i = offset; i < offset + kBytes; i += sizeof(T)) {
    Store<T>(&written_[i], Splat<T>(1));
    if (track) Store<T>(&writer_[i], Splat<T>(mine | how));
  }
  return true;
}

template <int kBytes>
void Lds::PlainAll(Wave& wave, const uint32_t* address, bool write, bool dma,
                   uint64_t lanes) {
  const uint8_t mine = static_cast<uint8_t>(wave.index + 1);
  const uint8_t how = dma ? kDma : 0;
  any_dma_ |= dma;
  const bool track = (shared_ && races_) || any_dma_;
  for (uint64_t left = lanes; left != 0; left &= left - 1) {
    const int lane = __builtin_ctzll(left);
    if (write) {
      if (!WriteQuickly<kBytes>(address[lane], mine, how, track)) {
        WriteBytes(wave, address[lane], kBytes, lane, dma);
      }
    } else if (!ReadQuickly<kBytes>(address[lane], mine, track)) {
      ReadBytes(wave, address[lane], kBytes, lane);
    }
  }
}

void Lds::ReachAll(Wave& wave, const uint32_t* address, int bytes,
                   Access access, uint64_t lanes, uint8_t** out) {
  if (lanes == 0) return;
  uint32_t low = ~uint32_t{0}, high = 0;
  if (lanes == ~uint64_t{0}) {
    for (int lane = 0; lane < kLanes; ++lane) {
      low = std::min(low, address[lane]);
      high = std::max(high, address[lane]);
      out[lane] = bytes_.data() + address[lane];
    }
  } else {
    for (uint64_t left = lanes; left != 0; left &= left - 1) {
      const int lane = __builtin_ctzll(left);
      low = std::min(low, address[lane]);
      high = std::max(high, address[lane]);
      out[lane] = bytes_.data() + address[lane];
    }
  }
  const bool dma = IsDma(wave);
  // One lane after the other where something is unusual.
  const bool good =
      high < size_ && static_cast<uint32_t>(bytes) <= size_ - high &&
      (access == Access::kWrite || (access == Access::kRead && !dma));
  if (!good) {
    for (; lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctzll(lanes);
      out[lane] = Reach(wave, address[lane], bytes, access, lane);
    }
    return;
  }
  const bool write = access == Access::kWrite;
  if (shared_ || record_all_ || dma) {
    Record* record = Begin(wave, bytes, write, dma);
    if (lanes == ~uint64_t{0} && record->count <= kLanes) {
      std::memcpy(record->address + record->count, address,
                  kLanes * sizeof(uint32_t));
      record->count += kLanes;
    } else {
      for (uint64_t left = lanes; left != 0; left &= left - 1) {
        if (record->count == 2 * kLanes) break;
        record->address[record->count++] = address[__builtin_ctzll(left)];
      }
    }
  }
  const uint32_t first = low / kBlock, last = (high + bytes - 1) / kBlock;
  std::memset(&touched_[first], 1, last - first + 1);
  switch (bytes) {
    case 1:
      return PlainAll<1>(wave, address, write, dma, lanes);
    case 2:
      return PlainAll<2>(wave, address, write, dma, lanes);
    case 4:
      return PlainAll<4>(wave, address, write, dma, lanes);
    case 8:
      return PlainAll<8>(wave, address, write, dma, lanes);
    case 12:
      return PlainAll<12>(wave, address, write, dma, lanes);
    case 16:
      return PlainAll<16>(wave, address, write, dma, lanes);
  }
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctzll(lanes);
    if (write) {
      WriteBytes(wave, address[lane], bytes, lane, dma);
    } else {
      ReadBytes(wave, address[lane], bytes, lane);
    }
  }
}

std::string Lds::Who(uint8_t code) const {
  if (code == kMany || code == kManyAtomic) return "several waves";
  return "wave " + std::to_string((code & kWaveMask) - 1);
}

// The loads to LDS that the wave has not waited for.
void Lds::FindFlights(const Wave& wave) {
  if (flights_wave_ == wave.index && flights_sequence_ == wave.sequence) return;
  flights_wave_ = wave.index;
  flights_sequence_ = wave.sequence;
  flights_.clear();
  if (wave.vm.empty()) return;
  for (const Record& record : records_[wave.index]->dma) {
    if (record.sequence == 0 || !wave.vm.Has(record.sequence)) continue;
    const auto [low, high] =
        std::minmax_element(record.address, record.address + record.count);
    flights_.push_back({&record, *low, *high + record.bytes});
  }
}

// Whether one of them writes the byte.
bool Lds::InFlight(uint32_t offset) const {
  for (const Flight& flight : flights_) {
    if (offset < flight.begin || offset >= flight.end) continue;
    const Record& record = *flight.record;
    for (int i = 0; i < record.count; ++i) {
      if (offset - record.address[i] < static_cast<uint32_t>(record.bytes)) {
        return true;
      }
    }
  }
  return false;
}

bool Lds::MaybeInFlight(uint32_t offset, uint32_t bytes) const {
  for (const Flight& flight : flights_) {
    if (offset < flight.end && flight.begin < offset + bytes) return true;
  }
  return false;
}

void Lds::Conflict(const char* what, uint8_t other, const char* did, int lane,
                   uint32_t offset) {
  const bool carried = other != kMany && (other & kCarried) != 0;
  Fault fault{carried ? Check::kLdsWait : Check::kLdsRace,
              std::string("LDS ") + what + " of a byte that " + Who(other) +
                  (carried ? " had not waited to have " : " ") + did +
                  (carried ? " when it came to the last barrier"
                           : " since the last barrier"),
              lane, offset};
  if (Wanted(fault.check)) Report(fault);
}

void Lds::Report(const Fault& fault) {
  if (!CheckOnlyWarns(fault.check)) throw fault;
  if (!has_warning_) warning_ = fault;
  has_warning_ = true;
}

void Lds::MarkReader(uint32_t offset, int wave, uint8_t how) {
  uint8_t& reader = reader_[offset];
  uint8_t mine = static_cast<uint8_t>(wave + 1);
  if (reader == 0 || Own(reader, mine)) {
    reader = mine | how;
  } else {
    reader = kMany;
  }
}

void Lds::MarkWriter(uint32_t offset, int wave, uint8_t how) {
  uint8_t& writer = writer_[offset];
  uint8_t mine = static_cast<uint8_t>(wave + 1);
  if (writer == 0 || Own(writer, mine)) {
    writer = mine | how;
    return;
  }
  if (many_.empty()) many_.resize(kMaxSize);
  if (writer == kManyAtomic) {
    many_[offset] = 0xffff;
  } else if (writer != kMany) {
    many_[offset] = static_cast<uint16_t>(1u << ((writer & kWaveMask) - 1));
  }
  many_[offset] |= static_cast<uint16_t>(1u << wave);
  writer = kMany;
}

void Lds::ReadBytes(Wave& wave, uint32_t offset, int bytes, int lane) {
  const uint8_t mine = static_cast<uint8_t>(wave.index + 1);
  const bool track = shared_ && races_;
  if (track) Touch(offset, bytes);
  Pieces(offset, bytes, [&](uint32_t at, auto type) {
    using T = decltype(type);
    if (__builtin_expect(Load<T>(&written_[at]) != Splat<T>(1), false) &&
        uninitialized_) {
      Report({Check::kLdsUninitialized,
              "LDS read of " + std::to_string(bytes) +
                  " bytes, some of which nobody wrote",
              lane, at});
    }
    if (!track && !any_dma_) return;
    const T writer = Load<T>(&writer_[at]);
    if (any_dma_) FindFlights(wave);
    if (any_dma_ && writer == Splat<T>(mine | kDma) &&
        !MaybeInFlight(at, sizeof(T))) {
      Store<T>(&writer_[at], Splat<T>(mine));
    } else if (__builtin_expect(writer != 0 && writer != Splat<T>(mine),
                                false)) {
      for (uint32_t i = at; i < at + sizeof(T); ++i) {
        const uint8_t code = writer_[i];
        if (code == 0) continue;
        if (Own(code, mine)) {
          if ((code & kDma) == 0) continue;
          if (!CheckEnabled(Check::kWaitcnt) || !InFlight(i)) {
            writer_[i] = mine;
            continue;
          }
          throw Fault{Check::kWaitcnt,
                      "LDS read of a byte that the wave's own load to LDS "
                      "writes, before its s_waitcnt vmcnt",
                      lane, i};
        }
        if (code == kMany && (many_[i] >> wave.index & 1)) continue;
        if (!track) continue;
        Conflict("read", code, code & kCarried ? "written" : "wrote", lane, i);
      }
    }
    if (!track) return;
    const T reader = Load<T>(&reader_[at]);
    if (reader == Splat<T>(mine) || reader == Splat<T>(kMany)) return;
    if (reader == 0) {
      Store<T>(&reader_[at], Splat<T>(mine));
      return;
    }
    for (uint32_t i = at; i < at + sizeof(T); ++i) {
      MarkReader(i, wave.index, 0);
    }
  });
}

void Lds::WriteBytes(Wave& wave, uint32_t offset, int bytes, int lane,
                     bool dma) {
  const uint8_t mine = static_cast<uint8_t>(wave.index + 1);
  const uint8_t how = dma ? kDma : 0;
  std::memset(&written_[offset], 1, bytes);
  if (dma) any_dma_ = true;
  if (!((shared_ && races_) || any_dma_)) return;
  Touch(offset, bytes);
  Pieces(offset, bytes, [&](uint32_t at, auto type) {
    using T = decltype(type);
    const T writer = Load<T>(&writer_[at]);
    const T reader = Load<T>(&reader_[at]);
    if (__builtin_expect((writer == 0 || writer == Splat<T>(mine)) &&
                             (reader == 0 || reader == Splat<T>(mine)),
                         true)) {
      Store<T>(&writer_[at], Splat<T>(mine | how));
      return;
    }
    for (uint32_t i = at; i < at + sizeof(T); ++i) {
      const uint8_t code = writer_[i];
      if (code != 0 && !Own(code, mine)) {
        suspects_.push_back(
            {i, bytes_[i], code, false, static_cast<int8_t>(lane)});
      }
      if (reader_[i] != 0 && !Own(reader_[i], mine)) {
        suspects_.push_back(
            {i, bytes_[i], reader_[i], true, static_cast<int8_t>(lane)});
      }
      MarkWriter(i, wave.index, how);
    }
  });
}

void Lds::AtomicBytes(Wave& wave, uint32_t offset, int bytes, int lane) {
  const uint8_t mine = static_cast<uint8_t>(wave.index + 1);
  for (uint32_t i = offset; i < offset + bytes; ++i) {
    if (written_[i] == 0 && uninitialized_) {
      Report({Check::kLdsUninitialized,
              "LDS atomic on a byte that nobody wrote", lane, i});
    }
    written_[i] = 1;
    if (!shared_ || !races_) continue;
    uint8_t& writer = writer_[i];
    if (reader_[i] != 0 && !Own(reader_[i], mine)) {
      Conflict("atomic", reader_[i], "read", lane, i);
    }
    if (writer == 0) {
      writer = kAtomicWrite | mine;
    } else if (!Own(writer, mine)) {
      if (writer == kMany || (writer & kAtomicWrite) == 0) {
        Conflict("atomic", writer, writer & kCarried ? "written" : "wrote",
                 lane, i);
      }
      writer = kManyAtomic;
    }
  }
  if (shared_ && races_) Touch(offset, bytes);
}

void Lds::CheckSuspects() {
  std::vector<Suspect> suspects = std::move(suspects_);
  suspects_.clear();
  if (!races_) return;
  for (const Suspect& suspect : suspects) {
    if (bytes_[suspect.offset] == suspect.old) continue;
    const bool carried = suspect.other != kMany && (suspect.other & kCarried);
    Conflict("write", suspect.other,
             suspect.read ? "read"
             : carried    ? "written with another value"
                          : "wrote with another value",
             suspect.lane, suspect.offset);
  }
}

void Lds::PassBarrier(const Wave* const* waves, int count) {
  if (size_ == 0) return;
  for (uint32_t block = 0; block * kBlock < size_; ++block) {
    if (touched_[block] == 0) continue;
    touched_[block] = 0;
    std::memset(&writer_[block * kBlock], 0, kBlock);
    std::memset(&reader_[block * kBlock], 0, kBlock);
  }
  // What is still under way belongs to the next interval.
  auto carry = [&](const Record& record, const Wave& wave, uint8_t how) {
    for (int i = 0; i < record.count; ++i) {
      Touch(record.address[i], record.bytes);
      for (int byte = 0; byte < record.bytes; ++byte) {
        uint32_t at = record.address[i] + byte;
        if (record.write) {
          MarkWriter(at, wave.index, how);
        } else {
          MarkReader(at, wave.index, how);
        }
      }
    }
  };
  for (int i = 0; i < count; ++i) {
    const Wave& wave = *waves[i];
    if (wave.lgkm.empty() && wave.vm.empty()) continue;
    const WaveRecords& records = *records_[wave.index];
    if (!wave.lgkm.empty() && Wanted(Check::kLdsWait)) {
      for (const Record& record : records.lds) {
        if (record.sequence != 0 && wave.lgkm.Has(record.sequence)) {
          carry(record, wave, kCarried);
        }
      }
    }
    if (!any_dma_ || wave.vm.empty()) continue;
    for (const Record& record : records.dma) {
      if (record.sequence != 0 && wave.vm.Has(record.sequence)) {
        carry(record, wave, kDma);
      }
    }
  }
}

}  // namespace amdgpu_sim
