// SPDX-License-Identifier: Apache-2.0

// Vector instructions on integers and bits, moves, and all compares.

#include <immintrin.h>

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <unordered_set>

#include "tests/amdgpu_sim/isa/float.h"
#include "tests/amdgpu_sim/isa/ops.h"
#include "tests/amdgpu_sim/isa/valu.h"

namespace amdgpu_sim {
namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

// A 16-bit operation of VOP3 that writes half a register.
constexpr uint32_t kHalves = kOpSel | kKeepsHigh;

// Addition and multiplication. The clamp modifier saturates.

template <typename T>
T Saturated(i64 value) {
  constexpr i64 kLeast = std::numeric_limits<T>::min();
  constexpr i64 kMost = std::numeric_limits<T>::max();
  return static_cast<T>(value < kLeast ? kLeast
                                       : (value > kMost ? kMost : value));
}
template <typename T>
T Add(T a, T b, const Inst& inst) {
  i64 sum = i64{a} + b;
  return inst.clamp ? Saturated<T>(sum) : static_cast<T>(sum);
}
template <typename T>
T Sub(T a, T b, const Inst& inst) {
  i64 difference = i64{a} - b;
  return inst.clamp ? Saturated<T>(difference) : static_cast<T>(difference);
}
template <typename T>
T SubRev(T a, T b, const Inst& inst) {
  return Sub<T>(b, a, inst);
}
u32 AddCo(u32 a, u32 b, bool& carry) {
  u32 sum = a + b;
  carry = sum < a;
  return sum;
}
u32 SubCo(u32 a, u32 b, bool& borrow) {
  borrow = b > a;
  return a - b;
}
u32 SubRevCo(u32 a, u32 b, bool& borrow) { return SubCo(b, a, borrow); }
u32 AddcCo(u32 a, u32 b, bool in, bool& carry) {
  u64 sum = u64{a} + b + in;
  carry = sum >> 32 != 0;
  return static_cast<u32>(sum);
}
u32 SubbCo(u32 a, u32 b, bool in, bool& borrow) {
  borrow = u64{b} + in > a;
  return a - b - in;
}
u32 SubbRevCo(u32 a, u32 b, bool in, bool& borrow) {
  return SubbCo(b, a, in, borrow);
}
u16 MulLo16(u16 a, u16 b) { return static_cast<u16>(u32{a} * b); }
u32 MulLo32(u32 a, u32 b) { return a * b; }
u32 MulHiU32(u32 a, u32 b) { return static_cast<u32>(u64{a} * b >> 32); }
i32 MulHiI32(i32 a, i32 b) { return static_cast<i32>(i64{a} * b >> 32); }
u32 Low24(u32 a) { return a & 0xffffff; }
i32 Signed24(u32 a) { return static_cast<i32>(a << 8) >> 8; }
u32 MulU24(u32 a, u32 b) { return Low24(a) * Low24(b); }
u32 MulI24(u32 a, u32 b) {
  return static_cast<u32>(i64{Signed24(a)} * Signed24(b));
}
u32 MulHiU24(u32 a, u32 b) {
  return static_cast<u32>(u64{Low24(a)} * Low24(b) >> 32);
}
u32 MulHiI24(u32 a, u32 b) {
  return static_cast<u32>(i64{Signed24(a)} * Signed24(b) >> 32);
}
u32 MadU24(u32 a, u32 b, u32 c) { return MulU24(a, b) + c; }
u32 MadI24(u32 a, u32 b, u32 c) { return MulI24(a, b) + c; }
template <typename T>
T Mad16(T a, T b, T c, const Inst& inst) {
  i64 sum = i64{a} * b + c;
  return inst.clamp ? Saturated<T>(sum) : static_cast<T>(sum);
}
u32 MadU32U16(u16 a, u16 b, u32 c) { return u32{a} * b + c; }
u32 MadI32I16(i16 a, i16 b, u32 c) { return static_cast<u32>(i32{a} * b) + c; }
u64 MadU64U32(u32 a, u32 b, u64 c, bool& carry) {
  u64 sum = u64{a} * b + c;
  carry = sum < c;
  return sum;
}
// The carry is bit 64 of the exact sum.
u64 MadI64I32(i32 a, i32 b, u64 c, bool& carry) {
  i64 product = i64{a} * b;
  u64 sum = static_cast<u64>(product) + c;
  carry = ((product < 0) ^ (static_cast<i64>(c) < 0) ^ (sum < c)) != 0;
  return sum;
}
u32 Add3(u32 a, u32 b, u32 c) { return a + b + c; }
u32 AddLshl(u32 a, u32 b, u32 c) { return (a + b) << (c & 31); }
u32 LshlAdd(u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; }
u64 LshlAdd64(u64 a, u32 b, u64 c) { return (a << (b & 7)) + c; }
u32 Xad(u32 a, u32 b, u32 c) { return (a ^ b) + c; }

template <typename T>
T Min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T Max(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
T Min3(T a, T b, T c) {
  return Min(Min(a, b), c);
}
template <typename T>
T Max3(T a, T b, T c) {
  return Max(Max(a, b), c);
}
template <typename T>
T Med3(T a, T b, T c) {
  return Max(Min(a, b), Min(Max(a, b), c));
}

// Bits.

u32 And(u32 a, u32 b) { return a & b; }
u32 Or(u32 a, u32 b) { return a | b; }
u32 Xor(u32 a, u32 b) { return a ^ b; }
u32 Xnor(u32 a, u32 b) { return ~(a ^ b); }
u32 Not(u32 a) { return ~a; }
u32 Or3(u32 a, u32 b, u32 c) { return a | b | c; }
u32 AndOr(u32 a, u32 b, u32 c) { return (a & b) | c; }
u32 LshlOr(u32 a, u32 b, u32 c) { return a << (b & 31) | c; }
// "rev": the shift comes first.
template <typename T>
T LshlRev(std::conditional_t<sizeof(T) == 2, u16, u32> a, T b) {
  return static_cast<T>(b << (a & (8 * sizeof(T) - 1)));
}
template <typename T>  // Signed: arithmetic.
T ShrRev(std::conditional_t<sizeof(T) == 2, u16, u32> a, T b) {
  return static_cast<T>(b >> (a & (8 * sizeof(T) - 1)));
}
u32 BfeU(u32 a, u32 b, u32 c) {
  return a >> (b & 31) & ((u32{1} << (c & 31)) - 1);
}
i32 BfeI(i32 a, u32 b, u32 c) {
  u32 width = c & 31;
  u32 field = static_cast<u32>(a >> (b & 31)) & ((u32{1} << width) - 1);
  // The shift by 32 of width 0 would not give 0.
  u32 up = (32 - width) & 31;
  return static_cast<i32>(field << up) >> up;
}
u32 Bfi(u32 a, u32 b, u32 c) { return (a & b) | (~a & c); }
u32 Bfm(u32 a, u32 b) { return ((u32{1} << (a & 31)) - 1) << (b & 31); }
u32 Bfrev(u32 a) {
  a = (a >> 1 & 0x55555555) | (a & 0x55555555) << 1;
  a = (a >> 2 & 0x33333333) | (a & 0x33333333) << 2;
  a = (a >> 4 & 0x0f0f0f0f) | (a & 0x0f0f0f0f) << 4;
  a = (a >> 8 & 0x00ff00ff) | (a & 0x00ff00ff) << 8;
  return a >> 16 | a << 16;
}
u32 FfbhU(u32 a) { return a ? __builtin_clz(a) : ~u32{0}; }
u32 FfbhI(i32 a) { return FfbhU(static_cast<u32>(a < 0 ? ~a : a)); }
u32 Ffbl(u32 a) { return a ? __builtin_ctz(a) : ~u32{0}; }
u32 Bcnt(u32 a, u32 b) { return __builtin_popcount(a) + b; }
u32 AlignBit(u32 a, u32 b, u32 c) {
  return static_cast<u32>((u64{a} << 32 | b) >> (c & 31));
}
u32 AlignByte(u32 a, u32 b, u32 c) {
  return static_cast<u32>((u64{a} << 32 | b) >> 8 * (c & 3));
}
u32 Byte(u32 a, int k) { return a >> 8 * k & 0xff; }
u32 PermByte(u64 data, u32 select) {
  u32 byte = static_cast<u32>(data >> 8 * (select & 7)) & 0xff;
  // 8 to 11: the sign of a 16-bit element.
  u32 sign = data >> (16 * (select & 3) + 15) & 1 ? 0xff : 0;
  u32 constant = select == 12 ? 0 : 0xff;
  return select < 8 ? byte : (select < 12 ? sign : constant);
}
u32 Perm(u32 a, u32 b, u32 c) {
  u64 data = u64{a} << 32 | b;
  return PermByte(data, c & 0xff) | PermByte(data, c >> 8 & 0xff) << 8 |
         PermByte(data, c >> 16 & 0xff) << 16 | PermByte(data, c >> 24) << 24;
}
// The selector is most often one for all lanes: bytes are shuffled then.
void PermWave(Wave& wave, const Inst& inst) {
  const Operand& o = inst.src[2];
  u32 select = o.kind == Operand::Kind::kScalar ? wave.s[o.reg]
                                                : static_cast<u32>(o.constant);
  bool uniform = inst.plain && (o.kind == Operand::Kind::kScalar ||
                                o.kind == Operand::Kind::kConstant);
  alignas(16) uint8_t from_a[16], from_b[16];
  u32 ones = 0;
  for (int k = 0; k < 4; ++k) {
    u32 byte = Byte(select, k);
    if (byte >= 8 && byte < 12) uniform = false;
    if (byte > 12) ones |= u32{0xff} << 8 * k;
    for (int element = 0; element < 16; element += 4) {
      // 0x80 gives 0.
      from_a[element + k] = byte >= 4 && byte < 8 ? element + byte - 4 : 0x80;
      from_b[element + k] = byte < 4 ? element + byte : 0x80;
    }
  }
  if (!uniform) {
    Vector<Perm>(wave, inst);
    return;
  }
  Plane planes[2], out;
  const u32* a = Read(wave, inst, 0, Type::kU32, &planes[0]);
  const u32* b = Read(wave, inst, 1, Type::kU32, &planes[1]);
  auto load = [](const void* at) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(at));
  };
  auto both = [](const uint8_t* at) {
    return _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i*>(at)));
  };
  const __m256i shuffle_a = both(from_a), shuffle_b = both(from_b);
  const __m256i set = _mm256_set1_epi32(static_cast<int>(ones));
  for (int lane = 0; lane < kLanes; lane += 8) {
    __m256i bytes =
        _mm256_or_si256(_mm256_shuffle_epi8(load(a + lane), shuffle_a),
                        _mm256_shuffle_epi8(load(b + lane), shuffle_b));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out.at + lane),
                       _mm256_or_si256(bytes, set));
  }
  Write(wave, inst, Type::kU32, &out);
}
// Bit k of the table is the result where the sources' bits spell k.
template <typename T>
T Bitop3(T a, T b, T c, const Inst& inst) {
  u32 result = 0;
  for (int k = 0; k < 8; ++k) {
    u32 term = (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    result |= inst.bitop3 >> k & 1 ? term : 0;
  }
  return static_cast<T>(result);
}

// Bytes.

u32 Distance(u32 a, u32 b) { return a > b ? a - b : b - a; }
u32 SadU8(u32 a, u32 b, u32 c) {
  for (int k = 0; k < 4; ++k) c += Distance(Byte(a, k), Byte(b, k));
  return c;
}
u32 SadHiU8(u32 a, u32 b, u32 c) { return (SadU8(a, b, 0) << 16) + c; }
u32 SadU16(u32 a, u32 b, u32 c) {
  return c + Distance(a & 0xffff, b & 0xffff) + Distance(a >> 16, b >> 16);
}
u32 SadU32(u32 a, u32 b, u32 c) { return Distance(a, b) + c; }
u32 MsadU8(u32 a, u32 b, u32 c) {
  for (int k = 0; k < 4; ++k) {
    c += Byte(b, k) ? Distance(Byte(a, k), Byte(b, k)) : 0;
  }
  return c;
}
u32 LerpU8(u32 a, u32 b, u32 c) {
  u32 result = 0;
  for (int k = 0; k < 4; ++k) {
    u32 sum = Byte(a, k) + Byte(b, k) + (c >> 8 * k & 1);
    result |= (sum >> 1) << 8 * k;
  }
  return result;
}
u32 SaturateU8(i32 a) { return a < 0 ? 0 : (a > 255 ? 255 : a); }
u32 SaturateI8(i32 a) { return (a < -128 ? -128 : (a > 127 ? 127 : a)) & 0xff; }
u16 SatPkU8I16(u32 a) {
  return static_cast<u16>(SaturateU8(static_cast<i16>(a)) |
                          SaturateU8(static_cast<i32>(a) >> 16) << 8);
}
u16 AshrPkI8(i32 a, i32 b, u32 c) {
  return static_cast<u16>(SaturateI8(a >> (c & 31)) | SaturateI8(b >> (c & 31))
                                                          << 8);
}
u16 AshrPkU8(i32 a, i32 b, u32 c) {
  return static_cast<u16>(SaturateU8(a >> (c & 31)) | SaturateU8(b >> (c & 31))
                                                          << 8);
}
u32 PackB32F16(Half a, Half b) { return a.bits | u32{b.bits} << 16; }
u32 CvtPkU16U32(u32 a, u32 b) {
  return Min<u32>(a, 0xffff) | Min<u32>(b, 0xffff) << 16;
}
u32 CvtPkI16I32(i32 a, i32 b) {
  return static_cast<u16>(Saturated<i16>(a)) |
         static_cast<u32>(static_cast<u16>(Saturated<i16>(b))) << 16;
}
u32 Prng(u32 a) { return a << 1 ^ (a >> 31 ? 197 : 0); }

// Moves.

template <typename T>
T Move(T a) {
  return a;
}
u32 Cndmask(u32 a, u32 b, bool select) { return select ? b : a; }

void Nothing(Wave&, const Inst&) {}

void Swap(Wave& wave, const Inst& inst) {
  uint64_t exec = wave.exec();
  uint32_t* a = wave.v[inst.dst[0].reg];
  uint32_t* b = wave.v[inst.src[0].reg];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (exec >> lane & 1) std::swap(a[lane], b[lane]);
  }
}

// Compares.

// By name: f lt eq le gt lg ge o u nge nlg ngt nle neq nlt tru, of which
// integers have f lt eq le gt ne ge t.
enum class Relation {
  kF,
  kLt,
  kEq,
  kLe,
  kGt,
  kLg,
  kGe,
  kO,
  kU,
  kNge,
  kNlg,
  kNgt,
  kNle,
  kNeq,
  kNlt,
  kTru
};

template <Relation relation, typename T>
bool Holds(T a, T b) {
  switch (relation) {
    case Relation::kF:
      return false;
    case Relation::kLt:
      return a < b;
    case Relation::kEq:
      return a == b;
    case Relation::kLe:
      return a <= b;
    case Relation::kGt:
      return a > b;
    case Relation::kLg:
      return a < b || a > b;
    case Relation::kGe:
      return a >= b;
    case Relation::kO:
      return a == a && b == b;
    case Relation::kU:
      return a != a || b != b;
    case Relation::kNge:
      return !(a >= b);
    case Relation::kNlg:
      return !(a < b || a > b);
    case Relation::kNgt:
      return !(a > b);
    case Relation::kNle:
      return !(a <= b);
    case Relation::kNeq:
      return !(a == b);
    case Relation::kNlt:
      return !(a < b);
    case Relation::kTru:
      return true;
  }
}

// A half as the hardware compares it: a denormal is 0 if the mode flushes it.
template <Relation relation, bool flush>
bool HoldsHalf(Half a, Half b) {
  auto value = [](Half half) {
    u32 bits = half.bits;
    if (flush && (bits & 0x7c00) == 0) bits &= 0x8000;
    return HalfToFloat(static_cast<u16>(bits));
  };
  return Holds<relation, float>(value(a), value(b));
}

template <Relation relation, bool to_exec>
void CompareHalves(Wave& wave, const Inst& inst) {
  if (wave.mode.denorm16_64() & 1) {
    Compare<HoldsHalf<relation, false>, to_exec>(wave, inst);
  } else {
    Compare<HoldsHalf<relation, true>, to_exec>(wave, inst);
  }
}

template <Relation relation, bool to_exec>
void CompareDoubles(Wave& wave, const Inst& inst) {
  ScopedMxcsr mode(wave, Mxcsr16And64(wave.mode));
  Compare<Holds<relation, double>, to_exec>(wave, inst);
}

// Bits of the mask: signaling NaN, quiet NaN, -infinity, -normal, -denormal,
// -0, 0, denormal, normal, infinity.
template <typename Bits, int mantissa_bits>
bool InClass(Bits bits, u32 classes) {
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  constexpr Bits kMantissa = (Bits{1} << mantissa_bits) - 1;
  constexpr Bits kExponent = static_cast<Bits>(~(kSign | kMantissa));
  bool negative = bits & kSign;
  Bits exponent = bits & kExponent;
  Bits mantissa = bits & kMantissa;
  int k;
  if (exponent == kExponent && mantissa) {
    k = mantissa >> (mantissa_bits - 1);
  } else if (exponent == kExponent) {
    k = negative ? 2 : 9;
  } else if (exponent) {
    k = negative ? 3 : 8;
  } else if (mantissa) {
    k = negative ? 4 : 7;
  } else {
    k = negative ? 5 : 6;
  }
  return classes >> k & 1;
}
bool Class16(Half a, u32 b) { return InClass<u16, 10>(a.bits, b); }
bool Class32(float a, u32 b) { return InClass<u32, 23>(BitsOf(a), b); }
bool Class64(double a, u32 b) { return InClass<u64, 52>(BitsOf(a), b); }

// A name made of parts, kept for the table.
const char* Name(const std::string& name) {
  static auto* names = new std::unordered_set<std::string>;
  return names->insert(name).first->c_str();
}

template <bool to_exec, Relation relation>
void AddFloatCompare(Ops* ops, const char* name) {
  std::string stem = std::string(to_exec ? "v_cmpx_" : "v_cmp_") + name + "_";
  ops->push_back(
      CompareOp<Holds<relation, float>, to_exec>(Name(stem + "f32")));
  Op halves =
      CompareOp<HoldsHalf<relation, false>, to_exec>(Name(stem + "f16"));
  halves.execute = CompareHalves<relation, to_exec>;
  ops->push_back(halves);
  Op doubles = CompareOp<Holds<relation, double>, to_exec>(Name(stem + "f64"));
  doubles.execute = CompareDoubles<relation, to_exec>;
  ops->push_back(doubles);
}

template <bool to_exec, Relation relation>
void AddIntCompare(Ops* ops, const char* name) {
  std::string stem = std::string(to_exec ? "v_cmpx_" : "v_cmp_") + name + "_";
  ops->push_back(CompareOp<Holds<relation, i16>, to_exec>(Name(stem + "i16")));
  ops->push_back(CompareOp<Holds<relation, u16>, to_exec>(Name(stem + "u16")));
  ops->push_back(CompareOp<Holds<relation, i32>, to_exec>(Name(stem + "i32")));
  ops->push_back(CompareOp<Holds<relation, u32>, to_exec>(Name(stem + "u32")));
  ops->push_back(CompareOp<Holds<relation, i64>, to_exec>(Name(stem + "i64")));
  ops->push_back(CompareOp<Holds<relation, u64>, to_exec>(Name(stem + "u64")));
}

template <bool to_exec>
void AddCompares(Ops* ops) {
  AddFloatCompare<to_exec, Relation::kF>(ops, "f");
  AddFloatCompare<to_exec, Relation::kLt>(ops, "lt");
  AddFloatCompare<to_exec, Relation::kEq>(ops, "eq");
  AddFloatCompare<to_exec, Relation::kLe>(ops, "le");
  AddFloatCompare<to_exec, Relation::kGt>(ops, "gt");
  AddFloatCompare<to_exec, Relation::kLg>(ops, "lg");
  AddFloatCompare<to_exec, Relation::kGe>(ops, "ge");
  AddFloatCompare<to_exec, Relation::kO>(ops, "o");
  AddFloatCompare<to_exec, Relation::kU>(ops, "u");
  AddFloatCompare<to_exec, Relation::kNge>(ops, "nge");
  AddFloatCompare<to_exec, Relation::kNlg>(ops, "nlg");
  AddFloatCompare<to_exec, Relation::kNgt>(ops, "ngt");
  AddFloatCompare<to_exec, Relation::kNle>(ops, "nle");
  AddFloatCompare<to_exec, Relation::kNeq>(ops, "neq");
  AddFloatCompare<to_exec, Relation::kNlt>(ops, "nlt");
  AddFloatCompare<to_exec, Relation::kTru>(ops, "tru");
  AddIntCompare<to_exec, Relation::kF>(ops, "f");
  AddIntCompare<to_exec, Relation::kLt>(ops, "lt");
  AddIntCompare<to_exec, Relation::kEq>(ops, "eq");
  AddIntCompare<to_exec, Relation::kLe>(ops, "le");
  AddIntCompare<to_exec, Relation::kGt>(ops, "gt");
  AddIntCompare<to_exec, Relation::kNeq>(ops, "ne");
  AddIntCompare<to_exec, Relation::kGe>(ops, "ge");
  AddIntCompare<to_exec, Relation::kTru>(ops, "t");
  std::string stem = to_exec ? "v_cmpx_class_" : "v_cmp_class_";
  ops->push_back(CompareOp<Class16, to_exec>(Name(stem + "f16")));
  ops->push_back(CompareOp<Class32, to_exec>(Name(stem + "f32")));
  ops->push_back(CompareOp<Class64, to_exec>(Name(stem + "f64")));
}

void AddArithmetic(Ops* ops) {
  ops->insert(
      ops->end(),
      {
          VectorOp<Add<u32>>("v_add_u32", kClamp),
          VectorOp<Sub<u32>>("v_sub_u32", kClamp),
          VectorOp<SubRev<u32>>("v_subrev_u32", kClamp),
          VectorOp<Add<i32>>("v_add_i32", kClamp),
          VectorOp<Sub<i32>>("v_sub_i32", kClamp),
          VectorOp<Add<u16>>("v_add_u16", kClamp),
          VectorOp<Sub<u16>>("v_sub_u16", kClamp),
          VectorOp<SubRev<u16>>("v_subrev_u16", kClamp),
          VectorOp<Add<i16>>("v_add_i16", kClamp | kHalves),
          VectorOp<Sub<i16>>("v_sub_i16", kClamp | kHalves),
          VectorOp<AddCo>("v_add_co_u32"),
          VectorOp<SubCo>("v_sub_co_u32"),
          VectorOp<SubRevCo>("v_subrev_co_u32"),
          VectorOp<AddcCo>("v_addc_co_u32"),
          VectorOp<SubbCo>("v_subb_co_u32"),
          VectorOp<SubbRevCo>("v_subbrev_co_u32"),
          VectorOp<MulLo16>("v_mul_lo_u16"),
          VectorOp<MulLo32>("v_mul_lo_u32"),
          VectorOp<MulHiU32>("v_mul_hi_u32"),
          VectorOp<MulHiI32>("v_mul_hi_i32"),
          VectorOp<MulU24>("v_mul_u32_u24"),
          VectorOp<MulI24>("v_mul_i32_i24"),
          VectorOp<MulHiU24>("v_mul_hi_u32_u24"),
          VectorOp<MulHiI24>("v_mul_hi_i32_i24"),
          VectorOp<MadU24>("v_mad_u32_u24"),
          VectorOp<MadI24>("v_mad_i32_i24"),
          VectorOp<Mad16<u16>>("v_mad_u16", kClamp | kHalves),
          VectorOp<Mad16<i16>>("v_mad_i16", kClamp | kHalves),
          VectorOp<Mad16<u16>>("v_mad_legacy_u16", kClamp),
          VectorOp<Mad16<i16>>("v_mad_legacy_i16", kClamp),
          VectorOp<MadU32U16>("v_mad_u32_u16", kOpSel),
          VectorOp<MadI32I16>("v_mad_i32_i16", kOpSel),
          VectorOp<MadU64U32>("v_mad_u64_u32"),
          VectorOp<MadI64I32>("v_mad_i64_i32"),
          VectorOp<Add3>("v_add3_u32"),
          VectorOp<AddLshl>("v_add_lshl_u32"),
          VectorOp<LshlAdd>("v_lshl_add_u32"),
          VectorOp<LshlAdd64>("v_lshl_add_u64", 0, kOnGfx942 | kOnGfx950),
          VectorOp<Xad>("v_xad_u32"),
          VectorOp<Min<u16>>("v_min_u16"),
          VectorOp<Min<i16>>("v_min_i16"),
          VectorOp<Max<u16>>("v_max_u16"),
          VectorOp<Max<i16>>("v_max_i16"),
          VectorOp<Min<u32>>("v_min_u32"),
          VectorOp<Min<i32>>("v_min_i32"),
          VectorOp<Max<u32>>("v_max_u32"),
          VectorOp<Max<i32>>("v_max_i32"),
          VectorOp<Min3<u16>>("v_min3_u16", kHalves),
          VectorOp<Min3<i16>>("v_min3_i16", kHalves),
          VectorOp<Max3<u16>>("v_max3_u16", kHalves),
          VectorOp<Max3<i16>>("v_max3_i16", kHalves),
          VectorOp<Med3<u16>>("v_med3_u16", kHalves),
          VectorOp<Med3<i16>>("v_med3_i16", kHalves),
          VectorOp<Min3<u32>>("v_min3_u32"),
          VectorOp<Min3<i32>>("v_min3_i32"),
          VectorOp<Max3<u32>>("v_max3_u32"),
          VectorOp<Max3<i32>>("v_max3_i32"),
          VectorOp<Med3<u32>>("v_med3_u32"),
          VectorOp<Med3<i32>>("v_med3_i32"),
      });
}

void AddBits(Ops* ops) {
  Op perm = VectorOp<Perm>("v_perm_b32");
  perm.execute = PermWave;
  ops->insert(
      ops->end(),
      {
          VectorOp<And>("v_and_b32"),
          VectorOp<Or>("v_or_b32"),
          VectorOp<Xor>("v_xor_b32"),
          VectorOp<Xnor>("v_xnor_b32"),
          VectorOp<Not>("v_not_b32"),
          VectorOp<Or3>("v_or3_b32"),
          VectorOp<AndOr>("v_and_or_b32"),
          VectorOp<LshlOr>("v_lshl_or_b32"),
          VectorOp<LshlRev<u16>>("v_lshlrev_b16"),
          VectorOp<ShrRev<u16>>("v_lshrrev_b16"),
          VectorOp<ShrRev<i16>>("v_ashrrev_i16"),
          VectorOp<LshlRev<u32>>("v_lshlrev_b32"),
          VectorOp<ShrRev<u32>>("v_lshrrev_b32"),
          VectorOp<ShrRev<i32>>("v_ashrrev_i32"),
          VectorOp<LshlRev<u64>>("v_lshlrev_b64"),
          VectorOp<ShrRev<u64>>("v_lshrrev_b64"),
          VectorOp<ShrRev<i64>>("v_ashrrev_i64"),
          VectorOp<BfeU>("v_bfe_u32"),
          VectorOp<BfeI>("v_bfe_i32"),
          VectorOp<Bfi>("v_bfi_b32"),
          VectorOp<Bfm>("v_bfm_b32"),
          VectorOp<Bfrev>("v_bfrev_b32"),
          VectorOp<FfbhU>("v_ffbh_u32"),
          VectorOp<FfbhI>("v_ffbh_i32"),
          VectorOp<Ffbl>("v_ffbl_b32"),
          VectorOp<Bcnt>("v_bcnt_u32_b32"),
          VectorOp<AlignBit>("v_alignbit_b32"),
          VectorOp<AlignByte>("v_alignbyte_b32"),
          perm,
          VectorOp<Bitop3<u32>>("v_bitop3_b32", kBitop3, kOnGfx950),
          VectorOp<Bitop3<u16>>("v_bitop3_b16", kBitop3 | kHalves, kOnGfx950),
          VectorOp<SadU8>("v_sad_u8"),
          VectorOp<SadHiU8>("v_sad_hi_u8"),
          VectorOp<SadU16>("v_sad_u16"),
          VectorOp<SadU32>("v_sad_u32"),
          VectorOp<MsadU8>("v_msad_u8"),
          VectorOp<LerpU8>("v_lerp_u8"),
          VectorOp<SatPkU8I16>("v_sat_pk_u8_i16"),
          VectorOp<AshrPkI8>("v_ashr_pk_i8_i32", kHalves, kOnGfx950),
          VectorOp<AshrPkU8>("v_ashr_pk_u8_i32", kHalves, kOnGfx950),
          VectorOp<PackB32F16>("v_pack_b32_f16", kOpSel),
          VectorOp<CvtPkU16U32>("v_cvt_pk_u16_u32"),
          VectorOp<CvtPkI16I32>("v_cvt_pk_i16_i32"),
          VectorOp<Prng>("v_prng_b32", 0, kOnGfx950),
      });
}

void AddMoves(Ops* ops) {
  ops->insert(ops->end(),
              {
                  VectorOp<Move<u32>>("v_mov_b32"),
                  VectorOp<Move<u64>>("v_mov_b64", 0, kOnGfx942 | kOnGfx950),
                  VectorOp<Cndmask>("v_cndmask_b32", kNegAbs),
                  WaveOp("v_swap_b32", Swap, {Type::kB32}, {Type::kB32}),
                  WaveOp("v_nop", Nothing, {}, {}),
                  WaveOp("v_clrexcp", Nothing, {}, {}),
              });
}

}  // namespace

Ops IntegerOps() {
  Ops ops;
  AddArithmetic(&ops);
  AddBits(&ops);
  AddMoves(&ops);
  AddCompares<false>(&ops);
  AddCompares<true>(&ops);
  return ops;
}

}  // namespace amdgpu_sim
