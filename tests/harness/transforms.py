# SPDX-License-Identifier: Apache-2.0
"""JAX's transformations of an operator against what they must equal."""

import importlib.util
import re

import jax.numpy as jnp
import numpy as np
from harness import machine

import jax
from jax._src.aiter.core import dispatch
from jaxlib import gpu_aiter

# Any process can export for all of these.
EXPORTED = ("cpu", *dispatch.PLATFORMS)


def weighted(x):
  """A scalar that depends on every element differently."""
  x = x.astype(jnp.float32)
  return jnp.sum(x * jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(
      x.shape))


def results_of(fn, argnums):
  """fn's outputs and the gradients of a scalar of all of them."""
  def run(*args):
    def loss(*args):
      outs = fn(*args)
      return sum(weighted(o) for o in jax.tree.leaves(outs)), outs
    (_, outs), grads = jax.value_and_grad(loss, argnums, has_aux=True)(*args)
    return outs, grads
  return run


def assert_close(test, got, want, tolerance: float = 2e-5):
  """Trees of equal shapes and dtypes, and of numbers this near.

  The tolerance is relative, to each number or to the largest.
  """
  for a, b in zip(jax.tree.leaves(jax.device_get(got)),
                  jax.tree.leaves(jax.device_get(want)), strict=True):
    test.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
    a, b = (np.asarray(t, np.float64) for t in (a, b))
    np.testing.assert_allclose(
        a, b, rtol=tolerance,
        atol=tolerance * max(1, np.abs(b).max(initial=0)))


def assert_same(test, got, want):
  """Trees of equal shapes, dtypes and bits, but of NaN's."""
  for a, b in zip(jax.tree.leaves(jax.device_get(got)),
                  jax.tree.leaves(jax.device_get(want)), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    test.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
    if a.dtype.kind not in "biuf":  # NumPy's own alone compare NaNs.
      a, b = a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}")
    np.testing.assert_array_equal(a, b)


def loop_over(fn, in_axes, n: int):
  """What jax.vmap(fn, in_axes) must equal, of n elements: one call each."""
  fn = jax.jit(fn)
  def run(*args):
    outs = [fn(*(a if axis is None else jnp.take(a, i, axis)
                 for a, axis in zip(args, in_axes))) for i in range(n)]
    return jax.tree.map(lambda *t: jnp.stack(t), *outs)
  return run


def check_scan(test, layer, x, tolerance: float = 2e-5):
  """A gradient of three layers, recomputed: of a loop, and one by one.

  Args:
    test: the TestCase.
    layer: x to an array of its shape and dtype.
    x: of any shape.
    tolerance: assert_close's.
  """
  body = jax.checkpoint(lambda h, _: (layer(h), None))

  def loss(x, unroll):
    h, _ = jax.lax.scan(body, x, None, length=3, unroll=unroll)
    return jnp.sum(h.astype(jnp.float32) ** 2)

  assert_close(test, jax.grad(loss)(x, 1), jax.grad(loss)(x, True), tolerance)


def check_export(test, fn, args, ops, platform: str, types=None):
  """Exports fn for a platform: its calls are there, and it runs where it can.

  Args:
    test: the TestCase.
    fn: of args, an array or a tree of them.
    args: arrays.
    ops: operators, such as "norm_fwd", that must be called on a GPU and not on
      a CPU.
    platform: of EXPORTED.
    types: of args, where sizes are left open.
  """
  exported = jax.export.export(
      jax.jit(fn), platforms=[platform],
      disabled_checks=dispatch.export_checks())(*(types or args))
  calls = set(re.findall(r"@(\w+)", exported.mlir_module()))
  for op in ops:
    for p in dispatch.PLATFORMS:
      target = gpu_aiter.target(p, op)
      test.assertEqual(target in calls, p == platform, target)
  if platform == (machine.PLATFORM or jax.default_backend()):
    if importlib.util.find_spec("flatbuffers"):  # an option of JAX's
      exported = jax.export.deserialize(exported.serialize())
    assert_same(test, exported.call(*args), jax.jit(fn)(*args))
