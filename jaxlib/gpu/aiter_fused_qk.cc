// SPDX-License-Identifier: Apache-2.0

// XLA FFI target of what stands between projections and attention. Operands,
// results and attributes: jax/_src/aiter/fused_qk/op.py.

#include <cstdint>
#include <string>

#include "aiter/fused_qk.h"
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

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax::JAX_GPU_NAMESPACE::FusedQkAttrs,
                                      StructMember<bool>("gptj"),
                                      StructMember<int64_t>("first"),
                                      StructMember<float>("eps"));

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

const Family kFusedQk({TargetOf<SetLatent>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
