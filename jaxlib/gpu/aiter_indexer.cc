// SPDX-License-Identifier: Apache-2.0

// XLA FFI target of the lightning indexer's logits. Operands, results and
// attributes: jax/_src/aiter/indexer/op.py.

#include <cstdint>

#include "aiter/indexer.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

struct IndexerAttrs {
  int64_t page_size;
  bool tiles;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax::JAX_GPU_NAMESPACE::IndexerAttrs,
                                      StructMember<int64_t>("page_size"),
                                      StructMember<bool>("tiles"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

// Absent are k_scale and starts of pages, and else table.
struct LogitsBuffers : BufferList {
  using BufferList::BufferList;
  Buffer q = Operand("q");
  Buffer k = Operand("k");
  Buffer k_scale = Operand("k_scale");
  Buffer weights = Operand("weights");
  Buffer table = Operand("table");
  Buffer starts = Operand("starts");
  Buffer ends = Operand("ends");
  Buffer logits = Result("logits");
};

ffi::Error SetPages(const LogitsBuffers& b, const IndexerAttrs& attrs,
                    aiter::indexer_logits_args* a) {
  static constexpr int64_t kScaleBytes = 4;
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.k, 2, "[pages, bytes]"));
  AITER_FFI_RETURN_IF_ERROR(CheckRank(b.table, 2, "[sequences, pages]"));
  a->pages = b.k.dimensions()[0];
  a->page_size = attrs.page_size;
  a->tiles = attrs.tiles;
  a->table_width = b.table.dimensions()[1];
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.k, ffi::U8, {a->pages, a->page_size * (a->dim + kScaleBytes)}));
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.table, ffi::S32, {a->sequences, a->table_width}));
  a->table_ptr = Data(b.table);
  return Check(b.ends, ffi::S32, {a->sequences});
}

ffi::Error SetLogits(const LogitsBuffers& b, const IndexerAttrs& attrs,
                     aiter::indexer_logits_args* a) {
  AITER_FFI_RETURN_IF_ERROR(QuantTypeOf(b.q, &a->data_type));
  AITER_FFI_RETURN_IF_ERROR(
      CheckRank(b.q, 4, "[sequences, next_n, heads, dim]"));
  AITER_FFI_RETURN_IF_ERROR(
      CheckRank(b.logits, 3, "[sequences, next_n, columns]"));
  a->sequences = b.q.dimensions()[0];
  a->next_n = b.q.dimensions()[1];
  a->heads = b.q.dimensions()[2];
  a->dim = b.q.dimensions()[3];
  a->cols = b.logits.dimensions()[2];
  if (attrs.page_size > 0) {
    AITER_FFI_RETURN_IF_ERROR(SetPages(b, attrs, a));
  } else {
    AITER_FFI_RETURN_IF_ERROR(
        Check(b.k, b.q.element_type(), {a->cols, a->dim}));
    AITER_FFI_RETURN_IF_ERROR(Check(b.k_scale, ffi::F32, {a->cols}));
    AITER_FFI_RETURN_IF_ERROR(Check(b.starts, ffi::S32, {a->next_n}));
    AITER_FFI_RETURN_IF_ERROR(Check(b.ends, ffi::S32, {a->next_n}));
    a->k_scale_ptr = Data(b.k_scale);
    a->starts_ptr = Data(b.starts);
  }
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.weights, ffi::F32, {a->sequences, a->next_n, a->heads}));
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.logits, ffi::F32, {a->sequences, a->next_n, a->cols}));
  a->q_ptr = Data(b.q);
  a->k_ptr = Data(b.k);
  a->weights_ptr = Data(b.weights);
  a->ends_ptr = Data(b.ends);
  a->logits_ptr = Data(b.logits);
  return ffi::Error::Success();
}

const Family kIndexer({TargetOf<SetLogits>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
