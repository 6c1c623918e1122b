# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass that keeps the scores' gradients."""

import dataclasses

from third_party.aiter.aot.family import flags, named, points_to
from third_party.aiter.kernels.mha import family as mha

# The kernels' argument `flags` is attention's and one more. whole: gradients of
# scores that nobody sees are wanted too, zeros. lengths only selects: sequences
# are packed, or shorter than their arrays.
FLAGS = flags(" ".join([*mha.FLAGS, "whole", "lengths"]))
FEATURES = {**mha.FEATURES, **FLAGS}


def _constants(row):
  return {**mha.FAMILY.constants(row),
          "LENGTHS": "lengths" not in named(row, "excludes")}


# Calls are attention's, and so are sizes and most arguments. Kernels for CDNA
# have gradients of scores as dbias, those for Hopper as a map.
FAMILY = dataclasses.replace(
    mha.FAMILY,
    ops={
        f"mha_dscores_{name}": dataclasses.replace(
            mha.FAMILY.ops[f"mha_bwd_{of_two_passes}"],
            module="mha_dscores.hopper")
        for name, of_two_passes in (("bwd", "dkdv"), ("dq", "dq"))
    },
    pointers={**mha.FAMILY.pointers, **points_to("dtype", "dscores dbias")},
    aligned=mha.FAMILY.aligned + r"|(stride|nhead_stride|batch_stride)_dbias$",
    constants=_constants,
    features=FEATURES,
    tensors=(*mha.FAMILY.tensors, "dscores"),
)
