# SPDX-License-Identifier: Apache-2.0
"""How a tile of keys or values comes from small pages on Hopper, box by box.

A box is of tokens in one page, with all their columns, which are whole runs of
128 bytes: a map divides tokens by eight, so that a run of eight tokens is
followed by their next one, then by the next eight.

Small pages have many boxes, and asking for one takes instructions that others
wait for. So a lane of a warp finds where a box is, and one lane asks for it; of
several warps each has its own boxes.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.paged import attend
from third_party.aiter.kernels.paged import prefill_hopper as prefill

# Parameters that a map of five dimensions is: itself, sizes and strides.
_OF_MAP = 11
_TAIL = ".tile.mbarrier::complete_tx::bytes"


class Half(NamedTuple):
  """A ring of tiles of keys or values, their barriers, and steps of eight
  tokens of the map from page to page."""
  ring: tl.tensor
  full: tl.tensor
  eights: tl.tensor


@gluon.constexpr_function
def divided(box, flags):
  """Whether a cache of the queries' type has such boxes of so many tokens."""
  return box < 64 and not flags & (attend.SHUFFLED.value | attend.PARTIAL.value)


def tensor_maps(function, constants):
  """Maps [head, eight tokens, 64 columns, token, column] by argument, of which
  keys' is a kernel's first, and values' its second."""
  assert function == "paged_attend", function
  cols = prefill.COLS.value
  block = 1, constants["BOX"] // 8, constants["HEAD"] // cols, 8, cols
  return {f"{side}_desc": TensorMap(side, block, "dtype", swizzle=2 * cols)
          for side in "kv"}


@gluon.constexpr_function
def arrivals(boxes, warps):
  """How often those who ask for a tile's boxes arrive at its barrier."""
  return min(boxes, warps)


@gluon.constexpr_function
def _turns(boxes, warps):
  """Boxes that each of several warps has; a lone one's lanes have one each."""
  return 1 if warps == 1 else -(-boxes // warps)


@gluon.constexpr_function
def _copy_text(map_, boxes, size, warps, cut):
  """Instructions that start to copy boxes of so many bytes.

  Operands: where the first goes, the barrier, the head, whether at all; which
  eight tokens boxes begin with, of a lone warp's lanes or of a warp's own
  boxes; and, if one may be `cut`, whether a box is wanted, likewise.
  """
  given = _turns(boxes, warps)
  own = boxes if warps == 1 else given
  begins = [f"${4 + i}" for i in range(given)]
  wanted = [f"${4 + given + i}" for i in range(given)]
  shared = ""
  if warps == 1:
    of_lane = lambda to, x: "".join(
        f"shfl.sync.idx.b32 {to}{i}, {x}, {i}, 31, -1;\n" for i in range(boxes))
    shared = of_lane("at", begins[0])
    begins = [f"at{i}" for i in range(boxes)]
    if cut:
      shared += of_lane("keep", wanted[0])
      wanted = [f"keep{i}" for i in range(boxes)]
  counted = f"mov.b32 bytes, {own};"
  if cut:
    counted = "mov.b32 bytes, 0;" + "".join(
        f"add.u32 bytes, bytes, {wanted[i]};\n" for i in range(own))
  copies = "".join(f"""
    {f"setp.ne.u32 one, {wanted[i]}, 0; @one" if cut else ""}
    cp.async.bulk.tensor.5d.shared::cluster.global{_TAIL}
        [to + {i * warps * size}], [map, {{0, 0, 0, {begins[i]}, $2}}], [$1];"""
                   for i in range(own))
  return f"""{{
    .reg .pred one;
    .reg .b32 warp, to, bytes, at<{boxes}>, keep<{boxes}>;
    .reg .b64 map;
    mov.u32 warp, {"0" if warps == 1 else "%tid.x"};
    shr.u32 warp, warp, 5;
    setp.ge.u32 one, warp, {boxes};
    setp.eq.or.u32 one, $3, 0, one;
    @one bra passed;
    {shared}
    elect.sync _|one, -1;
    @!one bra passed;
    mad.lo.u32 to, warp, {size}, $0;
    mov.b64 map, KERNEL_param_{_OF_MAP * map_};
    cvta.param.u64 map, map;
    {counted}
    mul.lo.u32 bytes, bytes, {size};
    mbarrier.arrive.expect_tx.shared.b64 _, [$1], bytes;
    {copies}
    passed:
  }}"""


@gluon.jit
def _own(i: gl.constexpr, BOXES: gl.constexpr):
  """The box of a lone warp's lanes, or the i-th of each of several warps."""
  WARPS: gl.constexpr = gl.num_warps()
  lane = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
  if WARPS == 1:
    own = lane % BOXES
  else:
    own = gl.minimum(i * WARPS + lane // 32, BOXES - 1)
  return own


@gluon.jit
def boxes_at(table, paging, first, stop, N: gl.constexpr, BOX: gl.constexpr):
  """(page, place) of boxes of a tile from key `first` on, as `copy` takes them.

  The page is outside of the map where there is none, or no key.
  """
  boxes = ()
  for i in gl.static_range(_turns(N // BOX, gl.num_warps())):
    key = first + _own(i, N // BOX) * BOX
    # PagedParams says why this is a division.
    wide = (2 * key).to(gl.uint32).to(gl.uint64)
    wide *= paging.factor.to(gl.uint32, bitcast=True).to(gl.uint64)
    entry = (wide >> 32).to(gl.int32) >> paging.shift
    page = gl.load(table.first + entry, mask=key < stop, other=-1)
    boxes = boxes + (gl.minimum(gl.maximum(page, -1), table.pages),
                     key - entry * table.page_size)
  return boxes


@gluon.constexpr_function
def _operands(count):
  return ",".join(["r"] * count)


@gluon.jit
def copy(MAP: gl.constexpr, half, i, head, boxes, wanted, BOX: gl.constexpr,
         CUT: gl.constexpr):
  """Starts to copy the i-th tile's boxes, if they are wanted.

  A barrier has to be before it, behind which nobody reads what was there.
  CUT: a bit each says which are; one may not be.
  """
  WARPS: gl.constexpr = gl.num_warps()
  COUNT: gl.constexpr = half.ring.shape[1] // BOX
  begins = ()
  keep = ()
  for j in gl.static_range(_turns(COUNT, WARPS)):
    begins = begins + (boxes[2 * j] * half.eights + (boxes[2 * j + 1] >> 3),)
    if CUT:
      keep = keep + ((wanted >> _own(j, COUNT)) & 1,)
  start = gl.to_tensor(1) if CUT else wanted
  gl.inline_asm(
      _copy_text(MAP, COUNT, BOX * half.ring.shape[2] * 2, WARPS, CUT),
      _operands(4 + len(begins) + len(keep)),
      (half.ring.index(i), half.full.index(i), head, start) + begins + keep,
      is_pure=False)


@gluon.jit
def copy_values(half, i, values, table, head, boxes, first, stop, length,
                BOX: gl.constexpr):
  """`copy` of values, of which the sequence's end may cut a box.

  What lies behind the last key may be NaN, and 0 * NaN is NaN.
  """
  N: gl.constexpr = half.ring.shape[1]
  HEAD: gl.constexpr = half.ring.shape[2]
  cut = stop // BOX * BOX
  if (stop > gl.maximum(cut, first)) & (cut < first + N) & (length < cut + BOX):
    prefill.copy_cut(values, table, i, cut, stop, N, HEAD, BOX)
    copy(1, half, i, head, boxes,
         ((1 << N // BOX) - 1) - (1 << (cut - first) // BOX), BOX, True)
  else:
    copy(1, half, i, head, boxes, gl.to_tensor(1), BOX, False)
