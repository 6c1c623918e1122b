// SPDX-License-Identifier: Apache-2.0

// How vector instructions are made from functions on one lane's values.
//
// `Vector<F>` makes an Execute of `R F(A, B, C)`: it reads the operands of all
// 64 lanes (constants and scalars broadcast, source modifiers, SDWA, DPP),
// applies F, applies result modifiers and writes the lanes that EXEC enables.
// The types of F's signature are the register types of the operands:
//
//   float, double, Half, Bfloat, (u)int16_t, (u)int32_t, (u)int64_t
//   bool         a bit of a lane mask: carry in, select
//   bool&        the lane's bit of dst[1]: carry out
//   const Inst&  the instruction, for modifiers that F honours itself
//   Lane         the lane's number
//
// All sources are read before anything is written, so that an instruction may
// overwrite its own sources.
#ifndef AMDGPU_SIM_ISA_VALU_H_
#define AMDGPU_SIM_ISA_VALU_H_

#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/amdgpu_sim/isa/inst.h"
#include "tests/amdgpu_sim/isa/ops.h"

namespace amdgpu_sim {

// A half-precision number as its bits, so that signatures tell it from u16.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

struct Lane {
  int index;
};

// The register type of a C++ type.
template <typename T>
constexpr Type TypeOf() {
  if (std::is_same_v<T, bool>) return Type::kMask;
  if (std::is_same_v<T, float>) return Type::kF32;
  if (std::is_same_v<T, double>) return Type::kF64;
  if (std::is_same_v<T, Half>) return Type::kF16;
  if (std::is_same_v<T, Bfloat>) return Type::kBF16;
  if (std::is_same_v<T, int16_t>) return Type::kI16;
  if (std::is_same_v<T, uint16_t>) return Type::kU16;
  if (std::is_same_v<T, int32_t>) return Type::kI32;
  if (std::is_same_v<T, uint32_t>) return Type::kU32;
  if (std::is_same_v<T, int64_t>) return Type::kI64;
  if (std::is_same_v<T, uint64_t>) return Type::kU64;
  return Type::kNone;
}

// The type of a packed operand whose two elements are T.
template <typename T>
constexpr Type PackedTypeOf() {
  if (std::is_same_v<T, float>) return Type::kPkF32;
  if (std::is_same_v<T, Half>) return Type::kPkF16;
  if (std::is_same_v<T, Bfloat>) return Type::kPkBF16;
  if (sizeof(T) == 2) return Type::kPkB16;
  return Type::kPkB32;
}

// Registers of an operand; 0 for kWide and kNone, where the text tells.
constexpr int RegistersOf(Type type) {
  switch (type) {
    case Type::kNone:
    case Type::kWide:
      return 0;
    case Type::kB64:
    case Type::kI64:
    case Type::kU64:
    case Type::kF64:
    case Type::kPkF32:
    case Type::kPkB32:
    case Type::kMask:
      return 2;
    default:
      return 1;
  }
}

// The values of one operand in all lanes: two registers at most.
struct Plane {
  alignas(64) uint32_t at[2 * kLanes];
};

// Operand `o` as `type` in all lanes, modifiers applied: the registers
// themselves or `plane`. `first` says that it is src[0], which DPP permutes.
const uint32_t* ReadModified(const Wave& wave, const Inst& inst,
                             const Operand& o, Type type, bool first,
                             Plane* plane);

inline const uint32_t* Read(const Wave& wave, const Inst& inst, int index,
                            Type type, Plane* plane) {
  const Operand& o = inst.src[index];
  if (o.kind == Operand::Kind::kVector && inst.plain) return wave.v[o.reg];
  return ReadModified(wave, inst, o, type, index == 0, plane);
}

// Fills Inst::dpp_lanes of an instruction with DPP.
void SetDppLanes(Inst* inst);

// Half `high` of a VOP3P operand, whose elements are 16 bits (or a register,
// for kPkF32 and kPkB32), with its neg_lo or neg_hi.
const uint32_t* ReadPacked(const Wave& wave, const Operand& o, Type type,
                           bool high, Plane* plane);

// Lanes that the instruction writes: EXEC, less those that DPP disables.
uint64_t WrittenLanes(const Wave& wave, const Inst& inst);

// Writes a result of `type` with omod, clamp, SDWA and op_sel applied.
void WriteModified(Wave& wave, const Inst& inst, Type type, Plane* plane);

// Writes the lanes of `mask` of a register.
void WriteLanes(uint32_t* to, const uint32_t* from, uint64_t mask);

// Applies omod and clamp to one element each lane, as a result of `type`.
void ModifyResult(const Wave& wave, const Inst& inst, Type type,
                  uint32_t* values);

inline void Write(Wave& wave, const Inst& inst, Type type, Plane* plane) {
  if (inst.plain && wave.exec() == ~uint64_t{0} && RegistersOf(type) == 2) {
    std::memcpy(wave.v[inst.dst[0].reg], plane->at, sizeof(plane->at));
  } else if (inst.plain && wave.exec() == ~uint64_t{0}) {
    std::memcpy(wave.v[inst.dst[0].reg], plane->at, sizeof(plane->at) / 2);
  } else {
    WriteModified(wave, inst, type, plane);
  }
}

// The mask of lanes whose value is not 0.
uint64_t MaskOf(const uint32_t* values);

// Writes a lane mask, 0 in the lanes that are not written.
inline void WriteMask(Wave& wave, const Operand& dst, uint64_t mask) {
  wave.set_s64(dst.reg, mask);
}

template <typename T>
inline T GetLane(const uint32_t* plane, int lane) {
  if constexpr (std::is_same_v<T, bool>) {
    return plane[lane] != 0;
  } else if constexpr (sizeof(T) == 8) {
    uint64_t bits = plane[lane] | uint64_t{plane[lane + kLanes]} << 32;
    T value;
    std::memcpy(&value, &bits, 8);
    return value;
  } else {
    T value;
    std::memcpy(&value, &plane[lane], sizeof(T));
    return value;
  }
}

template <typename T>
inline void SetLane(uint32_t* plane, int lane, T value) {
  if constexpr (std::is_same_v<T, bool>) {
    plane[lane] = value;
  } else if constexpr (sizeof(T) == 8) {
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    plane[lane] = static_cast<uint32_t>(bits);
    plane[lane + kLanes] = static_cast<uint32_t>(bits >> 32);
  } else if constexpr (sizeof(T) == 4) {
    std::memcpy(&plane[lane], &value, 4);
  } else {
    uint16_t bits;
    std::memcpy(&bits, &value, 2);
    plane[lane] = bits;
  }
}

// A lane mask: VCC, an SGPR pair or a constant.
inline uint64_t ReadMask(const Wave& wave, const Operand& o) {
  return o.kind == Operand::Kind::kScalar ? wave.s64(o.reg) : o.constant;
}

// SCC, VCCZ or EXECZ as an operand.
inline uint32_t ConditionOf(const Wave& wave, Operand::Kind kind) {
  switch (kind) {
    case Operand::Kind::kScc:
      return wave.scc;
    case Operand::Kind::kVccz:
      return wave.vcc() == 0;
    default:
      return wave.exec() == 0;
  }
}

template <typename T>
struct Parameter {
  using Value = std::remove_cv_t<std::remove_reference_t<T>>;
  static constexpr bool kCarryOut = std::is_same_v<T, bool&>;
  static constexpr bool kInst = std::is_same_v<Value, Inst>;
  static constexpr bool kLane = std::is_same_v<Value, Lane>;
  static constexpr bool kSource = !kCarryOut && !kInst && !kLane;
};

template <typename F>
struct Signature;

template <typename R, typename... A>
struct Signature<R (*)(A...)> {
  using Result = R;
  static constexpr int kSources = (0 + ... + Parameter<A>::kSource);
  static constexpr bool kCarryOut = (false || ... || Parameter<A>::kCarryOut);
  static constexpr size_t kParameters = sizeof...(A);
  template <size_t k>
  using At = std::tuple_element_t<k, std::tuple<A...>>;

  // Which source the k-th parameter is.
  static constexpr int SourceOf(size_t k) {
    constexpr bool is_source[] = {Parameter<A>::kSource..., false};
    int index = 0;
    for (size_t i = 0; i < k; ++i) index += is_source[i];
    return index;
  }
  static constexpr Type SourceType(int source) {
    constexpr bool is_source[] = {Parameter<A>::kSource..., false};
    constexpr Type types[] = {TypeOf<typename Parameter<A>::Value>()...,
                              Type::kNone};
    for (size_t i = 0; i < sizeof...(A); ++i) {
      if (is_source[i] && source-- == 0) return types[i];
    }
    return Type::kNone;
  }
  static constexpr Type PackedType(int source) {
    constexpr bool is_source[] = {Parameter<A>::kSource..., false};
    constexpr Type types[] = {PackedTypeOf<typename Parameter<A>::Value>()...,
                              Type::kNone};
    for (size_t i = 0; i < sizeof...(A); ++i) {
      if (is_source[i] && source-- == 0) return types[i];
    }
    return Type::kNone;
  }
};

template <typename R, typename... A>
struct Signature<R (*)(A...) noexcept> : Signature<R (*)(A...)> {};

template <typename S, size_t k>
inline decltype(auto) Argument(const Inst& inst, const uint32_t* const* in,
                               bool& carry, int lane) {
  using P = Parameter<typename S::template At<k>>;
  if constexpr (P::kCarryOut) {
    return (carry);
  } else if constexpr (P::kInst) {
    return (inst);
  } else if constexpr (P::kLane) {
    return Lane{lane};
  } else {
    return GetLane<typename P::Value>(in[S::SourceOf(k)], lane);
  }
}

template <auto F, typename S, size_t... k>
inline void ApplyTo(const Inst& inst, const uint32_t* const* in,
                    uint32_t* __restrict out, uint32_t* __restrict carry_out,
                    std::index_sequence<k...>) {
#pragma GCC ivdep
  for (int lane = 0; lane < kLanes; ++lane) {
    bool carry = false;
    SetLane<typename S::Result>(out, lane,
                                F(Argument<S, k>(inst, in, carry, lane)...));
    if constexpr (S::kCarryOut) carry_out[lane] = carry;
  }
}

// F on every lane, whatever EXEC says.
template <auto F>
inline void Apply(const Inst& inst, const uint32_t* const* in, uint32_t* out,
                  uint32_t* carry) {
  using S = Signature<decltype(F)>;
  ApplyTo<F, S>(inst, in, out, carry,
                std::make_index_sequence<S::kParameters>());
}

template <auto F>
void Vector(Wave& wave, const Inst& inst) {
  using S = Signature<decltype(F)>;
  constexpr Type kResult = TypeOf<typename S::Result>();
  Plane planes[S::kSources + 1];
  const uint32_t* in[S::kSources + 1];
  for (int k = 0; k < S::kSources; ++k) {
    in[k] = Read(wave, inst, k, S::SourceType(k), &planes[k]);
  }
  Plane out;
  if constexpr (S::kCarryOut) {
    Plane carry;
    Apply<F>(inst, in, out.at, carry.at);
    // Before dst[0], which takes the same lanes.
    uint64_t lanes = WrittenLanes(wave, inst);
    WriteMask(wave, inst.dst[1], MaskOf(carry.at) & lanes);
  } else {
    Apply<F>(inst, in, out.at, nullptr);
  }
  Write(wave, inst, kResult, &out);
}

// A compare; v_cmpx writes EXEC too.
template <auto F, bool to_exec = false>
void Compare(Wave& wave, const Inst& inst) {
  using S = Signature<decltype(F)>;
  static_assert(std::is_same_v<typename S::Result, bool>);
  Plane planes[S::kSources];
  const uint32_t* in[S::kSources];
  for (int k = 0; k < S::kSources; ++k) {
    in[k] = Read(wave, inst, k, S::SourceType(k), &planes[k]);
  }
  Plane out;
  Apply<F>(inst, in, out.at, nullptr);
  uint64_t mask = MaskOf(out.at) & WrittenLanes(wave, inst);
  WriteMask(wave, inst.dst[0], mask);
  if (to_exec) wave.set_s64(kExec, mask);
}

// VOP3P: F on the low and the high elements.
template <auto F>
void Packed(Wave& wave, const Inst& inst) {
  using S = Signature<decltype(F)>;
  using R = typename S::Result;
  Plane planes[S::kSources];
  const uint32_t* in[S::kSources];
  Plane out[2];
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < S::kSources; ++k) {
      in[k] = ReadPacked(wave, inst.src[k], S::PackedType(k), half, &planes[k]);
    }
    Apply<F>(inst, in, out[half].at, nullptr);
    if (inst.clamp) ModifyResult(wave, inst, TypeOf<R>(), out[half].at);
  }
  uint64_t exec = wave.exec();
  uint32_t* to = wave.v[inst.dst[0].reg];
  if constexpr (sizeof(R) == 4) {
    WriteLanes(to, out[0].at, exec);
    WriteLanes(to + kLanes, out[1].at, exec);
  } else {
    for (int lane = 0; lane < kLanes; ++lane) {
      out[0].at[lane] |= out[1].at[lane] << 16;
    }
    WriteLanes(to, out[0].at, exec);
  }
}

constexpr bool IsFloat(Type type) {
  return type == Type::kF16 || type == Type::kBF16 || type == Type::kF32 ||
         type == Type::kF64;
}

template <auto F>
constexpr uint32_t DefaultModifiers() {
  using S = Signature<decltype(F)>;
  uint32_t modifiers = kDpp | kSdwa;
  for (int k = 0; k < S::kSources; ++k) {
    if (IsFloat(S::SourceType(k))) modifiers |= kNegAbs;
  }
  if (IsFloat(TypeOf<typename S::Result>())) modifiers |= kClamp | kOmod;
  return modifiers;
}

// Source types by F's signature; the operands that the decoder appends are not
// in the text.
template <auto F>
void FillTypes(Op* op) {
  using S = Signature<decltype(F)>;
  static_assert(S::kSources <= 5);
  op->dst[0] = TypeOf<typename S::Result>();
  op->dst[1] = S::kCarryOut ? Type::kMask : Type::kNone;
  int sources = S::kSources;
  if (op->modifiers & kReadsDst) --sources;
  if (op->modifiers & kReadsVcc) --sources;
  for (int k = 0; k < sources; ++k) op->src[k] = S::SourceType(k);
}

// An op that executes as Vector<F>. DPP, SDWA and, on floats, neg, abs, clamp
// and omod are honoured without being named in `extra`.
template <auto F>
Op VectorOp(const char* mnemonic, uint32_t extra = 0, uint8_t archs = kOnAll,
            InstClass inst_class = InstClass::kValu) {
  Op op = {};
  op.mnemonic = mnemonic;
  op.execute = Vector<F>;
  op.inst_class = inst_class;
  op.modifiers = DefaultModifiers<F>() | extra;
  op.archs = archs;
  FillTypes<F>(&op);
  return op;
}

// One of the slow unit: exp, log, rcp, rsq, sqrt, sin, cos.
template <auto F>
Op TransOp(const char* mnemonic, uint32_t extra = 0, uint8_t archs = kOnAll) {
  return VectorOp<F>(mnemonic, extra, archs, InstClass::kTrans);
}

template <auto F, bool to_exec = false>
Op CompareOp(const char* mnemonic, uint32_t extra = 0, uint8_t archs = kOnAll) {
  Op op = {};
  op.mnemonic = mnemonic;
  op.execute = Compare<F, to_exec>;
  op.inst_class = InstClass::kValu;
  op.modifiers = kSdwa | (DefaultModifiers<F>() & kNegAbs) | extra;
  op.archs = archs;
  FillTypes<F>(&op);
  return op;
}

template <auto F>
Op PackedOp(const char* mnemonic, uint32_t extra = 0, uint8_t archs = kOnAll) {
  using S = Signature<decltype(F)>;
  Op op = {};
  op.mnemonic = mnemonic;
  op.execute = Packed<F>;
  op.inst_class = InstClass::kValu;
  op.modifiers = kPacked | extra;
  if (IsFloat(TypeOf<typename S::Result>())) op.modifiers |= kClamp;
  op.archs = archs;
  op.dst[0] = PackedTypeOf<typename S::Result>();
  for (int k = 0; k < S::kSources; ++k) op.src[k] = S::PackedType(k);
  return op;
}

// An op whose function is of a whole wave.
inline Op WaveOp(const char* mnemonic, Execute execute,
                 std::initializer_list<Type> dst,
                 std::initializer_list<Type> src, uint32_t modifiers = 0,
                 uint8_t archs = kOnAll,
                 InstClass inst_class = InstClass::kValu) {
  Op op = {};
  op.mnemonic = mnemonic;
  op.execute = execute;
  op.inst_class = inst_class;
  int k = 0;
  for (Type type : dst) op.dst[k++] = type;
  k = 0;
  for (Type type : src) op.src[k++] = type;
  op.modifiers = modifiers;
  op.archs = archs;
  return op;
}

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_VALU_H_
