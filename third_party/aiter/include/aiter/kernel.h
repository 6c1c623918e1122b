// SPDX-License-Identifier: Apache-2.0

// What every operator's interface says of kernels.
#ifndef AITER_KERNEL_H_
#define AITER_KERNEL_H_

#include <algorithm>
#include <cstdint>

namespace aiter {

enum class DataType : uint8_t {
  kFp16,
  kBf16,
  kFp32,
  kI8,
  kE4m3fn,
  kE4m3fnuz,
  kE2m1,
};

struct KernelInfo;  // A row of the table of embedded kernels.

// A kernel which is loaded in one context.
struct LoadedKernel {
  const KernelInfo* info = nullptr;
  void* function = nullptr;
  int32_t at_once = 0;  // Blocks of AMD's that walk over their tiles.
};

// Sizes that decide which kernel serves a call: at most so many.
inline constexpr int kMaxDims = 4;

// What of a call's arguments decides which kernels run. A plan serves every
// call for which this is equal.
struct ProblemKey {
  uint32_t features = 0;        // Bits of the family's own (core/features.h).
  int32_t dims[kMaxDims] = {};  // As the family's table has columns for them.
  DataType data_type = DataType::kBf16;

  bool operator==(const ProblemKey& other) const {
    return features == other.features && data_type == other.data_type &&
           std::equal(dims, dims + kMaxDims, other.dims);
  }
  bool operator!=(const ProblemKey& other) const { return !(*this == other); }
  uint64_t Hash() const {
    uint64_t hash = features ^ (static_cast<uint64_t>(data_type) << 56);
    for (int32_t dim : dims) {
      hash = (hash ^ static_cast<uint32_t>(dim)) * 0x9e3779b97f4a7c15;
    }
    return hash;
  }
};

}  // namespace aiter

#endif  // AITER_KERNEL_H_
