# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding's family, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)

# Of the kernel's argument `flags`; rotate.py says what each is.
FLAGS = flags(
    "gptj full transposed f32_tables per_token positions offsets cu_seqlens "
    "sections grid")


def _alignment(row):
  """What divides the sizes of the calls that a row is for; dim: its 8."""
  left = named(row, "excludes")
  if "unaligned" not in left:
    return 1
  return 8 if "by_four" in left else 4


def _constants(row):
  left = named(row, "excludes")
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "PAIRS": int(row["tile_k"]), "ALIGN": _alignment(row),
          "WHOLE": 8 if _alignment(row) > 1 else 1,
          "RUN": int(row["tile_n"]),
          "OF_RUNS": "module=rope.whole" in row["options"],
          "OF_PARTS": "module=rope.part" in row["options"],
          # Flags that calls of this row may have.
          "FLAGS": sum(bit for name, bit in FLAGS.items()
                       if name not in left)}


_TILES = ("tiles = ceil(tokens / tile_m) * (ceil(heads_x / tile_n)"
          " + ceil(heads_y / tile_n)) * (ceil(pairs / tile_k)"
          " + ceil((dim - 2 * pairs) / (2 * tile_k)))")

# Of whole heads tile_m counts pairs, and all lie one behind the other.
_RUNS = ("blocks = ceil(tokens * heads_x * pairs / tile_m)"
         " + ceil(tokens * heads_y * pairs / tile_m)")

# Of heads turned in part it counts twos of channels, tile_n those of a run.
_PARTS = ("blocks = ceil(tokens * heads_x * ceil(dim / (2 * tile_n)) * tile_n"
          " / tile_m) + ceil(tokens * heads_y * ceil(dim / (2 * tile_n))"
          " * tile_n / tile_m)")

FAMILY = Family(
    ops={"rope_rotate": Op("rope.rotate", (_TILES,), {"OF_RUNS": (_RUNS,),
                                                      "OF_PARTS": (_PARTS,)})},
    pointers={
        **points_to("dtype", "x y cos sin x_out y_out"),
        **points_to("fp32", "cos_f32 sin_f32"),
        **points_to("i32", "positions offsets cu_seqlens"),
    },
    constants=_constants,
    aligned=r"(dim|pairs|first|section_\d|split_\d)$",
    alignment=_alignment,
    aligned_if="unaligned",
    # unaligned: dim is no multiple of 8 or another size none of 4; by_four:
    # none of 8; split: a head's pairs are not two halves, or there is more than
    # 32 bits count; partial: some of its channels are copied besides.
    features={**FLAGS, **selecting("unaligned by_four partial split")},
    messages={"by_four": "sizes that 8 does not divide"},
)
