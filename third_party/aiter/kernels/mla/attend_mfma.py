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
from triton.experimental.gluon.language.amd.hint import sched_barrier

from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.paged import attend, pages_mfma

# A Gluon function calls none of Triton's; of one source it may be either.
_tiles_of_lengths = gluon.jit(attend.tiles_of_lengths.fn)

# Rows and columns of a matrix instruction.
SIDE = gl.constexpr(16)
# More than any key.
ABSENT = gl.constexpr(2**31 - 1)
# Bytes of a cache that are loaded as one number.
WORD = gl.constexpr(4)


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
def copied(waves, columns, each, lanes):
  """How so many lanes copy a key of so many columns, `each` of them as one and
  up to 16 bytes at once: a lane's keys are the same whatever the columns are.
  """
  columns //= each
  lanes = min(lanes, columns)
  most = 8 if each == 1 else 16 // each
  return gl.BlockedLayout([1, min(most, columns // lanes)],
                          [64 // lanes, lanes], [waves, 1], [1, 0])


@gluon.constexpr_function
def _padded(keys, columns, each=1):
  """Rows of keys in LDS, so that no read of either operand has conflicts.

  Reads of 16 bytes take lanes 0 to 3 with 20 to 23, which are other rows and
  other columns; those of a column for several keys take every fourth row.
  each: how many of 16 bits are one number.
  """
  columns //= each
  return gl.PaddedSharedLayout.with_identity_for(
      [[columns, 16 // each], [4 * columns, 32 // each]], [keys, columns],
      [1, 0])


@gluon.constexpr_function
def loaded_at_once(kind):
  """How many numbers of a cache are loaded as one: bytes are, as words.

  As bytes they would be parted when they come, and waited for.
  """
  return 1 if kind == attend.NO_BYTES.value else WORD.value


@gluon.constexpr_function
def unit_of(kind, native):
  """What a number counts that `as_numbers` has made of a byte."""
  assert kind in (attend.NO_BYTES.value, attend.E4M3FN.value, native), kind
  return 1 if kind in (attend.NO_BYTES.value, native) else 2


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
def page_of(table, n, paging, stop, FLAGS: gl.constexpr):
  """The entries of a table for the keys n; -1 behind the last one."""
  at, _ = pages_mfma.place_in(paging, n, FLAGS)
  return gl.load(table + at, mask=n < stop, other=-1)


@gluon.jit
def loaded_of(count, KIND: gl.constexpr):
  """So many columns, of bytes a multiple of 16, in what is loaded as one."""
  if KIND == attend.NO_BYTES:
    return count
  else:
    return gl.multiple_of(count // WORD, 16 // WORD)


@gluon.jit
def cache_of(k_cache, k_bytes, k_start, k_page, k_token, KIND: gl.constexpr):
  """A cache, and its strides of pages and tokens, in what is loaded as one."""
  if KIND == attend.NO_BYTES:
    data = k_cache + k_start
  else:
    data = (k_bytes + k_start).to(gl.pointer_type(gl.uint32), bitcast=True)
  return data, loaded_of(k_page, KIND), loaded_of(k_token, KIND)


@gluon.jit
def _as_fnuz(w):
  """Words of e4m3fn as e4m3fnuz, whose numbers are half of them.

  Zero has no sign, and what has its bits is NaN there; NaN is the largest.
  """
  size = w & 0x7F7F7F7F
  is_nan = ((size + 0x01010101) >> 7) & 0x01010101
  return (size + is_nan) | (w & (size + 0x7F7F7F7F) & 0x80808080)


@gluon.jit
def _upper(x):
  """Of two float32 in 64 bits the upper halves."""
  return gl.inline_asm_elementwise(
      "v_perm_b32 $0, $2, $1, $3", "=v,v,v,s",
      [x.to(gl.uint32), (x >> 32).to(gl.uint32), 0x07060302], gl.uint32, True,
      1)


@gluon.jit
def _halves(x):
  """Two float32 in 64 bits as float16 in one word."""
  return gl.inline_asm_elementwise(
      "v_cvt_pkrtz_f16_f32 $0, $1, $2", "=v,v,v",
      [x.to(gl.uint32), (x >> 32).to(gl.uint32)], gl.uint32, True, 1)


@gluon.jit
def _widened(w, dtype: gl.constexpr, CDNA: gl.constexpr):
  """Words of float8 that the device converts: (two numbers each, the others).
  """
  if CDNA == 4:
    TYPE: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    CONVERT: gl.constexpr = "v_cvt_scalef32_pk_" + TYPE + "_fp8"
    return gl.inline_asm_elementwise(
        CONVERT + " $0, $2, 1.0\n" + CONVERT + " $1, $2, 1.0 op_sel:[1,0,0]",
        "=&v,=v,v", [w], (gl.uint32, gl.uint32), True, 1)
  else:
    low, high = gl.inline_asm_elementwise(
        "v_cvt_pk_f32_fp8 $0, $2\nv_cvt_pk_f32_fp8_sdwa $1, $2 src0_sel:WORD_1",
        "=&v,=v,v", [w], (gl.uint64, gl.uint64), True, 1)
    if dtype == gl.bfloat16:
      return _upper(low), _upper(high)
    else:
      return _halves(low), _halves(high)


@gluon.constexpr_function
def _halved(shape):
  return [*shape[:-1], shape[-1] // 2]


@gluon.jit
def as_put(smem, LAYOUT: gl.constexpr, KIND: gl.constexpr):
  """LDS for what `as_numbers` makes: of bytes words of two, in LAYOUT."""
  if KIND == attend.NO_BYTES:
    return smem
  else:
    return smem.reinterpret(gl.uint32, _halved(smem.shape), LAYOUT)


@gluon.jit
def as_numbers(x, dtype: gl.constexpr, KIND: gl.constexpr,
               NATIVE: gl.constexpr, CDNA: gl.constexpr):
  """What was loaded, of bytes words of two numbers of dtype."""
  if KIND == attend.NO_BYTES:
    return x
  else:
    low, high = _widened(x if KIND == NATIVE else _as_fnuz(x), dtype, CDNA)
    return gl.join(low, high).reshape([x.shape[0], 2 * x.shape[1]])


@gluon.jit
def columns(data, first, count, COLS: gl.constexpr, LAYOUT: gl.constexpr,
            PARTIAL: gl.constexpr):
  """Where COLS columns of a key from `first` on lie, of which it has `count`.

  Those behind are its first ones: what they are multiplied by is 0, or is not
  stored. So no load has a condition that differs among columns.
  """
  CHUNK: gl.constexpr = 128 // data.dtype.element_ty.primitive_bitwidth
  cols = gl.arange(0, COLS, LAYOUT)
  if PARTIAL:
    return gl.where(cols < count, cols + first, cols % CHUNK)
  else:
    return cols + first


@gluon.jit
def place_of(data, page, n, pages, paging, k_page, k_token,
             FLAGS: gl.constexpr):
  """Where the keys n are, and which are in a page."""
  _, place = pages_mfma.place_in(paging, n, FLAGS)
  at = gl.maximum(page, 0).to(gl.int64) * k_page + place * k_token
  return data + at, (page >= 0) & (page < pages)


@gluon.jit
def load(places, first, count, COLS: gl.constexpr, LAYOUT: gl.constexpr,
          PARTIAL: gl.constexpr):
  """COLS columns of keys from `first` on; 0 of those in no page."""
  place, there = places
  place = gl.convert_layout(place, gl.SliceLayout(1, LAYOUT))
  there = gl.convert_layout(there, gl.SliceLayout(1, LAYOUT))
  cols = columns(place, first, count, COLS, gl.SliceLayout(0, LAYOUT), PARTIAL)
  return gl.load(place[:, None] + cols[None, :], mask=there[:, None], other=0)


@gluon.jit
def queries(q_at, there, first, count, COLS: gl.constexpr,
            LAYOUT: gl.constexpr, PARTIAL: gl.constexpr):
  """COLS columns of rows at q_at from `first` on, 0 behind `count` of them."""
  col = gl.arange(0, COLS, gl.SliceLayout(1, LAYOUT))[:, None]
  if PARTIAL:
    there &= col < count
  return gl.load(q_at + (first + col), mask=there, other=0.0)


@gluon.jit
def soft_cap(s, cap):
  """paged/attend.py's of scores times LOG2E, without a division, which is ten
  instructions."""
  x = s * (scores.LN2 / cap)
  root = gl.rsqrt(1.0 + gl.exp2(x * (2.0 * scores.LOG2E)))
  # Near zero 1 - 2 r cancels; two terms of the series are exact to 2e-7 there.
  t = gl.where(gl.abs(x) < 0.03, x - x * x * x * (1.0 / 3.0),
               1.0 - 2.0 * (root * root))
  return t * (cap * scores.LOG2E)


@gluon.jit
def rows_of(row0, left, offset, begin, group, cp_world_size, window_left,
            window_right, flags, TILE_M: gl.constexpr, LAYOUT: gl.constexpr):
  """Of a tile's rows: (whether there is one, its query, its head, the first and
  the last key that it sees)."""
  r = gl.arange(0, TILE_M, LAYOUT)
  live = r < left
  query = (row0 + gl.where(live, r, 0)) // group
  head = (row0 + gl.where(live, r, 0)) % group
  position = query + offset
  if cp_world_size > 1:
    position = (begin + query + cp_world_size) // cp_world_size - 1
  bounded = (flags & attend.WINDOW) != 0
  high = gl.where(bounded, position + window_right, ABSENT - 1)
  low = gl.where(bounded, position - window_left, 0)
  return live, query, head, low, high


@gluon.jit
def opened(sinks, head, live, first, flags):
  """m and l before the first key; a sink is one without a value, which opens
  those of the first part."""
  m = gl.full(head.shape, float("-inf"), gl.float32, head.type.layout)
  if (flags & attend.SINK) != 0:
    sink = gl.load(sinks + head, mask=live, other=float("-inf"))
    m = gl.where(first, sink * scores.LOG2E, m)
  return m, gl.where(m == float("-inf"), 0.0, 1.0)


@gluon.jit
def weighed(s, key, low, high, m, l):
  """(weights, what sums until now are multiplied by, m, l) of a tile's scores.

  key: [keys, 1], ABSENT of those in no page.
  """
  shown = (key <= high[None, :]) & (key >= low[None, :])
  s = gl.where(shown, s, float("-inf"))
  m_new = gl.maximum(m, gl.max(s, 0))
  # A row that has seen no key yet: anything finite keeps the NaN away.
  m_exp = gl.where(m_new == float("-inf"), 0.0, m_new)
  p = gl.exp2(s - m_exp[None, :])
  alpha = gl.exp2(m - m_exp)
  return p, alpha, m_new, l * alpha + gl.sum(p, 0)


@gluon.jit
def ended(m, l, v_scale):
  """What a row's sum is multiplied by, and its lse."""
  any_key = l != 0.0
  l_safe = gl.where(any_key, l, 1.0)
  row_lse = gl.where(any_key, m * scores.LN2 + gl.log(l_safe), float("-inf"))
  return v_scale / l_safe, row_lse


@gluon.jit
def present(page, n, pages):
  """The keys n, ABSENT of those in no page."""
  return gl.where((page >= 0) & (page < pages), n, ABSENT)


@gluon.jit
def _attend(
    q, data, out, lse, parts, parts_lse, scale, v_scale, sinks, table, k_page,
    k_token, tokens, batch, group, pages, paging, cp_world_size, window_left,
    window_right, flags, index, start, row0, left, begin, offset, stop,
    first_tile, last_tile, split, divided, hdim, hdim_v, logits_soft_cap,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    ROPE: gl.constexpr, FLAGS: gl.constexpr, KIND: gl.constexpr,
    NATIVE: gl.constexpr, PARTIAL: gl.constexpr, CDNA: gl.constexpr,
):
  """A part of the keys of a tile of rows; table: its sequence's pages."""
  WAVES: gl.constexpr = gl.num_warps()
  SCORES: gl.constexpr = _matrix(CDNA, WAVES, TILE_M, TILE_N, HEAD)
  OUT: gl.constexpr = _matrix(CDNA, WAVES, TILE_M, HEAD, TILE_N)
  P_WIDTH: gl.constexpr = OUT.instr_shape[2] // 4
  ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
  KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
  # Columns of keys that are read from LDS together, while those before are
  # multiplied.
  DEPTH: gl.constexpr = min(HEAD, 128)
  WIDTH: gl.constexpr = 8
  KEYS_IN: gl.constexpr = gl.DotOperandLayout(0, SCORES, WIDTH)
  QUERIES: gl.constexpr = gl.DotOperandLayout(1, SCORES, WIDTH)
  EACH: gl.constexpr = loaded_at_once(KIND)
  # All lanes have one key where it is long, and ask for its page as one; gfx950
  # is sooner with four keys.
  LANES: gl.constexpr = 64 if CDNA == 3 and HEAD // EACH >= 512 else 16
  WIDE: gl.constexpr = copied(WAVES, HEAD, EACH, LANES)
  NARROW: gl.constexpr = copied(WAVES, ROPE, EACH, LANES)
  ONE_KEY: gl.constexpr = gl.SliceLayout(1, WIDE)
  dtype: gl.constexpr = q.dtype.element_ty
  if not PARTIAL:
    hdim = HEAD + ROPE
    hdim_v = HEAD
  hdim_rope = hdim - hdim_v
  keys = gl.allocate_shared_memory(dtype, [TILE_N, HEAD],
                                   _padded(TILE_N, HEAD))
  ropes = gl.allocate_shared_memory(dtype, [TILE_N, ROPE],
                                    _padded(TILE_N, ROPE))
  new_keys = as_put(keys, _padded(TILE_N, HEAD, 2), KIND)
  new_ropes = as_put(ropes, _padded(TILE_N, ROPE, 2), KIND)
  cols = loaded_of(hdim_v, KIND)
  cols_rope = loaded_of(hdim_rope, KIND)
  which = gl.allocate_shared_memory(
      gl.int32, [TILE_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))

  first_row = start.to(gl.int64) * group + row0
  part = split.to(gl.int64) * tokens * group + first_row
  # The queries, as the right operand.
  q_row = gl.arange(0, TILE_M, gl.SliceLayout(0, QUERIES))[None, :]
  q_at = q + first_row * hdim + q_row * hdim
  q_there = q_row < left
  q_tile = ()
  for i in gl.static_range(HEAD // DEPTH):
    q_tile = q_tile + (queries(q_at, q_there, i * DEPTH, hdim_v - i * DEPTH,
                               DEPTH, QUERIES, PARTIAL),)
  q_rope = queries(q_at, q_there, hdim_v, hdim_rope, ROPE, QUERIES, PARTIAL)

  live, query, head, low, high = rows_of(
      row0, left, offset, begin, group, cp_world_size, window_left,
      window_right, flags, TILE_M, ROW)
  m, l = opened(sinks, head, live, (split == 0) & (index < batch), flags)
  acc = gl.zeros([HEAD, TILE_M], gl.float32, OUT)
  # Of keys behind the part's last tile nothing is loaded.
  last_tile = gl.maximum(last_tile, first_tile + 1)
  stop = gl.minimum(stop, last_tile * TILE_N)
  n = first_tile * TILE_N + gl.arange(0, TILE_N, ONE_KEY)
  page = page_of(table, n, paging, stop, FLAGS)
  place = place_of(data, page, n, pages, paging, k_page, k_token, FLAGS)
  k_next = load(place, 0, cols, HEAD // EACH, WIDE, PARTIAL)
  r_next = load(place, cols, cols_rope, ROPE // EACH, NARROW, PARTIAL)
  n_next = present(page, n, pages)
  # A page is looked up a tile ahead. What it says is asked when it is there.
  page = page_of(table, n + TILE_N, paging, stop, FLAGS)
  for _ in range(first_tile, last_tile):
    new_keys.store(as_numbers(k_next, dtype, KIND, NATIVE, CDNA))
    new_ropes.store(as_numbers(r_next, dtype, KIND, NATIVE, CDNA))
    which.store(n_next)
    n += TILE_N
    place = place_of(data, page, n, pages, paging, k_page, k_token, FLAGS)
    k_next = load(place, 0, cols, HEAD // EACH, WIDE, PARTIAL)
    r_next = load(place, cols, cols_rope, ROPE // EACH, NARROW, PARTIAL)
    n_next = present(page, n, pages)
    page = page_of(table, n + TILE_N, paging, stop, FLAGS)

    s = gl.zeros([TILE_N, TILE_M], gl.float32, SCORES)
    k_rope = ropes.load(KEYS_IN)
    k_part = keys.slice(0, DEPTH, 1).load(KEYS_IN)
    sched_barrier()
    s = mfma(k_rope, q_rope, s)
    for i in gl.static_range(HEAD // DEPTH):
      k_this = k_part
      if i + 1 < HEAD // DEPTH:
        k_part = keys.slice((i + 1) * DEPTH, DEPTH, 1).load(KEYS_IN)
      s = mfma(k_this, q_tile[i], s)
      sched_barrier()
    key = which.load(KEY)[:, None]
    s *= scale
    if attend.SOFT_CAP & FLAGS:
      # Read before a branch, behind which it would be waited for.
      v = keys.permute([1, 0]).load(gl.DotOperandLayout(0, OUT, P_WIDTH))
      if (flags & attend.SOFT_CAP) != 0:
        s = soft_cap(s, logits_soft_cap)
    p, alpha, m, l = weighed(s, key, low, high, m, l)
    acc *= gl.convert_layout(alpha, gl.SliceLayout(0, OUT))[None, :]
    p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(1, OUT, P_WIDTH))
    if not attend.SOFT_CAP & FLAGS:
      v = keys.permute([1, 0]).load(gl.DotOperandLayout(0, OUT, P_WIDTH))
    acc = mfma(v, p, acc)

  factor, row_lse = ended(m, l, v_scale)
  acc *= gl.convert_layout(factor, gl.SliceLayout(0, OUT))[None, :]
  o_row = gl.arange(0, TILE_M, gl.SliceLayout(0, OUT))[None, :]
  o_col = gl.arange(0, HEAD, gl.SliceLayout(1, OUT))[:, None]
  o_at = o_row * hdim_v + o_col
  o_there = o_row < left
  if PARTIAL:
    o_there &= o_col < hdim_v
  if divided:
    gl.store(parts_lse + part + gl.arange(0, TILE_M, ROW), row_lse, mask=live)
    gl.store(parts + part * hdim_v + o_at, acc, mask=o_there)
  else:
    if (flags & attend.LSE) != 0:
      gl.store(lse + head.to(gl.int64) * tokens + start + query, row_lse,
               mask=live)
    gl.store(out + first_row * hdim_v + o_at, acc.to(dtype), mask=o_there)


@gluon.jit
def mla_attend(
    q, k_cache, k_bytes, out, lse, parts, parts_lse, k_scale, v_scale, sinks,
    table, indptr, lengths, cu_seqlens, places, k_start, k_page, k_token,
    tokens, batch, seqlen_q, group, hdim, hdim_v, pages, page_size, page_shift,
    page_factor, width, splits, cp_world_size, window_left, window_right,
    softmax_scale, logits_soft_cap, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    ROPE: gl.constexpr, FLAGS: gl.constexpr, KIND: gl.constexpr,
    NATIVE: gl.constexpr, PARTIAL: gl.constexpr, WHOLE: gl.constexpr,
    SHARES: gl.constexpr, CDNA: gl.constexpr,
):
  """As mla/attend.py's.

  WHOLE: a tile of rows has its blocks. Grid: (tiles of rows, splits).
  SHARES: blocks share the batch's keys (find_work). Grid: as many blocks as the
  device has room for; if splits is 1, tiles of rows.
  """
  gl.static_assert(WHOLE + SHARES == 1)
  # Asked for now and used later, so that nothing waits for them.
  UNIT: gl.constexpr = unit_of(KIND, NATIVE)
  k_factor = gl.load(k_scale) * UNIT
  v_factor = gl.load(v_scale) * UNIT
  data, k_page, k_token = cache_of(k_cache, k_bytes, k_start, k_page, k_token,
                                   KIND)
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
          of_parts > 1, hdim, hdim_v, logits_soft_cap, TILE_M, TILE_N,
          HEAD, ROPE, FLAGS, KIND, NATIVE, PARTIAL, CDNA)
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
        splits > 1, hdim, hdim_v, logits_soft_cap, TILE_M, TILE_N, HEAD,
        ROPE, FLAGS, KIND, NATIVE, PARTIAL, CDNA)
