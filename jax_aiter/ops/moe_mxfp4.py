# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's `jax_aiter.ops.moe_mxfp4`, now in jax.experimental.aiter."""

from jax.experimental.aiter import (
    grouped_mxfp4_dw,
    grouped_mxfp4_fwd_da,
    quantize_mxfp4_dim0,
    quantize_mxfp4_dim1,
)

__all__ = ["grouped_mxfp4_dw", "grouped_mxfp4_fwd_da", "quantize_mxfp4_dim0",
           "quantize_mxfp4_dim1"]
