# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values go round, queries stay.

In step t a device has the keys of the one t places before it. What of them its
queries see is, in each order of tokens, one or a few blocks of attention that
are causal, full or empty; which, the device alone knows, and says it by first
rows and lengths, so that all devices run one program. Partial results are
joined by their log-sum-exps (Ring Attention, arXiv:2310.01889).

Backward the ring turns the other way: it begins with the keys that came last,
which the forward pass kept, and gradients of keys arrive at home with the last
step, that of a device's own keys. So every transfer has a kernel to hide
behind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

import jax
from jax import lax
from jax._src.aiter.attention import op as mha_op
from jax._src.aiter.attention import reference
from jax._src.aiter.attention.rows import at_place, cumulative
from jax._src.aiter.attention.types import (
  Config,
  Operands,
  Saved,
  Wanted,
)
from jax._src.aiter.core import philox
from jax._src.aiter.core.derivative import differentiable, formula_jvp
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.parallel.order import places as place_of
from jax._src.aiter.parallel.order import rows_before


class RingConfig(NamedTuple):
  """Static facts of a call; hashable.

  Attributes:
    mha: those of attention; its window is the whole sequence's.
    axis: the mesh axis.
    size: of it.
    order: None, "zigzag" or "striped", as order.py has them.

  The operands of a call are one device's, dense; but cu_seqlens_q, if given, is
  that of sequences which are packed on all devices, whose batch is then 1.
  """
  mha: Config
  axis: str
  size: int
  order: str | None


class _Spans(NamedTuple):
  """Where sequences lie, one after the other, int32 [n + 1] each.

  Attributes:
    bounds_q: first rows of queries, and the last one's end.
    bounds_k: likewise of keys.
    end_k: int32 [n], where keys end, if it is before the next one's.
  """
  bounds_q: jax.Array
  bounds_k: jax.Array
  end_k: jax.Array | None = None

  def packed(self, b: int, s: int):
    """Lengths and first rows in b * s rows: those of a packed call's operands.

    Without `end_k` the first rows are None: lengths alone tell them, by
    sequences of queries or of keys only for what lies before and after these.
    A gradient then has no rows of nobody.
    """
    q, k = self.bounds_q, self.bounds_k
    if self.end_k is not None:
      counts = jnp.diff(q), jnp.maximum(self.end_k - k[:-1], 0)
      return *(_cumulative_of_each(b, t) for t in counts), *(
          _starts(b, s, t) for t in (q[:-1], k[:-1]))
    zero, end = jnp.zeros(1, q.dtype), jnp.full(1, s, q.dtype)
    return (_starts(b, s, jnp.concatenate([zero, q[:1], q, end])),
            _starts(b, s, jnp.concatenate([zero, zero, k, k[-1:]])), None, None)


class _Block(NamedTuple):
  """Queries and visiting keys that one call of attention joins.

  Attributes:
    rows: first and last + 1 of the device's queries.
    cols: likewise of the keys.
    window: of the call, (left, right), aligned at the last visible key.
    length: how many of the keys are visible, traced; None for all.
    distance: tokens from a query back to the key it is aligned with.
    spans: what of rows and cols the sequences of a packed call are; None for a
      dense one.
  """
  rows: tuple[int, int]
  cols: tuple[int, int]
  window: tuple[int, int]
  length: Any = None
  distance: int = 0
  spans: _Spans | None = None


class _Visit(NamedTuple):
  """What a device knows of a step: whose keys have come, and how many.

  Attributes:
    cfg: static facts.
    places: the keys are those of the device so many places before.
    s: rows of a device.
    cu: cumulative lengths of the sequences, packed on all devices, or None.
    apart: blocks are of rows and columns that are known while tracing.
    runs: rows and columns of a block follow each other in the sequence, too.
  """
  cfg: RingConfig
  places: int
  s: int
  cu: jax.Array | None
  apart: bool
  runs: bool

  @property
  def rank(self):
    return lax.axis_index(self.cfg.axis).astype(jnp.int32)

  @property
  def earlier(self):
    """Whether that device has a lower index."""
    return self.rank >= self.places

  def bounds(self, cu):
    """Where sequences begin and end in this device's rows, and in the keys."""
    cfg = self.cfg
    return tuple(
        rows_before(cu, cfg.order, cfg.size, device % cfg.size, self.s)
        for device in (self.rank, self.rank - self.places))

  def whole(self, window) -> list[_Block]:
    """All rows and keys, or all of each sequence."""
    spans = None
    if self.cu is not None:
      own, theirs = self.bounds(self.cu)
      spans = _Spans(own, theirs)
    return [_Block((0, self.s), (0, self.s), window, spans=spans)]


def _striped(visit: _Visit):
  cfg, step, s = visit.cfg, visit.places, visit.s
  left, right = cfg.mha.window_left, cfg.mha.window_right
  if right < 0:
    return visit.whole((-1, -1))
  # A key's place among all is n times its own, plus its device's: of a later
  # device's keys a query sees those up to the one before its own place.
  reach = left if left < 0 else (left - step) // cfg.size
  if left >= 0 and reach < 0:
    return []
  block, = visit.whole((reach, 0))
  hidden = jnp.where(visit.earlier, 0, 1)
  if block.spans is not None:
    own, theirs = visit.bounds(visit.cu)
    block = block._replace(spans=_Spans(own, theirs, own[1:] - hidden))
  elif step:
    block = block._replace(length=s - hidden)
  return [block._replace(distance=step)]


def _zigzag(visit: _Visit):
  s, half, full = visit.s, visit.s // 2, (-1, -1)
  causal = visit.cfg.mha.window_right >= 0
  if visit.runs or (visit.apart and causal and visit.places):
    return _halves(visit, causal)
  if not causal:
    return visit.whole(full)
  if visit.places == 0:
    return visit.whole((-1, 0))
  # All queries see the first half of an earlier device's keys; the last half of
  # them sees all of a later one's.
  cu = visit.cu
  if cu is None:
    cu = jnp.array([0, s * visit.cfg.size], jnp.int32)
  own, theirs = visit.bounds(cu)
  own = jnp.where(visit.earlier, own, jnp.maximum(own, half))
  theirs = jnp.where(visit.earlier, jnp.minimum(theirs, half), theirs)
  return [_Block((0, s), (0, s), full, spans=_Spans(own, theirs))]


def _halves(visit: _Visit, causal: bool):
  """The blocks of an order by zigzag of which each has one half of the rows.

  And of the keys: the last half of any device's comes after all first halves.
  """
  s, half = visit.s, visit.s // 2
  halves = (0, half), (half, s)
  blocks = []
  for i, rows in enumerate(halves):
    for j, cols in enumerate(halves):
      if causal and j > i:
        continue
      seen, window = True, (-1, -1)
      if causal and i == j and visit.places:
        seen = visit.earlier if i == 0 else ~visit.earlier
      elif causal and i == j:
        window = (-1, 0)
      block = _Block(rows, cols, window)
      if seen is not True:
        block = block._replace(length=jnp.where(seen, half, 0))
      blocks.append(block)
  return blocks


def _contiguous(visit: _Visit):
  cfg, step, s = visit.cfg, visit.places, visit.s
  left, right = cfg.mha.window_left, cfg.mha.window_right
  if step == 0 or left < 0 and right < 0:
    return visit.whole((left, right))
  if visit.cu is not None:
    own, theirs = visit.bounds(visit.cu)
    theirs = jnp.where(visit.earlier, theirs, 0)
    return [_Block((0, s), (0, s), (-1, -1), spans=_Spans(own, theirs))]
  blocks = []
  for away, here in ((step * s, visit.earlier),
                     ((step - cfg.size) * s, ~visit.earlier)):
    # Query i sees keys i + low to i + high of these; None is unbounded.
    low = away - left if left >= 0 and away - left > -s else None
    high = away + right if right >= 0 and away + right < s else None
    rows = (max(0, -(high or 0)), min(s, s - (low or 0)))
    cols = (max(0, low or 0), min(s, s + (high or 0)))
    if visit.runs:
      # As a dropout state counts columns; the window hides what is too many.
      cols = cols[0] // philox.COLUMNS * philox.COLUMNS, cols[1]
    if rows[0] >= rows[1] or cols[0] >= cols[1]:
      continue
    count = cols[1] - cols[0]
    aligned = count - (rows[1] - rows[0]) + cols[0] - rows[0]
    window = (-1 if low is None else aligned - low,
              -1 if high is None else high - aligned)
    blocks.append(_Block(rows, cols, window, jnp.where(here, count, 0)))
  return blocks


_BLOCKS = {"striped": _striped, "zigzag": _zigzag, None: _contiguous}


def _steps(cfg: RingConfig, x: Operands):
  """What a device does with the keys of others.

  Returns:
    (steps, kept): (places, blocks) of each step in which a device may see a
    key, the first of which is its own keys'; and first and last + 1 of the keys
    that others read.
  """
  s = x.q.shape[1]
  steps = [(places, _BLOCKS[cfg.order](
      _Visit(cfg, places, s, x.cu_seqlens_q, x.bias is not None,
             x.dropout_state is not None)))
      for places in range(cfg.size)]
  steps = [(places, blocks) for places, blocks in steps if blocks]
  read = [b.cols for _, blocks in steps[1:] for b in blocks] or [(0, s)]
  return steps, (min(first for first, _ in read), max(end for _, end in read))


def _shift(cfg: RingConfig, arrays, places: int):
  """Each device's arrays, of the device so many places before.

  They are one transfer: XLA has one under way at a time, so of two one would
  have nothing to hide behind.
  """
  to = [(i, (i + places) % cfg.size) for i in range(cfg.size)]
  sent = lax.ppermute(
      jnp.concatenate([t.reshape(-1) for t in arrays]), cfg.axis, to)
  parts, first = [], 0
  for t in arrays:
    parts.append(lax.slice_in_dim(sent, first, first + t.size).reshape(t.shape))
    first += t.size
  return tuple(parts)


def _rows(t, span, axis: int = 1):
  return lax.slice_in_dim(t, *span, axis=axis)


def _flat(t):
  """[b, s, ..] -> [b * s, ..]."""
  return t.reshape(-1, *t.shape[2:])


def _flat_lse(t):
  """[b, h, s] -> [h, b * s]."""
  return jnp.swapaxes(t, 0, 1).reshape(t.shape[1], -1)


def _cumulative_of_each(b: int, counts):
  """cumulative of numbers that each of b has."""
  return cumulative(jnp.broadcast_to(counts, (b, *counts.shape)).reshape(-1))


def _starts(b: int, s: int, first):
  """First rows in each of b * s rows, and their end."""
  starts = s * jnp.arange(b, dtype=jnp.int32)[:, None] + first
  return jnp.append(starts.reshape(-1), b * s).astype(jnp.int32)


class _Rows(NamedTuple):
  """Rows first to last + 1 of an array [b, s, ..] that is 0 elsewhere."""
  t: jax.Array
  span: tuple[int, int]

  def rows(self, span):
    """Other rows of it."""
    pads = (self.span[0] - span[0], span[1] - self.span[1])
    return lax.pad(self.t, jnp.zeros((), self.t.dtype), [
        (0, 0, 0), (*pads, 0), *[(0, 0, 0)] * (self.t.ndim - 2)])


class _Part(NamedTuple):
  """A block as a call of attention: its operands, and back from its results."""
  cfg: Config
  x: Operands

  @classmethod
  def of(cls, cfg: RingConfig, places: int, block: _Block, x: Operands, kv):
    q, k, v = _rows(x.q, block.rows), *(t.rows(block.cols) for t in kv)
    b, s = q.shape[:2]
    lengths = bias = slopes = None
    left, right = block.window
    mha = cfg.mha._replace(window_left=left, window_right=right)
    if block.spans is not None:
      return cls(mha, vary_together(Operands(
          _flat(q), _flat(k), _flat(v), *block.spans.packed(b, s))))
    if block.length is not None:
      lengths = block.length * jnp.arange(b + 1, dtype=jnp.int32)
    if x.bias is not None:
      bias = _bias_block(cfg, places, block, x)
    if x.alibi_slopes is not None:
      slopes = x.alibi_slopes * cfg.size
    return cls(mha, vary_together(Operands(
        q, k, v, cu_seqlens_k=lengths, bias=bias, alibi_slopes=slopes,
        dropout_state=_dropout_block(cfg, places, block, x))))

  def saved(self, dout, out, lse, dlse) -> Saved:
    """What the backward pass saved, of the block's own rows."""
    if not self.x.packed:
      return Saved(dout, out, lse, dlse)
    return Saved(_flat(dout), _flat(out), _flat_lse(lse),
                 None if dlse is None else _flat_lse(dlse))

  def lse(self, t, b: int):
    """[b, h, s] of the call's."""
    return jnp.swapaxes(
        t.reshape(t.shape[0], b, -1), 0, 1) if self.x.packed else t


def _first_column(cfg: RingConfig, places: int, block: _Block, s: int):
  rank = lax.axis_index(cfg.axis).astype(jnp.int32)
  return (rank - places) % cfg.size * s + block.cols[0]


def _bias_block(cfg: RingConfig, places: int, block: _Block, x: Operands):
  bias = x.bias
  if bias.shape[2] > 1:
    bias = _rows(bias, block.rows, 2)
  return lax.dynamic_slice_in_dim(
      bias, _first_column(cfg, places, block, x.q.shape[1]),
      block.cols[1] - block.cols[0], 3)


def _dropout_block(cfg: RingConfig, places: int, block: _Block, x: Operands):
  """The state of a block's first row and column."""
  if x.dropout_state is None:
    return None
  rank = lax.axis_index(cfg.axis).astype(jnp.int32)
  row, col = (
      place_of(cfg.order, cfg.size, device % cfg.size, x.q.shape[1])[first]
      for device, first in ((rank, block.rows[0]),
                            (rank - places, block.cols[0])))
  return at_place(x.dropout_state, row, col)


def _farther(block: _Block, x: Operands):
  """[b, h, 1]: what slopes take off a block's scores beside its own part."""
  return x.alibi_slopes[:, :, None] * block.distance


def weighed(out, lse, joint):
  """A partial result's share of a joint one, in float32 at least.

  Args:
    out: [b, s, h, d].
    lse: [b, h, s], its log-sum-exp.
    joint: likewise, of all parts.
  """
  weight = jnp.exp(jnp.where(lse == -jnp.inf, -jnp.inf, lse - joint))
  return out.astype(weight.dtype) * jnp.swapaxes(weight, 1, 2)[..., None]


def _put(t, part, span, axis: int):
  """t with other rows, in t's place: selected, for XLA to fuse with a sum."""
  if part.shape == t.shape:
    return part.astype(t.dtype)
  pads = [(0, 0, 0)] * t.ndim
  pads[axis] = span[0], t.shape[axis] - span[1], 0
  row = lax.broadcasted_iota(jnp.int32, t.shape, axis)
  padded = lax.pad(part, jnp.zeros((), part.dtype), pads)
  return jnp.where((row >= span[0]) & (row < span[1]), padded.astype(t.dtype),
                   t)


def _wide(dtype):
  return jnp.promote_types(dtype, jnp.float32)


def _joined(total, part, rows, s: int, dtype):
  """(out, lse) of all s rows with a part's, of some of them, taken in."""
  if total is None:
    pads = (rows[0], s - rows[1], 0)
    return tuple(
        lax.pad(t, jnp.asarray(nothing, t.dtype), [
            pads if a == axis else (0, 0, 0) for a in range(t.ndim)])
        for t, nothing, axis in zip(part, (0, -jnp.inf), (1, 2)))
  (all_out, all_lse), (out, lse) = total, part
  own_out, own_lse = _rows(all_out, rows), _rows(all_lse, rows, 2)
  joint = jnp.logaddexp(own_lse, lse)
  out = weighed(own_out, own_lse, joint) + weighed(out, lse, joint)
  return (_put(all_out.astype(dtype), out, rows, 1),
          _put(all_lse, joint, rows, 2))


def _ring(attend, cfg: RingConfig, x: Operands):
  """(out, lse, keys and values of the last step).

  `attend` is (Config, Operands) -> (out, lse, ..).
  """
  total, (b, s) = None, x.q.shape[:2]
  steps, kept = _steps(cfg, x)
  kv = _Rows(x.k, (0, s)), _Rows(x.v, (0, s))
  for (places, blocks), then in zip(steps, [*steps[1:], None]):
    if then is not None:
      # On its way while this step's kernel runs.
      coming = _shift(cfg, [t.rows(kept) for t in kv], then[0] - places)
    for block in blocks:
      part = _Part.of(cfg, places, block, x, kv)
      out, lse, *_ = attend(*part)
      lse = part.lse(lse, b)
      out = out.reshape(b, -1, *out.shape[-2:])
      if x.alibi_slopes is not None:
        lse = lse - _farther(block, x)
      final = then is None and block is blocks[-1]
      total = _joined(total, (out, lse), block.rows, s,
                      x.q.dtype if final else _wide(x.q.dtype))
    if then is not None:
      # One step after the other, whatever a scheduler would rather begin with.
      total, coming = lax.optimization_barrier((total, coming))
      kv = tuple(_Rows(t, kept) for t in coming)
  return *total, tuple(t.t for t in kv)


def _save(cfg: RingConfig, x: Operands):
  out, lse, kv = _ring(mha_op.mha_fwd, cfg, x)
  return (out, lse), (x, out, lse, kv)


def _added(a: _Rows | None, b: _Rows, dtype) -> _Rows:
  """Their sum, rounded once, to a dtype."""
  if a is None:
    return b
  span = min(a.span[0], b.span[0]), max(a.span[1], b.span[1])
  wide = _wide(dtype)
  total = a.rows(span).astype(wide) + b.rows(span).astype(wide)
  return _Rows(total.astype(dtype), span)


def _backward(cfg: RingConfig, wanted, saved, cotangents):
  wanted, = wanted
  x, out, lse, kv = saved
  dout, dlse = cotangents
  if dout is None:
    dout = jnp.zeros_like(out)
  if dlse is not None:
    dlse = jnp.where(lse == -jnp.inf, 0, dlse)
  want = Wanted(dbias=bool(wanted.bias or wanted.alibi_slopes),
                dslopes=bool(wanted.alibi_slopes))
  if want.dslopes:
    x = _with_bias_of_each_head(cfg, x)
  dq = dk = dv = None
  dslopes = 0
  dbias = jnp.zeros(
      x.bias.shape, _wide(x.bias.dtype)) if want.dbias else None
  b, s = x.q.shape[:2]
  steps, kept = _steps(cfg, x)
  own_kv = _Rows(x.k, (0, s)), _Rows(x.v, (0, s))
  kv = own_kv if len(steps) == 1 else tuple(_Rows(t, kept) for t in kv)
  for (places, blocks), then in zip(
      reversed(steps), [*reversed(steps[:-1]), None]):
    dtype = x.q.dtype if then is None else _wide(x.q.dtype)
    if then is not None:
      back = then[0] - places
      coming = own_kv
      if then[0]:
        coming = tuple(
            _Rows(t, kept) for t in _shift(cfg, [t.t for t in kv], back))
    for block in blocks:
      part = _Part.of(cfg, places, block, x, kv)
      own_lse = _rows(lse, block.rows, 2)
      if x.alibi_slopes is not None:
        own_lse = own_lse + _farther(block, x)
      grads = mha_op.mha_bwd(
          mha_op.BwdConfig(part.cfg, want), part.x,
          part.saved(_rows(dout, block.rows), _rows(out, block.rows), own_lse,
                     None if dlse is None else _rows(dlse, block.rows, 2)))
      dq, dk, dv = (
          _added(total, _Rows(t.reshape(b, -1, *t.shape[-2:]), span), dtype)
          for total, t, span in ((dq, grads.dq, block.rows),
                                 (dk, grads.dk, block.cols),
                                 (dv, grads.dv, block.cols)))
      if want.dbias:
        dbias = _add_bias_block(cfg, places, block, dbias, grads.dbias, s)
      if want.dslopes:
        # Of what is not the kernel's part, one number a block; see _farther.
        dslopes += (cfg.size * grads.dslopes
                    - block.distance * jnp.sum(grads.dbias, (2, 3)))
    if then is not None:
      dk, dv = dk.rows(kept), dv.rows(kept)
      # As above: the gradients are on their way while the next kernel runs.
      arrays, dkv, coming_kv = lax.optimization_barrier(
          (dq.t, (dk, dv), tuple(t.t for t in coming)))
      dq = dq._replace(t=arrays)
      dk, dv = (_Rows(t, kept) for t in _shift(cfg, dkv, back))
      kv = tuple(old._replace(t=t) for old, t in zip(coming, coming_kv))
  empty = Operands(*[None] * len(x))
  return (empty._replace(
      q=dq.t, k=dk.t, v=dv.t,
      bias=reference.sum_to(dbias, saved[0].bias.shape)
      if wanted.bias else None,
      alibi_slopes=dslopes if want.dslopes else None),)


def _with_bias_of_each_head(cfg: RingConfig, x: Operands) -> Operands:
  """x with a bias whose gradient is that of each head's scores, summed."""
  lead = x.q.shape[0], x.q.shape[2]
  if x.bias is None:
    shape = (*lead, 1, cfg.size * x.k.shape[1])
    return x._replace(bias=jnp.zeros(shape, _wide(x.q.dtype)))
  return x._replace(bias=jnp.broadcast_to(
      x.bias, (*lead, *x.bias.shape[2:])))


def _add_bias_block(cfg, places, block, dbias, part, s):
  first = _first_column(cfg, places, block, s)
  rows = block.rows if dbias.shape[2] > 1 else (0, 1)
  start = (0, 0, rows[0], first)
  old = lax.dynamic_slice(
      dbias, start, (*dbias.shape[:2], rows[1] - rows[0], part.shape[3]))
  return lax.dynamic_update_slice(dbias, old + part, start)


def _tangent(cfg: RingConfig, saved, tangents):
  x, *_ = saved
  formula = lambda cfg, x: reference.mha_fwd(cfg, x, every_block=True)
  return formula_jvp(
      lambda x: _ring(formula, cfg, x)[:2], (x,), tangents)


# (RingConfig, Operands) -> (out, lse)
ring = differentiable(
    lambda cfg, x: _ring(
        lambda cfg, x: mha_op.mha_fwd(cfg._replace(inference=True), x), cfg,
        x)[:2],
    _backward, save=_save, tangent=_tangent)
