// SPDX-License-Identifier: Apache-2.0

// Checks formats, floating-point instructions and their modes against
// independent arithmetic on the host: wider types rounded by hand.
#include "tests/amdgpu_sim/isa/float.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/amdgpu_sim/isa/ops.h"
#include "tests/amdgpu_sim/isa/valu.h"

namespace amdgpu_sim {
namespace {

int failures = 0;

void Fail(const std::string& what, double got, double want) {
  if (++failures <= 50) {
    std::fprintf(stderr, "%s: got %a, not %a\n", what.c_str(), got, want);
  }
}

bool Same(double a, double b) {
  if (a != a || b != b) return a != a && b != b;
  return a == b && std::signbit(a) == std::signbit(b);
}

void Expect(const std::string& what, double got, double want) {
  if (!Same(got, want)) Fail(what, got, want);
}

constexpr uint32_t kMode = 0x3f0;   // Nearest even, denormals, DX10, IEEE.
constexpr uint32_t kFlush = 0x3c0;  // f32 without denormals.

// A wave and the ops of this architecture.
class Machine {
 public:
  explicit Machine(Arch arch) {
    wave_ = std::make_unique<Wave>();
    wave_->arch = arch;
    wave_->set_s64(kExec, ~uint64_t{0});
    SetMode(kMode);
    uint8_t bit = uint8_t{1} << static_cast<int>(arch);
    for (Ops (*part)() : {FloatOps, PackedOps}) {
      for (const Op& op : part()) {
        if (op.archs & bit) ops_.push_back(op);
      }
    }
  }

  void SetMode(uint32_t bits) {
    wave_->mode.bits = bits;
    ApplyMode(*wave_);
  }

  // Runs `mnemonic` on values of sources from v[16], 2 registers each.
  template <typename R, typename... T>
  std::vector<R> Run(const char* mnemonic, const std::vector<T>&... sources) {
    return RunInst<R>(mnemonic, Inst(), sources...);
  }

  template <typename R, typename... T>
  std::vector<R> RunInst(const char* mnemonic, Inst inst,
                         const std::vector<T>&... sources) {
    const Op* op = nullptr;
    for (const Op& candidate : ops_) {
      if (std::strcmp(candidate.mnemonic, mnemonic) == 0) op = &candidate;
    }
    if (!op) {
      std::fprintf(stderr, "no %s\n", mnemonic);
      ++failures;
      return std::vector<R>(std::get<0>(std::tie(sources...)).size());
    }
    size_t size = std::get<0>(std::tie(sources...)).size();
    inst.dst[0].kind = Operand::Kind::kVector;
    inst.dst[0].reg = 0;
    inst.dst[1].kind = Operand::Kind::kScalar;
    inst.dst[1].reg = kVcc;
    int k = 0;
    for (; k < static_cast<int>(sizeof...(T)); ++k) {
      inst.src[k].kind = Operand::Kind::kVector;
      inst.src[k].reg = 16 + 2 * k;
    }
    if (op->modifiers & kReadsVcc) {
      inst.src[k].kind = Operand::Kind::kScalar;
      inst.src[k].reg = kVcc;
    }
    inst.keeps_high = op->modifiers & kKeepsHigh;
    inst.plain = inst.plain && !inst.keeps_high;
    std::vector<R> results(size);
    for (size_t first = 0; first < size; first += kLanes) {
      size_t count = std::min<size_t>(kLanes, size - first);
      for (size_t lane = 0; lane < count; ++lane) {
        int reg = 16;
        ((Store(reg, lane, sources[first + lane]), reg += 2), ...);
      }
      op->execute(*wave_, inst);
      for (size_t lane = 0; lane < count; ++lane) {
        results[first + lane] = GetLane<R>(wave_->v[0], lane);
      }
    }
    return results;
  }

  Wave& wave() { return *wave_; }

 private:
  template <typename T>
  void Store(int reg, int lane, T value) {
    SetLane(wave_->v[reg], lane, value);
  }

  std::unique_ptr<Wave> wave_;
  Ops ops_;
};

// ---------------------------------------------------------------------------
// Formats.

// `value` to a grid of `mantissa` bits and least exponent `least` (that of
// the smallest normal), exact up to 100 bits.
__float128 Rounded(__float128 value, int mantissa, int least, int rounding) {
  if (value == 0 || value != value) return value;
  __float128 size = value < 0 ? -value : value;
  __float128 unit = 1;
  while (size >= unit * 2) unit *= 2;
  while (size < unit) unit /= 2;
  __float128 smallest = 1;
  for (int k = 0; k < -least; ++k) smallest /= 2;
  if (unit < smallest) unit = smallest;
  for (int k = 0; k < mantissa; ++k) unit /= 2;
  __float128 scaled = size / unit;
  __float128 whole = 0;
  for (__float128 bit = static_cast<__float128>(1ull << 60); bit >= 1;
       bit /= 2) {
    if (whole + bit <= scaled) whole += bit;
  }
  __float128 rest = scaled - whole;
  bool odd = static_cast<uint64_t>(whole) & 1;
  bool away = rounding == kToEven ? rest > 0.5 || (rest == 0.5 && odd)
              : rounding == kUp   ? rest > 0 && value > 0
              : rounding == kDown ? rest > 0 && value < 0
                                  : false;
  if (away) whole += 1;
  return value < 0 ? -(whole * unit) : whole * unit;
}

double RoundedHalf(__float128 value, int rounding) {
  double result = static_cast<double>(Rounded(value, 10, -14, rounding));
  if (std::fabs(result) > 65504) {
    bool stays = rounding == kToZero || (rounding == kUp && result < 0) ||
                 (rounding == kDown && result > 0);
    return std::copysign(stays ? 65504 : INFINITY, result);
  }
  return result;
}

void CheckMini(const char* name, const MiniFormat& f) {
  std::vector<float> values;
  for (int code = 0; code < 2 * f.sign(); ++code) {
    float value = DecodeMini(f, code);
    int field = code >> f.mantissa_bits & ((1 << f.exponent_bits) - 1);
    int fraction = code & ((1 << f.mantissa_bits) - 1);
    int magnitude = code & (f.sign() - 1);
    bool negative = code & f.sign();
    double want =
        std::ldexp(field ? fraction + (1 << f.mantissa_bits) : fraction,
                   (field ? field : 1) - f.bias - f.mantissa_bits);
    if (magnitude > f.max_code) want = NAN;
    if (magnitude == f.infinity) want = INFINITY;
    if (negative) want = -want;
    if (f.unsigned_zero && code == f.sign()) want = NAN;
    std::string label = std::string(name) + " " + std::to_string(code);
    Expect(label, value, want);
    uint32_t back = EncodeMini(f, BitsOf(value), false);
    if (value == value) {
      Expect(label + " back", back, code);
    } else {
      Expect(label + " NaN back", DecodeMini(f, back), NAN);
    }
    if (!negative && magnitude <= f.max_code) values.push_back(value);
  }
  // Halfway between neighbours, and next to that.
  for (size_t k = 0; k + 1 < values.size(); ++k) {
    float middle = (values[k] + values[k + 1]) / 2;
    size_t even = k & 1 ? k + 1 : k;
    std::string label = std::string(name) + " above " + std::to_string(k);
    for (float sign : {1.0f, -1.0f}) {
      auto encode = [&](float value) {
        uint32_t code = EncodeMini(f, BitsOf(value * sign), false);
        return std::fabs(DecodeMini(f, code));
      };
      Expect(label, encode(middle), values[even]);
      Expect(label, encode(std::nextafter(middle, 0.0f)), values[k]);
      Expect(label, encode(std::nextafter(middle, 1e30f)), values[k + 1]);
    }
  }
  // Past the largest.
  float most = values.back();
  float step = most - values[values.size() - 2];
  float limit = most + step / 2;
  float beyond = f.nan < 0 ? most : f.infinity < 0 ? NAN : INFINITY;
  auto encode = [&](float value, bool saturate) {
    return DecodeMini(f, EncodeMini(f, BitsOf(value), saturate));
  };
  Expect(name, encode(std::nextafter(limit, 0.0f), false), most);
  Expect(name, encode(std::nextafter(limit, 1e30f), false), beyond);
  Expect(name, encode(1e30f, false), beyond);
  Expect(name, encode(1e30f, true), most);
  Expect(name, encode(-1e30f, true), -most);
  Expect(name, encode(1e-30f, false), 0);
  // Scales, and denormals of a float.
  for (float value : values) {
    float scaled = value * 0x1p-40f;
    Expect(name, DecodeMini(f, EncodeMini(f, BitsOf(scaled), true, -40)),
           value);
  }
  uint32_t tiny = EncodeMini(f, 1, true, -149);
  Expect(name, DecodeMini(f, tiny), 1);
}

void CheckFormats() {
  CheckMini("fp8 fnuz", kFp8Fnuz);
  CheckMini("bf8 fnuz", kBf8Fnuz);
  CheckMini("fp8", kFp8);
  CheckMini("bf8", kBf8);
  CheckMini("fp6", kFp6);
  CheckMini("bf6", kBf6);
  CheckMini("fp4", kFp4);
  Expect("fp8 fnuz most", DecodeMini(kFp8Fnuz, 0x7f), 240);
  Expect("bf8 fnuz most", DecodeMini(kBf8Fnuz, 0x7f), 57344);
  Expect("fp8 most", DecodeMini(kFp8, 0x7e), 448);
  Expect("bf8 most", DecodeMini(kBf8, 0x7b), 57344);
  Expect("fp6 most", DecodeMini(kFp6, 0x1f), 7.5);
  Expect("bf6 most", DecodeMini(kBf6, 0x1f), 28);
  Expect("fp4 most", DecodeMini(kFp4, 0x7), 6);
  Expect("fnuz -0", EncodeMini(kFp8Fnuz, 0x80000000, false), 0);
  Expect("fnuz tiny", EncodeMini(kFp8Fnuz, BitsOf(-1e-20f), false), 0);
  Expect("fnuz infinity", EncodeMini(kFp8Fnuz, 0xff800000, true), 0x80);
  Expect("-0", EncodeMini(kFp8, 0x80000000, false), 0x80);
  Expect("e8m0", DecodeE8m0(0), std::ldexp(1, -127));
  Expect("e8m0", DecodeE8m0(127), 1);
  Expect("e8m0", DecodeE8m0(254), std::ldexp(1, 127));
  Expect("e8m0", DecodeE8m0(255), NAN);

  for (int bits = 0; bits < 0x10000; ++bits) {
    float value = HalfToFloat(bits);
    int field = bits >> 10 & 31;
    int fraction = bits & 0x3ff;
    double want = std::ldexp(field ? fraction + 1024 : fraction,
                             (field ? field : 1) - 25);
    if (field == 31) want = fraction ? NAN : INFINITY;
    if (bits & 0x8000) want = -want;
    Expect("f16", value, want);
    if (value == value) {
      Expect("f16 back", FloatToHalf(value), bits);
      Expect("f16 from double", DoubleToHalf(value), bits);
    }
    float wide = BfloatToFloat(bits);
    if (wide == wide) Expect("bf16 back", FloatToBfloat(wide), bits);
  }
  Expect("bf16 tie", FloatToBfloat(FloatOf(0x3f808000)), 0x3f80);
  Expect("bf16 tie", FloatToBfloat(FloatOf(0x3f818000)), 0x3f82);
  Expect("bf16 above", FloatToBfloat(FloatOf(0x3f808001)), 0x3f81);
  Expect("bf16 overflow", FloatToBfloat(FloatOf(0x7f7fffff)), 0x7f80);
  Expect("bf16 NaN", FloatToBfloat(FloatOf(0x7f800001)), 0x7fc0);
  // Double rounding would take this up.
  Expect("odd", HalfToFloat(DoubleToHalf(1 + 0x1p-11 - 0x1p-50)), 1);
  Expect("odd", HalfToFloat(DoubleToHalf(1 + 0x1p-11 + 0x1p-50)), 1 + 0x1p-10);
}

// ---------------------------------------------------------------------------
// f16 arithmetic.

std::vector<uint16_t> Halves(std::mt19937* random, int count) {
  const uint16_t edges[] = {0,      0x8000, 1,      0x8001, 0x3ff,  0x400,
                            0x3c00, 0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00,
                            0x7e00, 0x3c01, 0x3bff, 0x1400};
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) {
    uint32_t bits = (*random)();
    value = bits & 0x30000 ? bits : edges[bits >> 20 & 15];
  }
  return values;
}

// Rounds a sum, product or fma of halves; infinities by the host.
double HalfReference(double a, double b, double c, bool product, bool sum,
                     int rounding) {
  double simple = product ? (sum ? a * b + c : a * b) : a + b;
  if (!std::isfinite(a) || !std::isfinite(b) || !std::isfinite(c)) {
    return simple;
  }
  __float128 exact = a;
  if (product) exact *= b;
  if (!product) exact += b;
  if (sum) exact += c;
  if (exact == 0) {
    // An exact 0 of unlike signs is -0 only when rounding down.
    double s = product ? (std::signbit(a) != std::signbit(b) ? -0.0 : 0.0) : a;
    double t = product ? c : b;
    if (product && !sum) return s;
    bool both = std::signbit(s) && std::signbit(t);
    bool either = std::signbit(s) || std::signbit(t);
    bool zeros = (product ? a * b == 0 : a == 0) && t == 0;
    if (zeros && both) return -0.0;
    if (zeros && !either) return 0.0;
    return rounding == kDown ? -0.0 : 0.0;
  }
  double result = RoundedHalf(exact, rounding);
  return result == 0 ? std::copysign(0.0, exact < 0 ? -1.0 : 1.0) : result;
}

void CheckHalf() {
  Machine machine(Arch::kGfx942);
  std::mt19937 random(1);
  constexpr int kCount = 6400;
  for (int rounding = 0; rounding < 4; ++rounding) {
    auto a = Halves(&random, kCount);
    auto b = Halves(&random, kCount);
    auto c = Halves(&random, kCount);
    machine.SetMode((kMode & ~0xfu) | rounding << 2);
    auto add = machine.Run<uint16_t>("v_add_f16", a, b);
    auto sub = machine.Run<uint16_t>("v_sub_f16", a, b);
    auto mul = machine.Run<uint16_t>("v_mul_f16", a, b);
    auto fma = machine.Run<uint16_t>("v_fma_f16", a, b, c);
    std::vector<uint32_t> pa(kCount), pb(kCount), pc(kCount);
    for (int k = 0; k < kCount; ++k) {
      pa[k] = a[k] | a[kCount - 1 - k] << 16;
      pb[k] = b[k] | b[kCount - 1 - k] << 16;
      pc[k] = c[k] | c[kCount - 1 - k] << 16;
    }
    auto packed = machine.Run<uint32_t>("v_pk_fma_f16", pa, pb, pc);
    machine.SetMode(kMode);
    for (int k = 0; k < kCount; ++k) {
      double x = HalfToFloat(a[k]), y = HalfToFloat(b[k]);
      double z = HalfToFloat(c[k]);
      std::string label = "f16 rounding " + std::to_string(rounding);
      Expect(label + " add", HalfToFloat(add[k]),
             HalfReference(x, y, 0, false, false, rounding));
      Expect(label + " sub", HalfToFloat(sub[k]),
             HalfReference(x, -y, 0, false, false, rounding));
      Expect(label + " mul", HalfToFloat(mul[k]),
             HalfReference(x, y, 0, true, false, rounding));
      Expect(label + " fma", HalfToFloat(fma[k]),
             HalfReference(x, y, z, true, true, rounding));
      Expect(label + " pk_fma", HalfToFloat(packed[k] & 0xffff),
             HalfToFloat(fma[k]));
      Expect(label + " pk_fma", HalfToFloat(packed[k] >> 16),
             HalfToFloat(fma[kCount - 1 - k]));
    }
  }
  // Denormals off: both ways.
  machine.SetMode(0x330);
  std::vector<uint16_t> a = {0x0001, 0x8001, 0x0400, 0x3c00};
  std::vector<uint16_t> b = {0x3c00, 0x3c00, 0x3800, 0x0001};
  auto mul = machine.Run<uint16_t>("v_mul_f16", a, b);
  for (int k = 0; k < 4; ++k) {
    Expect("f16 flushed", mul[k], k == 1 ? 0x8000 : 0);
  }
  machine.SetMode(kMode | 1 << 23);
  a = {0x7bff, 0xfbff, 0x7c00};
  auto over = machine.Run<uint16_t>("v_add_f16", a, a);
  Expect("f16 overflow", over[0], 0x7bff);
  Expect("f16 overflow", over[1], 0xfbff);
  Expect("f16 infinity", over[2], 0x7c00);
  machine.SetMode(kMode);

  std::vector<uint16_t> all(0x10000);
  for (int k = 0; k < 0x10000; ++k) all[k] = k;
  auto rcp = machine.Run<uint16_t>("v_rcp_f16", all);
  auto sqrt = machine.Run<uint16_t>("v_sqrt_f16", all);
  auto rsq = machine.Run<uint16_t>("v_rsq_f16", all);
  auto exp = machine.Run<uint16_t>("v_exp_f16", all);
  auto log = machine.Run<uint16_t>("v_log_f16", all);
  auto wide = machine.Run<float>("v_cvt_f32_f16", all);
  for (int k = 0; k < 0x10000; ++k) {
    double x = HalfToFloat(k);
    Expect("cvt_f32_f16", wide[k], x);
    auto half = [](double y) {
      return std::isfinite(y) && y != 0 ? RoundedHalf(y, kToEven) : y;
    };
    Expect("rcp_f16", HalfToFloat(rcp[k]), half(1 / x));
    Expect("sqrt_f16", HalfToFloat(sqrt[k]), half(std::sqrt(x)));
    Expect("rsq_f16", HalfToFloat(rsq[k]), half(1 / std::sqrt(x)));
    Expect("exp_f16", HalfToFloat(exp[k]), half(std::exp2(x)));
    Expect("log_f16", HalfToFloat(log[k]), half(std::log2(x)));
  }
}

// ---------------------------------------------------------------------------
// Division: the sequences that LLVM emits.

std::vector<float> Divide(Machine* m, const std::vector<float>& n,
                          const std::vector<float>& d, bool flush) {
  std::vector<float> results;
  for (size_t first = 0; first < n.size(); first += kLanes) {
    size_t last = std::min(first + kLanes, n.size());
    std::vector<float> num(n.begin() + first, n.begin() + last);
    std::vector<float> den(d.begin() + first, d.begin() + last);
    std::vector<float> one(num.size(), 1.0f);
    m->SetMode(flush ? kFlush : kMode);
    auto ds = m->Run<float>("v_div_scale_f32", den, den, num);
    auto ns = m->Run<float>("v_div_scale_f32", num, den, num);
    auto rcp = m->Run<float>("v_rcp_f32", ds);
    m->SetMode(kMode);
    auto negated = ds;
    for (float& value : negated) value = -value;
    auto f0 = m->Run<float>("v_fma_f32", negated, rcp, one);
    auto f1 = m->Run<float>("v_fma_f32", f0, rcp, rcp);
    auto mul = m->Run<float>("v_mul_f32", ns, f1);
    auto f2 = m->Run<float>("v_fma_f32", negated, mul, ns);
    auto f3 = m->Run<float>("v_fma_f32", f2, f1, mul);
    auto f4 = m->Run<float>("v_fma_f32", negated, f3, ns);
    m->SetMode(flush ? kFlush : kMode);
    auto fmas = m->Run<float>("v_div_fmas_f32", f4, f1, f3);
    auto fixed = m->Run<float>("v_div_fixup_f32", fmas, den, num);
    results.insert(results.end(), fixed.begin(), fixed.end());
  }
  m->SetMode(kMode);
  return results;
}

std::vector<double> Divide64(Machine* m, const std::vector<double>& n,
                             const std::vector<double>& d) {
  std::vector<double> results;
  for (size_t first = 0; first < n.size(); first += kLanes) {
    size_t last = std::min(first + kLanes, n.size());
    std::vector<double> num(n.begin() + first, n.begin() + last);
    std::vector<double> den(d.begin() + first, d.begin() + last);
    std::vector<double> one(num.size(), 1.0);
    auto ds = m->Run<double>("v_div_scale_f64", den, den, num);
    auto ns = m->Run<double>("v_div_scale_f64", num, den, num);
    auto rcp = m->Run<double>("v_rcp_f64", ds);
    auto negated = ds;
    for (double& value : negated) value = -value;
    auto f0 = m->Run<double>("v_fma_f64", negated, rcp, one);
    auto f1 = m->Run<double>("v_fma_f64", rcp, f0, rcp);
    auto f2 = m->Run<double>("v_fma_f64", negated, f1, one);
    auto f3 = m->Run<double>("v_fma_f64", f1, f2, f1);
    auto mul = m->Run<double>("v_mul_f64", ns, f3);
    auto f4 = m->Run<double>("v_fma_f64", negated, mul, ns);
    auto fmas = m->Run<double>("v_div_fmas_f64", f4, f3, mul);
    auto fixed = m->Run<double>("v_div_fixup_f64", fmas, den, num);
    results.insert(results.end(), fixed.begin(), fixed.end());
  }
  return results;
}

void CheckDivision() {
  Machine m(Arch::kGfx942);
  std::mt19937_64 random(2);
  std::vector<float> edges = {
      0.0f,        -0.0f,           1.0f,         -1.0f,       3.0f,
      0x1p-149f,   0x3p-149f,       0x1p-127f,    0x1.8p-127f, 0x1p-126f,
      0x1.fp-126f, 0x1p-125f,       0x1p-110f,    0x1.7p-104f, 0x1p-63f,
      0x1p-31f,    0x1.3p31f,       0x1p63f,      0x1.9p96f,   0x1p100f,
      0x1p125f,    0x1p126f,        0x1.4p126f,   0x1.8p126f,  0x1p127f,
      0x1.8p127f,  0x1.fffffep127f, INFINITY,     -INFINITY,   NAN,
      7.0f,        10.0f,           0x1.000002p0f};
  std::vector<float> n, d;
  for (float a : edges) {
    for (float b : edges) {
      n.push_back(a);
      d.push_back(b);
    }
  }
  for (int k = 0; k < 200000; ++k) {
    uint64_t bits = random();
    n.push_back(FloatOf(static_cast<uint32_t>(bits)));
    d.push_back(FloatOf(static_cast<uint32_t>(bits >> 32)));
  }
  // Quotients next to the denormals and next to overflow.
  for (int k = 0; k < 50000; ++k) {
    uint64_t bits = random();
    float a = FloatOf((bits & 0x7fffff) | 0x3f800000);
    float b = FloatOf((bits >> 32 & 0x7fffff) | 0x3f800000);
    int at = static_cast<int>(bits >> 56) - 128;
    int to = (k & 1 ? -130 : 127) + static_cast<int>(bits >> 24 & 15) - 8;
    if (std::abs(at + to) > 125 || std::abs(at) > 125) continue;
    n.push_back(std::ldexp(a, at + to));
    d.push_back(std::ldexp(b, at));
  }
  auto quotients = Divide(&m, n, d, false);
  for (size_t k = 0; k < n.size(); ++k) {
    if (!Same(quotients[k], n[k] / d[k])) {
      std::fprintf(stderr, "%a / %a: ", n[k], d[k]);
    }
    Expect("division", quotients[k], n[k] / d[k]);
  }
  // The mode of XLA's kernels: only results flush.
  quotients = Divide(&m, n, d, true);
  for (size_t k = 0; k < n.size(); ++k) {
    float want = n[k] / d[k];
    if (std::fabs(want) < 0x1p-126f) continue;
    Expect("division, flushing", quotients[k], want);
  }

  std::vector<double> n64, d64;
  std::vector<double> edges64 = {
      0.0,       -0.0,        1.0,       3.0,        0x1p-1074, 0x1p-1023,
      0x1p-1022, 0x1.8p-1022, 0x1p-1000, 0x1p-970,   0x1p-512,  0x1.7p512,
      0x1p1000,  0x1p1020,    0x1p1022,  0x1.8p1022, 0x1p1023,  0x1.fp1023,
      INFINITY,  NAN,         -7.0,      10.0};
  for (double a : edges64) {
    for (double b : edges64) {
      n64.push_back(a);
      d64.push_back(b);
    }
  }
  for (int k = 0; k < 100000; ++k) {
    n64.push_back(DoubleOf(random()));
    d64.push_back(DoubleOf(random()));
  }
  auto quotients64 = Divide64(&m, n64, d64);
  for (size_t k = 0; k < n64.size(); ++k) {
    if (!Same(quotients64[k], n64[k] / d64[k])) {
      std::fprintf(stderr, "%a / %a: ", n64[k], d64[k]);
    }
    Expect("division f64", quotients64[k], n64[k] / d64[k]);
  }
}

// ---------------------------------------------------------------------------
// Transcendental functions against the host's in double.

void CheckOne(Machine* m, const char* mnemonic, const std::vector<float>& in,
              double (*reference)(double)) {
  auto out = m->Run<float>(mnemonic, in);
  int different = 0;
  for (size_t k = 0; k < in.size(); ++k) {
    float x = in[k];
    if (std::fabs(x) < 0x1p-126f) x = std::copysign(0.0f, x);
    double exact = reference(x);
    float want = static_cast<float>(exact);
    if (std::fabs(want) < 0x1p-126f) want = std::copysign(0.0f, want);
    if (Same(out[k], want)) continue;
    ++different;
    if (std::fabs(static_cast<int64_t>(BitsOf(out[k])) - BitsOf(want)) > 1) {
      Fail(std::string(mnemonic) + " " + std::to_string(in[k]), out[k], want);
    }
  }
  std::printf("%s: %d of %zu not correctly rounded\n", mnemonic, different,
              in.size());
  if (different > static_cast<int>(in.size() / 100000)) {
    Fail(std::string(mnemonic) + " roundings", different, 0);
  }
}

void CheckTranscendental() {
  Machine m(Arch::kGfx942);
  std::vector<float> all, small, turns;
  // Every 1024th number, shifted so that all low bits occur.
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 1021) {
    float x = FloatOf(static_cast<uint32_t>(bits));
    if (x == x) all.push_back(x);
  }
  std::mt19937 random(3);
  std::uniform_real_distribution<float> exponents(-130, 130);
  std::uniform_real_distribution<float> angles(-255, 255);
  for (int k = 0; k < 1000000; ++k) {
    small.push_back(exponents(random));
    turns.push_back(k & 1 ? angles(random) : angles(random) / 256);
  }
  for (float x : {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-40f}) {
    all.push_back(x);
  }
  CheckOne(&m, "v_exp_f32", all, [](double x) { return std::exp2(x); });
  CheckOne(&m, "v_exp_f32", small, [](double x) { return std::exp2(x); });
  CheckOne(&m, "v_log_f32", all, [](double x) { return std::log2(x); });
  CheckOne(&m, "v_rcp_f32", all, [](double x) { return 1 / x; });
  CheckOne(&m, "v_sqrt_f32", all, [](double x) { return std::sqrt(x); });
  CheckOne(&m, "v_rsq_f32", all, [](double x) { return 1 / std::sqrt(x); });
  CheckOne(&m, "v_sin_f32", turns, [](double x) {
    double t = x - std::nearbyint(x);
    if (t == 0) return x == 0 ? x : 0.0;
    if (std::fabs(t) == 0.5) return std::copysign(0.0, t);
    return std::sin(2 * M_PI * t);
  });
  CheckOne(&m, "v_cos_f32", turns, [](double x) {
    double t = x - std::nearbyint(x);
    return std::fabs(t) == 0.25 ? 0 : std::cos(2 * M_PI * t);
  });
}

// ---------------------------------------------------------------------------
// Modes, minimum and maximum, conversions.

void CheckModes() {
  Machine m(Arch::kGfx950);
  std::vector<float> a = {1, -1, 1, 0x1p-126f, 1e-40f, 0x1.fffffep127f};
  std::vector<float> b = {0x1p-30f, -0x1p-30f, -0x1p-30f,
                          0,        0,         0x1.fffffep127f};
  const float want[4][6] = {
      {1, -1, 1, 0x1p-126f, 1e-40f, INFINITY},
      {0x1.000002p0f, -1, 1, 0x1p-126f, 1e-40f, INFINITY},
      {1, -0x1.000002p0f, 0x1.fffffep-1f, 0x1p-126f, 1e-40f, 0x1.fffffep127f},
      {1, -1, 0x1.fffffep-1f, 0x1p-126f, 1e-40f, 0x1.fffffep127f},
  };
  for (int rounding = 0; rounding < 4; ++rounding) {
    m.SetMode(kMode | rounding);
    auto sum = m.Run<float>("v_add_f32", a, b);
    m.SetMode(kMode);
    for (int k = 0; k < 6; ++k) {
      Expect("rounding " + std::to_string(rounding), sum[k], want[rounding][k]);
    }
  }
  m.SetMode(kFlush);
  auto sum = m.Run<float>("v_add_f32", a, b);
  std::vector<float> half(6, 0.5f);
  auto product = m.Run<float>("v_mul_f32", a, half);
  std::vector<double> tiny = {0x1p-1074, 1};
  auto kept = m.Run<double>("v_add_f64", tiny, std::vector<double>(2, 0.0));
  auto least = m.Run<float>("v_min_f32", a, half);
  uint32_t mxcsr = _mm_getcsr();
  m.SetMode(kMode);
  Expect("flush in", sum[4], 0);
  Expect("flush out", product[3], 0);
  Expect("flush min", least[4], 0);
  Expect("f64 keeps", kept[0], 0x1p-1074);
  Expect("MXCSR comes back", mxcsr & ~0x3f, MxcsrFor(0, 0));

  const float nan = NAN, signaling = FloatOf(0x7f800001);
  std::vector<float> x = {1, nan, 1, 0.0f, -0.0f, signaling, 1, nan};
  std::vector<float> y = {2, 1, nan, -0.0f, 0.0f, 1, signaling, nan};
  auto min = m.Run<float>("v_min_f32", x, y);
  auto max = m.Run<float>("v_max_f32", x, y);
  const float min_want[] = {1, 1, 1, -0.0f, -0.0f, nan, nan, nan};
  const float max_want[] = {2, 1, 1, 0.0f, 0.0f, nan, nan, nan};
  for (int k = 0; k < 8; ++k) {
    Expect("min " + std::to_string(k), min[k], min_want[k]);
    Expect("max " + std::to_string(k), max[k], max_want[k]);
  }
  m.SetMode(kMode & ~0x200u);
  min = m.Run<float>("v_min_f32", x, y);
  m.SetMode(kMode);
  Expect("min without IEEE", min[5], 1);
  Expect("min without IEEE", min[6], 1);
  std::vector<float> p = {3, 1, nan, 2, -0.0f}, q = {1, 2, 5, 2, 0},
                     r = {2, 3, 4, 1, 0};
  auto med = m.Run<float>("v_med3_f32", p, q, r);
  const float med_want[] = {2, 2, 4, 2, 0};
  auto max3 = m.Run<float>("v_max3_f32", p, q, r);
  auto maximum3 = m.Run<float>("v_maximum3_f32", p, q, r);
  auto minimum3 = m.Run<float>("v_minimum3_f32", p, q, r);
  for (int k = 0; k < 5; ++k) Expect("med3", med[k], med_want[k]);
  Expect("max3", max3[2], 5);
  Expect("maximum3", maximum3[2], NAN);
  Expect("maximum3", maximum3[0], 3);
  Expect("minimum3", minimum3[4], -0.0);
}

void CheckConversions() {
  Machine m(Arch::kGfx950);
  std::vector<float> a = {0,        -0.9f,   1.9f,  -1.9f,
                          0x1p31f,  -1e20f,  1e20f, NAN,
                          -0x1p31f, 0x1p32f, -1,    0x1.fffffep31f};
  const double i32[] = {0,         0,         1,         -1,
                        INT32_MAX, INT32_MIN, INT32_MAX, 0,
                        INT32_MIN, INT32_MAX, -1,        INT32_MAX};
  const double u32[] = {0,          0, 1, 0,          0x1p31, 0,
                        UINT32_MAX, 0, 0, UINT32_MAX, 0,      0xffffff00};
  auto to_i32 = m.Run<int32_t>("v_cvt_i32_f32", a);
  auto to_u32 = m.Run<uint32_t>("v_cvt_u32_f32", a);
  for (size_t k = 0; k < a.size(); ++k) {
    Expect("i32 " + std::to_string(k), to_i32[k], i32[k]);
    Expect("u32 " + std::to_string(k), to_u32[k], u32[k]);
  }
  std::vector<uint32_t> n = {0,          1,          0xffffffff, 0xffffff7f,
                             0xffffff80, 0x80000001, 0x01000001};
  auto from = m.Run<float>("v_cvt_f32_u32", n);
  for (size_t k = 0; k < n.size(); ++k) {
    Expect("f32 from u32", from[k], static_cast<float>(n[k]));
  }
  auto byte = m.Run<float>("v_cvt_f32_ubyte3", n);
  Expect("ubyte3", byte[2], 255);
  std::vector<float> f = {1.5f, -0.1f, 1e-40f, 0, -0.0f, INFINITY, -2.5f, 8};
  auto mant = m.Run<float>("v_frexp_mant_f32", f);
  auto exp = m.Run<int32_t>("v_frexp_exp_i32_f32", f);
  for (size_t k = 0; k < f.size(); ++k) {
    int e = 0;
    float want = std::isinf(f[k]) ? f[k] : std::frexp(f[k], &e);
    Expect("frexp mant", mant[k], want);
    Expect("frexp exp", exp[k], e);
  }
  std::vector<float> base = {1, 0x1.800002p0f, 0x1.8p0f, 1, 1e-40f, -1, 3};
  std::vector<int32_t> power = {-149, -149, -150, 128, 40, -2000, 2000};
  auto scaled = m.Run<float>("v_ldexp_f32", base, power);
  for (size_t k = 0; k < base.size(); ++k) {
    Expect("ldexp", scaled[k], std::ldexp(base[k], power[k]));
  }
  std::vector<float> parts = {1.25f, -1.25f, -1e-10f, 0, 2.5f, 3.5f};
  auto fract = m.Run<float>("v_fract_f32", parts);
  const float fract_want[] = {0.25f, 0.75f, 0x1.fffffep-1f, 0, 0.5f, 0.5f};
  auto rndne = m.Run<float>("v_rndne_f32", parts);
  const float rndne_want[] = {1, -1, -0.0f, 0, 2, 4};
  for (size_t k = 0; k < parts.size(); ++k) {
    Expect("fract", fract[k], fract_want[k]);
    Expect("rndne", rndne[k], rndne_want[k]);
  }

  std::vector<float> low = {1, 65520, 1 + 0x1p-11f, 1e-8f};
  std::vector<float> high = {-2, 65519, -1 - 0x1p-11f, NAN};
  auto rtz = m.Run<uint32_t>("v_cvt_pkrtz_f16_f32", low, high);
  auto rne = m.Run<uint32_t>("v_cvt_pk_f16_f32", low, high);
  auto bf = m.Run<uint32_t>("v_cvt_pk_bf16_f32", low, high);
  Expect("pkrtz", rtz[0], 0xc0003c00);
  Expect("pkrtz", rtz[1], 0x7bff7bff);
  Expect("pk_f16", rne[1], 0x7bff7c00);
  Expect("pk_f16", rne[2], 0xbc003c00);
  Expect("pk_bf16", bf[0], 0xc0003f80);

  // fp8 of the two architectures, saturating and not.
  std::vector<float> e = {1, 300, 0.5f}, g = {-448, 1e9f, 0};
  auto fp8 = m.Run<uint32_t>("v_cvt_pk_fp8_f32", e, g);
  Expect("fp8", fp8[0] & 0xffff, 0xfe38);
  Expect("fp8 overflow", fp8[1] >> 8 & 0xff, 0x7f);
  m.SetMode(kMode | 1 << 23);
  fp8 = m.Run<uint32_t>("v_cvt_pk_fp8_f32", e, g);
  m.SetMode(kMode);
  Expect("fp8 saturated", fp8[1] >> 8 & 0xff, 0x7e);
  Machine old(Arch::kGfx942);
  fp8 = old.Run<uint32_t>("v_cvt_pk_fp8_f32", e, g);
  Expect("fnuz", fp8[0] & 0xff, 0x40);
  Expect("fnuz overflow", fp8[1] & 0xffff, 0x8080);
  std::vector<uint32_t> codes = {0x40, 0x80, 0x01};
  auto wide = old.Run<float>("v_cvt_f32_fp8", codes);
  Expect("fnuz", wide[0], 1);
  Expect("fnuz", wide[1], NAN);
  Expect("fnuz", wide[2], 0x1p-10);

  // Stochastic: cut with no random bits, up with all of them.
  std::vector<float> s = {1 + 0x1p-9f, 1 + 0x1p-9f, 1, 1};
  std::vector<uint32_t> bits = {0, 0xffffffff, 0xffffffff, 0};
  auto sr = m.Run<uint16_t>("v_cvt_sr_bf16_f32", s, bits);
  Expect("sr", sr[0], 0x3f80);
  Expect("sr", sr[1], 0x3f81);
  Expect("sr", sr[2], 0x3f80);
}

void CheckDots() {
  Machine m(Arch::kGfx950);
  std::vector<uint32_t> a = {0x40003c00}, b = {0x42003800};  // 1 2, 0.5 3
  std::vector<float> c = {10};
  auto dot = m.Run<float>("v_dot2_f32_f16", a, b, c);
  Expect("dot2", dot[0], 16.5);
  std::vector<uint32_t> x = {0x80ff017f}, y = {0x02030405}, z = {100};
  auto dot4 = m.Run<uint32_t>("v_dot4_i32_i8", x, y, z);
  Expect("dot4", static_cast<int32_t>(dot4[0]),
         100 + 127 * 5 + 1 * 4 - 1 * 3 - 128 * 2);
  auto dot4u = m.Run<uint32_t>("v_dot4_u32_u8", x, y, z);
  Expect("dot4", dot4u[0], 100 + 127 * 5 + 1 * 4 + 255 * 3 + 128 * 2);
  auto dot8 = m.Run<uint32_t>("v_dot8_i32_i4", x, y, z);
  Expect("dot8", static_cast<int32_t>(dot8[0]),
         100 - 1 * 5 + 7 * 0 + 1 * 4 + 0 - 1 * 3 - 1 * 0 + 0 * 2 - 8 * 0);
}

}  // namespace
}  // namespace amdgpu_sim

int main() {
  amdgpu_sim::CheckFormats();
  amdgpu_sim::CheckHalf();
  amdgpu_sim::CheckDivision();
  amdgpu_sim::CheckTranscendental();
  amdgpu_sim::CheckModes();
  amdgpu_sim::CheckConversions();
  amdgpu_sim::CheckDots();
  if (amdgpu_sim::failures) {
    std::fprintf(stderr, "%d failures\n", amdgpu_sim::failures);
    return 1;
  }
  std::puts("float_test passed");
  return 0;
}
