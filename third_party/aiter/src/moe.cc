// SPDX-License-Identifier: Apache-2.0

#include "aiter/moe.h"

#include <cstdint>

#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/moe_params.h"

namespace aiter {
namespace {

// Places are 31 bits.
constexpr int64_t kMaxSize = 1 << 30;

struct TopK {
  using Args = moe_topk_args;
  using Plan = KernelPlan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckRange("rows", a.rows, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("groups", a.groups, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("size", a.size, 1, kMaxSize / a.groups));
    AITER_RETURN_IF_ERROR(
        CheckRange("topk_groups", a.topk_groups, 1, a.groups));
    AITER_RETURN_IF_ERROR(CheckRange("k", a.k, 1, a.topk_groups * a.size));
    return CheckAligned({{"scores_ptr", a.scores_ptr}, {"ids_ptr", a.ids_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = static_cast<int32_t>(a.groups);
    key.dims[1] = static_cast<int32_t>(a.size);
    key.features = a.by_sum ? kMoeBySum : 0;
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("moe_topk", problem, 2, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    return steps->Add("moe_topk", key, &plan->kernel);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    MoeParams p;
    p.scores_ptr = a.scores_ptr;
    p.ids_ptr = a.ids_ptr;
    p.rows = static_cast<int32_t>(a.rows);
    p.groups = static_cast<int32_t>(a.groups);
    p.size = static_cast<int32_t>(a.size);
    p.topk_groups = static_cast<int32_t>(a.topk_groups);
    p.k = static_cast<int32_t>(a.k);
    p.flags = static_cast<int32_t>(plan.key.features & kKernelFlags);
    return LaunchKernel(driver, plan.kernel, &p, stream);
  }
};

struct Sort {
  using Args = moe_sort_args;
  using Plan = MoeSortPlan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckRange("entries", a.entries, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("experts", a.experts, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(
        CheckRange("block", a.block, 1, kMaxSize / a.experts));
    return CheckAligned({{"ids_ptr", a.ids_ptr},
                         {"counts_ptr", a.counts_ptr},
                         {"place_ptr", a.place_ptr},
                         {"order_ptr", a.order_ptr},
                         {"partial_ptr", a.partial_ptr}});
  }

  static ProblemKey KeyOf(const Args&) { return ProblemKey(); }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    *key = ProblemKey();
    ProblemKey asked;
    return ProblemKeyOf("moe_sort", problem, 0, &asked);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    AITER_RETURN_IF_ERROR(steps->Add("moe_count", key, &plan->count));
    AITER_RETURN_IF_ERROR(steps->Add("moe_scan", key, &plan->scan));
    return steps->Add("moe_place", key, &plan->place);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    MoeParams p;
    p.ids_ptr = a.ids_ptr;
    p.counts_ptr = a.counts_ptr;
    p.partial_ptr = a.partial_ptr;
    p.place_ptr = a.place_ptr;
    p.order_ptr = a.order_ptr;
    p.entries = static_cast<int32_t>(a.entries);
    p.experts = static_cast<int32_t>(a.experts);
    p.parts = static_cast<int32_t>(CeilDiv(a.entries, kMoePart));
    p.block = static_cast<int32_t>(a.block);
    if (a.entries == 0) {  // Nothing counts, and so nothing clears.
      AITER_RETURN_IF_ERROR(
          FillZero(driver, a.order_ptr,
                   a.experts * (a.block - 1) * sizeof(int32_t), stream));
    }
    AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.count, &p, stream));
    AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.scan, &p, stream));
    return LaunchKernel(driver, plan.place, &p, stream);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(moe_topk, TopK);
AITER_DEFINE_OPERATION(moe_sort, Sort);

}  // namespace aiter
