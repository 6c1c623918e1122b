// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/isa/decode.h"

#include <immintrin.h>
#include <llvm-c/Disassembler.h>
#include <llvm-c/Target.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "tests/amdgpu_sim/isa/ops.h"
#include "tests/amdgpu_sim/isa/valu.h"

namespace amdgpu_sim {
namespace {

// Strings that instructions point to; they live as long as the process.
const char* Intern(std::string_view text) {
  static std::mutex* mutex = new std::mutex;
  static auto* pool = new std::unordered_set<std::string>;
  std::lock_guard<std::mutex> lock(*mutex);
  return pool->emplace(text).first->c_str();
}

// LLVM's disassembler for one architecture. Its contexts are not thread safe.
class Disassembler {
 public:
  static Disassembler& For(Arch arch) {
    static Disassembler* all[] = {new Disassembler("gfx90a"),
                                  new Disassembler("gfx942"),
                                  new Disassembler("gfx950")};
    return *all[static_cast<int>(arch)];
  }

  // The length in bytes; 0 if the bytes are no instruction.
  uint64_t Text(uint64_t pc, const uint8_t* bytes, uint64_t size,
                std::string* text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!context_) Start();
    char buffer[512];
    // LLVM takes the bytes as mutable but does not change them.
    uint64_t length =
        LLVMDisasmInstruction(context_, const_cast<uint8_t*>(bytes), size, pc,
                              buffer, sizeof(buffer));
    *text = buffer;
    return length;
  }

 private:
  explicit Disassembler(const char* cpu) : cpu_(cpu) {}

  void Start() {
    static std::once_flag once;
    std::call_once(once, [] {
      LLVMInitializeAMDGPUTargetInfo();
      LLVMInitializeAMDGPUTargetMC();
      LLVMInitializeAMDGPUDisassembler();
    });
    context_ = LLVMCreateDisasmCPU("amdgcn-amd-amdhsa", cpu_, nullptr, 0,
                                   nullptr, nullptr);
    if (!context_) {
      throw Fault{Check::kUnsupported,
                  "LLVM has no AMDGPU disassembler: " + std::string(cpu_)};
    }
  }

  const char* const cpu_;
  std::mutex mutex_;
  LLVMDisasmContextRef context_ = nullptr;
};

std::string_view Trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<uint8_t>(text.front()))) {
    text.remove_prefix(1);
  }
  while (!text.empty() && std::isspace(static_cast<uint8_t>(text.back()))) {
    text.remove_suffix(1);
  }
  return text;
}

bool TakePrefix(std::string_view* text, std::string_view prefix) {
  if (text->substr(0, prefix.size()) != prefix) return false;
  text->remove_prefix(prefix.size());
  return true;
}

bool TakeSuffix(std::string_view* text, std::string_view suffix) {
  if (text->size() < suffix.size() ||
      text->substr(text->size() - suffix.size()) != suffix) {
    return false;
  }
  text->remove_suffix(suffix.size());
  return true;
}

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// Splits at a character that stands in no brackets.
std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t start = 0;
  for (size_t k = 0; k <= text.size(); ++k) {
    char c = k < text.size() ? text[k] : separator;
    if (c == '[' || c == '(') ++depth;
    if (c == ']' || c == ')') --depth;
    if (c == separator && depth == 0) {
      std::string_view part = Trim(text.substr(start, k - start));
      if (!part.empty()) parts.push_back(part);
      start = k + 1;
    }
  }
  return parts;
}

bool ParseInt(std::string_view text, int64_t* value) {
  std::string copy(text);
  char* end = nullptr;
  bool negative = !copy.empty() && copy[0] == '-';
  const char* digits = copy.c_str() + negative;
  if (*digits < '0' || *digits > '9') return false;
  uint64_t magnitude = std::strtoull(digits, &end, 0);
  if (*end) return false;
  *value = static_cast<int64_t>(negative ? -magnitude : magnitude);
  return true;
}

uint16_t HalfBits(float value) {
  // The inline constants: 0.5, 1, 2, 4 and 1/(2 pi).
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) == 0) return static_cast<uint16_t>(bits >> 16);
  uint32_t exponent = (bits >> 23 & 0xff) - 127 + 15;
  uint32_t mantissa = (bits >> 13 & 0x3ff) + (bits >> 12 & 1);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) |
                               ((exponent << 10) + mantissa));
}

// The parser of one instruction.
class Parser {
 public:
  Parser(Arch arch, int accum_offset, uint64_t pc, const uint8_t* bytes,
         std::string_view text)
      : arch_(arch), accum_offset_(accum_offset), text_(text) {
    inst_.pc = pc;
    std::memcpy(&word_, bytes, 4);
    inst_.text = Intern(text);
  }

  Inst Parse(const uint8_t* bytes, uint64_t length) {
    inst_.bytes = static_cast<uint8_t>(length);
    inst_.imm = static_cast<int16_t>(word_ & 0xffff);
    // LLVM's remark on what no assembler would write.
    if (Contains(text_, "/*")) Refuse("invalid encoding");
    size_t end = text_.find_first_of(" \t");
    std::string_view name = text_.substr(0, end);
    std::string_view rest =
        end == std::string_view::npos ? "" : Trim(text_.substr(end));
    if (TakeSuffix(&name, "_e64_dpp") || TakeSuffix(&name, "_e32") ||
        TakeSuffix(&name, "_e64") || TakeSuffix(&name, "_dpp")) {
    } else if (TakeSuffix(&name, "_sdwa")) {
      inst_.sdwa = true;
    }
    name_ = name;
    inst_.mnemonic = Intern(name);
    op_ = FindOp(inst_.mnemonic, arch_);
    if (!op_) Refuse("unknown instruction");
    inst_.execute = op_->execute;
    inst_.inst_class = op_->inst_class;
    inst_.mfma_passes = op_->mfma_passes;
    inst_.keeps_high = op_->modifiers & kKeepsHigh;
    if (inst_.sdwa) Need(kSdwa, "SDWA");
    // v_fma_mix and its like: op_sel_hi says which operands are halves.
    if (Contains(name_, "_mix")) {
      for (Operand& o : inst_.src) o.op_sel_hi = false;
    }
    // s_nop, s_waitcnt, s_branch, s_sendmsg: the number is imm.
    if (types_ = 0, CountTypes(), types_ == 0 && name_.substr(0, 2) == "s_") {
      return inst_;
    }
    ParseRest(rest);
    if (name_.substr(0, 11) == "v_mfma_scal") ScaleSelect(bytes);
    if (name_ == "ds_swizzle_b32") {
      inst_.offset = static_cast<int32_t>(word_ & 0xffff);
    }
    if (Contains(name_, "_load_lds_")) inst_.lds = true;
    // Formats of less than 8 bits take half the time.
    if (Contains(name_, "_f8f6f4") && inst_.cbsz > 1 && inst_.blgp > 1) {
      inst_.mfma_passes /= 2;
    }
    Append();
    Finish();
    return inst_;
  }

 private:
  [[noreturn]] void Refuse(const std::string& why) const {
    throw Fault{Check::kUnsupported, why + ": " + std::string(text_), -1,
                inst_.pc};
  }

  void Need(uint32_t modifier, std::string_view what) const {
    if (!(op_->modifiers & modifier)) {
      Refuse("modifier " + std::string(what) + " of this instruction");
    }
  }

  void CountTypes() {
    for (Type type : op_->dst) types_ += type != Type::kNone;
    for (Type type : op_->src) types_ += type != Type::kNone;
  }

  void ParseRest(std::string_view rest) {
    std::vector<std::string_view> pieces = Split(rest, ',');
    std::vector<std::string_view> operands, modifiers;
    for (size_t k = 0; k < pieces.size(); ++k) {
      std::vector<std::string_view> words = Split(pieces[k], ' ');
      for (size_t w = 0; w < words.size(); ++w) {
        bool operand = w == 0 && !(k == 0 && types_ == 0);
        (operand ? operands : modifiers).push_back(words[w]);
      }
    }
    ParseOperands(operands);
    for (std::string_view modifier : modifiers) ParseModifier(modifier);
  }

  void ParseOperands(const std::vector<std::string_view>& operands) {
    int dsts = (op_->dst[0] != Type::kNone) + (op_->dst[1] != Type::kNone);
    int sources = types_ - dsts;
    size_t next = 0;
    // An atomic that returns nothing, a load to LDS: no destination.
    bool absent = static_cast<int>(operands.size()) == types_ - 1 && dsts == 1;
    if (!absent && static_cast<int>(operands.size()) != types_) {
      Refuse("the number of operands of this instruction");
    }
    if (!absent) {
      for (int k = 0; k < dsts; ++k) {
        ParseOperand(operands[next++], op_->dst[k], &inst_.dst[k]);
        if (inst_.dst[k].kind != Operand::Kind::kVector &&
            inst_.dst[k].kind != Operand::Kind::kScalar) {
          Refuse("destination of this instruction");
        }
      }
    }
    for (int k = 0; k < sources; ++k) {
      ParseOperand(operands[next++], op_->src[k], &inst_.src[k]);
    }
    sources_ = sources;
  }

  void ParseOperand(std::string_view text, Type type, Operand* o) {
    o->type = type;
    if (TakePrefix(&text, "sext(")) {
      Need(kSdwa, "sext");
      TakeSuffix(&text, ")");
      o->sext = true;
    }
    if (TakePrefix(&text, "neg(")) {
      TakeSuffix(&text, ")");
      o->neg = true;
    } else if (text.size() > 1 && text[0] == '-' &&
               (text[1] < '0' || text[1] > '9')) {
      text.remove_prefix(1);
      o->neg = true;
    }
    if (text.size() > 2 && text.front() == '|' && text.back() == '|') {
      text = text.substr(1, text.size() - 2);
      o->abs = true;
    }
    if (o->neg || o->abs) Need(kNegAbs, "neg or abs");
    if (text == "off") {
      o->kind = Operand::Kind::kOff;
      return;
    }
    if (ParseRegister(text, o)) {
      int registers = RegistersOf(type);
      // A wider operand of the text is the Op's mistake.
      if (registers && o->count != registers) {
        Refuse("the width of operand " + std::string(text));
      }
      return;
    }
    ParseConstant(text, type, o);
  }

  bool ParseRegister(std::string_view text, Operand* o) {
    struct Special {
      std::string_view name;
      uint16_t reg;
      uint8_t count;
    };
    static constexpr Special kSpecial[] = {
        {"vcc", kVcc, 2},
        {"vcc_lo", kVcc, 1},
        {"vcc_hi", kVcc + 1, 1},
        {"exec", kExec, 2},
        {"exec_lo", kExec, 1},
        {"exec_hi", kExec + 1, 1},
        {"m0", kM0, 1},
        {"flat_scratch", kFlatScratch, 2},
        {"flat_scratch_lo", kFlatScratch, 1},
        {"flat_scratch_hi", kFlatScratch + 1, 1},
        {"xnack_mask", kXnackMask, 2},
        {"xnack_mask_lo", kXnackMask, 1},
        {"xnack_mask_hi", kXnackMask + 1, 1},
    };
    if (text == "src_scc" || text == "src_vccz" || text == "src_execz") {
      o->kind = text == "src_scc"    ? Operand::Kind::kScc
                : text == "src_vccz" ? Operand::Kind::kVccz
                                     : Operand::Kind::kExecz;
      o->count = static_cast<uint8_t>(RegistersOf(o->type));
      return true;
    }
    for (const Special& special : kSpecial) {
      if (text == special.name) {
        o->kind = Operand::Kind::kScalar;
        o->reg = special.reg;
        o->count = special.count;
        return true;
      }
    }
    int first = 0;
    o->kind = Operand::Kind::kScalar;
    if (TakePrefix(&text, "ttmp")) {
      first = kTtmp;
    } else if (TakePrefix(&text, "s")) {
    } else if (TakePrefix(&text, "v")) {
      o->kind = Operand::Kind::kVector;
    } else if (TakePrefix(&text, "a")) {
      o->kind = Operand::Kind::kVector;
      first = accum_offset_;
    } else {
      return false;
    }
    int64_t low, high;
    if (ParseInt(text, &low)) {
      high = low;
    } else if (TakePrefix(&text, "[") && TakeSuffix(&text, "]")) {
      size_t colon = text.find(':');
      if (colon == std::string_view::npos) {
        if (!ParseInt(text, &low)) return false;
        high = low;
      } else if (!ParseInt(text.substr(0, colon), &low) ||
                 !ParseInt(text.substr(colon + 1), &high)) {
        return false;
      }
    } else {
      return false;
    }
    o->reg = static_cast<uint16_t>(first + low);
    o->count = static_cast<uint8_t>(high - low + 1);
    return true;
  }

  void ParseConstant(std::string_view text, Type type, Operand* o) {
    o->kind = Operand::Kind::kConstant;
    o->count = 0;
    if (text.substr(0, 6) == "hwreg(") {
      o->constant = word_ & 0xffff;
      return;
    }
    if (text.substr(0, 8) == "gpr_idx(") {
      o->constant = word_ >> 8 & 15;
      return;
    }
    if (text == "src_shared_base" || text == "src_private_base") {
      // As 32 bits the hardware gives something else, so LLVM reads a pair.
      if (RegistersOf(type) != 2) Refuse("32 bits of an aperture");
      uint64_t high =
          text == "src_shared_base" ? kSharedAperture : kPrivateAperture;
      o->constant = high << 32;
      return;
    }
    if (type == Type::kWide) {
      // C of an MFMA.
      type = Contains(name_, "_f64") ? Type::kF64 : Type::kF32;
    }
    // A literal that could have been an inline constant.
    bool literal = TakePrefix(&text, "lit(") && TakeSuffix(&text, ")");
    int64_t value;
    bool wide =
        RegistersOf(type) == 2 && type != Type::kPkF32 && type != Type::kPkB32;
    if (ParseInt(text, &value)) {
      literal |= Contains(text, "0x");
      if (literal && type == Type::kF64) {
        // A literal is the high half of a double.
        if (static_cast<uint64_t>(value) >> 32 == 0) value <<= 32;
      } else if (literal && type == Type::kI64) {
        value = static_cast<int32_t>(value);
      }
      o->constant =
          wide ? static_cast<uint64_t>(value) : static_cast<uint32_t>(value);
      return;
    }
    std::string copy(text);
    char* end = nullptr;
    double number = std::strtod(copy.c_str(), &end);
    if (copy.empty() || *end) Refuse("operand " + copy);
    // 1/(2 pi), of which the text has fewer digits.
    bool inverse = number > 0.159 && number < 0.1592;
    float single = inverse ? 0.15915494f : static_cast<float>(number);
    uint32_t bits;
    std::memcpy(&bits, &single, 4);
    if (type == Type::kF16 || type == Type::kPkF16) {
      o->constant = inverse ? 0x3118 : HalfBits(single);
    } else if (type == Type::kBF16 || type == Type::kPkBF16) {
      o->constant = bits >> 16;
    } else if (wide) {
      uint64_t bits64;
      std::memcpy(&bits64, &number, 8);
      o->constant = inverse ? 0x3fc45f306dc9c882 : bits64;
    } else {
      // Integer operations see the single precision number too.
      o->constant = bits;
    }
  }

  // "name:value" with brackets for a list.
  void ParseModifier(std::string_view text) {
    size_t colon = text.find(':');
    std::string_view name = text.substr(0, colon);
    std::string_view value =
        colon == std::string_view::npos ? "" : text.substr(colon + 1);
    int64_t number = 0;
    bool numeric = ParseInt(value, &number);
    auto is = [&](std::string_view what, uint32_t modifier) {
      if (name != what) return false;
      Need(modifier, text);
      return true;
    };
    auto flag = [&](std::string_view what, uint32_t modifier, bool* to) {
      if (!is(what, modifier)) return false;
      *to = true;
      return true;
    };
    if (ParseDpp(text, name, value, number)) return;
    if (is("clamp", kClamp)) {
      inst_.clamp = true;
    } else if (is("mul", kOmod) && (number == 2 || number == 4)) {
      inst_.omod = static_cast<uint8_t>(number / 2);
    } else if (is("div", kOmod) && number == 2) {
      inst_.omod = 3;
    } else if (is("dst_sel", kSdwa)) {
      inst_.dst_sel = ParseSelect(value);
    } else if (is("src0_sel", kSdwa)) {
      inst_.src[0].sdwa = ParseSelect(value);
    } else if (is("src1_sel", kSdwa)) {
      inst_.src[1].sdwa = ParseSelect(value);
    } else if (is("dst_unused", kSdwa)) {
      inst_.dst_unused = value == "UNUSED_PAD"        ? 0
                         : value == "UNUSED_SEXT"     ? 1
                         : value == "UNUSED_PRESERVE" ? 2
                                                      : 3;
      if (inst_.dst_unused == 3) Refuse("modifier " + std::string(text));
    } else if (is("op_sel", kOpSel | kPacked | kMfma)) {
      SetOpSel(ParseBits(value));
    } else if (is("op_sel_hi", kPacked | kMfma)) {
      std::vector<bool> bits = ParseBits(value);
      for (size_t k = 0; k < bits.size(); ++k) {
        inst_.op_sel_hi |= bits[k] << k;
        if (k < 5) inst_.src[k].op_sel_hi = bits[k];
      }
    } else if (is("neg_lo", kPacked)) {
      std::vector<bool> bits = ParseBits(value);
      for (size_t k = 0; k < bits.size() && k < 5; ++k) {
        inst_.src[k].neg_lo = bits[k];
      }
    } else if (is("neg_hi", kPacked)) {
      std::vector<bool> bits = ParseBits(value);
      for (size_t k = 0; k < bits.size() && k < 5; ++k) {
        inst_.src[k].neg_hi = bits[k];
      }
    } else if (is("neg", kMfma)) {
      std::vector<bool> bits = ParseBits(value);
      for (size_t k = 0; k < bits.size() && k < 5; ++k) {
        inst_.src[k].neg = bits[k];
      }
    } else if (is("bitop3", kBitop3) && numeric) {
      inst_.bitop3 = static_cast<uint8_t>(number);
    } else if (is("cbsz", kMfma) && numeric) {
      inst_.cbsz = static_cast<uint8_t>(number);
    } else if (is("abid", kMfma) && numeric) {
      inst_.abid = static_cast<uint8_t>(number);
    } else if (is("blgp", kMfma) && numeric) {
      inst_.blgp = static_cast<uint8_t>(number);
    } else if (is("offset", kAddress) &&
               (numeric || name_ == "ds_swizzle_b32")) {
      inst_.offset = static_cast<int32_t>(number);
    } else if (is("offset0", kAddress) && numeric) {
      inst_.offset = static_cast<int32_t>(number);
    } else if (is("offset1", kAddress) && numeric) {
      inst_.offset1 = static_cast<int32_t>(number);
    } else if (flag("glc", kAddress, &inst_.glc) ||
               flag("sc0", kAddress, &inst_.glc) ||
               flag("sc1", kAddress, &inst_.sc1) ||
               flag("scc", kAddress, &inst_.sc1) ||
               flag("nt", kAddress, &inst_.nt) ||
               flag("slc", kAddress, &inst_.slc) ||
               flag("lds", kAddress, &inst_.lds) ||
               flag("gds", kAddress, &inst_.gds) ||
               flag("offen", kAddress, &inst_.offen) ||
               flag("idxen", kAddress, &inst_.idxen)) {
      if (inst_.gds) Refuse("global data share");
    } else {
      Refuse("modifier " + std::string(text));
    }
  }

  bool ParseDpp(std::string_view text, std::string_view name,
                std::string_view value, int64_t number) {
    struct Control {
      std::string_view name;
      DppControl control;
    };
    static constexpr Control kControls[] = {
        {"row_shl", DppControl::kRowShl},
        {"row_shr", DppControl::kRowShr},
        {"row_ror", DppControl::kRowRor},
        {"wave_shl", DppControl::kWaveShl},
        {"wave_rol", DppControl::kWaveRol},
        {"wave_shr", DppControl::kWaveShr},
        {"wave_ror", DppControl::kWaveRor},
        {"row_mirror", DppControl::kRowMirror},
        {"row_half_mirror", DppControl::kRowHalfMirror},
        {"row_newbcast", DppControl::kRowNewbcast},
    };
    auto set = [&](DppControl control, int64_t amount) {
      Need(kDpp, text);
      inst_.dpp = control;
      inst_.dpp_value = static_cast<uint8_t>(amount);
      return true;
    };
    for (const Control& control : kControls) {
      if (name == control.name) return set(control.control, number);
    }
    if (name == "row_bcast" && number == 15) {
      return set(DppControl::kRowBcast15, 0);
    }
    if (name == "row_bcast" && number == 31) {
      return set(DppControl::kRowBcast31, 0);
    }
    if (name == "quad_perm") {
      TakePrefix(&value, "[");
      TakeSuffix(&value, "]");
      std::vector<std::string_view> parts = Split(value, ',');
      int64_t all = 0;
      for (size_t k = 0; k < 4 && k < parts.size(); ++k) {
        int64_t one;
        if (!ParseInt(parts[k], &one)) Refuse("modifier " + std::string(text));
        all |= one << 2 * k;
      }
      return set(DppControl::kQuadPerm, all);
    }
    if (name == "row_mask") {
      Need(kDpp, text);
      inst_.row_mask = static_cast<uint8_t>(number);
      return true;
    }
    if (name == "bank_mask") {
      Need(kDpp, text);
      inst_.bank_mask = static_cast<uint8_t>(number);
      return true;
    }
    if (name == "bound_ctrl") {
      Need(kDpp, text);
      inst_.bound_ctrl = true;
      return true;
    }
    return false;
  }

  SdwaSelect ParseSelect(std::string_view value) const {
    static constexpr std::string_view kNames[] = {
        "BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"};
    for (int k = 0; k < 7; ++k) {
      if (value == kNames[k]) return static_cast<SdwaSelect>(k);
    }
    Refuse("selection " + std::string(value));
  }

  std::vector<bool> ParseBits(std::string_view value) const {
    TakePrefix(&value, "[");
    TakeSuffix(&value, "]");
    std::vector<bool> bits;
    for (std::string_view part : Split(value, ',')) {
      if (part != "0" && part != "1") {
        Refuse("list [" + std::string(value) + "]");
      }
      bits.push_back(part == "1");
    }
    return bits;
  }

  // Of VOP3, the bit after those of the sources is the destination's.
  void SetOpSel(const std::vector<bool>& bits) {
    for (size_t k = 0; k < bits.size(); ++k) {
      inst_.op_sel |= bits[k] << k;
      if (!(op_->modifiers & kPacked) && k + 1 == bits.size()) {
        inst_.op_sel_dst = bits[k];
      } else if (k < 5) {
        inst_.src[k].op_sel = bits[k];
      }
    }
  }

  // Byte of the scale operands, in the first of the instruction's two parts.
  void ScaleSelect(const uint8_t* bytes) {
    uint64_t first;
    std::memcpy(&first, bytes, 8);
    inst_.op_sel_dst = false;
    for (Operand& o : inst_.src) o.op_sel = o.op_sel_hi = false;
    for (int k = 0; k < 2; ++k) {
      inst_.src[3 + k].op_sel = first >> (11 + k) & 1;
      inst_.src[3 + k].op_sel_hi = first >> (59 + k) & 1;
    }
  }

  // Operands that the text does not name.
  void Append() {
    if (op_->modifiers & kReadsDst) {
      Operand& o = inst_.src[sources_++];
      o.kind = inst_.dst[0].kind;
      o.type = inst_.dst[0].type;
      o.reg = inst_.dst[0].reg;
      o.count = inst_.dst[0].count;
    }
    if (op_->modifiers & kReadsVcc) {
      Operand& o = inst_.src[sources_++];
      o.kind = Operand::Kind::kScalar;
      o.type = Type::kMask;
      o.reg = kVcc;
      o.count = 2;
    }
  }

  void Finish() {
    inst_.plain = inst_.dpp == DppControl::kNone && !inst_.sdwa &&
                  !inst_.clamp && !inst_.omod && !inst_.op_sel_dst &&
                  !inst_.keeps_high;
    for (const Operand& o : inst_.src) {
      if (o.neg || o.abs || o.sext || o.op_sel) inst_.plain = false;
    }
    if (inst_.dpp != DppControl::kNone) SetDppLanes(&inst_);
    for (const Operand& o : inst_.dst) Use(o);
    for (const Operand& o : inst_.src) Use(o);
  }

  void Use(const Operand& o) {
    bool scalar = o.kind == Operand::Kind::kScalar;
    if (!scalar && o.kind != Operand::Kind::kVector) return;
    for (int k = 0; k < inst_.use_count; ++k) {
      RegRange& use = inst_.uses[k];
      if (use.scalar == scalar && use.first == o.reg && use.count == o.count) {
        return;
      }
    }
    inst_.uses[inst_.use_count++] = {scalar, o.reg, o.count};
  }

  const Arch arch_;
  const int accum_offset_;
  const std::string_view text_;
  std::string_view name_;
  const Op* op_ = nullptr;
  uint32_t word_ = 0;
  int types_ = 0, sources_ = 0;
  Inst inst_;
};

// Decodes with the host's own rounding, whatever the running wave's is: the
// constants of an instruction are the same for all.
class HostRounding {
 public:
  HostRounding() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~HostRounding() { _mm_setcsr(saved_); }
  HostRounding(const HostRounding&) = delete;

 private:
  const unsigned saved_;
};

// A VALU instruction between s_set_gpr_idx_on and s_set_gpr_idx_off: M0 has
// what is added to the numbers of its vector registers, and to which of them.
void ExecuteIndexed(Wave& wave, const Inst& inst) {
  Inst moved = inst;
  int index = wave.s[kM0] & 0xff;
  int which = wave.s[kM0] >> 12;
  moved.use_count = 0;
  auto move = [&](Operand* o, bool enabled) {
    if (o->kind != Operand::Kind::kVector) return;
    // A number beyond v255 is no a register.
    const int limit =
        o->reg < wave.accum_offset ? kVectorRegisters / 2 : kVectorRegisters;
    if (enabled) o->reg += index;
    if (o->reg + o->count > limit) {
      throw Fault{
          Check::kUnsupported,
          "an index beyond the vector registers: " + std::to_string(index)};
    }
    moved.uses[moved.use_count++] = {false, o->reg, o->count};
  };
  for (int k = 0; k < 3; ++k) move(&moved.src[k], which >> k & 1);
  move(&moved.dst[0], which & 8);
  wave.CheckUses(moved);
  inst.indexed(wave, moved);
}

class LazyProgram : public Program {
 public:
  LazyProgram(Arch arch, uint64_t base, uint64_t size, int accum_offset)
      : arch_(arch), accum_offset_(accum_offset) {
    base_ = base;
    count_ = size / 4;
    table_ = std::make_unique<std::atomic<const Inst*>[]>(count_);
  }

  Program& WithAccumOffset(int accum_offset) override {
    if (accum_offset == accum_offset_) return *this;
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<Program>& other = others_[accum_offset];
    if (!other) {
      other =
          std::make_unique<LazyProgram>(arch_, base_, 4 * count_, accum_offset);
    }
    return *other;
  }

 protected:
  const Inst& Add(uint64_t pc) override {
    uint64_t offset = pc - base_;
    if (pc < base_ || offset / 4 >= count_ || offset % 4) {
      throw Fault{Check::kOutOfBounds, "no instruction at this address", -1,
                  pc};
    }
    HostRounding rounding;
    Inst inst = DecodeAt(offset);
    std::lock_guard<std::mutex> lock(mutex_);
    const Inst* other = table_[offset / 4].load(std::memory_order_relaxed);
    if (other) return *other;
    if (IsNamed(inst, "s_set_gpr_idx_on")) AddIndexed(offset + inst.bytes);
    return Keep(inst, offset);
  }

 private:
  static bool IsNamed(const Inst& inst, const char* mnemonic) {
    return std::strcmp(inst.mnemonic, mnemonic) == 0;
  }

  const Inst& Keep(const Inst& inst, uint64_t offset) {
    insts_.push_back(inst);
    table_[offset / 4].store(&insts_.back(), std::memory_order_release);
    return insts_.back();
  }

  Inst DecodeAt(uint64_t offset) const {
    return Decode(arch_, accum_offset_, base_ + offset,
                  reinterpret_cast<const uint8_t*>(base_ + offset),
                  4 * count_ - offset);
  }

  // Whether it is modelled between s_set_gpr_idx_on and s_set_gpr_idx_off. A
  // destination that is a source too (v_fmac) is not: by which of the two bits
  // it is indexed the documents leave open.
  static bool IsIndexable(const Inst& inst) {
    if (inst.inst_class != InstClass::kValu &&
        inst.inst_class != InstClass::kTrans) {
      return false;
    }
    return inst.plain && inst.src[3].kind == Operand::Kind::kNone &&
           inst.dst[0].kind == Operand::Kind::kVector &&
           std::strstr(inst.mnemonic, "mac") == nullptr;
  }

  // Decodes what follows s_set_gpr_idx_on. With the lock held.
  void AddIndexed(uint64_t offset) {
    while (offset < 4 * count_) {
      Inst inst = DecodeAt(offset);
      if (IsNamed(inst, "s_set_gpr_idx_off")) return;
      bool scalar = inst.inst_class == InstClass::kSalu ||
                    inst.inst_class == InstClass::kWait ||
                    inst.inst_class == InstClass::kOtherScalar;
      if (IsIndexable(inst)) {
        inst.indexed = inst.execute;
        inst.execute = ExecuteIndexed;
        Keep(inst, offset);
      } else if (!scalar) {
        throw Fault{Check::kUnsupported,
                    "between s_set_gpr_idx_on and s_set_gpr_idx_off: " +
                        std::string(inst.text),
                    -1, inst.pc};
      }
      offset += inst.bytes;
    }
  }

  const Arch arch_;
  const int accum_offset_;
  std::mutex mutex_;
  std::deque<Inst> insts_;                          // Its elements never move.
  std::map<int, std::unique_ptr<Program>> others_;  // By accum_offset.
};

}  // namespace

Inst Decode(Arch arch, int accum_offset, uint64_t pc, const uint8_t* bytes,
            uint64_t size) {
  std::string text;
  uint64_t length = Disassembler::For(arch).Text(pc, bytes, size, &text);
  if (length == 0) {
    throw Fault{Check::kUnsupported, "no instruction at this address", -1, pc};
  }
  std::string_view line = text;
  size_t comment = std::min(line.find(';'), line.find("//"));
  line = Trim(line.substr(0, comment));
  return Parser(arch, accum_offset, pc, bytes, line).Parse(bytes, length);
}

std::unique_ptr<Program> Program::Create(Arch arch, uint64_t base,
                                         uint64_t size) {
  return std::make_unique<LazyProgram>(arch, base, size, 256);
}

}  // namespace amdgpu_sim
