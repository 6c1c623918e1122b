# SPDX-License-Identifier: Apache-2.0
"""gemm.py's products of many rows for gfx950, in Gluon.

Tiles go straight to LDS, in chunks: half of a tile's rows of a, or half of its
columns of b, each with all of a step's k. A step is four products of two
chunks:

  the upper rows by one half of the columns, by the other one,
  the lower rows by that other one, by the first one,

and the next step begins with the half of the columns that this one had second.
So each product needs one chunk more than the one before it, which is read while
that one is made; and its place in LDS is copied into again one product later,
two steps ahead. Six chunks are always on their way, with one barrier a product.

Of aligned operands of 16 bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import mfma
from triton.experimental.gluon.language.amd.cdna4 import async_copy
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.experimental.gluon.language.amd.slice import slice as part_of

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.gemm import gemm

_assume_stride = gluon.jit(tiles.assume_stride.fn)
_tile_of = gluon.jit(gemm.tile_of.fn)

# Of k: what a step, and what a matrix instruction multiplies.
STEP = gl.constexpr(64)
DEPTH = gl.constexpr(16)


@gluon.constexpr_function
def _bits(first, end):
  return [1 << bit for bit in range(first, end)]


@gluon.constexpr_function
def _shape(size, k_last):
  return [size, STEP.value] if k_last else [STEP.value, size]


@gluon.constexpr_function
def _order(size, k_last):
  """How a chunk lies in LDS: bits of the column, and those of the row that
  follow in a piece of 1024 bytes, which a wave copies at once, and behind it.

  Rows of one read lie in pieces that follow each other, which are a little
  apart, so that they meet in no bank: eight of 64 of k, of which 16 lanes read
  16 bytes, or four of one k, of which 32 lanes read 8 and turn them.
  """
  rows, cols = (i.bit_length() - 1 for i in _shape(size, k_last))
  apart = 3 if k_last else 2
  inside = apart + 9 - cols
  return (_bits(0, cols), _bits(apart, inside),
          _bits(0, apart) + _bits(inside, rows))


@gluon.constexpr_function
def _copied(size, k_last, waves):
  """How waves copy a chunk: a lane 8 elements of a row."""
  cols, inside, behind = _order(size, k_last)
  first = waves.bit_length() - 1
  return gl.DistributedLinearLayout(
      reg_bases=[*([0, bit] for bit in cols[:3]),
                 *([bit, 0] for bit in behind[first:])],
      lane_bases=[*([0, bit] for bit in cols[3:]),
                  *([bit, 0] for bit in inside)],
      warp_bases=[[bit, 0] for bit in behind[:first]],
      block_bases=[], shape=_shape(size, k_last))


@gluon.constexpr_function
def _padded(size, k_last):
  """A chunk in LDS."""
  cols, inside, behind = _order(size, k_last)
  return gl.PaddedSharedLayout(
      [[512, 8 if k_last else 32]],
      [*([0, bit] for bit in cols), *([bit, 0] for bit in inside + behind)],
      [], _shape(size, k_last))


@gluon.jit
def _places(at, left, apart, HINT: gl.constexpr):
  """Rows of an operand from `apart` on; behind those left its first one.

  HINT: all are multiples of so many, and their elements lie together.
  """
  at = gl.where(at < left, at + apart, 0)
  return gl.max_contiguous(gl.multiple_of(at, HINT), HINT)


@gluon.jit
def _operand(ptr, stride, left, others, apart, SIZE: gl.constexpr,
             K_LAST: gl.constexpr):
  """What _copy and _read need of a tile of an operand, with k last or first.

  left, others: rows that are left of its first half and of its second one,
  which begins `apart` rows later.
  Returns where the halves lie from the tile's first element, and in which of k;
  and the chunks in LDS, both halves of even steps and of odd ones.
  """
  HALF: gl.constexpr = SIZE // 2
  LAYOUT: gl.constexpr = _copied(HALF, K_LAST, gl.num_warps())
  SHAPE: gl.constexpr = _shape(HALF, K_LAST)
  row = gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT))
  col = gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT))
  chunks = gl.allocate_shared_memory(
      ptr.dtype.element_ty, [4, SHAPE[0], SHAPE[1]], _padded(HALF, K_LAST))
  _assume_stride(stride)
  if K_LAST:
    along = col[None, :]
    first = _places(row, left, 0, 1)[:, None] * stride + along
    second = _places(row, others, apart, 1)[:, None] * stride + along
  else:
    along = row[:, None]
    first = along * stride + _places(col, left, 0, 8)[None, :]
    second = along * stride + _places(col, others, apart, 8)[None, :]
  return (first, second), along, chunks


@gluon.jit
def _copy(ptr, operand, half: gl.constexpr, slot: gl.constexpr, left,
          CHECK: gl.constexpr):
  """Begins to copy a chunk; with CHECK 0 behind the first `left` of k."""
  at, along, chunks = operand
  chunk = chunks.index(2 * slot + half)
  if CHECK:
    async_copy.buffer_load_to_shared(chunk, ptr, at[half], mask=along < left)
  else:
    async_copy.buffer_load_to_shared(chunk, ptr, at[half])
  async_copy.commit_group()


@gluon.jit
def _read(operand, half: gl.constexpr, slot: gl.constexpr,
          LAYOUT: gl.constexpr, K_LAST: gl.constexpr):
  """A chunk as the matrix unit takes it. _meet waited for its copy."""
  chunk = operand[2].index(2 * slot + half)
  if K_LAST == (LAYOUT.operand_index == 0):
    return async_copy.load_shared_relaxed(chunk, LAYOUT)
  else:
    return async_copy.load_shared_relaxed(chunk.permute([1, 0]), LAYOUT)


@gluon.jit
def _meet():
  """Waits for all copies but the last six, and for all reads, of all waves."""
  async_copy.wait_group(6)
  gl.barrier()
  sched_barrier()


@gluon.jit
def _add(acc, x, y, first: gl.constexpr, last: gl.constexpr):
  """acc plus the product of parts of k."""
  for i in gl.static_range(first, last):
    acc = mfma(part_of(x, [x.shape[0], DEPTH], [0, i * DEPTH]),
               part_of(y, [DEPTH, y.shape[1]], [i * DEPTH, 0]), acc)
  return acc


@gluon.jit
def _begin(acc, x, y):
  """The first part of a product, behind the read of the next one's chunk."""
  sched_barrier()
  acc = _add(acc, x, y, 0, 1)
  sched_barrier()
  return acc


@gluon.jit
def _end(acc, x, y):
  """The others, behind a copy."""
  sched_barrier()
  acc = _add(acc, x, y, 1, STEP // DEPTH)
  sched_barrier()
  # At the end, where the compiler knows what was read: it drops the wait for
  # LDS of a barrier that a loop begins with.
  _meet()
  return acc


@gluon.jit
def multiply(
    a, b, stride_a, stride_b, rows, columns, others, apart, k,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, A_K_LAST: gl.constexpr,
    B_K_LAST: gl.constexpr,
):
  """The product of two tiles over all of k, in quarters.

  a and b point to them. `rows` and `columns` are left of the operands from
  there on, and `others` of the second half of b's tile, which begins `apart`
  columns behind the first.
  """
  SUMS: gl.constexpr = gl.amd.AMDMFMALayout(
      version=4, instr_shape=[32, 32, DEPTH], transposed=True,
      warps_per_cta=[2, gl.num_warps() // 2])
  A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
  B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
  HALF: gl.constexpr = TILE_M // 2
  of_a = _operand(a, stride_a, rows, rows - HALF, HALF, TILE_M, A_K_LAST)
  of_b = _operand(b, stride_b, columns, others, apart, TILE_N, B_K_LAST)
  a_step = STEP if A_K_LAST else STEP * stride_a
  b_step = STEP if B_K_LAST else STEP * stride_b

  for i in gl.static_range(2):
    left = k - i * STEP
    _copy(a, of_a, 0, i, left, True)
    _copy(b, of_b, i, i, left, True)
    _copy(b, of_b, 1 - i, i, left, True)
    _copy(a, of_a, 1, i, left, True)
    a += a_step
    b += b_step
  _meet()
  top = _read(of_a, 0, 0, A, A_K_LAST)
  x = _read(of_b, 0, 0, B, B_K_LAST)
  gl.barrier()
  _copy(a, of_a, 0, 0, k - 2 * STEP, True)
  _meet()

  zero = gl.zeros([HALF, TILE_N // 2], gl.float32, SUMS)
  above = zero, zero
  below = zero, zero
  # Two steps a turn. Those behind the last one add 0, and the copies that may
  # reach there look for the end of k.
  turns = gl.cdiv(k, 2 * STEP)
  inside = gl.maximum(k // STEP - 3, 0) // 2
  for part in gl.static_range(2):
    for turn in range(inside * part, inside if part == 0 else turns):
      for i in gl.static_range(2):
        left = k - (2 * turn + i + 2) * STEP
        y = _read(of_b, 1 - i, i, B, B_K_LAST)
        above_x = _begin(above[i], top, x)
        _copy(b, of_b, i, i, left, part == 1)
        above_x = _end(above_x, top, x)

        bottom = _read(of_a, 1, i, A, A_K_LAST)
        above_y = _begin(above[1 - i], top, y)
        _copy(b, of_b, 1 - i, i, left, part == 1)
        above_y = _end(above_y, top, y)

        top = _read(of_a, 0, 1 - i, A, A_K_LAST)
        below_y = _begin(below[1 - i], bottom, y)
        _copy(a, of_a, 1, i, left, part == 1)
        below_y = _end(below_y, bottom, y)

        following = _read(of_b, 1 - i, 1 - i, B, B_K_LAST)
        below_x = _begin(below[i], bottom, x)
        a += a_step
        b += b_step
        _copy(a, of_a, 0, 1 - i, left - STEP, part == 1)
        below_x = _end(below_x, bottom, x)
        x = following
        if i == 0:
          above, below = (above_x, above_y), (below_x, below_y)
        else:
          above, below = (above_y, above_x), (below_y, below_x)
  async_copy.wait_group(0)
  return above + below


@gluon.constexpr_function
def stored(waves):
  """The layout of a quarter from which waves store whole lines.

  Of a line that is stored in pieces memory takes each one for itself.
  """
  return gl.BlockedLayout([1, 8], [4, 16], [waves, 1], [1, 0])


@gluon.jit
def _gemm(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags, A_K_LAST: gl.constexpr,
    B_K_LAST: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    TILE_K: gl.constexpr, GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """One tile of out, or of one split's part of it."""
  gl.static_assert(TILE_K == STEP)
  ROWS: gl.constexpr = TILE_M // 2
  COLS: gl.constexpr = TILE_N // 2
  tile_m, tile_n = _tile_of(
      gl.program_id(0), m, n, TILE_M, TILE_N, GROUP_M, XCDS, True)
  split = gl.program_id(1)
  index = gl.program_id(2).to(gl.int64)
  m0 = tile_m * TILE_M
  n0 = tile_n * TILE_N
  first = split * k_per_split
  a += index * batch_stride_a
  b += index * batch_stride_b
  if A_K_LAST:
    a += m0.to(gl.int64) * stride_a + first
  else:
    a += first.to(gl.int64) * stride_a + m0
  if B_K_LAST:
    b += n0.to(gl.int64) * stride_b + first
  else:
    b += first.to(gl.int64) * stride_b + n0
  sums = multiply(
      a, b, stride_a, stride_b, m - m0, n - n0, n - n0 - COLS, COLS,
      gl.minimum(k - first, k_per_split), TILE_M, TILE_N, A_K_LAST, B_K_LAST)

  STORED: gl.constexpr = stored(gl.num_warps())
  rows = gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
  cols = gl.arange(0, COLS, gl.SliceLayout(0, STORED))
  whole = k_per_split >= k
  for i in gl.static_range(4):
    x = gl.convert_layout(sums[i], STORED)
    above = m0 + i // 2 * ROWS
    left = n0 + i % 2 * COLS
    if whole:
      x = gemm.finish(
          x, a, b, 0, 0, bias, bias_f32, above, left, m, n, rows, cols,
          activation, flags, False)
    gemm.store(
        x, out_bf16, out_f32, workspace, split, batch, index, batch_stride_out,
        above, left, m, n, rows, cols, whole, flags)


@gluon.jit
def gemm_nt(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """gemm.gemm_nt."""
  _gemm(
      a, b, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      k_per_split, activation, flags, True, True,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS)


@gluon.jit
def gemm_nn(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """gemm.gemm_nn."""
  _gemm(
      a, b, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      k_per_split, activation, flags, True, False,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS)


@gluon.jit
def gemm_tn(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k_rows, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """gemm.gemm_tn."""
  _gemm(
      a, b, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k_rows, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      k_per_split, activation, flags, False, False,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS)
