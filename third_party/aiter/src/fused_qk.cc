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
    AITER_RETURN_IF_ERROR(CheckRange(
        "heads * dim", std::max(a.heads, a.k_heads), 1, kMaxSize / a.dim));
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

}  // namespace

AITER_DEFINE_OPERATION(fused_qk_latent, Latent);
AITER_DEFINE_OPERATION(fused_qk_heads, Heads);

}  // namespace aiter
