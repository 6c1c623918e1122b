// SPDX-License-Identifier: Apache-2.0

// Collectives of four simulated devices, by HIP's and RCCL's functions alone.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

extern "C" {
struct UniqueId {
  char bytes[128];
};
int hipSetDevice(int device);
int hipMalloc(void** pointer, size_t bytes);
int hipFree(void* pointer);
int hipMemcpy(void* to, const void* from, size_t bytes, int kind);
int hipStreamCreate(void** stream);
int hipStreamDestroy(void* stream);
int hipStreamSynchronize(void* stream);
int hipStreamBeginCapture(void* stream, int mode);
int hipStreamEndCapture(void* stream, void** graph);
int hipGraphInstantiate(void** exec, void* graph, void*, char*, size_t);
int hipGraphLaunch(void* exec, void* stream);
int hipGraphExecDestroy(void* exec);
int hipGraphDestroy(void* graph);
void amdgpu_sim_clear_fault();

int ncclGetUniqueId(UniqueId* id);
int ncclCommInitRank(void** comm, int size, UniqueId id, int rank);
int ncclCommInitAll(void** comms, int size, const int* devices);
int ncclCommSplit(void* comm, int color, int key, void** part, void* config);
int ncclCommCount(void* comm, int* count);
int ncclCommUserRank(void* comm, int* rank);
int ncclCommDestroy(void* comm);
int ncclCommAbort(void* comm);
int ncclCommGetAsyncError(void* comm, int* error);
const char* ncclGetErrorString(int result);
const char* ncclGetLastError(const void* comm);
int ncclGroupStart();
int ncclGroupEnd();
int ncclAllReduce(const void*, void*, size_t, int, int, void*, void*);
int ncclAllGather(const void*, void*, size_t, int, void*, void*);
int ncclReduceScatter(const void*, void*, size_t, int, int, void*, void*);
int ncclBroadcast(const void*, void*, size_t, int, int, void*, void*);
int ncclReduce(const void*, void*, size_t, int, int, int, void*, void*);
int ncclAllToAll(const void*, void*, size_t, int, void*, void*);
int ncclSend(const void*, size_t, int, int, void*, void*);
int ncclRecv(void*, size_t, int, int, void*, void*);
}

namespace {

constexpr int kRanks = 4;
enum {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat8e4m3,
  kFloat8e5m2
};
enum { kSum, kProd, kMax, kMin, kAvg };
enum { kCopyDefault = 4 };

// A rank's device, with a stream, a communicator and two buffers.
struct Rank {
  int rank = 0;
  void* comm = nullptr;
  void* stream = nullptr;
  void* send = nullptr;
  void* receive = nullptr;

  template <typename T>
  void Put(const std::vector<T>& values) {
    CHECK(hipSetDevice(rank) == 0);
    CHECK(hipFree(send) == 0 && hipFree(receive) == 0);
    CHECK(hipMalloc(&send, values.size() * sizeof(T)) == 0);
    CHECK(hipMalloc(&receive, kRanks * values.size() * sizeof(T)) == 0);
    CHECK(hipMemcpy(send, values.data(), values.size() * sizeof(T),
                    kCopyDefault) == 0);
  }
  template <typename T>
  std::vector<T> Get(size_t count) {
    std::vector<T> values(count);
    CHECK(hipSetDevice(rank) == 0);
    CHECK(hipStreamSynchronize(stream) == 0);
    CHECK(hipMemcpy(values.data(), receive, count * sizeof(T), kCopyDefault) ==
          0);
    return values;
  }
};

// Calls for every rank, each from a thread of its own.
void ForEach(std::vector<Rank>& ranks,
             const std::function<void(Rank&)>& function) {
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) {
    threads.emplace_back([&function, &rank] {
      CHECK(hipSetDevice(rank.rank) == 0);
      function(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<Rank> MakeRanks() {
  UniqueId id;
  CHECK(ncclGetUniqueId(&id) == 0);
  std::vector<Rank> ranks(kRanks);
  for (int i = 0; i < kRanks; ++i) ranks[i].rank = i;
  ForEach(ranks, [&](Rank& rank) {
    CHECK(hipStreamCreate(&rank.stream) == 0);
    CHECK(ncclCommInitRank(&rank.comm, kRanks, id, rank.rank) == 0);
  });
  return ranks;
}

void Destroy(std::vector<Rank>& ranks) {
  for (Rank& rank : ranks) {
    CHECK(hipSetDevice(rank.rank) == 0);
    CHECK(hipFree(rank.send) == 0 && hipFree(rank.receive) == 0);
    CHECK(hipStreamDestroy(rank.stream) == 0);
    if (rank.comm != nullptr) CHECK(ncclCommDestroy(rank.comm) == 0);
  }
}

// A reduction of one element a rank, given as the element's bits.
template <typename T>
void CheckReduction(std::vector<Rank>& ranks, int type, int reduction,
                    const std::vector<T>& values, T expected) {
  for (Rank& rank : ranks) rank.Put<T>({values[rank.rank], values[rank.rank]});
  ForEach(ranks, [&](Rank& rank) {
    CHECK(ncclAllReduce(rank.send, rank.receive, 2, type, reduction, rank.comm,
                        rank.stream) == 0);
  });
  for (Rank& rank : ranks) {
    CHECK((rank.Get<T>(2) == std::vector<T>{expected, expected}));
  }
}

void TestReductions() {
  std::vector<Rank> ranks = MakeRanks();
  CheckReduction<float>(ranks, kFloat32, kSum, {1, 2, 3, 4.5f}, 10.5f);
  CheckReduction<float>(ranks, kFloat32, kAvg, {1, 2, 3, 4}, 2.5f);
  CheckReduction<float>(ranks, kFloat32, kMin, {1, -2, 3, 4}, -2);
  CheckReduction<double>(ranks, kFloat64, kProd, {1, 2, 3, 4.5}, 27);
  CheckReduction<int8_t>(ranks, kInt8, kSum, {100, 100, 0, 0}, -56);
  CheckReduction<int8_t>(ranks, kInt8, kMax, {-3, -1, -2, -4}, -1);
  CheckReduction<uint8_t>(ranks, kUint8, kMax, {3, 200, 2, 4}, 200);
  CheckReduction<int32_t>(ranks, kInt32, kSum, {INT32_MAX, 1, 0, 0}, INT32_MIN);
  CheckReduction<int32_t>(ranks, kInt32, kMin, {-7, 1, 2, 3}, -7);
  CheckReduction<int32_t>(ranks, kInt32, kAvg, {-8, -8, 4, 4}, -2);
  CheckReduction<uint32_t>(ranks, kUint32, kMax, {1, 0xfffffff0, 2, 3},
                           0xfffffff0);
  CheckReduction<int64_t>(ranks, kInt64, kSum, {1, 2, 3, -7}, -1);
  CheckReduction<uint64_t>(ranks, kUint64, kMin, {4, 2, 3, ~0ull}, 2);
  // The sum is rounded once: one 2^-8 after the other would be lost.
  CheckReduction<uint16_t>(ranks, kFloat16, kSum,
                           {0x3c00, 0x4000, 0x4200, 0x4400}, 0x4900);
  CheckReduction<uint16_t>(ranks, kBfloat16, kSum,
                           {0x3f80, 0x4000, 0x4040, 0x4080}, 0x4120);
  CheckReduction<uint16_t>(ranks, kBfloat16, kSum, {0x3f80, 0x3b80, 0x3b80, 0},
                           0x3f81);
  // fp8 as gfx942 has it: exponents are biased by 8 and by 16.
  CheckReduction<uint8_t>(ranks, kFloat8e4m3, kSum, {0x40, 0x40, 0x48, 0x00},
                          0x50);
  CheckReduction<uint8_t>(ranks, kFloat8e5m2, kSum, {0x40, 0x40, 0x44, 0x00},
                          0x48);
  Destroy(ranks);
}

void TestShapes() {
  std::vector<Rank> ranks = MakeRanks();
  using Ints = std::vector<int>;
  const auto put = [&] {
    for (Rank& rank : ranks) {
      Ints values;
      for (int i = 0; i < kRanks; ++i) values.push_back(10 * rank.rank + i);
      rank.Put(values);
    }
  };
  put();
  ForEach(ranks, [&](Rank& rank) {
    CHECK(ncclAllGather(rank.send, rank.receive, 1, kInt32, rank.comm,
                        rank.stream) == 0);
  });
  for (Rank& rank : ranks) {
    CHECK((rank.Get<int>(4) == Ints{0, 10, 20, 30}));
  }
  put();
  ForEach(ranks, [&](Rank& rank) {
    CHECK(ncclReduceScatter(rank.send, rank.receive, 1, kInt32, kSum, rank.comm,
                            rank.stream) == 0);
  });
  for (Rank& rank : ranks) {
    CHECK((rank.Get<int>(1) == Ints{60 + 4 * rank.rank}));
  }
  put();
  ForEach(ranks, [&](Rank& rank) {
    CHECK(ncclBroadcast(rank.send, rank.receive, 4, kInt32, 2, rank.comm,
                        rank.stream) == 0);
  });
  for (Rank& rank : ranks) {
    CHECK((rank.Get<int>(4) == Ints{20, 21, 22, 23}));
  }
  put();
  ForEach(ranks, [&](Rank& rank) {
    CHECK(ncclAllToAll(rank.send, rank.receive, 1, kInt32, rank.comm,
                       rank.stream) == 0);
  });
  for (Rank& rank : ranks) {
    const int r = rank.rank;
    CHECK((rank.Get<int>(4) == Ints{r, 10 + r, 20 + r, 30 + r}));
  }
  put();
  ForEach(ranks, [&](Rank& rank) {
    CHECK(ncclReduce(rank.send, rank.receive, 4, kInt32, kSum, 1, rank.comm,
                     rank.stream) == 0);
  });
  CHECK((ranks[1].Get<int>(4) == Ints{60, 64, 68, 72}));
  // A ring, receiving first, and in place.
  put();
  ForEach(ranks, [&](Rank& rank) {
    CHECK(ncclGroupStart() == 0);
    CHECK(ncclRecv(rank.receive, 4, kInt32, (rank.rank + 3) % kRanks, rank.comm,
                   rank.stream) == 0);
    CHECK(ncclSend(rank.send, 4, kInt32, (rank.rank + 1) % kRanks, rank.comm,
                   rank.stream) == 0);
    CHECK(ncclGroupEnd() == 0);
  });
  for (Rank& rank : ranks) {
    CHECK(rank.Get<int>(4)[0] == (rank.rank + 3) % kRanks * 10);
  }
  Destroy(ranks);
}

void TestOneThread() {
  std::vector<Rank> ranks = MakeRanks();
  void* comms[kRanks];
  CHECK(ncclCommInitAll(comms, kRanks, nullptr) == 0);
  for (Rank& rank : ranks) rank.Put(std::vector<int>{rank.rank + 1});
  void* parts[kRanks];
  CHECK(ncclGroupStart() == 0);
  for (int i = 0; i < kRanks; ++i) {
    // Halves, each in the opposite order.
    CHECK(ncclCommSplit(comms[i], i % 2, -i, &parts[i], nullptr) == 0);
  }
  CHECK(ncclGroupEnd() == 0);
  for (int i = 0; i < kRanks; ++i) {
    int count = 0, rank = 0;
    CHECK(ncclCommCount(parts[i], &count) == 0 && count == 2);
    CHECK(ncclCommUserRank(parts[i], &rank) == 0 && rank == 1 - i / 2);
  }
  CHECK(ncclGroupStart() == 0);
  for (Rank& rank : ranks) {
    CHECK(ncclAllGather(rank.send, rank.receive, 1, kInt32, parts[rank.rank],
                        rank.stream) == 0);
  }
  CHECK(ncclGroupEnd() == 0);
  for (Rank& rank : ranks) {
    const int half = rank.rank % 2;
    CHECK((rank.Get<int>(2) == std::vector<int>{3 + half, 1 + half}));
  }
  for (int i = 0; i < kRanks; ++i) {
    CHECK(ncclCommDestroy(comms[i]) == 0 && ncclCommDestroy(parts[i]) == 0);
  }
  Destroy(ranks);
}

void TestGraph() {
  std::vector<Rank> ranks = MakeRanks();
  std::vector<void*> execs(kRanks);
  for (Rank& rank : ranks) rank.Put(std::vector<int>{rank.rank});
  ForEach(ranks, [&](Rank& rank) {
    void* graph = nullptr;
    CHECK(hipStreamBeginCapture(rank.stream, 1) == 0);
    CHECK(ncclAllReduce(rank.send, rank.receive, 1, kInt32, kSum, rank.comm,
                        rank.stream) == 0);
    CHECK(hipStreamEndCapture(rank.stream, &graph) == 0);
    CHECK(hipGraphInstantiate(&execs[rank.rank], graph, nullptr, nullptr, 0) ==
          0);
    CHECK(hipGraphDestroy(graph) == 0);
  });
  for (int replay = 0; replay < 3; ++replay) {
    for (Rank& rank : ranks) {
      CHECK(hipSetDevice(rank.rank) == 0);
      const int value = rank.rank * (replay + 1);
      CHECK(hipMemcpy(rank.send, &value, sizeof(value), kCopyDefault) == 0);
    }
    ForEach(ranks, [&](Rank& rank) {
      CHECK(hipGraphLaunch(execs[rank.rank], rank.stream) == 0);
    });
    for (Rank& rank : ranks) {
      CHECK(rank.Get<int>(1)[0] == 6 * (replay + 1));
    }
  }
  for (void* exec : execs) CHECK(hipGraphExecDestroy(exec) == 0);
  Destroy(ranks);
}

// Nobody waits for ever for a rank that fails.
void TestFailures() {
  std::vector<Rank> ranks = MakeRanks();
  for (Rank& rank : ranks) rank.Put(std::vector<int>{rank.rank});
  ForEach(ranks, [&](Rank& rank) {
    // One rank sends more than it has.
    const size_t count = rank.rank == 2 ? 2 : 1;
    ncclAllReduce(rank.send, rank.receive, count, kInt32, kSum, rank.comm,
                  rank.stream);
    CHECK(hipStreamSynchronize(rank.stream) != 0);
    int error = 0;
    CHECK(ncclCommGetAsyncError(rank.comm, &error) == 0 && error != 0);
    CHECK(ncclGetLastError(rank.comm)[0] != '\0');
    CHECK(ncclGetErrorString(error)[0] != '\0');
  });
  amdgpu_sim_clear_fault();
  Destroy(ranks);

  ranks = MakeRanks();
  for (Rank& rank : ranks) rank.Put(std::vector<int>{rank.rank});
  ForEach(ranks, [&](Rank& rank) {
    if (rank.rank == 0) {
      CHECK(ncclCommAbort(rank.comm) == 0);
      rank.comm = nullptr;
      return;
    }
    ncclAllReduce(rank.send, rank.receive, 1, kInt32, kSum, rank.comm,
                  rank.stream);
    CHECK(hipStreamSynchronize(rank.stream) != 0);
  });
  amdgpu_sim_clear_fault();
  CHECK(ncclAllReduce(nullptr, nullptr, 1, kInt32, kSum, nullptr, nullptr) !=
        0);
  CHECK(ncclAllReduce(nullptr, nullptr, 1, 99, kSum, ranks[1].comm, nullptr) !=
        0);
  CHECK(ncclGroupEnd() != 0);
  Destroy(ranks);
}

}  // namespace

int main() {
  setenv("AMDGPU_SIM_DEVICES", "4", 1);
  TestReductions();
  TestShapes();
  TestOneThread();
  TestGraph();
  TestFailures();
  std::puts("PASS");
  return 0;
}
