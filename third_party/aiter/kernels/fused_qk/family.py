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

# Of the kernels' argument `flags`; the files of kernels say what each is.
FLAGS = flags("gptj norm cache_bytes q_bytes k_scaled q_scaled v_scaled gemma"
              " joint sections f32_tables token kv_out k_runs v_runs"
              " interleaved")
# rows.py and turned.py are told of these too, unlike other kernels.
FEATURES = {**FLAGS, **selecting("unaligned partial residual gate turned e8m0"
                                 " q_out short keys rare")}


def _bits(names):
  return sum(FEATURES[name] for name in names)


def _constants(row):
  excludes = named(row, "excludes")
  return {"TILE_M": int(row["tile_m"]),
          "HEAD": int(row["head"]), "HALF": int(row["rope"]) // 2,
          # Of fused_qk_rows: columns of keys, and of the runs of a tile. Of
          # fused_qk_turned: whether a tile is of as many heads.
          "KEYS": 0 if "keys" in excludes else int(row["rope"]),
          "RUN": 128 if "short" in excludes else 32,
          "HEADS": "short" in excludes,
          "MAY": _bits(FEATURES.keys() - excludes),
          # Of fused_qk_heads: columns that are not rotated, if a call may have
          # them.
          "REST": 0 if "partial" in excludes else int(row["head"]),
          "ALIGN": 16 if "unaligned" in excludes else 1,
          "FLAGS": _bits(FLAGS.keys() - excludes),
          # Features that all of them have.
          "SURE": _bits(named(row, "features")),
          "NATIVE": "e4m3fn" in ARCHS[row["arch"]].casts}


FAMILY = Family(
    ops={
        "fused_qk_latent": Op("fused_qk.latent", (
            "tiles = tokens * (ceil(heads / tile_m) + 1)",)),
        "fused_qk_heads": Op("fused_qk.heads", (
            "tiles = tokens * (ceil(heads / tile_m) + ceil(k_heads / tile_m)"
            " + ceil(v_heads / tile_m)) if flags & JOINT else"
            " ceil(tokens * heads / tile_m) + ceil(tokens * k_heads / tile_m)"
            " + ceil(tokens * v_heads / tile_m)",)),
        "fused_qk_rows": Op("fused_qk.rows", ("tokens", "parts")),
        "fused_qk_turned": Op("fused_qk.turned", ("tokens", "parts"), {
            "HEADS": ("tokens", "tiles = ceil(parts * cols / (dim * tile_m))"
                      " * (dim // 128)")}),
    },
    pointers={
        **points_to("dtype", "q_nope q_pe kv_c k_pe weight q_out kv_cache q k v"
                    " q_weight k_weight cos_own sin_own k_out v_out k_cache"
                    " v_cache residual gate bias residual_out"),
        **points_to("fp32", "cos sin q_scale k_scale v_scale scale"),
        **points_to("u8", "q_out_bytes kv_bytes k_bytes v_bytes scale_e8m0"),
        **points_to("i32", "positions slots"),
    },
    constants=_constants,
    floats=frozenset({"eps", "k_eps", "least"}),
    int64=r"(k|v)_(start|page|scale_start|scale_page|scale_head)$",
    aligned=(r"(lora|rope|width|first|dim|pairs|cols|k_cols|"
             r"(q|k|v|table)_stride)$"),
    alignment=lambda row: 16 if "unaligned" in named(row, "excludes") else 1,
    aligned_if="unaligned",
    features=FEATURES,
    messages={"unaligned": "columns that are no multiples of 16",
              "partial": "columns that are not rotated",
              "short": "heads or groups that are no whole runs of 128 columns",
              "rare": "a bias, a gate or a scale of a rare kind"},
)
