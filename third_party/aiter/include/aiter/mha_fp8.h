// SPDX-License-Identifier: Apache-2.0

// Attention of float8 tensors, forward.
//
// Calls, plans, streams and devices are as in mha.h.
#ifndef AITER_MHA_FP8_H_
#define AITER_MHA_FP8_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// Keys of a block that has scales of its own, and a multiple at which the keys
// of a packed sequence begin in v.
inline constexpr int64_t kMhaFp8Block = 128;

// The score of query i and key j is q.k times a scale; i sees the keys from
// i + sk - sq - window_left to i + sk - sq + window_right, -1 is no bound. Both
// products are of float8 numbers: weights are rounded too. A query that sees no
// key gives 0 and lse -inf, or its sink's value; one of no sequence 0 and -inf.
//
// Dense, every sequence has seqlen_q queries and seqlen_k keys. Packed (with
// cu_seqlens), these are of all sequences, which lie one behind the other.
//
// v is transposed first, to v_columns: [batch, nhead_k, hdim_v, columns],
// packed of batch 1; key j of sequence i is in column j, packed in
//   (cu_seqlens_k[i] / kMhaFp8Block + i) * kMhaFp8Block + j,
// on sm_90 in an order of its own among each 16 (kernels/mha_fp8/columns.py).
// Up to a multiple of kMhaFp8Block what is behind the last key is 0.
struct mha_fp8_fwd_args {
  DataType data_type = DataType::kE4m3fn;  // Of q, k and v; or kE4m3fnuz.
  int64_t batch = 0;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t nhead_q = 0;
  int64_t nhead_k = 0;
  int64_t hdim = 0;  // A multiple of 16, as is the next.
  int64_t hdim_v = 0;
  int64_t columns = 0;          // A multiple of kMhaFp8Block.
  int64_t blocks = 1;           // Of scales: 1, or one for kMhaFp8Block keys.
  const void* q_ptr = nullptr;  // [batch, seqlen_q, nhead_q, hdim]
  const void* k_ptr = nullptr;  // [batch, seqlen_k, nhead_k, hdim]
  const void* v_ptr = nullptr;  // [batch, seqlen_k, nhead_k, hdim_v]
  void* v_columns_ptr = nullptr;
  void* out_ptr = nullptr;  // bf16 [batch, seqlen_q, nhead_q, hdim_v]
  void* lse_ptr = nullptr;  // float32 [batch, nhead_q, seqlen_q]
  // float32 [batch, nhead_k, blocks]: of scores, which are powers of two then,
  // and of values.
  const void* scales_ptr = nullptr;
  const void* v_scales_ptr = nullptr;
  const void* sinks_ptr = nullptr;         // float32 [batch, nhead_q], or null.
  const void* cu_seqlens_q_ptr = nullptr;  // int32 [batch + 1], or null.
  const void* cu_seqlens_k_ptr = nullptr;  // Likewise.
  int64_t window_left = -1;
  int64_t window_right = -1;
};

struct MhaFp8Plan {
  ProblemKey key;
  LoadedKernel columns;
  LoadedKernel attend;
  int multiprocessors = 0;
};

// A problem's size is the larger head dimension.
AITER_OPERATION(mha_fp8_fwd, mha_fp8_fwd_args, MhaFp8Plan);

}  // namespace aiter

#endif  // AITER_MHA_FP8_H_
