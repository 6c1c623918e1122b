# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 tensors against a float64 oracle, on any machine.

The error may be twice that of the formula whose weights, the largest being 1,
are rounded to float8, plus a unit of the result's own type.
"""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine
from mha_fp8.cases import KINDS, NATIVE, RAGGED, Case, Problem

import jax
from jax.experimental import aiter

_FLOOR = 2.0**-8


class Fp8TestCase(parameterized.TestCase):

  def check(self, case: Case, seed: int = 0):
    p = Problem(case, seed)
    out, lse = (np.asarray(t).astype(np.float64) for t in p.call())
    exact, exact_lse = p.exact()
    kind = KINDS[case.kind]
    rounded, _ = p.exact(lambda p: p.astype(kind).astype(np.float64))
    self.assertEqual(out.shape, exact.shape)
    empty = np.isneginf(exact_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty, str(case))
    self.assertTrue(np.isfinite(out).all(), str(case))
    allowed = (2 * abs(rounded - exact).max(initial=0)
               + _FLOOR * abs(exact).max(initial=0))
    self.assertLessEqual(abs(out - exact).max(initial=0), allowed, str(case))
    # Where tensors are dequantised scores are of rounded keys.
    np.testing.assert_allclose(
        np.where(empty, 0, lse), np.where(empty, 0, exact_lse), rtol=1e-2,
        atol=1e-2, err_msg=str(case))
    self.assertTrue((out[empty.T] == 0).all(), str(case))


OPTIONS = (
    dict(), dict(causal=True), dict(window=(50, -1)), dict(window=(40, 9)),
    dict(scale="tensor"), dict(scale="head", causal=True),
    dict(scale="block"), dict(sink="h"), dict(sink="bh", causal=True),
    dict(d=64), dict(d=64, scale="block", sink="h"), dict(dv=64),
    dict(d=72, dv=40), dict(hk=4), dict(hq=8, hk=1), dict(softmax_scale=0.3))


class NumbersTest(Fp8TestCase):

  @parameterized.parameters(*machine.sample(
      itertools.product(OPTIONS, (False, True)), 12))
  def test_options(self, options, packed):
    lengths = dict(lengths=RAGGED, packed=True, gap=3) if packed else {}
    self.check(Case(**lengths, **options))

  @parameterized.parameters(
      dict(lengths=((1, 300),)), dict(lengths=((300, 7),), causal=True),
      dict(lengths=((128, 128),), hk=4), dict(lengths=((3, 0),)),
      dict(lengths=((65, 513),), scale="block", causal=True),
      dict(lengths=((1, 1), (1, 1)), packed=True),
      dict(lengths=((0, 0), (5, 5)), packed=True, gap=200),
      # More keys than are short, for which sm_90 has other kernels.
      dict(lengths=((100, 2100),), causal=True, sink="h"),
      dict(lengths=((70, 2000),), scale="block", window=(1900, -1), dv=64),
      dict(lengths=((150, 4000), (9, 130)), packed=True, causal=True),
      dict(lengths=((150, 4000), (9, 130)), packed=True, scale="block"))
  def test_edges(self, **options):
    self.check(Case(**options))

  @parameterized.parameters(
      *(dict(kind=kind) for kind in KINDS if kind != NATIVE),
      dict(d=192, dv=128), dict(softmax_scale=-0.2),
      dict(lengths=RAGGED, packed=True, min_seqlen_q=6))
  def test_dequantised(self, **options):
    """What float8 matrix units do not serve."""
    self.check(Case(**options, causal=True))

  def test_fills_the_type(self):
    """Values up to the largest, weights far apart."""
    case = Case(lengths=((9, 300),))
    p = Problem(case)
    largest = float(ml_dtypes.finfo(KINDS[case.kind]).max)
    p.v = (np.sign(np.float32(p.v)) * largest).astype(p.v.dtype)
    p.k = (np.float32(p.k) * 8).astype(p.k.dtype)
    out, _ = p.call()
    exact, _ = p.exact()
    self.assertLessEqual(abs(np.float64(out) - exact).max(), 0.07 * largest)

  def test_mapped(self):
    q, k, v = (jax.random.normal(jax.random.key(i), shape).astype(
        KINDS[NATIVE]) for i, shape in enumerate(
            ((2, 1, 40, 2, 64), *[(2, 1, 60, 2, 64)] * 2)))
    fn = aiter.flash_attn_fp8_pertensor_func
    np.testing.assert_array_equal(
        jax.vmap(fn)(q, k, v), jnp.stack([fn(*t) for t in zip(q, k, v)]))


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(q="bf16"), TypeError, "q's dtype is bfloat16"),
      (dict(k_descale=(3,)), ValueError, r"k_descale .*\[1, 2\]"),
      (dict(q_descale=(1, 2, 1)), ValueError, "q_descale"),
      (dict(window_size=(1, 2, 3)), ValueError, "leading keys"),
      (dict(sink_ptr=(3,)), ValueError, "sink_ptr"))
  def test_refused(self, replaced, error, words):
    t = jnp.zeros((1, 8, 2, 16), KINDS[NATIVE])
    args = dict(q=t, k=t, v=t)
    for name, value in replaced.items():
      if value == "bf16":
        value = t.astype(jnp.bfloat16)
      elif name != "window_size":
        value = jnp.ones(value)
      args[name] = value
    with self.assertRaisesRegex(error, words):
      aiter.flash_attn_fp8_pertensor_func(**args)

  def test_no_gradient(self):
    t = jnp.ones((1, 8, 2, 16), KINDS[NATIVE])
    with self.assertRaisesRegex(Exception, "flash_attn_fp8"):
      jax.grad(lambda s: aiter.flash_attn_fp8_pertensor_func(
          t, t, t, s).astype(jnp.float32).sum())(jnp.float32(1))


if __name__ == "__main__":
  absltest.main()
