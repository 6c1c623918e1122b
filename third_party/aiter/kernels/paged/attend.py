# SPDX-License-Identifier: Apache-2.0
"""Attention over paged KV caches: decode, and mixed batches of any lengths.

A sequence's rows are its queries, each with all query heads of one KV head:
row r is query r // group with head r % group. So keys and values are read once
for the whole group, and any group fills a tile. One program takes TILE_M rows
and a part of the keys that they see. Parts are of about the same size in the
whole batch, so that a long sequence is divided and a short one is not, and as
many as the device has room for. Where there may be more than one, a program
leaves its result and lse in scratch, and merge.py joins them.

A key is read at page * page stride + place in the page, for any strides. One
whose page is absent (an id out of range, a table too short) is hidden, and in
its place the first page is read: no load has a condition.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.mha.scores import LN2, LOG2E
from third_party.aiter.kernels.paged.family import FLAGS as _FLAGS
from third_party.aiter.kernels.paged.family import KINDS as _KINDS

# Queries are packed; else each sequence has seqlen_q of them.
CU_SEQLENS = tl.constexpr(_FLAGS["cu_seqlens"])
# Sequence b has the pages table[indptr[b]:indptr[b + 1]], else row b of
# [batch, width].
INDPTR = tl.constexpr(_FLAGS["indptr"])
WINDOW = tl.constexpr(_FLAGS["window"])
SOFT_CAP = tl.constexpr(_FLAGS["soft_cap"])
ALIBI = tl.constexpr(_FLAGS["alibi"])
SINK = tl.constexpr(_FLAGS["sink"])
# Scales differ from page to page or token to token.
TOKEN_SCALES = tl.constexpr(_FLAGS["token_scales"])
# A scale of values below it takes no part in what weights are of.
LEAST_SCALE = tl.constexpr(2.0**-60)
LSE = tl.constexpr(_FLAGS["lse"])
# Head dimensions are smaller than HEAD.
PARTIAL = tl.constexpr(_FLAGS["partial"])
# Runs of 16 bytes of a token, or of tokens, do not lie side by side.
SHUFFLED = tl.constexpr(_FLAGS["shuffled"])
# The size of a page is no power of two.
ODD_PAGES = tl.constexpr(_FLAGS["odd_pages"])
# Lengths are those of the last pages, of a table with indptr.
LAST_PAGES = tl.constexpr(_FLAGS["last_pages"])

INT8 = tl.constexpr(_KINDS.index("int8"))
E4M3FN = tl.constexpr(_KINDS.index("e4m3fn"))
E4M3FNUZ = tl.constexpr(_KINDS.index("e4m3fnuz"))
E5M2 = tl.constexpr(_KINDS.index("e5m2"))
# Sequences that are looked at together.
LANES = tl.constexpr(128)
# How often the device is filled where sequences are of different lengths:
# programs end at about the same time then. They are, if all together have less
# than so much of what they had if each were as long as the longest.
TURNS = tl.constexpr(2)
EVEN = tl.constexpr(0.95)

ANY_BYTES = tl.constexpr(-1)
NO_BYTES = tl.constexpr(-2)


class Side(NamedTuple):
  """Keys or values of one head, and where they lie in its cache.

  `data` and `bytes` are one address; cols is [HEAD]: where columns lie.
  """
  data: tl.tensor
  bytes: tl.tensor
  page: tl.tensor
  token: tl.tensor
  split: tl.tensor
  run_token: tl.tensor
  cols: tl.tensor
  hdim: tl.tensor
  scale: tl.tensor
  scale_page: tl.tensor
  scale_token: tl.tensor


class Lengths(NamedTuple):
  """What tells how many keys sequences have; length_of."""
  ptr: tl.tensor
  indptr: tl.tensor
  page_size: tl.tensor


class Paging(NamedTuple):
  """How keys lie in pages; place_in."""
  size: tl.tensor
  shift: tl.tensor
  factor: tl.tensor


class Table(NamedTuple):
  """Pages of one sequence, so many, and of the cache."""
  first: tl.tensor
  count: tl.tensor
  pages: tl.tensor
  page_size: tl.tensor
  page_shift: tl.tensor


@triton.jit
def soft_cap(s, cap):
  """cap * tanh(s / cap)."""
  x = tl.abs(s) * (1.0 / cap)
  e = tl.exp2(x * (-2.0 * LOG2E))
  # Near zero 1 - e cancels; two terms of the series are exact to 2e-7 there.
  t = tl.where(x < 0.03, x - x * x * x * (1.0 / 3.0), (1.0 - e) / (1.0 + e))
  return tl.where(s < 0, -cap, cap) * t


@triton.jit
def _half(x, KIND: tl.constexpr):
  """e4m3 bits as float16, exactly: moved to its exponent's bias.

  In integers of 16 bits and without selects, so that two are one instruction.
  """
  wide = x.to(tl.uint16)
  size = wide & 0x7F
  bits = ((wide & 0x80) << 8) | (size << 7)
  if KIND == E4M3FN:
    y = bits.to(tl.float16, bitcast=True) * 256.0
    is_nan = (size + 1) & 0x80
  else:
    y = bits.to(tl.float16, bitcast=True) * 128.0
    is_nan = ((size + 0x7F) & 0x80) ^ 0x80
    is_nan = is_nan & wide
  return (y.to(tl.uint16, bitcast=True) | (is_nan * 0xFC)).to(
      tl.float16, bitcast=True)


@triton.jit
def _exact(x, dtype: tl.constexpr):
  """float32 that `dtype` holds, as that: of bfloat16 the upper bits."""
  if dtype == tl.bfloat16:
    bits = x.to(tl.uint32, bitcast=True) >> 16
    y = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
  else:
    y = x.to(dtype)
  return y


@triton.jit
def _number(x, dtype: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
  """Bytes of a kind as float16 or bfloat16, exactly."""
  if KIND == INT8:
    y = _exact(x.to(tl.int8, bitcast=True).to(tl.float32), dtype)
  elif KIND == E5M2:
    half = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    y = _exact(half.to(tl.float32), dtype)
  elif KIND == E4M3FN and NATIVE == E4M3FN:
    y = x.to(tl.float8e4nv, bitcast=True).to(dtype)
  elif KIND == E4M3FNUZ and NATIVE == E4M3FNUZ:
    y = x.to(tl.float8e4b8, bitcast=True).to(dtype)
  else:
    y = _exact(_half(x, KIND).to(tl.float32), dtype)
  return y


@triton.jit
def numbers(x, kind, dtype: tl.constexpr, KIND: tl.constexpr,
            NATIVE: tl.constexpr):
  """What was loaded, in the queries' type."""
  if KIND == NO_BYTES:
    y = x
  elif KIND != ANY_BYTES:
    y = _number(x, dtype, KIND, NATIVE)
  else:
    y = _number(x, dtype, INT8, NATIVE)
    if kind == E4M3FN:
      y = _number(x, dtype, E4M3FN, NATIVE)
    elif kind == E4M3FNUZ:
      y = _number(x, dtype, E4M3FNUZ, NATIVE)
    elif kind == E5M2:
      y = _number(x, dtype, E5M2, NATIVE)
  return y


@triton.jit
def _side(data, bytes_, start, page, token, head_stride, split, run_token, run,
          col, width, hdim, scale, scale_page, scale_token, scale_head, head,
          HEAD: tl.constexpr, FLAGS: tl.constexpr):
  """The Side of a head."""
  first = start + head.to(tl.int64) * head_stride
  cols = tl.arange(0, HEAD)
  if SHUFFLED & FLAGS:
    cols = cols // width * run + cols % width * col
  return Side(
      data + first, bytes_ + first, page, token, split, run_token, cols, hdim,
      scale + head.to(tl.int64) * scale_head, scale_page, scale_token)


@triton.jit
def place_in(paging, keys, FLAGS: tl.constexpr):
  """The pages of keys, of those of their sequence, and the places in them."""
  if ODD_PAGES & FLAGS:
    # PagedParams says why this is exact.
    wide = (2 * keys).to(tl.uint32).to(tl.uint64)
    wide *= paging.factor.to(tl.uint32, bitcast=True)
    page = ((wide >> 32).to(tl.uint32) >> paging.shift).to(tl.int32)
    return page, keys - page * paging.size
  else:
    return keys >> paging.shift, keys & (paging.size - 1)


@triton.jit
def place_of(table, keys, FLAGS: tl.constexpr):
  """Where keys lie in their pages."""
  if ODD_PAGES & FLAGS:
    return keys % table.page_size
  else:
    return keys & (table.page_size - 1)


@triton.jit
def pages_at(table, keys, FLAGS: tl.constexpr):
  """The pages of keys, -1 where there is none, and their places in them.

  Of many keys, or of the first of a tile that lies in one page.
  """
  if ODD_PAGES & FLAGS:
    place = keys // table.page_size
  else:
    place = keys >> table.page_shift
  offset = place_of(table, keys, FLAGS)
  page = tl.load(table.first + place, mask=place < table.count, other=-1)
  return tl.where((page >= 0) & (page < table.pages), page, -1), offset


@triton.jit
def _load(side, pages, offset, shown, KIND: tl.constexpr, HEAD: tl.constexpr,
          FLAGS: tl.constexpr, TILE_N: tl.constexpr,
          ONLY_SHOWN: tl.constexpr):
  """Keys or values [keys, HEAD]; of absent pages what the first one has.

  TILE_N: so many keys lie together from one on, if not 0.
  ONLY_SHOWN: nothing of what is not shown, but zeros.
  """
  ptr = side.data if KIND == NO_BYTES else side.bytes
  token = offset * side.token
  if SHUFFLED & FLAGS:
    token = (offset // side.split * side.run_token
             + offset % side.split * side.token)
  # Of 32 bits each, so that a product and its sum are one instruction.
  at = tl.maximum(pages, 0).to(tl.int64) * side.page.to(tl.int64) + token
  if TILE_N > 0:
    # What differs from key to key does not change from tile to tile.
    ptr += at
    at = (tl.arange(0, TILE_N) * side.token)[:, None] + side.cols[None, :]
  else:
    at = at[:, None] + side.cols[None, :]
  inside = tl.arange(0, HEAD)[None, :] < side.hdim
  if ONLY_SHOWN and PARTIAL & FLAGS:
    return tl.load(ptr + at, mask=shown[:, None] & inside, other=0)
  elif ONLY_SHOWN:
    return tl.load(ptr + at, mask=shown[:, None], other=0)
  elif PARTIAL & FLAGS:
    return tl.load(ptr + at, mask=inside, other=0)
  else:
    return tl.load(ptr + at)


@triton.jit
def _scales(side, pages, offset, present):
  """Scales of keys' or values' tokens."""
  at = pages.to(tl.int64) * side.scale_page + offset * side.scale_token
  return tl.load(side.scale + at, mask=present, other=1.0)


@triton.jit
def find_rows(
    slot, cu_seqlens, batch, tokens, seqlen_q, group, flags,
    TILE_M: tl.constexpr, FLAGS: tl.constexpr,
):
  """The rows of a grid slot.

  Of a packed batch sequence i owns the slots from first row // TILE_M + i on:
  never fewer than it has tiles, and known without a scan over the lengths
  before it. Sequence `batch` is the tokens behind all others.

  Returns:
    (index, start, len_q, row0): a sequence, its first token, so many tokens,
    and the first of the slot's rows, which may lie past the sequence's end.
  """
  if CU_SEQLENS & FLAGS and flags & CU_SEQLENS:
    index = 0
    high = batch + 1
    while high - index > 1:
      middle = (index + high) // 2
      start = tl.minimum(tl.maximum(tl.load(cu_seqlens + middle), 0), tokens)
      if start * group // TILE_M + middle <= slot:
        index = middle
      else:
        high = middle
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + index), 0), tokens)
    end = tokens
    if index < batch:
      end = tl.load(cu_seqlens + index + 1)
      end = tl.minimum(tl.maximum(end, 0), tokens)
    len_q = end - start
    tile = slot - (start * group // TILE_M + index)
  else:
    tiles_each = (seqlen_q * group + TILE_M - 1) // TILE_M
    index = slot // tiles_each
    tile = slot - index * tiles_each
    start = index * seqlen_q
    len_q = seqlen_q
  return index, start, len_q, tile * TILE_M


@triton.jit
def length_of(lengths, at, inside, flags):
  """Keys of sequence `at`, or of many; 0 of those that are not inside."""
  length = tl.load(lengths.ptr + at, mask=inside, other=0)
  if flags & LAST_PAGES:
    begin = tl.load(lengths.indptr + at, mask=inside, other=0)
    pages = tl.load(lengths.indptr + at + 1, mask=inside, other=0) - begin
    length = tl.where(pages > 0, (pages - 1) * lengths.page_size + length, 0)
  # None is beyond what memory holds; sums with windows stay in 32 bits.
  return tl.minimum(tl.maximum(length, 0), 1 << 30)


@triton.jit
def _sequences(at, cu_seqlens, lengths, batch, tokens, seqlen_q, group,
               window_left, window_right, flags, TILE_M: tl.constexpr,
               TILE_N: tl.constexpr, FLAGS: tl.constexpr):
  """(first token, tokens, tiles of rows, tiles of keys that one of these sees).

  Of sequence `at`, or of many. Sequence `batch` is the tokens behind all
  others, and those behind that have none.
  """
  length = length_of(lengths, at, at < batch, flags)
  return tiles_of_lengths(at, length, cu_seqlens, batch, tokens, seqlen_q,
                          group, window_left, window_right, flags, TILE_M,
                          TILE_N, FLAGS)


@triton.jit
def tiles_of_lengths(at, length, cu_seqlens, batch, tokens, seqlen_q, group,
                     window_left, window_right, flags, TILE_M: tl.constexpr,
                     TILE_N: tl.constexpr, FLAGS: tl.constexpr):
  """_sequences, where so many keys are known."""
  inside = at < batch
  start = at * seqlen_q
  len_q = tl.where(inside, seqlen_q, 0)
  if CU_SEQLENS & FLAGS and flags & CU_SEQLENS:
    start = tl.load(cu_seqlens + at, mask=at <= batch, other=0)
    start = tl.minimum(tl.maximum(start, 0), tokens)
    end = tl.load(cu_seqlens + at + 1, mask=inside, other=1 << 30)
    end = tl.minimum(tl.maximum(end, 0), tokens)
    len_q = tl.where(at <= batch, tl.maximum(end - start, 0), 0)
  if WINDOW & FLAGS and flags & WINDOW:
    length = tl.minimum(
        length, tl.minimum(window_left, 1 << 29)
        + tl.minimum(window_right, 1 << 29) + TILE_M)
  rows = (len_q * group + TILE_M - 1) // TILE_M
  return start, len_q, rows, (length + TILE_N - 1) // TILE_N


@triton.jit
def tiles_of_batch(
    lanes, cu_seqlens, lengths, batch, seqlen_q, group, window_left,
    window_right, flags, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    FLAGS: tl.constexpr,
):
  """Tiles of rows times tiles of keys that a row may see, of all sequences.

  lanes: 0 to LANES - 1; the result is one of their sums each.
  """
  total = (lanes * 0).to(tl.float32)
  for i in range(0, batch, LANES):
    _, _, rows, tiles = _sequences(
        i + lanes, cu_seqlens, lengths, batch, 1 << 30, seqlen_q, group,
        window_left, window_right, flags, TILE_M, TILE_N, FLAGS)
    total += rows.to(tl.float32) * tiles.to(tl.float32)
  return total


@triton.jit
def parts_of(tiles, share, splits):
  """Parts of so many tiles of keys, each of which is worth `share` programs."""
  # Rather fewer: a few programs too many wait until the others have ended. By
  # one instruction: the same number wherever it is computed.
  parts = tl.fma(tiles.to(tl.float32), share, 0.3).to(tl.int32)
  return tl.minimum(tl.maximum(parts, 1), splits)


@triton.jit
def find_work(
    program, lanes, cu_seqlens, lengths, batch, tokens, seqlen_q, group,
    nhead_k, window_left, window_right, splits, programs, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, FLAGS: tl.constexpr,
):
  """What a program of a grid of one axis does, in which none is without a part.

  The programs of a sequence lie side by side: KV heads fastest, then tiles of
  rows, then parts of the keys.

  Args:
    programs: that fill the device.

  Returns:
    (index, start, len_q, row0, head, split, parts): find_rows' four, where
    len_q is 0 if nothing is left; the KV head; part `split` of so many.
  """
  total = (lanes * 0).to(tl.float32)
  count = total
  longest = total
  for i in range(0, batch, LANES):
    _, _, rows, tiles = _sequences(
        i + lanes, cu_seqlens, lengths, batch, tokens, seqlen_q, group,
        window_left, window_right, flags, TILE_M, TILE_N, FLAGS)
    of_keys = tiles.to(tl.float32)
    rows = tl.where(tiles > 0, rows, 0).to(tl.float32)
    total += rows * of_keys
    count += rows
    longest = tl.maximum(longest, tl.where(rows > 0, of_keys, 0.0))
  total = tl.sum(total, 0)
  even = total >= EVEN * tl.sum(count, 0) * tl.max(longest, 0)
  share = (tl.where(even, programs, TURNS * programs)
           / (nhead_k * tl.maximum(total, 1.0)))
  first = 0
  index = 0
  passed = 0
  searching = True
  while searching:
    _, _, rows, tiles = _sequences(
        index + lanes, cu_seqlens, lengths, batch, tokens, seqlen_q, group,
        window_left, window_right, flags, TILE_M, TILE_N, FLAGS)
    ends = first + tl.cumsum(
        rows * parts_of(tiles, share, splits) * nhead_k, 0)
    first = tl.max(tl.where(ends <= program, ends, first), 0)
    passed = tl.sum((ends <= program).to(tl.int32), 0)
    index += passed
    searching = (passed == LANES) & (index <= batch)
  start, len_q, rows, tiles = _sequences(
      index, cu_seqlens, lengths, batch, tokens, seqlen_q, group, window_left,
      window_right, flags, TILE_M, TILE_N, FLAGS)
  place = (program - first) // nhead_k
  rows = tl.maximum(rows, 1)
  return (index, start, len_q, place % rows * TILE_M,
          (program - first) % nhead_k, place // rows,
          parts_of(tiles, share, splits))


@triton.jit
def find_keys(
    index, row0, rows, len_q, lengths, indptr, batch, width, pages, page_size,
    group, window_left, window_right, split, splits, share, flags,
    TILE_N: tl.constexpr, FLAGS: tl.constexpr,
):
  """keys_of_length of a sequence whose length is not known yet."""
  return keys_of_length(
      index, row0, rows, len_q, length_of(lengths, index, index < batch, flags),
      indptr, batch, width, pages, page_size, group, window_left, window_right,
      split, splits, share, flags, TILE_N, FLAGS)


@triton.jit
def keys_of_length(
    index, row0, rows, len_q, length, indptr, batch, width, pages, page_size,
    group, window_left, window_right, split, splits, share, flags,
    TILE_N: tl.constexpr, FLAGS: tl.constexpr,
):
  """The keys of sequence `index` that rows row0 to row0 + rows - 1 see.

  Returns:
    (first, count, offset, low, stop, first_tile, last_tile): pages table[first]
    to table[first + count - 1]; query i is at key i + offset; keys low to
    stop - 1; tiles of keys first_tile to last_tile - 1 of this split. A tile of
    keys is worth `share` programs.
  """
  inside = index < batch
  count = tl.where(inside, width, 0)
  first = index.to(tl.int64) * width
  if INDPTR & FLAGS and flags & INDPTR:
    begin = tl.load(indptr + index, mask=inside, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), width)
    end = tl.load(indptr + index + 1, mask=inside, other=0)
    count = tl.minimum(end, width) - begin
    first = begin.to(tl.int64)
  count = tl.minimum(tl.maximum(count, 0), length // page_size + 1)
  offset = length - len_q
  stop = tl.where(pages > 0, tl.minimum(length, count * page_size), 0)
  low = 0
  if WINDOW & FLAGS and flags & WINDOW:
    stop = tl.minimum(
        stop, offset + (row0 + rows - 1) // group + window_right + 1)
    low = tl.maximum(offset + row0 // group - window_left, 0)
  low_tile = low // TILE_N
  tiles_of_keys = tl.maximum((stop + TILE_N - 1) // TILE_N - low_tile, 0)
  parts = parts_of(tiles_of_keys, share, splits)
  each = (tiles_of_keys + parts - 1) // parts
  first_tile = low_tile + split * each
  last_tile = tl.minimum(first_tile + each, low_tile + tiles_of_keys)
  return first, count, offset, low, stop, first_tile, last_tile


@triton.jit
def paged_attend(
    q, k_cache, v_cache, k_bytes, v_bytes, out, lse, parts, parts_lse,
    k_scale, v_scale, sinks, slopes, table, indptr, lengths, cu_seqlens,
    k_start, k_page, k_head, k_token, k_split, k_run_token, k_run, k_col,
    k_scale_page, k_scale_head, k_scale_token,
    v_start, v_page, v_head, v_token, v_split, v_run_token, v_run, v_col,
    v_scale_page, v_scale_head, v_scale_token,
    run, tokens, batch, seqlen_q, nhead_q, nhead_k, group, hdim, hdim_v, pages,
    page_size, page_shift, width, splits, programs, window_left, window_right,
    sinks_step, slopes_step, softmax_scale, logits_soft_cap, kind, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD: tl.constexpr,
    FLAGS: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
    CHEAP_CAST: tl.constexpr, LARGE_PAGES: tl.constexpr,
    ONE_LANE: tl.constexpr, PRECISION: tl.constexpr, ONE_AXIS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
  """Attention of packed or even queries; semantics in include/aiter/paged.h.

  q and out are [tokens, nhead_q, hdim (hdim_v)], lse [nhead_q, tokens], parts
  [splits, tokens * nhead_q, hdim_v] and parts_lse [splits, tokens * nhead_q].
  A cache's element is at start + page * .._page + token // .._split *
  .._run_token + token % .._split * .._token + head * .._head + col // run *
  .._run + col % run * .._col, where only SHUFFLED ones have splits and runs. Of
  a table with indptr, width is all its pages. windows: 2^30 where unbounded.
  sinks and slopes are [nhead_q], or with a step of nhead_q [batch, nhead_q].

  LARGE_PAGES: no tile of keys is of two pages.
  ONE_LANE: AMD's compiler is told that a sum over lanes is one number, or else
    all that follows from it, pages and the loop, is computed in every lane.
  PRECISION: what a product takes of a float32; see mha_f32/fwd.py.
  ONE_AXIS: if there are splits, the grid is find_work's, and scratch merge.py's
  of such.
  OVERLAPS: the next kernel may start before this one ends, and waits itself.

  Grid: (tiles of rows and KV heads, these fastest, splits).
  """
  if OVERLAPS:
    gdc_launch_dependents()
  lengths = Lengths(lengths, indptr, page_size)
  head = tl.program_id(0) % nhead_k
  slot = tl.program_id(0) // nhead_k
  split = tl.program_id(1)
  index = 0
  start = 0
  len_q = 0
  row0 = 0
  parts_here = splits
  share = splits * 1.0
  if ONE_AXIS and splits > 1:
    index, start, len_q, row0, head, split, parts_here = find_work(
        tl.program_id(0), tl.arange(0, LANES), cu_seqlens, lengths, batch,
        tokens, seqlen_q, group, nhead_k, window_left, window_right, splits,
        programs, flags, TILE_M, TILE_N, FLAGS)
    share = parts_here * 1.0
  else:
    # Parts are of about the same size in all sequences: as many as programs.
    if splits > 1:
      share = programs / (nhead_k * tl.maximum(tl.sum(tiles_of_batch(
          tl.arange(0, LANES), cu_seqlens, lengths, batch, seqlen_q, group,
          window_left, window_right, flags, TILE_M, TILE_N, FLAGS), 0), 1.0))
    index, start, len_q, row0 = find_rows(
        slot, cu_seqlens, batch, tokens, seqlen_q, group, flags, TILE_M, FLAGS)
  rows_left = len_q * group - row0
  if rows_left <= 0:
    return
  r = row0 + tl.arange(0, TILE_M)
  query = r // group
  live = tl.arange(0, TILE_M) < rows_left
  query = tl.where(live, query, len_q - 1)
  head_q = head * group + r % group
  row = (start + query).to(tl.int64) * nhead_q + head_q

  first_page, count, offset, _, stop, first_tile, last_tile = find_keys(
      index, row0, tl.minimum(TILE_M, rows_left), len_q, lengths, indptr, batch,
      width, pages, page_size, group, window_left, window_right, split,
      parts_here, share, flags, TILE_N, FLAGS)
  if ONE_LANE:
    first_tile = tl.inline_asm_elementwise(
        "v_readfirstlane_b32 $0, $1", "=s,v", [first_tile], tl.int32, True, 1)
    last_tile = tl.inline_asm_elementwise(
        "v_readfirstlane_b32 $0, $1", "=s,v", [last_tile], tl.int32, True, 1)
  part = split.to(tl.int64) * tokens * nhead_q + row
  if ONE_AXIS and (split == parts_here - 1) & (parts_here < splits):
    # Behind the parts, or in the place of one by itself, which needs no merge.
    end = tl.where(parts_here > 1, parts_here, 0).to(tl.int64)
    tl.store(parts_lse + end * tokens * nhead_q + row,
             tl.full([TILE_M], float("inf"), tl.float32), mask=live)
  if (split > 0) & (first_tile >= last_tile):
    tl.store(parts_lse + part, tl.full([TILE_M], float("-inf"), tl.float32),
             mask=live)
    return

  # Queries, scaled keys and values.
  cols = tl.arange(0, HEAD)[None, :]
  q_mask = live[:, None]
  if PARTIAL & FLAGS:
    q_mask &= cols < hdim
  q_tile = tl.load(q + row[:, None] * hdim + cols, mask=q_mask, other=0.0)
  keys = _side(
      k_cache, k_bytes, k_start, k_page, k_token, k_head, k_split, k_run_token,
      k_run, k_col, run, hdim, k_scale, k_scale_page, k_scale_token,
      k_scale_head, head, HEAD, FLAGS)
  values = _side(
      v_cache, v_bytes, v_start, v_page, v_token, v_head, v_split, v_run_token,
      v_run, v_col, run, hdim_v, v_scale, v_scale_page, v_scale_token,
      v_scale_head, head, HEAD, FLAGS)
  pages_of = Table(table + first_page, count, pages, page_size, page_shift)
  scale = softmax_scale
  out_scale = 1.0
  if (flags & TOKEN_SCALES) == 0:
    scale *= tl.load(keys.scale)
    out_scale = tl.load(values.scale)
  owned = tl.arange(0, TILE_M) < tl.where(index < batch, rows_left, 0)
  slope = tl.zeros([TILE_M], tl.float32)
  if ALIBI & FLAGS and flags & ALIBI:
    slope = tl.load(slopes + index * slopes_step + head_q, mask=owned,
                    other=0.0)
  position = query + offset

  # A sink is a key without a value: it opens m and l of the first part.
  m = tl.full([TILE_M], float("-inf"), tl.float32)
  if SINK & FLAGS and flags & SINK:
    sink = tl.load(sinks + index * sinks_step + head_q, mask=owned,
                   other=float("-inf"))
    m = tl.where(split == 0, sink * LOG2E, m)
  l = tl.where(m == float("-inf"), 0.0, 1.0)
  acc = tl.zeros([TILE_M, HEAD], tl.float32)
  n = first_tile * TILE_N + tl.arange(0, TILE_N)
  TOGETHER: tl.constexpr = TILE_N if LARGE_PAGES else 0
  first_key = n
  if LARGE_PAGES:
    first_key = first_tile * TILE_N
  page, place = pages_at(pages_of, first_key, FLAGS)
  for _ in range(first_tile, last_tile):
    if LARGE_PAGES:
      shown = n < tl.where(page >= 0, stop, 0)
    else:
      shown = (page >= 0) & (n < stop)
    k_raw = _load(keys, page, place, shown, KIND, HEAD, FLAGS, TOGETHER, False)
    # What lies behind a sequence, or in a page that is not its own, may be NaN.
    v_raw = _load(
        values, page, place, shown, KIND, HEAD, FLAGS, TOGETHER, True)
    k_tile = numbers(k_raw, kind, q_tile.dtype, KIND, NATIVE)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if TOKEN_SCALES & FLAGS and flags & TOKEN_SCALES:
      s *= _scales(keys, page, place, shown)[None, :]
    if SOFT_CAP & FLAGS and flags & SOFT_CAP:
      s = soft_cap(s * scale, logits_soft_cap) * LOG2E
    else:
      s *= scale * LOG2E
    if ALIBI & FLAGS and flags & ALIBI:
      away = tl.abs(position[:, None] - n[None, :])
      s -= slope[:, None] * LOG2E * away.to(tl.float32)
    s = tl.where(shown[None, :], s, float("-inf"))
    if WINDOW & FLAGS and flags & WINDOW:
      ahead = n[None, :] - position[:, None]
      s = tl.where((ahead <= window_right) & (ahead >= -window_left), s,
                   float("-inf"))
    most = s
    of_values = tl.full([TILE_N], 1.0, tl.float32)
    if TOKEN_SCALES & FLAGS and flags & TOKEN_SCALES:
      # float16 holds a weight with its scale, if the largest such is 1.
      of_values = _scales(values, page, place, shown)
      most += tl.log2(tl.maximum(tl.abs(of_values), LEAST_SCALE))[None, :]
    m_new = tl.maximum(m, tl.max(most, 1))
    # A row that has seen no key yet: anything finite keeps the NaN away.
    m_exp = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_exp[:, None])
    alpha = tl.exp2(m - m_exp)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if TOKEN_SCALES & FLAGS and flags & TOKEN_SCALES:
      p *= of_values[None, :]
    v_tile = numbers(v_raw, kind, q_tile.dtype, KIND, NATIVE)
    acc = tl.dot(tiles.cast(p, v_tile.dtype, CHEAP_CAST), v_tile, acc,
                 input_precision=PRECISION)
    m = m_new
    n += TILE_N
    first_key += TILE_N
    page, place = pages_at(pages_of, first_key, FLAGS)

  any_key = l != 0
  l_safe = tl.where(any_key, l, 1.0)
  acc = acc * (out_scale / l_safe)[:, None]
  row_lse = tl.where(any_key, m * LN2 + tl.log(l_safe), float("-inf"))
  o_mask = live[:, None] & (cols < hdim_v)
  if parts_here > 1:
    tl.store(parts_lse + part, row_lse, mask=live)
    tl.store(parts + part[:, None] * hdim_v + cols, acc, mask=o_mask)
  else:
    if LSE & FLAGS and flags & LSE:
      tl.store(lse + head_q.to(tl.int64) * tokens + start + query, row_lse,
               mask=live)
    tl.store(out + row[:, None] * hdim_v + cols,
             acc.to(out.dtype.element_ty), mask=o_mask)
