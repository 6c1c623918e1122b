# SPDX-License-Identifier: Apache-2.0
"""The grouped products' family, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)

# What the matrix unit multiplies as it is; "any": one of the float8 types.
_BYTES = {"i8": "i8", "e4m3fn": "fp8e4nv", "e4m3fnuz": "fp8e4b8",
          "e2m1": "u8", "any": "u8"}
# Of gmm_mx' first operand, in Triton's words.
_FORMATS = {"e4m3fn": "e4m3", "e2m1": "e2m1"}

FEATURES = {
    # Without out_f32 the result has the operands' type, of bytes bf16. lead:
    # the first of the sizes counts rows that no matrix is for. fnuz: operands
    # are e4m3fnuz, for kernels of either float8 type. gated: b has gates and
    # ups, and the result is silu(gate) * up. In an epilogue: pairs, gates and
    # ups take turns; bias, there is one.
    **flags("out_f32 lead fnuz gated pairs bias"),
    # unaligned: rows that do not begin at multiples of 16 bytes. The layouts of
    # a problem are their names, nn without one.
    # float8: operands are of either such type. mx, i4: b has four bits.
    # epilogue: a product's own kernel does not do all that is asked for.
    **selecting("unaligned nt tn row block float8 mx i4 epilogue"),
}


def _alignment(row):
  """Elements in 16 bytes of what has the fewest bits."""
  if row["op"] in ("gmm_mx", "gmm_i4"):
    return 32
  return 16 if row["dtype"] in _BYTES else 8


def _constants(row):
  tile_m, tile_n = int(row["tile_m"]), int(row["tile_n"])
  arch = ARCHS[row["arch"]]
  threads = int(row["num_warps"]) * arch.wave
  return {
      "TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": int(row["tile_k"]),
      "GROUP_M": 4,
      "XCDS": arch.xcds,
      "ALIGN": _alignment(row) if "unaligned" in named(row, "excludes") else 1,
      "SLICES": 8 if tile_m * tile_n // threads > 64 else 1,
      "WALKS": "module=gmm.hopper" in row["options"],
      # Triton's own way is slow on Hopper.
      "UNPACK": arch.matrix == "wgmma" and row["dtype"] == "bf16",
      "FORMAT": _FORMATS.get(row["dtype"], "bf16"),
      # Hopper adds float8 products with fewer bits than float32 has.
      "PROMOTE": arch.matrix == "wgmma" and row["dtype"] == "e4m3fn",
  }


# How many tiles of rows there are is known on the device alone: a grid has room
# for as many as there could be.
_ROWS = "tiles = tiles_of_rows * ceil(n / tile_n)"
_GROUPS = "tiles = tiles_of_rows * ceil(k / tile_m) * ceil(n / tile_n)"
_WALKING = {"WALKS": (
    "blocks = min(multiprocessors, tiles_of_rows * ceil(n / tile_n))",)}
_PAIRS = "tiles_of_rows * ceil((2 * n if flags & GATED else n) / tile_n)"
_GATES = ((f"tiles = {_PAIRS}",), {
    "WALKS": (f"blocks = min(multiprocessors, {_PAIRS})",)})
_WALKING_GROUPS = {"WALKS": (
    "blocks = min(multiprocessors,"
    " tiles_of_rows * ceil(k / tile_m) * ceil(n / tile_n))",)}

FAMILY = Family(
    ops={
        "gmm_plan": Op("gmm.gmm", ("parts = ceil((tiles_of_rows + 1) / tile_m)",
                                   )),
        "gmm_nn": Op("gmm.gmm", (_ROWS,), _WALKING),
        "gmm_nt": Op("gmm.gmm", *_GATES),
        "gmm_nn_epilogue": Op("gmm.gmm", *_GATES),
        "gmm_nt_epilogue": Op("gmm.gmm", *_GATES),
        "gmm_tn": Op("gmm.gmm", (_GROUPS,), _WALKING_GROUPS),
        "gmm_row": Op("gmm.gmm", (_ROWS,), _WALKING),
        "gmm_block": Op("gmm.gmm", (_ROWS,), _WALKING),
        "gmm_mx": Op("gmm.gmm", (_ROWS,)),
        "gmm_i4": Op("gmm.gmm", (_ROWS,)),
    },
    pointers={
        **points_to("dtype", "a b out"),
        **points_to("bf16", "out_bf16 b_scale_bf16"),
        **points_to("u8", "b_packed a_scale_e8m0 b_scale_e8m0"),
        **points_to("fp32", "out_f32 a_scale b_scale bias"),
        **points_to("i32", "sizes plan"),
    },
    floats=frozenset({"alpha", "gate_limit", "up_limit"}),
    element=lambda row: _BYTES.get(row["dtype"], row["dtype"]),
    aligned="[nk]$",
    alignment=_alignment,
    aligned_if="unaligned",
    constants=_constants,
    features=FEATURES,
    messages={"unaligned": "rows that are not aligned"},
    no_maps_if="unaligned",
    tensors=("a", "b", "out"),
)
