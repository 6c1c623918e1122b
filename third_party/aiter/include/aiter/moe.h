// SPDX-License-Identifier: Apache-2.0

// Routing of tokens to experts, on AMD and NVIDIA GPUs: which experts a token
// goes to, and in which order experts take their tokens. Both are exact.
//
// Calls are as in operation.h, streams and devices as in mha.h.
#ifndef AITER_MOE_H_
#define AITER_MOE_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// The columns of the k largest scores of each row, the largest one first; of
// equal ones the lower column comes first, and NaN is as -inf. Columns are
// groups of `size`, of which only the topk_groups best count. Arrays are
// contiguous and start at a multiple of 16 bytes.
struct moe_topk_args {
  DataType data_type = DataType::kFp32;  // Or kBf16.
  int64_t rows = 0;
  int64_t groups = 1;
  int64_t size = 0;
  int64_t topk_groups = 1;
  int64_t k = 0;  // At most topk_groups * size.
  // Groups are compared by the sum of their two best scores, not by the best.
  bool by_sum = false;

  const void* scores_ptr = nullptr;  // [rows, groups * size]
  void* ids_ptr = nullptr;           // int32 [rows, k]
};

// Entries sorted by their expert: those of an expert lie together and in their
// order, and begin at a multiple of `block`. One whose expert is not from 0 to
// experts - 1 is left out.
struct moe_sort_args {
  int64_t entries = 0;
  int64_t experts = 0;
  int64_t block = 1;

  const void* ids_ptr = nullptr;  // int32 [entries]
  void* counts_ptr = nullptr;     // int32 [experts]
  void* place_ptr = nullptr;      // int32 [entries]; -1 of one left out.
  // int32 [entries + experts * (block - 1)]: 1 + the entry that lies there; 0
  // of none.
  void* order_ptr = nullptr;
  // Scratch, int32 [ceil(entries / kMoePart), experts].
  void* partial_ptr = nullptr;
};

inline constexpr int64_t kMoePart = 128;

struct MoeSortPlan {
  ProblemKey key;
  LoadedKernel count;
  LoadedKernel scan;
  LoadedKernel place;
};

// The sizes of a problem are groups and size; a sort has none.
AITER_OPERATION(moe_topk, moe_topk_args, KernelPlan);
AITER_OPERATION(moe_sort, moe_sort_args, MoeSortPlan);

}  // namespace aiter

#endif  // AITER_MOE_H_
