// SPDX-License-Identifier: Apache-2.0

// Exported calls on streams and events.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/capture.h"
#include "tests/amdgpu_sim/hip/handles.h"
#include "tests/amdgpu_sim/hip/stream.h"

namespace amdgpu_sim {
namespace {

constexpr int kLeastPriority = 1, kGreatestPriority = -1;

Error CreateStream(Stream** stream, unsigned flags, int priority) {
  if (stream == nullptr || (flags & ~kStreamNonBlocking) != 0) {
    return kInvalidValue;
  }
  Device& device = Device::Current();
  if (device.error() != kSuccess) return device.error();
  priority = std::clamp(priority, kGreatestPriority, kLeastPriority);
  *stream = Handles<Stream>::Get().Add(
      std::make_shared<Stream>(device, flags, priority));
  return kSuccess;
}

Error CreateEvent(Event** event, unsigned flags) {
  if (event == nullptr) return kInvalidValue;
  *event = Handles<Event>::Get().Add(std::make_shared<Event>(flags));
  return kSuccess;
}

// Calls `body(stream)` for a valid handle.
template <typename Body>
Error WithStream(Stream* handle, const Body& body) {
  std::shared_ptr<Stream> stream = Stream::Find(handle);
  return stream == nullptr ? kInvalidHandle : body(*stream);
}

std::shared_ptr<const Work> Marker(NodeType type) {
  auto work = std::make_shared<Work>();
  work->type = type;
  work->always = true;
  return work;
}

Error RecordEvent(Event* handle, Stream* stream_handle) {
  std::shared_ptr<Event> event = Handles<Event>::Get().Find(handle);
  if (event == nullptr) return kInvalidHandle;
  return WithStream(stream_handle, [&](Stream& stream) {
    bool captured = false;
    Error error = CaptureRecord(stream, *event, &captured);
    if (captured || error != kSuccess) return error;
    std::shared_ptr<Completion> done;
    error = stream.Submit(Marker(kEventRecordNode), &done);
    if (error == kSuccess) event->Record(stream.device(), std::move(done));
    return error;
  });
}

Error WaitEvent(Stream* stream_handle, Event* handle) {
  std::shared_ptr<Event> event = Handles<Event>::Get().Find(handle);
  if (event == nullptr) return kInvalidHandle;
  return WithStream(stream_handle, [&](Stream& stream) {
    bool captured = false;
    Error error = CaptureWait(stream, *event, &captured);
    if (captured || error != kSuccess) return error;
    std::shared_ptr<Completion> completion = event->completion();
    if (completion == nullptr || completion->done()) return kSuccess;
    return stream.Submit(Marker(kEventWaitNode), nullptr, completion);
  });
}

// The event's work, for the calls that ask about it; an error if it is being
// captured or failed. `completion` is null if none was recorded.
Error EventState(Event* handle, std::shared_ptr<Completion>* completion,
                 bool wait) {
  std::shared_ptr<Event> event = Handles<Event>::Get().Find(handle);
  if (event == nullptr) return kInvalidHandle;
  {
    std::lock_guard<std::mutex> lock(CaptureLock());
    if (event->captured) {
      if (auto capture = event->capture.lock()) capture->invalid = true;
      return kCapturedEvent;
    }
  }
  *completion = event->completion();
  if (*completion != nullptr && wait) (*completion)->Wait();
  return event->device() == nullptr ? kSuccess : event->device()->error();
}

Error ElapsedTime(float* milliseconds, Event* start_handle,
                  Event* stop_handle) {
  if (milliseconds == nullptr) return kInvalidValue;
  std::shared_ptr<Event> start = Handles<Event>::Get().Find(start_handle);
  std::shared_ptr<Event> stop = Handles<Event>::Get().Find(stop_handle);
  if (start == nullptr || stop == nullptr || !start->timed() ||
      !stop->timed() || start->device() != stop->device()) {
    return kInvalidHandle;
  }
  std::shared_ptr<Completion> begin, end;
  if (Error error = EventState(start_handle, &begin, false);
      error != kSuccess) {
    return error;
  }
  if (Error error = EventState(stop_handle, &end, false); error != kSuccess) {
    return error;
  }
  if (begin == nullptr || end == nullptr) return kInvalidHandle;
  if (!begin->done() || !end->done()) return kNotReady;
  *milliseconds =
      std::chrono::duration<float, std::milli>(end->time() - begin->time())
          .count();
  return kSuccess;
}

Error LaunchHost(Stream* stream_handle, std::function<void()> function) {
  return WithStream(stream_handle, [&](Stream& stream) {
    auto work = std::make_shared<Work>();
    work->type = kHostNode;
    work->always = true;
    work->label = "host function";
    work->run = [function = std::move(function)](Device&) { function(); };
    return stream.Submit(std::move(work));
  });
}

// The values that streams wait for may come from the host, another stream or
// another device: they are accessed atomically.
template <typename T>
T* ValueAt(void* pointer) {
  Allocation allocation;
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (address % sizeof(T) != 0 || !Memory::Get().Find(address, &allocation)) {
    return nullptr;
  }
  return static_cast<T*>(pointer);
}

template <typename T>
Error WriteValue(Stream* stream_handle, void* pointer, T value) {
  T* place = ValueAt<T>(pointer);
  if (place == nullptr) return kInvalidValue;
  return WithStream(stream_handle, [&](Stream& stream) {
    auto work = std::make_shared<Work>();
    work->type = kBatchMemOpNode;
    work->label = "hipStreamWriteValue";
    work->run = [place, value](Device&) {
      Memory::Get().Touch(reinterpret_cast<uint64_t>(place), sizeof(T), true);
      __atomic_store_n(place, value, __ATOMIC_RELEASE);
    };
    return stream.Submit(std::move(work));
  });
}

enum WaitFlag : unsigned {
  kWaitGreaterOrEqual = 0,
  kWaitEqual = 1,
  kWaitAnd = 2,
  kWaitNor = 3,
};

template <typename T>
bool Satisfied(T found, T value, T mask, unsigned flag) {
  found &= mask;
  switch (flag) {
    case kWaitGreaterOrEqual:
      // As a difference: the counter may wrap around.
      return static_cast<std::make_signed_t<T>>(found - (value & mask)) >= 0;
    case kWaitEqual:
      return found == (value & mask);
    case kWaitAnd:
      return (found & value) != 0;
    default:
      return static_cast<T>(~(found | value)) != 0;
  }
}

template <typename T>
Error WaitValue(Stream* stream_handle, void* pointer, T value, unsigned flag,
                T mask) {
  T* place = ValueAt<T>(pointer);
  if (place == nullptr || flag > kWaitNor) return kInvalidValue;
  return WithStream(stream_handle, [&](Stream& stream) {
    auto work = std::make_shared<Work>();
    work->type = kBatchMemOpNode;
    work->label = "hipStreamWaitValue";
    work->run = [=](Device& device) {
      while (!Exiting() && device.error() == kSuccess) {
        T found = __atomic_load_n(place, __ATOMIC_ACQUIRE);
        if (Satisfied(found, value, mask, flag)) break;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    };
    return stream.Submit(std::move(work));
  });
}

}  // namespace

HIP_EXPORT Error hipStreamCreate(Stream** stream) {
  return Api(__func__, [&] { return CreateStream(stream, 0, 0); });
}

HIP_EXPORT Error hipStreamCreateWithFlags(Stream** stream, unsigned flags) {
  return Api(__func__, [&] { return CreateStream(stream, flags, 0); });
}

HIP_EXPORT Error hipStreamCreateWithPriority(Stream** stream, unsigned flags,
                                             int priority) {
  return Api(__func__, [&] { return CreateStream(stream, flags, priority); });
}

HIP_EXPORT Error hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return Api(__func__, [&] {
    if (least != nullptr) *least = kLeastPriority;
    if (greatest != nullptr) *greatest = kGreatestPriority;
    return kSuccess;
  });
}

HIP_EXPORT Error hipStreamDestroy(Stream* stream) {
  return Api(__func__, [&] {
    // The destructor waits for the stream's thread, which this must not be.
    if (stream != nullptr && stream == ThisThreadsStream()) {
      return kIllegalState;
    }
    return Handles<Stream>::Get().Remove(stream) == nullptr ? kInvalidHandle
                                                            : kSuccess;
  });
}

HIP_EXPORT Error hipStreamSynchronize(Stream* stream) {
  return Api(__func__, [&] {
    return WithStream(stream, [](Stream& s) { return s.Synchronize(); });
  });
}

HIP_EXPORT Error hipStreamQuery(Stream* stream) {
  return Api(__func__, [&] {
    return WithStream(stream, [](Stream& s) { return s.Query(); });
  });
}

HIP_EXPORT Error hipStreamGetFlags(Stream* stream, unsigned* flags) {
  return Api(__func__, [&] {
    return WithStream(stream, [&](Stream& s) {
      if (flags == nullptr) return kInvalidValue;
      *flags = s.flags();
      return kSuccess;
    });
  });
}

HIP_EXPORT Error hipStreamGetPriority(Stream* stream, int* priority) {
  return Api(__func__, [&] {
    return WithStream(stream, [&](Stream& s) {
      if (priority == nullptr) return kInvalidValue;
      *priority = s.priority();
      return kSuccess;
    });
  });
}

HIP_EXPORT Error hipStreamGetDevice(Stream* stream, int* device) {
  return Api(__func__, [&] {
    return WithStream(stream, [&](Stream& s) {
      if (device == nullptr) return kInvalidValue;
      *device = s.device().index();
      return kSuccess;
    });
  });
}

HIP_EXPORT Error hipStreamGetId(Stream* stream, unsigned long long* id) {
  return Api(__func__, [&] {
    return WithStream(stream, [&](Stream& s) {
      if (id == nullptr) return kInvalidValue;
      *id = s.id();
      return kSuccess;
    });
  });
}

// Returns a device's number, not an error.
HIP_EXPORT int hipGetStreamDeviceId(Stream* stream) {
  int device = -1;
  Api(__func__, [&] {
    return WithStream(stream, [&](Stream& s) {
      device = s.device().index();
      return kSuccess;
    });
  });
  return device;
}

HIP_EXPORT Error hipStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  return Api(__func__, [&] { return WaitEvent(stream, event); });
}

HIP_EXPORT Error hipLaunchHostFunc(Stream* stream, HostFunction function,
                                   void* user_data) {
  return Api(__func__, [&] {
    if (function == nullptr) return kInvalidValue;
    return LaunchHost(stream, [=] { function(user_data); });
  });
}

HIP_EXPORT Error hipStreamAddCallback(Stream* stream, StreamCallback callback,
                                      void* user_data, unsigned flags) {
  return Api(__func__, [&] {
    if (callback == nullptr || flags != 0) return kInvalidValue;
    return WithStream(stream, [&](Stream& s) {
      if (Error error = RefuseCapture(s); error != kSuccess) return error;
      Device* device = &s.device();
      return LaunchHost(stream,
                        [=] { callback(stream, device->error(), user_data); });
    });
  });
}

HIP_EXPORT Error hipStreamWriteValue32(Stream* stream, void* pointer,
                                       uint32_t value, unsigned) {
  return Api(__func__, [&] { return WriteValue(stream, pointer, value); });
}

HIP_EXPORT Error hipStreamWriteValue64(Stream* stream, void* pointer,
                                       uint64_t value, unsigned) {
  return Api(__func__, [&] { return WriteValue(stream, pointer, value); });
}

HIP_EXPORT Error hipStreamWaitValue32(Stream* stream, void* pointer,
                                      uint32_t value, unsigned flag,
                                      uint32_t mask) {
  return Api(__func__,
             [&] { return WaitValue(stream, pointer, value, flag, mask); });
}

HIP_EXPORT Error hipStreamWaitValue64(Stream* stream, void* pointer,
                                      uint64_t value, unsigned flag,
                                      uint64_t mask) {
  return Api(__func__,
             [&] { return WaitValue(stream, pointer, value, flag, mask); });
}

HIP_EXPORT Error hipEventCreate(Event** event) {
  return Api(__func__, [&] { return CreateEvent(event, 0); });
}

HIP_EXPORT Error hipEventCreateWithFlags(Event** event, unsigned flags) {
  return Api(__func__, [&] { return CreateEvent(event, flags); });
}

HIP_EXPORT Error hipEventDestroy(Event* event) {
  return Api(__func__, [&] {
    return Handles<Event>::Get().Remove(event) == nullptr ? kInvalidHandle
                                                          : kSuccess;
  });
}

HIP_EXPORT Error hipEventRecord(Event* event, Stream* stream) {
  return Api(__func__, [&] { return RecordEvent(event, stream); });
}

HIP_EXPORT Error hipEventRecordWithFlags(Event* event, Stream* stream,
                                         unsigned flags) {
  return Api(__func__, [&] {
    // 1 would make a captured record a node that can be waited for outside.
    if (flags != 0) return kNotSupported;
    return RecordEvent(event, stream);
  });
}

HIP_EXPORT Error hipEventQuery(Event* event) {
  return Api(__func__, [&] {
    std::shared_ptr<Completion> completion;
    Error error = EventState(event, &completion, false);
    if (error != kSuccess || completion == nullptr) return error;
    return completion->done() ? kSuccess : kNotReady;
  });
}

HIP_EXPORT Error hipEventSynchronize(Event* event) {
  return Api(__func__, [&] {
    std::shared_ptr<Completion> completion;
    return EventState(event, &completion, true);
  });
}

HIP_EXPORT Error hipEventElapsedTime(float* milliseconds, Event* start,
                                     Event* stop) {
  return Api(__func__, [&] { return ElapsedTime(milliseconds, start, stop); });
}

}  // namespace amdgpu_sim
