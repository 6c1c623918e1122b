// SPDX-License-Identifier: Apache-2.0

#include "aiter/norm.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "third_party/aiter/src/driver.h"
#include "third_party/aiter/src/kernel_table.h"
#include "third_party/aiter/src/launch.h"
#include "third_party/aiter/src/norm_params.h"
#include "third_party/aiter/src/plan_cache.h"
#include "third_party/aiter/src/select.h"
#include "third_party/aiter/src/steps.h"

namespace aiter {
namespace {

// Kernels count rows in 32 bits, and divide by the columns in float32.
constexpr int64_t kMaxRows = INT32_MAX - 1024;
constexpr int64_t kMaxCols = 1 << 24;
constexpr int64_t kMaxParts = 65535;
constexpr int64_t kColsMultiple = 8;
constexpr uintptr_t kAlignment = 16;

Status Invalid(const std::string& name, const std::string& given,
               const std::string& accepted) {
  return Status(StatusCode::kInvalidArgument,
                name + " is " + given + ", but must be " + accepted);
}

Status CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return Status();
  return Invalid(name, std::to_string(value),
                 "from " + std::to_string(low) + " to " + std::to_string(high));
}

struct Pointer {
  const char* name;
  const void* address;
};

Status CheckAligned(std::initializer_list<Pointer> pointers) {
  for (const Pointer& p : pointers) {
    if (reinterpret_cast<uintptr_t>(p.address) % kAlignment != 0) {
      return Invalid(p.name, "not aligned", "a multiple of 16 bytes");
    }
  }
  return Status();
}

Status CheckSizes(const norm_args& a) {
  AITER_RETURN_IF_ERROR(CheckRange("rows", a.rows, 0, kMaxRows));
  return CheckRange("cols", a.cols, 1, kMaxCols);
}

Status CheckFwd(const norm_fwd_args& a) {
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
                       {"y_ptr", a.y_ptr},
                       {"residual_out_ptr", a.residual_out_ptr}});
}

Status CheckBwd(const norm_bwd_args& a) {
  AITER_RETURN_IF_ERROR(CheckSizes(a));
  AITER_RETURN_IF_ERROR(CheckRange("parts", a.parts, 1, kMaxParts));
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

ProblemKey KeyOf(const norm_args& a) {
  ProblemKey key;
  key.data_type = a.data_type;
  key.dims[0] = static_cast<int32_t>(a.cols);
  if (a.cols % kColsMultiple != 0) key.features |= kFeatureUnaligned;
  return key;
}

int32_t Flag(bool condition, NormFlag flag) { return condition ? flag : 0; }

NormParams ParamsOf(const norm_args& a) {
  NormParams p;
  p.gamma_ptr = a.gamma_ptr;
  p.gamma_f32_ptr = a.gamma_ptr;
  p.rows = static_cast<int32_t>(a.rows);
  p.cols = static_cast<int32_t>(a.cols);
  p.flags = Flag(a.is_layer_norm, kNormLayer) | Flag(a.is_gemma, kNormGemma) |
            Flag(a.is_t5, kNormT5) | Flag(a.weights_are_f32, kNormF32Weights);
  return p;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

Status LaunchNorm(const Driver& driver, const LoadedKernel& loaded,
                  const NormParams& params, void* stream) {
  const KernelInfo& kernel = *loaded.info;
  int64_t grid[3] = {1, 1, 1};
  for (int i = 0; i < 3; ++i) {
    switch (kernel.grid[i]) {
      case GridAxis::kTileM:
        grid[i] = CeilDiv(params.rows, kernel.tile_m);
        break;
      case GridAxis::kTileN:
        grid[i] = CeilDiv(params.cols, kernel.tile_n);
        break;
      case GridAxis::kParts:
        grid[i] = params.parts;
        break;
      default:
        break;
    }
  }
  return Launch(driver, loaded, grid, &params, /*maps=*/nullptr, stream);
}

Status CheckPlan(const ProblemKey& key, const ProblemKey& plan) {
  if (key == plan) return Status();
  return Status(StatusCode::kFailedPrecondition,
                "plan was made for other arguments: columns or data type "
                "differ");
}

// Plans of the calls that came without one.
PlanCache<NormFwdPlan>& FwdPlans() {
  static auto* cache = new PlanCache<NormFwdPlan>;
  return *cache;
}

PlanCache<NormBwdPlan>& BwdPlans() {
  static auto* cache = new PlanCache<NormBwdPlan>;
  return *cache;
}

}  // namespace

Status norm_fwd_plan(const norm_fwd_args& args, NormFwdPlan* plan) {
  AITER_RETURN_IF_ERROR(CheckFwd(args));
  plan->key = KeyOf(args);
  return LoadSteps(plan->key, {{"norm_fwd", true, &plan->fwd}});
}

Status norm_bwd_plan(const norm_bwd_args& args, NormBwdPlan* plan) {
  AITER_RETURN_IF_ERROR(CheckBwd(args));
  plan->key = KeyOf(args);
  AITER_RETURN_IF_ERROR(
      LoadSteps(plan->key, {{"norm_bwd_dx", true, &plan->dx},
                            {"norm_bwd_dgamma", true, &plan->dgamma}}));
  // A kernel for any number of columns cannot hold sums for all of them.
  return LoadSteps(plan->key, {{"norm_bwd_parts", plan->dx.info->dims[0] == 0,
                                &plan->parts}});
}

Status norm_fwd(const norm_fwd_args& args, const NormFwdPlan& plan,
                void* stream) {
  AITER_RETURN_IF_ERROR(CheckFwd(args));
  AITER_RETURN_IF_ERROR(CheckPlan(KeyOf(args), plan.key));
  const Driver* driver;
  AITER_RETURN_IF_ERROR(GetDriver(&driver));
  if (args.rows == 0) return Status();
  NormParams params = ParamsOf(args);
  params.x_ptr = args.x_ptr;
  params.residual_ptr = args.residual_ptr;
  params.beta_ptr = args.beta_ptr;
  params.beta_f32_ptr = args.beta_ptr;
  params.y_ptr = args.y_ptr;
  params.residual_out_ptr = args.residual_out_ptr;
  params.mean_ptr = args.mean_ptr;
  params.rstd_ptr = args.rstd_ptr;
  params.epsilon = args.epsilon;
  params.flags |= Flag(args.residual_ptr != nullptr, kNormResidual) |
                  Flag(args.beta_ptr != nullptr, kNormBeta);
  return LaunchNorm(*driver, plan.fwd, params, stream);
}

Status norm_bwd(const norm_bwd_args& args, const NormBwdPlan& plan,
                void* stream) {
  AITER_RETURN_IF_ERROR(CheckBwd(args));
  AITER_RETURN_IF_ERROR(CheckPlan(KeyOf(args), plan.key));
  const Driver* driver;
  AITER_RETURN_IF_ERROR(GetDriver(&driver));
  NormParams params = ParamsOf(args);
  params.x_ptr = args.s_ptr;
  params.dy_ptr = args.dy_ptr;
  params.dresidual_ptr = args.dresidual_out_ptr;
  params.mean_ptr = args.mean_ptr;
  params.rstd_ptr = args.rstd_ptr;
  params.dx_ptr = args.dx_ptr;
  params.dgamma_ptr = args.dgamma_ptr;
  params.dbeta_ptr = args.dbeta_ptr;
  params.dgamma_parts_ptr = args.dgamma_parts_ptr;
  params.dbeta_parts_ptr = args.dbeta_parts_ptr;
  params.parts = static_cast<int32_t>(args.parts);
  params.rows_per_part = static_cast<int32_t>(CeilDiv(args.rows, args.parts));
  params.flags |= Flag(args.dresidual_out_ptr != nullptr, kNormResidual) |
                  Flag(args.dbeta_ptr != nullptr, kNormBeta);
  // Without rows the parts are sums of nothing, written all the same.
  AITER_RETURN_IF_ERROR(LaunchNorm(*driver, plan.dx, params, stream));
  if (plan.parts.info != nullptr) {
    AITER_RETURN_IF_ERROR(LaunchNorm(*driver, plan.parts, params, stream));
  }
  return LaunchNorm(*driver, plan.dgamma, params, stream);
}

Status norm_fwd_prepare(const norm_fwd_args& args) {
  const NormFwdPlan* plan;
  return FwdPlans().FindOrMake(args, KeyOf(args), &norm_fwd_plan, &plan);
}

Status norm_bwd_prepare(const norm_bwd_args& args) {
  const NormBwdPlan* plan;
  return BwdPlans().FindOrMake(args, KeyOf(args), &norm_bwd_plan, &plan);
}

Status norm_fwd(const norm_fwd_args& args, void* stream) {
  const NormFwdPlan* plan;
  AITER_RETURN_IF_ERROR(
      FwdPlans().FindOrMake(args, KeyOf(args), &norm_fwd_plan, &plan));
  return norm_fwd(args, *plan, stream);
}

Status norm_bwd(const norm_bwd_args& args, void* stream) {
  const NormBwdPlan* plan;
  AITER_RETURN_IF_ERROR(
      BwdPlans().FindOrMake(args, KeyOf(args), &norm_bwd_plan, &plan));
  return norm_bwd(args, *plan, stream);
}

Status norm_kernels(bool backward, DataType data_type, int64_t cols,
                    const std::string& arch, std::vector<std::string>* names) {
  norm_args args;
  args.data_type = data_type;
  args.cols = cols;
  AITER_RETURN_IF_ERROR(CheckSizes(args));
  ProblemKey key = KeyOf(args);
  if (!backward) return NameSteps(key, arch, {"norm_fwd"}, names);
  const KernelInfo* dx;
  AITER_RETURN_IF_ERROR(
      SelectKernel(DeviceOfArch(arch), "norm_bwd_dx", key, &dx));
  std::vector<const char*> ops = {"norm_bwd_dx", "norm_bwd_dgamma"};
  if (dx->dims[0] == 0) ops.insert(ops.begin() + 1, "norm_bwd_parts");
  return NameSteps(key, arch, ops, names);
}

}  // namespace aiter
