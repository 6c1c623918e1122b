// SPDX-License-Identifier: Apache-2.0

// Attention over paged KV caches.
//
// Calls, plans, streams and devices are as in mha.h.
#ifndef AITER_PAGED_H_
#define AITER_PAGED_H_

#include <cstdint>

#include "aiter/cache.h"
#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// What a cache holds: numbers of the queries' type, or of 8 bits. In the order
// of KINDS in kernels/paged/family.py.
enum class PagedKind : int32_t {
  kSame = -1,
  kInt8 = 0,
  kE4m3fn = 1,
  kE4m3fnuz = 2,
  kE5m2 = 3,
};

// Keys, or values.
struct paged_half {
  const void* cache_ptr = nullptr;
  int64_t cache_size = 0;  // Elements; no address is beyond.
  cache_side side;
  const void* scale_ptr = nullptr;  // float32, a scale of dequantisation.
  int64_t scale_size = 0;
  cache_scales scales;  // Steps of 0 where a scale is the same for all.
};

// Sequence i has lengths[i] keys, or with last_pages so many in the last of its
// pages and all others full; its queries are the last of its tokens. Key j lies
// at j % page_size of page table[i][j / page_size]. One whose page is not from
// 0 to pages - 1, or not in the table, is absent: nothing reads it. A query
// that sees no key gives 0 and lse -inf, or its sink's value; a query of no
// sequence gives 0 and -inf.
//
// Query head h attends with KV head h / (nhead_q / nhead_k). The score of query
// i and key j, where query i stands at key p, is
//
//   cap(softmax_scale * q.k) - slope * |p - j|    cap(s) = c * tanh(s / c)
//
// for p - window_left <= j <= p + window_right; -1 is no bound. A sink is the
// logit of a key without a value.
struct paged_attend_args {
  DataType data_type = DataType::kBf16;  // Of q and out: fp16 or bf16.
  PagedKind kind = PagedKind::kSame;
  int64_t tokens = 0;
  int64_t batch = 0;
  int64_t seqlen_q = 0;  // Of each sequence; 0 with cu_seqlens.
  int64_t nhead_q = 0;
  int64_t nhead_k = 0;
  int64_t hdim = 0;
  int64_t hdim_v = 0;
  int64_t pages = 0;
  int64_t page_size = 0;
  int64_t width = 0;   // Of a row of table; with indptr, of all of it.
  int64_t splits = 1;  // Parts that keys may be divided into: scratch's.
  const void* q_ptr = nullptr;           // [tokens, nhead_q, hdim]
  void* out_ptr = nullptr;               // [tokens, nhead_q, hdim_v]
  void* lse_ptr = nullptr;               // float32 [nhead_q, tokens], or null.
  void* parts_ptr = nullptr;             // float32 [splits, tokens, nhead_q,
                                         // hdim_v]; null if splits is 1.
  void* parts_lse_ptr = nullptr;         // float32 [splits, tokens, nhead_q]
  void* counter_ptr = nullptr;           // int32 [2], scratch of many queries;
                                         // or null, which may be slower.
  const void* table_ptr = nullptr;       // int32 [batch, width] or [width]
  const void* indptr_ptr = nullptr;      // int32 [batch + 1], or null.
  const void* lengths_ptr = nullptr;     // int32 [batch]
  bool last_pages = false;               // With indptr.
  const void* cu_seqlens_ptr = nullptr;  // int32 [batch + 1], or null.
  const void* sinks_ptr = nullptr;       // float32 [nhead_q], or null.
  const void* slopes_ptr = nullptr;      // float32 [nhead_q], or null.
  int64_t sinks_step = 0;   // Of nhead_q: sinks are [batch, nhead_q].
  int64_t slopes_step = 0;  // Likewise.
  // Of latent attention alone.
  int64_t cp_world_size = 1;
  const void* places_ptr = nullptr;  // int32 [batch], or null: one cache.
  paged_half k;
  paged_half v;
  int64_t window_left = -1;
  int64_t window_right = -1;
  float softmax_scale = 0;
  float logits_soft_cap = 0;
};

struct PagedPlan {
  ProblemKey key;
  LoadedKernel attend;
  LoadedKernel few;        // Of few keys, if only lengths tell,
  LoadedKernel few_tiles;  // and of few rows.
  LoadedKernel merge;
  LoadedKernel merge_rows;  // Of many rows.
  int64_t programs = 1;     // That fill the device.
  int64_t multiprocessors = 1;
};

// A problem's size is the larger head dimension.
AITER_OPERATION(paged_attend, paged_attend_args, PagedPlan);

// Multi-head latent attention: one KV head, whose values are the first hdim_v
// columns of its keys. So v lies where k does. There are no slopes, sinks are
// of all sequences alike, and scales are numbers.
//
// Where cp_world_size caches have a sequence's tokens, each of which is the
// next one's, lengths are of this cache's keys, and query i of sequence b
// stands at key (places[b] + i) / cp_world_size, rounded down.
struct mla_attend_args : paged_attend_args {};

// A problem's sizes are the columns of values, those that keys have beside them
// and the rows of a sequence, which are its queries' heads.
AITER_OPERATION(mla_attend, mla_attend_args, PagedPlan);

}  // namespace aiter

#endif  // AITER_PAGED_H_
