// SPDX-License-Identifier: Apache-2.0

// An instruction, decoded once and bound to the function that executes it.
#ifndef AMDGPU_SIM_ISA_INST_H_
#define AMDGPU_SIM_ISA_INST_H_

#include <cstdint>
#include <string>

#include "tests/amdgpu_sim/gpu/wave.h"

namespace amdgpu_sim {

// What an operand is read as; decides an inline constant's bits ("1.0" is
// 0x3c00 as kF16) and how many registers it has.
enum class Type : uint8_t {
  kNone,
  kB16,
  kI16,
  kU16,
  kF16,
  kBF16,
  kB32,
  kI32,
  kU32,
  kF32,
  kB64,
  kI64,
  kU64,
  kF64,
  // VOP3P: two halves in one register, or two registers.
  kPkF16,
  kPkBF16,
  kPkB16,
  kPkF32,
  kPkB32,
  kMask,  // a lane mask in SGPRs or VCC: carry, compare result, select
  kWide,  // as many registers as the text names (loads, stores, MFMA)
};

enum class SdwaSelect : uint8_t {
  kByte0,
  kByte1,
  kByte2,
  kByte3,
  kWord0,
  kWord1,
  kDword,
};

struct Operand {
  enum class Kind : uint8_t {
    kNone,
    kVector,
    kScalar,
    kConstant,
    // 1 or 0.
    kScc,
    kVccz,
    kExecz,
    kOff,  // "off": no address register
  };
  Kind kind = Kind::kNone;
  Type type = Type::kNone;
  uint16_t reg = 0;       // In Wave::v or Wave::s.
  uint8_t count = 0;      // Registers, by the text.
  uint64_t constant = 0;  // Bits, as `type` reads them.
  bool neg = false, abs = false, sext = false;
  // VOP3 op_sel: high half. VOP3P: which half feeds the low and high result.
  bool op_sel = false, op_sel_hi = true, neg_lo = false, neg_hi = false;
  SdwaSelect sdwa = SdwaSelect::kDword;
};

enum class DppControl : uint8_t {
  kNone,
  kQuadPerm,
  kRowShl,
  kRowShr,
  kRowRor,
  kWaveShl,
  kWaveRol,
  kWaveShr,
  kWaveRor,
  kRowMirror,
  kRowHalfMirror,
  kRowBcast15,
  kRowBcast31,
  kRowNewbcast,
};

// Scalar ones first.
enum class InstClass : uint8_t {
  kSalu,
  kSmem,
  kBranch,
  kWait,
  kBarrier,
  kOtherScalar,
  kValu,
  kTrans,
  kMfma,
  kGlobal,
  kScratch,
  kLds,
  kCount,
};

// What a DPP control does to the lanes, apart from EXEC.
struct DppLanes {
  uint8_t source[kLanes];  // Its own number where it has none.
  uint64_t valid = 0;      // Lanes that have a source.
  uint64_t enabled = 0;    // Lanes in row_mask and bank_mask.
};

struct Inst;
using Execute = void (*)(Wave&, const Inst&);

struct RegRange {
  bool scalar = false;
  uint16_t first = 0, count = 0;
};

struct Inst {
  Execute execute = nullptr;
  Execute indexed = nullptr;  // After s_set_gpr_idx_on: what is indexed.
  Operand dst[2];
  Operand src[5];   // v_mfma_scale_* has five.
  uint64_t pc = 0;  // Its own address; the next one's is pc + bytes.
  uint8_t bytes = 4;
  InstClass inst_class = InstClass::kValu;
  int32_t imm = 0;  // simm16, branch target offset, s_waitcnt bits, ...

  // VALU modifiers. `plain` is set if there are none, on operands neither.
  bool plain = true;
  bool clamp = false;
  uint8_t omod = 0;         // 0 none, 1 *2, 2 *4, 3 /2
  bool op_sel_dst = false;  // VOP3 op_sel of the result: high half written
  bool keeps_high = false;  // a 16-bit result leaves the other half alone
  uint8_t op_sel = 0, op_sel_hi = 0;  // As written, bit k the k-th in the list.
  uint8_t bitop3 = 0;
  DppControl dpp = DppControl::kNone;
  uint8_t dpp_value = 0;  // quad_perm as two bits a lane; else the amount
  uint8_t row_mask = 0xf, bank_mask = 0xf;
  bool bound_ctrl = false;
  const DppLanes* dpp_lanes = nullptr;  // Null without DPP.
  bool sdwa = false;
  SdwaSelect dst_sel = SdwaSelect::kDword;
  uint8_t dst_unused = 0;  // 0 pad, 1 sign, 2 preserve

  // MFMA.
  uint8_t cbsz = 0, abid = 0, blgp = 0;

  // Memory.
  int32_t offset = 0;  // Of a ds op with two: offset0.
  int32_t offset1 = 0;
  bool glc = false;  // sc0 on gfx94x: an atomic returns its value
  bool sc1 = false, nt = false, slc = false, lds = false, gds = false;
  bool offen = false, idxen = false;

  // For the waitcnt check, filled by the decoder from the operands.
  RegRange uses[8];
  uint8_t use_count = 0;

  uint16_t mfma_passes = 0;   // Documented passes, for --stats.
  const char* mnemonic = "";  // Suffixes _e32, _e64, _dpp, _sdwa stripped.
  const char* text = "";      // As LLVM prints it.
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_ISA_INST_H_
