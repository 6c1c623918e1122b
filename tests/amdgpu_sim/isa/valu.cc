// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/isa/valu.h"

#include <immintrin.h>

#include <cmath>
#include <deque>
#include <mutex>

namespace amdgpu_sim {
namespace {

// The lane that a lane reads by DPP; -1 if there is none.
int DppSource(const Inst& inst, int lane) {
  int row = lane & ~15;
  int at = lane & 15;
  int n = inst.dpp_value;
  switch (inst.dpp) {
    case DppControl::kNone:
      return lane;
    case DppControl::kQuadPerm:
      return (lane & ~3) | (n >> 2 * (lane & 3) & 3);
    case DppControl::kRowShl:
      return at + n < 16 ? lane + n : -1;
    case DppControl::kRowShr:
      return at - n >= 0 ? lane - n : -1;
    case DppControl::kRowRor:
      return row | ((at - n) & 15);
    case DppControl::kWaveShl:
      return lane < 63 ? lane + 1 : -1;
    case DppControl::kWaveRol:
      return (lane + 1) & 63;
    case DppControl::kWaveShr:
      return lane - 1;
    case DppControl::kWaveRor:
      return (lane - 1) & 63;
    case DppControl::kRowMirror:
      return row | (15 - at);
    case DppControl::kRowHalfMirror:
      return (lane & ~7) | (7 - (lane & 7));
    case DppControl::kRowBcast15:
      return row - 1;
    case DppControl::kRowBcast31:
      return lane < 32 ? -1 : 31;
    case DppControl::kRowNewbcast:
      return row | n;
  }
  return -1;
}

// Lanes whose source exists and is enabled by EXEC.
uint64_t ActiveSources(const DppLanes& lanes, uint64_t exec) {
  if (exec == ~uint64_t{0}) return lanes.valid;
  uint64_t active = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    active |= (exec >> lanes.source[lane] & 1) << lane;
  }
  return active & lanes.valid;
}

// Permutes a register; 0 where there is no source.
void Permute(const DppLanes& lanes, uint64_t active, uint32_t* values) {
  alignas(64) uint32_t raw[kLanes];
  std::memcpy(raw, values, sizeof(raw));
  for (int lane = 0; lane < kLanes; ++lane) {
    values[lane] = raw[lanes.source[lane]];
  }
  if (active == ~uint64_t{0}) return;
  alignas(64) const uint32_t zeros[kLanes] = {};
  WriteLanes(values, zeros, ~active);
}

void Fill(uint32_t* to, uint32_t value) {
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = value;
}

// The raw registers, without modifiers.
void ReadRaw(const Wave& wave, const Operand& o, Type type, uint32_t* to) {
  bool two = RegistersOf(type) == 2;
  switch (o.kind) {
    case Operand::Kind::kVector:
      std::memcpy(to, wave.v[o.reg], (two ? 2 : 1) * sizeof(wave.v[0]));
      return;
    case Operand::Kind::kScalar:
      Fill(to, wave.s[o.reg]);
      if (two) Fill(to + kLanes, wave.s[o.reg + 1]);
      return;
    case Operand::Kind::kScc:
    case Operand::Kind::kVccz:
    case Operand::Kind::kExecz:
      Fill(to, ConditionOf(wave, o.kind));
      if (two) Fill(to + kLanes, 0);
      return;
    case Operand::Kind::kConstant:
      Fill(to, static_cast<uint32_t>(o.constant));
      if (two) Fill(to + kLanes, static_cast<uint32_t>(o.constant >> 32));
      return;
    case Operand::Kind::kNone:
    case Operand::Kind::kOff:
      break;
  }
  throw Fault{Check::kUnsupported, "an operand is missing"};
}

void Select(SdwaSelect select, bool sext, uint32_t* values) {
  int shift = 0;
  int bits = 32;
  if (select <= SdwaSelect::kByte3) {
    shift = 8 * static_cast<int>(select);
    bits = 8;
  } else if (select <= SdwaSelect::kWord1) {
    shift = select == SdwaSelect::kWord1 ? 16 : 0;
    bits = 16;
  }
  int up = 32 - bits;
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t value = values[lane] >> shift << up;
    values[lane] =
        sext ? static_cast<uint32_t>(static_cast<int32_t>(value) >> up)
             : value >> up;
  }
}

// Which bit of which register is an element's sign, or -1.
int SignBit(Type type) {
  switch (type) {
    case Type::kF16:
    case Type::kBF16:
    case Type::kPkF16:
    case Type::kPkBF16:
    case Type::kU16:
    case Type::kI16:
    case Type::kB16:
    case Type::kPkB16:
      return 15;
    default:
      return 31;
  }
}

bool Has16Bits(Type type) {
  return type == Type::kB16 || type == Type::kI16 || type == Type::kU16 ||
         type == Type::kF16 || type == Type::kBF16;
}

// Output modifiers of a float: nothing is changed where the hardware ignores
// them, which is where it keeps denormal results.
float Scale(float value, int omod) {
  static const float kFactor[] = {1, 2, 4, 0.5f};
  float scaled = value * kFactor[omod];
  if (std::fabs(scaled) < 1.17549435e-38f) return 0;  // -0 and denormals.
  return scaled;
}

double Scale(double value, int omod) {
  static const double kFactor[] = {1, 2, 4, 0.5};
  double scaled = value * kFactor[omod];
  if (std::fabs(scaled) < 2.2250738585072014e-308) return 0;
  return scaled;
}

template <typename T>
T Clamp(T value, bool dx10) {
  if (value != value) return dx10 ? T{0} : value;
  // -0 becomes 0.
  return value > 0 ? (value < 1 ? value : T{1}) : T{0};
}

uint16_t ScaleHalf(uint16_t bits, int omod) {
  float value = Scale(_cvtsh_ss(bits), omod);
  uint16_t scaled = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
  return (scaled & 0x7c00) == 0 ? 0 : scaled;
}

uint16_t ClampHalf(uint16_t bits, uint16_t one, uint16_t infinity, bool dx10) {
  if ((bits & 0x7fff) > infinity) return dx10 ? 0 : bits;
  if (bits & 0x8000) return 0;
  return bits < one ? bits : one;
}

}  // namespace

void SetDppLanes(Inst* inst) {
  DppLanes lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    int source = DppSource(*inst, lane);
    lanes.source[lane] = static_cast<uint8_t>(source < 0 ? lane : source);
    uint64_t bit = uint64_t{1} << lane;
    if (source >= 0) lanes.valid |= bit;
    bool row = inst->row_mask >> lane / 16 & 1;
    bool bank = inst->bank_mask >> (lane / 4 & 3) & 1;
    if (row && bank) lanes.enabled |= bit;
  }
  // One for all instructions alike; they are few.
  static std::mutex* mutex = new std::mutex;
  static auto* all = new std::deque<DppLanes>;
  std::lock_guard<std::mutex> lock(*mutex);
  for (const DppLanes& one : *all) {
    if (std::memcmp(&one, &lanes, sizeof(lanes)) == 0) {
      inst->dpp_lanes = &one;
      return;
    }
  }
  all->push_back(lanes);
  inst->dpp_lanes = &all->back();
}

void WriteLanes(uint32_t* to, const uint32_t* from, uint64_t mask) {
  if (mask == ~uint64_t{0}) {
    std::memcpy(to, from, kLanes * sizeof(*to));
    return;
  }
  for (int half = 0; half < 2; ++half) {
    uint32_t bits = static_cast<uint32_t>(mask >> 32 * half);
    uint32_t* out = to + 32 * half;
    const uint32_t* in = from + 32 * half;
#pragma GCC ivdep
    for (int lane = 0; lane < 32; ++lane) {
      out[lane] = bits >> lane & 1 ? in[lane] : out[lane];
    }
  }
}

uint64_t MaskOf(const uint32_t* values) {
  uint64_t mask = 0;
  const __m256i zero = _mm256_setzero_si256();
  for (int k = 0; k < 8; ++k) {
    __m256i v =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 8 * k));
    int zeros =
        _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(v, zero)));
    mask |= static_cast<uint64_t>(~zeros & 0xff) << 8 * k;
  }
  return mask;
}

const uint32_t* ReadModified(const Wave& wave, const Inst& inst,
                             const Operand& o, Type type, bool first,
                             Plane* plane) {
  uint32_t* at = plane->at;
  if (type == Type::kMask) {
    uint64_t mask = ReadMask(wave, o);
    for (int half = 0; half < 2; ++half) {
      uint32_t bits = static_cast<uint32_t>(mask >> 32 * half);
      for (int lane = 0; lane < 32; ++lane) {
        at[32 * half + lane] = bits >> lane & 1;
      }
    }
    return at;
  }
  bool permuted = first && inst.dpp != DppControl::kNone;
  bool high = o.op_sel && Has16Bits(type);
  bool selected = inst.sdwa && (o.sdwa != SdwaSelect::kDword || o.sext);
  if (o.kind == Operand::Kind::kVector && !permuted && !high && !selected &&
      !o.neg && !o.abs) {
    return wave.v[o.reg];
  }
  ReadRaw(wave, o, type, at);
  bool two = RegistersOf(type) == 2;
  if (permuted) {
    uint64_t active = ActiveSources(*inst.dpp_lanes, wave.exec());
    Permute(*inst.dpp_lanes, active, at);
    if (two) Permute(*inst.dpp_lanes, active, at + kLanes);
  }
  if (selected) Select(o.sdwa, o.sext, at);
  if (high) {
    for (int lane = 0; lane < kLanes; ++lane) at[lane] >>= 16;
  }
  uint32_t* signs = two ? at + kLanes : at;
  uint32_t sign = uint32_t{1} << SignBit(type);
  if (o.abs) {
    for (int lane = 0; lane < kLanes; ++lane) signs[lane] &= ~sign;
  }
  if (o.neg) {
    for (int lane = 0; lane < kLanes; ++lane) signs[lane] ^= sign;
  }
  return at;
}

const uint32_t* ReadPacked(const Wave& wave, const Operand& o, Type type,
                           bool high, Plane* plane) {
  bool second = high ? o.op_sel_hi : o.op_sel;
  bool negated = high ? o.neg_hi : o.neg_lo;
  bool two = RegistersOf(type) == 2;
  uint32_t* at = plane->at;
  if (o.kind == Operand::Kind::kVector) {
    const uint32_t* from = wave.v[o.reg + (two && second)];
    if (two && !negated) return from;
    std::memcpy(at, from, kLanes * sizeof(*at));
  } else if (o.kind == Operand::Kind::kScalar) {
    Fill(at, wave.s[o.reg + (two && second)]);
  } else if (o.kind == Operand::Kind::kConstant) {
    // A pair of registers' second one too: LLVM's code for OCML's logarithm
    // relies on it.
    Fill(at, static_cast<uint32_t>(o.constant));
  } else {
    throw Fault{Check::kUnsupported, "this operand of a packed operation"};
  }
  if (!two && second) {
    for (int lane = 0; lane < kLanes; ++lane) at[lane] >>= 16;
  }
  if (negated) {
    uint32_t sign = uint32_t{1} << SignBit(type);
    for (int lane = 0; lane < kLanes; ++lane) at[lane] ^= sign;
  }
  return at;
}

uint64_t WrittenLanes(const Wave& wave, const Inst& inst) {
  uint64_t exec = wave.exec();
  if (inst.dpp == DppControl::kNone) return exec;
  uint64_t lanes = inst.dpp_lanes->enabled;
  if (!inst.bound_ctrl) lanes &= ActiveSources(*inst.dpp_lanes, exec);
  return lanes & exec;
}

void ModifyResult(const Wave& wave, const Inst& inst, Type type,
                  uint32_t* values) {
  // Output modifiers are ignored while denormal results are kept, and in IEEE
  // mode; the clamp is not.
  bool wide = type != Type::kF32;
  bool denormals = (wide ? wave.mode.denorm16_64() : wave.mode.denorm32()) & 2;
  int omod = denormals || wave.mode.ieee() ? 0 : inst.omod;
  bool dx10 = wave.mode.dx10_clamp();
  for (int lane = 0; lane < kLanes; ++lane) {
    if (type == Type::kF32) {
      float value = GetLane<float>(values, lane);
      if (omod) value = Scale(value, omod);
      if (inst.clamp) value = Clamp(value, dx10);
      SetLane(values, lane, value);
    } else if (type == Type::kF64) {
      double value = GetLane<double>(values, lane);
      if (omod) value = Scale(value, omod);
      if (inst.clamp) value = Clamp(value, dx10);
      SetLane(values, lane, value);
    } else if (type == Type::kF16) {
      uint16_t value = GetLane<uint16_t>(values, lane);
      if (omod) value = ScaleHalf(value, omod);
      if (inst.clamp) value = ClampHalf(value, 0x3c00, 0x7c00, dx10);
      SetLane(values, lane, value);
    } else if (type == Type::kBF16) {
      uint16_t value = GetLane<uint16_t>(values, lane);
      if (omod) throw Fault{Check::kUnsupported, "omod of a bfloat16"};
      if (inst.clamp) value = ClampHalf(value, 0x3f80, 0x7f80, dx10);
      SetLane(values, lane, value);
    }
  }
}

void WriteModified(Wave& wave, const Inst& inst, Type type, Plane* plane) {
  uint32_t* at = plane->at;
  if ((inst.clamp || inst.omod) && IsFloat(type)) {
    ModifyResult(wave, inst, type, at);
  }
  uint64_t lanes = WrittenLanes(wave, inst);
  uint32_t* to = wave.v[inst.dst[0].reg];
  if (RegistersOf(type) == 2) {
    WriteLanes(to, at, lanes);
    WriteLanes(to + kLanes, at + kLanes, lanes);
    return;
  }
  if (Has16Bits(type) && inst.op_sel_dst) {
    for (int lane = 0; lane < kLanes; ++lane) {
      at[lane] = (to[lane] & 0xffff) | at[lane] << 16;
    }
  } else if (Has16Bits(type) && inst.keeps_high) {
    for (int lane = 0; lane < kLanes; ++lane) {
      at[lane] = (to[lane] & 0xffff0000) | (at[lane] & 0xffff);
    }
  }
  if (inst.sdwa && inst.dst_sel != SdwaSelect::kDword) {
    bool byte = inst.dst_sel <= SdwaSelect::kByte3;
    int shift = byte ? 8 * static_cast<int>(inst.dst_sel)
                     : (inst.dst_sel == SdwaSelect::kWord1 ? 16 : 0);
    uint32_t field = (byte ? 0xffu : 0xffffu) << shift;
    int up = byte ? 24 : 16;
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t value = at[lane] << shift & field;
      if (inst.dst_unused == 1) {
        // The sign fills what is above the field.
        value =
            static_cast<uint32_t>(static_cast<int32_t>(at[lane] << up) >> up)
            << shift;
      } else if (inst.dst_unused == 2) {
        value |= to[lane] & ~field;
      }
      at[lane] = value;
    }
  }
  WriteLanes(to, at, lanes);
}

}  // namespace amdgpu_sim
