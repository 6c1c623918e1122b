// SPDX-License-Identifier: Apache-2.0

// Eight threads on two simulated devices call attention at once: forward and
// backward, with the plans that the library keeps. All must get the same bits,
// and those of the formula. Meant for ThreadSanitizer.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "aiter/device.h"
#include "aiter/mha.h"
#include "aiter/status.h"

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

#define CHECK_OK(expr)                                                   \
  do {                                                                   \
    aiter::Status status_ = (expr);                                      \
    if (!status_.ok()) {                                                 \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expr, \
                   status_.message().c_str());                           \
      std::exit(1);                                                      \
    }                                                                    \
  } while (false)

extern "C" {
int hipSetDevice(int device);
int hipMalloc(void** pointer, size_t bytes);
int hipFree(void* pointer);
int hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind,
                   void* stream);
int hipStreamCreateWithFlags(void** stream, unsigned flags);
int hipStreamDestroy(void* stream);
int hipStreamSynchronize(void* stream);
}

namespace {

constexpr int kThreads = 8;
constexpr int kDevices = 2;
constexpr int kCalls = 2;
constexpr int kRows = 24;
constexpr int kDim = 64;
constexpr int kCopyDefault = 4;
constexpr unsigned kNonBlocking = 1;

using Halves = std::vector<uint16_t>;

uint16_t ToBfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double FromBfloat(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

// One head's rows, the same at each call.
Halves Values(int seed) {
  Halves values(kRows * kDim);
  uint32_t state = seed;
  for (uint16_t& value : values) {
    state = state * 1664525 + 1013904223;
    value = ToBfloat(static_cast<float>(state >> 8) / (1 << 23) - 1);
  }
  return values;
}

// A thread's device memory of one array.
class Array {
 public:
  Array(size_t bytes, void* stream) : bytes_(bytes), stream_(stream) {
    CHECK(hipMalloc(&pointer_, bytes) == 0);
  }
  Array(const Halves& values, void* stream)
      : Array(values.size() * sizeof(uint16_t), stream) {
    CHECK(hipMemcpyAsync(pointer_, values.data(), bytes_, kCopyDefault,
                         stream) == 0);
  }
  ~Array() { CHECK(hipFree(pointer_) == 0); }
  Array(const Array&) = delete;

  void* get() const { return pointer_; }

  Halves Read() const {
    Halves values(bytes_ / sizeof(uint16_t));
    CHECK(hipMemcpyAsync(values.data(), pointer_, bytes_, kCopyDefault,
                         stream_) == 0);
    CHECK(hipStreamSynchronize(stream_) == 0);
    return values;
  }

 private:
  void* pointer_ = nullptr;
  const size_t bytes_;
  void* const stream_;
};

// out and the gradients of q, k and v.
using Results = std::vector<Halves>;

template <typename Args>
void Describe(Args& args) {
  args.batch = args.nhead_q = args.nhead_k = 1;
  args.seqlen_q = args.seqlen_k = kRows;
  args.hdim_q = args.hdim_v = kDim;
  for (int64_t* stride :
       {&args.stride_q, &args.stride_k, &args.stride_v, &args.stride_o,
        &args.nhead_stride_q, &args.nhead_stride_k, &args.nhead_stride_v,
        &args.nhead_stride_o}) {
    *stride = kDim;
  }
  for (int64_t* stride : {&args.batch_stride_q, &args.batch_stride_k,
                          &args.batch_stride_v, &args.batch_stride_o}) {
    *stride = kRows * kDim;
  }
  args.nhead_stride_lse = args.batch_stride_lse = kRows;
  args.scale_s = 0.125f;
}

Results Call(int device) {
  CHECK(hipSetDevice(device) == 0);
  void* stream = nullptr;
  CHECK(hipStreamCreateWithFlags(&stream, kNonBlocking) == 0);
  Results results;
  {
    const Array q(Values(1), stream), k(Values(2), stream),
        v(Values(3), stream), d_out(Values(4), stream);
    const size_t bytes = kRows * kDim * sizeof(uint16_t);
    const Array out(bytes, stream), dq(bytes, stream), dk(bytes, stream),
        dv(bytes, stream);
    const Array lse(kRows * sizeof(float), stream);
    const Array scratch(kRows * sizeof(float), stream);

    aiter::mha_fwd_args forward;
    Describe(forward);
    forward.q_ptr = q.get();
    forward.k_ptr = k.get();
    forward.v_ptr = v.get();
    forward.o_ptr = out.get();
    forward.lse_ptr = lse.get();
    CHECK_OK(aiter::mha_fwd(forward, stream));

    aiter::mha_bwd_args backward;
    Describe(backward);
    backward.q_ptr = q.get();
    backward.k_ptr = k.get();
    backward.v_ptr = v.get();
    backward.o_ptr = out.get();
    backward.lse_ptr = lse.get();
    backward.do_ptr = d_out.get();
    backward.dq_ptr = dq.get();
    backward.dk_ptr = dk.get();
    backward.dv_ptr = dv.get();
    backward.d_ptr = scratch.get();
    for (int64_t* stride :
         {&backward.stride_do, &backward.stride_dq, &backward.stride_dk,
          &backward.stride_dv, &backward.nhead_stride_do,
          &backward.nhead_stride_dq, &backward.nhead_stride_dk,
          &backward.nhead_stride_dv}) {
      *stride = kDim;
    }
    for (int64_t* stride :
         {&backward.batch_stride_do, &backward.batch_stride_dq,
          &backward.batch_stride_dk, &backward.batch_stride_dv}) {
      *stride = kRows * kDim;
    }
    CHECK_OK(aiter::mha_bwd(backward, stream));
    results = {out.Read(), dq.Read(), dk.Read(), dv.Read()};
  }
  CHECK(hipStreamDestroy(stream) == 0);
  return results;
}

// softmax(q k^T / 8) v, in double.
std::vector<double> Formula() {
  const Halves q = Values(1), k = Values(2), v = Values(3);
  std::vector<double> out(kRows * kDim);
  for (int row = 0; row < kRows; ++row) {
    double weights[kRows], sum = 0;
    for (int key = 0; key < kRows; ++key) {
      double score = 0;
      for (int i = 0; i < kDim; ++i) {
        score += FromBfloat(q[row * kDim + i]) * FromBfloat(k[key * kDim + i]);
      }
      sum += weights[key] = std::exp(score / 8);
    }
    for (int key = 0; key < kRows; ++key) {
      for (int i = 0; i < kDim; ++i) {
        out[row * kDim + i] +=
            weights[key] / sum * FromBfloat(v[key * kDim + i]);
      }
    }
  }
  return out;
}

}  // namespace

int main() {
  setenv("AMDGPU_SIM_DEVICES", std::to_string(kDevices).c_str(), 1);
  std::vector<std::vector<Results>> results(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&results, i] {
      for (int call = 0; call < kCalls; ++call) {
        results[i].push_back(Call((i + call) % kDevices));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  const Results& first = results[0][0];
  for (const auto& of_thread : results) {
    for (const Results& other : of_thread) CHECK(other == first);
  }
  const std::vector<double> expected = Formula();
  for (int i = 0; i < kRows * kDim; ++i) {
    CHECK(std::fabs(FromBfloat(first[0][i]) - expected[i]) < 0.01);
  }
  std::puts("PASS");
  return 0;
}
