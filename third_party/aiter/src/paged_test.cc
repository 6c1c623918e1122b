// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, division of keys and failures of paged
// and latent attention, on a driver that only records what it is asked to do.

#include "aiter/paged.h"

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
#include "third_party/aiter/src/paged_params.h"

namespace aiter {
namespace {

constexpr int64_t kPages = 50;
constexpr int64_t kPage = 16;
constexpr int64_t kHeads = 2;
constexpr int64_t kHdim = 128;

// What the packing function of a kernel with tensor maps leaves behind.
struct MappedArgs {
  TensorMap k, v;
  PagedParams params;
};

void PackMapped(const void* params, const TensorMap* maps, void* buffer) {
  auto* args = new (buffer) MappedArgs;
  args->k = maps[0];
  args->v = maps[1];
  args->params = *static_cast<const PagedParams*>(params);
}

constexpr uint16_t kMappedOffsets[] = {0, sizeof(TensorMap),
                                       2 * sizeof(TensorMap)};

constexpr TensorMapSpec kMaps[] = {{kPagedTensorK, 4, 128, {64, 16, 1, 1}},
                                   {kPagedTensorV, 4, 128, {64, 16, 1, 1}}};
constexpr TensorMapSpec kDividedMaps[] = {
    {kPagedTensorK, 5, 128, {64, 8, 2, 2, 1}},
    {kPagedTensorV, 5, 128, {64, 8, 2, 2, 1}}};

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* grade, int dim, int tile_m,
                 uint32_t needs, uint32_t excludes,
                 const char* arch = "gfx942") {
    KernelInfo k = FakeKernel<PagedParams>(blob, symbol, "paged_attend", arch,
                                           kPagedAttendGrid);
    k.grade = grade;
    k.num_dims = 1;
    k.dims[0] = dim;
    k.needs = needs;
    k.excludes = excludes;
    k.tile_m = tile_m;
    k.tile_n = 64;
    kernels.push_back(k);
  };
  constexpr uint32_t kPlain =
      kPagedUnaligned | kPagedPartial | kPagedShuffled | kPagedOddPages;
  add("large", "fast", 128, 16, 0,
      kPagedSmallPages | kPagedUnaligned | kPagedPartial | kPagedShuffled |
          kPagedWindow | kPagedManyRows | kPagedBytes);
  add("decode", "fast", 128, 16, 0,
      kPlain | kPagedWindow | kPagedManyRows | kPagedBytes);
  add("prefill", "fast", 128, 64, kPagedManyRows, kPlain | kPagedBytes);
  add("runs", "fast", 128, 16, kPagedShuffled, kPagedUnaligned | kPagedBytes);
  add("fnuz", "fast", 128, 16, kPagedBytes | kPagedE4m3fnuz, kPlain);
  add("aligned", "general", 256, 16, 0,
      kPagedUnaligned | kPagedShuffled | kPagedBytes);
  add("any", "general", 256, 16, 0, kPagedBytes);
  add("bytes", "general", 256, 16, kPagedBytes, 0);
  add("mapped", "fast", 128, 128, kPagedManyRows,
      kPagedTinyPages | kPagedNoPages | kPagedShuffled | kPagedLargeSoftCap |
          kPagedBytes,
      "sm_90");
  kernels.back().pack = PackMapped;
  kernels.back().arg_offsets = kMappedOffsets;
  kernels.back().num_args = 3;
  kernels.back().tensor_maps = kMaps;
  kernels.back().num_tensor_maps = 2;
  KernelInfo mapped_bytes = kernels.back();
  mapped_bytes.symbol = "mapped_bytes";
  mapped_bytes.needs |= kPagedBytes;
  mapped_bytes.excludes &= ~kPagedBytes;
  kernels.push_back(mapped_bytes);
  KernelInfo divided = kernels.back();
  divided.symbol = "divided";
  divided.needs = kPagedManyRows | kPagedWindow;
  divided.excludes |= kPagedBytes;
  divided.tensor_maps = kDividedMaps;
  kernels.push_back(divided);
  add("few_mapped", "fast", 32, 64, 0,
      kPagedTinyPages | kPagedNoPages | kPagedShuffled | kPagedBytes, "sm_90");
  kernels.back().pack = PackMapped;
  kernels.back().arg_offsets = kMappedOffsets;
  kernels.back().num_args = 3;
  kernels.back().tensor_maps = kMaps;
  kernels.back().num_tensor_maps = 2;
  kernels.back().grid = &kPagedAttendGridOneAxis;
  kernels.back().shared_bytes = 30 * 1024;
  add("unshared", "fast", 16, 64, kPagedUnshared, kPagedManyRows, "sm_90");
  add("shares", "padded", 64, 16, 0, kPagedShuffled | kPagedBytes, "sm_90");
  kernels.back().grid = &kPagedAttendGridShares;
  kernels.back().shared_bytes = 30 * 1024;
  add("few_rows", "fast", 16, 8, kPagedBytes, kPagedSeveralRows, "sm_90");
  add("several_rows", "fast", 16, 16, kPagedBytes, 0, "sm_90");
  add("few_keys", "fast", 256, 64, kPagedManyRows | kPagedShort, 0, "sm_90");
  add("short", "fast", 192, 64, kPagedManyRows | kPagedShort, 0, "sm_90");
  add("walks", "fast", 192, 128, kPagedManyRows, kPagedBytes, "sm_90");
  kernels.back().grid = &kPagedAttendGridWalks;
  kernels.push_back(kernels.back());
  kernels.back().symbol = "walks_224";
  kernels.back().dims[0] = 224;
  add("few_tiles", "fast", 224, 64,
      kPagedManyRows | kPagedShort | kPagedFewTiles, 0, "sm_90");
  add("any_sm_90", "general", 256, 16, 0, kPagedBytes, "sm_90");
  kernels.back().grid = &kPagedAttendGridOneAxis;
  for (const char* arch : {"gfx942", "sm_90"}) {
    KernelInfo merge = FakeKernel<PagedParams>(blob, "merge", "paged_merge",
                                               arch, kPagedMergeGrid);
    merge.num_dims = 1;
    merge.dims[0] = 256;
    merge.tile_m = 4;
    kernels.push_back(merge);
  }
  kernels.push_back(kernels.back());
  kernels.back().symbol = "merge_rows";
  kernels.back().needs = kPagedManyRows;
  kernels.back().tile_n = 16;
  auto add_latent = [&](const char* symbol, const char* grade, int rows,
                        int tile_m, uint32_t excludes,
                        const char* arch = "gfx942") {
    KernelInfo k = FakeKernel<PagedParams>(blob, symbol, "mla_attend", arch,
                                           kMlaAttendGrid);
    k.grade = grade;
    k.num_dims = 3;
    k.dims[0] = 512;
    k.dims[1] = 64;
    k.dims[2] = rows;
    k.excludes = excludes;
    k.tile_m = tile_m;
    kernels.push_back(k);
  };
  add_latent("latent_16", "fast", 16, 16, kPagedOddPages | kPagedBytes);
  kernels.back().grid = &kMlaAttendGridShares;
  add_latent("latent_32", "fast", 32, 32, kPagedOddPages | kPagedBytes);
  kernels.back().grid = &kMlaAttendGridWhole;
  add_latent("latent_64", "fast", 64, 64, kPagedOddPages | kPagedBytes);
  kernels.back().grid = &kMlaAttendGridShares;
  add_latent("latent_any", "general", 0, 16, kPagedUnaligned | kPagedBytes);
  add_latent("latent_hopper", "fast", 16, 16, kPagedBytes, "sm_90");
  kernels.back().grid = &kMlaAttendGridStages;
  for (const char* arch : {"gfx942", "sm_90"}) {
    KernelInfo merge = FakeKernel<PagedParams>(
        blob, "latent_merge", "mla_merge", arch, kMlaMergeGrid);
    if (arch == std::string("sm_90")) merge.grade = "fast";
    merge.num_dims = 1;
    merge.dims[0] = 512;
    merge.tile_m = 16;
    kernels.push_back(merge);
  }
  return kernels;
}

// Flash's layout, [pages, page, heads, hdim].
void SetHalf(int64_t hdim, uintptr_t address, paged_half* h) {
  h->cache_ptr = At(address);
  h->cache_size = kPages * kPage * kHeads * hdim;
  h->side.page = kPage * kHeads * hdim;
  h->side.run_offset = kHeads * hdim;
  h->side.head = hdim;
  h->side.run = 8;
  h->scale_ptr = At(address + 0x800);
  h->scale_size = 1;
}

// `batch` sequences of a query each.
paged_attend_args Args(int64_t batch, int64_t hdim = kHdim) {
  paged_attend_args a;
  a.tokens = a.batch = batch;
  a.seqlen_q = 1;
  a.nhead_q = 8;
  a.nhead_k = kHeads;
  a.hdim = a.hdim_v = hdim;
  a.pages = kPages;
  a.page_size = kPage;
  a.width = 20;
  a.splits = 8;
  a.q_ptr = At(0x1000);
  a.out_ptr = At(0x2000);
  a.parts_ptr = At(0x3000);
  a.parts_lse_ptr = At(0x4000);
  a.table_ptr = At(0x5000);
  a.lengths_ptr = At(0x6000);
  a.softmax_scale = 0.5f;
  SetHalf(hdim, 0x7000, &a.k);
  SetHalf(hdim, 0x8000, &a.v);
  return a;
}

void SetBytes(PagedKind kind, paged_attend_args* a) {
  a->kind = kind;
  a->k.side.run = a->v.side.run = 16;
}

using Names = std::vector<std::string>;

// The names of the kernels that a call launches.
Names Run(const paged_attend_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(paged_attend(args, nullptr));
  Names names;
  for (const Launch& launch : g_recorder.launches) {
    names.push_back(launch.kernel);
  }
  return names;
}

void New(int multiprocessors) {
  g_recorder.multiprocessors = multiprocessors;
  NewContext("gfx942");
}

void TestSelection() {
  New(1);
  CHECK(Run(Args(8)) == Names{"decode"});
  paged_attend_args window = Args(8);
  window.window_left = 7;
  CHECK(Run(window) == Names{"aligned"});
  paged_attend_args prefill = Args(8);
  prefill.splits = prefill.batch = 1;
  prefill.cu_seqlens_ptr = At(0x9000);
  prefill.seqlen_q = 0;
  CHECK(Run(prefill) == Names{"prefill"});
  prefill.batch = 2;  // 16 rows each.
  CHECK(Run(prefill) == Names{"decode"});
  CHECK(Run(Args(8, 64)) == Names{"aligned"});
  CHECK(Run(Args(8, 60)) == Names{"any"});
  paged_attend_args odd = Args(8);
  odd.page_size = 12;
  CHECK(Run(odd) == Names{"aligned"});
  paged_attend_args large = Args(8);
  large.page_size = 192;  // A multiple of 64, but no power of two.
  large.pages = kPages * kPage / large.page_size;
  for (paged_half* h : {&large.k, &large.v}) {
    h->side.page = large.page_size * kHeads * kHdim;
  }
  CHECK(Run(large) == Names{"large"});
  paged_attend_args bytes = Args(8);
  SetBytes(PagedKind::kE4m3fnuz, &bytes);
  CHECK(Run(bytes) == Names{"fnuz"});
  SetBytes(PagedKind::kE5m2, &bytes);
  CHECK(Run(bytes) == Names{"bytes"});
  paged_attend_args tokens_inside = Args(8);  // As AITER's V.
  tokens_inside.v.side.split = 8;
  tokens_inside.v.side.offset = 1;
  tokens_inside.v.side.col = 8;
  tokens_inside.v.side.run = 64;
  CHECK(Run(tokens_inside) == Names{"runs"});
  paged_attend_args runs = Args(8);  // As vLLM's, which AITER has as well.
  runs.k.side.run_offset = 8;
  runs.k.side.run = 8 * kPage;
  runs.v.side.run_offset = 1;
  runs.v.side.col = kPage;
  runs.v.side.run = 8 * kPage;
  runs.k.side.head = runs.v.side.head = kPage * kHdim;
  CHECK(Run(runs) == Names{"runs"});
  runs.page_size = 12;  // Whose last run is of two pages.
  CHECK(Run(runs) == Names{"any"});

  Names names;
  CHECK_OK(paged_attend_kernels({"bf16", {128}, {}}, "gfx942", &names));
  CHECK((names == Names{"large", "merge"}));
  CHECK(paged_attend_kernels({"bf16", {257}, {}}, "gfx942", &names).code() ==
        StatusCode::kUnimplemented);
}

void TestPacking() {
  New(1);
  paged_attend_args a = Args(8);
  a.lse_ptr = At(0xa000);
  a.sinks_ptr = At(0xb000);
  a.slopes_ptr = At(0xc000);
  a.slopes_step = 8;
  a.indptr_ptr = At(0xd000);
  a.last_pages = true;
  a.window_left = 9;
  a.logits_soft_cap = 3.0f;
  a.k.scales.head = 1;
  a.k.scale_size = kHeads;
  a.v.scales = {0, kHeads * kPage, 1, kPage};
  a.v.scale_size = kPages * kHeads * kPage;
  CHECK(Run(a) == Names{"aligned"});
  PagedParams p = g_recorder.launches[0].As<PagedParams>();
  // 8 sequences of 4 rows: a tile each, for each of 2 heads.
  CHECK(g_recorder.launches[0].grid[0] == 16);
  CHECK(g_recorder.launches[0].grid[1] == 1);
  CHECK(p.k_cache_ptr == a.k.cache_ptr && p.v_bytes_ptr == a.v.cache_ptr);
  CHECK(p.k_page == a.k.side.page && p.k_token == kHeads * kHdim);
  CHECK(p.k_head == kHdim && p.k_split == 1 && p.run == 8);
  CHECK(p.k_scale_page == 0 && p.k_scale_head == 1 && p.k_scale_token == 0);
  CHECK(p.v_scale_page == kHeads * kPage && p.v_scale_head == kPage);
  CHECK(p.v_scale_token == 1);
  CHECK(p.tokens == 8 && p.batch == 8 && p.seqlen_q == 1 && p.group == 4);
  CHECK(p.pages == kPages && p.page_size == 16 && p.page_shift == 4);
  CHECK(p.width == 20 && p.splits == 1);
  CHECK(p.sinks_step == 0 && p.slopes_step == 8);
  CHECK(p.window_left == 9 && p.window_right == 1 << 30);
  CHECK(p.softmax_scale == 0.5f && p.logits_soft_cap == 3.0f);
  CHECK(p.flags ==
        (kPagedIndptr | kPagedLastPages | kPagedWindow | kPagedSoftCap |
         kPagedAlibi | kPagedSink | kPagedTokenScales | kPagedLse));
  SetBytes(PagedKind::kE4m3fnuz, &a);
  Run(a);
  p = g_recorder.launches[0].As<PagedParams>();
  CHECK(p.kind == 2 && p.run == 16);
}

// How kernels find a key's page without a division.
void TestPagesOfKeys() {
  constexpr int64_t kMost = INT32_MAX - 8192;
  for (int64_t size :
       std::vector<int64_t>{1, 2, 3, 7, 12, 16, 24, 192, 528, 1000003,
                            (1 << 30) - 1, (1 << 30) + 1, kMost}) {
    New(1);
    paged_attend_args a = Args(8);
    a.page_size = size;
    a.pages = 0;
    Run(a);
    PagedParams p = g_recorder.launches[0].As<PagedParams>();
    for (int64_t n : {int64_t{0}, int64_t{1}, size - 1, size, 2 * size - 1,
                      kMost / size * size - 1, kMost / size * size, kMost}) {
      if (n > INT32_MAX) continue;
      uint64_t wide =
          static_cast<uint64_t>(2 * n) * static_cast<uint32_t>(p.page_factor);
      CHECK((wide >> 32) >> p.page_shift == static_cast<uint64_t>(n / size));
    }
  }
}

// A cache is mapped as [page, head, token, column], or by eight tokens; what
// has no box that no page cuts, or no page, goes to a kernel without maps.
void TestTensorMaps() {
  g_recorder.multiprocessors = 1;
  g_recorder.maps.clear();
  NewContext("sm_90");
  paged_attend_args a = Args(64);
  a.batch = 1;
  a.seqlen_q = 64;
  a.splits = 1;
  a.k.side.start = 128;
  a.k.cache_size += 128;
  CHECK(Run(a) == Names{"mapped"});
  CHECK(g_recorder.maps.size() == 2);
  const TensorMapCall k = g_recorder.maps[0];
  CHECK(k.address == At(0x7000 + 256) && k.rank == 4 && k.box[1] == 16);
  CHECK(k.dims[0] == kHdim && k.dims[1] == kPage && k.dims[2] == kHeads &&
        k.dims[3] == kPages);
  CHECK(k.strides[0] == 2 * kHeads * kHdim && k.strides[1] == 2 * kHdim);
  CHECK(k.strides[2] == 2 * kPage * kHeads * kHdim);
  CHECK(g_recorder.maps[1].address == At(0x8000));
  CHECK(g_recorder.launches[0].As<MappedArgs>().params.page_size == kPage);
  // Above a soft cap tanh by one instruction errs by too much.
  a.logits_soft_cap = 1024;
  CHECK(Run(a) == Names{"mapped"});
  a.logits_soft_cap = 1025;
  CHECK(Run(a) == Names{"any_sm_90"});
  a.logits_soft_cap = 0;
  paged_attend_args bytes = a;
  SetBytes(PagedKind::kInt8, &bytes);
  CHECK(Run(bytes) == Names{"mapped_bytes"});
  CHECK(g_recorder.maps.size() == 6);
  CHECK(g_recorder.maps[4].address == At(0x7000 + 128));
  CHECK(g_recorder.maps[4].strides[0] == kHeads * kHdim);
  // Boxes of all columns: tokens are divided by eight.
  a.window_left = 7;
  CHECK(Run(a) == Names{"divided"});
  CHECK(g_recorder.maps.size() == 8);
  const TensorMapCall divided = g_recorder.maps[6];
  CHECK(divided.address == k.address && divided.rank == 5);
  CHECK(divided.dims[0] == 64 && divided.dims[1] == 8 &&
        divided.dims[2] == kHdim / 64 &&
        divided.dims[3] == kPages * kPage / 8 && divided.dims[4] == kHeads);
  CHECK(divided.strides[0] == k.strides[0] && divided.strides[1] == 2 * 64);
  CHECK(divided.strides[2] == 8 * k.strides[0] &&
        divided.strides[3] == k.strides[1]);
  a.window_left = -1;
  // Pages that eight tokens do not divide.
  a.v.side.page += 8;
  a.v.cache_size += 8 * kPages;
  CHECK(Run(a) == Names{"any_sm_90"});
  a.v.side.page -= 8;
  a.page_size = 8;
  CHECK(Run(a) == Names{"any_sm_90"});
  a.page_size = kPage;
  a.pages = a.k.cache_size = a.v.cache_size = 0;
  CHECK(Run(a) == Names{"any_sm_90"});
  CHECK(g_recorder.maps.size() == 8);
}

// A kernel whose blocks are a sequence's own is for steps of more than 16 rows
// of a KV head, for packed queries of which one sequence may have many, and for
// one sequence.
void TestUnshared() {
  g_recorder.multiprocessors = 1;
  NewContext("sm_90");
  paged_attend_args a = Args(8, 16);
  CHECK(Run(a)[0] == "shares");
  a.nhead_q = 16 * kHeads;
  CHECK(Run(a)[0] == "shares");
  a.nhead_q = 17 * kHeads;
  CHECK(Run(a)[0] == "unshared");
  a.nhead_q = kHeads;
  a.cu_seqlens_ptr = At(0xb000);
  CHECK(Run(a)[0] == "shares");
  a.batch = 7;
  CHECK(Run(a)[0] == "unshared");
  a.nhead_q = 64 * kHeads;
  CHECK(Run(a)[0] == "shares");
  CHECK(Run(Args(1, 16))[0] == "unshared");
}

// Rows that see few keys, as far as sizes tell, have small tiles.
void TestFewKeys() {
  NewContext("sm_90");
  paged_attend_args a = Args(512, 256);  // A sequence's.
  a.batch = 1;
  a.seqlen_q = 512;
  a.width = 816 / kPage;
  CHECK(Run(a)[0] == "few_keys");  // 560 in the mean.
  a.width = 832 / kPage;
  CHECK(Run(a)[0] == "any_sm_90");
  a.window_left = 560;
  a.window_right = 0;
  CHECK(Run(a)[0] == "few_keys");
  a.window_left = 561;
  CHECK(Run(a)[0] == "any_sm_90");
  // Tables of two sequences, one behind the other.
  a.window_left = a.window_right = -1;
  a.batch = 2;
  a.seqlen_q = 256;
  a.indptr_ptr = At(0xc000);
  a.width = 2 * 688 / kPage;
  CHECK(Run(a)[0] == "few_keys");
  a.width = 2 * 704 / kPage;
  CHECK(Run(a)[0] == "any_sm_90");
}

// Blocks that walk have a counter, which is 0 at first, if tiles are more than
// multiprocessors; else, or without one, each has a tile.
void TestWalks() {
  g_recorder.multiprocessors = 10;
  NewContext("sm_90");
  paged_attend_args a = Args(256, 224);  // 8 tiles of each of 2 heads.
  a.batch = 2;
  a.seqlen_q = 128;
  a.width = 100;
  a.splits = 1;
  a.counter_ptr = At(0xe000);
  g_recorder.fills.clear();
  CHECK(Run(a) == Names{"walks_224"});
  CHECK(g_recorder.launches[0].grid[0] == 10);
  CHECK(g_recorder.fills.size() == 1 && g_recorder.fills[0].bytes == 4);
  CHECK(g_recorder.fills[0].address == 0xe000);
  a.counter_ptr = nullptr;
  Run(a);
  CHECK(g_recorder.launches[0].grid[0] == 16);
  a.counter_ptr = At(0xe000);
  a.tokens = 144;
  a.batch = 1;
  a.seqlen_q = 144;
  Run(a);
  CHECK(g_recorder.launches[0].grid[0] == 10);
  CHECK(g_recorder.fills.size() == 1);
}

// Where tables are wide, lengths tell one of two kernels that it is not meant.
void TestMayBeShort() {
  g_recorder.multiprocessors = 8;
  NewContext("sm_90");
  paged_attend_args a = Args(256, 192);  // 36 tiles of 64 rows, or a few less.
  a.batch = 2;
  a.seqlen_q = 128;
  a.splits = 1;
  CHECK(Run(a) == Names{"short"});  // 320 keys a table.
  a.splits = 4;
  CHECK(Run(a) == Names{"short"});
  a.splits = 1;
  CHECK(g_recorder.launches[0].As<PagedParams>().few_keys == 0);
  a.width = 100;
  CHECK(Run(a) == Names{"walks"});  // There is nowhere to say it.
  a.counter_ptr = At(0xe000);
  CHECK((Run(a) == Names{"walks", "short"}));
  for (const Launch& launch : g_recorder.launches) {
    CHECK(launch.As<PagedParams>().few_keys == 560);
  }
  // Where keys are divided, those of few are not.
  a.splits = 4;
  CHECK((Run(a) == Names{"walks", "short", "merge_rows"}));
  CHECK(g_recorder.launches[1].grid[1] == 1);
  a.splits = 1;
  // No row sees fewer than half of its sequence's queries in the mean.
  a.tokens = 2 * 1122;
  a.seqlen_q = 1122;
  CHECK(Run(a) == Names{"walks"});
  CHECK(g_recorder.launches[0].As<PagedParams>().few_keys == 0);
}

// Tiles of which all are at work at a time have a kernel that begins sooner.
void TestFewTiles() {
  g_recorder.multiprocessors = 19;
  NewContext("sm_90");
  paged_attend_args a = Args(256, 224);  // 36 tiles of 64 rows, or a few less.
  a.batch = 2;
  a.seqlen_q = 128;
  a.width = 100;
  a.splits = 4;
  a.counter_ptr = At(0xe000);
  CHECK((Run(a) == Names{"few_tiles", "merge_rows"}));
  CHECK(g_recorder.launches[0].As<PagedParams>().few_keys == 0);
  CHECK(g_recorder.launches[0].grid[1] == 4);
  g_recorder.multiprocessors = 18;
  NewContext("sm_90");
  CHECK((Run(a) == Names{"walks_224", "merge_rows"}));
  a.splits = 17;  // More than a tile of rows has parts.
  a.tokens = 16;
  a.batch = 1;
  a.seqlen_q = 16;
  CHECK((Run(a) == Names{"few_tiles", "merge"}));
}

// A small tile has 8 rows of a KV head.
void TestSeveralRows() {
  NewContext("sm_90");
  paged_attend_args a = Args(8, 16);
  SetBytes(PagedKind::kInt8, &a);
  a.nhead_q = 8 * kHeads;
  CHECK(Run(a)[0] == "few_rows");
  a.nhead_q = 9 * kHeads;
  CHECK(Run(a)[0] == "several_rows");
  a.nhead_q = 4 * kHeads;
  a.batch = 4;
  a.seqlen_q = 2;
  CHECK(Run(a)[0] == "few_rows");
  a.batch = 2;
  a.seqlen_q = 4;
  CHECK(Run(a)[0] == "several_rows");
}

// Keys are divided until the device is full, and no further than there is
// scratch for.
void TestSplits() {
  New(64);
  CHECK((Run(Args(1)) == Names{"decode", "merge"}));
  CHECK(g_recorder.launches[0].grid[1] == 8);
  CHECK(g_recorder.launches[1].grid[0] == 8);  // A program a row.
  CHECK((Run(Args(64)) == Names{"decode", "merge"}));
  // 128 programs, and 32 more that packed tiles might need, in 768.
  CHECK(g_recorder.launches[0].grid[1] == 4);
  CHECK(Run(Args(256)) == Names{"decode"});
  paged_attend_args one = Args(1);
  one.splits = 1;
  one.parts_ptr = one.parts_lse_ptr = nullptr;
  CHECK(Run(one) == Names{"decode"});
}

// A grid of one axis has room for a part of each tile and for twice as many as
// fill the device, however long one sequence is; what joins them starts early.
void TestOneAxis() {
  g_recorder.multiprocessors = 64;
  NewContext("sm_90");
  CHECK((Run(Args(64)) == Names{"any_sm_90", "merge"}));
  const Launch attend = g_recorder.launches[0];
  const PagedParams p = attend.As<PagedParams>();
  CHECK(p.splits == 8 && p.programs > 0);
  CHECK(attend.grid[0] == 128 + 2 * static_cast<unsigned>(p.programs));
  CHECK(attend.grid[1] == 1);
  CHECK(!attend.early && g_recorder.launches[1].early);
  // One sequence is as long as itself.
  CHECK((Run(Args(1)) == Names{"any_sm_90", "merge"}));
  CHECK(g_recorder.launches[0].grid[0] ==
        2 + static_cast<unsigned>(p.programs));
  paged_attend_args one = Args(64);
  one.splits = 1;
  CHECK(Run(one) == Names{"any_sm_90"});
  CHECK(g_recorder.launches[0].grid[0] == 128);
  New(64);
  Run(Args(1));
  CHECK(!g_recorder.launches[1].early);
}

// Kernels that decode by maps are as many as fit side by side.
void TestDecodeByTensorMaps() {
  g_recorder.multiprocessors = 64;
  g_recorder.maps.clear();
  NewContext("sm_90");
  paged_attend_args a = Args(64, 32);
  a.sinks_ptr = At(0xb000);
  a.sinks_step = a.nhead_q;
  CHECK((Run(a) == Names{"few_mapped", "merge"}));
  CHECK(g_recorder.maps.size() == 2);
  CHECK(g_recorder.maps[0].dims[0] == 32 && g_recorder.maps[1].dims[0] == 32);
  const PagedParams p = g_recorder.launches[0].As<MappedArgs>().params;
  CHECK(p.hdim == 32 && p.hdim_v == 32 && p.sinks_step == 8);
  CHECK(p.programs == 2 * 64);
  CHECK(!g_recorder.launches[0].early && g_recorder.launches[1].early);
}

// Blocks that share the keys are as many as fit side by side, and of each KV
// head as many; without parts each has a tile of rows. They begin early.
void TestSharedKeys() {
  g_recorder.multiprocessors = 64;
  NewContext("sm_90");
  paged_attend_args a = Args(64, 48);
  a.hdim_v = 40;
  SetHalf(a.hdim_v, 0x8000, &a.v);
  a.sinks_ptr = At(0xb000);
  a.sinks_step = a.nhead_q;
  CHECK((Run(a) == Names{"shares", "merge"}));
  const PagedParams p = g_recorder.launches[0].As<PagedParams>();
  CHECK(p.hdim == 48 && p.hdim_v == 40 && p.sinks_step == 8);
  CHECK(p.programs == 2 * 64 && p.splits == a.splits);
  CHECK(g_recorder.launches[0].grid[0] == 2 * 64);
  CHECK(g_recorder.launches[0].early && g_recorder.launches[1].early);
  g_recorder.multiprocessors = 0;  // No fewer than one of each KV head.
  NewContext("sm_90");
  CHECK((Run(a) == Names{"shares", "merge"}));
  CHECK(g_recorder.launches[0].grid[0] == 2);
  a.splits = 1;
  CHECK(Run(a) == Names{"shares"});
  CHECK(g_recorder.launches[0].grid[0] == 64 * 2);
}

// `batch` sequences of `heads` rows, in a cache [pages, page, 576].
mla_attend_args LatentArgs(int64_t batch, int64_t heads) {
  constexpr int64_t kCols = 576;
  mla_attend_args a;
  static_cast<paged_attend_args&>(a) = Args(batch, kCols);
  a.nhead_q = heads;
  a.nhead_k = 1;
  a.hdim_v = 512;
  a.k.cache_size = kPages * kPage * kCols + 2 * kCols;
  a.k.side.page = kPage * kCols;
  a.k.side.run_offset = kCols;
  a.v = a.k;
  return a;
}

Names Run(const mla_attend_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(mla_attend(args, nullptr));
  Names names;
  for (const Launch& launch : g_recorder.launches) {
    names.push_back(launch.kernel);
  }
  return names;
}

void TestLatent() {
  New(1);
  CHECK(Run(LatentArgs(8, 12)) == Names{"latent_16"});
  CHECK(Run(LatentArgs(8, 128)) == Names{"latent_64"});
  CHECK(Run(LatentArgs(8, 20)) == Names{"latent_32"});
  mla_attend_args narrow = LatentArgs(8, 16);
  narrow.hdim_v = 504;  // 72 columns beside it.
  CHECK(mla_attend(narrow, nullptr).code() == StatusCode::kUnimplemented);
  mla_attend_args odd = LatentArgs(8, 16);
  odd.page_size = 12;
  CHECK(Run(odd) == Names{"latent_any"});

  New(128);  // As many blocks of tall tiles share the keys, in up to 8 parts.
  CHECK((Run(LatentArgs(32, 128)) == Names{"latent_64", "latent_merge"}));
  CHECK(g_recorder.launches[0].grid[0] == 128);
  CHECK(g_recorder.launches[0].grid[1] == 1);
  // Four times as many programs join them, of several rows each.
  CHECK(g_recorder.launches[1].grid[0] == 4 * 128);
  CHECK(g_recorder.launches[1].As<PagedParams>().merge_rows == 8);
  CHECK(g_recorder.launches[1].As<PagedParams>().merge_cols == 1);
  PagedParams p = g_recorder.launches[0].As<PagedParams>();
  CHECK(p.hdim == 576 && p.hdim_v == 512 && p.group == 128 && p.splits == 8);
  CHECK(p.programs == 128);

  // Where there are as many tiles of rows, or no room for a part that begins
  // inside of a share, each is whole.
  CHECK(Run(LatentArgs(64, 128)) == Names{"latent_64"});
  CHECK(g_recorder.launches[0].grid[0] == 128);
  mla_attend_args two = LatentArgs(32, 128);
  two.splits = 2;
  CHECK(Run(two) == Names{"latent_64"});
  CHECK(g_recorder.launches[0].grid[0] == 64);

  // Few rows of many parts: 16 programs a row.
  mla_attend_args one = LatentArgs(1, 16);
  one.splits = 256;
  CHECK((Run(one) == Names{"latent_16", "latent_merge"}));
  CHECK(g_recorder.launches[0].grid[0] == 2 * 128);
  CHECK(g_recorder.launches[0].As<PagedParams>().splits == 256);
  CHECK(g_recorder.launches[1].grid[0] == 16 * 16);
  CHECK(g_recorder.launches[1].As<PagedParams>().merge_cols == 16);

  // A block of sm_90 fills a multiprocessor, and what joins parts begins early.
  static std::vector<std::string> early;
  Driver cuda = FakeDriver();
  cuda.platform = Platform::kCuda;
  cuda.launch_early = [](void* function, unsigned gx, unsigned gy, unsigned gz,
                         unsigned bx, unsigned by, unsigned bz, unsigned shared,
                         void* stream, void** params, void** extra) {
    early.push_back(static_cast<const char*>(function));
    return LaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream,
                        params, extra);
  };
  SetDriverForTesting(&cuda);
  g_recorder.multiprocessors = 132;
  NewContext("sm_90");
  CHECK((Run(one) == Names{"latent_hopper", "latent_merge"}));
  CHECK(g_recorder.launches[0].grid[0] == 132 + 1);
  CHECK(g_recorder.launches[0].As<PagedParams>().splits == 132);
  CHECK((early == Names{"latent_hopper", "latent_merge"}));
  CHECK(g_recorder.launches[1].As<PagedParams>().merge_cols == 8);
  mla_attend_args four = LatentArgs(4, 16);
  four.splits = 256;
  CHECK((Run(four) == Names{"latent_hopper", "latent_merge"}));
  CHECK(g_recorder.launches[1].As<PagedParams>().merge_cols == 4);
  SetDriverForTesting(&FakeDriver());

  New(304);  // Room for three parts, but with two all programs go at once.
  mla_attend_args even = LatentArgs(128, 32);
  even.splits = 3;
  CHECK((Run(even) == Names{"latent_32", "latent_merge"}));
  CHECK(g_recorder.launches[0].grid[1] == 2);

  Names names;
  CHECK_OK(mla_attend_kernels({"bf16", {512, 64, -1}, {}}, "gfx942", &names));
  CHECK((names == Names{"latent_any", "latent_merge"}));

  constexpr Bad<mla_attend_args> kCases[] = {
      {[](mla_attend_args* a) { a->nhead_k = 2; }, "nhead_k is 2"},
      {[](mla_attend_args* a) { a->hdim_v = 577; }, "hdim_v is 577"},
      {[](mla_attend_args* a) { a->hdim = 1025; }, "hdim is 1025"},
      {[](mla_attend_args* a) { a->v.side.start = 8; }, "v.side"},
      {[](mla_attend_args* a) { a->v.cache_ptr = At(0x9000); }, "v.side"},
      {[](mla_attend_args* a) { a->k.side.col = a->v.side.col = 2; }, "side"},
      {[](mla_attend_args* a) { a->sinks_step = a->nhead_q; },
       "sinks_step is 16"},
      {[](mla_attend_args* a) {
         a->k.scales.page = 1;
         a->k.scale_size = kPages;
       },
       "k.scales is of tokens"},
      {[](mla_attend_args* a) { a->slopes_ptr = At(0x9000); },
       "slopes_ptr is given"},
      {[](mla_attend_args* a) { a->cp_world_size = 2; }, "places_ptr is null"},
      {[](mla_attend_args* a) { a->cp_world_size = 0; }, "cp_world_size is 0"},
  };
  CheckRefused(LatentArgs(8, 16), kCases);
}

void TestEmpty() {
  New(1);
  CHECK(Run(Args(0)).empty());
  paged_attend_args none = Args(8);
  none.pages = none.k.cache_size = none.v.cache_size = 0;
  CHECK(Run(none) == Names{"decode"});  // It writes zeros.
  // Rows of no sequence are written too.
  none = Args(8);
  none.batch = none.seqlen_q = 0;
  none.splits = 1;
  none.cu_seqlens_ptr = At(0x9000);
  CHECK(Run(none) == Names{"prefill"});
  CHECK(g_recorder.launches[0].grid[0] == 2);
}

void TestInvalidArguments() {
  constexpr Bad<paged_attend_args> kCases[] = {
      {[](paged_attend_args* a) { a->data_type = DataType::kI8; },
       "data_type is i8"},
      {[](paged_attend_args* a) { a->tokens = -1; }, "tokens is -1"},
      {[](paged_attend_args* a) { a->nhead_q = 7; }, "nhead_q is 7"},
      {[](paged_attend_args* a) { a->hdim = 257; }, "hdim is 257"},
      {[](paged_attend_args* a) { a->page_size = 0; }, "page_size is 0"},
      {[](paged_attend_args* a) { a->seqlen_q = 2; }, "seqlen_q is 2"},
      {[](paged_attend_args* a) { a->splits = 0; }, "splits is 0"},
      {[](paged_attend_args* a) { a->parts_ptr = nullptr; },
       "parts_ptr is null"},
      {[](paged_attend_args* a) { a->window_left = -2; }, "window_left is -2"},
      {[](paged_attend_args* a) { a->logits_soft_cap = -1; },
       "logits_soft_cap is -1"},
      {[](paged_attend_args* a) { --a->k.cache_size; },
       "k.side is beyond the array"},
      {[](paged_attend_args* a) { ++a->pages; }, "k.side is beyond"},
      {[](paged_attend_args* a) { a->v.side.page = int64_t{1} << 31; },
       "v.side is 2147483648"},
      {[](paged_attend_args* a) { a->v.side.split = 0; }, "v.side is 0"},
      {[](paged_attend_args* a) { a->k.scales.head = 1; },
       "k.scales is beyond"},
      {[](paged_attend_args* a) { a->v.scale_ptr = nullptr; },
       "v.scales is absent"},
      {[](paged_attend_args* a) { a->sinks_step = 7; }, "sinks_step is 7"},
      {[](paged_attend_args* a) { a->last_pages = true; },
       "last_pages is true"},
      {[](paged_attend_args* a) { a->q_ptr = At(0x18); },
       "q_ptr is not aligned"},
  };
  New(1);
  CheckRefused(Args(8), kCases);

  PagedPlan plan;
  CHECK_OK(paged_attend_plan(Args(8), &plan));
  paged_attend_args other = Args(8);
  other.sinks_ptr = At(0xb000);
  CHECK(paged_attend(other, plan, nullptr).code() ==
        StatusCode::kFailedPrecondition);
}

void TestFailures() {
  for (const char* call :
       {"current_context", "module_load", "module_get_function", "launch"}) {
    New(1);
    g_recorder.failing = call;
    CHECK(paged_attend(Args(8), nullptr).code() == StatusCode::kInternal);
    g_recorder.failing.clear();
    CHECK(Run(Args(8)).size() == 1);
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
  aiter::TestPagesOfKeys();
  aiter::TestTensorMaps();
  aiter::TestUnshared();
  aiter::TestFewKeys();
  aiter::TestWalks();
  aiter::TestFewTiles();
  aiter::TestMayBeShort();
  aiter::TestSeveralRows();
  aiter::TestSplits();
  aiter::TestOneAxis();
  aiter::TestDecodeByTensorMaps();
  aiter::TestSharedKeys();
  aiter::TestLatent();
  aiter::TestEmpty();
  aiter::TestInvalidArguments();
  aiter::TestFailures();
  std::puts("PASS");
  return 0;
}
