# SPDX-License-Identifier: Apache-2.0
"""Rows of a packed batch that no sequence has, and so no other kernel writes.

They lie between sequences whose starts are given, and behind the last one.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.mha import scores


@triton.jit
def mha_gaps(words, lse, cu_seqlens_q, cu_seqlens_q_padded, row_words,
             nhead_stride_lse, batch, seqlen_q, nhead_q, min_seqlen_q, flags,
             TILE_M: tl.constexpr, TILE_N: tl.constexpr):
  """Makes such rows 0, and their lse of nhead_q heads -inf.

  words: the rows in words of 32 bits, row_words of them each. A sequence of at
  most min_seqlen_q rows has none. Grid: tiles of the seqlen_q rows.
  """
  rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  cols = tl.arange(0, TILE_N)
  starts = cu_seqlens_q
  if flags & scores.CU_SEQLENS_Q_PADDED:
    starts = cu_seqlens_q_padded
  # A row's sequence is the last that begins there or before.
  begun = tl.zeros([TILE_M], tl.int32)
  for i in range(0, batch, TILE_N):
    start = tl.load(starts + i + cols, i + cols < batch, 1 << 30)
    begun += tl.sum((start[None, :] <= rows[:, None]).to(tl.int32), 1)
  i = tl.maximum(begun - 1, 0)
  start = tl.maximum(tl.load(starts + i), 0)
  length = tl.load(cu_seqlens_q + i + 1) - tl.load(cu_seqlens_q + i)
  length = tl.where(length <= min_seqlen_q, 0, length)
  past = rows - start
  gap = (rows < seqlen_q) & ((past < 0) | (past >= length))
  if tl.max(gap.to(tl.int32), 0) > 0:
    own = words + rows.to(tl.int64)[:, None] * tl.multiple_of(row_words, 4)
    for j in range(0, row_words, TILE_N):
      inside = gap[:, None] & (j + cols < row_words)[None, :]
      tl.store(own + (j + cols)[None, :], tl.zeros([TILE_M, TILE_N], tl.uint32),
               inside)
    for head in range(nhead_q):
      tl.store(lse + head * nhead_stride_lse + rows,
               tl.full([TILE_M], float("-inf"), tl.float32), gap)
