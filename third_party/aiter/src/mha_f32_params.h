// SPDX-License-Identifier: Apache-2.0

// Arguments of the kernels of attention of float32 tensors, which are some of
// those of attention.
#ifndef AITER_SRC_MHA_F32_PARAMS_H_
#define AITER_SRC_MHA_F32_PARAMS_H_

#include "third_party/aiter/src/mha_params.h"

namespace aiter {

using MhaF32Params = MhaParams;

}  // namespace aiter

#endif  // AITER_SRC_MHA_F32_PARAMS_H_
