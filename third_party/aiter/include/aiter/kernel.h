// SPDX-License-Identifier: Apache-2.0

// What every operator's interface says of kernels.
#ifndef AITER_KERNEL_H_
#define AITER_KERNEL_H_

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
};

// What of a call's arguments decides which kernels run. A plan serves every
// call for which this is equal.
struct ProblemKey {
  uint32_t features = 0;  // Bits of the operator's own.
  int32_t dims[2] = {};   // Head dims of attention; columns of a norm.
  DataType data_type = DataType::kBf16;

  bool operator==(const ProblemKey& other) const {
    return features == other.features && dims[0] == other.dims[0] &&
           dims[1] == other.dims[1] && data_type == other.data_type;
  }
  bool operator!=(const ProblemKey& other) const { return !(*this == other); }
  uint64_t Hash() const {
    return features ^ (static_cast<uint64_t>(dims[0]) << 32) ^
           (static_cast<uint64_t>(dims[1]) << 44) ^
           (static_cast<uint64_t>(data_type) << 56);
  }
};

}  // namespace aiter

#endif  // AITER_KERNEL_H_
