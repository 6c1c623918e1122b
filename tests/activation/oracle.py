# SPDX-License-Identifier: Apache-2.0
"""Gated activations by their definition, in NumPy and float64."""

import dataclasses
import math

import numpy as np

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _logistic(x):
  """1 / (1 + exp(-x)) without overflow."""
  e = np.exp(-np.abs(x))
  return np.where(x < 0, e, 1) / (1 + e)


def _normal_cdf(x):
  return _erfc(-x / math.sqrt(2)) / 2


def _tanh_argument(x):
  """Twice what the approximation of GELU takes the hyperbolic tangent of."""
  return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


@dataclasses.dataclass(frozen=True)
class Activation:
  """activation(gate) * up, or times up + 1 in SwiGLU.

  Attributes:
    name: "silu", "gelu", "gelu_tanh" or "swiglu".
    limit: 0, or what up is clipped to on both sides.
    gate_limit: what the gate is clipped to from above: limit, rounded.
    alpha: of SwiGLU.
  """
  name: str
  limit: float = 0.0
  gate_limit: float = math.inf
  alpha: float = 1.0

  def of_gate(self, g):
    """The activation of gates, and its derivative."""
    g = np.minimum(g, self.gate_limit)
    if self.name == "gelu":
      s = _normal_cdf(g)
      return g * s, s + g * np.exp(-g * g / 2) / math.sqrt(2 * math.pi)
    if self.name == "gelu_tanh":
      s = _logistic(_tanh_argument(g))
      w = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * g**2)
      return g * s, s + g * s * (1 - s) * w
    alpha = self.alpha if self.name == "swiglu" else 1.0
    s = _logistic(alpha * g)
    return g * s, s * (1 + alpha * g * (1 - s))

  def factor(self, u):
    if self.limit:
      u = np.clip(u, -self.limit, self.limit)
    return u + 1 if self.name == "swiglu" else u

  def result(self, gate, up=None):
    y, _ = self.of_gate(gate)
    return y if up is None else y * self.factor(up)

  def gradients(self, gate, up, dy):
    """Of gate and up."""
    y, slope = self.of_gate(gate)
    dgate = np.where(gate <= self.gate_limit, dy * slope, 0)
    if up is None:
      return dgate, None
    inside = (np.abs(up) <= self.limit) if self.limit else True
    return dgate * self.factor(up), np.where(inside, dy * y, 0)


def biased(gate, up, bias, expert_ids):
  """(gate, up, which rows count): rows [t, d] with their experts' biases."""
  known = (expert_ids >= 0) & (expert_ids < len(bias))
  rows = np.where(known[:, None], bias[np.where(known, expert_ids, 0)], 0)
  left, right = np.split(rows, 2, -1)
  return gate + left, up + right, known[:, None]
