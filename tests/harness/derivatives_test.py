# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every function that has one: first and second, both ways.

In float64, along two random directions, against central differences. The
second derivative is taken in all four orders of forward and reverse mode.
"""

from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine
from harness.operators import CASES, arrays_of

import jax
from jax._src.aiter.attention import reference

jax.config.update("jax_enable_x64", True)

SIZES = dict(b=2, m=3, n=2, s=5, t=9, u=7)
NAMED = {case.name: case for case in CASES if case.gradients}
STEP = 1e-3


def problem(case):
  """(loss, x, u, v): a scalar of a case's results, where, and directions."""
  arrays = [t.astype(jnp.float64) if jnp.issubdtype(t.dtype, jnp.floating)
            else t for t in arrays_of(case, SIZES)]
  moving, rest = arrays[:case.gradients], arrays[case.gradients:]
  rng = np.random.default_rng(1)
  directions = lambda: [jnp.asarray(rng.standard_normal(t.shape))
                        for t in moving]

  def loss(x):
    outs = jax.tree.leaves(case.call(*x, *rest))
    # What a list of columns is filled up with is -inf, whatever x is.
    numbers = lambda t: jnp.where(t == -jnp.inf, 0, t)
    return sum(jnp.sum(jnp.sin(numbers(t) + jnp.arange(t.shape[-1])))
               for t in outs)

  return loss, moving, directions(), directions()


def along(tree, direction):
  return sum(jnp.vdot(a, b) for a, b in zip(tree, direction))


def forward(f, u):
  return lambda x: jax.jvp(f, (x,), (u,))[1]


def reverse(f, u):
  return lambda x: along(jax.grad(f)(x), u)


MODES = {"forward": forward, "reverse": reverse}


class DerivativeTest(parameterized.TestCase):

  def test_linearized(self):
    """A map of tangents is a program of its own, outside of jax.jit too."""
    # Its own kernel is the map of rope's tangents.
    loss, x, u, _ = problem(NAMED["rope"])
    np.testing.assert_allclose(jax.linearize(loss, x)[1](u),
                               forward(loss, u)(x), rtol=1e-6)

  def check(self, case):
    loss, x, u, v = problem(case)
    first = {name: mode(loss, u) for name, mode in MODES.items()}
    second = {f"{outer} over {inner}": mode(first[inner], v)
              for outer, mode in MODES.items() for inner in MODES}
    of = lambda functions: jax.jit(
        lambda x: {name: f(x) for name, f in functions.items()})
    plain, one, two = of({"f": loss}), of(first), of(second)

    def difference(f, direction):
      at = lambda step: jax.tree.map(lambda t, d: t + step * d, x, direction)
      ahead, behind = f(at(STEP)), f(at(-STEP))
      return {name: (ahead[name] - behind[name]) / (2 * STEP)
              for name in ahead}

    want = difference(plain, u)["f"]
    for name, got in one(x).items():
      np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3, err_msg=name)
    want = difference(one, v)["reverse"]
    for name, got in two(x).items():
      np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3, err_msg=name)

  @parameterized.named_parameters(
      *((f"_{name}", name) for name in machine.daily(NAMED, 2)))
  def test(self, name):
    self.check(NAMED[name])

  @parameterized.parameters("flash_attn_func_causal_True",
                            "flash_attn_varlen_causal_True")
  def test_attention_in_blocks(self, name):
    """Blocks that a mask hides are left out but for a second derivative."""
    jax.clear_caches()
    self.addCleanup(jax.clear_caches)
    with (mock.patch.object(reference, "_ONE_BLOCK", 2),
          mock.patch.object(reference, "_BLOCK_Q", 2),
          mock.patch.object(reference, "_BLOCK_K", 3)):
      self.check(NAMED[name])

  def test_other_transforms(self):
    """Hessians of what is mapped, scanned and checkpointed."""
    case = NAMED["rms_norm"]
    _, (x, gamma), _, _ = problem(case)

    def formula(x):
      return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gamma

    def transformed(f):
      square = lambda x: jnp.sum(f(x) ** 2)
      loop = lambda x: jnp.sum(jax.lax.scan(
          lambda c, _: (c + 0.1 * f(c), None), x, None, length=3)[0])
      return dict(
          hessian=jax.hessian(square), mapped=jax.vmap(jax.hessian(square)),
          of_mapped=jax.hessian(lambda x: jnp.sum(jax.vmap(square)(x) ** 2)),
          checkpointed=jax.hessian(jax.checkpoint(square)),
          scanned=jax.grad(loop), scanned_twice=jax.hessian(loop))

    want = transformed(formula)
    for name, f in transformed(lambda x: case.call(x, gamma)).items():
      if name == "scanned_twice" and jax.__version_info__ < (0, 12):
        continue  # Its scan forgets the derivative of what it has evaluated.
      np.testing.assert_allclose(jax.jit(f)(x), jax.jit(want[name])(x),
                                 rtol=1e-6, atol=1e-9, err_msg=name)


if __name__ == "__main__":
  absltest.main()
