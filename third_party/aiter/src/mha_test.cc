// SPDX-License-Identifier: Apache-2.0

// Kernel selection, argument packing and failures, on a driver that only
// records what it is asked to do.

#include "aiter/mha.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "aiter/device.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/grids.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/fake_driver_test.h"
#include "third_party/aiter/src/mha_one_pass_params.h"
#include "third_party/aiter/src/mha_params.h"

namespace aiter {
namespace {

// What the packing function of a kernel with tensor maps leaves behind.
struct MappedArgs {
  TensorMap q, k;
  MhaParams params;
};

void PackMapped(const void* params, const TensorMap* maps, void* buffer) {
  auto* args = new (buffer) MappedArgs;
  args->q = maps[0];
  args->k = maps[1];
  args->params = *static_cast<const MhaParams*>(params);
}

constexpr uint16_t kMappedOffsets[] = {0, sizeof(TensorMap),
                                       2 * sizeof(TensorMap)};

constexpr TensorMapSpec kMaps[] = {{kMhaTensorQ, 4, 128, {64, 64, 1, 1}},
                                   {kMhaTensorK, 4, 128, {64, 128, 1, 1}}};
constexpr TensorMapSpec kBiasMaps[] = {
    {kMhaTensorQ, 4, 128, {64, 64, 1, 1}},
    {kMhaTensorBias, 4, 128, {64, 64, 1, 1}}};

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* op, const char* grade,
                 const char* arch, int dqk, int dv, int tile_m, int tile_n,
                 const Grid& grid) -> KernelInfo& {
    KernelInfo k = FakeKernel<MhaParams>(blob, symbol, op, arch, grid);
    k.grade = grade;
    k.num_dims = 2;
    k.dims[0] = dqk;
    k.dims[1] = dv;
    if (k.grade == std::string("fast")) k.excludes = kMhaGeneralOnly;
    k.tile_m = static_cast<int16_t>(tile_m);
    k.tile_n = static_cast<int16_t>(tile_n);
    kernels.push_back(k);
    return kernels.back();
  };
  add("fwd_fast_128", "mha_fwd", "fast", "gfx942", 128, 128, 128, 64,
      kMhaFwdGridHeadsFirst);
  add("fwd_fast_192_128", "mha_fwd", "fast", "gfx942", 192, 128, 128, 64,
      kMhaFwdGridHeadsFirst);
  for (int block : {256, 64, 128, 32}) {
    static const char* const kNames[] = {"fwd_general_32", "fwd_general_64",
                                         "fwd_general_128", "fwd_general_256"};
    int i = block == 32 ? 0 : block == 64 ? 1 : block == 128 ? 2 : 3;
    add(kNames[i], "mha_fwd", "general", "gfx942", block, block, 64, 64,
        kMhaFwdGrid);
  }
  add("delta", "mha_bwd_delta", "general", "gfx942", 256, 256, 64, 0,
      kMhaBwdDeltaGrid);
  add("dkdv", "mha_bwd_dkdv", "general", "gfx942", 256, 256, 32, 64,
      kMhaBwdDkdvGrid);
  add("dq", "mha_bwd_dq", "general", "gfx942", 256, 256, 64, 32, kMhaBwdDqGrid);
  add("dbias", "mha_bwd_dbias", "general", "gfx942", 256, 256, 64, 32,
      kMhaBwdDbiasGrid);
  add("dsink", "mha_bwd_dsink", "general", "gfx942", 0, 0, 1024, 0,
      kMhaBwdDsinkGrid)
      .any_data_type = true;
  for (const char* arch : {"gfx942", "sm_90"}) {
    add("gaps", "mha_gaps", "general", arch, 0, 0, 32, 64, kMhaGapsGrid)
        .any_data_type = true;
  }
  for (bool exact : {false, true}) {
    KernelInfo& f32 =
        add(exact ? "fwd_f32_exact" : "fwd_f32", "mha_f32_fwd", "padded",
            "gfx942", 128, 128, 128, 32, kMhaF32FwdGrid);
    f32.data_type = DataType::kFp32;
    f32.excludes = kMhaF32GeneralOnly | (exact ? 0 : kMhaF32Exact);
  }
  auto add_one_pass = [&](const char* symbol, const char* op, const Grid& grid,
                          uint32_t needs = 0) {
    KernelInfo k =
        FakeKernel<MhaOnePassParams>(blob, symbol, op, "gfx942", grid);
    k.num_dims = 1;
    k.dims[0] = 128;
    k.tile_m = 64;
    k.tile_n = 128;
    k.needs = needs;
    k.excludes = kMhaOnePassGeneralOnly & ~needs;
    kernels.push_back(k);
  };
  add_one_pass("one_pass", "mha_one_pass_bwd", kMhaOnePassBwdGrid);
  kernels.back().excludes |= kMhaOnePassLengths;
  add_one_pass("one_pass_lengths", "mha_one_pass_bwd", kMhaOnePassBwdGrid);
  add_one_pass("one_pass_dropout", "mha_one_pass_bwd", kMhaOnePassBwdGrid,
               kMhaOnePassDropout);
  add_one_pass("one_pass_kept", "mha_one_pass_bwd", kMhaOnePassBwdGrid,
               kMhaOnePassDropout | kMhaOnePassKept);
  add_one_pass("round", "mha_one_pass_round", kMhaOnePassRoundGrid);
  add("dscores", "mha_dscores_bwd", "general", "gfx942", 128, 128, 64, 128,
      kMhaDscoresBwdGrid);
  add("dscores_tiles", "mha_dscores_bwd", "fast", "gfx942", 64, 64, 32, 128,
      kMhaDscoresBwdGridHeadsFirst)
      .excludes |= kMhaDscoresWhole;
  add("dscores_dq", "mha_dscores_dq", "general", "gfx942", 128, 128, 128, 64,
      kMhaDscoresDqGrid);
  KernelInfo& mapped = add("fwd_mapped", "mha_fwd", "fast", "sm_90", 128, 128,
                           128, 128, kMhaFwdGrid);
  mapped.excludes |= kMhaNoKeys;
  mapped.pack = PackMapped;
  mapped.arg_offsets = kMappedOffsets;
  mapped.num_args = 3;
  mapped.tensor_maps = kMaps;
  mapped.num_tensor_maps = 2;
  KernelInfo biased = mapped;
  biased.symbol = "fwd_bias";
  biased.needs = kMhaBias;
  biased.excludes &= ~static_cast<uint32_t>(kMhaBias);
  biased.grid = &kMhaFwdGridBatchFirst;
  biased.tensor_maps = kBiasMaps;
  kernels.push_back(biased);
  KernelInfo one_row = biased;
  one_row.symbol = "fwd_one_row";
  one_row.needs |= kMhaBiasF32 | kMhaMask | kMhaOneRow;
  one_row.excludes &= ~one_row.needs;
  kernels.push_back(one_row);
  KernelInfo walking = mapped;
  walking.symbol = "fwd_walks";
  walking.needs = kMhaSoftCap;
  walking.excludes &= ~static_cast<uint32_t>(kMhaSoftCap);
  walking.grid = &kMhaFwdGridWalks;
  kernels.push_back(walking);
  add("fwd_sm_90", "mha_fwd", "general", "sm_90", 128, 128, 128, 64,
      kMhaFwdGrid);
  add("fwd_sm_80", "mha_fwd", "general", "sm_80", 128, 128, 128, 64,
      kMhaFwdGrid)
      .shared_bytes = 96 * 1024;
  add("fwd_sm_80_small", "mha_fwd", "general", "sm_80", 256, 256, 64, 32,
      kMhaFwdGrid)
      .shared_bytes = 64 * 1024;
  return kernels;
}

// batch 2, 4 heads on 2, 200 rows on 300 keys; addresses as they come.
template <typename Args>
Args MakeArgs(int64_t hdim_q, int64_t hdim_v, bool packed = false) {
  Args a;
  a.is_group_mode = packed;
  a.q_ptr = At(0x1000);
  a.k_ptr = At(0x2000);
  a.v_ptr = At(0x3000);
  a.batch = 2;
  a.seqlen_q = 200;
  a.seqlen_k = 300;
  a.nhead_q = 4;
  a.nhead_k = 2;
  a.hdim_q = hdim_q;
  a.hdim_v = hdim_v;
  a.scale_s = 0.125f;
  auto strides = [](int64_t rows, int64_t heads, int64_t dim, int64_t* stride,
                    int64_t* nhead, int64_t* batch) {
    *stride = heads * dim;
    *nhead = dim;
    *batch = rows * heads * dim;
  };
  strides(200, 4, hdim_q, &a.stride_q, &a.nhead_stride_q, &a.batch_stride_q);
  strides(300, 2, hdim_q, &a.stride_k, &a.nhead_stride_k, &a.batch_stride_k);
  strides(300, 2, hdim_v, &a.stride_v, &a.nhead_stride_v, &a.batch_stride_v);
  strides(200, 4, hdim_v, &a.stride_o, &a.nhead_stride_o, &a.batch_stride_o);
  a.nhead_stride_lse = 200;
  a.batch_stride_lse = 800;
  if (packed) {
    a.seqstart_q_ptr = At(0x4000);
    a.seqstart_k_ptr = At(0x5000);
  }
  return a;
}

mha_fwd_args FwdArgs(int64_t hdim_q, int64_t hdim_v, bool packed = false) {
  auto a = MakeArgs<mha_fwd_args>(hdim_q, hdim_v, packed);
  a.o_ptr = At(0x6000);
  a.lse_ptr = At(0x7000);
  return a;
}

mha_bwd_args BwdArgs(int64_t hdim_q, int64_t hdim_v, bool packed = false) {
  auto a = MakeArgs<mha_bwd_args>(hdim_q, hdim_v, packed);
  a.do_ptr = At(0x8000);
  a.o_ptr = At(0x6000);
  a.lse_ptr = At(0x7000);
  a.dq_ptr = At(0x9000);
  a.dk_ptr = At(0xa000);
  a.dv_ptr = At(0xb000);
  a.d_ptr = At(0xc000);
  a.stride_do = a.stride_o;
  a.nhead_stride_do = a.nhead_stride_o;
  a.batch_stride_do = a.batch_stride_o;
  a.stride_dq = a.stride_q;
  a.nhead_stride_dq = a.nhead_stride_q;
  a.batch_stride_dq = a.batch_stride_q;
  a.stride_dk = a.stride_k;
  a.nhead_stride_dk = a.nhead_stride_k;
  a.batch_stride_dk = a.batch_stride_k;
  a.stride_dv = a.stride_v;
  a.nhead_stride_dv = a.nhead_stride_v;
  a.batch_stride_dv = a.batch_stride_v;
  return a;
}

std::string FwdKernel(const mha_fwd_args& args, const std::string& arch) {
  std::vector<std::string> names;
  Status status = mha_fwd_kernels(args, arch, &names);
  if (!status.ok()) return status.message();
  // A packed batch has a kernel for what is between sequences, too.
  CHECK(names.size() == (args.is_group_mode ? 2 : 1));
  return names[0];
}

void TestSelection() {
  // Exact head dims and no feature of the general grade: fast.
  CHECK(FwdKernel(FwdArgs(128, 128), "gfx942") == "fwd_fast_128");
  CHECK(FwdKernel(FwdArgs(192, 128), "gfx942") == "fwd_fast_192_128");
  CHECK(FwdKernel(FwdArgs(128, 128, true), "gfx942") == "fwd_fast_128");
  mha_fwd_args args = FwdArgs(128, 128);
  args.window_size_left = 16;
  args.window_size_right = 0;
  args.sink_ptr = At(0x100);
  args.cu_seqlen_k_ptr = At(0x200);
  CHECK(FwdKernel(args, "gfx942") == "fwd_fast_128");

  // The smallest general kernel that holds both head dims.
  CHECK(FwdKernel(FwdArgs(32, 32), "gfx942") == "fwd_general_32");
  CHECK(FwdKernel(FwdArgs(40, 8), "gfx942") == "fwd_general_64");
  CHECK(FwdKernel(FwdArgs(8, 72), "gfx942") == "fwd_general_128");
  CHECK(FwdKernel(FwdArgs(128, 136), "gfx942") == "fwd_general_256");

  // Each feature that the fast grade leaves out.
  std::vector<std::function<void(mha_fwd_args*)>> features = {
      [](mha_fwd_args* a) {
        a->bias_ptr = At(0x300);
        a->bias_batch = a->bias_nhead = 1;
      },
      [](mha_fwd_args* a) { a->mask_ptr = At(0x300); },
      [](mha_fwd_args* a) { a->alibi_slopes_ptr = At(0x300); },
      [](mha_fwd_args* a) { a->logits_soft_cap = 30; },
      [](mha_fwd_args* a) {
        a->p_drop = 0.5f;
        a->dropout_state_ptr = At(0x300);
      },
      [](mha_fwd_args* a) {
        a->sink_size = 4;
        a->window_size_left = 16;
      },
      [](mha_fwd_args* a) { a->scale_s = -1; },
  };
  for (const auto& feature : features) {
    args = FwdArgs(128, 128);
    feature(&args);
    CHECK(FwdKernel(args, "gfx942") == "fwd_general_128");
  }
  // Sink tokens say nothing where everything to the left is visible.
  args = FwdArgs(128, 128);
  args.sink_size = 4;
  CHECK(FwdKernel(args, "gfx942") == "fwd_fast_128");

  // Tensor maps cannot describe a tensor without rows.
  CHECK(FwdKernel(FwdArgs(128, 128), "sm_90") == "fwd_mapped");
  args = FwdArgs(128, 128);
  args.seqlen_k = 0;
  CHECK(FwdKernel(args, "sm_90") == "fwd_sm_90");

  // Planes of one row for all, where the call says what they are.
  args = FwdArgs(128, 128);
  args.seqlen_k = 304;
  args.bias_ptr = args.mask_ptr = At(0x300);
  args.bias_is_f32 = true;
  args.bias_batch = args.bias_nhead = 1;
  CHECK(FwdKernel(args, "sm_90") == "fwd_sm_90");
  args.is_one_row = true;
  CHECK(FwdKernel(args, "sm_90") == "fwd_one_row");

  // sm_80 objects run on every 8.x, sm_90 objects on 9.0 alone.
  CHECK(FwdKernel(FwdArgs(128, 128), "sm_80") == "fwd_sm_80");
  CHECK(FwdKernel(FwdArgs(128, 128), "sm_89") == "fwd_sm_80");
  for (const char* arch : {"sm_75", "sm_100", "sm_120", "gfx90a", "gfx9420"}) {
    std::string message = FwdKernel(FwdArgs(128, 128), arch);
    CHECK(Contains(message, arch));
    CHECK(Contains(message, "gfx942, sm_80, sm_90"));
  }
  // A device with less shared memory takes the kernel that fits.
  NewContext("sm_86", 80 * 1024);
  CHECK_OK(mha_fwd(FwdArgs(128, 128), nullptr));
  CHECK(g_recorder.launches.at(0).kernel == "fwd_sm_80_small");
  CHECK(g_recorder.allowed_shared == 64 * 1024);

  args = FwdArgs(128, 128);
  args.data_type = DataType::kFp16;
  CHECK(Contains(FwdKernel(args, "gfx942"), "fp16"));

  // Kernels of float32 are another family's, by how exact products are.
  args.data_type = DataType::kFp32;
  CHECK(FwdKernel(args, "gfx942") == "fwd_f32");
  args.is_exact = true;
  CHECK(FwdKernel(args, "gfx942") == "fwd_f32_exact");
  args.alibi_slopes_ptr = At(0x300);
  CHECK(Contains(FwdKernel(args, "gfx942"), "ALiBi"));
  std::vector<std::string> f32;
  CHECK_OK(mha_fwd_kernels({"fp32", {40, 128}, {"window", "exact"}}, "gfx942",
                           &f32));
  CHECK(f32 == std::vector<std::string>{"fwd_f32_exact"});

  mha_bwd_args bwd = BwdArgs(128, 128);
  bwd.sink_ptr = At(0x100);
  bwd.d_sink_ptr = At(0x110);
  bwd.bias_ptr = At(0x120);
  bwd.dbias_ptr = At(0x130);
  bwd.bias_batch = 1;
  bwd.bias_nhead = 4;
  std::vector<std::string> names;
  CHECK_OK(mha_bwd_kernels(bwd, "gfx942", &names));
  CHECK((names ==
         std::vector<std::string>{"delta", "dkdv", "dbias", "dsink", "dq"}));
}

void TestDensePacking() {
  NewContext("gfx942");
  mha_fwd_args args = FwdArgs(128, 128);
  args.window_size_left = 17;
  args.window_size_right = 0;
  int stream;
  CHECK_OK(mha_fwd(args, &stream));
  CHECK(g_recorder.fills.empty());
  CHECK(g_recorder.launches.size() == 1);
  const Launch& launch = g_recorder.launches[0];
  CHECK(launch.stream == &stream && launch.block == 256);
  CHECK(launch.shared == 1024);
  // nhead_q, tiles of 128 rows, batch.
  CHECK(launch.grid[0] == 4 && launch.grid[1] == 2 && launch.grid[2] == 2);
  const auto p = launch.As<MhaParams>();
  CHECK(p.q_ptr == At(0x1000) && p.k_ptr == At(0x2000));
  CHECK(p.v_ptr == At(0x3000) && p.out_ptr == At(0x6000));
  CHECK(p.lse_ptr == At(0x7000));
  CHECK(p.stride_q == 512 && p.nhead_stride_q == 128);
  CHECK(p.batch_stride_q == 200 * 512 && p.stride_k == 256);
  CHECK(p.batch_stride_k == 300 * 256 && p.nhead_stride_lse == 200);
  CHECK(p.batch == 2 && p.seqlen_q == 200 && p.seqlen_k == 300);
  CHECK(p.nhead_q == 4 && p.nhead_k == 2 && p.hdim_q == 128);
  CHECK(p.softmax_scale == 0.125f && p.logits_soft_cap == 0);
  CHECK(p.window_left == 17 && p.window_right == 0);
  CHECK(p.rp_keep == 1 && p.drop_threshold == 0 && p.flags == 0);

  args = FwdArgs(64, 64);
  args.bias_ptr = At(0x300);
  args.bias_is_f32 = true;
  args.bias_batch = 2;
  args.bias_nhead = 1;
  args.stride_bias = 300;
  args.batch_stride_bias = 60000;
  args.mask_ptr = At(0x380);
  args.stride_mask = 0;  // One row for all, and one column for each head.
  args.key_stride_mask = 0;
  args.nhead_stride_mask = 1;
  args.alibi_slopes_ptr = At(0x400);
  args.sink_ptr = At(0x500);
  args.p_drop = 0.75f;
  args.dropout_state_ptr = At(0x600);
  args.cu_seqlen_q_ptr = At(0x700);
  args.is_top_left = true;
  args.logits_soft_cap = 20;
  args.window_size_left = 1 << 20;
  args.sink_size = int64_t{1} << 40;
  CHECK_OK(mha_fwd(args, nullptr));
  const auto g = g_recorder.launches[1].As<MhaParams>();
  CHECK(g.flags == (1 | 2 | 4 | 8 | 16 | 64 | 1024 | 4096));
  CHECK(g.mask_ptr == At(0x380) && g.nhead_stride_mask == 1);
  CHECK(g.stride_mask == 0 && g.key_stride_mask == 0);
  CHECK(g.stride_bias == 300 && g.key_stride_bias == 1);
  CHECK(g.bias_ptr == At(0x300) && g.bias_f32_ptr == At(0x300));
  CHECK(g.cu_seqlens_q_ptr == At(0x700) && g.cu_seqlens_k_ptr == nullptr);
  CHECK(static_cast<uint32_t>(g.drop_threshold) == 0xc0000000u);
  CHECK(g.rp_keep == 4);
  CHECK(g.sink_tokens == 300);  // No more than there are keys.
  CHECK(g.window_left == 1 << 20);
  CHECK(g.window_right == 1 << 30);  // Unbounded.
}

void TestPackedPacking() {
  NewContext("gfx942");
  mha_fwd_args args = FwdArgs(128, 128, /*packed=*/true);
  CHECK_OK(mha_fwd(args, nullptr));
  std::vector<Launch>& launches = g_recorder.launches;
  CHECK(launches.size() == 2 && g_recorder.fills.empty());
  // Rows that no sequence has are made zero before; 256 words a row.
  CHECK(launches[0].kernel == "gaps" && launches[0].grid[0] == 7);
  const auto gaps = launches[0].As<MhaParams>();
  CHECK(gaps.words_ptr == At(0x6000) && gaps.row_words == 256);
  CHECK(gaps.lse_ptr == At(0x7000) && gaps.nhead_q == 4);
  // 200 / 128 slots and one a sequence; sequences are found by the blocks.
  const Launch& launch = launches[1];
  CHECK(launch.grid[0] == 4 && launch.grid[1] == 3 && launch.grid[2] == 1);
  const auto first = launch.As<MhaParams>();
  CHECK(first.flags == (32 | 64 | 128));
  CHECK(first.cu_seqlens_q_ptr == At(0x4000));
  CHECK(first.cu_seqlens_k_ptr == At(0x5000));
  CHECK(first.batch_stride_q == 0);

  args.cu_seqlen_q_ptr = At(0x4100);
  args.cu_seqlen_k_ptr = At(0x5100);
  CHECK_OK(mha_fwd(args, nullptr));
  const auto p = launches.at(3).As<MhaParams>();
  CHECK(p.flags == (32 | 64 | 128 | 256 | 512));
  CHECK(p.cu_seqlens_q_ptr == At(0x4100));
  CHECK(p.cu_seqlens_q_padded_ptr == At(0x4000));
  CHECK(p.cu_seqlens_k_padded_ptr == At(0x5000));

  args.data_type = DataType::kFp32;
  CHECK_OK(mha_fwd(args, nullptr));
  CHECK(launches.at(4).As<MhaParams>().row_words == 512);
}

void TestBackwardPacking() {
  NewContext("gfx942");
  mha_bwd_args args = BwdArgs(128, 128);
  args.bias_ptr = At(0x300);
  args.dbias_ptr = At(0x310);
  args.bias_batch = 1;
  args.bias_nhead = 4;
  args.sink_ptr = At(0x320);
  args.d_sink_ptr = At(0x330);
  args.alibi_slopes_ptr = At(0x340);
  args.dlse_ptr = At(0x350);
  CHECK_OK(mha_bwd(args, nullptr));
  CHECK(g_recorder.fills.empty());
  std::vector<Launch>& launches = g_recorder.launches;
  CHECK(launches.size() == 5);
  CHECK(launches[0].kernel == "delta" && launches[0].grid[0] == 4);
  CHECK(launches[1].kernel == "dkdv" && launches[1].grid[0] == 5);
  CHECK(launches[1].grid[1] == 2 && launches[1].grid[2] == 2);
  CHECK(launches[2].kernel == "dbias" && launches[2].grid[0] == 10);
  CHECK(launches[2].grid[1] == 4 && launches[2].grid[2] == 4);
  CHECK(launches[3].kernel == "dsink" && launches[3].grid[0] == 4);
  CHECK(launches[3].grid[1] == 2 && launches[3].grid[2] == 1);
  CHECK(launches[4].kernel == "dq" && launches[4].grid[0] == 4);
  const auto p = launches[2].As<MhaParams>();
  CHECK(p.flags == (1 | 4 | 8 | 2048));
  CHECK(p.do_ptr == At(0x8000) && p.out_ptr == At(0x6000));
  CHECK(p.delta_ptr == At(0xc000) && p.dlse_ptr == At(0x350));
  CHECK(p.dbias_ptr == At(0x310) && p.stride_dbias == 300);
  CHECK(p.nhead_stride_dbias == 60000 && p.batch_stride_dbias == 240000);
  CHECK(p.bias_batch == 1 && p.bias_nhead == 4);
  // Slopes' gradient was not asked for: it goes where nothing is read again.
  CHECK(launches[4].As<MhaParams>().d_slopes_ptr == At(0xc000));

  NewContext("gfx942");
  args = BwdArgs(64, 64, /*packed=*/true);
  args.sink_ptr = At(0x320);
  args.d_sink_ptr = At(0x330);
  CHECK_OK(mha_bwd(args, nullptr));
  CHECK(g_recorder.fills.empty() && launches.size() == 7);
  // What no sequence has, of dq, dk and dv.
  const void* const kGradients[] = {args.dq_ptr, args.dk_ptr, args.dv_ptr};
  for (int i = 0; i < 3; ++i) {
    CHECK(launches[i].kernel == "gaps");
    const auto gaps = launches[i].As<MhaParams>();
    CHECK(gaps.words_ptr == kGradients[i] && gaps.nhead_q == 0);
    CHECK(gaps.seqlen_q == (i == 0 ? 200 : 300));
    CHECK(gaps.cu_seqlens_q_ptr == At(i == 0 ? 0x4000 : 0x5000));
  }
  // dkdv: 300 / 64 slots and one a sequence.
  CHECK(launches[4].grid[0] == 6 && launches[4].grid[2] == 1);
  // d_sink: every sequence.
  CHECK(launches[5].kernel == "dsink" && launches[5].grid[1] == 2);
}

void TestOnePass() {
  mha_one_pass_args args;
  static_cast<mha_bwd_args&>(args) = BwdArgs(128, 128);
  args.dq_sums_ptr = At(0xd000);
  args.dk_sums_ptr = At(0xe000);
  args.dv_sums_ptr = At(0xf000);
  args.turns_ptr = At(0x100);
  args.is_top_left = true;
  NewContext("gfx942");
  CHECK_OK(mha_one_pass(args, nullptr));
  // In order, sums begin with the first part. 200 rows are two times 128, 300
  // keys three times.
  std::vector<Fill>& fills = g_recorder.fills;
  CHECK(fills.size() == 1 && fills[0].address == 0x100);
  CHECK(fills[0].bytes == 2 * (4 * 4 + 2 * 3) * 4);
  std::vector<Launch>& launches = g_recorder.launches;
  CHECK(launches.size() == 5 && launches[0].kernel == "delta");
  CHECK(launches[1].kernel == "one_pass" && launches[1].grid[0] == 3);
  CHECK(launches[1].grid[1] == 4 && launches[1].grid[2] == 2);
  CHECK(launches[1].As<MhaOnePassParams>().flags ==
        (kMhaOnePassOrdered | kMhaOnePassTopLeft));
  CHECK(launches[2].kernel == "round" && launches[2].grid[0] == 4);
  CHECK(launches[2].grid[1] == 4);
  const auto dq = launches[2].As<MhaOnePassParams>();
  CHECK(dq.dq_ptr == At(0x9000) && dq.dq_sums_ptr == At(0xd000));
  CHECK(launches[3].grid[0] == 5 && launches[3].grid[1] == 2);
  const auto dk = launches[3].As<MhaOnePassParams>();
  CHECK(dk.dq_ptr == At(0xa000) && dk.dq_sums_ptr == At(0xe000));
  CHECK(dk.seqlen_q == 300 && dk.softmax_scale == 0.125f);
  CHECK(dk.stride_dq == args.stride_dk);
  const auto dv = launches[4].As<MhaOnePassParams>();
  CHECK(dv.dq_ptr == At(0xb000) && dv.dq_sums_ptr == At(0xf000));
  CHECK(dv.softmax_scale == 1);

  // Of what dropout keeps the sums lack the factor.
  NewContext("gfx942");
  args.p_drop = 0.5f;
  args.dropout_state_ptr = At(0x340);
  CHECK_OK(mha_one_pass(args, nullptr));
  CHECK(launches[1].kernel == "one_pass_dropout");
  CHECK(launches[2].kernel == "round" && launches[4].kernel == "round");
  CHECK(launches[1].As<MhaOnePassParams>().softmax_scale == 0.125f);
  CHECK(launches[2].As<MhaOnePassParams>().softmax_scale == 0.25f);
  CHECK(launches[3].As<MhaOnePassParams>().softmax_scale == 0.25f);
  CHECK(launches[4].As<MhaOnePassParams>().softmax_scale == 2);

  // What it keeps is read: three blocks of keys by two of rows, a head.
  NewContext("gfx942");
  args.kept_ptr = At(0x360);
  CHECK_OK(mha_one_pass(args, nullptr));
  CHECK(launches[0].kernel == "delta" && launches[1].kernel == "one_pass_kept");
  const auto kept = launches[1].As<MhaOnePassParams>();
  CHECK(kept.kept_ptr == At(0x360) && kept.stride_kept == 3 * 256);
  CHECK(kept.nhead_stride_kept == 3 * 2 * 512);
  CHECK(kept.batch_stride_kept == 4 * 3 * 2 * 512);
  args.p_drop = 0;
  CHECK(Contains(mha_one_pass(args, nullptr).message(), "kept_ptr is given"));
  args.kept_ptr = nullptr;

  // Packed: 300 / 128 blocks of keys and one a sequence. The rows between
  // keys' sequences are zeros; queries' have none. What rounds dk takes keys'
  // lengths for queries'.
  NewContext("gfx942");
  mha_one_pass_args packed = args;
  static_cast<mha_bwd_args&>(packed) = BwdArgs(128, 128, /*packed=*/true);
  packed.cu_seqlen_k_ptr = At(0x240);
  packed.window_size_left = 7;
  CHECK_OK(mha_one_pass(packed, nullptr));
  CHECK(fills.size() == 1);
  CHECK(fills[0].bytes == (4 * 6 + 2 * 4) * 4);
  CHECK(launches[0].kernel == "gaps" && launches[1].kernel == "gaps");
  CHECK(launches[0].As<MhaParams>().words_ptr == packed.dk_ptr);
  CHECK(launches[2].kernel == "delta");
  CHECK(launches[3].kernel == "one_pass_lengths");
  CHECK(launches[3].grid[0] == 4 && launches[3].grid[2] == 1);
  CHECK(launches[4].grid[0] == 6 && launches[5].grid[0] == 8);
  const auto keys = launches[5].As<MhaOnePassParams>();
  CHECK(keys.cu_seqlens_q_ptr == At(0x240));
  CHECK(keys.cu_seqlens_q_padded_ptr == At(0x5000));
  CHECK((keys.flags & kMhaOnePassCuSeqlensQPadded) != 0);
  CHECK(keys.window_left > 1 << 20);

  // Without an order there are no turns, and sums begin with zeros.
  NewContext("gfx942");
  args.ordered = false;
  CHECK_OK(mha_one_pass(args, nullptr));
  CHECK(fills.size() == 3 && fills[0].address == 0xd000);
  CHECK(fills[0].bytes == 2 * 4 * 256 * 128 * 4);
  CHECK(fills[2].address == 0xf000 && fills[2].bytes == 2 * 2 * 384 * 128 * 4);
  CHECK(launches[1].As<MhaOnePassParams>().heads_of_block == 1);

  // Fewer columns have sums of the kernel's.
  NewContext("gfx942");
  args.hdim_q = args.hdim_v = 72;
  CHECK_OK(mha_one_pass(args, nullptr));
  CHECK(fills[0].bytes == 2 * 4 * 256 * 128 * 4);
  CHECK(launches[1].kernel == "one_pass");
  CHECK(launches[1].As<MhaOnePassParams>().hdim_q == 72);
  args.hdim_q = args.hdim_v = 128;

  // A block has all heads that share its keys, and these need no sums.
  NewContext("gfx942");
  args.turns_ptr = nullptr;
  args.dk_sums_ptr = args.dv_sums_ptr = nullptr;
  CHECK_OK(mha_one_pass(args, nullptr));
  CHECK(g_recorder.fills.size() == 1 && g_recorder.launches.size() == 3);
  CHECK(launches[1].As<MhaOnePassParams>().heads_of_block == 2);
  CHECK(launches[1].grid[1] == 2 && launches[2].grid[1] == 4);
  CHECK((g_recorder.launches[1].As<MhaOnePassParams>().flags &
         kMhaOnePassOrdered) == 0);

  // Nothing of the gradients asks for a positive scale.
  args.scale_s = -1;
  CHECK_OK(mha_one_pass(args, nullptr));
  args.scale_s = 0.125f;

  args.ordered = true;
  CHECK(Contains(mha_one_pass(args, nullptr).message(), "turns_ptr is null"));
  args.ordered = false;
  args.dv_sums_ptr = At(0xf000);
  CHECK(Contains(mha_one_pass(args, nullptr).message(), "dk_sums_ptr"));
  args.dv_sums_ptr = nullptr;
  args.alibi_slopes_ptr = At(0x340);
  CHECK(Contains(mha_one_pass(args, nullptr).message(), "dropout alone"));
  args.alibi_slopes_ptr = nullptr;
  args.seqlen_k = 0;
  CHECK(Contains(mha_one_pass(args, nullptr).message(), "above 0"));
}

void TestDscores() {
  mha_dscores_args args;
  static_cast<mha_bwd_args&>(args) = BwdArgs(128, 128);
  args.bias_ptr = At(0x120);
  args.bias_batch = 1;
  args.bias_nhead = 4;
  args.dscores_ptr = At(0x130);
  args.window_size_right = 0;
  NewContext("gfx942");
  CHECK_OK(mha_dscores(args, nullptr));
  CHECK(g_recorder.fills.empty());
  std::vector<Launch>& launches = g_recorder.launches;
  CHECK(launches.size() == 3 && launches[0].kernel == "delta");
  // 300 keys of two heads, 200 rows of four.
  CHECK(launches[1].kernel == "dscores" && launches[1].grid[0] == 3);
  CHECK(launches[1].grid[1] == 2 && launches[1].grid[2] == 2);
  CHECK(launches[2].kernel == "dscores_dq" && launches[2].grid[0] == 2);
  CHECK(launches[2].grid[1] == 4 && launches[2].grid[2] == 2);
  const auto params = launches[1].As<MhaParams>();
  CHECK(params.dbias_ptr == At(0x130) && params.stride_dbias == 300);
  CHECK(params.nhead_stride_dbias == 200 * 300);
  CHECK(params.batch_stride_dbias == 4 * 200 * 300);
  CHECK((params.flags & kMhaDscoresWhole) != 0);

  // Nothing of the gradients asks for a positive scale.
  args.scale_s = -1;
  CHECK_OK(mha_dscores(args, nullptr));
  args.scale_s = 0.125f;
  args.sink_ptr = At(0x140);
  CHECK(Contains(mha_dscores(args, nullptr).message(), "windows alone"));
  args.sink_ptr = nullptr;
  args.alibi_slopes_ptr = At(0x150);
  CHECK_OK(mha_dscores(args, nullptr));
  args.d_slopes_ptr = At(0x160);
  CHECK(
      Contains(mha_dscores(args, nullptr).message(), "d_slopes_ptr is given"));
  args.alibi_slopes_ptr = args.d_slopes_ptr = nullptr;
  args.bias_is_f32 = true;
  CHECK_OK(mha_dscores(args, nullptr));
  args.dbias_ptr = At(0x170);
  CHECK(Contains(mha_dscores(args, nullptr).message(), "one of their type"));
  args.bias_is_f32 = false;
  args.dbias_ptr = nullptr;
  args.dscores_ptr = nullptr;
  CHECK(Contains(mha_dscores(args, nullptr).message(), "dscores_ptr is null"));
  args.dscores_ptr = At(0x130);
  args.batch = 0;
  CHECK(Contains(mha_dscores(args, nullptr).message(), "above 0"));
}

// Padded ones' lengths move with the sequences. Packed ones have rows of their
// own in scratch: 200 / 128 blocks of 128 and one a sequence.
void TestDscoresOfLengths() {
  mha_dscores_args args;
  static_cast<mha_bwd_args&>(args) = BwdArgs(128, 128);
  args.cu_seqlen_q_ptr = At(0x200);
  args.cu_seqlen_k_ptr = At(0x240);
  args.dscores_ptr = At(0x40000);
  args.dscores_nhead = 4;
  NewContext("gfx942");
  CHECK_OK(mha_dscores(args, nullptr));
  std::vector<Launch>& launches = g_recorder.launches;
  CHECK(launches.size() == 5);
  const auto second = launches[3].As<MhaParams>();
  CHECK(second.cu_seqlens_q_ptr == At(0x204));
  CHECK(second.cu_seqlens_k_ptr == At(0x244));
  args.p_drop = 0.5f;
  args.dropout_state_ptr = At(0x30000);
  CHECK(Contains(mha_dscores(args, nullptr).message(), "with lengths"));

  mha_dscores_args packed;
  static_cast<mha_bwd_args&>(packed) = BwdArgs(128, 128, /*packed=*/true);
  packed.dscores_ptr = At(0x40000);
  packed.dscores_nhead = 2;
  packed.max_seqlen_k = 200;
  NewContext("gfx942");
  CHECK_OK(mha_dscores(packed, nullptr));
  // What no sequence has, delta, and two kv heads one after the other.
  CHECK(launches.size() == 8 && launches[3].kernel == "delta");
  CHECK(launches[6].kernel == "dscores" && launches[7].kernel == "dscores_dq");
  CHECK(launches[6].grid[0] == 300 / 128 + 2 && launches[6].grid[2] == 1);
  CHECK(launches[7].grid[0] == 200 / 128 + 2 && launches[7].grid[1] == 2);
  const auto params = launches[7].As<MhaParams>();
  CHECK(params.batch == 2 && params.stride_dbias == 256);
  CHECK(params.nhead_stride_dbias == 3 * 128 * 256);
  packed.max_seqlen_k = 0;
  CHECK(Contains(mha_dscores(packed, nullptr).message(), "max_seqlen_k"));
}

// As scratch, of a kv head's two query heads or of two sequences at a time.
void TestDscoresAtATime() {
  mha_dscores_args args;
  static_cast<mha_bwd_args&>(args) = BwdArgs(128, 64);
  args.bias_ptr = At(0x20000);
  args.bias_batch = 1;
  args.bias_nhead = 4;
  args.stride_bias = 300;
  args.nhead_stride_bias = 200 * 300;
  args.p_drop = 0.5f;
  args.dropout_state_ptr = At(0x30000);
  args.alibi_slopes_ptr = At(0x38000);
  args.mask_ptr = At(0x39000);
  args.stride_mask = 300;
  args.nhead_stride_mask = 200 * 300;
  args.dscores_ptr = At(0x40000);
  args.dscores_nhead = 3;
  NewContext("gfx942");
  CHECK_OK(mha_dscores(args, nullptr));
  std::vector<Launch>& launches = g_recorder.launches;
  CHECK(launches.size() == 9 && launches[0].kernel == "delta");
  CHECK(launches[7].kernel == "dscores" && launches[8].kernel == "dscores_dq");
  CHECK(launches[7].grid[1] == 1 && launches[7].grid[2] == 1);
  CHECK(launches[8].grid[1] == 2 && launches[8].grid[2] == 1);
  // Sequence 1, kv head 1; two bytes an element, four a word.
  for (const Launch* launch : {&launches[7], &launches[8]}) {
    const auto params = launch->As<MhaParams>();
    CHECK(params.batch == 1 && params.nhead_q == 2 && params.nhead_k == 1);
    CHECK(params.q_ptr == At(0x1000 + (200 * 4 + 2) * 128 * 2));
    CHECK(params.k_ptr == At(0x2000 + (300 * 2 + 1) * 128 * 2));
    CHECK(params.v_ptr == At(0x3000 + (300 * 2 + 1) * 64 * 2));
    CHECK(params.do_ptr == At(0x8000 + (200 * 4 + 2) * 64 * 2));
    CHECK(params.dq_ptr == At(0x9000 + (200 * 4 + 2) * 128 * 2));
    CHECK(params.dk_ptr == At(0xa000 + (300 * 2 + 1) * 128 * 2));
    CHECK(params.dv_ptr == At(0xb000 + (300 * 2 + 1) * 64 * 2));
    CHECK(params.lse_ptr == At(0x7000 + (4 + 2) * 200 * 4));
    CHECK(params.delta_ptr == At(0xc000 + (4 + 2) * 200 * 4));
    CHECK(params.bias_ptr == At(0x20000 + 2 * 200 * 300 * 2));
    CHECK(params.dropout_state_ptr == At(0x30000 + (4 + 2) * 6 * 4));
    CHECK(params.alibi_slopes_ptr == At(0x38000 + (4 + 2) * 4));
    CHECK(params.bias_f32_ptr == At(0x20000 + 2 * 200 * 300 * 4));
    CHECK(params.mask_ptr == At(0x39000 + 2 * 200 * 300));
    CHECK(params.dbias_ptr == At(0x40000) && params.stride_dbias == 384);
    CHECK(params.nhead_stride_dbias == 224 * 384);
    CHECK((params.flags & kMhaDscoresWhole) == 0);
  }

  args.batch = 3;
  args.dscores_nhead = 8;
  NewContext("gfx942");
  CHECK_OK(mha_dscores(args, nullptr));
  CHECK(launches.size() == 5);
  CHECK(launches[1].grid[1] == 2 && launches[1].grid[2] == 2);
  CHECK(launches[3].grid[1] == 2 && launches[3].grid[2] == 1);
  const auto params = launches[3].As<MhaParams>();
  CHECK(params.q_ptr == At(0x1000 + 2 * 200 * 4 * 128 * 2));
  CHECK(params.batch == 1 && params.nhead_q == 4);
  CHECK(params.batch_stride_dbias == 4 * 224 * 384);

  args.dscores_nhead = 1;
  CHECK(Contains(mha_dscores(args, nullptr).message(), "dscores_nhead is 1"));

  // What has tiles in an order of its own is for scratch alone.
  static_cast<mha_bwd_args&>(args) = BwdArgs(64, 64);
  args.dscores_nhead = 8;
  CHECK_OK(mha_dscores(args, nullptr));
  CHECK(launches.size() == 8 && launches[6].kernel == "dscores_tiles");
  CHECK(launches[6].grid[0] == 2 && launches[6].grid[1] == 3);
  args.dscores_nhead = 0;
  CHECK_OK(mha_dscores(args, nullptr));
  CHECK(launches.size() == 11 && launches[9].kernel == "dscores");
}

void TestTensorMaps() {
  NewContext("sm_90");
  CHECK_OK(mha_fwd(FwdArgs(128, 128), nullptr));
  CHECK(g_recorder.maps.size() == 2);
  const TensorMapCall k = g_recorder.maps[1];
  CHECK(k.address == At(0x2000) && k.type == 9 && k.swizzle == 3);
  CHECK(k.dims[0] == 128 && k.dims[1] == 300 && k.dims[2] == 2);
  CHECK(k.rank == 4 && k.dims[3] == 2 && k.strides[0] == 512 &&
        k.strides[1] == 256);
  CHECK(k.strides[2] == 300 * 512 && k.box[0] == 64 && k.box[1] == 128);
  CHECK(k.box[2] == 1 && k.box[3] == 1);
  const auto args = g_recorder.launches.at(0).As<MappedArgs>();
  CHECK(args.q.opaque[0] == 1 && args.k.opaque[0] == 2);
  CHECK(args.params.seqlen_k == 300);

  // A bias of one plane a head, for both batches: no stride between them.
  NewContext("sm_90");
  mha_fwd_args biased = FwdArgs(128, 128);
  biased.bias_ptr = At(0x300);
  biased.bias_batch = 1;
  biased.bias_nhead = 4;
  biased.stride_bias = 304;
  biased.key_stride_bias = 1;
  biased.nhead_stride_bias = 200 * 304;
  CHECK_OK(mha_fwd(biased, nullptr));
  CHECK(g_recorder.maps.size() == 2);
  const TensorMapCall bias = g_recorder.maps[1];
  CHECK(bias.address == At(0x300) && bias.rank == 4 && bias.dims[0] == 300);
  CHECK(bias.dims[1] == 200 && bias.dims[2] == 4 && bias.dims[3] == 2);
  CHECK(bias.strides[0] == 608 && bias.strides[1] == 200 * 608);
  CHECK(bias.strides[2] == 0);
  // Blocks of a plane follow each other.
  const auto& blocks = g_recorder.launches.at(0).grid;
  CHECK(blocks[0] == 2 && blocks[1] == 2 && blocks[2] == 4);

  // One that walks has a block for each multiprocessor, or each of 16 tiles.
  for (int there : {5, 100, 0}) {
    g_recorder.multiprocessors = there;
    NewContext("sm_90");
    mha_fwd_args capped = FwdArgs(128, 128);
    capped.logits_soft_cap = 5;
    CHECK_OK(mha_fwd(capped, nullptr));
    const Launch& launch = g_recorder.launches.at(0);
    CHECK(launch.kernel == "fwd_walks" && launch.grid[1] == 1);
    CHECK(launch.grid[0] == std::min<uint32_t>(std::max(there, 1), 16));
    CHECK(launch.As<MappedArgs>().params.multiprocessors == there);
  }
  NewContext("sm_90");
  CHECK_OK(mha_fwd(FwdArgs(128, 128), nullptr));

  // What dropout keeps goes where a mask would be.
  mha_fwd_args dropped = FwdArgs(128, 128);
  dropped.p_drop = 0.5f;
  dropped.dropout_state_ptr = At(0x340);
  dropped.kept_ptr = At(0x360);
  CHECK(Contains(mha_fwd(dropped, nullptr).message(),
                 "fwd_sm_90 does not write what dropout keeps"));
  dropped.mask_ptr = At(0x380);
  CHECK(Contains(mha_fwd(dropped, nullptr).message(), "kept_ptr is given"));

  CHECK_OK(mha_fwd(FwdArgs(128, 128, /*packed=*/true), nullptr));
  CHECK(g_recorder.maps[3].dims[3] == 1);
  CHECK(g_recorder.maps[3].strides[2] == 300 * 512);
}

void TestUneven() {
  NewContext("sm_90");
  const auto uneven = [](const mha_fwd_args& args) {
    MhaFwdPlan plan;
    CHECK_OK(mha_fwd_plan(args, &plan));
    return (plan.key.features & kMhaUneven) != 0;
  };
  mha_fwd_args args = FwdArgs(128, 128);
  CHECK(uneven(args));  // 16 tiles for 132 blocks.
  args.batch = 33;      // Two for each.
  CHECK(!uneven(args));
  args.batch = 2;  // Few, but of many rows.
  args.seqlen_q = args.seqlen_k = 4096;
  CHECK(!uneven(args));
  args.window_size_right = 0;  // 16 pairs of tiles of each of 8 heads.
  CHECK(!uneven(args));
  args.batch = 3;
  CHECK(uneven(args));
  args.batch = 2;
  args.window_size_left = 2000;
  CHECK(uneven(args));
  args.window_size_left = -1;
  args.seqlen_k = 4095;  // Its first row sees nothing.
  CHECK(uneven(args));
  args.seqlen_q = args.seqlen_k = 1024;
  CHECK(!uneven(args));
  args.seqlen_q = args.seqlen_k = 896;  // Short for a mask.
  CHECK(uneven(args));
}

void TestZeroSizes() {
  NewContext("gfx942");
  mha_fwd_args fwd = FwdArgs(128, 128);
  fwd.seqlen_q = 0;
  CHECK_OK(mha_fwd(fwd, nullptr));
  fwd = FwdArgs(128, 128);
  fwd.batch = 0;
  CHECK_OK(mha_fwd(fwd, nullptr));
  CHECK(g_recorder.launches.empty() && g_recorder.fills.empty());
  // No keys: the kernel writes out 0 and lse -inf, or the sink's logit.
  fwd = FwdArgs(128, 128);
  fwd.seqlen_k = 0;
  CHECK_OK(mha_fwd(fwd, nullptr));
  CHECK(g_recorder.launches.size() == 1);
  // Packed rows without any sequence.
  NewContext("gfx942");
  fwd = FwdArgs(128, 128, /*packed=*/true);
  fwd.batch = 0;
  CHECK_OK(mha_fwd(fwd, nullptr));
  CHECK(g_recorder.launches.empty() && g_recorder.fills.size() == 2);

  NewContext("gfx942");
  mha_bwd_args bwd = BwdArgs(128, 128);
  bwd.seqlen_q = 0;
  CHECK_OK(mha_bwd(bwd, nullptr));
  CHECK(g_recorder.launches.empty() && g_recorder.fills.size() == 2);
  CHECK(g_recorder.fills[0].address == 0xa000);
  CHECK(g_recorder.fills[0].bytes == 2 * 300 * 2 * 128 * 2);
  bwd = BwdArgs(128, 128);
  bwd.seqlen_k = 0;
  CHECK_OK(mha_bwd(bwd, nullptr));
  CHECK(g_recorder.launches.size() == 2);  // delta and dq
}

void TestFailures() {
  for (const char* call :
       {"current_context", "current_device", "describe_device", "module_load",
        "module_get_function", "launch", "memset_d8", "memset_d32"}) {
    NewContext("gfx942");
    mha_fwd_args args = FwdArgs(128, 128, /*packed=*/true);
    mha_bwd_args bwd = BwdArgs(128, 128, /*packed=*/true);
    // Only rows without any sequence are filled by the driver.
    if (Contains(call, "memset")) args.batch = bwd.batch = 0;
    g_recorder.failing = call;
    Status status = mha_fwd(args, nullptr);
    CHECK(status.code() == StatusCode::kInternal);
    CHECK(Contains(status.message(), "planted") ||
          Contains(status.message(), "describe_device"));
    if (std::string(call) != "memset_d32") CHECK(!mha_bwd(bwd, nullptr).ok());
    // A module without its function is not kept.
    bool lost = std::string(call) == "module_get_function";
    CHECK(g_recorder.unloads == (lost ? g_recorder.loads : 0));
    g_recorder.failing.clear();
    CHECK_OK(mha_fwd(args, nullptr));
    CHECK_OK(mha_bwd(bwd, nullptr));
  }
  for (const char* call : {"allow_shared", "encode_tensor_map"}) {
    bool mapped = std::string(call) == "encode_tensor_map";
    NewContext(mapped ? "sm_90" : "sm_80", 160 * 1024);
    g_recorder.failing = call;
    Status status = mha_fwd(FwdArgs(128, 128), nullptr);
    CHECK(status.code() == StatusCode::kInternal);
    CHECK(Contains(status.message(), "719 (planted)"));
    CHECK(g_recorder.unloads == (mapped ? 0 : 1));
    g_recorder.failing.clear();
    CHECK_OK(mha_fwd(FwdArgs(128, 128), nullptr));
  }
  int count = 0;
  CHECK_OK(device_count(&count));
  std::string arch;
  CHECK_OK(device_arch(1, &arch));
  CHECK(device_arch(2, &arch).code() == StatusCode::kInvalidArgument);
  CHECK(device_arch(-1, &arch).code() == StatusCode::kInvalidArgument);
}

void TestInvalidArguments() {
  NewContext("gfx942");
  struct Case {
    const char* says;
    std::function<void(mha_fwd_args*)> change;
  };
  const Case kCases[] = {
      {"hdim_q is 12, but must be a multiple of 8 from 8 to 256",
       [](mha_fwd_args* a) { a->hdim_q = 12; }},
      {"hdim_v is 264", [](mha_fwd_args* a) { a->hdim_v = 264; }},
      {"hdim_v is 0", [](mha_fwd_args* a) { a->hdim_v = 0; }},
      {"nhead_q is 4, but must be a multiple of nhead_k, which is 3",
       [](mha_fwd_args* a) { a->nhead_k = 3; }},
      {"nhead_k is 0", [](mha_fwd_args* a) { a->nhead_k = 0; }},
      {"seqlen_q is 2147483648",
       [](mha_fwd_args* a) { a->seqlen_q = int64_t{1} << 31; }},
      {"seqlen_k is -1", [](mha_fwd_args* a) { a->seqlen_k = -1; }},
      {"batch is 1073741824",
       [](mha_fwd_args* a) { a->batch = int64_t{1} << 30; }},
      {"batch is 70000, but kernel fwd_fast_128 takes at most 65535",
       [](mha_fwd_args* a) { a->batch = 70000; }},
      {"scale_s is nan", [](mha_fwd_args* a) { a->scale_s = std::nanf(""); }},
      {"logits_soft_cap is -1",
       [](mha_fwd_args* a) { a->logits_soft_cap = -1; }},
      {"p_drop is 1.000000, but must be in [0, 1)",
       [](mha_fwd_args* a) { a->p_drop = 1; }},
      {"p_drop is nan", [](mha_fwd_args* a) { a->p_drop = std::nanf(""); }},
      {"dropout_state_ptr is null", [](mha_fwd_args* a) { a->p_drop = 0.5; }},
      {"window_size_left is -2",
       [](mha_fwd_args* a) { a->window_size_left = -2; }},
      {"sink_size is -1", [](mha_fwd_args* a) { a->sink_size = -1; }},
      {"min_seqlen_q is -1", [](mha_fwd_args* a) { a->min_seqlen_q = -1; }},
      {"seqstart_q_ptr or seqstart_k_ptr is given",
       [](mha_fwd_args* a) { a->seqstart_k_ptr = At(16); }},
      {"seqstart_q_ptr or seqstart_k_ptr is null",
       [](mha_fwd_args* a) { a->is_group_mode = true; }},
      {"bias_batch is 3, but must be 1 or batch, which is 2",
       [](mha_fwd_args* a) {
         a->bias_ptr = At(16);
         a->bias_batch = 3;
       }},
      {"key_stride_bias is 2, but must be",
       [](mha_fwd_args* a) {
         a->bias_ptr = At(16);
         a->bias_batch = a->bias_nhead = 1;
         a->key_stride_bias = 2;
       }},
      {"stride_mask is -1",
       [](mha_fwd_args* a) {
         a->mask_ptr = At(16);
         a->stride_mask = -1;
       }},
      {"is_one_row is true, but must be false",
       [](mha_fwd_args* a) {
         a->mask_ptr = At(16);
         a->is_one_row = true;
       }},
      {"mask_ptr is given, but must be null in group mode",
       [](mha_fwd_args* a) {
         a->is_group_mode = true;
         a->seqstart_q_ptr = a->seqstart_k_ptr = a->mask_ptr = At(16);
       }},
      {"q_ptr is not aligned", [](mha_fwd_args* a) { a->q_ptr = At(8); }},
      {"stride_k is 4", [](mha_fwd_args* a) { a->stride_k = 4; }},
      {"stride_v is 4194304", [](mha_fwd_args* a) { a->stride_v = 1 << 22; }},
      {"batch_stride_o is -8", [](mha_fwd_args* a) { a->batch_stride_o = -8; }},
  };
  for (const Case& c : kCases) {
    mha_fwd_args args = FwdArgs(128, 128);
    c.change(&args);
    CheckRefused(args, c.says);
  }
  CHECK(g_recorder.launches.empty());

  mha_bwd_args bwd = BwdArgs(128, 128);
  bwd.dbias_ptr = At(16);
  CHECK(Contains(mha_bwd(bwd, nullptr).message(), "dbias_ptr is given"));
  bwd = BwdArgs(128, 128);
  bwd.d_sink_ptr = At(16);
  CHECK(Contains(mha_bwd(bwd, nullptr).message(), "d_sink_ptr is given"));
  bwd = BwdArgs(128, 128);
  bwd.dq_ptr = At(24);
  CHECK(Contains(mha_bwd(bwd, nullptr).message(), "dq_ptr is not aligned"));

  // A plan serves no other problem.
  MhaFwdPlan plan;
  CHECK_OK(mha_fwd_plan(FwdArgs(128, 128), &plan));
  CHECK(mha_fwd(FwdArgs(64, 64), plan, nullptr).code() ==
        StatusCode::kFailedPrecondition);
  CHECK_OK(mha_fwd(FwdArgs(128, 128), plan, nullptr));
}

void TestLargestSizes() {
  NewContext("gfx942");
  mha_fwd_args args = FwdArgs(64, 64);  // General: tiles on x.
  args.batch = 1;
  args.nhead_q = args.nhead_k = 1;
  args.seqlen_q = args.seqlen_k = (int64_t{1} << 30) - 1024;
  args.batch_stride_q = args.batch_stride_k = args.seqlen_q * 64;
  CHECK_OK(mha_fwd(args, nullptr));
  // A block of 256 threads: HIP's x dimension holds 2^24 - 1 of them.
  CHECK(g_recorder.launches.at(0).grid[0] == (1u << 24) - 16);
  CHECK(g_recorder.launches[0].As<MhaParams>().batch_stride_q ==
        (int64_t{1} << 36) - 65536);
}

void TestThreadsAndContexts() {
  NewContext("gfx942");
  uint64_t first = g_context;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([first] {
      g_context = first;
      for (int j = 0; j < 100; ++j) {
        CHECK_OK(mha_fwd(FwdArgs(128, 128), nullptr));
        CHECK_OK(mha_fwd(FwdArgs(64, 64), nullptr));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(g_recorder.launches.size() == 8 * 200);
  CHECK(g_recorder.loads == 2);  // Once a kernel.

  // Another device gets kernels of its own, and the first keeps its.
  NewContext("sm_90");
  CHECK_OK(mha_fwd(FwdArgs(128, 128), nullptr));
  g_context = first;
  CHECK_OK(mha_fwd(FwdArgs(128, 128), nullptr));
  CHECK(g_recorder.loads == 1);
  CHECK(g_recorder.launches.at(0).kernel == "fwd_mapped");
  CHECK(g_recorder.launches.at(1).kernel == "fwd_fast_128");
}

}  // namespace

const KernelTable& GetKernelTable() {
  static const KernelTable table = TableOf(MakeKernels);
  return table;
}

}  // namespace aiter

int main() {
  aiter::SetDriverForTesting(&aiter::FakeDriver());
  aiter::TestSelection();
  aiter::TestDensePacking();
  aiter::TestPackedPacking();
  aiter::TestBackwardPacking();
  aiter::TestOnePass();
  aiter::TestDscores();
  aiter::TestDscoresOfLengths();
  aiter::TestDscoresAtATime();
  aiter::TestTensorMaps();
  aiter::TestUneven();
  aiter::TestZeroSizes();
  aiter::TestFailures();
  aiter::TestInvalidArguments();
  aiter::TestLargestSizes();
  aiter::TestThreadsAndContexts();
  std::puts("PASS");
  return 0;
}
