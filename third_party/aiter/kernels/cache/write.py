# SPDX-License-Identifier: Apache-2.0
"""Writes of tokens into paged KV caches.

  cache_copy   numbers as they are
  cache_cast   divided by a given scale, and rounded to 8 bits
  cache_token  rounded with a scale of its own for each token and head, which
               is written too
  cache_block  rounded with a scale for each block of slots and head; what the
               block held is rounded anew if its scale grows

Keys and values are one launch: the first programs write keys. A row is one
head of one token. Where it lies in a cache is an affine function of page,
token, head and column; its coefficients are a `side`, a tuple in the order of
include/aiter/cache.h. RUN columns are 16 bytes of the cache. Where all of them
lie together at multiples of 16 bytes, coefficients count in runs (flag RUNS):
said so that the compiler sees it, and stores 16 bytes.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.cache.family import FEATURES
from third_party.aiter.kernels.core import groups, rounding

_encode = rounding._encode
divide = rounding.divide
divide_by_any = groups.divide_by_any
f32_scale = rounding.f32_scale
from_e4m3fn = rounding.from_e4m3fn
from_e4m3fnuz = rounding.from_e4m3fnuz
magnitude = rounding.magnitude
to_bits = rounding.to_bits
E4M3FN = rounding.E4M3FN
E4M3FNUZ = rounding.E4M3FNUZ
INT8 = rounding.INT8
E5M2 = tl.constexpr(4)  # Beside rounding.py's kinds.

# Bits of the argument `flags` of keys; those of values are shifted.
ALIGNED = tl.constexpr(FEATURES["aligned"])
RUNS = tl.constexpr(FEATURES["runs"])
SCALED = tl.constexpr(FEATURES["scaled"])
V_SHIFT = tl.constexpr(
    (FEATURES["v_aligned"] // FEATURES["aligned"]).bit_length() - 1)
POWER = tl.constexpr(FEATURES["power"])
FP16 = tl.constexpr(FEATURES["fp16"])  # What keys and values are; else bf16.
FP32 = tl.constexpr(FEATURES["fp32"])


@triton.jit
def _to_e5m2(x):
  """float32 -> the bits of float8_e5m2 in uint8; NaN becomes 0x7F."""
  bits = x.to(tl.uint32, bitcast=True)
  size = bits & 0x7FFFFFFF
  code = _encode(size, 2, 15, 0x47600000) | ((bits >> 24) & 0x80)
  return tl.where(size > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def _codes(x, kind, NATIVE: tl.constexpr):
  """float32 -> uint8 of a kind."""
  if kind == E5M2:
    code = _to_e5m2(x)
  else:
    code = to_bits(x, kind, NATIVE)
  return code


@triton.jit
def _numbers(code, kind):
  """uint8 of a kind -> float32."""
  if kind == INT8:
    x = code.to(tl.int8, bitcast=True).to(tl.float32)
  elif kind == E4M3FN:
    x = from_e4m3fn(code)
  elif kind == E4M3FNUZ:
    x = from_e4m3fnuz(code)
  else:
    x = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
  return x


@triton.jit
def _scale_of(m, floor, kind, flags):
  """The scale of numbers of which the largest magnitude has the bits m."""
  amax = m.to(tl.float32, bitcast=True)
  amax = tl.where(amax < floor, floor, amax)
  if kind == E5M2:
    s = tl.div_rn(amax, tl.full(amax.shape, 57344.0, tl.float32))
  else:
    s = f32_scale(amax, kind)
  if POWER & flags:
    bits = s.to(tl.int32, bitcast=True)
    up = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    s = tl.where(s == s, up, s)
  # One NaN on every device: a cache is bytes.
  return tl.where(s == s, s, float("nan"))


@triton.jit
def _load(rows, r, c, inside, cols, flags, RUN: tl.constexpr):
  """rows[r, c], 0 outside; r is of 64 bits, and c of all columns."""
  if ALIGNED & flags:
    width = cols // RUN * RUN
    x = tl.load(rows + r * width + c, inside & (c < width), 0)
  else:
    x = tl.load(rows + r * cols + c, inside & (c < cols), 0)
  return x


@triton.jit
def _load_wide(rows, r, c, inside, cols, flags, types, RUN: tl.constexpr):
  """_load of fp16, bf16 or fp32, in float32."""
  if FP32 & types:
    x = _load(rows.to(tl.pointer_type(tl.float32)), r, c, inside, cols, flags,
              RUN)
  elif FP16 & types:
    x = _load(rows.to(tl.pointer_type(tl.float16)), r, c, inside, cols, flags,
              RUN).to(tl.float32)
  else:
    x = _load(rows.to(tl.pointer_type(tl.bfloat16)), r, c, inside, cols, flags,
              RUN).to(tl.float32)
  return x


@triton.jit
def _base(side, page, offset, head):
  """Where a head of a token begins; page, offset and head broadcast."""
  token = offset // side[4] * side[2] + offset % side[4] * side[3]
  return side[0] + page.to(tl.int64) * side[1] + token + head * side[5]


@triton.jit
def _store(cache, x, side, base, c, mask, cols, flags, RUN: tl.constexpr):
  """x to the columns c behind base."""
  if RUNS & flags:
    width = cols // RUN * RUN
    at = base * RUN + (c // RUN * side[6] * RUN + c % RUN)
    tl.store(cache + at, x, mask & (c < width))
  else:
    at = base + (c // RUN * side[6] + c % RUN * side[7])
    tl.store(cache + at, x, mask & (c < cols))


@triton.jit
def _fetch(cache, side, base, c, mask, cols, RUN: tl.constexpr, flags):
  """What _store stored."""
  if RUNS & flags:
    width = cols // RUN * RUN
    at = base * RUN + (c // RUN * side[6] * RUN + c % RUN)
    x = tl.load(cache + at, mask & (c < width), 0)
  else:
    at = base + (c // RUN * side[6] + c % RUN * side[7])
    x = tl.load(cache + at, mask & (c < cols), 0)
  return x


@triton.jit
def _places(slots, r, rows, heads, num_slots, page_size):
  """(whether it is stored, page, offset, head) of rows r."""
  token = r // heads
  slot = tl.load(slots + token, r < rows, -1)
  stored = (slot >= 0) & (slot < num_slots)
  page = slot // page_size
  return stored, page, slot - page * page_size, r - token * heads


@triton.jit
def _tile(tile, slots, rows, heads, cols, num_slots, page_size,
          TILE_M: tl.constexpr, TILE_N: tl.constexpr):
  """(rows, columns, stored, page, offset, head) of a tile."""
  tiles_n = tl.cdiv(cols, TILE_N)
  r = tile // tiles_n * TILE_M + tl.arange(0, TILE_M)
  c = (tile % tiles_n * TILE_N + tl.arange(0, TILE_N))[None, :]
  stored, page, offset, head = _places(slots, r, rows, heads, num_slots,
                                       page_size)
  return r, c, stored, page, offset, head


@triton.jit
def _copy(tile, rows_in, cache, slots, side, rows, heads, cols, num_slots,
          page_size, FLAGS: tl.constexpr, TILE_M: tl.constexpr,
          TILE_N: tl.constexpr, RUN: tl.constexpr):
  """A tile of keys or values as they are."""
  r, c, stored, page, offset, head = _tile(
      tile, slots, rows, heads, cols, num_slots, page_size, TILE_M, TILE_N)
  x = _load(rows_in, r.to(tl.int64)[:, None], c, (r < rows)[:, None], cols,
            FLAGS, RUN)
  base = _base(side, page, offset, head)
  _store(cache, x, side, base[:, None], c, stored[:, None], cols, FLAGS, RUN)


@triton.jit
def _cast(tile, rows_in, cache, scale, slots, side, scale_head, rows, heads,
          cols, num_slots, page_size, kind, flags, types, FLAGS: tl.constexpr,
          TILE_M: tl.constexpr, TILE_N: tl.constexpr, RUN: tl.constexpr,
          NATIVE: tl.constexpr):
  """A tile of keys or values, divided by a given scale and rounded."""
  r, c, stored, page, offset, head = _tile(
      tile, slots, rows, heads, cols, num_slots, page_size, TILE_M, TILE_N)
  x = _load_wide(rows_in, r.to(tl.int64)[:, None], c, (r < rows)[:, None],
                 cols, FLAGS, types, RUN)
  if SCALED & flags:
    s = tl.load(scale + head * scale_head, stored, 1.0)
    x = divide_by_any(x, s[:, None])
  base = _base(side, page, offset, head)
  _store(cache, _codes(x, kind, NATIVE), side, base[:, None], c,
         stored[:, None], cols, FLAGS, RUN)


@triton.jit
def cache_copy(key, value, k_cache, v_cache, slots, k_start, k_page,
               k_run_offset, k_offset, k_split, k_head, k_run, k_col, v_start,
               v_page, v_run_offset, v_offset, v_split, v_head, v_run, v_col,
               rows, heads, k_cols, v_cols, num_slots, page_size,
               FLAGS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
               RUN: tl.constexpr):
  """Tokens as they are.

  key, value: [rows, k_cols], [rows, v_cols], rows of tokens' heads. slots:
  int32 [rows / heads]. FLAGS: RUNS and ALIGNED, or neither.
  """
  tile = tl.program_id(0)
  k_tiles = tl.cdiv(rows, TILE_M) * tl.cdiv(k_cols, TILE_N)
  if tile < k_tiles:
    _copy(tile, key, k_cache, slots,
          (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
           k_col), rows, heads, k_cols, num_slots, page_size, FLAGS, TILE_M,
          TILE_N, RUN)
  else:
    _copy(tile - k_tiles, value, v_cache, slots,
          (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
           v_col), rows, heads, v_cols, num_slots, page_size, FLAGS, TILE_M,
          TILE_N, RUN)


@triton.jit
def cache_cast(key, value, k_bytes, v_bytes, k_scale, v_scale, slots, k_start,
               k_page, k_run_offset, k_offset, k_split, k_head, k_run, k_col,
               v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
               v_col, k_scale_head, v_scale_head, rows, heads, k_cols, v_cols,
               num_slots, page_size, kind, flags, FLAGS: tl.constexpr,
               TILE_M: tl.constexpr, TILE_N: tl.constexpr, RUN: tl.constexpr,
               NATIVE: tl.constexpr):
  """Tokens divided by given scales, and rounded.

  As cache_copy. k_scale, v_scale: float32, one in all or one a head.
  """
  tile = tl.program_id(0)
  k_tiles = tl.cdiv(rows, TILE_M) * tl.cdiv(k_cols, TILE_N)
  if tile < k_tiles:
    _cast(tile, key, k_bytes, k_scale, slots,
          (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
           k_col), k_scale_head, rows, heads, k_cols, num_slots, page_size,
          kind, flags, flags, FLAGS, TILE_M, TILE_N, RUN, NATIVE)
  else:
    _cast(tile - k_tiles, value, v_bytes, v_scale, slots,
          (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
           v_col), v_scale_head, rows, heads, v_cols, num_slots, page_size,
          kind, flags >> V_SHIFT, flags, FLAGS, TILE_M, TILE_N, RUN, NATIVE)


@triton.jit
def _write_token(tile, rows_in, cache, scale, slots, side, scale_side, rows,
                 heads, cols, num_slots, page_size, floor, kind, flags, common,
                 TILE_M: tl.constexpr, COLS: tl.constexpr, RUN: tl.constexpr,
                 NATIVE: tl.constexpr):
  """A tile of whole rows of keys or values."""
  r = tile * TILE_M + tl.arange(0, TILE_M)
  c = tl.arange(0, COLS)[None, :]
  x = _load_wide(rows_in, r.to(tl.int64)[:, None], c, (r < rows)[:, None],
                 cols, flags, common, RUN)
  stored, page, offset, head = _places(slots, r, rows, heads, num_slots,
                                       page_size)
  s = _scale_of(tl.max(magnitude(x), 1), floor, kind, common)
  x = _codes(divide(x, s[:, None]), kind, NATIVE)
  base = _base(side, page, offset, head)
  _store(cache, x, side, base[:, None], c, stored[:, None], cols, flags, RUN)
  at = (scale_side[0] + page.to(tl.int64) * scale_side[1]
        + offset * scale_side[2] + head * scale_side[3])
  tl.store(scale + at, s, stored)


@triton.jit
def cache_token(key, value, k_bytes, v_bytes, k_scale, v_scale, slots,
                k_start, k_page, k_run_offset, k_offset, k_split, k_head,
                k_run, k_col, v_start, v_page, v_run_offset, v_offset, v_split,
                v_head, v_run, v_col, k_scale_start, k_scale_page,
                k_scale_offset, k_scale_head, v_scale_start, v_scale_page,
                v_scale_offset, v_scale_head, rows, heads, k_cols, v_cols,
                num_slots, page_size, floor, kind, flags, TILE_M: tl.constexpr,
                COLS: tl.constexpr, RUN: tl.constexpr, NATIVE: tl.constexpr):
  """Tokens with a scale of their own for each head.

  As cache_cast, of up to COLS columns; scales are written.
  """
  tile = tl.program_id(0)
  k_tiles = tl.cdiv(rows, TILE_M)
  if tile < k_tiles:
    _write_token(
        tile, key, k_bytes, k_scale, slots,
        (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
         k_col),
        (k_scale_start, k_scale_page, k_scale_offset, k_scale_head), rows,
        heads, k_cols, num_slots, page_size, floor, kind, flags, flags, TILE_M,
        COLS, RUN, NATIVE)
  else:
    _write_token(
        tile - k_tiles, value, v_bytes, v_scale, slots,
        (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
         v_col),
        (v_scale_start, v_scale_page, v_scale_offset, v_scale_head), rows,
        heads, v_cols, num_slots, page_size, floor, kind, flags >> V_SHIFT,
        flags, TILE_M, COLS, RUN, NATIVE)


@triton.jit
def _write_block(row, rows_in, cache, scale, slots, winners, side, scale_side,
                 heads, cols, num_slots, page_size, block, floor, kind, flags,
                 common, TILE_M: tl.constexpr, COLS: tl.constexpr,
                 RUN: tl.constexpr, NATIVE: tl.constexpr):
  """A head of a block, if this row's token is the first one written there."""
  token = row // heads
  head = row - token * heads
  slot = tl.load(slots + token)
  if (slot >= 0) & (slot < num_slots):
    number = slot // block
    first = number * block
    o = tl.arange(0, TILE_M)
    c = tl.arange(0, COLS)[None, :]
    earliest = block
    for o0 in range(0, block, TILE_M):
      winner = tl.load(winners + first + o0 + o, o0 + o < block, -1)
      earliest = tl.minimum(
          earliest, tl.min(tl.where(winner >= 0, o0 + o, block), 0))
    if (first + earliest == slot) & (tl.load(winners + slot) == token):
      m = tl.zeros([TILE_M], tl.int32)
      for o0 in range(0, block, TILE_M):
        winner = tl.load(winners + first + o0 + o, o0 + o < block, -1)
        r = winner.to(tl.int64) * heads + head
        x = _load_wide(rows_in, r[:, None], c, (winner >= 0)[:, None], cols,
                       flags, common, RUN)
        m = tl.maximum(m, tl.max(magnitude(x), 1))
      found = _scale_of(tl.zeros([1], tl.int32) + tl.max(m, 0), floor, kind,
                        common)
      at = (scale + scale_side[0] + number.to(tl.int64) * scale_side[1]
            + head * scale_side[3] + tl.zeros([1], tl.int32))
      old = tl.load(at)
      s = tl.where((earliest > 0) & (old > found), old, found)
      moved = tl.max(((earliest > 0) & (old != s)).to(tl.int32), 0) == 1
      # Every wave has read it before one writes.
      tl.debug_barrier()
      tl.store(at, s)
      for o0 in range(0, block, TILE_M):
        inside = o0 + o < block
        winner = tl.load(winners + first + o0 + o, inside, -1)
        written = winner >= 0
        r = winner.to(tl.int64) * heads + head
        x = _load_wide(rows_in, r[:, None], c, written[:, None], cols, flags,
                       common, RUN)
        place = first + o0 + o
        page = place // page_size
        base = _base(side, page, place - page * page_size, head)[:, None]
        if moved:
          held = _fetch(cache, side, base, c, (inside & ~written)[:, None],
                        cols, RUN, flags)
          tl.debug_barrier()
          before = _numbers(held, kind) * old[:, None]
          x = tl.where(written[:, None], x, before)
          written = inside
        x = _codes(divide(x, s[:, None]), kind, NATIVE)
        _store(cache, x, side, base, c, written[:, None], cols, flags, RUN)


@triton.jit
def cache_block(key, value, k_bytes, v_bytes, k_scale, v_scale, slots, winners,
                k_start, k_page, k_run_offset, k_offset, k_split, k_head,
                k_run, k_col, v_start, v_page, v_run_offset, v_offset, v_split,
                v_head, v_run, v_col, k_scale_start, k_scale_page,
                k_scale_head, v_scale_start, v_scale_page, v_scale_head, rows,
                heads, k_cols, v_cols, num_slots, page_size, block, floor,
                kind, flags, TILE_M: tl.constexpr, COLS: tl.constexpr,
                RUN: tl.constexpr, NATIVE: tl.constexpr):
  """Tokens with a scale for each block of slots and head.

  As cache_token. winners: int32 [num_slots], the token that a slot is given,
  or -1. Of a block's tokens the one of its first written slot does all the
  work, so that the result has no order.
  """
  row = tl.program_id(0)
  if row < rows:
    _write_block(
        row, key, k_bytes, k_scale, slots, winners,
        (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
         k_col), (k_scale_start, k_scale_page, 0, k_scale_head), heads, k_cols,
        num_slots, page_size, block, floor, kind, flags, flags, TILE_M, COLS,
        RUN, NATIVE)
  else:
    _write_block(
        row - rows, value, v_bytes, v_scale, slots, winners,
        (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
         v_col), (v_scale_start, v_scale_page, 0, v_scale_head), heads, v_cols,
        num_slots, page_size, block, floor, kind, flags >> V_SHIFT, flags,
        TILE_M, COLS, RUN, NATIVE)
