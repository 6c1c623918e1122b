# SPDX-License-Identifier: Apache-2.0
"""What stands between projections and attention, fused, for the compiler."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)

# Of the kernels' argument `flags`; latent.py says what each is.
FLAGS = flags("gptj norm cache_bytes q_bytes k_scaled q_scaled")


def _constants(row):
  return {"TILE_M": int(row["tile_m"]), "HEAD": int(row["latent"]),
          "HALF": int(row["rope"]) // 2,
          "NATIVE": "e4m3fn" in ARCHS[row["arch"]].casts}


FAMILY = Family(
    ops={"fused_qk_latent": Op("fused_qk.latent", (
        "tiles = tokens * (ceil(heads / tile_m) + 1)",))},
    pointers={
        **points_to("dtype", "q_nope q_pe kv_c k_pe weight q_out kv_cache"),
        **points_to("fp32", "cos sin q_scale k_scale"),
        **points_to("u8", "q_out_bytes kv_bytes"),
        **points_to("i32", "positions slots"),
    },
    constants=_constants,
    floats=frozenset({"eps"}),
    aligned=r"(lora|rope|width|first)$",
    alignment=lambda row: 16 if "unaligned" in named(row, "excludes") else 1,
    aligned_if="unaligned",
    features={**FLAGS, **selecting("unaligned")},
    messages={"unaligned": "columns that are no multiples of 16"},
)
