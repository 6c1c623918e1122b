// SPDX-License-Identifier: Apache-2.0

// Arguments of the kernels that keep the gradients of attention's scores, which
// are some of those of attention; the gradients have the place of dbias.
#ifndef AITER_SRC_MHA_DSCORES_PARAMS_H_
#define AITER_SRC_MHA_DSCORES_PARAMS_H_

#include "third_party/aiter/src/mha_params.h"

namespace aiter {

using MhaDscoresParams = MhaParams;

}  // namespace aiter

#endif  // AITER_SRC_MHA_DSCORES_PARAMS_H_
