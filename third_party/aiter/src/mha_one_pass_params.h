// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of attention's backward in one pass may take.
#ifndef AITER_SRC_MHA_ONE_PASS_PARAMS_H_
#define AITER_SRC_MHA_ONE_PASS_PARAMS_H_

#include <cstdint>

#include "third_party/aiter/src/mha_params.h"

namespace aiter {

// `flags` are this family's.
struct MhaOnePassParams : MhaParams {
  const void* dq_sums_ptr = nullptr;
  const void* dk_sums_ptr = nullptr;
  const void* dv_sums_ptr = nullptr;
  const void* turns_ptr = nullptr;
  const void* kept_ptr = nullptr;
  int32_t stride_kept = 0, nhead_stride_kept = 0;
  int64_t batch_stride_kept = 0;
  int32_t heads_of_block = 1;
};

}  // namespace aiter

#endif  // AITER_SRC_MHA_ONE_PASS_PARAMS_H_
