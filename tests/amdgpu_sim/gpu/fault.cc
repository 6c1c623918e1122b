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
    "unsupported",   "out_of_bounds",     "use_after_free", "misaligned",
    "uninitialized", "lds_uninitialized", "waitcnt",        "lds_race",
    "lds_wait",      "barrier",           "global_race",    "register",
    "endless"};

bool CanBeOff(Check check) {
  return check != Check::kUnsupported && check != Check::kOutOfBounds &&
         check != Check::kUseAfterFree && check != Check::kEndless;
}

enum class Level : uint8_t { kOff, kWarn, kStop };

// AMDGPU_SIM_CHECKS is a list of names with a sign each, the
// last of a name counts: "-lds_race,+lds_wait".
std::array<Level, kChecks> ReadEnvironment() {
  std::array<Level, kChecks> levels;
  levels.fill(Level::kStop);
  levels[static_cast<int>(Check::kLdsWait)] = Level::kWarn;
  levels[static_cast<int>(Check::kLdsUninitialized)] = Level::kWarn;
  const char* value = std::getenv("AMDGPU_SIM_CHECKS");
  std::string list = value == nullptr ? "" : value;
  for (size_t begin = 0; begin < list.size();) {
    size_t end = list.find(',', begin);
    if (end == std::string::npos) end = list.size();
    std::string name = list.substr(begin, end - begin);
    begin = end + 1;
    if (name.empty()) continue;
    bool known = name == "+all";
    if (known) levels.fill(Level::kStop);
    for (int i = 0; i < kChecks; ++i) {
      if (name.substr(1) != kNames[i]) continue;
      if (name[0] == '-' && CanBeOff(static_cast<Check>(i))) {
        levels[i] = Level::kOff;
        known = true;
      } else if (name[0] == '+') {
        levels[i] = Level::kStop;
        known = true;
      }
    }
    if (!known) {
      std::fprintf(stderr, "amdgpu_sim: AMDGPU_SIM_CHECKS: no such check: %s\n",
                   name.c_str());
    }
  }
  return levels;
}

Level LevelOf(Check check) {
  static const std::array<Level, kChecks> levels = ReadEnvironment();
  return levels[static_cast<int>(check)];
}

}  // namespace

const char* CheckName(Check check) { return kNames[static_cast<int>(check)]; }

bool CheckEnabled(Check check) { return LevelOf(check) != Level::kOff; }

bool CheckOnlyWarns(Check check) { return LevelOf(check) == Level::kWarn; }

}  // namespace amdgpu_sim
