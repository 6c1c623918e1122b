# SPDX-License-Identifier: Apache-2.0
"""Decoding from shuffled caches for Hopper (sm_90), in Gluon.

Such a cache has runs of 16 bytes: of a key's columns, and of a value's column
in tokens that follow each other (layouts x and asm). Both are what a thread of
a matrix instruction takes of its left operand, keys [key, column] and values
[column, key], if columns and keys are counted in the order that falls out. So
a program is one warp, as in decode_hopper.py, and nothing passes through
shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.paged import attend, decode_hopper

_find_rows = gluon.jit(attend.find_rows.fn)
_find_keys = gluon.jit(attend.find_keys.fn)
_find_work = gluon.jit(attend.find_work.fn)
_soft_cap = gluon.jit(attend.soft_cap.fn)

MMA = decode_hopper.MMA
LEFT = decode_hopper.LEFT
RIGHT = decode_hopper.RIGHT
COLUMN = decode_hopper.COLUMN
# Words of 16 bytes.
WORDS = gl.constexpr(4)
# Columns that are converted, and multiplied, at a time.
PART = gl.constexpr(64)
_HALVES = gl.constexpr("mov.b32 {$0, $1}, $2;")


@gluon.jit
def _order(c, KIND: gl.constexpr):
  """The column that a product has as its c-th."""
  if KIND == attend.NO_BYTES:
    return c & 1 | (c >> 1 & 3) << 3 | (c >> 3 & 3) << 1 | c >> 5 << 5
  else:
    return decode_hopper._column(c, KIND)


@gluon.jit
def _in_order(x, KIND: gl.constexpr):
  """[n, rows], of keys as they follow each other, in a product's order."""
  N: gl.constexpr = x.shape[0]
  ROWS: gl.constexpr = x.shape[1]
  RUN: gl.constexpr = 8 if KIND == attend.NO_BYTES else 16
  x = x.reshape([N // 4 // RUN, 4, RUN // 2, 2, ROWS])
  return x.permute([0, 2, 1, 3, 4]).reshape([N, ROWS])


@gluon.jit
def _left(words, like, KIND: gl.constexpr):
  """Words as the left operand of a product, in its order, of `like`'s type."""
  ROWS: gl.constexpr = words.shape[0]
  if KIND == attend.NO_BYTES:
    low, high = gl.inline_asm_elementwise(
        _HALVES, "=h,=h,r", [words], (like.dtype, like.dtype), True, 1)
    x = gl.join(low, high)
    PAIRS: gl.constexpr = 1
  else:
    x = decode_hopper._half(words, KIND)
    PAIRS: gl.constexpr = 2
  COLS: gl.constexpr = 2 * PAIRS * words.shape[1]
  x = x.reshape([ROWS, words.shape[1] // 16, 4, 4 * PAIRS, 2])
  x = x.permute([0, 1, 3, 2, 4]).reshape([ROWS, COLS])
  return gl.convert_layout(x, LEFT)


@gluon.jit
def _load_keys(base, page_stride, token_stride, run_stride, boxes, left,
               N: gl.constexpr, HEAD: gl.constexpr, BOX: gl.constexpr,
               EACH: gl.constexpr):
  """A tile's words of keys [N, PART / EACH], part by part.

  Zeros of absent ones. Strides are of elements, EACH in a word.
  """
  COLS: gl.constexpr = PART // EACH
  LAYOUT: gl.constexpr = decode_hopper._k_layout(N, COLS)
  keys = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
  page, place = decode_hopper._of_box(boxes, keys, N, BOX)
  base += (page.to(gl.int64) * (page_stride // EACH)
           + (place + keys % BOX) * (token_stride // EACH))
  run_stride = decode_hopper._again(run_stride) // (WORDS * EACH) * WORDS
  shown = (keys < left) & (page >= 0)
  words = ()
  for part in gl.static_range(HEAD // PART):
    at = (part * COLS + cols) // WORDS * run_stride + cols % WORDS
    words = words + (gl.load(base[:, None] + at[None, :], mask=shown[:, None],
                             other=0),)
  return words


@gluon.jit
def _load_values(base, page_stride, run_stride, col_stride, boxes, left,
                 N: gl.constexpr, HEAD: gl.constexpr, BOX: gl.constexpr,
                 EACH: gl.constexpr):
  """A tile's words of values [PART, N / EACH], part by part, likewise."""
  RUN: gl.constexpr = WORDS * EACH
  LAYOUT: gl.constexpr = decode_hopper._k_layout(PART, N // EACH)
  cols = gl.arange(0, PART, gl.SliceLayout(1, LAYOUT))
  word = gl.arange(0, N // EACH, gl.SliceLayout(0, LAYOUT))
  run = word // WORDS
  page, place = decode_hopper._of_box(boxes, run * RUN, N, BOX)
  base += (page.to(gl.int64) * (page_stride // EACH)
           + (place // RUN + run % (BOX // RUN)) * (run_stride // RUN * WORDS)
           + word % WORDS)
  col_stride = decode_hopper._again(col_stride) // RUN * WORDS
  shown = (run * RUN < left) & (page >= 0)
  words = ()
  for part in gl.static_range(HEAD // PART):
    at = (part * PART + cols) * col_stride
    words = words + (gl.load(base[None, :] + at[:, None], mask=shown[None, :],
                             other=0),)
  return words


@gluon.jit
def _until(words, left, EACH: gl.constexpr):
  """Values without those behind the last key, which may be NaN."""
  LAYOUT: gl.constexpr = gl.SliceLayout(0, words.type.layout)
  left -= EACH * gl.arange(0, words.shape[1], LAYOUT)
  bits = 32 // EACH * gl.minimum(left, EACH)
  mask = gl.where(left >= EACH, -1, gl.where(left > 0, (1 << bits) - 1, 0))
  return words & mask[None, :]


@gluon.jit
def _rows(row0, left, start, head, group, nhead_q, TILE_M: gl.constexpr,
          LAYOUT: gl.constexpr):
  """(query, query head, place in q, live) of a tile's rows.

  Behind the last one those of the first.
  """
  r = gl.arange(0, TILE_M, LAYOUT)
  live = r < left
  r = row0 + gl.where(live, r, 0)
  query = r // group
  head_q = head * group + r % group
  return query, head_q, (start + query).to(gl.int64) * nhead_q + head_q, live


@gluon.jit
def paged_attend(
    q, k_bytes, v_bytes, out, lse, parts, parts_lse, k_scale, v_scale, sinks,
    slopes, table, indptr, lengths, cu_seqlens, k_start, k_page, k_head,
    k_token, k_run, k_scale_page, k_scale_head, k_scale_token, v_start, v_page,
    v_head, v_split, v_run_token, v_col, v_scale_page, v_scale_head,
    v_scale_token, tokens, batch, seqlen_q, nhead_q, nhead_k, group,
    pages, page_size, width, splits, programs, window_left, window_right,
    sinks_step, slopes_step, softmax_scale, logits_soft_cap, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    FLAGS: gl.constexpr, KIND: gl.constexpr, BOX: gl.constexpr,
):
  """attend.py's paged_attend, of head dimensions that are both HEAD.

  BOX: of so many keys none lie in two pages.
  """
  gl.static_assert(TILE_M == 8)
  gdc_launch_dependents()
  lengths = attend.Lengths(lengths, indptr, page_size)
  head = gl.program_id(0) % nhead_k
  split = gl.program_id(1)
  count = splits
  if splits > 1:
    lanes = gl.arange(0, attend.LANES,
                      gl.BlockedLayout([1], [32], [1], [0]))
    index, start, len_q, row0, head, split, count = _find_work(
        gl.program_id(0), lanes, cu_seqlens, lengths, batch, tokens, seqlen_q,
        group, nhead_k, window_left, window_right, splits, programs, flags,
        TILE_M, TILE_N, FLAGS)
  else:
    index, start, len_q, row0 = _find_rows(
        gl.program_id(0) // nhead_k, cu_seqlens, batch, tokens, seqlen_q, group,
        flags, TILE_M, FLAGS)
  rows_left = len_q * group - row0
  first, _, offset, _, stop, first_tile, last_tile = _find_keys(
      index, row0, gl.minimum(TILE_M, rows_left), len_q, lengths, indptr, batch,
      width, pages, page_size, group, window_left, window_right, split, count,
      count, flags, TILE_N, FLAGS)
  query, head_q, at, there = _rows(row0, rows_left, start, head, group, nhead_q,
                                   TILE_M, COLUMN)
  if (split == count - 1) & (count < splits):
    # As attend.py ends them.
    end = gl.where(count > 1, count, 0).to(gl.int64) * tokens * nhead_q
    gl.store(parts_lse + end + at,
             gl.full([TILE_M], float("inf"), gl.float32, COLUMN), mask=there)
  if (rows_left > 0) & (split > 0) & (first_tile >= last_tile):
    gl.store(parts_lse + split.to(gl.int64) * tokens * nhead_q + at,
             gl.full([TILE_M], float("-inf"), gl.float32, COLUMN), mask=there)
  elif rows_left > 0:
    table += first
    # Words, which stay together in a register from one round to the next.
    WORD: gl.constexpr = gl.pointer_type(gl.int32)
    EACH: gl.constexpr = 2 if KIND == attend.NO_BYTES else 4
    PARTS: gl.constexpr = HEAD // PART
    RUN: gl.constexpr = WORDS * EACH
    k_base = k_bytes.to(WORD) + (k_start + head.to(gl.int64) * k_head) // EACH
    v_base = v_bytes.to(WORD) + (v_start + head.to(gl.int64) * v_head) // EACH
    # From one run of keys to the next.
    v_run = RUN // v_split * v_run_token
    k_scale += head.to(gl.int64) * k_scale_head
    v_scale += head.to(gl.int64) * v_scale_head
    by_token = (flags & (attend.TOKEN_SCALES & FLAGS)) != 0
    scale = gl.load(k_scale, mask=not by_token, other=1.0) * softmax_scale
    out_scale = gl.load(v_scale, mask=not by_token, other=1.0)

    # Queries, their columns in the order of the keys'.
    ROWS: gl.constexpr = decode_hopper._rows_layout(PART)
    rows = _rows(row0, rows_left, start, head, group, nhead_q, TILE_M,
                 gl.SliceLayout(1, ROWS))
    c = gl.arange(0, PART, gl.SliceLayout(0, ROWS))
    x = ()
    for part in gl.static_range(PARTS):
      at = rows[2][:, None] * HEAD + (part * PART + _order(c, KIND))[None, :]
      x = x + (gl.load(q + at, mask=rows[3][:, None], other=0.0),)
    # Of bytes, products are float16's, as in decode_hopper.py.
    UP: gl.constexpr = 0.0 if KIND == attend.NO_BYTES else 10.0
    if KIND != attend.NO_BYTES:
      top = gl.max(gl.abs(x[0].to(gl.float32)), 1)
      for part in gl.static_range(1, PARTS):
        top = gl.maximum(top, gl.max(gl.abs(x[part].to(gl.float32)), 1))
      up = gl.minimum(127 + 14 + 127 - (top.to(gl.int32, bitcast=True) >> 23),
                      253)
      scaled = ()
      for part in gl.static_range(PARTS):
        y = x[part].to(gl.float32) * (up << 23).to(
            gl.float32, bitcast=True)[:, None]
        scaled = scaled + (y.to(gl.float16),)
      x = scaled
      scale *= gl.convert_layout(
          ((254 - up) << 23).to(gl.float32, bitcast=True), COLUMN)
    else:
      scale += gl.zeros([TILE_M], gl.float32, COLUMN)
    q_tiles = ()
    for part in gl.static_range(PARTS):
      q_tiles = q_tiles + (gl.convert_layout(x[part].permute([1, 0]), RIGHT),)

    owned = there & (index < batch)
    m = gl.full([TILE_M], float("-inf"), gl.float32, COLUMN)
    if (flags & attend.SINK) != 0:
      sink = gl.load(sinks + index * sinks_step + head_q, mask=owned,
                     other=float("-inf"))
      m = gl.where(split == 0, sink * scores.LOG2E, m)
    slope = gl.zeros([TILE_M], gl.float32, COLUMN)
    if attend.ALIBI & FLAGS and flags & attend.ALIBI:
      slope = gl.load(slopes + index * slopes_step + head_q, mask=owned,
                      other=0.0) * scores.LOG2E
    l = gl.where(m == float("-inf"), 0.0, gl.exp2(UP))
    acc = ()
    for _part in gl.static_range(PARTS):
      acc = acc + (gl.zeros([PART, TILE_M], gl.float32, MMA),)
    keys = gl.arange(0, TILE_N, gl.SliceLayout(1, MMA))

    key = first_tile * TILE_N
    end = gl.minimum(last_tile * TILE_N, stop)
    boxes = decode_hopper._pages(table, page_size, pages, key, end, TILE_N, BOX)
    k = _load_keys(k_base, k_page, k_token, k_run, boxes, end - key, TILE_N,
                   HEAD, BOX, EACH)
    following = decode_hopper._pages(table, page_size, pages, key + TILE_N, end,
                                     TILE_N, BOX)
    while key < end:
      left = end - key
      page = decode_hopper._of_box(boxes, keys, TILE_N, BOX)[0]
      shown = (keys < left) & (page >= 0)
      of_keys = gl.full([TILE_N], 1.0, gl.float32, keys.type.layout)
      of_values = of_keys
      if by_token:
        of_keys = decode_hopper._scales(
            k_scale, k_scale_page, k_scale_token, boxes, keys, shown, TILE_N,
            BOX)
        of_values = decode_hopper._scales(
            v_scale, v_scale_page, v_scale_token, boxes, keys, shown, TILE_N,
            BOX)
      s = gl.zeros([TILE_N, TILE_M], gl.float32, MMA)
      for part in gl.static_range(PARTS):
        s = mma_v2(_left(k[part], q_tiles[0], KIND), q_tiles[part], s)
      v = _load_values(v_base, v_page, v_run, v_col, boxes, left, TILE_N, HEAD,
                       BOX, EACH)
      k = _load_keys(k_base, k_page, k_token, k_run, following, left - TILE_N,
                     TILE_N, HEAD, BOX, EACH)
      s *= scale[None, :]
      if attend.TOKEN_SCALES & FLAGS:
        s *= of_keys[:, None]
      if attend.SOFT_CAP & FLAGS and flags & attend.SOFT_CAP:
        s = _soft_cap(s, logits_soft_cap)
      s *= scores.LOG2E
      ahead = (key + keys)[:, None] - (query + offset)[None, :]
      if attend.ALIBI & FLAGS and flags & attend.ALIBI:
        s -= slope[None, :] * gl.abs(ahead).to(gl.float32)
      s = gl.where(shown[:, None], s, float("-inf"))
      if attend.WINDOW & FLAGS and flags & attend.WINDOW:
        s = gl.where((ahead <= window_right) & (ahead >= -window_left), s,
                     float("-inf"))
      most = s
      if attend.TOKEN_SCALES & FLAGS:
        # float16 holds a weight with its scale, if the largest such is 1.
        least = gl.maximum(gl.abs(of_values), attend.LEAST_SCALE)
        most += gl.log2(least)[:, None]
      m_new = gl.maximum(m, gl.max(most, 0))
      # A row that has seen no key yet: anything finite keeps the NaN away.
      m_exp = gl.where(m_new == float("-inf"), 0.0, m_new)
      p = gl.exp2(s - (m_exp - UP)[None, :])
      alpha = gl.exp2(m - m_exp)
      m = m_new
      l = l * alpha + gl.sum(p, 0)
      if attend.TOKEN_SCALES & FLAGS:
        p *= of_values[:, None]
      p = gl.convert_layout(_in_order(p.to(q_tiles[0].dtype), KIND), RIGHT)
      sums = ()
      for part in gl.static_range(PARTS):
        words = _until(v[part], left, EACH)
        sums = sums + (mma_v2(_left(words, p, KIND), p,
                              acc[part] * alpha[None, :]),)
      acc = sums
      key += TILE_N
      boxes = following
      following = decode_hopper._pages(table, page_size, pages, key + TILE_N,
                                       end, TILE_N, BOX)

    any_key = l != 0
    l = gl.where(any_key, l, 1.0)
    row_lse = gl.where(any_key, (m - UP) * scores.LN2 + gl.log(l),
                       float("-inf"))
    row0 = decode_hopper._again(row0)
    query, head_q, at, there = _rows(row0, rows_left, start, head, group,
                                     nhead_q, TILE_M, COLUMN)
    rows = _rows(row0, rows_left, start, head, group, nhead_q, TILE_M,
                 gl.SliceLayout(1, ROWS))
    by = out_scale / l
    first_part = split.to(gl.int64) * tokens * nhead_q
    if count > 1:
      gl.store(parts_lse + first_part + at, row_lse, mask=there)
    elif (flags & attend.LSE) != 0:
      gl.store(lse + head_q.to(gl.int64) * tokens + start + query, row_lse,
               mask=there)
    for part in gl.static_range(PARTS):
      x = gl.convert_layout((acc[part] * by[None, :]).permute([1, 0]), ROWS)
      place = rows[2][:, None] * HEAD + (part * PART + c)[None, :]
      if count > 1:
        gl.store(parts + first_part * HEAD + place, x, mask=rows[3][:, None])
      else:
        gl.store(out + place, x.to(out.dtype.element_ty),
                 mask=rows[3][:, None])
