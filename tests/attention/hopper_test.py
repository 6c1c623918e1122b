# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel for sm_90 that a row is made for runs on a GPU."""

import contextlib
import functools
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from attention import calls
from attention import numbers_test as mha_test
from harness import machine

import jax
from jax._src.aiter.attention import op, reference, types
from jax._src.aiter.core import dispatch
from jax.experimental import aiter
from jaxlib import gpu_aiter

ARCH = "sm_90"


def one_pass(least=1, together=False):
  """Gradients in one pass over the scores from `least` queries and keys on.

  None of the scores' is kept. `together`: a block has all heads that share its
  keys, however few there are.
  """
  return mock.patch.multiple(
      op, _ONE_PASS_LENGTH=least, _ONE_PASS_BLOCKS=1 << 20,
      _heads_together=lambda _: together, _keeps_dscores=lambda *_: False)


@contextlib.contextmanager
def called(kernel):
  """The calls of a function of op."""
  original, calls_of_it = getattr(op, kernel), []

  def call(*args):
    calls_of_it.append(args)
    return original(*args)

  jax.clear_caches()  # What a test before has had traced is not called again.
  with mock.patch.object(op, kernel, call):
    yield calls_of_it


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
      dtype=["bf16", "fp16"],
      dims=[*calls.ODD_DIMS, (104, 120), (184, 136)], options=[
          dict(hq=4), dict(sq=900, sk=950, causal=True, hq=6, hk=3),
          dict(sq=1100, sk=1100, window=(1030, 3), hq=3, hk=3),
          dict(lengths=((300, 264), (77, 130)), sq=300, hq=4, hk=4),
          dict(packed=True, causal=True, hq=4, hk=2, use_lse=True,
               lengths=((700, 900), (1, 130), (0, 5), (1300, 1067)))])
  def test_odd_columns(self, dtype, dims, options):
    """Whose boxes begin 8 columns before every other head."""
    dqk, dv = dims
    self.check(mha_test.Case(**dict(
        dtype=dtype, b=2, sq=250, sk=264, hq=2, hk=2, dqk=dqk, dv=dv)
        | options))

  @parameterized.product(count=[127, 128, 129, 300], dqk=[64, 128, 184])
  def test_many_packed_sequences(self, count, dqk):
    """More than a block looks at to find its own; some have no rows."""
    lengths = tuple((i * 7 % 5, i * 11 % 6) for i in range(count))
    self.check(mha_test.Case(packed=True, causal=True, dqk=dqk,
                             lengths=(*lengths, (150, 140), (0, 9), (70, 70))))

  @parameterized.product(dim=[8, 24, 40, 56, 72, 88, 104, 120], s=[100, 1000])
  def test_odd_columns_read_no_other_head(self, dim, s):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, s, 5, dim), jnp.bfloat16)
               for key in keys)
    call = jax.jit(functools.partial(aiter.flash_attn_func, causal=True))
    want = call(q, k, v)
    hidden = (jnp.arange(5) % 3 == 0)[:, None]
    got = call(*(jnp.where(hidden, jnp.nan, t) for t in (q, k, v)))
    np.testing.assert_array_equal(got[:, :, 1:3], want[:, :, 1:3])
    np.testing.assert_array_equal(got[:, :, 4:], want[:, :, 4:])
    self.assertTrue(np.isnan(got[:, :, 3].astype(np.float32)).all())

  @parameterized.product(
      dtype=["bf16", "fp16"], dqk=[40, 64, 128, 144, 184, 256], options=[
          dict(), dict(causal=True, hq=6, hk=2, b=3),
          dict(causal=True, sq=264, sk=152, bias="bhqk"),
          dict(sq=2, sk=600, use_lse=True, bias="b1qk"),
          dict(window=(50, 20), sq=300, sk=432, bias="11qk"),
          dict(sq=151, sk=261, causal=True),
          dict(dropout=0.3, causal=True, sq=300)])
  def test_dscores(self, dtype, dqk, options):
    with called("_dscores_kernel") as calls_of_it:
      self.check(mha_test.Case(**dict(
          dtype=dtype, b=2, sq=150, sk=264, hq=2, hk=2, dqk=dqk, bias="1hqk")
          | options))
    # Dropout beside a bias has rows for bfloat16 alone.
    self.assertLen(calls_of_it, "dropout" not in options or dtype == "bf16")

  @parameterized.product(
      dtype=["bf16", "fp16"],
      dims=[(40, 40), (64, 64), (88, 88), (96, 96), (104, 128), (128, 128),
            (144, 144), (192, 128), (184, 184), (256, 256)], options=[
          dict(), dict(causal=True, hq=6, hk=2, b=3, sq=385, sk=449),
          dict(causal=True, sq=400, sk=151),
          dict(causal=True, sq=130, sk=601, use_lse=True),
          dict(window=(50, 20), sq=300, sk=429, hq=4, hk=1),
          dict(cap=3.0, causal=True), dict(cap=20.0, sq=300, hq=4, scale=-0.3),
          dict(dropout=0.3, hq=4, sq=201),
          dict(alibi="bh", constant=("alibi_slopes",), hq=4, sk=429),
          dict(alibi="h", constant=("alibi_slopes",), causal=True,
               use_lse=True),
          dict(mask="b11k", hq=4), dict(mask="1hqk", causal=True, sk=424),
          dict(mask="b1qk", dropout=0.3, sq=300), dict(scale=-0.3)])
  def test_dscores_without_bias(self, dtype, dims, options):
    dqk, dv = dims
    with called("_dscores_kernel") as calls_of_it:
      self.check(mha_test.Case(**dict(
          dtype=dtype, b=2, sq=150, sk=264, hq=2, hk=2, dqk=dqk, dv=dv)
          | options))
    kept = dqk > (128 if "dropout" in options else 80)
    if options.keys() & {"cap", "alibi", "mask"}:
      kept = True  # They take long to compute twice.
    if options.keys() >= {"mask", "dropout"}:
      kept = dtype == "bf16" and dqk <= 128  # What has rows.
    self.assertLen(calls_of_it, kept)

  @parameterized.product(
      dtype=["bf16", "fp16"],
      dims=[(40, 40), (64, 64), (96, 96), (128, 128), (184, 128), (256, 256)],
      options=[
          dict(mask="b11k"), dict(mask="1h1k", causal=True, sq=300, hk=1),
          dict(bias="b11k", sk=261, use_lse=True),
          dict(bias="1h1k", mask="b11k", causal=True, b=3, sq=400, sk=151),
          dict(bias="b11k", bias_fp32=True, window=(50, 20), sq=300),
          dict(mask="b11k", bias="111k", dropout=0.3, sq=201),
          dict(mask="b11k", lengths=((300, 264), (77, 130)), sq=300)])
  def test_one_row(self, dtype, dims, options):
    """A bias and a mask of one row for all have kernels of their own."""
    dqk, dv = dims
    case = mha_test.Case(**dict(
        dtype=dtype, b=2, sq=150, sk=264, hq=4, hk=2, dqk=dqk, dv=dv,
        constant=("bias",) * ("bias" in options)) | options)
    with called("_one_row") as calls_of_it:
      with called("_dscores_kernel") as kept:
        self.check(case)
    self.assertNotEmpty(calls_of_it)
    self.assertLen(kept, "lengths" not in options)
    self.assertTrue(all(args[-1] is True for args in kept))

  @parameterized.product(dim=[40, 64, 128, 192, 256], hk=[1, 4])
  def test_dscores_of_hidden_keys(self, dim, hk):
    with called("_dscores_kernel") as calls_of_it:
      self.check_hidden_keys(dim, hk)
    self.assertLen(calls_of_it, 1)

  @parameterized.product(
      dqk=[24, 64, 72, 128, 184, 256], options=[
          dict(causal=True), dict(sq=300, hq=4, hk=2, dtype="fp16"),
          dict(dropout=0.3), dict(dropout=0.3, causal=True, sq=264, sk=400),
          dict(bias_fp32=True, causal=True, hq=4, hk=2),
          dict(bias_fp32=True, dtype="fp16", bias="b1qk")])
  def test_dscores_of_constant_bias(self, dqk, options):
    with called("_dscores_kernel") as calls_of_it:
      self.check(mha_test.Case(**dict(
          b=2, sq=150, sk=264, hq=2, hk=2, dqk=dqk, bias="1hqk",
          constant=("bias",)) | options))
    # A bias of float32 has rows for narrow heads alone.
    self.assertLen(calls_of_it, dqk <= 128 or "bias_fp32" not in options)

  @parameterized.product(
      bias=["1hqk", "11qk", "b1qk", "1h1k"], options=[
          dict(causal=True), dict(dropout=0.3, hk=2, use_lse=True),
          dict(dqk=184, sq=264)])
  def test_dscores_by_parts(self, bias, options):
    """A bias's gradient of two sequences at a time, if none has too many."""
    with mock.patch.multiple(op, _DSCORES_BYTES=1, _DSCORES_BLOCKS=0):
      with called("_dscores_by_parts") as calls_of_it:
        self.check(mha_test.Case(**dict(
            b=4, sq=150, sk=264, hq=4, hk=4, dqk=64, bias=bias) | options))
    # One head's takes less than any sequence's scores; one row is a mask too.
    self.assertLen(calls_of_it, bias not in ("11qk", "1h1k"))

  def test_gradient_of_bias_of_float32_is_not_kept(self):
    with called("_dscores_kernel") as calls_of_it:
      self.check(mha_test.Case(dqk=64, bias="1hqk", bias_fp32=True))
    self.assertEmpty(calls_of_it)

  @parameterized.product(
      dims=[(96, 96), (144, 144), (192, 128), (256, 248)], options=[
          dict(window=(50, 20, 3), sq=300, sk=429, hk=1),
          dict(alibi="h", causal=True),
          dict(packed=True, causal=True, hk=1,
               lengths=((70, 100), (1, 130), (0, 5), (131, 67), (300, 400))),
          dict(packed=True, gaps=(3, 2), window=(150, 20), min_seqlen_q=66,
               bounded=True,
               lengths=((300, 429), (129, 129), (65, 0), (64, 128)))])
  def test_two_passes(self, dims, options):
    dqk, dv = dims
    with called("_dscores_kernel") as calls_of_it:
      self.check(mha_test.Case(**dict(
          b=2, sq=150, sk=264, hq=2, hk=2, dqk=dqk, dv=dv) | options))
    self.assertEmpty(calls_of_it)

  @parameterized.product(
      dtype=["bf16", "fp16"],
      dims=[(88, 88), (96, 96), (128, 128), (144, 144), (192, 128), (192, 192),
            (256, 248)],
      options=[
          dict(), dict(causal=True, hk=4, gaps=(3, 2), use_lse=True),
          dict(causal=True, cap=3.0), dict(window=(50, 20), hk=1),
          dict(window=(30, -1), scale=-0.3)],
      form=[
          dict(lengths=((150, 264), (77, 130), (0, 5), (131, 0))),
          dict(lengths=((150, 129), (150, 264))),
          dict(packed=True, lengths=(
              (70, 100), (1, 130), (0, 5), (131, 67), (300, 400), (9, 0))),
          dict(packed=True, lengths=((385, 449),)),
          dict(packed=True, lengths=((64, 64), (128, 192)) * 70)])
  def test_dscores_of_lengths(self, dtype, dims, options, form):
    dqk, dv = dims
    options = dict(options)
    if "packed" not in form:
      options.pop("gaps", None)
    with called("_dscores_kernel") as calls_of_it:
      self.check(mha_test.Case(**dict(
          dtype=dtype, b=len(form["lengths"]), sq=150, sk=264, hq=4, hk=2,
          dqk=dqk, dv=dv, bounded=True) | options | form))
    self.assertLen(calls_of_it, 1)

  @parameterized.parameters((128, False), (128, True), (256, True))
  def test_dscores_of_packed_heads_at_a_time(self, dim, causal):
    """The same of all heads and of a kv head at a time."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, g = (jax.random.normal(key, (700, h, dim), jnp.bfloat16)
                  for key, h in zip(keys, (4, 2, 2, 4), strict=True))
    cu = jnp.array([0, 300, 301, 700], jnp.int32)

    def gradients(heads):
      def call(q, k, v):
        return aiter.flash_attn_varlen(q, k, v, cu, cu, 0, 400, causal=causal)
      jax.clear_caches()  # Else all are one trace.
      with mock.patch.object(op, "_dscores_heads", lambda *_: heads):
        return jax.jit(lambda: jax.vjp(call, q, k, v)[1](g))()

    for a, b in zip(gradients(2), gradients(4), strict=True):
      np.testing.assert_array_equal(a, b)

  @parameterized.parameters(96, 128, 192)
  def test_dscores_of_a_longer_sequence(self, dim):
    """dq of a sequence that has more keys than was said is NaN, others' not."""
    t = jnp.ones((700, 2, dim), jnp.bfloat16)
    cu = jnp.array([0, 300, 700], jnp.int32)

    @jax.jit
    def gradients(cu):
      call = lambda t: aiter.flash_attn_varlen(t, t, t, cu, cu, 400, 400)
      return jax.grad(lambda t: call(t).astype(jnp.float32).sum())(t)

    # There is room for a power of two.
    self.assertTrue(np.isfinite(np.asarray(gradients(cu), np.float32)).all())
    dq = np.asarray(gradients(cu.at[1].set(100)), np.float32)
    self.assertTrue(np.isfinite(dq[:100]).all())
    self.assertTrue(np.isnan(dq[100:]).all())

  @parameterized.parameters(
      (0, 0, 0), (1, 0, 0), (256, 0, 0), (300, 0, 512), (399, 0, 512),
      (400, 512, 512), (1 << 40, 1 << 40, 1 << 40))
  def test_bounds(self, bound, at_hand, traced):
    """A bound that lengths at hand exceed, or the mean, is not believed."""
    t = jnp.ones((700, 2, 96), jnp.bfloat16)
    cu = np.array([0, 300, 700], np.int32)
    gradient = jax.grad(lambda t, cu: aiter.flash_attn_varlen(
        t, t, t, cu, cu, bound, bound).astype(jnp.float32).sum())
    for f, want in ((gradient, at_hand), (jax.jit(gradient), traced)):
      with called("_keeps_dscores") as calls_of_it:
        dt = np.asarray(f(t, cu), np.float32)
      (_, bwd, *_), *_ = calls_of_it
      self.assertEqual(bwd.mha.max_seqlen_k, want)
      self.assertTrue(np.isfinite(dt).all())

  @parameterized.product(dim=[88, 128, 192, 256], sk=[264, 317], form=[
      "dense", "padded", "packed"])
  def test_dscores_of_very_low_scores(self, dim, sk, form):
    """What is past the last key has no part, however far above all scores."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (sk, 2, dim), jnp.bfloat16)
               for key in keys)
    q, k = q.at[..., 0].set(64), k.at[..., 0].set(-64)
    cu = jnp.array([0, sk], jnp.int32)

    def attend(q, k, v):
      if form == "packed":
        return aiter.flash_attn_varlen(q, k, v, cu, cu, sk, sk)
      lengths = {} if form == "dense" else dict(
          cu_seqlens_q=cu, cu_seqlens_kv=cu)
      return aiter.flash_attn_func(*(t[None] for t in (q, k, v)), **lengths)[0]

    def gradients(attend, *x):
      return jax.jit(jax.grad(
          lambda x: jnp.sin(attend(*x).astype(jnp.float32)).sum()))(x)

    with called("_dscores_kernel") as calls_of_it:
      got = gradients(attend, q, k, v)
    self.assertLen(calls_of_it, 1)
    def plain(q, k, v):
      return jax.nn.dot_product_attention(*(t[None] for t in (q, k, v)))[0]
    want = gradients(plain, *(jax.device_put(
        np.asarray(t, np.float32), machine.CPUS[0]) for t in (q, k, v)))
    for a, b in zip(got, want, strict=True):
      a, b = (np.asarray(t, np.float32) for t in (a, b))
      self.assertTrue(np.isfinite(a).all())
      a, b = a[..., 1:], b[..., 1:]  # The first column cancels.
      self.assertLess(np.abs(a - b).max(), 0.05 * np.abs(b).max())

  @parameterized.product(
      dims=[(96, 96), (128, 128), (192, 128), (256, 256)], options=[
          dict(causal=True, sq=385, sk=449),
          dict(window=(50, 20), sq=300, sk=429, use_lse=True),
          dict(alibi="bh", constant=("alibi_slopes",)), dict(bias="1hqk"),
          dict(mask="b1qk", causal=True), dict(cap=3.0)],
      parts=[1, 2, 4])
  def test_dscores_of_heads_that_share_keys(self, dims, options, parts):
    """The sums of four heads are one's, two's or four's."""
    dqk, dv = dims
    with mock.patch.object(op, "_dscores_splits", lambda *_: parts):
      with called("_dscores_kernel") as calls_of_it:
        self.check(mha_test.Case(**dict(
            b=2, sq=150, sk=264, hq=8, hk=2, dqk=dqk, dv=dv) | options))
    self.assertLen(calls_of_it, 1)

  @parameterized.product(dim=[160, 256], options=[
      dict(), dict(causal=True), dict(window_size=(70, 30)), dict(bias=True)])
  def test_dscores_at_a_time(self, dim, options):
    """The same of all heads, of two sequences and of a kv head at a time."""
    options = dict(options)
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, g = (jax.random.normal(key, (3, s, h, dim), jnp.bfloat16)
                  for key, s, h in zip(keys, (328, 456, 456, 328),
                                       (4, 2, 2, 4), strict=False))
    if "bias" in options:
      options["bias"] = jax.random.normal(keys[4], (1, 4, 328, 456),
                                          jnp.bfloat16)

    def gradients(heads):
      call = functools.partial(aiter.flash_attn_func, **options)
      jax.clear_caches()  # Else all are one trace.
      with mock.patch.multiple(op, _dscores_heads=lambda *_: heads,
                               _dscores_splits=lambda *_: 1):
        return jax.jit(lambda: jax.vjp(call, q, k, v)[1](g))()

    with called("_dscores_kernel") as calls_of_it:
      whole, *parts = map(gradients, (12, 8, 2))
    self.assertLen(calls_of_it, 3)
    for part in parts:
      for a, b in zip(part, whole, strict=True):
        np.testing.assert_array_equal(a, b)

  @parameterized.parameters(
      (2, 16, 16, 4096, 32),  # 32 MiB a head
      (1, 128, 128, 4096, 32), (1, 40, 40, 4096, 20), (3, 8, 8, 4096, 24),
      (5, 8, 8, 4096, 24), (8, 8, 2, 1023, 64), (1, 32, 2, 8192, 8),
      (1, 16, 2, 8192, 8), (1, 16, 4, 8192, 8), (1, 8, 1, 8192, 8),
      # Blocks of twice the keys.
      (1, 16, 4, 8192, 8, 96), (1, 32, 32, 16384, 2, 96),
      (1, 8, 1, 8192, 8, 96), (1, 16, 16, 32768, 0, 96),
      # Of a wide head dim alone in many parts, most of each zeros.
      (1, 16, 16, 16384, 2, 192, 4095), (1, 16, 16, 16384, 0, 96, 4095),
      (2, 16, 16, 8192, 8, 96, 4095))
  def test_dscores_heads(self, b, hq, hk, s, want, dim=192, window=-1):
    q, k = (jax.ShapeDtypeStruct((b, s, h, dim), jnp.bfloat16)
            for h in (hq, hk))
    bwd = op.BwdConfig(types.Config(1.0, window_left=window), None)
    self.assertEqual(
        op._dscores_heads("cuda", bwd, types.Operands(q, k, k)), want)

  # Enough blocks: 256, under a mask or in parts of the call; else 128, or where
  # keys are few.
  @parameterized.parameters(
      (2, 16, 16, 4096, 1, 1), (2, 16, 4, 4096, 1, 1), (1, 16, 4, 4096, 1, 2),
      (1, 16, 2, 4096, 2, 4), (1, 24, 8, 3000, 1, 3), (4, 32, 8, 512, 1, 1),
      (1, 32, 8, 256, 4, 4), (1, 32, 8, 8192, 2, 2), (1, 32, 8, 16384, 4, 4),
      (1, 16, 4, 4096, 1, 1, 192), (1, 71, 1, 512, 71, 71))
  def test_dscores_splits(self, b, hq, hk, s, full, causal, dim=128):
    q, k = (jax.ShapeDtypeStruct((b, s, h, dim), jnp.bfloat16)
            for h in (hq, hk))
    for right, want in ((-1, full), (0, causal)):
      bwd = op.BwdConfig(types.Config(1.0, window_right=right), None)
      self.assertEqual(
          op._dscores_splits("cuda", bwd, types.Operands(q, k, k)), want)

  @parameterized.parameters(
      (16, 1024, 128, True), (2, 4096, 128, True), (1, 16384, 128, True),
      (1, 32768, 128, False), (2, 4096, 64, False), (2, 4096, 96, True))
  def test_dscores_or_one_pass(self, b, s, dim, kept):
    """A head's gradients of scores fit, or one pass keeps none."""
    t = jax.ShapeDtypeStruct((b, s, 16, dim), jnp.bfloat16)
    x, bwd = types.Operands(t, t, t), op.BwdConfig(types.Config(1.0),
                                                   op.Wanted())
    saved = types.Saved(t, t, None, None, None, None)
    self.assertEqual(op._keeps_dscores("cuda", bwd, x, saved), kept)
    self.assertEqual(op._one_pass("cuda", bwd, x, saved), dim == 128)

  def test_dscores_of_large_soft_cap(self):
    """The instruction tanh.approx is not exact enough for it."""
    with called("_dscores_kernel") as calls_of_it:
      self.check(mha_test.Case(b=1, sq=150, sk=264, dqk=184, cap=2000.0))
    self.assertEmpty(calls_of_it)

  def test_constant_bias_beside_others(self):
    """dq, dk and dv are the same as beside dbias."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, g = (jax.random.normal(key, (2, 200, 2, 192), jnp.bfloat16)
                  for key in keys[:4])
    bias = jax.random.normal(keys[4], (1, 2, 200, 200), jnp.bfloat16)

    def gradients(of_bias):
      def call(q, k, v, bias):
        bias = bias if of_bias else jax.lax.stop_gradient(bias)
        return aiter.flash_attn_func(q, k, v, bias=bias)
      return jax.jit(lambda: jax.vjp(call, q, k, v, bias)[1](g))()

    with called("_dscores_kernel") as calls_of_it:
      alone, beside = gradients(False), gradients(True)
    self.assertLen(calls_of_it, 2)
    for a, b in zip(alone[:3], beside[:3], strict=True):
      np.testing.assert_array_equal(a, b)

  @parameterized.product(
      dtype=["bf16", "fp16"], dqk=[64, 128], options=[
          dict(), dict(causal=True), dict(causal=True, sq=264, sk=150),
          dict(causal=True, sq=400, sk=400, hq=6, hk=2, b=3),
          dict(sq=130, sk=600, hq=4, hk=1, use_lse=True, scale=0.3),
          dict(window=(150, 20), sq=300, sk=429), dict(scale=-0.3),
          dict(lengths=((150, 264), (77, 130)), causal=True, hk=1),
          dict(dropout=0.3, causal=True, sq=400, sk=400, hq=6, hk=2, b=3),
          dict(dropout=0.3, packed=True, hq=4,
               lengths=((70, 100), (1, 130), (0, 5), (131, 67), (300, 400))),
          dict(packed=True, causal=True, hq=4,
               lengths=((70, 100), (1, 130), (0, 5), (131, 67), (300, 400))),
          dict(packed=True, gaps=(3, 2), window=(150, 20), hq=4, hk=1,
               lengths=((300, 429), (129, 129), (65, 0), (64, 128))),
          dict(packed=True, min_seqlen_q=30, hk=1, use_lse=True,
               lengths=((20, 90), (300, 290)))])
  def test_one_pass(self, dtype, dqk, options):
    with one_pass(together=dtype == "bf16"), called(
        "_one_pass_kernel") as calls_of_it:
      self.check(mha_test.Case(**dict(
          dtype=dtype, b=2, sq=150, sk=264, hq=2, hk=2, dqk=dqk) | options))
    # At head dim 64 only where a block goes through several heads, under a
    # mask, or dropout draws once.
    shared = (dtype == "bf16" and options.get("hq", 2) > options.get("hk", 2)
              and ("causal" in options or "window" in options))
    self.assertEqual(bool(calls_of_it),
                     dqk == 128 or "dropout" in options or shared)

  @parameterized.product(
      dtype=["bf16", "fp16"], dqk=[20, 40, 72, 120], options=[
          dict(), dict(causal=True, sq=400, sk=400, hq=6, hk=2, b=3),
          dict(lengths=((150, 264), (77, 130)), causal=True, hk=1),
          dict(packed=True, hq=4,
               lengths=((70, 100), (1, 130), (0, 5), (131, 67), (300, 400)))])
  def test_one_pass_of_fewer_columns(self, dtype, dqk, options):
    with one_pass(together=dtype == "bf16"), called(
        "_one_pass_kernel") as calls_of_it:
      self.check(mha_test.Case(**dict(
          dtype=dtype, b=2, sq=150, sk=264, hq=2, hk=2, dqk=dqk, dropout=0.3)
          | options))
    self.assertNotEmpty(calls_of_it)

  @parameterized.product(dim=[24, 40, 64, 72, 128],
                         size=[(150, 264), (600, 100)])
  def test_dropout_keeps_what_it_says(self, dim, size):
    sq, sk = size
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (2, s, 3, dim), jnp.bfloat16)
               for key, s in zip(keys, (sq, sk, sk), strict=False))
    state = jax.random.bits(keys[3], (2, 3, 6), jnp.uint32).at[..., 5].set(8)
    cfg = types.Config(0.1, dropout_p=0.3, keep_bits=True)
    x = types.Operands(q, k, v, dropout_state=state)
    bits = jax.jit(lambda: op.mha_fwd(cfg, x)[2])()
    # Those of whole tiles, past rows and keys too.
    rows, cols = (-(-s // 128) * 2 for s in size)
    got, want = (
        np.asarray(t).reshape(2, 3, rows, cols, 128)[
            :, :, :-(-sq // 64), :-(-sk // 64)]
        for t in (bits, reference.kept_bits(cfg, x)))
    np.testing.assert_array_equal(got, want)

  @parameterized.product(
      dim=[40, 64, 96, 128], options=[
          dict(), dict(causal=True), dict(window_size=(150, 20))])
  def test_kept_bits_are_those_drawn(self, dim, options):
    q, k, v, g = (jax.random.normal(key, (2, 700, h, dim), jnp.bfloat16)
                  for key, h in zip(jax.random.split(jax.random.key(0), 4),
                                    (4, 2, 2, 4), strict=True))
    lengths = jnp.array([0, 300, 1000], jnp.int32)

    def gradients(keeps):
      call = functools.partial(
          aiter.flash_attn_func, dropout_p=0.2, dropout_key=jax.random.key(1),
          deterministic=True, cu_seqlens_q=lengths, cu_seqlens_kv=lengths,
          **options)
      jax.clear_caches()  # Else both are one trace.
      with mock.patch.object(op, "_keeps_bits", keeps):
        return jax.jit(lambda: jax.vjp(call, q, k, v)[1](g))()

    with one_pass(), called("_one_pass_kernel") as calls_of_it:
      kept = gradients(op._keeps_bits)
      drawn = gradients(lambda *_: False)
    self.assertEqual([saved.bits is not None for *_, saved in calls_of_it],
                     [True, False])
    for a, b in zip(kept, drawn, strict=True):
      np.testing.assert_array_equal(a, b)

  @parameterized.parameters("one_pass", "dscores")
  def test_reads_no_other_rows(self, kernels):
    """Whatever lies between and after sequences, and past padded lengths."""
    lengths = jnp.array([0, 100, 300], jnp.int32)
    apart = jnp.array([0, 150, 400], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    packed = [jax.random.normal(key, (400, 2, 128), jnp.bfloat16)
              for key in keys]
    row = np.arange(400)
    live = ((row < 100) | ((row >= 150) & (row < 350)))[:, None, None]
    padded = [jnp.pad(t[:350], [(0, 50), (0, 0), (0, 0)]).reshape(
        2, 200, 2, 128) for t in packed]
    live_padded = np.array([np.arange(200) < 100, np.arange(200) < 200])[
        :, :, None, None]
    for function, arrays, kept, options in (
        (aiter.flash_attn_varlen, packed, (row < 300)[:, None, None],
         dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_k=200)),
        (aiter.flash_attn_varlen, packed, live,
         dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, causal=True,
              max_seqlen_k=200, cu_seqlens_q_padded=apart,
              cu_seqlens_k_padded=apart)),
        (aiter.flash_attn_func, padded, live_padded,
         dict(cu_seqlens_q=lengths, cu_seqlens_kv=lengths))):
      call = functools.partial(function, deterministic=True, **options)
      def gradients(fill, arrays=arrays, kept=kept, call=call):
        q, k, v, g = (jnp.where(kept, t, fill) for t in arrays)
        return jax.jit(lambda: jax.vjp(call, q, k, v)[1](g))()
      with contextlib.ExitStack() as stack:
        if kernels == "one_pass":
          stack.enter_context(one_pass())
        calls_of_it = stack.enter_context(called(f"_{kernels}_kernel"))
        for a, b in zip(gradients(jnp.nan), gradients(0), strict=True):
          np.testing.assert_array_equal(a, b)
          np.testing.assert_array_equal(np.where(kept, 0, a), 0)
        self.assertNotEmpty(calls_of_it)

  @parameterized.parameters(
      (False, 4, False, False), (True, 4, False, False), (True, 2, False, True),
      (False, 1, False, False), (True, 1, False, True), (True, 1, True, False),
      (False, 2, True, True))
  def test_order(self, causal, hk, packed, together):
    """The same bits each time; without an order, nearly the same."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (4096,) if packed else (2, 2048)
    q, k, v, g = (jax.random.normal(key, (*shape, h, 128), jnp.bfloat16)
                  for key, h in zip(keys, (4, hk, hk, 4), strict=True))
    cu = (jnp.array([0, 100, 2600, 2600, 4096], jnp.int32),) * 2

    def gradients(deterministic):
      options = dict(causal=causal, deterministic=deterministic)
      def call(q, k, v):
        if packed:
          return aiter.flash_attn_varlen(q, k, v, *cu, **options)
        return aiter.flash_attn_func(q, k, v, **options)
      return jax.jit(lambda: jax.vjp(call, q, k, v)[1](g))

    with one_pass(1 << 20):
      two_passes = gradients(True)()
    with one_pass(together=together):
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

  def test_no_row_of_dscores_is_left_out(self):
    """By test_dscores and those of calls without a bias's gradient."""
    module = gpu_aiter.load("cuda")
    rows = {kernel["symbol"] for kernel in module.table()
            if kernel["op"].startswith("mha_dscores")}
    self.assertNotEmpty(rows)
    equal = [(dim, dim) for dim in (40, 64, 96, 128, 144, 184, 256)]
    for dims in (*equal, (192, 128)):
      for dtype in calls.DTYPES:
        for features in ((), ("soft_cap",), ("alibi",), ("dropout",),
                         ("bias",), ("bias", "dropout"), ("bias", "bias_f32"),
                         ("mask",), ("mask", "dropout"), ("packed",),
                         ("packed", "soft_cap")):
          with contextlib.suppress(ValueError):
            rows -= set(module.kernels("mha_dscores", ARCH, dtype, dims,
                                       list(features)))
    self.assertEmpty(rows)


if __name__ == "__main__":
  if ARCH in dispatch.architectures("cuda"):
    absltest.main()
