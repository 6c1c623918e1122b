# SPDX-License-Identifier: Apache-2.0
"""Writes of tokens into paged KV caches.

  cache_copy   numbers as they are
  cache_cast   divided by a given scale, and rounded to 8 bits
  cache_token  rounded with a scale of its own for each token and head, which
               is written too
  cache_block  rounded with a scale for each block of slots and head; what the
               block held is rounded anew if its scale grows

Keys and values are one launch: the first programs write keys. A tile is one
head of some tokens: whole pages of a sequence are written in few pieces then,
whatever the layout. Where a number lies in a cache is an affine function of
page, token, head and column; its coefficients are a `side`, a tuple in the
order of include/aiter/cache.h. RUN columns are 16 bytes of the cache. Where all
of them lie together at multiples of 16 bytes, coefficients count in runs (flag
RUNS): said so that the compiler sees it, and stores 16 bytes.
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
BESIDE = tl.constexpr(FEATURES["beside"])
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
def codes(x, kind, NATIVE: tl.constexpr):
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
  token = offset * side[2]
  if side[4] > 1:
    token = offset // side[4] * side[2] + offset % side[4] * side[3]
  return side[0] + page.to(tl.int64) * side[1] + token + head * side[5]


@triton.jit
def _scattered(side, base, c, RUN: tl.constexpr):
  return base + (c // RUN * side[6] + c % RUN * side[7])


@triton.jit
def _store(cache, x, side, base, c, mask, cols, flags, RUN: tl.constexpr):
  """x to the columns c behind base."""
  if RUNS & flags:
    width = cols // RUN * RUN
    at = base * RUN + (c // RUN * side[6] * RUN + c % RUN)
    tl.store(cache + at, x, mask & (c < width))
  elif BESIDE & flags:
    # Neighbouring lanes have what the last dimension has.
    at = _scattered(side, tl.trans(base), tl.trans(c), RUN)
    tl.store(cache + at, tl.trans(x), tl.trans(mask & (c < cols)))
  else:
    tl.store(cache + _scattered(side, base, c, RUN), x, mask & (c < cols))


@triton.jit
def _fetch(cache, side, base, c, mask, cols, RUN: tl.constexpr, flags):
  """What _store stored."""
  if RUNS & flags:
    width = cols // RUN * RUN
    at = base * RUN + (c // RUN * side[6] * RUN + c % RUN)
    x = tl.load(cache + at, mask & (c < width), 0)
  elif BESIDE & flags:
    at = _scattered(side, tl.trans(base), tl.trans(c), RUN)
    x = tl.trans(tl.load(cache + at, tl.trans(mask & (c < cols)), 0))
  else:
    x = tl.load(cache + _scattered(side, base, c, RUN), mask & (c < cols), 0)
  return x


@triton.jit
def _tile(tile, slots, tokens, heads, cols, TILE_M: tl.constexpr,
          TILE_N: tl.constexpr):
  """(rows, which are there, head, columns, slots) of a tile.

  Rows are in 64 bits; -1 is the slot of one that is not there.
  """
  tiles_n = tl.cdiv(cols, TILE_N)
  c = (tile % tiles_n * TILE_N + tl.arange(0, TILE_N))[None, :]
  head = tile // tiles_n % heads
  t = tile // tiles_n // heads * TILE_M + tl.arange(0, TILE_M)
  there = t < tokens
  slot = tl.load(slots + t, there, -1)
  return (t.to(tl.int64) * heads + head)[:, None], there[:, None], head, c, slot


@triton.jit
def _place(slot, num_slots, page_size):
  """(whether it is one, page, offset) of slots."""
  page = (slot.to(tl.uint32) // page_size.to(tl.uint32)).to(tl.int32)
  return (slot >= 0) & (slot < num_slots), page, slot - page * page_size


@triton.jit
def _copy(tile, rows_in, cache, slots, side, tokens, heads, cols, num_slots,
          page_size, flags, FLAGS: tl.constexpr, TILE_M: tl.constexpr,
          TILE_N: tl.constexpr, RUN: tl.constexpr):
  """A tile of keys or values as they are."""
  r, there, head, c, slot = _tile(tile, slots, tokens, heads, cols, TILE_M,
                                  TILE_N)
  places = FLAGS if FLAGS else flags
  x = _load(rows_in, r, c, there, cols, places, RUN)
  stored, page, offset = _place(slot, num_slots, page_size)
  base = _base(side, page, offset, head)
  _store(cache, x, side, base[:, None], c, stored[:, None], cols,
         places, RUN)


@triton.jit
def _cast(tile, rows_in, cache, scale, slots, side, scale_head, tokens, heads,
          cols, num_slots, page_size, kind, flags, types, FLAGS: tl.constexpr,
          TILE_M: tl.constexpr, TILE_N: tl.constexpr, RUN: tl.constexpr,
          NATIVE: tl.constexpr):
  """A tile of keys or values, divided by a given scale and rounded."""
  r, there, head, c, slot = _tile(tile, slots, tokens, heads, cols, TILE_M,
                                  TILE_N)
  places = FLAGS if FLAGS else flags
  x = _load_wide(rows_in, r, c, there, cols, places, types, RUN)
  if SCALED & flags:
    # Of one head, and so one number.
    s = tl.load(scale + head * scale_head + tl.zeros([1, 1], tl.int32))
    x = divide_by_any(x, s)
  stored, page, offset = _place(slot, num_slots, page_size)
  base = _base(side, page, offset, head)
  _store(cache, codes(x, kind, NATIVE), side, base[:, None], c,
         stored[:, None], cols, places, RUN)


@triton.jit
def cache_copy(key, value, k_cache, v_cache, slots, k_start, k_page,
               k_run_offset, k_offset, k_split, k_head, k_run, k_col, v_start,
               v_page, v_run_offset, v_offset, v_split, v_head, v_run, v_col,
               tokens, heads, k_cols, v_cols, num_slots, page_size, flags,
               FLAGS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
               RUN: tl.constexpr):
  """Tokens as they are.

  key, value: [tokens, heads, k_cols], [tokens, heads, v_cols]. slots: int32
  [tokens]. FLAGS: RUNS and ALIGNED if all calls of a row have them, or nothing.
  """
  tile = tl.program_id(0)
  k_tiles = tl.cdiv(tokens, TILE_M) * heads * tl.cdiv(k_cols, TILE_N)
  if tile < k_tiles:
    _copy(tile, key, k_cache, slots,
          (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
           k_col), tokens, heads, k_cols, num_slots, page_size, flags, FLAGS,
          TILE_M, TILE_N, RUN)
  else:
    _copy(tile - k_tiles, value, v_cache, slots,
          (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
           v_col), tokens, heads, v_cols, num_slots, page_size,
          flags >> V_SHIFT, FLAGS, TILE_M, TILE_N, RUN)


@triton.jit
def cache_cast(key, value, k_bytes, v_bytes, k_scale, v_scale, slots, k_start,
               k_page, k_run_offset, k_offset, k_split, k_head, k_run, k_col,
               v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
               v_col, k_scale_head, v_scale_head, tokens, heads, k_cols, v_cols,
               num_slots, page_size, kind, flags, FLAGS: tl.constexpr,
               TILE_M: tl.constexpr, TILE_N: tl.constexpr, RUN: tl.constexpr,
               NATIVE: tl.constexpr):
  """Tokens divided by given scales, and rounded.

  As cache_copy. k_scale, v_scale: float32, one in all or one a head.
  """
  tile = tl.program_id(0)
  k_tiles = tl.cdiv(tokens, TILE_M) * heads * tl.cdiv(k_cols, TILE_N)
  if tile < k_tiles:
    _cast(tile, key, k_bytes, k_scale, slots,
          (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
           k_col), k_scale_head, tokens, heads, k_cols, num_slots, page_size,
          kind, flags, flags, FLAGS, TILE_M, TILE_N, RUN, NATIVE)
  else:
    _cast(tile - k_tiles, value, v_bytes, v_scale, slots,
          (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
           v_col), v_scale_head, tokens, heads, v_cols, num_slots, page_size,
          kind, flags >> V_SHIFT, flags, FLAGS, TILE_M, TILE_N, RUN, NATIVE)


@triton.jit
def _write_token(tile, rows_in, cache, scale, slots, side, scale_side, tokens,
                 heads, cols, num_slots, page_size, floor, kind, flags, common,
                 TILE_M: tl.constexpr, COLS: tl.constexpr, RUN: tl.constexpr,
                 NATIVE: tl.constexpr):
  """A tile of whole rows of keys or values."""
  r, there, head, c, slot = _tile(tile, slots, tokens, heads, cols, TILE_M,
                                  COLS)
  x = _load_wide(rows_in, r, c, there, cols, flags, common, RUN)
  stored, page, offset = _place(slot, num_slots, page_size)
  s = _scale_of(tl.max(magnitude(x), 1), floor, kind, common)
  x = codes(divide(x, s[:, None]), kind, NATIVE)
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
                v_scale_offset, v_scale_head, tokens, heads, k_cols, v_cols,
                num_slots, page_size, floor, kind, flags, TILE_M: tl.constexpr,
                COLS: tl.constexpr, RUN: tl.constexpr, NATIVE: tl.constexpr):
  """Tokens with a scale of their own for each head.

  As cache_cast, of up to COLS columns; scales are written.
  """
  tile = tl.program_id(0)
  k_tiles = tl.cdiv(tokens, TILE_M) * heads
  if tile < k_tiles:
    _write_token(
        tile, key, k_bytes, k_scale, slots,
        (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
         k_col),
        (k_scale_start, k_scale_page, k_scale_offset, k_scale_head), tokens,
        heads, k_cols, num_slots, page_size, floor, kind, flags, flags, TILE_M,
        COLS, RUN, NATIVE)
  else:
    _write_token(
        tile - k_tiles, value, v_bytes, v_scale, slots,
        (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
         v_col),
        (v_scale_start, v_scale_page, v_scale_offset, v_scale_head), tokens,
        heads, v_cols, num_slots, page_size, floor, kind, flags >> V_SHIFT,
        flags, TILE_M, COLS, RUN, NATIVE)


@triton.jit
def _write_block(token, head, rows_in, cache, scale, slots, winners, side,
                 scale_side, heads, cols, num_slots, page_size, block, floor,
                 kind, flags, common, TILE_M: tl.constexpr, COLS: tl.constexpr,
                 RUN: tl.constexpr, NATIVE: tl.constexpr):
  """A head of a block, if this token is the first one written there."""
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
        _, page, offset = _place(place, num_slots, page_size)
        base = _base(side, page, offset, head)[:, None]
        if moved:
          held = _fetch(cache, side, base, c, (inside & ~written)[:, None],
                        cols, RUN, flags)
          tl.debug_barrier()
          before = _numbers(held, kind) * old[:, None]
          x = tl.where(written[:, None], x, before)
          written = inside
        x = codes(divide(x, s[:, None]), kind, NATIVE)
        _store(cache, x, side, base, c, written[:, None], cols, flags, RUN)


@triton.jit
def _write_blocks(part, rows_in, cache, scale, slots, winners, side, scale_side,
                  tokens, heads, cols, num_slots, page_size, block, step, floor,
                  kind, flags, common, TILE_M: tl.constexpr,
                  COLS: tl.constexpr, RUN: tl.constexpr, NATIVE: tl.constexpr):
  """A head of those blocks whose first token is one of `step` tokens."""
  head = part % heads
  i = tl.arange(0, TILE_M)
  t = part // heads * step + i
  slot = tl.load(slots + t, (i < step) & (t < tokens), -1)
  stored = (slot >= 0) & (slot < num_slots)
  # Most are told by the slot before theirs.
  before = tl.load(winners + slot - 1, stored & (slot % block > 0), -1)
  left = tl.sum(tl.where(stored & (before < 0), 1 << i, 0), 0)
  while left != 0:
    bit = left & -left
    left -= bit
    first = tl.sum(tl.where(bit > (1 << i), 1, 0), 0)
    _write_block(part // heads * step + first, head, rows_in, cache, scale,
                 slots, winners, side, scale_side, heads, cols, num_slots,
                 page_size, block, floor, kind, flags, common, TILE_M, COLS,
                 RUN, NATIVE)


@triton.jit
def cache_block(key, value, k_bytes, v_bytes, k_scale, v_scale, slots, winners,
                k_start, k_page, k_run_offset, k_offset, k_split, k_head,
                k_run, k_col, v_start, v_page, v_run_offset, v_offset, v_split,
                v_head, v_run, v_col, k_scale_start, k_scale_page,
                k_scale_head, v_scale_start, v_scale_page, v_scale_head, tokens,
                heads, k_cols, v_cols, num_slots, page_size, block, step,
                floor, kind, flags, TILE_M: tl.constexpr, COLS: tl.constexpr,
                RUN: tl.constexpr, NATIVE: tl.constexpr):
  """Tokens with a scale for each block of slots and head.

  As cache_token. winners: int32 [num_slots], the token that a slot is given,
  or -1. Of a block's tokens the one of its first written slot does all the
  work, so that the result has no order. step: tokens of a program, at most
  TILE_M.
  """
  part = tl.program_id(0)
  parts = tl.cdiv(tokens, step) * heads
  if part < parts:
    _write_blocks(
        part, key, k_bytes, k_scale, slots, winners,
        (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
         k_col), (k_scale_start, k_scale_page, 0, k_scale_head), tokens, heads,
        k_cols, num_slots, page_size, block, step, floor, kind, flags, flags,
        TILE_M, COLS, RUN, NATIVE)
  else:
    _write_blocks(
        part - parts, value, v_bytes, v_scale, slots, winners,
        (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
         v_col), (v_scale_start, v_scale_page, 0, v_scale_head), tokens, heads,
        v_cols, num_slots, page_size, block, step, floor, kind,
        flags >> V_SHIFT, flags, TILE_M, COLS, RUN, NATIVE)
