// SPDX-License-Identifier: Apache-2.0

// Streams, each a queue of work that a thread of its own does in order.
//
// Nothing but the stream's order, its events and the legacy stream's rules
// orders work, so that a program without a synchronisation that it needs can
// see stale bytes, as on hardware.
#ifndef AMDGPU_SIM_HIP_STREAM_H_
#define AMDGPU_SIM_HIP_STREAM_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/amdgpu_sim/hip/device.h"
#include "tests/amdgpu_sim/hip/types.h"

namespace amdgpu_sim {

struct Capture;  // capture.h

// Called when the process exits.
void EndStreams();

// One operation, of a stream's queue or of a graph's node.
struct Work {
  NodeType type = kEmptyNode;
  std::function<void(Device&)> run;  // May throw Fault. Null: nothing to do.
  // Also on a failed device: host functions, whose callers wait for them.
  bool always = false;
  // What a graph's dump says of it.
  std::string label;
};

// Does the work and turns its fault into the device's error.
void DoWork(const Work& work, Device& device);

// Becomes done once, when an operation of a stream is.
class Completion {
 public:
  using Clock = std::chrono::steady_clock;

  void Signal();
  void Wait();
  bool WaitFor(std::chrono::milliseconds timeout);
  bool done() const;
  Clock::time_point time() const;  // When it became done.

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Clock::time_point time_;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(Device& device, unsigned flags, int priority);
  // Waits for the work queued.
  ~Stream();

  // The stream of a handle: null and 1 are the current device's legacy stream,
  // 2 the calling thread's own. Null if there is no such stream.
  static std::shared_ptr<Stream> Find(Stream* handle);

  Device& device() const { return device_; }
  unsigned flags() const { return flags_; }
  int priority() const { return priority_; }
  uint64_t id() const { return id_; }
  bool legacy() const { return device_.null_stream().get() == this; }
  bool blocking() const { return (flags_ & kStreamNonBlocking) == 0; }

  // Queues the work behind the stream's earlier work and behind `after`; or
  // makes it a node if the stream is being captured. `done`, if not null, gets
  // the work's completion, null if it was captured.
  Error Submit(std::shared_ptr<const Work> work,
               std::shared_ptr<Completion>* done = nullptr,
               const std::shared_ptr<Completion>& after = nullptr);

  // Waits for the work queued until now. Errors of the device, and of a stream
  // that is being captured.
  Error Synchronize();
  // kNotReady while work is queued.
  Error Query();

  // Of the last work queued; null if there was none. Under the device's order.
  const std::shared_ptr<Completion>& last() const { return last_; }

  // The capture that the stream takes part in and its latest nodes there.
  // Under CaptureLock.
  std::shared_ptr<Capture> capture;
  std::vector<GraphNode*> capture_tail;

 private:
  struct Task {
    std::shared_ptr<const Work> work;
    std::vector<std::shared_ptr<Completion>> after;
    std::shared_ptr<Completion> done;
  };

  void RunTasks();

  Device& device_;
  const unsigned flags_;
  const int priority_;
  const uint64_t id_;
  std::shared_ptr<Completion> last_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool ending_ = false;
  bool started_ = false;  // The first task starts the thread.
  std::thread thread_;
  std::shared_ptr<Completion> ended_ = std::make_shared<Completion>();

  friend void EndStreams();
};

class Event {
 public:
  explicit Event(unsigned flags) : flags_(flags) {}

  bool timed() const { return (flags_ & kEventDisableTiming) == 0; }

  // The work recorded last and where; null if none was.
  std::shared_ptr<Completion> completion() const;
  Device* device() const;
  void Record(Device& device, std::shared_ptr<Completion> completion);

  // If it was recorded last in a capture: that and its nodes. Under
  // CaptureLock.
  std::weak_ptr<Capture> capture;
  std::vector<GraphNode*> capture_nodes;
  bool captured = false;

 private:
  const unsigned flags_;
  mutable std::mutex mutex_;
  std::shared_ptr<Completion> completion_;
  Device* device_ = nullptr;
};

// Whether the process is exiting: no work is done any more.
const std::atomic<bool>& Exiting();

// The stream whose thread this is, in a host function; else null.
const Stream* ThisThreadsStream();

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_STREAM_H_
