# SPDX-License-Identifier: Apache-2.0
"""gemm.py's product of few rows of a and a b whose rows begin anywhere.

Such a product takes as long as b takes to come from memory, and rows of odd
lengths begin at any of the eight numbers in 16 bytes. But every eighth row
begins at the same one. A tile has such rows alone, and loads them from the
multiple of 16 bytes before they begin on, 16 bytes a lane; what it loads of a,
number by number and much less, lies as far ahead.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.gemm import gemm

# Numbers of 16 bits in 16 bytes.
RUN = tl.constexpr(8)


@triton.jit
def _add_step(
    acc, at, a, b, a_rows, b_rows, before, end, is_last, TILE_K: tl.constexpr,
    CHECK: tl.constexpr,
):
  """acc plus the product of TILE_K places of b's rows from `at` on.

  With CHECK places before the row's first number and from `end` on count as 0.
  Whole runs are loaded, whatever part of them is there, but at b's end
  (is_last).
  """
  c = at + tl.arange(0, TILE_K)[None, :]
  if CHECK:
    inside = (c >= before) & (c < end)
    a_tile = tl.load(a + (a_rows + (c - before)), mask=inside, other=0.0)
    if is_last:
      b_tile = tl.load(b + (b_rows + c), mask=inside, other=0.0)
    else:
      b_tile = tl.load(b + (b_rows + c), mask=c < tl.cdiv(end, RUN) * RUN,
                       other=0.0)
      b_tile = tl.where(inside, b_tile, 0.0)
  else:
    a_tile = tl.load(a + (a_rows + (c - before)))
    b_tile = tl.load(b + (b_rows + c))
  return tl.dot(a_tile, tl.trans(b_tile), acc)


@triton.jit
def gemm_nt(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    XCDS: tl.constexpr,
):
  """gemm.gemm_nt; tiles of columns are TILE_N of every eighth one.

  Neighbours in the grid are those of all eight: they share b's lines, and what
  they store lies side by side.
  """
  tiles_n = tl.cdiv(tl.cdiv(n, RUN), TILE_N) * RUN
  tile = gemm.neighbour(tl.program_id(0), tl.num_programs(0), XCDS)
  tile_m = tile // tiles_n
  tile_n = tile - tile_m * tiles_n
  split = tl.program_id(1)
  index = tl.program_id(2).to(tl.int64)
  m0 = tile_m * TILE_M
  n0 = tile_n // RUN * TILE_N * RUN + tile_n % RUN
  if n0 >= n:  # Some of the eighths are a column shorter.
    return
  rows = tl.arange(0, TILE_M)
  cols = tl.arange(0, TILE_N) * RUN
  # Rows that are not there are the tile's first ones.
  r = tl.where(rows < m - m0, rows, 0)
  s = tl.where(cols < n - n0, cols, 0)
  a += index * batch_stride_a + m0.to(tl.int64) * stride_a
  begin = index * batch_stride_b + n0.to(tl.int64) * stride_b
  before = (begin % RUN).to(tl.int32)
  b += begin // RUN * RUN
  a_rows = (r.to(tl.int64) * stride_a)[:, None]
  b_rows = (s // RUN).to(tl.int64)[:, None] * (stride_b.to(tl.int64) * RUN)

  # Whether a run of the tile's last row may end behind b.
  behind = (n - 1 - n0) - tl.minimum((n - 1 - n0) // RUN, TILE_N - 1) * RUN
  is_last = behind.to(tl.int64) * stride_b < RUN
  # As it is, unless there is one part, and so said to the compiler.
  first = split * (k_per_split // RUN * RUN)
  end = first + k_per_split
  if end >= k:
    end = k + before
  acc = tl.zeros([TILE_M, TILE_N], tl.float32)
  if end > before:
    acc = _add_step(acc, first, a, b, a_rows, b_rows, before, end, is_last,
                    TILE_K, True)
  steps = tl.maximum((end - first) // TILE_K, 1)
  for step in tl.range(1, steps):
    acc = _add_step(acc, first + step * TILE_K, a, b, a_rows, b_rows, before,
                    end, is_last, TILE_K, False)
  at = first + steps * TILE_K
  if at < end:
    acc = _add_step(acc, at, a, b, a_rows, b_rows, before, end, is_last,
                    TILE_K, True)

  whole = k_per_split >= k
  if whole:
    x = gemm.finish(acc, a, a, 0, 0, bias, bias_f32, m0, n0, m, n, rows, cols,
                    activation, flags, False)
  else:
    x = acc
  gemm.store(x, out_bf16, out_f32, workspace, split, batch, index,
             batch_stride_out, m0, n0, m, n, rows, cols, whole, flags)
