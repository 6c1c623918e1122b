// SPDX-License-Identifier: Apache-2.0

// Checks of where numbers and scales lie in a cache: aiter/cache.h.
#ifndef AITER_SRC_CACHE_SIDE_H_
#define AITER_SRC_CACHE_SIDE_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "aiter/cache.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/check.h"

namespace aiter {

inline Status CheckCoefficients(const std::string& name,
                                std::initializer_list<int64_t> values,
                                int64_t largest) {
  for (int64_t value : values) {
    AITER_RETURN_IF_ERROR(CheckRange(name.c_str(), value, 0, largest));
  }
  return Status();
}

// That start + pages * page + the largest place in a page is of an array.
inline Status CheckReach(const std::string& name, int64_t start, int64_t pages,
                         int64_t page, int64_t in_page, int64_t size) {
  int64_t left = size - 1 - in_page - start;
  bool inside = left >= 0 && (page == 0 || pages - 1 <= left / page);
  if (inside) return Status();
  return Invalid(name, "beyond the array",
                 "inside its " + std::to_string(size) + " elements");
}

// The largest of i / split * outer + i % split * inner for i < count, as far as
// a double tells.
inline double Reach(int64_t count, int64_t split, int64_t outer,
                    int64_t inner) {
  auto at = [=](int64_t i) {
    return static_cast<double>(i / split) * static_cast<double>(outer) +
           static_cast<double>(i % split) * static_cast<double>(inner);
  };
  int64_t last = count - 1;
  // The last, or the end of the last whole part.
  return std::max(at(last),
                  at(std::max<int64_t>(count / split * split - 1, 0)));
}

// What any place in a cache has; a page's stride is at most `largest_page`.
inline Status CheckSide(const std::string& name, const cache_side& s,
                        int64_t largest_page) {
  AITER_RETURN_IF_ERROR(CheckCoefficients(name, {s.start, s.head}, INT64_MAX));
  AITER_RETURN_IF_ERROR(CheckCoefficients(name, {s.page}, largest_page));
  AITER_RETURN_IF_ERROR(CheckCoefficients(
      name, {s.run_offset, s.offset, s.run, s.col}, INT32_MAX));
  return CheckRange(name.c_str(), s.split, 1, INT32_MAX);
}

}  // namespace aiter

#endif  // AITER_SRC_CACHE_SIDE_H_
