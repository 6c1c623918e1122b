# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in float64, written from its definition.

Pair j of a token is multiplied by [[cos1, -sin1], [sin2, cos2]], which is a
rotation where the two have one cosine and one sine.
"""

import numpy as np


def channels(d, d_rot, style="neox", nope_first=False, sections=None):
  """For each pair the channels of its two, (first, second): int arrays.

  Args:
    d: channels of a head.
    d_rot: how many of them are in pairs.
    style: "neox" (halves) or "gptj" (neighbours).
    nope_first: the last d_rot channels, not the first ones.
    sections: pairs of each part whose halves lie side by side; by default one.
  """
  first, second = [], []
  begin = d - d_rot if nope_first else 0
  for n in sections or (d_rot // 2,):
    for j in range(n):
      first.append(begin + (2 * j if style == "gptj" else j))
      second.append(begin + (2 * j + 1 if style == "gptj" else n + j))
    begin += 2 * n
  return np.array(first, int), np.array(second, int)


def table_columns(pairs, full, style="neox", sections=None):
  """For each pair its columns of a table: (first, second)."""
  if not full:
    return (np.arange(pairs),) * 2
  return channels(2 * pairs, 2 * pairs, style, sections=sections)


def rotate(x, cos, sin, d_rot, *, full=False, style="neox", nope_first=False,
           sections=None, transposed=False):
  """x with its pairs turned.

  Args:
    x: [tokens, heads, d] in float64.
    cos: [tokens, d_rot / 2], or, if full, [tokens, d_rot]: each token's own.
    sin: like cos.
    d_rot: width of what is turned.
    full: each of a pair has a cosine and a sine.
    style: as in channels.
    nope_first: as in channels.
    sections: as in channels.
    transposed: by the transposed matrix.

  Returns:
    Like x.
  """
  at1, at2 = channels(x.shape[-1], d_rot, style, nope_first, sections)
  col1, col2 = table_columns(d_rot // 2, full, style, sections)
  # The matrix of a pair.
  m = np.array([[cos[:, col1], -sin[:, col1]],
                [sin[:, col2], cos[:, col2]]], np.float64)
  if transposed:
    m = m.swapaxes(0, 1)
  pairs = np.stack([x[..., at1], x[..., at2]])
  out = np.array(x, np.float64)
  out[..., at1], out[..., at2] = np.einsum("ijtp,jthp->ithp", m, pairs)
  return out


def table_gradients(x, g, d_rot, *, full=False, style="neox", nope_first=False,
                    sections=None):
  """Gradients of each token's cosines and sines, given that of the result.

  Args:
    x: as in rotate.
    g: like x.
    d_rot: as in rotate.
    full: as in rotate.
    style: as in rotate.
    nope_first: as in rotate.
    sections: as in rotate.

  Returns:
    (dcos, dsin): [tokens, d_rot / 2], or, if full, [tokens, d_rot].
  """
  at1, at2 = channels(x.shape[-1], d_rot, style, nope_first, sections)
  columns = table_columns(d_rot // 2, full, style, sections)
  dcos, dsin = (np.zeros((len(x), d_rot // 2 * (1 + full))) for _ in range(2))
  x1, x2, g1, g2 = x[..., at1], x[..., at2], g[..., at1], g[..., at2]
  for col, dc, ds in ((columns[0], g1 * x1, -g1 * x2),
                      (columns[1], g2 * x2, g2 * x1)):
    dcos[:, col] += dc.sum(1)
    dsin[:, col] += ds.sum(1)
  return dcos, dsin


def positions_of(cu_seqlens, tokens):
  """Place of each token in its packed sequence."""
  starts = np.asarray(cu_seqlens)[:-1]
  place = np.arange(tokens)
  return np.array([p - max(s for s in starts if s <= p) for p in place], int)


def rows_of(positions, rows):
  """Positions as rows of a table: one out of range is the nearest."""
  return np.clip(positions, 0, rows - 1)

