// SPDX-License-Identifier: Apache-2.0

#include "aiter/fused_qk.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "third_party/aiter/src/cache_side.h"
#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/select.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/fused_qk_params.h"

namespace aiter {
namespace {

// Kernels count rows and columns in 32 bits, and add a tile.
constexpr int64_t kMaxSize = kMaxPage;
// What divides the columns of calls for aligned rows.
constexpr int64_t kAligned = 16;
// Columns that rows are taken by where heads and groups are whole ones.
constexpr int64_t kRun = 128;
// Heads of a tile, to which a token's are rounded up.
constexpr int64_t kMaxTile = 64;

uint32_t If(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

int32_t Number(int64_t n) { return static_cast<int32_t>(n); }

struct Latent {
  using Args = fused_qk_latent_args;
  using Plan = KernelPlan;

  static Status Check(const Args& a) {
    if (a.data_type != DataType::kFp16 && a.data_type != DataType::kBf16) {
      return Invalid("data_type", DataTypeName(a.data_type), "fp16 or bf16");
    }
    AITER_RETURN_IF_ERROR(CheckRange("tokens", a.tokens, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("heads", a.heads, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("lora", a.lora, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("rope", a.rope, 2, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("table_rows", a.table_rows, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("slots", a.slots, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("width", a.width, 1, kMaxSize));
    if (a.rope % 2 != 0) {
      return Invalid("rope", std::to_string(a.rope), "even");
    }
    if (a.first < a.lora || a.first + a.rope > a.width) {
      return Invalid("first", std::to_string(a.first),
                     "behind lora, with rope columns to the width");
    }
    if (!(a.eps >= 0) || !std::isfinite(a.eps)) {
      return Invalid("eps", std::to_string(a.eps), "finite and not negative");
    }
    return CheckAligned({{"q_nope_ptr", a.q_nope_ptr},
                         {"q_pe_ptr", a.q_pe_ptr},
                         {"kv_c_ptr", a.kv_c_ptr},
                         {"k_pe_ptr", a.k_pe_ptr},
                         {"weight_ptr", a.weight_ptr},
                         {"cos_ptr", a.cos_ptr},
                         {"sin_ptr", a.sin_ptr},
                         {"q_out_ptr", a.q_out_ptr},
                         {"kv_cache_ptr", a.kv_cache_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = static_cast<int32_t>(a.lora);
    key.dims[1] = static_cast<int32_t>(a.rope);
    bool aligned = true;
    for (int64_t cols : {a.lora, a.rope, a.width, a.first}) {
      aligned = aligned && cols % kAligned == 0;
    }
    key.features = If(a.is_gptj, kFusedQkGptj) |
                   If(a.weight_ptr != nullptr, kFusedQkNorm) |
                   If(a.kind != FusedKind::kSame, kFusedQkCacheBytes) |
                   If(a.q_kind != FusedKind::kSame, kFusedQkQBytes) |
                   If(a.k_scale_ptr != nullptr, kFusedQkKScaled) |
                   If(a.q_scale_ptr != nullptr, kFusedQkQScaled) |
                   If(!aligned, kFusedQkUnaligned);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("fused_qk_latent", problem, 2, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    return steps->Add("fused_qk_latent", key, &plan->kernel);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    AITER_RETURN_IF_ERROR(CopyBytes(driver, a.kv_cache_ptr, a.kv_cache_from_ptr,
                                    a.kv_cache_bytes, stream));
    FusedQkParams p;
    p.q_nope_ptr = a.q_nope_ptr;
    p.q_pe_ptr = a.q_pe_ptr;
    p.kv_c_ptr = a.kv_c_ptr;
    p.k_pe_ptr = a.k_pe_ptr;
    p.weight_ptr = a.weight_ptr;
    p.cos_ptr = a.cos_ptr;
    p.sin_ptr = a.sin_ptr;
    p.positions_ptr = a.positions_ptr;
    p.slots_ptr = a.slots_ptr;
    p.q_scale_ptr = a.q_scale_ptr;
    p.k_scale_ptr = a.k_scale_ptr;
    p.q_out_ptr = p.q_out_bytes_ptr = a.q_out_ptr;
    p.kv_cache_ptr = p.kv_bytes_ptr = a.kv_cache_ptr;
    p.tokens = Number(a.tokens);
    p.heads = Number(a.heads);
    p.lora = Number(a.lora);
    p.rope = Number(a.rope);
    p.table_rows = Number(a.table_rows);
    p.num_slots = Number(a.slots);
    p.width = Number(a.width);
    p.first = Number(a.first);
    p.kind = std::max(static_cast<int32_t>(a.kind), 0);
    p.q_kind = std::max(static_cast<int32_t>(a.q_kind), 0);
    p.eps = a.eps;
    p.flags = static_cast<int32_t>(plan.key.features & kKernelFlags);
    return LaunchKernel(driver, plan.kernel, &p, stream);
  }
};

struct Heads {
  using Args = fused_qk_heads_args;
  using Plan = KernelPlan;

  // Elements of 16 bytes of the caches.
  static int64_t RunOf(const Args& a) {
    return a.kind == FusedKind::kSame ? 8 : 16;
  }

  static Status CheckHalf(const std::string& name, const Args& a,
                          const cache_half& h) {
    if (a.pages == 0) return Status();
    int64_t heads = a.tokens == 0 ? 0 : a.k_heads;
    AITER_RETURN_IF_ERROR(
        CheckPlaces(name, h, heads, a.pages, a.page_size, RunOf(a)));
    if (a.token) {
      return CheckScalePlaces(name, h, heads, a.pages, a.page_size);
    }
    return h.scale_ptr == nullptr ? Status()
                                  : CheckScalePlaces(name, h, heads, 1, 1);
  }

  static Status Check(const Args& a) {
    if (a.data_type != DataType::kFp16 && a.data_type != DataType::kBf16) {
      return Invalid("data_type", DataTypeName(a.data_type), "fp16 or bf16");
    }
    AITER_RETURN_IF_ERROR(CheckRange("tokens", a.tokens, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("heads", a.heads, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("k_heads", a.k_heads, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("v_heads", a.v_heads, 0, a.k_heads));
    AITER_RETURN_IF_ERROR(CheckRange("dim", a.dim, 2, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("pairs", a.pairs, 1, a.dim / 2));
    AITER_RETURN_IF_ERROR(CheckRange("first", a.first, 0, a.dim - 2 * a.pairs));
    for (int64_t stride : {a.q_stride, a.k_stride, a.v_stride}) {
      AITER_RETURN_IF_ERROR(CheckRange("stride", stride, 0, kMaxSize));
    }
    int64_t most = std::max(a.heads, a.k_heads);
    AITER_RETURN_IF_ERROR(CheckRange("heads * dim", most, 1, kMaxSize / a.dim));
    AITER_RETURN_IF_ERROR(CheckRange("tokens * heads", a.tokens, 0,
                                     kMaxSize / (most + kMaxTile)));
    AITER_RETURN_IF_ERROR(CheckRange("table_rows", a.table_rows, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(
        CheckRange("table_stride", a.table_stride, a.pairs, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("pages", a.pages, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(
        CheckRange("page_size", a.page_size, a.pages > 0 ? 1 : 0, kMaxSize));
    AITER_RETURN_IF_ERROR(
        CheckRange("pages * page_size", a.pages * a.page_size, 0, kMaxSize));
    if (a.token && a.kind == FusedKind::kSame) {
      return Invalid("token", "true", "false without numbers of 8 bits");
    }
    if (!(a.eps >= 0) || !std::isfinite(a.eps)) {
      return Invalid("eps", std::to_string(a.eps), "finite and not negative");
    }
    AITER_RETURN_IF_ERROR(CheckHalf("k", a, a.k_half));
    AITER_RETURN_IF_ERROR(CheckHalf("v", a, a.v_half));
    return CheckAligned({{"q_ptr", a.q_ptr},
                         {"q_weight_ptr", a.q_weight_ptr},
                         {"k_weight_ptr", a.k_weight_ptr},
                         {"cos_ptr", a.cos_ptr},
                         {"q_out_ptr", a.q_out_ptr},
                         {"k_out_ptr", a.k_out_ptr},
                         {"v_out_ptr", a.v_out_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = Number(a.dim);
    key.dims[1] = Number(2 * a.pairs);
    bool aligned = true;
    for (int64_t cols : {a.dim, a.pairs, a.first}) {
      aligned = aligned && cols % kAligned == 0;
    }
    bool caches = a.pages > 0;
    int64_t run = RunOf(a);
    key.features =
        If(a.is_gptj, kFusedQkGptj) |
        If(a.q_weight_ptr != nullptr, kFusedQkNorm) |
        If(a.is_gemma, kFusedQkGemma) | If(a.is_joint, kFusedQkJoint) |
        If(a.has_sections, kFusedQkSections) |
        If(a.is_interleaved, kFusedQkInterleaved) |
        If(a.has_f32_tables, kFusedQkF32Tables) | If(a.token, kFusedQkToken) |
        If(a.k_out_ptr != nullptr, kFusedQkKvOut) |
        If(a.kind != FusedKind::kSame, kFusedQkCacheBytes) |
        If(a.q_kind != FusedKind::kSame, kFusedQkQBytes) |
        If(a.q_scale_ptr != nullptr, kFusedQkQScaled) |
        If(a.k_half.scale_ptr != nullptr, kFusedQkKScaled) |
        If(a.v_half.scale_ptr != nullptr, kFusedQkVScaled) |
        If(caches && IsOfRuns(a.k_half, run), kFusedQkKRuns) |
        If(caches && IsOfRuns(a.v_half, run), kFusedQkVRuns) |
        If(!aligned, kFusedQkUnaligned) |
        If(2 * a.pairs != a.dim, kFusedQkPartial);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("fused_qk_heads", problem, 2, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    return steps->Add("fused_qk_heads", key, &plan->kernel);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    AITER_RETURN_IF_ERROR(BringHalf(driver, a.k_half, stream));
    AITER_RETURN_IF_ERROR(BringHalf(driver, a.v_half, stream));
    using P = FusedQkParams;
    P p;
    if (a.pages > 0) {
      int64_t run = RunOf(a);
      SetSide<P>(a.k_half, run,
                 {&P::k_start, &P::k_page, &P::k_run_offset, &P::k_offset,
                  &P::k_split, &P::k_head, &P::k_run, &P::k_col},
                 &p);
      SetSide<P>(a.v_half, run,
                 {&P::v_start, &P::v_page, &P::v_run_offset, &P::v_offset,
                  &P::v_split, &P::v_head, &P::v_run, &P::v_col},
                 &p);
    }
    const auto set = [](const cache_scales& s, int64_t* start, int64_t* page,
                        int32_t* offset, int64_t* head) {
      *start = s.start;
      *page = s.page;
      *offset = Number(s.offset);
      *head = s.head;
    };
    set(a.k_half.scales, &p.k_scale_start, &p.k_scale_page, &p.k_scale_offset,
        &p.k_scale_head);
    set(a.v_half.scales, &p.v_scale_start, &p.v_scale_page, &p.v_scale_offset,
        &p.v_scale_head);
    p.q_ptr = a.q_ptr;
    p.k_ptr = a.k_ptr;
    p.v_ptr = a.v_ptr;
    p.q_weight_ptr = a.q_weight_ptr;
    p.k_weight_ptr = a.k_weight_ptr;
    p.cos_ptr = p.cos_own_ptr = a.cos_ptr;
    p.sin_ptr = p.sin_own_ptr = a.sin_ptr;
    p.positions_ptr = a.positions_ptr;
    p.slots_ptr = a.slots_ptr;
    p.q_scale_ptr = a.q_scale_ptr;
    p.k_scale_ptr = a.k_half.scale_ptr;
    p.v_scale_ptr = a.v_half.scale_ptr;
    p.q_out_ptr = p.q_out_bytes_ptr = a.q_out_ptr;
    p.k_out_ptr = a.k_out_ptr;
    p.v_out_ptr = a.v_out_ptr;
    p.k_cache_ptr = p.k_bytes_ptr = a.k_half.cache_ptr;
    p.v_cache_ptr = p.v_bytes_ptr = a.v_half.cache_ptr;
    p.tokens = Number(a.tokens);
    p.heads = Number(a.heads);
    p.k_heads = Number(a.k_heads);
    p.v_heads = Number(a.v_heads);
    p.q_stride = Number(a.q_stride);
    p.k_stride = Number(a.k_stride);
    p.v_stride = Number(a.v_stride);
    p.dim = Number(a.dim);
    p.pairs = Number(a.pairs);
    p.first = Number(a.first);
    p.table_rows = Number(a.table_rows);
    p.table_stride = Number(a.table_stride);
    p.section_0 = Number(a.section_0);
    p.section_1 = Number(a.section_1);
    p.num_slots = Number(a.pages * a.page_size);
    p.page_size = Number(a.page_size);
    p.kind = std::max(static_cast<int32_t>(a.kind), 0);
    p.q_kind = std::max(static_cast<int32_t>(a.q_kind), 0);
    p.eps = a.eps;
    p.flags = static_cast<int32_t>(plan.key.features & kKernelFlags);
    return LaunchKernel(driver, plan.kernel, &p, stream);
  }
};

struct Rows {
  using Args = fused_qk_rows_args;
  using Plan = KernelPlan;

  static Status CheckNorm(const Args& a) {
    for (float eps : {a.eps, a.k_eps}) {
      if (!(eps >= 0) || !std::isfinite(eps)) {
        return Invalid("eps", std::to_string(eps), "finite and not negative");
      }
    }
    if (a.k_cols != 0 && a.parts != 1) {
      return Invalid("parts", std::to_string(a.parts), "1 of rows with keys");
    }
    if (a.gate_ptr == nullptr && (a.is_sigmoid || a.is_gated_first)) {
      return Invalid("gate_ptr", "null", "there, for a gate's kind or place");
    }
    if (a.q_weight_ptr == nullptr && a.bias_ptr != nullptr) {
      return Invalid("bias_ptr", "given", "null without q_weight_ptr");
    }
    if (a.q_weight_ptr == nullptr) return Status();
    if (a.dim == 0 && a.parts != 1) {
      return Invalid("parts", std::to_string(a.parts), "1 of a row's norm");
    }
    if (a.dim != 0 && a.dim != 32 && a.dim != 64 && a.dim != 128 &&
        a.dim != 256) {
      return Invalid("dim", std::to_string(a.dim), "32, 64, 128 or 256");
    }
    return Status();
  }

  static Status CheckTurn(const Args& a) {
    if (a.positions_ptr == nullptr) return Status();
    for (const void* other :
         {a.residual_ptr, a.gate_ptr, a.q_weight_ptr, a.k_ptr, a.q_scale_ptr}) {
      if (other != nullptr) {
        return Invalid("positions_ptr", "given", "null but of heads alone");
      }
    }
    if (a.codes_ptr != nullptr && (a.group == 0 || a.least != 0 ||
                                   a.is_narrow || a.mode != MxRounding::kUp)) {
      return Invalid("positions_ptr", "given", "with groups rounded up");
    }
    AITER_RETURN_IF_ERROR(CheckRange("dim", a.dim, 2, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("pairs", a.pairs, 1, a.dim / 2));
    AITER_RETURN_IF_ERROR(CheckRange("first", a.first, 0, a.dim - 2 * a.pairs));
    return CheckRange("table_rows", a.table_rows, 1, kMaxSize);
  }

  static Status CheckScales(const Args& a) {
    if (a.codes_ptr == nullptr) return Status();
    if (a.q_type < DataType::kI8 || a.q_type > DataType::kE2m1) {
      return Invalid("q_type", DataTypeName(a.q_type),
                     "i8, e4m3fn, e4m3fnuz or e2m1");
    }
    if (a.group != 0 && a.group != 32 && a.group != 64 && a.group != 128) {
      return Invalid("group", std::to_string(a.group), "0, 32, 64 or 128");
    }
    if (a.q_scale_ptr != nullptr) return Status();
    if (a.parts != 1 && (a.group == 0 || a.cols % a.group != 0)) {
      return Invalid("parts", std::to_string(a.parts), "1, or of whole groups");
    }
    for (int64_t stride : {a.scale_token, a.scale_group}) {
      AITER_RETURN_IF_ERROR(CheckRange("scale stride", stride, 0, kMaxSize));
    }
    return Status();
  }

  static Status Check(const Args& a) {
    if (a.data_type != DataType::kFp16 && a.data_type != DataType::kBf16) {
      return Invalid("data_type", DataTypeName(a.data_type), "fp16 or bf16");
    }
    AITER_RETURN_IF_ERROR(CheckRange("tokens", a.tokens, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("parts", a.parts, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(
        CheckRange("tokens * parts", a.tokens, 0, kMaxSize / (a.parts + 1)));
    AITER_RETURN_IF_ERROR(CheckRange("cols", a.cols, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("k_cols", a.k_cols, 0, kMaxSize));
    if (a.dim != 0 && a.cols % a.dim != 0) {
      return Invalid("cols", std::to_string(a.cols), "whole heads");
    }
    AITER_RETURN_IF_ERROR(CheckNorm(a));
    AITER_RETURN_IF_ERROR(CheckTurn(a));
    AITER_RETURN_IF_ERROR(CheckScales(a));
    return CheckAligned({{"q_ptr", a.q_ptr},
                         {"residual_ptr", a.residual_ptr},
                         {"gate_ptr", a.gate_ptr},
                         {"q_weight_ptr", a.q_weight_ptr},
                         {"bias_ptr", a.bias_ptr},
                         {"k_ptr", a.k_ptr},
                         {"k_weight_ptr", a.k_weight_ptr},
                         {"q_out_ptr", a.q_out_ptr},
                         {"residual_out_ptr", a.residual_out_ptr},
                         {"codes_ptr", a.codes_ptr},
                         {"k_out_ptr", a.k_out_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = Number(a.cols);
    key.dims[1] = Number(a.k_cols);
    bool aligned = a.cols % kAligned == 0 && a.k_cols % kAligned == 0;
    bool norm = a.q_weight_ptr != nullptr;
    bool turned = a.positions_ptr != nullptr;
    bool codes = a.codes_ptr != nullptr;
    bool given = a.q_scale_ptr != nullptr;
    // Heads with a norm are runs; heads that are turned, a power of two of
    // them.
    bool whole =
        (!norm || a.dim == 0 || a.dim == kRun) &&
        (!codes || a.group == 0 || a.group == kRun) &&
        (!turned || (a.dim % kRun == 0 && (a.dim & (a.dim - 1)) == 0 &&
                     a.pairs % kAligned == 0 && a.first % kAligned == 0));
    bool rare = a.bias_ptr != nullptr || a.is_sigmoid || a.is_gated_first ||
                a.is_narrow || (a.scale_is_e8m0 && a.mode != MxRounding::kUp);
    key.features = If(norm, kFusedQkNorm) | If(a.is_gemma, kFusedQkGemma) |
                   If(norm && a.dim == 0, kFusedQkJoint) |
                   If(rare, kFusedQkRare) | If(a.is_gptj, kFusedQkGptj) |
                   If(a.residual_ptr != nullptr, kFusedQkResidual) |
                   If(a.gate_ptr != nullptr, kFusedQkGate) |
                   If(turned, kFusedQkTurned) |
                   If(a.q_out_ptr != nullptr, kFusedQkQOut) |
                   If(a.k_cols != 0, kFusedQkKeys) | If(codes, kFusedQkQBytes) |
                   If(given, kFusedQkQScaled) |
                   If(codes && !given && a.group == 0, kFusedQkToken) |
                   If(a.scale_is_e8m0, kFusedQkE8m0) |
                   If(!whole, kFusedQkShort) | If(!aligned, kFusedQkUnaligned);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("fused_qk_rows", problem, 2, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    bool turned = (key.features & kFusedQkTurned) != 0;
    return steps->Add(turned ? "fused_qk_turned" : "fused_qk_rows", key,
                      &plan->kernel);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    FusedQkParams p;
    p.q_ptr = a.q_ptr;
    p.residual_ptr = a.residual_ptr;
    p.gate_ptr = a.gate_ptr;
    p.q_weight_ptr = a.q_weight_ptr;
    p.bias_ptr = a.bias_ptr;
    p.k_ptr = a.k_ptr;
    p.k_weight_ptr = a.k_weight_ptr;
    p.cos_ptr = a.cos_ptr;
    p.sin_ptr = a.sin_ptr;
    p.positions_ptr = a.positions_ptr;
    p.q_scale_ptr = a.q_scale_ptr;
    p.q_out_ptr = a.q_out_ptr;
    p.q_out_bytes_ptr = a.codes_ptr;
    p.residual_out_ptr = a.residual_out_ptr;
    p.scale_ptr = p.scale_e8m0_ptr = a.scale_ptr;
    p.k_out_ptr = a.k_out_ptr;
    p.tokens = Number(a.tokens);
    p.parts = Number(a.parts);
    p.cols = Number(a.cols);
    p.k_cols = Number(a.k_cols);
    // Nothing is divided by 0 where there are no heads.
    p.dim = Number(a.dim == 0 ? a.cols : a.dim);
    p.pairs = Number(a.pairs);
    p.first = Number(a.first);
    p.table_rows = Number(a.table_rows);
    p.group = Number(a.group);
    p.scale_token = Number(a.scale_token);
    p.scale_group = Number(a.scale_group);
    p.kind =
        static_cast<int32_t>(a.q_type) - static_cast<int32_t>(DataType::kI8);
    p.mode = static_cast<int32_t>(a.mode);
    p.has_bias = a.bias_ptr != nullptr;
    p.is_sigmoid = a.is_sigmoid;
    p.is_gated_first = a.is_gated_first;
    p.is_narrow = a.is_narrow;
    p.eps = a.eps;
    p.k_eps = a.k_eps;
    p.least = a.least;
    // This kernel is told of those that select, too.
    p.flags = static_cast<int32_t>(plan.key.features);
    return LaunchKernel(driver, plan.kernel, &p, stream);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(fused_qk_latent, Latent);
AITER_DEFINE_OPERATION(fused_qk_heads, Heads);
AITER_DEFINE_OPERATION(fused_qk_rows, Rows);

}  // namespace aiter
