// SPDX-License-Identifier: Apache-2.0

// As much of hipBLASLt as XLA needs to make its handle, without which it
// reports an error at every start.

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int hipblasLtCreate(void** handle) {
  *handle = new int(0);
  return 0;
}

EXPORT int hipblasLtDestroy(void* handle) {
  delete static_cast<int*>(handle);
  return 0;
}
