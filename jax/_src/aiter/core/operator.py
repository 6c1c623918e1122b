# SPDX-License-Identifier: Apache-2.0
"""What makes a kernel and its formula an operator of JAX.

An operator is a function of static facts, which hash, and of trees of arrays:

  norm_fwd = operator(
      target="norm_fwd", kernel=_fwd_kernel, reference=reference_fwd,
      specs=_fwd_specs, split=("r",), serves=_serves, dtypes=_DTYPES,
      batch=rows_lead(columns=("gamma", "beta")))
  norm = differentiable(_norm, _backward, save=_save, tangent=_tangent)

  out = norm(cfg, Rows(x, None, gamma, None))

A call passes these layers, each unaware of the ones above it:
  differentiable  gradients by kernels, tangents by the formula
  custom_jvp      an operator's derivative is that of its reference
  explicit axes   a mesh's, by the names of dimensions
  custom_vmap     the operator's own rule
  partitioned     named dimensions, over a mesh's devices
  run             kernel or reference, as the platform has it

A result that is written into an operand's memory, such as a cache's, is named
in `aliases`. Nothing above copies such an operand: whether XLA must depends on
whether the caller donates it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

import jax
from jax import lax
from jax._src.aiter.core import dispatch
from jax._src.aiter.core.dims import is_known
from jax._src.aiter.core.linear import linear_map
from jax._src.aiter.core.partition import (
    in_auto_mode,
    partitioned,
    resharded,
    specs_by_name,
)
from jaxlib import gpu_aiter


class Key(NamedTuple):
  """What a call asks of the kernels, as `_aiter.kernels` takes it; hashable.

  Attributes:
    op: the operation, whose target it is.
    dtype: a JAX dtype's name.
    dims: sizes that choose among rows.
    features: by the names in the family's declaration.
  """
  op: str
  dtype: str
  dims: tuple[int, ...]
  features: tuple[str, ...] = ()


_keys: contextvars.ContextVar[list[Key] | None] = contextvars.ContextVar(
    "_keys", default=None)


@contextlib.contextmanager
def asked():
  """A list of what the operators that are traced inside ask of the kernels.

  Dtypes in it are by their names for `_aiter`.
  """
  keys: list[Key] = []
  token = _keys.set(keys)
  try:
    yield keys
  finally:
    _keys.reset(token)


class FfiCall(NamedTuple):
  """An operator's FFI call on a platform, for its `kernel`."""
  platform: str
  target: str
  aliases: dict[int, int]

  def __call__(self, results, *operands, **attributes):
    """The handler's results, of types that dispatch.like makes."""
    return jax.ffi.ffi_call(
        gpu_aiter.target(self.platform, self.target), results,
        input_output_aliases=self.aliases)(*operands, **attributes)


def operator(
    *,
    target: str,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    specs: Callable[..., tuple[tuple[Any, ...], Any]],
    split: Collection[str],
    serves: Callable[..., Key | None],
    dtypes: Mapping[str, str],
    batch: Callable[..., Any],
    aliases: Mapping[int, int] | None = None,
    plan: Callable[..., Any] | None = None,
    formula: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
  """An operator: (cfg, *args) -> results, of hashable cfg and trees of arrays.

  Args:
    target: the FFI target without its platform's prefix.
    kernel: (cfg, call, *args) -> results, of `call`, an FfiCall.
    reference: (cfg, *args) -> the same results, in jax.numpy.
    specs: (cfg, *args) -> a tuple of trees like args and a tree like the
      results, of names of dimensions as partition.py has them.
    split: kinds of dimensions that a mesh may divide.
    serves: (cfg, *args) -> what the call asks of the kernels; None of a call
      that is the reference's on any platform. Sizes may be symbolic.
    dtypes: those that kernels serve -> their names for `_aiter`.
    batch: (cfg, op, size, mapped, *args) -> results. A mapped array has an axis
      of `size` in front, and so has every result; op is (*args) -> results.
      rows_lead makes such rules.
    aliases: operand of the FFI call -> the result that is written in its place.
    plan: (cfg, run, mesh, args) -> as in partitioned, of run, which is (*args)
      -> the results of one device.
    formula: the reference in a form that can be differentiated both ways, where
      it cannot itself, because it has loops of unknown length.

  Returns:
    The operator. Its attribute `run` is that of one device, and `unserved` is
    (platform, key) -> why the devices of this process have no kernel, or None.
  """
  aliases = dict(aliases or {})
  dispatch.declare(target)

  @functools.cache
  def unserved(platform, key):
    return dispatch.unserved(
        platform, key.dtype, dtypes,
        lambda module, arch, dtype: module.kernels(
            key.op, arch, dtype, [d if is_known(d) else -1 for d in key.dims],
            key.features))

  def run(cfg, *args):
    key = serves(cfg, *args)
    fallback = functools.partial(reference, cfg)
    if key is None:
      return fallback(*args)
    if (keys := _keys.get()) is not None:
      keys.append(key._replace(dtype=dtypes.get(key.dtype, key.dtype)))
    return dispatch.dispatch(
        lambda platform: unserved(platform, key),
        lambda platform, *args: kernel(
            cfg, FfiCall(platform, target, aliases), *args),
        fallback, *args)

  @functools.cache
  def mappable(cfg):
    one = functools.partial(run, cfg)

    @custom_vmap
    def call(*args):
      own, results = specs(cfg, *args)
      return partitioned(
          one, own, results, split,
          plan and functools.partial(plan, cfg, one))(*args)

    @call.def_vmap
    def _(size, mapped, *args):
      out = batch(cfg, call, size, mapped, *args)
      return out, jax.tree.map(lambda _: True, out)

    return call

  @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
  def op(cfg, *args):
    types = jax.tree.map(jax.typeof, args)
    mesh = jax.tree.leaves(types)[0].sharding.mesh
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
      return mappable(cfg)(*args)
    return in_auto_mode(mappable(cfg), mesh,
                        specs_by_name(mesh, *specs(cfg, *args), types), *args)

  @functools.partial(op.defjvp, symbolic_zeros=True)
  def _(cfg, args, tangents):
    out = op(cfg, *args)
    derivative = functools.partial(
        formula_jvp, functools.partial(formula or reference, cfg))
    return out, _in_auto_mode_like(
        derivative, jax.tree.map(jax.typeof, out), args,
        jax.tree.map(_moving, tangents))

  op.run, op.unserved = run, unserved
  return op


def with_axis(size: int, mapped, tree):
  """A tree of arrays, all with the mapped axis in front."""
  return jax.tree.map(
      lambda t, m: t if m else jnp.broadcast_to(t, (size, *t.shape)),
      tree, mapped)


def rows_lead(columns: tuple[str, ...] = ()) -> Callable[..., Any]:
  """A rule `batch`: a mapped axis is one more leading axis of rows.

  Args:
    columns: fields, in any of the arguments, that all rows share. They have no
      leading axes; if one of them is mapped, the calls are made in turn.
  """
  def batch(_, op, size, mapped, *args):
    shared = [{name: getattr(t, name) for name in columns if hasattr(t, name)}
              for t in args]
    apart = lambda trees: [t._replace(**dict.fromkeys(own)) if own else t
                           for t, own in zip(trees, shared)]
    if any(getattr(m, name) for m, own in zip(mapped, shared) for name in own):
      return lax.map(lambda args: op(*args),
                     with_axis(size, tuple(mapped), args))
    rows = with_axis(size, apart(mapped), apart(args))
    return op(*(t._replace(**own) if own else t
                for t, own in zip(rows, shared)))

  return batch


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
