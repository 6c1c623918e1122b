# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of whole heads, whose halves are the pairs.

What is computed is what rotate.py says, of heads of 2 * PAIRS channels. A
thread has eight pairs, or four where halves do not begin at 16 bytes, and
threads follow each other as memory does: a program is short, for what a device
waits for at a launch's begin and end is a program's length. What it needs of
the tables lies in the L1 for the heads of a token.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.rope import rotate

F32_TABLES = rotate.F32_TABLES
FULL = rotate.FULL
PER_TOKEN = rotate.PER_TOKEN
POSITIONS = rotate.POSITIONS
TRANSPOSED = rotate.TRANSPOSED
adjoint = rotate._adjoint
turn = rotate._turn


@triton.jit
def _runs_of(x, y, x_out, y_out, tokens, heads_x, heads_y, runs,
             BLOCK: tl.constexpr):
  """(source, result, heads, runs) of a program: BLOCK of one tensor's runs.

  runs: of a head.
  """
  block = tl.program_id(0)
  blocks_x = tl.cdiv(tokens * heads_x * runs, BLOCK)
  if block < blocks_x:
    src = x
    out = x_out
    heads = heads_x
  else:
    src = y
    out = y_out
    heads = heads_y
    block -= blocks_x
  return src, out, heads, block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _row_of(t, positions, inside, seqlen, inner, table_rows, flags):
  """The tables' row for tokens t; one out of range is the nearest one."""
  if flags & POSITIONS:
    r = tl.load(positions + t, inside, 0)
  elif flags & PER_TOKEN:
    r = t
  else:
    r = t.to(tl.uint32)
    if inner > 1:
      r //= inner.to(tl.uint32)
    r = (r % seqlen.to(tl.uint32)).to(tl.int32)
  return tl.minimum(tl.maximum(r, 0), table_rows - 1)


@triton.jit
def _load(cos, sin, cos_f32, sin_f32, at, flags):
  """(cosines, sines) in float32."""
  if flags & F32_TABLES:
    u = tl.load(cos_f32 + at)
    v = tl.load(sin_f32 + at)
  else:
    u = tl.load(cos + at).to(tl.float32)
    v = tl.load(sin + at).to(tl.float32)
  return u, v


@triton.jit
def rope_rotate(x, y, cos, sin, cos_f32, sin_f32, positions, x_out, y_out,
                tokens, seqlen, inner, heads_x, heads_y, table_rows, flags,
                TILE_M: tl.constexpr, PAIRS: tl.constexpr,
                FLAGS: tl.constexpr):
  """As rotate.rope_rotate, of calls that ask for nothing else. TILE_M: pairs.

  With FULL among FLAGS tables are full, and without it they are not.
  """
  flags &= FLAGS
  RUN: tl.constexpr = 8 if PAIRS % 8 == 0 else 4
  RUNS: tl.constexpr = PAIRS // RUN  # Of a head.
  src, out, heads, run = _runs_of(x, y, x_out, y_out, tokens, heads_x, heads_y,
                                  RUNS, TILE_M // RUN)
  inside = run < tokens * heads * RUNS
  row = run // RUNS
  j = (run - row * RUNS) * RUN
  c = tl.arange(0, RUN)[None, :]
  at = (row.to(tl.int64) * (2 * PAIRS) + j)[:, None] + c
  x1 = tl.load(src + at, inside[:, None], 0.0)
  x2 = tl.load(src + at + PAIRS, inside[:, None], 0.0)
  t = (row.to(tl.uint32) // heads.to(tl.uint32)).to(tl.int32)
  r = _row_of(t, positions, inside, seqlen, inner, table_rows, flags)
  if FULL & FLAGS:
    own = (r * (2 * PAIRS) + j)[:, None] + c
    cos1, sin1 = _load(cos, sin, cos_f32, sin_f32, own, flags)
    cos2, sin2 = _load(cos, sin, cos_f32, sin_f32, own + PAIRS, flags)
    sin1, sin2 = adjoint(sin1, sin2, flags)
  else:
    own = (r * PAIRS + j)[:, None] + c
    cos1, sin1 = _load(cos, sin, cos_f32, sin_f32, own, flags)
    sin1 = tl.where((flags & TRANSPOSED) != 0, -sin1, sin1)
    cos2 = cos1
    sin2 = sin1
  o1, o2 = turn(x1, x2, cos1, cos2, sin1, sin2)
  tl.store(out + at, o1.to(out.dtype.element_ty), inside[:, None])
  tl.store(out + at + PAIRS, o2.to(out.dtype.element_ty), inside[:, None])
