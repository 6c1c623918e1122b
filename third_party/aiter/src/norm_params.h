// SPDX-License-Identifier: Apache-2.0

// Every argument that a norm's kernel may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/norm/*.py.
#ifndef AITER_SRC_NORM_PARAMS_H_
#define AITER_SRC_NORM_PARAMS_H_

#include <cstdint>

namespace aiter {

struct NormParams {
  const void* x_ptr = nullptr;
  const void* residual_ptr = nullptr;
  const void* gamma_ptr = nullptr;
  const void* gamma_f32_ptr = nullptr;
  const void* beta_ptr = nullptr;
  const void* beta_f32_ptr = nullptr;
  const void* y_ptr = nullptr;
  const void* residual_out_ptr = nullptr;
  const void* mean_ptr = nullptr;
  const void* rstd_ptr = nullptr;
  // Quantised output only.
  const void* x_scale_ptr = nullptr;
  const void* q_ptr = nullptr;
  const void* scale_ptr = nullptr;
  const void* scale_e8m0_ptr = nullptr;
  // Backward only.
  const void* dy_ptr = nullptr;
  const void* dresidual_ptr = nullptr;
  const void* dx_ptr = nullptr;
  const void* dgamma_parts_ptr = nullptr;
  const void* dbeta_parts_ptr = nullptr;
  const void* dgamma_ptr = nullptr;
  const void* dgamma_f32_ptr = nullptr;
  const void* dbeta_ptr = nullptr;
  const void* dbeta_f32_ptr = nullptr;

  int32_t rows = 0;
  int32_t cols = 0;
  int32_t parts = 0;
  int32_t sums = 1;  // dgamma, or both.
  int32_t rows_per_part = 0;
  float epsilon = 0;
  int32_t max_blocks = 0;  // As many as run at once.
  int32_t flags = 0;       // Features below kKernelFlags.
  int32_t kind = 0;        // Of quantised output: kernels/core/rounding.py.
};

}  // namespace aiter

#endif  // AITER_SRC_NORM_PARAMS_H_
