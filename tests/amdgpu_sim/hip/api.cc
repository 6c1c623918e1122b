// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/api.h"

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace amdgpu_sim {

struct CallRecord {
  std::string name;
  std::atomic<uint64_t> uses{0};
  // Uses left until the one that fails; 0: none fails. Under Calls::mutex.
  uint64_t fails_in = 0;
};

namespace {

// Every call used or named by a plan of failures. Never destroyed: other
// libraries call HIP while the process exits.
class Calls {
 public:
  static Calls& Get() {
    static Calls* const calls = new Calls;
    return *calls;
  }

  CallRecord* Find(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    return FindLocked(name);
  }

  uint64_t Uses(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = records_.find(name);
    return found == records_.end() ? 0 : found->second->uses.load();
  }

  // "name:n,name:n": the n-th use from now on fails. Replaces earlier plans.
  void Plan(const std::string& plan) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& record : records_) record.second->fails_in = 0;
    planned_ = false;
    for (size_t begin = 0; begin < plan.size();) {
      size_t end = plan.find(',', begin);
      if (end == std::string::npos) end = plan.size();
      std::string part = plan.substr(begin, end - begin);
      begin = end + 1;
      size_t colon = part.find(':');
      uint64_t use = 1;
      if (colon != std::string::npos) {
        use = std::strtoull(part.c_str() + colon + 1, nullptr, 10);
        part.resize(colon);
      }
      if (part.empty() || use == 0) continue;
      FindLocked(part)->fails_in = use;
      planned_ = true;
    }
  }

  // Whether this use of the call fails.
  bool Fails(CallRecord* call) {
    if (!planned_) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    return call->fails_in != 0 && --call->fails_in == 0;
  }

 private:
  Calls() {
    if (const char* plan = std::getenv("AMDGPU_SIM_FAIL")) Plan(plan);
  }

  CallRecord* FindLocked(const std::string& name) {
    std::unique_ptr<CallRecord>& record = records_[name];
    if (record == nullptr) {
      record = std::make_unique<CallRecord>();
      record->name = name;
    }
    return record.get();
  }

  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<CallRecord>> records_;
  std::atomic<bool> planned_{false};
};

thread_local Error last_error = kSuccess;

bool Allocates(const std::string& name) {
  return name.find("Malloc") != std::string::npos || name == "hipHostAlloc" ||
         name == "hipMemCreate" || name == "hipMemAddressReserve";
}

const char* ErrorText(int error, bool name_wanted) {
  switch (error) {
#define AMDGPU_SIM_ERROR(constant, value, name, text) \
  case value:                                         \
    return name_wanted ? name : text;
    AMDGPU_SIM_ERRORS(AMDGPU_SIM_ERROR)
#undef AMDGPU_SIM_ERROR
  }
  return name_wanted ? "hipErrorUnknown" : "unknown error";
}

}  // namespace

CallRecord* FindCall(const char* name) { return Calls::Get().Find(name); }

Error EnterCall(CallRecord* call) {
  call->uses.fetch_add(1, std::memory_order_relaxed);
  if (!Calls::Get().Fails(call)) return kSuccess;
  Log("%s fails, as asked for", call->name.c_str());
  return Allocates(call->name) ? kOutOfMemory : kUnknown;
}

Error LeaveCall(CallRecord* call, Error error) {
  if (error != kSuccess && error != kNotReady) last_error = error;
  if (LogLevel() >= 2) {
    Log("%s: %s", call->name.c_str(), ErrorText(error, true));
  }
  return error;
}

Error LastError() { return last_error; }
void ClearLastError() { last_error = kSuccess; }

int EnvironmentInt(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? std::atoi(value) : otherwise;
}

int LogLevel() {
  static const int level = EnvironmentInt("AMDGPU_SIM_LOG", 0);
  return level;
}

void Log(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "amdgpu_sim: %s\n", text);
}

HIP_EXPORT Error hipGetLastError() {
  CallRecord* call = FindCall(__func__);
  if (Error error = EnterCall(call); error != kSuccess) return error;
  Error error = last_error;
  last_error = kSuccess;
  return error;
}

HIP_EXPORT Error hipPeekAtLastError() {
  CallRecord* call = FindCall(__func__);
  if (Error error = EnterCall(call); error != kSuccess) return error;
  return last_error;
}

HIP_EXPORT const char* hipGetErrorString(Error error) {
  return ErrorText(error, false);
}

HIP_EXPORT const char* hipGetErrorName(Error error) {
  return ErrorText(error, true);
}

HIP_EXPORT Error hipDrvGetErrorString(Error error, const char** text) {
  return Api(__func__, [&] {
    if (text == nullptr) return kInvalidValue;
    *text = ErrorText(error, false);
    return kSuccess;
  });
}

HIP_EXPORT Error hipDrvGetErrorName(Error error, const char** name) {
  return Api(__func__, [&] {
    if (name == nullptr) return kInvalidValue;
    *name = ErrorText(error, true);
    return kSuccess;
  });
}

// For tests: plans failures as AMDGPU_SIM_FAIL does; null or "" ends them.
HIP_EXPORT void amdgpu_sim_fail(const char* plan) {
  Calls::Get().Plan(plan == nullptr ? "" : plan);
}

// For tests: how often a call was used.
HIP_EXPORT uint64_t amdgpu_sim_calls(const char* name) {
  return Calls::Get().Uses(name);
}

}  // namespace amdgpu_sim
