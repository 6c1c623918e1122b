// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/clock/device.h"

#include <cstdlib>
#include <vector>

namespace amdgpu_sim {
namespace {

// What all have in common. Sources. "sheet": AMD's data sheet of the device.
// "ISA": the document of its instructions. "paper": AMD's white papers of CDNA
// 3 and 4. "LLVM": wait states in its hazard recognizer for gfx940. "fit":
// calibrate.py, on microseconds that AITER publishes; that of atomics on those
// of attention's gradient, which adds up dq in 32 bits. A clock under load is
// between those that fit products and attention. "chase": see SetIdle().
// "assumed": none of these, and nothing has shown how far it is off.
Device Common(const char* name, const char* arch) {
  Device d = {};
  d.name = name;
  d.arch = arch;
  d.simds = 4;               // ISA
  d.waves_per_simd = 8;      // ISA
  d.vector_registers = 512;  // ISA
  d.lds_bytes = 64 * 1024;   // ISA
  d.slot = 4;                // ISA: each SIMD has its turn in four clocks
  d.vector = 4;              // ISA: 16 lanes a clock
  d.transcendental = 16;     // paper: a quarter of the rate
  d.pass = 4;                // ISA
  d.matrix_slots = 4;        // LLVM: passes + 3 slots between
  d.taken_branch = 16;       // assumed
  d.barrier = 8;             // assumed
  d.lds_write_factor = 1;    // paper
  d.scalar_latency = 200;    // assumed
  d.l1_bytes = 32 * 1024;    // paper
  d.l1_line = 128;           // paper
  d.l1_rate = 64;            // paper
  d.dies = 8;                // sheet
  d.l2_bytes = 4 << 20;      // paper
  d.mall_bytes = 256 << 20;  // paper
  d.mall_gigabytes = 17200;  // paper: of CDNA 3; assumed of CDNA 4
  d.address_clocks = 4;      // fit, as all below
  d.lds_latency = 128;
  d.loaded_share = 0.25;
  d.l2_latency = 800;
  d.l2_rate = 64;
  d.atomic_rate = 80;
  d.mall_latency = 800;
  d.hbm_latency = 900;
  d.hbm_efficiency = 0.8;
  d.launch_microseconds = 3;
  d.sustained = 0.95;
  d.throttle = 0.5;
  return d;
}

// What a chase of pointers by one wave finds, for each pointer: clocks from the
// L1 and the L2, nanoseconds from the last-level cache and HBM. It is the time
// from a load to what follows the wait for it: of that the model has clocks of
// the address, of the line and of the wait apart.
void SetIdle(Device* d, double l1, double l2, double mall, double hbm) {
  const double hit = d->address_clocks + d->slot;
  const double miss = hit + d->l1_line / d->l2_rate;
  d->l1_latency = l1 - hit;
  d->l2_idle = l2 - miss;
  d->mall_idle = mall * d->gigahertz - miss;
  d->hbm_idle = hbm * d->gigahertz - miss;
}

// Of chases. "MT4G": medians among the results that github.com/caps-tum/mt4g
// comes with, in clocks of the device's peak: MI300X VF and MI210 (2025-08),
// MI350P (2026-09). "C&C": chipsandcheese.com, "Testing AMD's Giant MI300X"
// (2024-06), its text: with few misses of TLBs.
std::vector<Device> AllDevices() {
  Device mi300x = Common("MI300X", "gfx942");
  mi300x.compute_units = 304;   // sheet
  mi300x.gigahertz = 2.1;       // sheet
  mi300x.hbm_gigabytes = 5300;  // sheet
  mi300x.address_clocks = 16;   // fit, as all below
  mi300x.launch_microseconds = 2.5;
  mi300x.sustained = 1;
  mi300x.throttle = 0.7;
  SetIdle(&mi300x, 116, 288, 218, 876 / 2.1);  // MT4G; C&C: last-level cache

  Device mi308x = mi300x;
  mi308x.name = "MI308X";
  mi308x.compute_units = 80;  // AITER's tables
  mi308x.dies = 4;            // assumed
  mi308x.launch_microseconds = 3;
  mi308x.sustained = 0.95;
  mi308x.throttle = 0.4;

  Device mi355x = Common("MI355X", "gfx950");
  mi355x.compute_units = 256;        // sheet
  mi355x.gigahertz = 2.4;            // sheet
  mi355x.lds_bytes = 160 * 1024;     // paper
  mi355x.transcendental = 8;         // paper: twice the rate
  mi355x.lds_write_factor = 2;       // paper: reads are twice as wide
  mi355x.hbm_gigabytes = 8000;       // sheet
  mi355x.launch_microseconds = 2.5;  // fit, as all below
  mi355x.sustained = 0.85;
  mi355x.throttle = 0.25;
  // MT4G on MI350P, half of one, at 2.2 GHz.
  SetIdle(&mi355x, 112, 256, 444 / 2.2, 740 / 2.2);

  // One of its two dies. No measured time has been seen of it but of chases:
  // latencies under load and rates are those of the others.
  Device mi250x = Common("MI250X", "gfx90a");
  mi250x.compute_units = 110;                // sheet
  mi250x.gigahertz = 1.7;                    // sheet
  mi250x.l1_bytes = 16 * 1024;               // paper: of CDNA 2
  mi250x.l1_line = 64;                       // paper: of CDNA 2
  mi250x.dies = 1;                           // sheet
  mi250x.l2_bytes = 8 << 20;                 // sheet
  mi250x.mall_bytes = 0;                     // sheet: it has none
  mi250x.hbm_gigabytes = 1638;               // sheet
  mi250x.address_clocks = 16;                // assumed as CDNA 3's
  mi250x.sustained = 1;                      // assumed as MI300X's
  SetIdle(&mi250x, 124, 292, 0, 684 / 1.7);  // MT4G on MI210, one die as well
  return {mi300x, mi308x, mi355x, mi250x};
}

struct Name {
  const char* name;
  double Device::* field;
};

constexpr Name kNames[] = {
    {"gigahertz", &Device::gigahertz},
    {"taken_branch", &Device::taken_branch},
    {"barrier", &Device::barrier},
    {"lds_latency", &Device::lds_latency},
    {"scalar_latency", &Device::scalar_latency},
    {"l1_latency", &Device::l1_latency},
    {"address_clocks", &Device::address_clocks},
    {"l2_bytes", &Device::l2_bytes},
    {"loaded_share", &Device::loaded_share},
    {"l2_latency", &Device::l2_latency},
    {"l2_idle", &Device::l2_idle},
    {"l2_rate", &Device::l2_rate},
    {"atomic_rate", &Device::atomic_rate},
    {"mall_bytes", &Device::mall_bytes},
    {"mall_latency", &Device::mall_latency},
    {"mall_idle", &Device::mall_idle},
    {"mall_gigabytes", &Device::mall_gigabytes},
    {"hbm_latency", &Device::hbm_latency},
    {"hbm_idle", &Device::hbm_idle},
    {"hbm_gigabytes", &Device::hbm_gigabytes},
    {"hbm_efficiency", &Device::hbm_efficiency},
    {"launch_microseconds", &Device::launch_microseconds},
    {"sustained", &Device::sustained},
    {"throttle", &Device::throttle},
};

}  // namespace

const Device* FindDevice(const std::string& arch) {
  static const std::vector<Device>* const devices =
      new std::vector<Device>(AllDevices());
  const char* wanted = std::getenv("AMDGPU_SIM_CLOCK_DEVICE");
  for (const Device& device : *devices) {
    if (arch != device.arch) continue;
    if (wanted == nullptr || std::string(wanted) == device.name) {
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
