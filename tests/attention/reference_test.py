# SPDX-License-Identifier: Apache-2.0
"""The reference: memory, Philox, agreement with jax.nn, choice of kernels."""

import itertools
import os
import re
import subprocess
import sys
import warnings
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from attention import oracle
from harness import machine

import jax
from jax._src.aiter.attention import op as mha_op
from jax._src.aiter.attention import reference, types
from jax._src.aiter.core import dispatch, operator, philox
from jax.experimental import aiter


def normal(seed, *shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


class MemoryTest(parameterized.TestCase):

  def temporary_bytes(self, s, packed, backward, **options):
    """Scratch of a compiled call of s tokens; nothing runs."""
    lead = (s,) if packed else (1, s)
    q, k, v = (jax.ShapeDtypeStruct((*lead, 2, 32), jnp.float32),) * 3
    cu = jax.ShapeDtypeStruct((4,), jnp.int32)

    def fn(q, k, v, cu):
      if packed:
        return aiter.flash_attn_varlen(q, k, v, cu, cu, **options)
      return aiter.flash_attn_func(q, k, v, **options)

    if backward:
      run = jax.grad(lambda *a: jnp.sum(fn(*a) ** 2), (0, 1, 2))
    else:
      run = fn
    with jax.default_device(jax.devices("cpu")[0]):
      compiled = jax.jit(run).lower(q, k, v, cu).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  @parameterized.product(
      packed=[False, True], backward=[False, True],
      options=[dict(causal=True), dict(window_size=(1000, 10), sink=True)])
  def test_linear_at_32k(self, packed, backward, options):
    """32k tokens need about twice the scratch of 16k, far from 4 times."""
    if "sink" in options:
      options = dict(options, sink=jnp.zeros(2))
    half, full = (self.temporary_bytes(s, packed, backward, **options)
                  for s in (2**14, 2**15))
    self.assertLess(full, 2.2 * half)
    # A [s, s] matrix of one head alone is 4 GiB.
    self.assertLess(full, 2**28)

  @machine.where(not machine.GPU)  # The reference is what runs on CPUs.
  def test_runs_at_32k(self):
    """One head of 32k tokens with a window, forward and backward."""
    q, k, v = (normal(i, 1, 2**15, 1, 8) for i in range(3))
    f = jax.jit(jax.value_and_grad(lambda q: jnp.sum(aiter.flash_attn_func(
        q, k, v, causal=True, window_size=(100, 0)) ** 2)))
    value, dq = f(q)
    # The last rows alone, as a small problem.
    n = 256
    want = jax.grad(lambda q: jnp.sum(aiter.flash_attn_func(
        q, k[:, -n:], v[:, -n:], causal=True, window_size=(100, 0))
                                      [:, 128:] ** 2))(q[:, -n:])
    self.assertTrue(np.isfinite(value))
    np.testing.assert_allclose(dq[:, -128:], want[:, -128:], atol=1e-5)


class ForwardModeTest(parameterized.TestCase):

  @parameterized.product(
      s=[32, 130, 600], causal=[False, True],
      options=[("alibi_slopes",), ("bias",), ("alibi_slopes", "bias", "sink")])
  def test_is_the_transpose_of_backward(self, s, causal, options):
    """In compiled programs, whose parts may round scores differently."""
    shapes = dict(dict.fromkeys("qkv", (1, s, 1, 8)), bias=(s, s))
    args, along = ({name: normal(seed + i, *shapes.get(name, (1,)))
                    for i, name in enumerate((*"qkv", *options))}
                   for seed in (0, 20))

    def loss(args):
      out, lse = aiter.flash_attn_func(**args, causal=causal, return_lse=True)
      return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    _, got = jax.jit(lambda *t: jax.jvp(loss, *t))((args,), (along,))
    terms = [np.float64(g) * along[name]
             for name, g in jax.jit(jax.grad(loss))(args).items()]
    self.assertAlmostEqual(
        got, sum(t.sum() for t in terms),
        delta=1e-4 * sum(np.abs(t).sum() for t in terms))


class SpeedTest(parameterized.TestCase):

  @parameterized.parameters(
      (jnp.float32, 64, False), (jnp.float32, 512, True),
      (jnp.bfloat16, 64, True))
  def test_what_is_computed_again(self, dtype, s, again):
    """Short sequences that no kernel serves keep their probabilities."""
    q = jax.ShapeDtypeStruct((2, s, 2, 16), dtype)
    program = jax.jit(jax.grad(lambda q: jnp.sum(aiter.flash_attn_func(
        q, q, q, causal=True).astype(jnp.float32)))).trace(q).lower(
            lowering_platforms=("cpu",)).as_text()
    exponentials = re.findall(
        rf"stablehlo.exponential .*{s}x{s}xf32", program)
    self.assertEqual(len(exponentials), 2 if again else 1)


class PhiloxTest(parameterized.TestCase):

  # Random123's known answers for philox4x32-10: counter, key, result.
  @parameterized.parameters(
      ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
      ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2,
       [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
      ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
       [0xA4093822, 0x299F31D0],
       [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]))
  def test_known_answers(self, counter, key, result):
    words = philox.philox4x32(tuple(jnp.uint32(k) for k in key),
                              tuple(jnp.uint32(c) for c in counter))
    self.assertEqual([int(w) for w in words], result)
    self.assertEqual([int(w) for w in oracle.philox4x32(key, counter)], result)

  @parameterized.parameters(0.0, 0.17, 0.5, 0.999)
  def test_mask(self, p):
    """Both ways of making a mask are the oracle's; a part is the whole's."""
    p = float(np.float32(p))
    key, batch, head, origin = (0xDEADBEEF, 17), 3, 5, (11, 8)
    state = jnp.array([*key, batch, head, *origin], jnp.uint32)
    rows, cols = jnp.arange(19)[:, None], jnp.arange(24)
    whole = oracle.keep_mask(key, batch, head, 30, 32, p)
    want = oracle.keep_mask(key, batch, head, 19, 24, p, origin)
    np.testing.assert_array_equal(want, whole[11:, 8:])
    np.testing.assert_array_equal(
        philox.keep_mask(state, rows, cols, p, cols_are_a_run=True), want)
    np.testing.assert_array_equal(philox.keep_mask(state, rows, cols, p), want)
    shuffled = np.random.default_rng(0).permutation(24)
    np.testing.assert_array_equal(
        philox.keep_mask(state, rows, cols[shuffled], p), want[:, shuffled])

  def test_rate(self):
    mask = oracle.keep_mask((1, 2), 0, 0, 512, 512, 0.3)
    self.assertAlmostEqual(mask.mean(), 0.7, delta=0.005)


class JaxNnTest(parameterized.TestCase):
  """dot_product_attention is jax.nn's."""

  def check(self, args, seen=None, **options):
    """Compares outputs and gradients where `seen`, [b, t, 1, 1], is true."""
    def run(fn, **more):
      def loss(args):
        out = fn(*args, **options, **more)
        out, residual = out if options.get("return_residual") else (out, None)
        if seen is not None:
          out = jnp.where(seen, out, 0)
          if residual is not None:
            residual = jnp.where(seen[..., 0], residual, 0)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32))
        return jnp.sum(out * weights.reshape(out.shape)), (out, residual)
      grads, outs = jax.grad(loss, has_aux=True)(args)
      return outs, grads
    with jax.default_matmul_precision("highest"):
      got = run(aiter.dot_product_attention)
      want = run(jax.nn.dot_product_attention, implementation="xla")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

  def qkv(self, sq=13, sk=17, hq=4, hk=2, lead=(2,)):
    return (normal(1, *lead, sq, hq, 8), normal(2, *lead, sk, hk, 8),
            normal(3, *lead, sk, hk, 8))

  @parameterized.product(
      is_causal=[False, True], local_window_size=[None, 3, (4, 0), (0, 2)],
      lengths=[(13, 17), (17, 13), (9, 9)])
  def test_masks(self, is_causal, local_window_size, lengths):
    """Masks start at the top left corner."""
    sq, sk = lengths
    left, right = (local_window_size if isinstance(local_window_size, tuple)
                   else (local_window_size,) * 2)
    i, j = np.arange(sq)[:, None], np.arange(sk)
    see = np.ones((sq, sk), bool)
    if is_causal:
      see &= j <= i
    if left is not None:
      see &= (j >= i - left) & (j <= i + right)
    self.check(self.qkv(sq, sk), see.any(1)[None, :, None, None],
               is_causal=is_causal, local_window_size=local_window_size)

  @parameterized.parameters(
      ((2, 4, 13, 17),), ((2, 1, 13, 17),), ((1, 4, 1, 17),), ((1, 1, 13, 1),))
  def test_bias_and_mask(self, shape):
    bias = normal(4, *shape)
    mask = np.random.default_rng(5).random(shape) < 0.7
    mask[..., :1] = True
    self.check((*self.qkv(), bias))
    self.check(self.qkv(), mask=jnp.asarray(mask))
    self.check((*self.qkv(), bias), mask=jnp.asarray(mask), is_causal=True)

  @parameterized.parameters(
      (True, True), (True, False), (False, True), (True, True, True),
      (True, False, True), (False, True, True))
  def test_lengths(self, with_q, with_kv, in_blocks=False):
    options = {}
    if in_blocks:
      jax.clear_caches()  # Of calls that were traced in one.
      self.addCleanup(jax.clear_caches)
      self.enter_context(mock.patch.multiple(
          reference, _ONE_BLOCK=4, _BLOCK_Q=4, _BLOCK_K=8))
    if with_q:
      options["query_seq_lengths"] = jnp.array([13, 5], jnp.int32)
    if with_kv:
      options["key_value_seq_lengths"] = jnp.array([4, 17], jnp.int32)
    q_lengths = options.get("query_seq_lengths", jnp.array([13, 13]))
    seen = jnp.arange(13)[None] < q_lengths[:, None]
    for causal in (False, True):
      self.check(self.qkv(), seen[..., None, None], is_causal=causal, **options)

  @parameterized.parameters(4, 3)
  def test_rank_scale_residual(self, rank):
    lead = (2,) if rank == 4 else ()
    self.check(self.qkv(lead=lead), scale=0.3, return_residual=True)

  def test_a_row_that_sees_nothing(self):
    """The stated difference: 0, not the mean of the values."""
    q, k, v = self.qkv()
    out, residual = aiter.dot_product_attention(
        q, k, v, mask=jnp.zeros((1, 1, 13, 17), bool), return_residual=True)
    self.assertTrue((out == 0).all())
    self.assertTrue(jnp.isneginf(residual).all())


class ChoiceTest(parameterized.TestCase):
  """When the reference runs, and when one is told."""

  def setUp(self):
    super().setUp()
    for cache in (mha_op.mha_fwd.unserved, dispatch._warn_once):
      cache.cache_clear()
      self.addCleanup(cache.cache_clear)
    jax.clear_caches()
    self.addCleanup(jax.clear_caches)

  def staged(self, dtype, archs, module, **options):
    """Targets that a call stages on a machine with such devices; warnings."""
    architectures = lambda platform: archs if platform == "rocm" else ()
    with (mock.patch.object(dispatch, "architectures", architectures),
          mock.patch.object(dispatch, "platforms_enabled",
                            lambda: ("rocm", "cuda")),
          mock.patch.object(dispatch.gpu_aiter, "load",
                            lambda platform: module),
          warnings.catch_warnings(record=True) as caught):
      warnings.simplefilter("always")
      q = jax.ShapeDtypeStruct((1, 8, 2, 16), dtype)
      for _ in range(2):
        program = str(jax.make_jaxpr(lambda q: aiter.flash_attn_func(
            q, q, q, **options))(q))
        jax.clear_caches()
    names = [n for n in ("hip_aiter_mha_fwd", "cu_aiter_mha_fwd")
             if n in program]
    return names, [str(w.message) for w in caught
                   if "jax.experimental.aiter" in str(w.message)]

  def test_kernels_for_other_machines(self):
    """Without a GPU both platforms are staged, for export, in silence."""
    names, told = self.staged(jnp.bfloat16, (), None)
    self.assertEqual(names, ["hip_aiter_mha_fwd", "cu_aiter_mha_fwd"])
    self.assertEmpty(told)

  def test_float64_has_no_kernel(self):
    with jax.enable_x64(True):
      names, told = self.staged(jnp.float64, ("gfx942",), mock.Mock())
    self.assertEmpty(names)
    self.assertLen(told, 1)
    self.assertIn("float64", told[0])

  @parameterized.parameters(((), []), (("gfx942",), ["hip_aiter_mha_fwd"]))
  def test_float32_is_not_staged_unseen(self, archs, targets):
    """Not every architecture has its kernels."""
    names, told = self.staged(jnp.float32, archs, mock.Mock())
    self.assertEqual(names, targets)
    self.assertEmpty(told)

  @parameterized.parameters(
      (None, None, False), ("tensorfloat32", None, False),
      ("float32", None, True), ("TF32_TF32_F32_X3", None, True),
      ("highest", "high", False), (None, jax.lax.Precision.HIGHEST, True),
      (None, ("default", "highest"), True))
  def test_precision_of_float32(self, context, argument, exact):
    """JAX's precision is read where the call is traced, for both passes."""
    def both(q):
      with jax.default_matmul_precision(context):
        out, vjp = jax.vjp(lambda q: aiter.flax_attention_fn(
            q, q, q, precision=argument), q)
      return vjp(out)

    with (mock.patch.object(dispatch, "architectures", lambda _: ("gfx942",)),
          mock.patch.object(dispatch.gpu_aiter, "load", lambda _: None),
          warnings.catch_warnings(), operator.asked() as keys):
      warnings.simplefilter("ignore")
      jax.eval_shape(both, jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32))
    self.assertEqual({key.op for key in keys}, {"mha_fwd", "mha_bwd"})
    for key in keys:
      self.assertEqual("exact" in key.features, exact, key)

  def test_no_plugin_module(self):
    names, told = self.staged(jnp.bfloat16, ("gfx942",), None)
    self.assertEqual(names, ["cu_aiter_mha_fwd"])
    self.assertLen(told, 1)
    self.assertIn("jax_aiter[rocm7]", told[0])

  def test_architecture_without_kernels(self):
    module = mock.Mock()
    module.kernels.side_effect = ValueError("no kernel for gfx803")
    names, told = self.staged(jnp.float16, ("gfx803",), module)
    self.assertEqual(names, ["cu_aiter_mha_fwd"])
    self.assertLen(told, 1)
    self.assertIn("gfx803", told[0])

  def test_architecture_with_kernels(self):
    module = mock.Mock()
    names, told = self.staged(
        jnp.float16, ("gfx942",), module, causal=True, logits_soft_cap=2.0)
    self.assertEqual(names, ["hip_aiter_mha_fwd", "cu_aiter_mha_fwd"])
    self.assertEmpty(told)
    module.kernels.assert_called_with(
        "mha_fwd", "gfx942", "fp16", [16, 16], ("soft_cap", "window"))

  def test_head_dims_are_padded_only_when_needed(self):
    """59 becomes 64 on its way to the kernel, 40 stays."""
    for dim, padded in ((59, 64), (40, 40), (1, 8), (256, 256)):
      q = jax.ShapeDtypeStruct((1, 8, 2, dim), jnp.bfloat16)
      program = jax.make_jaxpr(lambda q: aiter.flash_attn_func(q, q, q))(q)
      calls = [e for e in equations(program.jaxpr)
               if e.primitive.name == "ffi_call"]
      self.assertNotEmpty(calls)
      for call in calls:
        self.assertEqual(call.invars[0].aval.shape, (1, 8, 2, padded))
      self.assertEqual(program.out_avals[0].shape, (1, 8, 2, dim))
      pads = [e for e in equations(program.jaxpr) if e.primitive.name == "pad"]
      self.assertEqual(bool(pads), dim != padded)

  def test_bias_and_mask_are_not_broadcast(self):
    """Kernels get them as they are: a mask as bools, beside a bias or not."""
    q = jax.ShapeDtypeStruct((2, 8, 3, 16), jnp.bfloat16)
    for mask, bias in (((2, 1, 1, 8), (3, 8, 8)), ((8, 1), (1, 3, 1, 8))):
      program = jax.make_jaxpr(lambda q, mask, bias: jax.vjp(
          lambda q, bias: aiter.flash_attn_func(
              q, q, q, mask=mask, bias=bias), q, bias)[1](q))(
                  q, jax.ShapeDtypeStruct(mask, jnp.bool_),
                  jax.ShapeDtypeStruct(bias, jnp.float32))
      calls = [e for e in equations(program.jaxpr)
               if e.primitive.name == "ffi_call"]
      self.assertLen(calls, 4)  # Forward and backward, on two platforms.
      whole = lambda shape: (1,) * (4 - len(shape)) + shape
      for call in calls:
        for var, shape, dtype in zip(
            call.invars[7:9], (bias, mask), (jnp.float32, jnp.bool_)):
          self.assertEqual(var.aval.shape, whole(shape))
          self.assertEqual(var.aval.dtype, dtype)

  def test_nothing_for_gpus_is_imported_on_a_cpu(self):
    """With JAX_PLATFORMS=cpu no _aiter is loaded, whatever is installed."""
    code = """
import sys
from jax.experimental import aiter
import jax.numpy as jnp
x = jnp.ones((1, 8, 1, 8), jnp.bfloat16)
aiter.flash_attn_func(x, x, x).block_until_ready()
bad = [m for m in sys.modules if m.endswith('._aiter')]
assert not bad, bad
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True,
                   env={**os.environ, "JAX_PLATFORMS": "cpu",
                        "PYTHONPATH": os.pathsep.join(sys.path)})

  def test_targets_are_registered_once(self):
    """However many threads ask, the module is imported one time."""
    from jaxlib import gpu_aiter  # pylint: disable=g-import-not-at-top
    module = mock.Mock()
    module.types.return_value = {}
    module.registrations.return_value = {}
    with (mock.patch.dict(gpu_aiter._modules, clear=True),
          mock.patch.object(gpu_aiter, "import_from_plugin",
                            return_value=module) as find):
      self.assertIs(gpu_aiter.load("rocm"), gpu_aiter.load("rocm"))
      find.assert_called_once_with("rocm", "_aiter")
      module.registrations.assert_called_once_with()

  def test_jax_aiter_import_path(self):
    """jax-aiter's users keep their import."""
    # pylint: disable=g-import-not-at-top
    from jax_aiter import mha
    from jax_aiter.ops.append_kv import append_kv
    from jax_aiter.ops.moe_mxfp4 import grouped_mxfp4_dw
    from jax_aiter.ops.paged_attention import paged_attention
    from jax_aiter.ops.paged_prefill import paged_prefill
    for fn in append_kv, grouped_mxfp4_dw, paged_attention, paged_prefill:
      self.assertIs(fn, getattr(aiter, fn.__name__))
    self.assertIs(mha.flash_attn_func, aiter.flash_attn_func)
    self.assertIs(mha.flash_attn_varlen, aiter.flash_attn_varlen)


class WholeRowsTest(parameterized.TestCase):
  """CUDA's kernels get biases and masks of rows that are multiples of eight."""

  @parameterized.product(
      planes=[dict(bias=(1, 4, 21, 27)), dict(mask=(2, 1, 1, 27)),
              dict(bias=(2, 1, 1, 27), mask=(1, 4, 21, 27))],
      cfg=[dict(), dict(window_right=0), dict(window_left=5, window_right=3),
           dict(window_right=0, top_left=True)],
      alibi=[False, True], lengths=["", "k", "qk"])
  def test_same_as_without(self, planes, cfg, alibi, lengths):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    ends = jnp.array([0, 13, 34], jnp.int32)
    x = types.Operands(
        draw(2, 21, 4, 16), draw(2, 27, 2, 16), draw(2, 27, 2, 8),
        cu_seqlens_q=ends if "q" in lengths else None,
        cu_seqlens_k=ends if "k" in lengths else None,
        bias=draw(*planes["bias"]) if "bias" in planes else None,
        mask=(jnp.asarray(rng.random(planes["mask"]) < 0.8)
              if "mask" in planes else None),
        alibi_slopes=jnp.full((2, 4), 0.1) if alibi else None)
    cfg = types.Config(0.3, **cfg)
    bwd = mha_op.BwdConfig(cfg, types.Wanted(x.bias is not None, False, alibi))
    kernels = mha_op._fwd_kernel, mha_op._bwd_kernel

    def whole(function):
      def call(cfg, _, x, *saved):
        self.assertEqual(x.k.shape[1], 32)
        return function(cfg, x, *saved)
      return call

    forward = lambda cfg, x: reference.mha_fwd(cfg, x)
    backward = lambda bwd, x, saved: reference.mha_bwd(*bwd, x, saved)
    expected = forward(cfg, x)[:2]
    saved = types.Saved(draw(2, 21, 4, 8), *expected, None)
    with mock.patch.multiple(mha_op, _fwd_kernel=whole(forward),
                             _bwd_kernel=whole(backward)):
      call = mock.Mock(platform="cuda")
      got = kernels[0](cfg, call, x)[:2]
      grads = kernels[1](bwd, call, x, saved)
    for a, b in zip(jax.tree.leaves((got, grads)),
                    jax.tree.leaves((expected, backward(bwd, x, saved))),
                    strict=True):
      self.assertEqual(a.dtype, b.dtype)
      a, b = (np.asarray(t, np.float32) for t in (a, b))
      np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)


class KeptBitsTest(parameterized.TestCase):
  """What dropout keeps, as the forward pass for a GPU leaves it."""

  def test_places(self):
    sq, sk = 150, 264
    state = jax.random.bits(jax.random.key(0), (2, 3, 6), jnp.uint32)
    state = state.at[..., 5].set(8)
    x = types.Operands(*(jnp.zeros((2, s, 3, 8)) for s in (sq, sk, sk)),
                       dropout_state=state)
    bits = np.asarray(
        reference.kept_bits(types.Config(1.0, dropout_p=0.3), x))
    self.assertEqual(bits.shape, reference.kept_shape(x))
    keep = np.asarray(philox.keep_mask(
        state[:, :, None, None], jnp.arange(sq)[:, None], jnp.arange(sk), 0.3))
    # As third_party/aiter/kernels/mha/kept_hopper.py has it.
    row, key = np.arange(sq)[:, None], np.arange(sk)
    words = bits.reshape(2, 3, 4, 3, 2, 4, 2, 4, 4)[
        :, :, row // 64, key // 128, key // 64 % 2, row // 16 % 4, key // 4 % 2,
        key % 4, row // 2 % 4]
    place = (key // 16 % 4 * 8 + key // 8 % 2 * 4 + row % 2 * 2 + row // 8 % 2)
    np.testing.assert_array_equal(words >> place & 1, keep)

  @parameterized.parameters("jit", "remat", "vmap", "shard")
  def test_gradients(self, way):
    q, k, v = (normal(i, 2, 72, 4, 16, dtype=jnp.bfloat16) for i in range(3))

    def loss(q, k, v):
      out = aiter.flash_attn_func(q, k, v, causal=True, dropout_p=0.3,
                                  dropout_key=jax.random.key(0))
      return jnp.sum(out.astype(jnp.float32) ** 2)

    def gradients():
      call = jax.grad(jax.checkpoint(loss) if way == "remat" else loss)
      if way == "vmap":
        call = jax.vmap(call, (0, None, None))
        return jax.jit(call)(q[None], k, v)[0]
      if way == "shard":
        mesh = jax.make_mesh((1,), ("x",), devices=jax.devices("cpu")[:1])
        return jax.jit(call, in_shardings=jax.NamedSharding(
            mesh, jax.P(None, "x")))(q, k, v)
      return jax.jit(call)(q, k, v)

    with jax.default_device(jax.devices("cpu")[0]):
      expected = gradients()
      with mock.patch.object(mha_op, "_keeps_bits", lambda *_: True):
        got = gradients()
    np.testing.assert_allclose(*(np.asarray(t, np.float32)
                                 for t in (got, expected)), atol=0.01)


def equations(jaxpr):
  """All equations of a jaxpr and of those inside it."""
  for eqn in jaxpr.eqns:
    yield eqn
    for value in itertools.chain.from_iterable(
        v if isinstance(v, (tuple, list)) else (v,)
        for v in eqn.params.values()):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from equations(inner)


if __name__ == "__main__":
  absltest.main()
