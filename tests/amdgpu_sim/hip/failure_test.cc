// SPDX-License-Identifier: Apache-2.0

// Every exported call fails when it is told to, at the use that was named,
// before it does anything; and its use is counted.

#include <cstdio>
#include <string>

#include "tests/amdgpu_sim/hip/testing.h"

// All calls that return an error, but for those that report errors.
#define CALLS(X)                                        \
  X(__hipPopCallConfiguration)                          \
  X(__hipPushCallConfiguration)                         \
  X(hipCtxGetCurrent)                                   \
  X(hipCtxGetDevice)                                    \
  X(hipCtxPopCurrent)                                   \
  X(hipCtxPushCurrent)                                  \
  X(hipCtxSetCurrent)                                   \
  X(hipDeviceCanAccessPeer)                             \
  X(hipDeviceComputeCapability)                         \
  X(hipDeviceDisablePeerAccess)                         \
  X(hipDeviceEnablePeerAccess)                          \
  X(hipDeviceGet)                                       \
  X(hipDeviceGetAttribute)                              \
  X(hipDeviceGetName)                                   \
  X(hipDeviceGetPCIBusId)                               \
  X(hipDeviceGetStreamPriorityRange)                    \
  X(hipDevicePrimaryCtxRelease)                         \
  X(hipDevicePrimaryCtxRetain)                          \
  X(hipDeviceReset)                                     \
  X(hipDeviceSynchronize)                               \
  X(hipDeviceTotalMem)                                  \
  X(hipDriverGetVersion)                                \
  X(hipDrvGetErrorName)                                 \
  X(hipDrvGetErrorString)                               \
  X(hipDrvPointerGetAttributes)                         \
  X(hipEventCreate)                                     \
  X(hipEventCreateWithFlags)                            \
  X(hipEventDestroy)                                    \
  X(hipEventElapsedTime)                                \
  X(hipEventQuery)                                      \
  X(hipEventRecord)                                     \
  X(hipEventRecordWithFlags)                            \
  X(hipEventSynchronize)                                \
  X(hipExtMallocWithFlags)                              \
  X(hipFree)                                            \
  X(hipFreeAsync)                                       \
  X(hipFuncGetAttribute)                                \
  X(hipFuncGetAttributes)                               \
  X(hipFuncSetAttribute)                                \
  X(hipFuncSetCacheConfig)                              \
  X(hipGetDevice)                                       \
  X(hipGetDeviceCount)                                  \
  X(hipGetDevicePropertiesR0600)                        \
  X(hipGetFuncBySymbol)                                 \
  X(hipGetSymbolAddress)                                \
  X(hipGetSymbolSize)                                   \
  X(hipGraphAddChildGraphNode)                          \
  X(hipGraphAddDependencies)                            \
  X(hipGraphAddEmptyNode)                               \
  X(hipGraphAddHostNode)                                \
  X(hipGraphAddKernelNode)                              \
  X(hipGraphAddMemcpyNode1D)                            \
  X(hipGraphAddMemsetNode)                              \
  X(hipGraphClone)                                      \
  X(hipGraphCreate)                                     \
  X(hipGraphDebugDotPrint)                              \
  X(hipGraphDestroy)                                    \
  X(hipGraphDestroyNode)                                \
  X(hipGraphExecChildGraphNodeSetParams)                \
  X(hipGraphExecDestroy)                                \
  X(hipGraphExecHostNodeSetParams)                      \
  X(hipGraphExecKernelNodeSetParams)                    \
  X(hipGraphExecMemcpyNodeSetParams1D)                  \
  X(hipGraphExecMemsetNodeSetParams)                    \
  X(hipGraphExecUpdate)                                 \
  X(hipGraphGetEdges)                                   \
  X(hipGraphGetNodes)                                   \
  X(hipGraphGetRootNodes)                               \
  X(hipGraphInstantiate)                                \
  X(hipGraphInstantiateWithFlags)                       \
  X(hipGraphLaunch)                                     \
  X(hipGraphNodeGetDependencies)                        \
  X(hipGraphNodeGetType)                                \
  X(hipGraphUpload)                                     \
  X(hipHostAlloc)                                       \
  X(hipHostFree)                                        \
  X(hipHostGetDevicePointer)                            \
  X(hipHostGetFlags)                                    \
  X(hipHostMalloc)                                      \
  X(hipHostRegister)                                    \
  X(hipHostUnregister)                                  \
  X(hipInit)                                            \
  X(hipLaunchCooperativeKernel)                         \
  X(hipLaunchHostFunc)                                  \
  X(hipLaunchKernel)                                    \
  X(hipMalloc)                                          \
  X(hipMallocAsync)                                     \
  X(hipMallocManaged)                                   \
  X(hipMemAddressFree)                                  \
  X(hipMemAddressReserve)                               \
  X(hipMemAdvise)                                       \
  X(hipMemCreate)                                       \
  X(hipMemExportToShareableHandle)                      \
  X(hipMemGetAddressRange)                              \
  X(hipMemGetAllocationGranularity)                     \
  X(hipMemGetInfo)                                      \
  X(hipMemImportFromShareableHandle)                    \
  X(hipMemMap)                                          \
  X(hipMemPrefetchAsync)                                \
  X(hipMemRelease)                                      \
  X(hipMemSetAccess)                                    \
  X(hipMemUnmap)                                        \
  X(hipMemcpy)                                          \
  X(hipMemcpy2D)                                        \
  X(hipMemcpy2DAsync)                                   \
  X(hipMemcpyAsync)                                     \
  X(hipMemcpyDtoD)                                      \
  X(hipMemcpyDtoDAsync)                                 \
  X(hipMemcpyDtoH)                                      \
  X(hipMemcpyDtoHAsync)                                 \
  X(hipMemcpyHtoD)                                      \
  X(hipMemcpyHtoDAsync)                                 \
  X(hipMemcpyPeer)                                      \
  X(hipMemcpyPeerAsync)                                 \
  X(hipMemcpyWithStream)                                \
  X(hipMemset)                                          \
  X(hipMemset2DAsync)                                   \
  X(hipMemsetAsync)                                     \
  X(hipMemsetD16)                                       \
  X(hipMemsetD16Async)                                  \
  X(hipMemsetD32)                                       \
  X(hipMemsetD32Async)                                  \
  X(hipMemsetD8)                                        \
  X(hipMemsetD8Async)                                   \
  X(hipModuleGetFunction)                               \
  X(hipModuleGetGlobal)                                 \
  X(hipModuleLaunchKernel)                              \
  X(hipModuleLoad)                                      \
  X(hipModuleLoadData)                                  \
  X(hipModuleLoadDataEx)                                \
  X(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor) \
  X(hipModuleOccupancyMaxPotentialBlockSize)            \
  X(hipModuleUnload)                                    \
  X(hipOccupancyMaxActiveBlocksPerMultiprocessor)       \
  X(hipOccupancyMaxPotentialBlockSize)                  \
  X(hipPointerGetAttribute)                             \
  X(hipPointerGetAttributes)                            \
  X(hipRuntimeGetVersion)                               \
  X(hipSetDevice)                                       \
  X(hipSetDeviceFlags)                                  \
  X(hipStreamAddCallback)                               \
  X(hipStreamBeginCapture)                              \
  X(hipStreamCreate)                                    \
  X(hipStreamCreateWithFlags)                           \
  X(hipStreamCreateWithPriority)                        \
  X(hipStreamDestroy)                                   \
  X(hipStreamEndCapture)                                \
  X(hipStreamGetCaptureInfo)                            \
  X(hipStreamGetCaptureInfo_v2)                         \
  X(hipStreamGetDevice)                                 \
  X(hipStreamGetFlags)                                  \
  X(hipStreamGetId)                                     \
  X(hipStreamGetPriority)                               \
  X(hipStreamIsCapturing)                               \
  X(hipStreamQuery)                                     \
  X(hipStreamSynchronize)                               \
  X(hipStreamWaitEvent)                                 \
  X(hipStreamWaitValue32)                               \
  X(hipStreamWaitValue64)                               \
  X(hipStreamWriteValue32)                              \
  X(hipStreamWriteValue64)                              \
  X(hipThreadExchangeStreamCaptureMode)

// Their parameters do not matter: a failure comes before they are looked at.
extern "C" {
#define DECLARE(name) amdgpu_sim::Error name();
CALLS(DECLARE)
#undef DECLARE
amdgpu_sim::Error hipGetLastError();
amdgpu_sim::Error hipPeekAtLastError();
}

namespace amdgpu_sim {
namespace {

struct Call {
  const char* name;
  Error (*call)();
};

constexpr Call kCalls[] = {
#define ENTRY(name) {#name, name},
    CALLS(ENTRY)
#undef ENTRY
};

bool Allocates(const std::string& name) {
  return name.find("Malloc") != std::string::npos || name == "hipHostAlloc" ||
         name == "hipMemCreate" || name == "hipMemAddressReserve";
}

void FailsOnDemand(const Call& call) {
  const std::string name = call.name;
  const uint64_t before = amdgpu_sim_calls(call.name);
  amdgpu_sim_fail((name + ":1").c_str());
  const Error error = call.call();
  if (error != (Allocates(name) ? kOutOfMemory : kUnknown)) {
    std::fprintf(stderr, "%s: %s\n", call.name, hipGetErrorName(error));
    std::abort();
  }
  CHECK(amdgpu_sim_calls(call.name) == before + 1);
  CHECK(hipPeekAtLastError() == error);
  CHECK(hipGetLastError() == error);
  CHECK(hipGetLastError() == kSuccess);
}

// The n-th use, counted from the plan on; each entry of a plan on its own.
void FailsAtTheNamedUse() {
  amdgpu_sim_fail("hipDeviceReset:3,hipFuncSetAttribute:2,hipInit");
  OK(hipDeviceReset());
  OK(hipDeviceReset());
  OK(hipFuncSetAttribute());
  EXPECT(hipDeviceReset(), kUnknown);
  EXPECT(hipFuncSetAttribute(), kUnknown);
  EXPECT(hipInit(), kUnknown);
  OK(hipDeviceReset());
  OK(hipFuncSetAttribute());
  amdgpu_sim_fail("hipDeviceReset:1");
  amdgpu_sim_fail(nullptr);
  OK(hipDeviceReset());
  hipGetLastError();
}

}  // namespace
}  // namespace amdgpu_sim

int main() {
  for (const auto& call : amdgpu_sim::kCalls) amdgpu_sim::FailsOnDemand(call);
  amdgpu_sim::FailsAtTheNamedUse();
  std::puts("PASSED");
}
