# SPDX-License-Identifier: Apache-2.0
"""Names of AITER's Triton functions for norms around attention.

They have its orders of arguments and of results, but for arrays that it writes
into. What they compute is of norms.py and of the quantisers.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments, layouts, rounding
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.core.dims import is_known, round_up
from jax._src.aiter.fused_qk import norms
from jax._src.aiter.fused_qk.rows import HEADS, Config, Operands
from jax._src.aiter.paged import api as paged
from jax._src.aiter.paged.api import Names
from jax._src.aiter.quant import api as quant

_MX_GROUP = 32


def fused_rms_fp8_group_quant(
    inp1: jax.Array,
    inp1_weight: jax.Array,
    inp1_epsilon: float,
    inp2: jax.Array | None = None,
    inp2_weight: jax.Array | None = None,
    inp2_epsilon: float | None = None,
    group_size: int = 128,
    dtype_quant: Any = None,
    res1: jax.Array | None = None,
    output_unquantized_inp1: bool = False,
    transpose_scale: bool = False,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None, jax.Array | None,
           jax.Array | None]:
  """`fused_qk_rmsnorm_group_quant` as AITER's Triton function has it.

  Args:
    inp1: q.
    inp1_weight: q_weight.
    inp1_epsilon: q_epsilon.
    inp2: k.
    inp2_weight: k_weight.
    inp2_epsilon: k_epsilon.
    group_size: as there.
    dtype_quant: quant_dtype, but not "mxfp4".
    res1: q_residual.
    output_unquantized_inp1: output_unquantized.
    transpose_scale: as there.

  Returns:
    ((q, q_scale), q_unquantized, k, q_residual_out) of what that returns.

  Raises:
    TypeError: as there.
    ValueError: as there.
  """
  function = "fused_rms_fp8_group_quant"
  kind = norms.kind_of(function, "dtype_quant", dtype_quant)
  out = norms.normed_qk(
      function, inp1, inp1_weight, inp1_epsilon, inp2, inp2_weight,
      inp2_epsilon, res1, ("inp1", "inp2", "res1"), kind=kind,
      group=norms.group_of(function, "group_size", group_size, kind),
      transposed=arguments.flag(function, "transpose_scale", transpose_scale),
      kept=arguments.flag(function, "output_unquantized_inp1",
                          output_unquantized_inp1))
  return (out.codes, out.scale), out.q, out.k, out.residual


def fused_rms_fp8_per_tensor_static_quant(
    inp1: jax.Array,
    inp1_weight: jax.Array,
    inp1_epsilon: float,
    inp1_scale: jax.Array,
    inp2: jax.Array | None = None,
    inp2_weight: jax.Array | None = None,
    inp2_epsilon: float | None = None,
    dtype_quant: Any = None,
    res1: jax.Array | None = None,
    output_unquantized_inp1: bool = False,
    rmsnorm_convert_to_inp1_type: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
  """`fused_qk_rmsnorm` with queries quantised by one scale that is given.

  Args:
    inp1: q.
    inp1_weight: q_weight.
    inp1_epsilon: q_epsilon.
    inp1_scale: float32, of one element: what the norm is divided by.
    inp2: k.
    inp2_weight: k_weight.
    inp2_epsilon: k_epsilon.
    dtype_quant: as quant_dtype of fused_qk_rmsnorm_per_token_quant.
    res1: q_residual.
    output_unquantized_inp1: whether to return the norm in q's dtype too.
    rmsnorm_convert_to_inp1_type: whether the norm is rounded to q's dtype
      before it is quantised.

  Returns:
    (q [m, n1] of dtype_quant, q unquantised, k, q_residual_out), with None for
    what was not asked for.

  Raises:
    TypeError: as fused_qk_rmsnorm; or differentiation.
    ValueError: as fused_qk_rmsnorm; or inp1_scale is not of one element.
  """
  function = "fused_rms_fp8_per_tensor_static_quant"
  out = norms.normed_qk(
      function, inp1, inp1_weight, inp1_epsilon, inp2, inp2_weight,
      inp2_epsilon, res1, ("inp1", "inp2", "res1"),
      scale=inp1_scale,
      kind=norms.kind_of(function, "dtype_quant", dtype_quant),
      kept=arguments.flag(function, "output_unquantized_inp1",
                          output_unquantized_inp1),
      narrow=arguments.flag(function, "rmsnorm_convert_to_inp1_type",
                            rmsnorm_convert_to_inp1_type))
  return out.codes, out.q, out.k, out.residual


def fused_rms_mxfp4_quant(
    x1: jax.Array,
    x1_weight: jax.Array,
    x1_epsilon: float,
    x2: jax.Array | None = None,
    x2_weight: jax.Array | None = None,
    x2_epsilon: float = 0.0,
    res1: jax.Array | None = None,
    shuffle: bool = False,
    scale_shuffle_padding: bool = False,
    output_unquantized_inp1: bool = False,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None, jax.Array | None,
           jax.Array | None]:
  """`fused_qk_rmsnorm` with queries as "mxfp4", by scales rounded to "even".

  The norm in float32 is quantised as by `mx_quant` with rounding "even".

  Args:
    x1: q, of an even number of columns.
    x1_weight: q_weight.
    x1_epsilon: q_epsilon.
    x2: k.
    x2_weight: k_weight.
    x2_epsilon: k_epsilon.
    res1: q_residual.
    shuffle: whether scales are in the order of `shuffle_scale`.
    scale_shuffle_padding: whether they are as many, with zeros behind, if they
      are not.
    output_unquantized_inp1: whether to return the norm in q's dtype too.

  Returns:
    ((q uint8 [m, n1 / 2], q_scale uint8 [m, n1 / 32]), q unquantised, k,
    q_residual_out), with None for what was not asked for. Padded, q_scale has a
    multiple of 256 rows and of 8 columns.

  Raises:
    TypeError: as fused_qk_rmsnorm; or differentiation.
    ValueError: as fused_qk_rmsnorm.
  """
  function = "fused_rms_mxfp4_quant"
  shuffled = arguments.flag(function, "shuffle", shuffle)
  padded = arguments.flag(
      function, "scale_shuffle_padding", scale_shuffle_padding)
  arguments.check_is_array(function, "x1", x1, optional=False)
  if x1.ndim == 2 and x1.shape[1] % 2:
    raise bad(function, "x1", describe(x1), "an even number of columns")
  out = norms.normed_qk(
      function, x1, x1_weight, x1_epsilon, x2, x2_weight,
      x2_epsilon if x2 is not None else None, res1, ("x1", "x2", "res1"),
      kind="mxfp4", mode="even", group=_MX_GROUP,
      kept=arguments.flag(function, "output_unquantized_inp1",
                          output_unquantized_inp1))
  scale = out.scale
  if shuffled:
    scale = layouts.shuffle_scale(scale)
  elif padded:
    rows, groups = scale.shape
    scale = jnp.pad(scale, ((0, round_up(rows, 256) - rows),
                            (0, round_up(groups, 8) - groups)))
  return (out.codes, scale), out.q, out.k, out.residual


def fused_flatten_fp8_group_quant(
    x: jax.Array,
    group_size: int = 128,
    dtype_quant: Any = None,
    transpose_scale: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """`per_group_quant` of heads side by side.

  Args:
    x: [m, n1, n2], with n2 of whole groups.
    group_size: as there.
    dtype_quant: as quant_dtype there.
    transpose_scale: as there.

  Returns:
    (q [m, n1 * n2], scale [m, n1 * n2 / group_size] or transposed).

  Raises:
    TypeError: as there.
    ValueError: as there.
  """
  function = "fused_flatten_fp8_group_quant"
  norms.check_heads(Names(function), "x", x)
  size = norms.group_of(function, "group_size", group_size, "")
  if x.shape[2] % size:
    raise bad(function, "x", describe(x), f"[m, n1, a multiple of {size}]")
  return quant.per_group_quant(
      x.reshape(x.shape[0], x.shape[1] * x.shape[2]), group_size=size,
      quant_dtype=norms.kind_of(function, "dtype_quant", dtype_quant),
      transpose_scale=arguments.flag(
          function, "transpose_scale", transpose_scale))


def fused_flatten_mxfp4_quant(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """`mx_quant` to "mxfp4" of heads side by side, by scales rounded to "even".

  Args:
    x: [m, n1, n2], with n2 a multiple of 32.

  Returns:
    (q uint8 [m, n1 * n2 / 2], scale uint8 [m, n1 * n2 / 32]).

  Raises:
    TypeError: x of the wrong type or dtype.
    ValueError: x of the wrong shape.
  """
  function = "fused_flatten_mxfp4_quant"
  norms.check_heads(Names(function), "x", x)
  if x.shape[2] % _MX_GROUP:
    raise bad(function, "x", describe(x), f"[m, n1, a multiple of {_MX_GROUP}]")
  return quant.mx_quant(
      x.reshape(x.shape[0], x.shape[1] * x.shape[2]), round_mode="even")


def _heads_a_row(rows: int, cols: int) -> int:
  """Rows with a norm each that are taken as heads of one: a divisor of rows.

  Kernels have a program for some 2048 columns.
  """
  if cols not in HEADS or not is_known(rows):
    return 1
  return max(n for n in range(1, 2048 // cols + 1) if rows % n == 0)


def fused_rms_gated_fp8_group_quant(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    z: jax.Array,
    eps: float,
    *,
    norm_before_gate: bool = True,
    use_ue8m0: bool = False,
    activation: str = "silu",
    out_dtype: Any = None,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    fp8_min_scaling_factor: float | None = None,
    group_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """RMSNorm of rows and a gate, quantised by groups of columns or by rows.

  `(N(x) + bias) * act(z)` or, without norm_before_gate, `N(x * act(z)) + bias`,
  in float32. A scale is that of per_group_quant, but at least
  fp8_min_scaling_factor.

  Args:
    x: [m, n], float16, bfloat16 or float32.
    weight: [n]; computed with in x's dtype.
    bias: likewise, or None.
    z: like x, the gate.
    eps: of the norm.
    norm_before_gate: as above.
    use_ue8m0: scales are powers of two, rounded up; float32 all the same.
    activation: "silu" or its other name "swish", or "sigmoid".
    out_dtype: float8_e4m3fn or float8_e4m3fnuz, by default float8_dtype(); or
      int8.
    fp8_min: -fp8_max, or None.
    fp8_max: the largest number of out_dtype, or None. AITER's default for
      float8_e4m3fnuz is 224; here it is 240, as of all quantisers.
    fp8_min_scaling_factor: by default 1 / (512 * that number).
    group_size: 32, 64 or 128, a divisor of n; None for a scale a row.

  Returns:
    (q [m, n], scale float32 [m, n / group_size], or [m]).

  Raises:
    TypeError: an argument of the wrong type or dtype; or differentiation.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "fused_rms_gated_fp8_group_quant"
  n = Names(function)
  for name, t in (("x", x), ("z", z)):
    arguments.check_is_array(function, name, t, optional=False)
  paged.check_array(n, "x", x, 2, norms.DTYPES)
  norms.check_like(n, "z", z, "x", x)
  rows, cols = x.shape
  weight = norms.weight_of(n, "weight", weight, cols, x.dtype)
  if bias is not None:
    bias = norms.weight_of(n, "bias", bias, cols, x.dtype)
  kind = norms.kind_of(function, "out_dtype", out_dtype)
  largest = rounding.KINDS[kind].largest
  for name, value, own in (("fp8_min", fp8_min, -largest),
                           ("fp8_max", fp8_max, largest)):
    if value is not None:
      arguments.number(function, name, value, f"{own}, of {kind}, or None",
                       lambda n, own=own: n == own)
  factor = arguments.number(
      function, "fp8_min_scaling_factor",
      1 / (512 * largest) if fp8_min_scaling_factor is None else
      fp8_min_scaling_factor, "a finite number >= 0",
      lambda f: 0 <= f < math.inf)
  group = 0
  if group_size is not None:
    group = norms.group_of(function, "group_size", group_size, kind)
    if cols % group:
      raise bad(function, "group_size", group, f"a divisor of {cols}, of x")
  power = arguments.flag(function, "use_ue8m0", use_ue8m0)
  activation = arguments.choice(function, "activation", activation,
                                ("silu", "swish", "sigmoid"))
  heads = 1
  if group or cols in norms.GROUPS:
    heads, group = _heads_a_row(rows, cols), group or cols
  flat = lambda t: t.reshape(-1, heads * cols)
  out = norms.run(n, Config(
      cols if heads > 1 else 0, norms.eps_of(function, "eps", eps), kind=kind,
      group=group, mode="up" if power else "", least=factor * largest,
      kept=False, sigmoid=activation == "sigmoid",
      gated_first=not arguments.flag(
          function, "norm_before_gate", norm_before_gate)), Operands(
              flat(x), gate=flat(z), q_weight=weight, bias=bias))
  scale = out.scale
  if power:
    scale = rounding.from_e8m0(scale)
  return out.codes.reshape(x.shape), scale.reshape(
      (rows,) if group_size is None else (rows, -1))
