// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/bundle.h"

#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "tests/amdgpu_sim/hip/api.h"

namespace amdgpu_sim {
namespace {

constexpr uint32_t kWrapperMagic = 0x48495046;  // "HIPF"
constexpr char kBundleMagic[] = "__CLANG_OFFLOAD_BUNDLE__";
constexpr char kCompressedMagic[] = "CCOB";

template <typename T>
T Read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// A compressed bundle's header: magic, u16 version, u16 method, then the sizes
// of the file and of the bundle, as u32 (version 2) or u64 (3), and a hash.
Error Decompress(const uint8_t* image, std::vector<uint8_t>* bundle) {
  const uint16_t version = Read<uint16_t>(image + 4);
  const uint16_t method = Read<uint16_t>(image + 6);
  uint64_t file_size, size, header;
  if (version == 2) {
    file_size = Read<uint32_t>(image + 8);
    size = Read<uint32_t>(image + 12);
    header = 24;
  } else if (version == 3) {
    file_size = Read<uint64_t>(image + 8);
    size = Read<uint64_t>(image + 16);
    header = 32;
  } else {
    Log("a compressed bundle of version %d is not supported", version);
    return kInvalidImage;
  }
  constexpr uint16_t kZstd = 1;
  using ZstdDecompress = size_t (*)(void*, size_t, const void*, size_t);
  // Opened when needed: few programs have such bundles.
  static const ZstdDecompress decompress = [] {
    void* library = dlopen("libzstd.so.1", RTLD_NOW);
    return reinterpret_cast<ZstdDecompress>(
        library == nullptr ? nullptr : dlsym(library, "ZSTD_decompress"));
  }();
  if (method != kZstd || decompress == nullptr || file_size < header) {
    Log("a bundle compressed by method %d needs libzstd.so.1 and method 1",
        method);
    return kInvalidImage;
  }
  bundle->resize(size);
  const size_t got =
      decompress(bundle->data(), size, image + header, file_size - header);
  return got == size ? kSuccess : kInvalidImage;
}

// "hipv4-amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-": the devices have sramecc
// on and xnack off.
bool Runs(const std::string& target, const Model& model) {
  const size_t arch = target.rfind("--gfx");
  if (arch == std::string::npos) return false;
  const std::string features = target.substr(arch + 2);
  return features.substr(0, features.find(':')) == model.arch &&
         features.find("xnack+") == std::string::npos &&
         features.find("sramecc-") == std::string::npos;
}

// The size of an ELF file by its headers.
uint64_t ElfSize(const uint8_t* elf) {
  const auto header = Read<Elf64_Ehdr>(elf);
  uint64_t size =
      header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize;
  for (int i = 0; i < header.e_phnum; ++i) {
    const auto segment =
        Read<Elf64_Phdr>(elf + header.e_phoff + i * sizeof(Elf64_Phdr));
    size = std::max<uint64_t>(size, segment.p_offset + segment.p_filesz);
  }
  for (int i = 0; i < header.e_shnum && header.e_shoff != 0; ++i) {
    const auto section =
        Read<Elf64_Shdr>(elf + header.e_shoff + i * sizeof(Elf64_Shdr));
    if (section.sh_type == SHT_NOBITS) continue;
    size = std::max<uint64_t>(size, section.sh_offset + section.sh_size);
  }
  return size;
}

}  // namespace

Error FindCodeObject(const void* image, const Model& model,
                     std::vector<uint8_t>* elf) {
  if (image == nullptr) return kInvalidValue;
  const uint8_t* at = static_cast<const uint8_t*>(image);
  if (Read<uint32_t>(at) == kWrapperMagic) at = Read<const uint8_t*>(at + 8);
  std::vector<uint8_t> bundle;
  if (std::memcmp(at, kCompressedMagic, 4) == 0) {
    if (Error error = Decompress(at, &bundle); error != kSuccess) return error;
    at = bundle.data();
  }
  const size_t magic_size = std::strlen(kBundleMagic);
  if (std::memcmp(at, ELFMAG, SELFMAG) == 0) {
    elf->assign(at, at + ElfSize(at));
    return kSuccess;
  }
  if (std::memcmp(at, kBundleMagic, magic_size) != 0) return kInvalidImage;
  // u64 count, then of each: u64 offset, size and length of its target's name.
  const uint64_t count = Read<uint64_t>(at + magic_size);
  const uint8_t* entry = at + magic_size + 8;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t offset = Read<uint64_t>(entry);
    const uint64_t size = Read<uint64_t>(entry + 8);
    const uint64_t length = Read<uint64_t>(entry + 16);
    const std::string target(reinterpret_cast<const char*>(entry + 24), length);
    entry += 24 + length;
    if (size == 0 || !Runs(target, model)) continue;
    elf->assign(at + offset, at + offset + size);
    return kSuccess;
  }
  return kNoBinaryForGpu;
}

}  // namespace amdgpu_sim
