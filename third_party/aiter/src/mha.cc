// SPDX-License-Identifier: Apache-2.0

#include "aiter/mha.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>

#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/select.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/mha_dscores_params.h"
#include "third_party/aiter/src/mha_launch.h"
#include "third_party/aiter/src/mha_one_pass_params.h"
#include "third_party/aiter/src/mha_params.h"

namespace aiter {
namespace {

// Kernels count positions in 32 bits and add two lengths or a window to one.
constexpr int64_t kMaxSeqlen = (int64_t{1} << 30) - 1024;
constexpr int32_t kUnbounded = 1 << 30;
// Offsets inside a tile of up to 512 rows fit 32 bits below this stride.
constexpr int64_t kMaxRowStride = (int64_t{1} << 22) - 1;
constexpr int64_t kMaxInt32 = INT32_MAX;
constexpr int64_t kMaxHdim = 256;
constexpr int64_t kStrideMultiple = 8;
constexpr uintptr_t kAlignment = 16;
// The kernels made for a soft cap err by 3e-7 of it: here by 3e-4 in a score.
constexpr float kLargeSoftCap = 1024;

Status CheckHdim(const char* name, int64_t value) {
  if (value >= 8 && value <= kMaxHdim && value % 8 == 0) return Status();
  return Invalid(name, std::to_string(value), "a multiple of 8 from 8 to 256");
}

// A tensor of the input type and its strides.
struct Tensor {
  const char* name;
  const void* ptr;
  int64_t stride, nhead_stride, batch_stride;
};

Status CheckStride(const Tensor& t, const char* which, int64_t value,
                   int64_t high) {
  if (value >= 0 && value <= high && value % kStrideMultiple == 0) {
    return Status();
  }
  return Invalid(std::string(which) + t.name, std::to_string(value),
                 "a multiple of 8 from 0 to " + std::to_string(high));
}

Status CheckTensors(std::initializer_list<Tensor> tensors) {
  for (const Tensor& t : tensors) {
    AITER_RETURN_IF_ERROR(CheckStride(t, "stride_", t.stride, kMaxRowStride));
    AITER_RETURN_IF_ERROR(
        CheckStride(t, "nhead_stride_", t.nhead_stride, kMaxInt32));
    AITER_RETURN_IF_ERROR(
        CheckStride(t, "batch_stride_", t.batch_stride, INT64_MAX));
    if (reinterpret_cast<uintptr_t>(t.ptr) % kAlignment != 0) {
      return Invalid(std::string(t.name) + "_ptr", "not aligned",
                     "a multiple of 16 bytes");
    }
  }
  return Status();
}

Status CheckCommon(const mha_args& a) {
  AITER_RETURN_IF_ERROR(CheckHdim("hdim_q", a.hdim_q));
  AITER_RETURN_IF_ERROR(CheckHdim("hdim_v", a.hdim_v));
  AITER_RETURN_IF_ERROR(CheckRange("nhead_q", a.nhead_q, 1, kMaxInt32));
  AITER_RETURN_IF_ERROR(CheckRange("nhead_k", a.nhead_k, 1, kMaxInt32));
  if (a.nhead_q % a.nhead_k != 0) {
    return Invalid(
        "nhead_q", std::to_string(a.nhead_q),
        "a multiple of nhead_k, which is " + std::to_string(a.nhead_k));
  }
  AITER_RETURN_IF_ERROR(CheckRange("seqlen_q", a.seqlen_q, 0, kMaxSeqlen));
  AITER_RETURN_IF_ERROR(CheckRange("seqlen_k", a.seqlen_k, 0, kMaxSeqlen));
  // Six words of dropout state a batch and head are indexed in 32 bits.
  AITER_RETURN_IF_ERROR(
      CheckRange("batch", a.batch, 0, kMaxInt32 / 6 / a.nhead_q));
  if (!std::isfinite(a.scale_s)) {
    return Invalid("scale_s", std::to_string(a.scale_s), "finite");
  }
  if (!(a.logits_soft_cap >= 0) || !std::isfinite(a.logits_soft_cap)) {
    return Invalid("logits_soft_cap", std::to_string(a.logits_soft_cap),
                   "0 (off) or positive and finite");
  }
  if (!(a.p_drop >= 0 && a.p_drop < 1)) {
    return Invalid("p_drop", std::to_string(a.p_drop), "in [0, 1)");
  }
  if (a.p_drop > 0 && a.dropout_state_ptr == nullptr && a.batch > 0) {
    return Invalid("dropout_state_ptr", "null", "given with p_drop > 0");
  }
  AITER_RETURN_IF_ERROR(
      CheckRange("window_size_left", a.window_size_left, -1, INT64_MAX));
  AITER_RETURN_IF_ERROR(
      CheckRange("window_size_right", a.window_size_right, -1, INT64_MAX));
  AITER_RETURN_IF_ERROR(CheckRange("sink_size", a.sink_size, 0, INT64_MAX));
  AITER_RETURN_IF_ERROR(
      CheckRange("min_seqlen_q", a.min_seqlen_q, 0, kMaxSeqlen));
  if (a.is_group_mode) {
    if (a.seqstart_q_ptr == nullptr || a.seqstart_k_ptr == nullptr) {
      return Invalid("seqstart_q_ptr or seqstart_k_ptr", "null",
                     "given in group mode");
    }
    if (a.bias_ptr != nullptr) {
      return Invalid("bias_ptr", "given", "null in group mode");
    }
    if (a.mask_ptr != nullptr) {
      return Invalid("mask_ptr", "given", "null in group mode");
    }
  } else if (a.seqstart_q_ptr != nullptr || a.seqstart_k_ptr != nullptr) {
    return Invalid("seqstart_q_ptr or seqstart_k_ptr", "given",
                   "null in batch mode");
  }
  if (a.bias_ptr != nullptr) {
    if (a.bias_batch != 1 && a.bias_batch != a.batch) {
      return Invalid("bias_batch", std::to_string(a.bias_batch),
                     "1 or batch, which is " + std::to_string(a.batch));
    }
    if (a.bias_nhead != 1 && a.bias_nhead != a.nhead_q) {
      return Invalid("bias_nhead", std::to_string(a.bias_nhead),
                     "1 or nhead_q, which is " + std::to_string(a.nhead_q));
    }
    AITER_RETURN_IF_ERROR(
        CheckRange("stride_bias", a.stride_bias, 0, kMaxRowStride));
    AITER_RETURN_IF_ERROR(
        CheckRange("key_stride_bias", a.key_stride_bias, 0, 1));
  }
  if (a.mask_ptr != nullptr) {
    AITER_RETURN_IF_ERROR(
        CheckRange("stride_mask", a.stride_mask, 0, kMaxRowStride));
    AITER_RETURN_IF_ERROR(
        CheckRange("key_stride_mask", a.key_stride_mask, 0, 1));
  }
  if (a.is_one_row &&
      (a.bias_ptr == nullptr || !a.bias_is_f32 || a.mask_ptr == nullptr ||
       a.stride_bias != 0 || a.stride_mask != 0)) {
    return Invalid("is_one_row", "true",
                   "false but with a float32 bias and a mask of one row each");
  }
  return Status();
}

// Strides of the batches are not used when packed: they need not be valid.
int64_t BatchStride(const mha_args& a, int64_t stride) {
  return a.is_group_mode ? 0 : stride;
}

// What dropout keeps, where it is kept: scores have nothing else.
Status CheckKept(const mha_args& a, const void* kept_ptr) {
  if (kept_ptr == nullptr) return Status();
  if (a.p_drop == 0 || a.is_group_mode || a.bias_ptr != nullptr ||
      a.mask_ptr != nullptr || a.alibi_slopes_ptr != nullptr ||
      a.logits_soft_cap > 0 || a.sink_size > 0 || a.scale_s <= 0) {
    return Invalid("kept_ptr", "given",
                   "null but in batch mode, with dropout and nothing else that "
                   "changes scores");
  }
  // Heads lie fewer than 2^31 words apart.
  return CheckRange("seqlen_k of kept_ptr", a.seqlen_k, 1,
                    (int64_t{1} << 37) / (a.seqlen_q + 128));
}

Status CheckFwd(const mha_fwd_args& a) {
  AITER_RETURN_IF_ERROR(CheckCommon(a));
  AITER_RETURN_IF_ERROR(CheckKept(a, a.kept_ptr));
  return CheckTensors({
      {"q", a.q_ptr, a.stride_q, a.nhead_stride_q,
       BatchStride(a, a.batch_stride_q)},
      {"k", a.k_ptr, a.stride_k, a.nhead_stride_k,
       BatchStride(a, a.batch_stride_k)},
      {"v", a.v_ptr, a.stride_v, a.nhead_stride_v,
       BatchStride(a, a.batch_stride_v)},
      {"o", a.o_ptr, a.stride_o, a.nhead_stride_o,
       BatchStride(a, a.batch_stride_o)},
  });
}

Status CheckBwd(const mha_bwd_args& a) {
  AITER_RETURN_IF_ERROR(CheckCommon(a));
  if (a.dbias_ptr != nullptr && a.bias_ptr == nullptr) {
    return Invalid("dbias_ptr", "given", "null without a bias");
  }
  if (a.d_sink_ptr != nullptr && a.sink_ptr == nullptr) {
    return Invalid("d_sink_ptr", "given", "null without a sink");
  }
  if (a.alibi_slopes_ptr == nullptr && a.d_slopes_ptr != nullptr) {
    return Invalid("d_slopes_ptr", "given", "null without alibi_slopes_ptr");
  }
  return CheckTensors({
      {"q", a.q_ptr, a.stride_q, a.nhead_stride_q,
       BatchStride(a, a.batch_stride_q)},
      {"k", a.k_ptr, a.stride_k, a.nhead_stride_k,
       BatchStride(a, a.batch_stride_k)},
      {"v", a.v_ptr, a.stride_v, a.nhead_stride_v,
       BatchStride(a, a.batch_stride_v)},
      {"o", a.o_ptr, a.stride_o, a.nhead_stride_o,
       BatchStride(a, a.batch_stride_o)},
      {"do", a.do_ptr, a.stride_do, a.nhead_stride_do,
       BatchStride(a, a.batch_stride_do)},
      {"dq", a.dq_ptr, a.stride_dq, a.nhead_stride_dq,
       BatchStride(a, a.batch_stride_dq)},
      {"dk", a.dk_ptr, a.stride_dk, a.nhead_stride_dk,
       BatchStride(a, a.batch_stride_dk)},
      {"dv", a.dv_ptr, a.stride_dv, a.nhead_stride_dv,
       BatchStride(a, a.batch_stride_dv)},
  });
}

// Whether kernels may not read neighbours of a bias or mask at once: one column
// is for all keys, or rows do not begin or end at multiples of 8 elements.
bool Unaligned(const void* ptr, int64_t seqlen_k, int64_t key_stride,
               int64_t stride, int64_t nhead_stride, int64_t batch_stride) {
  return ptr != nullptr &&
         (key_stride == 0 ||
          (seqlen_k | stride | nhead_stride | batch_stride) % kStrideMultiple !=
              0 ||
          reinterpret_cast<uintptr_t>(ptr) % kAlignment != 0);
}

// Rows of a sequence. Of a packed batch only the mean is known.
int64_t MeanRows(const mha_args& a) {
  return a.is_group_mode && a.batch > 0 ? a.seqlen_q / a.batch : a.seqlen_q;
}

bool HasWindow(const mha_args& a) {
  return a.window_size_left >= 0 || a.window_size_right >= 0;
}

// Whether a row sees so few keys that blocks of few rows serve it better.
bool Near(const mha_args& a) {
  return a.window_size_left >= 0 && a.window_size_right >= 0 &&
         a.window_size_left <= 1024 - a.window_size_right;
}

// Whether a head's columns are an odd multiple of 8, 16 bytes. Its rows do not
// begin and end where what the L2 reads at once does, 32 bytes, so to copy keys
// takes longer.
bool OddColumns(const mha_args& a) {
  return a.hdim_q % (2 * kStrideMultiple) == kStrideMultiple;
}

// Up to how many rows something serves sequences better, by measurement on
// Hopper: under a window, of which a causal mask is one, and without.
struct MostRows {
  int64_t hdim, windowed, whole;
};

// Whether sequences are longer than the first entry says that is wide enough.
bool Longer(const mha_args& a, const MostRows* most) {
  while (most->hdim < a.hdim_q) ++most;
  return MeanRows(a) > (HasWindow(a) ? most->windowed : most->whole);
}

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// Whether sequences are so short, or what a row sees of them, that blocks of
// few rows serve them better. Keys are copied again for each block, which takes
// longer of wide heads and of odd ones.
bool Short(const mha_args& a) {
  constexpr MostRows kEven[] = {{96, 1536, 1024}, {kAny, 1536, 512}};
  constexpr MostRows kOdd[] = {
      {80, 1536, 512}, {96, 832, 512}, {128, 640, 256}, {kAny, 1024, 512}};
  return Near(a) || !Longer(a, OddColumns(a) ? kOdd : kEven);
}

// Whether a head's columns are odd and few, and sequences so long, that blocks
// of 128 rows serve them better.
bool Odd(const mha_args& a) {
  constexpr MostRows kMost[] = {
      {64, 576, 192}, {80, 832, 192}, {96, 832, 512}, {kAny, kAny, kAny}};
  return OddColumns(a) && !Near(a) && Longer(a, kMost);
}

// Whether blocks that walk over the tiles, one a multiprocessor, would end far
// from each other, so that others serve sequences better: short ones, of few
// tiles or under a mask, and where not all pairs of tiles see as much as each
// other. Nor do they know of a window's left edge.
bool Uneven(const mha_args& a) {
  constexpr int64_t kBlocks = 132;  // Of an H100 or H200.
  constexpr int64_t kRows = 128;
  const auto wastes = [](int64_t items) {
    return items * 10 < CeilDiv(items, kBlocks) * kBlocks * 9;
  };
  constexpr MostRows kMost[] = {{80, 1280, 0}, {kAny, 896, 0}};
  const int64_t tiles = CeilDiv(a.seqlen_q, kRows);
  const int64_t heads = a.nhead_q * a.batch;
  if (!HasWindow(a)) return Short(a) && wastes(tiles * heads);
  const int64_t pairs = CeilDiv(tiles, 2) * heads;
  return a.window_size_left >= 0 || a.seqlen_q > a.seqlen_k ||
         !Longer(a, kMost) || (pairs > kBlocks && wastes(pairs));
}

uint32_t Flag(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

ProblemKey MakeKey(const mha_args& a) {
  ProblemKey key;
  key.data_type = a.data_type;
  key.dims[0] = static_cast<int32_t>(a.hdim_q);
  key.dims[1] = static_cast<int32_t>(a.hdim_v);
  bool bias = a.bias_ptr != nullptr;
  bool logical_q = a.cu_seqlen_q_ptr != nullptr;
  bool logical_k = a.cu_seqlen_k_ptr != nullptr;
  key.features =
      Flag(bias, kMhaBias) | Flag(bias && a.bias_is_f32, kMhaBiasF32) |
      Flag(Unaligned(a.bias_ptr, a.seqlen_k, a.key_stride_bias, a.stride_bias,
                     a.nhead_stride_bias, a.batch_stride_bias) ||
               Unaligned(a.mask_ptr, a.seqlen_k, a.key_stride_mask,
                         a.stride_mask, a.nhead_stride_mask,
                         a.batch_stride_mask),
           kMhaUnaligned) |
      Flag(a.mask_ptr != nullptr, kMhaMask) | Flag(a.is_one_row, kMhaOneRow) |
      Flag(a.alibi_slopes_ptr != nullptr, kMhaAlibi) |
      Flag(a.sink_ptr != nullptr, kMhaSink) | Flag(a.p_drop > 0, kMhaDropout) |
      Flag(a.is_group_mode, kMhaPacked) |
      Flag(a.is_group_mode || logical_q, kMhaCuSeqlensQ) |
      Flag(a.is_group_mode || logical_k, kMhaCuSeqlensK) |
      Flag(a.is_group_mode && logical_q, kMhaCuSeqlensQPadded) |
      Flag(a.is_group_mode && logical_k, kMhaCuSeqlensKPadded) |
      Flag(a.is_top_left, kMhaTopLeft) |
      Flag(a.is_exact && a.data_type == DataType::kFp32, kMhaF32Exact) |
      Flag(a.logits_soft_cap > 0, kMhaSoftCap) |
      Flag(a.logits_soft_cap > kLargeSoftCap, kMhaLargeSoftCap) |
      // Without a left bound every key to the left is visible anyway.
      Flag(a.sink_size > 0 && a.window_size_left >= 0, kMhaSinkTokens) |
      Flag(HasWindow(a), kMhaWindow) | Flag(Short(a), kMhaShort) |
      Flag(Odd(a), kMhaOdd) | Flag(Uneven(a), kMhaUneven) |
      Flag(a.min_seqlen_q > 0, kMhaMinSeqlen) |
      Flag(a.seqlen_k == 0, kMhaNoKeys) |
      Flag(!(a.scale_s > 0), kMhaNonPositiveScale);
  return key;
}

ProblemKey MakeKey(const mha_bwd_args& a) {
  ProblemKey key = MakeKey(static_cast<const mha_args&>(a));
  key.features |= Flag(a.dlse_ptr != nullptr, kMhaDlse) |
                  Flag(a.dbias_ptr != nullptr, kMhaDbias) |
                  Flag(a.d_sink_ptr != nullptr, kMhaDsink);
  return key;
}

// A side of the window as kernels take it.
int32_t Window(int64_t size) {
  return size < 0 || size > kUnbounded ? kUnbounded
                                       : static_cast<int32_t>(size);
}

// All sizes were checked to fit.
MhaParams ParamsOf(const mha_args& a, const ProblemKey& key) {
  MhaParams p;
  p.q_ptr = a.q_ptr;
  p.k_ptr = a.k_ptr;
  p.v_ptr = a.v_ptr;
  p.bias_ptr = a.bias_ptr;
  p.bias_f32_ptr = a.bias_ptr;
  p.mask_ptr = a.mask_ptr;
  p.alibi_slopes_ptr = a.alibi_slopes_ptr;
  p.sink_ptr = a.sink_ptr;
  p.dropout_state_ptr = a.dropout_state_ptr;
  // The kernels' cu_seqlens are lengths, and starts too if there are no others.
  p.cu_seqlens_q_ptr =
      a.cu_seqlen_q_ptr != nullptr ? a.cu_seqlen_q_ptr : a.seqstart_q_ptr;
  p.cu_seqlens_k_ptr =
      a.cu_seqlen_k_ptr != nullptr ? a.cu_seqlen_k_ptr : a.seqstart_k_ptr;
  p.cu_seqlens_q_padded_ptr = a.seqstart_q_ptr;
  p.cu_seqlens_k_padded_ptr = a.seqstart_k_ptr;

  p.stride_q = static_cast<int32_t>(a.stride_q);
  p.stride_k = static_cast<int32_t>(a.stride_k);
  p.stride_v = static_cast<int32_t>(a.stride_v);
  p.stride_o = static_cast<int32_t>(a.stride_o);
  p.stride_bias = static_cast<int32_t>(a.stride_bias);
  p.stride_mask = static_cast<int32_t>(a.stride_mask);
  p.key_stride_bias = static_cast<int32_t>(a.key_stride_bias);
  p.key_stride_mask = static_cast<int32_t>(a.key_stride_mask);
  p.nhead_stride_q = static_cast<int32_t>(a.nhead_stride_q);
  p.nhead_stride_k = static_cast<int32_t>(a.nhead_stride_k);
  p.nhead_stride_v = static_cast<int32_t>(a.nhead_stride_v);
  p.nhead_stride_o = static_cast<int32_t>(a.nhead_stride_o);
  p.nhead_stride_lse = a.nhead_stride_lse;
  p.nhead_stride_bias = a.nhead_stride_bias;
  p.nhead_stride_mask = a.nhead_stride_mask;
  p.batch_stride_q = BatchStride(a, a.batch_stride_q);
  p.batch_stride_k = BatchStride(a, a.batch_stride_k);
  p.batch_stride_v = BatchStride(a, a.batch_stride_v);
  p.batch_stride_o = BatchStride(a, a.batch_stride_o);
  p.batch_stride_lse = BatchStride(a, a.batch_stride_lse);
  p.batch_stride_bias = a.batch_stride_bias;
  p.batch_stride_mask = a.batch_stride_mask;

  p.batch = static_cast<int32_t>(a.batch);
  p.seqlen_q = static_cast<int32_t>(a.seqlen_q);
  p.seqlen_k = static_cast<int32_t>(a.seqlen_k);
  p.nhead_q = static_cast<int32_t>(a.nhead_q);
  p.nhead_k = static_cast<int32_t>(a.nhead_k);
  p.hdim_q = static_cast<int32_t>(a.hdim_q);
  p.hdim_v = static_cast<int32_t>(a.hdim_v);
  p.bias_batch = static_cast<int32_t>(a.bias_batch);
  p.bias_nhead = static_cast<int32_t>(a.bias_nhead);

  p.softmax_scale = a.scale_s;
  p.logits_soft_cap = a.logits_soft_cap;
  double probability = a.p_drop;
  // Of 16 bits, as core/philox.py has it.
  const double cut = std::min(std::floor(probability * 65536.0 + 0.5), 65535.0);
  p.drop_threshold = static_cast<int32_t>(static_cast<uint32_t>(cut) << 16);
  p.rp_keep = static_cast<float>(1.0 / (1.0 - probability));
  p.window_left = Window(a.window_size_left);
  p.window_right = Window(a.window_size_right);
  p.sink_tokens =
      (key.features & kMhaSinkTokens) == 0
          ? 0
          : static_cast<int32_t>(a.sink_size < a.seqlen_k ? a.sink_size
                                                          : a.seqlen_k);
  p.min_seqlen_q = static_cast<int32_t>(a.min_seqlen_q);
  p.flags = static_cast<int32_t>(key.features & kKernelFlags);
  return p;
}

MhaParams ParamsOf(const mha_bwd_args& a, const ProblemKey& key) {
  MhaParams p = ParamsOf(static_cast<const mha_args&>(a), key);
  p.do_ptr = a.do_ptr;
  p.out_ptr = a.o_ptr;
  p.lse_ptr = a.lse_ptr;
  p.dlse_ptr = a.dlse_ptr;
  p.delta_ptr = a.d_ptr;
  p.dq_ptr = a.dq_ptr;
  p.dk_ptr = a.dk_ptr;
  p.dv_ptr = a.dv_ptr;
  p.dbias_ptr = a.dbias_ptr;
  p.d_sink_ptr = a.d_sink_ptr;
  p.d_slopes_ptr = a.d_slopes_ptr;
  p.stride_do = static_cast<int32_t>(a.stride_do);
  p.stride_dq = static_cast<int32_t>(a.stride_dq);
  p.stride_dk = static_cast<int32_t>(a.stride_dk);
  p.stride_dv = static_cast<int32_t>(a.stride_dv);
  p.nhead_stride_do = static_cast<int32_t>(a.nhead_stride_do);
  p.nhead_stride_dq = static_cast<int32_t>(a.nhead_stride_dq);
  p.nhead_stride_dk = static_cast<int32_t>(a.nhead_stride_dk);
  p.nhead_stride_dv = static_cast<int32_t>(a.nhead_stride_dv);
  p.batch_stride_do = BatchStride(a, a.batch_stride_do);
  p.batch_stride_dq = BatchStride(a, a.batch_stride_dq);
  p.batch_stride_dk = BatchStride(a, a.batch_stride_dk);
  p.batch_stride_dv = BatchStride(a, a.batch_stride_dv);
  // dbias is contiguous; a size of 1 makes its stride irrelevant.
  p.stride_dbias = static_cast<int32_t>(a.seqlen_k);
  p.nhead_stride_dbias = a.seqlen_q * a.seqlen_k;
  p.batch_stride_dbias = a.bias_nhead * p.nhead_stride_dbias;
  return p;
}

// Words between tiles of rows of what dropout keeps.
int32_t KeptStride(const mha_args& a) {
  return static_cast<int32_t>((a.seqlen_k + 127) / 128 * 256);
}

// Bytes of rows that lie `stride` elements apart.
int64_t PackedBytes(const mha_args& a, int64_t rows, int64_t stride) {
  return rows * stride * ElementBytes(a.data_type);
}

// Kernels of float32 tensors are a family of their own.
const char* OpOf(DataType type, const char* op, const char* f32_op) {
  return type == DataType::kFp32 ? f32_op : op;
}

Status MakeKey(const char* op, const char* f32_op, const Problem& problem,
               ProblemKey* key) {
  bool f32 = problem.data_type == DataTypeName(DataType::kFp32);
  AITER_RETURN_IF_ERROR(ProblemKeyOf(f32 ? f32_op : op, problem, 2, key));
  // A packed batch has its sequences' starts.
  if ((key->features & kMhaPacked) != 0) key->features |= kMhaCuSeqlens;
  return Status();
}

// Finds what of a packed batch makes rows zero that no sequence has.
Status ChooseGaps(const ProblemKey& key, Steps* steps, LoadedKernel* gaps) {
  if ((key.features & kMhaPacked) == 0) return Status();
  ProblemKey any;
  any.data_type = key.data_type;
  return steps->Add("mha_gaps", any, gaps);
}

// Makes rows `stride` elements apart zero where no sequence has them; `p` says
// which these are, and where heads' lse is, if any are to be -inf there.
Status ClearGaps(const Driver& driver, const LoadedKernel& gaps, MhaParams p,
                 const mha_args& a, const void* rows, int64_t stride,
                 void* stream) {
  p.words_ptr = rows;
  p.row_words = static_cast<int32_t>(PackedBytes(a, 1, stride) / 4);
  return LaunchMha(driver, gaps, p, stream);
}

// Likewise for gradients, which have no lse.
Status ClearQueries(const Driver& driver, const LoadedKernel& gaps, MhaParams p,
                    const mha_bwd_args& a, void* stream) {
  p.nhead_q = 0;
  return ClearGaps(driver, gaps, p, a, a.dq_ptr, a.stride_dq, stream);
}

// Puts the keys' rows and lengths in the place of the queries'.
void TakeKeysForQueries(MhaParams* p) {
  p->seqlen_q = p->seqlen_k;
  p->nhead_q = p->nhead_k;
  p->cu_seqlens_q_ptr = p->cu_seqlens_k_ptr;
  p->cu_seqlens_q_padded_ptr = p->cu_seqlens_k_padded_ptr;
  p->flags = static_cast<int32_t>(
      (p->flags & ~(kMhaCuSeqlensQ | kMhaCuSeqlensQPadded)) |
      Flag(p->flags & kMhaCuSeqlensK, kMhaCuSeqlensQ) |
      Flag(p->flags & kMhaCuSeqlensKPadded, kMhaCuSeqlensQPadded));
  p->min_seqlen_q = 0;
}

Status ClearKeys(const Driver& driver, const LoadedKernel& gaps, MhaParams p,
                 const mha_bwd_args& a, void* stream) {
  if (a.seqlen_k == 0) return Status();
  TakeKeysForQueries(&p);
  p.nhead_q = 0;
  AITER_RETURN_IF_ERROR(
      ClearGaps(driver, gaps, p, a, a.dk_ptr, a.stride_dk, stream));
  return ClearGaps(driver, gaps, p, a, a.dv_ptr, a.stride_dv, stream);
}

struct Fwd {
  using Args = mha_fwd_args;
  using Plan = MhaFwdPlan;

  static Status Check(const Args& a) { return CheckFwd(a); }

  static ProblemKey KeyOf(const Args& a) { return MakeKey(a); }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return MakeKey("mha_fwd", "mha_f32_fwd", problem, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    plan->multiprocessors = steps->device().multiprocessors;
    AITER_RETURN_IF_ERROR(steps->Add(
        OpOf(key.data_type, "mha_fwd", "mha_f32_fwd"), key, &plan->kernel));
    return ChooseGaps(key, steps, &plan->gaps);
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    MhaParams params = ParamsOf(args, plan.key);
    params.out_ptr = args.o_ptr;
    params.lse_ptr = args.lse_ptr;
    params.multiprocessors = plan.multiprocessors;
    if (args.kept_ptr != nullptr) {
      // Of the kernels for dropout those for Hopper write what it keeps; they
      // alone read tensors by maps.
      if (plan.kernel.info->num_tensor_maps == 0) {
        return Status(StatusCode::kUnimplemented,
                      std::string("kernel ") + plan.kernel.info->symbol +
                          " does not write what dropout keeps");
      }
      const int64_t bytes = mha_kept_words(args) * 4;
      params.mask_ptr = args.kept_ptr;
      params.stride_mask = KeptStride(args);
      params.nhead_stride_mask = bytes;
      params.batch_stride_mask = args.nhead_q * bytes;
    }
    const int64_t packed_rows = args.is_group_mode ? args.seqlen_q : 0;
    if (args.batch == 0 || args.seqlen_q == 0) {
      // Of a packed batch without a sequence there may be rows.
      AITER_RETURN_IF_ERROR(
          FillZero(driver, args.o_ptr,
                   PackedBytes(args, packed_rows, args.stride_o), stream));
      return FillMinusInfinity(driver, args.lse_ptr, args.nhead_q * packed_rows,
                               stream);
    }
    if (args.is_group_mode) {
      AITER_RETURN_IF_ERROR(ClearGaps(driver, plan.gaps, params, args,
                                      args.o_ptr, args.stride_o, stream));
    }
    return LaunchMha(driver, plan.kernel, params, stream);
  }
};

struct Bwd {
  using Args = mha_bwd_args;
  using Plan = MhaBwdPlan;

  static Status Check(const Args& a) { return CheckBwd(a); }

  static ProblemKey KeyOf(const Args& a) { return MakeKey(a); }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return MakeKey("mha_bwd", "mha_f32_bwd", problem, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    const auto add = [&](const char* op, const char* f32_op,
                         LoadedKernel* slot) {
      return steps->Add(OpOf(key.data_type, op, f32_op), key, slot);
    };
    AITER_RETURN_IF_ERROR(
        add("mha_bwd_delta", "mha_f32_bwd_delta", &plan->delta));
    AITER_RETURN_IF_ERROR(add("mha_bwd_dkdv", "mha_f32_bwd_dkdv", &plan->dkdv));
    if ((key.features & kMhaDbias) != 0) {
      AITER_RETURN_IF_ERROR(steps->Add("mha_bwd_dbias", key, &plan->dbias));
    }
    if ((key.features & kMhaDsink) != 0) {
      AITER_RETURN_IF_ERROR(steps->Add("mha_bwd_dsink", key, &plan->dsink));
    }
    AITER_RETURN_IF_ERROR(add("mha_bwd_dq", "mha_f32_bwd_dq", &plan->dq));
    return ChooseGaps(key, steps, &plan->gaps);
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    MhaParams params = ParamsOf(args, plan.key);
    const int64_t rows = (args.is_group_mode ? 1 : args.batch) * args.seqlen_q;
    constexpr int64_t kFloatBytes = 4;
    const auto zero_floats = [&](const void* address, int64_t count) {
      return address == nullptr
                 ? Status()
                 : FillZero(driver, address, count * kFloatBytes, stream);
    };
    const bool empty = args.batch == 0 || args.seqlen_q == 0;
    if (args.is_group_mode || empty) {
      AITER_RETURN_IF_ERROR(
          zero_floats(args.d_slopes_ptr, rows * args.nhead_q));
    }
    if (empty) {
      const int64_t rows_k =
          (args.is_group_mode ? 1 : args.batch) * args.seqlen_k;
      const auto zero = [&](const void* address, int64_t n, int64_t stride) {
        return FillZero(driver, address, PackedBytes(args, n, stride), stream);
      };
      AITER_RETURN_IF_ERROR(zero(args.dq_ptr, rows, args.stride_dq));
      AITER_RETURN_IF_ERROR(zero(args.dk_ptr, rows_k, args.stride_dk));
      AITER_RETURN_IF_ERROR(zero(args.dv_ptr, rows_k, args.stride_dv));
      AITER_RETURN_IF_ERROR(zero_floats(
          args.dbias_ptr,
          args.bias_batch * args.bias_nhead * args.seqlen_q * args.seqlen_k));
      return zero_floats(args.d_sink_ptr, args.batch * args.nhead_q);
    }
    if (args.is_group_mode) {
      AITER_RETURN_IF_ERROR(
          ClearQueries(driver, plan.gaps, params, args, stream));
      AITER_RETURN_IF_ERROR(ClearKeys(driver, plan.gaps, params, args, stream));
    }
    AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.delta, params, stream));
    if (args.seqlen_k > 0) {
      AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.dkdv, params, stream));
      if (args.dbias_ptr != nullptr) {
        AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.dbias, params, stream));
      }
    }
    if (args.d_sink_ptr != nullptr) {
      AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.dsink, params, stream));
    }
    // With slopes the kernel writes their gradient, wanted or not. It is the
    // last to read delta, each block its own rows before it writes them.
    if (args.d_slopes_ptr == nullptr) params.d_slopes_ptr = args.d_ptr;
    return LaunchMha(driver, plan.dq, params, stream);
  }
};

struct OnePass {
  using Args = mha_one_pass_args;
  using Plan = MhaOnePassPlan;

  // Whether what dropout keeps is given: in a key, after the head dimensions.
  static constexpr int kKeptDim = 2;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckBwd(a));
    AITER_RETURN_IF_ERROR(CheckKept(a, a.kept_ptr));
    if (a.dq_sums_ptr == nullptr) {
      return Invalid("dq_sums_ptr", "null", "given");
    }
    if ((a.dk_sums_ptr == nullptr) != (a.dv_sums_ptr == nullptr)) {
      return Invalid("dk_sums_ptr or dv_sums_ptr", "null",
                     "given with the other one");
    }
    if (a.ordered && a.turns_ptr == nullptr) {
      return Invalid("turns_ptr", "null", "given with an order");
    }
    if (a.batch == 0 || a.seqlen_q == 0 || a.seqlen_k == 0) {
      return Invalid("a size", "0", "above 0");
    }
    return Status();
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key = MakeKey(a);
    key.dims[kKeptDim] = a.kept_ptr != nullptr;
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return MakeKey("mha_bwd", "mha_bwd", problem, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    constexpr int64_t kServed =
        kMhaWindow | kMhaTopLeft | kMhaDlse | kMhaShort | kMhaOdd | kMhaUneven |
        kMhaMinSeqlen | kMhaPacked | kMhaCuSeqlens | kMhaCuSeqlensQPadded |
        kMhaCuSeqlensKPadded | kMhaDropout | kMhaNonPositiveScale;
    if ((key.features & ~kServed) != 0 || key.dims[0] != key.dims[1]) {
      return Status(StatusCode::kUnimplemented,
                    "one pass over the scores serves windows and dropout "
                    "alone, and equal head dimensions");
    }
    ProblemKey plain;
    plain.data_type = key.data_type;
    plain.dims[0] = key.dims[0];
    ProblemKey of_delta = key;
    of_delta.dims[kKeptDim] = 0;
    AITER_RETURN_IF_ERROR(steps->Add("mha_bwd_delta", of_delta, &plan->delta));
    ProblemKey scores = plain;
    scores.features = (key.features & kMhaDropout) |
                      Flag(key.dims[kKeptDim] != 0, kMhaOnePassKept) |
                      Flag((key.features & (kMhaPacked | kMhaCuSeqlens)) != 0,
                           kMhaOnePassLengths);
    AITER_RETURN_IF_ERROR(steps->Add("mha_one_pass_bwd", scores, &plan->bwd));
    AITER_RETURN_IF_ERROR(
        steps->Add("mha_one_pass_round", plain, &plan->round));
    return ChooseGaps(key, steps, &plan->gaps);
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    MhaOnePassParams params;
    static_cast<MhaParams&>(params) = ParamsOf(args, plan.key);
    // Sequences with starts of their own have rows between them.
    if (args.is_group_mode && args.cu_seqlen_q_ptr != nullptr) {
      AITER_RETURN_IF_ERROR(
          ClearQueries(driver, plan.gaps, params, args, stream));
    }
    if (args.is_group_mode && args.cu_seqlen_k_ptr != nullptr) {
      AITER_RETURN_IF_ERROR(ClearKeys(driver, plan.gaps, params, args, stream));
    }
    AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.delta, params, stream));
    const bool shared = args.dk_sums_ptr != nullptr;
    constexpr int64_t kFloatBytes = 4;
    // In order, the first to come stores.
    if (args.ordered) {
      AITER_RETURN_IF_ERROR(FillZero(driver, args.turns_ptr,
                                     mha_one_pass_turns(args) * kFloatBytes,
                                     stream));
    } else {
      const int64_t row = (args.is_group_mode ? 1 : args.batch) *
                          mha_one_pass_columns(args) * kFloatBytes;
      const int64_t sums_q =
          args.nhead_q * mha_one_pass_rows(args, args.seqlen_q) * row;
      AITER_RETURN_IF_ERROR(FillZero(driver, args.dq_sums_ptr, sums_q, stream));
      if (shared) {
        const int64_t sums_k =
            args.nhead_k * mha_one_pass_rows(args, args.seqlen_k) * row;
        for (void* sums : {args.dk_sums_ptr, args.dv_sums_ptr}) {
          AITER_RETURN_IF_ERROR(FillZero(driver, sums, sums_k, stream));
        }
      }
    }
    // What is not there is not read, but has an address.
    params.dq_sums_ptr = args.dq_sums_ptr;
    params.dk_sums_ptr = shared ? args.dk_sums_ptr : args.dq_sums_ptr;
    params.dv_sums_ptr = shared ? args.dv_sums_ptr : args.dq_sums_ptr;
    params.turns_ptr = args.ordered ? args.turns_ptr : args.dq_sums_ptr;
    if (args.kept_ptr != nullptr) {
      params.kept_ptr = args.kept_ptr;
      params.stride_kept = KeptStride(args);
      params.nhead_stride_kept = static_cast<int32_t>(mha_kept_words(args));
      params.batch_stride_kept = args.nhead_q * mha_kept_words(args);
    }
    params.heads_of_block =
        shared ? 1 : static_cast<int32_t>(args.nhead_q / args.nhead_k);
    if (args.ordered) params.flags |= kMhaOnePassOrdered;
    AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.bwd, params, stream));
    // The scores' gradients lack dropout's factor.
    params.softmax_scale *= params.rp_keep;
    AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.round, params, stream));
    if (!shared) return Status();
    // dk and dv likewise, keys in the place of queries that all are seen.
    TakeKeysForQueries(&params);
    params.window_left = params.window_right = kUnbounded;
    params.dq_ptr = params.dk_ptr;
    params.dq_sums_ptr = params.dk_sums_ptr;
    params.stride_dq = params.stride_dk;
    params.nhead_stride_dq = params.nhead_stride_dk;
    params.batch_stride_dq = params.batch_stride_dk;
    AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.round, params, stream));
    params.dq_ptr = params.dv_ptr;
    params.dq_sums_ptr = params.dv_sums_ptr;
    params.stride_dq = params.stride_dv;
    params.nhead_stride_dq = params.nhead_stride_dv;
    params.batch_stride_dq = params.batch_stride_dv;
    params.softmax_scale = params.rp_keep;
    return LaunchMha(driver, plan.round, params, stream);
  }
};

struct Dscores {
  using Args = mha_dscores_args;
  using Plan = MhaDscoresPlan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckBwd(a));
    if (a.dscores_ptr == nullptr) {
      return Invalid("dscores_ptr", "null", "given");
    }
    if (a.d_slopes_ptr != nullptr) {
      return Invalid("d_slopes_ptr", "given", "null");
    }
    if (a.batch == 0 || a.seqlen_q == 0 || a.seqlen_k == 0) {
      return Invalid("a size", "0", "above 0");
    }
    if (a.is_group_mode) {
      AITER_RETURN_IF_ERROR(
          CheckRange("max_seqlen_k", a.max_seqlen_k, 1, kMaxSeqlen));
    } else if (a.dscores_nhead == 0) {
      return Status();
    }
    return CheckRange("dscores_nhead", a.dscores_nhead, a.nhead_q / a.nhead_k,
                      (a.is_group_mode ? 1 : a.batch) * a.nhead_q);
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key = MakeKey(a);
    key.features |= Flag(a.dscores_nhead == 0, kMhaDscoresWhole);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return MakeKey("mha_bwd", "mha_bwd", problem, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    constexpr int64_t kServed =
        kMhaBias | kMhaBiasF32 | kMhaDbias | kMhaMask | kMhaAlibi |
        kMhaDropout | kMhaSoftCap | kMhaUnaligned | kMhaWindow | kMhaTopLeft |
        kMhaDlse | kMhaShort | kMhaOdd | kMhaUneven | kMhaOneRow |
        kMhaNonPositiveScale | kMhaDscoresWhole;
    constexpr int64_t kLengths = kMhaPacked | kMhaCuSeqlens |
                                 kMhaCuSeqlensQPadded | kMhaCuSeqlensKPadded;
    // What is found by a sequence and head, or written for all that there is.
    constexpr int64_t kOfOneLength =
        kMhaBias | kMhaMask | kMhaAlibi | kMhaDropout | kMhaDscoresWhole;
    const bool lengths = (key.features & kLengths) != 0;
    // What is kept is not as exact as a gradient of float32.
    constexpr int64_t kOfF32 = kMhaBiasF32 | kMhaDbias;
    if ((key.features & ~(kServed | kLengths)) != 0 ||
        (key.features & kOfF32) == kOfF32 ||
        (lengths && (key.features & kOfOneLength) != 0)) {
      return Status(StatusCode::kUnimplemented,
                    "the scores' gradients are kept beside a bias, which has "
                    "one of their type, a mask, ALiBi, a soft cap, dropout and "
                    "windows alone; of sequences with lengths, beside the "
                    "last but dropout");
    }
    // Only maxima, which gradients do not look for, ask for a positive scale.
    ProblemKey scores = key;
    scores.features &= ~kMhaNonPositiveScale;
    // A product, but a mask says which keys may hold anything.
    ProblemKey product;
    product.data_type = key.data_type;
    product.dims[0] = key.dims[0];
    product.dims[1] = key.dims[1];
    scores.features |= Flag(lengths, kMhaDscoresLengths);
    product.features = scores.features & (kMhaMask | kMhaDscoresLengths);
    ProblemKey of_delta = key;
    of_delta.features &= ~kMhaDscoresWhole;
    AITER_RETURN_IF_ERROR(steps->Add("mha_bwd_delta", of_delta, &plan->delta));
    AITER_RETURN_IF_ERROR(steps->Add("mha_dscores_bwd", scores, &plan->bwd));
    AITER_RETURN_IF_ERROR(steps->Add("mha_dscores_dq", product, &plan->dq));
    return ChooseGaps(key, steps, &plan->gaps);
  }

  // Moves pointers to sequence b and kv head h of the call.
  static void Move(const Args& a, int64_t b, int64_t h, MhaParams* p) {
    const int64_t hq = h * (a.nhead_q / a.nhead_k);
    const int64_t element = ElementBytes(a.data_type);
    constexpr int64_t kWordBytes = 4;
    const auto move = [b](const void** pointer, int64_t batch_stride,
                          int64_t head, int64_t nhead_stride, int64_t bytes) {
      if (*pointer == nullptr) return;
      *pointer = static_cast<const char*>(*pointer) +
                 (b * batch_stride + head * nhead_stride) * bytes;
    };
    move(&p->q_ptr, p->batch_stride_q, hq, p->nhead_stride_q, element);
    move(&p->k_ptr, p->batch_stride_k, h, p->nhead_stride_k, element);
    move(&p->v_ptr, p->batch_stride_v, h, p->nhead_stride_v, element);
    move(&p->do_ptr, p->batch_stride_do, hq, p->nhead_stride_do, element);
    move(&p->dq_ptr, p->batch_stride_dq, hq, p->nhead_stride_dq, element);
    move(&p->dk_ptr, p->batch_stride_dk, h, p->nhead_stride_dk, element);
    move(&p->dv_ptr, p->batch_stride_dv, h, p->nhead_stride_dv, element);
    move(&p->bias_ptr, p->batch_stride_bias, hq, p->nhead_stride_bias, element);
    move(&p->bias_f32_ptr, p->batch_stride_bias, hq, p->nhead_stride_bias,
         kWordBytes);
    move(&p->mask_ptr, p->batch_stride_mask, hq, p->nhead_stride_mask, 1);
    for (const void** pointer : {&p->lse_ptr, &p->delta_ptr}) {
      move(pointer, p->batch_stride_lse, hq, p->nhead_stride_lse, kWordBytes);
    }
    for (const void** pointer : {&p->cu_seqlens_q_ptr, &p->cu_seqlens_k_ptr}) {
      move(pointer, 1, 0, 0, kWordBytes);
    }
    move(&p->alibi_slopes_ptr, a.nhead_q, hq, 1, kWordBytes);
    move(&p->dropout_state_ptr, a.nhead_q * 6, hq, 6, kWordBytes);
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    MhaParams params = ParamsOf(args, plan.key);
    if (args.is_group_mode) {
      AITER_RETURN_IF_ERROR(
          ClearQueries(driver, plan.gaps, params, args, stream));
      AITER_RETURN_IF_ERROR(ClearKeys(driver, plan.gaps, params, args, stream));
    }
    AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.delta, params, stream));
    const int64_t group = args.nhead_q / args.nhead_k;
    int64_t at_once = args.batch * args.nhead_k;
    if (args.dscores_nhead == 0) {
      params.flags |= kMhaDscoresWhole;
    } else {
      at_once = args.dscores_nhead / group;
      params.stride_dbias = static_cast<int32_t>(mha_dscores_row(args));
      params.nhead_stride_dbias = mha_dscores_rows(args) * params.stride_dbias;
    }
    // Sequences, or kv heads of one or of all that are packed, whose gradients
    // there is room for.
    const int64_t heads = std::min(at_once, args.nhead_k);
    const int64_t batch = args.is_group_mode ? args.batch : at_once / heads;
    params.dbias_ptr = args.dscores_ptr;
    params.batch_stride_dbias = heads * group * params.nhead_stride_dbias;
    for (int64_t b = 0; b < args.batch; b += batch) {
      for (int64_t h = 0; h < args.nhead_k; h += heads) {
        MhaParams part = params;
        Move(args, b, h, &part);
        part.batch = static_cast<int32_t>(std::min(batch, args.batch - b));
        part.nhead_k = static_cast<int32_t>(std::min(heads, args.nhead_k - h));
        part.nhead_q = static_cast<int32_t>(part.nhead_k * group);
        AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.bwd, part, stream));
        AITER_RETURN_IF_ERROR(LaunchMha(driver, plan.dq, part, stream));
      }
    }
    return Status();
  }
};

}  // namespace

AITER_DEFINE_OPERATION(mha_fwd, Fwd);
AITER_DEFINE_OPERATION(mha_bwd, Bwd);
AITER_DEFINE_OPERATION(mha_one_pass, OnePass);
AITER_DEFINE_OPERATION(mha_dscores, Dscores);

}  // namespace aiter
