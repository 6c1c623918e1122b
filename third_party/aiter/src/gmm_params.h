// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of grouped products may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/gmm/gmm.py.
#ifndef AITER_SRC_GMM_PARAMS_H_
#define AITER_SRC_GMM_PARAMS_H_

#include <cstdint>

namespace aiter {

struct GmmParams {
  const void* a_ptr = nullptr;
  const void* b_ptr = nullptr;
  const void* a_scale_ptr = nullptr;
  const void* b_scale_ptr = nullptr;
  // The same, of numbers of four bits.
  const void* b_packed_ptr = nullptr;
  const void* a_scale_e8m0_ptr = nullptr;
  const void* b_scale_e8m0_ptr = nullptr;
  const void* b_scale_bf16_ptr = nullptr;
  const void* bias_ptr = nullptr;
  const void* sizes_ptr = nullptr;
  const void* plan_ptr = nullptr;
  const void* out_ptr = nullptr;
  const void* out_bf16_ptr = nullptr;  // The same.
  const void* out_f32_ptr = nullptr;   // The same.

  int32_t m = 0;
  int32_t n = 0;
  int32_t k = 0;
  int32_t groups = 0;
  int32_t tile_rows = 0;
  int32_t tiles_of_rows = 0;  // At most.
  int32_t multiprocessors = 0;
  int32_t activation = 0;  // GmmActivation
  float alpha = 0;
  float gate_limit = 0;
  float up_limit = 0;
  int32_t flags = 0;  // Features below kKernelFlags.
};

}  // namespace aiter

#endif  // AITER_SRC_GMM_PARAMS_H_
