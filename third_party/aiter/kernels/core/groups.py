# SPDX-License-Identifier: Apache-2.0
"""What kernels share that round groups of columns, each with its scale.

A tile is TILE_M rows of RUNS runs of 32 columns: the shortest group is a run.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import rounding

divide = rounding.divide


@triton.jit
def divide_by_any(x, scale):
  """x / scale as IEEE 754 rounds it, or what saturates alike."""
  usual = (scale >= 2.0**-60) & (scale <= 2.0**100)
  if tl.min(tl.ravel(usual).to(tl.int32), 0) == 1:
    # Beyond 2^24 every format saturates; there the steps might overflow.
    first = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    q = tl.where(tl.abs(first) < 2.0**24, divide(x, scale), first)
  else:
    q = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
  return q


@triton.jit
def _widest(m, TILE_M: tl.constexpr, RUNS: tl.constexpr):
  """Of each pair of neighbouring columns the larger one, at both places."""
  pairs = tl.max(tl.reshape(m, [TILE_M, RUNS // 2, 2]), 2, keep_dims=True)
  return tl.reshape(
      tl.broadcast_to(pairs, [TILE_M, RUNS // 2, 2]), [TILE_M, RUNS])


@triton.jit
def of_groups(m, group, TILE_M: tl.constexpr, RUNS: tl.constexpr):
  """The largest of a group's runs, at each of them; group: 32, 64 or 128."""
  if group >= 64:
    m = _widest(m, TILE_M, RUNS)
  if group >= 128:
    quads = tl.max(tl.reshape(m, [TILE_M, RUNS // 4, 4]), 2, keep_dims=True)
    m = tl.reshape(
        tl.broadcast_to(quads, [TILE_M, RUNS // 4, 4]), [TILE_M, RUNS])
  return m


@triton.jit
def shuffled(r, c, cols):
  """Where scale [r, c] of `cols` columns lies as scaled MFMA takes it."""
  return ((r // 32 * 32 * cols + r % 16 * 4 + r % 32 // 16)[:, None]
          + (c // 8 * 256 + c % 4 * 64 + c % 8 // 4 * 2)[None, :]).to(tl.int64)
