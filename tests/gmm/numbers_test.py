# SPDX-License-Identifier: Apache-2.0
"""Grouped products against their oracle, on any machine.

Operands are small integers: every sum is exact in float32, and what is rounded
to a result's type has one right value, bit for bit.
"""

import functools

import hypothesis
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from gmm import oracle
from harness import cases, errors, machine, sharding, transforms
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax import lax
from jax._src.aiter.core import rounding
from jax._src.aiter.gmm import op as gmm_op
from jax.experimental import aiter
from jaxlib import gpu_aiter

SIZES = (
    (5, 0, 19, 0, 8),        # of 32 rows: all of them
    (0, 0, 0),               # none has any
    (0, 17, 0, 3),           # twelve rows are left
    (40, 9),                 # more than there are
    (9, -4, 9),              # less than none
    (1,) * 20,
    (32,))


def integers(rng, *shape, dtype="bf16"):
  return rng.integers(-4, 5, shape).astype(cases.DTYPES[dtype])


class GmmTestCase(parameterized.TestCase):

  def check(self, m, k, n, sizes, dtype="bf16", out=None):
    """A product and its two gradients, of both layouts of the matrices."""
    rng = np.random.default_rng(m + k + n)
    a = integers(rng, m, k, dtype=dtype)
    b = integers(rng, len(sizes), k, n, dtype=dtype)
    # Of few values: a sum of many rows is exact all the same.
    g = rng.integers(-1, 2, (m, n)).astype(cases.DTYPES[out or dtype])
    sizes = np.array(sizes, np.int32)
    want = (oracle.rows_times(a, b, sizes),
            oracle.rows_times(g, b.swapaxes(1, 2), sizes),
            oracle.rows_by_rows(a, g, sizes))
    for transposed in (False, True):
      def run(a, b, g, transposed=transposed):
        y, vjp = jax.vjp(lambda a, b: aiter.ragged_dot(
            a, b, sizes, preferred_element_type=out and cases.DTYPES[out],
            transpose_rhs=transposed), a, b)
        return y, *vjp(g)

      given = b.swapaxes(1, 2) if transposed else b
      y, da, db = jax.jit(run)(a, given, g)
      if transposed:
        db = jnp.swapaxes(db, 1, 2)
      for got, exact, kind in ((y, want[0], out or dtype),
                               (da, want[1], dtype), (db, want[2], dtype)):
        self.assertEqual(got.dtype, cases.DTYPES[kind])
        np.testing.assert_array_equal(
            np.asarray(got), exact.astype(cases.DTYPES[kind]),
            f"{m} {k} {n} {sizes} {transposed}")


# (gates, activation, whether there is a bias, limit, alpha)
ENDS = (
    ("none", "none", True, 0.0, 1.0),
    ("halves", "gelu_tanh", True, 2.0, 1.0),
    ("pairs", "swiglu", True, 2.0, 1.5),
    ("none", "silu", False, 0.0, 1.0),
    ("none", "gelu", True, 0.0, 1.0),
    ("none", "gelu_tanh", True, 0.0, 1.0),
    ("none", "relu", True, 0.0, 1.0),
    ("halves", "silu", True, 0.0, 1.0),
    ("halves", "silu", False, 2.0, 1.0),
    ("halves", "swiglu", False, 0.0, 1.5),
    ("pairs", "gelu", False, 0.0, 1.0),
    ("pairs", "silu", True, 0.0, 1.0))


class EndsTestCase(parameterized.TestCase):

  def check_ends(self, m, k, n, sizes, layout, ends=ENDS, dtype="bf16"):
    """What is done with products, which are exact; there are m x n results.

    A call that is differentiated has two kernels, whose bits are the same where
    there are gates.
    """
    rng = np.random.default_rng(m + k + n)
    dtype = cases.DTYPES[dtype]
    sizes = np.array(sizes, np.int32)
    for gates, activation, biased, limit, alpha in ends:
      if (gates, layout) == ("halves", "nn"):
        continue
      columns = n if gates == "none" else 2 * n
      a = rng.integers(-1, 2, (m, k)).astype(dtype)
      b = rng.integers(-1, 2, (len(sizes), k, columns)).astype(dtype)
      h = oracle.rows_times(a, b, sizes)
      bias = None
      if biased:
        bias = rng.standard_normal((len(sizes), columns), np.float32)
        for (first, end), row in zip(oracle.runs(sizes, m), bias):
          h[first:end] += row
      want = oracle.ended(h, gates, activation, limit, alpha)
      for out in (dtype,) if gates != "none" else (dtype, np.float32):
        cfg = gmm_op.Config(np.dtype(out).name, layout, gates=gates,
                            activation=activation, limit=limit, alpha=alpha)

        def one(a, b, bias, cfg=cfg):
          return gmm_op.product(cfg, gmm_op.Operands(a, b, sizes, bias=bias))

        got, two = jax.jit(lambda *x, one=one: (one(*x), jax.vjp(one, *x)[0]))(
            a, b.swapaxes(1, 2) if layout == "nt" else b, bias)
        error = 1e-5 if out is np.float32 else float(ml_dtypes.finfo(out).eps)
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, rtol=error, atol=1e-4,
            err_msg=f"{layout} {gates} {activation}")
        np.testing.assert_allclose(
            np.asarray(two, np.float64), np.asarray(got, np.float64),
            rtol=error, atol=0 if gates != "none" else 1e-4)
        if gates != "none":
          np.testing.assert_array_equal(two, got)


class EndsTest(EndsTestCase):

  @parameterized.parameters(*machine.sample([
      (layout, *call) for layout in ("nn", "nt") for call in (
          (60, 40, 80, (30, 0, 9), "bf16"), (60, 37, 70, (30, 0, 9), "bf16"),
          (22, 40, 80, (13, 0, 5), "bf16"), (500, 136, 264, (200, 130), "bf16"),
          (500, 136, 264, (200, 130), "fp16"))], 2))
  def test_ends(self, layout, m, k, n, sizes, dtype):
    self.check_ends(m, k, n, sizes, layout, machine.sample(ENDS, 3), dtype)


class NumbersTest(GmmTestCase):

  @parameterized.parameters(*machine.sample(SIZES, 3))
  def test_sizes(self, *sizes):
    k, n = machine.size((72, 136), (8, 24), (72, 40))
    self.check(32, k, n, sizes)

  @parameterized.parameters(*machine.sample([
      (1, 1, 1, "bf16"), (33, 7, 5, "fp16"), (300, 64, 264, "bf16"),
      (130, 200, 72, "fp16"), (260, 40, 8, "fp32")], 3))
  def test_shapes(self, m, k, n, dtype):
    for sizes in ((m // 3, 0, m - m // 3), (2,) * (m // 2)):
      self.check(m, k, n, sizes or (1,), dtype)

  @parameterized.parameters("bf16", "fp16")
  def test_float32_result(self, dtype):
    self.check(40, 16, 24, (30, 4), dtype, out="fp32")

  @machine.where(machine.GPU and not machine.SIMULATED)
  def test_large(self):
    for m, k, n, sizes in (
        (3000, 512, 768, (1000, 1, 0, 999, 0, 600)),
        (4096, 264, 520, (4096, 0)), (4096, 520, 264, (32,) * 128),
        (512, 1024, 256, (4,) * 128), (700, 256, 512, (7,) * 100),
        (5000, 2048, 1024, (129, 127, 0, 2000, 64, 65, 1800, 1))):
      self.check(m, k, n, sizes)

  @cases.examples(60, 4, 2)
  @hypothesis.given(st.data())
  def test_random(self, data):
    m = data.draw(st.integers(1, machine.size(2000, 40, 90)))
    k, n = (8 * data.draw(st.integers(1, machine.size(60, 4, 12))) - odd
            for odd in data.draw(st.sampled_from([(0, 0), (0, 0), (3, 1)])))
    sizes = data.draw(st.lists(st.integers(0, m), min_size=1, max_size=9))
    self.check(m, k, n, sizes)

  def test_numbers(self):
    """Of any numbers as near to float64's as the plain formula is."""
    rng = np.random.default_rng(0)
    m, k, n = machine.size((600, 512, 256), (60, 64, 32), (90, 64, 32))
    a, b = (rng.standard_normal(s).astype(cases.DTYPES["bf16"])
            for s in ((m, k), (3, k, n)))
    sizes = np.array([m // 2, 0, m // 3], np.int32)
    got = aiter.ragged_dot(a, b, sizes)
    plain = sum(
        np.where((np.arange(m) >= first)[:, None]
                 & (np.arange(m) < end)[:, None],
                 (a.astype(np.float32) @ w.astype(np.float32)).astype(a.dtype),
                 np.zeros((), a.dtype))
        for (first, end), w in zip(oracle.runs(sizes, m), b))
    cases.check_error(self, got, oracle.rows_times(a, b, sizes), plain, "bf16")

  def test_what_is_no_number(self):
    """Rows of others, and those that nobody owns, change nothing."""
    rng = np.random.default_rng(1)
    a, b = integers(rng, 40, 16), integers(rng, 3, 16, 8)
    sizes = np.array([9, 11, 13], np.int32)
    a[9:20] = a[33:] = np.nan
    g = np.ones((40, 8), a.dtype)
    g[9:20] = g[33:] = np.inf
    y, vjp = jax.vjp(lambda a, b: aiter.ragged_dot(a, b, sizes), a, b)
    da, db = vjp(jnp.asarray(g))
    for got in (y[:9], y[20:], da[:9], da[20:33], db[0], db[2]):
      self.assertTrue(np.isfinite(np.asarray(got, np.float32)).all())
    self.assertFalse(np.asarray(y[33:]).any())
    self.assertFalse(np.asarray(da[33:]).any())

  def test_group_offset(self):
    rng = np.random.default_rng(2)
    sizes = np.array([3, 10, 0, 7, 9], np.int32)
    a, b = integers(rng, 32, 16), integers(rng, 5, 16, 24)
    whole = np.asarray(oracle.rows_times(a, b, sizes))
    by_rows = oracle.rows_by_rows(a, a, sizes)
    call = jax.jit(functools.partial(
        aiter.gmm, preferred_element_type=jnp.bfloat16))
    for offset in (0, 1, 3):
      window = slice(offset, offset + 2)
      first, end = (f(sizes[:window.stop][slice(None, n)].sum()) for f, n in (
          (int, offset), (int, None)))
      got = call(a, b[window], sizes, group_offset=np.array([offset]))
      want = np.zeros_like(whole)
      want[first:end] = whole[first:end]
      np.testing.assert_array_equal(got, want.astype(a.dtype))
      kept = np.full(whole.shape, 7, a.dtype)
      got = call(a, b[window], sizes, group_offset=np.int32(offset),
                 existing_out=kept)
      want = kept.astype(np.float64)
      want[first:end] = whole[first:end]
      np.testing.assert_array_equal(got, want.astype(a.dtype))
      got = aiter.tgmm(a.T, a, sizes, group_offset=np.int32(offset),
                       num_actual_groups=2)
      np.testing.assert_array_equal(got, by_rows[window])
    got = aiter.tgmm(a.T, a, sizes, existing_out=np.ones((5, 16, 16),
                                                         np.float32))
    np.testing.assert_array_equal(got, by_rows + 1)
    got = aiter.gmm(a, b.swapaxes(1, 2), sizes, transpose_rhs=True)
    np.testing.assert_array_equal(got, whole)


class Float32Test(parameterized.TestCase):
  """GPUs multiply bfloat16 parts of float32; the CPU's formula passes too."""

  # An error of a result, in parts of the sum of its products' magnitudes. A
  # matrix unit may cut off what a sum of so many has no bits for.
  BOUNDS = {None: 2.0**-16, "high": 2.0**-16, "highest": 2.0**-19}

  @parameterized.product(precision=(None, "high", "highest"),
                         transposed=(False, True))
  def test_precision(self, precision, transposed):
    """Gradients have the product's, given or JAX's own where it is traced."""
    m, k, n = machine.size((600, 512, 264), (40, 24, 16), (70, 36, 40))
    rng = np.random.default_rng(0)
    # No number is near one of bfloat16's.
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32) / 3
    a, b, g = normal(m, k), normal(3, k, n), normal(m, n)
    sizes = np.array([m // 2, 0, m // 3], np.int32)
    given = b.swapaxes(1, 2) if transposed else b

    def run(a, b, g, given=None):
      y, pull = jax.vjp(lambda a, b: aiter.ragged_dot(
          a, b, sizes, given, transpose_rhs=transposed), a, b)
      return y, pull

    def step(a, b, g):
      with jax.default_matmul_precision(precision):
        y, pull = run(a, b, g)
      of_default = y, *pull(g)
      y, pull = run(a, b, g, precision)
      return of_default, (y, *pull(g))

    for y, da, db in jax.jit(step)(a, given, g):
      db = np.swapaxes(db, 1, 2) if transposed else db
      for got, product, x, w in (
          (y, oracle.rows_times, a, b),
          (da, oracle.rows_times, g, b.swapaxes(1, 2)),
          (db, oracle.rows_by_rows, a, g)):
        bound = self.BOUNDS[precision] * product(abs(x), abs(w), sizes)
        error = abs(np.asarray(got, np.float64) - product(x, w, sizes))
        self.assertTrue((error <= bound).all(), (error / bound).max())

  def test_ends(self):
    """Gates and ups stay float32 until the result."""
    rng = np.random.default_rng(0)
    m, k, n = 40, 24, 16
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    a, b, bias = normal(m, k), normal(2, k, 2 * n), normal(2, 2 * n)
    sizes = np.array([13, 20], np.int32)
    h = oracle.rows_times(a, b, sizes)
    h[:13] += bias[0]
    h[13:33] += bias[1]
    for gates, activation in (
        ("none", "gelu_tanh"), ("halves", "silu"), ("pairs", "gelu")):
      cfg = gmm_op.Config("float32", "nt", gates=gates, activation=activation,
                          precision="highest")
      got = jax.jit(lambda *x, cfg=cfg: gmm_op.product(cfg, gmm_op.Operands(
          *x, sizes, bias=bias)))(a, b.swapaxes(1, 2))
      transforms.assert_close(self, got, oracle.ended(
          h, gates, activation, 0.0, 1.0).astype(np.float32))

  @parameterized.parameters("default", "highest")
  def test_what_is_not_small(self, precision):
    """Infinities, NaN and the largest numbers give what float32 gives."""
    most = np.finfo(np.float32).max
    a = np.full((9, 8), 0.1, np.float32)
    a[0, 0], a[1, 1], a[2, 2], a[3, 3], a[4, 4] = (
        np.inf, -np.inf, np.nan, most, -most)
    a[5, :2] = np.inf, -np.inf
    b = np.full((1, 8, 16), 0.1, np.float32)
    b[..., 1::3] = -0.3
    b[..., 2::3] = 0.5  # Its second part is 0.
    b[0, 7, 5] = np.inf
    got = jax.jit(lambda a, b: aiter.ragged_dot(
        a, b, np.array([8]), precision=precision))(a, b)
    with np.errstate(invalid="ignore"):
      want = oracle.rows_times(a, b, np.array([8]))
    np.testing.assert_allclose(got, want.astype(np.float32), rtol=2.0**-15)

  def test_parts(self):
    rng = np.random.default_rng(0)
    t = rng.integers(0, 2**32, 5000, np.uint32).view(np.float32)
    t = t[np.isfinite(t) & (abs(t) > 2.0**-100)]
    for count, error in ((1, 2.0**-8), (2, 2.0**-16), (3, 0)):
      parts = jax.jit(rounding.bfloat16_parts, static_argnums=1)(t, count)
      self.assertEqual({p.dtype.name for p in parts}, {"bfloat16"})
      self.assertLessEqual(
          abs(sum(np.asarray(p, np.float64) for p in parts) / t - 1).max(),
          error)
    for part in rounding.bfloat16_parts(np.float32([np.nan, -np.inf]), 2)[1:]:
      np.testing.assert_array_equal(np.asarray(part, np.float32), [0, 0])

  def test_kernels(self):
    """Every GPU's kernels are staged, for the gradients too."""
    call = jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(
        aiter.ragged_dot(a, b, jnp.array([4, 2])))), (0, 1)))
    traced = call.trace(jnp.ones((6, 8)), jnp.ones((2, 8, 16)))
    for platform in (machine.PLATFORM,) if machine.GPU else (
        "cuda", "rocm"):
      text = traced.lower(lowering_platforms=(platform,)).as_text()
      self.assertEqual(text.count(f"@{gpu_aiter.target(platform, 'gmm')}("), 3)


class ScaledTestCase(parameterized.TestCase):
  """Powers of two for scales: what is exact without them is with them."""

  KINDS = {"i8": np.int8, "fn": ml_dtypes.float8_e4m3fn,
           "fnuz": ml_dtypes.float8_e4m3fnuz}

  def problem(self, kind, m, k, n, groups, blocks, seed=0):
    """(arguments without sizes, a and b in float64)."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-4, 5, s).astype(np.float32).astype(self.KINDS[kind])
            for s in ((m, k), (groups, n, k)))
    along = lambda size: -(-size // 128)
    shapes = (((m, along(k)), (groups, along(n), along(k))) if blocks
              else ((m, 1), (groups, n, 1)))
    scales = [np.exp2(rng.integers(-1, 2, s)).astype(np.float32)
              for s in shapes]
    spread = lambda t, axis, size: np.repeat(t, 128, axis).take(
        range(size), axis) if blocks else t
    wide_a = a.astype(np.float64) * spread(scales[0], 1, k)
    wide_b = b.astype(np.float64) * spread(spread(scales[1], 1, n), 2, k)
    return (a, b, *scales), wide_a, wide_b.swapaxes(1, 2)

  def check(self, kind, m, k, n, sizes, blocks):
    args, a, b = self.problem(kind, m, k, n, len(sizes), blocks)
    call = aiter.grouped_gemm_i8 if kind == "i8" else aiter.grouped_gemm_fp8
    want = oracle.rows_times(a, b, sizes)
    for dtype in (np.float32, ml_dtypes.bfloat16):
      got = jax.jit(functools.partial(call, preferred_element_type=dtype))(
          *args, np.array(sizes, np.int32))
      np.testing.assert_array_equal(got, want.astype(dtype))


class ScaledTest(ScaledTestCase):

  @parameterized.parameters(*machine.sample([
      (kind, blocks, sizes)
      for kind in ("i8", "fn", "fnuz") for blocks in (False, True)
      if kind != "i8" or not blocks
      for sizes in ((40, 0, 21), (3, 5))], 4))
  def test_scaled(self, kind, blocks, sizes):
    k, n = machine.size((272, 400), (144, 160), (144, 160))
    self.check(kind, 70, k, n, sizes, blocks)
    if not machine.SIMULATED:
      self.check(kind, 9, 7, 5, sizes, blocks)

  @machine.where(machine.GPU and not machine.SIMULATED)
  def test_large(self):
    for kind, blocks in (("i8", False), ("fn", False), ("fn", True)):
      self.check(kind, 3000, 1024, 768, (1000, 1, 0, 999, 600), blocks)
      self.check(kind, 300, 1024, 768, (3,) * 100, blocks)

  def test_errors(self):
    args, _, _ = self.problem("fn", 4, 144, 16, 2, True)
    good = dict(zip(("a", "b", "a_scale", "b_scale"), args),
                group_sizes=jnp.array([1, 2]))
    for error, replaced, words in (
        (TypeError, dict(a=jnp.ones((4, 144))), ["a's dtype", "float32"]),
        (ValueError, dict(b=args[1][:, :, :9]), ["b", "[any, any, 144]"]),
        (ValueError, dict(b_scale=jnp.ones((2, 16))),
         ["a_scale", "[4, 2]", "b_scale", "[2, 16]", "[2, 1, 2]"]),
        (ValueError, dict(group_sizes=jnp.array([1])), ["group_sizes"])):
      errors.check(self, aiter.grouped_gemm_fp8, good, error, replaced, words)
    with self.assertRaisesRegex(TypeError, "grouped_gemm_fp8.*no gradient"):
      jax.grad(lambda s: aiter.grouped_gemm_fp8(
          *args[:2], s, args[3], good["group_sizes"]).sum())(
              jnp.asarray(args[2]))


class PackedTestCase(parameterized.TestCase):
  """Numbers of four bits: sums of few powers of two are exact."""

  HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12]) / 2

  def e2m1(self, rng, *shape):
    """(bytes, scales, values) of random numbers."""
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    scale = rng.integers(126, 129, (*shape[:-1], shape[-1] // 32)).astype(
        np.uint8)
    wide = np.where(codes & 8, -1, 1) * self.HALVES[codes & 7]
    return (codes[..., ::2] | codes[..., 1::2] << 4, scale,
            wide * np.exp2(np.repeat(scale, 32, -1) - 127.0))

  def check(self, kind, m, k, n, sizes):
    """kind: of a, in MXFP4 products; or "i4"."""
    rng = np.random.default_rng(m + k + n)
    a_scale = None
    if kind == "e2m1":
      a, a_scale, wide_a = self.e2m1(rng, m, k)
    else:
      a = wide_a = rng.integers(-4, 5, (m, k)).astype(np.float64)
      if kind == "e4m3fn":
        a_scale = rng.integers(126, 129, (m, k // 32)).astype(np.uint8)
        wide_a = a * np.exp2(np.repeat(a_scale, 32, 1) - 127.0)
      a = a.astype(ml_dtypes.float8_e4m3fn if kind == "e4m3fn"
                   else ml_dtypes.bfloat16)
    shape = (len(sizes), n, k)
    if kind == "i4":
      b = rng.integers(-8, 8, shape)
      scale = np.exp2(rng.integers(-1, 2, (*shape[:2], k // 32)))
      wide_b = b * np.repeat(scale, 32, 2)
      args = (a, jnp.asarray(b, jnp.int4), scale.astype(ml_dtypes.bfloat16))
      call = aiter.grouped_gemm_i4
    else:
      b, b_scale, wide_b = self.e2m1(rng, *shape)
      args = a, b, a_scale, b_scale
      call = aiter.grouped_gemm_fp4
    want = oracle.rows_times(wide_a, wide_b.swapaxes(1, 2), sizes)
    for dtype in (np.float32, ml_dtypes.bfloat16):
      got = jax.jit(functools.partial(call, preferred_element_type=dtype))(
          *args, np.array(sizes, np.int32))
      np.testing.assert_array_equal(got, want.astype(dtype))


class PackedTest(PackedTestCase):

  @parameterized.parameters(machine.sample(
      ["bf16", "e4m3fn", "e2m1", "i4"], 2))
  def test_packed(self, kind):
    k, n = machine.size((288, 416), (96, 64), (288, 160))
    self.check(kind, 70, k, n, (40, 0, 21))
    if not machine.SIMULATED:
      self.check(kind, 9, 32, 5, (3, 5))

  @machine.where(machine.GPU and not machine.SIMULATED)
  def test_large(self):
    for kind in ("bf16", "e4m3fn", "e2m1", "i4"):
      self.check(kind, 3000, 1024, 768, (1000, 1, 0, 999, 600))
      self.check(kind, 300, 1024, 768, (3,) * 100)

  @machine.where(not machine.SIMULATED)
  def test_far_scales(self):
    """Powers of two from one end of float32 to the other, and NaN."""
    k, n = 96, 64
    b, scale, wide = self.e2m1(np.random.default_rng(1), 2, n, k)
    wide /= np.exp2(np.repeat(scale, 32, -1) - 127.0)
    scale[..., 0] = 2 + np.arange(n)  # Of 0.5 float32's least normal number.
    scale[..., 1] = 252 - np.arange(n)
    scale[..., 2] = 127
    scale[1, 5, 2] = 255
    power = np.where(scale == 255, np.nan, np.exp2(scale - 127.0))
    wide *= power.repeat(32, -1)
    for rows in (96, 16):
      # Each row of a takes one of a matrix's columns.
      taken = np.arange(rows) * (k // rows)
      a = np.zeros((2 * rows, k), ml_dtypes.bfloat16)
      a[np.arange(2 * rows), np.tile(taken, 2)] = 1
      want = wide[:, :, taken].swapaxes(1, 2).astype(np.float32)
      want[1, :, 5] = np.nan
      got = aiter.grouped_gemm_fp4(
          a, b, None, scale, np.array([rows, rows], np.int32),
          preferred_element_type=np.float32)
      np.testing.assert_array_equal(got, want.reshape(2 * rows, n))

  def test_scale_of_more(self):
    """int4 with a scale every 64 and 128."""
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, (9, 256)).astype(ml_dtypes.bfloat16)
    b = rng.integers(0, 256, (2, 32, 128)).astype(np.uint8)
    sizes = np.array([4, 5], np.int32)
    for block in (64, 128):
      scale = np.exp2(rng.integers(-1, 2, (2, 32, 256 // block))).astype(
          ml_dtypes.bfloat16)
      np.testing.assert_array_equal(
          aiter.grouped_gemm_i4(a, b, scale, sizes),
          aiter.grouped_gemm_i4(a, b, np.repeat(scale, block // 32, 2), sizes))

  def test_errors(self):
    good = dict(a=jnp.ones((4, 64), jnp.bfloat16),
                b=jnp.ones((2, 16, 32), jnp.uint8), a_scale=None,
                b_scale=jnp.ones((2, 16, 2), jnp.uint8),
                group_sizes=jnp.array([1, 2]))
    for error, replaced, words in (
        (TypeError, dict(a=jnp.ones((4, 64), jnp.int8)), ["a's dtype", "int8"]),
        (ValueError, dict(a=jnp.ones((4, 32), jnp.bfloat16)),
         ["a", "[4, 32]", "[any, 64]"]),
        (TypeError, dict(b=jnp.ones((2, 16, 32), jnp.int8)), ["b's dtype"]),
        (ValueError, dict(b_scale=jnp.ones((2, 16, 3), jnp.uint8)),
         ["b_scale", "[2, 16, 3]", "64 / 32"]),
        (ValueError, dict(a=jnp.ones((4, 64), jnp.float8_e4m3fn),
                          a_scale=jnp.ones((4, 3), jnp.uint8)),
         ["a_scale", "[4, 3]", "[4, 2]"])):
      errors.check(self, aiter.grouped_gemm_fp4, good, error, replaced, words)


class TransformTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(3)
    self.args = [jnp.asarray(rng.standard_normal(s), jnp.float32)
                 for s in ((12, 8), (3, 8, 16))]
    self.sizes = jnp.array([4, 0, 6])
    self.enter_context(jax.default_matmul_precision("highest"))

  def call(self, a, b):
    return aiter.ragged_dot(a, b, self.sizes)

  def loss(self, a, b):
    return jnp.sum(jnp.sin(self.call(a, b)))

  def plain(self, a, b):
    # JAX's own ragged dot has no second derivative.
    ends = jnp.cumsum(self.sizes)
    row = jnp.arange(len(a))[:, None]
    mine = (row >= ends - self.sizes) & (row < ends)
    return jnp.sum(jnp.sin(jnp.einsum(
        "mg,mk,gkn->mn", mine.astype(a.dtype), a, b, precision="highest")))

  def test_derivatives(self):
    """Backwards and forwards, once and twice."""
    both = lambda f: jax.jit(jax.grad(f, (0, 1)))(*self.args)
    transforms.assert_close(self, both(self.loss), both(self.plain))
    twice = lambda f: lambda a, b: sum(
        jnp.sum(jnp.cos(t)) for t in jax.grad(f, (0, 1))(a, b))
    transforms.assert_close(
        self, both(twice(self.loss)), both(twice(self.plain)), 1e-4)
    tangents = lambda f: jax.jvp(f, self.args, self.args)
    transforms.assert_close(self, tangents(self.loss), tangents(self.plain))

  @parameterized.product(offset=[None, 1], transposed=[False, True],
                         activation=[jax.nn.sigmoid, jax.nn.silu])
  def test_behind(self, offset, transposed, activation):
    """A bias of each group, and an activation: gradients, and no scatter."""
    a, b = self.args
    bias = np.random.default_rng(4).standard_normal((3, 16), np.float32)
    sizes = jnp.array([1, 4, 0, 6]) if offset else self.sizes
    given = jnp.swapaxes(b, 1, 2) if transposed else b

    def ours(a, b, bias):
      return aiter.ragged_dot(
          a, b, sizes, group_offset=offset, transpose_rhs=transposed, bias=bias,
          activation=activation)

    def plain(a, b, bias):
      first = offset or 0
      group = np.repeat([-1] * first + [0, 2, -1], [1] * first + [
          4, 6, 2 - first])
      out = activation(jnp.einsum(
          "mk,mkn->mn", a, (jnp.swapaxes(b, 1, 2) if transposed else b)[group],
          precision="highest") + bias[group])
      return jnp.where(group[:, None] < 0, 0, out)

    both = lambda f: jax.jit(jax.value_and_grad(
        lambda *t: jnp.sum(jnp.sin(f(*t))), (0, 1, 2)))
    args = (a, given, bias)
    transforms.assert_close(self, both(ours)(*args), both(plain)(*args))
    for platform in ("cuda", "rocm"):
      self.assertNotIn("stablehlo.scatter", both(ours).trace(*args).lower(
          lowering_platforms=(platform,)).as_text())
    np.testing.assert_array_equal(
        aiter.gmm(a, given, sizes, group_offset=offset, bias=bias,
                  transpose_rhs=transposed),
        aiter.ragged_dot(a, given, sizes, group_offset=offset, bias=bias,
                         transpose_rhs=transposed))

  def test_rounded_once(self):
    """What is behind the sums acts on them, not on a result's dtype."""
    a = jnp.full((2, 1), 256, jnp.bfloat16)
    out = aiter.ragged_dot(
        a, jnp.ones((1, 1, 1), jnp.bfloat16), np.array([2]),
        bias=jnp.full((1, 1), 1.0), activation=lambda t: t - 256)
    np.testing.assert_array_equal(out, np.ones((2, 1), ml_dtypes.bfloat16))

  def test_vmap(self):
    many = [jnp.stack([t, 2 * t]) for t in self.args]
    sizes = jnp.array([[4, 0, 6], [1, 2, 3]])
    got = jax.jit(jax.vmap(aiter.ragged_dot))(*many, sizes)
    want = jnp.stack([lax.ragged_dot(*(t[i] for t in many), sizes[i],
                                     precision=lax.Precision.HIGHEST)
                      for i in range(2)])
    transforms.assert_close(self, got, want)

  def test_checkpoint_and_scan(self):
    a, b = self.args
    square = jnp.concatenate([b, b[:, :, :8]], 2)[:, :, :8]

    @jax.checkpoint
    def layer(h, w):
      return h + jnp.tanh(self.call(h, w)), None

    loss = lambda w, unroll: jnp.sum(lax.scan(
        layer, a, jnp.stack([w] * 3), unroll=unroll)[0] ** 2)
    transforms.assert_close(
        self, jax.grad(loss)(square, 1), jax.grad(loss)(square, True))

  @machine.where(not machine.GPU)
  def test_columns_divide(self):
    mesh = sharding.mesh((2, 4), ("x", "y"))
    args = sharding.put(mesh, self.args, (P("x"), P(None, None, "y")))
    compiled = jax.jit(jax.grad(self.loss, (0, 1))).lower(*args).compile()
    transforms.assert_close(
        self, compiled(*args), jax.grad(self.plain, (0, 1))(*self.args))
    shards = jax.shard_map(
        self.call, mesh=mesh, in_specs=(P(), P(None, None, "y")),
        out_specs=P(None, "y"))
    transforms.assert_close(self, jax.jit(shards)(*self.args),
                            self.call(*self.args))


  @machine.where(not machine.GPU)
  @parameterized.product(offset=[None, 1], explicit=[False, True],
                         activation=[jnp.tanh, jax.nn.silu])
  def test_rows_divide(self, offset, explicit, activation):
    """Borders of shards cut groups in two; the last rows have none."""
    rng = np.random.default_rng(0)
    normal = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)
    a, b = normal(24, 8), normal(4 - (offset or 0), 8, 16)
    sizes = jnp.array([4, 0, 13, 4])
    offset = None if offset is None else jnp.array([offset])
    bias = normal(len(b), 16)
    call = jax.jit(lambda *t: aiter.ragged_dot(
        *t, group_offset=offset, bias=bias, activation=activation))
    both = jax.jit(jax.grad(lambda *t: jnp.sum(jnp.sin(call(*t))), (0, 1)))
    mesh = sharding.mesh((4,), ("x",), explicit)
    placed = sharding.put(mesh, (a, b, sizes), (P("x"), P(), P()))
    self.assertEmpty(sharding.collectives(call.lower(*placed).compile()))
    self.assertEqual(
        sharding.collectives(both.lower(*placed).compile()), {"all-reduce"})
    for f in (call, both):
      transforms.assert_close(self, f(*placed), f(a, b, sizes))


  @machine.where(not machine.GPU)
  def test_out_sharding(self):
    mesh = sharding.mesh((4,), ("x",), explicit=True)
    a, b = jnp.ones((24, 8)), jnp.ones((2, 8, 16))
    a, b, sizes = sharding.put(mesh, (a, b, jnp.array([20, 4])),
                               (P("x"), P(), P()))
    call = lambda a, *out: aiter.ragged_dot(a, b, sizes, None, None, None, *out)
    self.assertEqual(jax.typeof(call(a)).sharding.spec, P("x", None))
    for f in (call, jax.jit(call, static_argnums=1)):
      out = f(a, NamedSharding(mesh, P(None, "x")))
      self.assertEqual(jax.typeof(out).sharding.spec, P(None, "x"))
      np.testing.assert_array_equal(out, call(a))
    with jax.set_mesh(mesh):
      grad = jax.grad(lambda a: call(a, P()).sum())(a)
    np.testing.assert_array_equal(grad, np.full(a.shape, 16))


class ErrorTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("lhs", TypeError, dict(lhs=[1.0]), ["lhs", "list"]),
      ("lhs_dtype", TypeError, dict(lhs=jnp.ones((6, 8), jnp.int8)),
       ["lhs's dtype", "int8"]),
      ("rhs_dtype", TypeError, dict(rhs=jnp.ones((2, 8, 4), jnp.float16)),
       ["rhs's dtype", "float16", "float32"]),
      ("rhs_rank", ValueError, dict(rhs=jnp.ones((8, 4))), ["rhs", "rank 3"]),
      ("rhs_shape", ValueError, dict(rhs=jnp.ones((2, 7, 4))),
       ["rhs", "[2, 7, 4]", "[any, 8, any]"]),
      ("sizes_dtype", TypeError, dict(group_sizes=jnp.ones(2)),
       ["group_sizes's dtype", "float32"]),
      ("sizes", ValueError, dict(group_sizes=jnp.ones(3, jnp.int32)),
       ["group_sizes", "[3]", "[2]"]),
      ("result", TypeError, dict(preferred_element_type=jnp.int8),
       ["preferred_element_type", "int8"]),
      ("precision", TypeError, dict(precision="most"),
       ["precision", "most", "jax.numpy.dot"]),
      ("out_sharding", TypeError, dict(out_sharding="x"),
       ["out_sharding", "'x'", "NamedSharding"]),
      ("offset", ValueError, dict(group_offset=jnp.ones(2, jnp.int32)),
       ["group_offset", "int32[2]", "one integer"]),
      ("offset_below", ValueError, dict(group_offset=-1),
       ["group_offset is -1", ">= 0"]),
      ("bias", ValueError, dict(bias=jnp.ones(4)),
       ["bias", "[4]", "[2, 4]"]),
      ("bias_dtype", TypeError, dict(bias=jnp.ones((2, 4), jnp.int32)),
       ["bias's dtype", "int32"]),
      ("activation", TypeError, dict(activation="silu"),
       ["activation", "silu", "a function"]),
      ("activation_halves", ValueError, dict(activation=lambda t: t[:, ::2]),
       ["activation", "[6, 2]", "[6, 4]"]),
      ("transpose", TypeError, dict(transpose_rhs=1),
       ["transpose_rhs", "bool"]))
  def test_ragged_dot(self, error, replaced, words):
    good = dict(lhs=jnp.ones((6, 8)), rhs=jnp.ones((2, 8, 4)),
                group_sizes=jnp.array([2, 3]))
    errors.check(self, aiter.ragged_dot, good, error, replaced, words)

  @parameterized.named_parameters(
      ("rhs", dict(rhs=jnp.ones((5, 4))), ["rhs", "[5, 4]", "[6, any]"]),
      ("groups", dict(num_actual_groups=3), ["num_actual_groups", "3"]),
      ("out", dict(existing_out=jnp.ones((2, 8, 5))),
       ["existing_out", "[2, 8, 5]", "[2, 8, 4]"]))
  def test_tgmm(self, replaced, words):
    good = dict(lhs=jnp.ones((8, 6)), rhs=jnp.ones((6, 4)),
                group_sizes=jnp.array([2, 3]))
    errors.check(self, aiter.tgmm, good, ValueError, replaced, words)


class Mxfp4TrainingTest(parameterized.TestCase):
  """jax-aiter's primitives: a layer and its gradients, all of MXFP4."""

  @parameterized.parameters(
      dict(), *([] if machine.SIMULATED else [dict(sizes=(64, 0, 0, 64))]))
  def test_layer(self, sizes=(32, 0, 64), m=128, k=64, n=96):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(
        rng.standard_normal(shape), jnp.bfloat16)
    x, w, dy = normal(m, k), normal(len(sizes), n, k), normal(m, n)
    ends = np.cumsum(sizes).astype(np.int32)
    rows = lambda t: aiter.quantize_mxfp4_dim0(t)
    of_all = lambda t: tuple(
        a.reshape(*t.shape[:2], -1) for a in rows(t.reshape(-1, t.shape[2])))
    product = lambda a, b: aiter.grouped_mxfp4_fwd_da(
        a[0], b[0], a[1], b[1], ends)

    def step(x, w, dy):
      y = product(rows(x), of_all(w))
      dx = product(rows(dy), of_all(jnp.swapaxes(w, 1, 2)))
      return y, dx, aiter.grouped_mxfp4_dw(
          *aiter.quantize_mxfp4_dim1(dy), *aiter.quantize_mxfp4_dim1(x), ends,
          out_dtype=jnp.float32)

    def exact(t):
      """The numbers that rows are rounded to."""
      t = np.asarray(t)
      return np.asarray(aiter.mx_dequant(*aiter.mx_quant(
          t.reshape(-1, t.shape[-1]))), np.float64).reshape(t.shape)

    begin = (0, *ends)
    runs = [slice(a, b) for a, b in zip(begin, ends)]
    def grouped(a, b):
      out = np.zeros((m, b.shape[1]))
      for run, matrix in zip(runs, b):
        out[run] = a[run] @ matrix.T
      return out
    turned = lambda t: exact(np.asarray(t).T).T
    want = (grouped(exact(x), exact(w)),
            grouped(exact(dy), exact(np.swapaxes(np.asarray(w), 1, 2))),
            np.stack([turned(dy)[run].T @ turned(x)[run] for run in runs]))
    for got, to, error in zip(jax.jit(step)(x, w, dy), want,
                              (2.0**-8, 2.0**-8, 2.0**-20)):
      np.testing.assert_allclose(
          np.asarray(got, np.float64), to, rtol=error,
          atol=error * np.abs(to).max())

  @parameterized.parameters(
      ("quantize_mxfp4_dim0", dict(value=jnp.ones((4, 40))), ValueError,
       "value is float32.* k a multiple of 32"),
      ("quantize_mxfp4_dim1", dict(value=jnp.ones((4, 64))), ValueError,
       "value is float32.* m and k"),
      ("quantize_mxfp4_dim0", dict(value=jnp.ones((4, 32), int)), TypeError,
       "value's dtype is int32"),
      ("grouped_mxfp4_fwd_da", dict(lhs_scales=None), TypeError,
       "lhs_scales is a NoneType"),
      ("grouped_mxfp4_fwd_da", dict(group_end_offsets=np.array([3, 2])),
       ValueError, "group_end_offsets is"),
      ("grouped_mxfp4_fwd_da", dict(rhs_packed=np.ones((2, 8, 9), np.uint8)),
       ValueError, "rhs_scales is"),
      ("grouped_mxfp4_dw", dict(input_scales=np.ones((8, 3), np.uint8)),
       ValueError, "input_scales is"),
      ("grouped_mxfp4_dw", dict(out_dtype="int8"), TypeError,
       "out_dtype is 'int8'"))
  def test_errors(self, name, wrong, kind, message):
    ones = lambda *shape: np.ones(shape, np.uint8)
    good = {
        "grouped_mxfp4_fwd_da": dict(
            lhs_packed=ones(4, 16), rhs_packed=ones(2, 8, 16),
            lhs_scales=ones(4, 1), rhs_scales=ones(2, 8, 1),
            group_end_offsets=np.array([1, 3])),
        "grouped_mxfp4_dw": dict(
            grad_output_transposed=ones(8, 16), grad_output_scales=ones(8, 1),
            input_transposed=ones(8, 16), input_scales=ones(8, 1),
            group_end_offsets=np.array([1, 3])),
    }.get(name, {})
    with self.assertRaisesRegex(kind, f"^{name}: ({message})"):
      getattr(aiter, name)(**{**good, **wrong})


if __name__ == "__main__":
  absltest.main()
