// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/select.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "third_party/aiter/src/core/archs.h"
#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/features.h"

namespace aiter {
namespace {

// Grades, the better the later.
constexpr const char* kGrades[] = {"general", "padded", "fast"};
constexpr int kFast = 2;

// Ten times the compute capability of "sm_90", or -1.
int ComputeCapability(const std::string& arch) {
  return arch.compare(0, 3, "sm_") == 0 ? std::atoi(arch.c_str() + 3) : -1;
}

int GradeOf(const KernelInfo& kernel) {
  int grade = kFast;
  while (grade > 0 && std::strcmp(kernel.grade, kGrades[grade]) != 0) --grade;
  return grade;
}

bool Serves(const KernelInfo& kernel, const ProblemKey& key) {
  if (!kernel.any_data_type && kernel.data_type != key.data_type) return false;
  bool exact = GradeOf(kernel) == kFast;
  for (int i = 0; i < kMaxDims; ++i) {
    bool any = kernel.dims[i] == 0 && (!exact || i < kernel.num_dims);
    bool holds =
        exact ? kernel.dims[i] == key.dims[i] : kernel.dims[i] >= key.dims[i];
    if (!any && !holds) return false;
  }
  return (key.features & kernel.excludes) == 0 &&
         (~key.features & kernel.needs) == 0;
}

// The family of an operation: the longest name that its own begins with.
const FamilyInfo* FamilyOf(const std::string& op) {
  const FamilyInfo* best = nullptr;
  for (const FamilyInfo& family : kFamilies) {
    std::string prefix = std::string(family.name) + "_";
    if ((op + "_").compare(0, prefix.size(), prefix) == 0 &&
        (best == nullptr ||
         std::strlen(family.name) > std::strlen(best->name))) {
      best = &family;
    }
  }
  return best;
}

// A problem's features, for a message: ", bias, dropout".
std::string FeatureNames(const std::string& op, uint32_t bits) {
  std::string text;
  const FamilyInfo* family = FamilyOf(op);
  if (family == nullptr) return text;
  for (int i = 0; i < family->num_features; ++i) {
    const FeatureInfo& f = family->features[i];
    // Those of several bits are named by their parts.
    if ((bits & f.bits) != 0 && PopCount(f.bits) == 1) {
      text += std::string(", ") + f.message;
    }
  }
  return text;
}

// "(128, 64)"
std::string SizeList(const ProblemKey& key) {
  int count = kMaxDims;
  while (count > 0 && key.dims[count - 1] == 0) --count;
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(key.dims[i]);
  }
  return "(" + text + ")";
}

// How much a kernel is for; one without a bound is for the most.
int64_t Volume(const KernelInfo& kernel) {
  int64_t volume = 1;
  for (int i = 0; i < kernel.num_dims; ++i) {
    if (kernel.dims[i] == 0) return INT64_MAX;
    volume *= kernel.dims[i];
  }
  return volume;
}

}  // namespace

int ArchRank(const std::string& built, const std::string& device) {
  if (built == device) return INT_MAX;
  const int capability = ComputeCapability(device);
  for (const ArchInfo& arch : kArchs) {
    if (built == arch.name && arch.first_capability <= capability &&
        capability <= arch.last_capability) {
      return arch.first_capability;
    }
  }
  return -1;
}

const ArchInfo& FactsOf(const std::string& arch) {
  for (const ArchInfo& facts : kArchs) {
    if (arch == facts.name) return facts;
  }
  return kArchs[0];
}

int PopCount(uint32_t bits) {
  int count = 0;
  for (; bits != 0; bits &= bits - 1) ++count;
  return count;
}

Status NoKernel(const DeviceInfo& device, const std::string& op,
                const std::string& problem) {
  std::set<std::string> archs;
  for (const KernelInfo& k : GetKernelTable()) {
    if (ArchRank(k.arch, device.arch) >= 0) {
      return Status(
          StatusCode::kUnimplemented,
          "No " + op + " kernel on " + device.arch + " for " + problem);
    }
    archs.insert(k.arch);
  }
  std::string built;
  for (const std::string& a : archs) built += (built.empty() ? "" : ", ") + a;
  return Status(StatusCode::kUnimplemented,
                "No kernels for device architecture " + device.arch +
                    "; this build has kernels for " + built);
}

Status SelectKernel(const DeviceInfo& device, const std::string& op,
                    const ProblemKey& key, const KernelInfo** kernel) {
  using Rank = std::tuple<int, int, int64_t, int>;
  *kernel = nullptr;
  Rank best;
  for (const KernelInfo& candidate : GetKernelTable()) {
    int arch = ArchRank(candidate.arch, device.arch);
    if (arch < 0 || op != candidate.op || !Serves(candidate, key) ||
        candidate.shared_bytes > device.max_shared_bytes) {
      continue;
    }
    Rank rank(arch, GradeOf(candidate), -Volume(candidate),
              PopCount(candidate.excludes | candidate.needs));
    if (*kernel == nullptr || rank > best) {
      *kernel = &candidate;
      best = rank;
    }
  }
  if (*kernel != nullptr) return Status();
  return NoKernel(device, op,
                  std::string(DataTypeName(key.data_type)) + " with sizes " +
                      SizeList(key) + FeatureNames(op, key.features));
}

Status ParseFeatures(const std::string& op,
                     const std::vector<std::string>& names, uint32_t* bits) {
  *bits = 0;
  const FamilyInfo* family = FamilyOf(op);
  if (family == nullptr) {
    std::string families;
    for (const FamilyInfo& f : kFamilies) {
      families += std::string(families.empty() ? "" : ", ") + f.name;
    }
    return Invalid("op", op, "of a family: " + families);
  }
  for (const std::string& name : names) {
    const FeatureInfo* end = family->features + family->num_features;
    const FeatureInfo* found =
        std::find_if(family->features, end,
                     [&](const FeatureInfo& f) { return name == f.name; });
    if (found == end) {
      std::string known;
      for (const FeatureInfo* f = family->features; f != end; ++f) {
        known += std::string(known.empty() ? "" : ", ") + f->name;
      }
      return Invalid("features", name, "of " + known);
    }
    *bits |= found->bits;
  }
  return Status();
}

const char* DataTypeName(DataType type) {
  static constexpr const char* kNames[] = {"fp16",   "bf16",     "fp32", "i8",
                                           "e4m3fn", "e4m3fnuz", "e2m1"};
  return kNames[static_cast<int>(type)];
}

DeviceInfo DeviceOfArch(const std::string& arch) {
  DeviceInfo device;
  device.platform = GetKernelTable().platform;
  device.arch = arch;
  // Of a device that runs another's objects, which fit it, nothing is said.
  const ArchInfo& facts = FactsOf(arch);
  device.max_shared_bytes = arch == facts.name ? facts.shared_bytes : INT_MAX;
  return device;
}

}  // namespace aiter
