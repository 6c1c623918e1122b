// SPDX-License-Identifier: Apache-2.0

// The simulated devices.
#ifndef AMDGPU_SIM_HIP_DEVICE_H_
#define AMDGPU_SIM_HIP_DEVICE_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/amdgpu_sim/gpu/fault.h"
#include "tests/amdgpu_sim/gpu/wave.h"
#include "tests/amdgpu_sim/hip/types.h"

namespace amdgpu_sim {

// A product as its documents describe it. One of MI250X is a die of the two.
struct Model {
  const char* arch;  // "gfx942"
  Arch isa;
  const char* name;
  int compute_units;
  int lds_kib;  // Of a compute unit.
  int clock_khz;
  int memory_clock_khz;
  int memory_bus_bits;
  int l2_mib;        // Of an accelerator die.
  int major, minor;  // "compute capability": 9.4
  int dies;          // XCCs
  int chip_id;       // PCI device
  uint64_t memory_bytes;
};

class Device {
 public:
  // How many there are, and one of them; null if there is none such.
  static int Count();
  static Device* At(int index);

  // The calling thread's.
  static Device& Current();
  static Error SetCurrent(int index);

  explicit Device(int index, const Model& model);

  int index() const { return index_; }
  const Model& model() const { return model_; }
  const std::shared_ptr<Stream>& null_stream() const { return null_stream_; }

  // The first fault of a kernel or copy stays: later calls return its error.
  void Fail(Error error, const std::string& report);
  Error error() const { return error_.load(std::memory_order_acquire); }
  void ClearError() { error_.store(kSuccess); }

  // Waits for all work of all streams. Returns the device's error.
  Error Synchronize();

  // The streams of the device, and the lock that orders what is submitted to
  // them: the legacy stream waits for the others and they for it.
  std::mutex& order() { return order_; }
  std::vector<Stream*>& streams() { return streams_; }

 private:
  const int index_;
  const Model& model_;
  std::atomic<Error> error_{kSuccess};
  std::mutex order_;
  std::vector<Stream*> streams_;
  std::shared_ptr<Stream> null_stream_;
};

// The error code of a fault.
Error FaultError(Check check);

// Makes a device current while in scope.
class ScopedDevice {
 public:
  explicit ScopedDevice(int index) : before_(Device::Current().index()) {
    Device::SetCurrent(index);
  }
  ~ScopedDevice() { Device::SetCurrent(before_); }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  const int before_;
};

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_DEVICE_H_
