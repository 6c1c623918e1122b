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
  differentiable  gradients by kernels, tangents by the formula (derivative.py)
  by_formula      an operator's derivative is that of its reference (likewise)
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

import jax
from jax import lax
from jax._src.aiter.core import dispatch
from jax._src.aiter.core.derivative import by_formula
from jax._src.aiter.core.dims import is_known
from jax._src.aiter.core.partition import (
    in_auto_mode,
    partitioned,
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
    everywhere: every architecture has kernels for such calls, so that one may
      be staged for a machine that this process does not see.
  """
  op: str
  dtype: str
  dims: tuple[int, ...]
  features: tuple[str, ...] = ()
  everywhere: bool = True


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
    serves: (cfg, *args) -> what the call asks of the kernels, of `target` or
      of another operator's; None of a call that is the reference's on any
      platform. Sizes may be symbolic.
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
    if not key.everywhere and not dispatch.architectures(platform):
      return f"kernels of a few architectures alone for dtype {key.dtype}"
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
            cfg, FfiCall(platform, key.op, aliases), *args),
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

  @functools.partial(by_formula, formula=formula or reference)
  def op(cfg, *args):
    types = jax.tree.map(jax.typeof, args)
    mesh = jax.tree.leaves(types)[0].sharding.mesh
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
      return mappable(cfg)(*args)
    return in_auto_mode(mappable(cfg), mesh,
                        specs_by_name(mesh, *specs(cfg, *args), types), *args)

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
