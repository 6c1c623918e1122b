# SPDX-License-Identifier: Apache-2.0
"""The family of KV-cache writes, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import Family, Op, flags, points_to, selecting

# aligned: a multiple of 16 bytes' columns; runs: their places in the cache are
# such multiples too, and lie together; scaled: a scale is given; beside: tokens
# of a page, and not columns, lie side by side; v_...: the same of values;
# power: scales are powers of two; fp16, fp32: what keys and values are, if not
# bf16. What only selects: strided, for who is not of runs; odd, for float32,
# keys and values of other columns, places neither of runs nor beside; types of
# what is written; long: a block that is no 16 slots; few: so few tokens that
# each is worth a program, whatever block it is of.
FEATURES = flags("aligned runs scaled beside v_aligned v_runs v_scaled v_beside"
                 " power fp16 fp32") | selecting(
                     "strided odd e4m3fn e4m3fnuz e5m2 long few")
# A copy is of bits.
_BITS = {"bf16": "i16", "fp16": "i16", "fp32": "i32", "i8": "i8", "any": "i8"}
_RUN = {"bf16": 8, "fp16": 8, "fp32": 4, "i8": 16, "any": 16}


def _constants(row):
  of_runs = "excludes=strided" in row["options"]
  arch = ARCHS[row["arch"]]
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "COLS": int(row["cols"]), "RUN": _RUN[row["dtype"]],
          "FLAGS": FEATURES["aligned"] | FEATURES["runs"] if of_runs else 0,
          "NATIVE": "e4m3fn" in arch.casts,
          "CAST": {"mfma": arch.fp8, "wgmma": "ptx"}.get(arch.matrix, ""),
          "HALF": row["dtype"] == "fp16",
          "EXACT": row["grade"] == "fast",
          "OPAQUE": arch.matrix == "mfma",
          "WALKS": "module=cache.walk" in row["options"]}


_TILES = ("tiles = ceil(tokens / tile_m) * heads *"
          " (ceil(k_cols / tile_n) + ceil(v_cols / tile_n))")

# Programs that walk over tiles are as many as run at once.
_WALKING = {"WALKS": (
    "blocks = min(ceil(tokens / tile_m) * heads, ceil(max_blocks / halves))",
    "halves")}

FAMILY = Family(
    ops={
        "cache_copy": Op("cache.write", (_TILES,)),
        "cache_cast": Op("cache.write", (_TILES,), _WALKING),
        "cache_token": Op(
            "cache.write",
            ("tiles = ceil(tokens / tile_m) * heads * halves",), _WALKING),
        "cache_block": Op(
            "cache.write", ("parts = ceil(tokens / step) * heads * halves",),
            _WALKING),
    },
    pointers={
        # Of numbers that are rounded, the kernels know the type.
        **points_to("dtype", "key value k_cache v_cache"),
        **points_to("u8", "k_bytes v_bytes"),
        **points_to("fp32", "k_scale v_scale"),
        **points_to("i32", "slots winners"),
    },
    element=lambda row: _BITS[row["dtype"]],
    floats=frozenset({"floor"}),
    int64=r".*(_start|_page|_scale_head)$",
    constants=_constants,
    features=FEATURES,
)
