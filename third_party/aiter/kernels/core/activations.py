# SPDX-License-Identifier: Apache-2.0
"""Activations in float32, on what every architecture has: exp2 and division.

Which one it is is known at run time only.
"""

import triton
import triton.language as tl

# Values of the argument `activation`.
RELU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
SILU = tl.constexpr(4)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def half_erfc(z):
  """erfc(z) / 2 for z >= 0, to 3e-7 of it near zero and 3e-6 at z = 3.5.

  t = 1 / (1 + z / 2); log2(erfc(z) / (2 t)) + z^2 log2(e) is smooth in t: a
  Chebyshev fit of degree 9 (made with NumPy, error 9e-8).
  """
  t = 1.0 / (1.0 + 0.5 * z)
  p = 0.25826290249824524
  p = p * t - 1.2428268194198608
  p = p * t + 2.2632157802581787
  p = p * t - 1.7676317691802979
  p = p * t + 0.4896172285079956
  p = p * t - 0.30464792251586914
  p = p * t + 0.14847011864185333
  p = p * t + 0.5384790301322937
  p = p * t + 1.4428116083145142
  p = p * t - 2.8257501125335693
  return t * tl.exp2(p - z * z * LOG2E)


@triton.jit
def activate(x, activation):
  """The activation of x."""
  if activation == RELU:
    x = tl.where(x < 0.0, 0.0, x)  # A NaN stays one.
  elif activation == GELU:
    tail = half_erfc(tl.abs(x) * 0.7071067811865476)
    x = x * tl.where(x < 0.0, tail, 1.0 - tail)
  elif activation == GELU_TANH or activation == SILU:
    # (1 + tanh(u)) / 2 is the logistic function of 2 u.
    u = x
    if activation == GELU_TANH:
      u = x * (1.5957691216057308 + 0.07135481282687943 * x * x)
    x = x / (1.0 + tl.exp2(u * -LOG2E))
  return x
