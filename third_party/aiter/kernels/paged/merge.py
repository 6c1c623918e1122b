# SPDX-License-Identifier: Apache-2.0
"""Joins the parts of rows whose keys were divided, always in the same order."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from third_party.aiter.kernels.paged.attend import LSE

# Parts whose lse is looked at together.
LANES = tl.constexpr(128)


@triton.jit
def _lse_of(parts_lse, row, part, count, splits):
  return tl.load(parts_lse + part.to(tl.int64) * count + row,
                 mask=part < splits, other=float("-inf"))


@triton.jit
def _join(parts, parts_lse, out, row, count, hdim_v, first_col, used, top,
          TILE_N: tl.constexpr, WIDTH: tl.constexpr):
  """Joins WIDTH columns of a row; returns the sum of its parts' weights."""
  p = tl.arange(0, TILE_N)
  cols = first_col + tl.arange(0, WIDTH)
  l = tl.zeros([TILE_N], tl.float32)
  acc = tl.zeros([TILE_N, WIDTH], tl.float32)
  for p0 in range(0, used, TILE_N):
    part = p0 + p
    weight = tl.exp(_lse_of(parts_lse, row, part, count, used) - top)
    at = (part.to(tl.int64) * count + row) * hdim_v
    here = tl.load(parts + at[:, None] + cols[None, :],
                   mask=(part < used)[:, None] & (cols < hdim_v)[None, :],
                   other=0.0)
    l += weight
    acc += here * weight[:, None]
  total = tl.sum(l, 0)
  of_row = tl.sum(acc, 0) / tl.where(total != 0, total, 1.0)
  tl.store(out + row * hdim_v + cols, of_row.to(out.dtype.element_ty),
           mask=cols < hdim_v)
  return total


@triton.jit
def paged_merge(
    parts, parts_lse, out, lse, tokens, nhead_q, hdim_v, splits, merge_cols,
    flags, TILE_N: tl.constexpr, HEAD: tl.constexpr, MERGE_COLS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
  """out = sum of exp(lse of a part) * part / sum of exp(lse of a part).

  Layouts are those of paged_attend. A row's parts come first, and end before
  the first lse of +inf, if there is one: a row that has it for its first has
  its result. Behind the last part whose lse is not -inf nothing is read. The
  largest lse is found first: then no part's load waits for another's.

  OVERLAPS: starts while paged_attend ends, and waits for that, as the next may.

  Grid: tokens * nhead_q rows, each with merge_cols programs, 1 or, where rows
  are few, MERGE_COLS.
  """
  if OVERLAPS:
    gdc_launch_dependents()
    gdc_wait()
  row = (tl.program_id(0) // merge_cols).to(tl.int64)
  place = tl.program_id(0) % merge_cols
  count = tokens.to(tl.int64) * nhead_q
  lanes = tl.arange(0, LANES)
  m = tl.full([LANES], float("-inf"), tl.float32)
  used = lanes * 0
  end = splits
  p0 = 0
  while p0 < end:
    part = p0 + lanes
    part_lse = _lse_of(parts_lse, row, part, count, splits)
    end = tl.min(tl.where(part_lse == float("inf"), part, end), 0)
    part_lse = tl.where(part < end, part_lse, float("-inf"))
    m = tl.maximum(m, part_lse)
    used = tl.where(part_lse != float("-inf"), part + 1, used)
    p0 += LANES
  if end == 0:
    return
  top = tl.max(m, 0)
  top = tl.where(top == float("-inf"), 0.0, top)
  used = tl.max(used, 0)
  if merge_cols == 1:
    total = _join(parts, parts_lse, out, row, count, hdim_v, 0, used, top,
                  TILE_N, HEAD)
  else:
    total = _join(parts, parts_lse, out, row, count, hdim_v,
                  place * (HEAD // MERGE_COLS), used, top,
                  TILE_N * MERGE_COLS, HEAD // MERGE_COLS)
  if ((flags & LSE) != 0) & (place == 0):
    safe = tl.where(total != 0, total, 1.0)
    row_lse = tl.where(total != 0, top + tl.log(safe), float("-inf"))
    tl.store(lse + row % nhead_q * tokens + row // nhead_q, row_lse)
