// SPDX-License-Identifier: Apache-2.0

// The kernels of a call, one after another: loaded, or only named.
#ifndef AITER_SRC_CORE_STEPS_H_
#define AITER_SRC_CORE_STEPS_H_

#include <initializer_list>
#include <string>
#include <vector>

#include "aiter/kernel.h"
#include "aiter/status.h"

namespace aiter {

// An operation of a call and where its kernel goes.
struct Step {
  const char* op;
  bool wanted;  // If not, the slot is emptied.
  LoadedKernel* slot;
};

// Picks the kernels for the current device and loads them into its context.
Status LoadSteps(const ProblemKey& key, std::initializer_list<Step> steps);

// Symbols of the operations' kernels on a device of architecture `arch`.
Status NameSteps(const ProblemKey& key, const std::string& arch,
                 const std::vector<const char*>& ops,
                 std::vector<std::string>* names);

}  // namespace aiter

#endif  // AITER_SRC_CORE_STEPS_H_
