// SPDX-License-Identifier: Apache-2.0

// The table that names every instruction the simulator executes.
//
// Each source of this folder has a part of it: an `Op` is one mnemonic, its
// operands in the order of the assembly text, and its function.
#ifndef AMDGPU_SIM_ISA_OPS_H_
#define AMDGPU_SIM_ISA_OPS_H_

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "tests/amdgpu_sim/isa/inst.h"

namespace amdgpu_sim {

constexpr uint8_t kOnGfx90a = 1, kOnGfx942 = 2, kOnGfx950 = 4, kOnAll = 7;

// Modifiers that an op's function honours. The decoder refuses any other.
enum Modifiers : uint32_t {
  kNoModifiers = 0,
  kDpp = 1 << 0,
  kSdwa = 1 << 1,
  kNegAbs = 1 << 2,
  kClamp = 1 << 3,
  kOmod = 1 << 4,
  kOpSel = 1 << 5,    // VOP3 form, halves
  kPacked = 1 << 6,   // VOP3P op_sel, op_sel_hi, neg_lo, neg_hi
  kMfma = 1 << 7,     // cbsz abid blgp (and neg on f64)
  kAddress = 1 << 8,  // offset, offset0/1, glc, sc0, sc1, nt, slc, ...
  kBitop3 = 1 << 9,
  // Not in the text; the decoder appends these operands to src.
  kReadsDst = 1 << 10,   // dst[0] as the source after the last (v_fmac)
  kReadsVcc = 1 << 11,   // VCC as a kMask after that (v_div_fmas)
  kKeepsHigh = 1 << 12,  // a 16-bit result leaves the other half alone
};

struct Op {
  const char* mnemonic;
  Execute execute;
  InstClass inst_class;
  Type dst[2];
  Type src[5];
  uint32_t modifiers = kNoModifiers;
  uint8_t archs = kOnAll;
  uint16_t mfma_passes = 0;
};

using Ops = std::vector<Op>;

// One part a source file.
Ops ScalarOps();     // salu.cc, smem too
Ops IntegerOps();    // valu_int.cc, compares and moves too
Ops FloatOps();      // valu_float.cc
Ops PackedOps();     // valu_packed.cc: VOP3P, dot, packed conversions
Ops CrossLaneOps();  // cross_lane.cc: readlane, permlane, mbcnt, ...
Ops MfmaOps();       // mfma.cc
Ops GlobalOps();     // global.cc: global, flat, buffer, scratch, atomics
Ops LdsOps();        // lds.cc

// The op of a mnemonic on an architecture; null if there is none.
const Op* FindOp(const char* mnemonic, Arch arch);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_OPS_H_
