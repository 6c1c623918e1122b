# SPDX-License-Identifier: Apache-2.0
"""Gated activations of rows of any length: tiles are runs of results.

Results lie one behind the other, whichever rows they are of, so no tile is
empty but for the last one. A program takes TILE_N of them, in chunks of WIDTH,
which divides the columns: a chunk is of one row. Which row that is costs a
multiplication, by an inverse of the number of columns.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.activation import rows as act
from third_party.aiter.kernels.core import activations

GATED = act.GATED
PACKED = act.PACKED
SILU = activations.SILU
gradients_of = act.gradients_of
load_dy = act.load_dy
result_of = act.result_of
store = act.store
store_result = act.store_result


@triton.jit
def _quotient(n, inverse, shift):
  """n // cols, of 31 bits: src/activation.cc has the inverse and the shift."""
  high = tl.umulhi(n.to(tl.uint32) << 1, inverse.to(tl.uint32, bitcast=True))
  return (high >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def _where(rows, cols, inverse, shift, TILE_N: tl.constexpr,
           WIDTH: tl.constexpr):
  """Where a program's results are.

  As many tiles as there are columns are TILE_N rows: so a number within them
  has 31 bits, of up to 65536 columns.

  Returns:
    The first result and the first of those rows, in 64 bits; results behind the
    first one; rows behind the first, and columns of a chunk's first result;
    which chunks are there.
  """
  tile = tl.program_id(0)
  turn = _quotient(tile, inverse, shift)
  first = tile.to(tl.int64) * TILE_N
  i = tl.arange(0, TILE_N // WIDTH)
  if WIDTH == 1:
    # Neighbours of a warp store side by side as they load. A thread that stored
    # 16 bytes would have to load eight numbers that lie together, one by one.
    i = tl.max_contiguous(tl.multiple_of(i, 1), 1)
  i = (i * WIDTH)[:, None]
  n = (tile - turn * cols) * TILE_N + i
  r = _quotient(n, inverse, shift)
  inside = i < tl.minimum(rows.to(tl.int64) * cols - first, TILE_N).to(tl.int32)
  return (first, turn.to(tl.int64) * TILE_N, i + tl.arange(0, WIDTH)[None, :],
          r, n - r * cols, inside)


@triton.jit
def _beside(first, first_r, at, r, cols, flags):
  """Offsets of the gate: the first one's, others' behind it; of up behind it.
  """
  packed = ((flags & PACKED) != 0).to(tl.int32) * cols
  return first + first_r * packed, at + r * packed, packed


@triton.jit
def activation_fwd(gate, up, bias, bias_f32, expert_ids, out, out_fp16,
                   out_bf16, out_f32, rows, cols, cols_inverse, cols_shift,
                   experts, activation, alpha, gate_limit, up_limit, flags,
                   TILE_N: tl.constexpr, WIDTH: tl.constexpr,
                   FLAGS: tl.constexpr, ONLY_SILU: tl.constexpr):
  """As activation.activation_fwd."""
  flags &= FLAGS
  if ONLY_SILU:
    activation = SILU
  cols = cols // WIDTH * WIDTH  # For the compiler: WIDTH divides it.
  first, first_r, at, r, c, inside_r = _where(
      rows, cols, cols_inverse, cols_shift, TILE_N, WIDTH)
  base, pair, packed = _beside(first, first_r, at, r, cols, flags)
  inside = tl.broadcast_to(inside_r, at.shape)
  g = tl.load(gate + base + pair, inside, 0.0)
  u = tl.load(up + base + packed + pair, inside, 0.0)
  y = result_of(g, u, (bias, bias_f32, expert_ids, experts),
                (activation, alpha, gate_limit, up_limit), first_r + r,
                c + tl.arange(0, WIDTH)[None, :], inside_r, inside, cols, flags)
  store_result((out + first, out_fp16 + first, out_bf16 + first,
                out_f32 + first), at, y, inside, flags)


@triton.jit
def activation_bwd(gate, up, bias, bias_f32, expert_ids, dy, dy_fp16, dy_bf16,
                   dy_f32, dgate, dup, rows, cols, cols_inverse, cols_shift,
                   experts, activation, alpha, gate_limit, up_limit, flags,
                   TILE_N: tl.constexpr, WIDTH: tl.constexpr,
                   FLAGS: tl.constexpr, ONLY_SILU: tl.constexpr):
  """As activation.activation_bwd."""
  flags &= FLAGS
  if ONLY_SILU:
    activation = SILU
  cols = cols // WIDTH * WIDTH  # For the compiler: WIDTH divides it.
  first, first_r, at, r, c, inside_r = _where(
      rows, cols, cols_inverse, cols_shift, TILE_N, WIDTH)
  base, pair, packed = _beside(first, first_r, at, r, cols, flags)
  inside = tl.broadcast_to(inside_r, at.shape)
  g = tl.load(gate + base + pair, inside, 0.0)
  u = tl.load(up + base + packed + pair, inside, 0.0)
  d = load_dy((dy + first, dy_fp16 + first, dy_bf16 + first, dy_f32 + first),
              at, inside, flags)
  dg, du = gradients_of(
      g, u, d, (bias, bias_f32, expert_ids, experts),
      (activation, alpha, gate_limit, up_limit), first_r + r,
      c + tl.arange(0, WIDTH)[None, :], inside_r, inside, cols, flags)
  if flags & GATED:
    store(dup + base + packed, pair, du, inside)
  store(dgate + base, pair, dg, inside)
