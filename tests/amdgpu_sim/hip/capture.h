// SPDX-License-Identifier: Apache-2.0

// Stream capture: what is submitted becomes the nodes of a graph.
#ifndef AMDGPU_SIM_HIP_CAPTURE_H_
#define AMDGPU_SIM_HIP_CAPTURE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/amdgpu_sim/hip/stream.h"
#include "tests/amdgpu_sim/hip/types.h"

namespace amdgpu_sim {

// One capture, of the stream that began it and those that joined by events.
struct Capture {
  uint64_t id = 0;
  CaptureMode mode = kCaptureGlobal;
  std::thread::id thread;
  std::shared_ptr<Graph> graph;
  Stream* origin = nullptr;
  std::vector<std::weak_ptr<Stream>> streams;
  bool invalid = false;
};

// Held while the capture state of any stream or event is looked at.
std::mutex& CaptureLock();

// If the stream is being captured, makes the work a node, sets `captured` and
// returns the result.
Error CaptureWork(Stream& stream, const std::shared_ptr<const Work>& work,
                  bool* captured);

// The same for recording an event and for waiting for one.
Error CaptureRecord(Stream& stream, Event& event, bool* captured);
Error CaptureWait(Stream& stream, Event& event, bool* captured);

// Whether a call that may not be captured, such as a synchronisation, is
// refused; it then invalidates the stream's capture.
Error RefuseCapture(Stream& stream);

// Whether a call that is unsafe while any capture is under way, such as a
// malloc, is refused.
Error RefuseDuringCapture(Error error);

// Takes a stream that is destroyed out of its capture.
void LeaveCapture(Stream& stream);

}  // namespace amdgpu_sim

#endif  // AMDGPU_SIM_HIP_CAPTURE_H_
