// SPDX-License-Identifier: Apache-2.0

// Where numbers and scales lie in a cache, as of aiter/cache.h: checks, and
// what kernels that write one are told.
#ifndef AITER_SRC_CACHE_SIDE_H_
#define AITER_SRC_CACHE_SIDE_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "aiter/cache.h"
#include "aiter/status.h"
#include "third_party/aiter/src/core/check.h"
#include "third_party/aiter/src/core/driver.h"
#include "third_party/aiter/src/core/launch.h"

namespace aiter {

// Kernels count what is in a page in 32 bits, and add a tile.
inline constexpr int64_t kMaxPage = INT32_MAX - 8192;

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

// Whether runs of columns lie together, at multiples of 16 bytes.
inline bool IsOfRuns(const cache_half& h, int64_t run) {
  const cache_side& s = h.side;
  return s.col == 1 && h.cols % run == 0 && s.start % run == 0 &&
         s.page % run == 0 && s.run_offset % run == 0 && s.offset % run == 0 &&
         s.head % run == 0 && s.run % run == 0;
}

// That `heads` heads of any token are inside a cache that is written.
inline Status CheckPlaces(const std::string& name, const cache_half& h,
                          int64_t heads, int64_t pages, int64_t page_size,
                          int64_t run) {
  const cache_side& s = h.side;
  AITER_RETURN_IF_ERROR(
      CheckRange((name + ".cols").c_str(), h.cols, 1, kMaxPage));
  std::string side = name + ".side";
  AITER_RETURN_IF_ERROR(CheckCoefficients(side, {s.head}, INT32_MAX));
  AITER_RETURN_IF_ERROR(CheckSide(side, s, INT64_MAX));
  if (heads == 0 || pages == 0) return Status();
  double in_page = Reach(page_size, s.split, s.run_offset, s.offset) +
                   Reach(heads, 1, s.head, 0) +
                   Reach(h.cols, run, s.run, s.col);
  if (in_page > static_cast<double>(kMaxPage)) {
    return Invalid(side, "a page of more than 2^31 elements", "smaller");
  }
  AITER_RETURN_IF_ERROR(CheckReach(side, s.start, pages, s.page,
                                   static_cast<int64_t>(in_page),
                                   h.cache_size));
  return CheckAligned({{"cache_ptr", h.cache_ptr}});
}

// That the scales of `heads` heads are inside an array of `blocks` blocks, each
// of `size` places.
inline Status CheckScalePlaces(const std::string& name, const cache_half& h,
                               int64_t heads, int64_t blocks, int64_t size) {
  const cache_scales& s = h.scales;
  if (heads == 0 || blocks == 0) return Status();
  std::string field = name + ".scales";
  if (h.scale_ptr == nullptr) return Invalid(field, "absent", "given");
  AITER_RETURN_IF_ERROR(
      CheckCoefficients(field, {s.start, s.page, s.head}, INT64_MAX));
  AITER_RETURN_IF_ERROR(CheckCoefficients(field, {s.offset}, INT32_MAX));
  double in_block = static_cast<double>(size - 1) * s.offset +
                    static_cast<double>(heads - 1) * s.head;
  if (in_block > static_cast<double>(INT64_MAX / 2)) {
    return Invalid(field, "beyond the array", "inside");
  }
  return CheckReach(
      field, s.start, blocks, s.page,
      static_cast<int64_t>(size - 1) * s.offset + (heads - 1) * s.head,
      h.scale_size);
}

// The fields of a family's Params that have a side.
template <typename Params>
struct SideFields {
  int64_t Params::* start;
  int64_t Params::* page;
  int32_t Params::* run_offset;
  int32_t Params::* offset;
  int32_t Params::* split;
  int32_t Params::* head;
  int32_t Params::* run;
  int32_t Params::* col;
};

// Coefficients count in runs where columns are of runs.
template <typename Params>
void SetSide(const cache_half& h, int64_t run, const SideFields<Params>& fields,
             Params* p) {
  const cache_side& s = h.side;
  int64_t unit = IsOfRuns(h, run) ? run : 1;
  p->*fields.start = s.start / unit;
  p->*fields.page = s.page / unit;
  p->*fields.run_offset = static_cast<int32_t>(s.run_offset / unit);
  p->*fields.offset = static_cast<int32_t>(s.offset / unit);
  p->*fields.split = static_cast<int32_t>(s.split);
  p->*fields.head = static_cast<int32_t>(s.head / unit);
  p->*fields.run = static_cast<int32_t>(s.run / unit);
  p->*fields.col = static_cast<int32_t>(s.col);
}

// Copies what is to be written in another place than it was.
inline Status BringHalf(const Driver& driver, const cache_half& h,
                        void* stream) {
  if (h.cache_from_ptr != nullptr) {
    AITER_RETURN_IF_ERROR(CopyBytes(driver, h.cache_ptr, h.cache_from_ptr,
                                    h.cache_bytes, stream));
  }
  if (h.scale_from_ptr == nullptr) return Status();
  return CopyBytes(driver, h.scale_ptr, h.scale_from_ptr,
                   h.scale_size * static_cast<int64_t>(sizeof(float)), stream);
}

}  // namespace aiter

#endif  // AITER_SRC_CACHE_SIDE_H_
