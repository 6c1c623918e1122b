# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of one tensor or of two, and its adjoint.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding"
(arXiv:2104.09864). Of a head's channels some are pairs; pair j of a token is
turned by the angle whose cosine and sine a table has:

  out1 = x1 * cos1 - x2 * sin1        out2 = x2 * cos2 + x1 * sin2

A table of half the width has one cosine and sine a pair, a full one has the two
of each. The adjoint is the same with -sin2 for sin1 and -sin1 for sin2.

A block owns TILE_M tokens and TILE_N heads of one of the tensors: what it loads
of the tables serves all those heads. Of their channels it has those of PAIRS
pairs, or as many that are copied. All loads of x are on their way before
anything else is asked for, for there is little but memory's latency to hide.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.rope.family import FLAGS as BITS

GPTJ = tl.constexpr(BITS["gptj"])  # Pairs are neighbours.
FULL = tl.constexpr(BITS["full"])  # Tables as wide as what is turned.
TRANSPOSED = tl.constexpr(BITS["transposed"])
F32_TABLES = tl.constexpr(BITS["f32_tables"])  # Of any x.
PER_TOKEN = tl.constexpr(BITS["per_token"])  # Tables have a row a token.
POSITIONS = tl.constexpr(BITS["positions"])
OFFSETS = tl.constexpr(BITS["offsets"])
CU_SEQLENS = tl.constexpr(BITS["cu_seqlens"])
SECTIONS = tl.constexpr(BITS["sections"])  # Pairs with rows of their own.
GRID = tl.constexpr(BITS["grid"])  # Positions are places in a volume.


@triton.jit
def _start_of_sequence(p, cu_seqlens, sequences):
  """Where the packed sequence begins that has row p."""
  low = tl.zeros_like(p)
  high = low + sequences
  among = sequences
  while among > 1:
    among = (among + 1) // 2
    middle = (low + high) // 2
    before = tl.load(cu_seqlens + middle) <= p
    low = tl.where(before, middle, low)
    high = tl.where(before, high, middle)
  return tl.load(cu_seqlens + low)


@triton.jit
def _table_rows(t, given, flags):
  """Rows of the tables for tokens t: those of the three sections of pairs.

  Without sections the first counts. A row out of range is the nearest one.
  given: (positions, offsets, cu_seqlens, tokens, seqlen, inner, sequences,
  table_rows, grid_h, grid_w).
  """
  positions, offsets, cu_seqlens, tokens, seqlen, inner, sequences = given[:7]
  table_rows, grid_h, grid_w = given[7:]
  inside = t < tokens
  if flags & PER_TOKEN:
    r0 = t
    r1 = t
    r2 = t
  else:
    r0 = t.to(tl.uint32)
    if inner > 1:
      r0 //= inner.to(tl.uint32)
    r0 = (r0 % seqlen.to(tl.uint32)).to(tl.int32)
    if flags & CU_SEQLENS:
      r0 -= _start_of_sequence(r0, cu_seqlens, sequences)
    r1 = r0
    r2 = r0
    if flags & POSITIONS:
      r0 = tl.load(positions + t, inside, 0)
      r1 = r0
      r2 = r0
      if (flags & (SECTIONS | GRID)) == SECTIONS:
        r1 = tl.load(positions + (t + tokens), inside, 0)
        r2 = tl.load(positions + (t + 2 * tokens), inside, 0)
    if flags & OFFSETS:
      shift = tl.load(offsets + t, inside, 0)
      r0 += shift
      r1 += shift
      r2 += shift
    if flags & GRID:
      r2 = r0 % grid_w
      r1 = r0 // grid_w % grid_h
      r0 = r0 // grid_w // grid_h
  last = table_rows - 1
  return (tl.minimum(tl.maximum(r0, 0), last),
          tl.minimum(tl.maximum(r1, 0), last),
          tl.minimum(tl.maximum(r2, 0), last))


@triton.jit
def _load_from(table, c, j, pairs, width, rows, sections, flags):
  """Columns c of a table, those of pairs j, in float32: [tokens, columns].

  Of rows[0] for pairs before sections[0], of rows[1] for those before
  sections[1] and of rows[2] for the others. What is asked to stay in the cache
  is what the next tokens and layers read as well; vectors only pass by.
  """
  c = c[None, :]
  if flags & SECTIONS:
    first = (j < sections[0])[None, :]
    second = ((j >= sections[0]) & (j < sections[1]))[None, :]
    third = ((j >= sections[1]) & (j < pairs))[None, :]
    t = (tl.load(table + (rows[0][:, None] * width + c), first, 0.0)
         + tl.load(table + (rows[1][:, None] * width + c), second, 0.0)
         + tl.load(table + (rows[2][:, None] * width + c), third, 0.0))
  else:
    t = tl.load(table + (rows[0][:, None] * width + c), (j < pairs)[None, :],
                0.0, eviction_policy="evict_last")
  return t.to(tl.float32)


@triton.jit
def _load(tables, c, j, pairs, width, rows, sections, flags):
  """(cosines, sines): _load_from tables (cos, sin, cos_f32, sin_f32)."""
  cos, sin, cos_f32, sin_f32 = tables
  if flags & F32_TABLES:
    u = _load_from(cos_f32, c, j, pairs, width, rows, sections, flags)
    v = _load_from(sin_f32, c, j, pairs, width, rows, sections, flags)
  else:
    u = _load_from(cos, c, j, pairs, width, rows, sections, flags)
    v = _load_from(sin, c, j, pairs, width, rows, sections, flags)
  return u, v


@triton.jit
def _halves(t, TILE_M: tl.constexpr, PAIRS: tl.constexpr):
  """Even and odd columns of [TILE_M, 2 * PAIRS]."""
  return tl.split(tl.reshape(t, [TILE_M, PAIRS, 2]))


@triton.jit
def _of_head(i, block, cols):
  """[tokens, columns]: what head i of a block has to load and to store."""
  r, rows_left, heads = block
  return (r < tl.where(heads > i, rows_left, 0))[:, None] & cols[None, :]


@triton.jit
def _turn(x1, x2, cos1, cos2, sin1, sin2):
  x1 = x1.to(tl.float32)
  x2 = x2.to(tl.float32)
  return x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2


@triton.jit
def _adjoint(sin1, sin2, flags):
  if flags & TRANSPOSED:
    s1 = -sin2
    s2 = -sin1
  else:
    s1 = sin1
    s2 = sin2
  return s1, s2


@triton.jit
def _turn_halves(
    x, out, row, block, t, p0, dim, pairs, first, tables, given, sections,
    splits, flags, TILE_N: tl.constexpr, PAIRS: tl.constexpr,
    ALIGN: tl.constexpr,
):
  """Pairs p0 to p0 + PAIRS - 1 of a first and a second half."""
  j = p0 + tl.arange(0, PAIRS)
  # Pairs before splits[0], those before splits[1] and the others have their
  # halves side by side.
  low = tl.where(j < splits[0], 0, tl.where(j < splits[1], splits[0],
                                            splits[1]))
  high = tl.where(j < splits[0], splits[0], tl.where(j < splits[1], splits[1],
                                                     pairs))
  c1 = tl.max_contiguous(tl.multiple_of(j + low, ALIGN), ALIGN)
  c2 = tl.max_contiguous(tl.multiple_of(j + high, ALIGN), ALIGN)
  cols = j < pairs
  at1 = row + (first + c1)[None, :]
  at2 = row + (first + c2)[None, :]
  x1 = ()
  x2 = ()
  for i in tl.static_range(TILE_N):
    x1 += (tl.load(x + i * dim + at1, _of_head(i, block, cols), 0.0),)
    x2 += (tl.load(x + i * dim + at2, _of_head(i, block, cols), 0.0),)
  rows = _table_rows(t, given, flags)
  if flags & FULL:
    cos1, sin1 = _load(tables, c1, j, pairs, 2 * pairs, rows, sections, flags)
    cos2, sin2 = _load(tables, c2, j, pairs, 2 * pairs, rows, sections, flags)
  else:
    cos1, sin1 = _load(tables, j, j, pairs, pairs, rows, sections, flags)
    cos2 = cos1
    sin2 = sin1
  sin1, sin2 = _adjoint(sin1, sin2, flags)
  for i in tl.static_range(TILE_N):
    o1, o2 = _turn(x1[i], x2[i], cos1, cos2, sin1, sin2)
    here = _of_head(i, block, cols)
    tl.store(out + i * dim + at1, o1.to(out.dtype.element_ty), here)
    tl.store(out + i * dim + at2, o2.to(out.dtype.element_ty), here)


@triton.jit
def _turn_neighbours(
    x, out, row, block, t, p0, dim, pairs, first, tables, given, sections,
    flags, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PAIRS: tl.constexpr,
):
  """Pairs p0 to p0 + PAIRS - 1 of channels 2 j and 2 j + 1."""
  j = p0 + tl.arange(0, PAIRS)
  c = 2 * p0 + tl.arange(0, 2 * PAIRS)
  cols = c < 2 * pairs
  at = row + (first + c)[None, :]
  both = ()
  for i in tl.static_range(TILE_N):
    both += (tl.load(x + i * dim + at, _of_head(i, block, cols), 0.0),)
  rows = _table_rows(t, given, flags)
  if flags & FULL:
    cos, sin = _load(tables, c, c, 2 * pairs, 2 * pairs, rows,
                     (2 * sections[0], 2 * sections[1]), flags)
    cos1, cos2 = _halves(cos, TILE_M, PAIRS)
    sin1, sin2 = _halves(sin, TILE_M, PAIRS)
  else:
    cos1, sin1 = _load(tables, j, j, pairs, pairs, rows, sections, flags)
    cos2 = cos1
    sin2 = sin1
  sin1, sin2 = _adjoint(sin1, sin2, flags)
  for i in tl.static_range(TILE_N):
    x1, x2 = _halves(both[i], TILE_M, PAIRS)
    o1, o2 = _turn(x1, x2, cos1, cos2, sin1, sin2)
    o = tl.reshape(tl.join(o1, o2), [TILE_M, 2 * PAIRS])
    tl.store(out + i * dim + at, o.to(out.dtype.element_ty),
             _of_head(i, block, cols))


@triton.jit
def _copy(x, out, row, block, c0, dim, pairs, first, TILE_N: tl.constexpr,
          COLS: tl.constexpr, WHOLE: tl.constexpr):
  """COLS of the channels before the pairs and behind them, from c0 on."""
  rest = c0 + tl.arange(0, COLS)
  c = tl.where(rest < first, rest, rest + 2 * pairs)
  c = tl.max_contiguous(tl.multiple_of(c, WHOLE), WHOLE)
  cols = rest < dim - 2 * pairs
  at = row + c[None, :]
  t = ()
  for i in tl.static_range(TILE_N):
    t += (tl.load(x + i * dim + at, _of_head(i, block, cols), 0.0),)
  for i in tl.static_range(TILE_N):
    tl.store(out + i * dim + at, t[i], _of_head(i, block, cols))


@triton.jit
def rope_rotate(
    x, y, cos, sin, cos_f32, sin_f32, positions, offsets, cu_seqlens, x_out,
    y_out, tokens, seqlen, inner, heads_x, heads_y, dim, pairs, first,
    table_rows, sequences, grid_h, grid_w, section_0, section_1, split_0,
    split_1, flags,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PAIRS: tl.constexpr,
    ALIGN: tl.constexpr, WHOLE: tl.constexpr, FLAGS: tl.constexpr,
):
  """x_out and y_out: x and y, turned.

  x, x_out: [tokens, heads_x, dim], contiguous; y, y_out: [tokens, heads_y,
  dim], and heads_y is 0 if there is none. The channels from `first` on are
  `pairs` pairs, all others are copied.
  cos, sin: [table_rows, pairs or 2 * pairs] of x's type or float32, by either
  of two pointers. A full table has x's columns.
  Token t has row (t // inner) % seqlen of its sequence, less the start of the
  packed sequence it is in (cu_seqlens: [sequences + 1]); or positions[t]
  ([1 or 3, tokens]); to which offsets[t] comes. With GRID that is a place in a
  volume of planes of grid_h by grid_w, and its three coordinates are the rows
  of the three sections of pairs, which end at section_0, section_1 and `pairs`.
  split_0 and split_1: as section_0 and section_1, of pairs of halves that lie
  side by side.
  ALIGN divides `pairs`, the sections' and the splits' ends; WHOLE `dim` and
  `first`.
  """
  flags &= FLAGS
  dim = dim // WHOLE * WHOLE  # Says so to the compiler.
  first = first // WHOLE * WHOLE
  turned = tl.cdiv(pairs, PAIRS)
  parts = turned + tl.cdiv(dim - 2 * pairs, 2 * PAIRS)
  blocks_x = tl.cdiv(heads_x, TILE_N)
  blocks = blocks_x + tl.cdiv(heads_y, TILE_N)
  block = tl.program_id(0) // parts
  part = tl.program_id(0) - block * parts
  t0 = block // blocks
  block -= t0 * blocks
  t0 *= TILE_M
  if block < blocks_x:
    src = x
    out = x_out
    heads = heads_x
    h0 = block * TILE_N
  else:
    src = y
    out = y_out
    heads = heads_y
    h0 = (block - blocks_x) * TILE_N
  stride = heads * dim
  tl.assume(stride >= 0)
  start = t0.to(tl.int64) * stride + h0 * dim
  src += start
  out += start
  r = tl.arange(0, TILE_M)
  row = (r * stride)[:, None]
  own = (r, tokens - t0, heads - h0)
  tables = (cos, sin, cos_f32, sin_f32)
  given = (positions, offsets, cu_seqlens, tokens, seqlen, inner, sequences,
           table_rows, grid_h, grid_w)
  sections = (section_0, section_1)
  if part >= turned:
    _copy(src, out, row, own, (part - turned) * (2 * PAIRS), dim, pairs, first,
          TILE_N, 2 * PAIRS, WHOLE)
  elif flags & GPTJ:
    _turn_neighbours(src, out, row, own, t0 + r, part * PAIRS, dim, pairs,
                     first, tables, given, sections, flags, TILE_M, TILE_N,
                     PAIRS)
  else:
    _turn_halves(src, out, row, own, t0 + r, part * PAIRS, dim, pairs, first,
                 tables, given, sections, (split_0, split_1), flags, TILE_N,
                 PAIRS, ALIGN)
