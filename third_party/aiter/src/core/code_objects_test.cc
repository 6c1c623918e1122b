// SPDX-License-Identifier: Apache-2.0

// Loading of code objects that lie compressed in groups.

#include "third_party/aiter/src/core/code_objects.h"

#include <lzma.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "aiter/status.h"
#include "third_party/aiter/src/core/features.h"
#include "third_party/aiter/src/core/grids.h"
#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/fake_driver_test.h"

namespace aiter {
namespace {

constexpr size_t kBefore = 48;
constexpr size_t kGroupBytes = kBefore + sizeof(kObject);

// Twice a group of another object and kObject; the second has a wrong bit.
struct Groups {
  std::vector<uint8_t> bytes = std::vector<uint8_t>(1024);
  size_t size = 0;

  Groups() {
    uint8_t group[kGroupBytes] = {1, 2, 3};
    std::memcpy(group + kBefore, kObject, sizeof(kObject));
    CHECK(lzma_easy_buffer_encode(6, LZMA_CHECK_CRC32, nullptr, group,
                                  kGroupBytes, bytes.data(), &size,
                                  bytes.size()) == LZMA_OK);
    bytes.resize(size);
    bytes.insert(bytes.end(), bytes.begin(), bytes.end());
    bytes[size + size / 2] ^= 1;
  }
};

const Groups& TheGroups() {
  static const Groups groups;
  return groups;
}

KernelInfo Kernel(const char* symbol, size_t offset, size_t compressed_bytes) {
  KernelInfo k =
      FakeKernel<int>(Blob(), symbol, "norm_fwd", "gfx942", kNormFwdGrid);
  k.offset = offset;
  k.compressed_bytes = compressed_bytes;
  k.object_offset = kBefore;
  return k;
}

// ModuleLoad checks that what it gets is kObject.
void TestObjectInsideGroup() {
  NewContext("gfx942");
  Context* context = nullptr;
  CHECK_OK(Context::Current(&context));
  void* function = nullptr;
  CHECK_OK(context->Load(GetKernelTable().kernels[0], &function));
  CHECK(std::string(static_cast<const char*>(function)) == "whole");
  CHECK(g_recorder.loads == 1);
}

void TestDamagedGroups() {
  NewContext("gfx942");
  Context* context = nullptr;
  CHECK_OK(Context::Current(&context));
  for (int i = 1; i < GetKernelTable().num_kernels; ++i) {
    const KernelInfo& kernel = GetKernelTable().kernels[i];
    void* function = nullptr;
    Status status = context->Load(kernel, &function);
    CHECK(status.code() == StatusCode::kInternal);
    CHECK(
        Contains(status.message(), std::string(kernel.symbol) + " is damaged"));
  }
  CHECK(g_recorder.loads == 0);
}

}  // namespace

const KernelTable& GetKernelTable() {
  static const std::vector<KernelInfo>* kernels = [] {
    size_t size = TheGroups().size;
    auto* all = new std::vector<KernelInfo>{
        Kernel("whole", 0, size), Kernel("cut", 0, size / 2),
        Kernel("flipped", size, size), Kernel("longer", 0, size),
        Kernel("other", 0, size)};
    (all->end() - 2)->object_bytes += 16;
    all->back().object_crc ^= 1;
    return all;
  }();
  static const KernelTable table = {Platform::kHip, kernels->data(),
                                    static_cast<int>(kernels->size()),
                                    TheGroups().bytes.data()};
  return table;
}

}  // namespace aiter

int main() {
  aiter::SetDriverForTesting(&aiter::FakeDriver());
  aiter::TestObjectInsideGroup();
  aiter::TestDamagedGroups();
  std::puts("PASS");
  return 0;
}
