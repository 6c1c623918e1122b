// SPDX-License-Identifier: Apache-2.0

// XLA FFI targets of RMSNorm and LayerNorm. Operands, results and attributes:
// jax/_src/aiter/norm/op.py.

#include <cstdint>

#include "aiter/norm.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
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

// What is normalised, as every forward call has it.
struct RowsBuffers : BufferList {
  using BufferList::BufferList;
  Buffer x = Operand("x");
  Buffer residual = Operand("residual");
  Buffer gamma = Operand("gamma");
  Buffer beta = Operand("beta");
};

struct FwdBuffers : RowsBuffers {
  using RowsBuffers::RowsBuffers;
  Buffer y = Result("y");
  Buffer residual_out = Result("residual_out");
  Buffer mean = Result("mean");
  Buffer rstd = Result("rstd");
};

struct QuantBuffers : RowsBuffers {
  using RowsBuffers::RowsBuffers;
  Buffer x_scale = Operand("x_scale");
  Buffer q = Result("q");
  Buffer scale = Result("scale");
  Buffer residual_out = Result("residual_out");
};

struct BwdBuffers : BufferList {
  using BufferList::BufferList;
  Buffer dy = Operand("dy");
  Buffer dresidual_out = Operand("dresidual_out");
  Buffer s = Operand("s");
  Buffer gamma = Operand("gamma");
  Buffer mean = Operand("mean");
  Buffer rstd = Operand("rstd");
  Buffer dx = Result("dx");
  Buffer dgamma = Result("dgamma");
  Buffer dbeta = Result("dbeta");
  Buffer dgamma_parts = Result("dgamma_parts");
  Buffer dbeta_parts = Result("dbeta_parts");
};

// Checks the rows that are normalised and gamma, and fills in what forward and
// backward share.
ffi::Error SetCommon(const Buffer& x, const Buffer& gamma,
                     const NormAttrs& attrs, aiter::norm_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(x, &a->data_type));
  Buffer::Dimensions dims = x.dimensions();
  if (dims.size() != 2) {
    return Invalid(x, "has shape " + ShapeString(dims),
                   "have shape [rows, cols]");
  }
  a->rows = dims[0];
  a->cols = dims[1];
  a->weights_are_f32 = gamma.element_type() == ffi::F32;
  AITER_FFI_RETURN_IF_ERROR(Check(
      gamma, a->weights_are_f32 ? ffi::F32 : x.element_type(), {a->cols}));
  a->gamma_ptr = gamma.untyped_data();
  a->is_layer_norm = attrs.layer;
  a->is_gemma = attrs.gemma;
  a->is_t5 = attrs.t5;
  return ffi::Error::Success();
}

ffi::Error SetRows(const RowsBuffers& b, const Buffer& residual_out,
                   const NormAttrs& attrs, aiter::norm_rows_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon(b.x, b.gamma, attrs, a));
  ffi::DataType type = b.x.element_type();
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.residual, type, {a->rows, a->cols}, &a->residual_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(residual_out, type, {a->rows, a->cols}, &a->residual_out_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.beta, b.gamma.element_type(), {a->cols}, &a->beta_ptr));
  a->x_ptr = b.x.untyped_data();
  a->epsilon = attrs.epsilon;
  return ffi::Error::Success();
}

ffi::Error SetFwd(const FwdBuffers& b, const NormAttrs& attrs,
                  aiter::norm_fwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetRows(b, b.residual_out, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.y, b.x));
  AITER_FFI_RETURN_IF_ERROR(Check(b.mean, ffi::F32, {a->rows}));
  AITER_FFI_RETURN_IF_ERROR(Check(b.rstd, ffi::F32, {a->rows}));
  a->y_ptr = b.y.untyped_data();
  a->mean_ptr = b.mean.untyped_data();
  a->rstd_ptr = b.rstd.untyped_data();
  return ffi::Error::Success();
}

ffi::Error SetQuant(const QuantBuffers& b, const NormAttrs& attrs,
                    aiter::norm_quant_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetRows(b, b.residual_out, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.x_scale, ffi::F32, {a->cols}, &a->x_scale_ptr));
  AITER_FFI_RETURN_IF_ERROR(QuantTypeOf(b.q, &a->quant_type));
  if (a->quant_type == aiter::DataType::kE2m1) {
    AITER_FFI_RETURN_IF_ERROR(CheckShape(b.q, {a->rows, a->cols / 2}));
    AITER_FFI_RETURN_IF_ERROR(Check(b.scale, ffi::U8, {a->rows, a->cols / 32}));
  } else {
    AITER_FFI_RETURN_IF_ERROR(CheckShape(b.q, {a->rows, a->cols}));
    AITER_FFI_RETURN_IF_ERROR(Check(b.scale, ffi::F32, {a->rows}));
  }
  a->q_ptr = b.q.untyped_data();
  a->scale_ptr = b.scale.untyped_data();
  return ffi::Error::Success();
}

ffi::Error SetBwd(const BwdBuffers& b, const NormAttrs& attrs,
                  aiter::norm_bwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon(b.s, b.gamma, attrs, a));
  ffi::DataType type = b.s.element_type();
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.dy, b.s));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.dx, b.s));
  a->sums_are_f32 = b.dgamma.element_type() == ffi::F32;
  ffi::DataType sum = a->sums_are_f32 ? ffi::F32 : type;
  AITER_FFI_RETURN_IF_ERROR(Check(b.dgamma, sum, {a->cols}));
  AITER_FFI_RETURN_IF_ERROR(Check(b.mean, ffi::F32, {a->rows}));
  AITER_FFI_RETURN_IF_ERROR(Check(b.rstd, ffi::F32, {a->rows}));
  Buffer::Dimensions parts = b.dgamma_parts.dimensions();
  a->parts = parts.size() == 2 ? parts[0] : 0;
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.dgamma_parts, ffi::F32, {a->parts, a->cols}));
  AITER_FFI_RETURN_IF_ERROR(Optional(b.dresidual_out, type, {a->rows, a->cols},
                                     &a->dresidual_out_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional(b.dbeta, sum, {a->cols}, &a->dbeta_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional(b.dbeta_parts, ffi::F32,
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

const Family kNorm({TargetOf<SetFwd>(), TargetOf<SetQuant>(),
                    TargetOf<SetBwd>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
