// SPDX-License-Identifier: Apache-2.0

// Rotary position embedding and its transpose, on AMD and NVIDIA GPUs.
//
// Calls are as in operation.h, streams and devices as in mha.h.
#ifndef AITER_ROPE_H_
#define AITER_ROPE_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// Turns pairs of channels of x, and of y, by the angles of their tokens:
//   out1 = x1 * cos1 - x2 * sin1        out2 = x2 * cos2 + x1 * sin2
// in float32. Arrays are contiguous and start at a multiple of 16 bytes; those
// without a stated type are of `data_type`.
struct rope_rotate_args {
  DataType data_type = DataType::kBf16;

  // Tokens: [outer, seq, inner], of which seq counts positions.
  int64_t outer = 0;
  int64_t seq = 0;
  int64_t inner = 0;
  int64_t heads_x = 0;
  int64_t heads_y = 0;  // 0 without a y.
  int64_t dim = 0;      // Channels of a head.
  int64_t pairs = 0;    // 2 * pairs of them are turned, the others copied.

  bool is_gptj = false;        // Pairs are neighbours; else halves.
  bool is_nope_first = false;  // The last channels are turned.
  bool is_transposed = false;  // By the transposed matrix.

  const void* x_ptr = nullptr;  // [tokens, heads_x, dim]
  const void* y_ptr = nullptr;  // [tokens, heads_y, dim], or absent.
  // [table_rows, pairs], or, if is_full, [table_rows, 2 * pairs] in the order
  // of the channels. Float32 if `tables_are_f32`.
  const void* cos_ptr = nullptr;
  const void* sin_ptr = nullptr;
  int64_t table_rows = 0;
  bool is_full = false;
  bool tables_are_f32 = false;
  bool is_per_token = false;  // Row i is token i's. No places below then.

  // Rows of the tables: a token's place in seq, less where its packed sequence
  // begins; or positions; to which offsets come. One out of range is the
  // nearest row.
  const void* positions_ptr = nullptr;   // int32 [tokens], or absent.
  const void* offsets_ptr = nullptr;     // int32 [tokens], or absent.
  const void* cu_seqlens_ptr = nullptr;  // int32 [sequences + 1], or absent.
  int64_t sequences = 0;

  // Three sections of pairs, which end at section_0, section_1 and `pairs`,
  // have rows of their own: positions are [3, tokens], or, if grid_h is not 0,
  // a place is one in a volume of planes of grid_h by grid_w, and has three
  // coordinates.
  bool has_sections = false;
  int64_t grid_h = 0;
  int64_t grid_w = 0;
  int64_t section_0 = 0;
  int64_t section_1 = 0;
  // Halves lie side by side in three runs of pairs, which end at split_0,
  // split_1 and `pairs`. If both are `pairs` there is one run.
  int64_t split_0 = 0;
  int64_t split_1 = 0;

  void* x_out_ptr = nullptr;  // Like x.
  void* y_out_ptr = nullptr;  // Like y, present as it is.
};

// The size of a problem is pairs.
AITER_OPERATION(rope_rotate, rope_rotate_args, KernelPlan);

}  // namespace aiter

#endif  // AITER_ROPE_H_
