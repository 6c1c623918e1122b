# SPDX-License-Identifier: Apache-2.0
"""Attention forward of float8 tensors for Hopper (sm_90), in Gluon.

As in mha/fwd_hopper.py a producer warpgroup copies tiles by TMA and consumers
own 64 query rows each. Products of 8 bits take half as long, so instructions
for the softmax are what counts: two consumers take turns, one's softmax beside
the other's products, and the next scores run while a tile's values are added.

Tensor cores take only operands along whose rows one multiplies, so values come
transposed, [head, column, key]. And a thread's weights, as scores leave them,
are not those of which it must hold the operand: so keys of the values are in
another order (op.py has it), and the weights of a thread are its operand's. The
tensor cores keep 14 bits of a sum of such products; a tile's product is one,
and tiles are added up in float32.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha_fp8 import fwd

PACKED = fwd.PACKED
SINK = fwd.SINK
LN2 = fwd.LN2
LOG2E = fwd.LOG2E
# Bytes of keys and values that stay in the L2 cache beside all else.
CACHED = gl.constexpr(1 << 25)
find_sequence = gluon.jit(fwd.find_sequence.fn)
first_column = gluon.jit(fwd.first_column.fn)
extent = gluon.jit(fwd.extent.fn)


class Rings(NamedTuple):
  """Rings of the tiles of queries, keys and values, and their barriers."""
  q: tl.tensor
  q_full: tl.tensor
  q_empty: tl.tensor
  k: tl.tensor
  v: tl.tensor
  k_full: tl.tensor
  k_empty: tl.tensor
  v_full: tl.tensor
  v_empty: tl.tensor


class Seen(NamedTuple):
  """What a row sees: keys from row + off - left to row + off + right."""
  off: tl.tensor
  left: tl.tensor
  right: tl.tensor
  len_k: tl.tensor


class Scales(NamedTuple):
  """Scales of scores, in powers of two, and of values: `first` is a head's."""
  of_scores: tl.tensor
  of_values: tl.tensor
  first: tl.tensor
  last_block: tl.tensor


class Work(NamedTuple):
  """What there is to do."""
  cu_seqlens_q: tl.tensor
  cu_seqlens_k: tl.tensor
  batch: tl.tensor
  seqlen_q: tl.tensor
  seqlen_k: tl.tensor
  nhead_q: tl.tensor
  nhead_k: tl.tensor
  left: tl.tensor
  right: tl.tensor
  flags: tl.tensor


class Item(NamedTuple):
  """Rows of a head, and where they and their keys are.

  In maps they are at slot_b, head, head_k, q_row, k_row and v_col; in memory
  the sequence's rows begin at first_q, its lse at `lse`. Tiles of keys full_lo
  to full_hi - 1 are seen by every row, `steps` up to tile_hi - 1 by any.
  """
  index: tl.tensor
  slot_b: tl.tensor
  head: tl.tensor
  head_k: tl.tensor
  first_q: tl.tensor
  lse: tl.tensor
  q_row: tl.tensor
  k_row: tl.tensor
  v_col: tl.tensor
  row0: tl.tensor
  len_q: tl.tensor
  len_k: tl.tensor
  tile_hi: tl.tensor
  steps: tl.tensor
  full_lo: tl.tensor
  full_hi: tl.tensor


@gluon.jit
def rings_of(q_smem, k_smem, v_smem, barriers, WARPGROUPS: gl.constexpr,
             STAGES: gl.constexpr):
  """The Rings of a warp; of all its barriers it keeps one address."""
  Q: gl.constexpr = 2 * WARPGROUPS
  return Rings(q_smem, barriers.slice(0, Q), barriers.slice(Q, Q),
               k_smem, v_smem, barriers.slice(2 * Q, STAGES),
               barriers.slice(2 * Q + STAGES, STAGES),
               barriers.slice(2 * Q + 2 * STAGES, STAGES),
               barriers.slice(2 * Q + 3 * STAGES, STAGES))


@gluon.constexpr_function
def accumulator(n):
  """The layout of a warpgroup's 64 x n sums of float8 products."""
  return gl.NVMMADistributedLayout(
      version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 32])


@gluon.jit
def _tiles(work, TILE_M: gl.constexpr):
  """Tiles of rows of a head, and for how many sequences there are so many.

  Of packed sequences there is one: tiles find theirs themselves.
  """
  packed = (work.flags & PACKED) != 0
  return (gl.where(packed, work.seqlen_q // TILE_M + work.batch + 1,
                   (work.seqlen_q + TILE_M - 1) // TILE_M),
          gl.where(packed, 1, work.batch))


@gluon.jit
def _number(turn):
  """The item of a program's turn: what was last in one is first in the next."""
  count = gl.num_programs(0)
  place = gl.program_id(0)
  return turn * count + gl.where(turn % 2 == 0, place, count - 1 - place)


@gluon.jit
def _turns(work, TILE_M: gl.constexpr):
  """How many items a program has: those are tiles of rows of heads."""
  tiles, batch = _tiles(work, TILE_M)
  items = tiles * work.nhead_q * batch
  turns = items // gl.num_programs(0)
  return turns + gl.where(_number(turns) < items, 1, 0)


@gluon.jit
def find(item, work, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
         HEAD: gl.constexpr):
  """The Item of a number.

  Of heads whose keys and values stay in the L2 cache together the last tiles
  come first, the longest when causal.
  """
  tiles, batch = _tiles(work, TILE_M)
  pairs = work.nhead_q * batch
  together = CACHED // (2 * HEAD) // gl.maximum(work.seqlen_k, 1)
  together = gl.maximum(together, 1) * (work.nhead_q // work.nhead_k)
  together = gl.minimum(together, pairs)
  first = item // (tiles * together) * together
  item -= first * tiles
  together = gl.minimum(together, pairs - first)
  tile = tiles - 1 - item // together
  pair = first + item % together
  index = pair // work.nhead_q
  head = pair % work.nhead_q
  slot_b = index
  first_q = index.to(gl.int64) * work.seqlen_q
  q_row = 0
  k_row = 0
  v_col = 0
  len_q = work.seqlen_q
  len_k = work.seqlen_k
  lse = first_q * work.nhead_q + head.to(gl.int64) * len_q
  if (work.flags & PACKED) != 0:
    # Sequence `batch` is the rows behind all others, which see nothing.
    index, tile = find_sequence(tile, work.cu_seqlens_q, work.batch + 1, TILE_M)
    q_row, len_q, lse_rows = extent(work.cu_seqlens_q, index, work.batch,
                                    work.seqlen_q)
    k_row, len_k, _ = extent(work.cu_seqlens_k, index, work.batch,
                             work.seqlen_k)
    len_k = gl.where(index < work.batch, len_k, 0)
    first_q = q_row.to(gl.int64)
    lse = head.to(gl.int64) * lse_rows + q_row
    v_col = first_column(k_row, index)
  row0 = tile * TILE_M
  off = len_k - len_q
  # Tiles lo to hi - 1 are seen, full_lo to full_hi - 1 by every row.
  last = gl.minimum(row0 + TILE_M, len_q) - 1
  col_hi = gl.minimum(len_k, last + off + work.right + 1)
  col_lo = gl.maximum(row0 + off - work.left, 0)
  full_hi = gl.minimum(len_k, row0 + off + work.right + 1)
  full_lo = gl.maximum(row0 + TILE_M - 1 + off - work.left, 0)
  tile_hi = (gl.maximum(col_hi, 0) + TILE_N - 1) // TILE_N
  tile_hi = gl.where(row0 < len_q, tile_hi, 0)
  steps = gl.maximum(tile_hi - col_lo // TILE_N, 0)
  return Item(index, slot_b, head, head // (work.nhead_q // work.nhead_k),
              first_q, lse, q_row + row0, k_row, v_col, row0, len_q, len_k,
              tile_hi, steps, (full_lo + TILE_N - 1) // TILE_N,
              gl.maximum(full_hi, 0) // TILE_N)


@gluon.jit
def copy_keys(k_desc, rings, item, step, use, TILE_N: gl.constexpr,
              STAGES: gl.constexpr):
  """Starts the copy of a step's tile of keys, the `use`-th of the ring."""
  key = (item.tile_hi - 1 - step) * TILE_N
  i, phase = hopper.ring(use, STAGES)
  mbarrier.wait(rings.k_empty.index(i), phase ^ 1)
  mbarrier.expect(rings.k_full.index(i), k_desc.nbytes_per_cta)
  tma.async_load(k_desc, [item.slot_b, item.head_k, item.k_row + key, 0],
                 rings.k_full.index(i), rings.k.index(i))


@gluon.jit
def copy_values(v_desc, rings, item, step, use, TILE_N: gl.constexpr,
                STAGES: gl.constexpr):
  """Likewise of values."""
  key = (item.tile_hi - 1 - step) * TILE_N
  i, phase = hopper.ring(use, STAGES)
  mbarrier.wait(rings.v_empty.index(i), phase ^ 1)
  mbarrier.expect(rings.v_full.index(i), v_desc.nbytes_per_cta)
  tma.async_load(v_desc, [item.slot_b, item.head_k, 0, item.v_col + key],
                 rings.v_full.index(i), rings.v.index(i))


@gluon.jit
def _produce(args, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
             HEAD: gl.constexpr, STAGES: gl.constexpr):
  """Copies the Q of every item, then its K and V tiles, the last tile first."""
  q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, barriers, work = args
  WARPGROUPS: gl.constexpr = TILE_M // 64
  rings = rings_of(q_smem, k_smem, v_smem, barriers, WARPGROUPS, STAGES)
  done = 0
  items = 0
  # Started while columns.py may still write: only values come from there.
  for turn in range(_turns(work, TILE_M)):
    item = find(_number(turn), work, TILE_M, TILE_N, HEAD)
    slot = items % 2 * WARPGROUPS
    if item.steps > 0:
      for w in gl.static_range(WARPGROUPS):
        mbarrier.wait(rings.q_empty.index(slot + w), items // 2 & 1 ^ 1)
        mbarrier.expect(rings.q_full.index(slot + w), q_desc.nbytes_per_cta)
        tma.async_load(
            q_desc, [item.slot_b, item.head, item.q_row + w * 64, 0],
            rings.q_full.index(slot + w), rings.q.index(slot + w))
      items += 1
    for step in range(item.steps):
      copy_keys(k_desc, rings, item, step, done + step, TILE_N, STAGES)
      if done + step == 0:
        gdc_wait()
      copy_values(v_desc, rings, item, step, done + step, TILE_N, STAGES)
    done += item.steps
  if done == 0:
    # Nor does this kernel end before that one.
    gdc_wait()


@gluon.jit
def _scores(q, k_smem, i, TILE_N: gl.constexpr, HEAD: gl.constexpr):
  """Starts q k^T of 64 rows and a tile of keys."""
  k = k_smem.index(i).reshape([TILE_N, HEAD])
  zero = gl.zeros([64, TILE_N], gl.float32, accumulator(TILE_N))
  return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False,
                       is_async=True)


@gluon.jit
def start_values(p, v_smem, i, TILE_N: gl.constexpr, HEAD: gl.constexpr):
  """Starts p v of 64 rows and a tile of keys."""
  v = v_smem.index(i).reshape([HEAD, TILE_N])
  zero = gl.zeros([64, HEAD], gl.float32, accumulator(HEAD))
  return warpgroup_mma(p, v.permute([1, 0]), zero, use_acc=False,
                       is_async=True)


@gluon.jit
def _cut(s, low, high, TILE_N: gl.constexpr):
  """Scores of columns low to high of each row, -inf of the others.

  A thread compares numbers that the compiler knows, 8 a + d, with one of its
  own a row: column 8 a + 2 b + d is what its b-th lane has. Else all columns
  are kept in registers from one item to the next.
  """
  MMA: gl.constexpr = s.type.layout
  s = s.reshape([64, TILE_N // 8, 4, 2])
  ABD: gl.constexpr = s.type.layout
  AB: gl.constexpr = gl.SliceLayout(3, ABD)
  A: gl.constexpr = gl.SliceLayout(2, AB)
  a = gl.arange(0, TILE_N // 8, gl.SliceLayout(0, A))[None, :, None, None]
  b = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, AB)))
  b = 2 * b[None, None, :, None]
  d = gl.arange(0, 2, gl.SliceLayout(
      0, gl.SliceLayout(1, gl.SliceLayout(2, ABD))))[None, None, None, :]
  ROWS: gl.constexpr = gl.SliceLayout(1, A)
  low = gl.convert_layout(low, ROWS)[:, None, None, None] - b
  high = gl.convert_layout(high, ROWS)[:, None, None, None] - b
  col = 8 * a + d
  s = gl.where((col >= low) & (col <= high), s, float("-inf"))
  return gl.convert_layout(s.reshape([64, TILE_N]), MMA, assert_trivial=True)


@gluon.jit
def exponentials(s, m, tile, row0, seen, scale, TILE_N: gl.constexpr,
                 WEIGHT_BITS: gl.constexpr, MASK: gl.constexpr):
  """Takes a tile's products into the running maximum.

  Returns:
    (exponentials times 2^WEIGHT_BITS, new maximum, factor of what was summed
    before).
  """
  LAYOUT: gl.constexpr = accumulator(TILE_N)
  if MASK:
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)) + seen.off
    first = tile * TILE_N
    s = _cut(s, gl.maximum(rows - seen.left, 0) - first,
             gl.minimum(rows + seen.right, seen.len_k - 1) - first, TILE_N)
  m_new = gl.maximum(m, gl.max(s, 1) * scale)
  shift = m_new - WEIGHT_BITS
  if MASK:
    # A row that has seen no key yet: anything finite keeps the NaN away.
    shift = gl.where(m_new == float("-inf"), 0.0, shift)
  alpha = gl.exp2(m - WEIGHT_BITS - shift)
  return gl.exp2(s * scale - shift[:, None]), m_new, alpha


@gluon.jit
def weights(e, dtype: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr):
  """Exponentials as the left operand of a product: no thread gives one away.

  In each 16 columns a thread has 2t, 2t + 1, 2t + 8 and 2t + 9, and as an
  operand 4t to 4t + 3, which is what it has by another name.
  """
  e = e.reshape([64, TILE_N // 16, 2, 4, 2])
  e = e.permute([0, 1, 3, 2, 4]).reshape([64, TILE_N])
  e = gl.convert_layout(
      e, gl.DotOperandLayout(0, accumulator(HEAD), 4), assert_trivial=True)
  # By hand, so that four lie in one register from the first.
  p = gl.inline_asm_elementwise(
      """{
      .reg .b16 low, high;
      cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
      cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
      mov.b32 $0, {low, high};
      }""", "=r,r,r,r,r", [e], dtype=gl.int8, is_pure=True, pack=4)
  return p.to(dtype, bitcast=True)


@gluon.jit
def rows_of(t, HEAD: gl.constexpr):
  """Numbers of rows as an accumulator's of HEAD columns."""
  return gl.convert_layout(t, gl.SliceLayout(1, accumulator(HEAD)))[:, None]


@gluon.jit
def next_scores(q, rings, step, TILE_N: gl.constexpr, HEAD: gl.constexpr,
                STAGES: gl.constexpr):
  """Starts the products of a step's keys."""
  i, phase = hopper.ring(step, STAGES)
  mbarrier.wait(rings.k_full.index(i), phase)
  return _scores(q, rings.k, i, TILE_N, HEAD)


@gluon.jit
def scale_at(ptr, tile, scales, only, BLOCKS: gl.constexpr):
  """A tile's scale."""
  if BLOCKS:
    only = gl.load(ptr + scales.first + gl.minimum(tile, scales.last_block))
  return only


@gluon.jit
def _step(acc, s, scale, m, norm, q, rings, step, tile, row0, seen, scales,
          TILE_N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr,
          WEIGHT_BITS: gl.constexpr, MASK: gl.constexpr, BLOCKS: gl.constexpr,
          NEXT: gl.constexpr):
  """Adds tile `tile`, whose products s are; with NEXT, returns the next's.

  Scales of blocks are asked for long before they are needed.
  """
  next_scale = scale
  if NEXT:
    next_scale = scale_at(scales.of_scores, tile - 1, scales, scale, BLOCKS)
  value_scale = scale_at(scales.of_values, tile, scales, 1.0, BLOCKS)
  e, m, alpha = exponentials(s, m, tile, row0, seen, scale, TILE_N,
                             WEIGHT_BITS, MASK)
  norm = norm * alpha + gl.sum(e, 1)
  p = weights(e, rings.k.dtype, TILE_N, HEAD)
  vi, v_phase = hopper.ring(step, STAGES)
  mbarrier.wait(rings.v_full.index(vi), v_phase)
  product = start_values(p, rings.v, vi, TILE_N, HEAD)
  # Under a mask there are no registers for both products at once.
  if NEXT and not MASK:
    s = next_scores(q, rings, step + 1, TILE_N, HEAD, STAGES)
    product = warpgroup_mma_wait(1, deps=[product])
  else:
    product = warpgroup_mma_wait(0, deps=[product])
  mbarrier.arrive(rings.v_empty.index(vi))
  if BLOCKS:
    product = product * value_scale
  acc = acc * rows_of(alpha, HEAD) + product
  if NEXT:
    if MASK:
      s = next_scores(q, rings, step + 1, TILE_N, HEAD, STAGES)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(rings.k_empty.index((step + 1) % STAGES))
  return acc, s, next_scale, m, norm


@gluon.jit
def _consume(w: gl.constexpr, args, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
             HEAD: gl.constexpr, STAGES: gl.constexpr,
             WEIGHT_BITS: gl.constexpr, BLOCKS: gl.constexpr):
  """Computes 64 query rows of every item: an online softmax over key tiles."""
  (out, lse, scales, v_scales, sinks, hdim_v, blocks, work, q_smem, k_smem,
   v_smem, barriers) = args
  rings = rings_of(q_smem, k_smem, v_smem, barriers, TILE_M // 64, STAGES)
  ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(TILE_N))
  done = 0
  items = 0
  for turn in range(_turns(work, TILE_M)):
    item = find(_number(turn), work, TILE_M, TILE_N, HEAD)
    tile_hi, steps = item.tile_hi, item.steps
    row0 = _anew(item.row0 + w * 64)
    seen = Seen(item.len_k - item.len_q, work.left, work.right, item.len_k)
    of_item = Scales(scales, v_scales, first_scale(item, work, blocks),
                     blocks - 1)
    acc = gl.zeros([64, HEAD], gl.float32, accumulator(HEAD))
    m = gl.full([64], float("-inf"), gl.float32, ROWS)
    norm = gl.zeros([64], gl.float32, ROWS)
    if steps > 0:
      scale = gl.load(scales + of_item.first
                      + gl.minimum(tile_hi - 1, of_item.last_block))
      slot = items % 2 * (TILE_M // 64) + w
      q = rings.q.index(slot).reshape([64, HEAD])
      mbarrier.wait(rings.q_full.index(slot), items // 2 & 1)
      s = next_scores(q, rings, done, TILE_N, HEAD, STAGES)
      s = warpgroup_mma_wait(0, deps=[s])
      mbarrier.arrive(rings.k_empty.index(done % STAGES))
      # Tiles that the diagonal or the end crosses, whole ones, then those that
      # the window's left edge crosses. After the last there is none to begin.
      last = steps - 1
      right = gl.minimum(gl.maximum(tile_hi - item.full_hi, 0), last)
      whole = gl.minimum(gl.maximum(tile_hi - item.full_lo, right), last)
      for step in range(0, right):
        acc, s, scale, m, norm = _step(
            acc, s, scale, m, norm, q, rings, done + step, tile_hi - 1 - step,
            row0, seen, of_item, TILE_N, HEAD, STAGES, WEIGHT_BITS, True,
            BLOCKS, True)
      for step in range(right, whole):
        acc, s, scale, m, norm = _step(
            acc, s, scale, m, norm, q, rings, done + step, tile_hi - 1 - step,
            row0, seen, of_item, TILE_N, HEAD, STAGES, WEIGHT_BITS, False,
            BLOCKS, True)
      for step in range(whole, last):
        acc, s, scale, m, norm = _step(
            acc, s, scale, m, norm, q, rings, done + step, tile_hi - 1 - step,
            row0, seen, of_item, TILE_N, HEAD, STAGES, WEIGHT_BITS, True,
            BLOCKS, True)
      mbarrier.arrive(rings.q_empty.index(slot))
      if (last < tile_hi - item.full_hi) | (last >= tile_hi - item.full_lo):
        acc, s, scale, m, norm = _step(
            acc, s, scale, m, norm, q, rings, done + last, tile_hi - steps,
            row0, seen, of_item, TILE_N, HEAD, STAGES, WEIGHT_BITS, True,
            BLOCKS, False)
      else:
        acc, s, scale, m, norm = _step(
            acc, s, scale, m, norm, q, rings, done + last, tile_hi - steps,
            row0, seen, of_item, TILE_N, HEAD, STAGES, WEIGHT_BITS, False,
            BLOCKS, False)
      done += steps
      items += 1

    finish(w, acc, m, norm, item, out, lse, v_scales, sinks, hdim_v, blocks,
           work, TILE_N, HEAD, WEIGHT_BITS, BLOCKS)


@gluon.jit
def _anew(x):
  """x, of which the compiler does not know what it was before."""
  return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32,
                                   False, 1)


@gluon.jit
def first_scale(item, work, blocks):
  """Where the scales of an item's keys begin."""
  index = gl.minimum(item.index, work.batch - 1)
  return (index * work.nhead_k + item.head_k) * blocks


@gluon.jit
def finish(w: gl.constexpr, acc, m, norm, item, out, lse, v_scales, sinks,
           hdim_v, blocks, work, TILE_N: gl.constexpr, HEAD: gl.constexpr,
           WEIGHT_BITS: gl.constexpr, BLOCKS: gl.constexpr):
  """Takes the sink into 64 rows, and stores them."""
  ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(TILE_N))
  value_scale = 1.0
  if not BLOCKS:
    value_scale = gl.load(v_scales + first_scale(item, work, blocks))
  # In units of 2^WEIGHT_BITS, as the exponentials are.
  m -= WEIGHT_BITS
  if ((work.flags & SINK) != 0) & (item.index < work.batch):
    logit = gl.load(sinks + item.index * work.nhead_q + item.head) * LOG2E
    m_new = gl.maximum(m, logit)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - shift)
    norm = norm * alpha + gl.exp2(logit - shift)
    acc = acc * rows_of(alpha, HEAD)
    m = m_new
  row0 = _anew(item.row0 + w * 64)
  rows = row0 + gl.arange(0, 64, ROWS)
  # A NaN is not 0, and shows.
  live = norm != 0.0
  inverse = value_scale / gl.where(live, norm, 1.0)
  inverse = gl.where(live, inverse, 0.0)
  value = gl.where(live, m * LN2 + gl.log(norm), float("-inf"))
  gl.store(lse + item.lse + rows, value, mask=rows < item.len_q)
  STORE: gl.constexpr = hopper.rows_layout(HEAD)
  acc = acc * rows_of(inverse, HEAD)
  result = gl.convert_layout(acc.to(out.dtype.element_ty), STORE)
  rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
  cols = gl.arange(0, HEAD, gl.SliceLayout(0, STORE))
  mask = (rows < item.len_q)[:, None] & (cols < hdim_v // 8 * 8)[None, :]
  stride_o = work.nhead_q * hdim_v
  out += item.first_q * stride_o + item.head * hdim_v
  gl.store(out + rows[:, None].to(gl.int64) * stride_o + cols[None, :], result,
           mask=mask)


def tensor_maps(function, constants):
  """TMA maps of the kernel, of views [batch, head, row, column]."""
  assert function == "mha_fp8_fwd", function
  head, tile_n = constants["HEAD"], constants["TILE_N"]
  return {
      "q_desc": TensorMap("q", (1, 1, 64, head), swizzle=min(head, 128)),
      "k_desc": TensorMap("k", (1, 1, tile_n, head), swizzle=min(head, 128)),
      "v_desc": TensorMap("v", (1, 1, head, tile_n), swizzle=min(tile_n, 128)),
  }


@gluon.jit
def mha_fp8_fwd(q_desc, k_desc, v_desc, out, lse, scales, v_scales, sinks,
                cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k, nhead_q,
                nhead_k, hdim_v, blocks, window_left, window_right,
                flags, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
                HEAD: gl.constexpr, STAGES: gl.constexpr,
                WEIGHT_BITS: gl.constexpr, BLOCKS: gl.constexpr):
  """Arguments are those of the plain kernel, but for the maps.

  A program takes every so many-th item, as many as there are programs.
  """
  WARPGROUPS: gl.constexpr = TILE_M // 64
  work = Work(cu_seqlens_q, cu_seqlens_k, batch, seqlen_q, seqlen_k, nhead_q,
              nhead_k, window_left, window_right, flags)
  q_smem = gl.allocate_shared_memory(
      q_desc.dtype, hopper.stack(2 * WARPGROUPS, q_desc.block_type.shape),
      q_desc.layout)
  k_smem = gl.allocate_shared_memory(
      k_desc.dtype, hopper.stack(STAGES, k_desc.block_type.shape),
      k_desc.layout)
  v_smem = gl.allocate_shared_memory(
      v_desc.dtype, hopper.stack(STAGES, v_desc.block_type.shape),
      v_desc.layout)
  barriers = mbarrier.allocate_mbarrier(batch=4 * WARPGROUPS + 4 * STAGES)
  rings = rings_of(q_smem, k_smem, v_smem, barriers, WARPGROUPS, STAGES)
  for w in gl.static_range(2 * WARPGROUPS):
    mbarrier.init(rings.q_full.index(w), count=1)
    mbarrier.init(rings.q_empty.index(w), count=1)
  for i in gl.static_range(STAGES):
    mbarrier.init(rings.k_full.index(i), count=1)
    mbarrier.init(rings.v_full.index(i), count=1)
    mbarrier.init(rings.k_empty.index(i), count=WARPGROUPS)
    mbarrier.init(rings.v_empty.index(i), count=WARPGROUPS)

  produce = q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, barriers, work
  consume = (out, lse, scales, v_scales, sinks, hdim_v, blocks, work, q_smem,
             k_smem, v_smem, barriers)
  gl.static_assert(WARPGROUPS == 2)
  gl.warp_specialize([
      (_consume, (0, consume, TILE_M, TILE_N, HEAD, STAGES, WEIGHT_BITS,
                  BLOCKS)),
      (_consume, (1, consume, TILE_M, TILE_N, HEAD, STAGES, WEIGHT_BITS,
                  BLOCKS)),
      (_produce, (produce, TILE_M, TILE_N, HEAD, STAGES)),
  ], [4, 1], [240, 24])
