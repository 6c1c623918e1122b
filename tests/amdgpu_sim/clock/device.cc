// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/clock/device.h"

#include <cstdlib>
#include <cstring>

namespace amdgpu_sim {
namespace {

// Sources. "sheet": AMD's data sheet of the device. "ISA": the document of the
// instruction set. "paper": AMD's white papers of CDNA 3 and 4. "LLVM": the
// wait states in its GCNHazardRecognizer. "fit": calibrate.py, on the
// microseconds that AITER publishes. "assumed": none of these; the model has
// not been checked for it.
#define AMDGPU_SIM_COMMON           \
  4,      /* simds: ISA */          \
      8,  /* waves_per_simd: ISA */ \
      512 /* vector_registers: ISA */

#define AMDGPU_SIM_TIMES(transcendental, lds_write_factor)            \
  4,                    /* slot: ISA, a SIMD in four clocks */        \
      4,                /* vector: ISA, 16 lanes a clock */           \
      transcendental,   /* a quarter of it; gfx950 half: paper */     \
      4,                /* pass: ISA */                               \
      4,                /* matrix_slots: LLVM, passes + 3 between */  \
      16,               /* taken_branch: assumed */                   \
      8,                /* barrier: assumed */                        \
      64,               /* lds_latency: assumed */                    \
      lds_write_factor, /* gfx950's reads are twice as wide: paper */ \
      200,              /* scalar_latency: assumed */                 \
      32768,            /* l1_bytes: paper */                         \
      128,              /* l1_line: paper */                          \
      120,              /* l1_latency: assumed */                     \
      64                /* l1_rate: paper */

const Device kDevices[] = {
    {"MI300X", "gfx942", 304, 2.1, /* sheet */ AMDGPU_SIM_COMMON,
     65536 /* lds_bytes: paper */, AMDGPU_SIM_TIMES(16, 1),
     700 /* memory_latency: assumed */, 32 /* memory_rate: assumed */,
     5.0 /* launch_microseconds: assumed */, 0.3 /* throttle: assumed */},
    {"MI308X", "gfx942", 80, 2.1 /* assumed as MI300X */, AMDGPU_SIM_COMMON,
     65536 /* lds_bytes: paper */, AMDGPU_SIM_TIMES(16, 1),
     700 /* memory_latency: assumed */, 32 /* memory_rate: assumed */,
     5.0 /* launch_microseconds: assumed */, 0.3 /* throttle: assumed */},
    {"MI355X", "gfx950", 256, 2.4, /* sheet */ AMDGPU_SIM_COMMON,
     163840 /* lds_bytes: paper */, AMDGPU_SIM_TIMES(8, 2),
     700 /* memory_latency: assumed */, 32 /* memory_rate: assumed */,
     5.0 /* launch_microseconds: assumed */, 0.3 /* throttle: assumed */},
    {"MI250X", "gfx90a", 110 /* of one die: sheet */, 1.7 /* sheet */,
     AMDGPU_SIM_COMMON, 65536 /* lds_bytes: paper */, AMDGPU_SIM_TIMES(16, 1),
     700 /* memory_latency: assumed */, 32 /* memory_rate: assumed */,
     5.0 /* launch_microseconds: assumed */, 0.3 /* throttle: assumed */},
};

#undef AMDGPU_SIM_COMMON
#undef AMDGPU_SIM_TIMES

struct Name {
  const char* name;
  double Device::* field;
};

constexpr Name kNames[] = {
    {"compute_units", &Device::compute_units},
    {"gigahertz", &Device::gigahertz},
    {"taken_branch", &Device::taken_branch},
    {"barrier", &Device::barrier},
    {"lds_latency", &Device::lds_latency},
    {"scalar_latency", &Device::scalar_latency},
    {"l1_latency", &Device::l1_latency},
    {"memory_latency", &Device::memory_latency},
    {"memory_rate", &Device::memory_rate},
    {"launch_microseconds", &Device::launch_microseconds},
    {"throttle", &Device::throttle},
};

}  // namespace

const Device* FindDevice(const std::string& arch) {
  const char* wanted = std::getenv("AMDGPU_SIM_CLOCK_DEVICE");
  for (const Device& device : kDevices) {
    if (arch != device.arch) continue;
    if (wanted == nullptr || std::strcmp(wanted, device.name) == 0) {
      return &device;
    }
  }
  return nullptr;
}

double* Parameter(Device* device, const std::string& name) {
  for (const Name& entry : kNames) {
    if (name == entry.name) return &(device->*entry.field);
  }
  return nullptr;
}

}  // namespace amdgpu_sim
