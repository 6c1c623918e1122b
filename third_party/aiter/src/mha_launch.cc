// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/mha_launch.h"

#include <cstdint>

#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/launch.h"

namespace aiter {
namespace {

int64_t Tiles(int64_t rows, int64_t tile, bool packed, int64_t batch) {
  return packed ? rows / tile + batch : (rows + tile - 1) / tile;
}

int64_t AxisSize(GridAxis axis, const KernelInfo& kernel,
                 const MhaParams& params, bool tiled) {
  bool packed = (params.flags & kMhaVarlen) != 0;
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

// A tensor [batch (1 if packed), heads, rows, head dimension].
struct HeadTensor {
  const void* address;
  int64_t stride, nhead_stride, batch_stride;
  int64_t rows, heads, dim;
};

HeadTensor TensorOf(TensorId id, const MhaParams& p) {
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
    default:
      return {};  // Other families'.
  }
}

MappedTensor Mapped(TensorId id, const KernelInfo& kernel,
                    const MhaParams& params) {
  HeadTensor t = TensorOf(id, params);
  // Packed batches have one batch, of any stride that does.
  bool packed = (params.flags & kMhaVarlen) != 0;
  MappedTensor tensor;
  tensor.address = t.address;
  tensor.type = kernel.data_type;
  tensor.rank = 4;
  tensor.dims[0] = t.dim;
  tensor.dims[1] = t.rows;
  tensor.dims[2] = t.heads;
  tensor.dims[3] = packed ? 1 : params.batch;
  tensor.strides[0] = t.stride;
  tensor.strides[1] = t.nhead_stride;
  tensor.strides[2] = packed ? t.rows * t.stride : t.batch_stride;
  return tensor;
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
    const TensorMapSpec& spec = kernel.tensor_maps[i];
    AITER_RETURN_IF_ERROR(EncodeTensorMap(
        driver, kernel, spec, Mapped(spec.tensor, kernel, params), &maps[i]));
  }
  return Launch(driver, loaded, grid, &params, maps, stream);
}

}  // namespace aiter
