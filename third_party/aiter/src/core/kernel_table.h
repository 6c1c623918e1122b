// SPDX-License-Identifier: Apache-2.0

// The table of embedded kernels; aot/embed.py writes its rows.
#ifndef AITER_SRC_CORE_KERNEL_TABLE_H_
#define AITER_SRC_CORE_KERNEL_TABLE_H_

#include <cstddef>
#include <cstdint>

#include "aiter/kernel.h"
#include "third_party/aiter/src/core/driver.h"

namespace aiter {

// What an attention problem asks of a kernel. The low bits are the kernels' own
// argument `flags` (kernels/core/tiles.py has the same list); the high ones
// only select.
enum Feature : uint32_t {
  kFeatureBias = 1 << 0,
  kFeatureBiasF32 = 1 << 1,
  kFeatureAlibi = 1 << 2,
  kFeatureSink = 1 << 3,
  kFeatureDropout = 1 << 4,
  kFeatureVarlen = 1 << 5,  // Packed.
  kFeatureCuQ = 1 << 6,
  kFeatureCuK = 1 << 7,
  kFeatureCuQPadded = 1 << 8,
  kFeatureCuKPadded = 1 << 9,
  kFeatureTopLeft = 1 << 10,
  kFeatureDlse = 1 << 11,
  kKernelFlagsMask = (1 << 12) - 1,

  kFeatureSoftCap = 1 << 16,
  kFeatureSinkTokens = 1 << 17,
  kFeatureWindow = 1 << 18,  // Either side bounded; causal is one.
  kFeatureMinSeqlen = 1 << 19,
  kFeatureNoKeys = 1 << 20,  // seqlen_k is 0.
  kFeatureNonPositiveScale = 1 << 21,
  kFeatureDbias = 1 << 22,
  kFeatureDsink = 1 << 23,
  kFeatureCuSeqlens = kFeatureCuQ | kFeatureCuK,
};

// What a norm asks of a kernel: the kernels' argument `flags`
// (kernels/norm/rows.py has the same list).
enum NormFeature : uint32_t {
  kFeatureUnaligned = 1 << 0,  // Rows do not begin at multiples of 16 bytes.
  kFeatureLayer = 1 << 1,
  kFeatureResidual = 1 << 2,
  kFeatureGemma = 1 << 3,
  kFeatureT5 = 1 << 4,
  kFeatureBeta = 1 << 5,
  kFeatureF32Weights = 1 << 6,
  kFeatureSmooth = 1 << 7,
};

// What a GEMM asks beside kFeatureUnaligned, which stands for rows of operands
// that lie too far apart as well, and for parts of rows.
enum GemmFeature : uint32_t {
  kFeatureOutF32 = 1 << 1,
  kFeatureOutFp16 = 1 << 2,
  kFeatureBatched = 1 << 3,
};

// What a dimension of the grid counts.
enum class GridAxis : uint8_t {
  kNone,  // 1
  kTileM,
  kTileN,
  kNheadQ,
  kNheadK,
  kBatch,
  kBias,    // The bias's batches times its heads.
  kParts,   // Parts that rows are divided into.
  kTiles,   // Tiles of rows times tiles of columns.
  kSplits,  // Parts that a sum is divided into.
  kBlocks,  // As many as the device runs at once, or tiles if those are fewer.
};

// Tensors that tensor maps describe: attention's, as [batch (1 if packed),
// head, row, head dimension], and a GEMM's.
enum class TensorId : uint8_t {
  kQ,
  kK,
  kV,
  kO,
  kDo,
  kDq,
  kDk,
  kDv,
  kA,
  kB,
  kOut,
};

inline constexpr int kMaxTensorMapRank = 5;

// What one copy by a tensor map brings.
struct TensorMapSpec {
  TensorId tensor;
  uint8_t rank;
  uint8_t swizzle_bytes;            // 0, 32, 64 or 128
  uint16_t box[kMaxTensorMapRank];  // Innermost dimension first.
};

struct KernelInfo {
  const char* symbol;
  const char* op;
  const char* grade;  // "fast" wants the exact sizes, "general" up to them.
  const char* arch;
  DataType data_type;
  bool any_data_type;  // The same for every type.
  // The sizes that it is for, as a ProblemKey has them; 0 is no bound.
  int32_t dims[2];
  uint32_t excludes;  // Features that the kernel cannot serve.
  int16_t tile_m;
  int16_t tile_n;
  int16_t tile_k;
  int16_t rate;  // Of gemm.csv: TFLOP/s at a large shape.
  int threads;
  int shared_bytes;
  GridAxis grid[3];
  // Where the compressed code object lies in the table's blob.
  size_t offset;
  size_t compressed_bytes;
  size_t object_bytes;
  // Writes the kernel's arguments from the operator's parameters, each at its
  // offset in the buffer.
  void (*pack)(const void* params, const TensorMap* maps, void* buffer);
  const uint16_t* arg_offsets;
  int num_args;
  const TensorMapSpec* tensor_maps;
  int num_tensor_maps;
};

// A row of configs/gemm_tuned.csv: the choice that was measured to be the best
// for a size.
struct TunedGemm {
  int kernel;  // Its place in the table.
  int32_t m, n, k;
  int32_t splits;
};

struct KernelTable {
  Platform platform;
  const KernelInfo* kernels;
  int num_kernels;
  const uint8_t* blob;
  const TunedGemm* tuned_gemms = nullptr;
  int num_tuned_gemms = 0;

  const KernelInfo* begin() const { return kernels; }
  const KernelInfo* end() const { return kernels + num_kernels; }
};

// Bounds of a kernel's arguments.
inline constexpr size_t kMaxArgsBytes = 2048;
inline constexpr int kMaxArgs = 128;
inline constexpr int kMaxTensorMaps = 8;

const KernelTable& GetKernelTable();

}  // namespace aiter

#endif  // AITER_SRC_CORE_KERNEL_TABLE_H_
