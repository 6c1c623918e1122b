# SPDX-License-Identifier: Apache-2.0
"""merge.py's paged_merge where many rows have few parts, as those of prompts.

A program has TILE_M rows. Where sequences are short none of them is divided,
which one load tells.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from third_party.aiter.kernels.paged.attend import LSE

# Parts that are asked for together.
_TOGETHER = tl.constexpr(4)


@triton.jit
def paged_merge(
    parts, parts_lse, out, lse, tokens, nhead_q, hdim_v, splits, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
  """As there, of at most TILE_N parts.

  Grid: ceil(tokens * nhead_q / TILE_M).
  """
  if OVERLAPS:
    gdc_launch_dependents()
    gdc_wait()
  count = tokens.to(tl.int64) * nhead_q
  row = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
  part = tl.arange(0, TILE_N)[None, :]
  part_lse = tl.load(parts_lse + part * count + row[:, None],
                     mask=(part < splits) & (row < count)[:, None],
                     other=float("inf"))
  end = tl.min(tl.where(part_lse == float("inf"), part, TILE_N), 1)
  if tl.max(end, 0) == 0:
    return
  part_lse = tl.where(part < end[:, None], part_lse, float("-inf"))
  top = tl.max(part_lse, 1)
  top = tl.where(top == float("-inf"), 0.0, top)
  weights = tl.exp(part_lse - top[:, None])
  # What no block has written may be NaN.
  used = tl.max(tl.where(weights != 0, part + 1, 0))
  cols = tl.arange(0, HEAD)
  at = (row * hdim_v)[:, None] + cols[None, :]
  acc = tl.zeros([TILE_M, HEAD], tl.float32)
  for first in range(0, used, _TOGETHER):
    for p in tl.static_range(_TOGETHER):
      weight = tl.sum(tl.where(part == first + p, weights, 0.0), 1)
      x = tl.load(parts + (first + p) * count * hdim_v + at,
                  mask=(weight != 0)[:, None] & (cols < hdim_v)[None, :],
                  other=0.0)
      acc += x * weight[:, None]
  total = tl.sum(weights, 1)
  safe = tl.where(total != 0, total, 1.0)
  tl.store(out + at, (acc / safe[:, None]).to(out.dtype.element_ty),
           mask=(end > 0)[:, None] & (cols < hdim_v)[None, :])
  if (flags & LSE) != 0:
    tl.store(lse + row % nhead_q * tokens + row // nhead_q,
             tl.where(total != 0, top + tl.log(safe), float("-inf")),
             mask=end > 0)
