// SPDX-License-Identifier: Apache-2.0

// RCCL for the simulated devices of one process.
//
// An operation is work of its stream: it copies what it sends out of the
// device's memory, meets the other ranks' operations, and copies the result
// back. So it is ordered as a kernel is, it waits for slow ranks and it is
// captured into graphs. Sums are added in the order of the ranks, in float for
// 8 and 16 bits, and rounded once; RCCL's own order depends on the machine.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/amdgpu_sim/hip/collective.h"
#include "tests/amdgpu_sim/hip/handles.h"
#include "tests/amdgpu_sim/isa/float.h"

#define RCCL_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
int hipGetDevice(int* device);
int hipSetDevice(int device);
int hipMalloc(void** pointer, size_t bytes);
int hipFree(void* pointer);
}

namespace amdgpu_sim {
namespace {

// RCCL's binary interface.

enum Result : int {
  kOk = 0,
  kUnhandledHipError = 1,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

enum DataType : int {
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
  kFloat8e5m2,
  kDataTypes,
};

enum Reduction : int { kSum, kProd, kMax, kMin, kAvg, kReductions };

struct UniqueId {
  char bytes[128];
};

// NCCL_SPLIT_NOCOLOR: in no part of the split communicator.
constexpr int kNoColor = -1;
constexpr int kVersion = 22707;

constexpr size_t kSizes[kDataTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

// Reductions.

using Bytes = std::vector<char>;

template <typename T>
T Combine(T a, T b, Reduction reduction) {
  switch (reduction) {
    case kProd:
      return static_cast<T>(a * b);
    case kMax:
      if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
      return std::max(a, b);
    case kMin:
      if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

// Elements are stored as `Stored` and combined as what `decode` gives.
template <typename Stored, typename Decode, typename Encode>
Bytes ReduceAs(const std::vector<Bytes>& sent, Reduction reduction,
               const Decode& decode, const Encode& encode) {
  const auto element = [&](const Bytes& bytes, size_t i) {
    Stored stored;
    std::memcpy(&stored, &bytes[i * sizeof(Stored)], sizeof(Stored));
    return decode(stored);
  };
  Bytes result(sent[0].size());
  for (size_t i = 0; i < result.size() / sizeof(Stored); ++i) {
    auto value = element(sent[0], i);
    for (size_t rank = 1; rank < sent.size(); ++rank) {
      value = Combine(value, element(sent[rank], i), reduction);
    }
    if (reduction == kAvg) value /= static_cast<decltype(value)>(sent.size());
    const Stored stored = encode(value);
    std::memcpy(&result[i * sizeof(Stored)], &stored, sizeof(Stored));
  }
  return result;
}

template <typename T, typename Computed = T>
Bytes ReducePlain(const std::vector<Bytes>& sent, Reduction reduction) {
  // Integers wrap around.
  return ReduceAs<T>(
      sent, reduction, [](T value) { return static_cast<Computed>(value); },
      [](Computed value) { return static_cast<T>(value); });
}

template <const MiniFormat& format>
Bytes ReduceMini(const std::vector<Bytes>& sent, Reduction reduction) {
  return ReduceAs<uint8_t>(
      sent, reduction, [](uint8_t code) { return DecodeTable<format>()[code]; },
      [](float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        return static_cast<uint8_t>(EncodeMini(format, bits, false));
      });
}

// gfx942 computes with fnuz formats, gfx950 with OCP's.
bool Fnuz() {
  const char* arch = std::getenv("AMDGPU_SIM_ARCH");
  return arch == nullptr || std::strcmp(arch, "gfx950") != 0;
}

Bytes Reduce(const std::vector<Bytes>& sent, DataType type,
             Reduction reduction) {
  switch (type) {
    case kInt8:
      return ReducePlain<int8_t, int>(sent, reduction);
    case kUint8:
      return ReducePlain<uint8_t, unsigned>(sent, reduction);
    case kInt32:
      // Unsigned where signs do not matter: overflow is defined there.
      return reduction == kSum || reduction == kProd
                 ? ReducePlain<uint32_t>(sent, reduction)
                 : ReducePlain<int32_t, int64_t>(sent, reduction);
    case kUint32:
      return ReducePlain<uint32_t>(sent, reduction);
    case kInt64:
      return reduction == kSum || reduction == kProd
                 ? ReducePlain<uint64_t>(sent, reduction)
                 : ReducePlain<int64_t>(sent, reduction);
    case kUint64:
      return ReducePlain<uint64_t>(sent, reduction);
    case kFloat16:
      return ReduceAs<uint16_t>(
          sent, reduction, [](uint16_t bits) { return HalfToFloat(bits); },
          [](float value) { return FloatToHalf(value); });
    case kFloat32:
      return ReducePlain<float>(sent, reduction);
    case kFloat64:
      return ReducePlain<double>(sent, reduction);
    case kBfloat16:
      return ReduceAs<uint16_t>(
          sent, reduction, [](uint16_t bits) { return BfloatToFloat(bits); },
          [](float value) { return FloatToBfloat(value); });
    case kFloat8e4m3:
      return Fnuz() ? ReduceMini<kFp8Fnuz>(sent, reduction)
                    : ReduceMini<kFp8>(sent, reduction);
    case kFloat8e5m2:
      return Fnuz() ? ReduceMini<kBf8Fnuz>(sent, reduction)
                    : ReduceMini<kBf8>(sent, reduction);
    default:
      return sent[0];
  }
}

// Communicators.

enum class Kind {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kReduce,
  kAllToAll,
  kSend,
  kReceive,
};

// What all ranks of a collective must agree on.
struct Terms {
  Kind kind;
  size_t count = 0;  // As the call has it.
  DataType type = kInt8;
  Reduction reduction = kSum;
  int root = 0;  // The peer of a send or a receive.

  bool operator==(const Terms& other) const {
    return kind == other.kind && count == other.count && type == other.type &&
           reduction == other.reduction && root == other.root;
  }
  bool collective() const {
    return kind != Kind::kSend && kind != Kind::kReceive;
  }
  bool reduces() const {
    return kind == Kind::kAllReduce || kind == Kind::kReduceScatter ||
           kind == Kind::kReduce;
  }
  size_t bytes() const { return count * kSizes[type]; }
};

// One collective, from its first rank's arrival to its last one's departure.
struct Round {
  Terms terms;
  std::vector<Bytes> sent;
  int arrived = 0;
  Bytes reduced;
  bool done = false;
};

// The ranks that talk to each other.
class Clique {
 public:
  explicit Clique(int size) : size_(size), next_round_(size) {}

  int size() const { return size_; }

  // Brings a rank's part of its next collective. The last to come computes.
  std::shared_ptr<Round> Arrive(int rank, const Terms& terms, Bytes sent) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = next_round_[rank]++;
    std::shared_ptr<Round>& slot = rounds_[number];
    if (slot == nullptr) {
      slot = std::make_shared<Round>();
      slot->terms = terms;
      slot->sent.resize(size_);
    }
    const std::shared_ptr<Round> round = slot;
    if (!(round->terms == terms)) {
      FailLocked("the ranks call different collectives");
      return round;
    }
    round->sent[rank] = std::move(sent);
    if (++round->arrived < size_) return round;
    rounds_.erase(number);
    if (terms.reduces()) {
      round->reduced = Reduce(round->sent, terms.type, terms.reduction);
    }
    round->done = true;
    changed_.notify_all();
    return round;
  }

  void Post(int from, int to, Bytes message) {
    std::lock_guard<std::mutex> lock(mutex_);
    messages_[{from, to}].push_back(std::move(message));
    changed_.notify_all();
  }

  // Both wait; false if the clique fails meanwhile.
  bool Await(const Round& round) {
    std::unique_lock<std::mutex> lock(mutex_);
    return Wait(lock, [&] { return round.done; });
  }
  bool Take(int from, int to, Bytes* message) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::deque<Bytes>& queue = messages_[{from, to}];
    if (!Wait(lock, [&] { return !queue.empty(); })) return false;
    *message = std::move(queue.front());
    queue.pop_front();
    return true;
  }

  // Nobody waits any more; the first reason stays.
  void Fail(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    FailLocked(reason);
  }
  bool failed() const { return failed_; }
  // Meaningful, and no longer changed, once failed() holds.
  const char* reason() const { return reason_.c_str(); }

 private:
  void FailLocked(const std::string& reason) {
    if (failed_) return;
    reason_ = reason;
    failed_ = true;
    changed_.notify_all();
  }

  template <typename Ready>
  bool Wait(std::unique_lock<std::mutex>& lock, const Ready& ready) {
    while (!ready()) {
      if (amdgpu_sim_exiting()) FailLocked("the process exits");
      if (failed_) return false;
      changed_.wait_for(lock, std::chrono::milliseconds(100));
    }
    return true;
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint64_t> next_round_;  // By rank.
  std::map<uint64_t, std::shared_ptr<Round>> rounds_;
  std::map<std::pair<int, int>, std::deque<Bytes>> messages_;
  std::atomic<bool> failed_{false};
  std::string reason_;
};

// A rank's place.
struct Place {
  std::shared_ptr<Clique> clique;
  int rank = 0;
};

// A communicator that its ranks divide by color. Who is in which part is known
// when all have called, which a rank learns when it uses its part: in a group,
// one thread calls for several ranks.
class Split {
 public:
  explicit Split(int size) : size_(size) {}

  void Join(int rank, int color, int key) {
    std::lock_guard<std::mutex> lock(mutex_);
    members_[rank] = {color, key};
    changed_.notify_all();
  }

  Place Find(int rank) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (static_cast<int>(members_.size()) < size_) {
      if (amdgpu_sim_exiting()) return {std::make_shared<Clique>(1), 0};
      changed_.wait_for(lock, std::chrono::milliseconds(100));
    }
    const Member& mine = members_[rank];
    int size = 0, before = 0;
    for (const auto& [other_rank, other] : members_) {
      if (other.color != mine.color) continue;
      ++size;
      before += std::make_pair(other.key, other_rank) <
                std::make_pair(mine.key, rank);
    }
    std::shared_ptr<Clique>& clique = parts_[mine.color];
    if (clique == nullptr) clique = std::make_shared<Clique>(size);
    return {clique, before};
  }

 private:
  struct Member {
    int color, key;
  };

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Member> members_;                 // By rank.
  std::map<int, std::shared_ptr<Clique>> parts_;  // By color.
};

// One rank of a clique, behind an ncclComm_t.
class Communicator {
 public:
  explicit Communicator(Place place) : place_(std::move(place)) {
    hipGetDevice(&device_);
  }
  Communicator(std::shared_ptr<Split> split, int rank)
      : split_(std::move(split)), split_rank_(rank) {
    hipGetDevice(&device_);
  }

  int device() const { return device_; }

  // Waits for the other ranks if this came from a split.
  const Place& place() {
    std::call_once(placed_, [&] {
      if (split_ != nullptr) place_ = split_->Find(split_rank_);
    });
    return place_;
  }

  // Splits are matched by their order, as collectives are.
  std::shared_ptr<Split> NextSplit() {
    Clique* clique = place().clique.get();
    static std::mutex mutex;
    static std::map<std::pair<Clique*, int>, std::weak_ptr<Split>> splits;
    std::lock_guard<std::mutex> lock(mutex);
    std::weak_ptr<Split>& slot = splits[{clique, split_count_++}];
    std::shared_ptr<Split> split = slot.lock();
    if (split == nullptr) {
      split = std::make_shared<Split>(clique->size());
      slot = split;
    }
    return split;
  }

 private:
  int device_ = 0;
  std::once_flag placed_;
  Place place_;
  std::shared_ptr<Split> split_;
  int split_rank_ = 0;
  int split_count_ = 0;
};

using Communicators = Handles<Communicator>;

// The clique of a unique id, while one of its ranks lives.
std::shared_ptr<Clique> FindClique(const UniqueId& id, int size) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Clique>> cliques;
  std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<Clique>& slot =
      cliques[std::string(id.bytes, sizeof(id.bytes))];
  std::shared_ptr<Clique> clique = slot.lock();
  if (clique == nullptr) {
    clique = std::make_shared<Clique>(size);
    slot = clique;
  }
  return clique->size() == size ? clique : nullptr;
}

// Operations.

struct Operation {
  Terms terms;
  const void* send = nullptr;
  void* receive = nullptr;
  std::shared_ptr<Communicator> communicator;
};

// What a stream does of one group.
struct Launch {
  std::vector<Operation> operations;
  std::string error;  // Of the last run, for its caller.
};

size_t SentBytes(const Operation& operation, int rank, int size) {
  const Terms& terms = operation.terms;
  switch (terms.kind) {
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
      return terms.bytes() * size;
    case Kind::kBroadcast:
      return rank == terms.root ? terms.bytes() : 0;
    case Kind::kReceive:
      return 0;
    default:
      return terms.bytes();
  }
}

// A rank's result of a round that is done.
Bytes ResultOf(const Round& round, int rank) {
  const size_t bytes = round.terms.bytes();
  Bytes result;
  switch (round.terms.kind) {
    case Kind::kAllReduce:
      return round.reduced;
    case Kind::kReduce:
      return rank == round.terms.root ? round.reduced : Bytes();
    case Kind::kReduceScatter:
      return Bytes(round.reduced.begin() + rank * bytes,
                   round.reduced.begin() + (rank + 1) * bytes);
    case Kind::kBroadcast:
      return round.sent[round.terms.root];
    case Kind::kAllGather:
      for (const Bytes& part : round.sent) {
        result.insert(result.end(), part.begin(), part.end());
      }
      return result;
    default:
      for (const Bytes& part : round.sent) {
        result.insert(result.end(), part.begin() + rank * bytes,
                      part.begin() + (rank + 1) * bytes);
      }
      return result;
  }
}

// First every operation of the group sends, then every one receives, so that
// their order does not matter.
const char* RunLaunch(void* data, int failed) {
  Launch& launch = *static_cast<Launch*>(data);
  const auto fail = [&](Clique& clique, const std::string& reason) {
    clique.Fail(reason);
    launch.error = clique.reason();
  };
  launch.error.clear();
  std::vector<std::shared_ptr<Round>> rounds;
  for (const Operation& operation : launch.operations) {
    const Place& place = operation.communicator->place();
    Clique& clique = *place.clique;
    Bytes sent(SentBytes(operation, place.rank, clique.size()));
    rounds.emplace_back();
    if (operation.terms.root >= clique.size()) {
      fail(clique, "there is no rank " + std::to_string(operation.terms.root));
      continue;
    }
    if (failed ||
        (!sent.empty() &&
         !amdgpu_sim_copy(sent.data(), operation.send, sent.size()))) {
      fail(clique,
           "the device of rank " + std::to_string(place.rank) + " failed");
    } else if (operation.terms.kind == Kind::kSend) {
      clique.Post(place.rank, operation.terms.root, std::move(sent));
    } else if (operation.terms.collective()) {
      rounds.back() =
          clique.Arrive(place.rank, operation.terms, std::move(sent));
    }
  }
  for (size_t i = 0; i < launch.operations.size(); ++i) {
    const Operation& operation = launch.operations[i];
    const Place& place = operation.communicator->place();
    Clique& clique = *place.clique;
    if (operation.terms.kind == Kind::kSend) continue;
    Bytes result;
    if (operation.terms.kind == Kind::kReceive) {
      if (!clique.Take(operation.terms.root, place.rank, &result)) {
        fail(clique, "");
        continue;
      }
      if (result.size() != operation.terms.bytes()) {
        fail(clique, "a receive has another size than its send");
        continue;
      }
    } else {
      if (rounds[i] == nullptr || !clique.Await(*rounds[i])) {
        fail(clique, "");
        continue;
      }
      result = ResultOf(*rounds[i], place.rank);
    }
    if (!result.empty()) {
      amdgpu_sim_copy(operation.receive, result.data(), result.size());
    }
  }
  return launch.error.empty() ? nullptr : launch.error.c_str();
}

void DropLaunch(void* data) { delete static_cast<Launch*>(data); }

const char* Label(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
      return "ncclAllReduce";
    case Kind::kAllGather:
      return "ncclAllGather";
    case Kind::kReduceScatter:
      return "ncclReduceScatter";
    case Kind::kBroadcast:
      return "ncclBroadcast";
    case Kind::kReduce:
      return "ncclReduce";
    case Kind::kAllToAll:
      return "ncclAllToAll";
    case Kind::kSend:
      return "ncclSend";
    default:
      return "ncclRecv";
  }
}

// The calling thread's open group.
struct Group {
  int depth = 0;
  // By stream, and by device since null is every device's.
  std::map<std::pair<int, Stream*>, std::vector<Operation>> pending;
};

thread_local Group group;

Result Submit(int device, Stream* stream, std::vector<Operation> operations) {
  const char* label = Label(operations[0].terms.kind);
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (const Operation& operation : operations) {
    communicators.push_back(operation.communicator);
  }
  int before = 0;
  hipGetDevice(&before);
  hipSetDevice(device);
  auto* launch = new Launch;
  launch->operations = std::move(operations);
  const int error =
      amdgpu_sim_submit(stream, label, RunLaunch, DropLaunch, launch);
  hipSetDevice(before);
  if (error == 0) return kOk;
  // The other ranks would wait for ever. Waiting here for a split's members
  // would be as bad, so those are left alone.
  for (const auto& communicator : communicators) {
    communicator->place().clique->Fail("hip error " + std::to_string(error) +
                                       " of " + label);
  }
  return kUnhandledHipError;
}

Result Flush() {
  auto pending = std::exchange(group.pending, {});
  Result result = kOk;
  for (auto& [where, operations] : pending) {
    Result one = Submit(where.first, where.second, std::move(operations));
    if (result == kOk) result = one;
  }
  return result;
}

Result Enqueue(const Terms& terms, const void* send, void* receive,
               const void* handle, Stream* stream) {
  Operation operation = {terms, send, receive,
                         Communicators::Get().Find(handle)};
  if (operation.communicator == nullptr || terms.type < 0 ||
      terms.type >= kDataTypes || terms.reduction < 0 ||
      terms.reduction >= kReductions || terms.root < 0) {
    return kInvalidArgument;
  }
  const int device = operation.communicator->device();
  group.pending[{device, stream}].push_back(std::move(operation));
  return group.depth > 0 ? kOk : Flush();
}

Result Create(void** handle, const UniqueId& id, int size, int rank) {
  if (handle == nullptr || rank < 0 || rank >= size) return kInvalidArgument;
  std::shared_ptr<Clique> clique = FindClique(id, size);
  if (clique == nullptr) return kInvalidArgument;
  *handle = Communicators::Get().Add(
      std::make_shared<Communicator>(Place{std::move(clique), rank}));
  return kOk;
}

}  // namespace
}  // namespace amdgpu_sim

using amdgpu_sim::Communicator;
using amdgpu_sim::Communicators;
using amdgpu_sim::DataType;
using amdgpu_sim::Kind;
using amdgpu_sim::Reduction;
using amdgpu_sim::Result;
using amdgpu_sim::Stream;
using amdgpu_sim::UniqueId;

RCCL_EXPORT Result ncclGetVersion(int* version) {
  *version = amdgpu_sim::kVersion;
  return amdgpu_sim::kOk;
}

RCCL_EXPORT const char* ncclGetErrorString(Result result) {
  switch (result) {
    case amdgpu_sim::kOk:
      return "no error";
    case amdgpu_sim::kUnhandledHipError:
      return "unhandled hip error";
    case amdgpu_sim::kInvalidArgument:
      return "invalid argument";
    case amdgpu_sim::kInvalidUsage:
      return "invalid usage";
    case amdgpu_sim::kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "unknown result code";
  }
}

RCCL_EXPORT const char* ncclGetLastError(const void* handle) {
  auto communicator = Communicators::Get().Find(handle);
  if (communicator == nullptr) return "";
  auto clique = communicator->place().clique;
  return clique->failed() ? clique->reason() : "";
}

RCCL_EXPORT Result ncclGetUniqueId(UniqueId* id) {
  static std::atomic<uint64_t> next{1};
  const uint64_t number = next++;
  std::memset(id, 0, sizeof(*id));
  std::memcpy(id->bytes, &number, sizeof(number));
  return amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclCommInitRank(void** handle, int size, UniqueId id,
                                    int rank) {
  return amdgpu_sim::Create(handle, id, size, rank);
}

RCCL_EXPORT Result ncclCommInitRankConfig(void** handle, int size, UniqueId id,
                                          int rank, void*) {
  return amdgpu_sim::Create(handle, id, size, rank);
}

RCCL_EXPORT Result ncclCommInitRankScalable(void** handle, int size, int rank,
                                            int, const UniqueId* ids, void*) {
  return amdgpu_sim::Create(handle, ids[0], size, rank);
}

RCCL_EXPORT Result ncclCommInitAll(void** handles, int size,
                                   const int* devices) {
  UniqueId id;
  ncclGetUniqueId(&id);
  int before = 0;
  hipGetDevice(&before);
  Result result = amdgpu_sim::kOk;
  for (int rank = 0; rank < size && result == amdgpu_sim::kOk; ++rank) {
    result = hipSetDevice(devices == nullptr ? rank : devices[rank]) == 0
                 ? amdgpu_sim::Create(&handles[rank], id, size, rank)
                 : amdgpu_sim::kUnhandledHipError;
  }
  hipSetDevice(before);
  return result;
}

RCCL_EXPORT Result ncclCommSplit(void* handle, int color, int key, void** part,
                                 void*) {
  auto communicator = Communicators::Get().Find(handle);
  if (communicator == nullptr) return amdgpu_sim::kInvalidArgument;
  const int rank = communicator->place().rank;
  auto split = communicator->NextSplit();
  split->Join(rank, color, key);
  *part = color == amdgpu_sim::kNoColor
              ? nullptr
              : Communicators::Get().Add(
                    std::make_shared<Communicator>(std::move(split), rank));
  return amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclCommCount(void* handle, int* count) {
  auto communicator = Communicators::Get().Find(handle);
  if (communicator == nullptr) return amdgpu_sim::kInvalidArgument;
  *count = communicator->place().clique->size();
  return amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclCommUserRank(void* handle, int* rank) {
  auto communicator = Communicators::Get().Find(handle);
  if (communicator == nullptr) return amdgpu_sim::kInvalidArgument;
  *rank = communicator->place().rank;
  return amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclCommCuDevice(void* handle, int* device) {
  auto communicator = Communicators::Get().Find(handle);
  if (communicator == nullptr) return amdgpu_sim::kInvalidArgument;
  *device = communicator->device();
  return amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclCommFinalize(void* handle) {
  return Communicators::Get().Find(handle) == nullptr
             ? amdgpu_sim::kInvalidArgument
             : amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclCommDestroy(void* handle) {
  // Work that is queued holds what it needs.
  return Communicators::Get().Remove(handle) == nullptr
             ? amdgpu_sim::kInvalidArgument
             : amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclCommAbort(void* handle) {
  auto communicator = Communicators::Get().Remove(handle);
  if (communicator == nullptr) return amdgpu_sim::kInvalidArgument;
  communicator->place().clique->Fail("a rank aborted");
  return amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclCommGetAsyncError(void* handle, Result* error) {
  auto communicator = Communicators::Get().Find(handle);
  if (communicator == nullptr) return amdgpu_sim::kInvalidArgument;
  *error = communicator->place().clique->failed() ? amdgpu_sim::kRemoteError
                                                  : amdgpu_sim::kOk;
  return amdgpu_sim::kOk;
}

// Registering is for speed alone.
RCCL_EXPORT Result ncclCommRegister(void*, void* buffer, size_t,
                                    void** handle) {
  *handle = buffer;
  return amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclCommDeregister(void*, void*) { return amdgpu_sim::kOk; }

RCCL_EXPORT Result ncclMemAlloc(void** pointer, size_t bytes) {
  return hipMalloc(pointer, bytes) == 0 ? amdgpu_sim::kOk
                                        : amdgpu_sim::kUnhandledHipError;
}

RCCL_EXPORT Result ncclMemFree(void* pointer) {
  return hipFree(pointer) == 0 ? amdgpu_sim::kOk
                               : amdgpu_sim::kUnhandledHipError;
}

RCCL_EXPORT Result ncclGroupStart() {
  ++amdgpu_sim::group.depth;
  return amdgpu_sim::kOk;
}

RCCL_EXPORT Result ncclGroupEnd() {
  if (amdgpu_sim::group.depth == 0) return amdgpu_sim::kInvalidUsage;
  return --amdgpu_sim::group.depth > 0 ? amdgpu_sim::kOk : amdgpu_sim::Flush();
}

RCCL_EXPORT Result ncclAllReduce(const void* send, void* receive, size_t count,
                                 DataType type, Reduction reduction,
                                 void* handle, Stream* stream) {
  return amdgpu_sim::Enqueue({Kind::kAllReduce, count, type, reduction}, send,
                             receive, handle, stream);
}

RCCL_EXPORT Result ncclAllGather(const void* send, void* receive, size_t count,
                                 DataType type, void* handle, Stream* stream) {
  return amdgpu_sim::Enqueue({Kind::kAllGather, count, type}, send, receive,
                             handle, stream);
}

RCCL_EXPORT Result ncclReduceScatter(const void* send, void* receive,
                                     size_t count, DataType type,
                                     Reduction reduction, void* handle,
                                     Stream* stream) {
  return amdgpu_sim::Enqueue({Kind::kReduceScatter, count, type, reduction},
                             send, receive, handle, stream);
}

RCCL_EXPORT Result ncclBroadcast(const void* send, void* receive, size_t count,
                                 DataType type, int root, void* handle,
                                 Stream* stream) {
  return amdgpu_sim::Enqueue(
      {Kind::kBroadcast, count, type, amdgpu_sim::kSum, root}, send, receive,
      handle, stream);
}

RCCL_EXPORT Result ncclReduce(const void* send, void* receive, size_t count,
                              DataType type, Reduction reduction, int root,
                              void* handle, Stream* stream) {
  return amdgpu_sim::Enqueue({Kind::kReduce, count, type, reduction, root},
                             send, receive, handle, stream);
}

RCCL_EXPORT Result ncclAllToAll(const void* send, void* receive, size_t count,
                                DataType type, void* handle, Stream* stream) {
  return amdgpu_sim::Enqueue({Kind::kAllToAll, count, type}, send, receive,
                             handle, stream);
}

RCCL_EXPORT Result ncclSend(const void* send, size_t count, DataType type,
                            int peer, void* handle, Stream* stream) {
  return amdgpu_sim::Enqueue({Kind::kSend, count, type, amdgpu_sim::kSum, peer},
                             send, nullptr, handle, stream);
}

RCCL_EXPORT Result ncclRecv(void* receive, size_t count, DataType type,
                            int peer, void* handle, Stream* stream) {
  return amdgpu_sim::Enqueue(
      {Kind::kReceive, count, type, amdgpu_sim::kSum, peer}, nullptr, receive,
      handle, stream);
}
