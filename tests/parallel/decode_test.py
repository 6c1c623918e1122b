# SPDX-License-Identifier: Apache-2.0
"""Decoding with pages that devices divide is that with all of them on one."""

import functools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import sharding
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter

HQ, HK, D, DV, SIZE = 4, 2, 16, 8, 4
LENGTHS = (0, 1, 5, 37, 64, 23)
B, LONGEST = len(LENGTHS), max(LENGTHS)


def normal(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


K, V = normal(1, B, LONGEST, HK, D), normal(2, B, LONGEST, HK, DV)
Q = normal(3, B, HQ, D)
SINK = jnp.asarray(normal(4, HQ))
LENS = jnp.array(LENGTHS, jnp.int32)


@functools.cache
def on_one(with_sink=False, **options):
  """The decode of one device, whose pages lie in order."""
  pages = LONGEST // SIZE
  table = jnp.arange(B * pages, dtype=jnp.int32).reshape(B, pages)
  return jax.jit(functools.partial(
      aiter.paged_attention_decode, return_lse=True,
      sink=SINK if with_sink else None, **options))(
          Q, K.reshape(B * pages, SIZE, HK, D),
          V.reshape(B * pages, SIZE, HK, DV), table, LENS)


def local(n: int, interleave: int, seed: int = 0):
  """Caches of n devices and their tables, [n * pages, ..] and [n, b, pages].

  Pages lie in any order, and hold NaN wherever there is no token.
  """
  own = LONGEST if interleave > 1 else -(-LONGEST // n)
  each = -(-own // SIZE)
  pages = B * each + 1
  rng = np.random.default_rng(seed)
  caches = [np.full((n, pages, SIZE, HK, d), np.nan, np.float32)
            for d in (D, DV)]
  tables = np.full((n, B, each), -1, np.int32)
  for rank in range(n):
    free = list(rng.permutation(pages))
    for b, length in enumerate(LENGTHS):
      places = np.asarray(aiter.context_parallel_positions(
          jnp.arange(length), size=n, rank=rank, interleave=interleave))
      for p, place in enumerate(places):
        if place < 0:
          continue
        if tables[rank, b, place // SIZE] < 0:
          tables[rank, b, place // SIZE] = free.pop()
        page = tables[rank, b, place // SIZE]
        for cache, t in zip(caches, (K, V)):
          cache[rank, page, place % SIZE] = t[b, p]
  return [t.reshape(n * pages, *t.shape[2:]) for t in caches], tables


class DecodeTest(parameterized.TestCase):

  def check(self, n, interleave, to_layout=lambda k, v: (k, v), **options):
    (k, v), tables = local(n, interleave)
    k, v = to_layout(k, v)
    own = P("x")

    @functools.partial(
        jax.shard_map, mesh=sharding.mesh((n,), ("x",)),
        in_specs=(P(), own, own, own, P()), out_specs=(P(), P()))
    def divided(q, k, v, tables, lens):
      return aiter.context_parallel_paged_decode(
          q, k, v, tables[0], lens, axis_name="x", interleave=interleave,
          return_lse=True, **options)

    got = jax.jit(divided)(Q, k, v, tables, LENS)
    options.pop("layout", None)
    sink = options.pop("sink", None)
    want = on_one(**options, with_sink=sink is not None)
    for name, a, b in zip(("out", "lse"), got, want):
      np.testing.assert_array_equal(np.isinf(a), np.isinf(b), name)
      np.testing.assert_allclose(
          np.where(np.isinf(b), 0, a), np.where(np.isinf(b), 0, b), rtol=2e-5,
          atol=2e-5, err_msg=name)

  @parameterized.parameters(
      (1, 1), (3, 1), (8, 1), (8, SIZE), (2, 5), (4, 16))
  def test_numbers(self, n, interleave):
    """Tokens, pages, odd runs and long ones; some devices have none."""
    self.check(n, interleave)

  @parameterized.parameters(
      (1, 1, 6), (3, 1, 0), (3, 1, 6), (2, SIZE, 40), (3, 3, 6), (4, 16, 40))
  def test_window(self, n, interleave, left):
    """A window begins inside a page, on some device."""
    self.check(n, interleave, window_size=(left, 0))

  @parameterized.parameters((1, -1), (SIZE, 9))
  def test_sink_and_soft_cap(self, interleave, left):
    """A sink counts once, and alone where there is no key."""
    self.check(3, interleave, window_size=(left, -1), logits_soft_cap=2.0,
               sink=SINK)

  def test_layout(self):
    """A cut page is read by its layout."""
    self.check(2, 1, lambda k, v: (np.swapaxes(k, 1, 2), np.swapaxes(v, 1, 2)),
               layout="HND", window_size=(6, -1))

  def test_written_by_slots(self):
    """Positions are the slots that a cache is written by."""
    n, pages = 3, 8

    @functools.partial(
        jax.shard_map, mesh=sharding.mesh((n,), ("x",)),
        in_specs=(P(),) * 4, out_specs=(P(), P("x")))
    def run(q, k, v, lens):
      rank = jax.lax.axis_index("x")
      table = jnp.arange(pages, dtype=jnp.int32)[::-1]
      at = aiter.context_parallel_positions(
          jnp.arange(k.shape[0]), size=n, rank=rank)
      slots = jnp.where(at < 0, -1, table[at // SIZE] * SIZE + at % SIZE)
      empty = lambda d: jax.lax.pcast(
          jnp.zeros((pages, SIZE, HK, d)), "x", to="varying")
      caches = aiter.write_kv_cache(k, v, empty(D), empty(DV), slots)
      return aiter.context_parallel_paged_decode(
          q, *caches, table[None], lens, axis_name="x"), slots

    out, slots = jax.jit(run)(Q[4:5], K[4], V[4], LENS[4:5])
    self.assertEqual(int((slots >= 0).sum()), LONGEST)
    np.testing.assert_allclose(out[0], on_one()[0][4], rtol=2e-5, atol=2e-5)

  def test_latent(self):
    """What mla_decode_fwd finds in each rank's cache, joined."""
    n, lora, rope, length = 3, 32, 8, 29
    kv, q = normal(5, length, lora + rope), normal(6, 1, HQ, lora + rope)
    sink = jnp.asarray(normal(7, HQ))
    ints = lambda *t: jnp.array(t, jnp.int32)

    def decode(q, cache, count, **options):
      return aiter.mla_decode_fwd(
          q, cache, ints(0, 1), ints(0, cache.shape[0]),
          jnp.arange(cache.shape[0], dtype=jnp.int32), count[None] - (
              cache.shape[0] - 1) * SIZE, kv_lora_rank=lora, sm_scale=0.2,
          return_lse=True, **options)

    cache = np.zeros((n, SIZE * 3, lora + rope), np.float32)
    for rank in range(n):
      part = kv[rank::n]
      cache[rank, :len(part)] = part

    @functools.partial(
        jax.shard_map, mesh=sharding.mesh((n,), ("x",)),
        in_specs=(P(), P("x")), out_specs=(P(), P()))
    def divided(q, cache):
      rank = jax.lax.axis_index("x")
      count = (length - rank + n - 1) // n
      out, lse = decode(
          q, cache.reshape(3, SIZE, 1, -1), count, cp_world_size=n,
          cp_rank=rank, g_kv_indptr=ints(0, length))
      return aiter.context_parallel_merge(
          out, lse, axis_name="x", sink=sink, return_lse=True)

    whole = np.zeros((8 * SIZE, lora + rope), np.float32)
    whole[:length] = kv
    want = decode(q, jnp.asarray(whole.reshape(8, SIZE, 1, -1)),
                  jnp.int32(length), sink=sink)
    for a, b in zip(jax.jit(divided)(q, cache), want):
      np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)

  @parameterized.parameters(
      (ValueError, dict(interleave=0), "interleave is 0"),
      (ValueError, dict(layout="DNH"), "layout is 'DNH'"),
      (TypeError, dict(axis_name=3), "axis_name is 3"),
      (ValueError, dict(sink=jnp.ones(3)), "sink"),
      (TypeError, dict(k_scale="1"), "context_.*: k_scale is '1'"),
      (TypeError, dict(v_scale=2**63), "context_.*: v_scale is 9"))
  def test_refused(self, error, options, message):
    (k, v), tables = local(1, 1)
    call = functools.partial(
        aiter.context_parallel_paged_decode, **dict(axis_name="x") | options)
    with self.assertRaisesRegex(error, message):
      jax.shard_map(call, mesh=sharding.mesh((1,), ("x",)), in_specs=P(),
                    out_specs=P())(Q, k, v, tables[0], LENS)

  def test_refused_arguments(self):
    for rank, error, words in (
        (2, ValueError, "2"), ([1], TypeError, r"\[1\]"),
        (jnp.arange(3), ValueError, r"int\d\d\[3\]")):
      with self.assertRaisesRegex(error, f"rank is {words}"):
        aiter.context_parallel_positions(jnp.arange(3), size=2, rank=rank)
    with self.assertRaisesRegex(ValueError, "lse"):
      aiter.context_parallel_merge(
          jnp.ones((2, HQ, DV)), jnp.ones((2, HQ)), axis_name="x")
    with self.assertRaisesRegex(ValueError, "axis_name is 'x'"):
      aiter.context_parallel_merge(
          jnp.ones((2, HQ, DV)), jnp.ones((HQ, 2)), axis_name="x")


if __name__ == "__main__":
  absltest.main()
