# SPDX-License-Identifier: Apache-2.0
"""The quantisers' family, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)

# smooth_scale: x is multiplied by a factor for each column; static: scales are
# given, one a row; e8m0: they are e8m0, not float32; shuffled: they lie as
# scaled MFMA takes them; unaligned: 16 does not divide the columns.
# What a scale is for, if not a row, only selects: group, block, amax; short:
# for less than 128 columns; e2m1: numbers of 4 bits; odd: nor does 8 divide the
# columns.
FLAGS = flags("smooth_scale static e8m0 shuffled unaligned")
FEATURES = {**FLAGS, **selecting("group block amax short e2m1 odd")}


def _whole(row):
  """What divides the columns of each call that a row is for; 0: a flag."""
  left = named(row, "excludes")
  for feature, divisor in (("unaligned", 16), ("odd", 8)):
    if feature in left:
      return divisor
  return int("unaligned" in named(row, "features"))


def _constants(row):
  arch = ARCHS[row["arch"]]
  left = named(row, "excludes")
  cols = int(row["cols"])
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]) or cols,
          "COLS": cols,
          "WHOLE": _whole(row),
          "RUN": 128 if "short" in left else 32,
          # Flags that calls of this row may have.
          "FLAGS": sum(bit for name, bit in FLAGS.items() if name not in left),
          # And those that all of them have.
          "SET": sum(FLAGS.get(name, 0) for name in named(row, "features")),
          "NATIVE": "e4m3fn" in arch.casts,
          "CAST": arch.fp8 if arch.matrix == "mfma" else "",
          "WALKS": False}


_TILES = ("tiles = batch * tiles_m * tiles_n",)

FAMILY = Family(
    ops={
        "quant_row": Op(
            "quant.quant", ("tiles_of_rows = ceil(rows / tile_m)",),
            {"WALKS": ("blocks = min(rows, max_blocks)",)}),
        "quant_group": Op("quant.quant", _TILES),
        "quant_block": Op("quant.quant", _TILES),
        "quant_amax": Op("quant.quant", _TILES),
    },
    pointers={
        "x": "dtype",
        **points_to("fp32", "smooth_scale scale_in scale"),
        **points_to("u8", "q scale_e8m0"),
    },
    int64=r"batch_stride_",
    constants=_constants,
    features=FEATURES,
    messages={"short": "groups of less than 128 columns"},
)
