# SPDX-License-Identifier: Apache-2.0
"""Flash attention forward for Hopper (sm_90), fast grade, in Gluon.

A producer warpgroup copies key and value tiles by TMA; each consumer warpgroup
owns 64 query rows. A consumer keeps two matrix products in flight: the scores
of the next tile run on the tensor cores while it computes the softmax of this
one, so that exponentials hide behind products. At head dim 64, where they take
as long as the products, three warpgroups that do one thing after the other
(OVERLAP = 0) hide each other's better. Under a mask each of them then takes
only the key tiles that its own rows see (OWN_KEYS = 1).

Where scores cost much, two warpgroups would compute them at once, and leave the
tensor cores idle. With TURNS = 1 one starts its products only after the other,
so that they stay half a step apart.

Short sequences end before a block of two warpgroups is in its stride: blocks of
one, two of which share a multiprocessor (maxnreg=128), hide each other's begin
and end, and under a mask see fewer keys in vain. fwd_walks.py hides them in
blocks that go from tile to tile.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
  mbarrier,
  tma,
  warpgroup_mma_wait,
)

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import kept_hopper, scores, scores_hopper
from third_party.aiter.kernels.mha import parts_hopper as parts

# Masks without a bound to the left; the second by columns that count from the
# tile's first key on, for which a kernel needs a register each.
ONLY_LAST = tl.constexpr(2)
ONLY_LAST_OF_TILE = tl.constexpr(3)
# Beside attention's features: tokens of a cache have scales, of keys in the
# place of Keys' bias and of values in that of the mask. Both come and go with
# the tile of keys.
TOKEN_SCALES = tl.constexpr(1 << 30)
# Boxes of a tile's keys have an end each (len_k), behind which nobody sees any.
BOXES = tl.constexpr(1 << 31)


class Keys(NamedTuple):
  """Rings of key and value tiles and their barriers."""
  k: parts.Parts
  v: parts.Parts
  k_full: tl.tensor
  k_empty: tl.tensor
  v_full: tl.tensor
  v_empty: tl.tensor
  planes: scores_hopper.Planes
  planes_full: tl.tensor  # k's, where these come and go with k's tiles.
  planes_empty: tl.tensor


@gluon.constexpr_function
def mapped(features):
  """Whether TMA copies the bias: where it is all that changes weights."""
  others = (scores.OF_SCORES.value | scores.BIAS_F32.value |
            scores.DROPOUT.value | scores.SINK_TOKENS.value |
            scores.MAYBE.value)
  return features & others == scores.HAS_BIAS.value


@gluon.constexpr_function
def plane_arrivals(features):
  """How often the copies of a step's planes arrive at their barrier."""
  return 1 if mapped(features) else scores_hopper.arrivals(features)


@gluon.jit
def allocate_planes(heads, bias_desc, STEPS: gl.constexpr, COUNT: gl.constexpr,
                    N: gl.constexpr, FEATURES: gl.constexpr):
  """A ring of Planes of 64 rows and N keys, COUNT a step."""
  if mapped(FEATURES):
    tiles = gl.allocate_shared_memory(
        bias_desc.dtype,
        hopper.stack(STEPS * COUNT, bias_desc.block_type.shape),
        bias_desc.layout)
    planes = scores_hopper.Planes(tiles, gl.to_tensor(0), COUNT, 0)
  else:
    planes = scores_hopper.allocate_planes(heads, STEPS, COUNT, 64, N, FEATURES)
  return planes


@gluon.jit
def copy_planes(terms, bias_desc, batch, head, planes, i, barrier, row0, col0,
                window, COUNT: gl.constexpr, N: gl.constexpr,
                FEATURES: gl.constexpr):
  """Starts the copies of step i's tiles; `plane_arrivals` end them."""
  if mapped(FEATURES):
    mbarrier.expect(barrier, COUNT * bias_desc.nbytes_per_cta)
    for w in gl.static_range(COUNT):
      tma.async_load(bias_desc, [batch, head, row0 + w * 64, col0], barrier,
                     planes.bias.index(i * COUNT + w))
  else:
    scores_hopper.copy_planes(terms, planes, i, barrier, row0, col0, 64, 0,
                              window, COUNT, 64, N, FEATURES)


@gluon.jit
def key_tiles(row0, rows, window, N: gl.constexpr):
  """Key tiles that rows see.

  Returns:
    (lo, hi, full_lo, full_hi): tiles lo to hi - 1 are seen, full_lo to
    full_hi - 1 by every row.
  """
  last = gl.minimum(row0 + rows, window.len_q) - 1
  col_hi = gl.minimum(window.len_k, last + window.off + window.right + 1)
  col_lo = gl.maximum(row0 + window.off - window.left, 0)
  full_hi = gl.minimum(window.len_k, row0 + window.off + window.right + 1)
  full_lo = gl.maximum(row0 + rows - 1 + window.off - window.left, 0)
  tile_lo = col_lo // N
  tile_hi = (gl.maximum(col_hi, 0) + N - 1) // N
  tile_hi = gl.where(row0 < window.len_q, tile_hi, 0)
  full_hi = gl.maximum(full_hi, 0) // N
  full_lo = (full_lo + N - 1) // N
  return tile_lo, tile_hi, full_lo, full_hi


@gluon.jit
def _tile_at(step, tile_hi, steps, sinks, FEATURES: gl.constexpr):
  """The tile of a step: from the last to the first, then the leading keys'."""
  tile = tile_hi - 1 - step
  if FEATURES & scores.SINK_TOKENS:
    tile = gl.where(step < steps - sinks, tile, steps - 1 - step)
  return tile


@gluon.jit
def _produce(args, N: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
             DV: gl.constexpr, DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
             PLANES: gl.constexpr, WARPGROUPS: gl.constexpr,
             FEATURES: gl.constexpr):
  """Copies Q once, then the K and V tile of every step."""
  (q_desc, k_desc, v_desc, q_smem, q_full, keys, slot_b, head, head_k, q_row,
   k_row, row0, tile_hi, steps, sinks, v, stride_v, hdim_v, foreign_rows, terms,
   window, bias_desc) = args
  if steps > 0:
    for w in gl.static_range(WARPGROUPS):
      parts.load(q_desc, slot_b, head, q_row + row0 + w * 64,
                 q_full.index(w), q_smem, w, HEAD, TAIL)
    for step in range(steps):
      tile = _tile_at(step, tile_hi, steps, sinks, FEATURES)
      row = k_row + tile * N
      i, phase = hopper.ring(step, STAGES)
      k_full, v_full = keys.k_full.index(i), keys.v_full.index(i)
      mbarrier.wait(keys.k_empty.index(i), phase ^ 1)
      parts.load(k_desc, slot_b, head_k, row, k_full, keys.k, i, HEAD, TAIL)
      planes_i, planes_full = i, k_full
      if PLANES:
        planes_i, planes_phase = hopper.ring(step, PLANES)
        planes_full = keys.planes_full.index(planes_i)
        mbarrier.wait(keys.planes_empty.index(planes_i), planes_phase ^ 1)
      copy_planes(terms, bias_desc, slot_b, head, keys.planes, planes_i,
                  planes_full, row0, tile * N, window, WARPGROUPS, N, FEATURES)
      mbarrier.wait(keys.v_empty.index(i), phase ^ 1)
      foreign = (step == 0) & (foreign_rows > 0)
      if foreign | scores_hopper.hides(terms, tile * N, window.len_k, N,
                                        FEATURES):
        shown = scores_hopper.shown_keys(terms, tile * N)
        parts.copy_rows(v, stride_v, keys.v, i, window.len_k - tile * N, row,
                        hdim_v, shown, N, DV, DV_TAIL,
                        (FEATURES & scores.HAS_MASK) != 0)
        mbarrier.arrive(v_full)
      else:
        parts.load(v_desc, slot_b, head_k, row, v_full, keys.v, i, DV, DV_TAIL)


@gluon.jit
def _mask_scores(s, rows, col0, window, N: gl.constexpr, MASK: gl.constexpr,
                 FEATURES: gl.constexpr):
  """Sets the scores of keys from col0 on that their rows do not see to -inf.

  A row's first and last key are known before any score is looked at.
  """
  cols = gl.arange(0, N, gl.SliceLayout(0, s.type.layout))[None, :]
  at = rows + window.off
  if MASK == ONLY_LAST_OF_TILE:
    seen = cols <= gl.minimum(at + window.right, window.len_k - 1) - col0
  else:
    cols += col0
    if N == 128:
      # Behind this the compiler makes no thread's 64 masks before there are
      # scores, for which it would have no registers.
      at = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [at], gl.int32,
                                     False, 1)
    last = gl.minimum(at + window.right, window.len_k - 1)
    if FEATURES & BOXES:
      # One comparison, or else the second is made before there are scores.
      last = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [last],
                                       gl.int32, True, 1)
    seen = cols <= last
  if MASK < ONLY_LAST:
    after = cols >= at - window.left
    if FEATURES & scores.ALIBI:
      # Which has the differences anyway, and no register for more.
      seen = (cols - at <= window.right) & (cols < window.len_k)
      after = cols - at >= -window.left
    if FEATURES & scores.SINK_TOKENS:
      after = after | (cols < window.sink_tokens)
    seen = after & seen
  return gl.where(seen, s, float("-inf"))


@gluon.jit
def unit_of(terms, FEATURES: gl.constexpr):
  """What turns exponentials' scores into base 2."""
  unit = 1.0
  if mapped(FEATURES):
    unit = scores.LOG2E
  elif FEATURES & scores.OF_SCORES == scores.SOFT_CAP:
    unit = terms.logits_soft_cap * scores.LOG2E
  elif not FEATURES & scores.OF_SCORES:
    unit = terms.scale * scores.LOG2E
  return unit


@gluon.jit
def complete(s, row0, tile, window, terms, keys, step, N: gl.constexpr,
             STAGES: gl.constexpr, PLANES: gl.constexpr, MASK: gl.constexpr,
             FEATURES: gl.constexpr):
  """Completes a tile's products but for the window; its keys are not needed.

  Returns:
    (scores, what turns them into base 2).
  """
  S_LAYOUT: gl.constexpr = hopper.accumulator(N)
  rows = gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))[:, None]
  cols = gl.arange(0, N, gl.SliceLayout(0, S_LAYOUT))[None, :]
  scale = unit_of(terms, FEATURES)
  i, _ = hopper.ring(step, STAGES)
  empty = keys.k_empty.index(i)
  if FEATURES & TOKEN_SCALES:
    of_keys = keys.planes.bias.index(i).load(gl.SliceLayout(0, S_LAYOUT))
    s *= of_keys[None, :]
  if PLANES or not (scores_hopper.staged(FEATURES) or FEATURES & TOKEN_SCALES):
    mbarrier.arrive(empty)
  if PLANES:
    i, phase = hopper.ring(step, PLANES)
    mbarrier.wait(keys.planes_full.index(i), phase)
    empty = keys.planes_empty.index(i)
  if mapped(FEATURES):
    bias = keys.planes.bias.index(i * keys.planes.count + keys.planes.own)
    s = scores_hopper.with_bias(s, terms.scale,
                                bias.reshape([64, N]).load(S_LAYOUT))
  elif FEATURES & scores.OF_SCORES == scores.SOFT_CAP:
    s = scores_hopper.capped(s, terms)
  elif FEATURES & scores.OF_SCORES:
    planes = scores_hopper.planes_at(keys.planes, i, False, FEATURES)
    s, _ = scores_hopper.complete(s, row0, tile * N, rows, cols, window, terms,
                                  planes, MASK, FEATURES)
  if scores_hopper.staged(FEATURES):
    mbarrier.arrive(empty)
  return s, scale


@gluon.jit
def weigh(s, scale, m, row0, tile, window, N: gl.constexpr, MASK: gl.constexpr,
          FEATURES: gl.constexpr):
  """Takes a tile's scores, as `complete` has them, into the running maximum.

  MASK: whether some rows do not see all keys. ONLY_LAST and ONLY_LAST_OF_TILE:
  but all before their last one.

  Returns:
    (exponentials, new maximum, factor of what was summed before).
  """
  if MASK:
    rows = gl.arange(0, 64, gl.SliceLayout(1, hopper.accumulator(N)))[:, None]
    s = _mask_scores(s, row0 + rows, tile * N, window, N, MASK, FEATURES)
  m_new = gl.maximum(m, gl.max(s, 1))
  # A row that has seen no key yet keeps m = -inf; its shift must be finite.
  if mapped(FEATURES):
    # All of a row's biases may be the least number that there is, which times
    # anything is no number, and of whose product rounding loses the difference.
    top = gl.where(m_new == float("-inf"), 0.0, m_new)
    e = gl.exp2((s - top[:, None]) * scale)
    alpha = gl.exp2((m - top) * scale)
  else:
    shift = m_new * scale
    if MASK or FEATURES & scores.HIDES:
      shift = gl.where(m_new == float("-inf"), 0.0, shift)
    e = gl.exp2(s * scale - shift[:, None])
    alpha = gl.exp2(m * scale - shift)
  return e, m_new, alpha


@gluon.jit
def exponentials(s, m, row0, tile, window, terms, keys, step, N: gl.constexpr,
                 STAGES: gl.constexpr, PLANES: gl.constexpr,
                 MASK: gl.constexpr, FEATURES: gl.constexpr):
  """Both: a tile's products to `weigh`'s results."""
  s, scale = complete(s, row0, tile, window, terms, keys, step, N, STAGES,
                      PLANES, MASK, FEATURES)
  return weigh(s, scale, m, row0, tile, window, N, MASK, FEATURES)


@gluon.jit
def by_value(e, keys, step, N: gl.constexpr, STAGES: gl.constexpr,
             FEATURES: gl.constexpr):
  """Exponentials times the scales of what they weigh."""
  if FEATURES & TOKEN_SCALES:
    i, _ = hopper.ring(step, STAGES)
    scales = keys.planes.mask.index(i)
    e *= scales.load(gl.SliceLayout(0, hopper.accumulator(N)))[None, :]
    mbarrier.arrive(keys.k_empty.index(i))
  return e


@gluon.jit
def weights_of(e, row0, tile, terms, dtype: gl.constexpr, N: gl.constexpr,
               DV: gl.constexpr, FEATURES: gl.constexpr):
  """The values' weights, the left operand of their product."""
  if FEATURES & scores.DROPOUT:
    if FEATURES == scores.DROPOUT:
      keep = kept_hopper.draw_rows(terms, row0, tile * N, N)
    else:
      keep = scores_hopper.keep_of_rows(terms, row0, tile * N, N)
    e = gl.where(keep, e, 0.0)
  return parts.operand(e, dtype, DV)


@gluon.jit
def pipelined_step(acc, p, m, norm, q, keys, step, tile, row0, window, terms,
                   N: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
                   DV: gl.constexpr, DV_TAIL: gl.constexpr,
                   STAGES: gl.constexpr, PLANES: gl.constexpr,
                   MASK: gl.constexpr, FEATURES: gl.constexpr, turns=None,
                   TURN: gl.constexpr = -1):
  """Adds tile `tile + 1`'s P V while computing tile `tile`'s P.

  Where warpgroups take turns, this one is number TURN.
  """
  ki, k_phase = hopper.ring(step, STAGES)
  vi, v_phase = hopper.ring(step - 1, STAGES)
  mbarrier.wait(keys.k_full.index(ki), k_phase)
  if TURN >= 0:
    mbarrier.wait(turns.index(TURN), (step + TURN) & 1)
  s = parts.product(q, parts.tile(keys.k, ki, N, HEAD, TAIL), 64, N, TAIL)
  mbarrier.wait(keys.v_full.index(vi), v_phase)
  acc = parts.accumulate(acc, p, parts.tile(keys.v, vi, N, DV, DV_TAIL),
                         DV_TAIL)
  if TURN >= 0:
    mbarrier.arrive(turns.index(1 - TURN))
  s = warpgroup_mma_wait(2 if DV_TAIL > 0 else 1, deps=[s])
  e, m, alpha = exponentials(s, m, row0, tile, window, terms, keys, step, N,
                             STAGES, PLANES, MASK, FEATURES)
  norm = norm * alpha + gl.sum(e, 1)
  e = by_value(e, keys, step, N, STAGES, FEATURES)
  acc = parts.wait(0, acc, DV_TAIL)
  p = weights_of(e, row0, tile, terms, p.dtype, N, DV, FEATURES)
  mbarrier.arrive(keys.v_empty.index(vi))
  return parts.scale_rows(acc, alpha, DV, DV_TAIL), p, m, norm


@gluon.jit
def _skip_step(keys, step, STAGES: gl.constexpr):
  """Lets a tile pass that none of the warpgroup's rows sees."""
  i, phase = hopper.ring(step, STAGES)
  mbarrier.wait(keys.k_full.index(i), phase)
  mbarrier.arrive(keys.k_empty.index(i))
  mbarrier.wait(keys.v_full.index(i), phase)
  mbarrier.arrive(keys.v_empty.index(i))


@gluon.jit
def _serial_step(acc, m, norm, q, keys, step, tile, row0, window, terms,
                 N: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
                 DV: gl.constexpr, DV_TAIL: gl.constexpr, STAGES: gl.constexpr,
                 PLANES: gl.constexpr, MASK: gl.constexpr,
                 FEATURES: gl.constexpr):
  """Adds a tile, one product after the other: other warpgroups overlap."""
  i, phase = hopper.ring(step, STAGES)
  mbarrier.wait(keys.k_full.index(i), phase)
  s = parts.product(q, parts.tile(keys.k, i, N, HEAD, TAIL), 64, N, TAIL)
  s = warpgroup_mma_wait(0, deps=[s])
  e, m, alpha = exponentials(s, m, row0, tile, window, terms, keys, step, N,
                             STAGES, PLANES, MASK, FEATURES)
  norm = norm * alpha + gl.sum(e, 1)
  acc = parts.scale_rows(acc, alpha, DV, DV_TAIL)
  p = weights_of(e, row0, tile, terms, keys.v.main.dtype, N, DV, FEATURES)
  mbarrier.wait(keys.v_full.index(i), phase)
  acc = parts.accumulate(acc, p, parts.tile(keys.v, i, N, DV, DV_TAIL),
                         DV_TAIL)
  acc = parts.wait(0, acc, DV_TAIL)
  mbarrier.arrive(keys.v_empty.index(i))
  return acc, m, norm


@gluon.jit
def _consume(w: gl.constexpr, args, N: gl.constexpr, HEAD: gl.constexpr,
             TAIL: gl.constexpr, DV: gl.constexpr, DV_TAIL: gl.constexpr,
             STAGES: gl.constexpr, PLANES: gl.constexpr, OVERLAP: gl.constexpr,
             OWN_KEYS: gl.constexpr, TURNS: gl.constexpr,
             FEATURES: gl.constexpr):
  """Computes 64 query rows: an online softmax over the key tiles."""
  (q_smem, q_full, keys, turns, out, lse, sink_logit, stride_o, lead_v, hdim_v,
   row0, row_end, window, terms, flags, tile_lo, tile_hi, full_lo, full_hi,
   steps, sinks) = args
  ROWS: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  keys = Keys(keys.k, keys.v, keys.k_full, keys.k_empty, keys.v_full,
              keys.v_empty, scores_hopper.own_planes(keys.planes, w),
              keys.planes_full, keys.planes_empty)
  TURN: gl.constexpr = w if TURNS else -1
  row0 += w * 64
  rows = row0 + gl.arange(0, 64, ROWS)
  acc = parts.zeros(64, DV, DV_TAIL)
  m = gl.full([64], float("-inf"), gl.float32, ROWS)
  norm = gl.zeros([64], gl.float32, ROWS)
  q = parts.tile(q_smem, w, 64, HEAD, TAIL)
  # Steps to tile_lo's; the leading keys' come after them.
  window_steps = tile_hi - tile_lo
  if OVERLAP and steps > 0:
    mbarrier.wait(q_full.index(w), 0)
    mbarrier.wait(keys.k_full.index(0), 0)
    s = parts.product(q, parts.tile(keys.k, 0, N, HEAD, TAIL), 64, N, TAIL)
    s = warpgroup_mma_wait(0, deps=[s])
    tile = _tile_at(0, tile_hi, steps, sinks, FEATURES)
    e, m, _ = exponentials(s, m, row0, tile, window, terms, keys, 0, N,
                           STAGES, PLANES, True, FEATURES)
    norm = gl.sum(e, 1)
    p = weights_of(e, row0, tile, terms, q_smem.main.dtype, N, DV, FEATURES)
    # Tiles that the diagonal or the end alone crosses, then whole tiles, then
    # those that the window's left edge crosses: by the first loop again. With a
    # third the compiler moves all weights about in each step of the second.
    whole = gl.minimum(gl.maximum(tile_hi - full_lo, 1), window_steps)
    right = gl.minimum(gl.maximum(tile_hi - full_hi, 1), whole)
    begin = gl.to_tensor(1)
    for _ in range(gl.where(whole < steps, 2, 1)):
      for step in range(begin, right):
        acc, p, m, norm = pipelined_step(
            acc, p, m, norm, q, keys, step,
            _tile_at(step, tile_hi, steps, sinks, FEATURES), row0, window,
            terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES, PLANES, True, FEATURES,
            turns, TURN)
      for step in range(right, whole):
        acc, p, m, norm = pipelined_step(
            acc, p, m, norm, q, keys, step, tile_hi - 1 - step, row0, window,
            terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES, PLANES, False, FEATURES,
            turns, TURN)
      begin = gl.maximum(whole, 1)
      right = steps
    vi, v_phase = hopper.ring(steps - 1, STAGES)
    mbarrier.wait(keys.v_full.index(vi), v_phase)
    acc = parts.accumulate(acc, p, parts.tile(keys.v, vi, N, DV, DV_TAIL),
                           DV_TAIL)
    acc = parts.wait(0, acc, DV_TAIL)
  if steps > 0 and not OVERLAP:
    mbarrier.wait(q_full.index(w), 0)
    begin = 0
    end = steps
    if OWN_KEYS:
      own_lo, own_hi, full_lo, full_hi = key_tiles(row0, 64, window, N)
      begin = gl.minimum(gl.maximum(tile_hi - own_hi, 0), steps)
      end = gl.minimum(gl.maximum(tile_hi - own_lo, begin), steps)
    whole = gl.minimum(gl.maximum(tile_hi - full_lo, begin),
                       gl.maximum(window_steps, begin))
    whole = gl.minimum(whole, end)
    right = gl.minimum(gl.maximum(tile_hi - full_hi, begin), whole)
    if OWN_KEYS:
      for step in range(begin):
        _skip_step(keys, step, STAGES)
    for step in range(begin, right):
      acc, m, norm = _serial_step(
          acc, m, norm, q, keys, step, tile_hi - 1 - step, row0, window,
          terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES, PLANES, ONLY_LAST,
          FEATURES)
    for step in range(right, whole):
      acc, m, norm = _serial_step(
          acc, m, norm, q, keys, step, tile_hi - 1 - step, row0, window,
          terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES, PLANES, False,
          FEATURES)
    for step in range(whole, end):
      acc, m, norm = _serial_step(
          acc, m, norm, q, keys, step,
          _tile_at(step, tile_hi, steps, sinks, FEATURES), row0, window,
          terms, N, HEAD, TAIL, DV, DV_TAIL, STAGES, PLANES, True,
          FEATURES)
    if OWN_KEYS:
      for step in range(end, steps):
        _skip_step(keys, step, STAGES)

  m *= unit_of(terms, FEATURES)
  if (flags & scores.SINK) != 0:
    m_new = gl.maximum(m, sink_logit * scores.LOG2E)
    alpha = gl.exp2(m - m_new)
    norm = norm * alpha + gl.exp2(sink_logit * scores.LOG2E - m_new)
    acc = parts.scale_rows(acc, alpha, DV, DV_TAIL)
    m = m_new
  # A NaN is not 0, and shows.
  live = (norm != 0.0) & (rows < window.len_q)
  inverse = 1.0 / gl.where(live, norm, 1.0)
  if FEATURES & scores.DROPOUT:
    inverse *= terms.rp_keep
  acc = parts.scale_rows(acc, inverse, DV, DV_TAIL)
  value = gl.where(live, m * scores.LN2 + gl.log(norm), float("-inf"))
  gl.store(lse + rows, value, mask=rows < row_end)
  parts.store(out, stride_o, acc, live, row0, row_end, lead_v, hdim_v, DV,
              DV_TAIL)


@gluon.jit
def place(BATCH_FIRST: gl.constexpr):
  """A block's (tile, head, batch); later tiles, longest when causal, first.

  BATCH_FIRST: blocks of one plane of a bias, which is for all of a batch,
  follow each other, and read it from L2.
  """
  if BATCH_FIRST:
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    head = gl.program_id(2)
    index_b = gl.program_id(0)
  else:
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    head = gl.program_id(1)
    index_b = gl.program_id(2)
  return tile, head, index_b


def tensor_maps(function, constants):
  """TMA maps of a kernel by argument, of views [batch, head, row, dim].

  The bias, whose keys are in the dim's place, has one where it is `mapped`.
  """
  assert function == "mha_fwd", function
  tile_n = constants["TILE_N"]
  qk = constants["HEAD"], constants["TAIL"]
  return {**parts.tensor_map("q", 64, *qk),
          **parts.tensor_map("k", tile_n, *qk),
          **parts.tensor_map("v", tile_n, constants["BLOCK_DV"],
                             constants["DV_TAIL"]),
          "bias_desc": TensorMap("bias", (1, 1, 64, tile_n),
                                 swizzle=min(2 * tile_n, 128))
          if mapped.fn(constants["FEATURES"]) else None}


@gluon.jit
def mha_fwd(q_desc, q_tail, k_desc, k_tail, v_desc, v_tail, bias_desc, q, k, v,
            out, lse, bias, bias_f32, mask, alibi_slopes, sink, dropout_state,
            cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded,
            cu_seqlens_k_padded, stride_q, nhead_stride_q, batch_stride_q,
            stride_k, nhead_stride_k, batch_stride_k, stride_v, nhead_stride_v,
            batch_stride_v, stride_o, nhead_stride_o, batch_stride_o,
            nhead_stride_lse, batch_stride_lse, stride_bias, key_stride_bias,
            nhead_stride_bias, batch_stride_bias, stride_mask, key_stride_mask,
            nhead_stride_mask, batch_stride_mask, batch, seqlen_q, seqlen_k,
            nhead_q, nhead_k, hdim_q, hdim_v, softmax_scale, logits_soft_cap,
            drop_threshold, rp_keep, window_left, window_right, sink_tokens,
            min_seqlen_q, flags,
            TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
            TAIL: gl.constexpr, BLOCK_DV: gl.constexpr, DV_TAIL: gl.constexpr,
            STAGES: gl.constexpr, OVERLAP: gl.constexpr,
            OWN_KEYS: gl.constexpr, FEATURES: gl.constexpr,
            TURNS: gl.constexpr = 0, PLANES: gl.constexpr = 0,
            PAIRED: gl.constexpr = 0, BATCH_FIRST: gl.constexpr = 0):
  """Attention forward; the argument list of the plain kernel, plus TMA maps.

  The maps view q, k and v as [batch, head, row, dim] (packed: batch 1), with
  boxes of 64 query rows and TILE_N key rows. The grid is (tile of TILE_M rows,
  query head, batch) or, BATCH_FIRST, (batch, tile, head). Tiles of the planes
  have a ring of their own, of PLANES, or come and go with the keys'. PAIRED:
  with few registers, so that two blocks share a multiprocessor. Of the features
  that change scores the kernel has those of FEATURES, and takes them to be
  there.
  """
  WARPGROUPS: gl.constexpr = TILE_M // 64
  gl.static_assert(not TURNS or (OVERLAP and WARPGROUPS == 2))
  tile, head, index_b = place(BATCH_FIRST)
  head_k = head // (nhead_q // nhead_k)
  slot_b = index_b
  dense_rows = seqlen_q
  if (flags & scores.PACKED) != 0:
    index_b, tile = scores_hopper.find_sequence(
        tile, cu_seqlens_q, batch, TILE_M)
    slot_b = 0
  q_row, seqlen_q = scores_hopper.sequence_extent(
      index_b, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      scores.CU_SEQLENS_Q, scores.CU_SEQLENS_Q_PADDED)
  k_row, seqlen_k = scores_hopper.sequence_extent(
      index_b, cu_seqlens_k, cu_seqlens_k_padded, seqlen_k, flags,
      scores.CU_SEQLENS_K, scores.CU_SEQLENS_K_PADDED)
  row0 = tile * TILE_M
  # Rows that this block must write; the rest belong to others or to nobody.
  row_end = seqlen_q
  if (flags & scores.PACKED) == 0:
    row_end = dense_rows
  if row0 >= row_end:
    return  # A packed batch has slots that no sequence needs.
  if min_seqlen_q > 0:
    seqlen_q = gl.where(seqlen_q <= min_seqlen_q, 0, seqlen_q)
  off = gl.where((flags & scores.TOP_LEFT) != 0, 0, seqlen_k - seqlen_q)
  window = scores_hopper.Window(off, window_left, window_right, sink_tokens,
                                seqlen_q, seqlen_k)

  tile_lo, tile_hi, full_lo, full_hi = key_tiles(row0, TILE_M, window, TILE_N)
  steps = gl.maximum(tile_hi - tile_lo, 0)
  sinks = 0
  if FEATURES & scores.SINK_TOKENS:
    tile_lo = gl.minimum(tile_lo, tile_hi)
    sinks = gl.minimum((sink_tokens + TILE_N - 1) // TILE_N, tile_lo)
    steps += sinks

  # Rows of the last tile that belong to another sequence or to nobody: they
  # may hold anything, and 0 * NaN is NaN, so V's must be read as 0.
  foreign_rows = 0
  if (flags & (scores.PACKED | scores.CU_SEQLENS_K)) != 0:
    foreign_rows = tile_hi * TILE_N - seqlen_k
  b = slot_b.to(gl.int64)
  lead_k = parts.lead(b * batch_stride_k + head_k * nhead_stride_k, hdim_q)
  lead_v = parts.lead(b * batch_stride_v + head_k * nhead_stride_v, hdim_v)
  v += b * batch_stride_v + head_k * nhead_stride_v - lead_v

  sink_logit = 0.0
  if (flags & scores.SINK) != 0:
    sink_logit = gl.load(sink + index_b * nhead_q + head)
  # A call with nothing but dropout has no mask: its arguments say where what
  # dropout keeps is written.
  if FEATURES == scores.DROPOUT:
    mask += index_b * batch_stride_mask + head * nhead_stride_mask
  heads = scores_hopper.heads_of(
      index_b, nhead_q, bias, bias_f32, stride_bias, key_stride_bias,
      nhead_stride_bias, batch_stride_bias, mask, stride_mask, key_stride_mask,
      nhead_stride_mask, batch_stride_mask, alibi_slopes, dropout_state,
      softmax_scale, logits_soft_cap, drop_threshold, rp_keep, flags, FEATURES)
  terms = scores_hopper.terms_of(heads, head, FEATURES)
  out += (b * batch_stride_o + head * nhead_stride_o +
          q_row.to(gl.int64) * stride_o)
  lse += b * batch_stride_lse + head * nhead_stride_lse + q_row

  q_desc = parts.Source(q_desc, q_tail, -lead_k)
  k_desc = parts.Source(k_desc, k_tail, -lead_k)
  v_desc = parts.Source(v_desc, v_tail, -lead_v)
  q_smem = parts.allocate(WARPGROUPS, q_desc, TAIL)
  k_smem = parts.allocate(STAGES, k_desc, TAIL)
  v_smem = parts.allocate(STAGES, v_desc, DV_TAIL)
  q_full = mbarrier.allocate_mbarrier(batch=WARPGROUPS)
  k_full = mbarrier.allocate_mbarrier(batch=STAGES)
  k_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  v_full = mbarrier.allocate_mbarrier(batch=STAGES)
  v_empty = mbarrier.allocate_mbarrier(batch=STAGES)
  # A warpgroup may start its products.
  turns = mbarrier.allocate_mbarrier(batch=2)
  for w in gl.static_range(WARPGROUPS):
    mbarrier.init(q_full.index(w), count=1)
  if TURNS:
    for w in gl.static_range(2):
      mbarrier.init(turns.index(w), count=1)
  for i in gl.static_range(STAGES):
    mbarrier.init(k_full.index(i),
                  count=1 if PLANES else 1 + plane_arrivals(FEATURES))
    mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(k_empty.index(i), count=WARPGROUPS)
    mbarrier.init(v_empty.index(i), count=WARPGROUPS)
  planes = allocate_planes(heads, bias_desc, PLANES or STAGES, WARPGROUPS,
                           TILE_N, FEATURES)
  planes_full, planes_empty = k_full, k_empty
  if PLANES:
    planes_full = mbarrier.allocate_mbarrier(batch=PLANES)
    planes_empty = mbarrier.allocate_mbarrier(batch=PLANES)
    for i in gl.static_range(PLANES):
      mbarrier.init(planes_full.index(i), count=plane_arrivals(FEATURES))
      mbarrier.init(planes_empty.index(i), count=WARPGROUPS)
  keys = Keys(k_smem, v_smem, k_full, k_empty, v_full, v_empty, planes,
              planes_full, planes_empty)

  produce = (q_desc, k_desc, v_desc, q_smem, q_full, keys, slot_b, head,
             head_k, q_row, k_row, row0, tile_hi, steps, sinks, v, stride_v,
             hdim_v + lead_v, foreign_rows, terms, window, bias_desc)
  consume = (q_smem, q_full, keys, turns, out, lse, sink_logit, stride_o,
             lead_v, hdim_v, row0, row_end, window, terms, flags, tile_lo,
             tile_hi, full_lo, full_hi, steps, sinks)
  if WARPGROUPS == 1:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    PLANES, OVERLAP, OWN_KEYS, TURNS, FEATURES)),
        (_produce, (produce, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    PLANES, WARPGROUPS, FEATURES)),
    ], [4], [40])
  elif WARPGROUPS == 2:
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    PLANES, OVERLAP, OWN_KEYS, TURNS, FEATURES)),
        (_consume, (1, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    PLANES, OVERLAP, OWN_KEYS, TURNS, FEATURES)),
        (_produce, (produce, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    PLANES, WARPGROUPS, FEATURES)),
    ], [4, 4], [104, 24] if PAIRED else [240, 24] if mapped(FEATURES) else
                       scores_hopper.registers(FEATURES))
  else:
    gl.static_assert(WARPGROUPS == 3)
    gl.warp_specialize([
        (_consume, (0, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    PLANES, OVERLAP, OWN_KEYS, TURNS, FEATURES)),
        (_consume, (1, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    PLANES, OVERLAP, OWN_KEYS, TURNS, FEATURES)),
        (_consume, (2, consume, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    PLANES, OVERLAP, OWN_KEYS, TURNS, FEATURES)),
        (_produce, (produce, TILE_N, HEAD, TAIL, BLOCK_DV, DV_TAIL, STAGES,
                    PLANES, WARPGROUPS, FEATURES)),
    ], [4, 4, 4], [160, 160, 32])
