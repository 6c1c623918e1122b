// SPDX-License-Identifier: Apache-2.0

// Choice of kernels and parts, argument packing, launches and failures of
// matrix products, on a driver that only records what it is asked to do.

#include "aiter/gemm.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "aiter/status.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/grids.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/fake_driver_test.h"
#include "third_party/aiter/src/gemm_params.h"

namespace aiter {
namespace {

// What the packing function of a kernel with tensor maps leaves behind.
struct MappedArgs {
  TensorMap a, b;
  GemmParams params;
};

void PackMapped(const void* params, const TensorMap* maps, void* buffer) {
  auto* args = new (buffer) MappedArgs;
  args->a = maps[0];
  args->b = maps[1];
  args->params = *static_cast<const GemmParams*>(params);
}

constexpr uint16_t kMappedOffsets[] = {0, sizeof(TensorMap),
                                       2 * sizeof(TensorMap)};
constexpr TensorMapSpec kMaps3[] = {{kGemmTensorA, 3, 128, {64, 64, 1}},
                                    {kGemmTensorB, 3, 128, {64, 256, 1}},
                                    {kGemmTensorOut, 3, 128, {64, 64, 1}}};
constexpr TensorMapSpec kPingpongMaps[] = {
    {kGemmTensorA, 3, 128, {64, 128, 1}},
    {kGemmTensorB, 3, 128, {64, 256, 1}},
    {kGemmTensorOut, 3, 128, {64, 128, 1}}};
constexpr TensorMapSpec kTransposedMaps[] = {
    {kGemmTensorA, 3, 128, {64, 128, 1}}, {kGemmTensorB, 3, 128, {64, 96, 1}}};
constexpr TensorMapSpec kMaps2[] = {{kGemmTensorA, 2, 64, {32, 64}},
                                    {kGemmTensorOut, 2, 128, {64, 64}}};

constexpr char kNt256[] = "nt_256";
constexpr char kNt128[] = "nt_128";
constexpr char kNt16[] = "nt_16";
constexpr char kNtUnaligned[] = "nt_unaligned";

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* op, const char* arch,
                 DataType type, int tile_m, int tile_n, int tile_k, int rate,
                 uint32_t excludes) -> KernelInfo& {
    KernelInfo k = FakeKernel<GemmParams>(blob, symbol, op, arch, kGemmNtGrid);
    k.data_type = type;
    k.tile_m = static_cast<int16_t>(tile_m);
    k.tile_n = static_cast<int16_t>(tile_n);
    k.tile_k = static_cast<int16_t>(tile_k);
    k.rate = static_cast<int16_t>(rate);
    k.excludes = excludes;
    kernels.push_back(k);
    return kernels.back();
  };
  constexpr DataType kB = DataType::kBf16;
  constexpr uint32_t kU = kGemmUnaligned;
  add(kNt256, "gemm_nt", "gfx942", kB, 256, 256, 64, 700, kU);
  add(kNt128, "gemm_nt", "gfx942", kB, 128, 128, 64, 500, kU);
  add(kNt16, "gemm_nt", "gfx942", kB, 16, 64, 128, 100, kU);
  add(kNtUnaligned, "gemm_nt", "gfx942", kB, 64, 64, 32, 80, 0);
  add("nn", "gemm_nn", "gfx942", kB, 128, 128, 64, 400, 0);
  add("nn_64", "gemm_nn", "sm_80", kB, 64, 256, 64, 30000, 0);
  add("nn_96", "gemm_nn", "sm_80", kB, 96, 256, 64, 30000, 0);
  add("tn", "gemm_tn", "gfx942", kB, 128, 128, 64, 400, 0);
  add("row_i8", "gemm_row", "gfx942", DataType::kI8, 128, 128, 128, 900, 0);
  add("row_fnuz", "gemm_row", "gfx942", DataType::kE4m3fnuz, 128, 128, 128, 900,
      kU);
  add("row_any", "gemm_row", "gfx942", kB, 64, 128, 64, 200, 0).any_data_type =
      true;
  add("block_any", "gemm_block", "gfx942", kB, 128, 128, 64, 200, 0)
      .any_data_type = true;
  add("mx", "gemm_mx", "gfx942", DataType::kE2m1, 64, 64, 256, 100, 0);
  for (const char* arch : {"gfx942", "sm_90"}) {
    KernelInfo& sum = add(*arch == 'g' ? "sum" : "sum_90", "gemm_sum", arch, kB,
                          1, 1024, 0, 0, 0);
    sum.any_data_type = true;
    sum.grid = &kGemmSumGrid;
  }
  KernelInfo& tiles =
      add("sum_tiles", "gemm_sum_tiles", "sm_90", kB, 16, 64, 0, 0, 0);
  tiles.any_data_type = true;
  tiles.grid = &kGemmSumTilesGrid;

  KernelInfo& mapped =
      add("nt_mapped", "gemm_nt", "sm_90", kB, 128, 256, 64, 700, kU);
  mapped.grid = &kGemmNtGridWalks;
  mapped.shared_bytes = 150 * 1024;
  mapped.pack = PackMapped;
  mapped.arg_offsets = kMappedOffsets;
  mapped.num_args = 3;
  mapped.tensor_maps = kMaps3;
  mapped.num_tensor_maps = 3;
  KernelInfo pingpong = mapped;
  pingpong.symbol = "nt_pingpong";
  pingpong.tile_n = 128;
  pingpong.rate = 500;
  pingpong.tensor_maps = kPingpongMaps;
  kernels.push_back(pingpong);
  KernelInfo pairs = mapped;
  pairs.symbol = "nt_pairs";
  pairs.tile_m = 256;
  pairs.rate = 1;
  pairs.grid = &kGemmNtGridPairs;
  kernels.push_back(pairs);
  KernelInfo fours = pairs;
  fours.symbol = "nt_fours";
  fours.grid = &kGemmNtGridFours;
  fours.tensor_maps = kTransposedMaps;
  fours.num_tensor_maps = 2;
  kernels.push_back(fours);
  KernelInfo transposed = pairs;
  transposed.symbol = "nt_transposed";
  transposed.grid = &kGemmNtGridWalks;
  transposed.tensor_maps = kTransposedMaps;
  transposed.num_tensor_maps = 2;
  kernels.push_back(transposed);
  KernelInfo& flat = add("tn_mapped", "gemm_tn", "sm_90", kB, 64, 64, 64, 700,
                         kU | kGemmOutF32);
  flat.grid = &kGemmTnGridWalks;
  flat.shared_bytes = 150 * 1024;
  flat.pack = PackMapped;
  flat.arg_offsets = kMappedOffsets;
  flat.num_args = 3;
  flat.tensor_maps = kMaps2;
  flat.num_tensor_maps = 2;
  add("nt_sm_90", "gemm_nt", "sm_90", kB, 64, 64, 32, 200, 0);
  KernelInfo& odd = add("nt_odd", "gemm_nt", "sm_90", kB, 16, 32, 128, 78, 0);
  odd.needs = kU;
  odd.threads = 64;
  odd.occupancy = 1;
  add("tn_sm_90", "gemm_tn", "sm_90", kB, 64, 64, 32, 200, 0);
  add("nt_sm_80", "gemm_nt", "sm_80", kB, 64, 64, 32, 100, 0).shared_bytes =
      100 * 1024;
  add("nt_sm_80_small", "gemm_nt", "sm_80", kB, 32, 32, 32, 50, 0);
  return kernels;
}

// Kernels 0 to 2 are kNt256, kNt128, kNt16.
constexpr TunedChoice kTuned[] = {
    {1, {16, 2048, 4096}, {2}},
    {2, {100, 2048, 4096}, {1}},
    {0, {128, 2048, 4096}, {1}},
};

// Contiguous operands; addresses as they come.
gemm_args Args(int64_t m, int64_t n, int64_t k, int64_t batch = 1,
               GemmLayout layout = GemmLayout::kNT) {
  gemm_args a;
  a.layout = layout;
  a.batch = batch;
  a.m = m;
  a.n = n;
  a.k = k;
  a.a_ptr = At(0x10000);
  a.b_ptr = At(0x20000);
  a.out_ptr = At(0x30000);
  a.stride_a = layout == GemmLayout::kTN ? m : k;
  a.stride_b = layout == GemmLayout::kNT ? k : n;
  if (batch > 1) {
    a.batch_stride_a = m * k;
    a.batch_stride_b = n * k;
  }
  return a;
}

void AddWorkspace(int64_t splits, gemm_args* a) {
  a->workspace_ptr = At(0x40000);
  a->workspace_bytes = splits * 4 * a->batch * a->m * a->n;
}

gemm_args RowArgs(int64_t m, int64_t n, int64_t k, DataType a_type,
                  DataType b_type) {
  gemm_args a = Args(m, n, k);
  a.scaling = GemmScaling::kRow;
  a.a_type = a_type;
  a.b_type = b_type;
  a.a_scale_ptr = At(0x50000);
  a.b_scale_ptr = At(0x60000);
  a.stride_a_scale = 1;
  return a;
}

gemm_args BlockArgs(int64_t m, int64_t n, int64_t k) {
  gemm_args a = RowArgs(m, n, k, DataType::kE4m3fn, DataType::kE4m3fn);
  a.scaling = GemmScaling::kBlock;
  a.stride_a_scale = a.stride_b_scale = (k + 127) / 128;
  a.k_stride_a_scale = a.k_stride_b_scale = 1;
  return a;
}

gemm_args MxArgs(int64_t m, int64_t n, int64_t k) {
  gemm_args a = BlockArgs(m, n, k);
  a.scaling = GemmScaling::kMx;
  a.a_type = a.b_type = DataType::kE2m1;
  a.stride_a = a.stride_b = k / 2;
  a.stride_a_scale = a.stride_b_scale = (k + 31) / 32;
  return a;
}

// The names of the kernels of a call, or of a problem, with blanks between; or
// the error.
template <typename Asked>
std::string Names(const Asked& asked, const std::string& arch = "gfx942") {
  std::vector<std::string> names;
  Status status = gemm_kernels(asked, arch, &names);
  if (!status.ok()) return status.message();
  std::string text;
  for (const std::string& name : names)
    text += (text.empty() ? "" : " ") + name;
  return text;
}

void TestSelection() {
  // The rate decides where there are tiles for all.
  CHECK(Names(Args(8192, 8192, 4096)) == kNt256);
  // Small tiles for all are done before large tiles for some are.
  CHECK(Names(Args(2048, 2048, 4096)) == kNt128);
  // Memory decides, and small tiles draw on more of it.
  CHECK(Names(Args(1, 8192, 4096)) == kNt16);
  // Rows that the aligned kernels cannot read.
  CHECK(Names(Args(8192, 8192, 4100)) == kNtUnaligned);
  gemm_args args = Args(8192, 8192, 4096);
  args.stride_b = int64_t{1} << 22;
  CHECK(Names(args) == kNtUnaligned);
  args = Args(8192, 8192, 4096, 2);
  args.batch_stride_a += 4;
  CHECK(Names(args) == kNtUnaligned);

  CHECK(Names(Args(64, 64, 64, 1, GemmLayout::kNN)) == "nn");
  CHECK(Names(Args(64, 64, 64, 1, GemmLayout::kTN)) == "tn");
  constexpr DataType kFn = DataType::kE4m3fn, kFnuz = DataType::kE4m3fnuz;
  constexpr DataType kI8 = DataType::kI8;
  CHECK(Names(RowArgs(512, 512, 512, kI8, kI8)) == "row_i8");
  CHECK(Names(RowArgs(512, 512, 511, kI8, kI8)) == "row_i8");
  CHECK(Names(RowArgs(512, 512, 512, kFnuz, kFnuz)) == "row_fnuz");
  CHECK(Names(RowArgs(512, 512, 511, kFnuz, kFnuz)) == "row_any");
  CHECK(Names(RowArgs(512, 512, 512, kFn, kFn)) == "row_any");
  CHECK(Names(RowArgs(512, 512, 512, kFnuz, kFn)) == "row_any");
  CHECK(Names(BlockArgs(512, 512, 512)) == "block_any");
  CHECK(Names(MxArgs(512, 512, 512)) == "mx");

  // Tensor maps have neither empty rows nor unaligned ones, and of two
  // dimensions no batches.
  CHECK(Names(Args(4096, 4096, 512), "sm_90") == "nt_mapped");
  CHECK(Names(Args(4096, 4096, 512, 3), "sm_90") == "nt_mapped");
  CHECK(Names(Args(4096, 4096, 0), "sm_90") == "nt_sm_90");
  CHECK(Names(Args(4096, 4096, 510), "sm_90") == "nt_sm_90");
  CHECK(Names(Args(4096, 4092, 512), "sm_90") == "nt_mapped");
  // One for rows that are not aligned, and for no others.
  CHECK(Names(Args(4, 4096, 510), "sm_90") == "nt_odd");
  CHECK(Names(Args(4, 4096, 0), "sm_90") == "nt_sm_90");
  // Where k is short the end of a tile outweighs its products, unless hidden.
  CHECK(Names(Args(8192, 8192, 64), "sm_90") == "nt_pingpong");
  // Nothing hides it from the copies of rows that do not begin at lines.
  CHECK(Names(Args(3584, 13464, 384), "sm_90") == "nt_pingpong");
  CHECK(Names(Args(3588, 13464, 360), "sm_90") == "nt_mapped");
  CHECK(Names(Args(4096, 4096, 512, 1, GemmLayout::kTN), "sm_90") ==
        "tn_mapped");
  CHECK(Names(Args(4096, 4096, 512, 3, GemmLayout::kTN), "sm_90") ==
        "tn_sm_90");
  args = Args(512, 512, 512, 1, GemmLayout::kTN);
  args.out_type = DataType::kFp32;
  CHECK(Names(args, "sm_90") == "tn_sm_90");

  // Later minor versions of an architecture run its kernels.
  CHECK(Names(Args(4096, 4096, 512), "sm_86") == "nt_sm_80");
  NewContext("sm_86", 90 * 1024);
  CHECK_OK(gemm(Args(4096, 4096, 512), nullptr));
  CHECK(g_recorder.launches.at(0).kernel == "nt_sm_80_small");

  CHECK(Contains(Names(Args(8, 8, 8), "gfx900"),
                 "No kernels for device architecture gfx900; this build has "
                 "kernels for gfx942, sm_80, sm_90"));
  CHECK(Names(MxArgs(64, 64, 64), "sm_90") ==
        "No gemm_mx kernel on sm_90 for e2m1 and e2m1");
  args = Args(512, 512, 512);
  args.a_type = args.b_type = DataType::kFp16;
  CHECK(Names(args) == "No gemm_nt kernel on gfx942 for fp16 and fp16");
}

void TestTuned() {
  // A row serves the sizes of its class, where there is room for its parts.
  for (int64_t m : {9, 13, 16}) {
    gemm_args args = Args(m, 2048, 4096);
    CHECK(Names(args) == kNt128);
    AddWorkspace(2, &args);
    CHECK(Names(args) == std::string(kNt128) + " sum");
  }
  CHECK(Names(Args(8, 2048, 4096)) == kNt16);
  CHECK(Names(Args(17, 2048, 4096)) == kNt16);
  // The nearest row of a class.
  CHECK(Names(Args(128, 2048, 4096)) == kNt256);
  CHECK(Names(Args(120, 2048, 4096)) == kNt256);
  CHECK(Names(Args(101, 2048, 4096)) == kNt16);
  CHECK(Names(Args(65, 2048, 4096)) == kNt16);
  CHECK(Names(Args(129, 2048, 4096)) == kNt16);
  // None of other n and k, of batches, of kernels that do not serve.
  CHECK(Names(Args(16, 2056, 4096)) == kNt16);
  CHECK(Names(Args(16, 2048, 4096, 2)) == kNt16);
  gemm_args args = Args(128, 2048, 4096);
  args.stride_a = 4097;
  CHECK(Names(args) == kNtUnaligned);
}

void TestParts() {
  // Few tiles, long sums.
  gemm_args args = Args(16, 256, 16384);
  CHECK(Names(args) == kNt16);
  AddWorkspace(16, &args);
  CHECK(Names(args) == std::string(kNt16) + " sum");
  // Tiles for every multiprocessor: parts would only cost their sum.
  args = Args(64, 32768, 4096);
  AddWorkspace(16, &args);
  CHECK(Contains(Names(args), "nt_"));
  CHECK(!Contains(Names(args), "sum"));

  for (int64_t k : {0, 1, 8, 127, 128, 129, 1000, 4096, 100000}) {
    for (int64_t room : {0, 1, 2, 3, 7, 16, 100}) {
      for (gemm_args a :
           {Args(5, 96, k), BlockArgs(5, 96, k), MxArgs(5, 96, 2 * k)}) {
        AddWorkspace(room, &a);
        std::vector<GemmChoice> choices;
        CHECK_OK(gemm_choices(a, "gfx942", &choices));
        CHECK(!choices.empty());
        for (const GemmChoice& choice : choices) {
          CHECK(choice.splits >= 1);
          CHECK(choice.splits <= std::max<int64_t>(room, 1));
          a.kernel = choice.kernel.c_str();
          a.splits = choice.splits;
          NewContext("gfx942");
          CHECK_OK(gemm(a, nullptr));
          const Launch& launch = g_recorder.launches.at(0);
          const auto p = launch.As<GemmParams>();
          CHECK(launch.kernel == choice.kernel);
          CHECK(launch.grid[1] == static_cast<unsigned>(choice.splits));
          CHECK(p.splits == choice.splits);
          // No part is empty, and none begins inside a step or a block.
          CHECK(p.k_per_split > 0 && p.k_per_split % 32 == 0);
          CHECK(int64_t{p.k_per_split} * choice.splits >= a.k);
          CHECK(choice.splits == 1 ||
                int64_t{p.k_per_split} * (choice.splits - 1) < a.k);
          if (a.scaling == GemmScaling::kBlock) {
            CHECK(p.k_per_split % 128 == 0);
          }
          CHECK(g_recorder.launches.size() == (choice.splits > 1 ? 2 : 1));
        }
      }
    }
  }

  // Parts that would be too short are not made.
  args = Args(16, 256, 256);
  AddWorkspace(16, &args);
  args.kernel = kNt16;
  args.splits = 16;
  NewContext("gfx942");
  CHECK_OK(gemm(args, nullptr));
  CHECK(g_recorder.launches.at(0).As<GemmParams>().splits == 2);
  CHECK(g_recorder.launches[0].As<GemmParams>().k_per_split == 128);
  CHECK(g_recorder.launches.at(1).kernel == "sum");
  CHECK(g_recorder.launches[1].grid[0] == 1);
  CHECK(g_recorder.launches[1].grid[1] == 16);
  CHECK(g_recorder.launches[1].grid[2] == 1);
}

void TestPacking() {
  NewContext("gfx942");
  gemm_args args = Args(200, 300, 128);
  args.bias_ptr = At(0x70000);
  args.activation = GemmActivation::kGeluTanh;
  args.kernel = kNt128;
  CHECK_OK(gemm(args, At(7)));
  const Launch launch = g_recorder.launches.at(0);
  CHECK(launch.stream == At(7) && launch.block == 256);
  CHECK(launch.grid[0] == 2 * 3 && launch.grid[1] == 1 && launch.grid[2] == 1);
  const auto p = launch.As<GemmParams>();
  CHECK(p.a_ptr == At(0x10000) && p.b_ptr == At(0x20000));
  CHECK(p.out_bf16_ptr == At(0x30000) && p.out_f32_ptr == At(0x30000));
  CHECK(p.bias_ptr == At(0x70000) && p.bias_f32_ptr == At(0x70000));
  CHECK(p.a_scale_ptr == nullptr && p.workspace_ptr == nullptr);
  CHECK(p.m == 200 && p.n == 300 && p.k == 128 && p.batch == 1);
  CHECK(p.stride_a == 128 && p.stride_b == 128);
  CHECK(p.batch_stride_a == 0 && p.batch_stride_out == 60000);
  CHECK(p.splits == 1 && p.k_per_split == 128);
  CHECK(p.activation == 3 && p.flags == 1);

  // Batches, of which a is common.
  args = Args(64, 32, 128, 5, GemmLayout::kNN);
  args.batch_stride_a = 0;
  args.bias_ptr = At(0x70000);
  args.bias_is_f32 = true;
  args.out_type = DataType::kFp32;
  CHECK_OK(gemm(args, nullptr));
  const auto q = g_recorder.launches.at(1).As<GemmParams>();
  CHECK(g_recorder.launches[1].grid[2] == 5);
  CHECK(q.batch == 5 && q.batch_stride_a == 0 && q.batch_stride_b == 32 * 128);
  CHECK(q.batch_stride_out == 64 * 32 && q.stride_b == 32);
  CHECK(q.flags == (1 | 2 | 8));

  // Scales of rows: a vector of a, one number of b.
  args = RowArgs(64, 32, 128, DataType::kE4m3fnuz, DataType::kE4m3fn);
  args.out_type = DataType::kFp16;
  CHECK_OK(gemm(args, nullptr));
  const auto r = g_recorder.launches.at(2).As<GemmParams>();
  CHECK(r.a_scale_ptr == At(0x50000) && r.b_scale_ptr == At(0x60000));
  CHECK(r.a_scale_step == 1 && r.b_scale_step == 0);
  CHECK(r.flags == (4 | 16 | 128));
  args = RowArgs(64, 32, 128, DataType::kI8, DataType::kI8);
  CHECK_OK(gemm(args, nullptr));
  CHECK(g_recorder.launches.at(3).As<GemmParams>().flags == (64 | 128));

  args = BlockArgs(64, 256, 384);
  args.stride_a_scale = 1;  // Transposed.
  args.k_stride_a_scale = 64;
  CHECK_OK(gemm(args, nullptr));
  const auto s = g_recorder.launches.at(4).As<GemmParams>();
  CHECK(s.stride_a_scale_m == 1 && s.stride_a_scale_k == 64);
  CHECK(s.stride_b_scale_n == 3 && s.stride_b_scale_k == 1);
  CHECK(s.flags == 0);
  args = MxArgs(64, 256, 384);
  CHECK_OK(gemm(args, nullptr));
  const auto t = g_recorder.launches.at(5).As<GemmParams>();
  CHECK(t.a_scale_e8m0_ptr == At(0x50000) && t.stride_a_scale_m == 12);
  CHECK(t.b_scale_e8m0_ptr == At(0x60000) && t.stride_b_scale_n == 12);
  CHECK(t.k == 384 && t.stride_a == 192 && t.k_per_split == 512);
}

void TestManyBatches() {
  NewContext("gfx942");
  gemm_args args = BlockArgs(8, 16, 128);
  args.batch = 2 * 65535 + 7;
  args.batch_stride_a = 8 * 128;
  args.batch_stride_a_scale = 8;
  args.out_type = DataType::kFp32;
  AddWorkspace(4, &args);
  CHECK_OK(gemm(args, nullptr));
  CHECK(g_recorder.launches.size() == 3);
  const auto p = g_recorder.launches[2].As<GemmParams>();
  CHECK(g_recorder.launches[0].grid[2] == 65535);
  CHECK(g_recorder.launches[2].grid[2] == 7 && p.batch == 7 && p.splits == 1);
  CHECK(p.a_ptr == At(0x10000 + uintptr_t{131070} * 8 * 128));
  CHECK(p.a_scale_ptr == At(0x50000 + uintptr_t{131070} * 8 * 4));
  CHECK(p.b_ptr == At(0x20000) && p.b_scale_ptr == At(0x60000));
  CHECK(p.out_f32_ptr == At(0x30000 + uintptr_t{131070} * 8 * 16 * 4));
  CHECK(g_recorder.loads == 1);
}

void TestTensorMaps() {
  NewContext("sm_90", 200 * 1024);
  g_recorder.multiprocessors = 11;
  gemm_args args = Args(500, 1000, 512, 3);
  args.batch_stride_b = 0;
  CHECK_OK(gemm(args, nullptr));
  // 3 * 4 * 4 tiles, on as many blocks as run at once.
  const Launch launch = g_recorder.launches.at(0);
  CHECK(launch.grid[0] == 11 && launch.grid[1] == 1 && launch.grid[2] == 1);
  const auto mapped = launch.As<MappedArgs>();
  CHECK(mapped.a.opaque[0] == 1 && mapped.b.opaque[0] == 2);
  CHECK(mapped.params.m == 500);
  const TensorMapCall a = g_recorder.maps.at(0);
  CHECK(a.address == At(0x10000) && a.type == 9 && a.swizzle == 3);
  CHECK(a.rank == 3 && a.dims[0] == 512 && a.dims[1] == 500 && a.dims[2] == 3);
  CHECK(a.strides[0] == 1024 && a.strides[1] == 512000);
  // Half of what the kernel was compiled for: a block's.
  CHECK(a.box[0] == 64 && a.box[1] == 64 && a.box[2] == 1);
  // What batches share is mapped once.
  const TensorMapCall b = g_recorder.maps.at(1);
  CHECK(b.dims[1] == 1000 && b.dims[2] == 1 && b.strides[1] == 1024000);

  args = Args(300, 96, 64);
  args.kernel = "nt_mapped";
  CHECK_OK(gemm(args, nullptr));
  CHECK(g_recorder.launches.at(1).grid[0] == 3);

  args = Args(128, 256, 512, 1, GemmLayout::kTN);
  args.stride_a = 136;
  args.out_type = DataType::kFp16;
  CHECK_OK(gemm(args, nullptr));
  const TensorMapCall at = g_recorder.maps.at(6);
  CHECK(at.rank == 2 && at.dims[0] == 128 && at.dims[1] == 512);
  CHECK(at.strides[0] == 272 && at.box[0] == 32 && at.swizzle == 2);
  const TensorMapCall out = g_recorder.maps.at(7);
  CHECK(out.address == At(0x30000) && out.type == 6 && out.dims[0] == 256);
  CHECK(out.dims[1] == 128 && out.strides[0] == 512);

  // A device with more multiprocessors has other turns.
  NewContext("sm_90", 200 * 1024);
  g_recorder.multiprocessors = 1000;
  args = Args(500, 1000, 512);
  args.kernel = "nt_mapped";
  CHECK_OK(gemm(args, nullptr));
  CHECK(g_recorder.launches.at(0).grid[0] == 16);
  // A pair of blocks has a tile of twice the rows.
  args.kernel = "nt_pairs";
  CHECK_OK(gemm(args, nullptr));
  CHECK(g_recorder.launches.at(1).grid[0] == 2 * 2 * 4);
  CHECK(g_recorder.maps.at(3).box[1] == 64);
  CHECK(g_recorder.maps.at(4).box[1] == 256);
  CHECK(g_recorder.maps.at(4).l2_promotion == 2);
  // Where the result is computed transposed, b is what is read ahead.
  args.kernel = "nt_transposed";
  CHECK_OK(gemm(args, nullptr));
  CHECK(g_recorder.launches.at(2).grid[0] == 2 * 4);
  CHECK(g_recorder.maps.at(6).box[1] == 128);
  CHECK(g_recorder.maps.at(6).l2_promotion == 2);
  // What a kernel waits for is what its boxes have, of any number of rows.
  CHECK(g_recorder.maps.at(7).box[1] == 96);
  CHECK(g_recorder.maps.at(7).l2_promotion == 3);

  // Clusters lie on multiprocessors that belong together: on 128 of 132.
  g_recorder.multiprocessors = 132;
  NewContext("sm_90", 200 * 1024);
  args = Args(256 * 40, 1000, 512);
  int launches = 0;
  for (const char* kernel : {"nt_pairs", "nt_fours"}) {
    args.kernel = kernel;
    CHECK_OK(gemm(args, nullptr));
    CHECK(g_recorder.launches.at(launches++).grid[0] ==
          (args.kernel == std::string("nt_pairs") ? 132 : 128));
  }
  args = Args(256, 1000, 512);
  args.kernel = "nt_fours";
  CHECK_OK(gemm(args, nullptr));
  CHECK(g_recorder.launches.at(launches).grid[0] == 4 * 4);

  // A multiprocessor holds two blocks that leave room for each other.
  args = Args(500, 1000, 512);
  args.kernel = "nt_mapped";
  g_recorder.multiprocessors = 5;
  for (int most : {300 * 1024 + 1023, 300 * 1024 + 1024}) {
    NewContext("sm_90", most);
    CHECK_OK(gemm(args, nullptr));
    CHECK(g_recorder.launches.at(0).grid[0] == (most % 2 == 0 ? 10 : 5));
  }

  // k of what is left of the last turn is divided, where there is room.
  g_recorder.multiprocessors = 14;
  args = Args(500, 1000, 8192);  // 4 * 4 tiles
  args.kernel = "nt_mapped";
  for (int64_t room : {1, 2 * 6 - 1, 2 * 6, 1 << 20}) {
    args.workspace_ptr = At(0x40000);
    args.workspace_bytes = room * 4 * 128 * 256;
    NewContext("sm_90", 200 * 1024);
    CHECK_OK(gemm(args, nullptr));
    const auto p = g_recorder.launches.at(0).As<MappedArgs>().params;
    CHECK(p.whole_tiles + p.divided_tiles == 16);
    CHECK(p.divided_tiles == (room == 1 ? 0 : 2));
    CHECK(p.splits == std::clamp<int64_t>(room / 2, 1, 7));
    CHECK(p.k_per_split >= 8192 / p.splits && p.k_per_split % 64 == 0);
    CHECK(g_recorder.launches.size() == (room == 1 ? 1 : 2));
    // What adds parts begins early, and waits.
    CHECK(!g_recorder.launches.at(0).early);
    CHECK(room == 1 || g_recorder.launches.at(1).early);
  }
  // So do short products, by kernels with maps.
  args = Args(300, 96, 64);
  for (const char* kernel : {"nt_mapped", "nt_sm_90"}) {
    args.kernel = kernel;
    CHECK_OK(gemm(args, nullptr));
    CHECK(g_recorder.launches.back().early == (args.kernel == "nt_mapped"));
  }
  g_recorder.multiprocessors = 0;
}

// What is asked without a call gets the answer that the call gets.
void TestProblems() {
  auto names = [](const char* type, std::vector<int64_t> dims,
                  std::vector<std::string> features = {},
                  const char* arch = "gfx942") {
    return Names(Problem{type, std::move(dims), std::move(features)}, arch);
  };
  CHECK(names("bf16", {8192, 8192, 4096}) == kNt256);
  CHECK(names("bf16", {1, 8192, 4096}) == kNt16);
  CHECK(names("bf16", {8192, 8192, 4100}) == kNtUnaligned);
  CHECK(names("bf16", {64, 64, 64}, {"nn"}) == "nn");
  CHECK(names("bf16", {64, 64, 64}, {"tn"}) == "tn");
  // Where the memory is what both wait for, the one that computes fewer rows.
  CHECK(names("bf16", {88, 13824, 8192}, {"nn"}, "sm_80") == "nn_96");
  CHECK(names("bf16", {64, 13824, 8192}, {"nn"}, "sm_80") == "nn_64");
  CHECK(names("i8", {512, 512, 512}, {"row"}) == "row_i8");
  CHECK(names("e4m3fnuz", {512, 512, 512}, {"row"}) == "row_fnuz");
  CHECK(names("e4m3fn", {512, 512, 512}, {"row"}) == "row_any");
  CHECK(names("e4m3fnuz", {512, 512, 512}, {"row", "a_fnuz"}) == "row_any");
  CHECK(names("e4m3fn", {512, 512, 512}, {"block"}) == "block_any");
  CHECK(names("e2m1", {512, 512, 512}, {"mx"}) == "mx");
  CHECK(names("bf16", {4096, 4096, 512, 3}, {}, "sm_90") == "nt_mapped");
  CHECK(names("bf16", {4096, 4092, 512, 3}, {}, "sm_90") == "nt_mapped");
  // k counts rows there.
  CHECK(names("bf16", {4096, 512, 4093}, {"tn"}, "sm_90") == "tn_mapped");
  gemm_args args = Args(16, 256, 4096);
  AddWorkspace(16, &args);
  CHECK(names("bf16", {16, 256, 4096, 1, 16 * 4 * 16 * 256}) == Names(args));
  CHECK(Contains(Names(args), " sum"));
  // Sizes that are not known: a kernel for every size.
  CHECK(names("bf16", {-1, -1, -1}) == kNtUnaligned);
  CHECK(names("bf16", {-1, 8192, 4096, -1, -1}) == kNt16);
  CHECK(names("bf16", {}) == kNtUnaligned);
  CHECK(names("e2m1", {-1, -1, -1}, {"mx"}) == "mx");
  CHECK(names("bf16", {0, 64, 64}).empty());

  CHECK(Contains(names("i8", {8, 8, 8}), "a_type is i8"));
  CHECK(Contains(names("bf16", {8, 8, 8}, {"mx"}), "a_type is bf16"));
  CHECK(Contains(names("i8", {8, 8, 8}, {"row", "tn"}), "layout is kTN"));
  CHECK(Contains(names("bf16", {8, -2, 8}), "n is -2"));
  CHECK(Contains(names("bf16", {8, 8, 8, 1, 1, 1}), "number of dims is 6"));
  CHECK(Contains(names("bf16", {8, 8, 8}, {"nt"}), "features is nt"));
}

void TestEmpty() {
  NewContext("gfx942");
  for (gemm_args args : {Args(0, 8, 8), Args(8, 0, 8), Args(8, 8, 8, 0)}) {
    args.a_ptr = args.b_ptr = args.out_ptr = nullptr;
    CHECK_OK(gemm(args, nullptr));
    CHECK(Names(args).empty());
  }
  CHECK(g_recorder.launches.empty() && g_recorder.loads == 0);
  // The sum of nothing is 0, to which the bias is added.
  gemm_args args = Args(8, 8, 0);
  args.bias_ptr = At(0x70000);
  AddWorkspace(4, &args);
  CHECK_OK(gemm(args, nullptr));
  CHECK(g_recorder.launches.size() == 1);
  const auto p = g_recorder.launches[0].As<GemmParams>();
  CHECK(p.k == 0 && p.splits == 1 && p.k_per_split > 0 && p.flags == 1);
}

void TestFailures() {
  gemm_args args = Args(16, 256, 16384);
  AddWorkspace(16, &args);
  for (const char* call :
       {"current_context", "current_device", "describe_device", "module_load",
        "module_get_function", "launch"}) {
    NewContext("gfx942");
    g_recorder.failing = call;
    Status status = gemm(args, nullptr);
    CHECK(status.code() == StatusCode::kInternal);
    CHECK(Contains(status.message(), "planted") ||
          Contains(status.message(), "describe_device"));
    CHECK(g_recorder.launches.size() == (std::strcmp(call, "launch") == 0));
    g_recorder.failing.clear();
    CHECK_OK(gemm(args, nullptr));
  }
  NewContext("sm_90", 200 * 1024);
  g_recorder.failing = "encode_tensor_map";
  args = Args(64, 64, 64);
  args.kernel = "nt_mapped";
  Status status = gemm(args, nullptr);
  CHECK(status.code() == StatusCode::kInternal);
  CHECK(Contains(status.message(), "nt_mapped"));
  CHECK(g_recorder.launches.empty());
  g_recorder.failing.clear();
  CHECK_OK(gemm(args, nullptr));
}

void TestInvalidArguments() {
  NewContext("gfx942");
  struct Case {
    const char* says;
    gemm_args args;
    std::function<void(gemm_args*)> change;
  };
  const gemm_args plain = Args(64, 64, 64);
  const gemm_args row = RowArgs(64, 64, 64, DataType::kI8, DataType::kI8);
  const gemm_args block = BlockArgs(64, 64, 128);
  const gemm_args mx = MxArgs(64, 64, 64);
  const Case kCases[] = {
      {"a_type is fp32, but must be fp16 or bf16 without scales", plain,
       [](gemm_args* a) { a->a_type = DataType::kFp32; }},
      {"a_type is bf16, but must be i8, e4m3fn or e4m3fnuz with scales of rows",
       row, [](gemm_args* a) { a->a_type = DataType::kBf16; }},
      {"a_type is i8, but must be e4m3fn or e4m3fnuz with scales of blocks",
       block, [](gemm_args* a) { a->a_type = DataType::kI8; }},
      {"a_type is i8, but must be e2m1 with e8m0 scales", mx,
       [](gemm_args* a) { a->a_type = DataType::kI8; }},
      {"b_type is fp16, but must be a_type's", plain,
       [](gemm_args* a) { a->b_type = DataType::kFp16; }},
      {"b_type is i8, but must be e4m3fn or e4m3fnuz, as a_type is", block,
       [](gemm_args* a) { a->b_type = DataType::kI8; }},
      {"out_type is i8, but must be bf16, fp16 or fp32", row,
       [](gemm_args* a) { a->out_type = DataType::kI8; }},
      {"layout is kNN, but must be kNT with scaling", row,
       [](gemm_args* a) { a->layout = GemmLayout::kNN; }},
      {"layout is kTN, but must be kNT with scaling", mx,
       [](gemm_args* a) { a->layout = GemmLayout::kTN; }},
      {"m is -1, but must be from 0 to 2147418111", plain,
       [](gemm_args* a) { a->m = -1; }},
      {"n is 2147483647", plain, [](gemm_args* a) { a->n = INT32_MAX; }},
      {"k is 2147483648", plain, [](gemm_args* a) { a->k = int64_t{1} << 31; }},
      {"batch is -2", plain, [](gemm_args* a) { a->batch = -2; }},
      {"k is 63, but must be a multiple of 2 of e2m1", mx,
       [](gemm_args* a) { a->k = 63; }},
      {"stride_a is 63, but must be from 64 to 2147483647", plain,
       [](gemm_args* a) { a->stride_a = 63; }},
      {"stride_b is 31, but must be from 32 to", mx,
       [](gemm_args* a) { a->stride_b = 31; }},
      {"batch_stride_a is -1", plain,
       [](gemm_args* a) { a->batch_stride_a = -1; }},
      {"batch_stride_b is -1", plain,
       [](gemm_args* a) { a->batch_stride_b = -1; }},
      {"a_scale_ptr is given, but must be null without scaling", plain,
       [](gemm_args* a) { a->a_scale_ptr = At(16); }},
      {"b_scale_ptr is null, but must be given with scaling", row,
       [](gemm_args* a) { a->b_scale_ptr = nullptr; }},
      {"stride_a_scale is 2, but must be from 0 to 1", row,
       [](gemm_args* a) { a->stride_a_scale = 2; }},
      {"stride_b_scale is -1", block,
       [](gemm_args* a) { a->stride_b_scale = -1; }},
      {"k_stride_a_scale is -1", block,
       [](gemm_args* a) { a->k_stride_a_scale = -1; }},
      {"k_stride_b_scale is 2147483648", block,
       [](gemm_args* a) { a->k_stride_b_scale = int64_t{1} << 31; }},
      {"k_stride_b_scale is 2, but must be 1 with e8m0 scales", mx,
       [](gemm_args* a) { a->k_stride_b_scale = 2; }},
      {"batch_stride_a_scale is -1", row,
       [](gemm_args* a) { a->batch_stride_a_scale = -1; }},
      {"batch_stride_b_scale is -1", row,
       [](gemm_args* a) { a->batch_stride_b_scale = -1; }},
      {"workspace_bytes is -4", plain,
       [](gemm_args* a) { a->workspace_bytes = -4; }},
      {"workspace_ptr is null, but must be given with workspace_bytes > 0",
       plain, [](gemm_args* a) { a->workspace_bytes = 4; }},
      {"splits is 65, but must be from 0 to 64", plain,
       [](gemm_args* a) { a->splits = 65; }},
      {"splits is 3, but must be so few that their sums fit the workspace's "
       "12287 numbers",
       plain,
       [](gemm_args* a) {
         AddWorkspace(3, a);
         a->workspace_bytes -= 4;
         a->splits = 3;
       }},
      {"kernel is nobody, but must be one of this build", plain,
       [](gemm_args* a) { a->kernel = "nobody"; }},
      {"kernel is nn, but must be one that serves the call", plain,
       [](gemm_args* a) { a->kernel = "nn"; }},
      {"a_ptr is not aligned, but must be a multiple of 16 bytes", plain,
       [](gemm_args* a) { a->a_ptr = At(8); }},
      {"b_ptr is not aligned", plain, [](gemm_args* a) { a->b_ptr = At(8); }},
      {"a_scale_ptr is not aligned", row,
       [](gemm_args* a) { a->a_scale_ptr = At(8); }},
      {"b_scale_ptr is not aligned", row,
       [](gemm_args* a) { a->b_scale_ptr = At(8); }},
      {"bias_ptr is not aligned", plain,
       [](gemm_args* a) { a->bias_ptr = At(8); }},
      {"out_ptr is not aligned", plain,
       [](gemm_args* a) { a->out_ptr = At(8); }},
      {"workspace_ptr is not aligned", plain,
       [](gemm_args* a) { a->workspace_ptr = At(8); }},
  };
  for (const Case& c : kCases) {
    gemm_args args = c.args;
    CHECK_OK(gemm(args, nullptr));
    g_recorder.launches.clear();
    c.change(&args);
    CheckRefused(args, c.says);
    CHECK(Contains(Names(args), c.says));
  }
  // A grid of more blocks than a device takes is an error, not a wrong result.
  gemm_args args = Args(1 << 26, 1 << 26, 8);
  args.kernel = kNt128;
  CheckRefused(args, "is 274877906944, but kernel nt_128 takes");

  // A plan serves no other problem.
  GemmPlan plan;
  CHECK_OK(gemm_plan(plain, &plan));
  CHECK(gemm(Args(64, 64, 72), plan, nullptr).code() ==
        StatusCode::kFailedPrecondition);
  CHECK_OK(gemm(plain, plan, nullptr));
}

void TestThreads() {
  NewContext("gfx942");
  uint64_t context = g_context;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([context] {
      g_context = context;
      for (int64_t m = 1; m <= 100; ++m) {
        gemm_args args = Args(m, 64, 16384);
        AddWorkspace(8, &args);
        CHECK_OK(gemm_prepare(args));
        CHECK_OK(gemm(args, nullptr));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(g_recorder.launches.size() >= 800);
  // Once a kernel, however many plans there are.
  CHECK(g_recorder.loads <= 4);
}

}  // namespace

const KernelTable& GetKernelTable() {
  static const KernelTable table = [] {
    KernelTable all = TableOf(MakeKernels);
    all.tuned = kTuned;
    all.num_tuned = static_cast<int>(sizeof(kTuned) / sizeof(kTuned[0]));
    return all;
  }();
  return table;
}

}  // namespace aiter

int main() {
  aiter::SetDriverForTesting(&aiter::FakeDriver());
  aiter::TestSelection();
  aiter::TestTuned();
  aiter::TestParts();
  aiter::TestPacking();
  aiter::TestManyBatches();
  aiter::TestTensorMaps();
  aiter::TestProblems();
  aiter::TestEmpty();
  aiter::TestFailures();
  aiter::TestInvalidArguments();
  aiter::TestThreads();
  std::puts("PASS");
  return 0;
}
