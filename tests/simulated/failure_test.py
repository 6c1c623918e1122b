# SPDX-License-Identifier: Apache-2.0
"""Every call of HIP that our handlers make fails once, in turn.

The user sees an exception that says which call failed and at what. Nothing
leaks, nothing aborts, and the next call works.
"""

import os

os.environ.setdefault("AMDGPU_SIM_DEVICES", "4")

# pylint: disable=g-import-not-at-top
import gc
import time

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from harness import simulator

import jax
from jax._src.aiter.core import dispatch
from jax.experimental import aiter
from jaxlib import gpu_aiter

DEVICES = jax.local_devices(backend="rocm")
ARCH, = dispatch.architectures("rocm")


def dense(q, k, v):
  return aiter.flash_attn_func(q, k, v)


def gradients(q, k, v):
  return jax.grad(lambda *a: dense(*a).astype(jnp.float32).sum(), (0, 1, 2))(
      q, k, v)


def slopes_gradient(q, k, v, ends):
  def loss(slopes):
    out = aiter.flash_attn_varlen(q, k, v, ends, ends, alibi_slopes=slopes)
    return out.astype(jnp.float32).sum()
  return jax.grad(loss)(jnp.full((q.shape[1],), 0.1))


class FailureTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.addCleanup(simulator.fail_nothing)

  def arguments(self, fn, device, d, dtype):
    shape = (50, 2, d) if fn is slopes_gradient else (1, 50, 2, d)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    args = [q, k, np.ones(shape, dtype)]  # Then out is 1 everywhere.
    if fn is slopes_gradient:
      args.append(np.array([0, 20, 50], np.int32))
    return jax.block_until_ready(jax.device_put(args, device))

  def kernels(self, fn, d, dtype):
    module = gpu_aiter.load("rocm")
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[np.dtype(dtype).name]
    features = ["packed", "alibi"] if fn is slopes_gradient else []
    return {kernel
            for op in (["mha_fwd"] if fn is dense else ["mha_fwd", "mha_bwd"])
            for kernel in module.kernels(op, ARCH, dtype, [d, d], features)}

  def run_once(self, fn, args):
    """The result of a program compiled anew, or the text of its error.

    XLA loads a program's own code when it first runs, and never again if that
    fails.
    """
    call = jax.jit(lambda *args: fn(*args)).lower(*args).compile()
    try:
      return jax.device_get(call(*args))
    except jax.errors.JaxRuntimeError as error:
      return str(error)

  def alive(self):
    """(modules, allocations), once XLA's threads free no more of a program."""
    gc.collect()  # The last program.
    count = lambda: (simulator.live_modules(), simulator.live_allocations())
    last, now = None, count()
    while now != last:
      time.sleep(0.05)
      last, now = now, count()
    return np.array(now)

  def check_result(self, fn, result):
    result = [np.asarray(x, np.float32) for x in jax.tree.leaves(result)]
    if fn is gradients:  # out does not depend on q and k.
      np.testing.assert_allclose(result[0], 0, atol=1e-2)
      np.testing.assert_allclose(result[1], 0, atol=1e-2)
      np.testing.assert_allclose(result[2].sum(1), 50, rtol=2e-2)
    elif fn is slopes_gradient:  # Nor on slopes.
      np.testing.assert_allclose(result[0], 0, atol=0.2)
    else:
      np.testing.assert_allclose(result[0], 1, rtol=1e-2)

  # Each with kernels of its own: what is loaded stays loaded.
  @parameterized.named_parameters(
      ("load", "hipModuleLoadData", dense, 64, jnp.bfloat16, 0,
       r"Loading kernel mha_fwd_fast_bf16_64_64_gfx\w+ failed"),
      ("load_of_the_gradient", "hipModuleLoadData", gradients, 128,
       jnp.bfloat16, 0, r"Loading kernel mha_\w+_gfx\w+ failed"),
      ("lookup", "hipModuleGetFunction", dense, 64, jnp.float16, 0,
       r"Looking up kernel mha_fwd_fast_fp16_64_64_gfx\w+ failed"),
      ("lookup_of_the_gradient", "hipModuleGetFunction", gradients, 128,
       jnp.float16, 0, r"Looking up kernel mha_\w+_gfx\w+ failed"),
      ("launch", "hipModuleLaunchKernel", dense, 256, jnp.bfloat16, 0,
       r"Launching kernel mha_fwd_\w+ on a grid of \(\d+, \d+, \d+\) blocks"),
      ("launch_of_the_gradient", "hipModuleLaunchKernel", gradients, 256,
       jnp.float16, 0,
       r"Launching kernel mha_\w+ on a grid of \(\d+, \d+, \d+\) blocks"),
      ("fill_of_a_gradient", "hipMemsetD8Async", slopes_gradient, 32,
       jnp.bfloat16, 0, r"Filling \d+ bytes with 0 failed"),
      ("description", "hipGetDevicePropertiesR0600", dense, 64, jnp.bfloat16, 1,
       r"Describing device 1 failed"),
      ("current_device", "hipGetDevice", dense, 64, jnp.bfloat16, 2,
       r"Asking for the current (context|device) failed"))
  def test_call(self, name, fn, d, dtype, device, message):
    args = self.arguments(fn, DEVICES[device], d, dtype)
    kernels = self.kernels(fn, d, dtype)
    before, alive, messages = self.alive(), [], []
    use = 1
    while True:
      uses = simulator.calls(name)
      simulator.fail(name, use)
      result = self.run_once(fn, args)
      uses = simulator.calls(name) - uses
      simulator.fail_nothing()
      alive.append(self.alive() - before)
      if not isinstance(result, str):
        break
      messages.append(result)
      # The same failure twice; then the use after it, which is another one if
      # what comes before has been loaded in the meantime.
      use += messages[-2:-1] == [result]
    print(len(messages), "failures:", *messages, sep="\n  ")
    self.assertLess(uses, use)  # It was not that the error went unnoticed.
    self.check_result(fn, result)
    # What is loaded stays so, once each, whatever failed before and after.
    modules, allocations = alive[-1]
    self.assertEqual(modules, len(kernels))
    for now in alive:
      self.assertEqual(now[1] * modules, now[0] * allocations)
    ours = [m for m in messages if "aiter: " in m]
    self.assertNotEmpty(ours)
    if "kernel" in message:
      for kernel in kernels:
        self.assertRegex("\n".join(ours), rf"\b{kernel}\b")
    for text in ours:
      self.assertRegex(text, message)
      self.assertIn("HIP error 999 (unknown error)", text)

  def test_count(self):
    """What `python -m jax.experimental.aiter` asks."""
    module = gpu_aiter.load("rocm")
    self.assertEqual(module.device_count(), len(DEVICES))
    simulator.fail("hipGetDeviceCount")
    with self.assertRaisesRegex(RuntimeError, "Counting devices failed: HIP"):
      module.device_count()
    self.assertEqual(module.device_arch(3), ARCH)
    simulator.fail("hipGetDevicePropertiesR0600")
    with self.assertRaisesRegex(RuntimeError, "Describing device 3 failed"):
      module.device_arch(3)
    self.assertEqual(module.device_arch(3), ARCH)


if __name__ == "__main__":
  absltest.main()
