# SPDX-License-Identifier: Apache-2.0
"""What forward and backward attention share: flags, sequences, ranges, masks.

Positions: row i and key j count from the start of their own sequence. Row i
stands at key position i + offset, where offset is len_k - len_q (the last row
sees the last key) or 0 with TOP_LEFT.

Addresses: a base pointer moves in 64 bits to the first row of a tile; offsets
inside a tile are 32 bits, which holds for row strides below 2^22 elements.
"""

import triton
import triton.language as tl

# Bits of the argument `flags`; include/aiter/mha.h has the same list.
HAS_BIAS = tl.constexpr(1)
BIAS_F32 = tl.constexpr(2)
ALIBI = tl.constexpr(4)
SINK = tl.constexpr(8)
DROPOUT = tl.constexpr(16)
VARLEN = tl.constexpr(32)
CU_Q = tl.constexpr(64)
CU_K = tl.constexpr(128)
CU_Q_PAD = tl.constexpr(256)
CU_K_PAD = tl.constexpr(512)
TOP_LEFT = tl.constexpr(1024)
DLSE = tl.constexpr(2048)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Bounds of cut_edges are at least 2^99; every score is below EDGE_LIMIT, 2^98.
_HUGE = tl.constexpr(1.2676506002282294e30)
EDGE_LIMIT = tl.constexpr(3.1691265005705735e29)


@triton.jit
def assume_stride(stride):
  """Tells the compiler that offsets in a tile fit 31 bits (buffer loads)."""
  tl.assume(stride >= 0)
  tl.assume(stride < 4194304)


@triton.jit
def find_sequence(slot, cu_seqlens, batch, TILE: tl.constexpr):
  """Sequence and tile that own a grid slot of a packed batch.

  Sequence i owns the slots from cu_seqlens[i] // TILE + i on: never fewer than
  it has tiles, and known without a scan over the lengths before it.

  Returns:
    (index of the sequence, tile in it; the tile may lie past its end).
  """
  low = 0
  high = batch
  while high - low > 1:
    middle = (low + high) // 2
    if tl.load(cu_seqlens + middle) // TILE + middle <= slot:
      low = middle
    else:
      high = middle
  return low, slot - (tl.load(cu_seqlens + low) // TILE + low)


@triton.jit
def sequence_extent(
    index, cu_seqlens, cu_padded, rows, flags,
    CU: tl.constexpr, CU_PAD: tl.constexpr,
):
  """First row in memory and length of a sequence, held inside `rows`."""
  start = 0
  length = rows
  if flags & CU:
    begin = tl.load(cu_seqlens + index)
    length = tl.load(cu_seqlens + index + 1) - begin
    if flags & VARLEN:
      start = begin
      if flags & CU_PAD:
        start = tl.load(cu_padded + index)
  start = tl.minimum(tl.maximum(start, 0), rows)
  length = tl.minimum(tl.maximum(length, 0), rows - start)
  return start, length


@triton.jit
def load_tile(
    ptr, stride, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr,
):
  """A [ROWS, COLS] tile; what lies past `rows` or `cols` reads as zero."""
  r = tl.arange(0, ROWS)[:, None]
  c = tl.arange(0, COLS)[None, :]
  offsets = r * stride + c
  if CHECK_ROWS and CHECK_COLS:
    return tl.load(ptr + offsets, mask=(r < rows) & (c < cols), other=0.0)
  elif CHECK_ROWS:
    return tl.load(ptr + offsets, mask=r < rows, other=0.0)
  elif CHECK_COLS:
    return tl.load(ptr + offsets, mask=c < cols, other=0.0)
  else:
    return tl.load(ptr + offsets)


@triton.jit
def store_tile(
    ptr, value, stride, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
  """Stores the part of a [ROWS, COLS] tile inside `rows` and `cols`."""
  r = tl.arange(0, ROWS)[:, None]
  c = tl.arange(0, COLS)[None, :]
  tl.store(
      ptr + (r * stride + c), value.to(ptr.dtype.element_ty),
      mask=(r < rows) & (c < cols),
  )


@triton.jit
def load_rows(
    ptr, rows, other, ROWS: tl.constexpr, CHECK: tl.constexpr = True
):
  """ROWS consecutive numbers; those past `rows` read as `other`."""
  r = tl.arange(0, ROWS)
  if CHECK:
    return tl.load(ptr + r, mask=r < rows, other=other)
  else:
    return tl.load(ptr + r)


@triton.jit
def cast(x, dtype: tl.constexpr, CHEAP: tl.constexpr):
  """float32 to the input type.

  CHEAP is for targets without a bfloat16 conversion: it rounds halves away
  from zero (as exact as halves to even, a third of the instructions) and
  expects no NaN but the one that arithmetic makes.
  """
  if CHEAP and dtype == tl.bfloat16:
    bits = (x.to(tl.uint32, bitcast=True) + 0x8000) >> 16
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
  else:
    return x.to(dtype)


@triton.jit
def key_tiles(
    m0, m1, offset, len_k, left, right, sink_tokens,
    TILE_N: tl.constexpr, GENERAL: tl.constexpr,
):
  """Key tiles that rows m0 to m1 - 1 see.

  Returns:
    (sink, low, full_low, full_high, high): tiles full_low to full_high - 1 are
    visible to every row. Tiles 0 to sink - 1, low to full_low - 1 and full_high
    to high - 1 are visible in part. All others are dead.
  """
  last = tl.maximum(tl.minimum(len_k, m1 + offset + right), 0)
  high = tl.where(m1 > m0, (last + TILE_N - 1) // TILE_N, 0)
  low = tl.minimum(tl.maximum(m0 + offset - left, 0) // TILE_N, high)
  full_low = (tl.maximum(m1 - 1 + offset - left, 0) + TILE_N - 1) // TILE_N
  full_low = tl.minimum(tl.maximum(full_low, low), high)
  full_high = tl.maximum(
      tl.minimum(len_k, m0 + offset + right + 1), 0) // TILE_N
  full_high = tl.minimum(tl.maximum(full_high, full_low), high)
  sink = 0
  if GENERAL:
    sink = tl.minimum((sink_tokens + TILE_N - 1) // TILE_N, low)
  return sink, low, full_low, full_high, high


@triton.jit
def edge_tiles(
    m0, m1, offset, len_k, left, right, low, full_low, full_high, high,
    TILE_N: tl.constexpr,
):
  """Of key_tiles' partly visible tiles, those that one edge alone cuts.

  Returns:
    (edge_low, edge_high): tiles edge_low to full_low - 1 lie inside the
    sequence and only the window's left side cuts them, tiles full_high to
    edge_high - 1 only its right side.
  """
  inside = len_k // TILE_N
  first_uncut = (tl.maximum(m1 - 1 + offset - left, 0) + TILE_N - 1) // TILE_N
  last_uncut = tl.maximum(m0 + offset + right + 1, 0) // TILE_N
  one_edge = first_uncut <= last_uncut
  edge_low = tl.where(one_edge & (full_low <= inside), low, full_low)
  edge_high = tl.where(
      one_edge, tl.maximum(tl.minimum(high, inside), full_high), full_high)
  return edge_low, edge_high


@triton.jit
def row_tiles(
    n0, n1, offset, len_q, left, right, sink_tokens,
    TILE_M: tl.constexpr, GENERAL: tl.constexpr,
):
  """Row tiles that see keys n0 to n1 - 1: (low, full_low, full_high, high).

  Tiles full_low to full_high - 1 see every one of the keys and lie inside the
  sequence; the others from low to high - 1 see a part.
  """
  last = tl.minimum(len_q, n1 - offset + left)
  if GENERAL:
    last = tl.where(n0 < sink_tokens, len_q, last)
  last = tl.maximum(last, 0)
  high = tl.where(n1 > n0, (last + TILE_M - 1) // TILE_M, 0)
  low = tl.minimum(tl.maximum(n0 - offset - right, 0) // TILE_M, high)
  full_low = (tl.maximum(n1 - 1 - offset - right, 0) + TILE_M - 1) // TILE_M
  full_low = tl.minimum(tl.maximum(full_low, low), high)
  full_high = tl.maximum(
      tl.minimum(len_q, n0 - offset + left + 1), 0) // TILE_M
  full_high = tl.minimum(tl.maximum(full_high, full_low), high)
  return low, full_low, full_high, high


@triton.jit
def visible(
    rows, cols, offset, len_k, left, right, sink_tokens,
    GENERAL: tl.constexpr,
):
  """Whether row i sees key j; `rows` and `cols` broadcast to a tile."""
  last = tl.minimum(rows + offset + right, len_k - 1)
  mask = (cols <= last) & (cols >= rows + offset - left)
  if GENERAL:
    mask |= (cols <= last) & (cols < sink_tokens)
  return mask


@triton.jit
def _edge_bound(
    edge, direction, TILE_N: tl.constexpr, LANE_KEYS: tl.constexpr
):
  """(edge[r] - c) * direction, times 2^100, split as in cut_edges."""
  slope = -_HUGE * direction
  base = (edge.to(tl.float32) * direction + 0.5) * _HUGE
  LANES: tl.constexpr = 8 // LANE_KEYS
  c = (tl.arange(0, TILE_N // 8)[:, None, None] * 8
       + tl.arange(0, LANE_KEYS)[None, None, :])[None, :, :, :]
  lane = (tl.arange(0, LANES) * LANE_KEYS)[None, None, :, None]
  first = base[:, None, None, None] + lane.to(tl.float32) * slope
  return first + c.to(tl.float32) * slope


@triton.jit
def cut_edges(
    s, edge, direction, other_edge, BOTH: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, LANE_KEYS: tl.constexpr,
):
  """s, with a huge negative number where column c of row r is hidden.

  Hidden is where (edge[r] - c) * direction < 0 and, with BOTH, where
  c < other_edge[r]. The distance to an edge times 2^100 is a bound, far above
  every score on the visible side and far below on the other: a packed fma a
  pair and a minimum a score, half of what comparing and selecting take. Bounds
  that reach the row's maximum, through a NaN or in a row without any key, are
  beyond EDGE_LIMIT and so cannot be mistaken for a score.

  On CDNA a lane of a matrix instruction holds LANE_KEYS neighbouring keys of
  each 8. Split so, a column is a constant of the instruction plus a part of the
  lane. LANE_KEYS = 0, without packed fma, compares and selects.
  """
  if LANE_KEYS > 0:
    wide = tl.reshape(s, [TILE_M, TILE_N // 8, 8 // LANE_KEYS, LANE_KEYS])
    bound = _edge_bound(edge, direction, TILE_N, LANE_KEYS)
    if BOTH:
      other = _edge_bound(other_edge, -1.0, TILE_N, LANE_KEYS)
    else:
      # A third operand that never wins: a minimum of three is one instruction,
      # where a minimum of two first has to quiet NaNs.
      other = 3.0e38
    wide = tl.minimum(tl.minimum(wide, bound), other)
    s = tl.reshape(wide, [TILE_M, TILE_N])
  else:
    c = tl.arange(0, TILE_N)[None, :]
    if BOTH:
      seen = (c <= edge[:, None]) & (c >= other_edge[:, None])
    else:
      seen = (edge[:, None] - c) * direction >= 0
    s = tl.where(seen, s, -_HUGE)
  return s


@triton.jit
def soft_cap(s, cap):
  """cap * tanh(s / cap)."""
  x = tl.abs(s) * (1.0 / cap)
  e = tl.exp2(x * (-2.0 * LOG2E))
  # Near zero 1 - e cancels; two terms of the series are exact to 2e-7 there.
  t = tl.where(x < 0.03, x - x * x * x * (1.0 / 3.0), (1.0 - e) / (1.0 + e))
  return tl.where(s < 0, -cap, cap) * t


@triton.jit
def add_bias(
    s, bias, bias_f32, stride_bias, m0, n0, rows_left, cols_left,
    flags, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
  """s plus the bias tile at row m0, key n0; bases stand at the (b, h) plane."""
  r = tl.arange(0, TILE_M)[:, None]
  c = tl.arange(0, TILE_N)[None, :]
  mask = (r < rows_left) & (c < cols_left)
  first = m0.to(tl.int64) * stride_bias + n0
  if flags & BIAS_F32:
    s += tl.load(
        bias_f32 + first + (r * stride_bias + c), mask=mask, other=0.0)
  else:
    s += tl.load(
        bias + first + (r * stride_bias + c), mask=mask, other=0.0
    ).to(tl.float32)
  return s


@triton.jit
def keep_scale(
    m0, n0, key0, key1, batch_counter, head_counter, drop_threshold, rp_keep,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
  """[TILE_M, TILE_N]: 1 / (1 - p) where dropout keeps, 0 where it drops.

  One Philox4x32-10 block gives the words of four neighbouring keys: counter
  (key // 4, row, head, batch), word key % 4.
  """
  rows = (m0 + tl.arange(0, TILE_M)).to(tl.uint32)[:, None]
  blocks = (n0 // 4 + tl.arange(0, TILE_N // 4)).to(tl.uint32)[None, :]
  zero = tl.zeros([TILE_M, TILE_N // 4], tl.uint32)
  w0, w1, w2, w3 = tl.philox_impl(
      zero + blocks, zero + rows, zero + head_counter, zero + batch_counter,
      key0, key1)
  words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
  words = tl.reshape(words, [TILE_M, TILE_N])
  keep = words >= drop_threshold.to(tl.uint32, bitcast=True)
  return tl.where(keep, rp_keep, 0.0)
