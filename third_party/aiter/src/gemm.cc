// SPDX-License-Identifier: Apache-2.0

#include "aiter/gemm.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/launch.h"
#include "third_party/aiter/src/core/operation.h"
#include "third_party/aiter/src/core/select.h"
#include "third_party/aiter/src/core/steps.h"
#include "third_party/aiter/src/gemm_params.h"
#include "third_party/aiter/src/gemm_select.h"

namespace aiter {
namespace {

// Kernels count rows and columns in 32 bits, and add a tile to one.
constexpr int64_t kMaxSize = INT32_MAX - 65536;
// Offsets inside a tile of up to 512 rows fit 32 bits below this stride.
constexpr int64_t kMaxAlignedStride = (int64_t{1} << 22) - 1;
constexpr int64_t kMaxInt32 = INT32_MAX;
constexpr int64_t kWideBytes = 16;
constexpr int64_t kMaxGridZ = 65535;
// More parts than are ever worth their sum.
constexpr int64_t kMaxSplits = 64;
constexpr int64_t kSumBytes = 4;

bool IsFp8(DataType type) {
  return type == DataType::kE4m3fn || type == DataType::kE4m3fnuz;
}

Status CheckType(const char* name, DataType type, bool accepted,
                 const char* types) {
  if (accepted) return Status();
  return Invalid(name, DataTypeName(type), types);
}

Status CheckTypes(const gemm_args& a) {
  switch (a.scaling) {
    case GemmScaling::kNone:
      AITER_RETURN_IF_ERROR(
          CheckType("a_type", a.a_type,
                    a.a_type == DataType::kFp16 || a.a_type == DataType::kBf16,
                    "fp16 or bf16 without scales"));
      break;
    case GemmScaling::kRow:
      AITER_RETURN_IF_ERROR(CheckType(
          "a_type", a.a_type, a.a_type == DataType::kI8 || IsFp8(a.a_type),
          "i8, e4m3fn or e4m3fnuz with scales of rows"));
      break;
    case GemmScaling::kBlock:
      AITER_RETURN_IF_ERROR(CheckType("a_type", a.a_type, IsFp8(a.a_type),
                                      "e4m3fn or e4m3fnuz with scales of "
                                      "blocks"));
      break;
    case GemmScaling::kMx:
      AITER_RETURN_IF_ERROR(CheckType("a_type", a.a_type,
                                      a.a_type == DataType::kE2m1,
                                      "e2m1 with e8m0 scales"));
      break;
  }
  AITER_RETURN_IF_ERROR(CheckType(
      "b_type", a.b_type,
      a.b_type == a.a_type || (IsFp8(a.a_type) && IsFp8(a.b_type)),
      IsFp8(a.a_type) ? "e4m3fn or e4m3fnuz, as a_type is" : "a_type's"));
  return CheckType("out_type", a.out_type,
                   a.out_type == DataType::kBf16 ||
                       a.out_type == DataType::kFp16 ||
                       a.out_type == DataType::kFp32,
                   "bf16, fp16 or fp32");
}

// Elements of a row as stored.
int64_t RowOfA(const gemm_args& a) {
  if (a.layout == GemmLayout::kTN) return a.m;
  return a.a_type == DataType::kE2m1 ? a.k / 2 : a.k;
}

int64_t RowOfB(const gemm_args& a) {
  if (a.layout != GemmLayout::kNT) return a.n;
  return a.b_type == DataType::kE2m1 ? a.k / 2 : a.k;
}

template <typename Sizes>
bool IsEmpty(const Sizes& s) {
  return s.batch == 0 || s.m == 0 || s.n == 0;
}

Status CheckScales(const gemm_args& a) {
  bool scaled = a.scaling != GemmScaling::kNone;
  for (const NamedPointer& p : {NamedPointer{"a_scale_ptr", a.a_scale_ptr},
                                NamedPointer{"b_scale_ptr", a.b_scale_ptr}}) {
    if ((p.address != nullptr) == scaled) continue;
    return scaled ? Invalid(p.name, "null", "given with scaling")
                  : Invalid(p.name, "given", "null without scaling");
  }
  int64_t most = a.scaling == GemmScaling::kRow ? 1 : kMaxInt32;
  AITER_RETURN_IF_ERROR(
      CheckRange("stride_a_scale", a.stride_a_scale, 0, most));
  AITER_RETURN_IF_ERROR(
      CheckRange("stride_b_scale", a.stride_b_scale, 0, most));
  AITER_RETURN_IF_ERROR(
      CheckRange("k_stride_a_scale", a.k_stride_a_scale, 0, kMaxInt32));
  AITER_RETURN_IF_ERROR(
      CheckRange("k_stride_b_scale", a.k_stride_b_scale, 0, kMaxInt32));
  if (a.scaling == GemmScaling::kMx) {
    for (auto [name, stride] :
         {std::pair("k_stride_a_scale", a.k_stride_a_scale),
          std::pair("k_stride_b_scale", a.k_stride_b_scale)}) {
      if (stride != 1) {
        return Invalid(name, std::to_string(stride), "1 with e8m0 scales");
      }
    }
  }
  AITER_RETURN_IF_ERROR(
      CheckRange("batch_stride_a_scale", a.batch_stride_a_scale, 0, INT64_MAX));
  return CheckRange("batch_stride_b_scale", a.batch_stride_b_scale, 0,
                    INT64_MAX);
}

// Checks what a problem has of the arguments.
Status CheckProblem(const gemm_args& a) {
  AITER_RETURN_IF_ERROR(CheckTypes(a));
  if (a.layout != GemmLayout::kNT && a.scaling != GemmScaling::kNone) {
    return Invalid("layout", a.layout == GemmLayout::kNN ? "kNN" : "kTN",
                   "kNT with scaling");
  }
  AITER_RETURN_IF_ERROR(CheckRange("m", a.m, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("n", a.n, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("k", a.k, 0, kMaxSize));
  AITER_RETURN_IF_ERROR(CheckRange("batch", a.batch, 0, kMaxInt32));
  if (a.a_type == DataType::kE2m1 && a.k % 2 != 0) {
    return Invalid("k", std::to_string(a.k), "a multiple of 2 of e2m1");
  }
  return Status();
}

Status CheckGemm(const gemm_args& a) {
  AITER_RETURN_IF_ERROR(CheckProblem(a));
  AITER_RETURN_IF_ERROR(
      CheckRange("stride_a", a.stride_a, RowOfA(a), kMaxInt32));
  AITER_RETURN_IF_ERROR(
      CheckRange("stride_b", a.stride_b, RowOfB(a), kMaxInt32));
  AITER_RETURN_IF_ERROR(
      CheckRange("batch_stride_a", a.batch_stride_a, 0, INT64_MAX));
  AITER_RETURN_IF_ERROR(
      CheckRange("batch_stride_b", a.batch_stride_b, 0, INT64_MAX));
  AITER_RETURN_IF_ERROR(CheckScales(a));
  AITER_RETURN_IF_ERROR(
      CheckRange("workspace_bytes", a.workspace_bytes, 0, INT64_MAX));
  if (a.workspace_bytes > 0 && a.workspace_ptr == nullptr) {
    return Invalid("workspace_ptr", "null", "given with workspace_bytes > 0");
  }
  AITER_RETURN_IF_ERROR(CheckRange("splits", a.splits, 0, kMaxSplits));
  return CheckAligned({{"a_ptr", a.a_ptr},
                       {"b_ptr", a.b_ptr},
                       {"a_scale_ptr", a.a_scale_ptr},
                       {"b_scale_ptr", a.b_scale_ptr},
                       {"bias_ptr", a.bias_ptr},
                       {"out_ptr", a.out_ptr},
                       {"workspace_ptr", a.workspace_ptr}});
}

// Whether some row of an operand does not begin and end at a multiple of 16
// bytes, or rows are far apart.
bool IsUnaligned(const gemm_args& a) {
  auto odd = [](int64_t elements, DataType type) {
    return elements * ElementBytes(type) % kWideBytes != 0;
  };
  return odd(RowOfA(a), a.a_type) || odd(RowOfB(a), a.b_type) ||
         odd(a.stride_a, a.a_type) || odd(a.stride_b, a.b_type) ||
         odd(a.batch_stride_a, a.a_type) || odd(a.batch_stride_b, a.b_type) ||
         a.stride_a > kMaxAlignedStride || a.stride_b > kMaxAlignedStride;
}

const KernelInfo* FindKernel(std::string_view symbol) {
  for (const KernelInfo& kernel : GetKernelTable()) {
    if (symbol == kernel.symbol) return &kernel;
  }
  return nullptr;
}

// For tuning.
Status CheckChoice(const gemm_args& a) {
  if (a.kernel.empty() || FindKernel(a.kernel) != nullptr) return Status();
  return Invalid("kernel", std::string(a.kernel), "one of this build");
}

int32_t Flag(bool condition, uint32_t feature) {
  return condition ? static_cast<int32_t>(feature) : 0;
}

GemmParams ParamsOf(const gemm_args& a, const GemmPlan& plan) {
  GemmParams p;
  p.a_ptr = a.a_ptr;
  p.b_ptr = a.b_ptr;
  p.a_scale_ptr = a.a_scale_ptr;
  p.b_scale_ptr = a.b_scale_ptr;
  p.a_scale_e8m0_ptr = a.a_scale_ptr;
  p.b_scale_e8m0_ptr = a.b_scale_ptr;
  p.bias_ptr = a.bias_ptr;
  p.bias_f32_ptr = a.bias_ptr;
  p.out_bf16_ptr = a.out_ptr;
  p.out_f32_ptr = a.out_ptr;
  p.workspace_ptr = a.workspace_ptr;
  p.m = static_cast<int32_t>(a.m);
  p.n = static_cast<int32_t>(a.n);
  p.k = static_cast<int32_t>(a.k);
  p.k_rows = p.k;
  p.batch = static_cast<int32_t>(a.batch);
  p.splits = plan.splits;
  p.k_per_split = plan.k_per_split;
  p.whole_tiles = plan.whole_tiles;
  p.divided_tiles = plan.divided_tiles;
  p.skew = plan.skew;
  p.sum_tile_m = plan.gemm.info->tile_m;
  p.sum_tile_n = plan.gemm.info->tile_n;
  p.blocks_at_once = plan.blocks_at_once;
  p.stride_a = static_cast<int32_t>(a.stride_a);
  p.stride_b = static_cast<int32_t>(a.stride_b);
  p.batch_stride_a = a.batch_stride_a;
  p.batch_stride_b = a.batch_stride_b;
  p.batch_stride_out = a.m * a.n;
  p.a_scale_step = static_cast<int32_t>(a.stride_a_scale);
  p.b_scale_step = static_cast<int32_t>(a.stride_b_scale);
  p.stride_a_scale_m = static_cast<int32_t>(a.stride_a_scale);
  p.stride_a_scale_k = static_cast<int32_t>(a.k_stride_a_scale);
  p.stride_b_scale_n = static_cast<int32_t>(a.stride_b_scale);
  p.stride_b_scale_k = static_cast<int32_t>(a.k_stride_b_scale);
  p.batch_stride_a_scale = a.batch_stride_a_scale;
  p.batch_stride_b_scale = a.batch_stride_b_scale;
  p.activation = static_cast<int32_t>(a.activation);
  p.flags = Flag(a.bias_ptr != nullptr, kGemmBias) |
            Flag(a.bias_is_f32, kGemmBiasF32) |
            Flag(a.out_type == DataType::kFp16, kGemmOutFp16) |
            Flag(a.out_type == DataType::kFp32, kGemmOutF32) |
            Flag(a.a_type == DataType::kE4m3fnuz, kGemmAFnuz) |
            Flag(a.b_type == DataType::kE4m3fnuz, kGemmBFnuz) |
            Flag(a.a_type == DataType::kI8, kGemmSumI32) |
            Flag(a.scaling == GemmScaling::kRow, kGemmRowScaled);
  return p;
}

MappedTensor Mapped(const TensorMapSpec& spec, const gemm_args& a,
                    const GemmParams& p) {
  MappedTensor t;
  int64_t batch_stride = 0;
  switch (spec.tensor) {
    case kGemmTensorA:
      t.address = p.a_ptr;
      t.type = a.a_type;
      t.dims[0] = RowOfA(a);
      t.dims[1] = a.layout == GemmLayout::kTN ? a.k : a.m;
      t.strides[0] = a.stride_a;
      batch_stride = a.batch_stride_a;
      break;
    case kGemmTensorB:
      t.address = p.b_ptr;
      t.type = a.b_type;
      t.dims[0] = RowOfB(a);
      t.dims[1] = a.layout == GemmLayout::kNT ? a.n : a.k;
      t.strides[0] = a.stride_b;
      batch_stride = a.batch_stride_b;
      break;
    default: {
      constexpr int64_t kWide = kWideBytes / 2;
      // No kernel stores float32 by a map, but its halves have one as well.
      t.address = p.out_bf16_ptr;
      t.type = a.out_type == DataType::kFp32 ? DataType::kBf16 : a.out_type;
      t.dims[0] = a.n * (ElementBytes(a.out_type) / ElementBytes(t.type));
      t.dims[1] = a.m;
      // Rows of another length are stored without it.
      t.strides[0] = CeilDiv(t.dims[0], kWide) * kWide;
      batch_stride = a.m * t.strides[0];
      break;
    }
  }
  t.rank = spec.rank;
  // What all batches share has one, of any stride that does.
  bool shared = batch_stride == 0;
  t.dims[2] = shared ? 1 : p.batch;
  t.strides[1] = shared ? t.dims[1] * t.strides[0] : batch_stride;
  return t;
}

// early: the kernel waits for the one before it by itself.
Status LaunchGemm(const Driver& driver, const GemmPlan& plan,
                  const LoadedKernel& loaded, const gemm_args& args,
                  void* stream, bool early) {
  const KernelInfo& kernel = *loaded.info;
  const GemmParams params = ParamsOf(args, plan);
  const bool transposed = ComputesTranspose(kernel);
  TensorMap maps[kMaxTensorMaps];
  for (int i = 0; i < kernel.num_tensor_maps; ++i) {
    const TensorMapSpec& spec = kernel.tensor_maps[i];
    MappedTensor tensor = Mapped(spec, args, params);
    // Where rows of a are few, those of b come from memory, once: the next slab
    // is what lies behind this one.
    tensor.reads_ahead = transposed && spec.tensor == kGemmTensorB;
    AITER_RETURN_IF_ERROR(
        EncodeTensorMap(driver, kernel, spec, tensor, &maps[i]));
  }
  return LaunchKernel(driver, loaded, &params, stream, maps, early);
}

// The arguments of `batch` batches from number `first` on.
gemm_args Batches(const gemm_args& args, int64_t first, int64_t batch) {
  gemm_args a = args;
  auto advance = [first](const void** pointer, int64_t stride, int64_t bytes) {
    if (*pointer != nullptr) {
      *pointer = static_cast<const char*>(*pointer) + first * stride * bytes;
    }
  };
  int64_t scale_bytes = a.scaling == GemmScaling::kMx ? 1 : 4;
  advance(&a.a_ptr, a.batch_stride_a, ElementBytes(a.a_type));
  advance(&a.b_ptr, a.batch_stride_b, ElementBytes(a.b_type));
  advance(&a.a_scale_ptr, a.batch_stride_a_scale, scale_bytes);
  advance(&a.b_scale_ptr, a.batch_stride_b_scale, scale_bytes);
  a.out_ptr = static_cast<char*>(a.out_ptr) +
              first * a.m * a.n * ElementBytes(a.out_type);
  a.batch = batch;
  return a;
}

// The arguments of a problem, with contiguous operands and without pointers.
Status ArgsOf(const Problem& problem, gemm_args* a) {
  AITER_RETURN_IF_ERROR(
      CheckRange("number of dims", problem.dims.size(), 0, 5));
  ProblemKey key;
  AITER_RETURN_IF_ERROR(
      ProblemKeyOf("gemm", {problem.data_type, {}, problem.features}, 0, &key));
  auto asks = [&key](uint32_t bit) { return (key.features & bit) != 0; };
  if (asks(kGemmNn)) a->layout = GemmLayout::kNN;
  if (asks(kGemmTn)) a->layout = GemmLayout::kTN;
  if (asks(kGemmRow)) a->scaling = GemmScaling::kRow;
  if (asks(kGemmBlock)) a->scaling = GemmScaling::kBlock;
  if (asks(kGemmMx)) a->scaling = GemmScaling::kMx;
  a->a_type = a->b_type = key.data_type;
  if (asks(kGemmAFnuz) || asks(kGemmBFnuz)) {
    a->a_type = asks(kGemmAFnuz) ? DataType::kE4m3fnuz : DataType::kE4m3fn;
    a->b_type = asks(kGemmBFnuz) ? DataType::kE4m3fnuz : DataType::kE4m3fn;
  }
  if (asks(kGemmOutF32)) a->out_type = DataType::kFp32;
  if (asks(kGemmOutFp16)) a->out_type = DataType::kFp16;
  // What serves a size of 1 serves every size: rows of 1 are not aligned.
  auto size = [&problem](size_t i, int64_t unknown) {
    bool known = problem.dims.size() > i && problem.dims[i] != -1;
    return known ? problem.dims[i] : unknown;
  };
  a->m = size(0, 1);
  a->n = size(1, 1);
  a->k = size(2, a->a_type == DataType::kE2m1 ? 2 : 1);
  a->batch = size(3, 1);
  AITER_RETURN_IF_ERROR(CheckProblem(*a));
  a->stride_a = RowOfA(*a);
  a->stride_b = RowOfB(*a);
  if (a->batch > 1) {
    a->batch_stride_a = a->m * a->stride_a;
    a->batch_stride_b = a->n * a->stride_b;
  }
  return Status();
}

Status ChoicesFor(const GemmKey& key, const std::string& arch,
                  std::vector<GemmChoice>* choices) {
  choices->clear();
  if (IsEmpty(key)) return Status();
  std::vector<GemmTiling> tilings;
  AITER_RETURN_IF_ERROR(ListGemmTilings(DeviceOfArch(arch), key, &tilings));
  for (const GemmTiling& tiling : tilings) {
    choices->push_back({tiling.kernel->symbol, tiling.splits});
  }
  return Status();
}

struct Gemm {
  using Args = gemm_args;
  using Plan = GemmPlan;

  static Status Check(const Args& a) {
    AITER_RETURN_IF_ERROR(CheckGemm(a));
    return CheckChoice(a);
  }

  static GemmKey KeyOf(const Args& a) {
    GemmKey key;
    key.layout = a.layout;
    key.scaling = a.scaling;
    key.a_type = a.a_type;
    key.b_type = a.b_type;
    key.features = (IsUnaligned(a) ? kGemmUnaligned : 0u) |
                   (a.out_type == DataType::kFp32 ? kGemmOutF32 : 0u) |
                   (a.out_type == DataType::kFp16 ? kGemmOutFp16 : 0u) |
                   (a.batch > 1 ? kGemmBatched : 0u);
    key.batch = a.batch;
    key.m = a.m;
    key.n = a.n;
    key.k = a.k;
    key.workspace = a.workspace_bytes / kSumBytes;
    key.splits = static_cast<int32_t>(a.splits);
    if (!a.kernel.empty()) key.kernel = FindKernel(a.kernel);
    return key;
  }

  static Status KeyOf(const Problem& problem, GemmKey* key) {
    Args args;
    AITER_RETURN_IF_ERROR(ArgsOf(problem, &args));
    *key = KeyOf(args);
    if (problem.dims.size() > 4) {
      key->workspace = std::max<int64_t>(problem.dims[4], 0) / kSumBytes;
    }
    return Status();
  }

  static Status Choose(const GemmKey& key, Steps* steps, Plan* plan) {
    if (IsEmpty(key)) return Status();
    std::vector<GemmTiling> tilings;
    AITER_RETURN_IF_ERROR(ListGemmTilings(steps->device(), key, &tilings));
    const GemmTiling& best = tilings.front();
    plan->splits = best.splits;
    plan->k_per_split = best.k_per_split;
    plan->whole_tiles = static_cast<int32_t>(best.whole_tiles);
    plan->divided_tiles = static_cast<int32_t>(best.divided_tiles);
    // Of the fewest rows it takes 2 % less time, of more some more.
    constexpr int64_t kFewestRows = 16;
    plan->skew = key.m <= kFewestRows;
    // Short ones take 5 to 26 % less time. Of longer ones some take more: their
    // blocks begin wherever the kernel before left room, neighbours together.
    constexpr double kShortSeconds = 10e-6;
    plan->early = Walks(*best.kernel) && best.seconds < kShortSeconds;
    plan->blocks_at_once = GemmBlocksAtOnce(steps->device(), *best.kernel);
    AITER_RETURN_IF_ERROR(steps->Add(*best.kernel, &plan->gemm));
    if (plan->splits == 1) return Status();
    return steps->Add(Walks(*best.kernel) ? "gemm_sum_tiles" : "gemm_sum",
                      ProblemKey(), &plan->sum);
  }

  static Status Launch(const Driver& driver, const Args& args, const Plan& plan,
                       void* stream) {
    if (IsEmpty(args)) return Status();
    // A grid has room for so many batches, unless blocks walk over them. More
    // of them are not divided in parts.
    const int64_t most = Walks(*plan.gemm.info) ? args.batch : kMaxGridZ;
    for (int64_t first = 0; first < args.batch; first += most) {
      Args some = Batches(args, first, std::min(args.batch - first, most));
      AITER_RETURN_IF_ERROR(
          LaunchGemm(driver, plan, plan.gemm, some, stream, plan.early));
    }
    if (plan.splits == 1) return Status();
    return LaunchGemm(driver, plan, plan.sum, args, stream,
                      Walks(*plan.gemm.info));
  }
};

}  // namespace

bool GemmKey::operator==(const GemmKey& o) const {
  return layout == o.layout && scaling == o.scaling && a_type == o.a_type &&
         b_type == o.b_type && features == o.features && batch == o.batch &&
         m == o.m && n == o.n && k == o.k && workspace == o.workspace &&
         splits == o.splits && kernel == o.kernel;
}

uint64_t GemmKey::Hash() const {
  uint64_t hash = 0;
  for (uint64_t part :
       {static_cast<uint64_t>(layout), static_cast<uint64_t>(scaling),
        static_cast<uint64_t>(a_type), static_cast<uint64_t>(b_type),
        static_cast<uint64_t>(features), static_cast<uint64_t>(batch),
        static_cast<uint64_t>(m), static_cast<uint64_t>(n),
        static_cast<uint64_t>(k), static_cast<uint64_t>(workspace),
        static_cast<uint64_t>(splits)}) {
    hash = (hash ^ part) * 0x9e3779b97f4a7c15;
  }
  return hash;
}

AITER_DEFINE_OPERATION(gemm, Gemm);

Status gemm_choices(const gemm_args& args, const std::string& arch,
                    std::vector<GemmChoice>* choices) {
  AITER_RETURN_IF_ERROR(Gemm::Check(args));
  return ChoicesFor(Gemm::KeyOf(args), arch, choices);
}

Status gemm_choices(const Problem& problem, const std::string& arch,
                    std::vector<GemmChoice>* choices) {
  GemmKey key;
  AITER_RETURN_IF_ERROR(Gemm::KeyOf(problem, &key));
  return ChoicesFor(key, arch, choices);
}

}  // namespace aiter
