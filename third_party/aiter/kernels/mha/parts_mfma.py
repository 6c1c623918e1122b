# SPDX-License-Identifier: Apache-2.0
"""What attention's Gluon kernels for CDNA's matrix units share.

A head is in parts of 32 columns. A tile of scores stands with what a
program keeps along its columns, which waves divide, and what it walks over
along its rows: a lane's scores are then its operand of the next product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_load
from triton.experimental.gluon.language.amd.slice import slice as part_of

from third_party.aiter.kernels.core import tiles
from third_party.aiter.kernels.mha import scores

# A Gluon function calls none of Triton's; of one source it may be either.
assume_stride = gluon.jit(tiles.assume_stride.fn)
capped = gluon.jit(scores._capped.fn)
cast = gluon.jit(tiles.cast.fn)
extent = gluon.jit(scores.sequence_extent.fn)
find_sequence = gluon.jit(scores.find_sequence.fn)
key_tiles = gluon.jit(scores.key_tiles.fn)
mul_hi_lo = gluon.jit(scores._mul_hi_lo.fn)
offset_of = gluon.jit(scores.offset_of.fn)
row_tiles = gluon.jit(scores.row_tiles.fn)

# Columns of a part, and a side of a matrix instruction.
PART = gl.constexpr(32)
# Of a row that has seen no key yet: finite, which keeps a NaN away.
LOWEST = gl.constexpr(-3e38)


@gluon.constexpr_function
def matrix(cdna, waves):
  """A product whose columns waves divide."""
  return gl.amd.AMDMFMALayout(
      version=cdna, instr_shape=[32, 32, 8 * (cdna - 2)], transposed=False,
      warps_per_cta=[1, waves])


@gluon.constexpr_function
def vector(layout, axis):
  """Of a vector along an axis, which then has all of the layout's."""
  for other in reversed(range(len(layout.shape))):
    if other != axis:
      layout = gl.SliceLayout(other, layout)
  return layout


@gluon.constexpr_function
def sums(waves):
  """[2, 4, rows]: four numbers of each of a row's two lanes in `matrix`."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1, 0], [0, 2, 0]],
      lane_bases=[[0, 0, 1 << i] for i in range(5)] + [[1, 0, 0]],
      warp_bases=[[0, 0, 32 << i] for i in range(waves.bit_length() - 1)],
      block_bases=[], shape=[2, 4, 32 * waves])


@gluon.constexpr_function
def copied(keys, first, then):
  """How four waves copy a quarter, 8 columns a lane: the keys of one wave count
  by `first`, waves by `then`."""
  return gl.DistributedLinearLayout(
      reg_bases=[[0, 1], [0, 2], [0, 4]],
      lane_bases=[[0, 8], [0, 16], *([key, 0] for key in first)],
      warp_bases=[[key, 0] for key in then], block_bases=[], shape=[keys, 32])


@gluon.jit
def largest(s, m, scale):
  """The new m, which exponents are less by, and what sums so far shrink by."""
  m_new = gl.maximum(m, gl.max(s, 0) * scale)
  return m_new, gl.exp2(m - m_new)


@gluon.jit
def exponents(s, m, scale):
  return s * scale - m[None, :]


@gluon.jit
def own(p):
  """Sums of each lane's own weights; lanes add theirs up at the end."""
  own = gl.sum(p.reshape([p.shape[0] // 8, 2, 4, p.shape[1]]), 0)
  return gl.convert_layout(own, sums(gl.num_warps()))


@gluon.jit
def faded(l, alpha):
  ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
  return l * gl.convert_layout(alpha, ROWS)[None, None, :]


@gluon.jit
def operand(p, dtype: gl.constexpr, CHEAP_CAST: gl.constexpr):
  """Weights as the right operand: in the lanes that have them."""
  return gl.convert_layout(cast(p, dtype, CHEAP_CAST),
                           gl.DotOperandLayout(1, p.type.layout, 4))


@gluon.jit
def places(stride, left, N: gl.constexpr, COLS: gl.constexpr,
           LAYOUT: gl.constexpr):
  """Where a tile's elements lie; of rows behind the last one, that one's."""
  row = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
  col = gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
  return gl.minimum(row, left - 1)[:, None] * stride + col[None, :]


@gluon.constexpr_function
def whole(columns):
  """The power of two that holds so many: layouts have no other sizes."""
  return 1 << (columns - 1).bit_length()


@gluon.jit
def inside(at, first, columns):
  """Which of a tile's elements, whose columns count from `first`, are of a
  head of so many."""
  col = gl.arange(0, at.shape[1], gl.SliceLayout(0, at.type.layout))
  return (col < columns - first)[None, :]


@gluon.jit
def columns(ptr, stride, left, HEAD: gl.constexpr, S: gl.constexpr, cols=0,
            CUT: gl.constexpr = False):
  """Rows of memory in parts, each the right operand of a product; if CUT, of
  so many columns, with zeros behind them."""
  WAVES: gl.constexpr = gl.num_warps()
  N: gl.constexpr = PART * WAVES
  COLS: gl.constexpr = whole(HEAD)
  LOADED: gl.constexpr = gl.BlockedLayout(
      [1, 8], [512 // COLS, COLS // 8], [WAVES, 1], [1, 0])
  at = places(stride, left, N, COLS, LOADED)
  if CUT:
    loaded = buffer_load(ptr, at, mask=inside(at, 0, cols))
  else:
    loaded = buffer_load(ptr, at)
  smem = gl.allocate_shared_memory(
      ptr.dtype.element_ty, [N, COLS],
      gl.SwizzledSharedLayout(8, 1, COLS // 8, [1, 0]), loaded)
  x = smem.permute([1, 0]).load(gl.DotOperandLayout(1, S, 8))
  operands = ()
  for i in gl.static_range(HEAD // PART):
    operands = operands + (part_of(x, [PART, N], [i * PART, 0]),)
  return operands


@gluon.jit
def write(ptr, stride, x, rows, cols=0, CUT: gl.constexpr = False):
  """Columns in parts, as rows of memory; if CUT, so many.

  They are turned by way of LDS: lanes have 8 bytes of a row, and memory takes
  16 as slowly as 64, which is a row of a part.
  """
  ROWS: gl.constexpr = gl.BlockedLayout(
      [1, 8], [512 // PART, PART // 8], [gl.num_warps(), 1], [1, 0])
  row = gl.arange(0, x[0].shape[1], gl.SliceLayout(1, ROWS))[:, None]
  at = row * stride + gl.arange(0, PART, gl.SliceLayout(0, ROWS))[None, :]
  for i in gl.static_range(len(x)):
    there = row < rows
    if CUT:
      there &= inside(at, i * PART, cols)
    gl.store(ptr + (at + i * PART),
             gl.convert_layout(x[i].permute([1, 0]), ROWS), mask=there)


@gluon.jit
def philox(words, ROUNDS: gl.constexpr):
  """So many of scores.keep_scale's ten rounds: words and keys after them."""
  w0, w1, w2, w3, key0, key1 = words
  for _ in gl.static_range(ROUNDS):
    high0, low0 = mul_hi_lo(w0, 0xD2511F53)
    high2, low2 = mul_hi_lo(w2, 0xCD9E8D57)
    w0 = high2 ^ w1 ^ key0
    w2 = high0 ^ w3 ^ key1
    w1 = low2
    w3 = low0
    key0 += 0x9E3779B9
    key1 += 0xBB67AE85
  return w0, w1, w2, w3, key0, key1


@gluon.jit
def tile_at(step, steps, edges):
  """The tile of a step: first those that all columns see, then the others."""
  low, full_low, full_high = edges
  at = gl.minimum(step, steps - 1) - (full_high - full_low)
  after = gl.where(at < full_low - low, low, full_high - (full_low - low)) + at
  return gl.where(at < 0, full_high + at, after)
