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

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import scores_hopper
from third_party.aiter.kernels.mha_fp8 import fwd

PACKED = fwd.PACKED
SINK = fwd.SINK
LN2 = fwd.LN2
LOG2E = fwd.LOG2E
find_sequence = scores_hopper.find_sequence
first_column = gluon.jit(fwd.first_column.fn)
extent = gluon.jit(fwd.extent.fn)


class Keys(NamedTuple):
  """Rings of key and value tiles and their barriers."""
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
  """Where a head's scales are: of scores, in powers of two, and of values."""
  of_scores: tl.tensor
  of_values: tl.tensor
  last_block: tl.tensor


@gluon.constexpr_function
def _accumulator(n):
  """The layout of a warpgroup's 64 x n sums of float8 products."""
  return gl.NVMMADistributedLayout(
      version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 32])


@gluon.jit
def _produce(args, TILE_N: gl.constexpr, STAGES: gl.constexpr,
             WARPGROUPS: gl.constexpr):
  """Copies Q once, then the K and V tile of every step, the last tile first."""
  (q_desc, k_desc, v_desc, q_smem, q_full, keys, slot_b, head, head_k, q_row,
   k_row, v_col, tile_hi, steps) = args
  if steps > 0:
    for w in gl.static_range(WARPGROUPS):
      mbarrier.expect(q_full.index(w), q_desc.nbytes_per_cta)
      tma.async_load(q_desc, [slot_b, head, q_row + w * 64, 0],
                     q_full.index(w), q_smem.index(w))
    for step in range(steps):
      key = (tile_hi - 1 - step) * TILE_N
      i, phase = hopper.ring(step, STAGES)
      mbarrier.wait(keys.k_empty.index(i), phase ^ 1)
      mbarrier.expect(keys.k_full.index(i), k_desc.nbytes_per_cta)
      tma.async_load(k_desc, [slot_b, head_k, k_row + key, 0],
                     keys.k_full.index(i), keys.k.index(i))
      mbarrier.wait(keys.v_empty.index(i), phase ^ 1)
      mbarrier.expect(keys.v_full.index(i), v_desc.nbytes_per_cta)
      tma.async_load(v_desc, [slot_b, head_k, 0, v_col + key],
                     keys.v_full.index(i), keys.v.index(i))


@gluon.jit
def _scores(q, k_smem, i, TILE_N: gl.constexpr, HEAD: gl.constexpr):
  """Starts q k^T of 64 rows and a tile of keys."""
  k = k_smem.index(i).reshape([TILE_N, HEAD])
  zero = gl.zeros([64, TILE_N], gl.float32, _accumulator(TILE_N))
  return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False,
                       is_async=True)


@gluon.jit
def _values(p, v_smem, i, TILE_N: gl.constexpr, HEAD: gl.constexpr):
  """Starts p v of 64 rows and a tile of keys."""
  v = v_smem.index(i).reshape([HEAD, TILE_N])
  zero = gl.zeros([64, HEAD], gl.float32, _accumulator(HEAD))
  return warpgroup_mma(p, v.permute([1, 0]), zero, use_acc=False,
                       is_async=True)


@gluon.jit
def _exponentials(s, m, tile, row0, seen, scale, TILE_N: gl.constexpr,
                  WEIGHT_BITS: gl.constexpr, MASK: gl.constexpr):
  """Takes a tile's products into the running maximum.

  Returns:
    (exponentials times 2^WEIGHT_BITS, new maximum, factor of what was summed
    before).
  """
  LAYOUT: gl.constexpr = _accumulator(TILE_N)
  if MASK:
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    cols = tile * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(0, LAYOUT))
    ahead = cols[None, :] - (rows + seen.off)
    shown = (ahead >= -seen.left) & (ahead <= seen.right)
    s = gl.where(shown & (cols[None, :] < seen.len_k), s, float("-inf"))
  m_new = gl.maximum(m, gl.max(s, 1) * scale)
  shift = m_new - WEIGHT_BITS
  if MASK:
    # A row that has seen no key yet: anything finite keeps the NaN away.
    shift = gl.where(m_new == float("-inf"), 0.0, shift)
  alpha = gl.exp2(m - WEIGHT_BITS - shift)
  return gl.exp2(s * scale - shift[:, None]), m_new, alpha


@gluon.jit
def _weights(e, dtype: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr):
  """Exponentials as the left operand of a product: no thread gives one away.

  In each 16 columns a thread has 2t, 2t + 1, 2t + 8 and 2t + 9, and as an
  operand 4t to 4t + 3, which is what it has by another name.
  """
  e = e.reshape([64, TILE_N // 16, 2, 4, 2])
  e = e.permute([0, 1, 3, 2, 4]).reshape([64, TILE_N])
  e = gl.convert_layout(
      e, gl.DotOperandLayout(0, _accumulator(HEAD), 4), assert_trivial=True)
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
def _rows_of(t, HEAD: gl.constexpr):
  """Numbers of rows as an accumulator's of HEAD columns."""
  return gl.convert_layout(t, gl.SliceLayout(1, _accumulator(HEAD)))[:, None]


@gluon.jit
def _next_scores(q, keys, step, TILE_N: gl.constexpr, HEAD: gl.constexpr,
                 STAGES: gl.constexpr):
  """Starts the products of a step's keys."""
  i, phase = hopper.ring(step, STAGES)
  mbarrier.wait(keys.k_full.index(i), phase)
  return _scores(q, keys.k, i, TILE_N, HEAD)


@gluon.jit
def _scale_at(ptr, tile, scales, only, BLOCKS: gl.constexpr):
  """A tile's scale."""
  if BLOCKS:
    only = gl.load(ptr + gl.minimum(tile, scales.last_block))
  return only


@gluon.jit
def _step(acc, s, scale, m, norm, q, keys, step, tile, row0, seen, scales,
          TILE_N: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr,
          WEIGHT_BITS: gl.constexpr, MASK: gl.constexpr, BLOCKS: gl.constexpr,
          NEXT: gl.constexpr):
  """Adds tile `tile`, whose products s are; with NEXT, returns the next's.

  Scales of blocks are asked for long before they are needed.
  """
  next_scale = scale
  if NEXT:
    next_scale = _scale_at(scales.of_scores, tile - 1, scales, scale, BLOCKS)
  value_scale = _scale_at(scales.of_values, tile, scales, 1.0, BLOCKS)
  e, m, alpha = _exponentials(s, m, tile, row0, seen, scale, TILE_N,
                              WEIGHT_BITS, MASK)
  norm = norm * alpha + gl.sum(e, 1)
  p = _weights(e, keys.k.dtype, TILE_N, HEAD)
  vi, v_phase = hopper.ring(step, STAGES)
  mbarrier.wait(keys.v_full.index(vi), v_phase)
  product = _values(p, keys.v, vi, TILE_N, HEAD)
  # Under a mask there are no registers for both products at once.
  if NEXT and not MASK:
    s = _next_scores(q, keys, step + 1, TILE_N, HEAD, STAGES)
    product = warpgroup_mma_wait(1, deps=[product])
  else:
    product = warpgroup_mma_wait(0, deps=[product])
  mbarrier.arrive(keys.v_empty.index(vi))
  if BLOCKS:
    product = product * value_scale
  acc = acc * _rows_of(alpha, HEAD) + product
  if NEXT:
    if MASK:
      s = _next_scores(q, keys, step + 1, TILE_N, HEAD, STAGES)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(keys.k_empty.index((step + 1) % STAGES))
  return acc, s, next_scale, m, norm


@gluon.jit
def _consume(w: gl.constexpr, args, TILE_N: gl.constexpr, HEAD: gl.constexpr,
             STAGES: gl.constexpr, WEIGHT_BITS: gl.constexpr,
             BLOCKS: gl.constexpr):
  """Computes 64 query rows: an online softmax over the key tiles."""
  (q_smem, q_full, keys, out, lse, sink, stride_o, hdim_v, row0, len_q, seen,
   scales, tile_hi, steps, full_lo, full_hi, has_sink) = args
  ROWS: gl.constexpr = gl.SliceLayout(1, _accumulator(TILE_N))
  row0 += w * 64
  acc = gl.zeros([64, HEAD], gl.float32, _accumulator(HEAD))
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  norm = gl.zeros([64], gl.float32, ROWS)
  # Asked for here, and not before there are partitions to hand them to: they
  # are under way while tiles are.
  value_scale = 1.0
  if not BLOCKS:
    value_scale = gl.load(scales.of_values)
  if steps > 0:
    scale = gl.load(scales.of_scores + gl.minimum(tile_hi - 1,
                                                  scales.last_block))
    q = q_smem.index(w).reshape([64, HEAD])
    mbarrier.wait(q_full.index(w), 0)
    mbarrier.wait(keys.k_full.index(0), 0)
    s = _scores(q, keys.k, 0, TILE_N, HEAD)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(keys.k_empty.index(0))
    # Tiles that the diagonal or the end crosses, whole ones, then those that
    # the window's left edge crosses. After the last there is none to begin.
    last = steps - 1
    right = gl.minimum(gl.maximum(tile_hi - full_hi, 0), last)
    whole = gl.minimum(gl.maximum(tile_hi - full_lo, right), last)
    for step in range(0, right):
      acc, s, scale, m, norm = _step(
          acc, s, scale, m, norm, q, keys, step, tile_hi - 1 - step, row0, seen,
          scales, TILE_N, HEAD, STAGES, WEIGHT_BITS, True, BLOCKS, True)
    for step in range(right, whole):
      acc, s, scale, m, norm = _step(
          acc, s, scale, m, norm, q, keys, step, tile_hi - 1 - step, row0, seen,
          scales, TILE_N, HEAD, STAGES, WEIGHT_BITS, False, BLOCKS, True)
    for step in range(whole, last):
      acc, s, scale, m, norm = _step(
          acc, s, scale, m, norm, q, keys, step, tile_hi - 1 - step, row0, seen,
          scales, TILE_N, HEAD, STAGES, WEIGHT_BITS, True, BLOCKS, True)
    if (last < tile_hi - full_hi) | (last >= tile_hi - full_lo):
      acc, s, scale, m, norm = _step(
          acc, s, scale, m, norm, q, keys, last, tile_hi - steps, row0, seen,
          scales, TILE_N, HEAD, STAGES, WEIGHT_BITS, True, BLOCKS, False)
    else:
      acc, s, scale, m, norm = _step(
          acc, s, scale, m, norm, q, keys, last, tile_hi - steps, row0, seen,
          scales, TILE_N, HEAD, STAGES, WEIGHT_BITS, False, BLOCKS, False)

  # In units of 2^WEIGHT_BITS, as the exponentials are.
  m -= WEIGHT_BITS
  if has_sink:
    logit = gl.load(sink) * LOG2E
    m_new = gl.maximum(m, logit)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - shift)
    norm = norm * alpha + gl.exp2(logit - shift)
    acc = acc * _rows_of(alpha, HEAD)
    m = m_new
  rows = row0 + gl.arange(0, 64, ROWS)
  # A NaN is not 0, and shows.
  live = norm != 0.0
  inverse = value_scale / gl.where(live, norm, 1.0)
  inverse = gl.where(live, inverse, 0.0)
  value = gl.where(live, m * LN2 + gl.log(norm), float("-inf"))
  gl.store(lse + rows, value, mask=rows < len_q)
  STORE: gl.constexpr = hopper.rows_layout(HEAD)
  acc = acc * _rows_of(inverse, HEAD)
  result = gl.convert_layout(acc.to(out.dtype.element_ty), STORE)
  rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
  cols = gl.arange(0, HEAD, gl.SliceLayout(0, STORE))
  mask = (rows < len_q)[:, None] & (cols < hdim_v // 8 * 8)[None, :]
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

  The grid is (tile of TILE_M rows, query head, batch); later tiles, the longest
  when causal, start first.
  """
  WARPGROUPS: gl.constexpr = TILE_M // 64
  tile = gl.num_programs(0) - 1 - gl.program_id(0)
  head = gl.program_id(1)
  index_b = gl.program_id(2)
  head_k = head // (nhead_q // nhead_k)
  slot_b = index_b
  stride_o = nhead_q * hdim_v
  out += head * hdim_v
  q_row = 0
  k_row = 0
  v_col = 0
  if (flags & PACKED) != 0:
    # Sequence `batch` is the rows behind all others, which see nothing.
    index_b, tile = find_sequence(tile, cu_seqlens_q, batch + 1, TILE_M)
    slot_b = 0
    q_row, seqlen_q, lse_rows = extent(cu_seqlens_q, index_b, batch, seqlen_q)
    k_row, seqlen_k, _ = extent(cu_seqlens_k, index_b, batch, seqlen_k)
    seqlen_k = gl.where(index_b < batch, seqlen_k, 0)
    out += q_row.to(gl.int64) * stride_o
    lse += head.to(gl.int64) * lse_rows + q_row
    v_col = first_column(k_row, index_b)
  else:
    out += index_b.to(gl.int64) * seqlen_q * stride_o
    lse += (index_b.to(gl.int64) * nhead_q + head) * seqlen_q
  row0 = tile * TILE_M
  off = seqlen_k - seqlen_q
  seen = Seen(off, window_left, window_right, seqlen_k)
  has_sink = ((flags & SINK) != 0) & (index_b < batch)
  index_b = gl.minimum(index_b, batch - 1)
  scale_at = (index_b * nhead_k + head_k) * blocks
  scales += scale_at
  v_scales += scale_at
  scales = Scales(scales, v_scales, blocks - 1)

  # Tiles lo to hi - 1 are seen, full_lo to full_hi - 1 by every row.
  last = gl.minimum(row0 + TILE_M, seqlen_q) - 1
  col_hi = gl.minimum(seqlen_k, last + off + window_right + 1)
  col_lo = gl.maximum(row0 + off - window_left, 0)
  full_hi = gl.minimum(seqlen_k, row0 + off + window_right + 1)
  full_lo = gl.maximum(row0 + TILE_M - 1 + off - window_left, 0)
  tile_hi = (gl.maximum(col_hi, 0) + TILE_N - 1) // TILE_N
  tile_hi = gl.where(row0 < seqlen_q, tile_hi, 0)
  steps = gl.maximum(tile_hi - col_lo // TILE_N, 0)
  full_hi = gl.maximum(full_hi, 0) // TILE_N
  full_lo = (full_lo + TILE_N - 1) // TILE_N

  q_smem = gl.allocate_shared_memory(
      q_desc.dtype, hopper.stack(WARPGROUPS, q_desc.block_type.shape),
      q_desc.layout)
  k_smem = gl.allocate_shared_memory(
      k_desc.dtype, hopper.stack(STAGES, k_desc.block_type.shape),
      k_desc.layout)
  v_smem = gl.allocate_shared_memory(
      v_desc.dtype, hopper.stack(STAGES, v_desc.block_type.shape),
      v_desc.layout)
  q_full = mbarrier.allocate_mbarrier(batch=WARPGROUPS)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  for w in gl.static_range(WARPGROUPS):
    mbarrier.init(q_full.index(w), count=1)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=WARPGROUPS)
    mbarrier.init(v_empty.index(i), count=WARPGROUPS)
  keys = Keys(k_smem, v_smem, k_full, k_empty, v_full, v_empty)

  produce = (q_desc, k_desc, v_desc, q_smem, q_full, keys, slot_b, head,
             head_k, q_row + row0, k_row, v_col, tile_hi, steps)
  consume = (q_smem, q_full, keys, out, lse, sinks + index_b * nhead_q + head,
             stride_o, hdim_v, row0, seqlen_q, seen, scales, tile_hi, steps,
             full_lo, full_hi, has_sink)
  gl.static_assert(WARPGROUPS == 2)
  gl.warp_specialize([
      (_consume, (0, consume, TILE_N, HEAD, STAGES, WEIGHT_BITS, BLOCKS)),
      (_consume, (1, consume, TILE_N, HEAD, STAGES, WEIGHT_BITS, BLOCKS)),
      (_produce, (produce, TILE_N, STAGES, WARPGROUPS)),
  ], [4, 4], [240, 24])
