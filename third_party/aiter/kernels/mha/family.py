# SPDX-License-Identifier: Apache-2.0
"""Attention's family of kernels, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)

# The kernels' argument `flags`.
FLAGS = flags("bias bias_f32 alibi sink dropout packed cu_seqlens_q "
              "cu_seqlens_k cu_seqlens_q_padded cu_seqlens_k_padded top_left "
              "dlse mask")
FEATURES = {
    **FLAGS,
    # These only select. A window has a bound on either side; causal is one.
    **selecting("soft_cap sink_tokens window min_seqlen no_keys "
                "non_positive_scale dbias dsink unaligned short "
                "large_soft_cap odd uneven one_row"),
    "cu_seqlens": FLAGS["cu_seqlens_q"] | FLAGS["cu_seqlens_k"],
}


_GENERAL_ONLY = ("bias", "mask", "alibi", "dropout", "soft_cap", "sink_tokens",
                 "non_positive_scale", "large_soft_cap")

# In the constant FEATURES: a call may be without any of them but dropout.
MAYBE = 1 << 31


def _features_of_scores(row):
  """What changes a score, of all that a row is made for or may serve.

  Raises:
    ValueError: the kernel would read a bias wider than rows are aligned.
  """
  made_for, may = named(row, "features"), named(row, "may")
  if (not may and {"bias", "mask"} & made_for and
      "unaligned" not in named(row, "excludes")):
    raise ValueError(f"{row['op']} features={'+'.join(sorted(made_for))} must"
                     " exclude unaligned")
  return sum(FEATURES[name] for name in made_for | may) + MAYBE * bool(may)


def _features_of_kernel(row):
  """The constant FEATURES of a row's kernel."""
  if row["grade"] == "general":
    return MAYBE + sum(
        FEATURES[name] for name in (*_GENERAL_ONLY, "bias_f32"))
  return _features_of_scores(row)


def _constants(row):
  dqk, dv = int(row["dqk"]), int(row["dv"])
  arch = ARCHS[row["arch"]]
  walks = "module=mha.fwd_walks" in row["options"].split()
  if walks and not {"window", "uneven"} & named(row, "excludes"):
    raise ValueError("blocks that walk serve no window with a left edge")
  # A head dim is a power of two and a rest, which is another.
  head = 1 << (dqk.bit_length() - 1) if dqk else 0
  head_v = 1 << (dv.bit_length() - 1) if dv else 0
  return {
      "TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
      "HEAD": head, "TAIL": dqk - head, "BLOCK_DV": head_v,
      "DV_TAIL": dv - head_v,
      "FEATURES": _features_of_kernel(row),
      "PADDED": row["grade"] != "fast",
      "CHEAP_CAST": "bf16" not in arch.casts,
      "HEADS_FIRST": arch.matrix == "mfma",
      "KEEPS": row["op"].startswith("mha_dscores"),
      "LANE_KEYS": 4 if arch.matrix == "mfma" else 0,
      "WALKS": walks,
      "WINDOW": "window" not in named(row, "excludes"),
  }


# Tiles of a packed batch find their sequence themselves; find_sequence of
# kernels/core says how many there are.
_ROWS = ("tiles_of_rows = seqlen_q // tile_m + batch if flags & PACKED else"
         " ceil(seqlen_q / tile_m)")
_KEYS = ("tiles_of_keys = seqlen_k // tile_n + batch if flags & PACKED else"
         " ceil(seqlen_k / tile_n)")
_BATCH = "batch = 1 if flags & PACKED else batch"
# A block for each multiprocessor, where one walks over a dense batch's tiles.
_WALK = ("blocks = min(ceil(seqlen_q / tile_m) * nhead_q * batch,"
         " max(multiprocessors, 1))",)


def _op(module, tiles, heads):
  return Op(module, (tiles, heads, _BATCH),
            {"WALKS": _WALK, "HEADS_FIRST": (heads, tiles, _BATCH),
             "BATCH_FIRST": (_BATCH, tiles, heads)})


FAMILY = Family(
    ops={
        "mha_fwd": _op("mha.fwd", _ROWS, "nhead_q"),
        "mha_gaps": Op("mha.gaps", ("tiles = ceil(seqlen_q / tile_m)",)),
        "mha_bwd_delta": Op("mha.bwd", (_ROWS, "nhead_q", _BATCH)),
        "mha_bwd_dkdv": _op("mha.bwd", _KEYS, "nhead_k"),
        "mha_bwd_dq": _op("mha.bwd", _ROWS, "nhead_q"),
        "mha_bwd_dbias": Op("mha.bwd", (
            _KEYS, _ROWS, "bias_batches_and_heads = bias_batch * bias_nhead")),
        "mha_bwd_dsink": Op("mha.bwd", ("nhead_q", "batch")),
    },
    pointers={
        **points_to("dtype", "q k v out do dq dk dv bias"),
        **points_to("fp32", "lse delta dlse bias_f32 alibi_slopes sink d_sink "
                    "d_slopes dbias"),
        "mask": "u8",
        **points_to("i32", "cu_seqlens_q cu_seqlens_k cu_seqlens_q_padded "
                    "cu_seqlens_k_padded"),
        **points_to("u32", "dropout_state words"),
    },
    floats=frozenset({"softmax_scale", "logits_soft_cap", "rp_keep"}),
    int64=r"batch_stride_|nhead_stride_(lse|bias|mask|dbias)$",
    aligned=(r"(stride|nhead_stride|batch_stride)_(q|k|v|o|do|dq|dk|dv)$|"
             r"hdim_[qv]$"),
    constants=_constants,
    features=FEATURES,
    general_only=_GENERAL_ONLY,
    messages={
        "alibi": "ALiBi slopes", "packed": "packed sequences",
        "cu_seqlens_q": "lengths of queries", "cu_seqlens_k": "lengths of keys",
        "cu_seqlens_q_padded": "gaps between queries",
        "cu_seqlens_k_padded": "gaps between keys",
        "bias_f32": "float32 bias", "dlse": "gradient of lse",
        "dbias": "gradient of bias", "dsink": "gradient of sink",
        "top_left": "top-left alignment", "min_seqlen": "min_seqlen_q",
        "non_positive_scale": "softmax_scale <= 0",
        "short": "short sequences",
        "odd": "long sequences of heads of an odd multiple of 8 columns",
        "uneven": "tiles that blocks cannot share evenly",
        "one_row": "a bias and a mask of one row for all",
        "large_soft_cap": "soft cap above 1024",
        "unaligned": "bias or mask of rows that are not multiples of 8",
    },
    no_maps_if="no_keys",
    no_spills_up_to=128,
    tensors=("q", "k", "v", "o", "do", "dq", "dk", "dv", "bias"),
)
