// SPDX-License-Identifier: Apache-2.0

#include "aiter/activation.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "third_party/aiter/src/activation_params.h"
#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/select.h"
#include "third_party/aiter/src/core/steps.h"

namespace aiter {
namespace {

// Kernels count rows, and columns of gate and up, in 32 bits, and add a tile.
constexpr int64_t kMaxRows = INT32_MAX - 8192;
constexpr int64_t kMaxCols = kMaxRows / 2;
// Columns of which as many begin at multiples of 16 bytes.
constexpr int64_t kColsMultiple = 8;
constexpr int64_t kShuffledRows = 32;
constexpr int64_t kShuffledCols = 8;

Status CheckFloat(const char* name, DataType type) {
  if (type <= DataType::kFp32) return Status();
  return Invalid(name, DataTypeName(type), "fp16, bf16 or fp32");
}

Status CheckGate(const activation_args& a) {
  AITER_RETURN_IF_ERROR(CheckFloat("data_type", a.data_type));
  AITER_RETURN_IF_ERROR(CheckRange("activation",
                                   static_cast<int32_t>(a.activation),
                                   static_cast<int32_t>(Activation::kGelu),
                                   static_cast<int32_t>(Activation::kSwiglu)));
  AITER_RETURN_IF_ERROR(CheckRange("rows", a.rows, 0, kMaxRows));
  AITER_RETURN_IF_ERROR(CheckRange("cols", a.cols, 0, kMaxCols));
  AITER_RETURN_IF_ERROR(CheckRange("experts", a.experts, 0, kMaxRows));
  if (!std::isfinite(a.alpha)) {
    return Invalid("alpha", std::to_string(a.alpha), "finite");
  }
  if (!(a.gate_limit >= 0)) {
    return Invalid("gate_limit", std::to_string(a.gate_limit), "at least 0");
  }
  if (!(a.limit >= 0)) {
    return Invalid("limit", std::to_string(a.limit), "at least 0");
  }
  if (a.is_packed && a.up_ptr != nullptr) {
    return Invalid("up_ptr", "given", "null if gate and up are packed");
  }
  if ((a.bias_ptr == nullptr) != (a.expert_ids_ptr == nullptr)) {
    return Invalid("expert_ids_ptr",
                   a.expert_ids_ptr == nullptr ? "null" : "given",
                   "given iff bias_ptr is");
  }
  if (a.bias_ptr != nullptr && !a.is_packed && a.up_ptr == nullptr) {
    return Invalid("bias_ptr", "given", "null without up");
  }
  return CheckAligned({{"gate_ptr", a.gate_ptr},
                       {"up_ptr", a.up_ptr},
                       {"expert_ids_ptr", a.expert_ids_ptr},
                       {"bias_ptr", a.bias_ptr}});
}

Status CheckArgs(const activation_fwd_args& a) {
  AITER_RETURN_IF_ERROR(CheckGate(a));
  AITER_RETURN_IF_ERROR(CheckFloat("out_type", a.out_type));
  return CheckAligned({{"out_ptr", a.out_ptr}});
}

Status CheckArgs(const activation_bwd_args& a) {
  AITER_RETURN_IF_ERROR(CheckGate(a));
  AITER_RETURN_IF_ERROR(CheckFloat("dy_type", a.dy_type));
  return CheckAligned({{"dy_ptr", a.dy_ptr},
                       {"dgate_ptr", a.dgate_ptr},
                       {"dup_ptr", a.dup_ptr}});
}

Status CheckQuant(const activation_quant_args& a) {
  AITER_RETURN_IF_ERROR(CheckGate(a));
  return CheckAligned({{"q_ptr", a.q_ptr}, {"scale_ptr", a.scale_ptr}});
}

Status CheckArgs(const activation_quant_row_args& a) {
  if (a.quant_type < DataType::kI8 || a.quant_type > DataType::kE4m3fnuz) {
    return Invalid("quant_type", DataTypeName(a.quant_type),
                   "i8, e4m3fn or e4m3fnuz");
  }
  return CheckQuant(a);
}

Status CheckArgs(const activation_quant_group_args& a) {
  AITER_RETURN_IF_ERROR(CheckQuant(a));
  if (a.quant_type < DataType::kI8) {
    return Invalid("quant_type", DataTypeName(a.quant_type),
                   "i8, e4m3fn, e4m3fnuz or e2m1");
  }
  bool packed = a.quant_type == DataType::kE2m1;
  if (a.scale_is_e8m0 ? a.quant_type == DataType::kI8 : packed) {
    return Invalid("scale_is_e8m0", a.scale_is_e8m0 ? "true" : "false",
                   "false of i8, and true of e2m1");
  }
  if (packed && a.cols % 2 != 0) {
    return Invalid("cols", std::to_string(a.cols), "even of e2m1");
  }
  AITER_RETURN_IF_ERROR(CheckRange("batch", a.batch, 1, kMaxRows));
  AITER_RETURN_IF_ERROR(CheckRange("rows", a.rows, 0, kMaxRows / a.batch));
  AITER_RETURN_IF_ERROR(
      CheckRange("rounding", static_cast<int32_t>(a.rounding), 0, 3));
  if (a.scale_in_ptr != nullptr) {
    if (a.scale_ptr != nullptr || a.scale_is_e8m0) {
      return Invalid("scale_in_ptr", "given", "null if scale_ptr is given");
    }
    return CheckAligned({{"scale_in_ptr", a.scale_in_ptr}});
  }
  if (a.group != 32 && a.group != 64 && a.group != 128) {
    return Invalid("group", std::to_string(a.group), "32, 64 or 128");
  }
  bool shuffled = a.scale_is_shuffled;
  if (shuffled && !a.scale_is_e8m0) {
    return Invalid("scale_is_shuffled", "true", "false but of e8m0");
  }
  if (shuffled && a.scale_rows % kShuffledRows != 0) {
    return Invalid("scale_rows", std::to_string(a.scale_rows),
                   "a multiple of 32 if shuffled");
  }
  if (shuffled && a.scale_cols % kShuffledCols != 0) {
    return Invalid("scale_cols", std::to_string(a.scale_cols),
                   "a multiple of 8 if shuffled");
  }
  // Only shuffled scales are padded.
  int64_t cols = CeilDiv(a.cols, a.group);
  AITER_RETURN_IF_ERROR(CheckRange("scale_rows", a.scale_rows, a.rows,
                                   shuffled ? kMaxRows : a.rows));
  AITER_RETURN_IF_ERROR(CheckRange("scale_cols", a.scale_cols, cols,
                                   shuffled ? kMaxRows / 128 : cols));
  if (!shuffled) return Status();
  return CheckRange("scale_cols", a.scale_cols, 0,
                    kMaxRows / std::max<int64_t>(a.scale_rows, 1));
}

uint32_t If(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

// Of a result, or of its gradient, that is not of the gate's type.
uint32_t FeaturesOfType(DataType type, DataType gate) {
  if (type == gate) return 0;
  return If(type == DataType::kFp16, kActivationOutFp16) |
         If(type == DataType::kBf16, kActivationOutBf16) |
         If(type == DataType::kFp32, kActivationOutF32);
}

uint32_t FeaturesOf(const activation_args& a) {
  return If(a.is_packed || a.up_ptr != nullptr, kActivationGated) |
         If(a.is_packed, kActivationPacked) |
         If(a.bias_ptr != nullptr, kActivationBias) |
         If(a.bias_ptr != nullptr && a.bias_is_f32, kActivationBiasF32) |
         If(a.activation == Activation::kSilu, kActivationSilu) |
         If(std::isfinite(a.gate_limit) || std::isfinite(a.limit),
            kActivationLimits);
}

uint32_t FeaturesOf(const activation_fwd_args& a) {
  return FeaturesOf(static_cast<const activation_args&>(a)) |
         FeaturesOfType(a.out_type, a.data_type);
}

uint32_t FeaturesOf(const activation_bwd_args& a) {
  return FeaturesOf(static_cast<const activation_args&>(a)) |
         FeaturesOfType(a.dy_type, a.data_type);
}

uint32_t FeaturesOf(const activation_quant_group_args& a) {
  return FeaturesOf(static_cast<const activation_args&>(a)) |
         If(a.scale_is_e8m0, kActivationE8m0) |
         If(a.scale_is_shuffled, kActivationShuffled) |
         If(a.scale_in_ptr != nullptr, kActivationStatic) |
         If(a.scale_in_ptr == nullptr && a.group < 128, kActivationShort);
}

// By what kernels divide numbers of 31 bits by `cols`, which is no more than
// 30: n / cols = (2 n * inverse) >> (32 + shift), with 2^shift >= cols. The
// inverse, rounded up, is less than 2^(31 + shift) / cols + 1: at most n /
// 2^(31 + shift) is too much, less than 1 / cols.
void SetInverse(int64_t cols, ActivationParams* p) {
  if (cols == 0) return;
  while ((int64_t{1} << p->cols_shift) < cols) ++p->cols_shift;
  uint64_t scale = uint64_t{1} << (31 + p->cols_shift);
  p->cols_inverse =
      static_cast<int32_t>(static_cast<uint32_t>((scale + cols - 1) / cols));
}

ActivationParams ParamsOf(const activation_args& a, const KernelPlan& plan) {
  ActivationParams p;
  p.gate_ptr = a.gate_ptr;
  // Without up, kernels read the gate in its place, and count it for nothing.
  p.up_ptr = a.up_ptr != nullptr ? a.up_ptr : a.gate_ptr;
  p.bias_ptr = a.bias_ptr;
  p.bias_f32_ptr = a.bias_ptr;
  p.expert_ids_ptr = a.expert_ids_ptr;
  p.rows = static_cast<int32_t>(a.rows);
  p.cols = static_cast<int32_t>(a.cols);
  SetInverse(a.cols, &p);
  p.experts = static_cast<int32_t>(a.experts);
  p.activation = static_cast<int32_t>(a.activation);
  p.alpha = a.alpha;
  p.gate_limit = a.gate_limit;
  p.up_limit = a.limit;
  p.flags = static_cast<int32_t>(plan.key.features & kKernelFlags);
  return p;
}

ActivationParams ParamsOf(const activation_quant_args& a,
                          const KernelPlan& plan) {
  ActivationParams p = ParamsOf(static_cast<const activation_args&>(a), plan);
  p.q_ptr = a.q_ptr;
  p.scale_ptr = a.scale_ptr;
  p.scale_e8m0_ptr = a.scale_ptr;
  p.kind =
      static_cast<int32_t>(a.quant_type) - static_cast<int32_t>(DataType::kI8);
  return p;
}

// Launches a kernel whose tiles cover so many rows and columns.
Status LaunchTiles(const Driver& driver, const KernelPlan& plan, int64_t rows,
                   int64_t cols, ActivationParams* params, void* stream) {
  const KernelInfo& kernel = *plan.kernel.info;
  int64_t tiles_m = CeilDiv(rows, kernel.tile_m);
  int64_t tiles_n = CeilDiv(cols, kernel.tile_n);
  AITER_RETURN_IF_ERROR(
      CheckRange("tiles", tiles_m * tiles_n, 0, kMaxRows / params->batch));
  params->tiles_m = static_cast<int32_t>(tiles_m);
  params->tiles_n = static_cast<int32_t>(tiles_n);
  return LaunchKernel(driver, plan.kernel, params, stream);
}

// What the operations share of it.
template <typename ArgsOfOp>
struct Act {
  using Args = ArgsOfOp;
  using Plan = KernelPlan;

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
    return Status();
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    return steps->Add(OperationOf<Args>::kName, key, &plan->kernel);
  }

 private:
  static uint32_t Alignment(const ProblemKey& key) {
    int32_t cols = key.dims[0];
    return If(cols % kColsMultiple != 0, kActivationUnaligned) |
           If(cols % 4 != 0, kActivationRagged);
  }
};

struct Fwd : Act<activation_fwd_args> {
  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    ActivationParams params = ParamsOf(args, plan);
    params.out_ptr = args.out_ptr;
    params.out_fp16_ptr = args.out_ptr;
    params.out_bf16_ptr = args.out_ptr;
    params.out_f32_ptr = args.out_ptr;
    return LaunchTiles(driver, plan, args.rows, args.cols, &params, stream);
  }
};

struct Bwd : Act<activation_bwd_args> {
  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    ActivationParams params = ParamsOf(args, plan);
    params.dy_ptr = args.dy_ptr;
    params.dy_fp16_ptr = args.dy_ptr;
    params.dy_bf16_ptr = args.dy_ptr;
    params.dy_f32_ptr = args.dy_ptr;
    params.dgate_ptr = args.dgate_ptr;
    params.dup_ptr = args.is_packed ? args.dgate_ptr : args.dup_ptr;
    return LaunchTiles(driver, plan, args.rows, args.cols, &params, stream);
  }
};

struct QuantRow : Act<activation_quant_row_args> {
  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    ActivationParams params = ParamsOf(args, plan);
    return LaunchKernel(driver, plan.kernel, &params, stream);
  }
};

struct QuantGroup : Act<activation_quant_group_args> {
  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    ActivationParams params = ParamsOf(args, plan);
    params.scale_in_ptr = args.scale_in_ptr;
    params.batch = static_cast<int32_t>(args.batch);
    params.scale_rows = static_cast<int32_t>(args.scale_rows);
    params.scale_cols = static_cast<int32_t>(args.scale_cols);
    params.group = static_cast<int32_t>(args.group);
    params.mode = static_cast<int32_t>(args.rounding);
    // Tiles cover the padding of scales too.
    return LaunchTiles(driver, plan, std::max(args.rows, args.scale_rows),
                       std::max(args.cols, args.scale_cols * args.group),
                       &params, stream);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(activation_fwd, Fwd);
AITER_DEFINE_OPERATION(activation_bwd, Bwd);
AITER_DEFINE_OPERATION(activation_quant_row, QuantRow);
AITER_DEFINE_OPERATION(activation_quant_group, QuantGroup);

}  // namespace aiter
