// SPDX-License-Identifier: Apache-2.0

// What the model of time knows of each device.
#ifndef AMDGPU_SIM_CLOCK_DEVICE_H_
#define AMDGPU_SIM_CLOCK_DEVICE_H_

#include <string>

namespace amdgpu_sim {

// Times are clocks of the compute units. device.cc has each one's source.
struct Device {
  const char* name;
  const char* arch;
  double compute_units;
  double gigahertz;  // At its peak.

  double simds;
  double waves_per_simd;
  double vector_registers;  // Of a SIMD's lane, for all its waves.
  double lds_bytes;

  double slot;              // Between two instructions of a wave.
  double vector;            // A VALU instruction keeps a SIMD's unit busy.
  double transcendental;    // So does one of these.
  double pass;              // One pass of a matrix instruction.
  double matrix_slots;      // After its passes, until others may read it.
  double taken_branch;      // Until the next instruction, beside the slot.
  double barrier;           // From the last wave's arrival.
  double lds_latency;       // Of a read, beside the clocks that it takes.
  double lds_write_factor;  // Clocks of a write for one of a read.
  double scalar_latency;    // A scalar load.
  double address_clocks;    // Of a vector memory instruction, at least.
  double l1_bytes;
  double l1_line;
  double l1_latency;    // A load that hits.
  double l1_rate;       // Bytes a clock.
  double dies;          // Each has an L2.
  double l2_bytes;      // Of one.
  double loaded_share;  // Of the other units: so many busy ones load it.
  double l2_latency;    // A load that misses the L1, on a loaded device,
  double l2_idle;       // and on an idle one. So with those below.
  double l2_rate;       // Bytes a clock and compute unit.
  double atomic_rate;   // Bytes of atomics a clock and die.
  double mall_bytes;    // The last-level cache.
  double mall_latency;
  double mall_idle;
  double mall_gigabytes;  // A second, of the device.
  double hbm_latency;
  double hbm_idle;
  double hbm_gigabytes;   // A second, of the device, at its peak.
  double hbm_efficiency;  // The share of it that there is.

  // Of a launch.
  double launch_microseconds;
  // The clock under load: peak * (sustained - throttle * share^2), where the
  // share is that of matrix clocks among all of the device's.
  double sustained;
  double throttle;
};

// The device of AMDGPU_SIM_CLOCK_DEVICE, or the first of an architecture.
// Null if there is none.
const Device* FindDevice(const std::string& arch);

// A number by its name, for the fit; null if there is none.
double* Parameter(Device* device, const std::string& name);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_CLOCK_DEVICE_H_
