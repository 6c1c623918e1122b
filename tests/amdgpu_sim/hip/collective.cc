// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/collective.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "tests/amdgpu_sim/gpu/fault.h"
#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/stream.h"

namespace amdgpu_sim {
namespace {

// The first fault of the operation that this thread runs. An exception cannot
// go through the other library.
thread_local std::optional<Fault> pending;

}  // namespace
}  // namespace amdgpu_sim

using amdgpu_sim::Device;
using amdgpu_sim::Fault;
using amdgpu_sim::Memory;
using amdgpu_sim::Stream;
using amdgpu_sim::Work;

HIP_EXPORT int amdgpu_sim_submit(Stream* handle, const char* label,
                                 AmdgpuSimOperation run, void (*drop)(void*),
                                 void* data) {
  const std::shared_ptr<void> owned(data, drop);
  const std::shared_ptr<Stream> stream = Stream::Find(handle);
  if (stream == nullptr) return amdgpu_sim::kInvalidHandle;
  auto work = std::make_shared<Work>();
  work->type = amdgpu_sim::kHostNode;
  work->always = true;
  work->label = label;
  work->run = [owned, run, label = work->label](Device& device) {
    amdgpu_sim::pending.reset();
    const char* message =
        run(owned.get(), device.error() != amdgpu_sim::kSuccess);
    if (amdgpu_sim::pending.has_value()) {
      const Fault fault = *std::exchange(amdgpu_sim::pending, std::nullopt);
      throw fault;
    }
    if (message != nullptr) {
      device.Fail(amdgpu_sim::kUnknown, label + ": " + message);
    }
  };
  return stream->Submit(std::move(work));
}

HIP_EXPORT bool amdgpu_sim_copy(void* to, const void* from, size_t bytes) {
  try {
    Memory::Get().Copy(reinterpret_cast<uint64_t>(to),
                       reinterpret_cast<uint64_t>(from), bytes);
    return true;
  } catch (const Fault& fault) {
    if (!amdgpu_sim::pending.has_value()) amdgpu_sim::pending = fault;
    return false;
  }
}

HIP_EXPORT bool amdgpu_sim_exiting() { return amdgpu_sim::Exiting(); }
