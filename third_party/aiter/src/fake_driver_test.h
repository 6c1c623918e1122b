// SPDX-License-Identifier: Apache-2.0

// What the tests of operators share: a driver that only records what it is
// asked to do, and rows of a table of kernels for it.
#ifndef AITER_SRC_FAKE_DRIVER_TEST_H_
#define AITER_SRC_FAKE_DRIVER_TEST_H_

#include <lzma.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "aiter/operation.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/kernel_table.h"

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

#define CHECK_OK(expr)                                                   \
  do {                                                                   \
    aiter::Status status_ = (expr);                                      \
    if (!status_.ok()) {                                                 \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expr, \
                   status_.message().c_str());                           \
      std::exit(1);                                                      \
    }                                                                    \
  } while (false)

namespace aiter {

inline constexpr char kObject[] = "a code object";

inline uint32_t CrcOfObject() {
  return lzma_crc32(reinterpret_cast<const uint8_t*>(kObject), sizeof(kObject),
                    /*crc=*/0);
}

// Compressed copy of kObject, where kernels of a test table lie.
struct Blob {
  unsigned char bytes[256];
  size_t size = 0;

  Blob() {
    CHECK(lzma_easy_buffer_encode(
              /*preset=*/0, LZMA_CHECK_CRC32, /*allocator=*/nullptr,
              reinterpret_cast<const uint8_t*>(kObject), sizeof(kObject), bytes,
              &size, sizeof(bytes)) == LZMA_OK);
  }
};

// Writes all parameters in the place of a kernel's arguments.
template <typename Params>
void PackAll(const void* params, const TensorMap*, void* buffer) {
  std::memcpy(buffer, params, sizeof(Params));
}

inline constexpr uint16_t kAllOffsets[] = {0};

// A kernel of the general grade for bf16, with one argument: its parameters.
template <typename Params>
KernelInfo FakeKernel(const Blob& blob, const char* symbol, const char* op,
                      const char* arch, const Grid& grid) {
  KernelInfo k = {};
  k.occupancy = 4;
  k.symbol = symbol;
  k.op = op;
  k.grade = "general";
  k.arch = arch;
  k.data_type = DataType::kBf16;
  k.threads = 256;
  k.shared_bytes = 1024;
  k.grid = &grid;
  k.compressed_bytes = blob.size;
  k.object_bytes = sizeof(kObject);
  k.object_crc = CrcOfObject();
  k.pack = PackAll<Params>;
  k.arg_offsets = kAllOffsets;
  k.num_args = 1;
  return k;
}

struct Launch {
  std::string kernel;
  unsigned grid[3];
  unsigned block;
  unsigned shared;
  void* stream;
  unsigned char args[kMaxArgsBytes];
  bool early = false;

  // The kernel's arguments; Args is what its packing function leaves.
  template <typename Args>
  Args As() const {
    Args copy;
    std::memcpy(static_cast<void*>(&copy), args, sizeof(copy));
    return copy;
  }
};

struct Fill {
  uintptr_t address;
  unsigned value;
  size_t bytes;
};

struct TensorMapCall {
  void* address;
  uint32_t rank;
  uint64_t dims[kMaxTensorMapRank];
  uint64_t strides[kMaxTensorMapRank];
  uint32_t box[kMaxTensorMapRank];
  int type;
  int swizzle;
  int l2_promotion;
};

// State of the recording driver.
struct DeviceCopy {
  uintptr_t to;
  uintptr_t from;
  size_t bytes;
};

struct Recorder {
  std::mutex mutex;
  std::vector<Launch> launches;
  std::vector<Fill> fills;
  std::vector<DeviceCopy> copies;
  std::vector<TensorMapCall> maps;
  int loads = 0;
  int unloads = 0;
  int allowed_shared = 0;
  std::string failing;  // Name of the call that fails.
  std::string arch = "gfx942";
  int max_shared = 64 * 1024;
  int multiprocessors = 0;

  void Clear() {
    launches.clear();
    fills.clear();
    copies.clear();
    maps.clear();
    loads = 0;
    unloads = 0;
    allowed_shared = 0;
  }
};

inline Recorder g_recorder;
inline thread_local uint64_t g_context = 1;

inline constexpr int kError = 719;

inline int Result(const char* call) {
  return g_recorder.failing == call ? kError : 0;
}

inline int ModuleLoad(void** module, const void* image) {
  std::lock_guard<std::mutex> lock(g_recorder.mutex);
  CHECK(std::memcmp(image, kObject, sizeof(kObject)) == 0);
  ++g_recorder.loads;
  *module = &g_recorder;
  return Result("module_load");
}

inline int ModuleUnload(void* module) {
  CHECK(module == &g_recorder);
  ++g_recorder.unloads;
  return 0;
}

inline int ModuleGetFunction(void** function, void* module, const char* name) {
  CHECK(module == &g_recorder);
  *function = const_cast<char*>(name);
  return Result("module_get_function");
}

inline int AllowShared(void*, int attribute, int bytes) {
  CHECK(attribute == 8);
  g_recorder.allowed_shared = bytes;
  return Result("allow_shared");
}

inline int LaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz,
                        unsigned bx, unsigned, unsigned, unsigned shared,
                        void* stream, void** params, void** extra) {
  std::lock_guard<std::mutex> lock(g_recorder.mutex);
  CHECK(params != nullptr && extra == nullptr);
  Launch launch = {
      static_cast<const char*>(function), {gx, gy, gz}, bx, shared, stream, {}};
  // The first argument lies where the buffer of all begins.
  std::memcpy(launch.args, params[0], sizeof(launch.args));
  g_recorder.launches.push_back(launch);
  return Result("launch");
}

inline int LaunchEarly(void* function, unsigned gx, unsigned gy, unsigned gz,
                       unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       void* stream, void** params, void** extra) {
  int error = LaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream,
                           params, extra);
  g_recorder.launches.back().early = true;
  return error;
}

inline int MemsetD8(uintptr_t address, unsigned char value, size_t count,
                    void*) {
  g_recorder.fills.push_back({address, value, count});
  return Result("memset_d8");
}

inline int MemcpyDtoD(uintptr_t to, uintptr_t from, size_t bytes, void*) {
  g_recorder.copies.push_back({to, from, bytes});
  return Result("memcpy_dtod");
}

inline int MemsetD32(uintptr_t address, unsigned value, size_t count, void*) {
  g_recorder.fills.push_back({address, value, 4 * count});
  return Result("memset_d32");
}

inline int RecordTensorMap(TensorMap* map, int type, uint32_t rank,
                           void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box,
                           const uint32_t*, int, int swizzle, int l2_promotion,
                           int) {
  TensorMapCall call = {};
  call.rank = rank;
  call.address = address;
  std::memcpy(call.dims, dims, rank * sizeof(call.dims[0]));
  std::memcpy(call.strides, strides, (rank - 1) * sizeof(call.strides[0]));
  std::memcpy(call.box, box, rank * sizeof(call.box[0]));
  call.type = type;
  call.swizzle = swizzle;
  call.l2_promotion = l2_promotion;
  g_recorder.maps.push_back(call);
  map->opaque[0] = g_recorder.maps.size();
  return Result("encode_tensor_map");
}

inline int CurrentContext(uint64_t* context) {
  *context = g_context;
  return Result("current_context");
}

inline int CurrentDevice(int* ordinal) {
  *ordinal = static_cast<int>(g_context);
  return Result("current_device");
}

inline int DeviceCount(int* count) {
  *count = 2;
  return Result("device_count");
}

inline Status DescribeDevice(int, DeviceInfo* info) {
  if (Result("describe_device") != 0) {
    return Status(StatusCode::kInternal, "describe_device");
  }
  info->arch = g_recorder.arch;
  info->max_shared_bytes = g_recorder.max_shared;
  info->multiprocessors = g_recorder.multiprocessors;
  return Status();
}

inline std::string ErrorString(int) { return "planted"; }

inline const Driver& FakeDriver() {
  static const Driver driver = [] {
    Driver d;
    d.platform = Platform::kHip;
    d.module_load = ModuleLoad;
    d.module_unload = ModuleUnload;
    d.module_get_function = ModuleGetFunction;
    d.allow_shared = AllowShared;
    d.launch = LaunchKernel;
    d.launch_early = LaunchEarly;
    d.memset_d8 = MemsetD8;
    d.memset_d32 = MemsetD32;
    d.memcpy_dtod = MemcpyDtoD;
    d.encode_tensor_map = RecordTensorMap;
    d.current_context = CurrentContext;
    d.current_device = CurrentDevice;
    d.device_count = DeviceCount;
    d.describe_device = DescribeDevice;
    d.error_string = ErrorString;
    return d;
  }();
  return driver;
}

// A context that nothing is loaded in, on a device of architecture `arch`.
inline void NewContext(const std::string& arch, int max_shared = 64 * 1024) {
  static uint64_t last = 100;
  g_recorder.Clear();
  g_recorder.arch = arch;
  g_recorder.max_shared = max_shared;
  g_context = ++last;
}

inline void* At(uintptr_t address) { return reinterpret_cast<void*>(address); }

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The table of what `make` makes, which lives as long as the process.
inline KernelTable TableOf(std::vector<KernelInfo> (*make)(const Blob&)) {
  static const Blob blob;
  static const std::vector<KernelInfo> kernels = make(blob);
  return {Platform::kHip, kernels.data(), static_cast<int>(kernels.size()),
          blob.bytes};
}

// Checks that a call is refused, in words with `says` in them, and launches
// nothing.
template <typename Args>
void CheckRefused(const Args& args, const std::string& says) {
  Status status = OperationOf<Args>::kRun(args, nullptr);
  if (status.code() != StatusCode::kInvalidArgument ||
      !Contains(status.message(), says) || !g_recorder.launches.empty()) {
    std::fprintf(stderr, "wanted \"%s\", got \"%s\"\n", says.c_str(),
                 status.message().c_str());
    std::exit(1);
  }
}

// What makes a call one that is refused, and what is said of it.
template <typename Args>
struct Bad {
  void (*change)(Args*);
  const char* says;
};

// `good` is served, and refused after each of the changes.
template <typename Args, size_t kCount>
void CheckRefused(const Args& good, const Bad<Args> (&cases)[kCount]) {
  CHECK_OK(OperationOf<Args>::kRun(good, nullptr));
  g_recorder.launches.clear();
  for (const Bad<Args>& c : cases) {
    Args args = good;
    c.change(&args);
    CheckRefused(args, c.says);
  }
}

}  // namespace aiter

#endif  // AITER_SRC_FAKE_DRIVER_TEST_H_
