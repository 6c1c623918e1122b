# SPDX-License-Identifier: Apache-2.0
"""Routing's family of kernels, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.family import Family, Op, flags, points_to

# by_sum: of groups of experts the sum of the two best counts, not the best.
FEATURES = flags("by_sum")


def _constants(row):
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "GROUPS": int(row["groups"]), "SIZE": int(row["size"])}


_ENTRIES = ("parts = ceil(entries / tile_m)",)

FAMILY = Family(
    ops={
        "moe_topk": Op("moe.topk", ("rows = ceil(rows / tile_m)",)),
        "moe_count": Op("moe.sort", _ENTRIES),
        "moe_scan": Op("moe.sort", ("experts = ceil(experts / tile_n)",)),
        "moe_place": Op("moe.sort", _ENTRIES),
    },
    pointers={
        **points_to("dtype", "scores"),
        **points_to("i32", "ids counts partial place order"),
    },
    constants=_constants,
    features=FEATURES,
)
