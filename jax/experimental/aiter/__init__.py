# SPDX-License-Identifier: Apache-2.0
"""AMD's AITER operators for JAX: fused on AMD and NVIDIA GPUs, right on any.

`__init__.pyi` lists what is here. A name is imported when it is first asked
for, with the family it is of: a program waits for those that it uses.
"""

import ast
import importlib
import pathlib

from jax._src.aiter.core import dispatch as _dispatch


def _modules() -> dict[str, str]:
  """{name: the module that `__init__.pyi` imports it from}."""
  stub = pathlib.Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
  return {alias.name: node.module for node in ast.parse(stub).body
          if isinstance(node, ast.ImportFrom) for alias in node.names}


_MODULES = _modules()

__all__ = ["EXPORT_CHECKS", *sorted(_MODULES)]


def __getattr__(name: str):
  if name == "EXPORT_CHECKS":
    # For `jax.export.export(..., disabled_checks=EXPORT_CHECKS)`: JAX
    # serialises no call of a target that it does not know to be stable, unless
    # told so. These are all targets of the functions here, on ROCm and CUDA.
    for module in set(_MODULES.values()):  # Each declares its own.
      importlib.import_module(module)
    value = _dispatch.export_checks()
  elif name in _MODULES:
    value = getattr(importlib.import_module(_MODULES[name]), name)
  else:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
