// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of sampling may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/sampling/*.py.
#ifndef AITER_SRC_SAMPLING_PARAMS_H_
#define AITER_SRC_SAMPLING_PARAMS_H_

#include <cstdint>

namespace aiter {

struct SamplingParams {
  const void* logits_ptr = nullptr;
  const void* mask_ptr = nullptr;
  const void* keys_ptr = nullptr;
  const void* exponentials_ptr = nullptr;
  const void* temperature_ptr = nullptr;
  const void* top_k_ptr = nullptr;
  const void* top_p_ptr = nullptr;
  const void* min_p_ptr = nullptr;
  const void* best_ptr = nullptr;
  const void* maxima_ptr = nullptr;
  const void* histogram_ptr = nullptr;
  const void* sums_ptr = nullptr;
  const void* spans_ptr = nullptr;
  const void* candidates_ptr = nullptr;
  const void* state_ptr = nullptr;
  const void* values_ptr = nullptr;
  const void* tokens_ptr = nullptr;

  int32_t rows = 0;
  int32_t cols = 0;
  int32_t parts = 0;
  int32_t per_part = 0;
  int32_t k = 0;
  int32_t phase = 0;
  int32_t plane = 0;
  int32_t flags = 0;  // Features below kKernelFlags.
};

}  // namespace aiter

#endif  // AITER_SRC_SAMPLING_PARAMS_H_
