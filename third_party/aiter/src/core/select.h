// SPDX-License-Identifier: Apache-2.0

// Choice of a kernel for a problem and a device.
#ifndef AITER_SRC_CORE_SELECT_H_
#define AITER_SRC_CORE_SELECT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "aiter/kernel.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/archs.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/kernel_table.h"

namespace aiter {

// Sets `*kernel` to the best row of the table for operation `op`: one built for
// the nearest architecture that runs on the device, the fast grade before the
// padded and that before the general, the smallest sizes that hold the
// problem's, the most specialised. Fails if there is none.
Status SelectKernel(const DeviceInfo& device, const std::string& op,
                    const ProblemKey& key, const KernelInfo** kernel);

// Sets `*bits` to the features (features.h) of operation `op`'s family that are
// named. Fails if there is no such family or feature.
Status ParseFeatures(const std::string& op,
                     const std::vector<std::string>& names, uint32_t* bits);

// How well an object for architecture `built` suits a device: higher is better,
// -1 does not run. configs/archs.csv says which devices run which objects.
int ArchRank(const std::string& built, const std::string& device);

// What is known of an architecture that kernels are built for.
const ArchInfo& FactsOf(const std::string& arch);

// The error that no kernel serves a problem of operation `op`.
Status NoKernel(const DeviceInfo& device, const std::string& op,
                const std::string& problem);

// Number of bits that are set.
int PopCount(uint32_t bits);

// As configs/*.csv have it: "bf16".
const char* DataTypeName(DataType type);

// A device of architecture `arch`, to select for without having one.
DeviceInfo DeviceOfArch(const std::string& arch);

}  // namespace aiter

#endif  // AITER_SRC_CORE_SELECT_H_
