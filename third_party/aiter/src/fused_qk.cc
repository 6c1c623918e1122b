// SPDX-License-Identifier: Apache-2.0

#include "aiter/fused_qk.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

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
constexpr int64_t kMaxSize = INT32_MAX - 8192;
// What divides the columns of calls for aligned rows.
constexpr int64_t kAligned = 16;

uint32_t If(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

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
    const auto number = [](int64_t n) { return static_cast<int32_t>(n); };
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
    p.tokens = number(a.tokens);
    p.heads = number(a.heads);
    p.lora = number(a.lora);
    p.rope = number(a.rope);
    p.table_rows = number(a.table_rows);
    p.num_slots = number(a.slots);
    p.width = number(a.width);
    p.first = number(a.first);
    p.kind = std::max(static_cast<int32_t>(a.kind), 0);
    p.q_kind = std::max(static_cast<int32_t>(a.q_kind), 0);
    p.eps = a.eps;
    p.flags = static_cast<int32_t>(plan.key.features & kKernelFlags);
    return LaunchKernel(driver, plan.kernel, &p, stream);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(fused_qk_latent, Latent);

}  // namespace aiter
