# SPDX-License-Identifier: Apache-2.0
"""Grouped products in float64, from the definition: a loop over groups."""

import numpy as np


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


def rows_by_rows(a, b, sizes):
  """a [m, k], b [m, n] -> [g, k, n]."""
  return np.stack([
      a[first:end].astype(np.float64).T @ b[first:end].astype(np.float64)
      for first, end in runs(sizes, len(a))])
