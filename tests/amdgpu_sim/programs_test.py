# SPDX-License-Identifier: Apache-2.0
"""Ordinary JAX programs on simulated GPUs give what they give on the CPU.

XLA compiles each for the device and PJRT runs it: kernels of XLA's own, with
no operator of ours. Four devices take part.
"""

import ctypes
import os
import re
import subprocess
import sys

os.environ["AMDGPU_SIM_DEVICES"] = "4"
os.environ["JAX_PLATFORMS"] = "rocm,cpu"

# pylint: disable=g-import-not-at-top
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax import lax

F32, F16, BF16 = np.float32, np.float16, jnp.bfloat16
SPLIT = P("x")
I32, U32, I8, I16 = np.int32, np.uint32, np.int8, np.int16


def normal(*shape, dtype=F32, seed=0):
  """Standard normal numbers."""
  values = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(values, dtype)


def integers(*shape, low=-1000, high=1000, dtype=I32, seed=0):
  values = np.random.default_rng(seed).integers(low, high, shape)
  return jnp.asarray(values, dtype)


def layer_norm(x, scale, offset):
  mean = x.mean(-1, keepdims=True)
  variance = ((x - mean) ** 2).mean(-1, keepdims=True)
  return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + offset


def loss(params, x, y):
  h = jnp.tanh(x @ params[0] + params[1])
  logits = h @ params[2] + params[3]
  picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
  return -picked.mean()


def training_step(params, x, y):
  value, gradients = jax.value_and_grad(loss)(params, x, y)
  return value, [p - 0.1 * g for p, g in zip(params, gradients)]


def attention(q, k, v):
  scores = jnp.einsum("qd,kd->qk", q, k) / np.sqrt(q.shape[-1])
  scores = jnp.where(jnp.tri(*scores.shape, dtype=bool), scores, -jnp.inf)
  return jax.nn.softmax(scores) @ v


def newton(x):
  return lax.while_loop(
      lambda s: jnp.abs(s * s - x).max() > 1e-5 * x.max(),
      lambda s: 0.5 * (s + x / s), x)


def recurrence(x):
  return lax.scan(lambda c, a: (0.9 * c + a, jnp.sin(c)), x[0], x)


def threefry(seed):
  key = jax.random.key(seed, impl="threefry2x32")
  a, b, c = jax.random.split(key, 3)
  return (jax.random.bits(a, (300,)), jax.random.uniform(b, (7, 33)),
          jax.random.permutation(c, 64))


def number_arithmetic(x, y):
  return x + y, x - y, x * y, x / y, jnp.maximum(x, y), jnp.remainder(x, y)


def integer_arithmetic(x, y):
  z = jnp.where(y == 0, 1, y)
  return x + y, x * y, x // z, x % z, x & y, x ^ y, x << (y & 7), x >> (y & 7)


def bit_tricks(x):
  return (lax.population_count(x), lax.clz(x), ~x, lax.shift_right_logical(
      x, U32(3)))


def functions(x):
  return (jnp.exp(x), jnp.log(jnp.abs(x) + 1e-3), jnp.sin(x), jnp.cos(x),
          jnp.tanh(x), lax.rsqrt(jnp.abs(x) + 1), lax.logistic(x), lax.erf(x))


def more_functions(x):
  return (jnp.expm1(x), jnp.log1p(jnp.abs(x)), jnp.arctan2(x, 1 - x),
          jnp.power(jnp.abs(x), 1.7), jnp.cbrt(x), jnp.sinh(x),
          lax.lgamma(jnp.abs(x) + 1), jnp.hypot(x, x + 1))


def rounding(x):
  return (jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.trunc(x),
          x.astype(I32), jnp.sign(x), jnp.isnan(x), jnp.nextafter(x, 0 * x))


def casts(x):
  return tuple(x.astype(d) for d in (F16, BF16, I8, I16, I32, bool)) + (
      jnp.abs(x).astype(U32),)


def special_values(x):
  return (x + 1, x * 0, jnp.sqrt(x), jnp.minimum(x, 1), jnp.isfinite(x),
          x == x, jnp.exp(x), 1 / x)


def trigonometry(x):
  return (jnp.tan(x), jnp.arcsin(x / 9), jnp.arctan(x), jnp.arcsinh(x),
          jnp.cosh(x), jnp.sin(x * 1e5), jnp.cos(x * 3e7))


def gated(x, w, b):
  return jax.nn.gelu(x @ w + b), jax.nn.silu(x @ w)


def doubles(x, y):
  return (x + y, x * y, x / y, jnp.sqrt(abs(x)), jnp.exp(x), jnp.sin(x),
          jnp.floor(x), jnp.remainder(x, y), x.astype(F32), x.astype(I32))


def long_integers(x, y):
  y = jnp.where(y == 0, 1, y)
  return (x + y, x * y, x // y, x % y, x << (y & 31), x >> (y & 63), x < y,
          x.astype(np.float64), lax.clz(x))


SPECIAL = jnp.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 2e-38, -2e-38,
                     3e38, -3e38, 1.2e-38], F32)

# XLA's default of a float32 dot rounds its operands to 10 bits of mantissa.
DEFAULT_PRECISION = ("dot_f32",)
# name: (function, arguments, tolerance)
PROGRAMS = {
    "arithmetic": (number_arithmetic, (normal(1000), normal(1000, seed=1)),
                   1e-6),
    "arithmetic_f16": (number_arithmetic, (
        normal(300, dtype=F16), normal(300, dtype=F16, seed=1)), 2e-3),
    "arithmetic_bf16": (number_arithmetic, (
        normal(300, dtype=BF16), normal(300, dtype=BF16, seed=1)), 2e-2),
    "integers_i32": (integer_arithmetic, (
        integers(500), integers(500, seed=1)), 0),
    "integers_i8": (integer_arithmetic, (
        integers(300, low=-128, high=128, dtype=I8),
        integers(300, low=-128, high=128, dtype=I8, seed=1)), 0),
    "integers_u32": (integer_arithmetic, (
        integers(300, low=0, high=2**32, dtype=U32),
        integers(300, low=0, high=2**32, dtype=U32, seed=1)), 0),
    "bits": (bit_tricks, (integers(300, low=0, high=2**32, dtype=U32),), 0),
    "functions": (functions, (normal(500) * 3,), 3e-6),
    "functions_bf16": (functions, (normal(200, dtype=BF16),), 3e-2),
    "more_functions": (more_functions, (normal(200),), 5e-6),
    "rounding": (rounding, (normal(400) * 9,), 0),
    "casts": (casts, (normal(300) * 50,), 0),
    "special_values": (special_values, (SPECIAL,), 1e-6),
    "where": (lambda x: jnp.where(x > 0, x, -2 * x), (normal(17, 19),), 0),
    "clamp_select": (lambda x: jnp.clip(x, -0.5, 0.5), (normal(999),), 0),
    "sum_rows": (lambda x: x.sum(1), (normal(37, 300),), 1e-5),
    "sum_columns": (lambda x: x.sum(0), (normal(300, 37),), 1e-5),
    "sum_all": (lambda x: (x.sum(), x.max(), x.min(), jnp.prod(x[:9])),
                (normal(5000),), 1e-4),
    "mean_variance_f16": (lambda x: (x.mean(1), x.astype(F32).var(1)), (
        normal(9, 200, dtype=F16),), 2e-3),
    "any_all": (lambda x: ((x > 2).any(0), (x < 3).all(1)),
                (normal(40, 50),), 0),
    "argmax": (lambda x: (x.argmax(1), x.argmin(0)), (normal(40, 70),), 0),
    "cumsum": (lambda x: (jnp.cumsum(x), lax.cummax(x)), (normal(300),),
               1e-5),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x)), (normal(5, 200),), 0),
    "sort_i16": (jnp.sort, (integers(3, 100, dtype=I16),), 0),
    "top_k": (lambda x: lax.top_k(x, 5), (normal(4, 100),), 0),
    "gather": (lambda x, i: x[i], (
        normal(50, 20), integers(30, low=0, high=50)), 0),
    "scatter_add": (lambda x, i, u: x.at[i].add(u), (
        integers(64), integers(200, low=0, high=64, seed=1),
        integers(200, seed=2)), 0),
    "scatter_set": (lambda x, u: x.at[jnp.arange(0, 64, 3)].set(u), (
        normal(64, 8), normal(22, 8, seed=1)), 0),
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, 10), (
        normal(200), integers(200, low=0, high=10)), 1e-5),
    "one_hot": (lambda i: jax.nn.one_hot(i, 12), (
        integers(30, low=0, high=12),), 0),
    "transpose": (lambda x: x.transpose(2, 0, 1), (normal(33, 17, 9),), 0),
    "reshape_concatenate": (lambda x, y: jnp.concatenate(
        [x.reshape(-1, 6), y], 0)[::-1], (normal(12, 9), normal(5, 6)), 0),
    "pad": (lambda x: lax.pad(x, F32(7), [(2, 3, 1), (-1, 4, 0)]), (
        normal(11, 13),), 0),
    "roll_tile": (lambda x: (jnp.roll(x, 5, 0), jnp.tile(x, (2, 3))), (
        normal(20, 9),), 0),
    "dynamic_slice": (lambda x, i: (
        lax.dynamic_slice(x, (i, 2), (4, 5)),
        lax.dynamic_update_slice(x, x[:3, :3] + 1, (i, i))), (
            normal(20, 16), I32(7)), 0),
    "threefry": (threefry, (42,), 0),
    "softmax": (lambda x: (jax.nn.softmax(x), jax.nn.log_softmax(x)), (
        normal(12, 130),), 1e-5),
    "dot_f32": (lambda a, b: a @ b, (normal(40, 70), normal(70, 30)), 5e-3),
    "dot_f32_highest": (lambda a, b: a @ b, (
        normal(40, 70), normal(70, 30)), 2e-5),
    "dot_bf16": (lambda a, b: a @ b, (
        normal(64, 128, dtype=BF16), normal(128, 32, dtype=BF16)), 2e-2),
    "dot_f16": (lambda a, b: a @ b, (
        normal(64, 128, dtype=F16), normal(128, 32, dtype=F16)), 2e-3),
    "dot_i8": (lambda a, b: lax.dot(
        a, b, preferred_element_type=I32), (
            integers(32, 64, low=-9, high=9, dtype=I8),
            integers(64, 32, low=-9, high=9, dtype=I8)), 0),
    "dot_batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (
        normal(3, 16, 24), normal(3, 24, 20)), 2e-5),
    "matrix_vector": (lambda a, x: a @ x, (normal(100, 50), normal(50)),
                      2e-5),
    "layer_norm": (layer_norm, (normal(9, 128), normal(128), normal(128)),
                   1e-5),
    "attention": (attention, (normal(24, 16), normal(24, 16, seed=1),
                              normal(24, 16, seed=2)), 2e-5),
    "attention_gradient": (jax.grad(
        lambda q, k, v: (attention(q, k, v) ** 2).sum(), (0, 1, 2)), (
            normal(16, 8), normal(16, 8, seed=1), normal(16, 8, seed=2)),
                           1e-4),
    "training_step": (training_step, (
        [normal(12, 32), normal(32), normal(32, 7), normal(7)],
        normal(25, 12), integers(25, low=0, high=7)), 1e-5),
    "while_loop": (newton, (jnp.abs(normal(40)) + 0.5,), 1e-5),
    "scan": (recurrence, (normal(20, 8),), 1e-5),
    "cond": (lambda i, x: lax.switch(i, [jnp.sin, jnp.exp, jnp.negative], x),
             (I32(1), normal(50)), 1e-6),
    "convolution_by_windows": (lambda x, w: sum(
        x[i : i + 30] * w[i] for i in range(5)), (normal(34), normal(5)),
                               1e-6),
    "complex": (lambda x, y: (abs(x + 1j * y), (x + 1j * y) * (y - 1j * x)), (
        normal(60), normal(60, seed=1)), 1e-5),
    "reduce_window": (lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (3, 3), (2, 2), "SAME"), (normal(20, 21),), 0),
    "trigonometry": (trigonometry, (normal(300),), 1e-5),
    "erf_inv": (lambda x: lax.erf_inv(jnp.clip(x / 4, -0.99, 0.99)), (
        normal(200),), 1e-5),
    "digamma_igamma": (lambda x: (
        lax.digamma(x), lax.igamma(x, x + 0.3)), (
            jnp.abs(normal(50)) + 0.3,), 1e-4),
    "random_normal": (lambda: jax.random.normal(jax.random.key(3), (300,)),
                      (), 1e-5),
    "random_choice": (lambda: jax.random.categorical(
        jax.random.key(5), jnp.arange(10.0) / 3, shape=(100,)), (), 0),
    "associative_scan": (lambda x: lax.associative_scan(jnp.multiply, x), (
        1 + normal(100) / 10,), 1e-4),
    "sort_pairs": (lambda x, y: lax.sort((x, y), num_keys=1), (
        integers(500), normal(500)), 0),
    "sort_large": (jnp.sort, (normal(5000),), 0),
    "sort_bf16": (jnp.sort, (normal(300, dtype=BF16),), 0),
    "top_k_large": (lambda x: lax.top_k(x, 16), (normal(3, 2000),), 0),
    "unique": (lambda x: jnp.unique(x, size=50), (
        integers(100, low=0, high=40),), 0),
    "histogram": (lambda x: jnp.histogram(x, bins=10)[0], (normal(300),), 0),
    "bincount": (lambda x: jnp.bincount(x, length=20), (
        integers(300, low=0, high=20),), 0),
    "median": (jnp.median, (normal(101),), 0),
    "scatter_max": (lambda x, i, u: (x.at[i].max(u), x.at[i].min(u)), (
        normal(64), integers(200, low=0, high=64), normal(200)), 0),
    "scatter_add_bf16": (lambda x, i, u: x.at[i].add(u), (
        normal(64, dtype=BF16), integers(64, low=0, high=64),
        normal(64, dtype=BF16)), 5e-2),
    "reductions_large": (lambda x: (x.sum(), x.mean(0), x.std(1)), (
        normal(300, 1000),), 1e-3),
    "integers_u8": (integer_arithmetic, (
        integers(300, low=0, high=255, dtype=np.uint8),
        integers(300, low=0, high=255, dtype=np.uint8, seed=1)), 0),
    "dot_large": (lambda a, b: a @ b, (normal(256, 300), normal(300, 200)),
                  1e-4),
    "dot_to_f32": (lambda a, b: jnp.dot(
        a, b, preferred_element_type=F32), (
            normal(100, 96, dtype=BF16), normal(96, 60, dtype=BF16)), 1e-2),
    "dot_fused": (gated, (normal(64, 128, dtype=BF16), normal(
        128, 64, dtype=BF16), normal(64, dtype=BF16)), 5e-2),
    "dot_product_attention": (lambda q: jax.nn.dot_product_attention(
        q, q, q, is_causal=True), (normal(2, 32, 2, 16),), 1e-4),
    "fori_loop": (lambda x: lax.fori_loop(
        0, 20, lambda i, c: c * 1.01 + i, x), (normal(40),), 1e-5),
    "searchsorted": (lambda x, y: jnp.searchsorted(jnp.sort(x), y), (
        normal(50), normal(30, seed=1)), 0),
}


def accelerators():
  return jax.devices("rocm")


def clear_fault():
  """A fault stays with the device; it shall not fail the tests after it."""
  with open("/proc/self/maps") as maps:
    found = re.search(r"/\S*libamdhip64\.so\S*", maps.read())
  if found:
    ctypes.CDLL(found[0]).amdgpu_sim_clear_fault()


def compare(test, actual, expected, tolerance):
  test.assertEqual(jax.tree.structure(actual), jax.tree.structure(expected))
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    a, e = np.asarray(a), np.asarray(e)
    test.assertEqual((a.shape, a.dtype), (e.shape, e.dtype))
    if e.dtype == bool or (not tolerance and e.dtype.kind in "iu"):
      np.testing.assert_array_equal(a, e)
      continue
    wide = np.complex128 if e.dtype.kind == "c" else np.float64
    a, e = a.astype(wide), e.astype(wide)
    finite = np.isfinite(e)
    scale = max(1.0, np.abs(e[finite]).max(initial=0)) if (
        tolerance and e.size > 1) else 1.0
    scale = min(scale, 100.0)
    np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * scale)


class ProgramTest(parameterized.TestCase):

  def tearDown(self):
    super().tearDown()
    clear_fault()

  def test_devices(self):
    self.assertLen(accelerators(), 4)
    for device in accelerators():
      self.assertEqual(device.platform, "gpu")

  @parameterized.named_parameters((n, n) for n in PROGRAMS)
  def test_matches_cpu(self, name):
    precision = "default" if name in DEFAULT_PRECISION else "highest"
    self.check(*PROGRAMS[name], precision)

  def test_doubles(self):
    with jax.enable_x64(True):
      self.check(doubles, (normal(300, dtype=np.float64) * 7, normal(
          300, dtype=np.float64, seed=1)), 1e-12)

  def test_long_integers(self):
    with jax.enable_x64(True):
      self.check(long_integers, (
          integers(300, low=-(2**62), high=2**62, dtype=np.int64),
          integers(300, low=-(2**40), high=2**40, dtype=np.int64, seed=1)), 0)

  def check(self, function, arguments, tolerance, precision="highest"):
    results = {}
    for device in (jax.devices("cpu")[0], accelerators()[0]):
      placed = jax.device_put(arguments, device)
      with (jax.default_matmul_precision(precision),
            jax.default_device(device)):
        results[device.platform] = jax.tree.map(
            np.asarray, jax.jit(function)(*placed))
    compare(self, results["gpu"], results["cpu"], tolerance)


class SeveralDevicesTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.mesh = Mesh(np.array(accelerators()), ("x",))

  def tearDown(self):
    super().tearDown()
    clear_fault()

  def mapped(self, function, outputs=SPLIT):
    return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=SPLIT,
                                 out_specs=outputs, check_vma=False))

  def put(self, x, spec=SPLIT):
    return jax.device_put(np.asarray(x), NamedSharding(self.mesh, spec))

  def test_peer_copies(self):
    x = np.arange(1000, dtype=F32)
    for device in accelerators():
      x = jax.device_put(x, device) + 1
    np.testing.assert_array_equal(x, np.arange(1000, dtype=F32) + 4)

  def test_psum(self):
    x = np.asarray(normal(8, 33))
    total = self.mapped(lambda v: lax.psum(v, "x"), outputs=P(None))(
        self.put(x))
    np.testing.assert_allclose(total, x.reshape(4, 2, 33).sum(0), rtol=1e-5,
                               atol=1e-6)

  def test_psum_bf16_and_pmax(self):
    x = np.asarray(normal(4, 16, dtype=BF16))
    low, high = self.mapped(
        lambda v: (lax.pmin(v, "x"), lax.pmax(v, "x")), outputs=P(None))(
            self.put(x))
    np.testing.assert_array_equal(low, x.min(0, keepdims=True))
    np.testing.assert_array_equal(high, x.max(0, keepdims=True))

  def test_all_gather(self):
    x = np.asarray(normal(8, 5))
    y = self.mapped(lambda v: lax.all_gather(v, "x", tiled=True) * 2,
                    outputs=P(None))(self.put(x))
    np.testing.assert_array_equal(y, x * 2)

  def test_ppermute(self):
    x = np.arange(8, dtype=I32)
    y = self.mapped(lambda v: lax.ppermute(
        v, "x", [(i, (i + 1) % 4) for i in range(4)]))(self.put(x))
    np.testing.assert_array_equal(y, np.roll(x, 2))

  def test_psum_scatter(self):
    x = np.asarray(integers(16, 8))
    y = self.mapped(lambda v: lax.psum_scatter(v, "x", tiled=True))(
        self.put(x))
    np.testing.assert_array_equal(y, x.reshape(4, 4, 8).sum(0))

  def test_all_to_all(self):
    x = np.arange(4 * 8, dtype=I32).reshape(4, 8)
    y = self.mapped(lambda v: lax.all_to_all(v, "x", 1, 0, tiled=True),
                    outputs=P(None, "x"))(self.put(x))
    np.testing.assert_array_equal(y, x)

  def test_named_sharding(self):
    a, b = np.asarray(normal(32, 48)), np.asarray(normal(48, 16))
    dot = lambda a, b: jnp.dot(a, b, precision="highest")
    product = jax.jit(dot, out_shardings=NamedSharding(self.mesh, P("x")))(
        self.put(a, P("x")), self.put(b, P(None)))
    np.testing.assert_allclose(product, a @ b, rtol=1e-4, atol=1e-5)
    # Contraction over the sharded axis: an all-reduce that XLA inserts.
    product = jax.jit(dot, out_shardings=NamedSharding(self.mesh, P()))(
        self.put(a, P(None, "x")), self.put(b, P("x")))
    np.testing.assert_allclose(product, a @ b, rtol=1e-4, atol=1e-5)

  def test_data_parallel_training_step(self):
    params = [normal(12, 32), normal(32), normal(32, 7), normal(7)]
    x, y = normal(24, 12), integers(24, low=0, high=7)
    everywhere = jax.device_put(params, NamedSharding(self.mesh, P()))
    with jax.default_matmul_precision("highest"):
      actual = jax.jit(training_step)(everywhere, self.put(x), self.put(y))
    with jax.default_device(jax.devices("cpu")[0]):
      expected = jax.jit(training_step)(
          *jax.device_put((params, x, y), jax.devices("cpu")[0]))
    compare(self, jax.tree.map(np.asarray, actual),
            jax.tree.map(np.asarray, expected), 1e-5)


class CommandBufferTest(absltest.TestCase):
  """XLA records thunks as a graph and replays it."""

  FLAGS = ("--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUDNN,"
           "COLLECTIVES --xla_gpu_graph_min_graph_size=1")

  def test_replay(self):
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), self.FLAGS])
    done = subprocess.run(
        [sys.executable, os.path.abspath(__file__), "--command_buffers"],
        env=dict(os.environ, XLA_FLAGS=flags.strip(), AMDGPU_SIM_LOG="2"),
        capture_output=True, text=True, check=False)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr[-5000:])
    self.assertIn("replayed", done.stdout)
    self.assertIn("hipGraphLaunch", done.stdout + done.stderr)


def command_buffers():
  """Runs one compiled function on changing inputs."""
  device = accelerators()[0]
  function = jax.jit(lambda x, y: jnp.sort(
      jnp.dot(x, y, precision="highest") + jnp.cumsum(y), 0) * 2)
  for seed in range(5):
    x, y = np.asarray(normal(16, 16, seed=seed)), np.asarray(
        normal(16, seed=seed + 9))
    actual = np.asarray(function(*jax.device_put((x, y), device)))
    np.testing.assert_allclose(
        actual, np.sort(x @ y + np.cumsum(y), 0) * 2, rtol=1e-4, atol=1e-4)
  print("replayed")


if __name__ == "__main__":
  if "--command_buffers" in sys.argv:
    command_buffers()
  else:
    absltest.main()
