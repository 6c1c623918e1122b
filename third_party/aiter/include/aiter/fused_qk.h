// SPDX-License-Identifier: Apache-2.0

// What stands between projections and attention, in one launch.
//
// Calls, plans, streams and devices are as in mha.h.
#ifndef AITER_FUSED_QK_H_
#define AITER_FUSED_QK_H_

#include <cstdint>

#include "aiter/cache.h"
#include "aiter/kernel.h"
#include "aiter/operation.h"
#include "aiter/quant.h"

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

// Heads of queries, keys and values. With R the rotation of a head's pairs by a
// token's row of the tables, and N an RMSNorm with a weight, or nothing,
//
//   q_out[t, h] = R N q[t, h]
//   k_out[t, h], k_cache[slots[t], h] = R N k[t, h]
//   v_out[t, h], v_cache[slots[t], h] = v[t, h]
//
// A head has `dim` columns; from `first` on there are `pairs` pairs, all others
// are as they are. Caches, slots and what is stored are as in cache.h; numbers
// of 8 bits are divided by scales that are given or, `token`, found and written
// for each token and head. Arithmetic is of float32, and each number is rounded
// once. Positions are held inside the tables.
struct fused_qk_heads_args {
  DataType data_type = DataType::kBf16;  // fp16 or bf16.
  FusedKind kind = FusedKind::kSame;     // Of the caches.
  FusedKind q_kind = FusedKind::kSame;   // Of q_out.
  bool token = false;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t k_heads = 0;
  int64_t v_heads = 0;  // k_heads, or 0 without values.
  int64_t dim = 0;
  int64_t pairs = 0;
  int64_t first = 0;
  int64_t q_stride = 0;  // From token to token.
  int64_t k_stride = 0;
  int64_t v_stride = 0;
  int64_t table_rows = 0;
  int64_t table_stride = 0;
  int64_t pages = 0;  // 0 without caches.
  int64_t page_size = 0;
  bool is_gptj = false;   // Pairs are neighbours; else halves.
  bool is_gemma = false;  // Weights are 1 + weight.
  bool is_joint = false;  // A norm is of all heads of a token.
  bool has_f32_tables = false;
  // Pairs have positions of three rows: those before section_0 of the first,
  // those before section_1 of the second. Interleaved, of each three pairs the
  // second is of the second row before section_0, and the third of the third
  // before section_1; all others are of the first.
  bool has_sections = false;
  bool is_interleaved = false;
  int64_t section_0 = 0;
  int64_t section_1 = 0;
  float eps = 0;
  const void* q_ptr = nullptr;
  const void* k_ptr = nullptr;
  const void* v_ptr = nullptr;
  const void* q_weight_ptr = nullptr;   // [dim] or [heads * dim], or null.
  const void* k_weight_ptr = nullptr;   // likewise
  const void* cos_ptr = nullptr;        // [table_rows, pairs]
  const void* sin_ptr = nullptr;        // likewise
  const void* positions_ptr = nullptr;  // int32 [1 or 3, tokens]
  const void* slots_ptr = nullptr;      // int32 [tokens]
  const void* q_scale_ptr = nullptr;    // float32 [1], or null: 1.
  void* q_out_ptr = nullptr;            // [tokens, heads, dim]
  void* k_out_ptr = nullptr;            // [tokens, k_heads, dim], or null.
  void* v_out_ptr = nullptr;            // likewise
  // Where keys and values go; their rows are not looked at.
  cache_half k_half;
  cache_half v_half;
};

// A problem's sizes are dim and 2 * pairs.
AITER_OPERATION(fused_qk_heads, fused_qk_heads_args, KernelPlan);

// Rows of queries and of keys. With s the queries, or their sum with a residual
// (formed in float32, and rounded for residual_out alone),
//
//   y = N(s) * silu(gate),   k_out = N(k)
//
// or N(s * silu(gate)), or with the logistic function in the place of silu,
// where N is an RMSNorm of the row, or of each `dim` columns in it with one
// weight for all of them, perhaps with a bias: each of these if its arrays are
// there. Or y = R^-1 q, which turns pairs of each `dim` columns by minus a
// token's row of the tables. Of `y`, in float32, go numbers of the operands'
// type to q_out, and codes and scales as of quant.h's rows and groups, to codes
// and scale; or codes of y / q_scale alone.
//
// A token's queries are `parts` rows; more than one only if neither a norm nor
// a scale is of all of them, and without keys.
struct fused_qk_rows_args {
  DataType data_type = DataType::kBf16;  // fp16 or bf16.
  DataType q_type = DataType::kI8;       // Of codes: or kE4m3fn, kE4m3fnuz,
                                         // kE2m1, two of them in a byte.
  int64_t tokens = 0;
  int64_t parts = 1;
  int64_t cols = 0;    // Of a row of queries.
  int64_t k_cols = 0;  // Of a row of keys; 0: there are none.
  // Columns of a head; with a norm 32, 64, 128 or 256, or 0: it is the row's.
  int64_t dim = 0;
  int64_t pairs = 0;
  int64_t first = 0;  // The first of a head's columns that is turned.
  int64_t table_rows = 0;
  int64_t group = 0;  // Columns with one scale: 32, 64, 128; 0: all of a row.
  int64_t scale_token = 0;  // How far apart scales of tokens and of groups lie.
  int64_t scale_group = 0;
  bool scale_is_e8m0 = false;
  MxRounding mode = MxRounding::kUp;  // Of e8m0.
  float least = 0;          // Scales are those of magnitudes of at least this.
  bool is_sigmoid = false;  // Of the gate; else silu.
  bool is_gated_first = false;  // The gate is before the norm.
  bool is_narrow = false;  // y is rounded to data_type before it is to codes.
  bool is_gptj = false;    // Pairs are neighbours; else halves.
  bool is_gemma = false;   // Weights are 1 + weight.
  float eps = 0;
  float k_eps = 0;
  const void* q_ptr = nullptr;          // [tokens, parts, cols]
  const void* residual_ptr = nullptr;   // likewise, or null
  const void* gate_ptr = nullptr;       // likewise
  const void* q_weight_ptr = nullptr;   // [dim] or [cols], or null: no norm.
  const void* bias_ptr = nullptr;       // likewise; only with a norm.
  const void* k_ptr = nullptr;          // [tokens, k_cols]
  const void* k_weight_ptr = nullptr;   // [k_cols]
  const void* cos_ptr = nullptr;        // float32 [table_rows, pairs], or null
  const void* sin_ptr = nullptr;        // likewise
  const void* positions_ptr = nullptr;  // int32 [tokens], or null
  const void* q_scale_ptr = nullptr;    // float32 [1], or null: it is found.
  void* q_out_ptr = nullptr;            // [tokens, parts, cols], or null
  void* residual_out_ptr = nullptr;     // likewise, as residual
  void* codes_ptr = nullptr;            // bytes, or null
  void* scale_ptr = nullptr;            // float32, or bytes of e8m0, or null
  void* k_out_ptr = nullptr;            // [tokens, k_cols]
};

// A problem's sizes are cols and k_cols.
AITER_OPERATION(fused_qk_rows, fused_qk_rows_args, KernelPlan);

}  // namespace aiter

#endif  // AITER_FUSED_QK_H_
