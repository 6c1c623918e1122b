# SPDX-License-Identifier: Apache-2.0
"""Sampling in NumPy, from the definitions: integers of any size, float64.

What decides a token is exact, so an oracle of it is too: `weights` and
`exponentials` are the definitions in 64-bit integers, and limits are sums of
Python's. That these approximate e^-x and -ln(u) a test compares with float64.
"""

import numpy as np
from attention.oracle import philox4x32

_EXP = (2977044448, 1031763232, 238367582, 41219527, 5548193, 493839)
_LOG = (2147483217, 1431759037, 1069771069, 913905510, 383749357, 1464126112)


def exp_minus(x):
  """e^-x of float32 x >= 0: (float32, units of 2^-31 in int64)."""
  fixed = (np.minimum(x, np.float32(64)).astype(np.float64) * 2**24).astype(
      np.int64)
  y = fixed * 2 * 3098164009 >> 32
  n, f = y >> 24, (y << 8) & 0xFFFFFFFF
  r = np.int64(_EXP[-1])
  for term in _EXP[-2::-1]:
    r = term - ((f.astype(object) * r) >> 32)
  r = np.asarray(r, np.float64).astype(np.int64)
  m = 2**31 - ((f.astype(object) * r) >> 33)
  m = np.asarray(m, np.float64).astype(np.int64)
  whole = np.where(n > 31, 0, (m + (1 << np.minimum(n, 31) >> 1))
                   >> np.minimum(n, 31))
  return np.ldexp(m.astype(np.float32), -31 - n).astype(np.float32), whole


def exponential_of(words):
  """Words in uint32 -> float32."""
  q = 2**32 - np.maximum(words.astype(np.int64), 1)
  c = 31 - np.floor(np.log2(q.astype(np.float64))).astype(np.int64)
  norm = q << c
  low = norm < 3037000500
  norm = np.where(low, (_high(norm, 3037000500)) << 1, norm)
  steps = 2 * c + low
  h = 2**32 - norm
  r = np.int64(_LOG[-1])
  for term in _LOG[-2::-1]:
    r = term + _high(h, r)
  e = h + _high(h, _high(h, r))
  whole = np.where(steps == 0, e, steps * 46516320 + (e >> 5))
  return np.ldexp(whole.astype(np.float32),
                  np.where(steps == 0, -32, -27)).astype(np.float32)


def _high(a, b):
  """The high word of a product of two words."""
  a, b = (np.asarray(t).astype(np.uint64) for t in (a, b))
  return (a * b >> np.uint64(32)).astype(np.int64)


def words_of(keys, v):
  """Random words of rows with keys: uint32 [b, v]."""
  block = np.arange(-(-v // 4), dtype=np.uint32)
  rows = []
  for k0, k1, counter, stream in np.asarray(keys, np.uint32):
    full = lambda t: np.full_like(block, t)
    words = philox4x32((k0, k1), (block, full(counter), full(stream), full(0)))
    rows.append(np.stack(words, -1).reshape(-1)[:v])
  return np.stack(rows) if rows else np.zeros((0, v), np.uint32)


def allowed(mask, v):
  """bool [b, v] of a mask's bits."""
  bits = np.asarray(mask).view(np.uint32)[:, np.arange(v) // 32]
  return (bits >> (np.arange(v) % 32).astype(np.uint32)) & 1 == 1


def sample(logits, exponentials, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
           order="joint", allow=None, probs=False):
  """Tokens, and which columns are kept; one row at a time.

  Args:
    logits: [b, v]; `probs`: probabilities.
    exponentials: float32 [b, v].
    temperature: [] or [b], as are top_k, top_p and min_p.
    top_k: 0 is no limit.
    top_p: 1 is none.
    min_p: 0 is none.
    order: "joint" or "top_k_first".
    allow: bool [b, v].
    probs: as said.
  """
  logits = np.asarray(logits).astype(np.float32)
  b, v = logits.shape
  of_row = lambda t: np.broadcast_to(np.asarray(t), (b,))
  tokens, kept = np.full(b, -1, np.int32), np.zeros((b, v), bool)
  for i, (row, t, k, p, least) in enumerate(zip(
      logits, *map(of_row, (temperature, top_k, top_p, min_p)))):
    live = row > (0 if probs else -np.inf)
    if allow is not None:
      live &= allow[i]
    if not live.any():
      continue
    top = row[live].max()
    if not probs and not t >= np.finfo(np.float32).tiny:
      kept[i] = live & (row == top)
      tokens[i] = np.flatnonzero(kept[i])[0]
      continue
    with np.errstate(all="ignore"):
      if probs:
        w = np.where(row == top, np.float32(1), row / top)
        whole = (np.where(live, w, 0).astype(np.float64) * 2**31).astype(
            np.int64)
      else:
        d = np.where(row == top, np.float32(0), top - row)
        d = np.where(live, np.minimum(d, np.float32(3e38)), np.float32(0))
        w, whole = exp_minus(d / np.float32(t))
      score = w / exponentials[i]
    keep = live.copy()
    if k > 0 and k <= live.sum():
      by_k = live & (row >= np.sort(row[live])[-k])
      if order == "top_k_first":
        keep &= by_k
    else:
      by_k = live
    if p < 1:
      share = int(np.float64(np.float32(p)) * 2**24)
      columns = np.flatnonzero(keep)
      ranked = columns[np.argsort(-row[columns].astype(np.float64),
                                  kind="stable")]
      sums = np.cumsum(whole[ranked])
      limit = max(int(sums[-1]) * share >> 24, 1)
      last = min(np.searchsorted(sums, limit), len(ranked) - 1)
      keep &= row >= row[ranked[last]]
    keep &= by_k & (w >= np.float32(least))
    kept[i] = keep
    score = np.where(score > 0, score, 0)
    tokens[i] = np.argmax(np.where(keep, score, -1))
  return tokens, kept
