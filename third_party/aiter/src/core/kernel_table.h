// SPDX-License-Identifier: Apache-2.0

// The table of embedded kernels; aot/embed.py writes its rows.
#ifndef AITER_SRC_CORE_KERNEL_TABLE_H_
#define AITER_SRC_CORE_KERNEL_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "aiter/kernel.h"
#include "third_party/aiter/src/core/driver.h"

namespace aiter {

struct KernelInfo;

// How many blocks of a kernel a call launches; grids.h has every operation's.
struct Grid {
  const char* axes[3];  // Names for messages; fastest first.
  // Sets the sizes of the named axes. `params` is what a packing function
  // takes.
  void (*sizes)(const KernelInfo& kernel, const void* params, int64_t* sizes);
};

inline constexpr int kMaxTensorMapRank = 5;

// What one copy by a tensor map brings.
struct TensorMapSpec {
  uint8_t tensor;  // Of its family's (features.h).
  uint8_t rank;
  uint8_t swizzle_bytes;            // 0, 32, 64 or 128
  uint16_t box[kMaxTensorMapRank];  // Innermost dimension first.
};

struct KernelInfo {
  const char* symbol;
  const char* op;
  // "fast" wants the exact sizes, "padded" and "general" up to them; 0 is no
  // bound in any.
  const char* grade;
  const char* arch;
  DataType data_type;
  bool any_data_type;  // The same for every type.
  // The sizes that it is for, as a ProblemKey has them.
  int num_dims;
  int32_t dims[kMaxDims];
  // Features (features.h) that the kernel cannot serve, and those that it must
  // be asked for.
  uint32_t excludes;
  uint32_t needs;
  int16_t tile_m;
  int16_t tile_n;
  int16_t tile_k;
  int16_t rate;  // Of gemm.csv: TFLOP/s at a large shape.
  int threads;
  int shared_bytes;
  int occupancy;  // Waves (warps) side by side on a SIMD (a scheduler).
  const Grid* grid;
  // Where the code object lies: in a group, which is compressed_bytes of the
  // table's blob from offset on, object_bytes from object_offset on.
  size_t offset;
  size_t compressed_bytes;
  size_t object_offset;
  size_t object_bytes;
  uint32_t object_crc;  // lzma_crc32's: groups are not read to their end.
  // Writes the kernel's arguments from the operator's parameters, each at its
  // offset in the buffer.
  void (*pack)(const void* params, const TensorMap* maps, void* buffer);
  const uint16_t* arg_offsets;
  int num_args;
  const TensorMapSpec* tensor_maps;
  int num_tensor_maps;
};

// A row of configs/<family>_tuned.csv: the choice that was measured to be the
// best for sizes. The family's declaration (family.py) says which numbers these
// are.
struct TunedChoice {
  int kernel;  // Its place in the table.
  int32_t sizes[kMaxDims];
  int32_t choices[kMaxDims];
};

struct KernelTable {
  Platform platform;
  const KernelInfo* kernels;
  int num_kernels;
  const uint8_t* blob;
  const TunedChoice* tuned = nullptr;
  int num_tuned = 0;

  const KernelInfo* begin() const { return kernels; }
  const KernelInfo* end() const { return kernels + num_kernels; }
};

// Bounds of a kernel's arguments.
inline constexpr size_t kMaxArgsBytes = 2048;
inline constexpr int kMaxArgs = 192;
inline constexpr int kMaxTensorMaps = 12;

const KernelTable& GetKernelTable();

}  // namespace aiter

#endif  // AITER_SRC_CORE_KERNEL_TABLE_H_
