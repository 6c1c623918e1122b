// SPDX-License-Identifier: Apache-2.0

// The functions of an operation, made of what it alone knows.
#ifndef AITER_SRC_CORE_OPERATION_H_
#define AITER_SRC_CORE_OPERATION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "aiter/kernel.h"
#include "aiter/operation.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/code_objects.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/plan_cache.h"
#include "third_party/aiter/src/core/steps.h"

namespace aiter {

// Sets `*key` to that of a problem of operation `op`, whose family has the
// features' names, with at most `num_dims` sizes. No kernel but one without a
// bound holds a size that is not known.
Status ProblemKeyOf(const std::string& op, const Problem& problem, int num_dims,
                    ProblemKey* key);

// `Op` is a struct of
//
//   using Args, Plan;  // Plan has a member `key`, and Key is its type.
//
//   // Refuses what no device could accept.
//   static Status Check(const Args&);
//
//   // What of arguments that passed decides which kernels run, and how.
//   static Key KeyOf(const Args&);
//
//   // The same of a problem; ProblemKeyOf does most of it.
//   static Status KeyOf(const Problem&, Key*);
//
//   // Adds the kernels in the order of their launch, and sets whatever else of
//   // the plan follows from its key and the device.
//   static Status Choose(const Key&, Steps*, Plan*);
//
//   // Packs the arguments and launches.
//   static Status Launch(const Driver&, const Args&, const Plan&,
//                        void* stream);
template <typename Op>
class Operation {
 public:
  using Args = typename Op::Args;
  using Plan = typename Op::Plan;
  using Key = decltype(Plan::key);

  static Status MakePlan(const Args& args, Plan* plan) {
    AITER_RETURN_IF_ERROR(Op::Check(args));
    return PlanFor(Op::KeyOf(args), plan);
  }

  static Status Run(const Args& args, const Plan& plan, void* stream) {
    AITER_RETURN_IF_ERROR(Op::Check(args));
    if (Op::KeyOf(args) != plan.key) {
      return Status(StatusCode::kFailedPrecondition,
                    "plan was made for other arguments: sizes, data types or "
                    "what is present differ");
    }
    return Launch(args, plan, stream);
  }

  static Status Run(const Args& args, void* stream) {
    const Plan* plan;
    AITER_RETURN_IF_ERROR(Find(args, &plan));
    return Launch(args, *plan, stream);
  }

  static Status Prepare(const Args& args) {
    const Plan* plan;
    return Find(args, &plan);
  }

  static Status Kernels(const Problem& problem, const std::string& arch,
                        std::vector<std::string>* names) {
    Key key;
    AITER_RETURN_IF_ERROR(Op::KeyOf(problem, &key));
    return KernelsFor(key, arch, names);
  }

  static Status Kernels(const Args& args, const std::string& arch,
                        std::vector<std::string>* names) {
    AITER_RETURN_IF_ERROR(Op::Check(args));
    return KernelsFor(Op::KeyOf(args), arch, names);
  }

 private:
  static Status KernelsFor(const Key& key, const std::string& arch,
                           std::vector<std::string>* names) {
    names->clear();
    Plan plan;
    Steps steps(arch);
    AITER_RETURN_IF_ERROR(Op::Choose(key, &steps, &plan));
    *names = steps.names();
    return Status();
  }

  static Status PlanFor(const Key& key, Plan* plan) {
    *plan = Plan();
    plan->key = key;
    Context* context;
    AITER_RETURN_IF_ERROR(Context::Current(&context));
    Steps steps(context);
    return Op::Choose(key, &steps, plan);
  }

  static Status Find(const Args& args, const Plan** plan) {
    // Plans of the calls that came without one.
    static auto* cache = new PlanCache<Plan>;
    AITER_RETURN_IF_ERROR(Op::Check(args));
    return cache->FindOrMake(Op::KeyOf(args), &PlanFor, plan);
  }

  static Status Launch(const Args& args, const Plan& plan, void* stream) {
    const Driver* driver;
    AITER_RETURN_IF_ERROR(GetDriver(&driver));
    return Op::Launch(*driver, args, plan, stream);
  }
};

// Defines what AITER_OPERATION(op, Op::Args, Op::Plan) declares.
#define AITER_DEFINE_OPERATION(op, Op)                                  \
  Status op##_plan(const Op::Args& args, Op::Plan* plan) {              \
    return Operation<Op>::MakePlan(args, plan);                         \
  }                                                                     \
  Status op(const Op::Args& args, const Op::Plan& plan, void* stream) { \
    return Operation<Op>::Run(args, plan, stream);                      \
  }                                                                     \
  Status op(const Op::Args& args, void* stream) {                       \
    return Operation<Op>::Run(args, stream);                            \
  }                                                                     \
  Status op##_prepare(const Op::Args& args) {                           \
    return Operation<Op>::Prepare(args);                                \
  }                                                                     \
  Status op##_kernels(const Op::Args& args, const std::string& arch,    \
                      std::vector<std::string>* names) {                \
    return Operation<Op>::Kernels(args, arch, names);                   \
  }                                                                     \
  Status op##_kernels(const Problem& problem, const std::string& arch,  \
                      std::vector<std::string>* names) {                \
    return Operation<Op>::Kernels(problem, arch, names);                \
  }                                                                     \
  static_assert(true, "a semicolon follows")

}  // namespace aiter

#endif  // AITER_SRC_CORE_OPERATION_H_
