# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches of bytes for Hopper (sm_90), in Gluon.

A program is one warp, so that no key passes through shared memory: a thread
loads 16 bytes of a token at a time and has then what its matrix instructions
take, if the columns of queries and of the result are counted in the order that
falls out. Numbers of 8 bits are exact in float16, and so are queries, but for
what is 2^-38 of their row's largest, once a power of two has brought that to
2^14: all products are float16's. Weights are taken 2^10 times, away from its
subnormal numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from third_party.aiter.kernels.mha import scores
from third_party.aiter.kernels.paged import attend

# A Gluon function calls none of Triton's; of one source it may be either.
_find_rows = gluon.jit(attend.find_rows.fn)
_find_keys = gluon.jit(attend.find_keys.fn)
_find_work = gluon.jit(attend.find_work.fn)

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
# Columns of values that a product has at most.
VALUES = gl.constexpr(128)
# Rows stand in columns: products have them so.
COLUMN = gl.constexpr(gl.SliceLayout(0, MMA.value))


@gluon.constexpr_function
def _k_layout(n, words):
  """Words of keys: four lanes a key, each has 16 bytes of every 64."""
  steps = lambda n: range(n.bit_length() - 1)
  return gl.DistributedLinearLayout(
      [[0, 1], [0, 2], *([0, 16 << i] for i in steps(words // 16)),
       *([8 << i, 0] for i in steps(n // 8))],
      [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [], [], [n, words])


@gluon.constexpr_function
def _v_layout(n, words):
  """Words of values: eight lanes a key."""
  steps = lambda n: range(n.bit_length() - 1)
  each = words // 8
  return gl.DistributedLinearLayout(
      [*([0, 1 << i] for i in steps(each)), [1, 0],
       *([8 << i, 0] for i in steps(n // 8))],
      [[2, 0], [4, 0], *([0, each << i] for i in range(3))], [], [], [n, words])


@gluon.constexpr_function
def _rows_layout(head):
  """Rows of queries and of the result."""
  return gl.BlockedLayout([1, 8], [256 // head, head // 8], [1, 1], [1, 0])


# What makes two pairs of float16, l and h, of a word w of four bytes, exactly:
# of bytes 0 and 1 and of 2 and 3; of e4m3fnuz of 0 and 2 and of 1 and 3, whose
# NaN is a -0 here.
_INT8 = """
      // 1024 + 128 + x is 0x6400 with x + 128 for its low byte.
      xor.b32 t, w, 0x80808080;
      mov.b32 k, 0x64806480;
      prmt.b32 l, t, 0x64646464, 0x4140;
      prmt.b32 h, t, 0x64646464, 0x4342;
      sub.f16x2 l, l, k;
      sub.f16x2 h, h, k;"""
_E4M3FN = """
      mov.b32 {c, d}, w;
      cvt.rn.f16x2.e4m3x2 l, c;
      cvt.rn.f16x2.e4m3x2 h, d;"""
_E4M3FNUZ = """
      // Times 2^-7: exponents count from 8, float16's from 15.
      shl.b32 t, w, 7;
      and.b32 t, t, 0x3f803f80;
      shl.b32 l, w, 8;
      lop3.b32 l, l, t, 0x80008000, 0xec;
      shr.u32 t, w, 1;
      and.b32 t, t, 0x3f803f80;
      lop3.b32 h, w, t, 0x80008000, 0xec;"""
_E5M2 = """
      prmt.b32 l, w, 0, 0x1404;
      prmt.b32 h, w, 0, 0x3424;"""


def _of_words(ptx):
  """The assembly of a word, $4: $0 to $3 are its bytes as float16."""
  return ("{ .reg .b16 c, d; .reg .b32 w, l, h, t, k; mov.b32 w, $4;" + ptx
          + "\n mov.b32 {$0, $1}, l; mov.b32 {$2, $3}, h; }")


def _of_keys(ptx, zips):
  """Words -> the assembly of so many words of a key, and of the next one's.

  They come behind the results, $(words i + j), which are bytes i of both keys'
  words j, side by side; zips: how `ptx` wants bytes 0 and 1, and 2 and 3, of
  two words.
  """
  found = {}
  for words in (2, 4):
    out = "{ .reg .b16 c, d; .reg .b32 w, l, h, t, k;"
    for j in range(words):
      for i, pick in zip((0, 2), zips):
        at = words * i + j
        out += (f"\n prmt.b32 w, ${4 * words + j}, ${5 * words + j}, {pick};"
                + ptx + f"\n mov.b32 ${at}, l; mov.b32 ${at + words}, h;")
    found[words] = out + "}"
  return found


# In the order of KINDS; and what float16 has in the place of 1.
HALVES = _INT8, _E4M3FN, _E4M3FNUZ, _E5M2
_SIDE_BY_SIDE = "0x5140", "0x7362"
_TO_HALF = gl.constexpr(tuple(map(_of_words, HALVES)))
_TO_PAIRS = gl.constexpr((
    _of_keys(_INT8, _SIDE_BY_SIDE), _of_keys(_E4M3FN, _SIDE_BY_SIDE),
    _of_keys(_E4M3FNUZ, ("0x5410", "0x7632")), _of_keys(_E5M2, _SIDE_BY_SIDE)))
_ONE = gl.constexpr((1.0, 1.0, 2.0**-7, 1.0))


@gluon.constexpr_function
def _to_pairs(kind, words):
  """Assembly and constraints of so many words of two keys."""
  return (_TO_PAIRS.value[kind][words],
          ",".join(["=&r"] * 4 * words + ["r"] * 2 * words))


@gluon.jit
def _again(x):
  """What follows from it is found anew rather than kept in registers."""
  return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32,
                                   False, 1)


@gluon.jit
def _half(words, KIND: gl.constexpr):
  """Words as float16 [..., 2, 2]: bytes 2 i + j, of e4m3fnuz i + 2 j."""
  a, b, c, d = gl.inline_asm_elementwise(
      _TO_HALF[KIND], "=&h,=&h,=&h,=&h,r", [words],
      (gl.float16, gl.float16, gl.float16, gl.float16), True, 1)
  return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def _keys(words, KIND: gl.constexpr):
  """Words [N, W] of keys as float16 [N, 4 W], columns as of _column."""
  N: gl.constexpr = words.shape[0]
  W: gl.constexpr = words.shape[1]
  k = _half(words, KIND).reshape([N, W // 16, 4, 4, 2, 2])
  return k.permute([0, 1, 3, 4, 2, 5]).reshape([N, 4 * W])


@gluon.jit
def _column(c, KIND: gl.constexpr):
  """The column that keys have as their c-th."""
  low = c & 1
  high = c >> 3 & 1
  if KIND == attend.E4M3FNUZ:
    byte = high | low << 1
  else:
    byte = low | high << 1
  return byte | (c >> 4 & 3) << 2 | (c >> 1 & 3) << 4 | c >> 6 << 6


@gluon.jit
def _values(words, KIND: gl.constexpr):
  """Words [N, W] of values as float16 [4 W, N].

  Those of two keys are paired as the product takes them, which the names of
  elements that the assembly returns do not say. Of C columns that a lane has,
  C l + c comes as the 8 c + l-th.
  """
  N: gl.constexpr = words.shape[0]
  EACH: gl.constexpr = words.shape[1] // 8
  ASM: gl.constexpr = _to_pairs(KIND, EACH)
  a, b, c, d = gl.inline_asm_elementwise(
      ASM[0], ASM[1], [words],
      (gl.float16, gl.float16, gl.float16, gl.float16), True, 2 * EACH)
  v = gl.join(gl.join(a, c), gl.join(b, d))
  v = v.reshape([N // 2, 2, 8, EACH // 2, 2, 2, 2])
  return v.permute([1, 3, 5, 6, 2, 0, 4]).reshape([32 * EACH, N])


@gluon.jit
def _nans(words):
  """Bit 7 of the bytes of e4m3fnuz that are NaN; other bits mean nothing."""
  return words & ~((words & 0x7f7f7f7f) + 0x7f7f7f7f)


@gluon.jit
def _nan_keys(words):
  """[N]: whether a column of a key is NaN."""
  return (gl.reduce_or(_nans(words), 1) & ~0x7f7f7f7f) != 0


@gluon.jit
def _nan_values(words):
  """[4, 32]: `_nans` of the words of any key, for each lane that has keys."""
  words = _nans(words).reshape(
      [words.shape[0] // 8, 4, 2, words.shape[1]])
  return gl.reduce_or(gl.reduce_or(words, 2), 0)


@gluon.jit
def _pages(table, page_size, pages, key, stop, N: gl.constexpr,
           BOX: gl.constexpr):
  """(page, place in it) of each box of a tile; page -1 where there is none.

  Of boxes of one key all pages are one tensor, and all places, a lane a key.
  """
  if BOX == 1:
    keys = key + gl.arange(0, N, gl.BlockedLayout([1], [32], [1], [0]))
    page = gl.load(table + keys // page_size, mask=keys < stop, other=-1)
    page = gl.where((page >= 0) & (page < pages), page, -1)
    found = (page, keys % page_size)
  else:
    found = ()
    for b in gl.static_range((N + BOX - 1) // BOX):
      first = key + b * BOX
      page = gl.load(table + first // page_size, mask=first < stop, other=-1)
      page = gl.where((page >= 0) & (page < pages), page, -1)
      found = found + (page, first % page_size)
  return found


@gluon.jit
def _of_box(boxes, keys, N: gl.constexpr, BOX: gl.constexpr):
  """(page, place of the first key of the box) for keys of a tile."""
  page = boxes[0]
  place = boxes[1]
  if BOX == 1:
    page = gl.convert_layout(page, keys.type.layout)
    place = gl.convert_layout(place, keys.type.layout)
  else:
    for b in gl.static_range(1, N // BOX):
      page = gl.where(keys < b * BOX, page, boxes[2 * b])
      place = gl.where(keys < b * BOX, place, boxes[2 * b + 1])
  return page, place


@gluon.jit
def _load(base, page_stride, token_stride, boxes, left, width, N: gl.constexpr,
          COLS: gl.constexpr, BOX: gl.constexpr, LAYOUT: gl.constexpr,
          PARTIAL: gl.constexpr):
  """A tile's words: `left` keys, zeros of absent ones.

  PARTIAL: a token has but `width` words, and zeros in the place of others.
  """
  keys = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
  cols = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
  page, place = _of_box(boxes, keys, N, BOX)
  at = (page.to(gl.int64) * (page_stride // 4)
        + (place + keys % BOX) * (token_stride // 4))
  shown = ((keys < left) & (page >= 0))[:, None]
  if PARTIAL:
    shown = shown & (cols < width)[None, :]
  return gl.load(base + at[:, None] + cols[None, :], mask=shown, other=0)


@gluon.jit
def _load_values(base, page_stride, token_stride, boxes, left, width,
                 N: gl.constexpr, COLS: gl.constexpr, BOX: gl.constexpr,
                 PARTIAL: gl.constexpr):
  """A tile's words of values, part by part."""
  EACH: gl.constexpr = min(VALUES // 4, COLS)
  words = ()
  for part in gl.static_range(COLS // EACH):
    words = words + (_load(
        base + part * EACH, page_stride, token_stride, boxes, left,
        width - part * EACH, N, EACH, BOX, _v_layout(N, EACH), PARTIAL),)
  return words


@gluon.jit
def _scales(base, page_stride, token_stride, boxes, keys, shown,
            N: gl.constexpr, BOX: gl.constexpr):
  """Scales of a tile's tokens."""
  page, place = _of_box(boxes, keys, N, BOX)
  at = page.to(gl.int64) * page_stride + (place + keys % BOX) * token_stride
  return gl.load(base + at, mask=shown, other=1.0)


@gluon.jit
def paged_attend(
    q, k_bytes, v_bytes, out, lse, parts, parts_lse, k_scale, v_scale, sinks,
    table, indptr, lengths, cu_seqlens, k_start, k_page, k_head, k_token,
    k_scale_page, k_scale_head, k_scale_token, v_start, v_page, v_head, v_token,
    v_scale_page, v_scale_head, v_scale_token, tokens, batch, seqlen_q, nhead_q,
    nhead_k, group, hdim, hdim_v, pages, page_size, width, splits, programs,
    window_left, window_right, sinks_step, softmax_scale, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    FLAGS: gl.constexpr, KIND: gl.constexpr, BOX: gl.constexpr,
):
  """attend.py's paged_attend, of head dimensions up to HEAD.

  BOX: of so many keys none lie in two pages.
  """
  gdc_launch_dependents()
  PARTIAL: gl.constexpr = (attend.PARTIAL & FLAGS) != 0
  if not PARTIAL:
    hdim = HEAD
    hdim_v = HEAD
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
  at = row0 + gl.arange(0, TILE_M, COLUMN)
  there = at < len_q * group
  at = (start + at // group).to(gl.int64) * nhead_q + head * group + at % group
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
    k_words = k_bytes.to(WORD) + (k_start + head.to(gl.int64) * k_head) // 4
    v_words = v_bytes.to(WORD) + (v_start + head.to(gl.int64) * v_head) // 4
    TIMES: gl.constexpr = 1.0 / _ONE[KIND]
    k_scale += head.to(gl.int64) * k_scale_head
    v_scale += head.to(gl.int64) * v_scale_head
    by_token = (flags & (attend.TOKEN_SCALES & FLAGS)) != 0
    scale = gl.load(k_scale, mask=not by_token, other=1.0)
    scale *= softmax_scale * TIMES
    out_scale = gl.load(v_scale, mask=not by_token, other=1.0) * TIMES

    # Queries, their columns in the order of the keys'.
    ROWS: gl.constexpr = _rows_layout(HEAD)
    r = gl.arange(0, TILE_M, gl.SliceLayout(1, ROWS))
    live = r < rows_left
    r = row0 + gl.where(live, r, 0)
    row = (start + r // group).to(gl.int64) * nhead_q + head * group + r % group
    c = gl.arange(0, HEAD, gl.SliceLayout(0, ROWS))
    col = _column(c, KIND)[None, :]
    live_q = live[:, None]
    if PARTIAL:
      live_q = live_q & (col < hdim)
    x = gl.load(q + row[:, None] * hdim + col, mask=live_q,
                other=0.0).to(gl.float32)
    top = gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23
    up = gl.minimum(127 + 14 + 127 - top, 253)
    x *= (up << 23).to(gl.float32, bitcast=True)[:, None]
    q_tile = gl.convert_layout(x.to(gl.float16).permute([1, 0]), RIGHT)
    scale *= gl.convert_layout(((254 - up) << 23).to(gl.float32, bitcast=True),
                               COLUMN) * scores.LOG2E

    # Rows once more, as the products have them.
    r = gl.arange(0, TILE_M, COLUMN)
    live_s = r < rows_left
    r = row0 + gl.where(live_s, r, 0)
    query = r // group
    head_q = head * group + r % group
    m = gl.full([TILE_M], float("-inf"), gl.float32, COLUMN)
    if (flags & attend.SINK) != 0:
      sink = gl.load(sinks + index * sinks_step + head_q,
                     mask=index < batch, other=float("-inf"))
      m = gl.where(split == 0, sink * scores.LOG2E, m)
    l = gl.where(m == float("-inf"), 0.0, 1024.0)
    PARTS: gl.constexpr = (HEAD + VALUES - 1) // VALUES
    acc = ()
    for _part in gl.static_range(PARTS):
      acc = acc + (gl.zeros([HEAD // PARTS, TILE_M], gl.float32, MMA),)
    keys = gl.arange(0, TILE_N, gl.SliceLayout(1, MMA))

    COLS: gl.constexpr = HEAD // 4
    K_BYTES: gl.constexpr = _k_layout(TILE_N, COLS)
    key = first_tile * TILE_N
    end = gl.minimum(last_tile * TILE_N, stop)
    boxes = _pages(table, page_size, pages, key, end, TILE_N, BOX)
    k_raw = _load(k_words, k_page, k_token, boxes, end - key, hdim // 4, TILE_N,
                  COLS, BOX, K_BYTES, PARTIAL)
    v_raw = _load_values(v_words, v_page, v_token, boxes, end - key,
                         hdim_v // 4, TILE_N, COLS, BOX, PARTIAL)
    following = _pages(table, page_size, pages, key + TILE_N, end, TILE_N, BOX)
    if KIND == attend.E4M3FNUZ:
      gl.static_assert(PARTS == 1)
      nan = _nan_values(v_raw[0])
    while key < end:
      page = _of_box(boxes, keys, TILE_N, BOX)[0]
      shown = (keys < end - key) & (page >= 0)
      of_keys = gl.full([TILE_N], 1.0, gl.float32, keys.type.layout)
      of_values = of_keys
      if by_token:
        of_keys = _scales(k_scale, k_scale_page, k_scale_token, boxes, keys,
                          shown, TILE_N, BOX)
        of_values = _scales(v_scale, v_scale_page, v_scale_token, boxes, keys,
                            shown, TILE_N, BOX)
      s = mma_v2(gl.convert_layout(_keys(k_raw, KIND), LEFT), q_tile,
                 gl.zeros([TILE_N, TILE_M], gl.float32, MMA))
      if KIND == attend.E4M3FNUZ:
        # Of the MMA's rows this thread's lanes have the same keys.
        is_nan = gl.convert_layout(_nan_keys(k_raw), gl.SliceLayout(1, MMA))
        s = gl.where(is_nan[:, None], float("nan"), s)
      left = end - key - TILE_N
      k_raw = _load(k_words, k_page, k_token, following, left, hdim // 4,
                    TILE_N, COLS, BOX, K_BYTES, PARTIAL)
      if attend.TOKEN_SCALES & FLAGS:
        s *= of_keys[:, None]
      s = gl.where(shown[:, None], s * scale[None, :], float("-inf"))
      if (flags & attend.WINDOW) != 0:
        ahead = (key + keys)[:, None] - (query + offset)[None, :]
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
      p = gl.exp2(s - (m_exp - 10.0)[None, :])
      alpha = gl.exp2(m - m_exp)
      m = m_new
      l = l * alpha + gl.sum(p, 0)
      if attend.TOKEN_SCALES & FLAGS:
        p *= of_values[:, None]
      if KIND == attend.E4M3FNUZ:
        nan = nan | _nan_values(v_raw[0])
      p = gl.convert_layout(p.to(gl.float16), RIGHT)
      sums = ()
      for part in gl.static_range(PARTS):
        v = gl.convert_layout(_values(v_raw[part], KIND), LEFT)
        sums = sums + (mma_v2(v, p, acc[part] * alpha[None, :]),)
      acc = sums
      v_raw = _load_values(v_words, v_page, v_token, following, left,
                           hdim_v // 4, TILE_N, COLS, BOX, PARTIAL)
      key += TILE_N
      boxes = following
      following = _pages(table, page_size, pages, key + TILE_N, end, TILE_N,
                         BOX)

    any_key = l != 0
    l = gl.where(any_key, l, 1.0)
    row_lse = gl.where(any_key, (m - 10.0) * scores.LN2 + gl.log(l),
                       float("-inf"))
    by = out_scale / l
    if KIND == attend.E4M3FNUZ:
      BYTES: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
      nan = gl.convert_layout(gl.reduce_or(nan, 0), gl.SliceLayout(1, BYTES))
      byte = gl.arange(0, 4, gl.SliceLayout(0, BYTES))
      is_nan = (nan[:, None] >> (8 * byte + 7)[None, :] & 1).reshape([HEAD])
    first_part = split.to(gl.int64) * tokens * nhead_q
    if TILE_M > 8:
      # Fewer registers: found anew.
      there = live_s
      at = (start + query).to(gl.int64) * nhead_q + head_q
    if count > 1:
      gl.store(parts_lse + first_part + at, row_lse, mask=there)
    elif (flags & attend.LSE) != 0:
      gl.store(lse + head_q.to(gl.int64) * tokens + start + query, row_lse,
               mask=live_s)
    OUT: gl.constexpr = _rows_layout(HEAD // PARTS)
    row0 = _again(row0)
    r = gl.arange(0, TILE_M, gl.SliceLayout(1, OUT))
    live = (r < rows_left)[:, None]
    r = row0 + gl.where(r < rows_left, r, 0)
    row = (start + r // group).to(gl.int64) * nhead_q + head * group + r % group
    c = gl.arange(0, HEAD // PARTS, gl.SliceLayout(0, OUT))
    for part in gl.static_range(PARTS):
      x = (acc[part] * by[None, :]).reshape([HEAD // PARTS // 8, 8, TILE_M])
      x = x.permute([2, 1, 0]).reshape([TILE_M, HEAD // PARTS])
      x = gl.convert_layout(x, OUT)
      if KIND == attend.E4M3FNUZ:
        of_cols = gl.convert_layout(is_nan, gl.SliceLayout(0, OUT))
        x = gl.where((of_cols != 0)[None, :], float("nan"), x)
      col = (part * (HEAD // PARTS) + c)[None, :]
      mask = live
      if PARTIAL:
        mask = mask & (col < hdim_v)
      place = row[:, None] * hdim_v + col
      if count > 1:
        gl.store(parts + first_part * hdim_v + place, x, mask=mask)
      else:
        gl.store(out + place, x.to(out.dtype.element_ty), mask=mask)
