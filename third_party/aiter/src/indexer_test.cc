// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing and failures of the indexer's logits, on
// a driver that only records what it is asked.

#include "aiter/indexer.h"

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
#include "third_party/aiter/src/indexer_params.h"

namespace aiter {
namespace {

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  for (bool paged : {true, false}) {
    KernelInfo k = FakeKernel<IndexerParams>(blob, paged ? "paged" : "dense",
                                             "indexer_logits", "gfx942",
                                             kIndexerLogitsGrid);
    k.data_type = DataType::kE4m3fnuz;
    k.num_dims = 2;
    k.dims[0] = 64;
    k.dims[1] = 128;
    k.tile_m = paged ? 1 : 2;
    k.needs = paged ? kIndexerPaged : 0;
    k.excludes = paged ? 0 : kIndexerPaged | kIndexerTiles;
    kernels.push_back(k);
  }
  return kernels;
}

indexer_logits_args Dense() {
  indexer_logits_args a;
  a.data_type = DataType::kE4m3fnuz;
  a.sequences = 1;
  a.next_n = 5;
  a.heads = 64;
  a.dim = 128;
  a.cols = 1000;
  a.q_ptr = At(0x1000);
  a.k_ptr = At(0x2000);
  a.k_scale_ptr = At(0x3000);
  a.weights_ptr = At(0x4000);
  a.starts_ptr = At(0x5000);
  a.ends_ptr = At(0x6000);
  a.logits_ptr = At(0x7000);
  return a;
}

indexer_logits_args Paged() {
  indexer_logits_args a = Dense();
  a.sequences = 3;
  a.next_n = 2;
  a.pages = 10;
  a.page_size = 64;
  a.table_width = 16;
  a.k_scale_ptr = a.starts_ptr = nullptr;
  a.table_ptr = At(0x8000);
  return a;
}

std::string Run(const indexer_logits_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(indexer_logits(args, nullptr));
  return g_recorder.launches.empty() ? "" : g_recorder.launches[0].kernel;
}

void TestLaunch() {
  NewContext("gfx942");
  CHECK(Run(Dense()) == "dense");
  CHECK(g_recorder.launches[0].grid[0] == 2);  // Of 512 keys.
  CHECK(g_recorder.launches[0].grid[1] == 3);
  indexer_logits_args a = Paged();
  a.tiles = true;
  CHECK(Run(a) == "paged");
  CHECK(g_recorder.launches[0].grid[1] == 6);
  IndexerParams p = g_recorder.launches[0].As<IndexerParams>();
  CHECK(p.k_scale_ptr == a.k_ptr && p.k_page == 64 * 132);
  CHECK(p.scale_page == 16 * 132 && p.scale_start == 16 * 128);
  CHECK(p.flags == (kIndexerPaged | kIndexerTiles) && p.pages == 10);
  a = Dense();
  a.next_n = 1024;
  CHECK(Run(a) == "dense");
  CHECK(g_recorder.launches[0].grid[0] == 1);
  a.cols = 0;
  CHECK(Run(a).empty());
  a = Dense();
  a.heads = 65;
  CHECK(indexer_logits(a, nullptr).code() == StatusCode::kUnimplemented);
}

void TestInvalidArguments() {
  constexpr Bad<indexer_logits_args> kCases[] = {
      {[](indexer_logits_args* a) { a->data_type = DataType::kBf16; },
       "data_type is bf16"},
      {[](indexer_logits_args* a) { a->heads = 0; }, "heads is 0"},
      {[](indexer_logits_args* a) { a->dim = 24; }, "dim is 24"},
      {[](indexer_logits_args* a) { a->page_size = 3; }, "page_size is 3"},
      {[](indexer_logits_args* a) {
         a->page_size = 20;
         a->tiles = true;
       },
       "page_size is 20"},
      {[](indexer_logits_args* a) { a->page_size = 0; }, "page_size is 0"},
      {[](indexer_logits_args* a) { a->table_width = -1; },
       "table_width is -1"},
      {[](indexer_logits_args* a) { a->logits_ptr = At(0x18); },
       "logits_ptr is not aligned"},
  };
  NewContext("gfx942");
  CheckRefused(Paged(), kCases);
}

}  // namespace

const KernelTable& GetKernelTable() {
  static const KernelTable table = TableOf(MakeKernels);
  return table;
}

}  // namespace aiter

int main() {
  aiter::SetDriverForTesting(&aiter::FakeDriver());
  aiter::TestLaunch();
  aiter::TestInvalidArguments();
  std::puts("PASS");
  return 0;
}
