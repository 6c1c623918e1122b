# SPDX-License-Identifier: Apache-2.0
"""What tests run on, how large they may be there, and which cases exist.

A test names its sizes by kind of machine. A simulated GPU has the tiles of a
real one, but executes some million instructions a second: sizes on it are of
one or two tiles.

Import it before anything that uses a device: it sets XLA's flags.
"""

import importlib.util
import os

# The host is eight devices, so that shardings have a mesh.
_FLAGS = ["--xla_force_host_platform_device_count=8"]

# build.py test --all: every case, at a user's level of optimisation.
ALL = os.environ.get("AITER_TESTS") == "all"
if not ALL and importlib.util.find_spec("jax_plugins") is None:
  # On a CPU the time of most tests is that of compiling small programs.
  _FLAGS += ["--xla_backend_optimization_level=0",
             "--xla_llvm_disable_expensive_passes=true",
             "--xla_cpu_parallel_codegen_split_count=1"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])

# One in so many tests is run, if the environment says so.
if not ALL and "AITER_ONE_IN" in os.environ:
  os.environ["TEST_TOTAL_SHARDS"] = os.environ["AITER_ONE_IN"]
  os.environ["TEST_SHARD_INDEX"] = "0"

# pylint: disable=g-import-not-at-top
import collections
import re

from absl.testing import absltest

import jax
from jax._src.aiter.core import dispatch
from jaxlib import gpu_aiter

GPU = jax.default_backend() == "gpu"
# AMDGPU_SIM_ARCH selects what the simulator of tests/amdgpu_sim simulates.
SIMULATED = GPU and "AMDGPU_SIM_ARCH" in os.environ
CPUS = jax.devices("cpu")
# That has our kernels: "rocm" or "cuda", its architecture; else None.
PLATFORM = next(
    (p for p in dispatch.PLATFORMS if dispatch.architectures(p)), None)
ARCH = dispatch.architectures(PLATFORM)[0] if PLATFORM else None
_DTYPES = {kernel["dtype"] for kernel in gpu_aiter.load(PLATFORM).table()
           if kernel["arch"] == ARCH} if PLATFORM else set()
if SIMULATED and not _DTYPES:
  raise RuntimeError(f"this build has no kernels for {ARCH}, so its tests would"
                     f" show nothing: build.py test --archs {ARCH}")


def has(dtype: str) -> bool:
  """Whether a simulated GPU has kernels of a type, by the table's name.

  Of gfx950's CI builds those of bfloat16 and leaves out the same of float16.
  """
  return not SIMULATED or dtype in _DTYPES


def types(dtypes: dict[str, str]) -> list[str]:
  """JAX's names of an operator's types, to the table's, that `has` says."""
  return [name for name, of_table in dtypes.items() if has(of_table)]


HALF = "fp16" if has("fp16") else "bf16"


# Of a test's numbered cases, which differ by parameters alone, one in so
# many is run each day, and all by build.py test --all.
_ONE_CASE_IN = (1 if ALL or GPU and not SIMULATED
                else int(os.environ.get("AITER_ONE_CASE_IN", 1)) if SIMULATED
                else 9)
_GOLDEN = (5**0.5 - 1) / 2


def _names(loader, tests, every=absltest.TestLoader.getTestCaseNames):
  """The names of a class' tests that are run here.

  Not cases of a type that has no kernels; of the numbered cases of a test one
  in _ONE_CASE_IN, the first always. Multiples of the golden ratio choose them:
  equal steps would meet one value alone of a parameter that has as many.
  """
  seen = collections.Counter()
  names = []
  for name in every(loader, tests):
    parameters = getattr(getattr(tests, name), "__x_params_repr__", "")
    if not has("fp16") and "'fp16'" in parameters:
      continue
    test = re.sub(r"\d+$", "", name) if parameters else name
    if seen[test] * _GOLDEN % 1 < 1 / _ONE_CASE_IN:
      names.append(name)
    seen[test] += 1
  return names


absltest.TestLoader.getTestCaseNames = _names


def daily(items, one_in: int):
  """All items in `build.py test --all`; else one in so many, from the first."""
  return list(items)[::1 if ALL else one_in]


def size(gpu, cpu, simulated=None):
  """The size for this machine; a simulated GPU's is by default a GPU's."""
  if SIMULATED and simulated is not None:
    return simulated
  return gpu if GPU else cpu


def sample(items, simulated: int):
  """All items; on a simulated GPU so many of them, evenly spread."""
  items = list(items)
  if not SIMULATED or len(items) <= simulated:
    return items
  return [items[i * len(items) // simulated] for i in range(simulated)]


def where(condition: bool):
  """Decorates a test, or a class of tests, that exists if so.

  What cannot apply here is not run, rather than skipped. Other attributes of a
  class stay, for those that inherit from it.
  """
  def decorate(test):
    if condition:
      return test
    if not isinstance(test, type):
      return None
    for name in [n for n in vars(test) if n.startswith("test")]:
      delattr(test, name)
    return test
  return decorate
