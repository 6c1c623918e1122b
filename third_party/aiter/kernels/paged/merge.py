# SPDX-License-Identifier: Apache-2.0
"""Joins the parts of rows whose keys were divided, always in the same order."""

import triton
import triton.language as tl

from third_party.aiter.kernels.paged.attend import LSE

# Parts whose lse is looked at together.
LANES = tl.constexpr(128)


@triton.jit
def _lse_of(parts_lse, row, part, count, splits):
  return tl.load(parts_lse + part.to(tl.int64) * count + row,
                 mask=part < splits, other=float("-inf"))


@triton.jit
def paged_merge(
    parts, parts_lse, out, lse, tokens, nhead_q, hdim_v, splits, flags,
    TILE_N: tl.constexpr, HEAD: tl.constexpr,
):
  """out = sum of exp(lse of a part) * part / sum of exp(lse of a part).

  Layouts are those of paged_attend. A row's parts come first: behind the last
  whose lse is not -inf nothing is read. The largest lse is found first: then no
  part's load waits for another's.

  Grid: tokens * nhead_q rows.
  """
  row = tl.program_id(0).to(tl.int64)
  count = tokens.to(tl.int64) * nhead_q
  cols = tl.arange(0, HEAD)[None, :]
  lanes = tl.arange(0, LANES)
  m = tl.full([LANES], float("-inf"), tl.float32)
  used = lanes * 0
  for p0 in range(0, splits, LANES):
    part_lse = _lse_of(parts_lse, row, p0 + lanes, count, splits)
    m = tl.maximum(m, part_lse)
    used = tl.where(part_lse != float("-inf"), p0 + lanes + 1, used)
  top = tl.max(m, 0)
  top = tl.where(top == float("-inf"), 0.0, top)
  used = tl.max(used, 0)
  p = tl.arange(0, TILE_N)
  l = tl.zeros([TILE_N], tl.float32)
  acc = tl.zeros([TILE_N, HEAD], tl.float32)
  for p0 in range(0, used, TILE_N):
    part = p0 + p
    weight = tl.exp(_lse_of(parts_lse, row, part, count, used) - top)
    at = (part.to(tl.int64) * count + row) * hdim_v
    here = tl.load(parts + at[:, None] + cols,
                   mask=(part < used)[:, None] & (cols < hdim_v), other=0.0)
    l += weight
    acc += here * weight[:, None]
  total = tl.sum(l, 0)
  any_key = total != 0
  safe = tl.where(any_key, total, 1.0)
  if flags & LSE:
    row_lse = tl.where(any_key, top + tl.log(safe), float("-inf"))
    tl.store(lse + row % nhead_q * tokens + row // nhead_q, row_lse)
  of_row = tl.sum(acc, 0) / safe
  tl.store(out + row * hdim_v + tl.arange(0, HEAD),
           of_row.to(out.dtype.element_ty), mask=tl.arange(0, HEAD) < hdim_v)
