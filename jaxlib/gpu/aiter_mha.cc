// SPDX-License-Identifier: Apache-2.0

#include "jaxlib/gpu/aiter_mha.h"

#include <cstdint>
#include <utility>

#include "aiter/mha.h"
#include "aiter/status.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

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
  bool deterministic;  // The kernels always are.
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::MhaAttrs, StructMember<float>("softmax_scale"),
    StructMember<float>("logits_soft_cap"), StructMember<float>("dropout_p"),
    StructMember<int64_t>("window_left"), StructMember<int64_t>("window_right"),
    StructMember<int64_t>("sink_tokens"), StructMember<bool>("top_left"),
    StructMember<int64_t>("min_seqlen_q"), StructMember<bool>("deterministic"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

// Operands that forward and backward share, in their order.
struct Operands {
  AnyBuffer q, k, v;
  AnyBuffer cu_seqlens_q, cu_seqlens_k;
  AnyBuffer cu_seqlens_q_padded, cu_seqlens_k_padded;
  AnyBuffer bias, alibi_slopes, sink, dropout_state;
};

// Row, head and batch strides of a contiguous [batch,] rows, heads, dim.
void SetStrides(int64_t rows, int64_t heads, int64_t dim, int64_t* stride,
                int64_t* nhead_stride, int64_t* batch_stride) {
  *stride = heads * dim;
  *nhead_stride = dim;
  *batch_stride = rows * heads * dim;
}

// Checks q, k, v and whatever is optional, and fills in all of `a`.
ffi::Error SetCommon(const Operands& in, const MhaAttrs& attrs,
                     aiter::mha_args* a) {
  ffi::DataType type = in.q.element_type();
  if (type != ffi::F16 && type != ffi::BF16) {
    return Invalid("q", "has dtype " + TypeName(type),
                   "have dtype float16 or bfloat16");
  }
  a->data_type =
      type == ffi::F16 ? aiter::DataType::kFp16 : aiter::DataType::kBf16;

  AnyBuffer::Dimensions q = in.q.dimensions();
  AnyBuffer::Dimensions k = in.k.dimensions();
  AnyBuffer::Dimensions v = in.v.dimensions();
  if (q.size() != 3 && q.size() != 4) {
    return Invalid("q", "has shape " + ShapeString(q),
                   "have rank 4 (dense) or 3 (packed)");
  }
  bool packed = q.size() == 3;
  if (k.size() != q.size()) {
    return Invalid("k", "has shape " + ShapeString(k), "have the rank of q");
  }
  if (v.size() != q.size()) {
    return Invalid("v", "has shape " + ShapeString(v), "have the rank of q");
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
    AnyBuffer::Dimensions cu = in.cu_seqlens_q.dimensions();
    if (cu.size() != 1 || cu[0] < 1) {
      return Invalid("cu_seqlens_q", "has shape " + ShapeString(cu),
                     "have shape [batch + 1] with packed q");
    }
    a->batch = cu[0] - 1;
    AITER_FFI_RETURN_IF_ERROR(
        Check("k", in.k, type, {a->seqlen_k, a->nhead_k, a->hdim_q}));
    AITER_FFI_RETURN_IF_ERROR(
        Check("v", in.v, type, {a->seqlen_k, a->nhead_k, a->hdim_v}));
  } else {
    a->batch = q[0];
    AITER_FFI_RETURN_IF_ERROR(
        Check("k", in.k, type, {a->batch, a->seqlen_k, a->nhead_k, a->hdim_q}));
    AITER_FFI_RETURN_IF_ERROR(
        Check("v", in.v, type, {a->batch, a->seqlen_k, a->nhead_k, a->hdim_v}));
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
  AITER_FFI_RETURN_IF_ERROR(Optional("cu_seqlens_q", in.cu_seqlens_q, ffi::S32,
                                     {starts}, &a->cu_seqlen_q_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional("cu_seqlens_k", in.cu_seqlens_k, ffi::S32,
                                     {starts}, &a->cu_seqlen_k_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional("cu_seqlens_q_padded",
                                     in.cu_seqlens_q_padded, ffi::S32, {starts},
                                     &a->seqstart_q_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional("cu_seqlens_k_padded",
                                     in.cu_seqlens_k_padded, ffi::S32, {starts},
                                     &a->seqstart_k_ptr));
  if (packed) {
    if (a->cu_seqlen_k_ptr == nullptr) {
      return Invalid("cu_seqlens_k", "is absent", "be given with packed k");
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
      return Invalid("cu_seqlens_q_padded", "is given",
                     "be absent with dense q");
    }
    if (a->seqstart_k_ptr != nullptr) {
      return Invalid("cu_seqlens_k_padded", "is given",
                     "be absent with dense k");
    }
  }

  if (IsPresent(in.bias)) {
    AnyBuffer::Dimensions bias = in.bias.dimensions();
    if (packed) return Invalid("bias", "is given", "be absent with packed q");
    if (bias.size() != 4 || (bias[0] != 1 && bias[0] != a->batch) ||
        (bias[1] != 1 && bias[1] != a->nhead_q) || bias[2] != a->seqlen_q ||
        bias[3] != a->seqlen_k) {
      return Invalid(
          "bias", "has shape " + ShapeString(bias),
          "broadcast in its first two dimensions to " +
              ShapeString({a->batch, a->nhead_q, a->seqlen_q, a->seqlen_k}));
    }
    a->bias_is_f32 = in.bias.element_type() == ffi::F32;
    if (!a->bias_is_f32) {
      AITER_FFI_RETURN_IF_ERROR(CheckType("bias", in.bias, type));
    }
    a->bias_ptr = Address(in.bias);
    a->bias_batch = bias[0];
    a->bias_nhead = bias[1];
    a->stride_bias = a->seqlen_k;
    int64_t plane = a->seqlen_q * a->seqlen_k;
    a->nhead_stride_bias = a->bias_nhead == 1 ? 0 : plane;
    a->batch_stride_bias = a->bias_batch == 1 ? 0 : a->bias_nhead * plane;
  }
  AITER_FFI_RETURN_IF_ERROR(Optional("alibi_slopes", in.alibi_slopes, ffi::F32,
                                     {a->batch, a->nhead_q},
                                     &a->alibi_slopes_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional("sink", in.sink, ffi::F32,
                                     {a->batch, a->nhead_q}, &a->sink_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional("dropout_state", in.dropout_state,
                                     ffi::U32, {a->batch, a->nhead_q, 4},
                                     &a->dropout_state_ptr));

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

// Checks an array shaped like out and returns where it lies.
ffi::Error LikeOut(const char* name, const AnyBuffer& buffer,
                   const Operands& in, const aiter::mha_args& a) {
  ffi::DataType type = in.q.element_type();
  return a.is_group_mode
             ? Check(name, buffer, type, {a.seqlen_q, a.nhead_q, a.hdim_v})
             : Check(name, buffer, type,
                     {a.batch, a.seqlen_q, a.nhead_q, a.hdim_v});
}

// Likewise an array shaped like lse.
ffi::Error LikeLse(const char* name, const AnyBuffer& buffer,
                   const aiter::mha_args& a) {
  return a.is_group_mode
             ? Check(name, buffer, ffi::F32, {a.nhead_q, a.seqlen_q})
             : Check(name, buffer, ffi::F32, {a.batch, a.nhead_q, a.seqlen_q});
}

ffi::Error SetFwd(const Operands& in, const AnyBuffer& out,
                  const AnyBuffer& lse, const MhaAttrs& attrs,
                  aiter::mha_fwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon(in, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(LikeOut("out", out, in, *a));
  AITER_FFI_RETURN_IF_ERROR(LikeLse("lse", lse, *a));
  a->o_ptr = out.untyped_data();
  a->lse_ptr = lse.untyped_data();
  return ffi::Error::Success();
}

struct BwdOperands {
  AnyBuffer dout, out, lse, dlse;
};

struct BwdResults {
  AnyBuffer dq, dk, dv, dbias, dsink, dslopes, delta;
};

ffi::Error SetBwd(const Operands& in, const BwdOperands& bwd,
                  const BwdResults& results, const MhaAttrs& attrs,
                  aiter::mha_bwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon(in, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(LikeOut("dout", bwd.dout, in, *a));
  AITER_FFI_RETURN_IF_ERROR(LikeOut("out", bwd.out, in, *a));
  AITER_FFI_RETURN_IF_ERROR(LikeLse("lse", bwd.lse, *a));
  AITER_FFI_RETURN_IF_ERROR(LikeLse("delta", results.delta, *a));
  AITER_FFI_RETURN_IF_ERROR(CheckLike("dq", results.dq, in.q));
  AITER_FFI_RETURN_IF_ERROR(CheckLike("dk", results.dk, in.k));
  AITER_FFI_RETURN_IF_ERROR(CheckLike("dv", results.dv, in.v));
  if (IsPresent(bwd.dlse)) {
    AITER_FFI_RETURN_IF_ERROR(LikeLse("dlse", bwd.dlse, *a));
  }
  if (IsPresent(results.dslopes)) {
    AITER_FFI_RETURN_IF_ERROR(LikeLse("dslopes", results.dslopes, *a));
  }
  AITER_FFI_RETURN_IF_ERROR(Optional(
      "dbias", results.dbias, ffi::F32,
      {a->bias_batch, a->bias_nhead, a->seqlen_q, a->seqlen_k}, &a->dbias_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional("dsink", results.dsink, ffi::F32,
                                     {a->batch, a->nhead_q}, &a->d_sink_ptr));
  a->do_ptr = bwd.dout.untyped_data();
  a->o_ptr = bwd.out.untyped_data();
  a->lse_ptr = bwd.lse.untyped_data();
  a->dlse_ptr = Address(bwd.dlse);
  a->dq_ptr = results.dq.untyped_data();
  a->dk_ptr = results.dk.untyped_data();
  a->dv_ptr = results.dv.untyped_data();
  a->d_slopes_ptr = Address(results.dslopes);
  a->d_ptr = results.delta.untyped_data();
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

ffi::Error FwdInitialize(AnyBuffer q, AnyBuffer k, AnyBuffer v,
                         AnyBuffer cu_seqlens_q, AnyBuffer cu_seqlens_k,
                         AnyBuffer cu_seqlens_q_padded,
                         AnyBuffer cu_seqlens_k_padded, AnyBuffer bias,
                         AnyBuffer alibi_slopes, AnyBuffer sink,
                         AnyBuffer dropout_state, ffi::Result<AnyBuffer> out,
                         ffi::Result<AnyBuffer> lse, MhaAttrs attrs) {
  aiter::mha_fwd_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetFwd({q, k, v, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
              cu_seqlens_k_padded, bias, alibi_slopes, sink, dropout_state},
             *out, *lse, attrs, &args));
  return ToError(aiter::mha_fwd_prepare(args));
}

ffi::Error Fwd(gpuStream_t stream, AnyBuffer q, AnyBuffer k, AnyBuffer v,
               AnyBuffer cu_seqlens_q, AnyBuffer cu_seqlens_k,
               AnyBuffer cu_seqlens_q_padded, AnyBuffer cu_seqlens_k_padded,
               AnyBuffer bias, AnyBuffer alibi_slopes, AnyBuffer sink,
               AnyBuffer dropout_state, ffi::Result<AnyBuffer> out,
               ffi::Result<AnyBuffer> lse, MhaAttrs attrs) {
  aiter::mha_fwd_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetFwd({q, k, v, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
              cu_seqlens_k_padded, bias, alibi_slopes, sink, dropout_state},
             *out, *lse, attrs, &args));
  return ToError(aiter::mha_fwd(args, stream));
}

ffi::Error BwdInitialize(AnyBuffer dout, AnyBuffer q, AnyBuffer k, AnyBuffer v,
                         AnyBuffer out, AnyBuffer lse, AnyBuffer dlse,
                         AnyBuffer cu_seqlens_q, AnyBuffer cu_seqlens_k,
                         AnyBuffer cu_seqlens_q_padded,
                         AnyBuffer cu_seqlens_k_padded, AnyBuffer bias,
                         AnyBuffer alibi_slopes, AnyBuffer sink,
                         AnyBuffer dropout_state, ffi::Result<AnyBuffer> dq,
                         ffi::Result<AnyBuffer> dk, ffi::Result<AnyBuffer> dv,
                         ffi::Result<AnyBuffer> dbias,
                         ffi::Result<AnyBuffer> dsink,
                         ffi::Result<AnyBuffer> dslopes,
                         ffi::Result<AnyBuffer> delta, MhaAttrs attrs) {
  aiter::mha_bwd_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetBwd({q, k, v, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
              cu_seqlens_k_padded, bias, alibi_slopes, sink, dropout_state},
             {dout, out, lse, dlse},
             {*dq, *dk, *dv, *dbias, *dsink, *dslopes, *delta}, attrs, &args));
  return ToError(aiter::mha_bwd_prepare(args));
}

ffi::Error Bwd(gpuStream_t stream, AnyBuffer dout, AnyBuffer q, AnyBuffer k,
               AnyBuffer v, AnyBuffer out, AnyBuffer lse, AnyBuffer dlse,
               AnyBuffer cu_seqlens_q, AnyBuffer cu_seqlens_k,
               AnyBuffer cu_seqlens_q_padded, AnyBuffer cu_seqlens_k_padded,
               AnyBuffer bias, AnyBuffer alibi_slopes, AnyBuffer sink,
               AnyBuffer dropout_state, ffi::Result<AnyBuffer> dq,
               ffi::Result<AnyBuffer> dk, ffi::Result<AnyBuffer> dv,
               ffi::Result<AnyBuffer> dbias, ffi::Result<AnyBuffer> dsink,
               ffi::Result<AnyBuffer> dslopes, ffi::Result<AnyBuffer> delta,
               MhaAttrs attrs) {
  aiter::mha_bwd_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetBwd({q, k, v, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
              cu_seqlens_k_padded, bias, alibi_slopes, sink, dropout_state},
             {dout, out, lse, dlse},
             {*dq, *dk, *dv, *dbias, *dsink, *dslopes, *delta}, attrs, &args));
  return ToError(aiter::mha_bwd(args, stream));
}

// Adds the operands, results and attributes of an operation to a binding.
template <typename Binding>
auto BindFwd(Binding binding) {
  return std::move(binding)
      .template Arg<AnyBuffer>()  // q
      .template Arg<AnyBuffer>()  // k
      .template Arg<AnyBuffer>()  // v
      .template Arg<AnyBuffer>()  // cu_seqlens_q
      .template Arg<AnyBuffer>()  // cu_seqlens_k
      .template Arg<AnyBuffer>()  // cu_seqlens_q_padded
      .template Arg<AnyBuffer>()  // cu_seqlens_k_padded
      .template Arg<AnyBuffer>()  // bias
      .template Arg<AnyBuffer>()  // alibi_slopes
      .template Arg<AnyBuffer>()  // sink
      .template Arg<AnyBuffer>()  // dropout_state
      .template Ret<AnyBuffer>()  // out
      .template Ret<AnyBuffer>()  // lse
      .template Attrs<MhaAttrs>();
}

template <typename Binding>
auto BindBwd(Binding binding) {
  return std::move(binding)
      .template Arg<AnyBuffer>()  // dout
      .template Arg<AnyBuffer>()  // q
      .template Arg<AnyBuffer>()  // k
      .template Arg<AnyBuffer>()  // v
      .template Arg<AnyBuffer>()  // out
      .template Arg<AnyBuffer>()  // lse
      .template Arg<AnyBuffer>()  // dlse
      .template Arg<AnyBuffer>()  // cu_seqlens_q
      .template Arg<AnyBuffer>()  // cu_seqlens_k
      .template Arg<AnyBuffer>()  // cu_seqlens_q_padded
      .template Arg<AnyBuffer>()  // cu_seqlens_k_padded
      .template Arg<AnyBuffer>()  // bias
      .template Arg<AnyBuffer>()  // alibi_slopes
      .template Arg<AnyBuffer>()  // sink
      .template Arg<AnyBuffer>()  // dropout_state
      .template Ret<AnyBuffer>()  // dq
      .template Ret<AnyBuffer>()  // dk
      .template Ret<AnyBuffer>()  // dv
      .template Ret<AnyBuffer>()  // dbias
      .template Ret<AnyBuffer>()  // dsink
      .template Ret<AnyBuffer>()  // dslopes
      .template Ret<AnyBuffer>()  // delta
      .template Attrs<MhaAttrs>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterMhaFwdInitialize, FwdInitialize,
                              BindFwd(BindInitialize()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterMhaFwd, Fwd, BindFwd(BindExecute()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterMhaBwdInitialize, BwdInitialize,
                              BindBwd(BindInitialize()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterMhaBwd, Bwd, BindBwd(BindExecute()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax::JAX_GPU_NAMESPACE
