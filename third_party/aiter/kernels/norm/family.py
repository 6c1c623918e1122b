# SPDX-License-Identifier: Apache-2.0
"""The norms' family, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)

# Bits of the kernels' argument `flags`.
# Rows that do not begin at multiples of 16 bytes are a bit of no meaning there;
# a result of 4 bits only selects.
FEATURES = flags(
    "unaligned layer residual gemma t5 beta f32_weights x_scale") | selecting(
        "e2m1")


def _constants(row):
  arch = ARCHS[row["arch"]]
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "COLS": int(row["cols"]),
          "WALKS": any(f"module=norm.{module}" in row["options"]
                       for module in ("walk", "fwd_hopper", "quant_hopper")),
          "SHIFTS": "module=norm.shifted" in row["options"],
          "PAIRS": "num_ctas=2" in row["options"],
          # Flags that calls of this row may have.
          "FLAGS": sum(bit for name, bit in FEATURES.items()
                       if name not in {"unaligned", *named(row, "excludes")}),
          "NATIVE": "e4m3fn" in arch.casts,
          "CAST": arch.fp8 if arch.matrix == "mfma" else "",
          "OPAQUE": True,
          "OVERLAPS": row["arch"] == "sm_90"}


# Programs that walk over rows are as many as run at once; a part of dgamma and
# dbeta may be two blocks', half of the columns each.
_WALKING = ("blocks = min(rows, max_blocks)",)
# A program walks over rows that are multiples of eight apart.
_SHIFTING = ("blocks = min(8 * ceil(rows / (8 * tile_m)), max_blocks)",)
_PAIRS = ("blocks = parts * 2",)
_OF_ROWS = {"WALKS": _WALKING, "SHIFTS": _SHIFTING}
_ROWS = "tiles_of_rows = ceil(rows / tile_m)"
_COLS = "tiles_of_columns = ceil(cols / tile_n)"

FAMILY = Family(
    ops={
        "norm_fwd": Op("norm.fwd", (_ROWS,), _OF_ROWS),
        "norm_quant": Op("norm.quant", (_ROWS,), _OF_ROWS),
        "norm_bwd_dx": Op("norm.bwd", ("parts",), {"PAIRS": _PAIRS}),
        "norm_bwd_parts": Op("norm.bwd", (_COLS, "parts")),
        "norm_bwd_dgamma": Op("norm.bwd", (_COLS, "sums")),
    },
    pointers={
        **points_to("dtype", "x residual gamma beta y residual_out dy dresidual"
                    " dx dgamma dbeta"),
        **points_to("fp32", "gamma_f32 beta_f32 x_scale scale mean rstd "
                    "dgamma_parts dbeta_parts dgamma_f32 dbeta_f32"),
        **points_to("u8", "q scale_e8m0"),
    },
    floats=frozenset({"epsilon"}),
    aligned=r"cols$",
    aligned_if="unaligned",
    constants=_constants,
    features=FEATURES,
    no_spills_up_to=12288,
)
