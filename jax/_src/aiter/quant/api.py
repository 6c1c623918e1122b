# SPDX-License-Identifier: Apache-2.0
"""Quantisers and dequantisers: the public functions.

A quantiser divides numbers by a scale, so that the largest becomes the largest
of a format with 8 or 4 bits, and rounds: to nearest, ties to even, saturating.
Scales are those of dequantisation: `x` is about `q * scale`. Results are the
same bits on every device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

import jax
from jax._src.aiter.core import arguments, layouts, rounding
from jax._src.aiter.core.dispatch import float8_dtype
from jax._src.aiter.core.partition import vary_together
from jax._src.aiter.quant import op as quant_op
from jax._src.aiter.quant.op import Config, Operands

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
_BYTES = ("int8", *_FP8)
_GROUPS = (32, 64, 128)
_MX_GROUP = 32


# -----------------------------------------------------------------------------
# Quantisers


def _kind(function: str, dtype: Any, accepted: tuple[str, ...]) -> str:
  """The name in rounding.KINDS of an argument `quant_dtype`."""
  return arguments.dtype_name(
      function, "quant_dtype", float8_dtype() if dtype is None else dtype,
      accepted)


def _check_float(function: str, name: str, t, min_rank: int = 1) -> None:
  arguments.check_dtype(function, name, t, _DTYPES)
  if t.ndim < min_rank:
    raise arguments.bad(function, name, arguments.describe(t),
                        f"an array of rank {min_rank} or more")


def _float32(t):
  return None if t is None else t.astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _apply(function: str, cfg: Config, x, smooth_scale=None, scale=None):
  """(q, scale) of checked arguments."""
  @arguments.no_gradient(
      function, "use jax.lax.stop_gradient, or a straight-through estimator")
  def run(x, smooth_scale, scale):
    if x.dtype == jnp.float64:
      x = x.astype(jnp.float32)
    out = quant_op.quantise(cfg, vary_together(
        Operands(x, _float32(smooth_scale), _float32(scale))))
    return out.q, out.scale

  return run(x, smooth_scale, scale)


def per_tensor_quant(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    quant_dtype: Any = jnp.int8,
) -> tuple[jax.Array, jax.Array]:
  """Rounds an array with one scale.

  `scale = max(amax(|x|), 1e-10) / largest` and `q = round(x / scale)`, both
  quotients as IEEE 754 rounds them to float32; largest is 127 of int8, 448 of
  float8_e4m3fn and 240 of float8_e4m3fnuz. A NaN in x makes the scale NaN.

  Args:
    x: [..., n], float16, bfloat16, float32, or float64, taken as float32.
    scale: a number, or of shape [1], to use instead: a static quantiser.
      Quotients beyond the format saturate; int8 then reaches -128.
    quant_dtype: int8, float8_e4m3fn or float8_e4m3fnuz.

  Returns:
    (q, scale): x's shape in quant_dtype, and float32 [1].

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  function = "per_tensor_quant"
  _check_float(function, "x", x)
  cfg = Config("row", _kind(function, quant_dtype, _BYTES))
  if scale is None:
    _, amax = _apply(function, Config("amax"), x)
    amax = jnp.max(amax, keepdims=False, initial=0)
    scale = rounding.f32_scale(amax, rounding.KINDS[cfg.kind])
  else:
    scale = jnp.asarray(arguments.operand(function, "scale", scale))
    _check_float(function, "scale", scale, 0)
    if scale.size != 1 or scale.ndim > 1:
      raise arguments.bad(function, "scale", arguments.describe(scale),
                          "shape [] or [1]")
  scale = scale.astype(jnp.float32).reshape(())
  q, _ = _apply(function, cfg, x, None,
                jnp.broadcast_to(scale, x.shape[:-1]))
  return q, scale.reshape(1)


def per_head(function: str, x, quant_dtype):
  """(q, scales float32 [b, heads]) of [b, tokens, heads, d]; for others."""
  cfg = Config("row", _kind(function, quant_dtype, _FP8))
  _, amax = _apply(function, Config("amax"), x)
  scale = rounding.f32_scale(
      jnp.max(amax, (1, 3), initial=0), rounding.KINDS[cfg.kind])
  q, _ = _apply(function, cfg, x, None,
                jnp.broadcast_to(scale[:, None], x.shape[:-1]))
  return q, scale


def per_token_quant(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    smooth_scale: jax.Array | None = None,
    quant_dtype: Any = jnp.int8,
) -> tuple[jax.Array, jax.Array]:
  """Rounds an array with a scale for each row.

  As `per_tensor_quant`, with amax over the last axis.

  Args:
    x: [..., n], as in per_tensor_quant.
    scale: [..., 1], to use instead: a static quantiser.
    smooth_scale: [n], by which x is multiplied in float32 before: see
      smooth_quant.
    quant_dtype: as in per_tensor_quant.

  Returns:
    (q, scale): x's shape in quant_dtype, and float32 [..., 1].

  Raises:
    TypeError: as per_tensor_quant.
    ValueError: as per_tensor_quant.
  """
  return _per_token("per_token_quant", x, scale, smooth_scale, quant_dtype)


def _per_token(function: str, x, scale, smooth_scale, quant_dtype):
  _check_float(function, "x", x)
  cfg = Config("row", _kind(function, quant_dtype, _BYTES))
  for name, t, shape in (("smooth_scale", smooth_scale, x.shape[-1:]),
                         ("scale", scale, (*x.shape[:-1], 1))):
    if t is not None:
      _check_float(function, name, t)
      if t.shape != shape:
        raise arguments.bad(function, name, arguments.describe(t),
                            f"shape {list(shape)}")
  given = None if scale is None else scale[..., 0]
  q, found = _apply(function, cfg, x, smooth_scale, given)
  return q, found[..., None] if scale is None else _float32(scale)


def smooth_quant(
    x: jax.Array,
    smooth_scale: jax.Array,
    *,
    quant_dtype: Any = jnp.int8,
) -> tuple[jax.Array, jax.Array]:
  """`per_token_quant` of `x * smooth_scale`.

  The factors even out the columns of activations before they are rounded; the
  weight is divided by them beforehand (Xiao et al., "SmoothQuant",
  arXiv:2211.10438). They are multiplied in the same pass, in float32.

  Args:
    x: [..., n], as in per_tensor_quant.
    smooth_scale: [n], the factors.
    quant_dtype: as in per_tensor_quant.

  Returns:
    (q, scale): as per_token_quant.

  Raises:
    TypeError: as per_tensor_quant.
    ValueError: as per_tensor_quant.
  """
  arguments.check_is_array("smooth_quant", "smooth_scale", smooth_scale,
                           optional=False)
  return _per_token("smooth_quant", x, None, smooth_scale, quant_dtype)


def per_group_quant(
    x: jax.Array,
    *,
    group_size: int = 128,
    quant_dtype: Any = None,
    scale_dtype: Any = jnp.float32,
    transpose_scale: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Rounds an array with a scale for each group of columns.

  As `per_tensor_quant`, with amax over `group_size` neighbours in a row; the
  last group of a row may be shorter. Groups of 128 are what DeepSeek-V3
  (arXiv:2412.19437) has of activations. With scales of one byte, e8m0, they are
  as mx_quant's with round_mode "up".

  Args:
    x: [..., n], as in per_tensor_quant.
    group_size: 32, 64 or 128.
    quant_dtype: int8, float8_e4m3fn or float8_e4m3fnuz; by default
      float8_dtype().
    scale_dtype: float32, or uint8 for e8m0, which int8 does not have.
    transpose_scale: scales are returned as [..., groups, m] of an x of
      [..., m, n]: what gemm_fp8_mi350 takes.

  Returns:
    (q, scale): x's shape in quant_dtype, and [..., n / group_size, rounded up].

  Raises:
    TypeError: as per_tensor_quant.
    ValueError: as per_tensor_quant.
  """
  function = "per_group_quant"
  transposed = arguments.flag(function, "transpose_scale", transpose_scale)
  _check_float(function, "x", x, 1 + transposed)
  kind = _kind(function, quant_dtype, _BYTES)
  group = arguments.choice(function, "group_size", group_size, _GROUPS)
  name = arguments.dtype_name(
      function, "scale_dtype", scale_dtype,
      ("float32",) if kind == "int8" else ("float32", "uint8"))
  return _apply(function, Config(
      "group", kind, group, None if name == "float32" else "up",
      transposed=transposed), x)


def per_block_quant(
    x: jax.Array,
    *,
    quant_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Rounds matrices with a scale for each block of 128 by 128.

  As `per_tensor_quant`, with amax over a block: what DeepSeek-V3
  (arXiv:2412.19437) has of weights. The last blocks may be smaller.

  Args:
    x: [..., m, n], as in per_tensor_quant.
    quant_dtype: int8, float8_e4m3fn or float8_e4m3fnuz; by default
      float8_dtype().

  Returns:
    (q, scale): x's shape in quant_dtype, and float32 [..., m / 128, n / 128],
    rounded up.

  Raises:
    TypeError: as per_tensor_quant.
    ValueError: as per_tensor_quant.
  """
  function = "per_block_quant"
  _check_float(function, "x", x, 2)
  kind = _kind(function, quant_dtype, _BYTES)
  return _apply(function, Config("block", kind), x)


def mx_quant(
    x: jax.Array,
    *,
    quant_dtype: Any = "mxfp4",
    round_mode: str = "up",
    shuffle_scale: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """MXFP4 or MXFP8: groups of 32 columns with a power of two as their scale.

  OCP Microscaling Formats Specification, v1.0. A scale is a byte, e8m0:
  `2^(byte - 127)`, 0xFF for NaN. With `amax` of a group, `largest` (6, 448,
  240) and `power`, the power of two below it (4, 256, 128), it is by AITER's
  modes

    "up"    the least power of two >= amax / largest: nothing saturates
    "down"  the greatest <= amax / power, as the specification has it
    "even"  that of an amax which is rounded to the format's mantissa first
    "ceil"  the least >= amax / power

  and at least 2^-127; then `q = round(x / scale)`. A group of zeros has the
  scale 0, and one with a NaN or an infinity the scale 0xFF.

  Args:
    x: [..., n], as in per_tensor_quant; of an odd n there is no "mxfp4".
    quant_dtype: "mxfp4", float8_e4m3fn or float8_e4m3fnuz.
    round_mode: "up", "down", "even" or "ceil".
    shuffle_scale: scales of x [..., m, n] are returned as `shuffle_scale`
      leaves them, padded with zeros.

  Returns:
    (q, scale): uint8 [..., n / 2] with the even columns in the low bits, or x's
    shape in float8; and uint8 [..., n / 32, rounded up].

  Raises:
    TypeError: as per_tensor_quant.
    ValueError: as per_tensor_quant.
  """
  function = "mx_quant"
  shuffled = arguments.flag(function, "shuffle_scale", shuffle_scale)
  _check_float(function, "x", x, 1 + shuffled)
  kind = _kind(function, quant_dtype, ("mxfp4", *_FP8))
  if kind == "mxfp4" and x.shape[-1] % 2:
    raise arguments.bad(function, "x", arguments.describe(x),
                        "an even last dimension with mxfp4")
  mode = arguments.choice(function, "round_mode", round_mode,
                 tuple(rounding.ROUND_MODES))
  return _apply(function, Config("group", kind, _MX_GROUP, mode,
                                 shuffled=shuffled), x)


# -----------------------------------------------------------------------------
# Dequantisers


def pack_e2m1(x: jax.Array) -> jax.Array:
  """Rounds to float4_e2m1fn, two numbers a byte, the even ones in the low bits.

  To nearest, ties to even, saturating at 6; NaN becomes 6.

  Args:
    x: [..., n], n even, as in per_tensor_quant.

  Returns:
    uint8 [..., n / 2].

  Raises:
    TypeError: as per_tensor_quant.
    ValueError: as per_tensor_quant.
  """
  _check_float("pack_e2m1", "x", x)
  if x.shape[-1] % 2:
    raise arguments.bad("pack_e2m1", "x", arguments.describe(x),
                        "an even last dimension")
  return arguments.no_gradient(
      "pack_e2m1", "use jax.lax.stop_gradient, or a straight-through estimator"
  )(lambda x: rounding.pack(rounding.round_to(x, rounding.E2M1)))(x)


def unpack_e2m1(packed: jax.Array, *, dtype: Any = jnp.float32) -> jax.Array:
  """The inverse of `pack_e2m1`: uint8 [..., n / 2] -> dtype [..., n]."""
  _check_quantised("unpack_e2m1", "packed", packed, ("uint8",))
  if packed.ndim == 0:
    raise arguments.bad("unpack_e2m1", "packed", arguments.describe(packed),
                        "an array of rank 1 or more")
  return rounding.from_e2m1(rounding.unpack(packed)).astype(
      arguments.dtype_name("unpack_e2m1", "dtype", dtype))


def _check_quantised(function: str, name: str, t, accepted) -> None:
  arguments.check_is_array(function, name, t, optional=False)
  if t.dtype.name not in accepted:
    raise arguments.bad(function, f"{name}'s dtype", t.dtype,
                        " or ".join(accepted), TypeError)


def dequant(
    q: jax.Array,
    scale: jax.Array,
    *,
    block_shape: tuple[int, int] | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
  """`q * scale` in float32, of every quantiser here.

  In jax.numpy, so that XLA fuses it with what it is for; differentiable in the
  scale.

  Args:
    q: [..., n] of int8 or float8, or uint8 [..., n / 2] of packed e2m1.
    scale: float32, or uint8 of e8m0. Without block_shape it broadcasts to q.
    block_shape: rows and columns that share a scale, such as (1, 128) after
      per_group_quant and (128, 128) after per_block_quant: scale is then
      [..., m / rows, n / columns], rounded up.
    dtype: of the result.

  Returns:
    dtype [..., n].

  Raises:
    TypeError: as per_tensor_quant.
    ValueError: as per_tensor_quant.
  """
  return _dequant("dequant", q, scale, block_shape, dtype)


def _dequant(function: str, q, scale, block_shape, dtype):
  dtype = arguments.dtype_name(function, "dtype", dtype)
  _check_quantised(function, "q", q, (*_BYTES, "uint8"))
  _check_quantised(function, "scale", scale, ("float32", "uint8"))
  blocks = {}
  if block_shape is not None:
    rows, columns = arguments.integers(
        function, "block_shape", block_shape, "None or two integers >= 1",
        lambda n: n >= 1)
    blocks = {axis: block for axis, block in ((-1, columns), (-2, rows))
              if block != 1}
  rank = max((-axis for axis in blocks), default=int(q.dtype == jnp.uint8))
  if q.ndim < rank:
    raise arguments.bad(function, "q", arguments.describe(q),
                        f"an array of rank {rank} or more")
  q = (rounding.from_e2m1(rounding.unpack(q)) if q.dtype == jnp.uint8
       else q.astype(jnp.float32))
  if scale.dtype == jnp.uint8:
    scale = rounding.from_e8m0(scale)
  given = arguments.describe(scale)
  for axis, block in blocks.items():
    size = q.shape[axis]
    if scale.ndim < -axis or scale.shape[axis] != -(-size // block):
      raise arguments.bad(
          function, "scale", given,
          f"{-(-size // block)} scales along axis {axis}, one for {block} "
          f"of {size}")
    scale = jnp.repeat(scale, block, axis, total_repeat_length=(
        block * scale.shape[axis]))
    scale = jax.lax.slice_in_dim(scale, 0, size, axis=scale.ndim + axis)
  try:
    fits = jnp.broadcast_shapes(q.shape, scale.shape) == q.shape
  except ValueError:
    fits = False
  if not fits:
    raise arguments.bad(function, "scale", given,
                        f"what broadcasts to {list(q.shape)}")
  return (q * scale).astype(dtype)


def mx_dequant(
    q: jax.Array,
    scale: jax.Array,
    *,
    scale_shuffled: bool = False,
    dtype: Any = jnp.float32,
) -> jax.Array:
  """The numbers that `mx_quant` returned.

  Args:
    q: uint8 [..., n / 2], or float8 [..., n].
    scale: uint8 [..., n / 32, rounded up].
    scale_shuffled: it is as shuffle_scale leaves it.
    dtype: of the result.

  Returns:
    dtype [..., n].

  Raises:
    TypeError: as per_tensor_quant.
    ValueError: as per_tensor_quant.
  """
  function = "mx_dequant"
  _check_quantised(function, "q", q, ("uint8", *_FP8))
  _check_quantised(function, "scale", scale, ("uint8",))
  if arguments.flag(function, "scale_shuffled", scale_shuffled):
    if q.ndim < 2:
      raise arguments.bad(function, "q", arguments.describe(q),
                          "an array of rank 2 or more, of shuffled scales")
    n = q.shape[-1] * (2 if q.dtype == jnp.uint8 else 1)
    with arguments.called(function):
      scale = layouts.unshuffle_scale(scale, (q.shape[-2], -(-n // _MX_GROUP)))
  return _dequant(function, q, scale, (1, _MX_GROUP), dtype)
