# SPDX-License-Identifier: Apache-2.0
"""Routing, sorting and layers of experts, from their definitions: loops."""

import math

import numpy as np


def choose(scores, k, groups=1, topk_groups=1, by_sum=False):
  """ids [m, k] of the largest scores; of equal ones the lower come first."""
  out = []
  for row in np.asarray(scores, np.float64):
    row = np.where(np.isnan(row), -np.inf, row)
    members = np.arange(len(row)).reshape(groups, -1)
    kept = range(groups)
    if topk_groups < groups:
      best = []
      for group in members:
        two = sorted(row[group])[::-1][:2 if by_sum else 1]
        best.append(sum(two))
      kept = sorted(range(groups), key=lambda g: (-best[g], g))[:topk_groups]
    allowed = [e for g in kept for e in members[g]]
    out.append(sorted(allowed, key=lambda e: (-row[e], e))[:k])
  return np.array(out, np.int32)


def sort(ids, experts, block=1):
  """(counts [experts], place [n], order [n + experts * (block - 1)])."""
  counts = np.zeros(experts, np.int32)
  place = np.full(len(ids), -1, np.int32)
  order = np.zeros(len(ids) + experts * (block - 1), np.int32)
  at = 0
  for expert in range(experts):
    for entry in np.flatnonzero(np.asarray(ids) == expert):
      place[entry], order[at] = at, entry + 1
      counts[expert] += 1
      at += 1
    at = -(-at // block) * block
  return counts, place, order


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def activate(name, gate, up, limit=None, alpha=1.702, beta=4.0,
             linear_beta=25.0):
  """In float64; without an up that of the gate alone."""
  if name == "situv2":
    return (beta * np.tanh(gate / beta) * _sigmoid(gate)
            * linear_beta * np.tanh(up / linear_beta))
  if name == "swiglu":
    limit = 7.0 if limit is None else limit
  if limit is not None:
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
  if name == "swiglu":
    return gate * _sigmoid(alpha * gate) * (up + 1)
  y = {"silu": lambda g: g * _sigmoid(g),
       "gelu": lambda g: g * 0.5 * (
           1 + np.vectorize(math.erf, [float])(g / 2**0.5)),
       "gelu_tanh": lambda g: g * 0.5 * (1 + np.tanh(
           (2 / math.pi)**0.5 * (g + 0.044715 * g**3)))}[name](gate)
  return y if up is None else y * up


def fused_moe(x, w1, w2, weights, ids, activation="silu", *, early=False,
              interleaved=False, bias1=None, bias2=None,
              **of_activation):
  """[m, d] of w1 [e, 2 i, d] or [e, i, d], w2 [e, d, i], local ids."""
  x, w1, w2, weights = (np.asarray(t, np.float64)
                        for t in (x, w1, w2, weights))
  out = np.zeros_like(x)
  gated = w1.shape[1] == 2 * w2.shape[2]
  for e in range(len(w1)):
    token, choice = np.nonzero(np.asarray(ids) == e)
    weight = weights[token, choice][:, None]
    h = x[token] @ w1[e].T
    if bias1 is not None:
      h = h + np.asarray(bias1[e], np.float64)
    if early:
      h = h * weight
    gate, up = h, None
    if gated:
      gate, up = (h[:, ::2], h[:, 1::2]) if interleaved else np.split(h, 2, 1)
    y = activate(activation, gate, up, **of_activation) @ w2[e].T
    if bias2 is not None:
      y = y + np.asarray(bias2[e], np.float64)
    np.add.at(out, token, y if early else weight * y)
  return out
