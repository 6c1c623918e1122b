// SPDX-License-Identifier: Apache-2.0

// Vector memory instructions: global, flat, scratch and buffer loads, stores
// and atomics, loads that go straight to LDS, and cache maintenance.
//
// Memory is coherent here and an access is done when its instruction
// executes; that its result counts only after s_waitcnt is checked apart.
// Loads and stores of any alignment are legal, as the kernel driver
// configures the hardware; atomics must be aligned to their size.

#include <algorithm>

#include "tests/amdgpu_sim/isa/atomic.h"
#include "tests/amdgpu_sim/isa/lanes.h"
#include "tests/amdgpu_sim/isa/ops.h"

namespace amdgpu_sim {
namespace {

constexpr Type kW = Type::kWide;

enum class Space : uint8_t { kGlobal, kFlat, kScratch, kBuffer };

// Loads and stores that the compiler makes for atomics of scopes beyond the
// workgroup bypass caches: the check for races between workgroups knows them.
bool Coherent(const Wave& wave, const Inst& inst) {
  return wave.arch == Arch::kGfx90a ? inst.glc : inst.sc1;
}
Access ReadAccess(const Wave& wave, const Inst& inst) {
  return Coherent(wave, inst) ? Access::kAtomicRead : Access::kRead;
}
Access WriteAccess(const Wave& wave, const Inst& inst) {
  return Coherent(wave, inst) ? Access::kAtomicWrite : Access::kWrite;
}

// Where an instruction keeps what it stores; the order of the text.
constexpr int DataIndex(Space space) { return space == Space::kBuffer ? 0 : 1; }

// A buffer resource of GFX9 with the offsets of one instruction.
//
// The address is base + soffset + offset, where offset counts the
// instruction's and the lane's offset and stride * index; swizzled, runs of
// `index_stride` indices interleave their four-byte elements.
class Buffer {
 public:
  Buffer(const Wave& wave, const Inst& inst, int first) {
    const Operand& resource = inst.src[first + 1];
    if (resource.kind != Operand::Kind::kScalar) {
      throw Fault{Check::kUnsupported, "buffer resource"};
    }
    uint32_t words[4];
    std::memcpy(words, &wave.s[resource.reg], sizeof(words));
    base_ = words[0] | uint64_t{words[1] & 0xffffu} << 32;
    private_ = base_ == 0 && (words[3] >> 23 & 1);
    stride_ = words[1] >> 16 & 0x3fff;
    swizzled_ = words[1] >> 31;
    indexed_ = inst.idxen;
    records_ = words[2];
    const bool add_lane = words[3] >> 23 & 1;
    // The data format has more bits of the stride when lanes are added.
    if (add_lane) stride_ |= (words[3] >> 15 & 0xf) << 14;
    index_stride_ = 8u << (words[3] >> 21 & 3);
    scalar_offset_ = ScalarValue(wave, inst.src[first + 2]);

    const Operand& address = inst.src[first];
    const uint32_t* index = nullptr;
    const uint32_t* offset = nullptr;
    if (inst.idxen) index = wave.v[address.reg];
    if (inst.offen) offset = wave.v[address.reg + (inst.idxen ? 1 : 0)];
    for (int lane = 0; lane < kLanes; ++lane) {
      index_[lane] = (index ? index[lane] : 0) + (add_lane ? lane : 0);
      // May exceed 32 bits, and is out of range then.
      offset_[lane] = uint64_t{offset ? offset[lane] : 0} + inst.offset;
    }
  }

  bool swizzled() const { return swizzled_; }

  // The descriptor of the private segment that the launch makes (gfx90a has
  // it in s[0:3]) adds lanes and has no base. The scalar offset there counts
  // a wave's bytes, the others a lane's.
  bool is_private() const { return private_; }
  void PrivateOffsets(uint32_t* offset) const {
    for (int lane = 0; lane < kLanes; ++lane) {
      offset[lane] =
          static_cast<uint32_t>(offset_[lane]) + scalar_offset_ / kLanes;
    }
  }

  // Whether the piece (of 4 bytes at most) `more` bytes further is in range.
  // The range counts records where an instruction gives their index, else
  // bytes. Documents name swizzling instead of the index, but hand-written
  // kernels that AMD ships mask their ragged ends by it.
  bool InRange(int lane, uint32_t more) const {
    if (indexed_ && stride_ != 0) return index_[lane] < records_;
    const uint64_t offset =
        offset_[lane] + more + uint64_t{stride_} * index_[lane];
    return offset + scalar_offset_ < records_;
  }

  uint64_t Address(int lane, uint32_t more) const {
    const uint64_t offset = offset_[lane] + more;
    const uint64_t start = base_ + scalar_offset_;
    if (!swizzled_) return start + offset + uint64_t{stride_} * index_[lane];
    const uint64_t block = index_[lane] / index_stride_;
    const uint64_t within = index_[lane] % index_stride_;
    return start +
           (block * stride_ + offset / kElement * kElement) * index_stride_ +
           within * kElement + offset % kElement;
  }

  // A piece of a swizzled buffer must not leave its element.
  void CheckPiece(int lane, int bytes) const {
    if (swizzled_ && offset_[lane] % kElement + bytes > kElement) {
      throw Fault{Check::kUnsupported,
                  "access across elements of a swizzled buffer", lane};
    }
  }

 private:
  static constexpr uint32_t kElement = 4;

  uint64_t base_;
  uint32_t stride_, records_, index_stride_, scalar_offset_;
  bool swizzled_, indexed_, private_;
  uint32_t index_[kLanes];
  uint64_t offset_[kLanes];
};

void VectorAddresses(const Wave& wave, const Inst& inst, uint64_t* address) {
  const Operand& base = inst.src[0];
  const uint32_t* low = wave.v[base.reg];
  const uint32_t* high = wave.v[base.reg + 1];
  const int64_t offset = inst.offset;
  for (int lane = 0; lane < kLanes; ++lane) {
    address[lane] = (low[lane] | uint64_t{high[lane]} << 32) + offset;
  }
}

// Two registers of address, or an unsigned 32-bit offset to scalar ones.
void GlobalAddresses(const Wave& wave, const Inst& inst, const Operand& scalar,
                     uint64_t* address) {
  if (scalar.kind != Operand::Kind::kScalar) {
    VectorAddresses(wave, inst, address);
    return;
  }
  const uint64_t base =
      wave.s64(scalar.reg) + static_cast<int64_t>(inst.offset);
  const uint32_t* offset = wave.v[inst.src[0].reg];
  for (int lane = 0; lane < kLanes; ++lane) address[lane] = base + offset[lane];
}

void ScratchOffsets(const Wave& wave, const Inst& inst, const Operand& scalar,
                    uint32_t* offset) {
  const uint32_t base = ScalarValue(wave, scalar) + inst.offset;
  if (inst.src[0].kind != Operand::Kind::kVector) {
    for (int lane = 0; lane < kLanes; ++lane) offset[lane] = base;
    return;
  }
  const uint32_t* vector = wave.v[inst.src[0].reg];
  for (int lane = 0; lane < kLanes; ++lane) offset[lane] = base + vector[lane];
}

void CheckAligned(const uint64_t* address, int bytes, uint64_t lanes) {
  if (!CheckEnabled(Check::kMisaligned)) return;
  ForLanes(lanes, [&](int lane) {
    if (address[lane] % bytes != 0) {
      throw Fault{Check::kMisaligned, "atomic access", lane, address[lane]};
    }
  });
}

// Flat addresses select memory, LDS or scratch by their high half.
void FlatBytes(Wave& wave, const uint64_t* address, int bytes, Access access,
               uint64_t lanes, LaneBytes at) {
  uint64_t global = 0;
  ForLanes(lanes, [&](int lane) {
    const uint32_t high = address[lane] >> 32;
    if (high == kSharedAperture) {
      at[lane] =
          wave.Lds(static_cast<uint32_t>(address[lane]), bytes, access, lane);
    } else if (high == kPrivateAperture) {
      at[lane] = wave.Scratch(static_cast<uint32_t>(address[lane]), bytes,
                              access, lane);
    } else {
      global |= uint64_t{1} << lane;
    }
  });
  wave.GlobalAll(address, bytes, access, global, at);
}

// Finds the bytes of all lanes' accesses. Returns the lanes whose access is
// whole: all active ones, except that a buffer's may be out of range.
template <Space kSpace>
uint64_t Reach(Wave& wave, const Inst& inst, bool has_data_source, int bytes,
               Access access, LaneBytes at) {
  static_assert(kSpace != Space::kBuffer);
  const uint64_t exec = wave.exec();
  const Operand& scalar = inst.src[has_data_source ? 2 : 1];
  if constexpr (kSpace == Space::kScratch) {
    uint32_t offset[kLanes];
    ScratchOffsets(wave, inst, scalar, offset);
    wave.ScratchAll(offset, bytes, access, exec, at);
  } else {
    uint64_t address[kLanes];
    if constexpr (kSpace == Space::kGlobal) {
      GlobalAddresses(wave, inst, scalar, address);
    } else {
      VectorAddresses(wave, inst, address);
    }
    if (access == Access::kAtomic) CheckAligned(address, bytes, exec);
    if constexpr (kSpace == Space::kGlobal) {
      wave.GlobalAll(address, bytes, access, exec, at);
    } else {
      FlatBytes(wave, address, bytes, access, exec, at);
    }
  }
  return exec;
}

// The lanes of a buffer access whose pieces all are in range, with their
// bytes; the others are left to PieceOfBuffer.
uint64_t ReachBuffer(Wave& wave, const Buffer& buffer, int bytes, Access access,
                     LaneBytes at) {
  if (buffer.is_private()) {
    uint32_t offset[kLanes];
    buffer.PrivateOffsets(offset);
    wave.ScratchAll(offset, bytes, access, wave.exec(), at);
    return wave.exec();
  }
  const int pieces = bytes > 4 ? bytes / 4 : 1;
  if (buffer.swizzled() && pieces > 1) return 0;
  uint64_t address[kLanes];
  uint64_t whole = 0;
  ForLanes(wave.exec(), [&](int lane) {
    // Ranges have no holes: the first and last piece decide.
    if (!buffer.InRange(lane, 0)) return;
    if (!buffer.InRange(lane, 4 * (pieces - 1))) return;
    buffer.CheckPiece(lane, std::min(bytes, 4));
    address[lane] = buffer.Address(lane, 0);
    whole |= uint64_t{1} << lane;
  });
  if (access == Access::kAtomic) CheckAligned(address, bytes, whole);
  wave.GlobalAll(address, bytes, access, whole, at);
  return whole;
}

// One dword of a lane; null if it is out of range.
uint8_t* PieceOfBuffer(Wave& wave, const Buffer& buffer, int lane, int piece,
                       Access access) {
  if (!buffer.InRange(lane, 4 * piece)) return nullptr;
  buffer.CheckPiece(lane, 4);
  return wave.Global(buffer.Address(lane, 4 * piece), 4, access, lane);
}

template <Space kSpace>
void Announce(Wave& wave, int first, int count) {
  wave.Announce(Counter::kVm, false, first, count);
  if (kSpace == Space::kFlat) {
    wave.Announce(Counter::kLgkm, false, first, count);
  }
}

template <Space kSpace, int kDwords>
void ToLds(Wave& wave, const Inst& inst);

template <Space kSpace, int kDwords>
void LoadWide(Wave& wave, const Inst& inst) {
  if (kSpace == Space::kBuffer && inst.lds) {
    ToLds<kSpace, kDwords>(wave, inst);
    return;
  }
  const int reg = inst.dst[0].reg;
  LaneBytes at;
  if constexpr (kSpace == Space::kBuffer) {
    const Buffer buffer(wave, inst, 0);
    const uint64_t whole =
        ReachBuffer(wave, buffer, 4 * kDwords, ReadAccess(wave, inst), at);
    LoadLanes<kDwords>(wave, reg, whole, at);
    ForLanes(wave.exec() & ~whole, [&](int lane) {
      for (int i = 0; i < kDwords; ++i) {
        const uint8_t* piece =
            PieceOfBuffer(wave, buffer, lane, i, ReadAccess(wave, inst));
        wave.v[reg + i][lane] = piece ? Load<uint32_t>(piece) : 0;
      }
    });
  } else {
    const uint64_t lanes = Reach<kSpace>(wave, inst, false, 4 * kDwords,
                                         ReadAccess(wave, inst), at);
    LoadLanes<kDwords>(wave, reg, lanes, at);
  }
  Announce<kSpace>(wave, reg, kDwords);
}

template <Space kSpace, typename Unsigned, Fill kFill>
void LoadSmall(Wave& wave, const Inst& inst) {
  if (inst.lds) {
    throw Fault{Check::kUnsupported, "load of less than a dword to LDS"};
  }
  const int reg = inst.dst[0].reg;
  uint32_t* dst = wave.v[reg];
  LaneBytes at;
  uint64_t lanes;
  if constexpr (kSpace == Space::kBuffer) {
    const Buffer buffer(wave, inst, 0);
    lanes =
        ReachBuffer(wave, buffer, sizeof(Unsigned), ReadAccess(wave, inst), at);
    static constexpr uint8_t kZeros[sizeof(Unsigned)] = {};
    ForLanes(wave.exec() & ~lanes, [&](int lane) {
      dst[lane] = FillRegister<Unsigned, kFill>(dst[lane], kZeros);
    });
  } else {
    lanes = Reach<kSpace>(wave, inst, false, sizeof(Unsigned),
                          ReadAccess(wave, inst), at);
  }
  ForLanes(lanes, [&](int lane) {
    dst[lane] = FillRegister<Unsigned, kFill>(dst[lane], at[lane]);
  });
  Announce<kSpace>(wave, reg, 1);
}

template <Space kSpace, int kDwords>
void StoreWide(Wave& wave, const Inst& inst) {
  const int reg = inst.src[DataIndex(kSpace)].reg;
  LaneBytes at;
  if constexpr (kSpace == Space::kBuffer) {
    const Buffer buffer(wave, inst, 1);
    const uint64_t whole =
        ReachBuffer(wave, buffer, 4 * kDwords, WriteAccess(wave, inst), at);
    StoreLanes<kDwords>(wave, reg, whole, at);
    ForLanes(wave.exec() & ~whole, [&](int lane) {
      for (int i = 0; i < kDwords; ++i) {
        uint8_t* piece =
            PieceOfBuffer(wave, buffer, lane, i, WriteAccess(wave, inst));
        if (piece) Store(piece, wave.v[reg + i][lane]);
      }
    });
  } else {
    const uint64_t lanes = Reach<kSpace>(wave, inst, true, 4 * kDwords,
                                         WriteAccess(wave, inst), at);
    StoreLanes<kDwords>(wave, reg, lanes, at);
  }
  Announce<kSpace>(wave, 0, 0);
}

template <Space kSpace, typename Unsigned, int kShift>
void StoreSmall(Wave& wave, const Inst& inst) {
  const uint32_t* data = wave.v[inst.src[DataIndex(kSpace)].reg];
  LaneBytes at;
  uint64_t lanes;
  if constexpr (kSpace == Space::kBuffer) {
    const Buffer buffer(wave, inst, 1);
    lanes = ReachBuffer(wave, buffer, sizeof(Unsigned), WriteAccess(wave, inst),
                        at);
  } else {
    lanes = Reach<kSpace>(wave, inst, true, sizeof(Unsigned),
                          WriteAccess(wave, inst), at);
  }
  ForLanes(lanes, [&](int lane) {
    Store(at[lane], static_cast<Unsigned>(data[lane] >> kShift));
  });
  Announce<kSpace>(wave, 0, 0);
}

// Memory to LDS, at M0 plus the instruction's offset, which counts on both
// sides, plus the lane's place: 4 bytes for a dword, 16 for three or four.
template <Space kSpace, int kDwords>
void ToLds(Wave& wave, const Inst& inst) {
  const bool known =
      kDwords == 1 || (kDwords > 2 && wave.arch == Arch::kGfx950);
  if (!known) throw Fault{Check::kUnsupported, "load of this width to LDS"};
  const uint64_t exec = wave.exec();
  // Buffer loads had 16 bits before LDS grew; the others count dwords.
  const uint32_t mask = kSpace != Space::kBuffer     ? 0x3fffc
                        : wave.arch == Arch::kGfx950 ? 0x3ffff
                                                     : 0xffff;
  const uint32_t base = (wave.s[kM0] & mask) + inst.offset;
  constexpr int kStride = kDwords == 1 ? 4 : 16;
  uint32_t target[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    target[lane] = base + kStride * lane;
  }
  uint32_t values[kLanes][kDwords];
  LaneBytes at;
  uint64_t whole;
  if constexpr (kSpace == Space::kBuffer) {
    const Buffer buffer(wave, inst, 0);
    whole = ReachBuffer(wave, buffer, 4 * kDwords, ReadAccess(wave, inst), at);
    ForLanes(exec & ~whole, [&](int lane) {
      for (int i = 0; i < kDwords; ++i) {
        const uint8_t* piece =
            PieceOfBuffer(wave, buffer, lane, i, ReadAccess(wave, inst));
        values[lane][i] = piece ? Load<uint32_t>(piece) : 0;
      }
    });
  } else {
    whole = Reach<kSpace>(wave, inst, false, 4 * kDwords,
                          ReadAccess(wave, inst), at);
  }
  ForLanes(whole,
           [&](int lane) { std::memcpy(values[lane], at[lane], 4 * kDwords); });
  wave.LdsAll(target, 4 * kDwords, Access::kWrite, exec, at);
  ForLanes(exec,
           [&](int lane) { std::memcpy(at[lane], values[lane], 4 * kDwords); });
  wave.Announce(Counter::kVm, false, 0, 0);
}

// Replaces the value at `bytes` by f(old) in one step, as other streams and
// devices may do the same. Returns the old value.
template <typename T, typename F>
T Exchange(uint8_t* bytes, F&& f) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  Bits* place = reinterpret_cast<Bits*>(bytes);
  Bits old_bits = __atomic_load_n(place, __ATOMIC_RELAXED);
  for (;;) {
    T old;
    std::memcpy(&old, &old_bits, sizeof(T));
    const T value = f(old);
    Bits bits;
    std::memcpy(&bits, &value, sizeof(T));
    if (__atomic_compare_exchange_n(place, &old_bits, bits, false,
                                    __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
      return old;
    }
  }
}

// f(lane, old) is the new value. The result, if any, is the old one; 0 for a
// lane out of a buffer's range.
template <Space kSpace, typename T, typename F>
void AtomicLanes(Wave& wave, const Inst& inst, F&& f) {
  constexpr int kRegisters = sizeof(T) / 4;
  const bool returns = kSpace == Space::kBuffer
                           ? inst.glc
                           : inst.dst[0].kind == Operand::Kind::kVector;
  const int result =
      kSpace == Space::kBuffer ? inst.src[0].reg : inst.dst[0].reg;
  LaneBytes at;
  uint64_t lanes;
  if constexpr (kSpace == Space::kBuffer) {
    const Buffer buffer(wave, inst, 1);
    lanes = ReachBuffer(wave, buffer, sizeof(T), Access::kAtomic, at);
  } else {
    lanes = Reach<kSpace>(wave, inst, true, sizeof(T), Access::kAtomic, at);
  }
  ForLanes(lanes, [&](int lane) {
    const T old =
        Exchange<T>(at[lane], [&](T value) { return f(lane, value); });
    if (returns) SetRegisterValue(wave, result, lane, old);
  });
  if (returns) {
    ForLanes(wave.exec() & ~lanes,
             [&](int lane) { SetRegisterValue(wave, result, lane, T{}); });
  }
  Announce<kSpace>(wave, returns ? result : 0, returns ? kRegisters : 0);
}

template <Space kSpace, typename T, T (*kNew)(T, T)>
void Atomic(Wave& wave, const Inst& inst) {
  // MI200's float adds in memory flush denormals, MI300's keep them.
  const bool flush = std::is_same_v<T, float> && wave.arch == Arch::kGfx90a;
  const ScopedMxcsr mode(wave, flush ? kFlushMxcsr : kExactMxcsr);
  const int data = inst.src[DataIndex(kSpace)].reg;
  AtomicLanes<kSpace, T>(wave, inst, [&](int lane, T old) {
    return kNew(old, RegisterValue<T>(wave, data, lane));
  });
}

// The data holds the new value, then the one to compare with.
template <Space kSpace, typename T>
void CompareSwap(Wave& wave, const Inst& inst) {
  const int data = inst.src[DataIndex(kSpace)].reg;
  constexpr int kRegisters = sizeof(T) / 4;
  AtomicLanes<kSpace, T>(wave, inst, [&](int lane, T old) {
    const T expected = RegisterValue<T>(wave, data + kRegisters, lane);
    return old == expected ? RegisterValue<T>(wave, data, lane) : old;
  });
}

// Caches are not modelled.
void CacheOp(Wave&, const Inst&) {}

// The rows of one space's instructions.
template <Space kSpace>
class Rows {
 public:
  Rows(const char* prefix, Ops* ops) : prefix_(prefix), ops_(ops) {
    AddLoads();
    AddStores();
    if constexpr (kSpace != Space::kScratch) AddAtomics();
  }

 private:
  void Add(const char* name, Execute execute, int dsts, int srcs,
           uint8_t archs = kOnAll) {
    Op op{};
    op.mnemonic = Name(name);
    op.execute = execute;
    op.inst_class =
        kSpace == Space::kScratch ? InstClass::kScratch : InstClass::kGlobal;
    for (int i = 0; i < dsts; ++i) op.dst[i] = kW;
    for (int i = 0; i < srcs; ++i) op.src[i] = kW;
    if (kSpace == Space::kBuffer) op.src[srcs - 1] = Type::kB32;  // soffset
    op.modifiers = kAddress;
    op.archs = archs;
    ops_->push_back(op);
  }

  // Lives as long as the program.
  const char* Name(const char* name) const {
    const std::string full = std::string(prefix_) + name;
    char* text = new char[full.size() + 1];
    std::memcpy(text, full.c_str(), full.size() + 1);
    return text;
  }

  // The operands besides the data: an address, with a scalar one, or with a
  // resource and an offset.
  static constexpr int kAddresses = kSpace == Space::kFlat     ? 1
                                    : kSpace == Space::kBuffer ? 3
                                                               : 2;

  // On gfx90a LLVM reaches the private segment through a buffer.
  static constexpr uint8_t kArchs =
      kSpace == Space::kScratch ? kOnGfx942 | kOnGfx950 : kOnAll;

  void AddLoad(const char* name, Execute execute) {
    Add(name, execute, 1, kAddresses, kArchs);
  }
  void AddStore(const char* name, Execute execute) {
    Add(name, execute, 0, kAddresses + 1, kArchs);
  }

  void AddLoads() {
    using U8 = uint8_t;
    using U16 = uint16_t;
    AddLoad("load_dword", LoadWide<kSpace, 1>);
    AddLoad("load_dwordx2", LoadWide<kSpace, 2>);
    AddLoad("load_dwordx3", LoadWide<kSpace, 3>);
    AddLoad("load_dwordx4", LoadWide<kSpace, 4>);
    AddLoad("load_ubyte", LoadSmall<kSpace, U8, Fill::kZero>);
    AddLoad("load_sbyte", LoadSmall<kSpace, U8, Fill::kSign>);
    AddLoad("load_ushort", LoadSmall<kSpace, U16, Fill::kZero>);
    AddLoad("load_sshort", LoadSmall<kSpace, U16, Fill::kSign>);
    AddLoad("load_ubyte_d16", LoadSmall<kSpace, U8, Fill::kLow>);
    AddLoad("load_ubyte_d16_hi", LoadSmall<kSpace, U8, Fill::kHigh>);
    AddLoad("load_sbyte_d16", LoadSmall<kSpace, U8, Fill::kSignLow>);
    AddLoad("load_sbyte_d16_hi", LoadSmall<kSpace, U8, Fill::kSignHigh>);
    AddLoad("load_short_d16", LoadSmall<kSpace, U16, Fill::kLow>);
    AddLoad("load_short_d16_hi", LoadSmall<kSpace, U16, Fill::kHigh>);
    if constexpr (kSpace == Space::kGlobal || kSpace == Space::kScratch) {
      Add("load_lds_dword", ToLds<kSpace, 1>, 0, kAddresses,
          kOnGfx942 | kOnGfx950);
    }
    if constexpr (kSpace == Space::kGlobal) {
      Add("load_lds_dwordx3", ToLds<kSpace, 3>, 0, kAddresses, kOnGfx950);
      Add("load_lds_dwordx4", ToLds<kSpace, 4>, 0, kAddresses, kOnGfx950);
    }
  }

  void AddStores() {
    AddStore("store_dword", StoreWide<kSpace, 1>);
    AddStore("store_dwordx2", StoreWide<kSpace, 2>);
    AddStore("store_dwordx3", StoreWide<kSpace, 3>);
    AddStore("store_dwordx4", StoreWide<kSpace, 4>);
    AddStore("store_byte", StoreSmall<kSpace, uint8_t, 0>);
    AddStore("store_short", StoreSmall<kSpace, uint16_t, 0>);
    AddStore("store_byte_d16_hi", StoreSmall<kSpace, uint8_t, 16>);
    AddStore("store_short_d16_hi", StoreSmall<kSpace, uint16_t, 16>);
  }

  template <typename T, T (*kNew)(T, T)>
  void AddAtomic(const char* name, uint8_t archs = kOnAll) {
    AddAtomicRow(name, Atomic<kSpace, T, kNew>, archs);
  }

  // A buffer's result is where its data was, so that it has no other.
  void AddAtomicRow(const char* name, Execute execute, uint8_t archs = kOnAll) {
    Add(name, execute, kSpace == Space::kBuffer ? 0 : 1, kAddresses + 1, archs);
  }

  void AddAtomics() {
    using U32 = uint32_t;
    using U64 = uint64_t;
    using I32 = int32_t;
    using I64 = int64_t;
    AddAtomic<U32, AtomicSwap>("atomic_swap");
    AddAtomic<U32, AtomicAdd>("atomic_add");
    AddAtomic<U32, AtomicSub>("atomic_sub");
    AddAtomic<I32, AtomicMin>("atomic_smin");
    AddAtomic<U32, AtomicMin>("atomic_umin");
    AddAtomic<I32, AtomicMax>("atomic_smax");
    AddAtomic<U32, AtomicMax>("atomic_umax");
    AddAtomic<U32, AtomicAnd>("atomic_and");
    AddAtomic<U32, AtomicOr>("atomic_or");
    AddAtomic<U32, AtomicXor>("atomic_xor");
    AddAtomic<U32, AtomicInc>("atomic_inc");
    AddAtomic<U32, AtomicDec>("atomic_dec");
    AddAtomic<U64, AtomicSwap>("atomic_swap_x2");
    AddAtomic<U64, AtomicAdd>("atomic_add_x2");
    AddAtomic<U64, AtomicSub>("atomic_sub_x2");
    AddAtomic<I64, AtomicMin>("atomic_smin_x2");
    AddAtomic<U64, AtomicMin>("atomic_umin_x2");
    AddAtomic<I64, AtomicMax>("atomic_smax_x2");
    AddAtomic<U64, AtomicMax>("atomic_umax_x2");
    AddAtomic<U64, AtomicAnd>("atomic_and_x2");
    AddAtomic<U64, AtomicOr>("atomic_or_x2");
    AddAtomic<U64, AtomicXor>("atomic_xor_x2");
    AddAtomic<U64, AtomicInc>("atomic_inc_x2");
    AddAtomic<U64, AtomicDec>("atomic_dec_x2");
    // What the assembler knows.
    constexpr uint8_t kFlatFloats =
        kSpace == Space::kFlat ? kOnGfx942 | kOnGfx950 : kOnAll;
    constexpr uint8_t kBfloats =
        kSpace == Space::kBuffer ? kOnGfx950 : kOnGfx942 | kOnGfx950;
    AddAtomic<float, AtomicAdd>("atomic_add_f32", kFlatFloats);
    AddAtomic<double, AtomicAdd>("atomic_add_f64");
    AddAtomic<double, AtomicMin>("atomic_min_f64");
    AddAtomic<double, AtomicMax>("atomic_max_f64");
    AddAtomic<U32, AtomicPkAddF16>("atomic_pk_add_f16", kFlatFloats);
    AddAtomic<U32, AtomicPkAddBf16>("atomic_pk_add_bf16", kBfloats);
    AddAtomicRow("atomic_cmpswap", CompareSwap<kSpace, U32>);
    AddAtomicRow("atomic_cmpswap_x2", CompareSwap<kSpace, U64>);
  }

  const char* prefix_;
  Ops* ops_;
};

}  // namespace

Ops GlobalOps() {
  Ops ops;
  Rows<Space::kGlobal>("global_", &ops);
  Rows<Space::kFlat>("flat_", &ops);
  Rows<Space::kScratch>("scratch_", &ops);
  Rows<Space::kBuffer>("buffer_", &ops);
  struct Cache {
    const char* name;
    uint8_t archs;
  };
  for (const Cache& cache :
       {Cache{"buffer_wbl2", kOnAll},
        Cache{"buffer_inv", kOnGfx942 | kOnGfx950},
        Cache{"buffer_invl2", kOnGfx90a}, Cache{"buffer_wbinvl1", kOnGfx90a},
        Cache{"buffer_wbinvl1_vol", kOnGfx90a}}) {
    Op op{};
    op.mnemonic = cache.name;
    op.execute = CacheOp;
    op.inst_class = InstClass::kGlobal;
    op.modifiers = kAddress;
    op.archs = cache.archs;
    ops.push_back(op);
  }
  return ops;
}

}  // namespace amdgpu_sim
