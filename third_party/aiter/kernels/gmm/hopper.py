# SPDX-License-Identifier: Apache-2.0
"""Grouped products for Hopper (sm_90) in Gluon: gmm.py's by gemm.hopper's ring.

A block stays on its multiprocessor and takes tile after tile. A slab of rows
that a group shares with the next one is copied whole: rows of a result are not
written past a tile's end, and gmm_tn, whose sum is over rows, clears those that
are not the group's in shared memory. As groups are short, its tiles end often:
TMA copies them out while the next one is multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.gemm import hopper as gemm
from third_party.aiter.kernels.gmm import gmm

# What a slab has first: rows of out, or what is summed.
NN = gl.constexpr(0)
NT = gl.constexpr(1)
TN = gl.constexpr(2)


def tensor_maps(function, constants):
  """TMA maps of a kernel, of [1 or group, row, column]."""
  rows_m = constants["TILE_M"] if constants["SKINNY"] else 64
  n, k = constants["TILE_N"], constants["TILE_K"]
  if function in ("gmm_nt", "gmm_nt_epilogue"):
    n //= 2  # A tile's gates and ups lie apart.
  a = (1, k, rows_m) if function == "gmm_tn" else (1, rows_m, k)
  k_first = ("gmm_nn", "gmm_nn_epilogue", "gmm_tn")
  b = (1, k, n) if function in k_first else (1, n, k)
  maps = {"a_desc": TensorMap("a", a), "b_desc": TensorMap("b", b)}
  if function == "gmm_tn":
    maps["out_desc"] = TensorMap("out", (1, 64, n))
  return maps


@gluon.constexpr_function
def _slab(layout, n, k):
  """The shape of a slab of b."""
  return [1, n, k] if layout == NT else [1, k, n]


@gluon.jit
def _tile_at(t, walk, LAYOUT: gl.constexpr, GROUP_M: gl.constexpr):
  """(group, first row, end, row of tiles, column of tiles) of tile t.

  Past the last one it is that of the last: a consumer asks for its next tile
  before it computes one, which hides how long that takes.
  """
  plan, tiles, tiles_m, tiles_n = walk[:4]
  t = gl.minimum(t, tiles * tiles_m * tiles_n - 1)
  if LAYOUT == TN:
    slot = t // (tiles_m * tiles_n)
    row, col = gemm.tile_at(t - slot * (tiles_m * tiles_n), tiles_m, tiles_n,
                            GROUP_M)
  else:
    row, col = gemm.tile_at(t, tiles, tiles_n, GROUP_M)
    slot = row
  at = plan + 4 * (slot + 1)
  return gl.load(at), gl.load(at + 1), gl.load(at + 2), row, col


@gluon.jit
def _summed(group, first, end, k, LAYOUT: gl.constexpr):
  """How many there are to sum: of k, or rows of a group."""
  if LAYOUT == TN:
    return end - first
  else:
    return gl.where(group < 0, 0, k)


@gluon.jit
def _produce(ring, walk, maps, LAYOUT: gl.constexpr, SKINNY: gl.constexpr,
             TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
             STAGES: gl.constexpr, GROUP_M: gl.constexpr):
  """Copies the slabs of a and b of one tile after the other."""
  a_smem, b_smem, full, empty = ring
  plan, tiles, tiles_m, tiles_n, k, span, apart = walk
  a_desc, b_desc = maps
  PARTS: gl.constexpr = 1 if SKINNY else TILE_M // 64
  AXIS: gl.constexpr = 1 if LAYOUT == NT else 2  # Of b's columns.
  BOX: gl.constexpr = b_desc.block_type.shape[AXIS]
  i = 0
  phase = 1
  for t in range(gl.program_id(0), tiles * tiles_m * tiles_n,
                 gl.num_programs(0)):
    group, first, end, tile_m, tile_n = _tile_at(t, walk, LAYOUT, GROUP_M)
    for s in range(0, _summed(group, first, end, k, LAYOUT), TILE_K):
      mbarrier.wait(empty.index(i), phase)
      mbarrier.expect(full.index(i),
                      PARTS * a_desc.nbytes_per_cta
                      + TILE_N // BOX * b_desc.nbytes_per_cta)
      for h in gl.static_range(TILE_N // BOX):
        col = tile_n * span + h * apart
        part = b_smem.index(i).slice(h * BOX, BOX, AXIS)
        if LAYOUT == NT:
          tma.async_load(b_desc, [group, col, s], full.index(i), part)
        elif LAYOUT == NN:
          tma.async_load(b_desc, [group, s, col], full.index(i), part)
        else:
          tma.async_load(b_desc, [0, first + s, col], full.index(i), part)
      for p in gl.static_range(PARTS):
        part = a_smem.index(PARTS * i + p)
        if LAYOUT == TN:
          tma.async_load(a_desc, [0, first + s, tile_m * TILE_M + p * 64],
                         full.index(i), part)
        else:
          tma.async_load(a_desc, [0, first + p * 64, s], full.index(i), part)
      i, phase = gemm.next_slab(i, phase, STAGES)


@gluon.jit
def _clear(slab, rows_left):
  """Clears the rows of a slab [1, rows, columns] from rows_left on."""
  CHUNK: gl.constexpr = 16
  ROWS: gl.constexpr = slab.shape[1]
  LAYOUT: gl.constexpr = hopper.rows_layout(slab.shape[2])
  slab = slab.reshape([ROWS, slab.shape[2]])
  rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
  for j in gl.static_range(ROWS // CHUNK):
    part = slab.slice(j * CHUNK, CHUNK)
    x = part.load(LAYOUT)
    part.store(gl.where((rows < rows_left - j * CHUNK)[:, None], x,
                        gl.zeros_like(x)))


@gluon.jit
def _sum_rows(acc, ring, rows, i, phase, w: gl.constexpr, TILE_K: gl.constexpr,
              STAGES: gl.constexpr):
  """gemm.sum_slabs of gmm_tn, whose last slab may have rows of others.

  Both warpgroups clear b's and write the same, so neither waits for the other.
  """
  a_smem, b_smem, full, empty = ring
  PARTS: gl.constexpr = a_smem.shape[0] // b_smem.shape[0]
  steps = rows // TILE_K
  acc, i, phase = gemm.sum_slabs(acc, ring, steps, i, phase, w, True, True,
                                 False, STAGES)
  left = rows - steps * TILE_K
  if left > 0:
    mbarrier.wait(full.index(i), phase)
    _clear(a_smem.index(PARTS * i + w), left)
    _clear(b_smem.index(i), left)
    fence_async_shared()
    gl.barrier()
    acc = gemm.multiply(acc, steps > 0, ring, i, phase, w, True, True, False)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(i))
    i, phase = gemm.next_slab(i, phase, STAGES)
  return acc, i, phase


@gluon.jit
def _store_transposed(ptr, x, row0, col0, row_end, n):
  """Stores a part that has columns of the result in its rows."""
  LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
  x = gl.convert_layout(x, LAYOUT)
  rows = row0 + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
  cols = col0 + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
  at = cols[:, None] + rows[None, :].to(gl.int64) * n
  gl.store(ptr + at, x.to(ptr.dtype.element_ty),
           mask=(cols < n)[:, None] & (rows < row_end)[None, :])


@gluon.jit
def _end(acc, out, out_f32, row0, col0, row_end, n, flags,
         GATES: gl.constexpr, ELEMENT: gl.constexpr):
  """Stores a part of the result as `flags` say. GATES: it may be gated."""
  if GATES and (flags & gmm.GATED) != 0:
    x = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2])
    gate, up = x.permute(0, 2, 1).split()  # Each thread its own.
    x = gmm.silu_and_mul(gate.to(ELEMENT), up.to(ELEMENT))
    gemm.store(out, x.to(ELEMENT), row0, col0, row_end, n // 8 * 8, ELEMENT)
  elif (flags & gmm.OUT_F32) != 0:
    gemm.store(out_f32, acc, row0, col0, row_end, n // 8 * 8, ELEMENT)
  else:
    gemm.store(out, acc.to(out.dtype.element_ty), row0, col0, row_end,
               n // 8 * 8, ELEMENT)


@gluon.jit
def _end_group(acc, desc, smem, out_f32, group, row0, col0, k, n, flags,
               ELEMENT: gl.constexpr):
  """Stores a part of gmm_tn's result, of 16 bits by way of a buffer.

  Nobody waits for the copy but who needs the buffer next.
  """
  if (flags & gmm.OUT_F32) != 0:
    # So written, the compiler knows that 8 divides it.
    at = out_f32 + group.to(gl.int64) * k * (n // 8 * 8)
    gemm.store(at, acc, row0, col0, k, n // 8 * 8, ELEMENT)
  else:
    tma.store_wait(0)
    gl.barrier()
    smem.reshape(acc.shape).store(acc.to(ELEMENT))
    fence_async_shared()
    gl.barrier()
    tma.async_store(desc, [group, row0, col0], smem)


@gluon.jit
def _end_transposed(acc, out, out_f32, row0, col0, row_end, n, flags,
                    GATES: gl.constexpr):
  """_end of a part that has columns of the result in its rows."""
  if GATES and (flags & gmm.GATED) != 0:
    # Each thread with both of its pairs.
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 8, 1], [1, 4, 8], [1, 1, 4],
                                            [1, 0, 2])
    x = acc.reshape([2, acc.shape[0] // 2, acc.shape[1]])
    gate, up = gl.convert_layout(x, LAYOUT).permute(1, 2, 0).split()
    dtype: gl.constexpr = out.dtype.element_ty
    x = gmm.silu_and_mul(gate.to(dtype), up.to(dtype))
    _store_transposed(out, x, row0, col0, row_end, n)
  elif (flags & gmm.OUT_F32) != 0:
    _store_transposed(out_f32, acc, row0, col0, row_end, n)
  else:
    _store_transposed(out, acc, row0, col0, row_end, n)


@gluon.jit
def _with_bias(x, ends, group, col0, columns, flags, AXIS: gl.constexpr,
               ELEMENT: gl.constexpr):
  """A part of a product with its bias, in float32.

  AXIS: that of b's columns, of which there are `columns`; the first is col0.
  ELEMENT: what the part is rounded to before.
  """
  at = col0 + gl.arange(0, x.shape[AXIS],
                        gl.SliceLayout(1 - AXIS, x.type.layout))
  # What no matrix is for is 0.
  inside = (at < columns) & (group >= 0) & ((flags & gmm.BIAS) != 0)
  bias = ends[0] + gl.maximum(group, 0).to(gl.int64) * columns
  bias = gl.load(bias + at, mask=inside, other=0.0)
  return x.to(ELEMENT).to(gl.float32) + gl.expand_dims(bias, 1 - AXIS)


@gluon.jit
def _end_columns(acc, ends, out, out_f32, group, row0, col0, row_end, n, flags,
                 PAIRS: gl.constexpr, ELEMENT: gl.constexpr):
  """Stores columns of b from col0 on, 64 at a time: their registers suffice."""
  N: gl.constexpr = acc.shape[1]
  if N > 64:
    low, high = gemm._halves(acc, ELEMENT)
    _end_columns(low, ends, out, out_f32, group, row0, col0, row_end, n, flags,
                 PAIRS, ELEMENT)
    _end_columns(high, ends, out, out_f32, group, row0, col0 + N // 2, row_end,
                 n, flags, PAIRS, ELEMENT)
  elif PAIRS:
    x = _with_bias(acc, ends, group, col0, 2 * n, flags, 1, ELEMENT)
    # Each thread has its own.
    x = gmm.activated_and_mul(
        x.reshape([x.shape[0], N // 2, 2]).split(), ends)
    gemm.store(out, x.to(ELEMENT), row0, col0 // 2, row_end, n // 8 * 8,
               ELEMENT)
  else:
    x = _with_bias(acc, ends, group, col0, n, flags, 1, gl.float32)
    x = gmm.activated(x, ends)
    if (flags & gmm.OUT_F32) != 0:
      gemm.store(out_f32, x, row0, col0, row_end, n // 8 * 8, ELEMENT)
    else:
      gemm.store(out, x.to(ELEMENT), row0, col0, row_end, n // 8 * 8, ELEMENT)


@gluon.jit
def _end_halves(gate, up, ends, out, group, row0, col0, row_end, n, flags,
                ELEMENT: gl.constexpr):
  """Stores columns of the result from col0 on, 64 at a time."""
  N: gl.constexpr = gate.shape[1]
  if N > 64:
    gates = gemm._halves(gate, ELEMENT)
    ups = gemm._halves(up, ELEMENT)
    for i in gl.static_range(2):
      _end_halves(gates[i], ups[i], ends, out, group, row0, col0 + i * N // 2,
                  row_end, n, flags, ELEMENT)
  else:
    gate = _with_bias(gate, ends, group, col0, 2 * n, flags, 1, ELEMENT)
    up = _with_bias(up, ends, group, col0 + n, 2 * n, flags, 1, ELEMENT)
    x = gmm.activated_and_mul((gate, up), ends)
    gemm.store(out, x.to(ELEMENT), row0, col0, row_end, n // 8 * 8, ELEMENT)


@gluon.jit
def _end_ended(acc, ends, out, out_f32, group, row0, col0, row_end, n, flags,
               HALVES: gl.constexpr, ELEMENT: gl.constexpr):
  """Stores a part with its bias and activation; col0 is of b's columns.

  HALVES: gates may be n columns before their ups.
  """
  if (flags & gmm.GATED) == 0:
    _end_columns(acc, ends, out, out_f32, group, row0, col0, row_end, n, flags,
                 False, ELEMENT)
  elif (flags & gmm.PAIRS) != 0:
    _end_columns(acc, ends, out, out_f32, group, row0, col0, row_end, n, flags,
                 True, ELEMENT)
  elif HALVES:
    gate, up = gemm._halves(acc, ELEMENT)
    _end_halves(gate, up, ends, out, group, row0, col0, row_end, n, flags,
                ELEMENT)


@gluon.jit
def _end_ended_transposed(acc, ends, out, out_f32, group, row0, col0, row_end,
                          n, flags, HALVES: gl.constexpr,
                          ELEMENT: gl.constexpr):
  """_end_ended of a part that has columns of the result in its rows."""
  N: gl.constexpr = acc.shape[0]
  M: gl.constexpr = acc.shape[1]
  if (flags & gmm.GATED) == 0:
    x = _with_bias(acc, ends, group, col0, n, flags, 0, gl.float32)
    x = gmm.activated(x, ends)
    if (flags & gmm.OUT_F32) != 0:
      _store_transposed(out_f32, x, row0, col0, row_end, n)
    else:
      _store_transposed(out, x, row0, col0, row_end, n)
  elif (flags & gmm.PAIRS) != 0:
    # Each thread with both of its pairs.
    PAIRED: gl.constexpr = gl.BlockedLayout([8, 2, 1], [4, 1, 8], [1, 1, 4],
                                            [1, 0, 2])
    pairs = _with_bias(acc, ends, group, col0, 2 * n, flags, 0, ELEMENT)
    pairs = gl.convert_layout(pairs.reshape([N // 2, 2, M]), PAIRED)
    _store_transposed(
        out, gmm.activated_and_mul(pairs.permute(0, 2, 1).split(), ends), row0,
        col0 // 2, row_end, n)
  elif HALVES:
    HALVED: gl.constexpr = gl.BlockedLayout([2, 8, 1], [1, 4, 8], [1, 1, 4],
                                            [1, 0, 2])
    halves = gl.convert_layout(acc.reshape([2, N // 2, M]), HALVED)
    gate, up = halves.permute(1, 2, 0).split()
    gate = _with_bias(gate, ends, group, col0, 2 * n, flags, 0, ELEMENT)
    up = _with_bias(up, ends, group, col0 + n, 2 * n, flags, 0, ELEMENT)
    _store_transposed(out, gmm.activated_and_mul((gate, up), ends), row0, col0,
                      row_end, n)


@gluon.jit
def _load_ends(scales, rows, row_end, col0, n, group, LAYOUT: gl.constexpr,
               PARTS: gl.constexpr):
  """The scales of rows of a, and of each 64 rows of b: 0 of no matrix."""
  a_scale, b_scale, _ = scales
  there = group >= 0
  scale_a = gl.load(a_scale + rows, mask=(rows < row_end) & there, other=0.0)
  b_scale += gl.maximum(group, 0).to(gl.int64) * n
  scale_b = ()
  for p in gl.static_range(PARTS):
    cols = col0 + p * 64 + gl.arange(0, 64, LAYOUT)
    scale_b += (gl.load(b_scale + cols, mask=(cols < n) & there, other=0.0),)
  return scale_a, scale_b


@gluon.jit
def _scaled_sum(acc, ring, scales, steps, i, phase, w: gl.constexpr, row0,
                row_end, col0, n, group, KIND: gl.constexpr,
                STAGES: gl.constexpr):
  """A tile's scaled sum in float32, and the ring's state."""
  a_scale, b_scale, scales_k = scales
  LAYOUT: gl.constexpr = acc.type.layout
  if KIND != gemm.BLOCKS:
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    scale_a, scale_b = _load_ends(
        scales, rows, row_end, col0, n, group,
        gl.BlockedLayout([1], [32], [4], [0]), acc.shape[1] // 64)
  if KIND == gemm.ROWS:
    acc, i, phase = gemm.sum_slabs(acc, ring, steps, i, phase, w, False, False,
                                   False, STAGES)
  else:
    b_scale += (gl.maximum(group, 0).to(gl.int64)
                * ((n + gmm.SCALE_BLOCK - 1) // gmm.SCALE_BLOCK) * scales_k)
    at = gemm.scales_at((a_scale, b_scale, scales_k, 1, scales_k, 1), row_end,
                        row0, col0, 0, 64, gl.SliceLayout(1, LAYOUT))
    acc, i, phase = gemm.promoted_sum(acc, at, ring, steps, i, phase, w, KIND,
                                      False, STAGES)
  if KIND != gemm.BLOCKS:
    acc = gemm.scale_rows(acc, scale_a, scale_b, ring[0].dtype)
  return acc, i, phase


@gluon.jit
def _consume(w: gl.constexpr, ring, walk, scales, out, LAYOUT: gl.constexpr,
             KIND: gl.constexpr, EPILOGUE: gl.constexpr, SKINNY: gl.constexpr,
             TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
             STAGES: gl.constexpr, GROUP_M: gl.constexpr):
  """Computes a warpgroup's part of one tile after the other."""
  plan, tiles, tiles_m, tiles_n, k, span, apart = walk
  out, out_smem, out_f32, n, ends, flags = out
  ELEMENT: gl.constexpr = ring[0].dtype
  SUM: gl.constexpr = gl.int32 if ELEMENT == gl.int8 else gl.float32
  N: gl.constexpr = TILE_M if SKINNY else TILE_N
  ACC: gl.constexpr = gemm.accumulator(N, ELEMENT)
  i = 0
  phase = 0
  group, first, end, tile_m, tile_n = _tile_at(gl.program_id(0), walk, LAYOUT,
                                               GROUP_M)
  for t in range(gl.program_id(0), tiles * tiles_m * tiles_n,
                 gl.num_programs(0)):
    ahead = _tile_at(t + gl.num_programs(0), walk, LAYOUT, GROUP_M)
    acc = gl.zeros([64, N], SUM, ACC)
    col0 = tile_n * span
    row0 = first + w * 64
    if LAYOUT == TN:
      acc, i, phase = _sum_rows(acc, ring, end - first, i, phase, w, TILE_K,
                                STAGES)
    else:
      steps = (_summed(group, first, end, k, LAYOUT) + TILE_K - 1) // TILE_K
      if KIND == gemm.PLAIN:
        acc, i, phase = gemm.sum_slabs(acc, ring, steps, i, phase, w, False,
                                       LAYOUT == NN, SKINNY, STAGES)
      else:
        acc, i, phase = _scaled_sum(acc, ring, scales, steps, i, phase, w,
                                    row0, end, col0, n, group, KIND, STAGES)
    if LAYOUT == TN:
      _end_group(acc, out, out_smem.index(w), out_f32, group,
                 tile_m * TILE_M + w * 64, col0, k, n, flags, ELEMENT)
    elif EPILOGUE and SKINNY:
      _end_ended_transposed(acc, ends, out, out_f32, group, row0, col0, end, n,
                            flags, LAYOUT == NT, ELEMENT)
    elif EPILOGUE:
      _end_ended(acc, ends, out, out_f32, group, row0, col0, end, n, flags,
                 LAYOUT == NT, ELEMENT)
    elif SKINNY:
      _end_transposed(acc, out, out_f32, row0, col0, end, n, flags,
                      LAYOUT == NT)
    else:
      _end(acc, out, out_f32, row0, col0, end, n, flags,
           KIND == gemm.PLAIN and LAYOUT == NT, ELEMENT)
    group, first, end, tile_m, tile_n = ahead
  if LAYOUT == TN:
    tma.store_wait(0)


@gluon.jit
def _gmm(a_desc, b_desc, a_scale, b_scale, plan, out, out_f32, n, k, ends,
         flags, LAYOUT: gl.constexpr, KIND: gl.constexpr,
         EPILOGUE: gl.constexpr, SKINNY: gl.constexpr, TILE_M: gl.constexpr,
         TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
         GROUP_M: gl.constexpr):
  """A block's tiles. SKINNY: one warpgroup computes a tile's transpose.

  out: of TN a map. EPILOGUE: `ends` says what is done with a product.
  """
  PARTS: gl.constexpr = 1 if SKINNY else TILE_M // 64
  dtype: gl.constexpr = a_desc.dtype
  a_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(PARTS * STAGES, a_desc.block_type.shape),
      a_desc.layout)
  b_smem = gl.allocate_shared_memory(
      dtype, hopper.stack(STAGES, _slab(LAYOUT, TILE_N, TILE_K)), b_desc.layout)
  out_smem = b_smem  # Of others nobody asks for it.
  if LAYOUT == TN:
    out_smem = gl.allocate_shared_memory(
        dtype, hopper.stack(2, out.block_type.shape), out.layout)
  full = mbarrier.allocate_mbarrier(batch=STAGES)
  empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for i in gl.static_range(STAGES):
    mbarrier.init(full.index(i), count=1)
    mbarrier.init(empty.index(i), count=1 if SKINNY else 2)

  ring = (a_smem, b_smem, full, empty)
  # Rows of tiles are the plan's, but gmm_tn has as many for each group.
  tiles_m = gl.to_tensor(1)
  if LAYOUT == TN:
    tiles_m = (k + TILE_M - 1) // TILE_M
  # A tile's columns in the result, and how far apart its halves are in b.
  gated = (flags & gmm.GATED) != 0
  columns = n
  if EPILOGUE:
    columns = gl.where((flags & gmm.PAIRS) != 0, 2 * n, n)
    gated = gated & ((flags & gmm.PAIRS) == 0)
  span = gl.where(gated, TILE_N // 2, TILE_N)
  apart = gl.where(gated, n, TILE_N // 2)
  walk = (plan, gl.load(plan), tiles_m, (columns + span - 1) // span, k, span,
          apart)
  maps = (a_desc, b_desc)
  scales = (a_scale, b_scale, (k + gmm.SCALE_BLOCK - 1) // gmm.SCALE_BLOCK)
  result = (out, out_smem, out_f32, n, ends, flags)
  if SKINNY:
    gl.warp_specialize([
        (_consume, (0, ring, walk, scales, result, LAYOUT, KIND, EPILOGUE,
                    SKINNY, TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)),
        (_produce, (ring, walk, maps, LAYOUT, SKINNY, TILE_M, TILE_N, TILE_K,
                    STAGES, GROUP_M)),
    ], [1])
  else:
    gl.warp_specialize([
        (_consume, (0, ring, walk, scales, result, LAYOUT, KIND, EPILOGUE,
                    SKINNY, TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)),
        (_consume, (1, ring, walk, scales, result, LAYOUT, KIND, EPILOGUE,
                    SKINNY, TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)),
        (_produce, (ring, walk, maps, LAYOUT, SKINNY, TILE_M, TILE_N, TILE_K,
                    STAGES, GROUP_M)),
    ], [4, 1], [224, 24])


@gluon.jit
def gmm_nn(a_desc, b_desc, plan, out, out_f32, n, k, flags,
           SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
           TILE_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
  """gmm.gmm_nn. Grid: (multiprocessors, or tiles if fewer)."""
  _gmm(a_desc, b_desc, out_f32, out_f32, plan, out, out_f32, n, k, 0, flags,
       NN, gemm.PLAIN, False, SKINNY, TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)


@gluon.jit
def gmm_nn_epilogue(a_desc, b_desc, plan, out, out_f32, bias, n, k, activation,
                    alpha, gate_limit, up_limit, flags, SKINNY: gl.constexpr,
                    TILE_M: gl.constexpr, TILE_N: gl.constexpr,
                    TILE_K: gl.constexpr, STAGES: gl.constexpr,
                    GROUP_M: gl.constexpr):
  """gmm.gmm_nn_epilogue."""
  _gmm(a_desc, b_desc, out_f32, out_f32, plan, out, out_f32, n, k,
       (bias, activation, alpha, gate_limit, up_limit), flags, NN,
       gemm.PLAIN, True, SKINNY, TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)


@gluon.jit
def gmm_nt(a_desc, b_desc, plan, out, out_f32, n, k, flags,
           SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
           TILE_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
  """gmm.gmm_nt."""
  _gmm(a_desc, b_desc, out_f32, out_f32, plan, out, out_f32, n, k, 0, flags,
       NT, gemm.PLAIN, False, SKINNY, TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)


@gluon.jit
def gmm_nt_epilogue(a_desc, b_desc, plan, out, out_f32, bias, n, k, activation,
                    alpha, gate_limit, up_limit, flags, SKINNY: gl.constexpr,
                    TILE_M: gl.constexpr, TILE_N: gl.constexpr,
                    TILE_K: gl.constexpr, STAGES: gl.constexpr,
                    GROUP_M: gl.constexpr):
  """gmm.gmm_nt_epilogue."""
  _gmm(a_desc, b_desc, out_f32, out_f32, plan, out, out_f32, n, k,
       (bias, activation, alpha, gate_limit, up_limit), flags, NT,
       gemm.PLAIN, True, SKINNY, TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)


@gluon.jit
def gmm_tn(a_desc, b_desc, out_desc, plan, out_f32, n, k, flags,
           SKINNY: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
           TILE_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
  """gmm.gmm_tn."""
  _gmm(a_desc, b_desc, out_f32, out_f32, plan, out_desc, out_f32, n, k, 0,
       flags, TN, gemm.PLAIN, False, SKINNY, TILE_M, TILE_N, TILE_K, STAGES,
       GROUP_M)


@gluon.jit
def gmm_row(a_desc, b_desc, a_scale, b_scale, plan, out_bf16, out_f32, n, k,
            flags, PROMOTE: gl.constexpr, SKINNY: gl.constexpr,
            TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
            STAGES: gl.constexpr, GROUP_M: gl.constexpr):
  """gmm.gmm_row."""
  _gmm(a_desc, b_desc, a_scale, b_scale, plan, out_bf16, out_f32, n, k, 0,
       flags, NT, gemm.PROMOTED_ROWS if PROMOTE else gemm.ROWS, False, SKINNY,
       TILE_M, TILE_N, TILE_K, STAGES, GROUP_M)


@gluon.jit
def gmm_block(a_desc, b_desc, a_scale, b_scale, plan, out_bf16, out_f32, n, k,
              flags, SKINNY: gl.constexpr, TILE_M: gl.constexpr,
              TILE_N: gl.constexpr, TILE_K: gl.constexpr,
              STAGES: gl.constexpr, GROUP_M: gl.constexpr):
  """gmm.gmm_block. A tile has one block's columns."""
  gl.static_assert(TILE_N <= gmm.SCALE_BLOCK)
  gl.static_assert(TILE_K == gmm.SCALE_BLOCK)
  _gmm(a_desc, b_desc, a_scale, b_scale, plan, out_bf16, out_f32, n, k, 0,
       flags, NT, gemm.BLOCKS, False, SKINNY, TILE_M, TILE_N, TILE_K, STAGES,
       GROUP_M)
