# SPDX-License-Identifier: Apache-2.0
"""Attention's family of kernels, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.family import Family, points_to


def _constants(row):
  dqk, dv = int(row["dqk"]), int(row["dv"])
  head = 1 << (dqk.bit_length() - 1) if dqk else 0
  return {
      "TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
      "HEAD": head, "TAIL": dqk - head, "BLOCK_DV": dv,
      "GENERAL": row["grade"] == "general",
      # gfx950 and NVIDIA convert to bfloat16 in one instruction.
      "CHEAP_CAST": row["arch"] in ("gfx90a", "gfx942", "gfx1100", "gfx1201"),
      "HEADS_FIRST": row["arch"].startswith("gfx9"),
      "LANE_KEYS": 4 if row["arch"].startswith("gfx9") else 0,
  }


FAMILY = Family(
    ops={
        "mha_fwd": ("mha.fwd", ("tile_m", "nhead_q", "batch")),
        "mha_bwd_delta": ("mha.bwd", ("tile_m", "nhead_q", "batch")),
        "mha_bwd_dkdv": ("mha.bwd", ("tile_n", "nhead_k", "batch")),
        "mha_bwd_dq": ("mha.bwd", ("tile_m", "nhead_q", "batch")),
        "mha_bwd_dbias": ("mha.bwd", ("tile_n", "tile_m", "bias")),
        "mha_bwd_dsink": ("mha.bwd", ("nhead_q", "batch")),
    },
    pointers={
        **points_to("dtype", "q k v out do dq dk dv bias"),
        **points_to("fp32", "lse delta dlse bias_f32 alibi_slopes sink d_sink "
                    "d_slopes dbias"),
        **points_to("i32", "cu_seqlens_q cu_seqlens_k cu_seqlens_q_padded "
                    "cu_seqlens_k_padded"),
        "dropout_state": "u32",
    },
    floats=frozenset({"scale_s", "logits_soft_cap", "rp_keep"}),
    int64=r"batch_stride_|nhead_stride_(lse|bias|dbias)$",
    aligned=(r"(stride|nhead_stride|batch_stride)_(q|k|v|o|do|dq|dk|dv)$|"
             r"hdim_[qv]$"),
    constants=_constants,
    features=frozenset({
        "alibi", "bias", "bias_f32", "cu_k", "cu_k_padded", "cu_q",
        "cu_q_padded", "cu_seqlens", "dlse", "dropout", "min_seqlen",
        "no_keys", "non_positive_scale", "sink", "sink_tokens", "soft_cap",
        "top_left", "varlen", "window",
    }),
    no_maps_if="no_keys",
    no_spills_up_to=128,
    heads_first=frozenset({"mha_fwd", "mha_bwd_dkdv", "mha_bwd_dq"}),
)
