// SPDX-License-Identifier: Apache-2.0

#include "aiter/mha_fp8.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/mha_fp8_params.h"

namespace aiter {
namespace {

// Kernels count rows and scales in 32 bits, and add a tile; inside a tile,
// elements.
constexpr int64_t kMaxSize = INT32_MAX - 8192;
constexpr int64_t kMaxStride = 1 << 22;
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kRun = 16;  // Elements that one load brings.
constexpr int32_t kUnbounded = 1 << 30;
constexpr int64_t kShort = 1536;  // Keys, by measurement on an H200.

Status CheckMultiple(const char* name, int64_t value, int64_t of) {
  if (value % of == 0) return Status();
  return Invalid(name, std::to_string(value),
                 "a multiple of " + std::to_string(of));
}

Status CheckSizes(const mha_fp8_fwd_args& a) {
  AITER_RETURN_IF_ERROR(CheckRange("batch", a.batch, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("seqlen_q", a.seqlen_q, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("seqlen_k", a.seqlen_k, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("nhead_k", a.nhead_k, 1, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("nhead_q", a.nhead_q, 1, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckMultiple("nhead_q", a.nhead_q, a.nhead_k));
  AITER_RETURN_IF_ERROR(CheckRange("hdim", a.hdim, 1, kMaxHeadDim));
  AITER_RETURN_IF_ERROR(CheckRange("hdim_v", a.hdim_v, 1, kMaxHeadDim));
  AITER_RETURN_IF_ERROR(CheckMultiple("hdim", a.hdim, kRun));
  AITER_RETURN_IF_ERROR(CheckMultiple("hdim_v", a.hdim_v, kRun));
  AITER_RETURN_IF_ERROR(CheckRange(
      "nhead_q * hdim", a.nhead_q * std::max(a.hdim, a.hdim_v), 1, kMaxStride));
  AITER_RETURN_IF_ERROR(
      CheckRange("batch * nhead_q", a.batch * a.nhead_q, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("blocks", a.blocks, 1, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange(
      "batch * nhead_k * blocks", a.batch * a.nhead_k * a.blocks, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckMultiple("columns", a.columns, kMhaFp8Block));
  return CheckRange("columns * hdim_v", a.columns * a.hdim_v, 0, kMaxSize);
}

bool IsPacked(const mha_fp8_fwd_args& a) {
  return a.cu_seqlens_q_ptr != nullptr;
}

// About how many keys a row sees, of packed sequences as if all were as long.
int64_t Seen(const mha_fp8_fwd_args& a) {
  const int64_t sequences = IsPacked(a) ? std::max<int64_t>(a.batch, 1) : 1;
  int64_t seen = a.seqlen_k / sequences;
  for (int64_t bound : {a.window_left, a.window_right}) {
    if (bound < 0) continue;
    seen -= std::max<int64_t>(a.seqlen_q / sequences / 2 - bound, 0);
  }
  return seen;
}

struct Forward {
  using Args = mha_fp8_fwd_args;
  using Plan = MhaFp8Plan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckSizes(a));
    if (IsPacked(a) != (a.cu_seqlens_k_ptr != nullptr)) {
      return Invalid("cu_seqlens_k_ptr", IsPacked(a) ? "null" : "given",
                     "given if cu_seqlens_q_ptr is");
    }
    int64_t keys = a.seqlen_k + (IsPacked(a) ? a.batch * kMhaFp8Block : 0);
    AITER_RETURN_IF_ERROR(CheckRange("columns", a.columns, keys, kMaxSize));
    AITER_RETURN_IF_ERROR(
        CheckRange("window_left", a.window_left, -1, INT32_MAX));
    AITER_RETURN_IF_ERROR(
        CheckRange("window_right", a.window_right, -1, INT32_MAX));
    return CheckAligned({{"q_ptr", a.q_ptr},
                         {"k_ptr", a.k_ptr},
                         {"v_ptr", a.v_ptr},
                         {"v_columns_ptr", a.v_columns_ptr},
                         {"out_ptr", a.out_ptr},
                         {"lse_ptr", a.lse_ptr},
                         {"scales_ptr", a.scales_ptr},
                         {"v_scales_ptr", a.v_scales_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    const auto bit = [](bool on, uint32_t feature) { return on ? feature : 0; };
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = static_cast<int32_t>(std::max(a.hdim, a.hdim_v));
    key.features = bit(IsPacked(a), kMhaFp8Packed) |
                   bit(a.sinks_ptr != nullptr, kMhaFp8Sink) |
                   bit(a.blocks > 1, kMhaFp8Blocks) |
                   bit(Seen(a) <= kShort, kMhaFp8Short);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("mha_fp8_fwd", problem, 1, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    plan->multiprocessors = steps->device().multiprocessors;
    AITER_RETURN_IF_ERROR(steps->Add("mha_fp8_columns", key, &plan->columns));
    return steps->Add("mha_fp8_fwd", key, &plan->attend);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    if (a.batch == 0) return Status();
    MhaFp8Params p;
    const auto number = [](int64_t n) { return static_cast<int32_t>(n); };
    const auto bound = [](int64_t n) {
      return n < 0 ? kUnbounded
                   : static_cast<int32_t>(std::min<int64_t>(n, kUnbounded));
    };
    p.q_ptr = a.q_ptr;
    p.k_ptr = a.k_ptr;
    p.v_rows_ptr = a.v_ptr;
    p.v_ptr = p.v_columns_ptr = a.v_columns_ptr;
    p.out_ptr = a.out_ptr;
    p.lse_ptr = a.lse_ptr;
    p.scales_ptr = a.scales_ptr;
    p.v_scales_ptr = a.v_scales_ptr;
    p.sinks_ptr = a.sinks_ptr;
    p.cu_seqlens_q_ptr = a.cu_seqlens_q_ptr;
    p.cu_seqlens_k_ptr = a.cu_seqlens_k_ptr;
    p.batch = number(a.batch);
    p.seqlen_q = number(a.seqlen_q);
    p.seqlen_k = number(a.seqlen_k);
    p.nhead_q = number(a.nhead_q);
    p.nhead_k = number(a.nhead_k);
    p.hdim = number(a.hdim);
    p.hdim_v = number(a.hdim_v);
    p.columns = number(a.columns);
    p.blocks = number(a.blocks);
    p.window_left = bound(a.window_left);
    p.window_right = bound(a.window_right);
    p.flags = static_cast<int32_t>(plan.key.features & kKernelFlags);
    p.multiprocessors = plan.multiprocessors;
    AITER_RETURN_IF_ERROR(LaunchKernel(driver, plan.columns, &p, stream));
    const KernelInfo& kernel = *plan.attend.info;
    TensorMap maps[kMaxTensorMaps];
    for (int i = 0; i < kernel.num_tensor_maps; ++i) {
      const TensorMapSpec& spec = kernel.tensor_maps[i];
      AITER_RETURN_IF_ERROR(EncodeTensorMap(driver, kernel, spec,
                                            Mapped(spec.tensor, a), &maps[i]));
    }
    return LaunchKernel(driver, plan.attend, &p, stream, maps, /*early=*/true);
  }

 private:
  // A tensor of views [batch (1 if packed), heads, rows, columns].
  static MappedTensor Mapped(uint8_t id, const Args& a) {
    const auto rows = [&](const void* address, int64_t seqlen, int64_t heads) {
      MappedTensor t;
      t.address = address;
      t.dims[0] = a.hdim;
      t.dims[1] = seqlen;
      t.dims[2] = heads;
      t.strides[0] = heads * a.hdim;
      t.strides[1] = a.hdim;
      t.strides[2] = seqlen * heads * a.hdim;
      return t;
    };
    MappedTensor t;
    if (id == kMhaFp8TensorQ) {
      t = rows(a.q_ptr, a.seqlen_q, a.nhead_q);
    } else if (id == kMhaFp8TensorK) {
      t = rows(a.k_ptr, a.seqlen_k, a.nhead_k);
    } else {
      t.address = a.v_columns_ptr;
      t.dims[0] = a.columns;
      t.dims[1] = a.hdim_v;
      t.dims[2] = a.nhead_k;
      t.strides[0] = a.columns;
      t.strides[1] = a.hdim_v * a.columns;
      t.strides[2] = a.nhead_k * a.hdim_v * a.columns;
    }
    t.type = a.data_type;
    t.rank = 4;
    t.dims[3] = IsPacked(a) ? 1 : a.batch;
    return t;
  }
};

}  // namespace

AITER_DEFINE_OPERATION(mha_fp8_fwd, Forward);

}  // namespace aiter
