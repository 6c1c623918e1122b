# SPDX-License-Identifier: Apache-2.0
"""bwd.py's gradients of head dimensions 64 and 128 for CDNA, in Gluon.

Both kernels keep two matrices x and y as operands in registers, and walk over
tiles of two others a and b:

  mha_bwd_dkdv   x = k, y = v     a = q, b = dout     dk = a^T ds, dv = b^T p
  mha_bwd_dq     x = q, y = dout  a = k, b = v        dq = a^T ds

p = exp(a x^T - lse) stands with the tile's rows along its own; so do a lane's
numbers of it lie as its operand of a^T ds. ds = p (dp - delta) begins as delta,
from which b y^T is taken: y is negative, and so is what is summed.

Of head dimension 128 a program of mha_bwd_dkdv has a compute unit for itself, a
wave its SIMD: sums and operands are 192 registers a lane. So a wave must hide
what it waits for: memory two tiles ahead, LDS by the compiler's order of a
tile's instructions. A head is in parts of 32 columns.

gfx950 copies tiles straight to LDS, and turns them as it reads. gfx942 brings
them by way of registers, and has them in LDS twice: as they are, and turned.

Of aligned heads. With KEEPS the pass of dk and dv stores -ds too, in 16 bits,
where dbias is: then dq is one product (mha_dscores/mfma.py). It alone has
FEATURES, what a lane needs of them in registers: it has one key, which a bias
of one row for all gives a number, and dropout's bits of all its rows, which it
gets from lanes that draw for eight keys each.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import (
    buffer_load,
    buffer_store,
    mfma,
)
from triton.experimental.gluon.language.amd.cdna4 import async_copy
from triton.experimental.gluon.language.amd.hint import sched_barrier

from third_party.aiter.kernels.mha import parts_mfma as parts
from third_party.aiter.kernels.mha import scores

# Of a tile that a program walks over, and as many columns a wave.
ROWS = gl.constexpr(32)
# Bytes of a tile's draws, of which a lane has 16 side by side: of its block of
# keys and half of the rows.
DRAWN = gl.constexpr([16, 2, 4, 4])
DRAWN_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))


class _Walk(NamedTuple):
  """The tiles that a program walks over: of each head of a group `steps`.

  All columns see the first `full` of them, parts.tile_at finds them by `edges`.
  The sequence has `length` rows, of which a column sees lower to upper.
  """
  edges: tl.tensor
  steps: tl.tensor
  full: tl.tensor
  group: tl.tensor
  length: tl.tensor
  lower: tl.tensor
  upper: tl.tensor


class _Terms(NamedTuple):
  """What makes a score of a product and weighs it, for the heads of a walk.

  plane is a bias or a mask from the program's first column on, of which there
  are `left`, that stand `key` from the first row; slopes and state are those of
  ALiBi and of dropout.
  """
  scale: tl.tensor
  logits_soft_cap: tl.tensor
  plane: tl.tensor
  stride_plane: tl.tensor
  nhead_stride_plane: tl.tensor
  left: tl.tensor
  key: tl.tensor
  slopes: tl.tensor
  state: tl.tensor
  first_block: tl.tensor
  drop_threshold: tl.tensor
  rp_keep: tl.tensor


@gluon.constexpr_function
def _drawn():
  """How four waves draw for 32 rows and 16 blocks of keys: a wave its own."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1]],
      lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [0, 2]],
      warp_bases=[[0, 4], [0, 8]], block_bases=[], shape=[32, 16])


@gluon.constexpr_function
def _copied():
  """How four waves copy two parts of a tile, 8 columns a lane."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1], [0, 2], [0, 4]],
      lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0], [8, 0]],
      warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 32])


@gluon.constexpr_function
def _loaded(head):
  """How four waves load a tile: a lane 4 neighbouring rows of 2 or 4 columns,
  8 lanes a row."""
  width = head // 32
  return gl.DistributedLinearLayout(
      reg_bases=[*[[0, 1], [0, 2]][:width // 2], [1, 0], [2, 0]],
      lane_bases=[*([0, width << i] for i in range(3)),
                  [4, 0], [8, 0], [16, 0]],
      warp_bases=[[0, 8 * width], [0, 16 * width]], block_bases=[],
      shape=[32, head])


@gluon.jit
def _following(head, step, walk):
  """Head and step after these: all heads' full tiles, then the others."""
  inside = step < walk.full
  wrap = (step + 1 == walk.full) | (step + 1 == walk.steps)
  head += wrap.to(gl.int32)
  step = gl.where(wrap, gl.where(inside, 0, walk.full), step + 1)
  last = head == walk.group
  head = gl.where(last, gl.where(inside, 0, walk.group - 1), head)
  step = gl.where(last, gl.where(inside, walk.full, walk.steps - 1), step)
  return head, step, parts.tile_at(step, walk.steps, walk.edges)


@gluon.jit
def _tile(data, at, head, tile, walk, CHECK: gl.constexpr):
  """A tile's first element, and where the others lie from there.

  CHECK: of rows behind the sequence's last one, where the tile's first one is.
  """
  ptr, stride, head_stride = data
  if CHECK:
    row = gl.arange(0, at.shape[0], gl.SliceLayout(1, at.type.layout)) % ROWS
    row = row[:, None]
    at = gl.where(row < walk.length - tile * ROWS, at, at - row * stride)
  return (ptr + head.to(gl.int64) * head_stride
          + (tile * ROWS).to(gl.int64) * stride), at


@gluon.jit
def _rows(numbers, head, tile, walk, CHECK: gl.constexpr):
  """lse and delta of a tile, and where their rows lie; each thread has one."""
  lse, delta, head_stride = numbers
  WAVES: gl.constexpr = gl.num_warps()
  row = gl.arange(0, 64 * WAVES, gl.BlockedLayout([1], [64], [WAVES], [0]))
  row = row % ROWS
  if CHECK:
    row = gl.minimum(row, walk.length - 1 - tile * ROWS)
  first = head.to(gl.int64) * head_stride + tile * ROWS
  return lse + first, delta + first, row


@gluon.jit
def _copy(data, at, smem, head, tile, walk, CHECK: gl.constexpr):
  """Begins to copy a tile's parts to LDS."""
  ptr, at = _tile(data, at, head, tile, walk, CHECK)
  for i in gl.static_range(smem.shape[0] // (2 * ROWS)):
    async_copy.buffer_load_to_shared(
        smem.slice(2 * i * ROWS, 2 * ROWS), ptr, at + 2 * i * parts.PART)


@gluon.jit
def _copy_rows(numbers, smem, slot, head, tile, walk, CHECK: gl.constexpr):
  """Begins to copy lse and delta of a tile's rows to LDS."""
  lse, delta, row = _rows(numbers, head, tile, walk, CHECK)
  async_copy.buffer_load_to_shared(smem.index(2 * slot), lse, row)
  async_copy.buffer_load_to_shared(smem.index(2 * slot + 1), delta, row)


@gluon.jit
def _load(data, at, head, tile, walk, CHECK: gl.constexpr):
  """Begins to load a tile."""
  ptr, at = _tile(data, at, head, tile, walk, CHECK)
  return buffer_load(ptr, at)


@gluon.jit
def _load_rows(numbers, head, tile, walk, CHECK: gl.constexpr):
  """Begins to load lse and delta of a tile's rows."""
  lse, delta, row = _rows(numbers, head, tile, walk, CHECK)
  return buffer_load(lse, row), buffer_load(delta, row)


@gluon.jit
def _store(smem, x):
  """A tile's parts, one behind the other."""
  x = x.reshape([ROWS, x.shape[1] // parts.PART, parts.PART])
  smem.store(x.permute([1, 0, 2]).reshape(smem.shape))


@gluon.jit
def _dead_rows(lse):
  """lse; +inf, which makes p zero, for rows without any key."""
  return gl.where(lse == float("-inf"), float("inf"), lse)


@gluon.jit
def _zeros(HEAD: gl.constexpr, COLS: gl.constexpr, S: gl.constexpr):
  """What sums [head, columns] begin with, in parts."""
  zeros = ()
  for _ in gl.static_range(HEAD // parts.PART):
    zeros = zeros + (gl.zeros([parts.PART, COLS], gl.float32, S),)
  return zeros


@gluon.jit
def _along(smem, COLS: gl.constexpr, S: gl.constexpr):
  """Numbers of rows, as a tile of scores."""
  x = async_copy.load_shared_relaxed(
      smem.slice(0, ROWS), gl.SliceLayout(1, S))[:, None]
  return gl.convert_layout(
      x.broadcast_to([ROWS, COLS]), S, assert_trivial=True)


@gluon.jit
def _numbers(numbers, slot, COLS: gl.constexpr, S: gl.constexpr,
             BOTH: gl.constexpr):
  """lse and delta as tiles of scores: of rows in LDS, or of columns."""
  if BOTH:
    return (_along(numbers.index(2 * slot), COLS, S),
            _along(numbers.index(2 * slot + 1), COLS, S))
  else:
    zero = gl.zeros([ROWS, COLS], gl.float32, S)
    return zero + numbers[0][None, :], zero + numbers[1][None, :]


@gluon.jit
def _product(smem, x, first, S: gl.constexpr):
  """first + tile x, of the tile's parts one behind the other.

  No wait but for the copy, which is one for all waves.
  """
  for i in gl.static_range(smem.shape[0] // ROWS):
    rows = async_copy.load_shared_relaxed(
        smem.slice(i * ROWS, ROWS), gl.DotOperandLayout(0, S, 8))
    first = mfma(rows, x[i], first)
  return first


@gluon.jit
def _turned(smem, i: gl.constexpr, S: gl.constexpr, TURNED: gl.constexpr):
  """A part's columns; a lane has 4 rows, as many as of p lie together."""
  if TURNED:
    part = smem.slice(i * parts.PART, parts.PART)
  else:
    part = smem.slice(i * ROWS, ROWS).permute([1, 0])
  return async_copy.load_shared_relaxed(part, gl.DotOperandLayout(0, S, 4))


@gluon.jit
def _add(sums, smem, p, TURNED: gl.constexpr):
  """sums + tile^T p, in parts; p in the lanes that have it."""
  S: gl.constexpr = p.type.layout
  p = gl.convert_layout(p, gl.DotOperandLayout(1, S, 4))
  total = ()
  for i in gl.static_range(len(sums)):
    total = total + (mfma(_turned(smem, i, S, TURNED), p, sums[i]),)
  return total


@gluon.jit
def _add_and_draw(b_sums, b_tile, p, a_sums, a_tile, ds, words, terms,
                  TURNED: gl.constexpr):
  """_add of both, and the next tile's _bits from its _counters.

  A lane draws while its products are under way, some rounds a part of them; of
  two parts another wave has the SIMD's other half, and registers are few.
  """
  S: gl.constexpr = p.type.layout
  PARTS: gl.constexpr = len(a_sums)
  p = gl.convert_layout(p, gl.DotOperandLayout(1, S, 4))
  ds = gl.convert_layout(ds, gl.DotOperandLayout(1, S, 4))
  b_total = ()
  a_total = ()
  turned = _turned(b_tile, 0, S, TURNED)
  bits = 0
  for i in gl.static_range(2 * PARTS):
    after = turned
    if i + 1 < PARTS:
      after = _turned(b_tile, i + 1, S, TURNED)
    elif i + 1 < 2 * PARTS:
      after = _turned(a_tile, i + 1 - PARTS, S, TURNED)
    if i < PARTS:
      b_total = b_total + (mfma(turned, p, b_sums[i]),)
    else:
      a_total = a_total + (mfma(turned, ds, a_sums[i - PARTS]),)
    if i + 1 < 2 * PARTS:
      words = parts.philox(
          words, 10 * (i + 1) // (2 * PARTS - 1) - 10 * i // (2 * PARTS - 1))
    else:
      bits = _bits(terms, words)
    turned = after
    if PARTS > 2:
      sched_barrier()
  return b_total, a_total, bits


@gluon.jit
def _keep(kept, ds, head, tile):
  """Stores gradients in the order in which mha_dscores/mfma.py has them."""
  ptr, stride, head_stride = kept
  COLS: gl.constexpr = ds.shape[1]
  # Rows are 8 a + 4 b + c, columns 32 d + 16 e + 4 f + 2 g + h.
  ds = ds.reshape([ROWS // 8, 2, 4, COLS // 32, 2, 4, 2, 2])
  ds = ds.permute([3, 0, 4, 6, 5, 1, 7, 2]).reshape([ROWS * COLS])
  buffer_store(
      ds, ptr + head.to(gl.int64) * head_stride + tile.to(gl.int64) * stride,
      gl.arange(0, ROWS * COLS, ds.type.layout))


@gluon.jit
def _load_plane(terms, head, tile, walk, COLS: gl.constexpr, S: gl.constexpr,
                CHECK: gl.constexpr, FEATURES: gl.constexpr):
  """Begins to load a bias of columns, or a bias or mask of a tile."""
  own = 0.0
  if FEATURES & scores.HIDES:
    ptr = terms.plane + head.to(gl.int64) * terms.nhead_stride_plane
    col = gl.arange(0, COLS, gl.SliceLayout(0, S))
    if FEATURES & scores.ONE_ROW:
      own = buffer_load(ptr, col, mask=col < terms.left, other=float("-inf"))
    else:
      row = gl.arange(0, ROWS, gl.SliceLayout(1, S))
      if CHECK:
        row = gl.minimum(row, walk.length - 1 - tile * ROWS)
      at = (row[:, None] * terms.stride_plane
            + gl.minimum(col, terms.left - 1)[None, :])
      own = buffer_load(
          ptr + (tile * ROWS).to(gl.int64) * terms.stride_plane, at)
      if FEATURES & scores.HAS_BIAS:
        # A register each, on its way through the loop.
        own = own.to(gl.int16, bitcast=True).to(gl.int32)
  return own


@gluon.jit
def _rows_apart(tile, key, S: gl.constexpr):
  """How far a tile's rows are from keys, [4, 2, 4, columns].

  What a lane adds to a number of its own is a constant of the instruction.
  """
  L: gl.constexpr = gl.zeros(
      [ROWS, key.shape[0]], gl.float32, S).reshape(
          [4, 2, 4, key.shape[0]]).type.layout
  a = gl.arange(0, 4, parts.vector(L, 0))
  b = gl.arange(0, 2, parts.vector(L, 1))
  c = gl.arange(0, 4, parts.vector(L, 2))
  first = gl.convert_layout(
      tile * ROWS - key, parts.vector(L, 3), assert_trivial=True)
  first = first[None, None, None, :] + 4 * b[None, :, None, None]
  at = 8 * a[:, None, None, None] + c[None, None, :, None]
  return first.to(gl.float32) + at.to(gl.float32)


@gluon.jit
def _probabilities(s, l, tile, terms, own, dtype: gl.constexpr,
                   FEATURES: gl.constexpr):
  """p of products and the rows' lse, and the soft cap's derivative."""
  S: gl.constexpr = s.type.layout
  if FEATURES & scores.ONE_ROW:
    s = gl.fma(s, terms.scale * scores.LOG2E,
               gl.fma(l, -scores.LOG2E, (own * scores.LOG2E)[None, :]))
    # Of rows without any key, and of keys that hold NaN, this is NaN, and the
    # lower bound then. Above 1 it is where all biases of a row are huge, and
    # lse has lost what it adds to them.
    return gl.exp2(gl.minimum(gl.maximum(s, -1e4), 0.0)), 1.0
  elif FEATURES & scores.HAS_BIAS:
    bias = own.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    s = gl.fma(s, terms.scale * scores.LOG2E,
               gl.fma(l, -scores.LOG2E, bias * scores.LOG2E))
    return gl.exp2(gl.minimum(gl.maximum(s, -1e4), 0.0)), 1.0
  elif FEATURES & scores.ALIBI:
    apart = _rows_apart(tile, terms.key, S)
    slope = gl.convert_layout(
        own * -scores.LOG2E, parts.vector(apart.type.layout, 3),
        assert_trivial=True)[None, None, None, :]
    s = gl.fma(s, terms.scale * scores.LOG2E, l * -scores.LOG2E)
    wide = gl.fma(gl.abs(apart), slope, s.reshape(apart.shape))
    return gl.exp2(gl.convert_layout(
        wide.reshape(s.shape), S, assert_trivial=True)), 1.0
  elif FEATURES & scores.SOFT_CAP:
    s, slope = parts.capped(s, terms, FEATURES)
    return gl.exp2(gl.fma(l, -scores.LOG2E, s)), slope
  else:
    return gl.exp2((s * terms.scale - l) * scores.LOG2E), 1.0


@gluon.jit
def _state(terms, head, COLS: gl.constexpr, S: gl.constexpr,
           FEATURES: gl.constexpr):
  """Begins to load dropout's key and counters of a head, or its slope."""
  state = ()
  if FEATURES & scores.DROPOUT:
    for i in gl.static_range(6):
      state = state + (gl.load(terms.state + (head * 6 + i)),)
  elif FEATURES & scores.ALIBI:
    zero = gl.zeros([COLS], gl.int32, gl.SliceLayout(0, S))
    state = state + (buffer_load(terms.slopes + head, zero),)
  return state


@gluon.jit
def _counters(terms, state, tile):
  """Where the draws of a tile begin, each block of eight keys once, as
  scores.keep_scale has it."""
  D: gl.constexpr = _drawn()
  block = gl.arange(0, 16, gl.SliceLayout(0, D))[None, :]
  row = gl.arange(0, ROWS, gl.SliceLayout(1, D))[:, None]
  zero = (block * 0 + row * 0).to(gl.uint32)
  return (zero + (state[5] // 8 + terms.first_block + block.to(gl.uint32)),
          zero + (state[4] + (tile * ROWS + row).to(gl.uint32)),
          zero + state[3], zero + state[2], state[0], state[1])


@gluon.jit
def _bits(terms, words):
  """What dropout keeps: of each row and eight keys a bit a key."""
  least = terms.drop_threshold.to(gl.uint32, bitcast=True)
  bits = words[0].to(gl.int32) * 0
  for i in gl.static_range(4):
    bits = bits | gl.where(words[i] << 16 >= least, 1 << i, 0) | gl.where(
        words[i] >= least, 16 << i, 0)
  return bits.to(gl.int8)


@gluon.jit
def _draw(terms, state, tile):
  """_bits of a tile."""
  return _bits(terms, parts.philox(_counters(terms, state, tile), 10))


@gluon.jit
def _store_drawn(smem, bits):
  """Bytes of a lane's rows one behind the other, as `_factors` reads them."""
  smem.permute([2, 1, 3, 0]).store(bits.reshape([4, 2, 4, 16]))


@gluon.jit
def _factors(smem, S: gl.constexpr):
  """A tile of 1.0 where dropout keeps and of 0.0 where it drops."""
  L: gl.constexpr = gl.zeros(
      [ROWS, 4 * ROWS], gl.float32, S).reshape([4, 2, 4, 16, 8]).type.layout
  words = smem.reinterpret(
      gl.int32, [16, 2, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
  words = async_copy.load_shared_relaxed(
      words.permute([2, 1, 0]), gl.SliceLayout(2, gl.SliceLayout(4, L)))
  key = gl.arange(0, 8, parts.vector(L, 4))
  row = gl.arange(0, 4, parts.vector(L, 2))
  kept = (words[:, :, None, :, None] >> key[None, None, None, None, :]
          ) & 0x01010101
  kept = (kept >> 8 * row[None, None, :, None, None]) & 0xff
  return gl.convert_layout(
      kept.to(gl.uint32).to(gl.float32).reshape([ROWS, 4 * ROWS]), S,
      assert_trivial=True)


@gluon.jit
def _weights(a, b, x, y, l, d, tile, walk, terms, own, drawn,
             CHECK: gl.constexpr, FEATURES: gl.constexpr):
  """p and -ds of a tile. CHECK: columns may not see all of its rows.

  With dropout p is as the values see it, but for 1 / (1 - p).
  """
  S: gl.constexpr = l.type.layout
  dtype: gl.constexpr = a.dtype
  s = _product(a, x, gl.zeros_like(l), S)
  if CHECK:
    row = gl.arange(0, ROWS, gl.SliceLayout(1, S))[:, None] + tile * ROWS
    shown = (row >= walk.lower[None, :]) & (row <= walk.upper[None, :])
    # A tile that all columns see has no row without any key.
    l = gl.where(shown, _dead_rows(l), float("inf"))
  if FEATURES & scores.DROPOUT:
    factor = _factors(drawn, S)
    dp = _product(b, y, gl.zeros_like(d), S) * factor
    dp = gl.fma(dp, terms.rp_keep, d)
    p, slope = _probabilities(s, l, tile, terms, own, dtype, FEATURES)
    ds = p * dp
    p = p * factor
  else:
    dp = _product(b, y, d, S)
    p, slope = _probabilities(s, l, tile, terms, own, dtype, FEATURES)
    ds = p * dp
  if FEATURES & scores.SOFT_CAP:
    ds = ds * slope
  if FEATURES & scores.ONE_ROW:
    # A hidden key has no gradient, whatever it and its value hold.
    ds = gl.where(own[None, :] == float("-inf"), 0.0, ds)
  elif FEATURES & scores.HAS_BIAS:
    bias = own.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    ds = gl.where(bias == float("-inf"), 0.0, ds)
  elif FEATURES & scores.HAS_MASK:
    p = gl.where(own != 0, p, 0.0)
    ds = gl.where(own != 0, ds, 0.0)
  return p, ds


@gluon.jit
def _sums_copied(
    sums, x, y, a, b, numbers, kept, walk, terms, BOTH: gl.constexpr,
    KEEPS: gl.constexpr, FEATURES: gl.constexpr, S: gl.constexpr
):
  """_sums of tiles that are copied straight to LDS.

  A lane copies 8 columns from where a swizzle of LDS would have them: LDS is
  written in order, and read without conflicts, row by row and turned.
  """
  dtype: gl.constexpr = a[0].dtype.element_ty
  COLS: gl.constexpr = sums[0][0].shape[1]
  PARTS: gl.constexpr = len(sums[0])
  READ: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 4, [1, 0])
  T: gl.constexpr = _copied()
  row = gl.arange(0, 2 * ROWS, gl.SliceLayout(1, T))[:, None]
  col = gl.arange(0, parts.PART, gl.SliceLayout(0, T))[None, :]
  col = (col // 8 ^ row // 4 % 4) * 8 + col % 8 + row // ROWS * parts.PART
  a_at = row % ROWS * a[1] + col
  b_at = row % ROWS * b[1] + col
  a_at = gl.max_contiguous(gl.multiple_of(a_at, [1, 8]), [1, 8])
  b_at = gl.max_contiguous(gl.multiple_of(b_at, [1, 8]), [1, 8])
  WRITTEN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
  a_tiles = gl.allocate_shared_memory(
      dtype, [3, PARTS * ROWS, parts.PART], WRITTEN)
  b_tiles = gl.allocate_shared_memory(
      dtype, [3, PARTS * ROWS, parts.PART], WRITTEN)
  own = numbers
  if BOTH:
    own = gl.allocate_shared_memory(
        gl.float32, [2 * 3, 64 * gl.num_warps()],
        gl.SwizzledSharedLayout(1, 1, 1, [0]))
  head = gl.to_tensor(0)
  step = gl.to_tensor(0)
  tile = parts.tile_at(step, walk.steps, walk.edges)
  following = tile
  for i in gl.static_range(2):
    if i > 0:
      head, step, following = _following(head, step, walk)
    _copy(a, a_at, a_tiles.index(i), head, following, walk, True)
    _copy(b, b_at, b_tiles.index(i), head, following, walk, True)
    if BOTH:
      _copy_rows(numbers, own, i, head, following, walk, True)
    async_copy.commit_group()
  at_head = gl.to_tensor(0)
  following_head = head
  plane = _load_plane(terms, at_head, tile, walk, COLS, S, True, FEATURES)
  drawn = plane
  if FEATURES & scores.DROPOUT:
    drawn = gl.allocate_shared_memory(gl.int8, DRAWN, DRAWN_LAYOUT)
    _store_drawn(drawn, _draw(
        terms, _state(terms, at_head, COLS, S, FEATURES), tile))
  elif FEATURES & scores.ALIBI:
    plane = _state(terms, at_head, COLS, S, FEATURES)[0]
  state = _state(terms, following_head, COLS, S, FEATURES)
  slot = 0
  a_sums, b_sums = sums
  inside = gl.maximum(walk.group * walk.full - 2, 0)
  for part in gl.static_range(2):
    for _ in range(
        0, inside if part == 0 else walk.group * walk.steps - inside):
      head, step, after = _following(head, step, walk)
      # The next step's copies may be under way, this one's are there.
      async_copy.wait_group(1)
      free = gl.where(slot == 0, 2, slot - 1)
      _copy(a, a_at, a_tiles.index(free), head, after, walk, part == 1)
      _copy(b, b_at, b_tiles.index(free), head, after, walk, part == 1)
      if BOTH:
        _copy_rows(numbers, own, free, head, after, walk, part == 1)
      async_copy.commit_group()
      plane_next = _load_plane(
          terms, following_head, following, walk, COLS, S, part == 1, FEATURES)
      state_after = _state(terms, head, COLS, S, FEATURES)
      a_tile = a_tiles.index(slot).reinterpret(layout=READ)
      b_tile = b_tiles.index(slot).reinterpret(layout=READ)
      l, d = _numbers(own, slot, COLS, S, BOTH)
      p, ds = _weights(
          a_tile, b_tile, x, y, l, d, tile, walk, terms, plane, drawn,
          part == 1, FEATURES)
      ds = ds.to(dtype)
      if FEATURES & scores.DROPOUT:
        b_sums, a_sums, bits = _add_and_draw(
            b_sums, b_tile, p.to(dtype), a_sums, a_tile, ds,
            _counters(terms, state, following), terms, False)
        _store_drawn(drawn, bits)
      else:
        if BOTH:
          b_sums = _add(b_sums, b_tile, p.to(dtype), False)
        a_sums = _add(a_sums, a_tile, ds, False)
      if KEEPS:
        _keep(kept, ds, at_head, tile)
      plane = plane_next
      if FEATURES & scores.ALIBI:
        plane = state[0]
      state = state_after
      at_head = following_head
      following_head = head
      tile = following
      following = after
      slot = gl.where(slot == 2, 0, slot + 1)
  async_copy.wait_group(0)
  return a_sums, b_sums


@gluon.jit
def _sums_loaded(
    sums, x, y, a, b, numbers, kept, walk, terms, CHEAP_CAST: gl.constexpr,
    BOTH: gl.constexpr, KEEPS: gl.constexpr, FEATURES: gl.constexpr,
    S: gl.constexpr
):
  """_sums of tiles that come to LDS by way of registers."""
  # Where two waves share a SIMD there are no registers for a second tile.
  AHEAD: gl.constexpr = 2 if BOTH else 1
  dtype: gl.constexpr = a[0].dtype.element_ty
  COLS: gl.constexpr = sums[0][0].shape[1]
  PARTS: gl.constexpr = len(sums[0])
  HEAD: gl.constexpr = PARTS * parts.PART
  T: gl.constexpr = _loaded(HEAD)
  row = gl.arange(0, ROWS, gl.SliceLayout(1, T))[:, None]
  col = gl.arange(0, HEAD, gl.SliceLayout(0, T))[None, :]
  a_at = row * a[1] + col
  b_at = row * b[1] + col
  READ: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
  # Columns of 4 rows in 8 bytes.
  TURNED: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 8, [1, 0])
  a_rows = gl.allocate_shared_memory(dtype, [PARTS * ROWS, parts.PART], READ)
  b_rows = gl.allocate_shared_memory(dtype, [PARTS * ROWS, parts.PART], READ)
  a_turned = gl.allocate_shared_memory(dtype, [HEAD, ROWS], TURNED)
  own = numbers
  if BOTH:
    b_turned = gl.allocate_shared_memory(dtype, [HEAD, ROWS], TURNED)
    own = gl.allocate_shared_memory(
        gl.float32, [2, 64 * gl.num_warps()],
        gl.SwizzledSharedLayout(1, 1, 1, [0]))
  head = gl.to_tensor(0)
  step = gl.to_tensor(0)
  tile = parts.tile_at(step, walk.steps, walk.edges)
  a_next = _load(a, a_at, head, tile, walk, True)
  b_next = _load(b, b_at, head, tile, walk, True)
  _store(a_rows, a_next)
  _store(b_rows, b_next)
  a_turned.store(a_next.permute([1, 0]))
  if BOTH:
    b_turned.store(b_next.permute([1, 0]))
    l_next, d_next = _load_rows(numbers, head, tile, walk, True)
    own.index(0).store(l_next)
    own.index(1).store(d_next)
  following = tile
  if AHEAD == 2:
    head, step, following = _following(head, step, walk)
    # First: to wait for what is last is to wait for a step's stores as well.
    l_next, d_next = _load_rows(numbers, head, following, walk, True)
    a_next = _load(a, a_at, head, following, walk, True)
    b_next = _load(b, b_at, head, following, walk, True)
  at_head = gl.to_tensor(0)
  following_head = head
  plane = _load_plane(terms, at_head, tile, walk, COLS, S, True, FEATURES)
  drawn = plane
  if FEATURES & scores.DROPOUT:
    drawn = gl.allocate_shared_memory(gl.int8, DRAWN, DRAWN_LAYOUT)
    _store_drawn(drawn, _draw(
        terms, _state(terms, at_head, COLS, S, FEATURES), tile))
  elif FEATURES & scores.ALIBI:
    plane = _state(terms, at_head, COLS, S, FEATURES)[0]
  state = _state(terms, following_head, COLS, S, FEATURES)
  a_sums, b_sums = sums
  inside = gl.maximum(walk.group * walk.full - AHEAD, 0)
  for part in gl.static_range(2):
    for _ in range(
        0, inside if part == 0 else walk.group * walk.steps - inside):
      head, step, after = _following(head, step, walk)
      plane_next = _load_plane(
          terms, following_head, following, walk, COLS, S, part == 1, FEATURES)
      state_after = _state(terms, head, COLS, S, FEATURES)
      if BOTH:
        l_after, d_after = _load_rows(numbers, head, after, walk, part == 1)
      a_after = _load(a, a_at, head, after, walk, part == 1)
      b_after = _load(b, b_at, head, after, walk, part == 1)
      if not BOTH:
        a_next, b_next = a_after, b_after
      l, d = _numbers(own, 0, COLS, S, BOTH)
      p, ds = _weights(
          a_rows, b_rows, x, y, l, d, tile, walk, terms, plane, drawn,
          part == 1, FEATURES)
      _store(a_rows, a_next)
      _store(b_rows, b_next)
      ds = parts.cast(ds, dtype, CHEAP_CAST)
      if BOTH:
        own.index(0).store(l_next)
        own.index(1).store(d_next)
        p = parts.cast(p, dtype, CHEAP_CAST)
      if FEATURES & scores.DROPOUT:
        b_sums, a_sums, bits = _add_and_draw(
            b_sums, b_turned, p, a_sums, a_turned, ds,
            _counters(terms, state, following), terms, True)
      else:
        if BOTH:
          b_sums = _add(b_sums, b_turned, p, True)
        a_sums = _add(a_sums, a_turned, ds, True)
      if KEEPS:
        _keep(kept, ds, at_head, tile)
      plane = plane_next
      if FEATURES & scores.ALIBI:
        plane = state[0]
      state = state_after
      at_head = following_head
      following_head = head
      if FEATURES & scores.DROPOUT:
        _store_drawn(drawn, bits)
      a_turned.store(a_next.permute([1, 0]))
      if BOTH:
        b_turned.store(b_next.permute([1, 0]))
        a_next, b_next, l_next, d_next = a_after, b_after, l_after, d_after
      tile = following if AHEAD == 2 else after
      following = after
  return a_sums, b_sums


@gluon.jit
def _sums(
    x, y, a, b, numbers, kept, walk, terms, CHEAP_CAST: gl.constexpr,
    BOTH: gl.constexpr, KEEPS: gl.constexpr, FEATURES: gl.constexpr,
    CDNA: gl.constexpr, S: gl.constexpr
):
  """(-a^T ds, b^T p) of all tiles, [head, columns] in parts.

  BOTH: numbers are those of the tiles' rows, (lse, delta, a head's stride).
  Otherwise they are those of columns, and b^T p is zero.
  """
  negative = ()
  for i in gl.static_range(len(y)):
    negative = negative + (-y[i],)
  zeros = _zeros(len(x) * parts.PART, x[0].shape[1], S)
  if CDNA == 4:
    return _sums_copied(
        (zeros, zeros), x, negative, a, b, numbers, kept, walk, terms, BOTH,
        KEEPS, FEATURES, S)
  else:
    return _sums_loaded(
        (zeros, zeros), x, negative, a, b, numbers, kept, walk, terms,
        CHEAP_CAST, BOTH, KEEPS, FEATURES, S)


@gluon.jit
def _write(ptr, stride, sums, factor, live, rows):
  """Columns of sums, in parts, as rows of memory; behind `live` zeros."""
  S: gl.constexpr = sums[0].type.layout
  r = gl.arange(0, sums[0].shape[1], gl.SliceLayout(0, S))[None, :]
  x = ()
  for i in gl.static_range(len(sums)):
    y = gl.where(r < live, sums[i] * factor, 0.0)
    x = x + (y.to(ptr.dtype.element_ty),)
  parts.write(ptr, stride, x, rows)


@gluon.jit
def mha_bwd_dkdv(
    q, k, v, do, lse, delta, dq, dk, dv, dbias, d_slopes,
    bias, bias_f32, mask, alibi_slopes, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    stride_dbias, nhead_stride_dbias, batch_stride_dbias,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    bias_batch, bias_nhead,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    CHEAP_CAST: gl.constexpr, CDNA: gl.constexpr, KEEPS: gl.constexpr,
    FEATURES: gl.constexpr,
):
  """As bwd.py's. Grid: (kv heads, tiles of keys, batch)."""
  gl.static_assert(
      TILE_M == ROWS and TILE_N == 4 * ROWS and gl.num_warps() == 4)
  head_k = gl.program_id(0)
  tile_n = gl.program_id(1)
  index = gl.program_id(2)
  b = index.to(gl.int64)
  if flags & scores.PACKED:
    index, tile_n = parts.find_sequence(tile_n, cu_seqlens_k, batch, TILE_N)
    b = gl.to_tensor(0).to(gl.int64)
  q_start, len_q = parts.extent(
      index, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      scores.CU_SEQLENS_Q, scores.CU_SEQLENS_Q_PADDED)
  k_start, len_k = parts.extent(
      index, cu_seqlens_k, cu_seqlens_k_padded, seqlen_k, flags,
      scores.CU_SEQLENS_K, scores.CU_SEQLENS_K_PADDED)
  k_rows = seqlen_k
  if flags & scores.PACKED:
    k_rows = len_k
  if (min_seqlen_q > 0) & (len_q <= min_seqlen_q):
    len_q = 0
  n0 = tile_n * TILE_N
  if n0 >= k_rows:
    return
  parts.assume_stride(stride_q)
  parts.assume_stride(stride_k)
  parts.assume_stride(stride_v)
  parts.assume_stride(stride_do)
  parts.assume_stride(stride_dk)
  parts.assume_stride(stride_dv)
  h = head_k.to(gl.int64)
  row = (k_start + n0).to(gl.int64)
  group = nhead_q // nhead_k
  k += b * batch_stride_k + row * stride_k + h * nhead_stride_k
  v += b * batch_stride_v + row * stride_v + h * nhead_stride_v
  dk += b * batch_stride_dk + row * stride_dk + h * nhead_stride_dk
  dv += b * batch_stride_dv + row * stride_dv + h * nhead_stride_dv
  start = q_start.to(gl.int64)
  q += b * batch_stride_q + start * stride_q + h * group * nhead_stride_q
  do += b * batch_stride_do + start * stride_do + h * group * nhead_stride_do
  lse_at = b * batch_stride_lse + start + h * group * nhead_stride_lse
  if KEEPS:
    dbias += (b * batch_stride_dbias + h * group * nhead_stride_dbias
              + n0.to(gl.int64) * ROWS)

  seq = scores.Sequence(q_start, seqlen_q, len_q, k_start, k_rows, len_k)
  window = scores.Window(
      parts.offset_of(seq, flags), window_left, window_right, sink_tokens)
  low, full_low, full_high, high = parts.row_tiles(
      n0, gl.minimum(n0 + TILE_N, len_k), seq, window, TILE_M, 0)
  S: gl.constexpr = parts.matrix(CDNA, gl.num_warps())
  dk_sum = _zeros(HEAD, TILE_N, S)
  dv_sum = dk_sum
  if high > low:
    left = len_k - n0
    key = gl.arange(0, TILE_N, gl.SliceLayout(0, S)) + (n0 - window.offset)
    walk = _Walk(
        (low, full_low, full_high), high - low, full_high - full_low, group,
        len_q, key - window_right,
        gl.minimum(key + window_left, len_q - 1))
    plane = bias
    stride_plane = stride_bias
    nhead_stride_plane = nhead_stride_bias
    batch_stride_plane = batch_stride_bias
    if FEATURES & scores.ONE_ROW:
      plane = bias_f32
    elif FEATURES & scores.HAS_MASK:
      plane = mask
      stride_plane = stride_mask
      nhead_stride_plane = nhead_stride_mask
      batch_stride_plane = batch_stride_mask
    terms = _Terms(
        softmax_scale, logits_soft_cap,
        plane + b * batch_stride_plane + h * group * nhead_stride_plane + n0,
        stride_plane, nhead_stride_plane, left, key,
        alibi_slopes + index * nhead_q + head_k * group,
        dropout_state + (index * nhead_q + head_k * group) * 6,
        (n0 // 8).to(gl.uint32), drop_threshold, rp_keep)
    dk_sum, dv_sum = _sums(
        parts.columns(k, stride_k, left, HEAD, S),
        parts.columns(v, stride_v, left, HEAD, S),
        (q, stride_q, nhead_stride_q), (do, stride_do, nhead_stride_do),
        (lse + lse_at, delta + lse_at, nhead_stride_lse),
        (dbias, stride_dbias * ROWS, nhead_stride_dbias), walk, terms,
        CHEAP_CAST, True, KEEPS, FEATURES, CDNA, S)
  _write(dk, stride_dk, dk_sum, -softmax_scale, len_k - n0, k_rows - n0)
  factor = 1.0
  if FEATURES & scores.DROPOUT:
    factor = rp_keep
  _write(dv, stride_dv, dv_sum, factor, len_k - n0, k_rows - n0)


@gluon.jit
def mha_bwd_dq(
    q, k, v, do, lse, delta, dq, dk, dv, dbias, d_slopes,
    bias, bias_f32, mask, alibi_slopes, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_do, nhead_stride_do, batch_stride_do,
    stride_dq, nhead_stride_dq, batch_stride_dq,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    stride_dbias, nhead_stride_dbias, batch_stride_dbias,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    bias_batch, bias_nhead,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    CHEAP_CAST: gl.constexpr, CDNA: gl.constexpr,
):
  """As bwd.py's. Grid: (heads, tiles of rows, batch)."""
  gl.static_assert(
      TILE_N == ROWS and TILE_M == 4 * ROWS and gl.num_warps() == 4)
  head = gl.program_id(0)
  # Last rows first: under a causal mask they have the most to do.
  tile_m = gl.num_programs(1) - 1 - gl.program_id(1)
  index = gl.program_id(2)
  b = index.to(gl.int64)
  if flags & scores.PACKED:
    index, tile_m = parts.find_sequence(tile_m, cu_seqlens_q, batch, TILE_M)
    b = gl.to_tensor(0).to(gl.int64)
  q_start, len_q = parts.extent(
      index, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      scores.CU_SEQLENS_Q, scores.CU_SEQLENS_Q_PADDED)
  k_start, len_k = parts.extent(
      index, cu_seqlens_k, cu_seqlens_k_padded, seqlen_k, flags,
      scores.CU_SEQLENS_K, scores.CU_SEQLENS_K_PADDED)
  q_rows = seqlen_q
  if flags & scores.PACKED:
    q_rows = len_q
  if (min_seqlen_q > 0) & (len_q <= min_seqlen_q):
    len_q = 0
  m0 = tile_m * TILE_M
  if m0 >= q_rows:
    return
  parts.assume_stride(stride_q)
  parts.assume_stride(stride_k)
  parts.assume_stride(stride_v)
  parts.assume_stride(stride_do)
  parts.assume_stride(stride_dq)
  h = head.to(gl.int64)
  head_k = (head // (nhead_q // nhead_k)).to(gl.int64)
  row = (q_start + m0).to(gl.int64)
  q += b * batch_stride_q + row * stride_q + h * nhead_stride_q
  do += b * batch_stride_do + row * stride_do + h * nhead_stride_do
  dq += b * batch_stride_dq + row * stride_dq + h * nhead_stride_dq
  lse_at = b * batch_stride_lse + h * nhead_stride_lse + row
  k += (b * batch_stride_k + k_start.to(gl.int64) * stride_k
        + head_k * nhead_stride_k)
  v += (b * batch_stride_v + k_start.to(gl.int64) * stride_v
        + head_k * nhead_stride_v)
  seq = scores.Sequence(q_start, q_rows, len_q, k_start, seqlen_k, len_k)
  window = scores.Window(
      parts.offset_of(seq, flags), window_left, window_right, sink_tokens)
  _, low, full_low, full_high, high = parts.key_tiles(
      m0, gl.minimum(m0 + TILE_M, len_q), seq, window, TILE_N, 0)
  S: gl.constexpr = parts.matrix(CDNA, gl.num_warps())
  total = _zeros(HEAD, TILE_M, S)
  left = len_q - m0
  if high > low:
    r = gl.arange(0, TILE_M, gl.SliceLayout(0, S))
    l = gl.load(lse + lse_at + r, mask=r < left, other=float("-inf"))
    d = gl.load(delta + lse_at + r, mask=r < left, other=0.0)
    position = r + (m0 + window.offset)
    walk = _Walk(
        (low, full_low, full_high), high - low, full_high - full_low, 1, len_k,
        position - window_left,
        gl.minimum(position + window_right, len_k - 1))
    terms = _Terms(softmax_scale, *[()] * 11)
    total, _none = _sums(
        parts.columns(q, stride_q, left, HEAD, S),
        parts.columns(do, stride_do, left, HEAD, S), (k, stride_k, 0),
        (v, stride_v, 0), (l, d), (), walk, terms, CHEAP_CAST,
        False, False, 0, CDNA, S)
  _write(dq, stride_dq, total, -softmax_scale, left, q_rows - m0)
