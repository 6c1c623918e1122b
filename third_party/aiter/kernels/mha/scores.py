# SPDX-License-Identifier: Apache-2.0
"""What forward and backward attention share: flags, sequences, ranges, masks.

Positions: row i and key j count from the start of their own sequence. Row i
stands at key position i + offset, where offset is len_k - len_q (the last row
sees the last key) or 0 with TOP_LEFT.
"""

from typing import NamedTuple

import triton
import triton.language as tl

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
MAYBE = tl.constexpr(_MAYBE)
# What changes a score, and what may hide a key from it.
OF_SCORES = tl.constexpr(FEATURES["soft_cap"] | FEATURES["bias"]
                         | FEATURES["mask"] | FEATURES["alibi"])
HIDES = tl.constexpr(FEATURES["bias"] | FEATURES["mask"])

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Bounds of cut_edges are at least 2^99; every score is below EDGE_LIMIT, 2^98.
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
  row or one column for all; key and counter are Philox's.
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
  drop_threshold: tl.tensor
  rp_keep: tl.tensor
  flags: tl.tensor


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
    rp_keep, flags, GENERAL: tl.constexpr,
):
  """The Terms of a head of a sequence."""
  slope = 0.0
  key0 = tl.zeros([], tl.uint32)
  key1 = tl.zeros([], tl.uint32)
  counter0 = tl.zeros([], tl.uint32)
  counter1 = tl.zeros([], tl.uint32)
  if GENERAL:
    bias += bias_offset
    bias_f32 += bias_offset
    mask += mask_offset
    if flags & ALIBI:
      slope = tl.load(alibi_slopes + index * nhead_q + head)
    if flags & DROPOUT:
      state = dropout_state + (index * nhead_q + head) * 4
      key0 = tl.load(state)
      key1 = tl.load(state + 1)
      counter0 = tl.load(state + 2)
      counter1 = tl.load(state + 3)
  return Terms(
      scale, logits_soft_cap, bias, bias_f32, stride_bias, key_stride_bias,
      mask, stride_mask, key_stride_mask, slope, key0, key1, counter0, counter1,
      drop_threshold, rp_keep, flags)


@triton.jit
def key_tiles(
    m0, m1, seq, window, TILE_N: tl.constexpr, GENERAL: tl.constexpr
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
  if GENERAL:
    sink = tl.minimum((window.sink_tokens + TILE_N - 1) // TILE_N, low)
  return sink, low, full_low, full_high, high


@triton.jit
def edge_tiles(
    m0, m1, seq, window, low, full_low, full_high, high, TILE_N: tl.constexpr
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
  edge_low = tl.where(one_edge & (full_low <= inside), low, full_low)
  edge_high = tl.where(
      one_edge, tl.maximum(tl.minimum(high, inside), full_high), full_high)
  return edge_low, edge_high


@triton.jit
def row_tiles(
    n0, n1, seq, window, TILE_M: tl.constexpr, GENERAL: tl.constexpr
):
  """Row tiles that see keys n0 to n1 - 1: (low, full_low, full_high, high).

  Tiles full_low to full_high - 1 see every one of the keys and lie inside the
  sequence; the others from low to high - 1 see a part.
  """
  offset, left, right = window.offset, window.left, window.right
  last = tl.minimum(seq.len_q, n1 - offset + left)
  if GENERAL:
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
def visible(rows, cols, seq, window, GENERAL: tl.constexpr):
  """Whether row i sees key j; `rows` and `cols` broadcast to a tile."""
  last = tl.minimum(rows + window.offset + window.right, seq.len_k - 1)
  mask = (cols <= last) & (cols >= rows + window.offset - window.left)
  if GENERAL:
    mask |= (cols <= last) & (cols < window.sink_tokens)
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
def _plane_tile(
    ptr, stride, key_stride, m0, n0, seq, other,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
  """[TILE_M, TILE_N] of a plane from row m0, key n0; past those, `other`."""
  r = tl.arange(0, TILE_M)[:, None]
  # So that threads lie along keys, where a stride of 1 is not known to be. No
  # load gets wider by it: nothing is known of the alignment.
  c = tl.max_contiguous(tl.arange(0, TILE_N) * key_stride, TILE_N)[None, :]
  mask = (r < seq.len_q - m0) & (
      tl.arange(0, TILE_N)[None, :] < seq.len_k - n0)
  first = m0.to(tl.int64) * stride + n0 * key_stride
  return tl.load(ptr + first + (r * stride + c), mask=mask, other=other)


@triton.jit
def _plane_row(ptr, key_stride, n0, seq, other, TILE_N: tl.constexpr):
  """[1, TILE_N] of a plane with one row for all."""
  c = tl.arange(0, TILE_N)
  return tl.load(
      ptr + (n0 + c) * key_stride, mask=c < seq.len_k - n0, other=other
  )[None, :]


@triton.jit
def _plus(s, bias):
  """s + bias; -inf hides: it selects, so that no key's NaN comes through."""
  return tl.where(bias == float("-inf"), bias, s + bias)


@triton.jit
def _where(shown, s):
  """s where it is shown, elsewhere -inf."""
  return tl.where(shown != 0, s, float("-inf"))


@triton.jit
def _add_plane(
    s, ptr, terms, m0, n0, seq, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
  # Each branch ends with s: a tile that leaves one and is then transposed is
  # more than Triton's removal of layout conversions survives.
  if terms.stride_bias == 0:
    s = _plus(s, _plane_row(
        ptr, terms.key_stride_bias, n0, seq, 0.0, TILE_N).to(tl.float32))
  else:
    s = _plus(s, _plane_tile(
        ptr, terms.stride_bias, terms.key_stride_bias, m0, n0, seq, 0.0,
        TILE_M, TILE_N).to(tl.float32))
  return s


@triton.jit
def add_bias(
    s, terms, m0, n0, seq, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
  """s plus the bias tile at row m0, key n0."""
  if terms.flags & BIAS_F32:
    s = _add_plane(s, terms.bias_f32, terms, m0, n0, seq, TILE_M, TILE_N)
  else:
    s = _add_plane(s, terms.bias, terms, m0, n0, seq, TILE_M, TILE_N)
  return s


@triton.jit
def apply_mask(
    s, terms, m0, n0, seq, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
  """s where the mask's tile at row m0, key n0 is set, elsewhere -inf."""
  if terms.stride_mask == 0:
    s = _where(_plane_row(
        terms.mask, terms.key_stride_mask, n0, seq, 1, TILE_N), s)
  else:
    s = _where(_plane_tile(
        terms.mask, terms.stride_mask, terms.key_stride_mask, m0, n0, seq, 1,
        TILE_M, TILE_N), s)
  return s


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
def load_shown(
    ptr, stride, shown, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
  """A tile of keys or values; of those not shown, and past `cols`, zeros."""
  r = tl.arange(0, ROWS)[:, None]
  c = tl.arange(0, COLS)[None, :]
  return tl.load(
      ptr + (r * stride + c), mask=shown[:, None] & (c < cols), other=0.0)


@triton.jit
def keep_scale(
    terms, m0, n0, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
  """[TILE_M, TILE_N]: 1 / (1 - p) where dropout keeps, 0 where it drops.

  One Philox4x32-10 block gives the words of four neighbouring keys: counter
  (key // 4, row, head, batch), word key % 4.
  """
  rows = (m0 + tl.arange(0, TILE_M)).to(tl.uint32)[:, None]
  blocks = (n0 // 4 + tl.arange(0, TILE_N // 4)).to(tl.uint32)[None, :]
  zero = tl.zeros([TILE_M, TILE_N // 4], tl.uint32)
  w0, w1, w2, w3 = tl.philox_impl(
      zero + blocks, zero + rows, zero + terms.counter1,
      zero + terms.counter0, terms.key0, terms.key1)
  words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
  words = tl.reshape(words, [TILE_M, TILE_N])
  keep = words >= terms.drop_threshold.to(tl.uint32, bitcast=True)
  return tl.where(keep, terms.rp_keep, 0.0)
