# SPDX-License-Identifier: Apache-2.0
"""What tests run on, and how large they may be there.

A test names its sizes by kind of machine. A simulated GPU has the tiles of a
real one, but executes some million instructions a second: sizes on it are of
one or two tiles.
"""

import os

import jax

GPU = jax.default_backend() == "gpu"
# AMDGPU_SIM_ARCH selects what the simulator of tests/amdgpu_sim simulates.
SIMULATED = GPU and "AMDGPU_SIM_ARCH" in os.environ


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
