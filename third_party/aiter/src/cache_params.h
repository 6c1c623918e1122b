// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of KV-cache writes may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/cache/write.py.
#ifndef AITER_SRC_CACHE_PARAMS_H_
#define AITER_SRC_CACHE_PARAMS_H_

#include <cstdint>

namespace aiter {

struct CacheParams {
  const void* key_ptr = nullptr;
  const void* value_ptr = nullptr;
  const void* k_cache_ptr = nullptr;
  const void* v_cache_ptr = nullptr;
  const void* k_bytes_ptr = nullptr;
  const void* v_bytes_ptr = nullptr;
  const void* k_scale_ptr = nullptr;
  const void* v_scale_ptr = nullptr;
  const void* slots_ptr = nullptr;
  const void* winners_ptr = nullptr;

  int64_t k_start = 0;
  int64_t k_page = 0;
  int64_t v_start = 0;
  int64_t v_page = 0;
  int64_t k_scale_start = 0;
  int64_t k_scale_page = 0;
  int64_t k_scale_head = 0;
  int64_t v_scale_start = 0;
  int64_t v_scale_page = 0;
  int64_t v_scale_head = 0;
  int32_t k_run_offset = 0;
  int32_t k_offset = 0;
  int32_t k_split = 1;
  int32_t k_head = 0;
  int32_t k_run = 0;
  int32_t k_col = 0;
  int32_t v_run_offset = 0;
  int32_t v_offset = 0;
  int32_t v_split = 1;
  int32_t v_head = 0;
  int32_t v_run = 0;
  int32_t v_col = 0;
  int32_t k_scale_offset = 0;
  int32_t v_scale_offset = 0;

  int32_t tokens = 0;
  int32_t heads = 0;
  int32_t k_cols = 0;
  int32_t v_cols = 0;
  int32_t halves = 1;  // 2 with values.
  int32_t num_slots = 0;
  int32_t page_size = 0;
  int32_t block = 0;
  int32_t step = 1;        // Tokens of a program.
  int32_t max_blocks = 0;  // As many as run at once.
  int32_t kind = 0;
  int32_t flags = 0;
  float floor = 0;
};

}  // namespace aiter

#endif  // AITER_SRC_CACHE_PARAMS_H_
