// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, grids and failures of sampling, on a
// driver that only records what it is asked to do.

#include "aiter/sampling.h"

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
#include "third_party/aiter/src/sampling_params.h"

namespace aiter {
namespace {

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* op, const Grid& grid,
                 int cols) {
    KernelInfo k = FakeKernel<SamplingParams>(blob, symbol, op, "gfx942", grid);
    k.num_dims = 1;
    k.dims[0] = cols;
    kernels.push_back(k);
  };
  add("largest", "sampling_largest", kSamplingLargestGrid, 0);
  add("bound", "sampling_bound", kSamplingBoundGrid, 0);
  add("gather", "sampling_gather", kSamplingGatherGrid, 0);
  add("weigh", "sampling_weigh", kSamplingWeighGrid, 0);
  add("histogram", "sampling_histogram", kSamplingHistogramGrid, 0);
  add("bracket", "sampling_bracket", kSamplingBracketGrid, 0);
  add("collect", "sampling_collect", kSamplingCollectGrid, 0);
  add("threshold", "sampling_threshold", kSamplingThresholdGrid, 0);
  add("race", "sampling_race", kSamplingRaceGrid, 0);
  add("pick", "sampling_pick", kSamplingPickGrid, 0);
  add("rank_64", "sampling_rank", kSamplingRankGrid, 64);
  add("rank_1024", "sampling_rank", kSamplingRankGrid, 1024);
  add("select", "sampling_select", kSamplingSelectGrid, 0);
  return kernels;
}

template <typename Args>
void SetRows(Args* a, int64_t rows, int64_t cols, int64_t parts) {
  a->rows = rows;
  a->cols = cols;
  a->parts = parts;
  a->logits_ptr = At(0x1000);
  a->best_ptr = At(0x2000);
  a->histogram_ptr = At(0x3000);
  a->candidates_ptr = At(0x4000);
  a->state_ptr = At(0x5000);
  a->maxima_ptr = At(0x11000);
  a->sums_ptr = At(0x12000);
}

sampling_draw_args Draw(int64_t rows = 3, int64_t cols = 10000,
                        int64_t parts = 4) {
  sampling_draw_args a;
  SetRows(&a, rows, cols, parts);
  a.keys_ptr = At(0x6000);
  a.temperature_ptr = At(0x7000);
  a.tokens_ptr = At(0x8000);
  return a;
}

sampling_top_k_args TopK(int64_t k) {
  sampling_top_k_args a;
  SetRows(&a, 3, 10000, 4);
  a.k = k;
  a.values_ptr = At(0x6000);
  a.columns_ptr = At(0x7000);
  return a;
}

sampling_select_args Select(int64_t k) {
  sampling_select_args a;
  a.rows = 3;
  a.cols = 1000;
  a.logits_ptr = At(0x1000);
  a.candidates_ptr = At(0x4000);
  a.k = k;
  a.spans_ptr = At(0x6000);
  a.columns_ptr = At(0x7000);
  return a;
}

using Names = std::vector<std::string>;

// The names of the kernels that were launched.
Names Launched() {
  Names names;
  for (const Launch& launch : g_recorder.launches) {
    names.push_back(launch.kernel);
  }
  return names;
}

Names Run(const sampling_draw_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(sampling_draw(args, nullptr));
  return Launched();
}

Names Run(const sampling_top_k_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(sampling_top_k(args, nullptr));
  return Launched();
}

Names Run(const sampling_select_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(sampling_select(args, nullptr));
  return Launched();
}

void TestSelection() {
  NewContext("gfx942");
  CHECK(Run(Draw()) == (Names{"largest", "race", "pick"}));
  sampling_draw_args a = Draw();
  a.of = SamplingOf::kLargest;
  CHECK(Run(a) == (Names{"largest", "pick"}));
  a = Draw();
  a.top_p_ptr = At(0x9000);
  CHECK(Run(a) == (Names{"largest", "bound", "gather", "weigh", "histogram",
                         "bracket", "collect", "threshold", "race", "pick"}));
  a.top_k_ptr = At(0xa000);
  a.is_k_first = true;
  CHECK(Run(a) == (Names{"largest", "bound", "gather", "weigh", "histogram",
                         "bracket", "collect", "threshold", "bracket",
                         "collect", "threshold", "race", "pick"}));
  a.of = SamplingOf::kLimit;
  a.is_k_first = false;
  CHECK(Run(a) == (Names{"largest", "bound", "gather", "weigh", "histogram",
                         "bracket", "collect", "threshold"}));
  const Names ranked = {"largest", "bound", "gather", "rank_64"};
  CHECK(Run(TopK(64)) == ranked);
  CHECK(Run(TopK(65)).back() == "rank_1024");
  // There may be fewer columns.
  CHECK(Run(Select(2048)) == Names{"select"});
  CHECK(Run(Draw(0)).empty());

  Names names;
  CHECK_OK(sampling_draw_kernels({"bf16", {0}, {"top_k", "mask"}}, "gfx942",
                                 &names));
  CHECK(names.size() == 10);
  CHECK_OK(sampling_top_k_kernels({"bf16", {50}, {}}, "gfx942", &names));
  CHECK(names == ranked);
  CHECK(sampling_top_k_kernels({"bf16", {2000}, {}}, "gfx942", &names).code() ==
        StatusCode::kUnimplemented);
  CHECK(sampling_draw_kernels({"fp16", {0}, {}}, "gfx942", &names).code() ==
        StatusCode::kUnimplemented);
}

void TestPacking() {
  NewContext("gfx942");
  sampling_draw_args a = Draw();
  a.top_k_ptr = At(0x9000);
  a.top_p_ptr = At(0xa000);
  a.min_p_ptr = At(0xb000);
  a.mask_ptr = At(0xc000);
  a.exponentials_ptr = At(0xd000);
  a.is_k_first = true;
  Run(a);
  const std::vector<Launch>& launches = g_recorder.launches;
  CHECK(launches[0].grid[0] == 3 && launches[0].grid[1] == 4);
  CHECK(launches[1].grid[0] == 3 && launches[1].grid[1] == 1);
  CHECK(launches[2].grid[0] == 3 && launches[2].grid[1] == 4);
  SamplingParams p = launches[11].As<SamplingParams>();
  CHECK(p.logits_ptr == a.logits_ptr && p.mask_ptr == a.mask_ptr);
  CHECK(p.keys_ptr == a.keys_ptr && p.tokens_ptr == a.tokens_ptr);
  CHECK(p.temperature_ptr == a.temperature_ptr && p.top_k_ptr == a.top_k_ptr);
  CHECK(p.top_p_ptr == a.top_p_ptr && p.min_p_ptr == a.min_p_ptr);
  CHECK(p.exponentials_ptr == a.exponentials_ptr && p.best_ptr == a.best_ptr);
  CHECK(p.histogram_ptr == a.histogram_ptr && p.state_ptr == a.state_ptr);
  CHECK(p.candidates_ptr == a.candidates_ptr && p.sums_ptr == a.sums_ptr);
  CHECK(p.maxima_ptr == a.maxima_ptr);
  CHECK(p.rows == 3 && p.cols == 10000 && p.parts == 4 && p.per_part == 4096);
  CHECK(p.flags ==
        (kSamplingAligned | kSamplingTopK | kSamplingTopP | kSamplingMinP |
         kSamplingMask | kSamplingGiven | kSamplingKFirst));
  // Phases, and which plane of `best` has the winners.
  CHECK(launches[5].As<SamplingParams>().phase == 0);
  CHECK(launches[8].As<SamplingParams>().phase == 1);
  CHECK(launches[12].As<SamplingParams>().plane == 1);
  a = Draw(3, 9999, 5);
  a.of = SamplingOf::kLargest;
  Run(a);
  p = launches[1].As<SamplingParams>();
  CHECK(p.plane == 0 && p.per_part == 2048 && p.flags == kSamplingGreedy);

  Run(TopK(50));
  p = launches[3].As<SamplingParams>();
  CHECK(p.k == 50 && p.values_ptr == At(0x6000) && p.tokens_ptr == At(0x7000));
  CHECK(p.flags == (kSamplingAligned | kSamplingRanked | kSamplingTopK));

  Run(Select(70));
  p = launches[0].As<SamplingParams>();
  CHECK(p.k == 70 && p.spans_ptr == At(0x6000) && p.tokens_ptr == At(0x7000));
  CHECK(p.candidates_ptr == At(0x4000) && p.flags == kSamplingAligned);
}

void TestInvalidArguments() {
  NewContext("gfx942");
  CheckRefused(Draw(-1), "rows is -1");
  CheckRefused(Draw(3, 0), "cols is 0");
  CheckRefused(Draw(3, (1 << 21) + 1, 64), "cols");
  CheckRefused(Draw(3, 100, 65), "parts is 65");
  CheckRefused(Draw(3, 100000, 1), "columns of a part");
  sampling_draw_args a = Draw();
  a.keys_ptr = nullptr;
  CheckRefused(a, "keys_ptr is null");
  a = Draw();
  a.temperature_ptr = nullptr;
  CheckRefused(a, "temperature_ptr is null");
  a = Draw();
  a.top_k_ptr = At(0x9000);
  a.is_k_first = true;
  CheckRefused(a, "is_k_first");
  a.is_k_first = false;
  a.state_ptr = nullptr;
  CheckRefused(a, "state_ptr is null");
  a = Draw();
  a.maxima_ptr = nullptr;
  CheckRefused(a, "maxima_ptr is null");
  a.of = SamplingOf::kLargest;
  CHECK(Run(a).size() == 2);
  g_recorder.launches.clear();
  a = Draw();
  a.of = SamplingOf::kLimit;
  CheckRefused(a, "top_k_ptr is null");
  a = Draw();
  a.tokens_ptr = nullptr;
  CheckRefused(a, "tokens_ptr is null");
  a = Draw();
  a.mask_ptr = At(0x9004);
  CheckRefused(a, "mask_ptr is not aligned");
  CheckRefused(TopK(0), "k is 0");
  CheckRefused(TopK(1025), "k is 1025");
  sampling_top_k_args b = TopK(101);
  b.cols = 100;
  CheckRefused(b, "k is 101");
  CheckRefused(Select(0), "k is 0");
  sampling_select_args c = Select(5);
  c.spans_ptr = nullptr;
  CheckRefused(c, "spans_ptr is null");
  c = Select(5);
  c.candidates_ptr = nullptr;
  CheckRefused(c, "candidates_ptr is null");
}

void TestFailures() {
  for (const char* call :
       {"current_context", "module_load", "module_get_function", "launch"}) {
    NewContext("gfx942");
    g_recorder.failing = call;
    CHECK(sampling_draw(Draw(), nullptr).code() == StatusCode::kInternal);
    CHECK(sampling_top_k(TopK(5), nullptr).code() == StatusCode::kInternal);
    g_recorder.failing.clear();
    CHECK(Run(Draw()).size() == 3);
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
  aiter::TestInvalidArguments();
  aiter::TestFailures();
  std::puts("PASS");
  return 0;
}
