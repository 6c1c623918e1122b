// SPDX-License-Identifier: Apache-2.0

// Exported calls on modules, kernels and their launches.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/fat_binary.h"
#include "tests/amdgpu_sim/hip/handles.h"
#include "tests/amdgpu_sim/hip/module.h"

namespace amdgpu_sim {
namespace {

constexpr int kWaveSize = 64;
constexpr int kSimds = 4;  // Of a compute unit.
constexpr int kWavesOfSimd = 8;
constexpr int kVgprsOfSimd = 512;  // 32-bit registers of a lane.
constexpr int kVgprGranule = 8;
constexpr int kMaxBlocks = 32;  // Of a compute unit.

// hipFunction_attribute
enum FunctionAttribute : int {
  kMaxThreadsPerBlock = 0,
  kSharedSizeBytes = 1,
  kConstSizeBytes = 2,
  kLocalSizeBytes = 3,
  kNumRegs = 4,
  kPtxVersion = 5,
  kBinaryVersion = 6,
  kCacheModeCa = 7,
  kMaxDynamicSharedSizeBytes = 8,
  kPreferredSharedMemoryCarveout = 9,
};

Error LoadModule(Module** handle, const void* image) {
  if (handle == nullptr || image == nullptr) return kInvalidValue;
  *handle = nullptr;
  std::shared_ptr<Module> module;
  Error error = Module::Load(image, Device::Current(), &module);
  if (error == kSuccess) {
    *handle = Handles<Module>::Get().Add(std::move(module));
  }
  return error;
}

Error LoadModuleFile(Module** handle, const char* path) {
  if (path == nullptr) return kInvalidValue;
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "rb"),
                                             std::fclose);
  if (file == nullptr) return kFileNotFound;
  std::vector<char> image;
  char part[1 << 16];
  while (size_t n = std::fread(part, 1, sizeof(part), file.get())) {
    image.insert(image.end(), part, part + n);
  }
  // No code object is smaller than a page or so, but its magic is looked for.
  image.resize(std::max<size_t>(image.size(), 64));
  return LoadModule(handle, image.data());
}

Error GetFunction(Function** function, Module* handle, const char* name) {
  if (function == nullptr || name == nullptr) return kInvalidValue;
  *function = nullptr;
  std::shared_ptr<Module> module = Handles<Module>::Get().Find(handle);
  if (module == nullptr) return kInvalidHandle;
  *function = module->FindFunction(name);
  return *function == nullptr ? kNotFound : kSuccess;
}

Error GetGlobal(void** address, size_t* size, Module* handle,
                const char* name) {
  if (name == nullptr) return kInvalidValue;
  std::shared_ptr<Module> module = Handles<Module>::Get().Find(handle);
  if (module == nullptr) return kInvalidHandle;
  const Module::Global* global = module->FindGlobal(name);
  if (global == nullptr) return kNotFound;
  if (address != nullptr) *address = reinterpret_cast<void*>(global->address);
  if (size != nullptr) *size = global->size;
  return kSuccess;
}

Error LaunchFunction(const void* function_handle, Dim3 grid, Dim3 block,
                     uint32_t dynamic_lds, Stream* stream_handle, void** params,
                     void** extra) {
  std::shared_ptr<Stream> stream = Stream::Find(stream_handle);
  if (stream == nullptr) return kInvalidHandle;
  std::shared_ptr<Function> function;
  Error error = FindFunction(function_handle, stream->device(), &function);
  if (error != kSuccess) return error;
  if (&function->module->device() != &stream->device()) return kInvalidHandle;
  std::shared_ptr<const Work> work;
  error = MakeLaunch(function, grid, block, dynamic_lds, params, extra, &work);
  return error != kSuccess ? error : stream->Submit(std::move(work));
}

// How many workgroups of a size a compute unit holds at a time.
int ActiveBlocks(const Function& function, int block, size_t dynamic_lds) {
  const int waves = (block + kWaveSize - 1) / kWaveSize;
  const int vgprs = std::max<int>(
      (function.vgprs + kVgprGranule - 1) / kVgprGranule * kVgprGranule,
      kVgprGranule);
  const int resident = kSimds * std::min(kWavesOfSimd, kVgprsOfSimd / vgprs);
  const size_t lds = function.lds_bytes + dynamic_lds;
  const size_t all_lds =
      size_t{1024} * function.module->device().model().lds_kib;
  const size_t by_lds = lds == 0 ? kMaxBlocks : all_lds / lds;
  return static_cast<int>(
      std::min<size_t>({size_t(resident / waves), by_lds, kMaxBlocks}));
}

Error Occupancy(int* blocks, const void* handle, int block,
                size_t dynamic_lds) {
  if (blocks == nullptr || block <= 0) return kInvalidValue;
  std::shared_ptr<Function> function;
  Error error = FindFunction(handle, Device::Current(), &function);
  if (error != kSuccess) return error;
  *blocks = ActiveBlocks(*function, block, dynamic_lds);
  return kSuccess;
}

// The workgroup size with the most resident waves, the largest of those.
Error BestBlock(int* grid, int* block, const void* handle, size_t dynamic_lds,
                int limit) {
  if (grid == nullptr || block == nullptr) return kInvalidValue;
  std::shared_ptr<Function> function;
  Error error = FindFunction(handle, Device::Current(), &function);
  if (error != kSuccess) return error;
  int largest = static_cast<int>(function->max_workgroup);
  if (limit > 0) largest = std::min(largest, limit);
  int best = 0;
  *grid = *block = 0;
  for (int size = largest; size > 0; size -= std::min(size, kWaveSize)) {
    const int active = ActiveBlocks(*function, size, dynamic_lds);
    if (active * size <= best) continue;
    best = active * size;
    *block = size;
    *grid = active * function->module->device().model().compute_units;
  }
  return kSuccess;
}

Error Attribute(int* value, int attribute, const Function& function) {
  if (value == nullptr) return kInvalidValue;
  const Model& model = function.module->device().model();
  switch (attribute) {
    case kMaxThreadsPerBlock:
      *value = static_cast<int>(function.max_workgroup);
      return kSuccess;
    case kSharedSizeBytes:
      *value = static_cast<int>(function.lds_bytes);
      return kSuccess;
    case kLocalSizeBytes:
      *value = static_cast<int>(function.private_bytes);
      return kSuccess;
    case kNumRegs:
      *value = static_cast<int>(function.vgprs);
      return kSuccess;
    case kPtxVersion:
    case kBinaryVersion:
      *value = 10 * model.major + model.minor;
      return kSuccess;
    case kMaxDynamicSharedSizeBytes:
      *value = 1024 * model.lds_kib - static_cast<int>(function.lds_bytes);
      return kSuccess;
    case kConstSizeBytes:
    case kCacheModeCa:
    case kPreferredSharedMemoryCarveout:
      *value = 0;
      return kSuccess;
  }
  return kInvalidValue;
}

struct CallConfiguration {
  Dim3 grid, block;
  size_t dynamic_lds;
  Stream* stream;
};
thread_local std::vector<CallConfiguration> call_configurations;

}  // namespace

Error FindFunction(const void* function, Device& device,
                   std::shared_ptr<Function>* found) {
  *found = Handles<Function>::Get().Find(function);
  if (*found != nullptr) return kSuccess;
  return FindHostFunction(function, device, found);
}

HIP_EXPORT Error hipModuleLoadData(Module** module, const void* image) {
  return Api(__func__, [&] { return LoadModule(module, image); });
}

HIP_EXPORT Error hipModuleLoadDataEx(Module** module, const void* image,
                                     unsigned, int*, void**) {
  return Api(__func__, [&] { return LoadModule(module, image); });
}

HIP_EXPORT Error hipModuleLoad(Module** module, const char* path) {
  return Api(__func__, [&] { return LoadModuleFile(module, path); });
}

HIP_EXPORT Error hipModuleUnload(Module* handle) {
  return Api(__func__, [&] {
    std::shared_ptr<Module> module = Handles<Module>::Get().Remove(handle);
    if (module == nullptr) return kInvalidHandle;
    // Launches under way keep it for themselves.
    module->ReleaseFunctions();
    return kSuccess;
  });
}

HIP_EXPORT Error hipModuleGetFunction(Function** function, Module* module,
                                      const char* name) {
  return Api(__func__, [&] { return GetFunction(function, module, name); });
}

HIP_EXPORT Error hipModuleGetGlobal(void** address, size_t* size,
                                    Module* module, const char* name) {
  return Api(__func__, [&] { return GetGlobal(address, size, module, name); });
}

HIP_EXPORT Error hipGetSymbolAddress(void** address, const void* symbol) {
  return Api(__func__, [&] {
    if (address == nullptr) return kInvalidValue;
    Module::Global global;
    Error error = FindHostVariable(symbol, Device::Current(), &global);
    if (error == kSuccess) *address = reinterpret_cast<void*>(global.address);
    return error;
  });
}

HIP_EXPORT Error hipGetSymbolSize(size_t* size, const void* symbol) {
  return Api(__func__, [&] {
    if (size == nullptr) return kInvalidValue;
    Module::Global global;
    Error error = FindHostVariable(symbol, Device::Current(), &global);
    if (error == kSuccess) *size = global.size;
    return error;
  });
}

HIP_EXPORT Error hipGetFuncBySymbol(Function** function, const void* symbol) {
  return Api(__func__, [&] {
    if (function == nullptr) return kInvalidValue;
    std::shared_ptr<Function> found;
    Error error = FindHostFunction(symbol, Device::Current(), &found);
    *function = found.get();
    return error;
  });
}

HIP_EXPORT Error hipModuleLaunchKernel(Function* function, uint32_t grid_x,
                                       uint32_t grid_y, uint32_t grid_z,
                                       uint32_t block_x, uint32_t block_y,
                                       uint32_t block_z, uint32_t dynamic_lds,
                                       Stream* stream, void** params,
                                       void** extra) {
  return Api(__func__, [&] {
    return LaunchFunction(function, {grid_x, grid_y, grid_z},
                          {block_x, block_y, block_z}, dynamic_lds, stream,
                          params, extra);
  });
}

HIP_EXPORT Error hipLaunchKernel(const void* host, Dim3 grid, Dim3 block,
                                 void** params, size_t dynamic_lds,
                                 Stream* stream) {
  return Api(__func__, [&] {
    return LaunchFunction(host, grid, block, static_cast<uint32_t>(dynamic_lds),
                          stream, params, nullptr);
  });
}

// As any launch: workgroups that wait for each other get their turns.
HIP_EXPORT Error hipLaunchCooperativeKernel(const void* host, Dim3 grid,
                                            Dim3 block, void** params,
                                            unsigned dynamic_lds,
                                            Stream* stream) {
  return Api(__func__, [&] {
    return LaunchFunction(host, grid, block, dynamic_lds, stream, params,
                          nullptr);
  });
}

HIP_EXPORT Error __hipPushCallConfiguration(Dim3 grid, Dim3 block,
                                            size_t dynamic_lds,
                                            Stream* stream) {
  return Api(__func__, [&] {
    call_configurations.push_back({grid, block, dynamic_lds, stream});
    return kSuccess;
  });
}

HIP_EXPORT Error __hipPopCallConfiguration(Dim3* grid, Dim3* block,
                                           size_t* dynamic_lds,
                                           Stream** stream) {
  return Api(__func__, [&] {
    if (call_configurations.empty()) return kInvalidValue;
    const CallConfiguration& top = call_configurations.back();
    *grid = top.grid;
    *block = top.block;
    *dynamic_lds = top.dynamic_lds;
    *stream = top.stream;
    call_configurations.pop_back();
    return kSuccess;
  });
}

HIP_EXPORT Error hipFuncGetAttribute(int* value, int attribute,
                                     const void* handle) {
  return Api(__func__, [&] {
    std::shared_ptr<Function> function;
    Error error = FindFunction(handle, Device::Current(), &function);
    return error != kSuccess ? error : Attribute(value, attribute, *function);
  });
}

HIP_EXPORT Error hipFuncGetAttributes(FunctionAttributes* attributes,
                                      const void* handle) {
  return Api(__func__, [&] {
    if (attributes == nullptr) return kInvalidValue;
    std::shared_ptr<Function> function;
    Error error = FindFunction(handle, Device::Current(), &function);
    if (error != kSuccess) return error;
    const Model& model = function->module->device().model();
    *attributes = FunctionAttributes{};
    attributes->binary_version = 10 * model.major + model.minor;
    attributes->local_size_bytes = function->private_bytes;
    attributes->max_dynamic_shared_size_bytes =
        1024 * model.lds_kib - static_cast<int>(function->lds_bytes);
    attributes->max_threads_per_block =
        static_cast<int>(function->max_workgroup);
    attributes->registers = static_cast<int>(function->vgprs);
    attributes->ptx_version = attributes->binary_version;
    attributes->shared_size_bytes = function->lds_bytes;
    return kSuccess;
  });
}

// AMD devices give a kernel all its LDS without being asked.
HIP_EXPORT Error hipFuncSetAttribute(const void*, int, int) {
  return Api(__func__, [] { return kSuccess; });
}

HIP_EXPORT Error hipFuncSetCacheConfig(const void*, int) {
  return Api(__func__, [] { return kSuccess; });
}

HIP_EXPORT Error hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, Function* function, int block, size_t dynamic_lds) {
  return Api(__func__,
             [&] { return Occupancy(blocks, function, block, dynamic_lds); });
}

HIP_EXPORT Error hipOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, const void* function, int block, size_t dynamic_lds) {
  return Api(__func__,
             [&] { return Occupancy(blocks, function, block, dynamic_lds); });
}

HIP_EXPORT Error hipModuleOccupancyMaxPotentialBlockSize(int* grid, int* block,
                                                         Function* function,
                                                         size_t dynamic_lds,
                                                         int limit) {
  return Api(__func__, [&] {
    return BestBlock(grid, block, function, dynamic_lds, limit);
  });
}

HIP_EXPORT Error hipOccupancyMaxPotentialBlockSize(int* grid, int* block,
                                                   const void* function,
                                                   size_t dynamic_lds,
                                                   int limit) {
  return Api(__func__, [&] {
    return BestBlock(grid, block, function, dynamic_lds, limit);
  });
}

}  // namespace amdgpu_sim
