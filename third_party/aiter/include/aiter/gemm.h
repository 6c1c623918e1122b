// SPDX-License-Identifier: Apache-2.0

// Matrix products with fp32 or int32 sums, plain or of quantised operands, on
// AMD and NVIDIA GPUs.
//
// Calls are as in operation.h, streams and devices as in mha.h.
#ifndef AITER_GEMM_H_
#define AITER_GEMM_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "aiter/kernel.h"
#include "aiter/operation.h"
#include "aiter/status.h"

namespace aiter {

// How the operands lie in memory. Their rows are contiguous.
enum class GemmLayout : uint8_t {
  kNT,  // a [m, k], b [n, k]: a weight as a linear layer keeps it.
  kNN,  // a [m, k], b [k, n]: the gradient of kNT's a.
  kTN,  // a [k, m], b [k, n]: the gradient of kNT's b.
};

enum class GemmScaling : uint8_t {
  kNone,   // fp16 and bf16, in all layouts; what follows is in kNT alone.
  kRow,    // i8 and fp8: a float32 scale a row of a and of b, or one in all.
  kBlock,  // fp8: float32 of 1 x 128 in a [m, ceil(k / 128)] and of 128 x 128
           // in b [ceil(n / 128), ceil(k / 128)].
  kMx,     // e2m1, two a byte, low bits first: an e8m0 byte of 32 along k,
           // a [m, ceil(k / 32)], b [n, ceil(k / 32)].
};

enum class GemmActivation : uint8_t { kNone, kRelu, kGelu, kGeluTanh, kSilu };

// out = activation(sum over k of (a * a_scale) (b * b_scale) + bias), where the
// sum is float32, or of i8 exact in int32. With k = 0 the sum is 0.
//
// Strides count elements as stored (bytes of two e2m1) and are those between
// rows and between batches; a batch stride of 0 says that all batches share
// the operand. Pointers are device pointers, at a multiple of 16 bytes.
struct gemm_args {
  GemmLayout layout = GemmLayout::kNT;
  GemmScaling scaling = GemmScaling::kNone;
  GemmActivation activation = GemmActivation::kNone;
  // Equal, but that one may be e4m3fn and the other e4m3fnuz.
  DataType a_type = DataType::kBf16;
  DataType b_type = DataType::kBf16;
  DataType out_type = DataType::kBf16;  // bf16, fp16 or fp32.

  int64_t batch = 1;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;

  const void* a_ptr = nullptr;
  const void* b_ptr = nullptr;
  int64_t stride_a = 0, batch_stride_a = 0;
  int64_t stride_b = 0, batch_stride_b = 0;

  const void* a_scale_ptr = nullptr;
  const void* b_scale_ptr = nullptr;
  // kRow: 1, or 0 for one scale in all. kBlock, kMx: from one row (of kBlock's
  // b: block of rows) to the next.
  int64_t stride_a_scale = 0, batch_stride_a_scale = 0;
  int64_t stride_b_scale = 0, batch_stride_b_scale = 0;
  // kBlock, kMx: from one block along k to the next; 1 of kMx.
  int64_t k_stride_a_scale = 0;
  int64_t k_stride_b_scale = 0;

  const void* bias_ptr = nullptr;  // [n], or absent.
  bool bias_is_f32 = false;        // Else of `out_type`.

  void* out_ptr = nullptr;  // [batch, m, n], contiguous.
  // Scratch for sums over parts of k, as many as it has room for, or none. Of
  // no meaning afterwards.
  void* workspace_ptr = nullptr;
  int64_t workspace_bytes = 0;

  // For tuning. The kernel to use, and the number of parts of k; none and 0
  // leave them to the library.
  std::string_view kernel;
  int64_t splits = 0;
};

// What of the arguments decides which kernels run, and how.
struct GemmKey {
  GemmLayout layout = GemmLayout::kNT;
  GemmScaling scaling = GemmScaling::kNone;
  DataType a_type = DataType::kBf16;
  DataType b_type = DataType::kBf16;
  uint32_t features = 0;
  int64_t batch = 0, m = 0, n = 0, k = 0;
  int64_t workspace = 0;               // Numbers that it has room for.
  int32_t splits = 0;                  // Asked for.
  const KernelInfo* kernel = nullptr;  // Asked for.

  bool operator==(const GemmKey& other) const;
  bool operator!=(const GemmKey& other) const { return !(*this == other); }
  uint64_t Hash() const;
};

// Loaded kernels of a call, valid in the context that was current when it was
// made. Trivially copyable; nothing to release.
struct GemmPlan {
  GemmKey key;
  LoadedKernel gemm;
  LoadedKernel sum;  // Null without parts.
  int32_t splits = 1;
  int32_t k_per_split = 0;
  int32_t whole_tiles = 0;
  int32_t divided_tiles = 0;
  bool skew = false;           // Columns of tiles begin at different k.
  bool early = false;          // gemm begins while the kernel before it ends.
  int32_t blocks_at_once = 0;  // That the device has room for.
};

// The sizes of a problem are m, n, k, batch (1 if not told) and the bytes of
// the workspace (0). Its data type is a's, and b's but with
// the features a_fnuz or b_fnuz, which say which of the two is e4m3fnuz and
// which e4m3fn. Further features: nn or tn; row, block or mx; out_f32 or
// out_fp16.
AITER_OPERATION(gemm, gemm_args, GemmPlan);

// A choice for a call: the kernel, and into how many parts it divides k.
struct GemmChoice {
  std::string kernel;
  int32_t splits = 1;
};

// Sets `*choices` to every kernel that serves the call on a device of
// architecture `arch`, each with every number of parts that makes sense, the
// library's own choice first. Needs no device.
Status gemm_choices(const gemm_args& args, const std::string& arch,
                    std::vector<GemmChoice>* choices);
Status gemm_choices(const Problem& problem, const std::string& arch,
                    std::vector<GemmChoice>* choices);

}  // namespace aiter

#endif  // AITER_GEMM_H_
