# SPDX-License-Identifier: Apache-2.0
"""Decoding over paged caches for CDNA's matrix units, in Gluon.

A step of decoding takes as long as its keys and values take to come from
memory. A program is one wave, and loads both into the registers from which
matrix instructions take them, always a tile ahead of these: no LDS, no wave
that waits for another. Scores are [keys, rows], so that the weights of a tile
lie where the second product wants them.

Values lie in memory as [keys, columns], and a matrix instruction wants several
keys of one column in a lane. A lane loads some columns of its keys, and gives
the i-th instruction the i-th of them. Of a shuffled cache it loads eight keys
of a column, and gives the i-th instruction the i-th four of them; its scores
have the keys in that order.

Of aligned queries and caches. Scales of tokens are for kernels of these alone:
they come with the keys and values, to the lanes that have their scores. Of head
dimensions below HEAD a lane loads the first columns again for those that are
not there: no load has a condition.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import mfma

from third_party.aiter.kernels.gemm import gemm
from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.paged import attend, pages_mfma

_neighbour = gluon.jit(gemm.neighbour.fn)

# Rows, columns and keys of a matrix instruction.
SIDE = gl.constexpr(16)
# Of a device: they take programs in turn, and have a cache each.
DIES = gl.constexpr(8)


@gluon.jit
def _load_values(side, page, n, stop, cols, FLAGS: gl.constexpr):
  if attend.SHUFFLED & FLAGS:
    return pages_mfma.load_runs(side, page, n, stop, cols, FLAGS)
  else:
    return pages_mfma.load(side, page, n, stop, cols, FLAGS)


@gluon.jit
def _in_order(x, SCORES: gl.constexpr):
  """[runs, RUN] in the order of scores: the i-th four of every run."""
  x = x.reshape([4, 2, 4]).permute(1, 0, 2).reshape([4 * pages_mfma.RUN])
  return gl.convert_layout(x, gl.SliceLayout(1, SCORES))


@gluon.jit
def _look(v, page, n, end, stop, SCORES: gl.constexpr, SHUFFLED: gl.constexpr):
  """Of a tile: values, 0 where nothing is, the scores' keys, which are there.
  """
  there = page >= 0
  if SHUFFLED:
    j = gl.arange(0, pages_mfma.RUN, gl.SliceLayout(
        0, gl.SliceLayout(2, v.type.layout)))
    keys = n[:, None] + j[None, :]
    shown = there[:, None] & (keys < stop)
    if (gl.min(page, 0) < 0) | (gl.max(n, 0) + pages_mfma.RUN > stop):
      v = gl.where(gl.expand_dims(shown, 2), v, gl.zeros_like(v))
    keys = _in_order(keys, SCORES)
    shown = _in_order(shown.to(gl.int32), SCORES) != 0
  else:
    shown = there & (n < stop)
    if (gl.min(page, 0) < 0) | (end > stop):
      # What came instead may be NaN, or infinite.
      v = gl.where(shown[:, None], v, gl.zeros_like(v))
    keys = gl.convert_layout(n, gl.SliceLayout(1, SCORES))
    shown = gl.convert_layout(shown, gl.SliceLayout(1, SCORES))
  return v, keys, shown


@gluon.jit
def _of_scores(x, SCORES: gl.constexpr, SHUFFLED: gl.constexpr):
  """[keys, 1] of what _load_scales loaded."""
  if SHUFFLED:
    x = _in_order(x, SCORES)
  else:
    x = gl.convert_layout(x, gl.SliceLayout(1, SCORES))
  return x[:, None]


@gluon.jit
def _attend(sums, q, k, v, scales, page, n, end, stop, scale, marks, flags,
            KIND: gl.constexpr, NATIVE: gl.constexpr, OUT: gl.constexpr,
            FLAGS: gl.constexpr):
  """Adds a tile: its largest scores, their weights' sum, weighted values.

  end: the key behind its last one.
  """
  m, l, acc = sums
  N: gl.constexpr = k.shape[0]
  HEAD: gl.constexpr = k.shape[1]
  ROWS: gl.constexpr = q.shape[1]
  SCORES: gl.constexpr = k.type.layout.parent
  v, keys, shown = _look(v, page, n, end, stop, SCORES,
                         attend.SHUFFLED & FLAGS)
  s = mfma(pages_mfma.numbers(k, 0, q.dtype, KIND, NATIVE), q,
           gl.zeros([N, ROWS], gl.float32, SCORES)) * scale
  if len(scales) > 0:
    s *= _of_scores(scales[0], SCORES, attend.SHUFFLED & FLAGS)
  s = pages_mfma.changed(s, keys, marks, flags, FLAGS)
  s = gl.where(shown[:, None], s, float("-inf"))
  most = s
  if len(scales) > 0:
    # Of a key that is not there, it is another's.
    of_values = gl.where(shown[:, None], _of_scores(
        scales[1], SCORES, attend.SHUFFLED & FLAGS), 0.0)
    if q.dtype == gl.float16:
      # It holds a weight with its scale, if the largest such is 1.
      most += gl.log2(gl.maximum(gl.abs(of_values), attend.LEAST_SCALE))
  m_new = gl.maximum(m, gl.max(most, 0))
  # A row that has seen no key yet: anything finite keeps the NaN away.
  m_exp = gl.where(m_new == float("-inf"), 0.0, m_new)
  p = gl.exp2(s - m_exp[None, :])
  alpha = gl.exp2(m - m_exp)
  l = l * alpha + gl.sum(p, 0)
  if len(scales) > 0:
    p *= of_values
  acc *= gl.convert_layout(alpha, gl.SliceLayout(0, OUT))[None, :]
  p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(1, OUT, 4))
  v = pages_mfma.numbers(v, 0, q.dtype, KIND, NATIVE)
  if attend.SHUFFLED & FLAGS:
    v = v.reshape([4, 2, 4, HEAD]).permute(3, 1, 0, 2).reshape([HEAD, N])
  else:
    # The i-th instruction has the i-th column of each lane.
    v = v.reshape([N, SIDE, HEAD // SIDE]).permute(2, 1, 0).reshape([HEAD, N])
  v = gl.convert_layout(v, gl.DotOperandLayout(0, OUT, 4))
  return m_new, l, mfma(v, p, acc)


@gluon.jit
def paged_attend(
    q, k_cache, v_cache, k_bytes, v_bytes, out, lse, parts, parts_lse,
    k_scale, v_scale, sinks, slopes, table, indptr, lengths, cu_seqlens,
    k_start, k_page, k_head, k_token, k_run_token, k_run, k_scale_page,
    k_scale_head, k_scale_token, v_start, v_page, v_head, v_token, v_split,
    v_run_token, v_col, v_scale_page, v_scale_head, v_scale_token,
    tokens, batch, seqlen_q, nhead_q, nhead_k, group, hdim, hdim_v, pages,
    page_size, page_shift, page_factor, width, splits, programs, window_left,
    window_right, sinks_step, slopes_step, softmax_scale, logits_soft_cap,
    flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    FLAGS: gl.constexpr, KIND: gl.constexpr, NATIVE: gl.constexpr,
    CDNA: gl.constexpr,
):
  """As attend.py's.

  Grid: (tiles of rows and KV heads, these fastest, splits).
  """
  gl.static_assert(gl.num_warps() == 1 and TILE_M == SIDE)
  if not attend.PARTIAL & FLAGS:
    hdim = HEAD
    hdim_v = HEAD
  lengths = attend.Lengths(lengths, indptr, page_size)
  paging = attend.Paging(page_size, page_shift, page_factor)
  program = gl.program_id(0)
  if attend.PARTIAL & FLAGS:
    # A head's columns may end within a line, which the next one shares: a die
    # with a cache of its own has neighbours.
    program = _neighbour(program, gl.num_programs(0), DIES)
  head = program % nhead_k
  slot = program // nhead_k
  split = gl.program_id(1)
  share = 0.0
  if splits > 1:
    lanes = gl.arange(0, attend.LANES, gl.BlockedLayout([2], [64], [1], [0]))
    share = programs / (nhead_k * gl.maximum(gl.sum(pages_mfma.tiles_of_batch(
        lanes, cu_seqlens, lengths, batch, seqlen_q, group, window_left,
        window_right, flags, TILE_M, TILE_N, FLAGS), 0), 1.0))
  index, start, len_q, row0 = pages_mfma.find_rows(
      slot, cu_seqlens, batch, tokens, seqlen_q, group, flags, TILE_M, FLAGS)
  left = len_q * group - row0
  if left <= 0:
    return
  first_page, _, offset, _, stop, first_tile, last_tile = pages_mfma.find_keys(
      index, row0, gl.minimum(TILE_M, left), len_q, lengths, indptr, batch,
      width, pages, page_size, group, window_left, window_right, split, splits,
      share, flags, TILE_N, FLAGS)

  SCORES: gl.constexpr = gl.amd.AMDMFMALayout(
      version=CDNA, instr_shape=[16, 16, 16 * (CDNA - 2)], transposed=False,
      warps_per_cta=[1, 1])
  OUT: gl.constexpr = gl.amd.AMDMFMALayout(
      version=CDNA, instr_shape=[16, 16, 16], transposed=False,
      warps_per_cta=[1, 1])
  KEYS: gl.constexpr = gl.DotOperandLayout(0, SCORES, 8)
  QUERIES: gl.constexpr = gl.DotOperandLayout(1, SCORES, 8)
  SHUFFLED: gl.constexpr = attend.SHUFFLED & FLAGS
  # Four keys of a lane lie where the second product wants them.
  if SHUFFLED:
    gl.static_assert(TILE_N == 4 * pages_mfma.RUN)
    VALUES: gl.constexpr = gl.BlockedLayout(
        [1, pages_mfma.RUN, 1], [64 // SIDE, 1, SIDE], [1, 1, 1], [1, 2, 0])
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, VALUES))
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, VALUES))
    OF_RUN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, VALUES))
  else:
    VALUES: gl.constexpr = gl.BlockedLayout(
        [4, HEAD // SIDE], [64 // SIDE, SIDE], [1, 1], [1, 0])
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, VALUES)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    OF_RUN: gl.constexpr = None
  ROW: gl.constexpr = gl.SliceLayout(0, SCORES)

  r = gl.arange(0, TILE_M, ROW)
  live = r < left
  r = row0 + gl.where(live, r, 0)
  head_q = head * group + r % group
  token = start + r // group
  part = split.to(gl.int64) * tokens * nhead_q
  part_lse_at = parts_lse + part + token.to(gl.int64) * nhead_q + head_q
  if (split > 0) & (first_tile >= last_tile):
    gl.store(part_lse_at, gl.full([TILE_M], float("-inf"), gl.float32, ROW),
             mask=live)
    return

  # A sink is a key without a value: it opens m and l of the first part.
  m = gl.full([TILE_M], float("-inf"), gl.float32, ROW)
  if (flags & attend.SINK) != 0:
    sink = gl.load(sinks + index * sinks_step + head_q,
                   mask=live & (index < batch), other=float("-inf"))
    m = gl.where(split == 0, sink * scores.LOG2E, m)
  l = gl.where(m == float("-inf"), 0.0, 1.0)
  sums = m, l, gl.zeros([HEAD, TILE_M], gl.float32, OUT)
  if first_tile < last_tile:
    q_row = gl.arange(0, TILE_M, gl.SliceLayout(0, QUERIES))
    q_row = row0 + gl.where(q_row < left, q_row, 0)
    q_at = ((start + q_row // group).to(gl.int64) * nhead_q + head * group
            + q_row % group)
    q_col = gl.arange(0, HEAD, gl.SliceLayout(1, QUERIES))
    q_at = (q_at * hdim)[None, :] + q_col[:, None]
    if attend.PARTIAL & FLAGS:
      q_tile = gl.load(q + q_at, mask=q_col[:, None] < hdim, other=0.0)
    else:
      q_tile = gl.load(q + q_at)
    if attend.TOKEN_SCALES & FLAGS:
      scale = softmax_scale * scores.LOG2E
      scale_sides = (
          (k_scale + head.to(gl.int64) * k_scale_head, k_scale_page,
           k_scale_token, paging),
          (v_scale + head.to(gl.int64) * v_scale_head, v_scale_page,
           v_scale_token, paging))
    else:
      scale = gl.load(k_scale + head.to(gl.int64) * k_scale_head)
      scale *= softmax_scale * scores.LOG2E
      scale_sides = ()
    k_data = k_cache if KIND == attend.NO_BYTES else k_bytes
    v_data = v_cache if KIND == attend.NO_BYTES else v_bytes
    k_data += k_start + head.to(gl.int64) * k_head
    v_data += v_start + head.to(gl.int64) * v_head
    CHUNK: gl.constexpr = 8 if KIND == attend.NO_BYTES else 16
    k_col = pages_mfma.columns(
        gl.arange(0, HEAD, gl.SliceLayout(0, KEYS)), hdim, k_run, None, CHUNK,
        FLAGS)
    v_at = pages_mfma.columns(
        gl.arange(0, HEAD, OF_COLUMNS), hdim_v, None, v_col, CHUNK, FLAGS)
    n_k = gl.arange(0, TILE_N, gl.SliceLayout(1, KEYS))
    if SHUFFLED:
      n_k = n_k % 16 // 4 * pages_mfma.RUN + n_k // 16 * 4 + n_k % 4
      n = gl.arange(0, TILE_N // pages_mfma.RUN, OF_KEYS) * pages_mfma.RUN
      k_side = (k_data, k_page, k_run_token, paging)
      v_side = (v_data, v_page, v_split, v_run_token, paging)
    else:
      n = gl.arange(0, TILE_N, OF_KEYS)
      k_side = (k_data, k_page, k_token, paging)
      v_side = (v_data, v_page, v_token, paging)
    n += first_tile * TILE_N
    n_k += first_tile * TILE_N
    pages_of = (table + first_page, pages, paging)
    # The last turn may have a tile of the next part.
    stop = gl.minimum(stop, last_tile * TILE_N)
    slope = gl.zeros([TILE_M], gl.float32, ROW)
    if attend.ALIBI & FLAGS:
      if (flags & attend.ALIBI) != 0:
        slope = gl.load(slopes + index * slopes_step + head_q,
                        mask=live & (index < batch), other=0.0)
    marks = (r // group + offset, slope * scores.LOG2E, logits_soft_cap,
             window_left, window_right)

    # Two tiles a turn: what is loaded stays in its registers. The pages of a
    # tile are looked up before the tile in front of it is loaded.
    page = pages_mfma.pages_at(pages_of, n, stop, FLAGS)
    page_k = pages_mfma.pages_at(pages_of, n_k, stop, FLAGS)
    odd = pages_mfma.pages_at(pages_of, n + TILE_N, stop, FLAGS)
    odd_k = pages_mfma.pages_at(pages_of, n_k + TILE_N, stop, FLAGS)
    k = pages_mfma.load(k_side, page_k, n_k, stop, k_col, FLAGS)
    v = _load_values(v_side, page, n, stop, v_at, FLAGS)
    both = pages_mfma.load_both(scale_sides, page, n, stop, OF_RUN, FLAGS)
    for t in range(first_tile, last_tile, 2):
      end = (t + 1) * TILE_N
      following = pages_mfma.pages_at(pages_of, n + 2 * TILE_N, stop, FLAGS)
      following_k = pages_mfma.pages_at(pages_of, n_k + 2 * TILE_N, stop, FLAGS)
      k_odd = pages_mfma.load(k_side, odd_k, n_k + TILE_N, stop, k_col, FLAGS)
      v_odd = _load_values(v_side, odd, n + TILE_N, stop, v_at, FLAGS)
      both_odd = pages_mfma.load_both(scale_sides, odd, n + TILE_N, stop,
                                      OF_RUN, FLAGS)
      sums = _attend(sums, q_tile, k, v, both, page, n, end, stop, scale, marks,
                     flags, KIND, NATIVE, OUT, FLAGS)
      page_odd = odd
      page = following
      odd = pages_mfma.pages_at(pages_of, n + 3 * TILE_N, stop, FLAGS)
      odd_k = pages_mfma.pages_at(pages_of, n_k + 3 * TILE_N, stop, FLAGS)
      k = pages_mfma.load(k_side, following_k, n_k + 2 * TILE_N, stop, k_col,
                          FLAGS)
      v = _load_values(v_side, page, n + 2 * TILE_N, stop, v_at, FLAGS)
      both = pages_mfma.load_both(scale_sides, page, n + 2 * TILE_N, stop,
                                  OF_RUN, FLAGS)
      sums = _attend(sums, q_tile, k_odd, v_odd, both_odd, page_odd, n + TILE_N,
                     end + TILE_N, stop, scale, marks, flags, KIND, NATIVE, OUT,
                     FLAGS)
      n += 2 * TILE_N
      n_k += 2 * TILE_N

  m, l, acc = sums
  any_key = l != 0.0
  l_safe = gl.where(any_key, l, 1.0)
  factor = 1.0
  if not attend.TOKEN_SCALES & FLAGS:
    factor = gl.load(v_scale + head.to(gl.int64) * v_scale_head)
  factor /= l_safe
  acc *= gl.convert_layout(factor, gl.SliceLayout(0, OUT))[None, :]
  row_lse = gl.where(any_key, m * scores.LN2 + gl.log(l_safe), float("-inf"))
  if SHUFFLED:
    x = acc.permute(1, 0)
  else:
    x = acc.reshape([HEAD // SIDE, SIDE, TILE_M]).permute(2, 1, 0)
    x = x.reshape([TILE_M, HEAD])
  X: gl.constexpr = x.type.layout
  x_row = gl.arange(0, TILE_M, gl.SliceLayout(1, X))
  x_live = x_row < left
  x_row = row0 + gl.where(x_live, x_row, 0)
  x_at = ((start + x_row // group).to(gl.int64) * nhead_q + head * group
          + x_row % group)
  x_col = gl.arange(0, HEAD, gl.SliceLayout(0, X))
  at = (x_at * hdim_v)[:, None] + x_col[None, :]
  x_live = x_live[:, None]
  if attend.PARTIAL & FLAGS:
    x_live &= (x_col < hdim_v)[None, :]
  if splits > 1:
    gl.store(part_lse_at, row_lse, mask=live)
    gl.store(parts + part * hdim_v + at, x, mask=x_live)
  else:
    if (flags & attend.LSE) != 0:
      gl.store(lse + head_q.to(gl.int64) * tokens + token, row_lse, mask=live)
    gl.store(out + at, x.to(out.dtype.element_ty), mask=x_live)
