# SPDX-License-Identifier: Apache-2.0
"""JAX's transformations of the attention functions; eight host devices."""

import concurrent.futures
import functools
import re

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import sharding, transforms
from harness.machine import CPUS
from harness.transforms import loop_over, results_of, weighted
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter

# The kernels take 16-bit types; on a CPU float32 shows differences sharper.
DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
TOLERANCE = 1e-5 if DTYPE == jnp.float32 else 2e-2


def normal(seed, *shape, dtype=DTYPE):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(*lead, sq=16, sk=24, hq=4, hk=2, d=8):
  return (normal(1, *lead, sq, hq, d), normal(2, *lead, sk, hk, d),
          normal(3, *lead, sk, hk, d))


class TransformTestCase(parameterized.TestCase):

  def assert_close(self, got, want, tolerance=TOLERANCE):
    got, want = jax.device_get((got, want))
    self.assertEqual(jax.tree.structure(got), jax.tree.structure(want))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      self.assertEqual(a.shape, b.shape)
      self.assertEqual(a.dtype, b.dtype)
      np.testing.assert_allclose(
          np.asarray(a, np.float64), np.asarray(b, np.float64),
          rtol=tolerance, atol=tolerance * max(1, np.abs(
              np.where(np.isfinite(b), b, 0)).max(initial=0)))


class JitTest(TransformTestCase):

  def test_jit_is_eager(self):
    fn = functools.partial(aiter.flash_attn_func, causal=True, return_lse=True)
    args = qkv(2)
    run = results_of(fn, (0, 1, 2))
    self.assert_close(jax.jit(run)(*args), run(*args))

  def test_lengths_are_traced(self):
    """New lengths compile nothing."""
    q, k, v = qkv()
    traces = 0

    @jax.jit
    def f(q, k, v, cu_q, cu_k):
      nonlocal traces
      traces += 1
      return jax.grad(lambda q: weighted(
          aiter.flash_attn_varlen(q, k, v, cu_q, cu_k, causal=True)))(q)

    for cut in (3, 7):
      cu_q, cu_k = jnp.array([0, cut, 16]), jnp.array([0, 24 - cut, 24])
      want = jnp.concatenate([
          jax.grad(lambda q: weighted(aiter.flash_attn_func(
              q[None], k[None, a], v[None, a], causal=True)))(q[b])
          for b, a in ((slice(0, cut), slice(0, 24 - cut)),)])
      got = f(q, k, v, cu_q, cu_k)[:cut]
      self.assert_close(got, want)
    self.assertEqual(traces, 1)

  def test_gradient_of_lengths_and_keys_is_empty(self):
    """Integer operands are ordinary arguments of a differentiated function."""
    q, k, v = qkv(2)
    cu = jnp.array([0, 10, 26])
    _, vjp = jax.vjp(
        lambda q, cu, key: aiter.flash_attn_func(
            q, k, v, cu_seqlens_q=cu, dropout_p=0.1, dropout_key=key),
        q, cu, jax.random.key(0))
    dq, dcu, dkey = vjp(jnp.ones_like(q))
    self.assertEqual(dq.shape, q.shape)
    self.assertEqual(dcu.dtype, jax.dtypes.float0)
    self.assertEqual(dkey.dtype, jax.dtypes.float0)

  def test_legacy_keys(self):
    q, k, v = qkv(1)
    f = functools.partial(aiter.flash_attn_func, q, k, v, dropout_p=0.4)
    np.testing.assert_array_equal(
        f(dropout_key=jax.random.PRNGKey(3)), f(dropout_key=jax.random.key(3)))

  def test_lse_gradient(self):
    """lse alone can be differentiated; so can out alone."""
    q, k, v = qkv(1, hk=4)
    def lse(q, k):
      return aiter.flash_attn_func(q, k, v, return_lse=True)[1]
    def plain(q, k):
      s = jnp.einsum("bqhd,bkhd->bhqk", q, k,
                     preferred_element_type=jnp.float32) * 8**-0.5
      return jax.nn.logsumexp(s, axis=-1)
    run = lambda f: jax.grad(lambda *a: weighted(f(*a)), (0, 1))(q, k)
    self.assert_close(run(lse), run(plain), 10 * TOLERANCE)

  @parameterized.parameters(
      dict(), dict(policy=jax.checkpoint_policies.nothing_saveable),
      dict(policy=jax.checkpoint_policies.save_only_these_names("context")))
  def test_checkpoint(self, **options):
    args = qkv(2)
    fn = functools.partial(aiter.flash_attn_func, causal=True)
    got = results_of(jax.checkpoint(fn, **options), (0, 1, 2))(*args)
    self.assert_close(got, results_of(fn, (0, 1, 2))(*args))

  def test_checkpoint_name_saves_the_forward_pass(self):
    """A policy that saves "context" runs the forward operator once."""
    args = qkv(1)
    def forwards(policy):  # by what only they have: exp(s - max), or the call
      f = jax.checkpoint(aiter.flash_attn_func, policy=policy)
      text = jax.jit(jax.grad(lambda *a: weighted(f(*a)**2), (0, 1, 2))).lower(
          *args).as_text()
      return len(re.findall(r"\bstablehlo.exponential\b|aiter_mha_fwd", text))
    policies = jax.checkpoint_policies
    self.assertLess(
        forwards(policies.save_only_these_names("context")),
        forwards(policies.nothing_saveable))

  def test_scan(self):
    q, k, v = qkv(1, sq=24, hk=4)
    def body(x, _):
      return aiter.flash_attn_func(x, k, v, causal=True), None
    got = jax.grad(lambda q: weighted(jax.lax.scan(body, q, length=3)[0]))(q)
    f = lambda x: body(x, None)[0]
    want = jax.grad(lambda q: weighted(f(f(f(q)))))(q)
    self.assert_close(got, want)

  def test_only_wanted_gradients_are_computed(self):
    """A constant bias costs no [sq, sk] gradient."""
    q, k, v = qkv(1)
    bias = normal(5, 4, 16, 24, dtype=jnp.float32)
    def of_bias_shape(argnums):
      loss = lambda q, bias: weighted(aiter.flash_attn_func(q, k, v, bias=bias))
      program = str(jax.make_jaxpr(jax.grad(loss, argnums))(q, bias))
      return program.count("f32[1,4,16,24]")
    self.assertLess(of_bias_shape(0), of_bias_shape((0, 1)))

  @parameterized.parameters(*transforms.EXPORTED)
  def test_export(self, platform):
    """Exports for every platform; on this machine's the result also runs."""
    args = tuple(t.astype(jnp.bfloat16) for t in qkv(1))
    fn = results_of(
        functools.partial(aiter.flash_attn_func, causal=True), (0, 1, 2))
    transforms.check_export(self, fn, args, ("mha_fwd", "mha_bwd"), platform)

  def test_threads(self):
    """Eight threads trace, compile and run at once."""
    args = qkv(2)
    run = results_of(functools.partial(
        aiter.flash_attn_func, causal=True, logits_soft_cap=9.0), (0, 1, 2))
    want = run(*args)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      for got in pool.map(lambda _: jax.jit(lambda *a: run(*a))(*args),
                          range(8)):
        self.assert_close(got, want)


class VmapTest(TransformTestCase):

  @parameterized.parameters(
      ((0, 0, 0),), ((0, None, None),), ((None, 0, None),), ((1, 0, 2),),
      ((None, None, -1),))
  def test_dense(self, in_axes):
    args = tuple(
        t if axis is None else jnp.stack([t, 2 * t, -t], axis=axis)
        for t, axis in zip(qkv(2), in_axes))
    fn = results_of(functools.partial(
        aiter.flash_attn_func, causal=True, return_lse=True), (0, 1, 2))
    self.assert_close(jax.vmap(fn, in_axes)(*args),
                      loop_over(fn, in_axes, 3)(*args))

  @parameterized.product(
      shape=[(16, 24), (4, 16, 24), (2, 1, 16, 24), (2, 4, 16, 24)],
      mapped=[(0, None), (None, 0), (0, 0)])
  def test_bias(self, shape, mapped):
    q, k, v = qkv(2)
    bias = normal(7, *shape, dtype=jnp.float32)
    args = [t if axis is None else jnp.stack([t, -t])
            for t, axis in zip((q, bias), mapped)]
    fn = results_of(
        lambda q, bias: aiter.flash_attn_func(q, k, v, bias=bias), (0, 1))
    self.assert_close(jax.vmap(fn, mapped)(*args),
                      loop_over(fn, mapped, 2)(*args))

  @parameterized.product(
      shape=[(16, 24), (2, 1, 1, 24), (4, 16, 1)],
      mapped=[(0, None), (None, 0), (0, 0)])
  def test_mask(self, shape, mapped):
    """A mask, and a bias of its shape."""
    q, k, v = qkv(2)
    mask = normal(7, *shape, dtype=jnp.float32) < 0.5
    bias = normal(8, *shape, dtype=jnp.float32)
    args = [t if axis is None else jnp.stack([t, o]) for t, o, axis in zip(
        (q, mask), (-q, ~mask), mapped)]
    fn = lambda q, mask: results_of(lambda q, bias: aiter.flash_attn_func(
        q, k, v, bias=bias, mask=mask), (0, 1))(q, bias)
    self.assert_close(jax.vmap(fn, mapped)(*args),
                      loop_over(fn, mapped, 2)(*args))

  @parameterized.parameters(0, 1, 2, 3)
  def test_per_head_and_lengths(self, which):
    """sink, slopes and lengths, mapped or not."""
    q, k, v = qkv(2)
    operands = dict(
        sink=normal(4, 4, dtype=jnp.float32),
        alibi_slopes=jnp.abs(normal(5, 2, 4, dtype=jnp.float32)),
        cu_seqlens_kv=jnp.array([0, 9, 30]))
    mapped = tuple(operands)[which:which + 1]  # none of them for 3
    in_axes = (0, {n: 0 if n in mapped else None for n in operands})
    stacked = {n: jnp.stack([t, t / 2]) if n in mapped else t
               for n, t in operands.items()}
    if "cu_seqlens_kv" in mapped:
      stacked["cu_seqlens_kv"] = jnp.array([[0, 9, 30], [0, 24, 25]])
    qs = jnp.stack([q, -q])

    def fn(q, operands):
      floats = {n: t for n, t in operands.items() if n[0] != "c"}
      lengths = {n: t for n, t in operands.items() if n[0] == "c"}
      return results_of(lambda q, k, floats: aiter.flash_attn_func(
          q, k, v, **floats, **lengths), (0, 1, 2))(q, k, floats)

    got = jax.vmap(fn, in_axes)(qs, stacked)
    wants = [fn(qs[i], {n: t[i] if n in mapped else t
                        for n, t in stacked.items()}) for i in range(2)]
    self.assert_close(got, jax.tree.map(lambda *t: jnp.stack(t), *wants))

  @parameterized.parameters(
      ((0, 0, 0, None, None),), ((0, None, None, None, None),),
      ((None, 0, 0, 0, None),), ((0, 0, 0, 0, 0),))
  def test_packed(self, in_axes):
    q, k, v = qkv()
    cu_q, cu_k = jnp.array([0, 5, 5, 14]), jnp.array([0, 8, 12, 21])
    others = (-q, 2 * k, v + 1, jnp.array([0, 9, 12, 16]),
              jnp.array([0, 3, 20, 24]))
    args = tuple(t if axis is None else jnp.stack([t, o]) for t, o, axis in zip(
        (q, k, v, cu_q, cu_k), others, in_axes))

    def fn(q, k, v, cu_q, cu_k):
      return results_of(lambda q, k, v, slopes: aiter.flash_attn_varlen(
          q, k, v, cu_q, cu_k, causal=True, return_lse=True,
          alibi_slopes=slopes), (0, 1, 2, 3))(q, k, v, jnp.arange(1., 5.) / 8)

    got = jax.vmap(fn, in_axes)(*args)
    want = loop_over(fn, in_axes, 2)(*args)
    finite = lambda t: jax.tree.map(
        lambda x: jnp.where(jnp.isneginf(x), -1e4, x), t)
    self.assert_close(finite(got), finite(want))

  def test_packed_with_gaps(self):
    q, k, v = (jnp.stack([t, -t]) for t in qkv())
    def fn(q, k, v):
      return results_of(lambda q, k, v: aiter.flash_attn_varlen(
          q, k, v, jnp.array([0, 5, 12]), jnp.array([0, 8, 20]),
          cu_seqlens_q_padded=jnp.array([0, 7, 16]),
          cu_seqlens_k_padded=jnp.array([0, 10, 24])), (0, 1, 2))(q, k, v)
    self.assert_close(jax.vmap(fn)(q, k, v),
                      loop_over(fn, (0,) * 3, 2)(q, k, v))

  def test_nested(self):
    q, k, v = (jnp.stack([jnp.stack([t, -t]), jnp.stack([2 * t, t + 1]),
                          jnp.stack([t, t])]) for t in qkv(1))
    fn = results_of(
        functools.partial(aiter.flash_attn_func, causal=True), (0, 1, 2))
    got = jax.vmap(jax.vmap(fn, (0, None, 0)), (0, 0, 1), out_axes=0)(
        q, k[:, 0], jnp.swapaxes(v, 0, 1))
    wants = [jax.tree.map(lambda *t: jnp.stack(t), *(
        fn(q[i, j], k[i, 0], v[i, j]) for j in range(2))) for i in range(3)]
    self.assert_close(got, jax.tree.map(lambda *t: jnp.stack(t), *wants))

  def test_grad_of_vmap(self):
    """Gradients of shared operands are summed over the mapped axis."""
    q, k, v = qkv(1)
    qs = jnp.stack([q, -q, 2 * q])
    f = lambda q, k: aiter.flash_attn_func(q, k, v, causal=True)
    got = jax.grad(lambda k: weighted(jax.vmap(f, (0, None))(qs, k)))(k)
    want = jax.grad(lambda k: weighted(jnp.stack([f(q, k) for q in qs])))(k)
    self.assert_close(got, want)

  def test_one_key_is_one_mask(self):
    """With a shared key every element sees what an unmapped call sees."""
    q, k, v = qkv(2)
    f = lambda q, key: aiter.flash_attn_func(
        q, k, v, dropout_p=0.4, dropout_key=key, return_attn_probs=True)
    key = jax.random.key(5)
    got = jax.vmap(f, (0, None))(jnp.stack([q, q]), key)
    want = f(q, key)
    for i in range(2):
      self.assert_close(jax.tree.map(lambda t: t[i], got), want)

  def test_own_keys_are_own_masks(self):
    q, k, v = qkv(2)
    f = lambda key: aiter.flash_attn_func(
        q, k, v, dropout_p=0.4, dropout_key=key, return_attn_probs=True)
    keys = jax.random.split(jax.random.key(5), 3)
    got = jax.vmap(f)(keys)
    self.assert_close(got, loop_over(f, (0,), 3)(keys))
    self.assertFalse((got[1][0] == got[1][1]).all())

  def test_dot_product_attention(self):
    q, k, v = (jnp.stack([t, -t]) for t in qkv(2))
    fn = results_of(functools.partial(
        aiter.dot_product_attention, is_causal=True), (0, 1, 2))
    self.assert_close(jax.vmap(fn)(q, k, v),
                      loop_over(fn, (0,) * 3, 2)(q, k, v))


HEADS = P("x", None, "y")


@sharding.on_hosts
class ShardingTest(TransformTestCase):
  """The same numbers on eight devices, and no more communication than due."""

  def setUp(self):
    super().setUp()
    self.mesh = sharding.mesh()

  def compare(self, fn, args, specs, argnums, mesh=None):
    """Checks sharded against unsharded; returns the collectives used."""
    run = results_of(fn, argnums)
    args = jax.device_put(args, CPUS[0])
    want = jax.jit(run)(*args)
    sharded = [jax.device_put(a, NamedSharding(mesh or self.mesh, s))
               for a, s in zip(args, specs)]
    compiled = jax.jit(run).lower(*sharded).compile()
    self.assert_close(compiled(*sharded), want, 1e-5)
    return sharding.collectives(compiled)

  @parameterized.named_parameters(
      ("batch", 4, 4, P("x"), P("x"), set()),
      ("heads", 4, 4, P(None, None, "y"), P(None, None, "y"), set()),
      ("batch_and_heads", 4, 4, HEADS, HEADS, set()),
      ("two_axes_on_batch", 4, 4, P(("x", "y")), P(("x", "y")), set()),
      ("two_axes_on_heads", 8, 8, P(None, None, ("x", "y")),
       P(None, None, ("x", "y")), set()),
      ("grouped", 8, 4, HEADS, HEADS, set()),
      ("multi_query", 4, 1, HEADS, P("x"), {"all-reduce"}),
      ("group_over_axis", 8, 2, HEADS, P("x"), {"all-reduce"}),
      ("heads_do_not_divide", 6, 3, P(None, None, "x"), P(), {"all-gather"}),
      ("sequence", 4, 4, P(None, "x"), P(None, "x"),
       {"all-gather", "collective-permute", "reduce-scatter"}),
      ("head_dim", 4, 4, P(None, None, None, "x"), P(None, None, None, "x"),
       {"all-gather"}),
      ("q_alone", 4, 4, HEADS, P(), set()))
  def test_qkv(self, hq, hk, q_spec, kv_spec, expected):
    b = 8 if q_spec == P(("x", "y")) else 4
    fn = functools.partial(aiter.flash_attn_func, causal=True, return_lse=True)
    args = tuple(t.astype(jnp.float32) for t in qkv(b, hq=hq, hk=hk))
    got = self.compare(fn, args, (q_spec, kv_spec, kv_spec), (0, 1, 2))
    self.assertLessEqual(got, expected)
    if "all-reduce" in expected:
      self.assertIn("all-reduce", got)

  @parameterized.named_parameters(
      ("two_axes", P(None, ("x", "y")), P(), dict(causal=True)),
      ("heads_too", P(None, "x", "y"), P(None, "x", "y"),
       dict(causal=True, window_size=(9, 0))),
      ("one_key_head", P(None, "x", "y"), P("x"), dict(causal=True)),
      ("not_causal", P(None, "y"), P(None, "y"), dict(causal=False)),
      ("odd", P(None, "y"), P(None, "y"), dict(sq=12)),
      ("dropout", P(None, "y"), P(None, "y"), dict(dropout_p=0.3)),
      ("dropout_of_keys", P(None, "y"), P(), dict(
          causal=False, dropout_p=0.3, bias=(4, 1, 1, 24))),
      ("bias", P(None, "y"), P(), dict(bias=(1, 4, 16, 24))),
      ("bias_of_keys", P(None, "y"), P(), dict(bias=(4, 1, 1, 24))))
  def test_rows(self, q_spec, kv_spec, options):
    """Divided queries stay where they are, and so do their results."""
    options = dict(causal=True, dropout_key=jax.random.key(1)) | options
    sq, bias = options.pop("sq", 16), options.pop("bias", None)
    hk = 1 if kv_spec == P("x") else 4
    q, k, v = (t.astype(jnp.float32) for t in qkv(4, sq=sq, hk=hk))
    args = [q, k, v, normal(4, 4, dtype=jnp.float32)]
    if bias:
      args.append(normal(8, *bias, dtype=jnp.float32))
    fn = lambda q, k, v, sink, bias=None: aiter.flash_attn_func(
        q, k, v, sink=sink, bias=bias, return_lse=True, **options)
    specs = [q_spec, kv_spec, kv_spec, P(), P()][:len(args)]
    self.compare(fn, args, specs, tuple(range(len(args))))
    there = [jax.device_put(t, NamedSharding(self.mesh, spec))
             for t, spec in zip(args, specs)]
    out, lse = jax.jit(fn)(*there)
    self.assertEqual(out.sharding.spec[1], q_spec[1])
    self.assertEqual(lse.sharding.spec[2], q_spec[1])

  @parameterized.named_parameters(
      ("full", (4, 4, 16, 24), P("x", "y"), set()),
      ("heads", (4, 16, 24), P("y"), {"all-reduce"}),
      ("shared", (16, 24), P(), {"all-reduce"}))
  def test_bias(self, shape, spec, expected):
    """A bias that broadcasts over a sharded axis sums its gradient over it."""
    q, k, v = (t.astype(jnp.float32) for t in qkv(4, hk=4))
    bias = normal(8, *shape, dtype=jnp.float32)
    fn = lambda q, k, v, bias: aiter.flash_attn_func(q, k, v, bias=bias)
    got = self.compare(fn, (q, k, v, bias), (HEADS, HEADS, HEADS, spec),
                       (0, 1, 2, 3))
    self.assertLessEqual(got, expected)

  @parameterized.named_parameters(
      ("keys", (4, 1, 1, 24), P("x"), (1, 4, 16, 1), P(None, "y")),
      ("rows", (4, 1, 16, 1), P("x"), (1, 1, 1, 24), P()),
      ("all", (4, 4, 16, 24), P("x", "y"), (4, 1, 1, 1), P("x")))
  def test_mask(self, shape, spec, bias_shape, bias_spec):
    """Dimensions of size 1 stay whole; nothing is gathered."""
    q, k, v = (t.astype(jnp.float32) for t in qkv(4, hk=4))
    mask = normal(8, *shape) < 0.5
    bias = normal(9, *bias_shape, dtype=jnp.float32)
    fn = lambda q, k, v, bias, mask: aiter.flash_attn_func(
        q, k, v, bias=bias, mask=mask)
    got = self.compare(
        fn, (q, k, v, bias, mask), (HEADS, HEADS, HEADS, bias_spec, spec),
        (0, 1, 2, 3))
    self.assertLessEqual(got, {"all-reduce"})

  def test_everything_else(self):
    """Slopes, sinks, lengths and dropout follow the batch and the heads."""
    q, k, v = (t.astype(jnp.float32) for t in qkv(4, hq=8, hk=4))
    sink = normal(4, 8, dtype=jnp.float32)
    slopes = jnp.abs(normal(5, 4, 8, dtype=jnp.float32))
    cu = jnp.array([0, 5, 6, 20, 36])

    def fn(q, k, v, sink, slopes, cu, key):
      return aiter.flash_attn_func(
          q, k, v, sink=sink, alibi_slopes=slopes, cu_seqlens_q=cu,
          cu_seqlens_kv=cu, causal=True, dropout_p=0.3, dropout_key=key)

    got = self.compare(
        fn, (q, k, v, sink, slopes, cu, jax.random.key(3)),
        (HEADS, HEADS, HEADS, P(), P("x", "y"), P(), P()), (0, 1, 2, 3, 4))
    self.assertNotIn("all-gather", got)

  def test_dropout_mask_is_unchanged(self):
    q, k, v = (t.astype(jnp.float32) for t in qkv(4))
    f = jax.jit(lambda q, k, v, key: aiter.flash_attn_func(
        q, k, v, dropout_p=0.5, dropout_key=key, return_attn_probs=True))
    key = jax.random.key(1)
    want = f(*jax.device_put((q, k, v, key), CPUS[0]))
    put = lambda t, s: jax.device_put(t, NamedSharding(self.mesh, s))
    got = f(put(q, HEADS), put(k, P("x")), put(v, P("x")), put(key, P()))
    np.testing.assert_array_equal(got[1], want[1])
    self.assert_close(got, want, 1e-5)

  @parameterized.parameters((4, 4, P(None, "y")), (8, 2, P()), (4, 1, P()))
  def test_packed(self, hq, hk, kv_spec):
    """A packed call shards by heads."""
    q, k, v = (t.astype(jnp.float32) for t in qkv(hq=hq, hk=hk))
    cu_q, cu_k = jnp.array([0, 5, 16]), jnp.array([0, 8, 24])
    fn = lambda q, k, v, cu_q, cu_k, slopes: aiter.flash_attn_varlen(
        q, k, v, cu_q, cu_k, causal=True, return_lse=True, alibi_slopes=slopes)
    got = self.compare(
        fn, (q, k, v, cu_q, cu_k, jnp.arange(1., 1. + hq) / 9),
        (P(None, "y"), kv_spec, kv_spec, P(), P(), P()), (0, 1, 2, 5))
    self.assertNotIn("all-to-all", got)

  @parameterized.named_parameters(
      ("causal", dict(causal=True), P("x")),
      ("keys_whole", dict(causal=True, logits_soft_cap=2.0), P()),
      ("full", dict(), P("x", "y")),
      ("window", dict(causal=True, window_size=(9, 0)), P("x", "y")),
      ("dropout", dict(causal=True, dropout_p=0.3), P("y")),
      ("padded", dict(causal=True, padded=True), P("y")),
      ("window_to_the_right", dict(window_size=(9, 3)), P("x"), False))
  def test_packed_rows(self, options, spec, stay=True):
    """Divided rows stay, wherever a border between shards cuts a sequence."""
    q, k, v = (t.astype(jnp.float32) for t in qkv(hk=4))
    options = dict(dropout_key=jax.random.key(1)) | options
    if options.pop("padded", False):
      options |= dict(cu_seqlens_q_padded=jnp.array([0, 6, 6, 9, 16]),
                      cu_seqlens_k_padded=jnp.array([0, 3, 7, 20, 24]))
      cu_q, cu_k = jnp.array([0, 5, 5, 7, 13]), jnp.array([0, 1, 4, 15, 17])
    else:
      cu_q, cu_k = jnp.array([0, 5, 5, 6, 16]), jnp.array([0, 2, 10, 11, 24])
    fn = lambda q, k, v, sink: aiter.flash_attn_varlen(
        q, k, v, cu_q, cu_k, sink=sink, return_lse=True, **options)
    args = q, k, v, normal(4, 4, dtype=jnp.float32)
    specs = spec or P("x"), spec, spec, P()
    self.compare(fn, args, specs, (0, 1, 2, 3))
    out, lse = jax.jit(fn)(*(
        jax.device_put(t, NamedSharding(self.mesh, s))
        for t, s in zip(args, specs)))
    if stay:
      self.assertEqual(out.sharding.spec[0], specs[0][0])
      self.assertEqual(lse.sharding.spec[1], specs[0][0])

  @parameterized.parameters(False, True)
  def test_explicit_axes(self, set_mesh):
    """Shardings in types, jax.make_mesh's default."""
    explicit = jax.make_mesh(
        (2, 4), ("x", "y"), (jax.sharding.AxisType.Explicit,) * 2, devices=CPUS)
    q, k, v = (t.astype(jnp.float32) for t in qkv(4, hk=1))
    fn = functools.partial(aiter.flash_attn_func, causal=True, return_lse=True)
    run = results_of(fn, (0, 1, 2))
    want = jax.jit(run)(*jax.device_put((q, k, v), CPUS[0]))
    put = lambda t, s: jax.device_put(t, NamedSharding(explicit, s))
    args = put(q, P("x", None, "y", None)), put(k, P("x")), put(v, P("x"))
    if set_mesh:
      with jax.set_mesh(explicit):
        got = jax.jit(run)(*args)
    else:
      got = jax.jit(run)(*args)
    self.assertEqual(got[0][0].sharding.spec[2], "y")
    self.assert_close(got, want, 1e-5)

  @parameterized.parameters(False, True)
  def test_shard_map(self, check_vma):
    """By hand: batch over x, heads over y, a key head shared by all shards."""
    q, k, v = (t.astype(jnp.float32) for t in qkv(4, hk=1))
    bias = normal(6, 16, 24, dtype=jnp.float32)

    def fn(q, k, v, bias):
      return aiter.flash_attn_func(q, k, v, bias=bias, causal=True)

    mapped = jax.shard_map(
        fn, mesh=self.mesh, in_specs=(HEADS, P("x"), P("x"), P()),
        out_specs=HEADS, check_vma=check_vma)
    args = jax.device_put((q, k, v, bias), CPUS[0])
    run = lambda f, args: jax.jit(results_of(f, (0, 1, 2, 3)))(*args)
    # The mapped function's arrays follow its mesh, also where JAX has a GPU.
    there = jax.device_put(args, NamedSharding(self.mesh, P()))
    self.assert_close(run(mapped, there), run(fn, args), 1e-5)

  def test_shard_map_over_some_axes(self):
    """The others are automatic inside, and gathered."""
    q, k, v = (t.astype(jnp.float32) for t in qkv(4, hk=4))
    fn = functools.partial(aiter.flash_attn_func, causal=True)
    mapped = jax.shard_map(fn, mesh=self.mesh, in_specs=(P("x"),) * 3,
                           out_specs=P("x"), axis_names={"x"})
    args = jax.device_put((q, k, v), CPUS[0])
    run = lambda f, args: jax.jit(results_of(f, (0, 1, 2)))(*args)
    there = jax.device_put(args, NamedSharding(self.mesh, HEADS))
    self.assert_close(run(mapped, there), run(fn, args), 1e-5)

  def test_shard_map_blocks(self):
    """Loops of the blockwise reference carry varying types."""
    q, k, v = (t.astype(jnp.float32) for t in qkv(2, sq=1100, sk=1100, hq=1,
                                                  hk=1))
    fn = functools.partial(aiter.flash_attn_func, causal=True)
    mapped = jax.shard_map(fn, mesh=self.mesh, in_specs=(P("x"),) * 3,
                           out_specs=P("x"))
    args = jax.device_put((q, k, v), CPUS[0])
    run = lambda f, args: jax.jit(results_of(f, (0, 1, 2)))(*args)
    # The mapped function's arrays follow its mesh, also where JAX has a GPU.
    there = jax.device_put(args, NamedSharding(self.mesh, P()))
    self.assert_close(run(mapped, there), run(fn, args), 1e-5)

  def test_vmap_of_sharded(self):
    q, k, v = (jnp.stack([t, -t]).astype(jnp.float32) for t in qkv(4, hk=4))
    fn = jax.vmap(functools.partial(aiter.flash_attn_func, causal=True))
    spec = P(None, "x", None, "y")
    self.compare(fn, (q, k, v), (spec,) * 3, (0, 1, 2))

  def test_remat_of_sharded(self):
    args = tuple(t.astype(jnp.float32) for t in qkv(4, hk=4))
    fn = jax.checkpoint(functools.partial(aiter.flash_attn_func, causal=True))
    self.assertEqual(self.compare(fn, args, (HEADS,) * 3, (0, 1, 2)), set())


if __name__ == "__main__":
  absltest.main()
