# SPDX-License-Identifier: Apache-2.0
"""Attention in jax.numpy: the formulas, by blocks, for any platform.

Memory is linear in the sequence lengths, forward and backward: at most one
block of scores a (batch, head) is alive. Short sequences are one block and no
loop; very short ones keep their probabilities, as the plain formula does.
Blocks that no query of theirs can see are skipped, so a causal mask halves the
work and a window makes it proportional to the window.

Dense and packed calls share all code: a packed call is a dense one of batch 1
in which a query sees only keys of its own segment.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from jax._src.aiter.attention.types import (
  Config,
  Grads,
  Operands,
  Saved,
  Wanted,
)
from jax._src.aiter.core import dims, philox
from jax._src.aiter.core.partition import vary_like

# A call with at most this many queries and keys is one block.
_ONE_BLOCK = 1024
# With at most so many its probabilities may be kept for the backward pass: more
# take longer to read than to compute again.
_SMALL = 256
_BLOCK_Q = 512
_BLOCK_K = 512
_INF = float("inf")


@dataclasses.dataclass(frozen=True)
class _Problem:
  """A call in canonical form; B is the batch, or 1 if packed.

  Positions have a leading axis of B or 1. `row`, `diag` and `col` count inside
  the sequence; `diag` is the key that the diagonal meets in a row. Segments
  are None if every query and key is real and of one sequence; elsewhere -1
  marks a query and -2 a key of none.
  """
  q: jax.Array  # [B, hk, g, sq, dqk]
  k: jax.Array  # [B, hk, sk, dqk]
  v: jax.Array  # [B, hk, sk, dv]
  row: jax.Array  # [1, sq] or [B, sq]
  diag: jax.Array
  col: jax.Array
  segment_q: jax.Array | None
  segment_k: jax.Array | None
  first_key: jax.Array | None  # [1 | B, sq] first and last (exclusive) visible
  last_key: jax.Array | None  # index into k, for skipping blocks
  bias: jax.Array | None  # [1 | B, 1 | hk, 1 | g, 1 | sq, 1 | sk]
  mask: jax.Array | None  # likewise, bool
  slopes: jax.Array | None  # [B, hk, g, 1 | sq]
  sink: jax.Array | None  # [B, hk, g, 1 | sq]
  dropout_state: jax.Array | None  # [B, hk, g, 1 | sq, 6]
  sq: int
  sk: int
  block_q: int
  block_k: int
  every_row_sees: bool  # A key, and nothing hides one but causal masking.

  @property
  def one_block(self) -> bool:
    return self.block_q == self.sq and self.block_k == self.sk


def is_small(x: Operands) -> bool:
  """Whether the probabilities of a call are few enough to be kept."""
  most = min(_SMALL, _ONE_BLOCK)
  return (dims.at_most(x.q.shape[-3], most)
          and dims.at_most(x.k.shape[-3], most))


def _accumulator(dtype) -> Any:
  return jnp.promote_types(dtype, jnp.float32)


def _dot(cfg: Config, spec: str, a, b):
  """An einsum in the accumulator's type; CPUs lack some narrow dots."""
  acc = _accumulator(b.dtype)
  return jnp.einsum(
      spec, a.astype(acc), b.astype(acc), precision=cfg.precision)


def _without_groups(spec: str) -> str:
  """An einsum of groups of one head, without their axis.

  XLA's fusions of CPUs are fewer and larger where an axis of 1 is not there.
  """
  return spec.replace("g", "")


def _segments(starts, lengths, total: int, nobody: int):
  """Segment and position inside it of every packed row."""
  at = jnp.arange(total, dtype=jnp.int32)
  segment = dims.last_start(starts, at)
  # Empty sequences share a start with their successor, which side="right"
  # picks; a row before the first start belongs to nobody.
  index = jnp.clip(segment, 0, starts.shape[0] - 1)
  position = at - starts[index]
  real = (segment >= 0) & (position < lengths[index])
  return jnp.where(real, segment, nobody), position, index


def _problem(cfg: Config, x: Operands) -> _Problem:
  """Canonical form of a call."""
  acc = _accumulator(x.q.dtype)
  hq, hk = x.q.shape[-2], x.k.shape[-2]
  g = hq // hk
  q, k, v = ((t[None] if x.packed else t) for t in (x.q, x.k, x.v))
  b, sq, sk = q.shape[0], q.shape[1], k.shape[1]
  q = q.reshape(b, sq, hk, g, q.shape[-1]).transpose(0, 2, 3, 1, 4)
  k, v = (t.transpose(0, 2, 1, 3) for t in (k, v))

  def grouped(t):  # [.., hq, ..] -> [.., hk, g, ..] at axis 1
    if t is None:
      return None
    heads = (hk, g) if t.shape[1] == hq else (1, 1)
    return t.reshape(t.shape[0], *heads, *t.shape[2:])

  def extents(cu, padded, rows):
    """First rows and lengths of all sequences, held inside `rows`."""
    rows = dims.as_int32(rows)
    if cu is None:
      return 0, rows
    start = 0
    if x.packed:
      start = jnp.clip((cu if padded is None else padded)[:-1], 0, rows)
    return start, jnp.clip(cu[1:] - cu[:-1], 0, rows - start)

  start_q, len_q = extents(x.cu_seqlens_q, x.cu_seqlens_q_padded, sq)
  start_k, len_k = extents(x.cu_seqlens_k, x.cu_seqlens_k_padded, sk)
  slopes, sink, state = x.alibi_slopes, x.sink, x.dropout_state
  segment_q = segment_k = None
  if x.packed:
    segment_q, row, seq = _segments(start_q, len_q, sq, -1)
    segment_k, col, _ = _segments(start_k, len_k, sk, -2)
    len_q, len_k, start_k = (t[seq][None] for t in (len_q, len_k, start_k))
    segment_q, segment_k = segment_q[None], segment_k[None]
    row, col = row[None], col[None]
    # Rows of the per-sequence tables move to the query axis: [1, hq, sq, ..].
    slopes, sink, state = (
        None if t is None else jnp.moveaxis(t[seq], 0, 1)[None]
        for t in (slopes, sink, state))
  else:
    row = jnp.arange(sq, dtype=jnp.int32)[None]
    col = jnp.arange(sk, dtype=jnp.int32)[None]
    padded = x.cu_seqlens_q is not None or x.cu_seqlens_k is not None
    len_q, len_k = (
        n if cu is None else n[:, None] for n, cu in (
            (len_q, x.cu_seqlens_q), (len_k, x.cu_seqlens_k)))
    if padded or cfg.min_seqlen_q > 0:
      segment_q = jnp.where(row < len_q, 0, -1)
      segment_k = jnp.where(col < len_k, 0, -2)
    slopes, sink, state = (
        None if t is None else t[:, :, None] for t in (slopes, sink, state))
  if cfg.min_seqlen_q > 0:
    segment_q = jnp.where(len_q > cfg.min_seqlen_q, segment_q, -1)
  diag = row if cfg.top_left else row + (len_k - len_q)

  if segment_q is not None:
    # Rows and columns of nobody may hold anything, NaN included.
    q = jnp.where((segment_q >= 0)[:, None, None, :, None], q, 0)
    k, v = (jnp.where((segment_k >= 0)[:, None, :, None], t, 0) for t in (k, v))

  sink = grouped(sink)
  if sink is not None:
    sink = sink.astype(acc)
    if segment_q is not None:
      sink = jnp.where((segment_q >= 0)[:, None, None, :], sink, -_INF)
  block_q, block_k = sq, sk
  if not (dims.at_most(sq, _ONE_BLOCK) and dims.at_most(sk, _ONE_BLOCK)):
    block_q, block_k = (n if dims.at_most(n, most) else most
                        for n, most in ((sq, _BLOCK_Q), (sk, _BLOCK_K)))
  first = last = None
  if block_k != sk:
    first = 0 if cfg.window_left < 0 or cfg.sink_tokens > 0 else jnp.maximum(
        diag - cfg.window_left, 0)
    last = len_k if cfg.window_right < 0 else jnp.minimum(
        len_k, diag + cfg.window_right + 1)
    # The diagonal may be one for all where their lengths are not.
    first, last, _ = jnp.broadcast_arrays(start_k + first, start_k + last, diag)
    first, last = first.astype(jnp.int32), last.astype(jnp.int32)
    seen = first < last
    if segment_q is not None:
      seen &= segment_q >= 0
    first, last = jnp.where(seen, first, sk), jnp.where(seen, last, 0)
  bias, mask = grouped(x.bias), grouped(x.mask)
  if mask is not None and mask.shape[3] == 1:
    # A key that is hidden from all may hold anything, and so may its value.
    shown = jnp.any(mask[:, :, :, 0], axis=2)[..., None]
    k, v = (jnp.where(shown, t, 0) for t in (k, v))
  return _Problem(
      q, k, v, row, diag, col, segment_q, segment_k, first, last, bias, mask,
      None if slopes is None else grouped(slopes).astype(acc), sink,
      grouped(state), sq, sk, block_q, block_k,
      segment_q is None and bias is None and mask is None
      and cfg.window_left < 0 and (
          cfg.window_right < 0 or cfg.top_left or dims.at_most(sq, sk)))


def _slice(x, axis: int, start, size: int):
  """x[start : start + size] along axis; an axis of 1 broadcasts, stays."""
  if x is None or x.shape[axis] == 1 or x.shape[axis] == size:
    return x
  return lax.dynamic_slice_in_dim(x, start, size, axis)


def _pad(x, axis: int, multiple: int, value=0):
  """Pads an axis (unless it broadcasts) to a multiple."""
  if x is None or x.shape[axis] == 1 or x.shape[axis] % multiple == 0:
    return x
  pads = [(0, 0)] * x.ndim
  pads[axis] = (0, dims.round_up(x.shape[axis], multiple) - x.shape[axis])
  return jnp.pad(x, pads, constant_values=value)


def _pad_to_blocks(p: _Problem) -> _Problem:
  """Rounds sq and sk up to whole blocks; the new rows are of no segment."""
  if p.sq % p.block_q == 0 and p.sk % p.block_k == 0:
    return p
  segment_q, segment_k = p.segment_q, p.segment_k
  if segment_q is None:
    segment_q = jnp.zeros((1, p.sq), jnp.int32)
    segment_k = jnp.zeros((1, p.sk), jnp.int32)
  q_, k_ = p.block_q, p.block_k
  planes = lambda t: _pad(_pad(t, 3, q_), 4, k_)
  return dataclasses.replace(
      p, q=_pad(p.q, 3, q_), k=_pad(p.k, 2, k_), v=_pad(p.v, 2, k_),
      row=_pad(p.row, 1, q_), diag=_pad(p.diag, 1, q_), col=_pad(p.col, 1, k_),
      segment_q=_pad(segment_q, 1, q_, -1),
      segment_k=_pad(segment_k, 1, k_, -2),
      first_key=_pad(p.first_key, 1, q_, p.sk),
      last_key=_pad(p.last_key, 1, q_), bias=planes(p.bias),
      mask=planes(p.mask),
      slopes=_pad(p.slopes, 3, q_), sink=_pad(p.sink, 3, q_, -_INF),
      dropout_state=_pad(p.dropout_state, 3, q_), every_row_sees=False)


def _query_block(p: _Problem, i) -> _Problem:
  """The problem restricted to query block i."""
  at, n = i * p.block_q, p.block_q
  return dataclasses.replace(
      p, q=_slice(p.q, 3, at, n), row=_slice(p.row, 1, at, n),
      diag=_slice(p.diag, 1, at, n), segment_q=_slice(p.segment_q, 1, at, n),
      first_key=_slice(p.first_key, 1, at, n),
      last_key=_slice(p.last_key, 1, at, n), bias=_slice(p.bias, 3, at, n),
      mask=_slice(p.mask, 3, at, n), slopes=_slice(p.slopes, 3, at, n),
      sink=_slice(p.sink, 3, at, n),
      dropout_state=_slice(p.dropout_state, 3, at, n))


def _key_block(p: _Problem, j) -> _Problem:
  """The problem restricted to key block j."""
  at, n = j * p.block_k, p.block_k
  return dataclasses.replace(
      p, k=_slice(p.k, 2, at, n), v=_slice(p.v, 2, at, n),
      col=_slice(p.col, 1, at, n), segment_k=_slice(p.segment_k, 1, at, n),
      bias=_slice(p.bias, 4, at, n), mask=_slice(p.mask, 4, at, n))


def _key_blocks(p: _Problem, every_block: bool):
  """Bounds of the key blocks that some query of this block sees."""
  n = p.k.shape[2] // p.block_k
  if every_block:
    return 0, n
  low = jnp.min(p.first_key) // p.block_k
  high = (jnp.max(p.last_key) + p.block_k - 1) // p.block_k
  return low, jnp.minimum(high, n)


def _distance(p: _Problem):
  """|i + off - j|, [1 | B, 1, 1, q, k]."""
  return jnp.abs(p.diag[:, :, None] - p.col[:, None, :])[:, None, None]


def _scores(cfg: Config, p: _Problem):
  """Scores of a block, -inf where hidden, and tanh of the soft cap or None."""
  s = _dot(cfg, "bhgqd,bhkd->bhgqk", p.q, p.k)
  s = s * s.dtype.type(cfg.softmax_scale)
  tanh = None
  if cfg.logits_soft_cap > 0:
    cap = s.dtype.type(cfg.logits_soft_cap)
    tanh = jnp.tanh(s / cap)
    s = tanh * cap
  if p.bias is not None:
    bias = p.bias.astype(s.dtype)
    s = jnp.where(bias == -_INF, bias, s + bias)
  if p.mask is not None:
    s = jnp.where(p.mask, s, -_INF)
  if p.slopes is not None:
    s = s - p.slopes[..., None] * _distance(p).astype(s.dtype)
  visible = None

  def restrict(condition):
    nonlocal visible
    visible = condition if visible is None else visible & condition

  diag, col = p.diag[:, :, None], p.col[:, None, :]
  if p.segment_q is not None:
    restrict(p.segment_q[:, :, None] == p.segment_k[:, None, :])
  if cfg.window_right >= 0:
    restrict(col <= diag + np.int32(cfg.window_right))
  if cfg.window_left >= 0:
    near = col >= diag - np.int32(cfg.window_left)
    restrict(near | (col < cfg.sink_tokens) if cfg.sink_tokens else near)
  if visible is not None:
    s = jnp.where(visible[:, None, None], s, -_INF)
  return s, tanh


def _keep(cfg: Config, p: _Problem, dense: bool):
  """Dropout mask of a block times 1 / (1 - p), or None."""
  if p.dropout_state is None or cfg.dropout_p == 0.0:
    return None
  rows = p.row[:, None, None, :, None]
  state = p.dropout_state[..., None, :]
  n = p.col.shape[1]
  if dense and p.block_k % philox.COLUMNS == 0:
    keep = philox.keep_mask(state, rows, p.col[0], cfg.dropout_p,
                            cols_are_a_run=True)
  elif dense and p.block_k == p.sk and dims.is_known(p.sk):
    cols = jnp.arange(dims.round_up(n, philox.COLUMNS), dtype=jnp.int32)
    keep = philox.keep_mask(state, rows, cols, cfg.dropout_p,
                            cols_are_a_run=True)[..., :n]
  else:
    keep = philox.keep_mask(state, rows, p.col[:, None, None, None, :],
                            cfg.dropout_p)
  acc = _accumulator(p.q.dtype)
  return keep.astype(acc) * acc.type(1 / (1 - cfg.dropout_p))


def kept_shape(x: Operands) -> tuple[int, int, int]:
  """The shape of what dropout keeps of a dense call, in words."""
  (b, sq, hq), sk = x.q.shape[:3], x.k.shape[1]
  return b, hq, -(-sq // 128) * -(-sk // 128) * 512


def kept_bits(cfg: Config, x: Operands):
  """What dropout keeps of a dense call, as kernels keep it.

  In words of tiles of 64 rows, then blocks of 128 keys; the rest is their own
  (third_party/aiter/kernels/mha/kept_hopper.py).
  """
  rows, cols = (dims.round_up(t.shape[1], 128) for t in (x.q, x.k))
  keep = philox.keep_mask(
      x.dropout_state[:, :, None, None], jnp.arange(rows)[:, None],
      jnp.arange(cols, dtype=jnp.int32), cfg.dropout_p, cols_are_a_run=True)
  # Rows 16, 8, 2, 1; keys 64, 16, 8, 1.
  keep = keep.reshape(*keep.shape[:2], rows // 64, 4, 2, 4, 2,
                      cols // 128, 2, 4, 2, 8)
  keep = jnp.transpose(keep, (0, 1, 2, 7, 8, 3, 11, 5, 9, 10, 6, 4))
  place = jnp.arange(32, dtype=jnp.uint32).reshape(4, 2, 2, 2)
  words = jnp.sum(keep.astype(jnp.uint32) << place, (-4, -3, -2, -1),
                  dtype=jnp.uint32).reshape(kept_shape(x))
  return lax.bitcast_convert_type(words, jnp.int32)


def _full(shape, value, like):
  """An accumulator for the products of `like`."""
  return vary_like(jnp.full(shape, value, _accumulator(like.dtype)), like)


def _from_heads(x):
  """[B, hk, g, s, ..] -> [B, s, hq, ..]."""
  b, hk, g, s = x.shape[:4]
  return jnp.moveaxis(x.reshape(b, hk * g, s, *x.shape[4:]), 1, 2)


def _nothing_to_attend(cfg: Config, x: Operands):
  """(out, lse) of a call without a batch, queries or keys."""
  out = vary_like(jnp.zeros((*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype), x.q)
  hq, hk = x.q.shape[-2], x.k.shape[-2]
  b, sq = (1 if x.packed else x.batch), x.q.shape[-3]
  lse = _full((b, hq, sq), -_INF, x.q)
  if x.sink is not None and x.batch > 0:
    p = _problem(cfg, x)
    lse = jnp.broadcast_to(p.sink, (b, hk, hq // hk, sq)).reshape(lse.shape)
  p = None
  if cfg.keep_p:
    p = _full((b, hq, sq, x.k.shape[-3]), 0, x.q)
  return out, lse[0] if x.packed else lse, p


def mha_fwd(
    cfg: Config, x: Operands, every_block: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Attention output, in q's dtype, and log-sum-exp, float32 (or wider).

  Third the probabilities before dropout [b, hq, sq, sk] in lse's dtype, if
  cfg.keep_p, of a dense call of one block; `kept_bits` if cfg.keep_bits; else
  None.

  Args:
    cfg: the configuration.
    x: the operands.
    every_block: skip no block, so that loops have a known length and JAX can
      differentiate them both ways.
  """
  lse_dtype = _accumulator(x.q.dtype)
  if x.batch == 0 or x.q.size == 0 or x.k.size == 0:
    return _nothing_to_attend(cfg, x)
  if cfg.keep_bits:
    out, lse, _ = mha_fwd(cfg._replace(keep_bits=False), x, every_block)
    return out, lse, kept_bits(cfg, x)
  p = _problem(cfg, x)
  b, hk, g = p.q.shape[:3]
  dv = p.v.shape[-1]

  def largest(s):
    """Results do not depend on it, nor may derivatives.

    Those of a maximum ask where it is, and XLA may round scores otherwise in
    the one place than in the other: then it is nowhere, and they are NaN.
    """
    return jnp.max(lax.stop_gradient(s), axis=-1)

  def update(j, carry, p):
    m, l, acc = carry
    kb = _key_block(p, j)
    s, _ = _scores(cfg, kb)
    m_new = jnp.maximum(m, largest(s))
    m_safe = jnp.where(m_new == -_INF, 0, m_new)
    e = jnp.exp(s - m_safe[..., None])
    alpha = jnp.exp(m - m_safe)
    l = l * alpha + jnp.sum(e, axis=-1)
    keep = _keep(cfg, kb, not x.packed)
    if keep is not None:
      e = e * keep
    acc = acc * alpha[..., None] + _dot(cfg, "bhgqk,bhkd->bhgqd", e, kb.v)
    return m_new, l, acc

  def finish(m, l, acc):
    seen = l > 0
    l = jnp.where(seen, l, 1)
    lse = jnp.where(seen, m + jnp.log(l), -_INF)
    return (_from_heads(acc / l[..., None]).astype(x.q.dtype),
            lse.reshape(b, hk * g, -1))

  def at_once(p):
    """All keys: no key comes later and corrects what was before it."""
    sink, (s, _) = p.sink, _scores(cfg, p)
    spec, keep = "bhgqk,bhkd->bhgqd", _keep(cfg, p, not x.packed)
    if g == 1:
      s, sink, keep = (t if t is None else t[:, :, 0] for t in (s, sink, keep))
      spec = _without_groups(spec)
    m = largest(s)
    if sink is not None:
      m = jnp.maximum(m, lax.stop_gradient(sink))
    shift = m if p.every_row_sees else jnp.where(m == -_INF, 0, m)
    e = jnp.exp(s - shift[..., None])
    l = jnp.sum(e, axis=-1)
    if sink is not None:
      l = l + jnp.exp(sink - shift)
    if p.every_row_sees:
      lse = m + jnp.log(l)
    else:
      seen = l > 0
      l = jnp.where(seen, l, 1)
      lse = jnp.where(seen, m + jnp.log(l), -_INF)
    divide_first = is_small(x)  # Kept or not, so that out has the same bits.
    if divide_first:
      e = e / l[..., None]
    kept = e.reshape(b, hk * g, *e.shape[-2:]) if cfg.keep_p else None
    out = _dot(cfg, spec, e if keep is None else e * keep, p.v)
    if not divide_first:
      out = out / l[..., None]
    return (_from_heads(out.reshape(b, hk, g, -1, dv)).astype(x.q.dtype),
            lse.reshape(b, hk * g, -1), kept)

  def block(p):
    if p.block_k == p.sk:
      return at_once(p)[:2]
    rows = p.q.shape[:-1]
    if p.sink is None:
      m, l = _full(rows, -_INF, p.q), _full(rows, 0, p.q)
    else:
      sink = jnp.broadcast_to(p.sink, rows)
      m = lax.stop_gradient(sink)
      l = jnp.exp(jnp.where(m == -_INF, m, sink - m))
    carry = m, l, _full((*rows, dv), 0, p.q)
    return finish(*lax.fori_loop(
        *_key_blocks(p, every_block), lambda j, c: update(j, c, p), carry))

  kept = None
  if p.one_block:
    out, lse, kept = at_once(p)
  else:
    p = _pad_to_blocks(p)
    n = p.q.shape[3] // p.block_q
    out, lse = lax.map(lambda i: block(_query_block(p, i)),
                       jnp.arange(n, dtype=jnp.int32))
    out = jnp.moveaxis(out, 0, 1).reshape(b, -1, hk * g, dv)[:, :p.sq]
    lse = jnp.moveaxis(lse, 0, 2).reshape(b, hk * g, -1)[:, :, :p.sq]
  lse = lse.astype(lse_dtype)
  return (out[0], lse[0], None) if x.packed else (out, lse, kept)


def _delta(x: Operands, saved: Saved, acc):
  """rowsum(dout * out) - dlse, [B, hq, sq]; 0 in rows that see nothing."""
  dout, out, lse, dlse, *_ = saved
  delta = jnp.sum(dout.astype(acc) * out.astype(acc), axis=-1)
  delta = jnp.moveaxis(delta, -1, -2)
  if dlse is not None:
    delta = delta - dlse.astype(acc)
  delta = jnp.where(lse == -_INF, 0, delta)
  return delta[None] if x.packed else delta


def _zero_grads(wanted: Wanted, x: Operands) -> Grads:
  def zeros(t, dtype=jnp.float32):
    return vary_like(jnp.zeros(t.shape, dtype), x.q)
  return Grads(
      *(zeros(t, t.dtype) for t in (x.q, x.k, x.v)),
      zeros(x.bias) if wanted.dbias else None,
      zeros(x.sink) if wanted.dsink else None,
      zeros(x.alibi_slopes) if wanted.dslopes else None)


def mha_bwd(cfg: Config, wanted: Wanted, x: Operands, saved: Saved,
            every_block: bool = False) -> Grads:
  """Gradients of `mha_fwd`, by recomputing the probabilities from lse."""
  if x.batch == 0:
    return _zero_grads(wanted, x)
  p = _problem(cfg, x)
  acc = _accumulator(x.q.dtype)
  scale = acc.type(cfg.softmax_scale)
  b, hk, g = p.q.shape[:3]
  sq, sk = p.sq, p.k.shape[2]
  lse = saved.lse.astype(acc)
  lse = (lse[None] if x.packed else lse).reshape(b, hk, g, sq)
  delta = None
  if saved.p is None or wanted.dsink:
    delta = _delta(x, saved, acc).reshape(b, hk, g, sq)
  dsink = None
  if wanted.dsink:
    rows = jnp.where(lse == -_INF, 0, jnp.exp(p.sink - lse)) * delta
    dsink = -_sum_rows(x, rows.reshape(b, hk * g, sq)).astype(jnp.float32)
  if x.q.size == 0 or x.k.size == 0:
    return _zero_grads(wanted, x)._replace(dsink=dsink)
  dbias_shape = None if x.bias is None else p.bias.shape
  dout = saved.dout[None] if x.packed else saved.dout
  dout = dout.reshape(b, sq, hk, g, dout.shape[-1]).transpose(0, 2, 3, 1, 4)
  if not p.every_row_sees:
    # A row that sees nothing has lse -inf, and every exp(s - inf) is 0.
    dout = jnp.where((lse == -_INF)[..., None], 0, dout)
    lse = jnp.where(lse == -_INF, _INF, lse)

  def update(j, carry, p, dout, lse, delta):
    """Adds what key block j and this query block give each other."""
    dq, dk, dv, dbias, dslopes = carry
    kb = _key_block(p, j)
    query, keep = p.q, _keep(cfg, kb, not x.packed)
    spec = grouped = lambda t: t
    if saved.p is not None:
      e, tanh = saved.p.reshape(b, hk, g, sq, sk), None
      if g == 1:
        e, dout, query, keep, delta = (
            t if t is None else t[:, :, 0]
            for t in (e, dout, query, keep, delta))
        spec, grouped = _without_groups, lambda t: t[:, :, None]
    else:
      s, tanh = _scores(cfg, kb)
      e = jnp.exp(s - lse[..., None])
    dp = _dot(cfg, spec("bhgqd,bhkd->bhgqk"), dout, kb.v)
    dropped = e
    if keep is not None:
      dropped, dp = e * keep, dp * keep
    if delta is None:
      delta = jnp.sum(e * dp, axis=-1)
      if saved.dlse is not None:
        delta = delta - saved.dlse.astype(acc).reshape(delta.shape)
    ds = e * (dp - delta[..., None])
    if p.bias is not None or p.mask is not None:
      # A hidden key has no gradient, whatever it and its value hold.
      ds = jnp.where(e == 0, 0, ds)
    ds_bias = grouped(ds)
    # XLA's CPU dots copy an operand that is contracted over its rows, so that
    # had better be the small one: dv transposed, and dk below.
    dv_j = _dot(cfg, spec("bhgqk,bhgqd->bhdk"), dropped, dout).swapaxes(2, 3)
    if wanted.dbias:
      dbias = _add(dbias, 4, j * p.block_k, sum_to(ds_bias, dbias_shape))
    if wanted.dslopes:
      dslopes = dslopes - jnp.sum(ds_bias * _distance(kb).astype(acc), axis=-1)
    if tanh is not None:
      ds = ds * (1 - tanh * tanh)
    dq = dq + grouped(
        _dot(cfg, spec("bhgqk,bhkd->bhgqd"), ds, kb.k)) * scale
    dk_j = _dot(cfg, spec("bhgqk,bhgqd->bhkd"), ds, query) * scale
    return (dq, _add(dk, 2, j * p.block_k, dk_j),
            _add(dv, 2, j * p.block_k, dv_j), dbias, dslopes)

  def block(p, dk, dv, dout, lse, delta):
    rows = p.q.shape[:-1]
    dbias = dslopes = None
    if wanted.dbias:
      own = (n if whole != 1 else 1 for n, whole in zip(
          (rows[-1], p.k.shape[2]), dbias_shape[3:]))
      dbias = _full((*dbias_shape[:3], *own), 0, p.q)
    if wanted.dslopes:
      dslopes = _full(rows, 0, p.q)
    carry = _full(p.q.shape, 0, p.q), dk, dv, dbias, dslopes
    if p.block_k == p.sk:
      carry = update(0, carry, p, dout, lse, delta)
    else:
      carry = lax.fori_loop(
          *_key_blocks(p, every_block),
          lambda j, c: update(j, c, p, dout, lse, delta), carry)
    dq, dk, dv, dbias, dslopes = carry
    return (_from_heads(dq).astype(x.q.dtype), dbias, dslopes), dk, dv

  if p.one_block:
    (dq, dbias, dslopes), dk, dv = block(
        p, _full(p.k.shape, 0, p.q), _full(p.v.shape, 0, p.q), dout, lse, delta)
  else:
    p = _pad_to_blocks(p)
    n = p.q.shape[3] // p.block_q
    dout, delta = _pad(dout, 3, p.block_q), _pad(delta, 3, p.block_q)
    lse = _pad(lse, 3, p.block_q, _INF)

    def step(carry, i):
      rows = (_slice(t, 3, i * p.block_q, p.block_q)
              for t in (dout, lse, delta))
      ys, dk, dv = block(_query_block(p, i), *carry, *rows)
      return (dk, dv), ys

    carry = _full(p.k.shape, 0, p.q), _full(p.v.shape, 0, p.q)
    (dk, dv), (dq, dbias, dslopes) = lax.scan(
        step, carry, jnp.arange(n, dtype=jnp.int32))
    dq = jnp.moveaxis(dq, 0, 1).reshape(b, -1, hk * g, p.q.shape[-1])[:, :sq]
    dk, dv = dk[:, :, :sk], dv[:, :, :sk]
    if wanted.dbias:  # [n, B, hk, g, rows | 1, cols | 1]
      if dbias_shape[3] == 1:
        dbias = jnp.sum(dbias, axis=0)
      else:
        dbias = jnp.moveaxis(dbias, 0, 3).reshape(
            *dbias_shape[:3], -1, dbias.shape[-1])[..., :sq, :]
      dbias = dbias[..., :dbias_shape[4]]
    if wanted.dslopes:
      dslopes = jnp.moveaxis(dslopes, 0, 3).reshape(b, hk, g, -1)[..., :sq]
  dk, dv = (t.transpose(0, 2, 1, 3).astype(x.q.dtype) for t in (dk, dv))
  if x.packed:
    dq, dk, dv = dq[0], dk[0], dv[0]
  if wanted.dbias:
    dbias = dbias.reshape(x.bias.shape).astype(jnp.float32)
  if wanted.dslopes:
    dslopes = _sum_rows(x, dslopes.reshape(b, hk * g, sq)).astype(jnp.float32)
  return Grads(dq, dk, dv, dbias, dsink, dslopes)


def sum_to(t, shape):
  """t summed over the axes in which `shape` is 1."""
  axes = tuple(i for i, n in enumerate(shape) if n == 1 and t.shape[i] != 1)
  return jnp.sum(t, axis=axes, keepdims=True) if axes else t


def _add(total, axis: int, start, part):
  """total with part added from start on along axis."""
  if total.shape[axis] == part.shape[axis]:
    return total + part
  old = lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
  return lax.dynamic_update_slice_in_dim(total, old + part, start, axis)


def sequence_of_rows(x: Operands):
  """Sequence of every packed query row; rows of none get some sequence."""
  starts = (x.cu_seqlens_q if x.cu_seqlens_q_padded is None
            else x.cu_seqlens_q_padded)[:-1]
  lengths = x.cu_seqlens_q[1:] - x.cu_seqlens_q[:-1]
  return _segments(starts, lengths, x.q.shape[0], -1)[2]


def _sum_rows(x: Operands, rows):
  """Sums [B, hq, sq] over each sequence's queries: [b, hq]."""
  if not x.packed:
    return jnp.sum(rows, axis=-1)
  return jax.ops.segment_sum(rows[0].T, sequence_of_rows(x),
                             num_segments=x.batch)


def sum_rows(x: Operands, rows: jax.Array) -> jax.Array:
  """Sums a float32 array shaped like lse over each sequence: [b, hq]."""
  return _sum_rows(x, rows[None] if x.packed else rows)
