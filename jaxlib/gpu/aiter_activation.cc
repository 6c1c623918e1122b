// SPDX-License-Identifier: Apache-2.0

// XLA FFI targets of the gated activations. Operands, results and attributes:
// jax/_src/aiter/activation/op.py.

#include <cstdint>
#include <string>
#include <string_view>

#include "aiter/activation.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// Attributes of every operation.
struct ActivationAttrs {
  std::string_view activation;
  float alpha;
  float gate_limit;
  float limit;
  bool packed;
};

struct ActivationGroupAttrs {
  std::string_view activation;
  float alpha;
  float gate_limit;
  float limit;
  bool packed;
  int32_t group;
  std::string_view rounding;
  bool shuffled;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::ActivationAttrs,
    StructMember<std::string_view>("activation"), StructMember<float>("alpha"),
    StructMember<float>("gate_limit"), StructMember<float>("limit"),
    StructMember<bool>("packed"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::ActivationGroupAttrs,
    StructMember<std::string_view>("activation"), StructMember<float>("alpha"),
    StructMember<float>("gate_limit"), StructMember<float>("limit"),
    StructMember<bool>("packed"), StructMember<int32_t>("group"),
    StructMember<std::string_view>("rounding"), StructMember<bool>("shuffled"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

constexpr Choice<aiter::Activation> kActivations[] = {
    {"gelu", aiter::Activation::kGelu},
    {"gelu_tanh", aiter::Activation::kGeluTanh},
    {"silu", aiter::Activation::kSilu},
    {"swiglu", aiter::Activation::kSwiglu},
};

// What every call has.
struct PairBuffers : BufferList {
  using BufferList::BufferList;
  Buffer gate = Operand("gate");
  Buffer up = Operand("up");
  Buffer expert_ids = Operand("expert_ids");
  Buffer bias = Operand("bias");
};

struct FwdBuffers : PairBuffers {
  using PairBuffers::PairBuffers;
  Buffer out = Result("out");
};

struct BwdBuffers : PairBuffers {
  using PairBuffers::PairBuffers;
  Buffer dy = Operand("dy");
  Buffer dgate = Result("dgate");
  Buffer dup = Result("dup");
};

struct QuantRowBuffers : PairBuffers {
  using PairBuffers::PairBuffers;
  Buffer q = Result("q");
  Buffer scale = Result("scale");
};

struct QuantGroupBuffers : PairBuffers {
  using PairBuffers::PairBuffers;
  Buffer scale_in = Operand("scale_in");
  Buffer q = Result("q");
  Buffer scale = Result("scale");
};

template <typename Attrs>
ffi::Error SetPair(const PairBuffers& b, const Attrs& attrs,
                   aiter::activation_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.gate, &a->data_type));
  Buffer::Dimensions dims = b.gate.dimensions();
  if (dims.size() != 2 || (attrs.packed && dims[1] % 2 != 0)) {
    return Invalid(b.gate, "has shape " + ShapeString(dims),
                   "have shape [rows, cols], packed [rows, 2 * cols]");
  }
  a->rows = dims[0];
  a->cols = attrs.packed ? dims[1] / 2 : dims[1];
  a->gate_ptr = b.gate.untyped_data();
  a->is_packed = attrs.packed;
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.up, b.gate.element_type(), {a->rows, a->cols}, &a->up_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.expert_ids, ffi::S32, {a->rows}, &a->expert_ids_ptr));
  if (IsPresent(b.bias)) {
    Buffer::Dimensions bias = b.bias.dimensions();
    a->experts = bias.size() == 2 ? bias[0] : 0;
    a->bias_is_f32 = b.bias.element_type() == ffi::F32;
    ffi::DataType type = a->bias_is_f32 ? ffi::F32 : b.gate.element_type();
    AITER_FFI_RETURN_IF_ERROR(Check(b.bias, type, {a->experts, 2 * a->cols}));
  }
  a->bias_ptr = Address(b.bias);
  AITER_FFI_RETURN_IF_ERROR(
      Choose("activation", attrs.activation, kActivations, &a->activation));
  a->alpha = attrs.alpha;
  a->gate_limit = attrs.gate_limit;
  a->limit = attrs.limit;
  return ffi::Error::Success();
}

ffi::Error SetFwd(const FwdBuffers& b, const ActivationAttrs& attrs,
                  aiter::activation_fwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetPair(b, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.out, &a->out_type));
  AITER_FFI_RETURN_IF_ERROR(CheckShape(b.out, {a->rows, a->cols}));
  a->out_ptr = b.out.untyped_data();
  return ffi::Error::Success();
}

ffi::Error SetBwd(const BwdBuffers& b, const ActivationAttrs& attrs,
                  aiter::activation_bwd_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetPair(b, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.dy, &a->dy_type));
  AITER_FFI_RETURN_IF_ERROR(CheckShape(b.dy, {a->rows, a->cols}));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.dgate, b.gate));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.dup, b.up));
  a->dy_ptr = b.dy.untyped_data();
  a->dgate_ptr = b.dgate.untyped_data();
  a->dup_ptr = Address(b.dup);
  return ffi::Error::Success();
}

ffi::Error SetQuantRow(const QuantRowBuffers& b, const ActivationAttrs& attrs,
                       aiter::activation_quant_row_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetPair(b, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(QuantTypeOf(b.q, &a->quant_type));
  AITER_FFI_RETURN_IF_ERROR(CheckShape(b.q, {a->rows, a->cols}));
  AITER_FFI_RETURN_IF_ERROR(Check(b.scale, ffi::F32, {a->rows}));
  a->q_ptr = b.q.untyped_data();
  a->scale_ptr = b.scale.untyped_data();
  return ffi::Error::Success();
}

ffi::Error SetQuantGroup(const QuantGroupBuffers& b,
                         const ActivationGroupAttrs& attrs,
                         aiter::activation_quant_group_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetPair(b, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(QuantTypeOf(b.q, &a->quant_type));
  bool e2m1 = a->quant_type == aiter::DataType::kE2m1;
  AITER_FFI_RETURN_IF_ERROR(
      CheckShape(b.q, {a->rows, e2m1 ? a->cols / 2 : a->cols}));
  a->q_ptr = b.q.untyped_data();
  a->group = attrs.group;
  AITER_FFI_RETURN_IF_ERROR(
      Choose("rounding", attrs.rounding, kMxRoundings, &a->rounding));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.scale_in, ffi::F32, {1}, &a->scale_in_ptr));
  a->scale_ptr = Address(b.scale);
  if (a->scale_ptr == nullptr) return ffi::Error::Success();
  a->scale_is_e8m0 = b.scale.element_type() == ffi::U8;
  a->scale_is_shuffled = attrs.shuffled;
  Buffer::Dimensions dims = b.scale.dimensions();
  if (dims.size() != 3) {
    return Invalid(b.scale, "has shape " + ShapeString(dims),
                   "have shape [batch, rows, groups]");
  }
  if (dims[0] < 1 || a->rows % dims[0] != 0) {
    return Invalid(b.scale, "has shape " + ShapeString(dims),
                   "have a first dimension that divides the rows");
  }
  a->batch = dims[0];
  a->rows /= a->batch;
  a->scale_rows = dims[1];
  a->scale_cols = dims[2];
  return Check(b.scale, a->scale_is_e8m0 ? ffi::U8 : ffi::F32,
               {a->batch, a->scale_rows, a->scale_cols});
}

const Family kActivation({TargetOf<SetFwd>(), TargetOf<SetBwd>(),
                          TargetOf<SetQuantRow>(), TargetOf<SetQuantGroup>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
