# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention, as the ahead-of-time compiler sees it.

It is paged attention whose values are the first columns of its only keys. So
its features, arguments and merge are those of the family `paged`.
"""

import dataclasses

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import Op, points_to
from third_party.aiter.kernels.paged.family import FAMILY as _PAGED


def _constants(row):
  return {
      **_PAGED.constants({**row, "dim": row["latent"]}),
      # Which grid (below); a row has one of them at most.
      "WHOLE": 0, "SHARES": 0,
      "ROPE": int(row["rope"]),
      # A fast row's calls have its columns, neither more nor fewer.
      "PARTIAL": row["grade"] != "fast",
      # AMD's threads read 16 bytes at once of 32 columns of many parts.
      "MERGE_COLS": 16 if ARCHS[row["arch"]].platform == "rocm" else 4,
      # The generation of the matrix units.
      "CDNA": 4 if row["arch"] == "gfx950" else 3,
  }


# Of packed sequences whose tokens have whole tiles none has a place to spare:
# for kernels that know it, by STAGES, WHOLE or SHARES of their rows.
_TILES = ("(tokens * group // tile_m"
          " + (batch + 1 if group - group // tile_m * tile_m else 0)"
          " if flags & CU_SEQLENS else"
          " batch * ceil((seqlen_q * group) / tile_m))")
# Blocks share the batch's keys, if they are divided at all.
_SHARES = f"blocks = programs if splits - 1 else {_TILES}"
# No fewer than there are parts of tiles of rows, each of which has a block: a
# tile has at least one, and its share of half as many as `programs`.
_BLOCKS = f"blocks = (programs // 2 if splits - 1 else 0) + {_TILES}"

FAMILY = dataclasses.replace(
    _PAGED,
    pointers={**_PAGED.pointers, **points_to("i32", "places")},
    ops={
        "mla_attend": Op(
            "mla.attend", _PAGED.ops["paged_attend"].grid,
            {"STAGES": (_BLOCKS,), "WHOLE": (f"tiles = {_TILES}", "splits"),
             "SHARES": (_SHARES,)}),
        "mla_merge": Op("paged.merge", (
            "tiles = ceil((tokens * nhead_q) / merge_rows) * merge_cols",)),
    },
    constants=_constants,
)
