# SPDX-License-Identifier: Apache-2.0
"""Kernel or reference: the one place where a call meets its platform.

A call becomes an FFI call on ROCm and CUDA and the reference elsewhere. The
choice is staged with the computation and made when it is lowered, so a program
can be exported for a platform which the exporting machine does not have, or
which JAX's settings rule out in this process. A GPU that no kernel serves (no
plugin module, no code object for its architecture) and arguments that none
serves run the reference too, after one warning.

The reference costs as much to trace as all else, and few programs of a process
with a GPU need it: there it is traced when it is lowered.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

import jax
from jax import lax
from jaxlib import gpu_aiter

PLATFORMS = ("rocm", "cuda")
_declared: dict[str, None] = {}

# A function that is traced when it is lowered; of known results.
_later_p = type(lax.add_p)("aiter_later")
_later_p.multiple_results = True
_later_p.def_impl(lambda *args, fun, types: fun(*args))
_later_p.def_abstract_eval(lambda *_, fun, types: list(types))
mlir.register_lowering(_later_p, mlir.lower_fun(
    lambda *args, fun, types: fun(*args), multiple_results=True))


def declare(*ops: str) -> None:
  """Notes the names of operators' FFI targets, for `export_checks`."""
  _declared.update(dict.fromkeys(ops))


def export_checks() -> tuple[jax.export.DisabledSafetyCheck, ...]:
  """What `jax.export` has to be told to serialise calls of declared targets."""
  return tuple(
      jax.export.DisabledSafetyCheck.custom_call(gpu_aiter.target(p, op))
      for p in PLATFORMS for op in _declared)


def platforms_enabled() -> tuple[str, ...]:
  """GPU platforms that JAX's settings do not rule out in this process."""
  allowed = jax.config.jax_platforms
  if not allowed:
    return PLATFORMS
  names = allowed.split(",")
  return tuple(p for p in PLATFORMS if p in names or "gpu" in names)


def _devices(platform: str) -> list[jax.Device]:
  """This process's devices of a platform; none if JAX may not use it."""
  if platform not in platforms_enabled():
    return []
  try:
    return jax.local_devices(backend=platform)
  except RuntimeError:
    return []


def _architecture(platform: str, device: jax.Device) -> str:
  name = str(device.compute_capability).split(":")[0]
  return "sm_" + name.replace(".", "") if platform == "cuda" else name


@functools.cache
def architectures(platform: str) -> tuple[str, ...]:
  """Architectures of this process's devices: ("gfx942",), ("sm_90",), ()."""
  return tuple(dict.fromkeys(
      _architecture(platform, device) for device in _devices(platform)))


@functools.cache
def float8_type(device: jax.Device) -> str:
  """The float8 type that a device multiplies, by `_aiter`'s name; "" if none.

  It is that of our kernels: not known where the plugin has no `_aiter`.
  """
  for platform in PLATFORMS:
    if device in _devices(platform):
      module = gpu_aiter.load(platform)
      arch = _architecture(platform, device)
      return module.float8_type(arch) if module else ""
  return ""


def float8_dtype(device: jax.Device | None = None) -> jnp.dtype:
  """The float8 type that a device's matrix units multiply.

  Args:
    device: by default the first of the default backend.

  Returns:
    float8_e4m3fnuz of the MI300 series, float8_e4m3fn of all others. Every
    operator takes either on every device.
  """
  device = jax.local_devices()[0] if device is None else device
  return jnp.dtype(f"float8_{float8_type(device) or 'e4m3fn'}")


@functools.cache
def _warn_once(reason: str) -> None:
  warnings.warn(
      f"jax.experimental.aiter: {reason}; the reference in jax.numpy runs"
      " instead, correct but slower", RuntimeWarning, stacklevel=3)


def unserved(platform: str, dtype: str, dtypes: dict[str, str],
             kernels: Callable) -> str | None:
  """Why the devices of this process cannot run a kernel for a call, or None.

  Args:
    platform: "rocm" or "cuda".
    dtype: of the call.
    dtypes: those that kernels serve -> their names for `_aiter`.
    kernels: (_aiter, architecture, dtype's name) -> the kernels; it raises
      ValueError if there are none.
  """
  archs = architectures(platform)
  if dtype not in dtypes:
    return f"no {platform} kernel for dtype {dtype}, only for {list(dtypes)}"
  if not archs:
    return None  # Staged for another machine: its handler will tell.
  module = gpu_aiter.load(platform)
  if module is None:
    extra = {"rocm": "rocm7", "cuda": "cuda13"}[platform]
    return (f"the {platform} plugin has no module _aiter"
            f" (install jax_aiter[{extra}])")
  for arch in archs:
    try:
      kernels(module, arch, dtypes[dtype])
    except ValueError as e:
      return f"no {platform} kernel for this call on {arch}: {e}"
  return None


def dispatch(reason: Callable[[str], str | None], kernel, fallback, *args):
  """Stages kernel(platform, *args) where one is, fallback(*args) elsewhere.

  Args:
    reason: platform -> why no kernel serves the call there, or None.
    kernel: (platform, *args) -> the results.
    fallback: (*args) -> the results.
    *args: trees of arrays.
  """
  branches = {}
  for platform in PLATFORMS:
    missing = reason(platform)
    if missing is None:
      branches[platform] = functools.partial(kernel, platform)
    elif architectures(platform):
      _warn_once(missing)
  if not branches:
    return fallback(*args)
  here = next((p for p in branches if architectures(p)), None)
  if here is None:
    return lax.platform_dependent(*args, default=fallback, **branches)
  results = []

  def first(*args):
    leaves, tree = jax.tree.flatten(branches[here](*args))
    results.append((tuple(map(jax.typeof, leaves)), tree))
    return tree.unflatten(leaves)

  def later(*args):
    if not results:  # Nothing is staged: this is the choice.
      return fallback(*args)
    types, out_tree = results[0]
    leaves, tree = jax.tree.flatten(args)
    return out_tree.unflatten(_later_p.bind(
        *leaves, types=types,
        fun=lambda *x: jax.tree.leaves(fallback(*tree.unflatten(x)))))

  # JAX traces the default last.
  return lax.platform_dependent(
      *args, default=later, **(branches | {here: first}))


def absent(t, dtype):
  """t, or what stands for an operand that is not there."""
  return lax.broadcast(np.zeros((), dtype), (0,)) if t is None else t


def like(t, shape, dtype):
  """Result type of a shape and dtype that varies over t's manual mesh axes."""
  return jax.typeof(t).update(shape=tuple(shape), dtype=jnp.dtype(dtype),
                              weak_type=False)


# A program that was exported elsewhere calls its targets without being traced
# here, so they are registered as soon as this module is imported.
for _platform in platforms_enabled():
  gpu_aiter.load(_platform)
