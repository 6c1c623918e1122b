// SPDX-License-Identifier: Apache-2.0

// DS instructions: LDS reads, writes, atomics, transposing reads, and moves
// between lanes that go through the LDS hardware.
//
// An address is the lane's register plus an offset, modulo 2^32. Any
// alignment is legal, as the kernel driver configures the hardware, except
// for atomics. Inactive lanes touch nothing.

#include <array>
#include <type_traits>

#include "tests/amdgpu_sim/isa/atomic.h"
#include "tests/amdgpu_sim/isa/lanes.h"
#include "tests/amdgpu_sim/isa/ops.h"

namespace amdgpu_sim {
namespace {

constexpr Type kW = Type::kWide;

void CheckLocal(const Inst& inst) {
  if (inst.gds) throw Fault{Check::kUnsupported, "global data share"};
}

void AnnounceResult(Wave& wave, const Inst& inst, int registers) {
  wave.Announce(Counter::kLgkm, false, inst.dst[0].reg, registers);
}

void AnnounceStore(Wave& wave) { wave.Announce(Counter::kLgkm, false, 0, 0); }

// Reaches `bytes` at every active lane's address plus `offset`.
void Reach(Wave& wave, const Inst& inst, uint32_t offset, int bytes,
           Access access, LaneBytes at) {
  CheckLocal(inst);
  uint32_t address[kLanes];
  const uint32_t* base = wave.v[inst.src[0].reg];
  for (int lane = 0; lane < kLanes; ++lane) address[lane] = base[lane] + offset;
  wave.LdsAll(address, bytes, access, wave.exec(), at);
}

template <int kDwords>
void Read(Wave& wave, const Inst& inst) {
  LaneBytes at;
  Reach(wave, inst, inst.offset, 4 * kDwords, Access::kRead, at);
  const int reg = inst.dst[0].reg;
  LoadLanes<kDwords>(wave, reg, wave.exec(), at);
  AnnounceResult(wave, inst, kDwords);
}

template <typename Unsigned, Fill kFill>
void ReadSmall(Wave& wave, const Inst& inst) {
  LaneBytes at;
  Reach(wave, inst, inst.offset, sizeof(Unsigned), Access::kRead, at);
  uint32_t* dst = wave.v[inst.dst[0].reg];
  ForLanes(wave.exec(), [&](int lane) {
    dst[lane] = FillRegister<Unsigned, kFill>(dst[lane], at[lane]);
  });
  AnnounceResult(wave, inst, 1);
}

// Two values at offsets that count `kUnit` bytes.
template <int kDwords, int kUnit>
void Read2(Wave& wave, const Inst& inst) {
  LaneBytes first, second;
  Reach(wave, inst, inst.offset * kUnit, 4 * kDwords, Access::kRead, first);
  Reach(wave, inst, inst.offset1 * kUnit, 4 * kDwords, Access::kRead, second);
  const int reg = inst.dst[0].reg;
  LoadLanes<kDwords>(wave, reg, wave.exec(), first);
  LoadLanes<kDwords>(wave, reg + kDwords, wave.exec(), second);
  AnnounceResult(wave, inst, 2 * kDwords);
}

template <int kDwords>
void Write(Wave& wave, const Inst& inst) {
  LaneBytes at;
  Reach(wave, inst, inst.offset, 4 * kDwords, Access::kWrite, at);
  const int reg = inst.src[1].reg;
  StoreLanes<kDwords>(wave, reg, wave.exec(), at);
  AnnounceStore(wave);
}

template <typename Unsigned, int kShift>
void WriteSmall(Wave& wave, const Inst& inst) {
  LaneBytes at;
  Reach(wave, inst, inst.offset, sizeof(Unsigned), Access::kWrite, at);
  const uint32_t* data = wave.v[inst.src[1].reg];
  ForLanes(wave.exec(), [&](int lane) {
    Store(at[lane], static_cast<Unsigned>(data[lane] >> kShift));
  });
  AnnounceStore(wave);
}

template <int kDwords, int kUnit>
void Write2(Wave& wave, const Inst& inst) {
  for (int i = 0; i < 2; ++i) {
    LaneBytes at;
    Reach(wave, inst, (i == 0 ? inst.offset : inst.offset1) * kUnit,
          4 * kDwords, Access::kWrite, at);
    const int reg = inst.src[1 + i].reg;
    StoreLanes<kDwords>(wave, reg, wave.exec(), at);
  }
  AnnounceStore(wave);
}

// The address is in M0 and the lane's number, not in a register.
template <bool kWrite>
void AddTid(Wave& wave, const Inst& inst) {
  CheckLocal(inst);
  uint32_t address[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    address[lane] = (wave.s[kM0] & 0xffff) + inst.offset + 4 * lane;
  }
  LaneBytes at;
  wave.LdsAll(address, 4, kWrite ? Access::kWrite : Access::kRead, wave.exec(),
              at);
  const int reg = kWrite ? inst.src[0].reg : inst.dst[0].reg;
  ForLanes(wave.exec(), [&](int lane) {
    if (kWrite) {
      StoreDwords<1>(wave, reg, lane, at[lane]);
    } else {
      LoadDwords<1>(wave, reg, lane, at[lane]);
    }
  });
  if (kWrite) {
    AnnounceStore(wave);
  } else {
    AnnounceResult(wave, inst, 1);
  }
}

// Lanes that hit one address take turns in ascending order. The waves of a
// workgroup run on one thread, so that no host atomic is needed.
template <typename T, T (*kNew)(T, T), bool kReturn>
void Atomic(Wave& wave, const Inst& inst) {
  LaneBytes at;
  Reach(wave, inst, inst.offset, sizeof(T), Access::kAtomic, at);
  const int data = inst.src[1].reg;
  const ScopedMxcsr exact(wave, kExactMxcsr);
  ForLanes(wave.exec(), [&](int lane) {
    const T old = Load<T>(at[lane]);
    Store(at[lane], kNew(old, RegisterValue<T>(wave, data, lane)));
    if (kReturn) SetRegisterValue(wave, inst.dst[0].reg, lane, old);
  });
  if (kReturn) {
    AnnounceResult(wave, inst, sizeof(T) / 4);
  } else {
    AnnounceStore(wave);
  }
}

template <typename T>
T CompareStore(T old, T compare, T value) {
  return old == compare ? value : old;
}
template <typename T>
T MaskOr(T old, T mask, T value) {
  return (old & ~mask) | value;
}
inline uint32_t Wrap(uint32_t old, uint32_t limit, uint32_t value) {
  return old >= limit ? old - limit : old + value;
}

template <typename T, T (*kNew)(T, T, T), bool kReturn>
void Atomic2(Wave& wave, const Inst& inst) {
  LaneBytes at;
  Reach(wave, inst, inst.offset, sizeof(T), Access::kAtomic, at);
  const ScopedMxcsr exact(wave, kExactMxcsr);
  ForLanes(wave.exec(), [&](int lane) {
    const T old = Load<T>(at[lane]);
    Store(at[lane], kNew(old, RegisterValue<T>(wave, inst.src[1].reg, lane),
                         RegisterValue<T>(wave, inst.src[2].reg, lane)));
    if (kReturn) SetRegisterValue(wave, inst.dst[0].reg, lane, old);
  });
  if (kReturn) {
    AnnounceResult(wave, inst, sizeof(T) / 4);
  } else {
    AnnounceStore(wave);
  }
}

// ds_wrxchg2: two exchanges at once.
template <typename T, int kUnit>
void Exchange2(Wave& wave, const Inst& inst) {
  LaneBytes first, second;
  Reach(wave, inst, inst.offset * kUnit, sizeof(T), Access::kAtomic, first);
  Reach(wave, inst, inst.offset1 * kUnit, sizeof(T), Access::kAtomic, second);
  ForLanes(wave.exec(), [&](int lane) {
    const T old[2] = {Load<T>(first[lane]), Load<T>(second[lane])};
    Store(first[lane], RegisterValue<T>(wave, inst.src[1].reg, lane));
    Store(second[lane], RegisterValue<T>(wave, inst.src[2].reg, lane));
    constexpr int kRegisters = sizeof(T) / 4;
    SetRegisterValue(wave, inst.dst[0].reg, lane, old[0]);
    SetRegisterValue(wave, inst.dst[0].reg + kRegisters, lane, old[1]);
  });
  AnnounceResult(wave, inst, sizeof(T) / 2);
}

// Element `index` of a lane's bytes.
template <int kBits>
uint32_t Element(const uint8_t* bytes, int index) {
  const int bit = index * kBits;
  uint32_t value = bytes[bit / 8];
  if (bit % 8 + kBits > 8) value |= uint32_t{bytes[bit / 8 + 1]} << 8;
  return value >> (bit % 8) & ((1u << kBits) - 1);
}

inline __m128i LoadLow(const uint8_t* bytes) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
}
inline void StoreFour(uint32_t* lanes, __m128i x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes), x);
}

// Sixteen lanes read a matrix of elements of kBits, row after row, and get
// its transpose: each lane a column. A lane reads as many elements as the
// matrix has rows, so a row is spread over 16 / rows lanes.
template <int kBits, int kDwords>
void Transpose(const uint8_t* const* at, Wave& wave, int reg, int first) {
  constexpr int kRows = 32 * kDwords / kBits;
  constexpr int kRowLanes = 16 / kRows;
  static_assert(kRows * kRowLanes == 16);
  if constexpr (kBits == 16) {
    // Four lanes a row; a register has two rows.
    for (int r = 0; r < 2; ++r) {
      for (int part = 0; part < 4; ++part) {
        StoreFour(&wave.v[reg + r][first + 4 * part],
                  _mm_unpacklo_epi16(LoadLow(at[8 * r + part]),
                                     LoadLow(at[8 * r + 4 + part])));
      }
    }
    return;
  }
  if constexpr (kBits == 8) {
    // Two lanes a row; a register has four rows.
    for (int r = 0; r < 2; ++r) {
      for (int part = 0; part < 2; ++part) {
        const auto row = [&](int i) {
          return LoadLow(at[8 * r + 2 * i + part]);
        };
        const __m128i low = _mm_unpacklo_epi8(row(0), row(1));
        const __m128i high = _mm_unpacklo_epi8(row(2), row(3));
        uint32_t* to = &wave.v[reg + r][first + 8 * part];
        StoreFour(to, _mm_unpacklo_epi16(low, high));
        StoreFour(to + 4, _mm_unpackhi_epi16(low, high));
      }
    }
    return;
  }
  for (int lane = 0; lane < 16; ++lane) {
    uint32_t words[kDwords + 1] = {};
    for (int row = 0; row < kRows; ++row) {
      const uint64_t value =
          Element<kBits>(at[row * kRowLanes + lane / kRows], lane % kRows);
      const int bit = row * kBits;
      const uint64_t shifted = value << (bit % 32);
      words[bit / 32] |= static_cast<uint32_t>(shifted);
      words[bit / 32 + 1] |= static_cast<uint32_t>(shifted >> 32);
    }
    for (int i = 0; i < kDwords; ++i) wave.v[reg + i][first + lane] = words[i];
  }
}

template <int kBits, int kDwords>
void ReadTransposed(Wave& wave, const Inst& inst) {
  // The ISA demands it.
  if (wave.exec() != ~uint64_t{0}) {
    throw Fault{Check::kUnsupported, "transposing read by part of a wave"};
  }
  LaneBytes at;
  Reach(wave, inst, inst.offset, 4 * kDwords, Access::kRead, at);
  for (int first = 0; first < kLanes; first += 16) {
    Transpose<kBits, kDwords>(at + first, wave, inst.dst[0].reg, first);
  }
  AnnounceResult(wave, inst, kDwords);
}

// Writes values[lane] to the active lanes of the result.
void WriteMoved(Wave& wave, const Inst& inst, const uint32_t* values) {
  uint32_t* dst = wave.v[inst.dst[0].reg];
  ForLanes(wave.exec(), [&](int lane) { dst[lane] = values[lane]; });
  AnnounceResult(wave, inst, 1);
}

// An inactive lane sends nothing; a lane that gets nothing has 0; the
// highest of several senders wins.
void Permute(Wave& wave, const Inst& inst) {
  uint32_t values[kLanes] = {};
  ForLanes(wave.exec(), [&](int lane) {
    const uint32_t to = (wave.v[inst.src[0].reg][lane] + inst.offset) / 4;
    values[to % kLanes] = wave.v[inst.src[1].reg][lane];
  });
  WriteMoved(wave, inst, values);
}

void Bpermute(Wave& wave, const Inst& inst) {
  uint32_t values[kLanes] = {};
  const uint64_t exec = wave.exec();
  ForLanes(exec, [&](int lane) {
    const uint32_t from =
        (wave.v[inst.src[0].reg][lane] + inst.offset) / 4 % kLanes;
    if (exec >> from & 1) values[lane] = wave.v[inst.src[1].reg][from];
  });
  WriteMoved(wave, inst, values);
}

// The lane that `lane` reads from, among its half of the wave.
int SwizzleSource(uint32_t pattern, int lane) {
  const int low = lane & 0x1f, half = lane & 0x20;
  if (pattern >= 0xe000) {  // Butterfly of an FFT.
    const int mask = pattern & 0x1f;
    int reversed = 0;
    for (int bit = 0; bit < 5; ++bit) {
      reversed |= (low >> bit & 1) << (4 - bit);
    }
    return half | reversed >> __builtin_popcount(mask) | (low & mask);
  }
  if (pattern >= 0xc000) {  // Rotation.
    const int mask = pattern & 0x1f;
    int amount = pattern >> 5 & 0x1f;
    if (pattern >> 10 & 1) amount = -amount;
    return half | (low & mask) | ((low + amount) & ~mask & 0x1f);
  }
  if (pattern >= 0x8000) {  // Any permutation of four.
    return (lane & ~3) | (pattern >> (2 * (lane & 3)) & 3);
  }
  const int and_mask = pattern & 0x1f, or_mask = pattern >> 5 & 0x1f,
            xor_mask = pattern >> 10 & 0x1f;
  return half | (((low & and_mask) | or_mask) ^ xor_mask);
}

void Swizzle(Wave& wave, const Inst& inst) {
  uint32_t values[kLanes] = {};
  const uint64_t exec = wave.exec();
  ForLanes(exec, [&](int lane) {
    const int from = SwizzleSource(inst.offset & 0xffff, lane);
    if (exec >> from & 1) values[lane] = wave.v[inst.src[0].reg][from];
  });
  WriteMoved(wave, inst, values);
}

void Nop(Wave& wave, const Inst&) { AnnounceStore(wave); }

Op Ds(const char* mnemonic, Execute execute, int dsts, int srcs,
      uint8_t archs = kOnAll) {
  Op op{};
  op.mnemonic = mnemonic;
  op.execute = execute;
  op.inst_class = InstClass::kLds;
  for (int i = 0; i < dsts; ++i) op.dst[i] = kW;
  for (int i = 0; i < srcs; ++i) op.src[i] = kW;
  op.modifiers = kAddress;
  op.archs = archs;
  return op;
}

// Without and with result: ds_add_u32, ds_add_rtn_u32.
template <typename T, T (*kNew)(T, T)>
void AddAtomic(Ops* ops, const char* name, const char* returning,
               uint8_t archs = kOnAll) {
  if (name) ops->push_back(Ds(name, Atomic<T, kNew, false>, 0, 2, archs));
  ops->push_back(Ds(returning, Atomic<T, kNew, true>, 1, 2, archs));
}

template <typename T, T (*kNew)(T, T, T)>
void AddAtomic2(Ops* ops, const char* name, const char* returning) {
  if (name) ops->push_back(Ds(name, Atomic2<T, kNew, false>, 0, 3));
  ops->push_back(Ds(returning, Atomic2<T, kNew, true>, 1, 3));
}

void AddReads(Ops* ops) {
  using U8 = uint8_t;
  using U16 = uint16_t;
  for (const Op& op : {
           Ds("ds_read_b32", Read<1>, 1, 1),
           Ds("ds_read_b64", Read<2>, 1, 1),
           Ds("ds_read_b96", Read<3>, 1, 1),
           Ds("ds_read_b128", Read<4>, 1, 1),
           Ds("ds_read2_b32", Read2<1, 4>, 1, 1),
           Ds("ds_read2_b64", Read2<2, 8>, 1, 1),
           Ds("ds_read2st64_b32", Read2<1, 256>, 1, 1),
           Ds("ds_read2st64_b64", Read2<2, 512>, 1, 1),
           Ds("ds_read_u8", ReadSmall<U8, Fill::kZero>, 1, 1),
           Ds("ds_read_i8", ReadSmall<U8, Fill::kSign>, 1, 1),
           Ds("ds_read_u16", ReadSmall<U16, Fill::kZero>, 1, 1),
           Ds("ds_read_i16", ReadSmall<U16, Fill::kSign>, 1, 1),
           Ds("ds_read_u8_d16", ReadSmall<U8, Fill::kLow>, 1, 1),
           Ds("ds_read_u8_d16_hi", ReadSmall<U8, Fill::kHigh>, 1, 1),
           Ds("ds_read_i8_d16", ReadSmall<U8, Fill::kSignLow>, 1, 1),
           Ds("ds_read_i8_d16_hi", ReadSmall<U8, Fill::kSignHigh>, 1, 1),
           Ds("ds_read_u16_d16", ReadSmall<U16, Fill::kLow>, 1, 1),
           Ds("ds_read_u16_d16_hi", ReadSmall<U16, Fill::kHigh>, 1, 1),
           Ds("ds_read_addtid_b32", AddTid<false>, 1, 0),
           Ds("ds_read_b64_tr_b16", ReadTransposed<16, 2>, 1, 1, kOnGfx950),
           Ds("ds_read_b64_tr_b8", ReadTransposed<8, 2>, 1, 1, kOnGfx950),
           Ds("ds_read_b64_tr_b4", ReadTransposed<4, 2>, 1, 1, kOnGfx950),
           Ds("ds_read_b96_tr_b6", ReadTransposed<6, 3>, 1, 1, kOnGfx950),
       }) {
    ops->push_back(op);
  }
}

void AddWrites(Ops* ops) {
  for (const Op& op : {
           Ds("ds_write_b32", Write<1>, 0, 2),
           Ds("ds_write_b64", Write<2>, 0, 2),
           Ds("ds_write_b96", Write<3>, 0, 2),
           Ds("ds_write_b128", Write<4>, 0, 2),
           Ds("ds_write2_b32", Write2<1, 4>, 0, 3),
           Ds("ds_write2_b64", Write2<2, 8>, 0, 3),
           Ds("ds_write2st64_b32", Write2<1, 256>, 0, 3),
           Ds("ds_write2st64_b64", Write2<2, 512>, 0, 3),
           Ds("ds_write_b8", WriteSmall<uint8_t, 0>, 0, 2),
           Ds("ds_write_b16", WriteSmall<uint16_t, 0>, 0, 2),
           Ds("ds_write_b8_d16_hi", WriteSmall<uint8_t, 16>, 0, 2),
           Ds("ds_write_b16_d16_hi", WriteSmall<uint16_t, 16>, 0, 2),
           Ds("ds_write_addtid_b32", AddTid<true>, 0, 1),
       }) {
    ops->push_back(op);
  }
}

void AddAtomics(Ops* ops) {
  using U32 = uint32_t;
  using U64 = uint64_t;
  using I32 = int32_t;
  using I64 = int64_t;
  AddAtomic<U32, AtomicAdd>(ops, "ds_add_u32", "ds_add_rtn_u32");
  AddAtomic<U32, AtomicSub>(ops, "ds_sub_u32", "ds_sub_rtn_u32");
  AddAtomic<U32, AtomicRsub>(ops, "ds_rsub_u32", "ds_rsub_rtn_u32");
  AddAtomic<U32, AtomicInc>(ops, "ds_inc_u32", "ds_inc_rtn_u32");
  AddAtomic<U32, AtomicDec>(ops, "ds_dec_u32", "ds_dec_rtn_u32");
  AddAtomic<I32, AtomicMin>(ops, "ds_min_i32", "ds_min_rtn_i32");
  AddAtomic<I32, AtomicMax>(ops, "ds_max_i32", "ds_max_rtn_i32");
  AddAtomic<U32, AtomicMin>(ops, "ds_min_u32", "ds_min_rtn_u32");
  AddAtomic<U32, AtomicMax>(ops, "ds_max_u32", "ds_max_rtn_u32");
  AddAtomic<U32, AtomicAnd>(ops, "ds_and_b32", "ds_and_rtn_b32");
  AddAtomic<U32, AtomicOr>(ops, "ds_or_b32", "ds_or_rtn_b32");
  AddAtomic<U32, AtomicXor>(ops, "ds_xor_b32", "ds_xor_rtn_b32");
  AddAtomic<U32, AtomicSwap>(ops, nullptr, "ds_wrxchg_rtn_b32");
  AddAtomic<float, AtomicAdd>(ops, "ds_add_f32", "ds_add_rtn_f32");
  AddAtomic<float, AtomicMin>(ops, "ds_min_f32", "ds_min_rtn_f32");
  AddAtomic<float, AtomicMax>(ops, "ds_max_f32", "ds_max_rtn_f32");
  AddAtomic<U64, AtomicAdd>(ops, "ds_add_u64", "ds_add_rtn_u64");
  AddAtomic<U64, AtomicSub>(ops, "ds_sub_u64", "ds_sub_rtn_u64");
  AddAtomic<U64, AtomicRsub>(ops, "ds_rsub_u64", "ds_rsub_rtn_u64");
  AddAtomic<U64, AtomicInc>(ops, "ds_inc_u64", "ds_inc_rtn_u64");
  AddAtomic<U64, AtomicDec>(ops, "ds_dec_u64", "ds_dec_rtn_u64");
  AddAtomic<I64, AtomicMin>(ops, "ds_min_i64", "ds_min_rtn_i64");
  AddAtomic<I64, AtomicMax>(ops, "ds_max_i64", "ds_max_rtn_i64");
  AddAtomic<U64, AtomicMin>(ops, "ds_min_u64", "ds_min_rtn_u64");
  AddAtomic<U64, AtomicMax>(ops, "ds_max_u64", "ds_max_rtn_u64");
  AddAtomic<U64, AtomicAnd>(ops, "ds_and_b64", "ds_and_rtn_b64");
  AddAtomic<U64, AtomicOr>(ops, "ds_or_b64", "ds_or_rtn_b64");
  AddAtomic<U64, AtomicXor>(ops, "ds_xor_b64", "ds_xor_rtn_b64");
  AddAtomic<U64, AtomicSwap>(ops, nullptr, "ds_wrxchg_rtn_b64");
  AddAtomic<double, AtomicAdd>(ops, "ds_add_f64", "ds_add_rtn_f64");
  AddAtomic<double, AtomicMin>(ops, "ds_min_f64", "ds_min_rtn_f64");
  AddAtomic<double, AtomicMax>(ops, "ds_max_f64", "ds_max_rtn_f64");
  AddAtomic<U32, AtomicPkAddF16>(ops, "ds_pk_add_f16", "ds_pk_add_rtn_f16",
                                 kOnGfx942 | kOnGfx950);
  AddAtomic<U32, AtomicPkAddBf16>(ops, "ds_pk_add_bf16", "ds_pk_add_rtn_bf16",
                                  kOnGfx942 | kOnGfx950);
  AddAtomic2<U32, CompareStore>(ops, "ds_cmpst_b32", "ds_cmpst_rtn_b32");
  AddAtomic2<float, CompareStore>(ops, "ds_cmpst_f32", "ds_cmpst_rtn_f32");
  AddAtomic2<U64, CompareStore>(ops, "ds_cmpst_b64", "ds_cmpst_rtn_b64");
  AddAtomic2<double, CompareStore>(ops, "ds_cmpst_f64", "ds_cmpst_rtn_f64");
  AddAtomic2<U32, MaskOr>(ops, "ds_mskor_b32", "ds_mskor_rtn_b32");
  AddAtomic2<U64, MaskOr>(ops, "ds_mskor_b64", "ds_mskor_rtn_b64");
  AddAtomic2<U32, Wrap>(ops, nullptr, "ds_wrap_rtn_b32");
  ops->push_back(Ds("ds_wrxchg2_rtn_b32", Exchange2<U32, 4>, 1, 3));
  ops->push_back(Ds("ds_wrxchg2_rtn_b64", Exchange2<U64, 8>, 1, 3));
  ops->push_back(Ds("ds_wrxchg2st64_rtn_b32", Exchange2<U32, 256>, 1, 3));
  ops->push_back(Ds("ds_wrxchg2st64_rtn_b64", Exchange2<U64, 512>, 1, 3));
}

}  // namespace

Ops LdsOps() {
  Ops ops;
  AddReads(&ops);
  AddWrites(&ops);
  AddAtomics(&ops);
  ops.push_back(Ds("ds_permute_b32", Permute, 1, 2));
  ops.push_back(Ds("ds_bpermute_b32", Bpermute, 1, 2));
  ops.push_back(Ds("ds_swizzle_b32", Swizzle, 1, 1));
  ops.push_back(Ds("ds_nop", Nop, 0, 0));
  return ops;
}

}  // namespace amdgpu_sim
