# SPDX-License-Identifier: Apache-2.0
"""Derivatives of operators: those of formulas, and those by kernels.

A function here is one of static facts, which hash, and of trees of arrays, as
core/operator.py has it. None stands for a tangent or cotangent that is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

import jax
from jax import lax
from jax._src.aiter.core.linear import linear_map
from jax._src.aiter.core.partition import in_auto_mode, resharded, vary_like


def _moving(t):
  """A tangent or cotangent, or None if it is known to be 0."""
  if isinstance(t, SymbolicZero) or t.dtype == jax.dtypes.float0:
    return None
  return t


def formula_jvp(fun: Callable[..., Any], args, tangents):
  """The tangents of fun(*args).

  Args:
    fun: a function in jax.numpy.
    args: its arguments, trees of arrays.
    tangents: like args, with None for 0.
  """
  leaves, tree = jax.tree.flatten(args)
  moving = tree.flatten_up_to(tangents)
  at = [i for i, t in enumerate(moving) if t is not None]

  def of(*some):
    full = list(leaves)
    for i, t in zip(at, some):
      full[i] = t
    return fun(*jax.tree.unflatten(tree, full))

  return jax.jvp(of, [leaves[i] for i in at], [moving[i] for i in at])[1]


def _as_type(gradient, like):
  """A gradient in the dtype and the sharding of its array."""
  if gradient is None:
    return None
  return resharded(gradient.astype(like.dtype), like.sharding.spec)


def _in_auto_mode_like(fun, types, *args):
  """fun(*args), on a mesh with explicit axes sharded as types."""
  mesh = jax.tree.leaves(types)[0].sharding.mesh
  return in_auto_mode(
      fun, mesh, jax.tree.map(lambda t: t.sharding.spec, types), *args)


def by_formula(
    fun: Callable[..., Any],
    formula: Callable[..., Any],
) -> Callable[..., Any]:
  """fun with the derivative of a formula, backwards as forwards.

  Args:
    fun: (cfg, *args) -> results.
    formula: the same, in jax.numpy.

  Returns:
    A function like fun.
  """
  call = jax.custom_jvp(fun, nondiff_argnums=(0,))

  @functools.partial(call.defjvp, symbolic_zeros=True)
  def _(cfg, args, tangents):
    out = call(cfg, *args)
    return out, _in_auto_mode_like(
        functools.partial(formula_jvp, functools.partial(formula, cfg)),
        jax.tree.map(jax.typeof, out), args, jax.tree.map(_moving, tangents))

  return call


def differentiable(
    fun: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    save: Callable[..., Any],
    tangent: Callable[..., Any],
    keep: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
  """fun with a derivative: backwards by kernels, forwards by the formula.

  Backward kernels are operators, so the second derivative is that of their
  references.

  Args:
    fun: (cfg, *args) -> results.
    backward: (cfg, wanted, saved, cotangents) -> gradients, a tuple of trees
      like args. `wanted` is such a tuple of bools; what is not wanted may have
      None for a gradient. A cotangent that is 0 is None. A gradient may have
      another float dtype than its array, and another sharding.
    save: (cfg, *args) -> (results, saved), which a call runs instead of fun if
      it is differentiated.
    tangent: (cfg, saved, tangents) -> the results' tangents, in jax.numpy; of
      tangents like args with None for 0. See formula_jvp.
    keep: (cfg, wanted, saved) -> what of saved the derivatives by what is
      wanted need; all of it by default.

  Returns:
    A function like fun.
  """
  call = jax.custom_jvp(fun, nondiff_argnums=(0,))

  @functools.partial(call.defjvp, symbolic_zeros=True)
  def _(cfg, args, tangents):
    results, saved = save(cfg, *args)
    types, out_tree = jax.tree.flatten(jax.tree.map(jax.typeof, results))
    like, tree = jax.tree.flatten(jax.tree.map(jax.typeof, args))
    moving = [_moving(t) for t in jax.tree.leaves(tangents)]
    wanted = jax.tree.unflatten(tree, [t is not None for t in moving])
    kept, saved_tree = jax.tree.flatten(
        keep(cfg, wanted, saved) if keep else saved)

    def forward(kept, moving):
      out = _in_auto_mode_like(
          functools.partial(tangent, cfg), out_tree.unflatten(types),
          jax.tree.unflatten(saved_tree, kept),
          jax.tree.unflatten(tree, moving))
      return out_tree.flatten_up_to(out)

    def reverse(kept, cotangents):
      grads = backward(cfg, wanted, jax.tree.unflatten(saved_tree, kept),
                       jax.tree.unflatten(out_tree, cotangents))
      return list(map(_as_type, tree.flatten_up_to(grads), like))

    dots = linear_map(forward, reverse, types, kept, moving)
    return results, jax.tree.unflatten(out_tree, dots)

  return call


def sums_by(ids, size: int, *grads):
  """float32 [size, columns]: the sums of the rows that have each id.

  As a product with the matrix of which row is whose, in a fixed order; a
  scatter's order is whatever a GPU makes of it.

  Args:
    ids: integers [...], of each row.
    size: ids that there are.
    *grads: [..., columns], which come side by side.
  """
  def sums(ids, *grads):
    lead = tuple(range(ids.ndim))
    whose = ids[..., None] == jnp.arange(size, dtype=ids.dtype)
    return jnp.concatenate([
        lax.dot_general(
            whose.astype(t.dtype), t, ((lead, lead), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.promote_types(t.dtype, jnp.float32))
        for t in grads], -1)

  return in_auto_mode(sums, jax.typeof(grads[0]).sharding.mesh,
                      PartitionSpec(None, None), ids, *grads)


def _take(dtype: str, table, ids):
  if 0 in table.shape:
    return vary_like(jnp.zeros((*ids.shape, table.shape[1]), dtype), ids)
  return table.astype(dtype).at[ids].get(
      mode="fill", fill_value=0, wrap_negative_indices=False)


def _take_backward(dtype: str, wanted, saved, dout):
  del dtype, wanted
  table, ids = saved
  return sums_by(ids, table.shape[0], dout), None


# (dtype, table [size, n], ids [...]) -> [..., n], 0 of an id that is none. Its
# transpose is sums_by.
rows_by = differentiable(
    _take, _take_backward,
    save=lambda dtype, table, ids: (_take(dtype, table, ids), (table, ids)),
    tangent=lambda dtype, saved, tangents: _take(dtype, tangents[0], saved[1]))
