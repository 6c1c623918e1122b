// SPDX-License-Identifier: Apache-2.0

#include "aiter/cache.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "third_party/aiter/src/cache_params.h"
#include "third_party/aiter/src/cache_side.h"
#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/select.h"
#include "third_party/aiter/src/core/steps.h"

namespace aiter {
namespace {

// Kernels count rows and columns in 32 bits, and add a tile.
constexpr int64_t kMaxSize = kMaxPage;
constexpr int64_t kRunBytes = 16;
constexpr int64_t kManyPrograms = 4096;  // A device has no more at a time.
// Heads that kernels for usual calls count in 32 bits, times tokens of a tile.
constexpr int64_t kManyHeads = 65536;
constexpr int64_t kShortBlock = 16;  // Slots of a usual block.
// Below so many rows each is worth a program, if it begins a block.
constexpr int64_t kFewRows = 2048;

// Elements of 16 bytes of a cache whose elements have the size of `type`.
int64_t RunOf(DataType type) { return kRunBytes / ElementBytes(type); }

bool IsPresent(const cache_half& h) { return h.rows_ptr != nullptr; }

Status CheckHalf(const std::string& name, const cache_args& a,
                 const cache_half& h, int64_t run) {
  if (!IsPresent(h)) return Status();
  AITER_RETURN_IF_ERROR(CheckAligned({{"rows_ptr", h.rows_ptr}}));
  return CheckPlaces(name, h, a.tokens == 0 ? 0 : a.heads, a.pages, a.page_size,
                     run);
}

// Scales that a call writes, `blocks` of `size` places each.
Status CheckScales(const std::string& name, const cache_args& a,
                   const cache_half& h, int64_t blocks, int64_t size) {
  if (!IsPresent(h) || a.tokens == 0) return Status();
  return CheckScalePlaces(name, h, a.heads, blocks, size);
}

Status CheckCommon(const cache_args& a, int64_t run) {
  AITER_RETURN_IF_ERROR(CheckRange("tokens", a.tokens, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("heads", a.heads, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(
      CheckRange("tokens * heads", a.tokens * a.heads, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("pages", a.pages, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("page_size", a.page_size, 1, kMaxSize));
  AITER_RETURN_IF_ERROR(
      CheckRange("pages * page_size", a.pages * a.page_size, 0, kMaxSize));
  if (!IsPresent(a.k)) return Invalid("k.rows_ptr", "null", "given");
  AITER_RETURN_IF_ERROR(CheckHalf("k", a, a.k, run));
  AITER_RETURN_IF_ERROR(CheckHalf("v", a, a.v, run));
  return CheckAligned({{"slots_ptr", a.slots_ptr}});
}

Status CheckKind(DataType type, CacheKind kind) {
  if (type > DataType::kFp32) {
    return Invalid("data_type", DataTypeName(type), "fp16, bf16 or fp32");
  }
  switch (kind) {
    case CacheKind::kInt8:
    case CacheKind::kE4m3fn:
    case CacheKind::kE4m3fnuz:
    case CacheKind::kE5m2:
      return Status();
  }
  return Invalid("kind", std::to_string(static_cast<int32_t>(kind)),
                 "a CacheKind");
}

uint32_t If(bool condition, uint32_t feature) {
  return condition ? feature : 0;
}

// Whether tokens lie side by side, and columns do not.
bool AreBeside(const cache_half& h) {
  const cache_side& s = h.side;
  return s.col != 1 && (s.split > 1 ? s.offset : s.run_offset) == 1;
}

// The bits of a half, as keys have them.
uint32_t FlagsOf(const cache_half& h, int64_t run) {
  if (!IsPresent(h)) return 0;
  return If(h.cols % run == 0, kCacheAligned) |
         If(IsOfRuns(h, run), kCacheRuns) |
         If(h.scale_ptr != nullptr, kCacheScaled) |
         If(AreBeside(h), kCacheBeside);
}

uint32_t FeatureOf(CacheKind kind) {
  switch (kind) {
    case CacheKind::kInt8:
      return 0;
    case CacheKind::kE4m3fn:
      return kCacheE4m3fn;
    case CacheKind::kE4m3fnuz:
      return kCacheE4m3fnuz;
    case CacheKind::kE5m2:
      return kCacheE5m2;
  }
  return 0;
}

// Of a write that rounds to `kind`.
ProblemKey RoundedKeyOf(const cache_args& a, CacheKind kind) {
  ProblemKey key;
  key.data_type = a.data_type;
  int64_t cols = std::max(a.k.cols, IsPresent(a.v) ? a.v.cols : 0);
  key.dims[0] = static_cast<int32_t>(cols);
  key.features = FeatureOf(kind) | If(a.heads > kManyHeads, kCacheOdd);
  for (const cache_half* h : {&a.k, &a.v}) {
    if (!IsPresent(*h)) continue;
    bool runs = IsOfRuns(*h, kRunBytes);
    key.features |= runs ? kCacheRuns : kCacheStrided;
    key.features |=
        If(h->cols != cols || cols % kRunBytes != 0 || !(runs || AreBeside(*h)),
           kCacheOdd);
  }
  return key;
}

constexpr uint32_t kValues = kCacheVAligned / kCacheAligned;
static_assert(kCacheVRuns == kValues * kCacheRuns);
static_assert(kCacheVScaled == kValues * kCacheScaled);
static_assert(kCacheVBeside == kValues * kCacheBeside);

CacheParams ParamsOf(const cache_args& a, int64_t run) {
  CacheParams p;
  p.key_ptr = a.k.rows_ptr;
  p.value_ptr = a.v.rows_ptr;
  p.k_cache_ptr = p.k_bytes_ptr = a.k.cache_ptr;
  p.v_cache_ptr = p.v_bytes_ptr = a.v.cache_ptr;
  p.k_scale_ptr = a.k.scale_ptr;
  p.v_scale_ptr = a.v.scale_ptr;
  p.slots_ptr = a.slots_ptr;
  SetSide<CacheParams>(
      a.k, run,
      {&CacheParams::k_start, &CacheParams::k_page, &CacheParams::k_run_offset,
       &CacheParams::k_offset, &CacheParams::k_split, &CacheParams::k_head,
       &CacheParams::k_run, &CacheParams::k_col},
      &p);
  SetSide<CacheParams>(
      a.v, run,
      {&CacheParams::v_start, &CacheParams::v_page, &CacheParams::v_run_offset,
       &CacheParams::v_offset, &CacheParams::v_split, &CacheParams::v_head,
       &CacheParams::v_run, &CacheParams::v_col},
      &p);
  p.k_scale_start = a.k.scales.start;
  p.k_scale_page = a.k.scales.page;
  p.k_scale_offset = static_cast<int32_t>(a.k.scales.offset);
  p.k_scale_head = a.k.scales.head;
  p.v_scale_start = a.v.scales.start;
  p.v_scale_page = a.v.scales.page;
  p.v_scale_offset = static_cast<int32_t>(a.v.scales.offset);
  p.v_scale_head = a.v.scales.head;
  p.tokens = static_cast<int32_t>(a.tokens);
  p.heads = static_cast<int32_t>(a.heads);
  p.k_cols = static_cast<int32_t>(a.k.cols);
  p.v_cols = IsPresent(a.v) ? static_cast<int32_t>(a.v.cols) : 0;
  p.halves = IsPresent(a.v) ? 2 : 1;
  p.num_slots = static_cast<int32_t>(a.pages * a.page_size);
  p.page_size = static_cast<int32_t>(a.page_size);
  p.flags =
      static_cast<int32_t>(FlagsOf(a.k, run) | kValues * FlagsOf(a.v, run) |
                           If(a.data_type == DataType::kFp16, kCacheFp16) |
                           If(a.data_type == DataType::kFp32, kCacheFp32));
  return p;
}

bool IsEmpty(const cache_args& a) {
  return a.tokens == 0 || a.heads == 0 || a.pages == 0;
}

Status Bring(const Driver& driver, const cache_args& a, void* stream) {
  AITER_RETURN_IF_ERROR(BringHalf(driver, a.k, stream));
  return BringHalf(driver, a.v, stream);
}

// Heads of a token as one where they lie together: wider rows, and fewer.
template <typename Args>
Args Folded(const Args& args, int64_t run) {
  auto together = [&args, run](const cache_half& h) {
    return !IsPresent(h) ||
           (h.side.head == h.cols && h.side.col == 1 && h.side.run == run &&
            h.cols % run == 0 && h.scales.head == 0);
  };
  Args a = args;
  if (a.heads < 2 || a.heads * std::max(a.k.cols, a.v.cols) > kMaxSize ||
      !together(a.k) || !together(a.v)) {
    return a;
  }
  a.k.cols *= a.heads;
  a.v.cols *= a.heads;
  a.heads = 1;
  return a;
}

// Writes without scales of their own: a kernel for runs and one for any places.
template <typename ArgsOfOp>
struct Write {
  using Args = ArgsOfOp;
  using Plan = CachePlan;

  static ProblemKey KeyOf(const Args& a, int64_t run) {
    ProblemKey key;
    key.data_type = a.data_type;
    for (const cache_half* h : {&a.k, &a.v}) {
      if (!IsPresent(*h)) continue;
      key.features |= IsOfRuns(*h, run) ? kCacheRuns : kCacheStrided;
    }
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    AITER_RETURN_IF_ERROR(
        ProblemKeyOf(OperationOf<Args>::kName, problem, 0, key));
    if (key->features == 0) key->features = kCacheRuns;
    return Status();
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    ProblemKey one = key;
    one.features &= ~(kCacheRuns | kCacheStrided);
    if ((key.features & kCacheRuns) != 0) {
      AITER_RETURN_IF_ERROR(
          steps->Add(OperationOf<Args>::kName, one, &plan->runs));
    }
    if ((key.features & kCacheStrided) == 0) return Status();
    one.features |= kCacheStrided;
    return steps->Add(OperationOf<Args>::kName, one, &plan->strided);
  }

  static Status Launch(const Driver& driver, const Plan& plan,
                       const CacheParams& params, void* stream) {
    bool k_runs = (params.flags & kCacheRuns) != 0;
    bool v_runs = (params.flags & kCacheVRuns) != 0;
    if (plan.runs.info == plan.strided.info) {  // It writes to both.
      CacheParams p = params;
      return LaunchKernel(driver, plan.runs, &p, stream);
    }
    for (bool runs : {true, false}) {
      CacheParams p = params;
      if (k_runs != runs) p.k_cols = 0;
      if (v_runs != runs) p.v_cols = 0;
      if (p.k_cols == 0 && p.v_cols == 0) continue;
      AITER_RETURN_IF_ERROR(
          LaunchKernel(driver, runs ? plan.runs : plan.strided, &p, stream));
    }
    return Status();
  }
};

struct Copy : Write<cache_copy_args> {
  using Write::KeyOf;

  static Status Check(const Args& a) {
    if (a.data_type > DataType::kI8) {
      return Invalid("data_type", DataTypeName(a.data_type),
                     "fp16, bf16, fp32 or i8");
    }
    return CheckCommon(a, RunOf(a.data_type));
  }

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key = KeyOf(a, RunOf(a.data_type));
    // Bits are bits.
    if (key.data_type == DataType::kFp16) key.data_type = DataType::kBf16;
    return key;
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    AITER_RETURN_IF_ERROR(Bring(driver, args, stream));
    if (IsEmpty(args)) return Status();
    int64_t run = RunOf(args.data_type);
    return Write::Launch(driver, plan, ParamsOf(Folded(args, run), run),
                         stream);
  }
};

struct Cast : Write<cache_cast_args> {
  using Write::KeyOf;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckKind(a.data_type, a.kind));
    AITER_RETURN_IF_ERROR(CheckCommon(a, kRunBytes));
    for (const cache_half* h : {&a.k, &a.v}) {
      if (h->scale_ptr == nullptr) continue;
      AITER_RETURN_IF_ERROR(CheckScales(h == &a.k ? "k" : "v", a, *h, 1, 1));
    }
    return Status();
  }

  static ProblemKey KeyOf(const Args& a) { return RoundedKeyOf(a, a.kind); }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    AITER_RETURN_IF_ERROR(Bring(driver, args, stream));
    if (IsEmpty(args)) return Status();
    // A kernel for heads of one size takes them as they are.
    const LoadedKernel& any =
        plan.runs.info != nullptr ? plan.runs : plan.strided;
    CacheParams params = ParamsOf(
        any.info->dims[0] != 0 ? args : Folded(args, kRunBytes), kRunBytes);
    params.kind = static_cast<int32_t>(args.kind);
    // Of the kernel that walks, if only places that are no runs have one.
    params.max_blocks =
        (plan.strided.info != nullptr ? plan.strided : plan.runs).at_once;
    return Write::Launch(driver, plan, params, stream);
  }
};

// Writes with scales of their own.
template <typename ArgsOfOp>
struct Quantised {
  using Args = ArgsOfOp;
  using Plan = KernelPlan;

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key = RoundedKeyOf(a, a.kind);
    key.features &= ~kCacheRuns;  // One kernel has both.
    return key;
  }

  static Status KeyOf(const Problem& problem, ProblemKey* key) {
    return ProblemKeyOf(OperationOf<Args>::kName, problem, 1, key);
  }

  static Status Choose(const ProblemKey& key, Steps* steps, Plan* plan) {
    return steps->Add(OperationOf<Args>::kName, key, &plan->kernel);
  }
};

struct Token : Quantised<cache_token_args> {
  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckKind(a.data_type, a.kind));
    AITER_RETURN_IF_ERROR(CheckCommon(a, kRunBytes));
    AITER_RETURN_IF_ERROR(CheckScales("k", a, a.k, a.pages, a.page_size));
    return CheckScales("v", a, a.v, a.pages, a.page_size);
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    AITER_RETURN_IF_ERROR(Bring(driver, args, stream));
    if (IsEmpty(args)) return Status();
    CacheParams params = ParamsOf(args, kRunBytes);
    params.kind = static_cast<int32_t>(args.kind);
    params.floor = args.floor;
    params.flags |= static_cast<int32_t>(If(args.scale_is_power, kCachePower));
    params.max_blocks = plan.kernel.at_once;
    return LaunchKernel(driver, plan.kernel, &params, stream);
  }
};

struct Block : Quantised<cache_block_args> {
  using Quantised::KeyOf;

  static ProblemKey KeyOf(const Args& a) {
    ProblemKey key = Quantised::KeyOf(a);
    const int64_t halves = IsPresent(a.v) ? 2 : 1;
    key.features |= If(a.block != kShortBlock, kCacheLong) |
                    If(a.tokens * a.heads * halves < kFewRows, kCacheFew);
    return key;
  }

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckKind(a.data_type, a.kind));
    AITER_RETURN_IF_ERROR(CheckCommon(a, kRunBytes));
    AITER_RETURN_IF_ERROR(CheckRange("block", a.block, 1, kMaxSize));
    int64_t slots = a.pages * a.page_size;
    if (slots % a.block != 0) {
      return Invalid("block", std::to_string(a.block),
                     "a divisor of all slots, of which there are " +
                         std::to_string(slots));
    }
    AITER_RETURN_IF_ERROR(CheckScales("k", a, a.k, slots / a.block, 1));
    AITER_RETURN_IF_ERROR(CheckScales("v", a, a.v, slots / a.block, 1));
    return CheckAligned({{"winners_ptr", a.winners_ptr}});
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    AITER_RETURN_IF_ERROR(Bring(driver, args, stream));
    if (IsEmpty(args)) return Status();
    CacheParams params = ParamsOf(args, kRunBytes);
    params.kind = static_cast<int32_t>(args.kind);
    params.floor = args.floor;
    params.block = static_cast<int32_t>(args.block);
    // Few tokens, of blocks of their own, are worth a program each; of many,
    // most are not the first of their block.
    params.step = static_cast<int32_t>(std::clamp<int64_t>(
        args.tokens * args.heads * params.halves / kManyPrograms, 1,
        plan.kernel.info->tile_m));
    params.max_blocks = plan.kernel.at_once;
    params.winners_ptr = args.winners_ptr;
    return LaunchKernel(driver, plan.kernel, &params, stream);
  }
};

}  // namespace

AITER_DEFINE_OPERATION(cache_copy, Copy);
AITER_DEFINE_OPERATION(cache_cast, Cast);
AITER_DEFINE_OPERATION(cache_token, Token);
AITER_DEFINE_OPERATION(cache_block, Block);

}  // namespace aiter
