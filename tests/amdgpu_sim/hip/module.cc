// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/module.h"

#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/bundle.h"
#include "tests/amdgpu_sim/hip/handles.h"
#include "tests/amdgpu_sim/hip/msgpack.h"

namespace amdgpu_sim {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint16_t kMachineAmdGpu = 224;
constexpr uint32_t kNoteMetadata = 32;

// e_flags
constexpr uint32_t kFlagMachMask = 0xff;
constexpr uint32_t kFlagXnackMask = 0x300, kFlagXnackOn = 0x300;
constexpr uint32_t kFlagSrameccMask = 0xc00, kFlagSrameccOff = 0x800;

uint32_t MachOf(Arch arch) {
  switch (arch) {
    case Arch::kGfx90a:
      return 0x3f;
    case Arch::kGfx942:
      return 0x4c;
    default:
      return 0x4f;
  }
}

// Relocations of AMDGPU code objects.
enum Relocation : uint32_t {
  kAbs32Low = 1,
  kAbs32High = 2,
  kAbs64 = 3,
  kAbs32 = 6,
  kRelative64 = 13,
};

// A view of an ELF file that checks what it reads.
class Elf {
 public:
  explicit Elf(const std::vector<uint8_t>& file) : file_(file) {}

  // Null if it is not in the file.
  template <typename T>
  const T* At(uint64_t offset, uint64_t count = 1) const {
    if (offset > file_.size() || count > (file_.size() - offset) / sizeof(T) ||
        offset % alignof(T) != 0) {
      return nullptr;
    }
    return reinterpret_cast<const T*>(file_.data() + offset);
  }

  const Elf64_Ehdr* header() const { return At<Elf64_Ehdr>(0); }

  std::vector<Elf64_Phdr> Segments(uint32_t type) const {
    std::vector<Elf64_Phdr> found;
    const auto* all = At<Elf64_Phdr>(header()->e_phoff, header()->e_phnum);
    for (int i = 0; all != nullptr && i < header()->e_phnum; ++i) {
      if (all[i].p_type == type) found.push_back(all[i]);
    }
    return found;
  }

  // Null if there is no such section.
  const Elf64_Shdr* Section(uint32_t type) const {
    const auto* all = At<Elf64_Shdr>(header()->e_shoff, header()->e_shnum);
    for (int i = 0; all != nullptr && i < header()->e_shnum; ++i) {
      if (all[i].sh_type == type) return &all[i];
    }
    return nullptr;
  }
  const Elf64_Shdr* Section(uint32_t type, uint32_t index) const {
    const auto* all = At<Elf64_Shdr>(header()->e_shoff, header()->e_shnum);
    return all != nullptr && index < header()->e_shnum &&
                   all[index].sh_type == type
               ? &all[index]
               : nullptr;
  }

  // "" if it is not there.
  std::string String(const Elf64_Shdr& strings, uint64_t index) const {
    const char* text = At<char>(strings.sh_offset, strings.sh_size);
    if (text == nullptr || index >= strings.sh_size) return "";
    return std::string(text + index,
                       strnlen(text + index, strings.sh_size - index));
  }

 private:
  const std::vector<uint8_t>& file_;
};

constexpr char kDescriptorSuffix[] = ".kd";

std::atomic<int> live_modules{0};

// AMDGPU_SIM_DUMP names a folder for the code objects that are loaded, to be
// disassembled there.
void Dump(const std::vector<uint8_t>& elf) {
  static const char* const folder = std::getenv("AMDGPU_SIM_DUMP");
  static std::atomic<int> count{0};
  if (folder == nullptr) return;
  char name[32];
  std::snprintf(name, sizeof(name), "/%d_%04d.hsaco", getpid(), count++);
  std::unique_ptr<FILE, int (*)(FILE*)> file(
      std::fopen((std::string(folder) + name).c_str(), "wb"), std::fclose);
  if (file != nullptr) std::fwrite(elf.data(), 1, elf.size(), file.get());
}

}  // namespace

Error Module::Load(const void* image, Device& device,
                   std::shared_ptr<Module>* module) {
  if (device.error() != kSuccess) return device.error();
  std::vector<uint8_t> elf;
  if (Error error = FindCodeObject(image, device.model(), &elf);
      error != kSuccess) {
    return error;
  }
  Dump(elf);
  auto loaded = std::make_shared<Module>(device);
  if (Error error = loaded->LoadElf(elf); error != kSuccess) return error;
  if (LogLevel() >= 1) {
    Log("device %d loads a code object of %zu bytes, %zu kernels",
        device.index(), elf.size(), loaded->functions_.size());
  }
  // The functions' handles keep the module until they are released.
  for (auto& function : loaded->functions_) {
    Handles<Function>::Get().Add(
        std::shared_ptr<Function>(loaded, &function.second));
  }
  *module = std::move(loaded);
  return kSuccess;
}

Module::Module(Device& device) : device_(device) { ++live_modules; }

Module::~Module() {
  --live_modules;
  program_.reset();
  for (uint64_t base : registered_) Memory::Get().Free(base);
  if (base_ != nullptr) munmap(base_, span_);
}

Function* Module::FindFunction(const std::string& name) {
  auto found = functions_.find(name);
  return found == functions_.end() ? nullptr : &found->second;
}

const Module::Global* Module::FindGlobal(const std::string& name) const {
  auto found = globals_.find(name);
  return found == globals_.end() ? nullptr : &found->second;
}

void Module::ReleaseFunctions() {
  for (auto& function : functions_) {
    Handles<Function>::Get().Remove(&function.second);
  }
}

Error Module::LoadElf(const std::vector<uint8_t>& elf) {
  const Elf file(elf);
  const Elf64_Ehdr* header = file.header();
  if (header == nullptr || header->e_machine != kMachineAmdGpu ||
      header->e_ident[EI_CLASS] != ELFCLASS64) {
    return kInvalidImage;
  }
  const uint32_t flags = header->e_flags;
  if ((flags & kFlagMachMask) != MachOf(device_.model().isa) ||
      (flags & kFlagXnackMask) == kFlagXnackOn ||
      (flags & kFlagSrameccMask) == kFlagSrameccOff) {
    return kNoBinaryForGpu;
  }
  if (Error error = LoadSegments(elf); error != kSuccess) return error;
  if (Error error = LoadSymbols(elf); error != kSuccess) return error;
  if (Error error = LoadMetadata(elf); error != kSuccess) return error;
  return program_ == nullptr && !functions_.empty() ? kInvalidImage : kSuccess;
}

Error Module::LoadSegments(const std::vector<uint8_t>& elf) {
  const Elf file(elf);
  const std::vector<Elf64_Phdr> segments = file.Segments(PT_LOAD);
  constexpr uint64_t kMaxSpan = uint64_t{1} << 31;
  for (const Elf64_Phdr& segment : segments) {
    if (file.At<uint8_t>(segment.p_offset, segment.p_filesz) == nullptr ||
        segment.p_filesz > segment.p_memsz || segment.p_memsz > kMaxSpan ||
        segment.p_vaddr > kMaxSpan) {
      return kInvalidImage;
    }
    span_ = std::max<uint64_t>(span_, segment.p_vaddr + segment.p_memsz);
  }
  if (span_ == 0) return kInvalidImage;
  span_ = (span_ + kPage - 1) / kPage * kPage;
  void* mapping = mmap(nullptr, span_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return kOutOfMemory;
  base_ = static_cast<uint8_t*>(mapping);
  for (const Elf64_Phdr& segment : segments) {
    if (segment.p_memsz == 0) continue;
    uint8_t* to = base_ + segment.p_vaddr;
    std::memcpy(to, elf.data() + segment.p_offset, segment.p_filesz);
    // Constants and code; globals, which start as written.
    const bool writable = (segment.p_flags & PF_W) != 0;
    const uint64_t address = reinterpret_cast<uint64_t>(to);
    Memory::Get().Register(address, segment.p_memsz,
                           writable ? MemoryKind::kDevice : MemoryKind::kCode,
                           device_.index(), 0);
    registered_.push_back(address);
    if (writable) Memory::Get().Touch(address, segment.p_memsz, true);
    if ((segment.p_flags & PF_X) != 0 && program_ == nullptr) {
      program_ = Program::Create(device_.model().isa, address, segment.p_memsz);
    }
  }
  return kSuccess;  // Without code: a module of globals alone.
}

Error Module::LoadSymbols(const std::vector<uint8_t>& elf) {
  const Elf file(elf);
  const Elf64_Shdr* table = file.Section(SHT_DYNSYM);
  if (table == nullptr) return kInvalidImage;
  const Elf64_Shdr* strings = file.Section(SHT_STRTAB, table->sh_link);
  const uint64_t count = table->sh_size / sizeof(Elf64_Sym);
  const auto* symbols = file.At<Elf64_Sym>(table->sh_offset, count);
  if (strings == nullptr || symbols == nullptr) return kInvalidImage;
  const uint64_t base = reinterpret_cast<uint64_t>(base_);

  for (uint64_t i = 1; i < count; ++i) {
    const Elf64_Sym& symbol = symbols[i];
    if (symbol.st_shndx == SHN_UNDEF || symbol.st_value >= span_) continue;
    globals_[file.String(*strings, symbol.st_name)] = {base + symbol.st_value,
                                                       symbol.st_size};
  }

  const Elf64_Shdr* section = file.Section(SHT_RELA);
  if (section == nullptr) return kSuccess;
  const uint64_t relocation_count = section->sh_size / sizeof(Elf64_Rela);
  const auto* relocations =
      file.At<Elf64_Rela>(section->sh_offset, relocation_count);
  if (relocations == nullptr) return kInvalidImage;
  for (uint64_t i = 0; i < relocation_count; ++i) {
    const Elf64_Rela& relocation = relocations[i];
    const uint64_t index = ELF64_R_SYM(relocation.r_info);
    uint64_t value = relocation.r_addend;
    if (index != 0) {
      if (index >= count || symbols[index].st_shndx == SHN_UNDEF) {
        Log("a code object needs the undefined symbol %s",
            index < count
                ? file.String(*strings, symbols[index].st_name).c_str()
                : "?");
        return kInvalidImage;
      }
      value += base + symbols[index].st_value;
    }
    int bytes = 4;
    switch (ELF64_R_TYPE(relocation.r_info)) {
      case kRelative64:
        value += base;
        bytes = 8;
        break;
      case kAbs64:
        bytes = 8;
        break;
      case kAbs32:
      case kAbs32Low:
        break;
      case kAbs32High:
        value >>= 32;
        break;
      default:
        Log("relocation type %u is not supported",
            static_cast<unsigned>(ELF64_R_TYPE(relocation.r_info)));
        return kInvalidImage;
    }
    if (relocation.r_offset + bytes > span_) return kInvalidImage;
    std::memcpy(base_ + relocation.r_offset, &value, bytes);
  }
  return kSuccess;
}

Error Module::LoadMetadata(const std::vector<uint8_t>& elf) {
  const Elf file(elf);
  for (const Elf64_Phdr& segment : file.Segments(PT_NOTE)) {
    uint64_t at = segment.p_offset;
    const uint64_t end = segment.p_offset + segment.p_filesz;
    while (at + sizeof(Elf64_Nhdr) <= end) {
      const auto* note = file.At<Elf64_Nhdr>(at);
      if (note == nullptr) return kInvalidImage;
      const uint64_t name = at + sizeof(Elf64_Nhdr);
      const uint64_t data = name + (note->n_namesz + 3) / 4 * 4;
      at = data + (note->n_descsz + 3) / 4 * 4;
      const char* owner = file.At<char>(name, note->n_namesz);
      const uint8_t* bytes = file.At<uint8_t>(data, note->n_descsz);
      if (owner == nullptr || bytes == nullptr) return kInvalidImage;
      if (note->n_type != kNoteMetadata ||
          std::string(owner, strnlen(owner, note->n_namesz)) != "AMDGPU") {
        continue;
      }
      Msgpack metadata;
      if (!Msgpack::Parse(bytes, bytes + note->n_descsz, &metadata)) {
        return kInvalidImage;
      }
      if (const Msgpack* kernels = metadata.Find("amdhsa.kernels")) {
        for (const Msgpack& kernel : kernels->array) AddFunction(kernel);
      }
    }
  }
  return kSuccess;
}

void Module::AddFunction(const Msgpack& kernel) {
  const Global* descriptor = FindGlobal(kernel.String(".symbol"));
  if (descriptor == nullptr) {
    descriptor = FindGlobal(kernel.String(".name") + kDescriptorSuffix);
  }
  constexpr uint64_t kDescriptorBytes = 64;
  if (descriptor == nullptr || descriptor->address + kDescriptorBytes >
                                   reinterpret_cast<uint64_t>(base_) + span_) {
    return;
  }
  Function& function = functions_[kernel.String(".name")];
  function.module = this;
  function.name = kernel.String(".name");
  function.kernarg_bytes = kernel.Number(".kernarg_segment_size", 0);
  function.lds_bytes = kernel.Number(".group_segment_fixed_size", 0);
  function.private_bytes = kernel.Number(".private_segment_fixed_size", 0);
  function.vgprs = kernel.Number(".vgpr_count", 0);
  function.sgprs = kernel.Number(".sgpr_count", 0);
  function.max_workgroup = kernel.Number(".max_flat_workgroup_size", 1024);
  function.descriptor = descriptor->address;
  const Msgpack* arguments = kernel.Find(".args");
  if (arguments == nullptr) return;
  for (const Msgpack& entry : arguments->array) {
    Argument argument;
    argument.offset = entry.Number(".offset", 0);
    argument.size = entry.Number(".size", 0);
    argument.kind = entry.String(".value_kind");
    // The segment holds all its arguments, whatever its size says.
    function.kernarg_bytes =
        std::max(function.kernarg_bytes, argument.offset + argument.size);
    function.arguments.push_back(std::move(argument));
  }
}

// For tests: modules that are loaded, for as long as a launch needs them.
HIP_EXPORT int amdgpu_sim_live_modules() { return live_modules; }

}  // namespace amdgpu_sim
