# SPDX-License-Identifier: Apache-2.0
"""Latent attention for CDNA's matrix units (gfx942, gfx950), in Gluon.

A tile of keys is stored in LDS once, and is the left operand of both products:
scores are [keys, rows], the output [columns, rows]. A wave computes all of a
tile's scores of its rows, so that weights never leave it; where there are fewer
rows than waves have, waves compute the same scores and divide the output's
columns. The next tile is on its way in registers meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import mfma

from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.paged import attend, pages_mfma

# A Gluon function calls none of Triton's; of one source it may be either.
_tiles_of_lengths = gluon.jit(attend.tiles_of_lengths.fn)

# Rows and columns of a matrix instruction.
SIDE = gl.constexpr(16)
# More than any key.
ABSENT = gl.constexpr(2**31 - 1)


@gluon.constexpr_function
def _matrix(cdna, waves, tile_m, rows, depth):
  """The layout of a product of so many rows, whose columns are the tile's rows.

  Waves divide the columns, and if those are too few the rows; if there are too
  few of these also, some waves compute the same. depth: what is summed over.
  """
  columns = min(waves, tile_m // SIDE.value)
  if rows < SIDE.value * waves // columns:
    columns = waves
  return gl.amd.AMDMFMALayout(
      version=cdna, instr_shape=[16, 16, min(16 * (cdna - 2), depth)],
      transposed=False, warps_per_cta=[waves // columns, columns])


@gluon.constexpr_function
def _copied(waves, keys, columns, most):
  """How waves copy keys of so many columns: a lane copies `most` at once, or as
  few as leave none without."""
  values = min(most, keys * columns // (64 * waves))
  lanes = min(columns // values, 64)
  return gl.BlockedLayout([1, values], [64 // lanes, lanes], [waves, 1], [1, 0])


@gluon.constexpr_function
def _padded(keys, columns):
  """Rows of keys in LDS, so that no read of either operand has conflicts.

  Reads of 16 bytes take lanes 0 to 3 with 20 to 23, which are other rows and
  other columns; those of a column for several keys take every fourth row.
  """
  return gl.PaddedSharedLayout.with_identity_for(
      [[columns, 16], [4 * columns, 32]], [keys, columns], [1, 0])


@gluon.jit
def find_rows(slot, cu_seqlens, batch, tokens, seqlen_q, group, flags,
              TILE_M: gl.constexpr, FLAGS: gl.constexpr):
  """attend.py's, of a grid in which tokens of whole tiles have only these."""
  each = group // TILE_M
  if ((flags & attend.CU_SEQLENS) != 0) & (each * TILE_M == group):
    token = slot // each
    index = 0
    high = batch + 1
    while high - index > 1:
      middle = (index + high) // 2
      if gl.load(cu_seqlens + middle) <= token:
        index = middle
      else:
        high = middle
    start = gl.minimum(gl.maximum(gl.load(cu_seqlens + index), 0), tokens)
    end = tokens
    if index < batch:
      end = gl.load(cu_seqlens + index + 1)
      end = gl.minimum(gl.maximum(end, 0), tokens)
    len_q = end - start
    row0 = slot * TILE_M - start * group
  else:
    index, start, len_q, row0 = pages_mfma.find_rows(
        slot, cu_seqlens, batch, tokens, seqlen_q, group, flags, TILE_M, FLAGS)
  return index, start, len_q, row0


@gluon.jit
def _length_of(lengths, at, inside, flags):
  """attend.py's, without a branch: before one, what was asked for is waited
  for."""
  listed = inside & ((flags & attend.LAST_PAGES) != 0)
  length = gl.load(lengths.ptr + at, mask=inside, other=0)
  begin = gl.load(lengths.indptr + at, mask=listed, other=0)
  end = gl.load(lengths.indptr + at + 1, mask=listed, other=1)
  length += (end - begin - 1) * lengths.page_size
  length = gl.where(end > begin, length, 0)
  return gl.minimum(gl.maximum(length, 0), 1 << 30)


@gluon.jit
def _tiles(at, seqs, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
           FLAGS: gl.constexpr):
  """(first token, tokens, tiles of rows, tiles of keys) of sequences.

  No tile of rows sees more tiles of keys, and each has one at least.
  """
  cu_seqlens, lengths, batch, tokens, seqlen_q, group, left, right, flags = seqs
  length = _length_of(lengths, at, at < batch, flags)
  start, len_q, rows, keys = _tiles_of_lengths(
      at, length, cu_seqlens, batch, tokens, seqlen_q, group, left, right,
      flags, TILE_M, TILE_N, FLAGS)
  # A window may begin inside a tile; that which has no left edge does not.
  bounded = ((flags & attend.WINDOW) != 0) & (left < (1 << 30))
  keys += gl.where(bounded, 1, 0)
  return start, len_q, rows, gl.maximum(keys, 1)


@gluon.jit
def _lanes():
  """Each wave has all."""
  return gl.arange(0, attend.LANES, gl.BlockedLayout(
      [attend.LANES // 64], [64], [gl.num_warps()], [0]))


@gluon.jit
def _find_share(seqs, batch, splits, TILE_M: gl.constexpr,
                TILE_N: gl.constexpr, FLAGS: gl.constexpr):
  """(tiles of keys of all tiles of rows, how many of them a block does).

  So that no tile of rows has more than `splits` parts.
  """
  lanes = _lanes()
  total = lanes * 0
  longest = lanes * 0
  for i in range(0, batch + 1, attend.LANES):
    _, _, rows, keys = _tiles(i + lanes, seqs, TILE_M, TILE_N, FLAGS)
    total += rows * keys
    longest = gl.maximum(longest, gl.where(rows > 0, keys, 0))
  total = pages_mfma.one(gl.sum(total, 0))
  longest = pages_mfma.one(gl.max(longest, 0))
  share = gl.maximum((total - 1) // gl.num_programs(0),
                     (longest - 1) // (splits - 1)) + 1
  return total, share


@gluon.jit
def _find_tile(at, seqs, batch, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
               FLAGS: gl.constexpr):
  """The tile of rows whose tile of keys is the at-th of all.

  Returns:
    (index, start, len_q, row0, first, keys): find_rows' four, and the first of
    its tiles of keys, of so many.
  """
  lanes = _lanes()
  index = 0
  before = 0
  past = 0
  for i in range(0, batch + 1, attend.LANES):
    _, _, rows, keys = _tiles(i + lanes, seqs, TILE_M, TILE_N, FLAGS)
    ends = past + gl.cumsum(rows * keys, 0)
    there = (ends <= at) & (i + lanes <= batch)
    index += gl.sum(there.to(gl.int32), 0)
    before = gl.maximum(before, gl.max(gl.where(there, ends, 0), 0))
    past = gl.max(ends, 0)
  index = pages_mfma.one(index)
  before = pages_mfma.one(before)
  start, len_q, _, keys = _tiles(index, seqs, TILE_M, TILE_N, FLAGS)
  tile = (at - before) // keys
  return index, start, len_q, tile * TILE_M, before + tile * keys, keys


@gluon.jit
def find_work(block, seqs, splits, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
              FLAGS: gl.constexpr):
  """What a block does: tiles of keys `at` to end - 1 of those of all tiles of
  rows, one behind the other, each block as many. Without parts it is a tile of
  rows, which counts for one tile of keys.

  Returns:
    (at, end, share, tile): how many a block does, and _find_tile's of `at`.
  """
  cu_seqlens, _, batch, tokens, seqlen_q, group, _, _, flags = seqs
  at = block
  share = 1
  if splits > 1:
    total, share = _find_share(seqs, batch, splits, TILE_M, TILE_N, FLAGS)
    at *= share
    end = gl.minimum(at + share, total)
    index, start, len_q, row0, first, keys = _find_tile(
        at, seqs, batch, TILE_M, TILE_N, FLAGS)
  else:
    index, start, len_q, row0 = find_rows(
        block, cu_seqlens, batch, tokens, seqlen_q, group, flags, TILE_M, FLAGS)
    end = at + gl.where(row0 < len_q * group, 1, 0)
    first = at
    keys = 1
  return at, end, share, (index, start, len_q, row0, first, keys)


@gluon.jit
def next_work(at, end, seqs, tile, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
              FLAGS: gl.constexpr):
  """The tile of rows behind one: (at, _find_tile's of it)."""
  index, start, len_q, row0, first, keys = tile
  at = first + keys
  if at < end:
    index, start, len_q, row0, first, keys = _find_tile(
        at, seqs, seqs[2], TILE_M, TILE_N, FLAGS)
  return at, (index, start, len_q, row0, first, keys)


@gluon.jit
def find_part(block, at, end, share, tile, seqs, table, splits,
              TILE_M: gl.constexpr, TILE_N: gl.constexpr, FLAGS: gl.constexpr):
  """A block's part of the keys of a tile of rows.

  Returns:
    (first_page, offset, stop, first_tile, last_tile, split, parts): as of
    attend.py's find_keys; part `split` of so many.
  """
  _, lengths, batch, _, _, group, left_edge, right_edge, flags = seqs
  indptr, width, pages, page_size = table
  index, _, len_q, row0, first, keys = tile
  first_page, _, offset, _, stop, first_tile, last_tile = pages_mfma.find_keys(
      index, row0, gl.minimum(TILE_M, len_q * group - row0), len_q, lengths,
      indptr, batch, width, pages, page_size, group, left_edge, right_edge, 0,
      1, 1.0, flags, TILE_N, FLAGS)
  before = first // share
  if splits > 1:
    last_tile = gl.minimum(last_tile, first_tile + end - first)
    first_tile += at - first
  return (first_page, offset, stop, first_tile, last_tile, block - before,
          (first + keys - 1) // share - before + 1)


@gluon.jit
def tell_parts(parts_lse, row, left, split, splits, parts, rows,
               TILE_M: gl.constexpr):
  """Tells what joins parts where they end, by an lse of inf in all places
  behind the last one, whose block does so, and in that of one that is all.

  It is told before the part is computed: the stores take no time then.
  """
  lanes = gl.arange(0, 64, gl.BlockedLayout([1], [64], [gl.num_warps()], [0]))
  first = gl.where(parts > 1, parts, 0)
  first = gl.where((split == parts - 1) & (splits > 1), first, splits)
  for none in range(first, splits, 64 // TILE_M):
    place = none + lanes // TILE_M
    at = place.to(gl.int64) * rows + (row + lanes % TILE_M)
    gl.store(parts_lse + at, lanes * 0.0 + float("inf"),
             mask=(place < splits) & (lanes % TILE_M < left))


@gluon.jit
def _page(table, n, paging, stop, FLAGS: gl.constexpr):
  """The entries of a table for the keys n; -1 behind the last one."""
  at, _ = pages_mfma.place_in(paging, n, FLAGS)
  return gl.load(table + at, mask=n < stop, other=-1)


@gluon.jit
def _load(data, page, n, pages, paging, k_page, k_token,
          first: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr,
          FLAGS: gl.constexpr):
  """COLS columns of keys from `first` on; 0 of those in no page."""
  there = (page >= 0) & (page < pages)
  _, place = pages_mfma.place_in(paging, n, FLAGS)
  at = gl.maximum(page, 0).to(gl.int64) * k_page + place * k_token
  cols = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))[None, :]
  return gl.load(data + at[:, None] + (cols + first), mask=there[:, None],
                 other=0)


@gluon.jit
def _numbers(x, dtype: gl.constexpr, KIND: gl.constexpr):
  """What was loaded, in the queries' type: float8 that the device converts."""
  if KIND == attend.NO_BYTES:
    return x
  elif KIND == attend.E4M3FN:
    return x.to(gl.float8e4nv, bitcast=True).to(dtype)
  else:
    return x.to(gl.float8e4b8, bitcast=True).to(dtype)


@gluon.jit
def _which(page, n, pages):
  """The keys n, ABSENT of those in no page."""
  return gl.where((page >= 0) & (page < pages), n, ABSENT)


@gluon.jit
def _attend(
    q, data, out, lse, parts, parts_lse, scale, v_scale, sinks, table, k_page,
    k_token, tokens, batch, group, pages, paging, cp_world_size, window_left,
    window_right, flags, index, start, row0, left, begin, offset, stop,
    first_tile, last_tile, split, divided,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    ROPE: gl.constexpr, FLAGS: gl.constexpr, KIND: gl.constexpr,
    CDNA: gl.constexpr,
):
  """A part of the keys of a tile of rows; table: its sequence's pages."""
  WAVES: gl.constexpr = gl.num_warps()
  SCORES: gl.constexpr = _matrix(CDNA, WAVES, TILE_M, TILE_N, HEAD)
  OUT: gl.constexpr = _matrix(CDNA, WAVES, TILE_M, HEAD, TILE_N)
  P_WIDTH: gl.constexpr = OUT.instr_shape[2] // 4
  ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
  KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
  WIDTH: gl.constexpr = 8
  KEYS_IN: gl.constexpr = gl.DotOperandLayout(0, SCORES, WIDTH)
  QUERIES: gl.constexpr = gl.DotOperandLayout(1, SCORES, WIDTH)
  MOST: gl.constexpr = 8 if KIND == attend.NO_BYTES else 16
  WIDE: gl.constexpr = _copied(WAVES, TILE_N, HEAD, MOST)
  NARROW: gl.constexpr = _copied(WAVES, TILE_N, ROPE, MOST)
  ONE_KEY: gl.constexpr = gl.SliceLayout(1, WIDE)
  dtype: gl.constexpr = q.dtype.element_ty
  keys = gl.allocate_shared_memory(dtype, [TILE_N, HEAD],
                                   _padded(TILE_N, HEAD))
  ropes = gl.allocate_shared_memory(dtype, [TILE_N, ROPE],
                                    _padded(TILE_N, ROPE))
  which = gl.allocate_shared_memory(
      gl.int32, [TILE_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))

  first_row = start.to(gl.int64) * group + row0
  part = split.to(gl.int64) * tokens * group + first_row
  r = gl.arange(0, TILE_M, ROW)
  # The queries, as the right operand.
  q_row = gl.arange(0, TILE_M, gl.SliceLayout(0, QUERIES))[None, :]
  q_at = q + first_row * (HEAD + ROPE) + q_row * (HEAD + ROPE)
  q_tile = gl.load(
      q_at + gl.arange(0, HEAD, gl.SliceLayout(1, QUERIES))[:, None],
      mask=q_row < left, other=0.0)
  q_rope = gl.load(
      q_at + (HEAD + gl.arange(0, ROPE, gl.SliceLayout(1, QUERIES))[:, None]),
      mask=q_row < left, other=0.0)

  # Which keys a row sees.
  live = r < left
  query = (row0 + gl.where(live, r, 0)) // group
  head = (row0 + gl.where(live, r, 0)) % group
  position = query + offset
  if cp_world_size > 1:
    position = (begin + query + cp_world_size) // cp_world_size - 1
  bounded = (flags & attend.WINDOW) != 0
  high = gl.where(bounded, position + window_right, ABSENT - 1)
  low = gl.where(bounded, position - window_left, 0)

  # A sink is a key without a value: it opens m and l of the first part.
  m = gl.full([TILE_M], float("-inf"), gl.float32, ROW)
  if (flags & attend.SINK) != 0:
    sink = gl.load(sinks + head, mask=live, other=float("-inf"))
    m = gl.where((split == 0) & (index < batch), sink * scores.LOG2E, m)
  l = gl.where(m == float("-inf"), 0.0, 1.0)
  acc = gl.zeros([HEAD, TILE_M], gl.float32, OUT)
  # Of keys behind the part's last tile nothing is loaded.
  last_tile = gl.maximum(last_tile, first_tile + 1)
  stop = gl.minimum(stop, last_tile * TILE_N)
  n = first_tile * TILE_N + gl.arange(0, TILE_N, ONE_KEY)
  n_rope = first_tile * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(1, NARROW))
  page = _page(table, n, paging, stop, FLAGS)
  page_rope = _page(table, n_rope, paging, stop, FLAGS)
  k_next = _load(data, page, n, pages, paging, k_page, k_token, 0, HEAD, WIDE,
                 FLAGS)
  r_next = _load(data, page_rope, n_rope, pages, paging, k_page, k_token, HEAD,
                 ROPE, NARROW, FLAGS)
  n_next = _which(page, n, pages)
  # A page is looked up a tile ahead. What it says is asked when it is there.
  page = _page(table, n + TILE_N, paging, stop, FLAGS)
  page_rope = _page(table, n_rope + TILE_N, paging, stop, FLAGS)
  for _ in range(first_tile, last_tile):
    keys.store(_numbers(k_next, dtype, KIND))
    ropes.store(_numbers(r_next, dtype, KIND))
    which.store(n_next)
    n += TILE_N
    n_rope += TILE_N
    k_next = _load(data, page, n, pages, paging, k_page, k_token, 0, HEAD, WIDE,
                   FLAGS)
    r_next = _load(data, page_rope, n_rope, pages, paging, k_page, k_token,
                   HEAD, ROPE, NARROW, FLAGS)
    n_next = _which(page, n, pages)
    page = _page(table, n + TILE_N, paging, stop, FLAGS)
    page_rope = _page(table, n_rope + TILE_N, paging, stop, FLAGS)

    s = gl.zeros([TILE_N, TILE_M], gl.float32, SCORES)
    s = mfma(ropes.load(KEYS_IN), q_rope, s)
    s = mfma(keys.load(KEYS_IN), q_tile, s)
    key = which.load(KEY)[:, None]
    shown = (key <= high[None, :]) & (key >= low[None, :])
    s = gl.where(shown, s * scale, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 0))
    # A row that has seen no key yet: anything finite keeps the NaN away.
    m_exp = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - m_exp[None, :])
    alpha = gl.exp2(m - m_exp)
    l = l * alpha + gl.sum(p, 0)
    m = m_new
    acc *= gl.convert_layout(alpha, gl.SliceLayout(0, OUT))[None, :]
    p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(1, OUT, P_WIDTH))
    v = keys.permute([1, 0]).load(gl.DotOperandLayout(0, OUT, P_WIDTH))
    acc = mfma(v, p, acc)

  any_key = l != 0.0
  l_safe = gl.where(any_key, l, 1.0)
  factor = v_scale / l_safe
  acc *= gl.convert_layout(factor, gl.SliceLayout(0, OUT))[None, :]
  row_lse = gl.where(any_key, m * scores.LN2 + gl.log(l_safe), float("-inf"))
  o_row = gl.arange(0, TILE_M, gl.SliceLayout(0, OUT))[None, :]
  o_at = o_row * HEAD + gl.arange(0, HEAD, gl.SliceLayout(1, OUT))[:, None]
  if divided:
    gl.store(parts_lse + part + r, row_lse, mask=live)
    gl.store(parts + part * HEAD + o_at, acc, mask=o_row < left)
  else:
    if (flags & attend.LSE) != 0:
      gl.store(lse + head.to(gl.int64) * tokens + start + query, row_lse,
               mask=live)
    gl.store(out + first_row * HEAD + o_at, acc.to(dtype), mask=o_row < left)


@gluon.jit
def mla_attend(
    q, k_cache, k_bytes, out, lse, parts, parts_lse, k_scale, v_scale, sinks,
    table, indptr, lengths, cu_seqlens, places, k_start, k_page, k_token,
    tokens, batch, seqlen_q, group, pages, page_size, page_shift, page_factor,
    width, splits, cp_world_size, window_left, window_right, softmax_scale,
    flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    ROPE: gl.constexpr, FLAGS: gl.constexpr, KIND: gl.constexpr,
    NATIVE: gl.constexpr, WHOLE: gl.constexpr, SHARES: gl.constexpr,
    CDNA: gl.constexpr,
):
  """As mla/attend.py's, of a cache of the queries' type or of NATIVE bytes.

  WHOLE: a tile of rows has its blocks. Grid: (tiles of rows, splits).
  SHARES: blocks share the batch's keys (find_work). Grid: as many blocks as the
  device has room for; if splits is 1, tiles of rows.
  """
  gl.static_assert(KIND == attend.NO_BYTES or KIND == NATIVE)
  gl.static_assert(WHOLE + SHARES == 1)
  # Asked for now and used later, so that nothing waits for them.
  k_factor = gl.load(k_scale)
  v_factor = gl.load(v_scale)
  data = (k_cache if KIND == attend.NO_BYTES else k_bytes) + k_start
  # What differs from one device's keys to another's is found key by key.
  right_edge = window_right
  left_edge = window_left
  if cp_world_size > 1:
    right_edge = 1 << 30
    left_edge = 1 << 30
  lengths = attend.Lengths(lengths, indptr, page_size)
  paging = attend.Paging(page_size, page_shift, page_factor)
  block = gl.program_id(0)
  if SHARES:
    seqs = (cu_seqlens, lengths, batch, tokens, seqlen_q, group, left_edge,
            right_edge, flags)
    at, end, share, tile = find_work(block, seqs, splits, TILE_M, TILE_N, FLAGS)
    scale = softmax_scale * k_factor * scores.LOG2E
    while at < end:
      index, start, len_q, row0, _, _ = tile
      first_page, offset, stop, first_tile, last_tile, split, of_parts = (
          find_part(block, at, end, share, tile, seqs,
                    (indptr, width, pages, page_size), splits, TILE_M, TILE_N,
                    FLAGS))
      begin = 0
      if cp_world_size > 1:
        begin = gl.load(places + index, mask=index < batch, other=0)
      left = len_q * group - row0
      tell_parts(parts_lse, start * group + row0, left, split, splits, of_parts,
                 tokens * group, TILE_M)
      _attend(
          q, data, out, lse, parts, parts_lse, scale, v_factor, sinks,
          table + first_page, k_page, k_token, tokens, batch, group, pages,
          paging, cp_world_size, window_left, window_right, flags, index, start,
          row0, left, begin, offset, stop, first_tile, last_tile, split,
          of_parts > 1, TILE_M, TILE_N, HEAD, ROPE, FLAGS, KIND, CDNA)
      at, tile = next_work(at, end, seqs, tile, TILE_M, TILE_N, FLAGS)
  else:
    split = gl.program_id(1)
    index, start, len_q, row0 = find_rows(
        block, cu_seqlens, batch, tokens, seqlen_q, group, flags, TILE_M, FLAGS)
    left = len_q * group - row0
    if left <= 0:
      return
    begin = 0
    if cp_world_size > 1:
      begin = gl.load(places + index, mask=index < batch, other=0)
    first_page, _, offset, _, stop, first_tile, last_tile = (
        pages_mfma.find_keys(
            index, row0, gl.minimum(TILE_M, left), len_q, lengths, indptr,
            batch, width, pages, page_size, group, left_edge, right_edge, split,
            splits, splits, flags, TILE_N, FLAGS))
    scale = softmax_scale * k_factor * scores.LOG2E
    if (split > 0) & (first_tile >= last_tile):
      at = split.to(gl.int64) * tokens * group + start * group + row0
      r = gl.arange(0, TILE_M, gl.BlockedLayout([1], [64], [gl.num_warps()],
                                                [0]))
      gl.store(parts_lse + at + r, r * 0.0 + float("-inf"), mask=r < left)
      return
    _attend(
        q, data, out, lse, parts, parts_lse, scale, v_factor, sinks,
        table + first_page, k_page, k_token, tokens, batch, group, pages,
        paging, cp_world_size, window_left, window_right, flags, index, start,
        row0, left, begin, offset, stop, first_tile, last_tile, split,
        splits > 1, TILE_M, TILE_N, HEAD, ROPE, FLAGS, KIND, CDNA)
