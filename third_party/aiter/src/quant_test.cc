// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, grids and failures of quantisers, on a
// driver that only records what it is asked to do.

#include "aiter/quant.h"

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "aiter/status.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/grids.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/fake_driver_test.h"
#include "third_party/aiter/src/quant_params.h"

namespace aiter {
namespace {

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* op, const Grid& grid, int cols,
                 int tile_m, int tile_n, uint32_t needs = 0,
                 uint32_t excludes = 0) {
    KernelInfo k = FakeKernel<QuantParams>(blob, symbol, op, "gfx942", grid);
    k.num_dims = 1;
    k.dims[0] = cols;
    k.tile_m = static_cast<int16_t>(tile_m);
    k.tile_n = static_cast<int16_t>(tile_n);
    k.needs = needs;
    k.excludes = excludes;
    kernels.push_back(k);
  };
  add("row_1024", "quant_row", kQuantRowGrid, 1024, 4, 0);
  add("row_4096", "quant_row", kQuantRowGrid, 4096, 1, 0);
  add("row_any", "quant_row", kQuantRowGrid, 0, 1, 8192);
  add("group", "quant_group", kQuantGroupGrid, 0, 16, 256);
  add("mxfp4", "quant_group", kQuantGroupGrid, 0, 1, 1024, kQuantE2m1,
      kQuantShuffled);
  add("block", "quant_block", kQuantBlockGrid, 0, 128, 128);
  add("amax", "quant_amax", kQuantAmaxGrid, 0, 4, 4096);
  return kernels;
}

quant_args Args(QuantScale per, int64_t batch, int64_t rows, int64_t cols,
                int64_t scale_rows, int64_t scale_cols) {
  quant_args a;
  a.per = per;
  a.group = 128;
  a.batch = batch;
  a.rows = rows;
  a.cols = cols;
  a.x_ptr = At(0x1000);
  a.q_ptr = At(0x2000);
  a.scale_ptr = At(0x3000);
  a.scale_rows = scale_rows;
  a.scale_cols = scale_cols;
  a.stride_scale = scale_cols;
  a.col_stride_scale = 1;
  a.batch_stride_scale = scale_rows * scale_cols;
  return a;
}

quant_args Rows(int64_t batch, int64_t rows, int64_t cols) {
  return Args(QuantScale::kRow, batch, rows, cols, rows, 1);
}

quant_args Groups(int64_t batch, int64_t rows, int64_t cols) {
  return Args(QuantScale::kGroup, batch, rows, cols, rows, (cols + 127) / 128);
}

const Launch& Run(const quant_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(quant(args, nullptr));
  CHECK(g_recorder.launches.size() == 1);
  return g_recorder.launches[0];
}

void TestSelection() {
  NewContext("gfx942");
  for (const auto& [cols, kernel] :
       {std::pair<int64_t, std::string>(1, "row_1024"),
        {1024, "row_1024"},
        {1025, "row_4096"},
        {4096, "row_4096"},
        {4097, "row_any"}}) {
    CHECK(Run(Rows(1, 8, cols)).kernel == kernel);
    std::vector<std::string> names;
    CHECK_OK(quant_kernels({"bf16", {cols}, {}}, "gfx942", &names));
    CHECK(names == std::vector<std::string>{kernel});
  }
  CHECK(Run(Groups(1, 8, 300)).kernel == "group");
  CHECK(Run(Args(QuantScale::kBlock, 1, 8, 300, 1, 3)).kernel == "block");
  CHECK(Run(Args(QuantScale::kAmax, 1, 8, 5000, 8, 2)).kernel == "amax");
  quant_args given = Rows(1, 8, 64);
  given.scale_in_ptr = given.scale_ptr;
  given.scale_ptr = nullptr;
  const Launch& launch = Run(given);
  CHECK(launch.kernel == "group");
  CHECK(launch.As<QuantParams>().flags == kQuantStatic);

  std::vector<std::string> names;
  for (auto [features, kernel] :
       std::vector<std::pair<std::vector<std::string>, const char*>>{
           {{}, "row_any"},
           {{"static"}, "group"},
           {{"group"}, "group"},
           {{"block"}, "block"},
           {{"amax"}, "amax"}}) {
    CHECK_OK(quant_kernels({"bf16", {-1}, features}, "gfx942", &names));
    CHECK(names == std::vector<std::string>{kernel});
  }
  Status status = quant_kernels({"fp16", {8}, {}}, "gfx942", &names);
  CHECK(status.code() == StatusCode::kUnimplemented);
  CHECK(Contains(status.message(), "quant_row") &&
        Contains(status.message(), "fp16"));
}

void TestPacking() {
  NewContext("gfx942");
  quant_args a = Groups(3, 40, 300);
  a.q_type = DataType::kE4m3fnuz;
  a.scale_is_e8m0 = true;
  a.rounding = MxRounding::kEven;
  a.smooth_scale_ptr = At(0x4000);
  const Launch& launch = Run(a);
  // 3 times 3 tiles of 16 rows times 2 tiles of 256 columns.
  CHECK(launch.grid[0] == 18 && launch.grid[1] == 1 && launch.grid[2] == 1);
  QuantParams p = launch.As<QuantParams>();
  CHECK(p.x_ptr == a.x_ptr && p.q_ptr == a.q_ptr);
  CHECK(p.scale_ptr == a.scale_ptr && p.scale_e8m0_ptr == a.scale_ptr);
  CHECK(p.smooth_scale_ptr == a.smooth_scale_ptr && p.scale_in_ptr == nullptr);
  CHECK(p.rows == 40 && p.cols == 300 && p.tiles_m == 3 && p.tiles_n == 2);
  CHECK(p.scale_rows == 40 && p.scale_cols == 3);
  CHECK(p.stride_scale_m == 3 && p.stride_scale_n == 1);
  CHECK(p.batch_stride_scale == 120 && p.group == 128);
  CHECK(p.kind == kKindE4m3fnuz && p.mode == 2);
  CHECK(p.flags == (kQuantSmoothScale | kQuantE8m0 | kQuantUnaligned));

  // Each row is by itself: batches are one.
  p = Run(Rows(3, 40, 64)).As<QuantParams>();
  CHECK(p.rows == 120 && p.kind == kKindInt8 && p.flags == 0);
  CHECK(g_recorder.launches[0].grid[0] == 30);
  p = Run(Args(QuantScale::kAmax, 3, 40, 5000, 40, 2)).As<QuantParams>();
  CHECK(p.rows == 120 && p.tiles_n == 2);
  CHECK(g_recorder.launches[0].grid[0] == 60);

  // Tiles cover padding too.
  a = Args(QuantScale::kGroup, 2, 40, 64, 256, 8);
  a.group = 32;
  a.q_type = DataType::kE2m1;
  a.scale_is_e8m0 = a.scale_is_shuffled = true;
  p = Run(a).As<QuantParams>();
  CHECK(p.tiles_m == 16 && p.tiles_n == 1 && p.rows == 40);
  CHECK(p.flags == (kQuantE8m0 | kQuantShuffled));
  CHECK(g_recorder.launches[0].grid[0] == 32);
}

// A kernel whose tiles are of one row is given all rows as one.
void TestOneRow() {
  NewContext("gfx942");
  quant_args a = Args(QuantScale::kGroup, 2, 40, 96, 40, 3);
  a.group = 32;
  a.q_type = DataType::kE2m1;
  a.scale_is_e8m0 = true;
  CHECK(Run(a).kernel == "mxfp4");
  QuantParams p = Run(a).As<QuantParams>();
  CHECK(p.rows == 1 && p.cols == 2 * 40 * 96 && p.tiles_m == 1);
  CHECK(p.scale_rows == 1 && p.scale_cols == 2 * 40 * 3 && p.tiles_n == 8);
  CHECK(g_recorder.launches[0].grid[0] == 8);

  // Not where a group ends with a row, or scales are transposed or apart.
  quant_args cut = a;
  cut.cols = 80;
  quant_args transposed = a;
  transposed.stride_scale = 1;
  transposed.col_stride_scale = 40;
  quant_args apart = a;
  apart.batch_stride_scale = 128;
  for (const quant_args& each : {cut, transposed, apart}) {
    p = Run(each).As<QuantParams>();
    CHECK(p.rows == 40 && p.cols == each.cols && p.tiles_m == 40);
  }
}

void TestEmpty() {
  NewContext("gfx942");
  for (const quant_args& a : {Rows(0, 4, 4), Rows(2, 0, 4), Rows(2, 4, 0)}) {
    CHECK_OK(quant_prepare(a));
    CHECK_OK(quant(a, nullptr));
  }
  CHECK(g_recorder.launches.empty());
}

void TestInvalidArguments() {
  constexpr Bad<quant_args> kCases[] = {
      {[](quant_args* a) { a->rows = -1; }, "rows is -1"},
      {[](quant_args* a) { a->cols = int64_t{1} << 31; }, "cols is 2147483648"},
      {[](quant_args* a) { a->batch = -2; }, "batch is -2"},
      {[](quant_args* a) { a->data_type = DataType::kI8; }, "data_type is i8"},
      {[](quant_args* a) { a->q_type = DataType::kBf16; }, "q_type is bf16"},
      {[](quant_args* a) { a->q_type = DataType::kE2m1; },
       "scale_is_e8m0 is false"},
      {[](quant_args* a) {
         a->q_type = DataType::kE2m1;
         a->scale_is_e8m0 = true;
         a->cols = 255;
       },
       "cols is 255, but must be even"},
      {[](quant_args* a) { a->scale_is_e8m0 = true; }, "scale_is_e8m0 is true"},
      {[](quant_args* a) { a->scale_is_shuffled = true; },
       "scale_is_shuffled is true"},
      {[](quant_args* a) { a->per = static_cast<QuantScale>(4); }, "per is 4"},
      {[](quant_args* a) { a->rounding = static_cast<MxRounding>(7); },
       "rounding is 7"},
      {[](quant_args* a) { a->group = 48; }, "group is 48"},
      {[](quant_args* a) { a->scale_rows = 3; }, "scale_rows is 3"},
      {[](quant_args* a) { a->scale_cols = 3; }, "scale_cols is 3"},
      {[](quant_args* a) { a->stride_scale = -1; }, "stride_scale is -1"},
      {[](quant_args* a) { a->scale_in_ptr = a->scale_ptr; },
       "scale_in_ptr is given"},
      {[](quant_args* a) { a->x_ptr = At(0x1008); }, "x_ptr is not aligned"},
      {[](quant_args* a) { a->q_ptr = At(0x1001); }, "q_ptr is not aligned"},
  };
  NewContext("gfx942");
  const quant_args good = Groups(1, 8, 256);
  CheckRefused(good, kCases);
  // More tiles than 32 bits count.
  CheckRefused(Groups(1 << 20, 1 << 10, 1 << 13), "tiles is");

  KernelPlan plan;
  CHECK_OK(quant_plan(good, &plan));
  CHECK(quant(Rows(1, 8, 256), plan, nullptr).code() ==
        StatusCode::kFailedPrecondition);
  CHECK_OK(quant(Groups(2, 9, 112), plan, nullptr));
}

void TestFailures() {
  for (const char* call :
       {"current_context", "module_load", "module_get_function", "launch"}) {
    NewContext("gfx942");
    g_recorder.failing = call;
    CHECK(quant(Rows(1, 8, 64), nullptr).code() == StatusCode::kInternal);
    g_recorder.failing.clear();
    CHECK_OK(quant(Rows(1, 8, 64), nullptr));
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
  aiter::TestOneRow();
  aiter::TestEmpty();
  aiter::TestInvalidArguments();
  aiter::TestFailures();
  std::puts("PASS");
  return 0;
}
