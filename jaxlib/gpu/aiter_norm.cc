// SPDX-License-Identifier: Apache-2.0

#include "jaxlib/gpu/aiter_norm.h"

#include <cstdint>
#include <utility>

#include "aiter/norm.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// Attributes of every operation.
struct NormAttrs {
  float epsilon;
  bool layer;
  bool gemma;
  bool t5;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax::JAX_GPU_NAMESPACE::NormAttrs,
                                      StructMember<float>("epsilon"),
                                      StructMember<bool>("layer"),
                                      StructMember<bool>("gemma"),
                                      StructMember<bool>("t5"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

// Checks the rows that are normalised and gamma, and fills in what forward and
// backward share.
ffi::Error SetCommon(const char* name, const Buffer& x, const Buffer& gamma,
                     const NormAttrs& attrs, aiter::norm_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(name, x, &a->data_type));
  Buffer::Dimensions dims = x.dimensions();
  if (dims.size() != 2) {
    return Invalid(name, "has shape " + ShapeString(dims),
                   "have shape [rows, cols]");
  }
  a->rows = dims[0];
  a->cols = dims[1];
  a->weights_are_f32 = gamma.element_type() == ffi::F32;
  AITER_FFI_RETURN_IF_ERROR(
      Check("gamma", gamma, a->weights_are_f32 ? ffi::F32 : x.element_type(),
            {a->cols}));
  a->gamma_ptr = gamma.untyped_data();
  a->is_layer_norm = attrs.layer;
  a->is_gemma = attrs.gemma;
  a->is_t5 = attrs.t5;
  return ffi::Error::Success();
}

// What is normalised and its residual, as every forward call has them.
struct RowsBuffers {
  Buffer x, residual, gamma, beta;
  Buffer residual_out;
};

ffi::Error SetRows(const RowsBuffers& b, const NormAttrs& attrs,
                   aiter::norm_rows_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon("x", b.x, b.gamma, attrs, a));
  ffi::DataType type = b.x.element_type();
  AITER_FFI_RETURN_IF_ERROR(Optional("residual", b.residual, type,
                                     {a->rows, a->cols}, &a->residual_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional("residual_out", b.residual_out, type,
                                     {a->rows, a->cols}, &a->residual_out_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional("beta", b.beta, b.gamma.element_type(),
                                     {a->cols}, &a->beta_ptr));
  a->x_ptr = b.x.untyped_data();
  a->epsilon = attrs.epsilon;
  return ffi::Error::Success();
}

struct FwdBuffers {
  RowsBuffers rows;
  Buffer y, mean, rstd;
};

ffi::Error SetFwd(const FwdBuffers& b, const NormAttrs& attrs,
                  aiter::norm_fwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetRows(b.rows, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(CheckLike("y", b.y, b.rows.x));
  AITER_FFI_RETURN_IF_ERROR(Check("mean", b.mean, ffi::F32, {a->rows}));
  AITER_FFI_RETURN_IF_ERROR(Check("rstd", b.rstd, ffi::F32, {a->rows}));
  a->y_ptr = b.y.untyped_data();
  a->mean_ptr = b.mean.untyped_data();
  a->rstd_ptr = b.rstd.untyped_data();
  return ffi::Error::Success();
}

struct QuantBuffers {
  RowsBuffers rows;
  Buffer smooth;
  Buffer q, scale;
};

ffi::Error SetQuant(const QuantBuffers& b, const NormAttrs& attrs,
                    aiter::norm_quant_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetRows(b.rows, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(
      Optional("smooth", b.smooth, ffi::F32, {a->cols}, &a->smooth_ptr));
  AITER_FFI_RETURN_IF_ERROR(QuantTypeOf("q", b.q, &a->quant_type));
  if (a->quant_type == aiter::DataType::kE2m1) {
    AITER_FFI_RETURN_IF_ERROR(
        CheckShape("q", b.q, Shape{a->rows, a->cols / 2}));
    AITER_FFI_RETURN_IF_ERROR(
        Check("scale", b.scale, ffi::U8, {a->rows, a->cols / 32}));
  } else {
    AITER_FFI_RETURN_IF_ERROR(CheckShape("q", b.q, Shape{a->rows, a->cols}));
    AITER_FFI_RETURN_IF_ERROR(Check("scale", b.scale, ffi::F32, {a->rows}));
  }
  a->q_ptr = b.q.untyped_data();
  a->scale_ptr = b.scale.untyped_data();
  return ffi::Error::Success();
}

struct BwdBuffers {
  Buffer dy, dresidual_out, s, gamma, mean, rstd;
  Buffer dx, dgamma, dbeta, dgamma_parts, dbeta_parts;
};

ffi::Error SetBwd(const BwdBuffers& b, const NormAttrs& attrs,
                  aiter::norm_bwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon("s", b.s, b.gamma, attrs, a));
  ffi::DataType type = b.s.element_type();
  AITER_FFI_RETURN_IF_ERROR(CheckLike("dy", b.dy, b.s));
  AITER_FFI_RETURN_IF_ERROR(CheckLike("dx", b.dx, b.s));
  AITER_FFI_RETURN_IF_ERROR(Check("dgamma", b.dgamma, ffi::F32, {a->cols}));
  AITER_FFI_RETURN_IF_ERROR(Check("mean", b.mean, ffi::F32, {a->rows}));
  AITER_FFI_RETURN_IF_ERROR(Check("rstd", b.rstd, ffi::F32, {a->rows}));
  Buffer::Dimensions parts = b.dgamma_parts.dimensions();
  a->parts = parts.size() == 2 ? parts[0] : 0;
  AITER_FFI_RETURN_IF_ERROR(
      Check("dgamma_parts", b.dgamma_parts, ffi::F32, {a->parts, a->cols}));
  AITER_FFI_RETURN_IF_ERROR(Optional("dresidual_out", b.dresidual_out, type,
                                     {a->rows, a->cols},
                                     &a->dresidual_out_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional("dbeta", b.dbeta, ffi::F32, {a->cols}, &a->dbeta_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional("dbeta_parts", b.dbeta_parts, ffi::F32,
                                     {a->parts, a->cols}, &a->dbeta_parts_ptr));
  a->s_ptr = b.s.untyped_data();
  a->dy_ptr = b.dy.untyped_data();
  a->mean_ptr = b.mean.untyped_data();
  a->rstd_ptr = b.rstd.untyped_data();
  a->dx_ptr = b.dx.untyped_data();
  a->dgamma_ptr = b.dgamma.untyped_data();
  a->dgamma_parts_ptr = b.dgamma_parts.untyped_data();
  return ffi::Error::Success();
}

ffi::Error FwdInitialize(Buffer x, Buffer residual, Buffer gamma, Buffer beta,
                         ffi::Result<Buffer> y,
                         ffi::Result<Buffer> residual_out,
                         ffi::Result<Buffer> mean, ffi::Result<Buffer> rstd,
                         NormAttrs attrs) {
  aiter::norm_fwd_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetFwd({{x, residual, gamma, beta, *residual_out}, *y, *mean, *rstd},
             attrs, &args));
  return ToError(aiter::norm_fwd_prepare(args));
}

ffi::Error Fwd(gpuStream_t stream, Buffer x, Buffer residual, Buffer gamma,
               Buffer beta, ffi::Result<Buffer> y,
               ffi::Result<Buffer> residual_out, ffi::Result<Buffer> mean,
               ffi::Result<Buffer> rstd, NormAttrs attrs) {
  aiter::norm_fwd_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetFwd({{x, residual, gamma, beta, *residual_out}, *y, *mean, *rstd},
             attrs, &args));
  return ToError(aiter::norm_fwd(args, stream));
}

ffi::Error QuantInitialize(Buffer x, Buffer residual, Buffer gamma, Buffer beta,
                           Buffer smooth, ffi::Result<Buffer> q,
                           ffi::Result<Buffer> scale,
                           ffi::Result<Buffer> residual_out, NormAttrs attrs) {
  aiter::norm_quant_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetQuant({{x, residual, gamma, beta, *residual_out}, smooth, *q, *scale},
               attrs, &args));
  return ToError(aiter::norm_quant_prepare(args));
}

ffi::Error Quant(gpuStream_t stream, Buffer x, Buffer residual, Buffer gamma,
                 Buffer beta, Buffer smooth, ffi::Result<Buffer> q,
                 ffi::Result<Buffer> scale, ffi::Result<Buffer> residual_out,
                 NormAttrs attrs) {
  aiter::norm_quant_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetQuant({{x, residual, gamma, beta, *residual_out}, smooth, *q, *scale},
               attrs, &args));
  return ToError(aiter::norm_quant(args, stream));
}

ffi::Error BwdInitialize(Buffer dy, Buffer dresidual_out, Buffer s,
                         Buffer gamma, Buffer mean, Buffer rstd,
                         ffi::Result<Buffer> dx, ffi::Result<Buffer> dgamma,
                         ffi::Result<Buffer> dbeta,
                         ffi::Result<Buffer> dgamma_parts,
                         ffi::Result<Buffer> dbeta_parts, NormAttrs attrs) {
  aiter::norm_bwd_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetBwd({dy, dresidual_out, s, gamma, mean, rstd, *dx, *dgamma, *dbeta,
              *dgamma_parts, *dbeta_parts},
             attrs, &args));
  return ToError(aiter::norm_bwd_prepare(args));
}

ffi::Error Bwd(gpuStream_t stream, Buffer dy, Buffer dresidual_out, Buffer s,
               Buffer gamma, Buffer mean, Buffer rstd, ffi::Result<Buffer> dx,
               ffi::Result<Buffer> dgamma, ffi::Result<Buffer> dbeta,
               ffi::Result<Buffer> dgamma_parts,
               ffi::Result<Buffer> dbeta_parts, NormAttrs attrs) {
  aiter::norm_bwd_args args;
  AITER_FFI_RETURN_IF_ERROR(
      SetBwd({dy, dresidual_out, s, gamma, mean, rstd, *dx, *dgamma, *dbeta,
              *dgamma_parts, *dbeta_parts},
             attrs, &args));
  return ToError(aiter::norm_bwd(args, stream));
}

// Adds the operands, results and attributes of an operation to a binding.
template <typename Binding>
auto BindFwd(Binding binding) {
  return std::move(binding)
      .template Arg<Buffer>()  // x
      .template Arg<Buffer>()  // residual
      .template Arg<Buffer>()  // gamma
      .template Arg<Buffer>()  // beta
      .template Ret<Buffer>()  // y
      .template Ret<Buffer>()  // residual_out
      .template Ret<Buffer>()  // mean
      .template Ret<Buffer>()  // rstd
      .template Attrs<NormAttrs>();
}

template <typename Binding>
auto BindQuant(Binding binding) {
  return std::move(binding)
      .template Arg<Buffer>()  // x
      .template Arg<Buffer>()  // residual
      .template Arg<Buffer>()  // gamma
      .template Arg<Buffer>()  // beta
      .template Arg<Buffer>()  // smooth
      .template Ret<Buffer>()  // q
      .template Ret<Buffer>()  // scale
      .template Ret<Buffer>()  // residual_out
      .template Attrs<NormAttrs>();
}

template <typename Binding>
auto BindBwd(Binding binding) {
  return std::move(binding)
      .template Arg<Buffer>()  // dy
      .template Arg<Buffer>()  // dresidual_out
      .template Arg<Buffer>()  // s
      .template Arg<Buffer>()  // gamma
      .template Arg<Buffer>()  // mean
      .template Arg<Buffer>()  // rstd
      .template Ret<Buffer>()  // dx
      .template Ret<Buffer>()  // dgamma
      .template Ret<Buffer>()  // dbeta
      .template Ret<Buffer>()  // dgamma_parts
      .template Ret<Buffer>()  // dbeta_parts
      .template Attrs<NormAttrs>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterNormFwdInitialize, FwdInitialize,
                              BindFwd(BindInitialize()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterNormFwd, Fwd, BindFwd(BindExecute()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterNormQuantInitialize, QuantInitialize,
                              BindQuant(BindInitialize()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterNormQuant, Quant, BindQuant(BindExecute()),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterNormBwdInitialize, BwdInitialize,
                              BindBwd(BindInitialize()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(AiterNormBwd, Bwd, BindBwd(BindExecute()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax::JAX_GPU_NAMESPACE
