# SPDX-License-Identifier: Apache-2.0
"""Prepares JAX for simulated AMD GPUs before any plugin is initialized.

As `jax_plugins/__init__.py` this runs when JAX is imported. The simulator's own
plugin would be too late: JAX initializes plugins in no certain order.
"""

import pkgutil

# Plugins elsewhere on the path are found all the same.
__path__ = pkgutil.extend_path(__path__, __name__)

from jax_plugins import amdgpu_sim  # noqa: E402

amdgpu_sim.initialize()
