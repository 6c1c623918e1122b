// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of float8 attention may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/mha_fp8/fwd.py.
#ifndef AITER_SRC_MHA_FP8_PARAMS_H_
#define AITER_SRC_MHA_FP8_PARAMS_H_

#include <cstdint>

namespace aiter {

struct MhaFp8Params {
  const void* q_ptr = nullptr;
  const void* k_ptr = nullptr;
  const void* v_ptr = nullptr;
  const void* v_rows_ptr = nullptr;
  const void* v_columns_ptr = nullptr;
  const void* out_ptr = nullptr;
  const void* lse_ptr = nullptr;
  const void* scales_ptr = nullptr;
  const void* v_scales_ptr = nullptr;
  const void* sinks_ptr = nullptr;
  const void* cu_seqlens_q_ptr = nullptr;
  const void* cu_seqlens_k_ptr = nullptr;

  int32_t batch = 0;
  int32_t seqlen_q = 0;
  int32_t seqlen_k = 0;
  int32_t nhead_q = 0;
  int32_t nhead_k = 0;
  int32_t hdim = 0;
  int32_t hdim_v = 0;
  int32_t columns = 0;
  int32_t blocks = 1;
  int32_t window_left = 0;
  int32_t window_right = 0;
  int32_t flags = 0;
  int32_t multiprocessors = 0;
};

}  // namespace aiter

#endif  // AITER_SRC_MHA_FP8_PARAMS_H_
