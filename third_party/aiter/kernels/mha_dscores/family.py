# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass that keeps the scores' gradients."""

import dataclasses

from third_party.aiter.aot.family import Op, flags, points_to
from third_party.aiter.kernels.mha import family as mha

# The kernels' argument `flags` is attention's and one more. whole: gradients of
# scores that nobody sees are wanted too, zeros.
FLAGS = flags(" ".join([*mha.FLAGS, "whole"]))
FEATURES = {**mha.FEATURES, **FLAGS}

# Calls are attention's, and so are sizes and most arguments.
FAMILY = dataclasses.replace(
    mha.FAMILY,
    ops={
        "mha_dscores_bwd": Op("mha_dscores.hopper", (
            "tiles_of_keys = ceil(seqlen_k / tile_n)", "nhead_k", "batch")),
        "mha_dscores_dq": Op("mha_dscores.hopper", (
            "tiles_of_rows = ceil(seqlen_q / tile_m)", "nhead_q", "batch")),
    },
    pointers={**mha.FAMILY.pointers, **points_to("dtype", "dscores")},
    features=FEATURES,
    tensors=(*mha.FAMILY.tensors, "dscores"),
)
