// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, grids and failures of rotary embedding,
// on a driver that only records what it is asked to do.

#include "aiter/rope.h"

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
#include "third_party/aiter/src/rope_params.h"

namespace aiter {
namespace {

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, int pairs, uint32_t excludes) {
    KernelInfo k = FakeKernel<RopeParams>(blob, symbol, "rope_rotate", "gfx942",
                                          kRopeRotateGrid);
    k.num_dims = 1;
    k.dims[0] = pairs;
    k.excludes = excludes;
    k.tile_m = 16;
    k.tile_n = 2;
    k.tile_k = 32;
    kernels.push_back(k);
  };
  constexpr uint32_t kFast =
      kRopeUnaligned | kRopeByFour | kRopeFull | kRopeSections | kRopeGrid;
  add("halves_32", 32, kFast | kRopeGptj);
  add("halves", 0, kFast | kRopeGptj);
  add("neighbours", 0, kFast);
  add("by_four", 0, kRopeUnaligned);
  add("any", 0, 0);
  add("parts", 0, kFast | kRopeGptj | kRopeFull | kRopePositions | kRopeSplit);
  kernels.back().grade = "fast";
  kernels.back().arch = "gfx950";
  return kernels;
}

rope_rotate_args Args(int64_t dim, int64_t pairs) {
  rope_rotate_args a;
  a.outer = 2;
  a.seq = 10;
  a.inner = 1;
  a.heads_x = 5;
  a.dim = dim;
  a.pairs = a.section_0 = a.section_1 = a.split_0 = a.split_1 = pairs;
  a.table_rows = 40;
  a.x_ptr = At(0x1000);
  a.cos_ptr = At(0x2000);
  a.sin_ptr = At(0x3000);
  a.x_out_ptr = At(0x4000);
  return a;
}

void AddSecond(rope_rotate_args* a) {
  a->heads_y = 3;
  a->y_ptr = At(0x5000);
  a->y_out_ptr = At(0x6000);
}

void AddSections(rope_rotate_args* a) {
  a->has_sections = true;
  a->section_0 = 16;
  a->section_1 = 40;
  a->positions_ptr = At(0x7000);
}

using Names = std::vector<std::string>;

// The names of the kernels that a call launches.
Names Run(const rope_rotate_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(rope_rotate(args, nullptr));
  Names names;
  for (const Launch& launch : g_recorder.launches) {
    names.push_back(launch.kernel);
  }
  return names;
}

bool CallsKernel(const rope_rotate_args& args) {
  return rope_rotate(args, nullptr).ok();
}

void TestSelection() {
  NewContext("gfx942");
  CHECK(Run(Args(64, 32)) == Names{"halves_32"});
  CHECK(Run(Args(128, 64)) == Names{"halves"});
  CHECK(Run(Args(128, 20)) == Names{"by_four"});
  CHECK(Run(Args(68, 32)) == Names{"any"});
  CHECK(Run(Args(128, 9)) == Names{"any"});
  rope_rotate_args gptj = Args(64, 32);
  gptj.is_gptj = true;
  CHECK(Run(gptj) == Names{"neighbours"});
  gptj.is_full = true;
  CHECK(Run(gptj) == Names{"by_four"});
  rope_rotate_args sections = Args(128, 64);
  AddSections(&sections);
  CHECK(Run(sections) == Names{"by_four"});
  sections.section_0 = 17;
  CHECK(Run(sections) == Names{"any"});
  rope_rotate_args split = Args(128, 64);
  split.split_0 = 30;
  CHECK(Run(split) == Names{"any"});

  NewContext("gfx950");
  CHECK(Run(Args(128, 32)) == Names{"parts"});
  split = Args(128, 32);
  split.split_0 = 8;
  CHECK(!CallsKernel(split));
  rope_rotate_args many = Args(128, 32);  // 2^31 numbers of x.
  many.seq = 1 << 16;
  many.heads_x = 1 << 7;
  CHECK(!CallsKernel(many));
  many.outer = 1;
  CHECK(Run(many) == Names{"parts"});

  NewContext("gfx942");
  Names names;
  CHECK_OK(rope_rotate_kernels({"bf16", {32}, {}}, "gfx942", &names));
  CHECK(names == Names{"halves_32"});
  CHECK_OK(rope_rotate_kernels({"bf16", {-1}, {}}, "gfx942", &names));
  CHECK(names == Names{"halves"});
  CHECK_OK(rope_rotate_kernels({"bf16", {9}, {"unaligned"}}, "gfx942", &names));
  CHECK(names == Names{"any"});
  CHECK(rope_rotate_kernels({"fp16", {32}, {}}, "gfx942", &names).code() ==
        StatusCode::kUnimplemented);
}

void TestPacking() {
  NewContext("gfx942");
  rope_rotate_args a = Args(256, 64);
  AddSecond(&a);
  AddSections(&a);
  a.inner = 4;
  a.is_gptj = a.is_nope_first = a.is_transposed = a.is_full = true;
  a.tables_are_f32 = true;
  a.grid_h = 3;
  a.grid_w = 4;
  a.split_0 = 8;
  a.split_1 = 24;
  a.offsets_ptr = At(0x8000);
  a.cu_seqlens_ptr = At(0x9000);
  a.sequences = 6;
  Run(a);
  // 5 tiles of 80 tokens; 3 pairs of heads of x and 2 of y; 64 of 256 channels.
  CHECK(g_recorder.launches[0].grid[0] == 5 * 5 * 4);
  RopeParams p = g_recorder.launches[0].As<RopeParams>();
  CHECK(p.x_ptr == a.x_ptr && p.y_ptr == a.y_ptr);
  CHECK(p.x_out_ptr == a.x_out_ptr && p.y_out_ptr == a.y_out_ptr);
  CHECK(p.cos_ptr == a.cos_ptr && p.cos_f32_ptr == a.cos_ptr);
  CHECK(p.sin_ptr == a.sin_ptr && p.sin_f32_ptr == a.sin_ptr);
  CHECK(p.positions_ptr == a.positions_ptr && p.offsets_ptr == a.offsets_ptr);
  CHECK(p.cu_seqlens_ptr == a.cu_seqlens_ptr && p.sequences == 6);
  CHECK(p.tokens == 80 && p.seqlen == 10 && p.inner == 4);
  CHECK(p.heads_x == 5 && p.heads_y == 3 && p.dim == 256 && p.pairs == 64);
  CHECK(p.first == 128 && p.table_rows == 40);
  CHECK(p.grid_h == 3 && p.grid_w == 4);
  CHECK(p.section_0 == 16 && p.section_1 == 40);
  CHECK(p.split_0 == 8 && p.split_1 == 24);
  CHECK(p.flags == (kRopeGptj | kRopeFull | kRopeTransposed | kRopeF32Tables |
                    kRopePositions | kRopeOffsets | kRopeCuSeqlens |
                    kRopeSections | kRopeGrid));

  rope_rotate_args own = Args(72, 9);
  own.is_per_token = true;
  own.table_rows = 20;
  Run(own);
  p = g_recorder.launches[0].As<RopeParams>();
  // 9 pairs of 32, and 54 channels of 64.
  CHECK(g_recorder.launches[0].grid[0] == 6 * 2);
  CHECK(p.first == 0 && p.flags == kRopePerToken);
}

void TestEmpty() {
  NewContext("gfx942");
  rope_rotate_args none = Args(64, 32);
  none.seq = 0;
  CHECK(Run(none).empty());
  none = Args(64, 32);
  none.heads_x = 0;
  CHECK(Run(none).empty());
}

void TestInvalidArguments() {
  constexpr Bad<rope_rotate_args> kCases[] = {
      {[](rope_rotate_args* a) { a->outer = -1; }, "outer is -1"},
      {[](rope_rotate_args* a) { a->outer = a->seq = 1 << 20; },
       "outer * seq * inner is more"},
      {[](rope_rotate_args* a) { a->dim = 0; }, "dim is 0"},
      {[](rope_rotate_args* a) { a->pairs = 33; }, "pairs is 33"},
      {[](rope_rotate_args* a) { a->heads_x = 1 << 20; }, "heads_x is 1048576"},
      {[](rope_rotate_args* a) { a->heads_y = 1; }, "y_ptr is null"},
      {[](rope_rotate_args* a) { a->table_rows = 0; }, "table_rows is 0"},
      {[](rope_rotate_args* a) { a->is_per_token = true; },
       "table_rows is 40, but must be 20"},
      {[](rope_rotate_args* a) { a->section_0 = 33; }, "section_0 is 33"},
      {[](rope_rotate_args* a) { a->split_1 = 33; }, "split_1 is 33"},
      {[](rope_rotate_args* a) { a->has_sections = true; },
       "positions_ptr is null"},
      {[](rope_rotate_args* a) { a->grid_h = 2; }, "grid_w is 0"},
      {[](rope_rotate_args* a) { a->grid_h = a->grid_w = 2; },
       "has_sections is false"},
      {[](rope_rotate_args* a) { a->cu_seqlens_ptr = At(0x10); },
       "sequences is 0"},
      {[](rope_rotate_args* a) { a->x_ptr = At(0x18); },
       "x_ptr is not aligned"},
  };
  NewContext("gfx942");
  CheckRefused(Args(64, 32), kCases);

  KernelPlan plan;
  CHECK_OK(rope_rotate_plan(Args(64, 32), &plan));
  rope_rotate_args back = Args(64, 32);
  back.is_transposed = true;
  CHECK(rope_rotate(back, plan, nullptr).code() ==
        StatusCode::kFailedPrecondition);
}

void TestFailures() {
  for (const char* call :
       {"current_context", "module_load", "module_get_function", "launch"}) {
    NewContext("gfx942");
    g_recorder.failing = call;
    CHECK(rope_rotate(Args(64, 32), nullptr).code() == StatusCode::kInternal);
    g_recorder.failing.clear();
    CHECK(Run(Args(64, 32)).size() == 1);
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
  aiter::TestEmpty();
  aiter::TestInvalidArguments();
  aiter::TestFailures();
  std::puts("PASS");
  return 0;
}
