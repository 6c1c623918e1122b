// SPDX-License-Identifier: Apache-2.0

#include "aiter/sampling.h"

#include <cstdint>
#include <string>

#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/sampling_params.h"

namespace aiter {
namespace {

// A column is 21 bits of a composite; a bin of a part's histogram counts them
// in 16 bits. kernels/sampling has the same.
constexpr int64_t kMaxRows = INT32_MAX / 64;
constexpr int64_t kMaxCols = 1 << 21;
constexpr int64_t kMaxParts = 64;
constexpr int64_t kMaxPart = 1 << 15;
constexpr int64_t kMaxK = 1024;
// A part is a multiple of all kernels' tiles.
constexpr int64_t kPartMultiple = 2048;
constexpr int64_t kAlignment = 8;  // Columns.

uint32_t If(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

int64_t PerPart(const sampling_args& a) {
  return CeilDiv(CeilDiv(a.cols, a.parts), kPartMultiple) * kPartMultiple;
}

Status CheckGiven(const char* name, const void* address) {
  return address != nullptr ? Status() : Invalid(name, "null", "given");
}

// What of the scratch a call needs.
enum class Scratch : uint8_t { kBest, kMaxima, kList, kAll };

Status CheckRows(const sampling_rows_args& a) {
  AITER_RETURN_IF_ERROR(CheckRange("rows", a.rows, 0, kMaxRows));
  AITER_RETURN_IF_ERROR(CheckRange("cols", a.cols, 1, kMaxCols));
  return CheckAligned(
      {{"logits_ptr", a.logits_ptr}, {"candidates_ptr", a.candidates_ptr}});
}

Status CheckRows(const sampling_args& a, Scratch scratch) {
  AITER_RETURN_IF_ERROR(CheckRows(a));
  AITER_RETURN_IF_ERROR(CheckRange("parts", a.parts, 1, kMaxParts));
  AITER_RETURN_IF_ERROR(
      CheckRange("columns of a part", PerPart(a), 1, kMaxPart));
  AITER_RETURN_IF_ERROR(CheckGiven("best_ptr", a.best_ptr));
  if (scratch >= Scratch::kMaxima) {
    AITER_RETURN_IF_ERROR(CheckGiven("maxima_ptr", a.maxima_ptr));
  }
  if (scratch >= Scratch::kList) {
    AITER_RETURN_IF_ERROR(CheckGiven("candidates_ptr", a.candidates_ptr));
    AITER_RETURN_IF_ERROR(CheckGiven("state_ptr", a.state_ptr));
  }
  if (scratch == Scratch::kAll) {
    AITER_RETURN_IF_ERROR(CheckGiven("histogram_ptr", a.histogram_ptr));
    AITER_RETURN_IF_ERROR(CheckGiven("sums_ptr", a.sums_ptr));
  }
  return CheckAligned({{"best_ptr", a.best_ptr},
                       {"maxima_ptr", a.maxima_ptr},
                       {"histogram_ptr", a.histogram_ptr},
                       {"sums_ptr", a.sums_ptr},
                       {"state_ptr", a.state_ptr}});
}

SamplingParams ParamsOf(const sampling_rows_args& a, const ProblemKey& key) {
  SamplingParams p;
  p.logits_ptr = a.logits_ptr;
  p.candidates_ptr = a.candidates_ptr;
  p.rows = static_cast<int32_t>(a.rows);
  p.cols = static_cast<int32_t>(a.cols);
  p.flags =
      static_cast<int32_t>(key.features & kKernelFlags) |
      static_cast<int32_t>(If(a.cols % kAlignment == 0, kSamplingAligned));
  return p;
}

SamplingParams ParamsOf(const sampling_args& a, const ProblemKey& key) {
  SamplingParams p = ParamsOf(static_cast<const sampling_rows_args&>(a), key);
  p.best_ptr = a.best_ptr;
  p.maxima_ptr = a.maxima_ptr;
  p.histogram_ptr = a.histogram_ptr;
  p.sums_ptr = a.sums_ptr;
  p.state_ptr = a.state_ptr;
  p.parts = static_cast<int32_t>(a.parts);
  p.per_part = static_cast<int32_t>(PerPart(a));
  return p;
}

// The list of columns that limits are found in, or the k largest.
Status AddList(const ProblemKey& key, Steps* steps, SamplingPlan* plan) {
  AITER_RETURN_IF_ERROR(steps->Add("sampling_largest", key, &plan->largest));
  AITER_RETURN_IF_ERROR(steps->Add("sampling_bound", key, &plan->bound));
  return steps->Add("sampling_gather", key, &plan->gather);
}

Status LaunchList(const Driver& driver, const SamplingParams& p,
                  const SamplingPlan& plan, void* stream) {
  AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.largest, &p, stream));
  AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.bound, &p, stream));
  return LaunchKernel(driver, plan.gather, &p, stream);
}

Status AddLimits(const ProblemKey& key, Steps* steps, SamplingPlan* plan) {
  AITER_RETURN_IF_ERROR(AddList(key, steps, plan));
  AITER_RETURN_IF_ERROR(steps->Add("sampling_weigh", key, &plan->weigh));
  AITER_RETURN_IF_ERROR(
      steps->Add("sampling_histogram", key, &plan->histogram));
  AITER_RETURN_IF_ERROR(steps->Add("sampling_bracket", key, &plan->bracket));
  AITER_RETURN_IF_ERROR(steps->Add("sampling_collect", key, &plan->collect));
  return steps->Add("sampling_threshold", key, &plan->threshold);
}

Status LaunchLimits(const Driver& driver, SamplingParams p,
                    const SamplingPlan& plan, void* stream) {
  AITER_RETURN_IF_ERROR(LaunchList(driver, p, plan, stream));
  AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.weigh, &p, stream));
  AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.histogram, &p, stream));
  const int phases = plan.key.features & kSamplingKFirst ? 2 : 1;
  for (p.phase = 0; p.phase < phases; ++p.phase) {
    AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.bracket, &p, stream));
    AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.collect, &p, stream));
    AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.threshold, &p, stream));
  }
  return Status();
}

struct Draw {
  using Args = sampling_draw_args;
  using Plan = SamplingPlan;

  static Status Check(const Args& a) {
    const bool limits = a.top_k_ptr != nullptr || a.top_p_ptr != nullptr;
    AITER_RETURN_IF_ERROR(CheckRows(a, limits ? Scratch::kAll
                                       : a.of == SamplingOf::kLargest
                                           ? Scratch::kBest
                                           : Scratch::kMaxima));
    const bool draws = a.of == SamplingOf::kDraw;
    if (a.of == SamplingOf::kLimit) {
      AITER_RETURN_IF_ERROR(CheckGiven("state_ptr", a.state_ptr));
      if (!limits) {
        return Invalid("top_k_ptr", "null", "given, or top_p_ptr, for a limit");
      }
    } else {
      AITER_RETURN_IF_ERROR(CheckGiven("tokens_ptr", a.tokens_ptr));
    }
    if (draws && a.exponentials_ptr == nullptr) {
      AITER_RETURN_IF_ERROR(CheckGiven("keys_ptr", a.keys_ptr));
    }
    if (a.of != SamplingOf::kLargest && !a.is_of_probs) {
      AITER_RETURN_IF_ERROR(CheckGiven("temperature_ptr", a.temperature_ptr));
    }
    if (a.is_k_first && (a.top_k_ptr == nullptr || a.top_p_ptr == nullptr)) {
      return Invalid("is_k_first", "true", "false without top_k and top_p");
    }
    return CheckAligned({{"keys_ptr", a.keys_ptr},
                         {"exponentials_ptr", a.exponentials_ptr},
                         {"temperature_ptr", a.temperature_ptr},
                         {"top_k_ptr", a.top_k_ptr},
                         {"top_p_ptr", a.top_p_ptr},
                         {"min_p_ptr", a.min_p_ptr},
                         {"mask_ptr", a.mask_ptr},
                         {"tokens_ptr", a.tokens_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.features = If(a.mask_ptr != nullptr, kSamplingMask) |
                   If(a.top_k_ptr != nullptr, kSamplingTopK) |
                   If(a.top_p_ptr != nullptr, kSamplingTopP) |
                   If(a.min_p_ptr != nullptr, kSamplingMinP) |
                   If(a.is_k_first, kSamplingKFirst) |
                   If(a.is_of_probs, kSamplingProbs) |
                   If(a.exponentials_ptr != nullptr, kSamplingGiven) |
                   If(a.of == SamplingOf::kLargest, kSamplingGreedy) |
                   If(a.of == SamplingOf::kLimit, kSamplingLimitOnly);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("sampling_draw", problem, 1, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    if (key.features & (kSamplingTopK | kSamplingTopP)) {
      AITER_RETURN_IF_ERROR(AddLimits(key, steps, plan));
    } else {
      AITER_RETURN_IF_ERROR(
          steps->Add("sampling_largest", key, &plan->largest));
    }
    if (key.features & kSamplingLimitOnly) return Status();
    if (!(key.features & kSamplingGreedy)) {
      AITER_RETURN_IF_ERROR(steps->Add("sampling_race", key, &plan->race));
    }
    return steps->Add("sampling_pick", key, &plan->pick);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    SamplingParams p = ParamsOf(a, plan.key);
    p.keys_ptr = a.keys_ptr;
    p.exponentials_ptr = a.exponentials_ptr;
    p.temperature_ptr = a.temperature_ptr;
    p.top_k_ptr = a.top_k_ptr;
    p.top_p_ptr = a.top_p_ptr;
    p.min_p_ptr = a.min_p_ptr;
    p.mask_ptr = a.mask_ptr;
    p.tokens_ptr = a.tokens_ptr;
    if (plan.histogram.info != nullptr) {
      AITER_RETURN_IF_ERROR(LaunchLimits(driver, p, plan, stream));
    } else {
      AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.largest, &p, stream));
    }
    if (plan.race.info != nullptr) {
      AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.race, &p, stream));
      p.plane = 1;
    }
    if (plan.pick.info == nullptr) return Status();
    return LaunchKernel(driver, plan.pick, &p, stream);
  }
};

struct TopK {
  using Args = sampling_top_k_args;
  using Plan = SamplingPlan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckRows(a, Scratch::kList));
    AITER_RETURN_IF_ERROR(CheckRange("k", a.k, 1, kMaxK));
    AITER_RETURN_IF_ERROR(CheckRange("k", a.k, 1, a.cols));
    return CheckAligned(
        {{"values_ptr", a.values_ptr}, {"columns_ptr", a.columns_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = static_cast<int32_t>(a.k);
    key.features = kSamplingRanked | kSamplingTopK;
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    AITER_RETURN_IF_ERROR(ProblemKeyOf("sampling_top_k", problem, 1, key));
    key->features |= kSamplingRanked | kSamplingTopK;
    return Status();
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    AITER_RETURN_IF_ERROR(AddList(key, steps, plan));
    return steps->Add("sampling_rank", key, &plan->rank);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    SamplingParams p = ParamsOf(a, plan.key);
    p.k = static_cast<int32_t>(a.k);
    p.values_ptr = a.values_ptr;
    p.tokens_ptr = a.columns_ptr;
    AITER_RETURN_IF_ERROR(LaunchList(driver, p, plan, stream));
    return LaunchKernel(driver, plan.rank, &p, stream);
  }
};

struct Select {
  using Args = sampling_select_args;
  using Plan = KernelPlan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckRows(a));
    AITER_RETURN_IF_ERROR(CheckGiven("candidates_ptr", a.candidates_ptr));
    AITER_RETURN_IF_ERROR(CheckRange("k", a.k, 1, kMaxCols));
    AITER_RETURN_IF_ERROR(CheckGiven("spans_ptr", a.spans_ptr));
    return CheckAligned(
        {{"spans_ptr", a.spans_ptr}, {"columns_ptr", a.columns_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("sampling_select", problem, 1, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    return steps->Add("sampling_select", key, &plan->kernel);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    SamplingParams p = ParamsOf(a, plan.key);
    p.k = static_cast<int32_t>(a.k);
    p.spans_ptr = a.spans_ptr;
    p.tokens_ptr = a.columns_ptr;
    return LaunchKernel(driver, plan.kernel, &p, stream);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(sampling_draw, Draw);
AITER_DEFINE_OPERATION(sampling_select, Select);
AITER_DEFINE_OPERATION(sampling_top_k, TopK);

}  // namespace aiter
