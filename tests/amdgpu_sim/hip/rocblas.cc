// SPDX-License-Identifier: Apache-2.0

// As much of rocBLAS as XLA needs to make its handle. The operations are
// missing: XLA's own kernels and Triton's do matrix products.

#include <algorithm>
#include <cstddef>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidHandle = 1;
constexpr char kVersion[] = "5.0.0.simulated";

struct Handle {
  void* stream = nullptr;
};

}  // namespace

EXPORT int rocblas_create_handle(Handle** handle) {
  *handle = new Handle;
  return kSuccess;
}

EXPORT int rocblas_destroy_handle(Handle* handle) {
  delete handle;
  return kSuccess;
}

EXPORT int rocblas_set_stream(Handle* handle, void* stream) {
  if (handle == nullptr) return kInvalidHandle;
  handle->stream = stream;
  return kSuccess;
}

EXPORT int rocblas_get_stream(Handle* handle, void** stream) {
  if (handle == nullptr) return kInvalidHandle;
  *stream = handle->stream;
  return kSuccess;
}

EXPORT int rocblas_set_atomics_mode(Handle* handle, int) {
  return handle == nullptr ? kInvalidHandle : kSuccess;
}

EXPORT int rocblas_set_workspace(Handle* handle, void*, size_t) {
  return handle == nullptr ? kInvalidHandle : kSuccess;
}

EXPORT int rocblas_get_version_string_size(size_t* size) {
  *size = sizeof(kVersion);
  return kSuccess;
}

EXPORT int rocblas_get_version_string(char* text, size_t size) {
  if (size == 0) return kSuccess;
  std::memcpy(text, kVersion, std::min(size, sizeof(kVersion)));
  text[size - 1] = '\0';
  return kSuccess;
}
