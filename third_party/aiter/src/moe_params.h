// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of routing may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/moe/*.py.
#ifndef AITER_SRC_MOE_PARAMS_H_
#define AITER_SRC_MOE_PARAMS_H_

#include <cstdint>

namespace aiter {

struct MoeParams {
  const void* scores_ptr = nullptr;
  const void* ids_ptr = nullptr;
  const void* counts_ptr = nullptr;
  const void* partial_ptr = nullptr;
  const void* place_ptr = nullptr;
  const void* order_ptr = nullptr;

  int32_t rows = 0;
  int32_t groups = 0;
  int32_t size = 0;
  int32_t topk_groups = 0;
  int32_t k = 0;
  int32_t entries = 0;
  int32_t experts = 0;
  int32_t parts = 0;
  int32_t block = 0;
  int32_t flags = 0;  // Features below kKernelFlags.
};

}  // namespace aiter

#endif  // AITER_SRC_MOE_PARAMS_H_
