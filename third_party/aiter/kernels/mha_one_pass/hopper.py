# SPDX-License-Identifier: Apache-2.0
"""Attention's gradients in one pass for Hopper (sm_90), in Gluon.

Five products a tile of scores where mha/bwd_hopper.py has seven. A block owns
128 keys of a query head: two warpgroups have dk and dv of 64 each in registers
and go through the tiles of rows. The score gradients of all 128 keys meet in
shared memory, and each warpgroup multiplies them with half of K's columns: its
part of a tile of dq, 64 by 64. Parts go through shared memory to a warp that
adds them to float32 sums in global memory by TMA's reduction, as
FlashAttention 3 does. dk and dv of heads that share keys are added up likewise.

Sums have many owners. Where the order of additions must be the same in every
run, each tile has a counter, and that warp adds when its block's turn has come.
Blocks start in the order of their keys and go through the rows from the last to
the first, so that a block follows close behind the one that it waits for, under
a causal mask too, where those of the first keys see most rows; and nobody waits
for a block that starts later.
"""

from typing import NamedTuple

import triton
import triton.language as tl
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
from third_party.aiter.kernels.mha import bwd_hopper, scores, scores_hopper
from third_party.aiter.kernels.mha_one_pass.family import FEATURES

ORDERED = tl.constexpr(FEATURES["ordered"])
TOP_LEFT = tl.constexpr(FEATURES["top_left"])
# Keys of a block, and what the rows of a head's sums are a multiple of.
KEYS = tl.constexpr(128)
# Rows of a tile; keys of a warpgroup; rows and columns of a part of a sum.
SIDE = tl.constexpr(64)
HEAD = tl.constexpr(128)
# Heads whose blocks lie side by side in the grid: their tensors stay in the
# cache, and few of a head's blocks, which wait for each other, run at once.
HEADS_TOGETHER = tl.constexpr(8)

# One lane adds the bytes at $1 in shared memory to global memory.
_ADD = tl.constexpr("""{
  .reg .pred first;
  .reg .b32 lane;
  mov.u32 lane, %laneid;
  setp.eq.u32 first, lane, 0;
  @first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32
      [$0], [$1], $2;
  @first cp.async.bulk.commit_group;
}""")
# Between what TMA did and what other threads learn of it.
_FENCE = tl.constexpr("fence.proxy.async.global;")


class Buffers(NamedTuple):
  """Shared memory and its barriers; two tiles of what belongs to rows."""
  q: tl.tensor
  do: tl.tensor
  k: tl.tensor
  v: tl.tensor
  lse: tl.tensor
  delta: tl.tensor
  ds: tl.tensor  # Score gradients [64 keys, 64 rows], of two warpgroups each.
  sums: tl.tensor  # A part for each warpgroup.
  kv_full: tl.tensor
  q_full: tl.tensor
  q_empty: tl.tensor
  do_full: tl.tensor
  do_empty: tl.tensor
  ds_full: tl.tensor
  ds_empty: tl.tensor
  sums_full: tl.tensor
  sums_empty: tl.tensor


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim]."""
  if function != "mha_one_pass_bwd":
    return {}
  assert (constants["TILE_M"], constants["DIM"]) == (SIDE.value, HEAD.value)
  return {f"{name}_desc": TensorMap(name, (1, 1, SIDE.value, HEAD.value))
          for name in ("q", "k", "v", "do")}


@gluon.constexpr_function
def _part_layout():
  """A part in the order of its accumulator's registers, 16 bytes a thread."""
  return gl.SharedLinearLayout(
      [[0, 1], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0],
       [32, 0], [8, 0], [0, 16], [0, 32]])


@gluon.jit
def _produce(args):
  """Copies K and V once, then Q, dO, lse and delta of every tile of rows."""
  (buf, q_desc, k_desc, v_desc, do_desc, lse, delta, index_b, head, head_k, n0,
   low, high, len_q) = args
  ROWS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
  if high > low:
    for w in gl.static_range(2):
      full = buf.kv_full.index(w)
      mbarrier.expect(full, k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
      tma.async_load(k_desc, [index_b, head_k, n0 + w * SIDE, 0], full,
                     buf.k.index(w))
      tma.async_load(v_desc, [index_b, head_k, n0 + w * SIDE, 0], full,
                     buf.v.index(w))
    for use in range(high - low):
      row0 = (high - 1 - use) * SIDE
      i, phase = hopper.ring(use, 2)
      q_full, do_full = buf.q_full.index(i), buf.do_full.index(i)
      rows = row0 + gl.arange(0, SIDE, ROWS)
      lse_tile = gl.load(lse + rows, mask=rows < len_q, other=float("-inf"))
      delta_tile = gl.load(delta + rows, mask=rows < len_q, other=0.0)
      mbarrier.wait(buf.q_empty.index(i), phase ^ 1)
      mbarrier.expect(q_full, q_desc.nbytes_per_cta)
      tma.async_load(q_desc, [index_b, head, row0, 0], q_full, buf.q.index(i))
      # +inf makes p zero for rows without any key and past the end.
      buf.lse.index(i).store(
          gl.where(lse_tile == float("-inf"), float("inf"),
                   lse_tile * scores.LOG2E))
      mbarrier.arrive(q_full)
      mbarrier.wait(buf.do_empty.index(i), phase ^ 1)
      mbarrier.expect(do_full, do_desc.nbytes_per_cta)
      tma.async_load(do_desc, [index_b, head, row0, 0], do_full,
                     buf.do.index(i))
      buf.delta.index(i).store(delta_tile)
      mbarrier.arrive(do_full)


@gluon.jit
def _wait_for_turn(turns, turn):
  """Waits until a tile's counter says that it is this block's turn."""
  while gl.atomic_add(turns, 0, sem="acquire", scope="gpu") < turn:
    pass


@gluon.jit
def _pass_turn(turns):
  """Lets the next block add, as soon as this one's additions are made."""
  tma.store_wait(0, read_only=False)
  gl.inline_asm(_FENCE, "~{memory}", [])
  gl.atomic_add(turns, 1, sem="release", scope="gpu")


@gluon.jit
def _add(buf, use, sums, stride):
  """Adds the parts of both warpgroups to sums that lie `stride` apart."""
  for w in gl.static_range(2):
    mbarrier.wait(buf.sums_full.index(w), use & 1)
    gl.inline_asm(_ADD, "l,r,n,~{memory}", [
        sums + w * stride, buf.sums.index(w), SIDE * SIDE * 4])
  tma.store_wait(1)
  mbarrier.arrive(buf.sums_empty.index(0))
  tma.store_wait(0)
  mbarrier.arrive(buf.sums_empty.index(1))


@gluon.jit
def _sum(args):
  """Adds what the warpgroups hand over to the sums."""
  (buf, dq_sums, dk_sums, dv_sums, turns, kv_turns, member, group, n0, low,
   high, window, ordered) = args
  PART: gl.constexpr = SIDE * SIDE
  for use in range(high - low):
    tile = high - 1 - use
    if ordered:
      first = gl.maximum(tile * SIDE + window.off - window.left, 0) // KEYS
      _wait_for_turn(turns + tile, n0 // KEYS - first)
    _add(buf, use, dq_sums + tile.to(gl.int64) * (SIDE * HEAD), PART)
    if ordered:
      _pass_turn(turns + tile)
  if (group > 1) & (high > low):
    if ordered:
      _wait_for_turn(kv_turns, member)
    for i in gl.static_range(2):
      _add(buf, high - low + i, dv_sums + i * PART, SIDE * HEAD)
    for i in gl.static_range(2):
      _add(buf, high - low + i, dk_sums + i * PART, SIDE * HEAD)
    if ordered:
      _pass_turn(kv_turns)


@gluon.jit
def _hand_over(part, buf, use, w: gl.constexpr):
  """Hands a part of a sum to the warp that adds."""
  mbarrier.wait(buf.sums_empty.index(w), (use & 1) ^ 1)
  buf.sums.index(w).store(part)
  fence_async_shared()
  mbarrier.arrive(buf.sums_full.index(w))


@gluon.jit
def _hand_over_keys(acc, buf, use, w: gl.constexpr):
  """Hands a gradient of 64 keys over, in two parts."""
  LAYOUT: gl.constexpr = hopper.accumulator(SIDE)
  left, right = gl.split(acc.reshape([SIDE, 2, SIDE]).permute([0, 2, 1]))
  _hand_over(gl.convert_layout(left, LAYOUT), buf, use, w)
  _hand_over(gl.convert_layout(right, LAYOUT), buf, use + 1, w)


@gluon.jit
def _step(dk, dv, k, v, buf, use, row0, keys, span, scale, w: gl.constexpr):
  """Adds a tile of rows to dk and dv of 64 keys, and to dq."""
  LAYOUT: gl.constexpr = hopper.accumulator(SIDE)
  ROWS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
  OPERAND: gl.constexpr = gl.DotOperandLayout(0, hopper.accumulator(HEAD), 2)
  dtype: gl.constexpr = buf.q.dtype
  i, phase = use & 1, (use >> 1) & 1
  q = buf.q.index(i).reshape([SIDE, HEAD])
  do = buf.do.index(i).reshape([SIDE, HEAD])
  zero = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
  mbarrier.wait(buf.q_full.index(i), phase)
  s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
  mbarrier.wait(buf.do_full.index(i), phase)
  dp = warpgroup_mma(v, do.permute([1, 0]), zero, use_acc=False, is_async=True)
  s = warpgroup_mma_wait(1, deps=[s])
  p = gl.exp2(s * scale - buf.lse.index(i).load(ROWS)[None, :])
  # -left <= key - row <= right, as one comparison of unsigned numbers.
  diff = (keys - row0)[:, None] - gl.arange(0, SIDE, ROWS)[None, :]
  p = gl.where(diff.to(gl.uint32, bitcast=True) <= span, p, 0.0)
  dv = warpgroup_mma(gl.convert_layout(p.to(dtype), OPERAND), do, dv,
                     is_async=True)
  dp = warpgroup_mma_wait(1, deps=[dp])
  ds = (p * (dp - buf.delta.index(i).load(ROWS)[None, :])).to(dtype)
  mbarrier.wait(buf.ds_empty.index(i), phase ^ 1)
  buf.ds.index(i * 2 + w).store(ds)
  fence_async_shared()
  mbarrier.arrive(buf.ds_full.index(i))
  dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, dk, is_async=True)
  mbarrier.wait(buf.ds_full.index(i), phase)
  dq = zero
  for half in gl.static_range(2):
    columns = buf.k.index(half).reshape([SIDE, HEAD]).slice(w * SIDE, SIDE, 1)
    dq = warpgroup_mma(buf.ds.index(i * 2 + half).permute([1, 0]), columns, dq,
                       use_acc=half > 0, is_async=True)
  dv = warpgroup_mma_wait(3, deps=[dv])
  mbarrier.arrive(buf.do_empty.index(i))
  dk = warpgroup_mma_wait(2, deps=[dk])
  mbarrier.arrive(buf.q_empty.index(i))
  dq = warpgroup_mma_wait(0, deps=[dq])
  mbarrier.arrive(buf.ds_empty.index(i))
  _hand_over(dq, buf, use, w)
  return dk, dv


@gluon.jit
def _store(gradient, acc, factor, row0, length):
  """Stores acc * factor in the rows before `length`."""
  LAYOUT: gl.constexpr = hopper.rows_layout(HEAD)
  acc = gl.convert_layout((acc * factor).to(gradient.base.dtype.element_ty),
                          LAYOUT)
  rows = row0 + gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, HEAD, gl.SliceLayout(0, LAYOUT))
  gl.store(
      gradient.base + rows[:, None].to(gl.int64) * gradient.stride +
      cols[None, :], acc, mask=(rows < length)[:, None])


@gluon.jit
def _consume(w: gl.constexpr, args):
  """Computes dk and dv of 64 keys, and half of the block's parts of dq."""
  (buf, dk_out, dv_out, group, n0, window, scale, low, high) = args
  LAYOUT: gl.constexpr = hopper.accumulator(HEAD)
  dk = gl.zeros([SIDE, HEAD], gl.float32, LAYOUT)
  dv = gl.zeros([SIDE, HEAD], gl.float32, LAYOUT)
  n0 += w * SIDE
  count = high - low
  if count > 0:
    span = (window.left + window.right).to(gl.uint32, bitcast=True)
    keys = n0 + gl.arange(0, SIDE, gl.SliceLayout(1, hopper.accumulator(SIDE)))
    # Of a key past the end no row is in the window: zeros are no score.
    keys = gl.where(keys < window.len_k, keys - window.off + window.left,
                    -(1 << 30))
    k = buf.k.index(w).reshape([SIDE, HEAD])
    v = buf.v.index(w).reshape([SIDE, HEAD])
    # Both warpgroups read all of K.
    mbarrier.wait(buf.kv_full.index(0), 0)
    mbarrier.wait(buf.kv_full.index(1), 0)
    row0 = (high - 1) * SIDE
    for use in range(count):
      dk, dv = _step(dk, dv, k, v, buf, use, row0, keys, span,
                     scale * scores.LOG2E, w)
      row0 -= SIDE
  if (group == 1) | (count == 0):
    _store(dv_out, dv, 1.0, n0, window.len_k)
    _store(dk_out, dk, scale, n0, window.len_k)
  else:
    _hand_over_keys(dv, buf, count, w)
    _hand_over_keys(dk, buf, count, w)


@gluon.jit
def mha_one_pass_bwd(
    q_desc, k_desc, v_desc, do_desc,
    lse, delta, dk, dv, dq_sums, dk_sums, dv_sums, turns,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    seqlen_q, seqlen_k, nhead_q, nhead_k,
    softmax_scale, window_left, window_right, flags,
    TILE_M: gl.constexpr, DIM: gl.constexpr,
):
  """dk and dv of 128 keys of one query head, and its part of dq, unscaled.

  Sums, float32 [batch, heads, rows, 128] with rows a multiple of 128, and the
  counters of turns, of query heads' tiles of rows and then of kv heads' blocks
  of keys, begin with zeros. dk and dv are written where heads share no keys; of
  others what is added up is not scaled either. A tile of 64 rows of a sum has
  its left and then its right half, each in the order of _part_layout. Grid:
  (blocks of keys, query heads, batch), in an order of the kernel's own.
  """
  gl.static_assert(TILE_M == SIDE)
  gl.static_assert(DIM == HEAD)
  blocks = gl.num_programs(0)
  all_heads = gl.num_programs(1) * gl.num_programs(2)
  block = gl.program_id(0) + blocks * (
      gl.program_id(1) + gl.num_programs(1) * gl.program_id(2))
  first = block // (blocks * HEADS_TOGETHER) * HEADS_TOGETHER
  together = gl.minimum(all_heads - first, HEADS_TOGETHER)
  block -= first * blocks
  n0 = block // together * KEYS
  flat_head = first + block % together
  index_b = flat_head // nhead_q
  head = flat_head % nhead_q
  group = nhead_q // nhead_k
  head_k = head // group

  off = gl.where((flags & TOP_LEFT) != 0, 0, seqlen_k - seqlen_q)
  window = scores_hopper.Window(off, window_left, window_right, 0, seqlen_q,
                                seqlen_k)
  row_low = gl.maximum(n0 - off - window_right, 0)
  last_key = gl.minimum(n0 + KEYS, seqlen_k) - 1
  row_high = gl.minimum(last_key - off + window_left + 1, seqlen_q)
  low = row_low // SIDE
  high = (gl.maximum(row_high, 0) + SIDE - 1) // SIDE
  high = gl.maximum(high, low)

  b = index_b.to(gl.int64)
  lse += b * batch_stride_lse + head * nhead_stride_lse
  delta += b * batch_stride_lse + head * nhead_stride_lse
  dk += b * batch_stride_dk + head_k * nhead_stride_dk
  dv += b * batch_stride_dv + head_k * nhead_stride_dv
  tiles = (seqlen_q + KEYS - 1) // KEYS * (KEYS // SIDE)
  dq_sums += flat_head.to(gl.int64) * tiles * (SIDE * HEAD)
  at = (index_b * nhead_k + head_k) * blocks + n0 // KEYS
  dk_sums += at.to(gl.int64) * (KEYS * HEAD)
  dv_sums += at.to(gl.int64) * (KEYS * HEAD)
  kv_turns = turns + all_heads * tiles + at
  turns += flat_head * tiles

  TILES: gl.constexpr = hopper.stack(2, q_desc.block_type.shape)
  VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
  dtype: gl.constexpr = q_desc.dtype
  layout: gl.constexpr = q_desc.layout
  buf = Buffers(
      gl.allocate_shared_memory(dtype, TILES, layout),
      gl.allocate_shared_memory(dtype, TILES, layout),
      gl.allocate_shared_memory(dtype, TILES, layout),
      gl.allocate_shared_memory(dtype, TILES, layout),
      gl.allocate_shared_memory(gl.float32, [2, SIDE], VECTOR),
      gl.allocate_shared_memory(gl.float32, [2, SIDE], VECTOR),
      gl.allocate_shared_memory(
          dtype, [4, SIDE, SIDE],
          gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)),
      gl.allocate_shared_memory(gl.float32, [2, SIDE, SIDE], _part_layout()),
      mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2),
      mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2),
      mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2),
      mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2),
      mbarrier.allocate_mbarrier(batch=2))
  for i in gl.static_range(2):
    mbarrier.init(buf.kv_full.index(i), count=1)
    mbarrier.init(buf.sums_full.index(i), count=1)
    mbarrier.init(buf.sums_empty.index(i), count=1)
    # Two warpgroups; or a copy and what its producer stores beside it.
    mbarrier.init(buf.q_full.index(i), count=2)
    mbarrier.init(buf.q_empty.index(i), count=2)
    mbarrier.init(buf.do_full.index(i), count=2)
    mbarrier.init(buf.do_empty.index(i), count=2)
    mbarrier.init(buf.ds_full.index(i), count=2)
    mbarrier.init(buf.ds_empty.index(i), count=2)

  produce = (buf, q_desc, k_desc, v_desc, do_desc, lse, delta, index_b, head,
             head_k, n0, low, high, seqlen_q)
  consume = (buf, bwd_hopper.Matrix(dk, stride_dk, nhead_stride_dk, HEAD),
             bwd_hopper.Matrix(dv, stride_dv, nhead_stride_dv, HEAD), group,
             n0, window, softmax_scale, low, high)
  add = (buf, dq_sums, dk_sums, dv_sums, turns, kv_turns, head % group, group,
         n0, low, high, window, (flags & ORDERED) != 0)
  gl.warp_specialize([
      (_consume, (0, consume)), (_consume, (1, consume)),
      (_produce, (produce,)), (_sum, (add,)),
  ], [4, 1, 1], [240, 24, 24])


@triton.jit
def mha_one_pass_round(
    dq_sums, dq, stride_dq, nhead_stride_dq, batch_stride_dq, seqlen_q,
    softmax_scale, TILE_M: tl.constexpr, DIM: tl.constexpr,
):
  """A gradient, of its own type, from sums. Grid: (tiles, heads, batch)."""
  tl.static_assert(TILE_M == SIDE)
  tl.static_assert(DIM == HEAD)
  tile = tl.program_id(0)
  head = tl.program_id(1)
  b = tl.program_id(2)
  padded = (seqlen_q + KEYS - 1) // KEYS * KEYS
  first = (b * tl.num_programs(1) + head).to(tl.int64) * padded + tile * SIDE
  x = tl.load(dq_sums + first * HEAD + tl.arange(0, SIDE * HEAD))
  # Bits of columns 6 to 4, of rows 3, 5, 4, 2 to 0, of columns 2, 1, 3, 0.
  x = x.reshape([8, 2, 4, 8, 4, 2, 2]).permute([2, 1, 3, 0, 5, 4, 6])
  x = x.reshape([SIDE, HEAD])
  rows = tile * SIDE + tl.arange(0, SIDE)
  dq += b.to(tl.int64) * batch_stride_dq + head * nhead_stride_dq
  at = rows.to(tl.int64)[:, None] * stride_dq + tl.arange(0, HEAD)[None, :]
  tl.store(dq + at, (x * softmax_scale).to(dq.dtype.element_ty),
           mask=(rows < seqlen_q)[:, None])
