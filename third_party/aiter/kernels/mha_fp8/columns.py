# SPDX-License-Identifier: Apache-2.0
"""Transposes values of float8 attention, as its products take them."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from third_party.aiter.kernels.mha_fp8.fwd import (
    COLUMNS,
    PACKED,
    extent,
    find_sequence,
)


@triton.jit
def mha_fp8_columns(
    v_rows, v_columns, cu_seqlens_k, batch, seqlen_k, nhead_k, hdim_v, columns,
    flags, TILE_N: tl.constexpr, HEAD: tl.constexpr, ORDERED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
  """v_columns as include/aiter/mha_fp8.h has them, of v_rows.

  Both are of bytes; v_rows is [batch, seqlen_k, nhead_k, hdim_v], packed
  [seqlen_k, nhead_k, hdim_v].

  ORDERED: among each 16 the keys 2t, 2t + 1, 2t + 8 and 2t + 9 are side by
    side, from 4t on, as Hopper's tensor cores leave weights in registers.
  OVERLAPS: the next kernel may start before this one ends, and waits itself.

  Grid: (columns / TILE_N, KV heads, batch; packed 1).
  """
  if OVERLAPS:
    gdc_launch_dependents()
  tl.static_assert(TILE_N == COLUMNS)
  tile = tl.program_id(0)
  head = tl.program_id(1)
  slot_b = tl.program_id(2)
  c = tl.arange(0, TILE_N)
  at = tile * TILE_N + c
  if flags & PACKED:
    index, tile = find_sequence(tile, cu_seqlens_k, batch, TILE_N)
    row, len_k, _ = extent(cu_seqlens_k, index, batch, seqlen_k)
    row = row.to(tl.int64)
  else:
    row = slot_b.to(tl.int64) * seqlen_k
    len_k = seqlen_k
  key = c
  if ORDERED:
    key = (c & ~15) | (c & 1) | (c >> 2 & 3) << 1 | (c >> 1 & 1) << 3
  key += tile * TILE_N
  d = tl.arange(0, HEAD)
  inside = (d < hdim_v)[None, :]
  there = ((key >= 0) & (key < len_k))[:, None]
  x = tl.load(
      v_rows + (row * nhead_k + head) * hdim_v
      + key.to(tl.int64)[:, None] * (nhead_k * hdim_v) + d[None, :],
      mask=there & inside, other=0)
  out = v_columns + (slot_b.to(tl.int64) * nhead_k + head) * hdim_v * columns
  tl.store(out + d.to(tl.int64)[:, None] * columns + at[None, :], tl.trans(x),
           mask=(d < hdim_v)[:, None])
