# SPDX-License-Identifier: Apache-2.0
"""What the operators' partitioning rules share.

An operator names the dimensions of its arrays, as an einsum does: a spec is a
tuple of names, such as ("b", "m", "k"), and stands for its array in a tree.
Dimensions of one name have one size and one sharding; "_" is a dimension that
has nothing to do with any other. A name may end in a number: "r0" and "r1" are
dimensions of the kind "r". What may be divided is said by kinds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

import jax
from jax import lax


def mesh_axes(entry) -> tuple[str, ...]:
  """Mesh axes of an entry of a PartitionSpec."""
  if entry is None:
    return ()
  return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _is_spec(t) -> bool:
  return type(t) is tuple and all(isinstance(n, str) for n in t)


def _may_split(name: str, split: Collection[str]) -> bool:
  return name.rstrip("0123456789") in split


def _leaves(specs) -> list[tuple[str, ...]]:
  return jax.tree.leaves(specs, is_leaf=_is_spec)


def _rule(specs, result_specs, split) -> tuple[str, tuple[str, ...]]:
  """The sharding rule in JAX's notation, and the names to replicate."""
  lonely = 0
  fixed = []

  def words(spec):
    nonlocal lonely
    out = []
    for name in spec:
      if name == "_":
        name = f"u{lonely}"
        lonely += 1
      if not _may_split(name, split) and name not in fixed:
        fixed.append(name)
      out.append(name)
    return " ".join(out)

  sides = [", ".join(map(words, _leaves(side)))
           for side in (specs, result_specs)]
  return " -> ".join(sides), tuple(fixed)


def axes_of_arguments(mesh, specs, split: Collection[str], args,
                      result_specs=None) -> dict[str, tuple[str, ...]]:
  """Mesh axes of dimensions of the kinds `split`, as the arguments have them.

  The first argument that divides a dimension decides. A division into unequal
  parts, or by an axis that another dimension of an array has, does not count.

  Args:
    mesh: the mesh.
    specs: specs of the arguments.
    split: kinds of dimensions that may be divided.
    args: the arguments or their types, with shapes and shardings.
    result_specs: specs of the results. Without them any two dimensions count as
      those of an array.

  Returns:
    Name -> axes, for dimensions that are divided.
  """
  axes = {}
  arrays = result_specs and [*_leaves(specs), *_leaves(result_specs)]
  apart = lambda a, b: bool(arrays) and not any(
      a in spec and b in spec for spec in arrays)
  for array, spec in zip(jax.tree.leaves(args), _leaves(specs), strict=True):
    for size, name, entry in zip(array.shape, spec, array.sharding.spec):
      names = mesh_axes(entry)
      if (names and _may_split(name, split) and name not in axes
          and size % math.prod(mesh.shape[a] for a in names) == 0
          and not any(a in taken for other, taken in axes.items()
                      if not apart(name, other) for a in names)):
        axes[name] = names
  return axes


def _sum_over_missing(fun, specs, result_specs, axes):
  """fun, its results summed over divided dimensions that they lack.

  Such a result is a sum over the dimension, of which a shard has its part.
  """
  divided = {n for spec in _leaves(specs) for n in spec if n in axes}

  def run(*args):
    out = fun(*args)
    leaves, tree = jax.tree.flatten(out)
    for i, spec in enumerate(_leaves(result_specs)):
      held = {a for n in spec for a in axes.get(n, ())}
      over = dict.fromkeys(a for n in sorted(divided - set(spec))
                           for a in axes[n] if a not in held)
      if over:
        leaves[i] = lax.psum(leaves[i], tuple(over))
    return jax.tree.unflatten(tree, leaves)

  return run


def partitioned(
    fun: Callable[..., Any],
    specs: tuple[Any, ...],
    result_specs: Any,
    split: Collection[str],
    plan: Callable[..., tuple[Mapping[str, tuple[str, ...]], Any]] | None = None
) -> Callable[..., Any]:
  """fun, divided over a mesh's devices along named dimensions.

  Args:
    fun: (*args) -> results; trees of arrays.
    specs: for each argument a tree like it, of specs.
    result_specs: a tree like the results, of specs.
    split: kinds of dimensions that may be divided; others are gathered.
    plan: (mesh, args) -> name -> mesh axes, and the function of one shard. By
      default the division is that of the arguments, a shard runs fun, and a
      result that lacks a divided dimension is summed over it.

  Returns:
    A function like fun.
  """
  def follow(mesh, args):
    axes = axes_of_arguments(mesh, specs, split, args, result_specs)
    return axes, _sum_over_missing(fun, specs, result_specs, axes)

  def partition(mesh, args, _):
    if mesh.empty or not all(isinstance(t.sharding, NamedSharding)
                             for t in jax.tree.leaves(args)):
      # In a shard_map over some of a mesh's axes JAX does not name the others:
      # what they divide is gathered.
      axes, lower = {}, fun
    else:
      axes, lower = (plan or follow)(mesh, args)
    sharding = lambda spec: NamedSharding(
        mesh, PartitionSpec(*(axes.get(name) or None for name in spec)))
    shardings = lambda side: jax.tree.map(sharding, side, is_leaf=_is_spec)
    return mesh, in_plain_types(lower), shardings(result_specs), tuple(
        map(shardings, specs))

  rule, fixed = _rule(specs, result_specs, split)
  op = custom_partitioning(fun)
  op.def_partition(partition, sharding_rule=rule,
                   need_replication_factors=fixed)
  return op


def specs_by_name(mesh, specs, result_specs, types):
  """PartitionSpecs of results whose dimensions are divided as the arguments'.

  Args:
    mesh: the mesh.
    specs: specs of the arguments.
    result_specs: specs of the results.
    types: the arguments' types, with explicit shardings.
  """
  kinds = {name.rstrip("0123456789")
           for spec in _leaves(result_specs) for name in spec} - {"_"}
  axes = axes_of_arguments(mesh, specs, kinds, types, result_specs)
  return jax.tree.map(
      lambda spec: PartitionSpec(*(axes.get(name) for name in spec)),
      result_specs, is_leaf=_is_spec)


def in_auto_mode(fun, mesh, specs, *args):
  """fun(*args), with a mesh's explicit axes automatic inside.

  Shardings are then left to the partitioner below rather than to types.

  Args:
    fun: a function.
    mesh: the mesh in its arguments' types.
    specs: PartitionSpecs of its results.
    *args: its arguments.

  Returns:
    The results.
  """
  if jax.sharding.AxisType.Explicit not in mesh.axis_types:
    return fun(*args)
  shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs,
                           is_leaf=lambda s: isinstance(s, PartitionSpec))
  return jax.sharding.auto_axes(fun, out_sharding=shardings)(*args)


def resharded(t, spec: PartitionSpec):
  """An array in another sharding, where its mesh has explicit axes."""
  mesh = jax.typeof(t).sharding.mesh
  if jax.sharding.AxisType.Explicit not in mesh.axis_types:
    return t
  return jax.sharding.reshard(t, NamedSharding(mesh, spec))


def in_plain_types(lower):
  """`lower`, for JAX to trace under a context mesh of explicit axes.

  A partitioned function sees one shard's arrays, so types that speak of meshes
  have no place in it; the partitioner rejects what they lower to.
  """
  def wrapped(*args):
    mesh = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
      return lower(*args)
    auto = jax.sharding.AbstractMesh(
        mesh.axis_sizes, mesh.axis_names,
        (jax.sharding.AxisType.Auto,) * len(mesh.axis_names))
    with jax.sharding.use_abstract_mesh(auto):
      args = jax.tree.map(
          lambda t: jax.sharding.reshard(t, PartitionSpec()), args)
      return lower(*args)

  return wrapped


def vary_like(x, like):
  """Lets x vary over the manual mesh axes that `like` does, in a shard_map."""
  def axes(t):
    aval = jax.typeof(t)
    kind = getattr(aval, "mat", None)
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)
  missing = axes(like) - axes(x)
  return lax.pcast(x, tuple(missing), to="varying") if missing else x


def vary_together(tree):
  """Lets all arrays of a tree vary over the manual mesh axes that one does.

  The cast's transpose sums the gradient of what all shards share.
  """
  arrays, structure = jax.tree.flatten(tree)
  return jax.tree.unflatten(
      structure, [functools.reduce(vary_like, arrays, t) for t in arrays])
