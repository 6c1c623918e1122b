// SPDX-License-Identifier: Apache-2.0

// Choice of kernels for any family, from rows that state all it depends on.

#include "third_party/aiter/src/core/select.h"

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "aiter/kernel.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/fake_driver_test.h"

namespace aiter {

namespace {

struct Row {
  const char* symbol;
  const char* op;
  const char* grade;
  std::vector<int32_t> dims;
  uint32_t excludes;
  const char* arch = "gfx942";
  uint32_t needs = 0;
};

const std::vector<Row>& Rows() {
  static const auto* rows = new std::vector<Row>{
      // Bits that the families give other meanings: 1, 4 and 16 are bias, ALiBi
      // and dropout of attention, unaligned, residual and T5 of norms.
      {"norm_fast", "norm_fwd", "fast", {2048}, kNormGeneralOnly},
      {"norm_lean", "norm_fwd", "fast", {4096}, kNormResidual},
      {"norm_any", "norm_fwd", "general", {0}, 0},
      {"mha_fast", "mha_fwd", "fast", {64, 64}, kMhaGeneralOnly},
      {"mha_any", "mha_fwd", "general", {256, 256}, 0},
      {"mha_padded", "mha_fwd", "padded", {128, 128}, kMhaGeneralOnly},
      {"mha_capped",
       "mha_fwd",
       "padded",
       {128, 128},
       kMhaGeneralOnly & ~kMhaSoftCap,
       "gfx942",
       kMhaSoftCap},
      {"mha_big_cap",
       "mha_fwd",
       "padded",
       {256, 256},
       kMhaGeneralOnly & ~kMhaSoftCap,
       "gfx942",
       kMhaSoftCap},
      // Four sizes, the last of which alone tells them apart.
      {"four_8", "rope_fwd", "fast", {64, 2, 4, 8}, 0},
      {"four_16", "rope_fwd", "fast", {64, 2, 4, 16}, 0},
      {"four_any", "rope_fwd", "fast", {32, 2, 4, 0}, 0},
      {"four_up_to", "rope_fwd", "general", {128, 4, 0, 32}, 0},
      {"four_more", "rope_fwd", "general", {128, 4, 0, 64}, 0},
      {"old", "quant_row", "general", {0}, 0, "sm_80"},
  };
  return *rows;
}

}  // namespace

const KernelTable& GetKernelTable() {
  static const auto* kernels = [] {
    auto* made = new std::vector<KernelInfo>;
    for (const Row& row : Rows()) {
      KernelInfo k = {};
      k.symbol = row.symbol;
      k.op = row.op;
      k.grade = row.grade;
      k.arch = row.arch;
      k.data_type = DataType::kBf16;
      k.num_dims = static_cast<int>(row.dims.size());
      std::copy(row.dims.begin(), row.dims.end(), k.dims);
      k.excludes = row.excludes;
      k.needs = row.needs;
      made->push_back(k);
    }
    return made;
  }();
  static const KernelTable table = {Platform::kHip, kernels->data(),
                                    static_cast<int>(kernels->size()), nullptr};
  return table;
}

namespace {

// The name of the kernel for a problem, or the error.
std::string Choice(const char* op, std::vector<int32_t> dims,
                   uint32_t features = 0, const char* arch = "gfx942") {
  ProblemKey key;
  std::copy(dims.begin(), dims.end(), key.dims);
  key.features = features;
  const KernelInfo* kernel;
  Status status = SelectKernel(DeviceOfArch(arch), op, key, &kernel);
  return status.ok() ? kernel->symbol : status.message();
}

void TestFamiliesDoNotMeet() {
  // Attention's fast grade leaves out what is the bit of T5, and of residual.
  static_assert(kNormT5 == kMhaDropout && kNormResidual == kMhaAlibi);
  CHECK((kMhaGeneralOnly & kNormT5) != 0);
  CHECK(Choice("norm_fwd", {2048}) == "norm_fast");
  CHECK(Choice("norm_fwd", {2048}, kNormT5) == "norm_fast");
  CHECK(Choice("norm_fwd", {2048}, kNormT5 | kNormResidual | kNormUnaligned) ==
        "norm_fast");
  CHECK(Choice("norm_fwd", {4096}, kNormT5) == "norm_lean");
  CHECK(Choice("norm_fwd", {4096}, kNormResidual) == "norm_any");
  CHECK(Choice("mha_fwd", {64, 64}, kMhaSink) == "mha_fast");
  CHECK(Choice("mha_fwd", {64, 64}, kMhaDropout) == "mha_any");
}

void TestGrades() {
  // Exact sizes, then sizes up to the row's, the smallest, then anything.
  CHECK(Choice("mha_fwd", {64, 64}) == "mha_fast");
  CHECK(Choice("mha_fwd", {64, 56}) == "mha_padded");
  CHECK(Choice("mha_fwd", {136, 64}) == "mha_any");
  // A row that is made for a feature serves no call without it.
  CHECK(Choice("mha_fwd", {64, 64}, kMhaSoftCap) == "mha_capped");
  CHECK(Choice("mha_fwd", {136, 64}, kMhaSoftCap) == "mha_big_cap");
  CHECK(Choice("mha_fwd", {64, 64}, kMhaSoftCap | kMhaBias) == "mha_any");
}

void TestFourSizes() {
  CHECK(Choice("rope_fwd", {64, 2, 4, 8}) == "four_8");
  CHECK(Choice("rope_fwd", {64, 2, 4, 16}) == "four_16");
  // No size of the general grade is passed over; 0 is no bound.
  CHECK(Choice("rope_fwd", {64, 2, 4, 17}) == "four_up_to");
  CHECK(Choice("rope_fwd", {64, 2, 9999, 32}) == "four_up_to");
  CHECK(Choice("rope_fwd", {64, 2, 4, 33}) == "four_more");
  // Nor is it one of the fast grade, where it is a size of the row.
  CHECK(Choice("rope_fwd", {32, 2, 4, 9999}) == "four_any");
  CHECK(Choice("rope_fwd", {32, 2, 3, 8}) == "four_up_to");
  CHECK(Contains(Choice("rope_fwd", {64, 2, 4, 65}),
                 "No rope_fwd kernel on gfx942 for bf16 with sizes "
                 "(64, 2, 4, 65)"));
  ProblemKey a, b;
  for (int i = 0; i < kMaxDims; ++i) {
    b = a;
    b.dims[i] = 1;
    CHECK(a != b && a.Hash() != b.Hash());
  }
}

void TestMessages() {
  CHECK(
      Contains(Choice("mha_fwd", {512, 512},
                      kMhaAlibi | kMhaPacked | kMhaCuSeqlensQ | kMhaMinSeqlen),
               "bf16 with sizes (512, 512), ALiBi slopes, packed sequences, "
               "lengths of queries, min_seqlen_q"));
  CHECK(Contains(Choice("norm_fwd", {64}, 0, "gfx90a"),
                 "No kernels for device architecture gfx90a; this build has "
                 "kernels for gfx942, sm_80"));
}

void TestParseFeatures() {
  uint32_t bits = 1;
  CHECK_OK(ParseFeatures("norm_fwd", {}, &bits));
  CHECK(bits == 0);
  CHECK_OK(ParseFeatures("norm_bwd_dx", {"t5", "residual"}, &bits));
  CHECK(bits == (kNormT5 | kNormResidual));
  CHECK_OK(ParseFeatures("mha_fwd", {"cu_seqlens"}, &bits));
  CHECK(bits == (kMhaCuSeqlensQ | kMhaCuSeqlensK));
  Status unknown = ParseFeatures("norm_fwd", {"t5", "dropout"}, &bits);
  CHECK(unknown.code() == StatusCode::kInvalidArgument);
  CHECK(Contains(unknown.message(),
                 "features is dropout, but must be of unaligned, layer, "));
  unknown = ParseFeatures("nothing_fwd", {}, &bits);
  CHECK(Contains(unknown.message(),
                 "op is nothing_fwd, but must be of a "
                 "family: "));
}

void TestArchRank() {
  CHECK(ArchRank("gfx942", "gfx942") == INT_MAX);
  CHECK(ArchRank("gfx942", "gfx950") == -1);
  CHECK(ArchRank("gfx942", "sm_90") == -1);
  CHECK(ArchRank("sm_80", "gfx942") == -1);
  CHECK(ArchRank("sm_80", "sm_80") == INT_MAX);
  CHECK(ArchRank("sm_80", "sm_86") == 80);
  CHECK(ArchRank("sm_80", "sm_90") == -1);
  CHECK(ArchRank("sm_90", "sm_90") == INT_MAX);
  CHECK(ArchRank("sm_90", "sm_100") == -1);
  CHECK(Choice("quant_row", {9}, 0, "sm_89") == "old");
  CHECK(FactsOf("gfx950").multiprocessors == 256);
  CHECK(DeviceOfArch("sm_90").max_shared_bytes == 232448);
  CHECK(DeviceOfArch("sm_89").max_shared_bytes == INT_MAX);
}

}  // namespace
}  // namespace aiter

int main() {
  aiter::TestFamiliesDoNotMeet();
  aiter::TestGrades();
  aiter::TestFourSizes();
  aiter::TestMessages();
  aiter::TestParseFeatures();
  aiter::TestArchRank();
  std::puts("ok");
  return 0;
}
