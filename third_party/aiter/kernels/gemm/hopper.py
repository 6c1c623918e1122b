# SPDX-License-Identifier: Apache-2.0
"""Matrix products for Hopper (sm_90) in Gluon: TMA, mbarriers, wgmma.

The same functions as gemm.py's, for operands that TMA maps can describe, and n
a multiple of 8. A block stays on its multiprocessor and takes item after item:
tiles and, behind them, parts of k of the tiles that would fill a last turn of
blocks badly, which gemm_sum_tiles adds. A producer warp copies slabs of a and b
into a ring, also those of the next item while this one is written. Consumer
warpgroups multiply:

  usually two, that own half of a tile's rows each and b's whole slab;
  SKINNY  one, for few rows of a. It computes the tile's transpose, for wgmma
          wants 64 rows of its first operand: here b's.

A program is a block or, with num_ctas=2, a pair of them on neighbouring
multiprocessors. A pair has half of each warpgroup's rows in either block, and
one copy brings b's slab to both: they ask the L2 cache for a third less.

The tensor cores keep 14 bits of a sum of float8 products: the kernels for
float8 let them add one slab (128 of k) only, and add slabs in float32, as
DeepGEMM does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
  fence_async_shared,
  mbarrier,
  tma,
  warpgroup_mma,
  warpgroup_mma_wait,
)

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.gemm import gemm

# How sums are made and scaled.
PLAIN = gl.constexpr(0)
ROWS = gl.constexpr(1)  # A scale a row of a and of b, at the end.
PROMOTED_ROWS = gl.constexpr(2)  # The same of slabs added in float32.
BLOCKS = gl.constexpr(3)  # Slabs are scaled before they are added.


def tensor_maps(function, constants):
  """TMA maps of a kernel, of [batch, row, column]."""
  skinny = constants["SKINNY"]
  rows_m = constants["TILE_M"] // (1 if skinny else 2)
  n, k = constants["TILE_N"], constants["TILE_K"]
  a = (1, k, rows_m) if function == "gemm_tn" else (1, rows_m, k)
  b = (1, k, n) if function in ("gemm_nn", "gemm_tn") else (1, n, k)
  out = None if skinny else TensorMap("out", (1, rows_m, 64), "bf16")
  return {"a_desc": TensorMap("a", a), "b_desc": TensorMap("b", b),
          "out_desc": out}


@gluon.constexpr_function
def accumulator(n, element, blocks=1):
  """Returns the layout of a warpgroup's accumulator of n columns."""
  widest = 128 if element == gl.int8 else 256  # of Triton's wgmma
  return gl.NVMMADistributedLayout(
      version=[3, 0], warps_per_cta=[4, 1],
      instr_shape=[16, min(n, widest), 256 // element.primitive_bitwidth],
      cga_layout=[[1, 0]] if blocks == 2 else [])


@gluon.constexpr_function
def _columns(blocks):
  """Returns the layout of a vector of columns: of all, in either block."""
  return gl.BlockedLayout([1], [32], [4], [0],
                          cga_layout=[[0]] if blocks == 2 else [])


@gluon.constexpr_function
def _slab(desc, blocks, split):
  """Returns the layout of a map's box in memory, split along an axis or not."""
  bits = desc.dtype.primitive_bitwidth
  basis = [int(axis == split) for axis in range(3)]
  return gl.NVMMASharedLayout(128, bits, rank=3,
                              cga_layout=[basis] if blocks == 2 else [])


# ---- the ring


@gluon.jit
def tile_at(t, tiles_m, tiles_n, GROUP_M: gl.constexpr):
  """Returns row and column of tile t: bands of GROUP_M rows, for the L2."""
  band = t // (GROUP_M * tiles_n)
  rows = gl.minimum(tiles_m - band * GROUP_M, GROUP_M)
  rest = t - band * GROUP_M * tiles_n
  return band * GROUP_M + rest % rows, rest // rows


@gluon.jit
def _items(walk):
  """Returns how many items there are: whole tiles and parts of the others."""
  batch, tiles_m, tiles_n, whole_tiles, splits, k, k_per_split = walk
  return whole_tiles + (batch * tiles_m * tiles_n - whole_tiles) * splits


@gluon.jit
def _item(t, walk, GROUP_M: gl.constexpr):
  """Returns item t: (batch, row of tiles, column, part, k's first, k's end).

  The part is that of the workspace, -1 of a whole tile. Parts of different
  tiles follow each other: neighbours share a and b.
  """
  batch, tiles_m, tiles_n, whole_tiles, splits, k, k_per_split = walk
  tiles = tiles_m * tiles_n
  divided = batch * tiles - whole_tiles
  part = t - whole_tiles
  split = part // gl.maximum(divided, 1)
  is_part = part >= 0
  tile = gl.where(is_part, whole_tiles + part - split * divided, t)
  k_first = gl.where(is_part, split * k_per_split, 0)
  k_end = gl.where(is_part, gl.minimum(k, k_first + k_per_split), k)
  index = tile // tiles
  row, col = tile_at(tile - index * tiles, tiles_m, tiles_n, GROUP_M)
  return index, row, col, gl.where(is_part, part, -1), k_first, k_end


@gluon.jit
def next_slab(i, phase, STAGES: gl.constexpr):
  """Returns the ring's next slab and its phase."""
  i += 1
  phase = gl.where(i == STAGES, phase ^ 1, phase)
  return gl.where(i == STAGES, 0, i), phase


@gluon.jit
def _produce(ring, walk, maps, A_T: gl.constexpr, B_T: gl.constexpr,
             SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
             TILE_K: gl.constexpr, STAGES: gl.constexpr,
             GROUP_M: gl.constexpr):
  """Copies the slabs of a and b of one item after the other."""
  a_smem, b_smem, full, empty = ring[:4]
  a_desc, b_desc, a_batches, b_batches = maps
  PARTS: gl.constexpr = 1 if SKINNY else 2
  PAIR: gl.constexpr = gl.num_ctas() == 2
  BYTES: gl.constexpr = (
      (TILE_M // gl.num_ctas() + TILE_N) * TILE_K
      * a_desc.dtype.primitive_bitwidth // 8)
  i = 0
  phase = 1
  for t in range(gl.program_id(0), _items(walk), gl.num_programs(0)):
    index, tile_m, tile_n, _, k_first, k_end = _item(t, walk, GROUP_M)
    z_a = index * a_batches
    z_b = index * b_batches
    for k in range(k_first, k_end, TILE_K):
      mbarrier.wait(empty.index(i), phase)
      if PAIR:
        mbarrier.wait(ring[4].index(i), phase)
      mbarrier.expect(full.index(i), BYTES)
      col = tile_n * TILE_N
      if B_T:
        tma.async_load(b_desc, [z_b, k, col], full.index(i), b_smem.index(i),
                       multicast=PAIR)
      else:
        tma.async_load(b_desc, [z_b, col, k], full.index(i), b_smem.index(i),
                       multicast=PAIR)
      for p in gl.static_range(PARTS):
        row = tile_m * TILE_M + p * (TILE_M // PARTS)
        part = a_smem.index(PARTS * i + p)
        if A_T:
          tma.async_load(a_desc, [z_a, k, row], full.index(i), part)
        else:
          tma.async_load(a_desc, [z_a, row, k], full.index(i), part)
      i, phase = next_slab(i, phase, STAGES)


@gluon.jit
def _release(ring, i, pred):
  """Gives slab i back: to its own block, which copies a there.

  The last barrier counts both blocks of a pair; the one that copies b to both
  waits for it.
  """
  mbarrier.arrive(ring[3].index(i), pred=pred)
  if gl.num_ctas() == 2:
    mbarrier.arrive(ring[4].index(i), pred=pred)


@gluon.jit
def multiply(acc, use_acc, ring, i, phase, p: gl.constexpr, A_T: gl.constexpr,
             B_T: gl.constexpr, SKINNY: gl.constexpr):
  """Waits for slab i and starts the product of a's part p: a promise."""
  a_smem, b_smem, full = ring[:3]
  PARTS: gl.constexpr = a_smem.shape[0] // b_smem.shape[0]
  mbarrier.wait(full.index(i), phase)
  a = a_smem.index(PARTS * i + p)
  a = a.reshape([a.shape[1], a.shape[2]])
  b = b_smem.index(i)
  b = b.reshape([b.shape[1], b.shape[2]])
  if SKINNY:
    if B_T:
      b = b.permute([1, 0])
    return warpgroup_mma(b, a.permute([1, 0]), acc, use_acc=use_acc,
                         is_async=True)
  else:
    if A_T:
      a = a.permute([1, 0])
    if not B_T:
      b = b.permute([1, 0])
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def sum_slabs(acc, ring, steps, i, phase, w: gl.constexpr, A_T: gl.constexpr,
              B_T: gl.constexpr, SKINNY: gl.constexpr, STAGES: gl.constexpr):
  """Returns a tile's sum, added by the tensor cores, and the ring's state."""
  last = 0
  for step in range(steps):
    acc = multiply(acc, step > 0, ring, i, phase, w, A_T, B_T, SKINNY)
    acc = warpgroup_mma_wait(1, deps=[acc])
    _release(ring, last, step > 0)
    last = i
    i, phase = next_slab(i, phase, STAGES)
  acc = warpgroup_mma_wait(0, deps=[acc])
  _release(ring, last, steps > 0)
  return acc, i, phase


@gluon.jit
def scales_at(scales, m, row0, col0, slab, ROWS_: gl.constexpr,
               LAYOUT: gl.constexpr):
  """Returns where a tile's scales of the first slab are."""
  (a_scale, b_scale, stride_a_scale_m, stride_a_scale_k, stride_b_scale_n,
   stride_b_scale_k) = scales
  rows = row0 + gl.arange(0, ROWS_, LAYOUT)
  at_a = gl.minimum(rows, m - 1) * stride_a_scale_m + slab * stride_a_scale_k
  # b's scale is the same for all rows (0 is added), but each thread shall hold
  # its own: a uniform register's value is waited for at once.
  at_b = col0 // gemm.SCALE_BLOCK * stride_b_scale_n + (rows >> 31)
  at_b += slab * stride_b_scale_k
  return a_scale, b_scale, at_a, at_b, stride_a_scale_k, stride_b_scale_k


@gluon.jit
def _load_scales(at, slab, slabs, KIND: gl.constexpr):
  """Returns a slab's scales, of rows of a and of b; past the last, its."""
  a_scale, b_scale, at_a, at_b, stride_a_scale_k, stride_b_scale_k = at
  if KIND == BLOCKS:
    slab = gl.maximum(gl.minimum(slab, slabs - 1), 0)
    return (gl.load(a_scale + (at_a + slab * stride_a_scale_k)),
            gl.load(b_scale + (at_b + slab * stride_b_scale_k)))
  else:
    return at_a, at_b


@gluon.jit
def _add(acc, part, scale_a, scale_b, KIND: gl.constexpr,
         SKINNY: gl.constexpr):
  """Adds a slab's sum in float32."""
  if KIND == BLOCKS:
    scale = scale_a * scale_b
    if SKINNY:
      return acc + part * scale[None, :]
    else:
      return acc + part * scale[:, None]
  else:
    return acc + part


@gluon.jit
def promoted_sum(acc, at, ring, steps, i, phase, w: gl.constexpr,
                  KIND: gl.constexpr, SKINNY: gl.constexpr,
                  STAGES: gl.constexpr):
  """sum_slabs in float32, of nt. Two slabs take turns: one is multiplied while
  the other is added."""
  if steps > 0:
    s, t = _load_scales(at, 0, steps, KIND)
    s1, t1 = _load_scales(at, 1, steps, KIND)
    part = multiply(acc, False, ring, i, phase, w, False, False, SKINNY)
    for pair in range((steps - 1) // 2):
      j, phase = next_slab(i, phase, STAGES)
      part1 = multiply(acc, False, ring, j, phase, w, False, False, SKINNY)
      x = warpgroup_mma_wait(1, deps=[part])
      _release(ring, i, True)
      acc = _add(acc, x, s, t, KIND, SKINNY)
      s, t = _load_scales(at, 2 * pair + 2, steps, KIND)
      i, phase = next_slab(j, phase, STAGES)
      part = multiply(acc, False, ring, i, phase, w, False, False, SKINNY)
      x = warpgroup_mma_wait(1, deps=[part1])
      _release(ring, j, True)
      acc = _add(acc, x, s1, t1, KIND, SKINNY)
      s1, t1 = _load_scales(at, 2 * pair + 3, steps, KIND)
    if steps % 2 == 0:
      j, phase = next_slab(i, phase, STAGES)
      part1 = multiply(acc, False, ring, j, phase, w, False, False, SKINNY)
      x = warpgroup_mma_wait(1, deps=[part])
      _release(ring, i, True)
      acc = _add(acc, x, s, t, KIND, SKINNY)
      x = warpgroup_mma_wait(0, deps=[part1])
      _release(ring, j, True)
      acc = _add(acc, x, s1, t1, KIND, SKINNY)
      i, phase = next_slab(j, phase, STAGES)
    else:
      x = warpgroup_mma_wait(0, deps=[part])
      _release(ring, i, True)
      acc = _add(acc, x, s, t, KIND, SKINNY)
      i, phase = next_slab(i, phase, STAGES)
  return acc, i, phase


# ---- the end of a tile


@gluon.jit
def _halves(x, ELEMENT: gl.constexpr):
  """Splits accumulators in the middle of the columns: each thread its own."""
  ROWS_: gl.constexpr = x.shape[0]
  N: gl.constexpr = x.shape[1] // 2
  LAYOUT: gl.constexpr = accumulator(N, ELEMENT, gl.num_ctas())
  low, high = x.reshape([ROWS_, 2, N]).permute(0, 2, 1).split()
  return gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)


@gluon.jit
def _join(low, high, ELEMENT: gl.constexpr):
  """Undoes _halves."""
  N: gl.constexpr = 2 * low.shape[1]
  x = gl.join(low, high).permute(0, 2, 1).reshape([low.shape[0], N])
  return gl.convert_layout(x, accumulator(N, ELEMENT, gl.num_ctas()))


@gluon.jit
def _load_bias(out, cols):
  """Returns columns' bias: as 16 bits and as float32, one of them 0."""
  (bias, bias_f32, _, _, _, _, n, _, flags) = out
  mask = (cols < n) & ((flags & gemm.HAS_BIAS) != 0)
  wide = (flags & gemm.BIAS_F32) != 0
  return (gl.load(bias + cols, mask=mask & (wide == 0), other=0),
          gl.load(bias_f32 + cols, mask=mask & wide, other=0.0))


@gluon.jit
def _widen_bias(bias, flags):
  """Returns what _load_bias has loaded as float32."""
  bits, y = bias
  return y + gl.where((flags & gemm.OUT_FP16) != 0,
                      bits.to(gl.float16, bitcast=True).to(gl.float32),
                      bits.to(gl.bfloat16, bitcast=True).to(gl.float32))


@gluon.jit
def _load_ends(scales, out, rows, cols, whole, KIND: gl.constexpr,
               PARTS: gl.constexpr):
  """Returns rows' scales and, of each 64 columns, the scales and the bias.

  They are loaded before a tile's sum is made, which hides how long that takes.
  """
  a_scale, b_scale, stride_a_scale_m, _, stride_b_scale_n, _ = scales
  SCALED: gl.constexpr = KIND == ROWS or KIND == PROMOTED_ROWS
  scale_a = rows
  if SCALED:
    scale_a = gl.load(a_scale + rows * stride_a_scale_m,
                      mask=(rows < out[5]) & whole, other=1.0)
  scale_b = ()
  bias = ()
  for p in gl.static_range(PARTS):
    at = cols + p * 64
    bias += (_load_bias(out, at),)
    if SCALED:
      scale_b += (gl.load(b_scale + at * stride_b_scale_n,
                          mask=(at < out[6]) & whole, other=1.0),)
  return scale_a, scale_b, bias


@gluon.jit
def _to_bf16(x, flags):
  """Rounds to bfloat16, or to the bits of float16."""
  if (flags & gemm.OUT_FP16) != 0:
    y = x.to(gl.float16).to(gl.bfloat16, bitcast=True)
  else:
    y = x.to(gl.bfloat16)
  return y


@gluon.jit
def scale_rows(acc, scale_a, scale_b, ELEMENT: gl.constexpr):
  """Returns sums as float32, times a scale a row and one a column."""
  N: gl.constexpr = acc.shape[1]
  if N > 64:
    low, high = _halves(acc, ELEMENT)
    low = scale_rows(low, scale_a, scale_b[:N // 128], ELEMENT)
    high = scale_rows(high, scale_a, scale_b[N // 128:], ELEMENT)
    return _join(low, high, ELEMENT)
  else:
    LAYOUT: gl.constexpr = acc.type.layout
    s = gl.convert_layout(scale_a, gl.SliceLayout(1, LAYOUT))
    t = gl.convert_layout(scale_b[0], gl.SliceLayout(0, LAYOUT))
    return acc.to(gl.float32) * s[:, None] * t[None, :]


@gluon.jit
def _activate(x, bias, activation, flags, ELEMENT: gl.constexpr):
  """Adds the bias and activates, in a loop over the columns.

  The loop moves all columns through the registers of the first 64: the code of
  the activations is long.
  """
  N: gl.constexpr = x.shape[1]
  if N > 64:
    for _ in range(2):
      low, high = _halves(x, ELEMENT)
      low = _activate(low, bias[:N // 128], activation, flags, ELEMENT)
      x = _join(high, low, ELEMENT)
      bias = bias[N // 128:] + bias[:N // 128]
    return x
  else:
    y = _widen_bias(bias[0], flags)
    y = gl.convert_layout(y, gl.SliceLayout(0, x.type.layout))
    return gemm.activate(x + y[None, :], activation)


@gluon.jit
def _store_rows(ptr, pitch, x, row0, col0, m, n):
  """Stores from where the numbers are; rows are `pitch` apart."""
  LAYOUT: gl.constexpr = x.type.layout
  rows = row0 + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
  cols = col0 + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
  at = rows[:, None].to(gl.int64) * pitch + cols[None, :]
  gl.store(ptr + at, x, mask=(rows < m)[:, None] & (cols < n)[None, :])


@gluon.jit
def store(ptr, x, row0, col0, m, n, ELEMENT: gl.constexpr):
  """Stores a part of the result, 8 values a thread."""
  N: gl.constexpr = x.shape[1]
  if N > 64:
    low, high = _halves(x, ELEMENT)
    store(ptr, low, row0, col0, m, n, ELEMENT)
    store(ptr, high, row0, col0 + N // 2, m, n, ELEMENT)
  else:
    x = gl.convert_layout(x, hopper.rows_layout(N))
    _store_rows(ptr, n, x, row0, col0, m, n)


@gluon.jit
def _copy_out(x, desc, smem, z, row0, col0, p: gl.constexpr,
              ELEMENT: gl.constexpr):
  """Stores 16 bits by way of two buffers, from which TMA copies 64 columns.

  Nobody waits for the copies but who needs their buffer next: the following
  tile's products begin beside them.
  """
  N: gl.constexpr = x.shape[1]
  if N > 64:
    low, high = _halves(x, ELEMENT)
    _copy_out(low, desc, smem, z, row0, col0, p, ELEMENT)
    _copy_out(high, desc, smem, z, row0, col0 + N // 2, p + N // 128, ELEMENT)
  else:
    buffer = smem.index(p % 2)
    tma.store_wait(1)
    gl.barrier()
    buffer.reshape([x.shape[0], N]).store(x)
    fence_async_shared()
    gl.barrier()
    tma.async_store(desc, [z, row0, col0], buffer)


@gluon.jit
def _finish(acc, ends, out, buffers, row0, col0, whole, KIND: gl.constexpr,
            ELEMENT: gl.constexpr):
  """Scales, adds the bias, activates, rounds and stores sums."""
  scale_a, scale_b, bias = ends
  out_desc, smem, z = buffers
  (_, _, _, out_f32, pitch, m, n, activation, flags) = out
  x = acc.to(gl.float32)
  if KIND == ROWS or KIND == PROMOTED_ROWS:
    if whole:
      x = scale_rows(acc, scale_a, scale_b, ELEMENT)
    elif acc.dtype == gl.int32:
      x = acc.to(gl.float32, bitcast=True)
  if ((flags & gemm.HAS_BIAS) != 0) | (activation != 0):
    x = _activate(x, bias, activation, flags, ELEMENT)
  if (flags & gemm.OUT_F32) != 0:
    _store_rows(out_f32, pitch, x, row0, col0, m, n)
  else:
    _copy_out(_to_bf16(x, flags), out_desc, smem, z, row0, col0, 0, ELEMENT)


@gluon.jit
def _finish_transposed(acc, ends, out, rows, cols, whole, KIND: gl.constexpr,
                       LAYOUT: gl.constexpr):
  """_finish of SKINNY: acc has columns of the result in its rows."""
  scale_a, scale_b, bias = ends
  (_, _, out_bf16, out_f32, pitch, m, n, activation, flags) = out
  acc = gl.convert_layout(acc, LAYOUT)
  x = acc.to(gl.float32)
  if KIND == ROWS or KIND == PROMOTED_ROWS:
    if whole:
      x = x * scale_a[None, :] * scale_b[0][:, None]
    elif acc.dtype == gl.int32:
      x = acc.to(gl.float32, bitcast=True)
  if (flags & gemm.HAS_BIAS) != 0:  # Not to partial sums' bits.
    x += _widen_bias(bias[0], flags)[:, None]
  x = gemm.activate(x, activation)
  at = cols[:, None] + rows[None, :].to(gl.int64) * pitch
  mask = (cols < n)[:, None] & (rows < m)[None, :]
  if (flags & gemm.OUT_F32) != 0:
    gl.store(out_f32 + at, x, mask=mask)
  else:
    gl.store(out_bf16 + at, _to_bf16(x, flags), mask=mask)


@gluon.jit
def _consume(w: gl.constexpr, ring, walk, scales, out, buffers,
             A_T: gl.constexpr, B_T: gl.constexpr, KIND: gl.constexpr,
             SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
             TILE_K: gl.constexpr, STAGES: gl.constexpr,
             GROUP_M: gl.constexpr):
  """Computes a warpgroup's part of one item after the other."""
  (bias, bias_f32, out_bf16, out_f32, workspace, m, n, batch_stride_out,
   activation, flags) = out
  ELEMENT: gl.constexpr = ring[0].dtype
  SUM: gl.constexpr = gl.int32 if ELEMENT == gl.int8 else gl.float32
  ROWS_M: gl.constexpr = TILE_M if SKINNY else TILE_M // 2
  N: gl.constexpr = TILE_M if SKINNY else TILE_N
  LAYOUT: gl.constexpr = accumulator(N, ELEMENT, gl.num_ctas())
  # The layout of the tile's end, and of vectors of its rows and columns.
  END: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
  END_ROWS: gl.constexpr = gl.SliceLayout(0, END) if SKINNY else (
      gl.SliceLayout(1, LAYOUT))
  END_COLS: gl.constexpr = gl.SliceLayout(1, END) if SKINNY else (
      _columns(gl.num_ctas()))
  i = 0
  phase = 0
  for t in range(gl.program_id(0), _items(walk), gl.num_programs(0)):
    index, tile_m, tile_n, part, k_first, k_end = _item(t, walk, GROUP_M)
    steps = (k_end - k_first + TILE_K - 1) // TILE_K
    whole = part < 0
    offset = index.to(gl.int64) * batch_stride_out
    # A part's sum goes as it is into a tile of the workspace.
    to_part = workspace + (part.to(gl.int64) * TILE_M - tile_m * TILE_M - (
        tile_n)) * TILE_N
    own_out = (bias, bias_f32, out_bf16 + offset,
               gl.where(whole, out_f32 + offset, to_part),
               gl.where(whole, n, TILE_N) // 8 * 8, m, n,
               gl.where(whole, activation, 0),
               gl.where(whole, flags, gemm.OUT_F32))
    own_scales = scales[:6]
    if KIND != PLAIN:
      own_scales = (scales[0] + index * scales[6],
                    scales[1] + index * scales[7], scales[2], scales[3],
                    scales[4], scales[5])
    row0 = tile_m * TILE_M + w * ROWS_M
    col0 = tile_n * TILE_N
    rows = row0 + gl.arange(0, ROWS_M, END_ROWS)
    cols = col0 + gl.arange(0, 64, END_COLS)
    ends = _load_ends(own_scales, own_out, rows, cols, whole, KIND,
                      TILE_N // 64)
    acc = gl.zeros([64 if SKINNY else ROWS_M, N], SUM, LAYOUT)
    if KIND == PROMOTED_ROWS or KIND == BLOCKS:
      at = scales_at(own_scales, m, row0, col0, k_first // TILE_K, ROWS_M,
                     gl.SliceLayout(0 if SKINNY else 1, LAYOUT))
      acc, i, phase = promoted_sum(acc, at, ring, steps, i, phase, w, KIND,
                                    SKINNY, STAGES)
    else:
      acc, i, phase = sum_slabs(acc, ring, steps, i, phase, w, A_T, B_T, SKINNY,
                                STAGES)
    if SKINNY:
      _finish_transposed(acc, ends, own_out, rows, cols, whole, KIND, END)
    else:
      out_desc, smem = buffers
      _finish(acc, ends, own_out, (out_desc, smem.slice(2 * w, 2), index), row0,
              col0, whole, KIND, ELEMENT)
  if not SKINNY:
    tma.store_wait(0)


# ---- the kernels


@gluon.jit
def _gemm(a_desc, b_desc, out_desc, a_scale, b_scale, bias, bias_f32, out_bf16,
          out_f32, workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
          batch_stride_out, batch_stride_a_scale, batch_stride_b_scale,
          stride_a_scale_m, stride_a_scale_k, stride_b_scale_n,
          stride_b_scale_k, whole_tiles, splits, k_per_split, activation, flags,
          A_T: gl.constexpr, B_T: gl.constexpr, KIND: gl.constexpr,
          SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
          TILE_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
  """A program's items."""
  # The same numbers; so written, the compiler knows what divides them.
  n = n // 8 * 8
  batch_stride_out = batch_stride_out // 8 * 8
  PARTS: gl.constexpr = 1 if SKINNY else 2
  BLOCKS_: gl.constexpr = gl.num_ctas()
  dtype: gl.constexpr = a_desc.dtype
  a_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(PARTS * STAGES, a_desc.block_type.shape),
      _slab(a_desc, BLOCKS_, 2 if A_T else 1))
  b_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(STAGES, b_desc.block_type.shape),
      _slab(b_desc, BLOCKS_, None))
  buffers = (out_desc, None)
  if not SKINNY:
    buffers = (out_desc, gl.allocate_shared_memory(
        out_desc.dtype, hopper.stack(4, out_desc.block_type.shape),
        _slab(out_desc, BLOCKS_, 1)))
  full = mbarrier.allocate_mbarrier(batch=STAGES)
  empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for i in gl.static_range(STAGES):
    mbarrier.init(full.index(i), count=1)
    mbarrier.init(empty.index(i), count=1 if SKINNY else 2)

  ring = (a_smem, b_smem, full, empty)
  if BLOCKS_ == 2:
    both = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for i in gl.static_range(STAGES):
      mbarrier.init(both.index(i), count=2)
    ring = (a_smem, b_smem, full, empty, both)
  walk = (batch, (m + TILE_M - 1) // TILE_M, (n + TILE_N - 1) // TILE_N,
          whole_tiles, splits, k, k_per_split)
  # What all of a batch share is the map's only matrix.
  maps = (a_desc, b_desc, gl.where(batch_stride_a != 0, 1, 0),
          gl.where(batch_stride_b != 0, 1, 0))
  scales = (a_scale, b_scale, stride_a_scale_m, stride_a_scale_k,
            stride_b_scale_n, stride_b_scale_k, batch_stride_a_scale,
            batch_stride_b_scale)
  out = (bias, bias_f32, out_bf16, out_f32, workspace, m, n, batch_stride_out,
         activation, flags)
  if SKINNY:
    gl.warp_specialize([
        (_consume, (0, ring, walk, scales, out, buffers, A_T, B_T, KIND, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)),
        (_produce, (ring, walk, maps, A_T, B_T, SKINNY, TILE_M, TILE_N,
                    TILE_K, STAGES, GROUP_M)),
    ], [1])
  else:
    gl.warp_specialize([
        (_consume, (0, ring, walk, scales, out, buffers, A_T, B_T, KIND, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)),
        (_consume, (1, ring, walk, scales, out, buffers, A_T, B_T, KIND, SKINNY,
                    TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)),
        (_produce, (ring, walk, maps, A_T, B_T, SKINNY, TILE_M, TILE_N,
                    TILE_K, STAGES, GROUP_M)),
    ], [4, 1], [224, 24])


@gluon.jit
def gemm_nt(a_desc, b_desc, out_desc, bias, bias_f32, out_bf16, out_f32,
            workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
            batch_stride_out, whole_tiles, splits, k_per_split, activation,
            flags, SKINNY: gl.constexpr, TILE_M: gl.constexpr,
            TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
            GROUP_M: gl.constexpr):
  """gemm.gemm_nt. Grid: (multiprocessors, or items if fewer)."""
  _gemm(a_desc, b_desc, out_desc, bias_f32, bias_f32, bias, bias_f32, out_bf16,
        out_f32, workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
        batch_stride_out, 0, 0, 0, 0, 0, 0, whole_tiles, splits, k_per_split,
        activation, flags, False, False, PLAIN, SKINNY, TILE_M, TILE_N,
        TILE_K, STAGES, GROUP_M)


@gluon.jit
def gemm_nn(a_desc, b_desc, out_desc, bias, bias_f32, out_bf16, out_f32,
            workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
            batch_stride_out, whole_tiles, splits, k_per_split, activation,
            flags, SKINNY: gl.constexpr, TILE_M: gl.constexpr,
            TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
            GROUP_M: gl.constexpr):
  """gemm.gemm_nn."""
  _gemm(a_desc, b_desc, out_desc, bias_f32, bias_f32, bias, bias_f32, out_bf16,
        out_f32, workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
        batch_stride_out, 0, 0, 0, 0, 0, 0, whole_tiles, splits, k_per_split,
        activation, flags, False, True, PLAIN, SKINNY, TILE_M, TILE_N,
        TILE_K, STAGES, GROUP_M)


@gluon.jit
def gemm_tn(a_desc, b_desc, out_desc, bias, bias_f32, out_bf16, out_f32,
            workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
            batch_stride_out, whole_tiles, splits, k_per_split, activation,
            flags, SKINNY: gl.constexpr, TILE_M: gl.constexpr,
            TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
            GROUP_M: gl.constexpr):
  """gemm.gemm_tn."""
  _gemm(a_desc, b_desc, out_desc, bias_f32, bias_f32, bias, bias_f32, out_bf16,
        out_f32, workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
        batch_stride_out, 0, 0, 0, 0, 0, 0, whole_tiles, splits, k_per_split,
        activation, flags, True, True, PLAIN, SKINNY, TILE_M, TILE_N,
        TILE_K, STAGES, GROUP_M)


@gluon.jit
def gemm_row(a_desc, b_desc, out_desc, a_scale, b_scale, bias, bias_f32,
             out_bf16, out_f32, workspace, batch, m, n, k, batch_stride_a,
             batch_stride_b, batch_stride_out, batch_stride_a_scale,
             batch_stride_b_scale, a_scale_step, b_scale_step, whole_tiles,
             splits, k_per_split, activation, flags, PROMOTE: gl.constexpr,
             SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
             TILE_K: gl.constexpr, STAGES: gl.constexpr,
             GROUP_M: gl.constexpr):
  """gemm.gemm_row."""
  _gemm(a_desc, b_desc, out_desc, a_scale, b_scale, bias, bias_f32, out_bf16,
        out_f32, workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
        batch_stride_out, batch_stride_a_scale, batch_stride_b_scale,
        a_scale_step, 0, b_scale_step, 0, whole_tiles, splits, k_per_split,
        activation, flags, False, False, PROMOTED_ROWS if PROMOTE else ROWS,
        SKINNY, TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)


@gluon.jit
def gemm_block(a_desc, b_desc, out_desc, a_scale, b_scale, bias, bias_f32,
               out_bf16, out_f32, workspace, batch, m, n, k, batch_stride_a,
               batch_stride_b, batch_stride_out, batch_stride_a_scale,
               batch_stride_b_scale, stride_a_scale_m, stride_a_scale_k,
               stride_b_scale_n, stride_b_scale_k, whole_tiles, splits,
               k_per_split, activation, flags, SKINNY: gl.constexpr,
               TILE_M: gl.constexpr, TILE_N: gl.constexpr,
               TILE_K: gl.constexpr, STAGES: gl.constexpr,
               GROUP_M: gl.constexpr):
  """gemm.gemm_block. A tile has one block's columns."""
  gl.static_assert(TILE_N <= gemm.SCALE_BLOCK)
  gl.static_assert(TILE_K == gemm.SCALE_BLOCK)
  _gemm(a_desc, b_desc, out_desc, a_scale, b_scale, bias, bias_f32, out_bf16,
        out_f32, workspace, batch, m, n, k, batch_stride_a, batch_stride_b,
        batch_stride_out, batch_stride_a_scale, batch_stride_b_scale,
        stride_a_scale_m, stride_a_scale_k, stride_b_scale_n,
        stride_b_scale_k, whole_tiles, splits, k_per_split, activation, flags,
        False, False, BLOCKS, SKINNY, TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)
