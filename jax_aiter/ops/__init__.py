# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.ops`, now in jax.experimental.aiter."""
