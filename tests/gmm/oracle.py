# SPDX-License-Identifier: Apache-2.0
"""Grouped products in float64, from the definition: a loop over groups."""

import math

import numpy as np

_erf = np.vectorize(math.erf, [float])


def runs(sizes, m):
  """(first row, end) of each group, of m rows in all."""
  found, at = [], 0
  for size in sizes:
    end = min(at + max(int(size), 0), m)
    found.append((at, end))
    at = end
  return found


def rows_times(a, b, sizes):
  """a [m, k], b [g, k, n] -> [m, n]."""
  out = np.zeros((a.shape[0], b.shape[2]))
  for (first, end), matrix in zip(runs(sizes, len(a)), b, strict=True):
    out[first:end] = (a[first:end].astype(np.float64)
                      @ matrix.astype(np.float64))
  return out


def ended(h, gates, activation, limit=0.0, alpha=1.0):
  """What is made of products and their bias h [m, columns of b]."""
  gate, up = h, 1
  if gates != "none":
    gate, up = (h[:, ::2], h[:, 1::2]) if gates == "pairs" else np.split(
        h, 2, 1)
  if limit:
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
  logistic = lambda t: 1 / (1 + np.exp(-np.maximum(t, -600)))
  y = {"none": lambda t: t, "relu": lambda t: np.maximum(t, 0),
       "gelu": lambda t: t * (1 + _erf(t / 2**0.5)) / 2,
       "gelu_tanh": lambda t: t * (1 + np.tanh(
           (2 / math.pi)**0.5 * (t + 0.044715 * t**3))) / 2,
       "silu": lambda t: t * logistic(t),
       "swiglu": lambda t: t * logistic(alpha * t)}[activation](gate)
  return y * (up + 1 if activation == "swiglu" else up)


def rows_by_rows(a, b, sizes):
  """a [m, k], b [m, n] -> [g, k, n]."""
  return np.stack([
      a[first:end].astype(np.float64).T @ b[first:end].astype(np.float64)
      for first, end in runs(sizes, len(a))])
