# SPDX-License-Identifier: Apache-2.0
"""Sampling's family of kernels, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import Family, Op, flags, points_to

# aligned: rows begin at multiples of 16 bytes; mask: bits say which columns are
# allowed; top_k, top_p, min_p: there are such limits, and k_first: the second
# counts of what the first leaves; probs: rows are of probabilities, not of
# logits; given: exponentials are given, not drawn; ranked: the k largest, of
# any floats in their total order. greedy, the largest column, and limit_only,
# from where on columns are kept, leave kernels out.
FEATURES = flags(
    "aligned mask top_k top_p min_p k_first probs given greedy limit_only "
    "ranked")


def _constants(row):
  return {"TILE": int(row["tile_n"]), "COLS": int(row["cols"]), "MAXIMA": 256,
          "WIDTH": 8,
          "BITS": {"bf16": 16, "fp32": 32}[row["dtype"]],
          "RETURNS": ARCHS[row["arch"]].xcds > 1}


_PARTS = ("rows", "parts")
_ROWS = ("rows",)

FAMILY = Family(
    ops={
        "sampling_largest": Op("sampling.sampling", _PARTS),
        "sampling_bound": Op("sampling.threshold", _ROWS),
        "sampling_gather": Op("sampling.threshold", _PARTS),
        "sampling_weigh": Op("sampling.threshold", _PARTS),
        "sampling_histogram": Op("sampling.threshold", _PARTS),
        "sampling_bracket": Op("sampling.threshold", _ROWS),
        "sampling_collect": Op("sampling.threshold", _PARTS),
        "sampling_threshold": Op("sampling.threshold", _ROWS),
        "sampling_race": Op("sampling.sampling", _PARTS),
        "sampling_pick": Op("sampling.sampling", _ROWS),
        "sampling_rank": Op("sampling.sampling", _ROWS),
        "sampling_select": Op("sampling.select", _ROWS),
    },
    pointers={
        **points_to("dtype", "logits values"),
        **points_to("fp32", "temperature top_p min_p exponentials"),
        **points_to("i32", "top_k mask spans candidates tokens"),
        **points_to("u32", "keys"),
        **points_to("i64", "best maxima histogram sums state"),
    },
    aligned=r"per_part$",
    constants=_constants,
    features=FEATURES,
    messages={"k_first": "order top_k_first", "ranked": "top_k of columns"},
)
