# SPDX-License-Identifier: Apache-2.0
"""Matrices in two parts by columns, for Hopper kernels in Gluon.

A head dim is a power of two or a sum of two, 96 = 64 + 32: a matrix has a main
part and a tail, and a product over or onto its columns is two. TMA fills what a
head dim leaves of the two with zeros. TAIL = 0: there is no tail.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from third_party.aiter.aot.family import TensorMap
from third_party.aiter.kernels.core import hopper


class Parts(NamedTuple):
  """A matrix's main part and tail: TMA maps, buffers or accumulators.

  Without a tail the second is of no meaning.
  """
  main: tl.tensor
  tail: tl.tensor


class Source(NamedTuple):
  """TMA maps of a matrix's parts, and the column at which boxes begin."""
  main: tl.tensor
  tail: tl.tensor
  first: tl.tensor


@gluon.jit
def lead(offset, hdim):
  """How many columns boxes of a head begin before its own: 0 or 8.

  TMA copies rows that begin in the middle of 32 bytes, which the L2 reads at
  once, more slowly. Every other head's do where a head has an odd multiple of 8
  columns, whose boxes have room for 8 more: zeros, as they are before the
  head's first one. offset: elements before the head.
  """
  return (offset.to(gl.int32) & hdim) // 8 % 2 * 8


def tensor_map(tensor, rows, width, tail):
  """TMA maps {NAME_desc, NAME_tail} of views [batch, head, row, dim]."""
  return {
      f"{tensor}_{name}": TensorMap(
          tensor, (1, 1, rows, part), swizzle=min(2 * part, 128))
      if part else None
      for name, part in (("desc", width), ("tail", tail))}


@gluon.jit
def allocate(count: gl.constexpr, desc, TAIL: gl.constexpr):
  """Shared memory for `count` boxes of both parts of a matrix."""
  main = gl.allocate_shared_memory(
      desc.main.dtype, hopper.stack(count, desc.main.block_type.shape),
      desc.main.layout)
  tail = main
  if TAIL > 0:
    tail = gl.allocate_shared_memory(
        desc.tail.dtype, hopper.stack(count, desc.tail.block_type.shape),
        desc.tail.layout)
  return Parts(main, tail)


@gluon.jit
def load(desc, batch, head, row, barrier, smem, i, HEAD: gl.constexpr,
         TAIL: gl.constexpr):
  """Copies a box of rows by TMA; arrives at `barrier` once."""
  if TAIL > 0:
    mbarrier.expect(barrier,
                    desc.main.nbytes_per_cta + desc.tail.nbytes_per_cta)
  else:
    mbarrier.expect(barrier, desc.main.nbytes_per_cta)
  tma.async_load(desc.main, [batch, head, row, desc.first], barrier,
                 smem.main.index(i))
  if TAIL > 0:
    tma.async_load(desc.tail, [batch, head, row, desc.first + HEAD], barrier,
                   smem.tail.index(i))


@gluon.jit
def copy_rows(base, stride, smem, i, count, first_row, hdim, shown,
              N: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr,
              SHOWN: gl.constexpr):
  """hopper.copy_rows of both parts of a tile."""
  hopper.copy_rows(base, stride, smem.main.index(i), count, first_row, hdim,
                   shown, N, HEAD, SHOWN)
  if TAIL > 0:
    hopper.copy_rows(base + HEAD, stride, smem.tail.index(i), count, first_row,
                     hdim - HEAD, shown, N, TAIL, SHOWN)


@gluon.jit
def tile(smem, i, ROWS: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr):
  """The i-th box of a ring of buffers, as matrices."""
  main = smem.main.index(i).reshape([ROWS, HEAD])
  tail = main
  if TAIL > 0:
    tail = smem.tail.index(i).reshape([ROWS, TAIL])
  return Parts(main, tail)


@gluon.jit
def product(a, b, M: gl.constexpr, N: gl.constexpr, TAIL: gl.constexpr):
  """Starts a b^T, [M, N], of two matrices in shared memory."""
  zero = gl.zeros([M, N], gl.float32, hopper.accumulator(N))
  s = warpgroup_mma(a.main, b.main.permute([1, 0]), zero, use_acc=False,
                    is_async=True)
  if TAIL > 0:
    s = warpgroup_mma(a.tail, b.tail.permute([1, 0]), s, is_async=True)
  return s


@gluon.jit
def operand(x, dtype: gl.constexpr, N: gl.constexpr):
  """Scores as the left operand of a product onto N columns."""
  return gl.convert_layout(
      x.to(dtype), gl.DotOperandLayout(0, hopper.accumulator(N), 2))


@gluon.jit
def zeros(M: gl.constexpr, HEAD: gl.constexpr, TAIL: gl.constexpr):
  """An accumulator [M, HEAD + TAIL]."""
  main = gl.zeros([M, HEAD], gl.float32, hopper.accumulator(HEAD))
  tail = gl.to_tensor(0)
  if TAIL > 0:
    tail = gl.zeros([M, TAIL], gl.float32, hopper.accumulator(TAIL))
  return Parts(main, tail)


@gluon.jit
def accumulate(acc, p, b, TAIL: gl.constexpr):
  """Starts acc += p b; p is an `operand`, b lies in shared memory."""
  main = warpgroup_mma(p, b.main, acc.main, is_async=True)
  tail = acc.tail
  if TAIL > 0:
    p = gl.convert_layout(
        p, gl.DotOperandLayout(0, hopper.accumulator(TAIL), 2))
    tail = warpgroup_mma(p, b.tail, tail, is_async=True)
  return Parts(main, tail)


@gluon.jit
def wait(pending: gl.constexpr, acc, TAIL: gl.constexpr):
  """Waits for an accumulator: until `pending` later products are under way."""
  if TAIL > 0:
    main, tail = warpgroup_mma_wait(pending, deps=[acc.main, acc.tail])
    acc = Parts(main, tail)
  else:
    acc = Parts(warpgroup_mma_wait(pending, deps=[acc.main]), acc.tail)
  return acc


@gluon.jit
def _scale_part(part, rows, N: gl.constexpr):
  LAYOUT: gl.constexpr = gl.SliceLayout(1, hopper.accumulator(N))
  return part * gl.convert_layout(rows, LAYOUT)[:, None]


@gluon.jit
def scale_rows(acc, rows, HEAD: gl.constexpr, TAIL: gl.constexpr):
  """acc * rows[:, None]."""
  tail = acc.tail
  if TAIL > 0:
    tail = _scale_part(tail, rows, TAIL)
  return Parts(_scale_part(acc.main, rows, HEAD), tail)


@gluon.jit
def _store_part(base, stride, part, live, row0, row_end, first, hdim,
                N: gl.constexpr):
  STORE: gl.constexpr = hopper.rows_layout(N)
  live = gl.convert_layout(live, gl.SliceLayout(1, hopper.accumulator(N)))
  part = gl.where((live != 0)[:, None], part, 0.0)
  part = gl.convert_layout(part.to(base.dtype.element_ty), STORE)
  rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
  cols = gl.arange(0, N, gl.SliceLayout(0, STORE))
  # Head dims are multiples of 8; so a mask never cuts 16 bytes.
  mask = (rows < row_end)[:, None] & (
      (cols >= first) & (cols < hdim // 8 * 8))[None, :]
  gl.store(base + rows[:, None].to(gl.int64) * stride + cols[None, :], part,
           mask=mask)


@gluon.jit
def store(base, stride, acc, live, row0, row_end, first, hdim,
          HEAD: gl.constexpr, TAIL: gl.constexpr):
  """Stores 64 rows, those before row_end; 0 where a row is not `live`.

  Columns [first, first + hdim) of acc.
  """
  live = live.to(gl.int32)
  base -= first
  hdim += first
  _store_part(base, stride, acc.main, live, row0, row_end, first, hdim, HEAD)
  if TAIL > 0:
    _store_part(base + HEAD, stride, acc.tail, live, row0, row_end,
                first - HEAD, hdim - HEAD, TAIL)
