# SPDX-License-Identifier: Apache-2.0
"""Dropout's mask kept from the forward pass, a bit a score, for Hopper.

To draw a score's bit again takes gradients as long as their products. So where
memory allows, the forward pass writes the bits that it draws, in the order in
which the pass of all gradients (mha_one_pass/hopper.py) wants them: there a
thread has in each of four words, one for 16 rows, a byte of its own.

Kept are words, of a head [tiles of 64 rows, blocks of 128 keys, 2, 4, 2, 4, 4].
Number i, j, k, l of the last four has rows 16 i + 2 l on of a tile and keys
4 j + k on of half a block, and its bit 8 w + 4 h + 2 r + s is that of the row
8 s + r and the key 16 w + 8 h further.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from third_party.aiter.kernels.core import hopper
from third_party.aiter.kernels.mha import scores_hopper

# Words of a tile's 64 keys.
WORDS = tl.constexpr(128)
# Shared by the two files that know how bits are drawn.
_vector = scores_hopper._vector
_row_blocks = scores_hopper._row_blocks


@gluon.constexpr_function
def _swap(lane, bit):
  """Swaps a bit of the lane's number for one of the places in word $0."""
  places = sum(1 << i for i in range(32) if not i & bit)
  return f"""
  shfl.sync.bfly.b32 other, $0, {lane}, 0x1f, 0xffffffff;
  and.b32 mine, lane, {lane};
  setp.ne.b32 odd, mine, 0;
  @odd shr.b32 other, other, {bit};
  @!odd shl.b32 other, other, {bit};
  selp.b32 mine, {places}, {places ^ 0xffffffff}, odd;
  lop3.b32 $0, mine, other, $0, 0xca;"""


# A thread has drawn for one row and 32 keys: of 64 keys a quarter, four of each
# eight. Lanes 1 and 4 apart have rows 8 and 1 apart.
_EXCHANGE = tl.constexpr(f"""{{
  .reg .pred odd;
  .reg .b32 lane, mine, other;
  mov.u32 lane, %laneid;
  mov.b32 $0, $1;{_swap.fn(1, 1)}{_swap.fn(4, 2)}
}}""")


@gluon.jit
def _write(place, words, row0, col0, LAYOUT: gl.constexpr):
  """Writes the draws [64 rows, keys / 64, 2] of a tile, if they are wanted."""
  words = gl.inline_asm_elementwise(_EXCHANGE, "=&r,r", [words], gl.int32,
                                    False, 1)
  row = gl.arange(0, 64, _vector(LAYOUT, 0, 3))[:, None, None]
  half = gl.arange(0, words.shape[1], _vector(LAYOUT, 1, 3))[None, :, None]
  block = gl.arange(0, 2, _vector(LAYOUT, 2, 3))[None, None, :]
  # Where there were rows 8 and 1 apart, there are now keys 1 and 2 apart.
  key = row // 8 % 2 + row % 2 * 2
  at = row // 16 * 32 + block * 16 + key * 4 + row // 2 % 4 + half * WORDS
  ptr = place.ptr.to(gl.pointer_type(gl.int32), bitcast=True)
  ptr += row0 // 64 * place.stride + col0 // 64 * WORDS
  gl.store(ptr + at, words, mask=(at >= 0) & (place.stride > 0))


@gluon.jit
def draw_rows(terms, row0, col0, N: gl.constexpr):
  """scores_hopper.keep_of_rows; what it says is written too, where asked for.

  A call with nothing but dropout has no mask, and terms.mask is the place: its
  stride is that between tiles of rows, in words, or 0 if nobody asks.
  """
  bits = scores_hopper.draw_rows(terms, row0, col0, N)
  if N % 64 == 0:
    _write(terms.mask, bits, row0, col0, gl.SliceLayout(2, _row_blocks(N, 8)))
  return scores_hopper.keep_of_drawn_rows(bits, N)


@gluon.constexpr_function
def _keys_rows():
  """hopper.accumulator(64)'s layout of transposed scores.

  As [w, h, 8 keys, i, s, l, r] of the words above.
  """
  basis = lambda axis, n: [n if i == axis else 0 for i in range(7)]
  return gl.DistributedLinearLayout(
      [basis(6, 1), basis(1, 1), basis(4, 1), basis(3, 1), basis(3, 2)],
      [basis(5, 1), basis(5, 2), basis(2, 1), basis(2, 2), basis(2, 4)],
      [basis(0, 1), basis(0, 2)], [], [4, 2, 8, 4, 2, 4, 2])


@gluon.jit
def allocate(COUNT: gl.constexpr):
  """Shared memory for the words of so many tiles of 64 keys."""
  return gl.allocate_shared_memory(
      gl.int32, hopper.stack(COUNT, [4, 8, 4]),
      gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def keep_of_keys(words):
  """Whether dropout keeps 64 keys of 64 rows, whose words are shared."""
  LAYOUT: gl.constexpr = _keys_rows()
  OF_WORDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(
      4, gl.SliceLayout(6, LAYOUT))))
  words = words.permute([1, 0, 2]).load(OF_WORDS)
  w = gl.arange(0, 4, _vector(LAYOUT, 0, 7))[
      :, None, None, None, None, None, None]
  h = gl.arange(0, 2, _vector(LAYOUT, 1, 7))[
      None, :, None, None, None, None, None]
  s = gl.arange(0, 2, _vector(LAYOUT, 4, 7))[
      None, None, None, None, :, None, None]
  r = gl.arange(0, 2, _vector(LAYOUT, 6, 7))[
      None, None, None, None, None, None, :]
  own = words[None, None, :, :, None, :, None] >> (w * 8)
  keep = own & (1 << (h * 4 + r * 2 + s))
  return gl.convert_layout(keep.reshape([64, 64]), hopper.accumulator(64)) != 0
