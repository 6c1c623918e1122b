// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/stream.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "tests/amdgpu_sim/hip/capture.h"
#include "tests/amdgpu_sim/hip/handles.h"

namespace amdgpu_sim {
namespace {

std::atomic<bool> exiting{false};
std::atomic<uint64_t> next_stream_id{1};
thread_local const Stream* this_threads_stream = nullptr;

constexpr int kMaxDevices = 8;

// The streams that belong to a thread (hipStreamPerThread).
struct ThreadStreams {
  std::shared_ptr<Stream> of_device[kMaxDevices];
};

}  // namespace

// Ends all streams' threads when the process exits: queued work is dropped,
// and the operations under way get a moment to end. A thread that does not,
// such as one in a host function that waits, is left alone: nothing that it
// uses is ever destroyed.
void EndStreams() {
  exiting = true;
  const auto deadline =
      Completion::Clock::now() + std::chrono::milliseconds(2000);
  for (int i = 0; i < Device::Count(); ++i) {
    Device& device = *Device::At(i);
    std::vector<std::shared_ptr<Completion>> ends;
    {
      std::lock_guard<std::mutex> order(device.order());
      for (Stream* stream : device.streams()) {
        std::lock_guard<std::mutex> lock(stream->mutex_);
        stream->ending_ = true;
        stream->changed_.notify_all();
        if (stream->started_) ends.push_back(stream->ended_);
      }
    }
    for (const auto& end : ends) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - Completion::Clock::now());
      end->WaitFor(std::max(left, std::chrono::milliseconds(0)));
    }
    Stream& legacy = *device.null_stream();
    if (legacy.started_ && legacy.ended_->done()) legacy.thread_.join();
  }
}

void DoWork(const Work& work, Device& device) {
  if (work.run == nullptr) return;
  if (device.error() != kSuccess && !work.always) return;
  try {
    work.run(device);
  } catch (const Fault& fault) {
    device.Fail(FaultError(fault.check), std::string(CheckName(fault.check)) +
                                             ": " + work.label + ": " +
                                             fault.message);
  } catch (const std::exception& exception) {
    device.Fail(kUnknown, work.label + ": " + exception.what());
  }
}

void Completion::Signal() {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  time_ = Clock::now();
  changed_.notify_all();
}

void Completion::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
}

bool Completion::WaitFor(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return done_; });
}

bool Completion::done() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

Completion::Clock::time_point Completion::time() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

Stream::Stream(Device& device, unsigned flags, int priority)
    : device_(device),
      flags_(flags),
      priority_(priority),
      id_(next_stream_id++) {
  std::lock_guard<std::mutex> order(device_.order());
  device_.streams().push_back(this);
}

Stream::~Stream() {
  LeaveCapture(*this);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  std::lock_guard<std::mutex> order(device_.order());
  std::vector<Stream*>& streams = device_.streams();
  streams.erase(std::remove(streams.begin(), streams.end(), this),
                streams.end());
}

std::shared_ptr<Stream> Stream::Find(Stream* handle) {
  const uintptr_t value = reinterpret_cast<uintptr_t>(handle);
  Device& device = Device::Current();
  if (value == 0 || value == kLegacyStream) return device.null_stream();
  if (value == kPerThreadStream) {
    static thread_local ThreadStreams streams;
    std::shared_ptr<Stream>& own = streams.of_device[device.index()];
    if (own == nullptr) own = std::make_shared<Stream>(device, 0, 0);
    return own;
  }
  return Handles<Stream>::Get().Find(handle);
}

Error Stream::Submit(std::shared_ptr<const Work> work,
                     std::shared_ptr<Completion>* done,
                     const std::shared_ptr<Completion>& after) {
  if (done != nullptr) done->reset();
  bool captured = false;
  Error error = CaptureWork(*this, work, &captured);
  if (captured || error != kSuccess) return error;
  if (exiting) return kDeinitialized;
  if (Error failed = device_.error(); failed != kSuccess) return failed;

  Task task;
  task.work = std::move(work);
  task.done = std::make_shared<Completion>();
  if (after != nullptr) task.after.push_back(after);
  if (done != nullptr) *done = task.done;

  std::lock_guard<std::mutex> order(device_.order());
  const auto wait_for = [&](const Stream& other) {
    if (other.last_ != nullptr && !other.last_->done()) {
      task.after.push_back(other.last_);
    }
  };
  if (legacy()) {
    for (Stream* other : device_.streams()) {
      if (other != this && other->blocking()) wait_for(*other);
    }
  } else if (blocking()) {
    wait_for(*device_.null_stream());
  }
  last_ = task.done;

  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    static std::once_flag once;
    std::call_once(once, [] { std::atexit(EndStreams); });
    thread_ = std::thread([this] { RunTasks(); });
    started_ = true;
  }
  tasks_.push_back(std::move(task));
  changed_.notify_all();
  return kSuccess;
}

Error Stream::Synchronize() {
  if (Error error = RefuseCapture(*this); error != kSuccess) return error;
  // A host function that waits for its own stream would wait for ever.
  if (this_threads_stream == this) return kIllegalState;
  std::vector<std::shared_ptr<Completion>> wait;
  {
    std::lock_guard<std::mutex> order(device_.order());
    if (last_ != nullptr) wait.push_back(last_);
    if (legacy()) {
      for (Stream* other : device_.streams()) {
        if (other->blocking() && other->last_ != nullptr) {
          wait.push_back(other->last_);
        }
      }
    }
  }
  for (const auto& completion : wait) completion->Wait();
  return device_.error();
}

Error Stream::Query() {
  if (Error error = RefuseCapture(*this); error != kSuccess) return error;
  if (Error failed = device_.error(); failed != kSuccess) return failed;
  std::lock_guard<std::mutex> order(device_.order());
  const auto busy = [](const Stream& stream) {
    return stream.last_ != nullptr && !stream.last_->done();
  };
  if (busy(*this)) return kNotReady;
  if (legacy()) {
    for (Stream* other : device_.streams()) {
      if (other->blocking() && busy(*other)) return kNotReady;
    }
  }
  return kSuccess;
}

void Stream::RunTasks() {
  this_threads_stream = this;
  Device::SetCurrent(device_.index());
  // The stream may be gone as soon as this is signalled.
  const std::shared_ptr<Completion> ended = ended_;
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
      if (tasks_.empty()) break;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    for (const auto& completion : task.after) completion->Wait();
    if (!exiting) DoWork(*task.work, device_);
    // What the work owns goes before anybody learns that it is done.
    task.work.reset();
    task.done->Signal();
  }
  ended->Signal();
}

std::shared_ptr<Completion> Event::completion() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completion_;
}

Device* Event::device() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return device_;
}

void Event::Record(Device& device, std::shared_ptr<Completion> completion) {
  std::lock_guard<std::mutex> lock(mutex_);
  device_ = &device;
  completion_ = std::move(completion);
}

const std::atomic<bool>& Exiting() { return exiting; }

const Stream* ThisThreadsStream() { return this_threads_stream; }

}  // namespace amdgpu_sim
