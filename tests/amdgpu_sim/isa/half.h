// SPDX-License-Identifier: Apache-2.0

// f16 instructions from functions on floats.
//
// A function takes and returns `float` where the instruction has an f16. It
// runs under the f16 rounding mode with a float's denormals kept, and its
// result is rounded to f16 once more in the same mode: that is exact for a
// sum, difference, product, quotient or root of two f16, because a float has
// twice an f16's bits and two more. Others return RoundToOdd of a double.
#ifndef AMDGPU_SIM_ISA_HALF_H_
#define AMDGPU_SIM_ISA_HALF_H_

#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "tests/amdgpu_sim/isa/float.h"
#include "tests/amdgpu_sim/isa/valu.h"

namespace amdgpu_sim {

// While an f16 function runs.
inline uint32_t HalfMxcsr(const Mode& mode) {
  return MxcsrFor(mode.round16_64(), 3);
}

inline __m128i FlushHalves(__m128i halves) {
  const __m128i zero = _mm_setzero_si128();
  __m128i exponents = _mm_and_si128(halves, _mm_set1_epi16(0x7c00));
  __m128i denormal = _mm_cmpeq_epi16(exponents, zero);
  __m128i sign = _mm_and_si128(halves, _mm_set1_epi16(-0x8000));
  return _mm_blendv_epi8(halves, sign, denormal);
}

// The low halves of a plane as floats, and back.
inline void HalvesToFloats(const Mode& mode, const uint32_t* in,
                           uint32_t* out) {
  const bool flush = !(mode.denorm16_64() & 1);
  const __m128i low = _mm_set1_epi32(0xffff);
  for (int lane = 0; lane < kLanes; lane += 8) {
    const __m128i* from = reinterpret_cast<const __m128i*>(in + lane);
    __m128i halves =
        _mm_packus_epi32(_mm_and_si128(_mm_loadu_si128(from), low),
                         _mm_and_si128(_mm_loadu_si128(from + 1), low));
    if (flush) halves = FlushHalves(halves);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + lane),
                        _mm256_castps_si256(_mm256_cvtph_ps(halves)));
  }
}

// Rounds as MXCSR says; call it under HalfMxcsr.
inline void FloatsToHalves(const Mode& mode, const uint32_t* in,
                           uint32_t* out) {
  const bool flush = !(mode.denorm16_64() & 2);
  const bool saturate = mode.fp16_overflow();
  const __m128i low = _mm_set1_epi16(0x7fff);
  for (int lane = 0; lane < kLanes; lane += 8) {
    __m256 floats = _mm256_loadu_ps(reinterpret_cast<const float*>(in + lane));
    __m128i halves = _mm256_cvtps_ph(floats, _MM_FROUND_CUR_DIRECTION);
    if (flush) halves = FlushHalves(halves);
    if (saturate) {
      // Infinite now and not before.
      __m128i infinite =
          _mm_cmpeq_epi16(_mm_and_si128(halves, low), _mm_set1_epi16(0x7c00));
      __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), floats);
      __m256i finite = _mm256_castps_si256(
          _mm256_cmp_ps(size, _mm256_set1_ps(__builtin_inff()), _CMP_LT_OQ));
      __m128i mask = _mm_packs_epi32(_mm256_castsi256_si128(finite),
                                     _mm256_extracti128_si256(finite, 1));
      __m128i most = _mm_sub_epi16(halves, _mm_set1_epi16(1));
      halves = _mm_blendv_epi8(halves, most, _mm_and_si128(infinite, mask));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + lane),
                        _mm256_cvtepu16_epi32(halves));
  }
}

template <typename T>
constexpr Type HalfTypeOf() {
  return std::is_same_v<T, float> ? Type::kF16 : TypeOf<T>();
}

// F on planes whose f16 are in the low halves.
template <auto F>
void ApplyHalf(const Wave& wave, const Inst& inst, const uint32_t* const* in,
               uint32_t* out) {
  using S = Signature<decltype(F)>;
  ScopedMxcsr scope(wave, HalfMxcsr(wave.mode));
  Plane planes[S::kSources];
  const uint32_t* values[S::kSources];
  for (int k = 0; k < S::kSources; ++k) {
    values[k] = in[k];
    if (S::SourceType(k) == Type::kF32) {
      HalvesToFloats(wave.mode, in[k], planes[k].at);
      values[k] = planes[k].at;
    }
  }
  Apply<F>(inst, values, out, nullptr);
  if constexpr (std::is_same_v<typename S::Result, float>) {
    FloatsToHalves(wave.mode, out, out);
  }
}

// The product is exact in double. The sum may not be, but then one addend is
// too small to decide how the other rounds.
inline float FmaHalf(float a, float b, float c) {
  return RoundToOdd(static_cast<double>(a) * b + c);
}

// In IEEE mode a signaling NaN among the sources of a minimum or maximum is
// the result, made quiet. A float's conversion has made it quiet already.
inline void SignalingHalves(const uint32_t* in, uint32_t* out) {
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t bits = in[lane] & 0xffff;
    bool signaling = (bits & 0x7fff) - 0x7c01 < 0x1ff;
    out[lane] = signaling ? bits | 0x200 : out[lane];
  }
}

template <auto F, bool min_max = false>
void HalfVector(Wave& wave, const Inst& inst) {
  using S = Signature<decltype(F)>;
  Plane planes[S::kSources], out;
  const uint32_t* in[S::kSources];
  for (int k = 0; k < S::kSources; ++k) {
    Type type = S::SourceType(k) == Type::kF32 ? Type::kF16 : S::SourceType(k);
    in[k] = Read(wave, inst, k, type, &planes[k]);
  }
  ApplyHalf<F>(wave, inst, in, out.at);
  if (min_max && wave.mode.ieee()) {
    for (int k = S::kSources - 1; k >= 0; --k) SignalingHalves(in[k], out.at);
  }
  Write(wave, inst, HalfTypeOf<typename S::Result>(), &out);
}

template <auto F>
Op HalfOp(const char* mnemonic, uint32_t extra = 0, uint8_t archs = kOnAll,
          InstClass inst_class = InstClass::kValu) {
  Op op = VectorOp<F>(mnemonic, extra, archs, inst_class);
  op.execute = HalfVector<F>;
  for (Type* type : {&op.dst[0], &op.src[0], &op.src[1], &op.src[2]}) {
    if (*type == Type::kF32) *type = Type::kF16;
  }
  return op;
}

template <auto F>
Op HalfMinMaxOp(const char* mnemonic, uint32_t extra = 0) {
  Op op = HalfOp<F>(mnemonic, extra);
  op.execute = HalfVector<F, true>;
  return op;
}

// VOP3P: F on the low and the high halves.
template <auto F, bool min_max = false>
void HalfPacked(Wave& wave, const Inst& inst) {
  using S = Signature<decltype(F)>;
  Plane planes[S::kSources], out[2];
  const uint32_t* in[S::kSources];
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < S::kSources; ++k) {
      in[k] = ReadPacked(wave, inst.src[k], Type::kPkF16, half, &planes[k]);
    }
    ApplyHalf<F>(wave, inst, in, out[half].at);
    if (min_max && wave.mode.ieee()) {
      for (int k = S::kSources - 1; k >= 0; --k) {
        SignalingHalves(in[k], out[half].at);
      }
    }
    if (inst.clamp) ModifyResult(wave, inst, Type::kF16, out[half].at);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    out[0].at[lane] |= out[1].at[lane] << 16;
  }
  WriteLanes(wave.v[inst.dst[0].reg], out[0].at, wave.exec());
}

template <auto F, bool min_max = false>
Op HalfPackedOp(const char* mnemonic, uint32_t extra = 0,
                uint8_t archs = kOnAll) {
  Op op = PackedOp<F>(mnemonic, extra, archs);
  op.execute = HalfPacked<F, min_max>;
  for (Type* type : {&op.dst[0], &op.src[0], &op.src[1], &op.src[2]}) {
    if (*type == Type::kPkF32) *type = Type::kPkF16;
  }
  return op;
}

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_HALF_H_
