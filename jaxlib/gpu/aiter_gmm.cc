// SPDX-License-Identifier: Apache-2.0

// XLA FFI target of grouped products. Operands, results and attributes:
// jax/_src/aiter/gmm/op.py.

#include <cstdint>
#include <string_view>

#include "aiter/gmm.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

struct GmmAttrs {
  std::string_view layout;
  std::string_view scaling;
  bool lead;
  std::string_view gates;
  std::string_view activation;
  float alpha;
  float gate_limit;
  float up_limit;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::GmmAttrs,
    StructMember<std::string_view>("layout"),
    StructMember<std::string_view>("scaling"), StructMember<bool>("lead"),
    StructMember<std::string_view>("gates"),
    StructMember<std::string_view>("activation"), StructMember<float>("alpha"),
    StructMember<float>("gate_limit"), StructMember<float>("up_limit"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

constexpr Choice<aiter::GmmLayout> kLayouts[] = {
    {"nn", aiter::GmmLayout::kNN},
    {"nt", aiter::GmmLayout::kNT},
    {"tn", aiter::GmmLayout::kTN},
};

constexpr Choice<aiter::GmmScaling> kScalings[] = {
    {"none", aiter::GmmScaling::kNone},   {"row", aiter::GmmScaling::kRow},
    {"block", aiter::GmmScaling::kBlock}, {"mx", aiter::GmmScaling::kMx},
    {"i4", aiter::GmmScaling::kI4},
};

constexpr Choice<aiter::GmmGates> kGates[] = {
    {"none", aiter::GmmGates::kNone},
    {"halves", aiter::GmmGates::kHalves},
    {"pairs", aiter::GmmGates::kPairs},
};

constexpr Choice<aiter::GmmActivation> kActivations[] = {
    {"none", aiter::GmmActivation::kNone},
    {"relu", aiter::GmmActivation::kRelu},
    {"gelu", aiter::GmmActivation::kGelu},
    {"gelu_tanh", aiter::GmmActivation::kGeluTanh},
    {"silu", aiter::GmmActivation::kSilu},
    {"swiglu", aiter::GmmActivation::kSwiglu},
};

constexpr int64_t kScaleBlock = 128;
constexpr int64_t kPackedBlock = 32;

struct Buffers : BufferList {
  using BufferList::BufferList;
  Buffer a = Operand("a");
  Buffer b = Operand("b");
  Buffer sizes = Operand("sizes");
  Buffer a_scale = Operand("a_scale");
  Buffer b_scale = Operand("b_scale");
  Buffer bias = Operand("bias");
  Buffer out = Result("out");
  Buffer plan = Result("plan");
};

int64_t Blocks(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

ffi::Error SetScales(const Buffers& in, aiter::gmm_args* args) {
  if (args->scaling == aiter::GmmScaling::kNone) return ffi::Error::Success();
  if (args->scaling == aiter::GmmScaling::kRow) {
    AITER_FFI_RETURN_IF_ERROR(Check(in.a_scale, ffi::F32, {args->m}));
    AITER_FFI_RETURN_IF_ERROR(
        Check(in.b_scale, ffi::F32, {args->groups, args->n}));
  } else if (args->scaling != aiter::GmmScaling::kBlock) {
    bool mx = args->scaling == aiter::GmmScaling::kMx;
    int64_t along_k = args->k / kPackedBlock;
    AITER_FFI_RETURN_IF_ERROR(Check(in.b_scale, mx ? ffi::U8 : ffi::BF16,
                                    {args->groups, args->n, along_k}));
    args->b_scale_ptr = Data(in.b_scale);
    if (args->data_type == aiter::DataType::kBf16) {
      return ffi::Error::Success();
    }
    AITER_FFI_RETURN_IF_ERROR(Check(in.a_scale, ffi::U8, {args->m, along_k}));
  } else {
    AITER_FFI_RETURN_IF_ERROR(
        Check(in.a_scale, ffi::F32, {args->m, Blocks(args->k)}));
    AITER_FFI_RETURN_IF_ERROR(
        Check(in.b_scale, ffi::F32,
              {args->groups, Blocks(args->n), Blocks(args->k)}));
  }
  args->a_scale_ptr = Data(in.a_scale);
  args->b_scale_ptr = Data(in.b_scale);
  return ffi::Error::Success();
}

ffi::Error SetGmm(const Buffers& in, const GmmAttrs& attrs,
                  aiter::gmm_args* args) {
  AITER_FFI_RETURN_IF_ERROR(
      Choose("layout", attrs.layout, kLayouts, &args->layout));
  AITER_FFI_RETURN_IF_ERROR(
      Choose("scaling", attrs.scaling, kScalings, &args->scaling));
  args->lead = attrs.lead;
  AITER_FFI_RETURN_IF_ERROR(Choose("gates", attrs.gates, kGates, &args->gates));
  AITER_FFI_RETURN_IF_ERROR(
      Choose("activation", attrs.activation, kActivations, &args->activation));
  args->alpha = attrs.alpha;
  args->gate_limit = attrs.gate_limit;
  args->up_limit = attrs.up_limit;
  const bool packed = args->scaling == aiter::GmmScaling::kMx ||
                      args->scaling == aiter::GmmScaling::kI4;
  const bool is_float = args->scaling == aiter::GmmScaling::kNone ||
                        (packed && in.a.element_type() == ffi::BF16);
  auto type_of = is_float ? FloatTypeOf : QuantTypeOf;
  AITER_FFI_RETURN_IF_ERROR(type_of(in.a, &args->data_type));
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(in.out, &args->out_type));
  AITER_FFI_RETURN_IF_ERROR(
      CheckType(in.b, packed ? ffi::U8 : in.a.element_type()));

  const bool by_group = args->layout == aiter::GmmLayout::kTN;
  Buffer::Dimensions a = in.a.dimensions();
  Buffer::Dimensions b = in.b.dimensions();
  Buffer::Dimensions sizes = in.sizes.dimensions();
  if (a.size() != 2) {
    return Invalid(in.a, "has shape " + ShapeString(a), "have shape [m, k]");
  }
  if (b.size() != (by_group ? 2 : 3)) {
    return Invalid(in.b, "has shape " + ShapeString(b),
                   by_group ? "have shape [m, n]" : "have rank 3");
  }
  if (sizes.size() != 1 || sizes[0] < (args->lead ? 1 : 0)) {
    return Invalid(in.sizes, "has shape " + ShapeString(sizes),
                   "have shape [groups], one more with lead");
  }
  args->m = a[0];
  args->k = args->data_type == aiter::DataType::kE2m1 ? 2 * a[1] : a[1];
  if (packed && args->k % kPackedBlock != 0) {
    return Invalid(in.a, "has shape " + ShapeString(a),
                   "have a multiple of 32 columns");
  }
  args->groups = sizes[0] - (args->lead ? 1 : 0);
  AITER_FFI_RETURN_IF_ERROR(CheckType(in.sizes, ffi::S32));
  if (by_group) {
    args->n = b[1];
    AITER_FFI_RETURN_IF_ERROR(CheckShape(in.b, {args->m, args->n}));
    AITER_FFI_RETURN_IF_ERROR(
        CheckShape(in.out, {args->groups, args->k, args->n}));
  } else {
    const bool transposed = args->layout == aiter::GmmLayout::kNT;
    const int64_t pair = args->gates == aiter::GmmGates::kNone ? 1 : 2;
    args->n = b[transposed ? 1 : 2] / pair;
    const int64_t columns = pair * args->n;
    AITER_FFI_RETURN_IF_ERROR(
        transposed ? CheckShape(in.b, {args->groups, columns,
                                       packed ? args->k / 2 : args->k})
                   : CheckShape(in.b, {args->groups, args->k, columns}));
    AITER_FFI_RETURN_IF_ERROR(
        Optional(in.bias, ffi::F32, {args->groups, columns}, &args->bias_ptr));
    AITER_FFI_RETURN_IF_ERROR(CheckShape(in.out, {args->m, args->n}));
  }
  AITER_FFI_RETURN_IF_ERROR(Check(
      in.plan, ffi::S32, {aiter::gmm_plan_entries(args->m, args->groups), 4}));
  AITER_FFI_RETURN_IF_ERROR(SetScales(in, args));
  args->a_ptr = Data(in.a);
  args->b_ptr = Data(in.b);
  args->sizes_ptr = Data(in.sizes);
  args->out_ptr = Data(in.out);
  args->plan_ptr = Data(in.plan);
  return ffi::Error::Success();
}

const Family kGmm({TargetOf<SetGmm>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
