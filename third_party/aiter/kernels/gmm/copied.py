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
def _with_bias(x, ends, group, columns, col0, flags, ROUNDED: gl.constexpr):
  """gmm.with_bias of a quarter."""
  cols = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
  return gmm.with_bias(x, ends, group, columns, col0, flags, cols, ROUNDED)


@gluon.jit
def _store_ended(sums, ends, out, out_f32, group, m0, n0, m, n, flags,
                 HALVES: gl.constexpr):
  """gmm._store_ended of a tile in quarters.

  Of branches that exclude each other by `else` the compiler spills registers.
  """
  ROWS: gl.constexpr = sums[0].shape[0]
  COLS: gl.constexpr = sums[0].shape[1]
  dtype: gl.constexpr = out.dtype.element_ty
  if (flags & gmm.GATED) == 0:
    for i in gl.static_range(4):
      at = n0 + i % 2 * COLS
      x = _with_bias(sums[i], ends, group, n, at, flags, gl.float32)
      _store(gmm.activated(x, ends), out, out_f32, 0, 0, m0 + i // 2 * ROWS, at,
             m, n, flags)
  if (flags & gmm.PAIRS) != 0:
    for i in gl.static_range(4):
      at = n0 + i % 2 * COLS
      x = _with_bias(sums[i], ends, group, 2 * n, at, flags, dtype)
      pairs = gmm.activated_and_mul(
          x.reshape([ROWS, COLS // 2, 2]).split(), ends)
      _store(pairs, out, out_f32, 0, 0, m0 + i // 2 * ROWS, at // 2, m, n, 0)
  if HALVES and (flags & (gmm.GATED | gmm.PAIRS)) == gmm.GATED:
    for i in gl.static_range(2):
      gate = _with_bias(sums[2 * i], ends, group, 2 * n, n0, flags, dtype)
      up = _with_bias(sums[2 * i + 1], ends, group, 2 * n, n0 + n, flags, dtype)
      _store(gmm.activated_and_mul((gate, up), ends), out, out_f32, 0, 0,
             m0 + i * ROWS, n0, m, n, 0)


@gluon.jit
def _rows(
    a, b, plan, out, out_f32, n, k, ends, flags, B_K_LAST: gl.constexpr,
    EPILOGUE: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    TILE_K: gl.constexpr, GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """A tile of out [m, n]. EPILOGUE: `ends` says what is done with it."""
  gl.static_assert(TILE_K == copied.STEP)
  ROWS: gl.constexpr = TILE_M // 2
  COLS: gl.constexpr = TILE_N // 2
  GATES: gl.constexpr = B_K_LAST or EPILOGUE
  gated = (flags & gmm.GATED) // gmm.GATED if GATES else 0
  columns = n + n * gated  # Of b.
  pairs = (flags & gmm.PAIRS) // gmm.PAIRS if EPILOGUE else 0
  halves = gated - pairs
  tiles = _tiles_of_rows(plan, True)
  if gl.program_id(0) < tiles * gl.cdiv(columns, TILE_N):
    group, first, end, n0 = _tile(
        plan, tiles, columns, TILE_M, TILE_N, GROUP_M, XCDS)
    # So written, the compiler knows what divides it.
    n0 = (n0 // COLS >> halves) * COLS
    a += first.to(gl.int64) * k
    b += gl.maximum(group, 0).to(gl.int64) * k * columns
    if B_K_LAST:
      b += n0.to(gl.int64) * k
    else:
      b += n0
    left = n + n * pairs - n0
    sums = copied.multiply(
        a, b, k, k if B_K_LAST else columns, end - first, left,
        left - COLS * (1 - halves), COLS + (n - COLS) * halves,
        gl.where(group < 0, 0, k), TILE_M, TILE_N, True, B_K_LAST)
    if EPILOGUE:
      _store_ended(sums, ends, out, out_f32, group, first, n0, end, n, flags,
                   B_K_LAST)
    elif gated:
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
  _rows(a, b, plan, out, out_f32, n, k, 0, flags, False, False, TILE_M, TILE_N,
        TILE_K, GROUP_M, XCDS)


@gluon.jit
def gmm_nn_epilogue(
    a, b, plan, out, out_f32, bias, n, k, activation, alpha, gate_limit,
    up_limit, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """gmm.gmm_nn_epilogue."""
  _rows(a, b, plan, out, out_f32, n, k,
        (bias, activation, alpha, gate_limit, up_limit), flags, False, True,
        TILE_M, TILE_N, TILE_K, GROUP_M, XCDS)


@gluon.jit
def gmm_nt(
    a, b, plan, out, out_f32, n, k, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """gmm.gmm_nt."""
  _rows(a, b, plan, out, out_f32, n, k, 0, flags, True, False, TILE_M, TILE_N,
        TILE_K, GROUP_M, XCDS)


@gluon.jit
def gmm_nt_epilogue(
    a, b, plan, out, out_f32, bias, n, k, activation, alpha, gate_limit,
    up_limit, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, XCDS: gl.constexpr,
):
  """gmm.gmm_nt_epilogue."""
  _rows(a, b, plan, out, out_f32, n, k,
        (bias, activation, alpha, gate_limit, up_limit), flags, True, True,
        TILE_M, TILE_N, TILE_K, GROUP_M, XCDS)


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
