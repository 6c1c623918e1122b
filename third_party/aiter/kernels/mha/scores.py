# SPDX-License-Identifier: Apache-2.0
"""What forward and backward attention share: flags, sequences, ranges, masks.

Positions: row i and key j count from the start of their own sequence. Row i
stands at key position i + offset, where offset is len_k - len_q (the last row
sees the last key) or 0 with TOP_LEFT.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.mha import parts
from third_party.aiter.kernels.mha.family import FEATURES
from third_party.aiter.kernels.mha.family import MAYBE as _MAYBE

# Bits of the argument `flags`.
HAS_BIAS = tl.constexpr(FEATURES["bias"])
BIAS_F32 = tl.constexpr(FEATURES["bias_f32"])
ALIBI = tl.constexpr(FEATURES["alibi"])
SINK = tl.constexpr(FEATURES["sink"])
DROPOUT = tl.constexpr(FEATURES["dropout"])
PACKED = tl.constexpr(FEATURES["packed"])
CU_SEQLENS_Q = tl.constexpr(FEATURES["cu_seqlens_q"])
CU_SEQLENS_K = tl.constexpr(FEATURES["cu_seqlens_k"])
CU_SEQLENS_Q_PADDED = tl.constexpr(FEATURES["cu_seqlens_q_padded"])
CU_SEQLENS_K_PADDED = tl.constexpr(FEATURES["cu_seqlens_k_padded"])
TOP_LEFT = tl.constexpr(FEATURES["top_left"])
DLSE = tl.constexpr(FEATURES["dlse"])
# And what no kernel is told of, but a row may be made for.
SOFT_CAP = tl.constexpr(FEATURES["soft_cap"])
SINK_TOKENS = tl.constexpr(FEATURES["sink_tokens"])
HAS_MASK = tl.constexpr(FEATURES["mask"])
# A float32 bias of one row for all, which is -inf where the mask hides.
ONE_ROW = tl.constexpr(FEATURES["one_row"])
MAYBE = tl.constexpr(_MAYBE)
# What changes a score, and what may hide a key from it.
OF_SCORES = tl.constexpr(FEATURES["soft_cap"] | FEATURES["bias"]
                         | FEATURES["mask"] | FEATURES["alibi"])
HIDES = tl.constexpr(FEATURES["bias"] | FEATURES["mask"])

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Bounds of _cut_edges are at least 2^99; every score is below EDGE_LIMIT, 2^98,
# but one with a bias, which may be anything.
_HUGE = tl.constexpr(1.2676506002282294e30)
EDGE_LIMIT = tl.constexpr(3.1691265005705735e29)


class Sequence(NamedTuple):
  """Where a sequence lies, and how its rows and keys face each other.

  start is its first row in memory, len the number of its rows (0 of q if it is
  skipped), rows those that programs answer for: a dense batch's padding too.
  """
  q_start: tl.tensor
  q_rows: tl.tensor
  len_q: tl.tensor
  k_start: tl.tensor
  k_rows: tl.tensor
  len_k: tl.tensor


class Keys(NamedTuple):
  """Keys and values of a sequence's head."""
  k: tl.tensor
  stride_k: tl.tensor
  hdim_q: tl.tensor
  v: tl.tensor
  stride_v: tl.tensor
  hdim_v: tl.tensor


class Window(NamedTuple):
  """What a row sees: so many keys to either side, and leading keys.

  Row i stands at key i + offset.
  """
  offset: tl.tensor
  left: tl.tensor
  right: tl.tensor
  sink_tokens: tl.tensor


class Terms(NamedTuple):
  """What makes a score of q.k and weighs it, for one head.

  Bias and mask stand at the head's plane, whose strides are 0 where it has one
  row or one column for all; key and counter are Philox's, and first_row and
  first_block what is added to rows and to blocks of eight keys that it counts.
  """
  scale: tl.tensor
  logits_soft_cap: tl.tensor
  bias: tl.tensor
  bias_f32: tl.tensor
  stride_bias: tl.tensor
  key_stride_bias: tl.tensor
  mask: tl.tensor
  stride_mask: tl.tensor
  key_stride_mask: tl.tensor
  slope: tl.tensor
  key0: tl.tensor
  key1: tl.tensor
  counter0: tl.tensor
  counter1: tl.tensor
  first_row: tl.tensor
  first_block: tl.tensor
  drop_threshold: tl.tensor
  rp_keep: tl.tensor
  flags: tl.tensor


class Planes(NamedTuple):
  """A tile of the bias and of the mask, or numbers that change nothing."""
  bias: tl.tensor
  mask: tl.tensor


@triton.jit
def is_there(flags, bit: tl.constexpr, FEATURES: tl.constexpr):
  """Whether a call has a feature that its kernel was made for."""
  if FEATURES & MAYBE:
    return (flags & bit) != 0
  else:
    return True


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
    if flags & PACKED:
      start = begin
      if flags & CU_PAD:
        start = tl.load(cu_padded + index)
  start = tl.minimum(tl.maximum(start, 0), rows)
  length = tl.minimum(tl.maximum(length, 0), rows - start)
  return start, length


@triton.jit
def sequence_of(
    index, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
    cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, flags,
):
  """The Sequence with this index."""
  q_start, len_q = sequence_extent(
      index, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      CU_SEQLENS_Q, CU_SEQLENS_Q_PADDED)
  k_start, len_k = sequence_extent(
      index, cu_seqlens_k, cu_seqlens_k_padded, seqlen_k, flags,
      CU_SEQLENS_K, CU_SEQLENS_K_PADDED)
  q_rows = seqlen_q
  k_rows = seqlen_k
  if flags & PACKED:
    q_rows = len_q
    k_rows = len_k
  if (min_seqlen_q > 0) & (len_q <= min_seqlen_q):
    len_q = 0
  return Sequence(q_start, q_rows, len_q, k_start, k_rows, len_k)


@triton.jit
def offset_of(seq, flags):
  """Where row 0 of a Sequence stands among its keys."""
  offset = seq.len_k - seq.len_q
  if flags & TOP_LEFT:
    offset = 0
  return offset


@triton.jit
def terms_of(
    index, head, nhead_q, bias_offset, bias, bias_f32, stride_bias,
    key_stride_bias, mask_offset, mask, stride_mask, key_stride_mask,
    alibi_slopes, dropout_state, scale, logits_soft_cap, drop_threshold,
    rp_keep, flags, FEATURES: tl.constexpr,
):
  """The Terms of a head of a sequence."""
  slope = 0.0
  key0 = tl.zeros([], tl.uint32)
  key1 = tl.zeros([], tl.uint32)
  counter0 = tl.zeros([], tl.uint32)
  counter1 = tl.zeros([], tl.uint32)
  first_row = tl.zeros([], tl.uint32)
  first_block = tl.zeros([], tl.uint32)
  if not FEATURES & MAYBE:
    # Rows made for a bias or mask exclude those that are not aligned so.
    bias_offset = bias_offset // 8 * 8
    mask_offset = mask_offset // 8 * 8
  if FEATURES & HAS_BIAS:
    tiles.assume_stride(stride_bias)
    bias += bias_offset
    bias_f32 += bias_offset
  if FEATURES & HAS_MASK:
    tiles.assume_stride(stride_mask)
    mask += mask_offset
  if FEATURES & ALIBI:
    if is_there(flags, ALIBI, FEATURES):
      slope = tl.load(alibi_slopes + index * nhead_q + head) * LOG2E
  if FEATURES & DROPOUT:
    if is_there(flags, DROPOUT, FEATURES):
      state = dropout_state + (index * nhead_q + head) * 6
      key0 = tl.load(state)
      key1 = tl.load(state + 1)
      counter0 = tl.load(state + 2)
      counter1 = tl.load(state + 3)
      first_row = tl.load(state + 4)
      first_block = tl.load(state + 5) // 8
  return Terms(
      scale, logits_soft_cap, bias, bias_f32, stride_bias, key_stride_bias,
      mask, stride_mask, key_stride_mask, slope, key0, key1, counter0, counter1,
      first_row, first_block, drop_threshold, rp_keep, flags)


@triton.jit
def key_tiles(
    m0, m1, seq, window, TILE_N: tl.constexpr, FEATURES: tl.constexpr
):
  """Key tiles that rows m0 to m1 - 1 see.

  Returns:
    (sink, low, full_low, full_high, high): tiles full_low to full_high - 1 are
    visible to every row. Tiles 0 to sink - 1, low to full_low - 1 and full_high
    to high - 1 are visible in part. All others are dead.
  """
  offset, left, right = window.offset, window.left, window.right
  last = tl.maximum(tl.minimum(seq.len_k, m1 + offset + right), 0)
  high = tl.where(m1 > m0, (last + TILE_N - 1) // TILE_N, 0)
  low = tl.minimum(tl.maximum(m0 + offset - left, 0) // TILE_N, high)
  full_low = (tl.maximum(m1 - 1 + offset - left, 0) + TILE_N - 1) // TILE_N
  full_low = tl.minimum(tl.maximum(full_low, low), high)
  full_high = tl.maximum(
      tl.minimum(seq.len_k, m0 + offset + right + 1), 0) // TILE_N
  full_high = tl.minimum(tl.maximum(full_high, full_low), high)
  sink = 0
  if FEATURES & SINK_TOKENS:
    sink = tl.minimum((window.sink_tokens + TILE_N - 1) // TILE_N, low)
  return sink, low, full_low, full_high, high


@triton.jit
def edge_tiles(
    m0, m1, seq, window, low, full_low, full_high, high,
    TILE_N: tl.constexpr, FEATURES: tl.constexpr
):
  """Of key_tiles' partly visible tiles, those that one edge alone cuts.

  Returns:
    (edge_low, edge_high): tiles edge_low to full_low - 1 lie inside the
    sequence and only the window's left side cuts them, tiles full_high to
    edge_high - 1 only its right side.
  """
  inside = seq.len_k // TILE_N
  first_uncut = (tl.maximum(m1 - 1 + window.offset - window.left, 0)
                 + TILE_N - 1) // TILE_N
  last_uncut = tl.maximum(m0 + window.offset + window.right + 1, 0) // TILE_N
  one_edge = first_uncut <= last_uncut
  at_left = one_edge & (full_low <= inside)
  if FEATURES & SINK_TOKENS:
    at_left &= low * TILE_N >= window.sink_tokens
  edge_low = tl.where(at_left, low, full_low)
  edge_high = tl.where(
      one_edge, tl.maximum(tl.minimum(high, inside), full_high), full_high)
  return edge_low, edge_high


@triton.jit
def row_tiles(
    n0, n1, seq, window, TILE_M: tl.constexpr, FEATURES: tl.constexpr
):
  """Row tiles that see keys n0 to n1 - 1: (low, full_low, full_high, high).

  Tiles full_low to full_high - 1 see every one of the keys and lie inside the
  sequence; the others from low to high - 1 see a part.
  """
  offset, left, right = window.offset, window.left, window.right
  last = tl.minimum(seq.len_q, n1 - offset + left)
  if FEATURES & SINK_TOKENS:
    last = tl.where(n0 < window.sink_tokens, seq.len_q, last)
  last = tl.maximum(last, 0)
  high = tl.where(n1 > n0, (last + TILE_M - 1) // TILE_M, 0)
  low = tl.minimum(tl.maximum(n0 - offset - right, 0) // TILE_M, high)
  full_low = (tl.maximum(n1 - 1 - offset - right, 0) + TILE_M - 1) // TILE_M
  full_low = tl.minimum(tl.maximum(full_low, low), high)
  full_high = tl.maximum(
      tl.minimum(seq.len_q, n0 - offset + left + 1), 0) // TILE_M
  full_high = tl.minimum(tl.maximum(full_high, full_low), high)
  return low, full_low, full_high, high


@triton.jit
def _rows_and_keys(
    TRANSPOSED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
  """A tile's rows and keys from 0 on, as they broadcast to it."""
  rows = tl.arange(0, TILE_M)
  keys = tl.arange(0, TILE_N)
  if TRANSPOSED:
    return rows[None, :], keys[:, None]
  else:
    return rows[:, None], keys[None, :]


@triton.jit
def _along_columns(
    first, slope, COLUMNS: tl.constexpr, LANE_KEYS: tl.constexpr
):
  """first[r] + slope * c, as [rows, COLUMNS / 8, 8 / LANE_KEYS, LANE_KEYS].

  On CDNA a lane of a matrix instruction holds LANE_KEYS neighbouring columns of
  each 8. Split so, a column is a constant of the instruction plus a part of the
  lane: a packed fma a pair.
  """
  LANES: tl.constexpr = 8 // LANE_KEYS
  c = (tl.arange(0, COLUMNS // 8)[:, None, None] * 8
       + tl.arange(0, LANE_KEYS)[None, None, :])[None, :, :, :]
  lane = (tl.arange(0, LANES) * LANE_KEYS)[None, None, :, None]
  first = first[:, None, None, None] + lane.to(tl.float32) * slope
  return first + c.to(tl.float32) * slope


@triton.jit
def _edge_bound(
    edge, direction, TILE_N: tl.constexpr, LANE_KEYS: tl.constexpr
):
  """(edge[r] - c) * direction + 0.5, times 2^100, split as in _cut_edges."""
  first = (edge.to(tl.float32) * direction + 0.5) * _HUGE
  return _along_columns(first, -_HUGE * direction, TILE_N, LANE_KEYS)


@triton.jit
def _cut_edges(
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

  LANE_KEYS = 0, without packed fma or with scores of any size, compares and
  selects; then hidden is -inf.
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
    s = tl.where(seen, s, float("-inf"))
  return s


@triton.jit
def hide(
    s, m0, n0, seq, window, EDGE: tl.constexpr, direction,
    TRANSPOSED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    LANE_KEYS: tl.constexpr, FEATURES: tl.constexpr,
):
  """s, with -inf or a huge negative number where the row does not see the key.

  With EDGE the window's right side (direction 1) or left side (-1) alone hides.
  TRANSPOSED: s stands [TILE_N, TILE_M].
  """
  LANES: tl.constexpr = 0 if FEATURES & HAS_BIAS else LANE_KEYS
  if FEATURES & SINK_TOKENS and not EDGE:
    rows, cols = _rows_and_keys(TRANSPOSED, TILE_M, TILE_N)
    rows += m0
    cols += n0
    last = tl.minimum(rows + window.offset + window.right, seq.len_k - 1)
    seen = (cols >= rows + window.offset - window.left) | (
        cols < window.sink_tokens)
    s = tl.where((cols <= last) & seen, s, float("-inf"))
  elif TRANSPOSED:
    first = n0 + tl.arange(0, TILE_N) - (window.offset + m0)
    s = _cut_edges(
        s, first + window.left, 1.0, first - window.right, True, TILE_N,
        TILE_M, LANES)
  else:
    position = m0 + tl.arange(0, TILE_M) + (window.offset - n0)
    if EDGE:
      edge = position + tl.where(direction > 0, window.right, -window.left)
    else:
      edge = tl.minimum(position + window.right, seq.len_k - 1 - n0)
    s = _cut_edges(
        s, edge, direction, position - window.left, not EDGE, TILE_M, TILE_N,
        LANES)
  return s


@triton.jit
def _reciprocal(x):
  # One instruction, and a multiplication; a division is ten.
  root = tl.rsqrt(x)
  return root * root


@triton.jit
def _capped(s, terms, FEATURES: tl.constexpr):
  """Scores in base 2 under the soft cap, and the cap's derivative."""
  cap = terms.logits_soft_cap * LOG2E
  if FEATURES & MAYBE:
    x = s * (terms.scale / terms.logits_soft_cap)
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2E))
    # Near zero 1 - e cancels; two terms of the series are exact to 2e-7 there.
    t = tl.where(
        size < 0.03, size - size * size * size * (1.0 / 3.0),
        (1.0 - e) * _reciprocal(1.0 + e))
    return tl.where(x < 0, -cap, cap) * t, 1.0 - t * t
  else:
    # cap tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)); what cancels near
    # zero is 3e-7 of the cap, and only a difference of scores matters.
    e = tl.exp2(s * (2.0 * LOG2E * terms.scale / terms.logits_soft_cap))
    root = tl.rsqrt(1.0 + e)
    r = root * root
    return cap - 2.0 * cap * r, 4.0 * r * (1.0 - r)


@triton.jit
def _plane_tile(
    ptr, stride, key_stride, m0, n0, rows, cols, seq,
    CHECK_KEYS: tl.constexpr, HIDDEN: tl.constexpr, FEATURES: tl.constexpr
):
  """A tile of a plane from row m0, key n0; past its rows, what hides.

  rows and cols count from there, and broadcast to the tile. What stands past
  the sequence's keys is not said. A row past the end must see no hidden key
  either: the key may hold NaN, which the gradients of keys would sum.
  """
  inside = rows < seq.len_q - m0
  if FEATURES & MAYBE:
    inside &= cols < seq.len_k - n0
    ptr += m0.to(tl.int64) * stride + n0 * key_stride
    offsets = rows * stride + cols * key_stride
  else:
    # Rows of a multiple of 8 elements promise neighbours in one load; a bound
    # between them would take that back.
    stride = stride // 8 * 8
    if CHECK_KEYS:
      inside &= cols < (seq.len_k - n0 + 7) // 8 * 8
    else:
      inside &= cols >= 0
    ptr += m0.to(tl.int64) * stride + n0
    offsets = rows * stride + cols
  return tl.load(ptr + offsets, mask=inside, other=HIDDEN)


@triton.jit
def load_planes(
    m0, n0, seq, terms, CHECK_KEYS: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, FEATURES: tl.constexpr,
):
  """The Planes of a tile, for `complete`.

  To be called before the product of q and k: where two layouts meet Triton
  carries both on, and computes what follows in the one that it loaded last. The
  sequence may end in the tile if CHECK_KEYS.
  """
  rows, cols = _rows_and_keys(TRANSPOSED, TILE_M, TILE_N)
  bias = 0.0
  mask = 1
  if FEATURES & MAYBE:
    bias = tl.zeros((rows + cols).shape, tl.float32)
    mask = tl.full((rows + cols).shape, 1, tl.uint8)
  if FEATURES & HAS_BIAS:
    if is_there(terms.flags, HAS_BIAS, FEATURES):
      if FEATURES & BIAS_F32:
        if is_there(terms.flags, BIAS_F32, FEATURES):
          bias = _plane_tile(
              terms.bias_f32, terms.stride_bias, terms.key_stride_bias, m0, n0,
              rows, cols, seq, CHECK_KEYS, float("-inf"), FEATURES)
        else:
          bias = _plane_tile(
              terms.bias, terms.stride_bias, terms.key_stride_bias, m0, n0,
              rows, cols, seq, CHECK_KEYS, float("-inf"),
              FEATURES).to(tl.float32)
      else:
        # Stays as it is: on its way through shared memory it is half as long.
        bias = _plane_tile(
            terms.bias, terms.stride_bias, terms.key_stride_bias, m0, n0,
            rows, cols, seq, CHECK_KEYS, float("-inf"), FEATURES)
  if FEATURES & HAS_MASK:
    if is_there(terms.flags, HAS_MASK, FEATURES):
      mask = _plane_tile(
          terms.mask, terms.stride_mask, terms.key_stride_mask, m0, n0, rows,
          cols, seq, CHECK_KEYS, 0, FEATURES)
  return Planes(bias, mask)


@triton.jit
def _minus_slopes(
    s, slope, m0, n0, window, TRANSPOSED: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, LANE_KEYS: tl.constexpr
):
  """s - slope * |distance of row and key|."""
  if LANE_KEYS > 0:
    if TRANSPOSED:
      first = n0 + tl.arange(0, TILE_N) - (window.offset + m0)
      distance = _along_columns(
          first.to(tl.float32), -1.0, TILE_M, LANE_KEYS)
    else:
      first = m0 + tl.arange(0, TILE_M) + (window.offset - n0)
      distance = _along_columns(
          first.to(tl.float32), -1.0, TILE_N, LANE_KEYS)
    wide = tl.reshape(s, distance.shape)
    s = tl.reshape(wide - slope * tl.abs(distance), s.shape)
  else:
    rows, cols = _rows_and_keys(TRANSPOSED, TILE_M, TILE_N)
    distance = (n0 + cols) - (m0 + window.offset + rows)
    s -= slope * tl.abs(distance.to(tl.float32))
  return s


@triton.jit
def complete(
    s, planes, m0, n0, window, terms, TRANSPOSED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, LANE_KEYS: tl.constexpr,
    FEATURES: tl.constexpr,
):
  """Complete scores in base 2 from products q.k; the window is not applied.

  TRANSPOSED: s stands [TILE_N, TILE_M].

  Returns:
    (scores, slope): the second is the soft cap's derivative, or 1.
  """
  slope = 1.0
  if FEATURES & SOFT_CAP:
    if FEATURES & MAYBE:
      slope = tl.full(s.shape, 1.0, tl.float32)
      if terms.logits_soft_cap > 0:
        s, slope = _capped(s, terms, FEATURES)
      else:
        s *= terms.scale * LOG2E
    else:
      s, slope = _capped(s, terms, FEATURES)
  else:
    s *= terms.scale * LOG2E
  if FEATURES & HAS_BIAS:
    # -inf hides: it selects, so that no key's NaN comes through.
    bias = planes.bias.to(tl.float32)
    s = tl.where(bias == float("-inf"), bias, s + bias * LOG2E)
  if FEATURES & HAS_MASK:
    s = tl.where(planes.mask != 0, s, float("-inf"))
  if FEATURES & ALIBI:
    # Where there are no slopes, the slope is 0.
    s = _minus_slopes(
        s, terms.slope, m0, n0, window, TRANSPOSED, TILE_M, TILE_N, LANE_KEYS)
  return s, slope


@triton.jit
def keys_shown(terms, n0, seq, TILE_N: tl.constexpr):
  """Whether rows may see the keys from n0 on: [TILE_N].

  False past the sequence, and where a mask of one row hides a key from all.
  Such a key may hold NaN, and 0 times NaN is NaN: whoever multiplies with keys
  or values reads zeros there. It is a condition of their loads, and no branch,
  so that those loads stay asynchronous.
  """
  c = tl.arange(0, TILE_N)
  keys = seq.len_k - n0
  one_row = ((terms.flags & HAS_MASK) != 0) & (terms.stride_mask == 0)
  shown = tl.load(
      terms.mask + (n0 + c) * terms.key_stride_mask,
      mask=c < tl.where(one_row, keys, 0), other=1)
  return (c < keys) & (shown != 0)


@triton.jit
def load_keys(
    ptr, stride, hdim, n0, seq, terms, CHECK_KEYS: tl.constexpr,
    TILE_N: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    PADDED: tl.constexpr, FEATURES: tl.constexpr,
):
  """Keys or values from n0 on; zeros for those that no row may see."""
  if FEATURES & HAS_MASK:
    shown = keys_shown(terms, n0, seq, TILE_N)
    return parts.load_shown(ptr, stride, shown, hdim, TILE_N, MAIN, TAIL)
  else:
    return parts.load(
        ptr, stride, seq.len_k - n0, hdim, TILE_N, MAIN, TAIL, CHECK_KEYS,
        PADDED)


@triton.jit
def _mul_hi_lo(x, factor: tl.constexpr):
  # One instruction gives both halves.
  product = x.to(tl.uint64) * factor
  return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _halves(word):
  """A word's low and high half, each as the upper half of a word."""
  return tl.join(word << 16, word)


@triton.jit
def keep_scale(
    terms, m0, n0, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
  """[TILE_M, TILE_N]: 1 / (1 - p) where dropout keeps, 0 where it drops.

  One Philox4x32-10 block (Salmon et al., Parallel random numbers: as easy as
  1, 2, 3, SC 2011) gives 16 bits to each of eight neighbouring keys: counter
  (key // 8, row, head, batch), word key % 4, of the first four keys the low
  halves.
  """
  w0 = (terms.first_block + n0 // 8 + tl.arange(0, TILE_N // 8))[None, :]
  w1 = (terms.first_row + m0 + tl.arange(0, TILE_M))[:, None]
  w2 = terms.counter1
  w3 = terms.counter0
  key0 = terms.key0
  key1 = terms.key1
  # Words broadcast to the tile as late as they can.
  for _ in tl.static_range(10):
    high0, low0 = _mul_hi_lo(w0, 0xD2511F53)
    high2, low2 = _mul_hi_lo(w2, 0xCD9E8D57)
    w0 = high2 ^ w1 ^ key0
    w2 = high0 ^ w3 ^ key1
    w1 = low2
    w3 = low0
    key0 += 0x9E3779B9
    key1 += 0xBB67AE85
  words = tl.join(tl.join(_halves(w0), _halves(w2)),
                  tl.join(_halves(w1), _halves(w3)))
  words = tl.reshape(words, [TILE_M, TILE_N])
  keep = words >= terms.drop_threshold.to(tl.uint32, bitcast=True)
  return tl.where(keep, terms.rp_keep, 0.0)
