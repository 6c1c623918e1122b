// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/gpu/fault.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace amdgpu_sim {
namespace {

constexpr int kChecks = static_cast<int>(Check::kCount);

constexpr const char* kNames[kChecks] = {
    "unsupported",   "out_of_bounds", "use_after_free", "misaligned",
    "uninitialized", "waitcnt",       "lds_race",       "barrier",
    "global_race",   "register",      "endless"};

bool CanBeOff(Check check) {
  return check != Check::kUnsupported && check != Check::kOutOfBounds &&
         check != Check::kUseAfterFree && check != Check::kEndless;
}

// AMDGPU_SIM_CHECKS is a list of names with a minus each: "-lds_race,-barrier".
std::array<bool, kChecks> ReadEnvironment() {
  std::array<bool, kChecks> enabled;
  enabled.fill(true);
  const char* value = std::getenv("AMDGPU_SIM_CHECKS");
  std::string list = value == nullptr ? "" : value;
  for (size_t begin = 0; begin < list.size();) {
    size_t end = list.find(',', begin);
    if (end == std::string::npos) end = list.size();
    std::string name = list.substr(begin, end - begin);
    begin = end + 1;
    if (name.empty()) continue;
    bool known = false;
    for (int i = 0; i < kChecks; ++i) {
      if (name == std::string("-") + kNames[i] &&
          CanBeOff(static_cast<Check>(i))) {
        enabled[i] = false;
        known = true;
      }
    }
    if (!known) {
      std::fprintf(stderr, "amdgpu_sim: AMDGPU_SIM_CHECKS: no such check: %s\n",
                   name.c_str());
    }
  }
  return enabled;
}

}  // namespace

const char* CheckName(Check check) { return kNames[static_cast<int>(check)]; }

bool CheckEnabled(Check check) {
  static const std::array<bool, kChecks> enabled = ReadEnvironment();
  return enabled[static_cast<int>(check)];
}

}  // namespace amdgpu_sim
