# SPDX-License-Identifier: Apache-2.0
"""Two processes with a device each do what one process with two does.

On the host's CPU, where collectives are gloo's, or on two GPUs. On CPUs one of
them ends then while the other waits for it, which is an error and no hang.
"""

import functools
import os
import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from jax.experimental import aiter

PROCESSES = 2
SECONDS = 240  # A process that takes longer hangs.


def worker(rank: int, port: int) -> None:
  """One of the processes; it fails by an exception."""
  jax.distributed.initialize(f"localhost:{port}", PROCESSES, rank)
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
  assert mesh.size == PROCESSES and len(jax.local_devices()) == 1
  dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
  rng = np.random.default_rng(0)  # The same numbers in every process.
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)

  def check(one, local, args, axis):
    """Results and gradients of this process's part are those of one device."""
    specs = P(*[None] * axis, "x")

    def run(f, *args):
      out, vjp = jax.vjp(f, *args)
      return out, vjp(out)

    want = jax.jit(functools.partial(run, one))(*args)
    sharding = NamedSharding(mesh, specs)
    divided = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=specs)
    placed = [jax.make_array_from_callback(
        t.shape, sharding, np.asarray(t).__getitem__) for t in args]
    got = jax.jit(functools.partial(run, divided))(*placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      shard, = a.addressable_shards
      mine = np.asarray(b, np.float32)[shard.index]
      np.testing.assert_allclose(
          np.asarray(shard.data, np.float32), mine,
          atol=(2e-5 if dtype == jnp.float32 else 2e-2) * np.abs(mine).max(),
          rtol=0)

  m, e, k, d = 96, 8, 2, 64
  weight, ids = aiter.topk_softmax(draw(m, e).astype(jnp.float32), k)
  layer = (draw(m, d), draw(e, 2 * d, d) / 8, draw(e, d, d) / 8, weight)
  check(lambda *t: aiter.fused_moe(*t, ids),
        lambda *t: aiter.expert_parallel_moe(
            *t, jnp.take(ids.reshape(PROCESSES, -1, k),
                         jax.lax.axis_index("x"), 0), axis_name="x"),
        layer, 0)
  qkv = tuple(draw(1, 64, 4, 64) for _ in range(3))
  check(functools.partial(aiter.flash_attn_func, causal=True),
        functools.partial(aiter.context_parallel_attention, causal=True,
                          axis_name="x"), qkv, 1)
  if jax.default_backend() != "cpu":
    return
  total = jax.jit(jax.shard_map(lambda t: jax.lax.psum(t, "x"), mesh=mesh,
                                in_specs=P("x"), out_specs=P()))
  ones = jax.make_array_from_callback(
      (PROCESSES,), NamedSharding(mesh, P("x")), np.ones(PROCESSES).__getitem__)
  try:
    for _ in range(2):
      total(ones).block_until_ready()
      if rank:
        os._exit(3)
  except (RuntimeError, ValueError) as error:
    print("the other process ended:", error, flush=True)
    os._exit(0)  # Without waiting for it once more.
  raise AssertionError("a process ended, and nobody noticed")


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("localhost", 0))
    return s.getsockname()[1]


class ProcessesTest(absltest.TestCase):

  def test_two(self):
    port = free_port()
    path = os.pathsep.join(filter(None, sys.path))
    processes = [subprocess.Popen(
        [sys.executable, __file__, "worker", str(rank), str(port)],
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": str(rank),
                          "HIP_VISIBLE_DEVICES": str(rank)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for rank in range(PROCESSES)]
    try:
      texts = [p.communicate(timeout=SECONDS)[0] for p in processes]
    finally:
      for p in processes:
        p.kill()
    ended = "the other process ended" in texts[0]
    self.assertEqual(
        [p.returncode for p in processes], [0, 3 if ended else 0],
        "\n\n".join(texts))
    self.assertEqual(ended, jax.default_backend() == "cpu")


if __name__ == "__main__":
  if sys.argv[1:2] == ["worker"]:
    worker(int(sys.argv[2]), int(sys.argv[3]))
  else:
    absltest.main()
