# SPDX-License-Identifier: Apache-2.0
"""Latent attention under JAX's transformations."""

import jax.numpy as jnp
from absl.testing import absltest, parameterized
from harness import sharding, transforms
from jax.sharding import PartitionSpec as P
from mla import cases
from mla.cases import Case

import jax

_CASES = (Case(lora=64, rope=16, heads=8, lengths=((2, 21), (1, 40)), sink=True,
               cache="e4m3fn", scales=True),
          Case(lora=64, rope=16, heads=8, topk=12))
# 24 tokens, which a border of 12 cuts in two.
_BORDERS = ((5, 21), (1, 40), (0, 7), (15, 29), (3, 3))


class TransformTest(parameterized.TestCase):

  @parameterized.parameters(*_CASES)
  def test_vmap(self, case):
    fn, options, arrays = cases.call(cases.Problem(case))
    mapped = [n for n in ("q", "kv_buffer", "sink") if n in arrays]
    stacked = arrays | {n: jnp.stack([arrays[n], arrays[n][::-1]])
                        for n in mapped}
    names = sorted(stacked)
    axes = [0 if n in mapped else None for n in names]
    call = lambda *args: fn(**dict(zip(names, args)), **options)
    args = [stacked[n] for n in names]
    got = jax.jit(jax.vmap(call, axes))(*args)
    transforms.assert_close(
        self, got, transforms.loop_over(call, axes, 2)(*args))

  @sharding.on_hosts
  @parameterized.product(case=_CASES, explicit=[False, True])
  def test_heads_partition(self, case, explicit):
    """Each device has its heads of the queries, and nothing is sent."""
    fn, options, arrays = cases.call(cases.Problem(case))
    mesh = sharding.mesh((4,), ("h",), explicit=explicit)
    specs = dict(q=P(None, "h"), sink=P("h"))
    names = sorted(arrays)
    call = lambda *args: fn(**dict(zip(names, args)), **options)
    got = sharding.check_local(self, mesh, call, [arrays[n] for n in names],
                               [specs.get(n, P()) for n in names])
    self.assertEqual(got[0].sharding.spec[1], "h")

  @sharding.on_hosts
  @parameterized.product(
      case=[Case(lora=64, rope=16, heads=8, lengths=_BORDERS, tokens=24),
            Case(lora=64, rope=16, heads=8, topk=12, tokens=24)],
      explicit=[False, True])
  def test_tokens_partition(self, case, explicit):
    """Each device has its tokens, some of a sequence, and nothing is sent."""
    fn, options, arrays = cases.call(cases.Problem(case))
    mesh = sharding.mesh((2, 2), ("t", "h"), explicit=explicit)
    specs = dict(q=P("t", "h"), topk_indices=P("t"))
    names = sorted(arrays)
    call = lambda *args: fn(**dict(zip(names, args)), **options)
    got = sharding.check_local(self, mesh, call, [arrays[n] for n in names],
                               [specs.get(n, P()) for n in names])
    self.assertEqual(got[0].sharding.spec[:2], ("t", "h"))

  @sharding.on_hosts
  def test_shard_map(self):
    """Sequences and pages of their own on each device."""
    fn, options, arrays = cases.call(cases.Problem(_CASES[0]))
    sharding.check_stacked(self, lambda ts: fn(**ts, **options), arrays)


if __name__ == "__main__":
  absltest.main()
