// SPDX-License-Identifier: Apache-2.0

// RMSNorm and LayerNorm, forward and backward, on AMD and NVIDIA GPUs.
//
// Calls are as in operation.h, streams and devices as in mha.h.
#ifndef AITER_NORM_H_
#define AITER_NORM_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// What forward and backward share. Arrays are contiguous and start at a
// multiple of 16 bytes; those without a stated type are of `data_type`.
struct norm_args {
  DataType data_type = DataType::kBf16;
  bool is_layer_norm = false;  // Subtracts the mean; else it is RMSNorm.
  bool is_gemma = false;       // The weight is 1 + gamma.
  bool is_t5 = false;          // Rounds the normalised rows before the weight.

  int64_t rows = 0;
  int64_t cols = 0;

  // [cols], as beta is: float32 if `weights_are_f32`, else of `data_type`.
  const void* gamma_ptr = nullptr;
  bool weights_are_f32 = false;
};

// What is normalised, s = x or x + residual, added in float32 and rounded for
// residual_out alone (with is_t5, for the norm too), and how:
//   y = (s - mean(s)) / sqrt(var(s) + epsilon) * gamma + beta
// in float32. RMSNorm takes mean(s) as 0.
struct norm_rows_args : norm_args {
  const void* x_ptr = nullptr;         // [rows, cols]
  const void* residual_ptr = nullptr;  // [rows, cols], or absent.
  const void* beta_ptr = nullptr;      // [cols], or absent.
  float epsilon = 0;

  void* residual_out_ptr = nullptr;  // [rows, cols], present as residual is.
};

struct norm_fwd_args : norm_rows_args {
  void* y_ptr = nullptr;  // [rows, cols]
  // Of the rows that backward reads, so with a residual of the rounded sum.
  void* mean_ptr = nullptr;  // float32 [rows]; 0 of an RMSNorm.
  void* rstd_ptr = nullptr;  // float32 [rows]
};

// Quantises y * x_scale, which is never rounded to `data_type`. For each row,
// scale = max(amax, 1e-10) / the largest number of quant_type, q = y / scale;
// with kE2m1 it is MXFP4: an e8m0 scale of each 32 columns, rounded up.
struct norm_quant_args : norm_rows_args {
  DataType quant_type = DataType::kI8;  // Or kE4m3fn, kE4m3fnuz, kE2m1.
  const void* x_scale_ptr = nullptr;    // float32 [cols], or absent.

  // [rows, cols]; of kE2m1 bytes [rows, cols / 2], even columns in the low
  // bits, and cols is a multiple of 32.
  void* q_ptr = nullptr;
  void* scale_ptr = nullptr;  // float32 [rows]; of kE2m1 [rows, cols / 32].
};

// Gradients, deterministic.
struct norm_bwd_args : norm_args {
  const void* s_ptr = nullptr;              // [rows, cols]: x, or residual_out.
  const void* dy_ptr = nullptr;             // [rows, cols]
  const void* dresidual_out_ptr = nullptr;  // [rows, cols], or absent.
  const void* mean_ptr = nullptr;           // As forward left them.
  const void* rstd_ptr = nullptr;

  void* dx_ptr = nullptr;  // [rows, cols]: of x, and of residual as well.
  // [cols] each, of data_type or float32; dbeta's may be absent.
  void* dgamma_ptr = nullptr;
  void* dbeta_ptr = nullptr;
  bool sums_are_f32 = false;
  // Scratch: float32 [parts, cols] each, dbeta's if it is wanted. Rows are
  // divided among up to `parts`, which work side by side: at least 1, or 8
  // where 8 does not divide cols.
  void* dgamma_parts_ptr = nullptr;
  void* dbeta_parts_ptr = nullptr;
  int64_t parts = 0;
};

// The loaded kernel of a forward call.
struct NormFwdPlan {
  ProblemKey key;
  LoadedKernel kernel;
  int64_t max_blocks = 0;  // That run at once; more only wait.
};

// Loaded kernels of a backward call.
struct NormBwdPlan {
  ProblemKey key;
  LoadedKernel parts;  // Null if dx leaves the parts of dgamma and dbeta too.
  LoadedKernel dx;
  LoadedKernel dgamma;
  int64_t max_parts = 0;  // No more of args' parts are used.
};

// The size of a problem is cols.
AITER_OPERATION(norm_fwd, norm_fwd_args, NormFwdPlan);
AITER_OPERATION(norm_quant, norm_quant_args, NormFwdPlan);
AITER_OPERATION(norm_bwd, norm_bwd_args, NormBwdPlan);

}  // namespace aiter

#endif  // AITER_NORM_H_
