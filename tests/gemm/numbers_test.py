# SPDX-License-Identifier: Apache-2.0
"""Matrix products: numbers against float64, transformations, errors.

Results and gradients are compared with a float64 oracle. The error may be twice
that of the plain formula, with every step in the dtypes of operands and result,
plus a floor: one unit in the last place of the largest value, and a unit of
float32 for every 16 numbers that a product sums, because matrix instructions
truncate what they add. Products of quantised matrices are compared with exact
arithmetic: for equality, where it fits the sum's type.
"""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import os
import re
from unittest import mock

import hypothesis
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import scipy.special
from absl.testing import absltest, parameterized
from harness import machine, sharding, transforms
from harness.cases import DTYPES, FLOOR, examples
from harness.machine import CPUS, PLATFORM
from harness.sharding import collectives
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax
from jax._src.aiter.core.operator import Key
from jax._src.aiter.gemm import op as gemm_op
from jax._src.aiter.gemm.op import Config, Operands
from jax.experimental import aiter
from jaxlib import gpu_aiter

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
FLOAT8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz)
# AITER_CASES=500 in the environment asks for so many random sizes.
CASES = int(os.environ.get("AITER_CASES", machine.size(12, 3, 1)))


def activate(name, z):
  """An activation of float64 and its derivative."""
  if name is None:
    return z, np.ones_like(z)
  if name == "relu":
    return np.maximum(z, 0), (z > 0).astype(z.dtype)
  if name == "gelu":
    phi = scipy.special.ndtr(z)
    return z * phi, phi + z * np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
  if name == "gelu_tanh":
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (z + 0.044715 * z**3))
    slope = c * (1 + 3 * 0.044715 * z * z) * (1 - t * t)
    return z * (1 + t) / 2, (1 + t) / 2 + z * slope / 2
  s = scipy.special.expit(z)
  return z * s, s * (1 + z * (1 - s))


@dataclasses.dataclass(frozen=True)
class Case:
  """One call of gemm; `batched` says that b has a's leading axes.

  transpose_b: b is given as [n, k], else as [k, n].
  """
  dtype: str = "bf16"
  m: int = 24
  n: int = 40
  k: int = 64
  lead: tuple[int, ...] = ()
  batched: bool = False
  bias: str = ""
  out: str = ""
  activation: str | None = None
  transpose_b: bool = True

  def inputs(self, seed=0):
    """a, b, bias, dout; float64, as rounded; none is subnormal."""
    rng = np.random.default_rng(seed)

    def draw(dtype, *shape, factor=1.0):
      t = (rng.standard_normal(shape) * factor).astype(DTYPES[dtype])
      return np.where(np.abs(t) < 2.0**-14, 0, t).astype(np.float64)

    return (draw(self.dtype, *self.lead, self.m, self.k),
            draw(self.dtype, *self.lead * self.batched, self.n, self.k,
                 factor=1 / (1 << (self.k.bit_length() // 2))),
            draw(self.bias or "fp32", self.n),
            draw(self.out or self.dtype, *self.lead, self.m, self.n))

  def call(self, a, b, bias):
    return aiter.gemm(
        a, b if self.transpose_b else b.mT, bias if self.bias else None,
        activation=self.activation, transpose_b=self.transpose_b,
        preferred_element_type=self.out and DTYPES[self.out] or None)

  def formula(self, a, b, bias):
    """The plain formula, each step in the result's dtype."""
    z = jnp.matmul(a, jnp.swapaxes(b, -1, -2), preferred_element_type=DTYPES[
        self.out or self.dtype])
    if self.bias:
      z = z + bias.astype(z.dtype)
    return gemm_op.ACTIVATIONS[self.activation](z)

  def oracle(self, inputs):
    """float64 results."""
    a, b, bias, dout = inputs
    z = a @ np.swapaxes(b, -1, -2) + (bias if self.bias else 0)
    y, slope = activate(self.activation, z)
    dz = dout * slope
    db = np.swapaxes(dz, -1, -2) @ a
    return dict(
        y=y, da=dz @ b,
        db=db if self.batched else db.sum(tuple(range(len(self.lead)))),
        dbias=dz.sum(tuple(range(dz.ndim - 1))))

  def results(self, function, inputs, device=None):
    """The same names, of a function (a, b, bias) -> y."""
    dtypes = (self.dtype, self.dtype, self.bias or "fp32",
              self.out or self.dtype)
    args = [jax.device_put(t.astype(DTYPES[d]), device)
            for t, d in zip(inputs, dtypes)]

    @jax.jit
    def run(a, b, bias, dout):
      y, vjp = jax.vjp(function, a, b, bias)
      return y, *vjp(dout.astype(y.dtype))

    out = run(*args)
    for t, d in zip(out, (dtypes[3], *dtypes[:3])):
      assert t.dtype == DTYPES[d], (t.dtype, d)
    return dict(zip(("y", "da", "db", "dbias"), (
        np.asarray(t, np.float64) for t in jax.device_get(out))))


class GemmTestCase(parameterized.TestCase):

  def check(self, case: Case, seed=0):
    inputs = case.inputs(seed)
    want = case.oracle(inputs)
    got = case.results(case.call, inputs)
    plain = case.results(case.formula, inputs, CPUS[0])
    dtypes = dict(y=case.out or case.dtype, da=case.dtype, db=case.dtype)
    if case.bias:
      dtypes["dbias"] = case.bias
    for name, dtype in dtypes.items():
      expected = want[name]
      self.assertEqual(got[name].shape, expected.shape)
      if not expected.size:
        continue
      error = np.max(np.abs(got[name] - expected))
      allowed = 2 * np.max(np.abs(plain[name] - expected))
      floor = FLOOR[dtype] * np.max(np.abs(expected))
      self.assertLessEqual(error, allowed + floor, f"{name} of {case}")

  def assert_close(self, got, want, tolerance=2e-5):
    transforms.assert_close(self, got, want, tolerance)


class NumbersTest(GemmTestCase):

  @parameterized.product(
      dtype=["bf16", "fp16"], out=["", "bf16", "fp16", "fp32"],
      bias=["", "fp32"])
  def test_types(self, dtype, out, bias):
    self.check(Case(dtype=dtype, out=out, bias=bias))

  @parameterized.product(
      activation=ACTIVATIONS, dtype=["bf16", "fp16"], bias=["", "bf16"])
  def test_activations(self, activation, dtype, bias):
    self.check(Case(dtype=dtype, activation=activation, bias=bias, m=20))

  @parameterized.parameters(
      *machine.sample([1, 2, 3, 7, 8, 15, 16, 31, 33, 64, 90, 150], 4))
  def test_skinny(self, m):
    """Few rows: k is divided, and its parts are summed."""
    self.check(Case(m=m, n=machine.size(1000, 96, 72), bias="fp32",
                    k=machine.size(4096, 1032, 264), activation="gelu"))

  @parameterized.parameters(*machine.sample([
      (128, 128, 64), (256, 384, 128), (65, 129, 40), (200, 24, 1000),
      (17, 33, 8), (5, 3, 7), (129, 127, 63), (1, 1, 1), (2, 1, 300),
      (1, 65, 5), (300, 8, 16)], 5))
  def test_shapes(self, m, n, k):
    """Multiples of a tile, of what is loaded at once, and of nothing."""
    self.check(Case(m=m, n=n, k=k, bias="fp32"))

  @mock.patch.multiple(gemm_op, _FEW_ROWS=0, _WORTH_A_COPY=1)
  def test_odd_rows(self):
    """Zeros are put behind rows that are not aligned."""
    self.check(Case(m=37, n=43, k=51, bias="fp32"))

  @parameterized.product(
      dtype=["bf16", "fp16"],
      size=[(1, 300, 469), (16, 259, 1031), (5, 270, 514), (24, 280, 777)])
  def test_few_odd_rows(self, dtype, size):
    """Rows of b begin anywhere, and those of a few are not copied."""
    m, n, k = size
    self.check(Case(dtype=dtype, m=m, n=n, k=k, bias="fp32",
                    activation="relu"))

  @parameterized.parameters(
      dict(bias="fp32", activation="gelu"), dict(dtype="fp16", out="fp32"),
      dict(m=3, n=264, k=machine.size(2048, 520, 264), bias="bf16"),
      dict(m=33, n=41, k=51), dict(lead=(2, 3), m=9, bias="fp32"),
      dict(lead=(3,), m=20, batched=True, activation="silu"))
  def test_kernels_of_flax(self, **options):
    """b is [k, n], and so is its gradient."""
    self.check(Case(transpose_b=False, **options))

  def test_kernels_of_flax_are_not_transposed(self):
    x = jax.ShapeDtypeStruct((24, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((64, 40), jnp.bfloat16)

    def both(x, w):
      y, vjp = jax.vjp(
          lambda x, w: aiter.gemm(x, w, transpose_b=False), x, w)
      return y, *vjp(y)

    program = jax.jit(both).trace(x, w).lower(lowering_platforms=("rocm",))
    self.assertEqual(program.as_text().count("hip_aiter_gemm"), 3)
    self.assertNotIn("stablehlo.transpose", program.as_text())

  def test_random_sizes(self):
    """Sums of integers, exact whatever tiles and parts they are made of."""
    rng = np.random.default_rng(0)

    @jax.jit
    def products(a, b, dout):
      y, vjp = jax.vjp(functools.partial(
          aiter.gemm, preferred_element_type=jnp.float32), a, b)
      return y, *vjp(dout)

    for _ in range(CASES):
      m, n, k = np.int64(2 ** rng.uniform(0, machine.size(12.5, 8, 6.5), 3))
      if rng.integers(3):  # For the fast kernels.
        n, k = -(-n // 8) * 8, -(-k // 8) * 8
      a, b, dout = (rng.integers(-2, 3, shape).astype(np.float32)
                    for shape in ((m, k), (n, k), (m, n)))
      want = a @ b.T, dout @ b, dout.T @ a
      args = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), dout
      for got in jax.device_get([products(*args), products(*args)]):
        for x, y in zip(got, want, strict=True):
          np.testing.assert_array_equal(x, y.astype(x.dtype), f"{m} {n} {k}")

  def test_large(self):
    size = machine.size(1024, 160, 160)
    self.check(Case(m=size + 8, n=size, k=size * 2, activation="silu"))
    self.check(Case(dtype="fp16", m=size, n=size + 8, k=size))

  @parameterized.product(
      lead=[(3,), (2, 3), (1,)], batched=[False, True], bias=["", "fp32"])
  def test_leading_axes(self, lead, batched, bias):
    self.check(Case(lead=lead, batched=batched, bias=bias, m=9,
                    activation="relu" if bias else None))

  @parameterized.parameters(*itertools.product(
      ("fp32", "bf16", "fp16"), ("", "bf16", "fp32"), (None, "silu")))
  def test_bias_types(self, bias, out, activation):
    self.check(Case(dtype="fp16", bias=bias, out=out, activation=activation))

  @parameterized.parameters(*itertools.product((None, "gelu"), ("", "bf16")))
  def test_float32(self, activation, out):
    self.check(Case(dtype="fp32", activation=activation, bias="fp32", out=out,
                    k=500))

  def test_vector(self):
    """One row may come without its axis."""
    case = Case(m=1, bias="fp32")
    a, b, bias = (jnp.asarray(t, jnp.bfloat16) for t in case.inputs()[:3])
    out = aiter.gemm(a[0], b, bias, activation="silu")
    self.assertEqual(out.shape, (case.n,))
    np.testing.assert_array_equal(
        out, aiter.gemm(a, b, bias, activation="silu")[0])

  @parameterized.parameters(
      ((0, 8), (16, 8)), ((4, 8), (0, 8)), ((4, 0), (16, 0)),
      ((0, 4, 8), (16, 8)), ((2, 0, 4, 8), (2, 0, 16, 8)))
  def test_empty(self, a, b):
    """Without columns to contract there remains the activated bias."""
    a, b = jnp.zeros(a, jnp.bfloat16), jnp.zeros(b, jnp.bfloat16)
    bias = jnp.arange(b.shape[-2]) - 1.0
    f = functools.partial(aiter.gemm, activation="relu")
    y, vjp = jax.vjp(f, a, b, bias)
    self.assertEqual(y.shape, (*a.shape[:-1], b.shape[-2]))
    np.testing.assert_array_equal(
        y, jnp.broadcast_to(jnp.maximum(bias, 0), y.shape))
    da, db, dbias = vjp(y)
    self.assertEqual((da.shape, db.shape), (a.shape, b.shape))
    np.testing.assert_array_equal(db, 0)
    np.testing.assert_array_equal(
        dbias, y.astype(jnp.float32).sum(tuple(range(y.ndim - 1))))

  def test_special_numbers(self):
    """NaN and infinity reach their own row and column alone."""
    a = jnp.ones((70, 40), jnp.bfloat16).at[3, 5].set(jnp.nan)
    b = jnp.ones((50, 40), jnp.bfloat16).at[7, 39].set(jnp.inf)
    out = np.asarray(aiter.gemm(a, b), np.float32)
    want = np.full((70, 50), 40.0)
    want[:, 7] = np.inf
    want[3] = np.nan
    np.testing.assert_array_equal(out, want)

  def test_sums_are_wide(self):
    """Neither sums nor what is activated are rounded before the end."""
    k = machine.size(4096, 4096, 512)
    a = jnp.ones((3, k), jnp.bfloat16)
    b = jnp.ones((5, k), jnp.bfloat16).at[:, 1].set(2.0**-6)
    out = aiter.gemm(a, b, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(out, k - 1 + 2.0**-6)
    bias = jnp.full(5, 1 - k, jnp.float32)
    for activation in (None, "relu"):
      out = aiter.gemm(a, b, bias, activation=activation)
      np.testing.assert_array_equal(out.astype(jnp.float32), 2.0**-6)
      # Nor when there is a gradient.
      out, _ = jax.vjp(functools.partial(
          aiter.gemm, activation=activation), a, b, bias)
      np.testing.assert_array_equal(out.astype(jnp.float32), 2.0**-6)

  # gfx90a's matrix instructions take subnormal numbers for zeros.
  @machine.where(machine.ARCH != "gfx90a")
  def test_subnormal(self):
    """Numbers below float16's normal ones count."""
    a = 2.0**-24 * np.arange(40)[:, None] * np.ones(32)
    out = aiter.gemm(a.astype(np.float16), np.ones((16, 32), np.float16))
    np.testing.assert_array_equal(out, (a @ np.ones((32, 16))))

  def test_same_bits(self):
    case = Case(m=9, n=200, k=machine.size(5000, 1000, 520), bias="fp32")
    first, second = (
        case.results(case.call, case.inputs()) for _ in range(2))
    for name, t in first.items():
      np.testing.assert_array_equal(t, second[name])

  @examples(40, 10, 5)
  @hypothesis.given(st.data())
  def test_any_shape(self, data):
    draw = data.draw
    size = lambda limit: st.integers(0, limit)
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    self.check(Case(
        dtype=draw(st.sampled_from(["bf16", "fp16"])), lead=lead,
        m=draw(size(machine.size(300, 70, 40))),
        n=draw(size(machine.size(300, 70, 40))),
        k=draw(size(machine.size(600, 300, 70))),
        batched=draw(st.booleans()), bias=draw(st.sampled_from(["", "fp32"])),
        out=draw(st.sampled_from(["", *DTYPES])),
        activation=draw(st.sampled_from([None, *ACTIVATIONS]))),
               draw(st.integers(0, 99)))


def as_float64(t):
  return np.asarray(t).astype(np.float32).astype(np.float64)


def rounded(exact, dtype):
  """float64 -> float32 -> dtype, as a sum in float32 is rounded."""
  with np.errstate(over="ignore"):
    return exact.astype(np.float32).astype(dtype)


def powers_of_two(rng, *shape, lowest=-2, highest=3):
  return (2.0**rng.integers(lowest, highest, shape)).astype(np.float32)


E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])


def from_fp4(packed, scale):
  """MXFP4 in float64; of bytes [..., k / 2] and [..., ceil(k / 32)]."""
  codes = np.stack([packed & 15, packed >> 4], -1).reshape(
      *packed.shape[:-1], 2 * packed.shape[-1])
  scale = np.where(scale == 255, np.nan, 2.0**(scale.astype(np.float64) - 127))
  return (np.where(codes & 8, -1, 1) * E2M1[codes & 7]
          * np.repeat(scale, 32, -1)[..., :codes.shape[-1]])


def from_blocks(scale, rows, columns, k):
  """Each element's scale: of blocks of `rows` x `columns`, cut to [.., k]."""
  return np.repeat(np.repeat(scale.astype(np.float64), rows, -2),
                   columns, -1)[..., :k]


@dataclasses.dataclass(frozen=True)
class Quantised:
  """One call of a product of quantised matrices.

  With `exact`, sums fit any accumulator: small integers, scales powers of two.
  """
  kind: str  # i8, fp8, fp8_block, fp4
  m: int = 20
  n: int = 40
  k: int = 64
  lead: tuple[int, ...] = ()
  batched: bool = False
  a_type: type = FLOAT8[0]
  b_type: type = FLOAT8[0]
  a_scale: str = "row"  # or "one"
  b_scale: str = "row"
  bias: bool = False
  out: str = "fp32"
  activation: str | None = None
  exact: bool = True

  def _matrix(self, rng, dtype, *shape):
    if self.kind == "i8":
      return rng.integers(-128, 128, shape).astype(np.int8)
    if self.kind == "fp4":
      return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    if self.exact:
      return rng.integers(-2, 3, shape).astype(np.float32).astype(dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)

  def _scale(self, rng, one, lead, rows, block):
    groups = -(-self.k // (32 if self.kind == "fp4" else 128))
    if self.kind == "fp4":
      return rng.integers(126, 129, (*lead, rows, groups), np.uint8)
    shape = (*lead, rows, 1)
    if self.kind == "fp8_block":
      shape = *lead, -(-rows // block), groups
    elif one == "one":
      shape = ()
    if self.exact:
      return powers_of_two(rng, *shape)
    return rng.uniform(0.5, 2, shape).astype(np.float32)

  def inputs(self, seed=0):
    """a, b, a_scale, b_scale, bias as the function takes them."""
    rng = np.random.default_rng(seed)
    lead_b = self.lead if self.batched else ()
    return (
        self._matrix(rng, self.a_type, *self.lead, self.m, self.k),
        self._matrix(rng, self.b_type, *lead_b, self.n, self.k),
        self._scale(rng, self.a_scale, self.lead, self.m, 1),
        self._scale(rng, self.b_scale, lead_b, self.n, 128),
        rng.integers(-9, 9, self.n).astype(np.float32) if self.bias else None)

  @property
  def function(self):
    return getattr(aiter, "gemm_" + self.kind.removesuffix("_block"))

  def call(self, inputs):
    out = jax.jit(functools.partial(
        self.function, activation=self.activation,
        preferred_element_type=DTYPES[self.out]))(*inputs)
    assert out.dtype == DTYPES[self.out]
    return np.asarray(out)

  def oracle(self, inputs):
    """float64."""
    a, b, a_scale, b_scale, bias = inputs
    if self.kind == "fp4":
      z = from_fp4(a, a_scale) @ np.swapaxes(from_fp4(b, b_scale), -1, -2)
    elif self.kind == "fp8_block":
      a = as_float64(a) * from_blocks(a_scale, 1, 128, self.k)
      b = as_float64(b) * from_blocks(b_scale, 128, 128, self.k)[
          ..., :self.n, :]
      z = a @ np.swapaxes(b, -1, -2)
    else:
      z = as_float64(a) @ np.swapaxes(as_float64(b), -1, -2)
      if self.kind == "i8":  # exact sums, then float32
        z = z.astype(np.float32).astype(np.float64)
      z = z * a_scale * np.swapaxes(np.atleast_2d(b_scale), -1, -2)
    return activate(self.activation, z if bias is None else z + bias)[0]


class QuantisedTestCase(GemmTestCase):

  def check_equal(self, case: Quantised, seed=0):
    inputs = case.inputs(seed)
    np.testing.assert_array_equal(
        case.call(inputs), rounded(case.oracle(inputs), DTYPES[case.out]),
        str(case))

  def check_close(self, case: Quantised, floor, seed=0):
    """Within a floor, and a unit in the result's last place."""
    inputs = case.inputs(seed)
    want = case.oracle(inputs)
    if not want.size:
      return
    error = np.max(np.abs(case.call(inputs).astype(np.float64) - want))
    self.assertLessEqual(
        error, (FLOOR[case.out] + floor) * np.max(np.abs(want)), str(case))


KINDS = ("i8", "fp8", "fp8_block", "fp4")


class QuantisedTest(QuantisedTestCase):

  @parameterized.product(
      kind=KINDS, out=list(DTYPES), bias=[False, True])
  def test_exact(self, kind, out, bias):
    self.check_equal(Quantised(kind, out=out, bias=bias, k=256))

  @parameterized.product(
      kind=["fp8", "fp8_block"], a_type=FLOAT8, b_type=FLOAT8)
  def test_float8_types(self, kind, a_type, b_type):
    """Either type, and one of each."""
    self.check_equal(Quantised(
        kind, a_type=a_type, b_type=b_type, m=70, k=384))

  @parameterized.product(
      kind=["i8", "fp8"], a_scale=["one", "row"], b_scale=["one", "row"])
  def test_scales(self, kind, a_scale, b_scale):
    self.check_equal(Quantised(kind, a_scale=a_scale, b_scale=b_scale))

  @parameterized.parameters(*itertools.product(KINDS, machine.sample(
      [1, 2, 5, 16, 17, 64], 2)))
  def test_skinny(self, kind, m):
    """Few rows: k is divided, and its parts are summed."""
    self.check_equal(Quantised(
        kind, m=m, n=machine.size(600, 72, 72), bias=True,
        k=machine.size(2048, 1024, 544)))

  @parameterized.parameters(*itertools.product(KINDS, machine.sample([
      (128, 256, 256), (65, 129, 96), (3, 5, 2), (130, 127, 514), (1, 1, 2),
      (33, 300, 130)], 3)))
  def test_shapes(self, kind, shape):
    """Multiples of a tile, of what is loaded at once, and of nothing."""
    m, n, k = shape
    self.check_equal(Quantised(kind, m=m, n=n, k=k))
    if kind != "fp4":
      self.check_equal(Quantised(kind, m=m, n=n, k=k - 1))

  @parameterized.product(kind=KINDS, batched=[False, True])
  def test_leading_axes(self, kind, batched):
    self.check_equal(Quantised(kind, lead=(2, 3), m=5, batched=batched, k=160))
    self.check_equal(Quantised(
        kind, lead=(3,), m=5, batched=batched, a_scale="one", b_scale="one"))

  @parameterized.product(kind=KINDS, activation=ACTIVATIONS)
  def test_activations(self, kind, activation):
    self.check_close(Quantised(
        kind, activation=activation, bias=True), 2.0**-18)

  @parameterized.parameters(*KINDS)
  @mock.patch.multiple(gemm_op, _FEW_ROWS=0, _WORTH_A_COPY=1,
                       _ROWS_WORTH_COLUMNS=1)
  def test_odd_rows(self, kind):
    """Zeros are put behind rows that are not aligned, and behind scales."""
    self.check_equal(Quantised(
        kind, m=37, n=43, k=147 if kind != "fp4" else 160))

  @parameterized.parameters(1, 3)
  def test_many_rows_of_four_bits(self, lead):
    """From so many rows on NVIDIA GPUs multiply bfloat16."""
    self.check_equal(Quantised(
        "fp4", lead=(lead,) * (lead > 1), m=gemm_op._ROWS_WORTH_BFLOAT16 + 8,
        n=43, k=160, bias=True))

  @parameterized.product(kind=KINDS, out=["fp32", "bf16"])
  def test_any_numbers(self, kind, out):
    # Hopper's float8 instructions keep 14 bits of what they add.
    self.check_close(
        Quantised(kind, out=out, k=500 if kind != "fp4" else 512, exact=False),
        2.0**-12 if "fp8" in kind and PLATFORM == "cuda" else 2.0**-20)

  def test_int8_sums(self):
    """Sums are exact where float32 has lost bits: beyond 2^24."""
    k = machine.size(8192, 8192, 1088)
    a = np.full((3, k), -128, np.int8)
    b = np.full((5, k), -128, np.int8)
    b[1, 0], b[2, 1], b[3, :] = 127, 1, 127
    want = a.astype(np.int64) @ b.astype(np.int64).T
    got = aiter.gemm_i8(a, b, 1.0, 1.0, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(got, want.astype(np.float32))
    # What is left of large sums is small and exact.
    b = np.where(np.arange(k) % 2, -128, 127).astype(np.int8)[None]
    b[0, -1] = 124
    a[:, -1] = 127
    want = a.astype(np.int64) @ b.astype(np.int64).T
    got = aiter.gemm_i8(a, b, 1.0, 1.0, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(got, want)

  @parameterized.parameters(*FLOAT8)
  def test_every_float8(self, dtype):
    """All codes of both types, NaN included, come through unchanged."""
    codes = np.arange(256, dtype=np.uint8).view(dtype)[:, None]
    padding = np.zeros((256, 31), dtype)
    a = np.concatenate([codes, padding], 1)
    for other in FLOAT8:
      b = np.zeros((16, 32), other)
      b[:, 0] = 1
      out = aiter.gemm_fp8(a, b, 1.0, 1.0, preferred_element_type=jnp.float32)
      np.testing.assert_array_equal(
          out, np.repeat(codes.astype(np.float32), 16, 1))
      out = aiter.gemm_fp8(b, a, 1.0, 1.0, preferred_element_type=jnp.float32)
      np.testing.assert_array_equal(
          out, np.repeat(codes.astype(np.float32).T, 16, 0))

  def test_every_fp4(self):
    """All bytes, the low nibble first, and scales from end to end."""
    a = np.zeros((256, 16), np.uint8)
    a[:, 0] = np.arange(256)
    b = np.zeros((2, 16), np.uint8)
    b[0, 0], b[1, 0] = 0x02, 0x20  # ones
    one = np.full((256, 1), 127, np.uint8)
    call = functools.partial(
        aiter.gemm_fp4, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(
        call(a, b, one, one[:2]), from_fp4(a, one)[:, :2])
    # Scales that undo each other: nothing between them overflows.
    for s in (20, 100, 127, 150, 230):
      scales = (np.full((rows, 1), t, np.uint8)
                for rows, t in ((256, s), (2, 254 - s)))
      np.testing.assert_array_equal(
          call(a, b, *scales), from_fp4(a, one)[:, :2])
    out = call(a, b, one, np.array([[255], [127]], np.uint8))
    self.assertTrue(np.isnan(out[:, 0]).all())
    np.testing.assert_array_equal(out[:, 1], from_fp4(a, one)[:, 1])

  @parameterized.parameters((16, 256, 128), (20, 130, 200), (300, 40, 500))
  def test_layouts_of_jax_aiter(self, m, n, k):
    """gemm_fp8_mi350 and flatmm_fp8 are gemm_fp8 with other scales."""
    case = Quantised("fp8_block", m=m, n=n, k=k)
    a, b, a_scale, b_scale, _ = inputs = case.inputs()
    want = case.oracle(inputs)
    for function, dtype in ((aiter.gemm_fp8_mi350, "bf16"),
                            (aiter.flatmm_fp8, "fp16")):
      out = function(a, b, a_scale.T.copy(), b_scale.T.copy())
      np.testing.assert_array_equal(out, rounded(want, DTYPES[dtype]))
      self.assertEqual(out.dtype, DTYPES[dtype])

  def test_jax_types(self):
    """float4 and e8m0 arrays are what their bytes are."""
    inputs = Quantised("fp4").inputs()
    a, b, *scales = map(jnp.asarray, inputs[:4])
    as_float4 = lambda t: jax.lax.bitcast_convert_type(
        t, jnp.float4_e2m1fn).reshape(*t.shape[:-1], -1)
    np.testing.assert_array_equal(
        aiter.gemm_fp4(as_float4(a), as_float4(b), *(
            jax.lax.bitcast_convert_type(s, jnp.float8_e8m0fnu)
            for s in scales)),
        aiter.gemm_fp4(a, b, *scales))

  @parameterized.parameters("i8", "fp8", "fp8_block", "fp4")
  def test_shuffled(self, kind):
    """A shuffled weight gives what the plain one gives."""
    case = Quantised(kind, n=32, k=256, m=33)
    a, b, *scales = case.inputs()[:4]
    want = case.function(a, b, *scales)
    shuffled = aiter.shuffle_weight(jnp.asarray(b))
    self.assertFalse((np.asarray(shuffled) == b).all())
    np.testing.assert_array_equal(
        case.function(a, shuffled, *scales, b_shuffled=True), want)
    if kind == "fp4":
      np.testing.assert_array_equal(case.function(
          a, shuffled, *map(aiter.shuffle_scale, map(jnp.asarray, scales)),
          b_shuffled=True, scales_shuffled=True), want)
    if kind == "fp8_block":
      scales = [t.T.copy() for t in scales]
      np.testing.assert_array_equal(
          aiter.flatmm_fp8(a, shuffled, *scales, b_shuffled=True),
          aiter.flatmm_fp8(a, b, *scales))

  def test_shuffled_gemm(self):
    """With gradients, that of the weight as it is shuffled."""
    a, b = (jnp.asarray(t, jnp.bfloat16)
            for t in Case(n=32, k=64).inputs()[:2])
    plain = lambda b: jnp.sum(aiter.gemm(a, b).astype(jnp.float32) ** 2)
    shuffled = lambda b: jnp.sum(
        aiter.gemm(a, b, b_shuffled=True).astype(jnp.float32) ** 2)
    want, db = jax.value_and_grad(plain)(b)
    got, dshuffled = jax.value_and_grad(shuffled)(aiter.shuffle_weight(b))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(dshuffled, aiter.shuffle_weight(db))

  @parameterized.parameters(*KINDS)
  def test_empty(self, kind):
    for m, n, k in ((0, 8, 32), (8, 0, 32), (8, 8, 0)):
      self.check_equal(Quantised(kind, m=m, n=n, k=k, bias=True))

  @examples(40, 12, 5)
  @hypothesis.given(st.data())
  def test_any_shape(self, data):
    draw = data.draw
    kind = draw(st.sampled_from(KINDS))
    size = st.integers(1, machine.size(200, 70, 40))
    scale = st.sampled_from(["one", "row"])
    self.check_equal(Quantised(
        kind, m=draw(size), n=draw(size),
        k=draw(st.integers(1, machine.size(400, 300, 140))) * (
            1 + (kind == "fp4")),
        lead=tuple(draw(st.lists(st.integers(1, 3), max_size=2))),
        batched=draw(st.booleans()), a_type=draw(st.sampled_from(FLOAT8)),
        b_type=draw(st.sampled_from(FLOAT8)), a_scale=draw(scale),
        b_scale=draw(scale), bias=draw(st.booleans()),
        out=draw(st.sampled_from(list(DTYPES)))), draw(st.integers(0, 99)))


@machine.where(PLATFORM is not None)
class KernelTest(absltest.TestCase):

  def test_kernels_serve(self):
    """No call here quietly ran the reference."""
    names = {v: k for k, v in gemm_op._DTYPES.items()}
    plain = [(layout, "none", t, t) for layout in ("nt", "nn", "tn")
             for t in ("bf16", "fp16") if machine.has(t)]
    float8 = list(itertools.product(("e4m3fn", "e4m3fnuz"), repeat=2))
    scaled = [("nt", "row", "i8", "i8"), ("nt", "mx", "e2m1", "e2m1")] + [
        ("nt", scaling, a, b) for scaling in ("row", "block", "block_t")
        for a, b in float8]
    for layout, scaling, a, b in plain + scaled:
      for sizes in ((1, 1, 8, 32), (1, 7, 5, 2), (3, 200, 130, 254),
                    (1, 4096, 4096, 4096)):
        batch, *mnk = sizes
        self.assertIsNone(gemm_op.product.unserved(PLATFORM, Key(
            "gemm", names[a], (*mnk, batch),
            gemm_op.features(layout, scaling, names[a], names[b]))))

  def test_the_kernels_run(self):
    """The compiled programs have our calls and no product of XLA's."""
    a, b = jnp.ones((64, 96), jnp.bfloat16), jnp.ones((32, 96), jnp.bfloat16)
    step = jax.jit(jax.grad(lambda a, b: jnp.sum(
        aiter.gemm(a, b, activation="gelu").astype(jnp.float32) ** 2), (0, 1)))
    for fn, args, calls in [(step, (a, b), 3)] + [
        (case.function, case.inputs()[:4], 1)
        for case in map(Quantised, KINDS)]:
      text = jax.jit(fn).lower(*args).compile().as_text()
      self.assertEqual(text.count(
          f'"{gpu_aiter.target(PLATFORM, "gemm")}"'), calls)
      self.assertNotRegex(text, r"\bdot\(|cublas|__triton_gemm|rocblas")


@machine.where(not machine.GPU)  # The same on any machine.
class FoldTest(parameterized.TestCase):
  """What reaches a kernel has at most one leading axis, and the same sums."""

  @parameterized.parameters(*itertools.product(
      ("nt", "nn", "tn"), ((), (3,), (2, 3), (2, 1), (1, 3), (1, 1)),
      ((), (3,), (2, 3), (2, 1), (1, 1))))
  def test_leading_axes(self, layout, lead_a, lead_b):
    rng = np.random.default_rng(0)
    shapes = {"nt": ((5, 4), (6, 4)), "nn": ((5, 4), (4, 6)),
              "tn": ((4, 5), (4, 6))}[layout]
    x = Operands(*(rng.integers(-9, 9, (*lead, *shape)).astype(np.float32)
                   for lead, shape in zip((lead_a, lead_b), shapes)))
    self.compare(Config("float32", layout), x)

  @parameterized.parameters(*itertools.product(
      ("row", "block", "block_t", "mx"), ((), (3,), (2, 3)), ((), (2, 1)),
      ((), (2, 3)), ((), (3,))))
  def test_scales(self, scaling, lead_a, lead_b, lead_as, lead_bs):
    rng = np.random.default_rng(0)
    whole = lambda *shape: rng.integers(1, 9, shape).astype(np.float32)
    m, n, k = 5, 130, 256
    cores = {"row": ((m,), (n,)), "block": ((m, 2), (2, 2)),
             "block_t": ((2, m), (2, 2)), "mx": ((m, 8), (n, 8))}[scaling]
    x = Operands(whole(*lead_a, m, k), whole(*lead_b, n, k),
                 whole(*lead_as, *cores[0]), whole(*lead_bs, *cores[1]))
    if scaling == "mx":
      x = Operands(*(t.astype(np.uint8) for t in x[:4]))
      x = x._replace(a=x.a[..., :k // 2], b=x.b[..., :k // 2],
                     a_scale=x.a_scale + 120, b_scale=x.b_scale + 120)
    self.compare(Config("float32", scaling=scaling), x)
    if scaling == "row":
      self.compare(Config("float32", scaling=scaling), x._replace(
          a_scale=x.a_scale[..., :1], b_scale=np.float32([3])))

  def test_contracted_axes(self):
    rng = np.random.default_rng(0)
    for lead in ((), (3,), (1,)):
      x = Operands(*(rng.integers(-9, 9, (*lead, 2, 3, 4, n)).astype(np.float32)
                     for n in (5, 6)))
      self.compare(Config("float32", "tn", contracted=3), x)

  def compare(self, cfg: Config, x: Operands):
    flat = gemm_op._folded(cfg, x)
    for matrix, scale in ((flat.a, flat.a_scale), (flat.b, flat.b_scale)):
      self.assertIn(matrix.ndim, (2, 3))
      if scale is not None and scale.shape != (1,):
        rank = 1 if cfg.scaling == "row" else 2
        self.assertEqual(scale.ndim - rank, matrix.ndim - 2)
        self.assertEqual(scale.shape[:-rank], matrix.shape[:-2])
    out = gemm_op.reference(cfg._replace(contracted=1), flat)
    want = gemm_op.reference(cfg, x)
    np.testing.assert_array_equal(out.reshape(want.shape), want)

  def test_rows_are_folded(self):
    """A shared b is one product, whatever leading axes a has."""
    a, b = np.zeros((2, 3, 5, 4), np.float32), np.zeros((6, 4), np.float32)
    flat = gemm_op._folded(Config("float32"), Operands(a, b))
    self.assertEqual((flat.a.shape, flat.b.shape), ((30, 4), (6, 4)))

  def test_workspace(self):
    for batch, m, n, k in itertools.product(
        (1, 4, 65), (1, 64, 65, 4096), (1, 4096, 1 << 20),
        (0, 1, 511, 512, 1 << 17)):
      room = gemm_op.workspace(batch, m, n, k)
      self.assertBetween(room, 0, 8 << 20)
      self.assertEqual(room > 0, k >= 512)
    self.assertEqual(gemm_op.workspace(1, 1, 4096, 1024), 4 * 16 * 4096)
    self.assertEqual(gemm_op.workspace(2, 20, 100, 8192), 16 * 64 * 128)
    self.assertEqual(gemm_op.workspace(1, 4096, 4096, 4096), 8 << 20)


def mlp(x, w1, b1, w2):
  """Two layers: every product of training, with bias and activation."""
  h = aiter.gemm(x, w1, b1, activation="gelu_tanh")
  return aiter.gemm(h, w2)


class TransformTest(GemmTestCase):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(
        rng.standard_normal(shape) / np.sqrt(shape[-1]), jnp.bfloat16)
    self.args = draw(4, 8, 32) * 4, draw(64, 32), draw(64), draw(32, 64)
    self.loss = lambda *args: jnp.sum(mlp(*args).astype(jnp.float32) ** 2)
    self.gradients = jax.grad(self.loss, (0, 1, 2, 3))
    # A result of bfloat16, summed in another order.
    self.tolerance = 2.0**-6

  def test_jit(self):
    self.assert_close(jax.jit(self.gradients)(*self.args),
                      self.gradients(*self.args), self.tolerance)

  def test_finite_differences(self):
    with jax.enable_x64(True), jax.default_device(CPUS[0]):
      args = [jnp.asarray(t, jnp.float64) for t in self.args]
      check_grads(mlp, args, order=1, modes=["rev"])

  @parameterized.parameters(*(
      axes for axes in itertools.product((0, None), repeat=3) if any(
          a == 0 for a in axes)))
  def test_vmap(self, *axes):
    """Over each operand and all sets of them; also of gradients."""
    x, w, b, _ = self.args
    for a_lead, b_lead in (((), ()), ((2,), ()), ((2,), (2,))):
      case = [x[(slice(0, 2), slice(0, 3))] if a_lead else x[0, :3],
              jnp.stack([w, -w]) if b_lead else w, b]
      many = [t if axis is None else jnp.stack([t, t * 2, t - 1])
              for t, axis in zip(case, axes)]
      f = functools.partial(aiter.gemm, activation="silu")
      loss = lambda *args: jnp.sum(f(*args).astype(jnp.float32) ** 2)
      for fn in (f, jax.grad(loss, (0, 1, 2))):
        want = [fn(*(t if a is None else t[i] for t, a in zip(many, axes)))
                for i in range(3)]
        want = jax.tree.map(lambda *ts: jnp.stack(ts), *want)
        self.assert_close(jax.vmap(fn, axes)(*many), want, self.tolerance)

  def test_vmap_of_vmap(self):
    x, w, b, _ = self.args
    ws = jnp.stack([w, w * 2, -w])
    got = jax.vmap(jax.vmap(aiter.gemm, (None, 0, None)), (0, None, None))(
        x, ws, b)
    want = jnp.stack([jnp.stack([aiter.gemm(x[i], ws[j], b) for j in range(3)])
                      for i in range(4)])
    self.assert_close(got, want, self.tolerance)

  @parameterized.parameters(*itertools.product(KINDS, range(5)))
  def test_vmap_of_quantised(self, kind, mapped):
    """Over each operand alone: matrices, scales, bias."""
    case = Quantised(kind, bias=True, k=160, m=5)
    one, other = case.inputs(), case.inputs(1)
    axes = tuple(0 if i == mapped else None for i in range(5))
    args = [np.stack([t, u]) if i == mapped else t
            for i, (t, u) in enumerate(zip(one, other))]
    got = jax.vmap(functools.partial(
        case.function, preferred_element_type=jnp.float32), axes)(*args)
    for i, source in enumerate((one, other)):
      want = list(one)
      want[mapped] = source[mapped]
      np.testing.assert_array_equal(got[i], case.oracle(want))

  def test_checkpoint_and_scan(self):
    x, w1, b1, w2 = self.args
    transforms.check_scan(
        self, lambda h: h + mlp(h, w1, b1, w2), x, tolerance=2.0**-5)

  @parameterized.parameters("cuda", "rocm", "cpu")
  def test_export(self, platform):
    """For platforms that are not here; the module has all our calls."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"{p}_aiter_gemm")
              for p in ("hip", "cu")]
    scaled = [case for case in map(Quantised, KINDS)]
    inputs = [case.inputs()[:4] for case in scaled]
    fn = jax.jit(lambda args, inputs: (
        self.gradients(*args),
        [case.function(*t) for case, t in zip(scaled, inputs)]))
    exported = jax.export.export(
        fn, platforms=[platform], disabled_checks=checks)(self.args, inputs)
    if platform != "cpu":
      self.assertLen(re.findall(
          rf"@{gpu_aiter.target(platform, 'gemm')}\b",
          exported.mlir_module()), 6 + len(KINDS))
    if platform == (PLATFORM or jax.default_backend()):
      if importlib.util.find_spec("flatbuffers"):  # an option of JAX's
        exported = jax.export.deserialize(exported.serialize())
      self.assert_close(exported.call(self.args, inputs),
                        fn(self.args, inputs), self.tolerance)

  @parameterized.parameters(*KINDS)
  def test_no_gradient(self, kind):
    """Of scales there is none, and that is said; around them there is."""
    case = Quantised(kind, k=128)
    a, b, a_scale, b_scale, _ = case.inputs()
    bias = jnp.zeros(case.n)

    def loss(bias, stop):
      out = case.function(a, b, a_scale, b_scale, stop(bias))
      return jnp.sum(out.astype(jnp.float32) + bias)

    with self.assertRaisesRegex(
        TypeError, f"{case.function.__name__}: .*gradient"):
      jax.grad(loss)(bias, lambda t: t)
    np.testing.assert_array_equal(
        jax.grad(loss)(bias, jax.lax.stop_gradient), case.m)


@sharding.on_hosts
class ShardingTest(GemmTestCase):
  """The same numbers on eight devices, and no more communication than due."""

  def setUp(self):
    super().setUp()
    self.mesh = Mesh(np.array(CPUS).reshape(2, 4), ("x", "y"))
    case = Case(lead=(4,), m=16, n=64, k=32, bias="fp32")
    # Integers: the order of sums does not matter.
    rng = np.random.default_rng(0)
    self.a, self.b, self.bias, self.weight = (
        rng.integers(-3, 4, t.shape).astype(jnp.bfloat16)
        for t in case.inputs())
    self.batch = np.stack([self.b, -self.b, self.b + 1, 2 * self.b])

  def compare(self, args, specs):
    """Checks value and gradients; returns the collectives of either."""
    f = functools.partial(aiter.gemm, preferred_element_type=jnp.float32)
    weight = self.weight[..., :args[1].shape[-2]]
    gradients = jax.grad(
        lambda *t: jnp.sum(f(*t) * weight), tuple(range(len(args))))
    sharded = [jax.device_put(t, NamedSharding(self.mesh, spec))
               for t, spec in zip(args, specs)]
    found = []
    for fn in (f, gradients):
      compiled = jax.jit(fn).lower(*sharded).compile()
      got, want = compiled(*sharded), fn(*args)
      for t, u in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_array_equal(
            np.asarray(t, np.float32), np.asarray(u, np.float32))
      found.append(collectives(compiled))
    return found

  @parameterized.named_parameters(
      ("batch", P("x"), P(), P(), set(), {"all-reduce"}),
      ("rows", P(None, "y"), P(), P(), set(), {"all-reduce"}),
      ("batch_and_rows", P("x", "y"), P(), P(), set(), {"all-reduce"}),
      ("columns", P(), P("y"), P("y"), set(), {"all-reduce"}),
      ("rows_and_columns", P("x"), P("y"), P("y"), set(), {"all-reduce"}),
      ("contraction", P(None, None, "y"), P(None, "y"), P(), {"all-reduce"},
       set()),
      ("contraction_of_one", P(None, None, "y"), P(), P(), {"all-reduce"},
       None),
      ("everything", P("x", None, "y"), P(None, "y"), P(), {"all-reduce"},
       {"all-reduce"}),
      ("fsdp", P("x"), P("x"), P(), {"all-gather"}, None),
      ("columns_after_columns", P(None, None, "y"), P("y"), P("y"),
       {"all-gather"}, None),
      ("two_axes", P(None, ("x", "y")), P(), P(), set(), {"all-reduce"}))
  def test_gemm(self, a, b, bias, forward, backward):
    found = self.compare((self.a, self.b, self.bias), (a, b, bias))
    self.assertEqual(found[0], forward)
    if backward is not None:
      self.assertEqual(found[1], backward)

  @parameterized.parameters(
      (P("x"), P("x"), set(), set()), (P("y"), P("y"), set(), set()),
      (P("x", "y"), P("x"), set(), {"all-reduce"}),
      (P("x"), P("x", "y"), set(), {"all-reduce"}),
      (P("x", None, "y"), P("x", None, "y"), {"all-reduce"}, set()))
  def test_batched(self, a, b, forward, backward):
    self.assertEqual(self.compare((self.a, self.batch), (a, b)),
                     [forward, backward])

  @parameterized.product(
      kind=KINDS, specs=[
          (P("x"), P("y")), (P("x"), P("x")), (P(("x", "y")), P()),
          (P(), P(("x", "y"))), (P(None, "y"), P(None, "y"))])
  def test_quantised(self, kind, specs):
    case = Quantised(kind, m=16, n=1024, k=256, bias=True)
    inputs = case.inputs()
    want = case.oracle(inputs)
    a, b = specs
    row, column = P(a[0] if len(a) else None), P(b[0] if len(b) else None)
    specs = (a, b, row, P() if kind == "fp8_block" else column, column)
    sharded = [jax.device_put(t, NamedSharding(self.mesh, s))
               for t, s in zip(inputs, specs)]
    compiled = jax.jit(functools.partial(
        case.function, preferred_element_type=jnp.float32)).lower(
            *sharded).compile()
    np.testing.assert_array_equal(compiled(*sharded), want)
    alone = a == P(None, "y") or a == b
    self.assertEqual(collectives(compiled), {"all-gather"} if alone else set())

  @parameterized.parameters(100, 200, 300)
  def test_blocks_across_shards(self, n):
    """A shard's columns need not be whole blocks."""
    case = Quantised("fp8_block", n=n, k=256)
    inputs = case.inputs()
    sharded = list(inputs)
    sharded[1] = jax.device_put(inputs[1], NamedSharding(self.mesh, P("y")))
    np.testing.assert_array_equal(case.call(sharded), case.oracle(inputs))

  @parameterized.parameters(
      (P("x", None, None), P("y", None), P("y"), P("x", None, "y")),
      (P("x", None, "y"), P(None, "y"), P(None), P("x", None, None)),
      (P(None, "x", "y"), P("y", "x"), P("x"), P(None, "x", "y")),
      (P("x", "y", None), P(("x", "y"), None), P("x"), P("x", "y", None)))
  def test_explicit(self, a, b, bias, result):
    """On a mesh of explicit axes results are sharded as operands are."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Explicit,) * 2,
                         devices=CPUS)
    f = functools.partial(aiter.gemm, activation="relu")
    loss = lambda *t: jnp.sum(f(*t).astype(jnp.float32))
    args = self.a, self.b, self.bias
    specs = a, b, bias
    with jax.set_mesh(mesh):
      sharded = [jax.device_put(t, s) for t, s in zip(args, specs)]
      out = jax.jit(f)(*sharded)
      grads = jax.jit(jax.grad(loss, (0, 1, 2)))(*sharded)
      self.assertEqual(jax.typeof(out).sharding.spec, result)
      for t, s in zip(grads, specs):
        self.assertEqual(jax.typeof(t).sharding.spec, s)
    np.testing.assert_array_equal(np.asarray(out), f(*args))
    self.assert_close(grads, jax.grad(loss, (0, 1, 2))(*args), 2.0**-7)

  @parameterized.parameters(*KINDS)
  def test_explicit_quantised(self, kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Explicit,) * 2,
                         devices=CPUS)
    case = Quantised(kind, m=16, n=512, k=256)
    inputs = case.inputs()
    with jax.set_mesh(mesh):
      out = jax.jit(functools.partial(
          case.function, preferred_element_type=jnp.float32))(*(
              jax.device_put(t, P(s, None)) for t, s in zip(inputs, "xyxy")))
      self.assertEqual(jax.typeof(out).sharding.spec, P("x", "y"))
    np.testing.assert_array_equal(out, case.oracle(inputs))

  def test_shard_map(self):
    """A user divides k and sums; or divides rows, and gradients are summed."""
    mesh = Mesh(np.array(CPUS[:4]), ("y",))
    a, b = self.a, self.b
    want = aiter.gemm(a, b, preferred_element_type=jnp.float32)
    gradients = lambda f: jax.jit(jax.grad(
        lambda *t: jnp.sum(f(*t) * self.weight), (0, 1)))
    plain = functools.partial(aiter.gemm, preferred_element_type=jnp.float32)
    for body, in_specs, out_spec in (
        (lambda a, b: jax.lax.psum(plain(a, b), "y"),
         (P(None, None, "y"), P(None, "y")), P()),
        (plain, (P(None, "y"), P()), P(None, "y")),
        (plain, (P(), P("y")), P(None, None, "y"))):
      f = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_spec)
      np.testing.assert_array_equal(jax.jit(f)(a, b), want)
      for t, u in zip(gradients(f)(a, b), gradients(plain)(a, b)):
        np.testing.assert_array_equal(
            np.asarray(t, np.float32), np.asarray(u, np.float32))

  def test_shard_map_over_some_axes(self):
    """The others are automatic inside, and gathered."""
    f = jax.shard_map(
        functools.partial(aiter.gemm, preferred_element_type=jnp.float32),
        mesh=self.mesh, in_specs=(P("x"), P()), out_specs=P("x"),
        axis_names={"x"})
    loss = lambda f: lambda *t: jnp.sum(f(*t) * self.weight)
    # XLA's CPUs cannot sum bfloat16 over some axes.
    a, b = (t.astype(np.float32) for t in (self.a, self.b))
    args = [jax.device_put(t, NamedSharding(self.mesh, s))
            for t, s in ((a, P("x", "y")), (b, P("y")))]
    for got, want in (
        (jax.jit(f)(*args), aiter.gemm(a, b)),
        (jax.jit(jax.grad(loss(f), (0, 1)))(*args),
         jax.grad(loss(aiter.gemm), (0, 1))(a, b))):
      for t, u in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_array_equal(
            np.asarray(t, np.float32), np.asarray(u, np.float32))

  def test_shard_map_of_quantised(self):
    mesh = Mesh(np.array(CPUS[:4]), ("y",))
    case = Quantised("i8", m=16, k=64)
    a, b, a_scale, b_scale, _ = case.inputs()
    f = jax.shard_map(
        lambda *t: jax.lax.psum(aiter.gemm_i8(
            *t, preferred_element_type=jnp.float32), "y"), mesh=mesh,
        in_specs=(P(None, "y"), P(None, "y"), P(), P()), out_specs=P())
    np.testing.assert_array_equal(
        jax.jit(f)(a, b, a_scale, b_scale),
        case.oracle((a, b, a_scale, b_scale, None)))


class ErrorTest(parameterized.TestCase):

  def check(self, function, error, args, words):
    with self.assertRaises(error) as caught:
      getattr(aiter, function)(**args)
    for word in [f"{function}: ", *words]:
      self.assertIn(word, str(caught.exception))

  @parameterized.named_parameters(
      ("a_type", TypeError, dict(a=[1.0]), ["a is a list"]),
      ("a_dtype", TypeError, dict(a=jnp.ones((2, 8), jnp.int8)),
       ["a's dtype", "int8", "bfloat16"]),
      ("a_rank", ValueError, dict(a=jnp.bfloat16(1)), ["a is", "rank"]),
      ("b_dtype", TypeError, dict(b=jnp.ones((4, 8), jnp.float16)),
       ["b's dtype", "float16", "bfloat16"]),
      ("b_columns", ValueError, dict(b=jnp.ones((4, 9), jnp.bfloat16)),
       ["b is bfloat16[4, 9]", "[n, 8]", "bfloat16[2, 8]"]),
      ("b_rank", ValueError, dict(b=jnp.ones(8, jnp.bfloat16)),
       ["b is bfloat16[8]", "[n, 8]"]),
      ("b_lead", ValueError, dict(a=jnp.ones((3, 2, 8), jnp.bfloat16),
                                  b=jnp.ones((2, 4, 8), jnp.bfloat16)),
       ["b is bfloat16[2, 4, 8]", "[3, n, 8]"]),
      ("b_lead_of_none", ValueError, dict(b=jnp.ones((3, 4, 8), jnp.bfloat16)),
       ["b is bfloat16[3, 4, 8]", "[n, 8]"]),
      ("bias_shape", ValueError, dict(bias=jnp.ones(5)),
       ["bias is float32[5]", "[4]"]),
      ("bias_dtype", TypeError, dict(bias=jnp.ones(4, jnp.int32)),
       ["bias's dtype", "int32"]),
      ("bias_type", TypeError, dict(bias=1.0), ["bias is a float"]),
      ("activation", ValueError, dict(activation="swish"),
       ["activation is 'swish'", "'silu'"]),
      ("activation_type", ValueError, dict(activation=jax.nn.relu),
       ["activation is ", "'relu'"]),
      ("result", TypeError, dict(preferred_element_type=jnp.int8),
       ["preferred_element_type is ", "int8", "bfloat16"]),
      ("result_wide", TypeError, dict(preferred_element_type=np.float64),
       ["preferred_element_type is ", "float64", "float32"]),
      ("result_type", TypeError, dict(preferred_element_type="wide"),
       ["preferred_element_type is 'wide'"]),
      ("transposed", ValueError, dict(transpose_b=False),
       ["b is bfloat16[4, 8]", "[8, n]"]),
      ("transposed_type", TypeError, dict(transpose_b=None),
       ["transpose_b is None"]),
      ("shuffled", ValueError, dict(b_shuffled=True, transpose_b=False),
       ["b_shuffled is True", "False where transpose_b is"]),
      ("shuffled_type", TypeError, dict(b_shuffled=1), ["b_shuffled is 1"]),
      ("shuffled_shape", ValueError, dict(b_shuffled=True), None))
  def test_gemm(self, error, replaced, words):
    args = dict(a=jnp.ones((2, 8), jnp.bfloat16),
                b=jnp.ones((4, 8), jnp.bfloat16)) | replaced
    if words is None:
      self.assertRaisesRegex(error, r"\[4, 8\]", aiter.gemm, **args)
    else:
      self.check("gemm", error, args, words)

  @parameterized.named_parameters(
      ("a_dtype", "gemm_i8", TypeError, dict(a=np.ones((4, 256), np.uint8)),
       ["a's dtype", "uint8", "int8"]),
      ("b_dtype", "gemm_fp8", TypeError,
       dict(b=np.ones((8, 256), ml_dtypes.float8_e5m2)),
       ["b's dtype", "float8_e5m2", "float8_e4m3fnuz"]),
      ("a_scale_shape", "gemm_i8", ValueError,
       dict(a_scale=np.ones((1, 4), np.float32)),
       ["a_scale is float32[1, 4]", "[4, 1]", "[4]", "one number"]),
      ("a_scale_dtype", "gemm_i8", TypeError,
       dict(a_scale=np.ones((4, 1), np.float16)), ["a_scale's dtype"]),
      ("a_scale_type", "gemm_i8", TypeError, dict(a_scale="1"),
       ["a_scale is a str"]),
      ("a_scale_bool", "gemm_i8", TypeError, dict(a_scale=True),
       ["a_scale is a bool"]),
      ("b_scale_none", "gemm_fp8", TypeError, dict(b_scale=None),
       ["b_scale is a NoneType"]),
      ("b_scale_shape", "gemm_fp8", ValueError,
       dict(b_scale=np.ones((8, 2), np.float32)),
       ["b_scale is float32[8, 2]", "[1, 8]", "[1, 2]"]),
      ("block_of_i8", "gemm_i8", ValueError,
       dict(a_scale=np.ones((4, 2), np.float32)), ["a_scale", "[4, 1]"]),
      ("mixed_scales", "gemm_fp8", ValueError,
       dict(a_scale=np.ones((4, 2), np.float32)),
       ["b_scale is float32[8]", "a block", "float32[4, 2]"]),
      ("bias", "gemm_fp8", ValueError, dict(bias=np.ones(4, np.float32)),
       ["bias is float32[4]", "[8]"]),
      ("result", "gemm_i8", TypeError, dict(preferred_element_type=np.int32),
       ["preferred_element_type is ", "int32"]),
      ("result_none", "gemm_i8", TypeError, dict(preferred_element_type=None),
       ["preferred_element_type"]))
  def test_scaled(self, function, error, replaced, words):
    dtype = np.int8 if function == "gemm_i8" else FLOAT8[0]
    self.check(function, error, dict(
        a=np.ones((4, 256), dtype), b=np.ones((8, 256), dtype),
        a_scale=np.float32(1), b_scale=np.ones(8, np.float32)) | replaced,
               words)

  @parameterized.named_parameters(
      ("rank", ValueError, dict(xq=np.ones((2, 4, 256), FLOAT8[0])),
       ["xq is float8_e4m3fn[2, 4, 256]", "rank 2"]),
      ("columns", ValueError, dict(wq=np.ones((200, 128), FLOAT8[0])),
       ["wq is float8_e4m3fn[200, 128]", "[n, 256]"]),
      ("x_scale", ValueError, dict(x_scale=np.ones((4, 2), np.float32)),
       ["x_scale is float32[4, 2]", "[2, 4]"]),
      ("w_scale", ValueError, dict(w_scale=np.ones((2, 1), np.float32)),
       ["w_scale is float32[2, 1]", "[2, 2]"]),
      ("w_scale_dtype", TypeError, dict(w_scale=np.ones((2, 2), np.uint8)),
       ["w_scale's dtype", "uint8"]))
  def test_transposed_scales(self, error, replaced, words):
    for function in ("gemm_fp8_mi350", "flatmm_fp8"):
      self.check(function, error, dict(
          xq=np.ones((4, 256), FLOAT8[1]), wq=np.ones((200, 256), FLOAT8[0]),
          x_scale=np.ones((2, 4), np.float32),
          w_scale=np.ones((2, 2), np.float32)) | replaced, words)

  @parameterized.named_parameters(
      ("a_dtype", TypeError, dict(a=np.ones((4, 32), np.int8)),
       ["a's dtype", "int8", "uint8"]),
      ("columns", ValueError, dict(b=np.ones((8, 16), np.uint8)),
       ["b is uint8[8, 16]", "[n, 32]"]),
      ("odd", ValueError, dict(a=jnp.ones((4, 63), jnp.float4_e2m1fn)),
       ["a is float4_e2m1fn[4, 63]", "even"]),
      ("a_scale", ValueError, dict(a_scale=np.ones((4, 1), np.uint8)),
       ["a_scale is uint8[4, 1]", "[4, 2]"]),
      ("b_scale", TypeError, dict(b_scale=np.ones((8, 2), np.float32)),
       ["b_scale's dtype", "float32", "float8_e8m0fnu"]),
      ("shuffled", TypeError, dict(scales_shuffled=None),
       ["scales_shuffled is None"]))
  def test_fp4(self, error, replaced, words):
    self.check("gemm_fp4", error, dict(
        a=np.ones((4, 32), np.uint8), b=np.ones((8, 32), np.uint8),
        a_scale=np.ones((4, 2), np.uint8),
        b_scale=np.ones((8, 2), np.uint8)) | replaced, words)


class NamesTest(parameterized.TestCase):

  @parameterized.parameters(
      ("gemm", "gemm"), ("gemm_i8", "gemm_i8"), ("gemm_fp8", "gemm_fp8_mi350"),
      ("gemm_fp8", "gemm_fp8"), ("gemm_fp4", "gemm_fp4"),
      ("flatmm_fp8", "flatmm_fp8"))
  def test_jax_aiter(self, module, function):
    """jax-aiter's import paths."""
    self.assertIs(
        getattr(importlib.import_module("jax_aiter." + module), function),
        getattr(aiter, function))


class AiterNamesTest(parameterized.TestCase):
  """AITER's names are the same calls."""

  def test_same(self):
    rng = np.random.default_rng(0)
    m, n, k = 16, 32, 256
    normal = lambda *shape: jnp.asarray(
        rng.standard_normal(shape), jnp.bfloat16)
    of8 = lambda dtype, *shape: jnp.asarray(
        rng.integers(-9, 9, shape), jnp.dtype(dtype))
    scale = lambda *shape: jnp.asarray(rng.random(shape), jnp.float32)
    a, b, bias = normal(m, k), normal(n, k), normal(n)
    x8, w8 = of8("float8_e4m3fn", m, k), of8("float8_e4m3fn", n, k)
    xi, wi = of8("int8", m, k), of8("int8", n, k)
    rows, columns = scale(m, 1), scale(n, 1)
    blocks = scale(m, 2), scale(1, 2)
    (x4, x4_scale), (w4, w4_scale) = (aiter.mx_quant(t) for t in (a, b))
    turned = [aiter.shuffle_scale(t) for t in (x4_scale, w4_scale)]
    shuffled = aiter.shuffle_weight
    two = lambda *arrays: [jnp.stack([t, t[::-1]]) for t in arrays]
    batch, batch8 = two(a, b), two(x8, w8, rows, columns)
    offset = jnp.stack([bias, 2 * bias])[:, None]
    f16 = jnp.float16
    calls = dict(
        gemm_a16w16=[
            ((a, b, bias, f16),
             aiter.gemm(a, b, bias, preferred_element_type=f16)),
            ((x8, w8, bias, f16, 0.5, 2.0), aiter.gemm_fp8(
                x8, w8, 0.5, 2.0, bias, preferred_element_type=f16)),
            ((x8, w8), aiter.gemm_fp8(x8, w8, 1.0, 1.0))],
        gemm_a8w8=[
            ((x8, w8, rows, columns), aiter.gemm_fp8(x8, w8, rows, columns)),
            ((xi, wi, rows, columns, bias, f16), aiter.gemm_i8(
                xi, wi, rows, columns, bias, preferred_element_type=f16))],
        gemm_a8w8_bpreshuffle=[((x8, shuffled(w8), rows, columns),
                                aiter.gemm_fp8(x8, w8, rows, columns))],
        gemm_a8w8_blockscale=[
            ((x8, w8, *blocks), aiter.gemm_fp8(x8, w8, *blocks)),
            ((x8, shuffled(w8), *blocks, f16, True), aiter.gemm_fp8(
                x8, w8, *blocks, preferred_element_type=f16))],
        gemm_a8w8_blockscale_bpreshuffle=[
            ((x8, shuffled(w8), *blocks), aiter.gemm_fp8(x8, w8, *blocks))],
        gemm_a4w4=[((x4, shuffled(w4), *turned, bias), aiter.gemm_fp4(
            x4, w4, x4_scale, w4_scale, bias))],
        batched_gemm_bf16=[
            (batch, aiter.gemm(*batch)),
            ((*batch, offset), jnp.stack([
                aiter.gemm(batch[0][i], batch[1][i], offset[i, 0])
                for i in range(2)]))],
        batched_gemm_a8w8=[
            (batch8, aiter.gemm_fp8(*batch8)),
            ((*batch8, offset), jnp.stack([
                aiter.gemm_fp8(*(t[i] for t in batch8), offset[i, 0])
                for i in range(2)]))])
    for name, cases in calls.items():
      for args, want in cases:
        # One by one is another kernel than a batch, maybe.
        transforms.assert_close(self, getattr(aiter, name)(*args), want,
                                2.0**-7 if args[-1] is offset else 0)

  @parameterized.parameters(
      ("gemm_a16w16", dict(scale_a=1.0), ValueError, "scale_a is given"),
      ("gemm_a16w16", dict(B=jnp.ones((4, 3))), ValueError, "B is float32"),
      ("gemm_a16w16", dict(otype="int8"), TypeError, "otype is 'int8'"),
      ("gemm_a8w8", dict(x_scale=jnp.ones(3)), ValueError, "x_scale is"),
      ("gemm_a8w8", dict(XQ=None), TypeError, "XQ is a NoneType"),
      ("gemm_a8w8_blockscale", dict(isBpreshuffled=1), TypeError,
       "isBpreshuffled is 1"),
      ("gemm_a8w8_blockscale_bpreshuffle", dict(dtype="int8"), TypeError,
       "dtype is 'int8'"),
      ("batched_gemm_bf16", dict(), ValueError, "XQ is int8"))
  def test_errors(self, name, wrong, kind, message):
    good = dict(XQ=jnp.ones((4, 8), jnp.int8), WQ=jnp.ones((4, 8), jnp.int8))
    if name == "gemm_a16w16":
      good = dict(A=jnp.ones((4, 8)), B=jnp.ones((4, 8)))
    elif not name.startswith("batched"):
      good |= dict(x_scale=jnp.ones((4, 1)), w_scale=jnp.ones((4, 1)))
      if "block" in name:
        good |= {n: t.astype(jnp.float8_e4m3fn)
                 for n, t in good.items() if "Q" in n}
    with self.assertRaisesRegex(kind, f"^{name}: {message}"):
      getattr(aiter, name)(**{**good, **wrong})


if __name__ == "__main__":
  absltest.main()
