// SPDX-License-Identifier: Apache-2.0

// Fused multi-head attention, forward and backward, on AMD and NVIDIA GPUs.
//
// Kernels are compiled ahead of time and embedded in the library; a call picks
// them, loads them into the current device's context once, and launches them
// on a stream. Nothing here allocates device memory, synchronises, or reads
// device memory, so launches can be captured into a graph.
//
// Two ways to call, both thread-safe:
//   Status s = aiter::mha_fwd(args, stream);  // keeps its plan for later calls
//
//   aiter::MhaFwdPlan plan;                   // or the caller keeps it
//   Status s = aiter::mha_fwd_plan(args, &plan);
//   s = aiter::mha_fwd(args, plan, stream);
//
// Loading a kernel takes the driver milliseconds and cannot be captured: plan,
// or call mha_fwd_prepare, before the first launch that must be quick.
//
// The current device is the driver's: HIP's per-thread device, CUDA's current
// context. `stream` is a hipStream_t or CUstream which belongs to it.
//
// Field names are those of AITER's own C++ API where the meaning is the same.
// Of what has another name in Python, in FFI attributes and in kernels,
// softmax_scale is scale_s here, dropout_p is p_drop, sink_tokens is sink_size,
// packed is is_group_mode, window_left and window_right are window_size_left
// and _right, cu_seqlens_* are cu_seqlen_*, and cu_seqlens_*_padded are
// seqstart_*.
#ifndef AITER_MHA_H_
#define AITER_MHA_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// What forward and backward share. Pointers are device pointers; a null pointer
// says that the operand is absent. Strides count elements. The head dimension
// is contiguous and every stride is a multiple of 8 elements; q, k, v and
// whatever has their type start at a multiple of 16 bytes.
//
// Dense ("batch mode"): q [batch, seqlen_q, nhead_q, hdim_q], k and v
// [batch, seqlen_k, nhead_k, hdim_q | hdim_v], lse [batch, nhead_q, seqlen_q].
// Packed ("group mode"): q [seqlen_q, nhead_q, hdim_q], where seqlen_q is the
// number of rows of all `batch` sequences and of any padding between them;
// k and v alike; lse [nhead_q, seqlen_q]; batch strides are not used.
struct mha_args {
  DataType data_type = DataType::kBf16;
  // Of float32: products are to be as exact as float32's, where a matrix unit
  // takes fewer bits of it (TF32).
  bool is_exact = false;
  bool is_group_mode = false;

  const void* q_ptr = nullptr;
  const void* k_ptr = nullptr;
  const void* v_ptr = nullptr;

  // Added to the scaled and capped scores, dense only:
  // [batch | 1, nhead_q | 1, seqlen_q | 1, seqlen_k | 1], float32 if
  // `bias_is_f32`, else of `data_type`. A broadcast dimension has stride 0.
  // -inf hides a key.
  const void* bias_ptr = nullptr;
  bool bias_is_f32 = false;
  // A byte each, laid out as the bias: 0 hides a key from a row, whatever the
  // key holds; 0 in a mask of one row for all also whatever its value holds.
  const void* mask_ptr = nullptr;
  // Both have one row for all, and the bias, float32, is -inf where the mask is
  // 0: there are kernels that are faster then.
  bool is_one_row = false;
  // float32 [batch, nhead_q]: -slope * |i + offset - j| is added.
  const void* alibi_slopes_ptr = nullptr;
  // float32 [batch, nhead_q]: a logit without a value in each row's softmax.
  const void* sink_ptr = nullptr;
  // uint32 [batch, nhead_q, 6]: Philox key (2 words), batch counter and head
  // counter of the dropout mask, and its origin: the row and the column, a
  // multiple of 4, of a whole's mask at which the sequence's own begin.
  // Required iff p_drop > 0.
  const void* dropout_state_ptr = nullptr;

  // int32 [batch + 1]. seqstart_*: first row of each sequence (packed, where it
  // is required). cu_seqlen_*: cumulative lengths without padding (optional; a
  // packed sequence is then shorter than its rows, a dense one shorter than
  // seqlen_*). Without cu_seqlen_*, every row between two starts counts.
  const void* seqstart_q_ptr = nullptr;
  const void* seqstart_k_ptr = nullptr;
  const void* cu_seqlen_q_ptr = nullptr;
  const void* cu_seqlen_k_ptr = nullptr;

  int64_t batch = 0;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t nhead_q = 0;
  int64_t nhead_k = 0;  // Divides nhead_q.
  int64_t hdim_q = 0;   // Multiples of 8 up to 256.
  int64_t hdim_v = 0;
  int64_t bias_batch = 0;  // Sizes of dbias: 1, or batch and nhead_q.
  int64_t bias_nhead = 0;

  int64_t stride_q = 0, nhead_stride_q = 0, batch_stride_q = 0;
  int64_t stride_k = 0, nhead_stride_k = 0, batch_stride_k = 0;
  int64_t stride_v = 0, nhead_stride_v = 0, batch_stride_v = 0;
  int64_t stride_o = 0, nhead_stride_o = 0, batch_stride_o = 0;
  int64_t nhead_stride_lse = 0, batch_stride_lse = 0;
  // Those between keys are 1, or 0.
  int64_t stride_bias = 0, nhead_stride_bias = 0, batch_stride_bias = 0;
  int64_t stride_mask = 0, nhead_stride_mask = 0, batch_stride_mask = 0;
  int64_t key_stride_bias = 1, key_stride_mask = 1;

  float scale_s = 1.0f;          // Scores are scale_s * (q . k),
  float logits_soft_cap = 0.0f;  // then cap * tanh(score / cap) if cap > 0.
  float p_drop = 0.0f;           // In [0, 1).

  // Row i sees keys i + offset - left to i + offset + right, -1 for unbounded,
  // where offset is len_k - len_q of the sequence, or 0 with `is_top_left`.
  // The first `sink_size` keys stay visible however small `left` is.
  int64_t window_size_left = -1;
  int64_t window_size_right = -1;
  int64_t sink_size = 0;
  bool is_top_left = false;
  // Sequences of at most this many query rows are skipped, if positive.
  int64_t min_seqlen_q = 0;
};

// out = softmax(mask(scores)) v, and its log-sum-exp in natural logarithm. A
// row that sees no key has out 0 and lse -inf (or the sink's logit); so have
// rows outside every sequence. With seqlen_k 0, that is every row.
struct mha_fwd_args : mha_args {
  void* o_ptr = nullptr;    // Like q, with hdim_v.
  void* lse_ptr = nullptr;  // float32
  // int32 [batch, nhead_q, mha_kept_words]: what dropout keeps, a bit a score,
  // for mha_one_pass; or absent. Of calls that it serves, by kernels for
  // Hopper.
  void* kept_ptr = nullptr;
};

struct MhaFwdPlan {
  ProblemKey key;
  LoadedKernel kernel;
  LoadedKernel gaps;  // Null but of a packed batch.
  int multiprocessors = 0;
};

// Words of a head's bits: 256 of each block of 128 keys and tile of 64 rows,
// for whole blocks of 128 rows.
inline int64_t mha_kept_words(const mha_args& a) {
  return (a.seqlen_k + 127) / 128 * ((a.seqlen_q + 127) / 128) * 512;
}

// Gradients, the same bits every time. Everything that was given to the forward
// call is given again, with its results.
struct mha_bwd_args : mha_args {
  const void* do_ptr = nullptr;  // Like out.
  const void* o_ptr = nullptr;
  const void* lse_ptr = nullptr;
  const void* dlse_ptr = nullptr;  // float32 like lse, or absent.

  void* dq_ptr = nullptr;
  void* dk_ptr = nullptr;
  void* dv_ptr = nullptr;
  // float32 [bias_batch, bias_nhead, seqlen_q, seqlen_k], contiguous, or
  // absent.
  void* dbias_ptr = nullptr;
  void* d_sink_ptr = nullptr;  // float32 [batch, nhead_q], or absent.
  // float32, like lse: each row's share of the slopes' gradient, for the caller
  // to sum; or absent.
  void* d_slopes_ptr = nullptr;
  // float32, like lse: scratch, of no meaning afterwards.
  void* d_ptr = nullptr;

  int64_t stride_do = 0, nhead_stride_do = 0, batch_stride_do = 0;
  int64_t stride_dq = 0, nhead_stride_dq = 0, batch_stride_dq = 0;
  int64_t stride_dk = 0, nhead_stride_dk = 0, batch_stride_dk = 0;
  int64_t stride_dv = 0, nhead_stride_dv = 0, batch_stride_dv = 0;
};

// Loaded kernels of a backward call, valid in the context that was current when
// it was made. Trivially copyable; nothing to release.
struct MhaBwdPlan {
  ProblemKey key;
  LoadedKernel delta;
  LoadedKernel dkdv;
  LoadedKernel dbias;  // Null without a dbias.
  LoadedKernel dsink;  // Null without a d_sink.
  LoadedKernel dq;
  LoadedKernel gaps;  // Null but of a packed batch.
};

// The same in one pass over the scores, of batches whose scores have no more
// than a scale and a window, with dropout or without, and equal head dimensions
// of up to 128. What heads and blocks of keys add up is float32 [batch, heads,
// mha_one_pass_rows, mha_one_pass_columns], the batch 1 if packed: scratch.
struct mha_one_pass_args : mha_bwd_args {
  // Add up in the same order every time.
  bool ordered = true;
  void* dq_sums_ptr = nullptr;
  // With these two, query heads that share keys are blocks of their own: more
  // blocks, for few keys and kv heads. Without, a block has all of them.
  void* dk_sums_ptr = nullptr;
  void* dv_sums_ptr = nullptr;
  void* turns_ptr = nullptr;  // int32 [mha_one_pass_turns]: scratch of orders.
  // As the forward call wrote it; or absent, and dropout's bits are drawn
  // again.
  const void* kept_ptr = nullptr;
};

// Rows of sums of so many queries or keys: blocks of 128, of which a packed
// sequence has its own.
inline int64_t mha_one_pass_rows(const mha_args& a, int64_t seqlen) {
  return (a.is_group_mode ? seqlen / 128 + a.batch : (seqlen + 127) / 128) *
         128;
}

// Columns of sums: those of the kernels.
inline int64_t mha_one_pass_columns(const mha_args& a) {
  return a.hdim_q <= 64 ? 64 : 128;
}

// How many counters an order needs: a query head's tiles have 64 or 128 rows.
inline int64_t mha_one_pass_turns(const mha_args& a) {
  return (a.is_group_mode ? 1 : a.batch) *
         (a.nhead_q * mha_one_pass_rows(a, a.seqlen_q) / 64 +
          a.nhead_k * mha_one_pass_rows(a, a.seqlen_k) / 128);
}

struct MhaOnePassPlan {
  ProblemKey key;
  LoadedKernel delta;
  LoadedKernel bwd;
  LoadedKernel round;
  LoadedKernel gaps;  // Null but of a packed batch.
};

// The same where the scores' gradients are kept, from which dq is one product,
// and a bias's gradient their sum over what shares it. Of scores that have at
// most a bias, of their tensors' type if it has a gradient, a mask, ALiBi
// slopes without one, a soft cap, a window and dropout; on Hopper with lengths
// too, where they have no more than a soft cap and a window.
struct mha_dscores_args : mha_bwd_args {
  // Like q in type, for the caller to sum: [batch, nhead_q, seqlen_q,
  // seqlen_k], contiguous.
  void* dscores_ptr = nullptr;
  // Or, if above 0, scratch for so many query heads at a time, one kv head's at
  // least: [dscores_nhead, mha_dscores_rows, mha_dscores_row].
  int64_t dscores_nhead = 0;
  // Of a packed batch: how many keys a sequence has at most. dq of one that has
  // more is NaN.
  int64_t max_seqlen_k = 0;
};

// Rows of a head's scratch, and elements of a row. Kernels for CDNA keep whole
// tiles of 32 rows and 128 keys; a packed sequence has 128 rows of its own.
inline int64_t mha_dscores_rows(const mha_args& a) {
  return a.is_group_mode ? (a.seqlen_q / 128 + a.batch) * 128
                         : (a.seqlen_q + 31) / 32 * 32;
}

inline int64_t mha_dscores_row(const mha_dscores_args& a) {
  const int64_t keys = a.is_group_mode ? a.max_seqlen_k : a.seqlen_k;
  return (keys + 127) / 128 * 128;
}

struct MhaDscoresPlan {
  ProblemKey key;
  LoadedKernel delta;
  LoadedKernel bwd;
  LoadedKernel dq;
  LoadedKernel gaps;  // Null but of a packed batch.
};

// The sizes of a problem are hdim_q and hdim_v.
AITER_OPERATION(mha_fwd, mha_fwd_args, MhaFwdPlan);
AITER_OPERATION(mha_bwd, mha_bwd_args, MhaBwdPlan);
AITER_OPERATION(mha_one_pass, mha_one_pass_args, MhaOnePassPlan);
AITER_OPERATION(mha_dscores, mha_dscores_args, MhaDscoresPlan);

}  // namespace aiter

#endif  // AITER_MHA_H_
