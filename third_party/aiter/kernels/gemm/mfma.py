# SPDX-License-Identifier: Apache-2.0
"""gemm.py's products with k last in both operands, for CDNA's matrix units.

The tile of b is loaded as the operand that it becomes, [TILE_K, TILE_N].
Triton then lays it out in LDS as matrix instructions read it. A tile that is
loaded as [TILE_N, TILE_K] and transposed keeps its rows one behind the other
there, and 16 lanes that read a row each meet in the same banks.

Of aligned operands whose type the matrix unit has.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.gemm import gemm

SCALE_BLOCK = gemm.SCALE_BLOCK


@triton.jit
def _add_step(
    acc, a, b, a_offsets, b_offsets, k_left,
    TILE_K: tl.constexpr, CHECK: tl.constexpr,
):
  """acc plus the product of two tiles; with CHECK of their first k_left."""
  if CHECK:
    k = tl.arange(0, TILE_K)
    a_tile = tl.load(a + a_offsets, mask=k[None, :] < k_left, other=0.0)
    b_tile = tl.load(b + b_offsets, mask=k[:, None] < k_left, other=0.0)
  else:
    a_tile = tl.load(a + a_offsets)
    b_tile = tl.load(b + b_offsets)
  return tl.dot(a_tile, b_tile, acc, out_dtype=acc.dtype)


@triton.jit
def _add_block(
    acc, a, b, a_offsets, b_offsets, k_left, a_scale, b_scale,
    TILE_K: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr,
):
  """_add_step; with BLOCK of what a_scale (a row's) and b_scale multiply."""
  if BLOCK:
    total = _add_step(
        tl.zeros_like(acc), a, b, a_offsets, b_offsets, k_left, TILE_K, CHECK)
    return acc + total * (tl.load(a_scale) * tl.load(b_scale))[:, None]
  else:
    return _add_step(acc, a, b, a_offsets, b_offsets, k_left, TILE_K, CHECK)


@triton.jit
def _store_lines(ptr, x, matrix, matrix_stride, m0, n0, m, n):
  """gemm.store_tile of whole lines.

  A tile of two dimensions Triton stores from the layout of the sums, of which
  an instruction has half a line, and memory takes each half for itself. One of
  three dimensions it turns in LDS first.
  """
  ROWS: tl.constexpr = x.shape[0]
  COLS: tl.constexpr = x.shape[1]
  rows = tl.arange(0, ROWS)
  if (n % 8 == 0) & (matrix_stride % 8 == 0):
    n = n // 8 * 8
    stride = n.to(tl.int64)
    ptr += matrix * (matrix_stride // 8 * 8) + m0 * stride + n0
    above = rows[:, None, None]
    cols = (tl.arange(0, COLS // 8) * 8)[None, :, None]
    tl.store(
        ptr + (above * stride + cols + tl.arange(0, 8)[None, None, :]),
        tl.reshape(x, [ROWS, COLS // 8, 8]).to(ptr.dtype.element_ty),
        mask=(above < m - m0) & (cols < n - n0))
  else:
    gemm.store_tile(ptr, x, matrix, matrix_stride, m0, n0, m, n, rows,
                    tl.arange(0, COLS))


@triton.jit
def _store(
    x, out_bf16, out_f32, workspace, split, batch, index, batch_stride_out,
    m0, n0, m, n, whole, flags,
):
  """gemm.store of the whole tile, 16 bits an element by whole lines."""
  if whole & ((flags & gemm.OUT_F32) == 0):
    if flags & gemm.OUT_FP16:
      y = x.to(tl.float16).to(tl.bfloat16, bitcast=True)
    else:
      y = x.to(tl.bfloat16)
    _store_lines(out_bf16, y, index, batch_stride_out, m0, n0, m, n)
  else:
    gemm.store(
        x, out_bf16, out_f32, workspace, split, batch, index, batch_stride_out,
        m0, n0, m, n, tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1]),
        whole, flags)


@triton.jit
def _gemm(
    a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale,
    stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
    k_per_split, activation, flags, BLOCK: tl.constexpr, ROW: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, SLICES: tl.constexpr,
):
  """One tile of out, or of one split's part of it."""
  tile_m, tile_n = gemm.tile_of(
      tl.program_id(0), m, n, TILE_M, TILE_N, GROUP_M, XCDS, True)
  split = tl.program_id(1)
  index = tl.program_id(2).to(tl.int64)
  m0 = tile_m * TILE_M
  n0 = tile_n * TILE_N
  tiles.assume_stride(stride_a)
  tiles.assume_stride(stride_b)
  first = split * k_per_split
  length = tl.minimum(k - first, k_per_split)
  a += index * batch_stride_a + m0.to(tl.int64) * stride_a + first
  b += index * batch_stride_b + n0.to(tl.int64) * stride_b + first
  rows = tl.arange(0, TILE_M)
  rows = tl.where(rows < m - m0, rows, 0)
  cols = tl.arange(0, TILE_N)
  cols = tl.where(cols < n - n0, cols, 0)
  along = tl.arange(0, TILE_K)
  a_offsets = rows[:, None] * stride_a + along[None, :]
  b_offsets = along[:, None] + cols[None, :] * stride_b
  a_scale += index * batch_stride_a_scale
  b_scale += index * batch_stride_b_scale
  a_scale_at = a_scale
  b_scale_at = b_scale
  if BLOCK:
    tl.static_assert(SCALE_BLOCK % TILE_N == 0, "a tile has one scale of b")
    tl.static_assert(SCALE_BLOCK % TILE_K == 0, "a step has one scale of a row")
    block = (first // SCALE_BLOCK).to(tl.int64)
    a_scale_at += (m0.to(tl.int64) * stride_a_scale_m
                   + block * stride_a_scale_k + rows * stride_a_scale_m)
    b_scale_at += ((n0 // SCALE_BLOCK).to(tl.int64) * stride_b_scale_n
                   + block * stride_b_scale_k)
  if a.dtype.element_ty == tl.int8:
    acc = tl.zeros([TILE_M, TILE_N], tl.int32)
  else:
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
  steps = length // TILE_K
  for step in tl.range(0, steps):
    done = step * TILE_K
    block = (done // SCALE_BLOCK).to(tl.int64)
    acc = _add_block(
        acc, a + done, b + done, a_offsets, b_offsets, TILE_K,
        a_scale_at + block * stride_a_scale_k,
        b_scale_at + block * stride_b_scale_k, TILE_K, BLOCK, False)
  done = steps * TILE_K
  if length > done:
    block = (done // SCALE_BLOCK).to(tl.int64)
    acc = _add_block(
        acc, a + done, b + done, a_offsets, b_offsets, length - done,
        a_scale_at + block * stride_a_scale_k,
        b_scale_at + block * stride_b_scale_k, TILE_K, BLOCK, True)
  whole = k_per_split >= k
  # In parts: a whole large tile's temporaries would not fit the registers.
  PART: tl.constexpr = TILE_N // SLICES
  parts = gemm.columns(acc, SLICES)
  rows = tl.arange(0, TILE_M)
  part = tl.arange(0, PART)
  for i in tl.static_range(SLICES):
    left = n0 + i * PART
    if whole:
      x = gemm.finish(
          parts[i], a_scale, b_scale, stride_a_scale_m, stride_b_scale_n,
          bias, bias_f32, m0, left, m, n, rows, part, activation, flags, ROW)
    else:
      x = parts[i].to(tl.float32, bitcast=True)
    _store(
        x, out_bf16, out_f32, workspace, split, batch, index, batch_stride_out,
        m0, left, m, n, whole, flags)


@triton.jit
def gemm_nt(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, SLICES: tl.constexpr,
):
  """gemm.gemm_nt."""
  _gemm(
      a, b, a, b, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out, 0, 0, 0, 0, 0, 0,
      k_per_split, activation, flags, False, False,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, SLICES)


@triton.jit
def gemm_row(
    a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale, a_scale_step, b_scale_step,
    k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, SLICES: tl.constexpr,
):
  """gemm.gemm_row."""
  _gemm(
      a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      batch_stride_a_scale, batch_stride_b_scale,
      a_scale_step, 0, b_scale_step, 0,
      k_per_split, activation, flags, False, True,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, SLICES)


@triton.jit
def gemm_block(
    a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale,
    stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
    k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, SLICES: tl.constexpr,
):
  """gemm.gemm_block, of a tile in one block of b's columns."""
  _gemm(
      a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      batch_stride_a_scale, batch_stride_b_scale,
      stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
      k_per_split, activation, flags, True, False,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, SLICES)
