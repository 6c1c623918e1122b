// SPDX-License-Identifier: Apache-2.0

#include "aiter/norm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/select.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/norm_params.h"

namespace aiter {
namespace {

// Kernels count rows in 32 bits, and divide by the columns in float32.
constexpr int64_t kMaxRows = INT32_MAX - 1024;
constexpr int64_t kMaxCols = 1 << 24;
constexpr int64_t kMaxParts = 65535;
constexpr int64_t kColsMultiple = 8;
// Rows so far apart begin at the same place of 16 bytes.
constexpr int64_t kShiftedRows = kColsMultiple;
constexpr int64_t kBlocksPerMultiprocessor = 8;
constexpr int32_t kMaxRowBlocks = 1 << 20;
constexpr int64_t kMxGroup = 32;  // Columns with one e8m0 scale.
// Threads of which two blocks share a multiprocessor.
constexpr int kSmallBlock = 256;

// What output is rounded to, as kernels/core/rounding.py has it.
Status KindOf(DataType type, int32_t* kind) {
  switch (type) {
    case DataType::kI8:
      *kind = 0;
      return Status();
    case DataType::kE4m3fn:
      *kind = 1;
      return Status();
    case DataType::kE4m3fnuz:
      *kind = 2;
      return Status();
    case DataType::kE2m1:
      *kind = 3;
      return Status();
    default:
      return Invalid("quant_type", DataTypeName(type),
                     "i8, e4m3fn, e4m3fnuz or e2m1");
  }
}

Status CheckSizes(const norm_args& a) {
  AITER_RETURN_IF_ERROR(CheckRange("rows", a.rows, 0, kMaxRows));
  return CheckRange("cols", a.cols, 1, kMaxCols);
}

Status CheckRows(const norm_rows_args& a) {
  AITER_RETURN_IF_ERROR(CheckSizes(a));
  if (!(a.epsilon >= 0) || !std::isfinite(a.epsilon)) {
    return Invalid("epsilon", std::to_string(a.epsilon),
                   "finite and not negative");
  }
  if ((a.residual_ptr == nullptr) != (a.residual_out_ptr == nullptr)) {
    return Invalid("residual_out_ptr",
                   a.residual_out_ptr == nullptr ? "null" : "given",
                   "given iff residual_ptr is");
  }
  return CheckAligned({{"x_ptr", a.x_ptr},
                       {"residual_ptr", a.residual_ptr},
                       {"gamma_ptr", a.gamma_ptr},
                       {"beta_ptr", a.beta_ptr},
                       {"residual_out_ptr", a.residual_out_ptr}});
}

Status CheckArgs(const norm_fwd_args& a) {
  AITER_RETURN_IF_ERROR(CheckRows(a));
  return CheckAligned({{"y_ptr", a.y_ptr}});
}

Status CheckArgs(const norm_quant_args& a) {
  AITER_RETURN_IF_ERROR(CheckRows(a));
  int32_t kind;
  AITER_RETURN_IF_ERROR(KindOf(a.quant_type, &kind));
  if (a.quant_type == DataType::kE2m1 && a.cols % kMxGroup != 0) {
    return Invalid("cols", std::to_string(a.cols), "a multiple of 32");
  }
  return CheckAligned({{"x_scale_ptr", a.x_scale_ptr},
                       {"q_ptr", a.q_ptr},
                       {"scale_ptr", a.scale_ptr}});
}

Status CheckArgs(const norm_bwd_args& a) {
  AITER_RETURN_IF_ERROR(CheckSizes(a));
  const int64_t least = a.cols % kColsMultiple == 0 ? 1 : kShiftedRows;
  AITER_RETURN_IF_ERROR(CheckRange("parts", a.parts, least, kMaxParts));
  if (a.dbeta_ptr != nullptr && a.dbeta_parts_ptr == nullptr) {
    return Invalid("dbeta_parts_ptr", "null", "given with dbeta_ptr");
  }
  return CheckAligned({{"s_ptr", a.s_ptr},
                       {"gamma_ptr", a.gamma_ptr},
                       {"dy_ptr", a.dy_ptr},
                       {"dresidual_out_ptr", a.dresidual_out_ptr},
                       {"dx_ptr", a.dx_ptr},
                       {"dgamma_ptr", a.dgamma_ptr},
                       {"dbeta_ptr", a.dbeta_ptr},
                       {"dgamma_parts_ptr", a.dgamma_parts_ptr},
                       {"dbeta_parts_ptr", a.dbeta_parts_ptr}});
}

uint32_t If(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

uint32_t FeaturesOf(const norm_args& a) {
  return If(a.is_layer_norm, kNormLayer) | If(a.is_gemma, kNormGemma) |
         If(a.is_t5, kNormT5) | If(a.weights_are_f32, kNormF32Weights);
}

uint32_t FeaturesOf(const norm_rows_args& a) {
  return FeaturesOf(static_cast<const norm_args&>(a)) |
         If(a.residual_ptr != nullptr, kNormResidual) |
         If(a.beta_ptr != nullptr, kNormBeta);
}

uint32_t FeaturesOf(const norm_quant_args& a) {
  return FeaturesOf(static_cast<const norm_rows_args&>(a)) |
         If(a.x_scale_ptr != nullptr, kNormXScale) |
         If(a.quant_type == DataType::kE2m1, kNormE2m1);
}

uint32_t FeaturesOf(const norm_bwd_args& a) {
  return FeaturesOf(static_cast<const norm_args&>(a)) |
         If(a.dresidual_out_ptr != nullptr, kNormResidual) |
         If(a.dbeta_ptr != nullptr, kNormBeta);
}

NormParams ParamsOf(const norm_args& a, const ProblemKey& key) {
  NormParams p;
  p.gamma_ptr = a.gamma_ptr;
  p.gamma_f32_ptr = a.gamma_ptr;
  p.rows = static_cast<int32_t>(a.rows);
  p.cols = static_cast<int32_t>(a.cols);
  p.flags = static_cast<int32_t>(key.features);
  return p;
}

NormParams ParamsOf(const norm_rows_args& a, const ProblemKey& key) {
  NormParams p = ParamsOf(static_cast<const norm_args&>(a), key);
  p.x_ptr = a.x_ptr;
  p.residual_ptr = a.residual_ptr;
  p.beta_ptr = a.beta_ptr;
  p.beta_f32_ptr = a.beta_ptr;
  p.residual_out_ptr = a.residual_out_ptr;
  p.epsilon = a.epsilon;
  return p;
}

// What the three operations share of it.
template <typename ArgsOfOp, typename PlanOfOp>
struct Norm {
  using Args = ArgsOfOp;
  using Plan = PlanOfOp;

  static Status Check(const Args& a) { return CheckArgs(a); }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = static_cast<int32_t>(a.cols);
    key.features = FeaturesOf(a) | Alignment(key);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    AITER_RETURN_IF_ERROR(
        ProblemKeyOf(OperationOf<Args>::kName, problem, 1, key));
    key->features |= Alignment(*key);
    return CheckRange("cols", key->dims[0], 1, INT32_MAX);
  }

 private:
  static uint32_t Alignment(const ProblemKey& key) {
    return If(key.dims[0] % kColsMultiple != 0, kNormUnaligned);
  }
};

bool IsUnaligned(const ProblemKey& key) {
  return (key.features & kNormUnaligned) != 0;
}

bool IsAmd(const DeviceInfo& device) { return device.arch[0] == 'g'; }

// How many blocks of a kernel run at once: small ones share a multiprocessor,
// up to `most`, as far as its registers go. Three hold a row each, of which
// registers have no more than shared memory.
int64_t RowBlocksAtOnce(const DeviceInfo& device, const KernelInfo& kernel,
                        int most) {
  if (IsAmd(device)) return BlocksSideBySide(device, kernel);
  constexpr int kShortRowBytes = 60 * 1024;
  const bool three = kernel.threads <= 128 && kernel.tile_m == 1 &&
                     kernel.shared_bytes <= kShortRowBytes;
  const int with_registers = kernel.threads > kSmallBlock ? 1 : three ? 3 : 2;
  return BlocksAtOnce(device, kernel, std::min(with_registers, most));
}

// Programs of which each has rows of one place of 16 bytes.
int64_t OfAllPlaces(int64_t blocks) {
  return std::max(blocks / kShiftedRows, int64_t{1}) * kShiftedRows;
}

// How many blocks of a kernel for rows that 8 does not divide run at once.
int64_t ShiftedBlocks(const DeviceInfo& device, const KernelInfo& kernel,
                      int most) {
  if (IsAmd(device)) return OfAllPlaces(BlocksSideBySide(device, kernel));
  constexpr int kLanes = 32 * 4;  // A warp of each of four schedulers.
  const int side_by_side = kernel.occupancy * kLanes / kernel.threads;
  return OfAllPlaces(std::max<int64_t>(device.multiprocessors, 1) *
                     std::clamp(side_by_side, 1, most));
}

// How many blocks of a kernel that walks over rows divide them. More than run
// at once fall out of step, and some read while others write; but a LayerNorm
// has two sums to wait for, and more to do before its first row, and of small
// blocks two share a multiprocessor and are out of step anyway.
int64_t WalkingBlocks(const DeviceInfo& device, const KernelInfo& kernel,
                      const ProblemKey& key) {
  if (IsUnaligned(key)) return ShiftedBlocks(device, kernel, /*most=*/16);
  const bool residual = (key.features & kNormResidual) != 0;
  const bool small = residual && kernel.threads <= kSmallBlock;
  if (IsAmd(device) || small || (key.features & kNormLayer) != 0) {
    return RowBlocksAtOnce(device, kernel, /*most=*/2);
  }
  const int64_t turns = residual ? 8 : 2;
  return std::max<int64_t>(device.multiprocessors, 1) * turns;
}

struct Fwd : Norm<norm_fwd_args, NormFwdPlan> {
  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    AITER_RETURN_IF_ERROR(steps->Add("norm_fwd", key, &plan->kernel));
    plan->max_blocks = WalkingBlocks(steps->device(), *plan->kernel.info, key);
    return Status();
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    if (args.rows == 0) return Status();
    NormParams params = ParamsOf(args, plan.key);
    params.y_ptr = args.y_ptr;
    params.mean_ptr = args.mean_ptr;
    params.rstd_ptr = args.rstd_ptr;
    params.max_blocks = static_cast<int32_t>(plan.max_blocks);
    return LaunchKernel(driver, plan.kernel, &params, stream);
  }
};

struct Quant : Norm<norm_quant_args, NormFwdPlan> {
  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    AITER_RETURN_IF_ERROR(steps->Add("norm_quant", key, &plan->kernel));
    const KernelInfo& kernel = *plan->kernel.info;
    plan->max_blocks =
        IsUnaligned(key) ? ShiftedBlocks(steps->device(), kernel, /*most=*/16)
                         : RowBlocksAtOnce(steps->device(), kernel, /*most=*/3);
    return Status();
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    if (args.rows == 0) return Status();
    NormParams params = ParamsOf(args, plan.key);
    params.max_blocks = static_cast<int32_t>(plan.max_blocks);
    params.x_scale_ptr = args.x_scale_ptr;
    params.q_ptr = args.q_ptr;
    params.scale_ptr = args.scale_ptr;
    params.scale_e8m0_ptr = args.scale_ptr;
    AITER_RETURN_IF_ERROR(KindOf(args.quant_type, &params.kind));
    return LaunchKernel(driver, plan.kernel, &params, stream);
  }
};

struct Bwd : Norm<norm_bwd_args, NormBwdPlan> {
  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    const KernelInfo* dx;
    AITER_RETURN_IF_ERROR(
        SelectKernel(steps->device(), "norm_bwd_dx", key, &dx));
    NormParams part;
    part.parts = 1;
    int64_t blocks_of_part = 1;
    dx->grid->sizes(*dx, &part, &blocks_of_part);
    const int64_t at_once =
        IsUnaligned(key) ? ShiftedBlocks(steps->device(), *dx, /*most=*/3)
                         : RowBlocksAtOnce(steps->device(), *dx, /*most=*/3);
    plan->max_parts = std::max<int64_t>(at_once / blocks_of_part, 1);
    // A kernel for any number of columns cannot hold sums for all of them.
    if (dx->dims[0] == 0) {
      AITER_RETURN_IF_ERROR(steps->Add("norm_bwd_parts", key, &plan->parts));
      // Tiles of columns are blocks of their own.
      int64_t tiles = CeilDiv(key.dims[0], plan->parts.info->tile_n);
      plan->max_parts =
          CeilDiv(kBlocksPerMultiprocessor * plan->max_parts, tiles);
    }
    AITER_RETURN_IF_ERROR(steps->Add(*dx, &plan->dx));
    return steps->Add("norm_bwd_dgamma", key, &plan->dgamma);
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    NormParams params = ParamsOf(args, plan.key);
    params.x_ptr = args.s_ptr;
    params.dy_ptr = args.dy_ptr;
    params.dresidual_ptr = args.dresidual_out_ptr;
    params.mean_ptr = args.mean_ptr;
    params.rstd_ptr = args.rstd_ptr;
    params.dx_ptr = args.dx_ptr;
    params.dgamma_ptr = params.dgamma_f32_ptr = args.dgamma_ptr;
    params.dbeta_ptr = params.dbeta_f32_ptr = args.dbeta_ptr;
    params.dgamma_parts_ptr = args.dgamma_parts_ptr;
    params.dbeta_parts_ptr = args.dbeta_parts_ptr;
    int64_t parts = std::min(args.parts, plan.max_parts);
    if (IsUnaligned(plan.key)) parts = OfAllPlaces(parts);
    params.parts = static_cast<int32_t>(parts);
    params.rows_per_part = static_cast<int32_t>(CeilDiv(args.rows, parts));
    // Without rows the parts are sums of nothing, written all the same.
    NormParams rows = params;
    if (plan.parts.info != nullptr) {
      AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.parts, &params, stream));
      // Rows do not meet in dx alone: a block for each.
      rows.parts = std::clamp(params.rows, 1, kMaxRowBlocks);
      rows.rows_per_part =
          static_cast<int32_t>(CeilDiv(params.rows, rows.parts));
    }
    AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.dx, &rows, stream));
    params.sums = args.dbeta_ptr == nullptr ? 1 : 2;
    // Of the last kernel's weights only the gradients' type is of interest.
    params.flags &= ~static_cast<int32_t>(kNormF32Weights);
    params.flags |=
        static_cast<int32_t>(If(args.sums_are_f32, kNormF32Weights));
    return LaunchKernel(driver, plan.dgamma, &params, stream, /*maps=*/nullptr,
                        /*early=*/true);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(norm_fwd, Fwd);
AITER_DEFINE_OPERATION(norm_quant, Quant);
AITER_DEFINE_OPERATION(norm_bwd, Bwd);

}  // namespace aiter
