// SPDX-License-Identifier: Apache-2.0

// Streams, events, capture, graphs, memory and modules of the runtime. With
// an argument N, runs only the part that N threads do at the same time.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/amdgpu_sim/hip/testing.h"

extern "C" {
using namespace amdgpu_sim;
Error hipGetDeviceCount(int* count);
Error hipSetDevice(int device);
Error hipDeviceSynchronize();
Error hipGetLastError();
Error hipMalloc(void** pointer, size_t size);
Error hipMallocAsync(void** pointer, size_t size, Stream* stream);
Error hipMallocManaged(void** pointer, size_t size, unsigned flags);
Error hipHostMalloc(void** pointer, size_t size, unsigned flags);
Error hipHostRegister(void* pointer, size_t size, unsigned flags);
Error hipHostUnregister(void* pointer);
Error hipFree(void* pointer);
Error hipFreeAsync(void* pointer, Stream* stream);
Error hipHostFree(void* pointer);
Error hipMemGetInfo(size_t* free, size_t* total);
Error hipPointerGetAttributes(PointerAttributes* attributes, const void* p);
Error hipMemcpy(void* to, const void* from, size_t size, int kind);
Error hipMemcpyAsync(void* to, const void* from, size_t size, int kind,
                     Stream* stream);
Error hipMemcpyPeerAsync(void* to, int to_device, const void* from,
                         int from_device, size_t size, Stream* stream);
Error hipMemcpy2D(void* to, size_t to_pitch, const void* from,
                  size_t from_pitch, size_t width, size_t height, int kind);
Error hipMemset(void* to, int value, size_t size);
Error hipMemsetAsync(void* to, int value, size_t size, Stream* stream);
Error hipMemsetD32Async(void* to, int value, size_t count, Stream* stream);
Error hipStreamCreateWithFlags(Stream** stream, unsigned flags);
Error hipStreamDestroy(Stream* stream);
Error hipStreamSynchronize(Stream* stream);
Error hipStreamQuery(Stream* stream);
Error hipStreamWaitEvent(Stream* stream, Event* event, unsigned flags);
Error hipStreamWriteValue64(Stream* stream, void* pointer, uint64_t value,
                            unsigned flags);
Error hipStreamWaitValue64(Stream* stream, void* pointer, uint64_t value,
                           unsigned flag, uint64_t mask);
Error hipLaunchHostFunc(Stream* stream, HostFunction function, void* data);
Error hipEventCreateWithFlags(Event** event, unsigned flags);
Error hipEventDestroy(Event* event);
Error hipEventRecord(Event* event, Stream* stream);
Error hipEventQuery(Event* event);
Error hipEventSynchronize(Event* event);
Error hipEventElapsedTime(float* milliseconds, Event* start, Event* stop);
Error hipStreamBeginCapture(Stream* stream, CaptureMode mode);
Error hipStreamEndCapture(Stream* stream, Graph** graph);
Error hipStreamIsCapturing(Stream* stream, CaptureStatus* status);
Error hipGraphCreate(Graph** graph, unsigned flags);
Error hipGraphDestroy(Graph* graph);
Error hipGraphGetNodes(Graph* graph, GraphNode** nodes, size_t* count);
Error hipGraphAddHostNode(GraphNode** node, Graph* graph,
                          GraphNode* const* after, size_t count,
                          const HostNodeParams* params);
Error hipGraphAddKernelNode(GraphNode** node, Graph* graph,
                            GraphNode* const* after, size_t count,
                            const KernelNodeParams* params);
Error hipGraphAddMemcpyNode1D(GraphNode** node, Graph* graph,
                              GraphNode* const* after, size_t count, void* to,
                              const void* from, size_t size, int kind);
Error hipGraphAddMemsetNode(GraphNode** node, Graph* graph,
                            GraphNode* const* after, size_t count,
                            const MemsetParams* params);
Error hipGraphAddChildGraphNode(GraphNode** node, Graph* graph,
                                GraphNode* const* after, size_t count,
                                Graph* child);
Error hipGraphAddDependencies(Graph* graph, GraphNode* const* before,
                              GraphNode* const* after, size_t count);
Error hipGraphInstantiate(GraphExec** exec, Graph* graph, GraphNode** node,
                          char* log, size_t log_size);
Error hipGraphExecDestroy(GraphExec* exec);
Error hipGraphLaunch(GraphExec* exec, Stream* stream);
Error hipGraphExecKernelNodeSetParams(GraphExec* exec, GraphNode* node,
                                      const KernelNodeParams* params);
Error hipGraphExecMemcpyNodeSetParams1D(GraphExec* exec, GraphNode* node,
                                        void* to, const void* from, size_t size,
                                        int kind);
Error hipGraphExecMemsetNodeSetParams(GraphExec* exec, GraphNode* node,
                                      const MemsetParams* params);
Error hipGraphExecChildGraphNodeSetParams(GraphExec* exec, GraphNode* node,
                                          Graph* child);
Error hipModuleLoadData(Module** module, const void* image);
Error hipModuleUnload(Module* module);
Error hipModuleGetFunction(Function** function, Module* module,
                           const char* name);
Error hipModuleLaunchKernel(Function* function, uint32_t grid_x,
                            uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                            uint32_t block_y, uint32_t block_z, uint32_t shared,
                            Stream* stream, void** params, void** extra);
Error hipFuncGetAttributes(FunctionAttributes* attributes, const void* f);
Error hipMemAddressReserve(void** pointer, size_t size, size_t alignment,
                           void* wanted, unsigned long long flags);
Error hipMemAddressFree(void* pointer, size_t size);
Error hipMemCreate(void** handle, size_t size, const void* properties,
                   unsigned long long flags);
Error hipMemRelease(void* handle);
Error hipMemMap(void* pointer, size_t size, size_t offset, void* handle,
                unsigned long long flags);
Error hipMemUnmap(void* pointer, size_t size);
}

namespace amdgpu_sim {
namespace {

constexpr int kBlock = 64;

void Sleep(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// A stream of its own for a test, without ties to the legacy one.
class TestStream {
 public:
  explicit TestStream(unsigned flags = kStreamNonBlocking) {
    OK(hipStreamCreateWithFlags(&stream_, flags));
  }
  ~TestStream() { OK(hipStreamDestroy(stream_)); }
  operator Stream*() const { return stream_; }

 private:
  Stream* stream_;
};

class TestEvent {
 public:
  explicit TestEvent(unsigned flags = 0) {
    OK(hipEventCreateWithFlags(&event_, flags));
  }
  ~TestEvent() { OK(hipEventDestroy(event_)); }
  operator Event*() const { return event_; }

 private:
  Event* event_;
};

// Device memory of 32-bit words.
class Words {
 public:
  explicit Words(size_t count) : count_(count) {
    OK(hipMalloc(reinterpret_cast<void**>(&words_), 4 * count));
  }
  ~Words() { hipFree(words_); }
  operator uint32_t*() const { return words_; }

  std::vector<uint32_t> Read() const {
    std::vector<uint32_t> host(count_);
    OK(hipMemcpy(host.data(), words_, 4 * count_, kDeviceToHost));
    return host;
  }
  // Whether all words are this.
  bool All(uint32_t value) const {
    return Read() == std::vector<uint32_t>(count_, value);
  }

 private:
  uint32_t* words_;
  const size_t count_;
};

// The module with the kernel `fill`.
class Filler {
 public:
  Filler() {
    const std::vector<uint8_t> image = FillCodeObject(SimulatedArch());
    OK(hipModuleLoadData(&module_, image.data()));
    OK(hipModuleGetFunction(&function_, module_, "fill"));
  }
  ~Filler() { OK(hipModuleUnload(module_)); }

  Function* function() const { return function_; }

  Error Launch(uint32_t* to, uint32_t value, Stream* stream) const {
    void* params[] = {&to, &value};
    return hipModuleLaunchKernel(function_, 1, 1, 1, kBlock, 1, 1, 0, stream,
                                 params, nullptr);
  }

 private:
  Module* module_;
  Function* function_;
};

bool Filled(const std::vector<uint32_t>& words, uint32_t value) {
  for (size_t i = 0; i < kBlock; ++i) {
    if (words[i] != value + i) return false;
  }
  return true;
}

void StreamsAreAsynchronousAndInOrder() {
  TestStream stream;
  Words words(16);
  Gate gate;
  OK(hipLaunchHostFunc(stream, Gate::Hold, &gate));
  OK(hipMemsetD32Async(words, 1, 16, stream));
  OK(hipMemsetD32Async(words, 2, 16, stream));
  EXPECT(hipStreamQuery(stream), kNotReady);
  CHECK(hipGetLastError() == kSuccess);  // Not an error.
  gate.Open();
  OK(hipStreamSynchronize(stream));
  OK(hipStreamQuery(stream));
  CHECK(words.All(2));
}

// Calls in a host function that would wait for its own stream do not hang.
void HostFunctionsDoNotWaitForThemselves() {
  TestStream stream;
  struct State {
    Stream* stream;
    void* memory;
    Error synchronized, destroyed, freed;
  } state = {stream, nullptr, kSuccess, kSuccess, kUnknown};
  OK(hipMalloc(&state.memory, 64));
  OK(hipLaunchHostFunc(
      stream,
      [](void* data) {
        State& state = *static_cast<State*>(data);
        state.synchronized = hipStreamSynchronize(state.stream);
        state.destroyed = hipStreamDestroy(state.stream);
        state.freed = hipFree(state.memory);
        hipDeviceSynchronize();
      },
      &state));
  OK(hipStreamSynchronize(stream));
  CHECK(state.synchronized == kIllegalState);
  CHECK(state.destroyed == kIllegalState);
  CHECK(state.freed == kSuccess);
}

void StreamsAreIndependent() {
  TestStream held, free;
  Words a(4), b(4);
  Gate gate;
  OK(hipLaunchHostFunc(held, Gate::Hold, &gate));
  OK(hipMemsetD32Async(a, 1, 4, held));
  OK(hipMemsetD32Async(b, 2, 4, free));
  OK(hipStreamSynchronize(free));
  EXPECT(hipStreamQuery(held), kNotReady);
  gate.Open();
  OK(hipStreamSynchronize(held));
  CHECK(a.All(1) && b.All(2));
}

void EventsOrderStreams() {
  TestStream first, second;
  TestEvent event;
  Words words(4);
  Gate gate;
  OK(hipEventQuery(event));  // Never recorded.
  OK(hipStreamWaitEvent(second, event, 0));
  OK(hipLaunchHostFunc(first, Gate::Hold, &gate));
  OK(hipMemsetD32Async(words, 1, 4, first));
  OK(hipEventRecord(event, first));
  OK(hipStreamWaitEvent(second, event, 0));
  OK(hipMemsetD32Async(words, 2, 4, second));
  EXPECT(hipEventQuery(event), kNotReady);
  EXPECT(hipStreamQuery(second), kNotReady);
  gate.Open();
  OK(hipStreamSynchronize(second));
  OK(hipEventSynchronize(event));
  CHECK(words.All(2));
}

void EventsTellTime() {
  TestStream stream;
  TestEvent start, stop, untimed(kEventDisableTiming);
  float milliseconds = 0;
  EXPECT(hipEventElapsedTime(&milliseconds, start, stop), kInvalidHandle);
  OK(hipEventRecord(start, stream));
  OK(hipLaunchHostFunc(stream, [](void*) { Sleep(20); }, nullptr));
  OK(hipEventRecord(stop, stream));
  EXPECT(hipEventElapsedTime(&milliseconds, start, stop), kNotReady);
  OK(hipEventSynchronize(stop));
  OK(hipEventElapsedTime(&milliseconds, start, stop));
  CHECK(milliseconds >= 20 && milliseconds < 10000);
  OK(hipEventRecord(untimed, stream));
  EXPECT(hipEventElapsedTime(&milliseconds, start, untimed), kInvalidHandle);
}

void TheLegacyStreamWaitsForBlockingOnes() {
  TestStream blocking(0), free;
  Words words(4);
  Gate gate;
  OK(hipLaunchHostFunc(blocking, Gate::Hold, &gate));
  OK(hipMemsetD32Async(words, 1, 4, blocking));
  OK(hipMemsetD32Async(words, 2, 4, nullptr));
  EXPECT(hipStreamQuery(nullptr), kNotReady);
  // And they for it.
  OK(hipMemsetD32Async(words, 3, 4, blocking));
  OK(hipLaunchHostFunc(free, [](void*) {}, nullptr));
  OK(hipStreamSynchronize(free));
  gate.Open();
  OK(hipStreamSynchronize(blocking));
  CHECK(words.All(3));
}

void ThreadsHaveStreamsOfTheirOwn() {
  Stream* const own = reinterpret_cast<Stream*>(kPerThreadStream);
  Words a(4), b(4);
  Gate gate;
  OK(hipLaunchHostFunc(own, Gate::Hold, &gate));
  OK(hipMemsetD32Async(a, 1, 4, own));
  std::thread([&] {
    OK(hipMemsetD32Async(b, 2, 4, own));
    OK(hipStreamSynchronize(own));
  }).join();
  EXPECT(hipStreamQuery(own), kNotReady);
  gate.Open();
  OK(hipStreamSynchronize(own));
  CHECK(a.All(1) && b.All(2));
}

void StreamsWaitForValues() {
  TestStream waits, writes;
  uint64_t* flag;
  OK(hipHostMalloc(reinterpret_cast<void**>(&flag), 8, 0));
  *flag = 0;
  Words words(4);
  OK(hipStreamWaitValue64(waits, flag, 7, 1, ~uint64_t{0}));
  OK(hipMemsetD32Async(words, 5, 4, waits));
  Sleep(5);
  EXPECT(hipStreamQuery(waits), kNotReady);
  OK(hipStreamWriteValue64(writes, flag, 7, 0));
  OK(hipStreamSynchronize(waits));
  CHECK(words.All(5));
  OK(hipHostFree(flag));
}

void CopiesOfPageableMemory() {
  TestStream stream;
  Words words(64);
  Gate gate;
  std::vector<uint32_t> host(64, 1);
  OK(hipLaunchHostFunc(stream, Gate::Hold, &gate));
  // The copy has read its source when it returns.
  OK(hipMemcpyAsync(words, host.data(), 256, kHostToDevice, stream));
  host.assign(64, 2);
  std::thread opener([&] {
    Sleep(20);
    gate.Open();
  });
  // And one to pageable memory is done then.
  std::vector<uint32_t> back(64);
  OK(hipMemcpyAsync(back.data(), words, 256, kDeviceToHost, stream));
  CHECK(back == std::vector<uint32_t>(64, 1));
  opener.join();

  // One to pinned memory is not.
  uint32_t* pinned;
  OK(hipHostMalloc(reinterpret_cast<void**>(&pinned), 256, 0));
  Gate second;
  std::memset(pinned, 0, 256);
  OK(hipLaunchHostFunc(stream, Gate::Hold, &second));
  OK(hipMemcpyAsync(pinned, words, 256, kDeviceToHost, stream));
  CHECK(pinned[0] == 0);
  second.Open();
  OK(hipStreamSynchronize(stream));
  CHECK(pinned[63] == 1);
  OK(hipHostFree(pinned));
}

void CopiesAreChecked() {
  Words words(16);
  uint32_t host[32] = {};
  EXPECT(hipMemcpy(words, host, 68, kHostToDevice), kInvalidValue);
  EXPECT(hipMemcpy(words + 15, host, 8, kHostToDevice), kInvalidValue);
  EXPECT(hipMemcpy(nullptr, host, 4, kHostToDevice), kInvalidValue);
  EXPECT(hipMemcpy(words, host, 4, 9), kInvalidMemcpyDirection);
  EXPECT(hipMemset(words, 0, 65), kInvalidValue);
  OK(hipMemcpy(nullptr, nullptr, 0, kHostToDevice));
  hipGetLastError();
  for (uint32_t i = 0; i < 32; ++i) host[i] = i;
  OK(hipMemset(words, 0xff, 64));
  OK(hipMemcpy2D(words, 16, host, 32, 8, 4, kHostToDevice));
  const std::vector<uint32_t> got = words.Read();
  for (uint32_t i = 0; i < 16; ++i) {
    CHECK(got[i] == (i % 4 < 2 ? i / 4 * 8 + i % 4 : ~0u));
  }
}

void PointersAreDescribed() {
  Words words(16);
  PointerAttributes attributes;
  OK(hipPointerGetAttributes(&attributes, words + 3));
  CHECK(attributes.type == kDevicePointer && attributes.device == 0 &&
        attributes.device_pointer == words + 3 &&
        attributes.host_pointer == nullptr);
  std::vector<char> host(100);
  OK(hipPointerGetAttributes(&attributes, host.data()));
  CHECK(attributes.type == kUnregisteredPointer);
  OK(hipHostRegister(host.data(), 100, 0));
  EXPECT(hipHostRegister(host.data(), 50, 0), kHostMemoryAlreadyRegistered);
  OK(hipPointerGetAttributes(&attributes, host.data() + 99));
  CHECK(attributes.type == kHostPointer);
  EXPECT(hipFree(host.data()), kInvalidValue);
  OK(hipHostUnregister(host.data()));
  EXPECT(hipHostUnregister(host.data()), kHostMemoryNotRegistered);
  void* managed;
  OK(hipMallocManaged(&managed, 64, 1));
  OK(hipPointerGetAttributes(&attributes, managed));
  CHECK(attributes.type == kManagedPointer && attributes.is_managed == 1 &&
        attributes.host_pointer == managed);
  OK(hipFree(managed));
  hipGetLastError();
}

void MemoryIsBounded() {
  size_t free, total, after;
  OK(hipMemGetInfo(&free, &total));
  void* pointer = &free;
  EXPECT(hipMalloc(&pointer, total + 1), kOutOfMemory);
  CHECK(pointer == nullptr);
  OK(hipMalloc(&pointer, 0));
  CHECK(pointer == nullptr);
  OK(hipFree(nullptr));
  Words words(1 << 20);
  OK(hipMemGetInfo(&after, &total));
  CHECK(after + (4 << 20) <= free);
  EXPECT(hipFree(words + 1), kInvalidValue);
  hipGetLastError();
}

void FreeingSynchronises() {
  TestStream stream;
  uint32_t* words;
  OK(hipMalloc(reinterpret_cast<void**>(&words), 16));
  std::atomic<bool> ran{false};
  OK(hipLaunchHostFunc(
      stream,
      [](void* flag) {
        Sleep(20);
        *static_cast<std::atomic<bool>*>(flag) = true;
      },
      &ran));
  OK(hipMemsetD32Async(words, 1, 4, stream));
  OK(hipFree(words));
  CHECK(ran);
}

void UseAfterFreeIsAFault() {
  TestStream stream;
  uint32_t* words;
  Gate gate;
  OK(hipMallocAsync(reinterpret_cast<void**>(&words), 16, stream));
  OK(hipLaunchHostFunc(stream, Gate::Hold, &gate));
  OK(hipFreeAsync(words, stream));
  OK(hipMemsetD32Async(words, 1, 4, stream));  // After it was freed.
  gate.Open();
  EXPECT(hipStreamSynchronize(stream), kIllegalAddress);
  CHECK(std::strstr(amdgpu_sim_last_report(), "use_after_free") != nullptr);
  // The error stays.
  void* other;
  EXPECT(hipMalloc(&other, 16), kIllegalAddress);
  EXPECT(hipStreamQuery(stream), kIllegalAddress);
  amdgpu_sim_clear_fault();
  CHECK(std::string(amdgpu_sim_last_report()).empty());
  OK(hipMalloc(&other, 16));
  OK(hipFree(other));
}

void KernelsRunAndFault() {
  Filler filler;
  TestStream stream;
  Words words(kBlock);
  OK(filler.Launch(words, 100, stream));
  OK(hipStreamSynchronize(stream));
  CHECK(Filled(words.Read(), 100));
  // Arguments in one buffer.
  struct {
    uint32_t* to;
    uint32_t value;
  } arguments = {words, 200};
  size_t size = sizeof(arguments);
  void* extra[] = {reinterpret_cast<void*>(1), &arguments,
                   reinterpret_cast<void*>(2), &size,
                   reinterpret_cast<void*>(3)};
  OK(hipModuleLaunchKernel(filler.function(), 1, 1, 1, kBlock, 1, 1, 0, stream,
                           nullptr, extra));
  OK(hipStreamSynchronize(stream));
  CHECK(Filled(words.Read(), 200));

  EXPECT(hipModuleLaunchKernel(filler.function(), 0, 1, 1, 1, 1, 1, 0, stream,
                               nullptr, extra),
         kInvalidConfiguration);
  EXPECT(hipModuleLaunchKernel(filler.function(), 1, 1, 1, 2048, 1, 1, 0,
                               stream, nullptr, extra),
         kInvalidConfiguration);
  EXPECT(hipModuleLaunchKernel(filler.function(), 1, 1, 1, 1, 1, 1, 1 << 20,
                               stream, nullptr, extra),
         kInvalidValue);
  FunctionAttributes attributes;
  OK(hipFuncGetAttributes(&attributes, filler.function()));
  CHECK(attributes.max_threads_per_block == 1024);

  // One word too few: the stream's later work is not done.
  Words few(kBlock - 1);
  OK(filler.Launch(few, 1, stream));
  Error later = hipMemsetD32Async(words, 0, kBlock, stream);
  CHECK(later == kSuccess || later == kIllegalAddress);
  EXPECT(hipStreamSynchronize(stream), kIllegalAddress);
  CHECK(std::strstr(amdgpu_sim_last_report(), "fill") != nullptr);
  amdgpu_sim_clear_fault();
  CHECK(Filled(words.Read(), 200));
}

void ModulesAreUnloaded() {
  const uint64_t allocations = amdgpu_sim_live_allocations();
  const int modules = amdgpu_sim_live_modules();
  const std::vector<uint8_t> image = FillCodeObject(SimulatedArch());
  Module* module;
  Function* function;
  Words words(kBlock);
  {
    TestStream stream;
    Gate gate;
    OK(hipModuleLoadData(&module, image.data()));
    EXPECT(hipModuleGetFunction(&function, module, "none"), kNotFound);
    OK(hipModuleGetFunction(&function, module, "fill"));
    uint32_t* to = words;
    uint32_t value = 9;
    void* params[] = {&to, &value};
    OK(hipLaunchHostFunc(stream, Gate::Hold, &gate));
    OK(hipModuleLaunchKernel(function, 1, 1, 1, kBlock, 1, 1, 0, stream, params,
                             nullptr));
    // The launch keeps its code.
    OK(hipModuleUnload(module));
    EXPECT(hipModuleUnload(module), kInvalidHandle);
    CHECK(hipModuleLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, params,
                                nullptr) != kSuccess);
    gate.Open();
    OK(hipStreamSynchronize(stream));
  }
  CHECK(Filled(words.Read(), 9));
  CHECK(amdgpu_sim_live_modules() == modules);
  CHECK(amdgpu_sim_live_allocations() == allocations + 1);  // words

  EXPECT(hipModuleLoadData(&module,
                           "no code object, but sixty-four bytes "
                           "of something else altogether."),
         kInvalidImage);
  const std::vector<uint8_t> other =
      FillCodeObject(SimulatedArch() == "gfx950" ? "gfx942" : "gfx950");
  EXPECT(hipModuleLoadData(&module, other.data()), kNoBinaryForGpu);
  CHECK(module == nullptr);
  CHECK(amdgpu_sim_live_modules() == modules);
  hipGetLastError();
}

GraphExec* Instantiated(Graph* graph) {
  GraphExec* exec;
  OK(hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
  return exec;
}

size_t NodeCount(Graph* graph) {
  size_t count = 0;
  OK(hipGraphGetNodes(graph, nullptr, &count));
  return count;
}

void CaptureAcrossStreams() {
  Filler filler;
  TestStream stream, side;
  TestEvent fork, join;
  Words words(kBlock), copy(kBlock);
  OK(hipMemset(words, 0, 4 * kBlock));
  OK(hipMemset(copy, 0, 4 * kBlock));
  OK(hipDeviceSynchronize());
  OK(hipStreamBeginCapture(stream, kCaptureThreadLocal));
  CaptureStatus status;
  OK(hipStreamIsCapturing(stream, &status));
  CHECK(status == kCaptureActive);
  OK(filler.Launch(words, 40, stream));
  OK(hipEventRecord(fork, stream));
  OK(hipStreamWaitEvent(side, fork, 0));
  OK(hipStreamIsCapturing(side, &status));
  CHECK(status == kCaptureActive);
  OK(hipMemcpyAsync(copy, words, 4 * kBlock, kDeviceToDevice, side));
  OK(hipEventRecord(join, side));
  OK(hipStreamWaitEvent(stream, join, 0));
  OK(hipMemsetD32Async(words, 1, kBlock, stream));
  Graph* graph;
  EXPECT(hipStreamEndCapture(side, &graph), kStreamCaptureUnmatched);
  OK(hipStreamEndCapture(stream, &graph));
  OK(hipStreamIsCapturing(side, &status));
  CHECK(status == kCaptureNone);
  CHECK(NodeCount(graph) == 3);
  CHECK(words.All(0) && copy.All(0));  // Nothing ran yet.

  GraphExec* exec = Instantiated(graph);
  OK(hipGraphDestroy(graph));
  for (int i = 0; i < 3; ++i) {
    OK(hipMemset(copy, 0, 4 * kBlock));
    OK(hipDeviceSynchronize());
    OK(hipGraphLaunch(exec, stream));
    OK(hipStreamSynchronize(stream));
    CHECK(words.All(1));
    CHECK(Filled(copy.Read(), 40));
  }
  Gate gate;
  OK(hipLaunchHostFunc(stream, Gate::Hold, &gate));
  OK(hipGraphLaunch(exec, stream));
  OK(hipGraphExecDestroy(exec));  // A launch under way is not disturbed.
  gate.Open();
  OK(hipStreamSynchronize(stream));
  EXPECT(hipGraphLaunch(exec, stream), kInvalidHandle);
  hipGetLastError();
}

void CaptureRefusesWhatItMust() {
  TestStream stream, side;
  TestEvent event;
  Graph* graph;
  // A synchronisation invalidates the capture.
  OK(hipStreamBeginCapture(stream, kCaptureThreadLocal));
  EXPECT(hipStreamSynchronize(stream), kStreamCaptureUnsupported);
  EXPECT(hipStreamEndCapture(stream, &graph), kStreamCaptureInvalidated);
  CHECK(graph == nullptr);
  // So does asking an event that was captured.
  OK(hipStreamBeginCapture(stream, kCaptureThreadLocal));
  OK(hipEventRecord(event, stream));
  EXPECT(hipEventQuery(event), kCapturedEvent);
  EXPECT(hipStreamEndCapture(stream, &graph), kStreamCaptureInvalidated);
  // A fork has to be joined.
  OK(hipStreamBeginCapture(stream, kCaptureThreadLocal));
  OK(hipEventRecord(event, stream));
  OK(hipStreamWaitEvent(side, event, 0));
  OK(hipLaunchHostFunc(side, [](void*) {}, nullptr));
  EXPECT(hipStreamEndCapture(stream, &graph), kStreamCaptureUnjoined);
  // Memory cannot be allocated, but in the relaxed mode.
  void* pointer;
  OK(hipStreamBeginCapture(stream, kCaptureGlobal));
  EXPECT(hipMalloc(&pointer, 16), kStreamCaptureUnsupported);
  EXPECT(hipStreamEndCapture(stream, &graph), kStreamCaptureInvalidated);
  OK(hipStreamBeginCapture(stream, kCaptureRelaxed));
  OK(hipMalloc(&pointer, 16));
  OK(hipFree(pointer));
  OK(hipStreamEndCapture(stream, &graph));
  OK(hipGraphDestroy(graph));
  // Work outside of the capture cannot be waited for.
  OK(hipEventRecord(event, side));
  OK(hipStreamBeginCapture(stream, kCaptureThreadLocal));
  EXPECT(hipStreamWaitEvent(stream, event, 0), kStreamCaptureIsolation);
  EXPECT(hipStreamEndCapture(stream, &graph), kStreamCaptureInvalidated);
  EXPECT(hipStreamEndCapture(stream, &graph), kIllegalState);
  EXPECT(hipStreamBeginCapture(nullptr, kCaptureGlobal),
         kStreamCaptureUnsupported);
  // A stream that is destroyed while it is captured.
  {
    TestStream gone;
    OK(hipStreamBeginCapture(gone, kCaptureThreadLocal));
    OK(hipLaunchHostFunc(gone, [](void*) {}, nullptr));
  }
  OK(hipStreamSynchronize(stream));
  hipGetLastError();
}

void GraphsAreBuiltAndUpdated() {
  Filler filler;
  TestStream stream;
  Words words(kBlock), copy(kBlock), other(kBlock);
  Graph *graph, *child;
  OK(hipGraphCreate(&graph, 0));
  OK(hipGraphCreate(&child, 0));
  MemsetParams fill{};
  fill.to = copy;
  fill.element_size = 4;
  fill.width = kBlock;
  fill.height = 1;
  fill.value = 3;
  GraphNode *fill_node, *kernel_node, *copy_node, *child_node, *in_child;
  OK(hipGraphAddMemsetNode(&fill_node, graph, nullptr, 0, &fill));
  uint32_t* to = words;
  uint32_t value = 50;
  void* params[] = {&to, &value};
  KernelNodeParams kernel{};
  kernel.function = filler.function();
  kernel.grid = {1, 1, 1};
  kernel.block = {kBlock, 1, 1};
  kernel.kernel_params = params;
  OK(hipGraphAddKernelNode(&kernel_node, graph, &fill_node, 1, &kernel));
  OK(hipGraphAddMemcpyNode1D(&copy_node, graph, &kernel_node, 1, copy, words,
                             4 * kBlock, kDeviceToDevice));
  std::atomic<int> ran{0};
  const HostNodeParams host = {
      [](void* count) { ++*static_cast<std::atomic<int>*>(count); }, &ran};
  OK(hipGraphAddHostNode(&in_child, child, nullptr, 0, &host));
  OK(hipGraphAddChildGraphNode(&child_node, graph, &copy_node, 1, child));
  // The child was copied.
  OK(hipGraphAddHostNode(&in_child, child, nullptr, 0, &host));
  EXPECT(hipGraphAddMemsetNode(&fill_node, graph, &in_child, 1, &fill),
         kInvalidValue);

  GraphExec* exec = Instantiated(graph);
  OK(hipGraphLaunch(exec, stream));
  OK(hipStreamSynchronize(stream));
  CHECK(Filled(words.Read(), 50) && Filled(copy.Read(), 50) && ran == 1);

  to = other;
  value = 60;
  OK(hipGraphExecKernelNodeSetParams(exec, kernel_node, &kernel));
  OK(hipGraphExecMemcpyNodeSetParams1D(exec, copy_node, words, other,
                                       4 * kBlock, kDeviceToDevice));
  OK(hipGraphExecMemsetNodeSetParams(exec, fill_node, &fill));
  OK(hipGraphExecChildGraphNodeSetParams(exec, child_node, child));
  EXPECT(hipGraphExecMemsetNodeSetParams(exec, kernel_node, &fill),
         kInvalidValue);
  ran = 0;
  OK(hipGraphLaunch(exec, stream));
  OK(hipStreamSynchronize(stream));
  CHECK(Filled(other.Read(), 60) && Filled(words.Read(), 60) && copy.All(3) &&
        ran == 2);

  // An update does not touch a launch that is under way.
  Gate gate;
  fill.value = 8;
  OK(hipLaunchHostFunc(stream, Gate::Hold, &gate));
  OK(hipGraphLaunch(exec, stream));
  OK(hipGraphExecMemsetNodeSetParams(exec, fill_node, &fill));
  gate.Open();
  OK(hipStreamSynchronize(stream));
  CHECK(copy.All(3));
  OK(hipGraphLaunch(exec, stream));
  OK(hipStreamSynchronize(stream));
  CHECK(copy.All(8));
  OK(hipGraphExecDestroy(exec));

  // A cycle.
  OK(hipGraphAddDependencies(graph, &copy_node, &fill_node, 1));
  EXPECT(hipGraphInstantiate(&exec, graph, nullptr, nullptr, 0), kInvalidValue);
  OK(hipGraphDestroy(child));
  OK(hipGraphDestroy(graph));
  EXPECT(hipGraphDestroy(graph), kInvalidValue);
  hipGetLastError();
}

// Without a dependency two nodes do not run in the order of their making.
void MissingDependenciesShow() {
  TestStream stream;
  Words words(4);
  Graph* graph;
  OK(hipGraphCreate(&graph, 0));
  MemsetParams fill{};
  fill.to = words;
  fill.element_size = 4;
  fill.width = 4;
  fill.height = 1;
  GraphNode* nodes[2];
  for (unsigned i = 0; i < 2; ++i) {
    fill.value = i;
    OK(hipGraphAddMemsetNode(&nodes[i], graph, nullptr, 0, &fill));
  }
  GraphExec* exec = Instantiated(graph);
  OK(hipGraphLaunch(exec, stream));
  OK(hipStreamSynchronize(stream));
  CHECK(words.All(0));
  OK(hipGraphExecDestroy(exec));
  OK(hipGraphAddDependencies(graph, &nodes[0], &nodes[1], 1));
  exec = Instantiated(graph);
  OK(hipGraphLaunch(exec, stream));
  OK(hipStreamSynchronize(stream));
  CHECK(words.All(1));
  OK(hipGraphExecDestroy(exec));
  OK(hipGraphDestroy(graph));
}

void DevicesArePeersAndFailAlone() {
  OK(hipSetDevice(1));
  EXPECT(hipSetDevice(99), kInvalidDevice);
  hipGetLastError();
  Filler there;
  {
    Words words(kBlock);
    TestStream stream;
    OK(there.Launch(words, 5, stream));
    OK(hipStreamSynchronize(stream));
    OK(hipSetDevice(0));
    Words here(kBlock);
    TestStream own;
    OK(hipMemcpyPeerAsync(here, 0, words, 1, 4 * kBlock, own));
    OK(hipStreamSynchronize(own));
    CHECK(Filled(here.Read(), 5));
    // A module is of one device.
    EXPECT(there.Launch(here, 5, own), kInvalidHandle);
    // Device 1 faults, device 0 works.
    OK(there.Launch(words + 1, 5, stream));
    EXPECT(hipStreamSynchronize(stream), kIllegalAddress);
    OK(hipMemset(here, 0, 4 * kBlock));
    OK(hipDeviceSynchronize());
    amdgpu_sim_clear_fault();
    OK(hipSetDevice(1));
  }
  OK(hipSetDevice(0));
}

void VirtualMemoryIsMapped() {
  constexpr size_t kSize = size_t{2} << 20;
  const struct {
    int type, handle_types, location_type, location_id;
    void* metadata;
    unsigned char flags[8];
  } properties = {1, 0, 1, 0, nullptr, {}};
  void *pointer, *handle;
  OK(hipMemAddressReserve(&pointer, 2 * kSize, 0, nullptr, 0));
  OK(hipMemCreate(&handle, kSize, &properties, 0));
  OK(hipMemMap(pointer, kSize, 0, handle, 0));
  EXPECT(hipMemMap(pointer, kSize, 0, handle, 0), kInvalidValue);
  OK(hipMemRelease(handle));  // The mapping keeps it.
  OK(hipMemset(pointer, 7, kSize));
  uint8_t last = 0;
  OK(hipMemcpy(&last, static_cast<char*>(pointer) + kSize - 1, 1,
               kDeviceToHost));
  CHECK(last == 7);
  EXPECT(hipMemAddressFree(pointer, 2 * kSize), kInvalidValue);
  OK(hipMemUnmap(pointer, kSize));
  OK(hipMemAddressFree(pointer, 2 * kSize));
  hipGetLastError();
}

void HandlesAreChecked() {
  Stream* stream;
  Event* event;
  OK(hipStreamCreateWithFlags(&stream, 0));
  OK(hipEventCreateWithFlags(&event, 0));
  OK(hipStreamDestroy(stream));
  OK(hipEventDestroy(event));
  EXPECT(hipStreamDestroy(stream), kInvalidHandle);
  EXPECT(hipStreamSynchronize(stream), kInvalidHandle);
  EXPECT(hipEventRecord(event, nullptr), kInvalidHandle);
  EXPECT(hipEventDestroy(event), kInvalidHandle);
  EXPECT(hipStreamCreateWithFlags(&stream, 8), kInvalidValue);
  CHECK(hipGetLastError() == kInvalidValue);
  CHECK(hipGetLastError() == kSuccess);
}

// What one of several threads does: everything at once, on its own memory.
void Work(int thread, int rounds) {
  OK(hipSetDevice(thread % 2));
  for (int round = 0; round < rounds; ++round) {
    Filler filler;
    TestStream stream(round % 2), side;
    TestEvent event, done;
    Words words(kBlock), copy(kBlock);
    const uint32_t value = 1000 * thread + round;
    OK(filler.Launch(words, value, stream));
    OK(hipEventRecord(event, stream));
    OK(hipStreamWaitEvent(side, event, 0));
    OK(hipMemcpyAsync(copy, words, 4 * kBlock, kDeviceToDevice, side));
    OK(hipEventRecord(done, side));
    OK(hipEventSynchronize(done));
    CHECK(Filled(copy.Read(), value));
    OK(hipMemset(copy, 0, 4 * kBlock));
    OK(hipStreamBeginCapture(side, kCaptureRelaxed));
    OK(filler.Launch(words, value + 1, side));
    OK(hipMemcpyAsync(copy, words, 4 * kBlock, kDeviceToDevice, side));
    Graph* graph;
    OK(hipStreamEndCapture(side, &graph));
    GraphExec* exec = Instantiated(graph);
    OK(hipGraphDestroy(graph));
    OK(hipDeviceSynchronize());
    OK(hipGraphLaunch(exec, side));
    OK(hipStreamSynchronize(side));
    OK(hipGraphExecDestroy(exec));
    CHECK(Filled(copy.Read(), value + 1));
  }
}

void ThreadsWorkTogether(int count, int rounds) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(Work, i, rounds);
  for (std::thread& thread : threads) thread.join();
}

struct Test {
  const char* name;
  void (*run)();
};

constexpr Test kTests[] = {
#define TEST(name) {#name, name}
    TEST(StreamsAreAsynchronousAndInOrder),
    TEST(HostFunctionsDoNotWaitForThemselves),
    TEST(StreamsAreIndependent),
    TEST(EventsOrderStreams),
    TEST(EventsTellTime),
    TEST(TheLegacyStreamWaitsForBlockingOnes),
    TEST(ThreadsHaveStreamsOfTheirOwn),
    TEST(StreamsWaitForValues),
    TEST(CopiesOfPageableMemory),
    TEST(CopiesAreChecked),
    TEST(PointersAreDescribed),
    TEST(MemoryIsBounded),
    TEST(FreeingSynchronises),
    TEST(UseAfterFreeIsAFault),
    TEST(KernelsRunAndFault),
    TEST(ModulesAreUnloaded),
    TEST(CaptureAcrossStreams),
    TEST(CaptureRefusesWhatItMust),
    TEST(GraphsAreBuiltAndUpdated),
    TEST(MissingDependenciesShow),
    TEST(DevicesArePeersAndFailAlone),
    TEST(VirtualMemoryIsMapped),
    TEST(HandlesAreChecked),
#undef TEST
};

}  // namespace
}  // namespace amdgpu_sim

int main(int argc, char** argv) {
  setenv("AMDGPU_SIM_DEVICES", "2", 1);
  if (argc == 1) {
    for (const auto& test : amdgpu_sim::kTests) {
      const uint64_t allocations = amdgpu_sim_live_allocations();
      test.run();
      std::printf("%s\n", test.name);
      CHECK(amdgpu_sim_live_allocations() == allocations);
    }
  }
  amdgpu_sim::ThreadsWorkTogether(argc == 1 ? 8 : std::atoi(argv[1]), 20);
  CHECK(amdgpu_sim_live_allocations() == 0);
  CHECK(amdgpu_sim_live_modules() == 0);
  std::puts("PASSED");
}
