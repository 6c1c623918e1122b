# SPDX-License-Identifier: Apache-2.0
"""Heads turned back by their token's position, and rounded by groups.

A tile is runs of RUN columns. With RUN 128 they are runs of as many heads, from
the same column on: where no pair is turned none reads an angle, and where pairs
are all heads share them. Otherwise, with heads or groups that are no such runs
(the feature short), they are a row's, one behind the other.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import rounding
from third_party.aiter.kernels.fused_qk import rows
from third_party.aiter.kernels.fused_qk.family import FEATURES as _FEATURES

GPTJ = tl.constexpr(_FEATURES["gptj"])  # Pairs are neighbours; else halves.
Q_BYTES = rows.Q_BYTES
Q_OUT = rows.Q_OUT
SHORT = rows.SHORT
ROUND_UP = rounding.ROUND_UP
to_bits = rounding.to_bits
scaled = rows._scaled


@triton.jit
def _turned_back(s, q, c, inside, cos, sin, start, dim, pairs, first, flags):
  """Heads of `dim` columns, rotated by minus the angles of cos and sin.

  q + c: where they come from. start: the row's first column.
  """
  j = (start + c) % dim - first
  turned = inside & (j >= 0) & (j < 2 * pairs)
  near = (flags & GPTJ) != 0
  second = tl.where(near, j & 1, (j >= pairs).to(tl.int32))
  pair = tl.where(near, j >> 1, j - second * pairs)
  step = tl.where(near, 1, pairs)
  other = tl.load(q + (c + step - 2 * second * step), turned, 0.0)
  u = tl.load(cos + pair, turned, 1.0)
  v = tl.load(sin + pair, turned, 0.0)
  return s * u + other.to(tl.float32) * tl.where(second == 1, -v, v)


@triton.jit
def fused_qk_turned(
    q, cos, sin, positions, q_out, q_out_bytes, scale, scale_e8m0,
    tokens, parts, cols, dim, pairs, first, table_rows, group, scale_token,
    scale_group, kind, flags,
    TILE_M: tl.constexpr, RUN: tl.constexpr, MAY: tl.constexpr,
    SURE: tl.constexpr, NATIVE: tl.constexpr,
):
  """Semantics in include/aiter/fused_qk.h.

  A token has `parts` rows of `cols` columns. Of a tile of heads, these have a
  power of two of runs. MAY: features that calls may have. SURE: those that all
  have.

  Grid: (tokens, tiles), of which a token's are taken one after the other.
  """
  flags = (flags | SURE) & MAY
  run = tl.arange(0, TILE_M)
  lane = tl.arange(0, RUN)[None, :]
  program = tl.program_id(1) * tokens + tl.program_id(0)
  tiles = tl.num_programs(1)
  token = program // tiles
  tile = program - token * tiles
  place = tl.load(positions + token)
  width = parts * cols
  at = token.to(tl.int64) * width
  if SHORT & MAY:
    column, start = 0, tile * cols
    begin = run * RUN
    there = begin < cols
    c = begin[:, None] + lane
    inside = c < cols
  else:
    column = (tile & (dim // RUN - 1)) * RUN
    start = tile * RUN * TILE_M - column * (TILE_M - 1)
    begin = run * dim
    there = start + begin < width
    c = begin[:, None] + lane
    inside = there[:, None]
  at += start
  s = tl.load(q + at + c, inside, 0.0).to(tl.float32)
  angles = tl.minimum(tl.maximum(place, 0), table_rows - 1).to(tl.int64) * pairs
  cos += angles
  sin += angles
  if SHORT & MAY or not GPTJ & SURE:
    s = _turned_back(s, q + at, c, inside, cos, sin, start, dim, pairs, first,
                     flags)
  elif column + RUN > first:
    x1, x2 = tl.split(tl.reshape(s, [TILE_M, RUN // 2, 2]))
    pair = tl.multiple_of(
        (column - first) // 2 + tl.arange(0, RUN // 2), 8)
    turned = (pair >= 0) & (pair < pairs)
    u = tl.load(cos + pair, turned, 1.0)[None, :]
    v = tl.load(sin + pair, turned, 0.0)[None, :]
    s = tl.reshape(tl.join(x1 * u + x2 * v, x2 * u - x1 * v), [TILE_M, RUN])
  if Q_OUT & MAY:
    if flags & Q_OUT:
      tl.store(q_out + at + c, s.to(q_out.dtype.element_ty), inside)
  if Q_BYTES & MAY:
    if flags & Q_BYTES:
      to = token.to(tl.int64) * scale_token
      s = scaled(s, start + begin, there, scale + to, scale_e8m0 + to,
                 scale_group, group, kind, ROUND_UP, 0.0, flags, MAY, TILE_M,
                 RUN)
      if Q_OUT & MAY:
        c = tl.max_contiguous(c, [1, 8])
      tl.store(q_out_bytes + at + c, to_bits(s, kind, NATIVE), inside)
