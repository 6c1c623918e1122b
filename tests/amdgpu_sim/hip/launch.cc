// SPDX-License-Identifier: Apache-2.0

// Kernel launches: their checks, their argument segment and their run.

#include "tests/amdgpu_sim/gpu/launch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/module.h"

namespace amdgpu_sim {
namespace {

constexpr uint32_t kMaxWorkgroup = 1024;
// Loads of arguments are widened as far as the segment's alignment lets them.
constexpr uint32_t kKernargAlignment = 64;

// HIP's list of (key, value) pairs in place of pointers at each argument.
enum ExtraKey : uintptr_t {
  kExtraBuffer = 1,
  kExtraBufferSize = 2,
  kExtraEnd = 3,
};

// A launch that waits in a stream or a graph.
struct Pending {
  std::shared_ptr<Function> function;
  Dim3 grid, block;
  uint32_t dynamic_lds;
  std::vector<uint8_t> kernarg;
};

void Put(std::vector<uint8_t>* kernarg, const Argument& argument,
         uint64_t value) {
  std::memcpy(kernarg->data() + argument.offset, &value,
              std::min<uint32_t>(argument.size, sizeof(value)));
}

// The hidden arguments that the simulator knows. Those for printf, hostcalls,
// the device's heap and queues stay null: a kernel that uses them faults.
void PutHidden(const Argument& argument, Pending* launch) {
  const std::string& kind = argument.kind;
  const uint32_t grid[3] = {launch->grid.x, launch->grid.y, launch->grid.z};
  const uint32_t block[3] = {launch->block.x, launch->block.y, launch->block.z};
  const int axis = kind.empty() ? 0 : kind.back() - 'x';
  if (kind.rfind("hidden_block_count_", 0) == 0) {
    Put(&launch->kernarg, argument, grid[axis]);
  } else if (kind.rfind("hidden_group_size_", 0) == 0) {
    Put(&launch->kernarg, argument, block[axis]);
  } else if (kind == "hidden_grid_dims") {
    const int dims = grid[2] * block[2] > 1   ? 3
                     : grid[1] * block[1] > 1 ? 2
                                              : 1;
    Put(&launch->kernarg, argument, dims);
  } else if (kind == "hidden_dynamic_lds_size") {
    Put(&launch->kernarg, argument, launch->dynamic_lds);
  }
  // hidden_remainder_*: 0, as HIP launches whole workgroups only.
}

Error PutExtra(void** extra, std::vector<uint8_t>* kernarg) {
  const void* buffer = nullptr;
  size_t size = 0;
  for (; reinterpret_cast<uintptr_t>(*extra) != kExtraEnd; extra += 2) {
    switch (reinterpret_cast<uintptr_t>(extra[0])) {
      case kExtraBuffer:
        buffer = extra[1];
        break;
      case kExtraBufferSize:
        size = *static_cast<const size_t*>(extra[1]);
        break;
      default:
        return kInvalidValue;
    }
  }
  if (buffer == nullptr && size != 0) return kInvalidValue;
  std::memcpy(kernarg->data(), buffer, std::min(size, kernarg->size()));
  return kSuccess;
}

Error CheckShape(const Function& function, Dim3 grid, Dim3 block,
                 uint32_t dynamic_lds) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const auto too_many = [](uint32_t blocks, uint32_t items) {
    return uint64_t{blocks} * items > UINT32_MAX;
  };
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0 ||
      threads > kMaxWorkgroup || threads > function.max_workgroup ||
      too_many(grid.x, block.x) || too_many(grid.y, block.y) ||
      too_many(grid.z, block.z)) {
    return kInvalidConfiguration;
  }
  const uint64_t lds = uint64_t{function.lds_bytes} + dynamic_lds;
  return lds > uint64_t{1024} * function.module->device().model().lds_kib
             ? kInvalidValue
             : kSuccess;
}

void RunPending(const Pending& pending, Device& device) {
  const Function& function = *pending.function;
  if (LogLevel() >= 1) {
    Log("device %d runs %s, grid %u %u %u, block %u %u %u, %u + %u bytes of "
        "LDS",
        device.index(), function.name.c_str(), pending.grid.x, pending.grid.y,
        pending.grid.z, pending.block.x, pending.block.y, pending.block.z,
        function.lds_bytes, pending.dynamic_lds);
  }
  Memory& memory = Memory::Get();
  const uint64_t kernarg = memory.Allocate(
      pending.kernarg.size(), MemoryKind::kHost, device.index(), 0);
  if (kernarg == 0) throw std::bad_alloc();
  std::memcpy(reinterpret_cast<void*>(kernarg), pending.kernarg.data(),
              pending.kernarg.size());

  Launch launch;
  launch.kernel = function.name.c_str();
  launch.arch = device.model().arch;
  launch.program = &function.module->program();
  launch.descriptor = reinterpret_cast<const uint8_t*>(function.descriptor);
  // The descriptor says how far from itself the code begins.
  constexpr int kEntryOffset = 16;
  int64_t entry;
  std::memcpy(&entry, launch.descriptor + kEntryOffset, sizeof(entry));
  launch.entry = function.descriptor + entry;
  launch.kernarg = reinterpret_cast<const uint8_t*>(kernarg);
  launch.kernarg_size = function.kernarg_bytes;
  launch.grid[0] = pending.grid.x;
  launch.grid[1] = pending.grid.y;
  launch.grid[2] = pending.grid.z;
  launch.block[0] = pending.block.x;
  launch.block[1] = pending.block.y;
  launch.block[2] = pending.block.z;
  launch.dynamic_lds = pending.dynamic_lds;
  launch.device = device.index();
  Check check = Check::kUnsupported;
  launch.check = &check;
  launch.cancel = &Exiting();
  const std::string report = Run(launch);
  memory.Free(kernarg);
  if (!report.empty()) device.Fail(FaultError(check), report);
}

}  // namespace

Error MakeLaunch(const std::shared_ptr<Function>& function, Dim3 grid,
                 Dim3 block, uint32_t dynamic_lds, void** params, void** extra,
                 std::shared_ptr<const Work>* work) {
  if (Error error = CheckShape(*function, grid, block, dynamic_lds);
      error != kSuccess) {
    return error;
  }
  auto pending = std::make_shared<Pending>();
  pending->function = function;
  pending->grid = grid;
  pending->block = block;
  pending->dynamic_lds = dynamic_lds;
  const uint32_t bytes = std::max(function->kernarg_bytes, 1u);
  pending->kernarg.resize((bytes + kKernargAlignment - 1) / kKernargAlignment *
                          kKernargAlignment);
  if (params != nullptr) {
    for (const Argument& argument : function->arguments) {
      if (argument.hidden()) continue;
      std::memcpy(pending->kernarg.data() + argument.offset, *params++,
                  argument.size);
    }
  } else if (extra != nullptr) {
    if (Error error = PutExtra(extra, &pending->kernarg); error != kSuccess) {
      return error;
    }
  }
  for (const Argument& argument : function->arguments) {
    if (argument.hidden()) PutHidden(argument, pending.get());
  }
  auto made = std::make_shared<Work>();
  made->type = kKernelNode;
  made->label = function->name;
  made->run = [pending](Device& device) { RunPending(*pending, device); };
  *work = std::move(made);
  return kSuccess;
}

}  // namespace amdgpu_sim
