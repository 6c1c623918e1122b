# SPDX-License-Identifier: Apache-2.0
"""Gated activations: the public functions and their arguments.

With `a` the activation of the gate, a result is `a * up`: computed in float32
and rounded once, in one pass over memory on a GPU (Shazeer, "GLU Variants
Improve Transformer", arXiv:2002.05202). XLA fuses such a formula as well as it
can be; these are for what it does not: a bias by expert, gradients in one pass,
a quantised result.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp

import jax
from jax._src.aiter.activation import op as activation_op
from jax._src.aiter.activation.op import MX_GROUP, Config, Rows
from jax._src.aiter.core import arguments, rounding
from jax._src.aiter.core.dispatch import float8_dtype
from jax._src.aiter.core.partition import resharded, vary_together

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_GROUPS = (32, 64, 128)


def _check_float(function: str, name: str, t, min_rank: int = 0) -> None:
  arguments.check_dtype(function, name, t, _DTYPES)
  if t.ndim < min_rank:
    raise arguments.bad(function, name, arguments.describe(t),
                        f"an array of rank {min_rank} or more")


def _check_pair(function: str, x, up) -> None:
  _check_float(function, "x", x, 1)
  if up is None:
    if x.shape[-1] % 2:
      raise arguments.bad(function, "x", arguments.describe(x),
                          "an even last dimension, of gate and up")
    return
  _check_float(function, "up", up)
  if (up.shape, up.dtype) != (x.shape, x.dtype):
    raise arguments.bad(function, "up", arguments.describe(up),
                        f"{arguments.describe(x)}, as the gate")


def _experts_of(function: str, x, up, expert_ids, bias):
  """expert_ids in int32, or None, after checks of both."""
  if (expert_ids is None) != (bias is None):
    missing = "bias" if bias is None else "expert_ids"
    raise arguments.bad(function, missing, "None",
                        "an array, because expert_ids and bias go together")
  if bias is None:
    return None
  arguments.check_integers(function, "expert_ids", expert_ids)
  if expert_ids.shape != x.shape[:-1]:
    raise arguments.bad(function, "expert_ids", arguments.describe(expert_ids),
                        f"shape {list(x.shape[:-1])}, one for each row")
  _check_float(function, "bias", bias)
  cols = x.shape[-1] * (1 if up is None else 2)
  if bias.ndim != 2 or bias.shape[1] != cols:
    raise arguments.bad(function, "bias", arguments.describe(bias),
                        f"shape [experts, {cols}]")
  return arguments.int32(expert_ids)


def _limit(function: str, limit) -> float:
  return arguments.number(
      function, "limit", limit, "a finite number >= 0",
      lambda value: 0 <= value < math.inf)


def _rows(x, up, expert_ids, bias, scale=None) -> Rows:
  """Operands of checked arguments, of one sharding, in the kernels' types."""
  if bias is not None and bias.dtype != x.dtype:
    bias = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
  if up is not None:
    up = resharded(up, jax.typeof(x).sharding.spec)
  if scale is not None:
    scale = scale.astype(jnp.float32).reshape(())
  return vary_together(Rows(x, up, expert_ids, bias, scale))


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _apply(cfg: Config, *arrays):
  return activation_op.activation(cfg, _rows(*arrays))


def _result_dtype(function: str, x, out_dtype) -> str:
  out = x.dtype if out_dtype is None else arguments.dtype_name(
      function, "out_dtype", out_dtype, _DTYPES)
  # NumPy's float64 is JAX's float32, unless JAX has 64 bits.
  return jax.dtypes.canonicalize_dtype(out).name


def _activation(function: str, cfg: Config, x, up, expert_ids, bias, out_dtype):
  """The result, after all checks."""
  _check_pair(function, x, up)
  expert_ids = _experts_of(function, x, up, expert_ids, bias)
  out = _result_dtype(function, x, out_dtype)
  cfg = cfg._replace(limit=_limit(function, cfg.limit), packed=up is None,
                     out=out)
  return _apply(cfg, x, up, expert_ids, bias)


def silu_and_mul(
    x: jax.Array,
    up: jax.Array | None = None,
    *,
    limit: float = 0.0,
    expert_ids: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
  """`silu(gate) * up`: SwiGLU, with `silu(z) = z / (1 + exp(-z))`.

  Gradients are one kernel, which reads gate, up and dy once.

  Args:
    x: [..., 2 d], the gate in the first half of the last axis and up in the
      second; float16, bfloat16, float32 or (by the reference) float64. Or the
      gate alone, [..., d].
    up: [..., d], x's dtype, if x is the gate alone.
    limit: above 0 the gate is clipped to at most the limit, rounded to x's
      dtype as in AITER, and up to at most the limit on both sides. What is
      clipped has no gradient.
    expert_ids: integers [...], one for each row.
    bias: [experts, 2 d], by whose row of the expert gate and up are increased
      first; its dtype may be wider than x's. A row whose id is not from 0 to
      experts - 1 has the result 0, and no gradient. The bias' gradient is a sum
      in float32 and in a fixed order.
    out_dtype: of the result: float16, bfloat16 or float32; None for x's.

  Returns:
    [..., d], in out_dtype.

  Raises:
    TypeError: an argument of the wrong type or dtype.
    ValueError: a shape or value that cannot be; the message names it.
  """
  return _activation("silu_and_mul", Config("silu", limit), x, up, expert_ids,
                     bias, out_dtype)


def gelu_and_mul(
    x: jax.Array,
    up: jax.Array | None = None,
    *,
    limit: float = 0.0,
    expert_ids: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
  """`gelu(gate) * up`: GEGLU, with `gelu(z) = z * (1 + erf(z / sqrt(2))) / 2`.

  Args:
    x: as in silu_and_mul.
    up: as in silu_and_mul.
    limit: as in silu_and_mul.
    expert_ids: as in silu_and_mul.
    bias: as in silu_and_mul.
    out_dtype: as in silu_and_mul.

  Returns:
    As silu_and_mul.

  Raises:
    TypeError: as silu_and_mul.
    ValueError: as silu_and_mul.
  """
  return _activation("gelu_and_mul", Config("gelu", limit), x, up, expert_ids,
                     bias, out_dtype)


def gelu_tanh_and_mul(
    x: jax.Array,
    up: jax.Array | None = None,
    *,
    limit: float = 0.0,
    expert_ids: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
  """`gelu_and_mul` with GELU's approximation by a hyperbolic tangent.

  `gelu(z) = z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z**3))) / 2`.

  Args:
    x: as in silu_and_mul.
    up: as in silu_and_mul.
    limit: as in silu_and_mul.
    expert_ids: as in silu_and_mul.
    bias: as in silu_and_mul.
    out_dtype: as in silu_and_mul.

  Returns:
    As silu_and_mul.

  Raises:
    TypeError: as silu_and_mul.
    ValueError: as silu_and_mul.
  """
  return _activation("gelu_tanh_and_mul", Config("gelu_tanh", limit), x, up,
                     expert_ids, bias, out_dtype)


def _alpha(function: str, alpha) -> float:
  return arguments.number(function, "alpha", alpha, "a finite number",
                          math.isfinite)


def swiglu_and_mul(
    x: jax.Array,
    up: jax.Array | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    expert_ids: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
  """gpt-oss's SwiGLU: `gate / (1 + exp(-alpha * gate)) * (up + 1)`, clipped.

  Args:
    x: as in silu_and_mul.
    up: as in silu_and_mul.
    alpha: the factor in the exponent.
    limit: as in silu_and_mul; 0 clips nothing.
    expert_ids: as in silu_and_mul.
    bias: as in silu_and_mul.
    out_dtype: as in silu_and_mul.

  Returns:
    As silu_and_mul.

  Raises:
    TypeError: as silu_and_mul.
    ValueError: as silu_and_mul.
  """
  function = "swiglu_and_mul"
  return _activation(function, Config("swiglu", limit, _alpha(function, alpha)),
                     x, up, expert_ids, bias, out_dtype)


def gelu_fast(x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
  """GELU's approximation by a hyperbolic tangent, of every element.

  As gelu_tanh_and_mul's, without anything to multiply by.

  Args:
    x: [...], of at least one axis, as in silu_and_mul.
    out_dtype: as in silu_and_mul.

  Returns:
    x's shape, in out_dtype.

  Raises:
    TypeError: as silu_and_mul.
    ValueError: as silu_and_mul.
  """
  function = "gelu_fast"
  _check_float(function, "x", x, 1)
  out = _result_dtype(function, x, out_dtype)
  cfg = Config("gelu_tanh", out=out, packed=False, gated=False)
  return _apply(cfg, x, None, None, None)


# -----------------------------------------------------------------------------
# Quantised


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _apply_quant(function: str, cfg: Config, *arrays):
  run = arguments.no_gradient(
      function, "differentiate the activation without _quant, or stop the "
      "gradient")(functools.partial(activation_op.activation_quant, cfg))
  rows = _rows(*arrays)
  if rows.gate.dtype == jnp.float64:
    wide = lambda t: None if t is None else t.astype(jnp.float32)
    rows = rows._replace(gate=wide(rows.gate), up=wide(rows.up),
                         bias=wide(rows.bias))
  return tuple(run(rows))


def _quantised(function: str, cfg: Config, x, up, expert_ids, bias,
               quant_dtype, group_size, scale, scale_dtype, round_mode,
               shuffle_scale):
  """(q, scale), after all checks."""
  _check_pair(function, x, up)
  expert_ids = _experts_of(function, x, up, expert_ids, bias)
  kind = arguments.dtype_name(
      function, "quant_dtype",
      float8_dtype() if quant_dtype is None else quant_dtype, rounding.KINDS)
  packed = kind == "mxfp4"
  if packed and group_size is None:
    group_size = MX_GROUP
  group_size = arguments.choice(
      function, "group_size", group_size,
      (MX_GROUP,) if packed else (None, *_GROUPS))
  scales = ("uint8",) if packed else ("float32", "uint8")
  if kind == "int8" or group_size is None:
    scales = ("float32",)
  if scale_dtype is None:
    scale_dtype = scales[0]
  e8m0 = arguments.dtype_name(
      function, "scale_dtype", scale_dtype, scales) == "uint8"
  round_mode = arguments.choice(
      function, "round_mode", round_mode, tuple(rounding.ROUND_MODES))
  shuffled = arguments.flag(function, "shuffle_scale", shuffle_scale)
  if shuffled and not (e8m0 and x.ndim > 1):
    raise arguments.bad(
        function, "shuffle_scale", True,
        "False but of uint8 scales of an x of rank 2 or more")
  if packed and x.shape[-1] // (2 if up is None else 1) % 2:
    raise arguments.bad(function, "x", arguments.describe(x),
                        "an even number of columns of the result, for mxfp4")
  if scale is not None:
    _check_float(function, "scale", scale)
    if scale.size != 1 or scale.ndim > 1:
      raise arguments.bad(function, "scale", arguments.describe(scale),
                          "shape [] or [1]")
    if group_size is not None:
      raise arguments.bad(function, "scale", "given", "None with groups")
  cfg = cfg._replace(
      limit=_limit(function, cfg.limit), packed=up is None, quant=kind,
      group=group_size or 0, mode=round_mode if e8m0 else None,
      shuffled=shuffled)
  q, found = _apply_quant(function, cfg, x, up, expert_ids, bias, scale)
  return q, found if scale is None else scale.astype(jnp.float32).reshape(1)


def silu_and_mul_quant(
    x: jax.Array,
    up: jax.Array | None = None,
    *,
    quant_dtype: Any = None,
    group_size: int | None = None,
    scale: jax.Array | None = None,
    scale_dtype: Any = None,
    round_mode: str = "up",
    shuffle_scale: bool = False,
    limit: float = 0.0,
    expert_ids: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`silu_and_mul`, quantised in the same pass over memory.

  What is quantised is the result in float32, not rounded to x's dtype. Scales
  and rounding are those of `per_token_quant`, `per_group_quant` and `mx_quant`:
  `q * scale` is about the result.

  Args:
    x: as in silu_and_mul; float64 is taken as float32.
    up: as in silu_and_mul.
    quant_dtype: int8, float8_e4m3fn, float8_e4m3fnuz or "mxfp4"; by default
      float8_dtype().
    group_size: None for a scale a row; 32, 64 or 128 columns that share one.
      "mxfp4" has groups of 32.
    scale: a number, or of shape [1], to use instead of a scale a row: a static
      quantiser.
    scale_dtype: float32, or uint8 for e8m0: of float8 groups, and always of
      "mxfp4". float8 with group_size 32 and uint8 is MXFP8.
    round_mode: of e8m0 scales, as in mx_quant.
    shuffle_scale: e8m0 scales of matrices [..., m, d] are returned as
      `shuffle_scale` leaves them, padded with zeros.
    limit: as in silu_and_mul.
    expert_ids: as in silu_and_mul.
    bias: as in silu_and_mul.

  Returns:
    (q, scale): quant_dtype [..., d], of "mxfp4" uint8 [..., d / 2] with the
    even columns in the low bits; and [..., 1], [..., d / group_size, rounded
    up], or the given scale as [1]. There is no gradient.

  Raises:
    TypeError: an argument of the wrong type or dtype, or differentiation.
    ValueError: a shape or value that cannot be; the message names it.
  """
  return _quantised("silu_and_mul_quant", Config("silu", limit), x, up,
                    expert_ids, bias, quant_dtype, group_size, scale,
                    scale_dtype, round_mode, shuffle_scale)


def gelu_and_mul_quant(
    x: jax.Array,
    up: jax.Array | None = None,
    *,
    quant_dtype: Any = None,
    group_size: int | None = None,
    scale: jax.Array | None = None,
    scale_dtype: Any = None,
    round_mode: str = "up",
    shuffle_scale: bool = False,
    limit: float = 0.0,
    expert_ids: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`gelu_and_mul`, quantised as by `silu_and_mul_quant`, with its arguments.

  Args:
    x: as in silu_and_mul_quant.
    up: as in silu_and_mul_quant.
    quant_dtype: as in silu_and_mul_quant.
    group_size: as in silu_and_mul_quant.
    scale: as in silu_and_mul_quant.
    scale_dtype: as in silu_and_mul_quant.
    round_mode: as in silu_and_mul_quant.
    shuffle_scale: as in silu_and_mul_quant.
    limit: as in silu_and_mul.
    expert_ids: as in silu_and_mul.
    bias: as in silu_and_mul.

  Returns:
    As silu_and_mul_quant.

  Raises:
    TypeError: as silu_and_mul_quant.
    ValueError: as silu_and_mul_quant.
  """
  return _quantised("gelu_and_mul_quant", Config("gelu", limit), x, up,
                    expert_ids, bias, quant_dtype, group_size, scale,
                    scale_dtype, round_mode, shuffle_scale)


def gelu_tanh_and_mul_quant(
    x: jax.Array,
    up: jax.Array | None = None,
    *,
    quant_dtype: Any = None,
    group_size: int | None = None,
    scale: jax.Array | None = None,
    scale_dtype: Any = None,
    round_mode: str = "up",
    shuffle_scale: bool = False,
    limit: float = 0.0,
    expert_ids: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`gelu_tanh_and_mul`, quantised as by `silu_and_mul_quant`.

  Args:
    x: as in silu_and_mul_quant.
    up: as in silu_and_mul_quant.
    quant_dtype: as in silu_and_mul_quant.
    group_size: as in silu_and_mul_quant.
    scale: as in silu_and_mul_quant.
    scale_dtype: as in silu_and_mul_quant.
    round_mode: as in silu_and_mul_quant.
    shuffle_scale: as in silu_and_mul_quant.
    limit: as in silu_and_mul.
    expert_ids: as in silu_and_mul.
    bias: as in silu_and_mul.

  Returns:
    As silu_and_mul_quant.

  Raises:
    TypeError: as silu_and_mul_quant.
    ValueError: as silu_and_mul_quant.
  """
  return _quantised("gelu_tanh_and_mul_quant", Config("gelu_tanh", limit), x,
                    up, expert_ids, bias, quant_dtype, group_size, scale,
                    scale_dtype, round_mode, shuffle_scale)


def swiglu_and_mul_quant(
    x: jax.Array,
    up: jax.Array | None = None,
    *,
    quant_dtype: Any = None,
    group_size: int | None = None,
    scale: jax.Array | None = None,
    scale_dtype: Any = None,
    round_mode: str = "up",
    shuffle_scale: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    expert_ids: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`swiglu_and_mul`, quantised as by `silu_and_mul_quant`.

  Args:
    x: as in silu_and_mul_quant.
    up: as in silu_and_mul_quant.
    quant_dtype: as in silu_and_mul_quant.
    group_size: as in silu_and_mul_quant.
    scale: as in silu_and_mul_quant.
    scale_dtype: as in silu_and_mul_quant.
    round_mode: as in silu_and_mul_quant.
    shuffle_scale: as in silu_and_mul_quant.
    alpha: as in swiglu_and_mul.
    limit: as in swiglu_and_mul.
    expert_ids: as in silu_and_mul.
    bias: as in silu_and_mul.

  Returns:
    As silu_and_mul_quant.

  Raises:
    TypeError: as silu_and_mul_quant.
    ValueError: as silu_and_mul_quant.
  """
  function = "swiglu_and_mul_quant"
  return _quantised(function, Config("swiglu", limit, _alpha(function, alpha)),
                    x, up, expert_ids, bias, quant_dtype, group_size, scale,
                    scale_dtype, round_mode, shuffle_scale)


def scaled_silu_and_mul(
    x: jax.Array,
    scale: jax.Array,
    up: jax.Array | None = None,
    *,
    quant_dtype: Any = None,
    limit: float = 0.0,
) -> jax.Array:
  """`silu_and_mul(x, up) / scale`, rounded: silu_and_mul_quant's `q`.

  Args:
    x: as in silu_and_mul_quant.
    scale: a number, or of shape [1].
    up: as in silu_and_mul_quant.
    quant_dtype: float8_e4m3fn, float8_e4m3fnuz or int8; by default
      float8_dtype().
    limit: as in silu_and_mul.

  Returns:
    quant_dtype [..., d]. There is no gradient.

  Raises:
    TypeError: as silu_and_mul_quant.
    ValueError: as silu_and_mul_quant.
  """
  function = "scaled_silu_and_mul"
  arguments.check_is_array(function, "scale", scale, optional=False)
  return _quantised(function, Config("silu", limit), x, up, None, None,
                    quant_dtype, None, scale, None, "up", False)[0]
