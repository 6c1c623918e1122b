# SPDX-License-Identifier: Apache-2.0
"""Writes of 8 bits into paged KV caches, for CDNA and sm_90.

What is computed is what write.py says, of heads of COLS columns in 16 bits, or
of a smaller multiple of 16 (not EXACT), rounded to int8 or to what one
instruction makes. As many programs as run at once take tiles in turn, so that
some read while others write. A tile is TILE_M tokens of a head: of CDNA's
(OPAQUE) one wave's, which needs no barriers. On sm_90 several warps have it,
and what is no run of slots they take in PARTs of columns: whole rows of its
addresses would leave room for half of the programs.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.cache import write
from third_party.aiter.kernels.core import narrow, rounding

POWER = write.POWER
RUNS = write.RUNS
SCALED = write.SCALED
V_SHIFT = write.V_SHIFT
base_of = write._base
bytes_of = narrow.bytes_of
divide = rounding.divide
divide_short = narrow.divide_short
fetch = write._fetch
largest = rounding.largest
magnitude = rounding.magnitude
numbers = write._numbers
place_of = write._place
scale_of = write._scale_of
words = narrow.words

INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _now(x, tile, OPAQUE: tl.constexpr):
  """x, which the compiler does not have before there is a tile.

  What all tiles' addresses share would fill registers through the loop.
  """
  if OPAQUE:
    x = tl.inline_asm_elementwise(
        "", "=s,0,s", [x, tile], dtype=tl.int32, is_pure=True, pack=1)
  return x


@triton.jit
def _both(mask, c, left, EXACT: tl.constexpr):
  """The mask (None: all), of the columns c of which `left` are there."""
  if EXACT:
    return mask
  elif mask is None:
    return c < left
  else:
    return mask & (c < left)


@triton.jit
def _store(cache, x, side, base, mask, tile, left, flags, COLS: tl.constexpr,
           EXACT: tl.constexpr, OPAQUE: tl.constexpr):
  """words_of columns behind base of each row, of which `left` are there."""
  if RUNS & flags:
    w = tl.arange(0, COLS // 4)
    tl.store(
        cache.to(tl.pointer_type(tl.uint32)) + (
            base[:, None] * 4 + (w // 4 * side[6] * 4 + w % 4)[None, :]),
        x, _both(mask[:, None], w[None, :], left // 4, EXACT))
  else:
    # Neighbouring lanes have what the last dimension has.
    run = _now(side[6], tile, OPAQUE)
    col = _now(side[7], tile, OPAQUE)
    c = tl.arange(0, COLS)
    tl.store(cache + (base[None, :] + (c // 16 * run + c % 16 * col)[:, None]),
             tl.trans(bytes_of(x)), _both(mask[None, :], c[:, None], left,
                                          EXACT))


@triton.jit
def _tile(tile, slots, tokens, heads, num_slots, page_size,
          TILE_M: tl.constexpr):
  """(first token, head, rows' places behind it; whether a row is stored, and
  its page and offset) of a tile. A token that is not there is the last one."""
  t = tile // heads
  head = tile - t * heads
  t *= TILE_M
  m = tl.arange(0, TILE_M)
  last = tokens - 1 - t
  m_there = tl.minimum(m, last)
  slot = tl.load(slots + t + m_there)
  stored, page, offset = place_of(slot, num_slots, page_size)
  return t, head, m_there, stored & (m <= last), page, offset


@triton.jit
def _rows(rows_in, first, at, mask, width, C: tl.constexpr, COLS: tl.constexpr,
          HALF: tl.constexpr, EXACT: tl.constexpr):
  """COLS columns from C on; 0 where the mask is not, and where rows end.

  first: one of the rows, which have `width` columns; at: the others, from
  there on.
  """
  TYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
  rows_in = rows_in.to(tl.pointer_type(TYPE)) + (first * width + C)
  c = tl.arange(0, COLS)[None, :]
  at = (at * width)[:, None] + c
  if mask is not None:
    mask = mask[:, None]
  mask = _both(mask, c, width - C, EXACT)
  if mask is None:
    x = tl.load(rows_in + at)
  else:
    x = tl.load(rows_in + at, mask, 0.0)
  return x


@triton.jit
def _width(cols, COLS: tl.constexpr, EXACT: tl.constexpr):
  if EXACT:
    width = COLS
  else:
    width = cols // 16 * 16  # Says so to the compiler.
  return width


@triton.jit
def _found(most, top, floor, kind, types):
  """write._scale_of, of magnitudes that are finite: without divisions.

  floor: also at least AMAX_FLOOR. top: the kind's largest number.
  """
  amax = tl.maximum(most.to(tl.float32, bitcast=True), floor)
  s = divide(amax, tl.full([1], top, tl.float32))
  if POWER & types:
    up = (s.to(tl.int32, bitcast=True) + 0x7FFFFF) & INFINITY
    s = up.to(tl.float32, bitcast=True)
  return s


@triton.jit
def _uniform(x, OPAQUE: tl.constexpr):
  """x, of which the compiler then knows that all lanes have the same."""
  if OPAQUE:
    # Until then no instruction of memory must have the register in an address.
    x = tl.inline_asm_elementwise(
        "v_readfirstlane_b32 $0, $1\ns_nop 4", "=s,v", [x], dtype=tl.int32,
        is_pure=True, pack=1)
  return x


@triton.jit
def _ahead(tile, rows_in, row, slots, tokens, heads, width, COLS: tl.constexpr,
           HALF: tl.constexpr, EXACT: tl.constexpr):
  """(slots, rows) of a tile, of `row` behind its first token.

  The slot of a token that is not there is -1, and its row the last one's.
  """
  TILE_M: tl.constexpr = row.shape[0]
  t = tile // heads
  head = tile - t * heads
  t *= TILE_M
  m = tl.arange(0, TILE_M)
  slot = tl.load(slots + t + m, m < tokens - t, -1)
  at = tl.minimum(row, tokens - 1 - t) * heads
  return slot, _rows(rows_in, t.to(tl.int64) * heads + head, at, None, width,
                     0, COLS, HALF, EXACT)


@triton.jit
def _first(slot, side, num_slots, page_size, OPAQUE: tl.constexpr):
  """The first of a tile's slots if they are a run of a page, or -1.

  Such a run begins at a multiple of its length.
  """
  TILE_M: tl.constexpr = slot.shape[0]
  m = tl.arange(0, TILE_M)
  first = _uniform(tl.min(slot - m, 0), OPAQUE)
  split = tl.where(side[4] > 1, side[4], TILE_M)
  is_run = (first == _uniform(tl.max(slot - m, 0), OPAQUE)) & (
      first <= num_slots - TILE_M) & (
          (first | page_size | split) % TILE_M == 0)
  return tl.where(is_run, first, -1)


@triton.jit
def _write_runs(rows_in, cache, scale, slots, winners, side, scale_side, tokens,
                heads, width, num_slots, page_size, floor, top, kind, flags,
                types, SCALES: tl.constexpr, TILE_M: tl.constexpr,
                COLS: tl.constexpr, CAST: tl.constexpr, HALF: tl.constexpr,
                EXACT: tl.constexpr, OPAQUE: tl.constexpr):
  """Tiles of a program up to the first that is not a _first run of slots.

  Most are, of a prompt. Of such a run addresses are one number and what all
  tiles share, and tokens that lie beside each other are stored together. Nor
  is there anything to compare, cut or look up, if numbers are in the type's
  range and, of a block, it is written once. Returns that first tile.
  """
  W: tl.constexpr = TILE_M // 4
  m = tl.arange(0, TILE_M)
  # Of tokens beside each other a thread gets four neighbours: the first ones
  # of all fours are the first rows, then come the second ones.
  is_beside = (RUNS & flags) == 0
  row = tl.where(is_beside, m % W * 4 + m // W, m)
  word = tl.arange(0, COLS // 4)
  c = tl.arange(0, COLS)
  next_token = tl.where(side[4] > 1, side[3], side[2])
  wide = cache.to(tl.pointer_type(tl.uint32))
  tile = tl.program_id(0)
  slot, x = _ahead(tile, rows_in, row, slots, tokens, heads, width, COLS, HALF,
                   EXACT)
  first = _first(slot, side, num_slots, page_size, OPAQUE)
  while first >= 0:
    t = tile // heads
    head = tile - t * heads
    t *= TILE_M
    now = x.to(tl.float32)
    if SCALES == "block":  # Before the next rows, or it would wait for them.
      winner = tl.load(winners + first + m)
    slot, x = _ahead(tile + tl.num_programs(0), rows_in, row, slots, tokens,
                     heads, width, COLS, HALF, EXACT)
    _, page, offset = place_of(first, num_slots, page_size)
    begin = base_of(side, page, offset, head)
    at = scale_side[0] + head * scale_side[3]
    s = 1.0
    limit = INFINITY
    bits = magnitude(now)
    if SCALES == "given":
      if SCALED & flags:
        s = tl.load(scale + at)
      largest_now = largest(kind)
      low = tl.where(kind == rounding.INT8, -128.0, -largest_now)
      nan = tl.where(kind == rounding.INT8, 0.0, float("nan"))
      most = tl.max(tl.reshape(bits, [TILE_M * COLS], can_reorder=True), 0)
      # What saturates is cut before, where it cannot overflow.
      if _uniform(most, OPAQUE) > (s * largest_now).to(tl.int32, bitcast=True):
        now = tl.where(now == now, tl.clamp(now, s * low, s * largest_now), nan)
      # No magnitude is below 0, and so none of another scale is taken.
      most = 0
      limit = tl.where((s >= 2.0**-60) & (s <= 2.0**100), INFINITY, 0)
      s = tl.full([1], s, tl.float32)
    elif SCALES == "token":
      at += page.to(tl.int64) * scale_side[1] + offset * scale_side[2]
      each = tl.max(bits, 1)
      most = tl.max(each, 0)
      s = _found(each, top, floor, kind, types)
    else:
      at += (first // TILE_M).to(tl.int64) * scale_side[1]
      most = tl.max(tl.max(bits, 1), 0)
      s = _found(tl.zeros([1], tl.int32) + most, top, floor, kind, types)
      # Who is not the last to write to its slot leaves the block.
      most = tl.maximum(most, tl.max(tl.where(winner == t + m, 0, limit), 0))
    if SCALES != "given":
      most = _uniform(most, OPAQUE)
    if (most < limit) & (
        (begin | side[6] | side[7]) % tl.where(is_beside, 16, 1) == 0):
      q = divide_short(now, s[:, None], CAST)
      if is_beside:
        fours = tl.permute(tl.reshape(q, [4, W, COLS]), (2, 1, 0))
        cols = (c // 16 * (side[6] // 16) + c % 16 * (side[7] // 16)) * 4
        fours = words(tl.reshape(fours, [COLS, TILE_M]), kind, CAST, True)
        beside = cols[:, None] + tl.arange(0, W)[None, :]
        tl.store(wide + begin // 16 * 4 + beside, fours,
                 _both(None, c[:, None], width, EXACT))
      else:
        to = (m * next_token * 4)[:, None] + (
            word // 4 * side[6] * 4 + word % 4)[None, :]
        tl.store(wide + begin * 4 + to, words(q, kind, CAST, True),
                 _both(None, word[None, :], width // 4, EXACT))
      if SCALES == "token":
        tl.store(scale + at + row * scale_side[2], s)
      elif SCALES == "block":
        tl.store(scale + at + tl.zeros([1], tl.int32), s)
      tile += tl.num_programs(0)
      first = _first(slot, side, num_slots, page_size, OPAQUE)
    else:
      first = tl.minimum(first, -1)
  return tile


@triton.jit
def _write_given(rows_in, cache, scale, slots, side, scale_head, tokens, heads,
                 cols, num_slots, page_size, kind, flags, types,
                 TILE_M: tl.constexpr, COLS: tl.constexpr, CAST: tl.constexpr,
                 HALF: tl.constexpr, EXACT: tl.constexpr,
                 OPAQUE: tl.constexpr):
  """All tiles of keys or values of a program, divided by a given scale."""
  PART: tl.constexpr = COLS if OPAQUE else (COLS + 63) // 64 * 16
  width = _width(cols, COLS, EXACT)
  tiles = tl.where(cols > 0, tl.cdiv(tokens, TILE_M) * heads, 0)
  left = tl.program_id(0)
  if left < tiles:
    left = _write_runs(rows_in, cache, scale, slots, slots, side,
                       (0, 0, 0, scale_head), tokens, heads, width, num_slots,
                       page_size, 0.0, 1.0, kind, flags, types, "given",
                       TILE_M, COLS, CAST, HALF, EXACT, OPAQUE)
  for tile in range(left, tiles, tl.num_programs(0)):
    t, head, m, stored, page, offset = _tile(
        tile, slots, tokens, heads, num_slots, page_size, TILE_M)
    base = base_of(side, page, offset, head)
    s = 1.0
    if SCALED & flags:
      s = tl.load(scale + head * scale_head)
    for c in tl.static_range(0, COLS, PART):
      x = _rows(rows_in, t.to(tl.int64) * heads + head, m * heads, None, width,
                c, PART, HALF, EXACT).to(tl.float32)
      if (s >= 2.0**-60) & (s <= 2.0**100):
        # What saturates is cut before, where it cannot overflow.
        top = largest(kind)
        low = tl.where(kind == rounding.INT8, -128.0, -top)
        nan = tl.where(kind == rounding.INT8, 0.0, float("nan"))
        x = tl.where(x == x, tl.clamp(x, s * low, s * top), nan)
        q = divide_short(x, tl.full([1, 1], s, tl.float32), CAST)
        q = words(q, kind, CAST, True)
      else:
        q = words(tl.div_rn(x, tl.full(x.shape, s, tl.float32)), kind, CAST,
                  False)
      _store(cache, q, side, base + c // 16 * side[6], stored, tile, width - c,
             flags, PART, EXACT, OPAQUE)


@triton.jit
def cache_cast(key, value, k_bytes, v_bytes, k_scale, v_scale, slots, k_start,
               k_page, k_run_offset, k_offset, k_split, k_head, k_run, k_col,
               v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
               v_col, k_scale_head, v_scale_head, tokens, heads, k_cols, v_cols,
               num_slots, page_size, kind, flags, TILE_M: tl.constexpr,
               COLS: tl.constexpr, CAST: tl.constexpr, HALF: tl.constexpr,
               EXACT: tl.constexpr, OPAQUE: tl.constexpr):
  """As write.cache_cast. Grid: (programs, keys and values)."""
  if tl.program_id(1) == 0:
    _write_given(
        key, k_bytes, k_scale, slots,
        (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
         k_col), k_scale_head, tokens, heads, k_cols, num_slots, page_size,
        kind, flags, flags, TILE_M, COLS, CAST, HALF, EXACT, OPAQUE)
  else:
    _write_given(
        value, v_bytes, v_scale, slots,
        (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
         v_col), v_scale_head, tokens, heads, v_cols, num_slots, page_size,
        kind, flags >> V_SHIFT, flags, TILE_M, COLS, CAST, HALF, EXACT, OPAQUE)


@triton.jit
def _write_tokens(rows_in, cache, scale, slots, side, scale_side, tokens, heads,
                  width, num_slots, page_size, floor, top, kind, flags, types,
                  TILE_M: tl.constexpr, COLS: tl.constexpr, CAST: tl.constexpr,
                  HALF: tl.constexpr, EXACT: tl.constexpr,
                  OPAQUE: tl.constexpr):
  """All tiles of keys or values of a program, each row with its scale."""
  PART: tl.constexpr = COLS if OPAQUE else (COLS + 63) // 64 * 16
  tiles = tl.cdiv(tokens, TILE_M) * heads
  left = _write_runs(rows_in, cache, scale, slots, slots, side, scale_side,
                     tokens, heads, width, num_slots, page_size, floor, top,
                     kind, flags, types, "token", TILE_M, COLS, CAST, HALF,
                     EXACT, OPAQUE)
  for tile in range(left, tiles, tl.num_programs(0)):
    t, head, m, stored, page, offset = _tile(
        tile, slots, tokens, heads, num_slots, page_size, TILE_M)
    base = base_of(side, page, offset, head)
    most = tl.zeros([TILE_M], tl.int32)
    parts = ()
    for c in tl.static_range(0, COLS, PART):
      parts += (_rows(rows_in, t.to(tl.int64) * heads + head, m * heads, None,
                      width, c, PART, HALF, EXACT),)
      most = tl.maximum(
          most, tl.max(magnitude(parts[c // PART].to(tl.float32)), 1))
    finite = tl.max(most, 0) < INFINITY
    s = tl.zeros([TILE_M], tl.float32)
    if finite:
      s = _found(most, top, floor, kind, types)
    else:
      s = scale_of(most, floor, kind, types)
    for c in tl.static_range(0, COLS, PART):
      x = parts[c // PART].to(tl.float32)
      if finite:
        q = words(divide_short(x, s[:, None], CAST), kind, CAST, True)
      else:
        q = words(divide(x, s[:, None]), kind, CAST, False)
      _store(cache, q, side, base + c // 16 * side[6], stored, tile, width - c,
             flags, PART, EXACT, OPAQUE)
    at = (scale_side[0] + page.to(tl.int64) * scale_side[1]
          + offset * scale_side[2] + head * scale_side[3])
    tl.store(scale + at, s, stored)


@triton.jit
def cache_token(key, value, k_bytes, v_bytes, k_scale, v_scale, slots,
                k_start, k_page, k_run_offset, k_offset, k_split, k_head,
                k_run, k_col, v_start, v_page, v_run_offset, v_offset, v_split,
                v_head, v_run, v_col, k_scale_start, k_scale_page,
                k_scale_offset, k_scale_head, v_scale_start, v_scale_page,
                v_scale_offset, v_scale_head, tokens, heads, k_cols, num_slots,
                page_size, floor, kind, flags, TILE_M: tl.constexpr,
                COLS: tl.constexpr, CAST: tl.constexpr, HALF: tl.constexpr,
                EXACT: tl.constexpr, OPAQUE: tl.constexpr):
  """As write.cache_token. Grid: (programs, keys and values)."""
  top = largest(kind)
  floor = tl.maximum(floor, rounding.AMAX_FLOOR)
  width = _width(k_cols, COLS, EXACT)
  if tl.program_id(1) == 0:
    _write_tokens(
        key, k_bytes, k_scale, slots,
        (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
         k_col),
        (k_scale_start, k_scale_page, k_scale_offset, k_scale_head), tokens,
        heads, width, num_slots, page_size, floor, top, kind, flags, flags,
        TILE_M, COLS, CAST, HALF, EXACT, OPAQUE)
  else:
    _write_tokens(
        value, v_bytes, v_scale, slots,
        (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
         v_col),
        (v_scale_start, v_scale_page, v_scale_offset, v_scale_head), tokens,
        heads, width, num_slots, page_size, floor, top, kind, flags >> V_SHIFT,
        flags, TILE_M, COLS, CAST, HALF, EXACT, OPAQUE)


@triton.jit
def _write_block(token, slot, head, rows_in, cache, scale, winners, side,
                 scale_side, heads, width, num_slots, page_size, floor, top,
                 kind, flags, types, TILE_M: tl.constexpr, COLS: tl.constexpr,
                 CAST: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr,
                 OPAQUE: tl.constexpr):
  """A head of a block, if this token is the first one written there."""
  o = tl.arange(0, TILE_M)
  number = slot // TILE_M
  place = number * TILE_M + o
  winner = tl.load(winners + place)
  written = winner >= 0
  earliest = tl.min(tl.where(written, o, TILE_M), 0)
  if (tl.sum(tl.where(place == slot, winner, 0), 0) == token) & (
      number * TILE_M + earliest == slot):
    # Half of the columns at a time: all need more registers than a run of slots
    # does, and fewer programs would have room.
    PART: tl.constexpr = COLS // 2 if OPAQUE else (COLS + 63) // 64 * 16
    rows = tl.maximum(winner, 0).to(tl.int64) * heads
    most = tl.zeros([1], tl.int32)
    parts = ()
    for c in tl.static_range(0, COLS, PART):
      parts += (_rows(rows_in, head, rows, written, width, c, PART, HALF,
                      EXACT),)
      bits = magnitude(parts[c // PART].to(tl.float32))
      most = tl.maximum(most, tl.max(tl.max(bits, 1), 0))
    at = (scale + scale_side[0] + number.to(tl.int64) * scale_side[1]
          + head * scale_side[3] + tl.zeros([1], tl.int32))
    old = tl.load(at)
    finite = tl.max(most, 0) < INFINITY
    s = tl.zeros([1], tl.float32)
    if finite:
      s = _found(most, top, floor, kind, types)
    else:
      s = scale_of(most, floor, kind, types)
    s = tl.where((earliest > 0) & (old > s), old, s)
    moved = tl.max(((earliest > 0) & (old != s)).to(tl.int32), 0) == 1
    if not OPAQUE:  # Every warp has read it before one writes.
      tl.debug_barrier()
    tl.store(at, s)
    _, page, offset = place_of(place, num_slots, page_size)
    base = base_of(side, page, offset, head)
    stored = tl.where(moved, o >= 0, written)
    for c in tl.static_range(0, COLS, PART):
      there = base + c // 16 * side[6]
      x = parts[c // PART].to(tl.float32)
      if moved:
        now = (0, 0, 0, 0, 0, 0, _now(side[6], token, OPAQUE),
               _now(side[7], token, OPAQUE))
        held = fetch(cache, now, there[:, None], tl.arange(0, PART)[None, :],
                     ~written[:, None], PART if EXACT else width - c, 16, flags)
        if not OPAQUE:
          tl.debug_barrier()
        x = tl.where(written[:, None], x, numbers(held, kind) * old[:, None])
      if finite & ~moved & (tl.max(s, 0) <= 2.0**125):
        q = words(divide_short(x, s[:, None], CAST), kind, CAST, True)
      else:
        q = words(divide(x, s[:, None]), kind, CAST, False)
      _store(cache, q, side, there, stored, token, width - c, flags, PART,
             EXACT, OPAQUE)


@triton.jit
def _write_blocks(rows_in, cache, scale, slots, winners, side, scale_side,
                  tokens, heads, width, num_slots, page_size, floor, top, kind,
                  flags, types, TILE_M: tl.constexpr, COLS: tl.constexpr,
                  CAST: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr,
                  OPAQUE: tl.constexpr):
  """All blocks of keys or values that begin with a token of a program."""
  tiles = tl.cdiv(tokens, TILE_M) * heads
  left = _write_runs(rows_in, cache, scale, slots, winners, side, scale_side,
                     tokens, heads, width, num_slots, page_size, floor, top,
                     kind, flags, types, "block", TILE_M, COLS, CAST, HALF,
                     EXACT, OPAQUE)
  m = tl.arange(0, TILE_M)
  for tile in range(left, tiles, tl.num_programs(0)):
    t = tile // heads
    head = tile - t * heads
    t *= TILE_M
    slot = tl.load(slots + t + m, m < tokens - t, -1)
    stored = (slot >= 0) & (slot < num_slots)
    # Most are told by the slot before theirs.
    before = tl.load(winners + slot - 1, stored & (slot % TILE_M > 0), -1)
    left = tl.sum(tl.where(stored & (before < 0), 1 << m, 0), 0)
    while left != 0:
      bit = left & -left
      left -= bit
      one = bit == (1 << m)
      _write_block(
          t + tl.sum(tl.where(one, m, 0), 0), tl.sum(tl.where(one, slot, 0), 0),
          head, rows_in, cache, scale, winners, side, scale_side, heads, width,
          num_slots, page_size, floor, top, kind, flags, types, TILE_M, COLS,
          CAST, HALF, EXACT, OPAQUE)


@triton.jit
def cache_block(key, value, k_bytes, v_bytes, k_scale, v_scale, slots, winners,
                k_start, k_page, k_run_offset, k_offset, k_split, k_head,
                k_run, k_col, v_start, v_page, v_run_offset, v_offset, v_split,
                v_head, v_run, v_col, k_scale_start, k_scale_page,
                k_scale_head, v_scale_start, v_scale_page, v_scale_head, tokens,
                heads, k_cols, num_slots, page_size, floor, kind, flags,
                TILE_M: tl.constexpr, COLS: tl.constexpr, CAST: tl.constexpr,
                HALF: tl.constexpr, EXACT: tl.constexpr, OPAQUE: tl.constexpr):
  """As write.cache_block, of blocks of TILE_M slots.

  A block's new numbers stay in registers, from its scale to its codes. Grid:
  (programs, keys and values).
  """
  top = largest(kind)
  floor = tl.maximum(floor, rounding.AMAX_FLOOR)
  width = _width(k_cols, COLS, EXACT)
  if tl.program_id(1) == 0:
    _write_blocks(
        key, k_bytes, k_scale, slots, winners,
        (k_start, k_page, k_run_offset, k_offset, k_split, k_head, k_run,
         k_col), (k_scale_start, k_scale_page, 0, k_scale_head), tokens, heads,
        width, num_slots, page_size, floor, top, kind, flags, flags, TILE_M,
        COLS, CAST, HALF, EXACT, OPAQUE)
  else:
    _write_blocks(
        value, v_bytes, v_scale, slots, winners,
        (v_start, v_page, v_run_offset, v_offset, v_split, v_head, v_run,
         v_col), (v_scale_start, v_scale_page, 0, v_scale_head), tokens, heads,
        width, num_slots, page_size, floor, top, kind, flags >> V_SHIFT, flags,
        TILE_M, COLS, CAST, HALF, EXACT, OPAQUE)
