# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's import path; new code imports jax.experimental.aiter."""

from jax_aiter import mha as mha

__all__ = ["mha"]
