# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows: captured graphs, streams, threads, host time.

It needs one that has kernels. Device memory read by the host, allocation in a
handler, or a synchronisation would break the captured graph.
"""

import concurrent.futures
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from harness import machine
from harness.machine import PLATFORM
from jax.experimental.compute_on import compute_on

import jax
from jax._src.aiter.attention import op as mha_op
from jax._src.aiter.attention.types import Config, Operands
from jax._src.aiter.core.operator import Key
from jax.experimental import aiter
from jaxlib import gpu_aiter

# Run in a process of its own, because XLA reads its flags once.
GRAPH_PROGRAM = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import aiter
s = int(sys.argv[2])
q, k, v = (jax.random.normal(jax.random.key(i), (2, s, 4, 64), jnp.bfloat16)
           for i in range(3))
w = jax.random.normal(jax.random.key(3), (256, 1024), jnp.bfloat16) / 32
w8, w_scale = aiter.per_token_quant(w, quant_dtype=jnp.int8)
def loss(q, k, v, key):
  for _ in range(2):
    q = aiter.flash_attn_func(q, k, v, causal=True, dropout_p=0.1,
                              dropout_key=key)
  cu = jnp.array([0, s // 3, s // 3, 2 * s])
  flat = [t.reshape(2 * s, 4, 64) for t in (q, k, v)]
  out = aiter.flash_attn_varlen(*flat, cu, cu, causal=True)
  x = aiter.rms_norm(out.reshape(-1, 1024), jnp.ones(1024, out.dtype))
  y = aiter.gemm(x[:40], w, activation="silu")  # few rows: in parts
  x8, scale = aiter.per_token_quant(jax.lax.stop_gradient(x),
                                    quant_dtype=jnp.int8)
  y8 = aiter.gemm_i8(x8, w8, scale, w_scale)
  total = lambda t: jnp.sum(t.astype(jnp.float32) ** 2)
  return total(out) + total(y), y8
step = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
for call in range(4):  # The first is not captured; the others replay.
  outs = jax.tree.leaves(jax.device_get(
      step(q, k, v, jax.random.key(call % 2))))
  np.savez(f"{sys.argv[1]}/{call}.npz", *(o.astype(np.float32) for o in outs))
"""


class GpuTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.assertIsNone(mha_op.mha_fwd.unserved(
        PLATFORM, Key("mha_fwd", "bfloat16", (64, 64))),
                    "the GPU runs the reference")

  def inputs(self, s=None, d=64):
    s = s or machine.size(257, 0, 70)
    return [jax.random.normal(jax.random.key(i), (2, s, 4, d), jnp.bfloat16)
            for i in range(3)]

  def step(self, **options):
    def loss(*args):
      return jnp.sum(
          aiter.flash_attn_func(*args, **options).astype(jnp.float32) ** 2)
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

  def assert_same(self, got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
      np.testing.assert_array_equal(np.asarray(a, np.float32),
                                    np.asarray(b, np.float32))

  def test_the_kernel_runs(self):
    """The compiled program has our calls and not the reference."""
    text = self.step(causal=True).lower(*self.inputs()).compile().as_text()
    for op in ("mha_fwd", "mha_bwd"):
      self.assertIn(gpu_aiter.target(PLATFORM, op), text)

  def test_threads(self):
    """Eight threads compile and run different calls at once (finding 2)."""
    variants = [dict(causal=True), dict(window_size=(30, 10)),
                dict(logits_soft_cap=5.0), dict(softmax_scale=0.2)]
    args = self.inputs()
    want = [jax.device_get(self.step(**v)(*args)) for v in variants]

    def work(i):
      step = self.step(**variants[i % 4])  # a program of its own
      return [jax.device_get(step(*args)) for _ in range(5)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      jobs = range(machine.size(16, 0, 8))
      for i, results in enumerate(pool.map(work, jobs)):
        for got in results:
          self.assert_same(got, want[i % 4])

  def test_two_streams(self):
    """Calls on two streams of one program give what one stream gives."""
    q, k, v = self.inputs(s=machine.size(1000, 0, 70))
    def loss(*args):
      return jnp.sum(
          aiter.flash_attn_func(*args, causal=True).astype(jnp.float32) ** 2)
    fn = jax.grad(loss, (0, 1, 2))
    on = lambda stream: compute_on(
        fn, compute_type=f"gpu_stream:{stream}",
        out_memory_spaces=jax.memory.Space.Device)
    both = jax.jit(lambda q, k, v: (on(1)(q, k, v), on(2)(k, q, v)))
    want = fn(q, k, v), fn(k, q, v)
    for _ in range(10):
      self.assert_same(both(q, k, v), want)

  def test_captured_graph(self):
    """The handlers are recorded into a command buffer, and replay right."""
    results = []
    with tempfile.TemporaryDirectory() as root:
      for flags in ("--xla_gpu_enable_command_buffer=",
                    "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"
                    " --xla_gpu_graph_min_graph_size=1"):
        out = pathlib.Path(root, str(len(results)))
        dump = out / "dump"
        dump.mkdir(parents=True)
        subprocess.run(
            [sys.executable, "-P", "-c", GRAPH_PROGRAM, str(out),
             str(machine.size(300, 0, 60))], check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                 "XLA_FLAGS": f"{flags} --xla_dump_to={dump}"
                              " --xla_dump_hlo_module_re=.*loss.*"})
        thunks = [p.read_text() for p in dump.glob("*thunk_sequence*")]
        results.append((thunks, [
            dict(np.load(out / f"{i}.npz")) for i in range(4)]))
    (_, eager), (thunks, captured) = results
    recorded = [t for t in thunks if "kCommandBuffer" in t]
    self.assertNotEmpty(recorded, thunks)
    for text in recorded:  # Members of a command buffer are indented.
      self.assertNotRegex(text, r"(?m)^\d+: kCustomCall")
      # Attention 3 and 3, norm, product and its gradient, and two of int8.
      self.assertLen(re.findall(r"(?m)^ +\d+: kCustomCall", text), 12)
    for a, b in zip(eager, captured):
      for name in a:
        np.testing.assert_array_equal(a[name], b[name])

  # A simulated GPU shares the host's cores, which decide; a recorded graph
  # shows the same.
  @machine.where(not machine.SIMULATED)
  def test_no_host_allocation_or_sync(self):
    """Calls return while the device is still busy with them (finding 3)."""
    q, k, v = self.inputs(s=8192, d=128)
    f = jax.jit(functools.partial(aiter.flash_attn_func, causal=True))
    jax.block_until_ready(f(q, k, v))
    outs = [f(q, k, v) for _ in range(100)]
    self.assertFalse(outs[-1].is_ready())
    jax.block_until_ready(outs)

  def test_error_of_the_handler(self):
    """What only the handler can see comes back as an error, not an abort."""
    q = jnp.zeros((1, 8, 3, 64), jnp.bfloat16)
    k = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    call = jax.ffi.ffi_call(
        gpu_aiter.target(PLATFORM, "mha_fwd"),
        (q, jax.ShapeDtypeStruct((1, 3, 8), jnp.float32),
         jax.ShapeDtypeStruct((0,), jnp.int32)))
    with self.assertRaisesRegex(Exception, "head"):
      jax.block_until_ready(jax.jit(lambda q, k: call(
          *mha_op._flat(Operands(q, k, k)),
          **mha_op._attributes(Config(0.1))))(q, k))
    # The process and the device are fine afterwards.
    self.assertTrue((aiter.flash_attn_func(k, k, k) == 0).all())


if __name__ == "__main__":
  absltest.main()
