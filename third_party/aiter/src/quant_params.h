// SPDX-License-Identifier: Apache-2.0

// Every argument that a quantiser's kernel may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/quant.py.
#ifndef AITER_SRC_QUANT_PARAMS_H_
#define AITER_SRC_QUANT_PARAMS_H_

#include <cstdint>

namespace aiter {

// Values of `kind`; kernels/core/rounding.py has the same list.
enum QuantKind : int32_t {
  kKindInt8 = 0,
  kKindE4m3fn = 1,
  kKindE4m3fnuz = 2,
  kKindE2m1 = 3,
};

struct QuantParams {
  const void* x_ptr = nullptr;
  const void* smooth_scale_ptr = nullptr;
  const void* scale_in_ptr = nullptr;
  const void* q_ptr = nullptr;
  const void* scale_ptr = nullptr;
  const void* scale_e8m0_ptr = nullptr;

  int64_t batch_stride_scale = 0;
  int32_t batch = 0;
  int32_t rows = 0;
  int32_t cols = 0;
  int32_t scale_rows = 0;
  int32_t scale_cols = 0;
  int32_t stride_scale_m = 0;
  int32_t stride_scale_n = 0;
  int32_t tiles_m = 0;
  int32_t tiles_n = 0;
  int32_t group = 0;
  int32_t kind = 0;
  int32_t mode = 0;
  int32_t flags = 0;
  int32_t max_blocks = 0;  // As many as run at once.
};

}  // namespace aiter

#endif  // AITER_SRC_QUANT_PARAMS_H_
