# SPDX-License-Identifier: Apache-2.0
"""Operators on several devices: the host's eight, as machine.py makes them."""

import contextlib
import re

import jax.numpy as jnp
import numpy as np
from harness import machine, transforms
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax

# Decorates tests of the host's devices, which simulated GPUs leave to
# aiter_sim_devices_test: it has several of them.
on_hosts = machine.where(not machine.SIMULATED)


def mesh(shape=(2, 4), names=("x", "y"), explicit=False) -> Mesh:
  """A mesh of the host's first devices."""
  devices = np.array(machine.CPUS[:np.prod(shape)]).reshape(shape)
  kind = AxisType.Explicit if explicit else AxisType.Auto
  return Mesh(devices, names, axis_types=(kind,) * len(shape))


@contextlib.contextmanager
def explicit_mesh(set_mesh: bool):
  """A mesh of explicit axes, 2 x 2; set, or known by its arrays alone."""
  square = mesh((2, 2), ("a", "b"), explicit=True)
  with jax.set_mesh(square) if set_mesh else contextlib.nullcontext():
    yield square


def put(mesh: Mesh, args, specs) -> list:
  """Arrays on a mesh, each by its PartitionSpec."""
  return [jax.device_put(t, NamedSharding(mesh, spec))
          for t, spec in zip(args, specs, strict=True)]


def collectives(compiled) -> set[str]:
  """Kinds of communication in a compiled function."""
  return set(re.findall(
      r"\b(all-gather|all-reduce|all-to-all|collective-permute|"
      r"reduce-scatter)(?:-start)?\(", compiled.as_text()))


def check_stacked(test, call, arrays):
  """Checks a call in a shard_map of two devices, each with such arrays."""
  with_axis = lambda ts: jax.tree.map(lambda t: t[None], ts)
  own = lambda ts: with_axis(call(jax.tree.map(lambda t: t[0], ts)))
  got = jax.jit(jax.shard_map(
      own, mesh=mesh((2,), ("x",)), in_specs=P("x"), out_specs=P("x")))(
          jax.tree.map(lambda t: jnp.stack([t, t]), arrays))
  want = call(jax.device_put(arrays, machine.CPUS[0]))
  for i in range(2):
    transforms.assert_close(test, jax.tree.map(lambda t: t[i], got), want)


def check_local(test, mesh: Mesh, call, args, specs):
  """Checks a divided call against one device's, and that it sends nothing.

  Returns:
    The divided call's results.
  """
  want = jax.jit(call)(*(jax.device_put(t, machine.CPUS[0]) for t in args))
  placed = put(mesh, args, specs)
  compiled = jax.jit(call).lower(*placed).compile()
  got = compiled(*placed)
  transforms.assert_close(test, got, want)
  test.assertEqual(collectives(compiled), set())
  return got
