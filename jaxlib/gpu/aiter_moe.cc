// SPDX-License-Identifier: Apache-2.0

// XLA FFI targets of routing. Operands, results and attributes:
// jax/_src/aiter/moe/op.py.

#include <cstdint>

#include "aiter/moe.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

struct MoeTopKAttrs {
  int32_t groups;
  int32_t topk_groups;
  bool by_sum;
};

struct MoeSortAttrs {
  int32_t block;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax::JAX_GPU_NAMESPACE::MoeTopKAttrs,
                                      StructMember<int32_t>("groups"),
                                      StructMember<int32_t>("topk_groups"),
                                      StructMember<bool>("by_sum"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax::JAX_GPU_NAMESPACE::MoeSortAttrs,
                                      StructMember<int32_t>("block"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

struct TopKBuffers : BufferList {
  using BufferList::BufferList;
  Buffer scores = Operand("scores");
  Buffer ids = Result("ids");
};

struct SortBuffers : BufferList {
  using BufferList::BufferList;
  Buffer ids = Operand("ids");
  Buffer counts = Result("counts");
  Buffer place = Result("place");
  Buffer order = Result("order");
  Buffer partial = Result("partial");
};

ffi::Error SetTopK(const TopKBuffers& b, const MoeTopKAttrs& attrs,
                   aiter::moe_topk_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.scores, &a->data_type));
  Buffer::Dimensions scores = b.scores.dimensions();
  Buffer::Dimensions ids = b.ids.dimensions();
  if (scores.size() != 2 || attrs.groups < 1 || scores[1] % attrs.groups != 0) {
    return Invalid(b.scores, "has shape " + ShapeString(scores),
                   "have shape [rows, groups * size]");
  }
  if (ids.size() != 2) {
    return Invalid(b.ids, "has shape " + ShapeString(ids),
                   "have shape [rows, k]");
  }
  a->rows = scores[0];
  a->groups = attrs.groups;
  a->size = scores[1] / attrs.groups;
  a->topk_groups = attrs.topk_groups;
  a->by_sum = attrs.by_sum;
  a->k = ids[1];
  AITER_FFI_RETURN_IF_ERROR(Check(b.ids, ffi::S32, {a->rows, a->k}));
  a->scores_ptr = Data(b.scores);
  a->ids_ptr = Data(b.ids);
  return ffi::Error::Success();
}

ffi::Error SetSort(const SortBuffers& b, const MoeSortAttrs& attrs,
                   aiter::moe_sort_args* a) {
  Buffer::Dimensions ids = b.ids.dimensions();
  Buffer::Dimensions counts = b.counts.dimensions();
  if (ids.size() != 1 || counts.size() != 1) {
    return Invalid(b.ids, "has shape " + ShapeString(ids),
                   "have shape [entries], and counts [experts]");
  }
  a->entries = ids[0];
  a->experts = counts[0];
  a->block = attrs.block;
  AITER_FFI_RETURN_IF_ERROR(CheckType(b.ids, ffi::S32));
  AITER_FFI_RETURN_IF_ERROR(CheckType(b.counts, ffi::S32));
  AITER_FFI_RETURN_IF_ERROR(Check(b.place, ffi::S32, {a->entries}));
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.order, ffi::S32, {a->entries + a->experts * (a->block - 1)}));
  AITER_FFI_RETURN_IF_ERROR(Check(
      b.partial, ffi::S32,
      {(a->entries + aiter::kMoePart - 1) / aiter::kMoePart, a->experts}));
  a->ids_ptr = Data(b.ids);
  a->counts_ptr = Data(b.counts);
  a->place_ptr = Data(b.place);
  a->order_ptr = Data(b.order);
  a->partial_ptr = Data(b.partial);
  return ffi::Error::Success();
}

const Family kMoe({TargetOf<SetTopK>(), TargetOf<SetSort>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
