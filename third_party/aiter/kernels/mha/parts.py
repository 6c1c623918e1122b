# SPDX-License-Identifier: Apache-2.0
"""Tiles of a head, whose columns are a power of two and perhaps a rest.

96 columns are 64 and 32: two products, and no column of zeros between.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from third_party.aiter.kernels.core import tiles


class Parts(NamedTuple):
  """A tile whose columns are a power of two and perhaps a rest, another.

  Without a rest nothing reads the tail.
  """
  main: tl.tensor
  tail: tl.tensor


@triton.jit
def load(
    ptr, stride, rows, cols, ROWS: tl.constexpr, MAIN: tl.constexpr,
    TAIL: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr,
):
  """tiles.load_tile of MAIN + TAIL columns."""
  main = tiles.load_tile(
      ptr, stride, rows, cols, ROWS, MAIN, CHECK_ROWS, CHECK_COLS)
  tail = main
  if TAIL > 0:
    tail = tiles.load_tile(
        ptr + MAIN, stride, rows, cols - MAIN, ROWS, TAIL, CHECK_ROWS,
        CHECK_COLS)
  return Parts(main, tail)


@triton.jit
def _load_shown(
    ptr, stride, shown, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
  r = tl.arange(0, ROWS)[:, None]
  c = tl.arange(0, COLS)[None, :]
  return tl.load(
      ptr + (r * stride + c), mask=shown[:, None] & (c < cols), other=0.0)


@triton.jit
def load_shown(
    ptr, stride, shown, cols, ROWS: tl.constexpr, MAIN: tl.constexpr,
    TAIL: tl.constexpr,
):
  """Parts whose rows read as zero but where they are shown."""
  main = _load_shown(ptr, stride, shown, cols, ROWS, MAIN)
  tail = main
  if TAIL > 0:
    tail = _load_shown(ptr + MAIN, stride, shown, cols - MAIN, ROWS, TAIL)
  return Parts(main, tail)


@triton.jit
def zeros(ROWS: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
  """float32 Parts to add to."""
  return Parts(
      tl.zeros([ROWS, MAIN], tl.float32),
      tl.zeros([ROWS, TAIL if TAIL > 0 else 16], tl.float32))


@triton.jit
def product(a, b, TAIL: tl.constexpr):
  """a b^T of two Parts."""
  result = tl.dot(a.main, tl.trans(b.main))
  if TAIL > 0:
    result = tl.dot(a.tail, tl.trans(b.tail), result)
  return result


@triton.jit
def accumulate(total, a, b, TAIL: tl.constexpr):
  """The Parts total + a b; a is a tile, b has Parts."""
  main = tl.dot(a, b.main, total.main)
  tail = total.tail
  if TAIL > 0:
    tail = tl.dot(a, b.tail, tail)
  return Parts(main, tail)


@triton.jit
def times(parts, factor, TAIL: tl.constexpr):
  """Parts with their rows multiplied; factor is [rows, 1] or a number."""
  tail = parts.tail
  if TAIL > 0:
    tail = tail * factor
  return Parts(parts.main * factor, tail)


@triton.jit
def store(
    ptr, parts, live, stride, rows, cols, ROWS: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr,
):
  """tiles.store_tile of Parts, with zeros in the rows that are not live."""
  tiles.store_tile(
      ptr, tl.where(live[:, None], parts.main, 0.0), stride, rows, cols, ROWS,
      MAIN)
  if TAIL > 0:
    tiles.store_tile(
        ptr + MAIN, tl.where(live[:, None], parts.tail, 0.0), stride, rows,
        cols - MAIN, ROWS, TAIL)
