# SPDX-License-Identifier: Apache-2.0
"""gmm.py's products for gfx950, as gemm.copied makes them, in Gluon.

Of aligned operands of 16 bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from third_party.aiter.kernels.gemm import copied, gemm
from third_party.aiter.kernels.gmm import gmm

_entry = gluon.jit(gmm._entry.fn)
_tile = gluon.jit(gmm._tile.fn)
_tile_of = gluon.jit(gemm.tile_of.fn)
_tiles_of_rows = gluon.jit(gmm._tiles_of_rows.fn)


@gluon.jit
def _store(x, out, out_f32, matrix, matrix_stride, m0, n0, m, n, flags):
  """Stores a quarter in the type that `flags` say."""
  STORED: gl.constexpr = copied.stored(gl.num_warps())
  x = gl.convert_layout(x, STORED)
  rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, STORED))
  cols = gl.arange(0, x.shape[1], gl.SliceLayout(0, STORED))
  if flags & gmm.OUT_F32:
    gemm.store_tile(
        out_f32, x, matrix, matrix_stride, m0, n0, m, n, rows, cols)
  else:
    gemm.store_tile(
        out, x.to(out.dtype.element_ty), matrix, matrix_stride, m0, n0, m, n,
        rows, cols)


@gluon.jit
def _rows(
    a, b, plan, out, out_f32, n, k, flags, B_K_LAST: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """A tile of out [m, n]."""
  gl.static_assert(TILE_K == copied.STEP)
  ROWS: gl.constexpr = TILE_M // 2
  COLS: gl.constexpr = TILE_N // 2
  gated = (flags & gmm.GATED) // gmm.GATED if B_K_LAST else 0
  columns = n + n * gated  # Of b.
  tiles = _tiles_of_rows(plan, True)
  if gl.program_id(0) < tiles * gl.cdiv(columns, TILE_N):
    group, first, end, n0 = _tile(
        plan, tiles, columns, TILE_M, TILE_N, GROUP_M, XCDS)
    # So written, the compiler knows what divides it.
    n0 = (n0 // COLS >> gated) * COLS
    a += first.to(gl.int64) * k
    b += gl.maximum(group, 0).to(gl.int64) * k * columns
    if B_K_LAST:
      b += n0.to(gl.int64) * k
    else:
      b += n0
    left = n - n0
    sums = copied.multiply(
        a, b, k, k if B_K_LAST else n, end - first, left,
        left - COLS * (1 - gated), COLS + (n - COLS) * gated,
        gl.where(group < 0, 0, k), TILE_M, TILE_N, True, B_K_LAST)
    if gated:
      dtype: gl.constexpr = out.dtype.element_ty
      for i in gl.static_range(2):
        x = gmm.silu_and_mul(
            sums[2 * i].to(dtype), sums[2 * i + 1].to(dtype))
        _store(x, out, out_f32, 0, 0, first + i * ROWS, n0, end, n, 0)
    else:
      for i in gl.static_range(4):
        _store(sums[i], out, out_f32, 0, 0, first + i // 2 * ROWS,
               n0 + i % 2 * COLS, end, n, flags)


@gluon.jit
def gmm_nn(
    a, b, plan, out, out_f32, n, k, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """gmm.gmm_nn."""
  _rows(a, b, plan, out, out_f32, n, k, flags, False, TILE_M, TILE_N, TILE_K,
        GROUP_M, XCDS)


@gluon.jit
def gmm_nt(
    a, b, plan, out, out_f32, n, k, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """gmm.gmm_nt."""
  _rows(a, b, plan, out, out_f32, n, k, flags, True, TILE_M, TILE_N, TILE_K,
        GROUP_M, XCDS)


@gluon.jit
def gmm_tn(
    a, b, plan, out, out_f32, n, k, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """gmm.gmm_tn."""
  gl.static_assert(TILE_K == copied.STEP)
  ROWS: gl.constexpr = TILE_M // 2
  COLS: gl.constexpr = TILE_N // 2
  tiles = gl.cdiv(k, TILE_M) * gl.cdiv(n, TILE_N)
  index = gemm.first_lane(gl.program_id(0) // tiles)
  tile_m, tile_n = _tile_of(
      gl.program_id(0) - index * tiles, k, n, TILE_M, TILE_N, GROUP_M, 1, True)
  group, first, end = _entry(plan, index, True)
  m0 = tile_m * TILE_M
  n0 = tile_n * TILE_N
  sums = copied.multiply(
      a + (first.to(gl.int64) * k + m0), b + (first.to(gl.int64) * n + n0),
      k, n, k - m0, n - n0, n - n0 - COLS, COLS, end - first,
      TILE_M, TILE_N, False, False)
  for i in gl.static_range(4):
    _store(sums[i], out, out_f32, group.to(gl.int64), k.to(gl.int64) * n,
           m0 + i // 2 * ROWS, n0 + i % 2 * COLS, k, n, flags)
