# SPDX-License-Identifier: Apache-2.0
"""What the simulated GPU tells tests: its calls, launches, what is alive.

The functions are those that //tests/amdgpu_sim exports from the library in
HIP's place.
"""

import ctypes
import functools

import jax


@functools.cache
def _library() -> ctypes.CDLL:
  jax.local_devices(backend="rocm")  # JAX's plugin loads it.
  library = ctypes.CDLL("libamdhip64.so.7")
  for name, result, *arguments in (
      ("amdgpu_sim_calls", ctypes.c_uint64, ctypes.c_char_p),
      ("amdgpu_sim_launches", ctypes.c_uint64, ctypes.c_char_p),
      ("amdgpu_sim_instructions", ctypes.c_uint64, ctypes.c_char_p),
      ("amdgpu_sim_live_allocations", ctypes.c_uint64),
      ("amdgpu_sim_live_modules", ctypes.c_int),
      ("amdgpu_sim_fail", None, ctypes.c_char_p)):
    function = getattr(library, name)
    function.restype = result
    function.argtypes = arguments
  return library


def calls(name: str) -> int:
  """How often a function of HIP was called."""
  return _library().amdgpu_sim_calls(name.encode())


def launches(kernel: str) -> int:
  """How many launches of a kernel ran to their end."""
  return _library().amdgpu_sim_launches(kernel.encode())


def instructions(kernel: str) -> int:
  """How many instructions the waves of these launches executed."""
  return _library().amdgpu_sim_instructions(kernel.encode())


def live_allocations() -> int:
  return _library().amdgpu_sim_live_allocations()


def live_modules() -> int:
  return _library().amdgpu_sim_live_modules()


def fail(name: str, use: int = 1) -> None:
  """Lets one use of a function of HIP fail: the next, or the use-th."""
  _library().amdgpu_sim_fail(f"{name}:{use}".encode())


def fail_nothing() -> None:
  _library().amdgpu_sim_fail(b"")
