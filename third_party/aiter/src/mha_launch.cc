// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/mha_launch.h"

#include <cstdint>

#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/launch.h"

namespace aiter {
namespace {

// A tensor [batch (1 if packed), heads, rows, head dimension].
struct HeadTensor {
  const void* address;
  int64_t stride, nhead_stride, batch_stride;
  int64_t rows, heads, dim;
};

HeadTensor TensorOf(uint8_t id, const MhaParams& p) {
  switch (id) {
    case kMhaTensorQ:
      return {p.q_ptr,    p.stride_q, p.nhead_stride_q, p.batch_stride_q,
              p.seqlen_q, p.nhead_q,  p.hdim_q};
    case kMhaTensorK:
      return {p.k_ptr,    p.stride_k, p.nhead_stride_k, p.batch_stride_k,
              p.seqlen_k, p.nhead_k,  p.hdim_q};
    case kMhaTensorV:
      return {p.v_ptr,    p.stride_v, p.nhead_stride_v, p.batch_stride_v,
              p.seqlen_k, p.nhead_k,  p.hdim_v};
    case kMhaTensorO:
      return {p.out_ptr,  p.stride_o, p.nhead_stride_o, p.batch_stride_o,
              p.seqlen_q, p.nhead_q,  p.hdim_v};
    case kMhaTensorDo:
      return {p.do_ptr,   p.stride_do, p.nhead_stride_do, p.batch_stride_do,
              p.seqlen_q, p.nhead_q,   p.hdim_v};
    case kMhaTensorDq:
      return {p.dq_ptr,   p.stride_dq, p.nhead_stride_dq, p.batch_stride_dq,
              p.seqlen_q, p.nhead_q,   p.hdim_q};
    case kMhaTensorDk:
      return {p.dk_ptr,   p.stride_dk, p.nhead_stride_dk, p.batch_stride_dk,
              p.seqlen_k, p.nhead_k,   p.hdim_q};
    case kMhaTensorDv:
      return {p.dv_ptr,   p.stride_dv, p.nhead_stride_dv, p.batch_stride_dv,
              p.seqlen_k, p.nhead_k,   p.hdim_v};
    case kMhaTensorBias:  // Its strides may be 0.
      return {p.bias_ptr,          p.stride_bias, p.nhead_stride_bias,
              p.batch_stride_bias, p.seqlen_q,    p.nhead_q,
              p.seqlen_k};
    case kMhaDscoresTensorDscores: {
      // Packed sequences have rows of their own, and each room for the longest.
      const bool packed = (p.flags & kMhaPacked) != 0;
      const int64_t rows = p.nhead_stride_dbias / p.stride_dbias;
      return {p.dbias_ptr,
              p.stride_dbias,
              p.nhead_stride_dbias,
              p.batch_stride_dbias,
              packed ? rows : p.seqlen_q,
              p.nhead_q,
              packed ? p.stride_dbias : p.seqlen_k};
    }
    default:
      return {};
  }
}

MappedTensor Mapped(uint8_t id, const KernelInfo& kernel,
                    const MhaParams& params) {
  HeadTensor t = TensorOf(id, params);
  // Packed batches have one batch, of any stride that does.
  bool packed = (params.flags & kMhaPacked) != 0;
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
  TensorMap maps[kMaxTensorMaps];
  for (int i = 0; i < kernel.num_tensor_maps; ++i) {
    const TensorMapSpec& spec = kernel.tensor_maps[i];
    AITER_RETURN_IF_ERROR(EncodeTensorMap(
        driver, kernel, spec, Mapped(spec.tensor, kernel, params), &maps[i]));
  }
  return LaunchKernel(driver, loaded, &params, stream, maps);
}

}  // namespace aiter
