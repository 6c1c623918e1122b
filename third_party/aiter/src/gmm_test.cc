// SPDX-License-Identifier: Apache-2.0

// Choice of kernels, argument packing, grids, tensor maps and failures of
// grouped products, on a driver that only records what it is asked to do.

#include "aiter/gmm.h"

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
#include "third_party/aiter/src/gmm_params.h"

namespace aiter {
namespace {

constexpr TensorMapSpec kMaps[] = {
    {kGmmTensorA, 3, 128, {64, 64, 1}},
    {kGmmTensorB, 3, 128, {64, 64, 1}},
    {kGmmTensorOut, 3, 128, {64, 64, 1}},
};

std::vector<KernelInfo> MakeKernels(const Blob& blob) {
  std::vector<KernelInfo> kernels;
  auto add = [&](const char* symbol, const char* op, const Grid& grid, int rows,
                 uint32_t excludes, int tile_m) {
    KernelInfo k = FakeKernel<GmmParams>(blob, symbol, op, "gfx942", grid);
    k.num_dims = 1;
    k.dims[0] = rows;
    k.excludes = excludes;
    k.tile_m = tile_m;
    k.tile_n = 64;
    k.tile_k = 32;
    if (excludes != 0) {
      k.tensor_maps = kMaps;
      k.num_tensor_maps = k.op == std::string("gmm_tn") ? 3 : 2;
    }
    kernels.push_back(k);
  };
  add("plan", "gmm_plan", kGmmPlanGrid, 0, 0, 32);
  add("few", "gmm_nn", kGmmNnGrid, 16, kGmmUnaligned, 16);
  add("many", "gmm_nn", kGmmNnGrid, 0, kGmmUnaligned, 128);
  add("any", "gmm_nn", kGmmNnGrid, 0, 0, 64);
  add("nt", "gmm_nt", kGmmNtGrid, 0, kGmmUnaligned, 64);
  add("any nt", "gmm_nt", kGmmNtGrid, 0, 0, 64);
  add("nn ends", "gmm_nn_epilogue", kGmmNnEpilogueGrid, 0, kGmmUnaligned, 64);
  add("nt ends", "gmm_nt_epilogue", kGmmNtEpilogueGrid, 0, kGmmUnaligned, 64);
  add("tn", "gmm_tn", kGmmTnGrid, 0, kGmmUnaligned, 64);
  add("row", "gmm_row", kGmmRowGrid, 0, 0, 128);
  add("block", "gmm_block", kGmmBlockGrid, 0, 0, 128);
  add("mx", "gmm_mx", kGmmMxGrid, 0, kGmmUnaligned, 32);
  add("i4", "gmm_i4", kGmmI4Grid, 0, kGmmUnaligned, 32);
  for (KernelInfo& k : kernels) {
    if (k.tile_m == 128 && k.excludes == 0) k.data_type = DataType::kE4m3fnuz;
  }
  return kernels;
}

gmm_args Args(int64_t m, int64_t n, int64_t k, int64_t groups,
              GmmLayout layout = GmmLayout::kNN) {
  gmm_args a;
  a.layout = layout;
  a.m = m;
  a.n = n;
  a.k = k;
  a.groups = groups;
  a.a_ptr = At(0x1000);
  a.b_ptr = At(0x2000);
  a.sizes_ptr = At(0x3000);
  a.out_ptr = At(0x4000);
  a.plan_ptr = At(0x5000);
  return a;
}

// The product's kernel of a call, and what it launched.
std::string Run(const gmm_args& args, unsigned* blocks, GmmParams* params) {
  g_recorder.Clear();
  CHECK_OK(gmm(args, nullptr));
  CHECK(g_recorder.launches.size() == 2);
  const Launch& plan = g_recorder.launches[0];
  const Launch& product = g_recorder.launches[1];
  CHECK(plan.kernel == "plan");
  *params = product.As<GmmParams>();
  CHECK(plan.grid[0] ==
        static_cast<unsigned>((params->tiles_of_rows + 1 + 31) / 32));
  // The list has room for what is planned.
  CHECK(params->tiles_of_rows + 1 <= gmm_plan_entries(args.m, args.groups));
  *blocks = product.grid[0];
  return product.kernel;
}

void TestSelection() {
  NewContext("gfx942");
  unsigned blocks;
  GmmParams p;
  CHECK(Run(Args(130, 64, 32, 10), &blocks, &p) == "few");
  // ceil(130 / 16) tiles of rows, one more a group and one of what is left.
  CHECK(p.tile_rows == 16 && p.tiles_of_rows == 9 + 11 && blocks == 20);
  CHECK(Run(Args(1300, 100, 32, 10), &blocks, &p) == "any");
  CHECK(p.tiles_of_rows == 21 + 11 && blocks == 2 * 32);
  gmm_args a = Args(1300, 104, 32, 10);
  a.lead = true;
  a.out_type = DataType::kFp32;
  CHECK(Run(a, &blocks, &p) == "many");
  CHECK(p.flags == static_cast<int32_t>(kGmmLead | kGmmOutF32));
  CHECK(p.groups == 10 && p.m == 1300 && p.n == 104 && p.k == 32);
  CHECK(Run(Args(100, 64, 32, 0x10, GmmLayout::kNT), &blocks, &p) == "nt");
  a = Args(100, 96, 32, 3, GmmLayout::kNT);
  a.gates = GmmGates::kHalves;
  a.activation = GmmActivation::kSilu;
  CHECK(Run(a, &blocks, &p) == "nt" && p.n == 96);
  CHECK(p.flags == static_cast<int32_t>(kGmmGated) && blocks == 6 * 3);
  // Gates and ups are further apart than offsets of 32 bits reach.
  a.n = a.k = 1 << 16;
  CHECK(Run(a, &blocks, &p) == "any nt");
  // What more there is to do than silu(gate) * up has kernels of its own.
  a = Args(100, 96, 32, 3, GmmLayout::kNT);
  a.activation = GmmActivation::kRelu;
  CHECK(Run(a, &blocks, &p) == "nt ends" && p.flags == 0);
  a.gates = GmmGates::kHalves;
  a.activation = GmmActivation::kGelu;
  CHECK(Run(a, &blocks, &p) == "nt ends" && p.activation == 2);
  a.activation = GmmActivation::kSilu;
  a.gate_limit = a.up_limit = 7;
  CHECK(Run(a, &blocks, &p) == "nt ends" && p.up_limit == 7);
  a.layout = GmmLayout::kNN;
  a.gates = GmmGates::kPairs;
  a.bias_ptr = At(0x6000);
  CHECK(Run(a, &blocks, &p) == "nn ends" && p.bias_ptr == At(0x6000));
  CHECK(p.flags == static_cast<int32_t>(kGmmGated | kGmmPairs | kGmmBias));
  CHECK(blocks == 6 * 3);
  CHECK(Run(Args(100, 104, 200, 3, GmmLayout::kTN), &blocks, &p) == "tn");
  CHECK(p.tile_rows == 0 && p.tiles_of_rows == 3 && blocks == 3 * 4 * 2);

  a = Args(1300, 104, 32, 10, GmmLayout::kNT);
  a.scaling = GmmScaling::kRow;
  a.data_type = DataType::kE4m3fnuz;
  a.a_scale_ptr = At(0x6000);
  a.b_scale_ptr = At(0x7000);
  CHECK(Run(a, &blocks, &p) == "row");
  CHECK(p.a_scale_ptr == At(0x6000) && p.b_scale_ptr == At(0x7000));
  CHECK(p.flags == static_cast<int32_t>(kGmmFnuz));
  a.scaling = GmmScaling::kBlock;
  CHECK(Run(a, &blocks, &p) == "block");

  // Four bits: rows of b have k / 2 bytes.
  a = Args(1300, 96, 64, 10, GmmLayout::kNT);
  a.scaling = GmmScaling::kMx;
  a.b_scale_ptr = At(0x7000);
  CHECK(Run(a, &blocks, &p) == "mx");
  CHECK(p.b_packed_ptr == a.b_ptr && p.b_scale_e8m0_ptr == At(0x7000));
  a.scaling = GmmScaling::kI4;
  CHECK(Run(a, &blocks, &p) == "i4" && p.b_scale_bf16_ptr == At(0x7000));
  a.k = 48;
  CHECK(gmm(a, nullptr).code() == StatusCode::kUnimplemented);

  std::vector<std::string> names;
  CHECK_OK(gmm_kernels({"bf16", {1300, 104, 32, 10}, {}}, "gfx942", &names));
  CHECK(names == (std::vector<std::string>{"plan", "many"}));
  CHECK_OK(gmm_kernels({"bf16", {-1, -1, 32, -1}, {}}, "gfx942", &names));
  CHECK(names == (std::vector<std::string>{"plan", "any"}));
  CHECK_OK(gmm_kernels({"bf16", {9, 8, 8, 1}, {"tn"}}, "gfx942", &names));
  CHECK(names == (std::vector<std::string>{"plan", "tn"}));
}

void TestTensorMaps() {
  NewContext("gfx942");
  unsigned blocks;
  GmmParams p;
  auto dims = [](int i) {
    const TensorMapCall& map = g_recorder.maps[i];
    return std::vector<uint64_t>(map.dims, map.dims + 3);
  };
  using Dims = std::vector<uint64_t>;
  Run(Args(1300, 104, 32, 10), &blocks, &p);
  CHECK(dims(0) == (Dims{32, 1300, 1}) && dims(1) == (Dims{104, 32, 10}));
  gmm_args a = Args(1300, 104, 32, 10, GmmLayout::kNT);
  a.gates = GmmGates::kHalves;
  a.activation = GmmActivation::kSilu;
  Run(a, &blocks, &p);
  CHECK(dims(1) == (Dims{32, 208, 10}));
  a.layout = GmmLayout::kNN;
  a.gates = GmmGates::kPairs;
  Run(a, &blocks, &p);
  CHECK(dims(0) == (Dims{32, 1300, 1}) && dims(1) == (Dims{208, 32, 10}));
  Run(Args(1300, 104, 32, 10, GmmLayout::kTN), &blocks, &p);
  CHECK(dims(0) == (Dims{32, 1300, 1}) && dims(1) == (Dims{104, 1300, 1}));
  CHECK(dims(2) == (Dims{104, 32, 10}));
}

void TestNothingToMultiply() {
  NewContext("gfx942");
  g_recorder.Clear();
  CHECK_OK(gmm(Args(5, 16, 0, 3), nullptr));
  CHECK(g_recorder.launches.empty() && g_recorder.fills.size() == 1);
  CHECK(g_recorder.fills[0].bytes == 5 * 16 * 2);
  g_recorder.Clear();
  CHECK_OK(gmm(Args(0, 16, 8, 3, GmmLayout::kTN), nullptr));
  CHECK(g_recorder.fills[0].bytes == 3 * 8 * 16 * 2);
}

void TestFailures() {
  NewContext("gfx942");
  gmm_args a = Args(5, 16, 8, 3);
  a.data_type = DataType::kFp32;
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a = Args(5, 16, 8, 3);
  a.out_type = DataType::kFp16;
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a.data_type = DataType::kI8;
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a.scaling = GmmScaling::kRow;
  a.out_type = DataType::kBf16;
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a.layout = GmmLayout::kNT;
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);  // No scales.
  a = Args(5, 32, 32, 3, GmmLayout::kNT);
  a.scaling = GmmScaling::kMx;
  a.b_scale_ptr = At(0x7000);
  a.a_scale_ptr = At(0x6000);  // Of a bf16 a.
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a.data_type = DataType::kE2m1;
  a.scaling = GmmScaling::kI4;
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a = Args(5, 16, 8, 3);
  a.gates = GmmGates::kHalves;  // Of kNN.
  a.activation = GmmActivation::kSilu;
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a.gates = GmmGates::kPairs;
  a.activation = GmmActivation::kRelu;  // Of gates.
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a = Args(5, 16, 8, 3);
  a.activation = GmmActivation::kSwiglu;  // Of no gates.
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a = Args(5, 16, 8, 3);
  a.up_limit = 1;  // Likewise.
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a = Args(5, 16, 8, 3, GmmLayout::kTN);
  a.bias_ptr = At(0x6000);
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a = Args(5, 16, 8, 3);
  a.bias_ptr = At(0x6001);
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a = Args(-1, 16, 8, 3);
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
  a = Args(5, 16, 8, 3);
  a.plan_ptr = At(0x5001);
  CHECK(gmm(a, nullptr).code() == StatusCode::kInvalidArgument);
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
  aiter::TestTensorMaps();
  aiter::TestNothingToMultiply();
  aiter::TestFailures();
  std::puts("PASS");
  return 0;
}
