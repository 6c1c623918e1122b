// SPDX-License-Identifier: Apache-2.0

// Arguments of the kernels of latent attention, which are some of those of
// paged attention. Meanings: kernels/mla/attend.py.
#ifndef AITER_SRC_MLA_PARAMS_H_
#define AITER_SRC_MLA_PARAMS_H_

#include "third_party/aiter/src/paged_params.h"

namespace aiter {

using MlaParams = PagedParams;

}  // namespace aiter

#endif  // AITER_SRC_MLA_PARAMS_H_
