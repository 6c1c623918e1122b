// SPDX-License-Identifier: Apache-2.0

// Scalar instructions: SOP1, SOP2, SOPK, SOPC, SOPP and SMEM.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/amdgpu_sim/isa/atomic.h"
#include "tests/amdgpu_sim/isa/float.h"
#include "tests/amdgpu_sim/isa/ops.h"
#include "tests/amdgpu_sim/isa/valu.h"

namespace amdgpu_sim {
namespace {

// How a scalar instruction is made from a function: its parameters are the
// sources, `bool&` is SCC (its old value at the call), `Wave&` and `const
// Inst&` are what they are; what it returns goes to the destination.

uint64_t ReadBits(const Wave& wave, const Operand& o, int bytes) {
  switch (o.kind) {
    case Operand::Kind::kScalar:
      return bytes == 8 ? wave.s64(o.reg) : wave.s[o.reg];
    case Operand::Kind::kConstant:
      return o.constant;
    case Operand::Kind::kScc:
    case Operand::Kind::kVccz:
    case Operand::Kind::kExecz:
      return ConditionOf(wave, o.kind);
    default:
      throw Fault{Check::kUnsupported, "this operand of a scalar operation"};
  }
}

template <typename P>
struct ScalarParameter {
  using Value = std::remove_cv_t<std::remove_reference_t<P>>;
  static constexpr bool kSource =
      std::is_integral_v<Value> && !std::is_same_v<Value, bool>;
};

template <typename F>
struct ScalarSignature;

template <typename R, typename... A>
struct ScalarSignature<R (*)(A...)> {
  using Result = R;
  static constexpr size_t kParameters = sizeof...(A);
  template <size_t k>
  using At = std::tuple_element_t<k, std::tuple<A...>>;
  static constexpr int SourceOf(size_t k) {
    constexpr bool is_source[] = {ScalarParameter<A>::kSource..., false};
    int index = 0;
    for (size_t i = 0; i < k; ++i) index += is_source[i];
    return index;
  }
  static void SourceTypes(Type* types) {
    ((ScalarParameter<A>::kSource
          ? void(*types++ = TypeOf<typename ScalarParameter<A>::Value>())
          : void()),
     ...);
  }
};

template <typename S, size_t k>
decltype(auto) ScalarArgument(Wave& wave, const Inst& inst, bool& scc) {
  using P = typename S::template At<k>;
  using Value = typename ScalarParameter<P>::Value;
  if constexpr (std::is_same_v<Value, bool>) {
    return (scc);
  } else if constexpr (std::is_same_v<Value, Wave>) {
    return (wave);
  } else if constexpr (std::is_same_v<Value, Inst>) {
    return (inst);
  } else {
    return static_cast<Value>(
        ReadBits(wave, inst.src[S::SourceOf(k)], sizeof(Value)));
  }
}

template <auto F, size_t... k>
void CallScalar(Wave& wave, const Inst& inst, std::index_sequence<k...>) {
  using S = ScalarSignature<decltype(F)>;
  using R = typename S::Result;
  bool scc = wave.scc;
  if constexpr (std::is_void_v<R>) {
    F(ScalarArgument<S, k>(wave, inst, scc)...);
    wave.scc = scc;
  } else {
    R result = F(ScalarArgument<S, k>(wave, inst, scc)...);
    if constexpr (sizeof(R) == 8) {
      wave.set_s64(inst.dst[0].reg, static_cast<uint64_t>(result));
    } else {
      wave.s[inst.dst[0].reg] = static_cast<uint32_t>(result);
    }
    wave.scc = scc;
  }
}

template <auto F>
void Scalar(Wave& wave, const Inst& inst) {
  CallScalar<F>(
      wave, inst,
      std::make_index_sequence<ScalarSignature<decltype(F)>::kParameters>());
}

// `more` may have kReadsDst.
template <auto F>
Op ScalarOp(const char* mnemonic, uint32_t more = 0,
            InstClass inst_class = InstClass::kSalu) {
  using S = ScalarSignature<decltype(F)>;
  Op op = {};
  op.mnemonic = mnemonic;
  op.execute = Scalar<F>;
  op.inst_class = inst_class;
  op.modifiers = more;
  if constexpr (!std::is_void_v<typename S::Result>) {
    op.dst[0] = TypeOf<typename S::Result>();
  }
  Type types[8] = {};
  S::SourceTypes(types);
  for (int k = 0; k < 5; ++k) op.src[k] = types[k];
  if (more & kReadsDst) {
    for (int k = 4; k >= 0; --k) {
      if (op.src[k] == Type::kNone) continue;
      op.src[k] = Type::kNone;
      break;
    }
  }
  return op;
}

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

template <typename T>
constexpr int kBits = 8 * sizeof(T);

// Arithmetic.

u32 AddU(u32 a, u32 b, bool& scc) {
  scc = __builtin_add_overflow(a, b, &a);
  return a;
}
u32 SubU(u32 a, u32 b, bool& scc) {
  scc = b > a;
  return a - b;
}
i32 AddI(i32 a, i32 b, bool& scc) {
  scc = __builtin_add_overflow(a, b, &a);
  return a;
}
i32 SubI(i32 a, i32 b, bool& scc) {
  scc = __builtin_sub_overflow(a, b, &a);
  return a;
}
u32 AddC(u32 a, u32 b, bool& scc) {
  u64 sum = u64{a} + b + scc;
  scc = sum >> 32;
  return static_cast<u32>(sum);
}
u32 SubB(u32 a, u32 b, bool& scc) {
  u32 difference = a - b - scc;
  scc = u64{b} + scc > a;
  return difference;
}
template <typename T>
T Min(T a, T b, bool& scc) {
  scc = a < b;
  return scc ? a : b;
}
template <typename T>
T Max(T a, T b, bool& scc) {
  scc = a >= b;
  return scc ? a : b;
}
i32 Mul(i32 a, i32 b) {
  return static_cast<i32>(static_cast<u32>(a) * static_cast<u32>(b));
}
u32 MulHiU(u32 a, u32 b) { return static_cast<u32>(u64{a} * b >> 32); }
i32 MulHiI(i32 a, i32 b) { return static_cast<i32>(i64{a} * b >> 32); }
template <int shift>
u32 LshlAdd(u32 a, u32 b, bool& scc) {
  u64 sum = (u64{a} << shift) + b;
  scc = sum >> 32;
  return static_cast<u32>(sum);
}
i32 Abs(i32 a, bool& scc) {
  u32 value = a < 0 ? 0 - static_cast<u32>(a) : static_cast<u32>(a);
  scc = value != 0;
  return static_cast<i32>(value);
}
i32 AbsDiff(i32 a, i32 b, bool& scc) {
  return Abs(static_cast<i32>(static_cast<u32>(a) - static_cast<u32>(b)), scc);
}
// SOPK: the destination is a source too.
i32 AddK(u16 k, i32 d, bool& scc) {
  return AddI(d, static_cast<int16_t>(k), scc);
}
i32 MulK(u16 k, i32 d) { return Mul(d, static_cast<int16_t>(k)); }

// Bits. SCC says that the result is not 0.

enum class Logic {
  kAnd,
  kOr,
  kXor,
  kAndn2,
  kOrn2,
  kNand,
  kNor,
  kXnor,
  kAndn1,
  kOrn1
};

template <Logic logic, typename T>
T Combine(T a, T b) {
  switch (logic) {
    case Logic::kAnd:
      return a & b;
    case Logic::kOr:
      return a | b;
    case Logic::kXor:
      return a ^ b;
    case Logic::kAndn2:
      return a & ~b;
    case Logic::kOrn2:
      return a | ~b;
    case Logic::kNand:
      return ~(a & b);
    case Logic::kNor:
      return ~(a | b);
    case Logic::kXnor:
      return ~(a ^ b);
    case Logic::kAndn1:
      return ~a & b;
    case Logic::kOrn1:
      return ~a | b;
  }
}
template <Logic logic, typename T>
T Bitwise(T a, T b, bool& scc) {
  T result = Combine<logic>(a, b);
  scc = result != 0;
  return result;
}
// The old EXEC goes to the destination, the new one is made with it.
template <Logic logic>
u64 SaveExec(u64 a, Wave& wave, bool& scc) {
  u64 old = wave.exec();
  u64 exec = Combine<logic>(a, old);
  wave.set_s64(kExec, exec);
  scc = exec != 0;
  return old;
}
template <Logic logic>
u64 WriteExec(u64 a, Wave& wave, bool& scc) {
  u64 exec = Combine<logic>(a, wave.exec());
  wave.set_s64(kExec, exec);
  scc = exec != 0;
  return exec;
}
template <typename T>
T Not(T a, bool& scc) {
  a = ~a;
  scc = a != 0;
  return a;
}
template <typename T>
T Lshl(T a, u32 b, bool& scc) {
  a <<= b % kBits<T>;
  scc = a != 0;
  return a;
}
template <typename T>  // Signed: arithmetic.
T Shr(T a, u32 b, bool& scc) {
  a >>= b % kBits<T>;
  scc = a != 0;
  return a;
}
template <typename T>
T Bfm(u32 a, u32 b) {
  return ((T{1} << a % kBits<T>)-1) << b % kBits<T>;
}
template <typename T>
T Bfe(T a, u32 b, bool& scc) {
  using U = std::make_unsigned_t<T>;
  int offset = b % kBits<T>;
  int width = b >> 16 & 0x7f;
  T field = a >> offset;
  if (width == 0) {
    field = 0;
  } else if (width < kBits<T>) {
    int up = kBits<T> - width;
    field = static_cast<T>(static_cast<U>(field) << up) >> up;
  }
  scc = field != 0;
  return field;
}
template <typename T>
T Brev(T a) {
  T result = 0;
  for (int k = 0; k < kBits<T>; ++k) result = result << 1 | (a >> k & 1);
  return result;
}
template <typename T, bool ones>
u32 Bcnt(T a, bool& scc) {
  u32 count = __builtin_popcountll(ones ? a : static_cast<T>(~a));
  scc = count != 0;
  return count;
}
template <typename T, bool one>
u32 Ff(T a) {
  if (!one) a = ~a;
  return a ? __builtin_ctzll(a) : ~u32{0};
}
template <typename T>
u32 Flbit(T a) {
  return a ? __builtin_clzll(a) - (64 - kBits<T>) : ~u32{0};
}
// Of a signed number: bits equal to the sign; -1 if all are.
template <typename T>
u32 FlbitSigned(T a) {
  using U = std::make_unsigned_t<T>;
  return Flbit<U>(static_cast<U>(a < 0 ? ~a : a));
}
template <typename T>
T Wqm(T a, bool& scc) {
  T any = a | a >> 1;
  any = (any | any >> 2) & static_cast<T>(0x1111111111111111);
  scc = any != 0;
  return any * 15;
}
template <typename T>
T Quadmask(T a, bool& scc) {
  T result = 0;
  for (int k = 0; k < kBits<T> / 4; ++k) {
    if (a >> 4 * k & 15) result |= T{1} << k;
  }
  scc = result != 0;
  return result;
}
u64 Bitreplicate(u32 a) {
  u64 result = 0;
  for (int k = 0; k < 32; ++k) {
    if (a >> k & 1) result |= u64{3} << 2 * k;
  }
  return result;
}
template <typename T, bool value>
T Bitset(u32 a, T d) {
  T bit = T{1} << a % kBits<T>;
  return value ? d | bit : d & ~bit;
}
template <typename T, bool value>
void Bitcmp(T a, u32 b, bool& scc) {
  scc = (a >> b % kBits<T> & 1) == value;
}
u32 PackLL(u32 a, u32 b) { return b << 16 | (a & 0xffff); }
u32 PackLH(u32 a, u32 b) { return (b & 0xffff0000) | (a & 0xffff); }
u32 PackHH(u32 a, u32 b) { return (b & 0xffff0000) | a >> 16; }

// Moves.

template <typename T>
T Move(T a) {
  return a;
}
template <typename T>
T Cmov(T a, T d, bool& scc) {
  return scc ? a : d;
}
template <typename T>
T Cselect(T a, T b, bool& scc) {
  return scc ? a : b;
}
i32 MoveK(u16 k) { return static_cast<int16_t>(k); }
i32 CmovK(u16 k, i32 d, bool& scc) { return scc ? static_cast<int16_t>(k) : d; }
i32 SextI8(u32 a) { return static_cast<int8_t>(a); }
i32 SextI16(u32 a) { return static_cast<int16_t>(a); }

// The register number itself is moved by M0.
int Relative(const Wave& wave, const Operand& o, int count) {
  int64_t reg = int64_t{o.reg} + wave.s[kM0];
  if (o.kind != Operand::Kind::kScalar || reg + count > kFlatScratch) {
    throw Fault{Check::kUnsupported, "s_movrel beyond the scalar registers"};
  }
  return static_cast<int>(reg);
}
u32 MovrelsB32(u32, Wave& wave, const Inst& inst) {
  return wave.s[Relative(wave, inst.src[0], 1)];
}
u64 MovrelsB64(u64, Wave& wave, const Inst& inst) {
  return wave.s64(Relative(wave, inst.src[0], 2));
}
void MovreldB32(Wave& wave, const Inst& inst) {
  u32 value = static_cast<u32>(ReadBits(wave, inst.src[0], 4));
  wave.s[Relative(wave, inst.dst[0], 1)] = value;
}
void MovreldB64(Wave& wave, const Inst& inst) {
  u64 value = ReadBits(wave, inst.src[0], 8);
  wave.set_s64(Relative(wave, inst.dst[0], 2), value);
}

// The moves between these are indexed (decode.cc).
void SetGprIdxOn(u32 a, u32 which, Wave& wave) {
  wave.s[kM0] = (wave.s[kM0] & 0xffff0f00) | (a & 0xff) | which << 12;
}
void SetGprIdxIdx(u32 a, Wave& wave) {
  wave.s[kM0] = (wave.s[kM0] & 0xffffff00) | (a & 0xff);
}
void SetGprIdxOff() {}

// Compares.

enum class Relation { kEq, kLg, kGt, kGe, kLt, kLe };

template <Relation relation, typename T>
bool Holds(T a, T b) {
  switch (relation) {
    case Relation::kEq:
      return a == b;
    case Relation::kLg:
      return a != b;
    case Relation::kGt:
      return a > b;
    case Relation::kGe:
      return a >= b;
    case Relation::kLt:
      return a < b;
    case Relation::kLe:
      return a <= b;
  }
}
template <Relation relation, typename T>
void Cmp(T a, T b, bool& scc) {
  scc = Holds<relation>(a, b);
}
template <Relation relation, typename T>
void CmpK(T a, u16 k, bool& scc) {
  using Short = std::conditional_t<std::is_signed_v<T>, int16_t, uint16_t>;
  scc = Holds<relation>(a, static_cast<T>(static_cast<Short>(k)));
}

// Branches. Wave::pc is already the next instruction's.

uint64_t Target(const Inst& inst) {
  return inst.pc + 4 + static_cast<int64_t>(inst.imm) * 4;
}
void Branch(Wave& wave, const Inst& inst) { wave.pc = Target(inst); }

enum class Condition { kScc0, kScc1, kVccz, kVccnz, kExecz, kExecnz };

template <Condition condition>
void BranchIf(Wave& wave, const Inst& inst) {
  bool taken = false;
  switch (condition) {
    case Condition::kScc0:
      taken = !wave.scc;
      break;
    case Condition::kScc1:
      taken = wave.scc;
      break;
    case Condition::kVccz:
      taken = wave.vcc() == 0;
      break;
    case Condition::kVccnz:
      taken = wave.vcc() != 0;
      break;
    case Condition::kExecz:
      taken = wave.exec() == 0;
      break;
    case Condition::kExecnz:
      taken = wave.exec() != 0;
      break;
  }
  if (taken) wave.pc = Target(inst);
}
u64 GetPc(const Inst& inst) { return inst.pc + 4; }
void SetPc(u64 a, Wave& wave) { wave.pc = a; }
u64 SwapPc(u64 a, Wave& wave, const Inst& inst) {
  wave.pc = a;
  return inst.pc + 4;
}
u64 Call(u16, Wave& wave, const Inst& inst) {
  wave.pc = Target(inst);
  return inst.pc + 4;
}

// The program's end, waits and the like.

void Nothing(Wave&, const Inst&) {}
void End(Wave& wave, const Inst&) { wave.ended = true; }
void Barrier(Wave& wave, const Inst&) { wave.ArriveAtBarrier(); }
void SetVskip(u32 a, u32 b, Wave& wave) { wave.skips = a >> (b & 31) & 1; }
void Waitcnt(Wave& wave, const Inst& inst) {
  int vm = (inst.imm & 15) | (inst.imm >> 10 & 0x30);
  int lgkm = inst.imm >> 8 & 15;
  if (vm < 63) wave.Wait(Counter::kVm, vm);
  if (lgkm < 15) wave.Wait(Counter::kLgkm, lgkm);
}
void Trap(Wave&, const Inst& inst) {
  throw Fault{Check::kUnsupported, "the program stopped itself by s_trap " +
                                       std::to_string(inst.imm & 0xff)};
}

// Hardware registers, by number.
constexpr int kModeRegister = 1, kHwId = 4, kShMemBases = 15, kXccId = 20;

struct Field {
  int id, offset;
  u32 mask;  // Not shifted.
  explicit Field(u32 bits)
      : id(bits & 63),
        offset(bits >> 6 & 31),
        mask(static_cast<u32>((u64{2} << (bits >> 11 & 31)) - 1)) {}
};

[[noreturn]] void RefuseRegister(int id) {
  throw Fault{Check::kUnsupported, "hardware register " + std::to_string(id)};
}
u32 GetReg(u32 hwreg, Wave& wave) {
  Field field(hwreg);
  u32 value;
  if (field.id == kModeRegister) {
    value = wave.mode.bits;
  } else if (field.id == kHwId ||
             (field.id == kXccId && wave.arch != Arch::kGfx90a)) {
    value = 0;  // One compute unit runs everything, in turn.
  } else if (field.id == kShMemBases) {
    value = (kSharedAperture & 0xffff0000) | kPrivateAperture >> 16;
  } else {
    RefuseRegister(field.id);
  }
  return value >> field.offset & field.mask;
}
void SetReg(u32 hwreg, u32 a, Wave& wave) {
  Field field(hwreg);
  if (field.id != kModeRegister) RefuseRegister(field.id);
  u32 mask = field.mask << field.offset;
  u32 bits = (wave.mode.bits & ~mask) | (a << field.offset & mask);
  // Rounding, denormals, DX10_CLAMP, IEEE and FP16_OVFL are modelled. An
  // exception would enter a trap handler, and there is none.
  constexpr u32 kModelled = 0x8003ff;
  if ((bits ^ wave.mode.bits) & ~kModelled) {
    throw Fault{Check::kUnsupported, "this bit of the MODE register"};
  }
  wave.mode.bits = bits;
  ApplyMode(wave);
}

// Scalar memory.

uint64_t ScalarOffset(const Wave& wave, const Inst& inst, const Operand& o) {
  // An immediate is signed, a register is not.
  int64_t offset = o.kind == Operand::Kind::kConstant
                       ? static_cast<i32>(o.constant)
                       : int64_t{wave.s[o.reg]};
  return static_cast<uint64_t>(offset + inst.offset);
}
void Load(Wave& wave, const Inst& inst) {
  uint64_t address =
      (wave.s64(inst.src[0].reg) + ScalarOffset(wave, inst, inst.src[1])) &
      ~uint64_t{3};
  const Operand& dst = inst.dst[0];
  for (int k = 0; k < dst.count; ++k) {
    std::memcpy(&wave.s[dst.reg + k],
                wave.Global(address + 4 * k, 4, Access::kRead, -1), 4);
  }
  wave.Announce(Counter::kLgkm, true, dst.reg, dst.count);
}
void BufferLoad(Wave& wave, const Inst& inst) {
  const u32* resource = &wave.s[inst.src[0].reg];
  uint64_t base = resource[0] | uint64_t{resource[1] & 0xffff} << 32;
  uint64_t size = resource[2];
  if (resource[1] >> 16 & 0x3fff) {
    throw Fault{Check::kUnsupported, "scalar load of a buffer with a stride"};
  }
  uint64_t offset = ScalarOffset(wave, inst, inst.src[1]) & ~uint64_t{3};
  const Operand& dst = inst.dst[0];
  for (int k = 0; k < dst.count; ++k, offset += 4) {
    u32 value = 0;  // Out of the buffer's range.
    if (offset + 4 <= size) {
      std::memcpy(&value, wave.Global(base + offset, 4, Access::kRead, -1), 4);
    }
    wave.s[dst.reg + k] = value;
  }
  wave.Announce(Counter::kLgkm, true, dst.reg, dst.count);
}
void Store(Wave& wave, const Inst& inst) {
  uint64_t address =
      (wave.s64(inst.src[1].reg) + ScalarOffset(wave, inst, inst.src[2])) &
      ~uint64_t{3};
  const Operand& data = inst.src[0];
  for (int k = 0; k < data.count; ++k) {
    std::memcpy(wave.Global(address + 4 * k, 4, Access::kWrite, -1),
                &wave.s[data.reg + k], 4);
  }
  wave.Announce(Counter::kLgkm, true, 0, 0);
}
// What was there goes to the register of the data with glc only.
template <auto F>
void ScalarAtomic(Wave& wave, const Inst& inst) {
  const Operand& data = inst.src[0];
  uint64_t address =
      wave.s64(inst.src[1].reg) + ScalarOffset(wave, inst, inst.src[2]);
  uint8_t* at = wave.Global(address & ~uint64_t{3}, 4, Access::kAtomic, -1);
  u32 old;
  std::memcpy(&old, at, 4);
  u32 value = F(old, wave.s[data.reg]);
  std::memcpy(at, &value, 4);
  if (inst.glc) wave.s[data.reg] = old;
  wave.Announce(Counter::kLgkm, true, data.reg, inst.glc ? 1 : 0);
}
// Time is not modelled: the clock of the shader counts instructions.
void Memtime(Wave& wave, const Inst& inst) {
  wave.set_s64(inst.dst[0].reg, wave.sequence);
  wave.Announce(Counter::kLgkm, true, inst.dst[0].reg, 2);
}
// The clock of 100 MHz is the host's, for programs that wait by it.
void Memrealtime(Wave& wave, const Inst& inst) {
  using Ticks = std::chrono::duration<int64_t, std::ratio<1, 100000000>>;
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  wave.set_s64(
      inst.dst[0].reg,
      static_cast<uint64_t>(std::chrono::duration_cast<Ticks>(now).count()));
  wave.Announce(Counter::kLgkm, true, inst.dst[0].reg, 2);
}

Op Plain(const char* mnemonic, Execute execute, InstClass inst_class) {
  return WaveOp(mnemonic, execute, {}, {}, 0, kOnAll, inst_class);
}

Op Smem(const char* mnemonic, Execute execute, std::initializer_list<Type> dst,
        std::initializer_list<Type> src) {
  return WaveOp(mnemonic, execute, dst, src, kAddress, kOnAll,
                InstClass::kSmem);
}

template <auto F>
Op Atomic(const char* mnemonic) {
  return Smem(mnemonic, ScalarAtomic<F>, {},
              {Type::kB32, Type::kWide, Type::kB32});
}

void AddMoves(Ops* ops) {
  ops->insert(ops->end(), {
                              ScalarOp<Move<u32>>("s_mov_b32"),
                              ScalarOp<Move<u64>>("s_mov_b64"),
                              ScalarOp<Cmov<u32>>("s_cmov_b32", kReadsDst),
                              ScalarOp<Cmov<u64>>("s_cmov_b64", kReadsDst),
                              ScalarOp<Cselect<u32>>("s_cselect_b32"),
                              ScalarOp<Cselect<u64>>("s_cselect_b64"),
                              ScalarOp<MoveK>("s_movk_i32"),
                              ScalarOp<CmovK>("s_cmovk_i32", kReadsDst),
                              ScalarOp<SextI8>("s_sext_i32_i8"),
                              ScalarOp<SextI16>("s_sext_i32_i16"),
                              ScalarOp<MovrelsB32>("s_movrels_b32"),
                              ScalarOp<MovrelsB64>("s_movrels_b64"),
                              WaveOp("s_movreld_b32", MovreldB32, {Type::kB32},
                                     {Type::kB32}, 0, kOnAll, InstClass::kSalu),
                              WaveOp("s_movreld_b64", MovreldB64, {Type::kB64},
                                     {Type::kB64}, 0, kOnAll, InstClass::kSalu),
                              ScalarOp<SetGprIdxOn>("s_set_gpr_idx_on"),
                              ScalarOp<SetGprIdxIdx>("s_set_gpr_idx_idx"),
                              ScalarOp<SetGprIdxOff>("s_set_gpr_idx_off"),
                              ScalarOp<PackLL>("s_pack_ll_b32_b16"),
                              ScalarOp<PackLH>("s_pack_lh_b32_b16"),
                              ScalarOp<PackHH>("s_pack_hh_b32_b16"),
                          });
}

void AddArithmetic(Ops* ops) {
  ops->insert(ops->end(), {
                              ScalarOp<AddU>("s_add_u32"),
                              ScalarOp<SubU>("s_sub_u32"),
                              ScalarOp<AddI>("s_add_i32"),
                              ScalarOp<SubI>("s_sub_i32"),
                              ScalarOp<AddC>("s_addc_u32"),
                              ScalarOp<SubB>("s_subb_u32"),
                              ScalarOp<Min<i32>>("s_min_i32"),
                              ScalarOp<Min<u32>>("s_min_u32"),
                              ScalarOp<Max<i32>>("s_max_i32"),
                              ScalarOp<Max<u32>>("s_max_u32"),
                              ScalarOp<Mul>("s_mul_i32"),
                              ScalarOp<MulHiU>("s_mul_hi_u32"),
                              ScalarOp<MulHiI>("s_mul_hi_i32"),
                              ScalarOp<LshlAdd<1>>("s_lshl1_add_u32"),
                              ScalarOp<LshlAdd<2>>("s_lshl2_add_u32"),
                              ScalarOp<LshlAdd<3>>("s_lshl3_add_u32"),
                              ScalarOp<LshlAdd<4>>("s_lshl4_add_u32"),
                              ScalarOp<Abs>("s_abs_i32"),
                              ScalarOp<AbsDiff>("s_absdiff_i32"),
                              ScalarOp<AddK>("s_addk_i32", kReadsDst),
                              ScalarOp<MulK>("s_mulk_i32", kReadsDst),
                          });
}

void AddBits(Ops* ops) {
  ops->insert(ops->end(),
              {
                  ScalarOp<Bitwise<Logic::kAnd, u32>>("s_and_b32"),
                  ScalarOp<Bitwise<Logic::kAnd, u64>>("s_and_b64"),
                  ScalarOp<Bitwise<Logic::kOr, u32>>("s_or_b32"),
                  ScalarOp<Bitwise<Logic::kOr, u64>>("s_or_b64"),
                  ScalarOp<Bitwise<Logic::kXor, u32>>("s_xor_b32"),
                  ScalarOp<Bitwise<Logic::kXor, u64>>("s_xor_b64"),
                  ScalarOp<Bitwise<Logic::kAndn2, u32>>("s_andn2_b32"),
                  ScalarOp<Bitwise<Logic::kAndn2, u64>>("s_andn2_b64"),
                  ScalarOp<Bitwise<Logic::kOrn2, u32>>("s_orn2_b32"),
                  ScalarOp<Bitwise<Logic::kOrn2, u64>>("s_orn2_b64"),
                  ScalarOp<Bitwise<Logic::kNand, u32>>("s_nand_b32"),
                  ScalarOp<Bitwise<Logic::kNand, u64>>("s_nand_b64"),
                  ScalarOp<Bitwise<Logic::kNor, u32>>("s_nor_b32"),
                  ScalarOp<Bitwise<Logic::kNor, u64>>("s_nor_b64"),
                  ScalarOp<Bitwise<Logic::kXnor, u32>>("s_xnor_b32"),
                  ScalarOp<Bitwise<Logic::kXnor, u64>>("s_xnor_b64"),
                  ScalarOp<SaveExec<Logic::kAnd>>("s_and_saveexec_b64"),
                  ScalarOp<SaveExec<Logic::kOr>>("s_or_saveexec_b64"),
                  ScalarOp<SaveExec<Logic::kXor>>("s_xor_saveexec_b64"),
                  ScalarOp<SaveExec<Logic::kAndn2>>("s_andn2_saveexec_b64"),
                  ScalarOp<SaveExec<Logic::kOrn2>>("s_orn2_saveexec_b64"),
                  ScalarOp<SaveExec<Logic::kNand>>("s_nand_saveexec_b64"),
                  ScalarOp<SaveExec<Logic::kNor>>("s_nor_saveexec_b64"),
                  ScalarOp<SaveExec<Logic::kXnor>>("s_xnor_saveexec_b64"),
                  ScalarOp<SaveExec<Logic::kAndn1>>("s_andn1_saveexec_b64"),
                  ScalarOp<SaveExec<Logic::kOrn1>>("s_orn1_saveexec_b64"),
                  ScalarOp<WriteExec<Logic::kAndn1>>("s_andn1_wrexec_b64"),
                  ScalarOp<WriteExec<Logic::kAndn2>>("s_andn2_wrexec_b64"),
                  ScalarOp<Not<u32>>("s_not_b32"),
                  ScalarOp<Not<u64>>("s_not_b64"),
                  ScalarOp<Lshl<u32>>("s_lshl_b32"),
                  ScalarOp<Lshl<u64>>("s_lshl_b64"),
                  ScalarOp<Shr<u32>>("s_lshr_b32"),
                  ScalarOp<Shr<u64>>("s_lshr_b64"),
                  ScalarOp<Shr<i32>>("s_ashr_i32"),
                  ScalarOp<Shr<i64>>("s_ashr_i64"),
                  ScalarOp<Bfm<u32>>("s_bfm_b32"),
                  ScalarOp<Bfm<u64>>("s_bfm_b64"),
                  ScalarOp<Bfe<u32>>("s_bfe_u32"),
                  ScalarOp<Bfe<i32>>("s_bfe_i32"),
                  ScalarOp<Bfe<u64>>("s_bfe_u64"),
                  ScalarOp<Bfe<i64>>("s_bfe_i64"),
                  ScalarOp<Brev<u32>>("s_brev_b32"),
                  ScalarOp<Brev<u64>>("s_brev_b64"),
                  ScalarOp<Bcnt<u32, false>>("s_bcnt0_i32_b32"),
                  ScalarOp<Bcnt<u64, false>>("s_bcnt0_i32_b64"),
                  ScalarOp<Bcnt<u32, true>>("s_bcnt1_i32_b32"),
                  ScalarOp<Bcnt<u64, true>>("s_bcnt1_i32_b64"),
                  ScalarOp<Ff<u32, false>>("s_ff0_i32_b32"),
                  ScalarOp<Ff<u64, false>>("s_ff0_i32_b64"),
                  ScalarOp<Ff<u32, true>>("s_ff1_i32_b32"),
                  ScalarOp<Ff<u64, true>>("s_ff1_i32_b64"),
                  ScalarOp<Flbit<u32>>("s_flbit_i32_b32"),
                  ScalarOp<Flbit<u64>>("s_flbit_i32_b64"),
                  ScalarOp<FlbitSigned<i32>>("s_flbit_i32"),
                  ScalarOp<FlbitSigned<i64>>("s_flbit_i32_i64"),
                  ScalarOp<Wqm<u32>>("s_wqm_b32"),
                  ScalarOp<Wqm<u64>>("s_wqm_b64"),
                  ScalarOp<Quadmask<u32>>("s_quadmask_b32"),
                  ScalarOp<Quadmask<u64>>("s_quadmask_b64"),
                  ScalarOp<Bitreplicate>("s_bitreplicate_b64_b32"),
                  ScalarOp<Bitset<u32, false>>("s_bitset0_b32", kReadsDst),
                  ScalarOp<Bitset<u64, false>>("s_bitset0_b64", kReadsDst),
                  ScalarOp<Bitset<u32, true>>("s_bitset1_b32", kReadsDst),
                  ScalarOp<Bitset<u64, true>>("s_bitset1_b64", kReadsDst),
              });
}

void AddCompares(Ops* ops) {
  ops->insert(ops->end(),
              {
                  ScalarOp<Cmp<Relation::kEq, i32>>("s_cmp_eq_i32"),
                  ScalarOp<Cmp<Relation::kLg, i32>>("s_cmp_lg_i32"),
                  ScalarOp<Cmp<Relation::kGt, i32>>("s_cmp_gt_i32"),
                  ScalarOp<Cmp<Relation::kGe, i32>>("s_cmp_ge_i32"),
                  ScalarOp<Cmp<Relation::kLt, i32>>("s_cmp_lt_i32"),
                  ScalarOp<Cmp<Relation::kLe, i32>>("s_cmp_le_i32"),
                  ScalarOp<Cmp<Relation::kEq, u32>>("s_cmp_eq_u32"),
                  ScalarOp<Cmp<Relation::kLg, u32>>("s_cmp_lg_u32"),
                  ScalarOp<Cmp<Relation::kGt, u32>>("s_cmp_gt_u32"),
                  ScalarOp<Cmp<Relation::kGe, u32>>("s_cmp_ge_u32"),
                  ScalarOp<Cmp<Relation::kLt, u32>>("s_cmp_lt_u32"),
                  ScalarOp<Cmp<Relation::kLe, u32>>("s_cmp_le_u32"),
                  ScalarOp<Cmp<Relation::kEq, u64>>("s_cmp_eq_u64"),
                  ScalarOp<Cmp<Relation::kLg, u64>>("s_cmp_lg_u64"),
                  ScalarOp<CmpK<Relation::kEq, i32>>("s_cmpk_eq_i32"),
                  ScalarOp<CmpK<Relation::kLg, i32>>("s_cmpk_lg_i32"),
                  ScalarOp<CmpK<Relation::kGt, i32>>("s_cmpk_gt_i32"),
                  ScalarOp<CmpK<Relation::kGe, i32>>("s_cmpk_ge_i32"),
                  ScalarOp<CmpK<Relation::kLt, i32>>("s_cmpk_lt_i32"),
                  ScalarOp<CmpK<Relation::kLe, i32>>("s_cmpk_le_i32"),
                  ScalarOp<CmpK<Relation::kEq, u32>>("s_cmpk_eq_u32"),
                  ScalarOp<CmpK<Relation::kLg, u32>>("s_cmpk_lg_u32"),
                  ScalarOp<CmpK<Relation::kGt, u32>>("s_cmpk_gt_u32"),
                  ScalarOp<CmpK<Relation::kGe, u32>>("s_cmpk_ge_u32"),
                  ScalarOp<CmpK<Relation::kLt, u32>>("s_cmpk_lt_u32"),
                  ScalarOp<CmpK<Relation::kLe, u32>>("s_cmpk_le_u32"),
                  ScalarOp<Bitcmp<u32, false>>("s_bitcmp0_b32"),
                  ScalarOp<Bitcmp<u32, true>>("s_bitcmp1_b32"),
                  ScalarOp<Bitcmp<u64, false>>("s_bitcmp0_b64"),
                  ScalarOp<Bitcmp<u64, true>>("s_bitcmp1_b64"),
              });
}

void AddControl(Ops* ops) {
  constexpr InstClass kBranch = InstClass::kBranch;
  constexpr InstClass kOther = InstClass::kOtherScalar;
  ops->insert(
      ops->end(),
      {
          Plain("s_branch", Branch, kBranch),
          Plain("s_cbranch_scc0", BranchIf<Condition::kScc0>, kBranch),
          Plain("s_cbranch_scc1", BranchIf<Condition::kScc1>, kBranch),
          Plain("s_cbranch_vccz", BranchIf<Condition::kVccz>, kBranch),
          Plain("s_cbranch_vccnz", BranchIf<Condition::kVccnz>, kBranch),
          Plain("s_cbranch_execz", BranchIf<Condition::kExecz>, kBranch),
          Plain("s_cbranch_execnz", BranchIf<Condition::kExecnz>, kBranch),
          ScalarOp<GetPc>("s_getpc_b64"),
          ScalarOp<SetPc>("s_setpc_b64", 0, kBranch),
          ScalarOp<SwapPc>("s_swappc_b64", 0, kBranch),
          ScalarOp<Call>("s_call_b64", 0, kBranch),
          Plain("s_endpgm", End, kOther),
          ScalarOp<SetVskip>("s_setvskip", 0, kOther),
          Plain("s_barrier", Barrier, InstClass::kBarrier),
          Plain("s_waitcnt", Waitcnt, InstClass::kWait),
          // Without effect where time and caches are not modelled.
          Plain("s_nop", Nothing, kOther),
          Plain("s_sleep", Nothing, kOther),
          Plain("s_setprio", Nothing, kOther),
          Plain("s_wakeup", Nothing, kOther),
          Plain("s_icache_inv", Nothing, kOther),
          Plain("s_incperflevel", Nothing, kOther),
          Plain("s_decperflevel", Nothing, kOther),
          Plain("s_dcache_inv", Nothing, InstClass::kSmem),
          Plain("s_dcache_inv_vol", Nothing, InstClass::kSmem),
          Plain("s_dcache_wb", Nothing, InstClass::kSmem),
          Plain("s_dcache_wb_vol", Nothing, InstClass::kSmem),
          Plain("s_trap", Trap, kOther),
          ScalarOp<GetReg>("s_getreg_b32", 0, kOther),
          ScalarOp<SetReg>("s_setreg_b32", 0, kOther),
          ScalarOp<SetReg>("s_setreg_imm32_b32", 0, kOther),
      });
}

void AddMemory(Ops* ops) {
  constexpr Type kWide = Type::kWide;
  constexpr Type kB32 = Type::kB32;
  ops->insert(
      ops->end(),
      {
          Smem("s_load_dword", Load, {kWide}, {kWide, kB32}),
          Smem("s_load_dwordx2", Load, {kWide}, {kWide, kB32}),
          Smem("s_load_dwordx4", Load, {kWide}, {kWide, kB32}),
          Smem("s_load_dwordx8", Load, {kWide}, {kWide, kB32}),
          Smem("s_load_dwordx16", Load, {kWide}, {kWide, kB32}),
          Smem("s_buffer_load_dword", BufferLoad, {kWide}, {kWide, kB32}),
          Smem("s_buffer_load_dwordx2", BufferLoad, {kWide}, {kWide, kB32}),
          Smem("s_buffer_load_dwordx4", BufferLoad, {kWide}, {kWide, kB32}),
          Smem("s_buffer_load_dwordx8", BufferLoad, {kWide}, {kWide, kB32}),
          Smem("s_buffer_load_dwordx16", BufferLoad, {kWide}, {kWide, kB32}),
          Smem("s_store_dword", Store, {}, {kWide, kWide, kB32}),
          Smem("s_store_dwordx2", Store, {}, {kWide, kWide, kB32}),
          Smem("s_store_dwordx4", Store, {}, {kWide, kWide, kB32}),
          Atomic<AtomicSwap<u32>>("s_atomic_swap"),
          Atomic<AtomicAdd<u32>>("s_atomic_add"),
          Atomic<AtomicSub<u32>>("s_atomic_sub"),
          Atomic<AtomicMin<i32>>("s_atomic_smin"),
          Atomic<AtomicMin<u32>>("s_atomic_umin"),
          Atomic<AtomicMax<i32>>("s_atomic_smax"),
          Atomic<AtomicMax<u32>>("s_atomic_umax"),
          Atomic<AtomicAnd<u32>>("s_atomic_and"),
          Atomic<AtomicOr<u32>>("s_atomic_or"),
          Atomic<AtomicXor<u32>>("s_atomic_xor"),
          Atomic<AtomicInc<u32>>("s_atomic_inc"),
          Atomic<AtomicDec<u32>>("s_atomic_dec"),
          Smem("s_memtime", Memtime, {kWide}, {}),
          Smem("s_memrealtime", Memrealtime, {kWide}, {}),
      });
}

}  // namespace

Ops ScalarOps() {
  Ops ops;
  AddMoves(&ops);
  AddArithmetic(&ops);
  AddBits(&ops);
  AddCompares(&ops);
  AddControl(&ops);
  AddMemory(&ops);
  return ops;
}

}  // namespace amdgpu_sim
