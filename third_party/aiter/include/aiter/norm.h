// SPDX-License-Identifier: Apache-2.0

// RMSNorm and LayerNorm, forward and backward, on AMD and NVIDIA GPUs.
//
// Calls, plans, streams and devices are as in mha.h.
#ifndef AITER_NORM_H_
#define AITER_NORM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "aiter/kernel.h"
#include "aiter/status.h"

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

// y = (s - mean(s)) / sqrt(var(s) + epsilon) * gamma + beta, where s is x or
// x + residual, added in float32 and rounded for residual_out alone (with
// is_t5, for the norm too). RMSNorm takes mean(s) as 0.
struct norm_fwd_args : norm_args {
  const void* x_ptr = nullptr;         // [rows, cols]
  const void* residual_ptr = nullptr;  // [rows, cols], or absent.
  const void* beta_ptr = nullptr;      // [cols], or absent.
  float epsilon = 0;

  void* y_ptr = nullptr;             // [rows, cols]
  void* residual_out_ptr = nullptr;  // [rows, cols], present as residual is.
  void* mean_ptr = nullptr;          // float32 [rows]; 0 of an RMSNorm.
  void* rstd_ptr = nullptr;          // float32 [rows]
};

// Gradients, deterministic.
struct norm_bwd_args : norm_args {
  const void* s_ptr = nullptr;              // [rows, cols]: x, or residual_out.
  const void* dy_ptr = nullptr;             // [rows, cols]
  const void* dresidual_out_ptr = nullptr;  // [rows, cols], or absent.
  const void* mean_ptr = nullptr;           // As forward left them.
  const void* rstd_ptr = nullptr;

  void* dx_ptr = nullptr;      // [rows, cols]: of x, and of residual as well.
  void* dgamma_ptr = nullptr;  // float32 [cols]
  void* dbeta_ptr = nullptr;   // float32 [cols], or absent.
  // Scratch: float32 [parts, cols] each, dbeta's if it is wanted. Rows are
  // divided into `parts` runs, at least 1, which work side by side.
  void* dgamma_parts_ptr = nullptr;
  void* dbeta_parts_ptr = nullptr;
  int64_t parts = 0;
};

struct NormFwdPlan {
  ProblemKey key;
  LoadedKernel fwd;
};

struct NormBwdPlan {
  ProblemKey key;
  LoadedKernel dx;
  LoadedKernel parts;  // Null if dx leaves the parts of dgamma and dbeta too.
  LoadedKernel dgamma;
};

Status norm_fwd_plan(const norm_fwd_args& args, NormFwdPlan* plan);
Status norm_bwd_plan(const norm_bwd_args& args, NormBwdPlan* plan);

Status norm_fwd(const norm_fwd_args& args, const NormFwdPlan& plan,
                void* stream);
Status norm_bwd(const norm_bwd_args& args, const NormBwdPlan& plan,
                void* stream);

Status norm_fwd(const norm_fwd_args& args, void* stream);
Status norm_bwd(const norm_bwd_args& args, void* stream);
Status norm_fwd_prepare(const norm_fwd_args& args);
Status norm_bwd_prepare(const norm_bwd_args& args);

// Names of the kernels that a call would use on a device of architecture
// `arch`, in launch order. Needs no device.
Status norm_kernels(bool backward, DataType data_type, int64_t cols,
                    const std::string& arch, std::vector<std::string>* names);

}  // namespace aiter

#endif  // AITER_NORM_H_
