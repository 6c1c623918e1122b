// SPDX-License-Identifier: Apache-2.0

#include "aiter/gmm.h"

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
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/gmm_params.h"

namespace aiter {
namespace {

// The kernels count rows of all groups, cut off at m, in 31 bits.
constexpr int64_t kMaxSize = INT32_MAX / 2;
// Offsets in a tile have 32 bits.
constexpr int64_t kMaxAlignedRow = 4194303;
constexpr int64_t kWideBytes = 16;
// No tile has more columns.
constexpr int64_t kMostColumns = 256;
// Numbers of four bits that share a scale, and that are so many bytes.
constexpr int64_t kPackedBlock = 32;

uint32_t If(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

bool IsAlignedRow(int64_t elements, DataType type) {
  return elements * ElementBytes(type) % kWideBytes == 0 &&
         elements <= kMaxAlignedRow;
}

bool IsFp8(DataType type) {
  return type == DataType::kE4m3fn || type == DataType::kE4m3fnuz;
}

bool HasFourBits(GmmScaling scaling) {
  return scaling == GmmScaling::kMx || scaling == GmmScaling::kI4;
}

bool AreAligned(int64_t n, int64_t k, DataType type, GmmScaling scaling) {
  if (HasFourBits(scaling)) {
    return n % kPackedBlock == 0 && k % kPackedBlock == 0 &&
           std::max(n, k) <= kMaxAlignedRow;
  }
  return IsAlignedRow(n, type) && IsAlignedRow(k, type);
}

// What selects a kernel: rows of a group on average; of kTN the shorter side of
// a group's matrix.
ProblemKey KeyFor(GmmLayout layout, GmmScaling scaling, DataType type,
                  int64_t m, int64_t n, int64_t k, int64_t groups) {
  ProblemKey key;
  key.data_type = type;
  key.features = If(layout == GmmLayout::kNT, kGmmNt) |
                 If(layout == GmmLayout::kTN, kGmmTn) |
                 If(scaling == GmmScaling::kRow, kGmmRow) |
                 If(scaling == GmmScaling::kBlock, kGmmBlock) |
                 If(scaling == GmmScaling::kMx, kGmmMx) |
                 If(scaling == GmmScaling::kI4, kGmmI4) |
                 If(type == DataType::kE4m3fnuz, kGmmFnuz) |
                 If(IsFp8(type), kGmmFloat8) |
                 If(!AreAligned(n, k, type, scaling), kGmmUnaligned);
  key.dims[0] = static_cast<int32_t>(layout == GmmLayout::kTN
                                         ? std::min(n, k)
                                         : CeilDiv(m, std::max(groups, 1L)));
  return key;
}

// Whether offsets in a tile do not reach from gates to ups.
bool IsFar(const gmm_args& a) {
  return a.gates == GmmGates::kHalves && (a.n + kMostColumns) * a.k > INT32_MAX;
}

bool HasLimits(const gmm_args& a) {
  return std::isfinite(a.gate_limit) || std::isfinite(a.up_limit);
}

// Whether more is to be done with a product than its own kernel does.
bool NeedsEpilogue(const gmm_args& a) {
  if (a.bias_ptr != nullptr || HasLimits(a)) return true;
  return a.gates == GmmGates::kNone ? a.activation != GmmActivation::kNone
                                    : a.gates != GmmGates::kHalves ||
                                          a.activation != GmmActivation::kSilu;
}

// Whether there is nothing to multiply, so that the result is 0.
bool IsZero(const gmm_args& a) {
  return a.m == 0 || a.n == 0 || a.k == 0 || a.groups == 0;
}

int64_t ResultBytes(const gmm_args& a) {
  return (a.layout == GmmLayout::kTN ? a.groups * a.k : a.m) * a.n *
         ElementBytes(a.out_type);
}

// Of b.
int64_t Columns(const gmm_args& a) {
  return a.gates == GmmGates::kNone ? a.n : 2 * a.n;
}

MappedTensor Mapped(const TensorMapSpec& spec, const gmm_args& a) {
  MappedTensor t;
  const bool is_b = spec.tensor == kGmmTensorB;
  const bool by_group = is_b && a.layout != GmmLayout::kTN;
  t.type = a.data_type;
  t.rank = spec.rank;
  if (spec.tensor == kGmmTensorOut) {  // Of kTN; not asked for of kFp32.
    t.address = a.out_ptr;
    t.dims[0] = a.n;
    t.dims[1] = a.k;
    t.dims[2] = a.groups;
  } else {
    t.address = is_b ? a.b_ptr : a.a_ptr;
    const int64_t columns = Columns(a);
    t.dims[0] = is_b && a.layout != GmmLayout::kNT ? columns : a.k;
    t.dims[1] = !by_group ? a.m : a.layout == GmmLayout::kNT ? columns : a.k;
    t.dims[2] = by_group ? a.groups : 1;
  }
  t.strides[0] = t.dims[0];
  t.strides[1] = t.dims[0] * t.dims[1];
  return t;
}

Status CheckTypes(const gmm_args& a) {
  const bool scaled = a.scaling != GmmScaling::kNone;
  bool known = a.data_type == DataType::kBf16 || a.data_type == DataType::kFp16;
  const char* accepted = "bf16 or fp16 without scaling";
  if (scaled) {
    known = IsFp8(a.data_type) ||
            (a.scaling == GmmScaling::kRow && a.data_type == DataType::kI8);
    accepted = "fp8, or i8 with scales of rows, with scaling";
    if (HasFourBits(a.scaling)) {
      known =
          a.data_type == DataType::kBf16 ||
          (a.scaling == GmmScaling::kMx && (a.data_type == DataType::kE4m3fn ||
                                            a.data_type == DataType::kE2m1));
      accepted = "bf16, or e4m3fn or e2m1 of kMx, with a b of four bits";
    }
    if (a.layout != GmmLayout::kNT) {
      return Invalid("layout", "another", "kNT with scaling");
    }
  }
  if (!known) return Invalid("data_type", "another", accepted);
  if (a.out_type != (scaled ? DataType::kBf16 : a.data_type) &&
      a.out_type != DataType::kFp32) {
    return Invalid("out_type", "another",
                   scaled ? "bf16 or fp32" : "data_type or fp32");
  }
  const bool a_scaled = scaled && a.data_type != DataType::kBf16;
  if ((a.a_scale_ptr != nullptr) != a_scaled) {
    return Invalid("a_scale_ptr", a_scaled ? "null" : "given",
                   a_scaled ? "given with an a that is scaled"
                            : "null with an a that is not scaled");
  }
  if ((a.b_scale_ptr != nullptr) != scaled) {
    return Invalid("b_scale_ptr", scaled ? "null" : "given",
                   scaled ? "given with scaling" : "null without scaling");
  }
  return Status();
}

Status CheckEpilogue(const gmm_args& a) {
  const bool gated = a.gates != GmmGates::kNone;
  const bool bare =
      a.scaling != GmmScaling::kNone || a.layout == GmmLayout::kTN;
  if (gated && (bare || a.out_type != a.data_type)) {
    return Invalid("gates", "set",
                   "kNone with scaling, of kTN, and of an out_type that is not"
                   " data_type");
  }
  if (a.gates == GmmGates::kHalves && a.layout != GmmLayout::kNT) {
    return Invalid("gates", "kHalves", "kNone or kPairs but of kNT");
  }
  const auto first = gated ? GmmActivation::kGelu : GmmActivation::kNone;
  const auto last = gated  ? GmmActivation::kSwiglu
                    : bare ? GmmActivation::kNone
                           : GmmActivation::kSilu;
  AITER_RETURN_IF_ERROR(
      CheckRange("activation", static_cast<int32_t>(a.activation),
                 static_cast<int32_t>(first), static_cast<int32_t>(last)));
  if (!std::isfinite(a.alpha)) {
    return Invalid("alpha", std::to_string(a.alpha), "finite");
  }
  if (!(a.gate_limit >= 0 && a.up_limit >= 0) || (!gated && HasLimits(a))) {
    return Invalid("gate_limit",
                   std::to_string(a.gate_limit) + " and up_limit " +
                       std::to_string(a.up_limit),
                   "at least 0, and infinite without gates");
  }
  if (a.bias_ptr != nullptr && (bare || a.k == 0)) {
    return Invalid("bias_ptr", "given",
                   "null with scaling, of kTN, and of k = 0");
  }
  return CheckAligned({{"bias_ptr", a.bias_ptr}});
}

const char* OpOf(uint32_t features) {
  if (features & kGmmRow) return "gmm_row";
  if (features & kGmmBlock) return "gmm_block";
  if (features & kGmmMx) return "gmm_mx";
  if (features & kGmmI4) return "gmm_i4";
  if (features & kGmmTn) return "gmm_tn";
  if (features & kGmmEpilogue) {
    return features & kGmmNt ? "gmm_nt_epilogue" : "gmm_nn_epilogue";
  }
  return features & kGmmNt ? "gmm_nt" : "gmm_nn";
}

struct Gmm {
  using Args = gmm_args;
  using Plan = GmmPlan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckRange("m", a.m, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("n", a.n, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("k", a.k, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckRange("groups", a.groups, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckTypes(a));
    AITER_RETURN_IF_ERROR(CheckEpilogue(a));
    return CheckAligned({{"a_ptr", a.a_ptr},
                         {"b_ptr", a.b_ptr},
                         {"a_scale_ptr", a.a_scale_ptr},
                         {"b_scale_ptr", a.b_scale_ptr},
                         {"sizes_ptr", a.sizes_ptr},
                         {"out_ptr", a.out_ptr},
                         {"plan_ptr", a.plan_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key =
        KeyFor(a.layout, a.scaling, a.data_type, a.m, a.n, a.k, a.groups);
    key.features |=
        If(a.out_type == DataType::kFp32, kGmmOutF32) | If(a.lead, kGmmLead) |
        If(a.gates != GmmGates::kNone, kGmmGated) |
        If(a.gates == GmmGates::kPairs, kGmmPairs) |
        If(a.bias_ptr != nullptr, kGmmBias) |
        If(NeedsEpilogue(a), kGmmEpilogue) | If(IsFar(a), kGmmUnaligned);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    AITER_RETURN_IF_ERROR(ProblemKeyOf("gmm", problem, 4, key));
    GmmLayout layout = key->features & kGmmTn   ? GmmLayout::kTN
                       : key->features & kGmmNt ? GmmLayout::kNT
                                                : GmmLayout::kNN;
    // What serves one group of a size that is not known, and odd, serves all.
    GmmScaling scaling = key->features & kGmmRow     ? GmmScaling::kRow
                         : key->features & kGmmBlock ? GmmScaling::kBlock
                         : key->features & kGmmMx    ? GmmScaling::kMx
                         : key->features & kGmmI4    ? GmmScaling::kI4
                                                     : GmmScaling::kNone;
    const uint32_t epilogue = key->features & kGmmEpilogue;
    *key = KeyFor(layout, scaling, key->data_type, key->dims[0], key->dims[1],
                  key->dims[2], key->dims[3] == INT32_MAX ? 1 : key->dims[3]);
    key->features |= epilogue;
    return Status();
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    ProblemKey any;
    AITER_RETURN_IF_ERROR(steps->Add("gmm_plan", any, &plan->plan));
    AITER_RETURN_IF_ERROR(steps->Add(OpOf(key.features), key, &plan->product));
    if (plan->product.info != nullptr) {
      plan->multiprocessors =
          Multiprocessors(steps->device(), *plan->product.info);
    }
    return Status();
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    if (IsZero(a)) {
      return FillZero(driver, a.out_ptr, ResultBytes(a), stream);
    }
    const KernelInfo& kernel = *plan.product.info;
    GmmParams p;
    p.a_ptr = a.a_ptr;
    p.b_ptr = a.b_ptr;
    p.a_scale_ptr = a.a_scale_ptr;
    p.b_scale_ptr = a.b_scale_ptr;
    p.b_packed_ptr = a.b_ptr;
    p.a_scale_e8m0_ptr = a.a_scale_ptr;
    p.b_scale_e8m0_ptr = p.b_scale_bf16_ptr = a.b_scale_ptr;
    p.bias_ptr = a.bias_ptr;
    p.sizes_ptr = a.sizes_ptr;
    p.plan_ptr = a.plan_ptr;
    p.out_ptr = a.out_ptr;
    p.out_bf16_ptr = a.out_ptr;
    p.out_f32_ptr = a.out_ptr;
    p.m = static_cast<int32_t>(a.m);
    p.n = static_cast<int32_t>(a.n);
    p.k = static_cast<int32_t>(a.k);
    p.groups = static_cast<int32_t>(a.groups);
    const bool by_group = a.layout == GmmLayout::kTN;
    p.tile_rows = by_group ? 0 : kernel.tile_m;
    p.tiles_of_rows = static_cast<int32_t>(
        by_group ? a.groups : CeilDiv(a.m, kernel.tile_m) + a.groups + 1);
    p.multiprocessors = plan.multiprocessors;
    p.activation = static_cast<int32_t>(a.activation);
    p.alpha = a.alpha;
    p.gate_limit = a.gate_limit;
    p.up_limit = a.up_limit;
    p.flags = static_cast<int32_t>(plan.key.features & kKernelFlags);
    AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.plan, &p, stream));
    TensorMap maps[kMaxTensorMaps];
    for (int i = 0; i < kernel.num_tensor_maps; ++i) {
      const TensorMapSpec& spec = kernel.tensor_maps[i];
      AITER_RETURN_IF_ERROR(
          EncodeTensorMap(driver, kernel, spec, Mapped(spec, a), &maps[i]));
    }
    return LaunchKernel(driver, plan.product, &p, stream, maps);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(gmm, Gmm);

}  // namespace aiter
