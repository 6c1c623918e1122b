// SPDX-License-Identifier: Apache-2.0

// For tests of the runtime in C++: its exported calls, and a code object made
// without an assembler.
#ifndef AMDGPU_SIM_HIP_TESTING_H_
#define AMDGPU_SIM_HIP_TESTING_H_

#include <elf.h>

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "tests/amdgpu_sim/hip/types.h"

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

// The call returns what it should.
#define EXPECT(call, wanted)                                             \
  do {                                                                   \
    const ::amdgpu_sim::Error got = (call);                              \
    if (got != (wanted)) {                                               \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   hipGetErrorName(got));                                \
      std::abort();                                                      \
    }                                                                    \
  } while (false)
#define OK(call) EXPECT(call, ::amdgpu_sim::kSuccess)

extern "C" {
const char* hipGetErrorName(amdgpu_sim::Error error);
const char* amdgpu_sim_last_report();
uint64_t amdgpu_sim_calls(const char* name);
uint64_t amdgpu_sim_live_allocations();
int amdgpu_sim_live_modules();
void amdgpu_sim_clear_fault();
void amdgpu_sim_fail(const char* plan);
}

namespace amdgpu_sim {

// Opens once; until then those who wait for it are held.
class Gate {
 public:
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait(lock, [&] { return open_; });
  }
  // For hipLaunchHostFunc: a stream waits.
  static void Hold(void* gate) { static_cast<Gate*>(gate)->Wait(); }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

// The code object of one kernel, `fill(uint32_t* to, uint32_t value)`: each
// work-item of the one workgroup stores value + its index. The instructions
// are the same for all of the simulator's architectures.
inline std::vector<uint8_t> FillCodeObject(const std::string& arch) {
  static constexpr uint32_t kCode[] = {
      0xc0060080, 0x00000000,  // s_load_dwordx2 s[2:3], s[0:1], 0x0
      0xc0020100, 0x00000008,  // s_load_dword s4, s[0:1], 0x8
      0x24020082,              // v_lshlrev_b32 v1, 2, v0
      0xbf8cc07f,              // s_waitcnt lgkmcnt(0)
      0x68040004,              // v_add_u32 v2, s4, v0
      0xdc708000, 0x00020201,  // global_store_dword v1, v2, s[2:3]
      0xbf810000,              // s_endpgm
  };
  constexpr uint64_t kDescriptor = 0x400, kText = 0x1000, kSymbols = 0x500;
  constexpr uint64_t kStrings = 0x600, kNote = 0x700, kSections = 0x900;
  constexpr uint64_t kEnd = kText + sizeof(kCode);
  std::vector<uint8_t> file(kEnd);
  const auto put = [&](uint64_t at, const auto& value) {
    std::memcpy(&file[at], &value, sizeof(value));
  };

  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_ident[EI_DATA] = ELFDATA2LSB;
  header.e_type = ET_DYN;
  header.e_machine = 224;
  header.e_flags = arch == "gfx90a" ? 0x3f : arch == "gfx950" ? 0x4f : 0x4c;
  header.e_phoff = sizeof(Elf64_Ehdr);
  header.e_phentsize = sizeof(Elf64_Phdr);
  header.e_phnum = 3;
  header.e_shoff = kSections;
  header.e_shentsize = sizeof(Elf64_Shdr);
  header.e_shnum = 3;
  put(0, header);

  // Name, symbol, the segment's size, the two arguments.
  std::string note;
  const auto text = [&](const std::string& s) {
    note += static_cast<char>(0xa0 + s.size());
    note += s;
  };
  note += '\x81';
  text("amdhsa.kernels");
  note += "\x91\x84";
  text(".name");
  text("fill");
  text(".symbol");
  text("fill.kd");
  text(".kernarg_segment_size");
  note += '\x10';
  text(".args");
  note += '\x92';
  for (const char offset : {'\x00', '\x08'}) {
    note += '\x83';
    text(".offset");
    note += offset;
    text(".size");
    note += offset == 0 ? '\x08' : '\x04';
    text(".value_kind");
    text(offset == 0 ? "global_buffer" : "by_value");
  }
  Elf64_Nhdr note_header{7, static_cast<uint32_t>(note.size()), 32};
  put(kNote, note_header);
  std::memcpy(&file[kNote + sizeof(note_header)], "AMDGPU", 7);
  std::memcpy(&file[kNote + sizeof(note_header) + 8], note.data(), note.size());

  Elf64_Phdr segment{};
  segment.p_type = PT_LOAD;
  segment.p_flags = PF_R;
  segment.p_filesz = segment.p_memsz = kText;
  put(header.e_phoff, segment);
  segment.p_flags = PF_R | PF_X;
  segment.p_offset = segment.p_vaddr = kText;
  segment.p_filesz = segment.p_memsz = sizeof(kCode);
  put(header.e_phoff + sizeof(segment), segment);
  segment.p_type = PT_NOTE;
  segment.p_offset = segment.p_vaddr = kNote;
  segment.p_filesz = segment.p_memsz = sizeof(note_header) + 8 + note.size();
  put(header.e_phoff + 2 * sizeof(segment), segment);

  const uint32_t descriptor[16] = {
      0,          0, 16, 0, kText - kDescriptor, 0, 0, 0, 0, 0, 0, 1,
      0x00ac0080,  // 8 VGPRs, 16 SGPRs, denormals
      0x00000084,  // 2 user SGPRs, workgroup id x
      0x00000008,  // the segment's address in them
      0};
  put(kDescriptor, descriptor);
  std::memcpy(&file[kText], kCode, sizeof(kCode));

  std::memcpy(&file[kStrings], "\0fill.kd\0fill\0", 15);
  Elf64_Sym symbols[3] = {};
  symbols[1].st_name = 1;
  symbols[1].st_shndx = 1;
  symbols[1].st_value = kDescriptor;
  symbols[1].st_size = 64;
  symbols[2].st_name = 9;
  symbols[2].st_shndx = 1;
  symbols[2].st_value = kText;
  symbols[2].st_size = sizeof(kCode);
  put(kSymbols, symbols);
  Elf64_Shdr sections[3] = {};
  sections[1].sh_type = SHT_DYNSYM;
  sections[1].sh_offset = kSymbols;
  sections[1].sh_size = sizeof(symbols);
  sections[1].sh_link = 2;
  sections[2].sh_type = SHT_STRTAB;
  sections[2].sh_offset = kStrings;
  sections[2].sh_size = 15;
  put(kSections, sections);
  return file;
}

inline std::string SimulatedArch() {
  const char* arch = std::getenv("AMDGPU_SIM_ARCH");
  return arch == nullptr || *arch == '\0' ? "gfx942" : arch;
}

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_TESTING_H_
