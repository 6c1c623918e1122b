// SPDX-License-Identifier: Apache-2.0

// Numbers: formats, rounding modes, and what the ISA's minimum, maximum and
// division mean. Pure functions on values; no instruction is named here.
//
// Operations on float run on the host's vector unit under an MXCSR that
// equals the wave's mode. They see denormals as that mode says. Where the ISA
// does not flush, functions work on bits instead.
#ifndef AMDGPU_SIM_ISA_FLOAT_H_
#define AMDGPU_SIM_ISA_FLOAT_H_

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "tests/amdgpu_sim/gpu/wave.h"

namespace amdgpu_sim {

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline uint64_t BitsOf(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  return bits;
}
inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline double DoubleOf(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

// ---------------------------------------------------------------------------
// The floating-point environment.

// Rounding as MODE encodes it.
enum Rounding : int { kToEven = 0, kUp = 1, kDown = 2, kToZero = 3 };

// The MXCSR for a rounding and a denormal mode of MODE, exceptions masked.
constexpr uint32_t MxcsrFor(int rounding, int denormals) {
  constexpr uint32_t kRounding[] = {0, 2 << 13, 1 << 13, 3 << 13};
  return 0x1f80 | kRounding[rounding] | (denormals & 1 ? 0 : 0x0040) |
         (denormals & 2 ? 0 : 0x8000);
}

// The statement is a barrier: no load, store or operation on what they touch
// moves over it.
inline void SetMxcsr(uint32_t mxcsr) {
  asm volatile("ldmxcsr %0" : : "m"(mxcsr) : "memory");
}

inline uint32_t Mxcsr32(const Mode& mode) {
  return MxcsrFor(mode.round32(), mode.denorm32());
}
inline uint32_t Mxcsr16And64(const Mode& mode) {
  return MxcsrFor(mode.round16_64(), mode.denorm16_64());
}

// Makes the host round as the wave's f32 operations do.
inline void ApplyMode(const Wave& wave) { SetMxcsr(Mxcsr32(wave.mode)); }

// Another environment for a while; the wave's f32 mode comes back after it.
class ScopedMxcsr {
 public:
  ScopedMxcsr(const Wave& wave, uint32_t mxcsr)
      : back_(Mxcsr32(wave.mode)), changed_(mxcsr != back_) {
    if (changed_) SetMxcsr(mxcsr);
  }
  ~ScopedMxcsr() {
    if (changed_) SetMxcsr(back_);
  }
  ScopedMxcsr(const ScopedMxcsr&) = delete;
  ScopedMxcsr& operator=(const ScopedMxcsr&) = delete;

 private:
  uint32_t back_;
  bool changed_;
};

// ---------------------------------------------------------------------------
// Half precision. The conversions are F16C's: they keep denormals whatever
// MXCSR says and make NaNs quiet.

inline float HalfToFloat(uint16_t bits) { return _cvtsh_ss(bits); }

// Rounds once, to nearest even, or as told.
template <int rounding = kToEven>
inline uint16_t FloatToHalf(float value) {
  constexpr int kImmediate[] = {0, 2, 1, 3};
  return _cvtss_sh(value, kImmediate[rounding] | 8);
}

// Rounds as MXCSR says.
inline uint16_t FloatToHalfByMode(float value) { return _cvtss_sh(value, 4); }

// `value` as a float whose last bit is odd if anything was lost: rounding it
// to 22 bits or fewer gives what rounding `value` would have given. Exponents
// outside of a float's become 0 or infinity or a float's ends.
inline float RoundToOdd(double value) {
  uint64_t bits = BitsOf(value);
  uint64_t lost = bits & 0x1fffffff;
  bits = (bits & ~uint64_t{0x1fffffff}) | (lost ? 0x20000000 : 0);
  return static_cast<float>(DoubleOf(bits));
}

inline uint16_t DoubleToHalf(double value) {
  return FloatToHalf(RoundToOdd(value));
}

// ---------------------------------------------------------------------------
// bfloat16.

inline float BfloatToFloat(uint16_t bits) {
  return FloatOf(uint32_t{bits} << 16);
}

// To nearest even; a NaN stays one and becomes quiet.
inline uint16_t FloatToBfloat(float value) {
  uint32_t bits = BitsOf(value);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  uint32_t nan = bits >> 16 | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan
                                                                : rounded);
}

// ---------------------------------------------------------------------------
// Formats of 8, 6 and 4 bits.

struct MiniFormat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  int max_code;        // The largest finite magnitude.
  int infinity;        // Its code, or -1.
  int nan;             // The code that a NaN becomes, or -1.
  bool unsigned_zero;  // fnuz: 0x80 is the NaN, and there is no -0.

  constexpr int bits() const { return 1 + exponent_bits + mantissa_bits; }
  constexpr int sign() const { return 1 << (bits() - 1); }
};

constexpr MiniFormat kFp8Fnuz = {4, 3, 8, 0x7f, -1, 0x80, true};
constexpr MiniFormat kBf8Fnuz = {5, 2, 16, 0x7f, -1, 0x80, true};
constexpr MiniFormat kFp8 = {4, 3, 7, 0x7e, -1, 0x7f, false};
constexpr MiniFormat kBf8 = {5, 2, 15, 0x7b, 0x7c, 0x7e, false};
constexpr MiniFormat kFp6 = {2, 3, 1, 0x1f, -1, -1, false};
constexpr MiniFormat kBf6 = {3, 2, 3, 0x1f, -1, -1, false};
constexpr MiniFormat kFp4 = {2, 1, 1, 0x7, -1, -1, false};

namespace internal {

constexpr float PowerOfTwo(int exponent) {
  float value = 1;
  for (; exponent > 0; --exponent) value *= 2;
  for (; exponent < 0; ++exponent) value /= 2;
  return value;
}

}  // namespace internal

// Exact: every value of these formats is a normal float.
inline float DecodeMini(const MiniFormat& format, uint32_t code) {
  uint32_t magnitude = code & (format.sign() - 1);
  bool negative = code & format.sign();
  if (format.unsigned_zero && negative && magnitude == 0) {
    return FloatOf(0x7fc00000);
  }
  float value;
  if (static_cast<int>(magnitude) == format.infinity) {
    value = __builtin_inff();
  } else if (static_cast<int>(magnitude) > format.max_code) {
    value = FloatOf(0x7fc00000);
  } else {
    int exponent = magnitude >> format.mantissa_bits;
    int mantissa = magnitude & ((1 << format.mantissa_bits) - 1);
    if (exponent == 0) {
      exponent = 1;
    } else {
      mantissa += 1 << format.mantissa_bits;
    }
    value = static_cast<float>(mantissa) *
            internal::PowerOfTwo(exponent - format.bias - format.mantissa_bits);
  }
  return negative ? -value : value;
}

// The values of all codes; a code's higher bits must be 0.
template <const MiniFormat& format>
const std::array<float, 256>& DecodeTable() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values;
    for (int code = 0; code < 256; ++code) {
      values[code] = DecodeMini(format, code & (2 * format.sign() - 1));
    }
    return values;
  }();
  return table;
}

// How EncodeMini rounds: to nearest even, or by adding random bits below the
// last kept bit and cutting. 20 bits (fp8) or 21 (bf8) of `random` are used,
// the highest ones, however small the result.
struct Stochastic {
  bool on = false;
  uint32_t random = 0;
};

// `value` (as its bits, so that no mode flushes it) times 2^-scale, rounded.
// Beyond the largest number: that number if `saturate` or if the format has
// nothing else, or else infinity or NaN. Infinity itself saturates likewise
// only where the format has neither.
inline uint32_t EncodeMini(const MiniFormat& format, uint32_t bits,
                           bool saturate, int scale = 0,
                           Stochastic stochastic = {}) {
  uint32_t sign = bits >> 31 ? format.sign() : 0;
  uint32_t mantissa = bits & 0x7fffff;
  int exponent = bits >> 23 & 0xff;
  if (exponent == 0xff) {
    if (mantissa || format.infinity < 0) {
      if (format.nan < 0) return sign | format.max_code;
      return format.unsigned_zero ? format.nan : (sign | format.nan);
    }
    return sign | format.infinity;
  }
  if (exponent == 0) {
    exponent = 1;
  } else {
    mantissa |= 0x800000;
  }
  if (mantissa == 0) return format.unsigned_zero ? 0 : sign;
  // Denormals of a float times 2^scale can be anything.
  int shift_up = __builtin_clz(mantissa) - 8;
  mantissa <<= shift_up;
  exponent -= shift_up + scale;

  // The value is mantissa * 2^(exponent - 150). `field` is the exponent that
  // the result has before it is rounded.
  int field = exponent - 127 + format.bias;
  int drop = 23 - format.mantissa_bits;
  if (field < 1) {
    drop += 1 - field;
    field = 1;
  }
  uint64_t kept, wide = uint64_t{mantissa};
  if (stochastic.on) {
    // The hardware first shifts a denormal result into place, then adds.
    int cut = 23 - format.mantissa_bits;
    int shift = drop - cut;
    wide = shift < 32 ? wide >> shift : 0;
    kept = (wide + (stochastic.random >> (32 - cut))) >> cut;
  } else if (drop > 32) {
    kept = 0;
  } else {
    uint64_t half = uint64_t{1} << (drop - 1);
    kept = (wide + half - 1 + (wide >> drop & 1)) >> drop;
  }
  // A carry out of the mantissa steps into the exponent.
  int64_t code = static_cast<int64_t>(kept) +
                 (static_cast<int64_t>(field - 1) << format.mantissa_bits);
  if (code > format.max_code) {
    if (saturate || format.nan < 0) {
      code = format.max_code;
    } else if (format.infinity >= 0) {
      code = format.infinity;
    } else {
      return format.unsigned_zero ? format.nan : (sign | format.nan);
    }
  }
  if (code == 0 && format.unsigned_zero) return 0;
  return sign | static_cast<uint32_t>(code);
}

// A scale of MX formats: 2^(code - 127), or NaN.
inline float DecodeE8m0(uint32_t code) {
  code &= 0xff;
  if (code == 0xff) return FloatOf(0x7fc00000);
  return FloatOf(code == 0 ? 0x00400000 : code << 23);
}

// ---------------------------------------------------------------------------
// Minimum and maximum.

// 1, which the compiler does not know: multiplying by it flushes a denormal
// as MXCSR says and makes a NaN quiet.
extern float one_f32;
extern double one_f64;

inline bool IsSignaling(float value) {
  uint32_t magnitude = BitsOf(value) & 0x7fffffff;
  return magnitude - 0x7f800001 < 0x3fffff;
}
inline bool IsSignaling(double value) {
  uint64_t magnitude = BitsOf(value) & 0x7fffffffffffffff;
  return magnitude - 0x7ff0000000000001 < 0x7ffffffffffff;
}

inline float Canonical(float value) { return value * one_f32; }
inline double Canonical(double value) { return value * one_f64; }

inline float OrOf(float a, float b) { return FloatOf(BitsOf(a) | BitsOf(b)); }
inline float AndOf(float a, float b) { return FloatOf(BitsOf(a) & BitsOf(b)); }
inline double OrOf(double a, double b) {
  return DoubleOf(BitsOf(a) | BitsOf(b));
}
inline double AndOf(double a, double b) {
  return DoubleOf(BitsOf(a) & BitsOf(b));
}

// v_min and v_max: the number beats the NaN, -0 is less than +0. In IEEE mode
// a signaling NaN wins.
template <bool ieee, typename T>
inline T Minimum(T a, T b) {
  T result = a < b ? a : b;
  result = b != b ? a : result;
  result = a == b ? OrOf(a, b) : result;
  if (ieee) {
    result = IsSignaling(b) ? b : result;
    result = IsSignaling(a) ? a : result;
  }
  return Canonical(result);
}

template <bool ieee, typename T>
inline T Maximum(T a, T b) {
  T result = a > b ? a : b;
  result = b != b ? a : result;
  result = a == b ? AndOf(a, b) : result;
  if (ieee) {
    result = IsSignaling(b) ? b : result;
    result = IsSignaling(a) ? a : result;
  }
  return Canonical(result);
}

template <bool ieee, typename T>
inline T Minimum3(T a, T b, T c) {
  return Minimum<ieee>(Minimum<ieee>(a, b), c);
}
template <bool ieee, typename T>
inline T Maximum3(T a, T b, T c) {
  return Maximum<ieee>(Maximum<ieee>(a, b), c);
}

template <bool ieee, typename T>
inline T Median3(T a, T b, T c) {
  T max = Maximum3<ieee>(a, b, c);
  T result = Maximum<ieee>(a, b);
  result = max == b ? Maximum<ieee>(a, c) : result;
  result = max == a ? Maximum<ieee>(b, c) : result;
  bool nan = (a != a) | (b != b) | (c != c);
  return nan ? Minimum3<ieee>(a, b, c) : result;
}

// IEEE 754-2019's minimum and maximum: a NaN wins.
template <typename T>
inline T MinimumOrNan(T a, T b) {
  T result = a < b ? a : b;
  result = a == b ? OrOf(a, b) : result;
  result = b != b ? b : result;
  result = a != a ? a : result;
  return Canonical(result);
}
template <typename T>
inline T MaximumOrNan(T a, T b) {
  T result = a > b ? a : b;
  result = a == b ? AndOf(a, b) : result;
  result = b != b ? b : result;
  result = a != a ? a : result;
  return Canonical(result);
}
template <typename T>
inline T MinimumOrNan3(T a, T b, T c) {
  return MinimumOrNan(MinimumOrNan(a, b), c);
}
template <typename T>
inline T MaximumOrNan3(T a, T b, T c) {
  return MaximumOrNan(MaximumOrNan(a, b), c);
}

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_FLOAT_H_
