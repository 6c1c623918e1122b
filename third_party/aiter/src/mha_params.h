// SPDX-License-Identifier: Apache-2.0

// Every argument that an attention kernel may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/*.py.
#ifndef AITER_SRC_MHA_PARAMS_H_
#define AITER_SRC_MHA_PARAMS_H_

#include <cstdint>

namespace aiter {

struct MhaParams {
  const void* q_ptr = nullptr;
  const void* k_ptr = nullptr;
  const void* v_ptr = nullptr;
  const void* out_ptr = nullptr;
  const void* lse_ptr = nullptr;
  const void* bias_ptr = nullptr;
  const void* bias_f32_ptr = nullptr;
  const void* mask_ptr = nullptr;
  const void* alibi_slopes_ptr = nullptr;
  const void* sink_ptr = nullptr;
  const void* dropout_state_ptr = nullptr;
  const void* cu_seqlens_q_ptr = nullptr;
  const void* cu_seqlens_k_ptr = nullptr;
  const void* cu_seqlens_q_padded_ptr = nullptr;
  const void* cu_seqlens_k_padded_ptr = nullptr;
  const void* words_ptr = nullptr;  // Rows of any tensor.
  // Backward only.
  const void* do_ptr = nullptr;
  const void* dlse_ptr = nullptr;
  const void* delta_ptr = nullptr;
  const void* dq_ptr = nullptr;
  const void* dk_ptr = nullptr;
  const void* dv_ptr = nullptr;
  const void* dbias_ptr = nullptr;
  const void* d_sink_ptr = nullptr;
  const void* d_slopes_ptr = nullptr;

  int32_t stride_q = 0, nhead_stride_q = 0;
  int32_t stride_k = 0, nhead_stride_k = 0;
  int32_t stride_v = 0, nhead_stride_v = 0;
  int32_t stride_o = 0, nhead_stride_o = 0;
  int32_t stride_do = 0, nhead_stride_do = 0;
  int32_t stride_dq = 0, nhead_stride_dq = 0;
  int32_t stride_dk = 0, nhead_stride_dk = 0;
  int32_t stride_dv = 0, nhead_stride_dv = 0;
  int32_t stride_bias = 0, key_stride_bias = 0;
  int32_t stride_mask = 0, key_stride_mask = 0;
  int32_t stride_dbias = 0;
  int64_t batch_stride_q = 0, batch_stride_k = 0, batch_stride_v = 0;
  int64_t batch_stride_o = 0, batch_stride_do = 0;
  int64_t batch_stride_dq = 0, batch_stride_dk = 0, batch_stride_dv = 0;
  int64_t nhead_stride_lse = 0, batch_stride_lse = 0;
  int64_t nhead_stride_bias = 0, batch_stride_bias = 0;
  int64_t nhead_stride_mask = 0, batch_stride_mask = 0;
  int64_t nhead_stride_dbias = 0, batch_stride_dbias = 0;

  int32_t row_words = 0;
  int32_t batch = 0;
  int32_t seqlen_q = 0, seqlen_k = 0;
  int32_t nhead_q = 0, nhead_k = 0;
  int32_t hdim_q = 0, hdim_v = 0;
  int32_t bias_batch = 0, bias_nhead = 0;

  float softmax_scale = 0;
  float logits_soft_cap = 0;
  int32_t drop_threshold = 0;  // round(p * 2^16), in the upper half.
  float rp_keep = 0;           // 1 / (1 - p)
  int32_t window_left = 0, window_right = 0;
  int32_t sink_tokens = 0;
  int32_t min_seqlen_q = 0;
  int32_t multiprocessors = 0;  // Of a forward pass.
  int32_t flags = 0;
};

}  // namespace aiter

#endif  // AITER_SRC_MHA_PARAMS_H_
