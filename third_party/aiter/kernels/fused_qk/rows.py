# SPDX-License-Identifier: Apache-2.0
"""Rows of queries and of keys, normalised and rounded in one launch.

A program has a row of a token's queries, or a part of one: the sum with a
residual, RMSNorm of the row or of each head in it, a gate, and rounding with a
scale for some columns or for the row. It also has the token's row of keys,
which is normalised. A tile is a row's runs of RUN columns. All that is read is
asked for before any of it is waited for.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.core import activations, groups, rounding
from third_party.aiter.kernels.fused_qk.family import FEATURES as _FEATURES

NORM = tl.constexpr(_FEATURES["norm"])
GEMMA = tl.constexpr(_FEATURES["gemma"])  # The weight is 1 + weight.
JOINT = tl.constexpr(_FEATURES["joint"])  # One norm of a row; else one a head.
Q_BYTES = tl.constexpr(_FEATURES["q_bytes"])  # Queries are rounded.
TOKEN = tl.constexpr(_FEATURES["token"])  # One scale of a row; else of groups.
RESIDUAL = tl.constexpr(_FEATURES["residual"])
GATE = tl.constexpr(_FEATURES["gate"])
E8M0 = tl.constexpr(_FEATURES["e8m0"])  # Scales are powers of two, in bytes.
Q_OUT = tl.constexpr(_FEATURES["q_out"])  # Queries are a result unrounded.
Q_SCALED = tl.constexpr(_FEATURES["q_scaled"])  # The scale is given.
# A bias, a gate before the norm or of another activation, a norm rounded before
# it is quantised, e8m0 scales rounded otherwise than up.
RARE = tl.constexpr(_FEATURES["rare"])
SHORT = tl.constexpr(_FEATURES["short"])  # Heads or groups of no whole runs.
AMAX_FLOOR = rounding.AMAX_FLOOR
E2M1 = rounding.E2M1
ROUND_UP = rounding.ROUND_UP
LOG2E = activations.LOG2E
divide = rounding.divide
divide_by_any = groups.divide_by_any
e8m0_reciprocal = rounding.e8m0_reciprocal
e8m0_scale = rounding.e8m0_scale
largest = rounding.largest
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
def _opened(z, is_sigmoid):
  """What a gate multiplies by: z sigmoid(z), or sigmoid(z)."""
  z = z.to(tl.float32)
  # Of what is at least 1 this is quicker than a division, and as near.
  root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2E))
  sigmoid = root * root
  if is_sigmoid:
    z = tl.full(z.shape, 1.0, tl.float32)
  return z * sigmoid


@triton.jit
def _f32_scale(amax, kind):
  """rounding.f32_scale, with one division a program."""
  amax = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
  scale = divide(amax, tl.zeros([1], tl.float32) + largest(kind))
  return tl.where(amax == float("inf"), amax, scale)


@triton.jit
def _divided(x, scale):
  """x / scale to 2^-46 of it, rounded: of few quotients the last bit is off."""
  inverse = tl.broadcast_to(1.0 / scale, x.shape)
  # Of infinity too a quotient by it is 0, and NaN of infinity.
  scale = tl.broadcast_to(tl.where(scale == float("inf"), 0.0, scale), x.shape)
  quotient = x * inverse
  return tl.fma(tl.fma(quotient, scale * -1.0, x), inverse, quotient)


@triton.jit
def _scaled(s, begin, there, scale, scale_e8m0, stride, group, kind, mode,
            least, flags, MAY: tl.constexpr, RUNS: tl.constexpr,
            RUN: tl.constexpr):
  """Runs divided by their scales, which are stored.

  begin: the runs' first columns, [RUNS], from where scales are counted; `there`
  says which of them are. Scales are those of magnitudes of `least` at least.
  """
  runs = 1
  if flags & TOKEN:
    runs = RUNS
    amax = tl.zeros([RUNS], tl.int32) + tl.max(tl.ravel(magnitude(s)), 0)
  else:
    amax = tl.max(magnitude(s), 1)
    if SHORT & MAY:
      runs = group // RUN
      amax = tl.reshape(of_groups(
          tl.reshape(amax, [1, RUNS]), group, 1, RUNS), [RUNS])
  amax = amax.to(tl.float32, bitcast=True)
  amax = tl.where(amax < least, least, amax)
  to = (begin // (RUN * runs)).to(tl.int64) * stride
  there &= begin % (RUN * runs) == 0
  if flags & E8M0:
    e = e8m0_scale(amax, mode, kind)
    tl.store(scale_e8m0 + to, e, there)
    s *= e8m0_reciprocal(e)[:, None]
  else:
    f = _f32_scale(amax, kind)
    tl.store(scale + to, f, there)
    s = _divided(s, f[:, None])
  return s


@triton.jit
def fused_qk_rows(
    q, residual, gate, q_weight, bias, k, k_weight, q_scale, q_out,
    q_out_bytes, residual_out, scale, scale_e8m0, k_out,
    parts, cols, k_cols, dim, group, scale_token, scale_group, kind, mode,
    has_bias, is_sigmoid, is_gated_first, is_narrow, eps, k_eps, least, flags,
    HEAD: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr,
    MAY: tl.constexpr, SURE: tl.constexpr, NATIVE: tl.constexpr,
):
  """Semantics in include/aiter/fused_qk.h.

  A token has `parts` rows of queries, of `cols` columns, and with one of them a
  row of keys, if k_cols is not 0. Rows are of up to HEAD and KEYS columns.
  MAY: features that calls may have. SURE: those that all have.

  Grid: (tokens, parts).
  """
  flags = (flags | SURE) & MAY
  RUNS: tl.constexpr = HEAD // RUN
  run = tl.arange(0, RUNS)
  c = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
  inside = c < cols
  token = tl.program_id(0)
  part = tl.program_id(1)
  at = (token.to(tl.int64) * parts + part) * cols
  s = tl.load(q + at + c, inside, 0.0).to(tl.float32)
  if RESIDUAL & MAY:
    more = tl.load(residual + at + c, inside & ((flags & RESIDUAL) != 0), 0.0)
  if NORM & MAY:
    wc = c
    if not (SHORT | JOINT) & MAY:
      wc = tl.arange(0, RUN)[None, :]  # A head is a run.
    elif not JOINT & SURE:
      begin = tl.where((flags & JOINT) != 0, run * RUN, run * RUN % dim)
      wc = tl.multiple_of(begin, 32)[:, None] + tl.arange(0, RUN)[None, :]
    there = (wc < cols) & ((flags & NORM) != 0)
    w = tl.load(q_weight + wc, there, 0.0)
    if RARE & MAY:
      b = tl.load(bias + wc, there & (has_bias != 0), 0.0)
  if GATE & MAY:
    z = tl.load(gate + at + c, inside & ((flags & GATE) != 0), 0.0)
  if KEYS:
    kc = tl.arange(0, KEYS)
    k_at = token.to(tl.int64) * k_cols
    keys = tl.load(k + k_at + kc, kc < k_cols, 0.0).to(tl.float32)
    k_w = tl.load(k_weight + kc, kc < k_cols, 0.0).to(tl.float32)
  extra = 0.0
  if GEMMA & MAY:
    extra = tl.where((flags & GEMMA) != 0, 1.0, 0.0)
  if RESIDUAL & MAY:
    if flags & RESIDUAL:
      s += more.to(tl.float32)
      tl.store(residual_out + at + c, s.to(residual_out.dtype.element_ty),
               inside)
  if GATE & MAY:
    if RARE & MAY:
      if is_gated_first:
        s *= _opened(z, is_sigmoid)
  if NORM & MAY:
    if flags & NORM:
      if JOINT & SURE:
        mean = tl.zeros([RUNS], tl.float32) + tl.sum(s * s) / cols
      else:
        mean = tl.sum(s * s, 1)
        if flags & JOINT:
          mean = tl.zeros([RUNS], tl.float32) + tl.sum(mean, 0) / cols
        elif SHORT & MAY:
          mean = _sums_of(mean, dim // RUN, RUNS) / dim
        else:
          mean /= RUN
      s *= (1.0 / tl.sqrt_rn(mean + eps))[:, None] * (
          w.to(tl.float32) + extra)
      if RARE & MAY:
        s += b.to(tl.float32)
  if GATE & MAY:
    if RARE & MAY:
      if (flags & GATE) != 0 and is_gated_first == 0:
        s *= _opened(z, is_sigmoid)
    elif flags & GATE:
      s *= _opened(z, 0)
  if Q_OUT & MAY:
    if flags & Q_OUT:
      tl.store(q_out + at + c, s.to(q_out.dtype.element_ty), inside)
  if KEYS:
    mean = tl.sum(keys * keys) / k_cols
    keys *= 1.0 / tl.sqrt_rn(mean + k_eps) * (k_w + extra)
    tl.store(k_out + k_at + kc, keys.to(k_out.dtype.element_ty), kc < k_cols)
  if Q_BYTES & MAY:
    if flags & Q_BYTES:
      if RARE & MAY:
        if is_narrow:
          s = s.to(q.dtype.element_ty).to(tl.float32)
      if flags & Q_SCALED:
        s = divide_by_any(s, tl.load(q_scale + tl.zeros([1, 1], tl.int32)))
      else:
        to = token.to(tl.int64) * scale_token
        s = _scaled(s, part * cols + run * RUN, run * RUN < cols, scale + to,
                    scale_e8m0 + to, scale_group, group, kind,
                    mode if RARE & MAY else ROUND_UP, least, flags, MAY, RUNS,
                    RUN)
      codes = to_bits(s, kind, NATIVE)
      if kind == E2M1:
        low, high = tl.split(tl.reshape(codes, [RUNS, RUN // 2, 2]))
        byte = run[:, None] * (RUN // 2) + tl.arange(0, RUN // 2)[None, :]
        tl.store(q_out_bytes + at // 2 + byte,
                 low | (high << 4), byte < cols // 2)
      else:
        if (RESIDUAL | Q_OUT) & MAY:
          # A thread stores the 8 columns that it has of its type's arrays.
          c = tl.max_contiguous(c, [1, 8])
        tl.store(q_out_bytes + at + c, codes, inside)
