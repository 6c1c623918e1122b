// SPDX-License-Identifier: Apache-2.0

#include "aiter/rope.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/rope_params.h"

namespace aiter {
namespace {

// The kernel counts tokens and elements of a tile of tokens and of a table in
// 32 bits; of positions there may be three a token.
constexpr int64_t kMaxTokens = INT32_MAX / 4;
constexpr int64_t kMaxTokenElements = 1 << 25;
constexpr int64_t kMaxTableElements = INT32_MAX - 1024;
constexpr int64_t kMaxNumbers = INT32_MAX;  // Of a kernel that counts them.

Status CheckTokens(const rope_rotate_args& a) {
  AITER_RETURN_IF_ERROR(CheckRange("outer", a.outer, 0, kMaxTokens));
  AITER_RETURN_IF_ERROR(CheckRange("seq", a.seq, 0, kMaxTokens));
  AITER_RETURN_IF_ERROR(CheckRange("inner", a.inner, 0, kMaxTokens));
  if (a.outer * a.seq > kMaxTokens ||
      (a.inner > 0 && a.outer * a.seq > kMaxTokens / a.inner)) {
    return Invalid("outer * seq * inner", "more",
                   "at most " + std::to_string(kMaxTokens));
  }
  return Status();
}

Status CheckHeads(const char* name, int64_t heads, int64_t dim) {
  return CheckRange(name, heads, 0, kMaxTokenElements / dim);
}

Status CheckTables(const rope_rotate_args& a) {
  int64_t width = a.is_full ? 2 * a.pairs : a.pairs;
  AITER_RETURN_IF_ERROR(
      CheckRange("table_rows", a.table_rows, 1, kMaxTableElements / width));
  if (!a.is_per_token) return Status();
  int64_t tokens = a.outer * a.seq * a.inner;
  if (a.table_rows != tokens) {
    return Invalid("table_rows", std::to_string(a.table_rows),
                   std::to_string(tokens) + ", as the tokens");
  }
  if (a.positions_ptr != nullptr || a.offsets_ptr != nullptr ||
      a.cu_seqlens_ptr != nullptr || a.has_sections) {
    return Invalid("is_per_token", "true", "false with any places");
  }
  return Status();
}

Status CheckRuns(const rope_rotate_args& a) {
  AITER_RETURN_IF_ERROR(CheckRange("section_1", a.section_1, 0, a.pairs));
  AITER_RETURN_IF_ERROR(CheckRange("section_0", a.section_0, 0, a.section_1));
  AITER_RETURN_IF_ERROR(CheckRange("split_1", a.split_1, 0, a.pairs));
  AITER_RETURN_IF_ERROR(CheckRange("split_0", a.split_0, 0, a.split_1));
  AITER_RETURN_IF_ERROR(CheckRange("grid_h", a.grid_h, 0, INT32_MAX));
  AITER_RETURN_IF_ERROR(
      CheckRange("grid_w", a.grid_w, a.grid_h > 0 ? 1 : 0, INT32_MAX));
  if (a.has_sections && a.grid_h == 0 && a.positions_ptr == nullptr) {
    return Invalid("positions_ptr", "null", "given with has_sections");
  }
  if (a.grid_h > 0 && !a.has_sections) {
    return Invalid("has_sections", "false", "true with grid_h");
  }
  return Status();
}

uint32_t If(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

uint32_t Alignment(const rope_rotate_args& a) {
  uint32_t features = If(a.dim % 8 != 0, kRopeUnaligned | kRopeByFour);
  for (int64_t size :
       {a.pairs, a.section_0, a.section_1, a.split_0, a.split_1}) {
    features |=
        If(size % 4 != 0, kRopeUnaligned) | If(size % 8 != 0, kRopeByFour);
  }
  return features;
}

// Whether a head's pairs are not two halves, or there are too many.
bool IsSplit(const rope_rotate_args& a) {
  for (int64_t end : {a.split_0, a.split_1}) {
    if (end != 0 && end != a.pairs) return true;
  }
  const int64_t heads = std::max<int64_t>({a.heads_x, a.heads_y, 1});
  return a.outer * a.seq * a.inner * a.dim > kMaxNumbers / heads;
}

struct Rotate {
  using Args = rope_rotate_args;
  using Plan = KernelPlan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckTokens(a));
    AITER_RETURN_IF_ERROR(CheckRange("dim", a.dim, 1, kMaxTokenElements));
    AITER_RETURN_IF_ERROR(CheckRange("pairs", a.pairs, 1, a.dim / 2));
    AITER_RETURN_IF_ERROR(CheckHeads("heads_x", a.heads_x, a.dim));
    AITER_RETURN_IF_ERROR(CheckHeads("heads_y", a.heads_y, a.dim));
    AITER_RETURN_IF_ERROR(CheckTables(a));
    AITER_RETURN_IF_ERROR(CheckRuns(a));
    AITER_RETURN_IF_ERROR(CheckRange("sequences", a.sequences,
                                     a.cu_seqlens_ptr != nullptr ? 1 : 0,
                                     INT32_MAX));
    if (a.heads_y > 0 && (a.y_ptr == nullptr || a.y_out_ptr == nullptr)) {
      return Invalid(a.y_ptr == nullptr ? "y_ptr" : "y_out_ptr", "null",
                     "given with heads_y");
    }
    return CheckAligned({{"x_ptr", a.x_ptr},
                         {"y_ptr", a.y_ptr},
                         {"cos_ptr", a.cos_ptr},
                         {"sin_ptr", a.sin_ptr},
                         {"positions_ptr", a.positions_ptr},
                         {"offsets_ptr", a.offsets_ptr},
                         {"cu_seqlens_ptr", a.cu_seqlens_ptr},
                         {"x_out_ptr", a.x_out_ptr},
                         {"y_out_ptr", a.y_out_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = static_cast<int32_t>(a.pairs);
    key.features = If(a.is_gptj, kRopeGptj) | If(a.is_full, kRopeFull) |
                   If(a.is_transposed, kRopeTransposed) |
                   If(a.tables_are_f32, kRopeF32Tables) |
                   If(a.is_per_token, kRopePerToken) |
                   If(a.positions_ptr != nullptr, kRopePositions) |
                   If(a.offsets_ptr != nullptr, kRopeOffsets) |
                   If(a.cu_seqlens_ptr != nullptr, kRopeCuSeqlens) |
                   If(a.has_sections, kRopeSections) |
                   If(a.grid_h > 0, kRopeGrid) |
                   If(a.dim != 2 * a.pairs, kRopePartial) |
                   If(IsSplit(a), kRopeSplit) | Alignment(a);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("rope_rotate", problem, 1, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    return steps->Add("rope_rotate", key, &plan->kernel);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    RopeParams p;
    p.x_ptr = a.x_ptr;
    p.y_ptr = a.y_ptr;
    p.cos_ptr = p.cos_f32_ptr = a.cos_ptr;
    p.sin_ptr = p.sin_f32_ptr = a.sin_ptr;
    p.positions_ptr = a.positions_ptr;
    p.offsets_ptr = a.offsets_ptr;
    p.cu_seqlens_ptr = a.cu_seqlens_ptr;
    p.x_out_ptr = a.x_out_ptr;
    p.y_out_ptr = a.y_out_ptr;
    const auto number = [](int64_t n) { return static_cast<int32_t>(n); };
    p.tokens = number(a.outer * a.seq * a.inner);
    p.seqlen = number(a.seq);
    p.inner = number(a.inner);
    p.heads_x = number(a.heads_x);
    p.heads_y = number(a.heads_y);
    p.dim = number(a.dim);
    p.pairs = number(a.pairs);
    p.first = number(a.is_nope_first ? a.dim - 2 * a.pairs : 0);
    p.table_rows = number(a.table_rows);
    p.sequences = number(a.sequences);
    p.grid_h = number(a.grid_h);
    p.grid_w = number(a.grid_w);
    p.section_0 = number(a.section_0);
    p.section_1 = number(a.section_1);
    p.split_0 = number(a.split_0);
    p.split_1 = number(a.split_1);
    p.flags = static_cast<int32_t>(plan.key.features & kKernelFlags);
    return LaunchKernel(driver, plan.kernel, &p, stream);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(rope_rotate, Rotate);

}  // namespace aiter
