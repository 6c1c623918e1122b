# SPDX-License-Identifier: Apache-2.0
"""The quantisers' family, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.family import Family, points_to


def _constants(row):
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "COLS": int(row["cols"]), "BLOCK": row["op"] == "quant_block",
          "NATIVE": row["arch"] == "sm_90"}


FAMILY = Family(
    ops={
        "quant_row": ("quant.quant", ("tile_m",)),
        "quant_group": ("quant.quant", ("tiles",)),
        "quant_block": ("quant.quant", ("tiles",)),
        "quant_amax": ("quant.quant", ("tiles",)),
    },
    pointers={
        "x": "dtype",
        **points_to("fp32", "smooth scale_in scale"),
        **points_to("u8", "q scale_e8m0"),
    },
    int64=r"batch_stride_",
    constants=_constants,
)
