# SPDX-License-Identifier: Apache-2.0
"""gemm.py's products of few rows of a, for CDNA's matrix units, in Gluon.

Such a product takes as long as b takes to come from memory. So nothing stands
between the two: a wave loads both operands into the registers from which matrix
instructions take them, always a step ahead of these, and no wave waits for
another. Waves divide each step's k. Their sums meet once, at the end.

Of aligned operands whose type the matrix unit has.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.gemm import gemm

_tile_of = gluon.jit(gemm.tile_of.fn)


@gluon.constexpr_function
def _sums(waves, bits, cdna):
  """The layout of sums [waves, rows, columns]: a wave has all of its own."""
  # What an instruction of 16 rows and columns adds up.
  depth = 256 // bits * (1 if bits == 8 else cdna - 2)
  return gl.amd.AMDMFMALayout(
      version=cdna, instr_shape=[16, 16, depth], transposed=True,
      warps_per_cta=[waves, 1, 1])


@gluon.constexpr_function
def _added(waves, rows, columns):
  """The layout of the same where each lane has the sums of all waves."""
  values = min(4, rows * columns // (64 * waves))
  lanes = columns // values
  return gl.BlockedLayout(
      [waves, 1, values], [1, 64 // lanes, lanes], [1, waves, 1], [2, 1, 0])


@gluon.jit
def _load(ptrs, at, left, BLOCK: gl.constexpr, CHECK: gl.constexpr):
  """What each wave takes of a step: of a, of b, and with BLOCK what scales the
  product's rows and all of it; with CHECK 0 behind the first `left` of k."""
  a, b, a_scale, b_scale = ptrs
  a_at, a_along, b_at, b_along, a_scale_at, b_scale_at, wave = at
  if CHECK:
    # A buffer reads as 0 where its mask is 0.
    a_tile = buffer_load(a, a_at, mask=a_along < left)
    b_tile = buffer_load(b, b_at, mask=b_along < left)
  else:
    a_tile = buffer_load(a, a_at)
    b_tile = buffer_load(b, b_at)
  if BLOCK:
    there = wave * gemm.SCALE_BLOCK < left
    return (a_tile, b_tile,
            buffer_load(a_scale, a_scale_at, mask=there[:, None]),
            buffer_load(b_scale, b_scale_at, mask=there))
  else:
    return a_tile, b_tile, left, left


@gluon.jit
def _next(ptrs, steps):
  """Where the next step begins."""
  return (ptrs[0] + steps[0], ptrs[1] + steps[1], ptrs[2] + steps[2],
          ptrs[3] + steps[3])


@gluon.jit
def _add(acc, step, BLOCK: gl.constexpr):
  """acc plus a step's product."""
  a_tile, b_tile, rows, block = step
  if BLOCK:
    part = mfma(a_tile, b_tile, gl.zeros_like(acc))
    return acc + part * (rows * block[:, None])[:, :, None]
  else:
    return mfma(a_tile, b_tile, acc)


@gluon.jit
def _gemm(
    a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale,
    stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
    k_per_split, activation, flags, BLOCK: gl.constexpr, ROW: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr, CDNA: gl.constexpr,
):
  """One tile of out, or of one split's part of it."""
  WAVES: gl.constexpr = gl.num_warps()
  EACH: gl.constexpr = TILE_K // WAVES
  BITS: gl.constexpr = a.dtype.element_ty.primitive_bitwidth
  SUMS: gl.constexpr = _sums(WAVES, BITS, CDNA)
  A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 128 // BITS)
  B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 128 // BITS)
  tile_m, tile_n = _tile_of(
      gl.program_id(0), m, n, TILE_M, TILE_N, GROUP_M, XCDS, True)
  split = gl.program_id(1)
  index = gl.program_id(2).to(gl.int64)
  m0 = tile_m * TILE_M
  n0 = tile_n * TILE_N
  tiles.assume_stride(stride_a)
  tiles.assume_stride(stride_b)
  first = split * k_per_split
  left = gl.minimum(k - first, k_per_split)
  a += index * batch_stride_a + m0.to(gl.int64) * stride_a + first
  b += index * batch_stride_b + n0.to(gl.int64) * stride_b + first

  # Rows and columns past the last are the tile's first.
  row = gl.arange(0, TILE_M, gl.SliceLayout(0, gl.SliceLayout(2, A)))
  row = gl.where(row < m - m0, row, 0)[None, :, None]
  WAVE_A: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, A))
  ALONG_A: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, A))
  a_along = (gl.arange(0, WAVES, WAVE_A)[:, None, None] * EACH
             + gl.arange(0, EACH, ALONG_A)[None, None, :])
  a_at = row * stride_a + a_along
  col = gl.arange(0, TILE_N, gl.SliceLayout(0, gl.SliceLayout(1, B)))
  col = gl.where(col < n - n0, col, 0)[None, None, :]
  WAVE_B: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, B))
  ALONG_B: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, B))
  b_along = (gl.arange(0, WAVES, WAVE_B)[:, None, None] * EACH
             + gl.arange(0, EACH, ALONG_B)[None, :, None])
  b_at = col * stride_b + b_along

  a_scale += index * batch_stride_a_scale
  b_scale += index * batch_stride_b_scale
  a_scale_at = a_scale
  b_scale_at = b_scale
  wave = gl.arange(0, WAVES, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
  rows_at = 0
  if BLOCK:
    gl.static_assert(gemm.SCALE_BLOCK % TILE_N == 0, "a tile has one of b's")
    gl.static_assert(EACH == gemm.SCALE_BLOCK, "a wave's step has one")
    block = (first // gemm.SCALE_BLOCK).to(gl.int64)
    a_scale_at += m0.to(gl.int64) * stride_a_scale_m + block * stride_a_scale_k
    b_scale_at += ((n0 // gemm.SCALE_BLOCK).to(gl.int64) * stride_b_scale_n
                   + block * stride_b_scale_k)
    r = gl.arange(0, TILE_M, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    r = gl.where(r < m - m0, r, 0)
    rows_at = (wave * stride_a_scale_k)[:, None] + (r * stride_a_scale_m)[None]
  waves_at = wave * stride_b_scale_k

  ADDED: gl.constexpr = gl.int32 if a.dtype.element_ty == gl.int8 else (
      gl.float32)
  acc = gl.zeros([WAVES, TILE_M, TILE_N], ADDED, SUMS)
  ptrs = (a, b, a_scale_at, b_scale_at)
  steps = (TILE_K, TILE_K, WAVES * stride_a_scale_k, WAVES * stride_b_scale_k)
  at = (a_at, a_along, b_at, b_along, rows_at, waves_at, wave)
  # Two steps a turn: what is loaded stays in its registers.
  turns = left // (2 * TILE_K)
  even = _load(ptrs, at, left, BLOCK, True)
  for turn in range(0, turns):
    ptrs = _next(ptrs, steps)
    odd = _load(ptrs, at, TILE_K, BLOCK, False)
    acc = _add(acc, even, BLOCK)
    ptrs = _next(ptrs, steps)
    if turn < turns - 1:
      even = _load(ptrs, at, TILE_K, BLOCK, False)
    acc = _add(acc, odd, BLOCK)
  left -= turns * (2 * TILE_K)
  while left > 0:
    acc = _add(acc, _load(ptrs, at, left, BLOCK, True), BLOCK)
    ptrs = _next(ptrs, steps)
    left -= TILE_K

  END: gl.constexpr = _added(WAVES, TILE_M, TILE_N)
  x = gl.sum(gl.convert_layout(acc, END), 0)
  TILE: gl.constexpr = x.type.layout
  rows = gl.arange(0, TILE_M, gl.SliceLayout(1, TILE))
  cols = gl.arange(0, TILE_N, gl.SliceLayout(0, TILE))
  whole = k_per_split >= k
  if whole:
    y = gemm.finish(
        x, a_scale, b_scale, stride_a_scale_m, stride_b_scale_n, bias, bias_f32,
        m0, n0, m, n, rows, cols, activation, flags, ROW)
  else:
    y = x.to(gl.float32, bitcast=True)
  gemm.store(
      y, out_bf16, out_f32, workspace, split, batch, index, batch_stride_out,
      m0, n0, m, n, rows, cols, whole, flags)


@gluon.jit
def gemm_nt(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr, CDNA: gl.constexpr,
):
  """gemm.gemm_nt."""
  _gemm(
      a, b, a, b, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out, 0, 0, 0, 0, 0, 0,
      k_per_split, activation, flags, False, False,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, CDNA)


@gluon.jit
def gemm_row(
    a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale, a_scale_step, b_scale_step,
    k_per_split, activation, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr, CDNA: gl.constexpr,
):
  """gemm.gemm_row."""
  _gemm(
      a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      batch_stride_a_scale, batch_stride_b_scale,
      a_scale_step, 0, b_scale_step, 0,
      k_per_split, activation, flags, False, True,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, CDNA)


@gluon.jit
def gemm_block(
    a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale,
    stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
    k_per_split, activation, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr, CDNA: gl.constexpr,
):
  """gemm.gemm_block, of a tile in one block of b's columns."""
  _gemm(
      a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      batch_stride_a_scale, batch_stride_b_scale,
      stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
      k_per_split, activation, flags, True, False,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, CDNA)
