# SPDX-License-Identifier: Apache-2.0
"""Attention over paged KV caches, as the ahead-of-time compiler sees it."""

from third_party.aiter.aot.archs import ARCHS
from third_party.aiter.aot.family import (
    Family,
    Op,
    flags,
    named,
    points_to,
    selecting,
)
from third_party.aiter.kernels.mha.family import FEATURES as _OF_ATTENTION

# The kernels' argument `flags`; attend.py says what each is.
FLAGS = flags("cu_seqlens indptr window soft_cap alibi sink token_scales lse "
              "partial shuffled odd_pages last_pages")
# Of caches of bytes, what they hold; in the order of attend.py's constants.
KINDS = ("int8", "e4m3fn", "e4m3fnuz", "e5m2")
# unaligned: rows are no multiples of 16 bytes; unshared: a sequence is alone,
# or may have more rows than half a tile of shares_hopper.py, whose blocks share
# the keys of all; several_rows: sequences have more than a tile of 8;
# many_rows: more than in a step of decoding; short: rows see few keys, as far
# as sizes tell, or, few_tiles, a part of them; small_pages: of no multiple of
# 64 keys, which a tile of keys divides; tiny_pages: of no multiple of 16;
# no_pages: a cache of none; large_soft_cap: above 1024.
FEATURES = {
    **FLAGS, **selecting(
        "unaligned unshared several_rows many_rows short few_tiles small_pages "
        f"tiny_pages no_pages large_soft_cap bytes {' '.join(KINDS)}")}


def _constants(row):
  left, made_for = named(row, "excludes"), named(row, "features")
  kinds = [i for i, kind in enumerate(KINDS) if kind in made_for]
  arch = ARCHS[row["arch"]]
  return {
      "TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
      "HEAD": int(row["dim"]),
      "FLAGS": sum(bit for name, bit in FLAGS.items() if name not in left),
      # A kind, any kind, or no bytes.
      "KIND": kinds[0] if kinds else -1 if "bytes" in made_for else -2,
      # The kind that one instruction converts.
      "NATIVE": KINDS.index(arch.fp8) if arch.fp8 else -1,
      "CHEAP_CAST": "bf16" not in arch.casts,
      "LARGE_PAGES": "small_pages" in left,
      "ONE_LANE": arch.platform == "rocm",
      # Many rows are programs enough.
      "ONE_AXIS": (arch.platform == "cuda" and row["grade"] != "general"
                   and "many_rows" not in made_for),
      # Programs that share the columns of a row of parts.
      "MERGE_COLS": 4,
      "OVERLAPS": arch.name == "sm_90",
      # What prefill_hopper.py has of attention's.
      "FEATURES": sum(_OF_ATTENTION[name] for name in ("soft_cap", "alibi")
                      if name in made_for),
      "RAW": 0,
      "WALKS": "module=paged.prefill_walks" in row["options"].split(),
      "MERGES_ROWS": "module=paged.merge_rows" in row["options"].split(),
      "PRECISION": "ieee",
      # Keys of which none lie in two pages.
      "BOX": (64 if "small_pages" in left else 16 if "tiny_pages" in left
              else 1),
  }


def _alignment(row):
  """Elements of 16 bytes, or of the columns that a token has."""
  if "bytes" in named(row, "features"):
    return 16
  return 4 if row["dtype"] == "fp32" else 8


# A sequence's rows are its queries, each with the query heads of one KV head.
# Tiles of a packed batch find their sequence themselves: find_rows of attend.py
# says how many there are. The last owns the rows of no sequence.
_TILES = ("nhead_k * (tokens * group // tile_m + batch + 1"
          " if flags & CU_SEQLENS else"
          " batch * ceil((seqlen_q * group) / tile_m))")

FAMILY = Family(
    ops={
        "paged_attend": Op(
            "paged.attend", (f"tiles = {_TILES}", "splits"),
            # Blocks share the batch's keys, if they are divided at all; or
            # those that fill the device, of sequences of different lengths
            # attend.py's TURNS times, and one more of each tile.
            {"SHARES": ("blocks = max(programs // nhead_k, 1) * nhead_k"
                        f" if splits - 1 else {_TILES}",),
             "ONE_AXIS": (
                 f"programs = programs * min(batch, 2) + {_TILES}",),
             # A block for each multiprocessor, of which one takes tile by tile.
             "WALKS": (f"blocks = min({_TILES} * splits, blocks)",)}),
        "paged_merge": Op(
            "paged.merge", ("rows = tokens * nhead_q * merge_cols",),
            {"MERGES_ROWS": ("tiles = ceil((tokens * nhead_q) / tile_m)",)}),
    },
    pointers={
        **points_to("dtype", "q k_cache v_cache out"),
        **points_to("u8", "k_bytes v_bytes"),
        **points_to("fp32", "lse parts parts_lse k_scale v_scale sinks slopes"),
        **points_to("i32", "table indptr lengths cu_seqlens counter"),
    },
    constants=_constants,
    floats=frozenset({"softmax_scale", "logits_soft_cap"}),
    int64=r"[kv]_(start|head|scale_page|scale_head)$",
    aligned=r"([kv]_(start|page|token|head)|hdim|hdim_v)$",
    alignment=_alignment,
    aligned_if="unaligned",
    features=FEATURES,
    messages={
        "cu_seqlens": "packed queries", "indptr": "packed page tables",
        "soft_cap": "a soft cap", "alibi": "ALiBi slopes", "sink": "sinks",
        "token_scales": "scales of tokens", "lse": "lse",
        "partial": "head dimensions that are no power of two, or two of them",
        "unaligned": "head dimensions that are no multiples of 16 bytes",
        "shuffled": "a shuffled cache",
        "odd_pages": "pages of a size that is no power of two",
        "unshared": "one sequence, or more than 16 rows of a KV head",
        "several_rows": "more than 8 rows of a KV head",
        "many_rows": "many queries", "short": "few keys",
        "few_tiles": "few tiles of rows",
        "small_pages": "pages that are no multiples of 64",
        "tiny_pages": "pages that are no multiples of 16",
        "no_pages": "no pages",
        "large_soft_cap": "a soft cap above 1024",
        "bytes": "a cache of 8-bit numbers",
    },
    no_maps_if="no_pages",
    tensors=("k", "v"),
)
