# SPDX-License-Identifier: Apache-2.0
"""Latent attention by its definition: loops over sequences and tokens, NumPy.

The scores and sums are those of paged attention's oracle, of keys and values
that are picked here, a token at a time.
"""

import numpy as np
from paged import oracle


def tokens_at(cache, slots, lora):
  """(k [n, 1, cols], v [n, 1, lora], there [n]) of slots, in float64."""
  pages, size = cache.shape[:2]
  there = np.array([0 <= slot < pages * size for slot in slots], bool)
  rows = np.zeros((len(slots), 1, cache.shape[-1]))
  for i, slot in enumerate(slots):
    if there[i]:
      rows[i, 0] = oracle.numbers(cache[slot // size, slot % size])
  return rows, rows[:, :, :lora], there


def _attend(q, cache, slots, lora, k_scale, v_scale, **scores):
  k, v, there = tokens_at(cache, slots, lora)
  return oracle.attend(q, k[:, :, :q.shape[-1]] * k_scale, v * v_scale, there,
                       **scores)


def slots_of(pages, last, size):
  """The slots of a sequence's tokens; -1 of those whose page is absent."""
  length = max((len(pages) - 1) * size + last, 0) if len(pages) else 0
  return [int(pages[j // size]) * size + j % size
          if pages[j // size] >= 0 else -1 for j in range(length)]


def paged(q, cache, cu_seqlens, sequences, lora, k_scale=1.0, v_scale=1.0,
          sinks=None, **scores):
  """(out [tokens, heads, lora], lse [heads, tokens]) of slots a sequence."""
  q = oracle.numbers(q)
  tokens, heads, _ = q.shape
  out, lse = np.zeros((tokens, heads, lora)), np.full((tokens, heads), -np.inf)
  for i, slots in enumerate(sequences):
    rows = slice(cu_seqlens[i], cu_seqlens[i + 1])
    out[rows], lse[rows] = _attend(
        q[rows], cache, slots, lora, k_scale, v_scale, sinks=sinks, **scores)
  return out, lse.T
