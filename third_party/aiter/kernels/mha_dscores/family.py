# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass that keeps the scores' gradients."""

import dataclasses

from third_party.aiter.aot.family import Op, points_to
from third_party.aiter.kernels.mha import family as mha

# Calls are attention's, and so are features, sizes and most arguments.
FAMILY = dataclasses.replace(
    mha.FAMILY,
    ops={
        "mha_dscores_bwd": Op("mha_dscores.hopper", (
            "tiles_of_keys = ceil(seqlen_k / tile_n)", "nhead_k", "batch")),
        "mha_dscores_dq": Op("mha_dscores.hopper", (
            "tiles_of_rows = ceil(seqlen_q / tile_m)", "nhead_q", "batch")),
    },
    pointers={**mha.FAMILY.pointers, **points_to("dtype", "dscores")},
    tensors=(*mha.FAMILY.tensors, "dscores"),
)
