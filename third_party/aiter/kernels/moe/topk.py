# SPDX-License-Identifier: Apache-2.0
"""The experts of each token: the columns of its k largest scores.

Of equal scores the lower column is the larger one, and NaN is as -inf. Scores
are compared as integers in their order, where what is taken or left out has a
number below all: so a row of -inf has k different columns too.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.moe.family import FEATURES

BY_SUM = tl.constexpr(FEATURES["by_sum"])

# Below the number of -inf.
LEAST = tl.constexpr(-(2**31))


@triton.jit
def ordered(x):
  """float32 as int32 in the same order; NaN as -inf, and -0 as 0."""
  x = tl.where(x == x, x, -float("inf")) + 0.0
  bits = x.to(tl.int32, bitcast=True)
  return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _largest(number, place, axis: tl.constexpr):
  """Where the largest number is, with the axis: of equal ones the first."""
  best = tl.max(number, axis, keep_dims=True)
  return tl.min(tl.where(number == best, place, 0x7FFFFFFF), axis,
                keep_dims=True)


@triton.jit
def moe_topk(
    scores, ids, rows, groups, size, topk_groups, k, flags,
    TILE_M: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):
  """ids [rows, k] of scores [rows, groups * size], the largest one first.

  Only the topk_groups best of the groups count: by their best score, or, with
  BY_SUM, by the sum of their two best. GROUPS and SIZE, powers of two, are at
  least groups and size.
  Grid: (rows / TILE_M).
  """
  row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  group = tl.arange(0, GROUPS)[None, :, None]
  member = tl.arange(0, SIZE)[None, None, :]
  col = group * size + member
  there = (group < groups) & (member < size)
  at = scores + row.to(tl.int64)[:, None, None] * (groups * size) + col
  x = tl.load(at, mask=(row < rows)[:, None, None] & there, other=0.0)
  x = x.to(tl.float32)
  number = tl.where(there, ordered(x), LEAST)
  if topk_groups < groups:
    best = tl.max(number, 2, keep_dims=True)
    if flags & BY_SUM:
      first = _largest(number, member, 2)
      second = tl.max(tl.where(member == first, LEAST, number), 2,
                      keep_dims=True)
      # Back to float32; of a group of one there is no second.
      a = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
      b = (second ^ ((second >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
      best = ordered(a + tl.where(second == LEAST, 0.0, b))
    best = tl.where(group < groups, best, LEAST)
    kept = tl.zeros([TILE_M, GROUPS, 1], tl.int32)
    for _ in range(topk_groups):
      taken = _largest(best, group, 1)
      kept = tl.where(group == taken, 1, kept)
      best = tl.where(group == taken, LEAST, best)
    number = tl.where(kept > 0, number, LEAST)
  flat = tl.reshape(number, [TILE_M, GROUPS * SIZE])
  slot = tl.arange(0, GROUPS * SIZE)[None, :]
  to = ids + row.to(tl.int64)[:, None] * k
  for j in range(k):
    taken = _largest(flat, slot, 1)
    expert = taken // SIZE * size + taken % SIZE
    tl.store(to + j, expert, mask=(row < rows)[:, None])
    flat = tl.where(slot == taken, LEAST, flat)
