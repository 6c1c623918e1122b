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
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/gemm_params.h"

namespace aiter {
namespace {

constexpr int64_t kScaleBlock = 128;
// Tiles of a call, that parts of them are counted in 32 bits.
constexpr int64_t kMostTiles = INT32_MAX / 64;

constexpr int64_t kMostTileRows = 512;
constexpr int64_t kMostParts = 16;  // That are worth their sum.
constexpr int64_t kMaxGrid = 65535;
constexpr int kSumColumns = 64;

// What the estimate knows of a device beside its bandwidth and the rates of its
// kernels.
struct Costs {
  double sum;   // Seconds of the kernel that adds parts.
  double turn;  // Seconds between a block's tiles.
  // The same where one warpgroup's products hide what ends another's tile.
  double pingpong_turn;
  // Of the memory's bandwidth: how fast everything moves once, how fast parts
  // move, how fast blocks draw operands, from the L2 cache, and how fast blocks
  // of clusters receive them, which is more: each draws for others.
  double all_share, sum_share, draw_share, receive_share;
  // Whether blocks that do not walk take turns as many as run side by side.
  bool side_by_side = false;
};

// sm_90, on an H200: its memory has 4.8 TB/s, and archs.csv the H100's 3.3; of
// what everything is the L2 cache holds some.
constexpr Costs kOf16Bits = {4e-6, 0.9e-6, 0.6e-6, 2.5, 0.8, 5.1, 3.1};
// Of 16 bits by kernels that do not walk: they wait for memory and not for each
// other, and take unaligned rows.
constexpr Costs kOfBlocks = {1.7e-6, 1.9e-6, 0, 2.5, 0.8, 4.1, 4.1, true};
constexpr Costs kOf8Bits = {3e-6, 0.6e-6, 0, 1.02, 0.81, 4.36, 2.8};
// Others: nobody has measured.
constexpr Costs kAssumed = {4e-6, 0, 0, 1, 1, 4, 4};

const Costs& CostsOf(const KernelInfo& kernel, const GemmKey& key) {
  if (std::strcmp(kernel.arch, "sm_90") != 0) return kAssumed;
  if (key.scaling != GemmScaling::kNone) return kOf8Bits;
  return Walks(kernel) ? kOf16Bits : kOfBlocks;
}

double BytesOf(DataType type) {
  return type == DataType::kE2m1 ? 0.5
                                 : static_cast<double>(ElementBytes(type));
}

int64_t TilesOf(const KernelInfo& kernel, const GemmKey& key) {
  return CeilDiv(key.m, kernel.tile_m) * CeilDiv(key.n, kernel.tile_n) *
         key.batch;
}

// Blocks that a kernel of so many tiles is launched with.
int64_t BlocksOf(const DeviceInfo& device, const KernelInfo& kernel,
                 int64_t tiles) {
  GemmParams params;
  params.whole_tiles = static_cast<int32_t>(tiles);
  params.blocks_at_once = GemmBlocksAtOnce(device, kernel);
  int64_t sizes[3];
  kernel.grid->sizes(kernel, &params, sizes);
  return sizes[0];
}

// What computes a kernel's tiles on a device.
struct Units {
  int64_t count;  // At once: blocks, pairs or clusters of them.
  // Rows of operands that the blocks of a cluster receive for a tile, each its
  // own; 0 where they are none. What a block copies for others of its cluster
  // they receive as well; the cluster has the shape in which that is least.
  int64_t rows_received;
};

Units UnitsOf(const DeviceInfo& device, const KernelInfo& kernel,
              const GemmKey& key) {
  if (!Walks(kernel)) {
    const int blocks =
        CostsOf(kernel, key).side_by_side
            ? Multiprocessors(device, kernel) * BlocksOnOne(device, kernel)
            : GemmBlocksAtOnce(device, kernel);
    return {std::max(blocks, 1), 0};
  }
  const int64_t blocks = BlocksOf(device, kernel, 1);
  Units units = {BlocksOf(device, kernel, kMostTiles) / blocks, 0};
  // A pair of blocks is one program, and computes no tile's transpose.
  if (blocks == 1 || !ComputesTranspose(kernel)) return units;
  units.rows_received = INT64_MAX;
  for (int64_t rows = 1; rows <= blocks; rows *= 2) {
    units.rows_received =
        std::min(units.rows_received,
                 blocks / rows * kernel.tile_m + rows * kernel.tile_n);
  }
  return units;
}

// Elements of a row of a and of b.
int64_t RowOfA(const GemmKey& key) {
  return key.layout == GemmLayout::kTN ? key.m : key.k;
}

int64_t RowOfB(const GemmKey& key) {
  return key.layout == GemmLayout::kNT ? key.k : key.n;
}

// Whether rows of so many elements do not begin at lines of the L2 cache.
bool IsCut(int64_t row, double element) {
  constexpr int64_t kLine = 128;
  return static_cast<int64_t>(static_cast<double>(row) * element) % kLine != 0;
}

// The lines of the L2 cache that are read for so many bytes of an operand's
// rows: where these do not begin at a line, the 128 bytes that a kernel copies
// at once lie in two.
double LinesOf(double bytes, int64_t row, double element) {
  return IsCut(row, element) ? 2 * bytes : bytes;
}

// Whether a tile is one warpgroup's alone, and the next one another's
// (PINGPONG): others store 64 rows at once.
bool Alternates(const KernelInfo& kernel) {
  for (int i = 0; i < kernel.num_tensor_maps; ++i) {
    const TensorMapSpec& map = kernel.tensor_maps[i];
    if (map.tensor == kGemmTensorOut) return map.box[1] > 64;
  }
  return false;
}

// Time of a call, from the rate that was measured of the kernel at a large size
// and from the bytes that have to move. docs/retuning.md has it in words.
double Estimate(const Units& at_once, const GemmKey& key,
                const GemmTiling& tiling) {
  const KernelInfo& kernel = *tiling.kernel;
  const Costs& costs = CostsOf(kernel, key);
  const double bandwidth = 1e9 * FactsOf(kernel.arch).gb_per_s;
  const int64_t units = at_once.count;
  const double share = static_cast<double>(units) / bandwidth;
  const double m = static_cast<double>(key.m);
  const double n = static_cast<double>(key.n);
  const double results = static_cast<double>(key.batch) * m * n;
  const double bytes_a = BytesOf(key.a_type);
  const double bytes_b = BytesOf(key.b_type);

  // Of 1 of k of a tile: its products, at a multiprocessor's share of the rate,
  // and the lines of its operands; rows past the last are not read.
  const double products = 2.0 * kernel.tile_m * kernel.tile_n *
                          static_cast<double>(units) /
                          (std::max<int>(kernel.rate, 1) * 1e12);
  const double drawn = (LinesOf(std::min<double>(kernel.tile_m, m) * bytes_a,
                                RowOfA(key), bytes_a) +
                        LinesOf(std::min<double>(kernel.tile_n, n) * bytes_b,
                                RowOfB(key), bytes_b)) *
                       share / costs.draw_share;
  const double operands =
      std::max(drawn, static_cast<double>(at_once.rows_received) * bytes_a *
                          share / costs.receive_share);
  // Blocks take turns, one on each multiprocessor.
  const double turns = static_cast<double>(CeilDiv(tiling.whole_tiles, units));
  const double parts =
      static_cast<double>(CeilDiv(tiling.divided_tiles * tiling.splits, units));
  const double length = turns * static_cast<double>(key.k) +
                        parts * static_cast<double>(tiling.k_per_split);
  // What blocks write at the end of a turn, all at once, and what else lies
  // between turns.
  const double tile = kernel.tile_m * kernel.tile_n * share;
  const double of_part = tiling.splits > 1 ? 4 : 2;
  const double ends =
      Alternates(kernel)
          ? (turns + parts) * costs.pingpong_turn + costs.turn +
                (parts > 0 ? of_part : 2) * tile  // Of the last one.
          : (2 * turns + of_part * parts) * tile + (turns + parts) * costs.turn;
  // Memory gives and takes everything once at least.
  const double all =
      (static_cast<double>(key.batch * key.k) * (m * bytes_a + n * bytes_b) +
       2 * results) /
      (costs.all_share * bandwidth);
  // Products hide what another tile writes, but not copies of lines in halves,
  // for which the L2 cache has no time left.
  const double written = Alternates(kernel) && (IsCut(RowOfA(key), bytes_a) ||
                                                IsCut(RowOfB(key), bytes_b))
                             ? (turns + parts) * 2 * tile
                             : 0;
  double seconds = std::max(
      {length * products + ends, length * operands + written + ends, all});
  if (tiling.splits > 1) {
    // The parts are written and read.
    const double numbers = Walks(kernel)
                               ? static_cast<double>(tiling.divided_tiles) *
                                     kernel.tile_m * kernel.tile_n
                               : results;
    seconds +=
        costs.sum + 8 * tiling.splits * numbers / (costs.sum_share * bandwidth);
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
  if (Walks(kernel)) {
    // They store rows of any length where nothing is scaled, with offsets of 32
    // bits in a tile, and count parts of tiles in as many.
    if ((key.n % 8 != 0 && (key.scaling != GemmScaling::kNone ||
                            key.n > INT32_MAX / kMostTileRows)) ||
        key.batch > kMostTiles ||
        CeilDiv(key.m, kernel.tile_m) > kMostTiles / key.batch ||
        TilesOf(kernel, key) > kMostTiles) {
      return false;
    }
  }
  return (key.features & kernel.excludes) == 0 &&
         (~key.features & kernel.needs) == 0;
}

// The tiling of a kernel with about `splits` parts of all tiles but the first.
GemmTiling TilingOf(const KernelInfo& kernel, const GemmKey& key,
                    int64_t splits, int64_t whole_tiles) {
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
  const int64_t tiles = TilesOf(kernel, key);
  if (tiling.splits == 1) whole_tiles = tiles;
  tiling.whole_tiles = whole_tiles;
  tiling.divided_tiles = tiles - whole_tiles;
  return tiling;
}

// How many parts the workspace has room for, of so many tiles.
int64_t RoomOf(const KernelInfo& kernel, const GemmKey& key, int64_t tiles) {
  // An axis of the grid that adds them.
  if ((Walks(kernel) ? tiles : key.batch) > kMaxGrid) return 0;
  // gemm_sum_tiles reads so many columns at a time.
  if (Walks(kernel) && kernel.tile_n % kSumColumns != 0) return 0;
  // Not their product, which may not fit 64 bits.
  return Walks(kernel) ? key.workspace / tiles / (kernel.tile_m * kernel.tile_n)
                       : key.workspace / key.batch / key.m / key.n;
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
// is more specialised, computes fewer rows, or wastes less of a tile.
bool Better(const GemmKey& key, const GemmTiling& a, const GemmTiling& b) {
  auto rank = [&key](const GemmTiling& t) {
    const int64_t tile_m = t.kernel->tile_m;
    return std::make_tuple(t.seconds, t.splits, -PopCount(t.kernel->excludes),
                           CeilDiv(key.m, tile_m) * tile_m,
                           tile_m * t.kernel->tile_n);
  };
  return rank(a) < rank(b);
}

// Adds the tilings of a kernel, the best one for each number of parts.
void AddTilings(const DeviceInfo& device, const GemmKey& key,
                const KernelInfo& kernel, std::vector<GemmTiling>* tilings) {
  const int64_t tiles = TilesOf(kernel, key);
  const Units units = UnitsOf(device, kernel, key);
  int32_t last = 0;
  int64_t from = key.splits > 0 ? key.splits : 1;
  int64_t to = key.splits > 0 ? key.splits : kMostParts;
  for (int64_t splits = from; splits <= to; ++splits) {
    GemmTiling best;
    // Full turns come first: all of them, all but one, or none.
    const int64_t turns = Walks(kernel) ? tiles / units.count : 0;
    for (int64_t full : {turns, turns - 1, int64_t{0}}) {
      const int64_t whole = full * units.count;
      if (full < 0 ||
          (splits > 1 &&
           (whole == tiles || RoomOf(kernel, key, tiles - whole) < splits))) {
        continue;
      }
      GemmTiling tiling = TilingOf(kernel, key, splits, whole);
      tiling.seconds = Estimate(units, key, tiling);
      if (best.kernel == nullptr || tiling.seconds < best.seconds) {
        best = tiling;
      }
    }
    if (best.kernel == nullptr || best.splits == last) continue;
    last = best.splits;
    tilings->push_back(best);
  }
}

}  // namespace

bool ComputesTranspose(const KernelInfo& kernel) {
  for (int i = 0; i < kernel.num_tensor_maps; ++i) {
    if (kernel.tensor_maps[i].tensor == kGemmTensorOut) return false;
  }
  return Walks(kernel);
}

int GemmBlocksAtOnce(const DeviceInfo& device, const KernelInfo& kernel) {
  return BlocksAtOnce(device, kernel, /*most=*/Walks(kernel) ? 2 : 1);
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
  if (tilings->empty()) {
    return Invalid("splits", std::to_string(key.splits),
                   "so few that their sums fit the workspace's " +
                       std::to_string(key.workspace) + " numbers");
  }
  std::stable_sort(tilings->begin(), tilings->end(),
                   [&key](const GemmTiling& a, const GemmTiling& b) {
                     return Better(key, a, b);
                   });
  if (key.kernel != nullptr || key.splits > 0) return Status();
  if (const TunedChoice* row = Tuned(key, candidates); row != nullptr) {
    // Of its kernel, with its parts or as many fewer as there is room for.
    const KernelInfo& kernel = GetKernelTable().kernels[row->kernel];
    auto best = tilings->end();
    for (auto t = tilings->begin(); t != tilings->end(); ++t) {
      if (t->kernel == &kernel && t->splits <= row->choices[0] &&
          (best == tilings->end() || t->splits > best->splits)) {
        best = t;
      }
    }
    std::rotate(tilings->begin(), best, best + 1);
  }
  return Status();
}

}  // namespace aiter
