# SPDX-License-Identifier: Apache-2.0
"""Attention of float32 tensors, as the ahead-of-time compiler sees it."""

import dataclasses

from third_party.aiter.aot.family import Op
from third_party.aiter.kernels.mha.family import FAMILY as MHA

# The calls are attention's, and so are their features. One more: products are
# to be as exact as float32's, where a matrix unit takes fewer bits of it.
FEATURES = {**MHA.features, "exact": 2 * max(MHA.features.values())}

# What the kernels do not know.
_FORMULA_ONLY = ("bias", "bias_f32", "mask", "alibi", "sink", "dropout",
                 "soft_cap", "large_soft_cap", "sink_tokens")


def _constants(row):
  return {
      "TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
      "HEAD": int(row["dqk"]), "BLOCK_DV": int(row["dv"]),
      # A row says else what a matrix unit takes of a float32 (fwd.py).
      "PRECISION": "ieee",
      "HEADS_FIRST": MHA.constants(row)["HEADS_FIRST"],
  }


def _op(op, module):
  """Attention's operation, with its grid."""
  return Op(module, MHA.ops[op].grid, MHA.ops[op].grid_if)


FAMILY = dataclasses.replace(
    MHA,
    ops={
        "mha_f32_fwd": _op("mha_fwd", "mha_f32.fwd"),
        "mha_f32_bwd_delta": _op("mha_bwd_delta", "mha_f32.bwd"),
        "mha_f32_bwd_dkdv": _op("mha_bwd_dkdv", "mha_f32.bwd"),
        "mha_f32_bwd_dq": _op("mha_bwd_dq", "mha_f32.bwd"),
    },
    constants=_constants,
    features=FEATURES,
    general_only=_FORMULA_ONLY,
    messages={**MHA.messages, "exact": "products as exact as float32's"},
    # A tile is twice as many registers as of 16-bit types. On sm_90 some spill
    # and are the fastest by measurement.
    no_spills_up_to=0,
)
