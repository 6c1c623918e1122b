# SPDX-License-Identifier: Apache-2.0
"""Queries and rows of a latent cache, made in one launch: against float64."""

import itertools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from fused_qk import cases
from fused_qk.cases import Case
from harness import machine

import jax
from jax.experimental import aiter

_KINDS = ("", *cases.KINDS)


class FusedTestCase(parameterized.TestCase):

  def check(self, case: Case, seed: int = 0):
    p = cases.Problem(case, seed)
    fn, options, arrays = cases.call(p)
    q, kv = jax.jit(lambda arrays: fn(**arrays, **options))(arrays)
    exact, latent, rotated = p.exact()
    self.assertEqual(q.dtype, case.q_out or p.q_nope.dtype)
    cases.check_rounded(self, q, exact, case.q_out, p.q_scale, str(case))
    rows = np.asarray(kv).reshape(-1, kv.shape[-1])
    before = p.cache.reshape(rows.shape).copy()
    first, stored = p.first(), (p.slots >= 0) & (p.slots < len(rows))
    at = p.slots[stored]
    for part, begin in ((latent, 0), (rotated, first)):
      cols = slice(begin, begin + part.shape[1])
      cases.check_rounded(self, rows[at, cols], part[stored], case.cache,
                          p.k_scale, str(case))
      before[at, cols] = rows[at, cols]
    np.testing.assert_array_equal(rows.view(np.uint8), before.view(np.uint8))


class FusedTest(FusedTestCase):

  @parameterized.parameters(*machine.sample(itertools.product(
      _KINDS, (True, False), (True, False)), 10))
  def test_kinds(self, cache, neox, norm):
    self.check(Case(cache=cache, neox=neox, norm=norm, scaled=bool(cache)))

  @parameterized.parameters(*_KINDS[1:])
  def test_queries(self, q_out):
    self.check(Case(q_out=q_out, scaled=True))
    self.check(Case(q_out=q_out, cache="float8_e4m3fn"))

  @parameterized.parameters(
      dict(dtype="fp16"), dict(width=640), dict(lora=96, rope=16, width=256),
      dict(lora=20, rope=6), dict(lora=1, rope=2, heads=1), dict(heads=16),
      dict(tokens=1), dict(tokens=40, page=16, heads=3),
      dict(dtype="fp16", cache="int8", scaled=True, neox=False, norm=True))
  def test_shapes(self, **options):
    self.check(Case(**options))

  @machine.where(not machine.GPU)
  def test_float32(self):
    self.check(Case(dtype="fp32", norm=True))

  def test_then_attend(self):
    """What it makes is what mla_decode_fwd takes."""
    p = cases.Problem(Case(tokens=4, page=4))
    fn, options, arrays = cases.call(p)
    arrays |= dict(slot_mapping=jnp.arange(4), kv_cache=jnp.zeros(
        (1, 4, 1, 576), p.q_nope.dtype))
    q, kv = fn(**arrays, **options)
    out = aiter.mla_decode_fwd(
        q, kv, jnp.array([0, 4]), jnp.array([0, 1]), jnp.array([0]),
        jnp.array([4]), sm_scale=0.05)
    self.assertEqual(out.shape, (4, 5, 512))
    np.testing.assert_allclose(
        np.float32(out[0]), np.broadcast_to(np.float32(p.kv_c[0]), (5, 512)),
        rtol=1e-2, atol=1e-2)

  def test_in_place(self):
    """A donated cache is written where it is."""
    fn, options, arrays = cases.call(cases.Problem(Case(tokens=64)))
    kv = arrays.pop("kv_cache")
    step = jax.jit(lambda kv, arrays: fn(
        kv_cache=kv, **arrays, **options)[::-1], donate_argnums=0)
    memory = step.lower(kv, arrays).compile().memory_analysis()
    self.assertGreaterEqual(memory.alias_size_in_bytes, kv.nbytes)

  @machine.where(not machine.SIMULATED)
  def test_vmap(self):
    fn, options, arrays = cases.call(cases.Problem(Case(lora=64, rope=16)))
    two = lambda t: jnp.stack([t, t[::-1]])
    mapped = ("q_nope", "kv_c", "kv_cache")
    call = lambda q, c, kv: fn(**(arrays | dict(zip(mapped, (q, c, kv)))),
                               **options)
    args = [two(arrays[n]) for n in mapped]
    got = jax.jit(jax.vmap(call))(*args)
    for i in range(2):
      want = call(*(t[i] for t in args))
      for one, other in zip(got, want):
        np.testing.assert_array_equal(np.float32(one[i]), np.float32(other))


@machine.where(not machine.GPU)
class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (TypeError, dict(q_nope=3), "q_nope is a int"),
      (ValueError, dict(q_pe=jnp.ones((7, 4, 64), jnp.bfloat16)), "q_pe"),
      (ValueError, dict(q_pe=jnp.ones((7, 5, 63), jnp.bfloat16)), "even"),
      (TypeError, dict(kv_c=jnp.ones((7, 512), jnp.float16)), "kv_c's dtype"),
      (ValueError, dict(k_pe=jnp.ones((6, 64), jnp.bfloat16)), "k_pe"),
      (ValueError, dict(cos=jnp.ones((20, 64))), "cos"),
      (ValueError, dict(sin=jnp.ones((19, 32))), "sin"),
      (ValueError, dict(kv_cache=jnp.ones((3, 4, 570), jnp.bfloat16)), "576"),
      (TypeError, dict(kv_cache=jnp.ones((3, 4, 576), jnp.float16)),
       "kv_cache's dtype"),
      (ValueError, dict(positions=jnp.ones(6, jnp.int32)), "positions"),
      (TypeError, dict(slot_mapping=jnp.ones(7)), "slot_mapping's dtype"),
      (ValueError, dict(kv_norm_weight=jnp.ones(64)), "kv_norm_weight"),
      (TypeError, dict(q_out_dtype="float32"), "q_out_dtype"),
      (ValueError, dict(eps=-1.0), "eps is -1"),
      (TypeError, dict(is_neox=2), "is_neox"))
  def test_errors(self, kind, wrong, message):
    fn, options, arrays = cases.call(cases.Problem(Case()))
    with self.assertRaisesRegex(kind, message):
      fn(**{**arrays, **options, **wrong})


if __name__ == "__main__":
  absltest.main()
