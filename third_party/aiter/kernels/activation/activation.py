# SPDX-License-Identifier: Apache-2.0
"""Gated activations, forward and backward.

SwiGLU and GEGLU: Shazeer, "GLU Variants Improve Transformer"
(arXiv:2002.05202); the clipped SwiGLU with alpha: gpt-oss (OpenAI, 2025).

All is memory's time: a program owns one tile, reads and writes it once, and has
no loop. A device's many programs hide the latency.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.activation import family
from third_party.aiter.kernels.activation import rows as act
from third_party.aiter.kernels.core import activations

GATED = act.GATED
SILU = activations.SILU
gradients_of = act.gradients_of
load_dy = act.load_dy
load_pair = act.load_pair
pair_at = act.pair_at
result = act.result
store = act.store
store_result = act.store_result
ROWS = tl.constexpr(family.ROWS)


@triton.jit
def _where(rows, cols, tiles_n, ONE_AXIS: tl.constexpr, TILE_M: tl.constexpr,
           TILE_N: tl.constexpr):
  """The tile's rows (in 64 bits) and columns, and which of them are there."""
  if ONE_AXIS:
    tile_m = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n
  else:
    tile_m = tl.program_id(2) * ROWS + tl.program_id(1)
    tile_n = tl.program_id(0)
  r = (tile_m * TILE_M + tl.arange(0, TILE_M))[:, None]
  c = (tile_n * TILE_N + tl.arange(0, TILE_N))[None, :]
  return r.to(tl.int64), c, r < rows, (r < rows) & (c < cols)


@triton.jit
def activation_fwd(gate, up, bias, bias_f32, expert_ids, out, out_fp16,
                   out_bf16, out_f32, rows, cols, tiles_n, experts, activation,
                   alpha, gate_limit, up_limit, flags, TILE_M: tl.constexpr,
                   TILE_N: tl.constexpr, FLAGS: tl.constexpr,
                   ONLY_SILU: tl.constexpr):
  """out = activation(gate) * up.

  gate, up: [rows, cols]; PACKED: both in [rows, 2 * cols], and the pointers
  equal; without GATED, up counts for nothing and is gate. bias: [experts,
  2 * cols], of gate's type or float32, by either of two pointers; expert_ids:
  int32 [rows]; of an expert that is not there, the row's result is 0. out:
  [rows, cols], by the pointer of its type, which is `out` for gate's.
  gate_limit, up_limit: infinite where there is none. FLAGS: those that may be
  set; ONLY_SILU: `activation` is that, and the grid has an axis for columns:
  few rows would wait for a division.
  """
  flags &= FLAGS
  if ONLY_SILU:
    activation = SILU
  r, c, inside_r, inside = _where(rows, cols, tiles_n, not ONLY_SILU, TILE_M,
                                  TILE_N)
  y = result(gate, up, (bias, bias_f32, expert_ids, experts),
             (activation, alpha, gate_limit, up_limit), r, c, inside_r, inside,
             cols, flags)
  store_result((out, out_fp16, out_bf16, out_f32), r * cols + c, y, inside,
               flags)


@triton.jit
def activation_bwd(gate, up, bias, bias_f32, expert_ids, dy, dy_fp16, dy_bf16,
                   dy_f32, dgate, dup, rows, cols, tiles_n, experts, activation,
                   alpha, gate_limit, up_limit, flags, TILE_M: tl.constexpr,
                   TILE_N: tl.constexpr, FLAGS: tl.constexpr,
                   ONLY_SILU: tl.constexpr):
  """Gradients of gate and up, in their layout, from dy, that of out.

  What a limit clips has none. ONLY_SILU: as in activation_fwd.
  """
  flags &= FLAGS
  if ONLY_SILU:
    activation = SILU
  r, c, inside_r, inside = _where(rows, cols, tiles_n, not ONLY_SILU, TILE_M,
                                  TILE_N)
  g, u = load_pair(gate, up, r, c, inside, cols, flags)
  d = load_dy((dy, dy_fp16, dy_bf16, dy_f32), r * cols + c, inside, flags)
  dg, du = gradients_of(g, u, d, (bias, bias_f32, expert_ids, experts),
                        (activation, alpha, gate_limit, up_limit), r, c,
                        inside_r, inside, cols, flags)
  at, beside = pair_at(r, c, cols, flags)
  if flags & GATED:
    store(dup, beside, du, inside)
  store(dgate, at, dg, inside)
