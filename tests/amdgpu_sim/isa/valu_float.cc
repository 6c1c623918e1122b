// SPDX-License-Identifier: Apache-2.0

// Floating-point arithmetic of VOP1, VOP2 and VOP3: f32, f64 and f16.
//
// Lane functions are written without branches where the compiler should make
// vector code of them. Transcendental functions are computed in double with an
// error far below a float's half ulp, then rounded: the hardware's are within
// 1 ulp of that.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/amdgpu_sim/isa/float.h"
#include "tests/amdgpu_sim/isa/half.h"
#include "tests/amdgpu_sim/isa/ops.h"
#include "tests/amdgpu_sim/isa/transcendental.h"
#include "tests/amdgpu_sim/isa/valu.h"

namespace amdgpu_sim {

float one_f32 = 1;
double one_f64 = 1;

namespace {

// Runs `run` as the mode of f16 and f64 rounds.
template <Execute run>
void InDoubleMode(Wave& wave, const Inst& inst) {
  ScopedMxcsr scope(wave, Mxcsr16And64(wave.mode));
  run(wave, inst);
}

// v_mad and v_mac flush denormals whatever the mode says.
template <Execute run>
void InFlushingMode(Wave& wave, const Inst& inst) {
  ScopedMxcsr scope(wave, MxcsrFor(wave.mode.round32(), 0));
  run(wave, inst);
}

template <auto F>
Op MadOp(const char* mnemonic, uint32_t extra = 0) {
  Op op = VectorOp<F>(mnemonic, extra, kOnGfx90a);
  op.execute = InFlushingMode<Vector<F>>;
  return op;
}

template <auto F>
Op DoubleOp(const char* mnemonic, uint32_t extra = 0,
            InstClass inst_class = InstClass::kValu) {
  Op op = VectorOp<F>(mnemonic, extra, kOnAll, inst_class);
  op.execute = InDoubleMode<Vector<F>>;
  return op;
}

// A minimum or maximum, which MODE's IEEE bit changes.
template <auto F, auto FIeee>
void ByIeee(Wave& wave, const Inst& inst) {
  wave.mode.ieee() ? Vector<FIeee>(wave, inst) : Vector<F>(wave, inst);
}

template <auto F, auto FIeee>
Op MinMaxOp(const char* mnemonic, uint32_t extra = 0) {
  Op op = VectorOp<F>(mnemonic, extra);
  op.execute = op.dst[0] == Type::kF64 ? InDoubleMode<ByIeee<F, FIeee>>
                                       : ByIeee<F, FIeee>;
  return op;
}

// ---------------------------------------------------------------------------
// Arithmetic.

template <typename T>
T Add(T a, T b) {
  return a + b;
}
template <typename T>
T Sub(T a, T b) {
  return a - b;
}
template <typename T>
T SubRev(T a, T b) {
  return b - a;
}
template <typename T>
T Mul(T a, T b) {
  return a * b;
}

float Fma32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
double Fma64(double a, double b, double c) { return __builtin_fma(a, b, c); }

// 0 times anything is 0.
float MulLegacy(float a, float b) {
  float product = a * b;
  return (a == 0) | (b == 0) ? 0.0f : product;
}

// Rounds the product as well.
float Mad(float a, float b, float c) { return a * b + c; }
float MadLegacy(float a, float b, float c) { return MulLegacy(a, b) + c; }

float FlushHalf(float a) {
  return std::fabs(a) < 0x1p-14f ? std::copysign(0.0f, a) : a;
}
float MadHalf(float a, float b, float c) {
  float product = HalfToFloat(FloatToHalfByMode(FlushHalf(a) * FlushHalf(b)));
  float sum = FlushHalf(product) + FlushHalf(c);
  return FlushHalf(HalfToFloat(FloatToHalfByMode(sum)));
}

template <typename T>
T Floor(T a) {
  return std::floor(a);
}
template <typename T>
T Ceil(T a) {
  return std::ceil(a);
}
template <typename T>
T Trunc(T a) {
  return std::trunc(a);
}
float RndNe(float a) { return __builtin_roundevenf(a); }
double RndNe64(double a) { return __builtin_roundeven(a); }

// Never 1: a tiny negative number's fraction is the largest below 1.
float Fract(float a) {
  float fraction = a - std::floor(a);
  return fraction >= 1 ? 0x1.fffffep-1f : fraction;
}
double Fract64(double a) {
  double fraction = a - std::floor(a);
  return fraction >= 1 ? 0x1.fffffffffffffp-1 : fraction;
}
float FractHalf(float a) {
  float fraction = a - std::floor(a);
  return fraction > 0x1.ffcp-1f ? 0x1.ffcp-1f : fraction;
}

// ---------------------------------------------------------------------------
// Exponents.

// 2^exponent for exponents of normal doubles.
double PowerOfTwo(int exponent) {
  return DoubleOf(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Exact in double, so that a denormal result is rounded once.
float Ldexp(float a, int32_t exponent) {
  exponent = exponent < -400 ? -400 : exponent;
  exponent = exponent > 400 ? 400 : exponent;
  return static_cast<float>(static_cast<double>(a) * PowerOfTwo(exponent));
}

double Ldexp64(double a, int32_t exponent) { return std::ldexp(a, exponent); }

float LdexpHalf(float a, int16_t exponent) {
  int clamped = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
  return RoundToOdd(static_cast<double>(a) * PowerOfTwo(clamped));
}

bool IsFinite(double a) {
  return (BitsOf(a) & 0x7ff0000000000000) != 0x7ff0000000000000;
}

// Of a normal double or 0; with `a` in [1/2, 1) times 2^result.
int32_t ExponentOf(double a) {
  uint64_t bits = BitsOf(a);
  int32_t exponent = static_cast<int32_t>(bits >> 52 & 0x7ff) - 1022;
  return (a == 0) | !IsFinite(a) ? 0 : exponent;
}

double MantissaOf(double a) {
  uint64_t bits = (BitsOf(a) & 0x800fffffffffffff) | 0x3fe0000000000000;
  return (a == 0) | !IsFinite(a) ? a : DoubleOf(bits);
}

int32_t FrexpExp(float a) { return ExponentOf(a); }
float FrexpMant(float a) { return static_cast<float>(MantissaOf(a)); }
int16_t FrexpExpHalf(float a) { return static_cast<int16_t>(ExponentOf(a)); }
int32_t FrexpExp64(double a) {
  int exponent = 0;
  if (IsFinite(a)) std::frexp(a, &exponent);
  return exponent;
}
double FrexpMant64(double a) {
  int exponent;
  return IsFinite(a) ? std::frexp(a, &exponent) : Canonical(a);
}

// ---------------------------------------------------------------------------
// Division. A quotient is made of v_div_scale of both operands, v_rcp, Newton
// steps, v_div_fmas and v_div_fixup. All of them work on bits: the kernel
// turns denormals on only between them.

template <typename Bits>
struct Parts;

template <>
struct Parts<uint32_t> {
  static constexpr int kMantissa = 23, kMax = 255, kBias = 127;
  static constexpr int kScale = 64;  // Of v_div_scale, a power of 2.
  static constexpr int kFar = 96;    // Exponents so far apart: overflow.
  static constexpr int kTiny = 23;   // A numerator's exponent field.
  static constexpr int kUnderflow = -150;
  using Float = float;
  static float Make(uint32_t bits) { return FloatOf(bits); }
};

template <>
struct Parts<uint64_t> {
  static constexpr int kMantissa = 52, kMax = 2047, kBias = 1023;
  static constexpr int kScale = 128;
  static constexpr int kFar = 768;
  static constexpr int kTiny = 53;
  static constexpr int kUnderflow = -1075;
  using Float = double;
  static double Make(uint64_t bits) { return DoubleOf(bits); }
};

// A number taken apart, denormals normalised.
template <typename Bits>
struct Number {
  using P = Parts<Bits>;
  explicit Number(Bits bits) {
    field = static_cast<int>(bits >> P::kMantissa) & P::kMax;
    mantissa = bits & ((Bits{1} << P::kMantissa) - 1);
    zero = field == 0 && mantissa == 0;
    infinite = field == P::kMax && mantissa == 0;
    nan = field == P::kMax && mantissa != 0;
    denormal = field == 0 && mantissa != 0;
    exponent = field;
    if (denormal) {
      int shift = __builtin_clzll(mantissa) - (63 - P::kMantissa);
      mantissa <<= shift;
      exponent = 1 - shift;
    } else if (!zero) {
      mantissa |= Bits{1} << P::kMantissa;
    }
  }
  int field;      // As encoded.
  int exponent;   // Biased; below 1 for a denormal.
  Bits mantissa;  // With its leading bit.
  bool zero, infinite, nan, denormal;
};

// The number times 2^power, exact, or an infinity.
template <typename Bits>
Bits Scaled(Bits bits, int power) {
  using P = Parts<Bits>;
  Number<Bits> n(bits);
  if (n.zero || n.infinite || n.nan) return bits;
  Bits sign = bits & (Bits{1} << (8 * sizeof(Bits) - 1));
  int exponent = n.exponent + power;
  if (exponent >= P::kMax) return sign | Bits{P::kMax} << P::kMantissa;
  Bits fraction = n.mantissa & ((Bits{1} << P::kMantissa) - 1);
  if (exponent >= 1) {
    return sign | static_cast<Bits>(exponent) << P::kMantissa | fraction;
  }
  int shift = 1 - exponent;
  return sign | (shift > P::kMantissa ? 0 : n.mantissa >> shift);
}

// Scales `s0`, which is one of denominator and numerator, so that the steps
// neither overflow nor lose denormals. `post` tells v_div_fmas to scale back.
template <typename Bits>
Bits DivScaleBits(Bits s0, Bits denominator, Bits numerator, bool& post) {
  using P = Parts<Bits>;
  Number<Bits> d(denominator), n(numerator);
  post = false;
  if (d.zero || n.zero) {
    return Bits{P::kMax} << P::kMantissa | Bits{1} << (P::kMantissa - 1);
  }
  bool is_denominator =
      P::Make(s0) == P::Make(denominator) && s0 == denominator;
  bool is_numerator = s0 == numerator;
  // |1 / d| and |n / d| below the least normal number.
  bool reciprocal_denormal =
      d.exponent > 2 * P::kBias - 1 ||
      (d.exponent == 2 * P::kBias - 1 && d.mantissa != Bits{1} << P::kMantissa);
  int difference = n.exponent - d.exponent;
  bool quotient_denormal =
      difference < 1 - P::kBias ||
      (difference == 1 - P::kBias && n.mantissa < d.mantissa);
  if (d.infinite || d.nan) reciprocal_denormal = false;
  if (d.infinite || d.nan || n.infinite || n.nan) quotient_denormal = false;

  if (n.field - d.field >= P::kFar) {
    post = true;
    return is_denominator ? Scaled(s0, P::kScale) : s0;
  }
  if (d.denormal) return Scaled(s0, P::kScale);
  if (reciprocal_denormal && quotient_denormal) {
    post = true;
    return is_denominator ? Scaled(s0, -P::kScale) : s0;
  }
  if (reciprocal_denormal) return Scaled(s0, -P::kScale);
  if (quotient_denormal) {
    post = true;
    return is_numerator ? Scaled(s0, P::kScale) : s0;
  }
  if (n.field <= P::kTiny) return Scaled(s0, P::kScale);
  return s0;
}

float DivScale(float s0, float s1, float s2, bool& post) {
  return FloatOf(DivScaleBits(BitsOf(s0), BitsOf(s1), BitsOf(s2), post));
}
double DivScale64(double s0, double s1, double s2, bool& post) {
  return DoubleOf(DivScaleBits(BitsOf(s0), BitsOf(s1), BitsOf(s2), post));
}

// Most operands need no scale: a vector loop sees that.
template <auto F, typename T, typename Bits>
void DivScaleVector(Wave& wave, const Inst& inst) {
  using P = Parts<Bits>;
  constexpr Type kType = TypeOf<T>();
  constexpr int kHigh = 31 - (P::kMax == 255 ? 8 : 11);
  Plane planes[3], out, slow;
  const uint32_t* in[3];
  for (int k = 0; k < 3; ++k) {
    in[k] = Read(wave, inst, k, kType, &planes[k]);
  }
  constexpr int kPart = (RegistersOf(kType) - 1) * kLanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    int d = in[1][kPart + lane] >> kHigh & P::kMax;
    int n = in[2][kPart + lane] >> kHigh & P::kMax;
    slow.at[lane] = (d < 1) | (d > 2 * P::kBias - 2) | (n <= P::kTiny) |
                    (n == P::kMax) | (n - d >= P::kFar) |
                    (n - d < 3 - P::kBias);
  }
  std::memcpy(out.at, in[0], RegistersOf(kType) * kLanes * 4);
  uint64_t written = WrittenLanes(wave, inst);
  uint64_t post = 0;
  for (uint64_t lanes = MaskOf(slow.at) & written; lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctzll(lanes);
    bool scale = false;
    SetLane(out.at, lane,
            F(GetLane<T>(in[0], lane), GetLane<T>(in[1], lane),
              GetLane<T>(in[2], lane), scale));
    post |= uint64_t{scale} << lane;
  }
  WriteMask(wave, inst.dst[1], post);
  Write(wave, inst, kType, &out);
}

// (a * b + c) * 2^64 or 2^-64, rounded once. A large addend means that the
// denominator was scaled up.
float ScaledFma(float a, float b, float c) {
  double product = static_cast<double>(a) * b;
  double addend = c;
  double sum = product + addend;
  double part = sum - product;
  double error = (product - (sum - part)) + (addend - part);
  uint64_t bits = BitsOf(sum);
  if (error != 0 && error == error && !(bits & 1)) {
    // To odd, so that the rounding to float is the only one.
    bits += (error > 0) == (sum > 0) ? 1 : -1;
    sum = DoubleOf(bits);
  }
  bool up = (BitsOf(c) >> 23 & 0xff) > 127;
  return static_cast<float>(sum * (up ? 0x1p64 : 0x1p-64));
}

double ScaledFma64(double a, double b, double c) {
  __float128 sum = static_cast<__float128>(a) * b + c;
  bool up = (BitsOf(c) >> 52 & 0x7ff) > 1023;
  return static_cast<double>(sum * (up ? 0x1p128 : 0x1p-128));
}

template <auto F, auto ScaledF, typename T>
void DivFmas(Wave& wave, const Inst& inst) {
  constexpr Type kType = TypeOf<T>();
  Plane planes[3], out;
  const uint32_t* in[3];
  for (int k = 0; k < 3; ++k) {
    in[k] = Read(wave, inst, k, kType, &planes[k]);
  }
  Apply<F>(inst, in, out.at, nullptr);
  for (uint64_t lanes = wave.vcc() & wave.exec(); lanes; lanes &= lanes - 1) {
    int lane = __builtin_ctzll(lanes);
    SetLane(out.at, lane,
            ScaledF(GetLane<T>(in[0], lane), GetLane<T>(in[1], lane),
                    GetLane<T>(in[2], lane)));
  }
  Write(wave, inst, kType, &out);
}

template <typename Bits>
inline Bits DivFixupBits(Bits quotient, Bits d, Bits n) {
  using P = Parts<Bits>;
  constexpr Bits kSign = Bits{1} << (8 * sizeof(Bits) - 1);
  constexpr Bits kInfinity = Bits{P::kMax} << P::kMantissa;
  constexpr Bits kQuiet = Bits{1} << (P::kMantissa - 1);
  Bits sign = (d ^ n) & kSign;
  Bits d_size = d & ~kSign, n_size = n & ~kSign, q_size = quotient & ~kSign;
  int d_field = static_cast<int>(d_size >> P::kMantissa);
  int n_field = static_cast<int>(n_size >> P::kMantissa);
  Bits result = sign | q_size;
  result = q_size >= kInfinity ? sign | kInfinity : result;
  result = n_field - d_field < P::kUnderflow ? sign : result;
  result = (d_size == kInfinity) | (n_size == 0) ? sign : result;
  result = (d_size == 0) | (n_size == kInfinity) ? sign | kInfinity : result;
  bool invalid = ((d_size == kInfinity) & (n_size == kInfinity)) |
                 ((d_size == 0) & (n_size == 0));
  result = invalid ? kSign | kInfinity | kQuiet : result;
  result = d_size > kInfinity ? d | kQuiet : result;
  result = n_size > kInfinity ? n | kQuiet : result;
  return result;
}

float DivFixup(float quotient, float d, float n) {
  return FloatOf(DivFixupBits(BitsOf(quotient), BitsOf(d), BitsOf(n)));
}
double DivFixup64(double quotient, double d, double n) {
  return DoubleOf(DivFixupBits(BitsOf(quotient), BitsOf(d), BitsOf(n)));
}

// f16 has no scaling, and no bounds on the exponents here.
float DivFixupHalf(float quotient, float d, float n) {
  float size = std::fabs(quotient);
  float result = std::signbit(d) != std::signbit(n) ? -size : size;
  float zero = std::signbit(d) != std::signbit(n) ? -0.0f : 0.0f;
  float infinity = std::copysign(INFINITY, zero);
  result = std::isinf(d) | (n == 0) ? zero : result;
  result = (d == 0) | std::isinf(n) ? infinity : result;
  result = (std::isinf(d) & std::isinf(n)) | ((d == 0) & (n == 0))
               ? FloatOf(0xffc00000)
               : result;
  result = d != d ? d : result;
  return n != n ? n : result;
}

// ---------------------------------------------------------------------------
// Reciprocals, roots, and the like. f32 flushes denormals on both sides
// whatever the mode says.

float Rcp(float a) { return Flushed(1.0f / Flushed(a)); }
float Sqrt(float a) { return std::sqrt(Flushed(a)); }
float Rsq(float a) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(Flushed(a))));
}
float Exp(float a) { return FlushedFloat(Exp2(Flushed(a))); }
float Log(float a) { return static_cast<float>(Log2(Flushed(a))); }
float Sin(float a) { return FlushedFloat(SinTurns(Flushed(a))); }
float Cos(float a) { return FlushedFloat(CosTurns(Flushed(a))); }

double Rcp64(double a) { return 1.0 / a; }
double Sqrt64(double a) { return std::sqrt(a); }
double Rsq64(double a) { return 1.0 / std::sqrt(a); }

float RcpHalf(float a) { return 1.0f / a; }
float SqrtHalf(float a) { return std::sqrt(a); }
float RsqHalf(float a) {
  return RoundToOdd(1.0 / std::sqrt(static_cast<double>(a)));
}
float ExpHalf(float a) { return RoundToOdd(Exp2(a)); }
float LogHalf(float a) { return RoundToOdd(Log2(a)); }
float SinHalf(float a) { return RoundToOdd(SinTurns(a)); }
float CosHalf(float a) { return RoundToOdd(CosTurns(a)); }

// Bits of 2 / pi after the point, the highest first.
constexpr uint32_t kTwoOverPi[] = {
    0xa2f9836e, 0x4e441529, 0xfc2757d1, 0xf534ddc0, 0xdb629599, 0x3c439041,
    0xfe5163ab, 0xdebbc561, 0xb7246e3a, 0x424dd2e0, 0x06492eea, 0x09d1921c,
    0xfe1deb1c, 0xb129a73e, 0xe88235f5, 0x2ebb4484, 0xe99c7026, 0xb45f7e41,
    0x3991d639, 0x835339f4, 0x9c845f8b, 0xbdf9283b, 0x1ff897ff, 0xde05980f,
    0xef2f118b, 0x5a0a6d1f, 0x6d367ecf, 0x27cb09b7, 0x4f463f66, 0x9e5fea2d,
    0x7527bac7, 0xebe5f17b, 0x3d0739f7, 0x8a5292ea, 0x6bfb5fb1, 0x1f8d5d08,
    0x56033046, 0xfc7b6bab,
};

// 53 of them, chosen by the exponent of `a`, as a number: a part of 2 / pi
// with which the argument of a sine is reduced.
double TrigPreop(double a, uint32_t segment) {
  int exponent = BitsOf(a) >> 52 & 0x7ff;
  int shift = (segment & 31) * 53;
  if (exponent > 1077) shift += exponent - 1077;
  uint64_t bits = 0;
  for (int k = 0; k < 53; ++k) {
    unsigned at = shift + k;
    unsigned bit = 0;
    if (at < 1201) bit = kTwoOverPi[at / 32] >> (31 - at % 32) & 1;
    bits = bits << 1 | bit;
  }
  int scale = -53 - shift;
  if (exponent >= 1968) scale += 128;
  return std::ldexp(static_cast<double>(bits), scale);
}

// ---------------------------------------------------------------------------
// Conversions. To integers: cut, saturated, NaN to 0.

// An integral double in [0, 2^52) or, as two's complement, [-2^51, 2^51).
uint64_t IntegerBits(double a) { return BitsOf(a + 0x1.8p52); }

template <typename T>
T Cut(double a, double low, double high) {
  a = std::trunc(a);
  a = a > low ? a : (a == a ? low : 0.0);
  a = a < high ? a : high;
  return static_cast<T>(IntegerBits(a));
}

int32_t ToI32(float a) { return Cut<int32_t>(a, -0x1p31, 0x1p31 - 1); }
uint32_t ToU32(float a) { return Cut<uint32_t>(a, 0, 0x1p32 - 1); }
int32_t ToI32From64(double a) { return Cut<int32_t>(a, -0x1p31, 0x1p31 - 1); }
uint32_t ToU32From64(double a) { return Cut<uint32_t>(a, 0, 0x1p32 - 1); }
int16_t ToI16(float a) { return Cut<int16_t>(a, -0x1p15, 0x1p15 - 1); }
uint16_t ToU16(float a) { return Cut<uint16_t>(a, 0, 0x1p16 - 1); }
// Half up; half down.
int32_t RoundUp(float a) {
  return ToI32From64(std::floor(static_cast<double>(a) + 0.5));
}
int32_t RoundDown(float a) { return ToI32(std::floor(a)); }

double U32To64(uint32_t a) {
  return static_cast<double>(static_cast<int32_t>(a ^ 0x80000000)) + 0x1p31;
}
double I32To64(int32_t a) { return a; }
float FromI32(int32_t a) { return static_cast<float>(a); }
float FromU32(uint32_t a) { return static_cast<float>(U32To64(a)); }
float FromI16(int16_t a) { return a; }
float FromU16(uint16_t a) { return a; }
float To32(double a) { return static_cast<float>(a); }
double To64(float a) { return a; }
template <int byte>
float FromByte(uint32_t a) {
  return static_cast<float>(static_cast<int32_t>(a >> (8 * byte) & 0xff));
}
// Sixteenths, of a signed number of 4 bits.
float FromI4(uint32_t a) {
  return static_cast<float>(static_cast<int32_t>(a << 28) >> 28) / 16;
}

float Same(float a) { return a; }

float FromBfloat(Bfloat a) { return BfloatToFloat(a.bits); }

// ---------------------------------------------------------------------------

void AddF32Ops(Ops* ops) {
  using F = float;
  Ops list = {
      VectorOp<Add<F>>("v_add_f32"),
      VectorOp<Sub<F>>("v_sub_f32"),
      VectorOp<SubRev<F>>("v_subrev_f32"),
      VectorOp<Mul<F>>("v_mul_f32"),
      VectorOp<MulLegacy>("v_mul_legacy_f32"),
      VectorOp<Fma32>("v_fma_f32"),
      VectorOp<Fma32>("v_fmac_f32", kReadsDst),
      // The text has the constant where the function has its operand.
      VectorOp<Fma32>("v_fmaak_f32", 0, kOnGfx942 | kOnGfx950),
      VectorOp<Fma32>("v_fmamk_f32", 0, kOnGfx942 | kOnGfx950),
      MadOp<Mad>("v_mad_f32"),
      MadOp<Mad>("v_mac_f32", kReadsDst),
      MadOp<Mad>("v_madak_f32"),
      MadOp<Mad>("v_madmk_f32"),
      MadOp<MadLegacy>("v_mad_legacy_f32"),
      MinMaxOp<Minimum<false, F>, Minimum<true, F>>("v_min_f32"),
      MinMaxOp<Maximum<false, F>, Maximum<true, F>>("v_max_f32"),
      MinMaxOp<Minimum3<false, F>, Minimum3<true, F>>("v_min3_f32"),
      MinMaxOp<Maximum3<false, F>, Maximum3<true, F>>("v_max3_f32"),
      MinMaxOp<Median3<false, F>, Median3<true, F>>("v_med3_f32"),
      VectorOp<MinimumOrNan3<F>>("v_minimum3_f32", 0, kOnGfx950),
      VectorOp<MaximumOrNan3<F>>("v_maximum3_f32", 0, kOnGfx950),
      VectorOp<Floor<F>>("v_floor_f32"),
      VectorOp<Ceil<F>>("v_ceil_f32"),
      VectorOp<Trunc<F>>("v_trunc_f32"),
      VectorOp<RndNe>("v_rndne_f32"),
      VectorOp<Fract>("v_fract_f32"),
      VectorOp<Ldexp>("v_ldexp_f32"),
      VectorOp<FrexpExp>("v_frexp_exp_i32_f32"),
      VectorOp<FrexpMant>("v_frexp_mant_f32"),
      VectorOp<DivFixup>("v_div_fixup_f32"),
      TransOp<Rcp>("v_rcp_f32"),
      TransOp<Rcp>("v_rcp_iflag_f32"),
      TransOp<Sqrt>("v_sqrt_f32"),
      TransOp<Rsq>("v_rsq_f32"),
      TransOp<Exp>("v_exp_f32"),
      TransOp<Log>("v_log_f32"),
      TransOp<Sin>("v_sin_f32"),
      TransOp<Cos>("v_cos_f32"),
  };
  Op fmas = VectorOp<Fma32>("v_div_fmas_f32", kReadsVcc);
  fmas.src[2] = Type::kF32;
  fmas.execute = DivFmas<Fma32, ScaledFma, float>;
  list.push_back(fmas);
  Op scale = VectorOp<DivScale>("v_div_scale_f32");
  scale.execute = DivScaleVector<DivScale, float, uint32_t>;
  list.push_back(scale);
  ops->insert(ops->end(), list.begin(), list.end());
}

void AddF64Ops(Ops* ops) {
  using D = double;
  Ops list = {
      DoubleOp<Add<D>>("v_add_f64"),
      DoubleOp<Mul<D>>("v_mul_f64"),
      DoubleOp<Fma64>("v_fma_f64"),
      DoubleOp<Fma64>("v_fmac_f64", kReadsDst),
      MinMaxOp<Minimum<false, D>, Minimum<true, D>>("v_min_f64"),
      MinMaxOp<Maximum<false, D>, Maximum<true, D>>("v_max_f64"),
      DoubleOp<Floor<D>>("v_floor_f64"),
      DoubleOp<Ceil<D>>("v_ceil_f64"),
      DoubleOp<Trunc<D>>("v_trunc_f64"),
      DoubleOp<RndNe64>("v_rndne_f64"),
      DoubleOp<Fract64>("v_fract_f64"),
      DoubleOp<Ldexp64>("v_ldexp_f64"),
      DoubleOp<FrexpExp64>("v_frexp_exp_i32_f64"),
      DoubleOp<FrexpMant64>("v_frexp_mant_f64"),
      DoubleOp<DivFixup64>("v_div_fixup_f64"),
      DoubleOp<TrigPreop>("v_trig_preop_f64"),
      DoubleOp<Rcp64>("v_rcp_f64", 0, InstClass::kTrans),
      DoubleOp<Sqrt64>("v_sqrt_f64", 0, InstClass::kTrans),
      DoubleOp<Rsq64>("v_rsq_f64", 0, InstClass::kTrans),
  };
  Op fmas = VectorOp<Fma64>("v_div_fmas_f64", kReadsVcc);
  fmas.src[2] = Type::kF64;
  fmas.execute = InDoubleMode<DivFmas<Fma64, ScaledFma64, double>>;
  list.push_back(fmas);
  Op scale = VectorOp<DivScale64>("v_div_scale_f64");
  scale.execute = DivScaleVector<DivScale64, double, uint64_t>;
  list.push_back(scale);
  ops->insert(ops->end(), list.begin(), list.end());
}

void AddF16Ops(Ops* ops) {
  using F = float;
  // VOP3's own: another half of the result stays.
  constexpr uint32_t kOwn = kOpSel | kKeepsHigh;
  Ops list = {
      HalfOp<Add<F>>("v_add_f16"),
      HalfOp<Sub<F>>("v_sub_f16"),
      HalfOp<SubRev<F>>("v_subrev_f16"),
      HalfOp<Mul<F>>("v_mul_f16"),
      HalfOp<FmaHalf>("v_fma_f16", kOwn),
      HalfOp<FmaHalf>("v_fma_legacy_f16", kOpSel),
      HalfOp<MadHalf>("v_mad_f16", kOwn),
      HalfOp<MadHalf>("v_mad_legacy_f16", kOpSel),
      HalfOp<MadHalf>("v_mac_f16", kReadsDst | kOpSel),
      HalfOp<MadHalf>("v_madak_f16"),
      HalfOp<MadHalf>("v_madmk_f16"),
      HalfMinMaxOp<Minimum<false, F>>("v_min_f16"),
      HalfMinMaxOp<Maximum<false, F>>("v_max_f16"),
      HalfMinMaxOp<Minimum3<false, F>>("v_min3_f16", kOwn),
      HalfMinMaxOp<Maximum3<false, F>>("v_max3_f16", kOwn),
      HalfMinMaxOp<Median3<false, F>>("v_med3_f16", kOwn),
      HalfOp<Floor<F>>("v_floor_f16"),
      HalfOp<Ceil<F>>("v_ceil_f16"),
      HalfOp<Trunc<F>>("v_trunc_f16"),
      HalfOp<RndNe>("v_rndne_f16"),
      HalfOp<FractHalf>("v_fract_f16"),
      HalfOp<LdexpHalf>("v_ldexp_f16"),
      HalfOp<FrexpExpHalf>("v_frexp_exp_i16_f16"),
      HalfOp<FrexpMant>("v_frexp_mant_f16"),
      HalfOp<DivFixupHalf>("v_div_fixup_f16", kOwn),
      HalfOp<DivFixupHalf>("v_div_fixup_legacy_f16", kOpSel),
      HalfOp<RcpHalf>("v_rcp_f16", 0, kOnAll, InstClass::kTrans),
      HalfOp<SqrtHalf>("v_sqrt_f16", 0, kOnAll, InstClass::kTrans),
      HalfOp<RsqHalf>("v_rsq_f16", 0, kOnAll, InstClass::kTrans),
      HalfOp<ExpHalf>("v_exp_f16", 0, kOnAll, InstClass::kTrans),
      HalfOp<LogHalf>("v_log_f16", 0, kOnAll, InstClass::kTrans),
      HalfOp<SinHalf>("v_sin_f16", 0, kOnAll, InstClass::kTrans),
      HalfOp<CosHalf>("v_cos_f16", 0, kOnAll, InstClass::kTrans),
      HalfOp<FromI16>("v_cvt_f16_i16"),
      HalfOp<FromU16>("v_cvt_f16_u16"),
      HalfOp<ToI16>("v_cvt_i16_f16"),
      HalfOp<ToU16>("v_cvt_u16_f16"),
  };
  ops->insert(ops->end(), list.begin(), list.end());
}

// v_cvt_f32_f16: f16 in, f32 out, denormals as the mode of each says.
void CvtF32F16(Wave& wave, const Inst& inst) {
  Plane plane, out;
  HalvesToFloats(wave.mode, Read(wave, inst, 0, Type::kF16, &plane), out.at);
  Write(wave, inst, Type::kF32, &out);
}

void CvtF16F32(Wave& wave, const Inst& inst) {
  Plane plane, out;
  const uint32_t* in = Read(wave, inst, 0, Type::kF32, &plane);
  {
    ScopedMxcsr scope(wave, HalfMxcsr(wave.mode));
    FloatsToHalves(wave.mode, in, out.at);
  }
  Write(wave, inst, Type::kF16, &out);
}

void AddConversions(Ops* ops) {
  Ops list = {
      VectorOp<ToI32>("v_cvt_i32_f32"),
      VectorOp<ToU32>("v_cvt_u32_f32"),
      VectorOp<RoundUp>("v_cvt_rpi_i32_f32"),
      VectorOp<RoundDown>("v_cvt_flr_i32_f32"),
      VectorOp<ToI32From64>("v_cvt_i32_f64"),
      VectorOp<ToU32From64>("v_cvt_u32_f64"),
      VectorOp<FromI32>("v_cvt_f32_i32"),
      VectorOp<FromU32>("v_cvt_f32_u32"),
      VectorOp<I32To64>("v_cvt_f64_i32"),
      VectorOp<U32To64>("v_cvt_f64_u32"),
      VectorOp<To32>("v_cvt_f32_f64"),
      VectorOp<To64>("v_cvt_f64_f32"),
      VectorOp<FromByte<0>>("v_cvt_f32_ubyte0"),
      VectorOp<FromByte<1>>("v_cvt_f32_ubyte1"),
      VectorOp<FromByte<2>>("v_cvt_f32_ubyte2"),
      VectorOp<FromByte<3>>("v_cvt_f32_ubyte3"),
      VectorOp<FromI4>("v_cvt_off_f32_i4"),
      VectorOp<FromBfloat>("v_cvt_f32_bf16", 0, kOnGfx950),
  };
  Op widen = VectorOp<Same>("v_cvt_f32_f16", kOpSel);
  widen.src[0] = Type::kF16;
  widen.execute = CvtF32F16;
  list.push_back(widen);
  Op narrow = VectorOp<Same>("v_cvt_f16_f32");
  narrow.dst[0] = Type::kF16;
  narrow.execute = CvtF16F32;
  list.push_back(narrow);
  ops->insert(ops->end(), list.begin(), list.end());
}

}  // namespace

Ops FloatOps() {
  Ops ops;
  AddF32Ops(&ops);
  AddF64Ops(&ops);
  AddF16Ops(&ops);
  AddConversions(&ops);
  return ops;
}

}  // namespace amdgpu_sim
