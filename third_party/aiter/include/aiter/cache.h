// SPDX-License-Identifier: Apache-2.0

// Writes of tokens into paged KV caches.
//
// Calls, plans, streams and devices are as in mha.h.
#ifndef AITER_CACHE_H_
#define AITER_CACHE_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// Where numbers lie in a cache, in its elements: that of a token at `offset` of
// a page, of a head and a column is
//
//   start + page * .page + offset / .split * .run_offset
//     + offset % .split * .offset + head * .head
//     + column / run * .run + column % run * .col
//
// where a run is 16 bytes of columns.
struct cache_side {
  int64_t start = 0;
  int64_t page = 0;
  int64_t run_offset = 0;
  int64_t offset = 0;
  int64_t split = 1;
  int64_t head = 0;
  int64_t run = 0;
  int64_t col = 1;
};

// Where scales lie: start + page * .page + offset * .offset + head * .head.
struct cache_scales {
  int64_t start = 0;
  int64_t page = 0;
  int64_t offset = 0;
  int64_t head = 0;
};

// What numbers of 8 bits are.
enum class CacheKind : int32_t {
  kInt8 = 0,
  kE4m3fn = 1,
  kE4m3fnuz = 2,
  kE5m2 = 4,
};

// Keys, or values.
struct cache_half {
  const void* rows_ptr = nullptr;  // [tokens, heads, cols], or absent.
  int64_t cols = 0;
  void* cache_ptr = nullptr;
  int64_t cache_size = 0;  // Elements; no address is beyond.
  // Where the cache is before, if that is another place: it is copied then.
  const void* cache_from_ptr = nullptr;
  int64_t cache_bytes = 0;
  cache_side side;
  void* scale_ptr = nullptr;  // float32.
  int64_t scale_size = 0;
  const void* scale_from_ptr = nullptr;  // As of the cache.
  cache_scales scales;
};

// A token goes where slots has it: page * page_size + offset. One that is
// negative or beyond the last page is skipped. Arrays start at a multiple of
// 16 bytes. Keys and values may share a cache.
struct cache_args {
  // Of rows: fp16, bf16 or fp32; of a copy any type of that size, of one byte
  // i8.
  DataType data_type = DataType::kBf16;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t pages = 0;
  int64_t page_size = 0;
  const void* slots_ptr = nullptr;  // int32 [tokens]
  cache_half k;
  cache_half v;
};

// Numbers as they are. If a slot is given twice, each number there is one of
// its tokens'.
struct cache_copy_args : cache_args {};

// Numbers divided by a given scale, if there is one, and rounded to 8 bits; of
// its place only .head counts.
struct cache_cast_args : cache_args {
  CacheKind kind = CacheKind::kInt8;
};

// Numbers rounded with scale = max(amax, floor) / largest of a token's head, or
// the least power of two that is not smaller. Scales are written.
struct cache_token_args : cache_args {
  CacheKind kind = CacheKind::kInt8;
  float floor = 0;
  bool scale_is_power = false;
};

// Numbers rounded with a scale for each head of a block of slots: that of its
// new numbers if one is the block's first, else the larger one of it and the
// block's. If that grows, what the block held is rounded anew. Scales lie by
// blocks, .page being the step from one to the next.
struct cache_block_args : cache_args {
  CacheKind kind = CacheKind::kInt8;
  float floor = 0;
  int64_t block = 0;  // Slots; pages * page_size is a multiple.
  // int32 [pages * page_size]: the token that a slot is given, or -1.
  const void* winners_ptr = nullptr;
};

// A launch has keys and values, or one of them if their places differ in kind.
struct CachePlan {
  ProblemKey key;
  LoadedKernel runs;     // Where runs of columns lie together.
  LoadedKernel strided;  // Anywhere.
};

// A copy's and a cast's problem has no size, that of others the larger number
// of columns.
AITER_OPERATION(cache_copy, cache_copy_args, CachePlan);
AITER_OPERATION(cache_cast, cache_cast_args, CachePlan);
AITER_OPERATION(cache_token, cache_token_args, KernelPlan);
AITER_OPERATION(cache_block, cache_block_args, KernelPlan);

}  // namespace aiter

#endif  // AITER_CACHE_H_
