// SPDX-License-Identifier: Apache-2.0

// Every argument that a GEMM's kernel may take, by name.
//
// aot/embed.py writes, for each list of arguments that the kernels have, a
// struct and a function which copies these fields into it; an argument NAME of
// pointer type is the field NAME_ptr. Meanings: kernels/gemm.py.
#ifndef AITER_SRC_GEMM_PARAMS_H_
#define AITER_SRC_GEMM_PARAMS_H_

#include <cstdint>

namespace aiter {

// Strides count elements as stored: a byte of two e2m1 numbers is one. They
// may be as large as 2^31 - 1, so that a row times its stride takes 64 bits.
// An operand that all batches share has a batch stride of 0.
struct GemmParams {
  const void* a_ptr = nullptr;
  const void* b_ptr = nullptr;
  const void* a_scale_ptr = nullptr;
  const void* b_scale_ptr = nullptr;
  // The same as scales of gemm_mx.
  const void* a_scale_e8m0_ptr = nullptr;
  const void* b_scale_e8m0_ptr = nullptr;
  // The bias, and out [batch, m, n], by the width of their types.
  const void* bias_ptr = nullptr;
  const void* bias_f32_ptr = nullptr;
  const void* out_bf16_ptr = nullptr;
  const void* out_f32_ptr = nullptr;
  // [splits, batch, m, n], or of kernels that walk [splits, divided_tiles,
  // tile_m, tile_n].
  const void* workspace_ptr = nullptr;

  int32_t m = 0, n = 0, k = 0;
  int32_t batch = 0;
  int32_t splits = 0;
  int32_t k_rows = 0;       // k of gemm_tn, where it may be any number.
  int32_t k_per_split = 0;  // A multiple of tile_k, even of k = 0.
  // Kernels that walk over tiles divide k of the last ones alone.
  int32_t whole_tiles = 0, divided_tiles = 0;
  int32_t skew = 0;  // 1: columns of tiles begin at different slabs of k.
  int32_t sum_tile_m = 0, sum_tile_n = 0;  // gemm_sum_tiles: their tile.
  int32_t blocks_at_once = 0;              // That the device has room for.

  int32_t stride_a = 0, stride_b = 0;
  int64_t batch_stride_a = 0, batch_stride_b = 0, batch_stride_out = 0;

  // gemm_row: 1 if there is a scale a row of a (of b), 0 if there is one.
  int32_t a_scale_step = 0, b_scale_step = 0;
  // gemm_block, gemm_mx: elements from one row's scale to the next row's (one
  // block of 128 rows of b to the next in gemm_block), and along k.
  int32_t stride_a_scale_m = 0, stride_a_scale_k = 0;
  int32_t stride_b_scale_n = 0, stride_b_scale_k = 0;
  int64_t batch_stride_a_scale = 0, batch_stride_b_scale = 0;

  int32_t activation = 0;  // GemmActivation
  int32_t flags = 0;       // Features below kKernelFlags.
};

}  // namespace aiter

#endif  // AITER_SRC_GEMM_PARAMS_H_
