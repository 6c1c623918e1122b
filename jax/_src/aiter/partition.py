# SPDX-License-Identifier: Apache-2.0
"""What the operators' partitioning rules share."""

from __future__ import annotations

from jax.sharding import NamedSharding, PartitionSpec

import jax


def mesh_axes(entry) -> tuple[str, ...]:
  """Mesh axes of an entry of a PartitionSpec."""
  if entry is None:
    return ()
  return tuple(entry) if isinstance(entry, tuple) else (entry,)


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
