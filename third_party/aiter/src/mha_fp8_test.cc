// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, grids, tensor maps and failures of
// float8 attention, on a driver that only records what it is asked to do.

#include "aiter/mha_fp8.h"

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "aiter/status.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/grids.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/fake_driver_test.h"
#include "third_party/aiter/src/mha_fp8_params.h"

namespace aiter {
namespace {

constexpr TensorMapSpec kMaps[] = {{kMhaFp8TensorQ, 4, 128, {128, 64, 1, 1}},
                                   {kMhaFp8TensorV, 4, 128, {128, 128, 1, 1}}};

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* arch, DataType type, int dim,
                 uint32_t needs, const Grid& grid) {
    KernelInfo k =
        FakeKernel<MhaFp8Params>(blob, symbol, "mha_fp8_fwd", arch, grid);
    k.data_type = type;
    k.grade = "padded";
    k.num_dims = 1;
    k.dims[0] = dim;
    k.needs = needs;
    k.excludes = needs & kMhaFp8Blocks ? 0 : kMhaFp8Blocks;
    k.tile_m = needs & kMhaFp8Short ? 64 : 128;
    kernels.push_back(k);
  };
  for (int dim : {64, 128}) {
    add(dim == 64 ? "narrow" : "wide", "gfx942", DataType::kE4m3fnuz, dim, 0,
        kMhaFp8FwdGridHeadsFirst);
  }
  add("blocks", "gfx942", DataType::kE4m3fnuz, 128, kMhaFp8Blocks,
      kMhaFp8FwdGridHeadsFirst);
  add("mapped", "sm_90", DataType::kE4m3fn, 128, 0, kMhaFp8FwdGridWalks);
  kernels.back().tensor_maps = kMaps;
  kernels.back().num_tensor_maps = 2;
  add("short", "sm_90", DataType::kE4m3fn, 128, kMhaFp8Short,
      kMhaFp8FwdGridLists);
  for (const char* arch : {"gfx942", "sm_90"}) {
    KernelInfo k = FakeKernel<MhaFp8Params>(blob, "columns", "mha_fp8_columns",
                                            arch, kMhaFp8ColumnsGrid);
    k.any_data_type = true;
    k.grade = "padded";
    k.num_dims = 1;
    k.dims[0] = 128;
    k.tile_n = 128;
    kernels.push_back(k);
  }
  return kernels;
}

mha_fp8_fwd_args Args(bool packed = false) {
  mha_fp8_fwd_args a;
  a.data_type = DataType::kE4m3fnuz;
  a.batch = 2;
  a.seqlen_q = 200;
  a.seqlen_k = 300;
  a.nhead_q = 4;
  a.nhead_k = 2;
  a.hdim = 128;
  a.hdim_v = 64;
  a.columns = packed ? 640 : 384;
  a.q_ptr = At(0x1000);
  a.k_ptr = At(0x2000);
  a.v_ptr = At(0x3000);
  a.v_columns_ptr = At(0xb000);
  a.out_ptr = At(0x4000);
  a.lse_ptr = At(0x5000);
  a.scales_ptr = At(0x6000);
  a.v_scales_ptr = At(0x7000);
  if (packed) {
    a.cu_seqlens_q_ptr = At(0x8000);
    a.cu_seqlens_k_ptr = At(0x9000);
  }
  return a;
}

// Attention's launch, which is behind that of its values' transposition.
const Launch& Run(const mha_fp8_fwd_args& args) {
  g_recorder.Clear();
  CHECK_OK(mha_fp8_fwd(args, nullptr));
  CHECK(g_recorder.launches.size() == 2);
  CHECK(g_recorder.launches[0].kernel == "columns");
  return g_recorder.launches[1];
}

void TestSelection() {
  NewContext("gfx942");
  CHECK(Run(Args()).kernel == "wide");
  mha_fp8_fwd_args a = Args();
  a.hdim = 48;
  CHECK(Run(a).kernel == "narrow");
  a.blocks = 3;
  CHECK(Run(a).kernel == "blocks");
  a = Args();
  a.data_type = DataType::kE4m3fn;
  CHECK(mha_fp8_fwd(a, nullptr).code() == StatusCode::kUnimplemented);
  a = Args();
  a.hdim = 256;
  CHECK(mha_fp8_fwd(a, nullptr).code() == StatusCode::kUnimplemented);
}

void TestPacking() {
  NewContext("gfx942");
  mha_fp8_fwd_args a = Args();
  a.window_right = 0;
  const Launch& dense = Run(a);
  // Heads, tiles of 128 rows, sequences.
  CHECK(dense.grid[0] == 4 && dense.grid[1] == 2 && dense.grid[2] == 2);
  const auto p = dense.As<MhaFp8Params>();
  CHECK(p.q_ptr == At(0x1000) && p.v_scales_ptr == At(0x7000));
  CHECK(p.v_rows_ptr == At(0x3000) && p.v_columns_ptr == At(0xb000));
  CHECK(p.v_ptr == At(0xb000));
  CHECK(p.batch == 2 && p.seqlen_k == 300 && p.columns == 384);
  const Launch& columns = g_recorder.launches[0];
  // Tiles of 128 columns, KV heads, sequences.
  CHECK(columns.grid[0] == 3 && columns.grid[1] == 2 && columns.grid[2] == 2);
  CHECK(p.window_left == 1 << 30 && p.window_right == 0 && p.flags == 0);

  a = Args(/*packed=*/true);
  a.sinks_ptr = At(0xa000);
  const Launch& packed = Run(a);
  // 200 / 128 slots, one a sequence and one for the rows of none.
  CHECK(packed.grid[1] == 4 && packed.grid[2] == 1);
  CHECK(g_recorder.launches[0].grid[0] == 5);
  CHECK(g_recorder.launches[0].grid[2] == 1);
  CHECK(packed.As<MhaFp8Params>().flags == (kMhaFp8Packed | kMhaFp8Sink));

  a = Args();
  a.batch = 0;
  g_recorder.Clear();
  CHECK_OK(mha_fp8_fwd(a, nullptr));
  CHECK(g_recorder.launches.empty());
}

void TestTensorMaps() {
  g_recorder.multiprocessors = 30;
  NewContext("sm_90");
  mha_fp8_fwd_args a = Args();
  a.data_type = DataType::kE4m3fn;
  a.seqlen_k = 2000;
  a.columns = 2048;
  // A block for each of two tiles of four heads of two sequences.
  CHECK(Run(a).grid[0] == 16 && g_recorder.launches.back().grid[1] == 1);
  // It waits itself for the values' columns.
  CHECK(!g_recorder.launches[0].early && g_recorder.launches[1].early);
  const TensorMapCall q = g_recorder.maps.at(0);
  CHECK(q.address == At(0x1000) && q.rank == 4);
  CHECK(q.dims[0] == 128 && q.dims[1] == 200 && q.dims[2] == 4);
  CHECK(q.dims[3] == 2 && q.strides[0] == 512 && q.strides[1] == 128);
  CHECK(q.strides[2] == 200 * 512);
  const TensorMapCall v = g_recorder.maps.at(1);
  CHECK(v.address == At(0xb000) && v.dims[0] == 2048 && v.dims[1] == 64);
  CHECK(v.dims[2] == 2 && v.strides[0] == 2048 && v.strides[1] == 64 * 2048);
  a = Args(/*packed=*/true);
  a.data_type = DataType::kE4m3fn;
  a.seqlen_k = 4000;
  a.columns = 4352;
  // 200 / 128 slots, one a sequence and one for the rows of none.
  CHECK(Run(a).grid[0] == 16);
  CHECK(g_recorder.maps.at(1).dims[3] == 1);
  g_recorder.multiprocessors = 0;
}

void TestShort() {
  NewContext("sm_90");
  mha_fp8_fwd_args a = Args();
  a.data_type = DataType::kE4m3fn;
  // A block for each of four tiles of four heads of two sequences.
  CHECK(Run(a).kernel == "short" && g_recorder.launches.back().grid[0] == 32);
  auto chosen = [&](int64_t rows, int64_t keys, int64_t left, int64_t right) {
    a.seqlen_q = rows;
    a.seqlen_k = keys;
    a.columns = (keys + 127) / 128 * 128;
    a.window_left = left;
    a.window_right = right;
    return Run(a).kernel;
  };
  CHECK(chosen(200, 1536, -1, -1) == "short");
  CHECK(chosen(200, 1537, -1, -1) == "mapped");
  // A causal mask hides half of the keys, a window all but its own.
  CHECK(chosen(3072, 3072, -1, 0) == "short");
  CHECK(chosen(3074, 3074, -1, 0) == "mapped");
  CHECK(chosen(8192, 8192, 700, 800) == "short");
  CHECK(chosen(8192, 8192, 800, 800) == "mapped");
  // One new row sees all.
  CHECK(chosen(1, 3000, -1, 0) == "mapped");

  a = Args(/*packed=*/true);
  a.data_type = DataType::kE4m3fn;
  // 200 / 64 slots, one a sequence and one for the rows of none.
  CHECK(Run(a).kernel == "short" && g_recorder.launches.back().grid[0] == 24);
}

void TestInvalidArguments() {
  NewContext("gfx942");
  auto refused = [](auto change, const char* name, bool packed = false) {
    mha_fp8_fwd_args a = Args(packed);
    change(&a);
    CheckRefused(a, name);
  };
  refused([](auto* a) { a->hdim = 72; }, "hdim");
  refused([](auto* a) { a->nhead_q = 3; }, "nhead_q");
  refused([](auto* a) { a->columns = 256; }, "columns");
  refused([](auto* a) { a->columns = 512; }, "columns", /*packed=*/true);
  refused([](auto* a) { a->cu_seqlens_k_ptr = nullptr; }, "cu_seqlens_k",
          /*packed=*/true);
  refused([](auto* a) { a->window_left = -2; }, "window_left");
  refused([](auto* a) { a->v_ptr = At(0x3001); }, "v_ptr");
  refused([](auto* a) { a->blocks = 0; }, "blocks");
}

void TestFailures() {
  for (const char* call : {"current_context", "module_load", "launch"}) {
    NewContext("gfx942");
    g_recorder.failing = call;
    CHECK(mha_fp8_fwd(Args(), nullptr).code() == StatusCode::kInternal);
    g_recorder.failing.clear();
    CHECK(Run(Args()).kernel == "wide");
  }
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
  aiter::TestPacking();
  aiter::TestTensorMaps();
  aiter::TestShort();
  aiter::TestInvalidArguments();
  aiter::TestFailures();
  std::puts("PASS");
  return 0;
}
