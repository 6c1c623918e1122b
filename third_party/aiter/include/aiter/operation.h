// SPDX-License-Identifier: Apache-2.0

// The functions that every operation has. Calls, plans, streams and devices
// are as in mha.h.
#ifndef AITER_OPERATION_H_
#define AITER_OPERATION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "aiter/kernel.h"
#include "aiter/status.h"

namespace aiter {

// What of a call decides which kernels run, told without the call.
struct Problem {
  std::string data_type;  // As configs/*.csv have it: "bf16".
  // The sizes that an operation's kernels are chosen by: its header has them.
  // A size of -1 is not known yet: what serves the problem takes any.
  std::vector<int64_t> dims;
  std::vector<std::string> features;  // By their names in kernels/*/family.py.
};

// The plan of an operation that launches one kernel: where it is loaded, valid
// in the context that was current when the plan was made. Trivially copyable;
// nothing to release.
struct KernelPlan {
  ProblemKey key;
  LoadedKernel kernel;
};

// An operation by its arguments' type.
template <typename Args>
struct OperationOf;

// Declares the functions of operation `op`.
//
// op_plan: checks the arguments, picks the kernels for the current device and
//     loads them. Pointers are only looked at for presence and alignment.
// op(args, plan, stream): packs the arguments and launches on `stream`.
// op(args, stream): the same, with a plan that the library makes at the first
//     such call in a context and keeps; op_prepare makes it, and no more.
// op_kernels: the names of the kernels that a call would launch on a device of
//     architecture `arch` ("gfx942", "sm_90"), in that order. Needs no device.
//     Pointers count as in op_plan; a problem has none.
#define AITER_OPERATION(op, Args, Plan)                                     \
  Status op##_plan(const Args& args, Plan* plan);                           \
  Status op(const Args& args, const Plan& plan, void* stream);              \
  Status op(const Args& args, void* stream);                                \
  Status op##_prepare(const Args& args);                                    \
  Status op##_kernels(const Args& args, const std::string& arch,            \
                      std::vector<std::string>* names);                     \
  Status op##_kernels(const Problem& problem, const std::string& arch,      \
                      std::vector<std::string>* names);                     \
  template <>                                                               \
  struct OperationOf<Args> {                                                \
    static constexpr char kName[] = #op;                                    \
    static constexpr Status (*kPrepare)(const Args&) = &op##_prepare;       \
    static constexpr Status (*kRun)(const Args&, void*) = &op;              \
    static constexpr Status (*kKernels)(const Problem&, const std::string&, \
                                        std::vector<std::string>*) =        \
        &op##_kernels;                                                      \
  }

}  // namespace aiter

#endif  // AITER_OPERATION_H_
