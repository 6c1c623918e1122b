// SPDX-License-Identifier: Apache-2.0

// XLA FFI targets of sampling. Operands, results and attributes:
// jax/_src/aiter/sampling/op.py.

#include <cstdint>
#include <string_view>

#include "aiter/sampling.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

struct DrawAttrs {
  std::string_view of;
  bool probs;
  bool k_first;
};

struct TopKAttrs {
  int32_t k;
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax::JAX_GPU_NAMESPACE::DrawAttrs,
                                      StructMember<std::string_view>("of"),
                                      StructMember<bool>("probs"),
                                      StructMember<bool>("k_first"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax::JAX_GPU_NAMESPACE::TopKAttrs,
                                      StructMember<int32_t>("k"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

constexpr Choice<aiter::SamplingOf> kOf[] = {
    {"largest", aiter::SamplingOf::kLargest},
    {"draw", aiter::SamplingOf::kDraw},
    {"limit", aiter::SamplingOf::kLimit},
};

struct DrawBuffers : BufferList {
  using BufferList::BufferList;
  Buffer logits = Operand("logits");
  Buffer keys = Operand("keys");
  Buffer temperature = Operand("temperature");
  Buffer top_k = Operand("top_k");
  Buffer top_p = Operand("top_p");
  Buffer min_p = Operand("min_p");
  Buffer mask = Operand("mask");
  Buffer exponentials = Operand("exponentials");
  Buffer tokens = Result("tokens");
  Buffer best = Result("best");
  Buffer maxima = Result("maxima");
  Buffer histogram = Result("histogram");
  Buffer sums = Result("sums");
  Buffer candidates = Result("candidates");
  Buffer state = Result("state");
};

struct TopKBuffers : BufferList {
  using BufferList::BufferList;
  Buffer logits = Operand("x");
  Buffer values = Result("values");
  Buffer columns = Result("places");
  Buffer best = Result("best");
  Buffer maxima = Result("maxima");
  Buffer histogram = Result("histogram");
  Buffer sums = Result("sums");
  Buffer candidates = Result("candidates");
  Buffer state = Result("state");
};

struct SelectBuffers : BufferList {
  using BufferList::BufferList;
  Buffer logits = Operand("logits");
  Buffer spans = Operand("spans");
  Buffer columns = Result("columns");
  Buffer candidates = Result("candidates");
};

template <typename Buffers>
ffi::Error SetRows(const Buffers& b, aiter::sampling_rows_args* a) {
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(b.logits, &a->data_type));
  Buffer::Dimensions dims = b.logits.dimensions();
  if (dims.size() != 2) {
    return Invalid(b.logits, "has shape " + ShapeString(dims),
                   "have shape [rows, columns]");
  }
  a->rows = dims[0];
  a->cols = dims[1];
  a->logits_ptr = Data(b.logits);
  return Optional(b.candidates, ffi::S32, {a->rows, aiter::kSamplingCandidates},
                  &a->candidates_ptr);
}

// Numbers of 64 bits are pairs of 32.
template <typename Buffers>
ffi::Error SetParts(const Buffers& b, aiter::sampling_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetRows(b, a));
  Buffer::Dimensions best = b.best.dimensions();
  a->parts = best.size() == 4 ? best[2] : 0;
  AITER_FFI_RETURN_IF_ERROR(Check(b.best, ffi::U32, {a->rows, 2, a->parts, 2}));
  a->best_ptr = Data(b.best);
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.maxima, ffi::U32,
               {a->rows, a->parts, aiter::kSamplingMaxima, 2}, &a->maxima_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional(
      b.histogram, ffi::U32, {a->rows, a->parts, aiter::kSamplingBins, 2},
      &a->histogram_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.sums, ffi::U32, {a->rows, a->parts, aiter::kSamplingSums, 2},
               &a->sums_ptr));
  return Optional(b.state, ffi::U32, {a->rows, aiter::kSamplingState, 2},
                  &a->state_ptr);
}

ffi::Error SetDraw(const DrawBuffers& b, const DrawAttrs& attrs,
                   aiter::sampling_draw_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetParts(b, a));
  AITER_FFI_RETURN_IF_ERROR(Choose("of", attrs.of, kOf, &a->of));
  a->is_of_probs = attrs.probs;
  a->is_k_first = attrs.k_first;
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.keys, ffi::U32, {a->rows, 4}, &a->keys_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.temperature, ffi::F32, {a->rows}, &a->temperature_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.top_k, ffi::S32, {a->rows}, &a->top_k_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.top_p, ffi::F32, {a->rows}, &a->top_p_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.min_p, ffi::F32, {a->rows}, &a->min_p_ptr));
  AITER_FFI_RETURN_IF_ERROR(
      Optional(b.mask, ffi::S32, {a->rows, (a->cols + 31) / 32}, &a->mask_ptr));
  AITER_FFI_RETURN_IF_ERROR(Optional(b.exponentials, ffi::F32,
                                     {a->rows, a->cols}, &a->exponentials_ptr));
  return Optional(b.tokens, ffi::S32, {a->rows}, &a->tokens_ptr);
}

ffi::Error SetTopK(const TopKBuffers& b, const TopKAttrs& attrs,
                   aiter::sampling_top_k_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetParts(b, a));
  a->k = attrs.k;
  AITER_FFI_RETURN_IF_ERROR(
      Check(b.values, b.logits.element_type(), {a->rows, a->k}));
  AITER_FFI_RETURN_IF_ERROR(Check(b.columns, ffi::S32, {a->rows, a->k}));
  a->values_ptr = Data(b.values);
  a->columns_ptr = Data(b.columns);
  return ffi::Error::Success();
}

ffi::Error SetSelect(const SelectBuffers& b, const TopKAttrs& attrs,
                     aiter::sampling_select_args* a) {
  AITER_FFI_RETURN_IF_ERROR(SetRows(b, a));
  a->k = attrs.k;
  AITER_FFI_RETURN_IF_ERROR(Check(b.spans, ffi::S32, {a->rows, 2}));
  AITER_FFI_RETURN_IF_ERROR(Check(b.columns, ffi::S32, {a->rows, a->k}));
  a->spans_ptr = Data(b.spans);
  a->columns_ptr = Data(b.columns);
  return ffi::Error::Success();
}

const Family kSampling({TargetOf<SetDraw>(), TargetOf<SetTopK>(),
                        TargetOf<SetSelect>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
