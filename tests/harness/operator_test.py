# SPDX-License-Identifier: Apache-2.0
"""core/ by an operator of its own: what it writes in place, what it traces."""

import re
from typing import Any, NamedTuple
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine  # noqa: F401  sets XLA's flags
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax._src.aiter.core import dispatch
from jax._src.aiter.core.dispatch import like
from jax._src.aiter.core.operator import Key, operator
from jax._src.aiter.core.partition import partitioned


class Write(NamedTuple):
  """Rows [n, d] for a pool [slots, d]; where, int32 [n]."""
  pool: Any
  rows: Any
  slots: Any


def _kernel(_, call, x):
  return call((like(x.pool, x.pool.shape, x.pool.dtype),), *x)[0]


def _batch(_, op, size, mapped, x):
  del mapped  # All of them are.
  slots, d = x.pool.shape[1:]
  first = jnp.arange(size, dtype=jnp.int32)[:, None] * np.int32(slots)
  return op(Write(
      x.pool.reshape(-1, d), x.rows.reshape(-1, d),
      (x.slots + first).reshape(-1))).reshape(x.pool.shape)


write = operator(
    target="write_of_a_test", kernel=_kernel,
    reference=lambda _, x: x.pool.at[x.slots].set(x.rows, mode="drop"),
    specs=lambda _, x: ((Write(("s", "d"), ("n", "d"), ("n",)),), ("s", "d")),
    split=("d",),
    serves=lambda _, x: Key("write_of_a_test", x.pool.dtype.name, ()),
    dtypes={"float32": "fp32"}, batch=_batch, aliases={0: 0})


def once(*x):
  return write(0, Write(*x))


def thrice(pool, rows, slots):
  return jax.lax.scan(lambda pool, i: (once(pool, rows + i, slots), None),
                      pool, jnp.arange(3.0))[0]


class DispatchTest(parameterized.TestCase):
  """A process with a GPU traces no reference that nobody asks for."""

  def setUp(self):
    super().setUp()
    self.traced = []
    self.enter_context(mock.patch.object(
        dispatch, "architectures",
        lambda platform: ("gfx942",) if platform == "rocm" else ()))

  def call(self, x):
    def traced(name, out):
      self.traced.append(name)
      return {"y": out}

    return dispatch.dispatch(
        lambda platform: None, lambda platform, x: traced(platform, x * 2.0),
        lambda x: traced("reference", x + x), x)

  @parameterized.parameters("rocm", "cuda", "cpu")
  def test_traces_what_is_asked_for(self, platform):
    traced = jax.jit(self.call).trace(jnp.arange(6.0))
    self.assertEqual(self.traced, ["rocm", "cuda"])
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    self.assertEqual(self.traced[2:], ["reference"] * (platform == "cpu"))
    self.assertIn(
        "stablehlo.add" if platform == "cpu" else "stablehlo.multiply", text)

  def test_results(self):
    x = jnp.arange(6.0)
    np.testing.assert_array_equal(jax.jit(self.call)(x)["y"], 2 * x)
    np.testing.assert_array_equal(self.call(x)["y"], 2 * x)
    with jax.disable_jit():
      np.testing.assert_array_equal(self.call(x)["y"], 2 * x)


class AliasTest(parameterized.TestCase):

  def problem(self, *lead):
    return (jnp.zeros((*lead, 512, 64)), jnp.ones((*lead, 8, 64)),
            jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32) * 3, (*lead, 8)))

  def assert_in_place(self, fn, args):
    text = jax.jit(fn, donate_argnums=0).lower(*args).compile().as_text()
    self.assertIn("input_output_alias={ {}: (0, {}", text)
    shape = ",".join(map(str, args[0].sharding.shard_shape(args[0].shape)))
    self.assertNotRegex(text, rf"f32\[{shape}\]\S* copy\(")

  @parameterized.parameters((once,), (thrice,))
  def test_donated(self, fn):
    self.assert_in_place(fn, self.problem())

  def test_mapped(self):
    self.assert_in_place(jax.vmap(once), self.problem(3))

  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_sharded(self, kind):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",), axis_types=(kind,))
    args = [jax.device_put(t, NamedSharding(
        mesh, P(None, "x") if t.ndim == 2 else P())) for t in self.problem()]
    self.assert_in_place(once, args)

  @parameterized.parameters("cuda", "rocm")
  def test_kernel(self, platform):
    """The call names what it writes in place."""
    text = jax.jit(once, donate_argnums=0).trace(*self.problem()).lower(
        lowering_platforms=(platform,)).as_text()
    call = re.search(r"custom_call @\w+_aiter_write_of_a_test.*", text)[0]
    self.assertIn("output_operand_alias<output_tuple_indices = [],"
                  " operand_index = 0", call)

  def test_not_donated(self):
    """The caller's array stays as it was."""
    pool, rows, slots = self.problem()
    got = jax.jit(once)(pool, rows, slots)
    self.assertEqual(float(jnp.sum(pool)), 0)
    np.testing.assert_array_equal(got[slots], rows)


class PartitionTest(absltest.TestCase):

  def test_two_dimensions_of_one_axis(self):
    """Dimensions that never meet may; a result has its own part of either."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
    fn = lambda a, b: (a * 2, b * 3, jnp.sum(a) + jnp.sum(b))
    split = partitioned(fn, (("b", "h"), ("b", "n")),
                        (("b", "h"), ("b", "n"), ()), ("h", "n"))
    args = jnp.arange(16.0).reshape(2, 8), jnp.arange(8.0).reshape(2, 4)
    got = jax.jit(split)(*jax.device_put(
        args, NamedSharding(mesh, P(None, "x"))))
    for a, b in zip(got, fn(*args)):
      np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
  absltest.main()
