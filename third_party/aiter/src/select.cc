// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/select.h"

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

// How well an object for `built` suits a device: higher is better, -1 does not
// run. AMD's objects are for one architecture, and so are those for sm_90 and
// later, whose matrix instructions are; older NVIDIA objects run on every later
// minor version.
int ArchRank(const std::string& built, const std::string& device) {
  if (built == device) return INT_MAX;
  int from = ComputeCapability(built);
  int to = ComputeCapability(device);
  if (from < 0 || to < 0 || from >= 90) return -1;
  return from / 10 == to / 10 && from <= to ? from : -1;
}

// Features that every kernel of the fast grade leaves to the general one.
constexpr uint32_t kGeneralOnly = kFeatureBias | kFeatureAlibi |
                                  kFeatureDropout | kFeatureSoftCap |
                                  kFeatureSinkTokens | kFeatureNonPositiveScale;

bool Serves(const KernelInfo& kernel, const MhaKey& key) {
  if (!kernel.any_data_type && kernel.data_type != key.data_type) return false;
  uint32_t excludes = kernel.excludes;
  if (std::strcmp(kernel.grade, kFast) == 0) {
    if (kernel.hdim_q != key.hdim_q || kernel.hdim_v != key.hdim_v) {
      return false;
    }
    excludes |= kGeneralOnly;
  } else if (kernel.hdim_q > 0 &&
             (kernel.hdim_q < key.hdim_q || kernel.hdim_v < key.hdim_v)) {
    return false;
  }
  return (key.features & excludes) == 0;
}

// Names of the features in `bits`, for a message.
std::string FeatureNames(uint32_t bits) {
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
  for (const auto& f : kNames) {
    if ((bits & f.feature) != 0) text += std::string(", ") + f.name;
  }
  return text;
}

int PopCount(uint32_t bits) {
  int count = 0;
  for (; bits != 0; bits &= bits - 1) ++count;
  return count;
}

}  // namespace

Status SelectKernel(const DeviceInfo& device, const std::string& op,
                    const MhaKey& key, const KernelInfo** kernel) {
  using Rank = std::tuple<int, bool, int, int>;
  *kernel = nullptr;
  Rank best;
  bool runs = false;
  for (const KernelInfo& candidate : GetKernelTable()) {
    int arch = ArchRank(candidate.arch, device.arch);
    if (arch < 0) continue;
    runs = true;
    if (op != candidate.op || !Serves(candidate, key) ||
        candidate.shared_bytes > device.max_shared_bytes) {
      continue;
    }
    Rank rank(arch, std::strcmp(candidate.grade, kFast) == 0,
              -candidate.hdim_q * candidate.hdim_v,
              PopCount(candidate.excludes));
    if (*kernel == nullptr || rank > best) {
      *kernel = &candidate;
      best = rank;
    }
  }
  if (*kernel != nullptr) return Status();
  if (!runs) {
    std::set<std::string> archs;
    for (const KernelInfo& k : GetKernelTable()) archs.insert(k.arch);
    std::string built;
    for (const std::string& a : archs) built += (built.empty() ? "" : ", ") + a;
    return Status(StatusCode::kUnimplemented,
                  "No kernels for device architecture " + device.arch +
                      "; this build has kernels for " + built);
  }
  return Status(StatusCode::kUnimplemented,
                "No " + op + " kernel on " + device.arch + " for " +
                    (key.data_type == DataType::kFp16 ? "fp16" : "bf16") +
                    " with head dimensions (" + std::to_string(key.hdim_q) +
                    ", " + std::to_string(key.hdim_v) + ")" +
                    FeatureNames(key.features));
}

DeviceInfo DeviceOfArch(const std::string& arch) {
  DeviceInfo device;
  device.platform = GetKernelTable().platform;
  device.arch = arch;
  device.max_shared_bytes = INT_MAX;
  return device;
}

}  // namespace aiter
