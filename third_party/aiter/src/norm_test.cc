// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, grids and failures of norms, on a driver
// that only records what it is asked to do.

#include "aiter/norm.h"

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
#include "third_party/aiter/src/norm_params.h"

namespace aiter {
namespace {

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* op, const Grid& grid, int cols,
                 uint32_t excludes, int threads) {
    KernelInfo k = FakeKernel<NormParams>(blob, symbol, op, "gfx942", grid);
    k.num_dims = 1;
    k.dims[0] = cols;
    k.excludes = excludes;
    k.threads = threads;
    k.tile_m = 2;
    k.tile_n = 256;
    kernels.push_back(k);
  };
  constexpr uint32_t kLean = kNormUnaligned | kNormResidual;
  add("fwd_2048_lean", "norm_fwd", kNormFwdGrid, 2048, kLean, 256);
  add("fwd_2048", "norm_fwd", kNormFwdGrid, 2048, kNormUnaligned, 256);
  add("fwd_aligned", "norm_fwd", kNormFwdGrid, 0, kNormUnaligned, 256);
  add("fwd_any", "norm_fwd", kNormFwdGrid, 0, 0, 256);
  add("fwd_8192_walks", "norm_fwd", kNormFwdGridWalks, 8192, kNormUnaligned,
      512);
  add("fwd_2041_shifts", "norm_fwd", kNormFwdGridShifts, 2041, 0, 128);
  kernels.back().needs = kNormUnaligned;
  add("quant_any", "norm_quant", kNormQuantGrid, 0, 0, 256);
  add("dx_2048", "norm_bwd_dx", kNormBwdDxGrid, 2048, kNormUnaligned, 256);
  add("dx_3072", "norm_bwd_dx", kNormBwdDxGrid, 3072, kNormUnaligned, 128);
  kernels.back().tile_m = 1;
  add("dx_4096", "norm_bwd_dx", kNormBwdDxGrid, 4096, kNormUnaligned, 512);
  add("dx_8192_pairs", "norm_bwd_dx", kNormBwdDxGridPairs, 8192, kNormUnaligned,
      512);
  add("dx_6144", "norm_bwd_dx", kNormBwdDxGrid, 6144, kNormUnaligned, 512);
  kernels.back().occupancy = 2;
  add("dx_any", "norm_bwd_dx", kNormBwdDxGrid, 0, 0, 256);
  add("dx_121_shifts", "norm_bwd_dx", kNormBwdDxGrid, 121, 0, 256);
  kernels.back().needs = kNormUnaligned;
  add("parts", "norm_bwd_parts", kNormBwdPartsGrid, 0, 0, 128);
  add("dgamma", "norm_bwd_dgamma", kNormBwdDgammaGrid, 0, 0, 128);
  const std::vector<KernelInfo> same = kernels;
  for (KernelInfo k : same) {
    k.arch = "sm_90";
    kernels.push_back(k);
  }
  return kernels;
}

template <typename Args>
void Fill(Args* a, int64_t rows, int64_t cols) {
  a->rows = rows;
  a->cols = cols;
  a->gamma_ptr = At(0x1000);
}

norm_fwd_args Forward(int64_t rows, int64_t cols) {
  norm_fwd_args a;
  Fill(&a, rows, cols);
  a.x_ptr = At(0x2000);
  a.y_ptr = At(0x3000);
  a.mean_ptr = At(0x4000);
  a.rstd_ptr = At(0x5000);
  a.epsilon = 0.5f;
  return a;
}

norm_quant_args Quantised(int64_t rows, int64_t cols, DataType type) {
  norm_quant_args a;
  Fill(&a, rows, cols);
  a.quant_type = type;
  a.x_ptr = At(0x2000);
  a.q_ptr = At(0x3000);
  a.scale_ptr = At(0x4000);
  return a;
}

norm_bwd_args Backward(int64_t rows, int64_t cols, int64_t parts) {
  norm_bwd_args a;
  Fill(&a, rows, cols);
  a.s_ptr = At(0x2000);
  a.dy_ptr = At(0x3000);
  a.mean_ptr = At(0x4000);
  a.rstd_ptr = At(0x5000);
  a.dx_ptr = At(0x6000);
  a.dgamma_ptr = At(0x7000);
  a.dgamma_parts_ptr = At(0x8000);
  a.parts = parts;
  return a;
}

template <typename Args>
void AddResidual(Args* a) {
  a->residual_ptr = At(0x9000);
  a->residual_out_ptr = At(0xa000);
}

Status Call(const norm_fwd_args& args) { return norm_fwd(args, nullptr); }
Status Call(const norm_quant_args& args) { return norm_quant(args, nullptr); }
Status Call(const norm_bwd_args& args) { return norm_bwd(args, nullptr); }

// The names of the kernels that a call launches.
template <typename Args>
std::vector<std::string> Run(const Args& args) {
  g_recorder.launches.clear();
  CHECK_OK(Call(args));
  std::vector<std::string> names;
  for (const Launch& launch : g_recorder.launches) {
    names.push_back(launch.kernel);
  }
  return names;
}

NormParams Params(int launch) {
  return g_recorder.launches[launch].As<NormParams>();
}

using Names = std::vector<std::string>;

bool Says(const Status& status, const char* text) {
  return status.code() == StatusCode::kInvalidArgument &&
         Contains(status.message(), text);
}

void TestSelection() {
  NewContext("gfx942");
  CHECK(Run(Forward(8, 2048)) == Names{"fwd_2048_lean"});
  norm_fwd_args add = Forward(8, 2048);
  AddResidual(&add);
  CHECK(Run(add) == Names{"fwd_2048"});
  CHECK(Run(Forward(8, 8200)) == Names{"fwd_aligned"});
  CHECK(Run(Forward(8, 2041)) == Names{"fwd_2041_shifts"});
  CHECK(Run(Forward(8, 2047)) == Names{"fwd_any"});
  CHECK(Run(Quantised(8, 64, DataType::kI8)) == Names{"quant_any"});
  CHECK(Run(Backward(8, 64, 4)) == (Names{"dx_2048", "dgamma"}));
  CHECK(Run(Backward(8, 4096, 4)) == (Names{"dx_4096", "dgamma"}));
  CHECK(Run(Backward(8, 8200, 4)) == (Names{"parts", "dx_any", "dgamma"}));

  Names names;
  CHECK_OK(norm_fwd_kernels({"bf16", {2047}, {}}, "gfx942", &names));
  CHECK(names == Names{"fwd_any"});
  CHECK_OK(norm_fwd_kernels({"bf16", {2048}, {"layer"}}, "gfx942", &names));
  CHECK(names == Names{"fwd_2048_lean"});
  CHECK_OK(norm_fwd_kernels({"bf16", {2048}, {"residual"}}, "gfx942", &names));
  CHECK(names == Names{"fwd_2048"});
  CHECK_OK(norm_fwd_kernels({"bf16", {-1}, {}}, "gfx942", &names));
  CHECK(names == Names{"fwd_any"});
  CHECK_OK(norm_quant_kernels({"bf16", {64}, {}}, "gfx942", &names));
  CHECK(names == Names{"quant_any"});
  CHECK_OK(norm_bwd_kernels({"bf16", {9}, {}}, "gfx942", &names));
  CHECK(names == (Names{"dx_121_shifts", "dgamma"}));
  CHECK_OK(norm_bwd_kernels({"bf16", {129}, {}}, "gfx942", &names));
  CHECK(names == (Names{"parts", "dx_any", "dgamma"}));
  CHECK_OK(norm_bwd_kernels({"bf16", {4096}, {}}, "gfx942", &names));
  CHECK(names == (Names{"dx_4096", "dgamma"}));
  CHECK(Says(norm_fwd_kernels({"bf15", {64}, {}}, "gfx942", &names),
             "dtype is bf15"));
  CHECK(
      Says(norm_fwd_kernels({"bf16", {0}, {}}, "gfx942", &names), "cols is 0"));
  CHECK(Says(norm_fwd_kernels({"bf16", {64, 64}, {}}, "gfx942", &names),
             "number of dims is 2"));
  CHECK(Says(norm_fwd_kernels({"bf16", {64}, {"dropout"}}, "gfx942", &names),
             "features is dropout"));
  Status status = norm_fwd_kernels({"fp16", {64}, {}}, "gfx942", &names);
  CHECK(status.code() == StatusCode::kUnimplemented);
  CHECK(Contains(status.message(), "norm_fwd"));
}

void TestPacking() {
  NewContext("gfx942");
  norm_fwd_args fwd = Forward(41, 100);
  AddResidual(&fwd);
  fwd.beta_ptr = At(0xb000);
  fwd.is_layer_norm = fwd.is_gemma = fwd.is_t5 = fwd.weights_are_f32 = true;
  Run(fwd);
  CHECK(g_recorder.launches[0].grid[0] == 8);
  NormParams p = Params(0);
  CHECK(p.x_ptr == fwd.x_ptr && p.y_ptr == fwd.y_ptr);
  CHECK(p.gamma_ptr == fwd.gamma_ptr && p.gamma_f32_ptr == fwd.gamma_ptr);
  CHECK(p.beta_ptr == fwd.beta_ptr && p.beta_f32_ptr == fwd.beta_ptr);
  CHECK(p.residual_ptr == fwd.residual_ptr);
  CHECK(p.residual_out_ptr == fwd.residual_out_ptr);
  CHECK(p.mean_ptr == fwd.mean_ptr && p.rstd_ptr == fwd.rstd_ptr);
  CHECK(p.rows == 41 && p.cols == 100 && p.epsilon == 0.5f);
  CHECK(p.flags == (kNormUnaligned | kNormLayer | kNormResidual | kNormGemma |
                    kNormT5 | kNormBeta | kNormF32Weights));

  norm_quant_args quant = Quantised(8, 64, DataType::kE4m3fnuz);
  quant.x_scale_ptr = At(0xc000);
  Run(quant);
  p = Params(0);
  CHECK(p.q_ptr == quant.q_ptr && p.x_scale_ptr == quant.x_scale_ptr);
  CHECK(p.scale_ptr == quant.scale_ptr && p.scale_e8m0_ptr == quant.scale_ptr);
  CHECK(p.kind == 2 && p.flags == kNormXScale);
  Run(Quantised(8, 64, DataType::kE2m1));
  CHECK(Params(0).kind == 3);

  norm_bwd_args bwd = Backward(40, 64, 8);
  bwd.dresidual_out_ptr = At(0xd000);
  bwd.dbeta_ptr = At(0xe000);
  bwd.dbeta_parts_ptr = At(0xf000);
  Run(bwd);
  p = Params(0);
  CHECK(p.x_ptr == bwd.s_ptr && p.dy_ptr == bwd.dy_ptr);
  CHECK(p.dresidual_ptr == bwd.dresidual_out_ptr && p.dx_ptr == bwd.dx_ptr);
  CHECK(p.dgamma_parts_ptr == bwd.dgamma_parts_ptr);
  CHECK(p.dbeta_parts_ptr == bwd.dbeta_parts_ptr);
  CHECK(p.flags == (kNormResidual | kNormBeta));
  p = Params(1);
  CHECK(g_recorder.launches[1].grid[1] == 2);
  CHECK(p.dgamma_ptr == bwd.dgamma_ptr && p.dbeta_ptr == bwd.dbeta_ptr);
  CHECK(p.dgamma_f32_ptr == p.dgamma_ptr && p.dbeta_f32_ptr == p.dbeta_ptr);
  CHECK(p.flags == (kNormResidual | kNormBeta));
  bwd.sums_are_f32 = true;
  Run(bwd);
  CHECK(Params(0).flags == p.flags);
  CHECK(Params(1).flags == static_cast<int32_t>(p.flags | kNormF32Weights));
}

// As many parts as blocks run at once, and no more than there is room for.
void TestParts() {
  NewContext("sm_90");
  g_recorder.multiprocessors = 3;
  Run(Backward(40, 64, 8));  // Small blocks: two a multiprocessor.
  CHECK(g_recorder.launches[0].grid[0] == 6);
  CHECK(Params(0).parts == 6 && Params(0).rows_per_part == 7);
  CHECK(g_recorder.launches[1].grid[0] == 1 && Params(1).parts == 6);
  Run(Backward(40, 64, 4));
  CHECK(g_recorder.launches[0].grid[0] == 4 && Params(0).rows_per_part == 10);
  Run(Backward(40, 3072, 16));  // Smaller ones, of a row each: three.
  CHECK(g_recorder.launches[0].grid[0] == 9 && Params(0).rows_per_part == 5);
  Run(Backward(40, 4096, 8));
  CHECK(g_recorder.launches[0].grid[0] == 3 && Params(0).rows_per_part == 14);

  // On AMD as many as a unit's SIMDs have waves for, up to four each.
  NewContext("gfx942");
  g_recorder.multiprocessors = 3;
  Run(Backward(40, 4096, 8));
  CHECK(g_recorder.launches[0].grid[0] == 6);
  Run(Backward(40, 6144, 8));
  CHECK(g_recorder.launches[0].grid[0] == 3);
  NewContext("sm_90");
  g_recorder.multiprocessors = 3;

  // Two blocks share a part.
  Run(Backward(40, 8192, 8));
  CHECK(g_recorder.launches[0].grid[0] == 2);
  CHECK(Params(0).parts == 1 && Params(0).rows_per_part == 40);

  // Blocks that walk: a LayerNorm's have a multiprocessor each, others are
  // more; rows may be fewer.
  norm_fwd_args walk = Forward(40, 8192);
  walk.is_layer_norm = true;
  Run(walk);
  CHECK(g_recorder.launches[0].grid[0] == 3 && Params(0).max_blocks == 3);
  walk.is_layer_norm = false;
  Run(walk);
  CHECK(g_recorder.launches[0].grid[0] == 6 && Params(0).max_blocks == 6);
  walk.residual_ptr = At(0xd000);
  walk.residual_out_ptr = At(0xe000);
  Run(walk);
  CHECK(g_recorder.launches[0].grid[0] == 24 && Params(0).max_blocks == 24);
  Run(Forward(2, 8192));
  CHECK(g_recorder.launches[0].grid[0] == 2);
  Run(Forward(40, 2048));
  CHECK(g_recorder.launches[0].grid[0] == 20);

  // Rows that 8 does not divide: eighths of the blocks have rows of one place.
  Run(Forward(4, 100));
  CHECK(g_recorder.launches[0].grid[0] == 8);
  Run(Forward(99, 100));
  CHECK(g_recorder.launches[0].grid[0] == 8 && Params(0).max_blocks == 8);
  Run(Backward(4, 100, 12));
  CHECK(g_recorder.launches[0].grid[0] == 8);
  NewContext("sm_90");
  g_recorder.multiprocessors = 12;
  Run(Forward(999, 100));
  CHECK(g_recorder.launches[0].grid[0] == 48);
  Run(Backward(99, 100, 99));
  CHECK(g_recorder.launches[0].grid[0] == 24 && Params(1).parts == 24);
  Run(Backward(99, 100, 23));
  CHECK(g_recorder.launches[0].grid[0] == 16);
  NewContext("sm_90");
  g_recorder.multiprocessors = 3;

  // 33 tiles of columns, so 8 * 6 / 33 parts; dx has a block a row.
  Run(Backward(40, 8200, 8));
  CHECK(g_recorder.launches[0].grid[0] == 33);
  CHECK(g_recorder.launches[0].grid[1] == 2);
  CHECK(Params(0).parts == 2 && Params(0).rows_per_part == 20);
  CHECK(g_recorder.launches[1].grid[0] == 40);
  CHECK(Params(1).rows_per_part == 1);
  CHECK(g_recorder.launches[2].grid[0] == 33 && Params(2).parts == 2);
  Run(Backward(3 << 20, 8200, 8));
  CHECK(g_recorder.launches[1].grid[0] == 1 << 20);
  CHECK(Params(1).rows_per_part == 3);

  // What adds parts starts while they are made, where it can wait for them.
  CHECK(!g_recorder.launches[0].early && !g_recorder.launches[1].early);
  CHECK(g_recorder.launches[2].early);

  // Of AMD's, blocks of 1024 threads together share a unit.
  NewContext("gfx942");
  Run(Backward(40, 8200, 8));
  CHECK(!g_recorder.launches[2].early);
  Run(Backward(40, 64, 99));
  CHECK(Params(0).parts == 12 && Params(0).rows_per_part == 4);
  Run(Forward(40, 8192));
  CHECK(g_recorder.launches[0].grid[0] == 6 && Params(0).max_blocks == 6);
  Run(walk);
  CHECK(g_recorder.launches[0].grid[0] == 6);
  Run(Quantised(40, 64, DataType::kI8));
  CHECK(Params(0).max_blocks == 12);
  g_recorder.multiprocessors = 0;
}

void TestEmpty() {
  NewContext("gfx942");
  CHECK(Run(Forward(0, 64)).empty());
  CHECK(Run(Quantised(0, 64, DataType::kI8)).empty());
  // Sums over no rows are written all the same.
  CHECK(Run(Backward(0, 64, 1)).size() == 2);
}

void TestInvalidArguments() {
  constexpr Bad<norm_fwd_args> kForward[] = {
      {[](norm_fwd_args* a) { a->rows = -1; }, "rows is -1"},
      {[](norm_fwd_args* a) { a->cols = 0; }, "cols is 0"},
      {[](norm_fwd_args* a) { a->epsilon = -1; }, "epsilon is -1"},
      {[](norm_fwd_args* a) { a->residual_ptr = At(0x10); },
       "residual_out_ptr is null"},
      {[](norm_fwd_args* a) { a->x_ptr = At(0x2008); }, "x_ptr is not aligned"},
      {[](norm_fwd_args* a) { a->y_ptr = At(0x2008); }, "y_ptr is not aligned"},
  };
  constexpr Bad<norm_quant_args> kQuantised[] = {
      {[](norm_quant_args* a) { a->quant_type = DataType::kBf16; },
       "quant_type is bf16"},
      {[](norm_quant_args* a) {
         a->quant_type = DataType::kE2m1;
         a->cols = 40;
       },
       "cols is 40, but must be a multiple of 32"},
      {[](norm_quant_args* a) { a->q_ptr = At(0x3001); },
       "q_ptr is not aligned"},
  };
  constexpr Bad<norm_bwd_args> kBackward[] = {
      {[](norm_bwd_args* a) { a->parts = 0; }, "parts is 0"},
      {[](norm_bwd_args* a) { a->cols = 100; }, "parts is 4"},
      {[](norm_bwd_args* a) { a->dbeta_ptr = At(0x10); },
       "dbeta_parts_ptr is null"},
      {[](norm_bwd_args* a) { a->dx_ptr = At(0x18); }, "dx_ptr is not aligned"},
  };
  NewContext("gfx942");
  CheckRefused(Forward(8, 64), kForward);
  CheckRefused(Quantised(8, 64, DataType::kI8), kQuantised);
  CheckRefused(Backward(8, 64, 4), kBackward);

  NormFwdPlan plan;
  CHECK_OK(norm_fwd_plan(Forward(8, 64), &plan));
  CHECK_OK(norm_fwd(Forward(9, 64), plan, nullptr));
  norm_fwd_args add = Forward(8, 64);
  AddResidual(&add);
  CHECK(norm_fwd(add, plan, nullptr).code() == StatusCode::kFailedPrecondition);
}

void TestFailures() {
  for (const char* call :
       {"current_context", "module_load", "module_get_function", "launch"}) {
    NewContext("gfx942");
    g_recorder.failing = call;
    CHECK(Call(Forward(8, 64)).code() == StatusCode::kInternal);
    CHECK(Call(Quantised(8, 64, DataType::kI8)).code() ==
          StatusCode::kInternal);
    CHECK(Call(Backward(8, 64, 4)).code() == StatusCode::kInternal);
    g_recorder.failing.clear();
    CHECK(Run(Backward(8, 64, 4)).size() == 2);
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
  aiter::TestParts();
  aiter::TestEmpty();
  aiter::TestInvalidArguments();
  aiter::TestFailures();
  std::puts("PASS");
  return 0;
}
