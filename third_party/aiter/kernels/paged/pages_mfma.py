# SPDX-License-Identifier: Apache-2.0
"""What attention over pages shares on CDNA's matrix units, in Gluon.

Where keys are: tables' entries, and loads of keys, values and scales through
them. A table is (its first entry, the cache's pages, attend.py's Paging); a
side of the cache (its address, strides of a page and a token, Paging), and
values in runs of tokens have their number and stride instead of a token's.
And chunks' rows: queries of all heads of a KV head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.slice import slice as part_of

from third_party.aiter.kernels.mha import parts_mfma, scores
from third_party.aiter.kernels.paged import attend

# A Gluon function calls none of Triton's; of one source it may be either.
find_rows = gluon.jit(attend.find_rows.fn)
find_keys = gluon.jit(attend.find_keys.fn)
tiles_of_batch = gluon.jit(attend.tiles_of_batch.fn)
place_in = gluon.jit(attend.place_in.fn)
numbers = gluon.jit(attend.numbers.fn)
_soft_cap = gluon.jit(attend.soft_cap.fn)

PART = parts_mfma.PART
# Keys of one column of a shuffled cache that a lane loads at once.
RUN = gl.constexpr(8)
# Entries of a table that chunks' kernels look at together.
LOOKS = gl.constexpr(1024)


@gluon.jit
def one(x):
  """A number that all lanes have: the compiler does not know of sums."""
  return gl.inline_asm_elementwise(
      "v_readfirstlane_b32 $0, $1", "=s,v", [x], gl.int32, True, 1)


@gluon.jit
def pages_at(table, n, stop, FLAGS: gl.constexpr):
  """The pages of keys, -1 where there is none; behind the last key its page."""
  first, pages, paging = table
  at, _ = place_in(paging, gl.minimum(n, stop - 1), FLAGS)
  page = gl.load(first + at)
  return gl.where((page >= 0) & (page < pages), page, -1)


@gluon.jit
def misses(pages_of, start, stop, LOOKS: gl.constexpr, FLAGS: gl.constexpr):
  """Whether some of the keys are in no page. LOOKS: how many pages are looked
  up together."""
  first, pages, paging = pages_of
  lanes = gl.arange(0, LOOKS, gl.BlockedLayout([1], [64], [gl.num_warps()],
                                               [0]))
  missed = lanes * 0
  begin, _ = place_in(paging, start, FLAGS)
  last, _ = place_in(paging, stop - 1, FLAGS)
  for at in range(begin, last + 1, LOOKS):
    page = gl.load(first + gl.minimum(at + lanes, last))
    missed |= gl.where((page >= 0) & (page < pages), 0, 1)
  # All lanes have one number, so that a branch is a branch.
  return one(gl.max(missed, 0)) > 0


@gluon.jit
def load(side, page, n, stop, cols, FLAGS: gl.constexpr):
  """Keys or values; of those in no page what the first one has."""
  data, page_stride, token_stride, paging = side
  _, place = place_in(paging, gl.minimum(n, stop - 1), FLAGS)
  place *= token_stride
  # Tokens lie at multiples of 16 bytes.
  CHUNK: gl.constexpr = 128 // data.dtype.element_ty.primitive_bitwidth
  at = (gl.maximum(page, 0).to(gl.int64) * page_stride
        + gl.multiple_of(place, CHUNK))
  return gl.load(data + (at[:, None] + cols[None, :]))


@gluon.jit
def load_runs(side, page, n, stop, cols, FLAGS: gl.constexpr):
  """Values of a shuffled cache: [runs, RUN, columns], from keys n on.

  cols: where they lie. What is behind the last key comes too.
  """
  data, page_stride, split, run_stride, paging = side
  _, place = place_in(paging, gl.minimum(n, stop - 1), FLAGS)
  place &= -RUN
  place = gl.multiple_of(place // split * run_stride + place % split, RUN)
  at = gl.maximum(page, 0).to(gl.int64) * page_stride + place
  at = gl.expand_dims(gl.expand_dims(at, 1), 2) + gl.expand_dims(
      gl.expand_dims(cols, 0), 1)
  LAYOUT: gl.constexpr = at.type.layout
  j = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
  return gl.load(data + (at + gl.expand_dims(gl.expand_dims(j, 0), 2)))


@gluon.jit
def load_scales(side, page, n, stop, OF_RUN: gl.constexpr,
                FLAGS: gl.constexpr):
  """Scales of values' keys: [keys], or of a shuffled cache [runs, RUN]."""
  data, page_stride, token_stride, paging = side
  _, place = place_in(paging, gl.minimum(n, stop - 1), FLAGS)
  at = gl.maximum(page, 0).to(gl.int64) * page_stride
  if OF_RUN is not None:
    at = at[:, None]
    place = (place & -RUN)[:, None] + gl.arange(0, RUN, OF_RUN)[None, :]
  return gl.load(data + (at + place * token_stride))


@gluon.jit
def load_both(sides, page, n, stop, OF_RUN: gl.constexpr,
              FLAGS: gl.constexpr):
  """Scales of keys and of values, where tokens have them."""
  if len(sides) == 0:
    return ()
  else:
    return (load_scales(sides[0], page, n, stop, OF_RUN, FLAGS),
            load_scales(sides[1], page, n, stop, OF_RUN, FLAGS))


@gluon.jit
def columns(cols, hdim, run, step, CHUNK: gl.constexpr, FLAGS: gl.constexpr):
  """Where columns lie, those of the first 16 bytes for one too many.

  Of keys chunks of 16 bytes are `run` apart; of values, each is so by `step`.
  """
  first = cols % CHUNK
  if not attend.SHUFFLED & FLAGS:
    at = cols
  elif step is None:
    at = gl.multiple_of(cols // CHUNK * run, CHUNK) + first
  else:
    at = gl.multiple_of(cols * step, CHUNK)
    first = gl.multiple_of(first * step, CHUNK)
  if attend.PARTIAL & FLAGS:
    at = gl.where(cols < hdim, at, first)
  return at


@gluon.jit
def changed(s, n, marks, flags, FLAGS: gl.constexpr):
  """Scores of keys n, times LOG2E, with what a call makes of them."""
  position, slope, cap, window_left, window_right = marks
  if attend.SOFT_CAP & FLAGS:
    if (flags & attend.SOFT_CAP) != 0:
      s = _soft_cap(s * scores.LN2, cap) * scores.LOG2E
  if (attend.ALIBI | attend.WINDOW) & FLAGS:
    ahead = n[:, None] - position[None, :]
    if attend.ALIBI & FLAGS:
      s -= slope[None, :] * gl.abs(ahead).to(gl.float32)
    if attend.WINDOW & FLAGS:
      seen = (ahead <= window_right) & (ahead >= -window_left)
      s = gl.where(seen, s, float("-inf"))
  return s


@gluon.jit
def row_at(row, start, head, group, nhead_q):
  """Which of all tokens' heads a row is."""
  return ((start + row // group).to(gl.int64) * nhead_q + head * group
          + row % group)


@gluon.jit
def load_queries(q, tile, hdim, HEAD: gl.constexpr, FLAGS: gl.constexpr):
  """Begins to load a tile of rows."""
  row0, left, start, head, group, nhead_q = tile
  LOADED: gl.constexpr = gl.BlockedLayout(
      [1, 8], [512 // HEAD, HEAD // 8], [gl.num_warps(), 1], [1, 0])
  r = gl.arange(0, PART * gl.num_warps(), gl.SliceLayout(1, LOADED))
  col = gl.arange(0, HEAD, gl.SliceLayout(0, LOADED))
  at = row_at(row0 + gl.minimum(r, left - 1), start, head, group, nhead_q)
  at = (at * hdim)[:, None] + col[None, :]
  if attend.PARTIAL & FLAGS:
    return gl.load(q + at, mask=(col < hdim)[None, :], other=0.0)
  else:
    return gl.load(q + at)


@gluon.jit
def queries(x, negative, S: gl.constexpr):
  """Rows in parts, each the right operand of a product, by way of LDS."""
  N: gl.constexpr = x.shape[0]
  HEAD: gl.constexpr = x.shape[1]
  x = gl.where(negative, -x, x)
  smem = gl.allocate_shared_memory(
      x.dtype, [N, HEAD], gl.SwizzledSharedLayout(8, 1, HEAD // 8, [1, 0]), x)
  x = smem.permute([1, 0]).load(gl.DotOperandLayout(1, S, 8))
  operands = ()
  for i in gl.static_range(HEAD // PART):
    operands = operands + (part_of(x, [PART, N], [i * PART, 0]),)
  return operands
