// SPDX-License-Identifier: Apache-2.0

#include "aiter/quant.h"

#include <algorithm>
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
#include "third_party/aiter/src/quant_params.h"

namespace aiter {
namespace {

// Kernels count rows, columns and tiles in 32 bits, and add a tile to one.
constexpr int64_t kMaxSize = INT32_MAX - 8192;
constexpr int64_t kColsMultiple = 16;
constexpr int64_t kColsEven = 8;
constexpr int64_t kShuffledRows = 32;
constexpr int64_t kShuffledCols = 8;

Status CheckTypes(const quant_args& a) {
  if (a.data_type > DataType::kFp32) {
    return Invalid("data_type", DataTypeName(a.data_type),
                   "fp16, bf16 or fp32");
  }
  if (a.per < QuantScale::kRow || a.per > QuantScale::kAmax) {
    return Invalid("per", std::to_string(static_cast<int32_t>(a.per)),
                   "a QuantScale");
  }
  if (a.per == QuantScale::kAmax) return Status();
  if (a.q_type < DataType::kI8) {
    return Invalid("q_type", DataTypeName(a.q_type),
                   "i8, e4m3fn, e4m3fnuz or e2m1");
  }
  bool packed = a.q_type == DataType::kE2m1;
  if (a.scale_is_e8m0 &&
      (a.per != QuantScale::kGroup || a.q_type == DataType::kI8)) {
    return Invalid("scale_is_e8m0", "true", "false but of groups of floats");
  }
  if (packed && !a.scale_is_e8m0) {
    return Invalid("scale_is_e8m0", "false", "true of e2m1");
  }
  if (packed && a.cols % 2 != 0) {
    return Invalid("cols", std::to_string(a.cols), "even of e2m1");
  }
  AITER_RETURN_IF_ERROR(
      CheckRange("rounding", static_cast<int32_t>(a.rounding), 0, 3));
  if (a.per == QuantScale::kGroup && a.group != 32 && a.group != 64 &&
      a.group != 128) {
    return Invalid("group", std::to_string(a.group), "32, 64 or 128");
  }
  return Status();
}

// Rows and columns of scales that are not padding.
int64_t ScaleRows(const quant_args& a) {
  return a.per == QuantScale::kBlock ? CeilDiv(a.rows, kQuantBlockSize)
                                     : a.rows;
}

int64_t ScaleCols(const quant_args& a) {
  switch (a.per) {
    case QuantScale::kRow:
      return 1;
    case QuantScale::kGroup:
      return CeilDiv(a.cols, a.group);
    case QuantScale::kBlock:
      return CeilDiv(a.cols, kQuantBlockSize);
    case QuantScale::kAmax:
      return CeilDiv(a.cols, kAmaxCols);
  }
  return 0;
}

Status CheckScale(const quant_args& a) {
  if (a.scale_in_ptr != nullptr) {
    if (a.per != QuantScale::kRow) {
      return Invalid("scale_in_ptr", "given", "null but of rows");
    }
    if (a.scale_ptr != nullptr) {
      return Invalid("scale_ptr", "given", "null if scale_in_ptr is given");
    }
    return Status();
  }
  if (a.scale_is_shuffled) {
    if (!a.scale_is_e8m0) {
      return Invalid("scale_is_shuffled", "true", "false but of e8m0");
    }
    if (a.scale_rows % kShuffledRows != 0) {
      return Invalid("scale_rows", std::to_string(a.scale_rows),
                     "a multiple of 32 if shuffled");
    }
    if (a.scale_cols % kShuffledCols != 0) {
      return Invalid("scale_cols", std::to_string(a.scale_cols),
                     "a multiple of 8 if shuffled");
    }
  }
  int64_t rows = ScaleRows(a);
  int64_t cols = ScaleCols(a);
  // Only shuffled scales are padded.
  bool padded = a.scale_is_shuffled;
  AITER_RETURN_IF_ERROR(
      CheckRange("scale_rows", a.scale_rows, rows, padded ? kMaxSize : rows));
  AITER_RETURN_IF_ERROR(CheckRange("scale_cols", a.scale_cols, cols,
                                   padded ? kMaxSize / 128 : cols));
  AITER_RETURN_IF_ERROR(
      CheckRange("stride_scale", a.stride_scale, 0, INT32_MAX));
  AITER_RETURN_IF_ERROR(
      CheckRange("col_stride_scale", a.col_stride_scale, 0, INT32_MAX));
  if (padded && a.scale_rows > 0) {
    AITER_RETURN_IF_ERROR(
        CheckRange("scale_cols", a.scale_cols, 0, kMaxSize / a.scale_rows));
  }
  return CheckRange("batch_stride_scale", a.batch_stride_scale, 0, INT64_MAX);
}

Status CheckQuant(const quant_args& a) {
  AITER_RETURN_IF_ERROR(CheckRange("batch", a.batch, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("rows", a.rows, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("cols", a.cols, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckTypes(a));
  AITER_RETURN_IF_ERROR(CheckScale(a));
  return CheckAligned({{"x_ptr", a.x_ptr},
                       {"smooth_scale_ptr", a.smooth_scale_ptr},
                       {"scale_in_ptr", a.scale_in_ptr},
                       {"q_ptr", a.q_ptr},
                       {"scale_ptr", a.scale_ptr}});
}

QuantParams ParamsOf(const quant_args& a, uint32_t features) {
  QuantParams p;
  p.x_ptr = a.x_ptr;
  p.smooth_scale_ptr = a.smooth_scale_ptr;
  p.scale_in_ptr = a.scale_in_ptr;
  p.q_ptr = a.q_ptr;
  p.scale_ptr = a.scale_ptr;
  p.scale_e8m0_ptr = a.scale_ptr;
  p.batch_stride_scale = a.batch_stride_scale;
  p.rows = static_cast<int32_t>(a.rows);
  p.cols = static_cast<int32_t>(a.cols);
  p.scale_rows = static_cast<int32_t>(a.scale_rows);
  p.scale_cols = static_cast<int32_t>(a.scale_cols);
  p.stride_scale_m = static_cast<int32_t>(a.stride_scale);
  p.stride_scale_n = static_cast<int32_t>(a.col_stride_scale);
  p.group = static_cast<int32_t>(a.group);
  p.mode = static_cast<int32_t>(a.rounding);
  p.kind = static_cast<int32_t>(a.q_type) - static_cast<int32_t>(DataType::kI8);
  p.flags = static_cast<int32_t>(features & kKernelFlags);
  return p;
}

// The operation of the kernels that serve a key.
const char* OpOf(const ProblemKey& key) {
  if ((key.features & (kQuantGroup | kQuantStatic)) != 0) return "quant_group";
  if ((key.features & kQuantBlock) != 0) return "quant_block";
  return (key.features & kQuantAmax) != 0 ? "quant_amax" : "quant_row";
}

// A kernel holds a row of so many columns or any; those of tiles know no rows,
// but for scales or magnitudes of rows.
ProblemKey WithoutUnused(ProblemKey key) {
  if ((key.features & (kQuantGroup | kQuantBlock)) != 0) key.dims[0] = 0;
  return key;
}

// Whether scales follow each other as their groups do, and no group ends with
// a row: all rows are one then, of which a tile of one row cuts no other.
bool IsOneRow(const quant_args& a, const KernelInfo& kernel) {
  return a.per == QuantScale::kGroup && kernel.tile_m == 1 &&
         a.cols % a.group == 0 && a.smooth_scale_ptr == nullptr &&
         !a.scale_is_shuffled && a.col_stride_scale == 1 &&
         a.stride_scale == a.scale_cols &&
         (a.batch == 1 || a.batch_stride_scale == a.rows * a.scale_cols) &&
         a.batch * a.rows <= kMaxSize / a.cols;
}

struct Quant {
  using Args = quant_args;
  using Plan = KernelPlan;

  static Status Check(const Args& a) { return CheckQuant(a); }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = static_cast<int32_t>(a.cols);
    auto flag = [&key](bool condition, uint32_t bit) {
      if (condition) key.features |= bit;
    };
    flag(a.scale_in_ptr != nullptr, kQuantStatic);
    flag(a.per == QuantScale::kGroup, kQuantGroup);
    flag(a.per == QuantScale::kBlock, kQuantBlock);
    flag(a.per == QuantScale::kAmax, kQuantAmax);
    flag(a.per == QuantScale::kGroup && a.group < kQuantBlockSize, kQuantShort);
    flag(a.per != QuantScale::kAmax && a.q_type == DataType::kE2m1, kQuantE2m1);
    flag(a.smooth_scale_ptr != nullptr, kQuantSmoothScale);
    flag(a.scale_is_e8m0, kQuantE8m0);
    flag(a.scale_is_shuffled, kQuantShuffled);
    flag(a.cols % kColsMultiple != 0, kQuantUnaligned);
    flag(a.cols % kColsEven != 0, kQuantOdd);
    return WithoutUnused(key);
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    AITER_RETURN_IF_ERROR(ProblemKeyOf("quant", problem, 1, key));
    *key = WithoutUnused(*key);
    return Status();
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    return steps->Add(OpOf(key), key, &plan->kernel);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    if (a.batch == 0 || a.rows == 0 || a.cols == 0) return Status();
    const KernelInfo& kernel = *plan.kernel.info;
    QuantParams params = ParamsOf(a, plan.key.features);
    params.max_blocks = plan.kernel.at_once;
    int64_t batch = a.batch;
    int64_t rows = a.rows;
    int64_t cols = a.cols;
    bool is_row = a.per == QuantScale::kRow && a.scale_in_ptr == nullptr;
    if (is_row || a.per == QuantScale::kAmax) {
      // Each row is by itself, whichever matrix it is of.
      rows *= batch;
      batch = 1;
      AITER_RETURN_IF_ERROR(CheckRange("batch * rows", rows, 0, kMaxSize));
      params.rows = static_cast<int32_t>(rows);
    }
    if (IsOneRow(a, kernel)) {
      cols *= rows * batch;
      params.cols = static_cast<int32_t>(cols);
      params.scale_cols = static_cast<int32_t>(cols / a.group);
      params.rows = params.scale_rows = 1;
      rows = batch = 1;
    }
    if (a.scale_is_shuffled) {
      rows = a.scale_rows;
      cols = std::max(cols, a.scale_cols * a.group);
    }
    if (!is_row) {
      int64_t tiles_m = CeilDiv(rows, kernel.tile_m);
      int64_t tiles_n = CeilDiv(cols, kernel.tile_n);
      AITER_RETURN_IF_ERROR(
          CheckRange("tiles", tiles_m * tiles_n, 0, kMaxSize / batch));
      params.batch = static_cast<int32_t>(batch);
      params.tiles_m = static_cast<int32_t>(tiles_m);
      params.tiles_n = static_cast<int32_t>(tiles_n);
    }
    return LaunchKernel(driver, plan.kernel, &params, stream);
  }
};

}  // namespace

static_assert(kKindE2m1 == static_cast<int32_t>(DataType::kE2m1) -
                               static_cast<int32_t>(DataType::kI8));

AITER_DEFINE_OPERATION(quant, Quant);

}  // namespace aiter
