// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/mha_launch.h"

#include <string>

#include "third_party/aiter/src/kernel_table.h"
#include "third_party/aiter/src/launch.h"

namespace aiter {
namespace {

// Values of CUtensorMapDataType, CUtensorMapL2promotion.
constexpr int kTensorMapFloat16 = 6;
constexpr int kTensorMapBfloat16 = 9;
constexpr int kL2Promotion128B = 2;

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
    default:
      break;  // Other families'.
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
  const uint32_t box[4] = {spec.box[0], spec.box[1], 1, 1};
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
  int64_t grid[3];
  for (int i = 0; i < 3; ++i) {
    grid[i] = AxisSize(kernel.grid[i], kernel, params, tiled);
    if (grid[i] == 0) return Status();
  }
  TensorMap maps[kMaxTensorMaps];
  for (int i = 0; i < kernel.num_tensor_maps; ++i) {
    AITER_RETURN_IF_ERROR(EncodeTensorMap(driver, kernel, kernel.tensor_maps[i],
                                          params, &maps[i]));
  }
  return Launch(driver, loaded, grid, &params, maps, stream);
}

}  // namespace aiter
