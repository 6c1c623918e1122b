# SPDX-License-Identifier: Apache-2.0
"""attend_mfma.py's latent attention of many rows, in Gluon.

A unit's registers have room for one program of four waves, so that nothing
hides what a wave waits for but the wave itself. A wave computes all scores and
all columns of the output of its 16 rows. Keys lie in LDS once, in four parts of
128 columns: while one is multiplied the next one is read, and while the far
half of the output is computed the near half of the next tile is stored.

The second product wants several keys of a column in a lane. gfx950 reads LDS
so. On gfx942 a lane reads neighbouring columns of four keys, turns them in
registers, and gives the i-th instruction the i-th of them: the output's columns
are put in order when they are stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import mfma
from triton.experimental.gluon.language.amd.hint import sched_barrier

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.mla import attend_mfma
from third_party.aiter.kernels.paged import attend, pages_mfma

# A Gluon function calls none of Triton's; of one source it may be either.
_cast = gluon.jit(tiles.cast.fn)

# Rows and columns of a matrix instruction.
SIDE = gl.constexpr(16)
# Columns of a part; keys of a tile; waves, which divide its rows.
PART = gl.constexpr(128)
KEYS = gl.constexpr(32)
WAVES = gl.constexpr(4)
# Entries of a table that waves look at together: those of most parts.
LOOKS = gl.constexpr(4096)


@gluon.constexpr_function
def _matrix(cdna):
  """A product whose columns are rows of queries."""
  return gl.amd.AMDMFMALayout(
      version=cdna, instr_shape=[16, 16, 16 * (cdna - 2)], transposed=False,
      warps_per_cta=[1, WAVES.value])


@gluon.constexpr_function
def _copied(columns):
  """How waves copy a tile: 16 lanes a key, so that a lane's keys are the same
  whatever the columns are."""
  return gl.BlockedLayout([1, columns // 16], [4, 16], [WAVES.value, 1], [1, 0])


@gluon.constexpr_function
def _padded(keys, columns, each=1):
  """Keys in LDS, so that no read has conflicts: reads of 16 bytes take lanes 0
  to 3 with 20 to 23, other keys and other columns. each: how many of 16 bits
  are one number."""
  columns //= each
  return gl.PaddedSharedLayout.with_identity_for(
      [[columns, 16 // each]], [keys, columns], [1, 0])


@gluon.constexpr_function
def _turned():
  """A part as a lane turns it: 8 columns of 4 neighbouring keys, and of every
  sixteenth one; all waves have the same."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [16, 0]],
      lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [4, 0], [8, 0]],
      warp_bases=[[0, 0], [0, 0]], block_bases=[],
      shape=[KEYS.value, PART.value])


@gluon.constexpr_function
def _in_order(bits):
  """A part of the output of such numbers, by 16 bytes a lane.

  A lane has 32 columns that follow each other. It changes some of them for
  those of three other rows, so that what is stored at once is 64 bytes.
  """
  own, others = ([4, 8], [16]) if bits == 32 else ([8, 16], [4])
  reg_bases = [[1, 0], [2, 0], *([c, 0] for c in others), [0, 1], [0, 2]]
  return gl.DistributedLinearLayout(
      reg_bases=reg_bases,
      lane_bases=[[own[0], 0], [own[1], 0], [0, 4], [0, 8], [32, 0], [64, 0]],
      warp_bases=[[0, 16], [0, 32]], block_bases=[], shape=[PART.value, 64])


@gluon.constexpr_function
def _sums():
  """[4, rows]: a number of each of the four lanes that share a row."""
  return gl.DistributedLinearLayout(
      reg_bases=[], lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0]],
      warp_bases=[[0, 16], [0, 32]], block_bases=[], shape=[4, 64])


@gluon.jit
def _position(query, offset, begin, cp_world_size):
  """The key at which a query is; of keys of which each device has some, the
  last one of this one's that is not behind it."""
  position = query + offset
  if cp_world_size > 1:
    position = (begin + query + cp_world_size) // cp_world_size - 1
  return position


@gluon.jit
def _pages(table, n, FLAGS: gl.constexpr):
  """The table's entries for keys; for those behind the last one the last's."""
  first, paging, end = table
  at, _ = pages_mfma.place_in(paging, gl.minimum(n, end - 1), FLAGS)
  return gl.load(first + at)


@gluon.jit
def _is_page(page, pages):
  return (page >= 0) & (page < pages)


@gluon.jit
def _place(cache, page, n, FLAGS: gl.constexpr):
  """Where keys are; of those in no page where the first page's are."""
  data, pages, paging, k_page, k_token, end = cache
  page = gl.where(_is_page(page, pages), page, 0)
  _, place = pages_mfma.place_in(paging, gl.minimum(n, end - 1), FLAGS)
  return data + (page.to(gl.int64) * k_page + place * k_token)


@gluon.jit
def _hidden(cache, page, n):
  """What to add to scores of keys: -inf where there is none."""
  _, pages, _, _, _, end = cache
  return gl.where(_is_page(page, pages) & (n < end), 0.0, float("-inf"))


@gluon.jit
def _load(place, first, count, COLS: gl.constexpr, LAYOUT: gl.constexpr,
          PARTIAL: gl.constexpr):
  """COLS columns of keys from `first` on, of which they have `count`."""
  place = gl.convert_layout(place, gl.SliceLayout(1, LAYOUT))
  col = attend_mfma.columns(place, first, count, COLS,
                            gl.SliceLayout(0, LAYOUT), PARTIAL)
  return gl.load(place[:, None] + col[None, :])


@gluon.jit
def _load_near(place, cols, cols_rope, COLS: gl.constexpr, ROPE: gl.constexpr,
               WIDE: gl.constexpr, NARROW: gl.constexpr,
               PARTIAL: gl.constexpr):
  """The first two parts of COLS values' columns, and those behind all."""
  return (_load(place, 0, cols, COLS, WIDE, PARTIAL),
          _load(place, COLS, cols - COLS, COLS, WIDE, PARTIAL),
          _load(place, cols, cols_rope, ROPE, NARROW, PARTIAL))


@gluon.jit
def _load_far(place, cols, COLS: gl.constexpr, WIDE: gl.constexpr,
              PARTIAL: gl.constexpr):
  return (_load(place, 2 * COLS, cols - 2 * COLS, COLS, WIDE, PARTIAL),
          _load(place, 3 * COLS, cols - 3 * COLS, COLS, WIDE, PARTIAL))


@gluon.jit
def _without(columns, page, pages):
  """Columns of keys, 0 of those in no page: what is there may be NaN."""
  found = ()
  for i in gl.static_range(len(columns)):
    there = gl.convert_layout(_is_page(page, pages),
                              gl.SliceLayout(1, columns[i].type.layout))
    found = found + (gl.where(there[:, None], columns[i],
                              gl.zeros_like(columns[i])),)
  return found


@gluon.jit
def _put(half, columns, dtype: gl.constexpr, KIND: gl.constexpr,
              NATIVE: gl.constexpr, CDNA: gl.constexpr):
  """Stores two parts."""
  for i in gl.static_range(2):
    half.slice(i * KEYS, KEYS).store(
        attend_mfma.as_numbers(columns[i], dtype, KIND, NATIVE, CDNA))


@gluon.jit
def _keys(half, i: gl.constexpr, S: gl.constexpr):
  """A part, as the left operand of the first product."""
  return half.slice(i * KEYS, KEYS).load(gl.DotOperandLayout(0, S, 8))


@gluon.jit
def _values(half, i: gl.constexpr, S: gl.constexpr):
  """A part, of which _operand makes the left operand of the second product."""
  part = half.slice(i * KEYS, KEYS)
  if S.version == 4:
    return part.permute([1, 0]).load(gl.DotOperandLayout(0, S, 4))
  else:
    return part.load(_turned())


@gluon.jit
def _operand(v, S: gl.constexpr):
  if S.version == 4:
    return v
  else:
    v = v.reshape([KEYS, SIDE, PART // SIDE]).permute(2, 1, 0)
    return gl.convert_layout(v.reshape([PART, KEYS]),
                             gl.DotOperandLayout(0, S, 4))


@gluon.jit
def _columns(x, S: gl.constexpr):
  """A part of the output, its columns in order."""
  if S.version == 4:
    return x
  else:
    M: gl.constexpr = x.shape[1]
    x = x.reshape([PART // SIDE, SIDE, M]).permute(1, 0, 2)
    return gl.convert_layout(x.reshape([PART, M]),
                             _in_order(x.dtype.primitive_bitwidth))


@gluon.jit
def _store(out, x, left, hdim_v, i: gl.constexpr, PARTIAL: gl.constexpr):
  """Stores a part of rows of hdim_v columns."""
  col = gl.arange(0, PART, gl.SliceLayout(1, x.type.layout))[:, None]
  row = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
  there = row < left
  if PARTIAL:
    there &= col < hdim_v - i * PART
  gl.store(out + i * PART + (row * hdim_v + col), x, mask=there)


@gluon.jit
def _queries(q_at, there, hdim_v, LAYOUT: gl.constexpr,
             PARTIAL: gl.constexpr):
  """The parts of rows."""
  parts = ()
  for i in gl.static_range(4):
    parts = parts + (attend_mfma.queries(
        q_at, there, i * PART, hdim_v - i * PART, PART, LAYOUT, PARTIAL),)
  return parts


@gluon.jit
def mla_attend(
    q, k_cache, k_bytes, out, lse, parts, parts_lse, k_scale, v_scale, sinks,
    table, indptr, lengths, cu_seqlens, places, k_start, k_page, k_token,
    tokens, batch, seqlen_q, group, hdim, hdim_v, pages, page_size, page_shift,
    page_factor, width, splits, cp_world_size, window_left, window_right,
    softmax_scale, logits_soft_cap, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    ROPE: gl.constexpr, FLAGS: gl.constexpr, KIND: gl.constexpr,
    NATIVE: gl.constexpr, PARTIAL: gl.constexpr, CHEAP_CAST: gl.constexpr,
    SHARES: gl.constexpr, CDNA: gl.constexpr,
):
  """As mla/attend.py's.

  Grid: as attend_mfma's.
  """
  gl.static_assert(gl.num_warps() == WAVES and TILE_M == SIDE * WAVES)
  gl.static_assert(TILE_N == KEYS and HEAD == 4 * PART)
  gl.static_assert(SHARES == 1)
  dtype: gl.constexpr = q.dtype.element_ty
  # Of both products.
  S: gl.constexpr = _matrix(CDNA)
  ROW: gl.constexpr = gl.SliceLayout(0, S)
  KEY: gl.constexpr = gl.SliceLayout(1, S)
  SUMS: gl.constexpr = _sums()
  EACH: gl.constexpr = attend_mfma.loaded_at_once(KIND)
  WIDE: gl.constexpr = _copied(PART // EACH)
  NARROW: gl.constexpr = _copied(ROPE // EACH)
  near = gl.allocate_shared_memory(dtype, [2 * KEYS, PART],
                                   _padded(2 * KEYS, PART))
  far = gl.allocate_shared_memory(dtype, [2 * KEYS, PART],
                                  _padded(2 * KEYS, PART))
  ropes = gl.allocate_shared_memory(dtype, [KEYS, ROPE], _padded(KEYS, ROPE))
  hidden = gl.allocate_shared_memory(
      gl.float32, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))

  if not PARTIAL:
    hdim = HEAD + ROPE
    hdim_v = HEAD
  PAIRS: gl.constexpr = _padded(2 * KEYS, PART, 2)
  new_near = attend_mfma.as_put(near, PAIRS, KIND)
  new_far = attend_mfma.as_put(far, PAIRS, KIND)
  new_ropes = attend_mfma.as_put(ropes, _padded(KEYS, ROPE, 2), KIND)
  cols = attend_mfma.loaded_of(hdim_v, KIND)
  cols_rope = attend_mfma.loaded_of(hdim - hdim_v, KIND)
  data, k_page, k_token = attend_mfma.cache_of(
      k_cache, k_bytes, k_start, k_page, k_token, KIND)
  # What differs from one device's keys to another's is found key by key.
  right_edge = window_right
  left_edge = window_left
  if cp_world_size > 1:
    right_edge = 1 << 30
    left_edge = 1 << 30
  lengths = attend.Lengths(lengths, indptr, page_size)
  paging = attend.Paging(page_size, page_shift, page_factor)
  seqs = (cu_seqlens, lengths, batch, tokens, seqlen_q, group, left_edge,
          right_edge, flags)
  block = gl.program_id(0)
  # Asked for now and used later, so that nothing waits for them.
  UNIT: gl.constexpr = attend_mfma.unit_of(KIND, NATIVE)
  of_keys = gl.load(k_scale) * UNIT
  of_values = gl.load(v_scale) * UNIT
  at, end, share, tile = attend_mfma.find_work(
      block, seqs, splits, TILE_M, TILE_N, FLAGS)
  scale = softmax_scale * of_keys * scores.LOG2E
  while at < end:
    index, start, len_q, row0, _, _ = tile
    first_page, offset, stop, first_tile, last_tile, split, of_parts = (
        attend_mfma.find_part(
            block, at, end, share, tile, seqs,
            (indptr, width, pages, page_size), splits, TILE_M, TILE_N, FLAGS))
    left = len_q * group - row0
    first_row = start.to(gl.int64) * group + row0
    attend_mfma.tell_parts(parts_lse, start * group + row0, left, split, splits,
                           of_parts, tokens * group, TILE_M)
    part = split.to(gl.int64) * tokens * group + first_row
    begin = 0
    if cp_world_size > 1:
      begin = gl.load(places + index, mask=index < batch, other=0)

    r = gl.arange(0, TILE_M, ROW)
    # Which keys a row sees, and which all of them do: from the last query's
    # first one to the first query's last one.
    live = r < left
    query = (row0 + gl.where(live, r, 0)) // group
    head = (row0 + gl.where(live, r, 0)) % group
    position = _position(query, offset, begin, cp_world_size)
    high = (position + window_right)[None, :]
    low = (position - window_left)[None, :]
    all_high = _position(row0 // group, offset, begin, cp_world_size)
    all_low = _position((row0 + gl.minimum(TILE_M, left) - 1) // group, offset,
                        begin, cp_world_size)
    bounded = (flags & attend.WINDOW) != 0
    all_high = gl.where(bounded, all_high + window_right, 1 << 30)
    all_low = gl.where(bounded, all_low - window_left, 0)

    # A sink is a key without a value: it opens m and l of the first part.
    m = gl.full([TILE_M], float("-inf"), gl.float32, ROW)
    if (flags & attend.SINK) != 0:
      sink = gl.load(sinks + head, mask=live, other=float("-inf"))
      m = gl.where((split == 0) & (index < batch), sink * scores.LOG2E, m)
    # Of each of four lanes; they add theirs up at the end.
    opened = gl.where(m == float("-inf"), 0.0, 0.25)
    l = gl.zeros([4, TILE_M], gl.float32, SUMS) + gl.convert_layout(
        opened, gl.SliceLayout(0, SUMS))[None, :]
    a0 = gl.zeros([PART, TILE_M], gl.float32, S)
    a1 = gl.zeros_like(a0)
    a2 = gl.zeros_like(a0)
    a3 = gl.zeros_like(a0)
    if first_tile < last_tile:
      # Of keys behind the part's last tile nothing is loaded.
      stop = gl.minimum(stop, last_tile * KEYS)
      cache = data, pages, paging, k_page, k_token, stop
      pages_of = table + first_page, paging, stop
      misses = pages_mfma.misses(
          (table + first_page, pages, paging), first_tile * KEYS, stop, LOOKS,
          FLAGS)
      n = first_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, WIDE))
      page = _pages(pages_of, n, FLAGS)
      # A page is looked up a tile ahead. What it says is asked when it is
      # there; loads come in order, so that it is loaded before the columns.
      following = _pages(pages_of, n + KEYS, FLAGS)
      # The queries, as the right operand.
      QUERIES: gl.constexpr = gl.DotOperandLayout(1, S, 8)
      q_row = gl.arange(0, TILE_M, gl.SliceLayout(0, QUERIES))[None, :]
      q_at = q + (first_row + q_row) * hdim
      q0, q1, q2, q3 = _queries(q_at, q_row < left, hdim_v, QUERIES, PARTIAL)
      q_rope = attend_mfma.queries(q_at, q_row < left, hdim_v, hdim - hdim_v,
                                   ROPE, QUERIES, PARTIAL)

      place = _place(cache, page, n, FLAGS)
      k_near = _load_near(place, cols, cols_rope, PART // EACH, ROPE // EACH,
                          WIDE, NARROW, PARTIAL)
      k_far = _load_far(place, cols, PART // EACH, WIDE, PARTIAL)
      if misses:
        k_near = _without(k_near, page, pages)
        k_far = _without(k_far, page, pages)
      _put(new_near, k_near, dtype, KIND, NATIVE, CDNA)
      new_ropes.store(
          attend_mfma.as_numbers(k_near[2], dtype, KIND, NATIVE, CDNA))
      hidden.store(_hidden(cache, page, n))
      _put(new_far, k_far, dtype, KIND, NATIVE, CDNA)
      n += KEYS
      page = following
      following = _pages(pages_of, n + KEYS, FLAGS)
      place = _place(cache, page, n, FLAGS)
      sched_barrier()
      k_near = _load_near(place, cols, cols_rope, PART // EACH, ROPE // EACH,
                          WIDE, NARROW, PARTIAL)
      k_far = _load_far(place, cols, PART // EACH, WIDE, PARTIAL)
      for step in range(first_tile, last_tile):
        # The scheduler finds a place for each instruction between two barriers.
        s = gl.zeros([KEYS, TILE_M], gl.float32, S)
        k_rope = ropes.load(gl.DotOperandLayout(0, S, 8))
        k0 = _keys(near, 0, S)
        sched_barrier()
        k1 = _keys(near, 1, S)
        s = mfma(k_rope, q_rope, s)
        s = mfma(k0, q0, s)
        sched_barrier()
        k2 = _keys(far, 0, S)
        s = mfma(k1, q1, s)
        sched_barrier()
        k3 = _keys(far, 1, S)
        shut = hidden.load(KEY)[:, None]
        s = mfma(k2, q2, s)
        sched_barrier()
        v0 = _values(near, 0, S)
        s = mfma(k3, q3, s)
        sched_barrier()
        if misses:
          # Else it would be done for every tile, and chosen from.
          sched_barrier()
          k_near = _without(k_near, page, pages)
          k_far = _without(k_far, page, pages)
        s *= scale
        if attend.SOFT_CAP & FLAGS:
          if (flags & attend.SOFT_CAP) != 0:
            s = attend_mfma.soft_cap(s, logits_soft_cap)
        s += shut
        if (step * KEYS < all_low) | (step * KEYS + (KEYS - 1) > all_high):
          key = step * KEYS + gl.arange(0, KEYS, KEY)[:, None]
          s = gl.where((key <= high) & (key >= low), s, float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 0))
        # A row that has seen no key yet: anything finite keeps the NaN away.
        m_exp = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s - m_exp[None, :])
        alpha = gl.exp2(m - m_exp)
        m = m_new
        own = gl.sum(gl.sum(p.reshape([KEYS // SIDE, 4, 4, TILE_M]), 2), 0)
        l = l * gl.convert_layout(alpha, gl.SliceLayout(0, SUMS))[None, :]
        l += gl.convert_layout(own, SUMS)
        p = gl.convert_layout(_cast(p, dtype, CHEAP_CAST),
                              gl.DotOperandLayout(1, S, 4))
        fade = alpha[None, :]
        v1 = _values(near, 1, S)
        v0 = _operand(v0, S)
        a0 *= fade
        sched_barrier()
        a0 = mfma(v0, p, a0)
        _put(new_near, k_near, dtype, KIND, NATIVE, CDNA)
        new_ropes.store(
            attend_mfma.as_numbers(k_near[2], dtype, KIND, NATIVE, CDNA))
        hidden.store(_hidden(cache, page, n))
        n += KEYS
        place = _place(cache, following, n, FLAGS)
        page = following
        following = _pages(pages_of, n + KEYS, FLAGS)
        sched_barrier()
        k_near = _load_near(place, cols, cols_rope, PART // EACH, ROPE // EACH,
                          WIDE, NARROW, PARTIAL)
        v2 = _values(far, 0, S)
        v1 = _operand(v1, S)
        a1 *= fade
        sched_barrier()
        a1 = mfma(v1, p, a1)
        v3 = _values(far, 1, S)
        v2 = _operand(v2, S)
        a2 *= fade
        sched_barrier()
        a2 = mfma(v2, p, a2)
        v3 = _operand(v3, S)
        a3 *= fade
        sched_barrier()
        _put(new_far, k_far, dtype, KIND, NATIVE, CDNA)
        k_far = _load_far(place, cols, PART // EACH, WIDE, PARTIAL)
        a3 = mfma(v3, p, a3)

    l = gl.convert_layout(gl.sum(l, 0), ROW)
    any_key = l != 0.0
    l_safe = gl.where(any_key, l, 1.0)
    factor = (of_values / l_safe)[None, :]
    row_lse = gl.where(any_key, m * scores.LN2 + gl.log(l_safe), float("-inf"))
    acc = a0, a1, a2, a3
    if of_parts > 1:
      gl.store(parts_lse + part + r, row_lse, mask=live)
      for i in gl.static_range(4):
        _store(parts + part * hdim_v, _columns(acc[i] * factor, S), left,
               hdim_v, i, PARTIAL)
    else:
      if (flags & attend.LSE) != 0:
        gl.store(lse + head.to(gl.int64) * tokens + start + query, row_lse,
                 mask=live)
      for i in gl.static_range(4):
        _store(out + first_row * hdim_v,
               _columns((acc[i] * factor).to(dtype), S), left, hdim_v, i,
               PARTIAL)
    at, tile = attend_mfma.next_work(at, end, seqs, tile, TILE_M, TILE_N, FLAGS)
