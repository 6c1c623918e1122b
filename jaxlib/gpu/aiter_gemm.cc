// SPDX-License-Identifier: Apache-2.0

// XLA FFI target of matrix products. Operands, results and attributes:
// jax/_src/aiter/gemm/op.py.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "aiter/gemm.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

struct GemmAttrs {
  std::string_view layout;
  std::string_view scaling;
  std::string_view activation;
  std::string_view kernel;  // For tuning: empty leaves it to the library.
  int32_t splits;           // Likewise 0.
};

}  // namespace jax::JAX_GPU_NAMESPACE

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax::JAX_GPU_NAMESPACE::GemmAttrs,
    StructMember<std::string_view>("layout"),
    StructMember<std::string_view>("scaling"),
    StructMember<std::string_view>("activation"),
    StructMember<std::string_view>("kernel"), StructMember<int32_t>("splits"));

namespace jax::JAX_GPU_NAMESPACE {
namespace {

constexpr int64_t kScaleBlock = 128;
constexpr int64_t kMxBlock = 32;

struct Scaling {
  aiter::GemmScaling by;
  bool transposed = false;  // Scales of blocks lie as [k's blocks, rows].
};

constexpr Choice<aiter::GemmLayout> kLayouts[] = {
    {"nt", aiter::GemmLayout::kNT},
    {"nn", aiter::GemmLayout::kNN},
    {"tn", aiter::GemmLayout::kTN},
};
constexpr Choice<Scaling> kScalings[] = {
    {"none", {aiter::GemmScaling::kNone}},
    {"row", {aiter::GemmScaling::kRow}},
    {"block", {aiter::GemmScaling::kBlock}},
    {"block_t", {aiter::GemmScaling::kBlock, true}},
    {"mx", {aiter::GemmScaling::kMx}},
};
constexpr Choice<aiter::GemmActivation> kActivations[] = {
    {"none", aiter::GemmActivation::kNone},
    {"relu", aiter::GemmActivation::kRelu},
    {"gelu", aiter::GemmActivation::kGelu},
    {"gelu_tanh", aiter::GemmActivation::kGeluTanh},
    {"silu", aiter::GemmActivation::kSilu},
};

struct Buffers : BufferList {
  using BufferList::BufferList;
  Buffer a = Operand("a");
  Buffer b = Operand("b");
  Buffer a_scale = Operand("a_scale");
  Buffer b_scale = Operand("b_scale");
  Buffer bias = Operand("bias");
  Buffer out = Result("out");
  Buffer workspace = Result("workspace");
};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One of the two operands, with its scales.
struct Matrix {
  Buffer buffer, scale;
  bool k_first;  // [k, rows], else [rows, k].
  int64_t rows = 0, k = 0;
  int64_t stride = 0, batch_stride = 0;
  int64_t scale_stride = 0, scale_k_stride = 0, scale_batch_stride = 0;
};

bool IsBatched(const Matrix& x) { return x.buffer.dimensions().size() == 3; }

// Reads the sizes off an operand.
ffi::Error SetSizes(int64_t elements_per_byte, Matrix* x) {
  Buffer::Dimensions dims = x->buffer.dimensions();
  if (dims.size() != 2 && dims.size() != 3) {
    return Invalid(x->buffer, "has shape " + ShapeString(dims),
                   "have rank 2, or 3 with a batch");
  }
  int64_t outer = dims[dims.size() - 2];
  x->stride = dims[dims.size() - 1];
  x->rows = x->k_first ? x->stride : outer;
  x->k = x->k_first ? outer : x->stride * elements_per_byte;
  x->batch_stride = IsBatched(*x) ? outer * x->stride : 0;
  return ffi::Error::Success();
}

// Checks the scales of an operand and sets their strides. `row_block` of the
// operand's rows share a scale.
ffi::Error SetScales(const Scaling& scaling, int64_t row_block, Matrix* x) {
  if (scaling.by == aiter::GemmScaling::kNone) {
    if (!IsPresent(x->scale)) return ffi::Error::Success();
    return Invalid(x->scale, "is given", "be absent without scaling");
  }
  std::vector<int64_t> shape;
  if (IsBatched(*x)) shape.push_back(x->buffer.dimensions()[0]);
  bool mx = scaling.by == aiter::GemmScaling::kMx;
  AITER_FFI_RETURN_IF_ERROR(CheckType(x->scale, mx ? ffi::U8 : ffi::F32));
  if (scaling.by == aiter::GemmScaling::kRow) {
    Buffer::Dimensions dims = x->scale.dimensions();
    if (dims.size() == 1 && dims[0] == 1) return ffi::Error::Success();
    shape.push_back(x->rows);
    x->scale_stride = 1;
    x->scale_batch_stride = IsBatched(*x) ? x->rows : 0;
    return CheckShape(x->scale, shape);
  }
  int64_t along_k = CeilDiv(x->k, mx ? kMxBlock : kScaleBlock);
  int64_t along_rows = CeilDiv(x->rows, row_block);
  shape.push_back(scaling.transposed ? along_k : along_rows);
  shape.push_back(scaling.transposed ? along_rows : along_k);
  x->scale_stride = scaling.transposed ? 1 : along_k;
  x->scale_k_stride = scaling.transposed ? along_rows : 1;
  x->scale_batch_stride = IsBatched(*x) ? along_rows * along_k : 0;
  return CheckShape(x->scale, shape);
}

ffi::Error SetGemm(const Buffers& in, const GemmAttrs& attrs,
                   aiter::gemm_args* args) {
  Scaling scaling;
  AITER_FFI_RETURN_IF_ERROR(
      Choose("layout", attrs.layout, kLayouts, &args->layout));
  AITER_FFI_RETURN_IF_ERROR(
      Choose("scaling", attrs.scaling, kScalings, &scaling));
  AITER_FFI_RETURN_IF_ERROR(
      Choose("activation", attrs.activation, kActivations, &args->activation));
  args->scaling = scaling.by;
  bool scaled = args->scaling != aiter::GemmScaling::kNone;
  auto type_of = scaled ? QuantTypeOf : FloatTypeOf;
  AITER_FFI_RETURN_IF_ERROR(type_of(in.a, &args->a_type));
  AITER_FFI_RETURN_IF_ERROR(type_of(in.b, &args->b_type));
  AITER_FFI_RETURN_IF_ERROR(FloatTypeOf(in.out, &args->out_type));

  Matrix a = {in.a, in.a_scale, args->layout == aiter::GemmLayout::kTN};
  Matrix b = {in.b, in.b_scale, args->layout != aiter::GemmLayout::kNT};
  int64_t packed = args->a_type == aiter::DataType::kE2m1 ? 2 : 1;
  AITER_FFI_RETURN_IF_ERROR(SetSizes(packed, &a));
  AITER_FFI_RETURN_IF_ERROR(SetSizes(packed, &b));
  if (a.k != b.k) {
    return Invalid(in.b, "has shape " + ShapeString(in.b.dimensions()),
                   "have as many elements to sum as a of shape " +
                       ShapeString(in.a.dimensions()));
  }
  if (IsBatched(a) && IsBatched(b) &&
      in.a.dimensions()[0] != in.b.dimensions()[0]) {
    return Invalid(
        in.b, "has shape " + ShapeString(in.b.dimensions()),
        "have the batch of a of shape " + ShapeString(in.a.dimensions()));
  }
  AITER_FFI_RETURN_IF_ERROR(SetScales(scaling, 1, &a));
  AITER_FFI_RETURN_IF_ERROR(SetScales(
      scaling, args->scaling == aiter::GemmScaling::kBlock ? kScaleBlock : 1,
      &b));
  args->m = a.rows;
  args->n = b.rows;
  args->k = a.k;
  std::vector<int64_t> out_shape = {args->m, args->n};
  if (IsBatched(a) || IsBatched(b)) {
    args->batch = (IsBatched(a) ? in.a : in.b).dimensions()[0];
    out_shape.insert(out_shape.begin(), args->batch);
  }
  AITER_FFI_RETURN_IF_ERROR(CheckShape(in.out, out_shape));
  AITER_FFI_RETURN_IF_ERROR(CheckType(in.workspace, ffi::F32));

  args->a_ptr = in.a.untyped_data();
  args->stride_a = a.stride;
  args->batch_stride_a = a.batch_stride;
  args->b_ptr = in.b.untyped_data();
  args->stride_b = b.stride;
  args->batch_stride_b = b.batch_stride;
  if (scaled) {
    args->a_scale_ptr = Data(in.a_scale);
    args->b_scale_ptr = Data(in.b_scale);
  }
  args->stride_a_scale = a.scale_stride;
  args->k_stride_a_scale = a.scale_k_stride;
  args->batch_stride_a_scale = a.scale_batch_stride;
  args->stride_b_scale = b.scale_stride;
  args->k_stride_b_scale = b.scale_k_stride;
  args->batch_stride_b_scale = b.scale_batch_stride;
  args->bias_is_f32 = in.bias.element_type() == ffi::F32;
  AITER_FFI_RETURN_IF_ERROR(
      Optional(in.bias, args->bias_is_f32 ? ffi::F32 : in.out.element_type(),
               {args->n}, &args->bias_ptr));
  args->out_ptr = in.out.untyped_data();
  args->workspace_bytes = static_cast<int64_t>(in.workspace.size_bytes());
  args->workspace_ptr = Address(in.workspace);
  args->kernel = attrs.kernel;
  args->splits = attrs.splits;
  return ffi::Error::Success();
}

const Family kGemm({TargetOf<SetGemm>()});

}  // namespace
}  // namespace jax::JAX_GPU_NAMESPACE
