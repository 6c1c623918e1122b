# SPDX-License-Identifier: Apache-2.0
"""Products of runs of rows, each with a matrix of its own.

  gmm_plan  which tile of rows belongs to which group
  gmm_nn    a [m, k], b [groups, k, n]  -> out [m, n]
  gmm_nt    a [m, k], b [groups, n, k]  -> out [m, n], the first's gradient of a
  gmm_tn    a [m, k], b [m, n]          -> out [groups, k, n], of its b
  gmm_nn_epilogue, gmm_nt_epilogue      the first two with a bias a group and an
            activation, of gates and ups or of each number
  gmm_row   gmm_nt of int8 or float8, with a scale a row of a and of b
  gmm_block gmm_nt of float8, scales of a a row and 128 of k, of b 128 of n and
            128 of k
  gmm_mx    gmm_nt of float4 with powers of two a row and 32 of k for scales,
            and a in bfloat16, or likewise in float8 or float4
  gmm_i4    gmm_nt of int4 and a in bfloat16, scales a row and 32 of k

Sizes of groups are on the device. gmm_plan makes a list of tiles of them, so
that a block of the others finds its rows by one look. Such a list, `plan`, is
int32 [tiles + 1, 4]. Its first entry has the number of tiles, and each other
(group, first row, end of the rows, 0); group -1 owns no matrix, and its rows of
the result are 0. For gmm_tn each group is one tile, and an empty one too.

Rows past those of a tile are read again as its first one, and not written.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.activation import rows
from third_party.aiter.kernels.core import activations
from third_party.aiter.kernels.gemm import gemm
from third_party.aiter.kernels.gmm.family import FEATURES

OUT_F32 = tl.constexpr(FEATURES["out_f32"])
LEAD = tl.constexpr(FEATURES["lead"])
FNUZ = tl.constexpr(FEATURES["fnuz"])
GATED = tl.constexpr(FEATURES["gated"])
PAIRS = tl.constexpr(FEATURES["pairs"])
BIAS = tl.constexpr(FEATURES["bias"])

SCALE_BLOCK = gemm.SCALE_BLOCK


@triton.jit
def silu_and_mul(gate, up):
  """The result of a tile's gates and ups, rounded as products are.

  So it has the bits that activation_fwd has of such products.
  """
  return rows.result_of(
      gate, up, (0, 0, 0, 0), (activations.SILU, 1.0, 0.0, 0.0), 0, 0, 0, 0, 0,
      rows.GATED)


@triton.jit
def activated(x, ends):
  """The activation of a product and its bias.

  ends: (bias, activation, alpha, gate_limit, up_limit), the last four as
  activation/rows.py has them.
  """
  return activations.activate(x, ends[1])


@triton.jit
def activated_and_mul(pair, ends):
  """silu_and_mul of (gates, ups) by any activation; limits may be infinite."""
  return rows.result_of(
      pair[0], pair[1], (0, 0, 0, 0), ends[1:], 0, 0, 0, 0, 0,
      rows.GATED | rows.LIMITS)


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
def _tiles_of_rows(plan, AMD: tl.constexpr):
  tiles = tl.load(plan)
  if AMD:
    tiles = gemm.first_lane(tiles)
  return tiles


@triton.jit
def _tile(plan, tiles, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
          GROUP_M: tl.constexpr, XCDS: tl.constexpr):
  """(group, first row, end of the rows, first column) of a program's tile."""
  slot, tile_n = gemm.tile_of(
      tl.program_id(0), tiles * TILE_M, n, TILE_M, TILE_N, GROUP_M, XCDS,
      XCDS > 0)
  group, first, end = _entry(plan, slot, XCDS > 0)
  return group, first, end, tile_n * TILE_N


@triton.jit
def _gated_offsets(stride, rows_left, apart, ROWS: tl.constexpr,
                   TILE_K: tl.constexpr, ALIGN: tl.constexpr):
  """gemm.tile_offsets of gates and, `apart` rows behind them, of ups."""
  r = tl.arange(0, ROWS)
  up = (r >= ROWS // 2) & (apart > 0)
  r = tl.where(up, r - ROWS // 2, r)
  r = tl.where(r < rows_left, r, 0) + tl.where(up, apart, 0)
  if ALIGN == 1:
    stride = stride.to(tl.int64)
  return r[:, None] * stride + tl.arange(0, TILE_K)[None, :]


@triton.jit
def _product(
    a, b, a_scale, b_scale, stride_a, stride_b, m_left, n_left, k, scales_k,
    apart, flags, KIND: tl.constexpr, A_K_LAST: tl.constexpr,
    B_K_LAST: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, ALIGN: tl.constexpr, PROMOTE: tl.constexpr,
    GATES: tl.constexpr, CDNA: tl.constexpr,
):
  """The tile's sum over k, of operands that begin at it.

  KIND: gemm.BLOCK with scales, scales_k to a row; gemm.PLAIN without. Float8 as
  bytes is widened, which `flags` are about. GATES: if `apart` is not 0, the
  second half of b's rows is that of those so many behind the first. CDNA: of
  gfx942 or gfx950.
  """
  WIDEN: tl.constexpr = a.dtype.element_ty == tl.uint8
  PACK: tl.constexpr = 2 if WIDEN else 1
  fnuz = tl.where((flags & FNUZ) != 0, gemm.A_FNUZ | gemm.B_FNUZ, 0)
  if WIDEN:
    # See gemm._gemm: two float8 are widened side by side.
    a = a.to(tl.pointer_type(tl.uint16))
    b = b.to(tl.pointer_type(tl.uint16))
    stride_a //= 2
    stride_b //= 2
  a_offsets = gemm.tile_offsets(
      stride_a, m_left, TILE_M, TILE_K // PACK, A_K_LAST, ALIGN)
  b_offsets = gemm.tile_offsets(
      stride_b, n_left, TILE_N, TILE_K // PACK, B_K_LAST, ALIGN)
  if GATES:
    b_offsets = _gated_offsets(stride_b, n_left, apart, TILE_N, TILE_K, ALIGN)
  # As the operand that it becomes: gemm/mfma.py says why.
  TURNED: tl.constexpr = B_K_LAST and CDNA and not WIDEN
  if TURNED:
    b_offsets = tl.trans(b_offsets)
    stride_b = 1
  a_scales = 0
  if KIND == gemm.BLOCK:
    # A tile of b lies in one block of its rows.
    tl.static_assert(TILE_N <= 128)
    r = tl.arange(0, TILE_M)
    a_scales = tl.where(r < m_left, r, 0) * scales_k
  if a.dtype.element_ty == tl.int8:
    acc = tl.zeros([TILE_M, TILE_N], tl.int32)
  else:
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
  steps = k // TILE_K
  begin = tl.zeros([], tl.int32)
  if steps > 0:
    # A pipelined loop reads its first slab before it knows that there is one.
    for step in tl.range(0, steps):
      acc = gemm.add_step(
          acc, begin + step * TILE_K, TILE_K, a, b, a_offsets, b_offsets,
          stride_a, stride_b, a_scale, b_scale, a_scales, 0, 1, 1, fnuz, KIND,
          A_K_LAST, B_K_LAST and not TURNED, TILE_K, PACK, WIDEN, PROMOTE,
          False)
  if k > steps * TILE_K:
    acc = gemm.add_step(
        acc, steps * TILE_K, k - steps * TILE_K, a, b, a_offsets, b_offsets,
        stride_a, stride_b, a_scale, b_scale, a_scales, 0, 1, 1, fnuz, KIND,
        A_K_LAST, B_K_LAST and not TURNED, TILE_K, PACK, WIDEN, PROMOTE, True)
  return acc


@triton.jit
def _store(
    acc, out, out_f32, matrix, matrix_stride, m0, n0, m, n, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SLICES: tl.constexpr,
):
  """Stores a tile in parts, in the type that `flags` say."""
  PART: tl.constexpr = TILE_N // SLICES
  parts = gemm.columns(acc, SLICES)
  rows = tl.arange(0, TILE_M)
  cols = tl.arange(0, PART)
  for i in tl.static_range(SLICES):
    if flags & OUT_F32:
      gemm.store_tile(out_f32, parts[i], matrix, matrix_stride, m0,
                      n0 + i * PART, m, n, rows, cols)
    else:
      gemm.store_tile(out, parts[i].to(out.dtype.element_ty), matrix,
                      matrix_stride, m0, n0 + i * PART, m, n, rows, cols)


@triton.jit
def _store_gated(
    acc, out, m0, n0, m, n,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SLICES: tl.constexpr,
):
  """Stores silu(gate) * up of a tile that has gates in its first half."""
  PARTS: tl.constexpr = SLICES if SLICES > 4 else 4
  HALF: tl.constexpr = PARTS // 2
  PART: tl.constexpr = TILE_N // PARTS
  dtype: tl.constexpr = out.dtype.element_ty
  parts = gemm.columns(acc, PARTS)
  rows = tl.arange(0, TILE_M)
  cols = tl.arange(0, PART)
  for i in tl.static_range(HALF):
    x = silu_and_mul(parts[i].to(dtype), parts[HALF + i].to(dtype))
    gemm.store_tile(out, x.to(dtype), 0, 0, m0, n0 + i * PART, m, n, rows, cols)


@triton.jit
def with_bias(x, ends, group, columns, col0, flags, cols,
              ROUNDED: tl.constexpr):
  """A part of a product, rounded to a type, and its bias: in float32.

  columns: of b. cols: the part's, which count from col0.
  """
  at = col0 + cols
  # What no matrix is for is 0.
  inside = (at < columns) & (group >= 0) & ((flags & BIAS) != 0)
  bias = ends[0] + tl.maximum(group, 0).to(tl.int64) * columns
  return (x.to(ROUNDED).to(tl.float32)
          + tl.load(bias + at, mask=inside, other=0.0)[None, :])


@triton.jit
def _store_ended(
    acc, ends, out, out_f32, group, m0, n0, m, n, flags,
    HALVES: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    SLICES: tl.constexpr,
):
  """Stores a tile with its bias and activation; n0 is of b's columns.

  HALVES: gates may be n columns before their ups, both of which a tile has.
  """
  PARTS: tl.constexpr = SLICES if SLICES > 4 else 4
  HALF: tl.constexpr = PARTS // 2
  PART: tl.constexpr = TILE_N // PARTS
  dtype: tl.constexpr = out.dtype.element_ty
  parts = gemm.columns(acc, PARTS)
  rows = tl.arange(0, TILE_M)
  cols = tl.arange(0, PART)
  if (flags & GATED) == 0:
    for i in tl.static_range(PARTS):
      x = with_bias(parts[i], ends, group, n, n0 + i * PART, flags, cols,
                    tl.float32)
      x = activated(x, ends)
      if flags & OUT_F32:
        gemm.store_tile(out_f32, x, 0, 0, m0, n0 + i * PART, m, n, rows, cols)
      else:
        gemm.store_tile(out, x.to(dtype), 0, 0, m0, n0 + i * PART, m, n, rows,
                        cols)
  if (flags & PAIRS) != 0:
    for i in tl.static_range(PARTS):
      x = with_bias(parts[i], ends, group, 2 * n, n0 + i * PART, flags, cols,
                    dtype)
      pairs = activated_and_mul(
          tl.split(tl.reshape(x, [TILE_M, PART // 2, 2])), ends)
      gemm.store_tile(out, pairs.to(dtype), 0, 0, m0,
                      n0 // 2 + i * (PART // 2), m, n, rows,
                      tl.arange(0, PART // 2))
  if HALVES and (flags & (GATED | PAIRS)) == GATED:
    for i in tl.static_range(HALF):
      at = n0 + i * PART
      gate = with_bias(parts[i], ends, group, 2 * n, at, flags, cols, dtype)
      up = with_bias(parts[HALF + i], ends, group, 2 * n, at + n, flags, cols,
                    dtype)
      y = activated_and_mul((gate, up), ends)
      gemm.store_tile(out, y.to(dtype), 0, 0, m0, at, m, n, rows, cols)


@triton.jit
def _rows(
    a, b, a_scale, b_scale, plan, out, out_f32, n, k, ends, flags,
    KIND: tl.constexpr, ROW: tl.constexpr, B_K_LAST: tl.constexpr,
    EPILOGUE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, GROUP_M: tl.constexpr, XCDS: tl.constexpr,
    ALIGN: tl.constexpr, SLICES: tl.constexpr, PROMOTE: tl.constexpr,
):
  """A tile of out [m, n]. ROW: sums are scaled by row and column.

  EPILOGUE: `ends` says what is done with them.
  """
  GATES: tl.constexpr = B_K_LAST and KIND == gemm.PLAIN and not ROW
  gated = (flags & GATED) // GATED if GATES or EPILOGUE else 0
  columns = n + n * gated  # Of b.
  pairs = (flags & PAIRS) // PAIRS if EPILOGUE else 0
  halves = gated - pairs
  tiles = _tiles_of_rows(plan, XCDS > 0)
  if tl.program_id(0) < tiles * tl.cdiv(columns, TILE_N):
    group, first, end, n0 = _tile(
        plan, tiles, columns, TILE_M, TILE_N, GROUP_M, XCDS)
    n0 = n0 >> halves
    a += first.to(tl.int64) * k
    matrix = tl.maximum(group, 0).to(tl.int64)
    b += matrix * k * columns
    if B_K_LAST:
      b += n0.to(tl.int64) * k
    else:
      b += n0
    scales_k = tl.cdiv(k, 128)
    if KIND == gemm.BLOCK:
      a_scale += first.to(tl.int64) * scales_k
      b_scale += (matrix * tl.cdiv(n, 128) + n0 // 128) * scales_k
    acc = _product(
        a, b, a_scale, b_scale, k, k if B_K_LAST else columns, end - first,
        n + n * pairs - n0, tl.where(group < 0, 0, k), scales_k, n * halves,
        flags, KIND, True, B_K_LAST, TILE_M, TILE_N, TILE_K, ALIGN, PROMOTE,
        GATES, XCDS > 1)
    if ROW:
      r = first + tl.arange(0, TILE_M)
      c = n0 + tl.arange(0, TILE_N)
      # What no matrix is for is 0, whatever its scale.
      there = group >= 0
      sa = tl.load(a_scale + r, mask=(r < end) & there, other=0.0)
      sb = tl.load(b_scale + (matrix * n + c), mask=(c < n) & there, other=0.0)
      x = acc.to(tl.float32) * sa[:, None] * sb[None, :]
    else:
      x = acc
    if EPILOGUE:
      _store_ended(x, ends, out, out_f32, group, first, n0, end, n, flags,
                   GATES, TILE_M, TILE_N, SLICES)
    elif gated:
      _store_gated(x, out, first, n0, end, n, TILE_M, TILE_N, SLICES)
    else:
      _store(x, out, out_f32, 0, 0, first, n0, end, n, flags, TILE_M, TILE_N,
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
  _rows(a, b, a, b, plan, out, out_f32, n, k, 0, flags, gemm.PLAIN, False,
        False, False, TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN, SLICES,
        False)


@triton.jit
def gmm_nt(
    a, b, plan, out, out_f32, n, k, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """gmm_nn with b [groups, n, k]."""
  _rows(a, b, a, b, plan, out, out_f32, n, k, 0, flags, gemm.PLAIN, False, True,
        False, TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN, SLICES, False)


@triton.jit
def gmm_nn_epilogue(
    a, b, plan, out, out_f32, bias, n, k, activation, alpha, gate_limit,
    up_limit, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """gmm_nn, and then with bias [groups, columns of b] the activation.

  Without GATED: out = act(product + bias), rounded once. With it b has 2 n
  columns, with PAIRS a gate and an up in turns, and out [m, n] is what
  activation_fwd makes of products that are rounded to out's type.
  """
  _rows(a, b, a, b, plan, out, out_f32, n, k,
        (bias, activation, alpha, gate_limit, up_limit), flags, gemm.PLAIN,
        False, False, True, TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN,
        SLICES, False)


@triton.jit
def gmm_nt_epilogue(
    a, b, plan, out, out_f32, bias, n, k, activation, alpha, gate_limit,
    up_limit, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """gmm_nn_epilogue of nt. Gates may also be in front of all ups."""
  _rows(a, b, a, b, plan, out, out_f32, n, k,
        (bias, activation, alpha, gate_limit, up_limit), flags, gemm.PLAIN,
        False, True, True, TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN,
        SLICES, False)


@triton.jit
def gmm_row(
    a, b, a_scale, b_scale, plan, out_bf16, out_f32, n, k, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr, PROMOTE: tl.constexpr,
):
  """gmm_nt of int8 or float8: a_scale[i] b_scale[group, j] (a b^T)[i, j].

  a_scale [m], b_scale [groups, n].
  """
  _rows(a, b, a_scale, b_scale, plan, out_bf16, out_f32, n, k, 0, flags,
        gemm.PLAIN, True, True, False, TILE_M, TILE_N, TILE_K, GROUP_M, XCDS,
        ALIGN, SLICES, PROMOTE)


@triton.jit
def gmm_block(
    a, b, a_scale, b_scale, plan, out_bf16, out_f32, n, k, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """gmm_row with a_scale [m, k / 128], b_scale [groups, n / 128, k / 128].

  All rounded up. TILE_K divides 128.
  """
  _rows(a, b, a_scale, b_scale, plan, out_bf16, out_f32, n, k, 0, flags,
        gemm.BLOCK, False, True, False, TILE_M, TILE_N, TILE_K, GROUP_M, XCDS,
        ALIGN, SLICES, False)


@triton.jit
def _load_along(ptr, offsets, at, left, SIZE: tl.constexpr,
                CHECK: tl.constexpr):
  """Rows' next SIZE elements; with CHECK those past `left` are 0."""
  if CHECK:
    inside = tl.arange(0, SIZE)[None, :] < left
    return tl.load(ptr + at + offsets, mask=inside, other=0.0)
  else:
    return tl.load(ptr + at + offsets)


@triton.jit
def _unpack(packed, scale):
  """Numbers, the lower k in the low nibble, times scales a row and 32 of k.

  e8m0 scales are of e2m1, bfloat16 of int4. Returns bfloat16.
  """
  ROWS: tl.constexpr = packed.shape[0]
  COLS: tl.constexpr = 2 * packed.shape[1]
  x = packed.to(tl.uint32)
  # The low one in bits 28 to 31, the high one in the same of the other.
  x = tl.reshape(tl.join(x << 28, x << 24), [ROWS, COLS // 32, 32])
  if scale.dtype == tl.uint8:
    # The places of float32, whose exponent then is 2^126 too low, subnormals
    # included. The scale has its places too; of 2^-127, a subnormal, half.
    x = (x & 0x80000000) | ((x & 0x70000000) >> 6)
    bits = scale.to(tl.uint32) << 23
    bits = tl.where(scale == 0, 0x400000, bits)
    bits = tl.where(scale == 255, 0x7FC00000, bits)
    scale = bits.to(tl.float32, bitcast=True)
    x = x.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
  else:
    # 2^23 + 8 + the number, without a conversion.
    x = ((x >> 28) ^ 0x4B000008).to(tl.float32, bitcast=True) - 8388616.0
  x = x * scale.to(tl.float32)[:, :, None]
  return tl.reshape(x, [ROWS, COLS]).to(tl.bfloat16)


@triton.jit
def _add_packed(
    acc, k0, k_left, a, b, a_scale, b_scale, a_offsets, b_offsets,
    a_scale_offsets, b_scale_offsets, FORMAT: tl.constexpr,
    UNPACK: tl.constexpr, TILE_K: tl.constexpr, CHECK: tl.constexpr,
):
  """acc [columns, rows] plus the product of the tiles at k0.

  The weights come first: what is unpacked stays in registers on Hopper, whose
  first operand alone may.
  """
  A_PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
  BLOCKS: tl.constexpr = TILE_K // 32
  a_tile = _load_along(
      a, a_offsets, k0 // A_PACK, k_left // A_PACK, TILE_K // A_PACK, CHECK)
  b_tile = _load_along(b, b_offsets, k0 // 2, k_left // 2, TILE_K // 2, CHECK)
  sb = _load_along(
      b_scale, b_scale_offsets, k0 // 32, k_left // 32, BLOCKS, CHECK)
  if UNPACK:
    return tl.dot(_unpack(b_tile, sb), tl.trans(a_tile), acc)
  elif FORMAT == "bf16":
    return tl.dot_scaled(
        b_tile, sb, "e2m1", tl.trans(a_tile), None, "bf16", acc)
  else:
    sa = _load_along(
        a_scale, a_scale_offsets, k0 // 32, k_left // 32, BLOCKS, CHECK)
    return tl.dot_scaled(
        b_tile, sb, "e2m1", tl.trans(a_tile), sa, FORMAT, acc)


@triton.jit
def _packed_rows(
    a, b, a_scale, b_scale, plan, out_bf16, out_f32, n, k, flags,
    FORMAT: tl.constexpr, UNPACK: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr,
    XCDS: tl.constexpr, SLICES: tl.constexpr,
):
  """_rows of matrices whose numbers have four bits; k is a multiple of 32.

  FORMAT: of a: "bf16", "e4m3" or "e2m1". UNPACK: of bf16, whether b is unpacked
  here, and not by Triton.
  """
  tiles = _tiles_of_rows(plan, XCDS > 0)
  if tl.program_id(0) < tiles * tl.cdiv(n, TILE_N):
    group, first, end, n0 = _tile(
        plan, tiles, n, TILE_M, TILE_N, GROUP_M, XCDS)
    # So written, the compiler knows what divides them.
    bytes_b = k // 32 * 16
    bytes_a = bytes_b if FORMAT == "e2m1" else k // 32 * 32
    row = tl.maximum(group, 0).to(tl.int64) * n + n0
    a += first.to(tl.int64) * bytes_a
    a_scale += first.to(tl.int64) * (k // 32)
    b += row * bytes_b
    b_scale += row * (k // 32)
    r = tl.arange(0, TILE_M)
    c = tl.arange(0, TILE_N)
    r = tl.where(r < end - first, r, 0)[:, None]
    c = tl.where(c < n - n0, c, 0)[:, None]
    A_PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    blocks = tl.arange(0, TILE_K // 32)[None, :]
    a_offsets = r * bytes_a + tl.arange(0, TILE_K // A_PACK)[None, :]
    b_offsets = c * bytes_b + tl.arange(0, TILE_K // 2)[None, :]
    a_scale_offsets = r * (k // 32) + blocks
    b_scale_offsets = c * (k // 32) + blocks
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    summed = tl.where(group < 0, 0, k)
    steps = summed // TILE_K
    if steps > 0:
      for step in tl.range(0, steps):
        acc = _add_packed(
            acc, step * TILE_K, TILE_K, a, b, a_scale, b_scale, a_offsets,
            b_offsets, a_scale_offsets, b_scale_offsets, FORMAT, UNPACK, TILE_K,
            False)
    if summed > steps * TILE_K:
      acc = _add_packed(
          acc, steps * TILE_K, summed - steps * TILE_K, a, b, a_scale, b_scale,
          a_offsets, b_offsets, a_scale_offsets, b_scale_offsets, FORMAT,
          UNPACK, TILE_K, True)
    _store(tl.trans(acc), out_bf16, out_f32, 0, 0, first, n0, end, n, flags,
           TILE_M, TILE_N, SLICES)


@triton.jit
def gmm_mx(
    a, b_packed, a_scale_e8m0, b_scale_e8m0, plan, out_bf16, out_f32, n, k,
    flags, FORMAT: tl.constexpr, UNPACK: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP_M: tl.constexpr,
    XCDS: tl.constexpr, SLICES: tl.constexpr,
):
  """gmm_nt of b [groups, n, k / 2]: two float4 e2m1 a byte, the lower k first.

  Scales are 2^(byte - 127), one a row and 32 of k: b's [groups, n, k / 32], and
  a's [m, k / 32] if a is float8, or float4 [m, k / 2].
  """
  _packed_rows(
      a, b_packed, a_scale_e8m0, b_scale_e8m0, plan, out_bf16, out_f32, n, k,
      flags, FORMAT, UNPACK, TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, SLICES)


@triton.jit
def gmm_i4(
    a, b_packed, b_scale_bf16, plan, out_bf16, out_f32, n, k, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, SLICES: tl.constexpr,
):
  """gmm_mx of int4 and scales in bfloat16; a number times its scale is too."""
  _packed_rows(
      a, b_packed, b_packed, b_scale_bf16, plan, out_bf16, out_f32, n, k, flags,
      "bf16", True, TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, SLICES)


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
      a + (first.to(tl.int64) * k + m0), b + (first.to(tl.int64) * n + n0), a,
      b, k, n, k - m0, n - n0, end - first, 0, 0, flags, gemm.PLAIN, False,
      False, TILE_M, TILE_N, TILE_K, ALIGN, False, False, XCDS > 1)
  _store(acc, out, out_f32, group.to(tl.int64), k.to(tl.int64) * n, m0, n0, k,
         n, flags, TILE_M, TILE_N, SLICES)
