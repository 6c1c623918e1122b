// SPDX-License-Identifier: Apache-2.0

// Checks of an operator's arguments.
#ifndef AITER_SRC_CORE_CHECK_H_
#define AITER_SRC_CORE_CHECK_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "aiter/status.h"

namespace aiter {

// "m is -1, but must be from 0 to 7"
inline Status Invalid(const std::string& name, const std::string& given,
                      const std::string& accepted) {
  return Status(StatusCode::kInvalidArgument,
                name + " is " + given + ", but must be " + accepted);
}

inline Status CheckRange(const char* name, int64_t value, int64_t low,
                         int64_t high) {
  if (value >= low && value <= high) return Status();
  return Invalid(name, std::to_string(value),
                 "from " + std::to_string(low) + " to " + std::to_string(high));
}

struct NamedPointer {
  const char* name;
  const void* address;
};

// Every load and store of a kernel may be 16 bytes wide.
inline Status CheckAligned(std::initializer_list<NamedPointer> pointers) {
  for (const NamedPointer& p : pointers) {
    if (reinterpret_cast<uintptr_t>(p.address) % 16 != 0) {
      return Invalid(p.name, "not aligned", "a multiple of 16 bytes");
    }
  }
  return Status();
}

// For a >= 0 and b > 0.
inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace aiter

#endif  // AITER_SRC_CORE_CHECK_H_
