// SPDX-License-Identifier: Apache-2.0

// The HIP runtime's binary interface, as far as the simulator has it: error
// codes, enumerations and structures. Values and layouts are HIP's.
#ifndef AMDGPU_SIM_HIP_TYPES_H_
#define AMDGPU_SIM_HIP_TYPES_H_

#include <cstddef>
#include <cstdint>

namespace amdgpu_sim {

// X(constant, value, name in HIP, text)
#define AMDGPU_SIM_ERRORS(X)                                                  \
  X(kSuccess, 0, "hipSuccess", "no error")                                    \
  X(kInvalidValue, 1, "hipErrorInvalidValue", "invalid argument")             \
  X(kOutOfMemory, 2, "hipErrorOutOfMemory", "out of memory")                  \
  X(kDeinitialized, 4, "hipErrorDeinitialized", "driver shutting down")       \
  X(kInvalidConfiguration, 9, "hipErrorInvalidConfiguration",                 \
    "invalid configuration argument")                                         \
  X(kInvalidSymbol, 13, "hipErrorInvalidSymbol", "invalid device symbol")     \
  X(kInvalidMemcpyDirection, 21, "hipErrorInvalidMemcpyDirection",            \
    "invalid copy direction for memcpy")                                      \
  X(kInvalidDeviceFunction, 98, "hipErrorInvalidDeviceFunction",              \
    "invalid device function")                                                \
  X(kInvalidDevice, 101, "hipErrorInvalidDevice", "invalid device ordinal")   \
  X(kInvalidImage, 200, "hipErrorInvalidImage",                               \
    "device kernel image is invalid")                                         \
  X(kInvalidContext, 201, "hipErrorInvalidContext", "invalid device context") \
  X(kNoBinaryForGpu, 209, "hipErrorNoBinaryForGpu",                           \
    "no kernel image is available for execution on the device")               \
  X(kFileNotFound, 301, "hipErrorFileNotFound", "file not found")             \
  X(kInvalidHandle, 400, "hipErrorInvalidHandle", "invalid resource handle")  \
  X(kIllegalState, 401, "hipErrorIllegalState",                               \
    "the operation cannot be performed in the present state")                 \
  X(kNotFound, 500, "hipErrorNotFound", "named symbol not found")             \
  X(kNotReady, 600, "hipErrorNotReady", "device not ready")                   \
  X(kIllegalAddress, 700, "hipErrorIllegalAddress",                           \
    "an illegal memory access was encountered")                               \
  X(kPeerAccessAlreadyEnabled, 704, "hipErrorPeerAccessAlreadyEnabled",       \
    "peer access is already enabled")                                         \
  X(kPeerAccessNotEnabled, 705, "hipErrorPeerAccessNotEnabled",               \
    "peer access has not been enabled")                                       \
  X(kHostMemoryAlreadyRegistered, 712, "hipErrorHostMemoryAlreadyRegistered", \
    "part or all of the requested memory range is already mapped")            \
  X(kHostMemoryNotRegistered, 713, "hipErrorHostMemoryNotRegistered",         \
    "pointer does not correspond to a registered memory region")              \
  X(kLaunchFailure, 719, "hipErrorLaunchFailure",                             \
    "unspecified launch failure")                                             \
  X(kCooperativeLaunchTooLarge, 720, "hipErrorCooperativeLaunchTooLarge",     \
    "too many blocks in cooperative launch")                                  \
  X(kNotSupported, 801, "hipErrorNotSupported", "operation not supported")    \
  X(kStreamCaptureUnsupported, 900, "hipErrorStreamCaptureUnsupported",       \
    "operation not permitted when stream is capturing")                       \
  X(kStreamCaptureInvalidated, 901, "hipErrorStreamCaptureInvalidated",       \
    "operation failed due to a previous error during capture")                \
  X(kStreamCaptureMerge, 902, "hipErrorStreamCaptureMerge",                   \
    "operation would result in a merge of separate capture sequences")        \
  X(kStreamCaptureUnmatched, 903, "hipErrorStreamCaptureUnmatched",           \
    "capture was not ended in the same stream as it began")                   \
  X(kStreamCaptureUnjoined, 904, "hipErrorStreamCaptureUnjoined",             \
    "capturing stream has unjoined work")                                     \
  X(kStreamCaptureIsolation, 905, "hipErrorStreamCaptureIsolation",           \
    "dependency created on uncaptured work in another stream")                \
  X(kStreamCaptureImplicit, 906, "hipErrorStreamCaptureImplicit",             \
    "operation would make the legacy stream depend on a capturing blocking "  \
    "stream")                                                                 \
  X(kCapturedEvent, 907, "hipErrorCapturedEvent",                             \
    "operation not permitted on an event last recorded in a capturing "       \
    "stream")                                                                 \
  X(kStreamCaptureWrongThread, 908, "hipErrorStreamCaptureWrongThread",       \
    "attempt to terminate a thread-local capture sequence from another "      \
    "thread")                                                                 \
  X(kGraphExecUpdateFailure, 910, "hipErrorGraphExecUpdateFailure",           \
    "the graph update was not performed because it included changes which "   \
    "violated constraints specific to instantiated graph update")             \
  X(kUnknown, 999, "hipErrorUnknown", "unknown error")

enum Error : int {
#define AMDGPU_SIM_ERROR(constant, value, name, text) constant = value,
  AMDGPU_SIM_ERRORS(AMDGPU_SIM_ERROR)
#undef AMDGPU_SIM_ERROR
};

// Objects behind HIP's opaque handles.
class Stream;
class Event;
class Graph;
class GraphExec;
struct GraphNode;
class Module;
struct Function;

struct Dim3 {
  uint32_t x, y, z;
};

// The streams that are not created: 0 is the legacy one too.
constexpr uintptr_t kLegacyStream = 1;
constexpr uintptr_t kPerThreadStream = 2;

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;

enum CopyKind : int {
  kHostToHost = 0,
  kHostToDevice = 1,
  kDeviceToHost = 2,
  kDeviceToDevice = 3,
  kCopyDefault = 4,
};

enum CaptureMode : int {
  kCaptureGlobal = 0,
  kCaptureThreadLocal = 1,
  kCaptureRelaxed = 2,
};

enum CaptureStatus : int {
  kCaptureNone = 0,
  kCaptureActive = 1,
  kCaptureInvalidated = 2,
};

enum NodeType : int {
  kKernelNode = 0,
  kMemcpyNode = 1,
  kMemsetNode = 2,
  kHostNode = 3,
  kGraphNode = 4,
  kEmptyNode = 5,
  kEventWaitNode = 6,
  kEventRecordNode = 7,
  kMemAllocNode = 10,
  kMemFreeNode = 11,
  kBatchMemOpNode = 14,
};

enum PointerType : int {
  kUnregisteredPointer = 0,
  kHostPointer = 1,
  kDevicePointer = 2,
  kManagedPointer = 3,
};

using HostFunction = void (*)(void* user_data);
using StreamCallback = void (*)(Stream* stream, Error status, void* user_data);

struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  int is_managed;
  unsigned allocation_flags;
};
static_assert(sizeof(PointerAttributes) == 32, "HIP's layout");

struct FunctionAttributes {
  int binary_version;
  int cache_mode_ca;
  size_t const_size_bytes;
  size_t local_size_bytes;
  int max_dynamic_shared_size_bytes;
  int max_threads_per_block;
  int registers;
  int preferred_shmem_carveout;
  int ptx_version;
  size_t shared_size_bytes;
};
static_assert(sizeof(FunctionAttributes) == 56, "HIP's layout");

struct KernelNodeParams {
  Dim3 block;
  void** extra;
  const void* function;
  Dim3 grid;
  void** kernel_params;
  unsigned shared_bytes;
};
static_assert(sizeof(KernelNodeParams) == 64, "HIP's layout");

struct MemsetParams {
  void* to;
  unsigned element_size;
  size_t height;
  size_t pitch;
  unsigned value;
  size_t width;
};
static_assert(sizeof(MemsetParams) == 48, "HIP's layout");

struct HostNodeParams {
  HostFunction function;
  void* user_data;
};

// hipDeviceProp_tR0600.
struct DeviceProperties {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_device_node_mask;
  size_t total_global_mem;
  size_t shared_mem_per_block;
  int regs_per_block;
  int warp_size;
  size_t mem_pitch;
  int max_threads_per_block;
  int max_threads_dim[3];
  int max_grid_size[3];
  int clock_rate;  // kHz
  size_t total_const_mem;
  int major;
  int minor;
  size_t texture_alignment;
  size_t texture_pitch_alignment;
  int device_overlap;
  int multi_processor_count;
  int kernel_exec_timeout_enabled;
  int integrated;
  int can_map_host_memory;
  int compute_mode;
  int textures_and_surfaces[40];  // Limits of images, which CDNA has not.
  size_t surface_alignment;
  int concurrent_kernels;
  int ecc_enabled;
  int pci_bus_id;
  int pci_device_id;
  int pci_domain_id;
  int tcc_driver;
  int async_engine_count;
  int unified_addressing;
  int memory_clock_rate;  // kHz
  int memory_bus_width;   // bits
  int l2_cache_size;
  int persisting_l2_cache_max_size;
  int max_threads_per_multi_processor;
  int stream_priorities_supported;
  int global_l1_cache_supported;
  int local_l1_cache_supported;
  size_t shared_mem_per_multiprocessor;
  int regs_per_multiprocessor;
  int managed_memory;
  int is_multi_gpu_board;
  int multi_gpu_board_group_id;
  int host_native_atomic_supported;
  int single_to_double_precision_perf_ratio;
  int pageable_memory_access;
  int concurrent_managed_access;
  int compute_preemption_supported;
  int can_use_host_pointer_for_registered_mem;
  int cooperative_launch;
  int cooperative_multi_device_launch;
  size_t shared_mem_per_block_optin;
  int pageable_memory_access_uses_host_page_tables;
  int direct_managed_mem_access_from_host;
  int max_blocks_per_multi_processor;
  int access_policy_max_window_size;
  size_t reserved_shared_mem_per_block;
  int host_register_supported;
  int sparse_hip_array_supported;
  int host_register_read_only_supported;
  int timeline_semaphore_interop_supported;
  int memory_pools_supported;
  int gpu_direct_rdma_supported;
  unsigned gpu_direct_rdma_flush_writes_options;
  int gpu_direct_rdma_writes_ordering;
  unsigned memory_pool_supported_handle_types;
  int deferred_mapping_hip_array_supported;
  int ipc_event_supported;
  int cluster_launch;
  int unified_function_pointers;
  int reserved[63];
  int hip_reserved[32];
  char gcn_arch_name[256];
  size_t max_shared_memory_per_multi_processor;
  int clock_instruction_rate;  // kHz
  unsigned arch_features;
  unsigned* hdp_mem_flush_cntl;
  unsigned* hdp_reg_flush_cntl;
  int cooperative_multi_device_unmatched[4];
  int is_large_bar;
  int asic_revision;
};
static_assert(offsetof(DeviceProperties, shared_mem_per_block) == 296 &&
                  offsetof(DeviceProperties, concurrent_kernels) == 576 &&
                  offsetof(DeviceProperties, gcn_arch_name) == 1160 &&
                  sizeof(DeviceProperties) == 1472,
              "HIP's layout");

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_TYPES_H_
