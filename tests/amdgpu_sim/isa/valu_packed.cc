// SPDX-License-Identifier: Apache-2.0

// Packed arithmetic (VOP3P), dot products, mixed precision, and conversions
// that pack: f16, bf16, fp8, bf8, fp6, bf6, fp4.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "tests/amdgpu_sim/isa/float.h"
#include "tests/amdgpu_sim/isa/half.h"
#include "tests/amdgpu_sim/isa/ops.h"
#include "tests/amdgpu_sim/isa/valu.h"

namespace amdgpu_sim {
namespace {

// ---------------------------------------------------------------------------
// Two elements of 32 bits.

float Add32(float a, float b) { return a + b; }
float Mul32(float a, float b) { return a * b; }
float Fma32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// op_sel alone says which register of each source.
void PkMov(Wave& wave, const Inst& inst) {
  Plane planes[2];
  const uint32_t* in[2];
  Plane out;
  for (int k = 0; k < 2; ++k) {
    in[k] = ReadPacked(wave, inst.src[k], Type::kPkB32, false, &planes[k]);
    std::memcpy(out.at + k * kLanes, in[k], kLanes * sizeof(*out.at));
  }
  uint32_t* to = wave.v[inst.dst[0].reg];
  WriteLanes(to, out.at, wave.exec());
  WriteLanes(to + kLanes, out.at + kLanes, wave.exec());
}

// ---------------------------------------------------------------------------
// Two halves.

template <typename T>
T Saturate(int32_t value, bool clamp) {
  constexpr int32_t kLow = std::is_signed_v<T> ? -32768 : 0;
  constexpr int32_t kHigh = std::is_signed_v<T> ? 32767 : 65535;
  int32_t limited = value < kLow ? kLow : value > kHigh ? kHigh : value;
  return static_cast<T>(clamp ? limited : value);
}

template <typename T>
T PkAdd(T a, T b, const Inst& inst) {
  return Saturate<T>(int32_t{a} + b, inst.clamp);
}
template <typename T>
T PkSub(T a, T b, const Inst& inst) {
  return Saturate<T>(int32_t{a} - b, inst.clamp);
}
template <typename T>
T PkMad(T a, T b, T c, const Inst& inst) {
  int64_t sum = int64_t{a} * b + c;
  if (!inst.clamp) return static_cast<T>(sum);
  sum = sum < INT32_MIN ? INT32_MIN : sum > INT32_MAX ? INT32_MAX : sum;
  return Saturate<T>(static_cast<int32_t>(sum), true);
}
uint16_t PkMulLo(uint16_t a, uint16_t b) {
  return static_cast<uint16_t>(uint32_t{a} * b);
}
template <typename T>
T PkMin(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T PkMax(T a, T b) {
  return a > b ? a : b;
}
uint16_t PkShl(uint16_t count, uint16_t a) {
  return static_cast<uint16_t>(a << (count & 15));
}
uint16_t PkShr(uint16_t count, uint16_t a) {
  return static_cast<uint16_t>(a >> (count & 15));
}
int16_t PkAshr(uint16_t count, int16_t a) {
  return static_cast<int16_t>(a >> (count & 15));
}

// ---------------------------------------------------------------------------
// Dot products.

float LowHalf(uint32_t a) { return HalfToFloat(static_cast<uint16_t>(a)); }
float LowBfloat(uint32_t a) { return FloatOf(a << 16); }

// Products of two halves are exact in f32, so each step rounds once.
template <float (*value)(uint32_t), bool addend_last>
float Dot2Lane(uint32_t a_low, uint32_t a_high, uint32_t b_low, uint32_t b_high,
               float c) {
  if (addend_last) {
    float sum = value(a_low) * value(b_low);
    sum = __builtin_fmaf(value(a_high), value(b_high), sum);
    return sum + c;
  }
  float sum = __builtin_fmaf(value(a_low), value(b_low), c);
  return __builtin_fmaf(value(a_high), value(b_high), sum);
}

template <float (*value)(uint32_t), bool addend_last>
void Dot2(Wave& wave, const Inst& inst) {
  if (inst.src[2].neg_lo || inst.src[2].neg_hi) {
    throw Fault{Check::kUnsupported, "neg of a dot product's addend"};
  }
  Plane planes[4], addend, out;
  const uint32_t* in[4];
  for (int k = 0; k < 4; ++k) {
    in[k] = ReadPacked(wave, inst.src[k / 2], Type::kPkF16, k & 1, &planes[k]);
  }
  Operand c = inst.src[2];
  c.op_sel = false;
  const uint32_t* from =
      ReadModified(wave, inst, c, Type::kF32, false, &addend);
  for (int lane = 0; lane < kLanes; ++lane) {
    SetLane(out.at, lane,
            Dot2Lane<value, addend_last>(in[0][lane], in[1][lane], in[2][lane],
                                         in[3][lane], FloatOf(from[lane])));
  }
  if (inst.clamp) ModifyResult(wave, inst, Type::kF32, out.at);
  WriteLanes(wave.v[inst.dst[0].reg], out.at, wave.exec());
}

template <float (*value)(uint32_t), bool addend_last>
Op Dot2Op(const char* mnemonic, uint8_t archs) {
  Op op = {mnemonic,
           Dot2<value, addend_last>,
           InstClass::kValu,
           {Type::kF32},
           {Type::kPkF16, Type::kPkF16, Type::kF32},
           kPacked | kClamp,
           archs};
  return op;
}

float Dot2cHalf(uint32_t a, uint32_t b, float c) {
  return Dot2Lane<LowHalf, false>(a, a >> 16, b, b >> 16, c);
}
float Dot2cBfloat(uint32_t a, uint32_t b, float c) {
  return Dot2Lane<LowBfloat, false>(a, a >> 16, b, b >> 16, c);
}

template <int bits, bool is_signed>
int64_t Element(uint32_t a, int index) {
  uint32_t up = a << (32 - bits - bits * index);
  return is_signed ? int64_t{static_cast<int32_t>(up) >> (32 - bits)}
                   : int64_t{up >> (32 - bits)};
}

// Of integers; the clamp saturates the sum.
template <int bits, bool is_signed>
uint32_t DotLane(uint32_t a, uint32_t b, uint32_t c, const Inst& inst) {
  int64_t sum = is_signed ? int64_t{static_cast<int32_t>(c)} : int64_t{c};
  for (int k = 0; k < 32 / bits; ++k) {
    sum += Element<bits, is_signed>(a, k) * Element<bits, is_signed>(b, k);
  }
  if (inst.clamp) {
    int64_t low = is_signed ? int64_t{INT32_MIN} : 0;
    int64_t high = is_signed ? int64_t{INT32_MAX} : int64_t{UINT32_MAX};
    sum = sum < low ? low : sum > high ? high : sum;
  }
  return static_cast<uint32_t>(sum);
}

template <auto F>
Op IntegerDotOp(const char* mnemonic, uint32_t extra = 0) {
  return VectorOp<F>(mnemonic, kClamp | extra);
}

// Of two registers of floats, the packed sources without modifiers.
template <auto F>
Op FloatDotOp(const char* mnemonic, uint8_t archs) {
  Op op = VectorOp<F>(mnemonic, kReadsDst, archs);
  op.modifiers &= ~uint32_t{kNegAbs};
  return op;
}

// ---------------------------------------------------------------------------
// v_fma_mix: each source is f32 or, by op_sel_hi, the half that op_sel names.

// The decoder took an inline constant for an f32. Integers are the bits of
// either type.
uint16_t HalfConstant(const Operand& o) {
  if (o.op_sel) throw Fault{Check::kUnsupported, "op_sel of a constant"};
  uint32_t bits = static_cast<uint32_t>(o.constant);
  bool integer = bits + 16 <= 80;
  return integer ? static_cast<uint16_t>(bits) : FloatToHalf(FloatOf(bits));
}

const uint32_t* ReadMixed(const Wave& wave, const Inst& inst, int index,
                          Plane* plane) {
  Operand o = inst.src[index];
  o.neg |= o.neg_lo;
  o.abs |= o.neg_hi;
  if (!o.op_sel_hi) {
    o.op_sel = false;
    return ReadModified(wave, inst, o, Type::kF32, false, plane);
  }
  if (o.kind == Operand::Kind::kConstant) o.constant = HalfConstant(o);
  Plane raw;
  const uint32_t* halves = ReadModified(wave, inst, o, Type::kF16, false, &raw);
  HalvesToFloats(wave.mode, halves, plane->at);
  return plane->at;
}

enum class MixResult { kFloat, kLow, kHigh };

template <MixResult result>
void FmaMix(Wave& wave, const Inst& inst) {
  Plane planes[3], out;
  const uint32_t* in[3];
  for (int k = 0; k < 3; ++k) in[k] = ReadMixed(wave, inst, k, &planes[k]);
  Apply<Fma32>(inst, in, out.at, nullptr);
  uint32_t* to = wave.v[inst.dst[0].reg];
  if (result == MixResult::kFloat) {
    if (inst.clamp) ModifyResult(wave, inst, Type::kF32, out.at);
    WriteLanes(to, out.at, wave.exec());
    return;
  }
  {
    ScopedMxcsr scope(wave, HalfMxcsr(wave.mode));
    FloatsToHalves(wave.mode, out.at, out.at);
  }
  if (inst.clamp) ModifyResult(wave, inst, Type::kF16, out.at);
  for (int lane = 0; lane < kLanes; ++lane) {
    out.at[lane] = result == MixResult::kLow
                       ? (to[lane] & 0xffff0000) | out.at[lane]
                       : (to[lane] & 0xffff) | out.at[lane] << 16;
  }
  WriteLanes(to, out.at, wave.exec());
}

template <MixResult result>
Op FmaMixOp(const char* mnemonic) {
  return {mnemonic,
          FmaMix<result>,
          InstClass::kValu,
          {result == MixResult::kFloat ? Type::kF32 : Type::kB32},
          {Type::kF32, Type::kF32, Type::kF32},
          kPacked | kNegAbs | kClamp};
}

// ---------------------------------------------------------------------------
// Two floats to a register of halves.

template <int rounding>
void CvtPkHalf(Wave& wave, const Inst& inst) {
  Plane planes[2], halves[2];
  {
    ScopedMxcsr scope(wave, MxcsrFor(rounding, 3));
    for (int k = 0; k < 2; ++k) {
      FloatsToHalves(wave.mode, Read(wave, inst, k, Type::kF32, &planes[k]),
                     halves[k].at);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    halves[0].at[lane] |= halves[1].at[lane] << 16;
  }
  Write(wave, inst, Type::kB32, &halves[0]);
}

uint32_t CvtPkBfloat(float low, float high) {
  return FloatToBfloat(low) | uint32_t{FloatToBfloat(high)} << 16;
}

uint32_t CvtPkHalfSignature(float, float) { return 0; }

template <int rounding>
Op CvtPkHalfOp(const char* mnemonic, uint8_t archs) {
  Op op = VectorOp<CvtPkHalfSignature>(mnemonic, 0, archs);
  op.execute = CvtPkHalf<rounding>;
  return op;
}

// Random bits are added below the last bit kept, then all below it is cut.
template <int kept>
uint32_t AddRandom(uint32_t bits, uint32_t random) {
  return bits + (random >> kept);
}
Bfloat CvtSrBfloat(float a, uint32_t random) {
  uint32_t bits = BitsOf(a);
  if ((bits & 0x7f800000) == 0x7f800000) return {FloatToBfloat(a)};
  return {static_cast<uint16_t>(AddRandom<16>(bits, random) >> 16)};
}
Half CvtSrHalf(float a, uint32_t random) {
  uint32_t bits = BitsOf(a);
  if ((bits & 0x7f800000) == 0x7f800000) return {FloatToHalf(a)};
  // A result below 2^-14 has its last bit at 2^-24: its random bits are those
  // of an addition at that place.
  if ((bits & 0x7fffffff) < 0x38800000) {
    double size = std::fabs(static_cast<double>(a)) * 0x1p24;
    uint32_t code = static_cast<uint32_t>(size + random * 0x1p-32);
    return {static_cast<uint16_t>(code | (bits >> 16 & 0x8000))};
  }
  return {FloatToHalf<kToZero>(FloatOf(AddRandom<19>(bits, random)))};
}

// ---------------------------------------------------------------------------
// fp8 and bf8: fnuz on gfx942, OCP on gfx950. MODE's FP16_OVFL says that
// conversions saturate.

template <const MiniFormat& format>
float FromMini(uint32_t a) {
  return DecodeTable<format>()[a & 0xff];
}

// Bits of two floats: of the two codes in the lower half.
template <const MiniFormat& format>
uint64_t PairFromMini(uint32_t a) {
  const auto& table = DecodeTable<format>();
  return BitsOf(table[a & 0xff]) | uint64_t{BitsOf(table[a >> 8 & 0xff])} << 32;
}

template <const MiniFormat& format>
void CvtPkMini(Wave& wave, const Inst& inst) {
  Plane planes[2], out;
  const uint32_t* in[2];
  for (int k = 0; k < 2; ++k) {
    in[k] = Read(wave, inst, k, Type::kF32, &planes[k]);
  }
  const bool saturate = wave.mode.fp16_overflow();
  for (int lane = 0; lane < kLanes; ++lane) {
    out.at[lane] = EncodeMini(format, in[0][lane], saturate) |
                   EncodeMini(format, in[1][lane], saturate) << 8;
  }
  Write(wave, inst, Type::kU16, &out);
}

uint16_t CvtPkMiniSignature(float, float) { return 0; }

template <const MiniFormat& format>
Op CvtPkMiniOp(const char* mnemonic, uint8_t archs) {
  Op op = VectorOp<CvtPkMiniSignature>(mnemonic, kOpSel | kKeepsHigh, archs);
  op.execute = CvtPkMini<format>;
  return op;
}

// Writes `value` to the byte that op_sel's two last bits name.
void WriteByte(const Inst& inst, uint32_t value, uint32_t* to) {
  int shift = 8 * (inst.op_sel >> 2 & 3);
  *to = (*to & ~(0xffu << shift)) | (value & 0xff) << shift;
}

template <const MiniFormat& format>
void CvtSrMini(Wave& wave, const Inst& inst) {
  Plane planes[2];
  Operand value = inst.src[0], random = inst.src[1];
  value.op_sel = random.op_sel = false;
  const uint32_t* a =
      ReadModified(wave, inst, value, Type::kF32, false, &planes[0]);
  const uint32_t* r =
      ReadModified(wave, inst, random, Type::kB32, false, &planes[1]);
  const bool saturate = wave.mode.fp16_overflow();
  uint32_t* to = wave.v[inst.dst[0].reg];
  for (uint64_t lanes = wave.exec(); lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctzll(lanes);
    WriteByte(inst, EncodeMini(format, a[lane], saturate, 0, {true, r[lane]}),
              &to[lane]);
  }
}

template <const MiniFormat& format>
Op CvtSrMiniOp(const char* mnemonic, uint8_t archs) {
  return {mnemonic,     CvtSrMini<format>,        InstClass::kValu,
          {Type::kB32}, {Type::kF32, Type::kB32}, kOpSel | kNegAbs,
          archs};
}

// ---------------------------------------------------------------------------
// gfx950: v_cvt_scalef32_*. The scale is a float of which only the exponent
// counts. Narrowing divides by it, widening multiplies.

enum class Wide { kF32, kF16, kBF16 };

uint32_t RegisterOf(const Wave& wave, const Operand& o, int index, int lane) {
  switch (o.kind) {
    case Operand::Kind::kVector:
      return wave.v[o.reg + index][lane];
    case Operand::Kind::kScalar:
      return wave.s[o.reg + index];
    case Operand::Kind::kConstant:
      return static_cast<uint32_t>(o.constant);
    default:
      throw Fault{Check::kUnsupported, "this operand of a conversion"};
  }
}

// Element `index` of a packed operand, as bits of a float.
template <Wide wide>
uint32_t ElementOf(const Wave& wave, const Operand& o, int index, int lane) {
  if (wide == Wide::kF32) {
    uint32_t bits = RegisterOf(wave, o, index, lane);
    if (o.abs) bits &= 0x7fffffff;
    return o.neg ? bits ^ 0x80000000 : bits;
  }
  if (o.neg || o.abs) {
    throw Fault{Check::kUnsupported, "neg or abs of a packed source"};
  }
  uint32_t bits = RegisterOf(wave, o, index / 2, lane) >> 16 * (index & 1);
  bits &= 0xffff;
  return wide == Wide::kF16 ? BitsOf(HalfToFloat(static_cast<uint16_t>(bits)))
                            : bits << 16;
}

int ScaleOf(const Wave& wave, const Operand& o, int lane) {
  return RegisterOf(wave, o, 0, lane) >> 23 & 0xff;
}

uint32_t NextRandom(uint32_t random) {
  return random << 1 ^ (random >> 31 ? 197 : 0);
}

// `count` numbers to codes. f32 pairs come from two operands, interleaved.
template <const MiniFormat& format, Wide wide, int count, bool stochastic>
void Narrow(Wave& wave, const Inst& inst) {
  constexpr bool kTwo = wide == Wide::kF32 && !stochastic;
  constexpr int kBits = format.bits() * count;
  const Operand& scale_operand = inst.src[kTwo || stochastic ? 2 : 1];
  const bool saturate = wave.mode.fp16_overflow();
  for (uint64_t lanes = wave.exec(); lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctzll(lanes);
    int scale = ScaleOf(wave, scale_operand, lane);
    uint32_t random = stochastic ? RegisterOf(wave, inst.src[1], 0, lane) : 0;
    uint32_t packed[7] = {};
    for (int k = 0; k < count; ++k) {
      uint32_t bits = kTwo ? ElementOf<wide>(wave, inst.src[k & 1], k / 2, lane)
                           : ElementOf<wide>(wave, inst.src[0], k, lane);
      if (scale == 0xff) bits = 0x7fc00000;
      uint64_t code =
          EncodeMini(format, bits, saturate, scale - 127, {stochastic, random});
      if (stochastic) random = NextRandom(random);
      int at = k * format.bits();
      code <<= at % 32;
      packed[at / 32] |= static_cast<uint32_t>(code);
      packed[at / 32 + 1] |= static_cast<uint32_t>(code >> 32);
    }
    int reg = inst.dst[0].reg;
    if (kBits == 8) {
      WriteByte(inst, packed[0], &wave.v[reg][lane]);
    } else if (kBits == 16) {
      uint32_t old = wave.v[reg][lane];
      wave.v[reg][lane] = inst.op_sel_dst ? (old & 0xffff) | packed[0] << 16
                                          : (old & 0xffff0000) | packed[0];
    } else {
      for (int k = 0; k < kBits / 32; ++k) wave.v[reg + k][lane] = packed[k];
    }
  }
}

// `count` codes to numbers.
template <const MiniFormat& format, Wide wide, int count>
void Widen(Wave& wave, const Inst& inst) {
  constexpr int kBits = format.bits() * count;
  // Codes of a part of the register: op_sel names it.
  int first = 0;
  if (kBits == 8) first = 8 * (inst.op_sel & 3);
  if (kBits == 16) first = 16 * (inst.op_sel & 1);
  const auto& table = DecodeTable<format>();
  for (uint64_t lanes = wave.exec(); lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctzll(lanes);
    int scale = ScaleOf(wave, inst.src[1], lane);
    double factor = scale == 0xff
                        ? __builtin_nan("")
                        : DoubleOf(uint64_t(scale - 127 + 1023) << 52);
    uint32_t out[32] = {};
    for (int k = 0; k < count; ++k) {
      int at = first + k * format.bits();
      uint64_t bits = RegisterOf(wave, inst.src[0], at / 32, lane);
      if (at % 32 + format.bits() > 32) {
        bits |= uint64_t{RegisterOf(wave, inst.src[0], at / 32 + 1, lane)}
                << 32;
      }
      uint32_t code =
          static_cast<uint32_t>(bits >> at % 32) & (2 * format.sign() - 1);
      double value = table[code] * factor;
      if (wide == Wide::kF32) {
        out[k] = BitsOf(static_cast<float>(value));
      } else {
        // The few bits of a code leave one rounding.
        uint32_t half = wide == Wide::kF16
                            ? DoubleToHalf(value)
                            : FloatToBfloat(static_cast<float>(value));
        out[k / 2] |= half << 16 * (k & 1);
      }
    }
    int reg = inst.dst[0].reg;
    if (wide != Wide::kF32 && count == 1) {
      uint32_t old = wave.v[reg][lane];
      wave.v[reg][lane] = inst.op_sel_dst ? (old & 0xffff) | out[0] << 16
                                          : (old & 0xffff0000) | out[0];
      continue;
    }
    constexpr int kRegisters = wide == Wide::kF32 ? count : (count + 1) / 2;
    for (int k = 0; k < kRegisters; ++k) wave.v[reg + k][lane] = out[k];
  }
}

Op ScaleOp(const char* mnemonic, Execute execute,
           std::initializer_list<Type> sources) {
  Op op = {mnemonic, execute,          InstClass::kValu, {Type::kWide},
           {},       kOpSel | kNegAbs, kOnGfx950};
  std::copy(sources.begin(), sources.end(), op.src);
  return op;
}

template <const MiniFormat& format, Wide wide, int count>
Op NarrowOp(const char* mnemonic) {
  constexpr Type kFirst = count == 2 ? Type::kF32 : Type::kWide;
  Execute execute = Narrow<format, wide, count, false>;
  if (wide == Wide::kF32) {
    return ScaleOp(mnemonic, execute, {kFirst, kFirst, Type::kF32});
  }
  return ScaleOp(mnemonic, execute, {Type::kWide, Type::kF32});
}

template <const MiniFormat& format, Wide wide, int count>
Op NarrowRandomOp(const char* mnemonic) {
  return ScaleOp(mnemonic, Narrow<format, wide, count, true>,
                 {Type::kWide, Type::kB32, Type::kF32});
}

template <const MiniFormat& format, Wide wide, int count>
Op WidenOp(const char* mnemonic) {
  return ScaleOp(mnemonic, Widen<format, wide, count>,
                 {Type::kWide, Type::kF32});
}

void AddScaleOps(Ops* ops) {
  constexpr Wide F32 = Wide::kF32, F16 = Wide::kF16, BF16 = Wide::kBF16;
  Ops list = {
      NarrowOp<kFp8, F32, 2>("v_cvt_scalef32_pk_fp8_f32"),
      NarrowOp<kBf8, F32, 2>("v_cvt_scalef32_pk_bf8_f32"),
      NarrowOp<kFp4, F32, 2>("v_cvt_scalef32_pk_fp4_f32"),
      NarrowOp<kFp8, F16, 2>("v_cvt_scalef32_pk_fp8_f16"),
      NarrowOp<kBf8, F16, 2>("v_cvt_scalef32_pk_bf8_f16"),
      NarrowOp<kFp4, F16, 2>("v_cvt_scalef32_pk_fp4_f16"),
      NarrowOp<kFp8, BF16, 2>("v_cvt_scalef32_pk_fp8_bf16"),
      NarrowOp<kBf8, BF16, 2>("v_cvt_scalef32_pk_bf8_bf16"),
      NarrowOp<kFp4, BF16, 2>("v_cvt_scalef32_pk_fp4_bf16"),
      NarrowOp<kFp6, F32, 32>("v_cvt_scalef32_2xpk16_fp6_f32"),
      NarrowOp<kBf6, F32, 32>("v_cvt_scalef32_2xpk16_bf6_f32"),
      NarrowOp<kFp6, F16, 32>("v_cvt_scalef32_pk32_fp6_f16"),
      NarrowOp<kBf6, F16, 32>("v_cvt_scalef32_pk32_bf6_f16"),
      NarrowOp<kFp6, BF16, 32>("v_cvt_scalef32_pk32_fp6_bf16"),
      NarrowOp<kBf6, BF16, 32>("v_cvt_scalef32_pk32_bf6_bf16"),
      NarrowRandomOp<kFp8, F32, 1>("v_cvt_scalef32_sr_fp8_f32"),
      NarrowRandomOp<kBf8, F32, 1>("v_cvt_scalef32_sr_bf8_f32"),
      NarrowRandomOp<kFp8, F16, 1>("v_cvt_scalef32_sr_fp8_f16"),
      NarrowRandomOp<kBf8, F16, 1>("v_cvt_scalef32_sr_bf8_f16"),
      NarrowRandomOp<kFp8, BF16, 1>("v_cvt_scalef32_sr_fp8_bf16"),
      NarrowRandomOp<kBf8, BF16, 1>("v_cvt_scalef32_sr_bf8_bf16"),
      NarrowRandomOp<kFp4, F32, 2>("v_cvt_scalef32_sr_pk_fp4_f32"),
      NarrowRandomOp<kFp4, F16, 2>("v_cvt_scalef32_sr_pk_fp4_f16"),
      NarrowRandomOp<kFp4, BF16, 2>("v_cvt_scalef32_sr_pk_fp4_bf16"),
      NarrowRandomOp<kFp6, F32, 32>("v_cvt_scalef32_sr_pk32_fp6_f32"),
      NarrowRandomOp<kBf6, F32, 32>("v_cvt_scalef32_sr_pk32_bf6_f32"),
      NarrowRandomOp<kFp6, F16, 32>("v_cvt_scalef32_sr_pk32_fp6_f16"),
      NarrowRandomOp<kBf6, F16, 32>("v_cvt_scalef32_sr_pk32_bf6_f16"),
      NarrowRandomOp<kFp6, BF16, 32>("v_cvt_scalef32_sr_pk32_fp6_bf16"),
      NarrowRandomOp<kBf6, BF16, 32>("v_cvt_scalef32_sr_pk32_bf6_bf16"),
      WidenOp<kFp8, F32, 1>("v_cvt_scalef32_f32_fp8"),
      WidenOp<kBf8, F32, 1>("v_cvt_scalef32_f32_bf8"),
      WidenOp<kFp8, F16, 1>("v_cvt_scalef32_f16_fp8"),
      WidenOp<kBf8, F16, 1>("v_cvt_scalef32_f16_bf8"),
      WidenOp<kFp8, F32, 2>("v_cvt_scalef32_pk_f32_fp8"),
      WidenOp<kBf8, F32, 2>("v_cvt_scalef32_pk_f32_bf8"),
      WidenOp<kFp4, F32, 2>("v_cvt_scalef32_pk_f32_fp4"),
      WidenOp<kFp8, F16, 2>("v_cvt_scalef32_pk_f16_fp8"),
      WidenOp<kBf8, F16, 2>("v_cvt_scalef32_pk_f16_bf8"),
      WidenOp<kFp4, F16, 2>("v_cvt_scalef32_pk_f16_fp4"),
      WidenOp<kFp8, BF16, 2>("v_cvt_scalef32_pk_bf16_fp8"),
      WidenOp<kBf8, BF16, 2>("v_cvt_scalef32_pk_bf16_bf8"),
      WidenOp<kFp4, BF16, 2>("v_cvt_scalef32_pk_bf16_fp4"),
      WidenOp<kFp6, F32, 32>("v_cvt_scalef32_pk32_f32_fp6"),
      WidenOp<kBf6, F32, 32>("v_cvt_scalef32_pk32_f32_bf6"),
      WidenOp<kFp6, F16, 32>("v_cvt_scalef32_pk32_f16_fp6"),
      WidenOp<kBf6, F16, 32>("v_cvt_scalef32_pk32_f16_bf6"),
      WidenOp<kFp6, BF16, 32>("v_cvt_scalef32_pk32_bf16_fp6"),
      WidenOp<kBf6, BF16, 32>("v_cvt_scalef32_pk32_bf16_bf6"),
  };
  ops->insert(ops->end(), list.begin(), list.end());
}

void AddPackedArithmetic(Ops* ops) {
  using F = float;
  Ops list = {
      PackedOp<Add32>("v_pk_add_f32"),
      PackedOp<Mul32>("v_pk_mul_f32"),
      PackedOp<Fma32>("v_pk_fma_f32"),
      {"v_pk_mov_b32",
       PkMov,
       InstClass::kValu,
       {Type::kPkB32},
       {Type::kPkB32, Type::kPkB32},
       kPacked},
      HalfPackedOp<Add32>("v_pk_add_f16"),
      HalfPackedOp<Mul32>("v_pk_mul_f16"),
      HalfPackedOp<FmaHalf>("v_pk_fma_f16"),
      HalfPackedOp<Minimum<false, F>, true>("v_pk_min_f16"),
      HalfPackedOp<Maximum<false, F>, true>("v_pk_max_f16"),
      HalfPackedOp<MinimumOrNan3<F>>("v_pk_minimum3_f16", 0, kOnGfx950),
      HalfPackedOp<MaximumOrNan3<F>>("v_pk_maximum3_f16", 0, kOnGfx950),
      PackedOp<PkAdd<int16_t>>("v_pk_add_i16", kClamp),
      PackedOp<PkAdd<uint16_t>>("v_pk_add_u16", kClamp),
      PackedOp<PkSub<int16_t>>("v_pk_sub_i16", kClamp),
      PackedOp<PkSub<uint16_t>>("v_pk_sub_u16", kClamp),
      PackedOp<PkMad<int16_t>>("v_pk_mad_i16", kClamp),
      PackedOp<PkMad<uint16_t>>("v_pk_mad_u16", kClamp),
      PackedOp<PkMulLo>("v_pk_mul_lo_u16"),
      PackedOp<PkMin<int16_t>>("v_pk_min_i16"),
      PackedOp<PkMin<uint16_t>>("v_pk_min_u16"),
      PackedOp<PkMax<int16_t>>("v_pk_max_i16"),
      PackedOp<PkMax<uint16_t>>("v_pk_max_u16"),
      PackedOp<PkShl>("v_pk_lshlrev_b16"),
      PackedOp<PkShr>("v_pk_lshrrev_b16"),
      PackedOp<PkAshr>("v_pk_ashrrev_i16"),
  };
  Op fmac = HalfPackedOp<FmaHalf>("v_pk_fmac_f16", kReadsDst);
  fmac.src[2] = Type::kNone;
  list.push_back(fmac);
  ops->insert(ops->end(), list.begin(), list.end());
}

void AddDots(Ops* ops) {
  Ops list = {
      Dot2Op<LowHalf, false>("v_dot2_f32_f16", kOnAll),
      Dot2Op<LowBfloat, true>("v_dot2_f32_bf16", kOnGfx950),
      FloatDotOp<Dot2cHalf>("v_dot2c_f32_f16", kOnAll),
      FloatDotOp<Dot2cBfloat>("v_dot2c_f32_bf16", kOnGfx950),
      IntegerDotOp<DotLane<16, true>>("v_dot2_i32_i16"),
      IntegerDotOp<DotLane<16, false>>("v_dot2_u32_u16"),
      IntegerDotOp<DotLane<8, true>>("v_dot4_i32_i8"),
      IntegerDotOp<DotLane<8, false>>("v_dot4_u32_u8"),
      IntegerDotOp<DotLane<4, true>>("v_dot8_i32_i4"),
      IntegerDotOp<DotLane<4, false>>("v_dot8_u32_u4"),
      IntegerDotOp<DotLane<16, true>>("v_dot2c_i32_i16", kReadsDst),
      IntegerDotOp<DotLane<8, true>>("v_dot4c_i32_i8", kReadsDst),
      IntegerDotOp<DotLane<4, true>>("v_dot8c_i32_i4", kReadsDst),
      FmaMixOp<MixResult::kFloat>("v_fma_mix_f32"),
      FmaMixOp<MixResult::kLow>("v_fma_mixlo_f16"),
      FmaMixOp<MixResult::kHigh>("v_fma_mixhi_f16"),
  };
  ops->insert(ops->end(), list.begin(), list.end());
}

void AddPackingConversions(Ops* ops) {
  constexpr uint32_t kHalfOf = kOpSel | kKeepsHigh;
  Ops list = {
      CvtPkHalfOp<kToZero>("v_cvt_pkrtz_f16_f32", kOnAll),
      CvtPkHalfOp<kToEven>("v_cvt_pk_f16_f32", kOnGfx950),
      VectorOp<CvtPkBfloat>("v_cvt_pk_bf16_f32", 0, kOnGfx950),
      VectorOp<CvtSrHalf>("v_cvt_sr_f16_f32", kHalfOf, kOnGfx950),
      VectorOp<CvtSrBfloat>("v_cvt_sr_bf16_f32", kHalfOf, kOnGfx950),
      VectorOp<FromMini<kFp8Fnuz>>("v_cvt_f32_fp8", 0, kOnGfx942),
      VectorOp<FromMini<kBf8Fnuz>>("v_cvt_f32_bf8", 0, kOnGfx942),
      VectorOp<FromMini<kFp8>>("v_cvt_f32_fp8", 0, kOnGfx950),
      VectorOp<FromMini<kBf8>>("v_cvt_f32_bf8", 0, kOnGfx950),
      VectorOp<PairFromMini<kFp8Fnuz>>("v_cvt_pk_f32_fp8", 0, kOnGfx942),
      VectorOp<PairFromMini<kBf8Fnuz>>("v_cvt_pk_f32_bf8", 0, kOnGfx942),
      VectorOp<PairFromMini<kFp8>>("v_cvt_pk_f32_fp8", 0, kOnGfx950),
      VectorOp<PairFromMini<kBf8>>("v_cvt_pk_f32_bf8", 0, kOnGfx950),
      CvtPkMiniOp<kFp8Fnuz>("v_cvt_pk_fp8_f32", kOnGfx942),
      CvtPkMiniOp<kBf8Fnuz>("v_cvt_pk_bf8_f32", kOnGfx942),
      CvtPkMiniOp<kFp8>("v_cvt_pk_fp8_f32", kOnGfx950),
      CvtPkMiniOp<kBf8>("v_cvt_pk_bf8_f32", kOnGfx950),
      CvtSrMiniOp<kFp8Fnuz>("v_cvt_sr_fp8_f32", kOnGfx942),
      CvtSrMiniOp<kBf8Fnuz>("v_cvt_sr_bf8_f32", kOnGfx942),
      CvtSrMiniOp<kFp8>("v_cvt_sr_fp8_f32", kOnGfx950),
      CvtSrMiniOp<kBf8>("v_cvt_sr_bf8_f32", kOnGfx950),
  };
  ops->insert(ops->end(), list.begin(), list.end());
}

}  // namespace

Ops PackedOps() {
  Ops ops;
  AddPackedArithmetic(&ops);
  AddDots(&ops);
  AddPackingConversions(&ops);
  AddScaleOps(&ops);
  return ops;
}

}  // namespace amdgpu_sim
