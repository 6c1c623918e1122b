// SPDX-License-Identifier: Apache-2.0

// What the simulator's RCCL asks of its HIP runtime beside HIP's functions.
// The two are libraries of their own, so this is a C interface.
#ifndef AMDGPU_SIM_HIP_COLLECTIVE_H_
#define AMDGPU_SIM_HIP_COLLECTIVE_H_

#include <cstddef>

namespace amdgpu_sim {
class Stream;
}  // namespace amdgpu_sim

extern "C" {

// An operation's work. It is called on a failed device too, with `failed`, to
// tell those that wait for it. Returns null, or what makes the device fail.
typedef const char* (*AmdgpuSimOperation)(void* data, int failed);

// Queues an operation, or makes it a node of the graph that the stream is
// being captured into. `drop` frees the data once it is not run any more, also
// if this fails. Returns a hip error.
int amdgpu_sim_submit(amdgpu_sim::Stream* stream, const char* label,
                      AmdgpuSimOperation run, void (*drop)(void*), void* data);

// For `run`: copies between device and host memory, checked as hip's copies
// are. False if that is a fault, which becomes the device's when `run` returns.
bool amdgpu_sim_copy(void* to, const void* from, size_t bytes);

// Whether the process exits: who waits for another device does so no longer.
bool amdgpu_sim_exiting();
}

#endif  // AMDGPU_SIM_HIP_COLLECTIVE_H_
