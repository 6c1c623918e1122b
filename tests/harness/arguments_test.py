# SPDX-License-Identifier: Apache-2.0
"""What all public functions do with arguments, whatever the family."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness.operators import CASES, SIZES, arrays_of

import jax
from jax._src.aiter.core import arguments
from jax.experimental import aiter

# Functions that a case of the table calls with its arrays in order.
CASE_OF = {case.call.func.__name__: case for case in reversed(CASES)
           if isinstance(case.call, functools.partial)}
STATIC = [
    (f"{function}_{name}", function, name)
    for function, case in CASE_OF.items()
    for name, parameter in list(inspect.signature(
        case.call.func).parameters.items())[len(case.arrays):]
    if "jax.Array" not in str(parameter.annotation)]


class StaticTest(parameterized.TestCase):

  @parameterized.named_parameters(*STATIC)
  def test_traced(self, function, name):
    """What decides which program is built says so, and how to give it."""
    case = CASE_OF[function]
    fn, given = case.call.func, arrays_of(case, SIZES[0])
    is_tuple = "tuple" in str(inspect.signature(fn).parameters[name].annotation)

    def call(value):
      return fn(*given, **{**case.call.keywords,
                           name: (value, value) if is_tuple else value})

    message = (f"{function}: {name} is a traced value; .*known while tracing.*"
               f"static_argnames='{name}'")
    with self.assertRaisesRegex((TypeError, ValueError), message):
      jax.jit(call)(1)

  def test_as_told(self):
    """Both ways that the message names work."""
    q = jnp.ones((1, 4, 2, 8))
    want = aiter.flash_attn_func(q, q, q, causal=True)
    for run in (
        jax.jit(aiter.flash_attn_func, static_argnames="causal"),
        lambda *qkv, causal: jax.jit(functools.partial(
            aiter.flash_attn_func, causal=causal))(*qkv)):
      np.testing.assert_allclose(run(q, q, q, causal=True), want, rtol=1e-6)


class KeyTest(absltest.TestCase):
  """A random key is no dtype and no lengths, and has no values for NumPy."""

  def test_refused(self):
    key, t = jax.random.key(0), jnp.ones((8, 8))
    q = jnp.ones((1, 4, 2, 8))
    with self.assertRaisesRegex(TypeError, "gemm: preferred_element_type is "):
      aiter.gemm(t, t, preferred_element_type=key)
    with self.assertRaisesRegex(TypeError, "flash_attn_func: cu_seqlens_q"):
      aiter.flash_attn_func(q, q, q, cu_seqlens_q=key, cu_seqlens_kv=key)
    with self.assertRaisesRegex(TypeError, "sample: temperature"):
      aiter.sample(t, key, key)


class PromotionTest(parameterized.TestCase):
  """Arrays that must agree do so after JAX's own promotion, and not else."""

  @parameterized.product(
      weak=[1.0, 2], dtype=[jnp.bfloat16, jnp.float16, jnp.float32],
      place=[0, 1])
  def test_weak(self, weak, dtype, place):
    weak = jnp.full((4, 8), weak)
    self.assertTrue(weak.weak_type)
    strong = jnp.ones((4, 8), dtype)
    pair = (weak, strong) if place == 0 else (strong, weak)
    self.assertEqual(aiter.gemm(*pair).dtype, dtype)
    for out in aiter.rms_norm_with_add(*pair, jnp.ones(8, dtype)):
      self.assertEqual(out.dtype, dtype)
    q, k = (t.reshape(1, 4, 2, 4) for t in pair)
    self.assertEqual(aiter.flash_attn_func(q, k, k).dtype, dtype)
    self.assertEqual(aiter.dot_product_attention(q, k, k).dtype, dtype)

  def test_strong(self):
    for fn in (aiter.gemm, lambda a, b: aiter.rms_norm_with_add(a, b, a[0])):
      with self.assertRaisesRegex((TypeError, ValueError), "float32"):
        fn(jnp.ones((4, 8), jnp.bfloat16), jnp.ones((4, 8), jnp.float32))

  def test_weak_scale(self):
    a = jnp.ones((4, 8), jnp.int8)
    out = aiter.gemm_i8(a, a, jnp.asarray(2), jnp.full(4, 1.0))
    self.assertEqual(out[0, 0], 16)


class IntegersTest(absltest.TestCase):

  def test_int32(self):
    """What int32 does not hold is at its ends, 64 bits of NumPy's too."""
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    wide = np.array([-2**40, -1, 7, 2**31, 2**32 + 5])
    want = [low, -1, 7, high, high]
    self.assertFalse(jax.config.jax_enable_x64)
    np.testing.assert_array_equal(arguments.int32(wide), want)
    with jax.enable_x64(True):
      got = jax.jit(arguments.int32)(wide)
      self.assertEqual(got.dtype, jnp.int32)
      np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
        arguments.int32(jnp.uint32([3, 2**32 - 1])), [3, high])
    np.testing.assert_array_equal(arguments.int32(jnp.int8([-3, 3])), [-3, 3])

  def test_slots_and_places(self):
    """Families take 64 bits as they are, with JAX's 32."""
    x = jnp.arange(8.0).reshape(2, 1, 4)
    far = np.array([2**32, 1])
    pool = jnp.zeros((2, 2, 1, 4))
    got, _ = aiter.write_kv_cache(x, x, pool, pool, far)
    np.testing.assert_array_equal(got.reshape(4, 4),
                                  [[0] * 4, x[1, 0], [0] * 4, [0] * 4])
    tables = jnp.ones((3, 2)), jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(
        aiter.rope(x, *tables, layout="thd", positions=far),
        aiter.rope(x, *tables, layout="thd", positions=np.array([2, 1])))


class WindowsTest(parameterized.TestCase):

  @parameterized.parameters(2**30, 2**31 - 1, 2**31, 2**40)
  def test_wider_than_any_sequence(self, keys):
    """Such a side is no bound: no sum of it with a place ends elsewhere."""
    q, pool = jnp.ones((3, 2, 8)), jnp.ones((2, 4, 1, 8))
    ends, table = jnp.array([0, 3]), jnp.array([[0]])
    coded = jnp.ones((1, 3, 1, 16), jnp.float8_e4m3fn)
    stored = jnp.zeros(aiter.get_kv_cache_shape(2, 4, 1, 8, q.dtype))
    for out in (
        aiter.flash_attn_func(q[None], q[None], q[None],
                              window_size=(keys, keys)),
        aiter.flash_attn_func(q[None], q[None], q[None],
                              window_size=(1, 2, keys)),
        aiter.flash_attn_varlen(q, q, q, ends, ends, window_size=(keys, keys)),
        aiter.flash_attn_fp8_pertensor_func(
            coded, coded, coded, window_size=(keys, keys)),
        aiter.unified_attention(q, pool, pool, ends, ends[1:], table,
                                causal=False, window_size=(keys, keys)),
        aiter.paged_attention_v1(
            q, pool, pool, 1.0, table, ends, ends[1:], sliding_window=keys),
        aiter.ragged_paged_attention(
            q, q[:, :1], q[:, :1], stored, ends[1:], table[0], ends,
            jnp.array([0, 0, 1]), sliding_window=keys)[0]):
      np.testing.assert_allclose(out, jnp.ones_like(out), rtol=1e-5)

  @parameterized.parameters(
      ("size", dict(size=2**31)), ("interleave", dict(interleave=2**30)))
  def test_numbers_beyond_int32(self, name, given):
    with self.assertRaisesRegex(ValueError, f"{name} is {given[name]}; "):
      aiter.context_parallel_positions(
          jnp.arange(4), **dict(size=4, rank=0) | given)

  def test_blocks_beyond_int32(self):
    with self.assertRaisesRegex(ValueError, "block_size is 1099511627776; "):
      aiter.moe_align_block_size(jnp.zeros((3, 2), int), 4, 2**40)


class AtHandTest(absltest.TestCase):

  def test_at_hand(self):
    """Values are looked at where that is free."""
    x = np.arange(3)
    self.assertIs(arguments.at_hand(x), x)
    for t in (None, 3, [1, 2]):
      self.assertIsNone(arguments.at_hand(t))
    cpu = jax.device_put(x, jax.local_devices(backend="cpu")[0])
    with jax.transfer_guard("disallow"):
      np.testing.assert_array_equal(arguments.at_hand(cpu), x)
    seen = []
    jax.jit(lambda t: seen.append(arguments.at_hand(t)))(x)
    self.assertEqual(seen, [None])
    if jax.default_backend() != "cpu":
      self.assertIsNone(arguments.at_hand(jnp.asarray(x)))


if __name__ == "__main__":
  absltest.main()
