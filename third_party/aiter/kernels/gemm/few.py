# SPDX-License-Identifier: Apache-2.0
"""gemm.py's products of few rows of a, for CDNA's matrix units, in Gluon.

Such a product takes as long as b takes to come from memory. So nothing stands
between the two: a wave loads both operands into the registers from which matrix
instructions take them, always a step ahead of these, and no wave waits for
another. Waves divide each step's k. Their sums meet once, at the end. Loads are
begun between two barriers of the scheduler, which else moves them behind
products.

Of aligned operands whose type the matrix unit has.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma
from triton.experimental.gluon.language.amd.hint import sched_barrier

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.gemm import gemm

_tile_of = gluon.jit(gemm.tile_of.fn)

# Steps whose scales are loaded at once.
AHEAD = gl.constexpr(8)


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


@gluon.constexpr_function
def _scales(waves, rows):
  """The layout of scales [waves, rows, AHEAD steps]: the lanes that share a row
  divide the steps."""
  row = [[0, 1 << i, 0] for i in range(rows.bit_length() - 1)]
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 0, 4], *row[4:]],
      lane_bases=[*row[:4], [0, 0, 1], [0, 0, 2]],
      warp_bases=[[1 << i, 0, 0] for i in range(waves.bit_length() - 1)],
      block_bases=[], shape=[waves, rows, AHEAD.value])


@gluon.jit
def _load(ptrs, at, left, CHECK: gl.constexpr):
  """What each wave takes of a step: of a and of b; with CHECK 0 behind the
  first `left` of k."""
  a, b = ptrs
  a_at, a_along, b_at, b_along = at
  if CHECK:
    # A buffer reads as 0 where its mask is 0.
    b_tile = buffer_load(b, b_at, mask=b_along < left)
    a_tile = buffer_load(a, a_at, mask=a_along < left)
  else:
    b_tile = buffer_load(b, b_at)
    a_tile = buffer_load(a, a_at)
  return a_tile, b_tile


@gluon.jit
def _load_scales(ptrs, at, left):
  """What scales the rows of AHEAD steps' products."""
  rows, block = ptrs
  rows_at, block_at, along = at
  there = along < left
  block = buffer_load(block, block_at, mask=there)
  return buffer_load(rows, rows_at, mask=there[:, None, :]) * block[:, None, :]


@gluon.jit
def _pick(scales, step, LAYOUT: gl.constexpr):
  """Those of one of the steps."""
  steps = gl.arange(0, AHEAD, gl.SliceLayout(0, gl.SliceLayout(
      1, scales.type.layout)))
  of_step = gl.where(steps[None, None, :] == step, scales, 0.0)
  return gl.convert_layout(gl.sum(of_step, 2), LAYOUT)


@gluon.jit
def _next(ptrs, step):
  """Where the next step begins."""
  return ptrs[0] + step, ptrs[1] + step


@gluon.jit
def _add(acc, tiles, rows, BLOCK: gl.constexpr):
  """acc plus a step's product."""
  a_tile, b_tile = tiles
  if BLOCK:
    part = mfma(a_tile, b_tile, gl.zeros_like(acc))
    return acc + part * rows[:, :, None]
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
  tile_m = 0
  tile_n = gl.program_id(0)
  if m > TILE_M:
    # Else nothing waits for its divisions.
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

  ADDED: gl.constexpr = gl.int32 if a.dtype.element_ty == gl.int8 else (
      gl.float32)
  acc = gl.zeros([WAVES, TILE_M, TILE_N], ADDED, SUMS)
  # Those of a row, without columns.
  OF_ROW: gl.constexpr = gl.SliceLayout(2, SUMS)
  ptrs = (a, b)
  at = (a_at, a_along, b_at, b_along)
  even = _load(ptrs, at, left, True)
  sched_barrier()
  a_scale += index * batch_stride_a_scale
  b_scale += index * batch_stride_b_scale
  # Waves ask for scales of many steps while they are together: most are in
  # lines of the L1, which has them no longer when a wave's next step begins.
  scales = 0
  if BLOCK:
    gl.static_assert(gemm.SCALE_BLOCK % TILE_N == 0, "a tile has one of b's")
    gl.static_assert(EACH == gemm.SCALE_BLOCK, "a wave's step has one")
    SCALES: gl.constexpr = _scales(WAVES, TILE_M)
    STEP: gl.constexpr = gl.SliceLayout(1, SCALES)
    block = (first // gemm.SCALE_BLOCK).to(gl.int64)
    scale_ptrs = (
        a_scale + m0.to(gl.int64) * stride_a_scale_m + block * stride_a_scale_k,
        b_scale + (n0 // gemm.SCALE_BLOCK).to(gl.int64) * stride_b_scale_n
        + block * stride_b_scale_k)
    r = gl.arange(0, TILE_M, gl.SliceLayout(0, gl.SliceLayout(2, SCALES)))
    r = gl.where(r < m - m0, r, 0)
    of = (gl.arange(0, WAVES, gl.SliceLayout(1, STEP))[:, None]
          + gl.arange(0, AHEAD, gl.SliceLayout(0, STEP))[None, :] * WAVES)
    scales_at = (
        (of * stride_a_scale_k)[:, None, :]
        + (r * stride_a_scale_m)[None, :, None],
        of * stride_b_scale_k, of * gemm.SCALE_BLOCK)
    scales = _load_scales(scale_ptrs, scales_at, left)
    sched_barrier()
  # Two steps a turn: what is loaded stays in its registers.
  turns = (left - 1) // (2 * TILE_K)
  for turn in range(0, turns):
    ptrs = _next(ptrs, TILE_K)
    odd = _load(ptrs, at, TILE_K, False)
    sched_barrier()
    of_even = 0
    of_odd = 0
    if BLOCK:
      step = turn * 2 % AHEAD
      of_even = _pick(scales, step, OF_ROW)
      of_odd = _pick(scales, step + 1, OF_ROW)
      if step == AHEAD - 2:
        scale_ptrs = (scale_ptrs[0] + AHEAD * WAVES * stride_a_scale_k,
                      scale_ptrs[1] + AHEAD * WAVES * stride_b_scale_k)
        scales = _load_scales(scale_ptrs, scales_at, left - 2 * TILE_K)
      sched_barrier()
    acc = _add(acc, even, of_even, BLOCK)
    sched_barrier()
    ptrs = _next(ptrs, TILE_K)
    left -= 2 * TILE_K
    even = _load(ptrs, at, left, True)
    sched_barrier()
    acc = _add(acc, odd, of_odd, BLOCK)
    sched_barrier()
  of_even = 0
  of_odd = 0
  if BLOCK:
    step = turns * 2 % AHEAD
    of_even = _pick(scales, step, OF_ROW)
    of_odd = _pick(scales, step + 1, OF_ROW)
    sched_barrier()
  if left > TILE_K:
    odd = _load(_next(ptrs, TILE_K), at, left - TILE_K, True)
    sched_barrier()
    acc = _add(acc, even, of_even, BLOCK)
    acc = _add(acc, odd, of_odd, BLOCK)
  else:
    acc = _add(acc, even, of_even, BLOCK)

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
