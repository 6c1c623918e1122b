# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer's logits, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.family import Family, Op, flags, named, points_to

# paged: keys lie in pages, which a table lists; tiles: those of a page in tiles
# of 16 tokens by 16 bytes.
FLAGS = flags("paged tiles")
_ELEMENTS = {"e4m3fn": "fp8e4nv", "e4m3fnuz": "fp8e4b8"}

FAMILY = Family(
    ops={"indexer_logits": Op("indexer.logits", (
        "chunks = ceil(cols / chunk)",
        "tiles = sequences * ceil(next_n / tile_m)"))},
    pointers={
        **points_to("dtype", "q k"),
        **points_to("fp32", "k_scale weights logits"),
        **points_to("i32", "table starts ends"),
    },
    constants=lambda row: {
        "TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
        "HEADS": int(row["heads"]), "DIM": int(row["dim"]),
        "PAGED": "paged" in named(row, "features")},
    element=lambda row: _ELEMENTS[row["dtype"]],
    int64=r"(k|scale)_page$",
    aligned=r"(dim|k_page)$",
    alignment=lambda row: 16,
    features=FLAGS,
)
