// SPDX-License-Identifier: Apache-2.0

// The simulator's code is for CPUs of the last ten years. Compiled for any
// x86-64, this runs first and says so, where the rest would be an illegal
// instruction.

#include <unistd.h>

#include <cstdio>

namespace {

__attribute__((constructor(101))) void CheckCpu() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c")) {
    return;
  }
  std::fprintf(stderr,
               "amdgpu_sim: this CPU lacks AVX2, FMA, BMI2 or F16C "
               "(x86-64-v3), which the simulator needs\n");
  _exit(1);
}

}  // namespace
