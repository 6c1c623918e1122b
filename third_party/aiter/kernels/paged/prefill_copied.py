# SPDX-License-Identifier: Apache-2.0
"""prefill_mfma.py's walk over keys for gfx950, which copies them to LDS.

A step's parts are mha/fwd_mfma.py's for gfx950, which says what stands where
and why. A wave copies BOX neighbouring keys of a tile, and their values. These
lie in one page, so that scalar instructions find their address, of 64 bits, and
what lanes add to it stays the same. A page is looked up a step before its keys
are copied, and two before its values are: the wait for copies is for it too.

Keys of a wave lie in LDS in order. A lane copies 8 columns from where a swizzle
would have them: they are read without conflicts all the same.

Tiles that all rows see come first, in a loop that looks at nothing else.
Another takes the rest, or all if some keys are in no page: it hides keys, and
has zeros for values that are not there.

Of 128 columns in caches of 16 bits that are not shuffled, with nothing that
changes scores but a window.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy
from triton.experimental.gluon.language.amd.hint import sched_barrier

from third_party.aiter.kernels.mha import fwd_mfma, parts_mfma
from third_party.aiter.kernels.paged import pages_mfma

PART = parts_mfma.PART
# Of a head of 128 columns.
PARTS = gl.constexpr(4)
# Keys of a tile that a wave copies.
BOX = gl.constexpr(16)
# So many elements are 2 GiB: behind all of a buffer, which gives zeros there.
BEYOND = gl.constexpr(1 << 30)


@gluon.jit
def _of_wave(x):
  """A number that all lanes of a wave have. For Triton it is a scalar, though
  other waves have others: it must be in addresses alone, and in no branch."""
  return gl.inline_asm("v_readfirstlane_b32 $0, $1", "=s,v", (x,), gl.int32,
                       is_pure=True)


@gluon.jit
def _look(pages_of, tile, own, stop, TILE_N: gl.constexpr, FLAGS: gl.constexpr):
  """Begins to load what the table has for a wave's keys of a tile.

  own: the first of these. Behind the last key they are those about that one.

  Returns:
    (entry, place): what comes, and where in its page the first key lies.
  """
  first, pages, paging = pages_of
  key = gl.minimum(tile * TILE_N + own, stop - 1 & -BOX)
  at, place = pages_mfma.place_in(paging, key, FLAGS)
  return gl.load(first + at), place


@gluon.jit
def _is_page(page, pages_of):
  """Whether an entry of the table is a page."""
  return (page >= 0) & (page < pages_of[1])


@gluon.jit
def _address(side, page, place):
  """Where a wave's keys lie."""
  data, page_stride, token_stride, paging = side
  at = page.to(gl.int64) * page_stride + place * token_stride
  return data + gl.multiple_of(at, 8)  # Tokens lie at multiples of 16 bytes.


@gluon.jit
def _copy_keys(side, page, place, pages_of, at, smem):
  """Begins to copy a tile's keys; where there are none any, to be hidden."""
  page = gl.where(_is_page(page, pages_of), page, 0)
  fwd_mfma.copy(_address(side, page, place), at, smem, PARTS)


@gluon.jit
def _copy_values(side, page, place, tile, pages_of, stop, at, smem):
  """As _copy_keys, but zeros: a hidden key's weight is 0, but 0 NaN is NaN."""
  N: gl.constexpr = at.shape[0]
  there = _is_page(page, pages_of)
  page = gl.where(there, page, 0)
  key = gl.arange(0, N, gl.SliceLayout(1, at.type.layout))[:, None]
  shown = key < gl.where(there, stop - tile * N, 0)
  at = gl.where(shown, at, BEYOND)
  at = gl.max_contiguous(gl.multiple_of(at, [1, 8]), [1, 8])
  fwd_mfma.copy(_address(side, page, place), at, smem, PARTS)


@gluon.jit
def _places(stride, N: gl.constexpr, SWIZZLED: gl.constexpr,
            LAYOUT: gl.constexpr):
  """Where a wave's elements lie from its first one."""
  row = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))[:, None]
  col = gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))[None, :]
  if SWIZZLED:
    col = (col // 8 ^ row // 4 % 4) * 8 + col % 8
  at = row % BOX * stride + col
  return gl.max_contiguous(gl.multiple_of(at, [1, 8]), [1, 8])


@gluon.jit
def _tiles(keys, values, slot):
  """A step's keys, as they are read, and the values of the tile before."""
  READ: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 4, [1, 0])
  return keys.index(1 - slot).reinterpret(layout=READ), values.index(slot)


@gluon.jit
def _hide(s, n0, seen, misses, pages_of, stop, FLAGS: gl.constexpr):
  """s, with -inf where a row does not see a key, or there is none."""
  low, high = seen
  key = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))[:, None]
  # Of a key's bits lanes differ in one alone: the others are constants, where
  # a lane would keep a register for each of its keys.
  own = n0 + (key & 4)
  key = key & -5
  near = gl.to_tensor(0)
  far = near
  if misses:
    near = pages_mfma.pages_at(pages_of, n0, stop, FLAGS)
    far = pages_mfma.pages_at(pages_of, n0 + BOX, stop, FLAGS)
  last = high[None, :] - own
  # Of an absent page no key is seen.
  last = gl.where(gl.where(key < BOX, near, far) >= 0, last, -1)
  shown = (key >= low[None, :] - own) & (key <= last)
  return gl.where(shown, s, float("-inf"))


@gluon.jit
def attend(
    sums, q, k, v, pages_of, stop, seen, edges, scale,
    dtype: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    S: gl.constexpr, FLAGS: gl.constexpr
):
  """m, l and acc of all tiles.

  Args:
    q: arguments of pages_mfma.queries, but for S.
    seen: the first and the last key that each row sees.
    edges: (low, full_low, full_high, high): the first tile, the first that all
      rows see, the first one behind those, and the first behind all.
  """
  m, l, acc = sums
  low, full_low, full_high, high = edges
  steps = high - low
  full = full_high - full_low
  edges = low, full_low, full_high
  HALF: gl.constexpr = TILE_N // 2
  COPIED: gl.constexpr = parts_mfma.copied(TILE_N, (1, 2, 4, 8), (16, 32))
  own = _of_wave(gl.arange(0, TILE_N, gl.SliceLayout(1, COPIED)) & -BOX)
  k_at = _places(k[2], TILE_N, True, COPIED)
  v_at = _places(v[2], TILE_N, False, COPIED)
  tile = parts_mfma.tile_at(0, steps, edges)
  following = parts_mfma.tile_at(1, steps, edges)
  after = parts_mfma.tile_at(2, steps, edges)
  page0, place0 = _look(pages_of, tile, own, stop, TILE_N, FLAGS)
  page1, place1 = _look(pages_of, following, own, stop, TILE_N, FLAGS)
  page, place = _look(pages_of, after, own, stop, TILE_N, FLAGS)
  entry, then = _look(pages_of, parts_mfma.tile_at(3, steps, edges), own, stop,
                      TILE_N, FLAGS)
  misses = pages_mfma.misses(pages_of, low * TILE_N, stop, pages_mfma.LOOKS,
                             FLAGS)
  if misses:
    full = 0
  page0 = pages_mfma.one(page0)
  page1 = pages_mfma.one(page1)
  page = pages_mfma.one(page)
  WRITTEN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
  keys = gl.allocate_shared_memory(dtype, [2, PARTS * TILE_N, PART], WRITTEN)
  _copy_keys(k, page0, place0, pages_of, k_at, keys.index(0))
  _copy_keys(k, page1, place1, pages_of, k_at, keys.index(1))
  async_copy.commit_group()
  # By way of LDS, where values are later.
  q = pages_mfma.queries(q[0], q[1], S)
  values = gl.allocate_shared_memory(dtype, [2, PARTS * TILE_N, PART], WRITTEN)
  _copy_values(v, page0, place0, tile, pages_of, stop, v_at, values.index(0))
  async_copy.commit_group()
  async_copy.wait_group(1)
  zero = gl.zeros([HALF, TILE_M], gl.float32, S)
  first, _ = _tiles(keys, values, 1)
  s0, s1 = fwd_mfma.first_scores(first, q, zero, zero, S)
  n0 = tile * TILE_N
  s0 = _hide(s0, n0, seen, misses, pages_of, stop, FLAGS)
  s1 = _hide(s1, n0 + HALF, seen, misses, pages_of, stop, FLAGS)
  m, alpha = parts_mfma.largest(gl.maximum(s0, s1), m, scale)
  async_copy.wait_group(0)
  _copy_keys(k, page, place, pages_of, k_at, keys.index(0))
  _copy_values(v, page1, place1, following, pages_of, stop, v_at,
               values.index(1))
  async_copy.commit_group()
  slot = 0
  ahead, w = fwd_mfma.begin(_tiles(keys, values, slot), s0, s1, m, scale,
                            PARTS, S)
  # What these steps copy, keys three tiles behind and values two, is of tiles
  # that all rows see, which follow each other.
  inside = gl.maximum(full - 3, 0)
  for part in gl.static_range(2):
    if part == 1:
      following = parts_mfma.tile_at(inside + 1, steps, edges)
      after = parts_mfma.tile_at(inside + 2, steps, edges)
      entry, then = _look(
          pages_of, parts_mfma.tile_at(inside + 3, steps, edges), own, stop,
          TILE_N, FLAGS)
    for step in range(inside * part, inside if part == 0 else steps - 1):
      tiles = _tiles(keys, values, slot)
      x, s0, s1, p, l, acc = fwd_mfma.score(
          ahead, tiles, q, w, alpha, l, acc, dtype, S)
      if part == 1:
        if step + 1 >= full:
          n0 = following * TILE_N
          s0 = _hide(s0, n0, seen, misses, pages_of, stop, FLAGS)
          s1 = _hide(s1, n0 + HALF, seen, misses, pages_of, stop, FLAGS)
      x, w, m, alpha, acc = fwd_mfma.weigh(
          x, tiles, s0, s1, p, m, acc, scale, S)
      # Where the keys lie that this step copies, and the values.
      v_page = page
      v_place = place
      page = pages_mfma.one(entry)
      place = then
      if part == 0:
        k_ptr = _address(k, page, place)
        v_ptr = _address(v, v_page, v_place)
      sched_barrier()
      if part == 1:
        following = after
        after = parts_mfma.tile_at(step + 3, steps, edges)
      # Nobody reads this step's tiles any more, and what the next one reads was
      # copied since the one before.
      async_copy.wait_group(0)
      entry, then = _look(
          pages_of, full_low + step + 4 if part == 0 else parts_mfma.tile_at(
              step + 4, steps, edges), own, stop, TILE_N, FLAGS)
      if part == 0:
        fwd_mfma.copy(k_ptr, k_at, keys.index(1 - slot), PARTS)
      else:
        _copy_keys(k, page, place, pages_of, k_at, keys.index(1 - slot))
      tiles = _tiles(keys, values, 1 - slot)
      ahead, w, acc = fwd_mfma.weigh_rest(x, tiles, w, p, acc, PARTS, S)
      if part == 0:
        fwd_mfma.copy(v_ptr, v_at, values.index(slot), PARTS)
      else:
        _copy_values(v, v_page, v_place, following, pages_of, stop, v_at,
                     values.index(slot))
      async_copy.commit_group()
      acc = fwd_mfma.weigh_last(x, p, acc)
      slot = 1 - slot
  async_copy.wait_group(0)
  l, acc = fwd_mfma.finish(values.index(slot), w, alpha, l, acc, dtype, S)
  return m, l, acc
