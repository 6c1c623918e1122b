// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/launch.h"

#include <string>

#include "third_party/aiter/src/kernel_table.h"

namespace aiter {
namespace {

constexpr int64_t kMaxGridX = INT32_MAX;
constexpr int64_t kMaxGridYZ = 65535;
// HIP counts threads, not blocks, in 32 bits.
constexpr int64_t kMaxHipThreads = UINT32_MAX;

// Values of CUtensorMapDataType, CUtensorMapL2promotion.
constexpr int kTensorMapFloat16 = 6;
constexpr int kTensorMapBfloat16 = 9;
constexpr int kL2Promotion128B = 2;

const char* AxisName(GridAxis axis) {
  switch (axis) {
    case GridAxis::kNone:
      return "none";
    case GridAxis::kTileM:
      return "tiles of query rows";
    case GridAxis::kTileN:
      return "tiles of keys";
    case GridAxis::kNheadQ:
      return "nhead_q";
    case GridAxis::kNheadK:
      return "nhead_k";
    case GridAxis::kBatch:
      return "batch";
    case GridAxis::kBias:
      return "bias batches times heads";
  }
  return "unknown";
}

int64_t Tiles(int64_t rows, int64_t tile, bool packed, int64_t batch) {
  return packed ? rows / tile + batch : (rows + tile - 1) / tile;
}

int64_t AxisSize(GridAxis axis, const KernelInfo& kernel,
                 const MhaParams& params, bool tiled) {
  bool packed = (params.flags & kFeatureVarlen) != 0;
  switch (axis) {
    case GridAxis::kNone:
      return 1;
    case GridAxis::kTileM:
      return Tiles(params.seqlen_q, kernel.tile_m, packed, params.batch);
    case GridAxis::kTileN:
      return Tiles(params.seqlen_k, kernel.tile_n, packed, params.batch);
    case GridAxis::kNheadQ:
      return params.nhead_q;
    case GridAxis::kNheadK:
      return params.nhead_k;
    case GridAxis::kBatch:
      // Packed tiles find their sequence themselves.
      return packed && tiled ? 1 : params.batch;
    case GridAxis::kBias:
      return int64_t{params.bias_batch} * params.bias_nhead;
  }
  return 0;
}

struct MappedTensor {
  const void* address;
  int64_t stride, nhead_stride, batch_stride;
  int64_t rows, heads, dim;
};

MappedTensor TensorOf(TensorId id, const MhaParams& p) {
  switch (id) {
    case TensorId::kQ:
      return {p.q_ptr,    p.stride_q, p.nhead_stride_q, p.batch_stride_q,
              p.seqlen_q, p.nhead_q,  p.hdim_q};
    case TensorId::kK:
      return {p.k_ptr,    p.stride_k, p.nhead_stride_k, p.batch_stride_k,
              p.seqlen_k, p.nhead_k,  p.hdim_q};
    case TensorId::kV:
      return {p.v_ptr,    p.stride_v, p.nhead_stride_v, p.batch_stride_v,
              p.seqlen_k, p.nhead_k,  p.hdim_v};
    case TensorId::kO:
      return {p.out_ptr,  p.stride_o, p.nhead_stride_o, p.batch_stride_o,
              p.seqlen_q, p.nhead_q,  p.hdim_v};
    case TensorId::kDo:
      return {p.do_ptr,   p.stride_do, p.nhead_stride_do, p.batch_stride_do,
              p.seqlen_q, p.nhead_q,   p.hdim_v};
    case TensorId::kDq:
      return {p.dq_ptr,   p.stride_dq, p.nhead_stride_dq, p.batch_stride_dq,
              p.seqlen_q, p.nhead_q,   p.hdim_q};
    case TensorId::kDk:
      return {p.dk_ptr,   p.stride_dk, p.nhead_stride_dk, p.batch_stride_dk,
              p.seqlen_k, p.nhead_k,   p.hdim_q};
    case TensorId::kDv:
      return {p.dv_ptr,   p.stride_dv, p.nhead_stride_dv, p.batch_stride_dv,
              p.seqlen_k, p.nhead_k,   p.hdim_v};
  }
  return {};
}

Status EncodeTensorMap(const Driver& driver, const KernelInfo& kernel,
                       const TensorMapSpec& spec, const MhaParams& params,
                       TensorMap* map) {
  if (driver.encode_tensor_map == nullptr) {
    return Status(StatusCode::kFailedPrecondition,
                  std::string("The GPU driver is too old for kernel ") +
                      kernel.symbol + ": it has no cuTensorMapEncodeTiled");
  }
  constexpr uint64_t kElementBytes = 2;
  MappedTensor t = TensorOf(spec.tensor, params);
  bool packed = (params.flags & kFeatureVarlen) != 0;
  uint64_t rows = static_cast<uint64_t>(t.rows);
  uint64_t row_bytes = static_cast<uint64_t>(t.stride) * kElementBytes;
  // Innermost first. Packed batches have one batch, of any stride that does.
  const uint64_t dims[4] = {static_cast<uint64_t>(t.dim), rows,
                            static_cast<uint64_t>(t.heads),
                            packed ? 1 : static_cast<uint64_t>(params.batch)};
  const uint64_t strides[3] = {
      row_bytes, static_cast<uint64_t>(t.nhead_stride) * kElementBytes,
      packed ? rows * row_bytes
             : static_cast<uint64_t>(t.batch_stride) * kElementBytes};
  const uint32_t box[4] = {spec.box_cols, spec.box_rows, 1, 1};
  const uint32_t element_strides[4] = {1, 1, 1, 1};
  int swizzle = 0;  // CUtensorMapSwizzle counts none, 32, 64, 128 bytes.
  for (int bytes = spec.swizzle_bytes; bytes > 16; bytes /= 2) ++swizzle;
  int error = driver.encode_tensor_map(
      map,
      kernel.data_type == DataType::kFp16 ? kTensorMapFloat16
                                          : kTensorMapBfloat16,
      4, const_cast<void*>(t.address), dims, strides, box, element_strides,
      /*interleave=*/0, swizzle, kL2Promotion128B, /*out_of_bounds=*/0);
  if (error == 0) return Status();
  return DriverError(
      driver, error,
      std::string("Encoding a tensor map of kernel ") + kernel.symbol);
}

}  // namespace

Status LaunchMha(const Driver& driver, const LoadedKernel& loaded,
                 const MhaParams& params, void* stream) {
  const KernelInfo& kernel = *loaded.info;
  bool tiled = false;
  for (GridAxis axis : kernel.grid) {
    tiled |= axis == GridAxis::kTileM || axis == GridAxis::kTileN;
  }
  unsigned grid[3];
  for (int i = 0; i < 3; ++i) {
    int64_t size = AxisSize(kernel.grid[i], kernel, params, tiled);
    int64_t limit = i > 0 ? kMaxGridYZ : kMaxGridX;
    if (driver.platform == Platform::kHip && i == 0) {
      limit = kMaxHipThreads / kernel.threads;
    }
    if (size > limit) {
      return Status(StatusCode::kInvalidArgument,
                    std::string(AxisName(kernel.grid[i])) + " is " +
                        std::to_string(size) + ", but kernel " + kernel.symbol +
                        " takes at most " + std::to_string(limit));
    }
    if (size == 0) return Status();
    grid[i] = static_cast<unsigned>(size);
  }

  TensorMap maps[kMaxTensorMaps];
  for (int i = 0; i < kernel.num_tensor_maps; ++i) {
    AITER_RETURN_IF_ERROR(EncodeTensorMap(driver, kernel, kernel.tensor_maps[i],
                                          params, &maps[i]));
  }
  alignas(128) unsigned char buffer[kMaxArgsBytes];
  kernel.pack(&params, maps, buffer);
  // One by one rather than as a buffer: where a buffer's arguments begin is
  // the compiler's choice on CUDA once one of them is aligned to 64 bytes.
  void* args[kMaxArgs];
  for (int i = 0; i < kernel.num_args; ++i) {
    args[i] = buffer + kernel.arg_offsets[i];
  }
  int error = driver.launch(loaded.function, grid[0], grid[1], grid[2],
                            static_cast<unsigned>(kernel.threads), 1, 1,
                            static_cast<unsigned>(kernel.shared_bytes), stream,
                            args, /*extra=*/nullptr);
  if (error == 0) return Status();
  return DriverError(
      driver, error,
      std::string("Launching kernel ") + kernel.symbol + " on a grid of (" +
          std::to_string(grid[0]) + ", " + std::to_string(grid[1]) + ", " +
          std::to_string(grid[2]) + ") blocks of " +
          std::to_string(kernel.threads) + " threads with " +
          std::to_string(kernel.shared_bytes) + " bytes of shared memory");
}

Status FillZero(const Driver& driver, const void* address, int64_t bytes,
                void* stream) {
  if (bytes == 0) return Status();
  int error = driver.memset_d8(reinterpret_cast<uintptr_t>(address), 0,
                               static_cast<size_t>(bytes), stream);
  if (error == 0) return Status();
  return DriverError(driver, error,
                     "Filling " + std::to_string(bytes) + " bytes with 0");
}

Status FillMinusInfinity(const Driver& driver, const void* address,
                         int64_t count, void* stream) {
  if (count == 0) return Status();
  constexpr unsigned kMinusInfinity = 0xff800000;
  int error =
      driver.memset_d32(reinterpret_cast<uintptr_t>(address), kMinusInfinity,
                        static_cast<size_t>(count), stream);
  if (error == 0) return Status();
  return DriverError(driver, error,
                     "Filling " + std::to_string(count) + " numbers with -inf");
}

}  // namespace aiter
