// SPDX-License-Identifier: Apache-2.0

// XLA FFI targets of attention over paged KV caches. Operands, results and
// attributes: jax/_src/aiter/paged/op.py.

#include <cstdint>
#include <string>

#include "aiter/paged.h"
#include "jaxlib/gpu/cache_side.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// Sides and scales: aiter/cache.h, in its order. page_axis: of k_cache.
struct PagedAttrs {
  int64_t page_size;
  int64_t page_axis;
  int64_t nhead_k;
  int64_t seqlen_q;
  int64_t cp_world_size;
  int64_t last_pages;
  int64_t window_left;
  int64_t window_right;
  float softmax_scale;
  float logits_soft_cap;
  ffi::Span<const int64_t> k_side;
  ffi::Span<const int64_t> v_side;
  ffi::Span<const int64_t> k_scales;
  ffi::Span<const int64_t> v_scales;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::PagedAttrs, StructMember<int64_t>("page_size"),
    StructMember<int64_t>("page_axis"), StructMember<int64_t>("nhead_k"),
    StructMember<int64_t>("seqlen_q"), StructMember<int64_t>("cp_world_size"),
    StructMember<int64_t>("last_pages"), StructMember<int64_t>("window_left"),
    StructMember<int64_t>("window_right"), StructMember<float>("softmax_scale"),
    StructMember<float>("logits_soft_cap"),
    StructMember<::xla::ffi::Span<const int64_t>>("k_side"),
    StructMember<::xla::ffi::Span<const int64_t>>("v_side"),
    StructMember<::xla::ffi::Span<const int64_t>>("k_scales"),
    StructMember<::xla::ffi::Span<const int64_t>>("v_scales"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

// v_cache is absent if V is in k_cache; parts if keys are not divided.
struct AttendBuffers : BufferList {
  using BufferList::BufferList;
  Buffer q = Operand("q");
  Buffer k_cache = Operand("k_cache");
  Buffer v_cache = Operand("v_cache");
  Buffer k_scale = Operand("k_scale");
  Buffer v_scale = Operand("v_scale");
  Buffer table = Operand("table");
  Buffer indptr = Operand("indptr");
  Buffer lengths = Operand("lengths");
  Buffer cu_seqlens = Operand("cu_seqlens");
  Buffer sinks = Operand("sinks");
  Buffer slopes = Operand("slopes");
  Buffer places = Operand("places");
  Buffer out = Result("out");
  Buffer lse = Result("lse");
  Buffer parts = Result("parts");
  Buffer parts_lse = Result("parts_lse");
  Buffer counter = Result("counter");
};

ffi::Error SetHalf(const Buffer& cache, const Buffer& scale,
                   ffi::Span<const int64_t> side,
                   ffi::Span<const int64_t> scales, const char* side_name,
                   const char* scales_name, aiter::paged_half* h) {
  AITER_FFI_RETURN_IF_ERROR(CheckType(scale, ffi::F32));
  AITER_FFI_RETURN_IF_ERROR(SetSide(side_name, side, &h->side));
  AITER_FFI_RETURN_IF_ERROR(SetScales(scales_name, scales, &h->scales));
  h->cache_ptr = Data(cache);
  h->cache_size = static_cast<int64_t>(cache.element_count());
  h->scale_ptr = Data(scale);
  h->scale_size = static_cast<int64_t>(scale.element_count());
  return ffi::Error::Success();
}

ffi::Error SetTable(const AttendBuffers& b, aiter::paged_attend_args* a) {
  bool packed = IsPresent(b.indptr);
  AITER_FFI_RETURN_IF_ERROR(CheckType(b.table, ffi::S32));
  AITER_FFI_RETURN_IF_ERROR(
      CheckRank(b.table, packed ? 1 : 2, packed ? "[pages]" : "[batch, n]"));
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.lengths, 1, "[batch]"));
  a->batch = b.lengths.dimensions()[0];
  AITER_FFI_RETURN_IF_ERROR(CheckType(b.lengths, ffi::S32));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.indptr, ffi::S32, {a->batch + 1}, &a->indptr_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.cu_seqlens, ffi::S32, {a->batch + 1}, &a->cu_seqlens_ptr));
  a->width = b.table.dimensions()[packed ? 0 : 1];
  if (!packed) {
    AITER_FFI_RETURN_IF_ERROR(CheckShape(b.table, {a->batch, a->width}));
  }
  a->table_ptr = Data(b.table);
  a->lengths_ptr = Data(b.lengths);
  return ffi::Error::Success();
}

// [heads] of all sequences, or [batch, heads].
ffi::Error SetPerHead(const Buffer& buffer, const aiter::paged_attend_args& a,
                      const void** ptr, int64_t* step) {
  if (buffer.dimensions().size() != 2) {
    return Optional(buffer, ffi::F32, {a.nhead_q}, ptr);
  }
  *step = a.nhead_q;
  return Optional(buffer, ffi::F32, {a.batch, a.nhead_q}, ptr);
}

ffi::Error SetResults(const AttendBuffers& b, aiter::paged_attend_args* a) {
  AITER_FFI_RETURN_IF_ERROR(CheckType(b.out, b.q.element_type()));
  AITER_FFI_RETURN_IF_ERROR(
      CheckShape(b.out, {a->tokens, a->nhead_q, a->hdim_v}));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.lse, ffi::F32, {a->nhead_q, a->tokens}, &a->lse_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.counter, ffi::S32, {2}, &a->counter_ptr));
  a->out_ptr = Data(b.out);
  if (!IsPresent(b.parts)) return ffi::Error::Success();
  AITER_FFI_RETURN_IF_ERROR(
      CheckRank(b.parts, 4, "[splits, tokens, heads, hdim_v]"));
  a->splits = b.parts.dimensions()[0];
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.parts, ffi::F32, {a->splits, a->tokens, a->nhead_q, a->hdim_v}));
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.parts_lse, ffi::F32, {a->splits, a->tokens, a->nhead_q}));
  a->parts_ptr = Data(b.parts);
  a->parts_lse_ptr = Data(b.parts_lse);
  return ffi::Error::Success();
}

ffi::Error SetAttend(const AttendBuffers& b, const PagedAttrs& attrs,
                     aiter::paged_attend_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.q, &a->data_type));
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.q, 3, "[tokens, heads, d]"));
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.out, 3, "[tokens, heads, d]"));
  AITER_FFI_RETURN_IF_ERROR(KindOf(b.k_cache, b.q.element_type(), &a->kind));
  a->tokens = b.q.dimensions()[0];
  a->nhead_q = b.q.dimensions()[1];
  a->hdim = b.q.dimensions()[2];
  a->hdim_v = b.out.dimensions()[2];
  a->nhead_k = attrs.nhead_k;
  a->page_size = attrs.page_size;
  Buffer::Dimensions pool = b.k_cache.dimensions();
  if (attrs.page_axis < 0 ||
      attrs.page_axis >= static_cast<int64_t>(pool.size())) {
    return Invalid("page_axis", "is " + std::to_string(attrs.page_axis),
                   "be an axis of k_cache");
  }
  a->pages = pool[attrs.page_axis];
  a->seqlen_q = attrs.seqlen_q;
  a->cp_world_size = attrs.cp_world_size;
  a->last_pages = attrs.last_pages != 0;
  a->window_left = attrs.window_left;
  a->window_right = attrs.window_right;
  a->softmax_scale = attrs.softmax_scale;
  a->logits_soft_cap = attrs.logits_soft_cap;
  bool one = !IsPresent(b.v_cache);
  AITER_FFI_RETURN_IF_ERROR(
      CheckType(one ? b.k_cache : b.v_cache, b.k_cache.element_type()));
  AITER_FFI_RETURN_IF_ERROR(SetHalf(b.k_cache, b.k_scale, attrs.k_side,
                                    attrs.k_scales, "k_side", "k_scales",
                                    &a->k));
  AITER_FFI_RETURN_IF_ERROR(SetHalf(one ? b.k_cache : b.v_cache, b.v_scale,
                                    attrs.v_side, attrs.v_scales, "v_side",
                                    "v_scales", &a->v));
  AITER_FFI_RETURN_IF_ERROR(SetTable(b, a));
  AITER_FFI_RETURN_IF_ERROR(
      SetPerHead(b.sinks, *a, &a->sinks_ptr, &a->sinks_step));
  AITER_FFI_RETURN_IF_ERROR(
      SetPerHead(b.slopes, *a, &a->slopes_ptr, &a->slopes_step));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.places, ffi::S32, {a->batch}, &a->places_ptr));
  a->q_ptr = Data(b.q);
  return SetResults(b, a);
}

ffi::Error SetLatent(const AttendBuffers& b, const PagedAttrs& attrs,
                     aiter::mla_attend_args* a) {
  return SetAttend(b, attrs, a);
}

const Family kPaged({TargetOf<SetAttend>(), TargetOf<SetLatent>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
