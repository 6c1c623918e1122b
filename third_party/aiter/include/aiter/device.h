// SPDX-License-Identifier: Apache-2.0

// What is embedded in the library, and which devices there are.
#ifndef AITER_DEVICE_H_
#define AITER_DEVICE_H_

#include <string>
#include <vector>

#include "aiter/status.h"

namespace aiter {

// An embedded kernel.
struct KernelDescription {
  std::string symbol;
  std::string op;
  std::string grade;  // "fast" or "general"
  std::string arch;
  std::string data_type;  // As configs/*.csv have it: "bf16", "any".
  // Exact in the fast grade, else a maximum; 0: no bound.
  std::vector<int> dims;
  int tile_m;
  int tile_n;
  int tile_k;  // Of a GEMM, else 0.
};

// Every embedded kernel, by symbol. Needs no device.
std::vector<KernelDescription> list_kernels();

// Number of devices of the platform that kernels are embedded for.
Status device_count(int* count);

// Architecture of a device: "gfx942", "sm_90".
Status device_arch(int ordinal, std::string* arch);

// The float8 type of 4 exponent bits that an architecture multiplies: "e4m3fn"
// or "e4m3fnuz"; empty if there is none or it is not known.
std::string float8_type(const std::string& arch);

}  // namespace aiter

#endif  // AITER_DEVICE_H_
