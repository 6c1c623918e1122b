# SPDX-License-Identifier: Apache-2.0
"""Grouped products: the public functions and their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax
from jax import lax
from jax._src.aiter.core import arguments
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.gmm import op
from jax._src.aiter.gmm.op import Config, Operands

_FLOATS = ("bfloat16", "float16", "float32", "float64")
# Activations of ragged_dot that kernels know.
_KNOWN = ((None, "none"), (jax.nn.relu, "relu"), (jax.nn.silu, "silu"),
          (jax.nn.gelu, "gelu_tanh"))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _apply(cfg: Config, x: Operands) -> jax.Array:
  return op.product(cfg, vary_together(x))


def _sizes(function: str, group_sizes, groups=None):
  """The sizes in int32."""
  arguments.check_integers(function, "group_sizes", group_sizes)
  if group_sizes.ndim != 1 or groups not in (None, group_sizes.shape[0]):
    raise arguments.bad(function, "group_sizes",
                        arguments.describe(group_sizes),
                        f"shape [{'groups' if groups is None else groups}]")
  return arguments.int32(group_sizes)


def _result_dtype(function: str, value: Any) -> str:
  return arguments.dtype_name(
      function, "preferred_element_type", value, _FLOATS)


def _matrix(function: str, name: str, t, shape: tuple[Any, ...], like=None):
  """Checks an array's dtype and shape, where None is any size."""
  arguments.check_dtype(
      function, name, t, _FLOATS if like is None else (like.dtype.name,))
  if t.ndim != len(shape) or any(
      want is not None and size != want for size, want in zip(t.shape, shape)):
    words = ", ".join("any" if n is None else str(n) for n in shape)
    raise arguments.bad(function, name, arguments.describe(t),
                        f"shape [{words}]")


def _rows_times(function: str, cfg: Config, lhs, rhs, sizes,
                bias=None) -> jax.Array:
  """The product of checked options with matrices [g, k, n] or [g, n, k]."""
  lhs, rhs = arguments.agreeing(lhs, rhs)
  _matrix(function, "lhs", lhs, (None, None))
  k = lhs.shape[1]
  _matrix(function, "rhs", rhs, (None, k, None) if cfg.layout == "nn" else
          (None, None, k), lhs)
  return _apply(cfg, Operands(lhs, rhs, sizes, bias=bias))


def _windowed(function: str, sizes, offset, groups):
  """The sizes that a shard of groups is for, with those before as its lead."""
  offset = arguments.operand(function, "group_offset", offset)
  given = offset if isinstance(offset, int) else arguments.at_hand(offset)
  offset = jnp.asarray(offset)
  arguments.check_integers(function, "group_offset", offset)
  if offset.size != 1:
    raise arguments.bad(function, "group_offset", arguments.describe(offset),
                        "one integer")
  if given is not None and np.any(given < 0):
    raise arguments.bad(function, "group_offset", given, "an integer >= 0")
  at = jnp.arange(sizes.shape[0], dtype=jnp.int32)
  offset = jnp.clip(arguments.int32(offset).reshape(()), 0, sizes.shape[0])
  before = jnp.sum(jnp.where(at < offset, jnp.maximum(sizes, 0), 0),
                   dtype=jnp.int32)
  mine = jnp.take(sizes, offset + jnp.arange(groups, dtype=jnp.int32),
                  mode="fill", fill_value=0)
  return jnp.concatenate([before[None], mine])


def _behind(function: str, out, groups, activation, dtype):
  """What a kernel does not know; rows of no group stay 0."""
  active = activation(out)
  if jnp.shape(active) != out.shape:
    raise arguments.bad(
        function, "activation", f"one that makes shape"
        f" {list(jnp.shape(active))} of {list(out.shape)}",
        "a function of each number")
  return jnp.where(groups[:, None] < 0, 0, active).astype(dtype)


def _ragged_dot(function: str, lhs, rhs, group_sizes, dtype, group_offset,
                transpose_rhs, bias=None, activation=None,
                precision=None) -> jax.Array:
  """ragged_dot under another's name."""
  arguments.check_dtype(function, "lhs", lhs, _FLOATS)
  arguments.check_is_array(function, "rhs", rhs, False)
  if activation is not None and not callable(activation):
    raise arguments.bad(function, "activation", repr(activation),
                        "None or a function, such as jax.nn.silu", TypeError)
  transposed = arguments.flag(function, "transpose_rhs", transpose_rhs)
  cfg = Config(_result_dtype(function, dtype), "nt" if transposed else "nn",
               group_offset is not None, precision=precision)
  if rhs.ndim != 3:
    raise arguments.bad(function, "rhs", arguments.describe(rhs),
                        "an array of rank 3")
  if group_offset is None:
    sizes = _sizes(function, group_sizes, rhs.shape[0])
  else:
    sizes = _windowed(function, _sizes(function, group_sizes),
                      group_offset, rhs.shape[0])
  if bias is not None:
    arguments.check_dtype(function, "bias", bias, _FLOATS)
    shape = (rhs.shape[0], rhs.shape[1 if transposed else 2])
    if bias.shape != shape:
      raise arguments.bad(function, "bias", arguments.describe(bias),
                          f"shape {list(shape)}")
  name = next((name for known, name in _KNOWN if activation is known), None)
  if name is not None:
    return _rows_times(function, cfg._replace(activation=name), lhs, rhs, sizes,
                       bias)
  wide = jnp.promote_types(cfg.out_dtype, jnp.float32)
  out = _rows_times(function, cfg._replace(out_dtype=wide.name), lhs, rhs,
                    sizes, bias)
  out, sizes = vary_together(jax.tree.map(jnp.asarray, (out, sizes)))
  groups = op.rows_of_groups(sizes, cfg.lead, out.shape[0])
  return _behind(function, out, groups, activation, cfg.out_dtype)


def _check_ignored(function: str, tiling, interpret) -> None:
  """What megablox' functions take and the library has no use for."""
  arguments.static(function, "tiling", tiling, "megablox' tiles")
  arguments.flag(function, "interpret", interpret)


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
    out_sharding: Any = None,
    *,
    transpose_rhs: bool = False,
    bias: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
  """`jax.lax.ragged_dot`: rows in runs, each times a matrix of its own.

  Sums are in float32. The gradients of lhs and of rhs are kernels too, which
  sum in a fixed order, and take the result's gradient in lhs' dtype. Sizes are
  read on the device; none costs more than its rows, and an empty group nothing
  but zeros in rhs' gradient.

  Args:
    lhs: [m, k], bfloat16, float16 or float32; float64 by JAX's products, one a
      group.
    rhs: [g, k, n], lhs' dtype.
    group_sizes: integers [g]: the first group's rows come first. A negative one
      counts as 0. If their sum is less than m, the rows that are left are 0;
      what is beyond m does not count.
    precision: of products of float32, as jax.lax has it; by default that of
      jax.default_matmul_precision. A GPU's are of 16 bits of each number, or if
      it is "highest" or "float32" of all 24. Sums are float32 (float64 of
      float64) whatever it says.
    preferred_element_type: dtype of the result; lhs' by default.
    group_offset: integer [] or [1]: rhs' first group among those of
      group_sizes, of which there are then at least as many. Rows of groups
      that rhs lacks are 0.
    out_sharding: NamedSharding or PartitionSpec of the result, on a mesh of
      explicit axes.
    transpose_rhs: rhs is [g, n, k], as AITER keeps weights.
    bias: [g, n], any floating dtype: added to a group's rows, before they are
      rounded.
    activation: a function such as jax.nn.silu, of what is rounded after it, as
      tokamax has it. jax.nn.silu, jax.nn.relu and jax.nn.gelu are part of the
      kernel; any other runs behind it.

  Returns:
    [m, n].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "ragged_dot"
  precision = arguments.precision(function, precision)
  arguments.check_dtype(function, "lhs", lhs, _FLOATS)
  dtype = preferred_element_type
  accepted = "None, a NamedSharding or a PartitionSpec"
  arguments.static(function, "out_sharding", out_sharding, accepted)
  if not isinstance(out_sharding, (NamedSharding, PartitionSpec, type(None))):
    raise arguments.bad(function, "out_sharding", arguments.shown(out_sharding),
                        accepted, TypeError)
  out = _ragged_dot(function, lhs, rhs, group_sizes,
                    lhs.dtype if dtype is None else dtype, group_offset,
                    transpose_rhs, bias, activation, precision)
  if out_sharding is None:
    return out
  return jax.sharding.reshard(out, out_sharding)


def _scaled(function: str, a, b, a_scale, b_scale, group_sizes, dtype,
            blocks: bool) -> jax.Array:
  """A product of checked dtypes, scaled by rows, or by blocks if accepted."""
  bad = functools.partial(arguments.bad, function)
  _matrix(function, "a", a, (None, None), a)
  _matrix(function, "b", b, (None, None, a.shape[1]), a)
  (m, k), (groups, n, _) = a.shape, b.shape
  along = lambda size: (size + op.BLOCK - 1) // op.BLOCK
  shapes = {"row": (((m,), (m, 1)), ((groups, n), (groups, n, 1)))}
  if blocks:
    shapes["block"] = (((m, along(k)),), ((groups, along(n), along(k)),))
  for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
    arguments.check_dtype(function, name, scale, ("float32",))
  fits = [kind for kind, (of_a, of_b) in shapes.items()
          if a_scale.shape in of_a and b_scale.shape in of_b]
  if not fits:
    raise bad("a_scale", f"{arguments.describe(a_scale)} and b_scale"
              f" {arguments.describe(b_scale)}", " or ".join(
                  f"{list(of_a[0])} and {list(of_b[0])}"
                  for of_a, of_b in shapes.values()))
  scaling = fits[0]
  if scaling == "row":
    a_scale, b_scale = a_scale.reshape(m), b_scale.reshape(groups, n)
  return _run_scaled(function, scaling, Operands(
      a, b, _sizes(function, group_sizes, groups), a_scale, b_scale), dtype)


def _run_scaled(function: str, scaling: str, x: Operands, dtype) -> jax.Array:
  """The scaled product of checked arrays."""
  cfg = Config(_result_dtype(function, dtype), "nt", scaling=scaling)
  run = arguments.no_gradient(
      function, "where nothing is to be learned through it, apply"
      " jax.lax.stop_gradient to its floating-point arguments")
  return run(lambda x: op.scaled(cfg, vary_together(x)))(
      jax.tree.map(jnp.asarray, x))


def grouped_gemm_i8(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any = jnp.bfloat16,
) -> jax.Array:
  """`ragged_dot` of int8: `gemm_i8` of runs of rows, each with its matrix.

  Sums are exact in int32 and scaled in float32. There is no gradient.

  Args:
    a: int8 [m, k].
    b: int8 [g, n, k].
    a_scale: float32 [m] or [m, 1], one a row.
    b_scale: float32 [g, n] or [g, n, 1], one a row of each matrix.
    group_sizes: as in ragged_dot.
    preferred_element_type: dtype of the result.

  Returns:
    [m, n].

  Raises:
    TypeError: an argument of the wrong type or dtype, or a gradient.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "grouped_gemm_i8"
  for name, t in (("a", a), ("b", b)):
    arguments.check_dtype(function, name, t, ("int8",))
  return _scaled(function, a, b, a_scale, b_scale, group_sizes,
                 preferred_element_type, blocks=False)


def grouped_gemm_fp8(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any = jnp.bfloat16,
) -> jax.Array:
  """`ragged_dot` of float8: `gemm_fp8` of runs of rows, each with its matrix.

  Sums are float32. There is no gradient.

  Args:
    a: float8_e4m3fn or float8_e4m3fnuz [m, k].
    b: a's dtype [g, n, k].
    a_scale: float32, one a row, [m] or [m, 1]; or one every 128 columns, [m,
      ceil(k / 128)].
    b_scale: float32, one a row of each matrix, [g, n] or [g, n, 1]; or one
      every 128 x 128, [g, ceil(n / 128), ceil(k / 128)] (DeepSeek-V3,
      arXiv:2412.19437).
    group_sizes: as in ragged_dot.
    preferred_element_type: dtype of the result.

  Returns:
    [m, n].

  Raises:
    TypeError: an argument of the wrong type or dtype, or a gradient.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "grouped_gemm_fp8"
  for name, t in (("a", a), ("b", b)):
    arguments.check_dtype(function, name, t,
                          ("float8_e4m3fn", "float8_e4m3fnuz"))
  return _scaled(function, a, b, a_scale, b_scale, group_sizes,
                 preferred_element_type, blocks=True)


def check_packed(function: str, name: str, w, scale, four_bits: str):
  """Weights of four bits [g, n, k] as bytes, and scales of PACKED_BLOCK.

  four_bits: their dtype: float4_e2m1fn, whose scales are e8m0, or int4.
  """
  mx = four_bits == "float4_e2m1fn"
  w = arguments.packed(function, name, w, four_bits)
  _matrix(function, name, w, (None, None, None), w)
  name += "_scale"
  arguments.check_dtype(function, name, scale, ("uint8", "float8_e8m0fnu")
                        if mx else ("bfloat16",))
  k = 2 * w.shape[2]
  accepted = [op.PACKED_BLOCK] if mx else [
      op.PACKED_BLOCK * i for i in (1, 2, 4)]
  fits = [block for block in accepted if k % block == 0
          and scale.shape == (*w.shape[:2], k // block)]
  if not fits:
    raise arguments.bad(function, name, arguments.describe(scale), " or ".join(
        f"shape {[*w.shape[:2], f'{k} / {block}']}" for block in accepted))
  if scale.dtype == jnp.float8_e8m0fnu:
    scale = lax.bitcast_convert_type(scale, jnp.uint8)
  return w, jnp.repeat(scale, fits[0] // op.PACKED_BLOCK, 2)


def grouped_gemm_fp4(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array | None,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any = jnp.bfloat16,
) -> jax.Array:
  """`ragged_dot` with matrices of MXFP4 (AITER's a16w4, a8w4 and a4w4).

  The formats are those of the OCP Microscaling specification (v1.0): e2m1 and
  e4m3 numbers, every 32 of which share a power of two. Sums are float32. There
  is no gradient.

  Args:
    a: bfloat16 [m, k], and by the formula float16 or float32; or with scales
      float8_e4m3fn [m, k], float4_e2m1fn [m, k], or uint8 [m, k / 2], two e2m1
      a byte, the first in the low four bits.
    b: uint8 [g, n, k / 2] or float4_e2m1fn [g, n, k], k a multiple of 32.
    a_scale: uint8 or float8_e8m0fnu [m, k / 32]: a byte s stands for 2 ** (s -
      127), and 255 for NaN; None of an a without scales.
    b_scale: the same [g, n, k / 32].
    group_sizes: as in ragged_dot.
    preferred_element_type: dtype of the result.

  Returns:
    [m, n].

  Raises:
    TypeError: an argument of the wrong type or dtype, or a gradient.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "grouped_gemm_fp4"
  b, b_scale = check_packed(function, "b", b, b_scale, "float4_e2m1fn")
  k = 2 * b.shape[2]
  if a_scale is None:
    arguments.check_dtype(function, "a", a, _FLOATS[:3])
    _matrix(function, "a", a, (None, k))
  else:
    arguments.check_dtype(function, "a", a,
                          ("uint8", "float4_e2m1fn", "float8_e4m3fn"))
    if a.dtype != jnp.float8_e4m3fn:
      a = arguments.packed(function, "a", a, "float4_e2m1fn")
    _matrix(function, "a", a, (None, k // (2 if a.dtype == jnp.uint8 else 1)),
            a)
    arguments.check_dtype(function, "a_scale", a_scale,
                          ("uint8", "float8_e8m0fnu"))
    _matrix(function, "a_scale", a_scale, (a.shape[0], k // op.PACKED_BLOCK),
            a_scale)
    if a_scale.dtype != jnp.uint8:
      a_scale = lax.bitcast_convert_type(a_scale, jnp.uint8)
  return _run_scaled(function, "mx", Operands(
      a, b, _sizes(function, group_sizes, b.shape[0]), a_scale, b_scale),
                     preferred_element_type)


def grouped_gemm_i4(
    a: jax.Array,
    b: jax.Array,
    b_scale: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any = jnp.bfloat16,
) -> jax.Array:
  """`ragged_dot` with matrices of int4, scaled by groups (AITER's a16wi4).

  A number times its scale is rounded to bfloat16; sums are float32. There is no
  gradient.

  Args:
    a: bfloat16 [m, k], and by the formula float16 or float32.
    b: int4 [g, n, k], or uint8 [g, n, k / 2], two a byte, the first in the low
      four bits; k a multiple of 32.
    b_scale: bfloat16 [g, n, k / 32], or one every 64 or 128 of k.
    group_sizes: as in ragged_dot.
    preferred_element_type: dtype of the result.

  Returns:
    [m, n].

  Raises:
    TypeError: an argument of the wrong type or dtype, or a gradient.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "grouped_gemm_i4"
  arguments.check_dtype(function, "a", a, _FLOATS[:3])
  b, b_scale = check_packed(function, "b", b, b_scale, "int4")
  _matrix(function, "a", a, (None, 2 * b.shape[2]))
  return _run_scaled(function, "i4", Operands(
      a, b, _sizes(function, group_sizes, b.shape[0]), None, b_scale),
                     preferred_element_type)


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: Any = jnp.float32,
    tiling: Any = None,
    group_offset: jax.Array | None = None,
    existing_out: jax.Array | None = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
    *,
    bias: jax.Array | None = None,
) -> jax.Array:
  """Megablox' gmm (Gale et al., arXiv:2211.15841): `ragged_dot` by its name.

  Args:
    lhs: as in ragged_dot.
    rhs: as in ragged_dot.
    group_sizes: as in ragged_dot.
    preferred_element_type: dtype of the result, float32 by default.
    tiling: accepted; the library knows its tiles.
    group_offset: as in ragged_dot.
    existing_out: [m, n], in the result's dtype: what rows of no group of rhs
      are, in the place of 0.
    transpose_rhs: rhs is [g, n, k].
    interpret: accepted; off a GPU the formula runs.
    bias: as in ragged_dot; AITER's gmm has it.

  Returns:
    [m, n].

  Raises:
    TypeError: as ragged_dot.
    ValueError: as ragged_dot.
  """
  _check_ignored("gmm", tiling, interpret)
  out = _ragged_dot("gmm", lhs, rhs, group_sizes, preferred_element_type,
                    group_offset, transpose_rhs, bias)
  if existing_out is None:
    return out
  _matrix("gmm", "existing_out", existing_out, out.shape, out)
  sizes = arguments.int32(group_sizes)
  lead = group_offset is not None
  if lead:
    sizes = _windowed("gmm", sizes, jnp.asarray(group_offset), rhs.shape[0])
  groups = op.rows_of_groups(sizes, lead, out.shape[0])
  return jnp.where(groups[:, None] < 0, existing_out, out)


def tgmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: Any = jnp.float32,
    tiling: Any = None,
    group_offset: jax.Array | None = None,
    num_actual_groups: int | None = None,
    existing_out: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
  """Megablox' tgmm: of each group `lhs[:, rows] @ rhs[rows]`, gmm's wgrad.

  Sums over rows are in float32 and in the rows' order. lhs is [k, m], as there;
  what it was transposed from is read as it lies.

  Args:
    lhs: [k, m], dtypes as in ragged_dot.
    rhs: [m, n], lhs' dtype.
    group_sizes: integers [g], as in ragged_dot.
    preferred_element_type: dtype of the result, float32 by default.
    tiling: accepted; the library knows its tiles.
    group_offset: integer [] or [1]: the result's first group among those of
      group_sizes.
    num_actual_groups: groups of the result; all by default.
    existing_out: [num_actual_groups, k, n], in the result's dtype, to which the
      products are added.
    interpret: accepted; off a GPU the formula runs.

  Returns:
    [num_actual_groups, k, n].

  Raises:
    TypeError: as ragged_dot.
    ValueError: as ragged_dot.
  """
  function = "tgmm"
  _check_ignored(function, tiling, interpret)
  lhs, rhs = arguments.agreeing(lhs, rhs)
  _matrix(function, "lhs", lhs, (None, None))
  _matrix(function, "rhs", rhs, (lhs.shape[1], None), lhs)
  sizes = _sizes(function, group_sizes)
  groups = sizes.shape[0]
  if num_actual_groups is not None:
    groups = arguments.number(
        function, "num_actual_groups", num_actual_groups,
        f"an integer from 0 to {groups}", lambda n: 0 <= n <= groups, int)
  cfg = Config(_result_dtype(function, preferred_element_type), "tn",
               group_offset is not None)
  sizes = sizes[:groups] if group_offset is None else _windowed(
      function, sizes, group_offset, groups)
  out = _apply(cfg, Operands(lhs.T, rhs, sizes))
  if existing_out is None:
    return out
  _matrix(function, "existing_out", existing_out, out.shape, out)
  return existing_out + out
