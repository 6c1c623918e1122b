# SPDX-License-Identifier: Apache-2.0
"""merge.py's paged_merge for Hopper (sm_90): as little as can be waited for.

Most rows have a few parts, of which no more are asked for. Where there are few
rows, of one or two sequences, each has many: they are asked for at once, before
it is known which of them are there.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from third_party.aiter.kernels.paged.attend import LSE
from third_party.aiter.kernels.paged.merge import LANES, _lse_of


@triton.jit
def _ask(parts, parts_lse, row, part, count, hdim_v, cols, stop):
  """The lse of parts before `stop`, and columns of them; zeros of others."""
  at = (part.to(tl.int64) * count + row) * hdim_v
  return (_lse_of(parts_lse, row, part, count, stop),
          tl.load(parts + at[:, None] + cols[None, :],
                  mask=(part < stop)[:, None] & (cols < hdim_v)[None, :],
                  other=0.0))


@triton.jit
def _survey(parts_lse, row, count, splits):
  """(parts that are read, whether there are any, the largest lse)."""
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
  top = tl.max(m, 0)
  return (tl.max(used, 0), end > 0,
          tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def _join(parts, parts_lse, out, lse, row, count, tokens, nhead_q, hdim_v,
          first_col, splits, flags, N: tl.constexpr, WIDTH: tl.constexpr,
          EARLY: tl.constexpr):
  """Joins WIDTH columns of a row, N parts at a time.

  EARLY: the first are asked for before it is known whether they are there.
  """
  part = tl.arange(0, N)
  cols = first_col + tl.arange(0, WIDTH)
  if EARLY:
    part_lse, x = _ask(parts, parts_lse, row, part, count, hdim_v, cols, splits)
  used, any_part, top = _survey(parts_lse, row, count, splits)
  if not EARLY:
    part_lse, x = _ask(parts, parts_lse, row, part, count, hdim_v, cols, used)
  # What no block has written may be NaN.
  weight = tl.where(part < used, tl.exp(part_lse - top), 0.0)
  l = weight
  acc = tl.where((part < used)[:, None], x * weight[:, None], 0.0)
  for p0 in range(N, used, N):
    part_lse, x = _ask(parts, parts_lse, row, p0 + part, count, hdim_v, cols,
                       used)
    weight = tl.exp(part_lse - top)
    l += weight
    acc += x * weight[:, None]
  total = tl.sum(l, 0)
  safe = tl.where(total != 0, total, 1.0)
  tl.store(out + row * hdim_v + cols,
           (tl.sum(acc, 0) / safe).to(out.dtype.element_ty),
           mask=(cols < hdim_v) & any_part)
  if ((flags & LSE) != 0) & (first_col == 0) & any_part:
    row_lse = tl.where(total != 0, top + tl.log(safe), float("-inf"))
    tl.store(lse + row % nhead_q * tokens + row // nhead_q, row_lse)


@triton.jit
def paged_merge(
    parts, parts_lse, out, lse, tokens, nhead_q, hdim_v, splits, merge_cols,
    flags, TILE_N: tl.constexpr, HEAD: tl.constexpr, MERGE_COLS: tl.constexpr,
    OVERLAPS: tl.constexpr, FEW_N: tl.constexpr,
):
  """As there; FEW_N: parts at a time where programs share a row's columns."""
  if OVERLAPS:
    gdc_launch_dependents()
    gdc_wait()
  row = (tl.program_id(0) // merge_cols).to(tl.int64)
  place = tl.program_id(0) % merge_cols
  count = tokens.to(tl.int64) * nhead_q
  if merge_cols == 1:
    _join(parts, parts_lse, out, lse, row, count, tokens, nhead_q, hdim_v, 0,
          splits, flags, TILE_N, HEAD, False)
  else:
    _join(parts, parts_lse, out, lse, row, count, tokens, nhead_q, hdim_v,
          place * (HEAD // MERGE_COLS), splits, flags, FEW_N,
          HEAD // MERGE_COLS, True)
