// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/launch.h"

#include <algorithm>
#include <string>

#include "third_party/aiter/src/core/kernel_table.h"
#include "third_party/aiter/src/core/select.h"

namespace aiter {
namespace {

constexpr int64_t kMaxGridX = INT32_MAX;
constexpr int64_t kMaxGridYZ = 65535;
// HIP counts threads, not blocks, in 32 bits.
constexpr int64_t kMaxHipThreads = UINT32_MAX;

// Values of CUtensorMapDataType, CUtensorMapL2promotion.
constexpr int kTensorMapUint8 = 0;
constexpr int kTensorMapFloat16 = 6;
constexpr int kTensorMapFloat32 = 7;
constexpr int kTensorMapBfloat16 = 9;
constexpr int kL2Promotion128B = 2;
constexpr int kL2Promotion256B = 3;

int TensorMapType(DataType type) {
  switch (type) {
    case DataType::kFp16:
      return kTensorMapFloat16;
    case DataType::kBf16:
      return kTensorMapBfloat16;
    case DataType::kFp32:
      return kTensorMapFloat32;
    default:
      return kTensorMapUint8;
  }
}

}  // namespace

int64_t ElementBytes(DataType type) {
  switch (type) {
    case DataType::kFp32:
      return 4;
    case DataType::kFp16:
    case DataType::kBf16:
      return 2;
    default:
      return 1;
  }
}

Status EncodeTensorMap(const Driver& driver, const KernelInfo& kernel,
                       const TensorMapSpec& spec, const MappedTensor& tensor,
                       TensorMap* map) {
  if (driver.encode_tensor_map == nullptr) {
    return Status(StatusCode::kFailedPrecondition,
                  std::string("The GPU driver is too old for kernel ") +
                      kernel.symbol + ": it has no cuTensorMapEncodeTiled");
  }
  uint64_t dims[kMaxTensorMapRank];
  uint64_t stride_bytes[kMaxTensorMapRank];
  uint32_t box[kMaxTensorMapRank];
  uint32_t element_strides[kMaxTensorMapRank];
  for (int i = 0; i < tensor.rank; ++i) {
    dims[i] = static_cast<uint64_t>(tensor.dims[i]);
    box[i] = spec.box[i];
    element_strides[i] = 1;
    if (i > 0) {
      stride_bytes[i - 1] = static_cast<uint64_t>(tensor.strides[i - 1] *
                                                  ElementBytes(tensor.type));
    }
  }
  int swizzle = 0;  // CUtensorMapSwizzle counts none, 32, 64, 128 bytes.
  for (int bytes = spec.swizzle_bytes; bytes > 16; bytes /= 2) ++swizzle;
  int error = driver.encode_tensor_map(
      map, TensorMapType(tensor.type), static_cast<uint32_t>(tensor.rank),
      const_cast<void*>(tensor.address), dims, stride_bytes, box,
      element_strides, /*interleave=*/0, swizzle,
      tensor.reads_ahead ? kL2Promotion256B : kL2Promotion128B,
      /*out_of_bounds=*/0);
  if (error == 0) return Status();
  return DriverError(
      driver, error,
      std::string("Encoding a tensor map of kernel ") + kernel.symbol);
}

int Multiprocessors(const DeviceInfo& device, const KernelInfo& kernel) {
  return device.multiprocessors > 0 ? device.multiprocessors
                                    : FactsOf(kernel.arch).multiprocessors;
}

int BlocksAtOnce(const DeviceInfo& device, const KernelInfo& kernel, int most) {
  // Shared memory that each block takes beside its own, and of which a
  // multiprocessor has as much beside what one block may have.
  constexpr int kOfEachBlock = 1024;
  const int64_t room = (int64_t{device.max_shared_bytes} + kOfEachBlock) /
                       (int64_t{kernel.shared_bytes} + kOfEachBlock);
  return static_cast<int>(std::clamp<int64_t>(room, 1, most)) *
         Multiprocessors(device, kernel);
}

Status LaunchKernel(const Driver& driver, const LoadedKernel& loaded,
                    const void* params, void* stream, const TensorMap* maps,
                    bool early) {
  const KernelInfo& kernel = *loaded.info;
  int64_t sizes[3] = {1, 1, 1};
  kernel.grid->sizes(kernel, params, sizes);
  if (sizes[0] == 0 || sizes[1] == 0 || sizes[2] == 0) return Status();
  unsigned grid[3];
  for (int i = 0; i < 3; ++i) {
    int64_t limit = i > 0 ? kMaxGridYZ : kMaxGridX;
    if (driver.platform == Platform::kHip && i == 0) {
      limit = kMaxHipThreads / kernel.threads;
    }
    if (sizes[i] > limit) {
      return Status(StatusCode::kInvalidArgument,
                    std::string(kernel.grid->axes[i]) + " is " +
                        std::to_string(sizes[i]) + ", but kernel " +
                        kernel.symbol + " takes at most " +
                        std::to_string(limit));
    }
    grid[i] = static_cast<unsigned>(sizes[i]);
  }
  alignas(128) unsigned char buffer[kMaxArgsBytes];
  kernel.pack(params, maps, buffer);
  // One by one rather than as a buffer: where a buffer's arguments begin is
  // the compiler's choice on CUDA once one of them is aligned to 64 bytes.
  void* args[kMaxArgs];
  for (int i = 0; i < kernel.num_args; ++i) {
    args[i] = buffer + kernel.arg_offsets[i];
  }
  // Only its kernels have instructions to wait with.
  const bool waits = early && std::string("sm_90") == kernel.arch;
  auto* launch =
      waits && driver.launch_early ? driver.launch_early : driver.launch;
  int error = launch(loaded.function, grid[0], grid[1], grid[2],
                     static_cast<unsigned>(kernel.threads), 1, 1,
                     static_cast<unsigned>(kernel.shared_bytes), stream, args,
                     /*extra=*/nullptr);
  if (error == 0) return Status();
  return DriverError(
      driver, error,
      std::string("Launching kernel ") + kernel.symbol + " on a grid of (" +
          std::to_string(grid[0]) + ", " + std::to_string(grid[1]) + ", " +
          std::to_string(grid[2]) + ") blocks of " +
          std::to_string(kernel.threads) + " threads with " +
          std::to_string(kernel.shared_bytes) + " bytes of shared memory");
}

Status FillZero(const Driver& driver, const void* address, int64_t bytes,
                void* stream) {
  if (bytes == 0) return Status();
  int error = driver.memset_d8(reinterpret_cast<uintptr_t>(address), 0,
                               static_cast<size_t>(bytes), stream);
  if (error == 0) return Status();
  return DriverError(driver, error,
                     "Filling " + std::to_string(bytes) + " bytes with 0");
}

Status FillMinusInfinity(const Driver& driver, const void* address,
                         int64_t count, void* stream) {
  if (count == 0) return Status();
  constexpr unsigned kMinusInfinity = 0xff800000;
  int error =
      driver.memset_d32(reinterpret_cast<uintptr_t>(address), kMinusInfinity,
                        static_cast<size_t>(count), stream);
  if (error == 0) return Status();
  return DriverError(driver, error,
                     "Filling " + std::to_string(count) + " numbers with -inf");
}

Status CopyBytes(const Driver& driver, const void* to, const void* from,
                 int64_t bytes, void* stream) {
  if (bytes == 0 || to == from) return Status();
  int error = driver.memcpy_dtod(reinterpret_cast<uintptr_t>(to),
                                 reinterpret_cast<uintptr_t>(from),
                                 static_cast<size_t>(bytes), stream);
  if (error == 0) return Status();
  return DriverError(driver, error,
                     "Copying " + std::to_string(bytes) + " bytes");
}

}  // namespace aiter
