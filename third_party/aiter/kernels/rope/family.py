# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding's family, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    points_to,
    selecting,
)

# Of the kernel's argument `flags`; rotate.py says what each is.
FLAGS = flags(
    "gptj full transposed f32_tables per_token positions offsets cu_seqlens "
    "sections grid")


def _excluded(row):
  return {feature for option in row["options"].split()
          if option.startswith("excludes=")
          for feature in option.removeprefix("excludes=").split("+")}


def _alignment(row):
  """What divides all sizes of the calls that a row is for."""
  excluded = _excluded(row)
  if "unaligned" not in excluded:
    return 1
  return 8 if "by_four" in excluded else 4


def _constants(row):
  excluded = _excluded(row)
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "PAIRS": int(row["tile_k"]), "ALIGN": _alignment(row),
          # Flags that calls of this row may have.
          "FLAGS": sum(bit for name, bit in FLAGS.items()
                       if name not in excluded)}


_TILES = ("tiles = ceil(tokens / tile_m) * (ceil(heads_x / tile_n)"
          " + ceil(heads_y / tile_n))")

FAMILY = Family(
    ops={"rope_rotate": Op("rope.rotate", (_TILES,))},
    pointers={
        **points_to("dtype", "x y cos sin x_out y_out"),
        **points_to("fp32", "cos_f32 sin_f32"),
        **points_to("i32", "positions offsets cu_seqlens"),
    },
    constants=_constants,
    aligned=r"(dim|pairs|first|section_\d|split_\d)$",
    alignment=_alignment,
    aligned_if="unaligned",
    # A size is no multiple of 4; none of 8.
    features={**FLAGS, **selecting("unaligned by_four")},
    messages={"by_four": "sizes that 8 does not divide"},
)
