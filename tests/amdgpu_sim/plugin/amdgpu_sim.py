# SPDX-License-Identifier: Apache-2.0
"""Simulated AMD GPUs for JAX: what JAX has to believe and to leave alone."""

import os

from jax._src import hardware_utils


def initialize() -> None:
  """Sets what the simulator needs; what the user has set stays."""
  devices = int(os.environ.get("AMDGPU_SIM_DEVICES") or 1)
  # JAX counts GPUs by files of the kernel's driver.
  hardware_utils.num_available_amd_gpus = lambda stop_at=None: min(
    devices, stop_at or devices
  )
  # Every buffer is an allocation of its own, so that the simulator can check
  # its bounds.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
  # Times would be those of the simulator: the choice would be noise.
  flags = os.environ.get("XLA_FLAGS", "")
  if "--xla_gpu_autotune_level" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
  # XLA would warn that there is no SMI. JAX has set 1 unless the user has.
  if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
