// SPDX-License-Identifier: Apache-2.0

// What every exported call has in common: it is counted and logged, fails on
// demand, and remembers its error for hipGetLastError.
//
//   HIP_EXPORT Error hipFree(void* pointer) {
//     return Api(__func__, [&] { return Release(pointer); });
//   }
#ifndef AMDGPU_SIM_HIP_API_H_
#define AMDGPU_SIM_HIP_API_H_

#include <exception>
#include <new>
#include <string>

#include "tests/amdgpu_sim/hip/types.h"

#define HIP_EXPORT extern "C" __attribute__((visibility("default")))

namespace amdgpu_sim {

struct CallRecord;  // api.cc: a call's name, uses and planned failure.

// The record of a call, made at its first use; lives for ever.
CallRecord* FindCall(const char* name);

// Counts a use. The error to return in place of the call's work, or kSuccess.
Error EnterCall(CallRecord* call);

// Remembers and logs an error; returns it.
Error LeaveCall(CallRecord* call, Error error);

// The calling thread's last error, as hipGetLastError has it.
Error LastError();
void ClearLastError();

// 0 silent, 1 launches and modules, 2 every call: AMDGPU_SIM_LOG.
int LogLevel();
void Log(const char* format, ...) __attribute__((format(printf, 1, 2)));

// An integer of the environment.
int EnvironmentInt(const char* name, int otherwise);

// Runs a call's body between Enter and Leave. No exception gets out of it: the
// callers are C.
template <typename Body>
Error Api(const char* name, const Body& body) {
  static CallRecord* const call = FindCall(name);
  Error error = EnterCall(call);
  if (error == kSuccess) {
    try {
      error = body();
    } catch (const std::bad_alloc&) {
      error = kOutOfMemory;
    } catch (const std::exception& exception) {
      Log("%s: %s", name, exception.what());
      error = kUnknown;
    }
  }
  return LeaveCall(call, error);
}

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_API_H_
