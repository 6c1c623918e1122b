// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/gemm_select.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>

#include "third_party/aiter/src/core/archs.h"
#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/select.h"
#include "third_party/aiter/src/gemm_params.h"

namespace aiter {
namespace {

constexpr int64_t kScaleBlock = 128;

// A block draws at most so many times its share of the memory's bandwidth: 90
// to 100 GB/s as measured on an H100.
constexpr double kMostOfShare = 4;
// Launch of the kernel that adds the parts.
constexpr double kSumSeconds = 2e-6;

double BytesOf(DataType type) {
  return type == DataType::kE2m1 ? 0.5
                                 : static_cast<double>(ElementBytes(type));
}

// Blocks that compute a tile together.
int64_t BlocksOfTile(const KernelInfo& kernel) {
  GemmParams params;
  params.m = kernel.tile_m;
  params.n = kernel.tile_n;
  params.batch = params.splits = 1;
  params.multiprocessors = 2;
  int64_t sizes[3];
  kernel.grid->sizes(kernel, &params, sizes);
  return sizes[0];
}

// The lines of the L2 cache that are read for a row of k of an operand, in
// bytes: rows that do not begin at a line take part of one more for each of the
// 128 bytes that a kernel copies at once.
double LinesOf(double bytes, int64_t row, double element) {
  constexpr int64_t kLine = 128;
  return static_cast<int64_t>(static_cast<double>(row) * element) % kLine == 0
             ? bytes
             : 2 * bytes;
}

// Time of a call, from the rate that was measured of the kernel at a large size
// and from the bytes that have to move.
double Estimate(const DeviceInfo& device, const GemmKey& key,
                const GemmTiling& tiling) {
  const KernelInfo& kernel = *tiling.kernel;
  const double bandwidth = 1e9 * FactsOf(kernel.arch).gb_per_s;
  const int64_t all_units = Multiprocessors(device, kernel);
  const double m = static_cast<double>(key.m);
  const double n = static_cast<double>(key.n);
  const double results = static_cast<double>(key.batch) * m * n;
  const double bytes_a = BytesOf(key.a_type);
  const double bytes_b = BytesOf(key.b_type);

  // Blocks, or groups of them, take turns, one block on each multiprocessor.
  const int64_t units =
      std::max<int64_t>(all_units / BlocksOfTile(kernel), 1);
  const int64_t tiles = CeilDiv(key.m, kernel.tile_m) *
                        CeilDiv(key.n, kernel.tile_n) * key.batch *
                        tiling.splits;
  const double turns = static_cast<double>(CeilDiv(tiles, units));
  // A block's products, at a multiprocessor's share of the rate.
  const double products = 2.0 * kernel.tile_m * kernel.tile_n *
                          tiling.k_per_split * static_cast<double>(units) /
                          (std::max<int>(kernel.rate, 1) * 1e12);
  // The lines of its operands; rows past the last are not read.
  const double operands =
      (LinesOf(std::min<double>(kernel.tile_m, m) * bytes_a,
               key.layout == GemmLayout::kTN ? key.m : key.k, bytes_a) +
       LinesOf(std::min<double>(kernel.tile_n, n) * bytes_b,
               key.layout == GemmLayout::kNT ? key.k : key.n, bytes_b)) *
      tiling.k_per_split * static_cast<double>(units) /
      (kMostOfShare * bandwidth);
  // What blocks write at the end of a turn, all at once.
  const double written = (tiling.splits > 1 ? 4.0 : 2.0) * kernel.tile_m *
                         kernel.tile_n * static_cast<double>(units) /
                         bandwidth;
  // Memory gives and takes everything once at least.
  const double all =
      (static_cast<double>(key.batch * key.k) * (m * bytes_a + n * bytes_b) +
       2 * results) /
      bandwidth;
  double seconds =
      std::max(turns * (std::max(products, operands) + written), all);
  if (tiling.splits > 1) {
    // The parts are written and read.
    seconds += kSumSeconds + 8 * tiling.splits * results / bandwidth;
  }
  return seconds;
}

bool IsFp8(DataType type) {
  return type == DataType::kE4m3fn || type == DataType::kE4m3fnuz;
}

const char* OpOf(const GemmKey& key) {
  switch (key.scaling) {
    case GemmScaling::kNone:
      return key.layout == GemmLayout::kNT   ? "gemm_nt"
             : key.layout == GemmLayout::kNN ? "gemm_nn"
                                             : "gemm_tn";
    case GemmScaling::kRow:
      return "gemm_row";
    case GemmScaling::kBlock:
      return "gemm_block";
    case GemmScaling::kMx:
      return "gemm_mx";
  }
  return "";
}

bool Serves(const DeviceInfo& device, const KernelInfo& kernel,
            const GemmKey& key) {
  if (std::strcmp(kernel.op, OpOf(key)) != 0 ||
      kernel.shared_bytes > device.max_shared_bytes) {
    return false;
  }
  if (kernel.any_data_type) {
    // That is, any of fp8.
    if (!IsFp8(key.a_type)) return false;
  } else if (kernel.data_type != key.a_type || kernel.data_type != key.b_type) {
    return false;
  }
  for (int i = 0; i < kernel.num_tensor_maps; ++i) {
    // No tensor map has empty rows, rows that are not multiples of 16 bytes, or
    // more dimensions than it was made for.
    const TensorMapSpec& map = kernel.tensor_maps[i];
    if (key.k == 0 || (key.features & kGemmUnaligned) != 0 ||
        (map.rank < 3 && key.batch > 1)) {
      return false;
    }
  }
  // Kernels that copy by them store as widely.
  if (kernel.num_tensor_maps > 0 && key.n % 8 != 0) return false;
  return (key.features & kernel.excludes) == 0;
}

// The tiling of a kernel with about `splits` parts.
GemmTiling TilingOf(const KernelInfo& kernel, const GemmKey& key,
                    int64_t splits) {
  int64_t step = kernel.tile_k;
  // A part holds whole blocks of scales.
  if (key.scaling == GemmScaling::kBlock) step = std::max(step, kScaleBlock);
  step = std::max<int64_t>(step, 1);
  int64_t steps = std::max<int64_t>(CeilDiv(key.k, step), 1);
  int64_t per_split = CeilDiv(steps, std::min(splits, steps));
  GemmTiling tiling;
  tiling.kernel = &kernel;
  tiling.splits = static_cast<int32_t>(CeilDiv(steps, per_split));
  tiling.k_per_split = static_cast<int32_t>(per_split * step);
  return tiling;
}

// Sizes that share a tuned row: to 64 the next power of two, to 1024 the next
// multiple of 64, above of 1024.
int64_t ClassOf(int64_t m) {
  if (m > 1024) return CeilDiv(m, 1024) * 1024;
  if (m > 64) return CeilDiv(m, 64) * 64;
  int64_t power = 1;
  while (power < m) power *= 2;
  return power;
}

// The kernels that serve a call, of the nearest architecture that has any.
std::vector<const KernelInfo*> Candidates(const DeviceInfo& device,
                                          const GemmKey& key) {
  std::vector<const KernelInfo*> kernels;
  int best = -1;
  for (const KernelInfo& kernel : GetKernelTable()) {
    int arch = ArchRank(kernel.arch, device.arch);
    if (arch < 0 || arch < best || !Serves(device, kernel, key)) continue;
    if (arch > best) kernels.clear();
    best = arch;
    kernels.push_back(&kernel);
  }
  return kernels;
}

// The tuned row for a call: kernel, parts. Null if there is none.
const TunedChoice* Tuned(const GemmKey& key,
                         const std::vector<const KernelInfo*>& candidates) {
  if (key.batch != 1) return nullptr;
  const TunedChoice* best = nullptr;
  const KernelTable& table = GetKernelTable();
  for (int i = 0; i < table.num_tuned; ++i) {
    const TunedChoice& row = table.tuned[i];
    const auto& [m, n, k, unused] = row.sizes;
    if (n != key.n || k != key.k || ClassOf(m) != ClassOf(key.m) ||
        std::find(candidates.begin(), candidates.end(),
                  &table.kernels[row.kernel]) == candidates.end()) {
      continue;
    }
    if (best == nullptr ||
        std::abs(m - key.m) < std::abs(best->sizes[0] - key.m)) {
      best = &row;
    }
  }
  return best;
}

// Whether `a` is to be preferred to `b`: it takes less time, has fewer parts,
// is more specialised, or wastes less of a tile.
bool Better(const GemmTiling& a, const GemmTiling& b) {
  auto rank = [](const GemmTiling& t) {
    return std::make_tuple(t.seconds, t.splits, -PopCount(t.kernel->excludes),
                           t.kernel->tile_m * t.kernel->tile_n);
  };
  return rank(a) < rank(b);
}

// Adds the tilings of a kernel, one for each number of parts that differs.
void AddTilings(const DeviceInfo& device, const GemmKey& key,
                const KernelInfo& kernel, std::vector<GemmTiling>* tilings) {
  int32_t last = 0;
  int32_t from = key.splits > 0 ? key.splits : 1;
  int32_t to = key.splits > 0 ? key.splits : key.max_splits;
  for (int32_t splits = from; splits <= to; ++splits) {
    GemmTiling tiling = TilingOf(kernel, key, splits);
    if (tiling.splits == last) continue;
    last = tiling.splits;
    tiling.seconds = Estimate(device, key, tiling);
    tilings->push_back(tiling);
  }
}

}  // namespace

int Multiprocessors(const DeviceInfo& device, const KernelInfo& kernel) {
  return device.multiprocessors > 0 ? device.multiprocessors
                                    : FactsOf(kernel.arch).multiprocessors;
}

Status ListGemmTilings(const DeviceInfo& device, const GemmKey& key,
                       std::vector<GemmTiling>* tilings) {
  tilings->clear();
  std::vector<const KernelInfo*> candidates = Candidates(device, key);
  if (candidates.empty()) {
    return NoKernel(device, OpOf(key),
                    std::string(DataTypeName(key.a_type)) + " and " +
                        DataTypeName(key.b_type));
  }
  if (key.kernel != nullptr) {
    if (std::find(candidates.begin(), candidates.end(), key.kernel) ==
        candidates.end()) {
      return Status(StatusCode::kInvalidArgument,
                    std::string("kernel is ") + key.kernel->symbol +
                        ", but must be one that serves the call");
    }
    candidates = {key.kernel};
  }
  for (const KernelInfo* kernel : candidates) {
    AddTilings(device, key, *kernel, tilings);
  }
  std::stable_sort(tilings->begin(), tilings->end(), Better);
  if (key.kernel != nullptr || key.splits > 0) return Status();
  if (const TunedChoice* row = Tuned(key, candidates); row != nullptr) {
    const KernelInfo& kernel = GetKernelTable().kernels[row->kernel];
    GemmTiling tuned =
        TilingOf(kernel, key, std::min(row->choices[0], key.max_splits));
    auto same = std::find_if(
        tilings->begin(), tilings->end(), [&](const GemmTiling& t) {
          return t.kernel == &kernel && t.splits == tuned.splits;
        });
    std::rotate(tilings->begin(), same, same + 1);
  }
  return Status();
}

}  // namespace aiter
