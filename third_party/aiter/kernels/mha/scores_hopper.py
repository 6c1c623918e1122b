# SPDX-License-Identifier: Apache-2.0
"""Scores and dropout in attention's Hopper kernels; scores.py says what."""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import scores

# A Gluon function calls none of Triton's; of one source it may be either.
sequence_extent = gluon.jit(scores.sequence_extent.fn)


class Window(NamedTuple):
  """What a row sees: scores.Window, and the lengths."""
  off: tl.tensor
  left: tl.tensor
  right: tl.tensor
  sink_tokens: tl.tensor
  len_q: tl.tensor
  len_k: tl.tensor


class Plane(NamedTuple):
  """A bias or mask of a head; its strides are 0 if one row or key is for all.

  A row's FEATURES may have it where a call has not: then not `there`.
  """
  ptr: tl.tensor
  stride: tl.tensor
  key_stride: tl.tensor
  there: tl.tensor


class Planes(NamedTuple):
  """Tiles of the bias and the mask in shared memory: a ring, or one of each.

  Of a step there are `count`, of which a warpgroup's own is number `own`. Where
  one row is for all, it is the bias' alone, which says what the mask does.
  """
  bias: tl.tensor
  mask: tl.tensor
  count: tl.tensor
  own: tl.tensor


class Heads(NamedTuple):
  """Where a sequence's heads find what makes their scores.

  `first` is head 0's place in alibi_slopes and dropout_state; the planes are
  head 0's, nhead_stride_* before the next one's.
  """
  scale: tl.tensor
  logits_soft_cap: tl.tensor
  bias: Plane
  bias_f32: Plane
  nhead_stride_bias: tl.tensor
  mask: Plane
  nhead_stride_mask: tl.tensor
  alibi_slopes: tl.tensor
  dropout_state: tl.tensor
  first: tl.tensor
  drop_threshold: tl.tensor
  rp_keep: tl.tensor
  flags: tl.tensor


class Terms(NamedTuple):
  """What makes a score of q.k and weighs it, for one head; scores.Terms."""
  scale: tl.tensor
  logits_soft_cap: tl.tensor
  bias: Plane
  bias_f32: Plane
  mask: Plane
  slope: tl.tensor
  key0: tl.tensor
  key1: tl.tensor
  counter0: tl.tensor
  counter1: tl.tensor
  first_row: tl.tensor
  first_block: tl.tensor
  drop_threshold: tl.tensor
  rp_keep: tl.tensor


@gluon.jit
def find_sequence(slot, cu_seqlens, batch, TILE: gl.constexpr):
  """scores.find_sequence, by warps that look at 128 sequences at a time.

  A block of a short sequence would wait longer for one after the other than it
  computes.
  """
  LANES: gl.constexpr = 128
  lanes = gl.arange(0, LANES, gl.BlockedLayout([LANES // 32], [32],
                                               [gl.num_warps()], [0]))
  low = 0
  step = batch
  while step > 1:
    rest = step
    step = (rest + LANES - 1) // LANES
    at = low + lanes * step
    first = gl.load(cu_seqlens + at, mask=(lanes * step < rest) & (at < batch),
                    other=1 << 30) // TILE + at
    before = gl.sum((first <= slot).to(gl.int32), 0)
    low += (gl.maximum(before, 1) - 1) * step
  return low, slot - (gl.load(cu_seqlens + low) // TILE + low)


@gluon.jit
def _aligned(offset, FEATURES: gl.constexpr):
  """A Plane's offset, with the promise that the row's kernels are made for."""
  if not FEATURES & scores.MAYBE:
    offset = offset // 8 * 8
  return offset


@gluon.jit
def heads_of(index, nhead_q, bias, bias_f32, stride_bias, key_stride_bias,
             nhead_stride_bias, batch_stride_bias, mask, stride_mask,
             key_stride_mask, nhead_stride_mask, batch_stride_mask,
             alibi_slopes, dropout_state, scale, logits_soft_cap,
             drop_threshold, rp_keep, flags, FEATURES: gl.constexpr):
  """The Heads of a sequence."""
  b = index.to(gl.int64)
  if FEATURES & scores.HAS_BIAS:
    bias_offset = _aligned(b * batch_stride_bias, FEATURES)
    bias += bias_offset
    bias_f32 += bias_offset
  if FEATURES & scores.HAS_MASK:
    mask += _aligned(b * batch_stride_mask, FEATURES)
  is_f32 = (flags & scores.BIAS_F32) != 0
  has_bias = ((flags & scores.HAS_BIAS) != 0) & (is_f32 == 0)
  return Heads(
      scale, logits_soft_cap,
      Plane(bias, stride_bias, key_stride_bias, has_bias),
      Plane(bias_f32, stride_bias, key_stride_bias, is_f32), nhead_stride_bias,
      Plane(mask, stride_mask, key_stride_mask,
            (flags & scores.HAS_MASK) != 0), nhead_stride_mask,
      alibi_slopes, dropout_state, index * nhead_q, drop_threshold, rp_keep,
      flags)


@gluon.jit
def _moved(plane, elements):
  return Plane(plane.ptr + elements, plane.stride, plane.key_stride,
               plane.there)


@gluon.jit
def terms_of(heads, head, FEATURES: gl.constexpr):
  """The Terms of a head."""
  bias, bias_f32, mask = heads.bias, heads.bias_f32, heads.mask
  slope = 0.0
  key0 = 0
  key1 = 0
  counter0 = 0
  counter1 = 0
  first_row = 0
  first_block = 0
  if FEATURES & scores.HAS_BIAS:
    bias_offset = _aligned(head * heads.nhead_stride_bias, FEATURES)
    bias = _moved(bias, bias_offset)
    bias_f32 = _moved(bias_f32, bias_offset)
  if FEATURES & scores.HAS_MASK:
    mask = _moved(
        mask, _aligned(head * heads.nhead_stride_mask, FEATURES))
  if FEATURES & scores.ALIBI:
    slope = gl.load(heads.alibi_slopes + heads.first + head,
                    mask=(heads.flags & scores.ALIBI) != 0,
                    other=0.0) * scores.LOG2E
  if FEATURES & scores.DROPOUT:
    state = heads.dropout_state + (heads.first + head) * 6
    key0 = gl.load(state)
    key1 = gl.load(state + 1)
    counter0 = gl.load(state + 2)
    counter1 = gl.load(state + 3)
    first_row = gl.load(state + 4)
    first_block = gl.load(state + 5) // 8
  return Terms(heads.scale, heads.logits_soft_cap, bias, bias_f32, mask, slope,
               key0, key1, counter0, counter1, first_row, first_block,
               heads.drop_threshold, heads.rp_keep)


@gluon.constexpr_function
def staged(features):
  """Whether a producer copies tiles of the planes: of a row's own features."""
  planes = scores.HAS_BIAS.value | scores.HAS_MASK.value
  return bool(features & planes) and not features & scores.MAYBE.value


@gluon.constexpr_function
def arrivals(features):
  """How often copy_planes arrives at its barrier: each thread once."""
  return 128 if staged(features) else 0


@gluon.constexpr_function
def registers(features):
  """Registers of a thread: a second consumer's, a producer's."""
  return [224, 56] if staged(features) else [232, 40]


@gluon.jit
def allocate_planes(heads, STEPS: gl.constexpr, COUNT: gl.constexpr,
                    ROWS: gl.constexpr, KEYS: gl.constexpr,
                    FEATURES: gl.constexpr):
  """A ring of Planes [ROWS, KEYS], COUNT a step; nobody's own yet."""
  # The eight rows of a warp's accumulator lie in different banks.
  LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
  SHAPE: gl.constexpr = hopper.stack(STEPS * COUNT, [ROWS, KEYS])
  bias = gl.to_tensor(0)
  mask = gl.to_tensor(0)
  if FEATURES & scores.ONE_ROW:
    bias = gl.allocate_shared_memory(gl.float32, [STEPS * COUNT, KEYS],
                                     gl.SwizzledSharedLayout(1, 1, 1, [0]))
  elif staged(FEATURES):
    if FEATURES & scores.BIAS_F32:
      bias = gl.allocate_shared_memory(gl.float32, SHAPE, LAYOUT)
    elif FEATURES & scores.HAS_BIAS:
      bias = gl.allocate_shared_memory(heads.bias.ptr.dtype.element_ty, SHAPE,
                                       LAYOUT)
    if FEATURES & scores.HAS_MASK:
      mask = gl.allocate_shared_memory(heads.mask.ptr.dtype.element_ty, SHAPE,
                                       LAYOUT)
  return Planes(bias, mask, COUNT, 0)


@gluon.jit
def own_planes(planes, own):
  """The ring as a warpgroup takes it."""
  return Planes(planes.bias, planes.mask, planes.count, own)


@gluon.jit
def planes_at(planes, i, TRANSPOSED: gl.constexpr, FEATURES: gl.constexpr):
  """A warpgroup's own tiles of step i of the ring."""
  bias = planes.bias
  mask = planes.mask
  at = i * planes.count + planes.own
  if FEATURES & scores.ONE_ROW:
    bias = bias.index(at)
  elif staged(FEATURES):
    if FEATURES & scores.HAS_BIAS:
      bias = bias.index(at)
      if TRANSPOSED:
        bias = bias.permute([1, 0])
    if FEATURES & scores.HAS_MASK:
      mask = mask.index(at)
      if TRANSPOSED:
        mask = mask.permute([1, 0])
  return Planes(bias, mask, planes.count, planes.own)


@gluon.jit
def _copy_plane(plane, smem, row0, col0, window, ROWS: gl.constexpr,
                KEYS: gl.constexpr):
  """Starts the copy of a tile; zeros past the rows, anything past the keys."""
  CHUNK: gl.constexpr = 1024 // KEYS
  LAYOUT: gl.constexpr = hopper.rows_layout(KEYS)
  rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
  # A stride of 8 elements promises eight columns in one copy; a bound between
  # them would take that back.
  stride = plane.stride // 8 * 8
  inside = cols < (window.len_k - col0 + 7) // 8 * 8
  ptr = plane.ptr + (row0.to(gl.int64) * stride + col0)
  offsets = rows[:, None] * stride + cols[None, :]
  for i in gl.static_range(ROWS // CHUNK):
    live = rows < window.len_q - row0 - i * CHUNK
    async_copy.async_load(smem.slice(i * CHUNK, CHUNK), ptr + offsets,
                          mask=live[:, None] & inside[None, :])
    ptr += CHUNK * stride


@gluon.jit
def _copy_row(plane, smem, col0, window, KEYS: gl.constexpr):
  """Starts the copy of one row for all, zeros past the keys."""
  cols = gl.arange(0, KEYS,
                   gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
  async_copy.async_load(smem, plane.ptr + (col0 + cols),
                        mask=cols < window.len_k - col0)


@gluon.jit
def copy_planes(terms, planes, i, barrier, row0, col0, row_step, col_step,
                window, COUNT: gl.constexpr, ROWS: gl.constexpr,
                KEYS: gl.constexpr, FEATURES: gl.constexpr):
  """Starts the copies of step i's tiles; `arrivals` at `barrier` end them.

  The tile of each next warpgroup is row_step rows and col_step keys on.
  """
  if staged(FEATURES):
    for w in range(COUNT):
      row = row0 + w * row_step
      col = col0 + w * col_step
      at = i * COUNT + w
      if FEATURES & scores.ONE_ROW:
        _copy_row(terms.bias_f32, planes.bias.index(at), col, window, KEYS)
      elif FEATURES & scores.BIAS_F32:
        _copy_plane(terms.bias_f32, planes.bias.index(at), row, col, window,
                    ROWS, KEYS)
      elif FEATURES & scores.HAS_BIAS:
        _copy_plane(terms.bias, planes.bias.index(at), row, col, window, ROWS,
                    KEYS)
      if FEATURES & scores.HAS_MASK and not FEATURES & scores.ONE_ROW:
        _copy_plane(terms.mask, planes.mask.index(at), row, col, window, ROWS,
                    KEYS)
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def _tile_of(plane, row0, col0, rows, cols, window, other, MASK: gl.constexpr):
  """A tile of a Plane, `other` past the rows.

  rows and cols count from row0 and col0, and broadcast to the tile. What stands
  past the keys is not said; without MASK every column lies inside the sequence.
  """
  inside = (rows < window.len_q - row0) & plane.there
  if MASK:
    inside = inside & (cols < window.len_k - col0)
  else:
    inside = inside & (cols >= 0)
  cols *= plane.key_stride
  ptr = plane.ptr + (row0.to(gl.int64) * plane.stride +
                     col0 * plane.key_stride)
  return gl.load(ptr + (rows * plane.stride + cols), mask=inside, other=other)


@gluon.jit
def capped(s, terms):
  """tanh of the soft cap, from products q.k, in parts of the cap.

  It is one instruction of the unit that computes exponentials, and errs by no
  more than 2^-11 of the score; exactly, tanh would take two.
  """
  return gl.inline_asm_elementwise(
      "tanh.approx.f32 $0, $1;", "=f,f",
      [s * (terms.scale / terms.logits_soft_cap)], gl.float32, True, 1)


@gluon.constexpr_function
def _with_bias_asm(dtype, count):
  """PTX of with_bias: operands are sums and products, scales, pairs of bias."""
  pair, hidden = {"bf16": ("bf16x2", "0xff80ff80"),
                  "fp16": ("f16x2", "0xfc00fc00")}[dtype]
  scale, bias = 2 * count, 3 * count
  add, hide = [], []
  least = [f"mov.b32 least, ${bias};"]
  for i in range(count // 2):
    at = f"${bias + i}"
    if dtype == "bf16":
      add += [f"shl.b32 x, {at}, 16;", f"and.b32 y, {at}, 0xffff0000;"]
    else:
      add += [f"mov.b32 {{a, b}}, {at};", "cvt.f32.f16 x, a;",
              "cvt.f32.f16 y, b;"]
    hide.append(f"setp.eq.{pair} p|q, {at}, hidden;")
    least.append(f"min.{pair} least, least, {at};")
    for k, x, p in ((2 * i, "x", "p"), (2 * i + 1, "y", "q")):
      add.append(f"fma.rn.f32 ${k}, ${k}, ${scale + k}, {x};")
      hide.append(f"selp.f32 ${k}, 0fFF800000, ${k}, {p};")
  return "\n".join([
      "{", ".reg .pred p, q;", ".reg .b32 least, hidden;", ".reg .b16 a, b;",
      ".reg .f32 x, y;", *add, *least, f"mov.b32 hidden, {hidden};",
      f"setp.eq.{pair} p|q, least, hidden;", "or.pred p, p, q;",
      "@!p bra DONE;", *hide, "DONE:", "}"])


@gluon.constexpr_function
def _with_bias_constraints(count):
  return ",".join(["=f"] * count + [str(i) for i in range(count)] +
                  ["f"] * count + ["r"] * (count // 2))


@gluon.jit
def with_bias(s, scale, bias):
  """Scores from products q.k and a tile of 16-bit bias: s * scale + bias.

  -inf hides as in `complete`, by selection. Few biases have it, and without it
  nothing is selected: each warp looks for itself, which only PTX can say.
  """
  COUNT: gl.constexpr = min(32, s.shape[1] // 2)
  scale += gl.zeros(s.shape, gl.float32, s.type.layout)
  return gl.inline_asm_elementwise(
      _with_bias_asm(bias.dtype.name, COUNT), _with_bias_constraints(COUNT),
      [s, scale, bias], gl.float32, True, COUNT)


@gluon.constexpr_function
def _column_parts(n):
  """hopper.accumulator(n)'s layout, as [64, n / 8, 4 lanes, 2]."""
  return gl.DistributedLinearLayout(
      [[0, 0, 0, 1], [8, 0, 0, 0], *_steps(n // 8, 1, 4)],
      [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
      [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, n // 8, 4, 2])


@gluon.jit
def penalty(row0, col0, rows, cols, window, slope):
  """ALiBi's, slope * |distance of row and key|; arguments as of _tile_of.

  A conversion takes as long as an exponential. So that not every score has one,
  an accumulator's column is a constant plus the lane's part. In transposed
  tiles, which need each distance for the window too, that was slower. Rows may
  also have an offset and a slope each.
  """
  first = row0 + window.off - col0
  if cols.shape[0] > 1:
    x = gl.abs(first + rows - cols).to(gl.float32) * slope
  else:
    N: gl.constexpr = cols.shape[1]
    PARTS: gl.constexpr = _column_parts(N)
    ROWS: gl.constexpr = _vector(PARTS, 0, 4)
    own = gl.arange(0, 64, ROWS)
    if len(first.shape) > 0:
      first = gl.convert_layout(first.reshape([64]), ROWS)
      slope = gl.convert_layout(slope.reshape([64]), ROWS)[:, None, None, None]
    own = (first + own)[:, None, None, None]
    lane = gl.arange(0, 4, _vector(PARTS, 2, 4))[None, None, :, None] * 2
    eights = gl.arange(0, N // 8, _vector(PARTS, 1, 4))[None, :, None, None]
    pair = gl.arange(0, 2, _vector(PARTS, 3, 4))[None, None, None, :]
    start = (own - lane).to(gl.float32)
    # The distance's sign goes, the slope's stays.
    x = gl.abs(start - (eights * 8 + pair).to(gl.float32)) * slope
    x = gl.convert_layout(x.reshape([64, N]), hopper.accumulator(N))
  return x


@gluon.jit
def complete(s, row0, col0, rows, cols, window, terms, planes,
             MASK: gl.constexpr, FEATURES: gl.constexpr):
  """Complete scores in base 2 from products q.k; the window is not applied.

  Arguments: those of _tile_of; planes: the scores' own tiles, if `staged`.

  Returns:
    (scores, slope): the second is the soft cap's derivative, or 1.
  """
  slope = 1.0
  if FEATURES & scores.SOFT_CAP:
    t = capped(s, terms)
    slope = 1.0 - t * t
    t *= terms.logits_soft_cap * scores.LOG2E
    if FEATURES & scores.MAYBE:
      has_cap = terms.logits_soft_cap > 0
      slope = gl.where(has_cap, slope, 1.0)
      t = gl.where(has_cap, t, s * (terms.scale * scores.LOG2E))
    s = t
  else:
    s *= terms.scale * scores.LOG2E
  LAYOUT: gl.constexpr = hopper.accumulator(s.shape[1])
  if FEATURES & scores.HAS_BIAS:
    bias = 0.0
    if FEATURES & scores.ONE_ROW:
      if cols.shape[0] > 1:
        bias = planes.bias.load(gl.SliceLayout(1, LAYOUT))[:, None]
      else:
        bias = planes.bias.load(gl.SliceLayout(0, LAYOUT))[None, :]
    elif staged(FEATURES):
      bias = planes.bias.load(LAYOUT).to(gl.float32)
    else:
      if FEATURES & scores.BIAS_F32:
        bias = _tile_of(terms.bias_f32, row0, col0, rows, cols, window, 0.0,
                        MASK)
      bias += _tile_of(terms.bias, row0, col0, rows, cols, window, 0.0,
                       MASK).to(gl.float32)
    # -inf hides: it selects, so that no key's NaN comes through.
    s = gl.where(bias == float("-inf"), bias, s + bias * scores.LOG2E)
  if FEATURES & scores.HAS_MASK and not FEATURES & scores.ONE_ROW:
    if staged(FEATURES):
      shown = planes.mask.load(LAYOUT)
    else:
      shown = _tile_of(terms.mask, row0, col0, rows, cols, window, 1, MASK)
    s = gl.where(shown != 0, s, float("-inf"))
  if FEATURES & scores.ALIBI:
    s -= penalty(row0, col0, rows, cols, window, terms.slope)
  return s, slope


@gluon.jit
def shown_keys(terms, col0):
  """A mask of one row for all from key col0 on, as copies of rows take it."""
  mask = terms.mask
  return Plane(mask.ptr + col0 * mask.key_stride, mask.stride, mask.key_stride,
               mask.there & (mask.stride == 0))


@gluon.jit
def hides(terms, col0, len_k, N: gl.constexpr, FEATURES: gl.constexpr):
  """Whether a mask of one row for all hides any of N keys from col0 on.

  Such a key may hold NaN, and 0 times NaN is NaN: whoever multiplies with it
  or its value reads zeros in its place.
  """
  any_hidden = False
  if FEATURES & scores.HAS_MASK:
    keys = shown_keys(terms, col0)
    cols = gl.arange(0, N, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    shown = gl.load(keys.ptr + cols * keys.key_stride,
                    mask=(cols < len_k - col0) & keys.there, other=1)
    any_hidden = gl.min(shown.to(gl.int32), 0) == 0
  return any_hidden


# Dropout's mask is scores.keep_scale's: one draw of Philox serves eight
# neighbouring keys of a row, which lie in several threads' scores. So a thread
# draws for eight keys and packs their bits; two threads, each of which wants
# four of eight, take turns and give each other one half; and all share words.


@gluon.jit
def _philox(c0, c1, c2, c3, k0, k1):
  """tl.philox_impl's ten rounds; one instruction gives both halves."""
  for _ in gl.static_range(10):
    a = c0.to(gl.uint64) * 0xD2511F53
    b = c2.to(gl.uint64) * 0xCD9E8D57
    c0 = (b >> 32).to(gl.uint32) ^ c1 ^ k0
    c2 = (a >> 32).to(gl.uint32) ^ c3 ^ k1
    c1 = b.to(gl.uint32)
    c3 = a.to(gl.uint32)
    k0 += 0x9E3779B9
    k1 += 0xBB67AE85
  return c0, c1, c2, c3


@gluon.jit
def _four(w0, w1, w2, w3, least, bit):
  """Which of four words are not below `least`: four bits, the lowest `bit`."""
  return (gl.where(w0 >= least, bit, 0) | gl.where(w1 >= least, bit * 2, 0) |
          gl.where(w2 >= least, bit * 4, 0) | gl.where(w3 >= least, bit * 8, 0))


@gluon.constexpr_function
def _give(lane):
  """What two threads, so many lanes apart, have drawn of two blocks.

  Each has half of the bits of both, and gets all of its own: the upper thread
  those of the second.
  """
  return f"""{{
    .reg .pred upper;
    .reg .b32 lane, mine, other;
    mov.u32 lane, %laneid;
    and.b32 lane, lane, {lane};
    setp.ne.b32 upper, lane, 0;
    selp.b32 mine, $2, $1, upper;
    selp.b32 other, $1, $2, upper;
    shfl.sync.bfly.b32 other, other, {lane}, 0x1f, 0xffffffff;
    or.b32 $0, mine, other;
  }}"""


@gluon.jit
def draw(block, rows, part, upper, terms, AXIS: gl.constexpr,
         LANE: gl.constexpr):
  """What dropout keeps, four bits for each block of four keys, in words.

  Two threads LANE lanes apart, of which one is the `upper`, draw other parts of
  the same blocks of eight keys; in the result, the upper one has their second
  four. Of a word's bits, eight are those of `part`, along AXIS.
  """
  block = terms.first_block + block.to(gl.uint32)
  rows = terms.first_row + rows.to(gl.uint32)
  zero = block * 0 + rows * 0
  w0, w1, w2, w3 = _philox(
      zero + block, zero + rows, zero + terms.counter1, zero + terms.counter0,
      terms.key0, terms.key1)
  least = terms.drop_threshold.to(gl.uint32, bitcast=True)
  bit = 1 << part * 8
  low = gl.sum(
      _four(w0 << 16, w1 << 16, w2 << 16, w3 << 16, least, bit), AXIS)
  high = gl.sum(_four(w0, w1, w2, w3, least, bit), AXIS)
  return gl.inline_asm_elementwise(
      _give(LANE), "=r,r,r", [low << upper * 4, high << upper * 4], gl.int32,
      False, 1)


@gluon.constexpr_function
def _steps(count, axis, rank, step=1):
  """Bases of a layout: powers of two up to `count` along an axis."""
  bases = []
  while step < count:
    bases.append([step if i == axis else 0 for i in range(rank)])
    step *= 2
  return bases


@gluon.constexpr_function
def _vector(layout, axis, rank):
  """The layout of an axis' indices."""
  for other in reversed(range(rank)):
    if other != axis:
      layout = gl.SliceLayout(other, layout)
  return layout


@gluon.constexpr_function
def _row_blocks(n, c):
  """Draws for 64 rows: [64, n / 8c, c / 2, 2 threads]."""
  return gl.DistributedLinearLayout(
      [*_steps(c // 2, 2, 4), *_steps(n // (8 * c), 1, 4)],
      [[8, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
      [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, n // (8 * c), c // 2, 2])


@gluon.constexpr_function
def _row_keys(n, c):
  """hopper.accumulator(n)'s layout of scores.

  As [64, n / 8c, c, 2 blocks, 4 keys].
  """
  return gl.DistributedLinearLayout(
      [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], *_steps(c, 2, 5),
       *_steps(n // (8 * c), 1, 5)],
      [[0, 0, 0, 0, 2], [0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0],
       [4, 0, 0, 0, 0]],
      [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]], [], [64, n // (8 * c), c, 2, 4])


@gluon.jit
def draw_rows(terms, row0, col0, N: gl.constexpr):
  """What dropout keeps of 64 rows and N keys: words [64, N / 8c, 2 blocks].

  In the layout SliceLayout(2, _row_blocks(N, c)), c = min(8, N // 8); bit
  4 i + j of a word is the j-th key of its block in eight keys i.
  """
  C: gl.constexpr = min(8, N // 8)
  DRAWS: gl.constexpr = _row_blocks(N, C)
  row = gl.arange(0, 64, _vector(DRAWS, 0, 4))[:, None, None, None]
  word = gl.arange(0, N // (8 * C), _vector(DRAWS, 1, 4))[None, :, None, None]
  part = gl.arange(0, C // 2, _vector(DRAWS, 2, 4))[None, None, :, None]
  upper = gl.arange(0, 2, _vector(DRAWS, 3, 4))[None, None, None, :]
  block = col0 // 8 + word * C + part * 2 + upper
  upper = gl.arange(0, 2, _vector(gl.SliceLayout(2, DRAWS), 2, 3))
  upper = upper[None, None, :]
  return draw(block, row0 + row, part, upper, terms, 2, 2)


@gluon.jit
def keep_of_drawn_rows(bits, N: gl.constexpr):
  """Whether dropout keeps, of what draw_rows says."""
  C: gl.constexpr = min(8, N // 8)
  KEYS: gl.constexpr = _row_keys(N, C)
  bits = gl.convert_layout(bits, gl.SliceLayout(2, gl.SliceLayout(4, KEYS)))
  part = gl.arange(0, C, _vector(KEYS, 2, 5))[None, None, :, None, None]
  key = gl.arange(0, 4, _vector(KEYS, 4, 5))[None, None, None, None, :]
  # What lanes differ in goes first: the rest are constants.
  keep = (bits[:, :, None, :, None] >> key // 2 * 2) & 1 << part * 4 + key % 2
  keep = keep.reshape([64, N])
  return gl.convert_layout(keep, hopper.accumulator(N)) != 0


@gluon.jit
def keep_of_rows(terms, row0, col0, N: gl.constexpr):
  """Whether dropout keeps: 64 rows from row0 on, N keys from col0 on."""
  return keep_of_drawn_rows(draw_rows(terms, row0, col0, N), N)


@gluon.constexpr_function
def _key_blocks(m, c):
  """Draws for 64 keys: [8 blocks, 2 threads, m / 8c, c / 2, 8 rows]."""
  return gl.DistributedLinearLayout(
      [*_steps(c // 2, 3, 5), *_steps(m // (8 * c), 2, 5)],
      [[0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1],
       [0, 1, 0, 0, 0]],
      [[2, 0, 0, 0, 0], [4, 0, 0, 0, 0]], [], [8, 2, m // (8 * c), c // 2, 8])


@gluon.constexpr_function
def _key_rows(m, c):
  """hopper.accumulator(m)'s layout of transposed scores.

  As [16 blocks, 4 keys, m / 8c, c, 8 rows].
  """
  return gl.DistributedLinearLayout(
      [[0, 0, 0, 0, 1], [2, 0, 0, 0, 0], *_steps(c, 3, 5),
       *_steps(m // (8 * c), 2, 5)],
      [[0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0],
       [1, 0, 0, 0, 0]],
      [[4, 0, 0, 0, 0], [8, 0, 0, 0, 0]], [], [16, 4, m // (8 * c), c, 8])


@gluon.jit
def keep_of_keys(terms, row0, col0, M: gl.constexpr):
  """Whether dropout keeps: 64 keys from col0 on, M rows from row0 on."""
  C: gl.constexpr = min(8, M // 8)
  DRAWS: gl.constexpr = _key_blocks(M, C)
  ROWS: gl.constexpr = _key_rows(M, C)
  WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, ROWS))
  block = gl.arange(0, 8, _vector(DRAWS, 0, 5))[:, None, None, None, None]
  word = gl.arange(0, M // (8 * C), _vector(DRAWS, 2, 5))[
      None, None, :, None, None]
  part = gl.arange(0, C // 2, _vector(DRAWS, 3, 5))[None, None, None, :, None]
  upper = gl.arange(0, 2, _vector(DRAWS, 1, 5))[None, :, None, None, None]
  row = gl.arange(0, 8, _vector(DRAWS, 4, 5))[None, None, None, None, :]
  row += row0 + (word * C + part * 2 + upper) * 8
  upper = gl.arange(0, 2, _vector(gl.SliceLayout(3, DRAWS), 1, 4))[
      None, :, None, None]
  bits = draw(col0 // 8 + block, row, part, upper, terms, 3, 16)
  bits = gl.convert_layout(bits.reshape([16, M // (8 * C), 8]), WORDS)
  key = gl.arange(0, 4, _vector(ROWS, 1, 5))[None, :, None, None, None]
  part = gl.arange(0, C, _vector(ROWS, 3, 5))[None, None, None, :, None]
  keep = (bits[:, None, :, None, :] >> key) & 1 << part * 4
  keep = keep.reshape([64, M])
  return gl.convert_layout(keep, hopper.accumulator(M)) != 0
