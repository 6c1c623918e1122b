# SPDX-License-Identifier: Apache-2.0
"""Attention's backward pass in five products, as the compiler sees it."""

from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)
from third_party.aiter.kernels.mha import family as mha

# The kernels' argument `flags` is attention's and more. ordered: sums are added
# up in a fixed order; kept: the forward pass has kept dropout's bits.
FLAGS = flags(" ".join([*mha.FLAGS, "ordered", "kept"]))
FEATURES = {
    **FLAGS,
    # Sequences are packed, or shorter than their arrays.
    **selecting("lengths"),
}


def _constants(row):
  return {
      "TILE_M": int(row["tile_m"]), "DIM": int(row["dim"]),
      "FEATURES": sum(FEATURES[name] for name in named(row, "features")),
      "LENGTHS": "lengths" not in named(row, "excludes"),
  }


_BATCH = "batch = 1 if flags & PACKED else batch"

FAMILY = Family(
    ops={
        "mha_one_pass_bwd": Op("mha_one_pass.hopper", (
            "tiles_of_keys = seqlen_k // tile_n + batch if flags & PACKED else"
            " ceil(seqlen_k / tile_n)",
            "blocks_of_heads = nhead_q // heads_of_block", _BATCH)),
        "mha_one_pass_round": Op("mha_one_pass.hopper", (
            "tiles_of_rows = (seqlen_q // 128 + batch) * 2 if flags & PACKED"
            " else ceil(seqlen_q / tile_m)", "nhead_q", _BATCH)),
    },
    pointers={
        **points_to("dtype", "q k v do dq dk dv"),
        **points_to("fp32", "lse delta dq_sums dk_sums dv_sums"),
        **points_to("i32", "turns cu_seqlens_q cu_seqlens_k "
                    "cu_seqlens_q_padded cu_seqlens_k_padded"),
        "dropout_state": "u32",
        "kept": "i32",
    },
    floats=frozenset({"softmax_scale", "rp_keep"}),
    int64=r"batch_stride_|nhead_stride_lse$",
    aligned=(r"(stride|nhead_stride|batch_stride)_(q|k|v|do|dq|dk|dv)$|"
             r"hdim_q$"),
    constants=_constants,
    features=FEATURES,
    general_only=("dropout", "kept"),
    # The producer's and the adding warp's few registers hold no more, and a
    # step reloads four numbers: nothing, by measurement.
    no_spills_up_to=0,
    tensors=("q", "k", "v", "o", "do", "dq", "dk", "dv"),
)
