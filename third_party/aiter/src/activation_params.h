// SPDX-License-Identifier: Apache-2.0

// Every argument that an activation's kernel may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/activation/*.py.
#ifndef AITER_SRC_ACTIVATION_PARAMS_H_
#define AITER_SRC_ACTIVATION_PARAMS_H_

#include <cstdint>

namespace aiter {

struct ActivationParams {
  const void* gate_ptr = nullptr;
  const void* up_ptr = nullptr;
  const void* bias_ptr = nullptr;
  const void* bias_f32_ptr = nullptr;
  const void* expert_ids_ptr = nullptr;
  const void* out_ptr = nullptr;
  const void* out_fp16_ptr = nullptr;
  const void* out_bf16_ptr = nullptr;
  const void* out_f32_ptr = nullptr;
  // Backward only.
  const void* dy_ptr = nullptr;
  const void* dy_fp16_ptr = nullptr;
  const void* dy_bf16_ptr = nullptr;
  const void* dy_f32_ptr = nullptr;
  const void* dgate_ptr = nullptr;
  const void* dup_ptr = nullptr;
  // Quantised output only.
  const void* scale_in_ptr = nullptr;
  const void* q_ptr = nullptr;
  const void* scale_ptr = nullptr;
  const void* scale_e8m0_ptr = nullptr;

  int32_t rows = 0;
  int32_t cols = 0;
  int32_t cols_inverse = 0;
  int32_t cols_shift = 0;
  int32_t batch = 1;
  int32_t tiles_m = 0;
  int32_t tiles_n = 0;
  int32_t experts = 0;
  int32_t activation = 0;
  int32_t scale_rows = 0;
  int32_t scale_cols = 0;
  int32_t group = 0;
  int32_t kind = 0;
  int32_t mode = 0;
  int32_t flags = 0;
  float alpha = 0;
  float gate_limit = 0;
  float up_limit = 0;
};

}  // namespace aiter

#endif  // AITER_SRC_ACTIVATION_PARAMS_H_
