// SPDX-License-Identifier: Apache-2.0

// What stands between projections and attention, in one launch.
//
// Calls, plans, streams and devices are as in mha.h.
#ifndef AITER_FUSED_QK_H_
#define AITER_FUSED_QK_H_

#include <cstdint>

#include "aiter/kernel.h"
#include "aiter/operation.h"

namespace aiter {

// What is stored: numbers of the operands' type, or of 8 bits, which are
// divided by a scale and rounded. In the order of CacheKind.
enum class FusedKind : int32_t {
  kSame = -1,
  kInt8 = 0,
  kE4m3fn = 1,
  kE4m3fnuz = 2,
  kE5m2 = 4,
};

// Queries and keys of multi-head latent attention. With R the rotation by a
// token's row of the tables, and N an RMSNorm with a weight, or nothing,
//
//   q_out[t, h] = [q_nope[t, h] | R q_pe[t, h]]
//   kv_cache[slots[t]] = [N kv_c[t] | R k_pe[t]]
//
// where the cache has `width` columns and rotated keys begin at `first`. A
// token whose slot is negative, or beyond the last, is not stored. Arithmetic
// is of float32, and each number is rounded once. Positions are held inside the
// tables.
struct fused_qk_latent_args {
  DataType data_type = DataType::kBf16;  // fp16 or bf16.
  FusedKind kind = FusedKind::kSame;     // Of kv_cache.
  FusedKind q_kind = FusedKind::kSame;   // Of q_out.
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t lora = 0;
  int64_t rope = 0;
  int64_t table_rows = 0;
  int64_t slots = 0;  // Of the cache.
  int64_t width = 0;
  int64_t first = 0;
  bool is_gptj = false;  // Pairs are neighbours; else halves.
  float eps = 0;
  const void* q_nope_ptr = nullptr;     // [tokens, heads, lora]
  const void* q_pe_ptr = nullptr;       // [tokens, heads, rope]
  const void* kv_c_ptr = nullptr;       // [tokens, lora]
  const void* k_pe_ptr = nullptr;       // [tokens, rope]
  const void* weight_ptr = nullptr;     // [lora], or null: no norm.
  const void* cos_ptr = nullptr;        // float32 [table_rows, rope / 2]
  const void* sin_ptr = nullptr;        // likewise
  const void* positions_ptr = nullptr;  // int32 [tokens]
  const void* slots_ptr = nullptr;      // int32 [tokens]
  const void* q_scale_ptr = nullptr;    // float32 [1], or null: 1.
  const void* k_scale_ptr = nullptr;    // likewise
  void* q_out_ptr = nullptr;            // [tokens, heads, lora + rope]
  void* kv_cache_ptr = nullptr;         // [slots, width]
  // Where the cache is before, if that is another place: it is copied then.
  const void* kv_cache_from_ptr = nullptr;
  int64_t kv_cache_bytes = 0;
};

// A problem's sizes are lora and rope.
AITER_OPERATION(fused_qk_latent, fused_qk_latent_args, KernelPlan);

}  // namespace aiter

#endif  // AITER_FUSED_QK_H_
