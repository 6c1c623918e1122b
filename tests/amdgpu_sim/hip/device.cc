// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/stream.h"

namespace amdgpu_sim {
namespace {

constexpr int kMaxDevices = 8;

constexpr Model kModels[] = {
    {"gfx942", Arch::kGfx942, "AMD Instinct MI300X (simulated)", 304, 64,
     2100000, 1300000, 8192, 4, 9, 4, 8, 0x74a1, 206141652992},
    {"gfx950", Arch::kGfx950, "AMD Instinct MI355X (simulated)", 256, 160,
     2400000, 2000000, 8192, 4, 9, 5, 8, 0x75a3, 309220868096},
    {"gfx90a", Arch::kGfx90a, "AMD Instinct MI250X (simulated)", 110, 64,
     1700000, 1600000, 4096, 8, 9, 0, 1, 0x7408, 68702699520},
};

const Model& ChosenModel() {
  const char* wanted = std::getenv("AMDGPU_SIM_ARCH");
  if (wanted == nullptr || *wanted == '\0') return kModels[0];
  for (const Model& model : kModels) {
    if (std::strcmp(model.arch, wanted) == 0) return model;
  }
  Log("AMDGPU_SIM_ARCH=%s is none of gfx942, gfx950, gfx90a; gfx942 is taken",
      wanted);
  return kModels[0];
}

// Never destroyed: calls come in while the process exits.
struct Devices {
  Devices() {
    const int count =
        std::clamp(EnvironmentInt("AMDGPU_SIM_DEVICES", 1), 1, kMaxDevices);
    const Model& model = ChosenModel();
    for (int i = 0; i < count; ++i) all.push_back(new Device(i, model));
  }
  static Devices& Get() {
    static Devices* const devices = new Devices;
    return *devices;
  }
  std::vector<Device*> all;
};

thread_local int current_device = 0;

std::mutex report_mutex;
std::string& LastReport() {
  static std::string* const report = new std::string;
  return *report;
}

}  // namespace

int Device::Count() { return static_cast<int>(Devices::Get().all.size()); }

Device* Device::At(int index) {
  return index >= 0 && index < Count() ? Devices::Get().all[index] : nullptr;
}

Device& Device::Current() { return *Devices::Get().all[current_device]; }

Error Device::SetCurrent(int index) {
  if (index < 0 || index >= Count()) return kInvalidDevice;
  current_device = index;
  return kSuccess;
}

Device::Device(int index, const Model& model)
    : index_(index),
      model_(model),
      null_stream_(std::make_shared<Stream>(*this, 0, 0)) {}

void Device::Fail(Error error, const std::string& report) {
  {
    std::lock_guard<std::mutex> lock(report_mutex);
    LastReport() = report;
  }
  Error none = kSuccess;
  error_.compare_exchange_strong(none, error);
}

Error Device::Synchronize() {
  std::vector<std::shared_ptr<Completion>> wait;
  {
    std::lock_guard<std::mutex> lock(order_);
    for (Stream* stream : streams_) {
      // A host function cannot wait for itself.
      if (stream != ThisThreadsStream() && stream->last() != nullptr) {
        wait.push_back(stream->last());
      }
    }
  }
  for (const auto& completion : wait) completion->Wait();
  return error();
}

Error FaultError(Check check) {
  switch (check) {
    case Check::kOutOfBounds:
    case Check::kUseAfterFree:
    case Check::kMisaligned:
      return kIllegalAddress;
    default:
      return kLaunchFailure;
  }
}

// For tests: the report of the last fault, "" if there was none. Valid until
// the thread's next call.
HIP_EXPORT const char* amdgpu_sim_last_report() {
  static thread_local std::string report;
  std::lock_guard<std::mutex> lock(report_mutex);
  report = LastReport();
  return report.c_str();
}

// For tests: all devices work again.
HIP_EXPORT void amdgpu_sim_clear_fault() {
  for (Device* device : Devices::Get().all) {
    device->Synchronize();
    device->ClearError();
  }
  ClearLastError();
  std::lock_guard<std::mutex> lock(report_mutex);
  LastReport().clear();
}

}  // namespace amdgpu_sim
