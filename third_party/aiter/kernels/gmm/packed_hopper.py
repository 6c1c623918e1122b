# SPDX-License-Identifier: Apache-2.0
"""gmm.gmm_mx of rows in bfloat16 for Hopper (sm_90) in Gluon.

The tensor cores take the weights from registers, where they are unpacked: of a
word of eight numbers each of four threads needs two, side by side in k, so that
all four read it, and none sends the others anything. What is unpacked belongs
to the next slab, while the tensor cores multiply this one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from third_party.aiter.kernels.gemm import hopper as gemm
from third_party.aiter.kernels.gmm import gmm


@gluon.constexpr_function
def _accumulator(rows, columns):
  """Returns the layout of columns of the result, by rows: 16 a warp."""
  return gl.NVMMADistributedLayout(
      version=[3, 0], warps_per_cta=[columns // 16, 1],
      instr_shape=[16, rows, 16])


@gluon.constexpr_function
def _powers(size):
  """Returns 1, 2, 4 and so on below a size."""
  return [1 << i for i in range(size.bit_length() - 1)]


@gluon.constexpr_function
def _pairs(columns, words):
  """Returns the layout of [columns, words, pairs of a word]."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, w, 0] for w in _powers(words)] + [[8, 0, 0]],
      lane_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
      warp_bases=[[16 * c, 0, 0] for c in _powers(columns // 16)],
      block_bases=[], shape=[columns, words, 4])


@gluon.constexpr_function
def _scales(columns, blocks):
  """Returns the layout of [columns, scales, words of a scale]."""
  return gl.DistributedLinearLayout(
      reg_bases=([[0, 0, 1], [0, 0, 2]] + [[0, b, 0] for b in _powers(blocks)]
                 + [[8, 0, 0]]),
      lane_bases=[[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
      warp_bases=[[16 * c, 0, 0] for c in _powers(columns // 16)],
      block_bases=[], shape=[columns, blocks, 4])


@gluon.constexpr_function
def _copied(columns, each, warps):
  """Returns the layout of rows of so many columns, 16 bytes a thread."""
  lanes = min(columns // each, 32)
  return gl.BlockedLayout([1, each], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def _swizzled(words):
  """Returns the layout of rows of so many words in shared memory."""
  return gl.SwizzledSharedLayout(4, max(32 // words, 1), min(words // 4, 8),
                                 [1, 0])


@gluon.constexpr_function
def _stored(columns, warps):
  """Returns the layout of a transposed part that is stored, 8 a thread."""
  lanes = min(columns // 8, 32)
  return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def _unpack(words, scale, BLOCKS: gl.constexpr, ACC: gl.constexpr):
  """uint32 [columns, words] times scales [columns, BLOCKS] -> bfloat16."""
  COLUMNS: gl.constexpr = words.shape[0]
  WORDS: gl.constexpr = words.shape[1]
  PAIRS: gl.constexpr = _pairs(COLUMNS, WORDS)
  scale = scale.to(gl.uint32)
  # 2^-127 is a subnormal number of bfloat16; 255 is NaN.
  bits = gl.where(scale == 0, 0x40, scale << 7)
  bits = gl.where(scale == 255, 0x7FC0, bits) * 0x10001
  bits = gl.expand_dims(bits, 2)
  bits, _ = gl.broadcast(
      bits, gl.zeros([COLUMNS, BLOCKS, 4], gl.uint32, _scales(COLUMNS, BLOCKS)))
  bits = gl.convert_layout(bits.reshape([COLUMNS, WORDS]), words.type.layout)
  pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))
  # The byte of the word in the upper half, of the word * 16 in the lower one.
  pair = pair[None, None, :] * 0x1111 + 0x0044
  # Both numbers then lie at the top of their halves. In the places of bfloat16
  # the exponent is 2^126 too low, subnormals included.
  x = gl.inline_asm_elementwise(
      """{
      .reg .b32 u, q, s;
      shl.b32 u, $1, 4;
      prmt.b32 q, $1, u, $2;
      shr.u32 s, q, 6;
      and.b32 q, q, 0x80008000;
      lop3.b32 q, s, 0x01C001C0, q, 0xEA;
      mul.rn.bf16x2 q, q, $4;
      mul.rn.bf16x2 $0, q, $3;
      }""", "=r,r,r,r,r",
      [gl.expand_dims(words, 2), pair, gl.expand_dims(bits, 2), 0x7E807E80],
      dtype=gl.uint32, is_pure=True, pack=1)
  low = x.to(gl.uint16).to(gl.bfloat16, bitcast=True)
  high = (x >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
  x = gl.join(low, high).reshape([COLUMNS, 8 * WORDS])
  return gl.convert_layout(x, gl.DotOperandLayout(0, ACC, 2))


@gluon.jit
def _copy(slabs, at, s, k, STAGES: gl.constexpr):
  """Copies slab s of a and of b's words; what is past k becomes 0."""
  a_smem, b_smem = slabs
  a, a_offsets, a_cols, b, b_offsets, b_cols = at
  TILE_K: gl.constexpr = a_smem.shape[2]
  left = k - s * TILE_K
  i = s % STAGES
  async_copy.async_load(a_smem.index(i), a + s * TILE_K + a_offsets,
                        mask=(a_cols < left // 32 * 32)[None, :])
  async_copy.async_load(b_smem.index(i), b + s * (TILE_K // 8) + b_offsets,
                        mask=(b_cols < left // 32 * 4)[None, :])
  async_copy.commit_group()


@gluon.jit
def _load_scales(at, s, k, BLOCKS: gl.constexpr):
  """The scales of slab s; what is past k has 0 for numbers."""
  b_scale, offsets, blocks = at
  return gl.load(b_scale + s * BLOCKS + offsets,
                 mask=(blocks < k // 32 - s * BLOCKS)[None, :], other=0)


@gluon.jit
def _store_part(ptr, x, row0, col0, row_end, n, STORED: gl.constexpr):
  """Stores the transpose of x."""
  x = gl.convert_layout(x, STORED)
  rows = row0 + gl.arange(0, x.shape[1], gl.SliceLayout(0, STORED))
  cols = col0 + gl.arange(0, x.shape[0], gl.SliceLayout(1, STORED))
  n = n // 32 * 32
  at = cols[:, None] + rows[None, :].to(gl.int64) * n
  gl.store(ptr + at, x, mask=(cols < n)[:, None] & (rows < row_end)[None, :])


@gluon.jit
def _store(acc, out_bf16, out_f32, row0, col0, row_end, n, flags,
           WARPS: gl.constexpr):
  """Stores columns of the result by rows."""
  STORED: gl.constexpr = _stored(acc.shape[0], WARPS)
  if (flags & gmm.OUT_F32) != 0:
    _store_part(out_f32, acc, row0, col0, row_end, n, STORED)
  else:
    _store_part(out_bf16, acc.to(gl.bfloat16), row0, col0, row_end, n, STORED)


@gluon.jit
def gmm_mx(
    a, b_packed, a_scale_e8m0, b_scale_e8m0, plan, out_bf16, out_f32, n, k,
    flags, TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):
  """gmm.gmm_mx of a in bfloat16."""
  WARPS: gl.constexpr = gl.num_warps()
  BLOCKS: gl.constexpr = TILE_K // 32
  WORDS: gl.constexpr = TILE_K // 8
  ACC: gl.constexpr = _accumulator(TILE_M, TILE_N)
  ROWS: gl.constexpr = _copied(TILE_K, 8, WARPS)
  PACKED: gl.constexpr = _copied(WORDS, 4, WARPS)
  READ: gl.constexpr = gl.SliceLayout(2, _pairs(TILE_N, WORDS))
  SCALES: gl.constexpr = gl.SliceLayout(2, _scales(TILE_N, BLOCKS))
  gl.static_assert(TILE_N == 16 * WARPS)
  tiles = gl.load(plan)
  tiles_n = (n + TILE_N - 1) // TILE_N
  if gl.program_id(0) < tiles * tiles_n:
    slot, tile_n = gemm.tile_at(gl.program_id(0), tiles, tiles_n, GROUP_M)
    at = plan + 4 * (slot + 1)
    group, first, end = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    n0 = tile_n * TILE_N
    row = gl.maximum(group, 0).to(gl.int64) * n + n0
    # So written, the compiler knows what divides them.
    stride_a = k // 32 * 32
    stride_b = k // 32 * 4
    r = gl.arange(0, TILE_M, gl.SliceLayout(1, ROWS))
    c = gl.arange(0, TILE_N, gl.SliceLayout(1, PACKED))
    a_cols = gl.arange(0, TILE_K, gl.SliceLayout(0, ROWS))
    b_cols = gl.arange(0, WORDS, gl.SliceLayout(0, PACKED))
    # Rows past those of a tile are read again as its first one.
    r = gl.where(r < end - first, r, 0)
    c = gl.where(c < n - n0, c, 0)
    words = b_packed.to(gl.pointer_type(gl.uint32), bitcast=True)
    at = (a + first.to(gl.int64) * stride_a,
          r[:, None] * stride_a + a_cols[None, :], a_cols,
          words + row * stride_b, c[:, None] * stride_b + b_cols[None, :],
          b_cols)
    c = gl.arange(0, TILE_N, gl.SliceLayout(1, SCALES))
    c = gl.where(c < n - n0, c, 0)
    blocks = gl.arange(0, BLOCKS, gl.SliceLayout(0, SCALES))
    scales_at = (b_scale_e8m0 + row * (k // 32),
                 c[:, None] * (k // 32) + blocks[None, :], blocks)
    a_smem = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, TILE_M, TILE_K],
        gl.NVMMASharedLayout(128, 16, rank=2))
    b_smem = gl.allocate_shared_memory(
        gl.uint32, [STAGES, TILE_N, WORDS], _swizzled(WORDS))
    slabs = (a_smem, b_smem)
    summed = gl.where(group < 0, 0, k)
    steps = (summed + TILE_K - 1) // TILE_K
    acc = gl.zeros([TILE_N, TILE_M], gl.float32, ACC)
    if steps > 0:
      for s in gl.static_range(STAGES - 1):
        _copy(slabs, at, s, k, STAGES)
      scale = _load_scales(scales_at, 0, k, BLOCKS)
      async_copy.wait_group(STAGES - 2)
      fence_async_shared()
      gl.barrier()
      numbers = _unpack(b_smem.index(0).load(READ), scale, BLOCKS, ACC)
      scale = _load_scales(scales_at, 1, k, BLOCKS)
      for s in range(steps):
        a_slab = a_smem.index(s % STAGES).permute([1, 0])
        promise = warpgroup_mma(numbers, a_slab, acc, is_async=True)
        async_copy.wait_group(STAGES - 3)
        fence_async_shared()
        gl.barrier()
        # Nobody reads the slab before this one any more.
        _copy(slabs, at, s + STAGES - 1, k, STAGES)
        packed = b_smem.index((s + 1) % STAGES).load(READ)
        ahead = _unpack(packed, scale, BLOCKS, ACC)
        scale = _load_scales(scales_at, s + 2, k, BLOCKS)
        acc = warpgroup_mma_wait(0, deps=[promise])
        numbers = ahead
      async_copy.wait_group(0)
    _store(acc, out_bf16, out_f32, first, n0, end, n, flags, WARPS)
