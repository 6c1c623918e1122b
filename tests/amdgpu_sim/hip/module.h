// SPDX-License-Identifier: Apache-2.0

// Loaded code objects and their kernels.
#ifndef AMDGPU_SIM_HIP_MODULE_H_
#define AMDGPU_SIM_HIP_MODULE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/amdgpu_sim/hip/device.h"
#include "tests/amdgpu_sim/hip/stream.h"
#include "tests/amdgpu_sim/hip/types.h"
#include "tests/amdgpu_sim/isa/decode.h"

namespace amdgpu_sim {

struct Msgpack;

// A kernel's argument, explicit or hidden, as the metadata has it.
struct Argument {
  uint32_t offset = 0, size = 0;
  std::string kind;
  bool hidden() const { return kind.rfind("hidden_", 0) == 0; }
};

// A kernel.
struct Function {
  Module* module = nullptr;
  std::string name;
  std::vector<Argument> arguments;
  uint32_t kernarg_bytes = 0;
  uint32_t lds_bytes = 0;
  uint32_t private_bytes = 0;
  uint32_t vgprs = 0;  // AGPRs too.
  uint32_t sgprs = 0;
  uint32_t max_workgroup = 1024;
  uint64_t descriptor = 0;  // Address.
};

class Module {
 public:
  struct Global {
    uint64_t address, size;
  };

  // Loads an image, of any kind that FindCodeObject knows, for a device.
  static Error Load(const void* image, Device& device,
                    std::shared_ptr<Module>* module);
  explicit Module(Device& device);
  ~Module();

  Device& device() const { return device_; }
  Program& program() const { return *program_; }

  // Null if it has none of that name.
  Function* FindFunction(const std::string& name);
  const Global* FindGlobal(const std::string& name) const;

  // All its functions become invalid handles.
  void ReleaseFunctions();

 private:
  Error LoadElf(const std::vector<uint8_t>& elf);
  Error LoadSegments(const std::vector<uint8_t>& elf);
  Error LoadSymbols(const std::vector<uint8_t>& elf);
  Error LoadMetadata(const std::vector<uint8_t>& elf);
  void AddFunction(const Msgpack& kernel);

  Device& device_;
  uint8_t* base_ = nullptr;  // Where the code object's address 0 is.
  uint64_t span_ = 0;
  std::vector<uint64_t> registered_;  // Segments known to Memory.
  std::unique_ptr<Program> program_;
  std::map<std::string, Function> functions_;
  std::map<std::string, Global> globals_;
};

// The kernel that a caller names: a hipFunction_t, or a host function that
// __hipRegisterFunction made known, whose code is then loaded for the device.
Error FindFunction(const void* function, Device& device,
                   std::shared_ptr<Function>* found);

// Checks a launch and packs its arguments. `params` points at each explicit
// argument; `extra` is HIP's list that gives them as one buffer.
Error MakeLaunch(const std::shared_ptr<Function>& function, Dim3 grid,
                 Dim3 block, uint32_t dynamic_lds, void** params, void** extra,
                 std::shared_ptr<const Work>* work);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_MODULE_H_
