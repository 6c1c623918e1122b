# SPDX-License-Identifier: Apache-2.0
"""fwd.py's attention of 33 to 256 columns for CDNA's matrix units, in Gluon.

Scores are [keys, rows] and the output [columns, rows], so that a lane's weights
are its operand of the second product. A wave computes all of a tile's scores of
its 32 rows. The head dimension lies in LDS in parts of 32: one is read while
the one before it is multiplied.

gfx950 copies tiles straight to LDS, into the half that is not read. There each
wave keeps both units busy. Beside the matrix instructions that make a tile's
scores it shrinks the output and takes half of the exponentials of the tile
before it; beside those that multiply values it finds the largest scores and
takes the other half. The one barrier of a tile is in the middle of these: what
is left of them hides the first reads of the next tile's keys. This schedule
stands from `begin` to `finish`, and is paged/prefill_copied.py's, too.

gfx942 has LDS for one tile of two programs, and brings the next one by way of
registers; its two programs a unit hide each other's exponentials. Above 128
columns one program fills a unit, and its waves do what gfx950's do, with two
barriers a tile, at which the next keys and values take the places of what all
have read.

A padded kernel reads zeros for what a head has not of its columns, from behind
the buffer, and multiplies them.

Of aligned heads, with nothing that changes scores but a window and one of
ALiBi, dropout or a bias of one row for all (scores.ONE_ROW). Of that a lane has
one key's, and keys get three more columns, the bias's parts of 8 bits, and rows
as many ones. Keys and values that it hides are read as zeros. Slopes are added
to a lane's scores, whose keys are constants. Of dropout's eight blocks a tile
and row the row's two lanes draw four each, beside the products of values, and
exchange a bit a key.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma
from triton.experimental.gluon.language.amd.cdna4 import async_copy
from triton.experimental.gluon.language.amd.hint import sched_barrier

from third_party.aiter.kernels.mha import parts_mfma as parts
from third_party.aiter.kernels.mha import scores

PART = parts.PART


@gluon.constexpr_function
def _turned(keys, head):
  """How four waves copy values: a lane columns of 4 neighbouring keys."""
  cols = [[0, 1 << i] for i in range(head.bit_length() - 1)]
  # Of a lane's load; then two bits are lanes' and two are waves'.
  own = min(len(cols) - 4, 3)
  return gl.DistributedLinearLayout(
      reg_bases=cols[:own] + [[1, 0], [2, 0]] + cols[own + 4:],
      lane_bases=[[4, 0], [8, 0], [16, 0], [32, 0]] + cols[own:own + 2],
      warp_bases=cols[own + 2:own + 4], block_bases=[], shape=[keys, head])


@gluon.constexpr_function
def _padded(keys, parts):
  """Parts of keys in LDS, one behind the other, for copies of 1024 bytes in
  one piece.

  Such a piece has every fourth key. Reads of 16 bytes take keys 0 to 3, 20 to
  23, 8 to 11 and 28 to 31 at once, which so lie in different banks.
  """
  rows = [4, 8, 16, 32, 1, 2]
  rows += [keys << i for i in range(parts.bit_length() - 1)]
  return gl.PaddedSharedLayout(
      [[512, 8]], [[0, 1 << i] for i in range(5)] + [[row, 0] for row in rows],
      [], [parts * keys, 32])


@gluon.constexpr_function
def _narrow(layout):
  """A product's layout, of the instruction with the smallest operands."""
  return gl.amd.AMDMFMALayout(
      version=layout.version, instr_shape=[32, 32, 8], transposed=False,
      warps_per_cta=layout.warps_per_cta)


@gluon.constexpr_function
def _lanes(waves):
  """Of 64 keys, a lane's one; its registers have room for the key's columns."""
  return gl.SliceLayout(
      1, gl.BlockedLayout([1, 4], [64, 1], [1, waves], [1, 0]))


@gluon.jit
def _first(data, tile, N: gl.constexpr):
  """A tile's first element."""
  ptr, stride, len_k, cols = data
  return ptr + (tile * N).to(gl.int64) * stride


@gluon.jit
def _present(data, tile, at):
  """Where a tile's elements lie from its first one: of keys behind the last one
  of the sequence, where that is."""
  ptr, stride, len_k, cols = data
  N: gl.constexpr = at.shape[0]
  key = gl.arange(0, N, gl.SliceLayout(1, at.type.layout))[:, None]
  return gl.where(key < len_k - tile * N, at, at - key * stride)


@gluon.jit
def _seen(bias):
  """A bit for each of 64 keys, whose biases lanes have: whether it is seen.

  Who reads scalars of a vector instruction has to wait, and the compiler does
  not look into this one.
  """
  return gl.inline_asm("v_cmp_lg_f32_e64 $0, $1, $2\ns_nop 1", "=s,v,s",
                       (bias, float("-inf")), gl.int64, is_pure=True)


@gluon.jit
def _arrived(bias, inverse):
  """bias * inverse, here: what is loaded later is not to be waited for."""
  return gl.inline_asm_elementwise("v_mul_f32 $0, $1, $2", "=v,v,s",
                                   [bias, inverse], gl.float32, False, 1)


@gluon.jit
def _shown(at, first, seen, cols, ROW: gl.constexpr, CUT: gl.constexpr):
  """Which of a tile's elements, whose columns count from `first`, are of keys
  that are seen and of the head's columns."""
  if ROW:
    # A bit is a sign, for which a lane keeps one number.
    key = gl.arange(0, at.shape[0], gl.SliceLayout(1, at.type.layout))
    shown = ((seen << (63 - key).to(gl.int64)) < 0)[:, None]
    if CUT:
      shown = shown & parts.inside(at, first, cols)
  else:
    shown = parts.inside(at, first, cols)
  return shown


@gluon.jit
def _upper(x):
  """The upper 16 bits of floats alone: they are a bfloat16, too."""
  return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _columns_of(bias, S: gl.constexpr):
  """Columns of either half of a tile's keys, whose sum is the bias.

  A lane has its key's columns of the half that the key is in, and zeros of the
  other one.
  """
  LANES: gl.constexpr = bias.type.layout
  half = gl.arange(0, 2 * PART, LANES) // PART
  column = gl.arange(0, 4, gl.SliceLayout(0, LANES.parent))[None, :]
  # Of what is hidden nothing is left; infinity less itself is no number.
  rest = gl.where(bias > float("-inf"), bias - _upper(bias), 0.0)
  last = rest - _upper(rest)
  # A word is two columns: where those are selected one by one, it is made of
  # them for either half.
  word = (_upper(rest).to(gl.int32, bitcast=True)
          | ((bias.to(gl.int32, bitcast=True) >> 16) & 65535))
  word1 = (last.to(gl.int32, bitcast=True) >> 16) & 65535
  halves = ()
  for i in gl.static_range(2):
    own = gl.where(half == i, word, 0)[:, None]
    own1 = gl.where(half == i, word1, 0)[:, None]
    x = gl.where(column < 2, own, own1) >> (column % 2 * 16)
    x = x.to(gl.int16).to(gl.bfloat16, bitcast=True)
    x = x.reshape([2, PART, 4]).permute([1, 0, 2]).reshape([PART, 8])
    halves = halves + (gl.convert_layout(
        x, gl.DotOperandLayout(0, _narrow(S), 4), assert_trivial=True),)
  return halves


@gluon.jit
def _plus(s, columns):
  """s, of half of the keys, and the biases whose columns these are."""
  S: gl.constexpr = s.type.layout
  OF: gl.constexpr = _narrow(S)
  ones = gl.full([8, s.shape[1]], 1.0, gl.bfloat16,
                 gl.DotOperandLayout(1, OF, 4))
  s = mfma(columns, ones, gl.convert_layout(s, OF, assert_trivial=True))
  return gl.convert_layout(s, S, assert_trivial=True)


@gluon.jit
def copy(ptr, at, smem, PARTS: gl.constexpr, seen=0, cols=0,
         ROW: gl.constexpr = False, CUT: gl.constexpr = False):
  """Begins to copy a tile's parts to LDS; if ROW, zeros of keys not seen; if
  CUT, zeros behind so many columns."""
  N: gl.constexpr = at.shape[0]
  for i in gl.static_range(PARTS):
    if ROW or CUT:
      # Hidden elements' offsets lie behind the buffer, which gives zeros.
      async_copy.buffer_load_to_shared(
          smem.slice(i * N, N), ptr + i * PART, at,
          mask=_shown(at, i * PART, seen, cols, ROW, CUT))
    else:
      async_copy.buffer_load_to_shared(smem.slice(i * N, N), ptr, at + i * PART)


@gluon.jit
def _copy_tile(data, tile, at, smem, PARTS: gl.constexpr, seen,
               ROW: gl.constexpr, CUT: gl.constexpr):
  """As copy, of a tile that may be the sequence's last one."""
  if not ROW:
    at = _present(data, tile, at)
  copy(_first(data, tile, at.shape[0]), at, smem, PARTS, seen, data[3], ROW,
       CUT)


@gluon.jit
def _bias(row, tile, N: gl.constexpr, LAYOUT: gl.constexpr,
          INSIDE: gl.constexpr = False):
  """Begins to load a tile's biases; what lies behind the last one is hidden."""
  ptr, count = row
  key = gl.arange(0, N, LAYOUT)
  if INSIDE:
    x = buffer_load(ptr + tile * N, key)
  else:
    x = buffer_load(ptr + tile * N, key, mask=key < count - tile * N,
                    other=float("-inf"))
  return x


@gluon.jit
def _buffer_load(ptr, at, first, seen, cols, ROW: gl.constexpr,
                 CUT: gl.constexpr):
  """Begins to load of what _shown says; zeros of others."""
  at += first
  if ROW or CUT:
    # Hidden elements' offsets lie behind the buffer, which gives zeros.
    x = buffer_load(ptr, at, mask=_shown(at, first, seen, cols, ROW, CUT))
  else:
    x = buffer_load(ptr, at)
  return x


@gluon.jit
def _load_parts(ptr, at, seen, cols, PARTS: gl.constexpr, ROW: gl.constexpr,
                CUT: gl.constexpr):
  """Begins to load a tile in so many parts."""
  x = ()
  for i in gl.static_range(PARTS):
    x = x + (_buffer_load(ptr, at, i * PART, seen, cols, ROW, CUT),)
  return x


@gluon.jit
def _load(data, tile, at, seen, PARTS: gl.constexpr, ROW: gl.constexpr,
          CUT: gl.constexpr):
  """As _load_parts, of a tile that may be the sequence's last one."""
  return _load_parts(_first(data, tile, at.shape[0]), _present(data, tile, at),
                     seen, data[3], PARTS, ROW, CUT)


@gluon.jit
def _store(smem, parts):
  N: gl.constexpr = parts[0].shape[0]
  for i in gl.static_range(len(parts)):
    smem.slice(i * N, N).store(parts[i])


@gluon.jit
def _operand(smem, KEYS: gl.constexpr, S: gl.constexpr):
  """A part's half as the left operand, of which a lane has so many columns of
  a row at a time. The wait for copies was for all waves."""
  OPERAND: gl.constexpr = gl.DotOperandLayout(0, S, KEYS)
  if S.version == 4:
    x = async_copy.load_shared_relaxed(smem, OPERAND)
  else:
    x = smem.load(OPERAND)
  return x


@gluon.jit
def _keys(smem, i: gl.constexpr, half: gl.constexpr, S: gl.constexpr):
  """Half of the keys of a part."""
  return _operand(smem.slice((2 * i + half) * PART, PART), 8, S)


@gluon.jit
def _values(smem, i: gl.constexpr, half: gl.constexpr, S: gl.constexpr):
  """As _keys; a lane has 4 keys, as many as of its scores lie together."""
  if S.version == 4:
    x = smem.slice((2 * i + half) * PART, PART).permute([1, 0])
  else:
    x = smem.slice(i * PART, PART).slice(half * PART, PART, dim=1)
  return _operand(x, 4, S)


@gluon.jit
def _split_keys(s):
  """A tile of scores by its keys, which are constants but for a part of the
  lane.

  Returns:
    (x, key, lane, row): the scores, and of each the key's constant, what it is
    more by, and the row.
  """
  x = s.reshape([s.shape[0] // 8, 2, 4, s.shape[1]])
  L: gl.constexpr = x.type.layout
  key = (gl.arange(0, x.shape[0], parts.vector(L, 0))[:, None, None, None] * 8
         + gl.arange(0, 4, parts.vector(L, 2))[None, None, :, None])
  lane = gl.arange(0, 2, parts.vector(L, 1))[None, :, None, None] * 4
  row = gl.arange(0, x.shape[3], parts.vector(L, 3))[None, None, None, :]
  return x, key, lane, row


@gluon.jit
def _sloped(s, n0, m0, window, slope, ALIBI: gl.constexpr):
  """s and, if ALIBI, slope * |distance of row and key|."""
  if ALIBI:
    x, key, lane, row = _split_keys(s)
    first = (row + (m0 + window.offset - n0) - lane).to(gl.float32)
    x += slope * gl.abs(first - key.to(gl.float32))
    s = gl.convert_layout(x.reshape(s.shape), s.type.layout,
                          assert_trivial=True)
  return s


@gluon.jit
def _hide(s, n0, m0, len_k, window, ROW: gl.constexpr):
  """s, with -inf where a row does not see a key.

  ROW: biases hide keys behind the last one.
  """
  # Bounds are less by a lane's part.
  x, key, lane, row = _split_keys(s)
  position = row + (m0 + window.offset - n0)
  last = position + window.right
  if not ROW:
    last = gl.minimum(last, len_k - 1 - n0)
  shown = (key >= position - window.left - lane) & (key <= last - lane)
  x = gl.where(shown, x, float("-inf")).reshape(s.shape)
  return gl.convert_layout(x, s.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _drawn(rows):
  """How four waves draw for 8 blocks of keys and 32 rows each: a lane for its
  row, for one half of the blocks."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1, 0], [0, 2, 0]],
      lane_bases=[[0, 0, 1 << i] for i in range(5)] + [[1, 0, 0]],
      warp_bases=[[0, 0, 32], [0, 0, 64]], block_bases=[], shape=[2, 4, rows])


@gluon.jit
def _counters(drop, n0, m0, N: gl.constexpr):
  """Where the draws of a tile begin, each block of eight keys once, as
  scores.keep_scale has it."""
  state, threshold = drop
  D: gl.constexpr = _drawn(N)
  half = gl.arange(0, 2, parts.vector(D, 0))[:, None, None]
  block = gl.arange(0, 4, parts.vector(D, 1))[None, :, None]
  row = gl.arange(0, N, parts.vector(D, 2))[None, None, :]
  block = n0 // 8 + half * 4 + block
  zero = (block * 0 + row * 0).to(gl.uint32)
  return (zero + (state[5] // 8 + block.to(gl.uint32)),
          zero + (state[4] + (m0 + row).to(gl.uint32)),
          zero + state[3], zero + state[2], state[0], state[1])


@gluon.jit
def _kept(drop, words, S: gl.constexpr):
  """What dropout keeps of either half of a tile's keys: of each row a bit a
  key."""
  state, threshold = drop
  least = threshold.to(gl.uint32, bitcast=True)
  bits = words[0].to(gl.int32) * 0
  for i in gl.static_range(4):
    bits = bits | gl.where(words[i] << 16 >= least, 1 << i, 0) | gl.where(
        words[i] >= least, 16 << i, 0)
  D: gl.constexpr = bits.type.layout
  block = gl.arange(0, 4, parts.vector(D, 1))[None, :, None]
  bits = gl.sum(bits << 8 * block, 1)
  half = gl.arange(0, 2, gl.SliceLayout(1, bits.type.layout))[:, None]
  kept = ()
  for i in gl.static_range(2):
    own = gl.sum(gl.where(half == i, bits, 0), 0)
    kept = kept + (gl.convert_layout(own, gl.SliceLayout(0, S)),)
  return kept


@gluon.jit
def _dropped(p, kept):
  """Weights of half of a tile's keys, with zeros where dropout drops."""
  x, key, lane, row = _split_keys(p)
  bits = gl.convert_layout(kept, parts.vector(x.type.layout, 3))
  bits = bits[None, None, None, :] >> lane
  # A bit is a sign, which is all of a word's bits then.
  x = x.to(gl.int32, bitcast=True) & ((bits << (31 - key)) >> 31)
  return gl.convert_layout(
      x.to(gl.float32, bitcast=True).reshape(p.shape), p.type.layout,
      assert_trivial=True)


@gluon.jit
def _split(x):
  """A lane's scores of either half of the keys."""
  return x.reshape([2, x.shape[0] // 2, x.shape[1]]).permute([1, 2, 0]).split()


@gluon.jit
def _join(x0, x1, S: gl.constexpr):
  """What _split gave."""
  x = gl.join(x0, x1).permute([2, 0, 1])
  return gl.convert_layout(x.reshape([2 * x.shape[1], x.shape[2]]), S)


@gluon.constexpr_function
def _ahead(parts):
  """How many parts of keys are read ahead of their products: registers do not
  hold 7."""
  return min(parts - 1, 5)


@gluon.constexpr_function
def _early(parts):
  """How many of the products of values stand before the barrier."""
  return 5 * parts // 4


@gluon.constexpr_function
def _until(parts, i):
  """How many halves of parts of values are read for the products up to the
  i-th: with the last one before the barrier, all."""
  early = _early(parts)
  left = early - 1 - i
  return 2 * parts - max(4 // parts * left, (2 * parts - 2) * left // early)


@gluon.jit
def _read_keys(x, keys, COUNT: gl.constexpr, PARTS: gl.constexpr,
               S: gl.constexpr):
  """x, with more of the keys until there are so many: the parts of half of
  them, then those of the other half."""
  for i in gl.static_range(len(x), COUNT):
    x = x + (_keys(keys, i % PARTS, i // PARTS, S),)
  return x


@gluon.jit
def _read_values(x, values, COUNT: gl.constexpr, S: gl.constexpr):
  """x, with more of the values until there are so many: both halves of each
  part."""
  for i in gl.static_range(len(x), COUNT):
    x = x + (_values(values, i // 2, i % 2, S),)
  return x


@gluon.jit
def _weighed(acc, i: gl.constexpr, x, p):
  """acc with the product of the i-th half of a part of values."""
  out = ()
  for part in gl.static_range(len(acc)):
    if part == i // 2:
      out = out + (mfma(x[i], p[i % 2], acc[part]),)
    else:
      out = out + (acc[part],)
  return out


@gluon.jit
def first_scores(keys, q, s0, s1, S: gl.constexpr):
  """Scores of either half of the first tile's keys, added to s0 and s1."""
  for i in gl.static_range(len(q)):
    s0 = mfma(_keys(keys, i, 0, S), q[i], s0)
    s1 = mfma(_keys(keys, i, 1, S), q[i], s1)
  return s0, s1


@gluon.jit
def begin(tiles, s0, s1, m, scale, PARTS: gl.constexpr, S: gl.constexpr):
  """What the first step gets of the first tile's scores: score's x and w."""
  x = _read_keys((), tiles[0], _ahead(PARTS), PARTS, S)
  p0 = gl.exp2(parts.exponents(s0, m, scale))
  return x, (parts.exponents(s1, m, scale), p0)


@gluon.jit
def _score_first(x, keys, q, w, alpha, l, kept, dtype: gl.constexpr,
                 S: gl.constexpr):
  """score with half of the keys.

  Returns:
    (x, s, p0, p1, l): what is read so far, the half's scores, and of the tile
    before the weights of half of the keys as an operand, those of the other as
    they are, which l does not have.
  """
  PARTS: gl.constexpr = len(q)
  s1, p0 = w
  # The scheduler finds a place for each instruction between two barriers.
  s = gl.zeros(s1.shape, gl.float32, S)
  for i in gl.static_range(PARTS):
    x = _read_keys(x, keys, len(x) + 1, PARTS, S)
    s = mfma(x[i], q[i], s)
    if i == 0:
      p1 = gl.exp2(s1)
    if i == PARTS - 2:
      l = parts.faded(l, alpha) + parts.own(p0)
      if len(kept) > 0:
        p0 = _dropped(p0, kept[0])
      p0 = parts.operand(p0, dtype, S.version == 3)
  return x, s, p0, p1, l


@gluon.jit
def _score_second(x, tiles, q, p1, alpha, l, acc, kept, dtype: gl.constexpr,
                  S: gl.constexpr, following=()):
  """score with the other half.

  Args:
    following: if any, parts of keys that take these keys' place once all are
      read.

  Returns:
    (y, s, p1, l, acc): what is read of the values, the half's scores, the
    weights as an operand, and sums.
  """
  keys, values = tiles
  PARTS: gl.constexpr = len(q)
  gl.static_assert(len(acc) <= PARTS)
  fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
  faded = ()
  s = gl.zeros(p1.shape, gl.float32, S)
  y = ()
  for i in gl.static_range(PARTS):
    if len(x) < 2 * PARTS:
      x = _read_keys(x, keys, len(x) + 1, PARTS, S)
    else:
      if len(y) == 0 and len(following) > 0:
        _store(keys, following)
      y = _read_values(y, values, min(len(y) + 1, 2), S)
    s = mfma(x[PARTS + i], q[i], s)
    if i == 0:
      l += parts.own(p1)
      if len(kept) > 0:
        p1 = _dropped(p1, kept[1])
      p1 = parts.operand(p1, dtype, S.version == 3)
    if i < len(acc):
      faded = faded + (acc[i] * fade,)
  return y, s, p1, l, faded


@gluon.jit
def score(x, tiles, q, w, alpha, l, acc, dtype: gl.constexpr, S: gl.constexpr,
          bias=0.0, ROW: gl.constexpr = False, kept=()):
  """The first of a step: products of keys, beside which the tile before gets
  its other weights and sums, and the output shrinks.

  Args:
    x: the keys that are read ahead.
    tiles: a tile's keys, and the values of the tile before.
    w: of the tile before, exponents of half of the keys, weights of the other.
    bias: if ROW, the tile's.
    kept: with dropout, what it keeps of either half of the tile before.

  Returns:
    (x, s0, s1, p, l, acc): what is read of the values, scores of either half
    of the keys, and the weights of the tile before as operands.
  """
  x, s0, p0, p1, l = _score_first(x, tiles[0], q, w, alpha, l, kept, dtype,
                                    S)
  if ROW:
    b0, b1 = _columns_of(bias, S)
    s0 = _plus(s0, b0)
  sched_barrier()
  x, s1, p1, l, acc = _score_second(
      x, tiles, q, p1, alpha, l, acc, kept, dtype, S)
  if ROW:
    s1 = _plus(s1, b1)
  sched_barrier()
  return x, s0, s1, (p0, p1), l, acc


@gluon.jit
def weigh(x, tiles, s0, s1, p, m, acc, scale, S: gl.constexpr):
  """Then, until the barrier: products of values, beside the largest scores and
  the exponentials of a quarter of the keys.

  Returns:
    (x, w, m, alpha, acc): all that the step reads, and w as weigh_rest takes
    it: exponents of half of the keys and of a quarter, weights of the other.
  """
  PARTS: gl.constexpr = len(acc)
  EARLY: gl.constexpr = _early(PARTS)
  for i in gl.static_range(EARLY):
    x = _read_values(x, tiles[1], _until(PARTS, i), S)
    acc = _weighed(acc, i, x, p)
    if i == 0:
      m, alpha = parts.largest(gl.maximum(s0, s1), m, scale)
    if i == max(EARLY - 3, 0):
      x0, x1 = _split(parts.exponents(s0, m, scale))
    if i == max(EARLY - 2, 0):
      x0 = gl.exp2(x0)
    if i == EARLY - 1:
      s1 = parts.exponents(s1, m, scale)
  return x, (s1, x1, x0), m, alpha, acc


@gluon.jit
def weigh_rest(x, tiles, w, p, acc, KEY_PARTS: gl.constexpr, S: gl.constexpr):
  """Behind the barrier and the copies of keys: products of values but for the
  last, beside the first reads of the next step, whose tiles these are.

  Returns:
    (x, w, acc): as the next step's score takes them.
  """
  PARTS: gl.constexpr = len(acc)
  EARLY: gl.constexpr = _early(PARTS)
  s1, x1, x0 = w
  acc = _weighed(acc, EARLY, x, p)
  ahead = _read_keys((), tiles[0], 1, KEY_PARTS, S)
  sched_barrier()
  for i in gl.static_range(EARLY + 1, 2 * PARTS - 1):
    ahead = _read_keys(ahead, tiles[0], len(ahead) + 1, KEY_PARTS, S)
    acc = _weighed(acc, i, x, p)
  p0 = _join(x0, gl.exp2(x1), S)
  ahead = _read_keys(ahead, tiles[0], _ahead(KEY_PARTS), KEY_PARTS, S)
  return ahead, (s1, p0), acc


@gluon.jit
def weigh_last(x, p, acc):
  """Behind the copies of values: their last product."""
  return _weighed(acc, 2 * len(acc) - 1, x, p)


@gluon.jit
def finish(values, w, alpha, l, acc, dtype: gl.constexpr, S: gl.constexpr,
           kept=()):
  """l and acc with the last tile, behind which is none to score."""
  s1, p0 = w
  p1 = gl.exp2(s1)
  l = parts.faded(l, alpha) + parts.own(p0) + parts.own(p1)
  if len(kept) > 0:
    p0 = _dropped(p0, kept[0])
    p1 = _dropped(p1, kept[1])
  p0 = parts.operand(p0, dtype, S.version == 3)
  p1 = parts.operand(p1, dtype, S.version == 3)
  fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
  out = ()
  for i in gl.static_range(len(acc)):
    a = mfma(_values(values, i, 0, S), p0, acc[i] * fade)
    out = out + (mfma(_values(values, i, 1, S), p1, a),)
  return l, out


@gluon.jit
def _attend_copied(
    sums, q, k, v, row, m0, window, steps, full, edges, scale, slope, drop,
    dtype: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    HEAD: gl.constexpr, ROW: gl.constexpr, ALIBI: gl.constexpr,
    CUT: gl.constexpr, S: gl.constexpr
):
  """m, l and acc of all tiles, copied straight to LDS.

  row, if ROW: the biases, and how many they are.
  """
  m, l, acc = sums
  PARTS: gl.constexpr = HEAD // PART
  VALUE_PARTS: gl.constexpr = len(acc)
  HALF: gl.constexpr = TILE_N // 2
  K: gl.constexpr = parts.copied(TILE_N, (4, 8, 16, 32), (1, 2))
  V: gl.constexpr = parts.copied(TILE_N, (1, 2, 4, 8), (16, 32))
  k_at = parts.places(k[1], TILE_N, TILE_N, PART, K)
  v_at = parts.places(v[1], TILE_N, TILE_N, PART, V)
  tile = parts.tile_at(0, steps, edges)
  following = parts.tile_at(1, steps, edges)
  after = parts.tile_at(2, steps, edges)
  ROOM: gl.constexpr = parts.whole(PARTS)
  keys = gl.allocate_shared_memory(dtype, [2, ROOM * TILE_N, PART],
                                   _padded(TILE_N, ROOM))
  # Biases of a tile, by the scale, of the next one and of the one behind it,
  # which is on its way, and which of their keys are seen.
  LANES: gl.constexpr = _lanes(gl.num_warps())
  bias = 0.0
  bias1 = 0.0
  bias2 = 0.0
  seen = 0
  seen1 = 0
  seen2 = 0
  if ROW:
    inverse = 1.0 / scale * scores.LOG2E
    bias = _bias(row, tile, TILE_N, LANES)
    bias1 = _bias(row, following, TILE_N, LANES)
    bias2 = _bias(row, after, TILE_N, LANES)
    seen = _seen(bias)
    seen1 = _seen(bias1)
    seen2 = _seen(bias2)
    bias *= inverse
    bias1 *= inverse
  _copy_tile(k, tile, k_at, keys.index(0), PARTS, seen, ROW, CUT)
  _copy_tile(k, following, k_at, keys.index(1), PARTS, seen1, ROW, CUT)
  async_copy.commit_group()
  # By way of LDS, where values are later.
  q = parts.columns(q[0], q[1], q[2], HEAD, S, q[3], CUT)
  values = gl.allocate_shared_memory(
      dtype, [2, parts.whole(VALUE_PARTS) * TILE_N, PART],
      gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
  _copy_tile(v, tile, v_at, values.index(0), VALUE_PARTS, seen, ROW, CUT)
  async_copy.commit_group()
  async_copy.wait_group(1)
  s0 = gl.zeros([HALF, TILE_M], gl.float32, S)
  s1 = s0
  if ROW:
    b0, b1 = _columns_of(bias, S)
    s0 = _plus(s0, b0)
    s1 = _plus(s1, b1)
  s0, s1 = first_scores(keys.index(0), q, s0, s1, S)
  s0 = _sloped(s0, tile * TILE_N, m0, window, slope, ALIBI)
  s1 = _sloped(s1, tile * TILE_N + HALF, m0, window, slope, ALIBI)
  s0 = _hide(s0, tile * TILE_N, m0, k[2], window, ROW)
  s1 = _hide(s1, tile * TILE_N + HALF, m0, k[2], window, ROW)
  m, alpha = parts.largest(gl.maximum(s0, s1), m, scale)
  async_copy.wait_group(0)
  _copy_tile(k, after, k_at, keys.index(0), PARTS, seen2, ROW, CUT)
  _copy_tile(v, following, v_at, values.index(1), VALUE_PARTS, seen1, ROW,
             CUT)
  if ROW:
    bias = bias1
    bias1 = bias2 * inverse
    bias2 = _bias(row, parts.tile_at(3, steps, edges), TILE_N, LANES)
  async_copy.commit_group()
  kept = ()
  if len(drop) > 0:
    kept = _kept(drop, parts.philox(
        _counters(drop, tile * TILE_N, m0, TILE_M), 10), S)
  ahead, w = begin((keys.index(1), values.index(0)), s0, s1, m, scale,
                   PARTS, S)
  slot = 0
  # What these steps copy, keys three tiles behind and values two, and biases
  # four, is of tiles that all see, which follow each other.
  inside = gl.maximum(full - (4 if ROW else 3), 0)
  k_ptr = _first(k, edges[1] + 3, TILE_N)
  v_ptr = _first(v, edges[1] + 2, TILE_N)
  for part in gl.static_range(2):
    if part == 1:
      following = parts.tile_at(inside + 1, steps, edges)
      after = parts.tile_at(inside + 2, steps, edges)
    for step in range(inside * part, inside if part == 0 else steps - 1):
      tiles = keys.index(1 - slot), values.index(slot)
      x, s0, s1, p, l, acc = score(
          ahead, tiles, q, w, alpha, l, acc, dtype, S, bias, ROW, kept)
      n0 = (edges[1] + step + 1) * TILE_N
      if part == 1:
        n0 = following * TILE_N
      s0 = _sloped(s0, n0, m0, window, slope, ALIBI)
      s1 = _sloped(s1, n0 + HALF, m0, window, slope, ALIBI)
      if part == 1:
        if step + 1 >= full:
          s0 = _hide(s0, following * TILE_N, m0, k[2], window, ROW)
          s1 = _hide(s1, following * TILE_N + HALF, m0, k[2], window, ROW)
      if len(drop) > 0:
        words = parts.philox(_counters(drop, n0, m0, TILE_M), 5)
      x, w, m, alpha, acc = weigh(x, tiles, s0, s1, p, m, acc, scale, S)
      sched_barrier()
      if part == 1:
        following = after
        after = parts.tile_at(step + 3, steps, edges)
      # Nobody reads this step's tiles any more, and what the next one reads was
      # copied since the one before.
      async_copy.wait_group(0)
      if ROW:
        seen1 = seen2
        seen2 = _seen(bias2)
        bias = bias1
        bias1 = _arrived(bias2, inverse)
      if part == 0:
        copy(k_ptr, k_at, keys.index(1 - slot), PARTS, seen2, k[3], ROW, CUT)
      else:
        _copy_tile(k, after, k_at, keys.index(1 - slot), PARTS, seen2, ROW, CUT)
      tiles = keys.index(slot), values.index(1 - slot)
      if len(drop) > 0:
        kept = _kept(drop, parts.philox(words, 5), S)
      ahead, w, acc = weigh_rest(x, tiles, w, p, acc, PARTS, S)
      if part == 0:
        copy(v_ptr, v_at, values.index(slot), VALUE_PARTS, seen1, v[3], ROW,
             CUT)
      else:
        _copy_tile(v, following, v_at, values.index(slot), VALUE_PARTS, seen1,
                   ROW, CUT)
      async_copy.commit_group()
      acc = weigh_last(x, p, acc)
      if ROW:
        if part == 0:
          tile = edges[1] + step + 4
        else:
          tile = parts.tile_at(step + 4, steps, edges)
        bias2 = _bias(row, tile, TILE_N, LANES, part == 0)
      if part == 0:
        k_ptr += TILE_N * k[1].to(gl.int64)
        v_ptr += TILE_N * v[1].to(gl.int64)
      slot = 1 - slot
  async_copy.wait_group(0)
  l, acc = finish(values.index(slot), w, alpha, l, acc, dtype, S, kept)
  return m, l, acc


@gluon.jit
def _places_and_rooms(
    k, v, dtype: gl.constexpr, TILE_N: gl.constexpr, PARTS: gl.constexpr,
    VALUE_PARTS: gl.constexpr
):
  """Where a tile's keys and values lie that come by way of registers, and LDS
  for them."""
  COLS: gl.constexpr = parts.whole(VALUE_PARTS * PART)
  K: gl.constexpr = parts.copied(TILE_N, (1, 2, 4, 8), (16, 32))
  k_at = parts.places(k[1], TILE_N, TILE_N, PART, K)
  v_at = parts.places(v[1], TILE_N, TILE_N, COLS, _turned(TILE_N, COLS))
  keys = gl.allocate_shared_memory(
      dtype, [parts.whole(PARTS) * TILE_N, PART],
      gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
  # Columns of 4 keys in 8 bytes.
  values = gl.allocate_shared_memory(
      dtype, [COLS, TILE_N], gl.SwizzledSharedLayout(4, 1, 16, [1, 0]))
  return k_at, v_at, keys, values


@gluon.jit
def _attend_loaded(
    sums, q, k, v, row, m0, window, steps, full, edges, scale, slope, drop,
    dtype: gl.constexpr, CHEAP_CAST: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, HEAD: gl.constexpr, ROW: gl.constexpr,
    ALIBI: gl.constexpr, CUT: gl.constexpr, S: gl.constexpr
):
  """m, l and acc of all tiles, by way of registers to LDS.

  row: as _attend_copied's.
  """
  m, l, acc = sums
  PARTS: gl.constexpr = HEAD // PART
  VALUE_PARTS: gl.constexpr = len(acc)
  q = parts.columns(q[0], q[1], q[2], HEAD, S, q[3], CUT)
  KEYS: gl.constexpr = gl.DotOperandLayout(0, S, 8)
  VALUES: gl.constexpr = gl.DotOperandLayout(0, S, 4)
  k_at, v_at, keys, values = _places_and_rooms(
      k, v, dtype, TILE_N, PARTS, VALUE_PARTS)
  tile = parts.tile_at(0, steps, edges)
  # Biases of a tile's keys and of the next one's, and which are seen.
  LANES: gl.constexpr = _lanes(gl.num_warps())
  bias = 0.0
  bias1 = 0.0
  seen = 0
  if ROW:
    inverse = 1.0 / scale * scores.LOG2E
    bias = _bias(row, tile, TILE_N, LANES)
    seen = _seen(bias)
    bias1 = _bias(row, parts.tile_at(1, steps, edges), TILE_N, LANES)
  _store(keys, _load(k, tile, k_at, seen, PARTS, ROW, CUT))
  values.store(_load(v, tile, v_at, seen, 1, ROW, CUT)[0].permute([1, 0]))
  for part in gl.static_range(2):
    for step in range(full * part, full if part == 0 else steps):
      following = parts.tile_at(step + 1, steps, edges)
      if ROW:
        seen = _seen(bias1)
      k_next = _load(k, following, k_at, seen, PARTS, ROW, CUT)
      s = gl.zeros([TILE_N, TILE_M], gl.float32, S)
      if ROW:
        b0, b1 = _columns_of(bias * inverse, S)
        zero = gl.zeros([PART, TILE_M], gl.float32, S)
        s = _join(_plus(zero, b0), _plus(zero, b1), S)
        bias = bias1
      k_part = keys.slice(0, TILE_N).load(KEYS)
      for i in gl.static_range(PARTS):
        k_after = k_part
        if i + 1 < PARTS:
          k_after = keys.slice((i + 1) * TILE_N, TILE_N).load(KEYS)
        s = mfma(k_part, q[i], s)
        k_part = k_after
      sched_barrier()
      _store(keys, k_next)
      v_next, = _load(v, following, v_at, seen, 1, ROW, CUT)
      if ROW:
        bias1 = _bias(row, parts.tile_at(step + 2, steps, edges), TILE_N,
                      LANES)
      s = _sloped(s, tile * TILE_N, m0, window, slope, ALIBI)
      if part == 1:
        s = _hide(s, tile * TILE_N, m0, k[2], window, ROW)
      m, alpha = parts.largest(s, m, scale)
      p = gl.exp2(parts.exponents(s, m, scale))
      l = parts.faded(l, alpha) + parts.own(p)
      if len(drop) > 0:
        kept = _kept(drop, parts.philox(
            _counters(drop, tile * TILE_N, m0, TILE_M), 10), S)
        p0, p1 = _split(p)
        p = _join(_dropped(p0, kept[0]), _dropped(p1, kept[1]), S)
      p = parts.operand(p, dtype, CHEAP_CAST)
      fade = gl.convert_layout(alpha, gl.SliceLayout(0, S))[None, :]
      v_part = values.slice(0, PART).load(VALUES)
      v_after = values.slice(PART, PART).load(VALUES)
      added = ()
      for i in gl.static_range(VALUE_PARTS):
        added = added + (mfma(v_part, p, acc[i] * fade),)
        v_part = v_after
        if i + 2 < VALUE_PARTS:
          v_after = values.slice((i + 2) * PART, PART).load(VALUES)
      acc = added
      sched_barrier()
      values.store(v_next.permute([1, 0]))
      tile = following
  return m, l, acc


@gluon.jit
def _attend_alone(
    sums, q, k, v, m0, window, steps, full, edges, scale, slope, drop,
    dtype: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    HEAD: gl.constexpr, ALIBI: gl.constexpr, CUT: gl.constexpr, S: gl.constexpr
):
  """As _attend_loaded, by waves that have their SIMDs for themselves."""
  m, l, acc = sums
  PARTS: gl.constexpr = HEAD // PART
  HALF: gl.constexpr = TILE_N // 2
  q = parts.columns(q[0], q[1], q[2], HEAD, S, q[3], CUT)
  k_at, v_at, keys, values = _places_and_rooms(
      k, v, dtype, TILE_N, PARTS, len(acc))
  tile = parts.tile_at(0, steps, edges)
  following = parts.tile_at(1, steps, edges)
  _store(keys, _load(k, tile, k_at, 0, PARTS, False, CUT))
  values.store(_load(v, tile, v_at, 0, 1, False, CUT)[0].permute([1, 0]))
  k_next = _load(k, following, k_at, 0, PARTS, False, CUT)
  zero = gl.zeros([HALF, TILE_M], gl.float32, S)
  s0, s1 = first_scores(keys, q, zero, zero, S)
  s0 = _sloped(s0, tile * TILE_N, m0, window, slope, ALIBI)
  s1 = _sloped(s1, tile * TILE_N + HALF, m0, window, slope, ALIBI)
  s0 = _hide(s0, tile * TILE_N, m0, k[2], window, False)
  s1 = _hide(s1, tile * TILE_N + HALF, m0, k[2], window, False)
  m, alpha = parts.largest(gl.maximum(s0, s1), m, scale)
  _store(keys, k_next)
  k_next = _load(k, parts.tile_at(2, steps, edges), k_at, 0, PARTS, False, CUT)
  tiles = keys, values
  kept = ()
  if len(drop) > 0:
    kept = _kept(drop, parts.philox(
        _counters(drop, tile * TILE_N, m0, TILE_M), 10), S)
  ahead, w = begin(tiles, s0, s1, m, scale, PARTS, S)
  # What these steps load, keys three tiles behind and values one, is of tiles
  # that all see, which follow each other.
  inside = gl.maximum(full - 3, 0)
  k_ptr = _first(k, edges[1] + 3, TILE_N)
  v_ptr = _first(v, edges[1] + 1, TILE_N)
  for part in gl.static_range(2):
    for step in range(inside * part, inside if part == 0 else steps - 1):
      following = parts.tile_at(step + 1, steps, edges)
      x, s0, p0, p1, l = _score_first(ahead, keys, q, w, alpha, l, kept, dtype,
                                      S)
      sched_barrier()
      x, s1, p1, l, acc = _score_second(
          x, tiles, q, p1, alpha, l, acc, kept, dtype, S, k_next)
      if part == 0:
        v_next = _load_parts(v_ptr, v_at, 0, v[3], 1, False, CUT)
      else:
        v_next = _load(v, following, v_at, 0, 1, False, CUT)
      sched_barrier()
      s0 = _sloped(s0, following * TILE_N, m0, window, slope, ALIBI)
      s1 = _sloped(s1, following * TILE_N + HALF, m0, window, slope, ALIBI)
      if part == 1:
        s0 = _hide(s0, following * TILE_N, m0, k[2], window, False)
        s1 = _hide(s1, following * TILE_N + HALF, m0, k[2], window, False)
      p = p0, p1
      if len(drop) > 0:
        words = parts.philox(_counters(drop, following * TILE_N, m0, TILE_M), 5)
      x, w, m, alpha, acc = weigh(x, tiles, s0, s1, p, m, acc, scale, S)
      sched_barrier()
      # Nobody reads this step's values any more.
      values.store(v_next[0].permute([1, 0]))
      if part == 0:
        k_next = _load_parts(k_ptr, k_at, 0, k[3], PARTS, False, CUT)
      else:
        k_next = _load(k, parts.tile_at(step + 3, steps, edges), k_at, 0, PARTS,
                       False, CUT)
      if len(drop) > 0:
        kept = _kept(drop, parts.philox(words, 5), S)
      ahead, w, acc = weigh_rest(x, tiles, w, p, acc, PARTS, S)
      acc = weigh_last(x, p, acc)
      if part == 0:
        k_ptr += TILE_N * k[1].to(gl.int64)
        v_ptr += TILE_N * v[1].to(gl.int64)
  l, acc = finish(values, w, alpha, l, acc, dtype, S, kept)
  return m, l, acc


@gluon.jit
def mha_fwd(
    q, k, v, out, lse, bias, bias_f32, mask, alibi_slopes, sink, dropout_state,
    cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded,
    stride_q, nhead_stride_q, batch_stride_q,
    stride_k, nhead_stride_k, batch_stride_k,
    stride_v, nhead_stride_v, batch_stride_v,
    stride_o, nhead_stride_o, batch_stride_o,
    nhead_stride_lse, batch_stride_lse,
    stride_bias, key_stride_bias, nhead_stride_bias, batch_stride_bias,
    stride_mask, key_stride_mask, nhead_stride_mask, batch_stride_mask,
    batch, seqlen_q, seqlen_k, nhead_q, nhead_k, hdim_q, hdim_v,
    softmax_scale, logits_soft_cap, drop_threshold, rp_keep,
    window_left, window_right, sink_tokens, min_seqlen_q, flags,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HEAD: gl.constexpr,
    TAIL: gl.constexpr, BLOCK_DV: gl.constexpr, DV_TAIL: gl.constexpr,
    PADDED: gl.constexpr, CHEAP_CAST: gl.constexpr, FEATURES: gl.constexpr,
    CDNA: gl.constexpr,
):
  """As fwd.py's. Grid: (heads, tiles of rows, batch)."""
  WAVES: gl.constexpr = gl.num_warps()
  ROW: gl.constexpr = FEATURES & scores.ONE_ROW != 0
  ALIBI: gl.constexpr = FEATURES & scores.ALIBI != 0
  gl.static_assert(
      ROW or FEATURES & (scores.ALIBI | scores.DROPOUT) == FEATURES)
  gl.static_assert(WAVES == 4 and TILE_M == 128 and TILE_N == 64)
  gl.static_assert(PADDED or (TAIL == 0 and DV_TAIL == 0))
  COLUMNS: gl.constexpr = HEAD + TAIL
  gl.static_assert(CDNA == 4 or COLUMNS <= 128 or not ROW)
  head = gl.program_id(0)
  # Last rows first: under a causal mask they have the most to do.
  tile_m = gl.num_programs(1) - 1 - gl.program_id(1)
  index = gl.program_id(2)
  b = index.to(gl.int64)
  if flags & scores.PACKED:
    index, tile_m = parts.find_sequence(tile_m, cu_seqlens_q, batch, TILE_M)
    b = gl.to_tensor(0).to(gl.int64)
  q_start, len_q = parts.extent(
      index, cu_seqlens_q, cu_seqlens_q_padded, seqlen_q, flags,
      scores.CU_SEQLENS_Q, scores.CU_SEQLENS_Q_PADDED)
  k_start, len_k = parts.extent(
      index, cu_seqlens_k, cu_seqlens_k_padded, seqlen_k, flags,
      scores.CU_SEQLENS_K, scores.CU_SEQLENS_K_PADDED)
  q_rows = seqlen_q
  if flags & scores.PACKED:
    q_rows = len_q
  if (min_seqlen_q > 0) & (len_q <= min_seqlen_q):
    len_q = 0
  m0 = tile_m * TILE_M
  if m0 >= q_rows:
    return

  parts.assume_stride(stride_q)
  parts.assume_stride(stride_k)
  parts.assume_stride(stride_v)
  parts.assume_stride(stride_o)
  head_k = (head // (nhead_q // nhead_k)).to(gl.int64)
  row = (q_start + m0).to(gl.int64)
  q += b * batch_stride_q + row * stride_q + head.to(gl.int64) * nhead_stride_q
  out += (b * batch_stride_o + row * stride_o
          + head.to(gl.int64) * nhead_stride_o)
  lse += b * batch_stride_lse + head * nhead_stride_lse + row
  k += (b * batch_stride_k + k_start.to(gl.int64) * stride_k
        + head_k * nhead_stride_k)
  v += (b * batch_stride_v + k_start.to(gl.int64) * stride_v
        + head_k * nhead_stride_v)

  seq = scores.Sequence(q_start, q_rows, len_q, k_start, seqlen_k, len_k)
  window = scores.Window(
      parts.offset_of(seq, flags), window_left, window_right, sink_tokens)
  _, low, full_low, full_high, high = parts.key_tiles(
      m0, gl.minimum(m0 + TILE_M, len_q), seq, window, TILE_N, 0)
  steps = high - low

  S: gl.constexpr = parts.matrix(CDNA, WAVES)
  r = gl.arange(0, TILE_M, gl.SliceLayout(0, S))
  # A sink is a key without a value: it opens m and l.
  m_first = float("-inf")
  if flags & scores.SINK:
    m_first = gl.load(sink + index * nhead_q + head) * scores.LOG2E
  m = gl.zeros_like(r).to(gl.float32) + gl.maximum(m_first, parts.LOWEST)
  SUMS: gl.constexpr = parts.sums(WAVES)
  l = gl.zeros([2, 4, TILE_M], gl.float32, SUMS) + gl.where(
      m_first == float("-inf"), 0.0, 1.0 / 8)
  acc = ()
  for _ in gl.static_range((BLOCK_DV + DV_TAIL) // PART):
    acc = acc + (gl.zeros([PART, TILE_M], gl.float32, S),)
  if steps > 0:
    dtype: gl.constexpr = q.dtype.element_ty
    q_data = q, stride_q, len_q - m0, hdim_q
    edges = low, full_low, full_high
    full = full_high - full_low
    scale = softmax_scale * scores.LOG2E
    k_data = k, stride_k, len_k, hdim_q
    v_data = v, stride_v, len_k, hdim_v
    slope = 0.0
    if ALIBI:
      # Scores are multiplied by `scale` later.
      slope = -scores.LOG2E / scale * gl.load(
          alibi_slopes + index * nhead_q + head)
    drop = ()
    if FEATURES & scores.DROPOUT:
      state = ()
      for i in gl.static_range(6):
        state = state + (
            gl.load(dropout_state + ((index * nhead_q + head) * 6 + i)),)
      drop = state, drop_threshold
    biases = (bias_f32 + b * batch_stride_bias + head * nhead_stride_bias,
              len_k)
    if CDNA == 4:
      m, l, acc = _attend_copied(
          (m, l, acc), q_data, k_data, v_data, biases, m0, window, steps, full,
          edges, scale, slope, drop, dtype, TILE_M, TILE_N, COLUMNS, ROW, ALIBI,
          PADDED, S)
    elif COLUMNS > 128:
      m, l, acc = _attend_alone(
          (m, l, acc), q_data, k_data, v_data, m0, window, steps, full, edges,
          scale, slope, drop, dtype, TILE_M, TILE_N, COLUMNS, ALIBI, PADDED, S)
    else:
      m, l, acc = _attend_loaded(
          (m, l, acc), q_data, k_data, v_data, biases, m0, window, steps, full,
          edges, scale, slope, drop, dtype, CHEAP_CAST, TILE_M, TILE_N, COLUMNS,
          ROW, ALIBI, PADDED, S)

  l = gl.convert_layout(gl.sum(gl.sum(l, 1), 0), gl.SliceLayout(0, S))
  live = (r < len_q - m0) & ((l > 0) | (l != l))
  l_safe = gl.where(live, l, 1.0)
  gl.store(lse + r, gl.where(live, m * scores.LN2 + gl.log(l_safe),
                             float("-inf")), mask=r < q_rows - m0)
  factor = 1.0 / l_safe
  if FEATURES & scores.DROPOUT:
    factor *= rp_keep
  x = ()
  for i in gl.static_range(len(acc)):
    y = gl.where(live[None, :], acc[i] * factor[None, :], 0.0)
    x = x + (y.to(out.dtype.element_ty),)
  parts.write(out, stride_o, x, q_rows - m0, hdim_v, PADDED)
