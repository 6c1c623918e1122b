// SPDX-License-Identifier: Apache-2.0

// XLA FFI targets of KV-cache writes. Operands, results and attributes:
// jax/_src/aiter/cache/op.py.

#include <cstdint>
#include <string>
#include <string_view>

#include "aiter/cache.h"
#include "jaxlib/gpu/cache_side.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// Attributes of every operation. Sides and scales: aiter/cache.h, in its order.
struct CacheAttrs {
  std::string_view kind;  // What numbers are rounded to, or empty.
  int64_t page_size;
  int64_t block;
  float floor;
  bool power;
  ffi::Span<const int64_t> k_side;
  ffi::Span<const int64_t> v_side;
  ffi::Span<const int64_t> k_scales;
  ffi::Span<const int64_t> v_scales;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::CacheAttrs,
    StructMember<std::string_view>("kind"), StructMember<int64_t>("page_size"),
    StructMember<int64_t>("block"), StructMember<float>("floor"),
    StructMember<bool>("power"),
    StructMember<::xla::ffi::Span<const int64_t>>("k_side"),
    StructMember<::xla::ffi::Span<const int64_t>>("v_side"),
    StructMember<::xla::ffi::Span<const int64_t>>("k_scales"),
    StructMember<::xla::ffi::Span<const int64_t>>("v_scales"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

constexpr Choice<aiter::CacheKind> kKinds[] = {
    {"int8", aiter::CacheKind::kInt8},
    {"float8_e4m3fn", aiter::CacheKind::kE4m3fn},
    {"float8_e4m3fnuz", aiter::CacheKind::kE4m3fnuz},
    {"float8_e5m2", aiter::CacheKind::kE5m2},
};

// Absent are v_cache and value, together or the cache alone, if V is in
// k_cache; scales that lie in a cache; what an operation does not write.
struct CacheBuffers : BufferList {
  using BufferList::BufferList;
  Buffer k_cache = Operand("k_cache");
  Buffer v_cache = Operand("v_cache");
  Buffer k_scale = Operand("k_scale");
  Buffer v_scale = Operand("v_scale");
  Buffer key = Operand("key");
  Buffer value = Operand("value");
  Buffer slots = Operand("slots");
  Buffer winners = Operand("winners");
  Buffer k_cache_out = Result("k_cache_out");
  Buffer v_cache_out = Result("v_cache_out");
  Buffer k_scale_out = Result("k_scale_out");
  Buffer v_scale_out = Result("v_scale_out");
};

// The rows and the cache of keys or values. The result has the operand's place,
// but where XLA takes the operand out of a slice of a larger array, and puts
// the result into another (its dynamic slice fusion forgets that they alias).
ffi::Error SetHalf(const Buffer& rows, const Buffer& cache,
                   const Buffer& cache_out, const aiter::cache_args& a,
                   aiter::cache_half* h) {
  Buffer::Dimensions dims = rows.dimensions();
  if (dims.size() != 3 || dims[0] != a.tokens || dims[1] != a.heads) {
    return Invalid(rows, "has shape " + ShapeString(dims),
                   "have shape [tokens, heads, cols], as key");
  }
  AITER_FFI_RETURN_IF_ERROR(CheckLike(cache_out, cache));
  h->rows_ptr = Data(rows);
  h->cols = dims[2];
  h->cache_ptr = Data(cache_out);
  h->cache_size = static_cast<int64_t>(cache_out.element_count());
  h->cache_bytes = static_cast<int64_t>(cache_out.size_bytes());
  h->cache_from_ptr = Data(cache);
  return ffi::Error::Success();
}

// What all operations share; `width` is of a cache's elements.
ffi::Error SetCommon(const CacheBuffers& b, const CacheAttrs& attrs,
                     aiter::cache_args* a) {
  Buffer::Dimensions dims = b.key.dimensions();
  Buffer::Dimensions pool = b.k_cache.dimensions();
  if (dims.size() != 3) {
    return Invalid(b.key, "has shape " + ShapeString(dims),
                   "have shape [tokens, heads, cols]");
  }
  if (pool.size() < 2) {
    return Invalid(b.k_cache, "has shape " + ShapeString(pool),
                   "have shape [pages, ...]");
  }
  a->tokens = dims[0];
  a->heads = dims[1];
  a->pages = pool[0];
  a->page_size = attrs.page_size;
  AITER_FFI_RETURN_IF_ERROR(Check(b.slots, ffi::S32, {a->tokens}));
  a->slots_ptr = Data(b.slots);
  AITER_FFI_RETURN_IF_ERROR(
      SetHalf(b.key, b.k_cache, b.k_cache_out, *a, &a->k));
  AITER_FFI_RETURN_IF_ERROR(SetSide("k_side", attrs.k_side, &a->k.side));
  AITER_FFI_RETURN_IF_ERROR(
      SetScales("k_scales", attrs.k_scales, &a->k.scales));
  if (!IsPresent(b.value)) return ffi::Error::Success();
  AITER_FFI_RETURN_IF_ERROR(CheckType(b.value, b.key.element_type()));
  AITER_FFI_RETURN_IF_ERROR(SetSide("v_side", attrs.v_side, &a->v.side));
  AITER_FFI_RETURN_IF_ERROR(
      SetScales("v_scales", attrs.v_scales, &a->v.scales));
  if (!IsPresent(b.v_cache)) {
    AITER_FFI_RETURN_IF_ERROR(
        SetHalf(b.value, b.k_cache, b.k_cache_out, *a, &a->v));
    a->v.cache_from_ptr = nullptr;  // It comes with the keys'.
    return ffi::Error::Success();
  }
  AITER_FFI_RETURN_IF_ERROR(CheckType(b.v_cache, b.k_cache.element_type()));
  return SetHalf(b.value, b.v_cache, b.v_cache_out, *a, &a->v);
}

ffi::Error CheckWidth(const Buffer& cache, size_t bytes) {
  if (ffi::ByteWidth(cache.element_type()) == bytes) {
    return ffi::Error::Success();
  }
  return Invalid(cache, "has dtype " + TypeName(cache.element_type()),
                 "have elements of " + std::to_string(bytes) + " bytes");
}

ffi::Error SetCopy(const CacheBuffers& b, const CacheAttrs& attrs,
                   aiter::cache_copy_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon(b, attrs, a));
  size_t bytes = ffi::ByteWidth(b.key.element_type());
  AITER_FFI_RETURN_IF_ERROR(CheckWidth(b.k_cache, bytes));
  if (bytes != 1) return FloatTypeOf(b.key, &a->data_type);
  a->data_type = aiter::DataType::kI8;
  return ffi::Error::Success();
}

// What operations share that round to 8 bits.
template <typename Args>
ffi::Error SetRounded(const CacheBuffers& b, const CacheAttrs& attrs, Args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetCommon(b, attrs, a));
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.key, &a->data_type));
  AITER_FFI_RETURN_IF_ERROR(Choose("kind", attrs.kind, kKinds, &a->kind));
  return CheckWidth(b.k_cache, 1);
}

ffi::Error SetCast(const CacheBuffers& b, const CacheAttrs& attrs,
                   aiter::cache_cast_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetRounded(b, attrs, a));
  auto set = [](const Buffer& scale, aiter::cache_half* h) {
    if (!IsPresent(scale)) return ffi::Error::Success();
    AITER_FFI_RETURN_IF_ERROR(CheckType(scale, ffi::F32));
    h->scale_ptr = Data(scale);
    h->scale_size = static_cast<int64_t>(scale.element_count());
    return ffi::Error::Success();
  };
  AITER_FFI_RETURN_IF_ERROR(set(b.k_scale, &a->k));
  return set(b.v_scale, &a->v);
}

// Where scales are written: an array of theirs, or the cache itself.
ffi::Error SetWritten(const Buffer& scale, const Buffer& scale_out,
                      aiter::cache_half* h) {
  if (h->rows_ptr == nullptr) return ffi::Error::Success();
  if (!IsPresent(scale)) {
    h->scale_ptr = h->cache_ptr;
    h->scale_size = h->cache_size / static_cast<int64_t>(sizeof(float));
    return ffi::Error::Success();
  }
  AITER_FFI_RETURN_IF_ERROR(CheckType(scale, ffi::F32));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(scale_out, scale));
  h->scale_from_ptr = Data(scale);
  h->scale_ptr = Data(scale_out);
  h->scale_size = static_cast<int64_t>(scale_out.element_count());
  return ffi::Error::Success();
}

ffi::Error SetToken(const CacheBuffers& b, const CacheAttrs& attrs,
                    aiter::cache_token_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetRounded(b, attrs, a));
  a->floor = attrs.floor;
  a->scale_is_power = attrs.power;
  AITER_FFI_RETURN_IF_ERROR(SetWritten(b.k_scale, b.k_scale_out, &a->k));
  return SetWritten(b.v_scale, b.v_scale_out, &a->v);
}

ffi::Error SetBlock(const CacheBuffers& b, const CacheAttrs& attrs,
                    aiter::cache_block_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetRounded(b, attrs, a));
  a->floor = attrs.floor;
  a->block = attrs.block;
  AITER_FFI_RETURN_IF_ERROR(SetWritten(b.k_scale, b.k_scale_out, &a->k));
  AITER_FFI_RETURN_IF_ERROR(SetWritten(b.v_scale, b.v_scale_out, &a->v));
  a->winners_ptr = Data(b.winners);
  return Check(b.winners, ffi::S32, {a->pages * a->page_size});
}

const Family kCache({TargetOf<SetCopy>(), TargetOf<SetCast>(),
                     TargetOf<SetToken>(), TargetOf<SetBlock>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
