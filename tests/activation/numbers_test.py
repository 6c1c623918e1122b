# SPDX-License-Identifier: Apache-2.0
"""Gated activations: numbers against float64, transformations, errors.

A result and every gradient are compared with a float64 oracle. The error may be
twice that of the plain formula, with every step in the input dtype, plus a
floor: one unit in the last place of the largest value. A quantised result is
what the oracle's rounds to, for a result within 2^-17 of a row's largest; where
the gates are so large that they are their own activation, every bit is known.
"""

import dataclasses
import functools
import importlib
import itertools
import math

import hypothesis
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from activation.oracle import Activation, biased
from harness import machine, sharding, transforms
from harness.cases import DTYPES, FLOOR, examples
from harness.machine import CPUS, PLATFORM
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from quant import oracle as quant_oracle

import jax
from jax._src.aiter.activation import op as activation_op
from jax._src.aiter.core.operator import Key
from jax.experimental import aiter
from jaxlib import gpu_aiter

NAMES = ("silu", "gelu", "gelu_tanh", "swiglu")
QUANT = list(quant_oracle.LARGEST)
EXPERTS = 3


def pairs(*choices):
  """Few of the choices' product, in which any two choices meet."""
  wanted = set()
  meets = lambda row: {
      (i, j, row[i], row[j])
      for i, j in itertools.combinations(range(len(choices)), 2)}
  for row in itertools.product(*choices):
    wanted |= meets(row)
  found = []
  while wanted:
    found.append(max(itertools.product(*choices),
                     key=lambda row: len(meets(row) & wanted)))
    wanted -= meets(found[-1])
  return found


@dataclasses.dataclass(frozen=True)
class Case:
  """One call. `bias` is its dtype, and `out` that of the result, if not x's."""
  name: str = "silu"
  dtype: str = "bf16"
  lead: tuple[int, ...] = (3, 5)
  cols: int = 48
  packed: bool = True
  limit: float = 0.0
  bias: str = ""
  out: str = ""
  large: bool = False  # Gates that are their own activation.

  def inputs(self, seed=0):
    """gate, up, expert_ids, bias and dy; float64, as rounded."""
    rng = np.random.default_rng(seed)
    round_to = lambda t, dtype: t.astype(DTYPES[dtype]).astype(np.float64)
    rows = lambda: rng.standard_normal((*self.lead, self.cols))
    gate = 4 * rows()
    if self.large:
      gate = 32 + np.abs(gate)
    bias = rng.standard_normal((EXPERTS, 2 * self.cols))
    return (round_to(gate, self.dtype), round_to(3 * rows(), self.dtype),
            rng.integers(-1, EXPERTS + 1, self.lead),
            round_to(bias, self.bias or self.dtype),
            round_to(rows(), self.out or self.dtype))

  def options(self):
    """Of the public function, but for arrays."""
    options = {}
    if self.limit or self.name == "swiglu":
      options["limit"] = self.limit
    if self.name == "swiglu":
      options["alpha"] = 1.5
    return options

  def activation(self) -> Activation:
    limit = float(np.asarray(self.limit, DTYPES[self.dtype])) or math.inf
    return Activation(self.name, self.limit, limit, 1.5)

  def call(self, gate, up, ids, bias, suffix="", **more):
    if self.bias:
      more |= dict(expert_ids=ids, bias=bias)
    if self.out and not suffix:
      more["out_dtype"] = DTYPES[self.out]
    pair = (jnp.concatenate([gate, up], -1),) if self.packed else (gate, up)
    return getattr(aiter, f"{self.name}_and_mul{suffix}")(
        *pair, **self.options(), **more)

  def arrays(self, inputs, device=None):
    """The inputs in their dtypes."""
    to = lambda t, dtype: jax.device_put(t.astype(DTYPES[dtype]), device)
    gate, up, ids, bias, dy = inputs
    return (to(gate, self.dtype), to(up, self.dtype),
            jax.device_put(ids.astype(np.int32), device),
            to(bias, self.bias or self.dtype), to(dy, self.out or self.dtype))


def formula(case: Case, gate, up, ids, bias):
  """The plain formula in the arguments' dtype."""
  if case.bias:
    known = (ids >= 0) & (ids < EXPERTS)
    rows = jnp.where(known[..., None], bias[ids], 0).astype(gate.dtype)
    of_gate, of_up = jnp.split(rows, 2, -1)
    gate, up = gate + of_gate, up + of_up
  if case.limit:
    limit = jnp.asarray(case.limit, gate.dtype)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
  a = {
      "silu": jax.nn.silu,
      "gelu": functools.partial(jax.nn.gelu, approximate=False),
      "gelu_tanh": jax.nn.gelu,
      "swiglu": lambda g: g * jax.nn.sigmoid(1.5 * g),
  }[case.name](gate)
  y = a * (up + 1 if case.name == "swiglu" else up)
  if case.bias:
    y = jnp.where(known[..., None], y, 0)
  return y.astype(DTYPES[case.out or case.dtype])


def oracle(case: Case, inputs):
  """float64 results: y, dgate, dup, dbias."""
  gate, up, ids, bias, dy = inputs
  known = np.True_
  if case.bias:
    shape = gate.shape
    gate, up, known = biased(
        *(t.reshape(-1, case.cols) for t in (gate, up)), bias, ids.ravel())
    gate, up, known = (t.reshape(*shape[:-1], t.shape[-1])
                       for t in (gate, up, known))
  act = case.activation()
  dgate, dup = act.gradients(gate, up, np.where(known, dy, 0))
  pairs = np.concatenate([dgate, dup], -1).reshape(-1, 2 * case.cols)
  dbias = np.stack([pairs[ids.ravel() == e].sum(0) for e in range(EXPERTS)])
  return dict(y=np.where(known, act.result(gate, up), 0), dgate=dgate, dup=dup,
              dbias=dbias)


def results(case: Case, function, inputs, device=None):
  """The same names, of a function (gate, up, ids, bias) -> y."""
  *args, dy = case.arrays(inputs, device)

  @jax.jit
  def run(gate, up, ids, bias, dy):
    y, vjp = jax.vjp(lambda g, u, b: function(g, u, ids, b), gate, up, bias)
    dgate, dup, dbias = vjp(dy)
    return dict(y=y, dgate=dgate, dup=dup, dbias=dbias)

  return jax.device_get(run(*args, dy))


class ActivationTestCase(parameterized.TestCase):

  def check(self, case: Case, seed=0):
    inputs = case.inputs(seed)
    want = oracle(case, inputs)
    got = results(case, case.call, inputs)
    plain = results(case, functools.partial(formula, case), inputs, CPUS[0])
    for name in ["y", "dgate", "dup"] + ["dbias"] * bool(case.bias):
      expected = want[name]
      if not expected.size:
        continue
      self.assertEqual(got[name].shape, expected.shape)
      self.assertEqual(got[name].dtype, plain[name].dtype)
      wide = lambda t, name=name: t[name].astype(np.float64)
      error = np.max(np.abs(wide(got) - expected))
      # Where the plain formula overflows, the floor alone counts.
      allowed = np.nan_to_num(2 * np.max(np.abs(wide(plain) - expected)),
                              nan=0, posinf=0)
      least = case.out if name == "y" and case.out else case.dtype
      floor = FLOOR[least] * np.max(np.abs(expected))
      self.assertLessEqual(error, allowed + floor, f"{name} of {case}")


class NumbersTest(ActivationTestCase):

  @parameterized.product(name=NAMES, dtype=list(DTYPES))
  def test_functions(self, name, dtype):
    self.check(Case(name, dtype, packed=dtype != "fp16"))

  @parameterized.parameters(*pairs(
      NAMES, [0.0, 2.3], ["", "bf16", "fp32"], [False, True], ["", "fp16"]))
  def test_options(self, name, limit, bias, packed, out):
    """Each option with each other."""
    self.check(Case(name, limit=limit, bias=bias, packed=packed, out=out))

  @parameterized.parameters(*machine.sample(
      itertools.product(DTYPES, DTYPES), 5))
  def test_result_types(self, dtype, out):
    self.check(Case("swiglu", dtype, out=out, limit=7.0, packed=out != "fp16"))

  @parameterized.parameters(1, 7, 16, 256, 272, 1000, 2880, 11008)
  def test_columns(self, cols):
    """Every kernel: those of short rows, and that for any number."""
    self.check(Case(cols=cols, lead=(5,), packed=cols < 1000,
                    bias="bf16" if cols % 5 else ""))

  def test_odd_columns_of_other_types(self):
    for dtype in ("fp16", "fp32"):
      self.check(Case("gelu", dtype, cols=77, lead=(9,), bias="fp32"))

  @parameterized.product(
      cols=[4, 8, 100, 333, 1002, 4104, *([70001] if machine.GPU else [])],
      dtype=["bf16", "fp32"], packed=[False, True])
  def test_runs_of_results(self, cols, dtype, packed):
    """More tiles than columns, and rows that tiles cut anywhere."""
    rows = machine.size(8200, 90, 90) if cols < 10 else machine.size(61, 5, 5)
    self.check(Case("silu", dtype, lead=(rows,), cols=cols, packed=packed))
    self.check(Case("swiglu", dtype, lead=(rows,), cols=cols, packed=packed,
                    bias="bf16", limit=2.0))

  @parameterized.parameters(1, 63, 700)
  def test_rows(self, rows):
    self.check(Case(lead=(rows,), cols=64, limit=1.0))

  def test_gelu_fast(self):
    for dtype, out in (("bf16", None), ("fp32", np.float16)):
      case = Case("gelu_tanh", dtype)
      gate = case.arrays(case.inputs())[0]
      y, vjp = jax.vjp(lambda x: aiter.gelu_fast(x, out_dtype=out), gate)
      act, wide = case.activation(), np.asarray(gate, np.float64)
      tolerance = dict(rtol=2.0**-7, atol=2.0**-9)
      np.testing.assert_allclose(
          y.astype(jnp.float32), act.result(wide), **tolerance)
      np.testing.assert_allclose(
          vjp(jnp.ones_like(y))[0].astype(jnp.float32),
          act.gradients(wide, None, np.ones_like(wide))[0], **tolerance)
      self.assertEqual(y.dtype, out or gate.dtype)

  def test_limit_is_rounded_as_the_gate_is(self):
    """AITER's: the gate's to x's dtype, up's not."""
    x = jnp.asarray([[100.0, -100.0]], jnp.bfloat16)
    limit = 33.1
    y = aiter.silu_and_mul(x, limit=limit, out_dtype=jnp.float32)
    gate = float(jnp.bfloat16(limit))
    self.assertNotEqual(gate, limit)
    np.testing.assert_array_equal(
        y, np.float32(gate) * np.float32(-limit) * np.ones((1, 1)))
    np.testing.assert_array_equal(jax.grad(
        lambda x: aiter.silu_and_mul(x, limit=limit).sum())(x), 0)

  def test_unknown_experts(self):
    """A row of an expert that is not there: 0, whatever it holds."""
    x = jnp.full((5, 32), jnp.nan)
    ids = jnp.array([-1, 3, 2**31 - 1, -2**31, 100])
    bias = jnp.ones((3, 32))
    run = lambda x, bias: aiter.swiglu_and_mul(x, expert_ids=ids, bias=bias)
    y, vjp = jax.vjp(run, x, bias)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(
        aiter.silu_and_mul(x, expert_ids=ids, bias=jnp.ones((0, 32))), 0)
    q, scale = aiter.silu_and_mul_quant(
        x, expert_ids=ids, bias=bias, quant_dtype=jnp.int8)
    np.testing.assert_array_equal(q, 0)
    np.testing.assert_array_equal(
        scale, quant_oracle.f32_scale(np.float32(0), "int8"))
    dx, dbias = vjp(y + 1)
    np.testing.assert_array_equal(dx, 0)
    np.testing.assert_array_equal(dbias, 0)

  def test_special_numbers(self):
    x = jnp.array([[jnp.nan, -1e38, 1e38, 0.0, -1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for name in NAMES:
      call = getattr(aiter, f"{name}_and_mul")
      y = call(x, limit=0.0)[0]
      self.assertTrue(np.isnan(y[0]))
      np.testing.assert_allclose(y[1:], np.array(
          [0, 1e38, 0, 0]) * (2 if name == "swiglu" else 1), rtol=1e-6)
      dx = jax.grad(lambda x, call=call: call(x, limit=0.0)[0, 1:].sum())(x)
      dx = np.delete(dx, [0, 5])  # Of a gate that is NaN, and its factor.
      self.assertFalse(np.isnan(dx).any(), name)

  def test_empty(self):
    for shape in ((0, 16), (2, 0, 16), (3, 0)):
      x = jnp.zeros(shape, jnp.bfloat16)
      y, vjp = jax.vjp(aiter.silu_and_mul, x)
      self.assertEqual(y.shape, (*shape[:-1], shape[-1] // 2))
      self.assertEqual(vjp(y)[0].shape, shape)
      for quant in QUANT:
        q, scale = aiter.silu_and_mul_quant(x, quant_dtype=quant)
        self.assertEqual((q.shape[:-1], scale.shape[:-1]), (shape[:-1],) * 2)

  def test_same_bits(self):
    """The bias' gradient is deterministic."""
    case = Case(lead=(machine.size(4000, 100, 70),), bias="bf16")
    first, second = (
        results(case, case.call, case.inputs()) for _ in range(2))
    for name, t in first.items():
      np.testing.assert_array_equal(t, second[name])

  @examples(40, 10, 6)
  @hypothesis.given(st.data())
  def test_any_shape(self, data):
    draw = data.draw
    self.check(Case(
        draw(st.sampled_from(NAMES)), draw(st.sampled_from(list(DTYPES))),
        tuple(draw(st.lists(st.integers(0, 6), max_size=3))),
        draw(st.integers(1, machine.size(3000, 300, 300))), draw(st.booleans()),
        draw(st.sampled_from([0.0, 2.5])),
        draw(st.sampled_from(["", "fp32"])),
        draw(st.sampled_from(["", "fp16"]))), draw(st.integers(0, 99)))


class QuantTest(ActivationTestCase):

  def quantised(self, case: Case, quant, seed=0, **options):
    """(q, scale, what was quantised by the oracle)."""
    inputs = case.inputs(seed)
    *args, _ = case.arrays(inputs)
    run = jax.jit(lambda *args: case.call(
        *args, suffix="_quant", quant_dtype=quant, **options))
    q, scale = jax.device_get(run(*args))
    return q, scale, oracle(case, inputs)["y"]

  def check_quantised(self, case: Case, quant: str, seed=0, **options):
    """As near as the oracle's result, which may be off by 2^-17, rounds."""
    q, scale, y = self.quantised(case, quant, seed, **options)
    group = 32 if quant == "mxfp4" else options.get("group_size")
    e8m0 = quant == "mxfp4" or "scale_dtype" in options
    cols = group or case.cols
    y = np.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, -case.cols % cols)])
    y = y.reshape(*case.lead, -1, cols)
    if quant == "mxfp4":
      q = quant_oracle.unpack(q)
    self.assertEqual(q.shape, (*case.lead, case.cols))
    self.assertEqual(scale.shape, y.shape[:-1])
    tolerance = 2.0**-17
    amax = quant_oracle.amax(y, -1)[..., 0]
    if e8m0:
      of = functools.partial(
          quant_oracle.e8m0_scale, kind=quant,
          mode=options.get("round_mode", "up"))
      self.assertTrue((scale >= of(amax * (1 - tolerance))).all())
      self.assertTrue((scale <= of(amax * (1 + tolerance))).all())
      scale = quant_oracle.from_e8m0(scale)
    else:
      np.testing.assert_allclose(
          scale, quant_oracle.f32_scale(amax, quant), rtol=tolerance)
    scale = scale.astype(np.float64)[..., None]
    numbers = np.divide(y, scale, where=scale > 0, out=np.zeros_like(y))
    off = tolerance * np.abs(numbers).max(-1, keepdims=True, initial=0)
    least, most = (
        quant_oracle.value(quant_oracle.round_to(t, quant), quant).reshape(
            *case.lead, -1)[..., :case.cols]
        for t in (numbers - off, numbers + off))
    q = quant_oracle.value(q, quant)
    self.assertTrue(((least <= q) & (q <= most)).all(), f"{quant} of {case}")

  @parameterized.parameters(*pairs(
      QUANT, NAMES, [False, True], [0.0, 2.3], ["", "bf16"]))
  def test_functions(self, quant, name, packed, limit, bias):
    self.check_quantised(
        Case(name, cols=96, packed=packed, limit=limit, bias=bias), quant)

  @parameterized.parameters(*machine.sample(itertools.product(
      QUANT[:3], (32, 64, 128), (False, True)), 9))
  def test_groups(self, quant, group, e8m0):
    if e8m0 and quant == "int8":
      return
    more = dict(scale_dtype=jnp.uint8, round_mode="even") if e8m0 else {}
    self.check_quantised(Case("gelu", "fp16", cols=300), quant,
                         group_size=group, **more)

  @parameterized.parameters(*QUANT)
  def test_columns(self, quant):
    for cols in machine.size(
        (2, 512, 768, 1024, 2048, 2880, 4096, 5000, 8192, 14336, 16400, 28672),
        (2, 768, 2880, 5000), (2, 2048, 4112, 16400)):
      self.check_quantised(Case(cols=cols, lead=(3,)), quant)

  @parameterized.parameters(*QUANT[:3])
  def test_odd_columns(self, quant):
    for cols in (1, 7, 1029):
      self.check_quantised(Case(dtype="fp32", cols=cols, lead=(5,)), quant)

  def assert_bits(self, got, want):
    np.testing.assert_array_equal(
        np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))

  @parameterized.parameters(*pairs(QUANT, DTYPES, (0, 32, 64, 128)))
  def test_every_bit(self, quant, dtype, group):
    """Gates that are their own activation: every bit is known."""
    cols = 320
    case = Case("gelu_tanh" if group else "silu", dtype, (7,), cols,
                packed=bool(group), large=True)
    if quant == "mxfp4":
      options, of = (dict(round_mode=mode) for mode in (
          "up", "down", "even", "ceil")), 32
    else:
      options, of = [dict(group_size=group) if group else {}], group or cols
    for more in options:
      q, scale, y = self.quantised(case, quant, **more)
      want_q, want = quant_oracle.tiles(
          y, quant, 1, of, more.get("round_mode"))
      if quant == "mxfp4":
        want_q = quant_oracle.pack(want_q)
      self.assert_bits(q, want_q)
      self.assert_bits(scale, want)

  @parameterized.parameters(*machine.sample(itertools.product(
      ("float8_e4m3fn", "float8_e4m3fnuz"), ("up", "down", "even", "ceil")), 3))
  def test_every_bit_of_mxfp8(self, quant, mode):
    q, scale, y = self.quantised(
        Case(cols=320, large=True, lead=(5,)), quant, group_size=32,
        scale_dtype=jnp.uint8, round_mode=mode)
    want_q, want = quant_oracle.tiles(y, quant, 1, 32, mode)
    self.assert_bits(q, want_q)
    self.assert_bits(scale, want)

  @parameterized.parameters(*QUANT[:3])
  def test_given_scale(self, quant):
    for scale in (0.37, 1e-30, 1e30):
      given = jnp.full((1,), scale, jnp.float32)
      q, returned, y = self.quantised(
          Case(cols=80, large=True), quant, scale=given)
      self.assert_bits(q, quant_oracle.static(y, quant, np.float32(scale)))
      np.testing.assert_array_equal(returned, given)

  def test_scaled_silu_and_mul(self):
    case = Case(cols=80, large=True)
    inputs = case.inputs()
    gate, up, *_ = case.arrays(inputs)
    q = aiter.scaled_silu_and_mul(jnp.concatenate([gate, up], -1),
                                  jnp.float32(3.3))
    self.assertEqual(q.dtype, aiter.float8_dtype())
    self.assert_bits(q, quant_oracle.static(
        oracle(case, inputs)["y"], q.dtype.name, np.float32(3.3)))

  def test_shuffled(self):
    case = Case(lead=(2, 40), cols=68, large=True)
    q, scale, y = self.quantised(case, "mxfp4", shuffle_scale=True)
    for i in range(2):
      want_q, want = quant_oracle.tiles(y[i], "mxfp4", 1, 32, "up")
      self.assert_bits(q[i], quant_oracle.pack(want_q))
      self.assert_bits(scale[i], quant_oracle.shuffled(want))

  def test_result_is_not_rounded_first(self):
    x = jnp.asarray([[100.0, 1 + 2.0**-7]], jnp.bfloat16)
    _, scale = aiter.silu_and_mul_quant(x, quant_dtype=jnp.int8)
    np.testing.assert_array_equal(scale, quant_oracle.f32_scale(
        np.float32(100 + 100 * 2.0**-7), "int8"))

  def test_no_gradient(self):
    x = jnp.ones((2, 64))
    loss = lambda x: aiter.silu_and_mul_quant(x)[1].sum()
    with self.assertRaisesRegex(TypeError, "silu_and_mul_quant: has no grad"):
      jax.grad(loss)(x)
    self.assertEqual(
        jax.grad(lambda x: loss(jax.lax.stop_gradient(x)))(x).shape, x.shape)


@machine.where(PLATFORM is not None)
class KernelTest(absltest.TestCase):

  def test_kernels_serve(self):
    """No call here quietly ran the reference."""
    ops = (activation_op.activation_fwd, activation_op.activation_bwd,
           activation_op.activation_quant_row,
           activation_op.activation_quant_group)
    names = [f"activation_{n}" for n in ("fwd", "bwd", "quant_row",
                                         "quant_group")]
    for dtype in (t for name, t in DTYPES.items() if machine.has(name)):
      for cols in (1, 256, 1024, 5120, 65536, 100001):
        for op, name in zip(ops, names):
          self.assertIsNone(op.unserved(
              PLATFORM, Key(name, np.dtype(dtype).name, (cols,))))
    x = jnp.ones((4, 64))
    text = jax.jit(jax.grad(lambda x: jnp.sum(
        aiter.silu_and_mul(x) ** 2))).lower(x).as_text()
    for options in ({}, dict(group_size=32)):
      text += jax.jit(lambda x, options=options: aiter.silu_and_mul_quant(
          x, **options)).lower(x).as_text()
    for name in names:
      self.assertIn(gpu_aiter.target(PLATFORM, name), text)


def both(gate, up, ids, bias):
  """Both layouts, with and without a bias: one number a row."""
  a = aiter.silu_and_mul(gate, up, limit=2.0)
  b = aiter.swiglu_and_mul(jnp.concatenate([gate, up], -1), expert_ids=ids,
                           bias=bias)
  weight = jnp.arange(1.0, 1 + gate.shape[-1])
  return (a * jnp.sin(weight) + b * jnp.cos(weight)).sum(-1)


def quantised(gate, up, ids, bias):
  """Scales, and what was quantised by them; float32."""
  q, scale = aiter.gelu_and_mul_quant(gate, up, expert_ids=ids, bias=bias,
                                      quant_dtype=jnp.int8)
  packed, e8m0 = aiter.silu_and_mul_quant(gate, up, quant_dtype="mxfp4")
  return (scale, e8m0.astype(jnp.float32), q.astype(jnp.float32) * scale / 2,
          (packed & 7).astype(jnp.float32) / 8)


class TransformTestCase(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    case = Case(dtype="fp32", lead=(4, 6), cols=40, bias="fp32")
    self.args = list(case.arrays(case.inputs())[:4])
    self.loss = lambda *args: jnp.sum(both(*args) ** 2)
    self.gradients = jax.jit(jax.grad(self.loss, (0, 1, 3)))

  def assert_close(self, got, want):
    transforms.assert_close(self, got, want)

  def assert_all_close(self, got, want):
    """Of a function's results; those of `quantised` may differ by a code."""
    got, want = jax.device_get((got, want))
    if not isinstance(want, tuple) or len(want) < 4:
      return self.assert_close(got, want)
    self.assert_close(got[:2], want[:2])
    np.testing.assert_allclose(got[2], want[2], atol=0.51 * np.max(want[0]))
    np.testing.assert_allclose(got[3], want[3], atol=0.126)


class TransformTest(TransformTestCase):

  def test_jit(self):
    eager = jax.grad(self.loss, (0, 1, 3))
    for fn in (eager, quantised):
      self.assert_all_close(jax.jit(fn)(*self.args), fn(*self.args))

  @machine.where(not machine.SIMULATED)  # float64 has no kernels.
  def test_finite_differences(self):
    with jax.enable_x64(True):
      gate, up, ids, bias = self.args
      wide = [jnp.asarray(t, jnp.float64) for t in (gate, up, bias)]
      check_grads(lambda g, u, b: both(g, u, ids, b), wide, order=1,
                  modes=["rev"])

  # XLA makes a product of its own of a bias's gradient in a loop, and wants to
  # time libraries for it that the simulated GPU does not have.
  @parameterized.parameters(
      ((0, 0, 0, None),), ((1, 1, 1, None),), ((0, 0, 0, 0),),
      *([] if machine.SIMULATED else [
          ((0, None, None, None),), ((None, None, None, 0),)]))
  def test_vmap(self, axes):
    many = lambda t, axis: t if axis is None or t.ndim > 2 else jnp.stack(
        [t * (1 + i) for i in range(4)])
    args = [self.args[i] if i < 3 or axes[3] is None else many(self.args[i], 0)
            for i in range(4)]
    args = [t[0] if axis is None and i < 3 else t
            for i, (t, axis) in enumerate(zip(args, axes))]
    n = next(t.shape[a] for t, a in zip(args, axes) if a is not None)
    at = lambda t, a, i: t if a is None else jnp.take(t, i, a)
    for fn in map(jax.jit, (both, self.gradients, quantised)):
      want = [fn(*(at(t, a, i) for t, a in zip(args, axes))) for i in range(n)]
      want = jax.tree.map(lambda *ts: jnp.stack(ts), *want)
      self.assert_all_close(jax.jit(jax.vmap(fn, axes))(*args), want)

  def test_vmap_of_rows(self):
    """A function of one row, mapped twice: one call, not a loop of them."""
    one = jax.vmap(jax.vmap(both, (0, 0, 0, None)), (0, 0, 0, None))
    loss = lambda *args: jnp.sum(one(*args) ** 2)
    rows = jax.jit(jax.grad(loss, (0, 1, 3)))
    self.assert_close(rows(*self.args), self.gradients(*self.args))
    self.assertNotIn("while", rows.lower(*self.args).as_text())

  def test_vmap_of_shuffled_scales(self):
    x = jnp.concatenate(self.args[:2], -1)
    run = functools.partial(
        aiter.silu_and_mul_quant, quant_dtype="mxfp4", shuffle_scale=True)
    for got, want in zip(jax.jit(jax.vmap(run))(x), jax.jit(run)(x)):
      np.testing.assert_array_equal(got, want)

  @parameterized.parameters(False, True)
  def test_two_arrays_are_one(self, quantise):
    """Halves of one array and two arrays: the same bits."""
    gate, up, ids, bias = self.args
    run = functools.partial(
        *((aiter.swiglu_and_mul_quant, ) if quantise else
          (aiter.swiglu_and_mul,)), expert_ids=ids, bias=bias)
    for a, b in zip(jax.tree.leaves(run(gate, up)), jax.tree.leaves(
        run(jnp.concatenate([gate, up], -1)))):
      np.testing.assert_array_equal(a, b)

  def test_two_arrays_are_not_joined(self):
    """No copy of them in a program, forward or backward."""
    gate, up, *_ = self.args
    text = jax.jit(jax.grad(lambda *args: jnp.sum(
        aiter.silu_and_mul(*args)), (0, 1))).lower(gate, up).as_text()
    self.assertNotIn("concatenate", text)

  def test_checkpoint_and_scan(self):
    gate, up, *_ = self.args
    transforms.check_scan(
        self, lambda h: h + 0.1 * aiter.silu_and_mul(h, up), gate)

  @parameterized.parameters(*transforms.EXPORTED)
  def test_export(self, platform):
    """With any number of rows."""
    rows, = jax.export.symbolic_shape("rows")
    x = jnp.ones((4, 64), jnp.bfloat16)
    loss = lambda x: jnp.sum(aiter.silu_and_mul(x).astype(jnp.float32) ** 2)
    fn = lambda x: (jax.grad(loss)(x), *aiter.silu_and_mul_quant(x),
                    *aiter.silu_and_mul_quant(x, quant_dtype="mxfp4"))
    transforms.check_export(
        self, fn, (x,), ("activation_bwd", "activation_quant_row",
                         "activation_quant_group"), platform,
        types=(jax.ShapeDtypeStruct((rows, 64), x.dtype),))


@sharding.on_hosts
class ShardingTest(TransformTestCase):
  """The same numbers on several devices of the host."""

  def setUp(self):
    super().setUp()
    self.args = jax.device_put(self.args, CPUS[0])
    self.want = {fn: jax.jit(fn)(*self.args)
                 for fn in (self.gradients, quantised)}

  def put(self, mesh, spec):
    fits = lambda t: P(*spec[:t.ndim]) if t is not self.args[3] else P()
    return sharding.put(mesh, self.args, map(fits, self.args))

  @parameterized.parameters(
      (P("a", "b"),), (P("a"),), (P(("a", "b")),), (P(None, "b"),),
      (P("a", None, "b"),))
  def test_automatic(self, spec):
    """Rows shard along any axes."""
    args = self.put(sharding.mesh((2, 2), ("a", "b")), spec)
    for fn, want in self.want.items():
      compiled = jax.jit(fn).lower(*args).compile()
      self.assert_all_close(compiled(*args), want)
      if spec != P("a", None, "b"):
        # The bias' gradient is the only communication.
        self.assertEqual(sharding.collectives(compiled),
                         {"all-reduce"} if fn is self.gradients else set())

  def test_columns(self):
    """Those of two arrays shard, forward and backward."""
    mesh = sharding.mesh((4,), ("a",))
    gate, up = sharding.put(mesh, self.args[:2], [P(None, None, "a")] * 2)
    fn = jax.jit(jax.value_and_grad(
        lambda g, u: jnp.sum(aiter.gelu_and_mul(g, u, limit=1.5)), (0, 1)))
    compiled = fn.lower(gate, up).compile()
    self.assert_close(compiled(gate, up), fn(*self.args[:2]))
    self.assertContainsSubset(sharding.collectives(compiled), {"all-reduce"})

  @parameterized.parameters(False, True)
  def test_explicit_axes(self, set_mesh):
    with sharding.explicit_mesh(set_mesh) as mesh:
      args = self.put(mesh, P("a", "b"))
      for fn, want in self.want.items():
        got = jax.jit(fn)(*args)
        self.assertEqual(jax.typeof(got[0]).sharding.spec, P("a", "b", None))
        self.assert_all_close(got, want)

  @parameterized.parameters(False, True)
  def test_shard_map(self, check_vma):
    mesh = sharding.mesh((4,), ("a",))
    rows = P("a")
    args = self.put(mesh, P())
    shards = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows, rows, rows, P()),
        check_vma=check_vma)
    self.assert_all_close(
        jax.jit(shards(quantised, out_specs=rows))(*args), self.want[quantised])
    loss = shards(lambda *args: jax.lax.psum(
        jnp.sum(both(*args) ** 2), "a"), out_specs=P())
    self.assert_all_close(jax.jit(jax.grad(loss, (0, 1, 3)))(*args),
                          self.want[self.gradients])


class ErrorTest(parameterized.TestCase):

  def test_jax_aiter(self):
    """jax-aiter's import path has the same function."""
    self.assertIs(importlib.import_module("jax_aiter.activation").silu_and_mul,
                  aiter.silu_and_mul)

  @parameterized.named_parameters(
      ("x_type", TypeError, dict(x=[1.0]), ["x", "list"]),
      ("x_dtype", TypeError, dict(x=jnp.ones((2, 8), jnp.int32)),
       ["x's dtype", "int32", "bfloat16"]),
      ("x_rank", ValueError, dict(x=jnp.float32(1)), ["x", "rank 1"]),
      ("x_odd", ValueError, dict(x=jnp.ones((2, 7)), expert_ids=None,
                                 bias=None), ["x", "[2, 7]", "even"]),
      ("up_shape", ValueError, dict(up=jnp.ones((2, 7))), ["up", "[2, 7]"]),
      ("up_dtype", ValueError, dict(up=jnp.ones((2, 8), jnp.float16)),
       ["up", "float16", "float32[2, 8]"]),
      ("ids_alone", ValueError, dict(bias=None), ["bias", "None"]),
      ("bias_alone", ValueError, dict(expert_ids=None), ["expert_ids"]),
      ("ids_dtype", TypeError, dict(expert_ids=jnp.ones(2)),
       ["expert_ids", "float32", "integer"]),
      ("ids_shape", ValueError, dict(expert_ids=jnp.ones(3, jnp.int32)),
       ["expert_ids", "int32[3]", "[2]"]),
      ("bias_shape", ValueError, dict(bias=jnp.ones((3, 7))),
       ["bias", "[3, 7]", "[experts, 8]"]),
      ("bias_dtype", TypeError, dict(bias=jnp.ones((3, 8), jnp.int8)),
       ["bias's dtype", "int8"]),
      ("limit_low", ValueError, dict(limit=-1), ["limit", "-1"]),
      ("limit_type", TypeError, dict(limit="7"), ["limit", "'7'"]),
      ("out_dtype", TypeError, dict(out_dtype=jnp.int8), ["out_dtype", "int8"]),
      ("alpha", ValueError, dict(alpha=math.inf), ["alpha", "inf"]),
  )
  def test_swiglu(self, error, replaced, words):
    args = dict(x=jnp.ones((2, 8)), expert_ids=jnp.ones(2, jnp.int32),
                bias=jnp.ones((3, 8)), limit=7.0) | replaced
    with self.assertRaises(error) as caught:
      aiter.swiglu_and_mul(**args)
    for word in ["swiglu_and_mul", *words]:
      self.assertIn(word, str(caught.exception))

  @parameterized.named_parameters(
      ("dtype", TypeError, dict(quant_dtype=jnp.int4), ["quant_dtype", "int4"]),
      ("group", ValueError, dict(group_size=48), ["group_size", "48", "128"]),
      ("group_of_mxfp4", ValueError, dict(quant_dtype="mxfp4", group_size=64),
       ["group_size", "64", "32"]),
      ("scale_dtype", TypeError, dict(quant_dtype=jnp.int8, group_size=32,
                                      scale_dtype=jnp.uint8),
       ["scale_dtype", "uint8", "float32"]),
      ("e8m0_of_rows", TypeError, dict(scale_dtype=jnp.uint8),
       ["scale_dtype", "uint8"]),
      ("mode", ValueError, dict(round_mode="nearest"), ["round_mode", "even"]),
      ("shuffled", ValueError, dict(shuffle_scale=True), ["shuffle_scale"]),
      ("shuffled_type", TypeError, dict(shuffle_scale=1), ["shuffle_scale"]),
      ("columns", ValueError, dict(x=jnp.ones((2, 6)), quant_dtype="mxfp4"),
       ["x", "float32[2, 6]", "even"]),
      ("scale", ValueError, dict(scale=jnp.ones(2)), ["scale", "[1]"]),
      ("scale_of_groups", ValueError, dict(scale=jnp.ones(1), group_size=32),
       ["scale", "groups"]),
  )
  def test_quantised(self, error, replaced, words):
    args = dict(x=jnp.ones((2, 8))) | replaced
    with self.assertRaises(error) as caught:
      aiter.silu_and_mul_quant(**args)
    for word in ["silu_and_mul_quant", *words]:
      self.assertIn(word, str(caught.exception))

  def test_others(self):
    with self.assertRaisesRegex(TypeError, "scaled_silu_and_mul: scale is a"):
      aiter.scaled_silu_and_mul(jnp.ones((2, 8)), None)
    with self.assertRaisesRegex(ValueError, "gelu_fast: x is float32"):
      aiter.gelu_fast(jnp.float32(1))
    with self.assertRaisesRegex(TypeError, "limit is a traced value"):
      jax.jit(lambda n: aiter.silu_and_mul(jnp.ones((2, 8)), limit=n))(0.1)


if __name__ == "__main__":
  absltest.main()
