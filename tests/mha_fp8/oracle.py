# SPDX-License-Identifier: Apache-2.0
"""Attention of dequantised numbers, from its definition, in NumPy."""

import numpy as np


def attend(q, k, v, scale, left=-1, right=-1, sink=None, weights=None):
  """(out [sq, hq, dv], lse [hq, sq]) of a sequence, in q's dtype.

  Args:
    q: [sq, hq, d]; k: [sk, hk, d]; v: [sk, hk, dv].
    scale: of the scores.
    left: keys before a query's own that it sees; -1 for no bound.
    right: keys behind it.
    sink: [hq], or None.
    weights: what the weights, the largest of a row being 1, become before they
      are multiplied with values; nothing else by default.
  """
  sq, hq, _ = q.shape
  sk, hk, _ = k.shape
  k, v = (np.repeat(t, hq // hk, 1) for t in (k, v))
  s = np.einsum("ihd,jhd->hij", q, k) * scale
  ahead = np.arange(sk) - (np.arange(sq)[:, None] + sk - sq)
  seen = np.ones((sq, sk), bool)
  if left >= 0:
    seen &= ahead >= -left
  if right >= 0:
    seen &= ahead <= right
  s = np.where(seen, s, -np.inf)
  m = s.max(-1, initial=-np.inf)
  shift = np.where(np.isneginf(m), 0, m)
  p = np.exp(s - shift[..., None])
  norm = p.sum(-1)
  if sink is not None:
    norm = norm + np.exp(sink[:, None] - shift)
  if weights is not None:
    p = weights(p)
  safe = np.where(norm == 0, 1, norm)
  out = np.einsum("hij,jhd->ihd", p, v) / safe.T[..., None]
  with np.errstate(divide="ignore"):
    return out, shift + np.log(norm)
