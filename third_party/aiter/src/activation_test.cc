// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, grids and failures of activations, on a
// driver that only records what it is asked to do.

#include "aiter/activation.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "aiter/status.h"
#include "third_party/aiter/src/activation_params.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/grids.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/fake_driver_test.h"

namespace aiter {
namespace {

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* op, const Grid& grid, int cols,
                 uint32_t excludes, uint32_t needs = 0) {
    KernelInfo k =
        FakeKernel<ActivationParams>(blob, symbol, op, "gfx942", grid);
    k.num_dims = 1;
    k.dims[0] = cols;
    k.excludes = excludes;
    k.needs = needs;
    k.tile_m = 2;
    k.tile_n = 256;
    kernels.push_back(k);
  };
  constexpr uint32_t kUnaligned = kActivationUnaligned;
  add("fwd_256", "activation_fwd", kActivationFwdGrid, 256, kUnaligned);
  add("fwd_aligned", "activation_fwd", kActivationFwdGrid, 0, kUnaligned);
  add("fwd_silu", "activation_fwd", kActivationFwdGridOnlySilu, 0,
      kUnaligned | kActivationBias, kActivationSilu);
  add("fwd_flat", "activation_fwd", kActivationFwdGridWidth, 64,
      kActivationRagged, kUnaligned);
  add("fwd_any", "activation_fwd", kActivationFwdGrid, 0, 0);
  add("bwd_any", "activation_bwd", kActivationBwdGrid, 0, 0);
  add("row_any", "activation_quant_row", kActivationQuantRowGrid, 0, 0);
  add("group_any", "activation_quant_group", kActivationQuantGroupGrid, 0, 0);
  return kernels;
}

template <typename Args>
Args Common(int64_t rows, int64_t cols) {
  Args a;
  a.rows = rows;
  a.cols = cols;
  a.gate_ptr = At(0x1000);
  a.is_packed = true;
  return a;
}

activation_fwd_args Forward(int64_t rows, int64_t cols) {
  auto a = Common<activation_fwd_args>(rows, cols);
  a.out_ptr = At(0x2000);
  return a;
}

activation_bwd_args Backward(int64_t rows, int64_t cols) {
  auto a = Common<activation_bwd_args>(rows, cols);
  a.dy_ptr = At(0x2000);
  a.dgate_ptr = At(0x3000);
  return a;
}

activation_quant_row_args Row(int64_t rows, int64_t cols) {
  auto a = Common<activation_quant_row_args>(rows, cols);
  a.q_ptr = At(0x2000);
  a.scale_ptr = At(0x3000);
  return a;
}

activation_quant_group_args Group(int64_t rows, int64_t cols) {
  auto a = Common<activation_quant_group_args>(rows, cols);
  a.quant_type = DataType::kE4m3fn;
  a.group = 128;
  a.q_ptr = At(0x2000);
  a.scale_ptr = At(0x3000);
  a.scale_rows = rows;
  a.scale_cols = (cols + 127) / 128;
  return a;
}

Status Call(const activation_fwd_args& a) { return activation_fwd(a, nullptr); }
Status Call(const activation_bwd_args& a) { return activation_bwd(a, nullptr); }
Status Call(const activation_quant_row_args& a) {
  return activation_quant_row(a, nullptr);
}
Status Call(const activation_quant_group_args& a) {
  return activation_quant_group(a, nullptr);
}

using Names = std::vector<std::string>;

// The names of the kernels that a call launches.
template <typename Args>
Names Run(const Args& args) {
  g_recorder.launches.clear();
  CHECK_OK(Call(args));
  Names names;
  for (const Launch& launch : g_recorder.launches) {
    names.push_back(launch.kernel);
  }
  return names;
}

ActivationParams Params() {
  return g_recorder.launches[0].As<ActivationParams>();
}

uint32_t Blocks() { return g_recorder.launches[0].grid[0]; }

void TestSelection() {
  NewContext("gfx942");
  CHECK(Run(Forward(8, 256)) == Names{"fwd_256"});
  CHECK(Run(Forward(8, 264)) == Names{"fwd_silu"});
  const unsigned* grid = g_recorder.launches[0].grid;
  CHECK(grid[0] == 2 && grid[1] == 4 && grid[2] == 1);
  Run(Forward(200000, 264));  // More than an axis has room for.
  grid = g_recorder.launches[0].grid;
  CHECK(grid[0] == 2 && grid[1] == 32768 && grid[2] == 4);
  auto gelu = Forward(8, 264);
  gelu.activation = Activation::kGelu;
  CHECK(Run(gelu) == Names{"fwd_aligned"});
  CHECK(Run(Forward(8, 260)) == Names{"fwd_any"});
  CHECK(Run(Forward(600, 60)) == Names{"fwd_flat"});
  CHECK(Blocks() == 141);  // Of 256 results each, of any rows.
  CHECK(Run(Forward(600, 58)) == Names{"fwd_any"});
  CHECK(Run(Backward(8, 256)) == Names{"bwd_any"});
  CHECK(Run(Row(8, 256)) == Names{"row_any"});
  CHECK(Run(Group(8, 256)) == Names{"group_any"});

  Names names;
  CHECK_OK(activation_fwd_kernels({"bf16", {256}, {}}, "gfx942", &names));
  CHECK(names == Names{"fwd_256"});
  CHECK_OK(activation_fwd_kernels({"bf16", {-1}, {}}, "gfx942", &names));
  CHECK(names == Names{"fwd_any"});
  Status status = activation_fwd_kernels({"fp16", {256}, {}}, "gfx942", &names);
  CHECK(status.code() == StatusCode::kUnimplemented);
  CHECK(Contains(status.message(), "activation_fwd"));
}

void TestPacking() {
  NewContext("gfx942");
  activation_fwd_args fwd = Forward(41, 600);
  fwd.activation = Activation::kSwiglu;
  fwd.alpha = 1.5f;
  fwd.gate_limit = 7;
  fwd.limit = 8;
  fwd.bias_ptr = At(0x4000);
  fwd.expert_ids_ptr = At(0x5000);
  fwd.bias_is_f32 = true;
  fwd.experts = 9;
  fwd.out_type = DataType::kFp16;
  Run(fwd);
  CHECK(Blocks() == 21 * 3);
  ActivationParams p = Params();
  CHECK(p.gate_ptr == fwd.gate_ptr && p.up_ptr == fwd.gate_ptr);
  CHECK(p.bias_ptr == fwd.bias_ptr && p.bias_f32_ptr == fwd.bias_ptr);
  CHECK(p.expert_ids_ptr == fwd.expert_ids_ptr && p.experts == 9);
  CHECK(p.out_fp16_ptr == fwd.out_ptr && p.out_bf16_ptr == fwd.out_ptr);
  CHECK(p.out_f32_ptr == fwd.out_ptr && p.out_ptr == fwd.out_ptr);
  CHECK(p.rows == 41 && p.cols == 600 && p.tiles_n == 3 && p.activation == 5);
  CHECK(p.alpha == 1.5f && p.gate_limit == 7 && p.up_limit == 8);
  CHECK(p.flags ==
        (kActivationGated | kActivationPacked | kActivationBias |
         kActivationBiasF32 | kActivationLimits | kActivationOutFp16));

  activation_fwd_args alone = Forward(41, 64);
  alone.is_packed = false;
  alone.out_type = DataType::kFp32;
  Run(alone);
  CHECK(Params().up_ptr == alone.gate_ptr);
  CHECK(std::isinf(Params().gate_limit) && std::isinf(Params().up_limit));
  CHECK(Params().flags == kActivationOutF32);

  activation_bwd_args bwd = Backward(40, 64);
  Run(bwd);
  p = Params();
  CHECK(p.dy_fp16_ptr == bwd.dy_ptr && p.dy_bf16_ptr == bwd.dy_ptr);
  CHECK(p.dy_f32_ptr == bwd.dy_ptr && p.dy_ptr == bwd.dy_ptr);
  CHECK(p.dgate_ptr == bwd.dgate_ptr && p.dup_ptr == bwd.dgate_ptr);
  CHECK(p.flags == (kActivationGated | kActivationPacked));
  bwd.is_packed = false;
  bwd.up_ptr = At(0x6000);
  bwd.dup_ptr = At(0x7000);
  Run(bwd);
  CHECK(Params().up_ptr == bwd.up_ptr && Params().dup_ptr == bwd.dup_ptr);
  CHECK(Params().flags == kActivationGated);

  Run(Row(41, 64));
  CHECK(Blocks() == 21 && Params().kind == 0);
  CHECK(Params().q_ptr == At(0x2000) && Params().scale_ptr == At(0x3000));

  activation_quant_group_args group = Group(40, 64);
  group.quant_type = DataType::kE2m1;
  group.rounding = MxRounding::kEven;
  group.group = 32;
  group.batch = 3;
  group.scale_rows = 256;
  group.scale_cols = 8;
  group.scale_is_e8m0 = group.scale_is_shuffled = true;
  Run(group);
  p = Params();
  CHECK(Blocks() == 3 * 128 && p.tiles_m == 128 && p.tiles_n == 1);
  CHECK(p.kind == 3 && p.mode == 2 && p.group == 32);
  CHECK(p.scale_e8m0_ptr == group.scale_ptr && p.scale_rows == 256);
  CHECK(p.scale_cols == 8 && p.rows == 40);
  CHECK(p.flags == (kActivationGated | kActivationPacked | kActivationE8m0 |
                    kActivationShuffled | kActivationShort));

  activation_quant_group_args given = Group(40, 64);
  given.scale_ptr = nullptr;
  given.scale_in_ptr = At(0x4000);
  given.scale_rows = given.scale_cols = given.group = 0;
  Run(given);
  CHECK(Params().scale_in_ptr == given.scale_in_ptr && Blocks() == 20);
  CHECK(Params().flags ==
        (kActivationGated | kActivationPacked | kActivationStatic));
}

// A kernel divides by the number of columns with these.
void TestInverse() {
  NewContext("gfx942");
  for (int64_t cols : {1, 2, 3, 7, 60, 333, 1001, 65535, 65536, 1 << 29}) {
    Run(Forward(1, cols));
    uint64_t inverse = static_cast<uint32_t>(Params().cols_inverse);
    for (int64_t quotient : {int64_t{0}, int64_t{1}, INT32_MAX / cols}) {
      for (int64_t n :
           {quotient * cols - 1, quotient * cols, quotient * cols + cols - 1}) {
        if (n < 0 || n > INT32_MAX) continue;
        uint64_t high = (2 * static_cast<uint64_t>(n) * inverse) >> 32;
        CHECK(high >> Params().cols_shift == static_cast<uint64_t>(n / cols));
      }
    }
  }
}

void TestEmpty() {
  NewContext("gfx942");
  CHECK(Run(Forward(0, 64)).empty());
  CHECK(Run(Forward(8, 0)).empty());
  CHECK(Run(Backward(0, 64)).empty());
  CHECK(Run(Row(0, 64)).empty());
  CHECK(Run(Group(0, 64)).empty());
}

void TestInvalidArguments() {
  using FwdArgs = activation_fwd_args;
  constexpr Bad<FwdArgs> kForward[] = {
      {[](FwdArgs* a) { a->rows = -1; }, "rows is -1"},
      {[](FwdArgs* a) { a->cols = 1 << 30; }, "cols is 1073741824"},
      {[](FwdArgs* a) { a->experts = -1; }, "experts is -1"},
      {[](FwdArgs* a) { a->activation = static_cast<Activation>(1); },
       "activation is 1"},
      {[](FwdArgs* a) { a->alpha = NAN; }, "alpha is nan"},
      {[](FwdArgs* a) { a->limit = -1; }, "limit is -1"},
      {[](FwdArgs* a) { a->gate_limit = NAN; }, "gate_limit is nan"},
      {[](FwdArgs* a) { a->up_ptr = At(0x10); }, "up_ptr is given"},
      {[](FwdArgs* a) { a->bias_ptr = At(0x10); }, "expert_ids_ptr is null"},
      {[](FwdArgs* a) { a->data_type = DataType::kI8; }, "data_type is i8"},
      {[](FwdArgs* a) { a->out_type = DataType::kI8; }, "out_type is i8"},
      {[](FwdArgs* a) { a->gate_ptr = At(0x1008); }, "gate_ptr is not aligned"},
      {[](FwdArgs* a) { a->out_ptr = At(0x2008); }, "out_ptr is not aligned"},
      {[](FwdArgs* a) {
         a->is_packed = false;
         a->bias_ptr = a->expert_ids_ptr = At(0x10);
       },
       "bias_ptr is given, but must be null without up"},
  };
  constexpr Bad<activation_bwd_args> kBackward[] = {
      {[](activation_bwd_args* a) { a->dy_type = DataType::kI8; },
       "dy_type is i8"},
      {[](activation_bwd_args* a) { a->dgate_ptr = At(0x18); },
       "dgate_ptr is not aligned"},
  };
  constexpr Bad<activation_quant_row_args> kRow[] = {
      {[](activation_quant_row_args* a) { a->quant_type = DataType::kE2m1; },
       "quant_type is e2m1"},
      {[](activation_quant_row_args* a) { a->q_ptr = At(0x3001); },
       "q_ptr is not aligned"},
  };
  using GroupArgs = activation_quant_group_args;
  constexpr Bad<GroupArgs> kGroup[] = {
      {[](GroupArgs* a) { a->quant_type = DataType::kBf16; },
       "quant_type is bf16"},
      {[](GroupArgs* a) { a->quant_type = DataType::kE2m1; },
       "scale_is_e8m0 is false"},
      {[](GroupArgs* a) {
         a->quant_type = DataType::kI8;
         a->scale_is_e8m0 = true;
       },
       "scale_is_e8m0 is true"},
      {[](GroupArgs* a) {
         a->quant_type = DataType::kE2m1;
         a->scale_is_e8m0 = true;
         a->cols = 63;
       },
       "cols is 63, but must be even"},
      {[](GroupArgs* a) { a->group = 48; }, "group is 48"},
      {[](GroupArgs* a) { a->batch = 0; }, "batch is 0"},
      {[](GroupArgs* a) { a->rounding = static_cast<MxRounding>(4); },
       "rounding is 4"},
      {[](GroupArgs* a) { a->scale_rows = 7; }, "scale_rows is 7"},
      {[](GroupArgs* a) { a->scale_cols = 2; }, "scale_cols is 2"},
      {[](GroupArgs* a) { a->scale_in_ptr = At(0x10); },
       "scale_in_ptr is given"},
      {[](GroupArgs* a) { a->scale_is_shuffled = true; },
       "scale_is_shuffled is true"},
      {[](GroupArgs* a) { a->scale_is_e8m0 = a->scale_is_shuffled = true; },
       "scale_rows is 8, but must be a multiple of 32"},
      {[](GroupArgs* a) {
         a->scale_is_e8m0 = a->scale_is_shuffled = true;
         a->scale_rows = 32;
       },
       "scale_cols is 1, but must be a multiple of 8"},
  };
  NewContext("gfx942");
  CheckRefused(Forward(8, 64), kForward);
  CheckRefused(Backward(8, 64), kBackward);
  CheckRefused(Row(8, 64), kRow);
  CheckRefused(Group(8, 64), kGroup);

  KernelPlan plan;
  CHECK_OK(activation_fwd_plan(Forward(8, 64), &plan));
  CHECK_OK(activation_fwd(Forward(9, 64), plan, nullptr));
  CHECK(activation_fwd(Forward(8, 80), plan, nullptr).code() ==
        StatusCode::kFailedPrecondition);
}

void TestFailures() {
  for (const char* call :
       {"current_context", "module_load", "module_get_function", "launch"}) {
    NewContext("gfx942");
    g_recorder.failing = call;
    CHECK(Call(Forward(8, 64)).code() == StatusCode::kInternal);
    CHECK(Call(Backward(8, 64)).code() == StatusCode::kInternal);
    CHECK(Call(Row(8, 64)).code() == StatusCode::kInternal);
    CHECK(Call(Group(8, 64)).code() == StatusCode::kInternal);
    g_recorder.failing.clear();
    CHECK(Run(Forward(8, 64)).size() == 1);
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
  aiter::TestInverse();
  aiter::TestEmpty();
  aiter::TestInvalidArguments();
  aiter::TestFailures();
  std::puts("PASS");
  return 0;
}
