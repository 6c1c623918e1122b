// SPDX-License-Identifier: Apache-2.0

// Instructions that move values between lanes, or between lanes and scalars.

#include <cstdint>
#include <utility>

#include "tests/amdgpu_sim/isa/ops.h"
#include "tests/amdgpu_sim/isa/valu.h"

namespace amdgpu_sim {
namespace {

uint32_t ScalarValue(const Wave& wave, const Operand& o) {
  return o.kind == Operand::Kind::kScalar ? wave.s[o.reg]
                                          : static_cast<uint32_t>(o.constant);
}

// A lane of an operand that may be a scalar or a constant too.
uint32_t LaneValue(const Wave& wave, const Operand& o, int lane) {
  return o.kind == Operand::Kind::kVector ? wave.v[o.reg][lane]
                                          : ScalarValue(wave, o);
}

void Readlane(Wave& wave, const Inst& inst) {
  int lane = ScalarValue(wave, inst.src[1]) & 63;
  wave.s[inst.dst[0].reg] = LaneValue(wave, inst.src[0], lane);
}

// Lane 0's value if no lane is enabled.
void Readfirstlane(Wave& wave, const Inst& inst) {
  uint64_t exec = wave.exec();
  int lane = exec ? __builtin_ctzll(exec) : 0;
  wave.s[inst.dst[0].reg] = LaneValue(wave, inst.src[0], lane);
}

// Whatever EXEC says.
void Writelane(Wave& wave, const Inst& inst) {
  int lane = ScalarValue(wave, inst.src[1]) & 63;
  wave.v[inst.dst[0].reg][lane] = ScalarValue(wave, inst.src[0]);
}

uint32_t MbcntLo(uint32_t a, uint32_t b, Lane lane) {
  uint64_t below = (uint64_t{1} << lane.index) - 1;
  return b + __builtin_popcount(a & static_cast<uint32_t>(below));
}
uint32_t MbcntHi(uint32_t a, uint32_t b, Lane lane) {
  uint64_t below = (uint64_t{1} << lane.index) - 1;
  return b + __builtin_popcount(a & static_cast<uint32_t>(below >> 32));
}

// Swaps the odd blocks of `size` lanes of the first register with the even
// blocks of the second. With all lanes enabled bound_ctrl does nothing.
template <int size>
void PermlaneSwap(Wave& wave, const Inst& inst) {
  if (wave.exec() != ~uint64_t{0}) {
    throw Fault{Check::kUnsupported,
                "a swap between lanes of which EXEC disables some"};
  }
  uint32_t* a = wave.v[inst.dst[0].reg];
  uint32_t* b = wave.v[inst.src[0].reg];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lane & size) std::swap(a[lane], b[lane - size]);
  }
}

}  // namespace

Ops CrossLaneOps() {
  constexpr Type kB32 = Type::kB32;
  return {
      WaveOp("v_readlane_b32", Readlane, {kB32}, {kB32, kB32}),
      WaveOp("v_readfirstlane_b32", Readfirstlane, {kB32}, {kB32}),
      WaveOp("v_writelane_b32", Writelane, {kB32}, {kB32, kB32}),
      VectorOp<MbcntLo>("v_mbcnt_lo_u32_b32"),
      VectorOp<MbcntHi>("v_mbcnt_hi_u32_b32"),
      WaveOp("v_permlane16_swap_b32", PermlaneSwap<16>, {kB32}, {kB32}, kDpp,
             kOnGfx950),
      WaveOp("v_permlane32_swap_b32", PermlaneSwap<32>, {kB32}, {kB32}, kDpp,
             kOnGfx950),
  };
}

}  // namespace amdgpu_sim
