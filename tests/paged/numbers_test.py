# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches against the oracle, on any machine."""

import dataclasses
import itertools
import os

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine
from harness.cases import DTYPES, check_error, examples
from hypothesis import given
from hypothesis import strategies as st
from paged import cases
from paged.cases import Case

from jax.experimental import aiter

# Random batches, and how many go through one program. More of them:
#   AITER_BATCHES=1000 python3 paged/numbers_test.py BatchesTest
BATCHES = int(os.environ.get("AITER_BATCHES", machine.size(40, 6, 2)))
_EACH = machine.size(10, 2, 1)


class PagedTestCase(parameterized.TestCase):

  def check(self, case: Case, seed: int = 0):
    problem = cases.Problem(case, seed)
    cases.check(self, problem, cases.call(problem), of_tokens=case.decode)


class PagedTest(PagedTestCase):

  # Kernels of float32 run in every_kernel_test.py on simulated GPUs.
  @parameterized.parameters(*enumerate(machine.sample(
      (c for c in cases.pairs()
       if not machine.SIMULATED or c.dtype != "fp32"), 14)))
  def test_pairs(self, seed, case):
    self.check(case, seed)

  # gfx90a has no kernels of float32, and the simulator no library's products.
  @machine.where(machine.ARCH != "gfx90a")
  @parameterized.parameters(
      dict(lengths=((1, 300), (1, 5)), d=128, sinks=True),
      dict(lengths=((40, 90), (3, 70)), d=60, decode=False, window=(30, -1)),
      dict(lengths=((36, 40),), d=40, dv=24, decode=False, soft_cap=2.0,
           slopes=True))
  def test_float32(self, **options):
    self.check(Case(dtype="fp32", **options))

  @parameterized.parameters(
      # No sequence, no key, no page, no column of the table.
      dict(lengths=((1, 0), (1, 0))), dict(lengths=((0, 5),), decode=False),
      dict(lengths=((1, -3), (1, 9))), dict(hq=1, hk=1, d=1),
      # A table of one page of the whole context; a split of the keys.
      dict(lengths=((1, 200),), page=256), dict(lengths=((1, 1500),), d=128),
      dict(lengths=((40, 40), (1, 70)), decode=False, hq=8, d=128),
      dict(lengths=((1, 500), (1, 70)), page=192, d=128, holes=True),
      dict(lengths=((1, 500), (1, 70)), page=64, d=64),
      dict(lengths=((40, 90), (1, 70)), decode=False, page=64, d=128, hq=8),
      # More queries than keys.
      dict(lengths=((30, 7), (9, 9)), decode=False, window=(3, -1)),
      # Parts in which no key is seen, behind a last key inside of a page.
      *(dict(lengths=((3, 276),), decode=False, window=(0, 3), tokens=33,
             width=22, dtype=dtype, d=d)
        for dtype, d in (("fp16", 64), ("bf16", 64), ("bf16", 128))))
  def test_edges(self, **options):
    self.check(Case(**options))

  @parameterized.parameters(
      dict(), dict(page=48, holes=True, dtype="fp16"),
      dict(page=64, window=(50, -1), sinks=True), dict(softmax_scale=0.0),
      dict(d=80, dv=64, softmax_scale=-0.4), dict(d=256, hq=2, hk=1),
      dict(soft_cap=3.0, slopes=True, softmax_scale=-0.4, holes=True),
      dict(soft_cap=3.0, holes=True, d=64), dict(soft_cap=3.0, page=64),
      dict(slopes=True, holes=True), dict(slopes=True, d=256, window=(50, -1)),
      dict(soft_cap=2000.0, softmax_scale=40.0),
      dict(d=64, lse=False, causal=False), dict(page=8, d=96, soft_cap=2.0),
      dict(cache="e4m3fnuz", scale="head"), dict(cache="e5m2", d=256, page=80),
      dict(cache="e4m3fn", scale="head", page=32, holes=True),
      dict(cache="int8", scale="head", d=256, softmax_scale=-0.4),
      dict(cache="e5m2", scale="head", d=112, page=48, sinks=True),
      dict(cache="int8", scale="tensor", d=64, soft_cap=2.0),
      dict(cache="e4m3fn", scale="token"), dict(cache="int8", page=7),
      dict(layout="asm", page=32, holes=True), dict(layout="x", soft_cap=2.0),
      dict(layout="x", cache="e4m3fnuz", d=96, dtype="fp16"),
      dict(layout="asm", cache="int8", slopes=True, page=48),
      dict(lengths=((40, 900),), hq=1, hk=1))
  def test_chunks(self, **options):
    """Of prompts, over several tiles of keys."""
    self.check(Case(**(dict(
        lengths=((40, 200), (70, 70), (3, 90)), decode=False, hq=8, hk=2,
        d=128) | options)))

  @parameterized.parameters("", "e4m3fnuz")
  def test_divided(self, cache):
    """What a program's calls leave in scratch is not seen by the next."""
    long, short = machine.size((3000, 700), (600, 300), (600, 300))
    for seed, keys in enumerate((
        (long, 10, 0, short), (1, 1, long, 5), (0, 0, 0, 0), (short,) * 4,
        (long,) * 4)):
      self.check(Case(
          lengths=tuple((1, n) for n in keys), d=128, hq=8, hk=2, cache=cache,
          pages=4 * (long // 16 + 1) + 3, width=long // 16 + 1), seed)

  @examples(30, 8, 4)
  @given(st.data())
  def test_random(self, data):
    draw = data.draw
    decode = draw(st.booleans())
    lengths = draw(st.lists(st.tuples(
        st.just(1) if decode else st.integers(0, 20), st.integers(0, 90)),
        min_size=1, max_size=5))
    hk = draw(st.integers(1, 3))
    self.check(Case(
        dtype=draw(st.sampled_from(("bf16", "fp16"))), lengths=tuple(lengths),
        decode=decode, hk=hk, hq=hk * draw(st.sampled_from((1, 3, 4, 17))),
        d=draw(st.sampled_from((8, 64, 96, 128))),
        page=draw(st.sampled_from((1, 3, 8, 16, 128))),
        layout=draw(st.sampled_from(("NHD", "HND"))),
        cache=draw(st.sampled_from(("", "", *cases.BYTES))),
        window=draw(st.sampled_from(((-1, -1), (7, -1)))),
        holes=draw(st.booleans()), sinks=draw(st.booleans())),
        seed=draw(st.integers(0, 99)))

  @parameterized.parameters(True, False)
  def test_duplicates(self, decode):
    """Sequences that share pages, as those with one prompt do."""
    case = Case(lengths=((1, 40), (1, 40), (1, 33)), decode=decode)
    p = cases.Problem(case)
    p.table[1], p.table[2] = p.table[0], p.table[0]
    p.q[1] = p.q[0]
    fn, options, arrays = cases.call(p)
    out, _ = fn(**arrays, **options)
    np.testing.assert_array_equal(out[0], out[1])
    check_error(self, out, p.exact()[0], p.exact(DTYPES[case.dtype])[0], "bf16")

  @parameterized.parameters(*machine.sample(itertools.product(
      cases.BYTES, ["bf16", "fp16"], [(128, 16), (16, 1)]), 6))
  def test_every_code(self, kind, dtype, d_page):
    """A sequence of one key has its value, in every bit and NaN for NaN."""
    d, page = d_page
    codes = np.arange(256, dtype=np.uint8).view(cases.BYTES[kind])
    b = 256 // d
    v = np.zeros((b, page, 1, d), codes.dtype)
    v[:, 0, 0] = codes.reshape(b, d)
    out = aiter.paged_attention_decode(
        jnp.zeros((b, 4, d), DTYPES[dtype]), jnp.zeros_like(v), jnp.asarray(v),
        jnp.arange(b)[:, None], jnp.ones(b, jnp.int32))
    want = np.broadcast_to(codes.astype(np.float32).reshape(b, 1, d), out.shape)
    if machine.ARCH == "gfx90a" and dtype == "fp16":
      # Its matrix instructions take subnormal numbers for zeros.
      want = np.where(abs(want) < 2.0**-14, 0, want)
    # A sum of zeros and -0 is 0.
    np.testing.assert_array_equal(np.float32(out), want + np.float32(0))

  @parameterized.parameters("bf16", "fp16")
  def test_infinite_value(self, dtype):
    """That of the last key is the result; behind it nothing is."""
    lengths = np.array([1, 33, 40], np.int32)
    b, d, pages = len(lengths), 64, 3
    k = jnp.zeros((b * pages, 16, 1, d), DTYPES[dtype])
    last = np.arange(b) * pages + (lengths - 1) // 16, (lengths - 1) % 16
    v = k.at[*last, 0, 3].set(jnp.inf)
    out = aiter.paged_attention_decode(
        jnp.zeros((b, 4, d), DTYPES[dtype]), k, v,
        jnp.arange(b * pages).reshape(b, pages), jnp.asarray(lengths))
    want = np.where(np.arange(d) == 3, np.inf, 0)
    np.testing.assert_array_equal(np.float32(out),
                                  np.broadcast_to(want, out.shape))

  @parameterized.product(decode=[True, False], dtype=["bf16", "fp16"],
                         d=[40, 128])
  def test_small_scales(self, decode, dtype, d):
    """Weights times tokens' scales of values may be less than float16 has."""
    p = cases.Problem(Case(dtype=dtype, cache="int8", scale="token", d=d,
                           decode=decode))
    p.v = np.random.default_rng(0).integers(-127, 128, p.v.shape, np.int8)
    p.v_scale *= np.float32(1e-7)
    fn, options, arrays = cases.call(p)
    out, _ = fn(**arrays, **options)
    want = p.exact()[0]
    np.testing.assert_allclose(np.float64(out), want, rtol=0,
                               atol=0.02 * np.abs(want).max())

  @parameterized.parameters(128, 100)
  def test_dense_cache(self, size):
    """A page as long as the cache."""
    case = Case(lengths=((1, 77), (1, 5)), d=128)
    p = cases.Problem(case)
    rng = np.random.default_rng(0)
    p.k, p.v = (cases.cache_of((2, size, case.hk, 128), p.q.dtype, rng)
                for _ in range(2))
    p.table = np.arange(2, dtype=np.int32)[:, None]
    p.case = dataclasses.replace(case, page=size)
    fn, options, arrays = cases.call(p)
    out, _ = fn(**arrays, **options)
    check_error(self, out, p.exact()[0], p.exact(DTYPES[case.dtype])[0], "bf16")

  def test_no_pages(self):
    """Nor any sequence: a cache, a table or a batch without anything."""
    q, pool = jnp.ones((2, 4, 16)), jnp.ones((3, 4, 2, 16))
    table, lengths = jnp.zeros((2, 3), jnp.int32), jnp.array([5, 9])
    for pool_, table_ in ((pool[:0], table), (pool, table[:, :0])):
      out, lse = aiter.paged_attention_decode(
          q, pool_, pool_, table_, lengths, return_lse=True)
      self.assertTrue((out == 0).all())
      self.assertTrue((lse == -jnp.inf).all())
    out = aiter.paged_attention_decode(q[:0], pool, pool, table[:0],
                                       lengths[:0])
    self.assertEqual(out.shape, (0, 4, 16))

  @parameterized.parameters("bf16", "fp16")
  def test_as_dense(self, dtype):
    """The same numbers as attention to keys that lie together."""
    case = Case(dtype=dtype, lengths=((5, 21), (16, 16), (2, 30)),
                decode=False, soft_cap=3.0, sinks=True, slopes=True,
                window=(11, -1), page=4)
    p = cases.Problem(case)
    fn, options, arrays = cases.call(p)
    out, lse = fn(**arrays, **options)
    ends = np.cumsum([0, *p.lengths]).astype(np.int32)
    k, v = aiter.gather_kv_cache(
        arrays["k_cache"], arrays["v_cache"], arrays["block_table"],
        jnp.asarray(ends), total_tokens=int(ends[-1]))
    rows = int(p.cu[-1])
    dense, dense_lse = aiter.flash_attn_varlen(
        arrays["q"][:rows], k, v, arrays["cu_seqlens_q"], jnp.asarray(ends),
        causal=True, window_size=(11, -1), logits_soft_cap=3.0,
        alibi_slopes=arrays["alibi_slopes"], sink=arrays["sinks"],
        return_lse=True)
    close = dict(rtol=2e-2, atol=2e-2 if dtype == "bf16" else 2e-3)
    np.testing.assert_allclose(np.float32(out[:rows]), np.float32(dense),
                               **close)
    np.testing.assert_allclose(lse[:, :rows], dense_lse, rtol=1e-3, atol=1e-3)


class BatchesTest(PagedTestCase):

  @parameterized.parameters(*((i,) for i in range(-(-BATCHES // _EACH))))
  def test_mixed(self, seed):
    """Prefill, chunks and decoding together, by programs made once."""
    for i, case in enumerate(cases.batches(
        seed, _EACH, *machine.size((80, 600), (40, 200), (12, 60)))):
      self.check(case, 1000 * seed + i)


if __name__ == "__main__":
  absltest.main()
