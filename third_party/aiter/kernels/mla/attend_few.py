# SPDX-License-Identifier: Apache-2.0
"""attend_mfma.py's latent attention of up to 16 rows, in Gluon.

Waves divide the columns, of scores as of the output: each multiplies a quarter
of the queries' columns by the keys', and their sums, by way of LDS, are the
scores. So a key is read from LDS once for scores and once as a value, and a
wave has a quarter of the queries in registers. It is for caches of bytes, which
memory brings sooner than four waves that all compute the scores are ready.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import mfma

from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.mla import attend_mfma
from third_party.aiter.kernels.paged import attend

# Waves, and parts of the columns.
WAVES = gl.constexpr(4)


@gluon.constexpr_function
def _matrix(cdna, depth):
  """A product of each wave."""
  return gl.amd.AMDMFMALayout(
      version=cdna, instr_shape=[16, 16, min(16 * (cdna - 2), depth)],
      transposed=False, warps_per_cta=[WAVES.value, 1, 1])


@gluon.constexpr_function
def _padded(keys, columns, each=1):
  """Parts of keys in LDS; attend_mfma.py says why so. each: how many of 16 bits
  are one number."""
  columns //= each
  return gl.PaddedSharedLayout.with_identity_for(
      [[columns, 16 // each], [4 * columns, 32 // each]],
      [WAVES.value, keys, columns], [2, 1, 0])


@gluon.constexpr_function
def _added(keys, rows):
  """[waves, keys, rows], of which a lane has all waves' numbers of what it has
  of a product; all waves have the same."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1, 0], [0, 2, 0], *([0, k, 0] for k in (16,) if k < keys),
                 [1, 0, 0], [2, 0, 0]],
      lane_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 4, 0],
                  [0, 8, 0]],
      warp_bases=[[0, 0, 0], [0, 0, 0]], block_bases=[],
      shape=[WAVES.value, keys, rows])


@gluon.jit
def _put(smem, x, dtype: gl.constexpr, KIND: gl.constexpr,
         NATIVE: gl.constexpr, CDNA: gl.constexpr):
  """Stores columns of keys in parts."""
  x = attend_mfma.as_numbers(x, dtype, KIND, NATIVE, CDNA)
  x = x.reshape([smem.shape[1], WAVES, smem.shape[2]])
  smem.store(x.permute(1, 0, 2))


@gluon.jit
def _places(COLS: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
  """(column, row) of [waves, COLS, ROWS]."""
  part = gl.arange(0, WAVES, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
  col = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
  row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
  return (part[:, None, None] * COLS + col[None, :, None],
          row[None, None, :])


@gluon.jit
def _queries(q, hdim, left, first, count, COLS: gl.constexpr,
             ROWS: gl.constexpr, LAYOUT: gl.constexpr, PARTIAL: gl.constexpr):
  """Columns of rows from `first` on in parts, 0 behind `count` of them."""
  col, row = _places(COLS, ROWS, LAYOUT)
  there = row < left
  if PARTIAL:
    there = there & (col < count)
  return gl.load(q + (row * hdim + (first + col)), mask=there, other=0.0)


@gluon.jit
def _store(out, x, left, hdim_v, PARTIAL: gl.constexpr):
  """Stores rows of hdim_v columns."""
  col, row = _places(x.shape[1], x.shape[2], x.type.layout)
  there = row < left
  if PARTIAL:
    there = there & (col < hdim_v)
  gl.store(out + (row * hdim_v + col), x, mask=there)


@gluon.jit
def mla_attend(
    q, k_cache, k_bytes, out, lse, parts, parts_lse, k_scale, v_scale, sinks,
    table, indptr, lengths, cu_seqlens, places, k_start, k_page, k_token,
    tokens, batch, seqlen_q, group, hdim, hdim_v, pages, page_size, page_shift,
    page_factor, width, splits, cp_world_size, window_left, window_right,
    softmax_scale, logits_soft_cap, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    ROPE: gl.constexpr, FLAGS: gl.constexpr, KIND: gl.constexpr,
    NATIVE: gl.constexpr, PARTIAL: gl.constexpr, SHARES: gl.constexpr,
    CDNA: gl.constexpr,
):
  """As mla/attend.py's.

  Grid: as attend_mfma's.
  """
  gl.static_assert(gl.num_warps() == WAVES and TILE_M == attend_mfma.SIDE)
  gl.static_assert(SHARES == 1)
  dtype: gl.constexpr = q.dtype.element_ty
  PART: gl.constexpr = HEAD // WAVES
  OF_ROPE: gl.constexpr = ROPE // WAVES
  S: gl.constexpr = _matrix(CDNA, PART)
  R: gl.constexpr = _matrix(CDNA, OF_ROPE)
  O: gl.constexpr = _matrix(CDNA, TILE_N)
  ADDED: gl.constexpr = _added(TILE_N, TILE_M)
  SCORES: gl.constexpr = gl.SliceLayout(0, S)
  ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
  KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
  OF_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, O))
  P_WIDTH: gl.constexpr = O.instr_shape[2] // 4
  R_WIDTH: gl.constexpr = R.instr_shape[2] // 4
  EACH: gl.constexpr = attend_mfma.loaded_at_once(KIND)
  WIDE: gl.constexpr = attend_mfma.copied(WAVES, HEAD, EACH, 16)
  NARROW: gl.constexpr = attend_mfma.copied(WAVES, ROPE, EACH, 16)
  ONE_KEY: gl.constexpr = gl.SliceLayout(1, WIDE)
  keys = gl.allocate_shared_memory(dtype, [WAVES, TILE_N, PART],
                                   _padded(TILE_N, PART))
  TOGETHER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
  ropes = gl.allocate_shared_memory(dtype, [WAVES, TILE_N, OF_ROPE], TOGETHER)
  # What lanes write at once is in banks of its own.
  sums = gl.allocate_shared_memory(
      gl.float32, [WAVES, TILE_N, TILE_M],
      gl.PaddedSharedLayout.with_identity_for(
          [[TILE_N, 4]], [WAVES, TILE_N, TILE_M], [1, 2, 0]))
  which = gl.allocate_shared_memory(
      gl.int32, [TILE_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
  if not PARTIAL:
    hdim = HEAD + ROPE
    hdim_v = HEAD
  hdim_rope = hdim - hdim_v
  new_keys = attend_mfma.as_put(keys, _padded(TILE_N, PART, 2), KIND)
  new_ropes = attend_mfma.as_put(ropes, TOGETHER, KIND)
  cols = attend_mfma.loaded_of(hdim_v, KIND)
  cols_rope = attend_mfma.loaded_of(hdim_rope, KIND)
  data, k_page, k_token = attend_mfma.cache_of(
      k_cache, k_bytes, k_start, k_page, k_token, KIND)
  # Asked for now and used later, so that nothing waits for them.
  UNIT: gl.constexpr = attend_mfma.unit_of(KIND, NATIVE)
  of_keys = gl.load(k_scale) * UNIT
  of_values = gl.load(v_scale) * UNIT
  # What differs from one device's keys to another's is found key by key.
  right_edge = window_right
  left_edge = window_left
  if cp_world_size > 1:
    right_edge = 1 << 30
    left_edge = 1 << 30
  lengths = attend.Lengths(lengths, indptr, page_size)
  paging = attend.Paging(page_size, page_shift, page_factor)
  block = gl.program_id(0)
  seqs = (cu_seqlens, lengths, batch, tokens, seqlen_q, group, left_edge,
          right_edge, flags)
  at, end, share, tile = attend_mfma.find_work(
      block, seqs, splits, TILE_M, TILE_N, FLAGS)
  scale = softmax_scale * of_keys * scores.LOG2E
  while at < end:
    index, start, len_q, row0, _, _ = tile
    first_page, offset, stop, first_tile, last_tile, split, of_parts = (
        attend_mfma.find_part(
            block, at, end, share, tile, seqs,
            (indptr, width, pages, page_size), splits, TILE_M, TILE_N, FLAGS))
    begin = 0
    if cp_world_size > 1:
      begin = gl.load(places + index, mask=index < batch, other=0)
    left = len_q * group - row0
    attend_mfma.tell_parts(parts_lse, start * group + row0, left, split, splits,
                           of_parts, tokens * group, TILE_M)
    first_row = start.to(gl.int64) * group + row0
    part = split.to(gl.int64) * tokens * group + first_row
    # The queries, as the right operand.
    q_at = q + first_row * hdim
    q_tile = _queries(q_at, hdim, left, 0, hdim_v, PART, TILE_M,
                      gl.DotOperandLayout(1, S, 8), PARTIAL)
    q_rope = _queries(q_at, hdim, left, hdim_v, hdim_rope, OF_ROPE, TILE_M,
                      gl.DotOperandLayout(1, R, R_WIDTH), PARTIAL)
    live, query, head, low, high = attend_mfma.rows_of(
        row0, left, offset, begin, group, cp_world_size, window_left,
        window_right, flags, TILE_M, ROW)
    m, l = attend_mfma.opened(sinks, head, live, (split == 0) & (index < batch),
                              flags)
    acc = gl.zeros([WAVES, PART, TILE_M], gl.float32, O)
    # Of keys behind the part's last tile nothing is loaded.
    last_tile = gl.maximum(last_tile, first_tile + 1)
    stop = gl.minimum(stop, last_tile * TILE_N)
    n = first_tile * TILE_N + gl.arange(0, TILE_N, ONE_KEY)
    first = table + first_page
    page = attend_mfma.page_of(first, n, paging, stop, FLAGS)
    place = attend_mfma.place_of(data, page, n, pages, paging, k_page, k_token,
                                 FLAGS)
    k_next = attend_mfma.load(place, 0, cols, HEAD // EACH, WIDE, PARTIAL)
    r_next = attend_mfma.load(place, cols, cols_rope, ROPE // EACH, NARROW,
                              PARTIAL)
    n_next = attend_mfma.present(page, n, pages)
    # A page is looked up a tile ahead. What it says is asked when it is there.
    page = attend_mfma.page_of(first, n + TILE_N, paging, stop, FLAGS)
    for _ in range(first_tile, last_tile):
      _put(new_keys, k_next, dtype, KIND, NATIVE, CDNA)
      _put(new_ropes, r_next, dtype, KIND, NATIVE, CDNA)
      which.store(n_next)
      n += TILE_N
      place = attend_mfma.place_of(data, page, n, pages, paging, k_page,
                                   k_token, FLAGS)
      k_next = attend_mfma.load(place, 0, cols, HEAD // EACH, WIDE, PARTIAL)
      r_next = attend_mfma.load(place, cols, cols_rope, ROPE // EACH, NARROW,
                                PARTIAL)
      n_next = attend_mfma.present(page, n, pages)
      page = attend_mfma.page_of(first, n + TILE_N, paging, stop, FLAGS)

      s = gl.zeros([WAVES, TILE_N, TILE_M], gl.float32, R)
      s = mfma(ropes.load(gl.DotOperandLayout(0, R, R_WIDTH)), q_rope, s)
      s = gl.convert_layout(s, S)
      s = mfma(keys.load(gl.DotOperandLayout(0, S, 8)), q_tile, s)
      v = keys.permute([0, 2, 1]).load(gl.DotOperandLayout(0, O, P_WIDTH))
      key = which.load(KEY)[:, None]
      sums.store(s)
      s = gl.convert_layout(gl.sum(sums.load(ADDED), 0), SCORES) * scale
      if attend.SOFT_CAP & FLAGS:
        if (flags & attend.SOFT_CAP) != 0:
          s = attend_mfma.soft_cap(s, logits_soft_cap)
      p, alpha, m, l = attend_mfma.weighed(s, key, low, high, m, l)
      acc *= gl.convert_layout(alpha, OF_ROW)[None, None, :]
      p = gl.expand_dims(p.to(dtype), 0).broadcast_to([WAVES, TILE_N, TILE_M])
      p = gl.convert_layout(p, gl.DotOperandLayout(1, O, P_WIDTH))
      acc = mfma(v, p, acc)

    factor, row_lse = attend_mfma.ended(m, l, of_values)
    acc *= gl.convert_layout(factor, OF_ROW)[None, None, :]
    if of_parts > 1:
      gl.store(parts_lse + part + gl.arange(0, TILE_M, ROW), row_lse, mask=live)
      _store(parts + part * hdim_v, acc, left, hdim_v, PARTIAL)
    else:
      if (flags & attend.LSE) != 0:
        gl.store(lse + head.to(gl.int64) * tokens + start + query, row_lse,
                 mask=live)
      _store(out + first_row * hdim_v, acc.to(dtype), left, hdim_v, PARTIAL)
    at, tile = attend_mfma.next_work(at, end, seqs, tile, TILE_M, TILE_N, FLAGS)
