# SPDX-License-Identifier: Apache-2.0
"""Attention on four simulated GPUs gives what one gives.

The kernels run on every device, forward and backward, and XLA's collectives
carry what the partitions have to exchange. What fails on one of them is an
error, and the others do not wait for it forever.
"""

import functools
import os
import pathlib
import signal
import subprocess
import sys
import time

os.environ.setdefault("AMDGPU_SIM_DEVICES", "4")

# pylint: disable=g-import-not-at-top
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import simulator
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
import train_gpt

DEVICES = jax.local_devices(backend="rocm")
HEADS = P("x", None, "y")


def qkv(b=2, s=70, hq=4, hk=4, d=64):
  rng = np.random.default_rng(0)
  return tuple(jnp.asarray(rng.standard_normal((b, s, h, d)), jnp.bfloat16)
               for h in (hq, hk, hk))


def launches():
  """How many there were of attention, and of dk's and dv's kernels."""
  return np.array([
      sum(map(simulator.launches, symbols))
      for op in ("mha_fwd", "mha_bwd_dkdv")
      for symbols, in simulator.groups(op)])


def results(fn):
  """fn's output and the gradients of a scalar that all of it goes into."""
  def run(*args):
    def loss(*args):
      out = fn(*args)
      weights = jnp.sin(jnp.arange(out.size, dtype=jnp.float32))
      return jnp.vdot(out.astype(jnp.float32), weights), out
    return jax.grad(loss, tuple(range(len(args))), has_aux=True)(*args)
  return jax.jit(run)


def fail_on_one_device() -> None:
  """A launch fails, and no sum of all devices can end.

  In a process of its own: XLA ends it, if its flags say when.
  """
  mesh = Mesh(np.array(DEVICES), ("x",))
  place = lambda t, spec: jax.device_put(t, NamedSharding(mesh, spec))

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
  def norm(x, gain):
    y = aiter.rms_norm(x, gain)
    return y + jax.lax.psum(y, "x")

  args = (place(jnp.ones((8, 64), jnp.bfloat16), P("x")),
          place(jnp.ones(64, jnp.bfloat16), P()))
  jax.block_until_ready(norm(*args))
  simulator.fail("hipModuleLaunchKernel")
  result = norm(*args)
  parts = [shard.data for shard in result.addressable_shards]
  while not any(part.is_ready() for part in parts):
    time.sleep(0.01)
  for part in parts:
    if part.is_ready():
      try:
        part.block_until_ready()
      except jax.errors.JaxRuntimeError as error:
        print(error, flush=True)
  result.block_until_ready()


class DevicesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.assertLen(DEVICES, 4)
    self.mesh = Mesh(np.array(DEVICES).reshape(2, 2), ("x", "y"))

  def assert_close(self, got, want):
    """Partial sums of gradients are rounded to bfloat16 before they add up."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      a, b = (np.asarray(t, np.float32) for t in (a, b))
      np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max(), rtol=2e-2)

  def check(self, fn, args, specs, sharded=None):
    """fn on one device against `sharded` (fn) on four, and where it ran."""
    want = results(fn)(*args)
    before = launches()
    placed = [jax.device_put(t, NamedSharding(self.mesh, spec))
              for t, spec in zip(args, specs)]
    got = results(sharded or fn)(*placed)
    jax.block_until_ready(got)
    np.testing.assert_array_equal(launches() - before, 4)
    self.assertLen(got[1].sharding.device_set, 4)
    self.assert_close(got, want)

  @parameterized.named_parameters(
      ("batch_and_heads", 4, HEADS, HEADS),
      ("multi_query", 1, HEADS, P("x")),
      ("keys_on_all", 2, HEADS, P()))
  def test_named_sharding(self, hk, q_spec, kv_spec):
    self.check(functools.partial(aiter.flash_attn_func, causal=True),
               qkv(hk=hk), (q_spec, kv_spec, kv_spec))

  def test_shard_map(self):
    """A key head is shared by all devices: its gradient is their sum."""
    fn = functools.partial(aiter.flash_attn_func, causal=True)
    specs = (HEADS, P("x"), P("x"))
    sharded = jax.shard_map(
        fn, mesh=self.mesh, in_specs=specs, out_specs=HEADS)
    self.check(fn, qkv(hk=1), specs, sharded)

  def test_psum(self):
    """Heads on all devices, each projected, and the projections added up."""
    w = jnp.asarray(np.random.default_rng(1).standard_normal((4, 64, 16)) / 16,
                    jnp.bfloat16)

    def fn(q, k, v, w, axis=None):
      out = aiter.flash_attn_func(q, k, v, causal=True)
      y = jnp.einsum("bshd,hde->bse", out.astype(jnp.float32),
                     w.astype(jnp.float32))
      return y if axis is None else jax.lax.psum(y, axis)

    heads = P(None, None, ("x", "y"))
    specs = (heads, heads, heads, P(("x", "y")))
    sharded = jax.shard_map(
        functools.partial(fn, axis=("x", "y")), mesh=self.mesh, in_specs=specs,
        out_specs=P())
    self.check(fn, (*qkv(b=1), w), specs, sharded)

  @parameterized.parameters(
      ("ring", "striped", 4), ("ring", "zigzag", 4), ("ulysses", None, 1),
      ("ring", "zigzag", 4, dict(dropout_p=0.3)),
      ("ring", "striped", 4, {}, True),
      ("ring", "zigzag", 2, dict(window_size=(40, 0)), True))
  def test_divided_sequence(self, strategy, balance, calls, options=None,
                            slopes=False):
    """Keys go round, or are gathered, or heads are exchanged.

    Kernels do the rest, by so many calls on each device or more.
    """
    args = qkv(b=1, s=128)
    options = dict(causal=True) | (options or {})
    if "dropout_p" in options:
      options["dropout_key"] = jax.random.key(3)
    names = "q", "k", "v"
    if slopes:
      names += "alibi_slopes",
      args += jnp.linspace(0.05, 0.5, args[0].shape[2]),
    attend = lambda *t: aiter.flash_attn_func(
        **dict(zip(names, t)), **options)
    order, back = (
        functools.partial(f, strategy=balance, size=4) if balance
        else lambda t: t
        for f in (aiter.reorder_causal_load_balancing,
                  aiter.inverse_reorder_causal_load_balancing))
    mesh = Mesh(np.array(DEVICES), ("x",))
    rows = P(None, "x")
    specs = [rows] * 3 + [P()] * slopes
    local = jax.shard_map(
        lambda *t: aiter.context_parallel_attention(
            **dict(zip(names, t)), **options, axis_name="x",
            strategy=strategy, load_balance=balance),
        mesh=mesh, in_specs=tuple(specs), out_specs=rows)
    before = launches()
    placed = [jax.device_put(order(t) if spec else t, NamedSharding(mesh, spec))
              for t, spec in zip(args, specs)]
    out, vjp = jax.vjp(jax.jit(local), *placed)
    weights = jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(
        out.shape).astype(out.dtype)
    grads = vjp(jax.device_put(order(weights), NamedSharding(mesh, rows)))
    self.assertGreaterEqual(min(launches() - before), 4 * calls)
    want, want_vjp = jax.vjp(jax.jit(attend), *args)
    self.assert_close([back(t) for t in (out, *grads[:3])] + [*grads[3:]],
                      [want, *want_vjp(weights)])

  def test_divided_experts(self):
    """Rows go to their experts and back: the bits of one device."""
    rng = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    weight, ids = aiter.topk_softmax(draw(64, 8), 2)
    args = (draw(64, 64), draw(8, 128, 64) / 8, draw(8, 64, 64) / 8, weight)

    def run(layer, *args):
      out, vjp = jax.vjp(layer, *args)
      return out, vjp(out)

    want = jax.jit(functools.partial(
        run, lambda *t: aiter.fused_moe(*t, ids)))(*args)
    mesh = Mesh(np.array(DEVICES), ("x",))
    rows = NamedSharding(mesh, P("x"))
    *placed, ids = (jax.device_put(t, rows) for t in (*args, ids))
    local = jax.shard_map(
        functools.partial(aiter.expert_parallel_moe, axis_name="x"), mesh=mesh,
        in_specs=(P("x"),) * 5, out_specs=P("x"))
    (products,), = simulator.groups("gmm_[nt]")
    count = lambda: sum(map(simulator.launches, products))
    before = count()
    got = jax.jit(functools.partial(run, lambda *t: local(*t, ids)))(*placed)
    jax.block_until_ready(got)
    # Two products forwards and four backwards, on every device.
    self.assertEqual(count() - before, 4 * 6)
    # The gradient of weights is a sum over columns, by XLA.
    *got, (*got_grads, got_weight) = got
    *want, (*want_grads, want_weight) = want
    jax.tree.map(np.testing.assert_array_equal, [got, got_grads],
                 [want, want_grads])
    np.testing.assert_allclose(got_weight, want_weight, rtol=1e-6)

  def test_training(self):
    """Steps of the example's GPT over two axes, and on the host's CPU."""
    cfg = train_gpt.Config(1, 64, 4, 2, 64, 2, 2, 0.1, "bfloat16", 0.02)
    text, _ = train_gpt.corpus()

    def losses(loss_fn, placement):
      params = jax.device_put(
          train_gpt.init(cfg, jax.random.key(0)), placement)
      zeros = jax.tree.map(jnp.zeros_like, params)
      state = (jax.device_put(jnp.zeros((), jnp.int32), placement), zeros,
               zeros)

      @jax.jit
      def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        return *train_gpt.adamw(params, grads, state, cfg), loss

      found = []
      for tokens in train_gpt.batches(text, cfg, cfg.steps, 0):
        params, state, loss = step(
            params, state, jax.device_put(tokens, placement))
        found.append(float(loss))
      return found

    mesh = Mesh(np.array(DEVICES).reshape(2, 2), ("data", "context"))
    before = launches()
    got = losses(train_gpt.parallel_loss(mesh, cfg), NamedSharding(mesh, P()))
    # In both steps of the ring, on each device.
    self.assertGreaterEqual(launches()[1] - before[1], cfg.steps * 2 * 4)
    want = losses(
        functools.partial(
            train_gpt.loss_fn, ops=train_gpt.operators("aiter"), cfg=cfg),
        jax.devices("cpu")[0])
    np.testing.assert_allclose(got, want, atol=cfg.limit)

  def test_failure_of_one_device(self):
    """Its part of the result has the error; the process ends in time."""
    flags = "--xla_gpu_device_execution_terminate_timeout=5s"
    ended = subprocess.run(
        [sys.executable, __file__, fail_on_one_device.__name__], timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # With the simulator's choice a buffer's end waits for its device.
            "XLA_PYTHON_CLIENT_ALLOCATOR": "bfc",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"})
    self.assertEqual(ended.returncode, -signal.SIGABRT, ended.stdout)
    self.assertRegex(
        ended.stdout, r"aiter: Launching kernel norm_fwd\w+ on a grid of .*"
        r"failed: HIP error 999")

  def test_each_device_alone(self):
    """The same call, placed on one device after the other."""
    fn = results(functools.partial(aiter.flash_attn_func, window_size=(40, 9)))
    args = qkv(b=1, hq=1, hk=1)
    first, *others = [
        jax.device_get(fn(*jax.device_put(args, device))) for device in DEVICES]
    for other in others:
      jax.tree.map(np.testing.assert_array_equal, first, other)


if __name__ == "__main__":
  if sys.argv[1:] == [fail_on_one_device.__name__]:
    fail_on_one_device()
  else:
    absltest.main()
