# SPDX-License-Identifier: Apache-2.0
"""Paged attention under JAX's transformations, and caches written in place."""

import warnings

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine, sharding, transforms
from jax.sharding import PartitionSpec as P
from paged import cases
from paged.cases import Case

import jax
from jax import lax
from jax.experimental import aiter

_RAGGED = ((5, 21), (1, 40), (3, 9))
# Of decoding, and of 24 tokens that borders of 6 and of 12 cut in two.
_FOUR = ((1, 37), (1, 1), (1, 64), (1, 20))
_BORDERS = ((5, 21), (1, 40), (0, 7), (15, 29), (3, 3))


def _arrays(case):
  return cases.call(cases.Problem(case))


def _ragged(pages):
  """A step of a server: (fn of cache and step, cache)."""
  rng = np.random.default_rng(0)
  hk, d, b = 2, 64, 3
  shape = aiter.get_kv_cache_shape(pages, 16, hk, d, jnp.bfloat16)
  numbers = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.bfloat16)
  q, k, v = numbers(b, 4, d), numbers(b, hk, d), numbers(b, hk, d)
  table = jnp.asarray(rng.permutation(pages)[:b * 4], jnp.int32)

  def step(cache, lengths):
    return aiter.ragged_paged_attention(
        q, k, v, cache, lengths, table, jnp.arange(b + 1), jnp.array([b, b, b]))

  return step, numbers(*shape)


class TransformTest(parameterized.TestCase):

  @parameterized.parameters(
      Case(), Case(decode=False, lengths=_RAGGED, sinks=True, cache="int8",
                   scale="token"))
  def test_vmap(self, case):
    fn, options, arrays = _arrays(case)
    shared = {n for n in arrays if n not in ("q", "k_cache", "sinks")}
    stacked = {n: t if n in shared else jnp.stack([t, t[::-1]])
               for n, t in arrays.items()}
    names = sorted(stacked)
    axes = [None if n in shared else 0 for n in names]
    call = lambda *args: fn(**dict(zip(names, args)), **options)
    args = [stacked[n] for n in names]
    got = jax.jit(jax.vmap(call, axes))(*args)
    want = transforms.loop_over(call, axes, 2)(*args)
    transforms.assert_close(self, got, want)

  @sharding.on_hosts
  @parameterized.product(layout=["NHD", "HND"], heads=[(8, 4), (4, 4)],
                         explicit=[False, True])
  def test_heads_partition(self, layout, heads, explicit):
    """Each device has its heads of the cache, and nothing is sent."""
    hq, hk = heads
    case = Case(decode=False, lengths=_RAGGED, hq=hq, hk=hk, layout=layout,
                cache="e4m3fn", scale="head", sinks=True)
    fn, options, arrays = _arrays(case)
    mesh = sharding.mesh((4,), ("h",), explicit=explicit)
    pool = P(None, None, "h") if layout == "NHD" else P(None, "h")
    specs = dict(q=P(None, "h"), k_cache=pool, v_cache=pool, sinks=P("h"),
                 k_descale=P("h"), v_descale=P("h"))
    names = sorted(arrays)
    call = lambda *args: fn(**dict(zip(names, args)), **options)
    got = sharding.check_local(self, mesh, call, [arrays[n] for n in names],
                               [specs.get(n, P()) for n in names])
    self.assertEqual(got[0].sharding.spec[1], "h")

  @sharding.on_hosts
  @parameterized.product(
      case=[Case(lengths=_FOUR, window=(9, -1), sinks=True),
            Case(decode=False, lengths=_BORDERS, tokens=24, window=(9, -1),
                 slopes=True),
            Case(decode=False, lengths=_BORDERS, tokens=24, causal=False)],
      explicit=[False, True])
  def test_tokens_partition(self, case, explicit):
    """Each device has its tokens, some of a sequence, and nothing is sent."""
    fn, options, arrays = _arrays(case)
    mesh = sharding.mesh((2, 2), ("t", "h"), explicit=explicit)
    pool = P(None, None, "h")
    specs = dict(q=P("t", "h"), k_cache=pool, v_cache=pool)
    names = sorted(arrays)
    call = lambda *args: fn(**dict(zip(names, args)), **options)
    got = sharding.check_local(self, mesh, call, [arrays[n] for n in names],
                               [specs.get(n, P()) for n in names])
    self.assertEqual(got[0].sharding.spec[:2], ("t", "h"))

  @sharding.on_hosts
  def test_tokens_that_stay(self):
    """A window to the right: a part of a sequence does not know its place."""
    case = Case(decode=False, lengths=_BORDERS, tokens=24, window=(9, 3),
                causal=False)
    fn, options, arrays = _arrays(case)
    q, = sharding.put(sharding.mesh((4,), ("t",)), [arrays["q"]], [P("t")])
    transforms.assert_close(
        self, jax.jit(lambda q: fn(**arrays | dict(q=q), **options))(q),
        fn(**jax.device_put(arrays, machine.CPUS[0]), **options))

  @sharding.on_hosts
  def test_shard_map(self):
    """Sequences and pages of their own on each device."""
    case = Case(lengths=((1, 20),) * 4)
    fn, options, arrays = _arrays(case)
    sharding.check_stacked(self, lambda ts: fn(**ts, **options), arrays)

  def test_cache_in_place(self):
    """A donated cache is written where it is, and steps need no more memory."""
    step, cache = _ragged(64)
    lengths = jnp.array([3, 17, 30])

    def run(cache, lengths):
      out, cache = step(cache, lengths)
      return cache, out

    with warnings.catch_warnings():
      warnings.simplefilter("error")
      compiled = jax.jit(run, donate_argnums=0).lower(cache, lengths).compile()
      kept = cache + 0
      got = compiled(cache, lengths)
    self.assertTrue(cache.is_deleted())
    memory = compiled.memory_analysis()
    self.assertGreaterEqual(memory.alias_size_in_bytes, kept.nbytes)
    self.assertLess(memory.temp_size_in_bytes, kept.nbytes)
    want = jax.jit(run)(kept, lengths)
    transforms.assert_same(self, got, want)

  def test_scan(self):
    """Decoding steps in one program are those one by one."""
    step, cache = _ragged(16)
    lengths = jnp.array([3, 17, 30])
    steps = machine.size(4, 4, 2)

    def body(cache, i):
      out, cache = step(cache, lengths + i)
      return cache, out

    got = jax.jit(lambda cache: lax.scan(body, cache, jnp.arange(steps)))(cache)
    outs = []
    for i in range(steps):
      cache, out = jax.jit(body)(cache, i)
      outs.append(out)
    transforms.assert_same(self, got, (cache, jnp.stack(outs)))


if __name__ == "__main__":
  absltest.main()
