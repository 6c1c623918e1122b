# SPDX-License-Identifier: Apache-2.0
"""Calls of float8 attention, and their arrays.

Rows of no sequence hold NaN: what is read of them spoils the result.
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from mha_fp8 import oracle

import jax
from jax.experimental import aiter

KINDS = {"e4m3fn": ml_dtypes.float8_e4m3fn,
         "e4m3fnuz": ml_dtypes.float8_e4m3fnuz}
NATIVE = aiter.float8_dtype().name.removeprefix("float8_")
BLOCK = 128  # Keys that may have a scale of their own.
RAGGED = ((5, 21), (130, 170), (0, 9), (20, 4), (7, 0), (64, 260))


@dataclasses.dataclass(frozen=True)
class Case:
  """A call. lengths: (queries, keys) of each sequence; dense: all alike."""
  kind: str = NATIVE
  lengths: tuple[tuple[int, int], ...] = ((150, 300),) * 2
  packed: bool = False
  gap: int = 0  # Rows behind the sequences.
  hq: int = 4
  hk: int = 2
  d: int = 128
  dv: int = 0
  scale: str = "none"  # Of k and v; q's is of a head, or none.
  sink: str = ""
  causal: bool = False
  window: tuple[int, int] = (-1, -1)
  softmax_scale: float | None = None
  cap: float = 0.0
  min_seqlen_q: int = 0


class Problem:
  """The arrays of a case."""

  def __init__(self, case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    c, dtype = case, KINDS[case.kind]
    sq, sk = (np.array(t) for t in zip(*c.lengths))
    self.cu = [np.cumsum([0, *t]).astype(np.int32) for t in (sq, sk)]
    rows = [int(cu[-1]) + c.gap for cu in self.cu]
    normal = lambda n, h, d: rng.standard_normal((n, h, d)).astype(dtype)
    self.q = normal(rows[0], c.hq, c.d)
    self.k = normal(rows[1], c.hk, c.d)
    self.v = normal(rows[1], c.hk, c.dv or c.d)
    for t, n in ((self.q, rows[0]), (self.k, rows[1]), (self.v, rows[1])):
      t[n - c.gap:] = np.nan  # Nobody's.
    b = len(c.lengths)
    longest = rows[1] if c.packed else int(sk.max())
    shape = {"none": None, "tensor": (1,), "head": (b, c.hk),
             "block": (b, c.hk, -(-longest // BLOCK))}
    given = lambda kind: None if shape[kind] is None else rng.uniform(
        0.5, 1.5, shape[kind]).astype(np.float32)
    self.q_scale = given("head" if c.scale == "block" else c.scale)
    self.k_scale, self.v_scale = given(c.scale), given(c.scale)
    self.sink = rng.standard_normal(
        (b, c.hq) if c.sink == "bh" else (c.hq,)).astype(np.float32)
    self.case = case

  def exact(self, weights=None):
    """The oracle's (out, lse), rows of all sequences one behind the other."""
    c = self.case
    b = len(c.lengths)
    out = np.zeros((self.q.shape[0], c.hq, c.dv or c.d))
    lse = np.full((c.hq, self.q.shape[0]), -np.inf)

    def scaled(t, scale, i, rows):
      t = t[rows].astype(np.float64)
      if scale is None:
        return t
      at = np.arange(t.shape[0]) // BLOCK if scale.ndim == 3 else slice(None)
      scale = np.broadcast_to(
          scale, (b, c.hk)) if scale.ndim < 3 else scale
      scale = scale[i].T[at] if scale.ndim == 3 else scale[i][None]
      return t * np.repeat(scale, t.shape[1] // c.hk, 1)[..., None]

    for i, (nq, _) in enumerate(c.lengths):
      if nq <= c.min_seqlen_q and c.min_seqlen_q:
        continue
      q, k = (slice(cu[i], cu[i + 1]) for cu in self.cu)
      sink = None
      if c.sink:
        sink = np.broadcast_to(self.sink, (b, c.hq))[i]
      scale = c.d**-0.5 if c.softmax_scale is None else c.softmax_scale
      out[q], lse[:, q] = oracle.attend(
          scaled(self.q, self.q_scale, i, q),
          scaled(self.k, self.k_scale, i, k),
          scaled(self.v, self.v_scale, i, k), scale, c.window[0],
          0 if c.causal else c.window[1], sink, weights)
    return out, lse

  def call(self):
    c = self.case
    options = dict(causal=c.causal, window_size=c.window, return_lse=True,
                   softmax_scale=c.softmax_scale)
    scales = (self.q_scale, self.k_scale, self.v_scale)
    sink = self.sink if c.sink else None
    if c.packed:
      fn = jax.jit(lambda *args: aiter.flash_attn_varlen_fp8_pertensor_func(
          *args[:-1], sink_ptr=args[-1], min_seqlen_q=c.min_seqlen_q,
          **options))
      return fn(self.q, self.k, self.v, *scales, *self.cu, sink)
    b = len(c.lengths)
    fn = jax.jit(lambda *args: aiter.flash_attn_fp8_pertensor_func(
        *args[:-1], sink_ptr=args[-1], **options))
    out, lse = fn(*(t.reshape(b, -1, *t.shape[1:])
                    for t in (self.q, self.k, self.v)), *scales, sink)
    return (out.reshape(-1, *out.shape[2:]),
            jnp.moveaxis(lse, 0, 1).reshape(lse.shape[1], -1))
