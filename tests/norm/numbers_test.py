# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm: numbers against float64, transformations, errors.

y, residual_out and every gradient are compared with a float64 oracle. The error
may be twice that of the plain formula, with every step in the input dtype, plus
a floor: one unit in the last place of the largest value, and 2^-22 of what it
is a difference of, where a row's mean is far from zero or nothing remains of it
without the mean. A quantised result is what y rounds to, for a y of the
oracle's within 2^-17 of a row's largest.
"""

import dataclasses
import functools
import importlib
import importlib.util
import itertools

import hypothesis
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine, sharding, transforms
from harness.cases import DTYPES, FLOOR, examples
from harness.machine import CPUS, PLATFORM
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from quant import oracle as quant_oracle

import jax
from jax._src.aiter.core.operator import Key
from jax._src.aiter.norm import op as norm_op
from jax.experimental import aiter
from jaxlib import gpu_aiter

QUANT = list(quant_oracle.LARGEST)


@dataclasses.dataclass(frozen=True)
class Case:
  """One call. `weights` is the dtype of gamma and beta, x's if empty."""
  dtype: str = "bf16"
  lead: tuple[int, ...] = (3, 5)
  cols: int = 48
  layer: bool = False
  residual: bool = False
  gemma: bool = False
  t5: bool = False
  weights: str = ""
  offset: float = 0.0
  epsilon: float = 1e-5

  def inputs(self, seed=0):
    """x, residual, gamma, beta, dy and dresidual_out; float64, as rounded."""
    rng = np.random.default_rng(seed)
    round_to = lambda t, dtype: t.astype(DTYPES[dtype]).astype(np.float64)
    rows = lambda: round_to(
        self.offset + rng.standard_normal((*self.lead, self.cols)), self.dtype)
    cols = lambda: round_to(
        rng.standard_normal(self.cols), self.weights or self.dtype)
    return rows(), rows(), cols(), cols(), rows() - self.offset, rows()

  def function(self, suffix=""):
    """The public function, of x, residual, gamma and beta: those it has."""
    name = ("layer_norm" if self.layer else "rms_norm") + (
        "_with_add" if self.residual else "") + suffix
    options = {} if self.layer else dict(gemma=self.gemma, t5=self.t5)
    return lambda x, residual, gamma, beta, **more: getattr(aiter, name)(
        *[x] + [residual] * self.residual + [gamma] + [beta] * self.layer,
        self.epsilon, **options, **more)

  def call(self, *args):
    """(y, residual_out or None)."""
    out = self.function()(*args)
    return out if self.residual else (out, None)


def formula(case: Case, xp, x, residual, gamma, beta):
  """The plain formula in the arguments' dtype; `xp` is numpy or jax.numpy."""
  s = x + residual if case.residual else x
  d = s - xp.mean(s, -1, keepdims=True) if case.layer else s
  n = d / xp.sqrt(xp.mean(d * d, -1, keepdims=True) + case.epsilon)
  y = n * (1 + gamma if case.gemma else gamma)
  return (y + beta if case.layer else y), s


def oracle(case: Case, inputs):
  """float64 results: y, residual_out, dx, dgamma, dbeta.

  And sizes: of each, the numbers that it is a difference of.
  """
  x, residual, gamma, beta, dy, dres = inputs
  y, s = formula(case, np, x, residual, gamma, beta)
  d = s - s.mean(-1, keepdims=True) if case.layer else s
  rstd = 1 / np.sqrt((d * d).mean(-1, keepdims=True) + case.epsilon)
  n = d * rstd
  weight = 1 + gamma if case.gemma else gamma
  g = dy * weight
  dx = g - n * (n * g).mean(-1, keepdims=True)
  if case.layer:
    dx = dx - g.mean(-1, keepdims=True)
  rows = tuple(range(x.ndim - 1))
  size = (np.abs(s) * rstd).max(initial=0)
  sizes = dict(
      y=size * np.abs(weight).max(), residual_out=0, dbeta=0,
      dx=size * np.abs(g * rstd).max(initial=0),
      dgamma=size * np.abs(dy).sum(rows).max())
  return dict(
      y=y, residual_out=s, dx=dx * rstd + (dres if case.residual else 0),
      dgamma=(dy * n).sum(rows), dbeta=dy.sum(rows)), sizes


def results(case: Case, function, inputs, device=None):
  """The same names, of a function (x, residual, gamma, beta) -> (y, sum)."""
  to = lambda t, dtype: jax.device_put(t.astype(DTYPES[dtype]), device)
  x, residual, dy, dres = (
      to(inputs[i], case.dtype) for i in (0, 1, 4, 5))
  gamma, beta = (to(inputs[i], case.weights or case.dtype) for i in (2, 3))

  @jax.jit
  def run(x, residual, gamma, beta, dy, dres):
    (y, s), vjp = jax.vjp(function, x, residual, gamma, beta)
    cotangents = dy.astype(y.dtype), None if s is None else dres.astype(s.dtype)
    dx, dresidual, dgamma, dbeta = vjp(cotangents)
    return dict(y=y, residual_out=s, dx=dx, dresidual=dresidual, dgamma=dgamma,
                dbeta=dbeta)

  out = jax.device_get(run(x, residual, gamma, beta, dy, dres))
  return {k: None if v is None else np.asarray(v, np.float64)
          for k, v in out.items()}


class NormTestCase(parameterized.TestCase):

  def check(self, case: Case, seed=0):
    inputs = case.inputs(seed)
    want, sizes = oracle(case, inputs)
    got = results(case, case.call, inputs)
    plain = results(case, functools.partial(formula, case, jnp), inputs,
                    CPUS[0])
    names = ["y", "dx", "dgamma"]
    if case.residual:
      np.testing.assert_array_equal(got["dx"], got["dresidual"])
      names.append("residual_out")
    if case.layer:
      names.append("dbeta")
    for name in names:
      expected = want[name]
      if not expected.size:
        continue
      self.assertEqual(got[name].shape, expected.shape)
      error = np.max(np.abs(got[name] - expected))
      # Where the plain formula overflows, the floor alone counts.
      allowed = np.nan_to_num(2 * np.max(np.abs(plain[name] - expected)),
                              nan=0, posinf=0)
      floor = (FLOOR[case.dtype] * np.max(np.abs(expected))
               + 2.0**-22 * sizes[name])
      self.assertLessEqual(error, allowed + floor, f"{name} of {case}")


class NumbersTest(NormTestCase):

  @parameterized.product(
      dtype=["bf16", "fp16", "fp32"], layer=[False, True],
      residual=[False, True])
  def test_functions(self, dtype, layer, residual):
    self.check(Case(dtype=dtype, layer=layer, residual=residual))

  @parameterized.parameters(*machine.sample(itertools.product(
      [1, 7, 8, 64, 384, 768, 1000, 1024, 1032, 2048, 4096, 5120, 8192, 12296,
       32768], [False, True]), 13))
  def test_columns(self, cols, layer):
    """Every kernel: those that hold a row, and that for any number."""
    self.check(Case(cols=cols, lead=(5,), layer=layer, residual=layer))

  @parameterized.parameters(
      (2880, False, False), (2880, True, True), (5001, False, False),
      (5001, True, True), (18432, False, False), (18432, True, True),
      (20480, False, True), (24576, True, False))
  def test_wide(self, cols, layer, residual):
    """On a GPU, more rows than blocks run at once."""
    self.check(Case(cols=cols, lead=(machine.size(300, 2, 2),), layer=layer,
                    residual=residual))

  @parameterized.parameters(*machine.sample(itertools.product(
      [3, 9, 121, 123, 250, 505, 1017, 2041, 3065, 4089, 4097, 6137, 8185,
       12281, 16377], [False, True], [False, True]), 7))
  def test_odd_columns(self, cols, layer, residual):
    """On a GPU, more rows than programs that walk over them."""
    rows = machine.size(max(2**21 // cols, 2500), 17, 17)
    self.check(Case("bf16" if cols % 2 else "fp16", cols=cols, lead=(rows,),
                    layer=layer, residual=residual))

  @parameterized.parameters("fp16", "fp32")
  def test_columns_of_other_types(self, dtype):
    for cols in (1024, 4096, 1029):
      self.check(Case(dtype=dtype, cols=cols, lead=(9,), layer=True))

  def test_longest(self):
    """65,536 columns and more."""
    self.check(Case(cols=65536, lead=(2,)))
    self.check(Case(cols=65537, lead=(2,), layer=True, residual=True))

  @parameterized.parameters(1, 2, 63, 700)
  def test_rows(self, rows):
    """Fewer rows than parts, and more."""
    self.check(Case(lead=(rows,), cols=64, layer=True))
    self.check(Case(lead=(rows,), cols=64))

  def test_parts_without_rows(self):
    """A part has two of these rows, so that half of the blocks have none."""
    self.check(Case(lead=(machine.size(330, 2),), cols=4104, layer=True))

  @parameterized.parameters(*machine.sample(
      itertools.product(*[[False, True]] * 3), 5))
  def test_options(self, gemma, t5, residual):
    self.check(Case(gemma=gemma, t5=t5, residual=residual))

  @parameterized.product(dtype=["bf16", "fp16"], layer=[False, True])
  def test_wide_weights(self, dtype, layer):
    self.check(Case(dtype=dtype, layer=layer, weights="fp32", residual=True))

  def test_mixed_weights(self):
    """gamma and beta of two types: both count in float32."""
    x = jnp.ones((2, 16), jnp.bfloat16) * jnp.arange(16)
    beta = jnp.full(16, 2.0**-9 + 1, jnp.float32)
    out = aiter.layer_norm(x, jnp.zeros(16, jnp.bfloat16), beta)
    self.assertEqual(out.dtype, jnp.bfloat16)
    np.testing.assert_array_equal(out, beta.astype(jnp.bfloat16)[None].repeat(
        2, 0))

  def test_without_weights(self):
    x = jax.random.normal(jax.random.key(0), (4, 32))
    np.testing.assert_array_equal(
        aiter.layer_norm(x, None, None),
        aiter.layer_norm(x, jnp.ones(32), jnp.zeros(32)))

  @parameterized.parameters(48, 1032, 9001)
  def test_far_from_zero(self, cols):
    """The variance of numbers that lie around 100 is not lost."""
    self.check(Case(dtype="fp32", cols=cols, layer=True, offset=100.0))

  def test_t5_rounds_before_the_weight(self):
    x = jnp.asarray(np.linspace(-3, 5, 64), jnp.bfloat16)[None]
    gamma = jnp.full(64, 1.0 + 2.0**-7, jnp.bfloat16)
    n = aiter.rms_norm(x, jnp.ones(64, jnp.bfloat16))
    np.testing.assert_array_equal(
        aiter.rms_norm(x, gamma, t5=True),
        (n.astype(jnp.float32) * gamma.astype(jnp.float32)).astype(n.dtype))

  def test_sum_is_not_rounded_before_the_norm(self):
    """The norm sees bits of the sum that residual_out has lost."""
    x = jnp.full((1, 16), 256.0, jnp.bfloat16).at[0, 0].set(-256)
    residual = jnp.full((1, 16), 0.5, jnp.bfloat16)
    y, s = aiter.layer_norm_with_add(
        x, residual, jnp.full(16, 2.0**10, jnp.float32), None)
    np.testing.assert_array_equal(s, x)
    exact = 256.5 - np.where(np.arange(16) == 0, 512.0, 0)
    exact = (exact - exact.mean()) / exact.std() * 2.0**10
    np.testing.assert_allclose(y[0].astype(jnp.float32), exact, rtol=2.0**-8)

  def test_zero_rows_and_special_numbers(self):
    gamma = jnp.ones(16)
    np.testing.assert_array_equal(
        aiter.rms_norm(jnp.zeros((2, 16)), gamma), 0.0)
    self.assertTrue(np.isnan(aiter.rms_norm(jnp.zeros((2, 16)), gamma,
                                            epsilon=0.0)).all())
    x = jnp.ones((3, 16)).at[1, 3].set(jnp.nan)
    out = np.isnan(aiter.rms_norm(x, gamma))
    np.testing.assert_array_equal(out, np.arange(3)[:, None] == 1 + 0 * out)

  def test_empty(self):
    for shape in ((0, 16), (2, 0, 16)):
      x = jnp.zeros(shape, jnp.bfloat16)
      y, vjp = jax.vjp(aiter.rms_norm, x, jnp.ones(16, jnp.bfloat16))
      self.assertEqual(y.shape, shape)
      np.testing.assert_array_equal(vjp(y)[1], 0)

  @parameterized.parameters((3, 0), (0, 0), (2, 3, 0))
  def test_no_columns(self, *shape):
    """Rows of nothing stay rows of nothing, and so do their gradients."""
    x, none = jnp.zeros(shape), jnp.zeros(0)
    for fn, args, results in (
        (aiter.rms_norm, (x, none), 1),
        (aiter.layer_norm, (x, none, none), 1),
        (aiter.rms_norm_with_add, (x, x, none), 2),
        (aiter.layer_norm_with_add, (x, x, none, none), 2)):
      out, vjp = jax.vjp(fn, *args)
      self.assertEqual([t.shape for t in jax.tree.leaves(out)],
                       [shape] * results)
      self.assertEqual([t.shape for t in vjp(out)], [t.shape for t in args])

  def test_same_bits(self):
    """Backward is deterministic."""
    case = Case(lead=(machine.size(4000, 100, 70),), layer=True, residual=True)
    first, second = (
        results(case, case.call, case.inputs()) for _ in range(2))
    for name, t in first.items():
      np.testing.assert_array_equal(t, second[name])

  @examples(40, 12, 6)
  @hypothesis.given(st.data())
  def test_any_shape(self, data):
    draw = data.draw
    layer = draw(st.booleans())
    self.check(Case(
        dtype=draw(st.sampled_from(list(DTYPES))),
        lead=tuple(draw(st.lists(st.integers(0, 6), max_size=3))),
        cols=draw(st.integers(1, machine.size(3000, 300, 300))), layer=layer,
        residual=draw(st.booleans()),
        gemma=not layer and draw(st.booleans()),
        weights=draw(st.sampled_from(["", "fp32"]))), draw(st.integers(0, 99)))


class QuantTest(NormTestCase):

  def check_quantised(self, case: Case, quant: str, x_scale=False, seed=0):
    x, residual, gamma, beta, *_ = inputs = case.inputs(seed)
    y, s = formula(case, np, x, residual, gamma, beta)
    options = {}
    if x_scale:
      x_scale = np.random.default_rng(9).uniform(0.5, 2, case.cols)
      options["x_scale"] = jnp.asarray(x_scale, jnp.float32)
      y = y * x_scale.astype(np.float32)
    to = lambda t, dtype: jnp.asarray(t, DTYPES[dtype])
    weights = case.weights or case.dtype
    q, scale, *sums = jax.device_get(
        jax.jit(case.function("_quant"), static_argnames="quant_dtype")(
            *(to(t, case.dtype) for t in inputs[:2]),
            *(to(t, weights) for t in inputs[2:4]), quant_dtype=quant,
            **options))
    if case.residual:
      np.testing.assert_array_equal(sums[0], s.astype(DTYPES[case.dtype]))
    self.assertLen(sums, case.residual)

    # T5 rounds y's factor, which may fall to the other side.
    tolerance = 2.0**-7 if case.t5 else 2.0**-17
    below, above = 1 - tolerance, 1 + tolerance
    if quant == "mxfp4":
      self.assertEqual((q.dtype, scale.dtype), (np.uint8, np.uint8))
      self.assertEqual(q.shape, (*case.lead, case.cols // 2))
      self.assertEqual(scale.shape, (*case.lead, case.cols // 32))
      y = y.reshape(*case.lead, -1, 32)
      q = quant_oracle.unpack(q).reshape(y.shape)
      amax, scale = quant_oracle.amax(y, -1), scale[..., None]
      of = functools.partial(quant_oracle.e8m0_scale, kind=quant, mode="up")
      self.assertTrue((scale >= of(amax * below)).all())
      self.assertTrue((scale <= of(amax * above)).all())
      scale = quant_oracle.from_e8m0(scale)
    else:
      self.assertEqual(q.dtype.name, quant)
      self.assertEqual((q.shape, scale.dtype), (y.shape, np.float32))
      np.testing.assert_allclose(
          scale, quant_oracle.f32_scale(quant_oracle.amax(y, -1), quant),
          rtol=tolerance)
    numbers = y / scale
    off = tolerance * np.abs(numbers).max(-1, keepdims=True)
    least, most = (quant_oracle.value(quant_oracle.round_to(t, quant), quant)
                   for t in (numbers - off, numbers + off))
    q = quant_oracle.value(q, quant)
    self.assertTrue(((least <= q) & (q <= most)).all(), f"{quant} of {case}")

  @parameterized.parameters(*machine.sample(
      itertools.product(QUANT, [False, True], [False, True]), 9))
  def test_functions(self, quant, layer, residual):
    self.check_quantised(
        Case(cols=96, layer=layer, residual=residual), quant, x_scale=residual)

  @parameterized.parameters(*QUANT)
  def test_columns(self, quant):
    for cols in (32, 1056, 4096, 5120, machine.size(65536, 65536, 16384)):
      self.check_quantised(Case(cols=cols, lead=(3,), residual=True), quant)

  @parameterized.product(
      quant=QUANT, layer=[False, True], residual=[False, True])
  def test_walks(self, quant, layer, residual):
    """On a GPU, more rows than blocks that walk over them."""
    rows = machine.size(1700, 3, 3)
    for cols in machine.size((1024, 2048, 4096, 6144, 8192, 18432), (1024,),
                             (1024, 4096)):
      self.check_quantised(
          Case(cols=cols, lead=(rows,), layer=layer, residual=residual), quant)

  @parameterized.parameters("int8", "float8_e4m3fn", "float8_e4m3fnuz")
  def test_odd_columns(self, quant):
    for cols in (1, 7, 1029):
      self.check_quantised(Case(cols=cols, lead=(5,)), quant, x_scale=True)
    rows = machine.size(2500, 3, 3)
    for cols in machine.size((121, 249, 505, 1017, 2041, 4089, 8185), (9,),
                             (9, 1017)):
      self.check_quantised(
          Case(cols=cols, lead=(rows,), layer=cols % 3 == 0), quant)

  @parameterized.parameters(*QUANT)
  def test_types_and_options(self, quant):
    self.check_quantised(Case("fp16", cols=64, weights="fp32"), quant)
    self.check_quantised(Case("fp32", cols=64, layer=True), quant)
    self.check_quantised(Case(cols=64, gemma=True, residual=True), quant)
    self.check_quantised(Case(cols=64, t5=True, residual=True), quant)

  @parameterized.product(quant=QUANT, layer=[False, True])
  def test_every_bit(self, quant, layer):
    """Rows that are their own norm: y is known, and so is every bit."""
    rng = np.random.default_rng(3)
    signs = np.repeat([[1, -1]], 512, 1)
    x = np.stack([rng.permutation(signs[0]) for _ in range(4)])
    gamma = (rng.standard_normal(1024)
             * 2.0**rng.integers(-20, 20, 1024)).astype(np.float32)
    x_scale = rng.uniform(0.5, 2, 1024).astype(np.float32)
    options = dict(quant_dtype=quant, x_scale=jnp.asarray(x_scale))
    args = jnp.asarray(x, jnp.bfloat16), jnp.asarray(gamma)
    if layer:
      q, scale = aiter.layer_norm_quant(*args, None, 0.0, **options)
    else:
      q, scale = aiter.rms_norm_quant(*args, 0.0, **options)
    y = x.astype(np.float32) * gamma * x_scale
    groups = y.reshape(4, -1, 32) if quant == "mxfp4" else y
    amax = quant_oracle.amax(groups, -1)
    if quant == "mxfp4":
      want_scale = quant_oracle.e8m0_scale(amax, quant, "up")
      numbers = groups / quant_oracle.from_e8m0(want_scale)
      want = quant_oracle.pack(quant_oracle.round_to(numbers, quant))
      want, want_scale = want.reshape(4, -1), want_scale[..., 0]
    else:
      want_scale = quant_oracle.f32_scale(amax, quant)
      want = quant_oracle.round_to(y / want_scale, quant)
    np.testing.assert_array_equal(scale, want_scale)
    np.testing.assert_array_equal(np.asarray(q).view(np.uint8),
                                  want.view(np.uint8))

  def test_y_is_not_rounded_first(self):
    """Codes tell numbers apart that y's dtype does not."""
    x = jnp.asarray(1 + np.arange(64) / 64, jnp.bfloat16)[None]
    gamma = jnp.full(64, 1 + 2.0**-10, jnp.float32)
    fused = aiter.rms_norm_quant(x, gamma, 0.0)[1]
    unfused = jnp.max(aiter.rms_norm(x, gamma, 0.0)).astype(jnp.float32) / 127
    exact = np.arange(1, 2, 1 / 64)
    exact = exact.max() / np.sqrt((exact**2).mean()) * (1 + 2.0**-10) / 127
    np.testing.assert_allclose(fused[0, 0], exact, rtol=1e-6)
    self.assertGreater(abs(unfused - exact) / exact, 1e-4)

  @parameterized.parameters(*QUANT)
  def test_rows_of_zeros_and_nan(self, quant):
    x = jnp.zeros((2, 32)).at[1, 3].set(jnp.nan)
    q, scale = aiter.rms_norm_quant(x, jnp.ones(32), quant_dtype=quant)
    np.testing.assert_array_equal(np.asarray(q[0]).view(np.uint8), 0)
    if quant == "mxfp4":
      np.testing.assert_array_equal(scale, [[0], [255]])
    else:
      zero = np.float32(0)
      self.assertEqual(scale[0, 0], quant_oracle.f32_scale(zero, quant))
      self.assertTrue(np.isnan(scale[1, 0]))

  def test_empty(self):
    for quant in QUANT:
      q, scale = aiter.layer_norm_quant(
          jnp.zeros((0, 64)), None, None, quant_dtype=quant)
      self.assertEqual((q.shape[0], scale.shape[0]), (0, 0))

  def test_no_columns(self):
    """What is divided by is that of zeros, where a row has a scale."""
    for quant in QUANT:
      q, scale, s = aiter.rms_norm_with_add_quant(
          *[jnp.zeros((3, 0))] * 2, jnp.zeros(0), quant_dtype=quant)
      self.assertEqual((q.shape, s.shape), ((3, 0), (3, 0)))
      _, of_zeros = aiter.rms_norm_quant(
          jnp.zeros((3, 32)), jnp.zeros(32), quant_dtype=quant)
      if quant == "mxfp4":
        self.assertEqual(scale.shape, (3, 0))
      else:
        np.testing.assert_array_equal(scale, of_zeros)

  @examples(40, 12, 6)
  @hypothesis.given(st.data())
  def test_any_shape(self, data):
    draw = data.draw
    layer, quant = draw(st.booleans()), draw(st.sampled_from(list(QUANT)))
    unit = 32 if quant == "mxfp4" else 1
    self.check_quantised(Case(
        dtype=draw(st.sampled_from(list(DTYPES))), layer=layer,
        lead=tuple(draw(st.lists(st.integers(1, 5), max_size=3))),
        cols=unit * draw(st.integers(2, machine.size(3000, 300, 300) // unit)),
        residual=draw(st.booleans()), gemma=not layer and draw(st.booleans())),
                         quant, draw(st.booleans()), draw(st.integers(0, 99)))

  def test_no_gradient(self):
    x, gamma = jnp.ones((2, 32)), jnp.ones(32)
    loss = lambda f, x: jnp.sum(f(x, gamma, quant_dtype="mxfp4")[0] * x[0, 0])
    with self.assertRaisesRegex(TypeError, "rms_norm_quant: has no gradient"):
      jax.grad(functools.partial(loss, aiter.rms_norm_quant))(x)
    stopped = lambda x, *args, **options: aiter.rms_norm_quant(
        jax.lax.stop_gradient(x), *args, **options)
    self.assertEqual(jax.grad(functools.partial(loss, stopped))(x).shape,
                     x.shape)


@machine.where(PLATFORM is not None)
class KernelTest(absltest.TestCase):

  def test_kernels_serve(self):
    """No call here quietly ran the reference."""
    for dtype in machine.types(norm_op._DTYPES):
      for cols in (1, 1024, 5120, 65536, 100001):
        for op in ("fwd", "bwd", "quant"):
          self.assertIsNone(getattr(norm_op, f"norm_{op}").unserved(
              PLATFORM, Key(f"norm_{op}", dtype, (cols,))))
    text = jax.jit(jax.grad(lambda x: jnp.sum(aiter.rms_norm(
        x, jnp.ones(64, x.dtype)) ** 2))).lower(jnp.ones((4, 64))).as_text()
    text += jax.jit(aiter.rms_norm_quant).lower(
        jnp.ones((4, 64)), jnp.ones(64)).as_text()
    for op in ("norm_fwd", "norm_bwd", "norm_quant"):
      self.assertIn(gpu_aiter.target(PLATFORM, op), text)


def both(x, r, g, b):
  """Every kind of result, from one scalar's gradients."""
  y, s = aiter.layer_norm_with_add(x, r, g, b)
  z = aiter.rms_norm(s, g)
  weight = jnp.arange(1.0, 1 + x.shape[-1])
  return (y * jnp.sin(weight)).sum(-1) + (z * jnp.cos(weight)).sum(-1)


def quantised(x, r, g, b):
  """Scales, what was quantised by them, and the sum; float32."""
  q, scale, s = aiter.layer_norm_with_add_quant(x, r, g, b, x_scale=g * g)
  packed, e8m0 = aiter.rms_norm_quant(
      jnp.concatenate([x] * 4, -1), jnp.concatenate([g] * 4),
      quant_dtype="mxfp4")
  return (scale, e8m0.astype(jnp.float32), q.astype(jnp.float32) * scale / 2,
          (packed & 7).astype(jnp.float32) / 8, s)


class TransformTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    case = Case(dtype="fp32", lead=(4, 6), cols=40)
    self.args = [jnp.asarray(t, jnp.float32) for t in case.inputs()[:4]]
    self.loss = lambda *args: jnp.sum(both(*args) ** 2)
    self.gradients = jax.jit(jax.grad(self.loss, (0, 1, 2, 3)))

  def assert_close(self, got, want):
    transforms.assert_close(self, got, want)

  def assert_all_close(self, got, want):
    """Of a function's results; those of `quantised` may differ by a code."""
    got, want = jax.device_get((got, want))
    if not isinstance(want, tuple) or len(want) < 5:
      return self.assert_close(got, want)
    scales = lambda t: (t[0], t[1], t[4])
    self.assert_close(scales(got), scales(want))
    np.testing.assert_allclose(got[2], want[2], atol=0.51 * np.max(want[0]))
    np.testing.assert_allclose(got[3], want[3], atol=0.126)


class TransformTest(TransformTestCase):

  def test_jit(self):
    eager = jax.grad(self.loss, (0, 1, 2, 3))
    for fn in (eager, quantised):
      self.assert_all_close(jax.jit(fn)(*self.args), fn(*self.args))

  @machine.where(not machine.SIMULATED)  # float64 has no kernels.
  def test_finite_differences(self):
    with jax.enable_x64(True):
      args = [jnp.asarray(t, jnp.float64) for t in self.args]
      check_grads(both, args, order=1, modes=["rev"])

  @parameterized.parameters(
      ((0, 0, None, None),), ((0, None, None, None),), ((1, 1, None, None),),
      ((0, 0, 0, 0),), ((None, None, 0, None),))
  def test_vmap(self, axes):
    x, r, g, b = self.args
    many = lambda t, axis: t if axis is None or t.ndim > 1 else jnp.stack(
        [t * (1 + i) for i in range(4)])
    args = [many(t, a) for t, a in zip((x, r, g, b), axes)]
    args[:2] = (t if a is not None else t[0] for t, a in zip(args[:2], axes))
    if axes[0] is None:
      args[:2] = x[0], r[0]
    n = next(t.shape[a] for t, a in zip(args, axes) if a is not None)
    at = lambda t, a, i: t if a is None else jnp.take(t, i, a)
    for fn in map(jax.jit, (both, self.gradients, quantised)):
      want = [fn(*(at(t, a, i) for t, a in zip(args, axes))) for i in range(n)]
      want = jax.tree.map(lambda *ts: jnp.stack(ts), *want)
      self.assert_all_close(jax.jit(jax.vmap(fn, axes))(*args), want)

  def test_vmap_of_rows(self):
    """A function of one row, mapped twice: one call, not a loop of them."""
    one = jax.vmap(jax.vmap(both, (0, 0, None, None)), (0, 0, None, None))
    loss = lambda *args: jnp.sum(one(*args) ** 2)
    rows = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    self.assert_close(rows(*self.args), self.gradients(*self.args))
    self.assertNotIn("while", rows.lower(*self.args).as_text())

  def test_checkpoint_and_scan(self):
    x, r, g, b = self.args

    def layer(h):
      y, h = aiter.layer_norm_with_add(h, r, g, b)
      return h + 0.1 * y

    transforms.check_scan(self, layer, x)

  @parameterized.parameters(*transforms.EXPORTED)
  def test_export(self, platform):
    x, gamma = jnp.ones((4, 64), jnp.bfloat16), jnp.ones(64, jnp.bfloat16)
    loss = lambda x: jnp.sum(aiter.rms_norm(x, gamma).astype(jnp.float32) ** 2)
    fn = lambda x: (jax.grad(loss)(x), *aiter.rms_norm_quant(x, gamma))
    transforms.check_export(
        self, fn, (x,), ("norm_fwd", "norm_bwd", "norm_quant"), platform)


@sharding.on_hosts
class ShardingTest(TransformTestCase):
  """The same numbers on several devices of the host."""

  def setUp(self):
    super().setUp()
    self.args = jax.device_put(self.args, CPUS[0])
    self.want = {fn: jax.jit(fn)(*self.args)
                 for fn in (self.gradients, quantised)}

  def put(self, mesh, spec):
    return sharding.put(mesh, self.args, [
        spec if t.ndim > 1 else P() for t in self.args])

  @parameterized.parameters(
      (P("a", "b"),), (P("a"),), (P(("a", "b")),), (P(None, "b"),),
      (P("a", None, "b"),))
  def test_automatic(self, spec):
    """Rows shard along any axes; columns are gathered."""
    args = self.put(sharding.mesh((2, 2), ("a", "b")), spec)
    for fn, want in self.want.items():
      compiled = jax.jit(fn).lower(*args).compile()
      self.assert_all_close(compiled(*args), want)
      sent = sharding.collectives(compiled)
      if spec != P("a", None, "b"):
        self.assertContainsSubset(sent, {"all-reduce"})
      # The sums over all rows of dgamma and dbeta are the only communication.
      self.assertEqual("all-reduce" in sent, fn is self.gradients)

  def test_uneven_rows(self):
    """Six rows over four devices: gathered, and right."""
    mesh = sharding.mesh((4,), ("a",))
    args = self.put(mesh, P())
    for fn, want in self.want.items():
      def run(x, *rest, fn=fn):
        return fn(jax.lax.with_sharding_constraint(
            x, NamedSharding(mesh, P(None, "a"))), *rest)
      self.assert_all_close(jax.jit(run)(*args), want)

  @parameterized.parameters(False, True)
  def test_explicit_axes(self, set_mesh):
    with sharding.explicit_mesh(set_mesh) as mesh:
      args = self.put(mesh, P("a", "b"))
      for fn, want in self.want.items():
        got = jax.jit(fn)(*args)
        self.assertEqual(jax.typeof(got[0]).sharding.spec, P("a", "b", None))
        self.assert_all_close(got, want)

  def test_explicit_axes_of_columns(self):
    """Gradients have their arguments' types, however unlike these are."""
    specs = P("a", None, "b"), P(None, "b"), P("b"), P()
    with sharding.explicit_mesh(set_mesh=False) as mesh:
      args = sharding.put(mesh, self.args, specs)
      self.assert_all_close(self.gradients(*args), self.want[self.gradients])

  @parameterized.parameters(False, True)
  def test_shard_map(self, check_vma):
    mesh = sharding.mesh((4,), ("a",))
    rows = P("a")
    args = self.put(mesh, P())
    shards = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, rows, P(), P()),
        check_vma=check_vma)
    self.assert_all_close(
        jax.jit(shards(quantised, out_specs=rows))(*args), self.want[quantised])
    loss = shards(lambda *args: jax.lax.psum(
        jnp.sum(both(*args) ** 2), "a"), out_specs=P())
    self.assert_all_close(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*args),
                          self.want[self.gradients])

  def test_shard_map_over_some_axes(self):
    mesh = sharding.mesh((2, 2), ("a", "b"))
    args = self.put(mesh, P("a", "b"))
    shards = functools.partial(
        jax.shard_map, mesh=mesh, axis_names={"a"},
        in_specs=(P("a"), P("a"), P(), P()))
    self.assert_all_close(
        jax.jit(shards(quantised, out_specs=P("a")))(*args),
        self.want[quantised])
    loss = shards(lambda *args: jax.lax.psum(
        jnp.sum(both(*args) ** 2), "a"), out_specs=P())
    self.assert_all_close(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*args),
                          self.want[self.gradients])


class ErrorTest(parameterized.TestCase):

  def test_jax_aiter(self):
    """jax-aiter's import path has the same functions."""
    for module, function in (
        ("rmsnorm", "rms_norm"), ("rmsnorm", "rms_norm_with_add"),
        ("layernorm", "layer_norm"), ("layernorm", "layer_norm_with_add")):
      self.assertIs(
          getattr(importlib.import_module("jax_aiter." + module), function),
          getattr(aiter, function))

  @parameterized.named_parameters(
      ("x_type", TypeError, dict(x=[1.0]), ["x", "list"]),
      ("x_dtype", TypeError, dict(x=jnp.ones((2, 8), jnp.int32)),
       ["x's dtype", "int32", "bfloat16"]),
      ("x_rank", ValueError, dict(x=jnp.float32(1)), ["x", "rank 1"]),
      ("gamma_shape", ValueError, dict(gamma=jnp.ones(7)),
       ["gamma", "float32[7]", "[8]"]),
      ("gamma_rank", ValueError, dict(gamma=jnp.ones((1, 8))),
       ["gamma", "[1, 8]"]),
      ("gamma_type", TypeError, dict(gamma=1.0), ["gamma", "float"]),
      ("beta_shape", ValueError, dict(beta=jnp.ones(9)), ["beta", "[9]"]),
      ("residual_shape", ValueError, dict(residual=jnp.ones((1, 8))),
       ["residual", "float32[1, 8]", "float32[2, 8]"]),
      ("residual_dtype", ValueError,
       dict(residual=jnp.ones((2, 8), jnp.float16)), ["residual", "float16"]),
      ("epsilon_low", ValueError, dict(epsilon=-1e-6), ["epsilon", "-1e-06"]),
      ("epsilon_nan", ValueError, dict(epsilon=float("nan")), ["epsilon"]),
      ("epsilon_type", TypeError, dict(epsilon="1"), ["epsilon", "'1'"]),
  )
  def test_layer_norm(self, error, replaced, words):
    args = dict(x=jnp.ones((2, 8)), residual=jnp.ones((2, 8)),
                gamma=jnp.ones(8), beta=jnp.ones(8), epsilon=1e-5) | replaced
    with self.assertRaises(error) as caught:
      aiter.layer_norm_with_add(**args)
    for word in ["layer_norm_with_add", *words]:
      self.assertIn(word, str(caught.exception))

  @parameterized.named_parameters(
      ("dtype", TypeError, dict(quant_dtype=jnp.int4),
       ["quant_dtype", "int4", "float8_e4m3fnuz", "mxfp4"]),
      ("dtype_type", TypeError, dict(quant_dtype=None),
       ["quant_dtype", "None"]),
      ("columns", ValueError, dict(quant_dtype="mxfp4"),
       ["x", "float32[2, 8]", "multiple of 32"]),
      ("x_scale_shape", ValueError, dict(x_scale=jnp.ones((2, 1))),
       ["x_scale", "float32[2, 1]", "[8]"]),
      ("x_scale_dtype", TypeError, dict(x_scale=jnp.ones(8, jnp.int8)),
       ["x_scale's dtype", "int8"]),
      ("gamma", TypeError, dict(gamma=None), ["gamma", "NoneType"]),
  )
  def test_quantised(self, error, replaced, words):
    args = dict(x=jnp.ones((2, 8)), residual=jnp.ones((2, 8)),
                gamma=jnp.ones(8)) | replaced
    with self.assertRaises(error) as caught:
      aiter.rms_norm_with_add_quant(**args)
    for word in ["rms_norm_with_add_quant", *words]:
      self.assertIn(word, str(caught.exception))

  def test_rms_norm(self):
    with self.assertRaisesRegex(TypeError, "rms_norm: gemma is 1"):
      aiter.rms_norm(jnp.ones((2, 8)), jnp.ones(8), gemma=1)
    with self.assertRaisesRegex(TypeError, "rms_norm: gamma"):
      aiter.rms_norm(jnp.ones((2, 8)), None)
    with self.assertRaisesRegex(TypeError, "epsilon is a traced value"):
      jax.jit(lambda e: aiter.rms_norm(jnp.ones((2, 8)), jnp.ones(8), e))(0.1)


if __name__ == "__main__":
  absltest.main()
