// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, grids and failures of KV-cache writes,
// on a driver that only records what it is asked to do.

#include "aiter/cache.h"

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "aiter/status.h"
#include "third_party/aiter/src/cache_params.h"
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
                 int tile_m, int tile_n, bool of_runs) {
    KernelInfo k = FakeKernel<CacheParams>(blob, symbol, op, "gfx942", grid);
    k.num_dims = 1;
    k.dims[0] = cols;
    k.tile_m = static_cast<int16_t>(tile_m);
    k.tile_n = static_cast<int16_t>(tile_n);
    k.any_data_type = std::string(op) != "cache_copy";
    k.excludes = of_runs ? static_cast<uint32_t>(kCacheStrided) : 0;
    kernels.push_back(k);
  };
  add("copy_runs", "cache_copy", kCacheCopyGrid, 0, 32, 128, true);
  add("copy", "cache_copy", kCacheCopyGrid, 0, 16, 128, false);
  add("cast_runs", "cache_cast", kCacheCastGrid, 0, 32, 128, true);
  add("cast", "cache_cast", kCacheCastGrid, 0, 16, 128, false);
  add("token_runs", "cache_token", kCacheTokenGrid, 128, 4, 0, true);
  add("token_128", "cache_token", kCacheTokenGrid, 128, 16, 0, false);
  add("token_256", "cache_token", kCacheTokenGrid, 256, 8, 0, false);
  add("block", "cache_block", kCacheBlockGrid, 256, 16, 0, false);
  // What walks over tiles, of heads of 80 columns.
  auto walks = [&](const char* symbol, const char* op, const Grid& grid) {
    add(symbol, op, grid, 80, 16, 0, false);
    kernels.back().grade = "fast";
    kernels.back().excludes =
        kCacheOdd | kCacheE4m3fn | kCacheE5m2 | kCacheLong;
  };
  walks("cast_walks", "cache_cast", kCacheCastGridWalks);
  walks("token_walks", "cache_token", kCacheTokenGridWalks);
  walks("block_walks", "cache_block", kCacheBlockGridWalks);
  walks("token_48_walks", "cache_token", kCacheTokenGridWalks);
  kernels.back().grade = "padded";
  kernels.back().dims[0] = 48;
  kernels.back().arch = "gfx950";
  return kernels;
}

constexpr int64_t kPages = 10;
constexpr int64_t kPageSize = 16;
constexpr int64_t kHeads = 4;
constexpr int64_t kCols = 64;

// [pages, page_size, heads, cols] in elements of which `run` are 16 bytes.
cache_side Flash(int64_t run) {
  cache_side s;
  s.page = kPageSize * kHeads * kCols;
  s.run_offset = kHeads * kCols;
  s.head = kCols;
  s.run = run;
  return s;
}

// [pages, heads, page_size, cols].
cache_side HeadsFirst(int64_t run) {
  cache_side s = Flash(run);
  s.run_offset = kCols;
  s.head = kPageSize * kCols;
  return s;
}

// [pages, heads, cols, page_size].
cache_side Strided(int64_t run) {
  cache_side s = HeadsFirst(run);
  s.run_offset = 1;
  s.run = run * kPageSize;
  s.col = kPageSize;
  return s;
}

template <typename Args>
Args Call(const cache_side& k, const cache_side& v) {
  Args a;
  a.tokens = 100;
  a.heads = kHeads;
  a.pages = kPages;
  a.page_size = kPageSize;
  a.slots_ptr = At(0x1000);
  uintptr_t at = 0x2000;
  for (cache_half* h : {&a.k, &a.v}) {
    h->rows_ptr = At(at);
    h->cache_ptr = At(at + 0x1000);
    at += 0x2000;
    h->cols = kCols;
    h->cache_size = kPages * kPageSize * kHeads * kCols;
  }
  a.k.side = k;
  a.v.side = v;
  return a;
}

cache_copy_args Copy() { return Call<cache_copy_args>(Flash(8), Flash(8)); }

cache_token_args Token() {
  auto a = Call<cache_token_args>(Flash(16), Flash(16));
  for (cache_half* h : {&a.k, &a.v}) {
    h->scale_ptr = At(0x8000);
    h->scale_size = kPages * kHeads * kPageSize;
    h->scales = {0, kHeads * kPageSize, 1, kPageSize};
  }
  a.floor = 1e-10f;
  return a;
}

cache_block_args Block() {
  auto a = Call<cache_block_args>(Flash(16), Flash(16));
  for (cache_half* h : {&a.k, &a.v}) {
    h->scale_ptr = At(0x8000);
    h->scale_size = kPages * kHeads;
    h->scales = {0, kHeads, 0, 1};
  }
  a.block = kPageSize;
  a.winners_ptr = At(0x9000);
  return a;
}

// The kernel of a call's only launch.
template <typename Args>
std::string KernelOf(Status (*write)(const Args&, void*), const Args& args,
                     const char* arch = "gfx942") {
  NewContext(arch);
  CHECK_OK(write(args, nullptr));
  CHECK(g_recorder.launches.size() == 1);
  return g_recorder.launches[0].kernel;
}

void TestWalks() {
  auto wide = [](auto a) {
    for (cache_half* h : {&a.k, &a.v}) {
      h->cols = 80;
      h->cache_size = 1 << 20;
      h->scale_size = 1 << 20;
    }
    a.kind = CacheKind::kE4m3fnuz;
    return a;
  };
  auto token = wide(Token());
  CHECK(KernelOf(cache_token, token) == "token_walks");
  CHECK(g_recorder.launches[0].grid[1] == 2);
  token.v.side = Strided(16);
  CHECK(KernelOf(cache_token, token) == "token_walks");
  token.v.side.run_offset = 3;
  CHECK(KernelOf(cache_token, token) == "token_128");
  token = wide(Token());
  token.v.cols = 64;
  CHECK(KernelOf(cache_token, token) == "token_runs");
  token = wide(Token());
  token.k.cols = token.v.cols = 48;
  CHECK(KernelOf(cache_token, token, "gfx950") == "token_48_walks");
  token.k.cols = token.v.cols = 40;  // No runs of 16.
  NewContext("gfx950");
  CHECK(cache_token(token, nullptr).code() == StatusCode::kUnimplemented);
  token = wide(Token());
  token.kind = CacheKind::kE5m2;
  CHECK(KernelOf(cache_token, token) == "token_runs");

  auto block = wide(Block());
  CHECK(KernelOf(cache_block, block) == "block_walks");
  block.block = 2 * kPageSize;
  CHECK(KernelOf(cache_block, block) == "block");

  // One launch writes to both kinds of places, and heads are not joined.
  auto cast = wide(Call<cache_cast_args>(Flash(16), Strided(16)));
  CHECK(KernelOf(cache_cast, cast) == "cast_walks");
  CacheParams p = g_recorder.launches[0].As<CacheParams>();
  CHECK(p.k_cols == 80 && p.v_cols == 80 && p.heads == kHeads);
}

void TestOneLaunch() {
  NewContext("gfx942");
  CHECK_OK(cache_copy(Copy(), nullptr));
  CHECK(g_recorder.launches.size() == 1);
  const Launch& launch = g_recorder.launches[0];
  CHECK(launch.kernel == "copy_runs");
  // Heads lie together: rows of 256 columns. Keys and values have 4 tiles of 32
  // rows by 2 of 128 columns each.
  CHECK(launch.grid[0] == 16);
  CacheParams p = launch.As<CacheParams>();
  CHECK(p.tokens == 100 && p.heads == 1 && p.k_cols == 256 && p.v_cols == 256);
  CHECK(p.num_slots == 160 && p.page_size == 16);
  CHECK(p.key_ptr == At(0x2000) && p.k_cache_ptr == At(0x3000));
  CHECK(p.value_ptr == At(0x4000) && p.v_cache_ptr == At(0x5000));
  // In runs of 8 elements.
  CHECK(p.k_page == 512 && p.k_run_offset == 32 && p.k_run == 1);

  // Without values, and without heads that lie together.
  auto a = Call<cache_copy_args>(HeadsFirst(8), cache_side());
  a.v = cache_half();
  g_recorder.launches.clear();
  CHECK_OK(cache_copy(a, nullptr));
  CHECK(g_recorder.launches.size() == 1);
  p = g_recorder.launches[0].As<CacheParams>();
  CHECK(p.tokens == 100 && p.heads == 4 && p.k_cols == 64 && p.v_cols == 0);
  CHECK(g_recorder.launches[0].grid[0] == 16);
  CHECK(p.k_head == 128 && p.k_run_offset == 8);
}

void TestTwoLaunches() {
  NewContext("gfx942");
  auto a = Call<cache_cast_args>(HeadsFirst(16), Strided(16));
  a.k.scale_ptr = At(0x8000);
  a.k.scale_size = kHeads;
  a.k.scales.head = 1;
  a.data_type = DataType::kFp32;
  a.kind = CacheKind::kE5m2;
  CHECK_OK(cache_cast(a, nullptr));
  CHECK(g_recorder.launches.size() == 2);
  CHECK(g_recorder.launches[0].kernel == "cast_runs");
  CacheParams p = g_recorder.launches[0].As<CacheParams>();
  CHECK(p.k_cols == 64 && p.v_cols == 0 && p.k_scale_head == 1);
  CHECK(p.kind == 4 && p.k_page == kPageSize * kHeads * kCols / 16);
  CHECK(p.flags == (kCacheAligned | kCacheRuns | kCacheScaled | kCacheVAligned |
                    kCacheVBeside | kCacheFp32));
  CHECK(g_recorder.launches[1].kernel == "cast");
  p = g_recorder.launches[1].As<CacheParams>();
  CHECK(p.k_cols == 0 && p.v_cols == 64);
  // In elements.
  CHECK(p.v_page == kPageSize * kHeads * kCols && p.v_run_offset == 1);
  CHECK(p.v_run == 256 && p.v_col == 16);
}

void TestSelection() {
  NewContext("gfx942");
  std::vector<std::string> names;
  CHECK_OK(cache_copy_kernels({"bf16", {}, {}}, "gfx942", &names));
  CHECK(names == std::vector<std::string>{"copy_runs"});
  CHECK_OK(
      cache_copy_kernels({"bf16", {}, {"runs", "strided"}}, "gfx942", &names));
  CHECK((names == std::vector<std::string>{"copy_runs", "copy"}));
  for (auto [cols, kernel] : {std::pair<int64_t, std::string>(1, "token_runs"),
                              {128, "token_runs"},
                              {129, "token_256"}}) {
    CHECK_OK(cache_token_kernels({"fp16", {cols}, {}}, "gfx942", &names));
    CHECK(names == std::vector<std::string>{kernel});
  }
  CHECK(cache_block_kernels({"fp16", {257}, {}}, "gfx942", &names).code() ==
        StatusCode::kUnimplemented);

  CHECK_OK(cache_token(Token(), nullptr));
  CHECK(g_recorder.launches.back().kernel == "token_runs");
  // 100 tokens in tiles of 4, of 4 heads, twice.
  CHECK(g_recorder.launches.back().grid[0] == 200);
  cache_token_args beside = Token();
  beside.v.side = Strided(16);
  CHECK_OK(cache_token(beside, nullptr));
  CHECK(g_recorder.launches.back().kernel == "token_128");
  // In tiles of 16.
  CHECK(g_recorder.launches.back().grid[0] == 56);
  CHECK_OK(cache_block(Block(), nullptr));
  CHECK(g_recorder.launches.back().kernel == "block");
  CHECK(g_recorder.launches.back().grid[0] == 800);
  CacheParams p = g_recorder.launches.back().As<CacheParams>();
  CHECK(p.block == 16 && p.winners_ptr == At(0x9000) && p.k_scale_page == 4);
  CHECK(p.step == 1);
}

void TestOtherPlace() {
  NewContext("gfx942");
  cache_copy_args a = Copy();
  a.k.cache_from_ptr = a.k.cache_ptr;
  a.v.cache_from_ptr = At(0x7000);
  a.v.cache_bytes = 128;
  a.tokens = 0;
  CHECK_OK(cache_copy(a, nullptr));
  CHECK(g_recorder.copies.size() == 1 && g_recorder.launches.empty());
  CHECK(g_recorder.copies[0].to == 0x5000 && g_recorder.copies[0].bytes == 128);
  CHECK(g_recorder.copies[0].from == 0x7000);
}

void TestEmpty() {
  NewContext("gfx942");
  for (int64_t cache_copy_args::* size :
       {static_cast<int64_t cache_copy_args::*>(&cache_copy_args::tokens),
        static_cast<int64_t cache_copy_args::*>(&cache_copy_args::pages)}) {
    cache_copy_args a = Copy();
    a.*size = 0;
    CHECK_OK(cache_copy_prepare(a));
    CHECK_OK(cache_copy(a, nullptr));
  }
  CHECK(g_recorder.launches.empty());
}

void TestInvalidArguments() {
  constexpr Bad<cache_token_args> kCases[] = {
      {[](cache_token_args* a) { a->tokens = -1; }, "tokens is -1"},
      {[](cache_token_args* a) { a->heads = int64_t{1} << 31; }, "heads is"},
      {[](cache_token_args* a) { a->page_size = 0; }, "page_size is 0"},
      {[](cache_token_args* a) { a->pages = int64_t{1} << 28; },
       "pages * page_size is"},
      {[](cache_token_args* a) { a->data_type = DataType::kI8; },
       "data_type is i8"},
      {[](cache_token_args* a) { a->kind = static_cast<CacheKind>(3); },
       "kind is 3"},
      {[](cache_token_args* a) { a->k.rows_ptr = nullptr; },
       "k.rows_ptr is null"},
      {[](cache_token_args* a) { a->v.cols = 0; }, "v.cols is 0"},
      {[](cache_token_args* a) { a->k.side.page = -1; }, "k.side is -1"},
      {[](cache_token_args* a) { a->k.side.split = 0; }, "k.side is 0"},
      {[](cache_token_args* a) { a->k.cache_size -= 1; },
       "k.side is beyond the array"},
      {[](cache_token_args* a) { a->v.side.start = 1; },
       "v.side is beyond the array"},
      {[](cache_token_args* a) { a->pages += 1; },
       "k.side is beyond the array"},
      {[](cache_token_args* a) { a->v.scale_size -= 1; },
       "v.scales is beyond the array"},
      {[](cache_token_args* a) { a->v.scale_ptr = nullptr; },
       "v.scales is absent"},
      {[](cache_token_args* a) { a->k.cache_ptr = At(0x3008); },
       "cache_ptr is not aligned"},
      {[](cache_token_args* a) { a->slots_ptr = At(0x1004); },
       "slots_ptr is not aligned"},
  };
  NewContext("gfx942");
  CheckRefused(Token(), kCases);
  cache_block_args block = Block();
  block.block = 48;
  CHECK(Contains(cache_block(block, nullptr).message(), "block is 48"));

  CachePlan plan;
  CHECK_OK(cache_copy_plan(Copy(), &plan));
  CHECK(cache_copy(Call<cache_copy_args>(Flash(8), Strided(8)), plan, nullptr)
            .code() == StatusCode::kFailedPrecondition);
}

void TestFailures() {
  for (const char* call :
       {"current_context", "module_load", "module_get_function", "launch"}) {
    NewContext("gfx942");
    g_recorder.failing = call;
    CHECK(cache_copy(Copy(), nullptr).code() == StatusCode::kInternal);
    g_recorder.failing.clear();
    CHECK_OK(cache_copy(Copy(), nullptr));
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
  aiter::TestOneLaunch();
  aiter::TestWalks();
  aiter::TestTwoLaunches();
  aiter::TestSelection();
  aiter::TestOtherPlace();
  aiter::TestEmpty();
  aiter::TestInvalidArguments();
  aiter::TestFailures();
}
