// SPDX-License-Identifier: Apache-2.0

// Logits of DeepSeek's lightning indexer.
//
// Calls, plans, streams and devices are as in mha.h.
#ifndef AITER_INDEXER_H_
#define AITER_INDEXER_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

//   logits[s, i, n] = scale[n] *
//       sum over h of weights[s, i, h] * max(q[s, i, h] . k[n], 0)
//
// for the keys n that query i of sequence s sees; -inf for all others. Without
// pages (page_size 0) there is one sequence, and query i sees the keys from
// starts[i] up to ends[i]. With pages key n of a sequence is the n % page_size
// th of page table[s, n / page_size], and query i sees the first ends[s] -
// next_n + i + 1. A page has the bytes of all its keys, with `tiles` as tiles
// of 16 keys by 16 columns, and then their float32 scales. A key whose page is
// none has -inf.
struct indexer_logits_args {
  DataType data_type = DataType::kE4m3fn;  // Or e4m3fnuz.
  int64_t sequences = 0;
  int64_t next_n = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t cols = 0;
  int64_t pages = 0;
  int64_t page_size = 0;
  int64_t table_width = 0;
  bool tiles = false;
  const void* q_ptr = nullptr;        // [sequences, next_n, heads, dim]
  const void* k_ptr = nullptr;        // [cols, dim], or pages.
  const void* k_scale_ptr = nullptr;  // float32 [cols]; null of pages.
  const void* weights_ptr = nullptr;  // float32 [sequences, next_n, heads]
  const void* table_ptr = nullptr;   // int32 [sequences, table_width], or null.
  const void* starts_ptr = nullptr;  // int32 [next_n], or null.
  const void* ends_ptr = nullptr;    // int32 [next_n] or [sequences]
  void* logits_ptr = nullptr;        // float32 [sequences, next_n, cols]
};

// A problem's sizes are heads and dim.
AITER_OPERATION(indexer_logits, indexer_logits_args, KernelPlan);

}  // namespace aiter

#endif  // AITER_INDEXER_H_
