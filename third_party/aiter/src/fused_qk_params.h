// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of the family may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/fused_qk/latent.py.
#ifndef AITER_SRC_FUSED_QK_PARAMS_H_
#define AITER_SRC_FUSED_QK_PARAMS_H_

#include <cstdint>

namespace aiter {

struct FusedQkParams {
  const void* q_nope_ptr = nullptr;
  const void* q_pe_ptr = nullptr;
  const void* kv_c_ptr = nullptr;
  const void* k_pe_ptr = nullptr;
  const void* weight_ptr = nullptr;
  const void* cos_ptr = nullptr;
  const void* sin_ptr = nullptr;
  const void* positions_ptr = nullptr;
  const void* slots_ptr = nullptr;
  const void* q_scale_ptr = nullptr;
  const void* k_scale_ptr = nullptr;
  const void* q_out_ptr = nullptr;
  const void* q_out_bytes_ptr = nullptr;
  const void* kv_cache_ptr = nullptr;
  const void* kv_bytes_ptr = nullptr;

  int32_t tokens = 0;
  int32_t heads = 0;
  int32_t lora = 0;
  int32_t rope = 0;
  int32_t table_rows = 0;
  int32_t num_slots = 0;
  int32_t width = 0;
  int32_t first = 0;
  int32_t kind = 0;
  int32_t q_kind = 0;
  float eps = 0;
  int32_t flags = 0;
};

}  // namespace aiter

#endif  // AITER_SRC_FUSED_QK_PARAMS_H_
