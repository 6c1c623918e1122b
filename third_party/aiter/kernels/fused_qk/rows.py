# SPDX-License-Identifier: Apache-2.0
"""Rows of queries and of keys, normalised and rounded in one launch.

The first programs have rows of queries, or a part of one each: the sum with a
residual, RMSNorm of the row or of each head in it, a gate, a rotation by minus
the position, and rounding with a scale for some columns or for the row. Others
have rows of keys, which are normalised. A tile is a row's runs of 32 columns.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import activations, groups, rounding
from third_party.aiter.kernels.fused_qk.family import FLAGS as _FLAGS

GPTJ = tl.constexpr(_FLAGS["gptj"])  # Pairs are neighbours; else halves.
NORM = tl.constexpr(_FLAGS["norm"])
GEMMA = tl.constexpr(_FLAGS["gemma"])  # The weight is 1 + weight.
JOINT = tl.constexpr(_FLAGS["joint"])  # One norm of a row; else one a head.
Q_BYTES = tl.constexpr(_FLAGS["q_bytes"])  # Queries are rounded.
TOKEN = tl.constexpr(_FLAGS["token"])  # One scale of a row; else of groups.
E2M1 = rounding.E2M1
ROUND_UP = rounding.ROUND_UP
SILU = activations.SILU
activate = activations.activate
divide = rounding.divide
e8m0_reciprocal = rounding.e8m0_reciprocal
e8m0_scale = rounding.e8m0_scale
f32_scale = rounding.f32_scale
magnitude = rounding.magnitude
of_groups = groups.of_groups
to_bits = rounding.to_bits


@triton.jit
def _some(t, COUNT: tl.constexpr, RUNS: tl.constexpr):
  """Sums of COUNT neighbours, at each of them."""
  some = tl.sum(tl.reshape(t, [RUNS // COUNT, COUNT]), 1, keep_dims=True)
  return tl.reshape(tl.broadcast_to(some, [RUNS // COUNT, COUNT]), [RUNS])


@triton.jit
def _sums_of(t, runs, RUNS: tl.constexpr):
  """Sums of one, two, four or eight neighbours, at each of them: [RUNS]."""
  if runs == 2:
    t = _some(t, 2, RUNS)
  elif runs == 4:
    t = _some(t, 4, RUNS)
  elif runs == 8:
    t = _some(t, 8, RUNS)
  return t


@triton.jit
def _normalised(s, weight, run, lane, inside, cols, dim, eps, flags, joint,
                RUNS: tl.constexpr):
  """Rows in float32; of heads, one norm each, `dim` columns share weights."""
  squares = tl.sum(s * s, 1)
  first = run * 32
  if joint:
    mean = tl.zeros([RUNS], tl.float32) + tl.sum(squares, 0) / cols
  else:
    mean = _sums_of(squares, dim // 32, RUNS) / dim
    first = first % dim
  w = tl.load(weight + (first[:, None] + lane), inside, 0.0).to(tl.float32)
  w += tl.where((flags & GEMMA) != 0, 1.0, 0.0)
  return s * (1.0 / tl.sqrt_rn(mean + eps))[:, None] * w


@triton.jit
def _turned_back(s, q, at, c, inside, cos, sin, place, dim, pairs, first,
                 flags):
  """Heads of `dim` columns, rotated by minus the angles of table row `place`.

  q + at: where they come from.
  """
  j = c % dim - first
  turned = inside & (j >= 0) & (j < 2 * pairs)
  near = (flags & GPTJ) != 0
  pair = tl.where(near, j // 2, j % pairs)
  second = tl.where(near, j % 2, j // pairs) == 1
  step = tl.where(near, 1, pairs)
  other = tl.load(q + (at + tl.where(second, -step, step)), turned, 0.0)
  u = tl.load(cos + (place + pair), turned, 1.0)
  v = tl.load(sin + (place + pair), turned, 0.0)
  return s * u + other.to(tl.float32) * tl.where(second, -v, v)


@triton.jit
def fused_qk_rows(
    q, residual, gate, q_weight, k, k_weight, cos, sin, positions, q_out,
    q_out_bytes, residual_out, scale, scale_e8m0, k_out,
    tokens, parts, cols, k_cols, dim, pairs, first, table_rows, group,
    scale_token, scale_group, kind, has_residual, has_gate, has_e8m0, has_q_out,
    eps, k_eps, flags,
    HEAD: tl.constexpr, NATIVE: tl.constexpr,
):
  """Semantics in include/aiter/fused_qk.h.

  A token has `parts` rows of queries, of `cols` columns, and one of keys if
  k_cols is not 0. Rows are of up to HEAD columns.

  Grid: (tokens * parts, and tokens for keys).
  """
  RUNS: tl.constexpr = HEAD // 32
  run = tl.arange(0, RUNS)
  lane = tl.arange(0, 32)[None, :]
  c = run[:, None] * 32 + lane
  row = tl.program_id(0)
  if row < tokens * parts:
    token = (row // parts).to(tl.int64)
    part = row % parts
    inside = c < cols
    at = row.to(tl.int64) * cols + c
    s = tl.load(q + at, inside, 0.0).to(tl.float32)
    if has_residual:
      s += tl.load(residual + at, inside, 0.0).to(tl.float32)
      tl.store(residual_out + at, s.to(residual_out.dtype.element_ty), inside)
    if flags & NORM:
      s = _normalised(s, q_weight, run, lane, inside, cols, dim, eps, flags,
                      (flags & JOINT) != 0, RUNS)
    if has_gate:
      s *= activate(tl.load(gate + at, inside, 0.0).to(tl.float32), SILU)
    if pairs > 0:
      place = tl.load(positions + token)
      place = tl.minimum(tl.maximum(place, 0), table_rows - 1).to(tl.int64)
      s = _turned_back(s, q, at, part * cols + c, inside, cos, sin,
                       place * pairs, dim, pairs, first, flags)
    if has_q_out:
      tl.store(q_out + at, s.to(q_out.dtype.element_ty), inside)
    if flags & Q_BYTES:
      m = tl.max(magnitude(s), 1)
      if flags & TOKEN:
        m = tl.zeros([RUNS], tl.int32) + tl.max(m, 0)
        runs = RUNS
        scale_c = run // runs
      else:
        m = tl.reshape(of_groups(tl.reshape(m, [1, RUNS]), group, 1, RUNS),
                       [RUNS])
        runs = group // 32
        scale_c = part * (cols // group) + run // runs
      amax = m.to(tl.float32, bitcast=True)
      where = token * scale_token + scale_c.to(tl.int64) * scale_group
      here = (run % runs == 0) & (run * 32 < cols)
      if has_e8m0:
        e = e8m0_scale(amax, ROUND_UP, kind)
        tl.store(scale_e8m0 + where, e, here)
        s *= e8m0_reciprocal(e)[:, None]
      else:
        f = f32_scale(amax, kind)
        tl.store(scale + where, f, here)
        s = divide(s, f[:, None])
      codes = to_bits(s, kind, NATIVE)
      if kind == E2M1:
        low, high = tl.split(tl.reshape(codes, [RUNS, 16, 2]))
        byte = run[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(q_out_bytes + (row.to(tl.int64) * (cols // 2) + byte),
                 low | (high << 4), byte < cols // 2)
      else:
        tl.store(q_out_bytes + at, codes, inside)
  else:
    token = (row - tokens * parts).to(tl.int64)
    inside = c < k_cols
    at = token * k_cols + c
    s = tl.load(k + at, inside, 0.0).to(tl.float32)
    s = _normalised(s, k_weight, run, lane, inside, k_cols, k_cols, k_eps,
                    flags, True, RUNS)
    tl.store(k_out + at, s.to(k_out.dtype.element_ty), inside)
