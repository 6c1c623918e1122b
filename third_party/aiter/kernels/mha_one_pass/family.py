# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass in five products, as the compiler sees it."""

from third_party.aiter.aot.family import Family, Op, flags, points_to

# The kernels' argument `flags`. ordered: sums are added up in a fixed order.
FLAGS = flags("ordered top_left")
FEATURES = FLAGS


def _constants(row):
  return {"TILE_M": int(row["tile_m"]), "DIM": int(row["dim"])}


FAMILY = Family(
    ops={
        "mha_one_pass_bwd": Op("mha_one_pass.hopper", (
            "tiles_of_keys = ceil(seqlen_k / tile_n)", "nhead_q", "batch")),
        "mha_one_pass_round": Op("mha_one_pass.hopper", (
            "tiles_of_rows = ceil(seqlen_q / tile_m)", "nhead_q", "batch")),
    },
    pointers={
        **points_to("dtype", "dq dk dv"),
        **points_to("fp32", "lse delta dq_sums dk_sums dv_sums"),
        "turns": "i32",
    },
    floats=frozenset({"softmax_scale"}),
    int64=r"batch_stride_|nhead_stride_lse$",
    aligned=r"(stride|nhead_stride|batch_stride)_(dq|dk|dv)$",
    constants=_constants,
    features=FEATURES,
    tensors=("q", "k", "v", "o", "do", "dq", "dk", "dv"),
)
