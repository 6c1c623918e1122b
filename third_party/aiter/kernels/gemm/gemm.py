# SPDX-License-Identifier: Apache-2.0
"""Matrix products: out = activation(scales * a b + bias).

  gemm_nt     a [m, k], b [n, k]   (out = a b^T, a linear layer)
  gemm_nn     a [m, k], b [k, n]   (its input's gradient)
  gemm_tn     a [k, m], b [k, n]   (its weight's gradient)
  gemm_row    int8 or float8, one scale a row of a and of b
  gemm_block  float8, a's scales a row and 128 of k, b's 128 of n and 128 of k
  gemm_mx     float4 e2m1, packed, one power of two a row and 32 of k
  gemm_sum    adds what the splits of k of any of them left in the workspace

A program owns a tile of out and walks over its part of k. Rows past the last
one read the tile's first row again, so no load needs a mask but those of k's
last, partial step. With splits every program writes float32 (int8: int32) to
workspace [splits, batch, m, n], and gemm_sum, which adds in a fixed order, does
the rest. A float8 type that the target's matrix unit does not know is widened
to float16 on the way, exactly.

Addresses: a base pointer moves in 64 bits. Offsets inside a tile of a or b have
32 bits, which holds for strides below 2^22 elements, or 64 in rows that promise
neither alignment nor such strides (ALIGN = 1). Those inside a tile of out or of
the workspace have 64.
"""

import triton
import triton.language as tl
from triton.language import core

from third_party.aiter.kernels.core import activations, tiles
from third_party.aiter.kernels.gemm.family import FEATURES

# Bits of the argument `flags`; family.py says what they mean.
HAS_BIAS = tl.constexpr(FEATURES["bias"])
BIAS_F32 = tl.constexpr(FEATURES["bias_f32"])
OUT_FP16 = tl.constexpr(FEATURES["out_fp16"])
OUT_F32 = tl.constexpr(FEATURES["out_f32"])
A_FNUZ = tl.constexpr(FEATURES["a_fnuz"])
B_FNUZ = tl.constexpr(FEATURES["b_fnuz"])
SUM_I32 = tl.constexpr(FEATURES["sum_i32"])
ROW_SCALED = tl.constexpr(FEATURES["row_scaled"])

activate = activations.activate

# How operands become a product.
PLAIN = tl.constexpr(0)
BLOCK = tl.constexpr(1)
MX = tl.constexpr(2)

SCALE_BLOCK = tl.constexpr(128)  # Of k and n, of one scale of gemm_block.


@core.extern
def first_lane(x, _semantic=None):
  """int32 x of the first lane, in a scalar register of an AMD GPU."""
  return core.extern_elementwise(
      "", "", [x],
      {(core.int32,): ("llvm.amdgcn.readfirstlane.i32", core.int32)},
      is_pure=True, _semantic=_semantic)


@triton.jit
def neighbour(slot, slots, XCDS: tl.constexpr):
  """The number of a grid slot such that every die has a run of neighbours.

  Of a device whose XCDS dies have a cache each and take slots in turn.
  """
  if XCDS > 1:
    die = slot % XCDS
    slot = die * (slots // XCDS) + tl.minimum(die, slots % XCDS) + slot // XCDS
  return slot


@triton.jit
def tile_of(
    slot, m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, AMD: tl.constexpr,
):
  """The tile (row, column) of a grid slot.

  Tiles run down GROUP_M rows before the next column, so that those in flight
  share a and b in the L2 cache.
  """
  tiles_m = tl.cdiv(m, TILE_M)
  tiles_n = tl.cdiv(n, TILE_N)
  slot = neighbour(slot, tiles_m * tiles_n, XCDS)
  width = GROUP_M * tiles_n
  first = slot // width * GROUP_M
  rows = tl.minimum(tiles_m - first, GROUP_M)
  tile_m = first + slot % width % rows
  tile_n = slot % width // rows
  if AMD:
    # Its compiler divides in vector registers. Addresses that come from there
    # cost every load a loop over the lanes' addresses, though all are the same.
    tile_m, tile_n = first_lane(tile_m), first_lane(tile_n)
  return tile_m, tile_n


@triton.jit
def _fp8_to_fp16(bits, fnuz):
  """float8 to float16, exactly.

  bits: uint16, the float8 in the upper half. fnuz: a scalar, whether it is
  e4m3fnuz and not e4m3fn. All is arithmetic of 16 bits, two at once.
  """
  # Moved to float16's places. Its exponent then is 2^8 (fnuz: 2^7) too low,
  # subnormals included.
  x = (bits.to(tl.int16, bitcast=True) >> 1) & -0x4001
  wide = x.to(tl.float16, bitcast=True) * tl.where(
      fnuz, 128.0, 256.0).to(tl.float16)
  # NaN, all ones here, is 0x7F and 0xFF: the numbers whose sum with 0x4080 has
  # the sign bit. Of fnuz it is 0x80: the number whose lowest bit is the sign's.
  y = x & tl.where(fnuz, -1, 0x7FFF).to(tl.int16)
  nan = ((y + tl.where(fnuz, 0, 0x4080).to(tl.int16)) & -y) >> 15
  return (wide.to(tl.int16, bitcast=True) | nan).to(tl.float16, bitcast=True)


@triton.jit
def tile_offsets(
    stride, rows_left, ROWS: tl.constexpr, TILE_K: tl.constexpr,
    K_LAST: tl.constexpr, ALIGN: tl.constexpr,
):
  """Offsets of a [ROWS, TILE_K] (K_LAST) or [TILE_K, ROWS] tile.

  Rows from rows_left on are row 0. ALIGN: rows_left is a multiple of it.
  """
  r = tl.arange(0, ROWS)
  r = tl.where(r < rows_left, r, 0)
  c = tl.arange(0, TILE_K)
  if ALIGN == 1:
    stride = stride.to(tl.int64)
  elif not K_LAST:
    r = tl.max_contiguous(tl.multiple_of(r, ALIGN), ALIGN)
  if K_LAST:
    return r[:, None] * stride + c[None, :]
  else:
    return c[:, None] * stride + r[None, :]


@triton.jit
def _load(
    ptr, offsets, stride, k0, k_left, TILE_K: tl.constexpr,
    K_LAST: tl.constexpr, CHECK: tl.constexpr,
):
  """The tile at k0; with CHECK, what lies past k_left reads as zero."""
  if K_LAST:
    ptr += k0
    inside = tl.arange(0, TILE_K)[None, :] < k_left
  else:
    ptr += k0.to(tl.int64) * stride
    inside = tl.arange(0, TILE_K)[:, None] < k_left
  if CHECK:
    return tl.load(ptr + offsets, mask=inside, other=0.0)
  else:
    return tl.load(ptr + offsets)


@triton.jit
def add_step(
    acc, k0, k_left, a, b, a_offsets, b_offsets, stride_a, stride_b,
    a_scale, b_scale, a_scale_offsets, b_scale_offsets,
    stride_a_scale_k, stride_b_scale_k, flags,
    KIND: tl.constexpr, A_K_LAST: tl.constexpr, B_K_LAST: tl.constexpr,
    TILE_K: tl.constexpr, PACK: tl.constexpr, WIDEN: tl.constexpr,
    PROMOTE: tl.constexpr, CHECK: tl.constexpr,
):
  """acc plus the product of the tiles at k0; PACK elements lie together."""
  a_tile = _load(
      a, a_offsets, stride_a, k0 // PACK, k_left // PACK, TILE_K // PACK,
      A_K_LAST, CHECK)
  b_tile = _load(
      b, b_offsets, stride_b, k0 // PACK, k_left // PACK, TILE_K // PACK,
      B_K_LAST, CHECK)
  if not A_K_LAST:
    a_tile = tl.trans(a_tile)
  if B_K_LAST:
    b_tile = tl.trans(b_tile)
  if KIND == MX:
    s0 = k0 // 32
    inside = tl.arange(0, TILE_K // 32)[None, :] < tl.cdiv(k_left, 32)
    if CHECK:
      sa = tl.load(a_scale + s0 + a_scale_offsets, mask=inside, other=0)
      sb = tl.load(b_scale + s0 + b_scale_offsets, mask=inside, other=0)
    else:
      sa = tl.load(a_scale + s0 + a_scale_offsets)
      sb = tl.load(b_scale + s0 + b_scale_offsets)
    return tl.dot_scaled(a_tile, sa, "e2m1", b_tile, sb, "e2m1", acc)
  else:
    if KIND == BLOCK:
      total = tl.zeros_like(acc)
    else:
      total = acc
    if WIDEN:
      a_fnuz = (flags & A_FNUZ) != 0
      b_fnuz = (flags & B_FNUZ) != 0
      if PACK == 2:
        # The order of k is free as long as it is one: first the even ones.
        total = tl.dot(
            _fp8_to_fp16(a_tile << 8, a_fnuz),
            _fp8_to_fp16(b_tile << 8, b_fnuz), total)
        a_tile &= 0xFF00
        b_tile &= 0xFF00
      else:
        a_tile = a_tile.to(tl.uint16) << 8
        b_tile = b_tile.to(tl.uint16) << 8
      total = tl.dot(
          _fp8_to_fp16(a_tile, a_fnuz), _fp8_to_fp16(b_tile, b_fnuz), total)
    elif PROMOTE:
      # Hopper adds float8 products with fewer bits than float32 has.
      total = tl.dot(a_tile, b_tile, total, max_num_imprecise_acc=TILE_K)
    else:
      total = tl.dot(a_tile, b_tile, total, out_dtype=acc.dtype)
    if KIND == BLOCK:
      s0 = (k0 // SCALE_BLOCK).to(tl.int64)
      sa = tl.load(a_scale + s0 * stride_a_scale_k + a_scale_offsets)
      sb = tl.load(b_scale + s0 * stride_b_scale_k + b_scale_offsets)
      if SCALE_BLOCK % acc.shape[1] == 0:
        scale = (sa * sb)[:, None]
      else:
        scale = sa[:, None] * sb[None, :]
      total = acc + total * scale
    return total


@triton.jit
def _store_inside(ptr, x, stride, m, n, rows, cols):
  tl.store(
      ptr + (rows[:, None] * stride + cols[None, :]),
      x.to(ptr.dtype.element_ty),
      mask=(rows[:, None] < m) & (cols[None, :] < n))


@triton.jit
def store_tile(
    ptr, x, matrix, matrix_stride, m0, n0, m, n, rows, cols,
):
  """Stores the tile at (m0, n0) of a dense [m, n] matrix, of many at `ptr`.

  rows and cols count its own from 0.
  """
  stride = n.to(tl.int64)  # A row may be as long as 2^31 - 1.
  if (n % 8 == 0) & (matrix_stride % 8 == 0):
    # The same numbers; so written, the compiler knows what divides them and
    # stores 16 bytes at a time.
    n = n // 8 * 8
    stride = n.to(tl.int64)
    ptr += matrix * (matrix_stride // 8 * 8) + m0 * stride + n0
    _store_inside(ptr, x, stride, m - m0, n - n0, rows, cols)
  else:
    ptr += matrix * matrix_stride + m0 * stride + n0
    _store_inside(ptr, x, stride, m - m0, n - n0, rows, cols)


@triton.jit
def finish(
    x, a_scale, b_scale, a_scale_step, b_scale_step, bias, bias_f32,
    m0, n0, m, n, rows, cols, activation, flags, SCALED,
):
  """Scales (if SCALED), bias and activation of whole sums x at (m0, n0).

  rows and cols count the tile's own from 0. Scales stand at the matrix' first;
  of step 0 there is one for all rows (columns).
  """
  x = x.to(tl.float32)
  there = cols < n - n0
  if SCALED:
    sa = tl.load(a_scale + (m0 + rows) * a_scale_step, mask=rows < m - m0,
                 other=0.0)
    sb = tl.load(b_scale + (n0 + cols) * b_scale_step, mask=there, other=0.0)
    x = x * sa[:, None] * sb[None, :]
  if flags & HAS_BIAS:
    if flags & BIAS_F32:
      x += tl.load(bias_f32 + n0 + cols, mask=there, other=0.0)[None, :]
    else:
      bits = tl.load(bias + n0 + cols, mask=there, other=0)
      if flags & OUT_FP16:
        x += bits.to(tl.float16, bitcast=True).to(tl.float32)[None, :]
      else:
        x += bits.to(tl.bfloat16, bitcast=True).to(tl.float32)[None, :]
  return activate(x, activation)


@triton.jit
def store(
    x, out_bf16, out_f32, workspace, split, batch, index, batch_stride_out,
    m0, n0, m, n, rows, cols, whole, flags,
):
  """Stores float32 x at (m0, n0) of out in its type, which `flags` say.

  A float16 out comes through out_bf16. What is not `whole` goes to the
  workspace as it is.
  """
  if whole & ((flags & OUT_F32) == 0):
    if flags & OUT_FP16:
      y = x.to(tl.float16).to(tl.bfloat16, bitcast=True)
    else:
      y = x.to(tl.bfloat16)
    store_tile(
        out_bf16, y, index, batch_stride_out, m0, n0, m, n, rows, cols)
  else:
    if not whole:
      out_f32 = workspace
      index += split * batch
      batch_stride_out = m.to(tl.int64) * n
    store_tile(out_f32, x, index, batch_stride_out, m0, n0, m, n, rows, cols)


@triton.jit
def _halves(x):
  """The left and the right half of a tile's columns."""
  x = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
  return tl.split(tl.permute(x, [0, 2, 1]))


@triton.jit
def _quarters(x):
  left, right = _halves(x)
  return _halves(left) + _halves(right)


@triton.jit
def columns(x, PARTS: tl.constexpr):
  """x in PARTS (1, 4 or 8) equal groups of columns."""
  if PARTS == 1:
    return (x,)
  elif PARTS == 4:
    return _quarters(x)
  else:
    left, right = _halves(x)
    return _quarters(left) + _quarters(right)


@triton.jit
def _gemm(
    a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale,
    stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
    k_per_split, activation, flags,
    KIND: tl.constexpr, ROW: tl.constexpr,
    A_K_LAST: tl.constexpr, B_K_LAST: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    PROMOTE: tl.constexpr, SLICES: tl.constexpr,
):
  """One tile of out, or of one split's part of it."""
  tile_m, tile_n = tile_of(
      tl.program_id(0), m, n, TILE_M, TILE_N, GROUP_M, XCDS, XCDS > 0)
  split = tl.program_id(1)
  index = tl.program_id(2).to(tl.int64)
  m0 = tile_m * TILE_M
  n0 = tile_n * TILE_N
  if ALIGN > 1:
    tiles.assume_stride(stride_a)
    tiles.assume_stride(stride_b)
  WIDEN: tl.constexpr = KIND != MX and a.dtype.element_ty == tl.uint8
  PACK: tl.constexpr = 2 if KIND == MX or (WIDEN and ALIGN > 1) else 1
  if WIDEN and PACK == 2:
    # Two float8 at once: in words of 16 bits they are widened side by side.
    a = a.to(tl.pointer_type(tl.uint16))
    b = b.to(tl.pointer_type(tl.uint16))
    stride_a //= 2
    stride_b //= 2
    batch_stride_a //= 2
    batch_stride_b //= 2
  a += index * batch_stride_a
  b += index * batch_stride_b
  if A_K_LAST:
    a += m0.to(tl.int64) * stride_a
  else:
    a += m0
  if B_K_LAST:
    b += n0.to(tl.int64) * stride_b
  else:
    b += n0
  a_offsets = tile_offsets(
      stride_a, m - m0, TILE_M, TILE_K // PACK, A_K_LAST, ALIGN)
  b_offsets = tile_offsets(
      stride_b, n - n0, TILE_N, TILE_K // PACK, B_K_LAST, ALIGN)
  a_scale_offsets = 0
  b_scale_offsets = 0
  if KIND == BLOCK or KIND == MX:
    rows = tl.arange(0, TILE_M)
    cols = tl.arange(0, TILE_N)
    rows = tl.where(rows < m - m0, rows, 0)
    cols = tl.where(cols < n - n0, cols, 0)
    a_scale += index * batch_stride_a_scale + m0.to(tl.int64) * stride_a_scale_m
    if KIND == BLOCK:
      b_scale += (index * batch_stride_b_scale
                  + (n0 // SCALE_BLOCK).to(tl.int64) * stride_b_scale_n)
      a_scale_offsets = rows * stride_a_scale_m
      if SCALE_BLOCK % TILE_N > 0:
        # Else the tile lies in one block of b's: one scale.
        b_scale_offsets = (
            (n0 % SCALE_BLOCK + cols) // SCALE_BLOCK * stride_b_scale_n)
    else:
      b_scale += (index * batch_stride_b_scale
                  + n0.to(tl.int64) * stride_b_scale_n)
      c = tl.arange(0, TILE_K // 32)[None, :]
      a_scale_offsets = rows[:, None] * stride_a_scale_m + c
      b_scale_offsets = cols[:, None] * stride_b_scale_n + c
  if a.dtype.element_ty == tl.int8:
    acc = tl.zeros([TILE_M, TILE_N], tl.int32)
  else:
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
  first = split * k_per_split
  length = tl.minimum(k - first, k_per_split)
  steps = length // TILE_K
  for step in tl.range(0, steps):
    k0 = first + step * TILE_K
    acc = add_step(
        acc, k0, TILE_K, a, b, a_offsets, b_offsets, stride_a, stride_b,
        a_scale, b_scale, a_scale_offsets, b_scale_offsets,
        stride_a_scale_k, stride_b_scale_k, flags,
        KIND, A_K_LAST, B_K_LAST, TILE_K, PACK, WIDEN, PROMOTE, False)
  if length > steps * TILE_K:
    acc = add_step(
        acc, first + steps * TILE_K, length - steps * TILE_K,
        a, b, a_offsets, b_offsets, stride_a, stride_b,
        a_scale, b_scale, a_scale_offsets, b_scale_offsets,
        stride_a_scale_k, stride_b_scale_k, flags,
        KIND, A_K_LAST, B_K_LAST, TILE_K, PACK, WIDEN, PROMOTE, True)
  whole = k_per_split >= k
  if ROW:
    a_scale += index * batch_stride_a_scale
    b_scale += index * batch_stride_b_scale
  # In parts: a whole large tile's temporaries would not fit the registers.
  PART: tl.constexpr = TILE_N // SLICES
  parts = columns(acc, SLICES)
  rows = tl.arange(0, TILE_M)
  cols = tl.arange(0, PART)
  for i in tl.static_range(SLICES):
    first = n0 + i * PART
    if whole:
      x = finish(
          parts[i], a_scale, b_scale, stride_a_scale_m, stride_b_scale_n,
          bias, bias_f32, m0, first, m, n, rows, cols, activation, flags, ROW)
    else:
      x = parts[i].to(tl.float32, bitcast=True)
    store(
        x, out_bf16, out_f32, workspace, split, batch, index, batch_stride_out,
        m0, first, m, n, rows, cols, whole, flags)


@triton.jit
def gemm_nt(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """out [batch, m, n] = activation(a b^T + bias), a [m, k], b [n, k].

  Strides count elements, a row's and a matrix's (0: one matrix for all). out is
  dense. bias [n] has 16 bits (of out's type) or is float32 (bias_f32: the same
  memory). k_per_split is a multiple of TILE_K, or k or more: then there is one
  split and no workspace.
  Grid: (tiles of out, splits, batch).
  """
  _gemm(
      a, b, a, b, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out, 0, 0, 0, 0, 0, 0,
      k_per_split, activation, flags, PLAIN, False, True, True,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN, False, SLICES)


@triton.jit
def gemm_nn(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """gemm_nt with b [k, n]."""
  _gemm(
      a, b, a, b, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out, 0, 0, 0, 0, 0, 0,
      k_per_split, activation, flags, PLAIN, False, True, False,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN, False, SLICES)


@triton.jit
def gemm_tn(
    a, b, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k_rows, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """gemm_nt with a [k, m] and b [k, n].

  k_rows is k. Nobody promises what divides it: here it counts rows alone.
  """
  _gemm(
      a, b, a, b, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k_rows, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out, 0, 0, 0, 0, 0, 0,
      k_per_split, activation, flags, PLAIN, False, False, False,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN, False, SLICES)


@triton.jit
def gemm_row(
    a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale, a_scale_step, b_scale_step,
    k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    PROMOTE: tl.constexpr, SLICES: tl.constexpr,
):
  """out = activation(a_scale[i] b_scale[j] (a b^T)[i, j] + bias[j]).

  a [m, k] and b [n, k] are int8 (then a b^T is exact) or float8. Scales are
  float32; step 1: one a row, step 0: one for all.
  """
  _gemm(
      a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      batch_stride_a_scale, batch_stride_b_scale,
      a_scale_step, 0, b_scale_step, 0,
      k_per_split, activation, flags, PLAIN, True, True, True,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN, PROMOTE, SLICES)


@triton.jit
def gemm_block(
    a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
    batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale,
    stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
    k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """gemm_row with a_scale [m, k / 128] and b_scale [n / 128, k / 128].

  Both rounded up. TILE_K divides 128; k_per_split is a multiple of 128.
  """
  _gemm(
      a, b, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32, workspace,
      batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      batch_stride_a_scale, batch_stride_b_scale,
      stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k,
      k_per_split, activation, flags, BLOCK, False, True, True,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN, False, SLICES)


@triton.jit
def gemm_mx(
    a, b, a_scale_e8m0, b_scale_e8m0, bias, bias_f32, out_bf16, out_f32,
    workspace, batch, m, n, k, stride_a, stride_b,
    batch_stride_a, batch_stride_b, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale,
    stride_a_scale_m, stride_b_scale_n, k_per_split, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr, XCDS: tl.constexpr, ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
):
  """gemm_nt on float4 e2m1 with scales of 2^(byte - 127) a row and 32 of k.

  a [m, k / 2] and b [n, k / 2] are bytes, the lower k in the low nibble; their
  strides count bytes. a_scale_e8m0 [m, k / 32] and b_scale_e8m0 [n, k / 32],
  rounded up, are dense along k. k, which is even, and k_per_split count
  elements; TILE_K is at least 64.
  """
  _gemm(
      a, b, a_scale_e8m0, b_scale_e8m0, bias, bias_f32, out_bf16, out_f32,
      workspace, batch, m, n, k, stride_a, stride_b,
      batch_stride_a, batch_stride_b, batch_stride_out,
      batch_stride_a_scale, batch_stride_b_scale,
      stride_a_scale_m, 1, stride_b_scale_n, 1,
      k_per_split, activation, flags, MX, False, True, True,
      TILE_M, TILE_N, TILE_K, GROUP_M, XCDS, ALIGN, False, SLICES)


@triton.jit
def gemm_sum(
    workspace, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32,
    batch, splits, m, n, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale, a_scale_step, b_scale_step,
    activation, flags, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):
  """out from workspace [splits, batch, m, n], which it adds in order.

  Grid: (columns of tiles, rows of tiles, batch).
  """
  n0 = tl.program_id(0) * TILE_N
  m0 = tl.program_id(1) * TILE_M
  index = tl.program_id(2).to(tl.int64)
  rows = tl.arange(0, TILE_M)
  cols = tl.arange(0, TILE_N)
  r = rows[:, None]
  c = cols[None, :]
  inside = (r < m - m0) & (c < n - n0)
  workspace += (index * m + m0) * n + n0
  part = batch.to(tl.int64) * m * n
  x = tl.zeros([TILE_M, TILE_N], tl.float32)
  if flags & SUM_I32:
    total = tl.zeros([TILE_M, TILE_N], tl.int32)
    for _ in range(splits):
      total += tl.load(
          workspace + (r * n.to(tl.int64) + c), mask=inside, other=0.0
      ).to(tl.int32, bitcast=True)
      workspace += part
    x = total.to(tl.float32)
  else:
    for _ in range(splits):
      x += tl.load(workspace + (r * n.to(tl.int64) + c), mask=inside, other=0.0)
      workspace += part
  x = finish(
      x, a_scale + index * batch_stride_a_scale,
      b_scale + index * batch_stride_b_scale, a_scale_step, b_scale_step,
      bias, bias_f32, m0, n0, m, n, rows, cols, activation, flags,
      (flags & ROW_SCALED) != 0)
  store(
      x, out_bf16, out_f32, workspace, 0, batch, index, batch_stride_out,
      m0, n0, m, n, rows, cols, True, flags)


@triton.jit
def gemm_sum_tiles(
    workspace, a_scale, b_scale, bias, bias_f32, out_bf16, out_f32,
    splits, m, n, batch_stride_out,
    batch_stride_a_scale, batch_stride_b_scale, a_scale_step, b_scale_step,
    sum_tile_m, sum_tile_n, whole_tiles, divided_tiles, activation, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP_M: tl.constexpr,
):
  """The last tiles of out from workspace [splits, tiles, tile_m, tile_n].

  Adds in order what gemm.hopper's kernels left there. Tiles are counted as
  these do, whole_tiles stand in front of those that were divided.
  Grid: (pieces of a tile, divided tiles).
  """
  pieces_n = sum_tile_n // TILE_N
  stride = pieces_n * TILE_N  # So written, the compiler knows what divides it.
  piece_m = tl.program_id(0) // pieces_n * TILE_M
  piece_n = tl.program_id(0) % pieces_n * TILE_N
  tiles_m = tl.cdiv(m, sum_tile_m)
  tiles_n = tl.cdiv(n, sum_tile_n)
  t = whole_tiles + tl.program_id(1)
  index = t // (tiles_m * tiles_n)
  tile_m, tile_n = tile_of(
      t - index * (tiles_m * tiles_n), m, n, sum_tile_m, sum_tile_n, GROUP_M,
      0, False)
  m0 = tile_m * sum_tile_m + piece_m
  n0 = tile_n * sum_tile_n + piece_n
  if (m0 >= m) | (n0 >= n):
    return
  index = index.to(tl.int64)
  rows = tl.arange(0, TILE_M)
  cols = tl.arange(0, TILE_N)
  r = rows[:, None]
  c = cols[None, :]
  size = sum_tile_m * stride
  workspace += tl.program_id(1).to(tl.int64) * size
  at = workspace + ((piece_m + r) * stride + (piece_n + c))
  part = divided_tiles.to(tl.int64) * size
  x = tl.zeros([TILE_M, TILE_N], tl.float32)
  total = tl.zeros([TILE_M, TILE_N], tl.int32)
  inside = r < m - m0
  # Four loads are under way at a time.
  for first in range(0, splits, 4):
    left = splits - first + tl.zeros_like(r)
    y0 = tl.load(at, mask=inside, other=0.0)
    y1 = tl.load(at + part, mask=inside & (left > 1), other=0.0)
    y2 = tl.load(at + 2 * part, mask=inside & (left > 2), other=0.0)
    y3 = tl.load(at + 3 * part, mask=inside & (left > 3), other=0.0)
    at += 4 * part
    x = x + y0 + y1 + y2 + y3
    total += (y0.to(tl.int32, bitcast=True) + y1.to(tl.int32, bitcast=True)
              + y2.to(tl.int32, bitcast=True) + y3.to(tl.int32, bitcast=True))
  if flags & SUM_I32:
    x = total.to(tl.float32)
  x = finish(
      x, a_scale + index * batch_stride_a_scale,
      b_scale + index * batch_stride_b_scale, a_scale_step, b_scale_step,
      bias, bias_f32, m0, n0, m, n, rows, cols, activation, flags,
      (flags & ROW_SCALED) != 0)
  store(
      x, out_bf16, out_f32, workspace, 0, 1, index, batch_stride_out,
      m0, n0, m, n, rows, cols, True, flags)
