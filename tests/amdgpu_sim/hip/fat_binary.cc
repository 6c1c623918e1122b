// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/fat_binary.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/handles.h"

namespace amdgpu_sim {
namespace {

constexpr int kMaxDevices = 8;

struct FatBinary {
  const void* image;
  std::vector<const void*> hosts;  // Functions and variables of it.
  std::shared_ptr<Module> of_device[kMaxDevices];
};

// Names live as long as the library that registers them.
struct HostSymbol {
  FatBinary* binary;
  const char* name;
};

// A library registers its thousands of kernels while it is loaded: that takes
// one insertion each. Never destroyed: libraries unregister at exit.
class Registry {
 public:
  static Registry& Get() {
    static Registry* const registry = new Registry;
    return *registry;
  }

  FatBinary* Add(const void* image) {
    auto* binary = new FatBinary{image, {}, {}};
    return binary;
  }

  void Register(FatBinary* binary, const void* host, const char* name) {
    std::lock_guard<std::mutex> lock(mutex_);
    symbols_[host] = {binary, name};
    binary->hosts.push_back(host);
  }

  void Remove(FatBinary* binary) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const void* host : binary->hosts) symbols_.erase(host);
    }
    for (const auto& module : binary->of_device) {
      if (module != nullptr) module->ReleaseFunctions();
    }
    delete binary;
  }

  Error Find(const void* host, Device& device, std::shared_ptr<Module>* module,
             const char** name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = symbols_.find(host);
    if (found == symbols_.end()) return kInvalidDeviceFunction;
    *name = found->second.name;
    FatBinary* binary = found->second.binary;
    std::shared_ptr<Module>& loaded = binary->of_device[device.index()];
    if (loaded == nullptr) {
      Error error = Module::Load(binary->image, device, &loaded);
      if (error != kSuccess) return error;
    }
    *module = loaded;
    return kSuccess;
  }

 private:
  Registry() { symbols_.reserve(1 << 15); }

  std::mutex mutex_;
  std::unordered_map<const void*, HostSymbol> symbols_;
};

}  // namespace

Error FindHostFunction(const void* host, Device& device,
                       std::shared_ptr<Function>* function) {
  std::shared_ptr<Module> module;
  const char* name;
  Error error = Registry::Get().Find(host, device, &module, &name);
  if (error != kSuccess) return error;
  Function* found = module->FindFunction(name);
  if (found == nullptr) return kInvalidDeviceFunction;
  *function = std::shared_ptr<Function>(module, found);
  return kSuccess;
}

Error FindHostVariable(const void* host, Device& device,
                       Module::Global* global) {
  std::shared_ptr<Module> module;
  const char* name;
  Error error = Registry::Get().Find(host, device, &module, &name);
  if (error == kInvalidDeviceFunction) return kInvalidSymbol;
  if (error != kSuccess) return error;
  const Module::Global* found = module->FindGlobal(name);
  if (found == nullptr) return kInvalidSymbol;
  *global = *found;
  return kSuccess;
}

// What follows is called by constructors and destructors of libraries that
// hipcc compiled. It cannot fail, so it is not counted either.

HIP_EXPORT void** __hipRegisterFatBinary(const void* wrapper) {
  return reinterpret_cast<void**>(Registry::Get().Add(wrapper));
}

HIP_EXPORT void __hipRegisterFunction(void** binary, const void* host,
                                      char* /*device_name*/, const char* name,
                                      unsigned, void*, void*, void*, void*,
                                      int*) {
  Registry::Get().Register(reinterpret_cast<FatBinary*>(binary), host, name);
}

HIP_EXPORT void __hipRegisterVar(void** binary, void* host, char*, char* name,
                                 int, size_t, int, int) {
  Registry::Get().Register(reinterpret_cast<FatBinary*>(binary), host, name);
}

HIP_EXPORT void __hipRegisterManagedVar(void*, void**, void*, const char* name,
                                        size_t, unsigned) {
  Log("the managed variable %s is not supported", name);
}

HIP_EXPORT void __hipUnregisterFatBinary(void** binary) {
  Registry::Get().Remove(reinterpret_cast<FatBinary*>(binary));
}

}  // namespace amdgpu_sim
