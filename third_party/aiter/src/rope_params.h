// SPDX-License-Identifier: Apache-2.0

// Every argument of rotary embedding's kernel, by name: see norm_params.h.
// Meanings: kernels/rope/rotate.py.
#ifndef AITER_SRC_ROPE_PARAMS_H_
#define AITER_SRC_ROPE_PARAMS_H_

#include <cstdint>

namespace aiter {

struct RopeParams {
  const void* x_ptr = nullptr;
  const void* y_ptr = nullptr;
  const void* cos_ptr = nullptr;
  const void* sin_ptr = nullptr;
  const void* cos_f32_ptr = nullptr;
  const void* sin_f32_ptr = nullptr;
  const void* positions_ptr = nullptr;
  const void* offsets_ptr = nullptr;
  const void* cu_seqlens_ptr = nullptr;
  const void* x_out_ptr = nullptr;
  const void* y_out_ptr = nullptr;

  int32_t tokens = 0;
  int32_t seqlen = 0;
  int32_t inner = 0;
  int32_t heads_x = 0;
  int32_t heads_y = 0;
  int32_t dim = 0;
  int32_t pairs = 0;
  int32_t first = 0;
  int32_t table_rows = 0;
  int32_t sequences = 0;
  int32_t grid_h = 0;
  int32_t grid_w = 0;
  int32_t section_0 = 0;
  int32_t section_1 = 0;
  int32_t split_0 = 0;
  int32_t split_1 = 0;
  int32_t flags = 0;  // Features below kKernelFlags.
};

}  // namespace aiter

#endif  // AITER_SRC_ROPE_PARAMS_H_
