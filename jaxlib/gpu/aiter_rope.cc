// SPDX-License-Identifier: Apache-2.0

// XLA FFI target of rotary embedding. Operands, results and attributes:
// jax/_src/aiter/rope/op.py.

#include <cstdint>

#include "aiter/rope.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

struct RopeAttrs {
  bool gptj;
  bool full;
  bool nope_first;
  bool transposed;
  bool has_sections;
  int32_t grid_h;
  int32_t grid_w;
  int32_t section_0;
  int32_t section_1;
  int32_t split_0;
  int32_t split_1;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::RopeAttrs, StructMember<bool>("gptj"),
    StructMember<bool>("full"), StructMember<bool>("nope_first"),
    StructMember<bool>("transposed"), StructMember<bool>("has_sections"),
    StructMember<int32_t>("grid_h"), StructMember<int32_t>("grid_w"),
    StructMember<int32_t>("section_0"), StructMember<int32_t>("section_1"),
    StructMember<int32_t>("split_0"), StructMember<int32_t>("split_1"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

struct RotateBuffers : BufferList {
  using BufferList::BufferList;
  Buffer x = Operand("x");
  Buffer y = Operand("y");
  Buffer cos = Operand("cos");
  Buffer sin = Operand("sin");
  Buffer positions = Operand("positions");
  Buffer offsets = Operand("offsets");
  Buffer cu_seqlens = Operand("cu_seqlens");
  Buffer x_out = Result("x_out");
  Buffer y_out = Result("y_out");
};

// The tables, and how their rows are found.
ffi::Error SetTables(const RotateBuffers& b, const RopeAttrs& attrs,
                     aiter::rope_rotate_args* a) {
  Buffer::Dimensions dims = b.cos.dimensions();
  a->is_per_token = dims.size() != 2;
  a->tables_are_f32 = b.cos.element_type() == ffi::F32;
  ffi::DataType type = a->tables_are_f32 ? ffi::F32 : b.x.element_type();
  if (a->is_per_token) {
    AITER_FFI_RETURN_IF_ERROR(
        CheckRank(b.cos, 4, "[rows, width] or [outer, seq, inner, width]"));
    AITER_FFI_RETURN_IF_ERROR(
        Check(b.cos, type, {a->outer, a->seq, a->inner, dims[3]}));
    a->table_rows = a->outer * a->seq * a->inner;
  } else {
    AITER_FFI_RETURN_IF_ERROR(CheckType(b.cos, type));
    a->table_rows = dims[0];
  }
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.sin, b.cos));
  int64_t width = dims[dims.size() - 1];
  a->is_full = attrs.full;
  a->pairs = attrs.full ? width / 2 : width;
  if (attrs.full && width % 2 != 0) {
    return Invalid(b.cos, "has shape " + ShapeString(dims),
                   "have an even width");
  }
  a->cos_ptr = b.cos.untyped_data();
  a->sin_ptr = b.sin.untyped_data();

  a->has_sections = attrs.has_sections;
  a->grid_h = attrs.grid_h;
  a->grid_w = attrs.grid_w;
  int64_t places = attrs.has_sections && attrs.grid_h == 0 ? 3 : 1;
  AITER_FFI_RETURN_IF_ERROR(Optional(b.positions, ffi::S32,
                                     {places, a->outer, a->seq, a->inner},
                                     &a->positions_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional(
      b.offsets, ffi::S32, {a->outer, a->seq, a->inner}, &a->offsets_ptr));
  if (IsPresent(b.cu_seqlens)) {
    AITER_FFI_RETURN_IF_ERROR(CheckRank(b.cu_seqlens, 1, "[sequences + 1]"));
    a->sequences = b.cu_seqlens.dimensions()[0] - 1;
    AITER_FFI_RETURN_IF_ERROR(CheckType(b.cu_seqlens, ffi::S32));
    a->cu_seqlens_ptr = b.cu_seqlens.untyped_data();
  }
  return ffi::Error::Success();
}

ffi::Error SetRotate(const RotateBuffers& b, const RopeAttrs& attrs,
                     aiter::rope_rotate_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.x, &a->data_type));
  AITER_FFI_RETURN_IF_ERROR(
      CheckRank(b.x, 5, "[outer, seq, inner, heads, dim]"));
  Buffer::Dimensions dims = b.x.dimensions();
  a->outer = dims[0];
  a->seq = dims[1];
  a->inner = dims[2];
  a->heads_x = dims[3];
  a->dim = dims[4];
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.x_out, b.x));
  a->x_ptr = b.x.untyped_data();
  a->x_out_ptr = b.x_out.untyped_data();
  if (IsPresent(b.y)) {
    AITER_FFI_RETURN_IF_ERROR(
        CheckRank(b.y, 5, "[outer, seq, inner, heads, dim]"));
    a->heads_y = b.y.dimensions()[3];
    AITER_FFI_RETURN_IF_ERROR(
        Check(b.y, b.x.element_type(),
              {a->outer, a->seq, a->inner, a->heads_y, a->dim}));
    AITER_FFI_RETURN_IF_ERROR(CheckLike(b.y_out, b.y));
    a->y_ptr = b.y.untyped_data();
    a->y_out_ptr = b.y_out.untyped_data();
  }
  AITER_FFI_RETURN_IF_ERROR(SetTables(b, attrs, a));
  a->is_gptj = attrs.gptj;
  a->is_nope_first = attrs.nope_first;
  a->is_transposed = attrs.transposed;
  a->section_0 = attrs.section_0;
  a->section_1 = attrs.section_1;
  a->split_0 = attrs.split_0;
  a->split_1 = attrs.split_1;
  return ffi::Error::Success();
}

const Family kRope({TargetOf<SetRotate>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
