# SPDX-License-Identifier: Apache-2.0
"""Joins the parts of rows whose keys were divided, always in the same order."""

import triton
import triton.language as tl

from third_party.aiter.kernels.paged.attend import LSE


@triton.jit
def paged_merge(
    parts, parts_lse, out, lse, tokens, nhead_q, hdim_v, splits, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD: tl.constexpr,
):
  """out = sum of exp(lse of a part) * part / sum of exp(lse of a part).

  Layouts are those of paged_attend. A part whose lse is -inf is not read.
  TILE_N parts are read at a time.

  Grid: tiles of rows, tokens * nhead_q in all.
  """
  rows = (tl.program_id(0).to(tl.int64) * TILE_M
          + tl.arange(0, TILE_M).to(tl.int64))
  count = tokens.to(tl.int64) * nhead_q
  live = rows < count
  cols = tl.arange(0, HEAD)[None, :]
  m = tl.full([TILE_M], float("-inf"), tl.float32)
  l = tl.zeros([TILE_M], tl.float32)
  acc = tl.zeros([TILE_M, HEAD], tl.float32)
  for first in range(0, splits, TILE_N):
    split = first + tl.arange(0, TILE_N)[:, None]
    at = split.to(tl.int64) * count + rows[None, :]
    part_lse = tl.load(parts_lse + at, mask=live[None, :] & (split < splits),
                       other=float("-inf"))
    there = part_lse != float("-inf")
    part = tl.load(parts + at[:, :, None] * hdim_v + cols[None],
                   mask=there[:, :, None] & (cols < hdim_v)[None], other=0.0)
    m_new = tl.maximum(m, tl.max(part_lse, 0))
    m_exp = tl.where(m_new == float("-inf"), 0.0, m_new)
    weight = tl.exp(part_lse - m_exp[None, :])
    alpha = tl.exp(m - m_exp)
    l = l * alpha + tl.sum(weight, 0)
    acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], 0)
    m = m_new
  any_key = l != 0
  l_safe = tl.where(any_key, l, 1.0)
  acc = acc / l_safe[:, None]
  if flags & LSE:
    row_lse = tl.where(any_key, m + tl.log(l_safe), float("-inf"))
    tl.store(lse + rows % nhead_q * tokens + rows // nhead_q, row_lse,
             mask=live)
  tl.store(out + rows[:, None] * hdim_v + cols, acc.to(out.dtype.element_ty),
           mask=live[:, None] & (cols < hdim_v))
