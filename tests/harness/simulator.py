# SPDX-License-Identifier: Apache-2.0
"""What the simulated GPU tells tests: its calls, launches, what is alive.

The functions are those that //tests/amdgpu_sim exports from the library in
HIP's place. `kernels`, `groups` and `launched` are for a family's
every_kernel_test.py: its cases come from the table of kernels in the installed
module, and each names the kernels that it is for.
"""

import contextlib
import ctypes
import functools
import re
import time

import jax
from jax._src.aiter.core import dispatch
from jaxlib import gpu_aiter


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


@functools.cache
def kernels() -> list[dict]:
  """The wheel's kernels for the simulated architecture.

  "aligned" is added: whether a kernel takes aligned operands alone.
  """
  arch, = dispatch.architectures("rocm")
  return [
      kernel | {"aligned": "_no_unaligned" in kernel["symbol"]}
      for kernel in gpu_aiter.load("rocm").table() if kernel["arch"] == arch]


def groups(ops: str, *columns: str) -> list[tuple]:
  """Values of columns of the table, and the symbols of kernels that have them.

  Args:
    ops: matches the beginnings of the operators' names.
    *columns: of the table.

  Returns:
    One tuple a group: the values, then a list of symbols.
  """
  found = {}
  for kernel in kernels():
    if re.match(ops, kernel["op"]):
      key = tuple(kernel[column] for column in columns)
      found.setdefault(key, []).append(kernel["symbol"])
  return [(*key, symbols) for key, symbols in found.items()]


@contextlib.contextmanager
def launched(test, symbols):
  """Fails the test if one of the kernels does not run meanwhile."""
  executed = lambda: sum(map(instructions, symbols))
  before = [launches(symbol) for symbol in symbols]
  start, count = time.monotonic(), executed()
  yield
  seconds, count = time.monotonic() - start, executed() - count
  print(f"{len(symbols)} kernels, {count} instructions, {seconds:.2f} s")
  test.assertGreater(count, 0)
  for symbol, launched_before in zip(symbols, before):
    test.assertGreater(launches(symbol), launched_before, symbol)
