# SPDX-License-Identifier: Apache-2.0
"""Flash attention forward on Hopper (sm_90) by blocks that walk, in Gluon.

Where no more than a soft cap changes scores, there is a block for each
multiprocessor, which goes from tile to tile of rows. So what fwd_hopper.py's
blocks begin and end with is hidden: the producer has copied the next tile's
queries and first keys before the consumers are there, and their first scores
run while these store what was before.

Under a causal mask the first tiles of rows see least. So a block takes them in
pairs, the n-th tile after the n-th last one: all pairs take as long.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import fwd_hopper, scores, scores_hopper
from third_party.aiter.kernels.mha import parts_hopper as parts

# No tiles of planes come with keys.
PLANES = tl.constexpr(0)
# A bound that nothing reaches.
UNBOUNDED = tl.constexpr(1 << 30)


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim]."""
  assert function == "mha_fwd", function
  qk = constants["HEAD"], constants["TAIL"]
  return {**parts.tensor_map("q", 64, *qk),
          **parts.tensor_map("k", constants["TILE_N"], *qk),
          **parts.tensor_map("v", constants["TILE_N"], constants["BLOCK_DV"],
                             constants["DV_TAIL"])}


class Terms(NamedTuple):
  """What fwd_hopper.py's functions ask of scores_hopper.Terms."""
  scale: tl.tensor
  logits_soft_cap: tl.tensor


class Walk(NamedTuple):
  """A block's tiles, and where heads begin: strides between them, in elements.
  """
  block: tl.tensor
  blocks: tl.tensor
  count: tl.tensor  # Tiles of the block.
  tiles: tl.tensor  # Those of a head.
  nhead_q: tl.tensor
  nhead_k: tl.tensor
  hdim_q: tl.tensor
  hdim_v: tl.tensor
  nhead_stride_k: tl.tensor
  batch_stride_k: tl.tensor
  nhead_stride_v: tl.tensor
  batch_stride_v: tl.tensor


class Place(NamedTuple):
  """A tile of rows: where it is, and what keys it sees."""
  row0: tl.tensor
  head: tl.tensor
  head_k: tl.tensor
  b: tl.tensor
  lead_k: tl.tensor  # As parts.lead has it.
  lead_v: tl.tensor
  # As fwd_hopper.key_tiles has them; at least one, if only to see nothing.
  tile_hi: tl.tensor
  full_hi: tl.tensor


@gluon.jit
def _count(block, blocks, tiles, heads, WINDOW: gl.constexpr):
  """How many tiles a block has, of `tiles` of each head."""
  each = tiles
  if WINDOW:
    each = (tiles + 1) // 2
  items = gl.maximum(each * heads - block + blocks - 1, 0) // blocks
  if WINDOW:
    items *= 2
  return items


@gluon.jit
def _place(walk, window, i, TILE_M: gl.constexpr, N: gl.constexpr,
           WINDOW: gl.constexpr):
  """The Place of a block's i-th tile.

  A tile that has no other to be its pair has one past the end.
  """
  if WINDOW:
    pairs = (walk.tiles + 1) // 2
    item = i // 2 * walk.blocks + walk.block
    of = item // pairs
    tile = item - of * pairs
    mirrored = walk.tiles - 1 - tile
    tile = gl.where(i % 2 == 0, mirrored,
                    gl.where(tile == mirrored, walk.tiles, tile))
  else:
    item = i * walk.blocks + walk.block
    of = item // walk.tiles
    tile = item - of * walk.tiles
  row0 = tile * TILE_M
  head = of % walk.nhead_q
  b = of // walk.nhead_q
  head_k = head // (walk.nhead_q // walk.nhead_k)
  lead_k = parts.lead(b.to(gl.int64) * walk.batch_stride_k +
                      head_k * walk.nhead_stride_k, walk.hdim_q)
  lead_v = parts.lead(b.to(gl.int64) * walk.batch_stride_v +
                      head_k * walk.nhead_stride_v, walk.hdim_v)
  # Calls whose window has a left edge are not served.
  _, hi, _, full_hi = fwd_hopper.key_tiles(row0, TILE_M, window, N)
  hi = gl.maximum(hi, 1)
  return Place(row0, head, head_k, b, lead_k, lead_v, hi, full_hi)


@gluon.jit
def _produce(args, N: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
             DV: gl.constexpr, DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
             QUERIES: gl.constexpr, WARPGROUPS: gl.constexpr,
             WINDOW: gl.constexpr):
  """Copies the queries of each tile, then the K and V tile of every step."""
  (q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, q_smem, q_full, q_empty,
   keys, walk, window) = args
  use = 0
  for i in range(walk.count):
    at = _place(walk, window, i, WARPGROUPS * 64, N, WINDOW)
    of_q = parts.Source(q_desc, q_tail, -at.lead_k)
    of_k = parts.Source(k_desc, k_tail, -at.lead_k)
    of_v = parts.Source(v_desc, v_tail, -at.lead_v)
    qi, q_phase = hopper.ring(i, QUERIES)
    for w in gl.static_range(WARPGROUPS):
      own = qi * WARPGROUPS + w
      mbarrier.wait(q_empty.index(own), q_phase ^ 1)
      parts.load(of_q, at.b, at.head, at.row0 + w * 64, q_full.index(own),
                 q_smem, own, HEAD, TAIL)
    for step in range(at.tile_hi):
      row = (at.tile_hi - 1 - step) * N
      ki, phase = hopper.ring(use, STAGES)
      mbarrier.wait(keys.k_empty.index(ki), phase ^ 1)
      parts.load(of_k, at.b, at.head_k, row, keys.k_full.index(ki), keys.k, ki,
                 HEAD, TAIL)
      mbarrier.wait(keys.v_empty.index(ki), phase ^ 1)
      parts.load(of_v, at.b, at.head_k, row, keys.v_full.index(ki), keys.v, ki,
                 DV, DV_TAIL)
      use += 1


@gluon.jit
def _start(q_smem, q_full, keys, i, use, w: gl.constexpr, N: gl.constexpr,
           HEAD: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
           QUERIES: gl.constexpr, WARPGROUPS: gl.constexpr):
  """Starts the first scores of the i-th tile, whose keys are `use`'s."""
  qi, q_phase = hopper.ring(i, QUERIES)
  ki, k_phase = hopper.ring(use, STAGES)
  q = parts.tile(q_smem, qi * WARPGROUPS + w, 64, HEAD, TAIL)
  mbarrier.wait(q_full.index(qi * WARPGROUPS + w), q_phase)
  mbarrier.wait(keys.k_full.index(ki), k_phase)
  return parts.product(q, parts.tile(keys.k, ki, N, HEAD, TAIL), 64, N, TAIL)


@gluon.jit
def _begin(s, keys, use, at, window, terms, w: gl.constexpr,
           dtype: gl.constexpr, N: gl.constexpr, DV: gl.constexpr,
           STAGES: gl.constexpr, FEATURES: gl.constexpr):
  """(weights, maximum, sum) of a tile's first scores."""
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  s = warpgroup_mma_wait(0, deps=[s])
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  e, m, _ = fwd_hopper.exponentials(
      s, m, at.row0 + w * 64, at.tile_hi - 1, window, terms, keys, use, N,
      STAGES, PLANES, fwd_hopper.ONLY_LAST_OF_TILE, FEATURES)
  return parts.operand(e, dtype, DV), m, gl.sum(e, 1)


@gluon.jit
def _end(acc, m, norm, at, window, terms, out, lse, strides, hdim_v,
         w: gl.constexpr, N: gl.constexpr, DV: gl.constexpr,
         DV_TAIL: gl.constexpr, FEATURES: gl.constexpr):
  """Divides a warpgroup's rows by their sums, and stores them."""
  stride_o, nhead_stride_o, batch_stride_o, nhead_stride, batch_stride = strides
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  row0 = at.row0 + w * 64
  rows = row0 + gl.arange(0, 64, ROWS)
  # A NaN is not 0, and shows.
  live = norm != 0.0
  acc = parts.scale_rows(acc, 1.0 / gl.where(live, norm, 1.0), DV, DV_TAIL)
  unit = fwd_hopper.unit_of(terms, FEATURES)
  value = m * unit * scores.LN2 + gl.log(norm)
  b = at.b.to(gl.int64)
  gl.store(lse + (b * batch_stride + at.head * nhead_stride) + rows,
           gl.where(live, value, float("-inf")), mask=rows < window.len_q)
  parts.store(out + (b * batch_stride_o + at.head * nhead_stride_o), stride_o,
              acc, live, row0, window.len_q, at.lead_v, hdim_v, DV, DV_TAIL)


@gluon.jit
def _steps(acc, p, m, norm, q, keys, turns, first, end, use, at, window, terms,
           w: gl.constexpr, N: gl.constexpr, HEAD: gl.constexpr,
           TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
           STAGES: gl.constexpr, TURN: gl.constexpr, MASK: gl.constexpr,
           FEATURES: gl.constexpr):
  """Steps `first` to end - 1 of a tile, whose keys are from the use-th on."""
  for step in range(first, end):
    acc, p, m, norm = fwd_hopper.pipelined_step(
        acc, p, m, norm, q, keys, use + step, at.tile_hi - 1 - step,
        at.row0 + w * 64, window, terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES,
        PLANES, MASK, FEATURES, turns, TURN)
  return acc, p, m, norm


@gluon.jit
def _consume(w: gl.constexpr, args, N: gl.constexpr, HEAD: gl.constexpr,
             TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
             STAGES: gl.constexpr, QUERIES: gl.constexpr,
             WARPGROUPS: gl.constexpr, TURNS: gl.constexpr,
             WINDOW: gl.constexpr, FEATURES: gl.constexpr):
  """Computes 64 query rows of each tile, an online softmax over the keys."""
  (q_smem, q_full, q_empty, keys, turns, walk, window, terms, out, lse,
   strides) = args
  TURN: gl.constexpr = w if TURNS else -1
  dtype: gl.constexpr = q_smem.main.dtype
  AHEAD: gl.constexpr = 2 if TAIL > 0 else 1  # Products of `ahead`.
  if walk.count > 0:
    use = 0
    at = _place(walk, window, 0, WARPGROUPS * 64, N, WINDOW)
    s = _start(q_smem, q_full, keys, 0, use, w, N, HEAD, TAIL, STAGES, QUERIES,
               WARPGROUPS)
    p, m, norm = _begin(s, keys, use, at, window, terms, w, dtype, N, DV,
                        STAGES, FEATURES)
    for i in range(walk.count):
      at = _place(walk, window, i, WARPGROUPS * 64, N, WINDOW)
      qi, _ = hopper.ring(i, QUERIES)
      q = parts.tile(q_smem, qi * WARPGROUPS + w, 64, HEAD, TAIL)
      acc = parts.zeros(64, DV, DV_TAIL)
      # Tiles that the diagonal or the end crosses, then whole tiles.
      right = 1
      if WINDOW:
        right = gl.minimum(gl.maximum(at.tile_hi - at.full_hi, 1), at.tile_hi)
        acc, p, m, norm = _steps(
            acc, p, m, norm, q, keys, turns, 1, right, use, at, window, terms,
            w, N, HEAD, TAIL, DV, DV_TAIL, STAGES, TURN,
            fwd_hopper.ONLY_LAST_OF_TILE, FEATURES)
      acc, p, m, norm = _steps(
          acc, p, m, norm, q, keys, turns, right, at.tile_hi, use, at, window,
          terms, w, N, HEAD, TAIL, DV, DV_TAIL, STAGES, TURN, False, FEATURES)
      mbarrier.arrive(q_empty.index(qi * WARPGROUPS + w))
      use += at.tile_hi
      vi, v_phase = hopper.ring(use - 1, STAGES)
      mbarrier.wait(keys.v_full.index(vi), v_phase)
      v = parts.tile(keys.v, vi, N, DV, DV_TAIL)
      if i + 1 < walk.count:
        if TURN >= 0:
          mbarrier.wait(turns.index(TURN), (use + TURN) & 1)
        done = parts.accumulate(acc, p, v, DV_TAIL)
        ahead = _start(q_smem, q_full, keys, i + 1, use, w, N, HEAD, TAIL,
                       STAGES, QUERIES, WARPGROUPS)
        if TURN >= 0:
          mbarrier.arrive(turns.index(1 - TURN))
        done = parts.wait(AHEAD, done, DV_TAIL)
        mbarrier.arrive(keys.v_empty.index(vi))
        _end(done, m, norm, at, window, terms, out, lse, strides, walk.hdim_v,
             w, N, DV, DV_TAIL, FEATURES)
        following = _place(walk, window, i + 1, WARPGROUPS * 64, N, WINDOW)
        p, m, norm = _begin(ahead, keys, use, following, window, terms, w,
                            dtype, N, DV, STAGES, FEATURES)
      else:
        done = parts.wait(0, parts.accumulate(acc, p, v, DV_TAIL), DV_TAIL)
        _end(done, m, norm, at, window, terms, out, lse, strides, walk.hdim_v,
             w, N, DV, DV_TAIL, FEATURES)


@gluon.jit
def mha_fwd(q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, out, lse,
            nhead_stride_k, batch_stride_k, nhead_stride_v, batch_stride_v,
            stride_o, nhead_stride_o, batch_stride_o, nhead_stride_lse,
            batch_stride_lse, batch, seqlen_q, seqlen_k, nhead_q, nhead_k,
            hdim_q, hdim_v, softmax_scale, logits_soft_cap, window_left,
            window_right, flags,
            TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
            TAIL: gl.constexpr, BLOCK_DV: gl.constexpr, DV_TAIL: gl.constexpr,
            STAGES: gl.constexpr, QUERIES: gl.constexpr, WINDOW: gl.constexpr,
            FEATURES: gl.constexpr, TURNS: gl.constexpr = 0):
  """Attention forward of a dense batch; fwd_hopper.py has the maps.

  QUERIES: how many tiles' queries have a place in shared memory. WINDOW:
  whether calls may have one. Grid: blocks, which share the tiles.
  """
  WARPGROUPS: gl.constexpr = TILE_M // 64
  gl.static_assert(WARPGROUPS == 2)
  gl.static_assert(
      FEATURES & (scores.OF_SCORES | scores.DROPOUT | scores.SINK_TOKENS |
                  scores.MAYBE) & ~scores.SOFT_CAP == 0)
  tiles = (seqlen_q + TILE_M - 1) // TILE_M
  block, blocks = gl.program_id(0), gl.num_programs(0)
  walk = Walk(block, blocks,
              _count(block, blocks, tiles, nhead_q * batch, WINDOW), tiles,
              nhead_q, nhead_k, hdim_q, hdim_v, nhead_stride_k, batch_stride_k,
              nhead_stride_v, batch_stride_v)
  off = gl.where((flags & scores.TOP_LEFT) != 0, 0, seqlen_k - seqlen_q)
  if not WINDOW:
    off = 0
    window_left = UNBOUNDED
    window_right = UNBOUNDED
  window = scores_hopper.Window(off, window_left, window_right, 0, seqlen_q,
                                seqlen_k)
  q_smem = parts.allocate(QUERIES * WARPGROUPS,
                          parts.Source(q_desc, q_tail, 0), TAIL)
  k_smem = parts.allocate(STAGES, parts.Source(k_desc, k_tail, 0), TAIL)
  v_smem = parts.allocate(STAGES, parts.Source(v_desc, v_tail, 0), DV_TAIL)
  q_full = mbarrier.allocate_mbarrier(batch=QUERIES * WARPGROUPS)
  q_empty = mbarrier.allocate_mbarrier(batch=QUERIES * WARPGROUPS)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  # A warpgroup may start its products.
  turns = mbarrier.allocate_mbarrier(batch=2)
  if TURNS:
    for w in gl.static_range(2):
      mbarrier.init(turns.index(w), count=1)
  for i in gl.static_range(QUERIES * WARPGROUPS):
    mbarrier.init(q_full.index(i), count=1)
    mbarrier.init(q_empty.index(i), count=1)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=WARPGROUPS)
    mbarrier.init(v_empty.index(i), count=WARPGROUPS)
  none = gl.to_tensor(0)
  keys = fwd_hopper.Keys(k_smem, v_smem, k_full, k_empty, v_full, v_empty, none,
                         none, none)
  strides = (stride_o, nhead_stride_o, batch_stride_o, nhead_stride_lse,
             batch_stride_lse)
  produce = (q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, q_smem, q_full,
             q_empty, keys, walk, window)
  consume = (q_smem, q_full, q_empty, keys, turns, walk, window,
             Terms(softmax_scale, logits_soft_cap), out, lse, strides)
  gl.warp_specialize([
      (_consume, (0, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                  QUERIES, WARPGROUPS, TURNS, WINDOW, FEATURES)),
      (_consume, (1, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                  QUERIES, WARPGROUPS, TURNS, WINDOW, FEATURES)),
      (_produce, (produce, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                  QUERIES, WARPGROUPS, WINDOW)),
  ], [4, 1], [232, 40])
