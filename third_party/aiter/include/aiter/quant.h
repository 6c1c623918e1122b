// SPDX-License-Identifier: Apache-2.0

// Quantisers: rows, groups and blocks to int8, fp8 and MXFP4.
//
// Calls are as in operation.h, streams and devices as in mha.h.
#ifndef AITER_QUANT_H_
#define AITER_QUANT_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// What one scale is for.
enum class QuantScale : int32_t {
  kRow = 0,    // A row. Scales may be given.
  kGroup = 1,  // 32, 64 or 128 columns of a row.
  kBlock = 2,  // 128 columns of 128 rows.
  // No numbers are rounded: the largest magnitudes alone, of each kAmaxCols
  // columns of a row, as float32.
  kAmax = 3,
};

inline constexpr int64_t kAmaxCols = 4096;
inline constexpr int64_t kQuantBlockSize = 128;

// How an e8m0 scale comes of the largest magnitude: kernels/core/rounding.py.
enum class MxRounding : int32_t { kDown = 0, kUp = 1, kEven = 2, kCeil = 3 };

// q = x * smooth_scale / scale, rounded to nearest, ties to even, and
// saturated. Arrays start at a multiple of 16 bytes; x and q are contiguous.
struct quant_args {
  DataType data_type = DataType::kBf16;  // x's: fp16, bf16 or fp32.
  DataType q_type = DataType::kI8;       // Or e4m3fn, e4m3fnuz, e2m1.
  QuantScale per = QuantScale::kRow;
  int64_t group = 0;  // Columns of a group.
  // Scales are e8m0 of largest magnitudes of groups; else they are float32,
  // max(amax, 1e-10) / largest number, and e2m1 has none such.
  bool scale_is_e8m0 = false;
  MxRounding rounding = MxRounding::kUp;

  int64_t batch = 0;
  int64_t rows = 0;
  int64_t cols = 0;  // Even with e2m1.

  const void* x_ptr = nullptr;             // [batch, rows, cols]
  const void* smooth_scale_ptr = nullptr;  // float32 [cols], or absent.
  // float32 [batch, rows], if scales are given; scale_ptr is absent then.
  const void* scale_in_ptr = nullptr;

  // Bytes [batch, rows, cols]; of e2m1 [batch, rows, cols / 2], an even column
  // in the low bits and the odd one after it in the high bits.
  void* q_ptr = nullptr;
  // [batch, scale_rows, scale_cols] with these strides in elements: one for
  // each row, group or block, those at an end perhaps of fewer columns.
  // Shuffled, the rows are a multiple of 32 and the columns one of 8, at least
  // as many as groups, the others 0; and they lie in the order [rows / 32,
  // cols / 8, 4, 16, 2, 2] of [rows / 32, 2, 16, cols / 8, 2, 4].
  void* scale_ptr = nullptr;
  int64_t scale_rows = 0;
  int64_t scale_cols = 0;
  int64_t stride_scale = 0;  // From row to row.
  int64_t col_stride_scale = 0;
  int64_t batch_stride_scale = 0;
  bool scale_is_shuffled = false;
};

// The size of a problem is cols. Its features say what a scale is for, if not a
// row: group, block or amax; static, that scales are given.
AITER_OPERATION(quant, quant_args, KernelPlan);

}  // namespace aiter

#endif  // AITER_QUANT_H_
