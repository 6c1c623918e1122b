# SPDX-License-Identifier: Apache-2.0
"""Products of runs of rows, each with a matrix of its own.

  gmm_plan  which tile of rows belongs to which group
  gmm_nn    a [m, k], b [groups, k, n]  -> out [m, n]
  gmm_nt    a [m, k], b [groups, n, k]  -> out [m, n], the first's gradient of a
  gmm_tn    a [m, k], b [m, n]          -> out [groups, k, n], of its b

Sizes of groups are on the device. gmm_plan makes a list of tiles of them, so
that a block of the others finds its rows by one look. Such a list, `plan`, is
int32 [tiles + 1, 4]. Its first entry has the number of tiles, and each other
(group, first row, end of the rows, 0); group -1 owns no matrix, and its rows of
the result are 0. For gmm_tn each group is one tile, and an empty one too.

Rows past those of a tile are read again as its first one, and not written.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.gemm import gemm
from third_party.aiter.kernels.gmm.family import FEATURES

OUT_F32 = tl.constexpr(FEATURES["out_f32"])
LEAD = tl.constexpr(FEATURES["lead"])


@triton.jit
def gmm_plan(
    sizes, plan, m, groups, tile_rows, tiles_of_rows, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
  """Writes TILE_M entries of the plan, looking at TILE_N groups at once.

  sizes [groups], with LEAD one more in front. What is beyond m is cut off, and
  rows that are left are a group that owns no matrix. tile_rows: rows of a tile;
  0: each group is one tile.
  """
  lead = flags & LEAD
  lead = tl.where(lead != 0, 1, 0)
  listed = groups + lead
  slot = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M) - 1
  slot = slot[:, None]
  group = tl.zeros([TILE_M], tl.int32)
  first = tl.zeros([TILE_M], tl.int32)
  end = tl.zeros([TILE_M], tl.int32)
  rows_before = tl.zeros([], tl.int64)
  tiles_before = tl.zeros([], tl.int32)
  # The group behind the last one has what is left.
  for g0 in range(0, listed + 1, TILE_N):
    g = g0 + tl.arange(0, TILE_N)
    size = tl.load(sizes + g, mask=g < listed, other=0)
    size = tl.minimum(tl.maximum(size, 0), m).to(tl.int64)
    size_end = rows_before + tl.cumsum(size, 0)
    start = tl.minimum(size_end - size, m).to(tl.int32)
    stop = tl.where(g < listed, tl.minimum(size_end, m).to(tl.int32), m)
    start = tl.where(g > listed, m, start)
    owner = tl.where((g < lead) | (g >= listed), -1, g - lead)
    if tile_rows == 0:
      rows = m
      tiles = tl.where(owner >= 0, 1, 0)
    else:
      rows = tile_rows
      tiles = (stop - start + tile_rows - 1) // tile_rows
    tile_end = tiles_before + tl.cumsum(tiles, 0)
    nth = slot - (tile_end - tiles)[None, :]
    mine = (nth >= 0) & (nth < tiles[None, :])
    group += tl.sum(tl.where(mine, owner[None, :], 0), 1)
    first += tl.sum(tl.where(mine, start[None, :] + nth * rows, 0), 1)
    end += tl.sum(tl.where(mine, stop[None, :], 0), 1)
    rows_before += tl.sum(size, 0)
    tiles_before += tl.sum(tiles, 0)
  slot = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  at = plan + 4 * slot
  inside = slot <= tiles_of_rows
  tl.store(at, tl.where(slot == 0, tiles_before, group), mask=inside)
  tl.store(at + 1, first, mask=inside)
  tl.store(at + 2, end, mask=inside)


@triton.jit
def _entry(plan, slot, AMD: tl.constexpr):
  """(group, first row, end) of a tile of rows."""
  at = plan + 4 * (slot + 1)
  group, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
  if AMD:
    # What all lanes share belongs in scalar registers: see gemm.tile_of.
    group = gemm.first_lane(group)
    first = gemm.first_lane(first)
    end = gemm.first_lane(end)
  return group, first, end


@triton.jit
def _product(
    a, b, stride_a, stride_b, m_left, n_left, k,
    A_K_LAST: tl.constexpr, B_K_LAST: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, ALIGN: tl.constexpr,
):
  """The tile's sum over k, of operands that begin at it."""
  a_offsets = gemm.tile_offsets(
      stride_a, m_left, TILE_M, TILE_K, A_K_LAST, ALIGN)
  b_offsets = gemm.tile_offsets(
      stride_b, n_left, TILE_N, TILE_K, B_K_LAST, ALIGN)
  acc = tl.zeros([TILE_M, TILE_N], tl.float32)
  steps = k // TILE_K
  begin = tl.zeros([], tl.int32)
  for step in tl.range(0, steps):
    acc = gemm.add_step(
        acc, begin + step * TILE_K, TILE_K, a, b, a_offsets, b_offsets,
        stride_a, stride_b, a, b, 0, 0, 0, 0, 0, gemm.PLAIN, A_K_LAST,
        B_K_LAST, TILE_K, 1, False, False, False)
  if k > steps * TILE_K:
    acc = gemm.add_step(
        acc, steps * TILE_K, k - steps * TILE_K, a, b, a_offsets, b_offsets,
        stride_a, stride_b, a, b, 0, 0, 0, 0, 0, gemm.PLAIN, A_K_LAST,
        B_K_LAST, TILE_K, 1, False, False, True)
  return acc


@triton.jit
def _store(
    acc, out, out_f32, matrix, matrix_stride, m0, n0, m, n, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SLICES: tl.constexpr,
):
  """Stores a tile in parts, in the type that `flags` say."""
  PART: tl.constexpr = TILE_N // SLICES
  parts = gemm.columns(acc, SLICES)
  for i in tl.static_range(SLICES):
    if flags & OUT_F32:
      gemm.store_tile(out_f32, parts[i], matrix, matrix_stride, m0,
                      n0 + i * PART, m, n, TILE_M, PART)
    else:
      gemm.store_tile(out, parts[i].to(out.dtype.element_ty), matrix,
                      matrix_stride, m0, n0 + i * PART, m, n, TILE_M, PART)


@triton.jit
def _rows(
    a, b, plan, out, out_f32, n, k, flags, B_K_LAST: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """A tile of out [m, n]."""
  tiles = tl.load(plan)
  if XCDS > 0:
    tiles = gemm.first_lane(tiles)
  if tl.program_id(0) < tiles * tl.cdiv(n, TILE_N):
    slot, tile_n = gemm.tile_of(
        tl.program_id(0), tiles * TILE_M, n, TILE_M, TILE_N, GROUP_M, XCDS,
        XCDS > 0)
    group, first, end = _entry(plan, slot, XCDS > 0)
    n0 = tile_n * TILE_N
    a += first.to(tl.int64) * k
    b += tl.maximum(group, 0).to(tl.int64) * k * n
    if B_K_LAST:
      b += n0.to(tl.int64) * k
    else:
      b += n0
    acc = _product(
        a, b, k, k if B_K_LAST else n, end - first, n - n0,
        tl.where(group < 0, 0, k), True, B_K_LAST, TILE_M, TILE_N, TILE_K,
        ALIGN)
    _store(acc, out, out_f32, 0, 0, first, n0, end, n, flags, TILE_M, TILE_N,
           SLICES)


@triton.jit
def gmm_nn(
    a, b, plan, out, out_f32, n, k, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """out [m, n] = a [m, k] b [group of the row, k, n]; all dense.

  OUT_F32: out is out_f32. Grid: (tiles, as many as there could be).
  """
  _rows(a, b, plan, out, out_f32, n, k, flags, False, TILE_M, TILE_N, TILE_K,
        GROUP_M, XCDS, ALIGN, SLICES)


@triton.jit
def gmm_nt(
    a, b, plan, out, out_f32, n, k, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """gmm_nn with b [groups, n, k]."""
  _rows(a, b, plan, out, out_f32, n, k, flags, True, TILE_M, TILE_N, TILE_K,
        GROUP_M, XCDS, ALIGN, SLICES)


@triton.jit
def gmm_tn(
    a, b, plan, out, out_f32, n, k, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """out [groups, k, n]: of each group's rows the product of a^T and b.

  The sum is over rows, in their order; TILE_M is of k. Grid: (tiles of all
  groups).
  """
  tiles = tl.cdiv(k, TILE_M) * tl.cdiv(n, TILE_N)
  index = tl.program_id(0) // tiles
  if XCDS > 0:
    index = gemm.first_lane(index)
  tile_m, tile_n = gemm.tile_of(
      tl.program_id(0) - index * tiles, k, n, TILE_M, TILE_N, GROUP_M, 1,
      XCDS > 0)
  group, first, end = _entry(plan, index, XCDS > 0)
  m0 = tile_m * TILE_M
  n0 = tile_n * TILE_N
  acc = _product(
      a + (first.to(tl.int64) * k + m0), b + (first.to(tl.int64) * n + n0), k,
      n, k - m0, n - n0, end - first, False, False, TILE_M, TILE_N, TILE_K,
      ALIGN)
  _store(acc, out, out_f32, group.to(tl.int64), k.to(tl.int64) * n, m0, n0, k,
         n, flags, TILE_M, TILE_N, SLICES)
