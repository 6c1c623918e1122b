// SPDX-License-Identifier: Apache-2.0

// 2^x, log2 and sine in double, without branches, for vector loops.
//
// Arguments are floats; relative errors stay below 2^-45 (absolute ones for
// sines near their zeros are relative too, as turns are reduced exactly). So a
// result rounded to float is the correctly rounded one in all but one in a
// million cases, and then it is the other neighbour.
#ifndef AMDGPU_SIM_ISA_TRANSCENDENTAL_H_
#define AMDGPU_SIM_ISA_TRANSCENDENTAL_H_

#include <cstdint>

#include "tests/amdgpu_sim/isa/float.h"

namespace amdgpu_sim {

// Denormals become zeros, whatever MXCSR says.
inline float Flushed(float a) {
  uint32_t bits = BitsOf(a);
  return FloatOf(bits & 0x7f800000 ? bits : bits & 0x80000000);
}

// To float, a denormal to 0.
inline float FlushedFloat(double a) { return Flushed(static_cast<float>(a)); }

// c[0] + c[1] x + c[2] x^2 + ...
template <int n>
inline double Polynomial(const double (&c)[n], double x) {
  double sum = c[n - 1];
#pragma GCC unroll 16
  for (int k = n - 2; k >= 0; --k) sum = __builtin_fma(sum, x, c[k]);
  return sum;
}

inline double Exp2(float a) {
  // ln(2)^k / k!
  constexpr double kTerms[] = {
      1,
      0x1.62e42fefa39efp-1,
      0x1.ebfbdff82c58fp-3,
      0x1.c6b08d704a0c0p-5,
      0x1.3b2ab6fba4e77p-7,
      0x1.5d87fe78a6731p-10,
      0x1.430912f86c787p-13,
      0x1.ffcbfc588b0c7p-17,
      0x1.62c0223a5c824p-20,
      0x1.b5253d395e7c4p-24,
      0x1.e4cf5158b8ecap-28,
      0x1.e8cac7351bb25p-32,
  };
  double x = a;
  x = x < -300 ? -300 : x;
  x = x > 300 ? 300 : x;
  // Adding it leaves the nearest integer in the low bits.
  constexpr double kInteger = 0x1.8p52;
  double shifted = x + kInteger;
  double fraction = x - (shifted - kInteger);
  double power = Polynomial(kTerms, fraction);
  power = DoubleOf(BitsOf(power) + (BitsOf(shifted) << 52));
  return a != a ? static_cast<double>(a) : power;
}

inline double Log2(float a) {
  // 2 / ln(2) / (2k + 1), for powers of s^2.
  constexpr double kTerms[] = {
      0x1.71547652b82fep+1, 0x1.ec709dc3a03fdp-1, 0x1.2776c50ef9bfep-1,
      0x1.a61762a7aded9p-2, 0x1.484b13d7c02a9p-2, 0x1.0c9a84994022dp-2,
      0x1.c68f568d31760p-3, 0x1.89f3b1694cffep-3, 0x1.5b9ac9b743f0dp-3,
  };
  constexpr uint64_t kRootHalf = 0x3fe6a09e667f3bcd;
  double x = a;
  uint64_t bits = BitsOf(x);
  // The exponent for which the mantissa is in [sqrt(1/2), sqrt(2)), offset to
  // be positive.
  uint64_t exponent = (bits - kRootHalf + (uint64_t{1024} << 52)) >> 52;
  double mantissa = DoubleOf(bits - ((exponent - 1024) << 52));
  double s = (mantissa - 1) / (mantissa + 1);
  double log = s * Polynomial(kTerms, s * s);
  log += DoubleOf(exponent | 0x4330000000000000) - (0x1p52 + 1024);
  log = x == 0 ? -__builtin_inf() : log;
  log = x < 0 ? __builtin_nan("") : log;
  return x == __builtin_inf() || x != x ? x : log;
}

// sin(2 pi t) for |t| <= 1/4.
inline double SinQuarter(double t) {
  // (-1)^k (2 pi)^(2k + 1) / (2k + 1)!
  constexpr double kTerms[] = {
      0x1.921fb54442d18p+2,  -0x1.4abbce625be53p+5, 0x1.466bc6775aae2p+6,
      -0x1.32d2cce62bd86p+6, 0x1.50783487ee782p+5,  -0x1.e3074fde8871fp+3,
      0x1.e8f434d018d63p+1,  -0x1.6fadb9f155744p-1, 0x1.aaec32af93359p-4,
      -0x1.8a404211f9547p-7, 0x1.2877020d52cf0p-10,
  };
  return t * Polynomial(kTerms, t * t);
}

// `a` less its nearest integer.
inline double Turn(double a) {
  constexpr double kInteger = 0x1.8p52;
  return a - ((a + kInteger) - kInteger);
}

// Finite and beyond 256 turns, where the hardware gives up.
inline bool IsFar(float a) {
  float size = FloatOf(BitsOf(a) & 0x7fffffff);
  return (size > 256) & (size < __builtin_inff());
}

// Of an angle in turns.
inline double SinTurns(float a) {
  double t = Turn(a);
  double size = __builtin_fabs(t);
  double other = 0.5 - size;
  double sine = SinQuarter(size < other ? size : other);
  return IsFar(a) ? 0.0 : __builtin_copysign(sine, t);
}

inline double CosTurns(float a) {
  double cosine = SinQuarter(0.25 - __builtin_fabs(Turn(a)));
  return IsFar(a) ? 1.0 : cosine;
}

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_TRANSCENDENTAL_H_
