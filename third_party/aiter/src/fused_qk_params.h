// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of the family may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/fused_qk.
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
  const void* q_ptr = nullptr;
  const void* k_ptr = nullptr;
  const void* v_ptr = nullptr;
  const void* q_weight_ptr = nullptr;
  const void* k_weight_ptr = nullptr;
  const void* cos_own_ptr = nullptr;
  const void* sin_own_ptr = nullptr;
  const void* v_scale_ptr = nullptr;
  const void* k_out_ptr = nullptr;
  const void* v_out_ptr = nullptr;
  const void* k_cache_ptr = nullptr;
  const void* k_bytes_ptr = nullptr;
  const void* v_cache_ptr = nullptr;
  const void* v_bytes_ptr = nullptr;
  const void* residual_ptr = nullptr;
  const void* gate_ptr = nullptr;
  const void* bias_ptr = nullptr;
  const void* residual_out_ptr = nullptr;
  const void* scale_ptr = nullptr;
  const void* scale_e8m0_ptr = nullptr;

  int64_t k_start = 0;
  int64_t k_page = 0;
  int64_t k_scale_start = 0;
  int64_t k_scale_page = 0;
  int64_t k_scale_head = 0;
  int64_t v_start = 0;
  int64_t v_page = 0;
  int64_t v_scale_start = 0;
  int64_t v_scale_page = 0;
  int64_t v_scale_head = 0;
  int32_t k_run_offset = 0;
  int32_t k_offset = 0;
  int32_t k_split = 1;
  int32_t k_head = 0;
  int32_t k_run = 0;
  int32_t k_col = 0;
  int32_t k_scale_offset = 0;
  int32_t v_run_offset = 0;
  int32_t v_offset = 0;
  int32_t v_split = 1;
  int32_t v_head = 0;
  int32_t v_run = 0;
  int32_t v_col = 0;
  int32_t v_scale_offset = 0;

  int32_t tokens = 0;
  int32_t heads = 0;
  int32_t lora = 0;
  int32_t rope = 0;
  int32_t table_rows = 0;
  int32_t num_slots = 0;
  int32_t width = 0;
  int32_t first = 0;
  int32_t k_heads = 0;
  int32_t v_heads = 0;
  int32_t q_stride = 0;
  int32_t k_stride = 0;
  int32_t v_stride = 0;
  int32_t dim = 0;
  int32_t pairs = 0;
  int32_t table_stride = 0;
  int32_t section_0 = 0;
  int32_t section_1 = 0;
  int32_t page_size = 0;
  int32_t kind = 0;
  int32_t q_kind = 0;
  int32_t parts = 0;
  int32_t cols = 0;
  int32_t k_cols = 0;
  int32_t group = 0;
  int32_t scale_token = 0;
  int32_t scale_group = 0;
  int32_t mode = 0;
  int32_t has_bias = 0;
  int32_t is_sigmoid = 0;
  int32_t is_gated_first = 0;
  int32_t is_narrow = 0;
  float eps = 0;
  float k_eps = 0;
  float least = 0;
  int32_t flags = 0;
};

}  // namespace aiter

#endif  // AITER_SRC_FUSED_QK_PARAMS_H_
