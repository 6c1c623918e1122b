# SPDX-License-Identifier: Apache-2.0
"""What the activations' kernels share: flags, loads, the formula.

A row has a gate and, beside it or in an array of its own, a factor: up. With
a = the activation of the gate, a row's result is a * up.
"""

import triton
import triton.language as tl

from third_party.aiter.kernels.activation.family import FEATURES
from third_party.aiter.kernels.core import activations

GATED = tl.constexpr(FEATURES["gated"])  # There is an up.
PACKED = tl.constexpr(FEATURES["packed"])  # Rows of gate and up side by side.
HAS_BIAS = tl.constexpr(FEATURES["bias"])  # That of the row's expert, first.
BIAS_F32 = tl.constexpr(FEATURES["bias_f32"])  # bias in float32, any gate.
OUT_FP16 = tl.constexpr(FEATURES["out_fp16"])  # out and dy; neither: bfloat16.
OUT_F32 = tl.constexpr(FEATURES["out_f32"])

# A value of the argument `activation`, beside those of core/activations.py.
SWIGLU = tl.constexpr(5)
GELU = activations.GELU
GELU_TANH = activations.GELU_TANH
LOG2E = activations.LOG2E
activate = activations.activate
half_erfc = activations.half_erfc


@triton.jit
def pair_at(r, c, cols, flags):
  """Offsets of the gate's and up's elements [r, c], each from its array."""
  packed = ((flags & PACKED) != 0).to(tl.int32)
  at = r * (cols * (1 + packed)) + c
  return at, at + cols * packed


@triton.jit
def load_pair(gate, up, r, c, inside, cols, flags):
  """Elements [r, c] of gate and up in float32, 0 outside.

  r (of 64 bits) and c broadcast; inside: which elements are there.
  """
  g, u = pair_at(r, c, cols, flags)
  g = tl.load(gate + g, inside, 0.0)
  u = tl.load(up + u, inside, 0.0)
  return g.to(tl.float32), u.to(tl.float32)


@triton.jit
def _bias(bias, e, c, inside, cols):
  at = e * (2 * cols) + c
  return (tl.load(bias + at, inside, 0.0).to(tl.float32),
          tl.load(bias + (at + cols), inside, 0.0).to(tl.float32))


@triton.jit
def add_bias(g, u, bias, bias_f32, expert_ids, experts, r, c, inside_r, inside,
             cols, flags):
  """g and u with their expert's bias; and which rows have such an expert.

  Of a row that has none, g and u are 0, and so is its result.
  """
  if flags & HAS_BIAS:
    e = tl.load(expert_ids + r, inside_r, -1)
    inside_r &= (e >= 0) & (e < experts)
    inside &= inside_r
    if flags & BIAS_F32:
      b, d = _bias(bias_f32, e.to(tl.int64), c, inside, cols)
    else:
      b, d = _bias(bias, e.to(tl.int64), c, inside, cols)
    g = tl.where(inside_r, g + b, 0.0)
    u = tl.where(inside_r, u + d, 0.0)
  return g, u, inside_r


@triton.jit
def clip_gate(g, gate_limit):
  return tl.where(g > gate_limit, gate_limit, g)  # A NaN stays one.


@triton.jit
def factor(u, activation, up_limit):
  """What the activated gate is multiplied by."""
  u = tl.where(u > up_limit, up_limit, u)
  u = tl.where(u < -up_limit, -up_limit, u)
  if activation == SWIGLU:
    u += 1.0
  return u


@triton.jit
def activated(g, activation, alpha):
  """The activation of g; alpha is SwiGLU's: g / (1 + exp(-alpha * g))."""
  if activation == SWIGLU:
    g = g / (1.0 + tl.exp2(g * (alpha * -LOG2E)))
  else:
    g = activate(g, activation)
  return g


@triton.jit
def result(gate, up, bias, bias_f32, expert_ids, experts, r, c, inside_r,
           inside, cols, activation, alpha, gate_limit, up_limit, flags):
  """Elements [r, c] of the result in float32, 0 outside."""
  g, u = load_pair(gate, up, r, c, inside, cols, flags)
  g, u, _ = add_bias(g, u, bias, bias_f32, expert_ids, experts, r, c,
                     inside_r, inside, cols, flags)
  y = activated(clip_gate(g, gate_limit), activation, alpha)
  if flags & GATED:
    y *= factor(u, activation, up_limit)
  return y


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
    s = 1.0 / (1.0 + tl.exp2(w * -LOG2E))
    d = s + g * s * (1.0 - s) * (
        1.5957691216057308 + 0.21406443848063829 * square)
  else:
    s = 1.0 / (1.0 + tl.exp2(g * (alpha * -LOG2E)))
    d = s * (1.0 + alpha * g * (1.0 - s))
  return g * s, d
