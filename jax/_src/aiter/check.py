# SPDX-License-Identifier: Apache-2.0
"""Says what is installed and which kernels run, and checks their numbers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pkgutil
import time
import warnings

import jax.numpy as jnp
import numpy as np

import jax
from jax._src import aiter
from jax._src.aiter.core import dispatch, operator
from jax._src.aiter.core.check import Check
from jaxlib import gpu_aiter

_PACKAGES = ("jax", "jaxlib", "jax_aiter", "jax-rocm7-plugin",
             "jax-cuda13-plugin", "jax_aiter_rocm7", "jax_aiter_cuda13")


def families() -> list:
  """Their modules `check`, of those families that have one."""
  names = [f"{aiter.__name__}.{module.name}.check"
           for module in pkgutil.iter_modules(aiter.__path__) if module.ispkg]
  found = [importlib.import_module(name) for name in names
           if importlib.util.find_spec(name)]
  return [module for module in found if hasattr(module, "checks")]


def _describe_packages() -> None:
  for name in _PACKAGES:
    try:
      print(f"  {name:20} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      pass


def _describe_kernels(checks: list[Check], platform: str, arch: str) -> None:
  module = gpu_aiter.load(platform)
  if module is None:
    print("  kernels: none, the plugin has no module _aiter")
    return
  print("  kernels for:", ", ".join(module.architectures()))
  for check in checks:
    jax.clear_caches()  # What JAX remembers it does not trace.
    with operator.asked() as keys:
      jax.eval_shape(check.call, *check.arrays)
    for key in dict.fromkeys(keys):
      try:
        kernels = module.kernels(key.op, arch, key.dtype, key.dims,
                                 key.features)
      except ValueError as e:
        kernels = [f"the reference ({e})"]
      print(f"    {check.name:34} {key.op:11}", ", ".join(kernels))


def _right(check: Check) -> bool:
  """Compares a call on the default device with its formula in float32."""
  begin = time.perf_counter()
  got = jax.block_until_ready(jax.jit(check.call)(*check.arrays))
  seconds = time.perf_counter() - begin
  with (jax.default_matmul_precision("highest"),
        warnings.catch_warnings(action="ignore")):
    want = jax.jit(check.formula)(*jax.tree.map(
        lambda t: t.astype(jnp.float32), check.arrays))
  worst = 0.0
  for a, b in zip(*(jax.tree.leaves(jax.device_get(t)) for t in (got, want)),
                  strict=True):
    a, b = np.asarray(a, np.float32), np.asarray(b)
    # Relative to the largest value; NaN is worst of all.
    error = np.max(np.abs(a - b)) / np.max(np.abs(b))
    worst = max(worst, np.inf if np.isnan(error) else error)
  good = worst < 0.02
  print(f"    {check.name:34} largest error {worst:.1e}, first call "
        f"{seconds:.2f} s", "" if good else "  WRONG")
  return good


def main() -> int:
  """Prints the report; 0 if all numbers are right, else 1."""
  print("packages")
  _describe_packages()
  device = jax.devices()[0]
  print(f"device\n  {device.platform}: {device.device_kind}, "
        f"{jax.device_count()} of them")
  checks = [check for family in families() for check in family.checks()]
  for platform in dispatch.PLATFORMS:
    for arch in dispatch.architectures(platform):
      print(f"  {platform} {arch}")
      _describe_kernels(checks, platform, arch)
  if not any(dispatch.architectures(p) for p in dispatch.PLATFORMS):
    print("  kernels: none, the reference in jax.numpy runs here")
  print("self-check against the formulas in float32, forward and backward")
  good = list(map(_right, checks))
  print("right" if all(good) else "WRONG", f"({sum(good)} of {len(good)})")
  return 0 if all(good) else 1
