# SPDX-License-Identifier: Apache-2.0
"""The grouped products' family, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)

FEATURES = {
    # Without out_f32 the result has the operands' type. lead: the first of the
    # sizes counts rows that no matrix is for.
    **flags("out_f32 lead"),
    # unaligned: rows that do not begin at multiples of 16 bytes. The layouts of
    # a problem are their names, nn without one.
    **selecting("unaligned nt tn"),
}


def _constants(row):
  tile_m, tile_n = int(row["tile_m"]), int(row["tile_n"])
  arch = ARCHS[row["arch"]]
  threads = int(row["num_warps"]) * arch.wave
  return {
      "TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": int(row["tile_k"]),
      "GROUP_M": 4,
      "XCDS": arch.xcds,
      "ALIGN": 8 if "unaligned" in named(row, "excludes") else 1,
      "SLICES": 8 if tile_m * tile_n // threads > 64 else 1,
      "WALKS": "module=gmm.hopper" in row["options"],
  }


# How many tiles of rows there are is known on the device alone: a grid has room
# for as many as there could be.
_ROWS = "tiles = tiles_of_rows * ceil(n / tile_n)"
_GROUPS = "tiles = tiles_of_rows * ceil(k / tile_m) * ceil(n / tile_n)"
_WALKING = {"WALKS": (
    "blocks = min(multiprocessors, tiles_of_rows * ceil(n / tile_n))",)}
_WALKING_GROUPS = {"WALKS": (
    "blocks = min(multiprocessors,"
    " tiles_of_rows * ceil(k / tile_m) * ceil(n / tile_n))",)}

FAMILY = Family(
    ops={
        "gmm_plan": Op("gmm.gmm", ("parts = ceil((tiles_of_rows + 1) / tile_m)",
                                   )),
        "gmm_nn": Op("gmm.gmm", (_ROWS,), _WALKING),
        "gmm_nt": Op("gmm.gmm", (_ROWS,), _WALKING),
        "gmm_tn": Op("gmm.gmm", (_GROUPS,), _WALKING_GROUPS),
    },
    pointers={
        **points_to("dtype", "a b out"),
        **points_to("fp32", "out_f32"),
        **points_to("i32", "sizes plan"),
    },
    aligned="[nk]$",
    aligned_if="unaligned",
    constants=_constants,
    features=FEATURES,
    messages={"unaligned": "rows that are not aligned"},
    no_maps_if="unaligned",
    tensors=("a", "b"),
)
