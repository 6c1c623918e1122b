# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of heads that are turned in part, by halves.

What is computed is what rotate.py says, of heads of any number of channels of
which any part is two halves of pairs. As in whole.py a program is short and
threads follow each other as memory does: a thread has RUN pairs, or two runs of
RUN channels that are copied. All of them do the same, so that none waits for
another, and what is copied is chosen at the end.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.rope import rotate, whole

F32_TABLES = rotate.F32_TABLES
TRANSPOSED = rotate.TRANSPOSED
row_of = whole._row_of
runs_of = whole._runs_of
turn = rotate._turn


@triton.jit
def _load(table, table_f32, at, mask, flags):
  """Of a table's rows what is turned by, in float32."""
  if flags & F32_TABLES:
    t = tl.load(table_f32 + at, mask, 0.0)
  else:
    t = tl.load(table + at, mask, 0.0).to(tl.float32)
  return t


@triton.jit
def rope_rotate(x, y, cos, sin, cos_f32, sin_f32, positions, x_out, y_out,
                tokens, seqlen, inner, heads_x, heads_y, dim, pairs, first,
                table_rows, flags,
                TILE_M: tl.constexpr, RUN: tl.constexpr, FLAGS: tl.constexpr):
  """As rotate.rope_rotate, of calls that ask for nothing else.

  TILE_M: pairs or twos of channels of a program. RUN divides dim, pairs and
  first.
  """
  flags &= FLAGS
  runs = tl.cdiv(dim, 2 * RUN)  # Of a head.
  src, out, heads, run = runs_of(x, y, x_out, y_out, tokens, heads_x, heads_y,
                                 runs, TILE_M // RUN)
  inside = run < tokens * heads * runs
  row = (run.to(tl.uint32) // runs.to(tl.uint32)).to(tl.int32)
  j = (run - row * runs) * RUN
  turned = j < pairs
  # What is copied has halves, too, of which the second may be a run shorter.
  copied = dim - 2 * pairs
  k1 = j - pairs
  k2 = k1 + tl.cdiv(copied, 2 * RUN) * RUN
  has2 = inside & (turned | (k2 < copied))
  c1 = tl.where(k1 < first, k1, k1 + 2 * pairs)
  c2 = tl.where(k2 < first, k2, k2 + 2 * pairs)
  # Hints that the compiler loses in a function of their own.
  c1 = tl.multiple_of(tl.where(turned, first + j, c1), RUN)
  c2 = tl.multiple_of(tl.where(turned, first + pairs + j, c2), RUN)
  j = tl.multiple_of(tl.where(turned, j, 0), RUN)
  i = tl.arange(0, RUN)[None, :]
  at1 = (row * dim + c1)[:, None] + i
  at2 = (row * dim + c2)[:, None] + i
  x1 = tl.load(src + at1, inside[:, None], 0.0)
  x2 = tl.load(src + at2, has2[:, None], 0.0)
  t = (row.to(tl.uint32) // heads.to(tl.uint32)).to(tl.int32)
  r = row_of(t, positions, inside, seqlen, inner, table_rows, flags)
  own = (r * pairs + j)[:, None] + i
  is_turned = turned[:, None]
  u = _load(cos, cos_f32, own, is_turned, flags)
  v = _load(sin, sin_f32, own, is_turned, flags)
  v = tl.where((flags & TRANSPOSED) != 0, -v, v)
  o1, o2 = turn(x1, x2, u, u, v, v)
  o1 = tl.where(is_turned, o1.to(out.dtype.element_ty), x1)
  o2 = tl.where(is_turned, o2.to(out.dtype.element_ty), x2)
  tl.store(out + at1, o1, inside[:, None])
  tl.store(out + at2, o2, has2[:, None])
