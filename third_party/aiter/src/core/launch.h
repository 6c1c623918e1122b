// SPDX-License-Identifier: Apache-2.0

// Launch of any kernel: limits of the grid, argument buffer, tensor maps;
// fills.
#ifndef AITER_SRC_CORE_LAUNCH_H_
#define AITER_SRC_CORE_LAUNCH_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/kernel_table.h"

namespace aiter {

// Bytes of an element as stored: two e2m1 numbers are one.
int64_t ElementBytes(DataType type);

// A tensor of which a kernel copies boxes. Innermost dimension first, which is
// contiguous; strides are elements of the dimensions after it.
struct MappedTensor {
  const void* address = nullptr;
  DataType type = DataType::kBf16;
  int rank = 0;
  int64_t dims[kMaxTensorMapRank] = {};
  int64_t strides[kMaxTensorMapRank - 1] = {};
  // Whether 128 bytes bring the next 128 into the L2 cache.
  bool reads_ahead = false;
};

// Multiprocessors (compute units) of a device, for which `kernel` was chosen.
int Multiprocessors(const DeviceInfo& device, const KernelInfo& kernel);

// Blocks of `kernel` that a device runs at once: on each multiprocessor as many
// as have room in its shared memory, 1 at least and `most` at most.
int BlocksAtOnce(const DeviceInfo& device, const KernelInfo& kernel, int most);

// Makes the tensor map that `kernel` wants of a tensor without an empty
// dimension, whose address and strides are multiples of 16 bytes.
Status EncodeTensorMap(const Driver& driver, const KernelInfo& kernel,
                       const TensorMapSpec& spec, const MappedTensor& tensor,
                       TensorMap* map);

// Launches a kernel on its grid; nothing if that is empty. `params` is what its
// packing function and its grid take. early: it waits for the kernel before it
// itself, where its architecture lets it start before that has ended.
Status LaunchKernel(const Driver& driver, const LoadedKernel& kernel,
                    const void* params, void* stream,
                    const TensorMap* maps = nullptr, bool early = false);

// Sets `bytes` bytes of device memory to 0; nothing if there are none.
Status FillZero(const Driver& driver, const void* address, int64_t bytes,
                void* stream);

// Sets `count` float32 numbers of device memory to -inf.
Status FillMinusInfinity(const Driver& driver, const void* address,
                         int64_t count, void* stream);

// Copies `bytes` bytes of device memory; nothing if they are there already.
Status CopyBytes(const Driver& driver, const void* to, const void* from,
                 int64_t bytes, void* stream);

}  // namespace aiter

#endif  // AITER_SRC_CORE_LAUNCH_H_
