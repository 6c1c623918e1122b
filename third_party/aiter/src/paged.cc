// SPDX-License-Identifier: Apache-2.0

#include "aiter/paged.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "third_party/aiter/src/cache_side.h"
#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/grids.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/select.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/paged_params.h"

namespace aiter {
namespace {

// Kernels count rows, keys and pages in 32 bits, and add a tile.
constexpr int64_t kMaxSize = INT32_MAX - 8192;
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxLatentDim = 1024;
constexpr int64_t kMaxSplits = 65535;
constexpr int32_t kUnbounded = 1 << 30;
constexpr int64_t kRunBytes = 16;
// Rows of a sequence that a tall tile is worth, and how many it has at most in
// half a tile of shares_hopper.py, and in a small one of decode_hopper.py.
constexpr int64_t kManyRows = 32;
constexpr int64_t kHalfTile = 16;
constexpr int64_t kSmallTile = 8;
// Keys that rows see in the mean, up to which blocks of 64 rows, of which four
// share a multiprocessor, are faster than those of 128; and of so many columns,
// of which five do.
constexpr int64_t kFewKeys = 560;
constexpr int64_t kNarrow = 64;
constexpr int64_t kFewKeysNarrow = 1800;
// Tiles of these a multiprocessor, below which they are the only kernel.
constexpr int64_t kFewTiles = 2;
// Kernels whose tanh is one instruction err by 2^-11 of a score: of one that no
// lower cap bounds by too much.
constexpr float kLargeSoftCap = 1024;
// Keys that lie together in a large page; tiles of keys divide it.
constexpr int64_t kLargePage = 64;
// Rows that a tensor map's boxes of the smallest kernel have; and tokens whose
// columns a map of pages of such boxes has one behind the other.
constexpr int64_t kTinyPage = 16;
constexpr int64_t kMappedTokens = 8;
// Programs of a multiprocessor, below which keys are divided, or of small ones
// so many waves; and how often a grid of two axes has room for them, of which a
// long sequence may take more than its share.
constexpr int64_t kPrograms = 3;
constexpr int64_t kWaves = 8;
constexpr int64_t kRoom = 4;
// The same of latent attention: of AMD's kernels, but of those with tiles of so
// many rows, of which one fills a multiprocessor; and of CUDA's, where a
// sequence gets its share of half as many (PROGRAMS of mla/attend_hopper.py).
constexpr int64_t kLatentPrograms = 2;
constexpr int64_t kTallTile = 64;
constexpr int64_t kLatentProgramsCuda = 2;
// What a counter of tiles takes.
constexpr int64_t kCounterBytes = sizeof(int32_t);
// Programs that join parts, where a kernel takes several rows of them, of those
// that attend.
constexpr int64_t kMergers = 4;
// Programs that share the columns of a row, where rows are few and have more
// parts than so many, and twice as many of mla/attend_hopper.py's where there
// is room; and of AMD's latent attention (MERGE_COLS of the families'
// constants), where all programs may have a row.
constexpr int64_t kMergeCols = 4;
constexpr int64_t kLatentMergeCols = 16;
constexpr int64_t kMergeParts = 16;
// Rows of its tiles; the last is for all that are more.
constexpr int64_t kLatentRows[] = {16, 32, 64};

constexpr uint32_t kKernelFlags = (1u << 16) - 1;

int64_t RunOf(const paged_attend_args& a) {
  return a.kind == PagedKind::kSame ? kRunBytes / ElementBytes(a.data_type)
                                    : kRunBytes;
}

Status CheckHalf(const std::string& name, const paged_attend_args& a,
                 const paged_half& h, int64_t cols) {
  std::string side = name + ".side";
  AITER_RETURN_IF_ERROR(CheckSide(side, h.side, INT32_MAX));
  std::string scales = name + ".scales";
  AITER_RETURN_IF_ERROR(CheckCoefficients(
      scales, {h.scales.page, h.scales.offset, h.scales.head}, INT32_MAX));
  if (h.scale_ptr == nullptr) return Invalid(scales, "absent", "given");
  if (a.pages == 0) return Status();
  int64_t run = RunOf(a);
  double in_page =
      Reach(a.page_size, h.side.split, h.side.run_offset, h.side.offset) +
      Reach(cols, run, h.side.run, h.side.col);
  if (in_page > static_cast<double>(kMaxSize)) {
    return Invalid(side, "a page of more than 2^31 elements", "smaller");
  }
  int64_t heads = a.nhead_k - 1;
  if (heads > 0 && h.side.head > INT64_MAX / 2 / heads) {
    return Invalid(side, "beyond the array", "inside");
  }
  AITER_RETURN_IF_ERROR(CheckReach(
      side, h.side.start, a.pages, h.side.page,
      static_cast<int64_t>(in_page) + heads * h.side.head, h.cache_size));
  AITER_RETURN_IF_ERROR(
      CheckReach(scales, 0, a.pages, h.scales.page,
                 (a.page_size - 1) * h.scales.offset + heads * h.scales.head,
                 h.scale_size));
  return CheckAligned({{"cache_ptr", h.cache_ptr}});
}

Status CheckSizes(const paged_attend_args& a, int64_t max_head_dim) {
  if (a.data_type != DataType::kFp16 && a.data_type != DataType::kBf16 &&
      a.data_type != DataType::kFp32) {
    return Invalid("data_type", DataTypeName(a.data_type),
                   "fp16, bf16 or fp32");
  }
  AITER_RETURN_IF_ERROR(CheckRange("tokens", a.tokens, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("batch", a.batch, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("nhead_k", a.nhead_k, 1, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("nhead_q", a.nhead_q, 1, kMaxSize));
  if (a.nhead_q % a.nhead_k != 0) {
    return Invalid("nhead_q", std::to_string(a.nhead_q),
                   "a multiple of nhead_k, " + std::to_string(a.nhead_k));
  }
  AITER_RETURN_IF_ERROR(
      CheckRange("tokens * nhead_q", a.tokens * a.nhead_q, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("hdim", a.hdim, 1, max_head_dim));
  AITER_RETURN_IF_ERROR(CheckRange("hdim_v", a.hdim_v, 1, max_head_dim));
  AITER_RETURN_IF_ERROR(CheckRange("pages", a.pages, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("page_size", a.page_size, 1, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("width", a.width, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("splits", a.splits, 1, kMaxSplits));
  return Status();
}

bool IsPower(int64_t n) { return (n & (n - 1)) == 0; }

uint32_t If(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

bool IsLatent(const KernelInfo& kernel) {
  return std::string(kernel.op).compare(0, 4, "mla_") == 0;
}

// Whether a kernel is of mla/attend_hopper.py: as many blocks attend as there
// are parts.
bool IsLatentHopper(const KernelInfo& kernel) {
  return IsLatent(kernel) && kernel.arch == std::string("sm_90") &&
         kernel.grade == std::string("fast");
}

// Whether its blocks share the keys of all sequences alike (find_work of
// mla/attend_mfma.py, _find_piece of paged/shares_hopper.py).
bool SharesKeys(const KernelInfo& kernel) {
  return kernel.grid == &kMlaAttendGridShares ||
         kernel.grid == &kPagedAttendGridShares;
}

// Whether a kernel may begin early, as it waits itself for the one before it.
bool Waits(const KernelInfo& kernel) {
  return IsLatentHopper(kernel) || kernel.grid == &kPagedAttendGridShares;
}

uint32_t KindBits(PagedKind kind) {
  switch (kind) {
    case PagedKind::kInt8:
      return kPagedBytes | kPagedInt8;
    case PagedKind::kE4m3fn:
      return kPagedBytes | kPagedE4m3fn;
    case PagedKind::kE4m3fnuz:
      return kPagedBytes | kPagedE4m3fnuz;
    case PagedKind::kE5m2:
      return kPagedBytes | kPagedE5m2;
    case PagedKind::kSame:
      break;
  }
  return 0;
}

bool HasTokenScales(const paged_half& h) {
  return h.scales.page != 0 || h.scales.offset != 0;
}

bool IsShuffled(const paged_half& h, int64_t run) {
  return h.side.col != 1 || h.side.run != run || h.side.split != 1;
}

// Whether a row of columns begins at a multiple of 16 bytes.
bool IsAligned(const paged_half& h, int64_t run) {
  const cache_side& s = h.side;
  return s.start % run == 0 && s.page % run == 0 && s.head % run == 0 &&
         s.run_offset % run == 0;
}

// Whether keys are shuffled into such runs of a token's columns,
bool HasKeyRuns(const paged_half& h, int64_t run) {
  return IsAligned(h, run) && h.side.split == 1 && h.side.col == 1 &&
         h.side.run % run == 0;
}

// and values into runs of tokens, of one column (runs_hopper.py).
bool HasValueRuns(paged_half h, int64_t run, int64_t page_size) {
  const cache_side s = h.side;
  const bool together =
      s.split == 1 ? s.run_offset == 1 : s.split == run && s.offset == 1;
  if (s.split == 1) h.side.run_offset = run;
  return together && IsAligned(h, run) && page_size % run == 0 &&
         s.col % run == 0 && s.run == run * s.col;
}

// Whether pages are apart by a whole number of kMappedTokens' steps.
bool HasEvenPages(const paged_half& h) {
  const int64_t step = kMappedTokens * h.side.run_offset;
  return step > 0 && h.side.page % step == 0;
}

// Keys that rows see in the mean, where tables are as wide as sequences are
// long and the queries are their last tokens.
int64_t KeysInTheMean(const paged_attend_args& a) {
  const int64_t batch = std::max<int64_t>(a.batch, 1);
  const int64_t tables = a.indptr_ptr != nullptr ? batch : 1;
  const int64_t bound = a.width * a.page_size / tables;
  const int64_t mean = std::max(bound - a.tokens / batch / 2, bound / 2);
  if (a.window_left < 0) return mean;
  return std::min(mean, a.window_left + std::max<int64_t>(a.window_right, 0));
}

int64_t FewKeys(const paged_attend_args& a) {
  return std::max(a.hdim, a.hdim_v) <= kNarrow ? kFewKeysNarrow : kFewKeys;
}

// Where a half lies and what scales it, as the kernels take them.
struct HalfFields {
  const void* PagedParams::* cache;
  const void* PagedParams::* bytes;
  const void* PagedParams::* scale;
  int64_t PagedParams::* start;
  int64_t PagedParams::* head;
  int64_t PagedParams::* scale_page;
  int64_t PagedParams::* scale_head;
  int32_t PagedParams::* page;
  int32_t PagedParams::* token;
  int32_t PagedParams::* split;
  int32_t PagedParams::* run_token;
  int32_t PagedParams::* run;
  int32_t PagedParams::* col;
  int32_t PagedParams::* scale_token;
  int32_t PagedParams::* eights;
};

void SetHalf(const paged_half& h, const HalfFields& f, PagedParams* p) {
  const auto number = [](int64_t n) { return static_cast<int32_t>(n); };
  const cache_side& s = h.side;
  p->*f.cache = p->*f.bytes = h.cache_ptr;
  p->*f.scale = h.scale_ptr;
  p->*f.start = s.start;
  p->*f.head = s.head;
  p->*f.page = number(s.page);
  // Where tokens are not divided, their step is that of kernels for such.
  p->*f.token = number(s.split > 1 ? s.offset : s.run_offset);
  p->*f.split = number(s.split);
  p->*f.run_token = number(s.run_offset);
  p->*f.run = number(s.run);
  p->*f.col = number(s.col);
  p->*f.scale_page = h.scales.page;
  p->*f.scale_head = h.scales.head;
  p->*f.scale_token = number(h.scales.offset);
  const int64_t step = kMappedTokens * s.run_offset;
  p->*f.eights = number(step > 0 ? s.page / step : 0);
}

struct Attend {
  using Args = paged_attend_args;
  using Plan = PagedPlan;

  static Status Check(const Args& a) {
    if (a.cp_world_size != 1) {
      return Invalid("cp_world_size", std::to_string(a.cp_world_size), "1");
    }
    return Check(a, kMaxHeadDim);
  }

  static Status Check(const Args& a, int64_t max_head_dim) {
    AITER_RETURN_IF_ERROR(CheckSizes(a, max_head_dim));
    if (a.cu_seqlens_ptr == nullptr && a.seqlen_q * a.batch != a.tokens) {
      return Invalid("seqlen_q", std::to_string(a.seqlen_q),
                     "tokens / batch without cu_seqlens");
    }
    if (a.last_pages && a.indptr_ptr == nullptr) {
      return Invalid("last_pages", "true", "false without indptr");
    }
    AITER_RETURN_IF_ERROR(
        CheckRange("window_left", a.window_left, -1, INT32_MAX));
    AITER_RETURN_IF_ERROR(
        CheckRange("window_right", a.window_right, -1, INT32_MAX));
    if (!(a.logits_soft_cap >= 0) || !std::isfinite(a.logits_soft_cap)) {
      return Invalid("logits_soft_cap", std::to_string(a.logits_soft_cap),
                     "finite and not negative");
    }
    if (a.splits > 1 &&
        (a.parts_ptr == nullptr || a.parts_lse_ptr == nullptr)) {
      return Invalid("parts_ptr", "null", "given with splits");
    }
    for (const auto& [name, step] :
         {std::pair<const char*, int64_t>("sinks_step", a.sinks_step),
          {"slopes_step", a.slopes_step}}) {
      if (step != 0 && step != a.nhead_q) {
        return Invalid(name, std::to_string(step), "0 or nhead_q");
      }
    }
    AITER_RETURN_IF_ERROR(
        CheckRange("cp_world_size", a.cp_world_size, 1, kMaxSplits));
    if ((a.cp_world_size > 1) != (a.places_ptr != nullptr)) {
      return Invalid("places_ptr", a.places_ptr ? "given" : "null",
                     "given if cp_world_size is more than 1");
    }
    AITER_RETURN_IF_ERROR(
        CheckRange("batch * nhead_q", a.batch * a.nhead_q, 0, kMaxSize));
    AITER_RETURN_IF_ERROR(CheckHalf("k", a, a.k, a.hdim));
    AITER_RETURN_IF_ERROR(CheckHalf("v", a, a.v, a.hdim_v));
    return CheckAligned({{"q_ptr", a.q_ptr},
                         {"out_ptr", a.out_ptr},
                         {"parts_ptr", a.parts_ptr}});
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key;
    key.data_type = a.data_type;
    key.dims[0] = static_cast<int32_t>(std::max(a.hdim, a.hdim_v));
    int64_t run = RunOf(a);
    int64_t rows = a.tokens * (a.nhead_q / a.nhead_k);
    int64_t batch = std::max<int64_t>(a.batch, 1);
    // Of packed queries each sequence has one, or the device alone knows.
    const bool mixed = a.cu_seqlens_ptr != nullptr && a.tokens > a.batch;
    const bool shuffled = IsShuffled(a.k, run) || IsShuffled(a.v, run);
    const bool aligned =
        shuffled ? HasKeyRuns(a.k, run) && HasValueRuns(a.v, run, a.page_size)
                 : IsAligned(a.k, run) && IsAligned(a.v, run);
    const bool even =
        shuffled || a.pages == 0 || (HasEvenPages(a.k) && HasEvenPages(a.v));
    key.features =
        If(a.cu_seqlens_ptr != nullptr, kPagedCuSeqlens) |
        If(a.indptr_ptr != nullptr, kPagedIndptr) |
        If(a.last_pages, kPagedLastPages) |
        If(a.window_left >= 0 || a.window_right >= 0, kPagedWindow) |
        If(a.logits_soft_cap > 0, kPagedSoftCap) |
        If(a.logits_soft_cap > kLargeSoftCap, kPagedLargeSoftCap) |
        If(a.slopes_ptr != nullptr, kPagedAlibi) |
        If(a.sinks_ptr != nullptr, kPagedSink) |
        If(HasTokenScales(a.k) || HasTokenScales(a.v), kPagedTokenScales) |
        If(a.lse_ptr != nullptr, kPagedLse) |
        If(a.hdim != a.hdim_v || !IsPower(a.hdim) || a.hdim < 16,
           kPagedPartial) |
        If(a.hdim % run != 0 || a.hdim_v % run != 0 || !aligned,
           kPagedUnaligned) |
        If(shuffled, kPagedShuffled) |
        If(!IsPower(a.page_size), kPagedOddPages) |
        If(a.page_size % kLargePage != 0, kPagedSmallPages) |
        If(a.page_size % kTinyPage != 0 || !even, kPagedTinyPages) |
        If(a.pages == 0, kPagedNoPages) |
        If(a.batch == 1 || mixed || rows > kHalfTile * batch, kPagedUnshared) |
        If(rows > kSmallTile * batch, kPagedSeveralRows) |
        If(rows >= kManyRows * batch, kPagedManyRows) |
        If(KeysInTheMean(a) <= FewKeys(a), kPagedShort) | KindBits(a.kind);
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("paged_attend", problem, 1, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    AITER_RETURN_IF_ERROR(steps->Add("paged_attend", key, &plan->attend));
    const DeviceInfo& device = steps->device();
    plan->multiprocessors = std::max(device.multiprocessors, 1);
    plan->programs =
        ProgramsOf(*plan->attend.info, device) * plan->multiprocessors;
    // Where tables tell that keys are few, there is no other to load.
    if (plan->attend.info->grid == &kPagedAttendGridWalks &&
        !(key.features & kPagedShort)) {
      ProblemKey few = key;
      few.features |= kPagedShort;
      AITER_RETURN_IF_ERROR(steps->Add("paged_attend", few, &plan->few));
      few.features |= kPagedFewTiles;
      AITER_RETURN_IF_ERROR(steps->Add("paged_attend", few, &plan->few_tiles));
    }
    ProblemKey rows;
    rows.data_type = key.data_type;
    rows.dims[0] = key.dims[0];
    AITER_RETURN_IF_ERROR(steps->Add("paged_merge", rows, &plan->merge));
    rows.features = key.features & kPagedManyRows;
    if (rows.features == 0) return Status();
    return steps->Add("paged_merge", rows, &plan->merge_rows);
  }

  // Programs of a kernel that a multiprocessor is to have at a time. Those that
  // share keys, or decode by tensor maps, ask for much at once, and are as many
  // as fit.
  static int64_t ProgramsOf(const KernelInfo& kernel,
                            const DeviceInfo& device) {
    constexpr int64_t kReserved = 1024;  // The driver's, of each block.
    const int64_t fit =
        device.max_shared_bytes / (kernel.shared_bytes + kReserved);
    const bool maps =
        kernel.num_tensor_maps > 0 && kernel.grid == &kPagedAttendGridOneAxis;
    if (maps || SharesKeys(kernel)) return std::max<int64_t>(fit, 1);
    const int64_t wave = device.platform == Platform::kCuda ? 32 : 64;
    return std::max(kPrograms, std::min(kWaves * wave / kernel.threads, fit));
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    if (a.tokens == 0) return Status();
    const KernelInfo& kernel = *plan.attend.info;
    // In a grid of one axis there is no program without a part.
    if (kernel.grid == &kPagedAttendGridOneAxis || SharesKeys(kernel)) {
      return Launch(driver, a, plan, a.splits, stream);
    }
    // Where keys are few they are not divided.
    if (kernel.needs & kPagedShort) return Launch(driver, a, plan, 1, stream);
    const int64_t tiles = std::max<int64_t>(TilesOf(a, kernel), 1);
    return Launch(driver, a, plan, kRoom * plan.programs / tiles, stream);
  }

  // Tiles of rows and KV heads, or a few less.
  static int64_t TilesOf(const Args& a, const KernelInfo& kernel) {
    const int64_t rows = a.tokens * (a.nhead_q / a.nhead_k);
    return a.nhead_k * (rows / kernel.tile_m + a.batch);
  }

  // The same, of sequences in up to so many parts.
  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       int64_t splits, void* stream) {
    PagedParams p = ParamsOf(a, plan.key);
    p.splits = static_cast<int32_t>(std::clamp<int64_t>(splits, 1, a.splits));
    p.programs = p.splits > 1 ? static_cast<int32_t>(plan.programs) : 0;
    const KernelInfo& kernel = *plan.attend.info;
    if (HasFewTiles(a, plan)) {
      AITER_RETURN_IF_ERROR(
          LaunchAttend(driver, a, plan.few_tiles, &p, stream));
    } else if (kernel.grid == &kPagedAttendGridWalks) {
      AITER_RETURN_IF_ERROR(LaunchWalks(driver, a, plan, p, stream));
    } else {
      AITER_RETURN_IF_ERROR(LaunchAttend(driver, a, plan.attend, &p, stream));
    }
    if (p.splits == 1) return Status();
    const int64_t rows = a.tokens * a.nhead_q;
    const int64_t most = std::max<int64_t>(plan.merge.info->tile_m, 1);
    p.merge_rows = static_cast<int32_t>(
        std::clamp<int64_t>(rows / (kMergers * plan.programs), 1, most));
    const bool wide = driver.platform == Platform::kHip && IsLatent(kernel);
    if (p.splits > kMergeParts &&
        (wide ? rows : rows * kMergeCols) <= plan.programs) {
      p.merge_cols = wide ? kLatentMergeCols : kMergeCols;
      if (IsLatentHopper(kernel) && rows * 2 * kMergeCols <= plan.programs) {
        p.merge_cols = 2 * kMergeCols;
      }
    }
    // A tile of rows is joined whole.
    const KernelInfo* tall = plan.merge_rows.info;
    const bool few = tall != nullptr && p.splits <= tall->tile_n;
    return LaunchKernel(driver, few ? plan.merge_rows : plan.merge, &p, stream,
                        /*maps=*/nullptr, /*early=*/true);
  }

  // Whether a kernel, if there is one, is made for so much.
  static bool IsMadeFor(const LoadedKernel& kernel, uint32_t features) {
    return kernel.info != nullptr && (~kernel.info->needs & features) == 0;
  }

  // Whether blocks of few rows, each with a part of the keys, are all at work
  // at a time: they begin sooner than those that walk.
  static bool HasFewTiles(const Args& a, const Plan& plan) {
    return IsMadeFor(plan.few_tiles, kPagedFewTiles) &&
           TilesOf(a, *plan.few_tiles.info) < kFewTiles * plan.multiprocessors;
  }

  // Blocks that walk, and what they leave to another kernel: where tables do
  // not tell, the lengths, which are on the device, do.
  static Status LaunchWalks(const Driver& driver, const Args& a,
                            const Plan& plan, PagedParams p, void* stream) {
    const bool shared =
        a.counter_ptr != nullptr &&
        TilesOf(a, *plan.attend.info) * p.splits > plan.multiprocessors;
    // Else each block has one tile.
    p.blocks = shared ? static_cast<int32_t>(plan.multiprocessors) : INT32_MAX;
    AITER_RETURN_IF_ERROR(
        FillZero(driver, a.counter_ptr, shared ? kCounterBytes : 0, stream));
    // Rows see half of their sequence's queries at least.
    const bool both =
        IsMadeFor(plan.few, kPagedShort) && a.counter_ptr != nullptr &&
        a.tokens / std::max<int64_t>(a.batch, 1) / 2 <= FewKeys(a);
    p.few_keys = both ? static_cast<int32_t>(FewKeys(a)) : 0;
    AITER_RETURN_IF_ERROR(LaunchAttend(driver, a, plan.attend, &p, stream));
    if (!both) return Status();
    p.splits = 1;
    return LaunchAttend(driver, a, plan.few, &p, stream);
  }

  static Status LaunchAttend(const Driver& driver, const Args& a,
                             const LoadedKernel& loaded, PagedParams* p,
                             void* stream) {
    const KernelInfo& kernel = *loaded.info;
    TensorMap maps[kMaxTensorMaps];
    for (int i = 0; i < kernel.num_tensor_maps; ++i) {
      const TensorMapSpec& spec = kernel.tensor_maps[i];
      AITER_RETURN_IF_ERROR(EncodeTensorMap(
          driver, kernel, spec,
          spec.tensor == kPagedTensorK ? Mapped(spec, a, a.k, a.hdim)
                                       : Mapped(spec, a, a.v, a.hdim_v),
          &maps[i]));
    }
    return LaunchKernel(driver, loaded, p, stream, maps,
                        /*early=*/Waits(kernel));
  }

  // A half of the cache as [page, head, token, column]; or, where boxes are of
  // all columns, as [head, kMappedTokens tokens, run of columns, token,
  // column].
  static MappedTensor Mapped(const TensorMapSpec& spec, const Args& a,
                             const paged_half& h, int64_t cols) {
    MappedTensor tensor;
    tensor.type = a.kind == PagedKind::kSame ? a.data_type : DataType::kI8;
    tensor.address = static_cast<const char*>(h.cache_ptr) +
                     h.side.start * ElementBytes(tensor.type);
    tensor.rank = spec.rank;
    if (spec.rank == 5) {
      const int64_t step = kMappedTokens * h.side.run_offset;
      tensor.dims[0] = spec.box[0];
      tensor.dims[1] = kMappedTokens;
      tensor.dims[2] = cols / spec.box[0];
      tensor.dims[3] = a.pages * (h.side.page / step);
      tensor.dims[4] = a.nhead_k;
      tensor.strides[0] = h.side.run_offset;
      tensor.strides[1] = spec.box[0];
      tensor.strides[2] = step;
      tensor.strides[3] = h.side.head;
      return tensor;
    }
    tensor.dims[0] = cols;
    tensor.dims[1] = a.page_size;
    tensor.dims[2] = a.nhead_k;
    tensor.dims[3] = a.pages;
    tensor.strides[0] = h.side.run_offset;
    tensor.strides[1] = h.side.head;
    tensor.strides[2] = h.side.page;
    return tensor;
  }

  static PagedParams ParamsOf(const Args& a, const ProblemKey& key) {
    const auto number = [](int64_t n) { return static_cast<int32_t>(n); };
    const auto bound = [](int64_t n) {
      return n < 0 ? kUnbounded
                   : static_cast<int32_t>(std::min<int64_t>(n, kUnbounded));
    };
    PagedParams p;
    p.q_ptr = a.q_ptr;
    p.out_ptr = a.out_ptr;
    p.lse_ptr = a.lse_ptr;
    p.parts_ptr = a.parts_ptr;
    p.parts_lse_ptr = a.parts_lse_ptr;
    p.counter_ptr = a.counter_ptr;
    p.sinks_ptr = a.sinks_ptr;
    p.slopes_ptr = a.slopes_ptr;
    p.table_ptr = a.table_ptr;
    p.indptr_ptr = a.indptr_ptr;
    p.lengths_ptr = a.lengths_ptr;
    p.cu_seqlens_ptr = a.cu_seqlens_ptr;
    p.places_ptr = a.places_ptr;
    SetHalf(
        a.k,
        {&PagedParams::k_cache_ptr, &PagedParams::k_bytes_ptr,
         &PagedParams::k_scale_ptr, &PagedParams::k_start, &PagedParams::k_head,
         &PagedParams::k_scale_page, &PagedParams::k_scale_head,
         &PagedParams::k_page, &PagedParams::k_token, &PagedParams::k_split,
         &PagedParams::k_run_token, &PagedParams::k_run, &PagedParams::k_col,
         &PagedParams::k_scale_token, &PagedParams::k_eights},
        &p);
    SetHalf(
        a.v,
        {&PagedParams::v_cache_ptr, &PagedParams::v_bytes_ptr,
         &PagedParams::v_scale_ptr, &PagedParams::v_start, &PagedParams::v_head,
         &PagedParams::v_scale_page, &PagedParams::v_scale_head,
         &PagedParams::v_page, &PagedParams::v_token, &PagedParams::v_split,
         &PagedParams::v_run_token, &PagedParams::v_run, &PagedParams::v_col,
         &PagedParams::v_scale_token, &PagedParams::v_eights},
        &p);
    p.run = number(RunOf(a));
    p.tokens = number(a.tokens);
    p.batch = number(a.batch);
    p.seqlen_q = number(a.seqlen_q);
    p.nhead_q = number(a.nhead_q);
    p.nhead_k = number(a.nhead_k);
    p.group = number(a.nhead_q / a.nhead_k);
    p.hdim = number(a.hdim);
    p.hdim_v = number(a.hdim_v);
    p.pages = number(a.pages);
    p.page_size = number(a.page_size);
    while (int64_t{1} << p.page_shift < a.page_size) ++p.page_shift;
    p.page_factor = static_cast<int32_t>(static_cast<uint32_t>(
        CeilDiv(int64_t{1} << (31 + p.page_shift), a.page_size)));
    p.width = number(a.width);
    p.cp_world_size = number(a.cp_world_size);
    p.window_left = bound(a.window_left);
    p.window_right = bound(a.window_right);
    p.sinks_step = number(a.sinks_step);
    p.slopes_step = number(a.slopes_step);
    p.softmax_scale = a.softmax_scale;
    p.logits_soft_cap = a.logits_soft_cap;
    p.kind = std::max(static_cast<int32_t>(a.kind), 0);
    p.flags = static_cast<int32_t>(key.features & kKernelFlags);
    return p;
  }
};

bool SamePlace(const cache_side& a, const cache_side& b) {
  return a.start == b.start && a.page == b.page &&
         a.run_offset == b.run_offset && a.offset == b.offset &&
         a.split == b.split && a.run == b.run && a.col == b.col;
}

struct Latent {
  using Args = mla_attend_args;
  using Plan = PagedPlan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(Attend::Check(a, kMaxLatentDim));
    if (a.nhead_k != 1) {
      return Invalid("nhead_k", std::to_string(a.nhead_k), "1");
    }
    if (a.hdim_v > a.hdim) {
      return Invalid("hdim_v", std::to_string(a.hdim_v),
                     "at most hdim, " + std::to_string(a.hdim));
    }
    if (a.v.cache_ptr != a.k.cache_ptr || !SamePlace(a.v.side, a.k.side)) {
      return Invalid("v.side", "elsewhere", "k's");
    }
    if (IsShuffled(a.k, RunOf(a))) {
      return Invalid("k.side", "shuffled", "of columns side by side");
    }
    if (HasTokenScales(a.k) || HasTokenScales(a.v)) {
      return Invalid("k.scales", "of tokens", "one number");
    }
    if (a.slopes_ptr != nullptr) {
      return Invalid("slopes_ptr", "given", "null");
    }
    if (a.sinks_step != 0) {
      return Invalid("sinks_step", std::to_string(a.sinks_step), "0");
    }
    return Status();
  }

  static ProblemKey KeyOf(const Args& a) {
    // What a row of the table tells by its sizes.
    constexpr uint32_t kBySize = kPagedPartial | kPagedUnshared |
                                 kPagedSeveralRows | kPagedManyRows |
                                 kPagedSmallPages;
    ProblemKey key = Attend::KeyOf(a);
    key.features &= ~kBySize;
    key.dims[0] = static_cast<int32_t>(a.hdim_v);
    key.dims[1] = static_cast<int32_t>(a.hdim - a.hdim_v);
    int64_t rows = a.tokens * a.nhead_q / std::max<int64_t>(a.batch, 1);
    for (int64_t most : kLatentRows) {
      key.dims[2] = static_cast<int32_t>(most);
      if (rows <= most) break;
    }
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf("mla_attend", problem, 3, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    AITER_RETURN_IF_ERROR(steps->Add("mla_attend", key, &plan->attend));
    const DeviceInfo& device = steps->device();
    const KernelInfo& kernel = *plan->attend.info;
    plan->programs =
        (device.platform == Platform::kCuda ? kLatentProgramsCuda
         : SharesKeys(kernel) && kernel.tile_m >= kTallTile ? 1
                                                            : kLatentPrograms) *
        std::max(device.multiprocessors, 1);
    ProblemKey rows;
    rows.data_type = key.data_type;
    rows.dims[0] = key.dims[0];
    return steps->Add("mla_merge", rows, &plan->merge);
  }

  static Status Launch(const Driver& driver, const Args& a, const Plan& plan,
                       void* stream) {
    if (a.tokens == 0) return Status();
    int64_t tiles = std::max<int64_t>(
        {a.tokens * a.nhead_q / plan.attend.info->tile_m, a.batch, 1});
    int64_t most = std::min(plan.programs / tiles, a.splits);
    // CUDA's blocks share a sequence's keys among as many as there are.
    if (SharesKeys(*plan.attend.info)) {
      // A tile of rows may begin and end inside of a block's share.
      most = tiles < plan.programs && a.splits > 2 ? a.splits : 1;
    } else if (driver.platform == Platform::kHip) {
      most = EvenParts(tiles, plan.programs / kLatentPrograms, most);
    }
    // A sequence may have all parts, but of lists, which are about as long as
    // they are wide, each has its share; the rest of one counts from 0.7 on.
    if (IsLatentHopper(*plan.attend.info)) {
      most = plan.programs / kLatentProgramsCuda;
      if (a.indptr_ptr == nullptr && a.cu_seqlens_ptr == nullptr) {
        most = (10 * most + 3 * tiles) / (10 * tiles);
      }
      most = std::min(most, a.splits);
    }
    return Attend::Launch(driver, a, plan, most, stream);
  }

  // How many parts, of at most so many, keep the multiprocessors busy best: a
  // few programs more than these take would wait until the others have ended.
  static int64_t EvenParts(int64_t tiles, int64_t multiprocessors,
                           int64_t most) {
    const auto turns = [&](int64_t parts) {
      return CeilDiv(tiles * parts, std::max<int64_t>(multiprocessors, 1));
    };
    int64_t best = 1;
    for (int64_t parts = 2; parts <= most; ++parts) {
      if (turns(parts) * best <= turns(best) * parts) best = parts;
    }
    return best;
  }
};

}  // namespace

AITER_DEFINE_OPERATION(paged_attend, Attend);
AITER_DEFINE_OPERATION(mla_attend, Latent);

}  // namespace aiter
