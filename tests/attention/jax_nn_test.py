# SPDX-License-Identifier: Apache-2.0
"""What JAX's own tests ask of dot_product_attention, asked of ours.

The cases are those of JAX's nn_test, with jax.nn's formula as the reference;
that of a mask over NaN is Tokamax's.
"""

import functools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine

import jax
from jax.experimental import aiter

B, T, S, N, H = 2, 128, 128, 4, 32
NAMES = ("out", "dquery", "dkey", "dvalue", "dbias")
plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")


def normal(seed, *shape, dtype=jnp.bfloat16):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def results(fn, args, dout):
  """out, and the gradients of all args that have one."""
  out, vjp = jax.vjp(fn, *args)
  grads = [g for g, x in zip(vjp(dout), args)
           if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]
  return [out, *grads]


class JaxNnTestCase(parameterized.TestCase):

  def assert_close(self, got, want, tolerance=0.02):
    for name, a, b in zip(NAMES, got, want, strict=False):
      self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype), name)
      a, b = (np.asarray(t, np.float32) for t in (a, b))
      np.testing.assert_allclose(
          a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()),
          err_msg=name)


class HeadsTest(JaxNnTestCase):

  @parameterized.product(
      dtype=["bfloat16", "float16"], group=[1, 2, 4], mapped=[False, True])
  def test_groups(self, dtype, group, mapped):
    """Grouped heads are repeated ones; bias and mask may be given as None."""
    q, dout = (normal(i, B, T, N, H, dtype=dtype) for i in range(2))
    k, v = (normal(i, B, S, N // group, H, dtype=dtype) for i in (2, 3))
    fn = aiter.dot_product_attention
    if mapped:
      fn = jax.vmap(fn, (0, 0, 0, None, None))
    got = results(fn, (q, k, v, None, None), dout)
    whole = lambda t: jnp.repeat(t, group, axis=2)
    out, *grads = results(plain, (q, whole(k), whole(v), None, None), dout)
    grads[1:] = (g.reshape(*k.shape[:3], group, H).astype(jnp.float32).sum(
        3).astype(dtype) for g in grads[1:])
    self.assert_close(got, [out, *grads])

  def test_batch_axes(self):
    """Any number of them, for all arguments that have them."""
    lead = (2, 1, 3)
    q, k, v, dout = (normal(i, *lead, 16, N, 8, dtype=jnp.float32)
                     for i in range(4))
    mask = normal(5, 2, 1, 1, 1, 16, 16) < 0.5
    bias = normal(6, N, 1, 16, dtype=jnp.float32)
    lengths = jnp.array([[[16, 5, 1]], [[9, 16, 2]]], jnp.int32)
    fn = lambda q, k, v, bias, mask, lengths: aiter.dot_product_attention(
        q, k, v, bias, mask, key_value_seq_lengths=lengths,
        return_residual=True)
    whole = jnp.broadcast_to(mask, (*lead, 1, 16, 16))
    flat = lambda t: t.reshape(6, *t.shape[3:])
    (out, residual), vjp = jax.vjp(
        lambda *a: fn(*a, whole, lengths), q, k, v, bias)
    (one, lse), one_vjp = jax.vjp(
        lambda *a: fn(*a, flat(whole), flat(lengths)),
        *(flat(t) for t in (q, k, v)), bias)
    self.assertEqual(out.shape, q.shape)
    self.assertEqual(residual.shape, q.shape[:-1])
    np.testing.assert_array_equal(flat(out), one)
    np.testing.assert_array_equal(flat(residual), lse)
    zero = jnp.zeros_like(residual)
    for got, want in zip(
        vjp((dout, zero)), one_vjp((flat(dout), flat(zero)))):
      np.testing.assert_array_equal(got.reshape(want.shape), want)
    # A batch axis of 1 broadcasts, as any other does.
    np.testing.assert_array_equal(fn(q, k, v, bias, mask, lengths)[0], out)

  def test_batches_must_agree(self):
    q, k = normal(0, 2, 3, 4, N, H), normal(1, 3, 2, 4, N, H)
    with self.assertRaisesRegex(ValueError, r"key's batch is \[3, 2\]"):
      aiter.dot_product_attention(q, k, k)

  def test_implementation(self):
    """None is ours, and so is its name; jax.nn has the others."""
    q = normal(0, 1, 8, N, H)
    for name in (None, "aiter"):
      self.assertEqual(
          aiter.dot_product_attention(q, q, q, implementation=name).shape,
          q.shape)
    for name in ("xla", "cudnn"):
      with self.assertRaisesRegex(ValueError, f"{name}.*None or 'aiter'"):
        aiter.dot_product_attention(q, q, q, implementation=name)


class MaskTest(JaxNnTestCase):

  @parameterized.parameters(
      ("bias",), ("causal",), ("padding",), ("custom",), ("causal", "padding"),
      ("custom", "padding"), ("bias", "causal"), ("causal", "window"))
  def test_modes(self, *modes):
    q, k, v, dout = (normal(i, B, T, N, H) for i in range(4))
    options = dict(is_causal="causal" in modes)
    bias = mask = lengths_q = lengths_k = None
    if "padding" in modes:
      lengths_q = jnp.array([T // 2, T // 4], jnp.int32)
      lengths_k = jnp.array([S // 4, S // 2], jnp.int32)
      # What jax.nn gives rows that see nothing is not ours.
      dout = jnp.where(
          jnp.arange(T)[:, None, None] < lengths_q[:, None, None, None],
          dout, 0)
    if "custom" in modes:
      mask = jnp.tril(jnp.ones((T, S), bool))[None, None]
    if "bias" in modes:
      bias = normal(4, 1, N, T, S)
    if "window" in modes:
      options["local_window_size"] = (3, 2)

    def run(fn):
      def call(q, k, v, bias, mask, lengths_q, lengths_k):
        return fn(q, k, v, bias, mask, query_seq_lengths=lengths_q,
                  key_value_seq_lengths=lengths_k, **options)
      return results(call, (q, k, v, bias, mask, lengths_q, lengths_k), dout)

    self.assert_close(run(aiter.dot_product_attention), run(plain), 0.03)

  @parameterized.product(batch=[1, 16], mapped=[False, True])
  def test_bias_gradient(self, batch, mapped):
    """One array is query, key and value; the mask has a row for all."""
    x = normal(0, batch, T, N, H)
    bias = normal(1, batch, N, T, T)
    mask = jnp.ones((1, 1, T), bool)
    run = lambda fn: jax.jit(lambda x, bias, mask: results(
        jax.vmap(lambda x, bias, mask: fn(x, x, x, bias, mask), (0, 0, None))
        if mapped else lambda x, bias, mask: fn(x, x, x, bias, mask),
        (x, bias, mask), x))(x, bias, mask)
    got, want = run(aiter.dot_product_attention), run(plain)
    self.assert_close(got, want, 0.05)

  @parameterized.parameters(
      dict(), dict(bias=(1, N, 16, 16)), dict(bias=(1, 1, 1, 16)),
      dict(mask=(2, 1, 1, 16)), dict(mask=(16, 16), is_causal=True))
  @machine.where(not machine.SIMULATED)
  def test_debug_infs(self, mask=(2, 1, 16, 16), bias=None, **options):
    """A mask makes no infinities that jax.debug_infs would find."""
    q, k, v = (normal(i, 2, 16, N, 8, dtype=jnp.float32) for i in range(3))
    shown = np.random.default_rng(4).random(mask) < 0.6
    shown[..., 0] = True
    if bias is not None:
      bias = normal(5, *bias, dtype=jnp.float32)

    def loss(q, k, v, bias, mask):
      return aiter.dot_product_attention(
          q, k, v, bias, mask, **options).sum()

    args = q, k, v, bias, jnp.asarray(shown)
    with jax.debug_infs(True), jax.debug_nans(True):
      one = jax.value_and_grad(loss, (0, 1, 2))(*args)
      two = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        a, b, rtol=1e-5, atol=1e-5), one, two)

  def test_padding_with_nans(self):
    """What a mask of padding hides reaches no real row."""
    q, k, v = (normal(i, 2, T, N, H, dtype=jnp.float32) for i in range(3))
    real_q, real_k = (
        jnp.arange(T) < jnp.array(lengths)[:, None]
        for lengths in ((50, 120), (20, 125)))
    mask = (real_q[:, :, None] & real_k[:, None, :])[:, None]
    fill = lambda t, real, value: jnp.where(real[:, :, None, None], t, value)
    got = aiter.dot_product_attention(
        fill(q, real_q, jnp.nan), fill(k, real_k, jnp.nan),
        fill(v, real_k, jnp.finfo(jnp.float32).max), mask=mask)
    want = plain(q, k, v, mask=mask)
    np.testing.assert_allclose(
        fill(got, real_q, 999), fill(want, real_q, 999), rtol=1e-4, atol=1e-4)

  def test_padding_of_keys_with_nans(self):
    """With a row for all queries values and gradients too."""
    q, k, v, dout = (normal(i, 2, T, N, H, dtype=jnp.float32)
                     for i in range(4))
    real = jnp.arange(T) < jnp.array([[20], [125]])
    mask = real[:, None, None]
    fill = lambda t, value: jnp.where(real[:, :, None, None], t, value)
    fn = lambda q, k, v: aiter.dot_product_attention(q, k, v, mask=mask)
    got = results(fn, (q, fill(k, jnp.nan), fill(v, jnp.nan)), dout)
    want = results(functools.partial(plain, mask=mask), (q, k, v), dout)
    self.assert_close(got, want, 1e-4)


if __name__ == "__main__":
  absltest.main()
