# SPDX-License-Identifier: Apache-2.0
"""Tiles in memory: loads, stores, and what rounds them.

A base pointer moves in 64 bits to the first row of a tile; offsets inside a
tile are 32 bits, which holds for row strides below 2^22 elements.
"""

import triton
import triton.language as tl


@triton.jit
def assume_stride(stride):
  """Tells the compiler that offsets in a tile fit 31 bits (buffer loads)."""
  tl.assume(stride >= 0)
  tl.assume(stride < 4194304)


@triton.jit
def load_tile(
    ptr, stride, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr,
):
  """A [ROWS, COLS] tile; what lies past `rows` or `cols` reads as zero."""
  r = tl.arange(0, ROWS)[:, None]
  c = tl.arange(0, COLS)[None, :]
  offsets = r * stride + c
  if CHECK_ROWS and CHECK_COLS:
    return tl.load(ptr + offsets, mask=(r < rows) & (c < cols), other=0.0)
  elif CHECK_ROWS:
    return tl.load(ptr + offsets, mask=r < rows, other=0.0)
  elif CHECK_COLS:
    return tl.load(ptr + offsets, mask=c < cols, other=0.0)
  else:
    return tl.load(ptr + offsets)


@triton.jit
def store_tile(
    ptr, value, stride, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
  """Stores the part of a [ROWS, COLS] tile inside `rows` and `cols`."""
  r = tl.arange(0, ROWS)[:, None]
  c = tl.arange(0, COLS)[None, :]
  tl.store(
      ptr + (r * stride + c), value.to(ptr.dtype.element_ty),
      mask=(r < rows) & (c < cols),
  )


@triton.jit
def load_rows(
    ptr, rows, other, ROWS: tl.constexpr, CHECK: tl.constexpr = True
):
  """ROWS consecutive numbers; those past `rows` read as `other`."""
  r = tl.arange(0, ROWS)
  if CHECK:
    return tl.load(ptr + r, mask=r < rows, other=other)
  else:
    return tl.load(ptr + r)


@triton.jit
def cast(x, dtype: tl.constexpr, CHEAP: tl.constexpr):
  """float32 to the input type.

  CHEAP is for targets without a bfloat16 conversion: it rounds halves away
  from zero (as exact as halves to even, a third of the instructions) and
  expects no NaN but the one that arithmetic makes.
  """
  if CHEAP and dtype == tl.bfloat16:
    bits = (x.to(tl.uint32, bitcast=True) + 0x8000) >> 16
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
  else:
    return x.to(dtype)
