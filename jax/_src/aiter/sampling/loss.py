# SPDX-License-Identifier: Apache-2.0
"""What training makes of logits: their cross entropy with the right tokens.

XLA has all of it in few passes over the logits, if it is asked so: they are
never widened in memory, what is saved of a row is one number, and the gradient
is one pass that needs no scatter. So there is no kernel.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.derivative import differentiable, formula_jvp
from jax._src.aiter.core.partition import resharded, vary_together


class _Rows(NamedTuple):
  """Arrays of a call.

  Attributes:
    logits: [..., v].
    labels: int32 [...].
  """
  logits: jax.Array
  labels: jax.Array


def _wide(t):
  return t.astype(jnp.promote_types(t.dtype, jnp.float32))


def _is_label(rows: _Rows):
  """bool [..., v]: where a row's label is."""
  v = jnp.arange(rows.logits.shape[-1], dtype=jnp.int32)
  return rows.labels[..., None] == v


def _has_label(rows: _Rows):
  return (rows.labels >= 0) & (rows.labels < rows.logits.shape[-1])


def _counted(rows: _Rows):
  """Logits, 0 in rows without a label: what padding holds reaches nothing."""
  return jnp.where(_has_label(rows)[..., None], _wide(rows.logits), 0)


def _logsumexp(rows: _Rows):
  return jax.nn.logsumexp(_counted(rows), -1)


def _right(rows: _Rows):
  """What the label's column holds, one number a row; any without a label."""
  if jax.typeof(rows.logits).sharding.spec[-1] is None:
    found = jnp.take_along_axis(
        rows.logits, rows.labels[..., None], -1, mode="clip")
    return _wide(found[..., 0])
  # No gather along a divided axis of an explicit mesh, but one more pass.
  return jnp.where(_is_label(rows), _wide(rows.logits), 0).sum(-1)


def _loss(_, rows: _Rows):
  return jnp.where(_has_label(rows), _logsumexp(rows) - _right(rows), 0)


def _save(_, rows: _Rows):
  return _loss(_, rows), (rows, _logsumexp(rows))


def _backward(_, wanted, saved, dloss):
  del wanted
  rows, logsumexp = saved
  if dloss is None:
    return (_Rows(jnp.zeros_like(rows.logits), None),)
  weights = jnp.exp(_counted(rows) - logsumexp[..., None])
  dloss = jnp.where(_has_label(rows), dloss, 0)[..., None]
  return (_Rows((weights - _is_label(rows)) * dloss, None),)


def _tangent(_, saved, tangents):
  return formula_jvp(functools.partial(_loss, None), saved[:1], tangents)


_cross_entropy = differentiable(
    _loss, _backward, save=_save, tangent=_tangent)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """`logsumexp(logits) - logits[label]` of each row, in nats.

  Computed in float32 from logits in their own dtype, which is the gradient's
  too: of a large vocabulary they are most of what a loss reads and writes.

  Args:
    logits: [..., v], float16, bfloat16, float32 or float64.
    labels: integers [...], a column of each row. A row whose label is none, as
      -1 or -100 of padding, has the loss 0 and no gradient, whatever its
      logits are.

  Returns:
    float32 [...] (float64 of float64).

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape that cannot be; the message names it.
  """
  function = "cross_entropy"
  arguments.check_dtype(
      function, "logits", logits, ("float16", "bfloat16", "float32", "float64"))
  arguments.check_integers(function, "labels", labels)
  if logits.ndim < 1 or logits.shape[-1] == 0:
    raise arguments.bad(function, "logits", arguments.describe(logits),
                        "shape [..., v], with v at least 1")
  if labels.shape != logits.shape[:-1]:
    raise arguments.bad(function, "labels", arguments.describe(labels),
                        f"shape {list(logits.shape[:-1])}, one for each row")
  labels = resharded(arguments.int32(labels),
                     PartitionSpec(*jax.typeof(logits).sharding.spec[:-1]))
  return _cross_entropy(None, vary_together(_Rows(logits, labels)))
