# SPDX-License-Identifier: Apache-2.0
"""Says what is installed and which kernels run, and checks their numbers."""

from __future__ import annotations

import importlib.metadata
import time
import warnings

import jax.numpy as jnp
import numpy as np

import jax
from jax._src.aiter import dispatch, ffi, mha
from jax._src.aiter.types import Config, Operands, Wanted
from jaxlib import gpu_aiter

_PACKAGES = ("jax", "jaxlib", "jax_aiter", "jax-rocm7-plugin",
             "jax-cuda13-plugin", "jax_aiter_rocm7", "jax_aiter_cuda13")
# Name, head dims, whether packed, arguments of the call.
_CALLS = (
    ("causal, D 64", 64, 64, False, dict(causal=True)),
    ("causal, D 128", 128, 128, False, dict(causal=True)),
    ("causal, D 256", 256, 256, False, dict(causal=True)),
    ("causal, D 192/128", 192, 128, False, dict(causal=True)),
    ("window 64", 128, 128, False, dict(window_size=(64, 0))),
    ("packed", 128, 128, True, dict(causal=True)),
    ("soft cap, dropout", 128, 128, False,
     dict(logits_soft_cap=20.0, dropout_p=0.1)),
)


def _describe_packages() -> None:
  for name in _PACKAGES:
    try:
      print(f"  {name:18} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      pass


def _describe_kernels(platform: str, arch: str) -> None:
  module = gpu_aiter.load(platform)
  if module is None:
    print("  kernels: none, the plugin has no module _aiter")
    return
  print("  kernels for:", ", ".join(module.architectures()))
  for name, dqk, dv, packed, options in _CALLS:
    x = Operands(*(np.zeros((0,) * (3 if packed else 4), jnp.bfloat16),) * 3)
    if options.get("dropout_p"):
      x = x._replace(dropout_state=np.zeros(0, np.uint32))
    cfg = Config(
        1.0, logits_soft_cap=options.get("logits_soft_cap", 0.0),
        window_right=0 if options.get("causal") else -1,
        window_left=options.get("window_size", (-1,))[0])
    for backward in (False, True):
      asked = ffi.features(cfg, x, Wanted() if backward else None)
      try:
        kernels = module.mha_kernels(
            backward, arch, "bf16", packed, dqk, dv, list(asked))
      except ValueError as e:
        kernels = [f"the reference ({e})"]
      print(f"    {name:18} {'backward' if backward else 'forward':9}",
            ", ".join(kernels))


def _check(name: str, dqk: int, dv: int, packed: bool, options) -> bool:
  """Compares a call on the default device with the reference in float32."""
  b, sq, sk, hq, hk = 2, 200, 250, 4, 2
  lead_q, lead_k = ((b * sq,), (b * sk,)) if packed else ((b, sq), (b, sk))
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, dout = (
      jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, (
          (*lead_q, hq, dqk), (*lead_k, hk, dqk), (*lead_k, hk, dv),
          (*lead_q, hq, dv))))
  lengths = ()
  fn = mha.flash_attn_func
  if packed:
    fn = mha.flash_attn_varlen
    lengths = jnp.array([0, 150, b * sq]), jnp.array([0, 100, b * sk])
  if options.get("dropout_p"):
    options = dict(options, dropout_key=jax.random.key(1))

  @jax.jit
  def run(q, k, v, dout):
    out, vjp = jax.vjp(lambda *t: fn(*t, *lengths, **options), q, k, v)
    return out, *vjp(dout)

  begin = time.perf_counter()
  got = jax.block_until_ready(run(q, k, v, dout))
  seconds = time.perf_counter() - begin
  # float32 has no kernel: this is the reference, on purpose.
  with (jax.default_matmul_precision("highest"),
        warnings.catch_warnings(action="ignore")):
    want = run(*(t.astype(jnp.float32) for t in (q, k, v, dout)))
  worst = 0.0
  for a, b in zip(jax.device_get(got), jax.device_get(want)):
    a, b = np.asarray(a, np.float32), np.asarray(b)
    # Relative to the largest value; NaN is worst of all.
    error = np.max(np.abs(a - b)) / np.max(np.abs(b))
    worst = max(worst, np.inf if np.isnan(error) else error)
  good = worst < 0.02
  print(f"    {name:18} largest error {worst:.1e}, first call {seconds:.2f} s",
        "" if good else "  WRONG")
  return good


def main() -> int:
  """Prints the report; 0 if all numbers are right, else 1."""
  print("packages")
  _describe_packages()
  device = jax.devices()[0]
  print(f"device\n  {device.platform}: {device.device_kind}, "
        f"{jax.device_count()} of them")
  for platform in dispatch.PLATFORMS:
    for arch in dispatch.architectures(platform):
      print(f"  {platform} {arch}")
      _describe_kernels(platform, arch)
  if not any(dispatch.architectures(p) for p in dispatch.PLATFORMS):
    print("  kernels: none, the reference in jax.numpy runs here")
  print("self-check against the reference in float32, forward and backward")
  good = [_check(*call) for call in _CALLS]
  print("right" if all(good) else "WRONG", f"({sum(good)} of {len(good)})")
  return 0 if all(good) else 1
