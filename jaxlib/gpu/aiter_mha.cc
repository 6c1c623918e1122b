// SPDX-License-Identifier: Apache-2.0

// XLA FFI targets of multi-head attention. Operands, results and attributes:
// jax/_src/aiter/attention/op.py.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "aiter/mha.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// Attributes of both operations.
struct MhaAttrs {
  float softmax_scale;
  float logits_soft_cap;
  float dropout_p;
  int64_t window_left;
  int64_t window_right;
  int64_t sink_tokens;
  bool top_left;
  int64_t min_seqlen_q;
  bool deterministic;  // Those of mha_one_pass may not be.
  bool exact;
  bool one_row;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::MhaAttrs, StructMember<float>("softmax_scale"),
    StructMember<float>("logits_soft_cap"), StructMember<float>("dropout_p"),
    StructMember<int64_t>("window_left"), StructMember<int64_t>("window_right"),
    StructMember<int64_t>("sink_tokens"), StructMember<bool>("top_left"),
    StructMember<int64_t>("min_seqlen_q"), StructMember<bool>("deterministic"),
    StructMember<bool>("exact"), StructMember<bool>("one_row"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

// Operands that forward and backward share.
struct Operands : BufferList {
  using BufferList::BufferList;
  Buffer q = Operand("q");
  Buffer k = Operand("k");
  Buffer v = Operand("v");
  Buffer cu_seqlens_q = Operand("cu_seqlens_q");
  Buffer cu_seqlens_k = Operand("cu_seqlens_k");
  Buffer cu_seqlens_q_padded = Operand("cu_seqlens_q_padded");
  Buffer cu_seqlens_k_padded = Operand("cu_seqlens_k_padded");
  Buffer bias = Operand("bias");
  Buffer mask = Operand("mask");
  Buffer alibi_slopes = Operand("alibi_slopes");
  Buffer sink = Operand("sink");
  Buffer dropout_state = Operand("dropout_state");
};

struct FwdBuffers : Operands {
  using Operands::Operands;
  Buffer out = Result("out");
  Buffer lse = Result("lse");
  Buffer kept = Result("kept");
};

// What every way to the gradients reads and writes.
struct GradientBuffers : Operands {
  using Operands::Operands;
  Buffer dout = Operand("dout");
  Buffer out = Operand("out");
  Buffer lse = Operand("lse");
  Buffer dlse = Operand("dlse");
  Buffer dq = Result("dq");
  Buffer dk = Result("dk");
  Buffer dv = Result("dv");
};

struct BwdBuffers : GradientBuffers {
  using GradientBuffers::GradientBuffers;
  Buffer dbias = Result("dbias");
  Buffer dsink = Result("dsink");
  Buffer dslopes = Result("dslopes");
  Buffer delta = Result("delta");
};

struct OnePassBuffers : GradientBuffers {
  using GradientBuffers::GradientBuffers;
  Buffer kept = Operand("kept");
  Buffer delta = Result("delta");
  Buffer dq_sums = Result("dq_sums");
  Buffer dk_sums = Result("dk_sums");
  Buffer dv_sums = Result("dv_sums");
  Buffer turns = Result("turns");
};

struct DscoresBuffers : GradientBuffers {
  using GradientBuffers::GradientBuffers;
  Buffer dscores = Result("dscores");
  Buffer delta = Result("delta");
};

// Row, head and batch strides of a contiguous [batch,] rows, heads, dim.
void SetStrides(int64_t rows, int64_t heads, int64_t dim, int64_t* stride,
                int64_t* nhead_stride, int64_t* batch_stride) {
  *stride = heads * dim;
  *nhead_stride = dim;
  *batch_stride = rows * heads * dim;
}

// Checks a bias or mask, any of whose dimensions may be 1 for all, and sets its
// strides, which are 0 there.
ffi::Error SetPlanes(const Buffer& buffer, const aiter::mha_args& a,
                     int64_t* key_stride, int64_t* stride,
                     int64_t* nhead_stride, int64_t* batch_stride) {
  Buffer::Dimensions dims = buffer.dimensions();
  const int64_t full[] = {a.batch, a.nhead_q, a.seqlen_q, a.seqlen_k};
  if (a.is_group_mode) {
    return Invalid(buffer, "is given", "be absent with packed q");
  }
  bool fits = dims.size() == 4;
  for (size_t i = 0; fits && i < 4; ++i) {
    fits = dims[i] == 1 || dims[i] == full[i];
  }
  if (!fits) {
    return Invalid(buffer, "has shape " + ShapeString(dims),
                   "broadcast to " + ShapeString({a.batch, a.nhead_q,
                                                  a.seqlen_q, a.seqlen_k}));
  }
  int64_t below = 1;  // Elements of what is inside a dimension.
  int64_t* strides[] = {batch_stride, nhead_stride, stride, key_stride};
  for (int i = 3; i >= 0; --i) {
    *strides[i] = dims[i] == 1 ? 0 : below;
    below *= dims[i];
  }
  return ffi::Error::Success();
}

// Checks q, k, v and whatever is optional, and fills in all of `a`.
ffi::Error SetCommon(const Operands& in, const MhaAttrs& attrs,
                     aiter::mha_args* a) {
  ffi::DataType type = in.q.element_type();
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(in.q, &a->data_type));

  Buffer::Dimensions q = in.q.dimensions();
  Buffer::Dimensions k = in.k.dimensions();
  Buffer::Dimensions v = in.v.dimensions();
  if (q.size() != 3 && q.size() != 4) {
    return Invalid(in.q, "has shape " + ShapeString(q),
                   "have rank 4 (dense) or 3 (packed)");
  }
  bool packed = q.size() == 3;
  if (k.size() != q.size()) {
    return Invalid(in.k, "has shape " + ShapeString(k), "have the rank of q");
  }
  if (v.size() != q.size()) {
    return Invalid(in.v, "has shape " + ShapeString(v), "have the rank of q");
  }
  a->is_group_mode = packed;
  size_t first = packed ? 0 : 1;
  a->seqlen_q = q[first];
  a->nhead_q = q[first + 1];
  a->hdim_q = q[first + 2];
  a->seqlen_k = k[first];
  a->nhead_k = k[first + 1];
  a->hdim_v = v[first + 2];
  if (packed) {
    Buffer::Dimensions cu = in.cu_seqlens_q.dimensions();
    if (cu.size() != 1 || cu[0] < 1) {
      return Invalid(in.cu_seqlens_q, "has shape " + ShapeString(cu),
                     "have shape [batch + 1] with packed q");
    }
    a->batch = cu[0] - 1;
    AITER_FFI_RETURN_IF_ERROR(
        Check(in.k, type, {a->seqlen_k, a->nhead_k, a->hdim_q}));
    AITER_FFI_RETURN_IF_ERROR(
        Check(in.v, type, {a->seqlen_k, a->nhead_k, a->hdim_v}));
  } else {
    a->batch = q[0];
    AITER_FFI_RETURN_IF_ERROR(
        Check(in.k, type, {a->batch, a->seqlen_k, a->nhead_k, a->hdim_q}));
    AITER_FFI_RETURN_IF_ERROR(
        Check(in.v, type, {a->batch, a->seqlen_k, a->nhead_k, a->hdim_v}));
  }
  a->q_ptr = in.q.untyped_data();
  a->k_ptr = in.k.untyped_data();
  a->v_ptr = in.v.untyped_data();
  SetStrides(a->seqlen_q, a->nhead_q, a->hdim_q, &a->stride_q,
             &a->nhead_stride_q, &a->batch_stride_q);
  SetStrides(a->seqlen_k, a->nhead_k, a->hdim_q, &a->stride_k,
             &a->nhead_stride_k, &a->batch_stride_k);
  SetStrides(a->seqlen_k, a->nhead_k, a->hdim_v, &a->stride_v,
             &a->nhead_stride_v, &a->batch_stride_v);
  SetStrides(a->seqlen_q, a->nhead_q, a->hdim_v, &a->stride_o,
             &a->nhead_stride_o, &a->batch_stride_o);
  a->nhead_stride_lse = a->seqlen_q;
  a->batch_stride_lse = a->nhead_q * a->seqlen_q;

  int64_t starts = a->batch + 1;
  AITER_FFI_RETURN_IF_ERROR(
      Optional(in.cu_seqlens_q, ffi::S32, {starts}, &a->cu_seqlen_q_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(in.cu_seqlens_k, ffi::S32, {starts}, &a->cu_seqlen_k_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(in.cu_seqlens_q_padded, ffi::S32, {starts}, &a->seqstart_q_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(in.cu_seqlens_k_padded, ffi::S32, {starts}, &a->seqstart_k_ptr));
  if (packed) {
    if (a->cu_seqlen_k_ptr == nullptr) {
      return Invalid(in.cu_seqlens_k, "is absent", "be given with packed k");
    }
    // Without padding, the starts in memory are the lengths' sums.
    if (a->seqstart_q_ptr == nullptr) {
      a->seqstart_q_ptr = a->cu_seqlen_q_ptr;
      a->cu_seqlen_q_ptr = nullptr;
    }
    if (a->seqstart_k_ptr == nullptr) {
      a->seqstart_k_ptr = a->cu_seqlen_k_ptr;
      a->cu_seqlen_k_ptr = nullptr;
    }
  } else {
    if (a->seqstart_q_ptr != nullptr) {
      return Invalid(in.cu_seqlens_q_padded, "is given",
                     "be absent with dense q");
    }
    if (a->seqstart_k_ptr != nullptr) {
      return Invalid(in.cu_seqlens_k_padded, "is given",
                     "be absent with dense k");
    }
  }

  if (IsPresent(in.bias)) {
    AITER_FFI_RETURN_IF_ERROR(SetPlanes(in.bias, *a, &a->key_stride_bias,
                                        &a->stride_bias, &a->nhead_stride_bias,
                                        &a->batch_stride_bias));
    a->bias_is_f32 = in.bias.element_type() == ffi::F32;
    if (!a->bias_is_f32) {
      AITER_FFI_RETURN_IF_ERROR(CheckType(in.bias, type));
    }
    a->bias_ptr = Address(in.bias);
    a->bias_batch = in.bias.dimensions()[0];
    a->bias_nhead = in.bias.dimensions()[1];
  }
  if (IsPresent(in.mask)) {
    AITER_FFI_RETURN_IF_ERROR(SetPlanes(in.mask, *a, &a->key_stride_mask,
                                        &a->stride_mask, &a->nhead_stride_mask,
                                        &a->batch_stride_mask));
    AITER_FFI_RETURN_IF_ERROR(CheckType(in.mask, ffi::PRED));
    a->mask_ptr = Address(in.mask);
  }
  AITER_FFI_RETURN_IF_ERROR(Optional(
      in.alibi_slopes, ffi::F32, {a->batch, a->nhead_q}, &a->alibi_slopes_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(in.sink, ffi::F32, {a->batch, a->nhead_q}, &a->sink_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional(in.dropout_state, ffi::U32,
                                     {a->batch, a->nhead_q, 6},
                                     &a->dropout_state_ptr));

  a->is_exact = attrs.exact;
  a->is_one_row = attrs.one_row;
  a->scale_s = attrs.softmax_scale;
  a->logits_soft_cap = attrs.logits_soft_cap;
  a->p_drop = attrs.dropout_p;
  a->window_size_left = attrs.window_left;
  a->window_size_right = attrs.window_right;
  a->sink_size = attrs.sink_tokens;
  a->is_top_left = attrs.top_left;
  a->min_seqlen_q = attrs.min_seqlen_q;
  return ffi::Error::Success();
}

// Checks an array shaped like out.
ffi::Error LikeOut(const Buffer& buffer, const Buffer& q,
                   const aiter::mha_args& a) {
  ffi::DataType type = q.element_type();
  return a.is_group_mode
             ? Check(buffer, type, {a.seqlen_q, a.nhead_q, a.hdim_v})
             : Check(buffer, type, {a.batch, a.seqlen_q, a.nhead_q, a.hdim_v});
}

// Likewise an array shaped like lse.
ffi::Error LikeLse(const Buffer& buffer, const aiter::mha_args& a) {
  return a.is_group_mode
             ? Check(buffer, ffi::F32, {a.nhead_q, a.seqlen_q})
             : Check(buffer, ffi::F32, {a.batch, a.nhead_q, a.seqlen_q});
}

// Checks and sets what dropout keeps, if it is there.
template <typename Pointer>
ffi::Error SetKept(const Buffer& buffer, const aiter::mha_args& a,
                   Pointer* address) {
  return Optional(buffer, ffi::S32,
                  {a.batch, a.nhead_q, aiter::mha_kept_words(a)}, address);
}

ffi::Error SetFwd(const FwdBuffers& b, const MhaAttrs& attrs,
                  aiter::mha_fwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon(b, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(LikeOut(b.out, b.q, *a));
  AITER_FFI_RETURN_IF_ERROR(LikeLse(b.lse, *a));
  AITER_FFI_RETURN_IF_ERROR(SetKept(b.kept, *a, &a->kept_ptr));
  a->o_ptr = b.out.untyped_data();
  a->lse_ptr = b.lse.untyped_data();
  return ffi::Error::Success();
}

// Checks and sets what every way to compute gradients takes and gives.
template <typename Buffers>
ffi::Error SetGradients(const Buffers& b, const MhaAttrs& attrs,
                        aiter::mha_bwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon(b, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(LikeOut(b.dout, b.q, *a));
  AITER_FFI_RETURN_IF_ERROR(LikeOut(b.out, b.q, *a));
  AITER_FFI_RETURN_IF_ERROR(LikeLse(b.lse, *a));
  AITER_FFI_RETURN_IF_ERROR(LikeLse(b.delta, *a));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.dq, b.q));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.dk, b.k));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.dv, b.v));
  if (IsPresent(b.dlse)) AITER_FFI_RETURN_IF_ERROR(LikeLse(b.dlse, *a));
  a->do_ptr = b.dout.untyped_data();
  a->o_ptr = b.out.untyped_data();
  a->lse_ptr = b.lse.untyped_data();
  a->dlse_ptr = Address(b.dlse);
  a->dq_ptr = b.dq.untyped_data();
  a->dk_ptr = b.dk.untyped_data();
  a->dv_ptr = b.dv.untyped_data();
  a->d_ptr = b.delta.untyped_data();
  a->stride_do = a->stride_o;
  a->nhead_stride_do = a->nhead_stride_o;
  a->batch_stride_do = a->batch_stride_o;
  a->stride_dq = a->stride_q;
  a->nhead_stride_dq = a->nhead_stride_q;
  a->batch_stride_dq = a->batch_stride_q;
  a->stride_dk = a->stride_k;
  a->nhead_stride_dk = a->nhead_stride_k;
  a->batch_stride_dk = a->batch_stride_k;
  a->stride_dv = a->stride_v;
  a->nhead_stride_dv = a->nhead_stride_v;
  a->batch_stride_dv = a->batch_stride_v;
  return ffi::Error::Success();
}

ffi::Error SetBwd(const BwdBuffers& b, const MhaAttrs& attrs,
                  aiter::mha_bwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetGradients(b, attrs, a));
  if (IsPresent(b.dslopes)) AITER_FFI_RETURN_IF_ERROR(LikeLse(b.dslopes, *a));
  AITER_FFI_RETURN_IF_ERROR(Optional(
      b.dbias, ffi::F32,
      {a->bias_batch, a->bias_nhead, a->seqlen_q, a->seqlen_k}, &a->dbias_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.dsink, ffi::F32, {a->batch, a->nhead_q}, &a->d_sink_ptr));
  a->d_slopes_ptr = Address(b.dslopes);
  return ffi::Error::Success();
}

ffi::Error SetOnePass(const OnePassBuffers& b, const MhaAttrs& attrs,
                      aiter::mha_one_pass_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetGradients(b, attrs, a));
  const int64_t batches = a->is_group_mode ? 1 : a->batch;
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.dq_sums, ffi::F32,
            {batches, a->nhead_q, aiter::mha_one_pass_rows(*a, a->seqlen_q),
             aiter::mha_one_pass_columns(*a)}));
  for (auto [buffer, address] : {std::pair(&b.dk_sums, &a->dk_sums_ptr),
                                 std::pair(&b.dv_sums, &a->dv_sums_ptr)}) {
    AITER_FFI_RETURN_IF_ERROR(Optional(
        *buffer, ffi::F32,
        {batches, a->nhead_k, aiter::mha_one_pass_rows(*a, a->seqlen_k),
         aiter::mha_one_pass_columns(*a)},
        address));
  }
  AITER_FFI_RETURN_IF_ERROR(Optional(
      b.turns, ffi::S32, {aiter::mha_one_pass_turns(*a)}, &a->turns_ptr));
  AITER_FFI_RETURN_IF_ERROR(SetKept(b.kept, *a, &a->kept_ptr));
  a->ordered = attrs.deterministic;
  a->dq_sums_ptr = b.dq_sums.untyped_data();
  return ffi::Error::Success();
}

ffi::Error SetDscores(const DscoresBuffers& b, const MhaAttrs& attrs,
                      aiter::mha_dscores_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetGradients(b, attrs, a));
  // Without a dimension of the batch they are scratch.
  Buffer::Dimensions dims = b.dscores.dimensions();
  if (dims.size() == 3) {
    a->dscores_nhead = dims[0];
    a->max_seqlen_k = dims[2];  // Of a packed batch.
    AITER_FFI_RETURN_IF_ERROR(Check(
        b.dscores, b.q.element_type(),
        {dims[0], aiter::mha_dscores_rows(*a), aiter::mha_dscores_row(*a)}));
  } else {
    AITER_FFI_RETURN_IF_ERROR(
        Check(b.dscores, b.q.element_type(),
              {a->batch, a->nhead_q, a->seqlen_q, a->seqlen_k}));
  }
  a->dscores_ptr = b.dscores.untyped_data();
  return ffi::Error::Success();
}

const Family kMha({TargetOf<SetFwd>(), TargetOf<SetBwd>(),
                   TargetOf<SetOnePass>(), TargetOf<SetDscores>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
