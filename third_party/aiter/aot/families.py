# SPDX-License-Identifier: Apache-2.0
"""What compile.py has to know of the kernels of each family of operators."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Family:
  """A family: the operators whose names begin with its name.

  Attributes:
    ops: op -> (module, grid axes of kernel_table.h, fastest first).
    pointers: argument -> type of what it points to; "dtype" is the row's.
    int64: matches the arguments that are 64-bit integers.
    floats: arguments that are float32. All others are 32-bit integers.
    aligned: matches the integers that are multiples of 8 elements: rows of the
      tensors are then aligned to 16 bytes, and a load may be that wide.
    constants: row -> values of the compile-time parameters.
    aligned_if: a feature that `aligned` holds without: only in rows that
      exclude it. Empty: in all rows.
    heads_first: ops whose first two grid axes the constant HEADS_FIRST swaps.
  """
  ops: Mapping[str, tuple[str, tuple[str, ...]]]
  pointers: Mapping[str, str]
  constants: Callable[[Mapping[str, str]], dict[str, int | bool]]
  floats: frozenset[str] = frozenset()
  int64: str = "$^"
  aligned: str = "$^"
  aligned_if: str = ""
  heads_first: frozenset[str] = frozenset()

  def type_of(self, name: str, dtype: str) -> str:
    """Triton's type of a run-time argument."""
    if name in self.pointers:
      pointee = self.pointers[name]
      return "*" + (dtype if pointee == "dtype" else pointee)
    if name in self.floats:
      return "fp32"
    return "i64" if re.match(self.int64, name) else "i32"


def _all(names: str, pointee: str) -> dict[str, str]:
  return {name: pointee for name in names.split()}


def _mha_constants(row):
  dqk, dv = int(row["dqk"]), int(row["dv"])
  head = 1 << (dqk.bit_length() - 1) if dqk else 0
  return {
      "TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
      "HEAD": head, "TAIL": dqk - head, "BLOCK_DV": dv,
      "GENERAL": row["grade"] == "general",
      # gfx950 and NVIDIA convert to bfloat16 in one instruction.
      "CHEAP_CAST": row["arch"] in ("gfx90a", "gfx942", "gfx1100", "gfx1201"),
      "HEADS_FIRST": row["arch"].startswith("gfx9"),
      "LANE_KEYS": 4 if row["arch"].startswith("gfx9") else 0,
  }


def _norm_constants(row):
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "COLS": int(row["cols"])}


FAMILIES = {
    "mha": Family(
        ops={
            "mha_fwd": ("mha_fwd", ("tile_m", "nhead_q", "batch")),
            "mha_bwd_delta": ("mha_bwd", ("tile_m", "nhead_q", "batch")),
            "mha_bwd_dkdv": ("mha_bwd", ("tile_n", "nhead_k", "batch")),
            "mha_bwd_dq": ("mha_bwd", ("tile_m", "nhead_q", "batch")),
            "mha_bwd_dbias": ("mha_bwd", ("tile_n", "tile_m", "bias")),
            "mha_bwd_dsink": ("mha_bwd", ("nhead_q", "batch")),
        },
        pointers={
            **_all("q k v out do dq dk dv bias", "dtype"),
            **_all("lse delta dlse bias_f32 alibi_slopes sink d_sink d_slopes "
                   "dbias", "fp32"),
            **_all("cu_seqlens_q cu_seqlens_k cu_seqlens_q_padded "
                   "cu_seqlens_k_padded", "i32"),
            "dropout_state": "u32",
        },
        floats=frozenset({"scale_s", "logits_soft_cap", "rp_keep"}),
        int64=r"batch_stride_|nhead_stride_(lse|bias|dbias)$",
        aligned=(r"(stride|nhead_stride|batch_stride)_(q|k|v|o|do|dq|dk|dv)$|"
                 r"hdim_[qv]$"),
        constants=_mha_constants,
        heads_first=frozenset({"mha_fwd", "mha_bwd_dkdv", "mha_bwd_dq"}),
    ),
    "norm": Family(
        ops={
            "norm_fwd": ("norm_fwd", ("tile_m",)),
            "norm_bwd_dx": ("norm_bwd", ("parts",)),
            "norm_bwd_parts": ("norm_bwd", ("tile_n", "parts")),
            "norm_bwd_dgamma": ("norm_bwd", ("tile_n",)),
        },
        pointers={
            **_all("x residual gamma beta y residual_out dy dresidual dx",
                   "dtype"),
            **_all("gamma_f32 beta_f32 mean rstd dgamma_parts dbeta_parts "
                   "dgamma dbeta", "fp32"),
        },
        floats=frozenset({"epsilon"}),
        aligned=r"cols$",
        aligned_if="unaligned",
        constants=_norm_constants,
    ),
}


def family_of(op: str) -> Family:
  return FAMILIES[op.split("_")[0]]
