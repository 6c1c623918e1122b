# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches by its definition: loops over sequences, NumPy.

In float64 of the dequantised inputs; or, to say how near a result can be, with
every step rounded to a dtype.
"""

import numpy as np
from cache import oracle as cache_oracle


def views(layout):
  """(k_cache, v_cache, page, offset) -> a token's keys and values.

  Of many pages and offsets, those of so many tokens.
  """
  if layout == "heads_first":
    return lambda k, v, p, o: tuple(
        np.moveaxis(t[:, p, o], -2, 0) for t in (k, v))
  return lambda k, v, p, o: (cache_oracle.k_view(layout, k, p, o),
                             cache_oracle.v_view(layout, k, v, p, o))


def numbers(t):
  """An array as float64."""
  if t.dtype.name in cache_oracle.LARGEST:
    return cache_oracle.number(t, t.dtype.name).astype(np.float64)
  return np.asarray(t).astype(np.float64)


def _scale_at(scale, layout, page, offset, heads):
  """Scales of tokens' heads, [tokens, heads]."""
  scale = np.asarray(scale, np.float64)
  if layout == "heads_first" and scale.ndim == 3:
    return scale[:, page, offset].T
  at = {2: (page,), 3: (page, slice(None), offset)}.get(scale.ndim, ())
  return np.broadcast_to(scale[at], (len(page), heads))


def keys_and_values(k_cache, v_cache, layout, table, length, d, heads,
                    k_scale=1.0, v_scale=1.0):
  """A sequence's keys and values [length, heads, d], and which are there."""
  pages, size = {
      "NHD": (0, 1), "HND": (0, 2), "heads_first": (1, 2), "x": (0, 3),
      "asm": (0, 3), "interleaved": (0, 1)}[layout]
  pages, size = k_cache.shape[pages], k_cache.shape[size]
  j = np.arange(length)
  page = np.array([*table, -1])[np.minimum(j // size, len(table))]
  there = (0 <= page) & (page < pages)
  if not there.any():
    return None, None, there
  page, offset = page[there], j[there] % size
  found = []
  for t, columns, scale in zip(
      views(layout)(k_cache, v_cache, page, offset), (d, None),
      (k_scale, v_scale)):
    t = numbers(np.ascontiguousarray(t)).reshape(*t.shape[:2], -1)
    t = t[:, :heads, :columns]
    out = np.zeros((length, *t.shape[1:]))
    out[there] = t * _scale_at(scale, layout, page, offset, heads)[..., None]
    found.append(out)
  return *found, there


def attend(q, k, v, there, softmax_scale, window=(-1, -1), soft_cap=0.0,
           sinks=None, slopes=None, dtype=np.float64):
  """(out [sq, hq, dv], lse [sq, hq]) of one sequence's last sq tokens."""
  rounded = lambda t: np.asarray(t).astype(dtype).astype(np.float64)
  sq, hq, _ = q.shape
  sk = len(there)
  group = hq // k.shape[1]
  k, v = (np.repeat(t, group, 1) for t in (k, v))
  # Products of matrices, which NumPy computes faster than it sums.
  s = np.moveaxis(q, 1, 0) @ np.moveaxis(k, 0, 2)
  s = rounded(rounded(s) * softmax_scale)
  if soft_cap:
    s = rounded(soft_cap * np.tanh(s / soft_cap))
  i = np.arange(sq)[:, None] + sk - sq
  j = np.arange(sk)
  if slopes is not None:
    s = rounded(s - np.asarray(slopes, np.float64)[:, None, None] * abs(i - j))
  left, right = window
  seen = there[None] & np.ones((sq, sk), bool)
  if left >= 0:
    seen &= j >= i - left
  if right >= 0:
    seen &= j <= i + right
  s = np.where(seen, s, -np.inf)
  sink = np.full(hq, -np.inf) if sinks is None else np.asarray(sinks, float)
  m = np.maximum(s.max(-1, initial=-np.inf), sink[:, None])
  m = np.where(m == -np.inf, 0, m)
  p = np.exp(s - m[..., None])
  l = p.sum(-1) + np.exp(sink[:, None] - m)
  with np.errstate(divide="ignore"):
    lse = m + np.log(l)
  p = rounded(p / np.where(l == 0, 1, l)[..., None])
  return rounded(np.moveaxis(p @ np.moveaxis(v, 1, 0), 0, 1)), lse.T


def paged(q, k_cache, v_cache, layout, tables, lengths, cu_seqlens, heads,
          softmax_scale=None, k_scale=1.0, v_scale=1.0, dtype=np.float64,
          dv=None, **scores):
  """(out [tokens, hq, dv], lse [hq, tokens]); tables: a list a sequence."""
  q = numbers(q)
  tokens, hq, d = q.shape
  scale = d ** -0.5 if softmax_scale is None else softmax_scale
  out, lse = None, np.full((tokens, hq), -np.inf)
  rows = []
  for i, (table, length) in enumerate(zip(tables, lengths)):
    begin, end = cu_seqlens[i], cu_seqlens[i + 1]
    k, v, there = keys_and_values(
        k_cache, v_cache, layout, table, max(int(length), 0), d, heads, k_scale,
        v_scale)
    if k is None:
      if scores.get("sinks") is not None:
        lse[begin:end] = np.asarray(scores["sinks"], float)
      continue
    rows.append((begin, end, *attend(q[begin:end], k, v, there, scale,
                                     dtype=dtype, **scores)))
  dv = dv or (rows[0][2].shape[-1] if rows else d)
  out = np.zeros((tokens, hq, dv))
  for begin, end, o, row_lse in rows:
    out[begin:end], lse[begin:end] = o, row_lse
  return out, lse.T
