// SPDX-License-Identifier: Apache-2.0

// The arithmetic of atomics, in memory and in LDS.
#ifndef AMDGPU_SIM_ISA_ATOMIC_H_
#define AMDGPU_SIM_ISA_ATOMIC_H_

#include <cstdint>

#include "tests/amdgpu_sim/isa/float.h"

namespace amdgpu_sim {

// New values from the old one and the data. Minimum and maximum of floats
// are as the ISA documents write them: the old value stays if one is NaN.
template <typename T>
T AtomicSwap(T, T data) {
  return data;
}
template <typename T>
T AtomicAdd(T old, T data) {
  return old + data;
}
template <typename T>
T AtomicSub(T old, T data) {
  return old - data;
}
template <typename T>
T AtomicRsub(T old, T data) {
  return data - old;
}
template <typename T>
T AtomicMin(T old, T data) {
  return data < old ? data : old;
}
template <typename T>
T AtomicMax(T old, T data) {
  return data > old ? data : old;
}
template <typename T>
T AtomicAnd(T old, T data) {
  return old & data;
}
template <typename T>
T AtomicOr(T old, T data) {
  return old | data;
}
template <typename T>
T AtomicXor(T old, T data) {
  return old ^ data;
}
template <typename T>
T AtomicInc(T old, T data) {
  return old >= data ? 0 : old + 1;
}
template <typename T>
T AtomicDec(T old, T data) {
  return old == 0 || old > data ? data : old - 1;
}

constexpr uint32_t kExactMxcsr = MxcsrFor(kToEven, 3);  // Keeps denormals.
constexpr uint32_t kFlushMxcsr = MxcsrFor(kToEven, 0);

inline uint32_t AtomicPkAddF16(uint32_t old, uint32_t data) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    // A float holds 24 bits, enough to round twice without harm.
    const float sum = HalfToFloat(old >> shift) + HalfToFloat(data >> shift);
    result |= uint32_t{FloatToHalf(sum)} << shift;
  }
  return result;
}

inline uint32_t AtomicPkAddBf16(uint32_t old, uint32_t data) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const float sum =
        BfloatToFloat(old >> shift) + BfloatToFloat(data >> shift);
    result |= uint32_t{FloatToBfloat(sum)} << shift;
  }
  return result;
}

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_ATOMIC_H_
