// SPDX-License-Identifier: Apache-2.0

// Gated activations, forward, quantised and backward.
//
// Calls are as in operation.h, streams and devices as in mha.h.
#ifndef AITER_ACTIVATION_H_
#define AITER_ACTIVATION_H_

#include <cstdint>
#include <limits>

#include "aiter/kernel.h"
#include "aiter/operation.h"
#include "aiter/quant.h"

namespace aiter {

// Numbers of kernels/core/activations.py and kernels/activation/rows.py.
enum class Activation : int32_t {
  kGelu = 2,
  kGeluTanh = 3,
  kSilu = 4,
  kSwiglu = 5,  // gate / (1 + exp(-alpha * gate)), times up + 1.
};

// What the operations share. Arrays are contiguous and start at a multiple of
// 16 bytes; those without a stated type are of `data_type`. A result is
//   y = activation(min(gate, gate_limit)) * clip(up, -limit, limit)
// in float32, with gate and up increased by the bias of the row's expert first.
struct activation_args {
  DataType data_type = DataType::kBf16;  // Or kFp16, kFp32.
  Activation activation = Activation::kSilu;
  float alpha = 1;  // Of kSwiglu.
  float gate_limit = std::numeric_limits<float>::infinity();
  float limit = std::numeric_limits<float>::infinity();

  int64_t rows = 0;
  int64_t cols = 0;  // Of a result.

  // [rows, cols]; or, packed, [rows, 2 * cols] with up in the second half.
  const void* gate_ptr = nullptr;
  bool is_packed = false;
  const void* up_ptr = nullptr;  // [rows, cols]; absent, the factor is 1.

  // Both or none. Of an expert that is not from 0 to experts - 1, y is 0.
  const void* expert_ids_ptr = nullptr;  // int32 [rows]
  const void* bias_ptr = nullptr;        // [experts, 2 * cols]
  bool bias_is_f32 = false;
  int64_t experts = 0;
};

struct activation_fwd_args : activation_args {
  DataType out_type = DataType::kBf16;  // Or kFp16, kFp32.
  void* out_ptr = nullptr;              // [rows, cols]
};

// Gradients. What a limit clips has none.
struct activation_bwd_args : activation_args {
  DataType dy_type = DataType::kBf16;  // Or kFp16, kFp32.
  const void* dy_ptr = nullptr;        // [rows, cols]
  void* dgate_ptr = nullptr;           // As gate, packed or not.
  void* dup_ptr = nullptr;             // As up.
};

// y in 8 or 4 bits, rounded once; scales and rounding are as in quant.h.
struct activation_quant_args : activation_args {
  DataType quant_type = DataType::kI8;  // Or kE4m3fn, kE4m3fnuz.
  void* q_ptr = nullptr;                // Bytes [rows, cols].
  void* scale_ptr = nullptr;
};

// A scale for each row: scale is float32 [rows].
struct activation_quant_row_args : activation_quant_args {};

// A scale for each group of columns, or one that is given. quant_type may be
// kE2m1: q then is bytes [rows, cols / 2], and scales are e8m0.
struct activation_quant_group_args : activation_quant_args {
  int64_t group = 0;  // Columns: 32, 64 or 128.
  bool scale_is_e8m0 = false;
  MxRounding rounding = MxRounding::kUp;
  const void* scale_in_ptr = nullptr;  // float32 [1]; scale is absent then.

  // scale is [batch, scale_rows, scale_cols], of `batch` matrices whose rows
  // are `rows`. Shuffled, it is padded with zeros, as quant_args says.
  int64_t batch = 1;
  int64_t scale_rows = 0;
  int64_t scale_cols = 0;
  bool scale_is_shuffled = false;
};

// The size of a problem is cols.
AITER_OPERATION(activation_fwd, activation_fwd_args, KernelPlan);
AITER_OPERATION(activation_bwd, activation_bwd_args, KernelPlan);
AITER_OPERATION(activation_quant_row, activation_quant_row_args, KernelPlan);
AITER_OPERATION(activation_quant_group, activation_quant_group_args,
                KernelPlan);

}  // namespace aiter

#endif  // AITER_ACTIVATION_H_
