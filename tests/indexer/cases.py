# SPDX-License-Identifier: Apache-2.0
"""Calls of the indexer's logits, and their float64 oracle."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jax.experimental import aiter


@dataclasses.dataclass(frozen=True)
class Case:
  """A call; of pages if `page` is not 0, and then of `next_n` queries each."""
  kind: str = "float8_e4m3fn"
  rows: int = 5
  heads: int = 64
  dim: int = 128
  keys: int = 150
  page: int = 0
  next_n: int = 1
  lengths: tuple[int, ...] = ()
  tiles: bool = False


class Problem:
  """The arrays of a case.

  Of pages a table lists some twice and has some that are none.
  """

  def __init__(self, case: Case, seed: int = 0):
    rng = np.random.default_rng(seed)
    c, kind = case, jnp.dtype(case.kind)
    self.case = c
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(kind)
    rows = len(c.lengths) * c.next_n if c.page else c.rows
    self.q = normal(rows, c.heads, c.dim)
    self.weights = rng.standard_normal((rows, c.heads), np.float32)
    if not c.page:
      self.k = normal(c.keys, c.dim)
      self.k_scale = rng.uniform(0.5, 2, c.keys).astype(np.float32)
      self.starts = rng.integers(-3, c.keys // 2, rows).astype(np.int32)
      self.ends = rng.integers(0, c.keys + 9, rows).astype(np.int32)
      return
    width = -(-c.keys // c.page)
    pages = max(len(c.lengths) * width - 1, 1)
    self.table = rng.integers(0, pages, (len(c.lengths), width)).astype(
        np.int32)
    self.table[-1, width // 2] = pages
    self.table[0, -1] = -1
    self.page_k = normal(pages, c.page, c.dim)
    self.page_scale = rng.uniform(0.5, 2, (pages, c.page)).astype(np.float32)
    self.cache = np.zeros((pages, c.page, c.dim + 4), np.uint8)
    flat = self.cache.reshape(pages, -1)
    k = self.page_k.view(np.uint8)
    if c.tiles:
      k = k.reshape(pages, c.page // 16, 16, c.dim // 16, 16).swapaxes(2, 3)
    flat[:, :c.page * c.dim] = k.reshape(pages, -1)
    flat[:, c.page * c.dim:] = self.page_scale.view(np.uint8)

  def exact(self):
    """Float64 logits, and the sum of the magnitudes that each adds up."""
    c = self.case
    wide = lambda t: np.asarray(t).astype(np.float64)
    out = np.full((len(self.q), c.keys), -np.inf)
    size = np.zeros(out.shape)
    for i, (q, w) in enumerate(zip(wide(self.q), wide(self.weights))):
      for n in range(c.keys):
        if c.page:
          s, j = divmod(i, c.next_n)
          page = self.table[s, n // c.page]
          seen = n < c.lengths[s] - c.next_n + j + 1 and (
              0 <= page < len(self.page_k))
          if seen:
            k = wide(self.page_k[page, n % c.page])
            scale = self.page_scale[page, n % c.page]
        else:
          seen = self.starts[i] <= n < self.ends[i]
          k, scale = wide(self.k[n]), self.k_scale[n]
        if seen:
          out[i, n] = scale * (np.maximum(q @ k, 0) * w).sum()
          size[i, n] = scale * (np.abs(q) @ np.abs(k) * np.abs(w)).sum()
    return out, size


def call(p: Problem):
  """(function, arrays, options) of a problem's call."""
  c = p.case
  if not c.page:
    arrays = dict(q=p.q, kv=p.k, kv_scales=p.k_scale, weights=p.weights,
                  cu_starts=p.starts, cu_ends=p.ends)
    options, fn = {}, aiter.fp8_mqa_logits
  else:
    arrays = dict(
        q=p.q.reshape(-1, c.next_n, c.heads, c.dim), kv_cache=p.cache,
        weights=p.weights, context_lens=np.int32(c.lengths),
        block_tables=p.table)
    options = dict(max_model_len=c.keys, preshuffle=c.tiles)
    fn = aiter.fp8_paged_mqa_logits
  return fn, {n: jnp.asarray(t) for n, t in arrays.items()}, options
