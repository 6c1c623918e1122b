# SPDX-License-Identifier: Apache-2.0
"""Derivatives of operators: those of formulas, and those by kernels.

A function here is one of static facts, which hash, and of trees of arrays, as
core/operator.py has it. None stands for a tangent or cotangent that is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.custom_derivatives import SymbolicZero

import jax
from jax._src.aiter.core.linear import linear_map
from jax._src.aiter.core.partition import in_auto_mode, resharded


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
