// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/capture.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/graph.h"
#include "tests/amdgpu_sim/hip/handles.h"

namespace amdgpu_sim {
namespace {

// The captures under way.
std::vector<std::weak_ptr<Capture>>& Captures() {
  static auto* const captures = new std::vector<std::weak_ptr<Capture>>;
  return *captures;
}

uint64_t last_capture_id = 0;

// Of the calling thread, whose unsafe calls it decides about.
thread_local CaptureMode interaction_mode = kCaptureGlobal;

void Join(Stream& stream, const std::shared_ptr<Capture>& capture) {
  stream.capture = capture;
  capture->streams.push_back(stream.shared_from_this());
}

void AddNodes(std::vector<GraphNode*>* to,
              const std::vector<GraphNode*>& nodes) {
  for (GraphNode* node : nodes) {
    if (std::find(to->begin(), to->end(), node) == to->end()) {
      to->push_back(node);
    }
  }
}

// The legacy stream would wait for a blocking stream that is being captured.
Error CheckLegacy(Stream& stream) {
  if (!stream.legacy()) return kSuccess;
  std::lock_guard<std::mutex> order(stream.device().order());
  for (Stream* other : stream.device().streams()) {
    if (other->capture != nullptr && other->blocking()) {
      other->capture->invalid = true;
      return kStreamCaptureImplicit;
    }
  }
  return kSuccess;
}

Error Begin(Stream& stream, CaptureMode mode) {
  if (mode < kCaptureGlobal || mode > kCaptureRelaxed) return kInvalidValue;
  std::lock_guard<std::mutex> lock(CaptureLock());
  if (stream.legacy()) return kStreamCaptureUnsupported;
  if (stream.capture != nullptr) return kIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->id = ++last_capture_id;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->graph = std::make_shared<Graph>();
  capture->origin = &stream;
  Join(stream, capture);
  auto& captures = Captures();
  captures.erase(std::remove_if(captures.begin(), captures.end(),
                                [](const auto& c) { return c.expired(); }),
                 captures.end());
  captures.push_back(capture);
  return kSuccess;
}

// Whether the latest nodes of every stream come before the origin's.
bool Joined(const Capture& capture, const Stream& origin) {
  std::vector<GraphNode*> reached;
  std::vector<GraphNode*> open = origin.capture_tail;
  while (!open.empty()) {
    GraphNode* node = open.back();
    open.pop_back();
    if (std::find(reached.begin(), reached.end(), node) != reached.end()) {
      continue;
    }
    reached.push_back(node);
    open.insert(open.end(), node->after.begin(), node->after.end());
  }
  for (const auto& weak : capture.streams) {
    std::shared_ptr<Stream> stream = weak.lock();
    if (stream == nullptr) continue;
    for (GraphNode* node : stream->capture_tail) {
      if (std::find(reached.begin(), reached.end(), node) == reached.end()) {
        return false;
      }
    }
  }
  return true;
}

Error End(Stream& stream, Graph** graph) {
  if (graph == nullptr) return kInvalidValue;
  *graph = nullptr;
  std::lock_guard<std::mutex> lock(CaptureLock());
  const std::shared_ptr<Capture> capture = stream.capture;
  if (capture == nullptr) return kIllegalState;
  if (capture->origin != &stream) return kStreamCaptureUnmatched;
  if (capture->mode != kCaptureRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return kStreamCaptureWrongThread;
  }
  Error error = kSuccess;
  if (capture->invalid) {
    error = kStreamCaptureInvalidated;
  } else if (!Joined(*capture, stream)) {
    error = kStreamCaptureUnjoined;
  }
  for (const auto& weak : capture->streams) {
    if (std::shared_ptr<Stream> member = weak.lock()) {
      member->capture = nullptr;
      member->capture_tail.clear();
    }
  }
  if (error == kSuccess) {
    *graph = Handles<Graph>::Get().Add(std::move(capture->graph));
  }
  return error;
}

// Calls `body(stream)` under CaptureLock.
template <typename Body>
Error WithLockedStream(Stream* handle, const Body& body) {
  std::shared_ptr<Stream> stream = Stream::Find(handle);
  if (stream == nullptr) return kInvalidHandle;
  std::lock_guard<std::mutex> lock(CaptureLock());
  if (Error error = CheckLegacy(*stream); error != kSuccess) return error;
  return body(*stream);
}

CaptureStatus StatusOf(const Stream& stream) {
  return stream.capture == nullptr ? kCaptureNone
         : stream.capture->invalid ? kCaptureInvalidated
                                   : kCaptureActive;
}

}  // namespace

std::mutex& CaptureLock() {
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

Error CaptureWork(Stream& stream, const std::shared_ptr<const Work>& work,
                  bool* captured) {
  std::lock_guard<std::mutex> lock(CaptureLock());
  *captured = stream.capture != nullptr;
  if (!*captured) return CheckLegacy(stream);
  if (stream.capture->invalid) return kStreamCaptureInvalidated;
  stream.capture_tail = {stream.capture->graph->Add(work, stream.capture_tail)};
  return kSuccess;
}

Error CaptureRecord(Stream& stream, Event& event, bool* captured) {
  std::lock_guard<std::mutex> lock(CaptureLock());
  *captured = stream.capture != nullptr;
  event.captured = *captured;
  if (!*captured) {
    event.capture.reset();
    event.capture_nodes.clear();
    return kSuccess;
  }
  if (stream.capture->invalid) return kStreamCaptureInvalidated;
  event.capture = stream.capture;
  event.capture_nodes = stream.capture_tail;
  return kSuccess;
}

Error CaptureWait(Stream& stream, Event& event, bool* captured) {
  std::lock_guard<std::mutex> lock(CaptureLock());
  *captured = true;
  if (!event.captured) {
    *captured = stream.capture != nullptr;
    if (!*captured) return kSuccess;
    // The wait would be outside of the graph. An event never recorded is no
    // dependency at all.
    if (event.completion() == nullptr) return kSuccess;
    stream.capture->invalid = true;
    return kStreamCaptureIsolation;
  }
  const std::shared_ptr<Capture> capture = event.capture.lock();
  if (capture == nullptr || capture->graph == nullptr) {
    return kCapturedEvent;  // Its capture has ended.
  }
  if (stream.capture != nullptr && stream.capture != capture) {
    stream.capture->invalid = capture->invalid = true;
    return kStreamCaptureMerge;
  }
  if (stream.legacy()) {
    capture->invalid = true;
    return kStreamCaptureImplicit;
  }
  if (capture->invalid) return kStreamCaptureInvalidated;
  if (stream.capture == nullptr) Join(stream, capture);
  AddNodes(&stream.capture_tail, event.capture_nodes);
  return kSuccess;
}

Error RefuseCapture(Stream& stream) {
  std::lock_guard<std::mutex> lock(CaptureLock());
  if (stream.capture == nullptr) return CheckLegacy(stream);
  stream.capture->invalid = true;
  return kStreamCaptureUnsupported;
}

Error RefuseDuringCapture(Error error) {
  std::lock_guard<std::mutex> lock(CaptureLock());
  if (interaction_mode == kCaptureRelaxed) return kSuccess;
  for (const auto& weak : Captures()) {
    std::shared_ptr<Capture> capture = weak.lock();
    if (capture == nullptr || capture->graph == nullptr) continue;
    const bool mine = capture->thread == std::this_thread::get_id();
    if (capture->mode == kCaptureRelaxed) continue;
    if (mine || (capture->mode == kCaptureGlobal &&
                 interaction_mode == kCaptureGlobal)) {
      capture->invalid = true;
      return error;
    }
  }
  return kSuccess;
}

void LeaveCapture(Stream& stream) {
  std::lock_guard<std::mutex> lock(CaptureLock());
  if (stream.capture == nullptr) return;
  stream.capture->invalid = true;
  if (stream.capture->origin == &stream) {
    // Nobody can end it any more.
    for (const auto& weak : stream.capture->streams) {
      if (std::shared_ptr<Stream> member = weak.lock()) {
        member->capture = nullptr;
        member->capture_tail.clear();
      }
    }
  }
  stream.capture = nullptr;
}

HIP_EXPORT Error hipStreamBeginCapture(Stream* stream, CaptureMode mode) {
  return Api(__func__, [&] {
    std::shared_ptr<Stream> found = Stream::Find(stream);
    return found == nullptr ? kInvalidHandle : Begin(*found, mode);
  });
}

HIP_EXPORT Error hipStreamEndCapture(Stream* stream, Graph** graph) {
  return Api(__func__, [&] {
    std::shared_ptr<Stream> found = Stream::Find(stream);
    return found == nullptr ? kInvalidHandle : End(*found, graph);
  });
}

HIP_EXPORT Error hipStreamIsCapturing(Stream* stream, CaptureStatus* status) {
  return Api(__func__, [&] {
    return WithLockedStream(stream, [&](Stream& s) {
      if (status == nullptr) return kInvalidValue;
      *status = StatusOf(s);
      return kSuccess;
    });
  });
}

HIP_EXPORT Error hipStreamGetCaptureInfo(Stream* stream, CaptureStatus* status,
                                         unsigned long long* id) {
  return Api(__func__, [&] {
    return WithLockedStream(stream, [&](Stream& s) {
      if (status == nullptr) return kInvalidValue;
      *status = StatusOf(s);
      if (id != nullptr && s.capture != nullptr) *id = s.capture->id;
      return kSuccess;
    });
  });
}

HIP_EXPORT Error hipStreamGetCaptureInfo_v2(
    Stream* stream, CaptureStatus* status, unsigned long long* id,
    Graph** graph, GraphNode* const** nodes, size_t* count) {
  return Api(__func__, [&] {
    return WithLockedStream(stream, [&](Stream& s) {
      if (status == nullptr) return kInvalidValue;
      *status = StatusOf(s);
      if (s.capture == nullptr) return kSuccess;
      if (id != nullptr) *id = s.capture->id;
      if (graph != nullptr) *graph = s.capture->graph.get();
      if (nodes != nullptr) *nodes = s.capture_tail.data();
      if (count != nullptr) *count = s.capture_tail.size();
      return kSuccess;
    });
  });
}

HIP_EXPORT Error hipThreadExchangeStreamCaptureMode(CaptureMode* mode) {
  return Api(__func__, [&] {
    if (mode == nullptr || *mode < kCaptureGlobal || *mode > kCaptureRelaxed) {
      return kInvalidValue;
    }
    std::swap(*mode, interaction_mode);
    return kSuccess;
  });
}

}  // namespace amdgpu_sim
