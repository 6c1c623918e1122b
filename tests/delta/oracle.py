# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule and the convolution before it, in float64."""

import numpy as np


def unit(x):
  return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def rule(q, k, v, g, beta, scale, state):
  """(out [t, hv, dv], state) of one sequence, token after token.

  Args:
    q: [t, h, dk].
    k: likewise.
    v: [t, hv, dv].
    g: [t, hv, 1 | dk].
    beta: [t, hv].
    scale: factor on q.
    state: [hv, dk, dv].
  """
  out, state = np.zeros(v.shape), np.array(state, np.float64)
  shared = v.shape[1] // max(q.shape[1], 1)
  for t in range(v.shape[0]):
    for head in range(v.shape[1]):
      s, key = state[head], k[t, head // shared]
      s *= np.exp(g[t, head])[:, None]
      s += beta[t, head] * np.outer(key, v[t, head] - key @ s)
      out[t, head] = scale * q[t, head // shared] @ s
  return out, state


def conv(x, weight, bias, state, silu):
  """(out, the last w - 1 values) of one sequence's x [dim, t]."""
  w, t = weight.shape[1], x.shape[1]
  line = np.concatenate([state, x], 1)
  out = bias[:, None] + sum(
      weight[:, j:j + 1] * line[:, j:j + t] for j in range(w))
  return out / (1 + np.exp(-out)) if silu else out, line[:, t:]
