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
