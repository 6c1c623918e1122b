# SPDX-License-Identifier: Apache-2.0
"""Attention's gradients in one pass for Hopper (sm_90), in Gluon.

Five products a tile of scores where mha/bwd_hopper.py has seven. A block owns
128 keys of a query head: two warpgroups have dk and dv of 64 each in registers
and go through the tiles of rows. The score gradients of all 128 keys meet in
shared memory, and each warpgroup multiplies them with half of K's columns: its
part of a tile of dq. Parts go through shared memory to a warp that
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
from third_party.aiter.kernels.mha import (
    bwd_hopper,
    kept_hopper,
    scores,
    scores_hopper,
)
from third_party.aiter.kernels.mha_one_pass.family import FLAGS

ORDERED = tl.constexpr(FLAGS["ordered"])
KEPT = tl.constexpr(FLAGS["kept"])
TOP_LEFT = tl.constexpr(FLAGS["top_left"])
# Keys of a block, and what the rows of a head's sums are a multiple of.
KEYS = tl.constexpr(128)
# Rows of a tile and of a part of a sum; keys of a warpgroup.
SIDE = tl.constexpr(64)
# Heads whose blocks lie side by side in the grid: their tensors stay in the
# cache, and few of a head's blocks, which wait for each other, run at once.
HEADS_TOGETHER = tl.constexpr(8)

# One lane adds the bytes at $1 in shared memory to global memory, or stores
# them there if $3 says that they are the first.
_ADD = tl.constexpr("""{
  .reg .pred lane0, adds, stores;
  .reg .b32 lane;
  mov.u32 lane, %laneid;
  setp.eq.u32 lane0, lane, 0;
  setp.ne.and.s32 stores, $3, 0, lane0;
  setp.eq.and.s32 adds, $3, 0, lane0;
  @adds cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32
      [$0], [$1], $2;
  @stores cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;
  @lane0 cp.async.bulk.commit_group;
}""")
# One lane copies the bytes at $1 to shared memory, for the barrier $3.
_COPY = tl.constexpr("""{
  .reg .pred lane0;
  .reg .b32 lane;
  mov.u32 lane, %laneid;
  setp.eq.u32 lane0, lane, 0;
  @lane0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
      [$0], [$1], $2, [$3];
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
  kept: tl.tensor  # What dropout keeps, in words; they come and go with q.
  kv_full: tl.tensor
  q_full: tl.tensor
  q_empty: tl.tensor
  do_full: tl.tensor
  do_empty: tl.tensor
  ds_full: tl.tensor
  ds_empty: tl.tensor
  sums_full: tl.tensor
  sums_empty: tl.tensor
  tail: tl.tensor


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim]."""
  if function != "mha_one_pass_bwd":
    return {}
  assert constants["TILE_M"] == SIDE.value
  return {f"{name}_desc": TensorMap(name, (1, 1, SIDE.value, constants["DIM"]))
          for name in ("q", "k", "v", "do")}


@gluon.constexpr_function
def _part_layout(dim):
  """A part in the order of its accumulator's registers, 16 bytes a thread."""
  return gl.SharedLinearLayout(
      [[0, 1], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0],
       [32, 0], [8, 0], [0, 16]] + [[0, 32]] * (dim == 128))


def _tiles_of_rows(n0, off, left, right, len_q, len_k):
  """First and last + 1 of the tiles of rows that see a block of keys."""
  last_key = tl.minimum(n0 + KEYS, len_k) - 1
  low = tl.maximum(n0 - off - right, 0) // SIDE
  end = tl.maximum(tl.minimum(last_key - off + left + 1, len_q), 0)
  high = tl.maximum((end + SIDE - 1) // SIDE, low)
  return low, tl.where((n0 >= 0) & (n0 < len_k), high, low)


_tiles_of_rows_gluon = gluon.jit(_tiles_of_rows)
_tiles_of_rows = triton.jit(_tiles_of_rows)


@gluon.jit
def _load(buf, desc, batch, head, first_row, row0, end, tails, barrier, smem,
          DIM: gl.constexpr, LENGTHS: gl.constexpr):
  """Copies 64 rows of a sequence, from row0 on; arrives at `barrier` once.

  From row `end` on come zeros, not another sequence's rows: TMA has them past
  all rows alone, so the last tile becomes them here. tails: how many have.
  Returns how many have since.
  """
  left = end - row0
  if not LENGTHS or left >= SIDE:
    mbarrier.expect(barrier, desc.nbytes_per_cta)
    tma.async_load(desc, [batch, head, first_row + row0, 0], barrier, smem)
  else:
    CHUNK: gl.constexpr = 8  # What a swizzled tile can be divided into.
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // DIM, DIM // 8], [1, 1], [1, 0])
    mbarrier.expect(buf.tail, desc.nbytes_per_cta)
    tma.async_load(desc, [batch, head, first_row + row0, 0], buf.tail, smem)
    mbarrier.wait(buf.tail, tails & 1)
    tile = smem.reshape([SIDE, DIM])
    rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    for i in gl.static_range(SIDE // CHUNK):
      chunk = tile.slice(i * CHUNK, CHUNK)
      chunk.store(gl.where(rows < left - i * CHUNK, chunk.load(LAYOUT), 0.0))
    fence_async_shared()
    mbarrier.arrive(barrier)
    tails += 1
  return tails


@gluon.jit
def _produce(args, DIM: gl.constexpr, FEATURES: gl.constexpr,
             LENGTHS: gl.constexpr):
  """Copies K and V once, then Q, dO, lse and delta of every tile of rows."""
  (buf, q_desc, k_desc, v_desc, do_desc, lse, delta, nhead_stride_lse, slot_b,
   head, heads, head_k, q_row, k_row, q_end, k_end, n0, low, high, len_q,
   delta_scale, kept, stride_kept, nhead_stride_kept) = args
  ROWS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
  if high > low:
    tails = 0
    for w in gl.static_range(2):
      full = buf.kv_full.index(w)
      tails = _load(buf, k_desc, slot_b, head_k, k_row, n0 + w * SIDE, k_end,
                    tails, full, buf.k.index(w), DIM, LENGTHS)
      tails = _load(buf, v_desc, slot_b, head_k, k_row, n0 + w * SIDE, k_end,
                    tails, full, buf.v.index(w), DIM, LENGTHS)
    use = 0
    for step in range(high - low):
      row0 = (high - 1 - step) * SIDE
      rows = row0 + gl.arange(0, SIDE, ROWS)
      for g in range(heads):
        i, phase = hopper.ring(use, 2)
        q_full, do_full = buf.q_full.index(i), buf.do_full.index(i)
        at = g * nhead_stride_lse + rows
        lse_tile = gl.load(lse + at, mask=rows < len_q, other=float("-inf"))
        delta_tile = gl.load(delta + at, mask=rows < len_q, other=0.0)
        mbarrier.wait(buf.q_empty.index(i), phase ^ 1)
        tails = _load(buf, q_desc, slot_b, head + g, q_row, row0, q_end, tails,
                      q_full, buf.q.index(i), DIM, LENGTHS)
        if FEATURES & KEPT:
          BYTES: gl.constexpr = 2 * kept_hopper.WORDS * 4
          mbarrier.expect(q_full, BYTES)
          gl.inline_asm(_COPY, "r,l,n,r,~{memory}", [
              buf.kept.index(i * 2), kept + g * nhead_stride_kept +
              row0 // SIDE * stride_kept, BYTES, q_full])
        # +inf makes p zero for rows without any key and past the end.
        buf.lse.index(i).store(
            gl.where(lse_tile == float("-inf"), float("inf"),
                     lse_tile * scores.LOG2E))
        mbarrier.arrive(q_full)
        mbarrier.wait(buf.do_empty.index(i), phase ^ 1)
        tails = _load(buf, do_desc, slot_b, head + g, q_row, row0, q_end,
                      tails, do_full, buf.do.index(i), DIM, LENGTHS)
        buf.delta.index(i).store(delta_tile * delta_scale)
        mbarrier.arrive(do_full)
        use += 1


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
def _add(buf, use, sums, stride, is_first, DIM: gl.constexpr):
  """Adds the parts of both warpgroups to sums that lie `stride` apart."""
  for w in gl.static_range(2):
    mbarrier.wait(buf.sums_full.index(w), use & 1)
    gl.inline_asm(_ADD, "l,r,n,r,~{memory}", [
        sums + w * stride, buf.sums.index(w), SIDE * DIM * 2,
        is_first.to(gl.int32)])
  tma.store_wait(1)
  mbarrier.arrive(buf.sums_empty.index(0))
  tma.store_wait(0)
  mbarrier.arrive(buf.sums_empty.index(1))


@gluon.jit
def _sum(args, DIM: gl.constexpr):
  """Adds what the warpgroups hand over to the sums."""
  (buf, dq_sums, dk_sums, dv_sums, turns, kv_turns, heads, tiles, member,
   members, n0, low, high, window, ordered) = args
  PART: gl.constexpr = SIDE * DIM // 2
  use = 0
  for step in range(high - low):
    tile = high - 1 - step
    first = gl.maximum(tile * SIDE + window.off - window.left, 0) // KEYS
    turn = n0 // KEYS - first
    for g in range(heads):
      at = g * tiles + tile
      if ordered:
        _wait_for_turn(turns + at, turn)
      _add(buf, use, dq_sums + at.to(gl.int64) * (SIDE * DIM), PART,
           ordered & (turn == 0), DIM)
      if ordered:
        _pass_turn(turns + at)
      use += 1
  if members > 1:
    if ordered:
      _wait_for_turn(kv_turns, member)
    is_first = ordered & (member == 0)
    for i in gl.static_range(2):
      _add(buf, use + i, dv_sums + i * PART, SIDE * DIM, is_first, DIM)
    for i in gl.static_range(2):
      _add(buf, use + i, dk_sums + i * PART, SIDE * DIM, is_first, DIM)
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
def _hand_over_keys(acc, buf, use, w: gl.constexpr, DIM: gl.constexpr):
  """Hands a gradient of 64 keys over, in two parts."""
  LAYOUT: gl.constexpr = hopper.accumulator(DIM // 2)
  left, right = gl.split(acc.reshape([SIDE, 2, DIM // 2]).permute([0, 2, 1]))
  _hand_over(gl.convert_layout(left, LAYOUT), buf, use, w)
  _hand_over(gl.convert_layout(right, LAYOUT), buf, use + 1, w)


@gluon.jit
def _step(dk, dv, k, v, buf, use, row0, n0, keys, span, scale, heads, head,
          w: gl.constexpr, DIM: gl.constexpr, FEATURES: gl.constexpr):
  """Adds a tile of rows to dk and dv of 64 keys from n0 on, and to dq."""
  LAYOUT: gl.constexpr = hopper.accumulator(SIDE)
  ROWS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
  OPERAND: gl.constexpr = gl.DotOperandLayout(0, hopper.accumulator(DIM), 2)
  dtype: gl.constexpr = buf.q.dtype
  i, phase = use & 1, (use >> 1) & 1
  q = buf.q.index(i).reshape([SIDE, DIM])
  do = buf.do.index(i).reshape([SIDE, DIM])
  zero = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
  mbarrier.wait(buf.q_full.index(i), phase)
  s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
  mbarrier.wait(buf.do_full.index(i), phase)
  dp = warpgroup_mma(v, do.permute([1, 0]), zero, use_acc=False, is_async=True)
  keep = s
  if FEATURES & KEPT:
    keep = kept_hopper.keep_of_keys(buf.kept.index(i * 2 + w))
  elif FEATURES & scores.DROPOUT:
    keep = scores_hopper.keep_of_keys(
        scores_hopper.terms_of(heads, head, FEATURES), row0, n0, SIDE)
  s = warpgroup_mma_wait(1, deps=[s])
  p = gl.exp2(s * scale - buf.lse.index(i).load(ROWS)[None, :])
  # -left <= key - row <= right, as one comparison of unsigned numbers.
  diff = (keys - row0)[:, None] - gl.arange(0, SIDE, ROWS)[None, :]
  p = gl.where(diff.to(gl.uint32, bitcast=True) <= span, p, 0.0)
  weights = p
  if FEATURES & scores.DROPOUT:
    weights = gl.where(keep, p, 0.0)
  dv = warpgroup_mma(gl.convert_layout(weights.to(dtype), OPERAND), do, dv,
                     is_async=True)
  delta = buf.delta.index(i)
  # Dropout's factor is taken out of delta, and comes to the sums at the end.
  if FEATURES & scores.DROPOUT and DIM == SIDE:
    p *= delta.load(ROWS)[None, :]
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = weights * dp - p
  else:
    dp = warpgroup_mma_wait(1, deps=[dp])
    # A wide head dim has no registers for both products.
    if FEATURES & scores.DROPOUT:
      dp = gl.where(keep, dp, 0.0)
    ds = p * (dp - delta.load(ROWS)[None, :])
  ds = ds.to(dtype)
  mbarrier.wait(buf.ds_empty.index(i), phase ^ 1)
  buf.ds.index(i * 2 + w).store(ds)
  fence_async_shared()
  mbarrier.arrive(buf.ds_full.index(i))
  dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, dk, is_async=True)
  mbarrier.wait(buf.ds_full.index(i), phase)
  dq = gl.zeros([SIDE, DIM // 2], gl.float32, hopper.accumulator(DIM // 2))
  for half in gl.static_range(2):
    columns = buf.k.index(half).reshape([SIDE, DIM]).slice(
        w * (DIM // 2), DIM // 2, 1)
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
def _store(gradient, acc, factor, row0, length, row_end, DIM: gl.constexpr):
  """Stores acc * factor in rows from row0 to row_end; 0 from `length` on."""
  LAYOUT: gl.constexpr = hopper.rows_layout(DIM)
  acc = gl.convert_layout((acc * factor).to(gradient.base.dtype.element_ty),
                          LAYOUT)
  rows = row0 + gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
  gl.store(
      gradient.base + rows[:, None].to(gl.int64) * gradient.stride +
      cols[None, :], gl.where((rows < length)[:, None], acc, 0.0),
      mask=(rows < row_end)[:, None] & (cols < gradient.width)[None, :])


@gluon.jit
def _consume(w: gl.constexpr, args, DIM: gl.constexpr, FEATURES: gl.constexpr):
  """Computes dk and dv of 64 keys, and half of the block's parts of dq."""
  (buf, dk_out, dv_out, head, heads, members, n0, key_end, window, of_heads,
   low, high) = args
  LAYOUT: gl.constexpr = hopper.accumulator(DIM)
  dk = gl.zeros([SIDE, DIM], gl.float32, LAYOUT)
  dv = gl.zeros([SIDE, DIM], gl.float32, LAYOUT)
  n0 += w * SIDE
  count = (high - low) * heads
  if count > 0:
    span = (window.left + window.right).to(gl.uint32, bitcast=True)
    keys = n0 + gl.arange(0, SIDE, gl.SliceLayout(1, hopper.accumulator(SIDE)))
    # Of a key past the end no row is in the window: zeros are no score.
    keys = gl.where(keys < window.len_k, keys - window.off + window.left,
                    -(1 << 30))
    k = buf.k.index(w).reshape([SIDE, DIM])
    v = buf.v.index(w).reshape([SIDE, DIM])
    # Both warpgroups read all of K.
    mbarrier.wait(buf.kv_full.index(0), 0)
    mbarrier.wait(buf.kv_full.index(1), 0)
    # A narrow head dim leaves registers for both, so that shared memory has to
    # bring less; drawing needs them itself.
    if DIM == SIDE and not FEATURES & scores.DROPOUT:
      OF_KEYS: gl.constexpr = gl.DotOperandLayout(
          0, hopper.accumulator(SIDE), 2)
      k = k.load(OF_KEYS)
      v = v.load(OF_KEYS)
    row0 = (high - 1) * SIDE
    left = heads
    for use in range(count):
      dk, dv = _step(dk, dv, k, v, buf, use, row0, n0, keys, span,
                     of_heads.scale * scores.LOG2E, of_heads,
                     head + heads - left, w, DIM, FEATURES)
      left -= 1
      row0 = gl.where(left == 0, row0 - SIDE, row0)
      left = gl.where(left == 0, heads, left)
  if members == 1:
    factor = 1.0
    if FEATURES & scores.DROPOUT:
      factor = of_heads.rp_keep
    _store(dv_out, dv, factor, n0, window.len_k, key_end, DIM)
    _store(dk_out, dk, of_heads.scale * factor, n0, window.len_k, key_end, DIM)
  else:
    _hand_over_keys(dv, buf, count, w, DIM)
    _hand_over_keys(dk, buf, count, w, DIM)


@gluon.jit
def mha_one_pass_bwd(
    q_desc, k_desc, v_desc, do_desc,
    lse, delta, dk, dv, dq_sums, dk_sums, dv_sums, turns, dropout_state, kept,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_dk, nhead_stride_dk, batch_stride_dk,
    stride_dv, nhead_stride_dv, batch_stride_dv,
    nhead_stride_lse, batch_stride_lse,
    stride_kept, nhead_stride_kept, batch_stride_kept,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, heads_of_block,
    softmax_scale, drop_threshold, rp_keep, window_left, window_right,
    min_seqlen_q, flags,
    TILE_M: gl.constexpr, DIM: gl.constexpr, FEATURES: gl.constexpr,
    LENGTHS: gl.constexpr,
):
  """dk and dv of 128 keys of some query heads, and their part of dq, unscaled.

  A block's `heads_of_block` query heads share keys. Where these are all that
  do, dk and dv are written; otherwise added up, not scaled either.

  Heads have up to DIM columns, as many as queries, keys and values have. Sums
  are float32 [batch, heads, rows, DIM] with rows a multiple of 128; of a
  packed batch [heads, rows, DIM], and sequence i has the rows from
  128 (cu_seqlens[i] // 128 + i) on. A tile of 64 rows has its left and then its
  right half, each in the order of _part_layout. Sums begin with zeros but in
  order, where the first to come stores; counters of turns, of query heads'
  tiles of rows and then of kv heads' blocks of keys, do. Grid: (blocks of keys,
  blocks of query heads, batch), in an order of the kernel's own.
  """
  gl.static_assert(TILE_M == SIDE)
  if not LENGTHS:
    flags &= ~(scores.PACKED | scores.CU_SEQLENS_Q | scores.CU_SEQLENS_K |
               scores.CU_SEQLENS_Q_PADDED | scores.CU_SEQLENS_K_PADDED)
  blocks = gl.num_programs(0)
  head_blocks = nhead_q // heads_of_block
  all_blocks = head_blocks * gl.num_programs(2)
  block = gl.program_id(0) + blocks * (
      gl.program_id(1) + gl.num_programs(1) * gl.program_id(2))
  first = block // (blocks * HEADS_TOGETHER) * HEADS_TOGETHER
  together = gl.minimum(all_blocks - first, HEADS_TOGETHER)
  block -= first * blocks
  slot_n = block // together
  slot_b = (first + block % together) // head_blocks
  head = (first + block % together) % head_blocks * heads_of_block
  group = nhead_q // nhead_k
  head_k = head // group

  ordered = (flags & ORDERED) != 0
  packed = (flags & scores.PACKED) != 0
  index_b = slot_b
  tile_n = slot_n
  tiles = (seqlen_q + KEYS - 1) // KEYS * (KEYS // SIDE)
  q_tile = 0
  if packed:
    index_b, tile_n = scores_hopper.find_sequence(
        slot_n, cu_seqlens_k, batch, KEYS)
    tiles = (seqlen_q // KEYS + batch) * (KEYS // SIDE)
    # Held inside the scratch memory, whatever is read.
    place = gl.minimum(gl.maximum(gl.load(cu_seqlens_q + index_b), 0), seqlen_q)
    q_tile = (place // KEYS + index_b) * (KEYS // SIDE)
  q_row, k_row, window = bwd_hopper.extents(
      index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
      cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, window_left,
      window_right, 0, flags)
  key_end = seqlen_k
  if packed:
    # Without starts of their own sequences leave no rows but after the last.
    is_last = ((index_b == batch - 1) &
               ((flags & scores.CU_SEQLENS_K_PADDED) == 0))
    key_end = gl.where(is_last, seqlen_k - k_row, window.len_k)
  n0 = tile_n * KEYS
  low, high = _tiles_of_rows_gluon(n0, window.off, window_left, window_right,
                                   window.len_q, window.len_k)

  b = slot_b.to(gl.int64)
  first_row = b * batch_stride_lse + head * nhead_stride_lse + q_row
  dk += (b * batch_stride_dk + head_k * nhead_stride_dk +
         k_row.to(gl.int64) * stride_dk)
  dv += (b * batch_stride_dv + head_k * nhead_stride_dv +
         k_row.to(gl.int64) * stride_dv)
  q_tile += (slot_b * nhead_q + head) * tiles
  dq_sums += q_tile.to(gl.int64) * (SIDE * DIM)
  at = (slot_b * nhead_k + head_k) * blocks + slot_n
  dk_sums += at.to(gl.int64) * (KEYS * DIM)
  dv_sums += at.to(gl.int64) * (KEYS * DIM)
  kv_turns = turns + nhead_q * gl.num_programs(2) * tiles + at
  turns += q_tile

  TILES: gl.constexpr = hopper.stack(2, q_desc.block_type.shape)
  VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
  dtype: gl.constexpr = q_desc.dtype
  layout: gl.constexpr = q_desc.layout
  kept_smem = gl.to_tensor(0)
  if FEATURES & KEPT:
    kept_smem = kept_hopper.allocate(4)
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
      gl.allocate_shared_memory(gl.float32, [2, SIDE, DIM // 2],
                                _part_layout(DIM)),
      kept_smem,
      mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2),
      mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2),
      mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2),
      mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2),
      mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier())
  mbarrier.init(buf.tail, count=1)
  for i in gl.static_range(2):
    mbarrier.init(buf.kv_full.index(i), count=2)
    mbarrier.init(buf.sums_full.index(i), count=1)
    mbarrier.init(buf.sums_empty.index(i), count=1)
    # Two warpgroups; or a copy and what its producer stores beside it.
    mbarrier.init(buf.q_full.index(i), count=3 if FEATURES & KEPT else 2)
    mbarrier.init(buf.q_empty.index(i), count=2)
    mbarrier.init(buf.do_full.index(i), count=2)
    mbarrier.init(buf.do_empty.index(i), count=2)
    mbarrier.init(buf.ds_full.index(i), count=2)
    mbarrier.init(buf.ds_empty.index(i), count=2)

  q_end = gl.where((flags & (scores.PACKED | scores.CU_SEQLENS_Q)) != 0,
                   window.len_q, 1 << 30)
  k_end = gl.where((flags & (scores.PACKED | scores.CU_SEQLENS_K)) != 0,
                   window.len_k, 1 << 30)
  produce = (buf, q_desc, k_desc, v_desc, do_desc, lse + first_row,
             delta + first_row, nhead_stride_lse, slot_b, head, heads_of_block,
             head_k, q_row, k_row, q_end, k_end, n0, low, high, window.len_q,
             1.0 / rp_keep,
             kept + (b * batch_stride_kept + head * nhead_stride_kept +
                     tile_n * (2 * kept_hopper.WORDS)), stride_kept,
             nhead_stride_kept)
  members = group // heads_of_block
  # Nothing but dropout: of the rest any pointer will do.
  heads = scores_hopper.heads_of(
      index_b, nhead_q, dk, dk, 0, 0, 0, 0, dk, 0, 0, 0, 0, dk, dropout_state,
      softmax_scale, 0.0, drop_threshold, rp_keep, flags, FEATURES)
  consume = (buf, bwd_hopper.Matrix(dk, stride_dk, nhead_stride_dk, hdim_q),
             bwd_hopper.Matrix(dv, stride_dv, nhead_stride_dv, hdim_q), head,
             heads_of_block, members, n0, key_end, window, heads, low, high)
  add = (buf, dq_sums, dk_sums, dv_sums, turns, kv_turns, heads_of_block, tiles,
         head % group // heads_of_block, members, n0, low, high, window,
         ordered)
  gl.warp_specialize([
      (_consume, (0, consume, DIM, FEATURES)),
      (_consume, (1, consume, DIM, FEATURES)),
      (_produce, (produce, DIM, FEATURES, LENGTHS)), (_sum, (add, DIM)),
  ], [4, 1, 1], [240, 24, 24])


@triton.jit
def mha_one_pass_round(
    dq_sums, dq, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
    cu_seqlens_k_padded, stride_dq, nhead_stride_dq, batch_stride_dq, batch,
    seqlen_q, seqlen_k, hdim_q, softmax_scale, window_left, window_right,
    min_seqlen_q, flags, TILE_M: tl.constexpr, DIM: tl.constexpr,
):
  """A gradient, of its own type, from sums: zeros where nothing is added.

  Grid: (tiles, heads, batch).
  """
  tl.static_assert(TILE_M == SIDE)
  slot = tl.program_id(0)
  head = tl.program_id(1)
  slot_b = tl.program_id(2)
  index_b = slot_b
  tile = slot
  padded = (seqlen_q + KEYS - 1) // KEYS * KEYS
  if flags & scores.PACKED:
    index_b, tile = scores.find_sequence(
        slot // (KEYS // SIDE), cu_seqlens_q, batch, KEYS)
    tile = tile * (KEYS // SIDE) + slot % (KEYS // SIDE)
    padded = (seqlen_q // KEYS + batch) * KEYS
  seq = scores.sequence_of(
      index_b, cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
      cu_seqlens_k_padded, seqlen_q, seqlen_k, min_seqlen_q, flags)
  row0 = tile * SIDE
  dq += slot_b.to(tl.int64) * batch_stride_dq + head * nhead_stride_dq
  rows = tl.arange(0, SIDE)
  cols = tl.arange(0, DIM)[None, :]
  q_rows = seq.q_rows
  # Without starts of their own sequences leave no rows but after the last.
  if (flags & (scores.PACKED | scores.CU_SEQLENS_Q_PADDED)) == scores.PACKED:
    if index_b == batch - 1:
      q_rows = seqlen_q - seq.q_start
  if (row0 >= 0) & (row0 < q_rows):
    off = scores.offset_of(seq, flags)
    # The first block of keys that any of these rows may see.
    n0 = tl.maximum(row0 + off - window_left, 0) // KEYS * KEYS
    low, high = _tiles_of_rows(n0, off, window_left, window_right, seq.len_q,
                               seq.len_k)
    is_there = (tile >= low) & (tile < high)
    first = ((slot_b * tl.num_programs(1) + head).to(tl.int64) * padded +
             slot * SIDE)
    sums = dq_sums + first * DIM + tl.arange(0, SIDE * DIM)
    x = tl.load(sums, mask=is_there, other=0.0)
    # Bits of columns from 4 on, of rows 3, 5, 4, 2 to 0, columns 2, 1, 3, 0.
    x = x.reshape([DIM // 16, 2, 4, 8, 4, 2, 2]).permute([2, 1, 3, 0, 5, 4, 6])
    x = x.reshape([SIDE, DIM])
    rows += row0
    x = tl.where((rows < seq.len_q)[:, None], x * softmax_scale, 0.0)
    at = (seq.q_start + rows).to(tl.int64)[:, None] * stride_dq + cols
    tl.store(dq + at, x.to(dq.dtype.element_ty),
             mask=(rows < q_rows)[:, None] & (cols < hdim_q))
