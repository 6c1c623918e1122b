// SPDX-License-Identifier: Apache-2.0

// XLA FFI target of float8 attention. Operands, results and attributes:
// jax/_src/aiter/mha_fp8/op.py.

#include <cstdint>
#include <string>

#include "aiter/mha_fp8.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

struct MhaFp8Attrs {
  int64_t window_left;
  int64_t window_right;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax::JAX_GPU_NAMESPACE::MhaFp8Attrs,
                                      StructMember<int64_t>("window_left"),
                                      StructMember<int64_t>("window_right"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

struct FwdBuffers : BufferList {
  using BufferList::BufferList;
  Buffer q = Operand("q");
  Buffer k = Operand("k");
  Buffer v = Operand("v");
  Buffer scales = Operand("scales");
  Buffer v_scales = Operand("v_scales");
  Buffer sinks = Operand("sinks");
  Buffer cu_seqlens_q = Operand("cu_seqlens_q");
  Buffer cu_seqlens_k = Operand("cu_seqlens_k");
  Buffer out = Result("out");
  Buffer lse = Result("lse");
  Buffer v_columns = Result("v_columns");
};

// q, k, v and out, whose rows are those of a batch or of packed sequences.
ffi::Error SetRows(const FwdBuffers& b, bool packed,
                   aiter::mha_fp8_fwd_args* a) {
  const size_t rank = packed ? 3 : 4;
  for (const Buffer* t : {&b.q, &b.k, &b.v, &b.out}) {
    AITER_FFI_RETURN_IF_ERROR(CheckRank(
        *t, rank, packed ? "[rows, heads, dim]" : "[batch, rows, heads, dim]"));
  }
  Buffer::Dimensions q = b.q.dimensions(), k = b.k.dimensions();
  a->seqlen_q = q[rank - 3];
  a->seqlen_k = k[rank - 3];
  a->nhead_q = q[rank - 2];
  a->nhead_k = k[rank - 2];
  a->hdim = q[rank - 1];
  a->hdim_v = b.out.dimensions()[rank - 1];
  AITER_FFI_RETURN_IF_ERROR(CheckType(b.out, ffi::BF16));
  for (const Buffer* t : {&b.k, &b.v}) {
    AITER_FFI_RETURN_IF_ERROR(CheckType(*t, b.q.element_type()));
  }
  if (packed) {
    AITER_FFI_RETURN_IF_ERROR(
        CheckShape(b.k, {a->seqlen_k, a->nhead_k, a->hdim}));
    AITER_FFI_RETURN_IF_ERROR(
        CheckShape(b.v, {a->seqlen_k, a->nhead_k, a->hdim_v}));
    AITER_FFI_RETURN_IF_ERROR(
        CheckShape(b.out, {a->seqlen_q, a->nhead_q, a->hdim_v}));
    return Check(b.lse, ffi::F32, {a->nhead_q, a->seqlen_q});
  }
  AITER_FFI_RETURN_IF_ERROR(
      CheckShape(b.q, {a->batch, a->seqlen_q, a->nhead_q, a->hdim}));
  AITER_FFI_RETURN_IF_ERROR(
      CheckShape(b.k, {a->batch, a->seqlen_k, a->nhead_k, a->hdim}));
  AITER_FFI_RETURN_IF_ERROR(
      CheckShape(b.v, {a->batch, a->seqlen_k, a->nhead_k, a->hdim_v}));
  AITER_FFI_RETURN_IF_ERROR(
      CheckShape(b.out, {a->batch, a->seqlen_q, a->nhead_q, a->hdim_v}));
  return Check(b.lse, ffi::F32, {a->batch, a->nhead_q, a->seqlen_q});
}

ffi::Error SetFwd(const FwdBuffers& b, const MhaFp8Attrs& attrs,
                  aiter::mha_fp8_fwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(QuantTypeOf(b.q, &a->data_type));
  if (a->data_type != aiter::DataType::kE4m3fn &&
      a->data_type != aiter::DataType::kE4m3fnuz) {
    return Invalid(b.q, "has dtype " + TypeName(b.q.element_type()),
                   "have dtype float8_e4m3fn or float8_e4m3fnuz");
  }
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.scales, 3, "[batch, heads, blocks]"));
  a->batch = b.scales.dimensions()[0];
  a->blocks = b.scales.dimensions()[2];
  const bool packed = IsPresent(b.cu_seqlens_q);
  AITER_FFI_RETURN_IF_ERROR(SetRows(b, packed, a));
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.scales, ffi::F32, {a->batch, a->nhead_k, a->blocks}));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.v_scales, b.scales));
  AITER_FFI_RETURN_IF_ERROR(
      CheckRank(b.v_columns, 4, "[batch, heads, dim, columns]"));
  a->columns = b.v_columns.dimensions()[3];
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.v_columns, b.q.element_type(),
            {packed ? 1 : a->batch, a->nhead_k, a->hdim_v, a->columns}));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.sinks, ffi::F32, {a->batch, a->nhead_q}, &a->sinks_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.cu_seqlens_q, ffi::S32, {a->batch + 1}, &a->cu_seqlens_q_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.cu_seqlens_k, ffi::S32, {a->batch + 1}, &a->cu_seqlens_k_ptr));
  a->q_ptr = Data(b.q);
  a->k_ptr = Data(b.k);
  a->v_ptr = Data(b.v);
  a->v_columns_ptr = Data(b.v_columns);
  a->scales_ptr = Data(b.scales);
  a->v_scales_ptr = Data(b.v_scales);
  a->out_ptr = Data(b.out);
  a->lse_ptr = Data(b.lse);
  a->window_left = attrs.window_left;
  a->window_right = attrs.window_right;
  return ffi::Error::Success();
}

const Family kMhaFp8({TargetOf<SetFwd>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
