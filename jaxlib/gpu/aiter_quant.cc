// SPDX-License-Identifier: Apache-2.0

// XLA FFI target of the quantisers. Operands, results and attributes:
// jax/_src/aiter/quant/op.py.

#include <cstdint>
#include <string_view>

#include "aiter/quant.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

struct QuantAttrs {
  std::string_view per;
  int32_t group;  // Columns of a group, or 0.
  std::string_view rounding;
  bool transposed;  // Scales are [batch, cols / group, rows].
  bool shuffled;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::QuantAttrs, StructMember<std::string_view>("per"),
    StructMember<int32_t>("group"), StructMember<std::string_view>("rounding"),
    StructMember<bool>("transposed"), StructMember<bool>("shuffled"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

constexpr Choice<aiter::QuantScale> kScales[] = {
    {"row", aiter::QuantScale::kRow},
    {"group", aiter::QuantScale::kGroup},
    {"block", aiter::QuantScale::kBlock},
    {"amax", aiter::QuantScale::kAmax},
};

struct Buffers : BufferList {
  using BufferList::BufferList;
  Buffer x = Operand("x");
  Buffer smooth_scale = Operand("smooth_scale");
  Buffer scale_in = Operand("scale_in");
  Buffer q = Result("q");
  Buffer scale = Result("scale");
};

// Takes scales of shape [batch, rows, cols], or [batch, cols, rows].
ffi::Error SetScale(const Buffer& scale, const QuantAttrs& attrs,
                    aiter::quant_args* a) {
  if (a->scale_in_ptr != nullptr) return ffi::Error::Success();
  a->scale_is_e8m0 = scale.element_type() == ffi::U8;
  if (!a->scale_is_e8m0) {
    AITER_FFI_RETURN_IF_ERROR(CheckType(scale, ffi::F32));
  }
  Buffer::Dimensions dims = scale.dimensions();
  if (dims.size() != 3 || dims[0] != a->batch) {
    return Invalid(scale, "has shape " + ShapeString(dims),
                   "have rank 3 and the batch of x");
  }
  a->scale_rows = dims[attrs.transposed ? 2 : 1];
  a->scale_cols = dims[attrs.transposed ? 1 : 2];
  a->stride_scale = attrs.transposed ? 1 : dims[2];
  a->col_stride_scale = attrs.transposed ? dims[2] : 1;
  a->batch_stride_scale = dims[1] * dims[2];
  a->scale_is_shuffled = attrs.shuffled;
  a->scale_ptr = Data(scale);
  return ffi::Error::Success();
}

ffi::Error SetArgs(const Buffers& b, const QuantAttrs& attrs,
                   aiter::quant_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.x, &a->data_type));
  AITER_FFI_RETURN_IF_ERROR(QuantTypeOf(b.q, &a->q_type));
  Buffer::Dimensions dims = b.x.dimensions();
  if (dims.size() != 3) {
    return Invalid(b.x, "has shape " + ShapeString(dims),
                   "have shape [batch, rows, cols]");
  }
  AITER_FFI_RETURN_IF_ERROR(Choose("per", attrs.per, kScales, &a->per));
  AITER_FFI_RETURN_IF_ERROR(
      Choose("rounding", attrs.rounding, kMxRoundings, &a->rounding));
  a->group = attrs.group;
  a->batch = dims[0];
  a->rows = dims[1];
  a->cols = dims[2];
  a->x_ptr = Data(b.x);
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.smooth_scale, ffi::F32, {a->cols}, &a->smooth_scale_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.scale_in, ffi::F32, {a->batch, a->rows}, &a->scale_in_ptr));
  if (a->per != aiter::QuantScale::kAmax) {
    int64_t bytes = a->q_type == aiter::DataType::kE2m1 ? a->cols / 2 : a->cols;
    AITER_FFI_RETURN_IF_ERROR(CheckShape(b.q, Shape{a->batch, a->rows, bytes}));
    a->q_ptr = Data(b.q);
  }
  return SetScale(b.scale, attrs, a);
}

const Family kQuant({TargetOf<SetArgs>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
