// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/isa/ops.h"

#include <set>
#include <string>
#include <string_view>
#include <unordered_map>

namespace amdgpu_sim {
namespace {

constexpr int kArchs = 3;

struct Table {
  std::vector<Op> ops;
  std::unordered_map<std::string_view, const Op*> by_name[kArchs];
  std::string names[kArchs];

  Table() {
    for (Ops (*part)() : {ScalarOps, IntegerOps, FloatOps, PackedOps,
                          CrossLaneOps, MfmaOps, GlobalOps, LdsOps}) {
      Ops more = part();
      ops.insert(ops.end(), more.begin(), more.end());
    }
    for (const Op& op : ops) {
      for (int arch = 0; arch < kArchs; ++arch) {
        if (op.archs >> arch & 1) by_name[arch].emplace(op.mnemonic, &op);
      }
    }
    for (int arch = 0; arch < kArchs; ++arch) {
      std::set<std::string_view> sorted;
      for (const auto& entry : by_name[arch]) sorted.insert(entry.first);
      for (std::string_view name : sorted) {
        names[arch].append(name).push_back('\n');
      }
    }
  }
};

const Table& TheTable() {
  static const Table* table = new Table;
  return *table;
}

}  // namespace

const Op* FindOp(const char* mnemonic, Arch arch) {
  const auto& ops = TheTable().by_name[static_cast<int>(arch)];
  auto found = ops.find(mnemonic);
  return found == ops.end() ? nullptr : found->second;
}

}  // namespace amdgpu_sim

// The mnemonics that are implemented on an architecture, one a line; for the
// tests' coverage check. Null if there is no such architecture.
extern "C" __attribute__((visibility("default"))) const char*
amdgpu_sim_mnemonics(const char* arch) {
  static const char* const kNames[] = {"gfx90a", "gfx942", "gfx950"};
  for (int k = 0; k < amdgpu_sim::kArchs; ++k) {
    if (std::string_view(arch) == kNames[k]) {
      return amdgpu_sim::TheTable().names[k].c_str();
    }
  }
  return nullptr;
}
