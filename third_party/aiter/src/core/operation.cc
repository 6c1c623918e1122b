// SPDX-License-Identifier: Apache-2.0

#include "third_party/aiter/src/core/operation.h"

#include <climits>
#include <cstdint>
#include <string>

#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/select.h"

namespace aiter {
namespace {

Status DataTypeOf(const std::string& name, DataType* type) {
  std::string known;
  for (int i = 0; i <= static_cast<int>(DataType::kE2m1); ++i) {
    *type = static_cast<DataType>(i);
    if (name == DataTypeName(*type)) return Status();
    known += (known.empty() ? "" : ", ") + std::string(DataTypeName(*type));
  }
  return Invalid("dtype", name, "of " + known);
}

}  // namespace

Status ProblemKeyOf(const std::string& op, const Problem& problem, int num_dims,
                    ProblemKey* key) {
  *key = ProblemKey();
  AITER_RETURN_IF_ERROR(DataTypeOf(problem.data_type, &key->data_type));
  if (problem.dims.size() > static_cast<size_t>(num_dims)) {
    return Invalid("number of dims", std::to_string(problem.dims.size()),
                   "at most " + std::to_string(num_dims));
  }
  for (size_t i = 0; i < problem.dims.size(); ++i) {
    AITER_RETURN_IF_ERROR(CheckRange("dims", problem.dims[i], -1, INT_MAX));
    key->dims[i] =
        problem.dims[i] < 0 ? INT_MAX : static_cast<int32_t>(problem.dims[i]);
  }
  return ParseFeatures(op, problem.features, &key->features);
}

}  // namespace aiter
