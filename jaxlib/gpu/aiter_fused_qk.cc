// SPDX-License-Identifier: Apache-2.0

// XLA FFI target of what stands between projections and attention. Operands,
// results and attributes: jax/_src/aiter/fused_qk/op.py.

#include <cstdint>
#include <string>

#include "aiter/fused_qk.h"
#include "jaxlib/gpu/cache_side.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

struct FusedQkAttrs {
  bool gptj;
  int64_t first;
  float eps;
};

// Of heads. Sides and scales: aiter/cache.h, in its order.
struct FusedHeadsAttrs {
  ffi::Span<const int64_t> k_side;
  ffi::Span<const int64_t> v_side;
  ffi::Span<const int64_t> k_scales;
  ffi::Span<const int64_t> v_scales;
  int64_t page_size;
  bool token;
  int64_t heads;  // Of a q that has all; else 0.
  int64_t k_heads;
  bool gptj;
  int64_t first;
  float eps;
  bool gemma;
  bool joint;
  bool has_sections;
  bool interleaved;
  int64_t section_0;
  int64_t section_1;
};

// Of rows: aiter/fused_qk.h has the same names.
struct FusedRowsAttrs {
  int64_t parts;
  int64_t dim;
  int64_t first;
  int64_t group;
  bool transposed;  // Scales are [groups, tokens].
  bool gptj;
  bool gemma;
  float eps;
  float k_eps;
  std::string_view mode;  // Of e8m0 scales; else any.
  float least;
  bool sigmoid;
  bool gated_first;
  bool narrow;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::FusedRowsAttrs, StructMember<int64_t>("parts"),
    StructMember<int64_t>("dim"), StructMember<int64_t>("first"),
    StructMember<int64_t>("group"), StructMember<bool>("transposed"),
    StructMember<bool>("gptj"), StructMember<bool>("gemma"),
    StructMember<float>("eps"), StructMember<float>("k_eps"),
    StructMember<std::string_view>("mode"), StructMember<float>("least"),
    StructMember<bool>("sigmoid"), StructMember<bool>("gated_first"),
    StructMember<bool>("narrow"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax::JAX_GPU_NAMESPACE::FusedQkAttrs,
                                      StructMember<bool>("gptj"),
                                      StructMember<int64_t>("first"),
                                      StructMember<float>("eps"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::FusedHeadsAttrs,
    StructMember<::xla::ffi::Span<const int64_t>>("k_side"),
    StructMember<::xla::ffi::Span<const int64_t>>("v_side"),
    StructMember<::xla::ffi::Span<const int64_t>>("k_scales"),
    StructMember<::xla::ffi::Span<const int64_t>>("v_scales"),
    StructMember<int64_t>("page_size"), StructMember<bool>("token"),
    StructMember<int64_t>("heads"), StructMember<int64_t>("k_heads"),
    StructMember<bool>("gptj"), StructMember<int64_t>("first"),
    StructMember<float>("eps"), StructMember<bool>("gemma"),
    StructMember<bool>("joint"), StructMember<bool>("has_sections"),
    StructMember<bool>("interleaved"), StructMember<int64_t>("section_0"),
    StructMember<int64_t>("section_1"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

// Absent are weight without a norm, and scales that are 1.
struct LatentBuffers : BufferList {
  using BufferList::BufferList;
  Buffer kv_cache = Operand("kv_cache");
  Buffer q_nope = Operand("q_nope");
  Buffer q_pe = Operand("q_pe");
  Buffer kv_c = Operand("kv_c");
  Buffer k_pe = Operand("k_pe");
  Buffer weight = Operand("weight");
  Buffer cos = Operand("cos");
  Buffer sin = Operand("sin");
  Buffer positions = Operand("positions");
  Buffer slots = Operand("slots");
  Buffer q_scale = Operand("q_scale");
  Buffer k_scale = Operand("k_scale");
  Buffer kv_cache_out = Result("kv_cache_out");
  Buffer q_out = Result("q_out");
};

ffi::Error SetLatent(const LatentBuffers& b, const FusedQkAttrs& attrs,
                     aiter::fused_qk_latent_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.q_nope, &a->data_type));
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.q_nope, 3, "[tokens, heads, lora]"));
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.k_pe, 2, "[tokens, rope]"));
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.cos, 2, "[rows, rope / 2]"));
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.kv_cache, 3, "[pages, size, cols]"));
  ffi::DataType type = b.q_nope.element_type();
  a->tokens = b.q_nope.dimensions()[0];
  a->heads = b.q_nope.dimensions()[1];
  a->lora = b.q_nope.dimensions()[2];
  a->rope = b.k_pe.dimensions()[1];
  a->table_rows = b.cos.dimensions()[0];
  Buffer::Dimensions pool = b.kv_cache.dimensions();
  a->slots = pool[0] * pool[1];
  a->width = pool[2];
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.q_pe, type, {a->tokens, a->heads, a->rope}));
  AITER_FFI_RETURN_IF_ERROR(Check(b.kv_c, type, {a->tokens, a->lora}));
  AITER_FFI_RETURN_IF_ERROR(Check(b.k_pe, type, {a->tokens, a->rope}));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.weight, type, {a->lora}, &a->weight_ptr));
  for (const Buffer* table : {&b.cos, &b.sin}) {
    AITER_FFI_RETURN_IF_ERROR(
        Check(*table, ffi::F32, {a->table_rows, a->rope / 2}));
  }
  AITER_FFI_RETURN_IF_ERROR(Check(b.positions, ffi::S32, {a->tokens}));
  AITER_FFI_RETURN_IF_ERROR(Check(b.slots, ffi::S32, {a->tokens}));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.q_scale, ffi::F32, {1}, &a->q_scale_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.k_scale, ffi::F32, {1}, &a->k_scale_ptr));
  AITER_FFI_RETURN_IF_ERROR(CheckLike(b.kv_cache_out, b.kv_cache));
  AITER_FFI_RETURN_IF_ERROR(KindOf(b.kv_cache, type, &a->kind));
  AITER_FFI_RETURN_IF_ERROR(KindOf(b.q_out, type, &a->q_kind));
  AITER_FFI_RETURN_IF_ERROR(
      CheckShape(b.q_out, {a->tokens, a->heads, a->lora + a->rope}));
  a->first = attrs.first;
  a->is_gptj = attrs.gptj;
  a->eps = attrs.eps;
  a->q_nope_ptr = Data(b.q_nope);
  a->q_pe_ptr = Data(b.q_pe);
  a->kv_c_ptr = Data(b.kv_c);
  a->k_pe_ptr = Data(b.k_pe);
  a->cos_ptr = Data(b.cos);
  a->sin_ptr = Data(b.sin);
  a->positions_ptr = Data(b.positions);
  a->slots_ptr = Data(b.slots);
  a->q_out_ptr = Data(b.q_out);
  a->kv_cache_ptr = Data(b.kv_cache_out);
  a->kv_cache_from_ptr = Data(b.kv_cache);
  a->kv_cache_bytes = static_cast<int64_t>(b.kv_cache.size_bytes());
  return ffi::Error::Success();
}

// Absent are caches, slots and their scales without a write; scales that are 1;
// k and v if q has all heads, and v if it is not wanted; weights without a
// norm; sin if cos has both; results that are not asked for.
struct HeadsBuffers : BufferList {
  using BufferList::BufferList;
  Buffer k_cache = Operand("k_cache");
  Buffer v_cache = Operand("v_cache");
  Buffer k_scale = Operand("k_scale");
  Buffer v_scale = Operand("v_scale");
  Buffer q = Operand("q");
  Buffer k = Operand("k");
  Buffer v = Operand("v");
  Buffer q_weight = Operand("q_weight");
  Buffer k_weight = Operand("k_weight");
  Buffer cos = Operand("cos");
  Buffer sin = Operand("sin");
  Buffer positions = Operand("positions");
  Buffer slots = Operand("slots");
  Buffer q_scale = Operand("q_scale");
  Buffer k_cache_out = Result("k_cache_out");
  Buffer v_cache_out = Result("v_cache_out");
  Buffer k_scale_out = Result("k_scale_out");
  Buffer v_scale_out = Result("v_scale_out");
  Buffer q_out = Result("q_out");
  Buffer k_out = Result("k_out");
  Buffer v_out = Result("v_out");
};

const void* Behind(const void* address, int64_t elements) {
  static constexpr int64_t kBytes = 2;  // Of fp16 and bf16.
  return static_cast<const char*>(address) + elements * kBytes;
}

// Queries, keys and values: three arrays, or one that has all.
ffi::Error SetRows(const HeadsBuffers& b, const FusedHeadsAttrs& attrs,
                   ffi::DataType type, aiter::fused_qk_heads_args* a) {
  a->q_ptr = Data(b.q);
  if (!IsPresent(b.k)) {
    AITER_FFI_RETURN_IF_ERROR(CheckRank(b.q, 2, "[tokens, columns]"));
    a->tokens = b.q.dimensions()[0];
    a->heads = attrs.heads;
    a->k_heads = attrs.k_heads;
    int64_t width = b.q.dimensions()[1], all = a->heads + 2 * a->k_heads;
    if (all < 1 || width % all != 0) {
      return Invalid(b.q, "has shape " + ShapeString(b.q.dimensions()),
                     "have columns for " + std::to_string(all) + " heads");
    }
    a->dim = width / all;
    a->v_heads = a->k_heads;
    a->q_stride = a->k_stride = a->v_stride = width;
    a->k_ptr = Behind(a->q_ptr, a->heads * a->dim);
    a->v_ptr = Behind(a->k_ptr, a->k_heads * a->dim);
    return ffi::Error::Success();
  }
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.q, 3, "[tokens, heads, dim]"));
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.k, 3, "[tokens, k_heads, dim]"));
  a->tokens = b.q.dimensions()[0];
  a->heads = b.q.dimensions()[1];
  a->dim = b.q.dimensions()[2];
  a->k_heads = b.k.dimensions()[1];
  AITER_FFI_RETURN_IF_ERROR(Check(b.k, type, {a->tokens, a->k_heads, a->dim}));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.v, type, {a->tokens, a->k_heads, a->dim}, &a->v_ptr));
  a->v_heads = IsPresent(b.v) ? a->k_heads : 0;
  a->k_ptr = Data(b.k);
  a->q_stride = a->heads * a->dim;
  a->k_stride = a->v_stride = a->k_heads * a->dim;
  return ffi::Error::Success();
}

ffi::Error SetTables(const HeadsBuffers& b, ffi::DataType type,
                     aiter::fused_qk_heads_args* a) {
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.cos, 2, "[rows, columns]"));
  a->table_rows = b.cos.dimensions()[0];
  a->table_stride = b.cos.dimensions()[1];
  a->has_f32_tables = b.cos.element_type() == ffi::F32;
  if (!a->has_f32_tables) {
    AITER_FFI_RETURN_IF_ERROR(CheckType(b.cos, type));
  }
  a->cos_ptr = Data(b.cos);
  if (IsPresent(b.sin)) {
    a->pairs = a->table_stride;
    a->sin_ptr = Data(b.sin);
    return CheckLike(b.sin, b.cos);
  }
  a->pairs = a->table_stride / 2;
  a->sin_ptr = Behind(a->cos_ptr, a->has_f32_tables ? 2 * a->pairs : a->pairs);
  return ffi::Error::Success();
}

// A cache and its scales; they have a place of their own where XLA forgets that
// they alias, as in SetHalf of aiter_cache.cc.
ffi::Error SetPool(const Buffer& cache, const Buffer& cache_out,
                   const Buffer& scale, const Buffer& scale_out,
                   const aiter::fused_qk_heads_args& a, aiter::cache_half* h) {
  AITER_FFI_RETURN_IF_ERROR(CheckLike(cache_out, cache));
  h->cols = a.dim;
  h->cache_ptr = Data(cache_out);
  h->cache_size = static_cast<int64_t>(cache_out.element_count());
  h->cache_bytes = static_cast<int64_t>(cache_out.size_bytes());
  h->cache_from_ptr = Data(cache);
  if (!IsPresent(scale)) return ffi::Error::Success();
  AITER_FFI_RETURN_IF_ERROR(CheckType(scale, ffi::F32));
  h->scale_ptr = Data(scale);
  h->scale_size = static_cast<int64_t>(scale.element_count());
  if (!a.token) return ffi::Error::Success();
  AITER_FFI_RETURN_IF_ERROR(CheckLike(scale_out, scale));
  h->scale_from_ptr = Data(scale);
  h->scale_ptr = Data(scale_out);
  return ffi::Error::Success();
}

ffi::Error SetCaches(const HeadsBuffers& b, const FusedHeadsAttrs& attrs,
                     ffi::DataType type, aiter::fused_qk_heads_args* a) {
  if (!IsPresent(b.k_cache)) return ffi::Error::Success();
  Buffer::Dimensions pool = b.k_cache.dimensions();
  if (pool.size() < 2) {
    return Invalid(b.k_cache, "has shape " + ShapeString(pool),
                   "have shape [pages, ...]");
  }
  a->pages = pool[0];
  a->page_size = attrs.page_size;
  AITER_FFI_RETURN_IF_ERROR(KindOf(b.k_cache, type, &a->kind));
  AITER_FFI_RETURN_IF_ERROR(CheckType(b.v_cache, b.k_cache.element_type()));
  AITER_FFI_RETURN_IF_ERROR(SetSide("k_side", attrs.k_side, &a->k_half.side));
  AITER_FFI_RETURN_IF_ERROR(SetSide("v_side", attrs.v_side, &a->v_half.side));
  AITER_FFI_RETURN_IF_ERROR(
      SetScales("k_scales", attrs.k_scales, &a->k_half.scales));
  AITER_FFI_RETURN_IF_ERROR(
      SetScales("v_scales", attrs.v_scales, &a->v_half.scales));
  AITER_FFI_RETURN_IF_ERROR(SetPool(b.k_cache, b.k_cache_out, b.k_scale,
                                    b.k_scale_out, *a, &a->k_half));
  AITER_FFI_RETURN_IF_ERROR(SetPool(b.v_cache, b.v_cache_out, b.v_scale,
                                    b.v_scale_out, *a, &a->v_half));
  AITER_FFI_RETURN_IF_ERROR(Check(b.slots, ffi::S32, {a->tokens}));
  a->slots_ptr = Data(b.slots);
  return ffi::Error::Success();
}

ffi::Error SetHeads(const HeadsBuffers& b, const FusedHeadsAttrs& attrs,
                    aiter::fused_qk_heads_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.q, &a->data_type));
  ffi::DataType type = b.q.element_type();
  a->token = attrs.token;
  AITER_FFI_RETURN_IF_ERROR(SetRows(b, attrs, type, a));
  AITER_FFI_RETURN_IF_ERROR(SetTables(b, type, a));
  AITER_FFI_RETURN_IF_ERROR(SetCaches(b, attrs, type, a));
  const auto weights = [&](int64_t heads) {
    return attrs.joint ? heads * a->dim : a->dim;
  };
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.q_weight, type, {weights(a->heads)}, &a->q_weight_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.k_weight, type, {weights(a->k_heads)}, &a->k_weight_ptr));
  if ((a->q_weight_ptr == nullptr) != (a->k_weight_ptr == nullptr)) {
    return Invalid(b.k_weight, "is alone or absent", "be there as q_weight is");
  }
  if (attrs.has_sections) {
    AITER_FFI_RETURN_IF_ERROR(Check(b.positions, ffi::S32, {3, a->tokens}));
  } else {
    AITER_FFI_RETURN_IF_ERROR(Check(b.positions, ffi::S32, {a->tokens}));
  }
  a->positions_ptr = Data(b.positions);
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.q_scale, ffi::F32, {1}, &a->q_scale_ptr));
  AITER_FFI_RETURN_IF_ERROR(KindOf(b.q_out, type, &a->q_kind));
  AITER_FFI_RETURN_IF_ERROR(CheckShape(b.q_out, {a->tokens, a->heads, a->dim}));
  a->q_out_ptr = Data(b.q_out);
  Shape kv = {a->tokens, a->k_heads, a->dim};
  AITER_FFI_RETURN_IF_ERROR(Optional(b.k_out, type, kv, &a->k_out_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional(b.v_out, type, kv, &a->v_out_ptr));
  if (a->v_heads > 0 &&
      (a->k_out_ptr == nullptr) != (a->v_out_ptr == nullptr)) {
    return Invalid(b.v_out, "is alone or absent", "be there as k_out is");
  }
  if (a->v_heads == 0 && IsPresent(b.k_cache)) {
    return Invalid(b.v, "is absent", "be there, for its cache");
  }
  a->is_gptj = attrs.gptj;
  a->first = attrs.first;
  a->eps = attrs.eps;
  a->is_gemma = attrs.gemma;
  a->is_joint = attrs.joint;
  a->has_sections = attrs.has_sections;
  a->is_interleaved = attrs.interleaved;
  a->section_0 = attrs.section_0;
  a->section_1 = attrs.section_1;
  return ffi::Error::Success();
}

// Absent are a residual and its sum, a gate, weights and keys without norms, a
// bias, tables and positions without a rotation, a scale that is found, and
// results that are not asked for.
struct RowsBuffers : BufferList {
  using BufferList::BufferList;
  Buffer q = Operand("q");
  Buffer residual = Operand("residual");
  Buffer gate = Operand("gate");
  Buffer q_weight = Operand("q_weight");
  Buffer bias = Operand("bias");
  Buffer k = Operand("k");
  Buffer k_weight = Operand("k_weight");
  Buffer cos = Operand("cos");
  Buffer sin = Operand("sin");
  Buffer positions = Operand("positions");
  Buffer q_scale = Operand("q_scale");
  Buffer q_out = Result("q_out");
  Buffer residual_out = Result("residual_out");
  Buffer codes = Result("codes");
  Buffer scale = Result("scale");
  Buffer k_out = Result("k_out");
};

// Takes codes [tokens, columns, or half as many] and scales of all columns.
ffi::Error SetCodes(const RowsBuffers& b, const FusedRowsAttrs& attrs,
                    int64_t width, aiter::fused_qk_rows_args* a) {
  if (!IsPresent(b.codes)) return ffi::Error::Success();
  AITER_FFI_RETURN_IF_ERROR(QuantTypeOf(b.codes, &a->q_type));
  bool halves = a->q_type == aiter::DataType::kE2m1;
  AITER_FFI_RETURN_IF_ERROR(
      CheckShape(b.codes, {a->tokens, halves ? width / 2 : width}));
  a->codes_ptr = Data(b.codes);
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.q_scale, ffi::F32, {1}, &a->q_scale_ptr));
  if (a->q_scale_ptr != nullptr) return ffi::Error::Success();
  a->scale_is_e8m0 = b.scale.element_type() == ffi::U8;
  if (a->scale_is_e8m0) {
    AITER_FFI_RETURN_IF_ERROR(
        Choose("mode", attrs.mode, kMxRoundings, &a->mode));
  }
  int64_t groups =
      attrs.group < 1 ? 1 : (width + attrs.group - 1) / attrs.group;
  Shape rows = {a->tokens, groups}, columns = {groups, a->tokens};
  AITER_FFI_RETURN_IF_ERROR(Check(b.scale,
                                  a->scale_is_e8m0 ? ffi::U8 : ffi::F32,
                                  attrs.transposed ? columns : rows));
  a->group = attrs.group;
  a->scale_token = attrs.transposed ? 1 : groups;
  a->scale_group = attrs.transposed ? a->tokens : 1;
  a->scale_ptr = Data(b.scale);
  return ffi::Error::Success();
}

ffi::Error SetFusedRows(const RowsBuffers& b, const FusedRowsAttrs& attrs,
                        aiter::fused_qk_rows_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.q, &a->data_type));
  ffi::DataType type = b.q.element_type();
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.q, 2, "[tokens, columns]"));
  a->tokens = b.q.dimensions()[0];
  a->parts = attrs.parts;
  int64_t width = b.q.dimensions()[1];
  if (attrs.parts < 1 || width % attrs.parts != 0) {
    return Invalid(
        b.q, "has shape " + ShapeString(b.q.dimensions()),
        "have columns for " + std::to_string(attrs.parts) + " parts");
  }
  a->cols = width / attrs.parts;
  a->dim = attrs.dim;
  a->first = attrs.first;
  a->is_gptj = attrs.gptj;
  a->is_gemma = attrs.gemma;
  a->eps = attrs.eps;
  a->k_eps = attrs.k_eps;
  a->least = attrs.least;
  a->is_sigmoid = attrs.sigmoid;
  a->is_gated_first = attrs.gated_first;
  a->is_narrow = attrs.narrow;
  a->q_ptr = Data(b.q);
  Shape all = {a->tokens, width};
  AITER_FFI_RETURN_IF_ERROR(Optional(b.residual, type, all, &a->residual_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.residual_out, type, all, &a->residual_out_ptr));
  if ((a->residual_ptr == nullptr) != (a->residual_out_ptr == nullptr)) {
    return Invalid(b.residual_out, "is alone or absent",
                   "be there as residual is");
  }
  AITER_FFI_RETURN_IF_ERROR(Optional(b.gate, type, all, &a->gate_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional(b.q_out, type, all, &a->q_out_ptr));
  Shape norm = {attrs.dim < 1 ? width : attrs.dim};
  AITER_FFI_RETURN_IF_ERROR(Optional(b.q_weight, type, norm, &a->q_weight_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional(b.bias, type, norm, &a->bias_ptr));
  if (IsPresent(b.k)) {
    AITER_FFI_RETURN_IF_ERROR(CheckRank(b.k, 2, "[tokens, columns]"));
    a->k_cols = b.k.dimensions()[1];
    Shape keys = {a->tokens, a->k_cols};
    AITER_FFI_RETURN_IF_ERROR(Check(b.k, type, keys));
    AITER_FFI_RETURN_IF_ERROR(Check(b.k_out, type, keys));
    AITER_FFI_RETURN_IF_ERROR(Check(b.k_weight, type, {a->k_cols}));
    a->k_ptr = Data(b.k);
    a->k_weight_ptr = Data(b.k_weight);
    a->k_out_ptr = Data(b.k_out);
  }
  if (IsPresent(b.positions)) {
    AITER_FFI_RETURN_IF_ERROR(CheckRank(b.cos, 2, "[rows, pairs]"));
    a->table_rows = b.cos.dimensions()[0];
    a->pairs = b.cos.dimensions()[1];
    for (const Buffer* table : {&b.cos, &b.sin}) {
      AITER_FFI_RETURN_IF_ERROR(
          Check(*table, ffi::F32, {a->table_rows, a->pairs}));
    }
    AITER_FFI_RETURN_IF_ERROR(Check(b.positions, ffi::S32, {a->tokens}));
    a->cos_ptr = Data(b.cos);
    a->sin_ptr = Data(b.sin);
    a->positions_ptr = Data(b.positions);
  }
  return SetCodes(b, attrs, width, a);
}

const Family kFusedQk({TargetOf<SetLatent>(), TargetOf<SetHeads>(),
                       TargetOf<SetFusedRows>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
