# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass that keeps the scores' gradients."""

import dataclasses

from third_party.aiter.aot.family import Op, flags, points_to
from third_party.aiter.kernels.mha import family as mha

# The kernels' argument `flags` is attention's and one more. whole: gradients of
# scores that nobody sees are wanted too, zeros.
FLAGS = flags(" ".join([*mha.FLAGS, "whole"]))
FEATURES = {**mha.FEATURES, **FLAGS}

_KEYS = "tiles_of_keys = ceil(seqlen_k / tile_n)"
_ROWS = "tiles_of_rows = ceil(seqlen_q / tile_m)"

# Calls are attention's, and so are sizes and most arguments. Kernels for CDNA
# have gradients of scores as dbias, those for Hopper as a map.
FAMILY = dataclasses.replace(
    mha.FAMILY,
    ops={
        "mha_dscores_bwd": Op(
            "mha_dscores.hopper", (_KEYS, "nhead_k", "batch"),
            {"HEADS_FIRST": ("nhead_k", _KEYS, "batch")}),
        "mha_dscores_dq": Op(
            "mha_dscores.hopper", (_ROWS, "nhead_q", "batch"),
            {"HEADS_FIRST": ("nhead_q", _ROWS, "batch")}),
    },
    pointers={**mha.FAMILY.pointers, **points_to("dtype", "dscores dbias")},
    aligned=mha.FAMILY.aligned + r"|(stride|nhead_stride|batch_stride)_dbias$",
    features=FEATURES,
    tensors=(*mha.FAMILY.tensors, "dscores"),
)
