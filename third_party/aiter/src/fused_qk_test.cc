// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing and failures of what stands between
// projections and attention, on a driver that only records what it is asked.

#include "aiter/fused_qk.h"

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
#include "third_party/aiter/src/fused_qk_params.h"

namespace aiter {
namespace {

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  for (bool aligned : {true, false}) {
    KernelInfo k = FakeKernel<FusedQkParams>(blob, aligned ? "aligned" : "any",
                                             "fused_qk_latent", "gfx942",
                                             kFusedQkLatentGrid);
    k.num_dims = 2;
    k.dims[0] = 512;
    k.dims[1] = 64;
    k.tile_m = 4;
    k.excludes = aligned ? kFusedQkUnaligned : 0;
    kernels.push_back(k);
  }
  for (bool plain : {true, false}) {
    KernelInfo k = FakeKernel<FusedQkParams>(blob, plain ? "plain" : "heads",
                                             "fused_qk_heads", "gfx942",
                                             kFusedQkHeadsGrid);
    k.num_dims = 2;
    k.dims[0] = k.dims[1] = plain ? 128 : 256;
    k.tile_m = plain ? 8 : 4;
    k.excludes = plain ? kFusedQkUnaligned | kFusedQkPartial | kFusedQkGptj : 0;
    kernels.push_back(k);
  }
  for (bool whole : {true, false}) {
    KernelInfo k =
        FakeKernel<FusedQkParams>(blob, whole ? "whole" : "rows",
                                  "fused_qk_rows", "gfx942", kFusedQkRowsGrid);
    k.num_dims = 2;
    k.dims[0] = 2048;
    k.dims[1] = whole ? 512 : 2048;
    k.tile_m = 1;
    k.excludes = kFusedQkUnaligned | (whole ? kFusedQkShort : 0);
    kernels.push_back(k);
  }
  for (bool heads : {true, false}) {
    KernelInfo k = FakeKernel<FusedQkParams>(
        blob, heads ? "heads of runs" : "turned", "fused_qk_turned", "gfx942",
        heads ? kFusedQkTurnedGridHeads : kFusedQkTurnedGrid);
    k.num_dims = 2;
    k.dims[0] = 2048;
    k.tile_m = heads ? 16 : 64;
    k.excludes = kFusedQkUnaligned | (heads ? kFusedQkShort : 0);
    kernels.push_back(k);
  }
  return kernels;
}

fused_qk_latent_args Args() {
  fused_qk_latent_args a;
  a.tokens = 3;
  a.heads = 10;
  a.lora = a.first = 512;
  a.rope = 64;
  a.width = 576;
  a.table_rows = 100;
  a.slots = 80;
  a.q_nope_ptr = At(0x1000);
  a.q_pe_ptr = At(0x2000);
  a.kv_c_ptr = At(0x3000);
  a.k_pe_ptr = At(0x4000);
  a.cos_ptr = At(0x5000);
  a.sin_ptr = At(0x6000);
  a.positions_ptr = At(0x7000);
  a.slots_ptr = At(0x8000);
  a.q_out_ptr = At(0x9000);
  a.kv_cache_ptr = At(0xa000);
  a.kv_cache_from_ptr = a.kv_cache_ptr;
  return a;
}

// The kernel that a call launches, or nothing.
std::string Run(const fused_qk_latent_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(fused_qk_latent(args, nullptr));
  return g_recorder.launches.empty() ? "" : g_recorder.launches[0].kernel;
}

void TestLaunch() {
  NewContext("gfx942");
  CHECK(Run(Args()) == "aligned");
  CHECK(g_recorder.launches[0].grid[0] == 3 * (1 + 3));
  fused_qk_latent_args a = Args();
  a.kind = FusedKind::kE5m2;
  a.q_kind = FusedKind::kE4m3fn;
  a.k_scale_ptr = At(0xb000);
  a.weight_ptr = At(0xc000);
  a.is_gptj = true;
  a.eps = 0.5f;
  CHECK(Run(a) == "aligned");
  FusedQkParams p = g_recorder.launches[0].As<FusedQkParams>();
  CHECK(p.heads == 10 && p.lora == 512 && p.rope == 64 && p.width == 576);
  CHECK(p.first == 512 && p.num_slots == 80 && p.table_rows == 100);
  CHECK(p.kind == 4 && p.q_kind == 1 && p.eps == 0.5f);
  CHECK(p.kv_bytes_ptr == a.kv_cache_ptr && p.q_out_bytes_ptr == a.q_out_ptr);
  CHECK(p.flags == (kFusedQkGptj | kFusedQkNorm | kFusedQkCacheBytes |
                    kFusedQkQBytes | kFusedQkKScaled));
  a = Args();
  a.width = 600;
  CHECK(Run(a) == "any");
  a.lora = 520;
  a.first = 520;
  CHECK(fused_qk_latent(a, nullptr).code() == StatusCode::kUnimplemented);
  a = Args();
  a.tokens = 0;
  CHECK(Run(a).empty());
}

void TestInvalidArguments() {
  constexpr Bad<fused_qk_latent_args> kCases[] = {
      {[](fused_qk_latent_args* a) { a->data_type = DataType::kFp32; },
       "data_type is fp32"},
      {[](fused_qk_latent_args* a) { a->tokens = -1; }, "tokens is -1"},
      {[](fused_qk_latent_args* a) { a->heads = 0; }, "heads is 0"},
      {[](fused_qk_latent_args* a) { a->rope = 63; }, "rope is 63"},
      {[](fused_qk_latent_args* a) { a->table_rows = 0; }, "table_rows is 0"},
      {[](fused_qk_latent_args* a) { a->first = 500; }, "first is 500"},
      {[](fused_qk_latent_args* a) { a->width = 570; }, "first is 512"},
      {[](fused_qk_latent_args* a) { a->eps = -1; }, "eps is -1"},
      {[](fused_qk_latent_args* a) { a->q_out_ptr = At(0x18); },
       "q_out_ptr is not aligned"},
  };
  NewContext("gfx942");
  CheckRefused(Args(), kCases);
}

// Heads of 128 columns; a cache of 5 pages of 16 tokens, [.., 2, 128].
fused_qk_heads_args Heads() {
  fused_qk_heads_args a;
  a.tokens = 3;
  a.heads = 10;
  a.k_heads = a.v_heads = 2;
  a.dim = 128;
  a.pairs = a.table_stride = 64;
  a.q_stride = 1280;
  a.k_stride = a.v_stride = 256;
  a.table_rows = 100;
  a.pages = 5;
  a.page_size = 16;
  a.q_ptr = At(0x1000);
  a.k_ptr = At(0x2000);
  a.v_ptr = At(0x3000);
  a.cos_ptr = At(0x5000);
  a.sin_ptr = At(0x6000);
  a.positions_ptr = At(0x7000);
  a.slots_ptr = At(0x8000);
  a.q_out_ptr = At(0x9000);
  for (cache_half* h : {&a.k_half, &a.v_half}) {
    h->cols = 128;
    h->cache_ptr = At(h == &a.k_half ? 0xa000 : 0xb000);
    h->cache_from_ptr = h->cache_ptr;
    h->cache_size = 5 * 16 * 256;
    h->side = {0, 16 * 256, 256, 0, 1, 128, 8, 1};
  }
  return a;
}

std::string Run(const fused_qk_heads_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(fused_qk_heads(args, nullptr));
  return g_recorder.launches.empty() ? "" : g_recorder.launches[0].kernel;
}

void TestHeads() {
  NewContext("gfx942");
  CHECK(Run(Heads()) == "plain");
  // Rows of tokens follow each other: 30 of queries, and twice 6.
  CHECK(g_recorder.launches[0].grid[0] == 4 + 1 + 1);
  FusedQkParams p = g_recorder.launches[0].As<FusedQkParams>();
  // Coefficients count in runs of 8 numbers.
  CHECK(p.k_page == 16 * 32 && p.k_run_offset == 32 && p.k_head == 16);
  CHECK(p.num_slots == 80 && p.page_size == 16 && p.v_heads == 2);
  CHECK(p.flags == (kFusedQkKRuns | kFusedQkVRuns));
  fused_qk_heads_args a = Heads();
  a.is_gptj = a.is_gemma = a.token = true;
  a.kind = FusedKind::kE4m3fn;
  a.q_weight_ptr = a.k_weight_ptr = At(0xc000);
  for (cache_half* h : {&a.k_half, &a.v_half}) {
    h->side.run = 16;
    h->scale_ptr = At(0xd000);
    h->scale_size = 5 * 2 * 16;
    h->scales = {0, 32, 1, 16};
  }
  CHECK(Run(a) == "heads");
  p = g_recorder.launches[0].As<FusedQkParams>();
  CHECK(p.k_page == 16 * 16 && p.k_scale_page == 32 && p.v_scale_head == 16);
  CHECK(p.kind == 1 &&
        p.flags == (kFusedQkGptj | kFusedQkNorm | kFusedQkCacheBytes |
                    kFusedQkKScaled | kFusedQkVScaled | kFusedQkGemma |
                    kFusedQkToken | kFusedQkKRuns | kFusedQkVRuns));
  a = Heads();
  a.pages = a.page_size = a.v_heads = 0;
  a.k_out_ptr = At(0xe000);
  a.pairs = 32;
  CHECK(Run(a) == "heads");
  CHECK(g_recorder.launches[0].grid[0] == 8 + 2);
  // Those of a joint norm begin a tile.
  a.is_joint = true;
  CHECK(Run(a) == "heads");
  CHECK(g_recorder.launches[0].grid[0] == 3 * (3 + 1));
  a.dim = 300;
  CHECK(fused_qk_heads(a, nullptr).code() == StatusCode::kUnimplemented);
  a.tokens = 0;
  a.dim = 128;
  CHECK(Run(a).empty());
}

void TestInvalidHeads() {
  constexpr Bad<fused_qk_heads_args> kCases[] = {
      {[](fused_qk_heads_args* a) { a->data_type = DataType::kFp32; },
       "data_type is fp32"},
      {[](fused_qk_heads_args* a) { a->pairs = 65; }, "pairs is 65"},
      {[](fused_qk_heads_args* a) { a->first = 1; }, "first is 1"},
      {[](fused_qk_heads_args* a) { a->v_heads = 3; }, "v_heads is 3"},
      {[](fused_qk_heads_args* a) { a->table_stride = 63; },
       "table_stride is 63"},
      {[](fused_qk_heads_args* a) { a->token = true; }, "token is true"},
      {[](fused_qk_heads_args* a) { a->tokens = 1 << 30; },
       "tokens * heads is"},
      {[](fused_qk_heads_args* a) { a->pages = 6; },
       "k.side is beyond the array"},
      {[](fused_qk_heads_args* a) {
         a->kind = FusedKind::kInt8;
         a->token = true;
       },
       "k.scales is absent"},
      {[](fused_qk_heads_args* a) { a->eps = -1; }, "eps is -1"},
      {[](fused_qk_heads_args* a) { a->v_half.cache_ptr = At(0x18); },
       "cache_ptr is not aligned"},
  };
  NewContext("gfx942");
  CheckRefused(Heads(), kCases);
}

// Queries of 1536 columns and keys of 512, codes by groups of 128.
fused_qk_rows_args Rows() {
  fused_qk_rows_args a;
  a.tokens = 3;
  a.cols = 1536;
  a.k_cols = 512;
  a.group = 128;
  a.scale_token = 12;
  a.scale_group = 1;
  a.q_type = DataType::kE4m3fn;
  a.eps = 0.5f;
  a.q_ptr = At(0x1000);
  a.residual_ptr = At(0x2000);
  a.q_weight_ptr = At(0x3000);
  a.k_ptr = At(0x4000);
  a.k_weight_ptr = At(0x5000);
  a.residual_out_ptr = At(0x6000);
  a.codes_ptr = At(0x7000);
  a.scale_ptr = At(0x8000);
  a.k_out_ptr = At(0x9000);
  return a;
}

std::string Run(const fused_qk_rows_args& args) {
  g_recorder.launches.clear();
  CHECK_OK(fused_qk_rows(args, nullptr));
  return g_recorder.launches.empty() ? "" : g_recorder.launches[0].kernel;
}

void TestRows() {
  NewContext("gfx942");
  CHECK(Run(Rows()) == "whole");
  CHECK(g_recorder.launches[0].grid[0] == 3);
  FusedQkParams p = g_recorder.launches[0].As<FusedQkParams>();
  CHECK(p.cols == 1536 && p.k_cols == 512 && p.dim == 1536 && p.parts == 1);
  CHECK(p.kind == 1 && p.scale_token == 12 && p.q_scale_ptr == nullptr);
  CHECK(p.flags == (kFusedQkNorm | kFusedQkJoint | kFusedQkQBytes |
                    kFusedQkResidual | kFusedQkKeys));
  fused_qk_rows_args given = Rows();
  given.group = 0;
  given.q_scale_ptr = At(0x10);
  given.scale_ptr = nullptr;
  CHECK(Run(given) == "whole");
  p = g_recorder.launches[0].As<FusedQkParams>();
  CHECK((p.flags & kFusedQkQScaled) != 0 && (p.flags & kFusedQkToken) == 0);
  given = Rows();
  given.group = 64;
  CHECK(Run(given) == "rows");
  fused_qk_rows_args a;
  a.tokens = 3;
  a.parts = 4;
  a.cols = 1024;
  a.dim = 512;
  a.pairs = 32;
  a.first = 448;
  a.table_rows = 9;
  a.is_gptj = true;
  a.q_ptr = At(0x1000);
  a.positions_ptr = a.cos_ptr = a.sin_ptr = At(0x2000);
  a.q_out_ptr = At(0x3000);
  CHECK(Run(a) == "heads of runs");
  // Four runs of the eight heads of a token.
  CHECK(g_recorder.launches[0].grid[0] == 3);
  CHECK(g_recorder.launches[0].grid[1] == 4);
  p = g_recorder.launches[0].As<FusedQkParams>();
  CHECK(p.pairs == 32 && p.first == 448 && p.dim == 512);
  CHECK(p.flags == (kFusedQkGptj | kFusedQkTurned | kFusedQkQOut));
  // A table's rows of 30 cosines, or heads of 448 columns, are no whole runs.
  a.pairs = 30;
  CHECK(Run(a) == "turned");
  CHECK(g_recorder.launches[0].grid[1] == 4);
  a.pairs = 32;
  a.dim = a.cols = 448;
  a.first = 384;
  CHECK(Run(a) == "turned");
  a = Rows();
  a.cols = 1540;
  CHECK(fused_qk_rows(a, nullptr).code() == StatusCode::kUnimplemented);
  a = Rows();
  a.cols = 4096;
  CHECK(fused_qk_rows(a, nullptr).code() == StatusCode::kUnimplemented);
  a.tokens = 0;
  a.cols = 1536;
  CHECK(Run(a).empty());
}

void TestInvalidRows() {
  constexpr Bad<fused_qk_rows_args> kCases[] = {
      {[](fused_qk_rows_args* a) { a->data_type = DataType::kFp32; },
       "data_type is fp32"},
      {[](fused_qk_rows_args* a) { a->parts = 0; }, "parts is 0"},
      {[](fused_qk_rows_args* a) { a->parts = 2; }, "parts is 2"},
      {[](fused_qk_rows_args* a) { a->is_gated_first = true; },
       "gate_ptr is null"},
      {[](fused_qk_rows_args* a) { a->dim = 100; }, "cols is 1536"},
      {[](fused_qk_rows_args* a) { a->dim = 96; }, "dim is 96"},
      {[](fused_qk_rows_args* a) { a->group = 48; }, "group is 48"},
      {[](fused_qk_rows_args* a) { a->q_type = DataType::kBf16; },
       "q_type is bf16"},
      {[](fused_qk_rows_args* a) { a->positions_ptr = At(0x10); },
       "positions_ptr is given"},
      {[](fused_qk_rows_args* a) {
         *a = fused_qk_rows_args();
         a->q_ptr = a->positions_ptr = At(0x10);
         a->cols = 1536;
         a->dim = 128;
         a->pairs = 65;
       },
       "pairs is 65"},
      {[](fused_qk_rows_args* a) { a->k_eps = -1; }, "eps is -1"},
      {[](fused_qk_rows_args* a) { a->codes_ptr = At(0x18); },
       "codes_ptr is not aligned"},
  };
  NewContext("gfx942");
  CheckRefused(Rows(), kCases);
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
  aiter::TestHeads();
  aiter::TestInvalidHeads();
  aiter::TestRows();
  aiter::TestInvalidRows();
  std::puts("PASS");
  return 0;
}
