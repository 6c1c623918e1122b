// SPDX-License-Identifier: Apache-2.0

#include "aiter/indexer.h"

#include <cstdint>
#include <string>

#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/select.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/indexer_params.h"

namespace aiter {
namespace {

// Kernels count rows and columns in 32 bits, and add a tile.
constexpr int64_t kMaxSize = INT32_MAX - 8192;
constexpr int64_t kAligned = 16;
constexpr int64_t kScaleBytes = 4;

struct Logits {
  using Args = indexer_logits_args;
  using Plan = KernelPlan;

  static Status Check(const Args& a) {
    if (a.data_type != DataType::kE4m3fn &&
        a.data_type != DataType::kE4m3fnuz) {
      return Invalid("data_type", DataTypeName(a.data_type),
                     "e4m3fn or e4m3fnuz");
    }
    AITER_RETURN_IF_ERROR(CheckRange("sequences", a.sequences, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("next_n", a.next_n, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(
        CheckRange("sequences * next_n", a.sequences * a.next_n, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("heads", a.heads, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("dim", a.dim, 1, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("cols", a.cols, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("page_size", a.page_size, 0, kMaxSize));
    if (a.dim % kAligned != 0) {
      return Invalid("dim", std::to_string(a.dim), "a multiple of 16");
    }
    if (a.page_size > 0) {
      AITER_RETURN_IF_ERROR(CheckRange("pages", a.pages, 0, kMaxSize));
      AITER_RETURN_IF_ERROR(
          CheckRange("table_width", a.table_width, 0, kMaxSize));
      AITER_RETURN_IF_ERROR(CheckRange(
          "sequences * table_width", a.sequences * a.table_width, 0, kMaxSize));
      AITER_RETURN_IF_ERROR(
          CheckRange("page_size * dim", a.page_size, 1, kMaxSize / a.dim));
      int64_t whole = a.tiles ? kAligned : kAligned / kScaleBytes;
      if (a.page_size % whole != 0) {
        return Invalid("page_size", std::to_string(a.page_size),
                       "a multiple of " + std::to_string(whole));
      }
    } else if (a.tiles || a.sequences > 1) {
      return Invalid("page_size", "0", "positive, of tiles or sequences");
    }
    return CheckAligned({{"q_ptr", a.q_ptr},
                         {"k_ptr", a.k_ptr},
                         {"k_scale_ptr", a.k_scale_ptr},
                         {"weights_ptr", a.weights_ptr},
                         {"table_ptr", a.table_ptr},
                         {"starts_ptr", a.starts_ptr},
                         {"ends_ptr", a.ends_ptr},
                         {"logits_ptr", a.logits_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = static_cast<int32_t>(a.heads);
    key.dims[1] = static_cast<int32_t>(a.dim);
    if (a.page_size > 0) key.features |= kIndexerPaged;
    if (a.tiles) key.features |= kIndexerTiles;
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("indexer_logits", problem, 2, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    return steps->Add("indexer_logits", key, &plan->kernel);
  }

  // Keys of a program: fewer where there are few queries.
  static int32_t ChunkOf(int64_t rows) {
    return rows >= 1024 ? 8192 : rows >= 128 ? 2048 : 512;
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    const auto number = [](int64_t n) { return static_cast<int32_t>(n); };
    IndexerParams p;
    p.q_ptr = a.q_ptr;
    p.k_ptr = a.k_ptr;
    p.k_scale_ptr = a.page_size > 0 ? a.k_ptr : a.k_scale_ptr;
    p.weights_ptr = a.weights_ptr;
    p.table_ptr = a.table_ptr;
    p.starts_ptr = a.starts_ptr;
    p.ends_ptr = a.ends_ptr;
    p.logits_ptr = a.logits_ptr;
    p.sequences = number(a.sequences);
    p.next_n = number(a.next_n);
    p.heads = number(a.heads);
    p.dim = number(a.dim);
    p.cols = number(a.cols);
    p.chunk = ChunkOf(a.sequences * a.next_n);
    if (a.page_size > 0) {
      p.pages = number(a.pages);
      p.page_size = number(a.page_size);
      p.table_width = number(a.table_width);
      p.k_page = a.page_size * (a.dim + kScaleBytes);
      p.scale_page = p.k_page / kScaleBytes;
      p.scale_start = number(a.page_size * a.dim / kScaleBytes);
    }
    p.flags = static_cast<int32_t>(plan.key.features & kKernelFlags);
    return LaunchKernel(driver, plan.kernel, &p, stream);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(indexer_logits, Logits);

}  // namespace aiter
