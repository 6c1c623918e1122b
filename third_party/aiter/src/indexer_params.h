// SPDX-License-Identifier: Apache-2.0

// Every argument that a kernel of the family may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/indexer/logits.py.
#ifndef AITER_SRC_INDEXER_PARAMS_H_
#define AITER_SRC_INDEXER_PARAMS_H_

#include <cstdint>

namespace aiter {

struct IndexerParams {
  const void* q_ptr = nullptr;
  const void* k_ptr = nullptr;
  const void* k_scale_ptr = nullptr;
  const void* weights_ptr = nullptr;
  const void* table_ptr = nullptr;
  const void* starts_ptr = nullptr;
  const void* ends_ptr = nullptr;
  const void* logits_ptr = nullptr;

  int64_t k_page = 0;
  int64_t scale_page = 0;
  int32_t sequences = 0;
  int32_t next_n = 0;
  int32_t heads = 0;
  int32_t dim = 0;
  int32_t cols = 0;
  int32_t chunk = 0;
  int32_t pages = 0;
  int32_t page_size = 0;
  int32_t table_width = 0;
  int32_t scale_start = 0;
  int32_t flags = 0;
};

}  // namespace aiter

#endif  // AITER_SRC_INDEXER_PARAMS_H_
