// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of paged attention may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/paged/attend.py.
#ifndef AITER_SRC_PAGED_PARAMS_H_
#define AITER_SRC_PAGED_PARAMS_H_

#include <cstdint>

namespace aiter {

struct PagedParams {
  const void* q_ptr = nullptr;
  const void* k_cache_ptr = nullptr;
  const void* v_cache_ptr = nullptr;
  const void* k_bytes_ptr = nullptr;
  const void* v_bytes_ptr = nullptr;
  const void* out_ptr = nullptr;
  const void* lse_ptr = nullptr;
  const void* parts_ptr = nullptr;
  const void* parts_lse_ptr = nullptr;
  const void* counter_ptr = nullptr;
  const void* k_scale_ptr = nullptr;
  const void* v_scale_ptr = nullptr;
  const void* sinks_ptr = nullptr;
  const void* slopes_ptr = nullptr;
  const void* table_ptr = nullptr;
  const void* indptr_ptr = nullptr;
  const void* lengths_ptr = nullptr;
  const void* cu_seqlens_ptr = nullptr;
  const void* places_ptr = nullptr;

  int64_t k_start = 0;
  int64_t k_head = 0;
  int64_t k_scale_page = 0;
  int64_t k_scale_head = 0;
  int64_t v_start = 0;
  int64_t v_head = 0;
  int64_t v_scale_page = 0;
  int64_t v_scale_head = 0;
  int32_t k_page = 0;
  int32_t k_token = 0;
  int32_t k_split = 1;
  int32_t k_run_token = 0;
  int32_t k_run = 0;
  int32_t k_col = 1;
  int32_t k_scale_token = 0;
  int32_t k_eights = 0;  // Steps of eight tokens from page to page.
  int32_t v_page = 0;
  int32_t v_token = 0;
  int32_t v_split = 1;
  int32_t v_run_token = 0;
  int32_t v_run = 0;
  int32_t v_col = 1;
  int32_t v_scale_token = 0;
  int32_t v_eights = 0;

  int32_t run = 1;
  int32_t tokens = 0;
  int32_t batch = 0;
  int32_t seqlen_q = 0;
  int32_t nhead_q = 0;
  int32_t nhead_k = 0;
  int32_t group = 1;
  int32_t hdim = 0;
  int32_t hdim_v = 0;
  int32_t pages = 0;
  int32_t page_size = 1;
  // Key n is in page (2n * page_factor >> 32) >> page_shift of its sequence:
  // shift is ceil(log2(page_size)) and factor ceil(2^(31 + shift) / page_size),
  // as 32 bits without a sign, which is exact below 2^31 (Granlund and
  // Montgomery, Division by Invariant Integers using Multiplication, 1994).
  int32_t page_shift = 0;
  int32_t page_factor = INT32_MIN;
  int32_t width = 0;
  int32_t cp_world_size = 1;
  int32_t splits = 1;
  int32_t programs = 1;
  int32_t blocks = 1;
  int32_t merge_rows = 1;
  int32_t merge_cols = 1;
  int32_t few_keys = 0;
  int32_t window_left = 0;
  int32_t window_right = 0;
  int32_t sinks_step = 0;
  int32_t slopes_step = 0;
  float softmax_scale = 0;
  float logits_soft_cap = 0;
  int32_t kind = 0;
  int32_t flags = 0;
};

}  // namespace aiter

#endif  // AITER_SRC_PAGED_PARAMS_H_
