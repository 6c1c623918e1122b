# SPDX-License-Identifier: Apache-2.0
"""The activations' family, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)

# Bits of the kernels' argument `flags`; rows.py and quant.py say what each is.
# Rows that do not begin at multiples of 16 bytes are a bit of no meaning there.
FLAGS = flags("unaligned gated packed bias bias_f32 limits out_fp16 out_bf16"
              " out_f32 e8m0 shuffled static short")
# cast: a result, or its gradient, of another type than the gate's; silu: that
# activation alone, whose kernels are half as long, which few rows wait for;
# ragged: columns that 4 does not divide.
FEATURES = FLAGS | selecting("silu ragged") | {
    "cast": sum(FLAGS[f"out_{t}"] for t in ("fp16", "bf16", "f32"))}


def _constants(row):
  arch = ARCHS[row["arch"]]
  left = 0
  for feature in named(row, "excludes"):
    left |= FEATURES[feature]
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "COLS": int(row["cols"]), "NATIVE": row["arch"] == "sm_90",
          "CAST": arch.fp8 if arch.matrix == "mfma" else "",
          "RUN": 128 if left & FLAGS["short"] else 32,
          "ONLY_SILU": "silu" in named(row, "features"),
          # Flags that calls of this row may have.
          "FLAGS": sum(FLAGS.values()) & ~left}


_TILES = ("tiles = tiles_m * tiles_n",)
# Of flat.py, whose rows have a WIDTH: it divides the columns, of which there
# are 65536 at most.
_FLAT = ("tiles = ceil(rows * cols / tile_n)",)
# Tiles of rows that an axis has, of which CUDA takes no more than 65535.
ROWS = 1 << 15
_AXES = ("tiles_n", f"min(tiles_m, {ROWS})", f"ceil(tiles_m / {ROWS})")

FAMILY = Family(
    ops={
        "activation_fwd": Op("activation.activation", _TILES,
                             {"WIDTH": _FLAT, "ONLY_SILU": _AXES}),
        "activation_bwd": Op("activation.activation", _TILES,
                             {"WIDTH": _FLAT, "ONLY_SILU": _AXES}),
        "activation_quant_row": Op(
            "activation.quant", ("tiles_of_rows = ceil(rows / tile_m)",)),
        "activation_quant_group": Op(
            "activation.quant", ("tiles = batch * tiles_m * tiles_n",)),
    },
    pointers={
        **points_to("dtype", "gate up bias out dy dgate dup"),
        **points_to("fp16", "out_fp16 dy_fp16"),
        **points_to("bf16", "out_bf16 dy_bf16"),
        **points_to("fp32", "bias_f32 out_f32 dy_f32 scale_in scale"),
        **points_to("i32", "expert_ids"),
        **points_to("u8", "q scale_e8m0"),
    },
    floats=frozenset({"alpha", "gate_limit", "up_limit"}),
    aligned=r"cols$",
    aligned_if="unaligned",
    constants=_constants,
    features=FEATURES,
    messages={"short": "groups of less than 128 columns"},
    no_spills_up_to=12288,
)
