# SPDX-License-Identifier: Apache-2.0
"""Sampling against its oracle: tokens are equal, on any machine.

The oracle (oracle.py) is of integers and says exactly which columns are kept
and which one is drawn; that its weights and exponentials are those of the
definitions float64 says here, and chi-square that draws follow them.
"""

import functools

import hypothesis
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness import cases, errors, machine, sharding, transforms
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from sampling import oracle

import jax
from jax import lax
from jax._src.aiter.sampling import exact
from jax._src.aiter.sampling import op as sampling_op
from jax.experimental import aiter

DTYPES = {"bf16": ml_dtypes.bfloat16, "fp32": np.float32}
_NAN, _INF = float("nan"), float("inf")
KEY = 7


def normal(b, v, dtype="fp32", scale=2.0, seed=0):
  rng = np.random.default_rng(seed)
  return (rng.standard_normal((b, v)) * scale).astype(DTYPES[dtype])


def words_of(keys, counters):
  """Philox's keys and counters of rows, as documented."""
  words = [np.asarray(jax.random.bits(k, (2,), jnp.uint32)) for k in keys]
  return np.array([[*w, c, 0] for w, c in zip(words, counters)],
                  np.uint32).reshape(-1, 4)


def exponentials(b, v, key=KEY):
  keys = words_of([jax.random.key(key)] * b, range(b))
  return oracle.exponential_of(oracle.words_of(keys, v))


def bits(allow):
  """A mask of bool [b, v]: int32 [b, ceil(v / 32)]."""
  padded = np.pad(allow, ((0, 0), (0, -allow.shape[1] % 32)))
  words = np.packbits(padded, axis=-1, bitorder="little")
  return np.ascontiguousarray(words).view(np.int32)


def of_xla(x, k, **options):
  """lax.top_k on the CPU."""
  return jax.jit(functools.partial(lax.top_k, k=k, **options))(
      jax.device_put(x, machine.CPUS[0]))


class SamplingTestCase(parameterized.TestCase):

  def check(self, logits, allow=None, **options):
    """sample's tokens are the oracle's; returns what may be drawn."""
    b, v = logits.shape
    got = jax.jit(functools.partial(aiter.sample, order=options.get(
        "order", "joint")))(
            jnp.asarray(logits), jax.random.key(KEY),
            **{n: t for n, t in options.items() if n != "order"},
            mask=None if allow is None else bits(allow))
    want, kept = oracle.sample(
        logits, exponentials(b, v), allow=allow, **options)
    np.testing.assert_array_equal(got, want, f"{options}")
    return kept

  def check_select(self, x, starts, ends, k):
    got = jax.jit(lambda *args: aiter.top_k_per_row_prefill(
        *args, k, return_values=True))(x, starts, ends)
    wide = np.asarray(x).astype(np.float32)
    want = np.full((x.shape[0], k), -1, np.int32)
    values = np.full(want.shape, -_INF, np.float32)
    for row, v, begin, end in zip(range(len(x)), wide, starts, ends):
      columns = np.arange(max(begin, 0), min(end, v.size))
      # NaN first, then the largest; of equal ones the lower column.
      order = np.lexsort((columns, -np.nan_to_num(v[columns], nan=0),
                          ~np.isnan(v[columns])))
      columns = np.sort(columns[order[:k]])
      want[row, :columns.size] = columns
      values[row, :columns.size] = v[columns]
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(np.asarray(got[1], np.float32), values)


LIMITS = (
    dict(), dict(temperature=0.5), dict(top_k=5), dict(top_p=0.7),
    dict(min_p=0.05), dict(top_k=20, top_p=0.8, temperature=1.5),
    dict(top_k=20, top_p=0.8, order="top_k_first"),
    dict(top_k=9, top_p=0.6, min_p=0.1, order="top_k_first"))


class NumbersTest(SamplingTestCase):

  @parameterized.product(
      options=machine.sample(LIMITS, 4), dtype=machine.sample(DTYPES, 2))
  def test_limits(self, options, dtype):
    b, v = machine.size((5, 1000), (4, 1000), (2, 520))
    self.check(normal(b, v, dtype), **options)

  @parameterized.parameters(*machine.sample(
      [(1, 1), (3, 111), (1, 4096), (2, 9001), (19, 64), (2, 40000)], 4))
  def test_sizes(self, b, v):
    self.check(normal(b, v))
    self.check(normal(b, v, "bf16"), top_k=min(40, v), top_p=0.9)

  def test_per_row(self):
    logits = normal(7, 300)
    self.check(
        logits, temperature=np.array([0, 1, 0.1, 2, 1, 0, 1], np.float32),
        top_k=np.array([3, 0, 5, 1, 300, 0, 1 << 30], np.int32),
        top_p=np.array([0.5, 1, 0.3, 0.9, 0, 1, 0.99], np.float32),
        min_p=np.array([0, 0.1, 0.5, 0, 0, 1, 0], np.float32))

  def test_ties(self):
    logits = np.zeros((4, 200), np.float32)
    logits[1, ::3] = 1
    logits[2, 7] = -0.0
    logits[3, 50:60] = 4
    for options in (dict(top_k=3), dict(top_p=0.5), dict(temperature=0),
                    dict(top_k=3, top_p=0.5, order="top_k_first")):
      kept = self.check(logits, **options)
      if options.get("temperature") != 0:
        self.assertEqual(list(kept.sum(1))[:3:2], [200, 200])
    np.testing.assert_array_equal(aiter.greedy_sample(logits), [0, 0, 0, 50])

  def test_one_bin(self):
    """More columns than a list of candidates holds."""
    logits = np.zeros((1, 17000), np.float32)
    logits[0, ::2] = -1e-4
    self.check(logits, top_k=9000, top_p=0.4)

  def test_dead_columns(self):
    logits = normal(6, 100)
    logits[0, ::2], logits[1, 5:], logits[2, [3, 9]] = -_INF, _NAN, _INF
    logits[3] = -_INF
    logits[4, 0], logits[4, 1] = np.finfo(np.float32).max, -1e38
    allow = np.random.default_rng(1).random((6, 100)) < 0.4
    allow[5] = False
    for options in machine.sample((dict(), dict(top_k=4), dict(top_p=0.5),
                                   dict(temperature=0)), 3):
      self.check(logits, **options)
      self.check(logits, allow, **options)
    got = aiter.greedy_sample(logits, mask=bits(allow).view(np.uint32))
    live = allow & (logits > -_INF)
    want = [np.argmax(np.where(m, row, -_INF)) if m.any() else -1
            for row, m in zip(logits, live)]
    np.testing.assert_array_equal(got, want)
    self.assertEqual(got[5], -1)

  def test_keys_of_rows(self):
    """A row's token is that of the row alone, wherever it is."""
    logits, ks = normal(5, 333), jax.random.split(jax.random.key(3), 5)
    draw = jax.jit(functools.partial(aiter.sample, top_k=40))
    got = draw(logits, ks)
    e = oracle.exponential_of(oracle.words_of(words_of(ks, [0] * 5), 333))
    np.testing.assert_array_equal(got, oracle.sample(logits, e, top_k=40)[0])
    turn = np.array([3, 0, 4, 2, 1])
    np.testing.assert_array_equal(draw(logits[turn], ks[turn]), got[turn])
    for i in range(2):
      self.assertEqual(draw(logits[i:i + 1], ks[i]), got[i])

  def test_exponentials(self):
    e = aiter.exponential(jax.random.key(KEY), (3, 1001))
    np.testing.assert_array_equal(e, exponentials(3, 1001))
    np.testing.assert_array_max_ulp(
        aiter.exponential(jax.random.key(KEY), (3, 1001), 3.0),
        np.asarray(e) / np.float32(3), maxulp=int(machine.GPU))
    for dtype in DTYPES:
      logits = normal(3, 1001, dtype)
      given = functools.partial(
          aiter.mixed_sample_outer_exponential, logits, e, eps=0.0)
      for t in (1.0, 0.3, 0.0):
        np.testing.assert_array_equal(
            given(t), aiter.sample(logits, jax.random.key(KEY), t))
    # AITER's check: the formula as it stands, in float64.
    e = np.random.default_rng(5).exponential(size=(3, 1001)).astype(np.float32)
    p = np.exp(normal(3, 1001).astype(np.float64) / 0.7)
    np.testing.assert_array_equal(
        aiter.random_sample_outer_exponential(normal(3, 1001), e, 0.7),
        np.argmax(p / p.sum(-1, keepdims=True) / (e + 1e-10), -1))

  @parameterized.parameters(*machine.sample(
      [(0, 0.5), (5, 1.0), (7, 0.9), (0, 1.0)], 2))
  def test_from_probs(self, k, p):
    probs = np.exp(normal(4, 500))
    probs[:, ::5] = 0
    probs[1] /= probs[1].sum()
    probs[2] = 0
    probs[3] = np.round(probs[3])
    want = oracle.sample(probs, exponentials(4, 500), 1.0, k, p, probs=True)[0]
    key = jax.random.key(KEY)
    np.testing.assert_array_equal(
        aiter.top_k_top_p_sampling_from_probs(probs, k, p, key=key), want)
    if k == 0:
      np.testing.assert_array_equal(
          aiter.top_p_sampling_from_probs(probs, p, key=key), want)
    self.assertEqual(want[2], -1)

  @parameterized.parameters(1, 7, 64)
  def test_renorm(self, k):
    p = np.exp(normal(3, 300)).round(1) + np.float32(0.125)
    p /= p.sum(-1, keepdims=True)
    kth = np.sort(p, -1)[:, -k, None]
    want = np.where(p >= kth, p, 0).astype(np.float64)
    np.testing.assert_allclose(
        aiter.top_k_renorm_probs(p, k), want / want.sum(-1, keepdims=True),
        rtol=2e-6)
    of_rows = np.array([k, 0, 300], np.int32)
    np.testing.assert_array_equal(
        aiter.top_k_renorm_probs(p, of_rows)[0],
        aiter.top_k_renorm_probs(p, k)[0])

  def test_subnormal_temperature(self):
    logits = normal(4, 700).round()  # Of equal ones the first, or any.
    self.check(logits, temperature=np.array(
        [0, 9e-39, 1e-45, 2.0**-126], np.float32))

  @cases.examples(60, 16, 6)
  @hypothesis.given(st.data())
  def test_any(self, data):
    draw = data.draw
    b, v = draw(st.integers(1, 6)), draw(st.integers(1, machine.size(
        5000, 3000, 700)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    scale = draw(st.sampled_from([1e-6, 0.1, 1.0, 5.0, 300.0]))
    logits = normal(b, v, dtype, scale, draw(st.integers(0, 99)))
    if draw(st.booleans()):
      logits = logits.astype(np.float32).round().astype(logits.dtype)
    number = lambda low, high: np.array(draw(st.lists(
        st.floats(low, high, width=32), min_size=b, max_size=b)), np.float32)
    options = {}
    if draw(st.booleans()):
      options["temperature"] = number(0, 3)
    if draw(st.booleans()):
      options["top_k"] = np.array(draw(st.lists(
          st.integers(0, v + 3), min_size=b, max_size=b)), np.int32)
    if draw(st.booleans()):
      options["top_p"] = number(0, 1)
    if draw(st.booleans()):
      options["min_p"] = number(0, 1)
    options["order"] = draw(st.sampled_from(["joint", "top_k_first"]))
    allow = None
    if draw(st.booleans()):
      allow = np.random.default_rng(1).random((b, v)) < draw(
          st.sampled_from([0.0, 0.1, 0.9]))
    self.check(logits, allow, **options)


class RankTest(parameterized.TestCase):

  def check(self, x, k):
    got = jax.jit(aiter.top_k, static_argnums=1)(x, k)
    transforms.assert_same(self, got, of_xla(x, k))

  @parameterized.product(
      dtype=machine.sample(["bf16", "fp32"], 2), k=machine.sample(
          [1, 50, 64, 300], 2))
  def test_top_k(self, dtype, k):
    self.check(normal(3, machine.size(9000, 3000, 2500), dtype), k)
    self.check(normal(3, 301, dtype).round(), k)
    self.check(normal(3, 1301, dtype).round(), k)

  # Short rows, others, and those of XLA's kernel, whose order is another one.
  @parameterized.parameters(100, 1000, 1024)
  def test_numbers(self, columns):
    x = normal(5, columns)
    x[0, [3, 9]], x[0, [4, 5]] = _NAN, _INF
    x[1], x[2] = -_INF, _NAN
    x[3] = np.where(np.arange(columns) % 2, 0.0, -0.0)
    x[4, 3], x[4, 5:] = -_NAN, -_INF
    self.check(x, 8)
    self.check(x, 20)
    self.check(x.astype(np.float16), 100)

  def test_shapes(self):
    x = normal(6, 1200).reshape(2, 3, 1200)
    self.check(x, 9)
    self.check(x[0, 0], 9)
    transforms.assert_same(
        self, aiter.top_k(x, 2, axis=1), of_xla(x, 2, axis=1))
    transforms.assert_same(
        self, jax.vmap(lambda t: aiter.top_k(t, 3), 1)(x),
        of_xla(x.swapaxes(0, 1), 3))

  @machine.where(not machine.SIMULATED)
  def test_left_to_xla(self):
    x = normal(6, 2000)
    for k, t in ((0, x), (2, x.astype(np.int32)), (9, x[:0]), (1025, x)):
      self.check(t, k)

  @parameterized.product(platform=["rocm", "cuda"], columns=[1000, 1001])
  def test_short_rows(self, platform, columns):
    text = jax.export.export(
        jax.jit(functools.partial(aiter.top_k, k=3)), platforms=[platform],
        disabled_checks=aiter.EXPORT_CHECKS)(
            jax.ShapeDtypeStruct((2, columns), jnp.float32)).mlir_module()
    self.assertEqual("sampling_top_k" in text,
                     (platform, columns) != ("cuda", 1000))

  @parameterized.parameters(100, 1100)
  def test_gradient(self, columns):
    x = normal(3, columns)
    values, places = of_xla(x, 7)
    got = jax.jit(lambda x: jax.jvp(
        lambda x: aiter.top_k(x, 7), (x,), (2 * x,))[1][0])(jnp.asarray(x))
    np.testing.assert_array_equal(got, 2 * np.asarray(values))
    got = jax.jit(jax.grad(lambda x: transforms.weighted(
        aiter.top_k(x, 7)[0])))(jnp.asarray(x))
    want = np.zeros_like(x)
    np.put_along_axis(want, np.asarray(places), np.sin(
        np.arange(21, dtype=np.float32)).reshape(3, 7), 1)
    np.testing.assert_allclose(got, want, atol=1e-6)

  @machine.where(not machine.SIMULATED)
  def test_gradient_of_renorm(self):
    p = jax.nn.softmax(jnp.asarray(normal(2, 40)))
    def plain(p):
      kept = jnp.where(p >= lax.top_k(p, 5)[0][:, -1:], p, 0)
      return kept / jnp.sum(kept, -1, keepdims=True)
    transforms.assert_close(
        self, *(jax.grad(lambda p, fn=fn: transforms.weighted(fn(p)))(p)
                for fn in (lambda p: aiter.top_k_renorm_probs(p, 5), plain)))


class SelectTest(SamplingTestCase):

  @parameterized.product(
      dtype=machine.sample(["bf16", "fp16", "fp32"], 2), k=machine.sample(
          [1, 100, 2048, 30000], 2))
  def test_spans(self, dtype, k):
    n = machine.size(40000, 5000, 2500)
    x = normal(5, n, "fp32" if dtype == "fp16" else dtype)
    x = x.astype(np.float16) if dtype == "fp16" else x
    starts = np.array([0, 7, n // 2, 40, 11], np.int32)
    ends = np.array([n, n - 3, n // 2 + 30, 40, 3], np.int32)
    self.check_select(x, starts, ends, k)
    # Many equal numbers, of which some are taken.
    self.check_select(np.round(x), starts, ends, k)

  def test_numbers(self):
    x = normal(5, 100)
    x[0, [3, 9]], x[0, [4, 5]] = _NAN, _INF
    x[1], x[2] = -_INF, _NAN
    x[3] = np.where(np.arange(100) % 2, 0.0, -0.0)
    x[4, 3], x[4, 5:] = -_NAN, -_INF
    self.check_select(x, np.zeros(5, int), np.full(5, 100), 20)
    self.check_select(x, np.full(5, -3), np.full(5, 200), 99)
    self.check_select(x, np.full(5, 2), np.full(5, 12), 150)

  def test_decode(self):
    x = normal(6, 64)
    lengths = np.array([64, 9, 1])
    got = aiter.top_k_per_row_decode(x, 2, lengths, 12)
    ends = np.array([63, 64, 8, 9, 0, 1])
    np.testing.assert_array_equal(
        got, aiter.top_k_per_row_prefill(x, np.zeros(6, int), ends, 12))
    self.assertEqual(np.sum(np.asarray(got) >= 0, 1).tolist(),
                     np.minimum(ends, 12).tolist())

  @parameterized.product(
      dtype=machine.sample(["bf16", "fp16", "fp32"], 1), largest=[False, True],
      bounded=[False, True])
  def test_plain(self, dtype, largest, bounded):
    x = np.round(4 * normal(5, 60)).astype(cases.DTYPES[dtype]) / 4
    x[0, :9] = [_NAN, _INF, -_INF, 0.0, -0.0, _INF, -_NAN, -_INF, 0.0]
    starts, ends = np.array([0, 7, 30, -4, 11]), np.array([60, 40, 31, 99, 3])
    bounds = dict(row_starts=starts, row_ends=ends) if bounded else {}
    call = functools.partial(aiter.topk_plain, topk=20, largest=largest)
    out, ids = jax.jit(call)(x, **bounds)
    self.assertEqual(out.dtype, x.dtype)
    wide = np.where(np.isnan(x), _INF, x).astype(np.float64)
    for i, row in enumerate(wide):
      cols = range(60) if not bounded else range(
          max(starts[i], 0), min(ends[i], 60))
      # Only of the largest is NaN told from infinity.
      nan = lambda c, i=i: largest and not np.isnan(x[i, c])
      want = sorted(cols, key=lambda c, row=row: (
          nan(c), -row[c] if largest else row[c], c))[:20]
      lack = 20 - len(want)
      np.testing.assert_array_equal(ids[i], want + [-1] * lack)
      np.testing.assert_array_equal(np.asarray(out[i], np.float32), [
          *x[i, want].astype(np.float32),
          *[-_INF if largest else _INF] * lack])
    if bounded:
      half = call(x, row_starts=starts)
      np.testing.assert_array_equal(
          half[1], call(x, row_starts=starts, row_ends=np.full(5, 60))[1])

  @parameterized.parameters(
      (dict(topk=9), ValueError, "topk is 9.*1 to 8"),
      (dict(x=np.ones(3, np.float32)), ValueError, r"x is float32\[3\]"),
      (dict(x=np.ones((2, 3), int)), TypeError, "x's dtype is int64"),
      (dict(largest=1), TypeError, "largest is 1"),
      (dict(row_ends=np.ones(3, int)), ValueError, "row_ends"))
  def test_plain_refused(self, replaced, error, words):
    with self.assertRaisesRegex(error, f"topk_plain: {words}"):
      aiter.topk_plain(**(dict(x=normal(2, 8), topk=3) | replaced))

  @parameterized.parameters(
      (dict(k=0), ValueError, "k"), (dict(row_ends=np.ones(3, int)), ValueError,
                                     "row_ends"),
      (dict(row_starts=np.ones(2)), TypeError, "row_starts"))
  def test_refused(self, replaced, error, words):
    args = dict(logits=normal(2, 8), row_starts=np.zeros(2, int),
                row_ends=np.ones(2, int), k=3) | replaced
    with self.assertRaisesRegex(error, words):
      aiter.top_k_per_row_prefill(**args)


class TransformsTest(SamplingTestCase):

  def test_vmap(self):
    logits = normal(6, 200).reshape(2, 3, 200)
    keys = jax.random.split(jax.random.key(1), 2)
    top_k = np.array([[3, 0, 9], [1, 5, 2]], np.int32)
    fn = lambda x, key, k: aiter.sample(x, key, 0.8, k, 0.9)
    for axes in ((0, 0, 0), (0, None, None), (None, 0, None)):
      args = [t if a == 0 else t[0]
              for t, a in zip((logits, keys, top_k), axes)]
      args = [jnp.asarray(t) if t.dtype != keys.dtype else t for t in args]
      transforms.assert_same(
          self, jax.jit(jax.vmap(fn, axes))(*args),
          transforms.loop_over(fn, axes, 2)(*args))

  @sharding.on_hosts
  @parameterized.parameters(False, True)
  def test_sharded(self, explicit):
    logits, key = normal(8, 120), jax.random.key(KEY)
    fn = jax.jit(lambda x, t: (
        aiter.sample(x, key, t, 20, 0.9), aiter.top_k(x, 5)))
    args = logits, np.full(8, 0.5, np.float32)
    want = fn(*args)
    mesh = sharding.mesh(explicit=explicit)
    with jax.set_mesh(mesh):
      on_mesh = sharding.put(mesh, args, (P("x"), P("x")))
      compiled = fn.lower(*on_mesh).compile()
      transforms.assert_same(self, fn(*on_mesh), want)
      self.assertEmpty(sharding.collectives(compiled))

  def test_one_program(self):
    fn = jax.jit(lambda x, t, k, p: aiter.sample(x, jax.random.key(KEY), t, k,
                                                 p))
    x = normal(2, 300)
    for t, k, p in ((1.0, 0, 1.0), (0.0, 5, 0.5), (0.5, 7, 0.2)):
      want, _ = oracle.sample(x, exponentials(2, 300), t, k, p)
      np.testing.assert_array_equal(
          fn(x, jnp.float32(t), jnp.int32(k), jnp.float32(p)), want)
    self.assertEqual(fn._cache_size(), 1)

  def test_dtypes(self):
    x, key = normal(2, 300, "bf16"), jax.random.key(KEY)
    want = aiter.sample(x, key, top_k=9)
    for dtype in (np.float32, np.float16):
      np.testing.assert_array_equal(
          aiter.sample(x.astype(dtype), key, top_k=9), want)

  @machine.where(not machine.SIMULATED)
  def test_nothing(self):
    key = jax.random.key(0)
    for b, v in ((0, 5), (2, 0), (0, 0)):
      x = np.zeros((b, v), np.float32)
      for tokens in (aiter.sample(x, key, 1, 3, 0.5), aiter.greedy_sample(x)):
        np.testing.assert_array_equal(tokens, np.full(b, -1, np.int32))

  def test_gradient_is_zero(self):
    x = jnp.asarray(normal(2, 50))
    got = jax.jit(jax.grad(lambda x: jnp.sum(aiter.sample(
        x, jax.random.key(0), 1, 3, 0.5).astype(jnp.float32) * x[:, 0])))(x)
    self.assertEqual(np.count_nonzero(np.asarray(got)[:, 1:]), 0)


class DistributionTest(parameterized.TestCase):
  """Draws, counted."""

  @machine.where(not machine.SIMULATED)
  @parameterized.parameters(
      dict(), dict(top_k=5), dict(top_p=0.8), dict(min_p=0.1),
      dict(temperature=0.6, top_k=7, top_p=0.9),
      dict(temperature=2.0, top_k=6, top_p=0.7, order="top_k_first"))
  def test_chi_square(self, temperature=1.0, order="joint", **limits):
    logits = np.array([1.5, -1, 0.3, 0.2, 2, -0.5, 0, 1], np.float32)
    n = 40000
    tokens = jax.jit(functools.partial(aiter.sample, order=order))(
        jnp.broadcast_to(logits, (n, 8)), jax.random.key(11), temperature,
        **limits)
    p = np.exp(logits.astype(np.float64) / temperature)
    kept = oracle.sample(logits[None], np.ones((1, 8), np.float32), temperature,
                         order=order, **limits)[1][0]
    p = np.where(kept, p, 0) / p[kept].sum()
    counts = np.bincount(tokens, minlength=8)
    self.assertEqual(counts[~kept].sum(), 0)
    chi = (((counts - n * p) ** 2)[kept] / (n * p)[kept]).sum()
    self.assertLess(chi, 30)  # Of 7 degrees of freedom: one in 10,000.

  def test_weights(self):
    x = np.concatenate([
        np.linspace(0, 80, 5001), 2.0 ** -np.arange(40.0)]).astype(np.float32)
    got, whole = map(np.asarray, jax.jit(exact.exp_minus)(x))
    want, of_oracle = oracle.exp_minus(x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(whole, of_oracle)
    e = np.exp(-np.minimum(x, 64).astype(np.float64))
    np.testing.assert_allclose(got, e, rtol=2e-7)
    np.testing.assert_allclose(whole, e * 2**31, rtol=2e-7, atol=0.51)

  def test_exponentials(self):
    near = np.arange(300)
    words = np.concatenate([
        near, 2**32 - 1 - near, 2 ** np.arange(32),
        np.random.default_rng(0).integers(0, 2**32, 20000)]).astype(np.uint32)
    got = np.asarray(jax.jit(exact.exponential)(words))
    np.testing.assert_array_equal(got, oracle.exponential_of(words))
    u = np.maximum(words.astype(np.float64), 1) / 2**32
    np.testing.assert_allclose(got, -np.log1p(-u), rtol=2e-7, atol=2.0**-32)

  def test_totals(self):
    rng = np.random.default_rng(0)
    for n in (1, 1000, 1 << 21):
      t = rng.integers(0, 2**31, (1, n), endpoint=True).astype(np.uint32)
      t[0, :n // 2] = 1 << 31
      exactly = int(t.astype(np.uint64).sum())
      high, low = (int(x[0]) for x in exact.total(jnp.asarray(t)))
      self.assertEqual(high << 32 | low, exactly)
      for p in (0.0, 1e-9, 0.1, 0.9999999, 1.0):
        high, low = (int(x[0]) for x in exact.share(
            jnp.full(1, p, jnp.float32), exact.total(jnp.asarray(t))))
        whole = int(np.float64(np.float32(p)) * 2**24)
        self.assertEqual(high << 32 | low, max(exactly * whole >> 24, 1))


class ErrorsTest(parameterized.TestCase):

  GOOD = dict(logits=jnp.zeros((2, 40)), key=jax.random.key(0))

  @parameterized.named_parameters(
      ("rank", ValueError, dict(logits=jnp.zeros(4)), ["logits", "[4]"]),
      ("dtype", TypeError, dict(logits=jnp.zeros((2, 4), jnp.int32)),
       ["logits", "int32", "bfloat16"]),
      ("cols", ValueError, dict(logits=np.broadcast_to(
          np.float32(0), (1, (1 << 21) + 1))), ["logits", "2097152"]),
      ("key", ValueError, dict(key=None), ["key", "PRNG"]),
      ("keys", ValueError, dict(key=jax.random.split(jax.random.key(0), 3)),
       ["key", "2 of them"]),
      ("key_dtype", TypeError, dict(key=jnp.zeros(2)), ["key", "float32"]),
      ("temperature", ValueError, dict(temperature=-1.0),
       ["temperature", "-1.0"]),
      ("temperatures", ValueError, dict(temperature=np.float32([1, -1])),
       ["temperature", "-1"]),
      ("temperature_shape", ValueError, dict(temperature=jnp.ones(3)),
       ["temperature", "[3]", "[2]"]),
      ("top_k", ValueError, dict(top_k=-2), ["top_k", "-2"]),
      ("top_k_type", TypeError, dict(top_k=0.5), ["top_k", "0.5"]),
      ("top_k_dtype", TypeError, dict(top_k=jnp.ones(2)), ["top_k", "float32"]),
      ("top_p", ValueError, dict(top_p=1.5), ["top_p", "1.5"]),
      ("top_p_nan", ValueError, dict(top_p=_NAN), ["top_p", "nan"]),
      ("min_p", ValueError, dict(min_p=-0.1), ["min_p", "-0.1"]),
      ("order", ValueError, dict(order="k"), ["order", "'k'", "joint"]),
      ("mask", ValueError, dict(mask=jnp.zeros((2, 1), jnp.int32)),
       ["mask", "[2, 1]", "[2, 2]"]),
      ("mask_dtype", TypeError, dict(mask=jnp.zeros((2, 2), bool)),
       ["mask", "bool", "uint32"]))
  def test_sample(self, error, replaced, words):
    traced = not any(isinstance(t, np.ndarray) for t in replaced.values())
    errors.check(self, aiter.sample, self.GOOD, error, replaced, words, traced)

  @parameterized.named_parameters(
      ("k", ValueError, dict(k=5), ["k is 5", "from 0 to 4"]),
      ("k_type", TypeError, dict(k=1.5), ["k", "1.5"]),
      ("axis", ValueError, dict(axis=2), ["axis", "2"]),
      ("scalar", ValueError, dict(operand=jnp.float32(1)), ["operand", "axis"]),
      ("list", TypeError, dict(operand=[1.0]), ["operand", "list", "array"]))
  def test_top_k(self, error, replaced, words):
    errors.check(self, aiter.top_k, dict(operand=jnp.zeros((2, 4)), k=2),
                 error, replaced, words)

  @parameterized.named_parameters(
      ("shape", ValueError, dict(exponentials=jnp.ones((2, 3))),
       ["exponentials", "[2, 3]", "[2, 4]"]),
      ("eps", ValueError, dict(eps=-1.0), ["eps", "-1.0"]))
  def test_given(self, error, replaced, words):
    errors.check(
        self, aiter.mixed_sample_outer_exponential,
        dict(logits=jnp.zeros((2, 4)), exponentials=jnp.ones((2, 4)),
             temperatures=1.0), error, replaced, words)

  @parameterized.named_parameters(
      ("shape", ValueError, dict(shape=(2, 3, 4)), ["shape", "(2, 3, 4)"]),
      ("lambd", ValueError, dict(lambd=0.0), ["lambd", "0.0"]))
  def test_exponential(self, error, replaced, words):
    errors.check(self, aiter.exponential,
                 dict(key=jax.random.key(0), shape=(2, 3)), error, replaced,
                 words)


class CrossEntropyTest(parameterized.TestCase):
  """The loss of float64, and its gradient, the softmax less the label."""

  def check(self, dtype, shape, labels, scale=3.0):
    x = normal(1, np.prod(shape), scale=scale).reshape(shape).astype(dtype)
    weights = np.random.default_rng(1).standard_normal(shape[:-1])

    def weighted(x, labels):
      loss = aiter.cross_entropy(x, labels)
      return jnp.sum(loss * weights.astype(np.float32)), loss

    (_, loss), dx = jax.jit(jax.value_and_grad(weighted, has_aux=True))(
        x, labels)
    self.assertEqual((loss.dtype, dx.dtype), (np.float32, x.dtype))
    wide = x.astype(np.float64)
    shares = np.exp(wide - np.max(wide, -1, keepdims=True))
    lse = np.max(wide, -1) + np.log(np.sum(shares, -1))
    shares /= np.sum(shares, -1, keepdims=True)
    here = labels[..., None] == np.arange(shape[-1])
    there = np.any(here, -1)
    want = np.where(there, lse - np.sum(np.where(here, wide, 0), -1), 0)
    np.testing.assert_allclose(loss, want, rtol=2e-6, atol=2e-6)
    want = (shares - here) * (there * weights)[..., None]
    np.testing.assert_allclose(
        np.asarray(dx, np.float64), want, rtol=2 * float(jnp.finfo(dtype).eps),
        atol=2e-6)

  @parameterized.product(dtype=("bfloat16", "float16", "float32"),
                         shape=((3, 5, 100), (7, 1), (2, 3000)))
  def test_shapes(self, dtype, shape):
    labels = np.random.default_rng(2).integers(0, shape[-1], shape[:-1])
    self.check(jnp.dtype(dtype), shape, labels.astype(np.int32))

  @parameterized.parameters(np.int32, np.int64, np.int8)
  def test_labels_that_are_none(self, dtype):
    labels = np.array([0, -1, 9, 10, 5, -100, 100], dtype)
    self.check(jnp.dtype("bfloat16"), (7, 10), labels)

  def test_large_logits(self):
    self.check(jnp.dtype("float32"), (4, 50), np.arange(4), scale=1e4)

  def test_hidden_columns(self):
    """A logit of -inf, as of a padded vocabulary, has no share."""
    x = jnp.array([[1.0, -jnp.inf, 2.0]])
    f = lambda x: aiter.cross_entropy(x, jnp.array([2]))[0]
    want = [np.exp(1) / (np.exp(1) + np.exp(2)), 0]
    np.testing.assert_allclose(jax.grad(f)(x)[0], [*want, -want[0]], rtol=1e-5)

  @parameterized.parameters(np.inf, -np.inf, np.nan)
  def test_padding_holds_anything(self, value):
    """What a row without a label holds reaches no derivative either."""
    x = jnp.stack([jnp.arange(4.0), jnp.full(4, value)])
    f = lambda x: jnp.sum(aiter.cross_entropy(x, jnp.array([1, -100])))
    for order in (jax.value_and_grad(f), jax.hessian(f)):
      transforms.assert_close(self, order(x), order(x.at[1].set(0)))

  @sharding.on_hosts
  def test_labels_sharded_otherwise(self):
    x, labels = normal(8, 64), np.arange(8) * 7
    args = sharding.put(sharding.mesh(explicit=True), (x, labels),
                        (P(None, "y"), P("y")))
    transforms.assert_close(self, jax.jit(aiter.cross_entropy)(*args),
                            aiter.cross_entropy(x, labels))

  @sharding.on_hosts
  @parameterized.product(spec=(P("x"), P(None, "y"), P("x", "y")),
                         explicit=(False, True))
  def test_sharded(self, spec, explicit):
    """By rows nothing is sent; by columns a few numbers a row."""
    x, labels = normal(8, 64), np.arange(8) * 7
    call = jax.value_and_grad(
        lambda x, labels: jnp.sum(jnp.sin(aiter.cross_entropy(x, labels))))
    args = sharding.put(sharding.mesh(explicit=explicit), (x, labels),
                        (spec, P(*spec[:1])))
    compiled = jax.jit(call).lower(*args).compile()
    self.assertNotIn("all-gather", sharding.collectives(compiled))
    transforms.assert_close(self, compiled(*args), jax.jit(call)(x, labels))

  @parameterized.named_parameters(
      ("logits", TypeError, dict(logits=jnp.zeros((2, 4), int)),
       ["logits", "int32", "bfloat16"]),
      ("scalar", ValueError, dict(logits=jnp.float32(1)),
       ["logits", "[..., v]"]),
      ("columns", ValueError, dict(logits=jnp.zeros((2, 0))),
       ["logits", "[2, 0]", "at least 1"]),
      ("labels", TypeError, dict(labels=jnp.zeros(2)), ["labels", "float32"]),
      ("shape", ValueError, dict(labels=jnp.zeros((2, 1), int)),
       ["labels", "[2, 1]", "[2]"]))
  def test_bad_arguments(self, error, replaced, words):
    errors.check(self, aiter.cross_entropy,
                 dict(logits=jnp.zeros((2, 4)), labels=jnp.zeros(2, int)),
                 error, replaced, words)


@machine.where(machine.PLATFORM is not None)
class KernelTest(absltest.TestCase):

  def test_kernels_serve(self):
    """No call here quietly ran the reference."""
    for dtype in sampling_op._DTYPES:
      x = jax.ShapeDtypeStruct((4, 1000), jnp.dtype(dtype))
      rows = sampling_op.Rows(x)
      self.assertIsNone(sampling_op.draw.unserved(
          machine.PLATFORM, sampling_op._serves(
              sampling_op.Config("draw"), rows)))
      for k in (1, 64, 65, 1000):
        self.assertIsNone(sampling_op.rank.unserved(
            machine.PLATFORM, sampling_op._rank_serves(k, rows)))


if __name__ == "__main__":
  absltest.main()
