// SPDX-License-Identifier: Apache-2.0

// An operation of the library as an FFI target. Its buffers are listed once, in
// the order in which jax/_src/aiter/<family>/op.py passes them, and both stages
// come of one function that makes the library's arguments of them:
//
//   struct FwdBuffers : BufferList {
//     using BufferList::BufferList;
//     Buffer x = Operand("x");
//     Buffer bias = Operand("bias");  // May be absent: see Optional.
//     Buffer y = Result("y");
//   };
//
//   ffi::Error SetFwd(const FwdBuffers& b, const FwdAttrs& attrs,
//                     aiter::some_fwd_args* args);
//
//   const Family kFamily({TargetOf<SetFwd>()});
//
// A result that aliases an operand (`input_output_aliases` of the FFI call) is
// listed as both. XLA gives the two one address, and has copied the operand
// there if its caller keeps it: the library reads and writes the result. Where
// XLA loses the alias (SetHalf in aiter_cache.cc) the library copies it.
#ifndef JAXLIB_GPU_OPERATION_H_
#define JAXLIB_GPU_OPERATION_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "aiter/operation.h"
#include "aiter/status.h"
#include "jaxlib/gpu/ffi_util.h"
#include "jaxlib/gpu/vendor.h"
#include "xla/ffi/api/ffi.h"

namespace jax::JAX_GPU_NAMESPACE {

// The buffers of a call, taken by the members of a struct in their order.
class BufferList {
 public:
  BufferList(ffi::RemainingArgs operands, ffi::RemainingRets results)
      : operands_(operands), results_(results) {}

  // Whether the members took all buffers and no more.
  ffi::Error CheckNumbers(const char* op) const {
    AITER_FFI_RETURN_IF_ERROR(operands_.CheckNumber(op, "operands"));
    return results_.CheckNumber(op, "results");
  }

 protected:
  Buffer Operand(const char* name) {
    return Buffer(name, ffi::AnyBuffer(operands_.Next()));
  }

  Buffer Result(const char* name) {
    return Buffer(name, ffi::AnyBuffer(results_.Next()));
  }

 private:
  // Where a call passes buffers. Only what derives from XLA's lists may see
  // them without a detour that takes longer than all checks.
  template <typename List>
  class Source : List {
   public:
    explicit Source(const List& list) : List(list) {}

    // The next buffer, or one of no dimensions if there is none.
    const XLA_FFI_Buffer* Next() {
      static constexpr XLA_FFI_Buffer kMissing = {};
      size_t i = taken_++;
      return i < List::size() && List::template isa<ffi::AnyBuffer>(i)
                 ? static_cast<const XLA_FFI_Buffer*>(At(*this, i))
                 : &kMissing;
    }

    ffi::Error CheckNumber(const char* op, const char* what) const {
      if (List::size() == taken_) return ffi::Error::Success();
      return Invalid(op, "has " + std::to_string(List::size()) + " " + what,
                     "have " + std::to_string(taken_));
    }

   private:
    static void* At(const Source<ffi::RemainingArgs>& list, size_t i) {
      return list.args()->args[list.offset() + i];
    }
    static void* At(const Source<ffi::RemainingRets>& list, size_t i) {
      return list.rets()->rets[i];
    }

    size_t taken_ = 0;
  };

  Source<ffi::RemainingArgs> operands_;
  Source<ffi::RemainingRets> results_;
};

// On which devices a call's kernels are loaded. XLA keeps one of these for each
// call of an executable, all of whose calls it initializes each time it runs.
class Loaded {
 public:
  inline static ffi::TypeId id = {};  // Known once JAX has registered it.

  bool On(int32_t device) const {
    return (devices_.load(std::memory_order_acquire) & Bit(device)) != 0;
  }
  void Add(int32_t device) {
    devices_.fetch_or(Bit(device), std::memory_order_release);
  }

 private:
  // Devices past the last bit are never loaded, and looked at each time.
  static uint64_t Bit(int32_t device) {
    return device >= 0 && device < 64 ? uint64_t{1} << device : 0;
  }

  std::atomic<uint64_t> devices_{0};
};

// An FFI target. The stage before these, of all targets, makes a Loaded.
struct Target {
  const char* op;  // Its name, but for the platform's prefix.
  // Picks the kernels and loads them on the device, once.
  XLA_FFI_Handler* initialize;
  // Packs the arguments and launches.
  XLA_FFI_Handler* execute;
  aiter::Status (*kernels)(const aiter::Problem& problem,
                           const std::string& arch,
                           std::vector<std::string>* names);
};

using Targets = std::vector<Target>;

namespace internal {

template <typename Set>
struct Signature;

template <typename BufferStruct, typename AttrStruct, typename ArgStruct>
struct Signature<ffi::Error (*)(const BufferStruct&, const AttrStruct&,
                                ArgStruct*)> {
  using Buffers = BufferStruct;
  using Attrs = AttrStruct;
  using Args = ArgStruct;
};

template <auto kSet>
struct Handlers {
  using Buffers = typename Signature<decltype(kSet)>::Buffers;
  using Attrs = typename Signature<decltype(kSet)>::Attrs;
  using Args = typename Signature<decltype(kSet)>::Args;
  using Op = aiter::OperationOf<Args>;

  static ffi::Error SetArgs(ffi::RemainingArgs operands,
                            ffi::RemainingRets results, const Attrs& attrs,
                            Args* args) {
    const Buffers buffers(operands, results);
    AITER_FFI_RETURN_IF_ERROR(buffers.CheckNumbers(Op::kName));
    return kSet(buffers, attrs, args);
  }

  static ffi::Error Prepare(ffi::RemainingArgs operands,
                            ffi::RemainingRets results, Attrs attrs) {
    Args args;
    AITER_FFI_RETURN_IF_ERROR(SetArgs(operands, results, attrs, &args));
    return ToError(Op::kPrepare(args));
  }

  static ffi::Error Run(gpuStream_t stream, ffi::RemainingArgs operands,
                        ffi::RemainingRets results, Attrs attrs) {
    Args args;
    AITER_FFI_RETURN_IF_ERROR(SetArgs(operands, results, attrs, &args));
    return ToError(Op::kRun(args, stream));
  }

  static XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
    static auto* handler = ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                               .RemainingArgs()
                               .RemainingRets()
                               .template Attrs<Attrs>()
                               .To(&Prepare)
                               .release();
    // XLA asks for what it wants to know of a handler with an extension.
    if (frame->extension_start != nullptr) return handler->Call(frame);
    ffi::DiagnosticEngine diagnostic;
    auto loaded = ffi::CtxDecoding<ffi::State<Loaded>>::Decode(
        frame->api, frame->ctx, diagnostic);
    auto device = ffi::CtxDecoding<ffi::DeviceOrdinal>::Decode(
        frame->api, frame->ctx, diagnostic);
    const bool known = loaded.has_value() && device.has_value();
    if (known && (*loaded)->On(*device)) return nullptr;
    XLA_FFI_Error* error = handler->Call(frame);
    if (known && error == nullptr) (*loaded)->Add(*device);
    return error;
  }

  static XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
    static auto* handler = ffi::Ffi::Bind()
                               .Ctx<ffi::PlatformStream<gpuStream_t>>()
                               .RemainingArgs()
                               .RemainingRets()
                               .template Attrs<Attrs>()
                               .To(&Run, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(frame);
  }
};

}  // namespace internal

// The targets of a family. aiter_<family>.cc has one such object, and the
// module registers the targets of all.
class Family {
 public:
  explicit Family(Targets targets)
      : targets_(std::move(targets)), next_(first_) {
    first_ = this;
  }

  const Targets& targets() const { return targets_; }
  const Family* next() const { return next_; }
  static const Family* first() { return first_; }

 private:
  Targets targets_;
  const Family* next_;
  inline static const Family* first_ = nullptr;
};

// The target of the operation whose arguments `kSet` makes.
template <auto kSet>
Target TargetOf() {
  using H = internal::Handlers<kSet>;
  return {H::Op::kName, H::Initialize, H::Execute, H::Op::kKernels};
}

}  // namespace jax::JAX_GPU_NAMESPACE

#endif  // JAXLIB_GPU_OPERATION_H_
