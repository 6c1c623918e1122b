# SPDX-License-Identifier: Apache-2.0
"""Gated activations whose result is of 8 or 4 bits, in one pass.

  activation_quant_row    one scale a row
  activation_quant_group  one for 32, 64 or 128 columns of a row, or one that is
                          given

The result stays in float32 until it is rounded. Scales and rounding are those
of kernels/quant/quant.py, bit for bit.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.activation import rows as act
from third_party.aiter.kernels.activation.family import FLAGS as BITS
from third_party.aiter.kernels.core import groups, rounding
from third_party.aiter.kernels.quant import quant as quantisers

E8M0 = tl.constexpr(BITS["e8m0"])  # Scales are e8m0, not float32.
SHUFFLED = tl.constexpr(BITS["shuffled"])  # As scaled MFMA takes them.
STATIC = tl.constexpr(BITS["static"])  # The scale is given: one number.
# "short", groups of less than 128 columns, is what rows with RUN 128 exclude.
E2M1 = rounding.E2M1
codes_of = quantisers.codes
divide = rounding.divide
divide_by_any = groups.divide_by_any
e2m1_bytes = quantisers.e2m1_bytes
e8m0_reciprocal = rounding.e8m0_reciprocal
e8m0_scale = rounding.e8m0_scale
f32_scale = rounding.f32_scale
load_pair = act.load_pair
magnitude = rounding.magnitude
of_groups = groups.of_groups
result = act.result
result_of = act.result_of
shuffled = groups.shuffled


@triton.jit
def activation_quant_row(gate, up, bias, bias_f32, expert_ids, q, scale, rows,
                         cols, experts, activation, alpha, gate_limit, up_limit,
                         kind, flags, TILE_M: tl.constexpr,
                         TILE_N: tl.constexpr, COLS: tl.constexpr,
                         FLAGS: tl.constexpr, NATIVE: tl.constexpr,
                         CAST: tl.constexpr):
  """q = y / scale, with y as activation_fwd has it and the scale of each row.

  gate, up, bias, expert_ids: as in activation_fwd. q: bytes [rows, cols].
  scale: float32 [rows]. Up to COLS columns, a multiple of TILE_N, lie in
  registers; with COLS = 0 a row of any length passes twice, in tiles of TILE_N,
  the second time out of the cache.
  """
  flags &= FLAGS
  bias = (bias, bias_f32, expert_ids, experts)
  how = (activation, alpha, gate_limit, up_limit)
  r = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
  row = r.to(tl.int64)[:, None]
  inside_r = (r < rows)[:, None]
  c = tl.arange(0, TILE_N)[None, :]
  m = tl.zeros([TILE_M, TILE_N], tl.int32)
  if COLS:
    # All loads are on their way before the first of them is used.
    pairs = ()
    for i in tl.static_range(COLS // TILE_N):
      inside = inside_r & (i * TILE_N + c < cols)
      pairs += (load_pair(gate, up, row, i * TILE_N + c, inside, cols, flags),)
    ys = ()
    for i in tl.static_range(COLS // TILE_N):
      inside = inside_r & (i * TILE_N + c < cols)
      y = result_of(pairs[i][0], pairs[i][1], bias, how, row, i * TILE_N + c,
                    inside_r, inside, cols, flags)
      m = tl.maximum(m, magnitude(y))
      ys += (y,)
    s = f32_scale(tl.max(m, 1).to(tl.float32, bitcast=True), kind)
    for i in tl.static_range(COLS // TILE_N):
      inside = inside_r & (i * TILE_N + c < cols)
      codes = codes_of(divide(ys[i], s[:, None]), kind, NATIVE, CAST)
      tl.store(q + row * cols + (i * TILE_N + c), codes, inside)
  else:
    for c0 in range(0, cols, TILE_N):
      inside = inside_r & (c0 + c < cols)
      y = result(gate, up, bias, how, row, c0 + c, inside_r, inside, cols,
                 flags)
      m = tl.maximum(m, magnitude(y))
    s = f32_scale(tl.max(m, 1).to(tl.float32, bitcast=True), kind)
    for c0 in range(0, cols, TILE_N):
      inside = inside_r & (c0 + c < cols)
      y = result(gate, up, bias, how, row, c0 + c, inside_r, inside, cols,
                 flags)
      codes = codes_of(divide(y, s[:, None]), kind, NATIVE, CAST)
      tl.store(q + row * cols + (c0 + c), codes, inside)
  tl.store(scale + r, s, r < rows)


@triton.jit
def activation_quant_group(gate, up, bias, bias_f32, expert_ids, scale_in, q,
                           scale, scale_e8m0, rows, cols, scale_rows,
                           scale_cols, tiles_m, tiles_n, experts, activation,
                           alpha, gate_limit, up_limit, group, kind, mode,
                           flags, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                           RUN: tl.constexpr, FLAGS: tl.constexpr,
                           NATIVE: tl.constexpr, CAST: tl.constexpr):
  """q = y / scale, with a scale for some columns of a row.

  gate, up, bias, expert_ids: as in activation_fwd, of a batch of matrices, each
  of `rows` rows. scale_in: float32, one number. q: bytes [batch, rows, cols],
  or of e2m1 half as many, the even columns in the low bits. scale, scale_e8m0:
  [batch, scale_rows, scale_cols]; rows or columns beyond the groups' are those
  of zeros. tiles_m, tiles_n: tiles that cover both q and scale. group: columns
  of a group: 32, 64 or 128; with RUN 128 no other. A tile is TILE_M rows of
  runs of RUN columns.
  """
  RUNS: tl.constexpr = TILE_N // RUN
  flags &= FLAGS
  tile_n = tl.program_id(0) % tiles_n
  tile_m = tl.program_id(0) // tiles_n % tiles_m
  batch = (tl.program_id(0) // tiles_n // tiles_m).to(tl.int64)
  r = tile_m * TILE_M + tl.arange(0, TILE_M)
  g = tile_n * RUNS + tl.arange(0, RUNS)
  row = (batch * rows + r)[:, None, None]
  inside_r = (r < rows)[:, None, None]
  c = (g[:, None] * RUN + tl.arange(0, RUN)[None, :])[None, :, :]
  inside = inside_r & (c < cols)
  y = result(gate, up, (bias, bias_f32, expert_ids, experts),
             (activation, alpha, gate_limit, up_limit), row, c, inside_r,
             inside, cols, flags)
  if flags & STATIC:
    y = divide_by_any(y, tl.load(scale_in + tl.zeros([1, 1, 1], tl.int32)))
  else:
    m = tl.max(magnitude(y), 2)
    steps = 0  # Runs of a group: 2^steps.
    if RUN == 32:
      steps = (group >= 64).to(tl.int32) + (group >= 128).to(tl.int32)
      m = of_groups(m, group, TILE_M, RUNS)
    amax = m.to(tl.float32, bitcast=True)
    scale_c = g >> steps
    first = (r < scale_rows)[:, None] & (
        ((scale_c << steps) == g) & (scale_c < scale_cols))[None, :]
    if flags & SHUFFLED:
      at = shuffled(r, scale_c, scale_cols)
    else:
      at = r.to(tl.int64)[:, None] * scale_cols + scale_c[None, :]
    at += batch * scale_rows * scale_cols
    if flags & E8M0:
      e = e8m0_scale(amax, mode, kind)
      tl.store(scale_e8m0 + at, e, first)
      y *= e8m0_reciprocal(e)[:, :, None]
    else:
      s = f32_scale(amax, kind)
      tl.store(scale + at, s, first)
      y = divide(y, s[:, :, None])
  if kind == E2M1:
    even, odd = tl.split(tl.reshape(y, [TILE_M, RUNS, RUN // 2, 2]))
    byte = g[:, None] * (RUN // 2) + tl.arange(0, RUN // 2)[None, :]
    byte = byte[None, :, :]
    tl.store(q + row * (cols // 2) + byte, e2m1_bytes(even, odd, PAIRED=False),
             inside_r & (byte < cols // 2))
  else:
    tl.store(q + row * cols + c, codes_of(y, kind, NATIVE, CAST), inside)
