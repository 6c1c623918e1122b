// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/select.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <tuple>

namespace aiter {
namespace {

constexpr char kFast[] = "fast";

// The number in "sm_90", or -1.
int ComputeCapability(const std::string& arch) {
  return arch.compare(0, 3, "sm_") == 0 ? std::atoi(arch.c_str() + 3) : -1;
}

// Features that every kernel of the fast grade leaves to the general one.
constexpr uint32_t kGeneralOnly = kFeatureBias | kFeatureAlibi |
                                  kFeatureDropout | kFeatureSoftCap |
                                  kFeatureSinkTokens | kFeatureNonPositiveScale;

bool Serves(const KernelInfo& kernel, const ProblemKey& key) {
  if (!kernel.any_data_type && kernel.data_type != key.data_type) return false;
  uint32_t excludes = kernel.excludes;
  if (std::strcmp(kernel.grade, kFast) == 0) {
    if (kernel.dims[0] != key.dims[0] || kernel.dims[1] != key.dims[1]) {
      return false;
    }
    excludes |= kGeneralOnly;
  } else if (kernel.dims[0] > 0 &&
             (kernel.dims[0] < key.dims[0] || kernel.dims[1] < key.dims[1])) {
    return false;
  }
  return (key.features & excludes) == 0;
}

// Names of an attention problem's features, for a message.
std::string FeatureNames(const std::string& op, uint32_t bits) {
  static constexpr struct {
    Feature feature;
    const char* name;
  } kNames[] = {
      {kFeatureBias, "bias"},
      {kFeatureAlibi, "ALiBi slopes"},
      {kFeatureSink, "sink"},
      {kFeatureDropout, "dropout"},
      {kFeatureVarlen, "packed sequences"},
      {kFeatureCuSeqlens, "sequence lengths"},
      {kFeatureTopLeft, "top-left alignment"},
      {kFeatureSoftCap, "soft cap"},
      {kFeatureSinkTokens, "sink tokens"},
      {kFeatureWindow, "window"},
      {kFeatureMinSeqlen, "min_seqlen_q"},
      {kFeatureNoKeys, "no keys"},
      {kFeatureNonPositiveScale, "scale_s <= 0"},
  };
  std::string text;
  if (op.compare(0, 4, "mha_") != 0) return text;
  for (const auto& f : kNames) {
    if ((bits & f.feature) != 0) text += std::string(", ") + f.name;
  }
  return text;
}

// How much a kernel is for; one without a bound is for the most.
int Volume(const KernelInfo& kernel) {
  if (kernel.dims[0] == 0) return INT_MAX;
  return kernel.dims[0] * std::max(kernel.dims[1], 1);
}

}  // namespace

int ArchRank(const std::string& built, const std::string& device) {
  if (built == device) return INT_MAX;
  int from = ComputeCapability(built);
  int to = ComputeCapability(device);
  if (from < 0 || to < 0 || from >= 90) return -1;
  return from / 10 == to / 10 && from <= to ? from : -1;
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
  using Rank = std::tuple<int, bool, int, int>;
  *kernel = nullptr;
  Rank best;
  for (const KernelInfo& candidate : GetKernelTable()) {
    int arch = ArchRank(candidate.arch, device.arch);
    if (arch < 0 || op != candidate.op || !Serves(candidate, key) ||
        candidate.shared_bytes > device.max_shared_bytes) {
      continue;
    }
    Rank rank(arch, std::strcmp(candidate.grade, kFast) == 0,
              -Volume(candidate), PopCount(candidate.excludes));
    if (*kernel == nullptr || rank > best) {
      *kernel = &candidate;
      best = rank;
    }
  }
  if (*kernel != nullptr) return Status();
  return NoKernel(device, op,
                  std::string(DataTypeName(key.data_type)) + " with sizes (" +
                      std::to_string(key.dims[0]) + ", " +
                      std::to_string(key.dims[1]) + ")" +
                      FeatureNames(op, key.features));
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
  device.max_shared_bytes = INT_MAX;
  return device;
}

}  // namespace aiter
