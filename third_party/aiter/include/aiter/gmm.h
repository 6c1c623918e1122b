// SPDX-License-Identifier: Apache-2.0

// Grouped products: of runs of rows, each with a matrix of its own, on AMD and
// NVIDIA GPUs. Sums are fp32.
//
// Calls are as in operation.h, streams and devices as in mha.h.
#ifndef AITER_GMM_H_
#define AITER_GMM_H_

#include <cstdint>
#include <limits>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

enum class GmmLayout : uint8_t {
  kNN,  // a [m, k], b [groups, k, n] -> out [m, n]
  kNT,  // a [m, k], b [groups, n, k] -> out [m, n]
  kTN,  // a [m, k], b [m, n] -> out [groups, k, n]
};

enum class GmmScaling : uint8_t {
  kNone,   // bf16 and fp16, in all layouts; what follows is in kNT alone.
  kRow,    // i8 and fp8: a float32 scale a row of a, and of each row of b.
  kBlock,  // fp8: float32 of 1 x 128 in a [m, ceil(k / 128)] and of 128 x 128
           // in b [groups, ceil(n / 128), ceil(k / 128)].
  kMx,  // b is e2m1 [groups, n, k / 2], two numbers a byte, with a power of two
        // (e8m0) a row and 32 of k, [groups, n, k / 32]. a is bf16, or e4m3fn
        // or e2m1 with such scales [m, k / 32]. k is a multiple of 32.
  kI4,  // b is int4 [groups, n, k / 2] with bf16 scales [groups, n, k / 32],
        // and a bf16. k is a multiple of 32.
};

// How b's columns are gates and as many ups: all gates first, of kNT, or in
// turns, of kNN too.
enum class GmmGates : uint8_t { kNone, kHalves, kPairs };

// Numbers of kernels/core/activations.py and kernels/activation/rows.py.
enum class GmmActivation : int32_t {
  kNone = 0,
  kRelu = 1,
  kGelu = 2,
  kGeluTanh = 3,
  kSilu = 4,
  kSwiglu = 5,  // Of gates alone, as activation.h has it.
};

// How many tiles of rows there can be at most, of any kernel: of kTN one a
// group, else no tile has fewer than 16 rows.
inline constexpr int64_t kGmmLeastRows = 16;

// Group i has the next sizes[i] rows of a, from the first on. A negative size
// is none, and what is beyond m is cut off. Rows of no group are 0 in out, and
// a group without rows has a matrix of zeros there.
//
// Arrays are dense and start at a multiple of 16 bytes.
struct gmm_args {
  GmmLayout layout = GmmLayout::kNN;
  GmmScaling scaling = GmmScaling::kNone;
  DataType data_type = DataType::kBf16;  // Of a, and of b if it has no 4 bits.
  // kFp32, or data_type, of scaled products bf16.
  DataType out_type = DataType::kBf16;

  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t groups = 0;

  const void* a_ptr = nullptr;
  const void* b_ptr = nullptr;
  const void* a_scale_ptr = nullptr;  // Absent without scaling; of kMx and kI4
  const void* b_scale_ptr = nullptr;  // a_scale where a is bf16.
  const void* sizes_ptr = nullptr;    // int32 [groups], with `lead` one more.
  // Whether the first of the sizes counts rows that no group has.
  bool lead = false;
  // What is done with a product, without scaling and not of kTN: `bias_ptr`,
  // float32 [groups, columns of b], is added, then comes the activation.
  // With gates b has 2 n columns, products are rounded to data_type first, and
  // out, of data_type, is
  //   activation(min(gate, gate_limit)) * clip(up, -up_limit, up_limit).
  const void* bias_ptr = nullptr;
  GmmGates gates = GmmGates::kNone;
  GmmActivation activation = GmmActivation::kNone;
  float alpha = 1;  // Of kSwiglu.
  float gate_limit = std::numeric_limits<float>::infinity();
  float up_limit = std::numeric_limits<float>::infinity();

  void* out_ptr = nullptr;
  // Scratch, int32 [gmm_plan_entries(m, groups), 4].
  void* plan_ptr = nullptr;
};

inline int64_t gmm_plan_entries(int64_t m, int64_t groups) {
  return (m + kGmmLeastRows - 1) / kGmmLeastRows + groups + 2;
}

struct GmmPlan {
  ProblemKey key;
  LoadedKernel plan;
  LoadedKernel product;
  int32_t multiprocessors = 0;
};

// The sizes of a problem are m, n, k and the number of groups; its features nt
// or tn, and row, block, mx, i4 or epilogue.
AITER_OPERATION(gmm, gmm_args, GmmPlan);

}  // namespace aiter

#endif  // AITER_GMM_H_
