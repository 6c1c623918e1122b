# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's import path; new code imports jax.experimental.aiter."""

from jax_aiter import mha as mha
from jax_aiter import rmsnorm as rmsnorm

__all__ = ["mha", "rmsnorm"]
