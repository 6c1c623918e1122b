# SPDX-License-Identifier: Apache-2.0
"""The norms' family: its declaration, flags, and the columns' weights."""

import triton
import triton.language as tl

from third_party.aiter.aot.family import Family, points_to

# Bits of the argument `flags`; src/norm_params.h has the same list.
LAYER = tl.constexpr(1)  # Subtract the mean.
RESIDUAL = tl.constexpr(2)  # Add `residual` to x and write the sum.
GEMMA = tl.constexpr(4)  # The weight is 1 + gamma.
T5 = tl.constexpr(8)  # Round before the weight, as T5 does.
HAS_BETA = tl.constexpr(16)
F32_WEIGHTS = tl.constexpr(32)  # gamma and beta are float32, whatever x is.


@triton.jit
def load_columns(t, t_f32, c, inside, flags):
  """Elements c of gamma or beta in float32."""
  if flags & F32_WEIGHTS:
    w = tl.load(t_f32 + c, inside, 0.0)
  else:
    w = tl.load(t + c, inside, 0.0).to(tl.float32)
  return w


@triton.jit
def weight(gamma, gamma_f32, c, inside, flags):
  """The weight of columns c in float32."""
  w = load_columns(gamma, gamma_f32, c, inside, flags)
  if flags & GEMMA:
    w += 1.0
  return w


def _constants(row):
  return {"TILE_M": int(row["tile_m"]), "TILE_N": int(row["tile_n"]),
          "COLS": int(row["cols"])}


FAMILY = Family(
    ops={
        "norm_fwd": ("norm_fwd", ("tile_m",)),
        "norm_bwd_dx": ("norm_bwd", ("parts",)),
        "norm_bwd_parts": ("norm_bwd", ("tile_n", "parts")),
        "norm_bwd_dgamma": ("norm_bwd", ("tile_n",)),
    },
    pointers={
        **points_to(
            "dtype", "x residual gamma beta y residual_out dy dresidual dx"),
        **points_to("fp32", "gamma_f32 beta_f32 mean rstd dgamma_parts "
                    "dbeta_parts dgamma dbeta"),
    },
    floats=frozenset({"epsilon"}),
    aligned=r"cols$",
    aligned_if="unaligned",
    constants=_constants,
    features=frozenset({"unaligned"}),
    no_spills_up_to=8192,
)
