# SPDX-License-Identifier: Apache-2.0
"""Many queries over paged caches, for CDNA's matrix units, in Gluon.

gfx950 walks over what prefill_copied.py is for in that file's way. The way here
is mha/fwd_mfma.py's by registers: scores are [keys, rows] and the output
[columns, rows], so that a lane's weights are its operand of the second product.
A wave computes all of a tile's scores of its 32 rows. The next tile's keys and
values are on their way in registers, and the pages of the one behind it. Keys
lie in LDS in parts of 32 columns, values as columns of 4 keys; what is of 8
bits is converted on its way there, and scales of tokens lie beside it.

A lane loads columns of a run of 4 keys, or a column of 8 of a shuffled cache,
with one look at their page; where BOX, which divides pages, has no such runs,
with one a key. Keys that are not there are hidden, and their values zeros, only
where an entry of the table says that there are such, or in the last tile.

Of aligned queries and caches.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import mfma
from triton.experimental.gluon.language.amd.hint import sched_barrier

from third_party.aiter.kernels.mha import parts_mfma, scores
from third_party.aiter.kernels.paged import attend, pages_mfma, prefill_copied

PART = parts_mfma.PART
# What prefill_copied.py leaves to this file.
_NOT_COPIED = gl.constexpr(
    attend.SHUFFLED.value | attend.TOKEN_SCALES.value | attend.SOFT_CAP.value
    | attend.ALIBI.value | attend.PARTIAL.value)


@gluon.constexpr_function
def _turned(keys, columns):
  """How four waves copy values: a lane some columns of 4 neighbouring keys."""
  own = columns // 16
  return gl.DistributedLinearLayout(
      reg_bases=[*([0, 0, 1 << i] for i in range(own.bit_length() - 1)),
                 [0, 1, 0], [0, 2, 0]],
      lane_bases=[*([1 << i, 0, 0] for i in range(4)), [0, 0, own],
                  [0, 0, 2 * own]],
      warp_bases=[[0, 0, 4 * own], [0, 0, 8 * own]], block_bases=[],
      shape=[keys // 4, 4, columns])


@gluon.jit
def _there(pages_of, first, stop, KEY: gl.constexpr, FLAGS: gl.constexpr):
  """Which of 64 keys are in a page. All waves look them up: a lane a key."""
  lanes = gl.arange(0, 64, gl.BlockedLayout([1], [64], [4], [0]))
  page = pages_mfma.pages_at(pages_of, first + lanes, stop, FLAGS)
  bits = gl.where(page >= 0, gl.full_like(lanes, 1) << (lanes & 31), 0)
  near = pages_mfma.one(gl.sum(gl.where(lanes < 32, bits, 0), 0))
  far = pages_mfma.one(gl.sum(gl.where(lanes < 32, 0, bits), 0))
  # Of a key's bits, lanes differ in one alone.
  key = gl.arange(0, 64, KEY)
  bits = gl.where(key < 32, near, far) >> (key & 4)
  return ((bits >> (key & 27)) & 1) != 0


@gluon.jit
def _load_keys(side, page, n, stop, cols, FLAGS: gl.constexpr):
  """Parts of a tile of keys."""
  x = ()
  for i in gl.static_range(len(cols)):
    x = x + (pages_mfma.load(side, page, n, stop, cols[i], FLAGS),)
  return x


@gluon.jit
def _store_keys(smem, x, kind, dtype: gl.constexpr, KIND: gl.constexpr,
                NATIVE: gl.constexpr):
  N: gl.constexpr = x[0].shape[0]
  for i in gl.static_range(len(x)):
    smem.slice(i * N, N).store(
        pages_mfma.numbers(x[i], kind, dtype, KIND, NATIVE))


@gluon.jit
def _load_values(side, page, n, stop, cols, FLAGS: gl.constexpr):
  """Values of keys from n on: [runs, of so many, columns]."""
  if attend.SHUFFLED & FLAGS:
    return pages_mfma.load_runs(side, page, n, stop, cols, FLAGS)
  else:
    data, page_stride, token_stride, paging = side
    CHUNK: gl.constexpr = 128 // data.dtype.element_ty.primitive_bitwidth
    last = stop - 1
    if len(n.shape) == 1:
      last &= -4  # Of a run that is in one page.
    _, place = pages_mfma.place_in(paging, gl.minimum(n, last), FLAGS)
    at = (gl.maximum(page, 0).to(gl.int64) * page_stride
          + gl.multiple_of(place * token_stride, [CHUNK] * len(n.shape)))
    if len(n.shape) == 1:
      at = gl.expand_dims(at, 1)
      j = gl.arange(0, 4, gl.SliceLayout(0, at.type.layout))
      at = at + gl.multiple_of(j * token_stride, CHUNK)[None, :]
    at = gl.expand_dims(at, 2)
    return gl.load(data + (at + gl.expand_dims(gl.expand_dims(cols, 0), 1)))


@gluon.jit
def _are_there(page, n, stop, RUN: gl.constexpr):
  """[runs, RUN]: whether keys, of which n are the first ones or all, are."""
  if len(n.shape) == 1:
    n = gl.expand_dims(n, 1)
    page = gl.expand_dims(page, 1)
    n = n + gl.arange(0, RUN, gl.SliceLayout(0, n.type.layout))[None, :]
  return (page >= 0) & (n < stop)


@gluon.jit
def _store_values(smem, v, page, n, stop, misses, end, kind,
                  dtype: gl.constexpr, KIND: gl.constexpr,
                  NATIVE: gl.constexpr):
  """Columns of keys; 0 of those that are not there."""
  v = pages_mfma.numbers(v, kind, dtype, KIND, NATIVE)
  if misses | (end > stop):
    # What came instead may be NaN, or infinite.
    there = gl.expand_dims(_are_there(page, n, stop, v.shape[1]), 2)
    v = gl.where(there, v, gl.zeros_like(v))
  v = v.reshape([smem.shape[1], smem.shape[0]])
  smem.store(v.permute([1, 0]))


@gluon.jit
def _store_scales(smem, both, page):
  """Scales of a tile's keys and values; 0 of those in no page."""
  for i in gl.static_range(len(both)):
    smem.index(i).store(gl.where(page >= 0, both[i], 0.0))


@gluon.jit
def _sums_of(x, S: gl.constexpr):
  """Of [2, 4, rows], the sums of rows."""
  return gl.convert_layout(gl.sum(gl.sum(x, 1), 0), gl.SliceLayout(0, S))


@gluon.jit
def _attend_loaded(
    sums, q, k_side, v_side, scale_sides, pages_of, first_tile, last_tile, stop,
    seen, all_see, marks, scale, hdim, hdim_v, k_run, v_col, kind, flags,
    dtype: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    HEAD: gl.constexpr, FLAGS: gl.constexpr, KIND: gl.constexpr,
    NATIVE: gl.constexpr, CHEAP_CAST: gl.constexpr, BOX: gl.constexpr,
    S: gl.constexpr
):
  """m, l and acc of all tiles, by way of registers to LDS.

  q: arguments of pages_mfma.queries, but for S. seen: the first and the last
  key that each row sees; all_see: that all do.
  """
  m, l, acc = sums
  low, high = seen
  all_low, all_high = all_see
  WAVES: gl.constexpr = gl.num_warps()
  SHUFFLED: gl.constexpr = attend.SHUFFLED & FLAGS
  OF_TOKENS: gl.constexpr = attend.TOKEN_SCALES & FLAGS
  PARTS: gl.constexpr = HEAD // PART
  KEY: gl.constexpr = gl.SliceLayout(1, S)
  q_tile = pages_mfma.queries(q[0], q[1], S)
  misses = pages_mfma.misses(pages_of, first_tile * TILE_N, stop,
                             pages_mfma.LOOKS, FLAGS)
  CHUNK: gl.constexpr = 8 if KIND == attend.NO_BYTES else 16
  K: gl.constexpr = parts_mfma.copied(TILE_N, (1, 2, 4, 8), (16, 32))
  k_cols = ()
  for i in gl.static_range(PARTS):
    k_cols = k_cols + (pages_mfma.columns(
        i * PART + gl.arange(0, PART, gl.SliceLayout(0, K)), hdim, k_run,
        None, CHUNK, FLAGS),)
  if SHUFFLED:
    RUN: gl.constexpr = pages_mfma.RUN
    V: gl.constexpr = gl.BlockedLayout(
        [1, RUN, 1], [1, 1, 64], [WAVES, 1, 1], [1, 2, 0])
  else:
    RUN: gl.constexpr = 4
    V: gl.constexpr = _turned(TILE_N, HEAD)
  v_cols = pages_mfma.columns(
      gl.arange(0, HEAD, gl.SliceLayout(0, gl.SliceLayout(1, V))), hdim_v,
      None, v_col, CHUNK, FLAGS)
  n = RUN * gl.arange(0, TILE_N // RUN,
                      gl.SliceLayout(1, gl.SliceLayout(2, V)))
  if BOX % RUN != 0:
    # Each key has a page of its own.
    n = n[:, None] + gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(
        2, V)))[None, :]
  n_k = gl.arange(0, TILE_N, gl.SliceLayout(1, K))
  KEYS: gl.constexpr = gl.DotOperandLayout(0, S, 8)
  VALUES: gl.constexpr = gl.DotOperandLayout(0, S, 4)
  keys = gl.allocate_shared_memory(
      dtype, [PARTS * TILE_N, PART], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
  # Columns of 4 keys in 8 bytes.
  values = gl.allocate_shared_memory(
      dtype, [HEAD, TILE_N], gl.SwizzledSharedLayout(4, 1, 16, [1, 0]))
  scales = ()
  if OF_TOKENS:
    scales = gl.allocate_shared_memory(
        gl.float32, [2, TILE_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
  now = first_tile * TILE_N
  page_k = pages_mfma.pages_at(pages_of, n_k + now, stop, FLAGS)
  page = pages_mfma.pages_at(pages_of, n + now, stop, FLAGS)
  next_k = pages_mfma.pages_at(pages_of, n_k + (now + TILE_N), stop, FLAGS)
  following = pages_mfma.pages_at(pages_of, n + (now + TILE_N), stop, FLAGS)
  _store_keys(keys, _load_keys(k_side, page_k, n_k + now, stop, k_cols,
                               FLAGS), kind, dtype, KIND, NATIVE)
  _store_scales(scales, pages_mfma.load_both(
      scale_sides, page_k, n_k + now, stop, None, FLAGS), page_k)
  v = _load_values(v_side, page, n + now, stop, v_cols, FLAGS)
  _store_values(values, v, page, n + now, stop, misses, now + TILE_N, kind,
                dtype, KIND, NATIVE)
  for t in range(first_tile, last_tile):
    now = t * TILE_N
    then = now + TILE_N
    k_next = _load_keys(k_side, next_k, n_k + then, stop, k_cols, FLAGS)
    s = gl.zeros([TILE_N, TILE_M], gl.float32, S)
    k_part = keys.slice(0, TILE_N).load(KEYS)
    for i in gl.static_range(PARTS):
      k_after = k_part
      if i < PARTS - 1:
        k_after = keys.slice((i + 1) * TILE_N, TILE_N).load(KEYS)
      s = mfma(k_part, q_tile[i], s)
      k_part = k_after
    sched_barrier()
    _store_keys(keys, k_next, kind, dtype, KIND, NATIVE)
    page = following
    page_k = next_k
    both = pages_mfma.load_both(scale_sides, page_k, n_k + then, stop, None,
                                FLAGS)
    v_next = _load_values(v_side, page, n + then, stop, v_cols, FLAGS)
    key = now + gl.arange(0, TILE_N, KEY)
    if OF_TOKENS:
      s = s * scales.index(0).load(KEY)[:, None]
    factor = scale
    if (attend.SOFT_CAP | attend.ALIBI | attend.TOKEN_SCALES) & FLAGS:
      s = pages_mfma.changed(s * scale, key, marks, flags,
                             FLAGS & (attend.SOFT_CAP | attend.ALIBI))
      factor = 1.0
    if (now < all_low) | (then > all_high + 1):
      shown = (key[:, None] <= high[None, :]) & (key[:, None] >= low[None, :])
      s = gl.where(shown, s, float("-inf"))
    if misses:
      there = _there(pages_of, now, stop, KEY, FLAGS)
      s = gl.where(there[:, None], s, float("-inf"))
    most = s
    if OF_TOKENS:
      of_values = scales.index(1).load(KEY)[:, None]
      if dtype == gl.float16:
        # It holds a weight with its scale, if the largest such is 1.
        most = most + gl.log2(gl.maximum(gl.abs(of_values),
                                         attend.LEAST_SCALE))
    m, alpha = parts_mfma.largest(most, m, factor)
    p = gl.exp2(parts_mfma.exponents(s, m, factor))
    l = parts_mfma.faded(l, alpha) + parts_mfma.own(p)
    if OF_TOKENS:
      p = p * of_values
    p = parts_mfma.operand(p, dtype, CHEAP_CAST)
    fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
    next_k = pages_mfma.pages_at(pages_of, n_k + (then + TILE_N), stop, FLAGS)
    following = pages_mfma.pages_at(pages_of, n + (then + TILE_N), stop,
                                    FLAGS)
    added = ()
    v_part = values.slice(0, PART).load(VALUES)
    for i in gl.static_range(PARTS):
      v_after = v_part
      if i < PARTS - 1:
        v_after = values.slice((i + 1) * PART, PART).load(VALUES)
      added = added + (mfma(v_part, p, acc[i] * fade),)
      v_part = v_after
    acc = added
    sched_barrier()
    _store_values(values, v_next, page, n + then, stop, misses,
                  then + TILE_N, kind, dtype, KIND, NATIVE)
    _store_scales(scales, both, page_k)
  return m, l, acc


@gluon.jit
def paged_attend(
    q, k_cache, v_cache, k_bytes, v_bytes, out, lse, parts, parts_lse,
    k_scale, v_scale, sinks, slopes, table, indptr, lengths, cu_seqlens,
    k_start, k_page, k_head, k_run_token, k_run, k_scale_page, k_scale_head,
    k_scale_token, v_start, v_page, v_head, v_split, v_run_token, v_col,
    v_scale_page, v_scale_head, v_scale_token,
    tokens, batch, seqlen_q, nhead_q, nhead_k, group, hdim, hdim_v, pages,
    page_size, page_shift, page_factor, width, splits, programs, window_left,
    window_right, sinks_step, slopes_step, softmax_scale, logits_soft_cap,
    kind, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    FLAGS: gl.constexpr, KIND: gl.constexpr, NATIVE: gl.constexpr,
    CHEAP_CAST: gl.constexpr, BOX: gl.constexpr, CDNA: gl.constexpr,
):
  """As attend.py's.

  Grid: (tiles of rows and KV heads, these fastest, splits).
  """
  WAVES: gl.constexpr = gl.num_warps()
  gl.static_assert(WAVES == 4 and TILE_M == PART * WAVES and TILE_N == 64)
  gl.static_assert(BOX % 8 == 0 or not attend.SHUFFLED & FLAGS)
  SHUFFLED: gl.constexpr = attend.SHUFFLED & FLAGS
  OF_TOKENS: gl.constexpr = attend.TOKEN_SCALES & FLAGS
  COPIED: gl.constexpr = (
      CDNA == 4 and HEAD == 128 and KIND == attend.NO_BYTES
      and BOX % prefill_copied.BOX == 0 and not _NOT_COPIED & FLAGS)
  PARTS: gl.constexpr = HEAD // PART
  dtype: gl.constexpr = q.dtype.element_ty
  if not attend.PARTIAL & FLAGS:
    hdim = HEAD
    hdim_v = HEAD
  lengths = attend.Lengths(lengths, indptr, page_size)
  paging = attend.Paging(page_size, page_shift, page_factor)
  head = gl.program_id(0) % nhead_k
  # Last rows first: under a causal mask they have the most to do.
  slot = gl.num_programs(0) // nhead_k - 1 - gl.program_id(0) // nhead_k
  split = gl.program_id(1)
  share = 0.0
  if splits > 1:
    lanes = gl.arange(0, attend.LANES, gl.BlockedLayout(
        [1], [64], [WAVES], [0]))
    share = programs / (nhead_k * gl.maximum(gl.sum(pages_mfma.tiles_of_batch(
        lanes, cu_seqlens, lengths, batch, seqlen_q, group, window_left,
        window_right, flags, TILE_M, TILE_N, FLAGS), 0), 1.0))
  index, start, len_q, row0 = pages_mfma.find_rows(
      slot, cu_seqlens, batch, tokens, seqlen_q, group, flags, TILE_M, FLAGS)
  left = pages_mfma.one(gl.minimum(len_q * group - row0, TILE_M))
  row0 = pages_mfma.one(row0)
  start = pages_mfma.one(start)
  if left <= 0:
    return
  first_page, _, offset, _, stop, first_tile, last_tile = pages_mfma.find_keys(
      index, row0, left, len_q, lengths, indptr, batch, width, pages, page_size,
      group, window_left, window_right, split, splits, share, flags, TILE_N,
      FLAGS)
  # Loaded by a lane, but the same for all.
  first_tile = pages_mfma.one(first_tile)
  last_tile = pages_mfma.one(last_tile)
  stop = pages_mfma.one(stop)
  offset = pages_mfma.one(offset)

  S: gl.constexpr = parts_mfma.matrix(CDNA, WAVES)
  ROW: gl.constexpr = gl.SliceLayout(0, S)
  SUMS: gl.constexpr = parts_mfma.sums(WAVES)
  r = gl.arange(0, TILE_M, ROW)
  live = r < left
  r = row0 + gl.where(live, r, 0)
  head_q = head * group + r % group
  part = split.to(gl.int64) * tokens * nhead_q
  if (split > 0) & (first_tile >= last_tile):
    at = pages_mfma.row_at(r, start, head, group, nhead_q)
    gl.store(parts_lse + part + at,
             gl.full([TILE_M], float("-inf"), gl.float32, ROW), mask=live)
    return

  # A sink is a key without a value: it opens m and l of the first part.
  m = gl.full([TILE_M], float("-inf"), gl.float32, ROW)
  if (flags & attend.SINK) != 0:
    sink = gl.load(sinks + index * sinks_step + head_q,
                   mask=live & (index < batch), other=float("-inf"))
    m = gl.where(split == 0, sink * scores.LOG2E, m)
  opened = gl.where(m == float("-inf"), 0.0, 1.0 / 8)
  l = gl.zeros([2, 4, TILE_M], gl.float32, SUMS) + gl.convert_layout(
      opened, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
  m = gl.maximum(m, parts_mfma.LOWEST)
  acc = ()
  for _ in gl.static_range(PARTS):
    acc = acc + (gl.zeros([PART, TILE_M], gl.float32, S),)
  if first_tile < last_tile:
    tile = row0, left, start, head, group, nhead_q
    q_tile = pages_mfma.load_queries(q, tile, hdim, HEAD, FLAGS)
    scale = softmax_scale * scores.LOG2E
    k_scales = k_scale + head.to(gl.int64) * k_scale_head
    v_scales = v_scale + head.to(gl.int64) * v_scale_head
    if OF_TOKENS:
      scale_sides = ((k_scales, k_scale_page, k_scale_token, paging),
                     (v_scales, v_scale_page, v_scale_token, paging))
    else:
      scale *= gl.load(k_scales)
      scale_sides = ()
    # The largest score is that of the largest product; -inf is -inf times it.
    q_data = q_tile, scale < 0
    scale = gl.abs(scale)
    scale = gl.where(scale < 1e-37, 1e-37, scale)
    k_data = k_cache if KIND == attend.NO_BYTES else k_bytes
    v_data = v_cache if KIND == attend.NO_BYTES else v_bytes
    k_data += k_start + head.to(gl.int64) * k_head
    v_data += v_start + head.to(gl.int64) * v_head
    k_side = (k_data, k_page, k_run_token, paging)
    if SHUFFLED:
      v_side = (v_data, v_page, v_split, v_run_token, paging)
    else:
      v_side = (v_data, v_page, v_run_token, paging)
    pages_of = (table + first_page, pages, paging)
    stop = gl.minimum(stop, last_tile * TILE_N)

    # Keys that a row sees, and that all rows see.
    position = r // group + offset
    high = gl.minimum(position + window_right, stop - 1)
    low = position - window_left
    all_high = gl.minimum(row0 // group + offset + window_right, stop - 1)
    all_low = (row0 + left - 1) // group + offset - window_left
    slope = gl.zeros([TILE_M], gl.float32, ROW)
    if attend.ALIBI & FLAGS:
      if (flags & attend.ALIBI) != 0:
        slope = gl.load(slopes + index * slopes_step + head_q,
                        mask=live & (index < batch), other=0.0)
    marks = (position, slope * scores.LOG2E, logits_soft_cap, window_left,
             window_right)

    if COPIED:
      full_low = gl.minimum(gl.maximum(
          (all_low + TILE_N - 1) // TILE_N, first_tile), last_tile)
      full_high = gl.minimum(gl.maximum(
          (all_high + 1) // TILE_N, full_low), last_tile)
      m, l, acc = prefill_copied.attend(
          (m, l, acc), q_data, k_side, v_side, pages_of, stop, (low, high),
          (first_tile, full_low, full_high, last_tile), scale, dtype, TILE_M,
          TILE_N, S, FLAGS)
    else:
      m, l, acc = _attend_loaded(
          (m, l, acc), q_data, k_side, v_side, scale_sides, pages_of,
          first_tile, last_tile, stop, (low, high), (all_low, all_high),
          marks, scale, hdim, hdim_v, k_run, v_col, kind, flags, dtype, TILE_M,
          TILE_N, HEAD, FLAGS, KIND, NATIVE, CHEAP_CAST, BOX, S)

  l = _sums_of(l, S)
  any_key = (l > 0) | (l != l)
  l_safe = gl.where(any_key, l, 1.0)
  row_lse = gl.where(any_key, m * scores.LN2 + gl.log(l_safe), float("-inf"))
  factor = 1.0 / l_safe
  if not OF_TOKENS:
    factor *= gl.load(v_scale + head.to(gl.int64) * v_scale_head)
  ROWS: gl.constexpr = gl.BlockedLayout(
      [1, 8], [512 // PART, PART // 8], [WAVES, 1], [1, 0])
  # Found anew: registers have no room for it beside a tile.
  row_lse = gl.convert_layout(row_lse, gl.SliceLayout(1, ROWS))
  row = gl.arange(0, TILE_M, gl.SliceLayout(1, ROWS))
  live = row < left
  at = pages_mfma.row_at(row0 + gl.minimum(row, left - 1), start, head, group,
                         nhead_q)
  if splits > 1:
    gl.store(parts_lse + part + at, row_lse, mask=live)
  elif (flags & attend.LSE) != 0:
    in_head = (head * group + (row0 + row) % group).to(gl.int64) * tokens
    gl.store(lse + in_head + start + (row0 + row) // group, row_lse, mask=live)
  col = gl.arange(0, PART, gl.SliceLayout(0, ROWS))
  at = (at * hdim_v)[:, None] + col[None, :]
  for i in gl.static_range(PARTS):
    y = gl.where(any_key[None, :], acc[i] * factor[None, :], 0.0)
    y = gl.convert_layout(y.permute([1, 0]), ROWS)
    mask = live[:, None]
    if attend.PARTIAL & FLAGS:
      mask = mask & (col + i * PART < hdim_v)[None, :]
    if splits > 1:
      gl.store(parts + part * hdim_v + at + i * PART, y, mask=mask)
    else:
      gl.store(out + at + i * PART, y.to(dtype), mask=mask)
