// SPDX-License-Identifier: Apache-2.0

#include "tests/amdgpu_sim/hip/copy.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "tests/amdgpu_sim/gpu/memory.h"
#include "tests/amdgpu_sim/hip/api.h"
#include "tests/amdgpu_sim/hip/capture.h"

namespace amdgpu_sim {
namespace {

uint64_t Address(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

// Bytes from the first to the last of a shape's rows.
size_t Extent(size_t width, size_t height, size_t pitch) {
  return (height - 1) * pitch + width;
}

// Whether HIP does not know the memory: the program's own, not pinned.
bool Pageable(const void* pointer) {
  Allocation allocation;
  return !Memory::Get().Find(Address(pointer), &allocation);
}

// A range that begins in an allocation ends in it.
Error CheckRange(const void* pointer, size_t size) {
  if (pointer == nullptr) return kInvalidValue;
  Allocation allocation;
  if (!Memory::Get().Find(Address(pointer), &allocation)) return kSuccess;
  const uint64_t offset = Address(pointer) - allocation.base;
  return size > allocation.size - offset ? kInvalidValue : kSuccess;
}

Error CheckCopy(const void* to, const void* from, const CopyShape& shape,
                int kind) {
  if (kind < kHostToHost || kind > kCopyDefault) {
    return kInvalidMemcpyDirection;
  }
  if (shape.height > 1 &&
      (shape.to_pitch < shape.width || shape.from_pitch < shape.width)) {
    return kInvalidValue;
  }
  if (Error error =
          CheckRange(to, Extent(shape.width, shape.height, shape.to_pitch));
      error != kSuccess) {
    return error;
  }
  return CheckRange(from, Extent(shape.width, shape.height, shape.from_pitch));
}

// An asynchronous copy out of pageable memory has read it when it returns: it
// goes by way of this.
std::shared_ptr<const Work> StagedCopy(void* to, const void* from,
                                       size_t size) {
  auto staging = std::make_shared<std::vector<char>>(size);
  Memory::Get().Copy(Address(staging->data()), Address(from), size);
  auto work = std::make_shared<Work>();
  work->type = kMemcpyNode;
  work->label = "copy";
  work->run = [=](Device&) {
    Memory::Get().Copy(Address(to), Address(staging->data()), size);
  };
  return work;
}

enum class Finish { kQueued, kDone };

// Submits a copy. It is done at return if the caller or HIP's rules for
// pageable memory want that.
Error SubmitCopy(Stream& stream, void* to, const void* from,
                 const CopyShape& shape, int kind, Finish finish) {
  if (shape.width == 0 || shape.height == 0) return kSuccess;
  std::shared_ptr<const Work> work;
  if (Error error = MakeCopy(to, from, shape, kind, &work); error != kSuccess) {
    return error;
  }
  bool capturing;
  {
    std::lock_guard<std::mutex> lock(CaptureLock());
    capturing = stream.capture != nullptr;
  }
  if (finish == Finish::kQueued && !capturing) {
    if (Pageable(to)) {
      finish = Finish::kDone;
    } else if (Pageable(from) && shape.height == 1) {
      try {
        work = StagedCopy(to, from, shape.width);
      } catch (const Fault& fault) {
        stream.device().Fail(FaultError(fault.check), "copy: " + fault.message);
        return stream.device().error();
      }
    } else if (Pageable(from)) {
      finish = Finish::kDone;
    }
  }
  std::shared_ptr<Completion> done;
  Error error = stream.Submit(std::move(work), &done);
  if (error != kSuccess || finish == Finish::kQueued || done == nullptr) {
    return error;
  }
  done->Wait();
  return stream.device().error();
}

CopyShape Line(size_t size) {
  CopyShape shape;
  shape.width = size;
  return shape;
}

Error CopyAsync(void* to, const void* from, size_t size, int kind,
                Stream* handle) {
  std::shared_ptr<Stream> stream = Stream::Find(handle);
  if (stream == nullptr) return kInvalidHandle;
  return SubmitCopy(*stream, to, from, Line(size), kind, Finish::kQueued);
}

Error CopyAndWait(void* to, const void* from, const CopyShape& shape, int kind,
                  Stream* handle) {
  std::shared_ptr<Stream> stream = Stream::Find(handle);
  if (stream == nullptr) return kInvalidHandle;
  Error error = handle == nullptr ? RefuseDuringCapture(kStreamCaptureImplicit)
                                  : RefuseCapture(*stream);
  if (error != kSuccess) return error;
  return SubmitCopy(*stream, to, from, shape, kind, Finish::kDone);
}

Error Copy(void* to, const void* from, size_t size, int kind) {
  return CopyAndWait(to, from, Line(size), kind, nullptr);
}

Error SubmitFill(Stream* handle, const MemsetParams& params, Finish finish) {
  std::shared_ptr<Stream> stream = Stream::Find(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (params.width == 0 || params.height == 0) return kSuccess;
  std::shared_ptr<const Work> work;
  if (Error error = MakeFill(params, &work); error != kSuccess) return error;
  std::shared_ptr<Completion> done;
  Error error = stream->Submit(std::move(work), &done);
  if (error != kSuccess || finish == Finish::kQueued || done == nullptr) {
    return error;
  }
  done->Wait();
  return stream->device().error();
}

MemsetParams FillLine(void* to, unsigned value, unsigned element_size,
                      size_t count) {
  MemsetParams params{};
  params.to = to;
  params.value = value;
  params.element_size = element_size;
  params.width = count;
  params.height = 1;
  return params;
}

// Fills are asynchronous for the host, but for those of host memory.
Error Fill(void* to, unsigned value, unsigned element_size, size_t count) {
  Allocation allocation;
  const bool device = Memory::Get().Find(Address(to), &allocation) &&
                      allocation.kind == MemoryKind::kDevice;
  return SubmitFill(nullptr, FillLine(to, value, element_size, count),
                    device ? Finish::kQueued : Finish::kDone);
}

Error FillAsync(void* to, unsigned value, unsigned element_size, size_t count,
                Stream* stream) {
  return SubmitFill(stream, FillLine(to, value, element_size, count),
                    Finish::kQueued);
}

}  // namespace

Error MakeCopy(void* to, const void* from, const CopyShape& shape, int kind,
               std::shared_ptr<const Work>* work) {
  if (shape.width == 0 || shape.height == 0) {
    auto none = std::make_shared<Work>();
    none->type = kMemcpyNode;
    *work = std::move(none);
    return kSuccess;
  }
  if (Error error = CheckCopy(to, from, shape, kind); error != kSuccess) {
    return error;
  }
  auto made = std::make_shared<Work>();
  made->type = kMemcpyNode;
  made->label = "copy";
  made->run = [=](Device&) {
    for (size_t row = 0; row < shape.height; ++row) {
      Memory::Get().Copy(Address(to) + row * shape.to_pitch,
                         Address(from) + row * shape.from_pitch, shape.width);
    }
  };
  *work = std::move(made);
  return kSuccess;
}

Error MakeFill(const MemsetParams& params, std::shared_ptr<const Work>* work) {
  const size_t element = params.element_size;
  if (element != 1 && element != 2 && element != 4) return kInvalidValue;
  const size_t width = params.width * element;
  if (params.height > 1 && params.pitch < width) return kInvalidValue;
  if (params.width != 0 && params.height != 0) {
    if (Error error =
            CheckRange(params.to, Extent(width, params.height, params.pitch));
        error != kSuccess) {
      return error;
    }
  }
  auto made = std::make_shared<Work>();
  made->type = kMemsetNode;
  made->label = "fill";
  made->run = [=](Device&) {
    if (params.width == 0) return;
    for (size_t row = 0; row < params.height; ++row) {
      Memory::Get().Fill(Address(params.to) + row * params.pitch, &params.value,
                         static_cast<int>(element), params.width);
    }
  };
  *work = std::move(made);
  return kSuccess;
}

HIP_EXPORT Error hipMemcpy(void* to, const void* from, size_t size, int kind) {
  return Api(__func__, [&] { return Copy(to, from, size, kind); });
}

HIP_EXPORT Error hipMemcpyHtoD(void* to, const void* from, size_t size) {
  return Api(__func__, [&] { return Copy(to, from, size, kHostToDevice); });
}

HIP_EXPORT Error hipMemcpyDtoH(void* to, const void* from, size_t size) {
  return Api(__func__, [&] { return Copy(to, from, size, kDeviceToHost); });
}

HIP_EXPORT Error hipMemcpyDtoD(void* to, const void* from, size_t size) {
  return Api(__func__, [&] { return Copy(to, from, size, kDeviceToDevice); });
}

HIP_EXPORT Error hipMemcpyAsync(void* to, const void* from, size_t size,
                                int kind, Stream* stream) {
  return Api(__func__, [&] { return CopyAsync(to, from, size, kind, stream); });
}

HIP_EXPORT Error hipMemcpyHtoDAsync(void* to, const void* from, size_t size,
                                    Stream* stream) {
  return Api(__func__,
             [&] { return CopyAsync(to, from, size, kHostToDevice, stream); });
}

HIP_EXPORT Error hipMemcpyDtoHAsync(void* to, const void* from, size_t size,
                                    Stream* stream) {
  return Api(__func__,
             [&] { return CopyAsync(to, from, size, kDeviceToHost, stream); });
}

HIP_EXPORT Error hipMemcpyDtoDAsync(void* to, const void* from, size_t size,
                                    Stream* stream) {
  return Api(__func__, [&] {
    return CopyAsync(to, from, size, kDeviceToDevice, stream);
  });
}

HIP_EXPORT Error hipMemcpyWithStream(void* to, const void* from, size_t size,
                                     int kind, Stream* stream) {
  return Api(__func__,
             [&] { return CopyAndWait(to, from, Line(size), kind, stream); });
}

HIP_EXPORT Error hipMemcpyPeer(void* to, int to_device, const void* from,
                               int from_device, size_t size) {
  return Api(__func__, [&] {
    if (Device::At(to_device) == nullptr ||
        Device::At(from_device) == nullptr) {
      return kInvalidDevice;
    }
    return Copy(to, from, size, kDeviceToDevice);
  });
}

HIP_EXPORT Error hipMemcpyPeerAsync(void* to, int to_device, const void* from,
                                    int from_device, size_t size,
                                    Stream* stream) {
  return Api(__func__, [&] {
    if (Device::At(to_device) == nullptr ||
        Device::At(from_device) == nullptr) {
      return kInvalidDevice;
    }
    return CopyAsync(to, from, size, kDeviceToDevice, stream);
  });
}

HIP_EXPORT Error hipMemcpy2D(void* to, size_t to_pitch, const void* from,
                             size_t from_pitch, size_t width, size_t height,
                             int kind) {
  return Api(__func__, [&] {
    return CopyAndWait(to, from, {width, height, to_pitch, from_pitch}, kind,
                       nullptr);
  });
}

HIP_EXPORT Error hipMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                  size_t from_pitch, size_t width,
                                  size_t height, int kind, Stream* handle) {
  return Api(__func__, [&] {
    std::shared_ptr<Stream> stream = Stream::Find(handle);
    if (stream == nullptr) return kInvalidHandle;
    return SubmitCopy(*stream, to, from, {width, height, to_pitch, from_pitch},
                      kind, Finish::kQueued);
  });
}

HIP_EXPORT Error hipMemset(void* to, int value, size_t size) {
  return Api(__func__, [&] { return Fill(to, value & 0xff, 1, size); });
}

HIP_EXPORT Error hipMemsetD8(void* to, unsigned char value, size_t count) {
  return Api(__func__, [&] { return Fill(to, value, 1, count); });
}

HIP_EXPORT Error hipMemsetD16(void* to, unsigned short value, size_t count) {
  return Api(__func__, [&] { return Fill(to, value, 2, count); });
}

HIP_EXPORT Error hipMemsetD32(void* to, int value, size_t count) {
  return Api(__func__,
             [&] { return Fill(to, static_cast<unsigned>(value), 4, count); });
}

HIP_EXPORT Error hipMemsetAsync(void* to, int value, size_t size,
                                Stream* stream) {
  return Api(__func__,
             [&] { return FillAsync(to, value & 0xff, 1, size, stream); });
}

HIP_EXPORT Error hipMemsetD8Async(void* to, unsigned char value, size_t count,
                                  Stream* stream) {
  return Api(__func__, [&] { return FillAsync(to, value, 1, count, stream); });
}

HIP_EXPORT Error hipMemsetD16Async(void* to, unsigned short value, size_t count,
                                   Stream* stream) {
  return Api(__func__, [&] { return FillAsync(to, value, 2, count, stream); });
}

HIP_EXPORT Error hipMemsetD32Async(void* to, int value, size_t count,
                                   Stream* stream) {
  return Api(__func__, [&] {
    return FillAsync(to, static_cast<unsigned>(value), 4, count, stream);
  });
}

HIP_EXPORT Error hipMemset2DAsync(void* to, size_t pitch, int value,
                                  size_t width, size_t height, Stream* stream) {
  return Api(__func__, [&] {
    MemsetParams params = FillLine(to, value & 0xff, 1, width);
    params.pitch = pitch;
    params.height = height;
    return SubmitFill(stream, params, Finish::kQueued);
  });
}

}  // namespace amdgpu_sim
