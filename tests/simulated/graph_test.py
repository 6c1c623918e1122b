# SPDX-License-Identifier: Apache-2.0
"""A HIP graph records the attention handlers once and replays them.

aiter_gpu_test compares a captured program with one that is not; here the calls
of HIP show that a graph was launched and nothing else.
"""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") +
    " --xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
    " --xla_gpu_graph_min_graph_size=1")
# This allocator gives the same buffers to every call; other buffers would make
# XLA record the graph anew.
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "bfc"

# pylint: disable=g-import-not-at-top
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from harness import simulator

import jax
from jax.experimental import aiter

KERNELS = {
    op: symbols for op in ("mha_fwd", "mha_bwd_delta", "mha_bwd_dkdv",
                           "mha_bwd_dq")
    for symbols, in simulator.groups(op)}
RECORDING = ("hipStreamBeginCapture", "hipGraphInstantiate",
             "hipModuleLaunchKernel", "hipMemsetD8Async", "hipMemsetD32Async")
CALLS = (*RECORDING, "hipGraphLaunch")


def descend(q, k, v, ends):
  """A step down the gradient of a dense and a packed call."""
  def loss(q):
    q = aiter.flash_attn_func(q, k, v, causal=True)
    flat = [t.reshape(-1, *t.shape[2:]) for t in (q, k, v)]
    out = aiter.flash_attn_varlen(*flat, ends, ends, causal=True)
    return jnp.sum(out.astype(jnp.float32) ** 2)
  return (q - jax.grad(loss)(q)).astype(q.dtype)


class GraphTest(absltest.TestCase):

  def count(self):
    return {**{op: sum(map(simulator.launches, symbols))
               for op, symbols in KERNELS.items()},
            **{name: simulator.calls(name) for name in CALLS}}

  def test_replay(self):
    rng = np.random.default_rng(0)
    q, k, v = jax.device_put([
        rng.standard_normal((2, 40, 2, 64)).astype(jnp.bfloat16)
        for _ in range(3)])
    ends = jax.device_put(np.array([0, 20, 50, 80], np.int32))
    eager = [q]
    for _ in range(6):
      eager.append(descend(eager[-1], k, v, ends))
    # The state stays where it is and changes.
    step = jax.jit(descend, donate_argnums=0)
    state = jax.block_until_ready(q + 0)
    counts = []
    for want in eager[1:]:
      before = self.count()
      state = jax.block_until_ready(step(state, k, v, ends))
      counts.append({name: n - before[name]
                     for name, n in self.count().items()})
      np.testing.assert_allclose(
          np.asarray(state, np.float32), np.asarray(want, np.float32),
          atol=3e-2, rtol=3e-2)
    for i, call in enumerate(counts):
      print(i, {name: n for name, n in call.items() if n})
    self.assertEqual(sum(c["hipGraphInstantiate"] for c in counts), 1)
    for call in counts:
      for kernel in KERNELS:
        self.assertEqual(call[kernel], 2, kernel)
    for call in counts[-3:]:
      self.assertEqual(call["hipGraphLaunch"], 1)
      for name in RECORDING:
        self.assertEqual(call[name], 0, name)

  def test_replay_prepares_nothing(self):
    """A call whose kernels are loaded costs the host of a replay nothing."""
    q, k, v = jax.device_put([
        np.random.default_rng(i).standard_normal((1, 40, 2, 64)).astype(
            jnp.bfloat16) for i in range(3)])

    def asked(calls):  # For a device, which begins every call's preparation.
      def chain(q, k, v):
        for _ in range(calls):
          q = aiter.flash_attn_func(q, k, v)
        return q
      step = jax.jit(chain)
      for _ in range(4):
        before = simulator.calls("hipGetDevice")
        jax.block_until_ready(step(q, k, v))
      return simulator.calls("hipGetDevice") - before

    self.assertEqual(asked(1), asked(6))

  def test_failure_while_recording(self):
    """It is an exception of that call; the program, compiled anew, works."""
    self.addCleanup(simulator.fail_nothing)
    q, k, v = jax.device_put([
        np.random.default_rng(i).standard_normal((1, 40, 2, 64)).astype(
            jnp.bfloat16) for i in range(3)])

    def compiled():  # XLA does not record a program again after a failure.
      return jax.jit(lambda q, k, v: aiter.flash_attn_func(
          aiter.flash_attn_func(q, k, v), k, v, causal=True))

    step = compiled()
    want = jax.device_get(step(q, k, v))  # Not recorded yet.
    simulator.fail("hipModuleLaunchKernel", 2)
    with self.assertRaisesRegex(
        jax.errors.JaxRuntimeError, "aiter: Launching kernel mha_fwd_"):
      jax.block_until_ready(step(q, k, v))
    simulator.fail_nothing()
    step = compiled()
    graphs = simulator.calls("hipGraphLaunch")
    for _ in range(4):
      np.testing.assert_array_equal(jax.device_get(step(q, k, v)), want)
    self.assertEqual(simulator.calls("hipGraphLaunch") - graphs, 3)


if __name__ == "__main__":
  absltest.main()
