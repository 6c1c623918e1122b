// SPDX-License-Identifier: Apache-2.0

// Tokens drawn from rows of logits or probabilities, and the largest columns
// of rows, on AMD and NVIDIA GPUs.
//
// Calls are as in operation.h, streams and devices as in mha.h.
#ifndef AITER_SAMPLING_H_
#define AITER_SAMPLING_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// Of the scratch of a row: int64 of a part's maxima, histogram and sums, int32
// in the list of candidates, and int64 of its state.
inline constexpr int64_t kSamplingMaxima = 256;
inline constexpr int64_t kSamplingBins = 2048;
inline constexpr int64_t kSamplingSums = 16;
inline constexpr int64_t kSamplingCandidates = 16384;
inline constexpr int64_t kSamplingState = 16;
// The field of the state that says from which number on columns are kept: its
// high 32 bits are the number's, in an order that is that of int32.
inline constexpr int64_t kSamplingLimit = 5;

// What all operations share. Arrays are contiguous and start at a multiple of
// 16 bytes.
struct sampling_rows_args {
  DataType data_type = DataType::kBf16;  // Or kFp32.
  int64_t rows = 0;
  int64_t cols = 0;
  const void* logits_ptr = nullptr;  // [rows, cols]

  // Scratch: int32 [rows, kSamplingCandidates].
  void* candidates_ptr = nullptr;
};

// What those share that divide a row.
struct sampling_args : sampling_rows_args {
  // A row is divided into so many parts, which work side by side: at least one
  // for 32768 columns, and at most 64.
  int64_t parts = 0;

  // Scratch. The largest columns need the first, a draw the second too, the k
  // largest columns all but the histogram and the sums, limits all.
  void* best_ptr = nullptr;       // int64 [rows, 2, parts]
  void* maxima_ptr = nullptr;     // int64 [rows, parts, kSamplingMaxima]
  void* histogram_ptr = nullptr;  // int64 [rows, parts, kSamplingBins]
  void* sums_ptr = nullptr;       // int64 [rows, parts, kSamplingSums]
  void* state_ptr = nullptr;      // int64 [rows, kSamplingState]
};

enum class SamplingOf : uint8_t {
  kLargest,  // The largest column, the first of equal ones.
  kDraw,
  kLimit,  // The field kSamplingLimit of `state` alone.
};

// Draws a column of each row, in proportion to e^(logits / temperature), or to
// probabilities. Which are kept, and the draw: kernels/sampling/*.py.
struct sampling_draw_args : sampling_args {
  SamplingOf of = SamplingOf::kDraw;
  bool is_of_probs = false;
  bool is_k_first = false;  // top_p counts of what top_k leaves.

  const void* keys_ptr = nullptr;  // uint32 [rows, 4], or absent with the next.
  const void* exponentials_ptr = nullptr;  // float32 [rows, cols], or absent.
  const void* temperature_ptr = nullptr;   // float32 [rows]; of logits only.
  const void* top_k_ptr = nullptr;         // int32 [rows], or absent.
  const void* top_p_ptr = nullptr;         // float32 [rows], or absent.
  const void* min_p_ptr = nullptr;         // float32 [rows], or absent.
  const void* mask_ptr = nullptr;  // int32 [rows, ceil(cols / 32)], or absent.

  void* tokens_ptr = nullptr;  // int32 [rows]; -1: none. Absent of kLimit.
};

// The k largest columns of each row, NaN before all; of equal ones the first
// come first.
struct sampling_top_k_args : sampling_args {
  int64_t k = 0;
  void* values_ptr = nullptr;   // [rows, k], of `data_type`.
  void* columns_ptr = nullptr;  // int32 [rows, k]
};

// The k largest of the columns of each row that are in its span, as lists of
// columns in their order, -1 behind them; of equal numbers the first columns.
// NaN is the largest.
struct sampling_select_args : sampling_rows_args {
  int64_t k = 0;
  const void* spans_ptr = nullptr;  // int32 [rows, 2]: first, behind the last.
  void* columns_ptr = nullptr;      // int32 [rows, k]
};

// Loaded kernels of a call; those it does not need are null.
struct SamplingPlan {
  ProblemKey key;
  LoadedKernel largest;
  LoadedKernel bound;
  LoadedKernel gather;
  LoadedKernel weigh;
  LoadedKernel histogram;
  LoadedKernel bracket;
  LoadedKernel collect;
  LoadedKernel threshold;
  LoadedKernel race;
  LoadedKernel pick;
  LoadedKernel rank;
};

// The size of a problem is k, or 0 of a draw.
AITER_OPERATION(sampling_select, sampling_select_args, KernelPlan);
AITER_OPERATION(sampling_draw, sampling_draw_args, SamplingPlan);
AITER_OPERATION(sampling_top_k, sampling_top_k_args, SamplingPlan);

}  // namespace aiter

#endif  // AITER_SAMPLING_H_
