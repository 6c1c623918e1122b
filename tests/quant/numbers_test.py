# SPDX-License-Identifier: Apache-2.0
"""Quantisers: every bit as oracle.py defines it, transforms, errors."""

import functools
from unittest import mock

import hypothesis
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from harness import machine, sharding, transforms
from harness.cases import DTYPES, examples
from harness.machine import CPUS, PLATFORM
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from quant import oracle

import jax
from jax._src.aiter.core import dispatch
from jax._src.aiter.core.operator import Key
from jax._src.aiter.quant import op as quant_op
from jax.experimental import aiter
from jaxlib import gpu_aiter

BYTES = ("int8", "float8_e4m3fn", "float8_e4m3fnuz")
MX = ("mxfp4", "float8_e4m3fn", "float8_e4m3fnuz")
MODES = ("up", "down", "even", "ceil")


def numbers(*shape, dtype="fp32", special=False, seed=0):
  """Rows of very unequal sizes; zeros, and if wanted NaN and infinity."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape, np.float32)
  x *= np.exp2(rng.integers(-14, 12, (*shape[:-1], 1))).astype(np.float32)
  if x.size > 8:
    x.flat[x.size // 2] = 0
    x.flat[1] = -0.0
    if x.ndim > 1:
      x[..., -1, :] = 0
    if special:
      x.flat[3], x.flat[x.size // 3] = np.nan, -np.inf
  return x.astype(DTYPES[dtype])


def factors(*shape):
  """Positive numbers around 1, float32."""
  return np.exp(np.random.default_rng(7).standard_normal(shape, np.float32))


class QuantTestCase(parameterized.TestCase):

  def assert_same(self, got, want, message=""):
    """Equal bits, but of NaN's."""
    for a, b in zip(jax.tree.leaves(jax.device_get(got)),
                    jax.tree.leaves(want), strict=True):
      b = np.asarray(b)
      self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), message)
      if a.dtype != np.float32:
        a, b = a.view(np.uint8), b.view(np.uint8)
      np.testing.assert_array_equal(a, b, err_msg=str(message))

  def assert_makes(self, function, x, calls, message=""):
    """As assert_same of calls of a function, (options, results) each.

    They are one program, which compiles sooner than a program each.
    """
    options, want = zip(*calls)
    got = jax.jit(lambda x: [function(x, **o) for o in options])(x)
    self.assert_same(got, want, (message, options))


def per_tensor(x, kind):
  scale = oracle.f32_scale(oracle.amax(np.ravel(x), -1), kind)
  return oracle.static(x, kind, scale), scale


def mx(x, kind, mode, group=32):
  x = np.asarray(x, np.float32)
  q, scale = oracle.tiles(np.atleast_2d(x), kind, 1, group, mode)
  q = oracle.pack(q) if kind == "mxfp4" else q
  return (q.reshape(*x.shape[:-1], q.shape[-1]),
          scale.reshape(*x.shape[:-1], scale.shape[-1]))


def halfway(kind):
  """Every number of a kind, every middle of two, and what is next to them."""
  if kind == "int8":
    values = np.arange(-128.5, 129)
    values = np.concatenate([values, values + 0.5])
  else:
    values = oracle.FORMATS[kind].numbers()
    # One that would be next marks where saturation begins.
    values = np.append(values, 2 * values[-1] - values[-2])
    values = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    values = np.concatenate([values, -values])
  values = values.astype(np.float32)
  values = np.concatenate([
      values, np.nextafter(values, np.float32(np.inf)),
      np.nextafter(values, np.float32(-np.inf))])
  extreme = np.array([np.nan, np.inf, 3e38, 1e-38, 1e-44, 2.0**-20], np.float32)
  return np.concatenate([values, extreme, -extreme])


class RoundingTest(QuantTestCase):
  """Numbers to codes, and largest magnitudes to scales."""

  @parameterized.parameters(*BYTES)
  def test_bytes(self, kind):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, machine.size(1 << 20, 1 << 16, 2000),
                        np.uint32)
    x = np.concatenate([halfway(kind), bits.view(np.float32)])
    x = np.resize(x, (-(-x.size // 256), 256))
    scale = np.ones((x.shape[0], 1), np.float32)
    q, returned = jax.jit(lambda x, s: aiter.per_token_quant(
        x, s, quant_dtype=kind))(x, scale)
    self.assert_same(q, oracle.round_to(x, kind))
    self.assert_same(returned, scale)

  @parameterized.parameters("bf16", "fp16")
  def test_every_input_of_16_bits(self, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    x = x.reshape(256, 256)[::machine.size(1, 1, 16)]
    with np.errstate(all="ignore"):
      wide = x.astype(np.float32)
    for kind in BYTES:
      q, _ = aiter.per_tensor_quant(jnp.asarray(x), jnp.float32(1),
                                    quant_dtype=kind)
      self.assert_same(q, oracle.round_to(wide, kind))

  def test_e2m1(self):
    x = halfway("mxfp4")
    x = np.resize(x, x.size + x.size % 2)
    want = oracle.round_to(x, "mxfp4")
    self.assert_same(aiter.pack_e2m1(jnp.asarray(x)), oracle.pack(want))
    # A group that holds a 6 has the scale 1, whatever else is not larger.
    x = x[np.isfinite(x) & (np.abs(x) < 6)]
    x = np.resize(x, (-(-x.size // 31), 31))
    x = np.concatenate([x, np.full_like(x[:, :1], 6)], 1)
    q, scale = aiter.mx_quant(jnp.asarray(x))
    np.testing.assert_array_equal(scale, 127)
    self.assert_same(q, oracle.pack(oracle.round_to(x, "mxfp4")))

  @parameterized.parameters(*MX)
  def test_e8m0(self, kind):
    """Where each mode steps to the next power of two, and the ends."""
    largest = np.float32(oracle.LARGEST[kind])
    steps = np.concatenate([
        largest * np.exp2(np.arange(-3, 3)), np.exp2(np.arange(-3, 9)),
        np.array([1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875]) * 16])
    steps = np.concatenate([steps, steps * 2.0**-120, steps * 2.0**-128,
                            steps * 2.0**115]).astype(np.float32)
    ends = np.array([0, np.inf, np.nan, 3.4028235e38, 2.0**-126, 2.0**-149,
                     2.0**-127 * 1.5], np.float32)
    amax = np.concatenate([steps, np.nextafter(steps, np.float32(0)),
                           np.nextafter(steps, np.float32(np.inf)), ends])
    x = np.zeros((amax.size, 32), np.float32)
    x[:, 5] = -amax
    x[:, 6] = amax / 2 ** np.arange(amax.size % 7, amax.size % 7 + 1)
    x[:, 31] = amax / np.float32(3)
    for mode in MODES:
      self.assert_same(
          jax.jit(lambda x, mode=mode: aiter.mx_quant(
              x, quant_dtype=kind, round_mode=mode))(x),
          mx(x, kind, mode), mode)

  @parameterized.parameters(*BYTES)
  def test_float32_scales(self, kind):
    """Quotients are IEEE's, of tiny and of huge rows too."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((machine.size(4096, 512, 64), 64), np.float32)
    x *= np.exp2(rng.integers(-60, 120, x.shape[:1]))[:, None].astype(
        np.float32)
    x[0], x[1, 0], x[2, 0], x[3] = 0, np.inf, np.nan, 1e-12
    self.assert_same(
        jax.jit(lambda x: aiter.per_token_quant(x, quant_dtype=kind))(x),
        oracle.token(x, kind))
    q, scale = aiter.per_token_quant(jnp.zeros((1, 8)), quant_dtype=kind)
    np.testing.assert_array_equal(
        scale, np.float32(1e-10) / np.float32(oracle.LARGEST[kind]))
    np.testing.assert_array_equal(q.astype(jnp.float32), 0)


class FunctionsTest(QuantTestCase):

  @parameterized.product(dtype=list(DTYPES), kind=list(BYTES))
  def test_rows(self, dtype, kind):
    shapes = [(7, 64), (2, 3, 77), (5, 1040), (3, 5000), (2, 8192), (2, 9001),
              (3, 32768), (64,)]
    for shape in machine.sample(shapes, 3):
      x = numbers(*shape, dtype=dtype, special=True)
      self.assert_same(
          aiter.per_token_quant(jnp.asarray(x), quant_dtype=kind),
          oracle.token(x, kind), shape)

  @parameterized.product(dtype=list(DTYPES), kind=list(BYTES))
  def test_groups(self, dtype, kind):
    for shape, group in machine.sample([
        ((2, 3, 256), 128), ((7, 1000), 128), ((5, 320), 64), ((33, 96), 32),
        ((128,), 32), ((3, 77), 64), ((9, 20), 32)], 3):
      x = numbers(*shape, dtype=dtype, special=True)
      q, scale = oracle.tiles(np.atleast_2d(x), kind, 1, group)
      q, scale = q.reshape(shape), scale.reshape(*shape[:-1], -1)
      calls = [({}, (q, scale))]
      if x.ndim > 1:
        calls.append((dict(transpose_scale=True),
                      (q, np.swapaxes(scale, -1, -2))))
      if kind != "int8":
        calls.append((dict(scale_dtype=jnp.uint8), mx(x, kind, "up", group)))
      run = functools.partial(
          aiter.per_group_quant, group_size=group, quant_dtype=kind)
      self.assert_makes(run, x, calls, shape)

  @parameterized.product(dtype=list(DTYPES), kind=list(BYTES))
  def test_blocks(self, dtype, kind):
    for shape in machine.sample(
        [(256, 384), (2, 130, 200), (1, 1), (128, 131)], 2):
      x = numbers(*shape, dtype=dtype, special=True)
      self.assert_same(
          aiter.per_block_quant(jnp.asarray(x), quant_dtype=kind),
          oracle.tiles(x, kind, 128, 128), shape)

  @parameterized.product(dtype=list(DTYPES), kind=list(BYTES))
  def test_tensors(self, dtype, kind):
    shapes = [(3, 5, 64), (4, 9001), (20,), (2, 8192), (500, 128), (77, 256),
              (40, 512), (50, 640), (9, 1000)]
    for shape in machine.sample(shapes, 2):
      x = numbers(*shape, dtype=dtype)
      self.assert_same(
          aiter.per_tensor_quant(jnp.asarray(x), quant_dtype=kind),
          per_tensor(x, kind), shape)
      scale = np.float32(0.37)
      for given in (scale, scale.reshape(1)):
        self.assert_same(
            aiter.per_tensor_quant(jnp.asarray(x), jnp.asarray(given),
                                   quant_dtype=kind),
            (oracle.static(x, kind, scale), scale.reshape(1)), shape)
    q, scale = aiter.per_tensor_quant(
        jnp.asarray(numbers(4, 16, special=True)), quant_dtype=kind)
    self.assertTrue(np.isnan(scale).all())
    if kind != "int8":
      self.assertTrue(np.isnan(q.astype(jnp.float32)).all())

  @parameterized.product(dtype=["bf16", "fp32"], kind=list(MX))
  def test_mx(self, dtype, kind):
    for i, shape in enumerate(machine.sample(
        [(3, 64), (2, 5, 96), (300, 320), (7, 100), (64,), (33, 34)], 3)):
      x = numbers(*shape, dtype=dtype, special=True)
      calls = []
      for mode in machine.sample(MODES, 2):
        want = mx(x, kind, mode)
        calls.append((dict(round_mode=mode), want))
        if x.ndim > 1 and MODES[i % 4] == mode:
          scales = want[1].reshape(-1, *want[1].shape[-2:])
          scales = np.stack([oracle.shuffled(s) for s in scales])
          calls.append((
              dict(round_mode=mode, shuffle_scale=True),
              (want[0], scales.reshape(*x.shape[:-2], *scales.shape[1:]))))
      self.assert_makes(
          functools.partial(aiter.mx_quant, quant_dtype=kind), x, calls, shape)

  @parameterized.parameters(*BYTES)
  def test_smooth(self, kind):
    for shape in ((2, 3, 40), (5, 1030)):
      x = numbers(*shape, dtype="bf16")
      smooth = factors(shape[-1])
      want = oracle.token(x, kind, smooth)
      x = jnp.asarray(x)
      self.assert_same(
          aiter.smooth_quant(x, jnp.asarray(smooth), quant_dtype=kind), want)
      scale = want[1] * np.float32(0.7)
      self.assert_same(
          aiter.per_token_quant(x, jnp.asarray(scale), quant_dtype=kind,
                                smooth_scale=jnp.asarray(smooth)),
          (oracle.static(x, kind, scale, smooth), scale))

  def test_empty(self):
    for shape in ((0, 64), (2, 0, 64), (3, 0)):
      x = jnp.zeros(shape, jnp.bfloat16)
      self.assertEqual(aiter.per_tensor_quant(x)[1].shape, (1,))
      for q, scale, size in (
          (*aiter.per_token_quant(x), 1),
          (*aiter.per_group_quant(x), -(-shape[-1] // 128)),
          (*aiter.mx_quant(x, quant_dtype="float8_e4m3fn"), shape[-1] // 32)):
        self.assertEqual(q.shape, shape)
        self.assertEqual(scale.shape, (*shape[:-1], size))

  def test_float64(self):
    with jax.enable_x64(True):
      x = numbers(3, 64).astype(np.float64) * (1 + 2.0**-40)
      self.assert_same(aiter.per_token_quant(jnp.asarray(x)),
                       oracle.token(x.astype(np.float32), "int8"))

  def test_float8_dtype(self):
    name = aiter.float8_dtype(CPUS[0]).name
    self.assertEqual(name, "float8_e4m3fn")
    fnuz = dispatch.architectures("rocm") == ("gfx942",)
    self.assertEqual(aiter.float8_dtype().name,
                     "float8_e4m3fnuz" if fnuz else "float8_e4m3fn")
    x = jnp.ones((2, 128))
    self.assertEqual(aiter.per_group_quant(x)[0].dtype, aiter.float8_dtype())
    self.assertEqual(aiter.per_block_quant(x)[0].dtype, aiter.float8_dtype())

  @parameterized.parameters("e4m3fnuz", "e4m3fn", "")
  def test_float8_dtype_is_what_the_module_says(self, said):
    """What an architecture multiplies is known where its kernels are."""
    device = mock.Mock(compute_capability="gfx942:sramecc+:xnack-")
    module = mock.Mock()
    module.float8_type.return_value = said
    with (mock.patch.object(dispatch, "_devices",
                            lambda p: [device] if p == "rocm" else []),
          mock.patch.object(dispatch.gpu_aiter, "load", lambda p: module)):
      got = aiter.float8_dtype(device)
    self.assertEqual(got.name, f"float8_{said or 'e4m3fn'}")
    module.float8_type.assert_called_once_with("gfx942")

  @examples(60, 16, 8)
  @hypothesis.given(st.data())
  def test_any_call(self, data):
    draw = data.draw
    shape = (*draw(st.lists(st.integers(1, 4), max_size=2)),
             draw(st.integers(1, 40)),
             2 * draw(st.integers(1, machine.size(700, 150, 150))))
    x = numbers(*shape, dtype=draw(st.sampled_from(list(DTYPES))),
                special=draw(st.booleans()), seed=draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(MX))
    mode, group = draw(st.sampled_from(MODES)), draw(st.sampled_from((32, 64)))
    scale_dtype = draw(st.sampled_from((jnp.float32, jnp.uint8)))
    self.assert_same(aiter.mx_quant(jnp.asarray(x), quant_dtype=kind,
                                    round_mode=mode), mx(x, kind, mode))
    kind = "int8" if kind == "mxfp4" else kind
    self.assert_same(aiter.per_token_quant(jnp.asarray(x), quant_dtype=kind),
                     oracle.token(x, kind))
    if kind != "int8":
      self.assert_same(
          aiter.per_group_quant(jnp.asarray(x), quant_dtype=kind,
                                group_size=group, scale_dtype=scale_dtype),
          mx(x, kind, "up" if scale_dtype == jnp.uint8 else None, group))


class DequantTest(QuantTestCase):

  @parameterized.parameters(*BYTES)
  def test_every_code(self, kind):
    """q * scale, rounded once."""
    q = np.arange(256, dtype=np.uint8).reshape(2, 128)
    scale = np.array([[0.3], [1.7]], np.float32)
    q = q.view(np.int8) if kind == "int8" else q.view(getattr(ml_dtypes, kind))
    want = oracle.value(q, kind).astype(np.float32) * scale
    self.assert_same(aiter.dequant(jnp.asarray(q), jnp.asarray(scale)), want)
    wide = np.repeat(scale, 2, 1) * np.array([1, 3], np.float32)
    self.assert_same(
        aiter.dequant(jnp.asarray(q), jnp.asarray(wide), block_shape=(1, 64)),
        oracle.value(q, kind).astype(np.float32) * np.repeat(wide, 64, 1))

  def test_e2m1(self):
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    want = oracle.value(oracle.unpack(packed), "mxfp4").astype(np.float32)
    self.assert_same(aiter.unpack_e2m1(jnp.asarray(packed)), want)
    self.assert_same(aiter.pack_e2m1(jnp.asarray(want)), packed)
    self.assert_same(
        aiter.unpack_e2m1(jnp.asarray(packed), dtype=jnp.bfloat16).astype(
            jnp.float32), want)

  def test_e8m0(self):
    """Every scale but those that make subnormal numbers."""
    scale = np.arange(2, 256, dtype=np.uint8)[:, None]
    q = np.full((254, 16), 0x52, np.uint8)  # 1 and 3.
    want = np.float32([1, 3] * 16) * oracle.from_e8m0(scale)
    with np.errstate(over="ignore"):
      want = want.astype(np.float32)
    self.assert_same(aiter.mx_dequant(jnp.asarray(q), jnp.asarray(scale)), want)

  def test_inverts_the_quantisers(self):
    x = numbers(2, 150, 200)
    # What is left out by rounding, relative to the largest of what shares a
    # scale: half a step of the coarsest numbers.
    error = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4,
             "float8_e4m3fnuz": 2.0**-4, "mxfp4": 0.25}
    for kind in BYTES:
      limit = error[kind] * 1.01 * np.abs(x).max((-1, -2), keepdims=True)
      for got in jax.jit(lambda x, kind=kind: (
          aiter.dequant(*aiter.per_token_quant(x, quant_dtype=kind)),
          aiter.dequant(*aiter.per_group_quant(
              x, quant_dtype=kind, group_size=64), block_shape=(1, 64)),
          aiter.dequant(*aiter.per_block_quant(x, quant_dtype=kind),
                        block_shape=(128, 128), dtype=jnp.float32)))(x):
        self.assertTrue((np.abs(got - x) <= limit).all())
    largest = np.abs(np.pad(x, ((0, 0), (0, 0), (0, 24))))
    largest = np.repeat(largest.reshape(2, 150, 7, 32).max(-1), 32, -1)
    for kind in MX:
      for got in jax.jit(lambda x, kind=kind: [
          aiter.mx_dequant(
              *aiter.mx_quant(x, quant_dtype=kind, shuffle_scale=shuffle),
              scale_shuffled=shuffle) for shuffle in (False, True)])(x):
        self.assertTrue((np.abs(got - x) <= 0.34 * largest[..., :200]).all())

  def test_gradient_of_the_scale(self):
    q = jnp.asarray([[1, -2, 3], [4, 5, -6]], jnp.int8)
    grad = jax.grad(lambda s: jnp.sum(aiter.dequant(q, s)))(
        jnp.ones((2, 1)))
    np.testing.assert_array_equal(grad, [[2], [3]])


class ShuffleTest(QuantTestCase):

  @parameterized.parameters(np.int8, np.float16, np.float32)
  def test_weight(self, dtype):
    """Where an element goes, by its place inside its tile."""
    shape, layout = (2, 48, 192), (16, 16)
    w = np.arange(np.prod(shape)).reshape(shape).astype(np.int32)
    w = w.astype(dtype)
    run = 16 // w.itemsize
    want = np.empty_like(w).reshape(2, -1)
    for n in range(48):
      for k in range(192):
        tile = n // 16 * 6 + k // 32
        place = k % 32 // run * 16 * run + n % 16 * run + k % run
        want[:, tile * 512 + place] = w[:, n, k]
    got = aiter.shuffle_weight(jnp.asarray(w), layout)
    self.assert_same(np.asarray(got, np.float32),
                     want.reshape(shape).astype(np.float32))
    self.assert_same(np.asarray(aiter.unshuffle_weight(got), np.float32),
                     w.astype(np.float32))

  def test_weight_layouts(self):
    w = jnp.arange(64.0 * 64).reshape(64, 64).astype(jnp.bfloat16)
    for layout in ((16, 16), (32, 16), (32, 8), (64, 32)):
      got = aiter.shuffle_weight(w, layout)
      np.testing.assert_array_equal(aiter.unshuffle_weight(got, layout), w)
    cotangent = jnp.asarray(numbers(64, 64, dtype="bf16"))
    _, vjp = jax.vjp(aiter.shuffle_weight, w)
    np.testing.assert_array_equal(vjp(cotangent)[0],
                                  aiter.unshuffle_weight(cotangent))

  @parameterized.parameters(((1, 1),), ((32, 8),), ((300, 13),), ((512, 16),))
  def test_scale(self, shape):
    scale = np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint8)
    got = aiter.shuffle_scale(jnp.asarray(scale))
    self.assert_same(got, np.stack([oracle.shuffled(s) for s in scale]))
    self.assert_same(aiter.unshuffle_scale(got, shape), scale)
    self.assertEqual(aiter.unshuffle_scale(got).shape, got.shape)


def many(x):
  """Every quantiser of [m, n], n a multiple of 128."""
  return (
      *aiter.per_token_quant(x, quant_dtype="int8"),
      *aiter.per_group_quant(x, quant_dtype="float8_e4m3fn"),
      *aiter.per_group_quant(x, quant_dtype="float8_e4m3fnuz", group_size=64,
                             transpose_scale=True),
      *aiter.mx_quant(x),
      *aiter.per_block_quant(x, quant_dtype="float8_e4m3fn"),
      *aiter.per_tensor_quant(x, quant_dtype="int8"),
      *aiter.mx_quant(x, quant_dtype="float8_e4m3fn", shuffle_scale=True),
  )


class TransformTest(QuantTestCase):

  def test_jit(self):
    x = jnp.asarray(numbers(8, 256))
    self.assert_same(jax.jit(many)(x), jax.device_get(many(x)))

  @parameterized.parameters(0, 1, 2)
  def test_vmap(self, axis):
    """Each element as if it were alone: one scale a tensor, too."""
    x = np.moveaxis(numbers(3, 8, 128), 0, axis)
    want = [many(jnp.asarray(np.take(x, i, axis))) for i in range(3)]
    want = jax.tree.map(lambda *t: np.stack(jax.device_get(t)), *want)
    self.assert_same(jax.vmap(many, axis)(jnp.asarray(x)), want)

  @parameterized.parameters(((0, 0),), ((0, None),), ((None, 0),))
  def test_vmap_of_factors(self, axes):
    x, smooth = numbers(3, 4, 64), factors(3, 64)
    args = [t if a is not None else t[0] for t, a in zip((x, smooth), axes)]
    at = lambda t, a, i: t if a is None else t[i]
    want = [oracle.token(at(args[0], axes[0], i), "int8",
                         at(args[1], axes[1], i)) for i in range(3)]
    self.assert_same(
        jax.vmap(aiter.smooth_quant, axes)(*map(jnp.asarray, args)),
        tuple(np.stack(t) for t in zip(*want)))

  def test_vmap_of_given_scales(self):
    x, scale = numbers(4, 64), factors(3, 4, 1)
    got, _ = jax.vmap(aiter.per_token_quant, (None, 0))(
        jnp.asarray(x), jnp.asarray(scale))
    self.assert_same(got, np.stack([
        oracle.static(x, "int8", s) for s in scale]))

  def test_no_gradient(self):
    x = jnp.asarray(numbers(4, 128))
    for name, fn in dict(
        per_token_quant=aiter.per_token_quant, mx_quant=aiter.mx_quant,
        per_tensor_quant=aiter.per_tensor_quant,
        per_block_quant=aiter.per_block_quant,
        per_group_quant=aiter.per_group_quant).items():
      with self.assertRaisesRegex(TypeError, f"{name}: has no gradient"):
        jax.grad(lambda x, fn=fn: jnp.sum(fn(x)[1].astype(jnp.float32)))(x)
    with self.assertRaisesRegex(TypeError, "pack_e2m1: has no gradient"):
      jax.grad(lambda x: jnp.sum(aiter.pack_e2m1(x).astype(jnp.float32)))(x)

  def test_straight_through(self):
    x = jnp.asarray(numbers(4, 128))

    def loss(x):
      rounded = aiter.dequant(*aiter.per_token_quant(jax.lax.stop_gradient(x)))
      return jnp.sum((x + jax.lax.stop_gradient(rounded - x)) * 3)

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), 3)

  @parameterized.parameters(*transforms.EXPORTED)
  def test_export(self, platform):
    x = jnp.asarray(numbers(4, 128, dtype="bf16"))
    fn = lambda x: (*aiter.per_tensor_quant(x), *aiter.mx_quant(x))
    transforms.check_export(self, fn, (x,), ("quant",), platform)


@sharding.on_hosts
class ShardingTest(QuantTestCase):
  """The same bits on several devices of the host."""

  def setUp(self):
    super().setUp()
    self.x = jax.device_put(numbers(4, 256, 512), CPUS[0])
    self.mesh = sharding.mesh((2, 2), ("a", "b"))

  @parameterized.parameters(
      (P("a", "b"),), (P("a"),), (P(("a", "b")),), (P(None, "a", "b"),),
      (P("b", None, "a"),))
  def test_all(self, spec):
    want = jax.device_get(jax.jit(many)(self.x))
    x = jax.device_put(self.x, NamedSharding(self.mesh, spec))
    self.assert_same(jax.jit(many)(x), want)

  @parameterized.named_parameters(
      ("rows", P("a", "b"), lambda x: aiter.per_token_quant(x)),
      ("groups", P("a", None, "b"),
       lambda x: aiter.per_group_quant(x, quant_dtype="int8")),
      ("transposed", P(None, "a", "b"),
       lambda x: aiter.per_group_quant(x, quant_dtype="int8",
                                       transpose_scale=True)),
      ("mx", P(None, "a", "b"), lambda x: aiter.mx_quant(x)),
      ("blocks", P(None, "a", "b"),
       lambda x: aiter.per_block_quant(x, quant_dtype="int8")),
      ("shuffled", P(("a", "b")),
       lambda x: aiter.mx_quant(x, shuffle_scale=True)),
      ("given", P("a", None, "b"),
       lambda x: aiter.per_tensor_quant(x, jnp.float32(1))))
  def test_nothing_is_sent(self, spec, fn):
    x = jax.device_put(self.x, NamedSharding(self.mesh, spec))
    compiled = jax.jit(fn).lower(x).compile()
    self.assert_same(compiled(x), jax.device_get(jax.jit(fn)(self.x)))
    self.assertEmpty(sharding.collectives(compiled))

  def test_one_scale_of_all_devices(self):
    fn = lambda x: aiter.per_tensor_quant(x)
    x = jax.device_put(self.x, NamedSharding(self.mesh, P("a", "b")))
    compiled = jax.jit(fn).lower(x).compile()
    self.assert_same(compiled(x), per_tensor(np.asarray(self.x), "int8"))
    self.assertEqual(sharding.collectives(compiled), {"all-reduce"})

  def test_ragged(self):
    """Groups that do not divide the columns: gathered, and right."""
    x = numbers(4, 6, 100)
    sharded = jax.device_put(
        x, NamedSharding(self.mesh, P("a", None, "b")))
    self.assert_same(
        jax.jit(lambda x: aiter.per_group_quant(x, quant_dtype="int8"))(
            sharded), oracle.tiles(x, "int8", 1, 128))

  @parameterized.parameters(False, True)
  def test_explicit_axes(self, set_mesh):
    want = jax.device_get(jax.jit(many)(self.x))
    with sharding.explicit_mesh(set_mesh) as mesh:
      got = jax.jit(many)(jax.device_put(
          self.x, NamedSharding(mesh, P("a", "b"))))
    self.assert_same(got, want)
    self.assertEqual(jax.typeof(got[0]).sharding.spec, P("a", "b", None))

  @parameterized.parameters(False, True)
  def test_shard_map(self, check_vma):
    mesh = sharding.mesh((4,), ("a",))
    fn = lambda x: (*aiter.per_token_quant(x), *aiter.mx_quant(x),
                    *aiter.per_block_quant(x))
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=P("a"), out_specs=P("a"),
                            check_vma=check_vma)
    x = jax.device_put(self.x, NamedSharding(mesh, P()))
    self.assert_same(jax.jit(sharded)(x),
                     jax.device_get(jax.jit(fn)(self.x)))


@machine.where(PLATFORM is not None)
class KernelTest(absltest.TestCase):

  def test_kernels_serve(self):
    """No call here quietly ran the reference."""
    for dtype in machine.types(quant_op._DTYPES):
      for per in ("row", "group", "block", "amax"):
        for cols in (1, 1024, 4096, 8192, 100001):
          self.assertIsNone(quant_op.quant.unserved(
              PLATFORM, Key("quant", dtype, (cols,),
                            () if per == "row" else (per,))))
    text = jax.jit(aiter.per_token_quant).lower(jnp.ones((4, 64))).as_text()
    self.assertIn(gpu_aiter.target(PLATFORM, "quant"), text)


X = jnp.ones((2, 64))


class ErrorTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("x_type", TypeError, aiter.per_token_quant, ([1.0],), {},
       ["per_token_quant", "x", "list"]),
      ("x_dtype", TypeError, aiter.per_tensor_quant,
       (jnp.ones((2, 8), jnp.int32),), {}, ["x's dtype", "int32", "bfloat16"]),
      ("x_rank", ValueError, aiter.per_token_quant, (jnp.float32(1),), {},
       ["x", "rank 1"]),
      ("block_rank", ValueError, aiter.per_block_quant, (jnp.ones(64),), {},
       ["per_block_quant", "rank 2"]),
      ("transposed_rank", ValueError, aiter.per_group_quant, (jnp.ones(64),),
       dict(transpose_scale=True), ["per_group_quant", "rank 2"]),
      ("shuffled_rank", ValueError, aiter.mx_quant, (jnp.ones(64),),
       dict(shuffle_scale=True), ["mx_quant", "rank 2"]),
      ("quant_dtype", TypeError, aiter.per_token_quant, (X,),
       dict(quant_dtype=jnp.int16), ["quant_dtype", "int8"]),
      ("quant_dtype_fp4", TypeError, aiter.per_group_quant, (X,),
       dict(quant_dtype="mxfp4"), ["quant_dtype", "mxfp4"]),
      ("quant_dtype_name", TypeError, aiter.mx_quant, (X,),
       dict(quant_dtype="int8"), ["quant_dtype", "int8", "mxfp4"]),
      ("group", ValueError, aiter.per_group_quant, (X,), dict(group_size=48),
       ["group_size", "48", "32"]),
      ("scale_dtype", TypeError, aiter.per_group_quant, (X,),
       dict(scale_dtype=jnp.bfloat16), ["scale_dtype", "bfloat16"]),
      ("scale_dtype_int8", TypeError, aiter.per_group_quant, (X,),
       dict(scale_dtype=jnp.uint8, quant_dtype="int8"), ["scale_dtype"]),
      ("transpose_scale", TypeError, aiter.per_group_quant, (X,),
       dict(transpose_scale=1), ["transpose_scale", "a bool"]),
      ("round_mode", ValueError, aiter.mx_quant, (X,),
       dict(round_mode="nearest"), ["round_mode", "nearest", "'up'"]),
      ("odd", ValueError, aiter.mx_quant, (jnp.ones((2, 63)),), {},
       ["x", "even"]),
      ("scale_shape", ValueError, aiter.per_token_quant, (X, jnp.ones(2)), {},
       ["scale", "[2, 1]"]),
      ("scale_size", ValueError, aiter.per_tensor_quant, (X, jnp.ones(2)), {},
       ["scale", "float32[2]"]),
      ("smooth_shape", ValueError, aiter.smooth_quant, (X, jnp.ones(63)), {},
       ["smooth_quant", "smooth_scale", "[64]"]),
      ("smooth_none", TypeError, aiter.smooth_quant, (X, None), {},
       ["smooth_scale", "NoneType"]),
      ("dequant_dtype", TypeError, aiter.dequant, (X, X), {},
       ["q's dtype", "float32"]),
      ("dequant_scale", ValueError, aiter.dequant,
       (jnp.ones((2, 64), jnp.int8), jnp.ones((2, 3))), {},
       ["scale", "float32[2, 3]", "[2, 64]"]),
      ("dequant_block", ValueError, aiter.dequant,
       (jnp.ones((2, 64), jnp.int8), jnp.ones((2, 3))),
       dict(block_shape=(1, 32)), ["scale", "float32[2, 3]", "2 scales"]),
      ("mx_dequant", TypeError, aiter.mx_dequant,
       (jnp.ones((2, 64), jnp.int8), jnp.ones((2, 2), jnp.uint8)), {},
       ["mx_dequant", "q's dtype", "int8"]),
      ("mx_dequant_rank", ValueError, aiter.mx_dequant,
       (jnp.uint8(0), jnp.ones((1,), jnp.uint8)), {}, ["q is uint8[]",
                                                       "rank 1"]),
      ("dequant_rank", ValueError, aiter.dequant,
       (jnp.ones((4,), jnp.int8), jnp.ones((1, 1))),
       dict(block_shape=(4, 4)), ["q is int8[4]", "rank 2"]),
      ("weight_shape", ValueError, aiter.shuffle_weight, (jnp.ones((16, 48)),),
       {}, ["w", "multiple of 32"]),
      ("weight_layout", TypeError, aiter.shuffle_weight, (X, 16), {},
       ["layout", "16"]),
      ("weight_columns", ValueError, aiter.unshuffle_weight,
       (jnp.ones((16, 64), jnp.int8), (16, 4)), {}, ["layout", "16"]),
      ("unshuffled", ValueError, aiter.unshuffle_scale,
       (jnp.ones((32, 8), jnp.uint8),), {}, ["scale", "multiple of 256"]),
      ("unshuffle_shape", ValueError, aiter.unshuffle_scale,
       (jnp.ones((256, 8), jnp.uint8), (257, 8)), {}, ["shape", "(256, 8)"]),
  )
  def test_message(self, error, fn, args, options, words):
    with self.assertRaises(error) as caught:
      fn(*args, **options)
    for word in words:
      self.assertIn(word, str(caught.exception))

  def test_traced(self):
    with self.assertRaisesRegex(ValueError, "group_size"):
      jax.jit(lambda g: aiter.per_group_quant(X, group_size=g))(32)


if __name__ == "__main__":
  absltest.main()
