# SPDX-License-Identifier: Apache-2.0
"""The GPU module `_aiter`: found, and its FFI targets registered, once."""

from __future__ import annotations

import threading
from types import ModuleType

from jaxlib import xla_client

from .plugin_support import import_from_plugin

_PREFIXES = {"rocm": "hip", "cuda": "cu"}
_lock = threading.Lock()
_modules: dict[str, ModuleType | None] = {}


def target(platform: str, op: str) -> str:
  """An operator's FFI target: ("rocm", "mha_fwd") -> hip_aiter_mha_fwd."""
  return f"{_PREFIXES[platform]}_aiter_{op}"


def load(platform: str) -> ModuleType | None:
  """The platform's `_aiter` with its targets registered; None if not there.

  Args:
    platform: "rocm" or "cuda".
  """
  with _lock:
    if platform not in _modules:
      module = import_from_plugin(platform, "_aiter")
      if module is not None:
        for name, capsules in module.types().items():
          xla_client.register_custom_type(
              name, capsules, platform=platform.upper())
        for name, handler in module.registrations().items():
          xla_client.register_custom_call_target(
              name, handler, platform=platform.upper(), api_version=1)
      _modules[platform] = module
    return _modules[platform]
