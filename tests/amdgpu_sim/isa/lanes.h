// SPDX-License-Identifier: Apache-2.0

// What memory instructions share: loops over active lanes, and moves between
// vector registers and the bytes of memory.
#ifndef AMDGPU_SIM_ISA_LANES_H_
#define AMDGPU_SIM_ISA_LANES_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tests/amdgpu_sim/gpu/wave.h"
#include "tests/amdgpu_sim/isa/inst.h"

namespace amdgpu_sim {

// Where the bytes of every lane are; only those of active lanes are set.
using LaneBytes = uint8_t* [kLanes];

// Calls f(lane) for the lanes of a mask, in ascending order.
template <typename F>
inline void ForLanes(uint64_t mask, F&& f) {
  if (mask == ~uint64_t{0}) {
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
    return;
  }
  for (; mask != 0; mask &= mask - 1) f(__builtin_ctzll(mask));
}

// A scalar or constant operand's low 32 bits.
inline uint32_t ScalarValue(const Wave& wave, const Operand& operand) {
  switch (operand.kind) {
    case Operand::Kind::kScalar:
      return wave.s[operand.reg];
    case Operand::Kind::kConstant:
      return static_cast<uint32_t>(operand.constant);
    case Operand::Kind::kOff:
    case Operand::Kind::kNone:
      return 0;
    default:
      throw Fault{Check::kUnsupported, "operand of a memory instruction"};
  }
}

template <typename T>
inline T Load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

template <typename T>
inline void Store(uint8_t* bytes, T value) {
  std::memcpy(bytes, &value, sizeof(T));
}

// How a load of fewer than four bytes fills its register.
enum class Fill : uint8_t { kZero, kSign, kLow, kHigh, kSignLow, kSignHigh };

// The register after a load of 1 or 2 bytes.
template <typename Unsigned, Fill kFill>
inline uint32_t FillRegister(uint32_t old, const uint8_t* bytes) {
  using Signed = std::make_signed_t<Unsigned>;
  const Unsigned value = Load<Unsigned>(bytes);
  const uint32_t sign = static_cast<int32_t>(static_cast<Signed>(value));
  switch (kFill) {
    case Fill::kZero:
      return value;
    case Fill::kSign:
      return sign;
    case Fill::kLow:
      return (old & 0xffff0000u) | value;
    case Fill::kHigh:
      return (old & 0xffffu) | uint32_t{value} << 16;
    case Fill::kSignLow:
      return (old & 0xffff0000u) | (sign & 0xffffu);
    case Fill::kSignHigh:
      return (old & 0xffffu) | sign << 16;
  }
  return 0;
}

// Fills registers [reg, reg + n) of a lane from 4 n bytes, and back.
template <int kDwords>
inline void LoadDwords(Wave& wave, int reg, int lane, const uint8_t* bytes) {
  for (int i = 0; i < kDwords; ++i) {
    wave.v[reg + i][lane] = Load<uint32_t>(bytes + 4 * i);
  }
}

template <int kDwords>
inline void StoreDwords(const Wave& wave, int reg, int lane, uint8_t* bytes) {
  for (int i = 0; i < kDwords; ++i) {
    Store<uint32_t>(bytes + 4 * i, wave.v[reg + i][lane]);
  }
}

// Four lanes at once: rows are the lanes' bytes, columns registers.
inline void TransposeFour(__m128i* x) {
  const __m128i a = _mm_unpacklo_epi32(x[0], x[1]),
                b = _mm_unpacklo_epi32(x[2], x[3]),
                c = _mm_unpackhi_epi32(x[0], x[1]),
                d = _mm_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm_unpacklo_epi64(a, b);
  x[1] = _mm_unpackhi_epi64(a, b);
  x[2] = _mm_unpacklo_epi64(c, d);
  x[3] = _mm_unpackhi_epi64(c, d);
}

// The same for the lanes of a mask.
template <int kDwords>
inline void LoadLanes(Wave& wave, int reg, uint64_t lanes,
                      const LaneBytes& at) {
  if constexpr (kDwords == 2 || kDwords == 4) {
    if (lanes == ~uint64_t{0}) {
      for (int lane = 0; lane < kLanes; lane += 4) {
        __m128i x[4];
        for (int i = 0; i < 4; ++i) {
          const auto* from = reinterpret_cast<const __m128i*>(at[lane + i]);
          x[i] = kDwords == 4 ? _mm_loadu_si128(from) : _mm_loadl_epi64(from);
        }
        TransposeFour(x);
        for (int i = 0; i < kDwords; ++i) {
          _mm_store_si128(reinterpret_cast<__m128i*>(&wave.v[reg + i][lane]),
                          x[i]);
        }
      }
      return;
    }
  }
  ForLanes(lanes,
           [&](int lane) { LoadDwords<kDwords>(wave, reg, lane, at[lane]); });
}

template <int kDwords>
inline void StoreLanes(const Wave& wave, int reg, uint64_t lanes,
                       const LaneBytes& at) {
  if constexpr (kDwords == 2 || kDwords == 4) {
    if (lanes == ~uint64_t{0}) {
      for (int lane = 0; lane < kLanes; lane += 4) {
        __m128i x[4] = {};
        for (int i = 0; i < kDwords; ++i) {
          x[i] = _mm_load_si128(
              reinterpret_cast<const __m128i*>(&wave.v[reg + i][lane]));
        }
        TransposeFour(x);
        for (int i = 0; i < 4; ++i) {
          auto* to = reinterpret_cast<__m128i*>(at[lane + i]);
          if (kDwords == 4) {
            _mm_storeu_si128(to, x[i]);
          } else {
            _mm_storel_epi64(to, x[i]);
          }
        }
      }
      return;
    }
  }
  ForLanes(lanes,
           [&](int lane) { StoreDwords<kDwords>(wave, reg, lane, at[lane]); });
}

// A 1, 2 or 4 register value of a lane.
template <typename T>
inline T RegisterValue(const Wave& wave, int reg, int lane) {
  T value;
  if constexpr (sizeof(T) == 8) {
    const uint64_t bits = wave.v[reg][lane] | uint64_t{wave.v[reg + 1][lane]}
                                                  << 32;
    std::memcpy(&value, &bits, 8);
  } else {
    std::memcpy(&value, &wave.v[reg][lane], sizeof(T));
  }
  return value;
}

template <typename T>
inline void SetRegisterValue(Wave& wave, int reg, int lane, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &value, sizeof(T));
  for (size_t i = 0; i < sizeof(T) / 4; ++i) wave.v[reg + i][lane] = words[i];
}

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_LANES_H_
