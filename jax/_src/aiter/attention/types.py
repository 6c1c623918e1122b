# SPDX-License-Identifier: Apache-2.0
"""What one attention call is made of, below the public functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class Config(NamedTuple):
  """Static facts of an attention call; hashable.

  Attributes:
    softmax_scale: factor on q.k.
    logits_soft_cap: scores become cap * tanh(score / cap); 0 is off.
    dropout_p: probability of dropping a probability.
    window_left: keys visible to the left of the diagonal; -1 is unbounded.
    window_right: keys visible to the right of it; -1 is unbounded, causal is 0.
    sink_tokens: leading keys that the left window never hides.
    top_left: the diagonal starts at the top left corner of the score matrix
      instead of ending at its bottom right one.
    min_seqlen_q: sequences with at most this many queries are skipped, if > 0.
    max_seqlen_k: keys of a packed sequence at most; 0 is unknown. Gradients may
      be NaN of one that has more.
    deterministic: gradients have the same bits every time.
    inference: no derivative is asked for, so that kernels may serve which keep
      nothing for one.
    keep_p: the forward pass returns the probabilities too; no kernel does.
    keep_bits: it returns what dropout keeps instead, in bits.
    precision: of products of float32, as jax.numpy takes it. The kernels have
      two: TF32's where a matrix unit has it, and float32's. Products of 16-bit
      types are exact.
  """
  softmax_scale: float
  logits_soft_cap: float = 0.0
  dropout_p: float = 0.0
  window_left: int = -1
  window_right: int = -1
  sink_tokens: int = 0
  top_left: bool = False
  min_seqlen_q: int = 0
  max_seqlen_k: int = 0
  deterministic: bool = True
  inference: bool = False
  keep_p: bool = False
  keep_bits: bool = False
  precision: Any = None


class Operands(NamedTuple):
  """Arrays of an attention call; an absent one is None.

  Dense: q [b, sq, hq, dqk], k [b, sk, hk, dqk], v [b, sk, hk, dv].
  Packed: q [total_q, hq, dqk], k [total_k, hk, dqk], v [total_k, hk, dv].

  Attributes:
    q: queries.
    k: keys.
    v: values.
    cu_seqlens_q: int32 [b + 1], cumulative query lengths. Dense: the lengths
      of padded sequences.
    cu_seqlens_k: the same of keys.
    cu_seqlens_q_padded: int32 [b + 1], first row of every packed sequence,
      where it is not cu_seqlens_q.
    cu_seqlens_k_padded: the same of keys.
    bias: [1 | b, 1 | hq, 1 | sq, 1 | sk], q's dtype or float32; dense only.
      -inf hides a key.
    mask: bool, of such a shape: False hides a key, whatever it holds; in a mask
      of one row for all queries also whatever its value holds. Dense only.
    alibi_slopes: float32 [b, hq].
    sink: float32 [b, hq], an extra logit without a value.
    dropout_state: uint32 [b, hq, 6]: two key words, batch and head counters,
      and the row and column, a multiple of 8, at which row 0 and key 0 of the
      sequence stand in the whole that the mask is of.
  """
  q: jax.Array
  k: jax.Array
  v: jax.Array
  cu_seqlens_q: jax.Array | None = None
  cu_seqlens_k: jax.Array | None = None
  cu_seqlens_q_padded: jax.Array | None = None
  cu_seqlens_k_padded: jax.Array | None = None
  bias: jax.Array | None = None
  mask: jax.Array | None = None
  alibi_slopes: jax.Array | None = None
  sink: jax.Array | None = None
  dropout_state: jax.Array | None = None

  @property
  def packed(self) -> bool:
    return self.q.ndim == 3

  @property
  def batch(self) -> int:
    return self.cu_seqlens_q.shape[0] - 1 if self.packed else self.q.shape[0]


class Saved(NamedTuple):
  """What the backward pass needs beside the operands.

  Attributes:
    dout: gradient of out.
    out: [.., hq, dv], as the forward pass returned it.
    lse: float32 [b, hq, sq] or [hq, total_q], likewise.
    dlse: gradient of lse, or None.
    p: float32 [b, hq, sq, sk], the probabilities before dropout, or None.
    bits: int32 [b, hq, words], what dropout keeps, as kernels have it, or None.
  """
  dout: jax.Array
  out: jax.Array
  lse: jax.Array
  dlse: jax.Array | None
  p: jax.Array | None = None
  bits: jax.Array | None = None


class Grads(NamedTuple):
  """Gradients; None where not wanted.

  Attributes:
    dq: like q.
    dk: like k.
    dv: like v.
    dbias: float32, bias's shape.
    dsink: float32 [b, hq].
    dslopes: float32 [b, hq].
  """
  dq: jax.Array
  dk: jax.Array
  dv: jax.Array
  dbias: jax.Array | None = None
  dsink: jax.Array | None = None
  dslopes: jax.Array | None = None


class Wanted(NamedTuple):
  """Which optional gradients the backward pass computes; hashable."""
  dbias: bool = False
  dsink: bool = False
  dslopes: bool = False
