# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients from the formulas: NumPy, one head at a time.

Everything is computed in float64. With `dtype` each step's result is rounded to
it, which is what the plain formula in that dtype does; its error is the measure
of what may be asked of a fused implementation.
"""

import dataclasses

import numpy as np


def philox4x32(key, counter, rounds=10):
  """Philox4x32 of Salmon et al. on NumPy integers; words broadcast."""
  mask = np.uint64(0xFFFFFFFF)
  key = [np.uint64(k) for k in key]
  x0, x1, x2, x3 = np.broadcast_arrays(
      *(np.asarray(c, np.uint64) for c in counter))
  for _ in range(rounds):
    a = np.uint64(0xD2511F53) * x0
    b = np.uint64(0xCD9E8D57) * x2
    x0, x1, x2, x3 = (
        (b >> np.uint64(32)) ^ x1 ^ key[0], b & mask,
        (a >> np.uint64(32)) ^ x3 ^ key[1], a & mask)
    key = [(key[0] + np.uint64(0x9E3779B9)) & mask,
           (key[1] + np.uint64(0xBB67AE85)) & mask]
  return [x.astype(np.uint32) for x in (x0, x1, x2, x3)]


def keep_mask(key, batch, head, sq, sk, p, origin=(0, 0)):
  """Dropout mask of one head from a row and column on: bool [sq, sk]."""
  rows, cols = (first + np.arange(n) for first, n in zip(origin, (sq, sk)))
  words = philox4x32(key, (cols // 8, rows[:, None], head, batch))
  chosen = np.choose(cols % 4, [w.astype(np.int64) for w in words])
  halves = np.where(cols // 4 % 2, chosen // 2**16, chosen % 2**16)
  return halves >= min(np.floor(np.float64(np.float32(p)) * 2**16 + 0.5),
                       2**16 - 1)


@dataclasses.dataclass
class Mask:
  """Which keys a query sees; see the operator's documentation."""
  left: int = -1
  right: int = -1
  sink_tokens: int = 0
  top_left: bool = False

  def visible(self, sq, sk):
    i = np.arange(sq)[:, None] + (0 if self.top_left else sk - sq)
    j = np.arange(sk)[None, :]
    see = np.ones((sq, sk), bool)
    if self.left >= 0:
      see = j >= i - self.left
    if self.sink_tokens:
      see = see | (j < self.sink_tokens)
    if self.right >= 0:
      see = see & (j <= i + self.right)
    return see

  def distance(self, sq, sk):
    i = np.arange(sq)[:, None] + (0 if self.top_left else sk - sq)
    return np.abs(i - np.arange(sk)[None, :]).astype(np.float64)


def head(q, k, v, dout, dlse, *, scale, mask, cap=0.0, bias=None, slope=None,
         sink=None, keep=None, dropout_p=0.0, dtype=None):
  """One head, q [sq, dqk], k [sk, dqk], v [sk, dv]: a dict of all results."""
  f64 = lambda x: np.asarray(x).astype(np.float64)
  r = f64 if dtype is None else lambda x: f64(np.asarray(x).astype(dtype))
  q, k, v, dout = f64(q), f64(k), f64(v), f64(dout)
  sq, sk = q.shape[0], k.shape[0]
  s = r(r(q @ k.T) * scale)
  tanh = None
  if cap:
    tanh = r(np.tanh(r(s / cap)))
    s = r(tanh * cap)
  if bias is not None:
    s = r(s + f64(bias))
  distance = mask.distance(sq, sk)
  if slope is not None:
    s = r(s - r(f64(slope) * distance))
  s = np.where(mask.visible(sq, sk), s, -np.inf)
  m = s.max(axis=1, initial=-np.inf, keepdims=True)
  if sink is not None:
    m = np.maximum(m, f64(sink))
  m_safe = np.where(np.isinf(m), 0, m)
  e = r(np.exp(r(s - m_safe)))
  total = e.sum(axis=1, keepdims=True)
  if sink is not None:
    total = total + np.exp(f64(sink) - m_safe)
  total = r(total)
  seen = total > 0
  p = r(e / np.where(seen, total, 1))
  with np.errstate(divide="ignore"):
    lse = np.where(seen, m_safe + np.log(total), -np.inf)[:, 0]
  factor = 1.0
  if keep is not None:
    factor = keep / (1 - np.float64(np.float32(dropout_p)))
  dropped = r(p * factor)
  out = r(dropped @ v)

  dv_ = r(dropped.T @ dout)
  dp = r(r(dout @ v.T) * factor)
  delta = r(r(dout * out).sum(axis=1))
  if dlse is not None:
    delta = r(delta - np.where(np.isinf(lse), 0, f64(dlse)))
  ds = r(p * r(dp - delta[:, None]))
  result = dict(out=out, lse=lse, dv=dv_, dbias=ds,
                dslope=-(ds * distance).sum(),
                dslope_terms=np.abs(ds * distance).sum())
  if sink is not None:
    share = np.where(seen[:, 0], np.exp(f64(sink) - np.where(
        np.isinf(lse), 0, lse)), 0)
    result["dsink"] = -(share * delta).sum()
    result["dsink_terms"] = np.abs(share * delta).sum()
  if tanh is not None:
    ds = r(ds * r(1 - tanh * tanh))
  # What a rounding of out costs, in units of it: delta is off by as much, and
  # where dp and delta cancel that is all there is.
  off = p * np.abs(dout * out).sum(axis=1, keepdims=True)
  result["rounding"] = dict(
      dq=np.abs(scale) * off @ np.abs(k), dk=np.abs(scale) * off.T @ np.abs(q),
      dbias=off, dslopes=(off * distance).sum())
  if sink is not None:
    result["rounding"]["dsink"] = (
        share * np.abs(dout * out).sum(axis=1)).sum()
  result["dq"] = r(r(ds @ k) * scale)
  result["dk"] = r(r(ds.T @ q) * scale)
  return result


def attention(q, k, v, dout, dlse=None, *, sequences=None, scale, mask=None,
              cap=0.0, bias=None, slopes=None, sink=None, key=None,
              dropout_p=0.0, origin=(0, 0), skip=0, dtype=None):
  """All heads and sequences.

  Args:
    q: [b, sq, hq, dqk], or [total_q, hq, dqk] with `sequences`.
    k: [b, sk, hk, dqk] or [total_k, hk, dqk].
    v: likewise.
    dout: gradient of out.
    dlse: gradient of lse [b, hq, sq] or [hq, total_q], or None.
    sequences: for each sequence (first query row, queries, first key row,
      keys). Dense calls may give it too, to shorten sequences.
    scale: softmax scale.
    mask: a Mask.
    cap: soft cap, 0 for none.
    bias: [1 | b, 1 | hq, sq, sk].
    slopes: [b, hq].
    sink: [b, hq].
    key: two words, if dropout_p > 0.
    dropout_p: probability of dropping.
    origin: row and column of the dropout mask where each sequence's begins.
    skip: sequences of at most this many queries are skipped.
    dtype: rounding of every step; None for none.

  Returns:
    dict with out, lse, dq, dk, dv and, as given, dbias, dslopes, dsink; of the
    last two, which are sums over many rows, also the sums of absolute values.
    "rounding" has the largest error of each gradient if out is rounded with a
    relative error of 1.
  """
  mask = mask or Mask()
  packed = q.ndim == 3
  hq, hk = q.shape[-2], k.shape[-2]
  if sequences is None:
    sequences = [(0, q.shape[1], 0, k.shape[1])] * q.shape[0]
  b = len(sequences)
  lse_shape = (hq, q.shape[0]) if packed else (b, hq, q.shape[1])
  out = dict(
      out=np.zeros((*q.shape[:-1], v.shape[-1])),
      lse=np.full(lse_shape, -np.inf), dq=np.zeros(q.shape),
      dk=np.zeros(k.shape), dv=np.zeros(v.shape), dslopes=np.zeros((b, hq)),
      dsink=np.zeros((b, hq)), dslopes_terms=np.zeros((b, hq)),
      dsink_terms=np.zeros((b, hq)),
      dbias=None if bias is None else np.zeros(bias.shape))
  rounding = {name: np.zeros(np.shape(out[name]) if out[name] is not None
                             else ()) for name in (
      "dq", "dk", "dbias", "dslopes", "dsink")}
  for n, (q0, nq, k0, nk) in enumerate(sequences):
    if skip and nq <= skip:
      continue
    for h in range(hq):
      at = () if packed else (n,)
      rows = (*at, slice(q0, q0 + nq), h)
      cols = (*at, slice(k0, k0 + nk), h // (hq // hk))
      lse_rows = (h, rows[0]) if packed else (n, h, rows[1])
      picked = None
      if bias is not None:
        picked = (n if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0,
                  slice(0, nq), slice(0, nk))
      x = head(
          q[rows], k[cols], v[cols], dout[rows],
          None if dlse is None else dlse[lse_rows], scale=scale, mask=mask,
          cap=cap, bias=None if bias is None else bias[picked],
          slope=None if slopes is None else slopes[n, h],
          sink=None if sink is None else sink[n, h],
          keep=keep_mask(key, n, h, nq, nk, dropout_p, origin)
          if dropout_p else None, dropout_p=dropout_p, dtype=dtype)
      out["out"][rows] = x["out"]
      out["lse"][lse_rows] = x["lse"]
      out["dq"][rows] = x["dq"]
      out["dk"][cols] += x["dk"]
      rounding["dq"][rows] = x["rounding"]["dq"]
      rounding["dk"][cols] += x["rounding"]["dk"]
      rounding["dslopes"][n, h] = x["rounding"]["dslopes"]
      out["dv"][cols] += x["dv"]
      out["dslopes"][n, h] = x["dslope"]
      out["dslopes_terms"][n, h] = x["dslope_terms"]
      if sink is not None:
        out["dsink"][n, h] = x["dsink"]
        out["dsink_terms"][n, h] = x["dsink_terms"]
        rounding["dsink"][n, h] = x["rounding"]["dsink"]
      if bias is not None:
        out["dbias"][picked] += x["dbias"]
        rounding["dbias"][picked] += x["rounding"]["dbias"]
  out["rounding"] = rounding
  if dtype is not None:
    for name in ("dk", "dv"):
      out[name] = out[name].astype(dtype).astype(np.float64)
  return out
