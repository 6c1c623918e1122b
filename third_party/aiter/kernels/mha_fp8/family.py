# SPDX-License-Identifier: Apache-2.0
"""Attention of float8 tensors, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)

# packed: sequences lie one behind the other; sink: rows have a logit without a
# value; blocks: scales differ from one block of keys to the next; short: a row
# sees so few keys that a kernel's begin and end count.
FLAGS = flags("packed sink")
FEATURES = {**FLAGS, **selecting("blocks short")}
_ELEMENTS = {"e4m3fn": "fp8e4nv", "e4m3fnuz": "fp8e4b8"}
# Of the largest weight, as a power of two that the type holds with room.
_WEIGHT_BITS = {"e4m3fn": 8, "e4m3fnuz": 7}


def _constants(row):
  return {
      "TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
      "HEAD": int(row["dim"]), "BLOCKS": "blocks" in named(row, "features"),
      "WEIGHT_BITS": _WEIGHT_BITS[row["dtype"]],
      "HEADS_FIRST": ARCHS[row["arch"]].matrix == "mfma",
      "ORDERED": ARCHS[row["arch"]].platform == "cuda",
      "OVERLAPS": row["arch"] == "sm_90",
      "WALKS": "fwd_hopper" in row["options"],
      "LISTS": "fwd_short" in row["options"],
  }


# Tiles of a packed batch find their sequence themselves. The last is the rows
# of no sequence.
_TILES = ("tiles_of_rows = seqlen_q // tile_m + batch + 1 if flags & PACKED"
          " else ceil(seqlen_q / tile_m)")
_BATCH = "batch = 1 if flags & PACKED else batch"
# A kernel may number the tiles of all heads, and then one that walks over them
# has a block for each multiprocessor.
_ITEMS = ("nhead_q * (seqlen_q // tile_m + batch + 1 if flags & PACKED"
          " else ceil(seqlen_q / tile_m) * batch)")
_LISTING = (f"items = {_ITEMS}",)
_WALKING = (f"blocks = min({_ITEMS}, max(multiprocessors, 1))",)

FAMILY = Family(
    ops={
        "mha_fp8_columns": Op("mha_fp8.columns", (
            "tiles_of_columns = columns // tile_n", "nhead_k", _BATCH)),
        "mha_fp8_fwd": Op("mha_fp8.fwd", (_TILES, "nhead_q", _BATCH),
                          {"HEADS_FIRST": ("nhead_q", _TILES, _BATCH),
                           "WALKS": _WALKING, "LISTS": _LISTING}),
    },
    pointers={
        **points_to("dtype", "q k v"), "out": "bf16",
        **points_to("u8", "v_rows v_columns"),
        **points_to("fp32", "lse scales v_scales sinks"),
        **points_to("i32", "cu_seqlens_q cu_seqlens_k"),
    },
    element=lambda row: _ELEMENTS[row["dtype"]],
    constants=_constants,
    aligned=r"(hdim|hdim_v|columns)$",
    alignment=lambda row: 16,
    features=FEATURES,
    messages={"packed": "packed sequences", "sink": "sinks",
              "blocks": "scales of blocks of keys", "short": "few keys"},
    tensors=("q", "k", "v"),
)
