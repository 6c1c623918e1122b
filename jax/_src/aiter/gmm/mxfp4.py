# SPDX-License-Identifier: Apache-2.0
"""jax-aiter's primitives for training mixtures of experts in MXFP4.

A layer's forward product and both gradients are products of MXFP4, of rows or
columns that are rounded in groups of 32 along what is summed. Which is rounded
where is the caller's, such as MaxText's, which has a gradient of its own.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.arguments import bad, describe
from jax._src.aiter.gmm import api
from jax._src.aiter.quant import api as quant

_GROUP = 32


def _check_matrix(function: str, value, groups: dict[int, str]) -> None:
  """An error unless it is [m, k], with whole groups along these axes."""
  arguments.check_dtype(function, "value", value, ("bfloat16", "float32"))
  if value.ndim != 2 or any(value.shape[axis] % _GROUP for axis in groups):
    raise bad(function, "value", describe(value),
              f"shape [m, k], {' and '.join(groups.values())} a multiple of"
              f" {_GROUP}")


def quantize_mxfp4_dim0(value: jax.Array) -> tuple[jax.Array, jax.Array]:
  """`mx_quant` of rows, in groups of 32 columns.

  Args:
    value: [m, k], bfloat16 or float32, k a multiple of 32.

  Returns:
    (uint8 [m, k / 2], two numbers a byte, uint8 [m, k / 32], scales).

  Raises:
    TypeError: an argument of the wrong type or dtype, or a gradient.
    ValueError: a shape that cannot be.
  """
  function = "quantize_mxfp4_dim0"
  _check_matrix(function, value, {1: "k"})
  with arguments.called(function, x="value"):
    return quant.mx_quant(value)


def quantize_mxfp4_dim1(value: jax.Array) -> tuple[jax.Array, jax.Array]:
  """`mx_quant` of columns, in groups of 32 rows; what it returns is transposed.

  Args:
    value: [m, k], bfloat16 or float32, both multiples of 32.

  Returns:
    (uint8 [k, m / 2], two numbers a byte, uint8 [k, m / 32], scales).

  Raises:
    TypeError: as quantize_mxfp4_dim0.
    ValueError: as quantize_mxfp4_dim0.
  """
  function = "quantize_mxfp4_dim1"
  _check_matrix(function, value, {0: "m", 1: "k"})
  with arguments.called(function, x="value"):
    return quant.mx_quant(value.T)


def _sizes(function: str, ends):
  """Numbers of rows from where groups end."""
  arguments.check_integers(function, "group_end_offsets", ends)
  if ends.ndim != 1 or ends.shape[0] < 1:
    raise bad(function, "group_end_offsets", describe(ends), "shape [g]")
  arguments.check_cumulative(
      function, "group_end_offsets", ends, None, first_rows=True)
  return jnp.diff(arguments.int32(ends), prepend=0)


def grouped_mxfp4_fwd_da(
    lhs_packed: jax.Array,
    rhs_packed: jax.Array,
    lhs_scales: jax.Array,
    rhs_scales: jax.Array,
    group_end_offsets: jax.Array,
) -> jax.Array:
  """`grouped_gemm_fp4` of rows and matrices of MXFP4, as jax-aiter has it.

  Args:
    lhs_packed: uint8 [m, k / 2].
    rhs_packed: uint8 [g, n, k / 2].
    lhs_scales: uint8 [m, k / 32].
    rhs_scales: uint8 [g, n, k / 32].
    group_end_offsets: integers [g], where each group's rows end. Rows behind
      the last give 0.

  Returns:
    bfloat16 [m, n].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "grouped_mxfp4_fwd_da"
  arguments.check_is_array(function, "lhs_scales", lhs_scales, optional=False)
  sizes = _sizes(function, group_end_offsets)
  with arguments.called(function, a="lhs_packed", b="rhs_packed",
                        a_scale="lhs_scales", b_scale="rhs_scales",
                        group_sizes="group_end_offsets"):
    return api.grouped_gemm_fp4(
        lhs_packed, rhs_packed, lhs_scales, rhs_scales, sizes)


def grouped_mxfp4_dw(
    grad_output_transposed: jax.Array,
    grad_output_scales: jax.Array,
    input_transposed: jax.Array,
    input_scales: jax.Array,
    group_end_offsets: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
) -> jax.Array:
  """The gradient of grouped matrices from MXFP4, as jax-aiter has it.

  Of each group `grad_output.T @ input`, summed in float32: `tgmm` of both in
  bfloat16, which holds all numbers of MXFP4.

  Args:
    grad_output_transposed: uint8 [n, m / 2], of `quantize_mxfp4_dim1`.
    grad_output_scales: uint8 [n, m / 32].
    input_transposed: uint8 [k, m / 2].
    input_scales: uint8 [k, m / 32].
    group_end_offsets: integers [g], where each group's rows end.
    out_dtype: of the result, bfloat16 or float32.

  Returns:
    [g, n, k].

  Raises:
    TypeError: as grouped_mxfp4_fwd_da.
    ValueError: as grouped_mxfp4_fwd_da.
  """
  function = "grouped_mxfp4_dw"
  sizes = _sizes(function, group_end_offsets)
  sides = []
  for name, t, scale in (
      ("grad_output", grad_output_transposed, grad_output_scales),
      ("input", input_transposed, input_scales)):
    names = f"{name}_transposed", f"{name}_scales"
    for argument, array in zip(names, (t, scale)):
      arguments.check_dtype(function, argument, array, ("uint8",))
    if t.ndim != 2 or t.shape[1] % (_GROUP // 2):
      raise bad(function, names[0], describe(t), "shape [n, m / 2], m a"
                f" multiple of {_GROUP}")
    if scale.shape != (t.shape[0], t.shape[1] // (_GROUP // 2)):
      raise bad(function, names[1], describe(scale),
                f"shape {[t.shape[0], t.shape[1] // (_GROUP // 2)]}")
    sides.append(quant.mx_dequant(t, scale, dtype=jnp.bfloat16))
  if sides[0].shape[1] != sides[1].shape[1]:
    raise bad(function, "input_transposed", describe(input_transposed),
              f"as many columns as grad_output_transposed"
              f" {describe(grad_output_transposed)}")
  dtype = arguments.dtype_name(
      function, "out_dtype", out_dtype, ("bfloat16", "float32"))
  with arguments.called(function, group_sizes="group_end_offsets"):
    return api.tgmm(sides[0], sides[1].T, sizes, dtype)
