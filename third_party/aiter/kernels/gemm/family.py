# SPDX-License-Identifier: Apache-2.0
"""The matrix products' family, as the ahead-of-time compiler sees it."""

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
_ELEMENTS = {"i8": "i8", "e4m3fn": "fp8e4nv", "e4m3fnuz": "fp8e4b8",
             "e2m1": "u8", "any": "u8"}

FEATURES = {
    # Without bias_f32 the bias has the type of out; without out_fp16 and
    # out_f32 that is bf16. a_fnuz, b_fnuz: an operand is e4m3fnuz, for kernels
    # of either fp8 type. gemm_sum: sum_i32, parts in the workspace are int32;
    # row_scaled, whole sums are to be scaled as gemm_row does.
    **flags("bias bias_f32 out_fp16 out_f32 a_fnuz b_fnuz sum_i32 row_scaled"),
    # unaligned: rows of operands that do not begin at multiples of 16 bytes or
    # lie too far apart, and parts of rows. Layouts and scales as the operations
    # have them: nn, tn, row, block, mx.
    **selecting("unaligned batched nn tn row block mx"),
}


def _alignment(row):
  """Elements in 16 bytes."""
  return 16 if row["dtype"] in _ELEMENTS else 8


def _constants(row):
  tile_m, tile_n = int(row["tile_m"]), int(row["tile_n"])
  arch = ARCHS[row["arch"]]
  threads = int(row["num_warps"]) * arch.wave
  walks = "module=gemm.hopper" in row["options"]
  (cluster,) = map(int, named(row, "cluster") or {"1"})
  return {
      "TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": int(row["tile_k"]),
      "GROUP_M": 16 if walks or row["op"] == "gemm_sum_tiles" else 4,
      "XCDS": arch.xcds,
      "ALIGN": _alignment(row) if "unaligned" in named(row, "excludes") else 1,
      "SLICES": 8 if tile_m * tile_n // threads > 64 else 1,
      "WALKS": walks,
      "EIGHTH": "module=gemm.odd" in row["options"],
      "CLUSTER": cluster, "CLUSTER_M": 1, "PINGPONG": 0,
      "PAIRS": "num_ctas=2" in row["options"] or cluster == 2,
      "FOURS": cluster == 4,
      "PROMOTE": arch.matrix == "wgmma" and row["dtype"] == "e4m3fn",
  }


_GRID = ("tiles = ceil(m / tile_m) * ceil(n / tile_n)", "splits", "batch")


def _walking(at_once, size=1):
  """The grid of a kernel that copies by tensor maps.

  A block walks over tiles, and over parts of the last ones, by itself, or a
  pair or a cluster of blocks does.
  """
  return (f"blocks = min(whole_tiles + divided_tiles * splits,"
          f" max({at_once}, 1)) * {size}",)


_OTHERS = {
    # A tile has every eighth column of eight times as many.
    "EIGHTH": (
        "tiles = ceil(m / tile_m) * ceil(ceil(n / 8) / tile_n) * 8",
        *_GRID[1:]),
    "PAIRS": _walking("blocks_at_once // 2", 2),
    # A cluster lies on 16 or 18 multiprocessors that belong together.
    "FOURS": _walking("blocks_at_once // 16 * 4", 4),
    "WALKS": _walking("blocks_at_once"),
}

FAMILY = Family(
    ops={
        **{op: Op("gemm.gemm", _GRID, _OTHERS)
           for op in ("gemm_nt", "gemm_nn", "gemm_tn", "gemm_row",
                      "gemm_block", "gemm_mx")},
        "gemm_sum": Op("gemm.gemm", (
            "tiles_of_columns = ceil(n / tile_n)",
            "tiles_of_rows = ceil(m / tile_m)", "batch")),
        "gemm_sum_tiles": Op("gemm.gemm", (
            "pieces = sum_tile_m * sum_tile_n // (tile_m * tile_n)",
            "divided_tiles")),
    },
    pointers={
        **points_to("dtype", "a b"),
        **points_to("u16", "bias"),
        **points_to("bf16", "out_bf16"),
        **points_to("u8", "a_scale_e8m0 b_scale_e8m0"),
        **points_to("fp32", "a_scale b_scale bias_f32 out_f32 workspace"),
    },
    element=lambda row: _ELEMENTS.get(row["dtype"], row["dtype"]),
    int64="batch_stride_",
    aligned="(batch_)?stride_[ab]$|k$|k_per_split$",
    alignment=_alignment,
    aligned_if="unaligned",
    constants=_constants,
    features=FEATURES,
    messages={"unaligned": "rows that are not aligned"},
    no_maps_if="unaligned",
    tensors=("a", "b", "out"),
    tuned_by=("m", "n", "k"),
    tuned_choices=("splits",),
)
