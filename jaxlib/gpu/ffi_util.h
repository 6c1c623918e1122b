// SPDX-License-Identifier: Apache-2.0

// What the FFI handlers of all operators share: checks of buffers, errors.
#ifndef JAXLIB_GPU_FFI_UTIL_H_
#define JAXLIB_GPU_FFI_UTIL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>

#include "aiter/kernel.h"
#include "aiter/quant.h"
#include "aiter/status.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace jax::JAX_GPU_NAMESPACE {

// A buffer and what messages call it.
class Buffer : public ffi::AnyBuffer {
 public:
  Buffer(const char* name, ffi::AnyBuffer buffer)
      : ffi::AnyBuffer(buffer), name_(name) {}

  const char* name() const { return name_; }

 private:
  const char* name_;
};

using Shape = std::initializer_list<int64_t>;

#define AITER_FFI_RETURN_IF_ERROR(expr)                 \
  do {                                                  \
    if (ffi::Error error_ = (expr); error_.failure()) { \
      return error_;                                    \
    }                                                   \
  } while (false)

template <typename Dims>
std::string ShapeString(const Dims& dims) {
  std::string text = "[";
  for (int64_t dim : dims) {
    text += (text.size() > 1 ? "," : "") + std::to_string(dim);
  }
  return text + "]";
}

inline std::string ShapeString(const Shape& dims) {
  return ShapeString<Shape>(dims);
}

inline ffi::Error Invalid(const char* name, const std::string& given,
                          const std::string& accepted) {
  return ffi::Error::InvalidArgument(std::string("aiter: ") + name + " " +
                                     given + ", but must " + accepted);
}

inline ffi::Error Invalid(const Buffer& buffer, const std::string& given,
                          const std::string& accepted) {
  return Invalid(buffer.name(), given, accepted);
}

// An attribute that chooses is a name, and what it chooses is in a table.
template <typename T>
struct Choice {
  std::string_view name;
  T value;
};

inline constexpr Choice<aiter::MxRounding> kMxRoundings[] = {
    {"down", aiter::MxRounding::kDown},
    {"up", aiter::MxRounding::kUp},
    {"even", aiter::MxRounding::kEven},
    {"ceil", aiter::MxRounding::kCeil},
};

template <typename T, size_t kSize>
ffi::Error Choose(const char* attribute, std::string_view name,
                  const Choice<T> (&choices)[kSize], T* value) {
  const Choice<T>* found =
      std::find_if(std::begin(choices), std::end(choices),
                   [name](const Choice<T>& c) { return c.name == name; });
  if (found != std::end(choices)) {
    *value = found->value;
    return ffi::Error::Success();
  }
  std::string accepted;
  for (const Choice<T>& choice : choices) {
    accepted += (accepted.empty() ? "be " : " or ") + std::string(choice.name);
  }
  return Invalid(attribute, "is " + std::string(name), accepted);
}

// As NumPy has it; a runtime newer than the headers may know more types.
inline std::string TypeName(ffi::DataType type) {
  switch (type) {
    case ffi::PRED:
      return "bool";
    case ffi::S8:
      return "int8";
    case ffi::S32:
      return "int32";
    case ffi::S64:
      return "int64";
    case ffi::U8:
      return "uint8";
    case ffi::U32:
      return "uint32";
    case ffi::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::F8E4M3FNUZ:
      return "float8_e4m3fnuz";
    case ffi::F16:
      return "float16";
    case ffi::BF16:
      return "bfloat16";
    case ffi::F32:
      return "float32";
    case ffi::F64:
      return "float64";
    default:
      return "number " + std::to_string(static_cast<int>(type)) + " of XLA";
  }
}

inline ffi::Error CheckType(const Buffer& buffer, ffi::DataType type) {
  if (buffer.element_type() == type) return ffi::Error::Success();
  return Invalid(buffer, "has dtype " + TypeName(buffer.element_type()),
                 "have dtype " + TypeName(type));
}

template <typename Dims>
ffi::Error CheckShape(const Buffer& buffer, const Dims& shape) {
  Buffer::Dimensions dims = buffer.dimensions();
  if (std::equal(dims.begin(), dims.end(), shape.begin(), shape.end())) {
    return ffi::Error::Success();
  }
  return Invalid(buffer, "has shape " + ShapeString(dims),
                 "have shape " + ShapeString(shape));
}

inline ffi::Error CheckShape(const Buffer& buffer, Shape shape) {
  return CheckShape<Shape>(buffer, shape);
}

inline ffi::Error Check(const Buffer& buffer, ffi::DataType type, Shape shape) {
  AITER_FFI_RETURN_IF_ERROR(CheckType(buffer, type));
  return CheckShape(buffer, shape);
}

inline ffi::Error CheckLike(const Buffer& buffer, const Buffer& like) {
  AITER_FFI_RETURN_IF_ERROR(CheckType(buffer, like.element_type()));
  return CheckShape(buffer, like.dimensions());
}

// `shape` says in words what the dimensions are.
inline ffi::Error CheckRank(const Buffer& buffer, size_t rank,
                            const char* shape) {
  if (buffer.dimensions().size() == rank) return ffi::Error::Success();
  return Invalid(buffer, "has shape " + ShapeString(buffer.dimensions()),
                 std::string("have shape ") + shape);
}

// What a tensor holds: one of a family's kinds of bytes, or else numbers of
// `type`, Kind::kSame.
template <typename Kind>
ffi::Error KindOf(const Buffer& buffer, ffi::DataType type, Kind* kind) {
  switch (buffer.element_type()) {
    case ffi::S8:
      *kind = Kind::kInt8;
      return ffi::Error::Success();
    case ffi::F8E4M3FN:
      *kind = Kind::kE4m3fn;
      return ffi::Error::Success();
    case ffi::F8E4M3FNUZ:
      *kind = Kind::kE4m3fnuz;
      return ffi::Error::Success();
    case ffi::F8E5M2:
      *kind = Kind::kE5m2;
      return ffi::Error::Success();
    default:
      *kind = Kind::kSame;
      return CheckType(buffer, type);
  }
}

// The type of a tensor of numbers that are not quantised.
inline ffi::Error FloatTypeOf(const Buffer& buffer, aiter::DataType* type) {
  switch (buffer.element_type()) {
    case ffi::F16:
      *type = aiter::DataType::kFp16;
      return ffi::Error::Success();
    case ffi::BF16:
      *type = aiter::DataType::kBf16;
      return ffi::Error::Success();
    case ffi::F32:
      *type = aiter::DataType::kFp32;
      return ffi::Error::Success();
    default:
      return Invalid(buffer, "has dtype " + TypeName(buffer.element_type()),
                     "have dtype float16, bfloat16 or float32");
  }
}

// The type of a quantised tensor; bytes are pairs of e2m1.
inline ffi::Error QuantTypeOf(const Buffer& buffer, aiter::DataType* type) {
  switch (buffer.element_type()) {
    case ffi::S8:
      *type = aiter::DataType::kI8;
      return ffi::Error::Success();
    case ffi::F8E4M3FN:
      *type = aiter::DataType::kE4m3fn;
      return ffi::Error::Success();
    case ffi::F8E4M3FNUZ:
      *type = aiter::DataType::kE4m3fnuz;
      return ffi::Error::Success();
    case ffi::U8:
      *type = aiter::DataType::kE2m1;
      return ffi::Error::Success();
    default:
      return Invalid(buffer, "has dtype " + TypeName(buffer.element_type()),
                     "have dtype int8, float8_e4m3fn, float8_e4m3fnuz or "
                     "uint8");
  }
}

// An absent operand is an array of rank 1 and length 0.
inline bool IsPresent(const Buffer& buffer) {
  Buffer::Dimensions dims = buffer.dimensions();
  return dims.size() != 1 || dims[0] != 0;
}

// Address of a present operand. A buffer without elements may have none;
// nothing reads it.
inline void* Data(const Buffer& buffer) {
  static constexpr uintptr_t kNoElements = 256;
  return buffer.untyped_data() != nullptr
             ? buffer.untyped_data()
             : reinterpret_cast<void*>(kNoElements);
}

// Address of an optional operand; null says absent to the library.
inline void* Address(const Buffer& buffer) {
  return IsPresent(buffer) ? Data(buffer) : nullptr;
}

// Checks an optional buffer and sets `*address` to where it lies, if it does.
template <typename Pointer>
ffi::Error Optional(const Buffer& buffer, ffi::DataType type, Shape shape,
                    Pointer* address) {
  if (IsPresent(buffer)) {
    AITER_FFI_RETURN_IF_ERROR(Check(buffer, type, shape));
  }
  *address = Address(buffer);
  return ffi::Error::Success();
}

inline ffi::Error ToError(const aiter::Status& status) {
  ffi::ErrorCode code = ffi::ErrorCode::kInternal;
  switch (status.code()) {
    case aiter::StatusCode::kOk:
      return ffi::Error::Success();
    case aiter::StatusCode::kInvalidArgument:
      code = ffi::ErrorCode::kInvalidArgument;
      break;
    case aiter::StatusCode::kUnimplemented:
      code = ffi::ErrorCode::kUnimplemented;
      break;
    case aiter::StatusCode::kFailedPrecondition:
      code = ffi::ErrorCode::kFailedPrecondition;
      break;
    case aiter::StatusCode::kResourceExhausted:
      code = ffi::ErrorCode::kResourceExhausted;
      break;
    case aiter::StatusCode::kInternal:
      break;
  }
  return ffi::Error(code, "aiter: " + status.message());
}

}  // namespace jax::JAX_GPU_NAMESPACE

#endif  // JAXLIB_GPU_FFI_UTIL_H_
