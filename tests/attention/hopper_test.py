# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel for sm_90 that a row is made for runs on a GPU."""

import functools
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from attention import calls
from attention import numbers_test as mha_test

import jax
from jax._src.aiter.attention import op
from jax._src.aiter.core import dispatch
from jax.experimental import aiter

ARCH = "sm_90"


def one_pass(least=1):
  """Gradients in one pass over the scores from `least` queries and keys on."""
  return mock.patch.object(op, "_ONE_PASS_LENGTH", least)


class HopperTest(mha_test.MhaTestCase):

  @parameterized.parameters(
      (call, *size) for call in calls.CALLS for size in calls.sizes(call))
  def test_call(self, call, dims, dtype):
    dqk, dv = dims
    options, _ = calls.CALLS[call]
    with mock.patch.object(op, "_keeps_dscores", lambda *_: False):
      self.check(mha_test.Case(
          **dict(dtype=dtype, b=2, sq=150, sk=264, hq=2, hk=1, dqk=dqk, dv=dv)
          | options))

  @parameterized.product(
      dtype=["bf16", "fp16"], dqk=[40, 64, 128], options=[
          dict(), dict(causal=True, hq=6, hk=2, b=3),
          dict(causal=True, sq=264, sk=152, bias="bhqk"),
          dict(sq=2, sk=600, use_lse=True, bias="b1qk"),
          dict(window=(50, 20), sq=300, sk=432, bias="11qk"),
          dict(dropout=0.3, causal=True, sq=300)])
  def test_dscores(self, dtype, dqk, options):
    called = []
    kernel = op._dscores_kernel
    with mock.patch.object(op, "_dscores_kernel", lambda *args: (
        called.append(args), kernel(*args))[1]):
      self.check(mha_test.Case(**dict(
          dtype=dtype, b=2, sq=150, sk=264, hq=2, hk=2, dqk=dqk, bias="1hqk")
          | options))
    # float16 has no row for dropout beside a bias.
    self.assertLen(called, dtype == "bf16" or "dropout" not in options)

  @parameterized.product(
      dtype=["bf16", "fp16"], options=[
          dict(), dict(causal=True), dict(causal=True, sq=264, sk=150),
          dict(causal=True, sq=400, sk=400, hq=6, hk=2, b=3),
          dict(sq=130, sk=600, hq=4, hk=1, use_lse=True, scale=0.3),
          dict(window=(150, 20), sq=300, sk=429)])
  def test_one_pass(self, dtype, options):
    with one_pass():
      self.check(mha_test.Case(**dict(
          dtype=dtype, b=2, sq=150, sk=264, hq=2, hk=2, dqk=128) | options))

  @parameterized.product(causal=[False, True], hk=[1, 2, 4])
  def test_order(self, causal, hk):
    """The same bits each time; without an order, nearly the same."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(key, (2, 2048, h, 128), jnp.bfloat16)
                  for key, h in zip(keys, (4, hk, hk, 4), strict=True))

    def gradients(deterministic):
      call = functools.partial(
          aiter.flash_attn_func, causal=causal, deterministic=deterministic)
      return jax.jit(lambda: jax.vjp(call, q, k, v)[1](g))

    with one_pass(1 << 20):
      two_passes = gradients(True)()
    with one_pass():
      ordered = gradients(True)
      first = ordered()
      for _ in range(5):
        for a, b in zip(first, ordered(), strict=True):
          np.testing.assert_array_equal(a, b)
      unordered = gradients(False)()
    for got in (first, unordered):
      for a, b in zip(got, two_passes, strict=True):
        a, b = (np.asarray(t, np.float32) for t in (a, b))
        self.assertLess(np.abs(a - b).max(), 0.02 * np.abs(b).max())

  def test_no_row_is_left_out(self):
    rows = calls.rows("cuda", ARCH, ("padded",))
    self.assertNotEmpty(rows)
    for *_, symbols in calls.cover("cuda", ARCH):
      rows -= set(symbols)
    self.assertEmpty(rows)


if __name__ == "__main__":
  if ARCH in dispatch.architectures("cuda"):
    absltest.main()
