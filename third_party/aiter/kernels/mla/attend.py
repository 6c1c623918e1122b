# SPDX-License-Identifier: Apache-2.0
"""Attention of many heads to one latent vector a token, in paged caches.

A token's row of the cache is [latent | rope]. All heads of a query have the
whole row as their key, and its latent part as their value: a tile of keys is
read once and is both factors. DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434,
section 2.1, with the projections absorbed into queries and outputs.

Rows, parts of the keys and pages are as in paged/attend.py; a tile's rows are
heads of one query and of the queries behind it.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.mha.scores import LN2, LOG2E
from third_party.aiter.kernels.paged import attend as paged
from third_party.aiter.kernels.paged.attend import (
    LSE,
    NO_BYTES,
    SINK,
    SOFT_CAP,
    WINDOW,
)


@triton.jit
def _load(ptr, keys, first, count, shown, COLS: tl.constexpr,
          PARTIAL: tl.constexpr):
  """Columns first:first + count of the keys that are shown, [keys, COLS].

  What lies behind a sequence, or in a page that is not its own, may be NaN, and
  a weight of 0 would not hide it.
  """
  cols = tl.arange(0, COLS)[None, :]
  mask = shown[:, None]
  if PARTIAL:
    mask &= cols < count
  return tl.load(ptr + first + keys[:, None] + cols, mask=mask, other=0)


@triton.jit
def mla_attend(
    q, k_cache, k_bytes, out, lse, parts, parts_lse, k_scale, v_scale, sinks,
    table, indptr, lengths, cu_seqlens, places, k_start, k_page, k_token,
    tokens, batch, seqlen_q, group, hdim, hdim_v, pages, page_size, page_shift,
    width, splits, cp_world_size, window_left, window_right, softmax_scale,
    logits_soft_cap, kind, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD: tl.constexpr,
    ROPE: tl.constexpr, FLAGS: tl.constexpr, KIND: tl.constexpr,
    NATIVE: tl.constexpr, CHEAP_CAST: tl.constexpr, PARTIAL: tl.constexpr,
):
  """As paged_attend of one KV head, whose values are k_cache's hdim_v columns.

  places, cp_world_size: include/aiter/paged.h.

  Grid: (tiles of rows, splits).
  """
  lengths = paged.Lengths(lengths, indptr, page_size)
  slot = tl.program_id(0)
  split = tl.program_id(1)
  index, start, len_q, row0 = paged.find_rows(
      slot, cu_seqlens, batch, tokens, seqlen_q, group, flags, TILE_M, FLAGS)
  rows_left = len_q * group - row0
  if rows_left <= 0:
    return
  # Of one KV head all rows of a sequence lie one behind the other.
  rows = tl.arange(0, TILE_M)
  live = rows < rows_left
  query = (row0 + rows) // group
  head = (row0 + rows) % group
  first_row = start.to(tl.int64) * group + row0

  # Where a query stands among this cache's keys, of which some are others'.
  begin = 0
  right = window_right
  left = window_left
  if cp_world_size > 1:
    begin = tl.load(places + index, mask=index < batch, other=0)
    right = 1 << 30
    left = 1 << 30
  # All sequences are divided alike: a tile of keys is worth all parts.
  first_page, count, offset, low, stop, first_tile, last_tile = paged.find_keys(
      index, row0, tl.minimum(TILE_M, rows_left), len_q, lengths, indptr, batch,
      width, pages, page_size, group, left, right, split, splits, splits, flags,
      TILE_N, FLAGS)
  first_part = split.to(tl.int64) * tokens * group + first_row
  if (split > 0) & (first_tile >= last_tile):
    tl.store(parts_lse + first_part + rows,
             tl.full([TILE_M], float("-inf"), tl.float32), mask=live)
    return
  # Without a key there is a tile of none: a loop whose loads are ahead of it
  # would read, of no tile at all, what nobody wrote.
  last_tile = tl.maximum(last_tile, first_tile + 1)

  cols = tl.arange(0, HEAD)[None, :]
  if not PARTIAL:
    hdim = HEAD + ROPE
    hdim_v = HEAD
  q_row = q + first_row * hdim + rows[:, None] * hdim
  hdim_rope = hdim - hdim_v
  q_mask = live[:, None]
  rope_mask = live[:, None]
  if PARTIAL:
    q_mask &= cols < hdim_v
    rope_mask &= tl.arange(0, ROPE)[None, :] < hdim_rope
  q_tile = tl.load(q_row + cols, mask=q_mask, other=0.0)
  q_rope = tl.load(q_row + hdim_v + tl.arange(0, ROPE)[None, :],
                   mask=rope_mask, other=0.0)
  data = (k_cache if KIND == NO_BYTES else k_bytes) + k_start
  pages_of = paged.Table(table + first_page, count, pages, page_size,
                         page_shift)
  scale = softmax_scale * tl.load(k_scale)
  position = query + offset
  if cp_world_size > 1:
    position = (begin + query + cp_world_size) // cp_world_size - 1

  # A sink is a key without a value: it opens m and l of the first part.
  m = tl.full([TILE_M], float("-inf"), tl.float32)
  if SINK & FLAGS and flags & SINK:
    sink = tl.load(sinks + head, mask=live, other=float("-inf")) * LOG2E
    m = tl.where((split == 0) & (index < batch), sink, m)
  l = tl.where(m == float("-inf"), 0.0, 1.0)
  acc = tl.zeros([TILE_M, HEAD], tl.float32)
  n = first_tile * TILE_N + tl.arange(0, TILE_N)
  # A page is looked up a tile ahead, in registers: copies to shared memory are
  # waited for in their order, and it would wait for all rows before it.
  page, _ = paged.pages_at(pages_of, n, FLAGS)
  for _ in range(first_tile, last_tile):
    place = paged.place_of(pages_of, n, FLAGS)
    shown = (page >= 0) & (n < stop)
    keys = page.to(tl.int64) * k_page.to(tl.int64) + place * k_token
    k_raw = _load(data, keys, 0, hdim_v, shown, HEAD, PARTIAL)
    r_raw = _load(data, keys, hdim_v, hdim_rope, shown, ROPE, PARTIAL)
    k_tile = paged.numbers(k_raw, kind, q_tile.dtype, KIND, NATIVE)
    r_tile = paged.numbers(r_raw, kind, q_tile.dtype, KIND, NATIVE)
    s = tl.dot(q_rope, tl.trans(r_tile))
    s = tl.dot(q_tile, tl.trans(k_tile), s)
    if SOFT_CAP & FLAGS and flags & SOFT_CAP:
      s = paged.soft_cap(s * scale, logits_soft_cap) * LOG2E
    else:
      s *= scale * LOG2E
    s = tl.where(shown[None, :], s, float("-inf"))
    if WINDOW & FLAGS and flags & WINDOW:
      ahead = n[None, :] - position[:, None]
      s = tl.where((ahead <= window_right) & (ahead >= -window_left), s,
                   float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen no key yet: anything finite keeps the NaN away.
    m_exp = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_exp[:, None])
    alpha = tl.exp2(m - m_exp)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(tiles.cast(p, k_tile.dtype, CHEAP_CAST), k_tile, acc)
    m = m_new
    n += TILE_N
    page, _ = paged.pages_at(pages_of, n, FLAGS)

  any_key = l != 0
  l_safe = tl.where(any_key, l, 1.0)
  acc = acc * (tl.load(v_scale) / l_safe)[:, None]
  row_lse = tl.where(any_key, m * LN2 + tl.log(l_safe), float("-inf"))
  o_mask = live[:, None]
  if PARTIAL:
    o_mask &= cols < hdim_v
  at = rows[:, None] * hdim_v + cols
  if splits > 1:
    tl.store(parts_lse + first_part + rows, row_lse, mask=live)
    tl.store(parts + first_part * hdim_v + at, acc, mask=o_mask)
  else:
    if LSE & FLAGS and flags & LSE:
      tl.store(lse + head.to(tl.int64) * tokens + start + query, row_lse,
               mask=live)
    tl.store(out + first_row * hdim_v + at, acc.to(out.dtype.element_ty),
             mask=o_mask)
