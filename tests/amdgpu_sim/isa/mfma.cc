// SPDX-License-Identifier: Apache-2.0

// Matrix instructions: MFMA, SMFMAC and moves of accumulation registers.
//
// D = A * B + C on a whole wave, whatever EXEC says. Lane l of A holds row
// l % M and consecutive k, that of B column l % N; C and D hold groups of
// four rows (of one row for f64), so that a row of D is contiguous in the
// lanes of one register.
//
// Numbers: products are exact and are added to C one k after the other in the
// type of D, each rounded once, to nearest even. The hardware adds several
// products at once in an order and a width that AMD does not document, so
// last bits differ. Denormals count, with two exceptions: A and B of f32 obey
// MODE, and gfx90a flushes those of f16 and bf16 products and their sums.

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "tests/amdgpu_sim/isa/atomic.h"
#include "tests/amdgpu_sim/isa/float.h"
#include "tests/amdgpu_sim/isa/lanes.h"
#include "tests/amdgpu_sim/isa/ops.h"

namespace amdgpu_sim {
namespace {

enum class Format : uint8_t {
  kFp8,
  kBf8,
  kFp6,
  kBf6,
  kFp4,  // As CBSZ and BLGP of f8f6f4 number them.
  kF16,
  kBf16,
  kF32,
  kXf32,
  kI8,
};

constexpr int Bits(Format format) {
  switch (format) {
    case Format::kFp8:
    case Format::kBf8:
    case Format::kI8:
      return 8;
    case Format::kFp6:
    case Format::kBf6:
      return 6;
    case Format::kFp4:
      return 4;
    case Format::kF16:
    case Format::kBf16:
      return 16;
    default:
      return 32;
  }
}

constexpr int kMaxElements = 32;  // Of a lane, of A or B.

// The elements of A or B, unpacked: element e of lane l is at[e][l].
template <typename T>
struct alignas(64) Panel {
  T at[kMaxElements][kLanes];
};

// Eight lanes, as a float or int32 each.
inline __m256 MultiplyAdd(__m256 a, __m256 b, __m256 c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline __m256i MultiplyAdd(__m256i a, __m256i b, __m256i c) {
  return _mm256_add_epi32(_mm256_mullo_epi32(a, b), c);
}
inline __m256 Load8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256i Load8(const int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline void Store8(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
inline void Store8(int32_t* p, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
inline __m256 Broadcast(float x) { return _mm256_set1_ps(x); }
inline __m256i Broadcast(int32_t x) { return _mm256_set1_epi32(x); }

template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = __m256;
};
template <>
struct VectorOf<int32_t> {
  using Type = __m256i;
};

__m256 HalvesToFloats(__m256i low_halves) {
  const __m128i halves =
      _mm_packus_epi32(_mm256_castsi256_si128(low_halves),
                       _mm256_extracti128_si256(low_halves, 1));
  return _mm256_cvtph_ps(halves);
}

void UnpackF16(const uint32_t* reg, bool flush, float* low, float* high) {
  const __m256 smallest = _mm256_set1_ps(0x1p-14f);
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const auto flushed = [&](__m256 x) {
    const __m256 magnitude = _mm256_andnot_ps(sign, x);
    const __m256 tiny = _mm256_cmp_ps(magnitude, smallest, _CMP_LT_OQ);
    return _mm256_andnot_ps(_mm256_andnot_ps(sign, tiny), x);
  };
  for (int lane = 0; lane < kLanes; lane += 8) {
    const __m256i x =
        _mm256_load_si256(reinterpret_cast<const __m256i*>(reg + lane));
    __m256 a = HalvesToFloats(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    __m256 b = HalvesToFloats(_mm256_srli_epi32(x, 16));
    if (flush) {
      a = flushed(a);
      b = flushed(b);
    }
    _mm256_store_ps(low + lane, a);
    _mm256_store_ps(high + lane, b);
  }
}

void UnpackBf16(const uint32_t* reg, float* low, float* high) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t l = reg[lane] << 16, h = reg[lane] & 0xffff0000u;
    std::memcpy(&low[lane], &l, 4);
    std::memcpy(&high[lane], &h, 4);
  }
}

// Ten bits of mantissa, to nearest even. (rocBLAS emulates it like this;
// AMD's documents do not say.)
uint32_t RoundXf32(uint32_t bits) {
  if ((bits & 0x7f800000) == 0x7f800000) {
    return (bits & 0x7fffff) ? bits | 0x400000 : bits;
  }
  return (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
}

const MiniFormat& MiniOf(Format format, Arch arch) {
  const bool fnuz = arch == Arch::kGfx942;
  switch (format) {
    case Format::kFp8:
      return fnuz ? kFp8Fnuz : kFp8;
    case Format::kBf8:
      return fnuz ? kBf8Fnuz : kBf8;
    case Format::kFp6:
      return kFp6;
    case Format::kBf6:
      return kBf6;
    default:
      return kFp4;
  }
}

// Codes to floats, eight at a time: the magnitude moves to a float's place
// and takes its exponent by a product, which is exact, denormals too.
class MiniDecoder {
 public:
  explicit MiniDecoder(const MiniFormat& format)
      : magnitude_(_mm256_set1_epi32(format.sign() - 1)),
        sign_(_mm256_set1_epi32(format.sign())),
        shift_(23 - format.mantissa_bits),
        sign_shift_(32 - format.bits()),
        scale_(_mm256_set1_ps(std::ldexp(1.0f, 127 - format.bias))),
        largest_(_mm256_set1_epi32(format.max_code)),
        infinity_(_mm256_set1_epi32(format.infinity)),
        unsigned_zero_(format.unsigned_zero) {}

  __m256 operator()(__m256i code) const {
    const __m256i magnitude = _mm256_and_si256(code, magnitude_);
    const __m256i sign = _mm256_and_si256(code, sign_);
    __m256 value = _mm256_mul_ps(
        _mm256_castsi256_ps(_mm256_slli_epi32(magnitude, shift_)), scale_);
    // Beyond the largest number are infinity, if there is one, and NaNs.
    __m256i nan = _mm256_cmpgt_epi32(magnitude, largest_);
    const __m256i infinite = _mm256_cmpeq_epi32(magnitude, infinity_);
    if (unsigned_zero_) nan = _mm256_cmpeq_epi32(code, sign_);
    value = _mm256_blendv_ps(value, _mm256_set1_ps(__builtin_nanf("")),
                             _mm256_castsi256_ps(nan));
    value = _mm256_blendv_ps(value, _mm256_set1_ps(__builtin_inff()),
                             _mm256_castsi256_ps(infinite));
    return _mm256_or_ps(
        value, _mm256_castsi256_ps(_mm256_slli_epi32(sign, sign_shift_)));
  }

 private:
  const __m256i magnitude_, sign_;
  const int shift_, sign_shift_;
  const __m256 scale_;
  const __m256i largest_, infinity_;
  const bool unsigned_zero_;
};

void UnpackMini(const Wave& wave, int reg, Format format, int elements,
                Panel<float>* panel) {
  const MiniDecoder decode(MiniOf(format, wave.arch));
  const int bits = Bits(format);
  const __m256i mask = _mm256_set1_epi32((1 << bits) - 1);
  for (int e = 0; e < elements; ++e) {
    const int first = e * bits / 32, shift = e * bits % 32;
    const uint32_t* low = wave.v[reg + first];
    // An element of six bits may continue in the next register.
    const bool crosses = shift + bits > 32;
    const uint32_t* high = wave.v[reg + first + (crosses ? 1 : 0)];
    for (int lane = 0; lane < kLanes; lane += 8) {
      const auto load = [lane](const uint32_t* from) {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(from + lane));
      };
      __m256i code = _mm256_srli_epi32(load(low), shift);
      if (crosses) {
        code = _mm256_or_si256(code, _mm256_slli_epi32(load(high), 32 - shift));
      }
      _mm256_store_ps(panel->at[e] + lane,
                      decode(_mm256_and_si256(code, mask)));
    }
  }
}

void Unpack(const Wave& wave, int reg, Format format, int elements,
            Panel<float>* panel) {
  switch (format) {
    case Format::kF16:
      for (int e = 0; e < elements; e += 2) {
        UnpackF16(wave.v[reg + e / 2], wave.arch == Arch::kGfx90a, panel->at[e],
                  panel->at[e + 1]);
      }
      return;
    case Format::kBf16:
      for (int e = 0; e < elements; e += 2) {
        UnpackBf16(wave.v[reg + e / 2], panel->at[e], panel->at[e + 1]);
      }
      return;
    case Format::kF32:
    case Format::kXf32: {
      const bool flush =
          format == Format::kF32 && (wave.mode.denorm32() & 1) == 0;
      for (int e = 0; e < elements; ++e) {
        for (int lane = 0; lane < kLanes; ++lane) {
          uint32_t bits = wave.v[reg + e][lane];
          if (format == Format::kXf32) bits = RoundXf32(bits);
          if (flush && (bits & 0x7f800000) == 0) bits &= 0x80000000u;
          panel->at[e][lane] = FloatOf(bits);
        }
      }
      return;
    }
    default:
      UnpackMini(wave, reg, format, elements, panel);
  }
}

void Unpack(const Wave& wave, int reg, Format, int elements,
            Panel<int32_t>* panel) {
  for (int e = 0; e < elements; ++e) {
    const uint32_t* from = wave.v[reg + e / 4];
    const int shift = 24 - e % 4 * 8;
    for (int lane = 0; lane < kLanes; ++lane) {
      panel->at[e][lane] = static_cast<int32_t>(from[lane] << shift) >> 24;
    }
  }
}

// Lets lane l have what lane from(l) holds.
template <typename T, typename F>
void Permute(int elements, F&& from, Panel<T>* panel) {
  for (int e = 0; e < elements; ++e) {
    T old[kLanes];
    std::copy(panel->at[e], panel->at[e] + kLanes, old);
    for (int lane = 0; lane < kLanes; ++lane) {
      panel->at[e][lane] = old[from(lane)];
    }
  }
}

// CBSZ: a block of lanes that holds A, the ABID-th, stands for all.
template <typename T>
void BroadcastA(const Inst& inst, int elements, Panel<T>* panel) {
  if (inst.cbsz == 0) return;
  if (inst.cbsz > 4 || inst.abid >= 1 << inst.cbsz) {
    throw Fault{Check::kUnsupported, "cbsz or abid out of range"};
  }
  const int size = kLanes >> inst.cbsz;
  Permute(
      elements, [&](int lane) { return lane % size + size * inst.abid; },
      panel);
}

template <typename T>
void PermuteB(const Inst& inst, int elements, Panel<T>* panel) {
  if (inst.blgp == 0) return;
  Permute(
      elements,
      [&](int lane) {
        switch (inst.blgp) {
          case 1:
          case 2:
            return lane % 32 + 32 * (inst.blgp - 1);
          case 3:
            return (lane + 16) % 64;
          default:
            return lane % 16 + 16 * (inst.blgp - 4);
        }
      },
      panel);
}

// The registers of D, which hold C before the sums are made.
template <typename T>
T* PrepareD(Wave& wave, const Inst& inst, int registers) {
  T* d = reinterpret_cast<T*>(wave.v[inst.dst[0].reg]);
  const Operand& c = inst.src[2];
  if (c.kind == Operand::Kind::kVector) {
    if (c.reg != inst.dst[0].reg) {
      std::memmove(d, wave.v[c.reg], registers * sizeof(wave.v[0]));
    }
  } else {
    const auto bits = static_cast<uint32_t>(c.constant);
    uint32_t* to = wave.v[inst.dst[0].reg];
    std::fill(to, to + registers * kLanes, bits);
  }
  return d;
}

// Adds to four rows of 16 columns, a register apart, the products of a
// column of A (rows from `a[k]`) and a row of B.
template <typename T>
inline void AddTile(const T* const* a, const T* const* b, int k_count, int row,
                    int column, T* d) {
  using V = typename VectorOf<T>::Type;
  V sum[4][2];
  for (int r = 0; r < 4; ++r) {
    sum[r][0] = Load8(d + r * kLanes);
    sum[r][1] = Load8(d + r * kLanes + 8);
  }
  for (int k = 0; k < k_count; ++k) {
    const V b0 = Load8(b[k] + column), b1 = Load8(b[k] + column + 8);
    const T* from = a[k] + row;
    for (int r = 0; r < 4; ++r) {
      const V value = Broadcast(from[r]);
      sum[r][0] = MultiplyAdd(value, b0, sum[r][0]);
      sum[r][1] = MultiplyAdd(value, b1, sum[r][1]);
    }
  }
  for (int r = 0; r < 4; ++r) {
    Store8(d + r * kLanes, sum[r][0]);
    Store8(d + r * kLanes + 8, sum[r][1]);
  }
}

// Where four rows of D begin: four registers of an M x M block, its row group
// being spread over lanes first.
template <int kM>
constexpr int RowGroup(int block, int row) {
  constexpr int kGroups = kLanes / kM;  // Row groups in a register's lanes.
  const int group = row / 4;
  return (block * (kM * kM / kLanes) + group / kGroups * 4) * kLanes +
         group % kGroups * kM;
}

template <int kM, typename T>
void AddBlock(const T* const* a, const T* const* b, int k_count, int block,
              T* d) {
  for (int row = 0; row < kM; row += 4) {
    for (int column = 0; column < kM; column += 16) {
      AddTile(a, b, k_count, row, column,
              d + RowGroup<kM>(block, row) + column);
    }
  }
}

// Sixteen blocks of 4 x 4: a lane of D belongs to the block of the same lane
// of A and B.
inline __m256 SplatOfFour(__m256 x, int r) {
  switch (r) {
    case 0:
      return _mm256_permute_ps(x, 0x00);
    case 1:
      return _mm256_permute_ps(x, 0x55);
    case 2:
      return _mm256_permute_ps(x, 0xaa);
    default:
      return _mm256_permute_ps(x, 0xff);
  }
}
inline __m256i SplatOfFour(__m256i x, int r) {
  return _mm256_castps_si256(SplatOfFour(_mm256_castsi256_ps(x), r));
}

template <typename T>
void AddSmallBlocks(const Panel<T>& a, const Panel<T>& b, int k_count, T* d) {
  using V = typename VectorOf<T>::Type;
  for (int lane = 0; lane < kLanes; lane += 8) {
    V sum[4];
    for (int r = 0; r < 4; ++r) sum[r] = Load8(d + r * kLanes + lane);
    for (int k = 0; k < k_count; ++k) {
      const V av = Load8(a.at[k] + lane), bv = Load8(b.at[k] + lane);
      for (int r = 0; r < 4; ++r) {
        sum[r] = MultiplyAdd(SplatOfFour(av, r), bv, sum[r]);
      }
    }
    for (int r = 0; r < 4; ++r) Store8(d + r * kLanes + lane, sum[r]);
  }
}

// With MODE's FP16_OVFL, which Triton sets around conversions to fp8, sums that
// overflow are the largest numbers. One with an infinite operand does not
// overflow; which of the two makes an infinity is not told apart here, so that
// any infinite operand turns this off.
bool HasInfinity(const float* values, int count) {
  for (int i = 0; i < count; ++i) {
    if (std::fabs(values[i]) == __builtin_inff()) return true;
  }
  return false;
}

bool ClampsOverflow(const Wave& wave, const Panel<float>& a, int elements_a,
                    const Panel<float>& b, int elements_b, const float* c,
                    int registers) {
  return wave.mode.fp16_overflow() &&
         !HasInfinity(a.at[0], elements_a * kLanes) &&
         !HasInfinity(b.at[0], elements_b * kLanes) &&
         !HasInfinity(c, registers * kLanes);
}

bool ClampsOverflow(const Wave& wave, const Panel<int32_t>&, int,
                    const Panel<int32_t>&, int, const int32_t*, int) {
  if (wave.mode.fp16_overflow()) {
    throw Fault{Check::kUnsupported,
                "integer matrix instruction with FP16_OVFL"};
  }
  return false;
}

void ClampOverflow(float* d, int registers) {
  for (int i = 0; i < registers * kLanes; ++i) {
    if (std::fabs(d[i]) == __builtin_inff()) {
      d[i] = std::copysign(3.40282347e38f, d[i]);
    }
  }
}
void ClampOverflow(int32_t*, int) {}

uint32_t MxcsrOf(const Wave& wave, Format format) {
  const bool flush = wave.arch == Arch::kGfx90a &&
                     (format == Format::kF16 || format == Format::kBf16);
  return flush ? kFlushMxcsr : kExactMxcsr;
}

// M x M x K in kBlocks blocks, both operands in one type or both of 8 bits.
template <typename T, int kM, int kK, int kBlocks, Format kA, Format kB>
void Mfma(Wave& wave, const Inst& inst) {
  const ScopedMxcsr mode(wave, MxcsrOf(wave, kA));
  constexpr int kGroups = kLanes / (kM * kBlocks);  // Of lanes, along k.
  constexpr int kElements = kK / kGroups;
  Panel<T> a, b;
  Unpack(wave, inst.src[0].reg, kA, kElements, &a);
  Unpack(wave, inst.src[1].reg, kB, kElements, &b);
  BroadcastA(inst, kElements, &a);
  PermuteB(inst, kElements, &b);
  constexpr int kRegisters = kM * kM * kBlocks / kLanes;
  T* d = PrepareD<T>(wave, inst, kRegisters);
  const bool clamp =
      ClampsOverflow(wave, a, kElements, b, kElements, d, kRegisters);
  if constexpr (kM == 4) {
    AddSmallBlocks(a, b, kElements, d);
  } else {
    for (int block = 0; block < kBlocks; ++block) {
      const T *ak[kK], *bk[kK];
      for (int k = 0; k < kK; ++k) {
        const int lane = kM * (block + kBlocks * (k / kElements));
        ak[k] = a.at[k % kElements] + lane;
        bk[k] = b.at[k % kElements] + lane;
      }
      AddBlock<kM>(ak, bk, kK, block, d);
    }
  }
  if (clamp) ClampOverflow(d, kRegisters);
}

// A operand of f8f6f4, by k: 32 elements of a lane, consecutive ones, except
// that 8-bit elements are two runs of 16, half of K apart.
template <int kM, int kK>
void UnpackF8f6f4(const Wave& wave, int reg, int code, Panel<float>* panel,
                  const float** by_k) {
  if (code > static_cast<int>(Format::kFp4)) {
    throw Fault{Check::kUnsupported, "format of an f8f6f4 operand"};
  }
  const Format format = static_cast<Format>(code);
  Unpack(wave, reg, format, 32, panel);
  for (int k = 0; k < kK; ++k) {
    int element = k % 32, group = k / 32;
    if (Bits(format) == 8) {
      element = k / (kK / 2) * 16 + k % 16;
      group = k % (kK / 2) / 16;
    }
    by_k[k] = panel->at[element] + kM * group;
  }
}

// 2^(scale) of every lane, from a byte of a register or the exponent of an
// inline constant.
void UnpackScale(const Wave& wave, const Operand& operand, double* scale) {
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t code;
    if (operand.kind == Operand::Kind::kVector) {
      const int byte = operand.op_sel + 2 * operand.op_sel_hi;
      code = wave.v[operand.reg][lane] >> (8 * byte) & 0xff;
    } else if (operand.kind == Operand::Kind::kConstant) {
      code = operand.constant >> 23 & 0xff;
    } else {
      throw Fault{Check::kUnsupported, "scale operand"};
    }
    scale[lane] = DecodeE8m0(code);
  }
}

template <int kM, int kK, bool kScaled>
void MfmaF8f6f4(Wave& wave, const Inst& inst) {
  const ScopedMxcsr mode(wave, kExactMxcsr);
  Panel<float> a, b;
  const float *ak[kK], *bk[kK];
  UnpackF8f6f4<kM, kK>(wave, inst.src[0].reg, inst.cbsz, &a, ak);
  UnpackF8f6f4<kM, kK>(wave, inst.src[1].reg, inst.blgp, &b, bk);
  double scale_a[kLanes], scale_b[kLanes];
  if constexpr (kScaled) {
    UnpackScale(wave, inst.src[3], scale_a);
    UnpackScale(wave, inst.src[4], scale_b);
  }
  constexpr int kRegisters = kM * kM / kLanes;
  float* d = PrepareD<float>(wave, inst, kRegisters);
  const bool clamp = ClampsOverflow(wave, a, 32, b, 32, d, kRegisters);
  if constexpr (!kScaled) AddBlock<kM>(ak, bk, kK, 0, d);
  // 32 products at a time share their scales, lane row + M * block's.
  for (int k = 0; kScaled && k < kK; k += 32) {
    alignas(64) float sum[kM * kM] = {};
    AddBlock<kM>(ak + k, bk + k, 32, 0, sum);
    const double* rows = scale_a + k / 32 * kM;
    const double* columns = scale_b + k / 32 * kM;
    for (int row = 0; row < kM; ++row) {
      const int at = RowGroup<kM>(0, row) + row % 4 * kLanes;
      alignas(32) float total[kM];
      for (int i = 0; i < kM; i += 8) Store8(total + i, Load8(d + at + i));
      for (int i = 0; i < kM; ++i) {
        const double product = sum[at + i] * (rows[row] * columns[i]);
        total[i] = static_cast<float>(total[i] + product);
      }
      for (int i = 0; i < kM; i += 8) Store8(d + at + i, Load8(total + i));
    }
  }
  if (clamp) ClampOverflow(d, kRegisters);
}

double DoubleAt(const Wave& wave, int reg, int lane) {
  return DoubleOf(wave.v[reg][lane] | uint64_t{wave.v[reg + 1][lane]} << 32);
}

// 16 x 16 x 4, or 4 x 4 x 4 in four blocks. A group of rows is one row; row
// i of the latter is in lanes from 16 i on (so AMD's calculator; the formula
// of the CDNA4 document would exchange rows and blocks).
template <int kM, int kBlocks>
void MfmaF64(Wave& wave, const Inst& inst) {
  const ScopedMxcsr mode(wave, kExactMxcsr);
  // On gfx90a the field BLGP, later written as neg, negates A, B and C.
  bool negate[3];
  for (int i = 0; i < 3; ++i) {
    negate[i] = inst.src[i].neg || (inst.blgp >> i & 1);
  }
  double a[kLanes], b[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    a[lane] = DoubleAt(wave, inst.src[0].reg, lane);
    b[lane] = DoubleAt(wave, inst.src[1].reg, lane);
    if (negate[0]) a[lane] = -a[lane];
    if (negate[1]) b[lane] = -b[lane];
  }
  constexpr int kItems = kM * kM * kBlocks / kLanes;
  double d[kItems][kLanes];
  const Operand& c = inst.src[2];
  for (int item = 0; item < kItems; ++item) {
    for (int lane = 0; lane < kLanes; ++lane) {
      double sum = c.kind == Operand::Kind::kVector
                       ? DoubleAt(wave, c.reg + 2 * item, lane)
                       : DoubleOf(c.constant);
      if (negate[2]) sum = -sum;
      const int row = kM == 16 ? 4 * item + lane / 16 : lane / 16;
      const int block = kBlocks == 1 ? 0 : lane / 4 % 4;
      const int column = lane % kM;
      for (int k = 0; k < 4; ++k) {
        const int first = kM * (block + kBlocks * k);
        sum = std::fma(a[first + row], b[first + column], sum);
      }
      d[item][lane] = sum;
    }
  }
  for (int item = 0; item < kItems; ++item) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t bits = BitsOf(d[item][lane]);
      const int reg = inst.dst[0].reg + 2 * item;
      wave.v[reg][lane] = static_cast<uint32_t>(bits);
      wave.v[reg + 1][lane] = static_cast<uint32_t>(bits >> 32);
    }
  }
}

// A holds two of every four k, and two bits for each which ones: element e of
// a lane meets element e / 2 * 4 + index of B's lane of the same k.
template <typename T, int kM, int kK, Format kA, Format kB>
void Smfmac(Wave& wave, const Inst& inst) {
  const ScopedMxcsr mode(wave, kExactMxcsr);
  constexpr int kGroups = kLanes / kM;
  constexpr int kElementsB = kK / kGroups, kElementsA = kElementsB / 2;
  Panel<T> a, b;
  Unpack(wave, inst.src[0].reg, kA, kElementsA, &a);
  Unpack(wave, inst.src[1].reg, kB, kElementsB, &b);
  // The index register may hold several sets of indices.
  constexpr int kSets = 16 / kElementsA;
  const int set = inst.cbsz == 0 ? inst.abid % kSets : 0;
  uint32_t indices[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    indices[lane] = wave.v[inst.src[2].reg][lane] >> (set * 2 * kElementsA);
  }
  constexpr int kRegisters = kM * kM / kLanes;
  T* d = reinterpret_cast<T*>(wave.v[inst.dst[0].reg]);
  const bool clamp =
      ClampsOverflow(wave, a, kElementsA, b, kElementsB, d, kRegisters);
  for (int row = 0; row < kM; ++row) {
    T* to = d + RowGroup<kM>(0, row) + row % 4 * kLanes;
    typename VectorOf<T>::Type sum[kM / 8];
    for (int i = 0; i < kM / 8; ++i) sum[i] = Load8(to + 8 * i);
    for (int group = 0; group < kGroups; ++group) {
      const int lane = kM * group + row;
      for (int e = 0; e < kElementsA; ++e) {
        const int index = indices[lane] >> (2 * e) & 3;
        const auto value = Broadcast(a.at[e][lane]);
        const T* from = b.at[e / 2 * 4 + index] + kM * group;
        for (int i = 0; i < kM / 8; ++i) {
          sum[i] = MultiplyAdd(value, Load8(from + 8 * i), sum[i]);
        }
      }
    }
    for (int i = 0; i < kM / 8; ++i) Store8(to + 8 * i, sum[i]);
  }
  if (clamp) ClampOverflow(d, kRegisters);
}

// Moves of accumulation registers obey EXEC, as vector instructions do.
void MoveAccum(Wave& wave, const Inst& inst) {
  const Operand& source = inst.src[0];
  uint32_t values[kLanes];
  if (source.kind == Operand::Kind::kVector) {
    std::memcpy(values, wave.v[source.reg], sizeof(values));
  } else {
    const uint32_t value = source.kind == Operand::Kind::kScalar
                               ? wave.s[source.reg]
                               : static_cast<uint32_t>(source.constant);
    std::fill(values, values + kLanes, value);
  }
  uint32_t* dst = wave.v[inst.dst[0].reg];
  ForLanes(wave.exec(), [&](int lane) { dst[lane] = values[lane]; });
}

constexpr Type kW = Type::kWide;
constexpr uint8_t kOnGfx94 = kOnGfx942 | kOnGfx950;

class Table {
 public:
  void Add(const char* mnemonic, Execute execute, int passes, uint8_t archs) {
    Op op{};
    op.mnemonic = mnemonic;
    op.execute = execute;
    op.inst_class = InstClass::kMfma;
    op.dst[0] = kW;
    op.src[0] = op.src[1] = op.src[2] = kW;
    op.modifiers = kMfma;
    op.archs = archs;
    op.mfma_passes = static_cast<uint16_t>(passes);
    ops_.push_back(op);
  }

  // A shape that gfx90a names in another way, and may need other passes for.
  void AddBoth(const char* old_name, int old_passes, const char* name,
               int passes, Execute execute) {
    Add(old_name, execute, old_passes, kOnGfx90a);
    Add(name, execute, passes, kOnGfx94);
  }

  Ops Take() { return std::move(ops_); }
  Ops& ops() { return ops_; }

 private:
  Ops ops_;
};

void AddF32(Table* table) {
  constexpr Format kF = Format::kF32, kX = Format::kXf32;
  table->AddBoth("v_mfma_f32_32x32x1f32", 16, "v_mfma_f32_32x32x1_2b_f32", 16,
                 Mfma<float, 32, 1, 2, kF, kF>);
  table->AddBoth("v_mfma_f32_16x16x1f32", 8, "v_mfma_f32_16x16x1_4b_f32", 8,
                 Mfma<float, 16, 1, 4, kF, kF>);
  table->AddBoth("v_mfma_f32_4x4x1f32", 2, "v_mfma_f32_4x4x1_16b_f32", 2,
                 Mfma<float, 4, 1, 16, kF, kF>);
  table->AddBoth("v_mfma_f32_32x32x2f32", 16, "v_mfma_f32_32x32x2_f32", 16,
                 Mfma<float, 32, 2, 1, kF, kF>);
  table->AddBoth("v_mfma_f32_16x16x4f32", 8, "v_mfma_f32_16x16x4_f32", 8,
                 Mfma<float, 16, 4, 1, kF, kF>);
  table->Add("v_mfma_f32_16x16x8_xf32", Mfma<float, 16, 8, 1, kX, kX>, 4,
             kOnGfx942);
  table->Add("v_mfma_f32_32x32x4_xf32", Mfma<float, 32, 4, 1, kX, kX>, 8,
             kOnGfx942);
}

void AddF16(Table* table) {
  constexpr Format kF = Format::kF16;
  table->AddBoth("v_mfma_f32_32x32x4f16", 16, "v_mfma_f32_32x32x4_2b_f16", 16,
                 Mfma<float, 32, 4, 2, kF, kF>);
  table->AddBoth("v_mfma_f32_16x16x4f16", 8, "v_mfma_f32_16x16x4_4b_f16", 8,
                 Mfma<float, 16, 4, 4, kF, kF>);
  table->AddBoth("v_mfma_f32_4x4x4f16", 2, "v_mfma_f32_4x4x4_16b_f16", 2,
                 Mfma<float, 4, 4, 16, kF, kF>);
  table->AddBoth("v_mfma_f32_32x32x8f16", 16, "v_mfma_f32_32x32x8_f16", 8,
                 Mfma<float, 32, 8, 1, kF, kF>);
  table->AddBoth("v_mfma_f32_16x16x16f16", 8, "v_mfma_f32_16x16x16_f16", 4,
                 Mfma<float, 16, 16, 1, kF, kF>);
  table->Add("v_mfma_f32_16x16x32_f16", Mfma<float, 16, 32, 1, kF, kF>, 4,
             kOnGfx950);
  table->Add("v_mfma_f32_32x32x16_f16", Mfma<float, 32, 16, 1, kF, kF>, 8,
             kOnGfx950);
  table->Add("v_smfmac_f32_16x16x32_f16", Smfmac<float, 16, 32, kF, kF>, 4,
             kOnGfx94);
  table->Add("v_smfmac_f32_32x32x16_f16", Smfmac<float, 32, 16, kF, kF>, 8,
             kOnGfx94);
  table->Add("v_smfmac_f32_16x16x64_f16", Smfmac<float, 16, 64, kF, kF>, 4,
             kOnGfx950);
  table->Add("v_smfmac_f32_32x32x32_f16", Smfmac<float, 32, 32, kF, kF>, 8,
             kOnGfx950);
}

void AddBf16(Table* table) {
  constexpr Format kF = Format::kBf16;
  // The first generation's shapes have half the k.
  table->Add("v_mfma_f32_32x32x2bf16", Mfma<float, 32, 2, 2, kF, kF>, 16,
             kOnGfx90a);
  table->Add("v_mfma_f32_16x16x2bf16", Mfma<float, 16, 2, 4, kF, kF>, 8,
             kOnGfx90a);
  table->Add("v_mfma_f32_4x4x2bf16", Mfma<float, 4, 2, 16, kF, kF>, 2,
             kOnGfx90a);
  table->Add("v_mfma_f32_32x32x4bf16", Mfma<float, 32, 4, 1, kF, kF>, 16,
             kOnGfx90a);
  table->Add("v_mfma_f32_16x16x8bf16", Mfma<float, 16, 8, 1, kF, kF>, 8,
             kOnGfx90a);
  table->AddBoth("v_mfma_f32_32x32x4bf16_1k", 16, "v_mfma_f32_32x32x4_2b_bf16",
                 16, Mfma<float, 32, 4, 2, kF, kF>);
  table->AddBoth("v_mfma_f32_16x16x4bf16_1k", 8, "v_mfma_f32_16x16x4_4b_bf16",
                 8, Mfma<float, 16, 4, 4, kF, kF>);
  table->AddBoth("v_mfma_f32_4x4x4bf16_1k", 2, "v_mfma_f32_4x4x4_16b_bf16", 2,
                 Mfma<float, 4, 4, 16, kF, kF>);
  table->AddBoth("v_mfma_f32_32x32x8bf16_1k", 16, "v_mfma_f32_32x32x8_bf16", 8,
                 Mfma<float, 32, 8, 1, kF, kF>);
  table->AddBoth("v_mfma_f32_16x16x16bf16_1k", 8, "v_mfma_f32_16x16x16_bf16", 4,
                 Mfma<float, 16, 16, 1, kF, kF>);
  table->Add("v_mfma_f32_16x16x32_bf16", Mfma<float, 16, 32, 1, kF, kF>, 4,
             kOnGfx950);
  table->Add("v_mfma_f32_32x32x16_bf16", Mfma<float, 32, 16, 1, kF, kF>, 8,
             kOnGfx950);
  table->Add("v_smfmac_f32_16x16x32_bf16", Smfmac<float, 16, 32, kF, kF>, 4,
             kOnGfx94);
  table->Add("v_smfmac_f32_32x32x16_bf16", Smfmac<float, 32, 16, kF, kF>, 8,
             kOnGfx94);
  table->Add("v_smfmac_f32_16x16x64_bf16", Smfmac<float, 16, 64, kF, kF>, 4,
             kOnGfx950);
  table->Add("v_smfmac_f32_32x32x32_bf16", Smfmac<float, 32, 32, kF, kF>, 8,
             kOnGfx950);
}

void AddI8(Table* table) {
  using I = int32_t;
  constexpr Format kF = Format::kI8;
  table->AddBoth("v_mfma_i32_32x32x4i8", 16, "v_mfma_i32_32x32x4_2b_i8", 16,
                 Mfma<I, 32, 4, 2, kF, kF>);
  table->AddBoth("v_mfma_i32_16x16x4i8", 8, "v_mfma_i32_16x16x4_4b_i8", 8,
                 Mfma<I, 16, 4, 4, kF, kF>);
  table->AddBoth("v_mfma_i32_4x4x4i8", 2, "v_mfma_i32_4x4x4_16b_i8", 2,
                 Mfma<I, 4, 4, 16, kF, kF>);
  table->Add("v_mfma_i32_32x32x8i8", Mfma<I, 32, 8, 1, kF, kF>, 16, kOnGfx90a);
  table->Add("v_mfma_i32_16x16x16i8", Mfma<I, 16, 16, 1, kF, kF>, 8, kOnGfx90a);
  table->Add("v_mfma_i32_32x32x16_i8", Mfma<I, 32, 16, 1, kF, kF>, 8, kOnGfx94);
  table->Add("v_mfma_i32_16x16x32_i8", Mfma<I, 16, 32, 1, kF, kF>, 4, kOnGfx94);
  table->Add("v_mfma_i32_16x16x64_i8", Mfma<I, 16, 64, 1, kF, kF>, 4,
             kOnGfx950);
  table->Add("v_mfma_i32_32x32x32_i8", Mfma<I, 32, 32, 1, kF, kF>, 8,
             kOnGfx950);
  table->Add("v_smfmac_i32_16x16x64_i8", Smfmac<I, 16, 64, kF, kF>, 4,
             kOnGfx94);
  table->Add("v_smfmac_i32_32x32x32_i8", Smfmac<I, 32, 32, kF, kF>, 8,
             kOnGfx94);
  table->Add("v_smfmac_i32_16x16x128_i8", Smfmac<I, 16, 128, kF, kF>, 4,
             kOnGfx950);
  table->Add("v_smfmac_i32_32x32x64_i8", Smfmac<I, 32, 64, kF, kF>, 8,
             kOnGfx950);
}

template <Format kA, Format kB>
void AddF8(Table* table, const char* const (&names)[6]) {
  table->Add(names[0], Mfma<float, 16, 32, 1, kA, kB>, 4, kOnGfx94);
  table->Add(names[1], Mfma<float, 32, 16, 1, kA, kB>, 8, kOnGfx94);
  table->Add(names[2], Smfmac<float, 16, 64, kA, kB>, 4, kOnGfx94);
  table->Add(names[3], Smfmac<float, 32, 32, kA, kB>, 8, kOnGfx94);
  table->Add(names[4], Smfmac<float, 16, 128, kA, kB>, 4, kOnGfx950);
  table->Add(names[5], Smfmac<float, 32, 64, kA, kB>, 8, kOnGfx950);
}

#define AMDGPU_SIM_F8(types)                                        \
  {"v_mfma_f32_16x16x32_" types,    "v_mfma_f32_32x32x16_" types,   \
   "v_smfmac_f32_16x16x64_" types,  "v_smfmac_f32_32x32x32_" types, \
   "v_smfmac_f32_16x16x128_" types, "v_smfmac_f32_32x32x64_" types}

void AddF8(Table* table) {
  constexpr Format kF = Format::kFp8, kB = Format::kBf8;
  AddF8<kF, kF>(table, AMDGPU_SIM_F8("fp8_fp8"));
  AddF8<kF, kB>(table, AMDGPU_SIM_F8("fp8_bf8"));
  AddF8<kB, kF>(table, AMDGPU_SIM_F8("bf8_fp8"));
  AddF8<kB, kB>(table, AMDGPU_SIM_F8("bf8_bf8"));
  // The passes are those with an operand of 8 bits; half without.
  table->Add("v_mfma_f32_16x16x128_f8f6f4", MfmaF8f6f4<16, 128, false>, 8,
             kOnGfx950);
  table->Add("v_mfma_f32_32x32x64_f8f6f4", MfmaF8f6f4<32, 64, false>, 16,
             kOnGfx950);
  table->Add("v_mfma_scale_f32_16x16x128_f8f6f4", MfmaF8f6f4<16, 128, true>, 8,
             kOnGfx950);
  table->Add("v_mfma_scale_f32_32x32x64_f8f6f4", MfmaF8f6f4<32, 64, true>, 16,
             kOnGfx950);
  Ops& ops = table->ops();
  for (size_t i = ops.size() - 2; i < ops.size(); ++i) {
    ops[i].src[3] = ops[i].src[4] = Type::kF32;
    ops[i].modifiers |= kPacked;  // op_sel of the scales.
  }
}

#undef AMDGPU_SIM_F8

void AddF64(Table* table) {
  for (const uint8_t archs : {kOnGfx90a, kOnGfx942, kOnGfx950}) {
    const bool old = archs == kOnGfx90a;
    const int times = archs == kOnGfx950 ? 2 : 1;  // Half the rate.
    table->Add(old ? "v_mfma_f64_16x16x4f64" : "v_mfma_f64_16x16x4_f64",
               MfmaF64<16, 1>, 8 * times, archs);
    table->Add(old ? "v_mfma_f64_4x4x4f64" : "v_mfma_f64_4x4x4_4b_f64",
               MfmaF64<4, 4>, 4 * times, archs);
  }
}

void AddMoves(Table* table) {
  for (const char* name :
       {"v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32"}) {
    Op op{};
    op.mnemonic = name;
    op.execute = MoveAccum;
    op.inst_class = InstClass::kValu;
    op.dst[0] = Type::kB32;
    op.src[0] = Type::kB32;
    table->ops().push_back(op);
  }
}

}  // namespace

Ops MfmaOps() {
  Table table;
  AddF32(&table);
  AddF16(&table);
  AddBf16(&table);
  AddI8(&table);
  AddF8(&table);
  AddF64(&table);
  AddMoves(&table);
  return table.Take();
}

}  // namespace amdgpu_sim
