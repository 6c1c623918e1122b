# SPDX-License-Identifier: Apache-2.0
"""flax_attention_fn in Flax's layers, against Flax's own attention function.

Needs Flax; the functions do not.
"""

import functools
import importlib.util

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine

import jax
from jax.experimental import aiter

if importlib.util.find_spec("flax"):
  from flax import linen, nnx
else:
  linen = nnx = None

B, T, S, N, H, FEATURES = 2, 12, 9, 4, 8, 32


def normal(seed, *shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def linen_layer(fn, **options):
  return linen.MultiHeadDotProductAttention(
      num_heads=N, qkv_features=FEATURES, attention_fn=fn, **options)


def nnx_layer(fn, **options):
  return nnx.MultiHeadAttention(
      num_heads=N, in_features=FEATURES, qkv_features=FEATURES, decode=False,
      attention_fn=fn, rngs=nnx.Rngs(0), **options)


class ArgumentsTest(parameterized.TestCase):
  """What needs no Flax."""

  def attend(self, **options):
    q, k, v = (normal(i, B, n, N, H) for i, n in enumerate((T, S, S)))
    return aiter.flax_attention_fn(q, k, v, **options)

  @parameterized.named_parameters(
      ("no_key", dict(dropout_rate=0.1), "dropout_rng is None"),
      ("rate", dict(dropout_rate=1.0), "dropout_rate is 1.0"),
      ("sow", dict(module=object()), "module is a object"),
      ("dot_general", dict(einsum_dot_general=jnp.dot), "einsum_dot_general"),
      ("einsum", dict(qk_attn_weights_einsum=jnp.einsum), "qk_attn_weights"),
      ("einsum_2", dict(attn_weights_value_einsum=jnp.einsum),
       "attn_weights_value"),
      ("mask", dict(mask=jnp.ones((T, S + 1))), "mask"))
  def test_refused(self, options, message):
    """Nothing is lost in silence."""
    with self.assertRaisesRegex(ValueError, f"flax_attention_fn: .*{message}"):
      self.attend(**options)

  def test_dropout(self):
    """Broadcast, one mask for all batches and heads; else each its own."""
    ones = functools.partial(
        aiter.flax_attention_fn, jnp.zeros((B, T, N, S)),
        jnp.zeros((B, S, N, S)), jnp.broadcast_to(
            jnp.eye(S)[:, None], (B, S, N, S)),  # The result is p itself.
        dropout_rng=jax.random.key(0), dropout_rate=0.4)
    shared, own = ones(), ones(broadcast_dropout=False)
    for p in (shared, own):
      kept = p > 0
      np.testing.assert_allclose(p[kept], 1 / S / 0.6, rtol=1e-5)
      self.assertBetween(kept.mean(), 0.5, 0.7)
    np.testing.assert_array_equal(
        shared, jnp.broadcast_to(shared[:1, :, :1], shared.shape))
    self.assertFalse((own == own[:1]).all())
    self.assertFalse((own == own[:, :, :1]).all())
    np.testing.assert_allclose(ones(deterministic=True), 1 / S, rtol=1e-5)
    other = ones(dropout_rng=jax.random.key(1))
    self.assertFalse((other == shared).all())

  def test_dropout_has_a_gradient(self):
    """By the dropped probabilities."""
    q, k, v = (normal(i, B, n, N, H) for i, n in enumerate((T, S, S)))
    fn = lambda v: aiter.flax_attention_fn(
        q, k, v, dropout_rng=jax.random.key(0), dropout_rate=0.5)
    dout = normal(3, B, T, N, H)
    dv, = jax.vjp(fn, v)[1](dout)
    # The function is linear in v.
    np.testing.assert_allclose(
        jnp.vdot(dv, v), jnp.vdot(dout, fn(v)), rtol=1e-4)

  def test_dtype(self):
    """dtype is of the computation, and of the result."""
    self.assertEqual(self.attend(dtype=jnp.bfloat16).dtype, jnp.bfloat16)
    self.assertEqual(self.attend().dtype, jnp.float32)
    q = normal(0, B, T, N, H, dtype=jnp.bfloat16)
    k = normal(1, B, S, N, H)
    self.assertEqual(aiter.flax_attention_fn(q, k, k).dtype, jnp.float32)

  def test_precision(self):
    """It is that of all products, backward too."""
    def grad(q, **options):
      return jax.grad(lambda q: aiter.flax_attention_fn(
          q, q, q, **options).sum())(q)
    q = normal(0, B, T, N, H)
    for precision in ("highest", jax.lax.Precision.HIGHEST):
      program = str(jax.make_jaxpr(functools.partial(
          grad, precision=precision))(q))
      self.assertEqual(program.count("dot_general["),
                       program.count("Precision.HIGHEST, Precision.HIGHEST"))


@machine.where(linen is not None)
class LayerTest(parameterized.TestCase):
  """Layers with our function and with Flax's, of the same parameters."""

  def compare(self, run, tolerance=1e-4):
    with jax.default_matmul_precision("highest"):
      got, want = run(aiter.flax_attention_fn), run(None)
    # The gradient of a key's bias is exactly 0: in 16 bits it is noise of the
    # others' size.
    size = max(1, *(jnp.abs(b).max() for b in jax.tree.leaves(want)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
      a, b = (np.asarray(t, np.float64) for t in (a, b))
      np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * size)

  def masks(self, kind):
    tokens = jnp.arange(T) < jnp.array([[T], [7]])
    others = jnp.arange(S) < jnp.array([[5], [S]])
    # The rows of a padded query see nothing, which ours calls 0.
    return {
        "none": None,
        "float": linen.make_attention_mask(jnp.ones((B, T)), others),
        "bool": linen.make_attention_mask(
            jnp.ones((B, T), bool), others, dtype=bool),
        "keys": others[:, None, None],
        "causal": linen.combine_masks(
            linen.make_causal_mask(jnp.ones((B, T))),
            linen.make_attention_mask(jnp.ones((B, T)), tokens)),
    }[kind]

  @parameterized.product(
      kind=["none", "float", "bool", "keys", "causal"],
      dtype=[None, "bfloat16"])
  def test_linen(self, kind, dtype):
    x = normal(0, B, T, FEATURES)
    other = x if kind == "causal" else normal(1, B, S, FEATURES)
    mask = self.masks(kind)

    def run(fn):
      layer = linen_layer(fn or linen.dot_product_attention, dtype=dtype)
      params = linen_layer(linen.dot_product_attention).init(
          jax.random.key(0), x, other)
      loss = lambda params, x: jnp.sum(jnp.cos(
          layer.apply(params, x, other, mask=mask).astype(jnp.float32)))
      return jax.value_and_grad(loss, (0, 1))(params, x)

    self.compare(run, 0.05 if dtype else 1e-4)

  @parameterized.product(
      kind=["none", "float", "keys", "is_causal"], dtype=[None, "bfloat16"])
  def test_nnx(self, kind, dtype):
    x = normal(0, B, T, FEATURES)
    other = x if kind == "is_causal" else normal(1, B, S, FEATURES)
    options = (dict(is_causal=True) if kind == "is_causal"
               else dict(mask=self.masks(kind)))

    def run(fn):
      layer = nnx_layer(fn or nnx.dot_product_attention, dtype=dtype)
      loss = lambda layer, x: jnp.sum(jnp.cos(
          layer(x, other, **options).astype(jnp.float32)))
      value, grads = nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)
      return value, jax.tree.leaves(grads)

    self.compare(run, 0.05 if dtype else 1e-4)

  @parameterized.parameters(True, False)
  def test_bias(self, boolean):
    """Both functions themselves: bias, with a mask, without a batch axis."""
    q, k, v = (normal(i, n, N, H) for i, n in enumerate((T, S, S)))
    bias, mask = normal(3, N, T, S), normal(4, T, S) > -0.5
    mask = mask.at[:, 0].set(True)
    mask = mask if boolean else mask.astype(jnp.float32)

    def run(fn):
      fn = fn or linen.dot_product_attention
      out, vjp = jax.vjp(lambda *a: fn(*a, mask=mask), q, k, v, bias)
      return out, vjp(jnp.cos(out))

    self.compare(run)

  @parameterized.parameters("linen", "nnx")
  def test_decode(self, library):
    """Token by token with the cache is the causal layer at once."""
    x = normal(0, B, 6, FEATURES)

    def linen_tokens(fn):
      layer = linen_layer(fn, decode=True)
      variables = layer.init(jax.random.key(0), x)
      params, cache = variables["params"], variables["cache"]
      for i in range(x.shape[1]):
        out, new = layer.apply(
            {"params": params, "cache": cache}, x[:, i:i + 1],
            mutable=["cache"])
        cache = new["cache"]
        yield out

    def nnx_tokens(fn):
      layer = nnx_layer(fn)
      layer.init_cache(x.shape)
      for i in range(x.shape[1]):
        yield layer(x[:, i:i + 1], decode=True)

    tokens, own = {
        "linen": (linen_tokens, linen and linen.dot_product_attention),
        "nnx": (nnx_tokens, nnx and nnx.dot_product_attention)}[library]
    self.compare(lambda fn: list(tokens(fn or own)))

  @parameterized.product(library=["linen", "nnx"], broadcast=[True, False])
  def test_dropout(self, library, broadcast):
    """On where the layer says so, off where it is deterministic."""
    x = normal(0, 16, 16, FEATURES)
    options = dict(dropout_rate=0.5, broadcast_dropout=broadcast)

    def linen_run(fn):
      layer = linen_layer(fn, **options)
      params = layer.init(jax.random.key(0), x, deterministic=True)
      return lambda seed, **kwargs: layer.apply(
          params, x, rngs={"dropout": jax.random.key(seed)}, **kwargs)

    def nnx_run(fn):
      layer = nnx_layer(fn, **options)
      return lambda seed, **kwargs: layer(x, rngs=nnx.Rngs(seed), **kwargs)

    run = {"linen": linen_run, "nnx": nnx_run}[library]
    ours, theirs = run(aiter.flax_attention_fn), run(
        {"linen": linen, "nnx": nnx}[library].dot_product_attention)
    exact = ours(0, deterministic=True)
    np.testing.assert_allclose(
        exact, theirs(0, deterministic=True), rtol=1e-3, atol=1e-4)
    one, again, two = (ours(i, deterministic=False) for i in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    self.assertGreater(np.abs(one - two).mean(), 0.01)
    # As much noise as Flax's.
    noise = [np.mean([np.square(f(i, deterministic=False) - exact).mean()
                      for i in range(10)]) for f in (ours, theirs)]
    self.assertBetween(noise[0] / noise[1], 0.7, 1.4)

  def test_no_weights_are_sown(self):
    x = normal(0, B, T, FEATURES)
    layer = linen_layer(aiter.flax_attention_fn)
    params = layer.init(jax.random.key(0), x)
    with self.assertRaisesRegex(ValueError, "no weights to sow"):
      layer.apply(params, x, sow_weights=True, mutable=["intermediates"])


if __name__ == "__main__":
  absltest.main()
