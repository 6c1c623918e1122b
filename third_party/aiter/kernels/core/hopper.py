# SPDX-License-Identifier: Apache-2.0
"""What the Hopper (sm_90) kernels in Gluon share: layouts, rings, copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.constexpr_function
def accumulator(n):
  """Returns the layout of a warpgroup's 64 x n accumulator."""
  return gl.NVMMADistributedLayout(
      version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@gluon.constexpr_function
def stack(count, shape):
  """Returns the shape of a ring of buffers."""
  return [count, *shape]


@gluon.constexpr_function
def rows_layout(n):
  """Returns a warpgroup's layout of rows of n values, 16 bytes a thread."""
  lanes = min(n // 8, 32)
  return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def ring(step, STAGES: gl.constexpr):
  """Returns the buffer and the barrier phase of a ring's `step`-th use."""
  return step % STAGES, (step // STAGES) & 1


@gluon.jit
def copy_rows(base, stride, smem, count, first_row, width, shown,
              N: gl.constexpr, D: gl.constexpr, SHOWN: gl.constexpr):
  """Copies `count` rows and `width` columns of a tile; the others become 0.

  With SHOWN so does a row whose byte in `shown` is 0, if those are `there`:
  (ptr, stride and key_stride between its bytes, there).
  """
  CHUNK: gl.constexpr = 16
  LAYOUT: gl.constexpr = rows_layout(D)
  tile = smem.reshape([N, D])
  rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
  offsets = rows[:, None] * stride + cols[None, :]
  base += first_row.to(gl.int64) * stride
  for i in gl.static_range(N // CHUNK):
    # A width of 8 elements promises that no mask cuts 16 bytes.
    live = rows < count - i * CHUNK
    if SHOWN:
      at = shown.ptr + (i * CHUNK + rows) * shown.key_stride
      live = live & (gl.load(at, mask=live & shown.there, other=1) != 0)
    mask = live[:, None] & (cols < width // 8 * 8)[None, :]
    async_copy.async_load(tile.slice(i * CHUNK, CHUNK), base + offsets,
                          mask=mask)
    base += CHUNK * stride
  async_copy.commit_group()
  async_copy.wait_group(0)
  fence_async_shared()
  gl.barrier()


# ---- clusters: blocks that copy for each other


@gluon.constexpr_function
def _copy_box_text(map_, blocks):
  """Returns instructions of a lane that copies a box of a kernel's map.

  Operands: memory, bytes behind its begin, the barrier, what `blocks` get it as
  a mask, and the box's column, row and matrix. map_: the map's place among the
  arguments, of three dimensions, each a map, sizes and strides.
  """
  to = ".multicast::cluster" if blocks > 1 else ""
  mask = ", blocks" if blocks > 1 else ""
  tail = ".mbarrier::complete_tx::bytes"
  return f"""{{
    .reg .pred one;
    .reg .b16 blocks;
    .reg .b32 to, barrier, rank;
    .reg .b64 map;
    elect.sync _|one, -1;
    // Addresses come without the block that they are of.
    mov.u32 rank, %cluster_ctarank;
    add.u32 to, $0, $1;
    mapa.shared::cluster.u32 to, to, rank;
    mapa.shared::cluster.u32 barrier, $2, rank;
    cvt.u16.u32 blocks, $3;
    mov.b64 map, KERNEL_param_{7 * map_};
    cvta.param.u64 map, map;
    @one cp.async.bulk.tensor.3d.shared::cluster.global{tail}{to}
        [to], [map, {{$4, $5, $6}}], [barrier]{mask};
  }}"""


@gluon.jit
def copy_box(MAP: gl.constexpr, z, row, col, smem, offset, barrier, mask,
             BLOCKS: gl.constexpr):
  """Copies a box to the same place of all blocks in a mask, by one warp.

  Their own barriers, where this block's has its place, learn of the bytes.
  """
  gl.inline_asm(_copy_box_text(MAP, BLOCKS), "r,r,r,r,r,r,r",
                (smem, offset, barrier, mask, col, row, z), is_pure=False)


@gluon.constexpr_function
def _arrive_text(rows, cols):
  """Returns instructions by which a warpgroup arrives at blocks of its cluster.

  It is one of `rows` by `cols` blocks, rows next to each other: $1 and $2 are
  where this block stands in it. They are those of its row and of its column,
  once each; at $0 each has its barrier. $3: whether at all.
  """
  return f"""{{
    .reg .pred one, behind;
    .reg .b32 block, other, at;
    mov.u32 block, %tid.x;
    and.b32 block, block, 127;
    setp.ne.s32 one, $3, 0;
    setp.lt.and.u32 one, block, {rows + cols - 1}, one;
    sub.s32 other, block, {cols};
    setp.ge.s32 behind, other, $1;
    selp.b32 at, 1, 0, behind;
    add.s32 other, other, at;
    mad.lo.s32 other, $2, {rows}, other;
    mad.lo.s32 at, block, {rows}, $1;
    setp.lt.u32 behind, block, {cols};
    selp.b32 block, at, other, behind;
    @one mapa.shared::cluster.u32 at, $0, block;
    @one mbarrier.arrive.shared::cluster.b64 _, [at];
  }}"""


@gluon.jit
def arrive_at_cluster(barrier, row, col, pred, ROWS: gl.constexpr,
                      COLS: gl.constexpr):
  """Arrives, once, at a barrier of each block in a cluster's row and column."""
  gl.inline_asm(_arrive_text(ROWS, COLS), "r,r,r,r",
                (barrier, row, col, gl.to_tensor(pred).to(gl.int32)),
                is_pure=False)


@gluon.jit
def enter_cluster():
  """Tells a cluster that a warp has begun: each of each block has to.

  Memory that was written before it, also of barriers, is there for whoever
  waits.
  """
  gl.inline_asm("""{
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
  }""", "", (), is_pure=False)


@gluon.jit
def wait_for_cluster():
  """Waits until all warps have arrived in a cluster."""
  gl.inline_asm("barrier.cluster.wait.aligned;", "", (), is_pure=False)
