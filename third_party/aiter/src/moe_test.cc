// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, grids and failures of routing, on a
// driver that only records what it is asked to do.

#include "aiter/moe.h"

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
#include "third_party/aiter/src/moe_params.h"

namespace aiter {
namespace {

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* op, const Grid& grid,
                 int groups, int size, int tile_m, int tile_n) {
    KernelInfo k = FakeKernel<MoeParams>(blob, symbol, op, "gfx942", grid);
    k.num_dims = 2;
    k.dims[0] = groups;
    k.dims[1] = size;
    k.tile_m = tile_m;
    k.tile_n = tile_n;
    kernels.push_back(k);
  };
  add("few", "moe_topk", kMoeTopkGrid, 1, 64, 16, 0);
  add("many", "moe_topk", kMoeTopkGrid, 1, 256, 4, 0);
  add("groups", "moe_topk", kMoeTopkGrid, 8, 32, 4, 0);
  add("count", "moe_count", kMoeCountGrid, 0, 0, 128, 32);
  add("scan", "moe_scan", kMoeScanGrid, 0, 0, 64, 16);
  add("place", "moe_place", kMoePlaceGrid, 0, 0, 128, 32);
  return kernels;
}

moe_topk_args TopKArgs(int64_t rows, int64_t groups, int64_t size,
                       int64_t topk_groups, int64_t k) {
  moe_topk_args a;
  a.data_type = DataType::kBf16;
  a.rows = rows;
  a.groups = groups;
  a.size = size;
  a.topk_groups = topk_groups;
  a.k = k;
  a.scores_ptr = At(0x1000);
  a.ids_ptr = At(0x2000);
  return a;
}

moe_sort_args SortArgs(int64_t entries, int64_t experts, int64_t block) {
  moe_sort_args a;
  a.entries = entries;
  a.experts = experts;
  a.block = block;
  a.ids_ptr = At(0x1000);
  a.counts_ptr = At(0x2000);
  a.place_ptr = At(0x3000);
  a.order_ptr = At(0x4000);
  a.partial_ptr = At(0x5000);
  return a;
}

void TestTopK() {
  NewContext("gfx942");
  auto run = [](const moe_topk_args& args) {
    g_recorder.Clear();
    CHECK_OK(moe_topk(args, nullptr));
    CHECK(g_recorder.launches.size() == 1);
    return g_recorder.launches[0];
  };
  CHECK(run(TopKArgs(33, 1, 60, 1, 4)).kernel == "few");
  CHECK(run(TopKArgs(33, 1, 60, 1, 4)).grid[0] == 3);
  CHECK(run(TopKArgs(33, 1, 256, 1, 8)).kernel == "many");
  moe_topk_args a = TopKArgs(33, 8, 20, 4, 6);
  a.by_sum = true;
  Launch launch = run(a);
  CHECK(launch.kernel == "groups");
  MoeParams p = launch.As<MoeParams>();
  CHECK(p.rows == 33 && p.groups == 8 && p.size == 20 && p.topk_groups == 4 &&
        p.k == 6 && p.flags == static_cast<int32_t>(kMoeBySum));
  // More than any kernel holds.
  CHECK(moe_topk(TopKArgs(1, 1, 257, 1, 4), nullptr).code() ==
        StatusCode::kUnimplemented);
  for (const moe_topk_args& bad :
       {TopKArgs(1, 1, 8, 1, 9), TopKArgs(1, 4, 8, 5, 8),
        TopKArgs(-1, 1, 8, 1, 8), TopKArgs(1, 0, 8, 1, 8)}) {
    CHECK(moe_topk(bad, nullptr).code() == StatusCode::kInvalidArgument);
  }
}

void TestSort() {
  NewContext("gfx942");
  g_recorder.Clear();
  CHECK_OK(moe_sort(SortArgs(600, 40, 16), nullptr));
  CHECK(g_recorder.fills.empty());
  CHECK(g_recorder.launches.size() == 3);
  const unsigned blocks[] = {5, 3, 5};
  const char* names[] = {"count", "scan", "place"};
  for (int i = 0; i < 3; ++i) {
    CHECK(g_recorder.launches[i].kernel == names[i]);
    CHECK(g_recorder.launches[i].grid[0] == blocks[i]);
  }
  MoeParams p = g_recorder.launches[2].As<MoeParams>();
  CHECK(p.entries == 600 && p.experts == 40 && p.parts == 5 && p.block == 16);
  g_recorder.Clear();
  CHECK_OK(moe_sort(SortArgs(0, 40, 16), nullptr));
  CHECK(g_recorder.fills.size() == 1);
  CHECK(g_recorder.fills[0].bytes == 4 * 40 * 15);
  for (const moe_sort_args& bad :
       {SortArgs(-1, 4, 1), SortArgs(8, 0, 1), SortArgs(8, 4, 0)}) {
    CHECK(moe_sort(bad, nullptr).code() == StatusCode::kInvalidArgument);
  }
  std::vector<std::string> found;
  CHECK_OK(moe_sort_kernels({"bf16", {}, {}}, "gfx942", &found));
  CHECK(found == (std::vector<std::string>{"count", "scan", "place"}));
}

}  // namespace

const KernelTable& GetKernelTable() {
  static const KernelTable table = TableOf(MakeKernels);
  return table;
}

}  // namespace aiter

int main() {
  aiter::SetDriverForTesting(&aiter::FakeDriver());
  aiter::TestTopK();
  aiter::TestSort();
  std::puts("PASS");
  return 0;
}
