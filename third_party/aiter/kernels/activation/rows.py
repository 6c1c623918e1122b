# SPDX-License-Identifier: Apache-2.0
"""What the activations' kernels share: flags, loads, the formula.

A row has a gate and, beside it or in an array of its own, a factor: up. With
a = the activation of the gate, a row's result is a * up.

Arguments that only pass through are tuples: `bias` is (bias, bias_f32,
expert_ids, experts), and `how` (activation, alpha, gate_limit, up_limit).
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.activation.family import FLAGS as BITS
from third_party.aiter.kernels.core import activations

GATED = tl.constexpr(BITS["gated"])  # There is an up.
PACKED = tl.constexpr(BITS["packed"])  # Rows of gate and up side by side.
HAS_BIAS = tl.constexpr(BITS["bias"])  # That of the row's expert, first.
BIAS_F32 = tl.constexpr(BITS["bias_f32"])  # bias in float32, any gate.
LIMITS = tl.constexpr(BITS["limits"])  # One of them is finite.
# What out and dy are; without any of them, what gate is.
OUT_FP16 = tl.constexpr(BITS["out_fp16"])
OUT_BF16 = tl.constexpr(BITS["out_bf16"])
OUT_F32 = tl.constexpr(BITS["out_f32"])

# A value of `activation`, beside those of core/activations.py.
SWIGLU = tl.constexpr(5)
GELU = activations.GELU
GELU_TANH = activations.GELU_TANH
LOG2E = activations.LOG2E
half_erfc = activations.half_erfc


@triton.jit
def pair_at(r, c, cols, flags):
  """Offsets of the gate's and up's elements [r, c], each from its array."""
  packed = ((flags & PACKED) != 0).to(tl.int32)
  at = r * (cols * (1 + packed)) + c
  return at, at + cols * packed


@triton.jit
def load_pair(gate, up, r, c, inside, cols, flags):
  """Elements [r, c] of gate and up, 0 outside.

  r (of 64 bits) and c broadcast; inside: which elements are there.
  """
  g, u = pair_at(r, c, cols, flags)
  return tl.load(gate + g, inside, 0.0), tl.load(up + u, inside, 0.0)


@triton.jit
def _bias(bias, e, c, inside, cols):
  at = e * (2 * cols) + c
  return (tl.load(bias + at, inside, 0.0).to(tl.float32),
          tl.load(bias + (at + cols), inside, 0.0).to(tl.float32))


@triton.jit
def add_bias(g, u, bias, r, c, inside_r, inside, cols, flags):
  """g and u in float32 with their expert's bias; which rows have an expert.

  Of a row that has none, g and u are 0, and so is its result.
  """
  g = g.to(tl.float32)
  u = u.to(tl.float32)
  if flags & HAS_BIAS:
    own, own_f32, ids, experts = bias
    e = tl.load(ids + r, inside_r, -1)
    inside_r &= (e >= 0) & (e < experts)
    inside &= inside_r
    if flags & BIAS_F32:
      b, d = _bias(own_f32, e.to(tl.int64), c, inside, cols)
    else:
      b, d = _bias(own, e.to(tl.int64), c, inside, cols)
    g = tl.where(inside_r, g + b, 0.0)
    u = tl.where(inside_r, u + d, 0.0)
  return g, u, inside_r


@triton.jit
def clip_gate(g, gate_limit, flags):
  if flags & LIMITS:
    g = tl.where(g > gate_limit, gate_limit, g)  # A NaN stays one.
  return g


@triton.jit
def factor(u, activation, up_limit, flags):
  """What the activated gate is multiplied by."""
  if flags & LIMITS:
    u = tl.where(u > up_limit, up_limit, u)
    u = tl.where(u < -up_limit, -up_limit, u)
  if activation == SWIGLU:
    u += 1.0
  return u


@triton.jit
def _logistic(w):
  """1 / (1 + 2^w), and what is left to 1: a product where that is small.

  A division would be six to ten instructions; the root is one.
  """
  e = tl.exp2(w)
  root = tl.rsqrt(1.0 + e)
  s = root * root
  return s, tl.where(w < 0.0, e * s, 1.0 - s)


@triton.jit
def _activated(g, activation, alpha):
  """The activation of g; alpha is SwiGLU's: g / (1 + exp(-alpha * g))."""
  if activation == GELU:
    tail = half_erfc(tl.abs(g) * 0.7071067811865476)
    s = tl.where(g < 0.0, tail, 1.0 - tail)
  elif activation == GELU_TANH:
    # (1 + tanh(w)) / 2 is the logistic function of 2 w.
    w = g * (1.5957691216057308 + 0.07135481282687943 * g * g)
    s, _ = _logistic(w * -LOG2E)
  else:
    s, _ = _logistic(g * (alpha * -LOG2E))
  return g * s


@triton.jit
def result_of(g, u, bias, how, r, c, inside_r, inside, cols, flags):
  """What load_pair has loaded -> the result in float32, 0 outside."""
  activation, alpha, gate_limit, up_limit = how
  g, u, _ = add_bias(g, u, bias, r, c, inside_r, inside, cols, flags)
  y = _activated(clip_gate(g, gate_limit, flags), activation, alpha)
  if flags & GATED:
    y *= factor(u, activation, up_limit, flags)
  return y


@triton.jit
def result(gate, up, bias, how, r, c, inside_r, inside, cols, flags):
  """Elements [r, c] of the result in float32, 0 outside."""
  g, u = load_pair(gate, up, r, c, inside, cols, flags)
  return result_of(g, u, bias, how, r, c, inside_r, inside, cols, flags)


@triton.jit
def slope(g, activation, alpha):
  """The activation of g, and its derivative."""
  if activation == GELU:
    tail = half_erfc(tl.abs(g) * 0.7071067811865476)
    s = tl.where(g < 0.0, tail, 1.0 - tail)
    d = s + g * (0.3989422804014327 * tl.exp2(g * g * (-0.5 * LOG2E)))
  elif activation == GELU_TANH:
    # Far out the slope is 0 or 1; g * g must not be infinite there.
    square = tl.where(g * g > 1e4, 1e4, g * g)
    w = g * (1.5957691216057308 + 0.07135481282687943 * square)
    s, rest = _logistic(w * -LOG2E)
    d = s + g * s * rest * (
        1.5957691216057308 + 0.21406443848063829 * square)
  else:
    s, rest = _logistic(g * (alpha * -LOG2E))
    d = s * (1.0 + alpha * g * rest)
  return g * s, d


@triton.jit
def gradients_of(g, u, d, bias, how, r, c, inside_r, inside, cols, flags):
  """Those of what load_pair has loaded, from the result's: d, in float32."""
  activation, alpha, gate_limit, up_limit = how
  g, u, known = add_bias(g, u, bias, r, c, inside_r, inside, cols, flags)
  if flags & HAS_BIAS:
    d = tl.where(known, d, 0.0)
  a, s = slope(clip_gate(g, gate_limit, flags), activation, alpha)
  dg = d * s
  du = d * a
  if flags & LIMITS:
    dg = tl.where(g > gate_limit, 0.0, dg)
    du = tl.where(tl.abs(u) > up_limit, 0.0, du)
  if flags & GATED:
    dg *= factor(u, activation, up_limit, flags)
  return dg, du


@triton.jit
def store(t, at, v, inside):
  tl.store(t + at, v.to(t.dtype.element_ty), inside)


@triton.jit
def store_result(outs, at, y, inside, flags):
  """outs: pointers of the gate's type, float16, bfloat16 and float32."""
  out, out_fp16, out_bf16, out_f32 = outs
  if flags & OUT_F32:
    store(out_f32, at, y, inside)
  elif flags & OUT_FP16:
    store(out_fp16, at, y, inside)
  elif flags & OUT_BF16:
    store(out_bf16, at, y, inside)
  else:
    store(out, at, y, inside)


@triton.jit
def load_dy(dys, at, inside, flags):
  """The result's gradient in float32; dys: as store_result's outs."""
  dy, dy_fp16, dy_bf16, dy_f32 = dys
  if flags & OUT_F32:
    d = tl.load(dy_f32 + at, inside, 0.0)
  elif flags & OUT_FP16:
    d = tl.load(dy_fp16 + at, inside, 0.0).to(tl.float32)
  elif flags & OUT_BF16:
    d = tl.load(dy_bf16 + at, inside, 0.0).to(tl.float32)
  else:
    d = tl.load(dy + at, inside, 0.0).to(tl.float32)
  return d
