# SPDX-License-Identifier: Apache-2.0
"""The norms' family, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.family import Family, points_to

# Bits of the argument `flags`; NormFeature of src/kernel_table.h has the same
# list, and unaligned rows as bit 0.
FEATURES = {"layer": 2, "residual": 4, "gemma": 8, "t5": 16, "beta": 32,
            "f32_weights": 64, "smooth": 128}


def _constants(row):
  excluded = {
      feature for option in row["options"].split()
      if option.startswith("excludes=")
      for feature in option.removeprefix("excludes=").split("+")}
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "COLS": int(row["cols"]),
          # Flags that calls of this row may have.
          "FLAGS": sum(bit for name, bit in FEATURES.items()
                       if name not in excluded),
          "NATIVE": row["arch"] == "sm_90"}


FAMILY = Family(
    ops={
        "norm_fwd": ("norm.fwd", ("tile_m",)),
        "norm_quant": ("norm.quant", ("tile_m",)),
        "norm_bwd_dx": ("norm.bwd", ("parts",)),
        "norm_bwd_parts": ("norm.bwd", ("tile_n", "parts")),
        "norm_bwd_dgamma": ("norm.bwd", ("tile_n",)),
    },
    pointers={
        **points_to(
            "dtype", "x residual gamma beta y residual_out dy dresidual dx"),
        **points_to("fp32", "gamma_f32 beta_f32 smooth scale mean rstd "
                    "dgamma_parts dbeta_parts dgamma dbeta"),
        **points_to("u8", "q scale_e8m0"),
    },
    floats=frozenset({"epsilon"}),
    aligned=r"cols$",
    aligned_if="unaligned",
    constants=_constants,
    features=frozenset({"unaligned", *FEATURES}),
    no_spills_up_to=12288,
)
